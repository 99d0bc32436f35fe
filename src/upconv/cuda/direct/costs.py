"""What a tile on CUDA cores takes: what a multiprocessor issues, and what its memories bring."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from upconv.cuda.cost import Cost
from upconv.cuda.direct.tiles import Tile, weight_blocks
from upconv.cuda.gpu import CORES, SECTOR, Gpu, fma_lanes, threads_per_sm
from upconv.problem import Problem

_SCHEDULERS = 4  # of a multiprocessor, each of which issues some of its warps' instructions
_MAX_BYTES = 64 << 20  # of partial sums of ranges of tiles, which are added in a second step


class _Block(NamedTuple):
    """What a multiprocessor does for a block, or a slice of it."""

    loads: float = 0.0
    """Wavefronts of loads and stores, of shared memory above all."""
    issue: float = 0.0
    """Instructions of warps."""
    products: float = 0.0
    """Clocks of multiply-adds."""
    rounds: float = 0.0
    """Times that the block waits for memory."""

    def clocks(self) -> tuple[float, float]:
        """(in which loads are served, in which instructions are issued)."""
        return self.loads, CORES.issue * (self.issue / 4 + self.products)


def _slice(tile: Tile, gpu: Gpu) -> _Block:
    parts = _source(tile), _input(tile) if tile.weight else _weights(tile), _products(tile, gpu)
    return _Block(*map(sum, zip(*parts)))


def _source(tile: Tile) -> _Block:
    """A slice's tile of the source, from the memory to shared memory."""
    element = tile.problem.dtype.itemsize
    words = tile.chunk * tile.span[0] * tile.span[1] * tile.lanes / 32
    stored = words * tile.meeting[0] * (tile.accumulator // 4)
    passes = math.prod(tile.passes) * tile.warps  # of warps
    return _Block(
        stored + max(passes, words * element / 4 * _overread(tile.problem, tile)),
        passes * (CORES.unit + tile.vector * (1 if element == 4 else 2)) + tile.rounds * tile.warps * CORES.batch,
        rounds=tile.rounds,
    )


def _input(tile: Tile) -> _Block:
    """The input's tile likewise (grad-weight)."""
    words = tile.h * tile.w * max(tile.channels, tile.lanes) / 32
    return _Block(2 * words, CORES.element * words)


def _weights(tile: Tile) -> _Block:
    """A slice's weights likewise."""
    words = tile.chunk * tile.taps_h * tile.geometry["kernel_w"] * tile.weights / 32
    return _Block(words, 8 * words + 20 * tile.warps)


def _products(tile: Tile, gpu: Gpu) -> _Block:
    """A slice's multiply-adds, and what they read from shared memory."""
    if tile.weight:
        kernel_w = tile.kw
        strips = tile.h * tile.w // tile.rows / (1 if tile.lanes_are_channels else 32)
        groups = tile.warps // tile.tap_groups
        turns = float(-(-strips // groups) * groups * tile.tap_groups)  # of warps, which wait for the last
        reads = float(tile.rows * tile.channels)
    else:
        kernel_w, turns = tile.geometry["kernel_w"], float(tile.warps * tile.chunk)
        reads = tile.taps_h * kernel_w * (1.0 if tile.lanes_are_channels else tile.weights * tile.accumulator / 16)
    reads += tile.columns_read * tile.rows_read * tile.meeting[1]
    products = kernel_w * tile.taps_h * tile.rows * tile.channels
    rate = fma_lanes(gpu, tile.accumulator == 8)
    return _Block(turns * reads * (tile.accumulator // 4), turns * reads, turns * products * 32 / rate)


def _stores(tile: Tile) -> _Block:
    """A block's results: lines of several are stored as they are, or through shared memory."""
    run, line = tile.run
    lines = tile.warps * tile.sums / line
    turned = run > line
    wavefronts = max(1.0, line * tile.problem.dtype.itemsize * 32 / 128)
    each = CORES.turned_line if turned else CORES.line_stored
    return _Block(lines * wavefronts * (3 if turned else 1), lines * (each + 2 * line))


def cost(p: Problem, tile: Tile, gpu: Gpu) -> tuple[Cost, int]:
    """The model's time of a tile, and ranges of tiles (grad-weight)."""
    one, count, held = _slice(tile, gpu), tile.blocks_of(p)[2], resident(tile, gpu)
    loads, issue = one.clocks()
    waits = one.rounds * CORES.latency + CORES.barriers
    brought = tile.chunk * tile.span[0] * tile.span[1] * tile.lanes * _overread(p, tile)
    ranges, tail = 1, 0.0
    if tile.weight:
        blocks = weight_blocks(tile)
        ranges = ranges_of(count, blocks, most_ranges(p, tile), gpu.multiprocessors * held)
        each = -(-count // ranges)  # of a block's tiles, a slice each
        work = blocks * ranges
        loads, issue, waits = loads * each, issue * each, waits * each
        waits += tile.sums * 12 * tile.warps + CORES.latency
        brought += tile.h * tile.w * max(tile.channels, tile.lanes)
        tail = 2 * ranges * math.prod(p.weight_shape) * tile.accumulator / gpu.bandwidth + ranges * 20e-9 + 2e-6
    else:
        blocks = tile.channel_blocks
        slices = _depth_taps(tile) * -(-tile.groups_of[0] // tile.chunk)
        work = blocks * count
        of_stores = _stores(tile).clocks()
        loads, issue = slices * loads + of_stores[0], slices * issue + of_stores[1]
        waits, brought = waits * slices, brought * slices
    waves = work / gpu.multiprocessors
    busy = min(float(held), max(1.0, waves))
    full = -(-waves // busy) * busy if waves < 8 * busy else waves + busy / 2  # of the fullest multiprocessor
    # A block alone issues on as many schedulers as it has warps.
    alone = _mixed(loads, issue * max(1.0, _SCHEDULERS / tile.warps)) + waits
    compute = full * max(_mixed(loads, issue), alone / busy) / gpu.clock
    dram = (math.prod(p.input_shape) + math.prod(p.output_shape)) * p.dtype.itemsize / gpu.bandwidth
    l2 = count * blocks * brought * p.dtype.itemsize / min(CORES.l2, 2 * gpu.bandwidth)
    *_, second, first = sorted((compute, dram, l2))
    per_clock = full / gpu.clock
    return Cost(
        first + CORES.overlap * second + tail + CORES.launch,
        issue=per_clock * issue,
        shared=per_clock * loads,
        l2=l2,
        latency=per_clock * alone / busy,
        store=tail,
        dram=dram,
        launch=CORES.launch,
    ), ranges


def least(p: Problem, tile: Tile, gpu: Gpu) -> float:
    """Seconds that a tile takes at least: its multiply-adds with what these read, and the device memory."""
    blocks, slices = weight_blocks(tile), 1.0
    if not tile.weight:
        blocks, slices = tile.channel_blocks, _depth_taps(tile) * -(-tile.groups_of[0] // tile.chunk)
    waves = blocks * tile.blocks_of(p)[2] / gpu.multiprocessors
    compute = waves * slices * _mixed(*_products(tile, gpu).clocks()) / gpu.clock
    dram = (math.prod(p.input_shape) + math.prod(p.output_shape)) * p.dtype.itemsize / gpu.bandwidth
    return max(compute, dram) + CORES.overlap * min(compute, dram) + CORES.launch


def _mixed(loads: float, issue: float) -> float:
    return max(loads, issue) + CORES.mix * min(loads, issue)


def _depth_taps(tile: Tile) -> float:
    """Taps along D that meet a slice of the source, on average."""
    return tile.geometry["kernel_d"] / tile.axes[0].out_step


def resident(tile: Tile, gpu: Gpu) -> int:
    """Blocks of a tile that a GPU's multiprocessor holds."""
    by_shared = gpu.shared_per_sm // (tile.shared_bytes + 1024)
    return max(1, min(tile.resident, by_shared, threads_per_sm(gpu) // tile.threads))


def _overread(p: Problem, tile: Tile) -> float:
    """Bytes of sectors over those of the source's columns, where a column is every so many channels (channels_last)."""
    if tile.lanes_are_channels or p.layout != "channels_last":
        return 1.0
    return max(1.0, min(SECTOR / p.dtype.itemsize, tile.groups_of[0] * p.groups) / tile.chunk)


def most_ranges(p: Problem, tile: Tile) -> int:
    """Ranges of tiles whose partial sums take no more memory than they may."""
    return max(1, _MAX_BYTES // (math.prod(p.weight_shape) * tile.accumulator))


def ranges_of(tiles: int, blocks: int, most: int, slots: int) -> int:
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
    """What a problem's multiply-adds alone take, in seconds, by this model."""
    rate = fma_lanes(gpu, p.dtype is torch.float64) * gpu.multiprocessors * gpu.clock
    return CORES.issue * p.flops / 2 / rate
