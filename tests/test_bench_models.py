"""The bench of whole models: steps and inference, eager and compiled, in both layouts; and rows with frozen weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import upconv
from measured import CPU, SHORT, TINY, ceilings
from upconv import modules
from upconv.bench import models, report, run, tables, training
from upconv.bench.run import Job

SIDES = (*training.EAGER, *training.COMPILED)
EVERY: dict[str, Any] = {"layouts": ("nchw", "channels_last"), "modes": ("step", "fwd")}


def case(name: str, scale: int = 16) -> models.Case:
    return next(case for case in models.cases(scale) if case.name == name)


def shown(found: report.Report, path: Path) -> str:
    """The table of a report that survives its file."""
    report.save(found, path)
    assert report.load(path) == found
    console = Console(record=True, width=400, file=(path.parent / "shown").open("w"))
    tables.show(found, console)
    return console.export_text()


# --- rows ------------------------------------------------------------------------------------------------------------


def test_inference_has_no_gradients_and_trains_nothing() -> None:
    one = training.Run(case("vae"), True, "nchw", "fwd")
    ours, theirs = (training.Trainer(one, side, CPU) for side in ("ours", "torch"))  # type: ignore[arg-type]
    before = [p.clone() for p in ours.networks[0].parameters()]
    (a,), (b,) = ours(), theirs()
    assert not a.requires_grad and not ours.networks[0].training
    assert all(torch.equal(x, y) for x, y in zip(before, ours.networks[0].parameters()))
    assert a.shape == b.shape and ((a - b).norm() / b.norm()).item() < training.WITHIN_OUTPUT


@pytest.mark.slow
def test_compiled_sides_have_times_and_a_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # no C++ compiler
    todo = training.runs([case("vae")], autocast=[True], **EVERY)
    heard: list[str] = []
    found = training.measure(CPU, todo, lambda text, **_: heard.append(text), SHORT)
    assert [(row["pass"], row["layout"]) for row in found["rows"]] == [
        ("step", "nchw"), ("step", "channels_last"), ("fwd", "nchw"), ("fwd", "channels_last"),
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["failure"] is None
        for side in SIDES:
            lower, middle, upper = (float(row[f"{side}{which}_ms"] or 0) for which in ("_lower", "", "_upper"))
            assert 0 < lower <= middle <= upper
        assert row["compile_ratio"] == pytest.approx(float(row["compile_ms"] or 0) / float(row["compile_ours_ms"] or 1))
    assert heard[:6] == [f"vae bf16 {side}" for side in (*SIDES, "times")]
    text = shown(found, tmp_path / "t.json")
    assert "torch.compile ms" in text and "torch.compile, with upconv ms" in text and "ratio, compiled" in text


def scaled(network: Any, factor: float) -> Any:
    list(network.parameters())[-2].data.mul_(factor)  # the last layer's weight
    return network


@pytest.mark.parametrize(
    ("compiled", "mode", "factor", "what"),
    [
        (False, "step", 3, "the first losses"),
        (False, "step", 1.5, "the first gradients' norms"),
        (True, "step", 3, "the first losses"),
        (True, "fwd", 3, "the outputs"),
    ],
)
def test_a_model_that_is_wrong_has_no_time(compiled: bool, mode: Any, factor: float, what: str, monkeypatch) -> None:
    """Ours itself, or ours where it is compiled alone."""

    def ours(network: nn.Module) -> bool:
        return any(getattr(m, modules.MARK, False) for m in network.modules())

    if compiled:
        monkeypatch.setattr(torch, "compile", lambda network: scaled(network, factor) if ours(network) else network)
    else:
        monkeypatch.setattr(training.upconv, "accelerate", lambda network, convolutions: scaled(network, factor))
    todo = training.runs([case("vae", 8)], autocast=[False], modes=[mode])
    (row,) = training.measure(CPU, todo, lambda *_, **__: None, SHORT, compiled=compiled)["rows"]
    assert str(row["failure"]).startswith(f"wrong: {what} differ by ") and row["ratio"] is None
    assert ("(compiled, with upconv)" in str(row["failure"])) == compiled


@pytest.mark.parametrize("both", [True, False])
def test_a_model_that_does_not_compile_says_why(both: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It does not cost the eager sides; that only ours does not compile is a failure."""

    def compiled(network: nn.Module) -> nn.Module:
        if both or any(getattr(m, modules.MARK, False) for m in network.modules()):
            raise RuntimeError("no such stride")
        return network

    monkeypatch.setattr(torch, "compile", compiled)
    todo = training.runs([case("vae")], autocast=[False], modes=["fwd"])
    found = training.measure(CPU, todo, lambda *_, **__: None, SHORT)
    (row,) = found["rows"]
    assert row["ratio"] > 0 and ("compile_ms" in row) is not both
    reason = "compiled, with upconv: RuntimeError: no such stride"
    assert row.get(
        "compile_ours_failure" if both else "failure"
    ) == reason and f"vae fp32 inference: {reason}" in shown(found, tmp_path / "t.json")
    assert bool(report.wrong(found["rows"])) is not both


def test_a_nan_behind_a_right_value_is_wrong() -> None:
    ours, theirs = ([("the losses", 0.1, [torch.ones(()), torch.tensor(v)])] for v in (float("nan"), 1.0))
    assert training._wrong(ours, theirs) == "the losses differ by nan" and training._wrong(theirs, theirs) is None


# --- frozen ----------------------------------------------------------------------------------------------------------


def spoilt(module: nn.Module) -> nn.Module:
    """In the place of `upconv.freeze`."""
    module.register_forward_hook(lambda module, given, out: out * 1.5)
    return module


def row(frozen: bool = True) -> report.Row:
    return run.row(Job("custom", "x", TINY), CPU, SHORT, ceilings(), frozen)


def test_frozen_weights_that_compute_wrongly_have_no_speed(shuffled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = row()
    assert right["failure"] is None and right["frozen_ms"] and right["frozen_ratio"], "upconv's own freeze"
    monkeypatch.setattr(upconv, "freeze", spoilt)
    found = row()
    assert str(found["failure"]).startswith("wrong result of frozen upconv: relative error 5.0e-01, PyTorch's ")
    assert found["ours_ms"] is None and "frozen_ms" not in found and found["rel_error"] == pytest.approx(0.5)
    assert row(frozen=False)["failure"] is None
