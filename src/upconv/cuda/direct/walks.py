"""Walks, the depthwise forwards of ``direct_walk.cu`` in NCHW: a thread's work and its cost."""

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
    return {**cells.constants(p), **cells.window(p), "threads": THREADS, "cells": walk.cells, "min_blocks": 4}


def packed_words(p: Problem) -> int:
    """Elements of the packed weights."""
    return p.groups * p.taps


def grid(p: Problem, walk: Walk) -> tuple[int, int, int]:
    """Runs along W, strips along H, threads in all with those that make whole blocks of a channel's."""
    _, h, w = axes(p)
    runs, strips = -(-w.cells // walk.cells), -(-h.cells // walk.strip)
    return runs, strips, p.batch * p.groups * (-(-(runs * strips) // THREADS) * THREADS)


# --- which are worth a try -------------------------------------------------------------------------------------------


def walks(p: Problem) -> Iterator[Walk]:
    """Every configuration of the depthwise kernels that is worth a try for a problem; none for other layers."""
    _, h, _ = axes(p)
    if p.layout != "nchw" or p.rank > 2 or p.in_channels != p.groups or p.out_channels != p.groups or h.stride > 16:
        return
    if not all(axis.countable for axis in axes(p)):
        return
    for width in _widths(p):
        for strip in (1, 2, 3, 4, 6, 8, 12, 16, 32):
            if strip > 1 and strip >= 2 * h.cells:
                continue
            walk = Walk(width, strip)
            if grid(p, walk)[2] < 2**31:
                yield walk


def _widths(p: Problem) -> Iterator[int]:
    """Their cells along W."""
    w, words = axes(p)[2], 2 if p.dtype == torch.float64 else 1
    for width in (1, 2, 4, 8):
        if (width == 1 or width < 2 * w.cells) and _fits(p, Walk(width, 1), words):
            yield width


def _fits(p: Problem, walk: Walk, words: int) -> bool:
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
    """The model's time of a depthwise kernel.

    Fitted to 12 layers and dtypes on an H200, 8 strips and up to 3 widths each.

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
    return Cost(cells.LAUNCH + body + far, bound, blocks, resident)
