"""Programs of benchmarks that look at kernels: which rows of two checkouts are alike, what a sanitizer is given."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import printed
from upconv.bench.timing import operands
from upconv.cuda.compile import jit
from upconv.problem import Problem

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import checkouts  # noqa: E402
import racecheck  # noqa: E402

SOURCE = """
__constant__ const int TABLE[] = {%s};
extern "C" __global__ void add(int* y) { y[threadIdx.x] += TABLE[threadIdx.x] * 3; }  // %s
extern "C" __global__ void other(int* y) { *y = %s; }
"""


def of(table: str, comment: str, value: str) -> set[str]:
    return set(checkouts.sections(jit.cubin(SOURCE % (table, comment, value), "90a", "test")))


def test_code_and_constants_count_and_text_does_not() -> None:
    first = of("1,2,3", "one", "5")
    assert of("1,2,3", "two", "2 + 3") == first
    changed, tables = first - of("1,2,3", "one", "6"), first - of("1,2,4", "one", "5")
    assert [line.split()[0] for line in changed] == [".text.other"]
    assert [line.split()[0] for line in tables] == [".nv.constant3"]
    with pytest.raises(ValueError, match="64-bit little-endian ELF"):
        checkouts.sections(b"PTX")


def test_a_checkout_is_the_same_as_itself(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    given = ["--plan", str(path), "--codes", "--reports", "tf32", "--cases", "dcganO,bil21"]
    printed(checkouts.__file__, ROOT, *given)
    found = json.loads(path.read_text())
    assert [one["row"] for one in found] == ["tf32 dcganO fwd", "field-tf32 bil21 fwd"]
    assert not any(one["time"] for one in found)


def test_each_side_computes_its_own_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns, also of gradients, whose forward is made ahead: a side that finds the other's forward is PyTorch's."""
    monkeypatch.syspath_prepend(str(tmp_path))
    sides = [checkouts.Checkout(ROOT, name, tmp_path) for name in ("one_side", "other_side")]
    called: list[str] = []
    for side in sides:
        module = side("modules")
        real = module.conv_transpose

        def recorded(*given: Any, name: str = side.name, real: Any = real) -> Any:
            called.append(name)
            return real(*given)

        monkeypatch.setattr(module, "conv_transpose", recorded)
    for base, forward in checkouts._STOCK.items():
        monkeypatch.setattr(base, "forward", forward)
    p = Problem.make(2, 4, 4, (6, 6), 3, 2)
    for pass_, calls in (("fwd", 4), ("step", 4), ("grad-input", 2)):
        q = p.with_(pass_=pass_)
        works = [side.work(q, operands(q, torch.device("cpu"), 0)) for side in sides]
        for run in (*works, *reversed(works)):
            run()
        assert sorted(called) == sorted([side.name for side in sides] * (calls // 2)), pass_
        called.clear()


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
