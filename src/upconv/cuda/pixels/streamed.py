"""NCHW places times columns, whose pixels and weights come through one ring: the modes `subpixel` and `pairs`.

`gather` makes places columns of N, for which float32 ones must be turned in shared memory, whose traffic bounds it.
Here they are rows of M, which lanes read as they lie.

`subpixel` has forwards whose kernel is the stride, the usual upsampling of a U-Net: each output has one tap. Columns
are taps of output channels, and an image's pixels are one long row, since none has a halo.

`pairs` has passes that step along W, whose K has each channel of the source once for every tap along a row. Gradients
for the input are convolutions with strides: columns are input channels, and lanes read two neighbouring taps at a time
where these are even. Forwards step in the result: columns are phases of output channels, each with a tap for every
stride that the kernel is long. Upsampling layers of vocoders and of codecs for audio are such.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from upconv.cuda.axes import any_size, result_shape, source_shape
from upconv.cuda.compile.boxes import Five, Tensor5
from upconv.cuda.cost import Work
from upconv.cuda.family import MOST_COUNTED
from upconv.cuda.gpu import LINE, MAX_BOX, RATES, ROWS_M, Gpu
from upconv.cuda.launches import Map
from upconv.cuda.pixels.tile import CONSUMERS, Tile, fitted, moved
from upconv.problem import Problem, triple

_PLACES = CONSUMERS * ROWS_M  # of a tile
_COLUMNS = range(256, 16, -16)
"""Many, since layers of so few places that a GPU's last wave of tiles is half empty gain by them."""
_GROUPS = (64, 32, 16)  # whole 16 places, as a warp has them
_MOST_ROWS = 3


@dataclass(frozen=True)
class Streamed(Tile):
    """As `Tile`; a stage has pixels, and rows of weights: for each column 128 bytes of K."""

    columns: int
    """Of a tile."""

    @property
    def rows(self) -> int:
        """Of a stage's weights."""
        return 1

    def stage(self, c: Any, all_columns: int, stages_k: int, boxes: int, box_bytes: int) -> None:
        """Fills what both modes have: the layer's columns, stages that a tile takes, boxes of a stage's pixels."""
        c.columns, c.all_columns, c.blocks = self.columns, all_columns, -(-all_columns // self.columns)
        c.rows, c.stages_k, c.boxes, c.box_bytes = self.rows, stages_k, boxes, box_bytes
        weight_bytes = c.rows * c.columns * LINE
        pixels = boxes * (-(-box_bytes // LINE) * LINE)  # boxes begin at whole lines
        c.stage_bytes = -(-pixels // 1024) * 1024 + weight_bytes
        c.packed_words = c.blocks * stages_k * weight_bytes // 4

    @property
    def sums(self) -> int:
        return self.columns // 2 + 16

    def work_of(self, p: Problem, gpu: Gpu, box_lines: float, loaded: int, together: bool) -> Work:
        """`work`, of a box's lines, bytes that lanes load for an instruction, and whether they store results together.
        Of weights each row is a line."""
        c = self.c
        instructions = CONSUMERS * 4 * c.rows * c.stages_k
        copied = (c.boxes * c.box_bytes + c.rows * c.columns * LINE) * c.stages_k
        return Work(
            instructions,
            instructions * c.columns,
            waves=-(-self.tiles(p) // gpu.multiprocessors),
            moved=moved(p),
            steps=c.stages_k,
            stages=self.stages,
            lines=c.stages_k * (c.boxes * box_lines + c.rows * c.columns),
            boxes=c.stages_k * c.boxes,
            shared=instructions * c.columns * 32 + copied,
            fragments=instructions * loaded,
            stored=_PLACES * self.columns / 8 * RATES.store * (1 if together else 4),
        )

    def text(self, p: Problem, gpu: Gpu) -> str:
        return f"tile of {_PLACES} places x {self.columns} columns, {self.stages} stages of {self.c.chunk} channels"


@dataclass(frozen=True)
class Subpixel(Streamed):
    """As `Streamed`: places are pixels of an image, columns kernel rows, output channels and taps of W."""

    mode = "subpixel"
    serves = (("fwd", "nchw"),)
    none = "there are more tiles than the kernel counts in 32 bits"

    @classmethod
    def refused(cls, p: Problem) -> str | None:
        lone = p.kernel == p.stride and all(d == 1 or k == 1 for k, d in zip(p.kernel, p.dilation))
        if not lone or any(p.padding) or any(p.output_padding):
            return "the kernel is for layers whose kernel is their stride, without padding"
        if p.kernel[-1] % 2:
            return "the kernel stores two taps of a row together"
        if math.prod(p.size) * p.dtype.itemsize % 16:
            return "channels begin at places off 16 bytes, where no box does"
        if max(math.prod(p.out_size) + 2**12, math.prod(p.weight_shape) * 16, p.batch) >= MOST_COUNTED:
            return "the kernel counts a channel's outputs, and packed weights, in 32 bits"
        return None

    @classmethod
    def candidates(cls, p: Problem, gpu: Gpu) -> tuple[Subpixel, ...]:
        return _subpixel_tiles(any_size(p), gpu)

    def numbers(self, c: Any) -> None:
        """See kernels/pixels_subpixel.cuh."""
        c.chunk = LINE // self.element  # also pixels of a row in shared memory
        c.of_axes("kernel", self.kernel)
        self.stage(c, c.cout * self.problem.taps, -(-c.cin // c.chunk), _PLACES // c.chunk, c.chunk * LINE)

    @property
    def packed_as(self) -> tuple[Any, ...]:
        return self.columns, self.problem.precision

    def tiles(self, p: Problem) -> int:
        return int(p.batch * -(-math.prod(p.size) // _PLACES) * self.c.blocks)

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        pixels = math.prod(p.size)
        return *triple(p.size), pixels, -(-pixels // _PLACES), 0, self.tiles(p)

    def source_map(self, p: Problem) -> Map:
        """Over the input, an image's pixels in a row, with a box of a chunk's."""
        channel = math.prod(p.size) * self.element
        image = p.in_channels * channel
        tensor = Tensor5(0, (math.prod(p.size), p.in_channels, p.batch, 1, 1), (channel, image, image, image))
        box = (self.c.chunk, self.c.chunk, 1, 1, 1)
        return Map("source", tensor, p.dtype, box, (1,) * 5, LINE, p.precision == "tf32")

    def work(self, p: Problem, gpu: Gpu) -> Work:
        return self.work_of(p, gpu, self.c.chunk, 32 * 64, True)


@lru_cache(maxsize=256)
def _subpixel_tiles(layer: Problem, gpu: Gpu) -> tuple[Subpixel, ...]:
    """A layer's tiles for all sizes."""
    most, least = 2 * layer.out_channels * layer.taps, _COLUMNS[-1]
    return fitted((Subpixel(layer, n) for n in _COLUMNS if n < most or n == least), gpu)


class _Row(NamedTuple):
    """A row of `Pairs`: results ``q * out + u - trim`` sum the source at ``q * step + k - pad`` for all ``k``."""

    kernel: int
    """Taps of a phase ``u``; of a forward those that the layer does not have are zeros."""
    step: int
    pad: int
    out: int
    trim: int

    @classmethod
    def of(cls, p: Problem) -> _Row:
        kernel, stride, pad = p.kernel[-1], p.stride[-1], p.padding[-1]
        if p.pass_ != "fwd":
            return cls(kernel, stride, pad, 1, 0)
        least = -(-kernel // stride)
        longer = range(least, _MOST_ROWS * LINE // p.dtype.itemsize + 1)
        taps = next((n for n in longer if _rows(p, n) <= _MOST_ROWS), least)
        return cls(taps, 1, taps - 1 - pad // stride, stride, pad % stride)

    def places(self, results: int) -> int:
        return -(-(results + self.trim) // self.out)


def _rows(p: Problem, kernel: int) -> int:
    """Of a stage's weights, the fewest that have whole channels: with more the ring has fewer stages, and is slower."""
    of_channel = p.dtype.itemsize * kernel
    return of_channel // math.gcd(LINE, of_channel)


@dataclass(frozen=True)
class Pairs(Streamed):
    """As `Streamed`: columns are channels and phases; a stage has a row of some channels for each group of places."""

    group: int
    """Neighbouring places of a row that a box serves."""

    mode = "pairs"
    serves = (("grad-input", "nchw"), ("fwd", "nchw"))
    none = "no tile fits a row of such strides, or the tiles or groups of places are too many"

    @classmethod
    def refused(cls, p: Problem) -> str | None:
        if p.pass_ == "fwd" and p.rank > 1:
            return "the kernel is for forwards of one dimension"
        if p.dilation[-1] > 1:
            return "the kernel is for layers without a dilation along the width"
        if p.stride[-1] == 1:
            return "the kernel is for strides along the width"
        if source_shape(p)[-1] * p.dtype.itemsize % 16:
            return "rows begin at places off 16 bytes, where no box does"
        if max(math.prod(result_shape(p)[2:]) + 2**12, math.prod(p.weight_shape) * 16, p.batch) >= MOST_COUNTED:
            return "the kernel counts a channel's results, and packed weights, in 32 bits"
        return None

    @classmethod
    def candidates(cls, p: Problem, gpu: Gpu) -> tuple[Pairs, ...]:
        every = _pairs_tiles(any_size(p), gpu)
        return tuple(t for t in every if t.groups(p)[1] < MOST_COUNTED - _PLACES)

    @property
    def row(self) -> _Row:
        return _Row.of(self.problem)

    @property
    def rows(self) -> int:
        return _rows(self.problem, self.row.kernel)

    def numbers(self, c: Any) -> None:
        """See kernels/pixels_pairs.cuh."""
        p, element, unit, row = self.problem, self.element, 16 // self.element, self.row
        c.forward, c.out, c.trim, c.taps_w = p.pass_ == "fwd", row.out, row.trim, self.kernel[2]
        # Whether two phases are stored at once: with an even stride rows are even, or odd, at any size.
        c.phases_together = row.out % 2 == row.trim % 2 == result_shape(p)[-1] % 2 == 0
        c.group, c.chunk = self.group, self.rows * LINE // (element * row.kernel)
        # Taps that one load of a lane has: two neighbours, where they lie at even places of shared memory. And how many
        # of these slots, of a step of K, are neighbours along W.
        c.slot = 1 if row.kernel % 2 or row.step % 2 or row.pad % 2 else 2
        c.slots_lane = math.gcd(row.kernel // c.slot, 32 // element // c.slot)
        # A group's boxes begin at whole 16 bytes; where they have its first tap.
        c.first = -row.pad // unit * unit
        c.lead = -row.pad - c.first
        need = c.lead + (self.group - 1) * row.step + row.kernel
        c.pitch = _fewest_conflicts(element, need, c.slot, c.slots_lane, row.step, c.lead)[0]
        d, h, _ = self.strides
        c.of_axes("step", (d, h, row.step))
        c.of_axes("kernel", (*self.kernel[:2], row.kernel))
        c.of_axes("dilation", triple(p.dilation))
        c.of_axes("pad", (*triple(p.padding, 0)[:2], row.pad))
        stages_k = -(-c.cin // c.chunk) * c.kernel_d * c.kernel_h
        self.stage(c, c.cout * row.out, stages_k, _PLACES // self.group, c.chunk * c.pitch * element)

    @property
    def fits(self) -> bool:
        return super().fits and self.rows <= _MOST_ROWS and max(self.box) <= MAX_BOX

    @property
    def conflicts(self) -> int:
        """How often lanes that load together meet a bank, at most."""
        c = self.c
        need = c.lead + (c.group - 1) * c.step_w + c.kernel_w
        return _fewest_conflicts(self.element, need, c.slot, c.slots_lane, c.step_w, c.lead)[1]

    @property
    def box(self) -> Five:
        return self.c.pitch, 1, 1, self.c.chunk, 1

    @property
    def packed_as(self) -> tuple[Any, ...]:
        c = self.c
        return c.forward, self.columns, c.chunk, c.slot, c.slots_lane, c.out, self.problem.precision

    def groups(self, p: Problem) -> tuple[int, int]:
        """Of a row of places, and in all."""
        *rows, results = result_shape(p)[2:]
        of_row = -(-self.row.places(results) // self.group)
        return of_row, p.batch * math.prod(rows) * of_row

    def tiles(self, p: Problem) -> int:
        return int(-(-self.groups(p)[1] // self.c.boxes) * self.c.blocks)

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        return *triple(result_shape(p)[2:]), *self.groups(p), 0, self.tiles(p)

    def work(self, p: Problem, gpu: Gpu) -> Work:
        c, element = self.c, self.element
        loads = 8 if element == 2 and c.slot == 1 else 4  # of a fragment, whose lanes have 128 bytes each time
        row = -(-(c.pitch * element + c.first * element % 128) // 128)
        together = c.phases_together if c.forward else p.size[-1] % 2 == 0
        return self.work_of(p, gpu, c.chunk * row, 4 * loads * self.conflicts * 128, together)


@lru_cache(maxsize=1024)
def _fewest_conflicts(element: int, need: int, slot: int, slots_lane: int, stride: int, lead: int) -> tuple[int, int]:
    """The smallest pitch of channels of at least ``need`` elements, in whole 16 bytes, with which a warp's lanes meet
    banks seldom, and how often they meet one then."""
    found, unit = [], 16 // element
    wide = element == 4 and slot == 2  # 64 bits, which half a warp loads at a time
    least = -(-need // unit) * unit
    for pitch in range(least, least + 128 // element, unit):
        words = set()
        for lane in range(16 if wide else 32):
            row, index = lane // 4, lane % 4 * (2 if element == 2 and slot == 1 else 1)
            at = index // slots_lane * pitch + index % slots_lane * slot + row * stride + lead
            words |= {at, at + 1} if wide else {at * element // 4}
        banks = [word % 32 for word in words]
        found.append((max(banks.count(bank) for bank in banks), pitch))
    conflicts, pitch = min(found)
    return pitch, conflicts


@lru_cache(maxsize=256)
def _pairs_tiles(layer: Problem, gpu: Gpu) -> tuple[Pairs, ...]:
    """A layer's tiles for all sizes."""
    every = result_shape(layer)[1] * _Row.of(layer).out
    columns = [n for n in _COLUMNS if every <= _COLUMNS[-1] or n < 2 * every]
    return fitted((Pairs(layer, *shape) for shape in product(columns, _GROUPS)), gpu)
