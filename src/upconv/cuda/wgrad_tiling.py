"""How a weight's gradient is cut into the grad-weight kernels' tiles: pure arithmetic, shared by both of them.

A chunk is a box of positions q of the input; a tap of a position lies at ``q * stride + tap * dilation - padding`` of
the output's gradient ``g``. All axes are three (D, H, W); 1-D and 2-D problems have leading axes of size 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

from upconv.cuda.columns import instruction
from upconv.cuda.gpu import MAX_BOX, MAX_BOX_STEP
from upconv.problem import Problem

Triple = tuple[int, int, int]

WARPS = 8  # of the mma.sync kernel
_UNIT = 7.0  # passes of shared memory that a row of g twice as long weighs
_LARGE = 1 << 18  # weights from here on are turned by the second step
_PRECISIONS = {"tf32": 0, "ieee": 1, "fp16": 2, "bf16": 3}
MAX_CLASSES = 8  # of rows and channels: a box and a tensor map each
_MAX_STACK = 5  # rows of x in one instruction's columns
COMMON_WIDTHS = (32, 64, 128, 256)  # columns whose instructions kernels/wgmma.cuh writes down
_STRETCH = 40  # matrix instructions of a warpgroup between whose ends the tensor cores do not drain


@dataclass(frozen=True)
class Tiling:
    """A block's tile and the kernel's constants; everything but the sizes of input and batch."""

    file: ClassVar[str] = ""
    """The kernel's source."""

    problem: Problem
    block: tuple[int, int]
    """Input channels x output channels of a block."""
    taps: Triple
    """Taps (D, H, W) of a set."""
    tile: tuple[int, int, int, int]
    """Positions q of a chunk: images, D, H, W."""
    aligned: bool = True
    """NCHW: rows of the input begin at 16 bytes."""

    # --- the layer ---------------------------------------------------------------------------------------------------

    def _full(self, values: tuple[int, ...], fill: int) -> Triple:
        d, h, w = (fill,) * (3 - len(values)) + values
        return d, h, w

    @cached_property
    def kernel(self) -> Triple:
        return self._full(self.problem.kernel, 1)

    @cached_property
    def steps(self) -> Triple:
        return self._full(self.problem.stride, 1)

    @cached_property
    def dilation(self) -> Triple:
        return self._full(self.problem.dilation, 1)

    @cached_property
    def padding(self) -> Triple:
        return self._full(self.problem.padding, 0)

    @cached_property
    def apart(self) -> Triple:
        """From one row of g (D, H) that some tap reads to the next; columns are all held."""
        d, h, _ = (math.gcd(*pair) for pair in zip(self.steps, self.dilation))
        return d, h, 1

    @cached_property
    def element(self) -> int:
        return self.problem.dtype.itemsize

    @cached_property
    def vec(self) -> int:
        return 16 // self.element

    @cached_property
    def channels_last(self) -> bool:
        return self.problem.layout == "channels_last"

    @cached_property
    def channels(self) -> tuple[int, int]:
        """Input and output channels of a group."""
        p = self.problem
        return p.in_channels // p.groups, p.out_channels // p.groups

    # --- M, N and taps -----------------------------------------------------------------------------------------------

    @cached_property
    def sets(self) -> Triple:
        d, h, w = (-(-k // t) for k, t in zip(self.kernel, self.taps))
        return d, h, w

    @cached_property
    def set_taps(self) -> int:
        return math.prod(self.taps)

    @cached_property
    def channel_tiles(self) -> tuple[int, int]:
        (ci, co), (m, n) = self.channels, self.block
        return -(-ci // m), -(-co // n)

    @cached_property
    def tiles(self) -> int:
        """Blocks that one split of K takes."""
        return self.problem.groups * math.prod(self.channel_tiles) * math.prod(self.sets)

    # --- K and shared memory -----------------------------------------------------------------------------------------

    @cached_property
    def spans(self) -> Triple:
        """Rows (D, H) and columns of g that a chunk holds."""
        return self._held()

    def _held(self) -> Triple:
        spans = []
        for axis in range(3):
            dense = self._dense(axis)
            spans.append(dense if axis == 2 else min(dense, self.tile[1 + axis] * self.taps[axis]))
        return spans[0], spans[1], spans[2]

    def _dense(self, axis: int) -> int:
        """Rows, or columns, of g from the first that a chunk's taps read to the last, `apart` from each other."""
        count, taps = self.tile[1 + axis], self.taps[axis]
        return ((count - 1) * self.steps[axis] + (taps - 1) * self.dilation[axis]) // self.apart[axis] + 1

    @property
    def halo(self) -> int:
        """Rows of x's tile ahead of the chunk's own."""
        return 0

    @cached_property
    def strips(self) -> int:
        """Strips of 8 positions of a row."""
        return math.prod(self.tile) // 8

    @cached_property
    def k_steps(self) -> int:
        return self.strips if self.element == 4 else self.strips // 2

    @cached_property
    def units(self) -> tuple[int, int]:
        """16-byte units of a row of one channel (NCHW) of x and of g."""
        x = self.tile[3] + (0 if self.aligned else self.vec - 1)
        return -(-x // self.vec), -(-(self.spans[2] + self.vec - 1) // self.vec)

    @cached_property
    def g_row_units(self) -> int:
        """16-byte units from one channel's row of g to the next's (NCHW): an odd number, for banks."""
        return self.units[1] | 1

    @cached_property
    def g_rows(self) -> int:
        """Rows of g's tile, of all images."""
        rows_d, rows_h, _ = self.spans
        return self.tile[0] * rows_d * rows_h

    @cached_property
    def g_bytes(self) -> int:
        """Bytes of g's tile in shared memory."""
        rows, columns = self.g_rows, self.spans[2]
        if self.channels_last:
            return rows * columns * self._pitch(self.block[1]) * self.element
        return rows * self.block[1] * self.g_row_units * 16

    def _pitch(self, channels: int) -> int:
        """Elements from one pixel to the next (channels_last)."""
        return (channels + 23) // 32 * 32 + 8 if self.element == 4 else channels + 8

    @cached_property
    def g_units(self) -> int:
        """16-byte copies of g's tile."""
        rows, columns = self.g_rows, self.spans[2]
        if self.channels_last:
            return rows * columns * -(-self.block[1] // self.vec)
        return rows * self.block[1] * self.units[1]

    @property
    def needs_alignment(self) -> bool:
        """Whether both tensors must begin at 16 bytes."""
        return self.channels_last or self.aligned

    def counts(self, p: Problem) -> tuple[int, int, int, int]:
        """Chunks per axis: images, D, H, W."""
        d, h, w = self._full(p.size, 1)
        sizes = p.batch, d, h + self.halo, w
        n, d, h, w = (-(-size // tile) for size, tile in zip(sizes, self.tile))
        return n, d, h, w

    @property
    def reduce_rows(self) -> int:
        """Rows of a slice of partial sums that a block of the second step takes, 32 channels of each."""
        return 64 if math.prod(self.problem.weight_shape) >= _LARGE else 1

    def macros(self) -> dict[str, int | float | str]:
        """The kernel's constants."""
        p = self.problem
        axes = ("D", "H", "W")
        found: dict[str, int | float | str] = {
            "ELEMENT": self.element,
            "PRECISION": _PRECISIONS[p.precision],
            "CHANNELS_LAST": int(self.channels_last),
            "GROUPS": p.groups,
            "CIN_G": self.channels[0],
            "COUT_G": self.channels[1],
            "BLOCK_CI": self.block[0],
            "BLOCK_CO": self.block[1],
            "REDUCE_ROWS": self.reduce_rows,
            "TILE_N": self.tile[0],
        }
        for i, axis in enumerate(axes):
            found |= {
                f"KERNEL_{axis}": self.kernel[i],
                f"STEP_{axis}": self.steps[i],
                f"DIL_{axis}": self.dilation[i],
                f"PAD_{axis}": self.padding[i],
                f"TAPS_{axis}": self.taps[i],
                f"SETS_{axis}": self.sets[i],
                f"TILE_{axis}": self.tile[1 + i],
                f"APART_{axis}": self.apart[i],
            }
        return found


@dataclass(frozen=True)
class SyncTiling(Tiling):
    """A tiling of ``wgrad.cu`` (mma.sync): warps divide channels, and what is left of them K."""

    file: ClassVar[str] = "wgrad.cu"
    warp: tuple[int, int] = (16, 8)
    """Input channels x output channels of a warp."""

    @property
    def warps(self) -> int:
        """Warps that divide the channels."""
        return self.block[0] // self.warp[0] * (self.block[1] // self.warp[1])

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def k_slices(self) -> int:
        """Warps that divide K, each with sums of its own."""
        return WARPS // self.warps

    @property
    def promote(self) -> bool:
        """IEEE: sums leave the tensor cores, which truncate them, after every chunk."""
        return self.problem.precision == "ieee"

    @property
    def accumulators(self) -> int:
        """Registers of a thread."""
        return self.set_taps * self.warp[0] * self.warp[1] // 32 * (2 if self.promote else 1)

    @property
    def x_bytes(self) -> int:
        """Bytes of x's tile in shared memory."""
        n, d, h, w = self.tile
        if self.channels_last:
            return n * d * h * w * self._pitch(self.block[0]) * self.element
        return n * d * h * self.block[0] * (self.units[0] | 1) * 16

    @property
    def shared_bytes(self) -> int:
        return 2 * (self.x_bytes + self.g_bytes)

    @property
    def copied_units(self) -> int:
        """16-byte copies of a chunk."""
        n, d, h, w = self.tile
        if self.channels_last:
            return n * d * h * w * -(-self.block[0] // self.vec) + self.g_units
        return n * d * h * self.block[0] * self.units[0] + self.g_units

    def macros(self) -> dict[str, int | float | str]:
        """The kernel's constants."""
        return super().macros() | {
            "PROMOTE": int(self.promote),
            "WARP_M": self.warp[0],
            "WARP_N": self.warp[1],
            "ALIGNED_X": int(self.aligned),
            "SHARED_BYTES_PLANNED": self.shared_bytes,
        }


@dataclass(frozen=True)
class WarpgroupTiling(Tiling):
    """A tiling of ``wgrad_wgmma.cu`` (sm_90a): warpgroups divide output channels and taps."""

    file: ClassVar[str] = "wgrad_wgmma.cu"
    warpgroups: int = 2
    """That multiply; one more copies."""
    split_m: int = 1
    """Of them, those that divide the output channels."""
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
    lined: bool = False
    """1-D, `interleaved`: boxes of g are of whole lines of 128 bytes, of which rows of the output are a whole number;
    else a box has at most 256 elements of a row."""
    gapless: int = 0
    """channels_last: positions of K that a chunk has, of which a box of any shape (the tile) fills all or nearly all:
    each tap has pixels of g of its own, in the order of the box's, so that no row need be whole strips of 8. The
    kernel knows their number alone; the box comes with a launch. 0: rows of a chunk are whole strips, and taps share
    what they read."""

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    @cached_property
    def _interleaved_banks(self) -> tuple[int, int]:
        least, every = self.units[1], 1
        if self.lined:
            least, every = -(-(self.spans[2] + self.line - 1) // self.line) * 8, 8
        lanes = self.subs, self.dilation[2], self.steps[2], -self.padding[2] % self.vec
        return _fewest_conflicts(self.element, least, every, *lanes)

    @property
    def line(self) -> int:
        """Elements of 128 bytes."""
        return 128 // self.element

    @cached_property
    def g_row_units(self) -> int:
        """As for all tilings; `interleaved`: the number with which a warp's lanes meet banks most seldom."""
        return self._interleaved_banks[0] if self.interleaved else self.units[1] | 1

    @property
    def conflicts(self) -> int:
        """`interleaved`: how often a bank is met by lanes that load together, at most."""
        return self._interleaved_banks[1]

    @property
    def k_slices(self) -> int:
        return 1

    @cached_property
    def strips(self) -> int:
        """Strips of 8 positions of a row, or (`gapless`) of those that follow each other."""
        return self.gapless // 8 if self.gapless else super().strips

    @cached_property
    def g_rows(self) -> int:
        """As for all tilings; `gapless`: one, which has all pixels of a tap."""
        return 1 if self.gapless else super().g_rows

    @property
    def row(self) -> int:
        """Positions of K that lie in a row."""
        return self.gapless or self.tile[3]

    @property
    def of_unit(self) -> int:
        """Taps that share their fragments of g: a column of them, or one."""
        return self.taps[1] if self.stacked else 1

    @property
    def unit_count(self) -> int:
        """Fragments of g of a warpgroup, for each step of K."""
        return -(-self.set_taps // (self.of_unit * self.subs * (self.warpgroups // self.split_m)))

    @property
    def entries(self) -> int:
        """Accumulators of 64 rows of a warpgroup."""
        return self.unit_count * self.of_unit

    @property
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
    def accumulators(self) -> int:
        """Registers of a thread."""
        return self.entries * self.block[0] // 2

    @property
    def x_width(self) -> int:
        """Input channels of a box of x (channels_last, 16 bits): those of a swizzled row."""
        return next(w for w in (64, 32, 16) if self.block[0] % w == 0)

    @property
    def row_columns(self) -> int:
        """Columns of a matrix instruction that one row of x takes."""
        halves = self.channels_last and not self.turned
        return min(self.block[0], 64) if self.stacked and halves else self.block[0]

    @property
    def turned(self) -> bool:
        """Whether x's pixels are turned to rows of a channel: TF32 multiplies no others."""
        return self.channels_last and self.element == 4

    @property
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

    @property
    def box_g(self) -> bool:
        """Whether g comes by boxes too."""
        if self.channels_last:
            aligned = self.problem.out_channels % self.vec == 0
            whole = self.problem.groups == 1 or self.channels[1] % self.vec == 0
            return aligned and whole and max(self.g_box) <= MAX_BOX
        return (self.aligned_g or self.classed) and max(self.g_box) <= MAX_BOX

    @property
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
        return few and known and self.g_one_box and self._g_row_steps[1] == 1

    @property
    def g_box(self) -> tuple[int, int, int, int, int]:
        """The box of g, innermost first: channels, W, H, D, images (channels_last) or W, channels, H, D, images, of all
        of a tile (`g_one_box`; channels_last: of a plane of it) or of a row."""
        if self.channels_last:
            return self._g_whole_box or (self.g_width, self.spans[2], 1, 1, 1)
        row = self.g_row_units * self.vec
        if self.lined:
            return self.line, row // self.line, self.block[1], 1, self.tile[0]
        return self._g_whole_box or (row, self.block[1], 1, 1, 1)

    @property
    def g_box_steps(self) -> tuple[int, int, int, int, int]:
        """From one element of a box of g to the next along each of its dimensions."""
        if self.lined:
            return 1, 1, 1, 1, 1
        d, h = self._g_row_steps if self.g_one_box else (1, 1)
        return 1, self.steps[2] if self.parted else 1, h, d, 1

    @property
    def g_one_box(self) -> bool:
        """Whether one box brings g's tile (channels_last: for each `g_width` channels and plane), not one for each row
        (NOTES: 320 clocks a box, 16 in dcgan1's chunk)."""
        return self.lined or self._g_whole_box is not None

    @property
    def parted(self) -> bool:
        """Channels_last: whether columns of g that a tap reads are neighbours, in a plane of those with their remainder
        by the stride. So columns that no tap reads are left out; and 16-bit fragments of even strides meet all banks,
        where rows of every second pixel lie in half of them."""
        return self.box_g and self._partable and self.g_one_box

    @property
    def _partable(self) -> bool:
        if self.gapless:
            return True
        if not self.channels_last or not 1 < self.steps[2] <= MAX_BOX_STEP:
            return False
        planes, columns, _ = self._parts
        return (self.element == 2 and self.steps[2] % 2 == 0) or planes * columns < self.spans[2]

    @property
    def a_shared(self) -> bool:
        """Whether matrix instructions read g's tile by descriptors: 16-bit rows of 64 channels, whose pixels of a tap
        are neighbours. A stage is given back a chunk later, so that copies want three (with two unet1 106 -> 184 us).

        NOTES: bfloat16 kb77 82 -> 64 us, dcgan1 54 -> 52, pix 116 -> 113, kb65 512 -> 496, kb69 718 -> 678, vae 141 ->
        132. Where three warpgroups take many rows or channels a fragment serves it is no faster (kb57, kb61) or slower
        (vae with 128 channels 133 -> 143, kb68 1,905 -> 1,913).
        """
        if not (self.channels_last and self.element == 2 and self.box_g and self.g_width == 64 and self.subs == 1):
            return False
        if self.stages < 3 or not (self.parted or self.steps[2] == 1):
            return False
        return self.warpgroups == 2 or (self.stack <= 2 if self.stacked else self.block[0] <= 64)

    @property
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

    @cached_property
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

    @cached_property
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

    @property
    def boxes(self) -> int:
        """Copies of the tensor copy engine for a chunk."""
        line = self.row * (self.tile[2] if self.lines else 1) * self.element
        found = self.block[0] // self.x_width if self.channels_last else line // self.segment
        if self.turned:
            found = 1
        if self.box_g:
            wide = self.block[1] // self.g_width if self.channels_last else 1
            found += wide * (math.prod(self.classes) * self.g_planes[0] if self.g_one_box else self.g_rows)
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
        return found + touched(self.g_rows * self.block[1], row, 128 if self.lined else 16)

    @property
    def g_width(self) -> int:
        """Output channels of a box (channels_last)."""
        return next(w for w in (64, 32, 16) if self.block[1] % w == 0 and w * self.element <= 128)

    @cached_property
    def g_bytes(self) -> int:
        """Bytes of g's tile in shared memory."""
        if self.classed:
            rows_d, rows_h, _ = self.spans
            of_rows, _ = self.classes
            rows = self.tile[0] * rows_d * -(-rows_h // of_rows) * of_rows
            return rows * self.block[1] * self.g_row_units * 16
        if self.channels_last and self.box_g and self.g_one_box:
            planes, columns, _ = self.g_planes
            plane = -(-self.g_rows * columns * self.g_width * self.element // 128) * 128
            return self.block[1] // self.g_width * planes * plane
        if self.channels_last and self.box_g:
            box = -(-self.spans[2] * self.g_width * self.element // 128) * 128
            return self.g_rows * self.block[1] // self.g_width * box
        return super().g_bytes

    @property
    def g_pixels(self) -> int:
        """Pixels of a row of g's tile (channels_last)."""
        planes, columns, _ = self.g_planes
        return planes * columns

    @cached_property
    def g_units(self) -> int:
        """16-byte copies of g's tile."""
        if self.channels_last and self.box_g:
            return self.g_rows * self.g_pixels * -(-self.block[1] // self.vec)
        return super().g_units

    @property
    def x_bytes(self) -> int:
        """Bytes of x's tile in shared memory."""
        n, d, h, w = self.tile
        return (self.gapless or n * d * (h + self.halo) * w) * self.block[0] * self.element

    @property
    def stage_bytes(self) -> int:
        return -(-(self.x_bytes + self.g_bytes) // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + self.raw_bytes + 16

    @property
    def raw_bytes(self) -> int:
        """Bytes of x's pixels before they are turned."""
        return self.x_bytes if self.turned else 0

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

    @property
    def stretch(self) -> int:
        """Steps of a warpgroup in one stretch of code: as many of K as fit, a power of two.

        ``stacked``: steps of K of every row.
        """
        if self.stacked:
            k = self.tile[3] * self.element // 32
            while k > 1 and k * self.row_steps > _STRETCH:
                k //= 2
            return k
        k = self.k_steps
        while k > 1 and k * self.entries > _STRETCH:
            k //= 2
        return k * self.entries

    @property
    def row_steps(self) -> int:
        """``stacked``: fragments of a warpgroup for one column of K."""
        return self.tile[0] * self.tile[1] * self.spans[1] * self.unit_count

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that copies, and of one that multiplies."""
        if self.warpgroups == 2:
            return 72, 216
        return (80, 144) if self.turned else (56, 152)  # NOTES: with 56 the warps that turn kb73's pixels spill

    @property
    def adds_up(self) -> bool:
        """Whether blocks may write the weight themselves: of several splits as a cluster or together, or of one alone.

        Of 16-bit NCHW tilings not those that have several taps in a fragment (NOTES: hifigan bfloat16 128 -> 137 us in
        all; its loop alone 118 -> 132, which is not explained; TF32 187 -> 176), but interleaved ones (110 -> 95).
        """
        if self.subs > 1 and self.element == 2 and not self.channels_last and not self.interleaved:
            return False
        return self.sums_bytes <= self.shared_bytes - 16 * self.stages - 16

    @property
    def sums_bytes(self) -> int:
        """Bytes of a block's sums in shared memory, where its stages were."""
        return self.set_taps * (self.block[0] * (self.block[1] + 4) + 8) * 4

    def macros(self, cluster: int = 1, together: bool = False, alone: bool = False) -> dict[str, int | float | str]:
        """The kernel's constants. ``cluster``: splits whose blocks are one; ``together``: they add up in global memory;
        ``alone``: there is one split (all: `adds_up`).
        """
        stacks = {self.taps[1] // self.steps[1], self.stack} if self.stacked else {1}
        found: dict[str, int | float | str] = {}
        for rows in stacks - {0} if self.row_columns not in COMMON_WIDTHS else ():
            found |= instruction(f"ROWS_{rows}_", rows * self.row_columns, words_of_a=0 if self.a_shared else 4)
        return (
            super().macros()
            | found
            | {
                "CLUSTER": cluster,
                "TOGETHER": int(together),
                "ALONE": int(alone),
                "WGS": self.warpgroups,
                "WGS_M": self.split_m,
                "SUBS": self.subs,
                "INTERLEAVED": int(self.interleaved),
                "G_LINED": int(self.lined),
                "ENTRIES": self.entries,
                "STAGES": self.stages,
                "STRETCH": self.stretch,
                "GAPLESS": int(self.gapless > 0),
                "ALIGNED_G": int(self.aligned_g),
                "LINES": int(self.lines),
                "STACKED": int(self.stacked),
                "CLASSED": int(self.classed),
                "ROW_CLASSES": self.classes[0],
                "CHANNEL_CLASSES": self.classes[1],
                "BOX_G": int(self.box_g),
                "G_ONE_BOX": int(self.box_g and self.g_one_box),
                "PARTED": int(self.parted),
                "A_SHARED": int(self.a_shared),
                "G_PLANES": self.g_planes[0],
                "PLANE_COLUMNS": self.g_planes[1],
                "PLANE_TAPS": self.g_planes[2],
                "PRODUCER_REGISTERS": self.registers[0],
                "CONSUMER_REGISTERS": self.registers[1],
                "SHARED_BYTES_PLANNED": self.shared_bytes,
            }
            | ({"G_ROW_UNITS": self.g_row_units} if self.interleaved else {})
            | ({"TILE_N": 1, "TILE_D": 1, "TILE_H": 1, "TILE_W": self.gapless} if self.gapless else {})
        )


@lru_cache(maxsize=512)
def _fewest_conflicts(
    element: int, units: int, every: int, subs: int, tap: int, step: int, lead: int
) -> tuple[int, int]:
    """How many 16-byte units, so many or a few more, rows of channels are apart, and how often lanes meet a bank then.

    ``every``: whose multiples they are. NOTES: a unit that no column needs is copied all the same: dcgan1 in TF32 with
    6 units, where lanes meet banks twice, 114 us, with 11, where they do not, 140.
    """
    found = []
    for apart in range(units, units + 8 * every, every):
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
