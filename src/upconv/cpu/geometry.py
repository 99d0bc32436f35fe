"""The geometry of the CPU engine, a dimension at a time: which outputs a correlation computes, and where they go."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from functools import cached_property

from upconv.problem import AxisPhase, Problem


class Axis:
    """One dimension of a correlation ``y[t] = sum_j w[j] x[start + t + j*step]``, ``t`` in ``range(count)``.

    oneDNN's fast kernels refuse a padding of the window's reach or more and fall back to im2col (docs/experiments.md),
    so outputs whose window misses the input altogether (``output_padding`` makes such) are not computed: ``live`` is
    the range of ``t`` that is, and the caller fills the others with the bias. Taps that lie further apart than the
    input is long may miss it for every output, though windows do not: oneDNN's bfloat16 kernels for AMX crash where
    there is none (a size of 1, taps 3 apart).
    """

    def __init__(self, size: int, taps: int, start: int, count: int, step: int) -> None:
        self.step = step
        reach = (taps - 1) * step
        hit = [(max(0, -start - at), min(count, size - start - at)) for at in range(0, reach + 1, step)]
        hit = [(low, high) for low, high in hit if low < high]  # by a tap each
        low = min((low for low, _ in hit), default=max(0, -start - reach))
        self.live = slice(low, max((high for _, high in hit), default=low))
        first, n = start + low, self.live.stop - low
        # Unequal padding is computed with the larger on both sides and the result narrowed, unless that wastes more
        # than an eighth of the outputs: then the input is narrowed, at the price of PyTorch's copy of that view.
        self.crop = slice(0, size)
        left, right = -first, first + n + reach - size
        if min(left, right) < 0 and size + 2 * max(left, right, 0) - reach - n > (n >> 3):
            self.crop = slice(max(first, 0), min(first + n + reach, size))
            left, right = self.crop.start - first, first + n + reach - self.crop.stop
        self.pad = max(left, right, 0)
        self.keep = slice(self.pad - left, self.pad - left + n)
        # Outputs computed, those to keep among them.
        self.made = self.crop.stop - self.crop.start + 2 * self.pad - reach
        self.cropped = self.crop != slice(0, size)
        self.whole = self.live == slice(0, count)
        self.dead = self.live.start == self.live.stop


def tap_slice(axis: AxisPhase, kernel: int) -> slice:
    """The phase's taps in a reversed kernel dimension, in rising input order."""
    step = axis.taps[1] - axis.taps[0] if len(axis.taps) > 1 else 1
    first = kernel - 1 - axis.taps[-1]
    return slice(first, first + (len(axis.taps) - 1) * step + 1, step)


@dataclass(frozen=True)
class Piece:
    """Results that go to outputs of one view: ``q`` in a range, for residues in a range."""

    start: int
    """The first output."""
    results: slice
    """Of the correlation's live results."""
    residues: slice
    """Of `Window.residues`."""


class Window:
    """One dimension of `shuffle`: the common window of input offsets that serves all phases, and where its results go.

    The window's result at ``q`` holds, for every ``r`` in ``residues``, the output ``o = q * stride + r - padding``.
    """

    def __init__(self, phases: tuple[AxisPhase, ...], size: int, stride: int, padding: int, out: int) -> None:
        used = [a for a in phases if a.count] or [phases[0]]
        offsets = sorted({o for a in used for o in a.offsets})
        self.step = math.gcd(*(b - a for a, b in zip(offsets, offsets[1:]))) or 1
        self.high = offsets[-1]
        self.size = (self.high - offsets[0]) // self.step + 1
        of = [a.residue for a in used]
        self.residues = range(of[0], of[-1] + 1, math.gcd(*(b - a for a, b in zip(of, of[1:]))) or 1)
        self.stride, self.padding, self.out, self.input = stride, padding, out, size
        self.first = min(a.first for a in used)
        self.count = max(a.first + a.count for a in used) - self.first

    @cached_property
    def axis(self) -> Axis:
        """The window's correlation; listing its taps takes long where the zeros among them are many."""
        return Axis(self.input, self.size, self.first - self.high, self.count, self.step)

    def part(self, rows: range) -> Window:
        """The window for the results in a range alone, of those that `count` counts."""
        part = copy(self)
        part.__dict__.pop("axis", None)
        part.first, part.count = self.first + rows.start, len(rows)
        return part

    @property
    def covers_all(self) -> bool:
        """Whether every output is some result's."""
        return self.axis.whole and len(self.residues) == self.stride

    def place(self, axis: AxisPhase) -> slice:
        """Where the phase's taps, last first, go in the window."""
        at = [(self.high - o) // self.step for o in reversed(axis.offsets)]
        return slice(at[0], at[-1] + 1, at[1] - at[0] if len(at) > 1 else 1)

    def pieces(self) -> list[Piece]:
        """The outputs in up to three pieces: where all residues have outputs, and at either end the ``q`` where not."""
        low, high = self.first + self.axis.live.start, self.first + self.axis.live.stop  # the q's computed
        begin = max(low, -((self.residues[0] - self.padding) // self.stride))
        end = min(high, (self.out - 1 + self.padding - self.residues[-1]) // self.stride + 1)
        ends = [range(q, q + 1) for q in range(low, high) if not begin <= q < end]
        pieces = []
        for qs in (range(begin, end), *ends):
            inside = [
                i for i, r in enumerate(self.residues) if qs and 0 <= qs[0] * self.stride + r - self.padding < self.out
            ]
            if inside:
                start = qs[0] * self.stride + self.residues[inside[0]] - self.padding
                results = slice(qs.start - low, qs.stop - low)
                pieces.append(Piece(start, results, slice(inside[0], inside[-1] + 1)))
        return pieces


def windows(p: Problem) -> list[Window]:
    """The windows of all dimensions; every dimension must have an output."""
    return [Window(*axis) for axis in zip(p.axis_phases, p.size, p.stride, p.padding, p.out_size)]


def shuffle_blowup(p: Problem) -> float:
    """Multiplications of `shuffle` over the useful ones: what the zeros in its common window cost."""
    return math.prod(w.size * len(w.residues) for w in windows(p)) / p.taps
