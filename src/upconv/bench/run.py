"""A run of the bench: suites and ways to run them make jobs, and each job, checked and timed, a row of the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import torch

from upconv import planner
from upconv.bench import check, memory, roofline, timing
from upconv.bench.report import KEYS, LAYERS, Row
from upconv.bench.roofline import Ceilings
from upconv.bench.suites import Case, quick
from upconv.bench.timing import Inputs, Quartiles, Repeats, Side
from upconv.planner import Plan
from upconv.problem import LAYOUTS, PASSES, PRECISIONS, Layout, Pass, Precision, Problem, dtype_name

Key = tuple[object, ...]


class Way(NamedTuple):
    """How a layer is run."""

    dtype: torch.dtype
    precision: Precision
    layout: Layout = "nchw"
    pass_: Pass = "fwd"


@dataclass(frozen=True)
class Job:
    """One row to be: a case of a suite in one way."""

    suite: str
    case: str
    problem: Problem
    scale: float = 1.0

    @property
    def key(self) -> Key:
        """The `key` of the job's row."""
        p = self.problem
        return self.suite, self.case, p.layer, p.pass_, dtype_name(p.dtype), p.precision, p.layout


def key(found: Row) -> Key:
    """What a row measures: two rows with the same key can stand for each other."""
    return tuple(found[name] for name in ("suite", "case", "layer", "pass", "dtype", "precision", "layout"))


@dataclass(frozen=True)
class How:
    """How rows are measured."""

    repeats: Repeats
    peaks: bool = False
    """Also peak memory."""
    inputs: Inputs = "normal"
    """See `timing.operands`."""
    frozen: bool = False
    """Also forwards with `upconv.freeze`."""
    seed: int = 0


class DeviceLost(RuntimeError):
    """A CUDA device that this process cannot use any more."""


# --- jobs ------------------------------------------------------------------------------------------------------------


def ways(
    device: torch.device,
    dtypes: Sequence[torch.dtype] = (),
    precisions: Sequence[Precision] = (),
    layouts: Sequence[Layout] = ("nchw",),
    passes: Sequence[Pass] = ("fwd",),
) -> list[Way]:
    """Every combination that exists.

    Without dtypes it takes those of the precisions asked for, or float32. A dtype that none of these precisions fits
    takes its default: its own, and for float32 TF32 on CUDA, as PyTorch does.

    Raises:
        ValueError: a precision that no dtype asked for has, or TF32 on a CPU.
    """
    if "tf32" in precisions and device.type == "cpu":
        raise ValueError("--precision must be one of ieee, bf16, fp16 and fp64 on a CPU; got 'tf32'")
    if not dtypes:
        dtypes = [d for d in PRECISIONS if set(PRECISIONS[d]) & set(precisions)] or [torch.float32]
    for precision in precisions:
        fitting = [p for dtype in dtypes for p in PRECISIONS[dtype]]
        if precision not in fitting:
            names = ", ".join(dtype_name(dtype) for dtype in dtypes)
            raise ValueError(f"--precision must be one of {', '.join(fitting)} for {names}; got {precision!r}")

    def chosen(dtype: torch.dtype) -> list[Precision]:
        default: Precision = "tf32" if dtype is torch.float32 and device.type == "cuda" else PRECISIONS[dtype][0]
        return [p for p in PRECISIONS[dtype] if p in precisions] or [default]

    every = product(dtypes, layouts or LAYOUTS[:1], passes or PASSES[:1])
    return [Way(dtype, kind, layout, pass_) for dtype, layout, pass_ in every for kind in chosen(dtype)]


_WHOLE = ("cpu", "custom")
"""Suites that are never scaled down: the CPU's is small, and a layer from the command line has the size asked for."""


def jobs(suite: str, cases: Iterable[Case], todo: Iterable[Way], *, small: bool, bias: bool | None) -> list[Job]:
    """The rows of a run in the report's order. 1-D cases have no channels_last, so they have no such rows.

    Args:
        suite: the suite's name.
        cases: its cases.
        todo: the ways.
        small: scale large cases down, see `suites.quick`; not those of `cpu` and `custom`.
        bias: with or without bias; None for what the suite says.
    """
    found = []
    for way, (name, given) in product(todo, cases):
        if given.rank == 1 and way.layout == "channels_last":
            continue
        whole = given.with_(**way._asdict(), bias=given.bias if bias is None else bias)
        problem = quick(whole) if small and suite not in _WHOLE else whole
        found.append(Job(suite, name, problem, problem.macs / whole.macs))
    return found


# --- a row -----------------------------------------------------------------------------------------------------------


def plan_text(plan: Plan, pass_: Pass) -> str:
    """The plan of a pass in a word; of a step, the plan of each half, on a GPU of each of the three passes."""
    if plan.backward == planner.FAMILIES:
        if pass_ != "step":
            return plan.selection(pass_).name
        parts: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight")
        return " ".join(f"{'forward' if part == 'fwd' else part}={plan.selection(part).name}" for part in parts)
    if pass_ == "step":
        return f"forward={plan.forward} backward={plan.backward}"
    if pass_ == "fwd":
        return plan.forward
    return "native" if plan.engine(pass_) == "torch" else plan.backward


def row(job: Job, device: torch.device, how: How) -> Row:
    """Checks and times one job.

    Every side runs the timed shape and is compared with the reference; only right results are timed. Where the plan is
    PyTorch's own operator there is one implementation: its time stands for all, the ratio is 1 and the engine
    ``torch``. The roof is left to `set_roof`.
    """
    begin = time.perf_counter()
    found = blank(job, device, how.inputs)
    p = job.problem
    asked: tuple[Side, ...] = ("ours", "frozen", "torch") if how.frozen and p.pass_ == "fwd" else ("ours", "torch")
    try:
        with timing.precision_flags(p.precision):
            _check(found, p, device, how, frozen="frozen" in asked)
            if found["failure"] is None:
                run = ("torch",) if found["engine"] == "torch" else asked
                seconds, found["rounds"] = timing.sides(p, device, run, how.repeats, how.seed, how.inputs)
                _set_times(found, {side: seconds.get(side, seconds["torch"]) for side in asked}, seconds)
                for side in ("ours", "torch") if how.peaks else ():
                    found[f"{side}_peak_bytes"] = memory.peak_bytes(p, side, device)
    except Exception as error:  # one case that cannot run (out of memory, say) does not cost the others
        fail(found, f"{type(error).__name__}: {error}".splitlines()[0])
    found["wall_s"] = time.perf_counter() - begin
    return found


_TIMES = tuple(f"{side}{which}_ms" for side in ("ours", "torch", "frozen") for which in ("", "_lower", "_upper"))


def fail(found: Row, reason: str) -> None:
    """Makes a row one that has no speed, and says why."""
    found |= {**dict.fromkeys((*_TIMES, "ratio", "frozen_ratio", "warning")), "failure": reason}


def blank(job: Job, device: torch.device, inputs: Inputs = "normal") -> Row:
    """The row of a job with nothing measured yet."""
    p = job.problem
    plan = planner.plan(p, planner.device_of(device))
    named = ("suite", "case", "layer", "pass", "dtype", "precision", "layout")
    return dict.fromkeys(KEYS[LAYERS]) | dict(zip(named, job.key)) | {
        "roof_ms": 0.0, "engine": plan.engine(p.pass_), "plan": plan_text(plan, p.pass_), "scale": job.scale,
        "flops": p.flops, "bytes": p.bytes, "rounds": 0, "inputs": inputs, "wall_s": 0.0,
    }  # fmt: skip


def _check(found: Row, p: Problem, device: torch.device, how: How, frozen: bool) -> None:
    given = timing.operands(p, device, how.seed, how.inputs)
    known = check.truths(p, given)
    ours, theirs = timing.work("ours", p, given)(), timing.work("torch", p, given)()
    error, torch_error, right = check.errors(p, known, ours, theirs)
    kind = "wrong result"
    if right and frozen:
        kept = timing.work("frozen", p, given)
        kept()  # packs; the calls after it use what it keeps
        frozen_error, _, right = check.errors(p, known, kept(), theirs)
        error, kind = max(error, frozen_error), "wrong result with frozen weights"
        del kept
    found["rel_error"] = error if math.isfinite(error) else None
    found["torch_rel_error"] = torch_error if math.isfinite(torch_error) else None
    if not right:
        found["failure"] = f"{kind}: relative error {error:.1e}, PyTorch's {torch_error:.1e}"
    elif device.type == "cuda" and p.pass_ == "fwd" and found["engine"] != "torch":
        del known, ours, theirs
        given = timing.operands(p, device, how.seed, "rand")
        pair = [timing.work(side, p, given)()[0] for side in ("ours", "torch")]
        used = check.tolerance_used(p.precision, *pair)
        found["tolerance_used"] = used if math.isfinite(used) else None


_NAMES = {"ours": "upconv", "torch": "PyTorch", "frozen": "frozen upconv"}


def _set_times(found: Row, of_sides: dict[Side, Quartiles], measured: dict[str, Quartiles]) -> None:
    for side, seconds in of_sides.items():
        found |= timing.entries(side, seconds)
    found["warning"] = timing.unsteady({_NAMES[side]: values for side, values in measured.items()})
    found["ratio"] = found["torch_ms"] / found["ours_ms"]
    if "frozen" in of_sides:
        found["frozen_ratio"] = found["torch_ms"] / found["frozen_ms"]


def set_roof(found: Row, ceilings: Ceilings) -> None:
    """Fills in a row's roof and how much of it our time reaches.

    The roof is the larger of its arithmetic and its compulsory bytes, see `Problem.roof_seconds`.
    """
    rate = ceilings["matmul_flops_per_s"][found["precision"]]
    found["roof_ms"] = 1e3 * max(found["flops"] / rate, found["bytes"] / ceilings["copy_bytes_per_s"])
    ours = found["ours_ms"]
    found["percent_of_roof"] = None if ours is None else 100 * found["roof_ms"] / ours


# --- all rows --------------------------------------------------------------------------------------------------------

Tell = Callable[[Literal["plan", "row"], Job], object]
"""Hears of each job, on a GPU as its kernels are planned ahead of all rows, and ahead of its row."""


def run(
    todo: Sequence[Job],
    device: torch.device,
    how: How,
    *,
    known: tuple[Sequence[Row], Ceilings] | None = None,
    tell: Tell = lambda what, job: None,
) -> Iterator[tuple[list[Row], Ceilings]]:
    """All rows so far in order, and the ceilings, behind each row and at the end.

    The ceilings are measured ahead of the rows and behind them. Of the two measurements the better counts: a machine
    that others use too reaches its ceiling only at times.

    Args:
        todo: the jobs.
        device: where they run.
        how: how they are measured.
        known: rows and ceilings of an earlier, unfinished run on the same device; its rows are not measured again, and
            of its ceilings and these the better count for all.
        tell: hears of the jobs.

    Raises:
        DeviceLost: the row before left the device unusable (an illegal access, say).
    """
    precisions = list(dict.fromkeys(job.problem.precision for job in todo))
    rows = {key(found): found for found in known[0]} if known else {}
    ceilings = roofline.measure(precisions, device)
    if known:
        ceilings = roofline.better(ceilings, known[1])

    def so_far() -> tuple[list[Row], Ceilings]:
        found = [rows[job.key] for job in todo if job.key in rows]
        for one in found:
            set_roof(one, ceilings)
        return found, ceilings

    missing = [job for job in todo if job.key not in rows]
    if device.type == "cuda":
        compile_ahead(missing, device, tell)
    for job in missing:
        tell("row", job)
        found = rows[job.key] = row(job, device, how)
        yield so_far()
        if device.type == "cuda" and found["failure"] is not None:
            _check_device(device, job)
    ceilings = roofline.better(ceilings, roofline.measure(precisions, device))
    yield so_far()


def _check_device(device: torch.device, job: Job) -> None:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DeviceLost(f"{job.case} ({job.problem}) left {device} unusable: {reason}") from None


def compile_ahead(todo: Sequence[Job], device: torch.device, tell: Tell) -> None:
    """Compiles the kernels of all jobs at once, in threads, so that no row waits for its own.

    What no family can plan or NVRTC compile is left to the row that needs it, which says so. Of a gradient also the
    forward ahead of it is compiled.
    """
    from upconv.cuda.compile import jit, nvrtc

    where = planner.device_of(device)
    if nvrtc.unavailable() is not None or where.gpu is None:
        return
    arch, found = where.gpu.arch, dict[str, str]()
    for job in todo:
        tell("plan", job)
        with suppress(Exception):
            plan = planner.plan(job.problem, where)
            for choice in {**plan.choices("fwd"), **plan.choices(job.problem.pass_)}.values():
                found.update({unit.source: unit.label for unit in choice.sources()})
    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(jit.cubin, source, arch, label) for source, label in found.items()]
        try:
            wait(jobs)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # else it compiles the rest first
            raise
