"""The program that has compute-sanitizer look at the kernels: what it changes in their sources, runs and tells."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from upconv.cuda.compile import jit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import racecheck


@pytest.mark.parametrize("name", list(racecheck.EVERY_LANE))
def test_every_arrival_of_one_lane_is_made_by_all(name: str) -> None:
    text = jit.instance(name, {}, [])  # with its includes
    changed = racecheck.every_lane(name, text)
    by_one = r"(lane|threadIdx\.x & 31\)) == 0[^;{]*\) (barrier_arrive|release)\("
    assert re.search(by_one, text) and not re.search(by_one, changed)
    for arrival in ("barrier_arrive(", "release("):
        assert changed.count(arrival) == text.count(arrival)
    with pytest.raises(ValueError, match="must have"):
        racecheck.every_lane(name, changed)
