"""What the gather-GEMM's tiles ask for: the counts of `upconv.cuda.cost` for a tiling, and what stores take.

The constants are fitted to an earlier model of five terms, which timed tilings of an H200 had calibrated
(docs/experiments.md).
"""

from __future__ import annotations

import math

from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.cost import Cost, Work, cost
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import FRAGMENT, LINE, RATES, SECTOR, Gpu
from upconv.problem import Problem

_START = 4400.0  # clocks of a launch until its first pixels are there
_DRAIN = 300.0  # clocks of tensor cores that run dry behind a stretch of code
_IEEE = 1.06  # matrix instructions for a fragment of IEEE float32: three for two, of which few wait
_MMA_SYNC = 0.45  # of wgmma's rate: four warps read the same pixels
_TURNED = {1: 2.26, 2: 1.6}  # by parts: a producer's time for a unit of an NCHW chunk, of one that lies turned
_COPY = 271.0  # clocks for a copy of 16 bytes by each producer, where rows are not aligned
_OFF_UNITS = 4.0  # times as many where channels are not, since each element is a copy
_STORED = {"nchw": 20.7, "channels_last": 47.5}  # bytes a clock that an epilogue stores
_FILLED_RUN = {"nchw": 3840.0, "channels_last": 400.0}  # clocks of a run of rows of bias alone, of a warp's channels
_EXPOSED = {"nchw": 0.7, "channels_last": 1.0}  # share of stores that nothing hides where both consumers store
_BESIDE_MEMORY = {"nchw": RATES.beside_memory, "channels_last": 0.1}
_INSTRUCTION = 2.56  # clocks of an epilogue's instruction
_RUN = 136  # instructions of a run of an epilogue beside its outputs'
_SECTORS = 165.0  # bytes of a run that the unfilled sectors at its ends cost


def estimate(t: Tiling, p: Problem, gpu: Gpu) -> Cost:
    """What a problem takes by a tiling."""
    return cost(work(t, p, gpu), gpu)


def least(t: Tiling, p: Problem, gpu: Gpu) -> float:
    """Seconds that a problem takes at least, by a tiling of whatever chunks: multiplying, stores and device memory."""
    fragments = -(-t.cin_g * t.element // 32) * t.parts * t.multiplied.total / len(t.multiplied.variants)
    tiles = math.prod(t.counts(p)) * t.m_groups
    stored, _ = _stored(t, alignment_of(p))
    found = Work(
        *_multiplied(t, fragments),
        waves=-(-tiles // gpu.multiprocessors),
        moved=_moved(t, p),
        stages=math.inf,  # which nobody waits for
        stored=stored,
        in_turn=t.split == 2,
        beside_memory=_BESIDE_MEMORY[p.layout],
    )
    return cost(found, gpu).seconds


def _multiplied(t: Tiling, fragments: float) -> tuple[float, float]:
    """Matrix instructions for so many fragments, and columns of all of them."""
    instructions = fragments * t.nb / (2 if t.wide else 1) * (1 if t.split == 2 else 2)
    instructions *= (_IEEE if t.parts == 2 else 1.0) / (1.0 if t.wgmma else _MMA_SYNC)
    return instructions, instructions * (128 if t.wide else 64)


def work(t: Tiling, p: Problem, gpu: Gpu) -> Work:
    """What an average tile asks for."""
    tapped = [n for n in t.multiplied.counts if n]
    chunks = -(-t.chunks // t.cluster) * len(tapped) / len(t.multiplied.variants)  # of the block that has most
    fragments = -(-t.chunks // t.cluster) * t.fragments_of_chunk(sum(tapped)) / len(t.multiplied.variants)
    stretches = chunks if t.straight or t.queued else fragments / t.longest_stretch
    instructions, columns = _multiplied(t, fragments)
    weights = 0.0 if t.resident else fragments * t.wgs_m * FRAGMENT
    lines, boxes, arriving = _arriving(t)
    chunks_turned, turned = _turned(t, arriving)
    tiles = math.prod(t.counts(p)) * t.m_groups
    blocks = gpu.multiprocessors if t.cluster == 1 else max(1, gpu.clusters(t.cluster))
    stored, outputs = _stored(t, alignment_of(p))
    return Work(
        instructions,
        columns,
        waves=-(-tiles // blocks),
        moved=_moved(t, p),
        steps=chunks,
        stages=t.stages_p if t.channels_last else t.stages_s + 1,  # slots, and the tile beyond
        weight_steps=0.0 if t.resident else fragments / t.w_stage,
        weight_stages=max(1, t.ring_stages),
        lines=chunks * lines + (weights + outputs) / LINE,
        boxes=chunks * boxes + (fragments / t.k_steps * t.weight_boxes if t.unpacked and not t.resident else 0.0),
        shared=columns * 32 + 2 * fragments * FRAGMENT + chunks * arriving * (1 if t.channels_last else 3),
        chunks_turned=chunks * chunks_turned,
        turned=chunks * turned,
        dry=stretches * _DRAIN if t.wgmma else 0.0,
        stored=stored,
        start=_START,
        in_turn=t.split == 2,
        beside_memory=_BESIDE_MEMORY[p.layout],
        exchanged=t.sums_bytes / 4 if t.cluster > 1 else 0.0,
    )


def fragment_clocks(t: Tiling) -> float:
    """Clocks of the tensor cores for a fragment of weights, with the pixels of all consumers that use it."""
    return t.nb * (32 if t.split == 2 else 64) * (3 if t.parts == 2 else 1) / t.parts


def alignment_of(p: Problem) -> int:
    """Bytes at which rows of an NCHW result begin, up to a sector's."""
    return math.gcd(result_shape(p)[-1] * p.dtype.itemsize, SECTOR)


# --- pixels and weights on their way ---------------------------------------------------------------------------------


def _arriving(t: Tiling) -> tuple[float, int, int]:
    """Lines, boxes and bytes by which a chunk's pixels come."""
    if t.channels_last:
        return t.pixels * max(1.0, t.row_bytes / LINE), t.plane_count, t.pixels * t.row_bytes
    if t.beside:
        rows = t.beside * t.chunk // t.box_channels
    else:
        rows = t.chunk * (t.images if t.whole is not None else t.segments)
    return rows * -(-t.slot_bytes // rows // LINE), t.slot_boxes, t.slot_bytes


def _turned(t: Tiling, arriving: int) -> tuple[float, float]:
    """Chunks that producers transpose, and units, for a chunk; what they copy themselves as chunks of as much time.

    Both parts of a value are made of one read. Of two parts a chunk costs no more than its units.
    """
    if t.channels_last and t.parts == 1 and t.tensor_map:
        return 0.0, 0.0
    producers = 192 if t.wgmma else 128
    units = -(-t.pixels // producers) * t.k_steps * t.parts
    turned = _TURNED[t.parts] * units if not t.channels_last else 1.3 * units * (t.parts - 1)
    if t.tensor_map:
        return float(t.channels_last or t.parts == 1), turned
    slower = 1.0 if not t.channels_last or t.aligned_channels else _OFF_UNITS
    copies = arriving / 16 / producers * _COPY / RATES.chunk_turned
    return slower * (1.0 + copies), slower * turned


def _moved(t: Tiling, p: Problem) -> float:
    """Bytes of the device memory. Rows, and pixels of channels_last, that no tap reads stay there."""
    read = float(math.prod(source_shape(p)))
    for axis, (offsets, step) in enumerate(zip(t.offsets, t.in_steps)):
        if axis < 2 or t.channels_last:
            read *= len({offset % step for offset in offsets}) / step
    return (math.prod(result_shape(p)) + read) * t.element


# --- stores ----------------------------------------------------------------------------------------------------------


def _stored(t: Tiling, alignment: int) -> tuple[float, float]:
    """Clocks that a tile's stores take which nothing hides, and their bytes."""
    channels = min(t.cout_g if t.shuffle is None else t.shuffle.used, t.rows_per_sub * t.wgs_m)
    columns = t.beside * t.image_columns if t.beside else t.tile[0] * t.tile[3]
    outputs = math.prod(t.tile[1:3]) * columns * t.width_subs * t.subs * channels * t.element / t.cluster
    if t.drained:
        return outputs / _STORED["channels_last"], outputs  # in boxes' rows, as whole as pixels
    layout = t.problem.layout
    clocks = max(outputs * _unfilled(t, alignment) / _STORED[layout], _INSTRUCTION * _instructions(t, alignment))
    clocks += _filled(t, outputs)
    return clocks * (1.0 if t.split == 2 else _EXPOSED[layout]), outputs


def _filled(t: Tiling, outputs: float) -> float:
    """Clocks in which a tile stores its share of what is the bias alone; ``outputs`` are the bytes of its own."""
    n, d, h, _ = t.tile
    own, layout = len(t.multiplied.variants) * t.subs, t.problem.layout
    runs = sum(h if one.rows else 1 for one in t.multiplied.bare) * n * d / own
    more = math.prod(t.out_steps) / (own * t.width_subs) - 1 if t.multiplied.bare else 0.0
    return outputs * more / _STORED[layout] + runs * _FILLED_RUN[layout]


def _unfilled(t: Tiling, alignment: int) -> float:
    """What stores that do not fill sectors cost, as a factor (docs/design.md, Stores)."""
    if t.shuffle is not None:
        return 1.5
    if t.channels_last:
        return 1.0 if t.cout_g * t.element % SECTOR == 0 else 1.5
    if not t.contiguous:
        return SECTOR / (t.element * t.width_subs)
    return 1.0 if alignment == SECTOR else 1 + _SECTORS / (t.runs * 8 * t.width_subs * t.element)


def _instructions(t: Tiling, alignment: int) -> float:
    """Of an epilogue, for a warp of each consumer."""
    outputs = t.runs * 8 * t.width_subs  # of a run
    if t.channels_last and t.shuffle is None:
        return t.nb * t.width_subs * (20 * t.element + _RUN / 2)
    if t.shuffle is not None:
        lines = t.shuffle.per_slab * (16 + 10 * -(-t.runs * 8 * t.shuffle.inner // 32))
        return t.nb * 8 / t.runs * (t.runs * 5 + lines + _RUN)
    unit = t.element if not t.contiguous else 16 if alignment >= 16 or t.beside else min(2 * t.element, alignment)
    stores = -(-8 * outputs * t.element // unit // 32)
    return t.nb * 8 / t.runs * 2 * (outputs / 4 + 12 * stores + _RUN) / t.cluster
