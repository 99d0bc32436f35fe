"""Gradients on CUDA cores: depthwise and small groups, few channels, and float64. The kernels are ``direct_grad.cu``.

`choose` answers both passes, ``grad-input`` (`upconv.cuda.direct` hands that one on) and ``grad-weight``. The cost
model has two terms: bytes of the device memory, and loads and multiplications of the multiprocessors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from upconv.cuda import batches, family, jit
from upconv.cuda.gpu import Gpu, fma_lanes
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.launch import Launcher
from upconv.problem import Problem

_THREADS = 256
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_UNROLLED = 32  # taps in a straight stretch of code
_SUMS = 32  # registers of a thread that hold sums (float64: half of them)
_SPLITS = 512  # ranges of positions at most; their partial sums are added in a second step
_MAX_BYTES = 64 << 20  # of partial sums
_LAUNCH = 5e-6  # seconds
_LOAD_CLOCKS = 1.6  # of a multiprocessor for a warp's load and its multiplications
# And for each line of weights that it reads beyond the first (NOTES: 512->512 k4 s2 on 16 images of a pixel 2,354 us).
_LINE_CLOCKS = 0.6
# A thread waits for each row of taps, whose loads are under conditions, before it asks for the next (NOTES: 1->512 k4
# on 16 images of a pixel, bfloat16, cold: 445 us for 2,048 rows, where 12 were expected; gather takes 18).
_WAIT_CLOCKS = 380.0
_PLACE_CLOCKS = 12.0  # for a warp's position: divisions, borders
_MISSES = {("grad-input", "channels_last"): 3.4, ("grad-weight", "channels_last"): 3.4, ("grad-weight", "nchw"): 1.8}
"""Times more that loads take where taps miss the first-level cache (NOTES: fcn8s channels_last 1,384 us, by the loads
264)."""


@dataclass(frozen=True)
class Unit:
    """A source to be compiled and its kernels' names."""

    label: str
    source: str
    entries: tuple[str, ...]


@dataclass(frozen=True)
class Tile:
    """What a thread sums up: input channels of a position (grad-input), or output channels x taps (grad-weight)."""

    ci: int = 1
    co: int = 1
    taps: int = 1


@dataclass(frozen=True)
class Choice(family.Defaults):
    """A tile for a problem on a GPU, and what the model thinks of it."""

    family: str
    seconds: float
    """The model's estimate."""
    summary: str
    bound: str
    """What limits it, by the model."""
    problem: Problem
    tile: Tile
    splits: int

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all sizes."""
        p = self.problem
        label = f"direct {p.pass_} {str(p).split(' on ')[0]} {p.precision} {p.layout}"
        entries = ("grad_input",) if p.pass_ == "grad-input" else ("grad_weight", "reduce")
        return (Unit(label, jit.source("direct_grad.cu", macros(p, self.tile)), entries),)

    def prepare(self, device: int) -> GradInput | GradWeight:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return GradInput(self, device) if self.problem.pass_ == "grad-input" else GradWeight(self, device)


def macros(p: Problem, tile: Tile) -> dict[str, int | float | str]:
    """The kernels' constants."""
    lead = 3 - p.rank
    taps = p.taps
    found: dict[str, int | float | str] = {
        "DTYPE": DTYPES[p.dtype],
        "CHANNELS_LAST": int(p.layout == "channels_last"),
        "GROUPS": p.groups,
        "CIN_G": p.in_channels // p.groups,
        "COUT_G": p.out_channels // p.groups,
        "CI_TILE": tile.ci,
        "CO_TILE": tile.co,
        "TAP_TILE": tile.taps,
    }
    for i, axis in enumerate("DHW"):
        at = i - lead
        for name, values, fill in (
            ("KERNEL", p.kernel, 1), ("STEP", p.stride, 1), ("DIL", p.dilation, 1), ("PAD", p.padding, 0)
        ):  # fmt: skip
            found[f"{name}_{axis}"] = fill if at < 0 else values[at]
    kernel = (1,) * lead + p.kernel
    found["UNROLL_D"] = kernel[0] if taps <= _UNROLLED else 1
    found["UNROLL_H"] = kernel[1] if kernel[1] * kernel[2] <= _UNROLLED else 1
    found["UNROLL_W"] = kernel[2] if kernel[2] <= _UNROLLED else 8
    return found


def full(values: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes along D, H and W of those along the last axes."""
    return (1,) * (3 - len(values)) + values


class GradInput(family.Prepared):
    """The gradient for the input, its kernel loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        p = choice.problem
        (unit,) = choice.sources()
        self._device = device
        kernel = jit.kernel(unit.source, "grad_input", gpu_of(device).arch, unit.label)
        self._run = Launcher(kernel, _THREADS, 0, "PPP" + "i" * 7 + "q")
        blocks = p.groups * -(-(p.in_channels // p.groups) // choice.tile.ci)
        total = p.batch * math.prod(p.size) * blocks
        self._grid = -(-total // _THREADS)
        self._sizes = (p.batch, *full(p.size), *full(p.out_size), total)
        self.packing = ("contiguous", p.pass_)
        """What `pack`'s result depends on beside the weight."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The weight itself, contiguous."""
        return weight.contiguous()

    def run(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False, claim: bool = False
    ) -> None:
        """Launches the kernel: ``x`` (the output's gradient) and ``out`` dense in the problem's layout; no bias."""
        assert bias is None
        self._run(self._device, self._grid, (x.data_ptr(), packed.data_ptr(), out.data_ptr(), *self._sizes))


class Sums:
    """The weight's gradient as one slice of sums for each range, and the kernel that adds them in their order."""

    def __init__(self, p: Problem, unit: Unit, device: int, splits: int) -> None:
        kernel = jit.kernel(unit.source, "reduce", gpu_of(device).arch, unit.label)
        self._reduce = Launcher(kernel, _THREADS, 0, "PPiqqq")
        self._device, self._splits = device, splits
        self._numel = math.prod(p.weight_shape)
        self._dtype = torch.float64 if p.dtype is torch.float64 else torch.float32

    def slices(self, like: Tensor) -> Tensor:
        """Memory for them on a tensor's device."""
        return like.new_empty_strided((self._splits * self._numel,), (1,), dtype=self._dtype)

    def add(self, slices: Tensor, out: Tensor) -> None:
        """Writes their sum into ``out`` (contiguous or channels_last)."""
        strides = out.stride()
        self._reduce(
            self._device,
            -(-self._numel // _THREADS),
            (slices.data_ptr(), out.data_ptr(), self._splits, strides[0], strides[1], strides[-1]),
        )


class GradWeight(family.PreparedWeight):
    """The gradient for the weight, its kernels loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        p = choice.problem
        (unit,) = choice.sources()
        self._device = device
        kernel = jit.kernel(unit.source, "grad_weight", gpu_of(device).arch, unit.label)
        self._run = Launcher(kernel, _THREADS, 0, "PPP" + "i" * 7 + "qq")
        self._sums = Sums(p, unit, device, choice.splits)
        positions = p.batch * math.prod(p.size)
        self._grid = _weight_blocks(p, choice.tile) * choice.splits
        self._sizes = (p.batch, *full(p.size), *full(p.out_size), positions, -(-positions // choice.splits))

    def run(self, x: Tensor, grad: Tensor, out: Tensor, lasting: bool = False) -> None:
        """Writes the weight's gradient into ``out`` (contiguous or channels_last).

        ``x`` (the input) and ``grad`` (the output's gradient) are dense in the problem's layout.
        """
        slices = self._sums.slices(x)
        self._run(self._device, self._grid, (x.data_ptr(), grad.data_ptr(), slices.data_ptr(), *self._sizes))
        self._sums.add(slices, out)


# --- the choice ------------------------------------------------------------------------------------------------------


def _weight_blocks(p: Problem, tile: Tile) -> int:
    """Blocks that one range of positions takes."""
    channels = -(-p.in_channels // 32) if p.layout == "channels_last" else p.in_channels
    return channels * -(-(p.out_channels // p.groups) // tile.co) * -(-p.taps // tile.taps)


def choose(p: Problem, gpu: Gpu) -> Choice | str:
    """The tile that the model expects to be fastest, or the sentence why these kernels cannot serve the problem."""
    return _choose(p, gpu)


@lru_cache(maxsize=4096)
def _choose(p: Problem, gpu: Gpu) -> Choice | str:
    if p.pass_ not in ("grad-input", "grad-weight"):
        return f"these kernels compute gradients only, not {p.pass_}"
    if p.batch == 0 or 0 in p.size:
        return "an empty input has no work"
    return _grad_input(p, gpu) if p.pass_ == "grad-input" else _grad_weight(p, gpu)


def _seconds(p: Problem, gpu: Gpu, clocks: float) -> tuple[float, str]:
    """(the model's estimate, what limits it) from the clocks of all multiprocessors together."""
    memory = (math.prod(p.input_shape) + math.prod(p.output_shape)) * p.dtype.itemsize / gpu.bandwidth
    work = clocks * (2 if p.dtype is torch.float64 else 1) / gpu.multiprocessors / gpu.clock
    work *= _MISSES.get((p.pass_, p.layout), 1.0)
    products = p.flops / 2 / (fma_lanes(gpu, p.dtype is torch.float64) * gpu.multiprocessors * gpu.clock)
    work = max(work, products)
    return max(memory, work) + 0.3 * min(memory, work) + _LAUNCH, "bytes" if memory > work else "loads"


def _conflict(p: Problem) -> float:
    """What a stride costs: lanes of neighbouring columns then read every stride-th element (NCHW)."""
    return 1.0 if p.layout == "channels_last" else 1 + 0.5 * (min(p.stride[-1], 8) - 1)


def _grad_input(p: Problem, gpu: Gpu) -> Choice:
    cin, cout = p.in_channels // p.groups, p.out_channels // p.groups
    tile = Tile(ci=next(n for n in (8, 4, 2, 1) if n == 1 or cin >= n))
    pixels, tiles = math.prod(p.size), p.groups * -(-cin // tile.ci)
    warps = p.batch * pixels * tiles / 32
    # Lanes of different channels read a line of weights each; and few blocks leave multiprocessors idle.
    lines = min(32, tiles) if p.layout == "channels_last" else min(tiles, -(-32 // pixels))
    apart = _LINE_CLOCKS * tile.ci * (lines - 1)
    clocks = warps * (_PLACE_CLOCKS + cout * p.taps * (_LOAD_CLOCKS * _conflict(p) + 1.2 * tile.ci + apart))
    clocks *= max(1.0, gpu.multiprocessors / max(1.0, warps * 32 / _THREADS))
    seconds, bound = _seconds(p, gpu, clocks)
    waits = cout * math.prod(p.kernel[:-1]) * _WAIT_CLOCKS / gpu.clock + _LAUNCH
    if waits > seconds:
        seconds, bound = waits, "latency"
    summary = f"a thread takes {tile.ci} input channels of a position, {p.taps} taps from L1"
    return Choice("direct", seconds, summary, bound, p, tile, 1)


def _grad_weight(p: Problem, gpu: Gpu) -> Choice:
    cout = p.out_channels // p.groups
    sums = _SUMS // 2 if p.dtype is torch.float64 else _SUMS
    pieces = -(-p.taps // sums)
    taps = -(-p.taps // pieces)
    co = next(n for n in (8, 4, 2, 1) if n == 1 or (cout >= n and n * taps <= sums))
    tile = Tile(1, co, taps)
    blocks = _weight_blocks(p, tile)
    positions = p.batch * math.prod(p.size)
    numel = math.prod(p.weight_shape)
    most = min(_SPLITS, -(-positions // _THREADS), max(1, _MAX_BYTES // (8 * numel)))
    splits = max(1, min(most, -(-8 * gpu.multiprocessors // blocks)))
    splits = -(-positions // -(-positions // splits))
    warps = positions * -(-p.in_channels // 32) if p.layout == "channels_last" else positions * p.in_channels / 32
    each = _PLACE_CLOCKS + taps * co * (_LOAD_CLOCKS * _conflict(p) + 1.2)
    clocks = warps * pieces * -(-cout // co) * each
    busy = blocks * splits / (2 * gpu.multiprocessors)
    if busy < 1:
        clocks /= busy
    seconds, bound = _seconds(p, gpu, clocks)
    seconds += 2 * splits * numel * 4 / gpu.bandwidth + splits * 20e-9
    summary = f"a thread sums {co} output channels x {taps} taps, {splits} ranges of positions, grid {blocks * splits}"
    return Choice("direct_wgrad", seconds, summary, bound, p, tile, splits)


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks."""
    return batches.too_long(p) or choose(p, gpu)
