"""Cold kernels: how long NVRTC takes for what a layer's first call waits for.

    python benchmarks/cold.py --json benchmarks/results/h200-cold.json

And how long kernels take that another process has compiled, to be read from disk and loaded. Several kernels are
compiled at once, which takes each of them a little longer than alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import torch

from upconv import planner
from upconv.bench import files, report, run
from upconv.bench.progress import Progress
from upconv.bench.report import Report
from upconv.bench.suites import SUITES, Case, choose
from upconv.bench.uncached import no_caches, with_flags
from upconv.cuda.compile import jit, nvrtc
from upconv.cuda.launches import Unit
from upconv.problem import LAYOUTS, Layout, Pass, Precision

COMPILERS = 8
"""Threads that compile at once, on a GPU's host."""
_PRECISIONS: tuple[Precision, ...] = ("tf32", "bf16")
_COLUMNS: dict[Pass, str] = {"fwd": "fwd_s", "grad-input": "grad_input_s", "grad-weight": "grad_weight_s"}

Row = tuple[str, Precision, Layout]
Rows = dict[Row, dict[Pass, list[Unit]]]


def measure(
    where: planner.Device, device: torch.device, cases: Sequence[Case], tell: Callable[[str], object]
) -> Report:
    """NVRTC's seconds for the kernels of layers, none of them from a cache; milliseconds to load them from disk.

    Args:
        where: the GPU that kernels are compiled for.
        device: where they are loaded, if it is a CUDA device.
        cases: the layers.
        tell: hears of each kernel as it is compiled.

    Raises:
        RuntimeError: NVRTC is not there.
    """
    reason = nvrtc.unavailable()
    if reason is not None or where.gpu is None:
        raise RuntimeError(reason or f"{device} is no GPU that kernels are compiled for")
    rows = _rows(where, where.gpu.arch, device, cases, tell)
    return report.gather(rows, device, kind="cold", layer=f"kernels of {len(cases)} layers")


def _rows(
    where: planner.Device, arch: str, device: torch.device, cases: Sequence[Case], tell: Callable[[str], object]
) -> Iterator[report.Row]:
    rows = _units(where, cases)
    every = list(dict.fromkeys(unit for of in rows.values() for units in of.values() for unit in units))

    def seconds(unit: Unit) -> float:
        tell(unit.label)
        begin = time.perf_counter()
        jit.cubin(unit.source, arch, unit.label)
        return time.perf_counter() - begin

    with no_caches():
        with ThreadPoolExecutor(COMPILERS) as pool:
            took = dict(zip(every, pool.map(seconds, every)))
        loaded: dict[Unit, float] = {}
        if device.type == "cuda":
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                loaded = dict(zip(every, process.submit(_loads, every, arch, str(device), nvrtc.FLAGS).result()))
    for (case, precision, layout), of in rows.items():
        units = [unit for units in of.values() for unit in units]
        row: report.Row = {"case": case, "precision": precision, "layout": layout}
        row |= {name: max((took[u] for u in of.get(pass_, [])), default=None) for pass_, name in _COLUMNS.items()}
        yield row | {"cached_ms": max((1e3 * loaded[unit] for unit in units if unit in loaded), default=None)}


def _units(where: planner.Device, cases: Sequence[Case]) -> Rows:
    """For each row the sources that the first call of each pass waits for."""
    found: Rows = {}
    ways = run.ways(torch.device("cuda"), (), _PRECISIONS, LAYOUTS)
    for job in run.jobs("cuda", cases, ways, small=False, bias=None):
        # In training weights are packed by the kernel itself, where one does.
        choices = planner.plan(job.problem, where).choices("step").items()
        units = {pass_: choice.sources() for pass_, choice in choices}
        found[job.case, job.problem.precision, job.problem.layout] = units
    return found


def _loads(units: Sequence[Unit], arch: str, device: str, flags: tuple[str, ...]) -> list[float]:
    """Seconds from a source to a loaded kernel that another process compiled, one by one."""
    torch.zeros(1, device=device)  # the driver's context
    with_flags(flags)

    def load(unit: Unit) -> float:
        jit.forget()
        begin = time.perf_counter()
        jit.kernel(unit.source, unit.entries[-1], arch, unit.label)
        return time.perf_counter() - begin

    load(units[0])  # libraries that a process loads once
    return [load(unit) for unit in units]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where to write the report")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=[], help='of suite "cuda", only these')
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here")
    device = torch.device("cuda", 0)
    with Progress() as tell:
        found = measure(planner.device_of(device), device, choose(SUITES["cuda"], options.cases), tell)
    files.save(found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
