"""Gradients for the input of strided 3-D layers of few channels: rows as they lie, a walk along D. wgmma only.

Odd widths are what PyTorch gives a layer of stride 2 without output padding, and their NCDHW rows begin anywhere: boxes
of the tensor copy engine do not bring them, and a pass that turns pixels takes as long as all the rest. Here whole rows
are copied in 16-byte units and fragments of A are read from them as they lie (``kernels/rows.cu``). Pixels are rows of
M, output channels columns of N; a source slice is multiplied once with all kernel slices that meet it, whose sums move
through the registers as a block walks along D.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from torch import Tensor

from upconv.cuda import family, gather, jit
from upconv.cuda.axes import Unfit, any_size, result_shape, source_shape
from upconv.cuda.choosing import Chooser
from upconv.cuda.columns import PRECISIONS, instruction
from upconv.cuda.costs import LAUNCH
from upconv.cuda.gpu import Gpu
from upconv.cuda.launch import as_run
from upconv.cuda.packs import PACK_THREADS, Packs, Unit, layer_text
from upconv.cuda.walks import Walks
from upconv.derived import derived
from upconv.problem import Problem

_REGISTERS = {2: (64, 216), 3: (56, 144), 4: (64, 104)}
"""Of a producer's thread and a consumer's, by consumers."""
_SPARE = 40
"""Registers of a consumer's thread for addresses and the like."""
_MOST_STAGES = 32
_MOST_WALKS = 2**30  # the kernel counts them in 32 bits, a grid beyond the last
_MOST_COUNTED = 2**31  # so it does a channel's elements, and the images' channels
# The model's constants, fitted to 154 timed tiles of 10 layers on an H200, of which it misses 9% on average.
_COPY = 132.0, 15.0, 50.0  # clocks of a unit for its producers; of a channel's row, and of it bytes a clock
# Clocks of an instruction that loads fragments: of float32; of 16 bits, without conflicts of banks, with.
_LOAD = 1.3, 1.2, 1.6
_UNIT = 70.0  # clocks of a unit for a consumer beside
_THREE = 1.16  # on what three consumers multiply: a scheduler has all their warps or few
_HIDDEN = 0.67  # share of copies or products, whichever are less, that the others hide
_WALK = 500.0  # clocks of a walk beside


@dataclass(frozen=True)
class Rows(Walks):
    """A tile's shape and the kernel's constants for one problem; everything but the sizes of input and batch.

    Raises, on `checked`:
        Unfit: the kernel cannot run it.
    """

    problem: Problem
    consumers: int
    """Warpgroups that multiply, a result row each."""
    mb: int
    """Subtiles of 64 neighbours of a row that a consumer accumulates."""
    chunk: int
    """Source channels of a unit of the ring."""
    stages: int = 2
    """Units of the ring."""

    @property
    def element(self) -> int:
        return 4 if self.problem.precision == "tf32" else 2

    @property
    def vec(self) -> int:
        return 16 // self.element

    @property
    def channels(self) -> tuple[int, int]:
        """The source's and the result's."""
        return source_shape(self.problem)[1], result_shape(self.problem)[1]

    @property
    def chunks(self) -> int:
        return -(-self.channels[0] // self.chunk)

    @property
    def slots(self) -> int:
        """Result slices whose sums a thread holds."""
        return -(-self.problem.kernel[0] // self.problem.stride[0])

    @property
    def slot_columns(self) -> int:
        """Columns of a slot: the result's channels, filled up to a multiple of 8."""
        return -(-self.channels[1] // 8) * 8

    @property
    def columns(self) -> int:
        """Columns of a matrix instruction that multiplies with all slots."""
        return self.slots * self.slot_columns

    @property
    def tile_rows(self) -> int:
        """Source rows of a tile's slice."""
        return self.problem.stride[1] * (self.consumers - 1) + self.problem.kernel[1]

    @derived
    def row_units(self) -> int:
        """16-byte units of a source row in shared memory, wherever it begins."""
        return -(-(self.problem.stride[2] * (self.mb * 64 - 1) + self.problem.kernel[2] + self.vec - 1) // self.vec)

    @property
    def row_pitch(self) -> int:
        """16-byte units from a channel's row to the next: an odd number, so that lanes' channels are in other banks."""
        return self.row_units | 1

    @property
    def unit_bytes(self) -> int:
        return self.chunk * self.row_pitch * 16 + (self.chunk // self.vec - 1) * (0 if self.element == 4 else 32)

    @property
    def weight_bytes(self) -> int:
        return self.chunks * self.chunk * math.prod(self.problem.kernel) * self.slot_columns * self.element

    @property
    def packed_words(self) -> int:
        """32-bit words of the packed weights."""
        return self.weight_bytes // 4

    @property
    def pack_blocks(self) -> int:
        return -(-self.weight_bytes // 16 // PACK_THREADS)

    @property
    def shared_bytes(self) -> int:
        return self.weight_bytes + self.stages * self.unit_bytes + 16 * self.stages + 8

    def checked(self, shared_limit: int) -> Rows:
        """This, when the kernel can run it."""
        sums = self.mb * self.columns // 2
        fragments = self.problem.kernel[2] * self.mb * 4
        most = _REGISTERS[self.consumers][1] - _SPARE
        if self.columns > 256 or sums + fragments > most:
            raise Unfit(f"{sums} sums and fragments in {fragments} registers are more than {most}")
        if self.stages <= self.tile_rows:
            raise Unfit(f"the ring has fewer units than a tile's slice, {self.tile_rows}, and one")
        if self.shared_bytes > shared_limit:
            raise Unfit(f"the tile takes {self.shared_bytes} bytes of shared memory, the device has {shared_limit}")
        return self

    def macros(self) -> dict[str, int | float | str]:
        """The kernel's constants by macro name; see kernels/rows.cu."""
        p = self.problem
        found: dict[str, int | float | str] = {
            "PRECISION": PRECISIONS[p.precision],
            "ELEMENT": self.element,
            "ELEMENT_TYPE": "float" if self.element == 4 else "unsigned short",
            "CIN": self.channels[0],
            "COUT": self.channels[1],
            "CK": self.chunk,
            "CONSUMERS": self.consumers,
            "MB": self.mb,
            "STAGES": self.stages,
            "SLOTS": self.slots,
            "SLOT_COLUMNS": self.slot_columns,
            "ROW_UNITS": self.row_units,
            "ROW_PITCH": self.row_pitch,
            "PRODUCER_REGISTERS": _REGISTERS[self.consumers][0],
            "CONSUMER_REGISTERS": _REGISTERS[self.consumers][1],
            "SHARED_BYTES_PLANNED": self.shared_bytes,
        }
        for axis, name in enumerate("DHW"):
            found[f"KERNEL_{name}"] = p.kernel[axis]
            found[f"STEP_{name}"] = p.stride[axis]
            found[f"PAD_{name}"] = f"({p.padding[axis]})"
        for name, slots in (("ALL", self.slots), ("LESS", self.slots - 1)):
            if slots:
                found |= instruction(f"{name}_", slots * self.slot_columns, words_of_a=4)
        return found

    # --- sizes, which are run-time arguments -------------------------------------------------------------------------

    def extent(self) -> tuple[int, int]:
        return self.consumers, self.mb * 64

    def segments(self, walks: int, slices: int, multiprocessors: int) -> int:
        return _segments(walks, slices, self.slots, multiprocessors)

    def arguments(self, p: Problem, multiprocessors: int) -> tuple[int, ...]:
        """The kernel's integer arguments behind its pointers."""
        n, segments, rows, columns = self.counts(p, multiprocessors)
        sizes = (*source_shape(p)[2:], *result_shape(p)[2:])
        return (p.batch, *sizes, segments, rows, columns, n * segments * rows * columns)


@lru_cache(maxsize=4096)
def _segments(walks: int, slices: int, slots: int, multiprocessors: int) -> int:
    """Into how many segments walks are cut, so that the blocks are busy alike."""

    def steps(segments: int) -> float:
        # A walk's further steps multiply part of their slices alone.
        return -(-walks * segments // multiprocessors) * (-(-slices // segments) + (slots - 1) / 2)

    most = min(slices, 256)
    # Segments of equal lengths, none of them empty.
    return min((-(-slices // -(-slices // n)) for n in range(1, most + 1)), key=lambda n: (steps(n), n))


@dataclass(frozen=True)
class Choice(family.Defaults):
    packing_seconds = 0.0
    """Rows for a problem on a GPU, and what the model thinks of it."""

    rows: Rows
    """Of the layer at any size; its own problem's size and batch mean nothing."""
    problem: Problem
    gpu: Gpu
    seconds: float
    """The model's estimate."""
    bound: str
    """What limits it, by the model."""

    family = "rows"

    # NOTES: the best tiles of 10 layers took 0.93 to 1.08 of the model's time, 0.91 to 1.21 in 16 bits; the other,
    # of the gather-GEMM, is 5 to 12% too high where nothing is unrolled.
    margin = 1.1

    @property
    def grid(self) -> int:
        """Blocks of a launch."""
        return self.rows.grid(self.problem, self.gpu.multiprocessors)

    @property
    def summary(self) -> str:
        s = self.rows
        slices = s.walk(self.problem, self.gpu.multiprocessors)
        return (
            f"rows as they lie: wgmma {s.problem.precision}, tile {s.consumers}x{s.mb * 64} (HxW), walks of {slices} "
            f"slices, {s.columns} columns, ring of {s.stages} rows of {s.chunk} channels, weights resident, "
            f"{s.shared_bytes // 1024} KB shared, grid {self.grid}"
        )

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all input sizes that share the tile."""
        return (Unit(f"rows {layer_text(self.problem)}", jit.source("rows.cu", self.rows.macros()), _ENTRIES),)

    def prepare(self, device: int) -> Prepared:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return Prepared(self, device)


_ENTRIES = ("pack", "rows")


class Prepared(Packs):
    """A choice's kernels, loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        s, p = choice.rows, choice.problem
        super().__init__(p, device, s.packed_words, s.pack_blocks)
        (unit,) = choice.sources()
        self._load_packing(unit)
        self._run = self._load(unit, "rows", 128 + 128 * s.consumers, s.shared_bytes, f"PPP({gather.SIZES})")
        self._grid = choice.grid
        self._sizes = as_run(gather.SIZES, s.arguments(p, choice.gpu.multiprocessors))
        self.packing = ("rows", s.chunk, p.precision, p.stride[0])
        """What `pack`'s result depends on beside the weight."""

    def run(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False, claim: bool = False
    ) -> None:
        """Launches the kernel: ``x``, the output's gradient, and ``out``, the input's, contiguous.

        ``packed`` is what `pack` returned; there is no bias. ``fresh``: `pack` was called just before, and the kernel
        copies its first rows beside what that launched.
        """
        self._run(self._device, self._grid, (x.data_ptr(), packed.data_ptr(), out.data_ptr(), self._sizes), fresh)


# --- candidates ------------------------------------------------------------------------------------------------------


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why these kernels cannot serve a problem, in a sentence; None when one may."""
    if gpu.arch != "90a":
        return "rows as they lie are multiplied by wgmma alone"
    if p.rank != 3 or p.layout != "nchw" or p.pass_ != "grad-input":
        return "rows as they lie are for gradients for the input of 3-D layers in NCDHW"
    if p.precision not in PRECISIONS:
        return f"precision {p.precision} is none of the kernel's"
    if p.stride[2] < 2 or p.groups > 1 or max(p.dilation) > 1:
        return "the kernel is for strides along the width, without groups or dilation"
    if p.kernel[1] < p.stride[1]:
        return "the kernel reads all rows, of which a kernel shorter than its stride leaves some out"
    (_, *source), (batch, channels, *_) = source_shape(p)[1:], result_shape(p)
    if math.prod(source) >= _MOST_COUNTED or batch * channels >= _MOST_COUNTED:
        return "the kernel counts a channel's elements, and the images' channels, in 32 bits"
    return None


def candidates(p: Problem, gpu: Gpu) -> Iterator[Rows]:
    """Every tile worth a look for a layer at its own size."""
    w = result_shape(p)[4]
    for s in _candidates(any_size(p), gpu):
        if s.mb == 1 or w > 64 * (s.mb - 1):
            yield s


@lru_cache(maxsize=256)
def _candidates(layer: Problem, gpu: Gpu) -> tuple[Rows, ...]:
    """A layer's tiles for all sizes."""
    found = []
    for consumers, mb, chunk in product((2, 3, 4), (1, 2, 3, 4), (8, 16) if layer.precision == "tf32" else (16, 32)):
        s = Rows(layer, consumers, mb, chunk)
        room = gpu.shared_bytes - s.weight_bytes - 8
        s = replace(s, stages=min(room // (s.unit_bytes + 16), _MOST_STAGES))
        try:
            found.append(s.checked(gpu.shared_bytes))
        except Unfit:
            continue
    return tuple(found)


# --- the cost model --------------------------------------------------------------------------------------------------


def estimate(s: Rows, p: Problem, gpu: Gpu) -> tuple[float, str]:
    """(seconds, what bounds them) of a problem by a tile."""
    kernel, stride = s.problem.kernel, s.problem.stride
    unit, row, rate = _COPY
    copied = s.tile_rows * s.chunks * (unit + s.chunk * (row + s.row_units * 16 / rate))
    k_steps = s.chunk * s.element // 32
    instructions = s.consumers * s.mb * kernel[2]  # of a tap of H, a step of K
    columns = s.slot_columns * kernel[0] / min(kernel[0], stride[0])
    load = _LOAD[0] if s.element == 4 else 2 * _LOAD[1 if s.chunk >= 32 else 2]
    multiplied = s.chunks * kernel[1] * (k_steps * (instructions * columns / 2 + instructions * 16 * load) + _UNIT)
    if s.consumers == 3:
        multiplied *= _THREE
    counts = s.counts(p, gpu.multiprocessors)
    waves = -(-math.prod(counts) // gpu.multiprocessors)
    slices = s.walk(p, gpu.multiprocessors) * min(kernel[0], stride[0]) + (kernel[0] - stride[0]) * 1.2
    bodies = {"copies": copied, "fragments": multiplied}
    bound = max(bodies, key=lambda name: bodies[name])
    clocks = max(bodies.values()) + (1 - _HIDDEN) * min(bodies.values())
    seconds = waves * (slices * clocks + _WALK) / gpu.clock
    memory = (math.prod(result_shape(p)) + math.prod(source_shape(p))) * s.element / gpu.bandwidth
    if memory > seconds:
        bound = "bytes"
    return max(memory, seconds) + LAUNCH, bound


choose = Chooser(
    refusal,
    lambda p, gpu: (s for s in candidates(p, gpu) if s.arguments(p, gpu.multiprocessors)[-1] <= _MOST_WALKS),
    estimate,
    Choice,
    general="exported files have no host code for rows as they lie",
    none="this layer's weights leave no room for a ring of rows in shared memory, or its sums in registers",
)
"""The cheapest tile by the model, or the sentence why there is none."""
candidate = choose.candidate
