"""The grad-weight family on tensor cores: candidates, and a choice made ready for a device.

The tilings' arithmetic is in `wgrad_tiling`, `wgrad_boxes` and `wgrad_warpgroups`, the cost model in `wgrad_costs`, the
kernels are ``kernels/wgrad_wgmma.cu`` (sm_90a) and ``kernels/wgrad.cu`` (mma.sync): GEMMs over the pixels, whose
accumulators are a tile of input channels x output channels x neighbouring taps. K is split over blocks (and warps);
partial sums are added in a fixed order, in a second step, or by their blocks: as a cluster where splits are few, else
together, where all of them run at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product

import torch
from torch import Tensor

from upconv.cuda import jit
from upconv.cuda.boxes import Tensor5, Words, alignment_classes, channels_last, dense, encode, of_class, parts
from upconv.cuda.gpu import Gpu
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.launch import Counters, Launcher, TooManyBlocks, as_run, bind
from upconv.cuda.wgrad_boxes import MAX_CLASSES
from upconv.cuda.wgrad_costs import (
    AnyTiling,
    alone,
    boxed,
    chunk_clocks,
    clustered,
    hands_over,
    least,
    straddling_of,
    together,
    whole,
)
from upconv.cuda.wgrad_tiling import WARPS, SyncTiling, Triple
from upconv.cuda.wgrad_warpgroups import COMMON_WIDTHS, WarpgroupTiling
from upconv.derived import settled, varied
from upconv.problem import Problem

MOST_ABREAST = 32  # pixels along a side of images that `batches` tries side by side
_ACCUMULATORS = 144  # registers of a thread of the mma.sync kernel; beside them fragments and addresses
_RUNS = 8  # warps of a block of the second step

_MOST_WIDTH = 160  # input channels of a block that needs two accumulators of 64 rows
_SIZES = "i" * 12  # of the kernels' parameters: images, sizes, counts of chunks
_CHUNK_BOX = "i" * 4  # and of `gapless` ones: a chunk's box
_GAPLESS = 64, 96, 128, 192, 256  # positions of their chunks


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
    """Of the layer at any size, whose own size and batch mean nothing; a `gapless` one has this problem's box."""
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
        gapless = isinstance(t, WarpgroupTiling) and t.gapless
        shape += f" of {gapless} without gaps" if gapless else ""
        adding = ""
        if self.hands_over:
            adding = " of blocks that hand over half of their sums"
        elif self.cluster > 1:
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
        return clustered(self.tiling, self.splits, self.gpu)

    @property
    def hands_over(self) -> bool:
        """Whether the blocks of two splits exchange sums while they multiply: all at once or, in a graph that is
        captured, as a `cluster`, to the same bits. Two steps give other bits."""
        return hands_over(self.tiling, self.splits, self.gpu)

    @property
    def together(self) -> bool:
        """Whether the splits' blocks, which are no cluster, may add up their sums: all run at once."""
        return together(self.tiling, self.splits, self.gpu)

    @property
    def alone(self) -> bool:
        """Whether there is one split, whose blocks write the weight themselves."""
        return alone(self.tiling, self.splits, self.gpu)

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all input sizes that share the tile (and are cut into as few splits).

        The first has both steps; the second, where there is a `cluster` or they add up `together` or are `alone`, needs
        one; so does the third, where the cluster `hands_over` and all blocks run at once.
        """
        p, t = self.problem, self.tiling
        label = f"wgrad {str(p).split(' on ')[0]} {p.precision} {p.layout}"
        steps = Unit(label, jit.source(t.file, t.macros()), ("wgrad", "reduce"))
        if not isinstance(t, WarpgroupTiling) or not (self.cluster > 1 or self.together or self.alone):
            return (steps,)
        kind = "alone" if self.alone else "together" if self.together else f"by clusters of {self.cluster}"
        macros = t.macros(self.cluster, self.together, self.alone, self.hands_over)
        one = Unit(f"{label} {kind}", jit.source(t.file, macros), ("wgrad",))
        if not self.hands_over:
            return steps, one
        macros = t.macros(together=True, handover=True)
        return steps, one, Unit(f"{label} together", jit.source(t.file, macros), ("wgrad",))

    def prepare(self, device: int) -> Prepared:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return Prepared(self, device)


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
        self._hands_over = choice.hands_over
        self.together = (choice.together or self._hands_over) and gpu_of(device).multiprocessors >= self._grid
        """Whether `run` has another way for calls that are ``lasting``, to the same bits."""
        self._sums = 0
        if isinstance(t, WarpgroupTiling):
            self._sums = self._grid * (t.handed_bytes if self._hands_over else t.sums_bytes) // 4
        if self.together:
            self._counters = Counters(device, 2 * t.tiles)
            _ = self._at_once
        else:
            self.load()

    @property
    def loaded(self) -> bool:
        """Whether the kernels for every call are."""
        if "_one_step" not in vars(self):
            return False
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
        return self._launcher(self._choice.sources()[-1], "wgrad", codes, cooperative=True)

    @cached_property
    def _one_step(self) -> Launcher | None:
        """The kernel that needs no second step, of one split or by clusters; None where there is none, or where
        clusters take more waves of blocks than two steps, which add up in the same order. Pairs that hand over may take
        turns: two steps would give other bits."""
        choice = self._choice
        if choice.cluster == 1 and not choice.alone:
            return None
        codes = f"{'PPP' if self._hands_over else 'PP'}({self._codes})qqqi({'q' * 16 * self._boxes})"
        launcher = self._launcher(choice.sources()[1], "wgrad", codes)
        if choice.alone or self._hands_over:
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
        if lasting and self.together:
            sums = x.new_empty_strided((self._sums,), (1,), dtype=torch.float32)
            pointers = (at_grad, out.data_ptr(), sums.data_ptr(), self._counters.address(x))
            try:
                self._at_once(self._device, self._grid, (*pointers, self._sizes, *to, single, maps))
                return
            except TooManyBlocks:  # on this stream, of a part of the GPU; the same sums in the same order follow
                pass
        if self._one_step is not None:
            given: tuple[int, ...] = (at_grad, out.data_ptr())
            if self._hands_over:
                sums = x.new_empty_strided((self._sums,), (1,), dtype=torch.float32)
                given = (*given, sums.data_ptr())
            self._one_step(self._device, self._grid, (*given, self._sizes, *to, single, maps))
            return
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
    if t.x_one_box and not g:
        w, pixels = size[-1], math.prod(size)
        pitch = channels * t.element
        # Strides need not grow: the engine asks for multiples of 16 bytes.
        dims = t.x_width, w, pixels // w, p.batch, channels // t.x_width
        return (Tensor5(0, dims, (pitch, w * pitch, pixels * pitch, t.x_width * t.element)),)
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
    output that are not aligned (`_classes`); some tilings serve these alone. ``general``: those of exported files, of
    which NCHW's stay as they are. ``lined``: whether 1-D rows of the output are whole lines (`_lined`), as some want.
    """
    yield from _warpgroup_candidates(p, gpu, aligned, aligned_g, width, classes, general, lined)
    if not p.batch_as_width:  # whose threads read images as they lie
        yield from _sync_candidates(p, gpu, aligned and p.layout == "nchw")


def _sync_candidates(p: Problem, gpu: Gpu, aligned: bool) -> Iterator[SyncTiling]:
    cin, cout = p.in_channels // p.groups, p.out_channels // p.groups
    layer = settled(SyncTiling(p, (16, 8), (1, 1, 1), (1, 1, 1, 8), aligned), "problem")
    for block, taps in product(_blocks(cin, cout), _tap_sets(p)):
        warp = _warps(p, block, math.prod(taps))
        if warp is None:
            continue
        base = settled(varied(layer, block=block, taps=taps, warp=warp), "problem", "block", "taps")
        for tile in _tiles(p):
            t = varied(base, tile=tile)
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
    most = 8 if last and not general else 4  # NOTES: kb71 bfloat16 channels_last 205 us with 4, 187 with 5
    layer = settled(WarpgroupTiling(p, (64, 64), (1, 1, 1), (1, 1, 1, 8), aligned), "problem")
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
        base = varied(
            layer, block=block, taps=taps, subs=subs, stacked=stacked, interleaved=interleaved,
            warpgroups=groups, split_m=split_m,
        )  # fmt: skip
        if base.accumulators > (160 if groups == 2 else 104):
            continue
        # NOTES: by 160 of 320 channels 66 -> 82 us, by 96 of 192 51 -> 64 (by the model 58 and 48); by 80 50 -> 41.
        if base.turned and ci >= 96 and ci % 64:
            continue
        if base.entries * subs * (groups // split_m) > 1.5 * base.set_taps:
            continue
        base = settled(base, "problem", "block", "taps")
        for tile in _tiles(p, 32 if boxed else 64):
            # Rows of 128 bytes rather than of 32: the tensor copy engine takes as long for either.
            lines = tile[3] == width and tile[2] > 1 and width * p.dtype.itemsize < 128
            t = varied(base, tile=tile, aligned_g=aligned_g and not last, lines=lines, classes=classes)
            if t.classed and not t.classes_fit:
                t = varied(t, classes=(1, 1))
            if lined and interleaved and not t.box_g:
                t = varied(t, lined=True)
            if (t.aligned_g or t.classed or t.turned or p.batch_as_width) and not t.box_g:
                continue
            if ((not last or t.turned) and t.segment < 32) or (t.element == 2 and t.strips % 2):
                continue
            if last and max(tile) > 256:
                continue
            if t.x_joinable and not general:
                t = varied(t, x_one_box=True)
            if stacked and not t.stackable:
                continue
            if (found := _staged(t, gpu, most)) is not None:
                yield found
        if last and not (general or stacked or p.batch_as_width):
            # At any size; `boxed` has the box of one.
            for pixels in _GAPLESS:
                t = varied(base, tile=(1, 1, 1, 1), gapless=pixels)
                if t.box_g and t.g_one_box and t.segment >= 32 and (found := _staged(t, gpu, most)) is not None:
                    yield found


def _staged(t: WarpgroupTiling, gpu: Gpu, most: int) -> WarpgroupTiling | None:
    """A tiling with as many stages as fit, or None where two do not."""
    stages = min(most, (gpu.shared_bytes - t.raw_bytes - 16) // (t.stage_bytes + 16))
    return varied(t, stages=stages) if stages >= 2 else None


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


# --- the choice ------------------------------------------------------------------------------------------------------


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
    straddling = 1.0 if general else straddling_of(p)
    for t, clocks in _tilings(_any_size(p), gpu, aligned, aligned_g, width, classes, general, _lined(p), straddling):
        if general and isinstance(t, WarpgroupTiling) and t.row_columns not in COMMON_WIDTHS:
            continue  # files print the common instructions, and stay as they are
        if best is not None and least(t, clocks[0], p, gpu) > best[0]:
            continue
        seconds, bound, splits = whole(t, clocks, p, gpu, general=general)
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
    return tuple((t, chunk_clocks(t, straddling)) for t in every)
