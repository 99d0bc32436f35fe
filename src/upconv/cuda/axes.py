"""A pass in gather form, and what its rows of M multiply: axes of phases and taps. Pure arithmetic.

Everything has three spatial axes (D, H, W); 1-D and 2-D problems have leading axes of size 1. On an axis, outputs are
``o = out_step * q + u`` with a sub-position ``u < out_step``, and tap ``k`` of sub-position ``u`` reads the input at
``in_step * q + offset``. The sub-positions of a stride are its phases; `unroll` makes more of them from consecutive
``q``, so that a layer of few output channels fills the 64 rows of a matrix instruction (with ``U`` rows unrolled and
``K`` taps, ``K / (K + U - 1)`` of the multiplications are useful instead of a fraction ``1 / U`` of the rows).

The forward has ``out_step = stride``, ``in_step = 1`` and a sub-position for every phase. The gradient for the input
exchanges the steps: ``grad_input[i]`` sums ``grad[i * stride + k * dilation - padding]`` over all taps, so its one
sub-position has them all and ``in_step = stride``. What is read is called source, what is written result; "input" and
"output" channels, rows and pixels of a tiling and its kernel are the source's and the result's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import product

from upconv.cuda.shuffle import Shuffle, Triple
from upconv.problem import Problem


class Unfit(ValueError):
    """A tiling that the kernel cannot run; the message says why, in a sentence."""


@dataclass(frozen=True)
class Axis:
    """One axis in gather form."""

    out_step: int
    in_step: int
    taps: tuple[tuple[tuple[int, int], ...], ...]
    """For every sub-position its (kernel index, offset) pairs; may be empty."""


def source_shape(p: Problem) -> tuple[int, ...]:
    """Shape of the tensor that a pass gathers from: the input, or of the gradient for it the output's gradient."""
    return p.input_shape if p.pass_ == "fwd" else p.output_shape


def result_shape(p: Problem) -> tuple[int, ...]:
    """Shape of the tensor that a pass writes: the output, or the gradient for the input."""
    return p.output_shape if p.pass_ == "fwd" else p.input_shape


def positions(p: Problem, shuffle: Shuffle | None) -> Triple:
    """Results along D, H, W of a problem; with `shuffle` those of the layer without a stride, at the problem's size."""
    lead = (1,) * (3 - p.rank)
    d, h, w = lead + result_shape(p)[2:]
    return (d, h, w) if shuffle is None else shuffle.positions((d, h, w))


def any_size(p: Problem) -> Problem:
    """The layer at one size for all, so that its tilings and kernels are found again at the next size."""
    size = tuple(1024 + 2 * pad // s for pad, s in zip(p.padding, p.stride))
    return p.with_(batch=1, size=size, bias=False)


@lru_cache(maxsize=1024)
def gather_axes(p: Problem, unroll: Triple = (1, 1, 1)) -> tuple[Axis, Axis, Axis]:
    """The axes (D, H, W) of a problem's pass, with `unroll` consecutive ``q`` of each axis made sub-positions."""
    lead = 3 - p.rank
    axes = [Axis(1, 1, (((0, 0),),))] * lead
    if p.pass_ == "fwd":
        for phases, stride in zip(p.axis_phases, p.stride):
            taps: list[tuple[tuple[int, int], ...]] = [()] * stride  # by the first output; some have none
            for a in phases:
                taps[a.start] = tuple((k, a.first - off) for k, off in zip(a.taps, a.offsets))
            axes.append(Axis(stride, 1, tuple(taps)))
    else:
        for kernel, stride, padding, dilation in zip(p.kernel, p.stride, p.padding, p.dilation):
            axes.append(Axis(1, stride, (tuple((k, k * dilation - padding) for k in range(kernel)),)))
    full = []
    for axis, times in zip(axes, unroll):
        subs = tuple(tuple((k, off + axis.in_step * t) for k, off in sub) for t in range(times) for sub in axis.taps)
        full.append(Axis(axis.out_step * times, axis.in_step * times, subs))
    return full[0], full[1], full[2]


@dataclass(frozen=True)
class Bare:
    """Sub-positions without taps, whose outputs are the bias alone."""

    d: int
    h: int
    """The first of `rows`, which are neighbours."""
    w: int
    """The first of as many as a tile has; -1: all."""
    rows: int
    """Along H; 0: all."""


Entries = tuple[tuple[tuple[tuple[Triple, tuple[int, ...]], ...], ...], ...]


@dataclass(frozen=True, eq=False)
class Multiplied:
    """What a layer's M-groups multiply; hundreds of tilings share each of a dozen."""

    variants: tuple[tuple[tuple[tuple[int, int], ...], int], ...]
    bare: tuple[tuple[Bare, ...], ...]
    """Per variant the sub-positions without taps that its tiles store; empty where no variant has any."""
    blocks_of_w: tuple[int, ...]
    entries: Entries
    """In the order of their offsets."""
    counts: tuple[int, ...]
    """Entries of all blocks of each variant."""
    most: int
    """Of them."""
    total: int
    distinct: frozenset[int]
    lengths: frozenset[int]
    """Entries that a block may have, but none."""
    offsets: tuple[tuple[int, ...], ...]
    """Of each axis the offsets of all taps, in order."""


@lru_cache(maxsize=1024)
def multiplied(p: Problem, unroll: Triple, subs: int, w_subs: int) -> Multiplied:
    """NOTES: kept, planning a layer of 16 x 16 phases (768 -> 3 k16 s16) takes 0.7 s instead of 30 (on a slow core)."""
    axis_d, axis_h, axis_w = gather_axes(p, unroll)
    if axis_w.out_step % w_subs:
        raise Unfit("W sub-positions do not fill the tiles")
    kernel = (1,) * (3 - p.rank) + p.kernel

    def tapped(pair: tuple[int, int]) -> bool:
        return bool(axis_d.taps[pair[0]] and axis_h.taps[pair[1]])

    # Those without taps last, so that they share blocks with each other and nothing is multiplied for them.
    pairs = sorted(product(range(axis_d.out_step), range(axis_h.out_step)), key=lambda pair: not tapped(pair))
    sets = [tuple(pairs[i : i + subs]) for i in range(0, len(pairs), subs)]
    variants = tuple((s, u) for s in sets for u in range(0, axis_w.out_step, w_subs))
    bare: tuple[tuple[Bare, ...], ...] = ()
    if w_subs == axis_w.out_step or p.layout == "channels_last":
        kept = {v for v in variants if any(map(tapped, v[0])) and any(axis_w.taps[v[1] : v[1] + w_subs])}
        places = ((*pair, first_w) for s, first_w in variants if (s, first_w) not in kept for pair in s)
        runs = _bare(places, axis_h.out_step, axis_w.out_step // w_subs)
        variants = tuple(v for v in variants if v in kept)
        bare = _shared_out(runs, variants, axis_h.out_step, w_subs)
    if any(len(s) != subs for s, _ in variants):
        raise Unfit("sub-positions do not fill the blocks")
    blocks_of_w = tuple(range(w_subs))
    if w_subs == axis_w.out_step:
        full = [bool(taps) for taps in axis_w.taps]
        blocks_of_w = tuple(sum(full[:u]) if full[u] else -1 for u in range(len(full)))
    entries = []
    for s, first_u in variants:
        blocks = []
        for u, block in enumerate(blocks_of_w):
            if block < 0:
                continue
            found: dict[Triple, list[int]] = {}
            for i, (ud, uh) in enumerate(s):
                for (kd, od), (kh, oh), (kw, ow) in product(axis_d.taps[ud], axis_h.taps[uh], axis_w.taps[first_u + u]):
                    taps = found.setdefault((od, oh, ow), [-1] * subs)
                    taps[i] = (kd * kernel[1] + kh) * kernel[2] + kw
            blocks.append(tuple((offsets, tuple(taps)) for offsets, taps in sorted(found.items())))
        entries.append(tuple(blocks))
    counts = tuple(sum(len(b) for b in blocks) for blocks in entries)
    lengths = frozenset(len(b) for blocks in entries for b in blocks if b)
    every = {entry[0] for blocks in entries for block in blocks for entry in block}
    offsets = tuple(tuple(sorted({off[axis] for off in every})) or (0,) for axis in range(3))
    return Multiplied(
        variants,
        bare,
        blocks_of_w,
        tuple(entries),
        counts,
        max(counts),
        sum(counts),
        frozenset(counts),
        lengths,
        offsets,
    )


def _bare(places: Iterable[Triple], heights: int, widths: int) -> tuple[Bare, ...]:
    """Sub-positions (d, h, w) of ``heights`` along H and ``widths`` along W, as few as whole planes and rows allow."""
    planes: dict[int, dict[int, list[int]]] = {}
    for d, h, w in sorted(places):
        planes.setdefault(d, {}).setdefault(h, []).append(w)
    found = []
    for d, rows in planes.items():
        whole = {h for h, ws in rows.items() if len(ws) == widths}
        if len(whole) == heights:
            found.append(Bare(d, 0, -1, 0))
            continue
        firsts = sorted(h for h in whole if h - 1 not in whole)
        found += [Bare(d, h, -1, next(n for n in range(1, heights + 1) if h + n not in whole)) for h in firsts]
        found += [Bare(d, h, w, 1) for h, ws in rows.items() if h not in whole for w in ws]
    return tuple(found)


def _shared_out(
    runs: Sequence[Bare], variants: Sequence[tuple[tuple[tuple[int, int], ...], int]], heights: int, w_subs: int
) -> tuple[tuple[Bare, ...], ...]:
    """Runs by variant: rows go to the one whose row follows them in memory, so that what both have of a sector comes
    together, and what none follows to the one with the fewest. Empty without runs."""
    found: list[list[Bare]] = [[] for _ in variants]
    owners = {(*pair, w): i for i, (pairs, w) in enumerate(variants) for pair in pairs}
    left = []
    for run in runs:
        behind = (run.d, run.h, run.w + w_subs) if run.w >= 0 else (run.d, run.h + run.rows, 0)
        owner = owners.get(behind) if run.rows else None
        if owner is None:
            left.append(run)
        else:
            found[owner].append(run)
    loads = [(sum(run.rows for run in mine), i) for i, mine in enumerate(found)]
    heapify(loads)
    for run in left:
        load, i = loads[0]
        found[i].append(run)
        heapreplace(loads, (load + (run.rows or heights), i))
    return tuple(map(tuple, found)) if runs else ()


def table(values: Iterable[int]) -> str:
    """A macro's value that initialises an array of a kernel's."""
    return "{" + ",".join(str(v) for v in values) + "}"
