"""A chunk of ``wgrad_wgmma.cu``: how x and g lie in shared memory, and the boxes by which the copy engine brings them.

Pure arithmetic, as all of a tiling is (`upconv.cuda.wgrad.wgrad_tiling`); what warpgroups make of a chunk is in
`upconv.cuda.wgrad.wgrad_warpgroups`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from upconv.cuda.gpu import MAX_BOX, MAX_BOX_STEP
from upconv.cuda.wgrad.wgrad_tiling import Tiling, Triple
from upconv.derived import derived, derived_without

MAX_CLASSES = 8  # of rows and channels: a box and a tensor map each
_UNIT = 7.0  # passes of shared memory that a row of g twice as long weighs

_chunk = derived_without("stages", "warpgroups", "split_m")
"""Of a chunk, however many are in flight and whoever multiplies it."""


@dataclass(frozen=True)
class BoxedTiling(Tiling):
    """A tiling whose chunks come by boxes, of g where its rows allow."""

    subs: int = 1
    """Taps that share the 64 rows of a matrix instruction."""
    stages: int = 2
    aligned_g: bool = False
    """NCHW: rows of the output begin at 16 bytes."""
    stacked: bool = False
    """Whether the rows of x that a row of g meets by a column of taps are columns of one matrix instruction."""
    classes: tuple[int, int] = (1, 1)
    """NCHW, where rows of the output do not begin at 16 bytes: classes of rows along H, and of channels, by where they
    begin. The tensor copy engine brings each by a box of its own; (1, 1): threads copy."""
    lines: bool = False
    """NCHW: a chunk is as wide as the image, whose rows so are one line: a row of x's tile has several of them."""
    interleaved: bool = False
    """NCHW, boxes of g: the `subs` taps of an instruction are neighbours along W, and their rows neighbours in M."""
    gapless: int = 0
    """channels_last: positions of K that a chunk has, of which a box of any shape (the tile) fills all or nearly all:
    each tap has pixels of g of its own, in the order of the box's, so that no row need be whole strips of 8. The
    kernel knows their number alone; the box comes with a launch. 0: rows of a chunk are whole strips, and taps share
    what they read."""

    # --- positions ----------------------------------------------------------------------------------------------------

    @_chunk
    def row(self) -> int:
        """Positions of K that lie in a row."""
        return self.gapless or self.tile[3]

    @_chunk
    def strips(self) -> int:
        """Strips of 8 positions of a row, or (`gapless`) of those that follow each other."""
        return self.gapless // 8 if self.gapless else super().strips

    @_chunk
    def stack(self) -> int:
        """Rows of x that a row of g may meet by a column of taps."""
        return -(-self.taps[1] // self.steps[1])

    @_chunk
    def halo(self) -> int:
        return self.stack - 1 if self.stacked else 0

    def _held(self) -> Triple:
        if self.gapless:
            return 1, 1, self.gapless
        d, h, w = super()._held()
        return d, self.tile[2] * self.steps[1] if self.stacked else h, w

    # --- x ------------------------------------------------------------------------------------------------------------

    @_chunk
    def x_width(self) -> int:
        """Input channels of a box of x (channels_last, 16 bits): those of a swizzled row."""
        return next(w for w in (64, 32, 16) if self.block[0] % w == 0)

    @_chunk
    def turned(self) -> bool:
        """Whether x's pixels are turned to rows of a channel: TF32 multiplies no others."""
        return self.channels_last and self.element == 4

    @_chunk
    def segment(self) -> int:
        """Bytes of a row of x's tile, which is also the swizzle's span."""
        if self.channels_last and not self.turned:
            return self.x_width * self.element
        return min(128, self.row * self.element * (self.tile[2] if self.lines else 1))

    @property
    def box(self) -> tuple[int, int, int, int, int]:
        """The box of x, innermost first: channels, W, H, D, images, or W (`segment` of it), channels, H, D, images."""
        n, d, h, w = self.tile
        if self.channels_last:
            return self.block[0] if self.turned else self.x_width, w, h + self.halo, d, n
        return self.segment // self.element, self.block[0], 1 if self.lines else h + self.halo, d, n

    @_chunk
    def x_bytes(self) -> int:
        """Bytes of x's tile in shared memory."""
        n, d, h, w = self.tile
        return (self.gapless or n * d * (h + self.halo) * w) * self.block[0] * self.element

    @_chunk
    def raw_bytes(self) -> int:
        """Bytes of x's pixels before they are turned."""
        return self.x_bytes if self.turned else 0

    # --- g ------------------------------------------------------------------------------------------------------------

    @_chunk
    def _interleaved_banks(self) -> tuple[int, int]:
        lanes = self.subs, self.dilation[2], self.steps[2], -self.padding[2] % self.vec
        return _fewest_conflicts(self.element, self.units[1], *lanes)

    @_chunk
    def g_row_units(self) -> int:
        """As for all tilings; `interleaved`: the number with which a warp's lanes meet banks most seldom."""
        return self._interleaved_banks[0] if self.interleaved else self.units[1] | 1

    @property
    def conflicts(self) -> int:
        """`interleaved`: how often a bank is met by lanes that load together, at most."""
        return self._interleaved_banks[1]

    @_chunk
    def g_rows(self) -> int:
        """As for all tilings; `gapless`: one, which has all pixels of a tap."""
        return 1 if self.gapless else super().g_rows

    @_chunk
    def box_g(self) -> bool:
        """Whether g comes by boxes too: one (channels_last: for each `g_width` channels and plane) brings a tile's
        rows, since a box costs hundreds of clocks, however small."""
        if self._g_whole_box is None:
            return False
        if self.channels_last:
            aligned = self.problem.out_channels % self.vec == 0
            return aligned and (self.problem.groups == 1 or self.channels[1] % self.vec == 0)
        return self.aligned_g or self.classed

    @_chunk
    def classed(self) -> bool:
        """Whether g comes by a box for each class."""
        return self.classes != (1, 1)

    @property
    def classes_fit(self) -> bool:
        """Whether rows and channels of a fragment are in a class known beforehand, and a box brings all of a class."""
        rows, channels = self.classes
        # A class's rows begin early, which shows to the left of the image.
        few = rows * channels <= MAX_CLASSES and self.padding[2] == 0
        known = (rows == 1 or self.stacked) and self.block[1] // channels >= 16
        return few and known and self._g_whole_box is not None and self._g_row_steps[1] == 1

    @_chunk
    def g_width(self) -> int:
        """Output channels of a box (channels_last)."""
        return next(w for w in (64, 32, 16) if self.block[1] % w == 0 and w * self.element <= 128)

    @_chunk
    def g_box(self) -> tuple[int, int, int, int, int]:
        """The box of g, innermost first: channels, W, H, D, images (channels_last) or W, channels, H, D, images."""
        assert self._g_whole_box is not None
        return self._g_whole_box

    @property
    def g_box_steps(self) -> tuple[int, int, int, int, int]:
        """From one element of a box of g to the next along each of its dimensions."""
        d, h = self._g_row_steps
        return 1, self.steps[2] if self.parted else 1, h, d, 1

    @_chunk
    def parted(self) -> bool:
        """Channels_last: whether columns of g that a tap reads are neighbours, in a plane of those with their remainder
        by the stride. So columns that no tap reads are left out; and 16-bit fragments of even strides meet all banks,
        where rows of every second pixel lie in half of them."""
        return self._partable and self._g_whole_box is not None

    @_chunk
    def _partable(self) -> bool:
        if self.gapless:
            return True
        if not self.channels_last or not 1 < self.steps[2] <= MAX_BOX_STEP:
            return False
        planes, columns, _ = self._parts
        return (self.element == 2 and self.steps[2] % 2 == 0) or planes * columns < self.spans[2]

    @_chunk
    def g_planes(self) -> tuple[int, int, int]:
        """Of g's columns: planes, columns of each, and from a tap to the next of its plane; one plane if not `parted`.

        Tap ``t`` reads plane ``t % planes``, which begins with the column that tap reads first.
        """
        return self._parts if self.parted else (1, self.spans[2], 0)

    @_chunk
    def _parts(self) -> tuple[int, int, int]:
        """`g_planes` of `parted` columns."""
        if self.gapless:
            return self.set_taps, self.gapless, 0
        step, dilation, taps = self.steps[2], self.dilation[2], self.taps[2]
        period = step // math.gcd(step, dilation)
        on = period * dilation // step
        return min(period, taps), self.tile[3] + (taps - 1) // period * on, on

    @_chunk
    def _g_row_steps(self) -> tuple[int, int]:
        """From one row of g's tile to the next along D and H; 0 where rows do not lie evenly."""
        if self.gapless:
            return self.steps[0], self.steps[1]
        found: list[int] = []
        axes = zip(self.tile[1:3], self.taps, self.steps, self.dilation, self.spans)
        for axis, (count, taps, step, dilation, rows) in enumerate(axes):
            if rows == self._dense(axis) or (self.stacked and axis == 1):
                found.append(self.apart[axis])
            elif taps == 1:
                found.append(step)
            else:
                found.append(dilation if count == 1 or step == taps * dilation else 0)
        return found[0], found[1]

    @_chunk
    def _g_whole_box(self) -> tuple[int, int, int, int, int] | None:
        """The box that brings all rows of g's tile, if one can; channels_last of a plane."""
        d, h = self._g_row_steps
        if not 1 <= min(d, h) <= max(d, h) <= MAX_BOX_STEP or self.steps[2] * bool(self.gapless) > MAX_BOX_STEP:
            return None
        rows_d, rows_h, _ = self.spans
        if self.gapless:
            n, *counts = self.tile
            d, h, w = ((count - 1) * step + 1 for count, step in zip(counts, self.steps))
            return (self.g_width, w, h, d, n) if max(w, h, d, n) <= MAX_BOX else None
        if self.channels_last:
            columns = (self._parts[1] - 1) * self.steps[2] + 1 if self._partable else self.spans[2]
            box = self.g_width, columns, (rows_h - 1) * h + 1, (rows_d - 1) * d + 1, self.tile[0]
            return box if max(box) <= MAX_BOX else None
        row = self.g_row_units * self.vec
        # Elements traversed: of n along a dimension of step s, ceil(n / s) are copied.
        of_rows, of_channels = self.classes
        rows_h = -(-rows_h // of_rows)
        box = row, self.block[1] // of_channels, (rows_h - 1) * h + 1, (rows_d - 1) * d + 1, self.tile[0]
        return box if max(box) <= MAX_BOX else None

    @_chunk
    def g_bytes(self) -> int:
        """Bytes of g's tile in shared memory."""
        if self.classed:
            rows_d, rows_h, _ = self.spans
            of_rows, _ = self.classes
            rows = self.tile[0] * rows_d * -(-rows_h // of_rows) * of_rows
            return rows * self.block[1] * self.g_row_units * 16
        if self.channels_last:
            planes, columns, _ = self.g_planes
            plane = -(-self.g_rows * columns * self.g_width * self.element // 128) * 128
            return self.block[1] // self.g_width * planes * plane
        return super().g_bytes

    @property
    def g_pitch(self) -> int:
        return self.g_width if self.channels_last else super().g_pitch

    @property
    def g_pixels(self) -> int:
        """Pixels of a row of g's tile (channels_last)."""
        planes, columns, _ = self.g_planes
        return planes * columns

    @_chunk
    def g_units(self) -> int:
        """16-byte copies of g's tile."""
        if self.channels_last:
            return self.g_rows * self.g_pixels * -(-self.block[1] // self.vec)
        return super().g_units

    # --- both ---------------------------------------------------------------------------------------------------------

    @_chunk
    def stage_bytes(self) -> int:
        return -(-(self.x_bytes + self.g_bytes) // 1024) * 1024

    @derived
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + self.raw_bytes + 16

    @property
    def boxes(self) -> int:
        """Copies of the tensor copy engine for a chunk."""
        line = self.row * (self.tile[2] if self.lines else 1) * self.element
        found = self.block[0] // self.x_width if self.channels_last else line // self.segment
        if self.turned:
            found = 1
        if self.box_g:
            wide = self.block[1] // self.g_width if self.channels_last else 1
            found += wide * math.prod(self.classes) * self.g_planes[0]
        return found

    @property
    def lines_of_boxes(self) -> float:
        """Lines of 128 bytes that the boxes of a chunk touch, in units of which a row counts half at least."""

        def touched(rows: float, span: int, begin: int) -> float:
            """Of rows of ``span`` bytes that begin at multiples of ``begin``."""
            return rows * (max(0.5, span / 128) if span <= begin else 1 + (span - min(begin, 128)) / 128)

        if self.channels_last:
            span = self.block[0] * self.element if self.turned else self.segment
            found = touched(self.x_bytes / span, span, 128 if span >= 128 else span)
            row = self.g_width * self.element
            return found + touched(self.g_rows * self.g_pixels * self.block[1] / self.g_width, row, row)
        found = touched(self.x_bytes / self.segment, self.segment, self.segment)
        row = self.g_row_units * 16
        return found + touched(self.g_rows * self.block[1], row, 16)


@lru_cache(maxsize=512)
def _fewest_conflicts(element: int, units: int, subs: int, tap: int, step: int, lead: int) -> tuple[int, int]:
    """How many 16-byte units, so many or a few more, rows of channels are apart, and how often lanes meet a bank then.

    A unit that no column needs is copied all the same, so wide rows without conflicts may be slower than narrow ones
    with some.
    """
    found = []
    for apart in range(units, units + 8):
        worst = 0
        for second in (0,) if element == 4 else (0, step):  # of 16 bits a register takes two words
            words = {
                (g // subs * apart * (16 // element) + g % subs * tap + q * step + second + lead) * element // 4
                for g in range(8)
                for q in (range(4) if element == 4 else range(0, 8, 2))
            }
            banks = [word % 32 for word in words]
            worst = max(worst, *(banks.count(bank) for bank in banks))
        found.append((worst + _UNIT * (apart / units - 1), apart, worst))
    _, apart, conflicts = min(found)
    return apart, conflicts
