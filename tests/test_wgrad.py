"""The grad-weight family on tensor cores: its geometry in an interpreter, its compiled kernels, its choices."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from itertools import islice

import numpy as np
import pytest
import torch

from upconv.cuda import wgrad
from upconv.cuda.gpu import H200
from upconv.cuda.wgrad_tiling import SyncTiling, WarpgroupTiling
from upconv.problem import Precision, Problem, output_length
from wgrad_interpreter import Floats, Interpreter

DTYPES = {"tf32": torch.float32, "ieee": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
AnyTiling = SyncTiling | WarpgroupTiling


# --- random layers and tilings ---------------------------------------------------------------------------------------


def draw_problem(rng: random.Random) -> Problem:
    """A small layer: all ranks, asymmetric everything, output paddings beyond the stride, odd sizes and channels."""
    rank = rng.choice((1, 2, 2, 3))
    axes = []
    for i in range(rank):
        kernel, stride = rng.choice((1, 2, 3, 3, 4, 5)), rng.choice((1, 1, 2, 2, 3, 4))
        dilation = rng.choice((1, 1, 2, 3, 9))
        if rank == 3:
            kernel, stride = min(kernel, 3), min(stride, 2)
        output_padding = rng.choice((0, rng.randrange(max(stride, dilation))))
        size = rng.randint(1, (70, 9, 4)[rank - 1])
        if i == rank - 1:  # rows of whole 16 bytes now and then
            size = rng.choice((size, 8 * rng.randint(1, (9, 3, 2)[rank - 1])))
        free = output_length(size, kernel, stride, 0, output_padding, dilation)
        axes.append((size, kernel, stride, rng.randint(0, min((free - 1) // 2, 5)), output_padding, dilation))
    size, kernel, stride, padding, output_padding, dilation = zip(*axes)
    precision: Precision = rng.choice(("tf32", "tf32", "ieee", "fp16", "bf16"))
    groups = rng.choice((1, 1, 1, 2, 3))
    return Problem.make(
        rng.randint(1, 3),
        groups * rng.choice((4, 5, 8, 16, 17, 24, 32, 40, 72)),
        groups * rng.choice((1, 2, 3, 4, 8, 16, 17, 32, 40)),
        size,
        kernel,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        dtype=DTYPES[precision],
        precision=precision,
        layout=rng.choice(("nchw", "channels_last")) if rank > 1 else "nchw",
        pass_="grad-weight",
    )


def tilings(p: Problem) -> list[AnyTiling]:
    """All candidates of a layer."""
    aligned, aligned_g = (size[-1] * p.dtype.itemsize % 16 == 0 for size in (p.size, p.out_size))
    return list(wgrad.candidates(wgrad._any_size(p), H200, aligned, aligned_g))


def other_size(p: Problem, rng: random.Random) -> Problem:
    """The layer at another batch and size, whose rows have the same alignment."""
    size = [n + rng.randint(0, 3) for n in p.size]
    size[-1] = p.size[-1] + 8 * rng.randint(0, 2)
    return p.with_(batch=rng.randint(1, 5), size=tuple(size))


def truth_of(p: Problem, x: Floats, g: Floats) -> torch.Tensor:
    """The weight's gradient by PyTorch in float64.

    An output padding beyond the stride gives the gradient's convolution positions that no input has, which PyTorch
    refuses: the input is lengthened by zeros there.
    """
    more = [op // s for op, s in zip(p.output_padding, p.stride)]
    size = tuple(n + extra for n, extra in zip(p.size, more))
    longer = np.zeros((p.batch, p.in_channels, *size))
    longer[(..., *(slice(n) for n in p.size))] = x
    padding = tuple(op - extra * s for op, extra, s in zip(p.output_padding, more, p.stride))
    found = torch.ops.aten.convolution_backward(
        torch.from_numpy(g), torch.from_numpy(longer), torch.zeros(p.weight_shape, dtype=torch.float64), None,
        p.stride, p.padding, p.dilation, True, padding, p.groups, [False, True, False],
    )[1]  # fmt: skip
    assert found is not None
    return found.reshape(p.in_channels, p.out_channels // p.groups, -1)


def check(tiling: AnyTiling, p: Problem, rng: random.Random) -> None:
    """The interpreted tiling stores every partial sum once, and their sum is the gradient, in float64."""
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    x, g = numbers.standard_normal(p.input_shape), numbers.standard_normal(p.output_shape)
    interpreter = Interpreter(tiling)
    chunks = math.prod(tiling.counts(p))
    splits = min(chunks, rng.choice((1, 2, 3, 5)))
    bases = (0, 0) if tiling.needs_alignment else (rng.randrange(8), rng.randrange(8))
    out, stores = interpreter(p, x, g, splits, bases)
    about = f"{p} {p.precision}\n{tiling}\n{splits} splits, bases {bases}"
    assert (stores == 1).all(), f"partial sums stored {np.unique(stores)} times: {about}"
    truth = truth_of(p, x, g)
    if interpreter.parts == 2:  # three products of four: without that of the low parts, which is a layer of its own
        truth = truth - truth_of(p, *(interpreter.split_parts(a)[1] for a in (x, g)))
    error = (torch.from_numpy(out) - truth).abs().max().item()
    assert error <= 1e-11 * max(1.0, truth.abs().max().item()), f"error {error}: {about}"


def work(tiling: AnyTiling, p: Problem) -> int:
    """What interpreting costs, in elements of operands."""
    taps = tiling.set_taps * tiling.block[1] + tiling.block[0]
    return math.prod(tiling.counts(p)) * tiling.tiles * math.prod(tiling.tile) * taps


@lru_cache
def layer(seed: int) -> tuple[Problem, tuple[AnyTiling, ...]]:
    p = draw_problem(random.Random(seed))
    return p, tuple(tilings(p))


@pytest.mark.parametrize("warpgroups", [False, True], ids=["mma.sync", "wgmma"])
@pytest.mark.parametrize("first", range(0, 120, 10))
def test_interpreted_tilings_compute_the_gradient(first: int, warpgroups: bool) -> None:
    """Ten layers, each at two sizes, by a tiling of mma.sync or two of wgmma."""
    done = 0
    for seed in range(first, first + 10):
        rng = random.Random(f"{seed} {warpgroups}")
        p, every = layer(seed)
        own = [t for t in every if isinstance(t, WarpgroupTiling) == warpgroups]
        for q in (p, other_size(p, rng)):
            few = (t for t in rng.sample(own, min(60, len(own))) if t.tiles <= 30 and work(t, q) < 3e6)
            for tiling in islice(few, 2 if warpgroups else 1):
                check(tiling, q, rng)
                done += 1
    assert done >= 8
