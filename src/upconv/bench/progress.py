"""What a long run is at, on stderr: a bar in a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

EVERY = 10.0
"""Seconds between two lines where there is no terminal; the first one comes at once."""


class Progress(Bar):
    """Called with what begins now, and how many of how many parts are done where that is known.

    with Progress() as tell:
        tell("kb57", 0, 12)
    """

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        screen = Console(stderr=True)
        super().__init__(*columns, console=screen, transient=True, disable=not screen.is_terminal)
        self._last, self._only = -1e9, self.add_task("", total=None)

    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Shows ``text``; ``done`` of ``total`` parts are behind it."""
        self.update(self._only, description=text, completed=done, total=total)
        now = time.monotonic()
        if self.disable and now - self._last >= EVERY:
            self._last = now
            count = "" if done is None or total is None else f"{done} of {total} done; "
            print(f"{count}{text}", file=sys.stderr, flush=True)
