"""Kernels that are compiled fast and run until their final forms, compiled meanwhile in other threads, are there.

NVRTC takes up to 3.8 s for long straight code, which nobody is to wait for at a layer's first call. Both forms compute
the same to the last bit, so that nobody sees when one takes over from the other, but by the time: a quick one's may be
1.5 times as long. Where launches are kept, in a recording or in a CUDA graph, the final form is waited for.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from upconv import forks
from upconv.cuda.gpu import capturing

if TYPE_CHECKING:
    from upconv.cuda.compile.launch import Launches

# Threads at most: calls compile quick forms beside them, maybe in several processes.
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_THREADS = max(1, min(4, _CORES // 2))

_lock = forks.Lock()
_slots = forks.Lock(lambda: threading.Semaphore(_THREADS))
_pending: WeakSet[Provisional] = WeakSet()


class Provisional:
    """A `launch.Launcher` of a kernel's quick form, until its final form is there; the same to callers.

    Args:
        quick: loads the quick form.
        compile: compiles the final form, in another thread; its result means nothing. It begins at once.
        final: loads what ``compile`` compiled; compiles it where that has not begun.
    """

    def __init__(
        self, quick: Callable[[], Launches], compile: Callable[[], object], final: Callable[[], Launches]
    ) -> None:
        self._final = final
        self._settling = threading.Lock()
        self._compiled: Future[Any] | None = _begin(compile)
        try:
            self._launcher = quick()
        except BaseException:
            self._compiled.cancel()
            raise
        with _lock.now:
            _pending.add(self)

    def __call__(self, stream: Any, grid: int, args: tuple[Any, ...], dependent: bool = False) -> None:
        """`Launcher.__call__`. Errors: its own, and the driver's for a final form that cannot be loaded."""
        compiled = self._compiled
        if compiled is not None and (compiled.done() or capturing()):
            self.settle()
        self._launcher(stream, grid, args, dependent)

    def settle(self) -> None:
        """Waits for the final form, which is launched from then on.

        One that NVRTC rejects is told of in a warning, and the quick form stays. Errors: the driver's; the next call
        tries again.
        """
        from upconv.cuda.compile.nvrtc import CompileError

        with self._settling:
            if self._compiled is None:
                return
            if not self._compiled.cancel():
                wait([self._compiled])  # what it failed with, `final` fails with again
            try:
                self._launcher = self._final()
            except CompileError as error:
                text = f"A kernel keeps its quick form, which may take 1.5 times as long: {error}"
                warnings.warn(text, RuntimeWarning, 2)
            self._compiled = None
            with _lock.now:
                _pending.discard(self)

    def final(self) -> Launches:
        """`settle`, and what is launched from then on."""
        self.settle()
        return self._launcher

    def abandon(self) -> None:
        """Expects no other thread any more to compile the final form, nor to be about to load it."""
        self._settling = threading.Lock()
        self._compiled = Future()
        self._compiled.cancel()

    def compiling(self) -> bool:
        """Whether the final form is not compiled yet."""
        compiled = self._compiled
        return compiled is not None and not compiled.done()


def pending() -> bool:
    """Whether a kernel's final form is being compiled, or is to be."""
    if not _pending:
        return False
    with _lock.now:
        return any(each.compiling() for each in _pending)


def settle() -> None:
    """Waits for the final forms of all kernels that are loaded."""
    while _pending:
        with _lock.now:
            each = next(iter(_pending), None)
        if each is not None:
            each.settle()


def _begin(job: Callable[[], Any]) -> Future[Any]:
    """Has a thread do it; what no thread has begun when the program ends is left undone."""
    future: Future[Any] = Future()

    def work() -> None:
        with _slots.now:
            if not threading.main_thread().is_alive():  # launches of other threads compile what they need
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)

    try:
        threading.Thread(target=work, name="upconv-compile").start()
    except RuntimeError:  # as many threads as the machine allows, or the program ends: the next launch compiles it
        future.cancel()
    return future


def _forked() -> None:
    """A child has no thread of its parent's, so that what these were compiling its next launch compiles."""
    for each in _pending:
        each.abandon()


forks.in_child(_forked)
