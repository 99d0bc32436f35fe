"""What a tile of ``kernels/direct.cu`` costs by a model of the multiprocessor and the memories."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from upconv.cuda.direct import cells
from upconv.cuda.direct.cells import Axis, Cost, axes
from upconv.cuda.direct.tiles import (
    Kind,
    Tile,
    constants,
    grid,
    registers,
    shared_words,
    stores_directly,
    vector,
    weight_row,
)
from upconv.cuda.gpu import Gpu, fma_lanes, threads_per_sm
from upconv.problem import Problem

_OVERLAP = 0.2  # of what does not limit, beside what does


class _Work(NamedTuple):
    """Of a block."""

    passes: float
    """Over shared memory, of 128 bytes."""
    issues: float
    """Instructions of a warp."""


@dataclass(frozen=True)
class Facts:
    """What the model asks of a tile that is the same at every size of the image."""

    constants: dict[str, int]
    shared: int
    """Bytes."""
    registers: int
    stores_directly: bool
    lines: float
    """(tap row, channel) pairs over a block's threads, in warps."""
    loads: float
    """Of a block's input, in instructions of a warp."""
    load_issues: float
    """And all instructions that they take."""
    bytes: float
    """That a block moves through the second-level cache."""
    latency: float
    """Seconds of a block alone: copies, barriers, stores."""


@lru_cache(maxsize=16384)  # a layer has up to 3,000 tiles; kept, a new size takes a third of the time
def facts(layer: Problem, tile: Tile) -> Facts:
    """Of a tile for a layer, of whose sizes nothing is used."""
    m = constants(layer, tile)
    item = layer.dtype.itemsize
    loads, load_issues = _loads(layer, tile, m)
    steps = math.ceil(m["cin_g"] / tile.chunk) * _depth_taps(layer)
    return Facts(
        constants=m,
        shared=shared_words(layer, m)[2] * 4 * _words(layer),
        registers=registers(layer, tile),
        stores_directly=stores_directly(layer, m),
        lines=_lines(layer, tile),
        loads=loads,
        load_issues=load_issues,
        bytes=_bytes(layer, tile, m),
        latency=(1.2e-6 if item == 2 else 0.4e-6) * max(0, steps - 1) + 2.0e-6,
    )


def _words(p: Problem) -> int:
    """Of 32 bits, of an accumulator."""
    return 2 if p.dtype == torch.float64 else 1


def _depth_taps(p: Problem) -> float:
    """Of an output, on average."""
    d = axes(p)[0]
    return d.kernel / d.stride


def _lines(p: Problem, tile: Tile) -> float:
    h = axes(p)[1]
    warps_per_cells = tile.slots * max(1.0, tile.block_h * tile.block_x / 32)
    lines = warps_per_cells * h.kernel * _depth_taps(p) * (p.in_channels // p.groups)
    return lines * _longest_phase(h) if tile.phases == 1 else lines


def _input(p: Problem, tile: Tile, m: dict[str, int]) -> tuple[float, int]:
    """(rows of all depth taps and channels, columns) of a block's input."""
    _, h, w = axes(p)
    rows = tile.slots * m["cin_g"] * _depth_taps(p) * (tile.block_h + h.span)
    return rows, tile.cells * tile.block_x + w.span


def _loads(p: Problem, tile: Tile, m: dict[str, int]) -> tuple[float, float]:
    """(loads, all instructions) that bring a block's input to shared memory."""
    rows, columns = _input(p, tile, m)
    if m["channels_last"]:
        loads = rows * columns / 32
        return loads, loads * 24
    whole = columns // 32 if columns % 32 <= 20 else -(-columns // 32)
    rest = columns - 32 * whole if columns % 32 <= 20 else 0
    of_row = 12 if p.dtype.itemsize == 2 else 7
    issues = rows * whole * of_row + rows * (12 if whole else 0) + rows * rest / 32 * 24
    return rows * (whole + rest / 32), issues


def _outputs(p: Problem, tile: Tile) -> float:
    """Of a block, in warps."""
    _, h, w = axes(p)
    return tile.slots * tile.co * tile.block_h * h.stride * (tile.cells * tile.block_x) * w.stride / 32


def _bytes(p: Problem, tile: Tile, m: dict[str, int]) -> float:
    """Whole sectors of what a block reads and writes."""
    item, last = p.dtype.itemsize, m["channels_last"]
    rows, columns = _input(p, tile, m)
    weights = tile.slots * m["cin_g"] * _depth_taps(p) * axes(p)[1].kernel * weight_row(p, tile.co) * 4 * _words(p)
    over = max(1.0, 32 / (tile.slots * m["cin_g"] * item)) if last else 1 + 32 / (columns * item)
    run = tile.slots * m["part"] * item if last and tile.slots * tile.co < p.out_channels else 32
    return rows * columns * item * over + weights + _outputs(p, tile) * 32 * item * max(1.0, 32 / run)


def _products(p: Problem, kind: Tile | Kind, lines: float, row: int) -> tuple[float, _Work]:
    """(multiply-adds, in warps; what they take) of so many lines; ``row``: words of a tap row's weights."""
    _, h, w = axes(p)
    fmas = lines * w.kernel * kind.co * kind.cells
    window = (kind.cells + w.span) * (1 if kind.phases == 1 else (h.span + 1) / h.kernel)
    packs = row // vector(p.dtype)
    passes = lines * (window * _words(p) + packs)
    return fmas, _Work(passes, fmas + lines * (window + packs + (8 if kind.phases == 1 else 2)))


def _stores(p: Problem, tile: Tile, facts: Facts) -> _Work:
    outputs = _outputs(p, tile)
    if facts.stores_directly:
        return _Work(0.0, outputs * 2)
    passes = outputs * 2 * _words(p)
    if p.layout == "channels_last":
        return _Work(passes, outputs * 24)
    run = tile.cells * axes(p)[2].stride
    wide = math.gcd(vector(p.dtype), run, p.out_size[-1])
    lanes = min(tile.block_x, 32)
    segments = outputs / run * (32 / lanes)
    return _Work(passes, outputs + segments * (12 + math.ceil(lanes * run / (32 * wide)) * (6 + 2 * wide)))


def cost(p: Problem, tile: Tile, facts: Facts, gpu: Gpu) -> Cost | None:
    """The model's time of a tile, or None where it does not fit the GPU."""
    if facts.shared > gpu.shared_bytes:
        return None
    threads, blocks = facts.constants["threads"], grid(p, tile)[2]
    by_shared, by_threads = gpu.shared_per_sm // (facts.shared + 1024), threads_per_sm(gpu) // threads
    resident = min(cells.resident(threads, facts.registers), by_shared, by_threads, 32)
    if resident < 1 or blocks >= 2**31:
        return None
    fmas, products = _products(p, tile, facts.lines, weight_row(p, tile.co))
    stores = _stores(p, tile, facts)
    passes = products.passes + facts.loads * _words(p) + stores.passes
    issues = products.issues + facts.load_issues + stores.issues
    clocks = gpu.multiprocessors * gpu.clock
    in_flight = min(blocks, gpu.multiprocessors * resident)
    warps = in_flight / gpu.multiprocessors * threads / 32
    # Below 12 warps per multiprocessor latencies show; unrolled taps have more to do meanwhile.
    hidden = min(1.0, warps / (12 if tile.phases == 1 else 8))
    lanes = fma_lanes(gpu, p.dtype == torch.float64)
    terms = {
        "bytes": p.bytes / gpu.bandwidth,
        "L2 traffic": blocks * facts.bytes / (1.4 * gpu.bandwidth),
        "FMA throughput": blocks * fmas * 32 / (lanes * clocks * 0.85 * hidden),
        "shared memory": blocks * passes / (clocks * 0.9 * hidden),
        "instruction issue": blocks * issues / (4 * clocks * 0.8 * hidden),
        "latency": blocks * facts.latency / in_flight,
    }
    bound = max(terms, key=lambda name: terms[name])
    waves = blocks / gpu.multiprocessors
    balance = math.ceil(waves) / waves if waves > 1 else 1 / max(waves, 0.05)
    body = terms[bound] + _OVERLAP * (sum(terms.values()) - terms[bound])
    seconds = cells.LAUNCH + (body * min(balance, 4.0) if bound != "bytes" else body)
    return Cost(seconds, bound, blocks, resident)


def least(p: Problem, kind: Kind, gpu: Gpu) -> float:
    """Seconds that `cost` is never below for a tile whose threads compute as much."""
    d, h, w = axes(p)
    ci, cout_blocks = p.in_channels // p.groups, -(-(p.out_channels // p.groups) // kind.co)
    # (tap row, channel) pairs of all warps, whose 32 threads have cells of the image each.
    warps = p.batch * p.groups * cout_blocks * d.out * h.cells * w.cells / (32 * kind.cells)
    lines = warps * h.kernel * d.kernel / d.stride * ci
    if kind.phases == 1:
        lines *= _longest_phase(h)
    fmas, work = _products(p, kind, lines, weight_row(p, kind.co))
    clocks = gpu.multiprocessors * gpu.clock
    terms = (
        p.bytes / gpu.bandwidth,
        fmas * 32 / (fma_lanes(gpu, p.dtype == torch.float64) * clocks * 0.85),
        work.passes / (clocks * 0.9),
        work.issues / (4 * clocks * 0.8),
    )
    return (cells.LAUNCH + max(terms) + _OVERLAP * (sum(terms) - max(terms))) * (1.0 - 1e-9)


def _longest_phase(h: Axis) -> float:
    """Tap rows of threads of all phases, which take as long as those of the phase with the most, over a kernel's."""
    return -(-h.kernel // h.live) * h.stride / h.kernel * (0.25 + 0.75 * h.live / h.stride)
