"""What a call costs beside its kernel: the host's time per call of a tiny layer, and first calls on new input sizes."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import upconv
from upconv import planner
from upconv.bench import report
from upconv.bench.report import Report, Row
from upconv.bench.timing import Repeats, interleave, quartiles, unsteady
from upconv.bench.uncached import no_caches
from upconv.problem import PRECISIONS, Problem, dtype_name
from upconv.replay import native


def _engine(p: Problem, device: torch.device) -> str:
    if device.type == "cuda" and p.dtype is torch.float32:
        p = p.with_(precision="tf32")
    return planner.plan(p, planner.device_of(device)).engine("fwd")


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the host's time -------------------------------------------------------------------------------------------------

TINY = Problem.make(1, 16, 16, (8, 8), 4, 2, 1, bias=True)
CALLS = 50
"""Calls between two synchronisations: 200 launches, PyTorch's four a call; a GPU's queue holds 1024."""
HOST = Repeats(1.0, 20, 400)
_MODES = ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False))
"""The rows: dtype, and whether the call is for training."""


def host(device: torch.device, tell: Callable[..., object], repeats: Repeats = HOST) -> Report:
    """Host seconds per forward call of ``torch.nn.ConvTranspose2d`` and of ours on `TINY`, taken in turn.

    On a GPU the calls are only enqueued while the clock runs. On a CPU a call is the whole computation, of 65,536
    multiplications.
    """
    if device.type == "cuda":
        native.wait()  # a training run has it from its first half a minute on
    tell("measuring what a call costs the host")
    rows = (_host_row(device, dtype, training, repeats) for dtype, training in _MODES)
    return report.gather(rows, device, kind="host", layer=TINY.layer)


def _host_row(device: torch.device, dtype: torch.dtype, training: bool, repeats: Repeats) -> Row:
    p = TINY.with_(dtype=dtype, precision=PRECISIONS[dtype][0])
    torch.manual_seed(0)
    arguments: Any = (p.in_channels, p.out_channels, p.kernel, p.stride, p.padding)
    theirs = torch.nn.ConvTranspose2d(*arguments).to(device, dtype)
    ours = upconv.ConvTranspose2d(*arguments).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(p.input_shape, device=device, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=2e-2, atol=2e-2)

    def enqueued(layer: Callable[[], object]) -> float:
        """The host's seconds per call, of `CALLS` in a row."""
        synchronize(device)
        with nullcontext() if training else torch.no_grad():
            begin = time.perf_counter()
            for _ in range(CALLS):
                layer()
            end = time.perf_counter()
        synchronize(device)
        return (end - begin) / CALLS

    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # as timeit does: a collection is paid by whoever comes next
    try:
        taken = interleave({"ours": [lambda: ours(x)], "torch": [lambda: theirs(x)]}, enqueued, repeats)
    finally:
        if collecting:
            gc.enable()
    row: Row = {"dtype": dtype_name(dtype), "mode": "training" if training else "no_grad", "engine": _engine(p, device)}
    for side, seconds in taken.items():
        names = (f"{side}_lower_us", f"{side}_us", f"{side}_upper_us")
        row |= {name: 1e6 * value for name, value in zip(names, quartiles(seconds))}
    row |= {"added_us": row["ours_us"] - row["torch_us"], "calls": CALLS * len(taken["ours"])}
    return row | {"warning": unsteady(taken)}


# --- first calls -----------------------------------------------------------------------------------------------------

DECODER = Problem.make(4, 64, 32, (64, 64), 4, 2, 1, bias=True)
SIZES = (
    (64, 64), (72, 72), (80, 96), (96, 96), (100, 120), (113, 157), (128, 96), (128, 128), (160, 120), (192, 160),
)  # fmt: skip
AGAIN = 5


class First(NamedTuple):
    """Seconds of the first call and of the median one after it, and the kernels compiled in the first."""

    first: float
    again: float
    compiled: int | None


def shapes(device: torch.device, tell: Callable[..., object], sizes: tuple[tuple[int, int], ...] = SIZES) -> Report:
    """The first calls of `DECODER` on input sizes that it has not seen, one after the other.

    Each side runs in a fresh process with an empty kernel cache, after one call of another, 1-D layer that loads the
    libraries (cuDNN, NVRTC). On a GPU PyTorch's has a third run, with ``cudnn.benchmark`` on.
    """
    layer = str(DECODER).rsplit(" on ", 1)[0]
    return report.gather(_shape_rows(device, sizes, tell), device, kind="shapes", layer=layer)


def _shape_rows(device: torch.device, sizes: tuple[tuple[int, int], ...], tell: Callable[..., object]) -> Iterator[Row]:
    found: dict[str, list[First]] = {}
    for side in ("ours", "torch", *(("torch_benchmark",) if device.type == "cuda" else ())):
        tell(f"first calls of {side}")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found[side] = pool.submit(_first_calls, side, str(device), sizes, torch.get_num_threads()).result()
    for i, size in enumerate(sizes):
        p = DECODER.with_(size=size)
        row: Row = {"shape": "x".join(map(str, p.input_shape)), "engine": _engine(p, device)}
        row |= {f"{side}_ms": 1e3 * calls[i].first for side, calls in found.items()}
        row |= {f"{side}_again_ms": 1e3 * found[side][i].again for side in ("ours", "torch")}
        yield row | {"ours_compiled": found["ours"][i].compiled}


def _first_calls(side: str, where: str, sizes: tuple[tuple[int, int], ...], threads: int) -> list[First]:
    torch.set_num_threads(threads)
    device = torch.device(where)
    torch.backends.cudnn.benchmark = side == "torch_benchmark"
    package: Any = upconv if side == "ours" else torch.nn
    torch.manual_seed(0)
    p = DECODER
    layer = package.ConvTranspose2d(p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, device=device)
    other = package.ConvTranspose1d(8, 8, 3, device=device)

    def seconds(x: Tensor) -> float:
        synchronize(device)
        begin = time.perf_counter()
        layer(x)
        synchronize(device)
        return time.perf_counter() - begin

    found: list[First] = []
    with torch.no_grad(), no_caches() if side == "ours" else nullcontext():
        other(torch.randn(2, 8, 100, device=device))
        for size in sizes:
            x = torch.randn(p.batch, p.in_channels, *size, device=device)
            before, first = _compiled(device), seconds(x)
            after = _compiled(device)
            again = median(seconds(x) for _ in range(AGAIN))
            found.append(First(first, again, None if before is None or after is None else after - before))
    return found


def _compiled(device: torch.device) -> int | None:
    """Kernels in the cache, which was empty when this process began; none of a CPU's plans compiles any."""
    if device.type != "cuda":
        return None
    from upconv.cuda.compile import cache

    return cache.contents().entries
