"""Random layers against the float64 reference, by the checks of the test suite, in several processes for a while.

    python benchmarks/random_layers.py --seconds 90 --processes 15         this machine's GPU, or else its CPU
    python benchmarks/random_layers.py --device cpu --json FILE            default: results/random/cpu.json or h200.json

On a GPU a layer's forward and gradients are computed twice and must have the same bits; float32 also as TF32. On a CPU
a layer is computed by the plan that the planner chooses, and its forward by every other plan too. Processes draw from
seeds of their own. Exit code 1 for a wrong layer.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402

import test_cpu_engine  # noqa: E402
import test_gradients  # noqa: E402
from strategies import gradient_problems, problems  # noqa: E402
from upconv.bench.report import gather, save  # noqa: E402
from upconv.problem import Problem  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "random"
_MOST = 1_000_000


class _TimeUp(BaseException):
    """Ends a process's draws; no test catches it."""


def _run(test: Any, *args: Any) -> None:
    """A property test on one layer."""
    test.hypothesis.inner_test(*args)


def check(device: str, p: Problem) -> None:
    """Raises for a layer that is wrong."""
    if device == "cpu":
        _run(test_cpu_engine.test_the_public_function_and_its_gradients, set(), p)
        _run(test_cpu_engine.test_every_admitted_plan_computes_the_forward, None, p)
    else:
        _run(test_gradients.test_gpu_random_problems, p)


def draw(device: str, number: int, seconds: float) -> tuple[int, list[str]]:
    """How many layers of a seed were compared in so many seconds, and those that were wrong."""
    torch.set_num_threads(1)
    end, layers, wrong = time.monotonic() + seconds, 0, list[str]()

    @seed(number)
    @settings(
        max_examples=_MOST,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(p=gradient_problems() if device == "cpu" else problems())
    def compare(p: Problem) -> None:
        nonlocal layers
        if time.monotonic() > end:
            raise _TimeUp
        try:
            check(device, p)
        except Exception as error:
            wrong.append(f"{p}: {type(error).__name__}: {str(error)[:500]}")
        layers += 1

    with contextlib.suppress(_TimeUp):
        compare()
    return layers, wrong


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The report: a row for each seed."""
    seeds = range(options.seed, options.seed + options.processes)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        jobs = [(number, pool.submit(draw, options.device, number, options.seconds)) for number in seeds]
        rows = ({"seed": n, **dict(zip(("layers", "wrong"), job.result()))} for n, job in jobs)
        return gather(rows, torch.device(options.device), "random")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="of the first process")
    parser.add_argument("--json", type=Path, help="where the report is written")
    options = parser.parse_args()
    found = measure(options)
    save(found, options.json or RESULTS / ("cpu.json" if options.device == "cpu" else "h200.json"))
    wrong = [line for row in found["rows"] for line in row["wrong"]]
    print("\n".join([*wrong, f"{sum(row['layers'] for row in found['rows'])} layers, {len(wrong)} wrong"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
