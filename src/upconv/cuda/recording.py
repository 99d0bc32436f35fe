"""A pass as data: what PyTorch was asked for and what was launched while it was computed once.

Within a `Recording` each operator of PyTorch that its thread calls is a step, and each launch of a program
(`upconv.cuda.prepared`). ``replay/native.cpp`` repeats the steps on other operands of the same layouts. So there is no
second description of a pass that could differ from the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from upconv import forks
from upconv.cuda.launches import Launch, Operand, Zeros


class NoOperand(IntEnum):
    """Kinds of buffers that are none: made in the pass, and words that outlive it and are zeros."""

    MADE, ZEROS = -1, -2


class Kind(IntEnum):
    """Of a step."""

    MAKE, OPERATOR, LAUNCH, COOPERATIVE, DEPENDENT = range(5)


_MAKERS = (torch.ops.aten.new_empty_strided.default, torch.ops.aten.empty_strided.default)

active: dict[int, Recording] = {}
"""The recording of each thread that has one; looked at by every program."""
forks.in_child(active.clear)


class Unrecorded(Exception):
    """A pass does what cannot be repeated; the message says what."""


class Buffer(NamedTuple):
    """Memory of a pass: an operand of that number, or a `NoOperand`."""

    kind: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Call(NamedTuple):
    """An operator of PyTorch on buffers: -1 for none."""

    kind: int
    name: str
    overload: str
    arguments: tuple[Any, ...]
    """In the schema's order; None in the place of a tensor."""
    tensors: tuple[tuple[int, int], ...]
    """Those that are tensors, and their buffers."""
    results: tuple[int, ...]


class Launched(NamedTuple):
    """A launch on buffers."""

    kind: int
    function: int
    grid: int
    block: int
    shared: int
    words: bytes
    """Its arguments."""
    places: tuple[tuple[int, int, int], ...]
    """Which of these words are addresses: the word, the buffer and the bytes from its start."""


Step = Call | Launched | tuple[int, int]
"""The last is `Kind.MAKE` and a buffer."""


class Recording(TorchDispatchMode):
    """What a thread does within it on some operands; None for one that a pass does not have."""

    def __init__(self, operands: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.buffers: list[Buffer] = []
        self.steps: list[Step] = []
        # Of buffers, by where their tensors are: a Python object of one may be another later, and a new one that comes
        # to the place of an old one has a number of its own.
        self._numbers: dict[int, int] = {}
        self._zeros: dict[int, int] = {}  # of such buffers, by the `id` of whose they are
        self._refused: Unrecorded | None = None
        for i, t in enumerate(operands):
            if t is not None:
                self._new(t, i)

    def __enter__(self) -> Any:
        active[get_ident()] = self
        return super().__enter__()

    def __exit__(self, *given: Any) -> None:
        del active[get_ident()]
        super().__exit__(*given)

    def _new(self, t: Tensor, kind: int = NoOperand.MADE) -> int:
        self._numbers[t._cdata] = len(self.buffers)
        self.buffers.append(Buffer(kind, t.dtype, tuple(t.shape), t.stride()))
        return len(self.buffers) - 1

    def _of(self, t: Tensor) -> int:
        found = self._numbers.get(t._cdata)
        if found is None:
            raise Unrecorded("it reads a tensor that is neither an operand nor made from one")
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        try:
            if func in _MAKERS:
                self.steps.append((Kind.MAKE, self._new(made)))
            else:
                self.steps.append(self._call(func, args, kwargs or {}, made))
        except Unrecorded as reason:  # what is computed is computed all the same
            self._refused = reason
        return made

    def _call(self, func: Any, args: Any, kwargs: Any, made: Any) -> Call:
        """A call of an operator."""
        schema = func._schema
        given, tensors = [], []
        read: dict[int, int] = {}  # buffers of the arguments, by where their tensors are
        for i, a in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            if isinstance(value, Tensor):
                tensors.append((i, self._of(value)))
                read[value._cdata] = tensors[-1][1]
                value = None
            elif isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
                raise Unrecorded(f"it calls {func}, which takes several tensors as one argument")
            given.append(value)
        results = []
        for t in made if isinstance(made, tuple) else (made,):
            if not isinstance(t, Tensor | None):
                raise Unrecorded(f"it calls {func}, whose result is no tensor")
            same = None if t is None else read.get(t._cdata)  # an operator in place gives what it was given
            results.append(-1 if t is None else self._new(t) if same is None else same)
        return Call(Kind.OPERATOR, schema.name, schema.overload_name, tuple(given), tuple(tensors), tuple(results))

    def launched(
        self,
        launches: Sequence[Launch],
        functions: Sequence[int],
        tensors: Mapping[Operand, Tensor | None],
        zeros: Sequence[tuple[Zeros, object]],
        fresh: bool,
    ) -> None:
        """Notes that kernels were launched on these operands, and words that are zeros, with whose they are."""
        try:
            at = {name: self._of(t) for name, t in tensors.items() if t is not None}
            for operand, owner in zeros:
                if id(owner) not in self._zeros:
                    self._zeros[id(owner)] = len(self.buffers)
                    self.buffers.append(Buffer(NoOperand.ZEROS, torch.int32, (operand.words,), (1,)))
                at[operand] = self._zeros[id(owner)]
            self.steps += [step(one, function, at, fresh) for one, function in zip(launches, functions, strict=True)]
        except Unrecorded as reason:
            self._refused = reason

    def repeatable(self, results: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """The pass with these results as ``native.cpp`` takes it: buffers, steps and results. Errors: Unrecorded."""
        if self._refused is not None:
            raise self._refused
        ends = tuple(-1 if t is None else self._of(t) for t in results)
        return tuple(map(tuple, self.buffers)), tuple(map(tuple, self.steps)), ends


def step(one: Launch, function: int, at: Mapping[Operand, int], fresh: bool) -> Launched:
    """A launch on buffers; what has none is a null pointer."""
    words, given = one.encoded
    places = tuple((word, at[operand], offset) for word, operand, offset in given if operand in at)
    kind = Kind.COOPERATIVE if one.cooperative else Kind.DEPENDENT if one.dependent and fresh else Kind.LAUNCH
    return Launched(kind, function, one.grid, one.threads, one.shared_bytes, words, places)
