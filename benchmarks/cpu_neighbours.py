"""Forwards and steps on a CPU against PyTorch's, quiet or beside one spinning process per core.

    python benchmarks/cpu_neighbours.py --threads 2                  # benchmarks/results/cpu/threads-2-quiet.json
    python benchmarks/cpu_neighbours.py --threads 2 --busy           # the same with neighbours

Only what upconv computes by a plan of its own is timed: ours, PyTorch and PyTorch once more, in turn in one process.
``ratio`` is PyTorch's time over ours, ``noise`` PyTorch's over its own second time, both of medians. All rows are timed
in several rounds, minutes apart, and the row is the round of the median ratio: what else the machine does passes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from upconv import planner
from upconv.bench import report, run, timing
from upconv.bench.progress import Progress
from upconv.bench.suites import SUITES
from upconv.problem import LAYOUTS

RESULTS = Path(__file__).resolve().parent / "results" / "cpu"
REPEATS = timing.Repeats(0.4, 7, 60)
ROUNDS = 3


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that do nothing but use a core."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()


def jobs() -> Iterator[run.Job]:
    """Every layer of the suites once, in both layouts, forward and step; those of a GPU's suites scaled down."""
    seen = set()
    for suite in ("cpu", "models", "kernelbench", "field"):
        ways = run.ways(torch.device("cpu"), layouts=LAYOUTS, passes=("fwd", "step"))
        for job in run.jobs(suite, SUITES[suite], ways, small=suite != "cpu", bias=True):
            if job.problem not in seen:
                seen.add(job.problem)
                yield job


def measured(job: run.Job) -> list[report.Row]:
    """A job's row; none where PyTorch's operator computes it, or a step whose forward alone is ours."""
    p, device = job.problem, torch.device("cpu")
    plan = planner.plan(p, planner.cpu_device())
    if (plan.forward if p.pass_ == "fwd" else plan.backward) == "native":
        return []
    sets = [timing.operands(p, device, seed) for seed in range(2)]
    works = {"ours": [timing.work("ours", p, given) for given in sets]}
    works["torch"] = [timing.work("torch", p, given) for given in sets]
    taken = timing.interleave(works | {"again": works["torch"]}, timing.clock(device), REPEATS)
    times = {side: median(values) for side, values in taken.items()}
    return [{
        "suite": job.suite, "case": job.case, "layout": p.layout, "pass": p.pass_,
        "plan": f"{plan.forward}, {plan.backward}", "torch_ms": 1e3 * times["torch"],
        "ratio": times["torch"] / times["ours"], "noise": times["torch"] / times["again"],
    }]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--busy", action="store_true", help="beside one spinning process per core")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kind = "busy" if given.busy else "quiet"

    def rows() -> Iterator[report.Row]:
        todo, rounds = list(jobs()), []
        for _ in range(ROUNDS):
            rounds.append([])
            for job in todo:
                tell(f"round {len(rounds)}, {job}")
                rounds[-1] += measured(job)
        for several in zip(*rounds):
            yield sorted(several, key=lambda row: row["ratio"])[ROUNDS // 2]

    with Progress() as tell, neighbours((os.cpu_count() or 1) if given.busy else 0):
        found = report.gather(rows(), torch.device("cpu"), "neighbours", neighbours=kind)
    report.save(found, RESULTS / f"threads-{given.threads}-{kind}.json")
    print(f"{len(found['rows'])} rows, the lowest {min(row['ratio'] for row in found['rows']):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
