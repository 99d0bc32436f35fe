"""Layers without a stride in NCHW, whose rows are joined to one: forwards, and gradients for the input. wgmma only.

Without padding along W such a layer's rows of results are longer than the source's by as much as a kernel reaches, so
that tiles which are rectangles end amid empty columns, and rows begin anywhere. But zeros behind each row of the source
make one row of a slice, in which a tap is a shift (``kernels/joined.cu``): tiles are neighbouring results of whatever
rows, all useful, and a channel's are neighbours in memory, in whole sectors. What it costs is the halo of whole rows,
so that it is for narrow images, as 3-D ones are. A 1-D layer has one row anyway, which may be padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from upconv.cuda import family
from upconv.cuda.axes import Unfit, result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Five, dense
from upconv.cuda.cost import Work
from upconv.cuda.gpu import MAX_BOX, Gpu
from upconv.cuda.launches import Map
from upconv.cuda.pixels.choice import TileChoice, cheapest
from upconv.cuda.pixels.tile import MOST_COUNTED, PRECISIONS, moved, triple
from upconv.cuda.pixels.tile import Tile as Base
from upconv.cuda.rearrange import batches
from upconv.problem import Problem

_PLACES = (256, 248, 240, 232, 224, 208, 192, 160, 128)
"""Of a tile; several, since a slice's are divided among whole tiles."""
_ROWS_M = 64  # channels of the result of a matrix instruction
_ROW_BYTES = 32  # of a place in shared memory: a chunk of channels
_TAP_BYTES = _ROWS_M * _ROW_BYTES  # of weights
_MOST_TAPS = 64  # of a slice, all of which are straight code
_MOST_TAPS_OF_STAGE = 6
_MOST_WEIGHT_STAGES = 8
_BUFFERS = {4: 8 * 8 * (512 + 32), 2: 8 * 8 * (512 + 16)}  # bytes of what leaves, of 8 warps, by those of an element
_RINGS = (4, 6), (4, 4), (3, 2), (2, 2)
"""Stages and slots: the first whose memory leaves three stages of weights."""
_MOST_COLUMNS = 256  # of rows that are joined
_SPAN = 64  # columns of a box in 16 bits
_WIDTHS = 16  # kernels are for rows of up to a multiple of so many columns
_STORE = 0.41  # clocks for 32 bytes of stores
_TURNED = 264  # places whose transposition counts as a chunk's and a pixel's
_OFF_SECTORS, _SECTOR = 1.2, 32  # what lines of results cost that do not begin in whole sectors


@dataclass(frozen=True)
class Tile(Base):
    """As `Base`, whose stages are of the ring of pixels and have a chunk of one slice."""

    width: int
    """Columns of the source, up to a multiple of 16 which this is; 0 for 1-D, where a tile reads its part of any."""
    places: int = 256
    """Of a tile: neighbouring results."""
    slots: int = 2
    """Of the ring of rows as they lie, likewise."""
    weight_stages: int = 2
    """Of the ring of weights."""

    family = mode = file = "joined"
    biased = True

    @property
    def struct(self) -> str:
        return f"Joined<{jit.CONFIG}>"

    @property
    def instance(self) -> str:
        return f"joined<{jit.CONFIG}>"

    @property
    def line(self) -> bool:
        """Whether there is one row."""
        return self.problem.rank == 1

    @property
    def chunk(self) -> int:
        """Source channels of a chunk."""
        return _ROW_BYTES // self.element

    @property
    def chunks(self) -> int:
        return -(-self.channels[0] // self.chunk)

    @property
    def blocks(self) -> int:
        """Tiles along the result's channels."""
        return -(-self.channels[1] // _ROWS_M)

    @property
    def dilation(self) -> tuple[int, int, int]:
        """Along D, H, W."""
        return triple(self.problem.dilation)

    @property
    def taps(self) -> int:
        """Of a slice."""
        return self.kernel[1] * self.kernel[2]

    @property
    def taps_of_stage(self) -> int:
        """Of weights: as many as leave the fewest stages, evenly."""
        stages = -(-self.taps // _MOST_TAPS_OF_STAGE)
        return -(-self.taps // stages)

    def halo(self, pitch: int) -> int:
        """Places ahead of a tile that its taps reach, where rows of results are so long."""
        (_, kh, kw), (_, dh, dw) = self.kernel, self.dilation
        return (kh - 1) * dh * pitch + (kw - 1) * dw

    @property
    def source_columns(self) -> tuple[int, int]:
        """Of the source's rows, at least and at most, that the tile serves; for 1-D it is any number."""
        return max(self.width - _WIDTHS + 1, 16 // self.element), self.width

    @property
    def pitches(self) -> range:
        """Lengths of rows of results that the tile serves; of 1-D layers one for all."""
        if self.line:
            return range(1)
        (least, most), longer = self.source_columns, gap(self.problem)
        return range(least + longer, most + longer + 1)

    @property
    def span(self) -> int:
        """Rows of channels of a stage: the places of a tile with its halo."""
        return -(-(self.places + self.halo(self.pitches[-1])) // 8) * 8

    @property
    def rows(self) -> int:
        """Of the source, of a slot: as many as a tile with its halo may touch."""
        return 1 if self.line else max(_rows(self, p) for p in self.pitches)

    @property
    def boxes(self) -> int:
        """Of a slot, side by side."""
        return self.columns // _SPAN if self.element == 2 else -(-self.columns // MAX_BOX)

    @property
    def columns(self) -> int:
        """Of a slot: in 16 bits whole boxes of 128 bytes, which are swizzled. That of a line begins at 16 bytes."""
        most = self.places + self.halo(0) + 16 // self.element - 1 if self.line else self.width
        unit = _SPAN if self.element == 2 else _WIDTHS * -(-most // MAX_BOX)
        return -(-most // unit) * unit

    @property
    def box(self) -> Five:
        """Of a slot, as the copy engine takes it: W, H, D, channels, images; in 16 bits W, channels, H, D, images."""
        if self.element == 4:
            return self.columns // self.boxes, self.rows, 1, self.chunk, 1
        return _SPAN, self.chunk, self.rows, 1, 1

    @property
    def packed_as(self) -> tuple[Any, ...]:
        return self.problem.pass_, self.problem.precision

    @property
    def packed_words(self) -> int:
        """32-bit words of the packed weights."""
        return self.blocks * self.chunks * self.kernel[0] * self.taps * _TAP_BYTES // 4

    @property
    def stage_bytes(self) -> int:
        return self.span * _ROW_BYTES

    @property
    def warps_of_stage(self) -> int:
        """Of two, that turn a stage together: of few slots both."""
        return 2 if self.slots < 4 else 1

    @property
    def slot_bytes(self) -> int:
        return self.rows * _ROW_BYTES * self.columns

    @property
    def weight_bytes(self) -> int:
        """Of a stage of weights."""
        return self.taps_of_stage * _TAP_BYTES

    @property
    def shared_bytes(self) -> int:
        rings = self.stages * (self.stage_bytes + 16) + self.weight_stages * (self.weight_bytes + 16)
        return rings + self.slots * (self.slot_bytes + 16) + _BUFFERS[self.element] + 32

    def checked(self, shared_limit: int) -> Tile:
        """This, when the kernel can run it."""
        if (self.slots % 2 or self.stages % 2) and self.warps_of_stage == 1:
            raise Unfit("two warps that turn every second stage need even numbers of stages and slots")
        if min(self.stages, self.slots, self.weight_stages) < 2:
            raise Unfit("a ring needs a stage to fill and one to read")
        if self.rows > MAX_BOX:
            raise Unfit(f"a box of {self.rows} rows is more than the copy engine has")
        if self.shared_bytes > shared_limit:
            raise Unfit(f"the tile takes {self.shared_bytes} bytes of shared memory, the device has {shared_limit}")
        return self

    def constants(self) -> dict[str, jit.Constant]:
        """The kernel's, see kernels/joined.cu."""
        p = self.problem
        found: dict[str, jit.Constant] = {
            "precision": PRECISIONS[p.precision],
            "cin": self.channels[0],
            "cout": self.channels[1],
            "flipped": p.pass_ == "grad-input",
            "line": self.line,
            "places": self.places,
            "span": self.span,
            "rows": self.rows,
            "box_w": self.columns,
            "boxes": self.boxes,
            "stages": self.stages,
            "slots": self.slots,
            "weight_stages": self.weight_stages,
            "warps_of_stage": self.warps_of_stage,
            "taps_of_stage": self.taps_of_stage,
            "shared_bytes": self.shared_bytes,
        }
        paddings = (0,) * (3 - p.rank) + ahead(p)
        for name, kernel, dilation, padding in zip("dhw", self.kernel, self.dilation, paddings):
            found |= {f"kernel_{name}": kernel, f"dilation_{name}": dilation, f"padding_{name}": padding}
        return found

    # --- sizes, which are run-time arguments -------------------------------------------------------------------------

    def tiles(self, p: Problem) -> int:
        """Of a problem of this layer."""
        return p.batch * slices(p)[1] * -(-plane(p) // self.places) * self.blocks

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        return *slices(p), result_shape(p)[-1], plane(p), -(-plane(p) // self.places), self.tiles(p)

    def source_map(self, p: Problem) -> Map:
        """Over the source with a slot's box. float32 is rounded to TF32 on its way."""
        if self.element == 4:
            return super().source_map(p)
        channels, *size = source_shape(p)[1:]
        d, h, w = (1,) * (3 - p.rank) + tuple(size)
        tensor = dense((w, h, d, channels, p.batch), self.element).channels_second()
        return Map("source", tensor, p.dtype, self.box, (1,) * 5, 128)

    def work(self, p: Problem, gpu: Gpu) -> Work:
        pitch, stages = result_shape(p)[-1], self.chunks * self.kernel[0]
        span = self.places + self.halo(pitch)
        arriving = (1 if self.line else _rows(self, pitch)) * self.columns
        turned = 2 * (arriving if self.element == 2 else span)  # read, and written
        warps = 1 if self.line else self.warps_of_stage
        off_sectors = self.line and plane(p) * self.element % _SECTOR > 0
        return Work(
            stages * self.taps,
            stages * self.taps * self.places,
            waves=-(-self.tiles(p) // gpu.multiprocessors),
            moved=moved(p, written=_OFF_SECTORS if off_sectors else 1.0),
            steps=stages,
            stages=self.stages,
            # What instructions read, weights as they come, and pixels.
            shared=stages
            * (self.taps * (self.places * _ROW_BYTES + 2 * _TAP_BYTES) + (arriving + turned) * _ROW_BYTES),
            chunks_turned=stages * warps,
            turned=stages * warps * span / _TURNED,
            stored=_ROWS_M * self.places * self.element / 32 * _STORE,
            in_turn=True,
        )

    def summary(self, p: Problem, gpu: Gpu) -> str:
        return (
            f"rows joined to one: wgmma {p.precision}, tile of {self.places} places x {_ROWS_M} channels, "
            f"{self.stages} stages of {self.span} places x {self.chunk} channels, {self.slots} of {self.rows} x "
            f"{self.columns} pixels, {self.weight_stages} of {self.taps_of_stage} taps"
        )


def slices(p: Problem) -> tuple[int, int]:
    """The source's and the result's."""
    return (source_shape(p)[2], result_shape(p)[2]) if p.rank == 3 else (1, 1)


def plane(p: Problem) -> int:
    """Results of a slice."""
    return math.prod(result_shape(p)[2:][-2:])


def gap(p: Problem) -> int:
    """Columns by which a row of results is longer than one of the source."""
    return result_shape(p)[-1] - source_shape(p)[-1]


def ahead(p: Problem) -> tuple[int, ...]:
    """Of each axis the source's position that a result at 0 has of the first tap: the forward's padding."""
    if p.pass_ == "fwd":
        return p.padding
    return tuple((k - 1) * d - padding for k, d, padding in zip(p.kernel, p.dilation, p.padding))


def _rows(t: Tile, pitch: int) -> int:
    """That a tile with its halo may touch, where they are so long: it begins in a row's last place at worst."""
    return (pitch + t.places + t.halo(pitch) - 2) // pitch + 1


class Choice(TileChoice):
    """A tile for a problem on a GPU, and what the model thinks of it."""


# --- candidates ------------------------------------------------------------------------------------------------------


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why these kernels cannot serve a problem, in a sentence; None when they may."""
    if gpu.arch != "90a":
        return "joined rows are multiplied by wgmma alone"
    if p.pass_ not in ("fwd", "grad-input") or p.layout != "nchw":
        return "rows are joined for forwards and gradients for the input in NCHW"
    if p.precision not in PRECISIONS:
        return f"precision {p.precision} is none of the kernel's"
    if max(p.stride) > 1 or p.groups > 1:
        return "rows are joined without strides or groups"
    width, reach = source_shape(p)[-1], (p.kernel[-1] - 1) * p.dilation[-1]
    if 0 in source_shape(p) + result_shape(p):
        return "there is nothing to sum"
    if max(p.kernel[-2:]) == 1:
        return "slices of one tap have no halo, and tiles of any shape"
    if p.rank > 1:
        if ahead(p)[-1] or gap(p) < reach:
            return "between joined rows are zeros, which padding takes away"
        if min(ahead(p)) < 0:
            return "more padding than a kernel reaches is for 1-D layers"
        if width > _MOST_COLUMNS:
            return f"rows of {width} columns are too long to be joined: a tile's halo is whole rows"
    if math.prod(p.kernel[-2:]) > _MOST_TAPS:
        return f"the kernel has straight code for {_MOST_TAPS} taps of a slice at most"
    if width * p.dtype.itemsize % 16:
        return f"rows of {width} columns begin off 16 bytes, where no box does"
    if plane(p) % 2:
        return "slices of the result of an odd number begin off pairs, which the kernel stores together"
    if max(math.prod(result_shape(p)[2:]) + 2**12, math.prod(p.weight_shape) * 4, p.batch) >= MOST_COUNTED:
        return "the kernel counts a channel's results, and packed weights, in 32 bits"
    return None


def candidates(p: Problem, gpu: Gpu) -> Iterator[Tile]:
    """Every tile worth a look for a layer on images of this width."""
    width = 0 if p.rank == 1 else -(-source_shape(p)[-1] // _WIDTHS) * _WIDTHS
    size = [1024 + 2 * padding for padding in p.padding]  # whose results are some
    if width:
        size[-1] = p.size[-1] + width - source_shape(p)[-1]
    return iter(_candidates(p.with_(batch=1, size=tuple(size), bias=False), width, gpu))


@lru_cache(maxsize=256)
def _candidates(layer: Problem, width: int, gpu: Gpu) -> tuple[Tile, ...]:
    """A layer's tiles for all sizes of images whose source is so wide."""
    found = []
    for places in _PLACES:
        for stages, slots in _RINGS:
            t = Tile(layer, width, places, slots, stages=stages)
            room = gpu.shared_bytes - replace(t, weight_stages=0).shared_bytes
            weights = min(room // (t.weight_bytes + 16), _MOST_WEIGHT_STAGES)
            if weights >= 3 or (stages, slots) == _RINGS[-1]:
                with suppress(Unfit):
                    found.append(replace(t, weight_stages=weights).checked(gpu.shared_bytes))
                break
    return tuple(found)


@lru_cache(maxsize=4096)
def choose(p: Problem, gpu: Gpu) -> Choice | str:
    """The cheapest tile by the model, or the sentence why there is none."""
    if refused := refusal(p, gpu):
        return refused
    counted = (t for t in candidates(p, gpu) if t.packed_words * 4 < MOST_COUNTED)
    none = "no tile fits shared memory, or there are more than the kernel counts in 32 bits"
    return cheapest(Choice, counted, p, gpu) or none


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks."""
    if general:
        return "joined rows serve one class of lengths of rows, not every size"
    return batches.too_long(p) or choose(p, gpu)
