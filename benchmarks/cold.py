"""Cold kernels: how long NVRTC takes for what a layer's first call waits for.

And how long kernels take that another process has compiled, to be read from disk and loaded.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product

import torch

from upconv import planner
from upconv.bench import report
from upconv.bench.report import KEYS, Report
from upconv.bench.suites import SUITES, Case
from upconv.bench.uncached import no_caches, with_flags
from upconv.cuda.compile import jit, nvrtc
from upconv.cuda.launches import Unit
from upconv.problem import LAYOUTS, Layout, Pass, Precision

COMPILERS = 8
"""Threads that compile at once, on a GPU's host."""
_AGAIN = 1.2
"""Seconds from which on a kernel is compiled again with nothing beside it, as a first call does: eight at once take up
to 1.3 times as long each on a slow host, and one of 348 passes exceeds 1.5 s by chance."""
_PRECISIONS: dict[Precision, torch.dtype] = {"tf32": torch.float32, "bf16": torch.bfloat16}
_PASSES: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight")
"""In the order of the report's columns."""
_CACHED = 0.1  # of the time beside others, below which a kernel alone was not compiled

Row = tuple[str, Precision, Layout]


def measure(
    device: torch.device, cases: Sequence[Case] | None = None, progress: Callable[[str], object] = lambda label: None
) -> Report:
    """Seconds that NVRTC takes for the kernels of the suite's layers, none of them from a cache; milliseconds to load.

    Several are compiled at once, and those that take long once more, alone. Another process then loads them from disk,
    one by one.

    Args:
        device: a CUDA device.
        cases: the layers; None for all.
        progress: hears of each kernel as it is compiled.

    Raises:
        ValueError: ``device`` is a CPU, for which nothing is compiled; RuntimeError: NVRTC is not there, or answers
            from a cache of its own.
    """
    if device.type != "cuda":
        raise ValueError(f"cold kernels need a CUDA device, for which kernels are compiled; got {device}")
    return of_kernels(planner.device_of(device), device, SUITES["cuda"] if cases is None else cases, progress)


def of_kernels(
    where: planner.Device, device: torch.device, cases: Sequence[Case], progress: Callable[[str], object]
) -> Report:
    """`measure`, for the kernels of any GPU that a planner's device has; they are loaded on a CUDA ``device`` alone."""
    reason = nvrtc.unavailable()
    if reason is not None or where.gpu is None:
        raise RuntimeError(reason or f"{device} is no GPU that kernels are compiled for")
    rows = _rows(where, where.gpu.arch, device, cases, progress)
    return report.gather(rows, device, kind="cold", layer=f"kernels of {len(cases)} layers")


def _rows(
    where: planner.Device, arch: str, device: torch.device, cases: Sequence[Case], progress: Callable[[str], object]
) -> Iterator[report.Row]:
    rows = _units(where, cases)
    units = list(dict.fromkeys(unit for of in rows.values() for units in of.values() for unit in units))
    with no_caches():
        texts, took = _compiled(units, arch, progress)
        loaded: dict[Unit, float] = {}
        if device.type == "cuda":
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as process:
                given = [(texts[unit], unit.entries[-1], unit.label) for unit in units]
                loaded = dict(zip(units, process.submit(_loads, given, arch, str(device), nvrtc.FLAGS).result()))
    for row, of in rows.items():
        longest = [max((took[unit] for unit in of.get(pass_, [])), default=None) for pass_ in _PASSES]
        every = (unit for units in of.values() for unit in units)
        from_disk = max((1e3 * loaded[unit] for unit in every if unit in loaded), default=None)
        yield dict(zip(KEYS["cold"], (*row, *longest, from_disk)))


def _units(where: planner.Device, cases: Sequence[Case]) -> dict[Row, dict[Pass, list[Unit]]]:
    """For each row the sources that the first call of each pass waits for."""
    found: dict[Row, dict[Pass, list[Unit]]] = {}
    for case, (precision, dtype), layout in product(cases, _PRECISIONS.items(), LAYOUTS):
        if case.problem.rank == 1 and layout != "nchw":
            continue
        plan = planner.plan(case.problem.with_(dtype=dtype, precision=precision, layout=layout), where)
        # In training weights are packed by the kernel itself, where one does.
        choices = plan.choices("step").items()
        units = {pass_: [*choice.sources(), *choice.packing_sources] for pass_, choice in choices}
        found[case.name, precision, layout] = units
    return found


def _compiled(
    every: Sequence[Unit], arch: str, progress: Callable[[str], object]
) -> tuple[dict[Unit, str], dict[Unit, float]]:
    """The text that was compiled of each source, and NVRTC's seconds for it: all at once, the long ones again alone."""
    texts = {unit: unit.source for unit in every}

    def seconds(unit: Unit) -> float:
        progress(unit.label)
        begin = time.perf_counter()
        jit.cubin(texts[unit], arch, unit.label)
        return time.perf_counter() - begin

    with ThreadPoolExecutor(COMPILERS) as pool:
        try:
            took = dict(zip(every, pool.map(seconds, every)))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # else it compiles the rest first
            raise
    for unit in every:
        if took[unit] > _AGAIN:
            texts[unit], before = _again(unit.source), took[unit]
            took[unit] = seconds(unit)
            if took[unit] < _CACHED * before:
                raise RuntimeError(f"NVRTC took {took[unit]:.2f} s for what took it {before:.2f} s: from a cache")
    return texts, took


def _again(source: str) -> str:
    """The same kernels in a text that our own caches do not know."""
    return f"{source}// again\n"


def _loads(kernels: Sequence[tuple[str, str, str]], arch: str, device: str, flags: tuple[str, ...]) -> list[float]:
    """Seconds from a source, an entry and a label to a loaded kernel that another process compiled, one by one."""
    torch.zeros(1, device=device)  # the driver's context
    with_flags(flags)
    first = kernels[0]
    jit.kernel(first[0], first[1], arch, first[2])  # libraries that a process loads once
    found = []
    for source, entry, label in kernels:
        jit.forget()
        begin = time.perf_counter()
        jit.kernel(source, entry, arch, label)
        found.append(time.perf_counter() - begin)
    return found
