"""The grad-weight family on tensor cores: candidates, and a choice made ready for a device.

The tilings' arithmetic is in `wgrad_tiling`, `wgrad_boxes` and `wgrad_warpgroups`, the cost model in `wgrad_costs`, the
kernels are ``kernels/wgrad_wgmma.cu`` (sm_90a) and ``kernels/wgrad.cu`` (mma.sync): GEMMs over the pixels, whose
accumulators are a tile of input channels x output channels x neighbouring taps. K is split over blocks (and warps);
partial sums are added in a fixed order, in a second step, or by their blocks: as a cluster where splits are few, else
together, where all of them run at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product

import torch
from torch import Tensor

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Tensor5, Words, channels_last, encode, of_class
from upconv.cuda.compile.launch import Counters, Launcher, TooManyBlocks, as_run, bind
from upconv.cuda.gpu import Gpu
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.rearrange import batches
from upconv.cuda.wgrad.wgrad_costs import (
    AnyTiling,
    alone,
    boxed,
    clustered,
    least,
    together,
    whole,
)
from upconv.cuda.wgrad.wgrad_search import promising, refusal
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import COMMON_WIDTHS, WarpgroupTiling
from upconv.problem import Problem

WIDEST = 32  # pixels along a side of images that `batches` tries side by side
_RUNS = 8  # warps of a block of the second step
_SIZES = "i" * 12  # of the kernels' parameters: images and sizes, of the input and of the output, and counts of chunks


@dataclass(frozen=True)
class Unit:
    """A source to be compiled and its kernels' names, without those that only autocast takes."""

    label: str
    source: str
    entries: tuple[str, ...]


@dataclass(frozen=True)
class Choice(family.Defaults):
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
        return clustered(self.tiling, self.splits, self.gpu)

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
        one.
        """
        p, t = self.problem, self.tiling
        label = f"wgrad {str(p).split(' on ')[0]} {p.precision} {p.layout}"
        steps = two_steps(label, t)
        if not isinstance(t, WarpgroupTiling) or not (self.cluster > 1 or self.together or self.alone):
            return (steps,)
        kind = "alone" if self.alone else "together" if self.together else f"by clusters of {self.cluster}"
        ways = {"cluster": self.cluster, "together": self.together, "alone": self.alone}
        return steps, one_step(f"{label} {kind}", t, **ways)

    def prepare(self, device: int) -> Prepared:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return Prepared(self, device)


def two_steps(label: str, t: AnyTiling) -> Unit:
    """A tiling's kernel that writes partial sums, and those that add them."""
    reduces = ("reduce", "reduce_float") if t.element == 2 else ("reduce",)
    names = f"{t.entry}<{jit.CONFIG}>", *(f"{name}<{t.struct}<{jit.CONFIG}>>" for name in reduces)
    return Unit(label, jit.instance(t.file, t.constants(), names), (t.entry, "reduce"))


def one_step(label: str, t: WarpgroupTiling, **ways: int) -> Unit:
    """A tiling's kernel that writes the weight, in one of the ways of `WarpgroupTiling.constants`."""
    entry = "wgrad_cluster" if ways.get("cluster", 1) > 1 else "wgrad_whole"
    return Unit(label, jit.instance(t.file, t.constants(**ways), (f"{entry}<{jit.CONFIG}>",)), (entry,))


class Prepared(family.PreparedWeight):
    """A choice's kernels, loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        t, p = choice.tiling, choice.problem
        self._device, self._tiling, self._problem = device, t, p
        self._boxes = 0 if isinstance(t, SyncTiling) else 1 + t.box_g * math.prod(t.classes)
        self.casts = p.dtype.itemsize == 2
        counts = t.counts(p)
        chunks = math.prod(counts)
        full = (1,) * (3 - p.rank)
        # A `gapless` kernel is told of a chunk's box in place of the input, which boxes bring.
        gapless = isinstance(t, WarpgroupTiling) and t.gapless
        images = t.tile if gapless else (p.batch, *full, *p.size)
        sizes = (*images, *full, *p.out_size, *counts[1:], chunks, -(-chunks // choice.splits))
        self._sizes, self._shape = as_run(_SIZES, sizes), p.weight_shape
        self._grid = t.tiles * choice.splits
        self._slices = choice.splits * t.k_slices
        self._maps: dict[tuple[int, bool], Words] = {}
        self._pairs: dict[tuple[int, int], Words] = {}
        self._numel = math.prod(p.weight_shape)
        self._blocks = reduce_blocks(t)
        self._choice = choice
        self.together = choice.together and gpu_of(device).multiprocessors >= self._grid
        """Whether `run` has another way for calls that are ``lasting``, to the same bits."""
        self._sums = 0
        if isinstance(t, WarpgroupTiling):
            self._sums = self._grid * t.sums_bytes // 4
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
        if entry == unit.entries[0]:
            return Launcher(kernel, self._tiling.threads, self._tiling.shared_bytes, codes, cooperative)
        return Launcher(kernel, 32 * _RUNS, 0, codes)

    @cached_property
    def _wgrad(self) -> Launcher:
        codes = f"PP({_SIZES})({'q' * 16 * self._boxes})" if self._boxes else f"PPP({_SIZES})"
        unit = self._choice.sources()[0]
        return self._launcher(unit, unit.entries[0], codes)

    @cached_property
    def _reduce(self) -> Launcher:
        return self._launcher(self._choice.sources()[0], "reduce", "PPiqqq")

    @cached_property
    def _reduce_float(self) -> Launcher:
        return self._launcher(self._choice.sources()[0], "reduce_float", "PPiqqq")

    def _whole(self, unit: Unit, cooperative: bool = False) -> Launcher:
        """A kernel that writes the weight."""
        codes = f"PPPP({_SIZES})qqqi({'q' * 16 * self._boxes})"
        return self._launcher(unit, unit.entries[0], codes, cooperative)

    @cached_property
    def _at_once(self) -> Launcher:
        return self._whole(self._choice.sources()[-1], cooperative=True)

    @cached_property
    def _one_step(self) -> Launcher | None:
        """The kernel that needs no second step, of one split or by clusters; None where there is none, or where
        clusters take more waves of blocks than two steps, which add up in the same order."""
        choice = self._choice
        if choice.cluster == 1 and not choice.alone:
            return None
        launcher = self._whole(choice.sources()[1])
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
        if lasting and self.together:
            sums = x.new_empty_strided((self._sums,), (1,), dtype=torch.float32)
            pointers = (at_grad, out.data_ptr(), sums.data_ptr(), self._counters.address(x))
            try:
                self._at_once(self._device, self._grid, (*pointers, self._sizes, *to, single, maps))
                return
            except TooManyBlocks:  # on this stream, of a part of the GPU; the same sums in the same order follow
                pass
        if self._one_step is not None:
            pointers = (at_grad, out.data_ptr(), 0, 0)
            self._one_step(self._device, self._grid, (*pointers, self._sizes, *to, single, maps))
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
    if t.channels_last:
        return (channels_last(p.batch, channels, size, t.element, p.batch_as_width),)
    if t.lines and not g:
        size = (*size[:-2], 1, size[-2] * size[-1])
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


# --- the choice ------------------------------------------------------------------------------------------------------


def choose(p: Problem, gpu: Gpu, general: bool = False) -> Choice | str:
    """The cheapest tiling by the model, or the sentence why tensor cores cannot serve the problem.

    ``general``: of those that serve every size of the input.
    """
    return _choose(p, gpu, general)


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks: `choose`, for the problem or for one whose tensors are the same (`batches`)."""
    return batches.too_long(p) or batches.choose(choose, p, gpu, general, WIDEST)


@lru_cache(maxsize=4096)
def _choose(p: Problem, gpu: Gpu, general: bool) -> Choice | str:
    refused = refusal(p, gpu)
    if refused:
        return refused
    best: tuple[float, tuple[int, int], str, int, AnyTiling] | None = None
    for place, floor, (t, clocks) in promising(p, gpu, general):
        if best is not None and floor > best[0]:
            break
        if general and isinstance(t, WarpgroupTiling) and t.row_columns not in COMMON_WIDTHS:
            continue  # files print the common instructions, and stay as they are
        if best is None or least(t, clocks[0], p, gpu) <= best[0]:
            seconds, bound, splits = whole(t, clocks, p, gpu, general=general)
            if best is None or (seconds, place) < best[:2]:  # of equals the first
                best = seconds, place, bound, splits, t
    if best is None:
        return f"no tile of this layer with its halo fits in {gpu.shared_bytes // 1024} KB of shared memory"
    seconds, _, bound, splits, t = best
    return Choice(boxed(t, p), p, gpu, splits, seconds, bound)
