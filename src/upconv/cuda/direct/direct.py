"""The direct family: transposed convolution on CUDA cores, for few channels per group and for float64.

``kernels/direct.cu`` and, for depthwise layers, ``kernels/direct_walk_nchw.cu`` and ``direct_walk.cu`` say how a block
works. Here are their tiles, what each of them costs by a model, and the launch. Every valid forward has a kernel: one
of these, or ``direct_any`` where no tile fits (huge kernels, strides or dilations).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.compile.launch import Launcher
from upconv.cuda.direct import direct_grad
from upconv.cuda.gpu import Gpu, fma_lanes, threads_per_sm
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.rearrange import batches
from upconv.derived import derived
from upconv.problem import Problem

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_ANY_THREADS = 256
_MAX_THREADS = 512
_MAX_SUMS = 96  # per thread in 32-bit registers, of 255; windows, weights and addresses need the rest
_MAX_UNROLLED = 1024  # multiply-adds in a kernel's body: 1.0 s of NVRTC
_WALK_THREADS = 128
# Of a walk's time, where several threads have a cell, and rows begin at the vectors that they store
# (docs/experiments.md).
_BY_PIECES = 0.95
_BLOCKS = 8  # blocks of a kind of thread whose chunks and splits are all estimated
_MAX_HELD = 4  # as in direct.cu: loads of four halves that wait in registers
MARGIN = 1.1  # `Choice.margin`
_MAX_INT = 2**30  # sizes and geometry of the tiled kernel are int32 with room for a halo


class Unit(NamedTuple):
    """One source for NVRTC."""

    label: str
    source: str
    entries: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """One dimension of the work, as the kernel needs it: cell ``j`` holds the outputs ``j*stride ... + stride - 1``."""

    size: int
    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @derived
    def cells(self) -> int:
        return -(-self.out // self.stride)

    @derived
    def shifts(self) -> tuple[int, ...]:
        """For each tap the input index minus the cell's: ``floor((stride - 1 + padding - k * dilation) / stride)``.

        The tap meets output ``t = (k * dilation - padding) mod stride`` of the cell, at ``(t + padding - k * dilation)
        / stride``, which divides.
        """
        return tuple((self.stride - 1 + self.padding - k * self.dilation) // self.stride for k in range(self.kernel))

    @derived
    def least(self) -> int:
        return self.shifts[-1]

    @derived
    def span(self) -> int:
        """How many more inputs than cells the outputs of neighbouring cells read."""
        return self.shifts[0] - self.shifts[-1]

    @derived
    def live(self) -> int:
        """Phases that have taps."""
        return len({(k * self.dilation - self.padding) % self.stride for k in range(self.kernel)})

    @derived
    def tap_step(self) -> int:
        """Distance between neighbouring taps of a phase."""
        return self.stride // math.gcd(self.stride, self.dilation)


@lru_cache(maxsize=256)
def axes(p: Problem) -> tuple[Axis, Axis, Axis]:
    """Depth, height and width of a problem; dimensions that it lacks have one input, tap and output."""
    found = [Axis(*a) for a in zip(p.size, p.out_size, p.kernel, p.stride, p.padding, p.dilation)]
    d, h, w = [Axis(1, 1, 1, 1, 0, 1)] * (3 - p.rank) + found
    return d, h, w


@dataclass(frozen=True)
class Tile:
    """A configuration of the tiled kernel, by the names of its macros."""

    co: int
    """Output channels per thread (CO)."""
    cells: int
    """Neighbouring cells along W per thread (CELLS)."""
    block_x: int
    """Threads along W; a power of two."""
    block_h: int
    """Cells along H per block."""
    slots: int
    """Groups per block."""
    chunk: int
    """Input channels of each group per stage."""
    phases: int = 1
    """Output rows of a cell per thread (PHASES_H): one or all."""
    split: int = 1
    """Sets of threads that share the input channels of a stage."""


@dataclass(frozen=True)
class Walk:
    """A configuration of the depthwise kernel, by the names of its macros; ``strip`` is no macro."""

    cells: int
    """Neighbouring cells along W per thread (CELLS)."""
    channels: int
    """Neighbouring channels per thread (CHANNELS): 1 for NCHW."""
    strip: int
    """Cells along H that a thread walks down."""
    pieces: int = 1
    """Threads of a cell along W, each of which stores a vector of its outputs (PIECES); if several, ``cells`` is 1."""


@lru_cache(maxsize=4096)
def geometry(p: Problem, tile: Tile) -> dict[str, int]:
    """The macros of the tiled kernel for a problem; no size of the image is among them."""
    d, h, w = axes(p)
    last, double = p.layout == "channels_last", p.dtype == torch.float64
    vec = 2 if double else 4
    ci = p.in_channels // p.groups
    quads = p.dtype.itemsize == 2 and tile.cells * tile.block_x % 4 == 0
    if last:
        quads = p.dtype.itemsize == 2 and tile.slots * tile.chunk % 4 == 0 and p.in_channels % 4 == 0
        quads = quads and (tile.chunk == ci if tile.slots > 1 else ci % 4 == 0)
    run = tile.cells * w.stride
    run_pitch = run | 1 if run % vec else run + (vec if run // vec % 2 == 0 else 0)
    rows = tile.block_h * h.stride // tile.phases
    threads = -(-tile.split * tile.slots * rows * tile.block_x // 32) * 32
    chunks = -(-ci // tile.chunk)
    # Halves are loaded four at a time, from columns that are multiples of four.
    lead = w.least % 4 if quads and not last else 0
    # The threads of a warp (of half a warp for doubles) have one stride over all its rows.
    pitch, banks = tile.cells | 1, 16 if double else 32
    row_pitch = -(-(tile.block_x * tile.cells + w.span + lead) // tile.cells) * pitch
    if tile.block_x < banks and tile.block_h > 1:
        row_pitch += (tile.block_x * pitch - row_pitch) % banks
    # Words of the epilogue per output channel of a thread: of PART channels at once they stay below 48 KiB.
    words = tile.slots * run * tile.block_x * rows if last else threads * run_pitch
    part = tile.co
    while part > 1 and part * words * (16 // vec) > 3 * 2**14:
        part = max(k for k in range(1, part) if tile.co % k == 0)
    return {
        **_common(p, tile.co),
        "ANY": 0,
        "THREADS": threads,
        "CELLS": tile.cells,
        "BLOCK_X": tile.block_x,
        "BLOCK_H": tile.block_h,
        "SLOTS": tile.slots,
        "CHUNK": tile.chunk,
        "PHASES_H": tile.phases,
        "SPLIT": tile.split,
        "STAGES": 2 if chunks * d.kernel > 1 else 1,
        "MIN_H": h.least,
        "SPAN_H": h.span,
        "MIN_W": w.least,
        "SPAN_W": w.span,
        "STEP_KH": h.tap_step,
        "STEP_ROW": h.dilation * h.tap_step // h.stride,
        "QUADS": int(quads),
        "LEAD": lead,
        "ROW_PITCH": row_pitch,
        "RUN_PITCH": run_pitch,
        "PART": part,
        "MIN_BLOCKS": max(1, min(_resident(threads, _registers(p, tile)), 16)),
    }


@lru_cache(maxsize=1024)
def walk_geometry(p: Problem, walk: Walk) -> dict[str, int]:
    """The macros of the depthwise kernels for a problem; no size of the image is among them."""
    (_, h, w), last = axes(p), p.layout == "channels_last"
    return {
        **_common(p, 1),
        "THREADS": _WALK_THREADS,
        "CELLS": walk.cells,
        "CHANNELS": walk.channels,
        "PIECES": walk.pieces,
        "MIN_H": h.least,
        "SPAN_H": h.span,
        "MIN_W": w.least,
        "SPAN_W": w.span,
        "MIN_BLOCKS": max(1, min(_resident(_WALK_THREADS, _walk_registers(p, walk)), 16)) if last else 4,
    }


def _common(p: Problem, co: int) -> dict[str, int]:
    found = {
        "DTYPE": _DTYPES[p.dtype],
        "LAST": int(p.layout == "channels_last"),
        "GROUPS": p.groups,
        "CI": p.in_channels // p.groups,
        "CO_GROUP": p.out_channels // p.groups,
        "CO": co,
    }
    for name, axis in zip("DHW", axes(p)):
        found |= {f"K{name}": axis.kernel, f"S{name}": axis.stride, f"P{name}": axis.padding, f"D{name}": axis.dilation}
    return found


def shared_words(m: dict[str, int]) -> tuple[int, int, int]:
    """Words of a kernel's shared memory: a stage's weights, a whole stage, and all of it with the epilogue's."""
    vec = 2 if m["DTYPE"] == 3 else 4
    rows = m["BLOCK_H"] * m["SH"] // m["PHASES_H"]
    plane = (m["BLOCK_H"] + m["SPAN_H"]) * m["ROW_PITCH"] | 1
    channels = m["SLOTS"] * m["CHUNK"]
    weights = channels * m["KH"] * weight_row(m)
    stage = -(-(weights + channels * plane) // vec) * vec
    run = m["CELLS"] * m["SW"]
    if m["LAST"]:
        epilogue = rows * m["BLOCK_X"] * (run * m["SLOTS"] * m["PART"] | 1)
    else:
        epilogue = 0 if _stores_directly(m) else m["THREADS"] * m["RUN_PITCH"] * m["PART"]
    if m["SPLIT"] > 1:
        epilogue = max(epilogue, m["PHASES_H"] * m["CO"] * run * rows * m["BLOCK_X"])
    return weights, stage, max(m["STAGES"] * stage, epilogue)


def weight_row(m: dict[str, int]) -> int:
    """Words of the weights of one (depth tap, input channel, height tap), padded to 16 bytes."""
    vec = 2 if m["DTYPE"] == 3 else 4
    return -(-m["KW"] * m["CO"] // vec) * vec


def packed_words(m: dict[str, int]) -> int:
    """Elements of the packed weights."""
    return m["GROUPS"] * -(-m["CO_GROUP"] // m["CO"]) * m["KD"] * m["CI"] * m["KH"] * weight_row(m)


def _stores_directly(m: dict[str, int]) -> bool:
    run = m["CELLS"] * m["SW"]
    return not m["LAST"] and run * (4, 2, 2, 8)[m["DTYPE"]] <= 16 and run & (run - 1) == 0


def _resident(threads: int, registers: int) -> int:
    """Blocks per multiprocessor by their registers: 16384 for each of its four parts, whole warps in each."""
    return 16384 // (32 * registers) * 4 // (-(-threads // 32))


def _registers(p: Problem, tile: Tile) -> int:
    """Registers per thread, generously: sums, a window, a pack of weights, addresses."""
    w = axes(p)[2]
    words = 2 if p.dtype == torch.float64 else 1
    sums = words * _sums(p, tile)
    # What ptxas takes besides grows with the work that it can interleave: below these it spills.
    # Loads in flight; addresses of channels_last, conversions of halves.
    half = p.dtype.itemsize == 2
    held = (
        6 * min(_held(p, tile), _MAX_HELD) + 8 * (p.layout == "channels_last") + 16 * half + 8 * (axes(p)[0].kernel > 1)
    )
    held += 24 * (half and tile.phases > 1 and sums >= 56)
    if tile.phases > 1:
        besides = 27 + 3 * tile.phases + 3 * min(-(-w.kernel * tile.co * words // 4), 12) + 16 * (words - 1) + held
    else:
        besides = 56 + 16 * (sums >= 28) + 16 * (sums >= 48) + 32 * (words - 1) + held
    need = sums + words * (tile.cells + w.span) + besides
    return min(max(-(-need // 8) * 8, 48), 255)


def _held(p: Problem, tile: Tile) -> int:
    """Loads of four halves per thread and stage (HELD) while there are sums to keep; 0 for other types."""
    d, h, w = axes(p)
    if p.dtype.itemsize > 2 or (p.in_channels // p.groups <= tile.chunk and d.kernel == 1):
        return 0
    pixels = (tile.block_h + h.span) * (tile.block_x * tile.cells + w.span)
    threads = tile.split * tile.slots * tile.block_h * h.stride // tile.phases * tile.block_x
    return -(-tile.slots * tile.chunk * pixels // (4 * threads))


def _sums(p: Problem, tile: Tile) -> int:
    """Sums of a thread; all but those of phases without taps."""
    _, h, w = axes(p)
    if tile.phases == 1:
        return tile.co * tile.cells * w.stride
    return tile.co * tile.cells * w.live * h.live


def _walk_registers(p: Problem, walk: Walk) -> int:
    """Registers per thread of the depthwise kernel in channels_last: weights, window, the next row, a row of sums."""
    _, h, w = axes(p)
    words = 2 if p.dtype == torch.float64 else 1
    columns = (walk.cells + w.span) * walk.channels
    need = h.kernel * w.kernel * walk.channels + (h.span + 2) * columns + walk.cells * w.stride * walk.channels
    return min(max(-(-(words * need + 48) // 8) * 8, 48), 255)


# --- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cost:
    seconds: float
    bound: str
    blocks: int
    resident: int


@dataclass(frozen=True)
class _Facts:
    """What the model asks of a tile that is the same at every size of the image."""

    macros: dict[str, int]
    shared: int
    """Bytes."""
    registers: int
    held: int
    direct_stores: bool
    row: int
    """Words of weights, as `weight_row`."""


@lru_cache(maxsize=16384)  # a layer has up to 3,000 tiles; kept, a new size takes a third of the time
def _facts(layer: Problem, tile: Tile) -> _Facts:
    m = geometry(layer, tile)
    words = 2 if layer.dtype == torch.float64 else 1
    shared = shared_words(m)[2] * 4 * words
    return _Facts(m, shared, _registers(layer, tile), _held(layer, tile), _stores_directly(m), weight_row(m))


def _cost(p: Problem, tile: Tile, facts: _Facts, gpu: Gpu) -> _Cost | None:
    """The model's time of a tile in seconds, or None where it does not fit the GPU."""
    m = facts.macros
    d, h, w = axes(p)
    double, last = p.dtype == torch.float64, p.layout == "channels_last"
    words = 2 if double else 1
    item = p.dtype.itemsize
    shared = facts.shared
    if shared > gpu.shared_bytes:
        return None
    threads, registers = m["THREADS"], facts.registers
    resident = min(
        _resident(threads, registers), gpu.shared_per_sm // (shared + 1024), threads_per_sm(gpu) // threads, 32
    )
    if resident < 1:
        return None
    ci, co_group = m["CI"], m["CO_GROUP"]
    cout_blocks = -(-co_group // tile.co)
    block_w = tile.cells * tile.block_x
    tiles = -(-h.cells // tile.block_h) * -(-w.cells // block_w)
    blocks = p.batch * -(-p.groups // tile.slots) * cout_blocks * d.out * tiles
    if blocks >= 2**31:
        return None
    # Per block, in instructions of a warp and in passes over shared memory of 128 bytes.
    rows_of_threads = tile.block_h * h.stride // tile.phases
    warps_per_cells = tile.slots * max(1.0, tile.block_h * tile.block_x / 32)
    depth_taps = d.kernel / d.stride
    lines = warps_per_cells * h.kernel * depth_taps * ci  # (tap row, channel) pairs over all threads, in warps
    if tile.phases == 1:
        lines *= _longest_phase(h)
    fmas = lines * w.kernel * tile.co * tile.cells
    window = (tile.cells + w.span) * (1 if tile.phases == 1 else (h.span + 1) / h.kernel)
    packs = facts.row // (4 // words)
    passes = lines * (window * words + packs)
    issues = fmas + lines * (window + packs + (8 if tile.phases == 1 else 2))
    rows = tile.slots * ci * depth_taps * (tile.block_h + h.span)
    columns = block_w + w.span + m["LEAD"]
    if m["QUADS"]:
        loads = rows * columns / 32
        issues += loads * 10
    elif last:
        loads = rows * columns / 32
        issues += loads * 24
    else:
        whole = columns // 32 if columns % 32 <= 20 else -(-columns // 32)
        rest = columns - 32 * whole if columns % 32 <= 20 else 0
        loads = rows * (whole + rest / 32)
        issues += rows * whole * (12 if item == 2 else 7) + rows * (12 if whole else 0) + rows * rest / 32 * 24
    passes += loads * words
    outputs = tile.slots * tile.co * tile.block_h * h.stride * block_w * w.stride / 32
    run = tile.cells * w.stride
    if facts.direct_stores:
        issues += outputs * 2
    else:
        passes += outputs * 2 * words
        if last:
            issues += outputs * 24
        else:
            wide = math.gcd(4 // words, run, p.out_size[-1])
            lanes = min(tile.block_x, 32)
            segments = outputs / run * (32 / lanes)
            issues += outputs + segments * (12 + math.ceil(lanes * run / (32 * wide)) * (6 + 2 * wide))
    if tile.split > 1:
        sums = tile.phases * tile.co * run * rows_of_threads * tile.block_x / 32
        issues += 2 * (tile.split - 1) * sums
        passes += 2 * (tile.split - 1) * sums * words
    steps = math.ceil(ci / tile.chunk) * depth_taps
    # One block alone: copies, barriers, stores.
    slow = facts.held > _MAX_HELD or (item == 2 and not m["QUADS"])
    latency = (1.2e-6 if slow else 0.4e-6) * max(0, steps - 1) + 2.0e-6 + 0.2e-6 * (tile.split - 1)
    weights = tile.slots * ci * depth_taps * h.kernel * facts.row * 4 * words
    l2 = (
        rows * columns * item * (max(1.0, 32 / (tile.slots * ci * item)) if last else 1 + 32 / (columns * item))
        + weights
    )
    store_run = tile.slots * m["PART"] * item if last and tile.slots * tile.co < p.out_channels else 32
    l2 += outputs * 32 * item * max(1.0, 32 / store_run)
    clocks = gpu.multiprocessors * gpu.clock
    in_flight = min(blocks, gpu.multiprocessors * resident)
    warps = in_flight / gpu.multiprocessors * threads / 32
    # Below 12 warps per multiprocessor latencies show; unrolled taps have more to do meanwhile.
    hidden = min(1.0, warps / (12 if tile.phases == 1 else 8))
    terms = {
        "bytes": p.bytes / gpu.bandwidth,
        "L2 traffic": blocks * l2 / (1.4 * gpu.bandwidth),
        "FMA throughput": blocks * fmas * 32 / (fma_lanes(gpu, double) * clocks * 0.85 * hidden),
        "shared memory": blocks * passes / (clocks * 0.9 * hidden),
        "instruction issue": blocks * issues / (4 * clocks * 0.8 * hidden),
        "latency": blocks * latency / in_flight,
    }
    bound = max(terms, key=lambda name: terms[name])
    waves = blocks / gpu.multiprocessors
    balance = math.ceil(waves) / waves if waves > 1 else 1 / max(waves, 0.05)
    body = terms[bound] + 0.2 * (sum(terms.values()) - terms[bound])
    seconds = 2e-6 + (body * min(balance, 4.0) if bound != "bytes" else body)
    return _Cost(seconds, bound, blocks, resident)


def _walk_cost(p: Problem, walk: Walk, gpu: Gpu) -> _Cost:
    """The model's time of a depthwise kernel, in seconds."""
    return _walk_cost_last(p, walk, gpu) if p.layout == "channels_last" else _walk_cost_nchw(p, walk, gpu)


def _walk_cost_nchw(p: Problem, walk: Walk, gpu: Gpu) -> _Cost:
    """Fitted to 12 layers and dtypes on an H200, 8 strips and up to 3 widths each.

    It chooses what takes 1% longer than a layer's best; times are off by 6%.
    """
    _, h, w = axes(p)
    item, half = p.dtype.itemsize, p.dtype.itemsize == 2
    blocks = walk_grid(p, walk)[2] // _WALK_THREADS
    run, columns = walk.cells * w.stride // walk.pieces, _walk_columns(p, walk)
    vector = _vector(run, item)
    lines, units = run // vector, run // math.gcd(vector, p.out_size[-1])
    taps = p.taps / walk.pieces  # of a thread
    fmas = taps * walk.cells / h.stride  # of a row of outputs
    stores = 4 if units == 1 else 6 + 3 * lines + 10 * units
    row = fmas + taps / 4 / h.stride + run * (1 + 2 * half) + 6 + stores
    step = h.stride * row + columns * (7 + h.span)
    issues = walk.strip * step + h.span * columns * 5 + 60 + p.taps / 16
    warps, resident = blocks * _WALK_THREADS / 32, min(5, threads_per_sm(gpu) // _WALK_THREADS)
    clocks, in_flight = gpu.multiprocessors * gpu.clock, min(blocks, gpu.multiprocessors * resident)
    lanes = fma_lanes(gpu, item == 8)
    terms = {
        "bytes": 1.04 * p.bytes / gpu.bandwidth,
        "FMA throughput": warps * walk.strip * fmas * h.stride * 32 / (lanes * clocks * 0.85),
        "instruction issue": warps * issues / (4 * clocks),
        "latency": blocks * (walk.strip * 0.064e-6 + 0.2e-6) / in_flight,
    }
    bound = max(terms, key=lambda name: terms[name])
    body = terms[bound] + 0.18 * (sum(terms.values()) - terms[bound])
    # Blocks that walk far write at many places at once, which the memory minds in float32, and by vectors as they are.
    far = (0.002 if half and walk.pieces == 1 else 0.014) * walk.strip * p.bytes / gpu.bandwidth
    return _Cost(2e-6 + (body + far) * (_BY_PIECES if walk.pieces > 1 and units == 1 else 1.0), bound, blocks, resident)


def _vector(run: int, item: int) -> int:
    """Outputs of a run in one vector: the largest power of two that divides it, at most 16 bytes."""
    return math.gcd(run & -run, 16 // item)


def _walk_columns(p: Problem, walk: Walk) -> int:
    """Input columns of a thread's window, in NCHW."""
    w = axes(p)[2]
    return w.kernel // w.stride if walk.pieces > 1 else walk.cells + w.span


def _pieces(p: Problem) -> int:
    """Threads that may have a cell along W together, with a vector of its outputs each; 1 where they may not.

    Taps of a vector must be neighbours, as many for each of its outputs, and of the same columns. Vectors of float64
    are of two, and gain nothing.
    """
    w = axes(p)[2]
    vector = _vector(w.stride, p.dtype.itemsize)
    alike = w.dilation == 1 and w.kernel % w.stride == 0 and w.padding % vector == 0
    return w.stride // vector if alike and vector * p.dtype.itemsize == 16 and p.dtype != torch.float64 else 1


def _walk_cost_last(p: Problem, walk: Walk, gpu: Gpu) -> _Cost:
    _, h, w = axes(p)
    item, half, double = p.dtype.itemsize, p.dtype.itemsize == 2, p.dtype == torch.float64
    threads = walk_grid(p, walk)[2]
    blocks = -(-threads // _WALK_THREADS)
    warps = threads / 32
    resident = min(
        _resident(_WALK_THREADS, _walk_registers(p, walk)), threads_per_sm(gpu) // _WALK_THREADS, 32
    )  # blocks per multiprocessor
    run, columns, steps = walk.cells * w.stride, walk.cells + w.span, min(walk.strip, h.cells)
    fmas = steps * p.taps * walk.cells * walk.channels
    loads = (steps + h.span) * columns
    weights = p.taps * walk.channels
    issues = fmas + loads * (3 + walk.channels * half) + steps * h.stride * (run * 2 + run * walk.channels * half + 6)
    issues += weights * 2 + 60
    # Rows that two strips read, columns that two threads read: mostly from the first-level cache.
    read = math.prod(p.input_shape) * item * (steps + h.span) / steps * (1 + 0.5 * w.span / walk.cells)
    l2 = read + math.prod(p.output_shape) * item + warps * weights * 128 * 0.5
    clocks = gpu.multiprocessors * gpu.clock
    in_flight = min(blocks, gpu.multiprocessors * resident)
    busy = min(1.0, in_flight * _WALK_THREADS / 32 / gpu.multiprocessors / 12)
    terms = {
        "bytes": p.bytes / gpu.bandwidth,
        "L2 traffic": l2 / (1.4 * gpu.bandwidth),
        "FMA throughput": warps * fmas * 32 / (fma_lanes(gpu, double) * clocks * 0.85 * busy),
        "instruction issue": warps * issues / (4 * clocks * 0.8 * busy),
        "latency": blocks * (steps + 4) * 0.7e-6 / in_flight,
    }
    bound = max(terms, key=lambda name: terms[name])
    body = terms[bound] + 0.2 * (sum(terms.values()) - terms[bound])
    waves = blocks / (gpu.multiprocessors * resident)
    balance = math.ceil(waves) / waves if waves > 1 else 1.0
    return _Cost(2e-6 + (steps + 4) * 0.3e-6 + body * balance, bound, blocks, resident)


def walks(p: Problem) -> Iterator[Walk]:
    """Every configuration of the depthwise kernels that is worth a thought for a problem; none for other layers."""
    _, h, w = axes(p)
    if p.rank > 2 or p.in_channels != p.groups or p.out_channels != p.groups or h.stride > 16:
        return
    if max(v for a in (h, w) for v in (a.size, a.out, a.padding, a.kernel * a.dilation * a.stride)) >= _MAX_INT:
        return
    last, words = p.layout == "channels_last", 2 if p.dtype == torch.float64 else 1
    ways = [(cells, 1) for cells in (1, 2, 4, 8)]
    if not last and _pieces(p) > 1:
        ways.append((1, _pieces(p)))
    for channels in (1, 2, 4) if last else (1,):
        for cells, pieces in ways:
            if p.groups % channels or (cells > 1 and cells >= 2 * w.cells) or channels * p.dtype.itemsize > 16:
                continue
            walk = Walk(cells, channels, 1, pieces)
            if not (_fits_last if last else _fits_nchw)(p, walk, words):
                continue
            for strip in (1, 4, 8, 16, 32, 64) if last else (1, 2, 3, 4, 6, 8, 12, 16, 32):
                if strip > 1 and strip >= 2 * h.cells:
                    continue
                walk = Walk(cells, channels, strip, pieces)
                if walk_grid(p, walk)[2] < 2**31:
                    yield walk


def _fits_last(p: Problem, walk: Walk, words: int) -> bool:
    """Whether weights and window are few enough for registers."""
    _, h, w = axes(p)
    unrolled = (h.span + 1) * p.taps * walk.cells * walk.channels
    ring = (h.span + 2) * (walk.cells + w.span) * walk.channels
    if unrolled > _MAX_UNROLLED or words * max(p.taps * walk.channels, ring) > 80:
        return False
    return _walk_registers(p, walk) <= 168


def _fits_nchw(p: Problem, walk: Walk, words: int) -> bool:
    """Whether window and a row of outputs fit in 128 registers; several cells only as one vector (others spilled)."""
    _, h, w = axes(p)
    run = walk.cells * w.stride // walk.pieces
    if walk.cells > 1 and run != _vector(run, p.dtype.itemsize):
        return False
    ring = (h.span + 2) * _walk_columns(p, walk)
    if p.taps * walk.cells > _MAX_UNROLLED or words * ring > 80 or words * run > 32 or words * (ring + 2 * run) > 96:
        return False
    return h.out * w.out < 2**31


def walk_grid(p: Problem, walk: Walk) -> tuple[int, int, int]:
    """Runs along W, strips along H, threads in all (NCHW: with those that make whole blocks of a channel's)."""
    _, h, w = axes(p)
    runs, strips = -(-w.cells // walk.cells) * walk.pieces, -(-h.cells // walk.strip)
    of_channel = runs * strips
    if p.layout != "channels_last":
        of_channel = -(-of_channel // _WALK_THREADS) * _WALK_THREADS
    return runs, strips, p.batch * (p.groups // walk.channels) * of_channel


class _Kind(NamedTuple):
    """What a thread of a `Tile` computes; as there."""

    co: int
    phases: int
    cells: int


def tiles(p: Problem) -> Iterator[Tile]:
    """Every tile that is worth a thought for a problem."""
    for kind in _kinds(p):
        yield from _of_kind(p, kind)


def _kinds(p: Problem) -> Iterator[_Kind]:
    _, h, w = axes(p)
    co_group, words = p.out_channels // p.groups, 2 if p.dtype == torch.float64 else 1
    geometry_ints = [v for a in axes(p) for v in (a.size, a.out, a.padding, a.kernel * a.dilation * a.stride)]
    if max(geometry_ints) >= _MAX_INT:
        return
    couts = [c for c in (1, 2, 3, 4, 6, 8, 12, 16) if c < co_group and -(-co_group // c) * c < 1.5 * co_group]
    couts = [*couts, co_group] if co_group <= 16 else couts
    couts = couts[-4:]
    for co, phases, cells in product(couts, sorted({1, h.stride}), (1, 2, 4, 8)):
        unrolled = w.kernel * co * cells * (h.kernel if phases > 1 else 1)
        shape = Tile(co, cells, 1, 1, 1, 1, phases)
        # Stores of phases without taps are sums for the epilogue, if not for the main loop: within bounds as well.
        # Unrolled taps of halves beside their loads in flight spill with 96 sums, or with many output channels.
        if phases > 1 and p.dtype.itemsize == 2 and co > 8:
            continue
        fits = words * max(_sums(p, shape), co * cells * w.stride * phases // 4) <= _MAX_SUMS - 32 * (
            phases > 1 and p.dtype.itemsize == 2
        )
        if not fits or unrolled > _MAX_UNROLLED or w.span + cells > 48 or (cells > 1 and cells >= 2 * w.cells):
            continue
        if phases > 16 or (phases > 1 and h.span > 16):
            continue
        yield _Kind(co, phases, cells)


def _of_kind(p: Problem, kind: _Kind) -> Iterator[Tile]:
    """The tiles whose threads compute as much."""
    _, h, w = axes(p)
    ci, co_group = p.in_channels // p.groups, p.out_channels // p.groups
    last = p.layout == "channels_last"
    small = ci * p.dtype.itemsize < 32 or co_group * p.dtype.itemsize < 32
    chunks = sorted({min(ci, 4), min(ci, 8), min(ci, 16)}) if ci > 2 else [ci]
    co, phases, cells = kind
    for block_x, block_h in product((2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32)):
        if (block_x > 2 and block_x * cells >= 2 * max(w.cells, 2)) or (block_h > 1 and block_h >= 2 * h.cells):
            continue
        # Rows shorter than a line cost twice the model and more (measured on layers of few channels).
        if not last and block_x * cells < min(16, w.cells):
            continue
        units = block_x * block_h * h.stride // phases
        if units > _MAX_THREADS:
            continue
        for slots in (1, 2, 4, 8, 16):
            if slots > 1 and (slots >= 2 * p.groups or ci > 8 or co < co_group):
                continue
            if slots > 1 and not ((last and small) or units * slots <= 128):
                continue
            for split in (1, 2, 4) if slots == 1 and ci >= 8 and units % 32 == 0 else (1,):
                threads = units * slots * split
                if threads > _MAX_THREADS or (threads < 128 and block_h < h.cells and 2 * units <= 128):
                    continue
                for chunk in (ci,) if slots > 1 else chunks:
                    if chunk % split == 0:
                        yield Tile(co, cells, block_x, block_h, slots, chunk, phases, split)


@dataclass(frozen=True)
class Choice(family.Defaults):
    """A configuration of the direct kernels for a problem, and what the model thinks of it."""

    family: str
    """``direct``."""
    seconds: float
    """The model's estimate."""
    summary: str
    """One line: tile, grid, predicted bound."""
    bound: str
    """What limits it, by the model."""
    problem: Problem
    tile: Tile | Walk | None
    """None: ``direct_any``."""

    @property
    def margin(self) -> float:
        """Its model is too optimistic near a tie with other families."""
        return MARGIN

    @property
    def packing_seconds(self) -> float:
        return family.packing_seconds(self.problem)

    def macros(self) -> dict[str, int]:
        """The kernel's macros."""
        if self.tile is None:
            return {**_common(self.problem, 1), "ANY": 1, "THREADS": _ANY_THREADS}
        if isinstance(self.tile, Walk):
            return walk_geometry(self.problem, self.tile)
        return geometry(self.problem, self.tile)

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile."""
        walks = isinstance(self.tile, Walk)
        entry = "direct_any" if self.tile is None else "direct_walk" if walks else "direct"
        walk = "direct_walk.cu" if self.problem.layout == "channels_last" else "direct_walk_nchw.cu"
        source = jit.source(walk if walks else "direct.cu", self.macros())
        return (Unit(f"{entry} {self.summary}", source, ("direct_pack", entry)),)

    def prepare(self, device: int) -> Prepared:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return Prepared(self, device)


class Prepared(family.Prepared):
    """A choice's kernels, loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        p, m = choice.problem, choice.macros()
        (unit,) = choice.sources()
        arch = gpu_of(device).arch
        self._device, self.packing = device, choice
        self._words = p.groups * p.taps if isinstance(choice.tile, Walk) else packed_words(m)
        self._acc = torch.float64 if p.dtype == torch.float64 else torch.float32
        self._pack = Launcher(jit.kernel(unit.source, "direct_pack", arch, unit.label), 256, 0, "PPqqqqqq")
        kernel = jit.kernel(unit.source, unit.entries[1], arch, unit.label)
        d, h, w = axes(p)
        sizes = (d.size, h.size, w.size, d.out, h.out, w.out)
        if choice.tile is None:
            total = math.prod(p.output_shape)
            self._grid = min(-(-total // _ANY_THREADS), 2**20)
            self._tail: tuple[int, ...] = (*sizes, total)
            self._run = Launcher(kernel, _ANY_THREADS, 0, "PPPPqqqqqqq")
            return
        if isinstance(choice.tile, Walk):
            runs, strips, threads = walk_grid(p, choice.tile)
            self._grid = -(-threads // _WALK_THREADS)
            self._tail = (h.size, w.size, h.out, w.out, runs, strips, choice.tile.strip, threads)
            self._run = Launcher(kernel, _WALK_THREADS, 0, "PPPPiiiiiiii")
            return
        tiles_h, tiles_w, self._grid = grid(p, choice.tile)
        self._tail = (*sizes, tiles_h, tiles_w)
        self._run = Launcher(kernel, m["THREADS"], shared_words(m)[2] * self._acc.itemsize, "PPPPiiiiiiii")

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Weights ``(in_channels, out_channels // groups, *kernel)`` of any strides as the kernel reads them.

        A tensor of one dimension, float32 (float64 for float64); the copy is made on the current stream.
        """
        packed = weight.new_empty_strided((self._words,), (1,), dtype=self._acc)
        strides = weight.stride()
        spatial = (0,) * (5 - len(strides)) + tuple(strides[2:])
        arguments = (weight.data_ptr(), packed.data_ptr(), strides[0], strides[1], *spatial, self._words)
        self._pack(self._device, min(-(-self._words // 256), 2**16), arguments)
        return packed

    def run(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False, claim: bool = False
    ) -> None:
        """Computes ``out`` from ``x``, both batched and dense in the problem's layout, on the current stream."""
        at = 0 if bias is None else bias.data_ptr()
        self._run(self._device, self._grid, (x.data_ptr(), packed.data_ptr(), at, out.data_ptr(), *self._tail))


def grid(p: Problem, tile: Tile) -> tuple[int, int, int]:
    """Tiles along H, tiles along W, blocks in all."""
    d, h, w = axes(p)
    tiles_h, tiles_w = -(-h.cells // tile.block_h), -(-w.cells // (tile.cells * tile.block_x))
    couts = -(-p.out_channels // p.groups // tile.co)
    return tiles_h, tiles_w, p.batch * d.out * -(-p.groups // tile.slots) * couts * tiles_h * tiles_w


@lru_cache(maxsize=1024)
def choose(p: Problem, gpu: Gpu, limit: float = math.inf) -> Choice | direct_grad.Choice | str:
    """The tile that the model expects to be fastest, or the sentence why this family has none.

    ``limit``: seconds of another family's choice; tiles that cannot be faster need not be looked at.
    """
    if p.pass_ == "grad-input":
        return direct_grad.choose(p, gpu)
    if p.pass_ != "fwd":
        return f"the direct kernels compute forwards and gradients for the input, not {p.pass_}"
    if p.batch == 0 or 0 in p.size:
        return "an empty input has no work"
    found, least = _costs(p, gpu, limit / MARGIN)
    if not found and least < math.inf:
        return f"slower: it takes at least {least * 1e3:.3g} ms on CUDA cores"
    best = min(found, key=lambda one: one[0].seconds, default=None)
    if best is None:
        return _choose_any(p, gpu)
    cost, chosen = best
    return Choice("direct", cost.seconds, _summary(p, chosen, cost), cost.bound, p, chosen)


def candidate(
    p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False
) -> Choice | direct_grad.Choice | str:
    """As `upconv.cuda.family` asks; of what CUDA cores cannot do as fast no tile is looked for."""
    fastest = math.inf if best is None else family.weighed(best)
    if p.pass_ != "fwd":
        return batches.too_long(p) or choose(p, gpu, fastest)
    if (least := least_seconds(p, gpu)) > fastest:
        return f"slower: its multiply-adds alone take {least * 1e3:.3g} ms on CUDA cores"
    return choose(p, gpu, fastest)


def _costs(p: Problem, gpu: Gpu, limit: float) -> tuple[list[tuple[_Cost, Tile | Walk]], float]:
    """Configurations with what the model says of them, and the least bound of those that were left out.

    That are ``direct_any``, and tiles of a `_Kind` whose bound is above ``limit`` or the best of another.
    """
    found: list[tuple[_Cost, Tile | Walk]] = [(_walk_cost(p, walk, gpu), walk) for walk in walks(p)]
    best = min((cost.seconds for cost, _ in found), default=math.inf)
    layer = p.with_(batch=1, size=tuple(1024 + 2 * pad // s for pad, s in zip(p.padding, p.stride)))
    kinds = [(_least(p, kind, gpu), i, kind) for i, kind in enumerate(_kinds(p))]
    of_kinds: dict[int, list[tuple[_Cost, Tile | Walk]]] = {}
    for least, i, kind in sorted(kinds):
        if least > min(best, limit):
            break
        of_kinds[i] = _best_blocks(_of_kind(p, kind), lambda tile: _cost(p, tile, _facts(layer, tile), gpu))
        best = min([best, *(cost.seconds for cost, _ in of_kinds[i])])
    left = min((least for least, i, _ in kinds if i not in of_kinds), default=math.inf)
    return found + [one for i in sorted(of_kinds) for one in of_kinds[i]], left


def _best_blocks(tiles: Iterable[Tile], cost: Callable[[Tile], _Cost | None]) -> list[tuple[_Cost, Tile | Walk]]:
    """Every tile of the blocks that are the best with one of their tiles, each with its cost."""
    blocks: dict[tuple[int, int, int], list[Tile]] = {}
    for tile in tiles:
        blocks.setdefault((tile.block_x, tile.block_h, tile.slots), []).append(tile)
    seconds = {}
    for block, of in blocks.items():  # by its largest chunk that fits
        costs = map(cost, sorted(of, key=lambda t: (-t.chunk, t.split)))
        if (fitting := next((each for each in costs if each is not None), None)) is not None:
            seconds[block] = fitting.seconds
    kept = sorted(seconds, key=lambda block: seconds[block])[:_BLOCKS]
    found = ((cost(tile), tile) for block in kept for tile in blocks[block])
    return [(each, tile) for each, tile in found if each is not None]


def _least(p: Problem, kind: _Kind, gpu: Gpu) -> float:
    """Seconds that `_cost` is never below for a tile whose threads compute as much."""
    d, h, w = axes(p)
    double = p.dtype == torch.float64
    words = 2 if double else 1
    vec = 4 // words
    ci, cout_blocks = p.in_channels // p.groups, -(-(p.out_channels // p.groups) // kind.co)
    # (tap row, channel) pairs of all warps, whose 32 threads have cells of the image each.
    warps = p.batch * p.groups * cout_blocks * d.out * h.cells * w.cells / (32 * kind.cells)
    lines = warps * h.kernel * d.kernel / d.stride * ci
    if kind.phases == 1:
        lines *= _longest_phase(h)
    fmas = lines * w.kernel * kind.co * kind.cells
    window = (kind.cells + w.span) * (1 if kind.phases == 1 else (h.span + 1) / h.kernel)
    packs = -(-w.kernel * kind.co // vec)
    clocks = gpu.multiprocessors * gpu.clock
    terms = (
        p.bytes / gpu.bandwidth,
        fmas * 32 / (fma_lanes(gpu, double) * clocks * 0.85),
        lines * (window * words + packs) / (clocks * 0.9),
        (fmas + lines * (window + packs + (8 if kind.phases == 1 else 2))) / (4 * clocks * 0.8),
    )
    return (2e-6 + max(terms) + 0.2 * (sum(terms) - max(terms))) * (1.0 - 1e-9)


def _longest_phase(h: Axis) -> float:
    """Tap rows of threads of all phases, which take as long as those of the phase with the most, over a kernel's."""
    return -(-h.kernel // h.live) * h.stride / h.kernel * (0.25 + 0.75 * h.live / h.stride)


def least_seconds(p: Problem, gpu: Gpu) -> float:
    """What a problem's multiply-adds alone take on CUDA cores, in seconds, by the model of `choose`."""
    return p.flops / 2 / (fma_lanes(gpu, p.dtype == torch.float64) * gpu.multiprocessors * gpu.clock * 0.85)


def _summary(p: Problem, tile: Tile | Walk, cost: _Cost) -> str:
    """A configuration in one line."""
    w = axes(p)[2]
    if isinstance(tile, Walk):
        return (
            f"depthwise walk of {tile.strip} x {tile.cells} cells x {tile.channels} channels per thread, "
            f"{cost.blocks} blocks of {_WALK_THREADS} threads"
        )
    m = geometry(p, tile)
    return (
        f"{tile.block_h}x{tile.cells * tile.block_x} cells x {tile.slots * tile.co} channels, {m['THREADS']} threads x "
        f"{tile.co}x{tile.phases}x{tile.cells * w.stride} outputs, {m['STAGES']} stages of {tile.chunk} channels"
        f"{f' split in {tile.split}' if tile.split > 1 else ''}, {cost.blocks} blocks"
    )


def _choose_any(p: Problem, gpu: Gpu) -> Choice:
    """One thread per output: every tap costs a test, every product two loads that mostly hit the first-level cache."""
    outputs = math.prod(p.output_shape)
    lanes = min(32, fma_lanes(gpu, p.dtype == torch.float64))
    clocks = gpu.multiprocessors * gpu.clock
    products = outputs * math.prod(-(-k // s) for k, s in zip(p.kernel, p.stride)) * (p.in_channels // p.groups)
    seconds = 2e-6 + p.bytes / gpu.bandwidth + (2 * products + outputs * (p.taps + 40)) / (lanes * clocks)
    blocks = min(-(-outputs // _ANY_THREADS), 2**20)
    return Choice("direct", seconds, f"one output per thread, {blocks} blocks", "instruction issue", p, None)
