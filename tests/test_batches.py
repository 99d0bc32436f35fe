"""Batches of small images as other problems: one image whose width is the batch, in channels_last.

The tilings of these are those of any 3-D problem: test_emulated.py and the tests of modes have what they compute.
Here is what differs: where the tensors' elements lie, which of the problems is chosen, and kernels on a GPU.
"""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import upconv
from conftest import assert_accurate, tf32_magnitude
from upconv import planner, reference
from upconv.cuda import families
from upconv.cuda.axes import Unfit, any_size
from upconv.cuda.compile import boxes
from upconv.cuda.gemm import gather, gather_search
from upconv.cuda.gpu import A100, H200, gpu
from upconv.cuda.pixels import implicit
from upconv.cuda.rearrange import batches, relayout
from upconv.cuda.wgrad import wgrad, wgrad_search
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Layout, Pass, Precision, Problem

DTYPES = {"tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# batch, channels in and out, size, kernel, stride, padding, output_padding, dilation, groups
LAYERS: dict[str, tuple[Any, ...]] = {
    "4x4": (70, 64, 72, (4, 4), 4, 2, 1),
    "2x2": (19, 40, 136, (2, 2), 3, 2, 1, 1),
    "7x5": (9, 24, 32, (7, 5), (3, 5), (1, 2), (1, 2)),
    "1x1": (130, 32, 48, (1, 1), 4),
    "3x3 d2": (33, 16, 64, (3, 3), 3, 1, 2, 0, 2),
    "k2s2": (40, 128, 96, (6, 4), 2, 2),
    "g2": (20, 64, 64, (4, 6), 3, 1, 1, 0, 1, 2),
}


def layer(name: str, precision: Precision, pass_: Pass) -> Problem:
    return Problem.make(
        *LAYERS[name], dtype=DTYPES[precision], precision=precision, layout="channels_last", pass_=pass_
    )  # fmt: skip


def abreast(p: Problem) -> Problem:
    found = p.abreast
    assert found is not None
    return found


@pytest.mark.parametrize("name", list(LAYERS))
def test_images_side_by_side_are_the_same_layer(name: str) -> None:
    """In float64, the batch moved behind the width; every gradient too."""
    p = layer(name, "bf16", "fwd").with_(dtype=torch.float64, precision="fp64")
    q = abreast(p)
    torch.manual_seed(1)
    x, g, w = (torch.randn(s, dtype=torch.float64) for s in (p.input_shape, p.output_shape, p.weight_shape))

    def beside(t: Tensor) -> Tensor:
        return t.permute(1, 2, 3, 0)[None]

    assert q.out_size == (*p.out_size, p.batch) and beside(x).shape == q.input_shape
    assert q.macs == p.macs and q.bytes == p.bytes and q.weight_shape == (*p.weight_shape, 1)
    out = reference.forward(q, beside(x), w[..., None], None)
    torch.testing.assert_close(out, beside(reference.forward(p, x, w, None)))
    for found, wanted in zip(
        reference.gradients(q, beside(g), beside(x), w[..., None])[:2], reference.gradients(p, g, x, w)[:2]
    ):
        torch.testing.assert_close(found, beside(wanted) if wanted.shape == x.shape else wanted[..., None])


STACKED: dict[str, tuple[Any, ...]] = {
    "k2s2": (5, 24, 40, (7, 14), 2, 2),
    "k3s3": (3, 16, 64, (9, 5), 3, 3),
    "k24": (4, 32, 24, (3, 18), (2, 4), (2, 4)),
    "3-D": (3, 16, 32, (3, 4, 5), 2, 2),
}


@pytest.mark.parametrize("name", list(STACKED))
def test_images_one_below_the_other_are_the_same_layer(name: str) -> None:
    """In float64 and in memory: a batch in channels_last, read as one image of it, gives the batch of results."""
    p = Problem.make(*STACKED[name], dtype=torch.float64, layout="channels_last")
    q = p.stacked
    assert q is not None and (q.batch, q.size) == (1, (p.batch * p.size[0], *p.size[1:])) and q.macs == p.macs
    torch.manual_seed(1)
    w = torch.randn(p.weight_shape, dtype=torch.float64)
    memory = torch.randn(p.batch, *p.size, p.in_channels, dtype=torch.float64)
    x, y = memory.movedim(-1, 1), memory.view(1, *q.size, p.in_channels).movedim(-1, 1)
    batch, one = reference.forward(p, x, w, None), reference.forward(q, y, w, None)
    torch.testing.assert_close(one.movedim(1, -1).flatten(), batch.movedim(1, -1).flatten())
    g = torch.randn(p.batch, *p.out_size, p.out_channels, dtype=torch.float64)
    grads = reference.gradients(p, g.movedim(-1, 1), x, w)
    found = reference.gradients(q, g.view(1, *q.out_size, p.out_channels).movedim(-1, 1), y, w)
    torch.testing.assert_close(found[0].movedim(1, -1).flatten(), grads[0].movedim(1, -1).flatten())
    torch.testing.assert_close(found[1], grads[1])


def test_images_whose_outputs_meet_each_other_are_not_stacked() -> None:
    p = Problem.make(*STACKED["k2s2"], layout="channels_last")
    assert p.stacked is not None and p.with_(batch=0).stacked is not None
    for change in (
        {"layout": "nchw"}, {"kernel": (3, 2)}, {"padding": (1, 0)}, {"output_padding": (0, 1)}, {"dilation": (2, 1)}
    ):  # fmt: skip
        assert p.with_(**change).stacked is None
    assert abreast(p).stacked is None


ROWS: dict[str, tuple[Any, ...]] = {
    "248x216": (2, 64, 128, (31, 54), 1),
    "odd": (3, 40, 24, (7, 13), 1),
    "groups": (2, 64, 48, (10, 9), 1, 1, 0, 0, 1, 2),
    "3-D": (2, 32, 24, (3, 5, 7), 1),
}


@pytest.mark.parametrize("layout", ("nchw", "channels_last"))
@pytest.mark.parametrize("name", list(ROWS))
def test_images_of_one_row_are_the_same_layer(name: str, layout: Layout) -> None:
    """In float64 and in memory: the tensors, read as images of one row, give the results; every gradient too."""
    p = Problem.make(*ROWS[name], dtype=torch.float64, layout=layout)
    q = p.in_a_row
    assert q is not None and q.macs == p.macs and q.bytes == p.bytes and q.in_a_row is None
    assert q.size == q.out_size == (1,) * (p.rank - 1) + (math.prod(p.size),)
    torch.manual_seed(1)
    x, g, w = (torch.randn(s, dtype=torch.float64) for s in (p.input_shape, p.output_shape, p.weight_shape))
    row = [t.reshape(s) for t, s in ((x, q.input_shape), (g, q.output_shape), (w, q.weight_shape))]
    torch.testing.assert_close(
        reference.forward(q, row[0], row[2], None), reference.forward(p, x, w, None).reshape(q.output_shape)
    )
    for found, wanted in zip(reference.gradients(q, row[1], row[0], row[2])[:2], reference.gradients(p, g, x, w)[:2]):
        torch.testing.assert_close(found, wanted.reshape(found.shape))


def test_images_whose_pixels_meet_are_of_several_rows() -> None:
    p = Problem.make(2, 16, 24, (5, 7), 1)
    for change in ({"kernel": (3, 1)}, {"stride": (1, 2)}, {"padding": (1, 0)}, {"size": (1, 35)}):
        assert p.with_(**change).in_a_row is None
    assert p.with_(output_padding=(1, 0), dilation=(2, 1)).in_a_row is None
    for pass_ in ("fwd", "grad-weight"):
        layer = Problem.make(4, 64, 128, (248, 216), 1, dtype=torch.bfloat16, pass_=pass_)  # type: ignore[arg-type]
        family = wgrad if pass_ == "grad-weight" else gather
        chosen = family.candidate(layer, H200)
        assert chosen.problem == layer.in_a_row and chosen.seconds < 0.9 * family.choose(layer, H200).seconds
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches, "LONGEST", layer.in_a_row.size[-1] - 1)
            assert family.candidate(layer, H200).problem != layer.in_a_row, "the kernel counts in 32 bits"


def test_only_images_of_two_dimensions_in_channels_last_lie_side_by_side() -> None:
    p = layer("4x4", "bf16", "fwd")
    assert p.with_(layout="nchw").abreast is None and abreast(p).abreast is None
    assert Problem.make(8, 16, 16, (4, 4, 4), 3, layout="channels_last").abreast is None
    assert "(batch as width)" in str(abreast(p)) and "(batch as width)" not in str(p)
    for wrong in ({"batch": 2}, {"layout": "nchw"}):
        with pytest.raises(
            ValueError, match="batch_as_width must be of one image of three dimensions in channels_last"
        ):
            abreast(p).with_(**wrong)


@pytest.mark.parametrize("size", [(4, 4), (2, 7), (1, 1)])
def test_boxes_find_the_elements_of_images(size: tuple[int, int]) -> None:
    """The copy engine's tensor, by its strides, is the batch of images with the batch moved behind the width."""
    batch, channels = 5, 16
    images = np.arange(batch * math.prod(size) * channels, dtype=np.int64).reshape(batch, *size, channels)
    found = boxes.channels_last(1, channels, (*size, batch), 8, batch_as_width=True)
    assert found.begin == 0 and found.dims == (channels, batch, size[1], size[0], 1)
    strides = (8, *found.strides)
    seen = np.lib.stride_tricks.as_strided(images, found.dims[::-1], strides[::-1])
    np.testing.assert_array_equal(seen[0], images.transpose(1, 2, 0, 3))
    plain = boxes.channels_last(batch, channels, size, 8)
    assert plain == boxes.dense((channels, size[1], size[0], 1, batch), 8)


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pass_", ("fwd", "grad-input"))
@pytest.mark.parametrize("precision", ("tf32", "bf16"))
def test_small_images_are_taken_side_by_side(precision: Precision, pass_: Pass) -> None:
    family = gather
    p = Problem.make(
        128, 512, 256, (4, 4), 4, 2, 1, dtype=DTYPES[precision], precision=precision, layout="channels_last",
        pass_=pass_,
    )  # fmt: skip
    chosen, alone = family.candidate(p, H200), family.choose(p, H200)
    assert isinstance(alone, gather.Choice)
    assert chosen == family.choose(abreast(p), H200) and chosen.seconds < 0.8 * alone.seconds
    assert "the batch as width: " in chosen.summary and "the batch as width" not in alone.summary
    for other, chip, general in (
        (p, H200, True),  # for every size
        (p.with_(batch=7), H200, False),
        (p.with_(size=(64, 64)), H200, False),
        (p.with_(layout="nchw"), H200, False),
        (p, A100, False),  # whose threads read images as they lie
    ):
        found = family.candidate(other, chip, None, general)
        assert isinstance(found, str) or not found.problem.batch_as_width


@pytest.mark.parametrize("precision", ("tf32", "bf16"))
def test_small_images_fill_tiles_as_they_are(precision: Precision) -> None:
    """Tiles and chunks that are boxes of any shape want no other problem."""
    p = Problem.make(128, 512, 256, (4, 4), 4, 2, 1, dtype=DTYPES[precision], precision=precision)
    p = p.with_(layout="channels_last")
    for q in (p, p.with_(pass_="grad-input")):
        choice = planner.select(q, planner.Device("cuda", gpu=H200)).choice
        assert isinstance(choice, implicit.Choice)
        assert math.prod(choice.tile.box(q)) == choice.tile.rows
    p = p.with_(pass_="grad-weight")
    choice = planner.select(p, planner.Device("cuda", gpu=H200)).choice
    assert isinstance(choice, wgrad.Choice) and isinstance(choice.tiling, WarpgroupTiling)
    assert math.prod(choice.tiling.tile) == choice.tiling.gapless > 0 and choice.problem == p


@pytest.mark.parametrize("pass_", ("fwd", "grad-input"))
def test_images_that_end_amid_tiles_are_taken_one_below_the_other(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mask R-CNN's regions of 14 x 14."""
    p = Problem.make(
        512, 256, 256, (14, 14), 2, 2, dtype=torch.bfloat16, precision="bf16", layout="channels_last", pass_=pass_
    )  # fmt: skip
    chosen, alone = gather.candidate(p, H200), gather.choose(p, H200)
    assert isinstance(alone, gather.Choice)
    assert chosen.problem == p.stacked and chosen.seconds < 0.92 * alone.seconds
    assert gather.candidate(p.with_(size=(16, 14)), H200).problem.batch == 512
    assert gather.candidate(p, H200, general=True).problem.batch == 512
    monkeypatch.setattr(batches, "LONGEST", 512 * 14)  # rows that kernels cannot count
    assert gather.candidate(p, H200).problem.batch == 512


def test_other_families_take_batches_as_they_are() -> None:
    p = Problem.make(128, 512, 256, (4, 4), 4, 2, 1, dtype=torch.bfloat16, precision="bf16", layout="channels_last")
    assert all(
        isinstance(c, str) or not c.problem.batch_as_width or name == "gather"
        for name, c in families.choose(p, H200).items()
    )


@pytest.mark.parametrize("precision", ("tf32", "bf16"))
def test_copies_of_small_images_fill_tiles_too(precision: Precision) -> None:
    for pass_, inner in (("grad-input", implicit.Choice), ("grad-weight", wgrad.Choice)):
        p = Problem.make(128, 512, 256, (4, 4), 4, 2, 1, dtype=DTYPES[precision], precision=precision)
        choice = planner.select(p.with_(pass_=pass_), planner.Device("cuda", gpu=H200)).choice
        assert isinstance(choice, relayout.Choice) and isinstance(choice.inner, inner)
        assert choice.inner.problem.layout == "channels_last" and not choice.inner.problem.batch_as_width


def test_what_reads_no_boxes_takes_no_batch_as_width() -> None:
    q = abreast(layer("4x4", "bf16", "fwd"))
    tiling = next(iter(gather_search.candidates(any_size(q), H200)))
    with pytest.raises(Unfit, match="a batch as width is read by boxes"):
        replace(tiling, wgmma=False).checked(H200.shared_bytes)
    assert not list(gather_search.candidates(any_size(q), A100))
    weight = q.with_(pass_="grad-weight")
    aligned = (True, True)
    every = list(wgrad_search.candidates(wgrad_search.any_size(weight), H200, *aligned))
    assert every and all(isinstance(t, WarpgroupTiling) and t.box_g for t in every)
    assert not list(wgrad_search.candidates(wgrad_search.any_size(weight), A100, *aligned))


# --- on a GPU --------------------------------------------------------------------------------------------------------

BOUNDS = {"tf32": 1e-3, "bf16": 4e-3, "fp16": 6e-4}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("pass_", ("fwd", "grad-input"))
@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("name", list(LAYERS))
def test_tilings_on_a_gpu(name: str, precision: Precision, pass_: Pass) -> None:
    """What is chosen and others drawn, with packed weights and weights as they lie, against float64."""
    p = layer(name, precision, pass_)
    q, chip = abreast(p), gpu(0)
    if chip.arch != "90a":
        pytest.skip("needs wgmma")
    torch.manual_seed(zlib.crc32(f"{name} {precision} {pass_}".encode()))
    source, result = (p.input_shape, p.output_shape)[:: 1 if pass_ == "fwd" else -1]
    x = torch.randn(source, device="cuda").to(p.dtype).contiguous(memory_format=torch.channels_last)
    weight = (torch.randn(p.weight_shape, device="cuda") / 8).to(p.dtype)
    bias = torch.randn(result[1], device="cuda").to(p.dtype)

    def truth(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if pass_ == "fwd":
            return torch.conv_transpose2d(x, w, b, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
        found = torch.conv2d(x, w, b, p.stride, p.padding, p.dilation, p.groups)
        return found[..., : p.size[0], : p.size[1]]

    expected = truth(x.double(), weight.double(), bias.double())
    size = truth(x.double().abs(), weight.double().abs(), bias.double().abs())
    products = source[1] // p.groups * p.taps
    if precision == "tf32":
        size = tf32_magnitude(size, products)
    chosen = gather.choose(q, chip)
    assert isinstance(chosen, gather.Choice)
    every = list(gather_search.candidates(q, chip))
    rng = random.Random(name)
    tilings = [chosen.tiling, *rng.sample(every, min(4, len(every)))]
    for kind in (lambda t: t.planewise, lambda t: t.paired, lambda t: t.subs > 1, lambda t: t.split == 2):
        tilings += [t for t in every if kind(t)][:1]
    for tiling in tilings:
        choice = gather.Choice(tiling, q, chip, 0.0, "")
        prepared = choice.prepare(0)
        outs = []
        for given in (weight, weight.contiguous(memory_format=torch.channels_last)):
            memory = torch.full((math.prod(result) + 256,), math.nan, device="cuda", dtype=p.dtype)
            _, c, h, w = result
            out = memory.as_strided(result, (h * w * c, 1, w * c, c))
            prepared.run(x, prepared.pack(given), bias, out)
            assert memory[math.prod(result) :].isnan().all(), "stores beyond the result"
            outs.append(out)
        assert (prepared.pack(given) is given) == choice.boxable
        assert torch.equal(*outs), tiling
        assert_accurate(outs[0], expected, size, products + 1)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("name", list(LAYERS))
def test_weights_on_a_gpu(name: str, precision: Precision) -> None:
    """Of one split, of several; into both memory formats."""
    p = layer(name, precision, "grad-weight")
    q, chip = abreast(p), gpu(0)
    if chip.arch != "90a":
        pytest.skip("needs wgmma")
    torch.manual_seed(zlib.crc32(f"{name} {precision}".encode()))
    x, g = (
        torch.randn(s, device="cuda").to(p.dtype).contiguous(memory_format=torch.channels_last)
        for s in (p.input_shape, p.output_shape)
    )
    expected = reference.gradients(p, g, x, torch.zeros(p.weight_shape, device="cuda"))[1]
    chosen = wgrad.choose(q, chip)
    assert isinstance(chosen, wgrad.Choice)
    every = list(wgrad_search.candidates(wgrad_search.any_size(q), chip, True, True))
    choices = [chosen]
    for t in random.Random(name).sample(every, min(4, len(every))):
        most = math.prod(t.counts(q))
        choices += [wgrad.Choice(t, q, chip, splits, 0.0, "") for splits in {1, min(most, 3), min(most, 11)}]
    for choice in choices:
        prepared = choice.prepare(0)
        for memory_format in (torch.channels_last, torch.contiguous_format):
            out = torch.full(p.weight_shape, math.nan, device="cuda", dtype=p.dtype)
            out = out.contiguous(memory_format=memory_format)
            prepared.run(x, g, out)
            error = reference.relative_error(out, expected)
            assert error < BOUNDS[precision], f"error {error:.2e} of {choice}"


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("pass_", ("fwd", "grad-input"))
@pytest.mark.parametrize("name", list(STACKED))
def test_stacked_images_on_a_gpu(name: str, pass_: Pass) -> None:
    p = Problem.make(*STACKED[name], layout="channels_last", pass_=pass_)
    assert p.stacked is not None
    for precision in DTYPES:
        check_other(p.with_(dtype=DTYPES[precision], precision=precision), "stacked")  # type: ignore[arg-type]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("pass_", ("fwd", "grad-input", "grad-weight"))
@pytest.mark.parametrize("layout", ("nchw", "channels_last"))
@pytest.mark.parametrize("name", list(ROWS))
def test_images_of_one_row_on_a_gpu(name: str, layout: Layout, pass_: Pass) -> None:
    p = Problem.make(*ROWS[name], layout=layout, pass_=pass_)
    for precision in DTYPES:
        check_other(p.with_(dtype=DTYPES[precision], precision=precision), "in_a_row")  # type: ignore[arg-type]


def check_other(p: Problem, other: str) -> None:
    """The other problem's kernel on the tensors of a problem gives the pass's result, by float64."""
    q = getattr(p, other)
    order = {2: torch.channels_last, 3: torch.channels_last_3d}[p.rank]
    order = order if p.layout == "channels_last" else torch.contiguous_format
    x, g = (
        torch.randn(shape, device="cuda").to(p.dtype).contiguous(memory_format=order)
        for shape in (p.input_shape, p.output_shape)
    )
    weight = torch.randn(p.weight_shape, device="cuda").to(p.dtype)
    if p.pass_ == "fwd":
        truth = reference.forward(p, *(t.double().cpu() for t in (x, weight)), None)
    else:
        truth = reference.gradients(p, *(t.double().cpu() for t in (g, x, weight)))[p.pass_ == "grad-weight"]
    family = wgrad if p.pass_ == "grad-weight" else gather
    choice = family.choose(q, gpu(0))
    assert not isinstance(choice, str)
    prepared: Any = choice.prepare(0)
    out = torch.full(truth.shape, math.nan, device="cuda", dtype=p.dtype)
    if p.pass_ == "grad-weight":
        prepared.run(x, g, out)
    else:
        out = out.contiguous(memory_format=order)
        prepared.run(x if p.pass_ == "fwd" else g, prepared.pack(weight), None, out)
    error = reference.relative_error(out.cpu(), truth)
    assert error < BOUNDS[p.precision], f"error {error:.2e} of {choice}"


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("memory_format", (torch.channels_last, torch.contiguous_format))
def test_a_layer_of_small_images_trains(memory_format: torch.memory_format) -> None:
    """By the planner's choices, in PyTorch's memory formats, against PyTorch's layer in float64."""
    torch.manual_seed(0)
    ours = upconv.ConvTranspose2d(256, 128, 4, 2, 1, device="cuda", dtype=torch.bfloat16).to(
        memory_format=memory_format
    )
    x = torch.randn(64, 256, 4, 4, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=memory_format)
    x.requires_grad_()
    theirs = torch.nn.ConvTranspose2d(256, 128, 4, 2, 1, device="cuda", dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    y = x.detach().double().requires_grad_()
    with upconv.strict(True):
        out = ours(x)
        g = torch.randn_like(out)
        out.backward(g)
    expected = theirs(y)
    expected.backward(g.double())
    pairs = (
        (out, expected),
        (x.grad, y.grad),
        *((a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters())),
    )
    for found, wanted in pairs:
        assert found is not None and wanted is not None
        assert reference.relative_error(found.detach(), wanted.detach()) < BOUNDS["bf16"]
    assert out.is_contiguous(memory_format=memory_format)
