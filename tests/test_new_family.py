"""A family that is added by the steps of docs/design.md passes what all families do."""

from __future__ import annotations

import random
import sys

import pytest

import pointwise
from conftest import assert_sentence, needs_gxx
from drawn import DTYPES
from emulator import Emulator
from results import assert_computes
from test_families import check_choice, problems
from upconv import planner
from upconv.cuda import families
from upconv.cuda.gpu import H200
from upconv.problem import Precision, Problem

PRECISIONS: tuple[Precision, ...] = ("ieee", "fp16", "bf16", "fp64")


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of `cuda/families.py`."""
    monkeypatch.setitem(sys.modules, "upconv.cuda.pointwise", pointwise)
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, "pointwise": "pointwise"})


def layers(precision: Precision) -> list[Problem]:
    """Random ones of one tap."""
    rng, found = random.Random(precision), []
    for rank in (1, 2, 3) * 2:
        size = tuple(rng.randint(1, 12) for _ in range(rank))
        p = Problem.make(
            rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 9), size, 1, bias=rng.random() < 0.5,
            dtype=DTYPES[precision], precision=precision,
        )  # fmt: skip
        found.append(p)
    return found


@needs_gxx
@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_computes_what_it_answers(precision: Precision, emulator: Emulator) -> None:
    for seed, p in enumerate(layers(precision)):
        choice = families.choose(p, H200)["pointwise"]
        check_choice("pointwise", choice, p, H200)
        assert_computes(choice, emulator, seed)


@pytest.mark.parametrize("seed", range(3))
def test_it_refuses_other_layers_in_a_sentence(seed: int) -> None:
    for p, gpu in problems(seed, 10):
        if p.pass_ == "fwd" and (p.taps > 1 or p.groups > 1 or p.layout == "channels_last"):
            answer = families.choose(p, gpu)["pointwise"]
            assert isinstance(answer, str)
            assert_sentence(answer)


def test_the_planner_takes_it_where_it_expects_less_time() -> None:
    taken = 0
    for p in layers("ieee"):
        plan, found = planner.plan(p, planner.Device("cuda", gpu=H200)), families.choose(p, H200)
        fastest = min((one for one in found.values() if not isinstance(one, str)), key=lambda one: one.seconds)
        assert plan.selection("fwd").choice == fastest
        taken += fastest.family == "pointwise"
    assert taken
