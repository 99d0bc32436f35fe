"""Every mode of the grad-weight kernels, run from their source on a CPU: random layers that together have them all."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from conftest import needs_gxx
from drawn import DTYPES, TENSOR
from emulator import Emulator, emulator
from modes import Case, OfCase, OfTiling, few, having, of_cases, where
from results import Way, assert_computes
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import H200
from upconv.cuda.wgrad import wgrad, wgrad_search
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Precision, Problem, output_length

pytestmark = needs_gxx
__all__ = ["emulator"]

PARTS = 4  # tests that divide the cases
MOST = 6e7  # products of a case's tiles
FIRST = (
    6, 51, 68, 91, 98, 109, 156, 162, 195, 223, 255, 272, 314, 351, 362, 431, 485, 495, 517, 519,
    570, 585, 595, 642, 1029,
)  # fmt: skip
"""Of the seeds a few whose layers have every mode. Others are drawn where these do no longer."""


# --- layers and tilings ----------------------------------------------------------------------------------------------

AnyTiling = SyncTiling | WarpgroupTiling


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


def other_size(p: Problem, rng: random.Random) -> Problem:
    """The layer at another batch and size, whose rows have the same alignment."""
    size = [n + rng.randint(0, 3) for n in p.size]
    size[-1] = p.size[-1] + 8 * rng.randint(0, 2)
    return p.with_(batch=rng.randint(1, 5), size=tuple(size))


def serves(t: AnyTiling, p: Problem, q: Problem) -> bool:
    """Whether a tiling of a layer at one size serves it at another."""
    if not isinstance(t, WarpgroupTiling):
        return True
    whole = not t.lines or p.size[-1] == q.size[-1]
    return whole and (not t.classed or wgrad_search.classes_of(q) == t.classes)


def strided(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Neighbouring taps of a wide stride."""
    kernel, stride, padding = rng.choice(((2, 2, 0), (4, 2, 1), (8, 4, 2), (16, 8, 4)))
    size = (64,) if p.rank == 1 else (*p.size[:-1], rng.choice((16, 24)))
    lead = (1,) * (p.rank - 1)
    axes = {"kernel": (*lead, kernel), "stride": (*lead, stride), "padding": (*(0,) * len(lead), padding)}
    more = {"dilation": (1,) * p.rank, "output_padding": (0,) * p.rank, "out_channels": p.groups * rng.choice((32, 72))}
    return {"layout": "nchw", "size": size, **axes, **more}


def columns(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Columns of taps, whose rows of x follow each other."""
    kernel, stride = rng.choice(((3, 1), (4, 1), (5, 1), (4, 2), (5, 3), (3, 2)))
    size = (*(rng.randint(1, 5) for _ in p.size[1:]), rng.choice((16, 24)))
    axes = {"kernel": (*[2] * (p.rank - 2), kernel, rng.randint(1, 3)), "stride": (*[1] * (p.rank - 2), stride, 1)}
    more = {"dilation": (1,) * p.rank, "padding": (0,) * p.rank, "output_padding": (0,) * p.rank}
    channels = {"groups": 1, "in_channels": rng.choice((16, 24, 40, 64)), "out_channels": rng.choice((16, 32, 64))}
    return {"size": size, **axes, **more, **channels} if p.rank > 1 else {}


def wide(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Input channels that fill no power of two, and many."""
    channels = {"in_channels": rng.choice((48, 40, 70, 80, 96, 256, 320)), "out_channels": 32, "groups": 1}
    axes = {"kernel": (1, 3, 2), "stride": (1, rng.choice((1, 3)), 3), "size": (1, 3, 16), "padding": (0, 1, 0)}
    axes |= {"dilation": (1, 1, 1), "output_padding": (0, 0, 0)}
    return channels | {name: of[3 - p.rank :] for name, of in axes.items()}


def classed(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Rows that begin off 16 bytes, at few places."""
    kind, width, height = rng.choice((("tf32", 24, 8), ("tf32", 32, 7), ("bf16", 32, 6), ("fp16", 64, 5)))
    axes = {"kernel": (2, 3, 3), "size": (2, height, width), "padding": (0, 1, 0), "stride": (1, 1, 1)}
    axes |= {"dilation": (1, 1, 1), "output_padding": (0, 0, 0)}
    more = {"in_channels": p.groups * 16, "out_channels": p.groups * rng.choice((32, 48)), "layout": "nchw"}
    kinds = {"precision": kind, "dtype": DTYPES[kind]}
    return {name: of[3 - p.rank :] for name, of in axes.items()} | more | kinds


def last(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Channels that boxes want, strides by remainders, and small images."""
    channels = p.groups * rng.choice((16, 40, 64, 128)), p.groups * rng.choice((16, 32, 64))
    found: dict[str, Any] = {"in_channels": channels[0], "out_channels": channels[1]}
    if rng.random() < 0.5:
        found["size"] = tuple(rng.choice((3, 4, 7, 14)) for _ in p.size)
    return found | {"layout": "channels_last" if p.rank > 1 else "nchw"}


def narrow(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Images as wide as a chunk."""
    return {"size": (*(rng.randint(1, 6) for _ in p.size[1:]), rng.choice((8, 16, 32))), "layout": "nchw"}


def large(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Weights of many elements."""
    kernel, stride = rng.choice(((2, 2), (2, 1), (4, 2)))
    channels = rng.choice((64, 64, 128, 192)), rng.choice((64, 128, 192))
    kind = rng.choice(("fp16", "bf16", "bf16", "tf32"))
    layout = "channels_last" if kind != "tf32" else rng.choice(("nchw", "channels_last"))
    lead = (1,) * (p.rank - 2)
    axes = {
        "kernel": (*lead, kernel, kernel),
        "stride": (*lead, stride, stride),
        "size": (*lead, rng.choice((3, 8, 16)), 8),
    }
    more = {"dilation": (1,) * p.rank, "padding": (0,) * p.rank, "output_padding": (0,) * p.rank, "groups": 1}
    kinds = {"precision": kind, "dtype": DTYPES[kind], "layout": layout}
    kinds |= {"in_channels": channels[0], "out_channels": channels[1]}
    return {**axes, **more, **kinds} if p.rank > 1 else {}


Draw = Callable[[Problem, random.Random], dict[str, Any]]
DRAWS: tuple[Draw, ...] = (
    lambda p, rng: {}, strided, columns, wide, classed, last, last, last, narrow, large, large,
)  # fmt: skip


def draw_layer(draw: Draw, rng: random.Random) -> Problem | None:
    p = draw_problem(rng)
    try:
        return p.with_(**draw(p, rng))
    except ValueError:  # no output
        return None


def boxed(t: AnyTiling, p: Problem) -> AnyTiling | None:
    """A tiling with the box of a problem's own chunks; None where they have none."""
    if not isinstance(t, WarpgroupTiling) or not t.gapless:
        return t
    box = wgrad_search.gapless_box(p, t.gapless)
    return box and replace(t, tile=box)


def work(t: AnyTiling, p: Problem) -> float:
    """Products of a problem's chunks."""
    chunk = t.gapless if isinstance(t, WarpgroupTiling) and t.gapless else math.prod(t.tile)
    return float(t.chunks(p) * chunk * t.tiles * math.prod(t.block) * t.set_taps)


def cases(seed: int) -> Iterator[Case]:
    """Those of a random layer."""
    rng = random.Random(f"modes of wgrad, {seed}")
    p = draw_layer(DRAWS[seed % len(DRAWS)], rng)
    if p is None:
        return
    every = list(wgrad_search.candidates(p, H200))
    for t in rng.sample(every, min(len(every), 40)):
        q = other_size(p, rng) if rng.random() < 0.5 else p
        if not serves(t, p, q):
            continue
        boxes = boxed(t, q)
        if boxes is None or work(boxes, q) > MOST:
            continue
        t = boxes
        count = math.prod(t.counts(q))
        splits = min(count, rng.choice((1, 2, 2, 3, 3, 5, 9, 20)))
        splits = -(-count // -(-count // splits))  # none without work
        chip = replace(H200, multiprocessors=rng.choice((7, 132, 132, t.tiles * splits)))  # the last: all at once
        choice = wgrad.Choice(t, q, chip, splits, Cost(1e-5))
        single = q.dtype.itemsize == 2 and rng.random() < 0.3
        way = Way(q.rank > 1 and rng.random() < 0.5, single, once=rng.random() < 0.5)
        yield Case(choice, way, work(t, q))


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
    found |= having("{name} {value}", subs=(1, 2, 4), warpgroups=(2, 3), split_m=(1, 2, 3), segment=(32, 64, 128))
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
        "many elements turned": lambda case: end(case) == "steps" and case.choice.tiling.reduce_rows > 1,
        "many elements together": lambda case: end(case) == "together" and case.choice.tiling.reduce_rows > 1,
        "few sums of each block together": lambda case: end(case) == "together" and few_sums(case),
        "channels off four in channels_last": lambda case: (
            end(case) in ("alone", "together") and case.way.last and case.choice.tiling.channels[1] % 4 > 0
        ),
    }
    return found


def few_sums(case: Case) -> bool:
    """Whether lanes divide the splits of a quad of sums."""
    t, share = wgmma(case), -(-math.prod(case.choice.tiling.block) // 4 // case.choice.splits)
    return t is not None and t.reduce_rows == 1 and t.set_taps * share <= t.warpgroups * 64


MODES = ends() | of_cases(
    {
        "wgmma: ": (numbered(), lambda t: isinstance(t, WarpgroupTiling)),
        "wgmma, NCHW: ": (NCHW, lambda t: isinstance(t, WarpgroupTiling) and not t.channels_last),
        "wgmma, channels_last: ": (LAST, lambda t: isinstance(t, WarpgroupTiling) and t.channels_last),
        "mma.sync, NCHW: ": (SYNC, lambda t: not isinstance(t, WarpgroupTiling) and not t.channels_last),
        "mma.sync, channels_last: ": (SYNC, lambda t: not isinstance(t, WarpgroupTiling) and t.channels_last),
    }
)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_mode(part: int, emulator: Emulator) -> None:
    """At once and late."""
    for case in few(cases, FIRST, MODES)[part::PARTS]:
        for seed in (0, 3):
            assert_computes(case.choice, emulator, seed, case.way)
