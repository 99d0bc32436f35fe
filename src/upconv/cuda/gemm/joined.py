"""Forwards without a stride in NCHW, whose rows are joined to one. wgmma only.

Without padding along W such a layer's rows of results are longer than the source's by as much as a kernel reaches, so
that tiles which are rectangles end amid empty columns, and rows begin anywhere. But zeros behind each row of the source
make one row of a slice, in which a tap is a shift (``kernels/joined.cu``): tiles are neighbouring results of whatever
rows, all useful, and a channel's are neighbours in memory, in whole sectors. What it costs is the halo of whole rows,
so that it is for narrow images, as 3-D ones are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from upconv.cuda import family
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import dense
from upconv.cuda.cost import Work
from upconv.cuda.gpu import FRAGMENT, LINE, MAX_BOX, RATES, ROW_BYTES, ROWS_M, Gpu
from upconv.cuda.launches import Map
from upconv.cuda.pixels.choice import TileChoice, cheapest
from upconv.cuda.pixels.tile import MOST_STAGES, moved
from upconv.cuda.pixels.tile import Tile as Base
from upconv.derived import derived_from
from upconv.problem import Problem, triple

_PLACES = (256, 248, 240, 232, 224, 208, 192, 160, 128)
"""Of a tile; several, since a slice's are divided among whole tiles."""
_MOST_TAPS = 64  # of a slice, all of which are straight code
_MOST_TAPS_OF_STAGE = 6
_BUFFERS = {4: 8 * 8 * (512 + 32), 2: 8 * 8 * (512 + 16)}  # bytes of what leaves, of 8 warps, by those of an element
_RINGS = (4, 6), (4, 4), (3, 2), (2, 2)
"""Stages and slots: the first whose memory leaves three stages of weights."""


@dataclass(frozen=True)
class Tile(Base):
    """As `Base`, whose stages are of the ring of pixels and have a chunk of one slice."""

    span: int
    """Places of a stage: of a tile with its halo."""
    room: int
    """Pixels of a slot: rows of the source that a tile with its halo may touch."""
    places: int = 256
    """Of a tile: neighbouring results."""
    slots: int = 2
    """Of the ring of rows as they lie, likewise."""
    weight_stages: int = 2
    """Of the ring of weights."""

    family = mode = file = "joined"
    serves = (("fwd", "nchw"),)

    @property
    def instance(self) -> str:
        return f"joined<{jit.CONFIG}>"

    @classmethod
    def refused(cls, p: Problem) -> str | None:
        width, reach = source_shape(p)[-1], (p.kernel[-1] - 1) * p.dilation[-1]
        if max(p.stride) > 1:
            return "rows are joined without strides"
        if max(p.kernel[-2:]) == 1:
            return "slices of one tap have no halo, and tiles of any shape"
        if p.rank == 1:
            return "a 1-D layer has one row"
        if p.padding[-1] or gap(p) < reach:
            return "between joined rows are zeros, which padding takes away"
        if width > MAX_BOX:
            return f"rows of {width} columns are too long to be joined: a tile's halo is whole rows"
        if math.prod(p.kernel[-2:]) > _MOST_TAPS:
            return f"the kernel has straight code for {_MOST_TAPS} taps of a slice at most"
        if width * p.dtype.itemsize % 16:
            return f"rows of {width} columns begin off 16 bytes, where no box does"
        if plane(p) % 2:
            return "slices of the result of an odd number begin off pairs, which the kernel stores together"
        if max(math.prod(result_shape(p)[2:]) + 2**12, math.prod(p.weight_shape) * 4, p.batch) >= family.MOST_COUNTED:
            return "the kernel counts a channel's results, and packed weights, in 32 bits"
        return None

    @derived_from("problem")
    def gap(self) -> int:
        return gap(self.problem)

    @derived_from("problem")
    def reach(self) -> tuple[int, int]:
        """Rows and columns that a slice's taps reach."""
        (_, kh, kw), (_, dh, dw) = self.kernel, triple(self.problem.dilation)
        return (kh - 1) * dh, (kw - 1) * dw

    def halo(self, pitch: int) -> int:
        """Places ahead of a tile that its taps reach, where rows of results are so long."""
        rows, columns = self.reach
        return rows * pitch + columns

    def rows_at(self, pitch: int) -> int:
        """Rows of the source that a tile with its halo may touch, where those of results are so long: it begins in a
        row's last place at worst."""
        return (pitch + self.places + self.halo(pitch) - 2) // pitch + 1

    def serves_width(self, width: int) -> bool:
        """Whether rings have room for rows of the source of so many columns, and a box does."""
        span, room = self.needed(width)
        return span <= self.span and room <= self.room and max(width, self.rows_at(width + self.gap)) <= MAX_BOX

    def needed(self, width: int) -> tuple[int, int]:
        """Places of a stage, and pixels of a slot, in whole 256 bytes."""
        pitch = width + self.gap
        room = self.columns(width) * self.rows_at(pitch)
        return -(-(self.places + self.halo(pitch)) // 8) * 8, -(-room // 8) * 8

    def columns(self, width: int) -> int:
        """Of a slot's row: whole units of 16 bytes; in 16 bits whole boxes of a line, side by side, which are
        swizzled."""
        unit = LINE // 2 if self.element == 2 else 4
        return -(-width // unit) * unit

    def numbers(self, c: Any) -> None:
        """See kernels/joined.cu."""
        p, kernel = self.problem, self.kernel
        c.places = self.places
        c.of_axes("kernel", kernel)
        c.of_axes("dilation", triple(p.dilation))
        c.of_axes("padding", triple(p.padding, 0))
        c.slots, c.weight_stages = self.slots, self.weight_stages
        c.warps_of_stage = 2 if self.slots < 4 else 1  # of two, that turn a stage together: of few slots both
        c.chunk = ROW_BYTES // self.element  # channels
        c.chunks, c.blocks = -(-c.cin // c.chunk), -(-c.cout // ROWS_M)  # tiles along the result's channels
        # Of a slice; of a stage as many as leave the fewest stages, evenly.
        c.taps = kernel[1] * kernel[2]
        c.taps_of_stage = -(-c.taps // -(-c.taps // _MOST_TAPS_OF_STAGE))
        c.packed_words = c.blocks * c.chunks * kernel[0] * c.taps * FRAGMENT // 4
        c.span, c.stage_bytes, c.slot_bytes = self.span, self.span * ROW_BYTES, self.room * ROW_BYTES
        c.weight_bytes = c.taps_of_stage * FRAGMENT  # of a stage
        c.fixed_bytes = self.slots * (c.slot_bytes + 16) + self.weight_stages * (c.weight_bytes + 16)
        c.fixed_bytes += _BUFFERS[self.element] + 32

    @property
    def fits(self) -> bool:
        # Of two warps that turn every second stage each has slots and stages of its own.
        even = self.c.warps_of_stage == 2 or self.slots % 2 == self.stages % 2 == 0
        return even and min(self.stages, self.slots, self.weight_stages) >= 2

    @property
    def packed_as(self) -> tuple[Any, ...]:
        return (self.problem.precision,)

    # --- sizes, which are run-time arguments -------------------------------------------------------------------------

    def tiles(self, p: Problem) -> int:
        """Of a problem of this layer."""
        return int(p.batch * slices(p)[1] * -(-plane(p) // self.places) * self.c.blocks)

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        pitch = result_shape(p)[-1]
        slot = self.rows_at(pitch), self.columns(source_shape(p)[-1])
        return *slices(p), pitch, plane(p), -(-plane(p) // self.places), self.tiles(p), *slot

    def source_map(self, p: Problem) -> Map:
        """Over the source with a slot's box, of 16 bits one of those side by side, with channels behind W. float32 is
        rounded to TF32 on its way."""
        channels, *size = source_shape(p)[1:]
        d, h, w = triple(size)
        tensor, rows = dense((w, h, d, channels, p.batch), self.element), self.rows_at(result_shape(p)[-1])
        if self.element == 4:
            return Map("source", tensor, p.dtype, (self.columns(w), rows, 1, self.c.chunk, 1), rounded=True)
        return Map("source", tensor.channels_second(), p.dtype, (LINE // 2, self.c.chunk, rows, 1, 1), span=LINE)

    def work(self, p: Problem, gpu: Gpu) -> Work:
        c, pitch = self.c, result_shape(p)[-1]
        stages, span, arriving = (
            c.chunks * self.kernel[0],
            self.places + self.halo(pitch),
            self.rows_at(pitch) * self.columns(source_shape(p)[-1]),
        )
        turned = 2 * (arriving if self.element == 2 else span)  # read, and written
        # What instructions read, weights as they come, and pixels.
        shared = c.taps * (self.places * ROW_BYTES + 2 * FRAGMENT) + (arriving + turned) * ROW_BYTES
        return Work(
            stages * c.taps,
            stages * c.taps * self.places,
            waves=-(-self.tiles(p) // gpu.multiprocessors),
            moved=moved(p),
            steps=stages,
            stages=self.stages,
            shared=stages * shared,
            chunks_turned=stages * c.warps_of_stage,
            turned=stages * c.warps_of_stage * span / _PLACES[0],  # of the largest tile as much as a pixel of a thread
            stored=ROWS_M * self.places / 8 * RATES.store,
            in_turn=True,
        )

    def summary(self, p: Problem, gpu: Gpu) -> str:
        c = self.c
        return (
            f"rows joined to one: wgmma {p.precision}, tile of {self.places} places x {ROWS_M} channels, "
            f"{self.stages} stages of {c.span} places x {c.chunk} channels, {self.slots} of {self.room} "
            f"pixels, {self.weight_stages} of {c.taps_of_stage} taps"
        )


def slices(p: Problem) -> tuple[int, int]:
    """The source's and the result's."""
    return (source_shape(p)[2], result_shape(p)[2]) if p.rank == 3 else (1, 1)


def plane(p: Problem) -> int:
    """Results of a slice."""
    return math.prod(result_shape(p)[2:][-2:])


def gap(p: Problem) -> int:
    """Columns by which a row of results is longer than one of the source."""
    return result_shape(p)[-1] - source_shape(p)[-1]


class Choice(TileChoice):
    """A tile for a problem on a GPU, and what the model thinks of it."""


# --- candidates ------------------------------------------------------------------------------------------------------

refusal = Tile.refusal


def candidates(p: Problem, gpu: Gpu) -> Iterator[Tile]:
    """Every tile worth a look for a layer on images of this width."""
    size = tuple(1024 + 2 * padding for padding in p.padding)  # whose results are some
    return iter(_candidates(p.with_(batch=1, size=size, bias=False), source_shape(p)[-1], gpu))


@lru_cache(maxsize=256)
def _candidates(layer: Problem, width: int, gpu: Gpu) -> tuple[Tile, ...]:
    """A layer's tiles for all sizes of images whose source is so wide.

    Rings have as many stages as these rows leave room for. What memory is left serves longer rows, so that neighbouring
    widths have the same kernel.
    """
    found = []
    for places in _PLACES:
        least, *longer = _needed(Tile(layer, 0, 0, places), width)
        for stages, slots in _RINGS:
            t = Tile(layer, *least, places, slots, weight_stages=0, stages=stages)
            weights = min((gpu.shared_bytes - t.shared_bytes) // (t.c.weight_bytes + 16), MOST_STAGES)
            if weights >= 3 or (weights == 2 and (stages, slots) == _RINGS[-1]):
                t = replace(t, weight_stages=weights)
                left = (gpu.shared_bytes - t.shared_bytes) // ROW_BYTES
                more = (one for one in longer if stages * (one[0] - t.span) + slots * (one[1] - t.room) <= left)
                span, room = max(more, default=least)
                found.append(replace(t, span=span, room=room))
                break
    return tuple(t for t in found if t.fits and t.serves_width(width))


def _needed(t: Tile, width: int) -> list[tuple[int, int]]:
    """What rows of so many columns need, and longer ones; with them all shorter ones but in 16 bits, whose boxes of
    short rows are mostly empty."""
    unit = 16 // t.element
    first = width if t.element == 2 else unit
    every = accumulate(map(t.needed, range(first, MAX_BOX + 1, unit)), lambda a, b: (b[0], max(a[1], b[1])))
    return [*every][(width - first) // unit :]


@lru_cache(maxsize=4096)
def choose(p: Problem, gpu: Gpu) -> Choice | str:
    """The cheapest tile by the model, or the sentence why there is none."""
    if refused := refusal(p, gpu):
        return refused
    counted = (t for t in candidates(p, gpu) if t.packed_words * 4 < family.MOST_COUNTED)
    none = "no tile fits shared memory, or there are more than the kernel counts in 32 bits"
    return cheapest(Choice, counted, p, gpu) or none


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks."""
    if general:
        return "joined rows are of limited lengths, not of every size"
    return family.too_long(p) or choose(p, gpu)
