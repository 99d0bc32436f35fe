"""The CPU engine against the float64 reference: every plan forced on every problem that it admits."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import event, example, given, settings

import upconv
from conftest import EVERY, OURS, _forget_plans, printed
from strategies import forward_excess, gradient_excess, gradient_problems, operands, problems
from upconv import cpu, planner
from upconv.cpu import rule
from upconv.problem import Problem


def poison(dtype: torch.dtype) -> None:
    """What memory that is taken next has, unless it is written."""
    poisoned = [torch.full((2**n,), 1e30, dtype=dtype) for n in range(3, 13) for _ in range(4)]
    del poisoned


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("groups", (1, 2, 4))
def test_planes_that_no_tap_reaches_are_written(groups: int, bias: bool) -> None:
    """PyTorch's bfloat16 operator leaves them as they were in memory (docs/experiments.md)."""
    p = Problem.make(2, 4, 4, (4, 4, 6), (2, 3, 3), 2, 0, (1, 0, 0), (1, 1, 3), groups, bias=bias, dtype=torch.bfloat16)
    assert planner.plan(p, planner.Device("cpu")).forward == "wide" and cpu.refusal(p, "native")
    x, w, b, _ = operands(p)
    for _ in range(20):
        poison(torch.bfloat16)
        out = upconv.conv_transpose3d(x, w, b, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
        assert forward_excess(p, out, x, w, b, native=False) <= 1


@pytest.mark.parametrize("layout", ("nchw", "channels_last"))
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "output_padding", "dilation"),
    [
        ((1, 6), 3, (2, 1), (2, 3), 1, 3),
        ((1, 4), (5, 4), (3, 1), (4, 0), (1, 0), (2, 3)),
        ((1, 16), 2, 1, (1, 1), 0, 3),
    ],
)
def test_taps_that_all_miss_the_input(layout, size, kernel, stride, padding, output_padding, dilation) -> None:
    """Of some rows' phases: PyTorch's bfloat16 convolution crashes there on CPUs with AMX."""
    p = Problem.make(
        2, 6, 4, size, kernel, stride, padding, output_padding, dilation, 2, bias=True, dtype=torch.bfloat16,
        layout=layout,
    )  # fmt: skip
    x, w, b, _ = operands(p)
    for plan in cpu.FORWARD_PLANS:
        if plan != "native" and cpu.refusal(p, plan) is None:
            assert forward_excess(p, cpu.forward(p, plan, x, w, b), x, w, b, native=False) <= 1, plan


@pytest.fixture(params=(False, True), ids=("whole", "in parts"))
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Batches, groups and channels are taken in parts from millions of results on, or already from 32."""
    if request.param:
        for name in ("_WIDE_OUTPUTS", "_SUM_AT_ONCE"):
            monkeypatch.setattr(cpu.run, name, 32)
        monkeypatch.setattr(cpu.run, "_WIDE_CHANNELS", 2)
        monkeypatch.setattr(cpu.run, "_EXCESS", 1 / 40)
        monkeypatch.setattr(cpu.run, "own_kernel", lambda p: True)  # whose images are taken in bands of rows
        monkeypatch.setattr(cpu.run, "_SHARE_BYTES", 0)
    cpu.run._geometry.cache_clear()
    yield
    cpu.run._geometry.cache_clear()


@given(p=problems())
@settings(max_examples=1000 if EVERY else 200)
def test_every_admitted_plan_computes_the_forward(parts: None, p: Problem) -> None:
    x, w, b, _ = operands(p)
    for plan in cpu.FORWARD_PLANS:
        if cpu.refusal(p, plan) is None:
            event(plan)
            out = cpu.forward(p, plan, x, w, b)
            assert tuple(out.shape) == p.output_shape and out.dtype is p.dtype
            assert forward_excess(p, out, x, w, b, native=plan == "native") <= 1, plan


_PEAK = """
import ctypes, re, sys, torch
from pathlib import Path
from upconv import cpu
from upconv.problem import Problem
torch.set_num_threads(2)
M_MMAP_THRESHOLD, libc = -3, ctypes.CDLL(None)
assert libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)  # a block is mapped by itself, so what is freed is no longer counted
p = eval(sys.argv[2])
layout = cpu.memory_format(p.layout, p.rank)
x, w = (torch.randn(s).contiguous(memory_format=layout) for s in (p.input_shape, p.weight_shape))
cpu.forward(p, sys.argv[1], x, w, None)  # loads code
libc.malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present size
def kilobytes(field): return int(re.search(rf"^{field}:\\s+(\\d+)", Path("/proc/self/status").read_text(), re.M)[1])
before = kilobytes("VmRSS")
out = cpu.forward(p, sys.argv[1], x, w, None)
print(1024 * (kilobytes("VmHWM") - before) + x.nbytes)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists() or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="needs Linux's /proc, and glibc to return what is freed",
)
@pytest.mark.parametrize("layout", ("nchw", "channels_last"))
@pytest.mark.parametrize(
    "layer",
    ["16, 32, 64, (64, 64), (3, 5), (2, 3), (1, 2), dilation=(2, 1), groups=4", "1, 56, 1, (384, 384), 9, 3, 3"],
)
def test_large_layers_hold_no_more_memory_than_pytorchs_operator(layer: str, layout: str) -> None:
    """Input, result and what is held beside them at the peak.

    Without what malloc keeps of blocks that were freed: of that, the same call has more in some processes than in
    others, by where the heap begins.
    """

    def held(plan: str) -> int:
        return int(printed("-c", _PEAK, plan, f"Problem.make({layer}, layout={layout!r})"))

    theirs = held("native")
    assert max(held("shuffle") for _ in range(3)) <= 1.05 * theirs


def _images_and_bands(p: Problem) -> tuple[int, int]:
    images, bands = cpu.run._shares(p, cpu.run._geometry(p, None))
    return images, len(bands)


def test_a_small_batch_is_taken_in_few_shares() -> None:
    """Each share waits for its threads, which beside other programs takes longer than a small share's sums."""
    p = Problem.make(4, 128, 3, (128, 128), 4, 2, 1, layout="channels_last")
    assert _images_and_bands(p) == (2, 1)
    assert _images_and_bands(p.with_(batch=64)) == (36, 1)
    assert _images_and_bands(Problem.make(1, 56, 1, (128, 128), 9, 3, 3, layout="channels_last")) == (1, 1)


def test_a_large_image_is_taken_in_bands_where_pytorch_holds_little() -> None:
    p = Problem.make(2, 56, 1, (384, 384), 9, 3, 3, layout="channels_last")
    assert _images_and_bands(p) == (1, 2)
    assert _images_and_bands(p.with_(layout="nchw")) == (2, 1) and cpu.run.turned(p.with_(layout="nchw"))
    dilated = Problem.make(1, 32, 64, (256, 256), (3, 5), (2, 3), (1, 2), 0, 2, 4, layout="channels_last")
    assert _images_and_bands(dilated) == (1, 1)


@pytest.mark.parametrize("threads", (1, 2, 16))
@pytest.mark.parametrize("layout", ("nchw", "channels_last"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("size", [(512, 512), (1_000_000,), (32, 128, 128)], ids=str)
@pytest.mark.parametrize("kernel", (2, 3, 4))
def test_upsampling_of_one_channel_is_pytorchs(kernel, size, dtype, layout, threads) -> None:
    """A correlation of so few channels is many times slower than oneDNN's own kernel."""
    p = Problem.make(4, 1, 1, size, kernel, kernel, dtype=dtype, bias=True, layout=layout if len(size) > 1 else "nchw")
    assert rule.choose_forward(p, {torch.float32, torch.bfloat16}, threads)[0] == "native"


@pytest.mark.parametrize(
    "p",
    [
        Problem.make(2, 4, 4, (7, 5, 4), (4, 3, 5), (4, 1, 1), (4, 5, 2), (3, 0, 0), (2, 3, 1), 4, bias=True),
        Problem.make(1, 4, 16, (4, 4, 6), (5, 4, 3), (1, 1, 3), (2, 3, 2), (2, 0, 0), (3, 1, 3), 4, bias=True),
        Problem.make(1, 2, 4, (12, 6, 6), 4, 2, 1),
    ],
    ids=str,
)
def test_no_band_has_few_slices_in_half_precision(parts: None, p: Problem) -> None:
    """PyTorch's bfloat16 correlations of few slices read unwritten memory."""
    p = p.with_(dtype=torch.bfloat16, precision="bf16", layout="channels_last")
    x, w, b, _ = operands(p)
    assert _images_and_bands(p)[1] == 1
    for _ in range(20):
        poison(torch.bfloat16)
        assert forward_excess(p, cpu.forward(p, "shuffle", x, w, b), x, w, b) <= 1


def test_shares_of_little_work_are_left_to_pytorch() -> None:
    few = Problem.make(1, 32, 4, (256, 256), 9, 2, 4, 1, bias=True, layout="channels_last")
    assert cpu.run.shares(few) > 2 and rule.choose_forward(few, {torch.float32}, 2)[0] == "native"
    more = few.with_(batch=16, size=(512, 512))
    assert rule.choose_forward(more, {torch.float32}, 2)[0] == "shuffle"
    turned = Problem.make(1, 56, 3, (256, 256), 4, 2, 1, bias=True)
    assert cpu.run.turned(turned) and rule.choose_forward(turned, {torch.float32}, 2)[0] == "native"


def test_geometry_is_found_once_for_a_layer(parts: None) -> None:
    """Also that of bands, which are alike in all images."""
    for p in (Problem.make(3, 2, 4, (12, 6), 4, 2, 1), Problem.make(3, 2, 4, (12, 6), 4, 2, 1, layout="channels_last")):
        images, bands = _images_and_bands(p)
        cpu.run._geometry.cache_clear()
        cpu.forward(p, "shuffle", *operands(p)[:3])
        assert cpu.run._geometry.cache_info().misses == 1 + (bands if bands > 1 or images < p.batch else 0)


@pytest.mark.parametrize("layout", ("nchw", "channels_last"))
def test_a_large_layer_that_no_tap_reaches_is_planned(layout) -> None:
    """Its padding crops all rows with taps."""
    p = Problem.make(1, 256, 2, (2, 40_000), (1, 4), (2, 4), (1, 0), bias=True, layout=layout)
    plan, _ = rule.choose_forward(p, {torch.float32}, 2)
    x, w, b = (torch.ones(shape) for shape in (p.input_shape, p.weight_shape, (2,)))
    assert torch.equal(cpu.forward(p, plan, x, w, b), torch.ones(p.output_shape))


@given(p=gradient_problems())
@settings(max_examples=500 if EVERY else 150)
def test_both_backward_plans_compute_the_gradients(p: Problem) -> None:
    x, w, _, g = operands(p)
    for plan in cpu.BACKWARD_PLANS:
        grads = cpu.gradients(p, plan, g, x, w, (True, True, True))
        assert grads[0].shape == x.shape and grads[1].shape == w.shape
        assert gradient_excess(p, grads, g, x, w) <= 1, plan


@pytest.fixture(params=(False, True), ids=("small", "as if large"))
def planned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The plans that the rule takes for small layers as they are, and as if their outputs were large."""
    taken: set[str] = set()
    if request.param:
        for name in ("_SMALL_OUTPUT", "_SPLIT_OUTPUT", "_SMALL_WORK", "_FEW_ROW", "_SPLIT_CHANNELS", "_TURNED_TAPS"):
            monkeypatch.setattr(rule, name, 0)
        for name in ("_WEIGHTS_PER_OUTPUT", "_BLOWUP"):
            monkeypatch.setattr(rule, name, 1e9)
        monkeypatch.setattr(rule, "_SHARE_WORK", dict.fromkeys(rule._SHARE_WORK, 0))
    _forget_plans()
    yield taken
    _forget_plans()
    assert not request.param or ("shuffle" in taken and len(taken) > 2), taken


# Random layers reach these plans seldom: `flip`, `shuffle` with `split`, `unbiased` with `split`.
@example(p=Problem.make(2, 4, 6, (9, 8), 3, dtype=torch.bfloat16, bias=True))
@example(p=Problem.make(2, 4, 6, (9, 8), 3, 2, dtype=torch.bfloat16, bias=True, layout="channels_last"))
@example(p=Problem.make(2, 4, 6, (9, 8), 3, 2, bias=True, layout="channels_last"))
@example(p=Problem.make(2, 64, 1, (9, 8), 9, 3, bias=True))  # `shuffle` also where oneDNN has no half precision
@given(p=gradient_problems())
@settings(max_examples=10_000 if EVERY else 300)
def test_the_public_function_and_its_gradients(planned: set[str], p: Problem) -> None:
    """The plan that the planner chooses, through autograd, from operands that are not contiguous."""
    x, w, b, g = operands(p, seed=1)
    wide = torch.cat((x, x), dim=-1)[..., : x.shape[-1]].requires_grad_()
    w = w.clone().requires_grad_()
    out = OURS[p.rank](wide, w, b, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    plan = planner.plan(p, planner.cpu_device())
    planned.update((plan.forward, plan.backward))
    assert forward_excess(p, out.detach(), x, w.detach(), b, native=plan.forward == "native") <= 1
    grads = torch.autograd.grad(out, (wide, w), g)
    assert gradient_excess(p, grads, g, x, w.detach()) <= 1


def test_random_problems_reach_every_plan() -> None:
    """The property tests above mean nothing for a plan that their problems never admit."""
    seen: Counter[str] = Counter()

    @given(p=problems())
    @settings(max_examples=300, database=None)
    def count(p: Problem) -> None:
        seen.update(plan for plan in cpu.FORWARD_PLANS if cpu.refusal(p, plan) is None)

    count()
    assert set(seen) == set(cpu.FORWARD_PLANS)
    assert min(seen.values()) >= 3


@pytest.mark.parametrize("broken", [torch.zeros_like, lambda y: y * (1 + 2**-10), lambda y: y.roll(1, -1)])
def test_the_bound_catches_wrong_results(broken: object) -> None:
    """Zeros, an error of 2^-10, and a shift by one pixel are all beyond the bound."""
    p = Problem.make(2, 8, 6, (9, 7), 3, 2, 1, 1)
    x, w, b, g = operands(p)
    out = cpu.forward(p, "shuffle", x, w, b)
    assert forward_excess(p, out, x, w, b) <= 1
    assert forward_excess(p, broken(out), x, w, b) > 1
    grads = cpu.gradients(p, "split", g, x, w, (True, True, True))
    assert gradient_excess(p, grads, g, x, w) <= 1
    for which in range(3):
        wrong = [broken(grad) if i == which else grad for i, grad in enumerate(grads)]
        assert gradient_excess(p, wrong, g, x, w) > 1


NARROW = (
    Problem.make(3, 2, 1, (5, 1), (1, 5), (1, 2)),
    Problem.make(2, 2, 1, (2, 1), (4, 3), (1, 3), (0, 1)),
    Problem.make(1, 1, 16, (12, 1), 3, 3, 1),
    Problem.make(1, 3, 9, (5, 1, 1), (1, 3, 4), (3, 1, 4), (0, 1, 1), 0, 1, 3),
    Problem.make(2, 4, 8, (2, 8, 12), (3, 4, 4), (1, 4, 2), 1, 0, 1, 4),
    Problem.make(3, 64, 4, (8, 1), 2, (1, 2), (1, 0)),
)
"""Images whose gradients by PyTorch read unwritten memory, poisoned here."""
DEEP = tuple(
    Problem.make(1, *channels, (depth, 4, 4), (kernel, 1, 1), 1, (padding, 0, 0))
    for channels in ((1, 2), (2, 2), (16, 16))
    for depth, kernel, padding in ((4, 3, 2), (5, 4, 3), (6, 5, 3), (8, 7, 4))
)
"""The padding reaches half the depth: PyTorch's gradient for the weight is wrong (2.13, bfloat16, one thread)."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("p", NARROW + DEEP, ids=str)
def test_gradients_that_pytorchs_operator_computes_wrongly_are_sound(p: Problem, dtype: torch.dtype) -> None:
    p = p.with_(dtype=dtype, bias=True, layout="channels_last")
    x, w, b, g = operands(p)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    for _ in range(5):
        poison(dtype)
        out = OURS[p.rank](*leaves, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
        assert gradient_excess(p, torch.autograd.grad(out, leaves, g), g, x, w) <= 1
