"""Forwards of NCHW layers with strides and few channels, pixels as rows of M, weights in shared memory. wgmma only.

`gather` fills the 64 rows of a matrix instruction with output channels; a layer of 32 has two phases there, whose taps'
union is multiplied, and its pixels are turned in shared memory. Here places of the input are rows, and a phase's output
channels columns (``kernels/pixels_phases.cuh``): what is multiplied has a tap, but for phases of W that stand in for
others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, permutations, product
from typing import Any, NamedTuple

from upconv.cuda.axes import any_size, gather_axes
from upconv.cuda.compile.boxes import Five
from upconv.cuda.cost import Work
from upconv.cuda.family import MOST_COUNTED
from upconv.cuda.gpu import MAX_BOX, Gpu
from upconv.cuda.pixels.tile import CONSUMERS, MOST_COLUMNS, Tile, fitted, moved
from upconv.problem import Problem, Triple, triple

_MOST_PHASES = 5
"""Of W: their order is found by trying all."""
_PASS, _BUFFERED = 160.0, 3.0  # clocks of a pass through a consumer's buffer, and of what 32 lanes store there at once


class Shift(NamedTuple):
    """A place of the source along W that a row's taps read, from a q's own."""

    offset: int
    taps: tuple[int, ...]
    """Of the kernel along W, of the phases of W in their order; -1: none, and what it multiplies are zeros."""


@lru_cache(maxsize=1024)
def shifts_of(p: Problem) -> tuple[tuple[int, ...], tuple[Shift, ...]]:
    """The order of the phases of W, and the shifts, so that all of them together have the fewest columns.

    A shift's columns begin with the first phase.
    """
    axis = gather_axes(p)[2]
    phases = [axis.at(u) for u in range(axis.out_step)]
    offsets = sorted({offset for taps in phases for _, offset in taps})
    of = [{offset: k for k, offset in taps} for taps in phases]

    def width(order: tuple[int, ...], offset: int) -> int:
        return max(place + 1 for place, u in enumerate(order) if offset in of[u])

    order = min(permutations(range(len(phases))), key=lambda o: (sum(width(o, offset) for offset in offsets), o))
    shifts = (Shift(offset, tuple(of[u].get(offset, -1) for u in order[: width(order, offset)])) for offset in offsets)
    return order, tuple(shifts)


class User(NamedTuple):
    """A pair of phases, of D and of H, that reads a row of the source."""

    pair: int
    tap: int
    """Of the kernel's D and H, as one index."""


@lru_cache(maxsize=1024)
def rows_of(p: Problem) -> tuple[tuple[tuple[int, int], tuple[User, ...]], ...]:
    """(offsets along D and H, who reads it) of every row of the source that a row of q meets."""
    axis_d, axis_h, _ = gather_axes(p)
    found: dict[tuple[int, int], list[User]] = {}
    for pair, (ud, uh) in enumerate(product(range(axis_d.out_step), range(axis_h.out_step))):
        for (kd, od), (kh, oh) in product(axis_d.at(ud), axis_h.at(uh)):
            found.setdefault((od, oh), []).append(User(pair, kd * triple(p.kernel)[1] + kh))
    return tuple((row, tuple(users)) for row, users in sorted(found.items()))


def _span(offsets: Iterable[int]) -> tuple[int, int]:
    """The first offset, and how many from it on."""
    of = list(offsets)
    return min(of), max(of) - min(of) + 1


@dataclass(frozen=True)
class Phases(Tile):
    """As `Tile`; each consumer has a ring, whose stages have a chunk of the rows of its tile."""

    tile_w: int
    """Neighbouring q of a row, of a consumer's tile: a multiple of 64."""

    mode = "phases"
    serves = (("fwd", "nchw"),)
    none = "no tile of this layer fits this input's axes, shared memory and registers"
    rings = CONSUMERS
    registers = 64, 216

    @classmethod
    def refused(cls, p: Problem) -> str | None:
        if max(p.stride) == 1:
            return "the kernel is for layers with a stride"
        if p.stride[-1] > _MOST_PHASES:
            return f"a stride of {p.stride[-1]} along the width has more phases than the {_MOST_PHASES} that it orders"
        if math.prod(p.stride) * -(-p.out_channels // 8) * 8 > MOST_COLUMNS:
            return f"{math.prod(p.stride)} phases of {p.out_channels} channels are more than {MOST_COLUMNS} columns"
        if any(len(axis.taps) < axis.out_step for axis in gather_axes(p)):
            return "some phases have no taps, for which the kernel would multiply zeros"
        if p.kernel == p.stride:
            return "of one tap for each output there is no row that several phases read"
        if p.size[-1] * p.dtype.itemsize % 16 or p.out_size[-1] * p.dtype.itemsize % 16:
            return "the kernel loads and stores rows of whole 16 bytes"
        if math.prod(p.out_size) >= MOST_COUNTED or p.batch * math.prod(p.size) >= MOST_COUNTED:
            return "the kernel counts a channel's elements, and tiles, in 32 bits"
        return None

    @classmethod
    def candidates(cls, p: Problem, gpu: Gpu) -> Iterator[Phases]:
        return (t for t in _tiles(any_size(p), gpu) if t.c.mb == 1 or t.tile_w < 2 * t.places_of(p)[2])

    # --- the kernel --------------------------------------------------------------------------------------------------

    def numbers(self, c: Any) -> None:
        """See kernels/pixels_phases.cuh."""
        element, steps, vec = self.element, self.strides, 16 // self.element
        c.tile_w, c.mb = self.tile_w, self.tile_w // 64
        c.chunk = 32 // element  # input channels of a stage: a step of K
        c.chunks = -(-c.cin // c.chunk)
        c.of_axes("step", steps)
        c.of_axes("kernel", self.kernel)
        self._rows(c)
        self._shifts(c)
        # Elements of a row in shared memory: an odd number of 16 bytes, so that lanes' channels are in other banks.
        c.pitch = -(-(self.tile_w + c.reach_w - 1) // vec) // 2 * 2 * vec + vec
        c.stage_bytes = c.rows_d * c.rows_h * c.chunk * c.pitch * element
        # Output channels that pass through a consumer's buffer at a time, on their way to memory. They lie 16 bytes
        # beyond a multiple of 64 apart, for their lanes' banks.
        c.passed = 16 if c.co_columns % 16 == 0 else 8
        c.buffer_bytes = c.passed * (self.tile_w * steps[2] * element + 16)
        c.weight_bytes = c.chunks * c.users * c.shift_columns * 32
        c.packed_words = c.weight_bytes // 4
        c.fixed_bytes = -(-c.weight_bytes // 128) * 128 + CONSUMERS * c.buffer_bytes + 8

    def _rows(self, c: Any) -> None:
        """Of rows of the source, from a tile's first, and of the pairs of phases of D and H that read them."""
        rows = rows_of(self.problem)
        users = [user for _, of_row in rows for user in of_row]
        c.first_d, c.rows_d = _span(d for (d, _), _ in rows)
        c.first_h, c.rows_h = _span(h for (_, h), _ in rows)
        c.source_row_count, c.users = len(rows), len(users)
        c.source_rows = tuple((d - c.first_d) * c.rows_h + h - c.first_h for (d, h), _ in rows)
        c.first_users = tuple(accumulate((len(of_row) for _, of_row in rows), initial=0))  # and the end
        c.user_pairs, c.user_taps = tuple(user.pair for user in users), tuple(user.tap for user in users)
        pairs = list(product(range(c.step_d), range(c.step_h)))
        c.pairs, c.pair_phases_d, c.pair_phases_h = len(pairs), *zip(*pairs)

    def _shifts(self, c: Any) -> None:
        """Of shifts along W: the first column of a source row, from a tile's first, and columns of results."""
        order, shifts = shifts_of(self.problem)
        offsets, vec = [s.offset for s in shifts], 16 // self.element
        c.first_w, c.reach_w = _span((*offsets, min(offsets) // vec * vec))  # where no box begins elsewhere
        c.co_columns = -(-c.cout // 8) * 8  # of a phase
        c.shifts, c.shifts_at = len(shifts), tuple(offset - c.first_w for offset in offsets)
        c.shift_widths = tuple(len(s.taps) * c.co_columns for s in shifts)
        c.widths, c.shift_columns = tuple(sorted({*c.shift_widths})), sum(c.shift_widths)
        c.columns_before = tuple(accumulate(c.shift_widths, initial=0))
        c.column_taps = tuple(tap for s in shifts for tap in s.taps)  # of W, of a shift and a phase, or -1
        c.places_of_phases = tuple(order.index(u) for u in range(c.step_w))

    @property
    def sums(self) -> int:
        """And two sets of fragments."""
        c = self.c
        return int(c.pairs * c.mb * c.step_w * c.co_columns // 2 + 2 * 4 * c.shifts * c.mb)

    @property
    def fits(self) -> bool:
        return super().fits and max(self.box) <= MAX_BOX

    @property
    def box(self) -> Five:
        """Of a row of the source: W, H, D, channels, images."""
        return self.c.pitch, 1, 1, self.c.chunk, 1

    @property
    def packed_as(self) -> tuple[Any, ...]:
        p = self.problem
        return self.c.chunks, p.precision, p.stride, p.padding, p.dilation

    # --- a size ------------------------------------------------------------------------------------------------------

    def places_of(self, p: Problem) -> Triple:
        """q along D, H and W."""
        d, h, w = (-(-n // step) for n, step in zip(triple(p.out_size), self.strides))
        return d, h, w

    def counts(self, p: Problem) -> Triple:
        """Tiles along D, H and W."""
        d, h, w = self.places_of(p)
        return d, h, -(-w // self.tile_w)

    def tiles(self, p: Problem) -> int:
        return p.batch * math.prod(self.counts(p))

    def grid(self, p: Problem, gpu: Gpu) -> int:
        """Blocks, whose consumers have tiles of their own."""
        return min(-(-self.tiles(p) // CONSUMERS), gpu.multiprocessors)

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        return *triple(p.out_size), *self.counts(p), self.tiles(p)

    def work(self, p: Problem, gpu: Gpu) -> Work:
        """Both consumers' tiles are one, since each has one of its own."""
        c = self.c
        steps = CONSUMERS * c.chunks
        neighbours = 2 - c.step_w % 2  # outputs that a lane stores into the buffer at once
        stores = c.passed * self.tile_w * c.step_w / neighbours / 32  # of a pass into the buffer, by a warp each
        return Work(
            steps * c.mb * c.users * c.shifts,
            steps * c.mb * c.users * c.shift_columns,
            waves=-(-self.tiles(p) // (CONSUMERS * gpu.multiprocessors)),
            moved=moved(p),
            steps=steps,
            stages=self.stages,
            lines=steps * c.stage_bytes / 128,
            boxes=steps * c.source_row_count,
            loads=steps * c.source_row_count * (c.shifts * c.mb * (2 / self.element) + 2),
            stored=CONSUMERS * c.pairs * c.co_columns / c.passed * (_PASS + stores * _BUFFERED),
        )

    def text(self, p: Problem, gpu: Gpu) -> str:
        c = self.c
        return (
            f"{CONSUMERS} tiles of {self.tile_w} places of a row, {c.pairs} x {c.step_w * c.co_columns} columns, "
            f"rings of {self.stages} of {c.chunk} channels, weights resident"
        )


@lru_cache(maxsize=256)
def _tiles(layer: Problem, gpu: Gpu) -> tuple[Phases, ...]:
    """A layer's tiles for all sizes."""
    if layer.in_channels * layer.taps * layer.out_channels * layer.dtype.itemsize > gpu.shared_bytes:
        return ()
    return fitted((Phases(layer, tile_w) for tile_w in (64, 128)), gpu)
