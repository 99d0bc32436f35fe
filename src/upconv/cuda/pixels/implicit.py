"""Forward and gradient for the input of channels-last layers as an implicit GEMM, a tap at a time. wgmma only.

`gather` reads a pixel of the source once for several taps, which are shifts of one tile; so tiles are whole
rows of 8 pixels and more, and images of 14 x 14 leave a quarter of them empty. Where taps share little (the kernel is
about the stride), or channels are many and images small, there is nothing to gain by that: here each tap has pixels of
its own, a tile is a box of any shape, and channels of the result are columns of any number. Weights stream through the
ring beside the pixels, so that layers of any width are served (``kernels/pixels_implicit.cuh``). A forward has a GEMM
for each phase, whose K is the phase's taps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple

from upconv.cuda.axes import any_size, gather_axes, result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import channels_last, fullest
from upconv.cuda.cost import Work
from upconv.cuda.family import MOST_COUNTED
from upconv.cuda.gpu import CLUSTERS, LINE, MAX_BOX_STEP, RATES, Gpu
from upconv.cuda.launches import Argument, Given, Map, Operand, Pointer, ints
from upconv.cuda.packs import rows_of_taps
from upconv.cuda.pixels.tile import (
    CONSUMERS,
    MOST_COLUMNS,
    Tile,
    fitted,
    moved,
    stores_wide,
)
from upconv.derived import derived_without, varied
from upconv.problem import Problem, Triple, triple

_MOST_TAPS = 512  # and phases
_WASTE = 1.04  # columns that all blocks have, of a result's channels
_OWN = 1.8  # of a line's time: of pixels, which are a block's own, where all blocks read the same weights together
_SQUARE = 64  # channels and columns of weights, which a block of `pack` turns


class Phase(NamedTuple):
    """Results that see the same taps; triples are along D, H and W."""

    first: Triple
    """Its first result; the next ones are the strides apart."""
    taps: tuple[tuple[int, Triple], ...]
    """Its taps' indices in the kernel, and each one's pixel of the source, less that of the tile's first."""


@lru_cache(maxsize=256)
def phases(p: Problem) -> tuple[Phase, ...]:
    """A layer's at any size, those of most taps first; a gradient for the input has one, of all taps."""
    axes, (_, of_h, of_w) = gather_axes(p), triple(p.kernel)
    found = []
    for first in product(*(range(axis.out_step) for axis in axes)):
        each = product(*(axis.at(at) for axis, at in zip(axes, first)))
        taps = (((i * of_h + j) * of_w + k, (d, h, w)) for (i, d), (j, h), (k, w) in each)
        found.append(Phase((first[0], first[1], first[2]), tuple(taps)))
    return tuple(sorted(found, key=lambda phase: -len(phase.taps)))


@dataclass(frozen=True)
class Implicit(Tile):
    """As `Tile`; its box of pixels is a problem's own. A stage has a step's pixels and weights."""

    columns: int
    """Of a matrix instruction: channels of the result, a multiple of 8."""
    mb: int
    """Subtiles of 64 pixels of a consumer."""
    halves: bool
    """Whether both consumers share a tile, each with half of its pixels; else they take whole tiles in turn."""
    cluster: int = 1
    """Blocks that share a tile's steps and add up their sums."""

    mode = "implicit"
    serves = ("fwd", "channels_last"), ("grad-input", "channels_last")
    none = "no tile's stages fit in shared memory, or its tiles are too many to count"
    beside_pack = False
    """Blocks that begin one by one lose touch with those that read the same pixels and weights
    (docs/experiments.md)."""

    @classmethod
    def refused(cls, p: Problem) -> str | None:
        if p.pass_ != "fwd" and max(p.stride) > MAX_BOX_STEP:
            return f"boxes take steps of at most {MAX_BOX_STEP} pixels"
        if p.taps > _MOST_TAPS:
            return f"{p.taps} taps are more than the {_MOST_TAPS} of the kernel's tables"
        if p.pass_ == "fwd" and math.prod(p.stride) > _MOST_TAPS:
            return f"{math.prod(p.stride)} phases are more than the {_MOST_TAPS} of the kernel's tables"
        if source_shape(p)[1] * p.dtype.itemsize % 16:
            return "boxes want pixels of whole 16 bytes"
        if math.prod(p.weight_shape) * p.dtype.itemsize >= 2**35 or source_shape(p)[1] * p.taps >= 2**31:
            return "units of the weight are counted in 32 bits, which 2^31 of 16 bytes are too many for"
        return None

    @classmethod
    def candidates(cls, p: Problem, gpu: Gpu) -> Iterator[Implicit]:
        """Those for all sizes, and those of clusters at the problem's own."""
        return (t for whole in alone(any_size(p), gpu) for t in (whole, *_clustered(whole, p, gpu)))

    # --- the kernel --------------------------------------------------------------------------------------------------

    def numbers(self, c: Any) -> None:
        """See kernels/pixels_implicit.cuh."""
        p, found = self.problem, phases(self.problem)
        taps = [tap for phase in found for tap in phase.taps]
        of_source, of_result = self.steps_between
        c.columns, c.mb, c.halves = self.columns, self.mb, self.halves
        c.forward, c.taps, c.phases = self.forward, p.taps, len(found)
        # A forward's channels-last weights have channels of the result side by side.
        c.turned = self.forward and self.element == 2 and self.columns % self.chunk == 0 and c.cout % 8 == 0
        # Channels that lie side by side in packed weights, and other columns, that a block of `pack` turns.
        c.pack_rows, c.pack_columns = _SQUARE, _SQUARE
        if c.turned or not self.forward:  # all taps of a channel of the other side
            c.pack_columns = p.taps
            c.pack_rows = next(n for n in (64, 32, 16, 8) if n * p.taps <= _SQUARE**2)
        c.of_axes("step", of_source)
        for axis, name in enumerate("dhw"):
            setattr(c, f"taps_{name}", tuple(offsets[axis] for _, offsets in taps))
        if len(found) > 1:
            c.kernel_taps = tuple(index for index, _ in taps)
            c.first_taps = tuple(accumulate((len(phase.taps) for phase in found), initial=0))
            c.of_axes("out_step", of_result)
            for axis, name in enumerate("dhw"):
                setattr(c, f"phases_{name}", tuple(phase.first[axis] for phase in found))
        c.stage_bytes = (self.rows + self.columns) * LINE
        c.packed_words = math.prod(p.weight_shape) * self.element // 4

    def constants(self) -> dict[str, jit.Constant]:
        """Lanes of a cluster's blocks store as their sums lie, since these then have more to divide."""
        wide = self.cluster == 1 and stores_wide(self.element, self.columns, self.c.cout)
        return super().constants() | {"cluster": self.cluster, "wide_stores": wide}

    @property
    def forward(self) -> bool:
        return self.problem.pass_ == "fwd"

    @property
    def rows(self) -> int:
        """Pixels of a tile, at most."""
        return 64 * self.mb * (CONSUMERS if self.halves else 1)

    @property
    def chunk(self) -> int:
        """Channels of a step: of the source, and of the result in a box of a forward's channels-last weights."""
        return LINE // self.element

    @property
    def sums(self) -> int:
        return self.mb * self.columns // 2

    @property
    def steps_between(self) -> tuple[Triple, Triple]:
        """Pixels of the source, and of the result, from one of a tile to the next along D, H and W."""
        one = (1, 1, 1)
        return (one, self.strides) if self.forward else (self.strides, one)

    @property
    def entry(self) -> str:
        return "pixels_last_clusters" if self.cluster > 1 else "pixels_last"

    @property
    def in_place(self) -> bool:
        """Other weights are packed to be channels-last."""
        return self.c.turned or not self.forward

    @property
    def packed_as(self) -> tuple[Any, ...]:
        return self.problem.precision, self.problem.pass_, self.in_place

    @property
    def pack_blocks(self) -> int:
        side_by_side, other = self.channels[::-1] if self.c.turned else self.channels
        return -(-other * self.problem.taps // self.c.pack_columns) * -(-side_by_side // self.c.pack_rows)

    # --- a size ------------------------------------------------------------------------------------------------------

    def fullest(self, p: Problem) -> tuple[int, tuple[int, int, int, int]]:
        """Boxes of a phase's pixels, and images, D, H and W of one: the fewest that hold all."""
        of_source, of_result = (steps[3 - p.rank :] for steps in self.steps_between)
        size = tuple(-(-n // step) for n, step in zip(result_shape(p)[2:], of_result))
        return fullest(p.batch, size, of_source, self.rows)

    @property
    def column_blocks(self) -> int:
        return -(-self.channels[1] // self.columns)

    def tiles(self, p: Problem) -> int:
        """Of all phases."""
        return self.fullest(p)[0] * self.column_blocks * len(self.steps)

    @derived_without("cluster", "stages")
    def steps(self) -> tuple[int, ...]:
        """Of each phase's tiles: a tap's chunk each."""
        chunks = -(-self.channels[0] // self.chunk)
        return tuple(len(phase.taps) * chunks for phase in phases(self.problem))

    def turn(self, gpu: Gpu) -> int:
        """Pixel tiles after which the first phase is another, so that a block's tiles are of all phases by turns.

        From tile to tile its phase moves on by as much as the blocks leave beyond whole rounds, or by one.
        """
        blocks, of = max(1, gpu.multiprocessors // self.column_blocks), len(self.steps)
        return MOST_COUNTED // 2 if math.gcd(blocks, of) == 1 else max(1, blocks // of)

    def grid(self, p: Problem, gpu: Gpu) -> int:
        return self.tiles(p) * self.cluster if self.cluster > 1 else super().grid(p, gpu)

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        count, box = self.fullest(p)
        sides = (p.batch, *triple(result_shape(p)[2:]))
        steps = (1, *self.steps_between[1])
        counts = tuple(-(-n // (of * step)) for n, of, step in zip(sides, box, steps))
        assert math.prod(counts) == count
        return (*sides, *box, *counts[1:], self.tiles(p), self.turn(gpu))

    def source_map(self, p: Problem) -> Map:
        """Over the source with a problem's box, of channels, W, H, D and images."""
        channels, *size = source_shape(p)[1:]
        images, *counts = self.fullest(p)[1]
        tensor, (d, h, w) = channels_last(p.batch, channels, size, self.element), self.steps_between[0]
        of_d, of_h, of_w = ((count - 1) * step + 1 for count, step in zip(counts, (d, h, w)))
        box = self.chunk, of_w, of_h, of_d, images
        return Map("source", tensor, p.dtype, box, (1, w, h, d, 1), LINE, p.precision == "tf32")

    def weight_map(self, p: Problem, operand: Operand) -> Map:
        """Over channels-last or packed weights, with a box of a tap's for a chunk."""
        (channels, columns), chunk = self.channels, self.chunk
        if self.c.turned:
            return Map(operand, rows_of_taps(p, channels, columns), p.dtype, (chunk, 1, chunk, 1, 1), span=LINE)
        tensor, box = rows_of_taps(p, columns, channels), (chunk, 1, self.columns, 1, 1)
        return Map(operand, tensor, p.dtype, box, span=LINE, rounded=p.precision == "tf32")

    def arguments(self, p: Problem, gpu: Gpu, given: Given, bias: Pointer, result: Pointer) -> tuple[Argument, ...]:
        weight = self.weight_map(p, "weight" if given.weight == "in place" else "packed")
        return result, bias, *ints(self.sizes(p, gpu)), self.source_map(p), weight

    def waves(self, p: Problem, gpu: Gpu) -> tuple[int, int]:
        """(tiles of the block that has most, their steps)."""
        tiles, of = self.tiles(p) * self.cluster, len(self.steps)
        waves = -(-tiles // gpu.multiprocessors)
        if self.cluster > 1:
            return waves, waves * -(-self.steps[0] // self.cluster)
        rounds, rest = divmod(waves, of)
        return waves, rounds * sum(self.steps) + sum(self.steps[:rest])

    def work(self, p: Problem, gpu: Gpu) -> Work:
        waves, every = self.waves(p, gpu)
        steps = every / waves
        instructions = LINE // 32 * self.rows // 64 * steps
        wide = self.cluster == 1 and stores_wide(self.element, self.columns, self.channels[1])
        narrow = 2 if self.element == 4 and not wide else 1
        read = 1.0 if self.forward else math.prod(min(k, s) / s for k, s in zip(p.kernel, p.stride))
        return Work(
            instructions,
            instructions * self.columns,
            waves=waves,
            moved=moved(p, read=read),
            steps=steps,
            stages=self.stages,
            lines=max(self.rows + self.columns, _OWN * self.rows) * steps,
            boxes=2 * steps,
            stored=self.rows * self.columns / self.cluster * narrow / 8 * RATES.store,
            descriptors=True,
            in_turn=not self.halves,
            exchanged=self.rows * self.columns if self.cluster > 1 else 0,
        )

    def text(self, p: Problem, gpu: Gpu) -> str:
        shared = f", steps shared by clusters of {self.cluster} that add up their sums" if self.cluster > 1 else ""
        return (
            f"tile of {'x'.join(map(str, self.fullest(p)[1]))} pixels (NxDxHxW) of {self.rows} x {self.columns} "
            f"channels, {'halved' if self.halves else 'in turn'}, ring of {self.stages} of {self.chunk} channels of "
            f"a tap{shared}"
        )


def _widths(result: int) -> tuple[int, ...]:
    """Columns of a block for so many channels of a result: few, since each is a kernel."""
    even = {-(-result // (16 * n)) * 16 for n in range(1, -(-result // 32) + 1)}
    fitting = {n for n in even if n <= MOST_COLUMNS and -(-result // n) * n <= _WASTE * result}
    blocks = -(-result // MOST_COLUMNS)
    return tuple(sorted(fitting or {-(-result // (8 * blocks)) * 8}))


@lru_cache(maxsize=256)
def alone(layer: Problem, gpu: Gpu) -> tuple[Implicit, ...]:
    """A layer's tiles for all sizes, without clusters."""
    shapes = product(_widths(result_shape(layer)[1]), (1, 2), (True, False))
    found = fitted((Implicit(layer, *shape) for shape in shapes), gpu)
    # Weights as they lie spare a training step their packing (docs/experiments.md).
    return tuple(t for t in found if t.c.turned) or found


def _clustered(t: Implicit, p: Problem, gpu: Gpu) -> Iterator[Implicit]:
    """With clusters that share its steps, where tiles leave multiprocessors idle and sums have room in the ring."""
    tiles, sums = t.tiles(p), CONSUMERS * 128 * t.sums * 4
    for cluster in CLUSTERS:
        fits = t.halves and sums <= t.stages * t.c.stage_bytes
        if fits and 2 * cluster <= t.steps[0] and tiles <= gpu.clusters(cluster):
            yield varied(t, cluster=cluster)
