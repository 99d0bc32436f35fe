"""Gradients for the input of layers with strides along W, NCHW, from gradients as they lie. wgmma only.

Such a gradient is a convolution with strides. `gather` makes its places columns of N, for which float32 ones must be
turned in shared memory, whose traffic bounds it. Here they are rows of M, which lanes read as they lie, two
neighbouring taps at a time (``kernels/pixels_pairs.cuh``); columns are input channels, and K has each channel of the
output once for every tap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from upconv.cuda.axes import any_size
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import dense
from upconv.cuda.cost import Cost, Work, cost
from upconv.cuda.gpu import MAX_BOX, Gpu
from upconv.cuda.launches import Map
from upconv.cuda.pixels import tile
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.choosing import Chooser, countable
from upconv.cuda.pixels.tile import MOST_COUNTED, SPAN, fitted, of_axes, triple
from upconv.cuda.pixels.tile import Tile as Base
from upconv.derived import derived
from upconv.problem import Problem

_COLUMNS = (256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 104, 96, 88, 80, 64, 48, 32)
"""Many, since such a layer has so few places that a GPU's last wave of tiles is often half empty."""
_GROUPS = (64, 32, 16, 8)
_MOST_GROUPS = 32  # the producer's lanes bring one each
_MOST_ROWS = 4  # of a stage's weights
_MOST_REGISTERS = 184  # of a consumer's thread for sums and fragments
_STORE = 1.3  # clocks of a consumer for 8 neighbouring results


@dataclass(frozen=True)
class Tile(Base):
    """As `Base`; a stage has a row of g, of some channels, for each group, and its weights."""

    columns: int
    """Of a tile: input channels."""
    mb: int
    """Subtiles of 64 places that a consumer accumulates."""
    group: int
    """Neighbouring places of a row that a box serves."""
    rows: int
    """Of a stage's weights: 128 bytes of K each."""
    line: int = 0
    """Elements of 128 bytes, where boxes are of whole ones (1-D); 0: boxes are of the row's elements."""

    @property
    def chunk(self) -> int:
        """Of g in a stage."""
        return self.rows * SPAN // (self.element * self.kernel[2])

    @property
    def chunks(self) -> int:
        return -(-self.problem.out_channels // self.chunk)

    @property
    def even(self) -> bool:
        """Whether two neighbouring taps lie at even places of shared memory, where one load has both."""
        p = self.problem
        return not (p.kernel[-1] % 2 or p.stride[-1] % 2 or p.padding[-1] % 2)

    @property
    def slot(self) -> int:
        """Neighbouring taps that a lane has together: in 16 bits those of a register, whose loads may be two."""
        return 2 if self.even or (self.element == 2 and self.kernel[2] % 2 == 0) else 1

    @property
    def slots(self) -> int:
        """Of a step of K."""
        return 32 // self.element // self.slot

    @property
    def slots_lane(self) -> int:
        """Of those, neighbours along W."""
        return math.gcd(self.kernel[2] // self.slot, self.slots)

    @property
    def unit(self) -> int:
        """Elements at multiples of which boxes begin: 16 bytes, or lines."""
        return self.line or 16 // self.element

    @property
    def first(self) -> int:
        """The first element of a group's boxes, from its first place's, at whole units."""
        return -self.problem.padding[-1] // self.unit * self.unit

    @property
    def lead(self) -> int:
        """Where a group's boxes have its first tap."""
        return -self.problem.padding[-1] - self.first

    @property
    def pitch(self) -> int:
        """A channel's elements in shared memory, whole units."""
        return self._banks[0]

    @property
    def conflicts(self) -> int:
        """How often lanes that load together meet a bank, at most."""
        return self._banks[1]

    @derived
    def _banks(self) -> tuple[int, int]:
        p = self.problem
        need = self.lead + (self.group - 1) * p.stride[-1] + p.kernel[-1]
        least = -(-need // self.unit) * self.unit
        most = least if self.line else least + 128 // self.element - self.unit
        lanes = self.slot, self.slots_lane, p.stride[-1], self.lead
        return _fewest_conflicts(self.element, least, most + 1, self.unit, *lanes)

    @property
    def box(self) -> tuple[int, int, int, int, int]:
        """A group's, of the copy engine: W, H, D, channels, images."""
        w, h = (self.line, self.pitch // self.line) if self.line else (self.pitch, 1)
        return w, h, 1, self.chunk, 1

    @property
    def places(self) -> int:
        """Of a tile."""
        return 2 * 64 * self.mb

    @property
    def groups(self) -> int:
        """Of a tile."""
        return self.places // self.group

    @property
    def blocks(self) -> int:
        """Tiles along the columns."""
        return -(-self.problem.in_channels // self.columns)

    @property
    def stages_k(self) -> int:
        """That a tile takes."""
        return self.chunks * math.prod(self.kernel[:2])

    @property
    def packed_words(self) -> int:
        return self.blocks * self.stages_k * self.weight_bytes // 4

    @property
    def box_bytes(self) -> int:
        return math.prod(self.box) * self.element

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return self.rows * self.columns * SPAN

    @property
    def box_lines(self) -> int:
        """128 bytes of rows that a box touches."""
        row = 1 if self.line else -(-(self.pitch * self.element + self.first * self.element % 128) // 128)
        return math.prod(self.box[1:]) * row

    @property
    def stage_bytes(self) -> int:
        pixels = self.groups * (-(-self.box_bytes // 128) * 128)  # boxes begin at whole 128 bytes
        return -(-pixels // 1024) * 1024 + self.weight_bytes

    def faults(self) -> Iterator[str]:
        if self.chunk * self.kernel[2] * self.element != self.rows * SPAN:
            yield f"{self.rows} rows of weights are no whole channels of {self.kernel[2]} taps"
        if max(self.box) > MAX_BOX:
            yield f"{self.group} places have {self.pitch} elements of a row, more than a box"
        if self.line and self.group * self.strides[2] % self.line:
            yield f"{self.group} places are no whole lines"
        if self.groups > _MOST_GROUPS:
            yield f"{self.groups} groups are more than a warp's lanes"
        if self.mb * (self.columns // 2 + 16) > _MOST_REGISTERS:
            yield f"{self.mb} x 64 x {self.columns} sums are more than registers hold"

    def constants(self) -> dict[str, jit.Constant]:
        """The kernel's, see kernels/pixels_pairs.cuh."""
        p = self.problem
        own: dict[str, jit.Constant] = {
            "columns": self.columns,
            "mb": self.mb,
            "group": self.group,
            "chunk": self.chunk,
            "pitch": self.pitch,
            "line": self.line,
            "first": self.first,
            "lead": self.lead,
            "slot": self.slot,
            "slots_lane": self.slots_lane,
            "together": self.even,
        }
        axes = {
            "kernel": self.kernel,
            "step": self.strides,
            "pad": triple(p.padding, 0),
            "dilation": triple(p.dilation),
        }
        return (
            super().constants()
            | own
            | {key: of for name, values in axes.items() for key, of in of_axes(name, values).items()}
        )

    # --- sizes, which are run-time arguments -------------------------------------------------------------------------

    def serves(self, p: Problem) -> bool:
        """Whether rows of g, of a problem of this layer, are whole lines, if boxes are of these."""
        return not self.line or p.out_size[-1] % self.line == 0

    def groups_w(self, p: Problem) -> int:
        """Groups of a row of the gradient of a problem of this layer."""
        return -(-p.size[-1] // self.group)

    def all_groups(self, p: Problem) -> int:
        return p.batch * math.prod(p.size[:-1]) * self.groups_w(p)

    def tiles(self, p: Problem) -> int:
        """Of a problem of this layer."""
        return -(-self.all_groups(p) // self.groups) * self.blocks

    def arguments(self, p: Problem) -> tuple[int, ...]:
        """The kernel's integer arguments behind its pointers."""
        return *triple(p.size), self.groups_w(p), self.all_groups(p), 0, self.tiles(p)


@lru_cache(maxsize=256)
def _fewest_conflicts(
    element: int, least: int, end: int, unit: int, slot: int, slots_lane: int, stride: int, lead: int
) -> tuple[int, int]:
    """The smallest pitch of channels with which a warp's lanes meet banks seldom, and how often they meet one then."""
    found = []
    wide = element == 4 and slot == 2  # 64 bits, which half a warp loads at a time
    for pitch in range(least, end, unit):
        words = set()
        for lane in range(16 if wide else 32):
            row, index = lane // 4, lane % 4 * (2 if element == 2 and slot == 1 else 1)
            at = index // slots_lane * pitch + index % slots_lane * slot + row * stride + lead
            words |= {at, at + 1} if wide else {at * element // 4}
        banks = [word % 32 for word in words]
        found.append((max(banks.count(bank) for bank in banks), pitch))
    conflicts, pitch = min(found)
    return pitch, conflicts


class Choice(TileChoice[Tile]):
    """A tile for a problem on a GPU, and what the model thinks of it."""

    mode = "pairs"

    @property
    def summary(self) -> str:
        t = self.tile
        return (
            f"pixels as rows, taps in pairs: wgmma {t.problem.precision}, tile of {t.groups} x {t.group} places x "
            f"{t.columns} columns, {t.stages} stages of {t.chunk} channels, {t.shared_bytes // 1024} KB shared, "
            f"grid {self.grid}"
        )

    @property
    def packed_as(self) -> tuple[Any, ...]:
        t = self.tile
        return t.columns, t.chunk, t.slot, t.slots_lane, self.problem.precision

    @property
    def source_map(self) -> Map:
        return source_map(self.tile, self.problem)


def source_map(t: Tile, p: Problem) -> Map:
    """A ``CUtensorMap`` over g with a group's box. float32 is rounded to TF32 on its way."""
    d, h, w = triple(p.out_size)
    if t.line:
        h, w = w // t.line, t.line
    tensor = dense((w, h, d, p.out_channels, p.batch), t.element)
    return Map("source", tensor, p.dtype, t.box, (1,) * 5, rounded=p.precision == "tf32")


# --- candidates ------------------------------------------------------------------------------------------------------


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why these kernels cannot serve a problem, in a sentence; None when they may."""
    if refused := tile.refusal(p, gpu):
        return refused
    if p.pass_ != "grad-input" or p.layout != "nchw":
        return "taps in pairs are for gradients for the input in NCHW"
    if p.groups > 1 or p.dilation[-1] > 1:
        return "the kernel is for layers without groups, or a dilation along the width"
    if p.stride[-1] == 1:
        return "the kernel is for strides along the width"
    if p.out_size[-1] * p.dtype.itemsize % 16:
        return "rows begin at places off 16 bytes, where no box does"
    if max(math.prod(p.size) + 2**12, math.prod(p.weight_shape) * 16, p.batch) >= MOST_COUNTED:
        return "the kernel counts a channel's places, and packed weights, in 32 bits"
    return None


def candidates(p: Problem, gpu: Gpu) -> Iterator[Tile]:
    """Every tile worth a look for a layer."""
    return iter(_candidates(any_size(p), gpu))


@lru_cache(maxsize=256)
def _candidates(layer: Problem, gpu: Gpu) -> tuple[Tile, ...]:
    """A layer's tiles for all sizes."""
    lines = (0, SPAN // layer.dtype.itemsize) if layer.rank == 1 else (0,)
    shapes = product(_COLUMNS, (1, 2, 4), _GROUPS, range(1, _MOST_ROWS + 1), lines)
    few = layer.in_channels <= _COLUMNS[-1]
    return fitted((Tile(layer, *shape) for shape in shapes if few or shape[0] < 2 * layer.in_channels), gpu)


# --- the cost model --------------------------------------------------------------------------------------------------


def estimate(t: Tile, p: Problem, gpu: Gpu) -> Cost:
    """What a problem takes by a tile."""
    instructions = 2 * t.mb * 4 * t.rows * t.stages_k
    loads = 8 if t.element == 2 and not t.even else 4  # of a fragment, whose lanes have 128 bytes each time
    copied = (t.groups * t.box_bytes + t.weight_bytes) * t.stages_k
    return cost(
        Work(
            instructions,
            instructions * t.columns,
            waves=-(-t.tiles(p) // gpu.multiprocessors),
            moved=(math.prod(p.input_shape) + math.prod(p.output_shape)) * t.element,
            steps=t.stages_k,
            stages=t.stages,
            lines=t.stages_k * t.groups * t.box_lines,
            boxes=t.stages_k * t.groups,
            shared=instructions * t.columns * 32 + copied,
            fragments=instructions * 4 * loads * t.conflicts * 128,
            stored=t.places * t.columns / 8 * _STORE,
        ),
        gpu,
    )


choose = Chooser(
    refusal,
    countable(lambda p, gpu: (t for t in candidates(p, gpu) if t.serves(p))),
    estimate,
    Choice,
    none="no tile fits a row of such strides, or the tiles are too many",
)
"""The cheapest tile by the model, or the sentence why there is none."""
candidate = choose.candidate
