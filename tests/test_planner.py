"""The CPU rule on the layers that it is known by, and the numbers that its choices compute at real sizes."""

from __future__ import annotations

import pytest
import torch

import upconv
from strategies import operands
from upconv import cpu, planner, reference
from upconv.bench import suites
from upconv.planner import Device
from upconv.problem import Problem

ONEDNN = Device("cpu", 2, frozenset({torch.float32, torch.bfloat16}))
LAYERS = dict(suites.SUITES["cpu"])
FUNCTIONS = (None, upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)


def layer(case: str, dtype: torch.dtype, layout: str = "nchw", **changes: object) -> Problem:
    precision = {torch.float32: "ieee", torch.bfloat16: "bf16", torch.float64: "fp64"}[dtype]
    return LAYERS[case].with_(dtype=dtype, precision=precision, layout=layout, **changes)


@pytest.mark.parametrize(
    ("case", "dtype", "layout", "forward"),
    [
        ("A", torch.float32, "nchw", "unbiased"),
        ("E", torch.float32, "nchw", "flip"),
        ("groups32", torch.float32, "nchw", "unbiased"),
        ("groups32", torch.float32, "channels_last", "flip"),
        ("7->13 s1", torch.float32, "nchw", "flip"),
        ("A", torch.float32, "channels_last", "native"),
        ("A", torch.bfloat16, "nchw", "flip"),
        ("C", torch.float32, "nchw", "phases"),
        ("C", torch.bfloat16, "channels_last", "phases"),
        ("C", torch.float64, "nchw", "phases"),
        ("GAN1", torch.float32, "nchw", "native"),
        ("GAN4", torch.float32, "nchw", "shuffle"),
        ("FSR-s3", torch.bfloat16, "nchw", "shuffle"),
        ("depthwise", torch.float32, "nchw", "unbiased"),
        ("depthwise", torch.bfloat16, "nchw", "wide"),
        ("depthwise", torch.bfloat16, "channels_last", "phases"),
        ("UNET", torch.float32, "nchw", "phases"),
        ("dilation2-s2", torch.bfloat16, "nchw", "phases"),
    ],
)
def test_choices(case: str, dtype: torch.dtype, layout: str, forward: str) -> None:
    plan = planner.plan(layer(case, dtype, layout), ONEDNN)
    assert plan.forward == forward
    assert plan.engine("fwd") == ("torch" if forward == "native" else f"cpu:{forward}")
    assert [c.name for c in plan.candidates if c.chosen] == [forward]
    assert {c.name for c in plan.candidates} == set(cpu.FORWARD_PLANS)
    assert all(c.reason for c in plan.candidates)


@pytest.mark.parametrize(
    "case", ["A", "C", "GAN4", "FSR-s3", "depthwise", "FCN", "dilation2-s2", "3->5 s2", "7->13 s1"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_the_choice_computes_the_layer(case: str, dtype: torch.dtype, layout: str) -> None:
    """Forward and all gradients of the whole layer through the public function, against float64."""
    p = layer(case, dtype, layout)
    x, w, b, g = operands(p)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    out = FUNCTIONS[p.rank](*leaves, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    grads = torch.autograd.grad(out, leaves, g)
    one = p.with_(batch=1)
    bound = 4e-3 if dtype is torch.bfloat16 else 2e-6
    for image in (0, p.batch - 1):
        truth = reference.forward(one, x[image : image + 1], w, b)
        assert reference.relative_error(out[image : image + 1], truth) < bound
        truth_x = reference.gradients(one, g[image : image + 1], x[image : image + 1], w)[0]
        assert reference.relative_error(grads[0][image : image + 1], truth_x) < bound
    _, truth_w, truth_b = reference.gradients(p, g, x, w)
    # The sums over all pixels are long: PyTorch's float32 ones are off by up to 2e-5.
    assert reference.relative_error(grads[1], truth_w) < max(bound, 1e-4)
    assert reference.relative_error(grads[2], truth_b) < max(bound, 1e-4)


def test_without_onednn_everything_is_pytorchs() -> None:
    bare = Device("cpu", 2)
    for p in LAYERS.values():
        plan = planner.plan(p, bare)
        assert plan.delegates and plan.engine("step") == "torch"


def test_other_devices_are_pytorchs_and_say_so() -> None:
    plan = planner.plan(LAYERS["C"], planner.device_of(torch.device("mps")))
    assert plan.delegates
    assert plan.candidates[0].reason == "upconv has no engine for mps devices"


def test_small_outputs_are_left_alone() -> None:
    p = layer("dilation2-s2", torch.bfloat16, batch=1, in_channels=8, size=(8, 8))
    plan = planner.plan(p, ONEDNN)
    assert plan.forward == "native"
    assert plan.candidates[0].reason == "the output is small, so the call is bound by its overhead"
