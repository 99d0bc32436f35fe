"""What a tiling takes by the model of `upconv.cuda.cost`, into how many splits of K it is cut, and who adds them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from upconv.cuda.cost import Cost, Work, cost
from upconv.cuda.gpu import H200, RATES, Gpu
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Problem

_MAX_SLICE_BYTES = 96 << 20  # of partial sums
# Fitted, on an H200, to timed tilings of both layouts (docs/design.md, Cost models). Clocks of a block, which begins
# and leaves its sums, and of a chunk, whose first fragments are waited for; mma.sync's warps meet twice, too.
_BLOCK, _CHUNK, _SYNC_CHUNK = 2350.0, 136.0, 1550.0
# Units of `Rates.unit_turned` for 128 16-byte copies by a warpgroup; for turning 32 bytes of x of each of its threads.
# Clocks of a copy by threads that also multiply. And of a chunk that is turned: nothing else runs while warps meet.
_COPIED, _TURNED, _SYNC_COPIED = 2.17, 3.06, 0.62
_TURNED_CHUNK = 805.0
_COLUMNS = {2: 0.91, 4: 0.71}  # of the clocks for an instruction's columns, by bytes of an element
_SHORT = 0.55  # more reads of rows of x that take half a line; three times as many of a quarter
# Seconds, and passes over the sums, or over the weight: of blocks that add up their sums, of one that is alone, and of
# a second launch.
_ADDING, _ALONE, _STEPS = (3.03e-6, 1.46), (0.0, 1.37), (2.84e-6, 3.16)
_SECTOR = 32  # bytes that are written together

AnyTiling = SyncTiling | WarpgroupTiling
Ending = Literal["alone", "together", "steps"]
"""Who writes the weight: blocks of the only split; all blocks, which run at once and add up their sums; or a second
launch."""


def ending(t: AnyTiling, splits: int, gpu: Gpu) -> Ending:
    """How a tiling's splits become the weight."""
    if not isinstance(t, WarpgroupTiling) or not t.adds_up or gpu.arch != "90a":
        return "steps"
    if splits == 1:
        return "alone"
    return "together" if t.tiles * splits <= gpu.multiprocessors else "steps"


def _conflicts(t: AnyTiling) -> float:
    """Passes of shared memory for a warp's reads of g: of NCHW by the step from lane to lane; of 16 bits two words."""
    if t.channels_last:
        return 1.0
    if isinstance(t, WarpgroupTiling) and t.interleaved:
        return t.banks[1] * (4.0 / t.element)
    if isinstance(t, WarpgroupTiling) and t.run_words:
        return t.run_words / t.run
    return 2.0 if t.element == 2 else float(math.gcd(t.steps[2], 4))


def _sync_chunk(t: SyncTiling) -> dict[str, float]:
    """What a chunk asks for (`Work`): an mma.sync takes twice the clocks of its share of a wgmma."""
    products = t.k_steps * t.warps * t.set_taps * (t.warp[0] // 16) * (t.warp[1] // 8) * (3 if t.promote else 1)
    reads = t.k_steps * t.warps * (t.warp[0] + t.set_taps * t.warp[1] * _conflicts(t)) / 4
    ragged = 6.0 if t.channels_last and any(channels % t.vec for channels in t.channels) else 1.0  # by elements
    return {
        "instructions": products / 16,
        "columns": 4.0 * products,
        "stages": 2,
        "lines": t.copied_units * ragged * _SYNC_COPIED / RATES.line,
        "shared": 16.0 * t.copied_units,
        "fragments": 128 * reads * (1 if t.channels_last else 8 / t.element),
    }


def _warpgroup_chunk(t: WarpgroupTiling, straddling: float) -> dict[str, float]:
    """What a chunk asks for (`Work`). ``straddling``: lines that boxes touch, of those of rows that begin at lines."""
    columns, fragments = t.k_steps * t.entries * t.warpgroups * t.block[0], _fragments(t)
    short = 0.0 if t.channels_last else _SHORT * (128 / t.segment - 1)
    loads = 0.0 if t.a_shared else 2.6 if t.channels_last and t.element == 2 else 20 / t.element
    if t.run_words:
        loads = 5 * t.run_words / t.run
    return {
        "instructions": fragments,
        "columns": _COLUMNS[t.element] * columns,
        # A stage that descriptors read is given back a chunk late. A column of taps uses a fragment so long that copies
        # are never late.
        "stages": t.stages - 1 if t.a_shared else 2 * t.stages if t.stacked else t.stages,
        "lines": _lines(t) * (straddling if t.box_g else 1.0),
        "boxes": _boxes(t),
        "shared": 32 * columns * short + t.g_units * 16 + t.x_bytes,
        "fragments": 2048 * fragments * _conflicts(t),
        "loads": loads * fragments * 2 / t.warpgroups,
        "chunks_turned": 0.0 if t.box_g else 1.0,
        "turned": t.raw_bytes / (128 * 32) * _TURNED if t.box_g else t.g_units / 128 * _COPIED,
        "descriptors": t.a_shared,
    }


def _fragments(t: WarpgroupTiling) -> int:
    """Of g, for a chunk, of all warpgroups."""
    return (t.steps_of_row * t.row_steps if t.stacked else t.k_steps * t.entries) * t.warpgroups


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


def _chunk(t: AnyTiling, straddling: float) -> dict[str, float]:
    """What a chunk asks for (`Work`), with the clocks that nothing hides."""
    if isinstance(t, SyncTiling):
        return _sync_chunk(t) | {"beside": _SYNC_CHUNK}
    return _warpgroup_chunk(t, straddling) | {"beside": _CHUNK + (_TURNED_CHUNK if t.turned else 0.0)}


def _chunk_clocks(t: AnyTiling, straddling: float) -> float:
    """Clocks of a chunk on its multiprocessor."""
    work: Any = _chunk(t, straddling)
    found = cost(Work(**work, waves=1, moved=0.0), H200)
    return (found.seconds - found.launch) * H200.clock - RATES.tile


def _block_seconds(gpu: Gpu) -> float:
    """What a block takes beside its chunks."""
    return (_BLOCK + RATES.tile) / gpu.clock


def _moved(t: AnyTiling, p: Problem) -> int:
    return (math.prod(p.input_shape) + math.prod(p.output_shape)) * t.element


def _waves(t: AnyTiling, splits: int, gpu: Gpu) -> int:
    return -(-t.tiles * splits // gpu.multiprocessors)


def fastest(t: AnyTiling, p: Problem, gpu: Gpu, general: bool = False) -> tuple[float, int]:
    """Seconds of a problem, in so many splits of K, of which it takes the fewest. ``general``: of an exported file's
    kernel, which has two steps, at any size."""
    chunks = t.chunks(p)
    clocks = _chunk_clocks(t, 1.0 if general else _straddling(p))
    memory = _moved(t, p) / gpu.bandwidth
    most = max(1, min(chunks, _MAX_SLICE_BYTES // (4 * math.prod(p.weight_shape) * t.k_slices)))
    found = math.inf, 1
    for splits in sorted({min(most, max(1, gpu.multiprocessors * k // t.tiles)) for k in (1, 2, 3, 4)} | {1}):
        each = -(-chunks // splits)
        splits = -(-chunks // each)
        work = _waves(t, splits, gpu) * (each * clocks / gpu.clock + _block_seconds(gpu))
        seconds = max(work, memory) + RATES.beside_memory * min(work, memory) + RATES.launch
        found = min(found, (seconds + _ending_seconds(t, p, splits, gpu, general), splits))
    return found


def estimate(t: AnyTiling, p: Problem, gpu: Gpu, splits: int, general: bool = False) -> Cost:
    """The terms of `fastest`. A chunk is a tile of the model; what a block takes is spread over its chunks."""
    each = -(-t.chunks(p) // splits)
    work: Any = _chunk(t, 1.0 if general else _straddling(p))
    work["beside"] += _block_seconds(gpu) * gpu.clock / each - RATES.tile
    found = cost(Work(**work, waves=_waves(t, splits, gpu) * each, moved=_moved(t, p)), gpu)
    added = _ending_seconds(t, p, splits, gpu, general)
    return replace(found, seconds=found.seconds + added, store=found.store + added)


def _ending_seconds(t: AnyTiling, p: Problem, splits: int, gpu: Gpu, general: bool) -> float:
    """What sums take on their way from blocks to the weight."""
    how = "steps" if general else ending(t, splits, gpu)
    numel = math.prod(p.weight_shape)
    if how == "steps":
        (fixed, passes), of = _STEPS, 4 * splits * t.k_slices * numel
    elif how == "alone":
        (fixed, passes), of = _ALONE, t.element * numel
    else:
        assert isinstance(t, WarpgroupTiling)
        (fixed, passes), of = _ADDING, t.tiles * splits * t.sums_bytes
    found = fixed + passes * of / gpu.bandwidth
    if how != "steps":  # sectors are written in parts
        found += max(0.0, _SECTOR / _run(t, p) - 1) * t.element * numel / gpu.bandwidth
    return found


def _run(t: AnyTiling, p: Problem) -> int:
    """Bytes that a block writes side by side into the weight: of its taps, and of output channels if it has all."""
    if t.channels_last:
        return t.block[1] * t.element
    run = t.element
    for taps, kernel in zip(reversed((t.block[1], *t.taps)), (*reversed(p.kernel), *(1,) * (3 - p.rank), 0)):
        run *= taps
        if taps != kernel:
            break
    return run
