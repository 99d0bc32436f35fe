"""A small kernel family, made by the steps of docs/design.md: forwards of layers of one tap, without groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import CORES, Gpu
from upconv.cuda.launches import NULL, THREADS, Given, Launch, Pointer, Unit, longs
from upconv.cuda.scalars import PRECISIONS
from upconv.problem import Problem

_FILE = str(Path(__file__).with_suffix(".cu"))


@dataclass(frozen=True)
class Choice(family.Choice):
    """The one configuration for a problem."""

    problem: Problem
    cost: Cost

    family = "pointwise"
    summary = "an output per thread"
    reads = "contiguous"

    def sources(self) -> tuple[Unit, ...]:
        p = self.problem
        constants = {
            "precision": PRECISIONS[p.dtype], "threads": THREADS, "cin": p.in_channels, "cout": p.out_channels,
        }  # fmt: skip
        source = jit.instance("scalar.cuh", constants, (f"pointwise<{jit.CONFIG}>",), [_FILE])
        return (Unit(f"pointwise {p.in_channels}->{p.out_channels} {p.precision}", source, ("pointwise",)),)

    def launches(self, given: Given) -> tuple[Launch, ...]:
        bias = NULL if given.bias == "none" else Pointer("bias")
        pixels, total = math.prod(self.problem.out_size), math.prod(self.problem.output_shape)
        arguments = (Pointer("source"), Pointer("weight"), bias, Pointer("result"), *longs((pixels, total)))
        (unit,) = self.sources()
        return (Launch(unit, "pointwise", -(-total // THREADS), THREADS, 0, arguments),)


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks."""
    if p.pass_ != "fwd" or p.layout != "nchw" or p.precision == "tf32":
        return "the kernel computes contiguous forwards, and rounds nothing to TF32"
    one = p.taps == 1 and max(p.stride) == 1 and not any((*p.padding, *p.output_padding)) and p.groups == 1
    if not one:
        return "the kernel has one tap, and no groups"
    if math.prod(p.output_shape) > THREADS * (family.MOST_COUNTED - 1):
        return "the kernel has a thread for each output, of which there are too many"
    loads = p.flops / (32 * gpu.multiprocessors * gpu.clock)
    found = CORES.launch + p.bytes / gpu.bandwidth + loads
    return Choice(p, Cost(found, issue=loads))
