"""Whole kernels on a CPU, from their own source: random layers, random tiles, against the float64 reference.

Numbers are small integers, so that every product and sum is exact and the result has one right value. Copies and matrix
instructions are done at once, or as late as a kernel lets them; results lie between guards.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import EVERY, needs_gxx
from emulator import Emulator, emulator
from test_pairs import random_problem as pairs_problem
from test_pixels import draw_problem as last_problem
from test_subpixel import random_problem as subpixel_problem
from test_sweep import draw_problem as deep_problem
from upconv import reference
from upconv.cuda import implicit, pairs, subpixel, sweep
from upconv.cuda.axes import any_size, result_shape, source_shape
from upconv.cuda.gpu import H200, Gpu
from upconv.problem import Problem

pytestmark = needs_gxx
__all__ = ["emulator"]

GUARD = 64  # elements ahead of a result, and behind it
MOST = 3e6  # products of a layer at most, padding by the tile included


def integers(shape: tuple[int, ...], p: Problem, most: int = 3) -> Tensor:
    return torch.randint(-most, most + 1, shape).to(p.dtype)


def laid_out(t: Tensor, p: Problem) -> Tensor:
    """As the problem's layout has it."""
    if p.layout == "nchw":
        return t.contiguous()
    return t.contiguous(memory_format=torch.channels_last if p.rank == 2 else torch.channels_last_3d)


def guarded(shape: tuple[int, ...], p: Problem) -> tuple[Tensor, Tensor]:
    """A result of NaNs in the problem's layout, and the memory around it."""
    like = laid_out(torch.empty(shape, dtype=p.dtype), p)
    around = torch.full((like.numel() + 2 * GUARD,), math.nan, dtype=p.dtype)
    return around[GUARD:].as_strided(like.shape, like.stride(), GUARD), around


def assert_computes(choice: Any, emulator: Emulator, seed: int) -> None:
    """What a choice launches gives its pass's result, to the last bit, and stores nothing beside it."""
    p = choice.problem
    torch.manual_seed(seed)
    emulator.seed, emulator.gpu = seed, choice.gpu
    prepared = choice.prepare(0)
    source, weight = laid_out(integers(source_shape(p), p), p), integers(p.weight_shape, p)
    if p.rank > 1 and seed % 3 == 0:
        weight = laid_out(weight, p.with_(layout="channels_last"))
    bias = integers((p.out_channels,), p) if p.bias and p.pass_ == "fwd" else None
    out, around = guarded(result_shape(p), p)
    prepared.run(source, prepared.pack(weight), bias, out)
    if p.pass_ == "fwd":
        truth = reference.forward(p, source, weight, bias)
    else:
        truth = reference.gradients(p, source, torch.zeros(p.input_shape), weight)[0]
    wrong = (out != truth.to(p.dtype)).nonzero()
    about = f"{p} {p.precision} {p.layout}\n{choice}\nseed {seed}"
    assert not len(wrong), f"{len(wrong)} of {out.numel()} are wrong, the first at {wrong[0].tolist()}: {about}"
    assert around[:GUARD].isnan().all() and around[-GUARD:].isnan().all(), f"a store beside the result: {about}"


# --- a family's random choices ---------------------------------------------------------------------------------------


def gpus(rng: random.Random) -> Gpu:
    return replace(H200, multiprocessors=rng.choice((1, 2, 7, 132)))


def implicit_choice(rng: random.Random) -> Any:
    p = last_problem(rng)
    if rng.random() < 0.5:
        p = p.with_(pass_="fwd", in_channels=rng.choice((8, 16, 40)), out_channels=rng.choice((7, 24, 64, 120)))
    if implicit.refusal(p, H200) is not None:
        return None
    every = implicit.candidates(any_size(p), H200)
    tiles = [t for whole in every for t in (whole, *implicit._clustered(whole, p, H200))]
    tile = rng.choice(tiles)
    work = tile.tiles(p) * max(tile.steps) * tile.rows * tile.columns * tile.chunk
    return implicit.Choice(tile, p, gpus(rng), 1e-5, "") if work < MOST * 10 else None


def subpixel_choice(rng: random.Random) -> Any:
    p = subpixel_problem(rng)
    tile = rng.choice(list(subpixel.candidates(p, H200)))
    return subpixel.Choice(tile, p, gpus(rng), 1e-5, "")


def pairs_choice(rng: random.Random) -> Any:
    p = pairs_problem(rng)
    tile = rng.choice([t for t in pairs.candidates(p, H200) if t.serves(p)])
    return pairs.Choice(tile, p, gpus(rng), 1e-5, "")


def sweep_choice(rng: random.Random) -> Any:
    p = deep_problem(rng)
    every = list(sweep.candidates(p, H200))
    return sweep.Choice(rng.choice(every), p, gpus(rng), 1e-5, "") if every else None


FAMILIES: dict[str, Callable[[random.Random], Any]] = {
    "implicit": implicit_choice,
    "subpixel": subpixel_choice,
    "pairs": pairs_choice,
    "sweep": sweep_choice,
}


def choices(family: str) -> Iterator[Any]:
    """A family's random choices, in a seed's order."""
    rng = random.Random(f"emulated {family}")
    while True:
        if (choice := FAMILIES[family](rng)) is not None:
            yield choice


@pytest.mark.parametrize("family", FAMILIES)
def test_random_layers_by_random_tiles(family: str, emulator: Emulator) -> None:
    for seed, choice in zip(range(60 if EVERY else 5), choices(family)):
        for late in (0, 1):
            assert_computes(choice, emulator, 2 * seed + late)
