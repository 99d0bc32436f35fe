"""Times tilings of the gather-GEMM beside the model's choice.

    python benchmarks/tilings.py time out/t.json --cases kb57,kb81 --precisions bf16 --layouts channels_last
    python benchmarks/tilings.py show out/t.json                        what the model chooses of them, against the best

``time`` needs a GPU; it compiles on all cores, checks every output against float64, and writes the file again behind
each layer, so that a run that is stopped loses one layer at most and the next one goes on. ``show`` needs none.
Tilings that the kernel's present geometry does not allow are left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from h200 import sources
from layers import DTYPES, add_arguments, problems
from rich.console import Console
from rich.table import Table
from torch import Tensor

from upconv import reference
from upconv.bench import files, report, timing
from upconv.bench.suites import SUITES
from upconv.cpu import memory_format
from upconv.cuda.axes import Unfit, any_size, result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.gemm import gather, gather_cost, gather_search
from upconv.cuda.gemm.shuffle import Shuffle
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import H200, Gpu
from upconv.cuda.gpu import gpu as gpu_of
from upconv.problem import Layout, Pass, Precision, Problem

PASSES: tuple[Pass, ...] = ("fwd", "grad-input")
TOLERANCE: dict[Precision, float] = {"tf32": 1e-3, "ieee": 1e-5, "fp16": 1e-3, "bf16": 8e-3}
"""Of the relative error against float64."""
ROUNDS = 15

Job = tuple[str, Problem]


@dataclass(frozen=True)
class Timed:
    """A tiling of a layer's pass and what it took."""

    case: str
    problem: Problem
    tiling: Tiling
    seconds: float

    @property
    def layer(self) -> tuple[str, str, str, str]:
        p = self.problem
        return self.case, p.precision, p.layout, p.pass_


# --- tilings ---------------------------------------------------------------------------------------------------------


def ranked(p: Problem, gpu: Gpu) -> list[tuple[float, Tiling]]:
    """Every tiling that `gather.choose` looks at, with its estimate in seconds; the fastest first."""
    found = ((cost.seconds, t) for cost, t in gather_search.considered(p, gpu))
    return sorted(found, key=lambda pair: pair[0])


def kind(t: Tiling) -> tuple[Any, ...]:
    """What makes tilings alike: of these one is timed."""
    return (
        t.sub, t.split, t.chunk, t.subs, t.width_subs, t.resident, t.planewise, t.runs, t.classes is None,
        t.whole is None, t.shuffle, t.drained, math.prod(t.tile) // 64,
    )  # fmt: skip


def spread(found: Sequence[tuple[float, Tiling]], most: int, within: float) -> list[Tiling]:
    """The fastest by the model of each `kind`, up to so many, that take up to ``within`` times the fastest of all."""
    kinds: dict[tuple[Any, ...], Tiling] = {}
    for seconds, t in found:
        if seconds <= within * found[0][0]:
            kinds.setdefault(kind(t), t)
    return list(kinds.values())[:most]


def as_json(t: Tiling) -> dict[str, Any]:
    """A tiling without its problem."""
    found = {f.name: getattr(t, f.name) for f in fields(t) if f.name not in ("problem", "shuffle")}
    return {**found, "shuffle": None if t.shuffle is None else {"ahead": t.shuffle.ahead}}


def from_json(p: Problem, found: dict[str, Any], gpu: Gpu) -> Tiling:
    """The tiling for a layer. Errors: `Unfit` where the kernel can no longer run it, TypeError for other fields."""
    layer = any_size(p)
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    shuffle = values.pop("shuffle")
    if shuffle is not None:
        values["shuffle"] = Shuffle(layer, **shuffle)
        layer = values["shuffle"].unstrided
    return Tiling(layer, **values).checked(gpu.shared_bytes)


# --- time ------------------------------------------------------------------------------------------------------------


def jobs(
    cases: Sequence[str], precisions: Sequence[Precision], layouts: Sequence[Layout], passes: Sequence[Pass]
) -> Iterator[Job]:
    """Layers of the suites in these ways, without a bias."""
    return ((case, p.with_(bias=False)) for case, p in problems(cases, precisions, layouts, passes))


def truth(p: Problem, source: Tensor, weight: Tensor) -> Tensor:
    """Float64 results of a batch's first and last image."""
    images = [source[:1], source[-1:]]
    one = p.with_(batch=1)
    if p.pass_ == "fwd":
        return torch.cat([reference.forward(one, image, weight) for image in images])
    x = source.new_zeros(one.input_shape)
    return torch.cat([reference.gradients(one, image, x, weight)[0] for image in images])


Run = Callable[[], object]
Prepare = Callable[[Tiling, Tensor, Tensor, Tensor], Run]
"""Of a tiling, source, weight and result: what writes the result."""


def prepare_on(p: Problem, gpu: Gpu, device: torch.device) -> Prepare:
    """Loads a tiling's kernels and packs its weights."""

    def prepare(t: Tiling, source: Tensor, weight: Tensor, out: Tensor) -> Run:
        with torch.cuda.device(device):
            prepared = gather.Choice(t, p, gpu).prepare(device.index)
            packed = prepared.pack(weight)
        return lambda: prepared.run(source, packed, None, out)

    return prepare


def measure(
    p: Problem,
    tilings: Sequence[Tiling],
    prepare: Prepare,
    take: timing.Clock,
    device: torch.device,
    rounds: int = ROUNDS,
) -> list[tuple[float, float]]:
    """(seconds, relative error) of each tiling, without packing: interleaved on the same random tensors, medians."""
    generator = torch.Generator(device).manual_seed(0)
    layout = memory_format(p.layout, p.rank)

    def draw(shape: tuple[int, ...]) -> Tensor:
        found = torch.randn(shape, generator=generator, dtype=p.dtype, device=device)
        return found.contiguous(memory_format=layout)

    source, out = draw(source_shape(p)), draw(result_shape(p))
    weight = torch.randn(p.weight_shape, generator=generator, dtype=p.dtype, device=device)
    right = truth(p, source, weight)
    runs, errors = [], []
    for t in tilings:
        run = prepare(t, source, weight, out)
        out.fill_(math.nan)
        run()
        error = reference.relative_error(torch.cat([out[:1], out[-1:]]), right)
        errors.append(error if not out.isnan().any() else math.inf)
        runs.append(run)
    times: list[list[float]] = [[] for _ in runs]
    for i in range(rounds):
        for j in range(len(runs)):
            j = (i + j) % len(runs)
            times[j].append(take(runs[j]))
    return [(median(found), error) for found, error in zip(times, errors)]


def time_all(options: argparse.Namespace, console: Console) -> int:
    device = torch.device("cuda", 0)
    gpu, end = gpu_of(0), time.monotonic() + options.budget
    base: dict[str, Any] = report.build([], device)
    base["versions"]["sources"] = sources()
    if options.file.exists():
        before = json.loads(options.file.read_text(encoding="utf-8"))
        if before["versions"].get("sources") == sources() and before["device"].get("name") == base["device"].get(
            "name"
        ):
            base["rows"] = before["rows"]
    known = {(row["case"], row["precision"], row["layout"], row["pass"]) for row in base["rows"]}
    options.file.parent.mkdir(parents=True, exist_ok=True)
    take, right = timing.clock(device), True
    for case, p in jobs(options.cases, options.precisions, options.layouts, options.passes):
        name = case, p.precision, p.layout, p.pass_
        if name in known or gather_search.refusal(p, gpu):
            continue
        if time.monotonic() > end:
            console.print("the time is up")
            return 3
        tilings = spread(ranked(p, gpu), options.most, options.within)
        compile_all(tilings, p, gpu)
        rows = []
        for t, (seconds, error) in zip(tilings, measure(p, tilings, prepare_on(p, gpu, device), take, device)):
            wrong = not error <= TOLERANCE[p.precision]
            right &= not wrong
            estimate = gather_cost.estimate(t, p, gpu).seconds
            head = dict(zip(("case", "precision", "layout", "pass"), name))
            rows.append({**head, "seconds": None if wrong else seconds, "rel_error": str(error), "tiling": as_json(t)})
            what = "wrong" if wrong else f"{seconds * 1e6:9.1f} us, by the model {estimate * 1e6:9.1f}"
            console.print(f"{' '.join(name):40} {what}  {gather.Choice(t, p, gpu).summary}", soft_wrap=True)
        base["rows"] += rows
        files.save(base, options.file)
    return 0 if right else 1


def compile_all(tilings: Sequence[Tiling], p: Problem, gpu: Gpu) -> None:
    """Leaves all their kernels in the cache; NVRTC compiles on several threads."""
    units = [unit for t in tilings for unit in gather.Choice(t, p, gpu).sources()[:1]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda unit: jit.cubin(unit.source, gpu.arch, unit.label), units))


# --- show ------------------------------------------------------------------------------------------------------------


def load(paths: Iterable[Path], gpu: Gpu, console: Console) -> list[Timed]:
    """What was timed rightly and still can run."""
    cases = {case.name: case.problem for case in SUITES["cuda"]}
    found, left = [], 0
    for path in paths:
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["seconds"] is None:
                continue
            p = cases[row["case"]].with_(
                dtype=DTYPES[row["precision"]], precision=row["precision"], layout=row["layout"], pass_=row["pass"],
                bias=False,
            )  # fmt: skip
            try:
                found.append(Timed(row["case"], p, from_json(p, row["tiling"], gpu), row["seconds"]))
            except (Unfit, TypeError):
                left += 1
    if left:
        console.print(f"{left} tilings are none of the kernel's any more")
    return found


def by_layer(timed: Iterable[Timed]) -> dict[tuple[str, str, str, str], list[Timed]]:
    found = defaultdict(list)
    for one in timed:
        found[one.layer].append(one)
    return dict(found)


@dataclass(frozen=True)
class Judged:
    """A model against times of some layers."""

    chosen: tuple[float, ...]
    """Of each layer, the seconds of the tiling that the model takes of those timed,"""
    best: tuple[float, ...]
    """and of the best."""
    error: float
    """Of a time, as a share: the root mean square of the logarithms."""

    @property
    def lost(self) -> float:
        """What choices take more than the best, as a share, on average."""
        return fmean(chosen / best for chosen, best in zip(self.chosen, self.best)) - 1


def taken(timed: Sequence[Timed], gpu: Gpu) -> tuple[Timed, Timed, list[float]]:
    """Of a layer's tilings the one that the model takes and the best, and the model's estimates of all."""
    estimates = [gather_cost.estimate(one.tiling, one.problem, gpu).seconds for one in timed]
    chosen = timed[min(range(len(timed)), key=lambda i: estimates[i])]
    return chosen, min(timed, key=lambda one: one.seconds), estimates


def judge(layers: Iterable[Sequence[Timed]], gpu: Gpu) -> Judged:
    """The model as it is."""
    every, errors = [], []
    for timed in layers:
        chosen, best, estimates = taken(timed, gpu)
        every.append((chosen.seconds, best.seconds))
        errors += [math.log(e / one.seconds) ** 2 for e, one in zip(estimates, timed)]
    by_model, least = zip(*every)
    return Judged(by_model, least, math.sqrt(fmean(errors)))


def show(timed: Sequence[Timed], gpu: Gpu, console: Console) -> None:
    """A line for each layer: the best, what the model chooses, and what it thinks of both."""
    table = Table("layer", "tilings", "best us", "chosen us", "lost %", "model: best", "chosen", "the best")
    for name, found in by_layer(timed).items():
        chosen, best, estimates = taken(found, gpu)
        lost = chosen.seconds / best.seconds - 1
        table.add_row(
            " ".join(name), str(len(found)), f"{best.seconds * 1e6:.1f}", f"{chosen.seconds * 1e6:.1f}", f"{lost:.1%}",
            f"{estimates[found.index(best)] * 1e6:.1f}", f"{min(estimates) * 1e6:.1f}",
            "" if best is chosen else gather.Choice(best.tiling, best.problem, gpu).summary,
        )  # fmt: skip
    console.print(table)
    found = judge(by_layer(timed).values(), gpu)
    console.print(f"{found.lost:.1%} lost by choices, times off by {found.error:.1%}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)

    timing_ = actions.add_parser("time", help="time tilings on this machine's GPU")
    timing_.add_argument("file", type=Path, help="where the times are written and gone on with")
    add_arguments(timing_, PASSES)
    timing_.add_argument("--most", type=int, default=10, help="tilings of a layer")
    timing_.add_argument("--within", type=float, default=1.5, help="times the best estimate that a tiling's may be")
    timing_.add_argument("--budget", type=float, default=3600.0, help="seconds; no layer begins after them")
    showing = actions.add_parser("show", help="the model's choices against the best")
    showing.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    console = Console()
    if options.action == "time":
        if not torch.cuda.is_available():
            parser.error("PyTorch finds no CUDA device here")
        return time_all(options, console)
    timed = load(options.files, H200, console)
    if not timed:
        parser.error(f"FILES must have times of tilings, got none in {', '.join(map(str, options.files))}")
    show(timed, H200, console)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
