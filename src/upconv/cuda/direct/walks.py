"""Walks, the depthwise forwards of ``direct_walk_nchw.cu`` and ``direct_walk.cu``: a thread's work and its cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from upconv.cuda.direct import cells
from upconv.cuda.direct.cells import Cost, axes
from upconv.cuda.direct.tiles import MAX_UNROLLED
from upconv.cuda.gpu import Gpu, fma_lanes, threads_per_sm
from upconv.problem import Problem

THREADS = 128
_LAUNCH = 2e-6  # seconds


@dataclass(frozen=True)
class Walk:
    """A configuration of a depthwise kernel."""

    cells: int
    """Neighbouring cells along W per thread."""
    strip: int
    """Cells along H that a thread iterates over; no constant of the kernels."""


@lru_cache(maxsize=1024)
def constants(p: Problem, walk: Walk) -> dict[str, int]:
    """Of a depthwise kernel for a problem; no size of the image is among them."""
    found = {**cells.constants(p), **cells.window(p), "threads": THREADS, "cells": walk.cells}
    if p.layout == "nchw":
        return {**found, "min_blocks": 4}
    return {**found, "min_blocks": max(1, min(cells.resident(THREADS, _registers(p, walk)), 16))}


def _registers(p: Problem, walk: Walk) -> int:
    """Registers per thread in channels_last: weights, window, the next row, a row of sums."""
    _, h, w = axes(p)
    words = 2 if p.dtype == torch.float64 else 1
    need = h.kernel * w.kernel + (h.span + 2) * (walk.cells + w.span) + walk.cells * w.stride
    return cells.rounded(words * need + 48)


def packed_words(p: Problem) -> int:
    """Elements of the packed weights."""
    return p.groups * p.taps


def grid(p: Problem, walk: Walk) -> tuple[int, int, int]:
    """Runs along W, strips along H, threads in all (NCHW: with those that make whole blocks of a channel's)."""
    _, h, w = axes(p)
    runs, strips = -(-w.cells // walk.cells), -(-h.cells // walk.strip)
    of_channel = runs * strips
    if p.layout != "channels_last":
        of_channel = -(-of_channel // THREADS) * THREADS
    return runs, strips, p.batch * p.groups * of_channel


# --- which are worth a try -------------------------------------------------------------------------------------------


def walks(p: Problem) -> Iterator[Walk]:
    """Every configuration of the depthwise kernels that is worth a try for a problem; none for other layers."""
    _, h, _ = axes(p)
    if p.rank > 2 or p.in_channels != p.groups or p.out_channels != p.groups or h.stride > 16:
        return
    if not all(axis.countable for axis in axes(p)):
        return
    for width in _widths(p):
        for strip in (1, 4, 8, 16, 32, 64) if p.layout == "channels_last" else (1, 2, 3, 4, 6, 8, 12, 16, 32):
            if strip > 1 and strip >= 2 * h.cells:
                continue
            walk = Walk(width, strip)
            if grid(p, walk)[2] < 2**31:
                yield walk


def _widths(p: Problem) -> Iterator[int]:
    """Their cells along W."""
    w, words = axes(p)[2], 2 if p.dtype == torch.float64 else 1
    fits = _fits_last if p.layout == "channels_last" else _fits_nchw
    for width in (1, 2, 4, 8):
        if (width == 1 or width < 2 * w.cells) and fits(p, Walk(width, 1), words):
            yield width


def _fits_last(p: Problem, walk: Walk, words: int) -> bool:
    """Whether weights and window are few enough for registers."""
    _, h, w = axes(p)
    unrolled = (h.span + 1) * p.taps * walk.cells
    ring = (h.span + 2) * (walk.cells + w.span)
    if unrolled > MAX_UNROLLED or words * max(p.taps, ring) > 80:
        return False
    return _registers(p, walk) <= 168


def _fits_nchw(p: Problem, walk: Walk, words: int) -> bool:
    """Whether window and a row of outputs fit in 128 registers; several cells only as one vector (others spilled)."""
    _, h, w = axes(p)
    run = walk.cells * w.stride
    if walk.cells > 1 and run != _vector(run, p.dtype.itemsize):
        return False
    ring = (h.span + 2) * (walk.cells + w.span)
    if p.taps * walk.cells > MAX_UNROLLED or words * ring > 80 or words * run > 32 or words * (ring + 2 * run) > 96:
        return False
    return h.out * w.out < 2**31


def _vector(run: int, item: int) -> int:
    """Outputs of a run in one vector: the largest power of two that divides it, at most 16 bytes."""
    return math.gcd(run & -run, 16 // item)


# --- the model -------------------------------------------------------------------------------------------------------


def cost(p: Problem, walk: Walk, gpu: Gpu) -> Cost:
    """The model's time of a depthwise kernel."""
    return _cost_last(p, walk, gpu) if p.layout == "channels_last" else _cost_nchw(p, walk, gpu)


def _cost_nchw(p: Problem, walk: Walk, gpu: Gpu) -> Cost:
    """Fitted to 12 layers and dtypes on an H200, 8 strips and up to 3 widths each.

    It chooses what takes 1% longer than a layer's best; times are off by 6%.
    """
    _, h, w = axes(p)
    item, half = p.dtype.itemsize, p.dtype.itemsize == 2
    blocks = grid(p, walk)[2] // THREADS
    run, columns = walk.cells * w.stride, walk.cells + w.span
    vector = _vector(run, item)
    lines, units = run // vector, run // math.gcd(vector, p.out_size[-1])
    fmas = p.taps * walk.cells / h.stride  # of a row of outputs
    stores = 4 if units == 1 else 6 + 3 * lines + 10 * units
    row = fmas + p.taps / 4 / h.stride + run * (1 + 2 * half) + 6 + stores
    step = h.stride * row + columns * (7 + h.span)
    issues = walk.strip * step + h.span * columns * 5 + 60 + p.taps / 16
    warps, resident = blocks * THREADS / 32, min(5, threads_per_sm(gpu) // THREADS)
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
    # Blocks of many rows write at many places at once, which is slow in float32.
    far = (0.002 if half else 0.014) * walk.strip * p.bytes / gpu.bandwidth
    return Cost(_LAUNCH + body + far, bound, blocks, resident)


def _cost_last(p: Problem, walk: Walk, gpu: Gpu) -> Cost:
    _, h, w = axes(p)
    item, half, double = p.dtype.itemsize, p.dtype.itemsize == 2, p.dtype == torch.float64
    threads = grid(p, walk)[2]
    blocks = -(-threads // THREADS)
    warps = threads / 32
    resident = min(
        cells.resident(THREADS, _registers(p, walk)), threads_per_sm(gpu) // THREADS, 32
    )  # blocks per multiprocessor
    run, columns, steps = walk.cells * w.stride, walk.cells + w.span, min(walk.strip, h.cells)
    fmas = steps * p.taps * walk.cells
    loads = (steps + h.span) * columns
    issues = fmas + loads * (3 + half) + steps * h.stride * (run * 2 + run * half + 6) + p.taps * 2 + 60
    # Rows that two strips read, columns that two threads read: mostly from the first-level cache.
    read = math.prod(p.input_shape) * item * (steps + h.span) / steps * (1 + 0.5 * w.span / walk.cells)
    l2 = read + math.prod(p.output_shape) * item + warps * p.taps * 128 * 0.5
    clocks = gpu.multiprocessors * gpu.clock
    in_flight = min(blocks, gpu.multiprocessors * resident)
    busy = min(1.0, in_flight * THREADS / 32 / gpu.multiprocessors / 12)
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
    return Cost(_LAUNCH + (steps + 4) * 0.3e-6 + body * balance, bound, blocks, resident)
