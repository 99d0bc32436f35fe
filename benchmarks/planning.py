"""How long the planner takes for a pass that it has not seen, in process time: random layers and the suites' rows.

    python benchmarks/planning.py                  1,000 random layers and every suite, into results/planning.json
    python benchmarks/planning.py --random 50 --suites kernelbench --out /tmp/planning.json

Every search starts without the answers of earlier ones. Plans need no GPU. Exit code: 0, or 1 where a pass takes more
than ``--most`` seconds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import sys
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from upconv import env, planner
from upconv.bench import run
from upconv.bench.report import save
from upconv.bench.suites import SUITES
from upconv.cuda import families
from upconv.cuda.gpu import A100, B200, H200, RTX4090, Gpu
from upconv.problem import LAYOUTS, PRECISIONS, Pass, Precision, Problem, output_length

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "planning.json"
PASSES: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight")
GPUS = (H200, A100, RTX4090, B200)
WAYS: tuple[tuple[torch.dtype, Precision], ...] = tuple(
    (dtype, precision) for dtype, precisions in PRECISIONS.items() for precision in precisions
)
MOST_PIXELS = 4096 * 4096


def random_layer(draw: random.Random) -> Problem:
    """A valid layer of any size: most of its numbers are small, some are as large as layers can be."""
    while True:
        try:
            return _drawn(draw)
        except ValueError:
            continue  # the padding leaves no output


def _drawn(draw: random.Random) -> Problem:
    def upto(most: int) -> int:
        return max(1, int((most + 1) ** draw.random()))

    rank = draw.choice((1, 2, 2, 3))
    alike = draw.random() < 0.6
    kernels, strides, sizes = [upto(64)], [upto(draw.choice((4, 16, 5000)))], [upto(4096)]
    for _ in range(rank - 1):
        kernels.append(kernels[0] if alike else upto(64))
        strides.append(strides[0] if alike else upto(draw.choice((4, 16, 5000))))
        sizes.append(upto(4096))
    while functools.reduce(int.__mul__, sizes) > MOST_PIXELS:
        sizes = [-(-n // 2) for n in sizes]
    dilation = draw.choice((1, 1, 1, upto(8), upto(64)))
    padding = [draw.choice((0, 0, k // 2, draw.randint(0, k))) for k in kernels]
    extra = [draw.choice((0, 0, draw.randint(0, max(s, dilation) - 1))) for s in strides]
    if any(output_length(*axis, dilation) < 1 for axis in zip(sizes, kernels, strides, padding, extra)):
        raise ValueError("no output")
    channels, outputs = upto(2048), upto(2048)
    groups = draw.choice((1, 1, 1, 1, upto(32), channels))
    dtype, precision = draw.choice(WAYS)
    return Problem.make(
        upto(256), -(-channels // groups) * groups, -(-outputs // groups) * groups, sizes, kernels, strides, padding,
        extra, dilation, groups, dtype=dtype, precision=precision,
        layout=draw.choice(LAYOUTS) if rank > 1 else "nchw",
    )  # fmt: skip


def random_layers(count: int, seed: int) -> list[Problem]:
    """So many of `random_layer`."""
    draw = random.Random(seed)
    return [random_layer(draw) for _ in range(count)]


def suite_rows(names: Iterable[str]) -> list[Problem]:
    """Every layer of these suites once, in every precision and both layouts."""
    ways = run.ways(torch.device("cuda"), list(PRECISIONS), [precision for _, precision in WAYS], LAYOUTS)
    jobs = (job for name in names for job in run.jobs(name, SUITES[name], ways))
    return list(dict.fromkeys(job.problem for job in jobs))


def caches() -> list[Callable[[], None]]:
    """What empties each cache of answers that the package has."""
    wrappers = [found for found in gc.get_objects() if type(found) is functools._lru_cache_wrapper]
    kept = ("upconv.derived", "upconv.bench")  # what classes have, whatever is planned
    return [
        found.cache_clear
        for found in wrappers
        if (module := str(getattr(found, "__module__", ""))).startswith("upconv") and not module.startswith(kept)
    ]


def seconds(p: Problem, pass_: Pass, gpu: Gpu, clear: Iterable[Callable[[], None]]) -> float:
    """Process time of a search without earlier answers."""
    for empty in clear:
        empty()
    p, device = p.with_(pass_=pass_), planner.Device("cuda", gpu=gpu)
    begin = time.process_time()
    planner.select(p, device)
    return time.process_time() - begin


def measured(rows: Iterable[tuple[Problem, Gpu]]) -> dict[str, Any]:
    """Median, 95th percentile and maximum of each pass, and the slowest row.

    Python's collections of garbage go through what the searches have made alone: through all of PyTorch's objects, one
    of them takes longer than the search that it happens to interrupt.
    """
    for pass_ in PASSES:  # loads every family's module
        families.choose(Problem.make(1, 8, 8, (8, 8), 3, 2, pass_=pass_), H200)
    clear = caches()
    found: dict[str, list[tuple[float, str]]] = {pass_: [] for pass_ in PASSES}
    gc.collect()
    gc.freeze()
    try:
        for p, gpu in rows:
            for pass_ in PASSES:
                found[pass_].append((seconds(p, pass_, gpu, clear), f"{p.with_(pass_=pass_)} ({gpu.name})"))
    finally:
        gc.unfreeze()
    return {pass_: _summary(timed) for pass_, timed in found.items() if timed}


def _summary(timed: list[tuple[float, str]]) -> dict[str, Any]:
    times = [spent for spent, _ in timed]
    slowest, name = max(timed)
    p95 = quantiles(times, n=20)[-1] if len(times) > 1 else times[0]
    return {"rows": len(times), "median_s": median(times), "p95_s": p95, "max_s": slowest, "slowest": name}


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--random", type=int, default=1000, help="how many random layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suites", default=",".join(SUITES), help="names, joined by commas")
    parser.add_argument("--most", type=float, default=0.2, help="seconds that a pass may take")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(arguments)
    layers = random_layers(args.random, args.seed)
    sets = {
        "random": [(p, GPUS[i % len(GPUS)]) for i, p in enumerate(layers)],
        "suites": [(p, H200) for p in suite_rows(filter(None, args.suites.split(",")))],
    }
    report: dict[str, Any] = {
        "versions": env.versions(), "commit": env.commit(), "device": env.device(torch.device("cpu")),
        "date": date.today().isoformat(), "seed": args.seed, "load": env.load_average(), "sets": {},
    }  # fmt: skip
    worst = 0.0
    for name, rows in sets.items():
        report["sets"][name] = found = measured(rows)
        for pass_, one in found.items():
            worst = max(worst, one["max_s"])
            times = ", ".join(f"{key} {1e3 * one[f'{key}_s']:.1f} ms" for key in ("median", "p95", "max"))
            print(f"{name} {pass_}: {one['rows']} rows, {times}; slowest {one['slowest']}", flush=True)
    save(report, args.out)
    return int(worst > args.most)


if __name__ == "__main__":
    sys.exit(main())
