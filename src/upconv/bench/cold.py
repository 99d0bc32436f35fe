"""Cold kernels: how long NVRTC takes for what a layer's first call waits for, and for what follows it in a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch

from upconv import planner
from upconv.bench import latency
from upconv.bench.latency import Latency, Value
from upconv.bench.suites import SUITES, Case
from upconv.cuda import jit
from upconv.problem import LAYOUTS, Layout, Pass, Precision

COMPILERS = 8
"""Threads that compile at once, on a GPU's host."""
_AGAIN = 1.2
"""Seconds from which on a kernel is compiled again with nothing beside it, as a first call does: eight at once take up
to 1.3 times as long each on a slow host, and one of 348 passes exceeds 1.5 s by chance."""
_PRECISIONS: dict[Precision, torch.dtype] = {"tf32": torch.float32, "bf16": torch.bfloat16}
_PASSES: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight")
"""In the order of the report's columns."""


def measure(
    device: torch.device, cases: Sequence[Case] | None = None, progress: Callable[[str], object] = lambda label: None
) -> Latency:
    """Seconds that NVRTC takes for the kernels of the suite's layers, none of them from a cache.

    A first call waits for a quick form where a kernel has one (`upconv.cuda.provisional`). Several are compiled at
    once, and those that take long once more, alone.

    Args:
        device: a CUDA device.
        cases: the layers; None for all.
        progress: hears of each kernel as it is compiled.

    Raises:
        ValueError: ``device`` is a CPU, for which nothing is compiled; RuntimeError: NVRTC is not there.
    """
    if device.type != "cuda":
        raise ValueError(f"--cold needs a CUDA device, for which kernels are compiled; got {device}")
    return of_kernels(planner.device_of(device), device, SUITES["cuda"] if cases is None else cases, progress)


def of_kernels(
    where: planner.Device, device: torch.device, cases: Sequence[Case], progress: Callable[[str], object]
) -> Latency:
    """`measure`, for the kernels of any GPU that a planner's device has."""
    reason = jit.unavailable()
    if reason is not None or where.gpu is None:
        raise RuntimeError(reason or f"{device} is no GPU that kernels are compiled for")
    arch = where.gpu.arch
    waits: dict[tuple[str, Precision, Layout], dict[Pass, list[str]]] = {}
    later: dict[tuple[str, Precision, Layout], list[str]] = {}
    labels: dict[str, str] = {}
    for case, (precision, dtype), layout in product(cases, _PRECISIONS.items(), LAYOUTS):
        if case.problem.rank == 1 and layout != "nchw":
            continue
        plan = planner.plan(case.problem.with_(dtype=dtype, precision=precision, layout=layout), where)
        row = case.name, precision, layout
        waits[row], later[row] = {}, []
        for pass_, choice in plan.choices("step").items():
            packing = getattr(choice, "packing_sources", ())  # in training, by the kernel itself
            for unit in (*choice.sources(), *packing):
                quick = getattr(unit, "quick", None)
                first = (quick() if quick is not None else None) or unit
                waits[row].setdefault(pass_, []).append(first.source)
                later[row] += [] if first is unit else [unit.source]
                labels.update({each.source: each.label for each in (first, unit)})

    def seconds(source: str) -> float:
        progress(labels[source])
        begin = time.perf_counter()
        jit.built(source, arch, labels[source])
        return time.perf_counter() - begin

    with ThreadPoolExecutor(COMPILERS) as pool:
        took = dict(zip(labels, pool.map(seconds, labels)))
    awaited = {source for of in waits.values() for sources in of.values() for source in sources}
    took.update({source: seconds(source) for source in sorted(awaited) if took[source] > _AGAIN})
    rows: list[dict[str, Value]] = []
    for row, of in waits.items():
        longest = [max((took[source] for source in of.get(pass_, [])), default=None) for pass_ in _PASSES]
        behind = max((took[source] for source in later[row]), default=None)
        rows.append(dict(zip(latency.COLD_KEYS, (*row, *longest, behind))))
    return latency._report("cold", device, f"kernels of {len(cases)} layers", rows)
