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

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from upconv.cuda.gemm.shuffle import Shuffle
from upconv.derived import derived
from upconv.problem import Problem, Triple, triple

MOST_W_SUBS = 64
"""W sub-positions of a tile: the epilogue's code grows with them."""
MOST_CONSTANTS = 65536
"""Bytes of constant memory that a kernel has."""
# Of them variants, and runs of sub-positions without taps, take 24 and 8 at least.
_MOST_PHASES, _MOST_BARE = MOST_CONSTANTS // 24, MOST_CONSTANTS // 8


class Unfit(ValueError):
    """A tiling that the kernel cannot run; the message says why, in a sentence."""


Taps = tuple[tuple[int, int], ...]
"""(kernel index, offset) pairs of a sub-position."""


@dataclass(frozen=True)
class Axis:
    """One axis in gather form."""

    out_step: int
    in_step: int
    taps: tuple[tuple[int, Taps], ...]
    """The sub-positions that have taps, in order, each with its own: never more than the kernel has."""

    @derived
    def _by_sub(self) -> dict[int, Taps]:
        return dict(self.taps)

    def at(self, sub: int) -> Taps:
        """The taps of a sub-position; none where it has none."""
        return self._by_sub.get(sub, ())


def source_shape(p: Problem) -> tuple[int, ...]:
    """Shape of the tensor that a pass gathers from: the input, or of the gradient for it the output's gradient."""
    return p.input_shape if p.pass_ == "fwd" else p.output_shape


def result_shape(p: Problem) -> tuple[int, ...]:
    """Shape of the tensor that a pass writes: the output, or the gradient for the input."""
    return p.output_shape if p.pass_ == "fwd" else p.input_shape


def positions(p: Problem, shuffle: Shuffle | None) -> Triple:
    """Results along D, H, W of a problem; with `shuffle` those of the layer without a stride, at the problem's size."""
    found = triple(result_shape(p)[2:])
    return found if shuffle is None else shuffle.positions(found)


def any_size(p: Problem) -> Problem:
    """The layer at one size for all, so that its tilings and kernels are found again at the next size."""
    size = tuple(1024 + 2 * pad // s for pad, s in zip(p.padding, p.stride))
    return p.with_(batch=1, size=size, bias=False)


@lru_cache(maxsize=1024)
def gather_axes(p: Problem, unroll: Triple = (1, 1, 1)) -> tuple[Axis, Axis, Axis]:
    """The axes (D, H, W) of a problem's pass, with `unroll` consecutive ``q`` of each axis made sub-positions."""
    axes = [Axis(1, 1, ((0, ((0, 0),)),))] * (3 - p.rank)
    for kernel, stride, padding, dilation in zip(p.kernel, p.stride, p.padding, p.dilation):
        places = [k * dilation - padding for k in range(kernel)]
        if p.pass_ == "fwd":
            found: dict[int, list[tuple[int, int]]] = {}
            for k, place in enumerate(places):
                found.setdefault(place % stride, []).append((k, -(place // stride)))
            axes.append(Axis(stride, 1, tuple((sub, tuple(found[sub])) for sub in sorted(found))))
        else:
            axes.append(Axis(1, stride, ((0, tuple(enumerate(places))),)))
    d, h, w = map(_unrolled, axes, unroll)
    return d, h, w


def _unrolled(axis: Axis, times: int) -> Axis:
    """An axis with so many consecutive ``q`` as sub-positions."""
    subs = tuple(
        (t * axis.out_step + sub, tuple((k, offset + axis.in_step * t) for k, offset in taps))
        for t in range(times)
        for sub, taps in axis.taps
    )
    return Axis(axis.out_step * times, axis.in_step * times, subs)


@dataclass(frozen=True)
class Bare:
    """Sub-positions without taps, whose outputs are the bias alone."""

    d: int
    h: int
    """The first of `rows`, which are neighbours."""
    rows: int
    """Along H; 0: all."""


Entries = tuple[tuple[tuple[tuple[Triple, tuple[int, ...]], ...], ...], ...]


Pairs = tuple[tuple[int, int], ...]
"""(D, H) sub-positions that share a block's rows."""


@dataclass(frozen=True, eq=False)
class Multiplied:
    """What a layer's M-groups multiply; hundreds of tilings share each of a dozen."""

    axes: tuple[Axis, Axis, Axis]
    kernel: Triple
    variants: tuple[tuple[Pairs, int], ...]
    bare: tuple[Bare, ...]
    """Sub-positions without taps, of which each variant's tiles store a share."""
    blocks_of_w: tuple[int, ...]
    own_rows: bool
    """Whether a variant's tiles have the rows that its own taps read, and not those of all taps."""

    @derived
    def entries(self) -> Entries:
        """In the order of their offsets, which count from the variant's `origins`."""
        return tuple(
            tuple(
                self._block(pairs, origin, self.axes[2].at(first + u))
                for u, block in enumerate(self.blocks_of_w)
                if block >= 0
            )
            for (pairs, first), origin in zip(self.variants, self.origins)
        )

    def _block(self, pairs: Pairs, origin: tuple[int, int], taps: Taps) -> tuple[tuple[Triple, tuple[int, ...]], ...]:
        """The entries of a block, whose taps along W are these."""
        width, of_w = self.kernel[2], sorted((offset, k) for k, offset in taps)
        return tuple(
            ((d - origin[0], h - origin[1], w), tuple(tap * width + k if tap >= 0 else -1 for tap in of_rows))
            for (d, h), of_rows in self._rows[pairs]
            for w, k in of_w
        )

    @derived
    def origins(self) -> tuple[tuple[int, int], ...]:
        """Per variant the (D, H) offsets that its tiles begin at; zeros where those of all variants are the same."""
        found = {
            pairs: (min((d for (d, _), _ in rows), default=0), min((h for (_, h), _ in rows), default=0))
            for pairs, rows in self._rows.items()
        }
        own = self.own_rows and len(set(found.values())) > 1
        return tuple(found[pairs] if own else (0, 0) for pairs, _ in self.variants)

    @derived
    def _rows(self) -> dict[Pairs, list[tuple[tuple[int, int], list[int]]]]:
        """The (D, H) offsets that sub-positions read, with each one's tap of D and H there, -1 for none."""
        every: dict[Pairs, list[tuple[tuple[int, int], list[int]]]] = {}
        for pairs in dict.fromkeys(pairs for pairs, _ in self.variants):
            found: dict[tuple[int, int], list[int]] = {}
            for i, (u, v) in enumerate(pairs):
                for (kd, d), (kh, h) in product(self.axes[0].at(u), self.axes[1].at(v)):
                    found.setdefault((d, h), [-1] * len(pairs))[i] = kd * self.kernel[1] + kh
            every[pairs] = sorted(found.items())
        return every

    @derived
    def _blocks(self) -> tuple[tuple[int, ...], ...]:
        """Per variant the entries of each block."""
        taps = [u for u, block in enumerate(self.blocks_of_w) if block >= 0]
        firsts = dict.fromkeys(first for _, first in self.variants)
        of_w = {first: [len(self.axes[2].at(first + u)) for u in taps] for first in firsts}
        return tuple(tuple(len(self._rows[pairs]) * n for n in of_w[first]) for pairs, first in self.variants)

    @derived
    def counts(self) -> tuple[int, ...]:
        """Entries of all blocks of each variant."""
        return tuple(map(sum, self._blocks))

    @derived
    def most(self) -> int:
        """Of `counts`."""
        return max(self.counts)

    @derived
    def total(self) -> int:
        return sum(self.counts)

    @derived
    def distinct(self) -> frozenset[int]:
        return frozenset(self.counts)

    @derived
    def lengths(self) -> frozenset[int]:
        """Entries that a block may have, but none."""
        return frozenset(n for blocks in self._blocks for n in blocks if n)

    @derived
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Of each axis the offsets of all taps, in order; of D and H as `entries` have them."""
        d, h, w = (sorted({offset for _, taps in axis.taps for _, offset in taps}) for axis in self.axes)
        if any(map(any, self.origins)):
            found = dict(zip((pairs for pairs, _ in self.variants), self.origins))
            rows = [(d - first[0], h - first[1]) for pairs, first in found.items() for (d, h), _ in self._rows[pairs]]
            d, h = (sorted(set(of_axis)) for of_axis in zip(*rows))
        return tuple(d), tuple(h), tuple(w)


Division = tuple[Problem, Triple, int, int, bool]
"""What `multiplied` is asked for."""


@lru_cache(maxsize=1024)
def multiplied(p: Problem, unroll: Triple, subs: int, w_subs: int, own_rows: bool) -> Multiplied:
    """What is multiplied by one division of the taps. ``own_rows``: as `Multiplied` says.

    Raises:
        Unfit: sub-positions do not fill tiles or blocks, or the kernel's tables have no room for all of them.
    """
    axes = axis_d, axis_h, axis_w = gather_axes(p, unroll)
    if axis_w.out_step % w_subs:
        raise Unfit("W sub-positions do not fill the tiles")
    if w_subs > MOST_W_SUBS:
        raise Unfit(f"{w_subs} sub-positions along W are more than the {MOST_W_SUBS} that the epilogue is unrolled for")
    firsts = range(0, axis_w.out_step, w_subs)
    # Rows without taps are stored with others' tiles, but in NCHW only with those that have all along W.
    stores = w_subs == axis_w.out_step or p.layout == "channels_last"
    if stores and len({sub // w_subs for sub, _ in axis_w.taps}) < len(firsts):
        raise Unfit("channels_last tiles of some sub-positions along W would have no tap")
    depths, rows = ([sub for sub, _ in axis.taps] if stores else range(axis.out_step) for axis in axes[:2])
    held = len(depths) * len(rows)
    if held * len(firsts) > subs * _MOST_PHASES:
        raise Unfit(f"the kernel's tables have no room for more than {_MOST_PHASES} phases")
    if held % subs:
        raise Unfit("sub-positions do not fill the blocks")
    # Those without taps come last, so that they share blocks with each other and nothing is multiplied for them.
    pairs = sorted(product(depths, rows), key=lambda pair: not (axis_d.at(pair[0]) and axis_h.at(pair[1])))
    variants = tuple((tuple(pairs[i : i + subs]), u) for i in range(0, held, subs) for u in firsts)
    blocks_of_w = tuple(range(w_subs))
    if w_subs == axis_w.out_step:
        numbers = {sub: i for i, (sub, _) in enumerate(axis_w.taps)}
        blocks_of_w = tuple(numbers.get(u, -1) for u in range(w_subs))
    bare = _bare(axis_d, axis_h) if stores else ()
    return Multiplied(axes, triple(p.kernel), variants, bare, blocks_of_w, own_rows)


def _bare(axis_d: Axis, axis_h: Axis) -> tuple[Bare, ...]:
    """The (D, H) sub-positions without taps, as few as whole planes and rows allow.

    Raises:
        Unfit: they are more than the kernel's tables have room for.
    """
    depths, rows = ([sub for sub, _ in axis.taps] for axis in (axis_d, axis_h))
    ends = zip((-1, *rows), (*rows, axis_h.out_step))
    gaps = [(before + 1, after - before - 1) for before, after in ends if after - before > 1]
    if axis_d.out_step + len(depths) * (len(gaps) - 1) > _MOST_BARE:
        raise Unfit(f"the kernel's tables have no room for more than {_MOST_BARE} runs of phases without taps")
    planes = [Bare(d, 0, 0) for d in range(axis_d.out_step) if not axis_d.at(d)]
    return (*planes, *(Bare(d, h, count) for d, (h, count) in product(depths, gaps)))
