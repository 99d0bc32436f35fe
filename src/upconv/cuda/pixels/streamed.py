"""NCHW places times columns, whose pixels and weights come through one ring: the modes `subpixel` and `pairs`.

`gather` makes places columns of N, for which float32 ones must be turned in shared memory, whose traffic bounds it.
Here they are rows of M, which lanes read as they lie.

`subpixel` has forwards whose kernel is the stride, the usual upsampling of a U-Net: each output has one tap. Columns
are taps of output channels, and an image's pixels are one long row, since none has a halo.

`pairs` has gradients for the input with strides along W, which are convolutions with strides. Columns are input
channels, K has each channel of the output once for every tap, and lanes read two neighbouring taps at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar

from upconv.cuda.axes import any_size
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Five, Tensor5
from upconv.cuda.cost import Work
from upconv.cuda.gpu import MAX_BOX, Gpu
from upconv.cuda.launches import Map
from upconv.cuda.pixels import tile
from upconv.cuda.pixels.choice import Chooser, TileChoice
from upconv.cuda.pixels.tile import CONSUMERS, MOST_COUNTED, SPAN, Tile, fitted, moved, of_axes, triple
from upconv.derived import derived
from upconv.problem import Problem

_PLACES = CONSUMERS * 64  # of a tile
_SUBPIXEL_COLUMNS = (256, 192, 128, 96, 64, 32)
_PAIRS_COLUMNS = (256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 104, 96, 88, 80, 64, 48, 32)
"""Many, since such a layer has so few places that a GPU's last wave of tiles is often half empty."""
_GROUPS = (64, 32, 16, 8)
_ROWS = 1, 2, 3
_SECTOR = 1.74  # clocks of a consumer for 32 bytes of stores, of two taps a lane
_STORE = 1.3  # clocks of a consumer for 8 neighbouring results


@dataclass(frozen=True)
class Streamed(Tile):
    """As `Tile`; a stage has pixels, and rows of weights: for each column 128 bytes of K."""

    columns: int
    """Of a tile."""

    rows = 1
    """Of a stage's weights."""
    named: ClassVar[tuple[str, ...]] = (
        "columns",
        "all_columns",
        "blocks",
        "rows",
        "stages_k",
        "boxes",
        "box_bytes",
        "stage_bytes",
    )

    @property
    def all_columns(self) -> int:
        """The layer's."""
        raise NotImplementedError

    @property
    def chunk(self) -> int:
        """Channels of the source in a stage."""
        raise NotImplementedError

    @property
    def stages_k(self) -> int:
        """That a tile takes."""
        return -(-self.channels[0] // self.chunk)

    @property
    def blocks(self) -> int:
        """Tiles along the columns."""
        return -(-self.all_columns // self.columns)

    @property
    def boxes(self) -> int:
        """Of a stage's pixels."""
        raise NotImplementedError

    @property
    def box_bytes(self) -> int:
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return self.rows * self.columns * SPAN

    @property
    def stage_bytes(self) -> int:
        pixels = self.boxes * (-(-self.box_bytes // 128) * 128)  # boxes begin at whole 128 bytes
        return -(-pixels // 1024) * 1024 + self.weight_bytes

    @property
    def packed_words(self) -> int:
        return self.blocks * self.stages_k * self.weight_bytes // 4

    def work_of(self, p: Problem, gpu: Gpu, box_lines: float, loaded: int, stored: float) -> Work:
        """`work`, of a box's lines, bytes that lanes load for an instruction, and clocks of a tile's stores."""
        instructions = CONSUMERS * 4 * self.rows * self.stages_k
        copied = (self.boxes * self.box_bytes + self.weight_bytes) * self.stages_k
        return Work(
            instructions,
            instructions * self.columns,
            waves=-(-self.tiles(p) // gpu.multiprocessors),
            moved=moved(p),
            steps=self.stages_k,
            stages=self.stages,
            lines=self.stages_k * self.boxes * box_lines,
            boxes=self.stages_k * self.boxes,
            shared=instructions * self.columns * 32 + copied,
            fragments=instructions * loaded,
            stored=stored,
        )

    def text(self, p: Problem, gpu: Gpu) -> str:
        return f"tile of {_PLACES} places x {self.columns} columns, {self.stages} stages of {self.chunk} channels"


# --- subpixel --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subpixel(Streamed):
    """As `Streamed`: places are pixels of an image, columns kernel rows, output channels and taps of W."""

    mode = "subpixel"

    @property
    def chunk(self) -> int:
        """Also pixels of a row in shared memory."""
        return SPAN // self.element

    @property
    def all_columns(self) -> int:
        return self.problem.out_channels * self.problem.taps

    @property
    def boxes(self) -> int:
        return _PLACES // self.chunk

    @property
    def box_bytes(self) -> int:
        return self.chunk * SPAN

    @property
    def packed_as(self) -> tuple[Any, ...]:
        return self.columns, self.problem.precision

    def faults(self) -> Iterator[str]:
        return iter(())

    def constants(self) -> dict[str, jit.Constant]:
        """The kernel's, see kernels/pixels_subpixel.cuh."""
        return super().constants() | of_axes("kernel", self.kernel)

    def tiles(self, p: Problem) -> int:
        return p.batch * -(-math.prod(p.size) // _PLACES) * self.blocks

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        pixels = math.prod(p.size)
        return *triple(p.size), pixels, -(-pixels // _PLACES), 0, self.tiles(p)

    def source_map(self, p: Problem) -> Map:
        """Over the input, an image's pixels in a row, with a box of a chunk's."""
        channel = math.prod(p.size) * self.element
        image = p.in_channels * channel
        tensor = Tensor5(0, (math.prod(p.size), p.in_channels, p.batch, 1, 1), (channel, image, image, image))
        box = (self.chunk, self.chunk, 1, 1, 1)
        return Map("source", tensor, p.dtype, box, (1,) * 5, SPAN, p.precision == "tf32")

    def work(self, p: Problem, gpu: Gpu) -> Work:
        lines = self.chunk + self.columns / self.boxes  # those of weights count too
        return self.work_of(p, gpu, lines, 32 * 64, _PLACES * self.columns * self.element / 32 * _SECTOR)


def _subpixel_refusal(p: Problem, gpu: Gpu) -> str | None:
    if refused := tile.refusal(p, gpu):
        return refused
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


@lru_cache(maxsize=256)
def _subpixel_tiles(layer: Problem, gpu: Gpu) -> tuple[Subpixel, ...]:
    """A layer's tiles for all sizes."""
    every = (Subpixel(layer, columns) for columns in _SUBPIXEL_COLUMNS)
    return fitted((t for t in every if t.columns < 2 * t.all_columns or t.columns == _SUBPIXEL_COLUMNS[-1]), gpu)


# --- pairs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs(Streamed):
    """As `Streamed`: columns are input channels; a stage has a row of g, of some channels, for each group of places."""

    group: int
    """Neighbouring places of a row that a box serves."""
    rows: int

    mode = "pairs"
    named = (*Streamed.named, "group", "chunk", "pitch", "first", "lead", "slot", "slots_lane")

    @property
    def all_columns(self) -> int:
        return self.problem.in_channels

    @property
    def chunk(self) -> int:
        return self.rows * SPAN // (self.element * self.kernel[2])

    @property
    def stages_k(self) -> int:
        return super().stages_k * math.prod(self.kernel[:2])

    @property
    def slot(self) -> int:
        """Taps that one load of a lane has: two neighbours, where they lie at even places of shared memory."""
        p = self.problem
        return 1 if p.kernel[-1] % 2 or p.stride[-1] % 2 or p.padding[-1] % 2 else 2

    @property
    def slots_lane(self) -> int:
        """Neighbours along W, of the slots of a step of K."""
        return math.gcd(self.kernel[2] // self.slot, 32 // self.element // self.slot)

    @property
    def first(self) -> int:
        """The first element of a group's boxes, from its first place's, at whole 16 bytes."""
        unit = 16 // self.element
        return -self.problem.padding[-1] // unit * unit

    @property
    def lead(self) -> int:
        """Where a group's boxes have its first tap."""
        return -self.problem.padding[-1] - self.first

    @property
    def pitch(self) -> int:
        """A channel's elements in shared memory, whole 16 bytes."""
        return self._banks[0]

    @property
    def conflicts(self) -> int:
        """How often lanes that load together meet a bank, at most."""
        return self._banks[1]

    @derived
    def _banks(self) -> tuple[int, int]:
        p, unit = self.problem, 16 // self.element
        need = self.lead + (self.group - 1) * p.stride[-1] + p.kernel[-1]
        least = -(-need // unit) * unit
        pitches = range(least, least + 128 // self.element, unit)
        return _fewest_conflicts(self.element, pitches, self.slot, self.slots_lane, p.stride[-1], self.lead)

    @property
    def box(self) -> Five:
        return self.pitch, 1, 1, self.chunk, 1

    @property
    def box_bytes(self) -> int:
        return self.chunk * self.pitch * self.element

    @property
    def boxes(self) -> int:
        """One for each group of places."""
        return _PLACES // self.group

    @property
    def packed_as(self) -> tuple[Any, ...]:
        return self.columns, self.chunk, self.slot, self.slots_lane, self.problem.precision

    def faults(self) -> Iterator[str]:
        if self.chunk * self.kernel[2] * self.element != self.rows * SPAN:
            yield f"{self.rows} rows of weights are no whole channels of {self.kernel[2]} taps"
        if max(self.box) > MAX_BOX:
            yield f"{self.group} places have {self.pitch} elements of a row, more than a box"

    def constants(self) -> dict[str, jit.Constant]:
        """The kernel's, see kernels/pixels_pairs.cuh."""
        p = self.problem
        axes = of_axes("kernel", self.kernel) | of_axes("step", self.strides)
        axes |= of_axes("pad", triple(p.padding, 0)) | of_axes("dilation", triple(p.dilation))
        return super().constants() | axes

    def all_groups(self, p: Problem) -> tuple[int, int]:
        """Groups of a row of the gradient, and in all."""
        of_row = -(-p.size[-1] // self.group)
        return of_row, p.batch * math.prod(p.size[:-1]) * of_row

    def tiles(self, p: Problem) -> int:
        return -(-self.all_groups(p)[1] // self.boxes) * self.blocks

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        return *triple(p.size), *self.all_groups(p), 0, self.tiles(p)

    def work(self, p: Problem, gpu: Gpu) -> Work:
        loads = 8 if self.element == 2 and self.slot == 1 else 4  # of a fragment, whose lanes have 128 bytes each time
        row = -(-(self.pitch * self.element + self.first * self.element % 128) // 128)
        loaded, stored = 4 * loads * self.conflicts * 128, _PLACES * self.columns / 8 * _STORE
        return self.work_of(p, gpu, self.chunk * row, loaded, stored)


@lru_cache(maxsize=256)
def _fewest_conflicts(
    element: int, pitches: range, slot: int, slots_lane: int, stride: int, lead: int
) -> tuple[int, int]:
    """The smallest pitch of channels with which a warp's lanes meet banks seldom, and how often they meet one then."""
    found = []
    wide = element == 4 and slot == 2  # 64 bits, which half a warp loads at a time
    for pitch in pitches:
        words = set()
        for lane in range(16 if wide else 32):
            row, index = lane // 4, lane % 4 * (2 if element == 2 and slot == 1 else 1)
            at = index // slots_lane * pitch + index % slots_lane * slot + row * stride + lead
            words |= {at, at + 1} if wide else {at * element // 4}
        banks = [word % 32 for word in words]
        found.append((max(banks.count(bank) for bank in banks), pitch))
    conflicts, pitch = min(found)
    return pitch, conflicts


def _pairs_refusal(p: Problem, gpu: Gpu) -> str | None:
    if refused := tile.refusal(p, gpu):
        return refused
    if p.dilation[-1] > 1:
        return "the kernel is for layers without a dilation along the width"
    if p.stride[-1] == 1:
        return "the kernel is for strides along the width"
    if p.out_size[-1] * p.dtype.itemsize % 16:
        return "rows begin at places off 16 bytes, where no box does"
    if max(math.prod(p.size) + 2**12, math.prod(p.weight_shape) * 16, p.batch) >= MOST_COUNTED:
        return "the kernel counts a channel's places, and packed weights, in 32 bits"
    return None


@lru_cache(maxsize=256)
def _pairs_tiles(layer: Problem, gpu: Gpu) -> tuple[Pairs, ...]:
    """A layer's tiles for all sizes."""
    few = layer.in_channels <= _PAIRS_COLUMNS[-1]
    columns = [n for n in _PAIRS_COLUMNS if few or n < 2 * layer.in_channels]
    return fitted((Pairs(layer, *shape) for shape in product(columns, _GROUPS, _ROWS)), gpu)


SUBPIXEL = Chooser(
    TileChoice,
    _subpixel_refusal,
    lambda p, gpu: _subpixel_tiles(any_size(p), gpu),
    none="there are more tiles than the kernel counts in 32 bits",
)
PAIRS = Chooser(
    TileChoice,
    _pairs_refusal,
    lambda p, gpu: _pairs_tiles(any_size(p), gpu),
    none="no tile fits a row of such strides, or the tiles are too many",
)
