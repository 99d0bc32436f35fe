"""Taps in pairs on a GPU, each tile against the float64 reference: what the interpreter leaves out.

That is the ring and its barriers, instructions under way while stages are given back, and lanes that exchange.
"""

from __future__ import annotations

import pytest
import torch

import upconv
from conftest import HOPPER, assert_capturable
from one_mapped_gpu import PRECISIONS, assert_serves, operands, poisoned
from upconv import planner
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import gpu
from upconv.cuda.pixels import pairs
from upconv.problem import Problem

pytestmark = HOPPER

_make = Problem.make  # batch, channels in and out, size, kernel, stride, padding, output padding, dilation
LAYERS = {
    "kernel is stride": _make(5, 72, 33, (12, 32), 2, 2),
    "the same in 3-D": _make(2, 40, 20, (3, 6, 20), (2, 3, 4), (2, 3, 4)),
    "rows without pairs of places": _make(3, 130, 24, (9, 29), (3, 8), (2, 8), (1, 0)),
    "a vocoder's": _make(3, 96, 70, (208,), 16, 8, 4),
    "odd padding": _make(4, 64, 40, (8, 16), 4, 2, 1),
    "odd kernel, output padding": _make(2, 48, 72, (10, 40), 3, 2, 1, 1),
    "odd stride": _make(2, 36, 20, (128,), 6, 3, 2, 1),
    "rows apart": _make(2, 64, 16, (11, 24), 4, (3, 4), (2, 0), 0, (2, 1)),
    "many channels": _make(1, 600, 300, (4, 64), 2, 2),
}


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_every_tile(name: str, precision: str) -> None:
    p = LAYERS[name].with_(bias=False, dtype=PRECISIONS[precision], precision=precision, pass_="grad-input")
    chip, terms = gpu(0), p.out_channels * p.taps
    if pairs.refusal(p, chip) is not None:  # rows of 16 bits that begin off 16 bytes
        assert p.out_size[-1] * p.dtype.itemsize % 16
        return
    given = operands(p, terms)
    every = [t for t in pairs.candidates(p, chip) if t.serves(p)]
    assert len(every) >= 4
    for t in every[:: 1 + len(every) // 12]:
        assert_serves(pairs.Choice(t, p, chip, Cost()), given, terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinities_stay_in_their_places(dtype: torch.dtype) -> None:
    """Of an output that one tap reaches, and of one between groups, beyond an image and its last channel."""
    p = _make(
        2, 40, 9, (4, 36), 4, 2, 1, bias=False, dtype=dtype, precision="tf32" if dtype is torch.float32 else "bf16",
        pass_="grad-input",
    )  # fmt: skip
    choice = pairs.choose(p, gpu(0))
    assert isinstance(choice, pairs.Choice)
    grad, weight = torch.randn(p.output_shape, device="cuda").to(dtype), torch.rand(p.weight_shape, device="cuda") + 1
    grad[0, 8, 3, 0] = grad[1, 4, 0, 64] = float("inf")
    prepared, out = choice.prepare(0), poisoned(p)
    prepared.run(grad, prepared.pack(weight.to(dtype)), None, out)
    odd = ~out.isfinite()
    assert odd[0, :, 1:3, 0].all() and odd[1, :, 0, 31:34].sum() == 40 * 2 and int(odd.sum()) == 40 * (2 + 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_gradient_comes_from_it_and_is_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = upconv.ConvTranspose2d(256, 128, 2, stride=2, device="cuda", dtype=dtype)
    x = torch.randn(8, 256, 32, 32, device="cuda", dtype=dtype, requires_grad=True)
    grad = torch.randn(8, 128, 64, 64, device="cuda", dtype=dtype)
    with torch.backends.cudnn.flags(allow_tf32=True):
        (found,) = torch.autograd.grad(layer(x), x, grad)
        (again,) = torch.autograd.grad(layer(x), x, grad)
    p = Problem.make(
        8, 256, 128, (32, 32), 2, 2, bias=True, dtype=dtype, precision="tf32" if dtype is torch.float32 else "bf16"
    )
    assert planner.plan(p, planner.cuda_device(0)).selection("grad-input").name == "pixels"
    assert torch.equal(found, again), "to the last bit from run to run"
    truth = torch.nn.functional.conv2d(grad.double(), layer.weight.double(), stride=2)
    assert (found.double() - truth).norm() <= (1e-3 if dtype is torch.float32 else 5e-3) * truth.norm()


def test_in_a_graph_and_on_another_stream() -> None:
    p = _make(4, 64, 32, (16, 32), 2, 2, bias=False, precision="tf32", pass_="grad-input")
    choice = pairs.choose(p, gpu(0))
    assert isinstance(choice, pairs.Choice)
    assert_capturable(choice.prepare(0), p)
