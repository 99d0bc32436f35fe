"""The gather-GEMM family on tensor cores: candidates, cost model, and a choice made ready for a device.

The tiling's arithmetic is in `tiling`, the kernel in ``kernels/gather.cu``. Nothing here is timed at run time: a model
of five terms (matrix instructions, L2 traffic, the producers' pass through shared memory, stores, device memory)
chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from upconv.cuda import jit
from upconv.cuda.boxes import Five, Tensor5, Words, alignment_classes, channels_last, dense, encode, of_class
from upconv.cuda.costs import Constants, constants
from upconv.cuda.gpu import Gpu
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.launch import Counters, Launcher, as_run, bind
from upconv.cuda.shuffle import Shuffle, Triple, countable, ways
from upconv.cuda.tiling import (
    FRAGMENT,
    PACK_THREADS,
    Tiling,
    Unfit,
    gather_axes,
    narrow_source,
    positions,
    result_shape,
    source_shape,
    whole_source,
)
from upconv.problem import Problem

# Pixels along a side of images that `batches` tries side by side. What tiles of larger ones read comes from many places
# of the memory (NOTES: 256->256 k2 s2 on 512 images of 14 x 14, gradient for the input in TF32 274 -> 343 us, where the
# model has 226 -> 198).
MOST_ABREAST = 16
_ACCUMULATORS = 4  # blocks of 64 x 64 that a consumer warpgroup holds: 128 registers of a thread's 200
_MMA_ACCUMULATORS = 2  # without setmaxnreg a thread has 168 registers
_MAX_TAPS = 4096  # of all phases; the tables lie in constant memory

# --- the model's other constants (the fitted sets are in `costs`) ----------------------------------------------------
_MMA_SYNC = 0.45  # of wgmma's rate: four warps read the same pixels
_FILL = 24.0, 32.0  # bytes a clock that an epilogue stores of what is the bias alone: NCHW, channels_last
_FILL_RUN = 240.0, 400.0  # clocks of each run of it beside: of a channel's; of all of a warp's
_MANY = 8  # tiles of a block, from which on the last one's tail is in the constants, fitted to such layers
LAUNCH = 3.5e-6  # seconds
# Of clusters: clocks beside the chunks of a tile, of each block more, bytes a clock at which one reads others' sums; by
# how much the model hopes in NCHW and in channels_last; and how many of the tilings that promise most are looked at.
# Fitted to 87 layers and passes.
_CLUSTER = 3800.0, 1100.0, 24.0
_CLUSTER_HOPE = 1.0, 1.05
_CLUSTERS = (2, 4, 8)
_PROMISING = 12
# Of clusters that the model has so near, one whatever the size, since each is a kernel to be compiled.
_ALIKE = 1.03
# Results that the copy engine stores: bytes a clock that threads leave in shared memory for it, and clocks beside.
_STAGED = 64.0, 300.0
# By how much the model hopes there, by `split` (NOTES: pix in bfloat16 on an H100, which it has at 116 us both times,
# by halves of the pixels 134, of the channels 123, and by other epilogues 137).
_STAGED_HOPE = 1.035, 1.02
# Packing a forward's weights: seconds, bytes a second. And the share of its time by which multiplying them as they lie
# in TF32 is slower, of one tap (NOTES: unet1 201 -> 203 us, where packing takes 14), of several (kb57 1,821 -> 1,862,
# vae 249 -> 260, kb61 1,043 -> 1,129, kb78 619 -> 924; dcgan1 94.2 -> 95.5, 512->256 k4 s2 on 4 x 4 53 -> 60).
_PACKING = 2.5e-6, 0.9e12
_FOUR_LOADS = {True: 0.015, False: 0.06}
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions
SIZES = "i" * 11  # `Tiling.arguments`
# A kernel that packs the weights itself: parts of them that a block packs at most, and its longest time (NOTES: the
# host takes 16 us for two launches and 11 for one, in a training step twice that; the GPU 0 to 2 us more with a part a
# block, 3 to 4 with four, 5 with eight).
_MOST_PARTS, _LONGEST_PACKING = 4, 1e-4
_LONG_BESIDE = 1e-4  # seconds of a kernel that begins behind `pack`
_PACKED_FIRST = 3e-6  # seconds that a kernel must gain for which weights are packed before, by a launch of its own
_AHEAD = 4500.0  # clocks that the rings should look ahead
_SPREAD = 1.2  # of tiles that store between others' results; asked only against phases as rows, fitted to hifigan alone
# Of planes one by one with weights through a ring: it decides only where the model sees no difference to weights that
# stay (NOTES: kb81's gradient for the input in TF32, 120 us by a ring and 95 without, 88.9 and 89.0 by the model).
_RING = 1.002
# Of consumers that share weights against those that share pixels, where the model sees no difference (NOTES: dcgan1
# bfloat16 64.6 -> 58.9 us, TF32 105.9 -> 102.7).
_HALVED = 1.0005
# Of channels-last tiles that wait for memory, 64 neighbours of a row as one (NOTES: gradients of unet4 in TF32 387 us
# instead of 385.5, in bfloat16 201 instead of 197, of nnunet2 in TF32 169 instead of 167.5; forwards 427 and 416, 230
# and 213, 198 and 187; nnunet2 in bfloat16 the same). Not in files: their boxes ask for a line, and were not timed so.
_LONG = 1.003
_COPY = 275.0  # clocks for a copy of 16 bytes by each producer, where rows are not aligned
_SHORT_ROWS = 64  # bytes, up to which threads may copy rows that begin anywhere better than boxes
_LINE = 128  # bytes that come from memory together, of which a channels-last chunk may take a part
_LINES = 0.2, 1.2  # bytes of such lines of all tiles in work over the cache's: none of the rest is lost, most is


@dataclass(frozen=True)
class Unit:
    """A source to be compiled and its kernels' names, without those that only autocast takes."""

    label: str
    source: str
    entries: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """A tiling for a problem on a GPU, and what the model thinks of it."""

    tiling: Tiling
    """Of the layer at any size; its own problem's size and batch mean nothing."""
    problem: Problem
    gpu: Gpu
    seconds: float
    """The model's estimate."""
    bound: str
    """What limits it, by the model."""
    flat: bool = False
    """Whether the problem is another's `Problem.flat`."""
    general: bool = False
    """Whether its kernel serves every size of the input, beginnings of rows included."""

    @cached_property
    def packs(self) -> int:
        """Blocks of a kernel that packs the weights itself; 0 where they are too many for that, or it cannot.

        It spares a training step's host a launch and an allocator's look-up; but its blocks pack one part behind the
        other, and all wait for the last one.
        """
        t, grid = self.tiling, self.grid
        if not t.packs or self.general or self.seconds > _LONGEST_PACKING:
            return 0
        if grid == t.arguments(self.problem)[-1]:  # whose tiles leave multiprocessors idle: these pack too
            grid = min(self.gpu.multiprocessors, max(grid, t.pack_blocks))
        return grid if t.pack_blocks <= _MOST_PARTS * grid else 0

    @property
    def family(self) -> str:
        return "gather"

    @property
    def margin(self) -> float:
        """Its model hopes where several slices' rows fill the tiles (NOTES: right on kb58 and kb70, by which it was
        fitted; ten other such layers of 3 to 32 output channels took 0.93 to 1.53 times as long)."""
        return 1.22 if self.problem.rank == 3 and self.tiling.unroll != (1, 1, 1) else 1.0

    @property
    def grid(self) -> int:
        """Blocks: one for each multiprocessor, and with resident weights as many for each M-group; of clusters all."""
        t = self.tiling
        tiles = t.arguments(self.problem)[-1]
        if t.cluster > 1:
            return tiles * t.cluster
        blocks = min(tiles, self.gpu.multiprocessors)
        if t.resident and t.m_groups > 1:
            blocks = max(1, blocks // t.m_groups) * t.m_groups
        return blocks

    @property
    def summary(self) -> str:
        t = self.tiling
        shape = "x".join(str(v) for v in t.tile)
        if t.whole:
            shape += f" of {t.beside} images side by side" if t.beside else " of whole images"
        split = ("pixels halved", "output channels halved", "in turn")[t.split]
        weights = "resident" if t.resident else f"ring of {t.stages_w} x {t.w_stage} fragments" if t.wgmma else "L2"
        beside = "the batch as pixels: " if self.flat else "the batch as width: " if self.problem.batch_as_width else ""
        instruction = beside + ("phases as rows: " if t.shuffle else "")
        instruction += "wgmma" if t.wgmma else "mma.sync"
        return (
            f"{instruction} {t.problem.precision}, tile {shape} (NxDxHxW of q) x {t.mb * t.wgs_m * 64} rows, chunk of "
            f"{t.chunk} channels, {split}, weights {weights}, {t.shared_bytes // 1024} KB shared, grid {self.grid}"
            + (", results stored by the copy engine" if t.drained else "")
            + (f", chunks shared by clusters of {t.cluster} that add up their sums" if t.cluster > 1 else "")
        )

    @property
    def boxable(self) -> bool:
        """Whether weights that lie as the kernel's boxes take them need no packing (`Tiling.boxable`), where that pays.

        A forward's in TF32 are read in four loads instead of one, so their packing must take some of its time.
        """
        t = self.tiling
        if self.flat or not t.boxable:
            return False
        if t.element == 2 or self.problem.pass_ != "fwd":
            return True
        one_tap = max(len(block) for blocks in t.entries for block in blocks) == 1
        packing = _PACKING[0] + math.prod(self.problem.weight_shape) * t.element / _PACKING[1]
        return packing > _FOUR_LOADS[one_tap] * self.seconds

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all input sizes that share the tile and the `store_unit`.

        The first packs weights; the second, where they are `boxable`, takes channels-last ones as they are.
        """
        t, label = self.tiling, f"gather {layer_text(self.problem)}"
        unit = 0 if self.general else store_unit(t, self.problem)
        packed = Unit(label, jit.source("gather.cu", t.macros(store_unit=unit)), ("pack", "gather"))
        if not self.boxable:
            return (packed,)
        boxed = jit.source("gather.cu", t.macros(boxed=True, store_unit=unit))
        return packed, Unit(f"{label} unpacked", boxed, ("gather",))

    @property
    def packing_sources(self) -> tuple[Unit, ...]:
        """That of the kernel that packs the weights itself, where there is one."""
        if not self.packs:
            return ()
        unit = store_unit(self.tiling, self.problem)
        source = jit.source("gather.cu", self.tiling.macros(store_unit=unit, packs=True))
        return (Unit(f"gather {layer_text(self.problem)} packing", source, ("gather",)),)

    def prepare(self, device: int) -> Prepared:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return Prepared(self, device)


class Packs:
    """What choices share whose kernels read packed weights, on a device."""

    _boxed_unit: Unit | None = None
    """The kernel of weights that need no packing, if there is one."""
    _pack: Any
    _pack_float: Any

    def __init__(self, p: Problem, device: int, words: int, blocks: int) -> None:
        self._problem, self._device = p, device
        self._words, self._pack_blocks = words, blocks
        self.casts = p.dtype.itemsize == 2

    def _load(self, unit: Unit, entry: str, threads: int, shared: int, codes: str) -> Launcher:
        """Compiles (or finds) and loads an entry of a unit."""
        kernel = jit.kernel(unit.source, entry, gpu_of(self._device).arch, unit.label)
        return Launcher(kernel, threads, shared, codes)

    def _load_pack(self, unit: Unit) -> Launcher:
        return self._load(unit, "pack", PACK_THREADS, 0, "PPi")

    def _load_pack_float(self, unit: Unit) -> Launcher:
        return self._load(unit, "pack_float", PACK_THREADS, 0, "PPiPP")

    def _load_packing(self, unit: Unit) -> None:
        """What packs every weight of the problem, at once."""
        self._pack = self._load_pack(unit)
        if self.casts:
            self._pack_float = self._load_pack_float(unit)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The weights in the order in which the kernel reads them: int32 words, launched on the current stream.

        Or the weights themselves, where boxes bring them: channels-last ones of the problem's dtype that begin at 16
        bytes. Float32 weights of a 16-bit problem are rounded on their way, and with them a float32 ``bias``, whose
        place is behind them.
        """
        return weight if self._boxes(weight) else self._packed(weight, bias)

    def _packed(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rounds = self.casts and weight.dtype is torch.float32
        tap_step = self._tap_step(weight)
        if not tap_step:
            weight, tap_step = weight.contiguous(), 1
        words = self._words if bias is None else self._words + (self._problem.out_channels + 1) // 2
        packed = weight.new_empty_strided((words,), (1,), dtype=torch.int32)  # 2 us less than torch.empty
        if rounds:
            at = packed.data_ptr()
            biases = (0, 0) if bias is None else (bias.data_ptr(), at + 4 * self._words)
            self._pack_float(self._device, self._pack_blocks, (weight.data_ptr(), at, tap_step, *biases))
        else:
            self._pack(self._device, self._pack_blocks, (weight.data_ptr(), packed.data_ptr(), tap_step))
        return packed

    def _boxes(self, weight: Tensor) -> bool:
        """Whether boxes bring it as it lies."""
        if self._boxed_unit is None or (self.casts and weight.dtype is torch.float32):
            return False
        return not weight.data_ptr() & 15 and self._lies_last(weight)

    def _tap_step(self, weight: Tensor) -> int:
        """Elements between a weight's taps, as kernels read it: contiguous or channels-last; 0 for another."""
        if weight.is_contiguous():
            return 1
        return weight.shape[1] if self._lies_last(weight) and weight.shape[:2] == self._problem.weight_shape[:2] else 0

    def _lies_last(self, weight: Tensor) -> bool:
        last = _LAST.get(weight.dim())  # the problem may have a dimension more (`Problem.abreast`)
        return last is not None and weight.is_contiguous(memory_format=last)

    def _kept(self, kept: dict[int, Words], address: int, encoded: Callable[[], list[Words]]) -> Words:
        if len(kept) >= 256:  # allocations come back to the same addresses; 128 bytes each
            kept.clear()
        bind(self._device)  # encoding wants a context
        found = kept[address] = b"".join(encoded())
        return found

    def _bias_of(self, packed: int, bias: Tensor | None) -> int:
        """Where the kernel finds the bias, or 0; `pack` left a rounded one behind the weights."""
        if bias is None:
            return 0
        return packed + 4 * self._words if self.casts and bias.dtype is torch.float32 else bias.data_ptr()


class LazyPacks(Packs):
    """Of these, choices whose kernels differ by how a weight lies: each is loaded with a weight that wants it."""

    _unit: Unit
    """The kernels of packed weights."""
    _tiling: Any
    """With the box of a tap's weights: `weight_map`'s."""

    def __init__(self, p: Problem, device: int, words: int, blocks: int) -> None:
        super().__init__(p, device, words, blocks)
        self._weight_maps: dict[int, Words] = {}

    @property
    def _launchers(self) -> tuple[str, ...]:
        """The attributes that load the kernels."""
        raise NotImplementedError

    @property
    def _packed_launchers(self) -> tuple[str, ...]:
        """Of these, those for weights that are kept: packed, or (some forwards) as they lie."""
        raise NotImplementedError

    @property
    def loaded(self) -> bool:
        """Whether the kernels for every weight are."""
        return all(name in vars(self) for name in self._launchers)

    def load(self) -> None:
        """Compiles (or finds) and loads the kernels for every weight. Errors: those of ``jit.kernel``."""
        for name in self._launchers:
            getattr(self, name)

    @property
    def packed_loaded(self) -> bool:
        """Whether those for weights that are kept are."""
        return all(name in vars(self) for name in self._packed_launchers)

    def load_packed(self) -> None:
        """Loads these."""
        for name in self._packed_launchers:
            getattr(self, name)

    @cached_property
    def _pack(self) -> Launcher:
        return self._load_pack(self._unit)

    @cached_property
    def _pack_float(self) -> Launcher:
        return self._load_pack_float(self._unit)

    def _weight_map(self, address: int) -> Words:
        """The tensor maps of weights that need no packing, as `_kept`."""
        found = self._weight_maps.get(address)
        if found is None:
            t, p = self._tiling, self._problem
            found = self._kept(self._weight_maps, address, lambda: [weight_map(t, p, address)])
        return found


class BoxedPacks(Packs):
    """Of these, choices whose kernels read pixels by boxes of a tiling."""

    def __init__(self, t: Tiling, p: Problem, device: int, words: int, blocks: int) -> None:
        super().__init__(p, device, words, blocks)
        self._tiling, self._tensors = t, tensors(t, p)
        self._codes = "PPPP(" + SIZES + "q" * 16 * len(self._tensors) + ")"
        self._sizes = b""
        """What kernels are told of the problem, by `as_run`."""
        self._tails: dict[int, Words] = {}

    def _tail(self, address: int) -> Words:
        """What kernels are told behind pointers: the sizes and, where there are, the tensor maps of an address."""
        if not self._tensors:
            return self._sizes
        found = self._tails.get(address)
        if found is None:
            t, p = self._tiling, self._problem
            maps = (tensor_map(t, p, address, one) for one in self._tensors)
            found = self._kept(self._tails, address, lambda: [self._sizes, *maps])
        return found


class Prepared(BoxedPacks, LazyPacks):
    """A choice's kernels, loaded for a device."""

    biased = True

    def __init__(self, choice: Choice, device: int) -> None:
        t, p = choice.tiling, choice.problem
        super().__init__(t, p, device, t.packed_words, t.pack_blocks)
        self._results: dict[int, Words] = {}
        if t.drained:
            self._codes += f"({'q' * 16})"  # the result's map behind the source's
        self._unit, self._boxed_unit = _units(choice)
        # Groups of a channels-last pixel share sectors, so their blocks are to stay abreast (NOTES: kb75's gradient for
        # the input in bfloat16 took 113 us launched beside `pack`, where blocks begin one by one, and 92 behind it). So
        # are those that memory bounds, once they take long (unet4 TF32 418 and 388 us, bfloat16 218 and 200).
        lines = in_two_lines(p) and choice.seconds > _LONG_BESIDE
        abreast = t.channels_last and (p.groups > 1 or lines)
        self._overlaps = t.wgmma and gpu_of(device).capability >= (9, 0) and not abreast
        """Whether the kernel may begin beside `pack`."""
        self._grid = choice.grid
        self._sizes = as_run(SIZES, t.arguments(p))
        self.packing = (
            t.entries,
            t.chunk,
            t.parts,
            t.split == 1,
            t.subs,
            p.precision,
            p.groups,
            p.pass_,
            p.out_channels,
            choice.boxable and (p.pass_ != "fwd" or self.casts),  # else what is kept is packed (`pack_to_keep`)
            t.shuffle,
        )
        """What `pack`'s result depends on beside the weight."""
        self._choice, self._zeros = choice, Counters(device, 4)
        if self._boxed_unit is None and not choice.packs:
            self.load()
        # Else what its first weight wants is loaded then: hardly a layer has weights of both kinds.

    @property
    def _keeps_boxed(self) -> bool:
        """Whether weights that lie as boxes take them are used as they lie where packed ones would be kept."""
        return self._boxed_unit is not None and self._problem.pass_ == "fwd" and self.casts

    @property
    def _packed_launchers(self) -> tuple[str, ...]:
        left_out = ("_run_packing",) if self._keeps_boxed else ("_run_boxed", "_run_packing")
        return tuple(name for name in self._launchers if name not in left_out)

    @property
    def _launchers(self) -> tuple[str, ...]:
        casting = ("_pack_float",) if self.casts else ()
        boxed = ("_run_boxed",) if self._boxed_unit is not None else ()
        return "_pack", "_run", *casting, *boxed, *(("_run_packing",) if self._choice.packs else ())

    def _load_gather(self, unit: Unit, codes: str) -> Launcher:
        return self._load(unit, "gather", 512 if self._tiling.wgmma else 384, self._tiling.shared_bytes, codes)

    def _load_form(self, boxed: bool) -> Launcher:
        """The kernel of weights that boxes bring, or of packed ones.

        Where no cluster of it fits on the device (on a part of one, as green contexts have), tiles have a block each
        from then on; packed weights are the same.
        """
        unit = self._boxed_unit if boxed else self._unit
        assert unit is not None
        launcher = self._load_gather(unit, self._codes + (f"({'q' * 16})" if boxed else ""))
        if self._tiling.cluster == 1 or launcher.clusters(self._device, self._tiling.cluster):
            return launcher
        self._tiling = replace(self._tiling, cluster=1)
        alone = replace(self._choice, tiling=self._tiling)
        self._grid = alone.grid
        self._unit, self._boxed_unit = _units(alone)
        return self._load_form(boxed)

    @cached_property
    def _run(self) -> Launcher:
        return self._load_form(False)

    @cached_property
    def _run_boxed(self) -> Launcher:
        return self._load_form(True)

    @cached_property
    def _run_packing(self) -> Launcher:
        (unit,) = self._choice.packing_sources
        return self._load_gather(unit, self._codes.replace("(", "PPii(", 1))

    @property
    def packs(self) -> bool:
        """Whether `run_packing` is there."""
        return self._choice.packs > 0

    def pack_to_keep(self, weight: Tensor) -> Tensor:
        """`pack`, for many calls: packed weights are multiplied faster in TF32 than a forward's as they lie."""
        packed = self._problem.pass_ == "fwd" and not self.casts
        return self._packed(weight) if packed else self.pack(weight)

    def run_packing(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """`pack` and `run` by one kernel, for ``weight`` as it is; not in a graph that is captured.

        A float32 ``bias`` of a 16-bit problem is not rounded here.
        """
        if self._boxes(weight):
            self.run(x, weight, bias, out, True)
            return
        address, at_out, at_weight = x.data_ptr(), out.data_ptr(), weight.data_ptr()
        tap_step = self._tap_step(weight)
        if not tap_step or at_out & 15 or (address & 15 and self._tiling.needs_alignment):
            self.run(x, self.pack(weight), bias, out, True)
            return
        packed = weight.new_empty_strided((self._words,), (1,), dtype=torch.int32)
        at, at_bias = packed.data_ptr(), 0 if bias is None else bias.data_ptr()
        given = (at_weight, self._zeros.address(x), tap_step, weight.dtype is torch.float32)
        ends = self._ends(address, at_out)
        self._run_packing(self._device, self._choice.packs, (address, at, at_bias, at_out, *given, *ends))

    def _ends(self, address: int, at_out: int) -> tuple[Words, ...]:
        """`_tail` and, where the copy engine stores, the map of the result at its address."""
        if not self._tiling.drained:
            return (self._tail(address),)
        found = self._results.get(at_out)
        if found is None:
            t, p = self._tiling, self._problem
            found = self._kept(self._results, at_out, lambda: [result_map(t, p, at_out)])
        return self._tail(address), found

    def run(self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False) -> None:
        """Launches the kernel: ``x`` and ``out`` dense in the problem's layout, ``packed`` what `pack` returned.

        For pass "grad-input" they are the output's gradient and the input's, and a bias is of the input's channels.
        ``fresh``: `pack` was called just before, and the kernel loads its first pixels beside what that launched.
        """
        address, at_out = x.data_ptr(), out.data_ptr()
        if at_out & 15:  # PyTorch's allocations never do; `store_unit` goes by sizes alone
            whole = torch.empty_like(out)
            self.run(x, packed, bias, whole, fresh)
            out.copy_(whole)
            return
        if address & 15 and self._tiling.needs_alignment:
            fresh = False  # it waits for this
            x = x.clone()  # a view that begins off 16 bytes; PyTorch's allocations never do
            address = x.data_ptr()
        at = packed.data_ptr()
        args = (address, at, self._bias_of(at, bias), at_out, *self._ends(address, at_out))
        if packed.dtype is torch.int32:
            self._run(self._device, self._grid, args, fresh and self._overlaps)
        else:
            self._run_boxed(self._device, self._grid, (*args, self._weight_map(at)))


def _units(choice: Choice) -> tuple[Unit, Unit | None]:
    """Its kernels' sources: of packed weights, and of those that lie as boxes take them, if there is one."""
    units = choice.sources()
    return units[0], units[1] if choice.boxable else None


def tensors(t: Tiling, p: Problem) -> tuple[Tensor5, ...]:
    """The tensors that a tiling's boxes are cut from; none where threads copy."""
    if not t.tensor_map:
        return ()
    channels, *size = source_shape(p)[1:]
    d, h, w = (1,) * (3 - p.rank) + tuple(size)
    if t.channels_last:
        return (channels_last(p.batch, channels, size, t.element, p.batch_as_width),)
    if t.beside:
        channel = w * h * d * t.element
        image, every = channel * channels, channel * channels * p.batch
        return (Tensor5(0, (w * h * d, p.batch, channels, 1, 1), (image, channel, every, every)),)
    if t.whole is not None:
        dims = (w * h * d, 1, 1, channels, p.batch)
    else:
        dims = (w, h, d, channels, p.batch)
    if not t.classed:
        return (dense(dims, t.element),)
    assert t.classes is not None
    rows, of_channels = t.classes
    first, _, apart = t.bands[1]
    return tuple(
        of_class(p.batch, channels, size, t.element, (rows, (first[0] + j * apart) % rows), (of_channels, k))
        for k, j in product(range(t.channel_classes), range(t.row_classes))
    )


def tensor_map(t: Tiling, p: Problem, address: int, tensor: Tensor5 | None = None) -> Words:
    """A ``CUtensorMap`` over one of a tiling's `tensors` (else the only one), with its box, as 16 signed words."""
    if tensor is None:
        (tensor,) = tensors(t, p)
    rounded = t.channels_last and p.precision == "tf32"  # the box is the tile
    span = t.row_bytes if t.channels_last else 0
    return encode(tensor, address, p.dtype, t.box, t.box_steps, span, rounded, promotion(t))


def result_map(t: Tiling, p: Problem, address: int) -> Words:
    """A ``CUtensorMap`` over a `Tiling.drained` result at an address, whose rows along H are apart by phase."""
    channels, h, w = result_shape(p)[1:]
    row, phases = w * t.element, t.out_steps[1]
    dims = (w, channels, h // phases, phases, p.batch)
    strides = (h * row, phases * row, row, channels * h * row)
    return encode(Tensor5(0, dims, strides), address, p.dtype, t.out_box, (1,) * 5, t.out_span)


def drains(p: Problem) -> bool:
    """Whether the tensor copy engine may store a problem's result: NCHW images of 16 bits whose rows are whole units.

    Of a strided forward each phase must have as many rows. Not where a tile reads more than it stores, as of gradients
    of strided layers (NOTES: dcgan2's 57 -> 69 us), nor in 1-D, where the model does not know the best tile (kb64's
    gradient 798 us, by these 762 to 824).
    """
    if p.dtype.itemsize != 2 or p.layout != "nchw" or p.rank != 2 or p.groups > 1:
        return False
    if p.pass_ != "fwd" and max(p.stride) > 1:
        return False
    h, w = result_shape(p)[2:]
    return w % 8 == 0 and h % p.stride[0] == 0


def promotion(t: Tiling) -> int:
    """Bytes that the cache asks memory for at a time: two lines where one tile soon reads both, and none else does."""
    return 256 if t.channels_last and t.resident and in_two_lines(t.problem) else 128


def in_two_lines(p: Problem) -> bool:
    """Whether a channels-last tile reads whole pairs of lines that no other reads: kernel and stride are the same.

    NOTES: unet4 in TF32 444 -> 427 us, its gradient 405 -> 387; in bfloat16 240 -> 230, 204 -> 201. With halos, or
    weights through a ring, nothing to 20% more (kb81's gradient in bfloat16); where 256 bytes are of several rows, 1%.
    """
    if p.groups > 1 or p.kernel != p.stride or max(p.dilation) > 1 or max(p.padding) > 0:
        return False
    neighbours = 1 if p.pass_ == "fwd" else p.kernel[-1]  # pixels that a tile's chunks read, side by side
    return neighbours * source_shape(p)[1] * p.dtype.itemsize % 256 == 0


class BoxedWeights(Protocol):
    """What a tile knows of channels-last weights that come as they lie."""

    @property
    def element(self) -> int: ...

    @property
    def weight_span(self) -> int: ...

    @property
    def weight_box(self) -> Five: ...


def weight_map(t: BoxedWeights, p: Problem, address: int) -> Words:
    """A ``CUtensorMap`` over channels-last weights, with a box of a tap's for a chunk, as 16 signed words."""
    rows, channels, *_ = p.weight_shape
    row = p.taps * channels * t.element
    tensor = Tensor5(0, (channels, p.taps, rows, 1, 1), (channels * t.element, row, rows * row, rows * row))
    return encode(tensor, address, p.dtype, t.weight_box, (1,) * 5, t.weight_span, p.precision == "tf32")


def layer_text(p: Problem) -> str:
    return str(p).split(" on ")[0] + f" {p.precision} {p.layout}" + (f" {p.pass_}" if p.pass_ != "fwd" else "")


# --- candidates ------------------------------------------------------------------------------------------------------


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why no tiling can serve a problem, in a sentence; None when one may."""
    if p.dtype is torch.float64:
        return "tensor cores multiply float64 only by mma.m8n8k4, which this family does not use"
    if gpu.capability < (8, 0):
        return f"tensor cores of compute capability {gpu.capability[0]}.{gpu.capability[1]} lack TF32 and bfloat16"
    if p.taps > _MAX_TAPS:
        return f"{p.taps} taps are too many for the kernel's tables"
    if p.pass_ not in ("fwd", "grad-input"):
        return f"pass {p.pass_} sums over pixels, which this family does not"
    channels = source_shape(p)[1] // p.groups
    if channels < 4 and p.groups > 1:
        side = "input" if p.pass_ == "fwd" else "output"
        return f"{channels} {side} channels per group leave most of a matrix instruction empty"
    return None


def candidates(
    p: Problem,
    gpu: Gpu,
    wgmma: bool | None = None,
    classes: tuple[int, int] | None = (0, 0),
    scarce: bool = False,
    size: tuple[int, ...] | None = None,
    shuffle: Shuffle | None = None,
    drained: bool = False,
    beside: bool = False,
) -> Iterator[Tiling]:
    """Every tiling worth a look. ``classes``: of an NCHW source's rows (`Tiling.classes`); by default as ``p``'s are.

    Where shared memory has no room for a second pixel tile, producers and consumers share one and wait for each other;
    ``scarce``: all with one alone (NCHW: channels-last producers load ahead into the second).
    ``size``: those for an input of this size alone, which hold whole images of the source; none where it is not small.
    ``shuffle``: those of the layer without its stride; one of `shuffle.ways`.
    ``drained``: those whose outputs the tensor copy engine stores.
    ``beside``: with a ``size``, those of such images side by side.
    """
    fast = gpu.arch == "90a" if wgmma is None else wgmma
    cout_g = result_shape(p)[1] // p.groups
    steps = (1,) * (3 - p.rank) + p.stride if p.pass_ == "fwd" else (1, 1, 1)
    if classes == (0, 0):
        classes = classes_of(p)
    whole: Triple | None = None
    result: tuple[int, ...] = ()
    if size is not None:
        whole = (narrow_source if beside else whole_source)(p.with_(size=size))
        if whole is None or not fast:
            return
        result = positions(p.with_(size=size), shuffle)
    if shuffle is not None:
        p = shuffle.unstrided
        cout_g, steps = p.out_channels, (1, 1, 1)
    far = p.pass_ != "fwd" and max(p.stride) > 1
    chunks = chunk_sizes(p)
    accumulators = _ACCUMULATORS if fast else _MMA_ACCUMULATORS
    if p.precision == "ieee":
        accumulators = accumulators // 2
    planewise = (False, True) if far and fast and p.layout == "channels_last" and p.precision != "ieee" else (False,)
    brought = (classes,) if classes in (None, (1, 1)) or p.layout != "nchw" else (classes, None)
    tiles = _rows_of_images(p) if beside else _tiles(p)
    for (subs, unroll), w_subs, (sub, tile), split, chunk, by in product(
        _subs(p, cout_g), _w_subs(steps[2]), tiles, (0, 1, 2), chunks, brought
    ):
        wide = cout_g > 64 // subs and fast  # enough for two consumers
        if split == 1 and not wide:
            continue
        # Before Hopper only where the halo of a strided source leaves room for no more than 64 pixels, which cannot be
        # halved: no epilogue is worth hiding there.
        if split == 2 and not fast and not (far and math.prod(tile) == 64):
            continue
        if min(unroll[1], 2) > 1 and sub == (8, 8) and tile[2] > 8:
            continue  # the rows of an unrolled tile are many already
        short = any(n > s * u * t for n, s, u, t in zip(result, steps, unroll, tile[1:]))
        if size is not None and not beside and short:
            continue
        if drained and (subs > 1 or split == 2):
            continue  # before tilings are made of them, which `checked` would refuse
        base = Tiling(
            p, sub, tile, split, chunk, subs, w_subs, unroll, classes=by, wgmma=fast, whole=whole, shuffle=shuffle,
            drained=drained,
        )  # fmt: skip
        if beside:
            if base.period > 32 or not base.contiguous or base.bare or unroll != (1, 1, 1):
                continue
            base = replace(base, beside=64 // base.period)
        if by is None and classes is not None and base.staging_units * 16 > _SHORT_ROWS:
            continue
        if base.mb * base.nb > accumulators or base.mb * base.nb < 1:
            continue
        even = len(base.distinct_entries) == 1
        residence = (False, True) if even or base.m_groups == 1 else (False,)
        pairs = (False, True) if fast and sub == (8, 8) and tile[2] % 16 == 0 and base.nb % 2 == 0 else (False,)
        # Runs of two subtiles, where rows are long enough for them.
        long = fast and not base.channels_last and sub == (1, 64) and tile[3] % 128 == 0 and base.width_subs == 1
        # Short ones where many sub-positions would fill shared memory (NOTES: kb81's runs of 320 outputs, not of 160,
        # whose ends share a sector of 32 bytes: 0.349 -> 0.330 ms, bfloat16 0.187 -> 0.159; but kb75 bfloat16, whose
        # tiling the model changes with it, 0.268 -> 0.317).
        # channels_last makes the same rounds of both.
        groups = (8, 16) if long and base.nb % 2 == 0 else (8,)
        if base.width_subs >= 3 and sub == (1, 64):
            groups = (4,) if base.channels_last else (4, 8)
        for resident, paired, run_groups, by_plane in product(residence, pairs, groups, planewise):
            base = replace(base, paired=paired, run_groups=run_groups, planewise=by_plane)
            t = None if scarce else _fitted(replace(base, resident=resident), gpu)
            if t is None and not drained and not base.channels_last and not resident:
                t = _fitted(base, gpu, scarce=True)
            if t is not None:
                yield t


def chunk_sizes(p: Problem) -> list[int]:
    """Channels that a chunk may have: 32, 64 or 128 bytes of a pixel, no more than half of them beyond the last."""
    least, channels = 32 // p.dtype.itemsize, source_shape(p)[1] // p.groups
    return [c for c in (least, 2 * least, 4 * least) if c == least or c < 2 * channels]


def _subs(p: Problem, cout_g: int) -> Iterator[tuple[int, Triple]]:
    """(d, h) sub-positions that share a block of 64 rows, and how rows are unrolled for them."""
    yield 1, (1, 1, 1)
    axes = gather_axes(p)[:2]
    every, tapped = math.prod(len(axis.taps) for axis in axes), math.prod(sum(map(bool, axis.taps)) for axis in axes)
    for subs in (2, 4):
        if cout_g <= 64 // subs and p.rank > 1:
            # Those without taps fill no blocks; where tiles lack some along W, they are stored as the others are.
            if tapped % subs == 0 and (every % subs == 0 or p.layout == "channels_last"):
                yield subs, (1, 1, 1)
            else:
                yield subs, (1, subs, 1)
                if p.rank == 3:
                    yield subs, (2, subs // 2, 1)


def _w_subs(stride: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(n for n in (stride, 4, 2, 1) if stride % n == 0 and n <= stride)) if stride > 1 else (1,)


def _tiles(p: Problem) -> tuple[tuple[tuple[int, int], tuple[int, int, int, int]], ...]:
    row, strip = (1, 64), (8, 8)
    if p.rank == 1:
        shapes = [(row, (1, 1, 1, 64 * n)) for n in (1, 2, 4, 8)]
        shapes += [(row, (n, 1, 1, 64)) for n in (2, 4, 8)]
        shapes += [(row, (n, 1, 1, 128)) for n in (2, 4)] + [(row, (2, 1, 1, 192)), (row, (1, 1, 1, 192))]
        return tuple(shapes)
    shapes = [(row, (1, 1, n, 64)) for n in (1, 2, 4, 8)] + [(row, (1, 1, n, 128)) for n in (1, 2, 4)]
    shapes += [
        (strip, (1, 1, h, w)) for h, w in ((8, 8), (8, 16), (8, 32), (16, 16), (16, 32), (8, 64), (8, 24), (8, 40))
    ]
    shapes += [(strip, (n, 1, 8, 8)) for n in (2, 4, 8)]
    if p.rank == 3:
        shapes += [(strip, (1, 2, 8, 24)), (strip, (2, 1, 8, 24))]
        shapes += [(strip, (1, d, 8, w)) for d, w in ((2, 8), (2, 16), (4, 8), (2, 32), (4, 16), (8, 8))]
        shapes += [(row, (1, d, h, 64)) for d, h in ((2, 1), (2, 2), (2, 4), (4, 2))]
    return tuple(shapes)


def _rows_of_images(p: Problem) -> tuple[tuple[tuple[int, int], tuple[int, int, int, int]], ...]:
    """Tiles of 64 columns of images side by side, and some of their rows."""
    rows = [(1, h) for h in (1, 2, 4, 8)]
    if p.rank == 3:
        rows += [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
    return tuple(((1, 64), (1, d, h, 64)) for d, h in rows)


def _fragment_clocks(t: Tiling) -> float:
    """Clocks of the tensor cores for a fragment of weights, with the pixels of all consumers that use it."""
    return t.nb * (32 if t.split == 2 else 64) * (3 if t.parts == 2 else 1) / t.parts


def _fitted(t: Tiling, gpu: Gpu, scarce: bool = False) -> Tiling | None:
    """The tiling with stages that look ahead far enough, as shared memory allows; None when it does not fit at all.

    A load takes about a thousand clocks from its request to its use (NOTES: with rings of 1,000 clocks unet1 took 0.48
    ms, of 4,000 0.30), so stages go where the least time lies ahead. ``scarce``: with one pixel tile.
    """
    fragment_time = _fragment_clocks(t)
    chunk_time = t.most_entries * t.k_steps * t.parts * fragment_time
    most = 8 if t.wgs_m == 1 and not scarce else 4
    w_stage = -(-t.longest_stretch // -(-t.longest_stretch // most))  # a stretch ends with its last stage
    if t.channels_last and t.shuffle is None and t.parts == 1:
        w_stage = -(-w_stage // t.k_steps) * t.k_steps  # of whole taps, which boxes bring

    def stages(pixels: int) -> tuple[int, int]:
        return (pixels, 2) if t.channels_last else (1 if scarce else 2, pixels)

    pixels, weights = 1 if t.planewise else 2, 2
    stages_p, stages_s = stages(pixels)
    t = replace(t, stages_p=stages_p, stages_s=stages_s, stages_w=weights, w_stage=w_stage)
    try:
        t.checked(gpu.shared_bytes)
    except Unfit:
        return None
    best = pixels, weights
    while True:
        ahead = (pixels - (1 / t.plane_barriers if t.planewise else 0)) * chunk_time, weights * w_stage * fragment_time
        if min(ahead) >= _AHEAD or (t.resident and ahead[0] >= _AHEAD):
            break
        if t.resident or not t.wgmma or ahead[0] <= ahead[1]:
            pixels += 1
        else:
            weights += 1
        if max(pixels, weights) > 8 or t.shared_with(*stages(pixels), weights) > gpu.shared_bytes:
            break
        best = pixels, weights
    stages_p, stages_s = stages(best[0])
    return replace(t, stages_p=stages_p, stages_s=stages_s, stages_w=best[1])


# --- the cost model --------------------------------------------------------------------------------------------------


def estimate(t: Tiling, p: Problem, gpu: Gpu) -> tuple[float, str]:
    """(seconds, what bounds them) of a problem by a tiling."""
    return _whole(t, _tile_clocks(t, _alignment(p)), p, gpu)


def classes_of(p: Problem, general: bool = False) -> tuple[int, int] | None:
    """`Tiling.classes` of an NCHW source. ``general``: none where they are several, since they are a size's."""
    batch, channels, *size = source_shape(p)
    found = alignment_classes(batch, channels, size, p.dtype.itemsize)
    return None if general and found != (1, 1) else found


def _alignment(p: Problem) -> int:
    """Bytes at which rows of an NCHW result begin, up to a sector's 32."""
    return math.gcd(result_shape(p)[-1] * p.dtype.itemsize, 32)


def store_unit(t: Tiling, p: Problem) -> int:
    """Bytes at multiples of which all rows of ``p``'s result begin and end: 16 or two elements; else 0.

    One element: where a channel's outputs are no whole pairs, since eight rows of as many channels are stored together.
    A kernel has no way to store rows that begin elsewhere then; where runs begin at more it still finds out. (NOTES:
    with all three ways, unrolled over registers, kb68 takes 2.8 s to compile instead of 1.2, kb77 2.5 instead of 2.0.)
    """
    if t.channels_last or t.shuffle is not None or not t.contiguous:
        return 0
    alignment, pair = _alignment(p), 2 * t.element
    if alignment >= pair:
        return 16 if alignment >= 16 else pair
    return 0 if math.prod(result_shape(p)[2:]) % 2 == 0 else t.element


@dataclass(frozen=True)
class Clocks:
    """Of a tiling's average tile on its multiprocessor; the same for all sizes."""

    tile: float
    bound: str
    """What takes most of them."""
    tail: float
    """Of the last tile, beyond those: what a next tile would have hidden."""


def _tile_clocks(t: Tiling, alignment: int) -> Clocks:
    c = constants(t)
    clocks: dict[str, float] = dict.fromkeys(("tensor cores", "L2", "shared memory", "stores"), 0.0)
    total = tail = 0.0
    producers = 192 if t.wgmma else 128
    couts = t.cout_g if t.shuffle is None else t.shuffle.used
    columns = t.beside * t.image_columns if t.beside else t.tile[0] * t.tile[3]
    of_rows = t.subs * t.element * min(couts, t.rows_per_sub * t.wgs_m)
    per_tile_out = math.prod(t.tile[1:3]) * columns * t.width_subs * of_rows // t.cluster  # a block's share
    staged = t.pixels * t.row_bytes if t.channels_last else t.slot_bytes
    # Boxes of rows that begin anywhere bring parts of sectors (NOTES: kb68 bfloat16, 48-byte rows: 3.08 -> 3.92 ms).
    copied = staged * (1 + 32 / (t.staging_units * 16)) if t.tensor_map and t.classed else staged
    if t.channels_last:
        copied += t.pixels * c.row
    turned = t.parts * t.k_steps * (2 if not t.channels_last else (t.parts == 2) * 0.7)
    turn = -(-t.pixels // producers) * turned * c.turning[1 if t.element == 4 else 2] + c.turning[0]
    if not t.tensor_map:
        turn += staged / 16 / producers * _COPY
        if t.channels_last and not t.aligned_channels:
            turn *= 4
    fragment_time = _fragment_clocks(t)
    stores = per_tile_out * _ragged(t, alignment, c)
    filled = _fill_clocks(t, couts)
    if t.drained:
        store = stores / _STAGED[0] + _STAGED[1]
    else:
        store = max(stores / c.store, _epilogue_clocks(t, alignment, c) / t.cluster) + filled
    of_chunk = c.chunk[t.split != 2 and t.chunk == 8 and t.parts == 1]
    ragged = 0.0 if t.channels_last or alignment >= 16 or t.element == 2 else c.ragged_turn
    straight, longest, ring = t.straight, t.longest_stretch, t.ring_fragments
    found: dict[int, tuple[tuple[float, float, float, float], float, float]] = {}
    for entries in t.distinct_entries:  # few (NOTES: 768 -> 3 k16 s16 has 256 variants of one)
        chunks = t.chunks_of_block if entries else 0
        steps = chunks * t.fragments_of_chunk(entries)
        matrix = steps * fragment_time
        if t.wgmma:
            pauses = chunks if straight else steps / longest
            matrix += steps * c.step[t.wide] + pauses * c.drain[t.wide]
        else:
            matrix = matrix / _MMA_SYNC
        streamed = 0 if t.resident else steps * t.wgs_m * FRAGMENT
        l2 = (chunks * copied + per_tile_out) / c.l2 + streamed / c.l2_weights
        waits = chunks * c.latency / (t.stages_p * t.plane_barriers if t.channels_last else t.stages_s)
        if t.wgmma and not t.resident:
            waits = max(waits, steps * c.latency / ring)
        body = (
            max(matrix, l2, chunks * turn, waits) + c.overlap * min(matrix, l2) + c.exposed * waits + chunks * of_chunk
        )
        if t.stages_p == 1:  # (`costs._PLANEWISE` is fitted with it, though its pixels lie turned)
            body += min(matrix, chunks * turn)
        if t.split == 2:  # one stores while the other multiplies
            tile = max(body + c.turn, (body + store + c.tile) / 2) + ragged
            last = body + store + c.tile - tile
        else:
            tile = body + c.store_share * store + c.tile
            last = (1 - c.store_share) * store
            if t.cluster > 1:
                tile += _CLUSTER[0] + t.cluster * _CLUSTER[1] + t.sums_bytes * (1 - 1 / t.cluster) / _CLUSTER[2]
        found[entries] = (matrix, l2, chunks * turn, store), tile, last
    for entries in t.variant_entries:
        parts, tile, last = found[entries]
        total += tile
        tail += last
        for name, value in zip(clocks, parts):
            clocks[name] += value
    bound = max(clocks, key=lambda name: clocks[name])
    return Clocks(c.scale * total / len(t.variants), bound, c.scale * tail / len(t.variants))


def _fill_clocks(t: Tiling, couts: int) -> float:
    """Clocks that a tile takes to store its share of what is the bias alone."""
    if not t.bare:
        return 0.0
    n, d, h, w = t.tile
    rows_of_m = min(couts, t.rows_per_sub * t.wgs_m)
    found = []
    for of_variant in t.bare:
        clocks = 0.0
        for one in of_variant:
            heights = one.rows or t.out_steps[1]
            outputs = n * d * h * heights * w * (t.width_subs if one.w >= 0 else t.out_steps[2])
            runs = n * d * (h if one.rows else 1)
            clocks += outputs * rows_of_m * t.element / _FILL[t.channels_last]
            clocks += runs * (heights if one.w >= 0 else 1) * (_FILL_RUN[1] if t.channels_last else 16 * _FILL_RUN[0])
        found.append(clocks / t.subs)
    # Of blocks that have a variant each some store more than others.
    return max(found) if t.resident else sum(found) / len(found)


def _whole(t: Tiling, clocks: Clocks, p: Problem, gpu: Gpu) -> tuple[float, str]:
    """(seconds, what bounds them): waves of tiles, or the bytes of the device memory."""
    bound = clocks.bound
    tiles = math.prod(t.counts(p)) * t.m_groups
    waves = -(-tiles // (gpu.multiprocessors if t.cluster == 1 else max(1, gpu.clusters(t.cluster))))
    tail = clocks.tail if waves < _MANY else 0.0
    seconds = (clocks.tile * waves + tail) / gpu.clock
    ragged = 1.0
    if t.channels_last:
        if t.bare and not t.contiguous:  # (NOTES: kb81 bfloat16 137 us, with all phases of a row in a tile 126)
            ragged = 1.05
    elif result_shape(p)[-1] * t.element % 32:  # (NOTES: kb81 TF32 319 us, with a row's halves stored together 296)
        ragged = 1.16 if _halves_of_a_row(t) else 1.25
    out = math.prod(result_shape(p))
    source = math.prod(source_shape(p)) * _read(t, min(tiles, gpu.multiprocessors // t.cluster), gpu)
    memory = (out * ragged + source) * t.element / gpu.bandwidth
    if memory > seconds:
        bound = "bytes"
    elif waves * gpu.multiprocessors > 1.5 * tiles * t.cluster:
        bound = "too few tiles"
    ring, halved = t.planewise and not t.resident, t.split == 0 and t.shuffle is None
    factor = (_RING if ring else 1.0) * (_HALVED if halved else 1.0) * (_STAGED_HOPE[t.split] if t.drained else 1.0)
    return factor * (max(memory, seconds) + 0.15 * min(memory, seconds) + LAUNCH), bound


def _read(t: Tiling, tiles: int, gpu: Gpu) -> float:
    """How often the source is read from memory, on average, with so many tiles in work.

    Rows and (channels-last) pixels that no tap reads are left out; lines that the cache has lost come again.
    """
    read = 1.0
    for axis, (offsets, step) in enumerate(zip(t.offsets, t.in_steps)):
        if axis < 2 or t.channels_last:
            read *= len({offset % step for offset in offsets}) / step
    line = min(_LINE, t.cin_g * t.element)
    if t.channels_last and line > t.row_bytes:
        # Tiles of one place and several M-groups are neighbours.
        lines = tiles / (t.m_groups // t.problem.groups) * t.pixels * line / gpu.cache_bytes
        least, most = _LINES
        read *= 1 + constants(t).lost * (line / t.row_bytes - 1) * min(1.0, max(0.0, (lines - least) / (most - least)))
    return read


def _halves_of_a_row(t: Tiling) -> bool:
    """Whether the consumers store neighbouring runs of a row at the same time."""
    return t.split == 0 and t.tile[:3] == (1, 1, 1) and t.problem.rank > 1


def _ragged(t: Tiling, alignment: int, c: Constants) -> float:
    """What stores that do not fill sectors of 32 bytes cost, as a factor (kernels.md, Epilogue)."""
    if t.shuffle is not None:
        return 1.5
    if t.channels_last:
        return 1.0 if t.cout_g * t.element % 32 == 0 else 1.5
    if not t.contiguous:
        return 32 / (t.element * t.width_subs)
    if alignment == 32:
        return 1.0
    run = t.runs * 8 * t.width_subs * t.element
    return 1 + c.sector / (2 * run if _halves_of_a_row(t) else run)


def _epilogue_clocks(t: Tiling, alignment: int, c: Constants) -> float:
    """Clocks that the instructions of a tile's epilogue take: both consumers' warps, two on a scheduler, or one's."""
    outputs = t.runs * 8 * t.width_subs
    lag = c.lag[t.split == 2]
    if t.shuffle is not None:
        lines = t.shuffle.per_slab * (16 + 10 * -(-t.runs * 8 * t.shuffle.inner // 32))
        return lag * (t.nb * 8 / t.runs) * (t.runs * 5 + lines + 136)
    if t.channels_last:
        groups = 8 // t.runs * t.runs  # of 8 pixels, in a round
        units = -(-groups * t.element // 4)  # store instructions of a lane
        return lag * (t.nb * 8 / groups * t.width_subs) * (groups * (4.0 if t.element == 4 else 2.5) + units * 8 + 60)
    buffer = t.runs * t.width_subs * 2
    if t.beside:
        each = math.gcd(t.image_width, t.period * t.width_subs, 4)
        stores = -(-8 * t.beside * t.image_width // each // 32) * 14.0
    elif not t.contiguous:
        stores = -(-outputs // 32) * 8 * 11.6
    elif alignment >= 16:
        stores = -(-8 * outputs * t.element // 512) * 11.5
    elif t.element == 4:  # a lane an output, or two at 8 bytes, from the sector that has the run's first
        stores = 6.0 * ((outputs + 38) // 32) * 8
    else:  # the sectors of eight rows and then their ends, or short rows in the units at which they begin
        unit = min(2 * t.element, alignment)
        sectors = (outputs * t.element + 63 - unit) // 32
        ends = 8 // unit
        stores = 12.0 * min(-(-8 * outputs * t.element // unit // 32), -(-sectors // 2) + ends)
        buffer *= 2 * t.element // unit
    return lag * (t.nb * 8 / t.runs * 2) * (buffer + stores + 136)


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
    found = list(considered(p, gpu, general))
    if not found:
        return f"no tile of this layer with its halo fits in {gpu.shared_bytes // 1024} KB of shared memory"

    def made(one: tuple[float, str, Tiling]) -> Choice:
        seconds, bound, t = one
        return Choice(t, p, gpu, seconds, bound, general=general)

    def cheapest(of: Iterable[tuple[float, str, Tiling]]) -> Choice:
        return made(min(of, key=lambda one: one[0]))

    best = cheapest(found)
    if best.tiling.cluster > 1:
        alone = cheapest(one for one in found if one[2].cluster == 1)
        if alone.packs and not alone.boxable and best.seconds > alone.seconds - _PACKED_FIRST:
            return alone
        alike = (one for one in found if one[2].cluster > 1 and one[0] <= _ALIKE * best.seconds)
        return made(min(alike, key=lambda one: _order(one[2])))
    return best


def _order(t: Tiling) -> tuple[Any, ...]:
    """One of tilings, which sizes and batches agree about."""
    return t.cluster, t.tile, t.sub, t.split, -t.chunk, t.width_subs, t.subs, t.unroll, t.paired, t.planewise, t.beside


def considered(p: Problem, gpu: Gpu, general: bool = False) -> Iterator[tuple[float, str, Tiling]]:
    """(seconds, what bounds them, tiling) by the model of every tiling that `choose` looks at."""
    classes = classes_of(p, general) if p.layout == "nchw" else (1, 1)
    layer = any_size(p)
    found = ways(layer) if countable(p) and not p.batch_as_width else ()
    kinds: list[tuple[Shuffle | None, bool]] = [(shuffle, False) for shuffle in (None, *found)]
    if not general and not found and gpu.arch == "90a" and drains(p):
        kinds.append((None, True))
    few: list[tuple[Tiling, Clocks, float]] = []
    for shuffle, drained in kinds:
        small = () if general else _small_tilings(layer, gpu, p.size, shuffle, drained)
        if not general and shuffle is None and not drained and narrow_source(p) is not None:
            small += _small_tilings(layer, gpu, p.size, None, beside=True)
        for t, clocks in _tilings(layer, gpu, classes, _alignment(p), shuffle, drained) + small:
            seconds, bound = _whole(t, clocks, p, gpu)
            spread = _SPREAD if found and shuffle is None and not t.contiguous else 1.0
            seconds *= spread
            if bound == "bytes" and t.channels_last and t.sub == (1, 64) and not general:
                seconds *= _LONG
            yield seconds, bound, t
            if not general and t.wgmma and shuffle is None and not drained:
                few.append((t, clocks, spread))
    yield from _clustered(few, p, gpu)


def _clustered(
    found: Sequence[tuple[Tiling, Clocks, float]], p: Problem, gpu: Gpu
) -> Iterator[tuple[float, str, Tiling]]:
    """Of tilings whose tiles leave multiprocessors idle those that promise most where clusters share the chunks.

    All clusters must run at once: a block has one tile, so a second would begin where the first ends (NOTES: nnunet's
    gradient for the input in TF32 channels_last, three waves of halves for two of whole tiles, 60 -> 78 us). Nor are
    those looked at whose loads the model has far too cheap: planes of 32 bytes of a pixel (256->256 k4 s4 on 24 x 24,
    four blocks, 52 us of 34), halves of rows of several classes (2,048->256 k4 s2 on 32 images of 8 x 6 101 -> 129).
    ``found``: each with a factor of its seconds.
    """
    promising: list[tuple[float, int, int, Tiling, float]] = []
    for t, clocks, factor in found:
        tiles = math.prod(t.counts(p)) * t.m_groups
        cheap = (t.planewise and t.row_bytes == 32) or (t.classed and t.element == 2)
        if t.split == 2 or t.resident or cheap:
            continue
        for cluster in _CLUSTERS:
            if 2 * cluster <= t.chunks and tiles <= gpu.clusters(cluster):
                rough = factor * (clocks.tile / cluster + cluster * _CLUSTER[1])
                promising.append((rough, len(promising), cluster, t, factor))
    for _, _, cluster, t, factor in sorted(promising)[:_PROMISING]:
        shared = replace(t, cluster=cluster)
        try:
            shared.checked(gpu.shared_bytes)
        except Unfit:
            continue
        seconds, bound = _whole(shared, _tile_clocks(shared, _alignment(p)), p, gpu)
        yield factor * seconds * _CLUSTER_HOPE[shared.channels_last], bound, shared


def any_size(p: Problem) -> Problem:
    """The layer at one size for all, so that its tilings and kernels are found again at the next size."""
    size = tuple(1024 + 2 * pad // s for pad, s in zip(p.padding, p.stride))
    return p.with_(batch=1, size=size, bias=False)


@lru_cache(maxsize=256)
def _tilings(
    layer: Problem,
    gpu: Gpu,
    classes: tuple[int, int] | None,
    alignment: int,
    shuffle: Shuffle | None,
    drained: bool = False,
) -> tuple[tuple[Tiling, Clocks], ...]:
    """A layer's tilings with the clocks of their tiles: up to a second once, then a few milliseconds for each size."""
    return tuple((t, _tile_clocks(t, alignment)) for t in _layer_tilings(layer, gpu, classes, shuffle, drained))


@lru_cache(maxsize=256)
def _small_tilings(
    layer: Problem,
    gpu: Gpu,
    size: tuple[int, ...],
    shuffle: Shuffle | None,
    drained: bool = False,
    beside: bool = False,
) -> tuple[tuple[Tiling, Clocks], ...]:
    """As `_tilings`, those for this size of the input alone; a few milliseconds."""
    alignment = _alignment(layer.with_(size=size))
    found = candidates(layer, gpu, size=size, shuffle=shuffle, drained=drained, beside=beside)
    return tuple((t, _tile_clocks(t, alignment)) for t in found)


@lru_cache(maxsize=256)
def _layer_tilings(
    layer: Problem, gpu: Gpu, classes: tuple[int, int] | None, shuffle: Shuffle | None, drained: bool = False
) -> tuple[Tiling, ...]:
    return tuple(candidates(layer, gpu, classes=classes, shuffle=shuffle, drained=drained))
