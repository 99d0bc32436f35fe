"""What a forked child does about locks: the threads that held them are its parent's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


def in_child(then: Callable[[], object]) -> None:
    """Has something done in every child that is forked from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=then)


class Lock:
    """A module's lock, free in a forked child: ``with lock.now``. ``make``: `threading.Lock` or `threading.RLock`."""

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make = make
        self._renew()
        in_child(self._renew)

    def _renew(self) -> None:
        self.now = self._make()
        """This process's lock. Who holds it across a fork gives back the one that it took."""
