"""The grad-weight family on tensor cores: candidates, cost model, and a choice made ready for a device.

The tilings' arithmetic is in `wgrad_tiling`, the kernels are ``kernels/wgrad_wgmma.cu`` (sm_90a) and
``kernels/wgrad.cu`` (mma.sync): GEMMs over the pixels, whose accumulators are a tile of input channels x output
channels x neighbouring taps. K is split over blocks (and warps); partial sums are added in a fixed order, in a second
step, or by their blocks: as a cluster where splits are few, else together, where all of them run at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product

import torch
from torch import Tensor

from upconv.cuda import jit
from upconv.cuda.boxes import Tensor5, Words, alignment_classes, channels_last, dense, encode, fullest, of_class, parts
from upconv.cuda.gpu import Gpu
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.launch import Counters, Launcher, TooManyBlocks, as_run, bind
from upconv.cuda.tiling import MAX_CLUSTER
from upconv.cuda.wgrad_tiling import (
    COMMON_WIDTHS,
    MAX_CLASSES,
    WARPS,
    SyncTiling,
    Triple,
    WarpgroupTiling,
)
from upconv.problem import Problem

MOST_ABREAST = 32  # pixels along a side of images that `batches` tries side by side
_ACCUMULATORS = 144  # registers of a thread of the mma.sync kernel; beside them fragments and addresses
_RUNS = 8  # warps of a block of the second step
_MAX_SLICE_BYTES = 96 << 20  # of partial sums

# --- the model's constants -------------------------------------------------------------------------------------------
# Those of wgmma by threads, by rows and by classes are fitted to 1,966 timed choices of 27 layers in both layouts.
_MMA = 2.3  # clocks of a multiprocessor for an mma.sync of 16 x 8 x 32 bytes
_WGMMA = 1.01  # of the matrix instructions' own clocks
_LOAD = 1.15, 0.903  # clocks of a 128-byte access to shared memory: mma.sync's kernel, wgmma's
_ISSUE = 0.1  # clocks of a multiprocessor for each 16-byte copy by threads that also multiply: addresses and bounds
_COPY = 1.02, 1.43  # clocks for a 16-byte copy by a warpgroup of its own; beside three that multiply
_ROW = 0.143  # clocks for each run of such copies, NCHW: a channel's row
_IMAGES = 0.0122  # of a chunk's clocks, for each doubling of its images
_SETS = 0.0036  # of them, for each doubling of the sets of taps along W, whose blocks read between each other
_BOX_BESIDE = 88.0  # clocks of a box of x beyond the first beside copies by threads
# Clocks of a chunk: mma.sync's, barriers and the first fragments; wgmma's, copies by threads; rows together, by boxes.
_CHUNK = 700.0, 600.0, 150.0
_STEP = 40.0  # clocks a step of mma.sync costs beside its instructions
_LATENCY = 588.0  # clocks from a copy's begin to its first bytes (NOTES: kb71 bfloat16 with 2 stages 288 us, 4 228)
_STACKED = 0.831, 3.56  # of the matrix instructions' own clocks where rows share one, and clocks of each beside them
_WARPGROUP_STEP = 35.3  # clocks a step of wgmma costs: the fragment is waited for
_DRAIN = 93.0, 73.0  # clocks at the end of a stretch of wgmma: of taps one by one; of rows together, or by classes
_L2 = 24.0  # bytes a clock and multiprocessor, copied by threads that also multiply
_LINE = 2.21  # clocks of the tensor copy engine for a line of 128 bytes; a row that takes half of one costs half
_BOX_L2 = 42.9  # by boxes
# NCHW, g by boxes, neither stacked nor classed: of 700 timed choices of 27 layers on an H100, of which it misses 9%,
# and the fastest of which its own are 3% behind. Shares of a clock: for two columns of an instruction; for 128 bytes of
# shared memory that instructions read, and that copies write, which fill gaps.
_TENSOR, _READ, _WRITTEN = 0.94, 0.85, 0.3
_INSTRUCTION, _BESIDE = 25.0, 40.0  # clocks beside: of an instruction, of a chunk
_BOXED_LINE, _BOXED_L2 = 1.52, 90.0  # clocks of a line of 128 bytes; bytes a clock
_TOGETHER = 3.4  # the exponent by which these, which overlap, are added
# And how much more: with two stages, by bytes of an element; with rows of x of so many bytes; with taps along D.
_TWO_STAGES, _SHORT, _DEEP = {4: 0.09, 2: 0.12}, {64: 0.17, 32: 0.64}, 0.57
# Lines that are touched where rows of x begin at multiples of so many bytes, and g's at as many or twice as many, by
# measured times (NOTES: 256->256 k4 s2 on 32 images of 32 x 24, bfloat16, 242 us where the model had 132; TF32 231 and
# 198; of 16 x 12, TF32, 149 and 76; 512->256 k3 s2 on 15 x 20, TF32, 72 and 49). Shorter rows share lines.
_STRADDLING, _LEAST_STRADDLING = {16: 3.0, 32: 2.0}, 48
_OVERLAP = 0.063, 0.203  # of a chunk's clocks that are not its bound: g by boxes; by threads
_SYNC_NCHW = 1.25  # what the mma.sync kernel takes beyond its model: fragments off 16 bytes
_SYNC_NCHW_16 = 2.2  # and where each is put together from two words
# channels_last by boxes: of 1,760 timed choices of 37 layers on an H100, of which it misses 12%, and the fastest of
# which its own are 1.8% behind (6.1% with the constants before: dcgan1 in bfloat16 75 us for 49). As NCHW's, and by
# bytes of an element: clocks of an instruction, where fragments come by descriptors its share; of x that is turned.
_LAST_TENSOR, _LAST_NARROW, _LAST_STACKED = 0.826, 0.925, 1.064  # of up to 64 columns less, of rows together more
_LAST_INSTRUCTION, _LAST_SHARED = {4: 63.3, 2: 31.9}, 0.371
_LAST_READ, _LAST_READ_STACKED, _LAST_WRITTEN, _LAST_TURNED = 0.3, 1.5, 0.891, 6.46
_LAST_LINE, _LAST_BOX, _LAST_L2 = 2.07, 16.5, 200.0
_LAST_TOGETHER, _LAST_BESIDE, _LAST_SETS, _LAST_GAPLESS = 10.0, 170.0, 0.006, 0.122


@dataclass(frozen=True)
class Ends:
    """What blocks take beside their chunks, fitted with those; the rest of NCHW's to 511 timed choices of 19 layers.

    Sums lie in the second-level cache, whatever the memory's rate (NOTES: by that of an H100 the model took two steps
    for dcgan1 in bfloat16, 75 us, where blocks that write the weight themselves take 49).
    """

    block: float
    """Clocks of a block: its first bytes, its sums."""
    wave: float
    """The share of these that the next wave's blocks take again."""
    sum: float
    """Clocks for each byte of a block's sums."""
    memory: float
    """Share of the lesser of multiplying and the tensors' bytes that the other does not hide."""
    alone: tuple[float, float]
    """Seconds, and passes over the weight, where a block writes it from its own sums."""
    cluster: tuple[float, float]
    """Seconds, and passes over all blocks' sums, where those of a cluster add them up."""
    together: tuple[float, float]
    """The same through global memory."""
    steps: tuple[float, float]
    """Seconds, and passes over the slices of partial sums, of the second step."""
    scattered: float
    """Passes over the weight that blocks write themselves, of taps innermost."""


_CACHE = 4e12  # bytes a second of such a pass
_LAST_ENDS = Ends(
    block=9912.0,
    wave=0.205,
    sum=0.008,
    memory=0.247,
    alone=(0.0, 1.33),
    cluster=(2.8e-6, 0.929),
    together=(3.6e-6, 2.11),
    steps=(2e-6, 4.28),
    scattered=0.0,
)
_NCHW_ENDS = Ends(
    block=11155.0,
    wave=0.675,
    sum=0.0,
    memory=0.13,
    alone=(6e-6, 0.468),
    cluster=(6e-6, 1.01),
    together=(7.6e-6, 1.585),
    steps=(7.9e-6, 3.18),
    scattered=0.378,
)
# Of exported files, whose blocks leave their sums to a second step in any case; these stay as they are.
_FILE_ENDS = Ends(
    block=14600.0,
    wave=1.0,
    sum=0.0,
    memory=0.12,
    alone=(0.0, 0.952),
    cluster=(0.0, 2.27),
    together=(0.0, 2.27),
    steps=(6.1e-6, 0.952),
    scattered=0.0,
)
_MOST_WIDTH = 160  # input channels of a block that needs two accumulators of 64 rows
_SIZES = "i" * 12  # of the kernels' parameters: images, sizes, counts of chunks
_CHUNK_BOX = "i" * 4  # and of `gapless` ones: a chunk's box
_GAPLESS = 64, 96, 128, 192, 256  # positions of their chunks

AnyTiling = SyncTiling | WarpgroupTiling


@dataclass(frozen=True)
class Unit:
    """A source to be compiled and its kernels' names, without those that only autocast takes."""

    label: str
    source: str
    entries: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """A tiling for a problem on a GPU, and what the model thinks of it."""

    tiling: AnyTiling
    """Of the layer at any size; its own problem's size and batch mean nothing."""
    problem: Problem
    gpu: Gpu
    splits: int
    """Ranges of chunks that different blocks take."""
    seconds: float
    """The model's estimate."""
    bound: str
    """What limits it, by the model."""
    flat: bool = False
    """Whether the problem is another's `Problem.flat`."""
    family: str = field(default="wgrad", init=False)

    @property
    def summary(self) -> str:
        t = self.tiling
        shape, taps = "x".join(map(str, t.tile)), "x".join(map(str, t.taps))
        instruction = "wgmma" if isinstance(t, WarpgroupTiling) else "mma.sync"
        if isinstance(t, WarpgroupTiling) and t.stacked:
            instruction += f" of up to {t.stack} rows"
        if self.flat or self.problem.batch_as_width:
            instruction = f"the batch as {'pixels' if self.flat else 'width'}: {instruction}"
        adding = ""
        if self.cluster > 1:
            adding = f" in clusters of {self.cluster} that add up their sums"
        elif self.together:
            adding = " of blocks that add up their sums"
        elif self.alone:
            adding = " of blocks that write the weight"
        return (
            f"{instruction} {t.problem.precision}, {t.block[0]}x{t.block[1]} channels x {taps} taps a block, chunks of "
            f"{shape} (NxDxHxW of q), K in {self.splits * t.k_slices} slices, "
            f"{t.shared_bytes // 1024} KB shared, "
            f"grid {t.tiles * self.splits}{adding}"
        )

    @property
    def cluster(self) -> int:
        """The splits, where their blocks are a cluster that adds up their sums without a second step; else 1."""
        return _cluster(self.tiling, self.splits, self.gpu)

    @property
    def together(self) -> bool:
        """Whether the splits' blocks, which are no cluster, may add up their sums: all run at once."""
        return _together(self.tiling, self.splits, self.gpu)

    @property
    def alone(self) -> bool:
        """Whether there is one split, whose blocks write the weight themselves."""
        return _alone(self.tiling, self.splits, self.gpu)

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all input sizes that share the tile (and are cut into as few splits).

        The first has both steps; the second, where there is a `cluster` or they add up `together` or are `alone`, needs
        one.
        """
        p, t = self.problem, self.tiling
        label = f"wgrad {str(p).split(' on ')[0]} {p.precision} {p.layout}"
        steps = Unit(label, jit.source(t.file, t.macros()), ("wgrad", "reduce"))
        if not isinstance(t, WarpgroupTiling) or not (self.cluster > 1 or self.together or self.alone):
            return (steps,)
        kind = "alone" if self.alone else "together" if self.together else f"by clusters of {self.cluster}"
        macros = t.macros(self.cluster, self.together, self.alone)
        return steps, Unit(f"{label} {kind}", jit.source(t.file, macros), ("wgrad",))

    def prepare(self, device: int) -> Prepared:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return Prepared(self, device)


def _cluster(t: AnyTiling, splits: int, gpu: Gpu) -> int:
    if not isinstance(t, WarpgroupTiling) or not t.adds_up or not 2 <= splits <= MAX_CLUSTER:
        return 1
    waves = -(-t.tiles * splits // gpu.multiprocessors)
    return splits if t.tiles <= waves * gpu.clusters(splits) else 1


def _together(t: AnyTiling, splits: int, gpu: Gpu) -> bool:
    if not isinstance(t, WarpgroupTiling) or not t.adds_up or gpu.arch != "90a" or _cluster(t, splits, gpu) > 1:
        return False
    return splits > 1 and t.tiles * splits <= gpu.multiprocessors


def _alone(t: AnyTiling, splits: int, gpu: Gpu) -> bool:
    return isinstance(t, WarpgroupTiling) and t.adds_up and gpu.arch == "90a" and splits == 1


class Prepared:
    """A choice's kernels, loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        t, p = choice.tiling, choice.problem
        self._device, self._tiling, self._problem = device, t, p
        self._boxes = 0 if isinstance(t, SyncTiling) else 1 + t.box_g * math.prod(t.classes)
        self.casts = p.dtype.itemsize == 2
        counts = t.counts(p)
        chunks = math.prod(counts)
        full = (1,) * (3 - p.rank)
        sizes = (p.batch, *full, *p.size, *full, *p.out_size, *counts[1:], chunks, -(-chunks // choice.splits))
        self._codes = _SIZES
        if isinstance(t, WarpgroupTiling) and t.gapless:
            sizes, self._codes = (*sizes, *t.tile), _SIZES + _CHUNK_BOX
        self._sizes, self._shape = as_run(self._codes, sizes), p.weight_shape
        self._grid = t.tiles * choice.splits
        self._slices = choice.splits * t.k_slices
        self._maps: dict[tuple[int, bool], Words] = {}
        self._pairs: dict[tuple[int, int], Words] = {}
        self._numel = math.prod(p.weight_shape)
        self._blocks = reduce_blocks(t)
        self._choice = choice
        self._one_step = self._by_one_step(choice)
        self.together = choice.together and gpu_of(device).multiprocessors >= self._grid
        """Whether `run` has another way for calls that are ``lasting``."""
        if self.together:
            assert isinstance(t, WarpgroupTiling)
            self._counters, self._sums = Counters(device, 2 * t.tiles), self._grid * t.sums_bytes // 4
            _ = self._at_once
        elif self._one_step is None:
            self.load()

    @property
    def loaded(self) -> bool:
        """Whether the kernels for every call are."""
        return self._one_step is not None or all(name in vars(self) for name in self._steps)

    def load(self) -> None:
        """Compiles (or finds) and loads the kernels for every call. Errors: those of ``jit.kernel``."""
        for name in () if self._one_step is not None else self._steps:
            getattr(self, name)

    @property
    def _steps(self) -> tuple[str, ...]:
        return ("_wgrad", "_reduce", *(("_reduce_float",) if self.casts else ()))

    def _launcher(self, unit: Unit, entry: str, codes: str, cooperative: bool = False) -> Launcher:
        kernel = jit.kernel(unit.source, entry, gpu_of(self._device).arch, unit.label)
        if entry == "wgrad":
            return Launcher(kernel, self._tiling.threads, self._tiling.shared_bytes, codes, cooperative)
        return Launcher(kernel, 32 * _RUNS, 0, codes)

    @cached_property
    def _wgrad(self) -> Launcher:
        codes = f"PP({self._codes})({'q' * 16 * self._boxes})" if self._boxes else f"PPP({self._codes})"
        return self._launcher(self._choice.sources()[0], "wgrad", codes)

    @cached_property
    def _reduce(self) -> Launcher:
        return self._launcher(self._choice.sources()[0], "reduce", "PPiqqq")

    @cached_property
    def _reduce_float(self) -> Launcher:
        return self._launcher(self._choice.sources()[0], "reduce_float", "PPiqqq")

    @cached_property
    def _at_once(self) -> Launcher:
        codes = f"PPPP({self._codes})qqqi({'q' * 16 * self._boxes})"
        return self._launcher(self._choice.sources()[1], "wgrad", codes, cooperative=True)

    def _by_one_step(self, choice: Choice) -> Launcher | None:
        """The kernel that needs no second step, of one split or by clusters; None where there is none, or clusters
        would take more waves of blocks."""
        if choice.cluster == 1 and not choice.alone:
            return None
        codes = f"PP({self._codes})qqqi({'q' * 16 * self._boxes})"
        launcher = self._launcher(choice.sources()[1], "wgrad", codes)
        if choice.alone:
            return launcher
        waves = -(-self._grid // choice.gpu.multiprocessors)
        return launcher if choice.tiling.tiles <= waves * launcher.clusters(self._device, choice.cluster) else None

    def run(self, x: Tensor, grad: Tensor, out: Tensor, lasting: bool = False) -> None:
        """Writes the weight's gradient into ``out`` (contiguous or channels_last; the problem's dtype, or float32).

        ``x`` (the input) and ``grad`` (the output's gradient) are dense in the problem's layout. ``lasting``: the call
        may allocate what outlives it, and is not captured in a graph.
        """
        if self._choice.flat and out.shape != self._shape:
            dense = out.contiguous()
            self.run(x, grad, dense.view(self._shape), lasting)
            if dense is not out:
                out.copy_(dense)
            return
        at_x, at_grad = x.data_ptr(), grad.data_ptr()
        if (at_x | at_grad) & 15 and self._tiling.needs_alignment:
            x, grad = x.clone(), grad.clone()
            at_x, at_grad = x.data_ptr(), grad.data_ptr()
        maps = self._pairs.get((at_x, at_grad)) if self._boxes else b""
        if maps is None:
            maps = self._pair(at_x, at_grad)
        strides = out.stride()
        to = (strides[0], strides[1], strides[-1])
        single = out.dtype is torch.float32
        if self._one_step is not None:
            self._one_step(self._device, self._grid, (at_grad, out.data_ptr(), self._sizes, *to, single, maps))
            return
        if lasting and self.together:
            sums = x.new_empty_strided((self._sums,), (1,), dtype=torch.float32)
            pointers = (at_grad, out.data_ptr(), sums.data_ptr(), self._counters.address(x))
            try:
                self._at_once(self._device, self._grid, (*pointers, self._sizes, *to, single, maps))
                return
            except TooManyBlocks:
                self.together = False
        partial = x.new_empty_strided((self._slices * self._numel,), (1,), dtype=torch.float32)
        args = (at_grad, partial.data_ptr(), self._sizes)
        self._wgrad(self._device, self._grid, (*args, maps) if self._boxes else (at_x, *args))
        reduce = self._reduce_float if self.casts and single else self._reduce
        reduce(self._device, self._blocks, (partial.data_ptr(), out.data_ptr(), self._slices, *to))

    def _pair(self, at_x: int, at_grad: int) -> Words:
        """The tensor maps of both, which are asked for as one: allocations come back to the same addresses."""
        if len(self._pairs) >= 256:  # 256 bytes each
            self._pairs.clear()
        maps = self._map(at_x, False)
        if self._boxes > 1:
            maps += self._map(at_grad, True)
        self._pairs[at_x, at_grad] = maps
        return maps

    def _map(self, address: int, g: bool) -> Words:
        """The tensor map of the input (or those of the output's gradient) at an address."""
        found = self._maps.get((address, g))
        if found is None:
            if len(self._maps) >= 256:  # allocations come back to the same addresses; 128 bytes each
                self._maps.clear()
            assert isinstance(self._tiling, WarpgroupTiling)
            bind(self._device)  # encoding wants a context
            found = self._maps[address, g] = tensor_maps(self._tiling, self._problem, address, g)
        return found


def reduce_shape(t: AnyTiling) -> tuple[int, int, int]:
    """How the second step divides a slice of partial sums: columns of 32 innermost channels, rows, rows of a block."""
    p = t.problem
    innermost, numel = t.channels[0 if isinstance(t, WarpgroupTiling) else 1], math.prod(p.weight_shape)
    return -(-innermost // 32), numel // innermost, t.reduce_rows


def reduce_blocks(t: AnyTiling) -> int:
    """Blocks of the second step."""
    columns, rows, of_block = reduce_shape(t)
    return columns * -(-rows // of_block)


def tensors(t: WarpgroupTiling, p: Problem, g: bool) -> tuple[Tensor5, ...]:
    """The tensors that a tiling's boxes of the input (or of the output's gradient ``g``) are cut from."""
    size = p.out_size if g else p.size
    channels = p.out_channels if g else p.in_channels
    if t.channels_last:
        return (channels_last(p.batch, channels, size, t.element, p.batch_as_width),)
    if t.lines and not g:
        size = (*size[:-2], 1, size[-2] * size[-1])
    if t.lined and g:
        return (dense((t.line, size[0] // t.line, channels, 1, p.batch), t.element),)
    of_rows, of_channels = t.classes if g else (1, 1)
    return tuple(
        of_class(p.batch, channels, size, t.element, (of_rows, j), (of_channels, k)).channels_second()
        for k, j in product(range(of_channels), range(of_rows))
    )


def tensor_maps(t: WarpgroupTiling, p: Problem, address: int, g: bool) -> Words:
    """A ``CUtensorMap`` over each of a tiling's `tensors`, with its box, as 16 words each.

    float32 is rounded to TF32, to nearest even, on its way.
    """
    return b"".join(_tensor_map(t, p, address, g, tensor) for tensor in tensors(t, p, g))


def _tensor_map(t: WarpgroupTiling, p: Problem, address: int, g: bool, tensor: Tensor5) -> Words:
    if g:
        span = t.g_width * t.element if t.channels_last else 0
        return encode(tensor, address, p.dtype, t.g_box, t.g_box_steps, span, rounded=True)
    return encode(tensor, address, p.dtype, t.box, (1,) * 5, 0 if t.turned else t.segment, rounded=True)


# --- candidates ------------------------------------------------------------------------------------------------------


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why this family cannot serve a problem, in a sentence; None when it can."""
    if p.dtype is torch.float64:
        return "tensor cores multiply float64 only by mma.m8n8k4, which this family does not use"
    if gpu.capability < (8, 0):
        return f"tensor cores of compute capability {gpu.capability[0]}.{gpu.capability[1]} lack TF32 and bfloat16"
    if p.batch == 0 or 0 in p.size:
        return "an empty input has no work"
    if p.in_channels // p.groups < 4 and p.groups > 1:
        return f"{p.in_channels // p.groups} input channels per group leave most of a matrix instruction empty"
    return None


def candidates(
    p: Problem,
    gpu: Gpu,
    aligned: bool,
    aligned_g: bool,
    width: int = 0,
    classes: tuple[int, int] = (1, 1),
    general: bool = False,
    lined: bool = False,
) -> Iterator[AnyTiling]:
    """Every tiling worth a look.

    ``aligned``, ``aligned_g``: rows of an NCHW input and output begin at 16 bytes. ``width``: of images so narrow that
    a chunk takes whole rows (`_narrow`); some tilings then serve this width alone. ``classes``: of the rows of an NCHW
    output that are not aligned (`_classes`); some tilings serve these alone. ``general``: those of exported files,
    which stay as they are. ``lined``: whether 1-D rows of the output are whole lines (`_lined`), as some tilings want.
    """
    yield from _warpgroup_candidates(p, gpu, aligned, aligned_g, width, classes, general, lined)
    if not p.batch_as_width:  # whose threads read images as they lie
        yield from _sync_candidates(p, gpu, aligned and p.layout == "nchw")


def _sync_candidates(p: Problem, gpu: Gpu, aligned: bool) -> Iterator[SyncTiling]:
    cin, cout = p.in_channels // p.groups, p.out_channels // p.groups
    for block, taps in product(_blocks(cin, cout), _tap_sets(p)):
        warp = _warps(p, block, math.prod(taps))
        if warp is None:
            continue
        for tile in _tiles(p):
            t = SyncTiling(p, block, taps, tile, aligned, warp)
            if t.shared_bytes <= gpu.shared_bytes and t.k_steps >= t.k_slices and (t.element == 4 or t.strips % 2 == 0):
                yield t


def _narrow(p: Problem) -> int:
    """The width of images whose rows a chunk takes whole, or 0; few, since each is a kernel."""
    width = p.size[-1]
    return width if p.rank > 1 and p.layout == "nchw" and width in (8, 16, 32) else 0


def _lined(p: Problem) -> bool:
    """Whether rows of a 1-D output are whole lines of 128 bytes."""
    return p.rank == 1 and p.layout == "nchw" and p.out_size[0] * p.dtype.itemsize % 128 == 0


def _classes(p: Problem, general: bool = False) -> tuple[int, int]:
    """`WarpgroupTiling.classes` of an NCHW output; (1, 1) where rows are aligned, or classes too many.

    ``general``: (1, 1), since they are a size's.
    """
    found = None
    if p.layout == "nchw" and not general:
        found = alignment_classes(p.batch, p.out_channels, p.out_size, p.dtype.itemsize)
    return found if found is not None and math.prod(found) <= MAX_CLASSES else (1, 1)


def _warpgroup_candidates(
    p: Problem,
    gpu: Gpu,
    aligned: bool,
    aligned_g: bool,
    width: int,
    classes: tuple[int, int],
    general: bool,
    lined: bool,
) -> Iterator[WarpgroupTiling]:
    last = p.layout == "channels_last"
    if gpu.arch != "90a" or p.precision == "ieee":
        return
    cin, cout = p.in_channels // p.groups, p.out_channels // p.groups
    # The tensor copy engine wants pitches of whole 16 bytes, and so must a box begin where its rows are swizzled: a
    # group's that begins off 16 bytes is an illegal instruction (NOTES: 2 groups of 4 float16 channels).
    if (p.in_channels if p.groups == 1 else cin) % (16 // p.dtype.itemsize) if last else not aligned:
        return
    # Where a position meets many outputs, few output channels by many input channels read the least.
    steep = math.prod(p.stride) >= 8
    boxed = not (last or general) and aligned_g
    widths = _widths(cin, steep or boxed, rows_of_32=last and p.dtype.itemsize == 2)
    sets = [(taps, False) for taps in _tap_sets(p, 36)] + [(taps, True) for taps in _column_sets(p)]
    shared_rows = [(subs, False) for subs in (1, 2, 4)] + [(subs, True) for subs in (2, 4, 8) if boxed]
    for ci, (groups, split_m), (subs, interleaved), (taps, stacked) in product(
        widths, ((2, 1), (2, 2), (3, 1), (3, 3)), shared_rows, sets
    ):
        if (subs > 1 and cout > 64 // subs and not (steep or interleaved)) or (
            split_m > 1 and cout <= 64 // subs * (split_m - 1)
        ):
            continue
        if interleaved and (stacked or taps[2] % subs or p.stride[-1] == 1):
            continue
        block = ci, 64 // subs * split_m
        base = WarpgroupTiling(
            p, block, taps, (1, 1, 1, 8), aligned, groups, split_m, subs, stacked=stacked, interleaved=interleaved
        )
        if base.accumulators > (160 if groups == 2 else 104):
            continue
        # NOTES: by 160 of 320 channels 66 -> 82 us, by 96 of 192 51 -> 64 (by the model 58 and 48); by 80 50 -> 41.
        if base.turned and ci >= 96 and ci % 64:
            continue
        if base.entries * subs * (groups // split_m) > 1.5 * base.set_taps:
            continue
        for tile in _tiles(p, 32 if boxed else 64):
            # Rows of 128 bytes rather than of 32: the tensor copy engine takes as long for either.
            lines = tile[3] == width and tile[2] > 1 and width * p.dtype.itemsize < 128
            t = replace(base, tile=tile, aligned_g=aligned_g and not last, lines=lines, classes=classes)
            if t.classed and not t.classes_fit:
                t = replace(t, classes=(1, 1))
            if lined and interleaved and not t.box_g:
                t = replace(t, lined=True)
            if (t.aligned_g or t.classed or t.turned or p.batch_as_width) and not t.box_g:
                continue
            if ((not last or t.turned) and t.segment < 32) or (t.element == 2 and t.strips % 2):
                continue
            if last and max(tile) > 256:
                continue
            if stacked and not t.stackable:
                continue
            if (found := _staged(t, gpu)) is not None:
                yield found
        if last and not (general or stacked or p.batch_as_width):
            # At any size; `boxed` has the box of one.
            for pixels in _GAPLESS:
                t = replace(base, tile=(1, 1, 1, 1), gapless=pixels)
                if t.box_g and t.g_one_box and t.segment >= 32 and (found := _staged(t, gpu)) is not None:
                    yield found


def _staged(t: WarpgroupTiling, gpu: Gpu) -> WarpgroupTiling | None:
    """A tiling with as many stages as fit, or None where two do not."""
    stages = min(4, (gpu.shared_bytes - t.raw_bytes - 16) // (t.stage_bytes + 16))
    return replace(t, stages=stages) if stages >= 2 else None


def boxed(t: AnyTiling, p: Problem) -> AnyTiling:
    """A tiling of a layer with a problem's own chunks: `gapless` ones have the box that needs the fewest of them."""
    if not isinstance(t, WarpgroupTiling) or not t.gapless:
        return t
    return replace(t, tile=fullest(p.batch, p.size, p.stride, t.gapless)[1])


def _chunks(t: AnyTiling, p: Problem) -> int:
    """Chunks of a problem."""
    if isinstance(t, WarpgroupTiling) and t.gapless:
        return fullest(p.batch, p.size, p.stride, t.gapless)[0]
    return math.prod(t.counts(p))


def _widths(cin: int, steep: bool, rows_of_32: bool) -> tuple[int, ...]:
    """Input channels that a block of `WarpgroupTiling` may have.

    ``rows_of_32``: boxes bring pixels' channels (channels_last of 16 bits), 32 or 64 at a time, or 16 at a time slowly.
    """
    found: tuple[int, ...] = (32,) if cin <= 32 else (64,) if cin <= 64 else (64, 128)
    if steep and cin > 128:
        found += (256,)
    # And as wide as sums allow, where fewer columns then have no channel (NOTES: nnunet's 320 by 160, kb61's 48 by 48;
    # but 80 in bfloat16 channels_last by 128 25.5 us, by 80 27.7, by 96 29).
    blocks = -(-cin // _MOST_WIDTH)
    even = -(-cin // (16 * blocks)) * 16
    if cin <= 32 or even in found or even * blocks >= -(-cin // found[-1]) * found[-1]:
        return found
    if rows_of_32 and even > 64 and even % 32:
        return found
    return (*found, even)


def _blocks(cin: int, cout: int) -> Iterator[tuple[int, int]]:
    for m, n in product((16, 32, 64, 128), (8, 16, 32, 64, 128)):
        if (m < 2 * cin or m == 16) and (n < 2 * cout or n == 8) and 4 * m * n >= min(cin, 64) * min(cout, 64):
            yield m, n


def _tap_sets(p: Problem, most: int = 36) -> tuple[Triple, ...]:
    """Boxes of neighbouring taps."""
    d, h, w = (1,) * (3 - p.rank) + p.kernel
    wide = [v for v in parts(w) if v <= 9]
    found = [(1, 1, v) for v in wide]
    if max(wide) == w:
        found += [(1, v, w) for v in parts(h)[1:]]
        found += [(v, h, w) for v in parts(d)[1:]]
    if 1 not in wide or w == 2:
        found += [(1, v, 1) for v in parts(h)]
    return tuple(dict.fromkeys(t for t in found if math.prod(t) <= most))


def _column_sets(p: Problem) -> tuple[Triple, ...]:
    """Boxes of columns of taps, whose rows of x an instruction may take together."""
    d, h, w = (1,) * (3 - p.rank) + p.kernel
    heights = [v for v in parts(h) if v > p.stride[-2]] if p.rank > 1 and p.dilation[-2] == 1 else []
    found = [(1, v, u) for v in heights for u in parts(w)]
    found += [(v, h, u) for v in parts(d)[1:] for u in (1, w) if h in heights]
    return tuple(dict.fromkeys(t for t in found if math.prod(t) <= 36))


def _warps(p: Problem, block: tuple[int, int], taps: int) -> tuple[int, int] | None:
    """The warp's share of a block with the fewest reads of fragments that leaves its sums in registers."""
    most = _ACCUMULATORS // 2 if p.precision == "ieee" else _ACCUMULATORS
    best: tuple[float, tuple[int, int]] | None = None
    for m, n in product((16, 32, 64), (8, 16, 32, 64)):
        if block[0] % m or block[1] % n or taps * m * n // 32 > most:
            continue
        warps = block[0] // m * (block[1] // n)
        if warps > WARPS or WARPS % warps:
            continue
        reads = (m / 4 + taps * n / 4) / (m * n * taps)
        if best is None or reads < best[0]:
            best = reads, (m, n)
    return None if best is None else best[1]


def _tiles(p: Problem, least: int = 64) -> tuple[tuple[int, int, int, int], ...]:
    """Chunks; ``least``: positions of one in 1-D."""
    if p.rank == 1:
        return tuple((n, 1, 1, w) for n in (1, 2, 4) for w in (8, 16, 32, 64, 128, 256) if least <= n * w <= 512)
    shapes = [(n, 1, h, w) for n in (1, 2, 4) for h in (1, 2, 4, 8) for w in (8, 16, 32, 64) if 32 <= n * h * w <= 256]
    if p.rank == 3:
        shapes += [(1, d, h, w) for d in (2, 4) for h in (2, 4, 8) for w in (8, 16, 32) if 32 <= d * h * w <= 256]
    return tuple(shapes)


# --- the cost model --------------------------------------------------------------------------------------------------


def _chunk_clocks(t: AnyTiling, straddling: float = 1.0) -> tuple[float, str]:
    """(clocks of a chunk on its multiprocessor, what takes most of them); all sizes of one `_straddling` have these."""
    return _warpgroup_clocks(t, straddling) if isinstance(t, WarpgroupTiling) else _sync_clocks(t)


def _conflict(t: AnyTiling) -> float:
    """Passes of shared memory for a warp's reads of g."""
    step = t.steps[2]
    if isinstance(t, WarpgroupTiling) and t.interleaved:
        return t.conflicts * (1.0 if t.element == 4 else 2.0)
    if t.channels_last:
        if isinstance(t, WarpgroupTiling) and t.parted:
            return 1.0
        return 1.0 if step % 2 or (isinstance(t, WarpgroupTiling) and t.turned and step % 4) else 2.0
    if t.element == 2:
        if isinstance(t, WarpgroupTiling) and t.shared_words:
            return t.run_words / t.run * (1.0 if step == 1 else 1.25)
        return 2.0 if step == 1 else 2.5
    return 1.0 if step % 2 else 2.0 if step % 8 else 4.0


def _ragged(t: AnyTiling, channels: int) -> float:
    """What copying single elements costs, where channels_last pixels do not begin at 16 bytes."""
    return 6.0 if t.channels_last and channels % t.vec else 1.0


def _sync_clocks(t: SyncTiling) -> tuple[float, str]:
    fragments = t.warp[0] // 16 * (t.warp[1] // 8)
    matrix = t.k_steps * t.warps * t.set_taps * fragments * (3 if t.promote else 1) * _MMA
    reads = t.k_steps * t.warps * (t.warp[0] / 4 + t.set_taps * t.warp[1] / 4 * _conflict(t))
    shared = reads * _LOAD[0] + t.copied_units * 16 / 128
    l2 = t.copied_units * 16 / _L2 * max(_ragged(t, c) for c in t.channels)
    parts = {"tensor cores": matrix, "shared memory": shared, "L2": l2}
    bound = max(parts, key=lambda name: parts[name])
    total = max(parts.values()) + 0.25 * (sum(parts.values()) - max(parts.values())) + t.copied_units * _ISSUE
    if not t.channels_last:
        total *= _SYNC_NCHW if t.element == 4 else _SYNC_NCHW_16
    return total + _CHUNK[0] + t.k_steps / t.k_slices * _STEP, bound


def _boxed_clocks(t: WarpgroupTiling, straddling: float) -> tuple[float, str]:
    """`_chunk_clocks` of NCHW where one box brings g, neither stacked nor classed."""
    steps = t.k_steps * t.entries * t.warpgroups
    copied = t.g_units * 16 + t.x_bytes
    read = steps * (16 * _conflict(t) + t.block[0] / 4)
    parts = {
        "tensor cores": _TENSOR * steps * t.block[0] / 2 + _INSTRUCTION * steps / t.warpgroups,
        "shared memory": _READ * read + _WRITTEN * copied / 128,
        "copies": _BOXED_LINE * t.lines_of_boxes * straddling,
        "L2": copied / _BOXED_L2,
    }
    bound = max(parts, key=lambda name: parts[name])
    total = sum(part**_TOGETHER for part in parts.values()) ** (1 / _TOGETHER) + _BESIDE
    more = (_TWO_STAGES[t.element] if t.stages == 2 else 0.0) + _SHORT.get(t.segment, 0.0)
    return total * (1.0 + more + (_DEEP if t.taps[0] > 1 else 0.0)), bound


def _last_clocks(t: WarpgroupTiling) -> tuple[float, str]:
    """`_chunk_clocks` of channels_last where boxes bring g by planes of it."""
    columns = t.k_steps * t.entries * t.warpgroups * t.block[0] / 2
    fragments = t.k_steps * t.entries * t.warpgroups
    if t.stacked:
        fragments = t.row * t.element // 32 * t.row_steps * t.warpgroups
    copied = t.g_units * 16 + t.x_bytes
    instruction = _LAST_INSTRUCTION[t.element] * (_LAST_SHARED if t.a_shared else 1.0)
    shape = (_LAST_STACKED if t.stacked else 1.0) * (_LAST_NARROW if t.block[0] <= 64 else 1.0)
    read = fragments * 16 * _conflict(t) + columns / 2 * (_LAST_READ_STACKED if t.stacked else 1.0)
    parts = {
        "tensor cores": _LAST_TENSOR * shape * columns + instruction * fragments / t.warpgroups,
        "shared memory": _LAST_READ * read + _LAST_WRITTEN * copied / 128 + _LAST_TURNED * t.x_bytes * t.turned / 128,
        "copies": _LAST_LINE * t.lines_of_boxes + _LAST_BOX * t.boxes,
        "L2": copied / _LAST_L2,
    }
    bound = max(parts, key=lambda name: parts[name])
    total = sum(part**_LAST_TOGETHER for part in parts.values()) ** (1 / _LAST_TOGETHER) + _LAST_BESIDE
    return total * (1.0 + _LAST_SETS * math.log2(t.sets[2]) + _LAST_GAPLESS * (t.gapless > 0)), bound


def _warpgroup_clocks(t: WarpgroupTiling, straddling: float) -> tuple[float, str]:
    if t.channels_last and t.box_g:
        return _last_clocks(t)
    if t.box_g and not (t.stacked or t.classed):
        return _boxed_clocks(t, straddling)
    steps = t.k_steps * t.entries * t.warpgroups
    columns = steps * t.block[0] / 2  # clocks of the tensor cores for all of them
    if t.stacked:
        fragments = t.tile[3] * t.element / 32 * t.row_steps * t.warpgroups
        stretches = t.tile[3] * t.element / 32 / t.stretch
        matrix = columns * _STACKED[0] + fragments * _STACKED[1]
    else:
        fragments, stretches = steps, t.k_steps * t.entries / t.stretch
        matrix = columns * _WGMMA
    shared = (fragments * 16 * _conflict(t) + columns / 2) * _LOAD[1] + (t.g_units * 16 + t.x_bytes) / 128
    if t.box_g:
        l2 = (t.g_units * 16 + t.x_bytes) / _BOX_L2
        # What the engine takes for a line shows where the tensor cores wait for nothing else.
        copies = t.lines_of_boxes * _LINE
    else:
        l2 = 0.0  # what copies take is more
        copies = t.g_units * _COPY[t.warpgroups > 2] * _ragged(t, t.channels[1])
        copies += _CHUNK[1] + (t.boxes - 1) * _BOX_BESIDE + (0.0 if t.channels_last else t.g_rows * t.block[1] * _ROW)
        if t.stacked:
            copies = max(copies, t.lines_of_boxes * _LINE)
    parts = {"tensor cores": matrix, "shared memory": shared, "L2": l2, "copies": copies}
    bound = max(parts, key=lambda name: parts[name])
    total = max(parts.values()) + _OVERLAP[not t.box_g] * (sum(parts.values()) - max(parts.values()))
    drain = _DRAIN[t.stacked or t.classed]
    total += fragments / t.warpgroups * _WARPGROUP_STEP / t.warpgroups + stretches * drain
    total += _CHUNK[2] if t.stacked and t.box_g else 0.0
    if t.stacked or t.classed:  # with two stages a chunk's copies begin when the one before is done with
        total = max(total, (copies + _LATENCY) / (t.stages - 1))
    total *= 1.0 + _IMAGES * math.log2(t.tile[0])
    return total * (1.0 + _SETS * math.log2(t.sets[2])), bound


def _ends(t: AnyTiling, general: bool) -> Ends:
    if general:
        return _FILE_ENDS
    return _LAST_ENDS if t.channels_last else _NCHW_ENDS


def block_seconds(gpu: Gpu) -> float:
    """What a block of an exported file takes beside its chunks, by the model."""
    return _FILE_ENDS.block / gpu.clock


def _whole(
    t: AnyTiling, chunk: tuple[float, str], p: Problem, gpu: Gpu, at_once: bool = True, general: bool = False
) -> tuple[float, str, int]:
    """(seconds, what bounds them, splits of K).

    ``at_once``: blocks may add up their sums themselves; ``general``: of an exported file's kernel.
    """
    clocks, bound = chunk
    chunks = _chunks(t, p)
    numel = math.prod(p.weight_shape)
    found: tuple[float, str, int] | None = None
    most = max(1, min(chunks, _MAX_SLICE_BYTES // (4 * numel * t.k_slices)))
    options = {min(most, max(1, gpu.multiprocessors * k // t.tiles)) for k in (1, 2, 3, 4)} | {1}
    memory = (math.prod(p.input_shape) + math.prod(p.output_shape)) * t.element / gpu.bandwidth
    ends = _ends(t, general)
    own = ends.sum * t.sums_bytes if isinstance(t, WarpgroupTiling) else 0.0
    scattered = ends.scattered * numel * t.element / _CACHE
    for splits in options:
        per_split = -(-chunks // splits)
        splits = -(-chunks // per_split)
        waves = -(-t.tiles * splits // gpu.multiprocessors)
        work = (waves * per_split * clocks + (ends.block + own) * (1 + (waves - 1) * ends.wave)) / gpu.clock
        seconds = max(work, memory) + ends.memory * min(work, memory)
        if at_once and _alone(t, splits, gpu):
            fixed, passes = ends.alone
            seconds += fixed + passes * numel * t.element / _CACHE + scattered
        elif at_once and ((clustered := _cluster(t, splits, gpu) > 1) or _together(t, splits, gpu)):
            assert isinstance(t, WarpgroupTiling)
            fixed, passes = ends.cluster if clustered else ends.together
            seconds += fixed + passes * t.tiles * splits * t.sums_bytes / _CACHE + scattered
        else:
            fixed, passes = ends.steps
            seconds += fixed + passes * splits * t.k_slices * numel * 4 / _CACHE
        if found is None or seconds < found[0]:
            found = seconds, "bytes" if memory > work else bound, splits
    assert found is not None
    return found


def _straddling(p: Problem) -> float:
    """Lines that boxes' rows of a problem touch, of those that they would where rows begin at lines."""
    row = p.size[-1] * p.dtype.itemsize
    return _STRADDLING.get(math.gcd(row, 64), 1.0) if p.layout == "nchw" and row >= _LEAST_STRADDLING else 1.0


def choose(p: Problem, gpu: Gpu, general: bool = False) -> Choice | str:
    """The cheapest tiling by the model, or the sentence why tensor cores cannot serve the problem.

    ``general``: of those that serve every size of the input.
    """
    return _choose(p, gpu, general)


@lru_cache(maxsize=4096)
def _choose(p: Problem, gpu: Gpu, general: bool) -> Choice | str:
    refused = refusal(p, gpu)
    if refused:
        return refused
    best: tuple[float, str, int, AnyTiling] | None = None
    aligned, aligned_g = (size[-1] * p.dtype.itemsize % 16 == 0 for size in (p.size, p.out_size))
    width, classes = 0 if general else _narrow(p), _classes(p, general)
    straddling = 1.0 if general else _straddling(p)
    for t, clocks in _tilings(_any_size(p), gpu, aligned, aligned_g, width, classes, general, _lined(p), straddling):
        if general and isinstance(t, WarpgroupTiling) and t.row_columns not in COMMON_WIDTHS:
            continue  # files print the common instructions, and stay as they are
        seconds, bound, splits = _whole(t, clocks, p, gpu, general=general)
        if best is None or seconds < best[0]:
            best = seconds, bound, splits, t
    if best is None:
        return f"no tile of this layer with its halo fits in {gpu.shared_bytes // 1024} KB of shared memory"
    seconds, bound, splits, t = best
    return Choice(boxed(t, p), p, gpu, splits, seconds, bound)


def _any_size(p: Problem) -> Problem:
    """The layer at one size for all, so that its tilings and kernels are found again at the next size."""
    size = tuple(1024 + 2 * pad // s for pad, s in zip(p.padding, p.stride))
    return p.with_(batch=1, size=size, bias=False, pass_="grad-weight")


@lru_cache(maxsize=256)
def _tilings(
    layer: Problem,
    gpu: Gpu,
    aligned: bool,
    aligned_g: bool,
    width: int,
    classes: tuple[int, int],
    general: bool,
    lined: bool,
    straddling: float,
) -> tuple[tuple[AnyTiling, tuple[float, str]], ...]:
    """A layer's tilings with the clocks of their chunks."""
    every = candidates(layer, gpu, aligned, aligned_g, width, classes, general, lined)
    return tuple((t, _chunk_clocks(t, straddling)) for t in every)
