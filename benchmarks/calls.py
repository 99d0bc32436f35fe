"""What calls cost beside their kernels.

python benchmarks/calls.py host --json host.json        the host's time per call of a tiny layer
python benchmarks/calls.py shapes --json shapes.json    first calls on input sizes that a process has not seen
python benchmarks/calls.py cold --json cold.json        NVRTC's time for the kernels of suite "cuda"
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import upconv
from upconv import planner
from upconv.bench import report, run
from upconv.bench.report import Row
from upconv.bench.suites import SUITES
from upconv.bench.timing import Repeats, interleave
from upconv.cuda.compile import cache, jit, nvrtc
from upconv.problem import LAYOUTS, Pass, Problem, dtype_name
from upconv.replay import native


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the host's time -------------------------------------------------------------------------------------------------

TINY = Problem.make(1, 16, 16, (8, 8), 4, 2, 1, bias=True)
CALLS = 50
"""Calls between two synchronisations: 200 launches, PyTorch's four a call; a GPU's queue holds 1024."""
HOST = Repeats(1.0, 20, 400)


def host(device: torch.device, repeats: Repeats = HOST) -> Iterator[Row]:
    """The host's time per forward of PyTorch's layer and of ours. On a GPU calls are only enqueued meanwhile."""
    if device.type == "cuda":
        native.wait()  # a training run has it from its first half a minute on
    for dtype, training in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        torch.manual_seed(0)
        theirs = torch.nn.ConvTranspose2d(16, 16, 4, 2, 1).to(device, dtype)
        ours = upconv.ConvTranspose2d(16, 16, 4, 2, 1).to(device, dtype)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(TINY.input_shape, device=device, dtype=dtype)
        torch.testing.assert_close(ours(x), theirs(x), rtol=2e-2, atol=2e-2)

        def enqueued(layer: Callable[[], object], training: bool = training) -> float:
            """The host's seconds per call, of `CALLS` in a row."""
            synchronize(device)
            with nullcontext() if training else torch.no_grad():
                begin = time.perf_counter()
                for _ in range(CALLS):
                    layer()
                end = time.perf_counter()
            synchronize(device)
            return (end - begin) / CALLS

        gc.collect()
        gc.disable()  # as timeit does: a collection is paid by whoever comes next
        runs = {"ours": [lambda ours=ours, x=x: ours(x)], "torch": [lambda theirs=theirs, x=x: theirs(x)]}
        taken = interleave(runs, enqueued, repeats)
        gc.enable()
        row: Row = {"dtype": dtype_name(dtype), "mode": "training" if training else "no_grad"}
        yield row | {f"{side}_us": 1e6 * median(seconds) for side, seconds in taken.items()}


# --- first calls -----------------------------------------------------------------------------------------------------

DECODER = Problem.make(4, 64, 32, (64, 64), 4, 2, 1, bias=True)
SIZES = (
    (64, 64), (72, 72), (80, 96), (96, 96), (100, 120), (113, 157), (128, 96), (128, 128), (160, 120), (192, 160),
)  # fmt: skip
AGAIN = 5


@contextmanager
def no_caches() -> Iterator[None]:
    """An empty cache of kernels, in a folder that goes with it, and none of NVRTC's own.

    CUDA 13's answers code that was compiled before, in this process or another, within 0.05 s. Neither another text nor
    ``CUDA_CACHE_DISABLE`` helps; an option does (docs/experiments.md), which older versions do not know.
    """
    flags = nvrtc.FLAGS
    with tempfile.TemporaryDirectory(prefix="upconv-cold-") as folder:
        os.environ |= {"UPCONV_CACHE_DIR": folder, "UPCONV_CACHE": "on"}
        if nvrtc.unavailable() is None:
            nvrtc.FLAGS = (*flags, "--no-cache")
            try:
                jit.built("", "80")
            except nvrtc.CompileError:
                nvrtc.FLAGS = flags
        yield


def shapes(device: torch.device, sizes: tuple[tuple[int, int], ...] = SIZES) -> Iterator[Row]:
    """The first calls of `DECODER` on input sizes, one after the other.

    Each side runs in a fresh process with an empty kernel cache, after one call of another, 1-D layer that loads the
    libraries (cuDNN, NVRTC). On a GPU PyTorch's has a third run, with ``cudnn.benchmark`` on.
    """
    found: dict[str, list[Row]] = {}
    for side in ("ours", "torch", *(("torch_benchmark",) if device.type == "cuda" else ())):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found[side] = pool.submit(_first_calls, side, str(device), sizes).result()
    for i, size in enumerate(sizes):
        row: Row = {"shape": "x".join(map(str, DECODER.with_(size=size).input_shape))}
        yield row | {f"{side}{key}": value for side, calls in found.items() for key, value in calls[i].items()}


def _first_calls(side: str, where: str, sizes: tuple[tuple[int, int], ...]) -> list[Row]:
    device, p = torch.device(where), DECODER
    torch.backends.cudnn.benchmark = side == "torch_benchmark"
    package: Any = upconv if side == "ours" else torch.nn
    layer = package.ConvTranspose2d(p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, device=device)
    other = package.ConvTranspose1d(8, 8, 3, device=device)

    def milliseconds(x: Tensor) -> float:
        synchronize(device)
        begin = time.perf_counter()
        layer(x)
        synchronize(device)
        return 1e3 * (time.perf_counter() - begin)

    found: list[Row] = []
    with torch.no_grad(), no_caches() if side == "ours" else nullcontext():
        other(torch.randn(2, 8, 100, device=device))
        for size in sizes:
            x = torch.randn(p.batch, p.in_channels, *size, device=device)
            before, first = cache.contents().entries, milliseconds(x)
            compiled = cache.contents().entries - before
            again = median(milliseconds(x) for _ in range(AGAIN))
            found.append({"_ms": first, "_again_ms": again, "_compiled": compiled})
    return found


# --- NVRTC's time ----------------------------------------------------------------------------------------------------

COMPILERS = 8
"""Threads that compile at once, which takes each kernel a little longer than alone."""
_COLUMNS: dict[Pass, str] = {"fwd": "fwd_s", "grad-input": "grad_input_s", "grad-weight": "grad_weight_s"}


def cold(device: torch.device) -> Iterator[Row]:
    """Seconds of the longest compilation that a first call waits for, by pass; none of them from a cache."""
    where = planner.device_of(device)
    if (reason := nvrtc.unavailable()) is not None or where.gpu is None:
        raise RuntimeError(reason or f"{device} is no GPU that kernels are compiled for")
    arch = where.gpu.arch
    ways = run.ways(torch.device("cuda"), (), ("tf32", "bf16"), LAYOUTS)
    plans = [
        (job, {pass_: choice.sources() for pass_, choice in planner.plan(job.problem, where).choices("step").items()})
        for job in run.jobs("cuda", SUITES["cuda"], ways)
    ]
    every = list(dict.fromkeys(unit for _, of in plans for units in of.values() for unit in units))

    def seconds(unit: Any) -> float:
        begin = time.perf_counter()
        jit.cubin(unit.source, arch, unit.label)
        return time.perf_counter() - begin

    with no_caches(), ThreadPoolExecutor(COMPILERS) as pool:
        took = dict(zip(every, pool.map(seconds, every)))
    for job, of in plans:
        row: Row = {"case": job.case, "precision": job.problem.precision, "layout": job.problem.layout}
        yield row | {name: max((took[u] for u in of.get(pass_, [])), default=None) for pass_, name in _COLUMNS.items()}


KINDS = {"host": host, "shapes": shapes, "cold": cold}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--json", type=Path, required=True, help="where to write the report")
    given = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = report.gather(KINDS[given.kind](device), device, given.kind)
    report.save(found, given.json)
    for row in found["rows"]:
        print(*(f"{value:.3g}" if isinstance(value, float) else value for value in row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
