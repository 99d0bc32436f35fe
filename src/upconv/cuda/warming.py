"""Compiling and loading the kernels of calls that were noted, before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import torch

from upconv.cuda import engine
from upconv.cuda.launches import Unit
from upconv.planner import Plan
from upconv.problem import Pass


def load(
    wanted: Sequence[engine.Wanted],
    progress: Callable[[str, int, int], object] | None = None,
) -> list[str]:
    """Compiles, in threads, and loads the kernels of some plans on their devices.

    ``progress(label, done, total)`` is called behind each source. Returns a line for each source, compiled or found in
    the cache. Errors: RuntimeError naming problem and plan.
    """
    if not wanted:  # a CPU's calls do without what compiles
        return []
    sources: dict[tuple[Unit, str], tuple[Plan, int, Pass | None]] = {}
    for unit, arch, plan, index, pass_ in _missing(wanted):
        sources.setdefault((unit, arch), (plan, index, pass_))
    lines: list[str] = []

    def done(unit: Unit, arch: str, job: Future[bytes]) -> None:
        try:
            job.result()
        except RuntimeError as error:
            plan, index, pass_ = sources[unit, arch]
            raise engine.failure(plan, index, error, pass_) from error
        lines.append(f"{unit.label} for sm_{arch}")
        if progress is not None:
            progress(unit.label, len(lines), len(sources))

    compile_all(sources, done)
    for each in wanted:
        runners = map(engine.loaded(each.plan, each.device).__getitem__, each.passes)
        prepared = [runner.prepared for runner in runners if runner is not None]
        if each.sums is not None:
            prepared.append(engine.loaded(each.sums, each.device)["bias"])
        with torch.cuda.device(each.device):
            for one in filter(None, prepared):
                one.load()  # what it leaves to its first use
    return sorted(lines)


def _missing(wanted: Sequence[engine.Wanted]) -> Iterator[tuple[Unit, str, Plan, int, Pass | None]]:
    """Sources that are not loaded, the architecture, and of which plan, device and pass; None: the bias' gradient."""
    for plan, index, pass_ in dict.fromkeys((each.plan, each.device, name) for each in wanted for name in each.passes):
        choice = plan.selection(pass_).choice
        if choice is not None and not engine.is_loaded(plan, index, pass_):
            assert plan.device.gpu is not None
            yield from ((unit, plan.device.gpu.arch, plan, index, pass_) for unit in choice.sources())
    for sums, index in dict.fromkeys((each.sums, each.device) for each in wanted):
        of_bias = None if sums is None else engine.loaded(sums, index)["bias"]
        if sums is not None and of_bias is not None and not of_bias.loaded:
            assert sums.device.gpu is not None
            yield from ((unit, sums.device.gpu.arch, sums, index, None) for unit in of_bias.choice.sources())


def compile_all(
    sources: Iterable[tuple[Unit, str]], done: Callable[[Unit, str, Future[bytes]], object] = lambda *each: None
) -> None:
    """Brings kernels into the cache, many at once: each source for its architecture.

    ``done`` is called behind each; what it raises ends the rest. What cannot be compiled fails where it is needed.
    """
    from upconv.cuda.compile import jit

    with ThreadPoolExecutor(16) as pool:
        jobs = {
            pool.submit(jit.cubin, one.source, arch, one.label): (one, arch) for one, arch in dict.fromkeys(sources)
        }
        try:
            for job in as_completed(jobs):
                done(*jobs[job], job)
        except BaseException:  # KeyboardInterrupt too: else it compiles the rest first
            pool.shutdown(cancel_futures=True)
            raise
