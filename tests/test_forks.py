"""Locks that a forked child has free."""

from __future__ import annotations

import threading

from upconv.forks import Lock


def test_a_child_has_the_lock_free_and_its_parents_section_ends() -> None:
    lock = Lock(threading.RLock)
    with lock.now:
        lock._renew()  # as in a child that is forked here
        entered = []
        other = threading.Thread(target=lambda: entered.append(lock.now.acquire(timeout=5)))
        other.start()
        other.join()
    assert entered == [True]


def test_a_lock_excludes_other_threads() -> None:
    lock = Lock()
    with lock.now:
        other = threading.Thread(target=lambda: found.append(lock.now.acquire(blocking=False)))
        found: list[bool] = []
        other.start()
        other.join()
    assert found == [False] and lock.now.acquire(blocking=False)
