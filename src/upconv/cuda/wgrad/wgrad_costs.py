"""What a tiling takes by the model of `upconv.cuda.cost`, into how many splits of K it is cut, and who adds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from upconv.cuda.cost import Cost, Work, cost, tile_clocks
from upconv.cuda.gpu import LINE, RATES, SECTOR, Gpu
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.derived import derived
from upconv.problem import Problem, triple

# Fitted, on an H200, to timed tilings of both layouts (docs/design.md, Cost models). Clocks of a block, which begins
# and leaves its sums, and of a chunk, whose first fragments are waited for; mma.sync's warps meet twice, too.
_BLOCK, _CHUNK, _SYNC_CHUNK = 2350.0, 136.0, 1550.0
# Units of `Rates.unit_turned` for 128 16-byte copies by a warpgroup; for turning 32 bytes of x of each of its threads.
# Clocks of a copy by threads that also multiply.
_COPIED, _TURNED, _SYNC_COPIED = 2.17, 3.06, 0.62
_COLUMNS = {2: 0.91, 4: 0.71}  # of the clocks for an instruction's columns, by bytes of an element
_SHORT = 0.55  # more reads of rows of x that take half a line; three times as many of a quarter

AnyTiling = SyncTiling | WarpgroupTiling
Ending = Literal["alone", "together", "steps"]
"""Who writes the weight: blocks of the only split; all blocks, which run at once and add up their sums; or a second
launch."""
_ENDINGS: dict[Ending, tuple[float, float]] = {
    "alone": (0.0, 1.37),
    "together": (3.03e-6, 1.46),
    "steps": (2.84e-6, 3.16),
}
"""Seconds, and passes over the records of sums, or (alone) over the weight."""


def ending(t: AnyTiling, splits: int, gpu: Gpu) -> Ending:
    """How a tiling's splits become the weight."""
    if not isinstance(t, WarpgroupTiling) or gpu.arch != "90a":
        return "steps"
    if splits == 1:
        return "alone"
    return "together" if t.tiles * splits <= gpu.multiprocessors else "steps"


@dataclass(frozen=True)
class Blocks:
    """What is alike of a problem's tilings that have a block's channels and taps in common."""

    gpu: Gpu
    tiles: int
    """Blocks of a split."""
    memory: float
    """Seconds of the device memory."""
    ending: Callable[[int], float]
    """Seconds of sums on their way to the weight, by splits."""
    of_chunk: float
    """Clocks of a chunk, at least, beside those of its positions,"""
    of_position: float
    """which the ring's latency makes more."""

    @derived
    def _wanted(self) -> frozenset[int]:
        """Splits of as many waves as are looked at."""
        return frozenset((1, *(max(1, self.gpu.multiprocessors * waves // self.tiles) for waves in (1, 2, 3, 4))))

    @derived
    def _share(self) -> float:
        """Seconds of all multiprocessors for a clock of every block's chunk."""
        return self.tiles / self.gpu.multiprocessors / self.gpu.clock

    @derived
    def _least_added(self) -> float:
        """Each ending takes least in the fewest splits that have it."""
        return RATES.launch + min(map(self.ending, (1, 2, self.gpu.multiprocessors // self.tiles + 1)))

    def fastest(self, chunks: int, clocks: float) -> tuple[float, int]:
        """Seconds for chunks of so many clocks, and in how many splits of K."""
        found = math.inf, 1
        for each in {-(-chunks // wanted) for wanted in self._wanted}:
            splits = -(-chunks // each)
            waves = -(-self.tiles * splits // self.gpu.multiprocessors)
            work = waves * (each * clocks + _BLOCK + RATES.tile) / self.gpu.clock
            found = min(found, (_beside_memory(work, self.memory) + RATES.launch + self.ending(splits), splits))
        return found

    def least(self, chunks: int, positions: int) -> float:
        """Seconds at least in so many chunks, which cover so many positions."""
        work = self._share * (self.of_chunk * chunks + self.of_position * positions)
        return _beside_memory(work, self.memory) + self._least_added


def _beside_memory(work: float, memory: float) -> float:
    """Seconds of both."""
    return work + RATES.beside_memory * memory if work > memory else memory + RATES.beside_memory * work


@dataclass(frozen=True)
class Model:
    """Estimates for a problem on a GPU. ``general``: of an exported file's kernel, which has two steps, at any size."""

    p: Problem
    gpu: Gpu
    general: bool = False

    @derived
    def straddling(self) -> float:
        """Lines that boxes touch, of those that they would where rows begin at lines."""
        return 1.0 if self.general else _straddling(self.p)

    @derived
    def moved(self) -> int:
        """Bytes of both operands."""
        return (math.prod(self.p.input_shape) + math.prod(self.p.output_shape)) * self.p.dtype.itemsize

    @derived
    def numel(self) -> int:
        """Elements of the weight."""
        return math.prod(self.p.weight_shape)

    def clocks(self, t: AnyTiling) -> float:
        """Of a chunk."""
        return tile_clocks(self._chunk(t))

    def blocks(self, t: AnyTiling) -> Blocks:
        """What a tiling's block and taps take, whatever its chunk."""
        step = _step(t, self.straddling)
        of_position = (tile_clocks(step) - step.beside) * t.element / 32
        return Blocks(self.gpu, t.tiles, self.moved / self.gpu.bandwidth, self._endings(t), step.beside, of_position)

    def shares_of_chunk(self, t: AnyTiling) -> float:
        """Splits whose sums take as long on their way to the weight as a chunk."""
        ending_seconds = self._endings(t)
        return tile_clocks(self._chunk(t)) / self.gpu.clock / (ending_seconds(2) - ending_seconds(1))

    def cost(self, t: AnyTiling, splits: int) -> Cost:
        """The terms of `fastest`. A chunk is a tile of the model; what a block takes is spread over its chunks."""
        each, work = -(-t.chunks(self.p) // splits), self._chunk(t)
        beside = work.beside + (_BLOCK + RATES.tile) / each - RATES.tile
        work = replace(work, waves=self._waves(t, splits) * each, moved=self.moved, beside=beside)
        found, added = cost(work, self.gpu), self._endings(t)(splits)
        return replace(found, seconds=found.seconds + added, store=found.store + added)

    def _chunk(self, t: AnyTiling) -> Work:
        return _sync_chunk(t) if isinstance(t, SyncTiling) else _warpgroup_chunk(t, self.straddling)

    def _waves(self, t: AnyTiling, splits: int) -> int:
        return -(-t.tiles * splits // self.gpu.multiprocessors)

    def _endings(self, t: AnyTiling) -> Callable[[int], float]:
        """What sums take on their way from blocks to the weight, by splits."""
        weight, records = t.element * self.numel, t.tiles * t.k_slices * t.sums_bytes
        parts = max(0.0, SECTOR / _run(t, self.p) - 1) * weight  # sectors are written in parts

        @cache
        def seconds(splits: int) -> float:
            how = "steps" if self.general else ending(t, splits, self.gpu)
            fixed, passes = _ENDINGS[how]
            return fixed + (passes * (weight if how == "alone" else records * splits) + parts) / self.gpu.bandwidth

        return seconds


# --- what steps of K multiply, and what a chunk of them asks for beside ----------------------------------------------


def _sync_steps(t: SyncTiling, steps: int) -> dict[str, Any]:
    """An mma.sync takes twice the clocks of its share of a wgmma."""
    products = steps * t.warps * t.set_taps * (t.warp[0] // 16) * (t.warp[1] // 8) * (3 if t.promote else 1)
    reads = steps * t.warps * (t.warp[0] + t.set_taps * t.warp[1] * _conflicts(t)) / 4
    return {
        "instructions": products / 16,
        "columns": 4.0 * products,
        "waves": 1,
        "moved": 0,
        "fragments": 128 * reads * (1 if t.channels_last else 8 / t.element),
        "beside": _SYNC_CHUNK,
    }


def _sync_chunk(t: SyncTiling) -> Work:
    ragged = 6.0 if t.channels_last and any(channels % t.vec for channels in t.channels) else 1.0  # by elements
    copied = t.copied_units * ragged * _SYNC_COPIED / RATES.line
    return Work(**_sync_steps(t, t.k_steps), stages=2, lines=copied, shared=16.0 * t.copied_units)


def _warpgroup_steps(t: WarpgroupTiling, steps: int, conflicts: float, by_descriptor: bool) -> dict[str, Any]:
    """``conflicts`` of fragments, unless all of them come by descriptor."""
    fragments = steps * t.fragments_of_step * t.warpgroups
    return {
        "instructions": fragments,
        "columns": _COLUMNS[t.element] * steps * t.entries * t.warpgroups * t.block[0],
        "waves": 1,
        "moved": 0,
        "fragments": 2048 * fragments * conflicts,
        "loads": 0.0 if by_descriptor else _loads(t) * fragments * 2 / t.warpgroups,
        # Pixels that are turned have one buffer, so that the next chunk's box is asked for behind them.
        "beside": _CHUNK + (RATES.latency if t.turned else 0.0),
    }


def _warpgroup_chunk(t: WarpgroupTiling, straddling: float) -> Work:
    multiplied = _warpgroup_steps(t, t.k_steps, _conflicts(t), t.a_shared)
    short = 0.0 if t.channels_last else _SHORT * (128 / t.segment - 1)
    # A stage that descriptors read is given back a chunk late. A column of taps uses a fragment so long that copies are
    # never late.
    stages = t.stages - 1 if t.a_shared else 2 * t.stages if t.stacked else t.stages
    return Work(
        **multiplied,
        stages=stages,
        lines=_lines(t) * (straddling if t.box_g else 1.0),
        boxes=_boxes(t),
        shared=32 * multiplied["columns"] / _COLUMNS[t.element] * short + t.g_units * 16 + t.x_bytes,
        chunks_turned=0.0 if t.box_g else 1.0,
        turned=t.raw_bytes / (128 * 32) * _TURNED if t.box_g else t.g_units / 128 * _COPIED,
        descriptors=t.a_shared,
    )


def _step(t: AnyTiling, straddling: float) -> Work:
    """The least of a step of K, whatever its chunk: what it multiplies, and what is copied of it without a halo."""
    copied = 32.0 * (t.block[0] + _pixels_of_position(t) * t.block[1])
    if isinstance(t, SyncTiling):
        lines = copied / 16 * _SYNC_COPIED / RATES.line
        return Work(**_sync_steps(t, 1), stages=math.inf, lines=lines, shared=copied)
    conflicts = 4.0 / t.element if t.interleaved else _conflicts(t)
    multiplied = _warpgroup_steps(t, 1, conflicts, t.channels_last and t.element == 2)
    turned = t.block[0] / 128 * _TURNED if t.turned else 0.0
    lines = copied / LINE * (straddling if t.aligned_g else 1.0)
    return Work(**multiplied, stages=math.inf, lines=lines, shared=copied, turned=turned)


def _pixels_of_position(t: AnyTiling) -> int:
    """Pixels of g for each of x: taps of different residues modulo the stride share none."""
    axes = zip(t.taps, t.steps, t.dilation)
    return math.prod(min(taps, step // math.gcd(step, dilation)) for taps, step, dilation in axes)


def _loads(t: WarpgroupTiling) -> float:
    """Of a fragment that comes from registers."""
    if t.run_words:
        return 5 * t.run_words / t.run
    return 2.6 if t.channels_last and t.element == 2 else 20 / t.element


def _conflicts(t: AnyTiling) -> float:
    """Passes of shared memory for a warp's reads of g: of NCHW by the step from lane to lane; of 16 bits two words."""
    if t.channels_last:
        return 1.0
    if isinstance(t, WarpgroupTiling) and t.interleaved:
        return t.banks[1] * (4.0 / t.element)
    if isinstance(t, WarpgroupTiling) and t.run_words:
        return t.run_words / t.run
    return 2.0 if t.element == 2 else float(math.gcd(t.steps[2], 4))


def _boxes(t: WarpgroupTiling) -> int:
    """Copies of the tensor copy engine for a chunk."""
    of_line = t.block[0] // t.x_width if t.channels_last else t.line // t.segment
    found = 1 if t.turned else of_line
    if t.box_g:
        wide = t.block[1] // t.g_width if t.channels_last else 1
        found += wide * math.prod(t.classes) * t.planes.number
    return found


def _lines(t: WarpgroupTiling) -> float:
    """Lines of 128 bytes that the boxes of a chunk touch, in units of which a row counts half at least."""

    def touched(rows: float, span: int, begin: int) -> float:
        """Of rows of ``span`` bytes that begin at multiples of ``begin``."""
        return rows * (max(0.5, span / 128) if span <= begin else 1 + (span - min(begin, 128)) / 128)

    if t.channels_last:
        span = t.block[0] * t.element if t.turned else t.segment
        found = touched(t.x_bytes / span, span, 128 if span >= 128 else span)
        row = t.g_width * t.element
        return found + touched(t.g_rows * t.g_pixels * t.block[1] / t.g_width, row, row)
    found = touched(t.x_bytes / t.segment, t.segment, t.segment)
    return found + touched(t.g_rows * t.block[1], t.g_row_units * 16, 16)


def _straddling(p: Problem) -> float:
    """Lines that boxes' rows of a problem touch, of those that they would where rows begin at lines: one more for each
    halving of what rows begin at. Short rows share lines."""
    row = p.size[-1] * p.dtype.itemsize
    if p.layout != "nchw" or row < 48:
        return 1.0
    return 1.0 + math.log2(64 // math.gcd(row, 64))


def _run(t: AnyTiling, p: Problem) -> int:
    """Bytes that a block writes side by side into the weight: of its taps, and of output channels if it has all."""
    if t.channels_last:
        return t.block[1] * t.element
    run = t.element
    for taps, kernel in zip(reversed((t.block[1], *t.taps)), (*reversed(triple(p.kernel)), 0)):
        run *= taps
        if taps != kernel:
            break
    return run
