"""Locks that a forked child has free."""

from __future__ import annotations

import os
import threading

from upconv.cuda import engine


def test_a_child_forgets_what_its_parents_threads_collect() -> None:
    """Calls that are collected take a longer way; the thread that forks may be within itself."""
    inside, done = threading.Event(), threading.Event()

    def collect() -> None:
        with engine.collecting():
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=collect)
    thread.start()
    inside.wait(10)
    try:
        with engine.collecting(), engine.collecting():
            child = os.fork()
            if not child:
                os._exit(0 if engine._collectors == {threading.get_ident()} else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert len(engine._collectors) == 2
    finally:
        done.set()
        thread.join()
    assert not engine._collectors
