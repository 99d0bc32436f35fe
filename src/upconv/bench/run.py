"""Layers of suites: a suite's cases and ways to run them make jobs, and each job, checked and timed, a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from upconv import planner
from upconv.bench import check, report, roofline, timing
from upconv.bench.report import Report, Row, finite
from upconv.bench.roofline import Ceilings
from upconv.bench.suites import Case, quick
from upconv.bench.timing import Repeats, Side
from upconv.cuda import warming
from upconv.planner import Plan
from upconv.problem import LAYOUTS, PASSES, PRECISIONS, Layout, Pass, Precision, Problem, dtype_name

if TYPE_CHECKING:
    from upconv.cuda.launches import Unit


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

    def __str__(self) -> str:
        p = self.problem
        return f"{self.case} {dtype_name(p.dtype)} {p.layout} {p.pass_}"


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


def jobs(
    suite: str, cases: Iterable[Case], todo: Iterable[Way], small: bool = False, bias: bool | None = None
) -> list[Job]:
    """The rows of a run in the report's order. 1-D cases have no channels_last, so they have no such rows.

    Args:
        suite: the suite's name.
        cases: its cases.
        todo: the ways.
        small: scale large cases down, see `suites.quick`; not those of `cpu` and `custom`.
        bias: with or without bias; None for what the suite says.
    """
    found = []
    for way, (name, p) in product(todo, cases):
        if p.rank > 1 or way.layout == "nchw":
            p = p.with_(**way._asdict(), bias=p.bias if bias is None else bias)
            found.append(Job(suite, name, quick(p) if small and suite not in _WHOLE else p))
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


def row(job: Job, device: torch.device, repeats: Repeats, ceilings: Ceilings, frozen: bool = False) -> Row:
    """Checks and times one job. ``frozen``: forwards with `upconv.freeze` too.

    Every side runs the timed shape and is compared with the reference; only right results are timed. Where the plan is
    PyTorch's own operator its time stands for ours too, the ratio is 1 and the engine ``torch``.
    """
    p = job.problem
    plan = planner.plan(p, planner.device_of(device))
    roof = 1e3 * p.roof_seconds(ceilings["matmul_flops_per_s"][p.precision], ceilings["copy_bytes_per_s"])
    ours: tuple[Side, ...] = ("ours", "frozen") if frozen and p.pass_ == "fwd" else ("ours",)
    found: Row = {
        "suite": job.suite, "case": job.case, "layer": p.layer, "pass": p.pass_, "dtype": dtype_name(p.dtype),
        "precision": p.precision, "layout": p.layout, "engine": plan.engine(p.pass_),
        "plan": plan_text(plan, p.pass_), "flops": p.flops, "bytes": p.bytes, "ours_ms": None, "torch_ms": None,
        "ratio": None, "roof_ms": roof, "percent_of_roof": None, "failure": None,
    }  # fmt: skip
    try:
        with timing.precision_flags(p.precision):
            found |= _check(p, device, ours)
            if found["failure"] is None:
                found |= timing.entries(_taken(p, device, repeats, ours, found["engine"]))
                found["percent_of_roof"] = 100 * roof / found["ours_ms"]
    except Exception as error:  # one case that cannot run (out of memory, say) does not cost the others
        found["failure"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


SET_BYTES = 2 * 10**9
"""Input sets of a row together stay below this, but there are at least two and at most four."""


def _taken(p: Problem, device: torch.device, repeats: Repeats, ours: Sequence[Side], engine: str) -> timing.Taken:
    """Seconds of each side, one a round. PyTorch's are those of the better ``cudnn.benchmark``."""
    count = max(2, min(4, SET_BYTES // max(p.bytes, 1)))
    sets = [timing.operands(p, device, seed) for seed in range(count)]
    sides: tuple[Side, ...] = ("torch",) if engine == "torch" else (*ours, "torch")
    works = {str(side): [timing.work(side, p, given) for given in sets] for side in sides}
    taken = timing.compare(works, device, repeats, tuned=("torch",))
    return {side: taken.get(side, taken["torch"]) for side in (*ours, "torch")}


def _check(p: Problem, device: torch.device, ours: Sequence[Side]) -> Row:
    """A row's entries of errors, and its failure if a result is wrong."""
    given = timing.operands(p, device, 0)
    known, theirs, worst = check.truths(p, given), timing.work("torch", p, given)(), 0.0
    for side in ours:
        work = timing.work(side, p, given)
        if side == "frozen":
            work()  # packs; the calls after it use what it keeps
        error, torch_error, right = check.errors(p, known, work(), theirs)
        worst = max(worst, error)
        found: Row = {"rel_error": finite(worst), "torch_rel_error": finite(torch_error)}
        if not right:
            of = "" if side == "ours" else f" of {timing.NAMES[side]}"
            return found | {"failure": f"wrong result{of}: relative error {error:.1e}, PyTorch's {torch_error:.1e}"}
    if device.type == "cuda" and p.pass_ == "fwd":
        del known, work, theirs
        given = timing.operands(p, device, 0, positive=True)
        wanted = timing.work("torch", p, given)()[0]
        used = (check.tolerance_used(p.precision, timing.work(side, p, given)()[0], wanted) for side in ours)
        found["tolerance_used"] = finite(max(used))
    return found


# --- all rows --------------------------------------------------------------------------------------------------------

Tell = Callable[..., object]
"""Hears what begins, and how many of how many rows are done: a `progress.Progress`."""


def measure(
    todo: Sequence[Job], device: torch.device, repeats: Repeats, tell: Tell = lambda *said: None, frozen: bool = False
) -> Report:
    """The report of all jobs, and of the ceilings of their precisions."""
    ceilings = Ceilings(copy_bytes_per_s=0.0, matmul_flops_per_s={})

    def rows() -> Iterator[Row]:
        tell("measuring what the machine copies and multiplies", 0, len(todo))
        ceilings.update(roofline.measure(list(dict.fromkeys(job.problem.precision for job in todo)), device))
        if device.type == "cuda":
            _compile_ahead(todo, device, tell)
        for done, job in enumerate(todo):
            tell(str(job), done, len(todo))
            yield row(job, device, repeats, ceilings, frozen)

    return report.gather(rows(), device, "layers", ceilings=ceilings)


def _compile_ahead(todo: Sequence[Job], device: torch.device, tell: Tell) -> None:
    """Compiles the kernels of all jobs at once, so that no row waits for its own.

    What no family can plan is left to the row that needs it. Of a gradient also the forward ahead of it is compiled.
    """
    where = planner.device_of(device)
    found: list[tuple[Unit, str]] = []
    if where.gpu is None or where.unavailable is not None:
        return
    for job in todo:
        tell(f"planning {job}")
        with suppress(Exception):
            plan = planner.plan(job.problem, where)
            for choice in {**plan.choices("fwd"), **plan.choices(job.problem.pass_)}.values():
                found += [(unit, where.gpu.arch) for unit in choice.sources()]
    warming.compile_all(found)
