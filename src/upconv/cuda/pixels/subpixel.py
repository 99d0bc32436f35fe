"""Forwards of layers whose kernel is their stride, from NCHW pixels as they lie: each output has one tap. wgmma only.

Such a layer, the usual upsampling of a U-Net, is a product of matrices: pixels times columns, which are taps of output
channels. `gather` makes pixels columns of N, for which float32 ones must be turned in shared memory, whose traffic is
what bounds it for many channels. Here they are rows of M, which lanes read as they lie
(``kernels/pixels_subpixel.cuh``); an image's pixels are one long row, since none has a halo.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from upconv.cuda.axes import any_size
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Tensor5
from upconv.cuda.cost import Cost, Work, cost
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Map
from upconv.cuda.pixels import tile
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.choosing import Chooser, countable
from upconv.cuda.pixels.tile import MOST_COUNTED, SPAN, fitted, of_axes, triple
from upconv.cuda.pixels.tile import Tile as Base
from upconv.problem import Problem

_COLUMNS = (256, 192, 128, 96, 64, 32)
_MOST_SUMS = 128  # of a consumer's thread, whose fragments and addresses take 96 registers
_SECTOR = 1.74  # clocks of a consumer for 32 bytes of stores, of two taps a lane


@dataclass(frozen=True)
class Tile(Base):
    """As `Base`; a stage has a chunk of pixels and of weights."""

    columns: int
    """Of a tile: kernel rows, output channels and taps of W."""
    mb: int
    """Subtiles of 64 pixels that a consumer accumulates."""

    @property
    def chunk(self) -> int:
        """Input channels of a chunk, and pixels of a row in shared memory."""
        return SPAN // self.element

    @property
    def chunks(self) -> int:
        return -(-self.problem.in_channels // self.chunk)

    @property
    def pixels(self) -> int:
        """Of a tile."""
        return 2 * 64 * self.mb

    @property
    def all_columns(self) -> int:
        """The layer's."""
        return self.problem.out_channels * self.problem.taps

    @property
    def blocks(self) -> int:
        """Tiles along the columns."""
        return -(-self.all_columns // self.columns)

    @property
    def packed_words(self) -> int:
        return self.blocks * self.chunks * self.columns * SPAN // 4

    @property
    def stage_bytes(self) -> int:
        return (self.pixels + self.columns) * SPAN

    def faults(self) -> Iterator[str]:
        if self.mb * self.columns // 2 > _MOST_SUMS:
            yield f"{self.mb} x 64 x {self.columns} sums are more than registers hold"

    def constants(self) -> dict[str, jit.Constant]:
        own = {"columns": self.columns, "mb": self.mb}
        return super().constants() | own | of_axes("kernel", self.kernel)

    # --- sizes, which are run-time arguments -------------------------------------------------------------------------

    def tiles(self, p: Problem) -> int:
        """Of a problem of this layer."""
        return p.batch * -(-math.prod(p.size) // self.pixels) * self.blocks

    def arguments(self, p: Problem) -> tuple[int, ...]:
        """The kernel's integer arguments behind its pointers."""
        pixels = math.prod(p.size)
        return *triple(p.size), pixels, -(-pixels // self.pixels), 0, self.tiles(p)


class Choice(TileChoice[Tile]):
    """A tile for a problem on a GPU, and what the model thinks of it."""

    mode = "subpixel"

    @property
    def summary(self) -> str:
        t = self.tile
        return (
            f"pixels as rows, each output a tap: wgmma {t.problem.precision}, tile of {t.pixels} pixels x {t.columns} "
            f"columns, {t.stages} stages of {t.chunk} channels, {t.shared_bytes // 1024} KB shared, grid {self.grid}"
        )

    @property
    def packed_as(self) -> tuple[Any, ...]:
        return self.tile.columns, self.problem.precision

    @property
    def source_map(self) -> Map:
        return source_map(self.tile, self.problem)


def source_map(t: Tile, p: Problem) -> Map:
    """A ``CUtensorMap`` over the input, an image's pixels in a row, with a box of a chunk's."""
    channel = math.prod(p.size) * t.element
    image = p.in_channels * channel
    tensor = Tensor5(0, (math.prod(p.size), p.in_channels, p.batch, 1, 1), (channel, image, image, image))
    return Map("source", tensor, p.dtype, (t.chunk, t.chunk, 1, 1, 1), (1,) * 5, SPAN, p.precision == "tf32")


# --- candidates ------------------------------------------------------------------------------------------------------


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why these kernels cannot serve a problem, in a sentence; None when they may."""
    if refused := tile.refusal(p, gpu):
        return refused
    if p.pass_ != "fwd" or p.layout != "nchw":
        return "pixels as they lie are for forwards in NCHW"
    lone = p.kernel == p.stride and all(d == 1 or k == 1 for k, d in zip(p.kernel, p.dilation))
    if not lone or any(p.padding) or any(p.output_padding) or p.groups > 1:
        return "the kernel is for layers whose kernel is their stride, without padding or groups"
    if p.kernel[-1] % 2:
        return "the kernel stores two taps of a row together"
    if math.prod(p.size) * p.dtype.itemsize % 16:
        return "channels begin at places off 16 bytes, where no box does"
    if max(math.prod(p.out_size) + 2**12, math.prod(p.weight_shape) * 16, p.batch) >= MOST_COUNTED:
        return "the kernel counts a channel's outputs, and packed weights, in 32 bits"
    return None


def candidates(p: Problem, gpu: Gpu) -> Iterator[Tile]:
    """Every tile worth a look for a layer."""
    return iter(_candidates(any_size(p), gpu))


@lru_cache(maxsize=256)
def _candidates(layer: Problem, gpu: Gpu) -> tuple[Tile, ...]:
    """A layer's tiles for all sizes."""
    every = (Tile(layer, columns, mb) for columns, mb in product(_COLUMNS, (1, 2, 4)))
    return fitted((t for t in every if t.columns < 2 * t.all_columns or t.all_columns <= _COLUMNS[-1]), gpu)


# --- the cost model --------------------------------------------------------------------------------------------------


def estimate(t: Tile, p: Problem, gpu: Gpu) -> Cost:
    """What a problem takes by a tile."""
    instructions, copied = 2 * t.mb * 4 * t.chunks, t.chunks * t.stage_bytes
    return cost(
        Work(
            instructions,
            instructions * t.columns,
            waves=-(-t.tiles(p) // gpu.multiprocessors),
            moved=(math.prod(p.input_shape) + math.prod(p.output_shape)) * t.element,
            steps=t.chunks,
            stages=t.stages,
            lines=copied / 128,
            boxes=t.chunks * t.pixels // t.chunk,
            shared=instructions * 32 * t.columns + copied,
            fragments=instructions * 32 * 64,
            stored=t.pixels * t.columns * t.element / 32 * _SECTOR,
        ),
        gpu,
    )


choose = Chooser(
    refusal,
    countable(candidates),
    estimate,
    Choice,
    none="there are more tiles than the kernel counts in 32 bits",
)
"""The cheapest tile by the model, or the sentence why there is none."""
candidate = choose.candidate
