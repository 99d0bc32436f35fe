"""The grad-weight family on tensor cores: a choice, and what it launches.

Both kernels, ``kernels/wgrad_wgmma.cu`` (sm_90a) and ``kernels/wgrad.cu`` (mma.sync), are GEMMs over the pixels, whose
accumulators are a tile of input channels x output channels x neighbouring taps. K is split over blocks (and warps);
partial sums are added in a fixed order (`wgrad_costs.Ending`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

import torch

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import channels_last, of_class
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import Gpu
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.launches import (
    NULL,
    THREADS,
    Given,
    Int,
    Launch,
    Long,
    Map,
    Pointer,
    Scratch,
    Unit,
    Zeros,
    ints,
    longs,
    strides_of,
)  # fmt: skip
from upconv.cuda.wgrad.wgrad_costs import AnyTiling, Ending, Model, ending
from upconv.cuda.wgrad.wgrad_search import best, refusal
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Problem, triple

_LANES, _FEW = 8, 128  # that divide the records of a sum, where sums of so many shares are so few
_ADDING = {
    "steps": "",
    "alone": " of blocks that write the weight",
    "together": " of blocks that add up their sums",
}


@dataclass(frozen=True)
class Choice(family.Choice):
    """A tiling for a problem on a GPU, and what the model thinks of it."""

    tiling: AnyTiling
    """Of the layer at any size, whose own size and batch mean nothing; a `gapless` one has this problem's box."""
    problem: Problem
    gpu: Gpu
    splits: int
    """Ranges of chunks that different blocks take."""
    cost: Cost
    """The model's estimate."""
    at_once: bool = True
    """Whether all blocks run at once on its device."""
    family = "wgrad"

    @property
    def summary(self) -> str:
        t = self.tiling
        shape, taps = "x".join(map(str, t.chunk)), "x".join(map(str, t.taps))
        instruction = "wgmma" if isinstance(t, WarpgroupTiling) else "mma.sync"
        if isinstance(t, WarpgroupTiling) and t.stacked:
            instruction += f" of up to {t.stack} rows"
        if t.gapless:
            shape += f" of {t.tile[3]} without gaps"
        return (
            f"{instruction} {t.problem.precision}, {t.block[0]}x{t.block[1]} channels x {taps} taps a block, chunks of "
            f"{shape} (NxDxHxW of q), K in {self.splits * t.k_slices} slices, {t.shared_bytes // 1024} KB shared, "
            f"grid {self.grid}{_ADDING[self.ending]}"
        )

    @property
    def ending(self) -> Ending:
        """How its splits become the weight, on a whole GPU."""
        return ending(self.tiling, self.splits, self.gpu)

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all input sizes that share the tile (and are cut into as few splits).

        The first has both steps; the second, where blocks write the weight themselves, needs one.
        """
        p, t = self.problem, self.tiling
        label = f"wgrad {str(p).split(' on ')[0]} {p.precision} {p.layout}"
        entries = t.entry, "reduce"
        names = tuple(f"{name}<{jit.CONFIG}>" for name in entries)
        steps = Unit(label, jit.instance(t.file, t.constants(), names), entries)
        if self.ending == "steps":
            return (steps,)
        constants = t.constants() | {"alone": self.ending == "alone"}
        one_step = jit.instance(t.file, constants, (f"wgrad_whole<{jit.CONFIG}>",))
        return steps, Unit(f"{label} {self.ending}", one_step, ("wgrad_whole",))

    # --- launches -----------------------------------------------------------------------------------------------------

    @property
    def casts(self) -> bool:
        return self.problem.dtype.itemsize == 2

    def on(self, device: int) -> Choice:
        """Two steps where blocks that add up their sums do not all run at once, as on a part of a GPU."""
        return replace(self, at_once=self.ending != "together" or gpu_of(device).multiprocessors >= self.grid)

    @property
    def grid(self) -> int:
        return self.tiling.tiles * self.splits

    def launches(self, given: Given) -> tuple[Launch, ...]:
        units = self.sources()
        one_step = self.ending != "steps" and self.at_once and (given.lasting or self.ending != "together")
        return (self._one_step(units[1], given),) if one_step else self._two_steps(units[0], given)

    def _one_step(self, unit: Unit, given: Given) -> Launch:
        """The kernel that writes the weight."""
        t, together = self.tiling, self.ending == "together"
        assert isinstance(t, WarpgroupTiling)
        sums = counters = NULL
        if together:
            sums, counters = Pointer(Scratch("sums", self.grid * t.sums_bytes)), Pointer(Zeros(2 * t.tiles))
        pointers = self._gradient, Pointer("result"), sums, counters
        arguments = (*pointers, *self._sizes, *self._to(given), *self._maps)
        return Launch(unit, unit.entries[0], self.grid, t.threads, t.shared_bytes, arguments, cooperative=together)

    def _two_steps(self, unit: Unit, given: Given) -> tuple[Launch, ...]:
        """Records of sums, then what adds them."""
        t, slices = self.tiling, self.splits * self.tiling.k_slices
        records = Pointer(Scratch("sums", slices * t.tiles * t.sums_bytes))
        first = () if self._maps else (Pointer("input", alignment=self._alignment),)
        arguments = (*first, self._gradient, records, *self._sizes, *self._maps)
        to = (records, Pointer("result"), Int(slices), *self._to(given))
        shares, shared = adders(t, slices)
        return (
            Launch(unit, unit.entries[0], self.grid, t.threads, t.shared_bytes, arguments),
            Launch(unit, "reduce", t.tiles * shares, THREADS, shared, to),
        )

    @property
    def _alignment(self) -> int:
        return 16 if self.tiling.needs_alignment else 1

    @property
    def _gradient(self) -> Pointer:
        return Pointer("gradient", alignment=self._alignment)

    @property
    def _sizes(self) -> tuple[Int, ...]:
        """Images and sizes, of the input and of the output, and counts of chunks. A `gapless` kernel is told of a
        chunk's box in place of the input, which boxes bring."""
        t, p = self.tiling, self.problem
        counts = t.counts(p)
        images = t.chunk if t.gapless else (p.batch, *triple(p.size))
        chunks = math.prod(counts)
        return ints((*images, *triple(p.out_size), *counts[1:], chunks, -(-chunks // self.splits)))

    def _to(self, given: Given) -> tuple[Long, ...]:
        """The strides of the result, and whether it is float32."""
        strides = strides_of(self.problem.weight_shape, given.weight)
        single = given.single or self.problem.dtype is torch.float32
        return longs((strides[0], strides[1], strides[-1], int(single)))

    @property
    def _maps(self) -> tuple[Map, ...]:
        t, p = self.tiling, self.problem
        if isinstance(t, SyncTiling):
            return ()
        return (*tensor_maps(t, p, "input"), *(tensor_maps(t, p, "gradient") if t.box_g else ()))


def adders(t: AnyTiling, slices: int) -> tuple[int, int]:
    """Blocks of the second step that share a tile, such that a thread of each has a sum; and their shared memory."""
    of_row = t.block[1] // 4
    every = t.block[0] * of_row
    lanes = _LANES if t.set_taps * -(-every // slices) <= _FEW else 1
    shares = -(-every // -(-THREADS // (t.set_taps * lanes)))
    most = -(-every // shares)
    return shares, t.set_taps * ((-(-most // of_row) + 1) * (t.block[1] + 4) + 8) * 4


def tensor_maps(t: WarpgroupTiling, p: Problem, operand: Literal["input", "gradient"]) -> tuple[Map, ...]:
    """Over each tensor that a tiling's boxes of an operand are cut from. float32 is rounded to TF32 on its way."""
    if operand == "gradient":
        channels, size, (of_rows, of_channels) = p.out_channels, p.out_size, t.classes
        assert t.g_boxes is not None
        boxes, span = t.g_boxes, t.g_width * t.element if t.channels_last else 0
    else:
        channels, size, (of_rows, of_channels) = p.in_channels, p.size, (1, 1)
        size = (*size[:-2], 1, size[-2] * size[-1]) if t.lines else size
        boxes, span = (t.x_box, (1, 1, 1, 1, 1)), 0 if t.turned else t.segment
    if t.channels_last:
        every = [channels_last(p.batch, channels, size, t.element)]
    else:
        places = product(range(of_channels), range(of_rows))
        classes = (((of_rows, j), (of_channels, k)) for k, j in places)
        every = [of_class(p.batch, channels, size, t.element, *one).channels_second() for one in classes]
    return tuple(Map(operand, one, p.dtype, *boxes, span, rounded=True) for one in every)


# --- the choice ------------------------------------------------------------------------------------------------------


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks: `choose`."""
    return choose(p, gpu, general)


@lru_cache(maxsize=4096)
def choose(p: Problem, gpu: Gpu, general: bool = False) -> Choice | str:
    """The cheapest tiling by the model, or the sentence why tensor cores cannot serve the problem.

    ``general``: of those that serve every size of the input.
    """
    if refused := family.too_long(p) or refusal(p, gpu):
        return refused
    found = best(p, gpu, general)
    if found is None:
        return f"no tile of this layer with its halo fits in {gpu.shared_bytes // 1024} KB of shared memory"
    return Choice(found.tiling, p, gpu, found.splits, Model(p, gpu, general).cost(found.tiling, found.splits))
