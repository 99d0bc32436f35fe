"""Kernels of several strides on a GPU, each tile against the float64 reference: what the interpreter leaves out.

That is the ring and its barriers, instructions under way while stages are given back, and the order of registers.
"""

from __future__ import annotations

import pytest
import torch

import upconv
from conftest import HOPPER, assert_capturable
from one_mapped_gpu import assert_serves, operands
from test_gather_gpu import PRECISIONS
from upconv import planner
from upconv.cuda import strides
from upconv.cuda.gpu import gpu
from upconv.problem import Problem

pytestmark = HOPPER

_make = Problem.make  # batch, channels in and out, size, kernel, stride, padding, output padding
LAYERS = {
    "2 taps, a lead": _make(5, 72, 33, (408,), 16, 8, 4),
    "3 taps, few channels": _make(3, 20, 7, (64,), 12, 4),
    "4 taps, many chunks": _make(2, 600, 10, (136,), 8, 2, 2),
    "2 taps, far ahead": _make(9, 40, 48, (24,), 12, 6, 14, 4),
    "2 taps, long": _make(1, 64, 96, (4000,), 8, 4, 2),
}


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_every_tile(name: str, precision: str) -> None:
    p = LAYERS[name].with_(bias=True, dtype=PRECISIONS[precision], precision=precision)
    terms = p.in_channels * p.kernel[-1] // p.stride[-1]
    chip, given = gpu(0), operands(p, terms)
    every = list(strides.candidates(p, chip))
    assert len(every) >= 4
    for t in every[:: 1 + len(every) // 12]:
        assert_serves(strides.Choice(t, p, chip, 0.0, ""), given, terms)


def test_infinities_stay_in_their_outputs() -> None:
    p = Problem.make(2, 40, 8, (64,), 8, 4, 2, precision="tf32")
    choice = strides.choose(p, gpu(0))
    assert isinstance(choice, strides.Choice)
    x, weight = torch.randn(p.input_shape, device="cuda"), torch.randn(p.weight_shape, device="cuda")
    x[0, 39, 5] = float("inf")
    prepared, out = choice.prepare(0), torch.empty(p.output_shape, device="cuda")
    prepared.run(x, prepared.pack(weight), None, out)
    odd = ~out.isfinite()
    assert odd[0, :, 18:26].all() and int(odd.sum()) == 8 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_forward_comes_from_it_and_is_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = upconv.ConvTranspose1d(512, 256, 16, stride=8, padding=4, device="cuda", dtype=dtype)
    x = torch.randn(8, 512, 400, device="cuda", dtype=dtype, requires_grad=True)
    with torch.backends.cudnn.flags(allow_tf32=True):
        out = layer(x)
        again = layer(x)
    p = Problem.make(
        8, 512, 256, (400,), 16, 8, 4, bias=True, dtype=dtype, precision="tf32" if dtype is torch.float32 else "bf16"
    )
    assert planner.plan(p, planner.cuda_device(0)).forward == "strides"
    assert torch.equal(out, again), "to the last bit from run to run"
    twin = torch.nn.ConvTranspose1d(512, 256, 16, stride=8, padding=4, device="cuda", dtype=torch.float64)
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    truth = twin(x.detach().double())
    assert (out.double() - truth).norm() <= (1e-3 if dtype is torch.float32 else 5e-3) * truth.norm()


def test_in_a_graph_and_on_another_stream() -> None:
    p = Problem.make(4, 64, 32, (240,), 8, 4, 2, bias=False, precision="tf32")
    choice = strides.choose(p, gpu(0))
    assert isinstance(choice, strides.Choice)
    assert_capturable(choice.prepare(0), p)
