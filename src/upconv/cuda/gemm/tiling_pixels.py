"""The gather-GEMM's pixels: a chunk of a tile in shared memory, and the boxes or threads that bring it there.

What a tap reads is a shift by whole pixel rows (`TiledPixels.shift`). See kernels/gather_tile.cuh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from itertools import product

from upconv.cuda.axes import Axis, Division, Multiplied, gather_axes, multiplied, result_shape, source_shape
from upconv.cuda.compile.boxes import MAX_CLASSES
from upconv.cuda.gemm.shuffle import Shuffle
from upconv.cuda.gpu import MAX_BOX, MAX_BOX_STEP
from upconv.derived import derived, derived_from, derived_without
from upconv.problem import Problem, Triple

MAX_PIXELS = 12 * 192  # a producer thread keeps track of 12
_MAX_PLANES = 32


of_taps = derived_from("problem", "unroll", "subs", "w_subs", "classes")
_of_columns = derived_from("problem", "unroll", "subs", "w_subs", "classes", "tile", "whole", "beside")
of_pixels = derived_without("stages_p", "stages_s", "stages_w", "w_stage", "resident", "drained", "cluster")


class Fetch(IntEnum):
    """How pixels come: `Fetch` of kernels/gather_tile.cuh."""

    BY_THREADS, BY_BOXES, BY_CLASSES, WHOLE_IMAGES, IMAGES_BESIDE = range(5)


@dataclass(frozen=True)
class TiledPixels:
    """A tile's shape and its pixels, N of the GEMM; everything but the sizes of input and batch."""

    problem: Problem
    sub: tuple[int, int]
    """Shape (H, W) of the 64 q that one matrix instruction takes: (1, 64) or (8, 8)."""
    tile: tuple[int, int, int, int]
    """q of a tile: images, D, H, W."""
    split: int
    """0: consumers halve the pixels; 1: they halve 128 rows of M; 2: ping-pong, whole tiles in turn."""
    chunk: int
    """Input channels of a chunk."""
    subs: int = 1
    """(D, H) sub-positions that share a block of 64 rows: 1, 2 or 4."""
    w_subs: int = 0
    """W sub-positions of a tile, neighbours in a thread; 0 means all of them."""
    unroll: Triple = (1, 1, 1)
    stages_p: int = 2
    """Pixel tiles in shared memory."""
    stages_s: int = 3
    """Staging slots (NCHW)."""
    classes: tuple[int, int] | None = (1, 1)
    """NCHW: classes of rows along H, and of channels, by where they begin in units of 16 bytes. The tensor copy engine,
    whose strides are whole units, has a map for each; None: too many, threads copy."""
    wgmma: bool = True
    """Multiply with wgmma (sm_90a), else with mma.sync (sm_80 and up)."""
    whole: Triple | None = None
    """NCHW: size (D, H, W) of small sources, of which a tile holds whole images: copied as lines, without a halo."""
    shuffle: Shuffle | None = None
    """A strided layer's channels and phases as rows of M; ``problem`` is then the layer without its stride."""
    cluster: int = 1
    """Blocks of a cluster that share a tile's chunks and add up their sums."""
    beside: int = 0
    """NCHW: images of `whole` whose columns take turns along a tile's width: the first of all, then the second of all.
    So tiles are full of narrow images, and a step of taps along W is a shift by as many columns. 0: none."""

    # --- types -------------------------------------------------------------------------------------------------------

    @derived_from("problem")
    def element(self) -> int:
        """Bytes of an element."""
        return self.problem.dtype.itemsize

    @derived_from("problem")
    def parts(self) -> int:
        """TF32 parts of an operand: 2 for IEEE float32 (three products), else 1."""
        return 2 if self.problem.precision == "ieee" else 1

    @derived_from("problem")
    def vec(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.element

    @derived_from("problem", "chunk")
    def row_bytes(self) -> int:
        return self.chunk * self.element

    @derived_from("problem", "chunk")
    def k_steps(self) -> int:
        return self.row_bytes // 32

    @derived_from("problem")
    def cin_g(self) -> int:
        """Channels of a group in the source."""
        return source_shape(self.problem)[1] // self.problem.groups

    @derived_from("problem")
    def cout_g(self) -> int:
        """Channels of a group in the result."""
        return result_shape(self.problem)[1] // self.problem.groups

    @derived_from("problem", "chunk")
    def chunks(self) -> int:
        return -(-self.cin_g // self.chunk)

    @derived_from("problem")
    def channels_last(self) -> bool:
        return self.problem.layout == "channels_last"

    # --- axes --------------------------------------------------------------------------------------------------------

    @derived_from("problem", "unroll")
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return gather_axes(self.problem, self.unroll)

    @derived_from("problem", "unroll")
    def out_steps(self) -> Triple:
        d, h, w = self.axes
        return d.out_step, h.out_step, w.out_step

    @derived_from("problem", "unroll")
    def in_steps(self) -> Triple:
        d, h, w = self.axes
        return d.in_step, h.in_step, w.in_step

    @derived_from("problem", "unroll", "w_subs")
    def width_subs(self) -> int:
        return self.w_subs or self.axes[2].out_step

    @derived_from("problem", "unroll", "w_subs")
    def contiguous(self) -> bool:
        """Whether a tile's outputs of a row are neighbours in memory: it has all phases along W."""
        return self.width_subs == self.out_steps[2]

    @of_taps
    def multiplied(self) -> Multiplied:
        return multiplied(*self.division)

    @property
    def division(self) -> Division:
        """Of the taps. Classes are those of a tile's rows, whichever its variant."""
        return self.problem, self.unroll, self.subs, self.width_subs, self.classes == (1, 1)

    @property
    def own_rows(self) -> bool:
        """Whether a tile has the rows that its variant's taps read, and not those that some variant's do."""
        return any(map(any, self.multiplied.origins))

    # --- N: pixels ---------------------------------------------------------------------------------------------------

    @property
    def images(self) -> int:
        """Of a tile."""
        return self.beside or self.tile[0]

    @property
    def image_columns(self) -> int:
        """Columns of an image of `whole` that have outputs."""
        return -(-self.image_width // self.width_subs)

    @property
    def image_width(self) -> int:
        """Its outputs along W."""
        assert self.whole is not None
        return result_shape(self.problem.with_(size=self.whole[3 - self.problem.rank :]))[-1]

    @derived_from("sub", "tile")
    def subtiles(self) -> int:
        n, d, h, w = self.tile
        return n * d * (h // self.sub[0]) * (w // self.sub[1])

    @derived_from("sub", "tile", "split")
    def nb(self) -> int:
        """Subtiles of 64 pixels that a consumer accumulates."""
        return self.subtiles // 2 if self.split == 0 else self.subtiles

    def pixel_row_of(self, subtile: int) -> int:
        """The tile's pixel row of a subtile's first pixel, for a tap of shift 0."""
        _, d_of_tile, h_of_tile, w_of_tile = self.tile
        across, down = w_of_tile // self.sub[1], h_of_tile // self.sub[0]
        plane, within = divmod(subtile, across * down)
        n, d = divmod(plane, d_of_tile)
        h, w = divmod(within, across)
        (rows_d, rows_h), (step_d, step_h) = self.row_counts, self.row_steps
        row = (n * rows_d + d * step_d) * rows_h + h * self.sub[0] * step_h
        return row * self.pitch + w * self.sub[1]

    @derived
    def wide(self) -> bool:
        """Whether one matrix instruction takes two subtiles: the pixel rows of their groups of 8 columns lie evenly."""
        if not self.wgmma or self.nb % 2:
            return False
        apart = 8 * (self.row_steps[1] * self.pitch if self.sub[0] == 8 else 8)
        rows = [self.pixel_row_of(i) for i in range(self.subtiles)]
        return all(b - a == apart for a, b in zip(rows[::2], rows[1::2]))

    @of_taps
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Of each axis the offsets of all taps, in order."""
        return self.multiplied.offsets

    @derived_from("problem", "unroll", "subs", "w_subs", "classes", "tile")
    def bands(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """For D and H: the input offset of each band's first row, the rows of a band, and from one of them to the next.

        A dense axis is one band of every row of the halo, or, where steps and offsets have a common divisor (a stride
        of 2 with a dilation of 2), of every second. With a large dilation only the rows that some tap reads are held: a
        band for each offset.
        """
        result = []
        for axis in (0, 1):
            count, step, offsets = self.tile[1 + axis], self.in_steps[axis], self.offsets[axis]
            apart = math.gcd(step, *(off - offsets[0] for off in offsets))
            dense = (offsets[-1] - offsets[0] + (count - 1) * step) // apart + 1
            result.append(((offsets[0],), dense, apart) if dense <= count * len(offsets) else (offsets, count, step))
        return tuple(result)

    @of_pixels
    def _held(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """The `bands` that the tile's rows are: where bands are boxes of their own, the first."""
        return tuple((firsts[:1] if self.strided_box else firsts, count, apart) for firsts, count, apart in self.bands)

    @of_pixels
    def row_counts(self) -> tuple[int, int]:
        """Rows of the tile along D and H."""
        (d, rows_d, _), (h, rows_h, _) = self._held
        return len(d) * rows_d, len(h) * rows_h

    @of_pixels
    def row_steps(self) -> tuple[int, int]:
        """Rows from q to q + 1 along D and H."""
        (_, _, apart_d), (_, _, apart_h) = self.bands
        return self.in_steps[0] // apart_d, self.in_steps[1] // apart_h

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """For D and H the input offset of each row of the tile."""
        return tuple(
            tuple(first + i * apart for first in firsts for i in range(count)) for firsts, count, apart in self._held
        )

    @of_pixels
    def first_rows(self) -> tuple[dict[int, int], ...]:
        """For D and H the first row of each tap offset."""
        result = []
        for axis, (firsts, count, apart) in enumerate(self.bands):
            first = {}
            for off in self.offsets[axis]:
                band = self.band_of(axis, off)
                first[off] = (off - firsts[band]) // apart + (0 if self.strided_box else band * count)
            result.append(first)
        return tuple(result)

    def band_of(self, axis: int, offset: int) -> int:
        """The band that has an offset's rows."""
        firsts, _, apart = self.bands[axis]
        if len(firsts) == 1:
            return 0
        if offset in firsts:
            return firsts.index(offset)
        return next(i for i, f in enumerate(firsts) if f < offset and (offset - f) % apart == 0)

    @of_taps
    def first_w(self) -> int:
        return self.offsets[2][0]

    @_of_columns
    def columns(self) -> int:
        """Input columns of a tile with its halo."""
        offsets = self.offsets[2]
        reach = offsets[-1] - offsets[0]
        if self.beside:
            return (self.image_columns + reach) * self.beside
        return (self.tile[3] - 1) * self.in_steps[2] + reach + 1

    @_of_columns
    def residues(self) -> tuple[int, ...]:
        """Residues modulo the input step of the columns that some tap reads, counted from the first column."""
        return tuple(sorted({(off - self.first_w) % self.in_steps[2] for off in self.offsets[2]}))

    @_of_columns
    def plane(self) -> int:
        """Columns of a segment with one residue modulo the input step: these are neighbours in the tile."""
        return -(-self.columns // self.in_steps[2])

    @of_pixels
    def strided_box(self) -> bool:
        """Whether a chunk is several boxes, one for each of `planes`, which lands as a plane of the whole tile."""
        return self.tensor_map and self.channels_last and (self.in_steps[2] > 1 or self.plane_count > 1)

    @of_pixels
    def plane_count(self) -> int:
        """How many `planes` there are, without looking at each."""
        (bands_d, _, _), (bands_h, _, _) = self.bands
        return len(bands_d) * len(bands_h) * len(self.residues)

    @of_pixels
    def planes(self) -> tuple[Triple, ...]:
        """Channels-last: the first row of D and H and the residue of columns of each box."""
        (bands_d, _, _), (bands_h, _, _) = self.bands
        return tuple(product(bands_d, bands_h, self.residues))

    @of_pixels
    def pitch(self) -> int:
        """Pixel rows from a segment to the next: it has a plane of every residue, or a tile's plane has it."""
        return self.plane if self.strided_box else len(self.residues) * self.plane

    @of_pixels
    def plane_pitch(self) -> int:
        """Pixel rows from a residue's plane to the next; a box begins where the swizzle's pattern of 8 rows does."""
        return -(-self.segments * self.plane // 8) * 8 if self.strided_box else self.plane

    @of_pixels
    def segments(self) -> int:
        return self.tile[0] * math.prod(self.row_counts)

    @of_pixels
    def pixels(self) -> int:
        """Pixel rows of a tile in shared memory."""
        return self.plane_count * self.plane_pitch if self.strided_box else self.segments * self.pitch

    def shift(self, offsets: Triple) -> int:
        """A tap's shift in pixel rows."""
        column = offsets[2] - self.first_w
        row = self.first_rows[0][offsets[0]] * self.row_counts[1] + self.first_rows[1][offsets[1]]
        place = column * self.beside if self.beside else column // self.in_steps[2]
        return row * self.pitch + self.plane_of(offsets) * self.plane_pitch + place

    def plane_of(self, offsets: Triple) -> int:
        """The plane that a tap reads."""
        residue = self.residues.index((offsets[2] - self.first_w) % self.in_steps[2])
        if not self.strided_box:
            return residue
        d, h = self.band_of(0, offsets[0]), self.band_of(1, offsets[1])
        return (d * len(self.bands[1][0]) + h) * len(self.residues) + residue

    @of_pixels
    def _units_at_any_alignment(self) -> int:
        """Of a row of the tile, wherever it begins."""
        return (self.columns + 2 * self.vec - 2) // self.vec

    @of_pixels
    def classed(self) -> bool:
        """Whether rows begin at several places of a unit, so that boxes are of one class of rows and channels each."""
        return not self.channels_last and self.whole is None and self.classes not in (None, (1, 1))

    @of_pixels
    def row_classes(self) -> int:
        """Classes that a tile's rows have, which take turns."""
        return self.classes[0] // math.gcd(self.classes[0], self.bands[1][2]) if self.classes and self.classed else 1

    @property
    def channel_classes(self) -> int:
        return self.classes[1] if self.classes and self.classed else 1

    @of_pixels
    def class_rows(self) -> int:
        """Rows of a tile (along H) of one class."""
        return -(-self.bands[1][1] // self.row_classes)

    @of_pixels
    def row_boxes(self) -> int:
        """Boxes that a row of an NCHW source takes (those of small images aside)."""
        if self.channels_last or self.classed:
            return 1
        return -(-self._columns_from_unit // MAX_BOX)

    @of_pixels
    def _columns_from_unit(self) -> int:
        """Columns of a row from the 16-byte unit on that has its first: there a box begins."""
        return self.columns + self.first_w % self.vec

    @property
    def aligned_channels(self) -> bool:
        """Whether every chunk of a channels-last pixel begins at 16 bytes."""
        return source_shape(self.problem)[1] % self.vec == 0 and (
            self.problem.groups == 1 or self.cin_g % self.vec == 0
        )

    @of_pixels
    def tensor_map(self) -> bool:
        """Whether the tensor copy engine loads a chunk (sm_90), as a box or several: of planes, classes, long rows."""
        if not self.wgmma:
            return False
        if self.whole is not None:
            return self.problem.groups == 1 or self.cin_g % self.chunk == 0
        even = self.channels_last or all(len(firsts) == 1 for firsts, _, _ in self.bands)
        # A chunk that ended in the next group would bring its values, and 0 times infinity is no 0.
        whole = self.problem.groups == 1 or self.cin_g % self.chunk == 0
        if not (
            even
            and whole
            and max(self.box) <= MAX_BOX
            and (not self.channels_last or self.plane_count <= _MAX_PLANES)
            and 1 <= min(self.box_steps) <= max(self.box_steps) <= MAX_BOX_STEP
        ):
            return False
        return self.aligned_channels if self.channels_last else self._classes_fit

    @property
    def _classes_fit(self) -> bool:
        """NCHW: whether every tile and chunk has its rows and channels in the same classes, and these are few."""
        if self.classes is None:
            return False
        rows, channels = self.classes
        few = self.row_classes * self.channel_classes <= MAX_CLASSES
        # Only the first tile of a row may read ahead of the image, where a lead is to be masked.
        once = not self.classed or self.tile[3] * self.in_steps[2] + self.first_w >= 0
        return few and once and self.chunk % channels == 0 and self.tile[2] * self.in_steps[1] % rows == 0

    @of_pixels
    def box(self) -> tuple[int, int, int, int, int]:
        """The tensor copy engine's box, innermost first: channels, W, H, D, images, or W, H, D, channels, images.

        These are the elements traversed: of ``n`` along a dimension of step ``s``, ``ceil(n / s)`` are copied. (CUDA
        driver API, cuTensorMapEncodeTiled: ``elementStrides``.)
        """
        if self.beside:
            return self.box_channels * self.whole_pixels, self.beside, self.chunk // self.box_channels, 1, 1
        if self.whole is not None:
            return self.box_pixels, 1, 1, self.chunk, self.tile[0]
        (_, rows_d, _), (_, rows_h, _) = self.bands
        if self.channels_last:
            counts = (self.chunk, self.plane, rows_h, rows_d, self.tile[0])
        elif self.classed:
            units, channels = self._units_at_any_alignment, self.chunk // self.channel_classes
            counts = (units * self.vec, self.class_rows, rows_d, channels, self.tile[0])
        else:  # a box begins at 16 bytes, or the copy is an illegal instruction
            columns = -(-self._columns_from_unit // self.row_boxes)
            counts = (-(-columns // self.vec) * self.vec, rows_h, rows_d, self.chunk, self.tile[0])
        ends = (((n - 1) * step + 1, n * step) for n, step in zip(counts, self.box_steps))
        a, b, c, d, e = (max(least, min(most, MAX_BOX)) for least, most in ends)
        return a, b, c, d, e

    @of_pixels
    def box_steps(self) -> tuple[int, int, int, int, int]:
        """From one element of a box to the next along each of its dimensions."""
        if self.whole is not None:
            return 1, 1, 1, 1, 1
        d, h = (apart if rows > 1 else 1 for _, rows, apart in self.bands)
        if self.classed and self.classes:
            h = self.bands[1][2] * self.row_classes // self.classes[0]  # a class is a tensor of its own
        return (1, self.in_steps[2], h, d, 1) if self.channels_last else (1, h, d, 1, 1)

    @property
    def whole_pixels(self) -> int:
        """Pixels of an image that is copied whole."""
        return math.prod(self.whole or (0,))

    @property
    def box_pixels(self) -> int:
        """Of them, those of one box."""
        return min(self.whole_pixels, MAX_BOX)

    @property
    def box_channels(self) -> int:
        """Channels of images side by side that a box's row has: as many as fill units of 16 bytes."""
        return self.vec // math.gcd(self.whole_pixels, self.vec)

    @of_pixels
    def fetch(self) -> Fetch:
        if not self.tensor_map:
            return Fetch.BY_THREADS
        if self.whole is not None:
            return Fetch.IMAGES_BESIDE if self.beside else Fetch.WHOLE_IMAGES
        return Fetch.BY_CLASSES if self.classed else Fetch.BY_BOXES
