"""What a pass does, as data: the memory that it allocates and the kernels that it launches, with their arguments.

The engine states a pass for operands of known layouts (`upconv.cuda.engine.record_forward` and others), and
``replay/native.cpp`` repeats it. Nothing is computed meanwhile: operands and allocations are tensors on PyTorch's meta
device, and launches come from their records (`upconv.cuda.launches`). A pass that does anything else, such as copy an
operand, has no recording.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from upconv.cuda.launches import Int, Launch, Long, Map, Operand, Pointer
from upconv.cuda.prepared import Program
from upconv.problem import Problem

MADE, ZEROS = -1, -2
"""Kinds of buffers that are no operand: allocated in the pass, and words that outlive it and are zeros."""
MAKE, RELEASE, SUM, CAST, ADD, CONVOLUTION, BACKWARD, LAUNCH, COOPERATIVE, DEPENDENT = range(10)
"""Kinds of steps."""
_ADDRESS = 1 << 44  # at which maps are encoded; where it is in a map, a replay writes its tensor's


class Unrecorded(Exception):
    """A pass does what cannot be recorded; the message says what."""


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


class Recording:
    """A pass as it is stated, step by step.

    Args:
        device: the index of the device on which it runs, the current one.
        operands: tensors of the layouts that it is stated for, whose values are not read; None for one that it does not
            have. Its own, on the meta device, are in ``operands``.
    """

    def __init__(self, device: int, operands: Sequence[Tensor | None]) -> None:
        self.device = device
        self.kinds: list[int] = []
        self.buffers: list[Tensor] = []
        """On the meta device."""
        self.steps: list[Step] = []
        self._numbers: dict[int, int] = {}  # of buffers by their `id`
        self._zeros: dict[int, int] = {}  # of counters' buffers, by the counters' `id`
        self.operands = [None if t is None else self._buffer(i, _like(t)) for i, t in enumerate(operands)]

    def refuse(self, reason: str) -> NoReturn:
        """Errors: Unrecorded, always."""
        raise Unrecorded(reason)

    def _buffer(self, kind: int, like: Tensor) -> Tensor:
        self._numbers[id(like)] = len(self.buffers)
        self.buffers.append(like)
        self.kinds.append(kind)
        return like

    def _of(self, tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
        return tuple(-1 if t is None else self._numbers[id(t)] for t in tensors)

    def make(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocates memory."""
        found = self._buffer(MADE, torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
        self.steps.append(Step(MAKE, self._of((found,))))
        return found

    def cast(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor in a dtype, which may be its own."""
        if t.dtype is dtype:
            return t
        found = self._buffer(MADE, t.to(dtype))
        self.steps.append(Step(CAST, self._of((t, found))))
        return found

    def sum(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient for a bias, by PyTorch."""
        found = self._buffer(MADE, torch.empty(grad.shape[1], dtype=dtype, device="meta"))
        self.steps.append(Step(SUM, self._of((grad, found))))
        return found

    def add(self, to: Tensor, bias: Tensor) -> None:
        """Adds a bias to a result."""
        self.steps.append(Step(ADD, self._of((to, bias))))

    def convolution(self, p: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """PyTorch's convolution, which is the gradient for the input of a problem."""
        found = self._buffer(MADE, x.new_empty(p.input_shape))
        numbers = (*p.stride, *p.padding, *p.dilation)
        self.steps.append(Step(CONVOLUTION, self._of((x, weight, bias, found)), numbers))
        return found

    def convolution_gradients(
        self, p: Problem, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """PyTorch's gradients of the same for input and weight."""
        made = [self._buffer(MADE, torch.empty_like(t)) if asked else None for t, asked in zip((x, weight), mask)]
        numbers = (*p.stride, *p.padding, *p.dilation)
        self.steps.append(Step(BACKWARD, self._of((grad, x, weight, *made)), numbers))
        return made[0], made[1]

    def run(self, program: Program, tensors: Sequence[Tensor | None], fresh: bool) -> None:
        """Launches a program, as it is called."""
        at: dict[Operand, int] = {
            name: number for name, number in zip(program.operands, self._of(tensors)) if number >= 0
        }
        for scratch in program.scratch:
            (at[scratch],) = self._of((self.make((-(-scratch.bytes // 4),), (1,), torch.int32),))
        for zeros, counters in program.zeros:
            if id(counters) not in self._zeros:
                self._zeros[id(counters)] = len(self.buffers)
                self._buffer(ZEROS, torch.empty(zeros.words, dtype=torch.int32, device="meta"))
            at[zeros] = self._zeros[id(counters)]
        for one, launcher in zip(program.launches, program.launchers()):
            launcher.kernel.ready(self.device)
            self.steps.append(step(one, launcher.kernel.handle, at, fresh))

    def packed(self, results: Sequence[Tensor | None], number: Callable[[torch.dtype], int]) -> bytes:
        """The pass with these results as ``native.cpp`` reads it: words of 64 bits.

        ``number``: what stands for a dtype there.
        """
        words = [len(self.buffers)]
        for kind, b in zip(self.kinds, self.buffers):
            words += [kind, number(b.dtype), b.dim(), *b.shape, b.dim(), *b.stride()]
        ends = self._of(results)
        steps = with_releases(self.steps, self.kinds, ends)
        words.append(len(steps))
        for s in steps:
            words.append(s.kind)
            if s.kind < LAUNCH:
                words += [len(s.buffers), *s.buffers, len(s.numbers), *s.numbers]
                continue
            words += [s.function, s.grid, s.block, s.shared, len(s.words), *s.words, len(s.places)]
            words += [value for place in s.places for value in place]
        words += [len(ends), *ends]
        return array("Q", [word & (1 << 64) - 1 for word in words]).tobytes()


def step(one: Launch, function: int, at: Mapping[Operand, int], fresh: bool) -> Step:
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
            map_words = struct.unpack("<16Q", a.encoded(_ADDRESS))
            if map_words[0] != _ADDRESS + a.tensor.begin:
                raise Unrecorded("a tensor map's first word is not its tensor's address")
            places.append((len(words), at[a.operand], a.tensor.begin))
            words += map_words
        else:
            assert isinstance(a, Int | Long)
            words += struct.unpack("<q", a.encoded())
    kind = COOPERATIVE if one.cooperative else DEPENDENT if one.dependent and fresh else LAUNCH
    return Step(kind, (), (), function, one.grid, one.threads, one.shared_bytes, tuple(words), tuple(places))


def _like(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def with_releases(steps: Sequence[Step], kinds: Sequence[int], results: Sequence[int]) -> list[Step]:
    """The steps, and behind the last that needs it the end of each buffer that is no result."""
    last: dict[int, int] = {}
    for at, s in enumerate(steps):
        last.update(dict.fromkeys((*s.buffers, *(buffer for _, buffer, _ in s.places)), at))
    last.pop(-1, None)
    ending: dict[int, list[int]] = {}
    for i, at in last.items():
        if kinds[i] == MADE and i not in results:
            ending.setdefault(at, []).append(i)
    found = []
    for at, s in enumerate(steps):
        found.append(s)
        found += [Step(RELEASE, (i,)) for i in ending.get(at, ())]
    return found
