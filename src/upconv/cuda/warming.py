"""Compiling and loading the kernels of calls that were noted, before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from upconv.cuda import engine
from upconv.planner import Plan
from upconv.problem import Pass


def compile_all(
    wanted: Sequence[engine.Wanted],
    progress: Callable[[str, int, int], object] | None = None,
) -> list[str]:
    """Compiles, in threads, and loads the kernels of some plans on their devices.

    ``progress(label, done, total)`` is called behind each source. Returns a line for each source, compiled or found in
    the cache. Errors: RuntimeError naming problem and plan.
    """
    if not wanted:
        return []
    from upconv.cuda.compile import jit  # which a CPU's calls do without

    units: dict[tuple[str, str], tuple[str, Plan, int, Pass]] = {}
    asked = ((each.plan, each.device, pass_) for each in wanted for pass_ in each.passes)
    for plan, index, pass_ in dict.fromkeys(asked):
        choice = plan.selection(pass_).choice
        if choice is None or engine.is_loaded(plan, index, pass_):
            continue
        assert plan.device.gpu is not None
        for unit in choice.sources():
            units.setdefault((unit.source, plan.device.gpu.arch), (unit.label, plan, index, pass_))
    lines = []
    with ThreadPoolExecutor() as pool:
        jobs = {pool.submit(jit.cubin, *key, label): key for key, (label, *_) in units.items()}
        for done, job in enumerate(as_completed(jobs), 1):
            label, plan, index, pass_ = units[jobs[job]]
            try:
                job.result()
            except RuntimeError as error:
                pool.shutdown(cancel_futures=True)
                raise engine.failure(plan, index, error, pass_) from error
            lines.append(f"{label} for sm_{jobs[job][1]}")
            if progress is not None:
                progress(label, done, len(jobs))
    for each in wanted:
        of = engine.loaded(each.plan, each.device)
        for runner in map(of.__getitem__, each.passes):
            if runner is not None:
                with torch.cuda.device(each.device):
                    runner.prepared.load()  # what it leaves to its first use
        if each.sums is not None:
            _ = engine.loaded(each.sums, each.device)["bias"]
    return sorted(lines)
