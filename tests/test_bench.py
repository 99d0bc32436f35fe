"""The bench: its layers are the published ones, its checks catch wrong results, its reports say what was measured."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from measured import CPU, SHORT, TINY, ceilings, fast_fixture, plans_fixture  # noqa: F401
from upconv import cpu, planner, reference
from upconv.bench import (
    check,
    files,
    latency,
    memory,
    models,
    plots,
    report,
    roofline,
    run,
    suites,
    tables,
    timing,
    training,
    uncached,
)
from upconv.bench.report import Row
from upconv.bench.run import Job
from upconv.bench.suites import SUITES
from upconv.bench.timing import Repeats
from upconv.cuda.compile import jit, nvrtc
from upconv.cuda.gpu import H200
from upconv.problem import PASSES, PRECISIONS, Problem

CEILINGS = ceilings(1e9, 1e10)


def whole(name: str) -> Problem:
    return next(c.problem for cases in suites.SUITES.values() for c in cases if c.name == name)


# --- suites ----------------------------------------------------------------------------------------------------------

# GFLOP, and the roof in ms on an H200 in TF32 and bfloat16 (411.2 and 783.0 TFLOP/s, copy 4.272 TB/s).
PUBLISHED = {
    "kb57": (618.5, 1.504, 0.79), "kb75": (8.1, 0.204, 0.102), "dcganO": (0.8, 0.009, 0.005),
    "unet4": (68.7, 0.377, 0.189), "depthw": (1.1, 0.157, 0.079), "fcn8s": (0.7, 0.084, 0.042),
    "hifigan": (53.7, 0.131, 0.069),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_have_the_published_work_and_roof(name: str) -> None:
    p = whole(name)
    gflop, tf32, bf16 = PUBLISHED[name]
    assert round(p.flops / 1e9, 1) == gflop
    single, half = p.with_(precision="tf32"), p.with_(dtype=torch.bfloat16, precision="bf16")
    for each, flops, roof in ((single, 411.2033267318807e12, tf32), (half, 782.9673014918628e12, bf16)):
        assert round(1e3 * each.roof_seconds(flops, 4.271796972360796e12), 3) == pytest.approx(roof, abs=1e-9)


def test_suites_hold_what_they_are_named_for() -> None:
    names = {name: [case.name for case in cases] for name, cases in suites.SUITES.items()}
    assert names["founding"] == ["kb71", "kb65", "kb75", "kb69", "kb57"]
    numbers = [57, 58, 61, 64, 65, 68, 69, 70, 71, 72, 73, 74, 75, 77, 78, 79, 81]
    assert names["kernelbench"] == [f"kb{n}" for n in numbers]
    assert len(names["models"]) == 14 and len(names["cpu"]) == 21
    assert names["cuda"] == names["kernelbench"] + names["models"]
    assert len(names["field"]) == len(set(names["field"])) == 91 and not {*names["field"]} & {*names["cuda"]}
    assert [whole(n).rank for n in ("kb64", "kb74", "kb79", "hifigan", "kb70", "nnunet", "kb57")] == [
        1,
        1,
        1,
        1,
        3,
        3,
        2,
    ]
    assert all(case.problem.bias == (name == "cpu") for name, cases in suites.SUITES.items() for case in cases)
    assert whole("hifigan").out_size == (6400,) and whole("kb72").out_size == (24, 48, 96)
    assert whole("C").groups == 4 and whole("C").out_size == (129, 382)
    for name, p in suites.SUITES["convolutions"]:
        given = re.fullmatch(r"c(\d+)-(\d+)@(\d+)(?:\^3)?(?:s(\d))?", name)
        assert given is not None
        assert [int(n or 1) for n in given.groups()] == [p.out_channels, p.in_channels, p.out_size[0], p.stride[0]]


def test_quick_sizes_keep_the_layer_and_the_budget() -> None:
    for name in ("founding", "kernelbench", "models"):
        for case in suites.SUITES[name]:
            p, small = case.problem, suites.quick(case.problem)
            assert replace(small, batch=p.batch, size=p.size) == p
            smallest = small.batch == 1 and max(small.size) < 2 * suites.QUICK_SIZE
            assert small.macs <= suites.QUICK_MACS or smallest
            assert math.prod(small.input_shape) + math.prod(small.output_shape) <= suites.QUICK_ELEMENTS
            assert min(small.size) >= min(*p.size, suites.QUICK_SIZE)
    assert suites.quick(whole("fcn8s").with_(batch=1)) == whole("fcn8s").with_(batch=1)
    kb57 = suites.quick(whole("kb57"))
    assert (kb57.batch, kb57.size) == (1, (128, 256))


def test_the_scale_is_the_share_of_the_multiplications() -> None:
    what = run.sweep(CPU)
    kb57 = run.jobs("kernelbench", suites.SUITES["founding"][-1:], what, small=True, bias=None)
    assert kb57[0].scale == 128 * 256 / (8 * 1024 * 1024)
    full = run.jobs("kernelbench", suites.SUITES["founding"][-1:], what, small=False, bias=True)
    assert full[0].scale == 1 and full[0].problem == whole("kb57").with_(bias=True)
    for kept in ("custom", "cpu"):
        assert all(job.scale == 1 for job in run.jobs(kept, suites.SUITES["founding"], what, small=True, bias=None))


def test_a_sweep_is_every_combination_that_exists() -> None:
    what = run.sweep(CPU, list(PRECISIONS), (), ("nchw", "channels_last"), PASSES)
    found = run.jobs("models", suites.choose(suites.SUITES["models"], ["hifigan", "PIX"]), what, small=True, bias=None)
    assert len(found) == 4 * 4 * (2 + 1)  # 1-D tensors have no channels_last
    assert {job.problem.precision for job in found} == {"ieee", "bf16", "fp16", "fp64"}
    assert run.sweep(torch.device("cuda"))["precisions"] == ["tf32"]
    assert run.sweep(torch.device("cuda"), [torch.float32], ["ieee", "tf32"])["precisions"] == ["ieee", "tf32"]
    assert run.sweep(CPU, (), ["bf16"])["dtypes"] == [torch.bfloat16]


# --- a layer on the command line -------------------------------------------------------------------------------------


ARGUMENTS = (
    "the layer's arguments are in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, "
    'dilation, like "64,64,(3,7),stride=2,padding=1"'
)


def test_a_layer_is_read_in_torch_order() -> None:
    p = suites.parse_layer("64,128,(3,7),2,(1,0),1,4,False,dilation=(2,1)", "8x64x16x32")
    module = torch.nn.ConvTranspose2d(64, 128, (3, 7), 2, (1, 0), 1, 4, False, dilation=(2, 1))
    assert p.output_shape == tuple(module(torch.zeros(8, 64, 16, 32)).shape)
    assert (p.kernel, p.stride, p.padding, p.output_padding) == ((3, 7), (2, 2), (1, 0), (1, 1))
    assert (p.groups, p.bias, p.dilation) == (4, False, (2, 1))
    assert suites.parse_layer("3,4,5", "1x3x9").bias and suites.parse_layer("3,4,[5]", "1x3x9x9x9").kernel == (5, 5, 5)


@pytest.mark.parametrize(
    ("layer", "input", "sentence"),
    [
        (
            "64,64,3", "8x64",
            "--input must be batch, channels and 1 to 3 spatial sizes joined by x, like 8x64x512x512; got '8x64'",
        ),
        ("64,64,3", "8x32x9x9", "--input must have the layer's 64 channels; got '8x32x9x9' with 32"),
        ("64,64", "8x64x9", f"{ARGUMENTS}; got '64,64': missing a required argument: 'kernel_size'"),
        (
            "64,64,3,stride=1.5", "8x64x9",
            "the layer's stride must be an integer or 1 of them, one per spatial size; got 1.5",
        ),
        (
            "64,64,(3,3,3)", "8x64x9x9",
            "the layer's kernel_size must be an integer or 2 of them, one per spatial size; got (3, 3, 3)",
        ),
        ("64,64,3,bias=1", "8x64x9", "the layer's bias must be True or False; got 1"),
        ("64,64,3,groups=True", "8x64x9", "the layer's groups must be an integer; got True"),
        (
            "64,64,3,kernel_size=3", "8x64x9",
            f"{ARGUMENTS}; got '64,64,3,kernel_size=3': multiple values for argument 'kernel_size'",
        ),
        (
            "64,64,3,strides=2", "8x64x9",
            f"{ARGUMENTS}; got '64,64,3,strides=2': got an unexpected keyword argument 'strides'",
        ),
        (
            "64,64,exit()", "8x64x9",
            "the layer must be torch.nn's arguments as literals, like \"64,64,(3,7),stride=2,padding=1\"; "
            "got '64,64,exit()'",
        ),
        (
            "64,64,3,groups=7", "8x64x9",
            "the layer fits no transposed convolution: in_channels must be a positive multiple of groups=7, got 64",
        ),
    ],
)  # fmt: skip
def test_a_bad_layer_is_one_sentence(layer: str, input: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        suites.parse_layer(layer, input)
    assert str(caught.value) == sentence


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


def test_rounds_stop_at_the_most_and_at_the_seconds() -> None:
    def no_time(work) -> float:
        return 0.0

    assert len(timing.interleave({"a": [int]}, no_time, Repeats(60.0, 1, 7))["a"]) == 7
    assert len(timing.interleave({"a": [int]}, no_time, Repeats(0.0, 5, 50))["a"]) == 5


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("side", ["ours", "torch"])
def test_each_pass_runs_what_it_is_named_for(pass_, side) -> None:
    p = TINY.with_(pass_=pass_)
    given = timing.operands(p, CPU, 3)
    grad = given.grad if given.grad is not None else torch.zeros(p.output_shape)
    out = reference.forward(p, given.input, given.weight, given.bias)
    gradients = reference.gradients(p, grad, given.input, given.weight)
    everything = dict(zip(("output", "grad-input", "grad-weight", "grad-bias"), (out, *gradients)))
    run_once = timing.work(side, p, given)
    for _ in range(2):  # the graph of a gradient's forward is kept
        results = run_once()
        for name, result in zip(timing.result_names(p), results, strict=True):
            assert reference.relative_error(result, everything[name]) < 1e-6
    assert len(results) == (4 if pass_ == "step" else 1)


def test_operands_are_random_and_in_the_layout() -> None:
    p = Problem.make(2, 8, 16, (9, 9), 3, dtype=torch.bfloat16, layout="channels_last", pass_="step")
    a, b = timing.operands(p, CPU, 0), timing.operands(p, CPU, 1)
    assert a.grad is not None and a.bias is None
    for t in (a.input, a.weight, a.grad):
        assert t.is_contiguous(memory_format=torch.channels_last) and t.dtype is torch.bfloat16
    assert not torch.equal(a.input, b.input)
    out = reference.forward(p, a.input, a.weight)[..., 3:-3, 3:-3]
    assert 0.8 < out.std().item() < 1.2


def test_precision_flags_are_set_and_restored() -> None:
    def now() -> tuple[str, str]:
        return torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision

    before = now()
    for precision, wanted in (("tf32", "tf32"), ("ieee", "ieee"), ("bf16", "ieee")):
        with pytest.raises(KeyError), timing.precision_flags(precision):
            assert now() == (wanted, wanted)
            raise KeyError
    assert now() == before


def test_ceilings_are_rates_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock 20 times too fast, to which small products are long enough: the large ones take 1 to 9 s."""
    monkeypatch.setattr(roofline, "clock", lambda *a, **k: lambda run: 20 * timing.clock(*a, **k)(run))
    low = roofline.measure(["ieee", "bf16"], CPU, seconds=0.0)
    assert set(low["matmul_flops_per_s"]) == {"ieee", "bf16"}
    # A loaded microcontroller to a large server.
    assert 1e7 < low["copy_bytes_per_s"] < 1e13 and 1e7 < low["matmul_flops_per_s"]["ieee"] < 1e15
    other = roofline.Ceilings(copy_bytes_per_s=1.0, matmul_flops_per_s={"ieee": 1e16, "bf16": 1.0})
    best = roofline.better(low, other)
    assert best["copy_bytes_per_s"] == low["copy_bytes_per_s"]
    assert best["matmul_flops_per_s"] == {"ieee": 1e16, "bf16": low["matmul_flops_per_s"]["bf16"]}
    assert roofline.dtype_of("tf32") is torch.float32 and roofline.dtype_of("fp16") is torch.float16


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_peak_memory_counts_what_a_call_holds_beside_inputs_and_results() -> None:
    # PyTorch's float64 path keeps a matrix of out_channels * taps rows and a column per input pixel.
    p = Problem.make(1, 8, 32, (160, 160), 3, padding=1, dtype=torch.float64, precision="fp64")
    columns = 8 * 32 * 9 * 160 * 160
    found = memory.peak_bytes(p, "torch", CPU)
    assert found is not None and 0.98 * columns < found < 1.1 * columns  # pages are counted in batches


def test_kernelbenchs_inputs_are_positive_and_its_weights_those_of_torch_nn() -> None:
    p = Problem.make(2, 8, 16, (9, 9), 3, groups=2, bias=True)
    given = timing.operands(p, CPU, 0, "rand")
    module = torch.nn.ConvTranspose2d(8, 16, 3, groups=2)
    assert given.bias is not None and module.bias is not None
    reach = 1 / math.sqrt(8 * 9)
    for t in (given.weight, given.bias, module.weight, module.bias):
        assert 0.7 * reach < t.abs().max().item() <= reach and t.min().item() < 0
    assert 0 <= given.input.min().item() < 0.1 and 0.9 < given.input.max().item() < 1


def test_what_runs_with_cudnn_benchmark_on_runs_in_one_other_thread() -> None:
    seen: list[tuple[bool, int, bool]] = []

    def work() -> None:
        multithreaded = torch._C._is_multithreading_enabled()
        seen.append((torch.backends.cudnn.benchmark, threading.get_ident(), multithreaded))

    was = torch.backends.cudnn.benchmark
    try:
        clocks = timing.cudnn_clocks(timing.clock(CPU))
        taken = [clocks[name](work) for name in ("off", "on", "off", "on")]
    finally:
        torch.backends.cudnn.benchmark = was
    here, there = threading.get_ident(), seen[1][1]
    assert seen == [(False, here, False), (True, there, False)] * 2 and there != here
    assert min(taken) >= 0 and torch._C._is_multithreading_enabled()

    def broken() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        clocks["on"](broken)
    torch.backends.cudnn.benchmark = was


# --- correctness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2000, 10**9])
@pytest.mark.parametrize(
    "p",
    [
        TINY.with_(pass_="step"),
        Problem.make(3, 6, 4, (4,), 3, 2, 1, bias=True, pass_="step"),
        Problem.make(2, 4, 4, (3, 3, 2), 2, 2, groups=4, bias=True, pass_="step"),
    ],
    ids=str,
)
def test_the_slices_reference_is_the_wholes(p: Problem, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CPU_MACS", budget)
    given = timing.operands(p, CPU, 5)
    assert given.grad is not None
    everything = (
        reference.forward(p, given.input, given.weight, given.bias),
        *reference.gradients(p, given.grad, given.input, given.weight),
    )
    for truth, value in zip(check.truths(p, given), everything, strict=True):
        assert torch.allclose(truth.cut(value), truth.value, rtol=1e-12, atol=1e-12)
        assert truth.value.numel() >= 1 and truth.shape == tuple(value.shape)
        if budget == 10**9 and truth.name not in ("output", "grad-input"):
            assert truth.value.numel() == value.numel()


def test_the_bound_admits_rounding_and_no_lost_column() -> None:
    assert check.bound("bf16", 576, 0.0) == pytest.approx(2 * (2**-8 + 24 * 2**-24))
    assert check.bound("ieee", 576, 0.0) == pytest.approx(2 * 25 * 2**-24)
    assert check.bound("fp64", 576, 0.0) == pytest.approx(2 * 25 * 2**-53)
    assert check.bound("tf32", 576, 0.01) == 0.02
    assert all(
        check.bound(precision, 10**4, 0.0) < math.sqrt(1 / 1026) for found in PRECISIONS.values() for precision in found
    )


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("pass_", PASSES)
def test_pytorch_itself_is_right(dtype: torch.dtype, pass_) -> None:
    p = TINY.with_(dtype=dtype, precision=PRECISIONS[dtype][0], pass_=pass_)
    given = timing.operands(p, CPU, 0)
    theirs = timing.work("torch", p, given)()
    error, torch_error, right = check.errors(p, check.truths(p, given), theirs, theirs)
    assert right and error == torch_error < 0.01


@pytest.mark.parametrize("damage", ["zeros", "column", "nan", "shape", "dtype", "image"])
def test_a_damaged_result_is_wrong(damage: str) -> None:
    given = timing.operands(TINY, CPU, 0)
    (theirs,) = timing.work("torch", TINY, given)()
    ours = theirs.clone()
    if damage == "zeros":
        ours.zero_()
    elif damage == "column":
        ours[..., -1] = 0
    elif damage == "nan":
        ours[-1, -1, -1, -1] = math.nan
    elif damage == "shape":
        ours = ours[..., :-1]
    elif damage == "dtype":
        ours = ours.double()
    else:
        ours[-1] = ours[0]
    error, _, right = check.errors(TINY, check.truths(TINY, given), (ours,), (theirs,))
    assert not right and error > 0.01


def test_the_tolerance_is_kernelbenchs() -> None:
    theirs = torch.randn(3, 4, 5)
    for precision, tolerance in (("tf32", 1e-4), ("bf16", 1e-2)):
        for share in (0.5, 0.99, 1.01, 3.0):
            ours = theirs.clone()
            ours[2, 1, 3] += share * tolerance * (1 + theirs[2, 1, 3].abs())
            used = check.tolerance_used(precision, ours, theirs)
            assert used == pytest.approx(share, rel=1e-2)
            assert (used <= 1) == torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    nan = theirs.clone()
    nan[0, 0, 0] = math.nan
    assert check.tolerance_used("tf32", nan, theirs) == check.tolerance_used("tf32", theirs[:2], theirs) == math.inf
    assert check.tolerance_used("tf32", theirs.double(), theirs) == math.inf


# --- rows ------------------------------------------------------------------------------------------------------------


def measured(p: Problem) -> Row:
    found = run.row(Job("custom", "x", p), CPU, SHORT)
    run.set_roof(found, CEILINGS)
    return found


def test_a_row_of_ours_has_a_ratio_of_two_times(plans) -> None:
    plans("shuffle", "split")
    found = measured(TINY)
    assert (found["engine"], found["plan"], found["failure"], found["rounds"]) == ("cpu:shuffle", "shuffle", None, 3)
    assert found["ratio"] == pytest.approx(found["torch_ms"] / found["ours_ms"])
    assert found["roof_ms"] == pytest.approx(1e3 * max(TINY.flops / 1e10, TINY.bytes / 1e9))
    assert found["percent_of_roof"] == pytest.approx(100 * found["roof_ms"] / found["ours_ms"])
    assert 0 < found["rel_error"] < 1e-6 and found["layer"] == "4->6 k3x2 s2x1 p1x0 op1x0 g2 on 2x4x5x6"
    step = measured(TINY.with_(pass_="step"))
    assert step["plan"] == "forward=shuffle backward=split" and step["engine"] == "cpu:shuffle+split"


@pytest.mark.parametrize("pass_", PASSES)
def test_a_delegated_row_has_ratio_one_and_is_not_ours(plans, pass_) -> None:
    plans("native")
    found = measured(TINY.with_(pass_=pass_))
    assert found["engine"] == "torch" and found["ratio"] == 1.0 and found["ours_ms"] == found["torch_ms"] > 0


def test_a_case_that_cannot_run_does_not_cost_the_others(plans, monkeypatch: pytest.MonkeyPatch) -> None:
    plans("shuffle")

    def explode(*arguments: object) -> Tensor:
        raise RuntimeError("no memory\nfor this")

    monkeypatch.setattr(cpu, "forward", explode)
    monkeypatch.setattr(roofline, "measure", lambda precisions, device: CEILINGS)
    plain = Job("custom", "torch's", TINY.with_(pass_="grad-input"))
    rows, ceilings = run.run([Job("custom", "ours", TINY), plain], CPU, SHORT)
    assert rows[0]["failure"] == "RuntimeError: no memory" and rows[0]["ours_ms"] is None
    assert rows[1]["failure"] == "RuntimeError: no memory" and ceilings == CEILINGS
    assert report.wrong(rows) == rows


def test_an_unfinished_run_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "measure", lambda precisions, device: CEILINGS)
    todo = [Job("custom", name, TINY.with_(batch=n)) for n, name in enumerate("abc", 1)]
    flushed: list[list[str]] = []
    first, _ = run.run(todo[:2], CPU, SHORT)
    faster = roofline.Ceilings(copy_bytes_per_s=4e9, matmul_flops_per_s={"ieee": 1e9})
    roofs = [found["roof_ms"] for found in first]
    measured: list[str] = []
    rows, ceilings = run.run(
        todo, CPU, SHORT, known=([first[1], {**first[0], "layer": "another"}], faster),
        progress=lambda job: measured.append(job.case),
        publish=lambda rows, ceilings: flushed.append([found["case"] for found in rows]),
    )  # fmt: skip
    assert measured == ["a", "c"] and [found["case"] for found in rows] == ["a", "b", "c"]
    assert flushed == [["a", "b"], ["a", "b", "c"], ["a", "b", "c"]]
    assert rows[1]["ours_ms"] == first[1]["ours_ms"]
    # The better of both runs' ceilings counts for all rows.
    assert ceilings == {"copy_bytes_per_s": 4e9, "matmul_flops_per_s": {"ieee": 1e10}}
    assert roofs[1] == pytest.approx(1e3 * max(todo[1].problem.flops / 1e10, todo[1].problem.bytes / 1e9))
    assert rows[1]["roof_ms"] == pytest.approx(1e3 * max(todo[1].problem.flops / 1e10, todo[1].problem.bytes / 4e9))
    assert rows[1]["percent_of_roof"] == pytest.approx(100 * rows[1]["roof_ms"] / rows[1]["ours_ms"])


# --- reports ---------------------------------------------------------------------------------------------------------


def row(case: str, ratio: float | None, engine: str = "cpu:flip", **changes: object) -> Row:
    torch_ms = 12.0
    found = {
        "suite": "cpu", "case": case, "pass": "fwd", "dtype": "float32", "precision": "ieee", "layout": "nchw",
        "ours_ms": None if ratio is None else torch_ms / ratio, "torch_ms": None if ratio is None else torch_ms,
        "ratio": ratio, "roof_ms": 3.0, "percent_of_roof": None if ratio is None else 25.0 * ratio, "rel_error": 2e-7,
        "torch_rel_error": 2e-7, "engine": engine, "plan": "native" if engine == "torch" else engine[4:],
        "layer": f"layer {case}", "scale": 1.0, "flops": 10**9, "bytes": 10**7, "rounds": 5,
        "failure": None if ratio is not None else "wrong result: relative error 1.0e+00, PyTorch's 2.0e-07",
        "ours_peak_bytes": None, "torch_peak_bytes": None, "inputs": "normal", "tolerance_used": None, "wall_s": 0.0,
    }  # fmt: skip
    return {**dict.fromkeys(report.KEYS[report.LAYERS]), **found, **changes}  # type: ignore[typeddict-item, return-value]


ROWS = [row("A", 4.0), row("B", 1.0, "torch"), row("C", None), row("D", 0.5), row("FSR-s3", 8.0, scale=1 / 256)]


@pytest.fixture
def sample() -> report.Report:
    return report.build(ROWS, CPU, ceilings=CEILINGS)


def test_a_delegated_row_counts_as_one_and_never_as_ours() -> None:
    found = report.summarise(ROWS)
    assert (found["ours"], found["delegated"], found["wrong"]) == (3, ["B"], 1)
    assert found["mean_of_ours"] == pytest.approx(16 ** (1 / 3)) and found["mean_of_all"] == pytest.approx(2.0)
    assert found["lowest"] is ROWS[3]


def test_a_report_survives_the_file(sample: report.Report, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    files.save(sample, path)
    assert report.load(path) == sample
    assert set(json.loads(path.read_text())) == {
        "schema", "when", "commit", "device", "versions", "load", "complete", "ceilings", "rows",
    }  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_report_of_the_schemas_keys_alone_is_read(sample: report.Report, tmp_path: Path) -> None:
    keys = (
        "suite case pass dtype precision layout ours_ms torch_ms ratio roof_ms percent_of_roof rel_error "
        "torch_rel_error engine plan"
    )
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**sample, "rows": [{key: row[key] for key in keys.split()} for row in ROWS]}))
    assert report.summarise(report.load(path)["rows"])["mean_of_all"] == pytest.approx(2.0)
    plots.plot(report.load(path), tmp_path / "r.png")


def test_a_failing_write_leaves_the_old_file(sample: report.Report, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    files.save(sample, path)
    before = path.read_bytes()

    def broken(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.publish(path, broken)
    with pytest.raises(ValueError):
        files.save({**sample, "rows": [row("A", math.nan)]}, path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "r.json is no JSON: "),
        ("[]", "r.json must be a report of schema 1, got None"),
        ('{"schema": 2}', "r.json must be a report of schema 1, got 2"),
        ('{"schema": 1, "rows": []}', "r.json lacks ceilings, commit, device, versions, when"),
    ],
)
def test_what_is_no_report_is_refused(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        report.load("r.json")
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    "rows", [ROWS, [*ROWS, row("A", 2.0, dtype="bfloat16"), row("D", 1.5, layout="channels_last")]]
)
def test_plots_are_pictures(sample: report.Report, rows: list[Row], tmp_path: Path) -> None:
    from matplotlib.image import imread

    found: report.Report = {**sample, "rows": rows}
    plots.plot(found, tmp_path / "r.png")
    picture = imread(tmp_path / "r.png")
    assert picture.shape[0] > 500 and picture.shape[1] > 1500 and picture[..., :3].std() > 0.05
    plots.plot(found, tmp_path / "r.svg")
    text = (tmp_path / "r.svg").read_text()
    assert "<svg" in text and "FSR-s3" in text and "8.00x" in text and "speed-up over PyTorch" in text
    with pytest.raises(ValueError, match=r"the plot's file must end in \.png or \.svg, got "):
        plots.plot(found, tmp_path / "r.pdf")
    with pytest.raises(ValueError, match="a plot needs at least one row with a speed"):
        plots.plot({**sample, "rows": [ROWS[2]]}, tmp_path / "r.png")


# --- latency ---------------------------------------------------------------------------------------------------------


def test_host_time_is_ours_and_torchs_on_the_same_layer(tmp_path: Path) -> None:
    found = latency.host(CPU, SHORT)
    assert [(row["dtype"], row["mode"]) for row in found["rows"]] == [
        ("float32", "no_grad"), ("float32", "training"), ("bfloat16", "no_grad"),
    ]  # fmt: skip
    for row in found["rows"]:
        assert set(row) == set(report.KEYS["host"]) and row["calls"] == 3 * latency.CALLS
        assert row["ours_lower_us"] <= row["ours_us"] <= row["ours_upper_us"]
        assert row["torch_lower_us"] <= row["torch_us"] <= row["torch_upper_us"]
        ours, theirs = row["ours_us"], row["torch_us"]
        assert isinstance(ours, float) and isinstance(theirs, float) and ours > 1 and theirs > 1
        assert row["added_us"] == pytest.approx(ours - theirs)
    path = tmp_path / "h.json"
    files.save(found, path)
    assert report.load(path) == found and found["kind"] == "host"


def test_first_calls_are_counted_per_shape(tmp_path: Path) -> None:
    found = latency.shapes(CPU, ((5, 6), (7, 9)))
    assert [row["shape"] for row in found["rows"]] == ["4x64x5x6", "4x64x7x9"]
    for row in found["rows"]:
        assert set(row) == set(report.KEYS["shapes"])
        assert row["torch_benchmark_ms"] is None and row["ours_compiled"] is None
        assert all(isinstance(row[key], float) and row[key] > 0 for key in ("ours_ms", "torch_ms", "torch_again_ms"))
    path = tmp_path / "s.json"
    files.save(found, path)
    assert report.load(path) == found
    path.write_text(json.dumps({**found, "rows": [{"shape": "1x1x1"}]}))
    with pytest.raises(ValueError, match=r"s\.json lacks rows\[\]\.engine, "):
        report.load(path)
    path.write_text(json.dumps({"schema": 1}))
    with pytest.raises(ValueError, match=r"s\.json lacks ceilings, commit, device, rows, versions, when"):
        report.load(path)


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))
def test_cold_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    import cold

    monkeypatch.setattr(cold, "_PRECISIONS", {"bf16": torch.bfloat16})
    monkeypatch.setattr(cold, "_AGAIN", 0.0)
    monkeypatch.setenv("UPCONV_CACHE_DIR", str(tmp_path / "users"))
    texts: list[str] = []
    cubin = jit.cubin
    monkeypatch.setattr(jit, "cubin", lambda *given: texts.append(given[0]) or cubin(*given))
    cases = [case for case in SUITES["cuda"] if case.name == "kb64"]
    where, heard = planner.Device("cuda", gpu=H200), list[str]()
    found = cold.of_kernels(where, CPU, cases, heard.append)
    assert [(row["case"], row["layout"]) for row in found["rows"]] == [("kb64", "nchw")]
    for row, case in zip(found["rows"], cases):
        assert set(row) == set(report.KEYS["cold"])
        p = case.problem.with_(dtype=torch.bfloat16, precision="bf16")
        for key, pass_ in (("fwd_s", "fwd"), ("grad_input_s", "grad-input"), ("grad_weight_s", "grad-weight")):
            there = bool(planner.plan(p, where).choices(pass_))  # type: ignore[arg-type]
            assert (row[key] is not None) == there and (row[key] is None or 0.05 < float(row[key]) < 60)
    every = len(set(heard))  # first all at once, then again, one by one, those that a call waits for
    assert any(label.endswith(", quick") for label in heard) and len(set(heard[:every])) == every > 3
    assert set(heard[every:]) < set(heard) and len(heard[every:]) == len(set(heard[every:])) > 2
    assert len(texts) == len(set(texts)) == len(heard)  # none that could have been compiled before
    assert not (tmp_path / "users").exists() and os.environ["UPCONV_CACHE_DIR"] == str(tmp_path / "users")
    assert uncached.NO_CACHE not in nvrtc.FLAGS
    assert any(row["later_s"] for row in found["rows"]) and all(row["cached_ms"] is None for row in found["rows"])
    heard.clear()
    monkeypatch.setattr(jit, "cubin", lambda *given: time.sleep(0.0 if heard.count(given[2]) > 1 else 0.3))
    with pytest.raises(RuntimeError, match=r"NVRTC took 0\.00 s for what took it 0\.3\d s: from a cache"):
        cold.of_kernels(where, CPU, cases, heard.append)
    files.save(found, tmp_path / "c.json")
    assert report.load(tmp_path / "c.json") == found
    show = Console(width=200, record=True, file=io.StringIO())
    tables.show(found, show)
    assert "for the weight s" in show.export_text()
    with pytest.raises(ValueError, match="cold kernels need a CUDA device, for which kernels are compiled; got cpu"):
        cold.measure(CPU)


# --- training steps --------------------------------------------------------------------------------------------------


def test_training_steps(tmp_path: Path) -> None:
    """Every model in both precisions, ours beside PyTorch's; a report that is kept and shown."""
    heard: list[str] = []
    todo = models.cases(16)
    found = training.measure(CPU, training.runs(todo), SHORT, compiled=False, progress=heard.append)
    assert [row["case"] for row in found["rows"]] == [f"{c.name} {t}" for c in todo for t in ("fp32", "bf16")]
    for row in found["rows"]:
        assert set(row) == set(report.KEYS["training"]) and row["failure"] is None
        assert float(row["ratio"] or 0) == float(row["torch_ms"] or 0) / float(row["ours_ms"] or 1)
        assert row["compile_ms"] is None and row["ours_peak_bytes"] is None
        assert float(row["convolutions_ratio"] or 0) == float(row["torch_ms"] or 0) / float(row["convolutions_ms"] or 1)
    assert heard[:4] == ["dcgan fp32 ours", "dcgan fp32 convolutions", "dcgan fp32 torch", "dcgan fp32 times"]
    path = tmp_path / "training.json"
    files.save(found, path)
    assert report.load(path) == found
    console = Console(record=True, width=100)
    tables.show(found, console)
    text = console.export_text()
    assert "hifigan bf16" in text and "Adam" in text


@pytest.mark.parametrize(("factor", "what"), [(3, "losses"), (1.5, "gradients' norms")])
def test_a_model_that_trains_wrongly_has_no_time(factor: float, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in models.cases(8) if case.name == "vae")

    def wrong(network: Any, convolutions: bool) -> Any:
        list(network.parameters())[-2].data.mul_(factor)  # the last layer's weight
        return network

    monkeypatch.setattr(training.upconv, "accelerate", wrong)
    row = training.measure(CPU, training.runs([case]), SHORT, compiled=False)["rows"][0]
    assert str(row["failure"]).startswith(f"wrong: the first {what} differ by ") and row["ours_ms"] is None


def test_training_cases_are_the_targets() -> None:
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "targets.json"
    wanted = {case for group in json.loads(path.read_text())["h200-training"] for case in group["cases"]}
    measured = {f"{case.name} {dtype}" for case in models.cases() for dtype in ("fp32", "bf16")}
    assert wanted == measured | {f"{case}, convolutions too" for case in measured}


# --- the whole measurement, benchmarks/h200.py -----------------------------------------------------------------------


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    import h200

    monkeypatch.setattr(roofline, "measure", lambda precisions, device: CEILINGS)
    monkeypatch.setattr(h200, "SWEEP", SHORT)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: report.env.device(CPU)["name"])
    todo = [Job("cuda", name, TINY.with_(batch=n)) for n, name in enumerate("abc", 1)]
    monkeypatch.setitem(h200.SWEEPS, "tf32", (torch.float32, "ieee", "nchw", "fwd"))
    every = h200.jobs
    monkeypatch.setattr(h200, "jobs", lambda name: todo)
    h200.every = every
    return h200


def test_whole_models_are_measured_row_by_row(h200, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []
    fixed = dict.fromkeys(report.KEYS["training"], 1.0)

    def measure(device: torch.device, todo: list, *, compiled: bool, progress: object) -> report.Report:
        asked.append((todo[0].name, compiled))
        row = {**fixed, "case": todo[0].name, "ours_ms": float(len(asked))}
        return report.build([row], device, kind="training", layer="models")  # type: ignore[list-item]

    monkeypatch.setattr(h200.training, "measure", measure)
    path, later = tmp_path / "h200-training.json", time.monotonic() + 60
    every = [run.name for run in training.runs(layouts=h200.LAYOUTS, modes=training.MODES)]
    vae = [name for name in every if name.startswith("vae ")]
    assert len(every) == 3 * 8 + 4 and len(vae) == 8
    with pytest.raises(h200.TimeUp):
        h200.train(path, CPU, time.monotonic() - 1, True, [])
    h200.train(path, CPU, later, True, ["vae"])
    h200.train(path, CPU, later, True, [])  # goes on with the rest
    assert asked == [(name, True) for name in (*vae, *(name for name in every if name not in vae))]
    h200.train(path, CPU, later, False, ["dcgan"])  # anew
    found = report.load(path)
    assert [row["case"] for row in found["rows"]] == every and asked[-1] == (every[7], False)
    assert found["rows"][0]["ours_ms"] == len(every) + 1 and found["rows"][8]["ours_ms"] == 17
    monkeypatch.setattr(h200, "sources", lambda: "others")
    h200.train(path, CPU, later, True, [], keep=True)
    assert report.load(path) == found and len(asked) == len(every) + 8
    h200.train(path, CPU, later, True, [])  # of these sources nothing is there
    assert len(asked) == 2 * len(every) + 8


def test_every_case_that_has_a_target_is_measured_2d_first(h200) -> None:
    targets = json.loads((Path(h200.__file__).parent / "targets.json").read_text())
    frozen = {"frozen-tf32", "frozen-bf16"}
    assert {f"h200-{name}" for name in {*h200.SWEEPS} - frozen} == set(targets) - {"h200-training", "h200-exported"}
    assert [len(h200.every(name)) for name in sorted(frozen)] == [31 + 91] * 2
    assert set(h200.ORDER) == {*h200.SWEEPS, *h200.UNSWEPT, "training"}
    passes = {"gi": "grad-input", "gw": "grad-weight", "step": "step", "conv": "step"}
    for name in {*h200.SWEEPS} - frozen:
        found = h200.every(name)
        cases = [job.case for job in found]
        counts = {"step": 10, "conv": len(suites.SUITES["convolutions"])}
        count = counts.get(name.split("-")[0], 27 if "cl-" in name else 31)
        assert len(set(cases)) == len(cases) == count
        assert {job.problem.pass_ for job in found} == {passes.get(name.split("-")[0], "fwd")}
        assert all(job.problem.bias for job in found) or not name.startswith("step-")
        wanted = [list(group["cases"]) for group in targets[f"h200-{name}"]]
        assert {case for group in wanted for case in group} <= set(cases)
        assert set(wanted[0]) == set(cases[: len(wanted[0])])
        assert all(job.scale == 1 for job in found)


@pytest.mark.parametrize(("name", "frozen"), [("frozen-bf16", True), ("bf16", False)])
def test_frozen_reports_time_frozen_weights(h200, monkeypatch, tmp_path: Path, name: str, frozen: bool) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(h200.run, "run", lambda *given, frozen, **named: asked.append(frozen))
    assert h200.sweep(name, tmp_path / "r.json", CPU, timing.time.monotonic() + 100, False, (), {})
    assert asked == [frozen]


def test_a_stopped_measurement_goes_on(h200, tmp_path: Path) -> None:
    path, now = tmp_path / "r.json", timing.time.monotonic()

    def sweep(end: float, cases: tuple[str, ...] = (), failed: dict[str, str] | None = None) -> bool:
        return h200.sweep("tf32", path, CPU, end, False, cases, failed or {})

    assert sweep(now + 100, ("b",)) is True
    first = report.load(path)
    assert [row["case"] for row in first["rows"]] == ["b"]
    with pytest.raises(h200.TimeUp):
        sweep(now - 1)
    assert report.load(path)["rows"] == first["rows"]
    assert sweep(now + 100, (), {"a": "no sign for 5 s"}) is False
    whole = report.load(path)
    assert [row["case"] for row in whole["rows"]] == ["a", "b", "c"]
    assert whole["rows"][1]["ours_ms"] == first["rows"][0]["ours_ms"]
    assert whole["rows"][0]["failure"] == "no sign for 5 s" and whole["rows"][0]["ours_ms"] is None
    before = path.read_bytes()
    assert sweep(now - 1) is False and path.read_bytes() == before
    # Rows of other sources do not count.
    whole["versions"]["sources"] = "another"
    files.save(whole, path)
    assert sweep(now + 100) is True and all(row["failure"] is None for row in report.load(path)["rows"])


def test_some_rows_are_measured_anew(h200, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By other sources: the others stay as they were, and say of which commit they are, until they are measured too."""
    path, end = tmp_path / "r.json", timing.time.monotonic() + 100

    def sweep(*cases: str, keep: bool = True) -> list[tuple[bool, str | None]]:
        assert h200.sweep("tf32", path, CPU, end, keep, cases, {})
        found = report.load(path)
        assert found["versions"]["sources"] == h200.sources()
        return [(row["ours_ms"] == 1e6, row.get("commit")) for row in found["rows"]]

    assert sweep(keep=False) == [(False, None)] * 3
    old = report.load(path)
    old["versions"]["sources"], old["commit"] = "another", "0" * 40
    for row in old["rows"]:
        row["ours_ms"], row["roof_ms"] = 1e6, 7.0
    files.save(old, path)
    stays, new = (True, "0" * 40), (False, None)
    for _ in range(2):  # a second time there is nothing to do
        assert sweep("b") == [stays, new, stays]
        assert [row["roof_ms"] == 7.0 for row in report.load(path)["rows"]] == [True, False, True]
    assert sweep("a") == [new, new, stays] == sweep()
    with pytest.raises(h200.TimeUp):
        h200.sweep("tf32", path, CPU, timing.time.monotonic() - 1, True, ("c",), {})
    assert sweep() == [new, new, stays], "what was not measured again is there"
    assert sweep(keep=False) == [new] * 3
    files.save({**report.load(path), "commit": None, "versions": {"sources": "another"}}, path)
    with pytest.raises(ValueError, match="must name the commit of the rows that stay"):
        sweep("b")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    with pytest.raises(ValueError, match="must be of this GPU, a another GPU, for its rows to stay"):
        sweep("b")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("print('report tf32', flush=True); print('row tf32 a', flush=True); exit(7)", (7, "tf32:a")),
        ("print('row tf32 a'); print('report cl-tf32'); exit(0)", (0, None)),
        ("print('report host', flush=True); import time; time.sleep(60)", (None, "host:host")),
    ],
)
def test_a_child_that_crashes_or_hangs_is_told_from_one_that_ends(h200, code: str, found) -> None:
    begin = timing.time.monotonic()
    assert h200.watch([sys.executable, "-c", code], 2.0, begin + 30) == found
    assert timing.time.monotonic() - begin < 20


def test_a_failed_row_is_given_to_the_next_child(h200, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ends = [(h200.CHILD_LOST, "tf32:a"), (None, "tf32:b"), (-11, "ieee:c"), (h200.DONE, None)]
    commands: list[list[str]] = []

    def watch(command: list[str], stall: float, end: float) -> tuple[int | None, str | None]:
        commands.append(command)
        return ends[len(commands) - 1]

    monkeypatch.setattr(h200, "watch", watch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    assert h200.main(["--out", str(tmp_path), "--stall", "9", "--budget", "50"]) == h200.WRONG
    failed = [[b for a, b in zip(command, command[1:]) if a == "--failed"] for command in commands]
    hung, crashed = "tf32:b:no sign for 9 s", "ieee:c:the process ended with -11"
    assert failed == [[], [], [hung], [hung, crashed]] and all("--child" in command for command in commands)


def test_another_gpus_reports_are_not_written(h200, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    with pytest.raises(SystemExit):
        h200.main(["--out", str(tmp_path)])
    assert "--stem must be part of the GPU's name, a NVIDIA H100 80GB HBM3, got h200" in capsys.readouterr().err
    monkeypatch.setattr(h200, "parent", lambda options, arguments: options.stem)
    assert h200.main(["--out", str(tmp_path), "--stem", "h100"]) == "h100"


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "tf32"), ("float32", "ieee"), ("bfloat16", "bf16")])
def test_a_row_on_a_gpu(dtype: str, precision) -> None:
    p = Problem.make(4, 32, 32, (40, 50), 4, 2, 1, dtype=getattr(torch, dtype), precision=precision)
    device = torch.device("cuda", 0)
    was = torch.backends.cudnn.benchmark
    rows, ceilings = run.run([Job("custom", "x", p)], device, SHORT)
    (found,) = rows
    assert found["failure"] is None and found["rounds"] == 3 and found["ours_ms"] and found["torch_ms"]
    assert (found["tolerance_used"] is None) == (found["engine"] == "torch")
    assert ceilings["matmul_flops_per_s"][precision] > 1e12 and 0 < (found["percent_of_roof"] or 0) < 100
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


@pytest.mark.gpu
def test_latency_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    assert all(0.1 < float(row["torch_us"] or 0) < 1e4 for row in latency.host(device, SHORT)["rows"])
    for row in latency.shapes(device, ((9, 9), (11, 10)))["rows"]:
        assert row["torch_benchmark_ms"] is not None
        assert (row["ours_compiled"] is not None) and row["ours_ms"] is not None


def test_a_jobs_key_is_its_rows() -> None:
    what = run.sweep(CPU, [torch.float32, torch.bfloat16], layouts=("nchw", "channels_last"), passes=PASSES)
    found = run.jobs("models", suites.SUITES["models"][:3], what, small=True, bias=None)
    assert len(found) > 20 and all(run.job_key(job) == run.key(run.blank(job, CPU)) for job in found)
