"""Sweeps on a GPU, each against the float64 reference: what the interpreter leaves out.

That is the rings and barriers, the consumers' turns, the order of registers, and stores of rows that begin anywhere.
"""

from __future__ import annotations

import random
import zlib

import pytest
import torch

import upconv
from conftest import HOPPER, assert_accurate, assert_capturable, off_16_bytes, tf32_magnitude
from one_mapped_gpu import PRECISIONS, _truth
from upconv import planner
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.cost import Cost
from upconv.cuda.gemm import gather_search
from upconv.cuda.gpu import gpu
from upconv.cuda.pixels import sweep
from upconv.problem import Pass, Problem

pytestmark = HOPPER

# batch, channels in and out, size, kernel, stride, padding, output_padding, dilation: rows of every alignment
LAYERS = {
    "k3": (2, 48, 24, (9, 20, 32), 3),
    "k357": (2, 32, 16, (5, 12, 24), (3, 5, 7)),
    "k3 odd": (2, 19, 11, (6, 20, 30), 3, 1, 1),
    "rows at 2 places": (2, 16, 40, (7, 18, 34), 3, 1, (2, 0, 1)),
    "k5 d": (1, 40, 8, (6, 21, 40), (5, 2, 3), 1, (4, 1, 2), (0, 1, 0), (1, 2, 1)),
    "wide": (1, 24, 32, (4, 6, 200), 3),
    "narrow": (3, 64, 48, (12, 33, 8), (2, 3, 3), 1, 1),
    "one slice": (2, 33, 5, (1, 30, 40), (3, 3, 1)),
    "k1": (2, 56, 20, (5, 16, 16), 1),
}


@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_sweeps(name: str, precision: str, layout: str, pass_: Pass) -> None:
    batch, cin, cout, size, *rest = LAYERS[name]
    p = Problem.make(
        batch, cin, cout, size, *rest, bias=True, dtype=PRECISIONS[precision], precision=precision,  # type: ignore[arg-type]
        layout=layout, pass_=pass_,  # type: ignore[arg-type]
    )  # fmt: skip
    memory_format = torch.contiguous_format if layout == "nchw" else torch.channels_last_3d

    def nothing() -> torch.Tensor:
        out = torch.full(result_shape(p), float("nan"), device=device, dtype=p.dtype)
        return out.contiguous(memory_format=memory_format)

    device, chip = torch.device("cuda", 0), gpu(0)
    torch.manual_seed(zlib.crc32(str(p).encode()))
    x = torch.randn(source_shape(p), device=device).to(p.dtype).contiguous(memory_format=memory_format)
    weight = (torch.randn(p.weight_shape, device=device) / 8).to(p.dtype)
    bias = torch.randn(p.out_channels, device=device).to(p.dtype) if pass_ == "fwd" else None
    operands = [None if t is None else t.double() for t in (x, weight, bias)]
    truth = _truth(p, *operands)  # type: ignore[arg-type]
    magnitude = _truth(p, *(None if t is None else t.abs() for t in operands))  # type: ignore[arg-type]
    products = source_shape(p)[1] * p.taps
    if precision == "tf32":
        magnitude = tf32_magnitude(magnitude, products)
    every = list(sweep.candidates(p, chip))
    rng = random.Random(zlib.crc32(str(p).encode()))
    chosen: list[sweep.Tile] = []
    for kind in (lambda s: s.turns, lambda s: s.resident and not s.turns, lambda s: not s.resident):
        for slots in {s.slots for s in every}:
            found = [s for s in every if s.slots == slots and kind(s)]
            chosen += rng.sample(found, min(2, len(found)))
    odd = source_shape(p)[1] * p.dtype.itemsize % 16
    if odd if layout == "channels_last" else gather_search.classes_of(p) is None:
        assert not every and isinstance(sweep.choose(p, chip), str)
        pytest.skip("boxes do not bring the pixels of this source")
    assert chosen
    for s in chosen:
        prepared = sweep.Choice(s, p, chip, Cost()).prepare(0)
        outs = []
        for given in (weight, weight.contiguous(memory_format=torch.channels_last_3d)):
            outs.append(nothing())
            prepared.run(x, prepared.pack(given), bias, outs[-1])
        assert torch.equal(*outs), s
        assert_accurate(outs[0], truth, magnitude, products)
        off = off_16_bytes(x).copy_(x)
        out = nothing()
        prepared.run(off, prepared.pack(weight), bias, out)
        assert torch.equal(out, outs[0])
        place = torch.full((out.numel() + 1,), float("nan"), device=device, dtype=p.dtype)
        out = place[1:].as_strided(out.shape, out.stride())  # a result off 16 bytes
        prepared.run(x, prepared.pack(weight), bias, out)
        assert torch.equal(out, outs[0]) and place[0].isnan()
        if precision != "tf32":  # autocast's operands: rounded on their way
            packed = prepared.pack(weight.float(), None if bias is None else bias.float())
            out = nothing()
            prepared.run(x, packed, None if bias is None else bias.float(), out)
            assert torch.equal(out, outs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_swept_and_its_gradients_are_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = upconv.ConvTranspose3d(32, 16, (3, 5, 7), device="cuda", dtype=dtype)
    x = torch.randn(16, 32, 10, 20, 32, device="cuda", dtype=dtype, requires_grad=True)
    with torch.backends.cudnn.flags(allow_tf32=True):
        out = layer(x)
        out.square().mean().backward()
        again = layer(x)
    p = Problem.make(
        16, 32, 16, (10, 20, 32), (3, 5, 7), bias=True, dtype=dtype,
        precision="tf32" if dtype is torch.float32 else "bf16",
    )  # fmt: skip
    assert planner.plan(p, planner.cuda_device(0)).forward == "pixels"
    assert torch.equal(out, again), "to the last bit from run to run"
    twin = torch.nn.ConvTranspose3d(32, 16, (3, 5, 7), device="cuda", dtype=torch.float64)
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    truth_x = x.detach().double().requires_grad_()
    truth = twin(truth_x)
    truth.square().mean().backward()
    bound = 3e-3 if dtype is torch.float32 else 3e-2
    pairs = (
        (out, truth),
        (x.grad, truth_x.grad),
        (layer.weight.grad, twin.weight.grad),
        (layer.bias.grad, twin.bias.grad),
    )
    for ours, theirs in pairs:
        assert ours is not None and theirs is not None
        assert (ours.double() - theirs).norm() <= bound * theirs.norm()


def test_a_sweep_in_a_graph_and_on_another_stream() -> None:
    p = Problem.make(4, 32, 16, (8, 12, 24), (3, 5, 7), bias=False, precision="tf32")
    choice = sweep.choose(p, gpu(0))
    assert isinstance(choice, sweep.Choice)
    assert_capturable(choice.prepare(0), p)
