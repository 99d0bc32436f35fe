"""What a pass does, as a list: the memory that it allocates and the kernels that it launches, with their arguments.

A pass runs once in recording mode, on placeholder tensors. What it asks PyTorch for (allocations, a bias' sum, a plain
convolution's operator) is noted by a dispatch mode. What our kernels do is not run: their records
(`upconv.cuda.launches`) say which arguments are addresses, and of what. `upconv.replay.native` replays the list. A pass
that asks PyTorch for anything else, such as a copy of an operand, stays in Python.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from upconv.cuda.compile import launch
from upconv.cuda.compile.launch import as_run
from upconv.cuda.launches import Int, Launch, Map, Operand, Pointer
from upconv.cuda.prepared import Program

Pass = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
"""A pass on its operands; its results."""
MADE, ZEROS = -1, -2
"""Kinds of buffers that are no operand: allocated in the pass, and words that outlive it and are zeros."""
MAKE, RELEASE, SUM, CAST, ADD, CONVOLUTION, BACKWARD, LAUNCH, COOPERATIVE, DEPENDENT = range(10)
"""Kinds of steps."""

_START = 1 << 44  # of the placeholders' addresses, by which tensors are told apart
_APART = 1 << 21  # bytes at least between placeholders
_aten = torch.ops.aten
_ALLOCATIONS = frozenset((
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
))  # fmt: skip
_VIEWS = frozenset((
    _aten.view.default, _aten.alias.default, _aten.detach.default, _aten.unsqueeze.default, _aten.squeeze.dim,
    _aten.as_strided.default, _aten.slice.Tensor, _aten.select.int, _aten.permute.default, _aten.transpose.int,
    _aten.expand.default, _aten.unbind.int, _aten.split.Tensor,
))  # fmt: skip
_SUM, _CAST, _ADD = _aten.sum.dim_IntList, _aten._to_copy.default, _aten.add_.Tensor
_CONVOLUTION, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default


class NoTape(Exception):
    """A pass does what cannot be replayed; the message says what."""


@dataclass(frozen=True)
class Buffer:
    """Memory that a pass reads or writes: operand ``kind`` of the pass, or `MADE`, or `ZEROS`."""

    kind: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        if 0 in self.sizes:
            return 0
        return (1 + sum((n - 1) * s for n, s in zip(self.sizes, self.strides))) * self.dtype.itemsize


@dataclass(frozen=True)
class Step:
    """One of a pass: ``buffers`` are what it reads, then what it makes (-1 for none), ``numbers`` its other arguments.

    Of a launch ``words`` are its arguments, 8 bytes each, and ``places`` those among them that are addresses: the word,
    the buffer and the bytes from its start.
    """

    kind: int
    buffers: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    function: int = 0
    grid: int = 0
    block: int = 0
    shared: int = 0
    words: tuple[int, ...] = ()
    places: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Tape:
    """A pass that can be replayed; ``results`` are buffers, None where there is none."""

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    results: tuple[int | None, ...]

    def packed(self, number: Callable[[torch.dtype], int]) -> bytes:
        """As ``native.cpp`` reads it: words of 64 bits. ``number``: what stands for a dtype there."""
        words = [len(self.buffers)]
        for b in self.buffers:
            words += [b.kind, number(b.dtype), len(b.sizes), *b.sizes, len(b.strides), *b.strides]
        words.append(len(self.steps))
        for s in self.steps:
            words.append(s.kind)
            if s.kind < LAUNCH:
                words += [len(s.buffers), *s.buffers, len(s.numbers), *s.numbers]
                continue
            words += [s.function, s.grid, s.block, s.shared, len(s.words), *s.words, len(s.places)]
            words += [value for place in s.places for value in place]
        words += [len(self.results), *(-1 if r is None else r for r in self.results)]
        return array("Q", [word & (1 << 64) - 1 for word in words]).tobytes()


Blob = Callable[[Tensor, int, tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor that is nowhere: like which (its device), at which address, its sizes, strides and dtype."""


def record(run: Pass, operands: Sequence[Tensor | None], like: Tensor, blob: Blob) -> Tape:
    """A pass's tape, for operands that lie as these do, whose values are not read.

    Args:
        run: the pass; its kernels are loaded. Launches of the calling thread are not made meanwhile.
        operands: those of the pass, on any device; None for one that it does not have.
        like: a tensor on the device where the pass runs.
        blob: `upconv.replay.native`'s.

    Raises:
        NoTape: the pass does what cannot be replayed.
    """
    recording = _Recording(operands, like, blob)
    results = recording.run(run)
    steps = _with_releases(recording.steps, recording.buffers, results)
    return Tape(tuple(recording.buffers), tuple(steps), results)


class _Recording(TorchDispatchMode):
    """A run whose operands and allocations are placeholders, and whose launches are noted."""

    def __init__(self, operands: Sequence[Tensor | None], like: Tensor, blob: Blob) -> None:
        super().__init__()
        self._blob, self._next, self._like = blob, _START, like
        self.buffers: list[Buffer] = []
        self.addresses: list[int] = []
        self.steps: list[Step] = []
        self._made: list[Tensor] = []  # alive, so that no two are one object
        self._zeros: dict[int, int] = {}
        self.operands = [None if t is None else self._buffer(_lying(i, t)) for i, t in enumerate(operands)]

    def run(self, run: Pass) -> tuple[int | None, ...]:
        """The buffers of the results."""
        with launch.noted_by(self), self:
            found = run(self.operands)  # type: ignore[arg-type]
        return tuple(None if t is None else self._whole(t) for t in found)

    def _buffer(self, buffer: Buffer) -> Tensor:
        address, self._next = self._next, self._next + _up(buffer.bytes)
        self.buffers.append(buffer)
        self.addresses.append(address)
        made = self._blob(self._like, address, buffer.sizes, buffer.strides, buffer.dtype)
        self._made.append(made)
        return made

    def _found(self, t: Tensor) -> int:
        """The buffer that begins where a tensor does. Errors: NoTape for one that is none."""
        if t.data_ptr() not in self.addresses:
            raise NoTape("a tensor is no memory of its own")
        return self.addresses.index(t.data_ptr())

    def _whole(self, t: Tensor) -> int:
        """The buffer that a tensor is. Errors: NoTape for one that is none."""
        found = self._found(t)
        b = self.buffers[found]
        if (tuple(t.shape), tuple(t.stride()), t.dtype) != (b.sizes, b.strides, b.dtype):
            raise NoTape("a tensor is a view")
        return found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _VIEWS:
            return function(*args, **kwargs)
        if function is _ADD:
            return self._added(*args, **kwargs)
        numbers: tuple[int, ...] = ()
        if function in _ALLOCATIONS:
            kind, reads = MAKE, []
            kwargs = {**kwargs, "device": torch.device("meta")}
        elif function is _SUM:
            kind, reads = SUM, [args[0]]
            dims = [d % args[0].dim() for d in args[1]]
            if sorted(dims) != [d for d in range(args[0].dim()) if d != 1] or (len(args) > 2 and args[2]):
                raise NoTape("it takes sums over other dimensions than a bias")
        elif function is _CAST:
            kind, reads = CAST, [args[0]]
            if set(kwargs) != {"dtype"}:
                raise NoTape("it copies a tensor for something else than its dtype")
        elif function in (_CONVOLUTION, _BACKWARD):
            kind, reads = CONVOLUTION if function is _CONVOLUTION else BACKWARD, list(args[:3])
            settings = args[3:9] if function is _CONVOLUTION else args[4:10]
            stride, padding, dilation, transposed, output_padding, groups = settings
            if transposed or any(output_padding) or groups != 1 or (function is _BACKWARD and args[10][2]):
                raise NoTape("it calls an operator of PyTorch's that is no plain convolution's")
            numbers = (*stride, *padding, *dilation)
        else:
            raise NoTape(f"it calls {function}")
        read = tuple(-1 if t is None else self._whole(t) for t in reads)
        found = function(*map(_meta, args), **kwargs)
        several = isinstance(found, tuple)
        made = [None if t is None else self._buffer(_lying(MADE, t)) for t in (found[:2] if several else (found,))]
        new = iter(range(len(self.buffers) - sum(t is not None for t in made), len(self.buffers)))
        self.steps.append(Step(kind, (*read, *(-1 if t is None else next(new) for t in made)), numbers))
        return (*made, None) if several else made[0]

    def _added(self, to: Tensor, bias: Tensor) -> Tensor:
        """A bias, of the second dimension, to a result."""
        if bias.dim() != to.dim() - 1 or bias.numel() != bias.shape[0] or bias.shape[0] != to.shape[1]:
            raise NoTape("it adds a tensor that is no bias")
        found = self._found(bias)
        if self.buffers[found].sizes != (bias.shape[0],):
            raise NoTape("it adds a part of a tensor")
        self.steps.append(Step(ADD, (self._whole(to), found)))
        return to

    # --- launches (`launch.Notes`) ---

    def launched(self, program: Program, tensors: Sequence[Tensor | None], fresh: bool) -> None:
        at: dict[Operand, int] = {
            name: self._found(t) for name, t in zip(program.operands, tensors) if t is not None
        }  # fmt: skip
        for scratch in program.scratch:
            at[scratch] = len(self.buffers)
            self._buffer(Buffer(MADE, torch.int32, (-(-scratch.bytes // 4),), (1,)))
            self.steps.append(Step(MAKE, (at[scratch],)))
        for zeros, counters in program.zeros:
            if id(counters) not in self._zeros:
                self._zeros[id(counters)] = len(self.buffers)
                self._buffer(Buffer(ZEROS, torch.int32, (zeros.words,), (1,)))
            at[zeros] = self._zeros[id(counters)]
        for one, launcher in zip(program.launches, program.final()):
            launcher.kernel.ready(program.device)
            self.steps.append(_step(one, launcher.kernel.handle, at, fresh))


def _step(one: Launch, function: int, at: Mapping[Operand, int], fresh: bool) -> Step:
    """A launch on buffers."""
    words: list[int] = []
    places: list[tuple[int, int, int]] = []
    for a in one.arguments:
        if isinstance(a, Pointer | Map) and a.operand not in at:
            words.append(0)  # a null pointer
        elif isinstance(a, Pointer):
            places.append((len(words), at[a.operand], a.offset))
            words.append(0)
        elif isinstance(a, Map):
            map_words = struct.unpack("<16Q", a.encoded(_START))
            if map_words[0] != _START + a.tensor.begin:
                raise NoTape("a tensor map's first word is not its tensor's address")
            places.append((len(words), at[a.operand], a.tensor.begin))
            words += map_words
        else:
            words += struct.unpack("<Q", as_run("i" if isinstance(a, Int) else "q", (a.value,)))  # type: ignore[attr-defined]
    kind = COOPERATIVE if one.cooperative else DEPENDENT if one.dependent and fresh else LAUNCH
    return Step(kind, (), (), function, one.grid, one.threads, one.shared_bytes, tuple(words), tuple(places))


def _lying(kind: int, like: Tensor) -> Buffer:
    return Buffer(kind, like.dtype, tuple(like.shape), tuple(like.stride()))


def _up(size: int) -> int:
    return -(-size // _APART) * _APART + _APART


def _meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _with_releases(steps: list[Step], buffers: Sequence[Buffer], results: Sequence[int | None]) -> list[Step]:
    """The steps, and behind the last that needs it the end of each buffer that is no result."""
    last: dict[int, int] = {}
    for at, s in enumerate(steps):
        last.update(dict.fromkeys((*s.buffers, *(buffer for _, buffer, _ in s.places)), at))
    last.pop(-1, None)
    ending: dict[int, list[int]] = {}
    for i, at in last.items():
        if buffers[i].kind == MADE and i not in results:
            ending.setdefault(at, []).append(i)
    found = []
    for at, s in enumerate(steps):
        found.append(s)
        found += [Step(RELEASE, (i,)) for i in ending.get(at, ())]
    return found
