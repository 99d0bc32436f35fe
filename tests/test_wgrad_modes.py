"""Every mode of the grad-weight kernels, run from their source on a CPU: random layers that together have them all."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from conftest import needs_gxx
from drawn import FAMILIES, LAYOUTS, MOST, WGMMA, Layers, wgrad_choice, work
from emulator import Emulator
from modes import Aspects, Case, Few, few, of_cases, only
from results import assert_computes, drawn_way
from upconv.cuda.gpu import H200, Gpu
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Problem

pytestmark = needs_gxx

PARTS = 4  # tests that divide the cases
COUNT = 92
"""Modes, of all seeds."""
FIRST = (
    1068, 1346, 1060, 140, 1225, 8, 611, 1196, 1302, 506, 707, 52, 96, 292, 304, 531, 899, 951, 1563, 51, 241,
)  # fmt: skip
"""Of the seeds a few whose layers have every mode. Others are drawn where these do no longer."""


def split_choice(rng: random.Random, p: Problem, gpu: Gpu) -> Any:
    """By either instruction, with many splits too."""
    choice = wgrad_choice(rng, p, gpu, rng.choice((SyncTiling, WarpgroupTiling, WarpgroupTiling)))
    if choice is None:
        return None
    count = math.prod(choice.tiling.counts(p))
    splits = min(count, rng.choice((choice.splits, 9, 20)))
    return replace(choice, splits=-(-count // -(-count // splits)))  # none without work


DRAWN = (
    FAMILIES["wgrad by mma.sync"][0],
    FAMILIES["wgrad by wgmma"][0],
    # Neighbouring taps of a wide stride, and columns of taps, whose rows of x follow each other.
    Layers(("grad-weight",), WGMMA, ("nchw",), (1, 2), (8, 16), (32, 72), kernels=(2, 4, 8, 16), strides=(2, 4, 8),
           dilations=(1, 2), widths=(16, 24, 32), paddings=4),
    Layers(("grad-weight",), WGMMA, LAYOUTS, (2, 2, 3), (16, 24, 40, 64), (16, 32, 64), (1,), widths=(16, 24),
           kernels=(1, 2, 3, 4, 5, 5), strides=(1, 1, 1, 2, 3), dilations=(1,), paddings=0),
    # Input channels that fill no power of two; weights of many elements.
    Layers(("grad-weight",), WGMMA, LAYOUTS, (1, 2, 2), (40, 48, 70, 80, 96, 256, 320), (32,), (1,), heights=(1, 3),
           widths=(16, 32), kernels=(1, 2, 3), strides=(1, 3), dilations=(1,), paddings=1),
    Layers(("grad-weight",), WGMMA, LAYOUTS, (2,), (64, 128, 192), (64, 128, 192), (1,), heights=(3, 8, 16),
           widths=(8,), kernels=(2, 4), strides=(1, 2), dilations=(1,), paddings=0),
    # Rows that begin off 16 bytes, at few places.
    Layers(("grad-weight",), WGMMA, ("nchw",), (2, 3), (16,), (32, 48), (1, 2), heights=(2, 5, 6, 7, 8),
           widths=(24, 32, 64), kernels=(2, 3), strides=(1,), dilations=(1,), paddings=1),
    # Long columns of taps.
    Layers(("grad-weight",), WGMMA, ("channels_last",), (2,), (16, 24, 40), (16, 32), (1,), widths=(16, 24),
           kernels=(4, 5), strides=(1,), dilations=(1,), paddings=0),
)  # fmt: skip


def cases(seed: int) -> Iterator[Case]:
    """Some tiles of a random layer, each called in some ways."""
    rng = random.Random(f"modes, {seed}")
    p = DRAWN[seed % len(DRAWN)].draw(rng)
    for _ in range(12):
        choice = split_choice(rng, p, H200)
        if choice is not None and work(choice) < MOST:
            for _ in range(3):
                yield Case(choice, drawn_way(p, choice.casts, rng.randrange(2**30)), work(choice))


# --- modes -----------------------------------------------------------------------------------------------------------


NCHW: Aspects = {
    "boxes of g": lambda t: (t.box_g, t.classed),
    "x in lines": lambda t: t.lines and (t.tile[3] * t.tile[2] * t.element > t.segment,),
    "words that taps share": lambda t: t.run_words > 0 and (t.box_g,),
    "words that taps of a column share": lambda t: t.run_words > 0 and t.stacked,
    "rows apart": lambda t: max(rows.apart for rows in t.rows) > 1 and t.box_g,
    "rows of x in an instruction": lambda t: t.stacked and t.stack,
}
LAST: Aspects = {
    "x turned": lambda t: t.turned,
    "both by descriptors": lambda t: t.a_shared,
    "g by a box": lambda t: not t.planes.parted,
    "g by remainders of columns": lambda t: t.planes.parted and not t.gapless and min(t.planes.number, 3),
    "columns of g that no tap reads": lambda t: t.planes.parted and not t.gapless and t.g_pixels < t.columns,
    "g by a box, no descriptors": lambda t: t.element == 2 and not t.a_shared,
    "chunks without gaps": lambda t: t.gapless and (t.element == 2, t.turned),
    "rows of x in an instruction, channels_last": lambda t: t.stacked and t.stack,
    "width of g": lambda t: t.g_width,
    "width of x": lambda t: not t.turned and t.x_width,
}
WARPGROUPS: Aspects = {
    "several sets of taps": lambda t: math.prod(t.sets) > 1,
    "several groups": lambda t: t.problem.groups > 1,
    "chunks unrolled in parts": lambda t: not t.stacked and t.unrolled < t.k_steps,
    **{name: lambda t, name=name: getattr(t, name) for name in ("subs", "warpgroups", "split_m", "segment")},
    "columns": lambda t: t.block[0],
    "in M": lambda t: t.interleaved and t.subs,
    "in M, bytes": lambda t: t.interleaved and t.element,
    "classes": lambda t: t.classed and t.element,
    "classes of rows": lambda t: t.classed and t.classes[0] > 1,
    "classes of channels": lambda t: t.classed and t.classes[1] > 1,
}
SYNC: Aspects = {
    "several slices": lambda t: t.k_slices > 1 and t.problem.layout,
    "sums that leave after each chunk": lambda t: t.promote and t.problem.layout,
    "columns of mma.sync": lambda t: t.element == 2 and (t.warp[1] == 8, t.problem.layout),
    "several taps": lambda t: t.set_taps > 1 and t.problem.layout,
    "several sets": lambda t: math.prod(t.sets) > 1 and t.problem.layout,
    "precision of mma.sync": lambda t: t.problem.precision,
    "rows off 16 bytes": lambda t: not (t.channels_last or t.aligned),
}


def by_wgmma(t: Any) -> bool:
    return isinstance(t, WarpgroupTiling)


def end(case: Case) -> str:
    """How a case's sums become the weight's gradient."""
    c = case.choice
    return "steps" if c.ending == "together" and not case.way.once else str(c.ending)


def divided(case: Case) -> bool:
    """Whether lanes divide the records of a sum."""
    t, slices = case.choice.tiling, case.choice.splits * case.choice.tiling.k_slices
    return bool(slices > 1 and t.set_taps * -(-math.prod(t.block) // 4 // slices) <= 128)


ENDS: Aspects = {
    "ending": lambda case: (
        by_wgmma(case.choice.tiling) and (end(case), "float32" if case.way.single else case.way.last)
    ),
    "slices of float32 of mma.sync": lambda case: not by_wgmma(case.choice.tiling) and case.way.single,
    "lanes divide the splits": lambda case: divided(case) and end(case),
    "channels off four in channels_last": lambda case: (
        end(case) in ("alone", "together") and case.way.last and case.choice.tiling.channels[1] % 4 > 0
    ),
}
ASPECTS = ENDS | of_cases(
    only(by_wgmma, WARPGROUPS)
    | only(lambda t: by_wgmma(t) and not t.channels_last, NCHW)
    | only(lambda t: by_wgmma(t) and t.channels_last, LAST)
    | only(lambda t: not by_wgmma(t), SYNC)
)


@cache
def chosen() -> Few:
    """Once for all parts."""
    return few(cases, ASPECTS, COUNT, FIRST)


def test_layers_that_are_named_have_every_mode() -> None:
    """Else tests look for others, which takes long: `FIRST` then needs those that were found."""
    assert not chosen().others


@pytest.mark.parametrize("part", range(PARTS))
def test_every_mode(part: int, emulator: Emulator) -> None:
    """At once and late."""
    for case in chosen().cases[part::PARTS]:
        for seed in (0, 3):
            assert_computes(case.choice, emulator, seed, case.way)
