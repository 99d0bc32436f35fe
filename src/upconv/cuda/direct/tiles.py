"""Tiles of ``kernels/direct.cu``: what blocks and threads compute, the kernel's constants, which are worth a try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from upconv.cuda.direct import cells
from upconv.cuda.direct.cells import axes
from upconv.problem import Problem

_MAX_THREADS = 512
_MAX_SUMS = 96  # per thread in 32-bit registers, of 255; windows, weights and addresses need the rest
MAX_UNROLLED = 1024  # multiply-adds in a kernel's body: 1.0 s of NVRTC


@dataclass(frozen=True)
class Tile:
    """A configuration of the tiled kernel."""

    co: int
    """Output channels per thread."""
    cells: int
    """Neighbouring cells along W per thread."""
    block_x: int
    """Threads along W; a power of two."""
    block_h: int
    """Cells along H per block."""
    slots: int
    """Groups per block."""
    chunk: int
    """Input channels of each group per stage."""
    phases: int = 1
    """Output rows of a cell per thread: one or all."""

    def rows(self, stride: int) -> int:
        """Of threads, where cells have so many rows."""
        return self.block_h * stride // self.phases


# --- the kernel's constants ------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def constants(p: Problem, tile: Tile) -> dict[str, int]:
    """Of the tiled kernel for a problem; no size of the image is among them."""
    d, h, _ = axes(p)
    threads = -(-tile.slots * tile.rows(h.stride) * tile.block_x // 32) * 32
    chunks = -(-(p.in_channels // p.groups) // tile.chunk)
    run_pitch = _run_pitch(p, tile)
    return {
        **cells.constants(p),
        **cells.window(p),
        "co_tile": tile.co,
        "threads": threads,
        "cells": tile.cells,
        "block_x": tile.block_x,
        "block_h": tile.block_h,
        "slots": tile.slots,
        "chunk": tile.chunk,
        "phases_h": tile.phases,
        "stages": 2 if chunks * d.kernel > 1 else 1,
        "step_kh": h.tap_step,
        "step_row": h.dilation * h.tap_step // h.stride,
        "row_pitch": _row_pitch(p, tile),
        "run_pitch": run_pitch,
        "part": _part(p, tile, threads * run_pitch),
        "min_blocks": max(1, min(cells.resident(threads, registers(p, tile)), 16)),
    }


def vector(dtype: torch.dtype) -> int:
    """Accumulators in 16 bytes."""
    return 2 if dtype == torch.float64 else 4


def _run_pitch(p: Problem, tile: Tile) -> int:
    """Words of shared memory from one thread's outputs to the next one's."""
    run, vec = tile.cells * axes(p)[2].stride, vector(p.dtype)
    return run | 1 if run % vec else run + (vec if run // vec % 2 == 0 else 0)


def _row_pitch(p: Problem, tile: Tile) -> int:
    """Words from row to row of an input tile: the threads of a warp (of half a warp for doubles) have one stride."""
    pitch, banks = tile.cells | 1, 16 if p.dtype == torch.float64 else 32
    found = -(-(tile.block_x * tile.cells + axes(p)[2].span) // tile.cells) * pitch
    if tile.block_x < banks and tile.block_h > 1:
        found += (tile.block_x * pitch - found) % banks
    return found


def _part(p: Problem, tile: Tile, words: int) -> int:
    """Output channels of a thread that are stored at once, so that they stay below 48 KiB of shared memory.

    ``words``: of one of them in NCHW.
    """
    _, h, w = axes(p)
    if p.layout == "channels_last":
        words = tile.slots * tile.cells * w.stride * tile.block_x * tile.rows(h.stride)
    part = tile.co
    while part > 1 and part * words * (16 // vector(p.dtype)) > 3 * 2**14:
        part = max(k for k in range(1, part) if tile.co % k == 0)
    return part


def shared_words(p: Problem, m: dict[str, int]) -> tuple[int, int, int]:
    """Words of a kernel's shared memory: a stage's weights, a whole stage, and all of it with the epilogue's."""
    vec = vector(p.dtype)
    rows = m["block_h"] * m["stride_h"] // m["phases_h"]
    plane = (m["block_h"] + m["span_h"]) * m["row_pitch"] | 1
    channels = m["slots"] * m["chunk"]
    weights = channels * m["kernel_h"] * weight_row(p, m["co_tile"])
    stage = -(-(weights + channels * plane) // vec) * vec
    run = m["cells"] * m["stride_w"]
    if m["channels_last"]:
        epilogue = rows * m["block_x"] * (run * m["slots"] * m["part"] | 1)
    else:
        epilogue = 0 if stores_directly(p, m) else m["threads"] * m["run_pitch"] * m["part"]
    return weights, stage, max(m["stages"] * stage, epilogue)


def weight_row(p: Problem, co: int) -> int:
    """Words of the weights of one (depth tap, input channel, height tap), padded to 16 bytes."""
    vec = vector(p.dtype)
    return -(-p.kernel[-1] * co // vec) * vec


def packed_words(p: Problem, co: int) -> int:
    """Elements of the packed weights, of ``co`` output channels per thread."""
    blocks = -(-(p.out_channels // p.groups) // co)
    return blocks * p.in_channels * (p.taps // p.kernel[-1]) * weight_row(p, co)


def stores_directly(p: Problem, m: dict[str, int]) -> bool:
    """Whether a thread's outputs of a row are one vector, which it stores."""
    run = m["cells"] * m["stride_w"]
    return not m["channels_last"] and run * p.dtype.itemsize <= 16 and run & (run - 1) == 0


def registers(p: Problem, tile: Tile) -> int:
    """Registers per thread, generously: sums, a window, a pack of weights, addresses."""
    d, _, w = axes(p)
    words, half = 2 if p.dtype == torch.float64 else 1, p.dtype.itemsize == 2
    total = words * sums(p, tile)
    # What ptxas takes besides grows with the work that it can interleave: below these it spills.
    # Loads in flight; addresses of channels_last, conversions of halves.
    flying = 8 * (p.layout == "channels_last") + 16 * half + 8 * (d.kernel > 1)
    flying += 24 * (half and tile.phases > 1 and total >= 56)
    if tile.phases > 1:
        besides = 27 + 3 * tile.phases + 3 * min(-(-w.kernel * tile.co * words // 4), 12) + 16 * (words - 1) + flying
    else:
        besides = 56 + 16 * (total >= 28) + 16 * (total >= 48) + 32 * (words - 1) + flying
    return cells.rounded(total + words * (tile.cells + w.span) + besides)


def sums(p: Problem, tile: Tile) -> int:
    """Sums of a thread; all but those of phases without taps."""
    _, h, w = axes(p)
    if tile.phases == 1:
        return tile.co * tile.cells * w.stride
    return tile.co * tile.cells * w.live * h.live


def grid(p: Problem, tile: Tile) -> tuple[int, int, int]:
    """Tiles along H, tiles along W, blocks in all."""
    d, h, w = axes(p)
    tiles_h, tiles_w = -(-h.cells // tile.block_h), -(-w.cells // (tile.cells * tile.block_x))
    couts = -(-p.out_channels // p.groups // tile.co)
    return tiles_h, tiles_w, p.batch * d.out * -(-p.groups // tile.slots) * couts * tiles_h * tiles_w


# --- which are worth a try -------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What a thread of a `Tile` computes; as there."""

    co: int
    phases: int
    cells: int


def tiles(p: Problem) -> Iterator[Tile]:
    """Every tile that is worth a try for a problem."""
    for kind in kinds(p):
        yield from of_kind(p, kind)


def kinds(p: Problem) -> Iterator[Kind]:
    """Of those tiles."""
    if not all(axis.countable for axis in axes(p)):
        return
    co_group = p.out_channels // p.groups
    couts = [c for c in (1, 2, 3, 4, 6, 8, 12, 16) if c < co_group and -(-co_group // c) * c < 1.5 * co_group]
    couts = [*couts, co_group] if co_group <= 16 else couts
    for co, phases, width in product(couts[-4:], sorted({1, axes(p)[1].stride}), (1, 2, 4, 8)):
        kind = Kind(co, phases, width)
        if _fits(p, kind):
            yield kind


def _fits(p: Problem, kind: Kind) -> bool:
    """Whether a thread's sums and window are few enough for registers, and its unrolled taps for the compiler."""
    _, h, w = axes(p)
    (co, phases, width), half, words = kind, p.dtype.itemsize == 2, 2 if p.dtype == torch.float64 else 1
    # Unrolled taps of halves beside their loads in flight spill with 96 sums, or with many output channels.
    if phases > 1 and ((half and co > 8) or phases > 16 or h.span > 16):
        return False
    # Stores of phases without taps are sums for the epilogue, if not for the main loop: within bounds as well.
    most = _MAX_SUMS - 32 * (phases > 1 and half)
    shape = Tile(co, width, 1, 1, 1, 1, phases)
    if words * max(sums(p, shape), co * width * w.stride * phases // 4) > most:
        return False
    unrolled = w.kernel * co * width * (h.kernel if phases > 1 else 1)
    return unrolled <= MAX_UNROLLED and w.span + width <= 48 and (width == 1 or width < 2 * w.cells)


def of_kind(p: Problem, kind: Kind) -> Iterator[Tile]:
    """The tiles whose threads compute as much."""
    _, h, w = axes(p)
    ci = p.in_channels // p.groups
    chunks = sorted({min(ci, 4), min(ci, 8), min(ci, 16)}) if ci > 2 else [ci]
    co, phases, width = kind
    for block_x, block_h in product((2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32)):
        if (block_x > 2 and block_x * width >= 2 * max(w.cells, 2)) or (block_h > 1 and block_h >= 2 * h.cells):
            continue
        # Rows shorter than a line cost twice the model and more (measured on layers of few channels).
        if p.layout == "nchw" and block_x * width < min(16, w.cells):
            continue
        units = block_x * block_h * h.stride // phases
        for slots in _slots(p, co, units):
            threads = units * slots
            if threads > _MAX_THREADS or (threads < 128 and block_h < h.cells and 2 * units <= 128):
                continue
            for chunk in (ci,) if slots > 1 else chunks:
                yield Tile(co, width, block_x, block_h, slots, chunk, phases)


def _slots(p: Problem, co: int, units: int) -> Iterator[int]:
    """Groups of a block; ``units``: threads that compute a group."""
    if units > _MAX_THREADS:
        return
    ci, co_group, item = p.in_channels // p.groups, p.out_channels // p.groups, p.dtype.itemsize
    small = p.layout == "channels_last" and (ci * item < 32 or co_group * item < 32)
    for slots in (1, 2, 4, 8, 16):
        if slots > 1 and (slots >= 2 * p.groups or ci > 8 or co < co_group):
            continue
        if slots > 1 and not (small or units * slots <= 128):
            continue
        yield slots
