"""Exported files under KernelBench's rules: what is refused, what is judged wrong, what a report says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from upconv.bench import check, exported, files, suites, tables, timing
from upconv.bench import report as reports
from upconv.bench.suites import Case
from upconv.bench.timing import Repeats
from upconv.cli import app
from upconv.export.signatures import init_arguments
from upconv.problem import Problem

CPU = torch.device("cpu")
SHORT = Repeats(0.0, 3, 3)
MODELS = Path(__file__).resolve().parent.parent / "models"
SMALL = Case("kb57", Problem.make(2, 3, 4, (9, 10), 3))
# What a file looks like, with PyTorch's own gradient of a convolution in its kernel's place (refused, see `judged`).
GOOD = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, bias=False):
        super().__init__()
        self.conv_transpose2d = nn.ConvTranspose2d(in_channels, out_channels, kernel_size, bias=bias)

    def forward(self, x):
        return RUN(self.conv_transpose2d, x)

def build():
    pass
"""


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Judges a file for a small layer on the CPU; its kernel is the function given, its static check is off."""

    monkeypatch.setattr(exported, "refusal", lambda text: None)

    def judge(run: Any, text: str = GOOD, gradients: bool = False) -> dict[str, Any]:
        path = tmp_path / "model_57.py"
        path.write_text(text)
        real = exported.model

        def model(text: str, path: Path) -> Any:
            made = real(text, path)
            made.forward.__globals__["RUN"] = run  # type: ignore[attr-defined]
            return made

        monkeypatch.setattr(exported, "model", model)
        try:
            return exported.judge(exported.File(SMALL, path), CPU, gradients=gradients, repeats=SHORT)
        finally:
            monkeypatch.setattr(exported, "model", real)

    return judge


def test_a_right_file_is_timed_beside_pytorch_and_the_library(judged) -> None:
    found = judged(lambda layer, x: layer(x), gradients=True)
    assert found["worst"] == 0 and "failure" not in found
    assert found["grad_input_error"] == found["grad_weight_error"] == 0
    assert all(float(found[f"{side}_ms"] or 0) > 0 for side in ("ours", "torch", "library"))
    assert found["ratio"] == pytest.approx(found["torch_ms"] / found["ours_ms"])
    for side in ("ours", "torch", "library"):
        assert found[f"{side}_lower_ms"] <= found[f"{side}_ms"] <= found[f"{side}_upper_ms"]
    assert found["library_precision"] == "tf32" and found["runs"] == 3


@pytest.mark.parametrize(
    ("spoil", "worst"),
    [
        (lambda out: out * (1 + 5e-5), True),
        (lambda out: out + 2e-3, False),
        (lambda out: out[..., :-1], None),
        (lambda out: out * math.nan, None),
    ],
)
def test_what_differs_by_more_than_the_tolerance_is_wrong_and_not_timed(judged, spoil: Any, worst: bool | None) -> None:
    found = judged(lambda layer, x: spoil(layer(x)))
    assert (None if found["worst"] is None else found["worst"] <= 1) is worst
    assert ("differs" in found.get("failure", "")) == (not worst) == ("ours_ms" not in found)
    json.dumps(found, allow_nan=False)


def test_a_wrong_gradient_is_seen_when_asked_for(judged) -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad / 2

    assert "failure" not in judged(lambda layer, x: layer(Halved.apply(x)))
    found = judged(lambda layer, x: layer(Halved.apply(x)), gradients=True)
    assert "gradients" in found["failure"] and found["grad_input_error"] == pytest.approx(0.5)
    assert found["grad_weight_error"] == 0


def test_parameters_must_be_those_that_the_seed_draws(judged) -> None:
    other = GOOD.replace("super().__init__()", "super().__init__(); torch.rand(1)")
    assert "parameters" in judged(lambda layer, x: layer(x), other)["failure"]
    renamed = GOOD.replace("conv_transpose2d", "layer")
    assert "parameters" in judged(lambda layer, x: layer(x), renamed)["failure"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("y = nn.functional.conv2d(x, w)", "conv2d"),
        ("y = self.conv_transpose2d(x)", "self.conv_transpose2d"),
        ("y = self.conv1d_transpose(x)", "self.conv1d_transpose"),
        ("y = torch.cudnn_convolution_transpose(x)", "cudnn_convolution_transpose"),
        ("from torch.nn import functional as F", "torch.nn.functional"),
        ("import numpy", "numpy"),
        ("try:\n    x = 1\nfinally:\n    x = 2", "try"),
        ("if x:\n    pass", "the word pass"),
        ("import threading", "threads"),
        ("stream = torch.cuda.Stream()", "streams"),
        ("torch.cuda.synchronize = lambda: None", "times"),
        ("class Mine(torch.Tensor): ...", "subclass"),
        ("layer = nn.Linear(1, 1)", "a layer"),
        ('CUDA = """\nfor (int pass = 0; pass < 2; pass++) {}\n"""', "the word pass"),
        ('CUDA = """\nauto y = at::conv_transpose2d(x);\n"""', "at::conv_transpose2d"),
        ('CUDA = """\ncudnnConvolutionForward(h);\n"""', "cudnnConvolutionForward"),
        ("y = (", "no Python"),
    ],
)
def test_what_calls_pytorchs_convolution_is_refused(line: str, reason: str) -> None:
    assert reason in str(exported.refusal(f"import torch\nfrom torch import nn\n{line}\n"))


def test_a_file_may_hold_parameters_and_import_the_standard_library() -> None:
    text = "import math, functools\nfrom torch import nn\nfrom torch.utils import cpp_extension  # it must not pass\n"
    assert exported.refusal(f"{text}w = nn.Parameter(x)\nnn.init.uniform_(w)\nclass ModelNew(nn.Module): ...\n") is None
    with pytest.raises(ValueError, match="must define ModelNew"):
        exported.model("x = 1\n", Path("model_57.py"))
    with pytest.raises(ValueError, match=r"model_57\.py is refused: line 1 imports numpy"):
        exported.model("import numpy\n", Path("model_57.py"))


@pytest.mark.skipif(not MODELS.is_dir(), reason="the exported models are not there")
def test_the_exported_models_are_not_refused() -> None:
    found = exported.files(MODELS)
    assert [file.case.name for file in found] == [case.name for case in suites.SUITES["kernelbench"]]
    for file in found:
        made = exported.model(file.path.read_text(encoding="utf-8"), file.path)
        torch.manual_seed(exported.SEED)
        theirs = exported.Original(file.case)
        torch.manual_seed(exported.SEED)
        ours = made(*init_arguments(file.number, file.case.problem))
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()))


def test_originals_compute_their_case() -> None:
    for case in suites.SUITES["kernelbench"]:
        p = case.problem.with_(batch=1, size=(2,) * case.problem.rank)
        small = Case(case.name, p)
        out = exported.Original(small)(torch.rand(p.input_shape))
        assert tuple(out.shape) == p.output_shape


def test_builds_run_side_by_side_and_say_what_went_wrong(tmp_path: Path) -> None:
    right, wrong = tmp_path / "model_57.py", tmp_path / "model_65.py"
    right.write_text("from __future__ import annotations\ndef build():\n    open(__file__ + '.built', 'w').close()\n")
    wrong.write_text("def build():\n    raise RuntimeError('no nvcc here')\n")
    heard: list[str] = []
    every = exported.files(tmp_path)
    found = exported.build(every, heard.append)
    assert Path(f"{right}.built").exists() and found[right][1] == ""
    assert found[wrong][1].endswith("RuntimeError: no nvcc here") and len(heard) == 2


def row(name: str, **values: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(reports.KEYS["exported"])
    found.update(case=name, file=f"model_{name[2:]}.py", layer="64->64 k3 s1 p0 on 8x64x8x8", build_s=60.0)
    return {**found, **values}


def report(*rows: dict[str, Any]) -> reports.Report:
    return reports.build(rows, CPU, kind="exported")


TIMED: dict[str, Any] = {
    "torch_ms": 4.0, "ours_ms": 2.0, "library_ms": 1.95, "ratio": 2.0, "worst": 0.5, "library_precision": "tf32",
    "runs": 100,
}  # fmt: skip


def test_a_report_survives_its_file_and_shows_what_failed(tmp_path: Path) -> None:
    found = report(
        row("kb57", **TIMED), row("kb65", **{**TIMED, "library_ms": 1.0}), row("kb69", failure="build failed: no nvcc")
    )
    path = tmp_path / "exported.json"
    files.save(found, path)
    assert reports.load(path) == found
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    tables.show(found, console)
    text = console.export_text()
    assert "build failed: no nvcc" in text and "1.03x" in text and "grad-input" not in text
    assert "2 of 3 files correct, geometric mean 2.00x over PyTorch; 1 within 5% of upconv's layer" in text
    shown = tables.columns(report(row("kb57", **TIMED, grad_input_error=1e-4, grad_weight_error=2e-4)))
    assert [column.head for column in shown][-3:] == ["grad-input error", "grad-weight error", "build s"]
    assert [column.head for column in tables.columns(report(row("kb57", **TIMED, lines=1200)))][-2:] == [
        "lines",
        "build s",
    ]


def test_the_command_needs_a_gpu_and_the_files(tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["bench", *arguments])
        assert result.exit_code == 2
        return " ".join(result.output.split())

    begin = ("--suite", "kernelbench", "--as-exported", "--device", "cpu")
    assert "--models must be a folder with model_57.py" in said(*begin, "--models", str(tmp_path))
    (tmp_path / "model_57.py").write_text(GOOD)
    assert "--as-exported needs a CUDA GPU" in said(*begin, "--models", str(tmp_path))
    assert "model_65.py" in said(*begin, "--models", str(tmp_path), "--case", "kb65")
    assert "--case must be one of kb57" in said(*begin, "--models", str(tmp_path), "--case", "pix")
    assert "--suite kernelbench alone" in said("--as-exported")
    assert "--layer does not go with --as-exported; got '4,4,3'" in said(*begin, "--layer", "4,4,3")
    assert "--pass must be fwd or step" in said(*begin, "--pass", "grad-input")


@pytest.mark.gpu
def test_on_a_gpu_the_library_is_timed_with_the_precision_that_the_files_have() -> None:
    device = torch.device("cuda")
    case = Case("kb61", Problem.make(1, 8, 8, (6, 6, 6), 3))
    theirs = exported.Original(case).to(device)
    library = exported._library(case, theirs, device)
    x = exported.draw(case.problem.input_shape, device, 0)
    with torch.no_grad(), timing.precision_flags("ieee"):
        assert check.tolerance_used("tf32", library(x), theirs(x)) <= 1
    found = exported._times(library, theirs, library, x, "ieee", SHORT)
    assert set(found) == {"torch", "ours", "library"} and min(side.lower for side in found.values()) > 0
