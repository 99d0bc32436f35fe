"""The gather-GEMM's cost model: a tiling's clocks, and a problem's seconds by it.

Five terms: matrix instructions, L2 traffic, the producers' pass through shared memory, stores, device memory. The
fitted sets of constants are in `costs`, what they leave out here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.gemm.costs import LAUNCH, Constants, constants
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gemm.tiling_weights import FRAGMENT
from upconv.cuda.gpu import Gpu
from upconv.problem import Problem

MMA_SYNC = 0.45  # of wgmma's rate: four warps read the same pixels
_FILL = 24.0, 32.0  # bytes a clock that an epilogue stores of what is the bias alone: NCHW, channels_last
_FILL_RUN = 240.0, 400.0  # clocks of each run of it beside: of a channel's; of all of a warp's
_LAST_FORWARD = 1.5e-6  # seconds that forwards in channels_last take beside `LAUNCH`
MANY = 8  # tiles of a block, from which on the last one's tail is in the constants, fitted to such layers
# Results that the copy engine stores: bytes a clock that threads leave in shared memory for it, and clocks beside.
STAGED = 64.0, 300.0
# By how much the model is too optimistic there, by `split`.
_STAGED_HOPE = 1.035, 1.02
# Of planes one by one with weights through a ring: it decides only where the model sees no difference to weights that
# stay.
_RING = 1.002
# Of consumers that share weights against those that share pixels, where the model sees no difference.
HALVED = 1.0005
_COPY = 275.0  # clocks for a copy of 16 bytes by each producer, where rows are not aligned
_LINE = 128  # bytes that come from memory together, of which a channels-last chunk may take a part
_LINES = 0.2, 1.2  # bytes of such lines of all tiles in work over the cache's: none of the rest is lost, most is
# Of clusters: clocks beside the chunks of a tile, of each block more, bytes a clock at which one reads others' sums.
# Fitted to 87 layers and passes.
CLUSTER = 3800.0, 1100.0, 24.0


def fragment_clocks(t: Tiling) -> float:
    """Clocks of the tensor cores for a fragment of weights, with the pixels of all consumers that use it."""
    return t.nb * (32 if t.split == 2 else 64) * (3 if t.parts == 2 else 1) / t.parts


def estimate(t: Tiling, p: Problem, gpu: Gpu) -> tuple[float, str]:
    """(seconds, what bounds them) of a problem by a tiling."""
    return seconds_of(t, tile_clocks(t, alignment_of(p)), p, gpu)


def alignment_of(p: Problem) -> int:
    """Bytes at which rows of an NCHW result begin, up to a sector's 32."""
    return math.gcd(result_shape(p)[-1] * p.dtype.itemsize, 32)


@dataclass(frozen=True)
class Clocks:
    """Of a tiling's average tile on its multiprocessor; the same for all sizes."""

    tile: float
    bound: str
    """What takes most of them."""
    tail: float
    """Of the last tile, beyond those: what a next tile would have hidden."""


def tile_clocks(t: Tiling, alignment: int) -> Clocks:
    c = constants(t)
    clocks: dict[str, float] = dict.fromkeys(("tensor cores", "L2", "shared memory", "stores"), 0.0)
    total = tail = 0.0
    producers = 192 if t.wgmma else 128
    couts = t.cout_g if t.shuffle is None else t.shuffle.used
    columns = t.beside * t.image_columns if t.beside else t.tile[0] * t.tile[3]
    of_rows = t.subs * t.element * min(couts, t.rows_per_sub * t.wgs_m)
    per_tile_out = math.prod(t.tile[1:3]) * columns * t.width_subs * of_rows // t.cluster  # a block's share
    staged = t.pixels * t.row_bytes if t.channels_last else t.slot_bytes
    # Boxes of rows that begin anywhere bring parts of sectors.
    copied = staged * (1 + 32 / (t.staging_units * 16)) if t.tensor_map and t.classed else staged
    if t.channels_last:
        copied += t.pixels * c.row
    turned = t.parts * t.k_steps * (2 if not t.channels_last else (t.parts == 2) * 0.7)
    turn = -(-t.pixels // producers) * turned * c.turning[1 if t.element == 4 else 2] + c.turning[0]
    if not t.tensor_map:
        turn += staged / 16 / producers * _COPY
        if t.channels_last and not t.aligned_channels:
            turn *= 4
    fragment_time = fragment_clocks(t)
    stores = per_tile_out * _ragged(t, alignment, c)
    filled = _fill_clocks(t, couts)
    if t.drained:
        store = stores / STAGED[0] + STAGED[1]
    else:
        store = max(stores / c.store, _epilogue_clocks(t, alignment, c) / t.cluster) + filled
    of_chunk = c.chunk[t.split != 2 and t.chunk == 8 and t.parts == 1]
    ragged = 0.0 if t.channels_last or alignment >= 16 or t.element == 2 else c.ragged_turn
    straight, longest, ring = t.straight or t.rolled, t.longest_stretch, t.ring_fragments
    for entries, times in t.repeated_entries:  # few, where many variants have the same entries
        chunks = t.chunks_of_block if entries else 0
        steps = chunks * t.fragments_of_chunk(entries)
        matrix = steps * fragment_time
        if t.wgmma:
            pauses = chunks if straight else steps / longest
            matrix += steps * c.step[t.wide] + pauses * c.drain[t.wide]
        else:
            matrix = matrix / MMA_SYNC
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
                tile += CLUSTER[0] + t.cluster * CLUSTER[1] + t.sums_bytes * (1 - 1 / t.cluster) / CLUSTER[2]
        total += times * tile
        tail += times * last
        for name, value in zip(clocks, (matrix, l2, chunks * turn, store)):
            clocks[name] += times * value
    bound = max(clocks, key=lambda name: clocks[name])
    return Clocks(c.scale * total / len(t.variants), bound, c.scale * tail / len(t.variants))


def _fill_clocks(t: Tiling, couts: int) -> float:
    """Clocks that a tile takes to store its share of what is the bias alone."""
    if not t.fills:
        return 0.0
    n, d, h, w = t.tile
    rows_of_m = min(couts, t.rows_per_sub * t.wgs_m)
    # Clocks of a row of outputs, of a part of one, and of a run of rows of all of a tile's channels.
    row = n * d * w * t.out_steps[2] * rows_of_m * t.element / _FILL[t.channels_last]
    part = n * d * h * w * t.width_subs * rows_of_m * t.element / _FILL[t.channels_last]
    run = _FILL_RUN[1] if t.channels_last else 16 * _FILL_RUN[0]
    every = 0.0
    most = 0.0
    for fill, times in t.fills:
        planes, rows = fill.planes * h * t.out_steps[1], fill.rows * h
        clocks = (planes + rows) * row + fill.parts * part
        clocks += n * d * (fill.planes + h * (fill.runs + fill.parts)) * run
        every += times * clocks / t.subs
        most = max(most, clocks / t.subs)
    # Of blocks that have a variant each some store more than others.
    return most if t.resident else every / len(t.variants)


def seconds_of(t: Tiling, clocks: Clocks, p: Problem, gpu: Gpu) -> tuple[float, str]:
    """(seconds, what bounds them): waves of tiles, or the bytes of the device memory."""
    bound = clocks.bound
    tiles = math.prod(t.counts(p)) * t.m_groups
    waves = -(-tiles // (gpu.multiprocessors if t.cluster == 1 else max(1, gpu.clusters(t.cluster))))
    tail = clocks.tail if waves < MANY else 0.0
    seconds = (clocks.tile * waves + tail) / gpu.clock
    ragged = 1.0
    if t.channels_last:
        if t.bare and not t.contiguous:  # a tile lacks some phases of a row, so sectors are written in parts
            ragged = 1.05
    elif result_shape(p)[-1] * t.element % 32:  # halves stored together share a sector
        ragged = 1.16 if _halves_of_a_row(t) else 1.25
    out = math.prod(result_shape(p))
    source = math.prod(source_shape(p)) * _read(t, min(tiles, gpu.multiprocessors // t.cluster), gpu)
    memory = (out * ragged + source) * t.element / gpu.bandwidth
    if memory > seconds:
        bound = "bytes"
    elif waves * gpu.multiprocessors > 1.5 * tiles * t.cluster:
        bound = "too few tiles"
    ring, halved = t.planewise and not t.resident, t.split == 0 and t.shuffle is None
    launch = LAUNCH + (_LAST_FORWARD if t.channels_last and p.pass_ == "fwd" else 0.0)
    factor = (_RING if ring else 1.0) * (HALVED if halved else 1.0) * (_STAGED_HOPE[t.split] if t.drained else 1.0)
    return factor * (max(memory, seconds) + 0.15 * min(memory, seconds) + launch), bound


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
    """What stores that do not fill sectors of 32 bytes cost, as a factor (docs/design.md, Stores)."""
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
