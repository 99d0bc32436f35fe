"""The cost model: what its terms add up to, and what its families' estimates keep to."""

from dataclasses import fields, replace

import pytest

from upconv.cuda.cost import Cost, Work, cost
from upconv.cuda.gpu import H200, RATES

WORK = Work(instructions=400.0, columns=400 * 128.0, waves=3, moved=1e6, steps=50, stages=4, lines=2e3, boxes=50)
"""Bound by matrix instructions."""


def test_matrix_instructions_bound_what_asks_for_little_else() -> None:
    found = cost(WORK, H200)
    tensor = 3 * (400 * (RATES.columns * 64 + RATES.instruction) + 50 * RATES.step) / H200.clock
    assert found.bound == "tensor cores" and found.tensor == pytest.approx(tensor)
    assert found.tensor + found.launch < found.seconds < 1.5 * found.tensor + found.launch


def test_narrow_instructions_take_the_least_of_their_kind() -> None:
    narrow = [replace(WORK, columns=400.0 * n, lines=0, boxes=0) for n in (8, 16)]
    assert cost(narrow[0], H200) == cost(narrow[1], H200)
    by_descriptor = [cost(replace(one, descriptors=True), H200).tensor for one in narrow]
    assert by_descriptor[0] == by_descriptor[1] > cost(narrow[0], H200).tensor


@pytest.mark.parametrize("field", [f.name for f in fields(Work) if f.type == "float"])
def test_more_of_anything_never_takes_less(field: str) -> None:
    for in_turn in (False, True):
        work = replace(WORK, in_turn=in_turn)
        more = replace(work, **{field: 10 * getattr(work, field) + 1e4})
        assert cost(more, H200).seconds >= cost(work, H200).seconds


def test_the_device_memory_is_a_floor() -> None:
    found = cost(replace(WORK, moved=1e10), H200)
    assert found.bound == "bytes" and found.dram == 1e10 / H200.bandwidth < found.seconds
    slower = cost(replace(WORK, moved=1e10), replace(H200, bandwidth=H200.bandwidth / 2))
    assert slower.dram == 2 * found.dram


def test_consumers_in_turn_hide_stores_but_the_last() -> None:
    stored = replace(WORK, waves=8, stored=5e3)
    in_turn, together = (cost(replace(stored, in_turn=turn), H200).seconds for turn in (True, False))
    assert in_turn < together
    alone = replace(stored, waves=1)
    assert cost(replace(alone, in_turn=True), H200).seconds >= cost(alone, H200).seconds


def test_a_short_ring_waits_for_copies() -> None:
    waiting = cost(replace(WORK, stages=1, steps=400), H200)
    assert waiting.bound == "latency" and waiting.seconds > cost(replace(WORK, steps=400), H200).seconds


def test_the_text_names_what_counts() -> None:
    found = Cost(1e-5, tensor=8e-6, store=2e-6, dram=1e-9)
    assert found.text == "tensor cores 8, stores 2" and found.bound == "tensor cores"
