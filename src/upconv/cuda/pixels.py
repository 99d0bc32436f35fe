"""The gradient for the input of channels-last layers whose weights stay in shared memory: pixels as rows. wgmma only.

`gather` makes channels of the result rows of M: 64 of them, half empty for a layer of 32 channels, whose packed weights
then take twice their room and leave tiles, or chunks of channels, small (NOTES: kb73 in TF32 read 32 bytes of a pixel
at a time). Here pixels are rows of M and channels columns of N; a plane of pixels that some taps read comes by one box,
and both operands are read by descriptors (``kernels/pixels.cu``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import torch
from torch import Tensor

from upconv.cuda import gather, jit
from upconv.cuda.axes import Unfit, any_size, gather_axes, positions, result_shape, source_shape, table
from upconv.cuda.boxes import Five, Words, dense, encode
from upconv.cuda.choosing import Chooser, countable
from upconv.cuda.columns import PRECISIONS, PixelTile, TileChoice, instruction
from upconv.cuda.costs import LAUNCH
from upconv.cuda.gpu import Gpu
from upconv.cuda.launch import Launches, as_run
from upconv.cuda.packs import PACK_THREADS, LazyPacks, Unit, layer_text, run_beside
from upconv.derived import derived
from upconv.problem import Problem

_REGISTERS = {2: (40, 232), 3: (32, 160), 4: (24, 112)}
"""Of a producer's thread and a consumer's, by consumers: together no more than the block begins with."""
_SPARE = 56
"""Registers of a consumer's thread for addresses and the like."""
_MOST_STAGES = 16
_MOST_COLUMNS = 256
_MOST_BOX = 256  # elements along a dimension that a box may traverse
_MOST_STEP = 8
_MOST_PLANES = 64  # beyond them tables grow, and so does the time to plan (183 ms for 512)
_SIZES = "i" * 7  # `Tile.arguments`


@dataclass(frozen=True)
class Plane:
    """Taps that read the same pixels of the source, shifted. Triples are along D, H and W."""

    first: tuple[int, int, int]
    """The plane's first pixel, less a tile's first result times the steps."""
    halo: tuple[int, int, int]
    """Pixels that it has more than the tile."""
    taps: tuple[tuple[int, tuple[int, int, int]], ...]
    """Its taps' indices in the kernel, and by how many pixels of the plane each is shifted."""


@lru_cache(maxsize=256)
def planes(p: Problem) -> tuple[Plane, ...]:
    """The planes of a layer at any size."""
    _, of_h, of_w = (1,) * (3 - p.rank) + p.kernel
    classes = []  # of each axis' taps, with the pixels of the plane by which each is shifted, and the first's offset
    for axis in gather_axes(p):
        ((_, taps),), step = axis.taps, axis.in_step
        alike = [[tap for tap in taps if tap[1] % step == of] for of in dict.fromkeys(o % step for _, o in taps)]
        classes.append([(each[0][1], [(k, (offset - each[0][1]) // step) for k, offset in each]) for each in alike])
    found = []
    for (first_d, d), (first_h, h), (first_w, w) in product(*classes):
        shifted = (((i * of_h + j) * of_w + k, (a, b, c)) for (i, a), (j, b), (k, c) in product(d, h, w))
        found.append(Plane((first_d, first_h, first_w), (d[-1][1], h[-1][1], w[-1][1]), tuple(shifted)))
    return tuple(found)


@dataclass(frozen=True)
class Tile(PixelTile):
    """A tile's shape and the kernel's constants for one problem; everything but the sizes of input and batch.

    Raises, on `checked`:
        Unfit: the kernel cannot run it.
    """

    problem: Problem
    shape: tuple[int, int, int]
    """Results of a tile along D, H and W."""
    sub_w: int
    """Of the 64 results that are an instruction's rows: 64 neighbours of a row, or 8 of 8 rows."""
    chunk: int
    """Source channels of a plane's box."""
    consumers: int = 2
    """Warpgroups that multiply, whole tiles in turn."""
    stages: int = 2
    """Of the ring, a plane's chunk each."""

    @property
    def columns(self) -> int:
        """Of a matrix instruction: the result's channels, filled up to a multiple of 8."""
        return -(-self.channels[1] // 8) * 8

    @property
    def chunks(self) -> int:
        return -(-self.channels[0] // self.chunk)

    @derived
    def planes(self) -> tuple[Plane, ...]:
        return planes(self.problem)

    @derived
    def rows(self) -> int:
        """Pixels of a tile's planes, all together."""
        return sum(math.prod(self.extents(plane)) for plane in self.planes)

    @property
    def mb(self) -> int:
        """Subtiles of 64 results."""
        return math.prod(self.shape) // 64

    def extents(self, plane: Plane) -> tuple[int, ...]:
        """Pixels of a plane along D, H and W."""
        return tuple(n + halo for n, halo in zip(self.shape, plane.halo))

    def plane_bytes(self, plane: Plane) -> int:
        return math.prod(self.extents(plane)) * self.row_bytes

    @derived
    def stage_bytes(self) -> int:
        """The largest plane's, from where swizzles begin."""
        return max(-(-self.plane_bytes(plane) // 1024) * 1024 for plane in self.planes)

    @derived
    def boxes(self) -> tuple[Five, ...]:
        """What boxes traverse, which differ by their planes' halos: channels, W, H, D, images."""
        return tuple(dict.fromkeys(self._box(plane) for plane in self.planes))

    def _box(self, plane: Plane) -> Five:
        d, h, w = ((n - 1) * step + 1 for n, step in zip(self.extents(plane), self.strides))
        return self.chunk, w, h, d, 1

    @derived
    def read(self) -> float:
        """The share of the source's pixels that taps read."""
        return math.prod(
            len({plane.first[axis] % step for plane in self.planes}) / step for axis, step in enumerate(self.strides)
        )

    @property
    def promotion(self) -> int:
        """Bytes that the cache asks memory for at a time: more than a line where neighbouring lines are read soon.

        NOTES: unet4 in TF32 397 -> 392 us; kb81 in bfloat16, which leaves pixels out, 50 -> 60.
        """
        return 256 if self.read == 1 and self.channels[0] * self.element % 256 == 0 else 128

    @property
    def weight_bytes(self) -> int:
        return self.chunks * self.problem.taps * self.columns * self.row_bytes

    @property
    def packed_words(self) -> int:
        """32-bit words of the packed weights."""
        return self.weight_bytes // 4

    @property
    def pack_blocks(self) -> int:
        return -(-self.weight_bytes // 16 // PACK_THREADS)

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16) + self.weight_bytes + 8

    @property
    def holds_sums(self) -> bool:
        """Whether a consumer's registers do."""
        return self.mb * self.columns // 2 <= _REGISTERS[self.consumers][1] - _SPARE

    def checked(self, shared_limit: int) -> Tile:
        """This, when the kernel can run it."""
        if not self.holds_sums:
            most = _REGISTERS[self.consumers][1] - _SPARE
            raise Unfit(f"{self.mb * self.columns // 2} sums are more than {most} registers")
        if max(max(box) for box in self.boxes) > _MOST_BOX:
            raise Unfit(f"boxes traverse at most {_MOST_BOX} elements along a dimension")
        if self.stages < 2:
            raise Unfit("a stage is given back while the next is read")
        if self.shared_bytes > shared_limit:
            raise Unfit(f"the tile takes {self.shared_bytes} bytes of shared memory, the device has {shared_limit}")
        return self

    def macros(self, weights_box: bool = False) -> dict[str, int | float | str]:
        """The kernel's constants by macro name; see kernels/pixels.cu."""
        taps = [(plane, index, shift) for plane in self.planes for index, shift in plane.taps]
        firsts = [0]
        for plane in self.planes:
            firsts.append(firsts[-1] + len(plane.taps))

        def row(plane: Plane, shift: tuple[int, int, int]) -> int:
            (_, rows, pitch), (d, h, w) = self.extents(plane), shift
            return (d * rows + h) * pitch + w

        found: dict[str, int | float | str] = {
            "PRECISION": PRECISIONS[self.problem.precision],
            "ELEMENT": self.element,
            "ELEMENT_TYPE": "float" if self.element == 4 else "unsigned short",
            "CIN": self.channels[0],
            "COUT": self.channels[1],
            "CK": self.chunk,
            "COLUMNS": self.columns,
            "SUB_W": self.sub_w,
            "CONSUMERS": self.consumers,
            "STAGES": self.stages,
            "WIDE_STORES": int(self.exchanges),
            "STAGE_BYTES": self.stage_bytes,
            "TAPS": len(taps),
            "PLANES": len(self.planes),
            "MAPS": len(self.boxes),
            "WEIGHTS_BOX": int(weights_box),
            "PLANES_MAP": table([self.boxes.index(self._box(plane)) for plane in self.planes]),
            "PLANES_BYTES": table([self.plane_bytes(plane) for plane in self.planes]),
            "PLANES_ROWS": table([self.extents(plane)[1] for plane in self.planes]),
            "PLANES_PITCH": table([self.extents(plane)[2] for plane in self.planes]),
            "PLANES_FIRST": table(firsts),
            "TAP_ROWS": table([row(plane, shift) for plane, _, shift in taps]),
            "TAP_INDICES": table([index for _, index, _ in taps]),
            **instruction("N_", self.columns),
            "PRODUCER_REGISTERS": _REGISTERS[self.consumers][0],
            "CONSUMER_REGISTERS": _REGISTERS[self.consumers][1],
            "SHARED_BYTES_PLANNED": self.shared_bytes,
        }
        for axis, name in enumerate("DHW"):
            found[f"TILE_{name}"] = self.shape[axis]
            found[f"STEP_{name}"] = self.strides[axis]
            found[f"PLANES_{name}"] = table([plane.first[axis] for plane in self.planes])
        return found

    # --- sizes, which are run-time arguments -------------------------------------------------------------------------

    def counts(self, p: Problem) -> tuple[int, ...]:
        """Tiles along D, H and W of a problem of this layer."""
        return tuple(-(-n // of) for n, of in zip(positions(p, None), self.shape))

    def tiles(self, p: Problem) -> int:
        return p.batch * math.prod(self.counts(p))

    def arguments(self, p: Problem) -> tuple[int, ...]:
        """The kernel's integer arguments behind its pointers."""
        return (*positions(p, None), *self.counts(p), self.tiles(p))


class Choice(TileChoice[Tile]):
    """A tile for a problem on a GPU, and what the model thinks of it."""

    family = "pixels"

    @property
    def margin(self) -> float:
        """NOTES: the gather-GEMM's model is 8% too high on average for layers without a stride, of which it is the
        faster one for most, and 10 to 35% too low for small strided ones. Where the kernel is the stride and memory
        bounds both, pixels come no faster here: unet4 in bfloat16 takes 214 us, and 197 there; in TF32, where that one
        asks for two lines at a time, 391 to 397, and 385.
        """
        if max(self.problem.stride) == 1:
            return 1.08
        alone = self.tile.read == 1 and all(len(plane.taps) == 1 for plane in self.tile.planes)
        return 1.05 if alone and (self.tile.element == 2 or gather.in_two_lines(self.problem)) else 0.95

    @property
    def in_place(self) -> bool:
        return True

    @property
    def grid(self) -> int:
        """Blocks."""
        return self.even_grid(self.tile.tiles(self.problem))

    @property
    def summary(self) -> str:
        t = self.tile
        return (
            f"pixels as rows, channels last: wgmma {t.problem.precision}, tile {'x'.join(map(str, t.shape))} (DxHxW), "
            f"{t.columns} columns, ring of {t.stages} of {len(t.planes)} planes, {t.chunk} channels each, weights "
            f"resident, {t.consumers} consumers in turn, {t.shared_bytes // 1024} KB shared, grid {self.grid}"
        )

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile, for weights that are packed and as they lie; the same for all sizes of a tile."""
        label = f"pixels {layer_text(self.problem)}"
        packed, boxes = (jit.source("pixels.cu", self.tile.macros(weights_box)) for weights_box in (False, True))
        return Unit(label, packed, ("pack", "pixels")), Unit(f"{label} boxes", boxes, ("pixels",))

    def prepare(self, device: int) -> Prepared:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return Prepared(self, device)


class Prepared(LazyPacks):
    """A choice's kernels, loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        t, p = choice.tile, choice.problem
        super().__init__(p, device, t.packed_words, t.pack_blocks)
        self._unit, self._boxed_unit = choice.sources()
        self._grid, self._sizes, self._tiling = choice.grid, as_run(_SIZES, t.arguments(p)), t
        self._tails: dict[int, Words] = {}
        order = tuple(index for plane in t.planes for index, _ in plane.taps)
        self.packing = ("pixels", t.columns, t.chunk, p.precision, order)
        """What `pack`'s result depends on beside the weight."""
        # What its first weight wants is loaded then: hardly a layer has weights of both kinds.

    @property
    def _launchers(self) -> tuple[str, ...]:
        return (*self._packed_launchers, "_run_boxed")

    def _load_pixels(self, unit: Unit, more: str = "") -> Launches:
        t = self._tiling
        codes = f"PP({_SIZES}{'q' * 16 * len(t.boxes)}){more}"
        return self._load(unit, "pixels", 128 + 128 * t.consumers, t.shared_bytes, codes)

    @cached_property
    def _run(self) -> Launches:
        return self._load_pixels(self._unit)

    @cached_property
    def _run_boxed(self) -> Launches:
        assert self._boxed_unit is not None
        return self._load_pixels(self._boxed_unit, f"({'q' * 16})")

    def run(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False, claim: bool = False
    ) -> None:
        """Launches the kernel: ``x``, the output's gradient, and ``out``, the input's, dense in channels_last.

        ``packed`` is what `pack` returned; there is no bias. ``fresh``: `pack` was called just before, and the kernel
        loads its first pixels beside what that launched.
        """
        if out.data_ptr() & 15:  # some results are stored together
            run_beside(out, lambda whole: self.run(x, packed, bias, whole, fresh))
            return
        address, at = x.data_ptr(), packed.data_ptr()
        if address & 15:
            fresh, x = False, x.clone()  # a view that begins off 16 bytes; PyTorch's allocations never do
            address = x.data_ptr()
        tail = self._tails.get(address)
        if tail is None:
            t, p = self._tiling, self._problem
            maps = tensor_maps(t, p, address)
            tail = self._kept(self._tails, address, lambda: [self._sizes, *maps])
        if packed.dtype is torch.int32:
            self._run(self._device, self._grid, (at, out.data_ptr(), tail), fresh)
            return
        self._run_boxed(self._device, self._grid, (at, out.data_ptr(), tail, self._weight_map(at)))


def tensor_maps(t: Tile, p: Problem, address: int) -> Iterator[Words]:
    """``CUtensorMap``s over the output's gradient with a tile's boxes, each as 16 signed words."""
    channels, *size = source_shape(p)[1:]
    (depth, height, width), (d, h, w) = (1,) * (3 - p.rank) + tuple(size), t.strides
    tensor = dense((channels, width, height, depth, p.batch), t.element)
    for box in t.boxes:
        yield encode(
            tensor, address, p.dtype, box, (1, w, h, d, 1), t.row_bytes, p.precision == "tf32", t.promotion
        )  # fmt: skip


# --- candidates ------------------------------------------------------------------------------------------------------


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why these kernels cannot serve a problem, in a sentence; None when one may."""
    if gpu.arch != "90a":
        return "pixels as rows want both operands by descriptors, which wgmma alone takes"
    if p.pass_ != "grad-input" or p.layout != "channels_last":
        return "pixels as rows of channels-last tensors are for gradients for the input"
    if p.precision not in PRECISIONS:
        return f"precision {p.precision} is none of the kernel's"
    if p.groups > 1:
        return "the kernel knows no groups"
    if p.taps == 1:
        return "of one tap there is nothing that the gather-GEMM would read twice"
    if max(p.stride) > _MOST_STEP:
        return f"boxes take steps of at most {_MOST_STEP} pixels"
    source, result = source_shape(p)[1], result_shape(p)[1]
    if source * p.dtype.itemsize % 16:
        return "boxes want pixels of whole 16 bytes"
    if result > _MOST_COLUMNS:
        return f"{result} channels of the result are more than the {_MOST_COLUMNS} columns of an instruction"
    count = math.prod(len({k * d % s for k in range(of)}) for of, d, s in zip(p.kernel, p.dilation, p.stride))
    if count > _MOST_PLANES:
        return f"taps read {count} planes, more than the kernel's {_MOST_PLANES}"
    return None


def candidates(p: Problem, gpu: Gpu) -> Iterator[Tile]:
    """Every tile worth a look for a layer at its own size."""
    for t in _candidates(any_size(p), gpu):
        # Of an axis that is shorter than the tile no more than a subtile.
        subtile = (1, 64 // t.sub_w, t.sub_w)
        if all(n <= max(-(-of // least) * least, least) for n, of, least in zip(t.shape, positions(p, None), subtile)):
            yield t


@lru_cache(maxsize=256)
def _candidates(layer: Problem, gpu: Gpu) -> tuple[Tile, ...]:
    """A layer's tiles for all sizes."""
    found: list[Tile] = []
    source, element = source_shape(layer)[1], layer.dtype.itemsize
    # The weights of the shortest chunks, which are padded least.
    if -(-source * element // 32) * 32 * layer.taps * result_shape(layer)[1] > gpu.shared_bytes:
        return ()
    depths = (1, 2, 4) if layer.rank == 3 else (1,)
    heights = (1, 2, 4, 8, 16) if layer.rank > 1 else (1,)
    for sub_w, d, h, w in product((64, 8), depths, heights, (8, 16, 32, 64, 128, 256)):
        if w % sub_w or h % (64 // sub_w):
            continue
        for row_bytes, consumers in product((128, 64, 32), _REGISTERS):
            chunk = row_bytes // element
            t = Tile(layer, (d, h, w), sub_w, chunk, consumers)
            if (row_bytes > 32 and source <= chunk // 2) or not t.holds_sums:
                continue
            stages = (gpu.shared_bytes - t.weight_bytes - 8) // (t.stage_bytes + 16)
            try:
                found.append(replace(t, stages=min(stages, _MOST_STAGES)).checked(gpu.shared_bytes))
            except Unfit:
                continue
    return tuple(found)


# --- the cost model --------------------------------------------------------------------------------------------------

# Fitted to 738 timed tiles of 30 layers and dtypes on an H200: it chooses what takes 1.2% longer than a layer's best.
_L2 = 48.2  # bytes a clock, of boxes
_ROW = 32.0  # bytes that a pixel's row costs beside its own
_STORE = 20.9  # bytes a clock
_LATENCY = 743.0  # clocks, from a box's request to its use
_TILE = 179.0  # clocks of a tile beside
_TAP = 36.4  # of a tap's, beside its instructions
_ISSUE = 23.6  # of an instruction that multiplies few columns: its pixels come from shared memory
_HIDDEN = 0.772  # share of the lesser that the others hide
_BEGIN = 4555.0  # clocks of a kernel until its first tile is there
_WEIGHTS = 48.1  # and bytes a clock of its weights
_BESIDE = 0.226  # share of the memory's time, or of the tiles', whichever is less, that the other does not hide


def estimate(t: Tile, p: Problem, gpu: Gpu) -> tuple[float, str]:
    """(seconds, what bounds them) of a problem by a tile."""
    boxes = len(t.planes) * t.chunks
    copied = t.chunks * t.rows * (t.row_bytes + _ROW) / _L2
    waits = boxes * _LATENCY / t.stages
    instruction = max(t.columns / 2, _ISSUE)
    multiplied = t.chunks * p.taps * (t.row_bytes // 32 * t.mb * instruction + _TAP)
    stored = math.prod(t.shape) * t.channels[1] * t.element / _STORE
    bodies = {"tensor cores": multiplied, "L2": copied, "latency": waits}
    bodies["consumers"] = (multiplied + stored + _TILE) / t.consumers
    bound = max(bodies, key=lambda name: bodies[name])
    clocks = max(bodies.values()) + (1 - _HIDDEN) * min(copied, multiplied)
    waves = -(-t.tiles(p) // gpu.multiprocessors)
    begin = (_BEGIN + t.weight_bytes / _WEIGHTS) / gpu.clock
    seconds = (waves * clocks + stored) / gpu.clock
    memory = (math.prod(result_shape(p)) + t.read * math.prod(source_shape(p))) * t.element / gpu.bandwidth
    if memory > seconds:
        bound = "bytes"
    return max(memory, seconds) + _BESIDE * min(memory, seconds) + begin + LAUNCH, bound


choose = Chooser(
    refusal,
    countable(candidates),
    estimate,
    Choice,
    general="exported files have no host code for pixels as rows",
    none="this layer's weights leave no room for a ring of planes in shared memory, or its sums in registers",
)
"""The cheapest tile by the model, or the sentence why there is none."""
candidate = choose.candidate
