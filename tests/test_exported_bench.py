"""Exported files: what KernelBench's static check would refuse, their parameters, and how the bench measures them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from measured import CPU, SHORT
from upconv.bench import exported, report, run, suites, tables, timing
from upconv.bench.run import How, Job
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
        ("from torch.nn import functional as F", "torch.nn.functional"),
        ("import numpy", "numpy"),
        ("try:\n    x = 1\nfinally:\n    x = 2", "try"),
        ("layer = nn.Linear(1, 1)", "a layer"),
        ('CUDA = """\nfor (int pass = 0; pass < 2; pass++) {}\n"""', "the word pass"),
        ('CUDA = """\nauto y = at::conv_transpose2d(x);\n"""', "at::conv_transpose2d"),
        ('CUDA = """\ncudnnConvolutionForward(h);\n"""', "cudnnConvolutionForward"),
    ],
)
def test_what_calls_pytorchs_convolution_is_refused(line: str, reason: str) -> None:
    assert reason in str(exported.refusal(f"import torch\nfrom torch import nn\n{line}\n"))


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
    """And they draw the parameters of the original under the same seed."""
    (path,) = exported.files(MODELS, [case]).values()
    assert exported.refusal(path.read_text(encoding="utf-8")) is None
    p = next(found.problem for found in CASES if found.name == case)
    torch.manual_seed(42)
    theirs = Original(p).state_dict()
    torch.manual_seed(42)
    ours = exported.model(path)(*init_arguments(int(case[2:]), p)).state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


# --- measuring -------------------------------------------------------------------------------------------------------

SMALL = Problem.make(2, 3, 4, (9, 10), 3)
# What a file looks like, with a loop over taps in its kernels' place.
FILE = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels, *[kernel_size] * 2))

    def forward(self, x):
        (n, _, h, w), (_, channels, rows, columns) = x.shape, self.weight.shape
        y = x.new_zeros(n, channels, h + rows - 1, w + columns - 1)
        for i in range(rows):
            for j in range(columns):
                y[:, :, i : i + h, j : j + w] += torch.einsum("nchw,co->nohw", x, self.weight[:, :, i, j])
        return y * FACTOR

def build():
    open(__file__ + ".built", "w").close()
"""


def row(folder: Path, factor: float) -> dict[str, Any]:
    (folder / "model_57.py").write_text(FILE.replace("FACTOR", str(factor)))
    files = exported.files(folder, ["kb57"])
    return run.row(Job("kernelbench", "kb57", SMALL), CPU, How(SHORT, exported=files))


def test_a_right_file_is_timed_beside_pytorch_and_the_library(tmp_path: Path) -> None:
    found = row(tmp_path, 1.0)
    assert found["failure"] is None and found["rel_error"] < 1e-6
    assert found["exported_ratio"] == pytest.approx(found["torch_ms"] / found["exported_ms"])
    assert found["exported_lower_ms"] <= found["exported_ms"] <= found["exported_upper_ms"]
    shown = report.gather([found], CPU, ceilings=None)
    run.set_roof(found, {"copy_bytes_per_s": 1e9, "matmul_flops_per_s": {"ieee": 1e10}})
    assert found["exported_lines"] == len(FILE.splitlines())
    texts = {column.head: column.text(found) for column in tables.columns(shown)}
    assert {"exported ms", "exported"} <= set(texts) and texts["lines"] == str(len(FILE.splitlines()))


def test_a_file_that_calls_pytorchs_convolution_has_no_speed(tmp_path: Path) -> None:
    (tmp_path / "model_57.py").write_text(FILE.replace("return y * FACTOR", "return torch.conv2d(x, self.weight)"))
    files = exported.files(tmp_path, ["kb57"])
    found = run.row(Job("kernelbench", "kb57", SMALL), CPU, How(SHORT, exported=files))
    assert found["failure"] == "ValueError: KernelBench would refuse model_57.py: line 16 calls torch.conv2d"
    assert found["ours_ms"] is None and "exported_ms" not in found


@pytest.mark.parametrize("factor", [1.001, 0.0, 1e30])
def test_a_wrong_file_has_no_speed(tmp_path: Path, factor: float) -> None:
    found = row(tmp_path, factor)
    assert str(found["failure"]).startswith("wrong result of the exported file: relative error ")
    assert found["ours_ms"] is None and "exported_ms" not in found


def test_files_that_are_not_there_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--as-exported must have model_57\.py in .*, as `python -m upconv"):
        exported.files(tmp_path, ["kb57"])


def test_builds_run_side_by_side(tmp_path: Path) -> None:
    right, wrong = tmp_path / "model_57.py", tmp_path / "model_65.py"
    right.write_text(FILE.replace("FACTOR", "1"))
    wrong.write_text("def build():\n    raise RuntimeError('no nvcc here')\n")
    heard: list[str] = []
    taken = exported.build(exported.files(tmp_path, ["kb57", "kb65"]), heard.append)
    assert taken["kb57"] > 0 and taken["kb65"] is None
    assert Path(f"{right}.built").exists() and sorted(heard) == ["building model_57.py", "building model_65.py"]


@pytest.mark.gpu
def test_a_file_on_a_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    p = next(case.problem for case in CASES if case.name == "kb81").with_(precision="tf32", batch=2)
    how = How(SHORT, exported=exported.files(MODELS, ["kb81"]))
    found = run.row(Job("kernelbench", "kb81", p), device, how)
    assert found["failure"] is None and found["tolerance_used"] is not None and found["exported_ratio"] > 0
    assert timing.NAMES["exported"] == "the exported file"
