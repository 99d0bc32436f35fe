"""The gather-GEMM family: its geometry in an interpreter, its packing, its compiled kernels."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gather_interpreter import Interpreter, fragment_place
from upconv import reference
from upconv.cuda.gpu import H200
from upconv.cuda.tiling import Tiling, Unfit
from upconv.problem import Precision, Problem, output_length

DTYPES = {"tf32": torch.float32, "ieee": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def draw_problem(rng: random.Random) -> Problem:
    """A small layer: all ranks, asymmetric everything, output paddings beyond the stride, odd sizes and channels."""
    rank = rng.choice((1, 2, 2, 3))
    largest = (40, 11, 6)[rank - 1]
    axes = []
    for _ in range(rank):
        kernel, stride, dilation = rng.choice((1, 2, 3, 4, 5)), rng.choice((1, 1, 2, 2, 3, 4)), rng.choice((1, 1, 2, 3))
        if rank == 3:
            kernel, stride = min(kernel, 4), min(stride, 3)
        output_padding = rng.randrange(max(stride, dilation))
        size = rng.randint(1, largest)
        free = output_length(size, kernel, stride, 0, output_padding, dilation)
        axes.append((size, kernel, stride, rng.randint(0, min((free - 1) // 2, 5)), output_padding, dilation))
    size, kernel, stride, padding, output_padding, dilation = zip(*axes)
    precision: Precision = rng.choice(("tf32", "tf32", "ieee", "fp16", "bf16"))
    groups = rng.choice((1, 1, 1, 2, 3))
    return Problem.make(
        rng.randint(1, 3),
        groups * rng.choice((1, 2, 3, 5, 8, 9, 17)),
        groups * rng.choice((1, 2, 3, 4, 8, 17, 33, 65, 70)),
        size,
        kernel,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        bias=rng.random() < 0.5,
        dtype=DTYPES[precision],
        precision=precision,
        layout=rng.choice(("nchw", "channels_last")) if rank > 1 else "nchw",
    )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def draw_tiling(p: Problem, rng: random.Random) -> Tiling | None:
    """A tiling of the layer that the kernel can run, or None where ten draws give none."""
    for _ in range(10):
        sub = rng.choice(((1, 64), (8, 8)))
        tile = (
            rng.choice((1, 1, 2, 3)),
            rng.choice((1, 1, 2)) if p.rank == 3 else 1,
            sub[0] * rng.choice((1, 1, 2, 3)),
            sub[1] * rng.choice((1, 1, 2, 3, 4)),
        )
        unroll = tuple(rng.choice((1, 1, 1, 2, 3)) if axis >= 3 - p.rank else 1 for axis in range(3))
        steps = [n * u for n, u in zip((1,) * (3 - p.rank) + p.stride, unroll)]
        tiling = Tiling(
            p,
            sub,
            tile,
            split=rng.choice((0, 1, 2)),
            chunk=rng.choice((32, 64, 128)) // p.dtype.itemsize,
            subs=rng.choice([n for n in (1, 2, 4) if steps[0] * steps[1] % n == 0]),
            w_subs=rng.choice((0, *divisors(steps[2]))),
            unroll=(unroll[0], unroll[1], unroll[2]),
            stages_s=2,
            run_groups=rng.choice((1, 2, 4, 8)),
            aligned_rows=rng.random() < 0.5,
            wgmma=rng.random() < 0.7,
        )
        try:
            return tiling.checked(H200.shared_bytes)
        except Unfit:
            continue
    return None


def check(tiling: Tiling, p: Problem, seed: int, macros: dict[str, int | float | str] | None = None) -> None:
    """The interpreted tiling stores every output once, and what it stores is the layer, in float64."""
    numbers = np.random.default_rng(seed)
    x, w = numbers.standard_normal(p.input_shape), numbers.standard_normal(p.weight_shape)
    b = numbers.standard_normal(p.out_channels) if p.bias else None
    interpreter = Interpreter(tiling, macros)
    out, stores = interpreter(p, x, w, b)
    assert (stores == 1).all(), f"elements stored {np.unique(stores)} times"
    truth = reference.forward(p, *map(torch.from_numpy, (x, w)), None if b is None else torch.from_numpy(b))
    if tiling.parts == 2:  # three products of four: without that of the low parts, which is a layer of its own
        low_x, low_w = (torch.from_numpy(interpreter.split(a)[1]) for a in (x, w))
        truth = truth - reference.forward(p, low_x, low_w)
    scale = max(1.0, truth.abs().max().item())
    error = (torch.from_numpy(out) - truth).abs().max().item()
    assert error <= 1e-12 * scale, f"error {error} on {scale}"


@pytest.mark.parametrize("seed", range(20))
def test_random_tilings_compute_their_layers(seed: int) -> None:
    rng = random.Random(seed)
    done = 0
    while done < 100:
        p = draw_problem(rng)
        tiling = draw_tiling(p, rng)
        if tiling is None:
            continue
        try:
            check(tiling, p, done)
        except AssertionError as error:
            raise AssertionError(f"{p}, bias {p.bias}, {p.precision}: {error}\n{tiling}") from error
        done += 1
