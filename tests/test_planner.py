"""The CPU rule on the layers that it is known by, and the numbers that its choices compute at real sizes; which kernel
family a GPU gets."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import upconv
from conftest import seeds
from strategies import operands
from upconv import cpu, planner, reference
from upconv.bench import suites
from upconv.cuda import families, family, gpu
from upconv.cuda.cost import Cost
from upconv.planner import Device
from upconv.problem import LAYOUTS, PRECISIONS, Problem

ONEDNN = Device("cpu", 2, frozenset({torch.float32, torch.bfloat16}))
LAYERS = dict(suites.SUITES["cpu"])


def layer(case: str, dtype: torch.dtype, layout: str = "nchw", **changes: object) -> Problem:
    precision = {torch.float32: "ieee", torch.bfloat16: "bf16", torch.float64: "fp64"}[dtype]
    return LAYERS[case].with_(dtype=dtype, precision=precision, layout=layout, **changes)


@pytest.mark.parametrize(
    ("case", "dtype", "layout", "forward", "backward"),
    [
        ("A", torch.float32, "nchw", "native", "native"),  # the bias loop is less than a third of it
        ("A", torch.float32, "channels_last", "native", "native"),
        ("A", torch.bfloat16, "nchw", "flip", "native"),
        ("groups32", torch.float32, "nchw", "unbiased", "native"),
        ("C", torch.bfloat16, "channels_last", "shuffle", "split"),
        ("C", torch.float64, "nchw", "native", "native"),
        ("GAN4", torch.float32, "channels_last", "native", "native"),
        ("depthwise", torch.bfloat16, "nchw", "wide", "native"),
        ("depthwise", torch.bfloat16, "channels_last", "native", "split"),  # an image in float32 takes memory
        ("UNET", torch.float32, "channels_last", "native", "split"),
        ("3->5 s2", torch.bfloat16, "channels_last", "shuffle", "split"),
    ],
)
def test_choices(case: str, dtype: torch.dtype, layout: str, forward: str, backward: str) -> None:
    """Gradients are split where the bias is slow."""
    plan, step = (planner.plan(layer(case, dtype, layout, pass_=pass_), ONEDNN) for pass_ in ("fwd", "step"))
    assert plan.forward == step.forward == forward and step.backward == backward
    assert plan.engine("fwd") == ("torch" if forward == "native" else f"cpu:{forward}")
    assert [c.name for c in plan.candidates if c.chosen] == [forward]
    assert [c.name for c in step.candidates if c.chosen] == [forward, f"backward {backward}"]
    assert {c.name for c in plan.candidates} == set(cpu.FORWARD_PLANS)
    assert all(c.reason for c in plan.candidates)
    bare = planner.plan(layer(case, dtype, layout, bias=False), ONEDNN)
    deep = planner.plan(Problem.make(1, 64, 64, (6, 6, 8), 3, 2, bias=True, layout="channels_last"), ONEDNN)
    assert bare.backward == deep.backward == "native"


def test_a_batch_of_many_images_is_computed_in_float32_one_by_one() -> None:
    """PyTorch's operator holds nothing beside input and result, and one image of so many is a small part of them."""
    for batch, forward in ((8, "native"), (64, "wide")):
        p = layer("depthwise", torch.bfloat16, "channels_last", batch=batch)
        plan = planner.plan(p, ONEDNN)
        assert plan.forward == forward
        assert (cpu.run.wide_bytes(p) <= 0.05 * p.bytes) == (forward == "wide")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize(
    "p",
    [
        Problem.make(16, 1, 1, (512, 512), 2, 2),
        Problem.make(8, 1, 1, (1_000_000,), 2, 2),
        Problem.make(2, 2, 2, (64, 64, 64), 2, 2),
        Problem.make(256, 64, 1, (14, 14), 4, 2, 1, bias=True),
        Problem.make(1, 32, 64, (16, 16, 16), 3, 2, 1, dilation=2),
    ],
    ids=str,
)
def test_layers_that_no_plan_makes_faster_are_pytorchs(p: Problem, dtype: torch.dtype, layout: str) -> None:
    """Memory bounds the first ones, small rows the next, and the last are deep."""
    if dtype in cpu.HALF and (p.bias or max(p.dilation) > 1):
        pytest.skip("oneDNN's half-precision operator is slow there")
    p = p.with_(dtype=dtype, precision=PRECISIONS[dtype][0], layout=layout if p.rank > 1 else "nchw")
    device = Device("cpu", 2, frozenset({torch.float32, *cpu.HALF}))
    assert planner.plan(p, device).forward == "native"


@pytest.mark.parametrize("large", [1, 1000, 10**6, 2**31, 2**63 - 1])
@pytest.mark.parametrize("name", ["stride", "kernel", "padding", "dilation", "output_padding", "size"])
def test_planning_takes_no_longer_for_large_numbers(name: str, large: int) -> None:
    """Whether PyTorch can compute the layer is for PyTorch to say; a listing of residues would never end."""
    rng = random.Random(large)
    start = time.process_time()
    for _ in range(40):
        rank, groups = rng.randint(1, 3), rng.choice((1, 2, 16))
        axes: dict[str, Any] = {"kernel": rng.randint(1, 5), "stride": rng.choice((1, 2, 3)), "size": (64,) * rank}
        axes |= {name: (large,) * rank if name == "size" else large}
        if name == "output_padding":
            axes["stride"] = large + 1
        try:
            p = Problem.make(
                2, 16 * groups, 16 * groups, **axes, groups=groups, bias=True, dtype=rng.choice(list(PRECISIONS)),
                layout=rng.choice(LAYOUTS) if rank > 1 else "nchw",
            )  # fmt: skip
        except ValueError:  # the padding leaves no output
            continue
        planner.plan(p.with_(pass_="step"), Device("cpu", 2, frozenset(PRECISIONS)))
    assert time.process_time() - start < 4


def test_strides_of_thousands_are_computed() -> None:
    """Outputs that no tap reaches are the bias; a stride that no tensor can have raises PyTorch's error, at once."""
    p = Problem.make(2, 8, 6, (3, 2), 3, (5000, 3), 1, bias=True)
    x, w, b, _ = operands(p)
    for plan in ("native", "shuffle"):
        out = cpu.forward(p, plan, x, w, b)
        torch.testing.assert_close(out.double(), reference.forward(p, x, w, b), rtol=1e-4, atol=1e-5)
    for stride in (200_000, 2**31, 2**63 - 1):
        start, said = time.perf_counter(), []
        for call in (torch.nn.functional.conv_transpose2d, upconv.conv_transpose2d):
            with pytest.raises(RuntimeError) as error:
                call(torch.ones(8, 8, 9, 9), torch.ones(8, 64, 3, 3), stride=stride)
            said.append(str(error.value).split("\n")[0])
        assert said[0] == said[1] and time.perf_counter() - start < 2


# --- CUDA ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(4, 8))
def test_many_products_are_never_left_to_cuda_cores(seed: int) -> None:
    """Of layers without groups: estimates of CUDA cores that hoped too much took 16 us for 2 ms, 14 for 0.3."""
    chance = random.Random(seed)
    layers = [p for _, p in suites.SUITES["field"] if p.groups == 1 and p.out_channels > 4 and p.macs > 5e7]
    for p in chance.sample(layers, 6):
        dtype, precision = chance.choice(((torch.float32, "tf32"), (torch.bfloat16, "bf16")))
        layout = chance.choice(LAYOUTS) if p.rank > 1 else "nchw"
        pass_ = chance.choice(("fwd", "grad-input", "grad-weight"))
        found = p.with_(dtype=dtype, precision=precision, layout=layout, pass_=pass_)
        selected = planner.select(found, Device("cuda", gpu=gpu.H200))
        assert selected.name not in ("native", "direct"), found


def test_packing_counts_where_another_kernel_reads_the_weights_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that packs is taken only where it gains more than its packing takes."""
    p = Problem.make(1, 1024, 512, (4, 4), 4, 2, 1, layout="channels_last", precision="tf32")
    bytes_ = 4 * 1024 * 512 * 16
    packing = 2 * bytes_ / gpu.H200.bandwidth

    def fixed(name: str, seconds: float, in_place: bool) -> SimpleNamespace:
        return _fixed(name, seconds, 0.0 if in_place else family.packing_seconds(p, gpu.H200))

    for gain, taken in ((0.9 * packing, "gather"), (1.5 * packing, "implicit")):
        answers = {"gather": fixed("gather", 1e-3, True), "implicit": fixed("implicit", 1e-3 - gain, False)}
        monkeypatch.setattr(families, "choose", lambda p, g, general=False, answers=answers: answers)
        assert planner._plan_cuda(p, Device("cuda", gpu=gpu.H200)).forward == taken


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device("cuda", gpu=replace(gpu.A100, name="T4", capability=(7, 5))), "capability 8.0, and T4 has 7.5"),
        (Device("cuda", gpu=gpu.H200, unavailable="CUDA kernels need NVRTC"), "CUDA kernels need NVRTC"),
        (Device("cuda"), "nothing is known of this GPU"),
    ],
    ids=("old", "no compiler", "unknown"),
)
def test_reasons_for_leaving_cuda_calls_to_pytorch(device: Device, reason: str) -> None:
    for pass_ in ("fwd", "step"):
        plan = planner.plan(LAYERS["C"].with_(pass_=pass_), device)
        assert plan.delegates and plan.engine("fwd") == plan.engine("step") == "torch"
        assert reason in plan.candidates[0].reason


def _fixed(family: str, seconds: float, packing_seconds: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(
        family=family, problem=LAYERS["C"], seconds=seconds, summary="a tile", bound="bytes", cost=Cost(),
        packing_seconds=packing_seconds,
    )  # fmt: skip


def test_a_forward_takes_copies_only_where_they_stay_in_the_cache() -> None:
    """Small images of many channels are multiplied as channels_last; a gradient of large ones may be copied too."""
    small = Problem.make(64, 1024, 512, (16,), (25,), 4, 11, 1, dtype=torch.bfloat16)
    large = Problem.make(64, 64, 64, (4096,), (25,), 4, 11, 1, dtype=torch.bfloat16)
    found = families.choose(small, gpu.H200)
    choice: Any = family.best_of(found)
    assert choice is found["rearrange"]
    assert choice.temporary_bytes == 2 * (math.prod(small.input_shape) + math.prod(small.output_shape))
    fewer: Any = families.choose(small.with_(batch=32), gpu.H200)["rearrange"]
    assert fewer.packing == choice.packing, "a frozen layer keeps one copy for its sizes"
    assert "MB would not stay in the second-level cache" in str(families.choose(large, gpu.H200)["rearrange"])
    assert "second-level cache" not in str(families.choose(large.with_(pass_="grad-weight"), gpu.H200)["rearrange"])
