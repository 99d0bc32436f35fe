"""``upconv explain``: GPUs by their names, a line for each layer of a model, and a sentence for a user."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from measured import command
from upconv import planner
from upconv.bench.suites import parse_layer
from upconv.cuda import gpu
from upconv.cuda.family import call_seconds
from upconv.explain import estimated_ceilings, verdict
from upconv.planner import Device
from upconv.problem import Problem

explain = partial(command, "explain")
LAYER = ("64,64,4,stride=2,padding=1", "--input", "8x64x32x32")


@pytest.mark.parametrize(
    ("dtype", "on"), [("bfloat16", "H200"), ("float16", "H200"), ("float64", "H200"), ("bfloat16", "")]
)
def test_a_layer_has_the_dtype_that_is_asked_for(dtype: str, on: str) -> None:
    code, out = explain(*LAYER, "--dtype", dtype, *(("--gpu", on) if on else ("--device", "cpu")))
    assert code == 0 and f" on 8x64x32x32 · {dtype} · nchw · fwd" in out.splitlines()[0]


# --- GPUs by name ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", gpu.KNOWN)
def test_each_named_gpu_has_a_plan(name: str) -> None:
    found = gpu.KNOWN[name]
    for spelled in (name, name.lower(), name.replace(" ", ""), name.replace(" ", "-").upper(), f"NVIDIA {name}"):
        assert gpu.by_name(spelled) is found
    assert 10 < found.multiprocessors < 200 and 1.7e11 < found.bandwidth < 8e12 and 1e9 < found.clock < 3e9
    assert found.arch.rstrip("a") == "".join(map(str, found.capability))
    p = parse_layer("32,64,4,2,1", "4x32x40x40").with_(dtype=torch.bfloat16, precision="bf16")
    plan = planner.plan(p, Device("cuda", gpu=found))
    rates = estimated_ceilings(found)
    roof = p.roof_seconds(rates["matmul_flops_per_s"]["bf16"], rates["copy_bytes_per_s"])
    assert plan.engine("fwd") == f"cuda:{plan.forward}" and plan.choice is not None
    assert 0.2 * roof < plan.choice.seconds < 1e-2
    assert found.name in verdict(p, plan, rates)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("h100-pcie", "H100 PCIe"), ("NVIDIA H100 80GB PCIe", "H100 PCIe"),
        ("a100 80 gb", "A100 80GB"), ("A100-PCIE-40GB", "A100 40GB"), ("a6000", "RTX A6000"), ("3060ti", "RTX 3060 Ti"),
        ("geforce rtx 4070 ti super", "RTX 4070 Ti Super"), ("4090", "RTX 4090"), ("NVIDIA RTX 6000 Ada Generation",
        "RTX 6000 Ada"),
    ],
)  # fmt: skip
def test_names_as_people_and_drivers_write_them(text: str, name: str) -> None:
    assert gpu.by_name(text) is gpu.KNOWN[name]


@pytest.mark.parametrize("name", ("V100", "GTX 1080", "MI300", "RTX 4090 Laptop GPU", "H"))
def test_gpus_that_cannot_are_one_sentence(name: str) -> None:
    sentence = f"--gpu must be one of {', '.join(gpu.KNOWN)}; got {name!r}"
    assert explain(*LAYER, "--gpu", name) == (2, f"upconv: {sentence}\n")


# --- a sentence ------------------------------------------------------------------------------------------------------


def test_the_last_line_says_whose_kernel_how_long_and_how_near_the_roof() -> None:
    code, out = explain(*LAYER, "--gpu", "H100")
    p = parse_layer(LAYER[0], LAYER[2]).with_(precision="tf32")
    h100 = gpu.KNOWN["H100"]
    plan, rates = planner.plan(p, Device("cuda", gpu=h100)), estimated_ceilings(h100)
    assert plan.choice is not None
    seconds = call_seconds(plan.choice)
    roof = p.roof_seconds(rates["matmul_flops_per_s"]["tf32"], rates["copy_bytes_per_s"])
    assert code == 0 and out.splitlines()[-1] == (
        f"upconv's kernel {plan.forward} computes the forward pass in about {1e3 * seconds:.3g} ms, packing included, "
        f"on an NVIDIA H100, {roof / seconds:.0%} of the roof."
    )
    step = p.with_(pass_="step")
    plan = planner.plan(step, Device("cuda", gpu=h100))
    seconds = sum(map(call_seconds, plan.choices("step").values()))
    text = verdict(step, plan, rates)
    assert (
        f" in about {1e3 * seconds:.3g} ms, packing included, on " in text
        and "compute the forward pass and its gradients" in text
    )
    assert text.startswith(f"upconv's kernels {', '.join(plan.engine('step')[5:].split('+'))} compute ")


def test_pytorchs_own_operator_is_named_with_its_reason() -> None:
    p = Problem.make(1, 8, 8, (4, 4), 3, dtype=torch.bfloat16)
    plan = planner.plan(p, Device("cuda", unavailable="PyTorch finds no CUDA device"))
    rates = estimated_ceilings(gpu.H200)
    expected = "PyTorch's own operator computes the forward pass: PyTorch finds no CUDA device."
    assert verdict(p, plan, rates) == expected


# --- a model ---------------------------------------------------------------------------------------------------------

NET = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 16, 3, 2, 1)
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU())
        self.kernel = nn.Parameter(torch.randn(8, 4, 2, 2))
        self.again = nn.ConvTranspose2d(4, 4, 3, 1, 1, bias=False)

    def forward(self, x):
        x = self.up(self.down(x))
        x = F.conv_transpose2d(x, self.kernel, stride=2)
        return self.again(self.again(x))

class Values(Net):
    def forward(self, x):
        if x.sum().item() > 1:
            x = x + 1
        return super().forward(x)

class Sized(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 5, 3, 2)

    def forward(self, x):
        return self.up(x, output_size=[20, 20])

def make():
    return Net()

def number():
    return 3

def broken():
    raise RuntimeError("no weights\\nhere")

ready = Net()
"""
WANTED = [
    ("up.0", "16->8 k4 s2 p1 on 2x16x16x16", 1), ("again", "4->4 k3 s1 p1 on 2x4x64x64", 2),
]  # fmt: skip
"""The modules; what the model's forward calls as a function is no layer that upconv could take."""


@pytest.fixture
def net(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return str(path)


@pytest.mark.parametrize("name", ["Net", "Values", "make", "ready"])
def test_a_model_has_a_line_a_layer(name: str, net: str) -> None:
    code, out = explain("--model", f"{net}:{name}", "--input", "2x3x32x32", "--gpu", "H200", "--dtype", "bfloat16")
    lines = out.splitlines()
    assert code == 0 and lines[0] == f"{net}:{name} on 2x3x32x32 · bfloat16 · fwd" and len(lines) == 2 + 2 + 1
    seconds = roof = 0.0
    rates = estimated_ceilings(gpu.H200)
    for line, (module, layer, times) in zip(lines[2:], WANTED):
        arguments, size = layer.split(" on ")
        c_in, c_out, k, s, p = map(int, re.findall(r"\d+", arguments))
        bias = module == "up.0"
        one = parse_layer(f"{c_in},{c_out},{k},{s},{p},bias={bias}", size).with_(dtype=torch.bfloat16, precision="bf16")
        plan = planner.plan(one, Device("cuda", gpu=gpu.H200))
        of = one.roof_seconds(rates["matmul_flops_per_s"]["bf16"], rates["copy_bytes_per_s"])
        assert plan.choice is not None
        figures = f"{times} {1e3 * plan.choice.seconds:.3g} {of / plan.choice.seconds:.0%} {plan.engine('fwd')}"
        assert line.split() == [*module.split(), *layer.split(), *figures.split()]
        seconds, roof = seconds + times * plan.choice.seconds, roof + times * of
    assert lines[-1] == (
        f"upconv computes 2 of 2 transposed convolutions; upconv's take about {1e3 * seconds:.3g} ms together, "
        f"{roof / seconds:.0%} of their roof."
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("NET:broken", "2x3"), "--model NET:broken cannot be made: RuntimeError: no weights"),
        (("NET:number", "2x3"), "--model must be a torch.nn.Module or make one; got 'NET:number', a int"),
        (("NET:nope", "2x3"), "--model NET:nope cannot be made: AttributeError: module 'net' has no attribute 'nope'"),
        (("none.py:Net", "2x3"), "--model must name a file that exists; got 'none.py:Net'"),
        (("Net", "2x3"), "--model must be FILE.py:NAME or a module's name and NAME; got 'Net'"),
        (("NET:Net", "2x0"), "--input must be sizes of at least 1 joined by x, like 8x64x512x512 or 8x100; got '2x0'"),
    ],
)
def test_a_model_that_cannot_be_explained_is_one_sentence(net: str, arguments: tuple[str, str], sentence: str) -> None:
    model, size = (text.replace("NET", net) for text in arguments)
    code, out = explain("--model", model, "--input", size, "--gpu", "L4")
    assert (code, out) == (2, f"upconv: {sentence.replace('NET', net)}\n")


def test_an_output_size_becomes_the_padding_of_the_output(net: str) -> None:
    code, out = explain("--model", f"{net}:Sized", "--input", "1x3x9x9", "--gpu", "L4")
    assert code == 0 and "3->5 k3 s2 p0 op1 on 1x3x9x9" in out
