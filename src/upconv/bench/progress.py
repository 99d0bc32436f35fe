"""What a long run is at, on stderr: a bar in a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

EVERY = 10.0
"""Seconds between two lines where there is no terminal; the first one comes at once."""


class Progress:
    """Called with what begins now, and how many of how many parts are done where that is known.

        with Progress() as tell:
            tell("kb57", 0, 12)

    Args:
        every: seconds between two lines where stderr is no terminal; None for `EVERY`.
    """

    def __init__(self, every: float | None = None) -> None:
        screen = Console(stderr=True)
        self._every, self._last = EVERY if every is None else every, -1e9
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=screen, transient=True) if screen.is_terminal else None
        self._task = self._bar.add_task("", total=None) if self._bar else None

    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Shows ``text``; ``done`` of ``total`` parts are behind it."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            count = "" if done is None or total is None else f"{done} of {total} done; "
            print(f"{count}{text}", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
