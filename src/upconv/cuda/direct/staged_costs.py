"""The cost model of ``staged.cu``: what a multiprocessor issues, and what its memories bring."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from upconv.cuda.direct.staged_tiles import Tile, weight_blocks
from upconv.cuda.gpu import Gpu, fma_lanes, threads_per_sm
from upconv.problem import Problem

_SECTOR = 32  # bytes that memory brings at a time
_SPLITS = 512  # ranges of tiles at most; their partial sums are added in a second step
_MAX_BYTES = 64 << 20  # of partial sums
_LAUNCH = 4e-6  # seconds
_LOADS, _ISSUE, _MIX = 1.0, 1.6, 0.2  # clocks of a wavefront, of four instructions, and of the lesser of both
_OVERLAP = 0.2  # of the second of what limits, beside the first
_SPREAD = 20.0  # clocks of a store whose lanes lie in a sector each
_L2 = 3.3e12  # bytes a second
_LATENCY = 520.0  # clocks that a block waits for memory, for a batch of units
_END = 270.0  # and for its last warps
_UNIT_ISSUE = 12.0  # instructions that bring a unit beside its stores
_X_ISSUE = 38.0  # and an element of the input
_PASS_ISSUE = 70.0  # and a batch of them: its place, its borders


@dataclass(frozen=True)
class _Slice:
    """What a multiprocessor does for a block and a slice of g."""

    loads: float
    """Wavefronts of loads and stores, of shared memory above all."""
    issue: float
    """Clocks in which its schedulers issue instructions."""
    rounds: int
    """Times that the block waits for memory."""

    @property
    def clocks(self) -> float:
        return max(_LOADS * self.loads, _ISSUE * self.issue) + _MIX * min(self.loads, self.issue)


def _slice(tile: Tile, gpu: Gpu) -> _Slice:
    element, wide = tile.problem.dtype.itemsize, tile.accumulator // 4
    (kernel_h, step_h, dil_h, _), kernel_w = tile.axes[1], tile.axes[2][0]
    words = tile.span[0] * tile.span[1] * tile.channels / 32
    store, read = (1.0, 1) if tile.lanes_are_channels else tile._conflicts(tile.plane)
    passes = math.prod(tile.passes) * tile.warps  # of warps
    rounds = tile.passes[0] * -(-tile.passes[1] // tile.batch)
    loads = words * store * wide + max(passes, words * element / 4 * _overread(tile.problem, tile))
    issue = passes * (_UNIT_ISSUE + tile.vector * (1 if element == 4 else 2)) + rounds * tile.warps * _PASS_ISSUE
    taps_h = tile.kh if tile.weight else kernel_h
    rows = len({r * step_h + k * dil_h for r in range(tile.rows) for k in range(taps_h)})
    reads = 1.0 * tile.kw * rows * read
    products = tile.kw * taps_h * tile.rows * tile.ci
    if tile.weight:
        strips = tile.h * tile.w // tile.rows / (1 if tile.lanes_are_channels else 32)
        groups = tile.warps // tile.tap_groups
        walks: float = -(-strips // groups) * groups * tile.tap_groups  # of warps, which wait for the last
        reads += tile.rows * tile.ci
        x = tile.h * tile.w * max(tile.ci, tile.channels) / 32
        loads += 2 * x
        issue += _X_ISSUE * x
    else:
        walks = 1.0 * tile.warps
        taps = kernel_h * tile.kw
        reads += taps * (1.0 if tile.lanes_are_channels else tile.weights * tile.accumulator / 16)
        weights = kernel_h * kernel_w * tile.weights / 32
        loads += weights
        issue += 8 * weights
    loads += walks * reads * wide
    lanes = fma_lanes(gpu, tile.accumulator == 8)
    issue = (issue + walks * (reads + (0 if tile.weight else 20))) / 4 + walks * products * 32 / lanes
    return _Slice(loads, issue, rounds)


def cost(p: Problem, tile: Tile, gpu: Gpu) -> tuple[float, str, int]:
    """(seconds, what limits them, ranges of tiles) of a tile by the model."""
    one = _slice(tile, gpu)
    count = tile.blocks_of(p)[2]
    slices = 1 if tile.weight else tile.axes[0][0] * tile.cout_g
    clocks = slices * one.clocks
    if not tile.weight and p.layout == "channels_last" and not tile.lanes_are_channels:
        clocks += _SPREAD * tile.warps * tile.sums / tile.stored  # lanes store a pixel apart
    block = clocks + slices * (one.rounds * _LATENCY + _END)
    held = resident(tile, gpu)
    blocks = weight_blocks(p, tile) if tile.weight else tile.channel_blocks
    staged = slices * tile.span[0] * tile.span[1] * tile.channels * _overread(p, tile)
    if tile.weight:
        staged += tile.h * tile.w * max(tile.ci, tile.channels)
    moved = count * blocks * staged * p.dtype.itemsize
    splits, work, tail = 1, count * blocks, 0.0
    if tile.weight:
        splits = ranges(count, blocks, most_ranges(p, tile), gpu.multiprocessors * held)
        each = -(-count // splits)
        work = blocks * splits
        clocks, block = clocks * each, block * each + tile.sums * 12 * tile.warps + _LATENCY
        tail = 2 * splits * math.prod(p.weight_shape) * tile.accumulator / gpu.bandwidth + splits * 20e-9 + 2e-6
    waves = work / gpu.multiprocessors
    busy = min(float(held), max(1.0, waves))
    full = -(-waves // busy) * busy if waves < 8 * busy else waves + busy / 2  # of the fullest multiprocessor
    compute = full * max(clocks, block / busy) / gpu.clock
    terms = {
        "loads" if one.loads > one.issue else "instruction issue": compute,
        "bytes": (math.prod(p.input_shape) + math.prod(p.output_shape)) * p.dtype.itemsize / gpu.bandwidth,
        "second-level cache": moved / min(_L2, 2 * gpu.bandwidth),
    }
    bound = max(terms, key=lambda name: terms[name])
    second = sorted(terms.values())[1]
    return terms[bound] + _OVERLAP * second + tail + _LAUNCH, bound, splits


def resident(tile: Tile, gpu: Gpu) -> int:
    """Blocks of a tile that a GPU's multiprocessor holds."""
    by_shared = gpu.shared_per_sm // (tile.shared_bytes + 1024)
    return max(1, min(tile.resident, by_shared, threads_per_sm(gpu) // tile.threads))


def _overread(p: Problem, tile: Tile) -> float:
    """Bytes of sectors over those of g's columns, where a column is every so many channels (CHANNELS_LAST)."""
    if tile.lanes_are_channels or p.layout != "channels_last":
        return 1.0
    return min(_SECTOR / p.dtype.itemsize, p.out_channels)


def most_ranges(p: Problem, tile: Tile) -> int:
    """Ranges of tiles whose partial sums take no more memory than they may."""
    return max(1, min(_SPLITS, _MAX_BYTES // (math.prod(p.weight_shape) * tile.accumulator)))


def ranges(tiles: int, blocks: int, most: int, slots: int) -> int:
    """Ranges into which grad-weight's tiles are cut: so many that blocks fill a GPU's ``slots`` about twice.

    Args:
        tiles: of all images.
        blocks: that one range takes.
        most: ranges, for their partial sums' sake.
        slots: blocks that a GPU holds at a time.
    """
    wanted = max(1, min(tiles, most, round(2 * slots / blocks)))
    return -(-tiles // -(-tiles // wanted))


def least_seconds(p: Problem, gpu: Gpu) -> float:
    """What a problem's multiply-adds alone take, in seconds, by the model of `choose`."""
    rate = fma_lanes(gpu, p.dtype is torch.float64) * gpu.multiprocessors * gpu.clock
    return _ISSUE * p.flops / 2 / rate
