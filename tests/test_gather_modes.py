"""Every mode of the gather-GEMM's kernel, run from its source on a CPU: random layers that together have them all."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from conftest import needs_gxx
from drawn import DTYPES, TENSOR
from emulator import Emulator, emulator
from modes import SEEDS, Case, OfCase, OfTiling, few, fewest, having, of_cases, where
from results import Way, assert_computes, assert_infinities_reach_no_others
from upconv.cuda.axes import Unfit, any_size, result_shape, source_shape
from upconv.cuda.cost import Cost
from upconv.cuda.gemm import gather, gather_search
from upconv.cuda.gemm.shuffle import ways
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import H200
from upconv.problem import Pass, Precision, Problem, output_length

pytestmark = needs_gxx
__all__ = ["emulator"]

PARTS = 6  # tests that divide the cases
MOST = 3e7  # products of a case's tiles
FIRST = (
    802, 1167, 627, 157, 418, 199, 42, 610, 80, 482, 458, 908, 914, 273, 74, 327, 542, 328, 1139, 32, 108, 396, 441,
    448, 505, 617, 873, 203, 1170,
)  # fmt: skip
"""Of the seeds a few whose layers have every mode. Others are drawn where these do no longer."""


# --- layers and tilings ----------------------------------------------------------------------------------------------


PASSES: tuple[Pass, ...] = ("fwd", "grad-input")


def draw_problem(rng: random.Random) -> Problem:
    """A small layer: all ranks, asymmetric everything, output paddings beyond the stride, odd sizes and channels.

    Every other one is of the gradient for the input.
    """
    pass_ = rng.choice(PASSES)
    rank = rng.choice((1, 2, 2, 3))
    largest = (40, 11, 6)[rank - 1]
    axes = []
    for _ in range(rank):
        kernel, stride, dilation = (
            rng.choice((1, 2, 3, 4, 5)),
            rng.choice((1, 1, 2, 2, 3, 4)),
            rng.choice((1, 1, 2, 3, 9)),
        )
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
        bias=rng.random() < 0.5 and pass_ == "fwd",
        dtype=DTYPES[precision],
        precision=precision,
        layout=rng.choice(("nchw", "channels_last")) if rank > 1 else "nchw",
        pass_=pass_,
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


def same(rank: int, **axes: int) -> dict[str, tuple[int, ...]]:
    """Values of a problem that are alike along all axes; what is not told is as for a layer without a stride."""
    every = {"kernel": 1, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1} | axes
    return {name: (value,) * rank for name, value in every.items()}


def images(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Of few sizes; of gradients, whose sources are larger, too."""
    size = tuple(rng.choice((4, 8, 16, 32)) for _ in p.size)
    larger = {"size": (8,) * p.rank, "pass_": "grad-input", **same(p.rank, kernel=4, stride=4)}
    return {"layout": "nchw", "size": size} | rng.choice(({}, larger))


def narrow_images(p: Problem, rng: random.Random) -> dict[str, Any]:
    axes = same(p.rank, kernel=rng.choice((3, 4)), stride=rng.choice((1, 2)), padding=1)
    return {"layout": "nchw", "pass_": "fwd", "size": tuple(rng.choice((1, 2, 3, 4, 6)) for _ in p.size), **axes}


def phases(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Few output channels, whose phases are rows of M."""
    axes = same(p.rank) | {"stride": tuple(rng.choice((1, 2, 3)) for _ in p.size)}
    axes |= {"kernel": p.kernel, "padding": tuple(rng.randrange(k) for k in p.kernel)}
    channels = {"groups": 1, "in_channels": rng.choice((3, 16)), "out_channels": rng.choice((1, 2, 3, 5))}
    return {"pass_": "fwd", "layout": rng.choice(("nchw", p.layout)), **axes, **channels}


def drained(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Rows of 16 bits that the copy engine may store."""
    stride, more = rng.choice((1, 2, 4)), rng.choice((0, 1))
    axes = same(2, kernel=stride + 2 * more, stride=stride, padding=more)
    size = (rng.randint(2, 9), 8 * rng.randint(1, 3))
    kind = rng.choice(("fp16", "bf16"))
    found = {"layout": "nchw", "pass_": "fwd", "size": size, "precision": kind, "dtype": DTYPES[kind], **axes}
    return found | {"groups": 1, "in_channels": 16, "out_channels": rng.choice((8, 40, 72, 136))}


def lying_last(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Channels that boxes of weights want."""
    channels = {"out_channels": p.groups * rng.choice((8, 16, 40, 64, 72, 136))}
    return {"layout": "channels_last" if p.rank > 1 else "nchw", "pass_": rng.choice(PASSES), **channels}


def long(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Many taps, or phases, along W."""
    kernel, stride = rng.choice(((9, 1), (7, 2), (16, 8), (8, 4), (3, 20)))
    lead = (1,) * (p.rank - 1)
    return same(p.rank) | {"kernel": (*lead, kernel), "stride": (*lead, stride)}


def bare(p: Problem, rng: random.Random) -> dict[str, Any]:
    """Slices without taps, of many outputs."""
    axes = {"kernel": (1, 2, 3), "stride": (2, 2, 4), "size": (3, rng.choice((9, 30)), rng.choice((15, 16)))}
    return same(3) | axes | {"layout": "nchw", "pass_": "fwd", "in_channels": 8 * p.groups}


RANKS = {bare: 3, drained: 2}
Draw = Callable[[Problem, random.Random], dict[str, Any]]
SEARCHES: tuple[tuple[Draw, str], ...] = (
    (lambda p, rng: {}, ""), (lambda p, rng: {}, ""), (lambda p, rng: {}, "mma.sync"), (lying_last, ""),
    (lying_last, ""), (long, ""), (bare, ""), (images, "whole"), (narrow_images, "beside"), (phases, "shuffle"),
    (drained, "drained"),
)  # fmt: skip
"""What a layer is like, and what a search looks for."""


def searched(p: Problem, what: str, rng: random.Random) -> list[Tiling]:
    """What a search has for a layer."""
    how: dict[str, Any] = {"classes": gather_search.classes_of(p)} if p.layout == "nchw" else {}
    if what == "mma.sync":
        how["wgmma"] = False
    elif what in ("whole", "beside"):
        how = {"size": p.size, "beside": what == "beside"}
    elif what == "shuffle":
        if not ways(any_size(p)):
            return []
        how["shuffle"] = rng.choice(ways(any_size(p)))
    elif what == "drained":
        if not gather_search.drains(p):
            return []
        how = rng.choice((how, {"size": p.size})) | {"drained": True}
    return list(gather_search.candidates(any_size(p), H200, **how))


def tilings(p: Problem, what: str, rng: random.Random) -> Iterator[Tiling]:
    """Some of a search's and, of these, by clusters, planes or rings of their own; and another."""
    every = searched(p, what, rng)
    for t in rng.sample(every, min(len(every), 8)):
        yield t
        changes: list[dict[str, Any]] = [
            {"cluster": rng.choice((2, 2, 3, 4))}, {"planewise": True, "stages_p": 1},
            {"resident": not t.resident}, {"stages_w": 2, "w_stage": rng.randint(1, 9)},
        ]  # fmt: skip
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


def work(t: Tiling, p: Problem) -> float:
    """Products of a problem's tiles."""
    tiles = math.prod(t.counts(p)) * p.groups * t.cout_blocks
    return tiles * math.prod(t.tile) * 64 * t.wgs_m * t.multiplied.total * t.chunks * t.chunk


def other_size(t: Tiling, p: Problem, rng: random.Random) -> Problem:
    """A layer at another size and batch that a tiling serves: within a tile, and of several."""
    for _ in range(9):
        size = [max(1, rng.choice((n, n // 2, 2 * n, rng.randint(1, n + 3)))) for n in p.size]
        q = p
        with contextlib.suppress(ValueError):  # no output
            q = p.with_(batch=1 if p.batch_as_width else rng.randint(1, 4), size=tuple(size))
        if serves(t, q) and work(t, q) <= MOST:
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
    draw, what = SEARCHES[seed % len(SEARCHES)]
    p = draw_problem(rng)
    while p.rank != RANKS.get(draw, p.rank):
        p = draw_problem(rng)
    channels = (rng.choice((4, 8, 16, 16, 40, 72, 136)), rng.choice((3, 8, 16, 23, 40, 64, 72, 136)))
    changes: dict[str, Any] = {"in_channels": p.groups * channels[0], "out_channels": p.groups * channels[1]}
    if rng.random() < 0.3:  # rows that begin at few places
        changes["size"] = tuple(rng.choice((4, 6, 8, 16)) for _ in p.size)
    try:
        p = p.with_(**{**changes, **draw(p, rng)})
    except ValueError:  # no output
        return
    if p.layout == "channels_last" and p.rank == 2 and not what and rng.random() < 0.15:
        p = p.abreast or p
    for t in tilings(p, what, rng):
        q = other_size(t, p, rng)
        if serves(t, q) and work(t, q) <= MOST:
            chip = replace(H200, multiprocessors=rng.choice((1, 1, 2, 7, 132)))
            choice = gather.Choice(t, q, chip, Cost(rng.choice((1e-6, 1e-3))), general=rng.random() < 0.2)
            yield Case(choice, drawn_way(choice, rng), work(t, q))


# --- modes -----------------------------------------------------------------------------------------------------------


def kinds() -> OfTiling:
    """What is multiplied, and by which instruction."""
    found: OfTiling = {}
    for name, values in (("precision", TENSOR), ("pass_", PASSES)):
        for kind in product(values, ("nchw", "channels_last"), (True, False)):
            found[str(kind)] = lambda t, a=name, kind=kind: (getattr(t.problem, a), t.problem.layout, t.wgmma) == kind
    return found


NCHW: OfTiling = {
    "rows by threads": lambda t: not t.tensor_map and t.wgmma,
    "rows by boxes": lambda t: t.tensor_map and not t.classed and t.whole is None,
    "columns of a stride": lambda t: t.tensor_map and t.in_steps[2] > 1 and t.whole is None,
    "columns of a stride of four": lambda t: t.tensor_map and t.in_steps[2] % 4 == 0 and t.whole is None,
    "rows of several boxes": lambda t: t.tensor_map and t.row_boxes > 1 and t.whole is None,
    "small images": lambda t: t.whole is not None and not t.beside,
    "small images of several boxes": lambda t: t.whole_pixels > t.box_pixels,
    "several small images": lambda t: t.whole is not None and t.tile[0] > 1,
    "both parts of rows by boxes": lambda t: t.tensor_map and t.parts == 2 and t.whole is None,
    "rows that only taps far apart read": lambda t: any(len(firsts) > 1 for firsts, _, _ in t.bands),
    "rows that only taps far apart read, unrolled": lambda t: len(t.bands[1][0]) > 1 and t.unroll[1] > 1,
    "stores between others": lambda t: not t.contiguous and t.element == 4,
    "stores of 2 bytes between others": lambda t: not t.contiguous and t.element == 2,
    "more than 16 phases": lambda t: t.width_subs > 16,
    "phases without taps": lambda t: -1 in t.multiplied.blocks_of_w and t.contiguous,
}
LAST: OfTiling = {
    "a box": lambda t: t.tensor_map and not t.strided_box,
    "a box for each remainder of columns": lambda t: t.strided_box and len(t.residues) > 1 and not t.planewise,
    "a box for each band of rows": lambda t: t.strided_box and t.plane_count > len(t.residues),
    "boxes that step over rows": lambda t: t.tensor_map and max(t.box_steps[2:4]) > 1,
    "planes one by one": lambda t: t.planewise and t.straight,
    "planes one by one, in rounds": lambda t: t.planewise and t.queued,
    "pixels by threads": lambda t: not t.tensor_map and t.aligned_channels and t.wgmma,
    "channels off 16 bytes": lambda t: not t.aligned_channels and t.wgmma,
    "both parts of a box": lambda t: t.tensor_map and t.parts == 2,
    "a batch as width": lambda t: t.problem.batch_as_width and t.problem.pass_ == "fwd",
    "a batch as width, of gradients": lambda t: t.problem.batch_as_width and t.problem.pass_ != "fwd",
    "clusters": lambda t: t.cluster > 1,
}
STEPS: OfTiling = {
    "straight": lambda t: t.straight,
    "straight, for several phases": lambda t: len({first for first, _ in t.stretches}) < len(t.multiplied.variants),
    "in rounds": lambda t: t.queued,
    "in rounds, of several phases": lambda t: t.queued and len(t.multiplied.variants) > 1,
    "in rounds that drain": lambda t: t.wgmma and t.parts == 1 and not (t.straight or t.queued),
    "in rounds that drain, of several blocks": lambda t: t.parts == 1 and t.mb > 1 and not (t.straight or t.queued),
    "of two subtiles": lambda t: t.wide,
    "of several blocks": lambda t: t.mb > 1 and t.nb > 1,
    "of parts": lambda t: t.parts == 2,
    "of resident parts": lambda t: t.parts == 2 and t.resident,
    "clusters": lambda t: t.cluster > 1 and t.parts == 1,
    "clusters of more than two": lambda t: t.cluster > 2,
    "clusters of parts": lambda t: t.cluster > 1 and t.parts == 2,
    "rows unrolled": lambda t: t.unroll[1] > 1,
    "groups whose chunks have others' channels": lambda t: t.problem.groups > 1 and t.cin_g % t.chunk > 0,
}
DRAINED: OfTiling = {
    "rows": lambda t: t.sub == (1, 64),
    "patches": lambda t: t.sub == (8, 8),
    "channels halved": lambda t: t.split == 1,
    "images": lambda t: t.tile[0] > 1,
    "rows of two runs": lambda t: t.sub == (1, 64) and t.nb > 1,
}


def numbered() -> OfTiling:
    """Modes that differ by numbers."""
    found: OfTiling = {}
    for kind in product((0, 1, 2), (True, False)):
        found[f"split {kind[0]}, resident {kind[1]}"] = lambda t, kind=kind: t.wgmma and (t.split, t.resident) == kind
    found |= where(
        lambda t: t.tensor_map and t.classed,
        having("rows of {name} {value}", classes=((1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (1, 4)), element=(2, 4)),
    )
    found |= where(lambda t: t.beside > 0, having("images side by side, {name} {value}", element=(2, 4)))
    found |= where(lambda t: t.beside > 0, {f"of {n} axes": lambda t, n=n: t.problem.rank == n for n in (1, 2, 3)})
    found |= where(lambda t: not t.wgmma, having("by mma.sync, {name} {value}", split=(0, 1, 2)))
    return found | having("{name} {value}", k_steps=(1, 2, 4))


def stores() -> OfTiling:
    """How results leave."""
    found: OfTiling = {}
    pixels = having("pixels, {name} {value}", runs=(1, 2, 3, 4, 8), subs=(1, 2, 4))
    found |= where(lambda t: t.channels_last and t.shuffle is None, pixels)
    for runs in (*product((8, 16), (1,)), *product((1, 2, 3), (8,))):
        found[f"runs {runs}"] = lambda t, kind=runs: (
            not t.channels_last and t.shuffle is None and t.contiguous and (t.runs, t.sub[0]) == kind
        )
    for way in ((True, False, 0), (False, True, 0), (False, False, 0), (True, False, 1), (False, True, 1)):
        found[f"phases as rows {way}"] = lambda t, way=way: (
            t.shuffle is not None and (t.shuffle.ahead, any(t.shuffle.leads), t.channels_last) == way
        )
    boxes = having("by the copy engine, {name} {value}", width_subs=(1, 2, 4), out_span=(32, 64, 128))
    found |= where(lambda t: t.drained, boxes)
    without: OfTiling = {
        "planes": lambda one: one.rows == 0,
        "rows": lambda one: one.rows > 0 and one.w < 0,
        "phases": lambda one: one.rows > 0 and one.w >= 0,  # of NCHW these go with a row's own
    }
    for name, layout in (*product(without, ("channels_last",)), ("planes", "nchw"), ("rows", "nchw")):
        found[f"{name} without taps, {layout}"] = lambda t, fits=without[name], layout=layout: (
            t.problem.layout == layout and any(fits(one) for of_variant in t.multiplied.bare for one in of_variant)
        )
    return found


def calls() -> OfCase:
    """How weights come, how tiles are taken, and what is known of a result's rows."""
    found: OfCase = {
        "weights as they lie for several sub-positions": lambda case: as_they_lie(case) and of(case).subs > 1,
        "weights as they lie in clusters": lambda case: as_they_lie(case) and of(case).cluster > 1,
        "packing a bias": lambda case: case.way.single and case.choice.problem.bias,
        "tiles claimed by blocks of one M-group": lambda case: (
            claims(case) and of(case).resident and of(case).m_groups > 1
        ),
        "long runs without taps, 4 bytes": lambda case: longest_run(case) > 2100 and of(case).element == 4,
        "long runs without taps, 2 bytes": lambda case: longest_run(case) > 2100 and of(case).element == 2,
        "runs off 16 bytes without taps, 4 bytes": lambda case: longest_run(case) % 16 > 0 and of(case).element == 4,
    }
    for pass_, (name, n) in product(
        PASSES, (("element", 2), ("element", 4), ("resident", 0), ("resident", 1), ("split", 1))
    ):
        found[f"{pass_} of weights as they lie, {name} {n}"] = lambda case, pass_=pass_, a=name, n=n: (
            as_they_lie(case) and case.choice.problem.pass_ == pass_ and getattr(of(case), a) == n
        )
    for size, how in ((2, ""), (2, "last"), (2, "single"), (4, ""), (4, "last")):
        found[f"weights of {size} bytes for phases as rows, {how}"] = lambda case, kind=(size, how): (
            of(case).shuffle is not None and (of(case).element, lies(case)) == kind
        )
        for pass_ in PASSES:
            found[f"{pass_}, packing weights of {size} bytes, {how}"] = lambda case, kind=(pass_, size, how): (
                (case.choice.problem.pass_, of(case).element, lies(case)) == kind and not as_they_lie(case)
            )
    for kind in product((0, 2), (True, False)):
        found[f"tiles claimed, split and resident {kind}"] = lambda case, kind=kind: (
            claims(case) and (of(case).split, of(case).resident) == kind
        )
    for kind in ((4, 16), (4, 8), (4, 4), (2, 16), (2, 4), (2, 2)):
        found[f"rows of so many bytes at multiples of {kind}"] = lambda case, kind=kind: (
            stores_rows(case) and (of(case).element, gather.store_unit(of(case), case.choice.problem)) == kind
        )
    for size in (2, 4):
        found[f"rows of {size} bytes of any size"] = lambda case, size=size: (
            stores_rows(case) and case.choice.general and of(case).element == size
        )
    return found


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
    planes = not t.channels_last and any(
        one.rows == 0 and one.d < depth for every in t.multiplied.bare for one in every
    )
    return planes * math.prod(result_shape(p)[-2:]) * t.element // math.prod(t.counts(p)[2:])


MODES = calls() | of_cases(
    {
        "": (kinds() | numbered() | stores(), lambda t: True),
        "NCHW: ": (NCHW, lambda t: not t.channels_last and t.shuffle is None),
        "channels_last: ": (LAST, lambda t: t.channels_last and t.shuffle is None),
        "steps: ": (STEPS, lambda t: t.wgmma),
        "by the copy engine: ": (DRAINED, lambda t: t.drained),
    }
)


@cache
def chosen() -> list[Case]:
    """Once for all parts."""
    return few(cases, FIRST, MODES)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_mode(part: int, emulator: Emulator) -> None:
    """At once and late, and at another size where that is the same kernel's."""
    rng = random.Random(part)
    for case in chosen()[part::PARTS]:
        choice, other = case.choice, replace(case.choice, problem=other_size(of(case), case.choice.problem, rng))
        assert_computes(choice, emulator, 0, case.way)
        alike = other.sources() == choice.sources()
        assert_computes(other if alike else choice, emulator, 3, case.way)


def test_infinities_reach_only_the_outputs_that_read_them(emulator: Emulator) -> None:
    """Where sub-positions share a block (`subs` > 1) its rows do multiply the union of their taps' pixels; so do phases
    as rows. Chunks of groups must not end in the next group.
    """
    wanted: OfCase = {
        f"{layout}, groups of chunks that are {'full' if full else 'not full'}": lambda case, kind=(layout, full): (
            (of(case).problem.layout, of(case).cin_g % of(case).chunk == 0) == kind and of(case).problem.groups > 1
        )
        for layout, full in product(("nchw", "channels_last"), (False, True))
    }
    alone = ((case for case in cases(seed) if of(case).subs == 1 and not of(case).shuffle) for seed in SEEDS)
    for case in fewest(alone, wanted):
        assert_infinities_reach_no_others(case.choice, emulator, Way())
