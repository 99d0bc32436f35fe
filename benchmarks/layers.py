"""What the programs here are asked for: names joined by commas, and layers of suite "cuda" in several ways."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from upconv.bench import run
from upconv.bench.suites import SUITES, choose
from upconv.problem import LAYOUTS, Pass


def some(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an argument that is some of the known names, joined by commas."""

    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"must be some of {','.join(known)}, got {name!r}")
        return text.split(",")

    return names


def add_arguments(parser: argparse.ArgumentParser, passes: Sequence[Pass]) -> None:
    """--cases, --precisions, --layouts and --passes; all layers by default, in TF32 and bfloat16."""
    cases = [case.name for case in SUITES["cuda"]]
    parser.add_argument("--cases", type=some(cases), default=cases, help="layers, joined by commas; all by default")
    parser.add_argument("--precisions", type=some(("tf32", "ieee", "fp16", "bf16")), default=["tf32", "bf16"])
    parser.add_argument("--layouts", type=some(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--passes", type=some(passes), default=list(passes))


def jobs(given: argparse.Namespace) -> list[run.Job]:
    """The layers that these arguments name, without a bias."""
    ways = run.ways(torch.device("cuda"), (), given.precisions, given.layouts, given.passes)
    return run.jobs("cuda", choose(SUITES["cuda"], given.cases), ways, small=False, bias=False)
