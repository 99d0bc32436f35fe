"""A plain kernel for each pass, which serves every layer: it is taken for huge kernels, strides, dilations and axes.

``kernels/plain.cu`` states what a transposed convolution and its gradients are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

import torch

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import CORES, Gpu, fma_lanes
from upconv.cuda.launches import NULL, THREADS, Given, Launch, Long, Pointer, Unit, WeightForm, longs, strides_of
from upconv.cuda.scalars import PRECISIONS
from upconv.problem import Pass, Problem, triple

_KERNELS: dict[Pass, tuple[str, tuple[str, ...]]] = {
    "fwd": ("plain_forward", ("source", "weight", "bias", "result")),
    "grad-input": ("plain_grad_input", ("source", "weight", "result")),
    "grad-weight": ("plain_grad_weight", ("input", "gradient", "result")),
}
"""Entries and operands."""
_MOST_BLOCKS = 2**20  # which take the results in turn
_LOADS = 10  # of a thread, which take as long as a product, or as a test whether a tap meets an element
_WAIT = 10  # clocks that a thread waits for one


@dataclass(frozen=True)
class Choice(family.Choice):
    """The kernel of a pass, and what the model thinks of it."""

    problem: Problem
    cost: Cost

    family = "direct"
    reads = "contiguous"

    @property
    def summary(self) -> str:
        each = "block" if self.problem.pass_ == "grad-weight" else "thread"
        return f"one result per {each}, {blocks(self.problem)} blocks"

    @property
    def packing(self) -> tuple[str, Pass]:
        return "contiguous", self.problem.pass_

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile, the same for all layers of a dtype."""
        constants = {"precision": PRECISIONS[self.problem.dtype], "threads": THREADS}
        entry, _ = _KERNELS[self.problem.pass_]
        source = jit.instance("plain.cu", constants, (f"{entry}<{jit.CONFIG}>",))
        return (Unit(f"{entry} of {self.problem.dtype}", source, (entry,)),)

    def launches(self, given: Given) -> tuple[Launch, ...]:
        p, (unit,) = self.problem, self.sources()
        entry, names = _KERNELS[p.pass_]
        operands = [NULL if name == "bias" and given.bias == "none" else Pointer(name) for name in names]
        return (Launch(unit, entry, blocks(p), THREADS, 0, (*operands, *_layer(p, given))),)


def _layer(p: Problem, given: Given) -> tuple[Long, ...]:
    """The kernels' ``PlainLayer``."""
    order: WeightForm = "channels_last" if p.layout == "channels_last" else "contiguous"
    weight: WeightForm = given.weight if p.pass_ == "grad-weight" else "contiguous"
    channels = p.batch, p.groups, p.in_channels // p.groups, p.out_channels // p.groups
    axes = zip(triple(p.size), triple(p.out_size), geometry(p))
    tensors = (p.input_shape, order), (p.weight_shape, weight), (p.output_shape, order)
    numbers = ((size, out, *of_axis) for size, out, of_axis in axes)
    return longs((*channels, *chain(*numbers), *chain(*(strides(*each) for each in tensors))))


def geometry(p: Problem) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, padding, dilation and phase of a ``PlainAxis``, along D, H and W."""
    sides = triple(p.kernel), triple(p.stride), triple(p.padding, 0), triple(p.dilation), triple(phases(p))
    return tuple(zip(*sides))


def strides(shape: tuple[int, ...], order: WeightForm) -> tuple[int, ...]:
    """Of a tensor's five dimensions, contiguous or in channels_last."""
    return strides_of((*shape[:2], *(1,) * (5 - len(shape)), *shape[2:]), order)


def phases(p: Problem) -> tuple[int, ...]:
    """Taps from one that an output meets to the next, along each axis."""
    return tuple(s // math.gcd(s, d) for s, d in zip(p.stride, p.dilation))


def _results(p: Problem) -> int:
    shapes = {"fwd": p.output_shape, "grad-input": p.input_shape, "grad-weight": p.weight_shape}
    return math.prod(shapes[p.pass_])


def blocks(p: Problem) -> int:
    each = 1 if p.pass_ == "grad-weight" else THREADS
    return min(-(-_results(p) // each), _MOST_BLOCKS)


def _tests(p: Problem) -> float:
    """Of taps and elements, for a result."""
    if p.pass_ == "grad-weight":  # those of every pixel, and a block's threads add up
        return p.batch * math.prod(p.size) + 2 * THREADS
    if p.pass_ == "grad-input":
        return p.taps
    of = phases(p)
    return math.prod(-(-k // n) for k, n in zip(p.kernel, of)) + sum(min(k, n) / 2 for k, n in zip(p.kernel, of))


def seconds(p: Problem, gpu: Gpu) -> float:
    """Twice what the kernel takes by the model: so rough a one has to promise much."""
    loads = _LOADS * (p.flops / 2 + _results(p) * _tests(p))
    # A multiprocessor issues a load of a warp in a clock.
    issued = loads / (min(32, fma_lanes(gpu, p.dtype is torch.float64)) * gpu.multiprocessors)
    clocks = max(issued, _WAIT * loads / (blocks(p) * THREADS))
    return 2 * (CORES.launch + p.bytes / gpu.bandwidth + clocks / gpu.clock)


def candidate(p: Problem, gpu: Gpu) -> Choice:
    """The kernel of a problem's pass."""
    return Choice(p, Cost(found := seconds(p, gpu), issue=found))
