"""A run of the bench: a suite and a sweep make jobs, and each job, checked and timed, a row of the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypedDict

import torch

from upconv import planner
from upconv.bench import check, memory, roofline, timing
from upconv.bench.roofline import Ceilings
from upconv.bench.suites import Case, quick
from upconv.bench.timing import Repeats, Side
from upconv.planner import Plan
from upconv.problem import LAYOUTS, PASSES, PRECISIONS, Layout, Pass, Precision, Problem

Row = TypedDict(
    "Row",
    {
        "suite": str,
        "case": str,
        "pass": Pass,
        "dtype": str,
        "precision": Precision,
        "layout": Layout,
        "ours_ms": "float | None",
        "torch_ms": "float | None",
        "ratio": "float | None",
        "roof_ms": float,
        "percent_of_roof": "float | None",
        "rel_error": "float | None",
        "torch_rel_error": "float | None",
        "engine": str,
        "plan": str,
        # beyond the schema's keys
        "layer": str,
        "scale": float,
        "flops": int,
        "bytes": int,
        "rounds": int,
        "failure": "str | None",
        "ours_peak_bytes": "int | None",
        "torch_peak_bytes": "int | None",
    },
)
"""A row of the report, as in JSON.

Times are medians in milliseconds; a wrong row has none, and ``failure`` says what is wrong with it. ``ratio`` is
PyTorch's time over ours: above 1 ours is faster. ``scale`` is the share of the whole case's multiplications that the
row computes. Peak bytes are beside inputs and results, where they were measured.
"""


@dataclass(frozen=True)
class Job:
    """One row to be: a case of a suite in one dtype, precision, layout and pass."""

    suite: str
    case: str
    problem: Problem
    scale: float = 1.0


class Sweep(TypedDict):
    """What a run varies; every combination that exists becomes rows."""

    dtypes: Sequence[torch.dtype]
    precisions: Sequence[Precision]
    layouts: Sequence[Layout]
    passes: Sequence[Pass]


def sweep(
    device: torch.device,
    dtypes: Sequence[torch.dtype] = (),
    precisions: Sequence[Precision] = (),
    layouts: Sequence[Layout] = ("nchw",),
    passes: Sequence[Pass] = ("fwd",),
) -> Sweep:
    """A sweep with its defaults filled in.

    Without dtypes it takes those of the precisions asked for, or float32. A dtype that none of these precisions fits
    takes its default: its own, and for float32 TF32 on CUDA, as PyTorch does.

    Raises:
        ValueError: a precision that no dtype asked for has, or TF32 on a CPU.
    """
    if "tf32" in precisions and device.type == "cpu":
        raise ValueError("--precision must be one of ieee, bf16, fp16 and fp64 on a CPU; got 'tf32'")
    if not dtypes:
        dtypes = [d for d in PRECISIONS if set(PRECISIONS[d]) & set(precisions)] or [torch.float32]
    chosen: list[Precision] = []
    for dtype in dtypes:
        default: Precision = "tf32" if dtype is torch.float32 and device.type == "cuda" else PRECISIONS[dtype][0]
        chosen += [p for p in PRECISIONS[dtype] if p in precisions] or [default]
    for precision in precisions:
        if precision not in chosen:
            fitting = ", ".join(p for dtype in dtypes for p in PRECISIONS[dtype])
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"--precision must be one of {fitting} for {names}; got {precision!r}")
    return Sweep(dtypes=dtypes, precisions=chosen, layouts=layouts or LAYOUTS[:1], passes=passes or PASSES[:1])


def jobs(suite: str, cases: Iterable[Case], what: Sweep, *, small: bool, bias: bool | None) -> list[Job]:
    """The rows of a run in the report's order. 1-D cases have no channels_last, so they have no such rows.

    Args:
        suite: the suite's name.
        cases: its cases.
        what: the sweep.
        small: scale large cases down, see `suites.quick`.
        bias: with or without bias; None for what the suite says.
    """
    found = []
    for dtype, layout, pass_ in product(what["dtypes"], what["layouts"], what["passes"]):
        for precision in [p for p in PRECISIONS[dtype] if p in what["precisions"]]:
            for name, whole in cases:
                if whole.rank == 1 and layout == "channels_last":
                    continue
                changed = whole.with_(
                    dtype=dtype,
                    precision=precision,
                    layout=layout,
                    pass_=pass_,
                    bias=whole.bias if bias is None else bias,
                )
                # The CPU suite is small already, and its targets are stated at its own sizes.
                problem = quick(changed) if small and suite != "cpu" else changed
                found.append(Job(suite, name, problem, problem.macs / changed.macs))
    return found


def plan_text(plan: Plan, pass_: Pass) -> str:
    """The plan of a pass in a word; of a step, the plan of each half."""
    if pass_ == "step":
        return f"forward={plan.forward} backward={plan.backward}"
    if pass_ == "fwd":
        return plan.forward
    return "native" if plan.engine(pass_) == "torch" else plan.backward


def row(job: Job, device: torch.device, repeats: Repeats, *, peaks: bool = False, seed: int = 0) -> Row:
    """Checks and times one job.

    Both sides run the timed shape once and are compared with the reference; only a right result is timed. Where the
    plan is PyTorch's own operator there is one implementation: its time stands for both, the ratio is 1 and the engine
    ``torch``. The roof is left to `set_roof`.
    """
    p = job.problem
    plan = planner.plan(p, planner.device_of(device))
    engine = plan.engine(p.pass_)
    found: Row = {
        "suite": job.suite,
        "case": job.case,
        "pass": p.pass_,
        "dtype": str(p.dtype).removeprefix("torch."),
        "precision": p.precision,
        "layout": p.layout,
        "ours_ms": None,
        "torch_ms": None,
        "ratio": None,
        "roof_ms": 0.0,
        "percent_of_roof": None,
        "rel_error": None,
        "torch_rel_error": None,
        "engine": engine,
        "plan": plan_text(plan, p.pass_),
        "layer": str(p).rsplit(" ", 3)[0],  # without dtype, layout and pass, which have keys of their own
        "scale": job.scale,
        "flops": p.flops,
        "bytes": p.bytes,
        "rounds": 0,
        "failure": None,
        "ours_peak_bytes": None,
        "torch_peak_bytes": None,
    }
    try:
        with timing.precision_flags(p.precision):
            _check(found, p, device, seed)
            if found["failure"] is None:
                _time(found, p, device, repeats, seed)
                if peaks:
                    found["ours_peak_bytes"] = memory.peak_bytes(p, "ours", device)
                    found["torch_peak_bytes"] = memory.peak_bytes(p, "torch", device)
    except Exception as error:  # one case that cannot run (out of memory, say) does not cost the others
        found["failure"] = f"{type(error).__name__}: {error}".splitlines()[0]
        found["ours_ms"] = found["torch_ms"] = found["ratio"] = None
    return found


def _check(found: Row, p: Problem, device: torch.device, seed: int) -> None:
    given = timing.operands(p, device, seed)
    known = check.truths(p, given)
    ours, theirs = timing.work("ours", p, given)(), timing.work("torch", p, given)()
    error, torch_error, right = check.errors(p, known, ours, theirs)
    found["rel_error"] = error if math.isfinite(error) else None
    found["torch_rel_error"] = torch_error if math.isfinite(torch_error) else None
    if not right:
        found["failure"] = f"wrong result: relative error {error:.1e}, PyTorch's {torch_error:.1e}"


def _time(found: Row, p: Problem, device: torch.device, repeats: Repeats, seed: int) -> None:
    delegated = found["engine"] == "torch"
    sides: tuple[Side, ...] = ("torch",) if delegated else ("ours", "torch")
    seconds, found["rounds"] = timing.compare(p, device, sides, repeats, seed)
    ours, theirs = seconds["torch" if delegated else "ours"], seconds["torch"]
    found["ours_ms"], found["torch_ms"] = 1e3 * ours, 1e3 * theirs
    found["ratio"] = 1.0 if delegated else theirs / ours


def set_roof(found: Row, p: Problem, ceilings: Ceilings) -> None:
    """Fills in a row's roof and how much of it our time reaches."""
    seconds = p.roof_seconds(ceilings["matmul_flops_per_s"][p.precision], ceilings["copy_bytes_per_s"])
    found["roof_ms"] = 1e3 * seconds
    ours = found["ours_ms"]
    found["percent_of_roof"] = None if ours is None else 100 * found["roof_ms"] / ours


def run(
    todo: Sequence[Job],
    device: torch.device,
    repeats: Repeats,
    *,
    peaks: bool = False,
    progress: Callable[[Job], object] = lambda job: None,
) -> tuple[list[Row], Ceilings]:
    """All rows in order, and the ceilings, measured ahead of the rows and behind them; ``progress`` hears each job.

    Of the two measurements the better counts: a machine that others use too reaches its ceiling only at times.
    """
    precisions = list(dict.fromkeys(job.problem.precision for job in todo))
    ceilings = roofline.measure(precisions, device)
    rows = []
    for job in todo:
        progress(job)
        rows.append(row(job, device, repeats, peaks=peaks))
    ceilings = roofline.better(ceilings, roofline.measure(precisions, device))
    for found, job in zip(rows, todo):
        set_roof(found, job.problem, ceilings)
    return rows, ceilings
