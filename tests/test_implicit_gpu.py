"""The implicit GEMM on a GPU, each tile against the float64 reference: what the interpreter leaves out.

That is the ring and its barriers, boxes that are under way, consumers' halves and turns, clusters' sums, and stores.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch

import upconv
from conftest import HOPPER, assert_accurate, assert_capturable, tf32_magnitude
from one_mapped_gpu import PRECISIONS, _truth
from test_implicit import tiles_of
from upconv import planner
from upconv.cpu import memory_format
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import gpu
from upconv.cuda.pixels import implicit
from upconv.problem import Pass, Problem

pytestmark = HOPPER

# batch, channels in and out, size, kernel, stride, padding, output_padding, dilation
LAYERS = {
    "images of 14 x 14": (5, 96, 64, (14, 14), 2, 2),
    "images of 4 x 4": (9, 256, 136, (4, 4), 4, 2, 1),
    "k3": (2, 24, 40, (13, 17), 3, 2, 1, 1),
    "k3 of one channel": (3, 1, 16, (9, 31), 3, 2, 1),
    "odd channels": (3, 7, 16, (9, 31), (3, 5), (2, 3), (1, 2), (0, 1), (1, 2)),
    "odd channels of several blocks": (3, 301, 24, (5, 7), 2, 2),
    "3-D": (1, 32, 32, (6, 11, 20), 3, 2, 1),
    "3-D of small images": (6, 320, 72, (4, 4, 4), 4, 2, 1),
    "many tiles": (4, 64, 32, (96, 130), 4, 2, 1),
    "steps over pixels": (2, 32, 64, (20, 40), 3, 5, 1, 0, 2),
    "without a stride": (2, 40, 24, (17, 18), 3, 1, 1),
    "one tap": (2, 40, 24, (17, 18), 1, 1),
    "one pixel": (5, 16, 16, (1, 1), 3, 2),
    "many blocks of columns": (2, 1100, 264, (3, 5), 2, 2),
    "phases without taps": (2, 40, 24, (17, 18), 2, (3, 4)),
    "phases of a row": (3, 33, 64, (5, 150), (4, 1), (3, 1), (1, 0)),
}


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(p: Problem) -> Given:
    """A gradient in channels_last, a contiguous weight, the result in float64, and what its sums' terms come to."""
    torch.manual_seed(zlib.crc32(str(p).encode()))
    grad = torch.randn(source_shape(p), device="cuda").to(p.dtype)
    weight = (torch.randn(p.weight_shape, device="cuda") / 8).to(p.dtype)
    truth = _truth(p, grad.double(), weight.double(), None)
    magnitude = _truth(p, grad.double().abs(), weight.double().abs(), None)
    if p.precision == "tf32":
        products = source_shape(p)[1] * p.taps
        magnitude = tf32_magnitude(magnitude, products)
    return grad.contiguous(memory_format=memory_format("channels_last", p.rank)), weight, truth, magnitude


def assert_serves(prepared: Any, p: Problem, given: Given, about: object) -> None:
    """Kernels are right for `operands`, and give the same bits for weights and gradients that lie in any way.

    ``about``: the tile, for the message.
    """
    grad, weight, truth, magnitude = given
    device, last = grad.device, memory_format("channels_last", p.rank)
    products = source_shape(p)[1] * p.taps

    def empty(numel: int, off: int) -> torch.Tensor:
        return torch.full((numel + off + 8,), float("nan"), device=device, dtype=p.dtype)

    outs = []
    for one in (weight, weight.contiguous(memory_format=last)):
        out = torch.full(result_shape(p), float("nan"), device=device, dtype=p.dtype).contiguous(memory_format=last)
        prepared.run(grad, prepared.pack(one), None, out, fresh=True)
        outs.append(out)
    assert torch.equal(*outs), about
    assert_accurate(outs[0], truth, magnitude, products)
    for off in (1, 3):  # a gradient and a result that begin off 16 bytes, amid what must not be read or written
        around, place = empty(grad.numel(), off), empty(truth.numel(), off)
        view = around.as_strided(grad.shape, grad.stride(), off).copy_(grad)
        out = place.as_strided(truth.shape, outs[0].stride(), off)
        prepared.run(view, prepared.pack(weight), None, out)
        assert torch.equal(out, outs[0]), about
        assert int(place.isnan().sum()) == off + 8
    moved = torch.empty(weight.numel() + 1, device=device, dtype=p.dtype)
    moved = moved.as_strided(weight.shape, weight.contiguous(memory_format=last).stride(), 1).copy_(weight)
    others = [moved]  # channels-last off 16 bytes, which no box brings
    if p.precision != "tf32":  # autocast's weights: rounded on their way
        others += [weight.float(), weight.float().contiguous(memory_format=last)]
    for one in others:
        out = torch.full_like(outs[0], float("nan"))
        prepared.run(grad, prepared.pack(one), None, out)
        assert torch.equal(out, outs[0]), about


@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_implicit(name: str, precision: str, pass_: Pass) -> None:
    """The second number of channels is the source's, which a forward reads."""
    batch, result, source, size, *rest = LAYERS[name]
    cin, cout = (source, result) if pass_ == "fwd" else (result, source)
    p = Problem.make(
        batch, cin, cout, size, *rest, bias=False, dtype=PRECISIONS[precision], precision=precision,
        layout="channels_last", pass_=pass_,
    )  # fmt: skip
    given = grad, weight, truth, magnitude = operands(p)
    products = source_shape(p)[1] * p.taps
    every = random.Random(zlib.crc32(name.encode())).sample(tiles := tiles_of(p), len(tiles))
    assert every
    kinds = list({(t.halves, t.cluster): t for t in every}.values())  # each number of blocks, and turns

    for t in (*kinds, *every[:2]):
        prepared = implicit.Choice(t, p, gpu(0), Cost()).prepare(0)
        assert_serves(prepared, p, given, t)
        bias = torch.randn(result, device=grad.device, dtype=p.dtype)  # or a plain convolution's
        out = torch.full(result_shape(p), float("nan"), device=grad.device, dtype=p.dtype)
        out = out.contiguous(memory_format=memory_format("channels_last", p.rank))
        prepared.run(grad, prepared.pack(weight), bias, out)
        added = bias.double().view(-1, *(1,) * p.rank)
        assert_accurate(out, truth + added, magnitude + added.abs(), products + 1)
        if pass_ == "fwd" and p.dtype.itemsize == 2:  # as autocast leaves them: rounded by what packs
            rounded = torch.full_like(out, float("nan"))
            prepared.run(grad, prepared.pack(weight.float(), bias.float()), bias.float(), rounded)
            assert torch.equal(rounded, out)


@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
@pytest.mark.parametrize("stages", (2, 3, 4, 5))
@pytest.mark.parametrize("halves", (True, False))
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_turns_of_consumers_around_short_rings(precision: str, halves: bool, stages: int, pass_: Pass) -> None:
    """Few blocks with many tiles each: every stage is taken again, by another consumer or by both."""
    p = Problem.make(
        2, 64, 72, (50, 70), 3, 2, 1, 1, bias=False, dtype=PRECISIONS[precision], precision=precision,
        layout="channels_last", pass_=pass_,
    )  # fmt: skip
    grad, contiguous, truth, magnitude = operands(p)
    last = memory_format("channels_last", p.rank)
    weight, products = contiguous.contiguous(memory_format=last), source_shape(p)[1] * p.taps
    every = [t for t in tiles_of(p) if t.halves == halves and t.stages >= stages and t.cluster == 1]
    assert every
    for t in {(t.mb, t.columns): t for t in every}.values():
        for blocks in (3, 7):
            choice = implicit.Choice(replace(t, stages=stages), p, replace(gpu(0), multiprocessors=blocks), Cost())
            assert choice.grid <= blocks < t.tiles(p)
            prepared = choice.prepare(0)
            out = torch.full(result_shape(p), float("nan"), device="cuda", dtype=p.dtype).contiguous(memory_format=last)
            prepared.run(grad, prepared.pack(weight), None, out)
            assert_accurate(out, truth, magnitude, products)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_gradient_comes_from_it_and_is_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    last = torch.channels_last
    layer = upconv.ConvTranspose2d(256, 256, 2, stride=2, device="cuda", dtype=dtype).to(memory_format=last)
    x = torch.randn(100, 256, 14, 14, device="cuda", dtype=dtype).contiguous(memory_format=last).requires_grad_()
    with torch.backends.cudnn.flags(allow_tf32=True):
        layer(x).square().mean().backward()
        first, x.grad = x.grad, None
        layer(x).square().mean().backward()
    p = Problem.make(
        100, 256, 256, (14, 14), 2, 2, bias=True, dtype=dtype, layout="channels_last",
        precision="tf32" if dtype is torch.float32 else "bf16",
    )  # fmt: skip
    assert planner.plan(p, planner.cuda_device(0)).selection("grad-input").name == "pixels"
    assert first is not None and x.grad is not None and torch.equal(first, x.grad), "to the last bit from run to run"
    assert x.grad.is_contiguous(memory_format=last)
    twin = torch.nn.ConvTranspose2d(256, 256, 2, stride=2, device="cuda", dtype=torch.float64)
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    truth_x = x.detach().double().contiguous().requires_grad_()
    twin(truth_x).square().mean().backward()
    assert truth_x.grad is not None
    assert (x.grad.double() - truth_x.grad).norm() <= (3e-3 if dtype is torch.float32 else 3e-2) * truth_x.grad.norm()


def test_implicit_in_a_graph_and_on_another_stream() -> None:
    p = Problem.make(8, 128, 64, (14, 14), 2, 2, bias=False, precision="tf32", layout="channels_last")
    for q in (p, p.with_(pass_="grad-input")):
        choice = implicit.choose(q, gpu(0))
        assert isinstance(choice, implicit.Choice)
        assert_capturable(choice.prepare(0), q)
