"""Measures the reports of a GPU in benchmarks/results, each by a command of its own, in order of importance.

    python benchmarks/h200.py                            all reports, into benchmarks/results
    python benchmarks/h200.py --only tf32,bf16 --budget 540 --out DIR        some, for 540 s at most

A report that is complete and of this commit is not measured again. Exit code: 0 all is measured, 1 a row is wrong or
failed, 3 the time was up.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from upconv import env
from upconv.bench import report, run
from upconv.bench.run import Job, Way
from upconv.bench.suites import SUITES, choose
from upconv.problem import Pass

HERE = Path(__file__).resolve().parent


class Sweep(NamedTuple):
    """The layers of a report, all in one way."""

    way: Way
    suites: tuple[str, ...] = ("cuda",)
    cases: tuple[str, ...] = ()
    """Those of the suites that are measured; empty for all."""
    bias: bool | None = None
    frozen: bool = False

    def arguments(self) -> list[str]:
        """The options of ``upconv bench`` that measure the report."""
        given = ["--precision", self.way.precision, "--layout", self.way.layout, "--pass", self.way.pass_]
        for option, values in (("--suite", self.suites), ("--case", self.cases)):
            given += [word for value in values for word in (option, value)]
        given += [] if self.bias is None else ["--bias" if self.bias else "--no-bias"]
        return [*given, *["--frozen"] * self.frozen]

    def jobs(self) -> list[Job]:
        """The rows of the report."""
        ways = [self.way]
        found = [(suite, choose(SUITES[suite], self.cases)) for suite in self.suites]
        return [job for name, cases in found for job in run.jobs(name, cases, ways, bias=self.bias)]


_WAYS = {
    "tf32": Way(torch.float32, "tf32"),
    "bf16": Way(torch.bfloat16, "bf16"),
    "cl-tf32": Way(torch.float32, "tf32", "channels_last"),
    "cl-bf16": Way(torch.bfloat16, "bf16", "channels_last"),
    "ieee": Way(torch.float32, "ieee"),
    "fp16": Way(torch.float16, "fp16"),
    "cl-fp16": Way(torch.float16, "fp16", "channels_last"),
}
_GRADIENTS: dict[str, Pass] = {"gi": "grad-input", "gw": "grad-weight"}
_NOT_2D = tuple(case.name for case in SUITES["kernelbench"] if case.problem.rank != 2)
"""The layers of the reports of steps, which have a bias, so that its gradient is part of the step."""
SWEEPS = {
    **{name: Sweep(way) for name, way in _WAYS.items()},
    **{
        f"{short}-{name}": Sweep(_WAYS[name]._replace(pass_=pass_))
        for short, pass_ in _GRADIENTS.items()
        for name in ("tf32", "bf16", "cl-tf32", "cl-bf16")
    },
    **{
        f"step-{name}": Sweep(_WAYS[name]._replace(pass_="step"), ("kernelbench",), _NOT_2D, bias=True)
        for name in ("tf32", "bf16")
    },
    **{
        f"conv-{name}": Sweep(_WAYS[name]._replace(pass_="step"), ("convolutions",), bias=False)
        for name in ("tf32", "bf16")
    },
    **{f"frozen-{name}": Sweep(_WAYS[name], ("cuda", "field"), frozen=True) for name in ("tf32", "bf16")},
}
_BENCH = (sys.executable, "-m", "upconv", "bench", "--device", "cuda")
_CALLS = (sys.executable, str(HERE / "calls.py"))
COMMANDS: dict[str, tuple[str, ...]] = {
    "exported": (*_BENCH, "--suite", "kernelbench", "--as-exported"),
    "training": (*_BENCH, "--suite", "training"),
    **{name: (*_BENCH, *sweep.arguments()) for name, sweep in SWEEPS.items()},
    **{kind: (*_CALLS, kind) for kind in ("host", "shapes", "cold")},
}
"""What measures each report, but for ``--json``; the most important ones first."""
DONE, WRONG, TIME_UP = 0, 1, 3
_GRACE = 30.0
"""Seconds that an interrupted command has to write its report."""


def finished(path: Path, commit: str | None) -> bool:
    """Whether a report is there that is complete and of this commit."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return commit is not None and found.get("complete", False) and found["commit"] == commit


def measure(command: Sequence[str], seconds: float) -> int | None:
    """Runs a command; its exit code, or None if it was interrupted as the seconds were up."""
    process = subprocess.Popen(command)
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:  # the device hangs
        process.kill()
        process.wait()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(COMMANDS), help="some, by commas")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all reports")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where reports are written")
    parser.add_argument("--commit", default=env.commit(), help="of these sources, where git does not say")
    options = parser.parse_args()
    stem = re.sub(r"NVIDIA (\w+).*", r"\1", torch.cuda.get_device_name(0)).lower()
    end, code = time.monotonic() + options.budget, DONE
    for wanted in options.only:
        path = options.out / f"{stem}-{wanted}.json"
        if finished(path, options.commit):
            continue
        found = measure([*COMMANDS[wanted], "--json", str(path)], end - time.monotonic())
        if path.exists():
            report.save(json.loads(path.read_text()) | {"commit": options.commit}, path)
        if found is None:
            return TIME_UP
        print(f"{wanted}: exit code {found}", flush=True)
        code = WRONG if found else code
    return code


if __name__ == "__main__":
    sys.exit(main())
