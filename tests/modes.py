"""Modes of a kernel, and the few cases of random layers that together have them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from results import Way

SEEDS = range(2000)


@dataclass(frozen=True)
class Case:
    """A choice, and how it is called."""

    choice: Any
    way: Way
    work: float
    """Products of its tiles."""


OfTiling = dict[str, Callable[[Any], bool]]
OfCase = dict[str, Callable[[Case], bool]]


def fewest(layers: Iterable[Iterable[Case]], modes: Mapping[str, Callable[[Case], bool]]) -> list[Case]:
    """Few cases that together have every mode, of the first layers that do.

    That is the cheapest of those with the most modes that none before has, in turn.
    """
    have, left = [], set(modes)
    for layer in layers:
        if not left:
            break
        new = [(case, {name for name, fits in modes.items() if fits(case)}) for case in layer]
        have += new
        left -= {name for _, own in new for name in own}
    assert not left, f"no case has {sorted(left)}"
    found, left = [], set(modes)
    while left:
        case, own = max(have, key=lambda one: len(one[1] & left) / (1 + one[0].work / 5e7))
        found.append(case)
        left -= own
    return found


def few(cases: Callable[[int], Iterable[Case]], first: Iterable[int], modes: OfCase) -> list[Case]:
    """Those of the first seeds, and where these do not have all modes, of others."""
    return fewest((cases(seed) for seed in chain(first, SEEDS)), modes)


def having(label: str, **values: Iterable[Any]) -> OfTiling:
    """That properties of a tiling have these values; ``label`` is told name and value."""
    return {
        label.format(name=name, value=value): lambda t, name=name, value=value: getattr(t, name) == value
        for name, every in values.items()
        for value in every
    }


def where(fits: Callable[[Any], bool], modes: OfTiling) -> OfTiling:
    """Modes of tilings of a kind."""
    return {name: lambda t, one=one: fits(t) and one(t) for name, one in modes.items()}


def of_cases(tables: Mapping[str, tuple[OfTiling, Callable[[Any], bool]]]) -> OfCase:
    """Modes of tilings as modes of cases: by the head of their names, with the kind of tilings that has them."""
    return {
        head + name: lambda case, one=one: one(case.choice.tiling)
        for head, (table, fits) in tables.items()
        for name, one in where(fits, table).items()
    }
