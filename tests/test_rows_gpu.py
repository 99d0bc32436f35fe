"""Rows as they lie on a GPU, each against the float64 reference: what the interpreter leaves out.

That is the ring and its barriers, copies that are under way, fragments' registers, and stores.
"""

from __future__ import annotations

import random
import zlib

import pytest
import torch

import upconv
from conftest import HOPPER, assert_accurate, assert_capturable, tf32_magnitude
from test_gather_gpu import PRECISIONS, _truth
from upconv import planner
from upconv.cuda import rows
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.gpu import gpu
from upconv.problem import Problem

pytestmark = HOPPER

# batch, channels in and out, size, kernel, stride, padding, output_padding: rows that begin anywhere, and at 16 bytes
LAYERS = {
    "k3": (2, 32, 32, (5, 9, 64), 3, 2, 1),
    "k3 even": (2, 16, 32, (4, 7, 40), 3, 2, 1, 1),
    "k3 odd channels": (1, 19, 11, (6, 5, 70), 3, 2, 1),
    "k4": (1, 24, 16, (3, 8, 33), 4, 2, 1),
    "k5 s3": (2, 8, 16, (4, 6, 50), 5, 3, (2, 1, 3), (2, 0, 1)),
    "k2": (2, 40, 24, (3, 5, 130), 2, 2),
    "k1 along D": (2, 12, 20, (4, 9, 20), (1, 3, 2), (2, 2, 2), (0, 1, 0), (1, 0, 1)),
    "s1 along D": (1, 16, 16, (9, 6, 30), (3, 2, 3), (1, 2, 2), 1, (0, 1, 0)),
    "s3 over k2 along D": (2, 8, 8, (6, 4, 25), (2, 3, 4), (3, 2, 2), (0, 2, 1), (2, 1, 0)),
    "narrow": (3, 16, 8, (5, 11, 1), (3, 3, 5), 2, (1, 1, 2), 1),
    "one slice": (2, 33, 5, (1, 1, 66), 3, 2, 1),
    "padding as the kernel": (1, 16, 16, (6, 6, 20), 3, 2, 2, 1),
}


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_rows(name: str, precision: str) -> None:
    batch, cin, cout, size, *rest = LAYERS[name]
    p = Problem.make(
        batch, cin, cout, size, *rest, bias=False, dtype=PRECISIONS[precision], precision=precision,
        pass_="grad-input",
    )  # fmt: skip
    device, chip = torch.device("cuda", 0), gpu(0)
    torch.manual_seed(zlib.crc32(str(p).encode()))
    grad = torch.randn(source_shape(p), device=device).to(p.dtype)
    weight = (torch.randn(p.weight_shape, device=device) / 8).to(p.dtype)
    truth = _truth(p, grad.double(), weight.double(), None)
    magnitude = _truth(p, grad.double().abs(), weight.double().abs(), None)
    products = source_shape(p)[1] * p.taps
    if precision == "tf32":
        magnitude = tf32_magnitude(magnitude, products)
    every = list(rows.candidates(p, chip))
    assert every
    for s in random.Random(zlib.crc32(name.encode())).sample(every, min(4, len(every))):
        prepared = rows.Choice(s, p, chip, 0.0, "").prepare(0)
        outs = []
        for given in (weight, weight.contiguous(memory_format=torch.channels_last_3d)):
            out = torch.full(result_shape(p), float("nan"), device=device, dtype=p.dtype)
            prepared.run(grad, prepared.pack(given), None, out)
            outs.append(out)
        assert torch.equal(*outs), s
        assert_accurate(outs[0], truth, magnitude, products)
        for off in (1, 3):  # a gradient and a result that begin off 16 bytes, amid what must not be read or written
            around = torch.full((grad.numel() + off + 8,), float("nan"), device=device, dtype=p.dtype)
            view = around[off:][: grad.numel()].view(grad.shape).copy_(grad)
            place = torch.full((truth.numel() + off + 8,), float("nan"), device=device, dtype=p.dtype)
            out = place[off:][: truth.numel()].view(truth.shape)
            prepared.run(view, prepared.pack(weight), None, out)
            assert torch.equal(out, outs[0]), s
            assert int(place.isnan().sum()) == off + 8
        if precision != "tf32":  # autocast's weights: rounded on their way
            out = torch.full_like(outs[0], float("nan"))
            prepared.run(grad, prepared.pack(weight.float()), None, out)
            assert torch.equal(out, outs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_gradient_comes_from_rows_and_is_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    settings = {"stride": 2, "padding": 1}
    layer = upconv.ConvTranspose3d(32, 32, 3, **settings, device="cuda", dtype=dtype)
    x = torch.randn(4, 32, 16, 32, 128, device="cuda", dtype=dtype, requires_grad=True)
    with torch.backends.cudnn.flags(allow_tf32=True):
        layer(x).square().mean().backward()
        first, x.grad = x.grad, None
        layer(x).square().mean().backward()
    p = Problem.make(
        4, 32, 32, (16, 32, 128), 3, 2, 1, bias=True, dtype=dtype,
        precision="tf32" if dtype is torch.float32 else "bf16",
    )  # fmt: skip
    assert planner.plan(p, planner.cuda_device(0)).selection("grad-input").name == "rows"
    assert first is not None and x.grad is not None and torch.equal(first, x.grad), "to the last bit from run to run"
    twin = torch.nn.ConvTranspose3d(32, 32, 3, **settings, device="cuda", dtype=torch.float64)
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    truth_x = x.detach().double().requires_grad_()
    twin(truth_x).square().mean().backward()
    assert truth_x.grad is not None
    assert (x.grad.double() - truth_x.grad).norm() <= (3e-3 if dtype is torch.float32 else 3e-2) * truth_x.grad.norm()


def test_rows_in_a_graph_and_on_another_stream() -> None:
    p = Problem.make(2, 32, 16, (8, 12, 50), 3, 2, 1, bias=False, precision="tf32", pass_="grad-input")
    choice = rows.choose(p, gpu(0))
    assert isinstance(choice, rows.Choice)
    assert_capturable(choice.prepare(0), p)
