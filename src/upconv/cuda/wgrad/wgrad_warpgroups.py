"""A tile of ``wgrad_wgmma.cu`` (sm_90a): a chunk in shared memory, the boxes that bring it, and who multiplies what.

Pure arithmetic, as all of a tiling is (`upconv.cuda.wgrad.wgrad_tiling`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from upconv.cuda.gpu import MAX_BOX, MAX_BOX_STEP
from upconv.cuda.wgrad.wgrad_tiling import Chunk, Rows, Tiling, of_chunk
from upconv.derived import derived, derived_from

_UNROLLED = 40  # matrix instructions of a warpgroup between whose ends the tensor cores do not drain
_UNIT = 7.0  # passes of shared memory that a row of g twice as long weighs

Box = tuple[int, int, int, int, int]
"""Elements along each dimension, innermost first: channels, W, H, D, images; of NCHW W, channels, H, D, images."""


class Planes(NamedTuple):
    """Columns of g's tile in channels_last: tap ``t`` reads plane ``t % number``, ``t // number * on``
    columns on."""

    number: int
    columns: int
    """Of a plane, which begins with the column that its first tap reads first."""
    on: int
    parted: bool
    """Whether columns of a plane are a stride apart in memory. So columns that no tap reads are left out, and 16-bit
    fragments of even strides meet all banks, where rows of every second pixel lie in half of them."""


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
    box: Chunk | None = None
    """`gapless`, of channels_last: no row need be whole strips of 8, and each tap has pixels of g of its own. The
    kernel knows the number of positions alone, and the box comes with a launch. None: taps share what they read."""
    warpgroups: int = 2
    """That multiply; one more copies."""
    split_m: int = 1
    """Of them, those that divide the output channels."""

    @property
    def gapless(self) -> bool:
        return self.box is not None

    @property
    def chunk(self) -> Chunk:
        return self.box or self.tile

    # --- x ------------------------------------------------------------------------------------------------------------

    @derived_from("problem", "taps")
    def stack(self) -> int:
        """Rows of x that a row of g may meet by a column of taps."""
        return -(-self.taps[1] // self.steps[1])

    @property
    def halo(self) -> int:
        return self.stack - 1 if self.stacked else 0

    @property
    def line(self) -> int:
        """Bytes of a row of x's positions."""
        return self.tile[3] * self.element * (self.tile[2] if self.lines else 1)

    @derived_from("block")
    def x_width(self) -> int:
        """Input channels of a box of x (channels_last, 16 bits): those of a swizzled row."""
        return next(w for w in (64, 32, 16) if self.block[0] % w == 0)

    @derived_from("problem")
    def turned(self) -> bool:
        """Whether x's pixels are turned to rows of a channel: TF32 multiplies no others."""
        return self.channels_last and self.element == 4

    @of_chunk
    def segment(self) -> int:
        """Bytes of a row of x's tile, which is also the swizzle's span."""
        if self.channels_last and not self.turned:
            return self.x_width * self.element
        return min(128, self.line)

    @property
    def x_box(self) -> Box:
        """The box of x; in NCHW W is a `segment` of it."""
        n, d, h, w = self.chunk
        if self.channels_last:
            return self.block[0] if self.turned else self.x_width, w, h + self.halo, d, n
        return self.segment // self.element, self.block[0], 1 if self.lines else h + self.halo, d, n

    @of_chunk
    def x_bytes(self) -> int:
        """Bytes of x's tile in shared memory."""
        n, d, h, w = self.tile
        return n * d * (h + self.halo) * w * self.block[0] * self.element

    @property
    def raw_bytes(self) -> int:
        """Bytes of x's pixels before they are turned."""
        return self.x_bytes if self.turned else 0

    # --- g ------------------------------------------------------------------------------------------------------------

    def _rows(self, axis: int) -> Rows:
        if self.gapless:
            return Rows(1, 1, 1, 1)
        if self.stacked and axis == 1:
            return Rows(self.tile[2] * self.steps[1], self.steps[1], 1, 1)
        return super()._rows(axis)

    @property
    def banks(self) -> tuple[int, int]:
        """`interleaved`: units from one channel's row of g to the next, and how often lanes meet a bank, at most."""
        lanes = self.subs, self.dilation[2], self.steps[2], -self.padding[2] % self.vec
        return _fewest_conflicts(self.element, self.units[1], *lanes)

    @of_chunk
    def g_row_units(self) -> int:
        return self.banks[0] if self.interleaved else self.units[1] | 1

    @of_chunk
    def g_width(self) -> int:
        """Output channels of a box (channels_last)."""
        return next((w for w in (64, 32) if self.block[1] % w == 0 and w * self.element <= 128), 16)

    @property
    def g_pitch(self) -> int:
        return self.g_width if self.channels_last else self.g_row_units * self.vec

    @of_chunk
    def planes(self) -> Planes:
        """Columns of g's tile."""
        step, dilation, taps = self.steps[2], self.dilation[2], self.taps[2]
        if self.gapless:
            return Planes(self.set_taps, self.tile[3], 0, True)
        if self.channels_last and 1 < step <= MAX_BOX_STEP:
            period = step // math.gcd(step, dilation)
            on = period * dilation // step
            count, columns = min(period, taps), self.tile[3] + (taps - 1) // period * on
            if (self.element == 2 and step % 2 == 0) or count * columns < self.columns:
                return Planes(count, columns, on, True)
        return Planes(1, self.columns, 0, False)

    @of_chunk
    def g_boxes(self) -> tuple[Box, Box] | None:
        """The box that brings all rows of g's tile (channels_last: of a plane, NCHW: of a class), in elements that it
        traverses, and the steps from one that it brings to the next; None where there is none.

        A box costs hundreds of clocks, however small, so that there are none of parts of a tile.
        """
        if self.gapless:
            counts, (by_d, by_h, by_w) = self.chunk[1:], self.steps
        else:
            counts = self.rows[0].held, self.class_rows, self.planes.columns
            by_d, by_h = (rows.apart for rows in self.rows)
            by_w = self.steps[2] if self.planes.parted else 1
        if max(by_d, by_h, by_w) > MAX_BOX_STEP:
            return None
        # Of n along a dimension of step s, ceil(n / s) are brought.
        d, h, w = ((count - 1) * step + 1 for count, step in zip(counts, (by_d, by_h, by_w)))
        if self.channels_last:
            box = self.g_width, w, h, d, self.chunk[0]
        else:
            box = self.g_row_units * self.vec, self.block[1] // self.classes[1], h, d, self.tile[0]
        return (box, (1, by_w, by_h, by_d, 1)) if max(box) <= MAX_BOX else None

    @of_chunk
    def box_g(self) -> bool:
        """Whether g comes by boxes too."""
        if self.g_boxes is None:
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
        return self.padding[2] == 0 and known and self.g_boxes is not None and self.g_boxes[1][2] == 1

    @of_chunk
    def class_rows(self) -> int:
        """Rows along H of a class."""
        return -(-self.rows[1].held // self.classes[0])

    @of_chunk
    def g_rows(self) -> int:
        """As for all tilings, of all classes."""
        return self.tile[0] * self.rows[0].held * self.classes[0] * self.class_rows

    @property
    def g_pixels(self) -> int:
        """Pixels of a row of g's tile (channels_last)."""
        return self.planes.number * self.planes.columns

    @of_chunk
    def g_bytes(self) -> int:
        if not self.channels_last:
            return super().g_bytes
        plane = -(-self.g_rows * self.planes.columns * self.g_width * self.element // 128) * 128
        return self.block[1] // self.g_width * self.planes.number * plane

    @of_chunk
    def g_units(self) -> int:
        if self.channels_last:
            return self.g_rows * self.g_pixels * -(-self.block[1] // self.vec)
        return super().g_units

    # --- both ---------------------------------------------------------------------------------------------------------

    @of_chunk
    def stage_bytes(self) -> int:
        return -(-(self.x_bytes + self.g_bytes) // 1024) * 1024

    @derived
    def shared_bytes(self) -> int:
        """The ring, where a block's sums are at the end; and barriers."""
        return max(self.stages * self.stage_bytes + self.raw_bytes, self.sums_bytes) + 16 * self.stages + 16

    # --- who multiplies what ------------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that copies, and of one that multiplies."""
        if self.warpgroups == 2:
            return 72, 216
        return (80, 144) if self.turned else (56, 152)  # with 56 the warps that turn pixels spill

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
    def stackable(self) -> bool:
        """Whether `stacked` is of use, and rows of x can follow each other in an instruction's columns."""
        width = self.block[0] if not self.channels_last or self.turned else self.x_width
        whole_steps = self.tile[3] * self.element % 32 == 0
        # Neighbours by taps are to be neighbours in shared memory.
        if not whole_steps or self.dilation[1] > 1 or self.stack < 2 or self.lines:
            return False
        if self.channels_last and not self.turned and self.x_width < min(self.block[0], 64):
            return False  # columns beyond a swizzled line are the next row's
        return self.stack * width <= 256  # columns of an instruction

    @property
    def a_shared(self) -> bool:
        """Whether matrix instructions read g's tile by descriptors: 16-bit rows of 64 channels, whose pixels of a tap
        are neighbours. A stage is given back a chunk later, so that copies want three.

        Where three warpgroups take many channels, or a fragment serves several rows of x, it gains nothing
        (docs/experiments.md).
        """
        if not (self.channels_last and self.element == 2 and self.g_width == 64 and self.subs == 1):
            return False
        if self.stages < 3 or self.stacked or not (self.planes.parted or self.steps[2] == 1):
            return False
        return self.warpgroups == 2 or self.block[0] <= 64

    @derived_from("problem", "taps", "subs", "stacked", "warpgroups", "split_m")
    def run(self) -> int:
        """Units of a warpgroup that are neighbours along W."""
        width, units = self.taps[2], self.unit_count
        if self.set_taps == width * self.of_unit or width % units == 0:
            return units
        return width if units % width == 0 else 1

    @property
    def parity_known(self) -> bool:
        """Half precision, NCHW: whether all runs of taps begin at odd elements, or none does."""
        even_sets = self.sets[2] == 1 or self.taps[2] * self.dilation[2] % 2 == 0
        return self.aligned_g and self.steps[2] % 2 == 0 and self.run * self.dilation[2] % 2 == 0 and even_sets

    @property
    def run_words(self) -> int:
        """Words of two pixels that a run of taps takes for one of its registers, where neighbouring taps shift their
        fragments out of words that they load together (half precision, NCHW); else 0."""
        if self.element == 4 or self.channels_last or self.interleaved or self.run == 1:
            return 0
        odd = self.padding[2] % 2 if self.parity_known else 1
        words = (odd + (self.run - 1) * self.dilation[2] + self.steps[2]) // 2 + 1
        return words if words < 2 * self.run else 0

    @property
    def steps_of_row(self) -> int:
        """Steps of K of a row of positions."""
        return self.tile[3] * self.element // 32

    @of_chunk
    def fragments(self) -> int:
        """Of a warpgroup, for a chunk."""
        return self.k_steps * self.fragments_of_step

    @property
    def fragments_of_step(self) -> int:
        """Of these those of a step of K: of g's rows that a row of x meets, each of all units."""
        return (self.steps[1] if self.stacked else 1) * self.unit_count

    @property
    def unrolled(self) -> int:
        """Steps of K that are unrolled, of as many fragments as fit; `stacked`: of some columns of all rows."""
        k = self.steps_of_row if self.stacked else self.k_steps
        parts = 1
        while k > parts and self.fragments > _UNROLLED * parts:
            parts *= 2
        return self.k_steps // parts

    def constants(self) -> dict[str, int]:
        """The kernel's, of a block that leaves partial sums to a second step."""
        return super().constants() | {
            "alone": False,
            "warpgroups": self.warpgroups,
            "split_m": self.split_m,
            "subs": self.subs,
            "interleaved": self.interleaved,
            "units": self.unit_count,
            "stages": self.stages,
            "unrolled": self.unrolled,
            "lines": self.lines,
            "stacked": self.stacked,
            "stack": self.halo + 1,
            "row_classes": self.classes[0],
            "channel_classes": self.classes[1],
            "x_width": self.x_width,
            "line_bytes": self.line,
            "segment": self.segment,
            "box_g": self.box_g,
            "parted": self.planes.parted,
            "a_shared": self.a_shared,
            "g_width": self.g_width,
            "g_planes": self.planes.number,
            "plane_columns": self.planes.columns,
            "plane_taps": self.planes.on,
            "run": self.run,
            "run_words": self.run_words,
            "parity_known": self.parity_known,
            "producer_registers": self.registers[0],
            "consumer_registers": self.registers[1],
            "shared_bytes": self.shared_bytes,
        }


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
