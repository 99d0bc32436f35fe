"""A choice on a device: its kernels, loaded, and its records of launches (`upconv.cuda.launches`) run on tensors.

A call costs the host little: the records' arguments are encoded once, tensor maps too, and a call gives addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from upconv.cpu import memory_format
from upconv.cuda import recording
from upconv.cuda.compile import jit
from upconv.cuda.compile.launch import Counters, Launcher, TooManyBlocks, bind, stream_handle
from upconv.cuda.gpu import current_stream
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.launches import (
    Given,
    Launch,
    Map,
    Operand,
    Pointer,
    Scratch,
    Unit,
    WeightForm,
    Zeros,
)

Values = list[Any]
"""Addresses of operands and of places in them, then words of other arguments as bytes."""


def loaded(launch: Launch, arguments: str, device: int) -> Launcher:
    """Compiles (or finds) and loads a launch's kernel. ``arguments``: `Launcher`'s. Errors: those of ``jit.kernel``."""
    kernel = jit.kernel(launch.unit.source, launch.entry, gpu_of(device).arch, launch.unit.label)
    return Launcher(kernel, device, launch.threads, launch.shared_bytes, arguments, launch.cooperative)


def _pieces(launch: Launch, slots: dict[Operand, int]) -> list[tuple[int, int] | bytes]:
    """A launch's arguments: addresses, each an operand's slot and the bytes from its begin, and words between them."""
    words, places = launch.encoded
    found: list[tuple[int, int] | bytes] = []
    end = 0
    for word, operand, offset in places:
        found += [words[end : 8 * word]] if end < 8 * word else []
        found.append((slots[operand], offset))
        end = 8 * word + 8
    return found + ([words[end:]] if end < len(words) else [])


class Program:
    """Some launches, loaded for a device, which run on operands of these names; the result is the last of them.

    Each operand may be None. ``launchers`` and ``counters`` (of `Zeros`, by their words) are those of the programs that
    share them.
    """

    def __init__(
        self,
        launches: tuple[Launch, ...],
        operands: tuple[str, ...],
        device: int,
        launchers: dict[Any, Launcher],
        counters: dict[int, Counters],
    ) -> None:
        self.launches, self.operands, self.device = launches, operands, device
        used = [a for one in launches for a in one.arguments if isinstance(a, Pointer | Map)]
        memory = dict.fromkeys(a.operand for a in used)
        self.scratch = [one for one in memory if isinstance(one, Scratch)]
        self.zeros = [
            (one, counters.get(one.words) or counters.setdefault(one.words, Counters(one.words)))
            for one in memory
            if isinstance(one, Zeros)
        ]
        self._shapes = [(-(-one.bytes // 4),) for one in self.scratch]
        named: list[Operand] = [*operands, *self.scratch, *(one for one, _ in self.zeros)]
        slots = {one: i for i, one in enumerate(named)}
        self._needed: dict[int, int] = {}
        for a in used:
            alignment = 16 if isinstance(a, Map) else a.alignment
            if isinstance(a.operand, str) and alignment > 1:
                self._needed[slots[a.operand]] = max(alignment, self._needed.get(slots[a.operand], 1))
        if any(isinstance(a, Map) for a in used):
            bind(device)  # encoding wants a context
        pieces = [_pieces(one, slots) for one in launches]
        every = dict.fromkeys(piece for of in pieces for piece in of)
        self._beyond = [one for one in every if isinstance(one, tuple) and one[1]]
        self._constant: Values = [one for one in every if isinstance(one, bytes)]
        kinds = [*((i, 0) for i in range(len(named))), *self._beyond, *self._constant]
        index = {one: i for i, one in enumerate(kinds)}
        self._steps = []
        for launch, of in zip(launches, pieces):
            form = "".join(f"{len(one)}s" if isinstance(one, bytes) else "Q" for one in of)
            key = launch.unit, launch.entry, form, launch.threads, launch.shared_bytes, launch.cooperative
            if key not in launchers:
                launchers[key] = loaded(launch, form, device)
            self._steps.append((launchers[key], launch.grid, _taken([index[one] for one in of]), launch.dependent))

    def __call__(self, tensors: Sequence[Tensor | None], values: Values, fresh: bool) -> None:
        """Runs the launches on operands that begin where they must. The program's device is the current one.

        Args:
            tensors: the operands, dense, the first on the device.
            values: their addresses, 0 of those that are not there; what follows from them is appended.
            fresh: dependent launches may overlap with the one ahead, which for the first of them is the last kernel on
                this stream.
        """
        like: Any = tensors[0]
        held: list[Tensor] = []  # until all is launched
        if self._shapes:
            for shape in self._shapes:
                held.append(t := like.new_empty_strided(shape, (1,), dtype=torch.int32))  # 2 us less than torch.empty
                values.append(t.data_ptr())
        stream, overlaps = current_stream(self.device), fresh
        for _, counters in self.zeros:
            zeros = counters.of_streams.get(stream)
            if zeros is None:
                zeros = counters.make(stream, like)
                overlaps = False  # else a dependent would with what zeroes them
            values.append(zeros.data_ptr())
        if self._beyond:
            values += [values[i] + offset for i, offset in self._beyond]
        values += self._constant
        handle = stream_handle(stream)
        for launch, grid, take, dependent in self._steps:
            launch(handle, grid, take(values), dependent and overlaps)
        if recording.active and (to := recording.active.get(get_ident())) is not None:
            handles = [launcher.kernel.handle for launcher, *_ in self._steps]
            names: list[Operand] = [*self.operands, *self.scratch]
            at = dict(zip(names, (*tensors, *held), strict=True))
            to.launched(self.launches, handles, at, self.zeros, fresh)

    def anywhere(self, tensors: Sequence[Tensor | None], values: Values, fresh: bool) -> None:
        """The same, on copies of operands that begin elsewhere than they must; PyTorch's allocations never do."""
        given, last = list(tensors), len(tensors) - 1
        for i, alignment in self._needed.items():
            t = tensors[i]
            if t is not None and values[i] % alignment:
                fresh = fresh and i == last  # nothing overlaps with a copy that it reads
                given[i] = torch.empty_like(t) if i == last else t.clone()
        self(given, [0 if t is None else t.data_ptr() for t in given], fresh)
        result, written = tensors[last], given[last]
        if result is not None and written is not None and written is not result:
            result.copy_(written)


def _taken(places: list[int]) -> Callable[[Values], tuple[Any, ...]]:
    """What picks a launch's arguments."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[i] for i in places])


class _Prepared:
    """A `upconv.cuda.family.Choice` on a device."""

    def __init__(self, choice: Any, device: int) -> None:
        self.choice, self._device = choice, device
        self._problem = choice.problem
        self.casts, self.biased, self.packing = choice.casts, choice.biased, choice.packing
        self._launchers: dict[Any, Launcher] = {}
        self._programs: dict[Given, Program] = {}
        self._packing: dict[Given, Program | None] = {}
        self._known: dict[Any, Program] = {}
        self.counters: dict[int, Counters] = {}
        """Of `Zeros`, by their words."""

    @property
    def loaded(self) -> bool:
        """Whether the kernels for every call are."""
        launchers = list(self._launchers)  # at once: calls of other threads may load more meanwhile
        return self._units <= {unit for unit, *_ in launchers}

    def load(self) -> None:
        """Compiles (or finds) and loads the kernels for every call. Errors: those of ``jit.kernel``."""
        for given in self._every():
            self._program(given)

    @cached_property
    def _units(self) -> set[Unit]:
        """Of the kernels for every call."""
        return {launch.unit for given in self._every() for launch in self.choice.launches(given)}

    def _every(self) -> list[Given]:
        """What calls differ by that may want other kernels."""
        reads = self.choice.reads
        ways: list[tuple[WeightForm, bool]] = [] if reads == "contiguous" else [("contiguous", False)]
        ways += [("in place", False)] if reads else []
        ways += [("contiguous", True)] if self.casts else []
        return [Given(form, single, lasting=lasting) for form, single in ways for lasting in (False, True)]

    def _operands(self, given: Given) -> tuple[str, ...]:
        """Those of a call, in its order."""
        raise NotImplementedError

    def _program(self, given: Given) -> Program:
        """What a call runs, which is kept."""
        found = self._programs.get(given)
        if found is None:
            found = self._programs[given] = self._of(self.choice.launches(given), self._operands(given))
        return found

    def _of(self, launches: tuple[Launch, ...], operands: tuple[str, ...]) -> Program:
        return Program(launches, operands, self._device, self._launchers, self.counters)


class Prepared(_Prepared):
    """A choice for ``fwd`` or ``grad-input`` on a device."""

    def _operands(self, given: Given) -> tuple[str, ...]:
        return "source", "packed" if given.weight == "packed" else "weight", "bias", "result"

    def _form(self, weight: Tensor) -> WeightForm | None:
        """How a weight is given; None where it is to be made contiguous."""
        if weight.dtype is torch.int32:
            return "packed"
        reads = self.choice.reads
        if reads == "contiguous":
            return "in place" if weight.is_contiguous() else None
        boxed = reads == "channels_last" and weight.dtype is self._problem.dtype
        if boxed and not weight.data_ptr() & 15 and _is_channels_last(weight):
            return "in place"
        return self._order(weight)

    def _order(self, weight: Tensor) -> WeightForm | None:
        """Of a weight that is to be packed."""
        if weight.is_contiguous():
            return "contiguous"
        last = _is_channels_last(weight) and weight.shape[:2] == self._problem.weight_shape[:2]
        return "channels_last" if last else None

    def pack(self, weight: Tensor) -> Tensor:
        """The weight as it is kept for other calls: int32 words in the kernel's order, packed on the current stream.

        A float32 weight of a 16-bit problem is rounded on its way. The weight itself, where the kernel reads it so.
        """
        form = self._order(weight) if self.choice.keeps_packed else self._form(weight)
        if form is None:
            return self.pack(weight.contiguous())
        if form == "in place":
            return weight
        given = Given(form, self.casts and weight.dtype is torch.float32)
        if given not in self._packing:
            launch = self.choice.pack(given)
            self._packing[given] = None if launch is None else self._of((launch,), ("weight", "packed"))
        program = self._packing[given]
        if program is None:
            return weight
        packed = weight.new_empty_strided((self.choice.packed_bytes(given) // 4,), (1,), dtype=torch.int32)
        program((weight, packed), [weight.data_ptr(), packed.data_ptr()], False)
        return packed

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False, lasting: bool = False
    ) -> None:
        """Reads ``x`` and writes ``out``: the input and the output, or their gradients the other way round.

        Args:
            x: dense in the problem's layout.
            weight: the weight, or what `pack` made of it.
            bias: in the problem's dtype, or in float32 if the weight is, but for a packed one.
            out: dense in the problem's layout.
            fresh: what packs the weight is the last kernel on this stream, or in this call: launches may overlap.
            lasting: the call may allocate what outlives it, and is not captured in a graph.
        """
        at_x, at, at_out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        values = [at_x, at, 0 if bias is None else bias.data_ptr(), at_out]
        key = weight.stride(), weight.dtype, None if bias is None else bias.dtype, lasting, (at_x | at | at_out) & 15
        program = self._known.get(key)
        if program is not None:
            program((x, weight, bias, out), values, fresh)
            return
        program = self.program(x, weight, bias, lasting)
        if program is None:
            self.run(x, weight.contiguous(), bias, out, fresh, lasting)
            return
        if not key[-1]:
            self._known[key] = program
        program.anywhere((x, weight, bias, out), values, fresh)

    def program(self, x: Tensor, weight: Tensor, bias: Tensor | None, lasting: bool) -> Program | None:
        """What `run` runs on tensors that begin so; None where it makes the weight contiguous first."""
        form = self._form(weight)
        if form is None:
            return None
        single = self.casts and weight.dtype is torch.float32
        of_bias: Any = "none" if bias is None else "single" if self.casts and bias.dtype is torch.float32 else "given"
        return self._program(Given(form, single, of_bias, lasting, not x.data_ptr() & 15))


def _is_channels_last(weight: Tensor) -> bool:
    rank = weight.dim() - 2  # a problem may have a dimension more (`Problem.abreast`)
    return rank in (2, 3) and weight.is_contiguous(memory_format=memory_format("channels_last", rank))


class PreparedBias(_Prepared):
    """A `upconv.cuda.bias.Choice` on a device."""

    def _operands(self, given: Given) -> tuple[str, ...]:
        return "gradient", "result"

    def run(self, grad: Tensor, out: Tensor, lasting: bool = False) -> None:
        """Sums the output's gradient, dense in the problem's layout, into ``out``; the rest as `PreparedWeight.run`."""
        single = self.casts and out.dtype is torch.float32
        program, values = self._program(Given("contiguous", single, lasting=lasting)), [grad.data_ptr(), out.data_ptr()]
        (program.anywhere if values[0] & 15 else program)((grad, out), values, False)


class PreparedWeight(_Prepared):
    """A choice for ``grad-weight`` on a device."""

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        """As a choice finds it by its launches, which takes as long as a small call."""
        shape: tuple[int, ...] = self.choice.result_shape
        return shape

    def _operands(self, given: Given) -> tuple[str, ...]:
        return "input", "gradient", "result"

    def run(self, x: Tensor, grad: Tensor, out: Tensor, lasting: bool = False) -> None:
        """Writes the weight's gradient.

        Args:
            x: the input, dense in the problem's layout.
            grad: the output's gradient, dense in the problem's layout.
            out: contiguous or in channels_last; of the problem's dtype, or of float32 for 16 bits.
            lasting: as for `Prepared.run`.
        """
        at_x, at_grad, at_out = values = [x.data_ptr(), grad.data_ptr(), out.data_ptr()]
        key = out.numel(), out.is_contiguous(), out.dtype, lasting, (at_x | at_grad | at_out) & 15
        program = self._known.get(key)
        try:
            if program is not None:
                program((x, grad, out), values, False)
            elif (program := self.program(grad, out, lasting)) is not None:
                if not key[-1]:
                    self._known[key] = program
                program.anywhere((x, grad, out), values, False)
            else:
                self._run_wider(x, grad, out, lasting)
        except TooManyBlocks:  # on this stream, of a part of the GPU; the same sums in the same order follow
            self.run(x, grad, out)

    def program(self, grad: Tensor, out: Tensor, lasting: bool) -> Program | None:
        """What `run` runs on tensors that begin so; None where it writes another tensor, and copies from that."""
        if out.numel() != math.prod(self._shape):
            return None
        single = self.casts and out.dtype is torch.float32
        order: WeightForm = "contiguous" if out.is_contiguous() else "channels_last"
        return self._program(Given(order, single, lasting=lasting, aligned=not grad.data_ptr() & 15))

    def _run_wider(self, x: Tensor, grad: Tensor, out: Tensor, lasting: bool) -> None:
        """`run` by way of a contiguous tensor as the kernel writes it, which may have more channels."""
        whole = out.new_empty(self._shape)
        self.run(x, grad, whole, lasting)
        out.copy_(whole[: out.shape[0], : out.shape[1]])
