"""What the programs here are asked for: names joined by commas, and layers of the suites in several ways."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch

from upconv.bench.suites import SUITES
from upconv.problem import Layout, Pass, Precision, Problem

DTYPES: dict[Precision, torch.dtype] = {
    "tf32": torch.float32, "ieee": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
LAYOUTS: tuple[Layout, ...] = ("nchw", "channels_last")


def some(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an argument that is some of the known names, joined by commas."""

    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"must be some of {','.join(known)}, got {name!r}")
        return text.split(",")

    return names


def add_arguments(parser: argparse.ArgumentParser, passes: Sequence[Pass]) -> None:
    """--cases, --precisions, --layouts and --passes; all layers of suite "cuda" by default, in TF32 and bfloat16."""
    cases = [case.name for case in SUITES["cuda"]]
    parser.add_argument("--cases", type=some(cases), default=cases, help="layers, joined by commas; all by default")
    parser.add_argument("--precisions", type=some(list(DTYPES)), default=["tf32", "bf16"])
    parser.add_argument("--layouts", type=some(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--passes", type=some(passes), default=list(passes))


def problems(
    cases: Sequence[str], precisions: Sequence[Precision], layouts: Sequence[Layout], passes: Sequence[Pass]
) -> Iterator[tuple[str, Problem]]:
    """Name and problem of each of these layers in each of these ways; 1-D layers have NCHW alone."""
    for case in SUITES["cuda"]:
        if case.name not in cases:
            continue
        of_rank = layouts if case.problem.rank > 1 else ("nchw",)
        for precision, layout, pass_ in product(precisions, of_rank, passes):
            how = {"dtype": DTYPES[precision], "precision": precision, "layout": layout, "pass_": pass_}
            yield case.name, case.problem.with_(**how)
