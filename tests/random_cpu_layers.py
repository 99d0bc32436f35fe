"""Random layers on a CPU through the public functions, forward and all gradients, against the float64 reference.

    PYTHONPATH=src:tests python tests/random_cpu_layers.py 20000

Every dtype, layout and rank; groups, kernels beyond the image, strides up to 100,000. Every other thousand is planned
as if it were large, so that the engine's own plans are chosen. A layer is wrong where an element misses the bound of
`strategies.excess`; it counts as PyTorch's where PyTorch's own operator misses it on the same numbers. Layers run in a
process of their own, since PyTorch 2.13 corrupts the heap on a few: that counts as a crash.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import upconv
from strategies import DTYPES, forward_excess, gradient_excess, operands
from upconv import ops, planner
from upconv.cpu import rule
from upconv.problem import Problem, output_length

OURS = (None, upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)
STOCK = (None, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
STRIDES = (1, 1, 1, 2, 2, 2, 3, 4, 7, 100, 5000, 100_000)
MOST_OUTPUTS = 20_000
PART = 1000
HANG = 120
"""Seconds after which a layer counts as crashed: a corrupt heap may hang."""


def layer(seed: int, index: int) -> Problem:
    """The layer of an index, always the same."""
    rng = random.Random(f"{seed}:{index}")
    while True:
        rank, groups = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 1, 2, 3, 4, 8))
        axes = [_axis(rng, rank) for _ in range(rank)]
        size, kernel, stride, padding, output_padding, dilation = zip(*axes)
        try:
            p = Problem.make(
                rng.randint(1, 3), groups * rng.choice((1, 1, 2, 3, 8)), groups * rng.choice((1, 1, 2, 3, 5, 8)), size,
                kernel, stride, padding, output_padding, dilation, groups, bias=rng.random() < 0.6,
                dtype=rng.choice(DTYPES), layout=rng.choice(("nchw", "channels_last")) if rank > 1 else "nchw",
            )  # fmt: skip
        except ValueError:  # no output
            continue
        if p.batch * p.out_channels * math.prod(p.out_size) <= MOST_OUTPUTS:
            return p


def _axis(rng: random.Random, rank: int) -> tuple[int, int, int, int, int, int]:
    size, kernel = rng.randint(1, (20, 9, 6)[rank - 1]), rng.choice((1, 2, 3, 3, 4, 5, 11)[: 8 - rank])
    stride, dilation = rng.choice(STRIDES), rng.choice((1, 1, 1, 2, 3))
    if stride > 10 and rng.random() < 0.8:
        size = rng.choice((1, 1, 2))
    output_padding = rng.choice((0, 0, rng.randint(0, max(stride, dilation) - 1)))
    free = output_length(size, kernel, stride, 0, output_padding, dilation)
    return size, kernel, stride, rng.randint(0, max(0, min((free - 1) // 2, 8))), output_padding, dilation


def _run(call: Any, p: Problem, given: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor | None]]:
    x, w, b, g = given
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b) if t is not None]
    bias = leaves[2] if b is not None else None
    out = call(leaves[0], leaves[1], bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    grads: list[Tensor | None] = list(torch.autograd.grad(out, leaves, g))
    return out.detach(), grads + [None] * (3 - len(grads))


def _excess(call: Any, p: Problem, native: bool) -> float:
    x, w, b, g = given = operands(p)
    out, grads = _run(call, p, given)
    found = max(forward_excess(p, out, x, w, b, native=native), gradient_excess(p, grads, g, x, w))
    return found if found == found else float("inf")


def verdict(p: Problem) -> str:
    """``right``, ``PyTorch's`` (its own operator is wrong too) or ``wrong``."""
    native = planner.plan(p, planner.cpu_device()).forward == "native"
    if _excess(OURS[p.rank], p, native) <= 1:
        return "right"
    return "PyTorch's" if _excess(STOCK[p.rank], p, True) > 1 else "wrong"


@contextmanager
def planned_as_large() -> Iterator[None]:
    """Layers are planned as if their outputs were large."""
    changed = {"_SMALL_OUTPUT": 0, "_SPLIT_OUTPUT": 0, "_SMALL_WORK": 0, "_WEIGHTS_PER_OUTPUT": 1e9, "_BLOWUP": 8.0}
    before = {name: getattr(rule, name) for name in changed}
    try:
        _set(changed)
        yield
    finally:
        _set(before)


def _set(values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(rule, name, value)
    ops.forget_plans()
    planner.plan.cache_clear()


def check(seed: int, indices: Sequence[int], large: bool, say: Callable[[tuple[int, str, str]], None]) -> None:
    """Tells ``(index, verdict, plan)`` of each layer; before a layer is run its verdict is ``crashed``."""
    torch.set_num_threads(1)
    with planned_as_large() if large else nullcontext():
        for index in indices:
            p = layer(seed, index)
            plan = planner.plan(p, planner.cpu_device())
            name = f"{plan.forward}, {plan.backward}"
            say((index, "crashed", name))
            say((index, verdict(p), name))


def _child(seed: int, indices: range, large: bool, pipe: Any) -> None:
    check(seed, indices, large, pipe.send)
    pipe.close()


def _verdicts(seed: int, count: int) -> dict[int, tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    context, next_ = multiprocessing.get_context("spawn"), 0
    while next_ < count:
        part = next_ // PART
        ours, theirs = context.Pipe(duplex=False)
        indices = range(next_, min((part + 1) * PART, count))
        child = context.Process(target=_child, args=(seed, indices, part % 2 == 1, theirs))
        child.start()
        theirs.close()
        try:
            while True:
                if not ours.poll(HANG):
                    child.kill()
                index, *told = ours.recv()
                found[index] = told[0], told[1]
        except EOFError:
            child.join()
        if max(found, default=-1) < next_:
            raise RuntimeError(f"the process for layers {indices} died before its first layer")
        next_ = max(found) + 1
        print(f"{next_} of {count}: {dict(Counter(v for v, _ in found.values()))}", flush=True)
    return found


def main() -> int:
    """Exit code 1 if a layer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = _verdicts(given.seed, given.count)
    for index, (told, plan) in found.items():
        if told != "right":
            print(f"{told}: {index}: {layer(given.seed, index)} op{layer(given.seed, index).output_padding} by {plan}")
    print("plans:", dict(Counter(plan for _, plan in found.values())))
    print("verdicts:", dict(Counter(told for told, _ in found.values())))
    return int(any(told == "wrong" for told, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
