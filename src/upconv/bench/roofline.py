"""The two ceilings of a roofline, measured: how fast a device copies and how fast it multiplies matrices.

A ceiling is the best of the repetitions, since it stands for what the device can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypedDict

import torch

from upconv.bench.timing import Clock, clock, precision_flags
from upconv.problem import PRECISIONS, Precision


class Ceilings(TypedDict):
    """Measured rates of a device."""

    copy_bytes_per_s: float
    """Bytes read plus bytes written by a copy between buffers that no cache holds."""
    matmul_flops_per_s: dict[Precision, float]
    """FLOP/s of a large square matrix product, per precision."""


def dtype_of(precision: Precision) -> torch.dtype:
    """The dtype that is multiplied in a precision."""
    return next(dtype for dtype, precisions in PRECISIONS.items() if precision in precisions)


def measure(precisions: Sequence[Precision], device: torch.device, seconds: float = 0.3) -> Ceilings:
    """Both ceilings; ``seconds`` is spent on each rate, after warm-up."""
    return Ceilings(
        copy_bytes_per_s=copy_rate(device, seconds),
        matmul_flops_per_s={precision: matmul_rate(precision, device, seconds) for precision in precisions},
    )


def copy_rate(device: torch.device, seconds: float) -> float:
    """Bytes per second of a copy, reads and writes both counted."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), clock(device, flush=False), seconds)


def matmul_rate(precision: Precision, device: torch.device, seconds: float) -> float:
    """FLOP/s of a square product of normal random matrices: the best of sizes doubled until one takes long.

    On a CPU a 1x1 convolution, since the library behind ``torch.mm`` may know the processor less well than oneDNN does
    (float32 on a Zen 5: 220 against 500 GFLOP/s). oneDNN has no float64.
    """
    least, largest = (3e-3, 16384) if device.type == "cuda" else (5e-2, 4096)
    take, n, best = clock(device, flush=False), 512, 0.0
    with precision_flags(precision):
        while True:
            a, b = (torch.randn(n, n, device=device).to(dtype_of(precision)) for _ in range(2))
            way: Callable[[], object] = partial(torch.mm, a, b, out=torch.empty_like(a))
            if device.type == "cpu" and precision != "fp64":
                image = a.reshape(1, n, 1, n).contiguous(memory_format=torch.channels_last)
                way = partial(torch.conv2d, image, b.reshape(n, n, 1, 1))
            taken = _best(way, take, 0.0)
            best = max(best, 2 * n**3 / taken)
            if taken >= least or n >= largest:
                return max(best, 2 * n**3 / _best(way, take, seconds))
            n *= 2


def _best(run: Callable[[], object], take: Clock, seconds: float) -> float:
    take(run)
    best, begin = take(run), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        best = min(best, take(run))
    return best
