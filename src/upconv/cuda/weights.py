"""Packed weights: made anew at every call, and kept only of layers that the user has frozen.

A kernel reads weights in an order of its own, so most calls pack them first. PyTorch cannot tell whether a weight has
changed since the last call: fused optimizers, FSDP, ``param.data`` updates, replayed CUDA graphs, DLPack aliases and
other processes change it without moving its version counter. So nothing is kept on the strength of that counter.

`upconv.freeze` is the user's promise that weights stay. Of those weights alone copies are kept, one for each packing
and at most `MOST_COPIES` of a weight. Each call checks what PyTorch can tell: storage, address, strides and version. A
visible change ends the promise, and the call packs anew.

Packed weights are not kept either

- inside a captured graph, which outlives any promise,
- where a compiled graph's memory pool allows no allocation that outlives a run,
- of inference tensors, which have no version counter.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Hashable
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from upconv import forks
from upconv.cuda.gpu import current_stream

MOST_COPIES = 2
"""Packings kept of one weight: a layer that runs at two sizes or in two dtypes may need two."""


def _state(weight: Tensor) -> tuple[int, tuple[int, ...], bool]:
    """What PyTorch can tell of a weight's values without reading them, beside its address: first its version."""
    return weight._version, weight.stride(), weight.is_neg()


class Packed:
    """Packed weights, and the streams that may read them."""

    __slots__ = ("event", "streams", "tensor")

    def __init__(self, tensor: Tensor, stream: int, index: int) -> None:
        self.tensor, self.streams = tensor, {stream}
        self.event = _record(index)

    def follow(self, stream: int, index: int) -> None:
        """Lets another stream read them: it waits until they are packed, and their memory waits for it."""
        _wait(self.event, self.tensor, index)
        self.streams.add(stream)


def _record(index: int) -> Any:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(index))
    return event


def _wait(event: Any, tensor: Tensor, index: int) -> None:
    current = torch.cuda.current_stream(index)
    current.wait_event(event)
    tensor.record_stream(current)


class Frozen:
    """One frozen weight and its packed copies, the oldest first."""

    __slots__ = ("packed", "state", "storage")

    def __init__(self, weight: Tensor) -> None:
        storage = weight.untyped_storage()
        at = id(storage), weight.data_ptr()

        def gone(storage: object) -> None:  # of no entry, since a cycle would hold the copies until a collection
            found = frozen.get(at)
            if found is not None and found.storage is storage:
                frozen.pop(at, None)

        # PyTorch preserves a storage's Python object as long as the storage. So the reference ends before the address
        # can be given out again.
        self.storage = weakref.ref(storage, gone)
        self.state = _state(weight)
        self.packed: dict[Hashable, Packed | None] = {}
        """By packing and dtype; None where the kernel reads the weight as it is."""


frozen: dict[tuple[int, int], Frozen] = {}
"""The frozen weights, by the `id` of their storage and their address."""
_MISSING: Any = object()
promises = ctypes.c_int64()
"""How often a weight was frozen. A replayed backward looks whether any was since its forward (``native.cpp``)."""
_lock = forks.Lock()

_numbers = count()


@lru_cache(maxsize=4096)
def number(packing: Hashable) -> int:
    """A number for a way of packing, since the hash of its description would cost more than the rest of a look-up.

    None is given twice: what is forgotten is packed once more.
    """
    return next(_numbers)


def freeze(weight: Tensor) -> None:
    """Notes the promise that a weight stays as it is, so that packed copies of it may be kept.

    Raises:
        RuntimeError: the weight is an inference tensor, whose changes PyTorch does not count.
    """
    with _lock.now:
        frozen[id(weight.untyped_storage()), weight.data_ptr()] = Frozen(weight)
        promises.value += 1


def thaw(weight: Tensor) -> None:
    """Ends the promise and drops the packed copies; does nothing for a weight that is not frozen."""
    if frozen:
        frozen.pop((id(weight.untyped_storage()), weight.data_ptr()), None)


def is_frozen(weight: Tensor) -> bool:
    """Whether the promise for a weight holds, as far as PyTorch can tell."""
    return held(weight) is not None


def held(weight: Tensor) -> Frozen | None:
    """The weight's entry, if nothing can be seen to have changed; else the promise ends."""
    if not frozen or not torch._C._has_storage(weight):
        return None
    storage = weight.untyped_storage()
    at = id(storage), weight.data_ptr()
    found = frozen.get(at)
    if found is None or weight.is_inference():
        return None
    state = _state(weight)
    if found.storage() is storage and found.state == state:
        return found
    if found.storage() is not storage or found.state[0] < state[0]:
        frozen.pop(at, None)
    return None  # else an alias, of which nothing was promised


def kept(
    entry: Frozen, weight: Tensor, packing: int, index: int, pack: Callable[[Tensor], Tensor] | None
) -> Tensor | None:
    """The packed copy of a frozen weight, made if need be, or the weight itself where the kernel reads it as it is.

    None where the caller must pack anew.

    Args:
        entry: `held` for this call.
        weight: as the layer has it, on the device.
        packing: of `number`: what the copy depends on beside the weight.
        index: of the device, whose current stream will read the copy.
        pack: makes a copy, on the current device; None where nothing may be allocated that outlives the call.
    """
    stream, key = current_stream(index), (packing, weight.dtype)
    found = entry.packed.get(key, _MISSING)
    if found is None:
        return weight
    if found is not _MISSING:
        if stream not in found.streams:
            found.follow(stream, index)
        return found.tensor
    if pack is None:
        return None
    tensor = pack(weight.resolve_neg())
    own = tensor.untyped_storage() is weight.untyped_storage()
    with _lock.now:
        while key not in entry.packed and len(entry.packed) >= MOST_COPIES:
            del entry.packed[next(iter(entry.packed))]
        entry.packed[key] = None if own else Packed(tensor, stream, index)
    return tensor
