"""Forwards of NCHW layers with strides and few channels, pixels as rows of M, weights in shared memory. wgmma only.

`gather` fills the 64 rows of a matrix instruction with output channels; a layer of 32 has two phases there, whose taps'
union is multiplied, and its pixels are turned in shared memory. Here places of the input are rows, and a phase's output
channels columns (``kernels/pixels_phases.cuh``): what is multiplied has a tap, but for phases of W that stand in for
others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, permutations, product
from typing import Any, NamedTuple

from upconv.cuda.axes import any_size, gather_axes
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Five
from upconv.cuda.cost import Work
from upconv.cuda.gemm.shuffle import Triple
from upconv.cuda.gpu import MAX_BOX, Gpu
from upconv.cuda.pixels import tile
from upconv.cuda.pixels.choice import Chooser, TileChoice
from upconv.cuda.pixels.tile import CONSUMERS, MOST_COLUMNS, MOST_COUNTED, even_grid, fitted, moved, of_axes, triple
from upconv.cuda.pixels.tile import Tile as Base
from upconv.derived import derived
from upconv.problem import Problem

_MOST_REGISTERS = 168  # of a consumer's thread for sums and fragments; addresses and the like take 48
_MOST_PHASES = 5
"""Of W: their order is found by trying all."""
_RUN = 51.7  # clocks of a consumer for a row of outputs on its way through the buffer


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


@dataclass(frozen=True)
class Tile(Base):
    """As `Base`; each consumer has a ring, whose stages have a chunk of the rows of its tile."""

    tile_w: int
    """Neighbouring q of a row, of a consumer's tile: a multiple of 64."""
    aligned: bool = False
    """Whether the output's rows begin at 16 bytes."""

    mode = "phases"
    named = ("co_columns", "chunk", "mb", "pitch", "aligned", "passed", "widths", "users", "shift_columns", "tile_w")

    @property
    def vec(self) -> int:
        return 16 // self.element

    @property
    def chunk(self) -> int:
        """Input channels of a stage of the ring: a step of K."""
        return 32 // self.element

    @property
    def mb(self) -> int:
        """Subtiles of 64 q."""
        return self.tile_w // 64

    @property
    def co_columns(self) -> int:
        """Columns of a phase: output channels, filled up to a multiple of 8."""
        return -(-self.problem.out_channels // 8) * 8

    @property
    def order(self) -> tuple[int, ...]:
        """Phases of W as columns have them."""
        return shifts_of(self.problem)[0]

    @property
    def shifts(self) -> tuple[Shift, ...]:
        return shifts_of(self.problem)[1]

    @property
    def row_columns(self) -> int:
        """Columns of all phases of W."""
        return self.strides[2] * self.co_columns

    @derived
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Phases of D and H."""
        return tuple(product(range(self.strides[0]), range(self.strides[1])))

    @derived
    def rows(self) -> tuple[tuple[tuple[int, int], tuple[User, ...]], ...]:
        """(offsets along D and H, who reads it) of every row of the source that a row of q meets."""
        axis_d, axis_h, _ = gather_axes(self.problem)
        kernel_h = self.problem.kernel[-2] if self.problem.rank > 1 else 1
        found: dict[tuple[int, int], list[User]] = {}
        for pair, (ud, uh) in enumerate(self.pairs):
            for (kd, od), (kh, oh) in product(axis_d.at(ud), axis_h.at(uh)):
                found.setdefault((od, oh), []).append(User(pair, kd * kernel_h + kh))
        return tuple((row, tuple(users)) for row, users in sorted(found.items()))

    @derived
    def span(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """(first offset, how many from it on) that a box brings for a q, along D, H and W: what taps read, and along W
        what lies before it in 16 bytes."""
        of_rows = list(zip(*(row for row, _ in self.rows)))
        offsets = [s.offset for s in self.shifts]
        offsets.append(min(offsets) // self.vec * self.vec)  # where no box begins elsewhere
        found = [(min(of), max(of) - min(of) + 1) for of in (*of_rows, offsets)]
        return found[0], found[1], found[2]

    @property
    def source_rows(self) -> tuple[int, int]:
        """Rows of the source that a tile reads, along D and H."""
        (_, deep), (_, high), _ = self.span
        return deep, high

    @property
    def pitch(self) -> int:
        """Elements of a row in shared memory: an odd number of 16 bytes, so that lanes' channels are in other banks."""
        return -(-(self.tile_w + self.span[2][1] - 1) // self.vec) // 2 * 2 * self.vec + self.vec

    @property
    def box(self) -> Five:
        """Of a row of the source: W, H, D, channels, images."""
        return self.pitch, 1, 1, self.chunk, 1

    @property
    def stage_bytes(self) -> int:
        return math.prod(self.source_rows) * self.chunk * self.pitch * self.element

    @property
    def shift_widths(self) -> tuple[int, ...]:
        """Columns of each shift."""
        return tuple(len(s.taps) * self.co_columns for s in self.shifts)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns that matrix instructions have."""
        return tuple(sorted({*self.shift_widths}))

    @property
    def shift_columns(self) -> int:
        """Of all shifts."""
        return sum(self.shift_widths)

    @property
    def users(self) -> int:
        return sum(len(users) for _, users in self.rows)

    @property
    def chunks(self) -> int:
        return -(-self.problem.in_channels // self.chunk)

    @property
    def weight_bytes(self) -> int:
        return self.chunks * self.users * self.shift_columns * 32

    @property
    def packed_words(self) -> int:
        return self.weight_bytes // 4

    @property
    def packed_as(self) -> tuple[Any, ...]:
        p = self.problem
        return self.chunks, p.precision, p.stride, p.padding, p.dilation

    @property
    def passed(self) -> int:
        """Output channels that pass through a consumer's buffer at a time."""
        return 16 if self.co_columns % 16 == 0 else 8

    @property
    def buffer_bytes(self) -> int:
        """Of a consumer's outputs on their way to memory."""
        words = self.tile_w * self.strides[2] * self.element // 4 + 4 * (not self.aligned)
        return self.passed * ((words + 11) // 16 * 16 + 4) * 4

    def shared_with(self, stages: int) -> int:
        weights = -(-self.weight_bytes // 128) * 128
        return weights + CONSUMERS * (super().shared_with(stages) + self.buffer_bytes) + 8

    @property
    def sums(self) -> int:
        """A consumer's thread's."""
        return len(self.pairs) * self.mb * self.row_columns // 2

    def faults(self) -> Iterator[str]:
        if self.sums + 2 * 4 * len(self.shifts) * self.mb > _MOST_REGISTERS:  # fragments twice
            yield f"{self.sums} sums and fragments beside are more than {_MOST_REGISTERS} registers"
        if max(self.box) > MAX_BOX:
            yield f"boxes have at most {MAX_BOX} elements along a dimension"

    def constants(self) -> dict[str, jit.Constant]:
        """The kernel's, see kernels/pixels_phases.cuh."""
        (first_d, _), (first_h, _), (first_w, _) = self.span
        rows_d, rows_h = self.source_rows
        users = [user for _, of_row in self.rows for user in of_row]
        own: dict[str, jit.Constant] = {
            "rows_d": rows_d,
            "rows_h": rows_h,
            # Rows of the source, from a tile's first, and the first of those that read each; one more at the end.
            "source_row_count": len(self.rows),
            "source_rows": tuple((d - first_d) * rows_h + h - first_h for (d, h), _ in self.rows),
            "first_users": tuple(accumulate((len(of_row) for _, of_row in self.rows), initial=0)),
            "user_pairs": tuple(user.pair for user in users),
            "user_taps": tuple(user.tap for user in users),
            # A shift's first column of a source row, from a tile's first; its columns, and those of the shifts before.
            "shifts": len(self.shifts),
            "shifts_at": tuple(s.offset - first_w for s in self.shifts),
            "shift_widths": self.shift_widths,
            "columns_before": tuple(accumulate(self.shift_widths, initial=0)),
            # Of a shift and a phase: tap of W, or -1.
            "column_taps": tuple(tap for s in self.shifts for tap in s.taps),
            "pairs": len(self.pairs),
            "pair_phases_d": tuple(d for d, _ in self.pairs),
            "pair_phases_h": tuple(h for _, h in self.pairs),
            # A phase of W's, in the order of columns.
            "places_of_phases": tuple(self.order.index(u) for u in range(self.strides[2])),
        }
        own |= of_axes("first", (first_d, first_h, first_w))
        axes = of_axes("step", self.strides) | of_axes("kernel", self.kernel)
        return super().constants() | own | axes

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
        return even_grid(-(-self.tiles(p) // CONSUMERS), gpu)

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        return *triple(p.out_size), *self.counts(p), self.tiles(p)

    def work(self, p: Problem, gpu: Gpu) -> Work:
        """Both consumers' tiles are one, since each has one of its own."""
        steps, shifts = CONSUMERS * self.chunks, len(self.shifts)
        return Work(
            steps * self.mb * self.users * shifts,
            steps * self.mb * self.users * self.shift_columns,
            waves=-(-self.tiles(p) // (CONSUMERS * gpu.multiprocessors)),
            moved=moved(p),
            steps=steps,
            stages=self.stages,
            lines=steps * self.stage_bytes / 128,
            boxes=steps * len(self.rows),
            loads=steps * len(self.rows) * (shifts * self.mb * (2 / self.element) + 2),
            stored=CONSUMERS * len(self.pairs) * self.co_columns / self.passed * _RUN,
        )

    def text(self, p: Problem, gpu: Gpu) -> str:
        return (
            f"{CONSUMERS} tiles of {self.tile_w} places of a row, {len(self.pairs)} x {self.row_columns} columns, "
            f"rings of {self.stages} of {self.chunk} channels, weights resident"
        )


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why these kernels cannot serve a problem, in a sentence; None when one may."""
    if refused := tile.refusal(p, gpu):
        return refused
    if max(p.stride) == 1:
        return "the kernel is for layers with a stride"
    if p.stride[-1] > _MOST_PHASES:
        return (
            f"a stride of {p.stride[-1]} along the width has more phases than the {_MOST_PHASES} that the kernel orders"
        )
    if math.prod(p.stride) * -(-p.out_channels // 8) * 8 > MOST_COLUMNS:
        return f"{math.prod(p.stride)} phases of {p.out_channels} channels are more than {MOST_COLUMNS} columns"
    if any(len(axis.taps) < axis.out_step for axis in gather_axes(p)):
        return "some phases have no taps, for which the kernel would multiply zeros"
    if p.kernel == p.stride:
        return "of one tap for each output there is no row that several phases read"
    if p.size[-1] * p.dtype.itemsize % 16:
        return "boxes want rows of whole 16 bytes"
    if math.prod(p.out_size) >= MOST_COUNTED or p.batch * math.prod(p.size) >= MOST_COUNTED:
        return "the kernel counts a channel's elements, and tiles, in 32 bits"
    return None


def candidates(p: Problem, gpu: Gpu) -> Iterator[Tile]:
    """Every tile worth a look for a layer at its own size."""
    aligned = p.out_size[-1] * p.dtype.itemsize % 16 == 0
    for t in _candidates(any_size(p), gpu, aligned):
        if t.mb == 1 or t.tile_w < 2 * t.places_of(p)[2]:
            yield t


@lru_cache(maxsize=256)
def _candidates(layer: Problem, gpu: Gpu, aligned: bool) -> tuple[Tile, ...]:
    """A layer's tiles for all sizes whose rows begin alike."""
    if layer.in_channels * layer.taps * layer.out_channels * layer.dtype.itemsize > gpu.shared_bytes:
        return ()
    return fitted((Tile(layer, tile_w, aligned) for tile_w in (64, 128)), gpu)


PHASES = Chooser(
    TileChoice, refusal, candidates, none="no tile of this layer fits this input's axes, shared memory and registers"
)
