"""Exported files: what KernelBench's static check would refuse, their parameters, and how the bench measures them."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from measured import CPU, SHORT, command
from upconv.bench import exported, report, suites, tables
from upconv.export import check, source
from upconv.export.command import Checked
from upconv.export.signatures import init_arguments
from upconv.modules import TRANSPOSED
from upconv.problem import Problem

MODELS = Path(__file__).resolve().parent.parent / "models"
CASES = suites.SUITES["kernelbench"]

# --- the static check ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("y = self.conv_transpose2d(x)", "self.conv_transpose2d"),
        ("y = torch.cudnn_convolution_transpose(x)", "cudnn_convolution_transpose"),
        ("y = torch.convolution(x, w)", "torch.convolution"),
        ("y = F.conv_transpose2d(x, w)", "torch.nn.functional"),
        ("from torch.nn import functional as F", "torch.nn.functional"),
        ("import torch.nn.functional as f", "nn.functional"),
        ("import numpy", "numpy"),
        ("try:\n    x = 1\nfinally:\n    x = 2", "try"),
        ("layer = nn.Linear(1, 1)", "a layer"),
        ('CUDA = """\nfor (int pass = 0; pass < 2; pass++) {}\n"""', "the word pass"),
        ('CUDA = """\nauto y = at::conv_transpose2d(x);\n"""', "at::conv_transpose2d"),
        ('CUDA = """\ntorch::nn::ConvTranspose2d layer(o);\n"""', "torch::nn::ConvTranspose2d"),
        ('CUDA = """\ncudnnConvolutionForward(h);\n"""', "cudnnConvolutionForward"),
    ],
)
def test_what_calls_pytorchs_convolution_is_refused(line: str, reason: str) -> None:
    assert reason in str(exported.refusal(f"import torch\nfrom torch import nn\n{line}\n"))


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_files_of_other_layers_are_not_refused(rank: int) -> None:
    """They have torch.nn's constructor in place of a problem's."""
    assert exported.refusal(source(Problem.make(2, 4, 4, (9,) * rank, 3), "80", forward_only=True)) is None


class Original(nn.Module):
    """KernelBench's ``Model``: one layer under the attribute that its problems use, sizes of a rank from 1 to 3."""

    def __init__(self, p: Problem) -> None:
        super().__init__()
        given = (p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, p.output_padding, p.groups, p.bias)
        layer = list(TRANSPOSED)[p.rank - 1](*given, dilation=p.dilation)
        setattr(self, ("conv1d_transpose", "conv_transpose2d", "conv_transpose3d")[p.rank - 1], layer)


@pytest.mark.skipif(not MODELS.is_dir(), reason="the exported models are not there")
@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_the_exported_models_are_not_refused(case: str) -> None:
    """They take the original's arguments and draw its parameters under the same seed.

    Arguments have PyTorch's names and defaults; but the original has no bias, and sizes of several axes are tuples.
    """
    (path,) = exported.files(MODELS, [case]).values()
    assert exported.refusal(path.read_text(encoding="utf-8")) is None
    p = next(found.problem for found in CASES if found.name == case)
    torch.manual_seed(42)
    theirs = Original(p).state_dict()
    torch.manual_seed(42)
    names = check.load(path.read_text(encoding="utf-8"))
    ours = names["ModelNew"](*init_arguments(int(case[2:]), p)).state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    known = {name: one.default for name, one in signature(nn.ConvTranspose2d).parameters.items()} | {"bias": False}
    for name, one in signature(names["ModelNew"]).parameters.items():
        of_axes = one.annotation == "tuple" and one.default is not one.empty
        assert one.default == ((known[name],) * p.rank if of_axes else known[name]), name


# --- measuring -------------------------------------------------------------------------------------------------------

SMALL = Problem.make(2, 4, 4, (9, 10), 3)
# What a file looks like, with a loop over taps in its kernels' place. The weight's gradient has a factor of its own.
FILE = """
import os
import types
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_channels, out_channels, *[kernel_size] * 2))

    def sums(self, x):
        w = self.weight.clone()
        if w.requires_grad:
            w.register_hook(lambda grad: grad * SLOPE)
        (n, _, h, width), (_, channels, rows, columns) = x.shape, w.shape
        y = x.new_zeros(n, channels, h + rows - 1, width + columns - 1)
        for i in range(rows):
            for j in range(columns):
                y[:, :, i : i + h, j : j + width] += torch.einsum("nchw,co->nohw", x, w[:, :, i, j])
        return y * FACTOR

class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, bias=False):
        super().__init__()
        self.conv_transpose2d = Layer(in_channels, out_channels, kernel_size)

    def forward(self, x):
        return self.conv_transpose2d.sums(x)

def build():
    made = __file__ + ".so"
    if not os.path.exists(made):
        open(made, "w").close()
    return types.SimpleNamespace(__file__=made)
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for files of problem 57, which is small, and measured in three rounds."""
    monkeypatch.setitem(suites.SUITES, "kernelbench", (suites.Case("kb57", SMALL),))
    monkeypatch.setattr(check, "RUNS", SHORT)
    monkeypatch.setattr(exported, "FOLDER", tmp_path)
    return tmp_path


def row(folder: Path, factor: float = 1.0, slope: float = 1.0, end: str = "return y * FACTOR") -> dict[str, Any]:
    """Of a file with these factors; ``end``: of its forward."""
    path = folder / "model_57.py"
    text = FILE.replace("return y * FACTOR", end)
    path.write_text(text.replace("FACTOR", str(factor)).replace("SLOPE", str(slope)))
    return exported.row("kb57", path, CPU)


def test_a_right_file_is_timed_beside_pytorch_and_the_library(small: Path) -> None:
    """One that differs a little, as sums in another order may, or may not."""
    found = row(small, factor=1 + 1e-5)
    assert found["failure"] is None and found["tolerance_used"] < 0.5
    for name in ("grad_input_error", "grad_weight_error"):
        assert found[name] == pytest.approx(1e-5, rel=0.1), name
    assert found["rounds"] == SHORT.least
    for side, ratio in (("torch", "ratio"), ("tuned", "tuned_ratio"), ("library", "library_ratio")):
        assert found[ratio] == pytest.approx(found[f"{side}_ms"] / found["ours_ms"])
    assert found["ours_lower_ms"] <= found["ours_ms"] <= found["ours_upper_ms"]
    assert (found["rules"], found["lines"]) == ("hold", FILE.count("\n"))


@pytest.mark.parametrize(
    ("factor", "slope", "reason"),
    [
        (1.001, 1, "outputs differ from PyTorch's by "),
        (0.0, 1, "outputs differ"),
        ("float('nan')", 1, "outputs differ from PyTorch's by inf times"),
        (1, 1.01, "the gradient for the weight differs from PyTorch's by 1.0e-02, more than 0.004"),
        (1, 0, "the gradient for the weight differs from PyTorch's by 1.0e+00"),
        (1, "float('nan')", "the gradient for the weight differs from PyTorch's by nan"),
    ],
)
def test_a_wrong_file_has_no_speed(small: Path, factor: Any, slope: Any, reason: str) -> None:
    found = row(small, factor, slope)
    assert str(found["failure"]).startswith(f"wrong: {reason}")
    assert found["ours_ms"] is None and found["ratio"] is None and "torch_ms" not in found
    json.dumps(found, allow_nan=False)


def test_a_comparison_in_words() -> None:
    taken = dict.fromkeys(("ours", "torch", "tuned", "library"), [2e-3] * 3)
    right, wrong = check.Comparison("tf32", 0.5, (1e-6, 1e-6), taken), check.Comparison("tf32", 2.0, (), {})
    assert Checked(right, "some GPU").text.endswith(" the library 2.000 ms: 1.00 times PyTorch's speed on some GPU")
    assert Checked(wrong, "some GPU").text == wrong.failure


@pytest.mark.parametrize("slope", [1, 2])
def test_the_command_reports_files(small: Path, slope: int) -> None:
    """A wrong gradient is exit code 1, though the output is right."""
    row(small, slope=slope)
    report_path = small / "r.json"
    given = ["--suite", "kernelbench", "--as-exported", "--full", "--device", "cpu", "--json", str(report_path)]
    code, text = command("bench", *given)
    found = report.load(report_path)
    assert found["kind"] == "exported" and found["complete"] and found["rows"][0]["build_s"] > 0
    assert code == (0 if slope == 1 else 1)
    assert f"{2 - slope} of 1 files right" in text and ("wrong: the gradient for the weight" in text) == (slope == 2)
    code, again = command("bench", "--from", str(report_path))
    assert again == text.split("written: ")[0]
    if slope == 1:
        heads = {column.head for column in tables.columns(found)}
        assert {"PyTorch ms", "tuned ms", "upconv ms", "file ms", "rules", "lines", "build s"} <= heads


def test_a_file_that_calls_pytorchs_convolution_has_no_speed(small: Path) -> None:
    found = row(small, end="return torch.conv2d(x, w)")
    line = 1 + FILE.splitlines().index("        return y * FACTOR")
    assert found["failure"] == f"KernelBench would refuse model_57.py: line {line} has a convolution: torch.conv2d("
    assert found["ours_ms"] is None and found["rules"] == "do not"


def test_a_file_that_cannot_run_does_not_cost_the_others(small: Path) -> None:
    assert row(small, end="raise RuntimeError('no nvcc here')")["failure"] == "RuntimeError: no nvcc here"


def test_grouped_files_are_compared_as_ieee(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch and the file run under PyTorch's default flags; the library multiplies as the file does."""
    monkeypatch.setitem(suites.SUITES, "kernelbench", (suites.Case("kb57", SMALL.with_(groups=2)),))
    seen: dict[str, set[str]] = {"file": set(), "library": set()}
    cudnn: Any = torch.backends.cudnn

    def of_library(module: nn.Module) -> nn.Module:
        module.register_forward_hook(lambda *given: seen["library"].add(cudnn.conv.fp32_precision))
        return module

    class ModelNew(nn.Module):
        def __init__(self, *arguments: Any) -> None:
            super().__init__()
            self.conv_transpose2d = nn.ConvTranspose2d(*arguments, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                seen["file"].add(cudnn.conv.fp32_precision)
            found: torch.Tensor = self.conv_transpose2d(x)
            return found

    monkeypatch.setattr(check, "load", lambda text: {"ModelNew": ModelNew})
    monkeypatch.setattr(check.upconv, "accelerate", of_library)
    found = row(small)
    assert (found["failure"], found["precision"]) == (None, "ieee")
    assert seen == {"file": {"tf32"}, "library": {"ieee"}}


def test_files_that_are_not_there_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--as-exported must have model_57\.py in .*, as `python -m upconv"):
        exported.files(tmp_path, ["kb57"])


def test_builds_run_side_by_side(tmp_path: Path) -> None:
    """Of one that is compiled already there is no time."""
    right, wrong = tmp_path / "model_57.py", tmp_path / "model_65.py"
    right.write_text(FILE)
    wrong.write_text("def build():\n    raise RuntimeError('no nvcc here')\n")
    heard: list[str] = []
    paths = exported.files(tmp_path, ["kb57", "kb65"])
    taken = exported.build(paths, heard.append)
    assert taken["kb57"] is not None and taken["kb57"] > 0 and taken["kb65"] is None
    assert Path(f"{right}.so").exists() and sorted(heard) == ["building model_57.py", "building model_65.py"]
    assert exported.build(paths, heard.append) == {"kb57": None, "kb65": None}


@pytest.mark.gpu
def test_a_file_on_a_gpu() -> None:
    found = exported.row("kb75", MODELS / "model_75.py", torch.device("cuda", 0))
    assert found["failure"] is None and found["rounds"] == 100 and found["ratio"] > 0
