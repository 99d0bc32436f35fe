"""How the forwards on CUDA cores cut a dimension: into cells of as many outputs as the stride has (``direct.cu``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from upconv.cuda.scalars import PRECISIONS, geometry
from upconv.derived import derived
from upconv.problem import Problem

LAUNCH = 2e-6  # seconds
_MAX_INT = 2**30  # sizes and geometry of the kernels are int32 with room for a halo


@dataclass(frozen=True)
class Axis:
    """One dimension of the work, as the kernel needs it: cell ``j`` holds the outputs ``j*stride ... + stride - 1``."""

    size: int
    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @derived
    def cells(self) -> int:
        return -(-self.out // self.stride)

    @derived
    def shifts(self) -> tuple[int, ...]:
        """For each tap the input index minus the cell's: ``floor((stride - 1 + padding - k * dilation) / stride)``.

        The tap meets output ``t = (k * dilation - padding) mod stride`` of the cell, at ``(t + padding - k * dilation)
        / stride``, which divides.
        """
        return tuple((self.stride - 1 + self.padding - k * self.dilation) // self.stride for k in range(self.kernel))

    @derived
    def least(self) -> int:
        return self.shifts[-1]

    @derived
    def span(self) -> int:
        """How many more inputs than cells the outputs of neighbouring cells read."""
        return self.shifts[0] - self.shifts[-1]

    @derived
    def live(self) -> int:
        """Phases that have taps."""
        return len({(k * self.dilation - self.padding) % self.stride for k in range(self.kernel)})

    @derived
    def tap_step(self) -> int:
        """Distance between neighbouring taps of a phase."""
        return self.stride // math.gcd(self.stride, self.dilation)

    @derived
    def countable(self) -> bool:
        """Whether the kernels count along it in 32 bits."""
        return max(self.size, self.out, self.padding, self.kernel * self.dilation * self.stride) < _MAX_INT


@lru_cache(maxsize=256)
def axes(p: Problem) -> tuple[Axis, Axis, Axis]:
    """Depth, height and width of a problem; dimensions that it lacks have one input, tap and output."""
    found = [Axis(*a) for a in zip(p.size, p.out_size, p.kernel, p.stride, p.padding, p.dilation)]
    d, h, w = [Axis(1, 1, 1, 1, 0, 1)] * (3 - p.rank) + found
    return d, h, w


def constants(p: Problem) -> dict[str, int]:
    """What all forwards on CUDA cores know of a layer."""
    return {
        "precision": PRECISIONS[p.dtype],
        "channels_last": p.layout == "channels_last",
        "groups": p.groups,
        "cin_g": p.in_channels // p.groups,
        "cout_g": p.out_channels // p.groups,
        **geometry(p),
    }


def window(p: Problem) -> dict[str, int]:
    """Where the inputs that a cell's outputs read begin along H and W, and how many more than one they are."""
    _, h, w = axes(p)
    return {"min_h": h.least, "span_h": h.span, "min_w": w.least, "span_w": w.span}


def resident(threads: int, registers: int) -> int:
    """Blocks per multiprocessor by their registers: 16384 for each of its four parts, whole warps in each."""
    return 16384 // (32 * registers) * 4 // (-(-threads // 32))


def rounded(registers: float) -> int:
    """As many registers as a thread may get, from what it needs."""
    return int(min(max(-(-registers // 8) * 8, 48), 255))


@dataclass(frozen=True)
class Cost:
    """What the model says of a configuration."""

    seconds: float
    bound: str
    blocks: int
    resident: int
    """Blocks per multiprocessor."""
