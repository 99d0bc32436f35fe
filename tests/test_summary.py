"""`summary`: a row a layer, whose operator computes it and why, and one closing line; and what `accelerate` reports."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import upconv
from conftest import assert_equal, forced_plans
from upconv import planner
from upconv.cuda import gpu
from upconv.planner import Candidate, Device, Plan
from upconv.problem import Problem


class Net(nn.Module):
    """Two transposed convolutions, one called twice, one never; a norm and a dropout, which have state and chance."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, 2, 1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout()
        self.up = nn.ConvTranspose2d(8, 8, 4, 2, 1)
        self.last = nn.ConvTranspose2d(8, 3, 3, 1, (1, 0), dilation=1)
        self.unused = nn.ConvTranspose2d(3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.down(x)))
        out: Tensor = self.last(self.up(y) + self.up(y))
        return out


def rows_of(model: nn.Module, *example: Any) -> dict[str, tuple[Any, ...]]:
    return {row.name: (row.input, row.forward, row.calls) for row in upconv.summary(model, *example).rows}


def test_a_row_a_layer() -> None:
    model = Net()
    model.up = upconv.accelerate(model.up)
    with forced_plans("any"):
        found = upconv.summary(model, torch.randn(2, 3, 8, 8))
    shown = [(r.name, r.layer, r.input, r.device, r.forward, r.why, r.calls) for r in found.rows]
    assert shown == [
        ("up", "ConvTranspose2d 8->8 k4 s2 p1", "2x8x4x4", "cpu", "upconv (phases)", "forced by a test", 2),
        ("last", "ConvTranspose2d 8->3 k3 s1 p1x0", "2x8x8x8", "cpu", "PyTorch", "it is not accelerated", 1),
        ("unused", "ConvTranspose2d 3->3 k3 s1 p0", "", "", "", "the model did not call it on this example", 1),
    ]
    assert found.closing == (
        "On a CPU PyTorch's own operator computes 1 of 3 calls (since it is not accelerated), upconv 2. "
        "Gradients on a CPU are PyTorch's."
    )


def test_reasons_are_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each call by its own plan, with its own count in the closing line."""

    def plan(p: Problem, device: Device) -> Plan:
        return Plan(p, device, "native", "native", (Candidate("native", True, f"it has {p.out_channels} channels"),))

    upconv.ops.forget_plans()
    monkeypatch.setattr(planner, "plan", plan)
    found = upconv.summary(upconv.accelerate(Net()), (2, 3, 8, 8))
    upconv.ops.forget_plans()
    assert [row.why for row in found.rows[:2]] == ["it has 8 channels", "it has 3 channels"]
    assert found.closing.startswith(
        "On a CPU PyTorch's own operator computes 3 of 3 calls "
        "(2 since it has 8 channels; 1 since it has 3 channels), upconv 0."
    )


def test_it_says_what_runs() -> None:
    """The forward of each row is what the call takes, for all plans of the CPU engine."""
    model = upconv.accelerate(Net()).eval()
    x = torch.randn(2, 3, 8, 8)
    for name in ("shuffle", "flip", "unbiased", "native"):
        with forced_plans(name) as forced:
            found = upconv.summary(model, x)
            described = [row for row in found.rows if row.ours and row.input]
            forced.clear()
            upconv.ops.forget_plans()
            model(x)
        assert len(described) == len(forced), name


def test_text_is_whole_and_rich_wraps() -> None:
    found = upconv.summary(upconv.accelerate(Net()), (2, 3, 8, 8))
    text = str(found)
    assert repr(found) == text and text.splitlines()[-1] == found.closing and "\x1b" not in text
    head, *lines = (line for line in text.splitlines() if line.strip())
    assert head.split()[:4] == ["name", "layer", "input", "forward"]
    for row in found.rows:
        (line,) = (line for line in lines if line.lstrip().startswith(f"{row.name} "))
        assert row.layer in line and row.why in line and ("(2 times)" in line) == (row.calls == 2)
    narrow = io.StringIO()
    Console(file=narrow, width=60).print(found)
    assert max(map(len, narrow.getvalue().splitlines())) <= 60


def test_the_state_stays() -> None:
    model = upconv.accelerate(Net())
    model.norm.eval()
    before = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    held = [{**vars(m), "_forward_pre_hooks": dict(m._forward_pre_hooks)} for m in model.modules()]
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    described = repr(model)
    upconv.summary(model, (2, 3, 8, 8))
    assert_equal(torch.rand(4), wanted)
    for name, value in model.state_dict().items():
        assert_equal(value, before[name])
    assert [m.training for m in model.modules()] == modes and repr(model) == described
    assert [{**vars(m), "_forward_pre_hooks": dict(m._forward_pre_hooks)} for m in model.modules()] == held
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_raises_is_left_as_it_was() -> None:
    model = Net()
    with pytest.raises(RuntimeError, match="channels"):
        upconv.summary(model, (2, 4, 8, 8))
    assert model.training and not any(m._forward_pre_hooks for m in model.modules())


def test_examples_are_as_warmups() -> None:
    model = upconv.accelerate(Net()).double()
    wanted = rows_of(model, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    for example in ((2, 3, 8, 8), [(2, 3, 8, 8)], {"x": (2, 3, 8, 8)}):
        assert rows_of(model, example) == wanted


def test_lazy_layers_stay_lazy() -> None:
    model = upconv.accelerate(nn.Sequential(nn.LazyConvTranspose2d(2, 3, 2)))
    assert rows_of(model, (1, 4, 5, 5))["0"][0] == "1x4x5x5"
    assert model[0].has_uninitialized_params()


def test_why_a_call_is_passed_over() -> None:
    layer = upconv.accelerate(nn.ConvTranspose2d(4, 3, 3, 2))

    def why(model: Any, *example: Any) -> str:
        ((row,)) = upconv.summary(model, *example).rows
        assert row.forward == "PyTorch"
        return row.why

    x = torch.randn(1, 4, 5, 5)
    assert "the input is torch.complex64" in why(copy.deepcopy(layer).to(torch.complex64), x.to(torch.complex64))
    assert why(copy.deepcopy(layer).to("meta"), x.to("meta")) == "upconv has no engine for meta devices"
    vmapped = nn.Module()
    vmapped.layer = layer
    vmapped.forward = lambda x: torch.func.vmap(layer)(x)  # type: ignore[method-assign]
    assert why(vmapped, x[None]).startswith("PyTorch must see the call")
    old = F.conv_transpose2d
    try:
        F.conv_transpose2d = lambda *args, **kwargs: old(*args, **kwargs)
        assert why(layer, x) == "torch.nn.functional.conv_transpose2d was replaced by somebody who must see the calls"
    finally:
        F.conv_transpose2d = old
    layer.forward = lambda x: x
    assert why(layer, x) == "its forward was replaced on the instance"


def test_models_without_transposed_convolutions_are_told_so() -> None:
    found = upconv.summary(nn.Sequential(nn.Conv2d(3, 3, 3)), (1, 3, 8, 8))
    assert str(found) == "The model has no transposed convolution: upconv computes nothing of it."
    lines: list[str] = []
    upconv.accelerate(nn.Linear(2, 2), report=lines.append)
    upconv.accelerate(nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv1d(3, 3, 3)), report=lines.append)
    nothing = "nothing to accelerate: the model has no transposed convolution"
    assert lines == [nothing, f"{nothing}; accelerate(model, convolutions=True) takes its 2 plain ones"]


def test_plain_convolutions_are_listed_if_accelerated() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
    upconv.accelerate(model[0], convolutions=True)
    (row,) = upconv.summary(model, (1, 3, 8, 8)).rows
    assert (row.name, row.forward) == ("0", "PyTorch")
    assert row.why == "plain convolutions are upconv's on GPUs of compute capability 9.0 alone"


def test_the_report_counts_by_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sizes upconv's, all, none; and what no size changes."""

    def plan(p: Problem, device: Device) -> Plan:
        ours = p.out_channels == 8 or (p.out_channels == 3 and p.size[0] > 8)
        return Plan(p, device, "shuffle" if ours else "native", "native", (Candidate("x", True, "a reason"),))

    monkeypatch.setattr(planner, "plan", plan)
    model = nn.Sequential(
        nn.ConvTranspose2d(8, 8, 3), nn.ConvTranspose2d(8, 3, 3), nn.ConvTranspose2d(8, 4, 3),
        nn.ConvTranspose2d(8, 8, 3, dtype=torch.complex64), nn.ConvTranspose2d(8, 8, 3, device="meta"),
    )  # fmt: skip
    lines: list[str] = []
    upconv.accelerate(model, report=lines.append)
    assert lines == [
        "0: accelerated: upconv computes it on a CPU (phases)",
        "1: accelerated: upconv computes it on a CPU for some sizes of its input (phases)",
        "2: accelerated, but PyTorch's operator computes it on a CPU: a reason",
        "3: accelerated, but PyTorch's operator computes it on a CPU: upconv computes in float32, bfloat16, float16 "
        "and float64, not in torch.complex64",
        "4: accelerated, but PyTorch's operator computes it on meta: upconv has no engine for meta devices",
        "5 of 5 transposed convolutions accelerated; on a CPU and meta upconv computes 2 of them and PyTorch's "
        "operator 3 (upconv.summary(model, example) tells for your shapes)",
    ]


@pytest.mark.parametrize(
    ("known", "line"),
    [
        (Device("cuda", gpu=gpu.H200), "accelerated: upconv computes it on NVIDIA H200"),
        (
            Device("cuda", gpu=gpu.H200, unavailable="NVRTC is missing"),
            "accelerated, but PyTorch's operator computes it on NVIDIA H200: NVRTC is missing",
        ),
        (Device("cuda", unavailable="no device"), "accelerated, but PyTorch's operator computes it on cuda: no device"),
    ],
)
def test_the_report_on_a_gpu(known: Device, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is known of the GPU: a plan is not looked for."""
    monkeypatch.setattr(planner, "device_of", lambda device: known)
    monkeypatch.setattr(planner, "plan", None)
    lines: list[str] = []
    upconv.accelerate(nn.ConvTranspose2d(4, 4, 3), report=lines.append)
    assert lines[0] == f"(the model itself): {line}"
