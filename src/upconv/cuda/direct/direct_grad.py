"""The gradient for the input on CUDA cores: depthwise and small groups, few channels, and float64.

The kernel is ``direct_grad.cu``. The cost model has two
terms: bytes of the device memory, and loads and multiplications of the multiprocessors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.gpu import Gpu, fma_lanes
from upconv.cuda.launches import Given, Launch, Long, Pointer, Unit, ints
from upconv.cuda.rearrange import batches
from upconv.cuda.scalars import PRECISIONS, geometry
from upconv.problem import Pass, Problem

_THREADS = 256
_UNROLLED = 32  # taps in a straight stretch of code
_LAUNCH = 5e-6  # seconds
_LOAD_CLOCKS = 1.6  # of a multiprocessor for a warp's load and its multiplications
# And for each line of weights that it reads beyond the first.
_LINE_CLOCKS = 0.6
# A thread waits for each row of taps, whose loads are under conditions, before it asks for the
# next.
_WAIT_CLOCKS = 380.0
_PLACE_CLOCKS = 12.0  # for a warp's position: divisions, borders
_MISSES = {"nchw": 1.0, "channels_last": 3.4}
"""Times more that loads take where taps miss the first-level cache."""


@dataclass(frozen=True)
class Choice(family.Defaults):
    """How many sums a thread has, for a problem on a GPU, and what the model thinks of it."""

    seconds: float
    """The model's estimate."""
    summary: str
    bound: str
    """What limits it, by the model."""
    problem: Problem
    channels: int
    """Input channels of a thread, of one position."""

    family: ClassVar[str] = "direct"

    @property
    def channel_blocks(self) -> int:
        """Threads that share a position."""
        return self.problem.groups * -(-(self.problem.in_channels // self.problem.groups) // self.channels)

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all sizes."""
        p = self.problem
        label = f"direct {p.pass_} {str(p).split(' on ')[0]} {p.precision} {p.layout}"
        source = jit.instance("direct_grad.cu", constants(p, self.channels), (f"direct_grad<{jit.CONFIG}>",))
        return (Unit(label, source, ("direct_grad",)),)

    reads = "contiguous"

    @property
    def packing(self) -> tuple[str, Pass]:
        return "contiguous", self.problem.pass_

    def launches(self, given: Given) -> tuple[Launch, ...]:
        p, (unit,) = self.problem, self.sources()
        threads = p.batch * math.prod(p.size) * self.channel_blocks
        pointers = Pointer("source"), Pointer("weight"), Pointer("result")
        arguments = (*pointers, *ints((p.batch, *full(p.size), *full(p.out_size))), Long(threads))
        return (Launch(unit, "direct_grad", -(-threads // _THREADS), _THREADS, 0, arguments),)


def constants(p: Problem, channels: int) -> dict[str, int]:
    """The kernel's, for a thread of so many input channels."""
    found = geometry(p)
    kernel_d, kernel_h, kernel_w = (found[f"kernel_{axis}"] for axis in "dhw")
    return {
        "precision": PRECISIONS[p.dtype],
        "channels_last": p.layout == "channels_last",
        "groups": p.groups,
        "cin_g": p.in_channels // p.groups,
        "cout_g": p.out_channels // p.groups,
        "ci_tile": channels,
        **found,
        "unroll_d": kernel_d if p.taps <= _UNROLLED else 1,
        "unroll_h": kernel_h if kernel_h * kernel_w <= _UNROLLED else 1,
        "unroll_w": kernel_w if kernel_w <= _UNROLLED else 8,
    }


def full(values: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes along D, H and W of those along the last axes."""
    return (1,) * (3 - len(values)) + values


# --- the choice ------------------------------------------------------------------------------------------------------


def _seconds(p: Problem, gpu: Gpu, clocks: float) -> tuple[float, str]:
    """(the model's estimate, what limits it) from the clocks of all multiprocessors together."""
    memory = (math.prod(p.input_shape) + math.prod(p.output_shape)) * p.dtype.itemsize / gpu.bandwidth
    work = clocks * (2 if p.dtype is torch.float64 else 1) / gpu.multiprocessors / gpu.clock
    work *= _MISSES[p.layout]
    products = p.flops / 2 / (fma_lanes(gpu, p.dtype is torch.float64) * gpu.multiprocessors * gpu.clock)
    work = max(work, products)
    return max(memory, work) + 0.3 * min(memory, work) + _LAUNCH, "bytes" if memory > work else "loads"


def _conflict(p: Problem) -> float:
    """What a stride costs: lanes of neighbouring columns then read every stride-th element (NCHW)."""
    return 1.0 if p.layout == "channels_last" else 1 + 0.5 * (min(p.stride[-1], 8) - 1)


@lru_cache(maxsize=4096)
def choose(p: Problem, gpu: Gpu) -> Choice | str:
    """As many channels of a thread as there are, or the sentence why the kernel cannot serve the problem."""
    if p.batch == 0 or 0 in p.size:
        return "an empty input has no work"
    cin, cout = p.in_channels // p.groups, p.out_channels // p.groups
    channels = next(n for n in (8, 4, 2, 1) if n == 1 or cin >= n)
    pixels, tiles = math.prod(p.size), p.groups * -(-cin // channels)
    warps = p.batch * pixels * tiles / 32
    # Lanes of different channels read a line of weights each; and few blocks leave multiprocessors idle.
    lines = min(32, tiles) if p.layout == "channels_last" else min(tiles, -(-32 // pixels))
    apart = _LINE_CLOCKS * channels * (lines - 1)
    clocks = warps * (_PLACE_CLOCKS + cout * p.taps * (_LOAD_CLOCKS * _conflict(p) + 1.2 * channels + apart))
    clocks *= max(1.0, gpu.multiprocessors / max(1.0, warps * 32 / _THREADS))
    seconds, bound = _seconds(p, gpu, clocks)
    waits = cout * math.prod(p.kernel[:-1]) * _WAIT_CLOCKS / gpu.clock + _LAUNCH
    if waits > seconds:
        seconds, bound = waits, "latency"
    summary = f"a thread takes {channels} input channels of a position, {p.taps} taps from L1"
    return Choice(seconds, summary, bound, p, channels)


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks."""
    return batches.too_long(p) or choose(p, gpu)
