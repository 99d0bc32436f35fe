"""`summary`: a row a layer, whose operator computes it and why, and one closing line; and what `accelerate` reports."""

from __future__ import annotations

import copy
import io
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import upconv
from conftest import assert_equal, forced_plans
from twins import lines_of
from upconv import planner
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


reported = partial(lines_of, upconv.accelerate)
"""What `accelerate` reports."""


def test_a_row_a_layer() -> None:
    model = Net()
    model.up = upconv.accelerate(model.up)
    with forced_plans("any"):
        found = upconv.summary(model, torch.randn(2, 3, 8, 8))
    shown = [(r.name, r.layer, r.input, r.device, r.forward, r.why, r.calls) for r in found.rows]
    assert shown == [
        ("up", "ConvTranspose2d 8->8 k4 s2 p1", "2x8x4x4", "cpu", "upconv (shuffle)", "forced by a test", 2),
        ("last", "ConvTranspose2d 8->3 k3 s1 p1x0", "2x8x8x8", "cpu", "PyTorch", "it is not accelerated", 1),
        ("unused", "ConvTranspose2d 3->3 k3 s1 p0", "", "", "", "no call of it was seen on this example", 1),
    ]
    assert found.closing == (
        "On a CPU PyTorch's own operator computes 1 of 3 calls (since it is not accelerated), upconv 2. "
        "Gradients on a CPU are by PyTorch's operator; the bias's may be summed apart."
    )


def test_a_compiled_model_is_run_outside_of_its_graphs() -> None:
    model = torch.compile(upconv.accelerate(Net()), backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = upconv.summary(model, (2, 3, 8, 8))
    assert [(row.name, row.calls) for row in found.rows][:2] == [("_orig_mod.up", 2), ("_orig_mod.last", 1)]


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


class Writing(Net):
    """Writes its buffers: in place, by assignment and into another shape. May then raise."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.raises = raises
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.tensor([float("nan"), 2.0]))
        self.register_buffer("ends", torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.mean = x.mean((0, 2, 3))
        self.ends.resize_(4).fill_(7)
        out = super().forward(x)
        if self.raises:
            raise KeyError("raised")
        return out


@pytest.mark.parametrize("raises", (False, True))
def test_the_state_stays(raises: bool) -> None:
    model = upconv.accelerate(Writing(raises))
    model.norm.eval()

    def state() -> Any:
        each = [{**vars(m), "_forward_pre_hooks": dict(m._forward_pre_hooks)} for m in model.modules()]
        return [{**of, "_buffers": dict(of["_buffers"])} for of in each], repr(model)

    held, before = state(), copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    with pytest.raises(KeyError, match="raised") if raises else nullcontext():
        upconv.summary(model, (2, 3, 8, 8))
    assert_equal(torch.rand(4), wanted)
    assert state() == held  # the same tensors too
    for name, value in model.state_dict().items():
        assert_equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


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
        seen = "torch.nn.functional.conv_transpose2d was replaced by somebody who must see the calls"
        assert why(layer, x) == seen
        for other in (layer, upconv.ConvTranspose2d(4, 3, 3, 2)):
            assert f"accelerated, but PyTorch's operator computes it on a CPU: {seen}" in reported(other)[0]
    finally:
        F.conv_transpose2d = old
    with pytest.raises(TypeError, match="input"):
        upconv.summary(layer, [])
    layer.forward = lambda x: x
    assert why(layer, x) == "its forward was replaced on the instance"


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
    lines = reported(model)
    assert lines == [
        "0: accelerated: upconv computes it on a CPU (shuffle)",
        "1: accelerated: its input decides whose operator computes it on a CPU; upconv's for some (shuffle)",
        "2: accelerated, but PyTorch's operator computes it on a CPU: a reason",
        "3: accelerated, but PyTorch's operator computes it on a CPU: upconv computes in float32, bfloat16, float16 "
        "and float64, not in torch.complex64",
        "4: accelerated, but PyTorch's operator computes it on meta: upconv has no engine for meta devices",
        "5 of 5 transposed convolutions accelerated; on a CPU and meta upconv computes 1 of 5, PyTorch's operator 3; "
        "of 1 the input decides (upconv.summary(model, example) tells for your shapes)",
    ]


def test_the_report_states_what_no_input_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are upconv's for large images, batches or strips alone, and one that is PyTorch's for every input."""
    cpu = Device("cpu", threads=2, onednn=frozenset({torch.float32}))
    monkeypatch.setattr(planner, "device_of", lambda device: cpu)
    layers = {
        "large": (nn.ConvTranspose2d(56, 1, 9, 3, 4, output_padding=2), ((1, 56, 256, 256), (8, 56, 64, 64))),
        "batch": (nn.ConvTranspose2d(64, 3, 4, 2, 1), ((64, 64, 32, 32),)),
        "strip": (nn.ConvTranspose2d(32, 64, (2, 4), 8, (1, 2), dilation=3, groups=4), ((16, 32, 1, 375),)),
        "never": (nn.ConvTranspose2d(64, 64, 4, 2, 1), ()),
    }
    lines = reported(nn.ModuleDict({name: layer for name, (layer, _) in layers.items()}))
    for line, (layer, shapes) in zip(lines, layers.values()):
        for batch, channels, *size in shapes:
            p = Problem.make(
                batch, channels, layer.out_channels, size, layer.kernel_size, layer.stride, layer.padding,
                layer.output_padding, layer.dilation, layer.groups, bias=True,
            )  # fmt: skip
            assert planner.plan(p, cpu).forward == "shuffle"
        assert ("its input decides whose operator computes it on a CPU" in line) == bool(shapes)
    assert lines[3].endswith(": oneDNN's own transposed kernel is the fastest for this shape")
    assert "on a CPU upconv computes 0 of 4, PyTorch's operator 1; of 3 the input decides" in lines[4]
