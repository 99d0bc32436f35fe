"""Forwards of 1-D layers whose kernel is several strides long, NCHW, from pixels as they lie. wgmma only.

These are the upsampling layers of vocoders and of codecs for audio, whose kernels are two strides long: every output
has as many taps. `gather` makes places of the input columns of N, for which float32 pixels must be turned in shared
memory, whose traffic is what bounds it for many channels. Here they are rows of M, which lanes read as they lie
(``kernels/strides.cu``); columns are phases of output channels, and K has each channel once for every tap, at a pixel
one further back (NOTES: HiFi-GAN's first layer in TF32 206 us by `gather`, here 167; in bfloat16 132 and 103).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from upconv.cuda.axes import Unfit, any_size
from upconv.cuda.boxes import Words, dense, encode
from upconv.cuda.choosing import Chooser
from upconv.cuda.columns import PRECISIONS, instruction
from upconv.cuda.costs import LAUNCH
from upconv.cuda.gpu import Gpu
from upconv.cuda.one_mapped import OneMappedChoice
from upconv.cuda.packs import PACK_THREADS
from upconv.problem import Problem

THREADS = 384
_COLUMNS = (256, 240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 80, 64, 32)
"""Many, since such a layer has so few places that a GPU's last wave of tiles is often half empty."""
_MOST_HALVES = 224  # of them in 16 bits, whose fragments take two loads a register: 240 spill
_MOST_TAPS = 4
_MOST_REGISTERS = 184  # of a consumer's thread for sums and fragments; with 192 it spills in its loop
_MOST_STAGES = 8
_MOST_BOX = 256
_SPAN = 128  # bytes of a row in shared memory: a column's channels, a channel's pixels
_MOST_COUNTED = 2**31  # places that the kernel counts in 32 bits
# The model's constants, of HiFi-GAN's first two layers by 30 and 6 tiles on an H200. By bytes of an element, of one
# subtile of places and of more: clocks of an instruction, times half its columns and beside; bytes a clock of stores,
# which nothing hides. And what each image of a box costs.
_INSTRUCTION = {4: ((1.0, 5.0), (1.0, 5.0)), 2: ((1.2, 7.0), (1.0, 31.0))}
_STORE = {4: (14.5, 20.0), 2: (12.4, 20.0)}
_IMAGE = {4: 0.005, 2: 0.015}
_SHARED, _L2 = 125.0, 54.0  # bytes a clock
_FRAGMENTS = 0.5  # of the bytes of A, which fill gaps
_TILE = 900.0  # clocks of a tile beside


@dataclass(frozen=True)
class Tile:
    """A tile's shape and the kernel's constants for one problem; everything but the sizes of input and batch.

    Raises, on `checked`:
        Unfit: the kernel cannot run it.
    """

    problem: Problem
    columns: int
    """Of a tile: output channels and phases."""
    mb: int
    """Subtiles of 64 places that a consumer accumulates."""
    images: int = 1
    """Of a consumer's places, as many of each."""
    stages: int = 2
    """Of the ring of pixels, whose stages have a chunk of them."""
    weight_stages: int = 2
    """Of the ring of weights, whose stages have a chunk of a tap's."""

    @property
    def element(self) -> int:
        return self.problem.dtype.itemsize

    @property
    def chunk(self) -> int:
        """Input channels of a chunk."""
        return _SPAN // self.element

    @property
    def chunks(self) -> int:
        return -(-self.problem.in_channels // self.chunk)

    @property
    def unit(self) -> int:
        """Places of a consumer."""
        return 64 * self.mb

    @property
    def taps(self) -> int:
        """Of an output: strides of the kernel."""
        return self.problem.kernel[-1] // self.problem.stride[-1]

    @property
    def first_place(self) -> int:
        """The first q that has an output, which is at ``q * stride - padding`` and on."""
        return self.problem.padding[-1] // self.problem.stride[-1]

    @property
    def lead(self) -> int:
        """Outputs of this q that lie ahead of the image."""
        return self.problem.padding[-1] % self.problem.stride[-1]

    @property
    def first(self) -> int:
        """The first pixel of a unit's boxes, from the unit's own, at whole 16 bytes."""
        vec = 16 // self.element
        return (self.first_place - (self.taps - 1)) // vec * vec

    @property
    def first_tap(self) -> int:
        """Where a unit's boxes have the pixel of its first tap."""
        return self.first_place - self.first

    @property
    def width(self) -> int:
        """Places that a unit has of one image."""
        return self.unit // self.images

    @property
    def pitch(self) -> int:
        """A channel's elements in shared memory: an odd number of 16 bytes, so that lanes meet other banks."""
        vec = 16 // self.element
        return ((self.width + self.first_tap + vec - 1) // vec // 2 * 2 + 1) * vec

    @property
    def box(self) -> tuple[int, int, int, int, int]:
        """A unit's, of the copy engine: pixels, channels, images."""
        return self.pitch, self.chunk, self.images, 1, 1

    @property
    def all_columns(self) -> int:
        """The layer's."""
        return self.problem.out_channels * self.problem.taps // self.taps

    @property
    def blocks(self) -> int:
        """Tiles along the columns."""
        return -(-self.all_columns // self.columns)

    @property
    def packed_words(self) -> int:
        """32-bit words of the packed weights."""
        return self.blocks * self.chunks * self.taps * self.columns * _SPAN // 4

    @property
    def pack_blocks(self) -> int:
        return -(-self.packed_words // 4 // PACK_THREADS)

    @property
    def pixel_bytes(self) -> int:
        """Of a stage of pixels, both consumers'."""
        return 2 * math.prod(self.box) * self.element

    @property
    def weight_bytes(self) -> int:
        """Of a stage of weights."""
        return self.columns * _SPAN

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.pixel_bytes + 16) + self.weight_stages * (self.weight_bytes + 16)

    def checked(self, shared_limit: int) -> Tile:
        """This, when the kernel can run it."""
        if self.width % 16 or self.pitch > _MOST_BOX:
            raise Unfit(f"{self.images} images of {self.unit} places are no whole 16 each, or more than a box has")
        if self.mb * (self.columns // 2 + 16) > _MOST_REGISTERS:
            raise Unfit(f"{self.mb} x 64 x {self.columns} sums are more than registers hold")
        if min(self.stages, self.weight_stages) < 2:
            raise Unfit("a stage is given back while the next is read")
        if self.shared_bytes > shared_limit:
            raise Unfit(f"the tile takes {self.shared_bytes} bytes of shared memory, the device has {shared_limit}")
        return self

    def macros(self) -> dict[str, int | float | str]:
        """The kernel's constants by macro name; see kernels/strides.cu."""
        p = self.problem
        found: dict[str, int | float | str] = {
            "PRECISION": PRECISIONS[p.precision],
            "ELEMENT": self.element,
            "ELEMENT_TYPE": "float" if self.element == 4 else "unsigned short",
            "CIN": p.in_channels,
            "COUT": p.out_channels,
            "COLUMNS": self.columns,
            "MB": self.mb,
            "STAGES": self.stages,
            "STAGES_W": self.weight_stages,
            "TAPS": self.taps,
            "LEAD": self.lead,
            "FIRST": f"({self.first})",
            "FIRST_TAP": self.first_tap,
            "IMAGES": self.images,
            "PITCH": self.pitch,
            "STEP_W": p.stride[-1],
            "SHARED_BYTES_PLANNED": self.shared_bytes,
        }
        return found | instruction("M_", self.columns, words_of_a=4)

    # --- sizes, which are run-time arguments -------------------------------------------------------------------------

    def places(self, p: Problem) -> int:
        """Rows of M that an image of a problem of this layer has: the q with an output."""
        return (p.out_size[0] - 1 + p.padding[0]) // p.stride[0] + 1 - self.first_place

    def units(self, p: Problem) -> int:
        """Consumers' shares of as many images as each has."""
        return -(-self.places(p) // self.width)

    def tiles(self, p: Problem) -> int:
        """Of a problem of this layer."""
        return -(-(-(-p.batch // self.images) * self.units(p)) // 2) * self.blocks

    def arguments(self, p: Problem) -> tuple[int, ...]:
        """The kernel's integer arguments behind its pointers."""
        return p.batch, p.out_size[0], self.places(p), self.units(p), self.tiles(p)


class Choice(OneMappedChoice[Tile]):
    """A tile for a problem on a GPU, and what the model thinks of it."""

    family = "strides"
    threads = THREADS
    # NOTES: of 7 timed layers one that the model has within the margin is faster here, by 14%, one slower.
    margin = 1.15

    @property
    def summary(self) -> str:
        t = self.tile
        return (
            f"pixels as rows, each output {t.taps} taps: wgmma {t.problem.precision}, "
            f"tile of {2 * t.images} x {t.width} places x {t.columns} columns, stages of {t.chunk} channels, "
            f"{t.stages} of pixels, {t.weight_stages} of weights, {t.shared_bytes // 1024} KB shared, grid {self.grid}"
        )

    @property
    def packing(self) -> tuple[Any, ...]:
        return self.tile.columns, self.problem.stride, self.problem.precision

    def tensor_map(self, address: int) -> Words:
        return tensor_map(self.tile, self.problem, address)


def tensor_map(t: Tile, p: Problem, address: int) -> Words:
    """A ``CUtensorMap`` over the input with a unit's box, as 16 signed words. float32 is rounded to TF32 on its way."""
    tensor = dense((p.size[0], p.in_channels, p.batch, 1, 1), t.element)
    return encode(tensor, address, p.dtype, t.box, (1,) * 5, rounded=p.precision == "tf32")


# --- candidates ------------------------------------------------------------------------------------------------------


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why these kernels cannot serve a problem, in a sentence; None when they may."""
    if gpu.arch != "90a":
        return "pixels as rows are multiplied by wgmma alone"
    if p.pass_ != "fwd" or p.layout != "nchw":
        return "pixels as they lie are for forwards in NCHW"
    if p.precision not in PRECISIONS:
        return f"precision {p.precision} is none of the kernel's"
    if p.rank != 1 or p.groups > 1 or max(p.dilation) > 1:
        return "the kernel is for 1-D layers without groups or dilation"
    taps, rest = divmod(p.kernel[0], p.stride[0])
    if rest or not 2 <= taps <= _MOST_TAPS:
        return f"a kernel of {p.kernel[0]} is no 2 to {_MOST_TAPS} strides of {p.stride[0]}"
    if p.stride[0] % 2 or p.padding[0] % 2 or p.out_size[0] % 2:
        return "the kernel stores two neighbouring outputs together"
    if math.prod(p.size) * p.dtype.itemsize % 16:
        return "channels begin at places off 16 bytes, where no box does"
    if max(math.prod(p.out_size) + 2**12, math.prod(p.weight_shape) * 16, p.batch) >= _MOST_COUNTED:
        return "the kernel counts a channel's outputs, and packed weights, in 32 bits"
    return None


def candidates(p: Problem, gpu: Gpu) -> Iterator[Tile]:
    """Every tile worth a look for a layer."""
    return iter(_candidates(any_size(p), gpu))


@lru_cache(maxsize=256)
def _candidates(layer: Problem, gpu: Gpu) -> tuple[Tile, ...]:
    """A layer's tiles for all sizes."""
    found = []
    for columns, mb, images in product(_COLUMNS, (1, 2, 4), (1, 2, 4, 8)):
        t = Tile(layer, columns, mb, images)
        if columns >= 2 * t.all_columns > 2 * _COLUMNS[-1] or (t.element == 2 and columns > _MOST_HALVES):
            continue
        with suppress(Unfit):
            found.append(_fitted(t, gpu.shared_bytes).checked(gpu.shared_bytes))
    return tuple(found)


def _fitted(t: Tile, shared: int) -> Tile:
    """The tile with as many stages as there is room for: of weights at most a tap more for each chunk of pixels."""
    for stages in range(_MOST_STAGES, 1, -1):
        room = shared - stages * (t.pixel_bytes + 16)
        weights = room // (t.weight_bytes + 16)
        if weights >= (stages - 1) * t.taps + 1:
            return replace(t, stages=stages, weight_stages=min(weights, stages * t.taps))
    return t


# --- the cost model --------------------------------------------------------------------------------------------------


def estimate(t: Tile, p: Problem, gpu: Gpu) -> tuple[float, str]:
    """(seconds, what bounds them) of a problem by a tile."""
    instructions = 2 * t.mb * 4 * t.taps  # of a chunk
    factor, beside = _INSTRUCTION[t.element][t.mb > 1]
    copied = t.pixel_bytes + t.taps * t.weight_bytes
    parts = {
        "tensor cores": instructions * (factor * t.columns / 2 + beside),
        "shared memory": (instructions * 32 * (64 * _FRAGMENTS + t.columns) + copied) / _SHARED,
        "L2": copied / _L2,
    }
    bound = max(parts, key=lambda name: parts[name])
    store = 2 * t.unit * t.columns * t.element / _STORE[t.element][t.mb > 1]
    clocks = t.chunks * parts[bound] + store + _TILE
    waves = -(-t.tiles(p) // gpu.multiprocessors)
    seconds = waves * clocks / gpu.clock * (1 + (t.images - 1) * _IMAGE[t.element])
    if store > clocks / 2:
        bound = "stores"
    memory = (math.prod(p.input_shape) + math.prod(p.output_shape)) * t.element / gpu.bandwidth
    if memory > seconds:
        bound = "bytes"
    return max(memory, seconds) + 0.1 * min(memory, seconds) + LAUNCH, bound


choose = Chooser(
    refusal,
    lambda p, gpu: (t for t in candidates(p, gpu) if 2 * (t.tiles(p) + gpu.multiprocessors) < _MOST_COUNTED),
    estimate,
    Choice,
    general="exported files have no host code for pixels as rows",
    none="there are more tiles than the kernel counts in 32 bits",
)
"""The cheapest tile by the model, or the sentence why there is none."""
candidate = choose.candidate
