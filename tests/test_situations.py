"""Situations from public reports (tests/situations): ours and PyTorch's layers do the same in each.

The table docs/situations.md is written from these and from runs' reports by benchmarks/situations.py.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import situations
from conftest import EVERY, diagonal, forced_plans, seeds
from situations import Lab, Unavailable, differences, judge
from situations.fuzz import draw
from standins import Kernels

ROOT = Path(__file__).resolve().parent.parent
TABLE = {s.name: s for s in situations.every()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*(weight_norm|Anomaly|autocast|lazy).*")
@pytest.mark.parametrize("name", TABLE)
def test_situation(name: str, device: str) -> None:
    found = TABLE[name]
    if device not in found.devices:
        pytest.skip(f"on {' and '.join(found.devices)} only")
    try:
        verdict = judge(found, device, EVERY)
    except Unavailable as missing:
        pytest.skip(f"needs {missing}")
    assert not verdict.lines, "\n".join(verdict.lines)
    assert verdict.reached or not found.ours or device != "cpu", "no engine of ours computed anything"


KERNELS = [s.name for s in TABLE.values() if s.ours and "cpu" in s.devices and s.kind not in ("processes", "observers")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*(weight_norm|Anomaly|autocast|lazy).*")
@pytest.mark.parametrize(("name", "way"), diagonal(KERNELS, situations.WAYS))
def test_situation_of_kernels(name: str, way: str, stand_ins: Kernels) -> None:
    """Planned as on a GPU, whose kernels are `standins`; plain convolutions too."""
    found = TABLE[name]
    wanted = situations.run(found, "stock", "cpu")
    assert stand_ins.ran() == []
    lines = differences(situations.run(found, way, "cpu"), wanted, found.tolerance)
    assert not lines, "\n".join(lines)
    assert stand_ins.ran()


def test_names_and_sources() -> None:
    assert len(TABLE) == len(situations.TABLE) >= 60  # no name twice
    for s in TABLE.values():
        assert re.fullmatch(r"https://\S+|[\w.-]+/[\w.-]+#\d+", s.source), s.source


def test_the_page_lists_every_situation(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "situations_page"
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "situations.py")
    assert spec is not None and spec.loader is not None
    program: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, program)
    spec.loader.exec_module(program)
    assert program.PAGE.read_text(encoding="utf-8") == program.page(), "run benchmarks/situations.py --table"


# --- random layers ---------------------------------------------------------------------------------------------------


def _differences(found: Any, wanted: Any) -> list[str]:
    return differences(found, wanted, 2e-4)


@pytest.mark.filterwarnings("ignore:.*complex.*")
@pytest.mark.parametrize("chunk", seeds(6, 60))
def test_random_layers(chunk: int, device: str) -> None:
    count = 50 if device == "cpu" else 10  # on a GPU each compiles kernels
    wrong = []
    for seed in range(chunk * count, (chunk + 1) * count):
        wanted = draw(seed, Lab("stock", device))
        lines = _differences(draw(seed, Lab("layers", device)), wanted)
        if device == "cpu":
            with forced_plans("any", "split"):
                lines += _differences(draw(seed, Lab("layers", device)), wanted)
        wrong += [f"seed {seed}: {line}" for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.filterwarnings("ignore:.*(complex|Using padding='same').*")
@pytest.mark.parametrize("plain", (False, True), ids=("transposed", "plain"))
def test_random_layers_of_kernels(plain: bool, stand_ins: Kernels) -> None:
    """But for the strides, which are another's on a GPU than on a CPU."""

    def drawn(seed: int, way: str) -> Any:
        found = draw(seed, Lab(way, "cpu"), plain)
        return tree_map(lambda t: t.contiguous() if isinstance(t, torch.Tensor) else t, found)

    wrong = []
    for seed in seeds(300, 6000):
        wrong += [f"seed {seed}: {line}" for line in _differences(drawn(seed, "accelerated"), drawn(seed, "stock"))]
    assert not wrong, "\n".join(wrong)
    assert set(stand_ins.ran()) == {"fwd", "grad-input", "grad-weight"}


@pytest.mark.filterwarnings("ignore:.*complex.*")
def test_random_layers_are_not_nearly_all_errors(device: str) -> None:
    """About half of the draws have values. A quarter of 100 is more than four standard deviations below."""
    drawn = [draw(seed, Lab("stock", device)) for seed in range(100)]
    assert sum(isinstance(one, list) and isinstance(one[1], torch.Tensor) for one in drawn) >= 25
