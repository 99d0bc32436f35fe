"""Pixels as rows on a GPU, each tile against the float64 reference: what the interpreter leaves out.

That is the ring and its barriers, instructions under way while stages are given back, and the order of registers.
"""

from __future__ import annotations

import pytest
import torch

import upconv
from conftest import HOPPER, assert_capturable
from one_mapped_gpu import PRECISIONS, assert_serves, operands
from upconv import planner
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import gpu
from upconv.cuda.pixels import subpixel
from upconv.problem import Problem

pytestmark = HOPPER

# batch, channels in and out, size, kernel and stride
LAYERS: dict[str, tuple[int, int, int, tuple[int, ...], int | tuple[int, ...]]] = {
    "k2": (3, 96, 48, (20, 24), 2),
    "many tiles": (9, 64, 64, (64, 72), 2),
    "many chunks": (2, 1000, 24, (12, 16), 2),
    "odd channels": (2, 37, 11, (10, 28), 2),
    "k4": (2, 40, 12, (9, 8), (3, 4)),
    "k1 along H": (2, 64, 20, (13, 16), (1, 2)),
    "3-D": (2, 33, 40, (5, 6, 12), 2),
    "3-D flat": (1, 48, 8, (7, 10, 8), (1, 2, 2)),
    "1-D": (4, 72, 30, (1000,), 2),
    "few pixels": (5, 128, 64, (2, 4), 2),
    "odd rows": (2, 56, 24, (8, 15), 2),
}


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_every_tile(name: str, precision: str) -> None:
    batch, cin, cout, size, kernel = LAYERS[name]
    p = Problem.make(
        batch, cin, cout, size, kernel, kernel, bias=True, dtype=PRECISIONS[precision], precision=precision  # type: ignore[arg-type]
    )  # fmt: skip
    chip, given = gpu(0), operands(p, cin)
    every = list(subpixel.candidates(p, chip))
    assert len(every) >= 4
    for t in every:
        assert_serves(subpixel.Choice(t, p, chip, Cost()), given, cin)


def test_infinities_stay_in_their_outputs() -> None:
    p = Problem.make(1, 40, 8, (8, 8), 2, 2, precision="tf32")
    choice = subpixel.choose(p, gpu(0))
    assert isinstance(choice, subpixel.Choice)
    x, weight = torch.randn(p.input_shape, device="cuda"), torch.randn(p.weight_shape, device="cuda")
    x[0, 39, 3, 5] = float("inf")
    prepared, out = choice.prepare(0), torch.empty(p.output_shape, device="cuda")
    prepared.run(x, prepared.pack(weight), None, out)
    odd = ~out.isfinite()
    assert odd[0, :, 6:8, 10:12].all() and int(odd.sum()) == 8 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_layers_forward_comes_from_it_and_is_right(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    """With weights in either memory format, trained: gradients are another family's."""
    torch.manual_seed(0)
    layer = upconv.ConvTranspose2d(512, 256, 2, stride=2, device="cuda", dtype=dtype)
    layer.weight.data = layer.weight.data.contiguous(memory_format=memory_format)
    x = torch.randn(4, 512, 32, 32, device="cuda", dtype=dtype, requires_grad=True)
    with torch.backends.cudnn.flags(allow_tf32=True):
        out = layer(x)
        again = layer(x)
    p = Problem.make(
        4, 512, 256, (32, 32), 2, 2, bias=True, dtype=dtype, precision="tf32" if dtype is torch.float32 else "bf16"
    )
    assert planner.plan(p, planner.cuda_device(0)).forward == "pixels"
    if memory_format is torch.contiguous_format:
        assert out.is_contiguous()
    assert torch.equal(out, again), "to the last bit from run to run"
    twin = torch.nn.ConvTranspose2d(512, 256, 2, stride=2, device="cuda", dtype=torch.float64)
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    truth = twin(x.detach().double())
    assert (out.double() - truth).norm() <= (1e-3 if dtype is torch.float32 else 5e-3) * truth.norm()


def test_in_a_graph_and_on_another_stream() -> None:
    p = Problem.make(4, 64, 32, (24, 40), 2, 2, bias=False, precision="tf32")
    choice = subpixel.choose(p, gpu(0))
    assert isinstance(choice, subpixel.Choice)
    assert_capturable(choice.prepare(0), p)
