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
from upconv.cuda.compile.boxes import Five
from upconv.cuda.cost import Work
from upconv.cuda.gpu import MAX_BOX, Gpu
from upconv.cuda.pixels import tile
from upconv.cuda.pixels.choice import Chooser, TileChoice
from upconv.cuda.pixels.streamed import SUBTILES, Streamed
from upconv.cuda.pixels.tile import MOST_COUNTED, SPAN, fitted, of_axes, triple
from upconv.derived import derived
from upconv.problem import Problem

_COLUMNS = (256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 104, 96, 88, 80, 64, 48, 32)
"""Many, since such a layer has so few places that a GPU's last wave of tiles is often half empty."""
_GROUPS = (64, 32, 16, 8)
_MOST_GROUPS = 32  # the producer's lanes bring one each
_ROWS = 1, 2, 3
_STORE = 1.3  # clocks of a consumer for 8 neighbouring results


@dataclass(frozen=True)
class Tile(Streamed):
    """As `Streamed`: columns are input channels; a stage has a row of g, of some channels, for each group of places."""

    group: int
    """Neighbouring places of a row that a box serves."""
    rows: int
    """Of a stage's weights."""

    mode = "pairs"

    @property
    def all_columns(self) -> int:
        return self.problem.in_channels

    @property
    def chunk(self) -> int:
        """Channels of g in a stage."""
        return self.rows * SPAN // (self.element * self.kernel[2])

    @property
    def stages_k(self) -> int:
        return -(-self.problem.out_channels // self.chunk) * math.prod(self.kernel[:2])

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
    def groups(self) -> int:
        """Of a tile."""
        return self.places // self.group

    @property
    def stage_bytes(self) -> int:
        pixels = self.groups * (-(-self.box_bytes // 128) * 128)  # boxes begin at whole 128 bytes
        return -(-pixels // 1024) * 1024 + self.weight_bytes

    @property
    def packed_as(self) -> tuple[Any, ...]:
        return self.columns, self.chunk, self.slot, self.slots_lane, self.problem.precision

    def faults(self) -> Iterator[str]:
        if self.chunk * self.kernel[2] * self.element != self.rows * SPAN:
            yield f"{self.rows} rows of weights are no whole channels of {self.kernel[2]} taps"
        if max(self.box) > MAX_BOX:
            yield f"{self.group} places have {self.pitch} elements of a row, more than a box"
        if self.groups > _MOST_GROUPS:
            yield f"{self.groups} groups are more than a warp's lanes"
        yield from super().faults()

    def constants(self) -> dict[str, jit.Constant]:
        """The kernel's, see kernels/pixels_pairs.cuh."""
        p = self.problem
        names = "columns", "mb", "group", "chunk", "pitch", "first", "lead", "slot", "slots_lane"
        axes = of_axes("kernel", self.kernel) | of_axes("step", self.strides)
        axes |= of_axes("pad", triple(p.padding, 0)) | of_axes("dilation", triple(p.dilation))
        return super().constants() | {name: getattr(self, name) for name in names} | axes

    # --- a size ------------------------------------------------------------------------------------------------------

    def all_groups(self, p: Problem) -> tuple[int, int]:
        """Groups of a row of the gradient, and in all."""
        of_row = -(-p.size[-1] // self.group)
        return of_row, p.batch * math.prod(p.size[:-1]) * of_row

    def tiles(self, p: Problem) -> int:
        return -(-self.all_groups(p)[1] // self.groups) * self.blocks

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        return *triple(p.size), *self.all_groups(p), 0, self.tiles(p)

    def work(self, p: Problem, gpu: Gpu) -> Work:
        loads = 8 if self.element == 2 and self.slot == 1 else 4  # of a fragment, whose lanes have 128 bytes each time
        row = -(-(self.pitch * self.element + self.first * self.element % 128) // 128)
        boxes, stored = self.groups, self.places * self.columns / 8 * _STORE
        return self.work_of(p, gpu, boxes, self.box_bytes, self.chunk * row, 4 * loads * self.conflicts * 128, stored)

    def summary(self, p: Problem, gpu: Gpu) -> str:
        return (
            f"pixels as rows, taps in pairs: wgmma {p.precision}, tile of {self.groups} x {self.group} places x "
            f"{self.columns} columns, {self.stages} stages of {self.chunk} channels"
        )


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


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why these kernels cannot serve a problem, in a sentence; None when they may."""
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


def candidates(p: Problem, gpu: Gpu) -> tuple[Tile, ...]:
    """Every tile worth a look for a layer."""
    return _candidates(any_size(p), gpu)


@lru_cache(maxsize=256)
def _candidates(layer: Problem, gpu: Gpu) -> tuple[Tile, ...]:
    """A layer's tiles for all sizes."""
    few = layer.in_channels <= _COLUMNS[-1]
    columns = [n for n in _COLUMNS if few or n < 2 * layer.in_channels]
    return fitted((Tile(layer, *shape) for shape in product(columns, SUBTILES, _GROUPS, _ROWS)), gpu)


choose = Chooser(TileChoice, refusal, candidates, none="no tile fits a row of such strides, or the tiles are too many")
"""The cheapest tile by the model, or the sentence why there is none."""
candidate = choose.candidate
