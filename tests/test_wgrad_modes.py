"""Every mode of the grad-weight kernels, run from their source on a CPU: random layers that together have them all."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from conftest import needs_gxx
from drawn import FAMILIES, LAYOUTS, MOST, TENSOR, WGMMA, Layers, wgrad_choice, work
from emulator import Emulator, emulator
from modes import Case, OfCase, OfTiling, few, having, of_cases, where
from results import assert_computes, drawn_way
from upconv.cuda.gpu import H200, Gpu
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Problem

pytestmark = needs_gxx
__all__ = ["emulator"]

PARTS = 4  # tests that divide the cases
FIRST = (1068, 1302, 853, 1225, 583, 8, 899, 170, 208, 12, 96, 135, 506, 1563)
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

NCHW: OfTiling = {
    "g by threads": lambda t: not t.box_g,
    "g by a box": lambda t: t.box_g and not t.classed,
    "x in lines": lambda t: t.lines,
    "x in lines, several boxes": lambda t: t.lines and t.tile[3] * t.tile[2] * t.element > t.segment,
    "words that taps share": lambda t: t.run_words > 0,
    "words that taps share, g by boxes": lambda t: t.run_words > 0 and t.box_g,
    "words that taps of a column share": lambda t: t.run_words > 0 and t.stacked,
    "rows apart": lambda t: max(t.apart[:2]) > 1 and t.box_g,
}
LAST: OfTiling = {
    "x turned": lambda t: t.turned,
    "both by descriptors": lambda t: t.a_shared,
    "g by a box": lambda t: not t.planes.parted,
    "columns of g by three remainders or more": lambda t: t.planes.parted and not t.gapless and t.planes.number > 2,
    "columns of g by two remainders": lambda t: t.planes.parted and not t.gapless and t.planes.number == 2,
    "columns of g that no tap reads": lambda t: t.planes.parted and not t.gapless and t.g_pixels < t.columns,
    "g by a box, no descriptors": lambda t: t.element == 2 and not t.a_shared,
    "chunks without gaps, 16 bits": lambda t: t.gapless and t.element == 2,
    "chunks without gaps, turned": lambda t: t.gapless and t.turned,
}
SYNC: OfTiling = {
    "several slices": lambda t: t.k_slices > 1,
    "sums that leave after each chunk": lambda t: t.promote,
    "columns of 8": lambda t: t.element == 2 and t.warp[1] == 8,
    "columns of 16 and more": lambda t: t.element == 2 and t.warp[1] > 8,
    "several taps": lambda t: t.set_taps > 1,
    "several sets": lambda t: math.prod(t.sets) > 1,
}


def wgmma(case: Case) -> WarpgroupTiling | None:
    t = case.choice.tiling
    return t if isinstance(t, WarpgroupTiling) else None


def numbered() -> OfTiling:
    """Of wgmma, modes that differ by numbers."""
    found: OfTiling = {
        "several sets of taps": lambda t: math.prod(t.sets) > 1,
        "several groups": lambda t: t.problem.groups > 1,
        "chunks unrolled in parts": lambda t: not t.stacked and t.unrolled < t.k_steps * t.entries,
    }
    for stack, layout in product((2, 3, 4, 5), ("nchw", "channels_last")):
        found[f"{stack} rows of x in an instruction, {layout}"] = lambda t, n=stack, layout=layout: (
            t.stacked and t.stack == n and t.problem.layout == layout
        )
    found |= having("{name} {value}", subs=(1, 2, 4), warpgroups=(2, 3), split_m=(1, 2), segment=(32, 64, 128))
    found |= where(lambda t: t.interleaved, having("in M, {name} {value}", subs=(2, 4, 8), element=(2, 4)))
    found |= where(lambda t: t.classed, having("classes, {name} {value}", element=(2, 4)))
    for width in (32, 48, 64, 80, 96, 128, 160, 256):
        found[f"{width} columns"] = lambda t, n=width: t.block[0] == n
    found |= where(lambda t: t.channels_last, having("boxes, {name} {value}", g_width=(16, 32, 64)))
    found |= where(lambda t: t.channels_last and not t.turned, having("boxes, {name} {value}", x_width=(16, 32, 64)))
    for axis in (0, 1):
        found[f"several classes of {('rows', 'channels')[axis]}"] = lambda t, i=axis: t.classed and t.classes[i] > 1
    return found


def end(case: Case) -> str:
    """How a case's sums become the weight's gradient."""
    c = case.choice
    return "steps" if c.ending == "together" and not case.way.once else c.ending


def ends() -> OfCase:
    every = ("steps", "together", "alone")
    found: OfCase = {}
    for how in every:
        for name, way in (("contiguous", (False, False)), ("channels_last", (True, False)), ("float32", (None, True))):
            found[f"{how}, {name}"] = lambda case, how=how, way=way: (
                wgmma(case) is not None and end(case) == how and case.way.single == way[1]
                and way[0] in (None, case.way.last)
            )  # fmt: skip
    found["mma.sync, rows off 16 bytes"] = lambda case: (
        wgmma(case) is None and case.choice.problem.layout == "nchw" and not case.choice.tiling.aligned
    )
    for dtype in TENSOR:
        found[f"steps of mma.sync, {dtype}"] = lambda case, kind=dtype: (
            wgmma(case) is None and case.choice.problem.precision == kind
        )
    found |= {
        "slices of float32 of mma.sync": lambda case: wgmma(case) is None and case.way.single,
        "lanes divide the splits": lambda case: end(case) == "steps" and divided(case),
        "lanes divide the splits, together": lambda case: end(case) == "together" and divided(case),
        "channels off four in channels_last": lambda case: (
            end(case) in ("alone", "together") and case.way.last and case.choice.tiling.channels[1] % 4 > 0
        ),
    }
    return found


def divided(case: Case) -> bool:
    """Whether lanes divide the records of a sum."""
    t, slices = case.choice.tiling, case.choice.splits * case.choice.tiling.k_slices
    return bool(slices > 1 and t.set_taps * -(-math.prod(t.block) // 4 // slices) <= 128)


MODES = ends() | of_cases(
    {
        "wgmma: ": (numbered(), lambda t: isinstance(t, WarpgroupTiling)),
        "wgmma, NCHW: ": (NCHW, lambda t: isinstance(t, WarpgroupTiling) and not t.channels_last),
        "wgmma, channels_last: ": (LAST, lambda t: isinstance(t, WarpgroupTiling) and t.channels_last),
        "mma.sync, NCHW: ": (SYNC, lambda t: not isinstance(t, WarpgroupTiling) and not t.channels_last),
        "mma.sync, channels_last: ": (SYNC, lambda t: not isinstance(t, WarpgroupTiling) and t.channels_last),
    }
)


@cache
def chosen() -> list[Case]:
    """Once for all parts."""
    return few(cases, FIRST, MODES)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_mode(part: int, emulator: Emulator) -> None:
    """At once and late."""
    for case in chosen()[part::PARTS]:
        for seed in (0, 3):
            assert_computes(case.choice, emulator, seed, case.way)
