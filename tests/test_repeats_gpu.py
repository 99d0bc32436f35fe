"""Whole layers of the suites by what the planner chooses, again and again: equal to the bit, and as PyTorch's.

Small layers leave no warp so far behind another that a barrier one arrival short, or one too early, would show.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import HOPPER
from drawn import PASSES
from results import laid_out
from upconv import planner
from upconv.bench.suites import SUITES
from upconv.problem import Layout, Precision, Problem

pytestmark = [*HOPPER, pytest.mark.usefixtures("tf32")]

CALLS = 4
BYTES = 2**28  # of a tensor, so that a dozen processes have room; batches are cut to that
DTYPES: dict[Precision, torch.dtype] = {"tf32": torch.float32, "bf16": torch.bfloat16}
BOUNDS = {
    "tf32": 2e-3,
    "bf16": 1.5e-2,
}  # between two kernels, relative norms: cuDNN's own are off by up to 8e-4, 1.2e-2
LONG = ("demucs4", "demucs1", "enc4", "enc2", "hifi3", "hifi4", "wavegan4", "unet3d2", "gan3d3", "occ")
LAYERS: dict[str, tuple[Problem, tuple[Layout, ...]]] = {
    **{c.name: (c.problem, ("nchw", "channels_last")) for c in SUITES["cuda"]},
    **{c.name: (c.problem, ("nchw",)) for c in SUITES["field"] if c.name in LONG},
}


def cut(p: Problem) -> Problem:
    """With fewer images, if they take too much memory; thousands of tiles are left."""
    each = 4 * max(math.prod(p.input_shape), math.prod(p.output_shape)) // p.batch
    return p.with_(batch=max(1, min(p.batch, BYTES // each)))


def theirs(p: Problem, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """The pass by PyTorch's operator."""
    given = p.stride, p.padding, p.dilation, True, p.output_padding, p.groups
    if p.pass_ == "fwd":
        return torch.ops.aten.convolution(x, w, None, *given)
    masks = [p.pass_ == "grad-input", p.pass_ == "grad-weight", False]
    return torch.ops.aten.convolution_backward(g, x, w, None, *given, masks)[p.pass_ == "grad-weight"]


@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("name", list(LAYERS))
def test_calls_are_equal_to_the_bit(name: str, precision: Precision) -> None:
    layer, layouts = LAYERS[name]
    for layout in layouts if layer.rank > 1 else layouts[:1]:
        whole = cut(layer).with_(dtype=DTYPES[precision], precision=precision, layout=layout, bias=False)
        torch.manual_seed(1)
        x, g, w = (
            laid_out(torch.randn(shape, device="cuda").to(whole.dtype), whole)
            for shape in (whole.input_shape, whole.output_shape, whole.weight_shape)
        )
        for pass_ in PASSES:
            p = whole.with_(pass_=pass_)
            choice: Any = planner.select(p, planner.cuda_device(0)).choice
            if choice is not None:
                check(p, choice, x, g, w)
        torch.cuda.empty_cache()


def check(p: Problem, choice: Any, x: Tensor, g: Tensor, w: Tensor) -> None:
    """Every other call may leave something behind, by other blocks, and packs the weight itself, as in training."""
    expected = theirs(p, x, g, w)
    prepared = choice.prepare(0)
    first: Tensor | None = None
    for call in range(CALLS):
        lasting = call % 2 == 1
        out = torch.full(expected.shape, math.nan, device="cuda", dtype=p.dtype)
        if p.pass_ != "grad-weight":  # dense in the layout; PyTorch's need not be, of one channel
            out = laid_out(out, p)
        if p.pass_ == "grad-weight":
            prepared.run(x, g, out, lasting)
        else:
            read = w if lasting or prepared._form(w) == "in place" else prepared.pack(w)
            prepared.run(x if p.pass_ == "fwd" else g, read, None, out, fresh=True, lasting=lasting)
        if first is None:
            first = out
            error = float((out.float() - expected.float()).norm() / expected.float().norm())
            assert error < BOUNDS[p.precision], f"{error:.2e} from PyTorch's: {p}, {choice.summary}"
        assert torch.equal(first, out), f"{int((first != out).sum())} outputs differ: {p}, {choice.summary}"
