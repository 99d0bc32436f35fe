"""Forwards of layers whose kernel is their stride, from NCHW pixels as they lie: each output has one tap. wgmma only.

Such a layer, the usual upsampling of a U-Net, is a product of matrices: pixels times columns, which are taps of output
channels. `gather` makes pixels columns of N, for which float32 ones must be turned in shared memory, whose traffic is
what bounds it for many channels. Here they are rows of M, which lanes read as they lie
(``kernels/pixels_subpixel.cuh``); an image's pixels are one long row, since none has a halo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from upconv.cuda.axes import any_size
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Tensor5
from upconv.cuda.cost import Work
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Map
from upconv.cuda.pixels import tile
from upconv.cuda.pixels.choice import Chooser, TileChoice
from upconv.cuda.pixels.streamed import SUBTILES, Streamed
from upconv.cuda.pixels.tile import MOST_COUNTED, SPAN, fitted, of_axes, triple
from upconv.problem import Problem

_COLUMNS = (256, 192, 128, 96, 64, 32)
_SECTOR = 1.74  # clocks of a consumer for 32 bytes of stores, of two taps a lane


@dataclass(frozen=True)
class Tile(Streamed):
    """As `Streamed`: places are pixels of an image, columns kernel rows, output channels and taps of W."""

    mode = "subpixel"

    @property
    def chunk(self) -> int:
        """Input channels of a stage, and pixels of a row in shared memory."""
        return SPAN // self.element

    @property
    def stages_k(self) -> int:
        return -(-self.problem.in_channels // self.chunk)

    @property
    def all_columns(self) -> int:
        return self.problem.out_channels * self.problem.taps

    @property
    def stage_bytes(self) -> int:
        return self.places * SPAN + self.weight_bytes

    @property
    def packed_as(self) -> tuple[Any, ...]:
        return self.columns, self.problem.precision

    def constants(self) -> dict[str, jit.Constant]:
        own = {"columns": self.columns, "mb": self.mb}
        return super().constants() | own | of_axes("kernel", self.kernel)

    # --- a size ------------------------------------------------------------------------------------------------------

    def tiles(self, p: Problem) -> int:
        return p.batch * -(-math.prod(p.size) // self.places) * self.blocks

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        pixels = math.prod(p.size)
        return *triple(p.size), pixels, -(-pixels // self.places), 0, self.tiles(p)

    def source_map(self, p: Problem) -> Map:
        """Over the input, an image's pixels in a row, with a box of a chunk's."""
        channel = math.prod(p.size) * self.element
        image = p.in_channels * channel
        tensor = Tensor5(0, (math.prod(p.size), p.in_channels, p.batch, 1, 1), (channel, image, image, image))
        box = (self.chunk, self.chunk, 1, 1, 1)
        return Map("source", tensor, p.dtype, box, (1,) * 5, SPAN, p.precision == "tf32")

    def work(self, p: Problem, gpu: Gpu) -> Work:
        boxes, stored = self.places // self.chunk, self.places * self.columns * self.element / 32 * _SECTOR
        # Its weights' lines count too.
        lines = self.chunk + self.columns / boxes
        return self.work_of(p, gpu, boxes, self.chunk * SPAN, lines, 32 * 64, stored)

    def summary(self, p: Problem, gpu: Gpu) -> str:
        return (
            f"pixels as rows, each output a tap: wgmma {p.precision}, tile of {self.places} pixels x {self.columns} "
            f"columns, {self.stages} stages of {self.chunk} channels"
        )


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why these kernels cannot serve a problem, in a sentence; None when they may."""
    if refused := tile.refusal(p, gpu):
        return refused
    lone = p.kernel == p.stride and all(d == 1 or k == 1 for k, d in zip(p.kernel, p.dilation))
    if not lone or any(p.padding) or any(p.output_padding):
        return "the kernel is for layers whose kernel is their stride, without padding"
    if p.kernel[-1] % 2:
        return "the kernel stores two taps of a row together"
    if math.prod(p.size) * p.dtype.itemsize % 16:
        return "channels begin at places off 16 bytes, where no box does"
    if max(math.prod(p.out_size) + 2**12, math.prod(p.weight_shape) * 16, p.batch) >= MOST_COUNTED:
        return "the kernel counts a channel's outputs, and packed weights, in 32 bits"
    return None


def candidates(p: Problem, gpu: Gpu) -> tuple[Tile, ...]:
    """Every tile worth a look for a layer."""
    return _candidates(any_size(p), gpu)


@lru_cache(maxsize=256)
def _candidates(layer: Problem, gpu: Gpu) -> tuple[Tile, ...]:
    """A layer's tiles for all sizes."""
    every = (Tile(layer, columns, mb) for columns, mb in product(_COLUMNS, SUBTILES))
    return fitted((t for t in every if t.columns < 2 * t.all_columns or t.all_columns <= _COLUMNS[-1]), gpu)


choose = Chooser(TileChoice, refusal, candidates, none="there are more tiles than the kernel counts in 32 bits")
"""The cheapest tile by the model, or the sentence why there is none."""
candidate = choose.candidate
