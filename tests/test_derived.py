"""Properties of frozen descriptions: found once, kept where a description varies by fields that they do not need."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import islice, product
from typing import Any

import pytest
import torch

from drawn import fitting
from upconv.cuda.axes import any_size
from upconv.cuda.gemm import gather_search
from upconv.cuda.gemm.shuffle import shuffled
from upconv.cuda.gpu import A100, H200
from upconv.cuda.pixels.sweep import Sweep
from upconv.cuda.wgrad import wgrad_search
from upconv.derived import needs, varied
from upconv.problem import Problem

LAYERS = (
    Problem.make(4, 64, 96, (40, 72), 4, 2, 1, bias=True),
    Problem.make(4, 48, 30, (40, 71), (3, 5), (2, 3), 1, 1, 2),
    Problem.make(8, 128, 64, (500,), 16, 8, 4),
    Problem.make(2, 32, 24, (12, 20, 40), 3, 1, 1),
    Problem.make(16, 64, 64, (8, 8), 4, 2, 1),
    Problem.make(16, 64, 2, (16, 16), 4, 2, 1),
)


def searched(seed: int) -> list[Any]:
    """Tilings of the families that search by `varied`, of a layer with its precision, layout and pass by turns."""
    rng = random.Random(seed)
    dtype, precision = ((torch.float32, "tf32"), (torch.bfloat16, "bf16"), (torch.float32, "ieee"))[seed % 3]
    layout = rng.choice(("nchw", "channels_last"))
    p = LAYERS[seed % len(LAYERS)].with_(dtype=dtype, precision=precision, layout=layout)
    gpu = H200 if rng.random() < 0.8 else A100
    towards = p.with_(pass_=rng.choice(("fwd", "grad-input")))
    layer, size = any_size(towards), towards.size
    found = [gather_search.candidates(layer, gpu, classes=classes) for classes in ((1, 1), (2, 2), None)]
    found += [gather_search.candidates(layer, gpu, size=size, beside=beside) for beside in (False, True)]
    found.append(gather_search.candidates(layer, gpu, drained=True))
    if (shuffle := shuffled(layer)) is not None:
        found.append(gather_search.candidates(layer, gpu, shuffle=shuffle))
    of_weight = p.with_(pass_="grad-weight", bias=False)
    odd = of_weight.with_(size=(*p.size[:-1], p.size[-1] + 1))
    found += [wgrad_search.candidates(q, gpu, general) for q, general in product((of_weight, odd), (False, True))]
    found += [fitting(q, gpu) for q in (towards, of_weight)]
    if Sweep.refusal(towards, gpu) is None:
        found.append(Sweep.candidates(towards, gpu))
    drawn = [list(islice(some, rng.randrange(40), 4000, 37)) for some in found]
    return [t for some in drawn for t in rng.sample(some, min(len(some), 8))]


def values(t: Any, names: Iterable[str]) -> dict[str, Any]:
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
    for t in rng.sample(tilings, min(len(tilings), 24)):
        names = list(needs(type(t)))
        assert names
        others = [other for other in tilings if type(other) is type(t)]
        for _ in range(6):
            drawn = rng.sample([field.name for field in fields(t)], rng.choice((1, 1, 2, 4)))
            changes = {name: getattr(rng.choice(others), name) for name in drawn}
            values(t, names)
            made, anew = varied(t, **changes), replace(t, **changes)
            kept += len(vars(made).keys() & set(names))
            assert values(made, names) == values(anew, names), (t, changes)
    assert kept > 100
