"""Random layers on a GPU through the public functions, forward and all gradients, against the float64 reference.

    PYTHONPATH=src:tests python tests/random_gpu_layers.py 2000 --json out.json

Each layer runs on `SHAPES` random inputs, so that its kernels are compiled once. Compilation runs first, in parallel
processes. Every dtype, precision, layout and rank; groups, dilation, kernels beyond the image. Operands of TF32 layers
are exact in TF32, so that all products are exact in float32. A case is wrong where an element misses the bound of
`strategies.excess` twice: tensor cores cut off what they add, so each addition may cost two roundings.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import upconv
from strategies import forward_excess, gradient_excess, operands
from upconv import planner
from upconv.bench.timing import precision_flags
from upconv.cuda.compile import jit
from upconv.problem import Problem, output_length

CALLS = (None, upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)
SHAPES = 5
MOST_OUTPUTS = 300_000
RIGHT = 2.0
"""Of an element's bound, up to which a result is right."""
KINDS: tuple[tuple[torch.dtype, Any], ...] = (
    (torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, "bf16"), (torch.float16, "fp16"),
    (torch.float64, "fp64"),
)  # fmt: skip
WEIGHTS = (4, 2, 4, 2, 1)


def layer(seed: int, index: int) -> Problem:
    """The problem of an index, always the same; `SHAPES` of them in turn are one layer on several inputs."""
    rng = random.Random(f"{seed}:{index // SHAPES}")
    rank, groups = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 1, 1, 2, 4))
    dtype, precision = rng.choices(KINDS, WEIGHTS)[0]
    channels = [groups * rng.choice((1, 3, 8, 16, 21, 32, 64, 96)) for _ in range(2)]
    axes = [_axis(rng) for _ in range(rank)]
    layout = rng.choice(("nchw", "channels_last")) if rank > 1 and precision != "fp64" else "nchw"
    kernel, stride, padding, output_padding, dilation = zip(*axes)
    bias, sizes = rng.random() < 0.6, random.Random(f"{seed}:{index}")
    while True:
        size = tuple(sizes.randint(1, (400, 24, 9)[rank - 1]) for _ in range(rank))
        out = [output_length(*axis) for axis in zip(size, kernel, stride, padding, output_padding, dilation)]
        batch = sizes.randint(1, 4)
        if min(out) < 1 or batch * channels[1] * torch.Size(out).numel() > MOST_OUTPUTS:
            continue
        return Problem.make(
            batch, *channels, size, kernel, stride, padding, output_padding, dilation, groups, bias=bias, dtype=dtype,
            precision=precision, layout=layout,
        )  # fmt: skip


def _axis(rng: random.Random) -> tuple[int, int, int, int, int]:
    kernel, stride, dilation = (
        rng.choice((1, 2, 3, 3, 4, 5, 7)),
        rng.choice((1, 1, 2, 2, 3, 4, 5)),
        rng.choice((1, 1, 1, 2)),
    )
    output_padding = rng.choice((0, 0, rng.randint(0, max(stride, dilation) - 1)))
    return kernel, stride, rng.randint(0, (dilation * (kernel - 1) + 1) // 2), output_padding, dilation


def _plan(p: Problem) -> planner.Plan:
    return planner.plan(p, planner.cuda_device(0))


def _compile(seed: int, indices: range) -> int:
    """Compiles every kernel of the layers into the cache on disk."""
    done = 0
    for index in indices:
        plan = _plan(layer(seed, index))
        for pass_ in ("fwd", "grad-input", "grad-weight"):
            choice = plan.selection(pass_).choice
            if choice is not None:
                for unit in choice.sources():
                    jit.cubin(unit.source, plan.device.gpu.arch, unit.label)  # type: ignore[union-attr]
        done += 1
    return done


def _exact(t: Tensor, p: Problem) -> Tensor:
    """Values as the layer's multiplications take them."""
    return (t.view(torch.int32) & ~0x1FFF).view(torch.float32) if p.precision == "tf32" else t


def excess(p: Problem) -> float:
    """The error of the worst element of output and gradients over its bound; up to `RIGHT` is right."""
    x, w, b, g = (t if t is None else _exact(t, p).cuda() for t in operands(p))
    assert x is not None and w is not None and g is not None
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b) if t is not None]
    bias = leaves[2] if b is not None else None
    with precision_flags(p.precision):
        out = CALLS[p.rank](leaves[0], leaves[1], bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation)  # type: ignore[misc]
        with torch.no_grad():
            again = CALLS[p.rank](*leaves[:2], bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation)  # type: ignore[misc]
        grads: list[Any] = list(torch.autograd.grad(out, leaves, g))
    grads += [None] * (3 - len(grads))
    found = max(forward_excess(p, t.detach(), x, w, b) for t in (out, again))
    found = max(found, gradient_excess(p, grads, g, x, w))
    return found if found == found else float("inf")


def main() -> int:
    """Exit code 1 if a case is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after so many seconds")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that compile")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    begin = time.perf_counter()
    layers = -(-given.count // SHAPES)
    jobs = [(given.seed, range(i * SHAPES, min((i + 1) * SHAPES, given.count))) for i in range(layers)]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        pool.starmap(_compile, jobs, chunksize=4)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    wrong: list[str] = []
    families: Counter[str] = Counter()
    done = 0
    for index in range(given.count):
        if time.perf_counter() - begin > given.seconds:
            break
        p = layer(given.seed, index)
        found = excess(p)
        done += 1
        families.update(f"{pass_} {_plan(p).selection(pass_).name}" for pass_ in ("fwd", "grad-input", "grad-weight"))
        if found > RIGHT:
            wrong.append(f"{index}: {p}: {found:.3g} times its bound")
            print("wrong:", wrong[-1], flush=True)
    print(f"{done} cases of {-(-done // SHAPES)} layers, {len(wrong)} wrong, {time.perf_counter() - begin:.0f} s")
    print("kernels:", dict(families.most_common()))
    if given.json is not None:
        told = {"device": torch.cuda.get_device_name(), "cases": done, "layers": -(-done // SHAPES), "wrong": wrong}
        part = given.json.with_suffix(".part")
        part.write_text(json.dumps({**told, "seed": given.seed, "kernels": dict(families)}, indent=1) + "\n")
        os.replace(part, given.json)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
