"""3-D layers without strides and of few output channels: pixels as rows of M, a walk along D. wgmma only.

A matrix instruction has 64 rows (M) and any multiple of 8 columns (N). `gather` makes output channels rows, since NCHW
results then leave by rows, and keeps to it in channels_last; a layer of 24 channels fills them with neighbouring
slices, whose taps' union it multiplies. Here output channels are columns, and to each tap of H and W those of all
kernel slices are one row of columns: an input slice is multiplied once, for all output slices that it reaches, whose
sums move through the registers as a block walks along D (``kernels/sweep.cu``). So every product is useful but those of
a walk's ends and of the tile's borders.

The pixels' side, a slice with its halo in shared memory and who brings it, is that of a `Tiling` of the layer without
its taps along D.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from upconv.cuda.axes import any_size, result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.cost import Work
from upconv.cuda.family import MOST_COUNTED
from upconv.cuda.gemm import gather
from upconv.cuda.gemm.gather_constants import pixel_constants, producer_registers
from upconv.cuda.gemm.gather_search import chunk_sizes
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gemm.tiling_pixels import MAX_PIXELS
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Map
from upconv.cuda.pixels.tile import MOST_COLUMNS, Tile, moved, stores_wide
from upconv.derived import derived_from, settled, varied
from upconv.problem import Problem

_MOST_INSTRUCTIONS = 192  # of a consumer for a chunk: they are one stretch of code
_WIDTHS = (16, 32, 48, 64, 72, 96, 100, 128)
"""Columns of tiles: few, since each is a kernel."""
_SUBTILES = range(1, 9)
# Stages of pixels, slots and weights, by whether layouts are channels-last: the first that fit. With a third stage of
# pixels consumers part: one stores while the other multiplies (docs/experiments.md).
_RINGS = {
    True: ((6, 2, 6), (4, 2, 6), (4, 2, 4), (3, 2, 4), (3, 2, 3), (2, 2, 3)),
    False: ((3, 4, 6), (3, 4, 4), (3, 3, 4), (3, 3, 3), (3, 2, 3), (2, 2, 3)),
}
_STORE = 1.44  # clocks of a consumer for 32 bytes of stores


@dataclass(frozen=True)
class Sweep(Tile):
    """As `Tile`, whose stages are of the ring of pixels."""

    shape: tuple[int, int]
    """Outputs of a tile along H and W."""
    nb: int
    """Subtiles of 64 pixel rows that a consumer accumulates."""
    chunk: int
    """Input channels of a chunk."""
    stages_s: int = 2
    stages_w: int = 2
    w_stage: int = 8
    """Steps of K of a stage of the weights' ring: whole taps."""

    mode = file = "sweep"
    # In channels_last `gather` is the faster one for gradients (docs/experiments.md).
    serves = ("fwd", "nchw"), ("fwd", "channels_last"), ("grad-input", "nchw")
    none = "no tile of this layer fits in registers, shared memory and one stretch of code"
    registers = 56, 200
    threads = 512
    """Of a block: `gather`'s producers and two consumers'."""

    @classmethod
    def refused(cls, p: Problem) -> str | None:
        if p.rank != 3 or p.batch_as_width:
            return "the kernel serves 3-D layers, whose images are not side by side"
        if max(p.stride) > 1 or p.dilation[0] > 1:
            return "the kernel has no strides, and no dilation along the depth"
        if p.kernel[0] == 1 or p.padding[0] >= p.kernel[0]:
            return "each output slice reads one of the input, so that none is read twice"
        if (cout := result_shape(p)[1]) > MOST_COLUMNS:
            return f"{cout} output channels are more than the {MOST_COLUMNS} columns of a matrix instruction"
        if source_shape(p)[-1 if p.layout == "nchw" else 1] * p.dtype.itemsize % 16:
            return "boxes want rows, or pixels, of whole 16 bytes"
        return None

    @classmethod
    def candidates(cls, p: Problem, gpu: Gpu) -> Iterator[Sweep]:
        h, w = result_shape(p)[3:]
        widest = next((width for width in _WIDTHS if width >= w), _WIDTHS[-1])
        for s in _tiles(any_size(p), gpu):
            rows, width = s.shape
            # In NCHW a second tile's boxes begin at 16 bytes, too.
            aligned = s.channels_last or width >= w or width % s.pixels.vec == 0
            fits = width <= widest and (s.nb == 1 or rows < h + 1)
            if aligned and fits and s.sizes(p, gpu)[-1] < MOST_COUNTED // 2:
                yield s

    @property
    def channels_last(self) -> bool:
        return self.problem.layout == "channels_last"

    # --- the kernel --------------------------------------------------------------------------------------------------

    @derived_from("problem", "shape", "chunk", "stages", "stages_s")
    def pixels(self) -> Tiling:
        """The tiling of a tile's pixels, of the layer without its taps along D; its M means nothing."""
        return varied(self._chunk_pixels, stages_p=self.stages, stages_s=self.stages_s)

    @derived_from("problem")
    def _any_pixels(self) -> Tiling:
        """`pixels` of whatever tile and chunk."""
        p = self.problem
        slice_ = p.with_(
            kernel=(1, *p.kernel[1:]), padding=(0, *p.padding[1:]), output_padding=(0, *p.output_padding[1:])
        )
        return settled(Tiling(slice_, (1, 64), (1, 1, 1, 64), 0, 8), "problem", "unroll", "subs", "w_subs", "classes")

    @derived_from("problem", "shape", "chunk")
    def _chunk_pixels(self) -> Tiling:
        """`pixels` with whatever stages: what follows from the others is found here, once for all of them."""
        t = varied(self._any_pixels, tile=(1, 1, *self.shape), chunk=self.chunk)
        _ = t.pixels, t.tensor_map, t.strided_box
        return t

    def numbers(self, c: Any) -> None:
        """See kernels/sweep.cu, and gather_tile.cuh for those of `pixels`."""
        p, t = self.problem, self._chunk_pixels
        c.grad_input, c.nb, c.taps = p.pass_ == "grad-input", self.nb, t.problem.taps
        c.slots = p.kernel[0]  # output slices whose sums a thread holds
        c.slot_columns = -(-c.cout // 8) * 8
        c.b_columns = c.slots * c.slot_columns  # of a matrix instruction
        # The output slice that an input slice reaches first, less the input slice.
        c.first_slot = p.padding[0] - (c.slots - 1) if c.grad_input else -p.padding[0]
        taps = [tap for blocks in t.entries for block in blocks for tap in block]
        c.tap_entries = t.multiplied.most
        c.tap_rows = tuple(t.shift(offsets) for offsets, _ in taps)
        c.tap_indices = tuple(index for _, indices in taps for index in indices)
        c.chunk_steps = c.tap_entries * t.k_steps  # of K
        c.packed_words = t.chunks * c.chunk_steps * c.b_columns * 8
        c.wide_stores = self.channels_last and stores_wide(self.element, c.slot_columns, t.cout_g)
        c.producer_registers = producer_registers(t)
        c.consumer_registers = 256 - c.producer_registers
        # Bytes that instructions read behind the last tile, for positions that nobody stores; the ring follows there.
        c.read_behind = (max(c.tap_rows) + self.nb * 128 - t.pixels) * t.row_bytes

    def constants(self) -> dict[str, jit.Constant]:
        rings = {"stages_w": self.stages_w, "w_stage": self.w_stage}
        return pixel_constants(self.pixels) | super().constants() | rings

    @property
    def weight_bytes(self) -> int:
        """Of their ring."""
        return int(self.stages_w * self.w_stage * self.c.b_columns * 32)

    @property
    def shared_bytes(self) -> int:
        t = self.pixels
        part = -(-t.pixels * t.row_bytes // 1024) * 1024
        rings = self.stages * (part + 16) + self.weight_bytes + 16 * self.stages_w
        if self.channels_last:
            return rings
        return rings + self.stages_s * (t.slot_bytes + 16)

    @property
    def sums(self) -> int:
        return int(self.nb * self.c.b_columns // 2)

    @property
    def fits(self) -> bool:
        t, c, (h, w) = self.pixels, self.c, self.shape
        return (
            self.stages_w >= 2
            and super().fits
            and self.w_stage % t.k_steps == 0
            and (h - 1) * t.pitch + w <= self.nb * 128
            and c.b_columns <= MOST_COLUMNS
            and c.chunk_steps * self.nb <= _MOST_INSTRUCTIONS
            and t.pixels <= MAX_PIXELS
            and t.tensor_map
            and not t.strided_box  # of a tile's pixels there is one
            and (not self.channels_last or c.read_behind <= self.weight_bytes)
        )

    @property
    def packed_as(self) -> tuple[Any, ...]:
        p = self.problem
        return self.chunk, p.precision, p.pass_, self.c.tap_entries

    @property
    def aligned(self) -> bool:
        return self.channels_last

    # --- a size ------------------------------------------------------------------------------------------------------

    def counts(self, p: Problem, gpu: Gpu) -> tuple[int, int, int, int]:
        """Images, segments of a walk along D, and tiles along H and W."""
        d, h, w = result_shape(p)[2:]
        rows, columns = -(-h // self.shape[0]), -(-w // self.shape[1])
        return p.batch, _segments(p.batch * rows * columns, d, self.c.slots, gpu.multiprocessors), rows, columns

    def walk(self, p: Problem, gpu: Gpu) -> int:
        """Result slices of a walk, which takes a step more for each slot but one."""
        return -(-result_shape(p)[2] // self.counts(p, gpu)[1])

    def tiles(self, p: Problem) -> int:
        """Without segments, which are fewer than slices."""
        d, h, w = result_shape(p)[2:]
        return p.batch * d * -(-h // self.shape[0]) * -(-w // self.shape[1])

    def grid(self, p: Problem, gpu: Gpu) -> int:
        """Blocks: one for each multiprocessor."""
        return min(math.prod(self.counts(p, gpu)), gpu.multiprocessors)

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        n, segments, rows, columns = self.counts(p, gpu)
        steps = self.walk(p, gpu) + self.c.slots - 1
        shapes = *source_shape(p)[2:], *result_shape(p)[2:]
        return n, *shapes, segments, rows, columns, n * segments * rows * columns * steps

    def source_map(self, p: Problem) -> Map:
        (found,) = gather.source_maps(self.pixels, p)
        return found

    def work(self, p: Problem, gpu: Gpu) -> Work:
        """Slices are tiles here."""
        t, last, counts = self.pixels, self.channels_last, self.counts(p, gpu)
        # Slices that the input has not, at either end of its depth, cost nothing.
        slices = self.walk(p, gpu) + (self.c.slots - 1) * (1 - 1 / counts[1])
        instructions = t.chunks * self.c.chunk_steps * 2 * self.nb
        shared = 0
        if not last:
            shared = (
                instructions * 32 * (64 + self.c.b_columns)
                + 3 * t.pixels * t.row_bytes * t.chunks
                + self.packed_words * 4
            )
        return Work(
            instructions,
            instructions * self.c.b_columns,
            waves=-(-math.prod(counts) // gpu.multiprocessors) * slices,
            moved=moved(p),
            steps=t.chunks * -(-self.c.chunk_steps // self.w_stage),
            stages=self.stages if last else self.stages_s,
            lines=t.chunks * t.pixels if last else 0,
            shared=shared,
            chunks_turned=0 if last else t.chunks,
            turned=0 if last else t.chunks * -(-t.pixels // 192) * t.k_steps * 8 // t.element,
            stored=math.prod(self.shape) * t.cout_g * t.element / 32 * _STORE,
            descriptors=True,
        )

    def text(self, p: Problem, gpu: Gpu) -> str:
        return (
            f"tile {'x'.join(map(str, self.shape))} (HxW), walks of {self.walk(p, gpu)} slices, "
            f"{self.c.b_columns} columns, chunk of {self.chunk} channels, weights in a ring of {self.stages_w} x "
            f"{self.w_stage} steps"
        )


@lru_cache(maxsize=4096)
def _segments(walks: int, slices: int, slots: int, multiprocessors: int) -> int:
    """Into how many segments walks are cut, so that the blocks are busy alike; each begins with ``slots - 1`` more."""

    def steps(segments: int) -> int:
        return -(-walks * segments // multiprocessors) * (-(-slices // segments) + slots - 1)

    return min(range(1, min(slices, 256) + 1), key=lambda n: (steps(n), n))


@lru_cache(maxsize=256)
def _tiles(layer: Problem, gpu: Gpu) -> tuple[Sweep, ...]:
    """A layer's sweeps for all sizes: searched once, then one millisecond for each size."""
    chunks, found = chunk_sizes(layer), []
    first = settled(Sweep(layer, (1, 1), 1, chunks[0]), "problem")
    for nb, width in product(_SUBTILES, _WIDTHS):
        base = varied(first, shape=(1, width), nb=nb)
        if not base.holds:
            continue
        # What `fits` would refuse, before there are tiles for it: two thirds of all.
        short = [c for c in chunks if base.c.tap_entries * (c * base.element // 32) * nb <= _MOST_INSTRUCTIONS]
        rows = (nb * 128 - width) // base.pixels.pitch + 1 if short else 0
        for chunk in short if rows > 0 else ():
            one = varied(base, shape=(rows, width), chunk=chunk)
            found += [s] if (s := _fitted(one, gpu)) else []
    return tuple(found)


def _fitted(s: Sweep, gpu: Gpu) -> Sweep | None:
    """The sweep with as many stages as shared memory allows; None when it does not fit at all."""
    k_steps = s.pixels.k_steps
    taps = max(1, min(s.c.tap_entries, max(1, 24 // s.nb) // k_steps))  # of a stage of the ring: some 24 instructions
    s = varied(s, w_stage=taps * k_steps)
    for stages, slots, weights in _RINGS[s.channels_last]:
        fit = varied(s, stages=stages, stages_s=slots, stages_w=weights)
        if fit.shared_bytes <= gpu.shared_bytes and fit.fits:
            return fit
    return None
