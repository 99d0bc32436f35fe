"""Calls that come again: what they launch, as a graph that one call of the driver launches.

A training step brings a layer's tensors to the same addresses again and again, since PyTorch's allocator gives out what
was freed. Then each launch has the arguments that it had before, and a CUDA graph of them costs the host as much as one
kernel, however many they are (NOTES: 4 launches took 42 to 52 us among the work of a step and 14 as a graph, one 24 and
14; in a loop 20 to 29 and 1.7; on the GPU 5.5 us for four empty kernels, and 4.3).

So a runner (`upconv.cuda.engine`) leaves its launches to a `Kind`, which knows what memory they ask PyTorch for beside
the call's tensors, allocates it ahead as one block, and looks the addresses up. Nothing is assumed of a kernel family
but that it launches by `launch.Launcher`: PyTorch's dispatcher is watched during a call, and one that asks it for more
than memory (a copy, say) is never recorded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from upconv.cuda import launch
from upconv.cuda.gpu import current_stream

ENABLED = True
"""Whether calls are recorded and replayed at all."""
MOST = 128
"""Graphs kept at a time, of all runners (NOTES: 98 KB of the GPU's memory each)."""
MOST_ROOM = 16 << 20
"""Bytes that a replayed call may take beside its tensors: it has all at once, where others free some before the end."""
AFTER = 2
"""Calls with the same addresses before the one that is recorded."""

_MOST_SEEN = 64  # addresses that are counted; sizes that change have new ones at every call
_MISSES = 64  # calls in turn without a graph, behind which looking for one pauses
_PAUSE = 1024  # calls
_ALIGNMENT = 512  # of a part of the block, as PyTorch's allocations have
_NEW = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        _NEW.new_empty_strided.default,
        _NEW.new_empty.default,
        _NEW.empty_strided.default,
        _NEW.empty.memory_format,
        _NEW.empty_like.default,
    }
)


class _Room:
    """Memory that a call asked for: how, and what it got."""

    __slots__ = ("asked", "at", "dtype", "elements", "shape", "strides")

    def __init__(self, asked: tuple[Any, ...], given: Tensor, at: int) -> None:
        self.asked, self.at = asked, at
        self.shape, self.strides, self.dtype = tuple(given.shape), given.stride(), given.dtype
        self.elements = given.untyped_storage().nbytes() // given.itemsize

    def of(self, block: Tensor) -> Tensor:
        part = block[self.at : self.at + self.elements * self.dtype.itemsize].view(self.dtype)
        return part.as_strided(self.shape, self.strides, part.storage_offset())


def _asked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What an allocation was called with, but for the tensor whose device it takes."""
    return func, [a for a in args if not isinstance(a, Tensor)], kwargs


class _Watch(TorchDispatchMode):
    """Notes the memory that a call asks PyTorch for, and whether it asks for anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[_Room] = []
        self.bytes = 0
        self.only_memory = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.rooms.append(_Room(_asked(func, args, kwargs or {}), out, self.bytes))
            self.bytes += -(-out.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        elif not func.is_view:
            self.only_memory = False
        return out


class _Changed(RuntimeError):
    """A call asked for other memory than it did before."""


class _Supply(TorchDispatchMode):
    """Gives a call parts of a block where it asks PyTorch for memory."""

    def __init__(self, rooms: list[_Room], block: Tensor | None) -> None:
        super().__init__()
        self._next = iter(rooms)
        self._block = block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOCATIONS:
            room = next(self._next, None)
            if room is None or self._block is None or room.asked != _asked(func, args, kwargs or {}):
                raise _Changed
            return room.of(self._block)
        if not func.is_view:
            raise _Changed
        return func(*args, **(kwargs or {}))


class Kind:
    """Calls of a runner that differ by addresses alone."""

    __slots__ = ("__weakref__", "_bytes", "_device", "_misses", "_rooms", "_seen", "graphs", "open", "pause")

    def __init__(self, device: int) -> None:
        self._device = device
        self._bytes = -1  # not known yet
        self._rooms: list[_Room] = []
        self._seen: dict[tuple[int, ...], int] = {}
        self._misses = 0
        self.open = True
        """Whether calls can be recorded at all."""
        self.pause = 0
        """Calls for which no graph is looked for."""
        self.graphs: dict[tuple[int, ...], launch.Graph] = {}

    def __call__(
        self, addresses: tuple[int, ...], like: Tensor, launches: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        """Calls ``launches(*args)``, or launches the graph of an earlier call with these addresses.

        ``addresses``: of all tensors that the launches read and write; ``like``: a tensor on the device, which is the
        current one; its current stream is not captured. Errors: those of ``launches`` and `launch.Graph`.
        """
        if self._bytes < 0:
            self._watch(launches, args)
            return
        block, at = None, 0
        if self._bytes:
            block = like.new_empty_strided((self._bytes,), (1,), dtype=torch.uint8)
            at = block.data_ptr()
        key = (*addresses, at, current_stream(self._device))
        graph = self.graphs.get(key)
        if graph is None:
            graph = self._recorded(key, block, launches, args)
            if graph is None:
                del block  # for what the call allocates
                launches(*args)
                return
        self._misses = 0
        graph()

    def _watch(self, launches: Callable[..., object], args: tuple[Any, ...]) -> None:
        watch = _Watch()
        with watch:
            launches(*args)
        if watch.only_memory and watch.bytes <= MOST_ROOM:
            self._rooms, self._bytes = watch.rooms, watch.bytes
        else:
            self.open = False

    def _recorded(
        self, key: tuple[int, ...], block: Tensor | None, launches: Callable[..., object], args: tuple[Any, ...]
    ) -> launch.Graph | None:
        """A graph of this call, if its addresses were seen before and there is room for one more."""
        self._misses += 1
        if self._misses >= _MISSES:
            self._misses, self.pause = 0, _PAUSE
        count = self._seen.get(key, 0)
        if count < AFTER:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[key] = count + 1
            return None
        if not _room_for_one():
            self.pause = _PAUSE
            return None
        try:
            with _Supply(self._rooms, block):
                graph = launch.record(self._device, lambda: launches(*args))
        except RuntimeError:  # a driver that cannot; what is wrong with the launches, they say when they are called
            self.open = False
            return None
        del self._seen[key]
        self.graphs[key] = graph
        with _lock:
            _kept.append((weakref.ref(self), key))
        return graph


class Replays:
    """What one runner launches, by kinds of calls."""

    __slots__ = ("_device", "_kinds")

    def __init__(self, device: int) -> None:
        self._device = device
        self._kinds: dict[Hashable, Kind] = {}

    def kind(self, what: Hashable) -> Kind | None:
        """The calls of one description; None for the first of them, which loads what others find, and where no graph
        is to be looked for.

        ``what``: all that launches depend on beside addresses.
        """
        found = self._kinds.get(what)
        if found is None:
            self._kinds[what] = Kind(self._device)
            return None
        if found.pause:
            found.pause -= 1
            return None
        return found if found.open and ENABLED else None


_kept: list[tuple[weakref.ref[Kind], tuple[int, ...]]] = []
"""Where the graphs are, the oldest first."""
_lock = threading.Lock()


def _room_for_one() -> bool:
    """Whether one more graph may be kept; those go that were not used since the last time that there were too many."""
    with _lock:
        if len(_kept) < MOST:
            return True
        kept = _kept.copy()
        _kept.clear()
        for kind, key in kept:
            owner = kind()
            graph = None if owner is None else owner.graphs.get(key)
            if owner is None or graph is None:
                continue
            if graph.used:
                graph.used = False
                _kept.append((kind, key))
            else:
                owner.graphs.pop(key, None)
        return len(_kept) < MOST


def forget() -> None:
    """Drops all graphs; calls that come again are recorded anew."""
    with _lock:
        kept = _kept.copy()
        _kept.clear()
    for kind, key in kept:
        owner = kind()
        if owner is not None:
            owner.graphs.pop(key, None)
