"""Gradients of every order: which are computed, by whose kernels, and what; on a GPU by the kernels themselves.

Without a GPU the kernels are `standins`, behind the real planner, engine and autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import upconv
from conftest import EVERY, OURS, THEIRS, Call, assert_equal, make_call
from situations import BF16, differences
from standins import Data, Kernels, Weight
from strategies import excess, gradient_excess, operands, problems
from upconv import dispatch, reference
from upconv.bench.timing import precision_flags
from upconv.cuda import weights as packed
from upconv.problem import Problem

CUDA = pytest.mark.gpu
MASKS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
P = Problem.make(2, 4, 6, (5, 4), 3, 2, 1, 1, groups=2, bias=True, dtype=torch.float64)


def call(p: Problem, x: Tensor, w: Tensor, b: Tensor | None, functions: Any = OURS) -> Tensor:
    out: Tensor = functions[p.rank](x, w, b, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    return out


def operator(*args: Any) -> Tensor:
    """`torch.ops.upconv.conv_transpose`, which takes lists."""
    out: Tensor = torch.ops.upconv.conv_transpose(*(list(a) if isinstance(a, tuple) else a for a in args))
    return out


def leaves(p: Problem, mask: tuple[int, ...] = (1, 1, 1)) -> tuple[Tensor, Tensor, Tensor | None]:
    x, w, b, _ = operands(p)
    found = [None if t is None else t.requires_grad_(bool(m)) for t, m in zip((x, w, b), mask)]
    return found[0], found[1], found[2]  # type: ignore[return-value]


# --- first gradients -------------------------------------------------------------------------------------------------


@given(p=problems(), mask=st.sampled_from(MASKS))
@settings(max_examples=150)
def test_gradients_of_random_problems(kernels: Kernels, p: Problem, mask: tuple[int, ...]) -> None:
    x, w, b = leaves(p, mask)
    grad = operands(p)[3]
    wanted = [t for t in (x, w, b) if t is not None and t.requires_grad]
    if not wanted:
        return
    kernels.ran()
    with upconv.strict(True):
        found = iter(torch.autograd.grad(call(p, x, w, b), wanted, grad))
    grads = [next(found) if t is not None and t.requires_grad else None for t in (x, w, b)]
    assert gradient_excess(p, grads, grad, x, w) <= 1
    assert kernels.ran() == ["fwd", *(["grad-input"] if mask[0] else []), *(["grad-weight"] if mask[1] else [])]
    for t, g in zip((x, w, b), grads):
        assert g is None or (t is not None and g.dtype is t.dtype and g.shape == t.shape)


def test_strict_names_the_gradient_that_has_no_kernel(kernels: Kernels) -> None:
    kernels.lacking["grad-weight"] = "too odd for tiles"
    x, w, b = leaves(P)
    with upconv.strict(True):
        out = call(P, x, w, b)
        torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
        with pytest.raises(RuntimeError, match=r"strict.*gradient for the weight of 4->6 k3.*none of upconv's kernels"):
            out.sum().backward()


def test_weights_are_packed_for_each_pass(kernels: Kernels) -> None:
    """Also where the weight needs no gradient, since nothing says that it stays; a frozen one has one copy a pass."""
    x, w, b = leaves(P)
    for _ in range(3):
        out = call(P, x, w, b)
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        truth = reference.gradients(P, torch.ones_like(out), x, w)[0]
        assert reference.relative_error(grad, truth) < 1e-12, "a stale packing of the weight"
        with torch.no_grad():
            w.mul_(1.5)
    x, w, b = leaves(P, (1, 0, 1))
    kernels.log.clear()
    for _ in range(3):
        call(P, x, w, b).sum().backward()
    assert [pass_ for what, pass_ in kernels.log if what == "pack"] == 3 * ["fwd", "grad-input"]
    kernels.log.clear()
    packed.freeze(w)
    for _ in range(3):
        call(P, x, w, b).sum().backward()
    assert [pass_ for what, pass_ in kernels.log if what == "pack"] == ["fwd", "grad-input"]


# --- derivatives of any order ----------------------------------------------------------------------------------------

SMALL = problems(dtypes=(torch.float64,)).filter(lambda p: p.macs < 400 and p.batch * p.out_channels < 20)


@given(p=SMALL)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_gradcheck_and_gradgradcheck(kernels: Kernels, p: Problem) -> None:
    leaves = tuple(t.detach().requires_grad_() for t in operands(p)[:3] if t is not None)

    def function(*t: Tensor) -> Tensor:
        return call(p, t[0], t[1], t[2] if p.bias else None)

    assert gradcheck(function, leaves, fast_mode=True, check_batched_grad=True)
    assert gradgradcheck(function, leaves, fast_mode=True, check_batched_grad=True)
    kernels.ran()


def _second(functions: Any, mask: tuple[int, ...]) -> list[Tensor | None]:
    """Gradients of a function of the gradients that ``mask`` asks for, for input, weight and the output's gradient."""
    x, w, b = leaves(P)
    seed = operands(P)[3].requires_grad_()
    wanted = [t for t, m in zip((x, w, b), mask) if m]
    first = torch.autograd.grad(call(P, x, w, b, functions), wanted, seed, create_graph=True)
    value: Any = sum((g.square() * (i + 1)).sum() for i, g in enumerate(first))
    # The sum of squares is a function of the first gradients alone, each of which is linear in what is left.
    return list(torch.autograd.grad(value, [x, w, seed], allow_unused=True))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("functions", (OURS, (None, operator, operator)), ids=("function", "operator"))
def test_second_derivatives_of_some_gradients(kernels: Kernels, functions: Any, mask: tuple[int, ...]) -> None:
    """All operands require gradients, and some are asked for."""
    for a, b in zip(_second(functions, mask), _second(THEIRS, mask), strict=True):
        if a is None or b is None:
            assert all(t is None or not t.any() for t in (a, b))
        else:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * b.abs().max().item())


@pytest.fixture(params=(True, False), ids=("by the kernel", "by the engine"))
def rounding(request: pytest.FixtureRequest, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The stand-ins, whose engine takes autocast's float32 weights as a GPU's does."""
    monkeypatch.setattr(dispatch, "ROUNDING", ("cpu",))
    for stand_in in (Data, Weight):
        monkeypatch.setattr(stand_in, "casts", request.param)
    return kernels


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("asked", (("input", "weight", "bias"), ("input",), ("weight",), ("bias",)), ids=str)
def test_weights_that_autocast_leaves_to_the_engine(
    asked: tuple[str, ...], dtype: torch.dtype, bias: bool, rounding: Kernels
) -> None:
    """The same output as of a rounded weight, to the bit; gradients in float32, of float64 within 16-bit operands."""
    if asked == ("bias",) and not bias:
        pytest.skip("there is none")
    call = make_call((2, 4, 5, 6), (4, 3, 3, 3), bias, stride=2, padding=1)
    operands = {"input": call.input, "weight": call.weight, "bias": call.bias}
    leaves = {name: operands[name] for name in asked if operands[name] is not None}
    for name, t in operands.items():
        if t is not None:
            t.requires_grad_(name in asked)
    with torch.autocast("cpu", dtype=dtype):
        out = call.run(OURS)
    assert out.dtype is dtype and "fwd" in rounding.ran()
    rounded = [None if t is None else t.detach().to(dtype) for t in operands.values()]
    assert_equal(out.detach(), upconv.conv_transpose2d(*rounded, **call.kwargs))  # type: ignore[arg-type]
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    p = Problem.make(2, 4, 3, (5, 6), 3, 2, 1, bias=bias)
    truth = dict(zip(operands, reference.gradients(p, grad, rounded[0], rounded[1])))  # type: ignore[arg-type]
    for (name, leaf), g in zip(leaves.items(), found):
        assert g.dtype is torch.float32 and g.shape == leaf.shape
        rounded_to_16_bits = name == "input" or (name == "weight" and not Weight.casts)
        assert reference.relative_error(g, truth[name]) < (2e-2 if rounded_to_16_bits else 1e-5)


def test_rounded_weights_are_kept_of_frozen_ones(rounding: Kernels) -> None:
    layer, x = upconv.ConvTranspose2d(4, 6, 3, stride=2).eval(), torch.randn(2, 4, 5, 5)

    def packs() -> int:
        rounding.log.clear()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x)
        with torch.no_grad():
            rounded = (t.detach().bfloat16() for t in (x, layer.weight, layer.bias))
            assert_equal(out, upconv.conv_transpose2d(*rounded, stride=2))
        return rounding.log[: rounding.log.index(("run", "fwd"))].count(("pack", "fwd"))

    assert [packs(), packs()] == [1, 1]
    packed.freeze(layer.weight)
    assert [packs(), packs()] == [1, 0 if Data.casts else 1]
    with torch.no_grad():
        layer.bias.mul_(2)  # no part of what is kept
    assert packs() == (0 if Data.casts else 1)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert [packs(), packs()] == [1, 1]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_a_gradient_penalty_under_autocast(dtype: torch.dtype, rounding: Kernels) -> None:
    """The first gradients are computed inside the region; float64 stays float64."""
    call, found = make_call((2, 4, 5, 6), (4, 3, 3, 3), stride=2, dtype=dtype), []
    for functions in (OURS, THEIRS):
        x, w = call.input.detach().requires_grad_(), call.weight.detach().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = Call(x, w, call.bias, call.kwargs).run(functions)
            first = torch.autograd.grad(out.to(dtype).square().sum(), (x, w), create_graph=True)
            penalty = first[0].to(dtype).square().sum()
        second = torch.autograd.grad(penalty, (x, w))
        found.append([t.detach().contiguous() for t in (*first, *second)])
    assert not differences(*found, BF16)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@contextmanager
def ours_alone(precision: str) -> Iterator[None]:
    """The flags of a precision, and an error of calls that PyTorch would compute."""
    with precision_flags(precision), upconv.strict(True):  # type: ignore[arg-type]
        yield


def _on_gpu(p: Problem) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Output and gradients by kernels of ours alone, and what they are of: the output's gradient, and the operands."""
    x, w, b, g = (None if t is None else t.cuda() for t in operands(p))
    assert x is not None and w is not None and g is not None
    made = [t.requires_grad_() for t in (x, w, b) if t is not None]
    with ours_alone(p.precision):
        out = call(p, made[0], made[1], made[2] if p.bias else None)
        return [out.detach(), *torch.autograd.grad(out, made, g)], (g, x, w, b)


def _assert_accurate(p: Problem, found: list[Tensor], g: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> None:
    """In IEEE float32 three products of TF32 parts leave out that of the two low parts: 2**-22 of each."""
    truth = reference.forward(p, x, w, b), *reference.gradients(p, g, x, w)
    size = reference.forward(p, x.abs(), w.abs(), None if b is None else b.abs())
    magnitude = size, *reference.gradients(p, g.abs(), x.abs(), w.abs())
    counts = p.taps * p.in_channels + 1, p.taps * p.out_channels, p.batch * x[0, 0].numel(), p.batch * g[0, 0].numel()
    for i, (a, t, m, terms) in enumerate(zip(found, truth, magnitude, counts)):
        assert excess(a, t, m, terms + 8, tf32=p.precision == "tf32" and i < 3) <= 1


@CUDA
@given(p=problems())
@settings(max_examples=2000 if EVERY else 40)  # each compiles kernels of its own
def test_gpu_random_problems(p: Problem) -> None:
    found, (g, x, w, b) = _on_gpu(p)
    _assert_accurate(p, found, g, x, w, b)
    again, _ = _on_gpu(p)
    assert all(torch.equal(a, b) for a, b in zip(found, again)), "not the same bits twice"
    theirs = [t.detach().requires_grad_() for t in (x, w)]
    out = call(p, *theirs, b, THEIRS)  # type: ignore[misc]
    assert found[0].stride() == out.stride()
    for a, b in zip(found[1:], torch.autograd.grad(out, theirs, g)):
        assert a.dtype is b.dtype
        # PyTorch goes by the output's gradient; where that is both formats at once, so may be the result.
        assert a.stride() == b.stride() or g.is_contiguous()
    if p.dtype is torch.float32:
        single = p.with_(precision="tf32")
        found, operands_ = _on_gpu(single)
        _assert_accurate(single, found, *operands_)


@CUDA
def test_gpu_peak_memory_is_at_most_pytorchs() -> None:
    peaks = {}
    for home in (upconv, nn):
        layer = home.ConvTranspose2d(64, 64, 4, 2, 1).cuda()  # type: ignore[attr-defined]
        x = torch.randn(8, 64, 128, 128, device="cuda", requires_grad=True)
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(layer(x).sum(), (x, layer.weight, layer.bias))
            torch.cuda.synchronize()
            peaks[home] = torch.cuda.max_memory_allocated() - before
    assert peaks[upconv] <= peaks[nn] + (8 << 20)
