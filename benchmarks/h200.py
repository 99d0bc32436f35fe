"""Measures everything that targets.json judges, in order of importance, and loses nothing when it is stopped.

    python benchmarks/h200.py                          all reports, into benchmarks/results
    python benchmarks/h200.py --budget 540 --out DIR   stops ahead of the row that would begin after 540 s
    python benchmarks/h200.py --only tf32,bf16 --cases kb57,kb71 --keep
    python benchmarks/h200.py --stem h100 --only gi-tf32,gi-bf16      on an H100, whose reports stand beside

Every report is written again behind each of its rows, in one step, and a next run goes on where this one stopped: rows
that are in the report, measured with the same engine sources, are not measured again. The rows are measured by a child
process: one that crashes the device, or gives no sign for --stall seconds, is recorded as failed, and a new child goes
on. Exit code: 0 all is measured, 1 a row is wrong or failed, 3 the time was up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import cold
import torch
from layers import some

import upconv
from upconv import env
from upconv.bench import files, latency, report, run, training
from upconv.bench.report import Row
from upconv.bench.roofline import Ceilings
from upconv.bench.run import Job, Way
from upconv.bench.suites import SUITES
from upconv.bench.timing import SWEEP, Repeats
from upconv.problem import LAYOUTS, Pass

RESULTS = Path(__file__).resolve().parent / "results"
FORWARDS = {
    "tf32": Way(torch.float32, "tf32"),
    "bf16": Way(torch.bfloat16, "bf16"),
    "cl-tf32": Way(torch.float32, "tf32", "channels_last"),
    "cl-bf16": Way(torch.bfloat16, "bf16", "channels_last"),
    "ieee": Way(torch.float32, "ieee"),
    "fp16": Way(torch.float16, "fp16"),
    "cl-fp16": Way(torch.float16, "fp16", "channels_last"),
}
GRADIENTS: dict[str, Pass] = {"gi": "grad-input", "gw": "grad-weight"}
SWEEPS = {
    **FORWARDS,
    **{
        f"{short}-{name}": FORWARDS[name]._replace(pass_=pass_)
        for short, pass_ in GRADIENTS.items()
        for name in ("tf32", "bf16", "cl-tf32", "cl-bf16")
    },
    **{
        f"{what}-{name}": FORWARDS[name]._replace(pass_="step")
        for what in ("step", "conv")
        for name in ("tf32", "bf16")
    },
    **{f"frozen-{name}": FORWARDS[name] for name in ("tf32", "bf16")},
}
ORDER = (
    "tf32", "bf16", "gi-tf32", "gw-tf32", "gi-bf16", "gw-bf16", "step-tf32", "step-bf16", "training", "host", "shapes",
    "cold", "cl-tf32", "cl-bf16", "gi-cl-tf32", "gw-cl-tf32", "gi-cl-bf16", "gw-cl-bf16", "ieee", "fp16", "cl-fp16",
    "conv-tf32", "conv-bf16", "frozen-tf32", "frozen-bf16",
)  # fmt: skip
FROZEN = Repeats(0.2, 7, 60)
"""Of the reports with frozen weights, which have many short rows."""
DONE, WRONG, TIME_UP = 0, 1, 3
CHILD_WRONG, CHILD_LOST = 11, 12
"""A child's own codes: an exception that nobody catches ends it with 1."""
CHILDREN = 12
"""After so many the machine itself is at fault."""


UNSWEPT: dict[str, Callable[[torch.device], report.Report]] = {
    "host": latency.host,
    "shapes": latency.shapes,
    "cold": lambda device: cold.measure(device, progress=lambda label: print(f"compiles {label}", flush=True)),
}
"""The reports that are measured as a whole."""


class TimeUp(Exception):
    """The budget is spent."""


def jobs(name: str) -> list[Job]:
    """The rows of a report; the 2-D layers first, whose targets are the main ones.

    Steps are measured on KernelBench's 1-D and 3-D layers, with a bias, so that its gradient is part of the step.
    """
    ways = [SWEEPS[name]]
    if name.startswith("frozen-"):
        return [j for suite in ("cuda", "field") for j in run.jobs(suite, SUITES[suite], ways, small=False, bias=None)]
    if name.startswith("conv-"):
        return run.jobs("convolutions", SUITES["convolutions"], ways, small=False, bias=False)
    if name.startswith("step-"):
        cases = [case for case in SUITES["kernelbench"] if case.problem.rank != 2]
        return run.jobs("kernelbench", cases, ways, small=False, bias=True)
    found = run.jobs("cuda", SUITES["cuda"], ways, small=False, bias=None)
    return sorted(found, key=lambda job: job.problem.rank != 2 and job.case != "hifigan")


def sources() -> str:
    """A digest of the engine: all of the package but bench and command line."""
    folder = Path(upconv.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".cu", ".cuh")):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(("bench/", "cli/")):
            digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def earlier(path: Path, device: torch.device, *, keep: bool) -> tuple[list[Row], Ceilings] | None:
    """A report's rows and ceilings, where they are of this GPU model and of these sources.

    ``keep``: also of other sources; such rows say which commit they are of. Errors, then: ValueError where the report
    is of another GPU, or of no commit.
    """
    if not path.exists():
        return None
    found = report.load(path)
    ours, here = found["device"].get("name"), torch.cuda.get_device_name(device)
    same = found["versions"].get("sources") == sources()
    if keep and ours != here:
        raise ValueError(f"{path} must be of this GPU, a {here}, for its rows to stay, got one of {ours}")
    if keep and not same and not found["commit"]:
        raise ValueError(f"{path} must name the commit of the rows that stay (--stamp), got {found['commit']}")
    if ours != here or not (same or keep):
        return None
    if not same:
        for row in found["rows"]:
            cast(dict[str, Any], row).setdefault("commit", found["commit"])
    return [row for row in found["rows"] if keep or "commit" not in row], found["ceilings"]


def sweep(
    name: str, path: Path, device: torch.device, end: float, keep: bool, cases: Sequence[str], failed: dict[str, str]
) -> bool:
    """Measures what a report lacks; whether all its rows are right. Raises `TimeUp` and `run.DeviceLost`."""
    every = jobs(name)
    todo = [job for job in every if not cases or job.case in cases]
    rows, ceilings = earlier(path, device, keep=keep) or ([], None)
    order = {job.key: i for i, job in enumerate(every)}
    # Of other sources rows stay until they are measured anew.
    kept = {run.key(row): row for row in rows if run.key(row) in order}
    known = {key: row for key, row in kept.items() if "commit" not in row or row["case"] not in cases}
    for job in todo:
        if job.case in failed:
            row = run.blank(job, device)
            run.fail(row, failed[job.case])
            known[run.key(row)] = row
    if ceilings is not None and all(job.key in known for job in todo):
        return not report.wrong(list(known.values()))
    base = report.build([], device)
    base["versions"]["sources"] = sources()

    def tell(what: str, job: Job) -> None:
        if what == "row" and time.monotonic() > end:
            raise TimeUp
        print(f"{what} {name} {job.case}", flush=True)  # a sign of life: to plan a layer's gradients takes time

    old = None if ceilings is None else (list(known.values()), ceilings)
    if old is None and known:  # rows that failed before anything was measured
        old = (list(known.values()), Ceilings(copy_bytes_per_s=0.0, matmul_flops_per_s={SWEEPS[name].precision: 0.0}))
    frozen = name.startswith("frozen-")
    how = run.How(FROZEN if frozen else SWEEP, frozen=frozen)
    for rows, ceilings in run.run(todo, device, how, known=old, tell=tell):
        known.update({run.key(row): row for row in rows})
        for row in known.values():
            if "commit" not in row:  # the roofs of the others are those of their own run
                run.set_roof(row, ceilings)
        base["rows"] = sorted({**kept, **known}.values(), key=lambda row: order[run.key(row)])
        base["ceilings"] = ceilings
        files.save(base, path)
    return not report.wrong(base["rows"])


def child(options: argparse.Namespace) -> int:
    """Measures until all is done, the time is up or the device is lost; says on stdout what it begins."""
    device = torch.device("cuda", 0)
    end, right = time.monotonic() + options.budget, True
    failed: dict[str, dict[str, str]] = {}
    for text in options.failed:
        name, case, reason = text.split(":", 2)
        failed.setdefault(name, {})[case] = reason
    for name in options.only:
        path = options.out / f"{options.stem}-{name}.json"
        print(f"report {name}", flush=True)
        begin = time.monotonic()
        try:
            if name in SWEEPS:
                right &= sweep(name, path, device, end, options.keep, options.cases, failed.get(name, {}))
            elif name in failed:
                right = False
            elif name == "training":
                train(path, device, end, not options.eager, options.cases, keep=options.keep)
            elif not options.cases and (
                not path.exists() or (not options.keep and report.load(path)["versions"].get("sources") != sources())
            ):
                if begin > end:
                    raise TimeUp
                found = UNSWEPT[name](device)
                found["versions"]["sources"] = sources()
                files.save(found, path)
        except TimeUp:
            return TIME_UP
        except run.DeviceLost as error:
            print(f"lost {error}", flush=True)
            return CHILD_LOST
        print(f"done {name} {time.monotonic() - begin:.1f} s", flush=True)
    return DONE if right else CHILD_WRONG


def train(
    path: Path, device: torch.device, end: float, compiled: bool, only: Sequence[str], *, keep: bool = False
) -> None:
    """Whole models, row by row; those that the report has of these sources stay.

    ``compiled``: with ``torch.compile`` beside. ``only``: these models, anew. ``keep``: a report of other sources stays
    as it is, since its rows tell of no commit of their own. Errors: TimeUp.
    """
    rows: dict[str, dict[str, Any]] = {}
    kept = report.load(path) if path.exists() else None
    if kept and kept["versions"].get("sources") != sources():
        if keep:
            return
    elif kept:
        rows = {str(row["case"]): row for row in kept["rows"]}
    every = training.runs(layouts=LAYOUTS, modes=training.MODES)
    for one in every:
        if one.case.name not in only if only else one.name in rows:
            continue
        if time.monotonic() > end:
            raise TimeUp
        found = training.measure(
            device, [one], compiled=compiled, progress=lambda text: print(f"case {text}", flush=True)
        )
        rows |= {str(row["case"]): row for row in found["rows"]}
        found["versions"]["sources"] = sources()
        found["rows"] = [rows[each.name] for each in every if each.name in rows]
        files.save(found, path)


def parent(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs children until one ends by itself, and keeps account of the rows that ended the others."""
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        file = f"{options.stem}-{name}.json"
        path, old = options.out / file, options.resume and options.resume / file
        if options.fresh:
            path.unlink(missing_ok=True)
        elif old and old.exists() and not path.exists():
            shutil.copyfile(old, path)
    end = time.monotonic() + options.budget
    failed: list[str] = []
    for _ in range(CHILDREN):
        left = max(0.0, end - time.monotonic())
        command = [sys.executable, __file__, *arguments, "--child", "--budget", f"{left:.0f}"]
        for text in failed:
            command += ["--failed", text]
        code, at = watch(command, options.stall, end + options.stall)
        if code in (DONE, TIME_UP):
            return WRONG if code == DONE and failed else code
        if code == CHILD_WRONG:
            return WRONG
        if code == CHILD_LOST:  # the report has the row already
            continue
        print(f"child ended with {code} at {at or 'its start'}", flush=True)
        if at is None:
            return WRONG
        reason = f"no sign for {options.stall:.0f} s" if code is None else f"the process ended with {code}"
        failed.append(f"{at}:{reason}")
    return WRONG


def watch(command: list[str], stall: float, end: float) -> tuple[int | None, str | None]:
    """Runs a child; its exit code, None when it was killed for silence, and the ``report:case`` that it was at."""
    lines: queue.Queue[str | None] = queue.Queue()
    at: str | None = None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(0.1, min(stall, end - time.monotonic())))
        except queue.Empty:
            process.kill()
            process.wait()
            return None, at
        if line is None:
            return process.wait(), at
        print(line, end="", flush=True)
        kind, *rest = line.split()
        if kind == "row":
            at = ":".join(rest[:2])
        elif kind == "report":
            at = f"{rest[0]}:{rest[0]}" if rest[0] not in SWEEPS else None


def stamp(folder: Path, stem: str) -> int:
    """Names the commit in reports that a copy without history measured, if they have this digest of the sources."""
    commit = env.commit()
    if commit is None or commit.endswith("-dirty"):
        print(f"the checkout must be a commit without changes to the sources, got {commit}")
        return 1
    for path in sorted(folder.glob(f"{stem}-*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["versions"].get("sources") == sources():
            files.save({**found, "commit": commit}, path)
            print(f"{path.name} {commit}")
    return 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(text: str) -> list[str]:
        found = some(ORDER)(text)
        return [name for name in ORDER if name in found]

    parser.add_argument("--only", type=names, default=list(ORDER), help="the reports, joined by commas")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=[], help="of them only these cases")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds; no row begins after them")
    parser.add_argument("--stall", type=float, default=120.0, help="seconds without a sign after which a row failed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where reports are written and gone on with")
    parser.add_argument("--resume", type=Path, help="where the reports that --out lacks are copied from")
    parser.add_argument(
        "--keep", action="store_true", help="rows of other engine sources stay; those of --cases are measured anew"
    )
    parser.add_argument("--fresh", action="store_true", help="measure all anew")
    parser.add_argument("--eager", action="store_true", help="no torch.compile beside training steps")
    parser.add_argument("--stem", choices=("h200", "h100"), default="h200", help="the GPU, as reports' names begin")
    parser.add_argument("--stamp", action="store_true", help="only name this commit in reports of its sources")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--failed", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return child(options)
    if options.stamp:
        return stamp(options.out, options.stem)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here")
    if options.stem not in torch.cuda.get_device_name(0).lower():
        parser.error(f"--stem must be part of the GPU's name, a {torch.cuda.get_device_name(0)}, got {options.stem}")
    return parent(options, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
