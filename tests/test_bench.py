"""The bench: its layers are the published ones, its checks catch wrong results, its reports say what was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from measured import CPU, SHORT, TINY, ceilings
from strategies import gradient_problems
from upconv import cpu, reference
from upconv.bench import check, report, roofline, run, suites, timing
from upconv.bench.report import Row
from upconv.bench.run import Job
from upconv.bench.suites import SUITES
from upconv.bench.timing import Repeats
from upconv.problem import LAYOUTS, PASSES, PRECISIONS, Problem

CEILINGS = ceilings(1e9, 1e10)


# --- suites ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["founding", "kernelbench", "models", "field"])
def test_quick_sizes_keep_the_layer_and_the_budget(name: str) -> None:
    for case in SUITES[name]:
        p, small = case.problem, suites.quick(case.problem)
        assert replace(small, batch=p.batch, size=p.size) == p and suites.quick(small) == small
        smallest = small.batch == 1 and max(small.size) < 2 * suites.QUICK_SIZE
        assert small.macs <= suites.QUICK_MACS or smallest
        assert math.prod(small.input_shape) + math.prod(small.output_shape) <= suites.QUICK_ELEMENTS or smallest
        assert all(n >= min(whole, suites.QUICK_SIZE) for n, whole in zip(small.size, p.size))


def test_ways_are_every_combination_that_exists() -> None:
    ways = run.ways(CPU, list(PRECISIONS), (), LAYOUTS, PASSES)
    found = run.jobs("models", suites.choose(SUITES["models"], ["hifigan", "PIX"]), ways, small=True)
    assert len(found) == 4 * 4 * (2 + 1)  # 1-D tensors have no channels_last
    assert {job.problem.precision for job in found} == {"ieee", "bf16", "fp16", "fp64"}
    gpu = torch.device("cuda")
    assert [way.precision for way in run.ways(gpu)] == ["tf32"]
    assert [way.precision for way in run.ways(gpu, [torch.float32], ["ieee", "tf32"])] == ["ieee", "tf32"]
    assert [way.dtype for way in run.ways(CPU, (), ["bf16"])] == [torch.bfloat16]


# --- a layer on the command line -------------------------------------------------------------------------------------


def test_a_layer_is_read_in_torch_order() -> None:
    p = suites.parse_layer("64,128,(3,7),2,(1,0),1,4,False,dilation=(2,1)", "8x64x16x32")
    module = torch.nn.ConvTranspose2d(64, 128, (3, 7), 2, (1, 0), 1, 4, False, dilation=(2, 1))
    assert p.output_shape == tuple(module(torch.zeros(8, 64, 16, 32)).shape)
    assert (p.kernel, p.stride, p.padding, p.output_padding) == ((3, 7), (2, 2), (1, 0), (1, 1))
    assert (p.groups, p.bias, p.dilation) == (4, False, (2, 1))
    assert suites.parse_layer("3,4,5", "1x3x9").bias and suites.parse_layer("3,4,[5]", "1x3x9x9x9").kernel == (5, 5, 5)


# --- timing ----------------------------------------------------------------------------------------------------------


def test_sides_alternate_and_inputs_rotate() -> None:
    calls: list[str] = []
    runs = {side: [lambda side=side, i=i: calls.append(f"{side}{i}") for i in range(3)] for side in "ab"}

    def take(work) -> float:
        work()
        return float(len(calls))

    def take_a(work) -> float:
        calls.append("set")
        return take(work)

    taken = timing.interleave(runs, {"a": take_a, "b": take}, Repeats(0.0, 4, 9))
    timed = [c for c in calls if c != "set"][-8:]
    assert timed == ["a0", "b0", "b1", "a1", "a2", "b2", "b0", "a0"]
    assert len(taken["a"]) == len(taken["b"]) == 4
    assert all((calls[i - 1] == "set") == (c[0] == "a") for i, c in enumerate(calls) if c != "set")


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("side", ["ours", "torch"])
def test_each_pass_runs_what_it_is_named_for(pass_, side) -> None:
    p = TINY.with_(pass_=pass_)
    tensors = timing.operands(p, CPU, 3)
    grad = tensors.grad if tensors.grad is not None else torch.zeros(p.output_shape)
    out = reference.forward(p, tensors.input, tensors.weight, tensors.bias)
    gradients = reference.gradients(p, grad, tensors.input, tensors.weight)
    everything = dict(zip(("output", "grad-input", "grad-weight", "grad-bias"), (out, *gradients)))
    run_once = timing.work(side, p, tensors)
    for _ in range(2):  # the graph of a gradient's forward is kept
        results = run_once()
        for name, result in zip(timing.result_names(p), results, strict=True):
            assert reference.relative_error(result, everything[name]) < 1e-6
    assert len(results) == (4 if pass_ == "step" else 1)


def test_precision_flags_are_set_and_restored() -> None:
    def now() -> tuple[str, str]:
        return torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]

    before = now()
    for precision, wanted in (("tf32", "tf32"), ("ieee", "ieee"), ("bf16", "ieee")):
        with pytest.raises(KeyError), timing.precision_flags(precision):
            assert now() == (wanted, wanted)
            raise KeyError
    assert now() == before


def test_on_a_gpu_the_better_of_cudnns_two_ways_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For those that are tuned; the flag is left as it was."""
    begun: list[tuple[str, bool]] = []

    def take(run) -> float:
        run()
        return 1.0 if torch.backends.cudnn.benchmark else 2.0

    def work(name: str):
        return lambda: begun.append((name, torch.backends.cudnn.benchmark))

    monkeypatch.setattr(timing, "clock", lambda device, wait: take)
    was = torch.backends.cudnn.benchmark
    runs = {"ours": [work("ours"), work("ours 2")], "torch": [work("torch"), work("torch 2")]}
    seconds = timing.compare(runs, torch.device("cuda"), SHORT, tuned=("torch",))
    assert seconds == {"ours": [2.0] * 3, "torch": [1.0] * 3}
    assert set(begun[:6]) == {*((n, False) for n in ("ours", "ours 2")), *product(("torch", "torch 2"), (False, True))}
    assert torch.backends.cudnn.benchmark == was


# --- correctness -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(gradient_problems(), st.sampled_from([1, 2000, 10**9]))
def test_the_slices_reference_is_the_wholes(p: Problem, budget: int) -> None:
    p = p.with_(pass_="step")
    tensors = timing.operands(p, CPU, 5)
    assert tensors.grad is not None
    everything = (
        reference.forward(p, tensors.input, tensors.weight, tensors.bias),
        *reference.gradients(p, tensors.grad, tensors.input, tensors.weight),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "CPU_MACS", budget)
        truths = check.truths(p, tensors)
    for truth, value in zip(truths, everything):
        assert torch.allclose(truth.cut(value), truth.value, rtol=1e-12, atol=1e-12)
        assert truth.value.numel() >= 1 and truth.shape == tuple(value.shape)
        if budget == 10**9 and truth.name in ("grad-weight", "grad-bias") and p.groups <= 4:
            assert truth.value.numel() == value.numel()
        last, end = torch.zeros_like(value), (-1,) * value.dim()
        last[end] = 1  # an overflowing offset shows first in the last element
        assert truth.cut(last)[end] == 1


DAMAGES = {
    "beyond KernelBench's tolerance": lambda t: t + 1.01 * 1e-4 * (1 + t.abs()),
    "zeros": torch.zeros_like,
    "column": lambda t: t.index_fill(-1, torch.tensor([t.shape[-1] - 1]), 0),
    "nan": lambda t: torch.where(torch.arange(t.numel()).view_as(t) < t.numel() - 1, t, math.nan),
    "image": lambda t: t[:1].expand_as(t),
    "shape": lambda t: t[..., :-1],
    "dtype": torch.Tensor.double,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_result_is_wrong(damage: str) -> None:
    tensors = timing.operands(TINY, CPU, 0)
    (theirs,) = timing.work("torch", TINY, tensors)()
    ours = DAMAGES[damage](theirs)
    error, _, right = check.errors(TINY, check.truths(TINY, tensors), (ours,), (theirs,))
    assert not right and error > (0.01 if "tolerance" not in damage else 0)
    assert check.tolerance_used("tf32", ours, theirs) > 1 >= check.tolerance_used("bf16", theirs + 1e-3, theirs)


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "measure", lambda precisions, device: CEILINGS)


def test_a_case_that_cannot_run_does_not_cost_the_others(shuffled: None, known_ceilings, monkeypatch) -> None:
    sound = cpu.forward

    def explode(p: Problem, *rest: object) -> torch.Tensor:
        if p.batch == 3:
            raise RuntimeError("no memory\nfor this")
        return sound(p, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu, "forward", explode)
    todo = [Job("custom", f"{n}", TINY.with_(batch=n)) for n in (2, 3, 4)]
    heard: list[tuple[object, ...]] = []
    found = run.measure(todo, CPU, SHORT, lambda *said: heard.append(said))
    rows = found["rows"]
    assert [row["failure"] for row in rows] == [None, "RuntimeError: no memory", None]
    assert found["ceilings"] == CEILINGS and all(row["roof_ms"] > 0 for row in rows)
    assert heard[1:] == [(f"{n} float32 nchw fwd", n - 2, 3) for n in (2, 3, 4)]
    assert report.wrong(rows) == rows[1:2] and rows[1]["ours_ms"] is None


# --- reports ---------------------------------------------------------------------------------------------------------


def test_a_report_survives_the_file(tmp_path: Path) -> None:
    """Which numbers that JSON has not leave as it is."""
    rows: list[Row] = [
        {"case": "A", "ratio": 4.0, "failure": None},
        {"case": "B", "ratio": None, "failure": "no memory"},
    ]
    sample = report.gather(rows, CPU, "layers", ceilings=CEILINGS)
    path = tmp_path / "r.json"
    report.save(sample, path)
    with pytest.raises(ValueError):
        report.save({**sample, "rows": [{"case": "A", "ratio": math.nan}]}, path)
    assert report.load(path) == sample and [p.name for p in tmp_path.iterdir()] == ["r.json"]


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "tf32"), ("float32", "ieee"), ("bfloat16", "bf16")])
def test_a_row_on_a_gpu(dtype: str, precision) -> None:
    p = Problem.make(4, 32, 32, (40, 50), 4, 2, 1, dtype=getattr(torch, dtype), precision=precision)
    device = torch.device("cuda", 0)
    was = torch.backends.cudnn.benchmark
    measured = run.measure([Job("custom", "x", p)], device, SHORT)
    (found,), rates = measured["rows"], measured["ceilings"]
    assert found["failure"] is None and found["rounds"] == 3 and found["ours_ms"] and found["torch_ms"]
    assert found["tolerance_used"] is not None
    assert rates["matmul_flops_per_s"][precision] > 1e12 and 0 < (found["percent_of_roof"] or 0) < 100
    assert torch.backends.cudnn.benchmark == was


@pytest.mark.gpu
def test_the_clock_of_a_gpu_leaves_the_host_out() -> None:
    device = torch.device("cuda", 0)
    x = torch.ones(1 << 10, device=device)

    def slow_host() -> torch.Tensor:
        begin = timing.time.perf_counter()
        while timing.time.perf_counter() - begin < 300e-6:
            pass
        return x + 1

    take = timing.clock(device)
    assert min(take(slow_host) for _ in range(20)) < 30e-6
