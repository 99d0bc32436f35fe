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
from upconv import planner
from upconv.bench.suites import SUITES
from upconv.problem import Layout, Pass, Precision, Problem

pytestmark = HOPPER

CALLS = 4
BYTES = 2**28  # of a tensor, so that a dozen processes have room; batches are cut to that
PASSES: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight")
DTYPES: dict[Precision, torch.dtype] = {"tf32": torch.float32, "bf16": torch.bfloat16}
BOUNDS = {
    "tf32": 2e-3,
    "bf16": 1.5e-2,
}  # between two kernels, relative norms: cuDNN's own are off by up to 8e-4, 1.2e-2
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
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
    before = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    try:
        for layout in layouts if layer.rank > 1 else layouts[:1]:
            order = FORMATS.get(layer.rank) if layout == "channels_last" else torch.contiguous_format
            whole = cut(layer).with_(dtype=DTYPES[precision], precision=precision, layout=layout, bias=False)
            torch.manual_seed(1)
            x, g, w = (
                torch.randn(shape, device="cuda").to(whole.dtype).contiguous(memory_format=order)
                for shape in (whole.input_shape, whole.output_shape, whole.weight_shape)
            )
            for pass_ in PASSES:
                p = whole.with_(pass_=pass_)
                choice: Any = planner.select(p, planner.cuda_device(0)).choice
                if choice is not None:
                    check(p, choice, x, g, w)
    finally:
        torch.backends.cudnn.conv.fp32_precision = before  # type: ignore[attr-defined]
        torch.cuda.empty_cache()


def check(p: Problem, choice: Any, x: Tensor, g: Tensor, w: Tensor) -> None:
    expected = theirs(p, x, g, w)
    prepared = choice.prepare(0)
    first: Tensor | None = None
    packs = getattr(choice, "packs", 0)  # the kernel itself, as the engine asks of it in training
    order = FORMATS[p.rank] if p.layout == "channels_last" else torch.contiguous_format
    for call in range(CALLS):
        out = torch.full(expected.shape, math.nan, device="cuda", dtype=p.dtype)
        if p.pass_ != "grad-weight":  # dense in the layout; PyTorch's need not be, of one channel
            out = out.contiguous(memory_format=order)
        if p.pass_ == "grad-weight":
            prepared.run(x, g, out, *((True,) if getattr(prepared, "together", False) else ()))
        elif packs and call % 2:
            prepared.run(x if p.pass_ == "fwd" else g, w, None, out, True, True)
        else:
            read = w if prepared._form(w) == "in place" else prepared.pack(w)
            prepared.run(x if p.pass_ == "fwd" else g, read, None, out, fresh=True)
        if first is None:
            first = out
            error = float((out.float() - expected.float()).norm() / expected.float().norm())
            assert error < BOUNDS[p.precision], f"{error:.2e} from PyTorch's: {p}, {choice.summary}"
        assert torch.equal(first, out), f"{int((first != out).sum())} outputs differ: {p}, {choice.summary}"
