"""Phases as columns on a GPU, each tile against the float64 reference: what the interpreter leaves out.

That is rings and their barriers, boxes and instructions that are under way, and the order of registers.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import upconv
from conftest import HOPPER, assert_accurate, assert_capturable
from one_mapped_gpu import PRECISIONS, assert_serves, operands, poisoned
from upconv import planner
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import gpu
from upconv.cuda.pixels import phases
from upconv.cuda.pixels.tile import CONSUMERS
from upconv.problem import Problem

pytestmark = HOPPER

# batch, channels in and out, size, kernel, stride, padding, output_padding, dilation: rows that begin anywhere, and at
# 16 bytes, phases of 1 to 5 along W, without a tap at some of a row's places, channels that fill no step and no column
LAYERS = {
    "k3": (2, 32, 32, (5, 9, 64), 3, 2, 1),
    "k3 odd channels": (1, 19, 11, (6, 5, 72), 3, 2, 1),
    "k4": (3, 24, 16, (13, 40), 4, 2, 1),
    "k5 s3": (2, 8, 17, (7, 48), 5, 3, (2, 1), (0, 1)),
    "s1 along W": (2, 16, 24, (11, 96), 3, (2, 1), 1, (1, 0)),
    "s1 along H": (2, 40, 3, (9, 96), 3, (1, 2), (1, 0), (0, 1)),
    "1-D": (4, 72, 24, (1000,), 7, 5, 1),
    "four widths": (3, 12, 8, (400,), 5, 4, 0, 0, 5),
    "many chunks": (1, 100, 16, (10, 32), (3, 2), 2, (1, 0)),
}


def products(p: Problem) -> int:
    return p.in_channels * p.taps


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_phases(name: str, precision: str) -> None:
    batch, cin, cout, size, *rest = LAYERS[name]
    p = Problem.make(
        batch, cin, cout, size, *rest, bias=True, dtype=PRECISIONS[precision], precision=precision  # type: ignore[arg-type]
    )  # fmt: skip
    chip = gpu(0)
    every = list(phases.candidates(p, chip))
    assert every
    t = random.Random(f"{name} {precision}").choice(every)
    assert_serves(phases.Choice(t, p, chip, Cost()), operands(p, products(p)), products(p))


@pytest.mark.parametrize("kernel", [3, 4])
def test_sizes_by_one_kernel(kernel: int) -> None:
    """A tile of a layer, for batches and sizes that fill it and that do not, whose rows begin alike."""
    layer = Problem.make(1, 20, 12, (16, 32), kernel, 2, 1, bias=True, dtype=torch.bfloat16, precision="bf16")
    chip = gpu(0)
    t = next(t for t in phases.candidates(layer, chip) if t.shape == (1, 2, 32))
    sources = set()
    for batch, size in ((1, (16, 32)), (3, (1, 8)), (2, (33, 24)), (1, (2, 256)), (17, (5, 40)), (1, (200, 104))):
        p = layer.with_(batch=batch, size=size)
        choice = phases.Choice(t, p, chip, Cost())
        sources.add(choice.sources()[0].source)
        x, weight, bias, truth, magnitude = operands(p, products(p))
        prepared, out = choice.prepare(0), poisoned(p)
        prepared.run(x, prepared.pack(weight), bias, out)
        assert_accurate(out, truth, magnitude, products(p))
    assert len(sources) == 1


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_many_tiles_of_a_block_around_short_rings(precision: str, stages: int) -> None:
    """An odd number of them, so that consumers have one more or less; three chunks of each, so that rings wrap."""
    cin = 24 if precision == "tf32" else 48
    p = Problem.make(
        3, cin, 16, (67, 144), 3, 2, 1, bias=True, dtype=PRECISIONS[precision], precision=precision  # type: ignore[arg-type]
    )  # fmt: skip
    x, weight, bias, truth, magnitude = operands(p, products(p))
    every = phases.candidates(p, gpu(0))
    t = next(t for t in every if t.shape == (1, 1, 64) and t.chunks == 3)
    t = replace(t, stages=stages)
    assert t.tiles(p) > 2 * 2 * 132 and t.tiles(p) % 2 == 1
    outs = []
    for blocks in (gpu(0).multiprocessors, 7, 1):
        choice = phases.Choice(t, p, replace(gpu(0), multiprocessors=blocks), Cost())
        assert choice.grid <= blocks and t.tiles(p) > CONSUMERS * choice.grid
        prepared, out = choice.prepare(0), poisoned(p)
        prepared.run(x, prepared.pack(weight), bias, out)
        outs.append(out)
    assert_accurate(outs[0], truth, magnitude, products(p))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("cout", [32, 48])
def test_long_rows_are_right_and_equal_to_the_bit(cout: int) -> None:
    """Stages given back before their loads had arrived were overwritten where many stores delayed these."""
    p = Problem.make(8, 96, cout, (66000,), 8, 4, dtype=torch.float32, precision="tf32")
    choice = phases.choose(p, gpu(0))
    assert isinstance(choice, phases.Choice) and choice.tile.stages > 4
    x, weight, bias, truth, magnitude = operands(p, products(p))
    prepared, outs = choice.prepare(0), [poisoned(p) for _ in range(4)]
    for out in outs:
        prepared.run(x, prepared.pack(weight), bias, out)
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    assert_accurate(outs[0], truth, magnitude, products(p))


def test_fewer_tiles_than_consumers() -> None:
    """The second consumer of a block has none."""
    p = Problem.make(1, 32, 32, (1, 64), 3, 2, 1, bias=True, precision="tf32")
    x, weight, bias, truth, magnitude = operands(p, products(p))
    choice = phases.choose(p, gpu(0))
    assert isinstance(choice, phases.Choice)
    choice = replace(choice, tile=next(t for t in phases.candidates(p, gpu(0)) if t.tiles(p) == 1))
    prepared, out = choice.prepare(0), poisoned(p)
    assert choice.grid == 1
    prepared.run(x, prepared.pack(weight), bias, out)
    assert_accurate(out, truth, magnitude, products(p))


def test_infinities_stay_in_their_outputs() -> None:
    """Where all columns of a shift have taps."""
    p = Problem.make(1, 40, 8, (8, 24), 3, 2, precision="tf32")
    assert all(tap >= 0 for s in phases.shifts_of(p)[1] for tap in s.taps)
    choice = phases.choose(p, gpu(0))
    assert isinstance(choice, phases.Choice)
    x, weight = torch.randn(p.input_shape, device="cuda"), torch.randn(p.weight_shape, device="cuda")
    x[0, 39, 3, 5] = float("inf")
    prepared, out = choice.prepare(0), poisoned(p)
    prepared.run(x, prepared.pack(weight), None, out)
    odd = ~out.isfinite()
    assert odd[0, :, 6:9, 10:13].all() and int(odd.sum()) == 8 * 9


def test_a_layers_forward_comes_from_it_and_is_right() -> None:
    """On the default stream and on another one, and to the last bit from run to run."""
    torch.manual_seed(0)
    layer = upconv.ConvTranspose3d(32, 32, 3, stride=2, padding=1, device="cuda")
    x = torch.randn(4, 32, 16, 32, 128, device="cuda")
    p = Problem.make(4, 32, 32, (16, 32, 128), 3, 2, 1, bias=True, precision="tf32")
    assert planner.plan(p, planner.cuda_device(0)).forward == "pixels"
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=True):
        out = layer(x)
        again = layer(x)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            beside = layer(x)
        stream.synchronize()
    assert out.is_contiguous() and torch.equal(out, again) and torch.equal(out, beside)
    twin = torch.nn.ConvTranspose3d(32, 32, 3, stride=2, padding=1, device="cuda", dtype=torch.float64)
    twin.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    truth = twin(x.double())
    assert (out.double() - truth).norm() <= 1e-3 * truth.norm()


@pytest.mark.parametrize("kernel", [3, 4])
def test_in_a_graph_and_on_another_stream(kernel: int) -> None:
    p = Problem.make(2, 32, 16, (12, 40), kernel, 2, 1, bias=False, precision="tf32")
    choice = phases.choose(p, gpu(0))
    assert isinstance(choice, phases.Choice)
    assert_capturable(choice.prepare(0), p)
