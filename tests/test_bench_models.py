"""The bench of whole models: steps and inference, eager and compiled, in both layouts; and rows with frozen weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import upconv
from measured import CPU, LAYER, SHORT, TINY, command, fast_fixture, plans_fixture  # noqa: F401
from upconv import cpu, modules
from upconv.bench import files, models, report, run, tables, timing, training
from upconv.bench.run import How, Job

SIDES = (*training.EAGER, *training.COMPILED)
EVERY: dict[str, Any] = {"layouts": ("nchw", "channels_last"), "modes": ("step", "fwd")}


def case(name: str, scale: int = 16) -> models.Case:
    return next(case for case in models.cases(scale) if case.name == name)


def shown(found: report.Report, path: Path) -> str:
    """The table of a report that survives its file."""
    files.save(found, path)
    assert report.load(path) == found
    console = Console(record=True, width=400, file=(path.parent / "shown").open("w"))
    tables.show(found, console)
    return console.export_text()


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_every_combination_that_exists() -> None:
    names = [one.name for one in training.runs(models.cases(16), **EVERY)]
    assert len(names) == len(set(names)) == 3 * 8 + 4
    assert names[:8] == [
        "dcgan fp32", "dcgan bf16", "dcgan fp32 channels_last", "dcgan bf16 channels_last", "dcgan fp32 inference",
        "dcgan bf16 inference", "dcgan fp32 channels_last inference", "dcgan bf16 channels_last inference",
    ]  # fmt: skip
    assert not any("channels_last" in name for name in names if name.startswith("hifigan"))
    assert [one.name for one in training.runs([case("unet")])] == ["unet fp32", "unet bf16"]


def test_channels_last_is_that_of_weights_and_inputs() -> None:
    for layout, strided in (("nchw", False), ("channels_last", True)):
        trainer = training.Trainer(training.Run(case("vae"), False, layout), "ours", CPU)  # type: ignore[arg-type]
        tensors = [*trainer.given, *(p for network in trainer.networks for p in network.parameters() if p.dim() == 4)]
        last = [t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in tensors]
        assert any(last) == strided


def test_training_steps(tmp_path: Path) -> None:
    """Every model in both precisions, ours beside PyTorch's; a report that is kept and shown."""
    heard: list[str] = []
    todo = models.cases(16)
    found = training.measure(CPU, training.runs(todo), lambda text, *_: heard.append(text), SHORT, compiled=False)
    assert [row["case"] for row in found["rows"]] == [f"{c.name} {t}" for c in todo for t in ("fp32", "bf16")]
    for row in found["rows"]:
        assert row["failure"] is None
        for ratio, side in (("ratio", "ours"), ("convolutions_ratio", "convolutions")):
            assert row[ratio] == pytest.approx(row["torch_ms"] / row[f"{side}_ms"])
        assert "compile_ms" not in row and row["ours_peak_bytes"] is None
    assert heard[:4] == ["dcgan fp32 ours", "dcgan fp32 convolutions", "dcgan fp32 torch", "dcgan fp32 times"]
    text = shown(found, tmp_path / "t.json")
    assert "hifigan bf16" in text and "Adam" in text


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
    found = training.measure(CPU, todo, lambda text, *_: heard.append(text), SHORT)
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


def test_a_compiler_that_fails_costs_its_times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(network: nn.Module) -> nn.Module:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    todo = training.runs([case("vae")], autocast=[False])
    (row,) = training.measure(CPU, todo, print, SHORT)["rows"]
    assert row["failure"] is None and row["ratio"] and "compile_ms" not in row and "compile_ratio" not in row


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
    (row,) = training.measure(CPU, todo, print, SHORT, compiled=compiled)["rows"]
    assert str(row["failure"]).startswith(f"wrong: {what} differ by ") and row["ratio"] is None
    assert ("(compiled, with upconv)" in str(row["failure"])) == compiled


def test_on_a_cpu_only_eager_steps_run_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], bool]] = []

    def measure(device: torch.device, todo: list[training.Run], tell: object, *, compiled: bool) -> Any:
        asked.append(([one.name for one in todo], compiled))
        return report.gather([], device, kind="training", layer="models")

    monkeypatch.setattr(training, "measure", measure)

    def bench(*arguments: str) -> tuple[list[str], bool]:
        assert command("bench", "--suite", "training", "--device", "cpu", *arguments)[0] == 0
        return asked[-1]

    plain, compiled = bench()
    assert compiled is False and len(plain) == 8 and not any("inference" in n or "last" in n for n in plain)
    every, compiled = bench("--compiled")
    assert compiled is True and len(every) == 28
    some = bench("--case", "unet", "--dtype", "bfloat16", "--pass", "fwd", "--layout", "all")
    assert some == (["unet bf16 inference", "unet bf16 channels_last inference"], False)


# --- frozen ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ours(plans: Any) -> None:
    """Plans that are ours on a CPU."""
    plans("shuffle")


class Kept:
    """What `upconv.freeze` promises, by a stand-in: it remembers the modules, and may spoil what they compute."""

    def __init__(self, spoilt: float = 1.0) -> None:
        self.modules: list[nn.Module] = []
        self.spoilt = spoilt

    def __call__(self, module: nn.Module) -> nn.Module:
        self.modules.append(module)
        if self.spoilt != 1.0:
            module.register_forward_hook(lambda module, given, out: out * self.spoilt)
        return module


def row(pass_: Any = "fwd", frozen: bool = True) -> report.Row:
    return run.row(Job("custom", "x", TINY.with_(pass_=pass_)), CPU, How(SHORT, frozen=frozen))


def test_forwards_are_those_of_accelerated_modules(ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = timing.operands(TINY, CPU, 0)
    module = timing.layer("ours", TINY, given)
    assert type(timing.layer("torch", TINY, given)) is nn.ConvTranspose2d and isinstance(module, nn.ConvTranspose2d)
    assert module.weight.data_ptr() == given.weight.data_ptr() and not module.training
    seen: list[str] = []
    real = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda p, plan, *rest: seen.append(plan) or real(p, plan, *rest))
    for side, count in (("torch", 0), ("ours", 1)):
        (out,) = timing.work(side, TINY, given)()  # type: ignore[arg-type]
        assert len(seen) == count and not out.requires_grad
    assert seen == ["shuffle"]


def test_a_row_is_timed_three_ways(ours: None, plans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze = Kept()
    monkeypatch.setattr(upconv, "freeze", freeze)
    taken = {"ours": (2.0, 3.0, 4.0), "frozen": (1.0, 2.0, 3.0), "torch": (6.0, 6.0, 6.0)}
    monkeypatch.setattr(
        timing, "interleave", lambda runs, take, repeats: {name: [1e-3 * v for v in taken[name]] for name in runs}
    )
    found = row()
    assert found["failure"] is None
    assert [found[key] for key in ("ours_ms", "frozen_ms", "torch_ms", "ratio", "frozen_ratio")] == pytest.approx(
        [3, 2, 6, 2, 3]
    )
    assert (found["frozen_lower_ms"], found["frozen_upper_ms"]) == (pytest.approx(1.5), pytest.approx(2.5))
    addresses = {module.weight.data_ptr() for module in freeze.modules}
    assert len(freeze.modules) == 1 + 4 == len(addresses), "the check's and one for each set of inputs"
    plain, gradient = row(frozen=False), row("grad-input")
    assert gradient["failure"] is None and not {"frozen_ms", "frozen_ratio"} & {*plain, *gradient}
    assert len(freeze.modules) == 5
    plans("native")
    native = row()
    assert native["frozen_ratio"] == native["ratio"] == 1.0 and native["frozen_ms"] == native["torch_ms"]


def test_frozen_weights_that_compute_wrongly_have_no_speed(ours: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = row()
    assert right["failure"] is None and right["frozen_ms"] and right["frozen_ratio"], "upconv's own freeze"
    monkeypatch.setattr(upconv, "freeze", Kept(1.5))
    found = row()
    assert str(found["failure"]).startswith("wrong result of frozen upconv: relative error 5.0e-01, PyTorch's ")
    assert found["ours_ms"] is None and "frozen_ms" not in found and found["rel_error"] == pytest.approx(0.5)
    assert row(frozen=False)["failure"] is None


def test_the_command_shows_and_keeps_frozen_rows(ours: None, fast: None, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    code, out = command("bench", *LAYER, "--device", "cpu", "--frozen", "--json", str(file))
    (found,) = json.loads(file.read_text())["rows"]
    assert code == 0 and found["frozen_ratio"] == pytest.approx(found["torch_ms"] / found["frozen_ms"])
    assert "frozen ms" in out and f"{found['frozen_ratio']:.2f}x of the same rows with upconv.freeze" in out
