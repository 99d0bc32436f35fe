"""The cost model of the gradient for the weight on tensor cores: what chunks take, and blocks at their ends.

A choice's time is that of its chunks, of which a split has so many one behind the other, and of what its blocks take
beside them: the first bytes, and sums on their way to the weight, alone, by clusters, together or in two steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from upconv.cuda.compile.boxes import fullest
from upconv.cuda.gpu import MAX_CLUSTER, Gpu
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.derived import varied
from upconv.problem import Problem

_MAX_SLICE_BYTES = 96 << 20  # of partial sums
# Those of wgmma by threads, by rows and by classes are fitted to 1,966 timed choices of 27 layers in both layouts.
_MMA = 2.3  # clocks of a multiprocessor for an mma.sync of 16 x 8 x 32 bytes
_WGMMA = 1.01  # of the matrix instructions' own clocks
_LOAD = 1.15, 0.903  # clocks of a 128-byte access to shared memory: mma.sync's kernel, wgmma's
_ISSUE = 0.1  # clocks of a multiprocessor for each 16-byte copy by threads that also multiply: addresses and bounds
_COPY = 1.02, 1.43  # clocks for a 16-byte copy by a warpgroup of its own; beside three that multiply
_ROW = 0.143  # clocks for each run of such copies, NCHW: a channel's row
_IMAGES = 0.0122  # of a chunk's clocks, for each doubling of its images
_SETS = 0.0036  # of them, for each doubling of the sets of taps along W, whose blocks read between each other
_BOX_BESIDE = 88.0  # clocks of a box of x beyond the first beside copies by threads
# Clocks of a chunk: mma.sync's, barriers and the first fragments; wgmma's, copies by threads; rows together, by boxes.
_CHUNK = 700.0, 600.0, 150.0
_STEP = 40.0  # clocks a step of mma.sync costs beside its instructions
_LATENCY = 588.0  # clocks from a copy's begin to its first bytes
_STACKED = 0.831, 3.56  # of the matrix instructions' own clocks where rows share one, and clocks of each beside them
_WARPGROUP_STEP = 35.3  # clocks a step of wgmma costs: the fragment is waited for
_DRAIN = 93.0, 73.0  # clocks at the end of unrolled wgmma: of taps one by one; of rows together, or by classes
_L2 = 24.0  # bytes a clock and multiprocessor, copied by threads that also multiply
_LINE = 2.21  # clocks of the tensor copy engine for a line of 128 bytes; a row that takes half of one costs half
_BOX_L2 = 42.9  # by boxes
# NCHW, g by boxes, neither stacked nor classed: of 700 timed choices of 27 layers on an H100, of which it misses 9%,
# and the fastest of which its own are 3% behind. Shares of a clock: for two columns of an instruction; for 128 bytes of
# shared memory that instructions read, and that copies write, which fill gaps.
_TENSOR, _READ, _WRITTEN = 0.94, 0.85, 0.3
_INSTRUCTION, _BESIDE = 25.0, 40.0  # clocks beside: of an instruction, of a chunk
_BOXED_LINE, _BOXED_L2 = 1.52, 90.0  # clocks of a line of 128 bytes; bytes a clock
_TOGETHER = 3.4  # the exponent by which these, which overlap, are added
# And how much more: with two stages, by bytes of an element; with rows of x of so many bytes; with taps along D.
_TWO_STAGES, _SHORT, _DEEP = {4: 0.09, 2: 0.12}, {64: 0.17, 32: 0.64}, 0.57
# Lines that are touched where rows of x begin at multiples of so many bytes, and g's at as many or twice as many, by
# measured times. Shorter rows share lines.
_STRADDLING, _LEAST_STRADDLING = {16: 3.0, 32: 2.0}, 48
_OVERLAP = 0.063, 0.203  # of a chunk's clocks that are not its bound: g by boxes; by threads
_SYNC_NCHW = 1.25  # what the mma.sync kernel takes beyond its model: fragments off 16 bytes
_SYNC_NCHW_16 = 2.2  # and where each is put together from two words
# channels_last by boxes: of 2,600 timed choices of 43 layers on an H100 and an H200, and the fastest of which its own
# are 2.1% behind. As NCHW's, and by bytes of an element: clocks of an instruction, where fragments come by descriptors
# its share; of x that is turned.
_LAST_TENSOR, _LAST_NARROW, _LAST_STACKED = 0.826, 0.925, 0.956  # of up to 64 columns less, of rows together
_LAST_INSTRUCTION, _LAST_SHARED = {4: 63.3, 2: 31.9}, 0.371
_LAST_READ, _LAST_READ_STACKED, _LAST_WRITTEN, _LAST_TURNED = 0.3, 1.5, 0.891, 6.46
_LAST_LINE, _LAST_BOX, _LAST_L2 = 2.07, 16.5, 200.0
_LAST_TOGETHER, _LAST_BESIDE, _LAST_SETS, _LAST_GAPLESS = 10.0, 170.0, 0.006, 0.122
# A halo is read for each image of a tile.
_LAST_IMAGES = 0.04
# Rows together, with taps along D.
_LAST_DEEP = 0.02
# Where both operands are read by descriptors, a stage is given back a chunk late, so that its next chunk has one stage
# less to arrive in: clocks, bytes a clock, and the exponent.
_LAST_ARRIVES = 1000.0, 90.0, 8.0
# And what memory bounds, where the ring has so many stages, whose blocks are late by less.
_DEEP_RING = 6, 0.985


@dataclass(frozen=True)
class Ends:
    """What blocks take beside their chunks, fitted with those; the rest of NCHW's to 511 timed choices of 19 layers.

    Sums are in the second-level cache, so the memory's rate does not count.
    """

    block: float
    """Clocks of a block: its first bytes, its sums."""
    wave: float
    """The share of these that the next wave's blocks take again."""
    sum: float
    """Clocks for each byte of a block's sums."""
    memory: float
    """Share of the lesser of multiplying and the tensors' bytes that the other does not hide."""
    alone: tuple[float, float]
    """Seconds, and passes over the weight, where a block writes it from its own sums."""
    cluster: tuple[float, float]
    """Seconds, and passes over all blocks' sums, where those of a cluster add them up."""
    together: tuple[float, float]
    """The same through global memory."""
    steps: tuple[float, float]
    """Seconds, and passes over the slices of partial sums, of the second step."""
    scattered: float
    """Passes over the weight that blocks write themselves, of taps innermost."""


_CACHE = 4e12  # bytes a second of such a pass
_LAST_ENDS = Ends(
    block=9911.0,
    wave=0.205,
    sum=0.013,
    memory=0.247,
    alone=(0.0, 1.33),
    cluster=(2.8e-6, 0.929),
    together=(2.5e-6, 1.8),
    steps=(2e-6, 4.28),
    scattered=0.0,
)
_NCHW_ENDS = Ends(
    block=11155.0,
    wave=0.675,
    sum=0.0,
    memory=0.13,
    alone=(6e-6, 0.468),
    cluster=(6e-6, 1.01),
    together=(7.6e-6, 1.585),
    steps=(7.9e-6, 3.18),
    scattered=0.378,
)
# Of mma.sync, and of exported files, whose blocks leave their sums to a second step in any case; passes are at the
# memory's rate. Files of NCHW stay as they are.
_STEPS_ENDS = Ends(
    block=14600.0,
    wave=1.0,
    sum=0.0,
    memory=0.12,
    alone=(0.0, 1.0),
    cluster=(0.0, 2.38),
    together=(0.0, 2.38),
    steps=(6.1e-6, 1.0),
    scattered=0.0,
)

AnyTiling = SyncTiling | WarpgroupTiling
Clocks = tuple[float, str]
"""Of a chunk, and what takes most of them."""


def clustered(t: AnyTiling, splits: int, gpu: Gpu) -> int:
    """The splits, where their blocks are a cluster that adds up their sums; else 1."""
    if not isinstance(t, WarpgroupTiling) or not t.adds_up or not 2 <= splits <= MAX_CLUSTER:
        return 1
    waves = -(-t.tiles * splits // gpu.multiprocessors)
    return splits if t.tiles <= waves * gpu.clusters(splits) else 1


def together(t: AnyTiling, splits: int, gpu: Gpu) -> bool:
    """Whether the splits' blocks, which are no cluster, may add up their sums: all run at once."""
    if not isinstance(t, WarpgroupTiling) or not t.adds_up or gpu.arch != "90a" or clustered(t, splits, gpu) > 1:
        return False
    return splits > 1 and t.tiles * splits <= gpu.multiprocessors


def alone(t: AnyTiling, splits: int, gpu: Gpu) -> bool:
    """Whether there is one split, whose blocks write the weight themselves."""
    return isinstance(t, WarpgroupTiling) and t.adds_up and gpu.arch == "90a" and splits == 1


def boxed(t: AnyTiling, p: Problem) -> AnyTiling:
    """A tiling of a layer with a problem's own chunks: `gapless` ones have the box that needs the fewest of them."""
    if not isinstance(t, WarpgroupTiling) or not t.gapless:
        return t
    return varied(t, tile=fullest(p.batch, p.size, p.stride, t.gapless)[1])


def chunks_of(t: AnyTiling, p: Problem) -> int:
    """Chunks of a problem."""
    if isinstance(t, WarpgroupTiling) and t.gapless:
        return fullest(p.batch, p.size, p.stride, t.gapless)[0]
    return math.prod(t.counts(p))


def chunk_clocks(t: AnyTiling, straddling: float = 1.0) -> tuple[float, str]:
    """(clocks of a chunk on its multiprocessor, what takes most of them); all sizes of one `_straddling` have these."""
    return _warpgroup_clocks(t, straddling) if isinstance(t, WarpgroupTiling) else _sync_clocks(t)


def _conflict(t: AnyTiling) -> float:
    """Passes of shared memory for a warp's reads of g."""
    step = t.steps[2]
    if isinstance(t, WarpgroupTiling) and t.interleaved:
        return t.conflicts * (1.0 if t.element == 4 else 2.0)
    if t.channels_last:
        if isinstance(t, WarpgroupTiling) and t.parted:
            return 1.0
        return 1.0 if step % 2 or (isinstance(t, WarpgroupTiling) and t.turned and step % 4) else 2.0
    if t.element == 2:
        if isinstance(t, WarpgroupTiling) and t.shared_words:
            return t.run_words / t.run * (1.0 if step == 1 else 1.25)
        return 2.0 if step == 1 else 2.5
    return 1.0 if step % 2 else 2.0 if step % 8 else 4.0


def _ragged(t: AnyTiling, channels: int) -> float:
    """What copying single elements costs, where channels_last pixels do not begin at 16 bytes."""
    return 6.0 if t.channels_last and channels % t.vec else 1.0


def _sync_clocks(t: SyncTiling) -> tuple[float, str]:
    fragments = t.warp[0] // 16 * (t.warp[1] // 8)
    matrix = t.k_steps * t.warps * t.set_taps * fragments * (3 if t.promote else 1) * _MMA
    reads = t.k_steps * t.warps * (t.warp[0] / 4 + t.set_taps * t.warp[1] / 4 * _conflict(t))
    shared = reads * _LOAD[0] + t.copied_units * 16 / 128
    l2 = t.copied_units * 16 / _L2 * max(_ragged(t, c) for c in t.channels)
    parts = {"tensor cores": matrix, "shared memory": shared, "L2": l2}
    bound = max(parts, key=lambda name: parts[name])
    total = max(parts.values()) + 0.25 * (sum(parts.values()) - max(parts.values())) + t.copied_units * _ISSUE
    if not t.channels_last:
        total *= _SYNC_NCHW if t.element == 4 else _SYNC_NCHW_16
    return total + _CHUNK[0] + t.k_steps / t.k_slices * _STEP, bound


def _boxed_clocks(t: WarpgroupTiling, straddling: float) -> tuple[float, str]:
    """`chunk_clocks` of NCHW where one box brings g, neither stacked nor classed."""
    steps = t.k_steps * t.entries * t.warpgroups
    copied = t.g_units * 16 + t.x_bytes
    read = steps * (16 * _conflict(t) + t.block[0] / 4)
    parts = {
        "tensor cores": _TENSOR * steps * t.block[0] / 2 + _INSTRUCTION * steps / t.warpgroups,
        "shared memory": _READ * read + _WRITTEN * copied / 128,
        "copies": _BOXED_LINE * t.lines_of_boxes * straddling,
        "L2": copied / _BOXED_L2,
    }
    bound = max(parts, key=lambda name: parts[name])
    total = sum(part**_TOGETHER for part in parts.values()) ** (1 / _TOGETHER) + _BESIDE
    more = (_TWO_STAGES[t.element] if t.stages == 2 else 0.0) + _SHORT.get(t.segment, 0.0)
    return total * (1.0 + more + (_DEEP if t.taps[0] > 1 else 0.0)), bound


def _last_clocks(t: WarpgroupTiling) -> tuple[float, str]:
    """`chunk_clocks` of channels_last where boxes bring g."""
    columns = t.k_steps * t.entries * t.warpgroups * t.block[0] / 2
    fragments = t.k_steps * t.entries * t.warpgroups
    if t.stacked:
        fragments = t.row * t.element // 32 * t.row_steps * t.warpgroups
    copied = t.g_units * 16 + t.x_bytes
    instruction = _LAST_INSTRUCTION[t.element] * (_LAST_SHARED if t.a_shared else 1.0)
    shape = (_LAST_STACKED if t.stacked else 1.0) * (_LAST_NARROW if t.block[0] <= 64 else 1.0)
    read = fragments * 16 * _conflict(t) + columns / 2 * (_LAST_READ_STACKED if t.stacked else 1.0)
    parts = {
        "tensor cores": _LAST_TENSOR * shape * columns + instruction * fragments / t.warpgroups,
        "shared memory": _LAST_READ * read + _LAST_WRITTEN * copied / 128 + _LAST_TURNED * t.x_bytes * t.turned / 128,
        "copies": _LAST_LINE * t.lines_of_boxes + _LAST_BOX * t.boxes,
        "L2": copied / _LAST_L2,
    }
    bound = max(parts, key=lambda name: parts[name])
    total = sum(part**_LAST_TOGETHER for part in parts.values()) ** (1 / _LAST_TOGETHER) + _LAST_BESIDE
    images = 0.0 if t.gapless else math.log2(t.tile[0])
    more = _LAST_SETS * math.log2(t.sets[2]) + _LAST_IMAGES * images
    total *= 1.0 + more + _LAST_DEEP * (t.stacked and t.taps[0] > 1) + _LAST_GAPLESS * (t.gapless > 0)
    if t.a_shared:
        latency, rate, exponent = _LAST_ARRIVES
        arrives = (latency + copied / rate) / max(0.5, t.stages - 2)
        bound = "copies" if arrives > total else bound
        total = (total**exponent + arrives**exponent) ** (1 / exponent)
    return total, bound


def _warpgroup_clocks(t: WarpgroupTiling, straddling: float) -> tuple[float, str]:
    if t.channels_last:
        return _last_clocks(t)
    if t.box_g and not (t.stacked or t.classed):
        return _boxed_clocks(t, straddling)
    steps = t.k_steps * t.entries * t.warpgroups
    columns = steps * t.block[0] / 2  # clocks of the tensor cores for all of them
    if t.stacked:
        fragments = t.tile[3] * t.element / 32 * t.row_steps * t.warpgroups
        drains = t.tile[3] * t.element / 32 / t.unrolled
        matrix = columns * _STACKED[0] + fragments * _STACKED[1]
    else:
        fragments, drains = steps, t.k_steps * t.entries / t.unrolled
        matrix = columns * _WGMMA
    shared = (fragments * 16 * _conflict(t) + columns / 2) * _LOAD[1] + (t.g_units * 16 + t.x_bytes) / 128
    if t.box_g:
        l2 = (t.g_units * 16 + t.x_bytes) / _BOX_L2
        # What the engine takes for a line shows where the tensor cores wait for nothing else.
        copies = t.lines_of_boxes * _LINE
    else:
        l2 = 0.0  # what copies take is more
        copies = t.g_units * _COPY[t.warpgroups > 2]
        copies += _CHUNK[1] + (t.boxes - 1) * _BOX_BESIDE + t.g_rows * t.block[1] * _ROW
        if t.stacked:
            copies = max(copies, t.lines_of_boxes * _LINE)
    parts = {"tensor cores": matrix, "shared memory": shared, "L2": l2, "copies": copies}
    bound = max(parts, key=lambda name: parts[name])
    total = max(parts.values()) + _OVERLAP[not t.box_g] * (sum(parts.values()) - max(parts.values()))
    drain = _DRAIN[t.stacked or t.classed]
    total += fragments / t.warpgroups * _WARPGROUP_STEP / t.warpgroups + drains * drain
    total += _CHUNK[2] if t.stacked and t.box_g else 0.0
    if t.stacked or t.classed:  # with two stages a chunk's copies begin when the one before is done with
        total = max(total, (copies + _LATENCY) / (t.stages - 1))
    total *= 1.0 + _IMAGES * math.log2(t.tile[0])
    return total * (1.0 + _SETS * math.log2(t.sets[2])), bound


def _ends(t: AnyTiling, general: bool) -> Ends:
    if general or isinstance(t, SyncTiling):
        return _STEPS_ENDS
    return _LAST_ENDS if t.channels_last else _NCHW_ENDS


def block_seconds(gpu: Gpu) -> float:
    """What a block of an exported file takes beside its chunks, by the model."""
    return _STEPS_ENDS.block / gpu.clock


def least(t: AnyTiling, clocks: float, p: Problem, gpu: Gpu) -> float:
    """Seconds that `whole` is never below, since no constant of `Ends` is negative, and what bytes bound takes more by
    `Ends.memory` than less by `_DEEP_RING`: those of all chunks spread evenly, and a bit less for roundings.
    """
    return t.tiles * chunks_of(t, p) * clocks / (gpu.multiprocessors * gpu.clock) * (1.0 - 1e-9)


class Floor:
    """Seconds that `whole` is never below for a tiling of a base's block and taps, whatever its chunk.

    By the matrix instructions, of which all positions of a chunk take as many, by the bytes of a chunk without its
    halo, by what blocks take at their ends and by the tensors' bytes.
    """

    def __init__(self, t: AnyTiling, p: Problem, gpu: Gpu, general: bool) -> None:
        ends = _ends(t, general)
        self._t, self._gpu, self._ends = t, gpu, ends
        self._memory = (math.prod(p.input_shape) + math.prod(p.output_shape)) * t.element / gpu.bandwidth
        self._step = (_sync_step if isinstance(t, SyncTiling) else _warpgroup_step)(t)
        self._of_steps = 8 if t.element == 4 else 16  # positions
        self._chunk, self._copied = 0.0, 0.0
        if isinstance(t, SyncTiling):
            self._chunk = _CHUNK[0]
        else:
            axes = zip(t.taps, t.dilation, t.steps)
            read = math.prod(len({tap * by % step for tap in range(taps)}) for taps, by, step in axes)
            line = (_LAST_LINE if t.channels_last else _BOXED_LINE) / 128
            self._copied = read * t.block[1] * t.element * line  # clocks for each position, of g alone
        self.seconds = self._whole(p.batch * math.prod(p.size) / self._of_steps * self._step)
        """Of any chunk."""

    def of(self, chunks: int, positions: int) -> float:
        """Of so many chunks of so many positions."""
        clocks = max(positions / self._of_steps * self._step, positions * self._copied) + self._chunk
        return self._whole(chunks * clocks)

    def _whole(self, clocks: float) -> float:
        """With all blocks' ends, of the clocks of all chunks on one multiprocessor."""
        gpu = self._gpu
        work = (self._t.tiles * clocks / gpu.multiprocessors + self._ends.block) / gpu.clock
        found = max(work, self._memory) + self._ends.memory * min(work, self._memory)
        return found * _DEEP_RING[1] * (1.0 - 1e-9)


def _sync_step(t: AnyTiling) -> float:
    """Clocks of a step of K in `_sync_clocks`, or less."""
    assert isinstance(t, SyncTiling)
    fragments = t.warp[0] // 16 * (t.warp[1] // 8)
    matrix = t.warps * t.set_taps * fragments * (3 if t.promote else 1) * _MMA
    shared = t.warps * (t.warp[0] / 4 + t.set_taps * t.warp[1] / 4) * _LOAD[0]
    total = max(matrix, shared) + 0.25 * min(matrix, shared)
    if not t.channels_last:
        total *= _SYNC_NCHW if t.element == 4 else _SYNC_NCHW_16
    return total + _STEP / t.k_slices


def _warpgroup_step(t: AnyTiling) -> float:
    """Clocks of a step of K in `_warpgroup_clocks`, or less."""
    assert isinstance(t, WarpgroupTiling)
    steps = t.entries * t.warpgroups
    columns = steps * t.block[0] / 2
    if t.stacked:
        return columns * min(_STACKED[0], _LAST_TENSOR * _LAST_STACKED * _LAST_NARROW)
    # By threads a fragment is waited for, by boxes an instruction takes so long.
    waited = columns * _WGMMA + t.entries * _WARPGROUP_STEP / t.warpgroups
    if t.channels_last:
        narrow = _LAST_NARROW if t.block[0] <= 64 else 1.0
        instruction = _LAST_INSTRUCTION[t.element] * (_LAST_SHARED if t.element == 2 else 1.0)
        return min(waited, columns * _LAST_TENSOR * narrow + instruction * t.entries)
    tensor, read = _TENSOR * columns + _INSTRUCTION * t.entries, _READ * steps * (16 + t.block[0] / 4)
    return min(waited, float((tensor**_TOGETHER + read**_TOGETHER) ** (1 / _TOGETHER)))


def whole(
    t: AnyTiling, chunk: tuple[float, str], p: Problem, gpu: Gpu, at_once: bool = True, general: bool = False
) -> tuple[float, str, int]:
    """(seconds, what bounds them, splits of K).

    ``at_once``: blocks may add up their sums themselves; ``general``: of an exported file's kernel.
    """
    clocks, bound = chunk
    chunks = chunks_of(t, p)
    numel = math.prod(p.weight_shape)
    found: tuple[float, str, int] | None = None
    most = max(1, min(chunks, _MAX_SLICE_BYTES // (4 * numel * t.k_slices)))
    options = {min(most, max(1, gpu.multiprocessors * k // t.tiles)) for k in (1, 2, 3, 4)} | {1}
    memory = (math.prod(p.input_shape) + math.prod(p.output_shape)) * t.element / gpu.bandwidth
    ends = _ends(t, general)
    rate = gpu.bandwidth if ends is _STEPS_ENDS else _CACHE
    own = ends.sum * t.sums_bytes if isinstance(t, WarpgroupTiling) else 0.0
    scattered = ends.scattered * numel * t.element / rate
    for splits in options:
        per_split = -(-chunks // splits)
        splits = -(-chunks // per_split)
        waves = -(-t.tiles * splits // gpu.multiprocessors)
        work = (waves * per_split * clocks + (ends.block + own) * (1 + (waves - 1) * ends.wave)) / gpu.clock
        seconds = max(work, memory) + ends.memory * min(work, memory)
        if at_once and alone(t, splits, gpu):
            fixed, passes = ends.alone
            seconds += fixed + passes * numel * t.element / rate + scattered
        elif at_once and ((by_cluster := clustered(t, splits, gpu) > 1) or together(t, splits, gpu)):
            assert isinstance(t, WarpgroupTiling)
            fixed, passes = ends.cluster if by_cluster else ends.together
            seconds += fixed + passes * t.tiles * splits * t.sums_bytes / rate + scattered
        else:
            fixed, passes = ends.steps
            seconds += fixed + passes * splits * t.k_slices * numel * 4 / rate
        deep = isinstance(t, WarpgroupTiling) and t.a_shared and t.stages >= _DEEP_RING[0]
        if memory > work and deep and not general:
            seconds *= _DEEP_RING[1]
        if found is None or seconds < found[0]:
            found = seconds, "bytes" if memory > work else bound, splits
    assert found is not None
    return found


def straddling_of(p: Problem) -> float:
    """Lines that boxes' rows of a problem touch, of those that they would where rows begin at lines."""
    row = p.size[-1] * p.dtype.itemsize
    return _STRADDLING.get(math.gcd(row, 64), 1.0) if p.layout == "nchw" and row >= _LEAST_STRADDLING else 1.0
