"""Every mode of the gather-GEMM's kernel, run from its source on a CPU: random layers that together have them all."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from conftest import needs_gxx
from drawn import FORWARD_LIKE, LAYOUTS, MOST, TENSOR, Layers, gather_work
from emulator import Emulator
from modes import Aspects, Case, Few, few, of_cases, only
from results import Way, assert_computes, assert_infinities_reach_no_others
from upconv.cuda.axes import Unfit, any_size, result_shape, source_shape
from upconv.cuda.cost import Cost
from upconv.cuda.gemm import gather, gather_search
from upconv.cuda.gemm.shuffle import shuffled
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import H200
from upconv.problem import Problem

pytestmark = needs_gxx

PARTS = 6  # tests that divide the cases
COUNT = 191
"""Modes, of all seeds."""
FIRST = (
    83, 99, 141, 170, 177, 179, 199, 212, 250, 263, 323, 357, 388, 393, 419, 479, 579, 584, 637, 658, 713, 726, 751,
    817, 818, 833, 834, 850, 855, 871, 932, 944, 960, 1091, 1106, 1124, 1200, 1211, 1227, 1290, 1331, 1360, 1432, 1437,
    1451, 1497, 1520, 1535, 1561, 1590, 1671, 1718, 1791, 1838, 1851, 1908,
)  # fmt: skip
"""Of the seeds a few whose layers have every mode, with little work. Others are drawn where these do no longer."""
GROUPS = (506, 639, 1047, 1838)
"""Of the seeds those whose layers have chunks that end with groups, and others, in both layouts."""


# --- layers and tilings ----------------------------------------------------------------------------------------------


LAYERS = Layers(
    FORWARD_LIKE, TENSOR, inputs=(4, 8, 16, 40, 72, 136), outputs=(3, 8, 16, 23, 40, 64, 72, 136),
    heights=(1, 3, 4, 5, 6, 7, 8, 9, 11, 16), widths=(1, 3, 4, 6, 7, 8, 9, 12, 16, 17, 20), dilations=(1, 1, 2, 3, 9),
)  # fmt: skip
LAST = replace(LAYERS, layouts=("channels_last",), ranks=(2, 2, 3), outputs=(8, 16, 40, 64, 72, 136))
DENSE = replace(LAYERS, layouts=("nchw",), dilations=(1,))
SEARCHES: tuple[tuple[Layers, str], ...] = (
    (LAYERS, ""),
    (LAYERS, ""),
    (LAYERS, "mma.sync"),
    (LAST, ""),  # whose weights boxes may bring
    (LAST, ""),
    # Many taps, or phases, along W.
    (replace(LAYERS, ranks=(1,), kernels=(3, 7, 8, 9, 16), strides=(1, 2, 4, 8, 20), dilations=(1,)), ""),
    # Slices without taps, of many outputs.
    (replace(DENSE, passes=("fwd",), ranks=(3,), inputs=(8,), heights=(3, 9, 30), widths=(15, 16), kernels=(1, 2, 3),
             strides=(2, 2, 4)), ""),
    (replace(DENSE, heights=(4, 8, 16), widths=(4, 8, 16, 32), kernels=(1, 2, 3, 4), strides=(1, 2, 4)), "whole"),
    (replace(DENSE, passes=("fwd",), heights=(1, 2, 3, 4, 6), widths=(1, 2, 3, 4, 6), kernels=(3, 4), strides=(1, 2),
             paddings=1), "beside"),
    # Few output channels, whose phases are rows of M.
    (replace(DENSE, passes=("fwd",), layouts=LAYOUTS, groups=(1,), inputs=(3, 16), outputs=(1, 2, 3, 5),
             strides=(1, 2, 3)), "shuffle"),
    # Rows of 16 bits that the copy engine may store.
    (replace(DENSE, passes=("fwd",), precisions=("fp16", "bf16"), ranks=(2,), groups=(1,), inputs=(16,),
             outputs=(8, 40, 72, 136), heights=(2, 3, 5, 9), widths=(8, 16, 24), kernels=(1, 2, 3, 4, 6),
             strides=(1, 2, 4), paddings=1), "drained"),
)  # fmt: skip
"""Layers, and what a search looks for."""


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
        unroll = tuple(rng.choice((1, 1, 1, 2, 3)) if axis == 1 and p.rank > 1 else 1 for axis in range(3))
        strides = (1,) * (3 - p.rank) + p.stride if p.pass_ == "fwd" else (1, 1, 1)
        steps = [n * u for n, u in zip(strides, unroll)]
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
            classes=rng.choice(((1, 1), (1, 2), (2, 1), (4, 2), None)),
            wgmma=rng.random() < 0.7,
            cluster=rng.choice((1, 1, 1, 2, 3)),
        )
        try:
            return tiling.checked(H200.shared_bytes)
        except Unfit:
            continue
    return None


def searched(p: Problem, what: str, rng: random.Random) -> list[Tiling]:
    """What a search has for a layer."""
    how: dict[str, Any] = {"classes": gather_search.classes_of(p)} if p.layout == "nchw" else {}
    if what == "mma.sync":
        how["wgmma"] = False
    elif what in ("whole", "beside"):
        how = {"size": p.size, "beside": what == "beside", "classes": (1, 1)}
    elif what == "shuffle":
        if (shuffle := shuffled(any_size(p))) is None:
            return []
        how["shuffle"] = shuffle
    elif what == "drained":
        if not gather_search.drains(p):
            return []
        how = rng.choice((how, {"size": p.size})) | {"drained": True}
    return list(gather_search.candidates(any_size(p), H200, **how))


def tilings(p: Problem, what: str, rng: random.Random) -> Iterator[Tiling]:
    """Some of a search's and, of these, by clusters or rings of their own; and another."""
    every = searched(p, what, rng)
    for t in rng.sample(every, min(len(every), 8)):
        yield t
        changes: list[dict[str, Any]] = [
            {"cluster": rng.choice((2, 2, 3, 4))},
            {"resident": not t.resident},
            {"stages_w": 2, "w_stage": rng.randint(1, 9)},
        ]
        with contextlib.suppress(Unfit):
            yield replace(t, **rng.choice(changes)).checked(H200.shared_bytes)
    found = draw_tiling(p, rng)
    if found is not None:
        yield found


def serves(t: Tiling, p: Problem) -> bool:
    """Whether a tiling of a layer at one size serves it at another."""
    if t.drained and not gather_search.drains(p):
        return False
    if t.whole is not None:
        return t.whole == (1,) * (3 - p.rank) + source_shape(p)[2:]
    return t.channels_last or not t.tensor_map or t.classes == gather_search.classes_of(p)


def other_size(t: Tiling, p: Problem, rng: random.Random) -> Problem:
    """A layer at another size and batch that a tiling serves: within a tile, and of several."""
    for _ in range(9):
        size = [max(1, rng.choice((n, n // 2, 2 * n, rng.randint(1, n + 3)))) for n in p.size]
        q = p
        with contextlib.suppress(ValueError):  # no output
            q = p.with_(batch=1 if p.batch_as_width else rng.randint(1, 4), size=tuple(size))
        if serves(t, q) and gather_work(t, q) <= MOST:
            return q
    return p


def drawn_way(choice: gather.Choice, rng: random.Random) -> Way:
    p = choice.problem
    single = p.dtype.itemsize == 2 and rng.random() < 0.2
    return Way(
        last=p.rank > 1 and not p.batch_as_width and rng.random() < 0.5, single=single,
        packing=rng.random() < 0.3, once=rng.random() < 0.7,
    )  # fmt: skip


def cases(seed: int) -> Iterator[Case]:
    """Those of a random layer."""
    rng = random.Random(f"modes of gather, {seed}")
    layers, what = SEARCHES[seed % len(SEARCHES)]
    p = layers.draw(rng)
    if p.layout == "channels_last" and p.rank == 2 and not what and rng.random() < 0.15:
        p = p.abreast or p
    for t in tilings(p, what, rng):
        q = other_size(t, p, rng)
        if serves(t, q) and gather_work(t, q) <= MOST:
            chip = replace(H200, multiprocessors=rng.choice((1, 1, 2, 7, 132)))
            choice = gather.Choice(t, q, chip, Cost(rng.choice((1e-6, 1e-3))), general=rng.random() < 0.2)
            yield Case(choice, drawn_way(choice, rng), gather_work(t, q))


# --- modes -----------------------------------------------------------------------------------------------------------


def form(t: Tiling) -> tuple[Any, ...]:
    """By which instruction, of which layout."""
    return t.wgmma, t.problem.layout


def without_taps(t: Tiling) -> set[tuple[str, str]]:
    """What of a result has no taps: planes or rows, which one variant stores or several share."""
    several = len(t.multiplied.variants) > 1
    return {("rows" if one.rows else "planes", several, t.problem.layout) for one in t.multiplied.bare}


EVERY: Aspects = {
    "precision": lambda t: (t.problem.precision, *form(t)),
    "pass": lambda t: (t.problem.pass_, *form(t)),
    "by wgmma": lambda t: t.wgmma and (t.split, t.resident),
    "by mma.sync": lambda t: not t.wgmma and t.split,
    "steps of a chunk": lambda t: t.k_steps,
    "without taps": without_taps,
}
NCHW: Aspects = {
    "rows by threads": lambda t: not t.tensor_map and t.wgmma,
    "rows by boxes": lambda t: t.tensor_map and t.whole is None and t.parts,
    "rows by several boxes": lambda t: t.tensor_map and t.whole is None and t.row_boxes > 1,
    "rows by boxes, classes": lambda t: t.tensor_map and t.classed and t.classes,
    "rows by boxes, classed": lambda t: t.tensor_map and (t.classed, t.element),
    "columns of a stride": lambda t: t.tensor_map and t.whole is None and (min(t.in_steps[2], 2), t.in_steps[2] % 4),
    "small images": lambda t: t.whole is not None and (t.beside > 0,),
    "small images of several boxes": lambda t: t.whole_pixels > t.box_pixels,
    "several small images": lambda t: t.whole is not None and t.tile[0] > 1,
    "images side by side": lambda t: t.beside > 0 and t.element,
    "images side by side, channels of a box's row": lambda t: t.beside > 0 and t.box_channels,
    "a variant's own rows": lambda t: t.own_rows and (t.tensor_map, t.whole is not None, t.beside > 0),
    "images side by side, axes": lambda t: t.beside > 0 and t.problem.rank,
    "rows that only taps far apart read": lambda t: (
        any(len(firsts) > 1 for firsts, _, _ in t.bands) and (len(t.bands[1][0]) > 1 < t.unroll[1],)
    ),
    "stores between others": lambda t: not t.contiguous and t.element,
    "more than 16 phases": lambda t: t.width_subs > 16,
    "phases without taps": lambda t: -1 in t.multiplied.blocks_of_w and t.contiguous,
    "runs": lambda t: t.contiguous and (min(t.runs, 16), t.sub[0]),
}
CHANNELS_LAST: Aspects = {
    "boxes": lambda t: t.tensor_map and (t.strided_box,),
    "parts of boxes": lambda t: t.tensor_map and t.parts,
    "a box for each remainder of columns": lambda t: t.strided_box and len(t.residues) > 1,
    "a box for each band of rows": lambda t: t.strided_box and t.plane_count > len(t.residues),
    "boxes that step over rows": lambda t: t.tensor_map and max(t.box_steps[2:4]) > 1,
    "pixels by threads": lambda t: not t.tensor_map and t.wgmma and (t.aligned_channels,),
    "a batch as width": lambda t: t.problem.batch_as_width and t.problem.pass_,
    "clusters": lambda t: t.cluster > 1,
    "a variant's own rows": lambda t: t.own_rows and (t.tensor_map,),
    "runs": lambda t: min(t.runs, 8),
    "sub-positions": lambda t: t.subs,
}
SHUFFLED: Aspects = {"phases as rows": lambda t: (any(t.shuffle.zeros), t.channels_last)}
STEPS: Aspects = {
    "straight": lambda t: t.straight and (len({first for first, _ in t.stretches}) < len(t.multiplied.variants),),
    "in rounds": lambda t: t.queued and (len(t.multiplied.variants) > 1,),
    "in rounds that drain": lambda t: t.parts == 1 and not (t.straight or t.queued) and (t.mb > 1,),
    "of two subtiles": lambda t: t.wide,
    "of several blocks": lambda t: t.mb > 1 and t.nb > 1,
    "of parts": lambda t: t.parts == 2 and (t.resident,),
    "clusters": lambda t: t.cluster > 1 and t.parts,
    "clusters of more than two": lambda t: t.cluster > 2,
    "rows unrolled": lambda t: t.unroll[1] > 1,
    "groups whose chunks have others' channels": lambda t: t.problem.groups > 1 and t.cin_g % t.chunk > 0,
}
DRAINED: Aspects = {
    "patches": lambda t: t.sub,
    "channels halved": lambda t: t.split == 1,
    "images": lambda t: t.tile[0] > 1,
    "rows of two runs": lambda t: t.sub == (1, 64) and t.nb > 1,
    "phases along W": lambda t: t.width_subs,
    "bytes of a row": lambda t: t.out_span,
}


CALLS: Aspects = {
    "weights as they lie": lambda case: as_they_lie(case) and (case.choice.problem.pass_, of(case).element),
    "weights as they lie, resident": lambda case: as_they_lie(case) and (case.choice.problem.pass_, of(case).resident),
    "weights as they lie, halved": lambda case: as_they_lie(case) and of(case).split == 1 and case.choice.problem.pass_,
    "weights as they lie for sub-positions": lambda case: as_they_lie(case) and of(case).subs > 1,
    "weights as they lie in clusters": lambda case: as_they_lie(case) and of(case).cluster > 1,
    "packing": lambda case: (
        not as_they_lie(case)
        and (case.choice.problem.pass_, of(case).element, lies(case), of(case).shuffle is not None)
    ),
    "packing a bias": lambda case: case.way.single and case.choice.problem.bias,
    "tiles claimed": lambda case: claims(case) and (of(case).split, of(case).resident),
    "tiles claimed by blocks of one M-group": lambda case: claims(case) and of(case).resident and of(case).m_groups > 1,
    "long runs without taps": lambda case: longest_run(case) > 2100 and of(case).element,
    "runs off 16 bytes without taps": lambda case: longest_run(case) % 16 > 0 and of(case).element,
    "rows at multiples of bytes": lambda case: (
        stores_rows(case) and (of(case).element, gather.store_unit(of(case), case.choice.problem))
    ),
    "rows of any size": lambda case: stores_rows(case) and case.choice.general and of(case).element,
}


def of(case: Case) -> Tiling:
    found: Tiling = case.choice.tiling
    return found


def lies(case: Case) -> str:
    return "single" if case.way.single else "last" if case.way.last else ""


def as_they_lie(case: Case) -> bool:
    return case.choice.boxable and lies(case) == "last"


def claims(case: Case) -> bool:
    return case.choice.claimed and case.way.once


def stores_rows(case: Case) -> bool:
    t = of(case)
    return not t.channels_last and t.shuffle is None and t.contiguous and not (t.drained or t.beside)


def longest_run(case: Case) -> int:
    """Bytes that a tile stores together of an NCHW plane without taps."""
    t, p = of(case), case.choice.problem
    depth = (1, 1, *result_shape(p)[2:])[-3]
    planes = not t.channels_last and any(one.rows == 0 and one.d < depth for one in t.multiplied.bare)
    shares = math.prod(t.counts(p)[2:]) * len(t.multiplied.variants)
    return planes * math.prod(result_shape(p)[-2:]) * t.element // shares


def named(head: str, aspects: Aspects) -> Aspects:
    return {f"{head}: {name}": of for name, of in aspects.items()}


ASPECTS = CALLS | of_cases(
    EVERY
    | only(lambda t: not t.channels_last and t.shuffle is None, NCHW)
    | only(lambda t: t.channels_last and t.shuffle is None, named("channels_last", CHANNELS_LAST))
    | only(lambda t: t.shuffle is not None, SHUFFLED)
    | only(lambda t: t.wgmma, named("steps", STEPS))
    | only(lambda t: t.drained, named("by the copy engine", DRAINED))
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
    """At once and late, and at another size where that is the same kernel's."""
    rng = random.Random(part)
    for case in chosen().cases[part::PARTS]:
        choice, other = case.choice, replace(case.choice, problem=other_size(of(case), case.choice.problem, rng))
        assert_computes(choice, emulator, 0, case.way)
        alike = other.sources() == choice.sources()
        assert_computes(other if alike else choice, emulator, 3, case.way)


def test_infinities_reach_only_the_outputs_that_read_them(emulator: Emulator) -> None:
    """Where sub-positions share a block (`subs` > 1) its rows do multiply the union of their taps' pixels; so do phases
    as rows. Chunks of groups must not end in the next group.
    """
    alone: Aspects = {
        "chunks of groups": lambda case: (
            of(case).problem.groups > 1
            and not any(case.choice.problem.padding)  # else there may be pixels that no tap reads
            and of(case).subs == 1
            and of(case).shuffle is None
            and (of(case).problem.layout, of(case).cin_g % of(case).chunk == 0)
        )
    }
    found = few(cases, alone, 4, GROUPS)
    assert not found.others  # else `GROUPS` needs these
    for case in found.cases:
        assert_infinities_reach_no_others(case.choice, emulator, Way())
