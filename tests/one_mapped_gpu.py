"""What families of one tensor map (`upconv.cuda.pixels.one_mapped`) must do on a GPU, against float64 references."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conftest import assert_accurate, tf32_magnitude
from upconv.cpu import memory_format
from upconv.cuda.axes import result_shape, source_shape
from upconv.problem import Problem

PRECISIONS = {
    "tf32": torch.float32,
    "ieee": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def _truth(p: Problem, source: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The pass's result from operands in float64."""
    if p.pass_ == "fwd":
        forward = (None, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[p.rank]
        assert forward is not None
        return forward(source, weight, bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    transpose = (None, torch.conv1d, torch.conv2d, torch.conv3d)[p.rank]
    assert transpose is not None
    found = transpose(source, weight, None, p.stride, p.padding, p.dilation, p.groups)
    # An output padding beyond the stride gives the convolution positions that no input has.
    return found[(..., *(slice(n) for n in p.size))]


class Operands(NamedTuple):
    """Of a pass; the weight is contiguous."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    """Of a forward."""
    truth: Tensor
    """The result in float64."""
    magnitude: Tensor
    """What its sums' terms come to."""


def operands(p: Problem, terms: int) -> Operands:
    """Random ones; ``terms``: products of a result's sum."""
    torch.manual_seed(zlib.crc32(str(p).encode()))
    x = torch.randn(source_shape(p), device="cuda").to(p.dtype)
    weight = (torch.randn(p.weight_shape, device="cuda") / 8).to(p.dtype)
    bias = torch.randn(p.out_channels, device="cuda").to(p.dtype) if p.pass_ == "fwd" else None
    double = None if bias is None else bias.double()
    truth = _truth(p, x.double(), weight.double(), double)
    magnitude = _truth(p, x.double().abs(), weight.double().abs(), None if double is None else double.abs())
    if p.precision == "tf32":
        magnitude = tf32_magnitude(magnitude, terms)
    return Operands(x, weight, bias, truth, magnitude)


def poisoned(p: Problem) -> Tensor:
    """A result, NaN where nothing is stored."""
    return torch.full(result_shape(p), float("nan"), device="cuda", dtype=p.dtype)


def assert_serves(choice: Any, given: Operands, terms: int) -> None:
    """A choice's results are accurate, the same from run to run, for weights however they lie and tensors wherever."""
    p, t, prepared = choice.problem, choice.tile, choice.prepare(0)
    x, weight, bias, truth, magnitude = given
    others = [weight.mT.contiguous().mT]
    if p.rank > 1:
        others.append(weight.contiguous(memory_format=memory_format("channels_last", p.rank)))
    first = poisoned(p)
    prepared.run(x, prepared.pack(weight), bias, first, fresh=True)
    assert_accurate(first, truth, magnitude, terms)
    for other in (*others, weight):
        out = poisoned(p)
        prepared.run(x, prepared.pack(other), bias, out, fresh=True)
        assert torch.equal(out, first), t
    packed = prepared.pack(weight)
    for off in (1, 3, 8):  # what begins off 16 bytes, or at them, amid what must not be read or written
        around = torch.full((x.numel() + off + 8,), float("nan"), device="cuda", dtype=p.dtype)
        view = around[off:][: x.numel()].view(x.shape).copy_(x)
        place = torch.full((truth.numel() + off + 8,), float("nan"), device="cuda", dtype=p.dtype)
        out = place[off:][: truth.numel()].view(truth.shape)
        prepared.run(view, packed, bias, out)
        assert torch.equal(out, first), t
        assert int(place.isnan().sum()) == off + 8
    if p.precision != "tf32":  # autocast's operands: rounded on their way
        for other in (weight, *others):
            out = poisoned(p)
            single = None if bias is None else bias.float()
            prepared.run(x, prepared.pack(other.float(), single), single, out, fresh=True)
            assert torch.equal(out, first)
    if bias is None:
        return
    out = poisoned(p)
    prepared.run(x, packed, None, out)
    assert_accurate(out, truth - bias.double().view(1, -1, *(1,) * p.rank), magnitude, terms)
