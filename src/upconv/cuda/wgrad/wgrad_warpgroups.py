"""A tile of ``wgrad_wgmma.cu`` (sm_90a): a chunk in shared memory, the boxes that bring it, and who multiplies what.

Pure arithmetic, as all of a tiling is (`upconv.cuda.wgrad.wgrad_tiling`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from upconv.cuda.gpu import MAX_BOX, MAX_BOX_STEP
from upconv.cuda.wgrad.wgrad_tiling import Tiling, Triple
from upconv.derived import derived, derived_from

MAX_CLASSES = 8  # of rows and channels: a box and a tensor map each
_MAX_STACK = 5  # rows of x in one instruction's columns
_UNROLLED = 40  # matrix instructions of a warpgroup between whose ends the tensor cores do not drain
_UNIT = 7.0  # passes of shared memory that a row of g twice as long weighs

Box = tuple[int, int, int, int, int]
"""Elements along each dimension, innermost first: channels, W, H, D, images; of NCHW W, channels, H, D, images."""


@dataclass(frozen=True)
class WarpgroupTiling(Tiling):
    """A tiling whose x comes by boxes, and g where its rows allow; warpgroups divide output channels and taps."""

    file: ClassVar[str] = "wgrad_wgmma.cu"
    entry: ClassVar[str] = "wgrad_wgmma"
    k_slices: ClassVar[int] = 1

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
    """channels_last: positions of K that a chunk has, which are a box of any shape (the tile): each tap has pixels of g
    of its own, in the order of the box's, so that no row need be whole strips of 8. The kernel knows their number
    alone; the box comes with a launch. 0: rows of a chunk are whole strips, and taps share what they read."""
    warpgroups: int = 2
    """That multiply; one more copies."""
    split_m: int = 1
    """Of them, those that divide the output channels."""

    # --- positions ----------------------------------------------------------------------------------------------------

    @property
    def line(self) -> int:
        """Bytes of a row of x's positions."""
        return (self.gapless or self.tile[3]) * self.element * (self.tile[2] if self.lines else 1)

    @derived_from("problem", "taps")
    def stack(self) -> int:
        """Rows of x that a row of g may meet by a column of taps."""
        return -(-self.taps[1] // self.steps[1])

    @property
    def halo(self) -> int:
        return self.stack - 1 if self.stacked else 0

    def _held(self) -> Triple:
        if self.gapless:
            return 1, 1, self.gapless
        d, h, w = super()._held()
        return d, self.tile[2] * self.steps[1] if self.stacked else h, w

    # --- x ------------------------------------------------------------------------------------------------------------

    @derived_from("block")
    def x_width(self) -> int:
        """Input channels of a box of x (channels_last, 16 bits): those of a swizzled row."""
        return next(w for w in (64, 32, 16) if self.block[0] % w == 0)

    @derived_from("problem")
    def turned(self) -> bool:
        """Whether x's pixels are turned to rows of a channel: TF32 multiplies no others."""
        return self.channels_last and self.element == 4

    @derived
    def segment(self) -> int:
        """Bytes of a row of x's tile, which is also the swizzle's span."""
        if self.channels_last and not self.turned:
            return self.x_width * self.element
        return min(128, self.line)

    @property
    def box(self) -> Box:
        """The box of x; in NCHW W is a `segment` of it."""
        n, d, h, w = self.tile
        if self.channels_last:
            return self.block[0] if self.turned else self.x_width, w, h + self.halo, d, n
        return self.segment // self.element, self.block[0], 1 if self.lines else h + self.halo, d, n

    @derived
    def x_bytes(self) -> int:
        """Bytes of x's tile in shared memory."""
        n, d, h, w = self.tile
        return n * d * (h + self.halo) * w * self.block[0] * self.element

    @property
    def raw_bytes(self) -> int:
        """Bytes of x's pixels before they are turned."""
        return self.x_bytes if self.turned else 0

    # --- g ------------------------------------------------------------------------------------------------------------

    @property
    def banks(self) -> tuple[int, int]:
        """`interleaved`: units from one channel's row of g to the next, and how often lanes meet a bank, at most."""
        lanes = self.subs, self.dilation[2], self.steps[2], -self.padding[2] % self.vec
        return _fewest_conflicts(self.element, self.units[1], *lanes)

    @derived
    def g_row_units(self) -> int:
        return self.banks[0] if self.interleaved else self.units[1] | 1

    @derived
    def g_rows(self) -> int:
        """As for all tilings; `gapless`: one, which has all pixels of a tap."""
        return 1 if self.gapless else super().g_rows

    @derived
    def box_g(self) -> bool:
        """Whether g comes by boxes too: one (channels_last: for each `g_width` channels and plane) brings a tile's
        rows, since a box costs hundreds of clocks, however small."""
        if self._g_whole_box is None:
            return False
        if self.channels_last:
            aligned = self.problem.out_channels % self.vec == 0
            return aligned and (self.problem.groups == 1 or self.channels[1] % self.vec == 0)
        return self.aligned_g or self.classed

    @property
    def classed(self) -> bool:
        """Whether g comes by a box for each class."""
        return self.classes != (1, 1)

    @property
    def classes_fit(self) -> bool:
        """Whether rows and channels of a fragment are in a class known beforehand, and a box brings all of a class."""
        rows, channels = self.classes
        # A class's rows begin early, which shows to the left of the image.
        known = (rows == 1 or self.stacked) and self.block[1] // channels >= 16
        return self.padding[2] == 0 and known and self._g_whole_box is not None and self._g_row_steps[1] == 1

    @derived
    def g_width(self) -> int:
        """Output channels of a box (channels_last)."""
        return next(w for w in (64, 32, 16) if self.block[1] % w == 0 and w * self.element <= 128)

    @property
    def g_box(self) -> Box:
        """The box of g; of a plane in channels_last."""
        assert self._g_whole_box is not None
        return self._g_whole_box

    @property
    def g_box_steps(self) -> Box:
        """From one element of a box of g to the next along each of its dimensions."""
        d, h = self._g_row_steps
        return 1, self.steps[2] if self.parted else 1, h, d, 1

    @derived
    def parted(self) -> bool:
        """Channels_last: whether columns of g that a tap reads are neighbours, in a plane of those with their remainder
        by the stride. So columns that no tap reads are left out; and 16-bit fragments of even strides meet all banks,
        where rows of every second pixel lie in half of them."""
        return self._partable and self._g_whole_box is not None

    @derived
    def _partable(self) -> bool:
        if self.gapless:
            return True
        if not self.channels_last or not 1 < self.steps[2] <= MAX_BOX_STEP:
            return False
        planes, columns, _ = self._parts
        return (self.element == 2 and self.steps[2] % 2 == 0) or planes * columns < self.spans[2]

    @derived
    def g_planes(self) -> tuple[int, int, int]:
        """Of g's columns: planes, columns of each, and from a tap to the next of its plane; one plane if not `parted`.

        Tap ``t`` reads plane ``t % planes``, which begins with the column that tap reads first.
        """
        return self._parts if self.parted else (1, self.spans[2], 0)

    @property
    def _parts(self) -> tuple[int, int, int]:
        """`g_planes` of `parted` columns."""
        if self.gapless:
            return self.set_taps, self.gapless, 0
        step, dilation, taps = self.steps[2], self.dilation[2], self.taps[2]
        period = step // math.gcd(step, dilation)
        on = period * dilation // step
        return min(period, taps), self.tile[3] + (taps - 1) // period * on, on

    @derived
    def _g_row_steps(self) -> tuple[int, int]:
        """From one row of g's tile to the next along D and H; 0 where rows do not lie evenly."""
        if self.gapless:
            return self.steps[0], self.steps[1]
        found: list[int] = []
        axes = zip(self.tile[1:3], self.taps, self.steps, self.dilation, self.spans)
        for axis, (count, taps, step, dilation, rows) in enumerate(axes):
            if rows == self.dense(axis) or (self.stacked and axis == 1):
                found.append(self.apart[axis])
            elif taps == 1:
                found.append(step)
            else:
                found.append(dilation if count == 1 or step == taps * dilation else 0)
        return found[0], found[1]

    @derived
    def _g_whole_box(self) -> Box | None:
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

    @derived
    def g_bytes(self) -> int:
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
        return self.g_width if self.channels_last else self.g_row_units * self.vec

    @property
    def g_pixels(self) -> int:
        """Pixels of a row of g's tile (channels_last)."""
        planes, columns, _ = self.g_planes
        return planes * columns

    @derived
    def g_units(self) -> int:
        if self.channels_last:
            return self.g_rows * self.g_pixels * -(-self.block[1] // self.vec)
        return super().g_units

    # --- both ---------------------------------------------------------------------------------------------------------

    @derived
    def stage_bytes(self) -> int:
        return -(-(self.x_bytes + self.g_bytes) // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + self.raw_bytes + 16

    @property
    def boxes(self) -> int:
        """Copies of the tensor copy engine for a chunk."""
        of_line = self.block[0] // self.x_width if self.channels_last else self.line // self.segment
        found = 1 if self.turned else of_line
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

    # --- who multiplies what ------------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    @property
    def of_unit(self) -> int:
        """Taps that share their fragments of g: a column of them, or one."""
        return self.taps[1] if self.stacked else 1

    @derived_from("problem", "taps", "subs", "stacked", "warpgroups", "split_m")
    def unit_count(self) -> int:
        """Fragments of g of a warpgroup, for each step of K."""
        return -(-self.set_taps // (self.of_unit * self.subs * (self.warpgroups // self.split_m)))

    @property
    def entries(self) -> int:
        """Accumulators of 64 rows of a warpgroup."""
        return self.unit_count * self.of_unit

    @property
    def accumulators(self) -> int:
        """Registers of a thread."""
        return self.entries * self.block[0] // 2

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that copies, and of one that multiplies."""
        if self.warpgroups == 2:
            return 72, 216
        return (80, 144) if self.turned else (56, 152)  # with 56 the warps that turn pixels spill

    @property
    def stackable(self) -> bool:
        """Whether `stacked` is of use, and rows of x can follow each other in an instruction's columns."""
        width = self.block[0] if not self.channels_last or self.turned else self.x_width
        whole_steps = self.tile[3] * self.element % 32 == 0
        # Neighbours by taps are to be neighbours in shared memory.
        if not whole_steps or self.dilation[1] > 1 or self.stack < 2 or self.lines:
            return False
        if self.channels_last and not self.turned and self.x_width < min(self.block[0], 64):
            return False  # columns beyond a swizzled line are the next row's
        return self.stack <= _MAX_STACK and self.stack * width <= 256

    @property
    def a_shared(self) -> bool:
        """Whether matrix instructions read g's tile by descriptors: 16-bit rows of 64 channels, whose pixels of a tap
        are neighbours. A stage is given back a chunk later, so that copies want three.

        Where three warpgroups take many channels, or a fragment serves several rows of x, it gains nothing
        (docs/experiments.md).
        """
        if not (self.channels_last and self.element == 2 and self.g_width == 64 and self.subs == 1):
            return False
        if self.stages < 3 or self.stacked or not (self.parted or self.steps[2] == 1):
            return False
        return self.warpgroups == 2 or self.block[0] <= 64

    @property
    def run(self) -> int:
        """Units of a warpgroup that are neighbours along W."""
        width, units = self.taps[2], self.unit_count
        if self.set_taps == width * self.of_unit or width % units == 0:
            return units
        return width if units % width == 0 else 1

    @property
    def run_words(self) -> int:
        """Words of two pixels (half precision, NCHW) that a run of taps takes for one of its registers."""
        step, dilation, run = self.steps[2], self.dilation[2], self.run
        even_sets = self.sets[2] == 1 or self.taps[2] * dilation % 2 == 0
        known = self.aligned_g and step % 2 == 0 and run * dilation % 2 == 0 and even_sets
        odd = self.padding[2] % 2 if known else 1
        return (odd + (run - 1) * dilation + step) // 2 + 1

    @property
    def shared_words(self) -> bool:
        """Whether neighbouring taps shift their fragments out of words that they load together."""
        if self.element == 4 or self.channels_last or self.interleaved:
            return False
        return self.run > 1 and self.run_words < 2 * self.run

    @derived
    def row_steps(self) -> int:
        """``stacked``: fragments of a warpgroup for one column of K."""
        return self.tile[0] * self.tile[1] * self.spans[1] * self.unit_count

    @property
    def fragments(self) -> int:
        """Of all warpgroups, for a chunk."""
        if self.stacked:
            return self.tile[3] * self.element // 32 * self.row_steps * self.warpgroups
        return self.k_steps * self.entries * self.warpgroups

    @property
    def unrolled(self) -> int:
        """Steps of a warpgroup that are unrolled: as many of K as fit, a power of two.

        ``stacked``: steps of K of every row.
        """
        each = self.row_steps if self.stacked else self.entries
        k = self.tile[3] * self.element // 32 if self.stacked else self.k_steps
        while k > 1 and k * each > _UNROLLED:
            k //= 2
        return k if self.stacked else k * each

    # --- sums ---------------------------------------------------------------------------------------------------------

    @property
    def adds_up(self) -> bool:
        """Whether blocks may write the weight themselves: of several splits together, or of one alone.

        Of 16-bit NCHW tilings not those that have several taps in a fragment, which are slower for an unknown reason,
        but interleaved ones (docs/experiments.md).
        """
        if self.subs > 1 and self.element == 2 and not self.channels_last and not self.interleaved:
            return False
        return self.sums_bytes <= self.shared_bytes - 16 * self.stages - 16

    @property
    def sums_bytes(self) -> int:
        """Bytes of a block's sums in shared memory, where its stages were."""
        return self.set_taps * (self.block[0] * (self.block[1] + 4) + 8) * 4

    def constants(self) -> dict[str, int]:
        """The kernel's, of a block that leaves partial sums to a second step."""
        found = {
            "whole": False,
            "alone": False,
            "warpgroups": self.warpgroups,
            "split_m": self.split_m,
            "subs": self.subs,
            "interleaved": self.interleaved,
            "entries": self.entries,
            "stages": self.stages,
            "unrolled": self.unrolled,
            "gapless": self.gapless > 0,
            "aligned_g": self.aligned_g,
            "lines": self.lines,
            "stacked": self.stacked,
            "row_classes": self.classes[0],
            "channel_classes": self.classes[1],
            "box_g": self.box_g,
            "parted": self.parted,
            "a_shared": self.a_shared,
            "g_planes": self.g_planes[0],
            "plane_columns": self.g_planes[1],
            "plane_taps": self.g_planes[2],
            "producer_registers": self.registers[0],
            "consumer_registers": self.registers[1],
            "shared_bytes": self.shared_bytes,
        }
        if self.gapless:
            found |= {"tile_n": 1, "tile_d": 1, "tile_h": 1, "tile_w": self.gapless}
        return super().constants() | found


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
