"""The grad-weight family on tensor cores: tilings, their shared memory, a cost model, and a choice made ready for a device.

The kernel is ``kernels/wgrad.cu``: a GEMM over the pixels, whose accumulators are a tile of input channels x output
channels x neighbouring taps. K is split over blocks and warps; partial sums are added in a second step in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from upconv.cuda import jit
from upconv.cuda.gpu import Gpu
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.launch import Launcher
from upconv.problem import Problem

Triple = tuple[int, int, int]

_WARPS = 8
_ACCUMULATORS = 144  # registers of a thread; beside them fragments and addresses
_RUNS = 8  # of the second step, side by side
_PRECISIONS = {"tf32": 0, "ieee": 1, "fp16": 2, "bf16": 3}
_MAX_SLICE_BYTES = 96 << 20  # of partial sums

# --- the model's constants -------------------------------------------------------------------------------------------
_MMA = 1.65  # clocks of a multiprocessor for an mma.sync of 16 x 8 x 32 bytes
_LOAD = 1.15  # clocks of a 128-byte access to shared memory
_ISSUE = 0.06  # clocks of a multiprocessor for each 16-byte copy: addresses and bounds
_CHUNK = 900.0  # clocks a chunk costs: barriers, the first fragments
_STEP = 40.0  # clocks a step costs beside its instructions
_L2 = 24.0  # bytes a clock and multiprocessor
_LAUNCH = 7e-6  # seconds, both kernels


@dataclass(frozen=True)
class Tiling:
    """A block's tile and the kernel's constants; everything but the sizes of input and batch."""

    problem: Problem
    block: tuple[int, int]
    """Input channels x output channels of a block."""
    warp: tuple[int, int]
    """Of them a warp's; the warps that are left over split K."""
    taps: Triple
    """Taps (D, H, W) of a set."""
    tile: tuple[int, int, int, int]
    """Positions q of a chunk: images, D, H, W."""
    aligned: bool = True
    """NCHW: rows of the input begin at 16 bytes."""

    # --- the layer ---------------------------------------------------------------------------------------------------

    def _full(self, values: tuple[int, ...], fill: int) -> Triple:
        d, h, w = (fill,) * (3 - len(values)) + values
        return d, h, w

    @property
    def kernel(self) -> Triple:
        return self._full(self.problem.kernel, 1)

    @property
    def steps(self) -> Triple:
        return self._full(self.problem.stride, 1)

    @property
    def dilation(self) -> Triple:
        return self._full(self.problem.dilation, 1)

    @property
    def padding(self) -> Triple:
        return self._full(self.problem.padding, 0)

    @property
    def element(self) -> int:
        return self.problem.dtype.itemsize

    @property
    def vec(self) -> int:
        return 16 // self.element

    @property
    def channels_last(self) -> bool:
        return self.problem.layout == "channels_last"

    @property
    def channels(self) -> tuple[int, int]:
        """Input and output channels of a group."""
        p = self.problem
        return p.in_channels // p.groups, p.out_channels // p.groups

    # --- M, N and taps -----------------------------------------------------------------------------------------------

    @property
    def sets(self) -> Triple:
        d, h, w = (-(-k // t) for k, t in zip(self.kernel, self.taps))
        return d, h, w

    @property
    def set_taps(self) -> int:
        return math.prod(self.taps)

    @property
    def warps_k(self) -> int:
        return _WARPS // (self.block[0] // self.warp[0] * (self.block[1] // self.warp[1]))

    @property
    def promote(self) -> bool:
        """IEEE: sums leave the tensor cores, which truncate them, after every chunk."""
        return self.problem.precision == "ieee"

    @property
    def accumulators(self) -> int:
        """Registers of a thread."""
        return self.set_taps * self.warp[0] * self.warp[1] // 32 * (2 if self.promote else 1)

    @property
    def channel_tiles(self) -> tuple[int, int]:
        (ci, co), (m, n) = self.channels, self.block
        return -(-ci // m), -(-co // n)

    @property
    def tiles(self) -> int:
        """Blocks that one split of K takes."""
        return self.problem.groups * math.prod(self.channel_tiles) * math.prod(self.sets)

    # --- K and shared memory -----------------------------------------------------------------------------------------

    def _spans(self) -> Triple:
        """Rows (D, H) and columns of g that a chunk holds."""
        spans = []
        for axis in range(3):
            count, taps = self.tile[1 + axis], self.taps[axis]
            dense = (count - 1) * self.steps[axis] + (taps - 1) * self.dilation[axis] + 1
            spans.append(dense if axis == 2 else min(dense, count * taps))
        return spans[0], spans[1], spans[2]

    @property
    def strips(self) -> int:
        """Strips of 8 positions of a row."""
        return math.prod(self.tile) // 8

    @property
    def k_steps(self) -> int:
        return self.strips if self.element == 4 else self.strips // 2

    @property
    def units(self) -> tuple[int, int]:
        """16-byte units of a row of one channel (NCHW) of x and of g."""
        x = self.tile[3] + (0 if self.aligned else self.vec - 1)
        return -(-x // self.vec), -(-(self._spans()[2] + self.vec - 1) // self.vec)

    @property
    def stage_bytes(self) -> tuple[int, int]:
        """Bytes of x's and of g's tile."""
        n, d, h, w = self.tile
        rows_d, rows_h, columns = self._spans()
        if self.channels_last:
            pitches = [(b + 23) // 32 * 32 + 8 if self.element == 4 else b + 8 for b in self.block]
            x, g = n * d * h * w * pitches[0], n * rows_d * rows_h * columns * pitches[1]
        else:
            pitches = [(u | 1) * self.vec for u in self.units]
            x, g = n * d * h * self.block[0] * pitches[0], n * rows_d * rows_h * self.block[1] * pitches[1]
        return x * self.element, g * self.element

    @property
    def shared_bytes(self) -> int:
        return 2 * sum(self.stage_bytes)

    @property
    def copied_units(self) -> int:
        """16-byte copies of a chunk."""
        n, d, h, w = self.tile
        rows_d, rows_h, columns = self._spans()
        if self.channels_last:
            x, g = n * d * h * w * -(-self.block[0] // self.vec), n * rows_d * rows_h * columns * -(-self.block[1] // self.vec)
        else:
            x, g = n * d * h * self.block[0] * self.units[0], n * rows_d * rows_h * self.block[1] * self.units[1]
        return x + g

    @property
    def needs_alignment(self) -> bool:
        """Whether both tensors must begin at 16 bytes."""
        return self.channels_last or self.aligned

    def counts(self, p: Problem) -> tuple[int, int, int, int]:
        """Chunks per axis: images, D, H, W."""
        n, d, h, w = (-(-size // tile) for size, tile in zip((p.batch, *self._full(p.size, 1)), self.tile))
        return n, d, h, w

    def macros(self) -> dict[str, int | float | str]:
        """The kernel's constants."""
        p = self.problem
        axes = ("D", "H", "W")
        found: dict[str, int | float | str] = {
            "ELEMENT": self.element,
            "PRECISION": _PRECISIONS[p.precision],
            "PROMOTE": int(self.promote),
            "CHANNELS_LAST": int(self.channels_last),
            "GROUPS": p.groups,
            "CIN_G": self.channels[0],
            "COUT_G": self.channels[1],
            "BLOCK_M": self.block[0],
            "BLOCK_N": self.block[1],
            "WARP_M": self.warp[0],
            "WARP_N": self.warp[1],
            "TILE_N": self.tile[0],
            "ALIGNED_X": int(self.aligned),
            "SHARED_BYTES_PLANNED": self.shared_bytes,
        }
        for i, axis in enumerate(axes):
            found |= {
                f"KERNEL_{axis}": self.kernel[i],
                f"STEP_{axis}": self.steps[i],
                f"DIL_{axis}": self.dilation[i],
                f"PAD_{axis}": self.padding[i],
                f"TAPS_{axis}": self.taps[i],
                f"SETS_{axis}": self.sets[i],
                f"TILE_{axis}": self.tile[1 + i],
            }
        return found


@dataclass(frozen=True)
class Unit:
    """A source to be compiled and its kernels' names."""

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
    splits: int
    """Ranges of chunks that different blocks take."""
    seconds: float
    """The model's estimate."""
    bound: str
    """What limits it, by the model."""
    family: str = field(default="wgrad", init=False)

    @property
    def summary(self) -> str:
        t = self.tiling
        shape, taps = "x".join(map(str, t.tile)), "x".join(map(str, t.taps))
        return (
            f"mma.sync {t.problem.precision}, {t.block[0]}x{t.block[1]} channels x {taps} taps a block, chunks of {shape} "
            f"(NxDxHxW of q), K in {self.splits} x {t.warps_k} slices, {t.shared_bytes // 1024} KB shared, "
            f"grid {t.tiles * self.splits}"
        )

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all input sizes that share the tile."""
        p = self.problem
        label = f"wgrad {str(p).split(' on ')[0]} {p.precision} {p.layout}"
        return (Unit(label, jit.source("wgrad.cu", self.tiling.macros()), ("wgrad", "reduce")),)

    def prepare(self, device: int) -> Prepared:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return Prepared(self, device)


class Prepared:
    """A choice's kernels, loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        t, p = choice.tiling, choice.problem
        (unit,) = choice.sources()
        arch = gpu_of(device).arch
        self._device, self._tiling, self._problem = device, t, p
        self._wgrad = Launcher(
            jit.kernel(unit.source, "wgrad", arch, unit.label), 32 * _WARPS, t.shared_bytes, "PPP" + "i" * 12
        )
        self._reduce = Launcher(jit.kernel(unit.source, "reduce", arch, unit.label), 32 * _RUNS, 0, "PPiqqq")
        counts = t.counts(p)
        chunks = math.prod(counts)
        full = (1,) * (3 - p.rank)
        self._sizes = (p.batch, *full, *p.size, *full, *p.out_size, *counts[1:], chunks, -(-chunks // choice.splits))
        self._grid = t.tiles * choice.splits
        self._slices = choice.splits * t.warps_k
        self._numel = math.prod(p.weight_shape)

    def run(self, x: Tensor, grad: Tensor, out: Tensor) -> None:
        """Writes the weight's gradient into ``out`` (its spatial dimensions dense, as contiguous and channels_last are).

        ``x`` (the input) and ``grad`` (the output's gradient) are dense in the problem's layout.
        """
        if self._tiling.needs_alignment:
            x, grad = (t.clone() if t.data_ptr() & 15 else t for t in (x, grad))
        partial = torch.empty(self._slices * self._numel, dtype=torch.float32, device=x.device)
        self._wgrad(self._device, self._grid, (x.data_ptr(), grad.data_ptr(), partial.data_ptr(), *self._sizes))
        strides = out.stride()
        self._reduce(
            self._device,
            -(-self._numel // 32),
            (partial.data_ptr(), out.data_ptr(), self._slices, strides[0], strides[1], strides[-1]),
        )


# --- candidates ------------------------------------------------------------------------------------------------------


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why this family cannot serve a problem, in a sentence; None when it can."""
    if p.dtype is torch.float64:
        return "tensor cores multiply float64 only by mma.m8n8k4, which this family does not use"
    if gpu.capability < (8, 0):
        return f"tensor cores of compute capability {gpu.capability[0]}.{gpu.capability[1]} lack TF32 and bfloat16"
    if p.in_channels // p.groups < 4 and p.groups > 1:
        return f"{p.in_channels // p.groups} input channels per group leave most of a matrix instruction empty"
    return None


def candidates(p: Problem, gpu: Gpu, aligned: bool) -> Iterator[Tiling]:
    """Every tiling worth a look. ``aligned``: rows of an NCHW input begin at 16 bytes."""
    cin, cout = p.in_channels // p.groups, p.out_channels // p.groups
    aligned = aligned and p.layout == "nchw"
    limit = gpu.shared_bytes
    for block, taps in product(_blocks(cin, cout), _tap_sets(p)):
        warp = _warps(p, block, math.prod(taps))
        if warp is None:
            continue
        for tile in _tiles(p):
            t = Tiling(p, block, warp, taps, tile, aligned)
            if t.shared_bytes <= limit and t.k_steps >= t.warps_k and t.strips % (1 if t.element == 4 else 2) == 0:
                yield t


def _blocks(cin: int, cout: int) -> Iterator[tuple[int, int]]:
    for m, n in product((16, 32, 64, 128), (8, 16, 32, 64, 128)):
        if (m < 2 * cin or m == 16) and (n < 2 * cout or n == 8) and 4 * m * n >= min(cin, 64) * min(cout, 64):
            yield m, n


def _tap_sets(p: Problem) -> tuple[Triple, ...]:
    """Boxes of neighbouring taps."""
    d, h, w = (1,) * (3 - p.rank) + p.kernel

    def parts(k: int) -> list[int]:
        return sorted({-(-k // n) for n in range(1, k + 1)})

    wide = [v for v in parts(w) if v <= 9]
    found = [(1, 1, v) for v in wide]
    if max(wide) == w:
        found += [(1, v, w) for v in parts(h)[1:]]
        found += [(v, h, w) for v in parts(d)[1:]]
    if 1 not in wide or w == 2:
        found += [(1, v, 1) for v in parts(h)]
    return tuple(dict.fromkeys(t for t in found if math.prod(t) <= 36))


def _warps(p: Problem, block: tuple[int, int], taps: int) -> tuple[int, int] | None:
    """The warp's share of a block with the fewest reads of fragments that leaves its sums in registers."""
    most = _ACCUMULATORS // 2 if p.precision == "ieee" else _ACCUMULATORS
    best: tuple[float, tuple[int, int]] | None = None
    for m, n in product((16, 32, 64), (8, 16, 32, 64)):
        if block[0] % m or block[1] % n or taps * m * n // 32 > most:
            continue
        warps = block[0] // m * (block[1] // n)
        if warps > _WARPS or _WARPS % warps:
            continue
        reads = (m / 4 + taps * n / 4) / (m * n * taps)
        if best is None or reads < best[0]:
            best = reads, (m, n)
    return None if best is None else best[1]


def _tiles(p: Problem) -> tuple[tuple[int, int, int, int], ...]:
    if p.rank == 1:
        return tuple((n, 1, 1, w) for n in (1, 2, 4) for w in (8, 16, 32, 64, 128, 256) if 64 <= n * w <= 512)
    shapes = [(n, 1, h, w) for n in (1, 2, 4) for h in (1, 2, 4, 8) for w in (8, 16, 32, 64) if 32 <= n * h * w <= 256]
    if p.rank == 3:
        shapes += [(1, d, h, w) for d in (2, 4) for h in (2, 4, 8) for w in (8, 16, 32) if 32 <= d * h * w <= 256]
    return tuple(shapes)


# --- the cost model --------------------------------------------------------------------------------------------------


def _chunk_clocks(t: Tiling) -> tuple[float, str]:
    """(clocks of a chunk on its multiprocessor, what takes most of them); the same for all sizes."""
    products = 3 if t.promote else 1
    warps = t.block[0] // t.warp[0] * (t.block[1] // t.warp[1])
    fragments = t.warp[0] // 16 * (t.warp[1] // 8)
    matrix = t.k_steps * warps * t.set_taps * fragments * products * _MMA
    step_w = t.steps[2]
    conflict = 1.0
    if t.element == 4:
        conflict = {1: 1.0, 2: 2.0 if not t.channels_last else 2.0, 4: 2.0}.get(math.gcd(step_w, 8), 1.0 if step_w % 2 else 4.0)
    elif not t.channels_last:
        conflict = 1.5 if step_w == 1 else 2.5
    elif step_w % 2 == 0:
        conflict = 2.0
    reads = t.k_steps * warps * (t.warp[0] / 4 * (1.3 if not t.channels_last and t.element == 2 and not t.aligned else 1))
    reads += t.k_steps * warps * t.set_taps * t.warp[1] / 4 * conflict
    shared = reads * _LOAD + t.copied_units * 16 / 128
    issue = t.copied_units * _ISSUE * 1.0
    ragged = t.channels_last and (t.channels[0] % t.vec or t.channels[1] % t.vec)
    l2 = t.copied_units * 16 / _L2 * (6 if ragged else 1)
    parts = {"tensor cores": matrix, "shared memory": shared, "L2": l2}
    bound = max(parts, key=lambda name: parts[name])
    total = max(parts.values()) + 0.25 * (sum(parts.values()) - max(parts.values())) + issue
    return total + _CHUNK + t.k_steps / t.warps_k * _STEP, bound


def _whole(t: Tiling, chunk: tuple[float, str], p: Problem, gpu: Gpu) -> tuple[float, str, int]:
    """(seconds, what bounds them, splits of K)."""
    clocks, bound = chunk
    chunks = math.prod(t.counts(p))
    numel = math.prod(p.weight_shape)
    found: tuple[float, str, int] | None = None
    most = max(1, min(chunks, _MAX_SLICE_BYTES // (4 * numel * t.warps_k)))
    options = {min(most, max(1, gpu.multiprocessors * k // t.tiles)) for k in (1, 2, 3, 4)} | {1}
    memory = (math.prod(p.input_shape) + math.prod(p.output_shape)) * t.element / gpu.bandwidth
    for splits in options:
        per_split = -(-chunks // splits)
        splits = -(-chunks // per_split)
        waves = -(-t.tiles * splits // gpu.multiprocessors)
        work = waves * per_split * clocks / gpu.clock
        slices = splits * t.warps_k * numel * 4
        seconds = max(work, memory) + 0.15 * min(work, memory) + 2 * slices / (2 * gpu.bandwidth) + _LAUNCH
        seconds += splits * t.warps_k / _RUNS * 0.15e-6
        if found is None or seconds < found[0]:
            found = seconds, "bytes" if memory > work else bound, splits
    assert found is not None
    return found


def choose(p: Problem, gpu: Gpu) -> Choice | str:
    """The cheapest tiling by the model, or the sentence why tensor cores cannot serve the problem."""
    return _choose(p, gpu)


@lru_cache(maxsize=4096)
def _choose(p: Problem, gpu: Gpu) -> Choice | str:
    refused = refusal(p, gpu)
    if refused:
        return refused
    best: tuple[float, str, int, Tiling] | None = None
    aligned = p.size[-1] * p.dtype.itemsize % 16 == 0
    for t, clocks in _tilings(_any_size(p), gpu, aligned):
        seconds, bound, splits = _whole(t, clocks, p, gpu)
        if best is None or seconds < best[0]:
            best = seconds, bound, splits, t
    if best is None:
        return f"no tile of this layer with its halo fits in {gpu.shared_bytes // 1024} KB of shared memory"
    seconds, bound, splits, t = best
    return Choice(t, p, gpu, splits, seconds, bound)


def _any_size(p: Problem) -> Problem:
    """The layer at one size for all, so that its tilings and kernels are found again at the next size."""
    size = tuple(1024 + 2 * pad // s for pad, s in zip(p.padding, p.stride))
    return p.with_(batch=1, size=size, bias=False, pass_="grad-weight")


@lru_cache(maxsize=256)
def _tilings(layer: Problem, gpu: Gpu, aligned: bool) -> tuple[tuple[Tiling, tuple[float, str]], ...]:
    """A layer's tilings with the clocks of their chunks."""
    return tuple((t, _chunk_clocks(t)) for t in candidates(layer, gpu, aligned))
