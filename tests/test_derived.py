"""Properties of frozen descriptions: found once, kept where a description varies by fields that they do not need."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import pytest
import torch

from upconv.cuda import gather_search, sweep, wgrad
from upconv.cuda.axes import any_size
from upconv.cuda.gpu import A100, H200
from upconv.derived import derived, derived_from, derived_without, needs, settled, varied
from upconv.problem import Problem

found: list[str] = []


@dataclass(frozen=True)
class Box:
    width: int
    height: int
    depth: int = 1

    @derived
    def volume(self) -> int:
        found.append("volume")
        return self.width * self.height * self.depth

    @derived_from("width", "height")
    def area(self) -> int:
        found.append("area")
        return self.width * self.height

    @derived_without("height")
    def floor(self) -> int:
        return self.width * self.depth


@dataclass(frozen=True)
class Padded(Box):
    by: int = 2

    @derived
    def area(self) -> int:
        return (self.width + self.by) * (self.height + self.by)


def test_a_property_is_found_once_for_each_object() -> None:
    found.clear()
    box = Box(2, 3, 4)
    assert [box.volume, box.volume, Box(2, 3, 5).volume] == [24, 24, 30]
    assert found == ["volume", "volume"]
    assert isinstance(Box.volume, derived) and Box.volume.__doc__ is None


def test_a_property_stays_where_its_fields_do() -> None:
    found.clear()
    box = settled(Box(2, 3, 4), "width", "height")
    assert found == ["area"]  # which alone follows from these
    deeper = varied(box, depth=5)
    assert (deeper.area, deeper.volume, deeper.floor) == (6, 30, 10) and found == ["area", "volume"]
    assert varied(box, width=5).area == 15
    assert varied(varied(box, depth=9), height=1).floor == 18


def test_the_last_definition_of_a_property_counts() -> None:
    padded = Padded(2, 3)
    assert padded.area == 20 and varied(padded, by=0).area == 6
    assert "area" not in needs(Padded) and needs(Padded)["floor"] == {"width", "depth", "by"}


def test_what_is_varied_is_what_replace_makes() -> None:
    box = Box(2, 3)
    assert varied(box, depth=7) == replace(box, depth=7) and hash(varied(box, depth=7)) == hash(replace(box, depth=7))
    assert varied(box) == box and varied(box) is not box
    with pytest.raises(TypeError, match="Box has no field 'breadth'"):
        varied(box, breadth=1)


LAYERS = (
    Problem.make(4, 64, 96, (40, 72), 4, 2, 1, bias=True),
    Problem.make(4, 48, 30, (40, 71), (3, 5), (2, 3), 1, 1, 2),
    Problem.make(8, 128, 64, (500,), 16, 8, 4),
    Problem.make(2, 32, 24, (12, 20, 40), 3, 1, 1),
)


def searched(seed: int) -> list[Any]:
    """Tilings of the families that search by `varied`, of a layer drawn with its precision, layout and pass."""
    rng = random.Random(seed)
    dtype, precision = rng.choice(((torch.float32, "tf32"), (torch.bfloat16, "bf16"), (torch.float32, "ieee")))
    layout = rng.choice(("nchw", "channels_last"))
    p = rng.choice(LAYERS).with_(dtype=dtype, precision=precision, layout=layout)
    gpu = H200 if rng.random() < 0.8 else A100
    towards = p.with_(pass_=rng.choice(("fwd", "grad-input")))
    every = [list(islice(gather_search.candidates(any_size(towards), gpu), 400))]
    of_weight = p.with_(pass_="grad-weight", bias=False)
    every.append(list(islice(wgrad.candidates(of_weight, gpu, True, rng.random() < 0.5, lined=p.rank == 1), 4000)))
    if p.rank == 3 and not isinstance(sweep.choose(towards, gpu), str):
        every.append(list(sweep.candidates(towards, gpu)))
    return [t for some in every for t in rng.sample(some, min(len(some), 12))]


def values(t: Any, names: list[str]) -> dict[str, Any]:
    """Of properties what they are, or the kind of error by which they say that this tiling has none."""
    result: dict[str, Any] = {}
    for name in names:
        try:
            result[name] = getattr(t, name)
        except Exception as error:
            result[name] = type(error)
    return result


@pytest.mark.parametrize("seed", range(12))
def test_kept_properties_are_what_they_would_be_anew(seed: int) -> None:
    """Fields take the values that they have in other tilings of the search, one at a time and several."""
    tilings, rng = searched(seed), random.Random(seed)
    kept = 0
    for t in tilings:
        names = list(needs(type(t)))
        assert names
        for _ in range(6):
            others = [other for other in tilings if type(other) is type(t)]
            drawn = rng.sample([field.name for field in fields(t)], rng.choice((1, 1, 2, 4)))
            changes = {name: getattr(rng.choice(others), name) for name in drawn}
            values(t, names)
            made, anew = varied(t, **changes), replace(t, **changes)
            kept += len(vars(made).keys() & set(names))
            assert values(made, names) == values(anew, names), (t, changes)
    assert kept > 10 * len(tilings)
