"""Modes of a kernel, and the few cases of random layers that together have them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from drawn import covering
from results import Way

SEEDS = range(2000)


@dataclass(frozen=True)
class Case:
    """A choice, and how it is called."""

    choice: Any
    way: Way
    work: float
    """Products of its tiles."""


Aspects = dict[str, Callable[[Any], Any]]
"""In what tilings, or cases, differ. Each value that an aspect takes is a mode, but for None and False.

A set of values is several modes.
"""


def only(fits: Callable[[Any], bool], aspects: Aspects) -> Aspects:
    """Aspects that some of the tilings have."""
    return {name: lambda t, one=one: one(t) if fits(t) else None for name, one in aspects.items()}


def of_cases(aspects: Aspects) -> Aspects:
    """Aspects of tilings as such of cases."""
    return {name: lambda case, one=one: one(case.choice.tiling) for name, one in aspects.items()}


def modes(case: Case, aspects: Aspects) -> set[tuple[str, Any]]:
    """What a case is an example of."""
    found = set()
    for name, of in aspects.items():
        values = of(case)
        found |= {(name, value) for value in (values if isinstance(values, set) else {values})}
    return {(name, value) for name, value in found if value is not None and value is not False}


@dataclass(frozen=True)
class Few:
    """Few cases that together have all modes of some layers."""

    cases: list[Case]
    others: list[int]
    """Seeds of layers that had to be drawn, as those that were named had too few modes."""


def few(cases: Callable[[int], Iterable[Case]], aspects: Aspects, count: int, first: Sequence[int]) -> Few:
    """Few cases that together have so many modes at least, and all that the layers of the first seeds have.

    Where the first seeds' layers have too few modes others are drawn.
    """
    have: list[tuple[Case, set[tuple[str, Any]], float]] = []
    left, others = set[tuple[str, Any]](), list[int]()
    seeds = set(first)
    for seed in chain(first, SEEDS):
        if not seeds and len(left) >= count:
            break
        seeds.discard(seed)
        new = [(case, modes(case, aspects), case.work / 1e7) for case in cases(seed)]
        found = left.union(*(own for _, own, _ in new))
        if seed not in first and found > left:
            others.append(seed)
        have += new
        left = found
    assert len(left) >= count, f"{len(left)} modes are left: {sorted(map(str, left))}"
    return Few(covering(have, left), others)
