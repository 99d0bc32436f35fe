"""The program that times tilings: what it times, what it believes, what it shows."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from upconv import reference
from upconv.cuda.axes import Unfit
from upconv.cuda.gemm import gather_cost
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import H200
from upconv.problem import Pass, Problem

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import tilings


def job(case: str, precision: Any = "bf16", layout: Any = "channels_last", pass_: Pass = "fwd") -> Problem:
    ((_, p),) = tilings.jobs([case], [precision], [layout], [pass_])
    return p


def estimated(cases: Iterable[str]) -> list[tilings.Timed]:
    """Tilings of some layers with the times that the model gives them."""
    jobs = ((case, job(case)) for case in cases)
    return [
        tilings.Timed(case, p, t, gather_cost.estimate(t, p, H200).seconds)
        for case, p in jobs
        for t in tilings.spread(tilings.ranked(p, H200), 12, 3.0)
    ]


@pytest.mark.parametrize(
    ("case", "precision", "layout", "pass_"),
    [
        ("kb81", "tf32", "nchw", "fwd"),
        ("fsrcnn", "bf16", "channels_last", "fwd"),
        ("unet1", "tf32", "channels_last", "grad-input"),
        ("dcgan1", "bf16", "nchw", "grad-input"),
    ],
)
def test_tilings_come_back_from_json(case: str, precision: Any, layout: Any, pass_: Pass) -> None:
    """Those with phases as rows and of whole images too; the model's choice is the first that is timed."""
    p = job(case, precision, layout, pass_)
    found = tilings.ranked(p, H200)
    timed = tilings.spread(found, 1000, 10.0)
    assert timed[0] == found[0][1] and len({tilings.kind(t) for t in timed}) == len(timed) > 3
    for t in timed:
        again = tilings.from_json(p, json.loads(json.dumps(tilings.as_json(t))), H200)
        assert again == t
    assert any(t.shuffle is not None for t in timed) == (case == "fsrcnn")
    assert any(t.whole is not None for t in timed) == (case == "dcgan1")


def test_a_tiling_that_no_longer_fits_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p = job("kb57")
    t = tilings.spread(tilings.ranked(p, H200), 1, 1.1)[0]
    head = {"case": "kb57", "precision": "bf16", "layout": "channels_last", "pass": "fwd"}
    rows = [
        {**head, "seconds": 1e-3, "tiling": tilings.as_json(t)},
        {**head, "seconds": None, "tiling": tilings.as_json(t)},
        {**head, "seconds": 1e-3, "tiling": {**tilings.as_json(t), "stages_p": 40}},
        {**head, "seconds": 1e-3, "tiling": {**tilings.as_json(t), "of_old": 1}},
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"rows": rows}))
    assert tilings.load([path], H200, Console()) == [tilings.Timed("kb57", p, t, 1e-3)]
    assert "2 tilings are none of the kernel's any more" in capsys.readouterr().out
    with pytest.raises(Unfit, match="shared memory"):
        tilings.from_json(p, rows[2]["tiling"], H200)  # type: ignore[arg-type]


@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
def test_every_tiling_is_checked_and_timed(pass_: Pass) -> None:
    """The clock's medians, for each its own; errors against float64 of the first and last image."""
    p = Problem.make(3, 8, 4, (5, 6), 3, 2, 1, bias=False).with_(precision="ieee", pass_=pass_)
    every = [t for _, t in tilings.ranked(p, H200)[:3]]
    clock = {id(t): 1e-3 * (i + 1) for i, t in enumerate(every)}
    running: list[int] = []

    def prepare(t: Tiling, source: Tensor, weight: Tensor, out: Tensor) -> Callable[[], object]:
        def run() -> None:
            running.append(id(t))
            x = source.new_zeros(p.input_shape)
            right = (
                reference.forward(p, source, weight) if pass_ == "fwd" else reference.gradients(p, source, x, weight)[0]
            )
            out.copy_(right)
            if t is every[1]:
                out[-1, 0, 0, 0] += 1.0
            if t is every[2]:
                out[1, 0, 0, 0] = math.nan

        return run

    count = iter(range(10**6))

    def take(run: Callable[[], object]) -> float:
        run()
        return clock[running[-1]] * (1 if next(count) else 50)  # the first run is an outlier

    found = tilings.measure(p, every, prepare, take, torch.device("cpu"), rounds=5)
    assert [seconds for seconds, _ in found] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert found[0][1] < 1e-6 < 1e-3 < found[1][1] and found[2][1] == math.inf
    assert running[3:6] == [id(t) for t in every] and running[6] == id(every[1])  # turns change


def test_layers_are_shown_with_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kb57 = estimated(["kb57"])
    chosen = min(kb57, key=lambda one: one.seconds)
    slower = [replace(one, seconds=one.seconds * (1.25 if one is chosen else 1.0)) for one in kb57]
    best = min(one.seconds for one in slower)
    rows = [
        {"case": "kb57", "precision": "bf16", "layout": "channels_last", "pass": "fwd", "seconds": one.seconds,
         "tiling": tilings.as_json(one.tiling)} for one in slower
    ]  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"rows": rows}))
    assert tilings.main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"{chosen.seconds * 1.25 / best - 1:.1%} lost by choices" in out and f"{best * 1e6:.1f}" in out


@pytest.mark.gpu
def test_tilings_are_timed_on_a_gpu(tmp_path: Path) -> None:
    """Every kind of a small layer's is right; a second run measures nothing anew."""
    path = tmp_path / "t.json"
    arguments = ["time", str(path), "--cases", "dcgan1", "--precisions", "bf16", "--most", "4"]
    assert tilings.main(arguments) == 0
    first = path.read_text()
    rows = json.loads(first)["rows"]
    assert {row["pass"] for row in rows} == {"fwd", "grad-input"} and all(row["seconds"] > 1e-6 for row in rows)
    assert tilings.main(arguments) == 0 and path.read_text() == first
    assert len(tilings.load([path], H200, Console())) == len(rows)
