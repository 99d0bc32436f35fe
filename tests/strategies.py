"""Random problems for the property tests, and the error bound that their results are held to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from upconv import cpu, reference
from upconv.problem import Problem, output_length

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@st.composite
def problems(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES, least: int = 1) -> Problem:
    """Any valid Problem of small size: all ranks, asymmetric everything, paddings beyond the kernel, every layout.

    ``least`` is the smallest size of a dimension.
    """
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from((1, 1, 1, 2, 3, 4)))
    most = (9, 7, 5)[rank - 1]
    axes = []
    for _ in range(rank):
        kernel, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        stride = draw(st.integers(1, 4) | st.sampled_from((7, 100, 1000)) if rank == 1 else st.integers(1, 4))
        output_padding = draw(st.integers(0, max(stride, dilation) - 1))
        size = draw(st.integers(least, most))
        free = output_length(size, kernel, stride, 0, output_padding, dilation)
        padding = draw(st.integers(0, min((free - 1) // 2, 6)))
        axes.append((size, kernel, stride, padding, output_padding, dilation))
    size, kernel, stride, padding, output_padding, dilation = zip(*axes)
    return Problem.make(
        draw(st.integers(1, 3)),
        groups * draw(st.sampled_from((1, 1, 2, 3, 4))),
        groups * draw(st.integers(1, 4)),
        size,
        kernel,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        layout=draw(st.sampled_from(("nchw", "channels_last"))) if rank > 1 else "nchw",
    )


def gradient_problems() -> st.SearchStrategy[Problem]:
    """Problems whose gradients PyTorch can be asked for: with oneDNN those of images under 4 pixels may corrupt the
    heap (float32 twice in about 15,000, half precisions far more often), whoever asks. float64 goes without oneDNN.
    """
    trusted = problems(dtypes=DTYPES[:3], least=4).filter(lambda p: not cpu.untrusted_gradients(p))
    return st.one_of(problems(dtypes=(torch.float64,)), trusted)


_NUMBERS = st.sampled_from((0, 1, 2, 3, -1))


@st.composite
def changed_settings(draw: st.DrawFn, rank: int) -> dict[str, Any]:
    """Up to three attributes as somebody may set them on a layer: tuples and lists of any length, integers, others."""
    several = st.lists(_NUMBERS, min_size=1, max_size=3)
    full = st.lists(_NUMBERS, min_size=rank, max_size=rank)
    others = st.sampled_from(("same", "valid", "bogus", None, 1.5, True, (True,) * rank, (1.0,) * rank))
    value = st.one_of(full.map(tuple), full, _NUMBERS, several.map(tuple), others)
    settings: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(("stride", "padding", "output_padding", "dilation"), value),
        "groups": st.sampled_from((1, 2, 0, -1, 3, True, None)),
        "padding_mode": st.sampled_from(("zeros", "circular", "bogus")),
        "kernel_size": full.map(tuple),
        "in_channels": st.just(7),
    }
    names = draw(st.lists(st.sampled_from(list(settings)), max_size=3, unique=True))
    return {name: draw(settings[name]) for name in names}


def operands(p: Problem, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Input, weight, bias and an output gradient for a Problem, of its dtype and layout, never zeros."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(p.dtype)

    fmt = cpu.memory_format(p.layout, p.rank)
    x, w, g = (draw(s).contiguous(memory_format=fmt) for s in (p.input_shape, p.weight_shape, p.output_shape))
    return x, w, draw((p.out_channels,)) if p.bias else None, g


def excess(out: Tensor, truth: Tensor, magnitude: Tensor, terms: int, roundings: int = 0, tf32: bool = False) -> float:
    """The largest error over its bound; at most 1 for a right result.

    ``magnitude`` is the same sum with absolute values. Products and sums are made in float32 at least (float64 for
    float64), in any order, and the result is rounded once to the dtype: ``|error| <= (terms + 4) u_sum magnitude +
    2 u_out |truth|``, with an absolute floor where half precisions underflow. Higham, "Accuracy and Stability of
    Numerical Algorithms", 3.1. Where PyTorch's own operations keep partial sums in the result's dtype, ``roundings`` of
    them add ``u_out magnitude`` each. In TF32 both factors are rounded to 11 bits: ``2**-10`` of each product.
    """
    assert out.shape == truth.shape
    info = torch.finfo(out.dtype)
    u_out = info.eps / 2
    u_sum = 2**-53 if out.dtype is torch.float64 else 2**-24
    bound = (
        ((terms + 4) * u_sum + roundings * u_out + tf32 * 2**-10) * magnitude
        + 2 * u_out * truth.abs()
        + info.smallest_normal
    )
    return ((out.double() - truth).abs() / bound).max().item() if out.numel() else 0.0


def forward_excess(p: Problem, out: Tensor, x: Tensor, w: Tensor, b: Tensor | None, *, native: bool = False) -> float:
    """`excess` of a forward; PyTorch's own fallback (col2im) rounds after every tap, ours nowhere."""
    truth = reference.forward(p, x, w, b)
    magnitude = reference.forward(p, x.abs(), w.abs(), None if b is None else b.abs())
    return excess(out, truth, magnitude, p.taps * p.in_channels // p.groups + 1, p.taps + 1 if native else 0)


def gradient_excess(p: Problem, grads: Sequence[Tensor | None], g: Tensor, x: Tensor, w: Tensor) -> float:
    """The largest excess of the gradients for input, weight and bias (None: not computed).

    PyTorch's fallback adds the gradients of weight and bias image by image in the result's dtype.
    """
    truth = reference.gradients(p, g, x, w)
    magnitude = reference.gradients(p, g.abs(), x.abs(), w.abs())
    pixels = p.batch * math.prod(p.out_size)
    terms = (p.taps * p.out_channels // p.groups, p.batch * math.prod(p.size), pixels)
    found = zip(grads, truth, magnitude, terms, (0, p.batch, p.batch))
    return max(excess(a, t, m, n, r) for a, t, m, n, r in found if a is not None)
