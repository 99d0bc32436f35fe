"""The program that times tilings: what it times, what it believes, what it shows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from upconv import reference
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import H200
from upconv.problem import Pass, Problem

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import tilings


@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
def test_every_tiling_is_checked_and_timed(pass_: Pass) -> None:
    """One of a kind, the model's choice first; errors against float64 of the first and last image."""
    p = Problem.make(3, 8, 4, (5, 6), 3, 2, 1, bias=False).with_(precision="ieee", pass_=pass_)
    every = tilings.fastest(p, H200, 3, 10.0)
    assert len({tilings.kind(t) for _, t in every}) == 3 and every[0][0] == min(seconds for seconds, _ in every)
    running: list[Tiling] = []

    def prepare(t: Tiling, source: Tensor, weight: Tensor, out: Tensor) -> Callable[[], object]:
        def run() -> None:
            running.append(t)
            x = source.new_zeros(p.input_shape)
            right = (
                reference.forward(p, source, weight) if pass_ == "fwd" else reference.gradients(p, source, x, weight)[0]
            )
            out.copy_(right)
            if t is every[1][1]:
                out[-1, 0, 0, 0] += 1.0
            if t is every[2][1]:
                out[1, 0, 0, 0] = math.nan

        return run

    def take(run: Callable[[], object]) -> float:
        run()
        return 1e-3 * (1 + [t for _, t in every].index(running[-1]))

    found = tilings.measure(p, every, prepare, take, torch.device("cpu"))
    assert [one.seconds for one in found] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert found[0].error < 1e-6 < 1e-3 < found[1].error and found[2].error == math.inf
    console = Console(record=True, width=300)
    console.print(tilings.shown("x", p, [one._replace(error=0.0) for one in found[::-1]], H200))
    assert f"x ieee nchw {pass_}, 200.0% lost" in console.export_text()
    console.print(tilings.shown("x", p, found, H200))
    assert console.export_text().count("wrong") == 2


@pytest.mark.gpu
def test_tilings_are_timed_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert tilings.main(["--cases", "dcgan1", "--precisions", "bf16", "--most", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count("lost") == 4 and "wrong" not in out
