"""Planning a pass takes a bounded time: searches look at few tilings whatever a layer's strides, kernel and image are,
and their bounds leave out no tiling that could be the best."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch

import conftest
from drawn import fitting
from upconv import planner
from upconv.bench.suites import SUITES
from upconv.cuda.compile import jit
from upconv.cuda.direct import costs
from upconv.cuda.gemm import gather, gather_search, tiling
from upconv.cuda.gemm.gather_constants import constants
from upconv.cuda.gpu import A100, H200, Gpu
from upconv.cuda.wgrad import wgrad, wgrad_costs, wgrad_search
from upconv.problem import LAYOUTS, Pass, Problem

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import planning

EVERY: tuple[tuple[torch.dtype, str], ...] = (
    (torch.float32, "tf32"),
    (torch.float32, "ieee"),
    (torch.bfloat16, "bf16"),
)
SECONDS = 0.2
EVERY_ONE = conftest.EVERY
FACTOR = 5  # for a machine that is slower, or loaded


def suite_layers(step: int, pass_: Pass) -> Iterator[Problem]:
    cases = [case for name in ("cuda", "field") for case in SUITES[name]]
    for i, case in enumerate(cases[::step]):
        dtype, precision = EVERY[i % len(EVERY)]
        layout = LAYOUTS[i // 2 % 2] if case.problem.rank > 1 else "nchw"
        yield case.problem.with_(dtype=dtype, precision=precision, layout=layout, pass_=pass_)


@pytest.mark.parametrize("seed", range(4 if EVERY_ONE else 1))
def test_random_layers_are_planned_in_a_moment(seed: int) -> None:
    planning.measured([(planning.random_layers(1, 0)[0], H200)])  # loads all modules
    clear = planning.caches()
    for i, p in enumerate(planning.random_layers(50, 100 + seed)):
        for pass_ in planning.PASSES:
            seconds = planning.seconds(p, pass_, planning.GPUS[i % len(planning.GPUS)], clear)
            assert seconds < FACTOR * SECONDS, f"{p.with_(pass_=pass_)} took {seconds:.2f} s"


@pytest.mark.parametrize(
    ("gpu", "stride"),
    conftest.diagonal((H200, A100), (1000, 5000, 200_000, 2**31 - 1)),
    ids=lambda of: getattr(of, "arch", str(of)),
)
def test_strides_of_thousands_are_planned_and_compiled_as_others(gpu: Gpu, stride: int) -> None:
    """Neither the search nor a kernel's source grows with the phases of a stride."""
    planning.measured([(planning.random_layers(1, 0)[0], H200)])
    clear = planning.caches()
    for rank, layout, pass_ in product((1, 2), LAYOUTS, planning.PASSES):
        if (rank == 1 and layout != "nchw") or stride > 5000 < stride**rank // 10**6:
            continue
        p = Problem.make(2, 64, 64, (3,) * rank, 3, stride, 1, dtype=torch.float16, layout=layout)
        assert planning.seconds(p, pass_, gpu, clear) < FACTOR * SECONDS
        choice = planner.select(p.with_(pass_=pass_), planner.Device("cuda", gpu=gpu)).choice
        if choice is not None:
            assert sum(len(unit.source) for unit in choice.sources()) < 400_000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_stride_compiles_in_seconds(layout: str) -> None:
    p = Problem.make(2, 64, 64, (4, 4), 3, 3000, 1, dtype=torch.bfloat16, layout=layout)  # type: ignore[arg-type]
    choice = planner.select(p, planner.Device("cuda", gpu=H200)).choice
    assert choice is not None
    begin = time.process_time()
    for unit in choice.sources():
        jit.built(unit.source, "90a", unit.label)
    assert time.process_time() - begin < 10 * FACTOR


@pytest.mark.parametrize("gpu", [H200, A100], ids=["H200", "A100"])
def test_gather_takes_the_cheapest_of_its_tilings(gpu: Gpu) -> None:
    """All of which fit."""
    looked = 0
    for p in chain(suite_layers(13, "fwd"), suite_layers(13, "grad-input")):
        chosen, every = gather.choose(p, gpu), [] if gather.refusal(p, gpu) else gather_search.considered(p, gpu)
        if isinstance(chosen, str):
            assert not every
            continue
        least = min(cost.seconds for cost, _ in every)
        assert chosen.seconds == least
        for cost, t in every[::5]:
            assert t.checked(gpu.shared_bytes) is t and 0 < cost.tensor < cost.seconds
            looked += 1
    assert looked > 60


def test_rounds_are_looked_for_once_a_division_of_the_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of tiles of a layer ask for them, and each look reads thousands of taps."""
    p = Problem.make(4, 21, 21, (16, 16), 64, 32, layout="channels_last", pass_="grad-input", precision="tf32")
    looks: list[int] = []
    look = tiling._alike
    monkeypatch.setattr(tiling, "_alike", lambda *given: looks.append(0) or look(*given))
    for clear in planning.caches():
        clear()
    gather.choose(p, H200)
    assert 0 < len(looks) < 100


def test_rounds_of_steps_differ_only_in_where_they_begin() -> None:
    """As the kernel takes their taps' shifts from the first round."""
    found = set()
    planes = Problem.make(4, 32, 64, (40, 72), 4, 2, 1, precision="tf32", layout="channels_last", pass_="grad-input")
    for p in chain(suite_layers(7, "fwd"), suite_layers(7, "grad-input"), [planes]):
        every = [] if gather.refusal(p, H200) else gather_search.considered(p, H200)
        for t in [t for _, t in every if t.queued][::5]:
            shifts, taps = constants(t)["round_shifts"], t.taps_unrolled
            for block in (block for blocks in t.entries for block in blocks):
                for i in range(0, len(block), taps):
                    rows = [t.shift(offsets) for offsets, _ in block[i : i + taps]]
                    assert tuple(row - rows[0] for row in rows) == shifts
            found.add((len(t.multiplied.variants) > 1, t.strided_box))
    assert found >= {(False, False), (True, False), (False, True)}


def _seconds(model: wgrad_costs.Model, t: Any) -> float:
    return model.blocks(t).fastest(t.chunks(model.p), model.clocks(t))[0]


@pytest.mark.parametrize("gpu", [H200, A100], ids=["H200", "A100"])
def test_the_weight_search_finds_what_a_look_at_all_tilings_does(gpu: Gpu) -> None:
    looked = 0
    for p in suite_layers(23, "grad-weight"):
        if wgrad.refusal(p, gpu):
            continue
        found = wgrad_search.best(p, gpu)
        assert found is not None
        kind = type(found.tiling)
        every = [t for t in wgrad_search.candidates(p, gpu) if isinstance(t, kind)][::5]
        model = wgrad_costs.Model(p, gpu)
        assert found.seconds <= min(_seconds(model, t) for t in every)
        cost = model.cost(found.tiling, found.splits)
        assert cost.seconds == pytest.approx(found.seconds, rel=1e-9)
        looked += len(every)
    assert looked > 300


@pytest.mark.parametrize("gpu", [H200, A100], ids=["H200", "A100"])
def test_what_a_weights_tiling_takes_at_least_is_less_than_its_estimate(gpu: Gpu) -> None:
    looked: set[tuple[type, str, int, bool]] = set()
    for p in suite_layers(9, "grad-weight"):
        if wgrad.refusal(p, gpu):
            continue
        model = wgrad_costs.Model(p, gpu)
        for t in list(wgrad_search.candidates(p, gpu))[::13]:
            blocks, number, positions = model.blocks(t), t.chunks(p), math.prod(t.chunk)
            assert blocks.of_chunk + blocks.of_position * positions < model.clocks(t), (p, t)
            assert blocks.least(number, number * positions) < _seconds(model, t), (p, t)
            looked.add((type(t), p.layout, t.element, max(p.stride) > 1))
    assert len(looked) >= (10 if gpu is H200 else 5)


@pytest.mark.parametrize("pass_", planning.PASSES)
@pytest.mark.parametrize("gpu", [H200, A100], ids=["H200", "A100"])
def test_what_a_tile_on_cuda_cores_takes_at_least_is_less_than_its_estimate(gpu: Gpu, pass_: Pass) -> None:
    looked = 0
    for p in suite_layers(11, pass_):
        for tile in fitting(p, gpu)[::4]:
            assert costs.least(p, tile, gpu) < costs.cost(p, tile, gpu)[0].seconds, (p, tile)
            looked += 1
    assert looked > 200
