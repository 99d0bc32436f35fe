"""Times tilings of the gather-GEMM on this machine's GPU beside the cost model's estimates.

    python benchmarks/tilings.py --cases kb57,kb81 --precisions bf16 --layouts channels_last

Of each layer the tilings that the model thinks fastest are timed, one of a kind, without packing. Every output is
checked against float64. A table a layer shows what its choice loses. Exit code 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from upconv import reference
from upconv.bench import run, timing
from upconv.bench.suites import SUITES, choose
from upconv.bench.timing import Repeats
from upconv.cuda import warming
from upconv.cuda.gemm import gather, gather_search
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import Gpu, gpu
from upconv.problem import LAYOUTS, Precision, Problem

TOLERANCE: dict[Precision, float] = {"tf32": 1e-3, "ieee": 1e-5, "fp16": 1e-3, "bf16": 8e-3}
"""Of the relative error against float64."""
REPEATS = Repeats(math.inf, 15, 15)


class Timed(NamedTuple):
    """A tiling: the model's estimate and the median, both in seconds, and the relative error."""

    tiling: Tiling
    estimate: float
    seconds: float
    error: float


def kind(t: Tiling) -> tuple[Any, ...]:
    """What makes tilings alike: of these one is timed."""
    return (
        t.sub, t.split, t.chunk, t.subs, t.width_subs, t.resident, t.runs, t.classes is None,
        t.whole is None, t.shuffle, t.drained, math.prod(t.tile) // 64,
    )  # fmt: skip


def fastest(p: Problem, on: Gpu, most: int, within: float) -> list[tuple[float, Tiling]]:
    """The fastest by the model of each `kind`, up to so many, that take up to ``within`` times the fastest of all."""
    kinds: dict[tuple[Any, ...], tuple[float, Tiling]] = {}
    ranked = sorted(((cost.seconds, t) for cost, t in gather_search.considered(p, on)), key=lambda pair: pair[0])
    for seconds, t in ranked:
        if seconds <= within * ranked[0][0]:
            kinds.setdefault(kind(t), (seconds, t))
    return list(kinds.values())[:most]


def truth(p: Problem, source: Tensor, weight: Tensor) -> Tensor:
    """Float64 results of a batch's first and last image."""
    one, images = p.with_(batch=1), (source[:1], source[-1:])
    if p.pass_ == "fwd":
        return torch.cat([reference.forward(one, image, weight) for image in images])
    x = source.new_zeros(one.input_shape)
    return torch.cat([reference.gradients(one, image, x, weight)[0] for image in images])


def measure(
    p: Problem, tilings: Sequence[tuple[float, Tiling]], on: Gpu, take: timing.Clock, device: torch.device
) -> list[Timed]:
    """Times tilings in turn on the same random tensors; weights are packed ahead."""
    given = timing.operands(p.with_(pass_="step"), device, 0)
    source = given.input if p.pass_ == "fwd" else given.grad
    assert source is not None
    out = torch.empty_like(given.grad if p.pass_ == "fwd" else given.input)
    right = truth(p, source, given.weight)
    runs, errors = {}, []
    for i, (_, t) in enumerate(tilings):
        prepared = gather.Choice(t, p, on).prepare(device.index)
        packed = given.weight if prepared._form(given.weight) == "in place" else prepared.pack(given.weight)
        runs[str(i)] = [lambda prepared=prepared, packed=packed: prepared.run(source, packed, None, out)]
        out.fill_(math.nan)
        runs[str(i)][0]()
        error = reference.relative_error(torch.cat([out[:1], out[-1:]]), right)
        errors.append(error if not out.isnan().any() else math.inf)
    taken = timing.interleave(runs, take, REPEATS)
    return [Timed(t, estimate, median(taken[str(i)]), errors[i]) for i, (estimate, t) in enumerate(tilings)]


def shown(name: str, p: Problem, found: Sequence[Timed], on: Gpu) -> Table:
    """A line a tiling, the model's choice first; the title says what that loses."""
    right = [one for one in found if one.error <= TOLERANCE[p.precision]]
    lost = f", {found[0].seconds / min(one.seconds for one in right) - 1:.1%} lost" if right else ""
    table = Table("estimate us", "us", "error", "tiling", title=f"{name} {p.precision} {p.layout} {p.pass_}{lost}")
    for one in found:
        seconds = f"{1e6 * one.seconds:.1f}" if one in right else "wrong"
        summary = gather.Choice(one.tiling, p, on).summary
        table.add_row(f"{1e6 * one.estimate:.1f}", seconds, f"{one.error:.1e}", summary)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("cases", ""), ("precisions", "tf32,bf16"), ("layouts", ",".join(LAYOUTS))):
        parser.add_argument(f"--{name}", type=split, default=split(default), help="joined by commas")
    parser.add_argument("--passes", type=split, default=["fwd", "grad-input"])
    parser.add_argument("--most", type=int, default=10, help="tilings of a layer")
    parser.add_argument("--within", type=float, default=1.5, help="times the best estimate that a tiling's may be")
    options = parser.parse_args()
    device, on, right = torch.device("cuda", 0), gpu(0), True
    console, take = Console(), timing.clock(device)
    ways = run.ways(device, (), options.precisions, options.layouts, options.passes)
    for job in run.jobs("cuda", choose(SUITES["cuda"], options.cases), ways, bias=False):
        p = job.problem
        if gather_search.refusal(p, on):
            continue
        tilings = fastest(p, on, options.most, options.within)
        warming.compile_all((gather.Choice(t, p, on).sources()[0], on.arch) for _, t in tilings)
        found = measure(p, tilings, on, take, device)
        right &= all(one.error <= TOLERANCE[p.precision] for one in found)
        console.print(shown(job.case, p, found, on))
    return int(not right)


def split(text: str) -> list[str]:
    """Names joined by commas."""
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
