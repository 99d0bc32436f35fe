"""Joined rows on a GPU, each tile against the float64 reference: what the interpreter leaves out.

That is the rings and their barriers, consumers' turns, instructions under way while stages are given back, and the
order of registers. Every second tile runs on two blocks, whose consumers then have several tiles each.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import upconv
from conftest import HOPPER, assert_capturable
from one_mapped_gpu import assert_serves, operands
from test_gather_gpu import PRECISIONS
from upconv import planner
from upconv.cuda.axes import source_shape
from upconv.cuda.gemm import joined
from upconv.cuda.gpu import gpu
from upconv.problem import Problem

pytestmark = HOPPER

_make = Problem.make  # batch, channels in and out, size, kernel, stride, padding, output padding, dilation
LAYERS = {
    "3-D, two blocks of channels": _make(2, 40, 70, (4, 14, 64), 3),
    "3-D, slices that begin off 16 bytes": _make(1, 20, 48, (14, 9, 24), 3),
    "long kernels, many stages": _make(1, 96, 64, (5, 12, 64), (3, 5, 5)),
    "padded slices and rows": _make(2, 16, 33, (6, 14, 32), (4, 3, 5), 1, (2, 1, 0)),
    "dilated, columns behind the boxes": _make(1, 24, 64, (6, 11, 56), (2, 2, 7), 1, 0, (1, 0, 0), (2, 1, 3)),
    "2-D, a slice of many tiles": _make(3, 64, 128, (62, 128), (3, 5)),
    "2-D, wide boxes": _make(2, 17, 5, (14, 248), (3, 9)),
    "a line, padded": _make(5, 40, 48, (408,), 7, 1, 9, 0, 3),
    "a line, of many channels": _make(2, 130, 128, (4096,), 3),
    "a line's gradient": _make(3, 70, 40, (1000,), 11, 1, 25, 0, 5, pass_="grad-input"),
    "a line's gradient, more padding than taps": _make(3, 64, 24, (518,), 3, 1, 4, pass_="grad-input"),
    "3-D gradient": _make(2, 40, 24, (5, 12, 50), 3, 1, 2, pass_="grad-input"),
    "a line, taps far apart": _make(2, 40, 64, (4000,), 3, 1, 512, 0, 512),
    "narrow images": _make(2, 40, 64, (4, 30, 16), 3),
    "narrowest images": _make(1, 24, 64, (4, 40, 8), 3),
    "more slices of padding than there are": _make(2, 8, 64, (1, 14, 64), (5, 3, 3), 1, (2, 0, 0)),
}


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_every_tile(name: str, precision: str) -> None:
    p = LAYERS[name].with_(bias=True, dtype=PRECISIONS[precision], precision=precision)
    terms = source_shape(p)[1] * math.prod(p.kernel)
    chip, given = gpu(0), operands(p, terms)
    assert joined.refusal(p, chip) is None
    every = list(joined.candidates(p, chip))
    assert len(every) >= 2
    for i, t in enumerate(every[:: 1 + len(every) // 6]):
        assert_serves(
            joined.Choice(t, p, replace(chip, multiprocessors=2) if i % 2 == 0 else chip, 0.0, ""), given, terms
        )


def test_a_line_of_which_a_channel_has_over_2_31_bytes() -> None:
    n, k = 2**29 + 4096, 3
    if torch.cuda.mem_get_info()[0] < 10 * n:
        pytest.skip("needs 5.4 GB")
    p = Problem.make(1, 1, 1, (n,), k, precision="tf32")
    choice = joined.choose(p, gpu(0))
    assert isinstance(choice, joined.Choice)
    x, weight = torch.randn(p.input_shape, device="cuda"), torch.randn(p.weight_shape, device="cuda")
    prepared, out = choice.prepare(0), torch.full(p.output_shape, math.nan, device="cuda")
    prepared.run(x, prepared.pack(weight), None, out)
    for at in (2, n // 2, n - 5000):
        truth = torch.nn.functional.conv1d(x[..., at - k + 1 : at + 4000].double(), weight.double().flip(2))
        found = out[..., at : at + 4000].double()
        assert (found - truth).norm() <= 1e-3 * truth.norm()
    assert not out.isnan().any()


def test_infinities_stay_in_their_outputs() -> None:
    p = Problem.make(2, 40, 8, (4, 14, 64), 3, precision="tf32")
    choice = joined.choose(p, gpu(0))
    assert isinstance(choice, joined.Choice)
    x, weight = torch.randn(p.input_shape, device="cuda"), torch.randn(p.weight_shape, device="cuda")
    x[0, 39, 3, 13, 63] = float("inf")
    prepared, out = choice.prepare(0), torch.empty(p.output_shape, device="cuda")
    prepared.run(x, prepared.pack(weight), None, out)
    odd = ~out.isfinite()
    assert odd[0, :, 3:, 13:, 63:].all() and int(odd.sum()) == 8 * 27


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_forward_comes_from_it_and_is_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = upconv.ConvTranspose3d(48, 64, 3, device="cuda", dtype=dtype)
    x = torch.randn(4, 48, 16, 46, 64, device="cuda", dtype=dtype, requires_grad=True)
    with torch.backends.cudnn.flags(allow_tf32=True):
        out = layer(x)
        again = layer(x)
    precision = "tf32" if dtype is torch.float32 else "bf16"
    p = Problem.make(4, 48, 64, (16, 46, 64), 3, bias=True, dtype=dtype, precision=precision)
    assert planner.plan(p, planner.cuda_device(0)).forward == "joined"
    assert torch.equal(out, again), "to the last bit from run to run"
    twin = torch.nn.ConvTranspose3d(48, 64, 3, device="cuda", dtype=torch.float64)
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    truth = twin(x.detach().double())
    assert (out.double() - truth).norm() <= (1e-3 if dtype is torch.float32 else 5e-3) * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_convolution_with_its_bias(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv1d(128, 128, 7, padding=9, dilation=3, device="cuda", dtype=dtype)
    x = torch.randn(16, 128, 4096, device="cuda", dtype=dtype)
    precision = "tf32" if dtype is torch.float32 else "bf16"
    p = Problem.make(
        16, 128, 128, (4096,), 7, 1, 9, 0, 3, bias=True, dtype=dtype, precision=precision, pass_="grad-input"
    )
    choice = joined.choose(p, gpu(0))
    assert isinstance(choice, joined.Choice)
    prepared, out = choice.prepare(0), torch.full(p.input_shape, math.nan, device="cuda", dtype=dtype)
    assert prepared.biased and layer.bias is not None
    prepared.run(x, prepared.pack(layer.weight.detach()), layer.bias.detach(), out)
    truth = layer.double()(x.double())
    assert (out.double() - truth).norm() <= (1e-3 if dtype is torch.float32 else 5e-3) * truth.norm()


def test_in_a_graph_and_on_another_stream() -> None:
    p = Problem.make(2, 24, 40, (3, 14, 64), 3, bias=False, precision="tf32")
    choice = joined.choose(p, gpu(0))
    assert isinstance(choice, joined.Choice)
    assert_capturable(choice.prepare(0), p)
