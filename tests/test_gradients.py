"""Gradients of every order: which are computed, by whose kernels, and what; on a GPU by the kernels themselves.

Without a GPU the kernels are stand-ins that compute each pass by the float64 reference and keep a log, behind the real
planner, engine and autograd.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import upconv
from conftest import OURS, THEIRS, Call, _forget_plans, assert_close, assert_equal, forced_plans, make_call
from strategies import excess, gradient_excess, operands, problems
from upconv import cpu, dispatch, planner, reference
from upconv.cuda import engine, families, family, gpu, packs
from upconv.cuda import weights as packed
from upconv.cuda.compile import jit
from upconv.planner import Device
from upconv.problem import Pass, Problem

H200 = Device("cuda", gpu=gpu.H200)
CUDA = pytest.mark.gpu
MASKS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
P = Problem.make(2, 4, 6, (5, 4), 3, 2, 1, 1, groups=2, bias=True, dtype=torch.float64)


# --- stand-ins for the kernels ---------------------------------------------------------------------------------------

Log = list[tuple[str, str]]


@dataclass(frozen=True)
class StandIn(family.Defaults):
    """A choice that computes its pass by the reference; the log holds ``(what, pass)``."""

    problem: Problem
    log: Log = field(compare=False)
    family: str = "stand-in"
    seconds: float = 1e-3
    summary: str = "one tile"
    bound: str = "nothing"

    def sources(self) -> tuple[packs.Unit, ...]:
        return (packs.Unit(f"{self.problem.pass_} {self.problem.kernel}", f"// {self.problem}", ()),)

    def prepare(self, device: int) -> Any:
        self.log.append(("prepare", self.problem.pass_))
        return Weight(self) if self.problem.pass_ == "grad-weight" else Data(self)

    def check(self, *tensors: Tensor) -> None:
        """What kernels rely on."""
        layout = cpu.memory_format(self.problem.layout, self.problem.rank)
        assert all(t.is_contiguous(memory_format=layout) and t.dtype is self.problem.dtype for t in tensors)


class Data(family.Prepared):
    """``fwd`` and ``grad-input``."""

    def __init__(self, choice: StandIn) -> None:
        self.choice = self.packing = choice

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        p = self.choice.problem
        self.choice.log.append(("pack", p.pass_))
        assert weight.dtype is p.dtype or (self.casts and weight.dtype is torch.float32)
        assert bias is None or weight.dtype is bias.dtype is torch.float32
        parts = [t.detach().to(p.dtype).flatten() for t in (weight, bias) if t is not None]
        return torch.cat(parts)

    def run(self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False) -> None:
        p = self.choice.problem
        self.choice.log.append(("run", p.pass_))
        self.choice.check(x, out)
        count = math.prod(p.weight_shape)
        if bias is not None and bias.dtype is not p.dtype:  # it went with the weights
            bias = packed[count:]
            assert len(bias) == p.out_channels
        packed = packed[:count].view(p.weight_shape)
        if p.pass_ == "fwd":
            out.copy_(reference.forward(p, x, packed, bias))
        else:
            assert bias is None
            out.copy_(reference.gradients(p, x, torch.zeros(p.input_shape), packed)[0])


class Weight(family.PreparedWeight):
    """``grad-weight``."""

    def __init__(self, choice: StandIn) -> None:
        self.choice = choice

    def run(self, x: Tensor, grad: Tensor, out: Tensor) -> None:
        p = self.choice.problem
        self.choice.log.append(("run", p.pass_))
        self.choice.check(x, grad)
        assert out.dtype is p.dtype or (self.casts and out.dtype is torch.float32)
        out.copy_(reference.gradients(p, grad, x, torch.zeros(p.weight_shape))[1])


@dataclass
class Kernels:
    """The log of all stand-ins, the passes that were planned, and those that have none (with the reason why)."""

    log: Log = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)

    def ran(self) -> list[str]:
        """The passes that ran since the last question, the forwards first."""
        found = sorted(pass_ for what, pass_ in self.log if what == "run")
        self.log.clear()
        return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Every call on CPU tensors is planned as for a GPU whose kernels are the stand-ins."""
    found = Kernels()

    def choose(p: Problem, g: gpu.Gpu, general: bool = False) -> dict[str, Any]:
        found.planned.append(p.pass_)
        return {"stand-in": found.lacking.get(p.pass_) or StandIn(p, found.log)}

    plans: dict[Problem, planner.Plan] = {}
    _forget_plans()
    monkeypatch.setattr(families, "choose", choose)
    monkeypatch.setattr(engine, "_current_device", lambda: -1)
    monkeypatch.setattr(engine, "_capturing", lambda: False)
    monkeypatch.setattr(packed, "current_stream", lambda index: 0)
    monkeypatch.setattr(packed, "_record", lambda index: 0)
    monkeypatch.setattr(planner, "plan", lambda p, d: plans.setdefault(p, planner._plan_cuda(p, H200)))
    yield found
    monkeypatch.undo()
    _forget_plans()
    packed.frozen.clear()


def call(p: Problem, x: Tensor, w: Tensor, b: Tensor | None, functions: Any = OURS) -> Tensor:
    out: Tensor = functions[p.rank](x, w, b, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    return out


def leaves(p: Problem, mask: tuple[int, ...] = (1, 1, 1), seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    x, w, b, _ = operands(p, seed)
    found = [None if t is None else t.requires_grad_(bool(m)) for t, m in zip((x, w, b), mask)]
    return found[0], found[1], found[2]  # type: ignore[return-value]


# --- first gradients -------------------------------------------------------------------------------------------------


@given(p=problems(), mask=st.sampled_from(MASKS))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_gradients_of_random_problems(kernels: Kernels, p: Problem, mask: tuple[int, ...]) -> None:
    x, w, b = leaves(p, mask)
    grad = operands(p)[3]
    wanted = [t for t in (x, w, b) if t is not None and t.requires_grad]
    if not wanted:
        return
    kernels.ran()
    found = iter(torch.autograd.grad(call(p, x, w, b), wanted, grad))
    grads = [next(found) if t is not None and t.requires_grad else None for t in (x, w, b)]
    assert gradient_excess(p, grads, grad, x, w) <= 1
    assert kernels.ran() == ["fwd", *(["grad-input"] if mask[0] else []), *(["grad-weight"] if mask[1] else [])]
    for t, g in zip((x, w, b), grads):
        assert g is None or (t is not None and g.dtype is t.dtype and g.shape == t.shape)


@pytest.mark.parametrize("mask", MASKS)
def test_nothing_is_computed_planned_or_loaded_that_nobody_asked(kernels: Kernels, mask: tuple[int, ...]) -> None:
    x, w, b = leaves(P, mask)
    out = call(P, x, w, b)
    assert kernels.planned == ["fwd"], "who only wants the output pays for planning gradients"
    kernels.log.clear()
    out.sum().backward()
    asked = [name for name, m in zip(("grad-input", "grad-weight"), mask) if m]
    assert sorted(kernels.planned) == ["fwd", *asked]
    assert sorted(pass_ for what, pass_ in kernels.log if what == "prepare") == asked
    assert [t.grad is not None for t in (x, w, b) if t is not None] == [bool(m) for m in mask]


def test_the_gradients_have_the_outputs_layout(kernels: Kernels) -> None:
    """On CUDA as cuDNN's: channels_last where either operand is."""
    last = torch.channels_last
    for x_last, w_last in ((0, 0), (1, 0), (0, 1), (1, 1)):
        x, w, b, _ = operands(P.with_(dtype=torch.float32, precision="ieee"))
        x = x.contiguous(memory_format=last if x_last else torch.contiguous_format).requires_grad_()
        w = w.contiguous(memory_format=last if w_last else torch.contiguous_format).requires_grad_()
        out = call(P, x, w, b)
        grads = torch.autograd.grad(out, (x, w), torch.randn(out.shape))  # NCHW: the kernels get a copy where they must
        for t in (out, *grads):
            assert t.is_contiguous(memory_format=last) == bool(x_last or w_last)


@pytest.mark.parametrize("mask", MASKS)
def test_only_what_autograd_grad_asks_for_is_computed(kernels: Kernels, mask: tuple[int, ...]) -> None:
    """All operands require gradients, and some are wanted: directly, behind another operation, or accumulated."""
    x, w, b = leaves(P)
    assert b is not None
    inner = [t * 2 for t in (x, w, b)]
    outs = [call(P, x, w, b), call(P, inner[0], inner[1], inner[2])]
    asked = [name for name, m in zip(("grad-input", "grad-weight"), mask) if m]
    for out, operands_ in zip((*outs, outs[1]), ((x, w, b), (x, w, b), inner)):
        kernels.ran()
        wanted = [t for t, m in zip(operands_, mask) if m]
        found = torch.autograd.grad(out, wanted, torch.ones_like(out), retain_graph=True)
        assert kernels.ran() == asked
        assert all(g.abs().max() > 0 for g in found)
    outs[0].sum().backward(inputs=[t for t, m in zip((x, w, b), mask) if m])
    assert kernels.ran() == asked
    assert [t.grad is not None for t in (x, w, b)] == [bool(m) for m in mask]


@pytest.mark.parametrize("lacking", ("grad-input", "grad-weight"))
def test_a_gradient_without_a_kernel_is_pytorchs_alone(
    kernels: Kernels, lacking: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.lacking[lacking] = "too odd for tiles"
    masks: list[tuple[bool, ...]] = []
    right = cpu.gradients

    def spy(p: Problem, plan: str, *args: Any) -> Any:
        assert plan == "native"
        masks.append(args[-1])
        return right(p, plan, *args)

    monkeypatch.setattr(cpu, "gradients", spy)
    x, w, b = leaves(P)
    assert b is not None
    grad = operands(P)[3]
    grads = torch.autograd.grad(call(P, x, w, b), (x, w, b), grad)
    assert gradient_excess(P, grads, grad, x, w) <= 1
    first = lacking == "grad-input"
    assert masks == [(first, not first, False)]
    assert kernels.ran() == ["fwd", "grad-weight" if first else "grad-input"]
    plan = planner.plan(P, H200)
    assert plan.engine(lacking) == "torch" and plan.engine("step") == "cuda:stand-in"


def test_strict_names_the_gradient_that_has_no_kernel(kernels: Kernels) -> None:
    kernels.lacking["grad-weight"] = "too odd for tiles"
    x, w, b = leaves(P)
    try:
        with upconv.strict(True):
            out = call(P, x, w, b)
            torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
            with pytest.raises(
                RuntimeError, match=r"strict.*gradient for the weight of 4->6 k3.*none of upconv's kernels"
            ):
                out.sum().backward()
    finally:
        upconv.strict(False)


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


def test_a_failing_gradient_names_its_pass(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("CUDA said no")

    monkeypatch.setattr(Weight, "run", fail)
    x, w, b = leaves(P)
    with pytest.raises(RuntimeError, match=r"grad-weight by cuda:stand-in on cuda:-1 \(one tile\): CUDA said no"):
        call(P, x, w, b).sum().backward()


def test_gradients_of_any_strides(kernels: Kernels) -> None:
    x, w, b = leaves(P)
    assert b is not None
    out = call(P, x, w, b)
    for grad in (
        torch.ones(1, dtype=torch.float64).expand(out.shape),
        torch.randn(*out.shape[:2], *out.shape[:1:-1], dtype=torch.float64).mT,
        torch._neg_view(torch.randn_like(out)),
        torch.randn(2 * out.shape[0], *out.shape[1:], dtype=torch.float64)[::2],
    ):
        grads = torch.autograd.grad(out, (x, w, b), grad, retain_graph=True)
        assert gradient_excess(P, grads, grad.resolve_neg(), x, w) <= 1


@pytest.mark.parametrize("batch", (0, 2))
def test_empty_and_not(kernels: Kernels, batch: int) -> None:
    results = []
    for functions in (OURS, THEIRS):
        torch.manual_seed(0)
        x = torch.randn(batch, 4, 5, 4, requires_grad=True)
        w, b = torch.randn(4, 3, 3, 3, requires_grad=True), torch.randn(6, requires_grad=True)
        p = P.with_(dtype=torch.float32, precision="ieee", batch=batch)
        call(p, x, w, b, functions).square().sum().backward()
        results.append((x.grad, w.grad, b.grad))
    for ours, theirs in zip(*results):
        assert ours is not None and theirs is not None
        assert_close(ours, theirs, length=512)


def test_modules_frozen_in_part_and_checkpointed(kernels: Kernels) -> None:
    model = nn.Sequential(
        upconv.ConvTranspose2d(4, 6, 3, stride=2), nn.ReLU(), upconv.ConvTranspose2d(6, 2, 3)
    ).double()
    model[0].requires_grad_(False)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    kernels.ran()
    model(x).sum().backward()
    assert kernels.ran() == ["fwd", "fwd", "grad-weight"], "nothing behind the first trained layer needs a gradient"
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()
    for p, g in zip(model.parameters(), wanted):
        assert (p.grad is None) == (g is None)
        if g is not None:
            torch.testing.assert_close(p.grad, g)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast_and_a_scaled_loss(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = upconv.ConvTranspose2d(4, 6, 3, stride=2)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with torch.autocast("cpu", dtype=dtype):
        out = layer(x)
        loss = out.float().square().mean()
    assert out.dtype is dtype
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert kernels.ran() == ["fwd", "grad-input", "grad-weight"]
    truth = [t.detach().double().requires_grad_() for t in (layer.weight, layer.bias)]
    exact = nn.functional.conv_transpose2d(x.detach().double(), *truth, 2).square().mean()
    for t, g in zip((layer.weight, layer.bias), torch.autograd.grad(exact, truth)):
        assert t.grad is not None and t.grad.dtype is torch.float32
        assert reference.relative_error(t.grad, g) < 0.02


# --- derivatives of any order ----------------------------------------------------------------------------------------

SMALL = problems(dtypes=(torch.float64,)).filter(lambda p: p.macs < 400 and p.batch * p.out_channels < 20)


def _function(p: Problem) -> Any:
    return lambda *t: call(p, t[0], t[1], t[2] if p.bias else None)


def _checkable(p: Problem, device: str = "cpu") -> tuple[Tensor, ...]:
    return tuple(t.detach().to(device).requires_grad_() for t in operands(p)[:3] if t is not None)


@given(p=SMALL)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_gradcheck_and_gradgradcheck(kernels: Kernels, p: Problem) -> None:
    given_ = _checkable(p)
    assert gradcheck(_function(p), given_, fast_mode=True)
    assert gradgradcheck(_function(p), given_, fast_mode=True)
    kernels.ran()


@given(p=SMALL, plan=st.sampled_from([("shuffle", "split"), ("flip", "split"), ("shuffle", "native")]))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_gradgradcheck_of_the_cpu_engine(p: Problem, plan: tuple[str, str]) -> None:
    with forced_plans(*plan):
        assert gradgradcheck(_function(p), _checkable(p), fast_mode=True)


def _second(p: Problem, functions: Any, mask: tuple[int, ...] = (1, 1, 1)) -> list[Tensor]:
    """Gradients of a function of the gradients, for input, weight and the output's gradient."""
    x, w, b = leaves(p, mask)
    seed = operands(p)[3].requires_grad_()
    wanted = [t for t in (x, w, b) if t is not None and t.requires_grad]
    first = torch.autograd.grad(call(p, x, w, b, functions), wanted, seed, create_graph=True)
    value: Any = sum((g.square() * (i + 1)).sum() for i, g in enumerate(first))
    # The sum of squares is a function of the first gradients alone, each of which is linear in what is left.
    return list(torch.autograd.grad(value, [t for t in (x, w) if t.requires_grad] + [seed], allow_unused=True))


@pytest.mark.parametrize("mask", [m for m in MASKS if m[0] or m[1]])
def test_second_derivatives_are_forwards_and_gradients_of_ours(kernels: Kernels, mask: tuple[int, ...]) -> None:
    found, wanted = _second(P, OURS, mask), None
    ran = kernels.ran()
    with forced_plans():
        wanted = _second(P, THEIRS, mask)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None or not b.any())
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * b.abs().max().item())
    # Of I(g, w): F for g, W for w. Of W(x, g): I for x, F for g. A frozen operand's is not computed.
    second = {
        (1, 1): ["fwd", "grad-weight", "grad-input", "fwd"],
        (1, 0): ["fwd"],
        (0, 1): ["fwd"],
    }[mask[:2]]
    first = [name for name, m in zip(("grad-input", "grad-weight"), mask) if m]
    assert sorted(ran) == sorted(["fwd", *first, *second])


def test_third_derivatives(kernels: Kernels) -> None:
    p = P.with_(output_padding=(0, 0))  # PyTorch 2.13 has no third derivative with one
    results = []
    for functions in (OURS, THEIRS):
        x, w, b = leaves(p)
        value: Any = call(p, x, w, b, functions).pow(3).sum()
        for _ in range(2):
            grads = torch.autograd.grad(value, (x, w), create_graph=True)
            value = sum(g.square().sum() for g in grads)
        results.append(torch.autograd.grad(value, (x, w)))
    for a, b_ in zip(*results):
        torch.testing.assert_close(a, b_, rtol=1e-9, atol=1e-9 * b_.abs().max().item())


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
    layer, x = upconv.ConvTranspose2d(4, 6, 3, stride=2), torch.randn(2, 4, 5, 5)

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


def test_a_float32_weight_outside_of_autocast_is_pytorchs_error(rounding: Kernels) -> None:
    call = make_call((2, 4, 5, 6), (4, 3, 3, 3))
    x = call.input.bfloat16()
    with pytest.raises(RuntimeError) as theirs:
        torch.conv_transpose2d(x, call.weight, call.bias)
    with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
        upconv.conv_transpose2d(x, call.weight, call.bias)


def test_float64_under_a_float32_autocast_is_pytorchs_error(rounding: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU autocast's dtype may be float32, which leaves a float64 input and a float32 weight apart."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float32)
    call = make_call((2, 4, 5, 6), (4, 3, 3, 3))
    with pytest.raises(RuntimeError) as theirs:
        torch.conv_transpose2d(call.input.double(), call.weight, call.bias)
    with pytest.raises(RuntimeError, match=re.escape(str(theirs.value))):
        upconv.conv_transpose2d(call.input.double(), call.weight, call.bias)


def test_the_second_derivative_of_rounded_weights(rounding: Kernels) -> None:
    call = make_call((2, 4, 5, 6), (4, 3, 3, 3), stride=2)
    found = []
    for functions in (OURS, THEIRS):
        x, w = call.input.detach().requires_grad_(), call.weight.detach().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = Call(x, w, call.bias, call.kwargs).run(functions)
            (g,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
            penalty = g.float().square().sum()
        found.append(torch.autograd.grad(penalty, (x, w)))
    assert {t.dtype for t in found[0]} == {torch.float32}
    for ours, theirs in zip(*found):
        assert reference.relative_error(ours, theirs) < 3e-2


def test_a_gradient_penalty_under_autocast(kernels: Kernels) -> None:
    """WGAN-GP's second derivative, whose backward runs inside autocast as PyTorch's does: in the tensors' own dtype."""
    layer = upconv.ConvTranspose2d(4, 6, 3, stride=2).double()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        grad.norm().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float64
    weight = layer.weight.detach().clone().requires_grad_()
    out = nn.functional.conv_transpose2d(x, weight, layer.bias, 2)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    grad.norm().backward()
    assert weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, weight.grad)


def test_hooks_and_retained_graphs(kernels: Kernels) -> None:
    x, w, b = leaves(P)
    seen: list[Tensor] = []
    out = call(P, x, w, b)
    out.register_hook(lambda g: g * 2)
    x.register_hook(seen.append)
    first = torch.autograd.grad(out.sum(), w, retain_graph=True)[0]
    out.sum().backward()
    assert w.grad is not None and x.grad is not None
    assert torch.equal(w.grad, first)
    assert torch.equal(seen[-1], x.grad)
    truth = reference.gradients(P, torch.full_like(out, 2.0), x, w)
    assert reference.relative_error(w.grad, truth[1]) < 1e-12


def test_vmap_over_gradients_is_pytorchs(kernels: Kernels) -> None:
    x, w, b = leaves(P)
    out = call(P, x, w, b)
    batch = torch.randn(3, *out.shape, dtype=torch.float64)
    kernels.ran()
    (found,) = torch.autograd.grad(out, x, batch, is_grads_batched=True)
    assert kernels.ran() == []
    for g, f in zip(batch, found):
        assert reference.relative_error(f, reference.gradients(P, g, x, w)[0]) < 1e-12


def test_no_graph_and_nothing_saved_in_inference(kernels: Kernels) -> None:
    x, w, b = leaves(P)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not call(P, x, w, b).requires_grad
    assert kernels.planned == ["fwd"]


@pytest.mark.parametrize("mask", MASKS)
def test_the_operators_double_backward(kernels: Kernels, mask: tuple[int, ...]) -> None:
    arguments = [list(P.stride), list(P.padding), list(P.output_padding), P.groups, list(P.dilation)]
    results = []
    for ours in (True, False):
        x, w, b = leaves(P)
        seed = operands(P)[3].requires_grad_()
        assert b is not None
        if ours:
            out = torch.ops.upconv.conv_transpose(x, w, b, *arguments)
        else:
            out = call(P, x, w, b, THEIRS)
        wanted = [t for t, m in zip((x, w, b), mask) if m]
        first = torch.autograd.grad(out, wanted, seed, create_graph=True)
        value: Any = sum((g.square() * (i + 1)).sum() for i, g in enumerate(first))
        results.append(torch.autograd.grad(value, (x, w, seed), allow_unused=True))
    for a, b_ in zip(*results):
        if b_ is None or not b_.any():
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a, b_, rtol=1e-10, atol=1e-10 * b_.abs().max().item())


# --- on a GPU --------------------------------------------------------------------------------------------------------


def _flags(precision: str) -> Any:
    from upconv.bench.timing import precision_flags

    return precision_flags(precision)  # type: ignore[arg-type]


def _gpu_gradients(p: Problem, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients by kernels of ours alone, and the operands (with the output's gradient ahead) on the GPU."""
    x, w, b, g = (None if t is None else t.cuda() for t in operands(p, seed))
    assert x is not None and w is not None and g is not None
    made = [t.requires_grad_() for t in (x, w, b) if t is not None]
    try:
        with upconv.strict(True):
            out = call(p, made[0], made[1], made[2] if p.bias else None)
            return list(torch.autograd.grad(out, made, g)), [g, x, w]
    finally:
        upconv.strict(False)


def _tf32_excess(p: Problem, grads: list[Tensor], g: Tensor, x: Tensor, w: Tensor) -> float:
    """Both factors rounded to 11 bits: ``2 * 2**-11`` of each product, and the roundings of a float32 sum."""
    truth = reference.gradients(p, g, x, w)
    magnitude = reference.gradients(p, g.abs(), x.abs(), w.abs())
    return max(
        ((a.double() - t).abs() / (2.1 * 2**-11 * m + 1e-30)).max().item()
        for a, t, m in zip(grads[:2], truth, magnitude)
    )


def test_warmup_for_training_has_the_gradients_too(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "cubin", lambda source, arch, label="": b"")
    model = nn.Sequential(upconv.ConvTranspose2d(4, 6, 3, 2), upconv.ConvTranspose2d(6, 4, 5)).double()
    assert upconv.warmup(model, (2, 4, 5, 5)) == ["fwd (3, 3) for sm_90a", "fwd (5, 5) for sm_90a"]
    more = upconv.warmup(model, (2, 4, 5, 5), training=True)  # although the forward's kernels are loaded
    assert more == [f"{pass_} ({k}, {k}) for sm_90a" for pass_ in ("grad-input", "grad-weight") for k in (3, 5)]
    assert upconv.warmup(model, (2, 4, 5, 5), training=True) == []
    kernels.log.clear()
    model(torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert kernels.log and all(what != "prepare" for what, _ in kernels.log)


@CUDA
@given(p=problems())
@settings(max_examples=40, deadline=None)  # each compiles kernels of its own
def test_gpu_random_problems(p: Problem) -> None:
    with _flags("ieee"):
        grads, (g, x, w) = _gpu_gradients(p)
        truth = reference.gradients(p, g, x, w)
        magnitude = reference.gradients(p, g.abs(), x.abs(), w.abs())
        counts = (p.taps * p.out_channels, p.batch * x[0, 0].numel(), p.batch * g[0, 0].numel())
        for a, t, m, terms in zip(grads, truth, magnitude, counts):
            # Three products of TF32 parts leave out that of the two low parts: 2**-22 of each.
            assert excess(a, t, m, terms + 8) <= 1
        again, _ = _gpu_gradients(p)
        assert all(torch.equal(a, b) for a, b in zip(grads, again)), "not the same bits twice"
        theirs = [t.requires_grad_() for t in (x.detach(), w.detach())]
        bias = torch.zeros(p.out_channels, dtype=p.dtype, device="cuda") if p.bias else None
        for a, b in zip(grads, torch.autograd.grad(call(p, *theirs, bias, THEIRS), theirs, g)):  # type: ignore[misc]
            assert a.dtype is b.dtype
            # PyTorch goes by the output's gradient; where that is both formats at once, so may be the result.
            assert a.stride() == b.stride() or g.is_contiguous()
    if p.dtype is torch.float32:
        with _flags("tf32"):
            grads, (g, x, w) = _gpu_gradients(p)
            assert _tf32_excess(p, grads, g, x, w) <= 1


LAYERS = [
    Problem.make(2, 64, 32, (33, 47), 4, 2, 1),
    Problem.make(2, 48, 40, (31, 64), (3, 7), 1, (1, 3), bias=True),
    Problem.make(2, 32, 64, (17, 24), 3, 5, 1, dilation=2),
    Problem.make(2, 32, 64, (13, 24), (3, 5), (2, 3), (1, 2), dilation=(2, 1), groups=4),
    Problem.make(2, 64, 64, (20, 20), 4, 2, 1, groups=64),
    Problem.make(2, 56, 1, (24, 24), 9, 3, 4, 2),
    Problem.make(2, 64, 3, (24, 24), 4, 2, 1, bias=True),
    Problem.make(2, 128, 64, (200,), 16, 8, 4),
    Problem.make(2, 32, 16, (6, 10, 12), (3, 5, 7)),
    Problem.make(1, 32, 32, (8, 9, 16), 3, 2, 1),
    Problem.make(1, 21, 21, (12, 12), 16, 8, 4, groups=21),
]


@CUDA
@pytest.mark.parametrize("layout", ("nchw", "channels_last"))
@pytest.mark.parametrize("precision", ("tf32", "ieee", "bf16", "fp16", "fp64"))
@pytest.mark.parametrize("number", range(len(LAYERS)))
def test_gpu_layers_of_models(number: int, precision: str, layout: str) -> None:
    """Sizes at which tiles are full, with odd rests."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(precision, torch.float32)
    p = LAYERS[number].with_(dtype=dtype, precision=precision, layout=layout)
    if p.rank == 1 and layout == "channels_last":
        return
    with _flags(precision):
        grads, (g, x, w) = _gpu_gradients(p)
    if precision == "tf32":
        assert _tf32_excess(p, grads, g, x, w) <= 1
    else:
        truth, magnitude = reference.gradients(p, g, x, w), reference.gradients(p, g.abs(), x.abs(), w.abs())
        for a, t, m in zip(grads, truth, magnitude):
            assert excess(a, t, m, 4096) <= 1


@CUDA
@given(p=SMALL)
@settings(max_examples=10, deadline=None)
def test_gpu_gradcheck_and_gradgradcheck(p: Problem) -> None:
    given_ = _checkable(p, "cuda")
    assert gradcheck(_function(p), given_, fast_mode=True)
    assert gradgradcheck(_function(p), given_, fast_mode=True)


@CUDA
@pytest.mark.parametrize("dtype", (None, torch.bfloat16, torch.float16), ids=str)
def test_gpu_training_follows_pytorchs(dtype: torch.dtype | None) -> None:
    """Twenty steps of SGD from the same weights: the same losses within the precision's roundings."""
    losses = []
    for home in (upconv, nn):
        torch.manual_seed(0)
        layers = [home.ConvTranspose2d(16, 32, 4, 2, 1), nn.ReLU(), home.ConvTranspose2d(32, 8, 3)]  # type: ignore[attr-defined]
        model = nn.Sequential(*layers).cuda()
        x, target = torch.randn(4, 16, 12, 12, device="cuda"), torch.randn(4, 8, 26, 26, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        history = []
        for _ in range(20):
            optimizer.zero_grad()
            with nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype):
                loss = (model(x) - target).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            history.append(loss.item())
        losses.append(history)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3 if dtype is None else 2e-2)
    assert losses[0][-1] < 0.99 * losses[0][0]


@CUDA
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("last", (False, True), ids=("NCHW", "channels_last"))
@pytest.mark.parametrize(
    "layer",
    (
        ((2, 48, 9, 14), (48, 40, 4, 4), {"stride": 2, "padding": 1}),  # tensor cores
        ((2, 20, 5, 6, 7), (20, 12, 3, 3, 3), {"stride": 2, "padding": 1}),
        ((2, 64, 13, 11), (64, 16, 3, 3), {"groups": 2, "dilation": 2}),
        ((3, 32, 12, 10), (32, 1, 4, 4), {"stride": 2, "padding": 1, "groups": 32}),  # CUDA cores
    ),
    ids=str,
)
def test_gpu_autocast_rounds_as_a_cast_does(layer: Any, last: bool, dtype: torch.dtype) -> None:
    """Outputs and gradients of float32 weights under autocast: those of rounded ones, to the bit once rounded."""
    shape, weight_shape, options = layer
    rank = len(shape) - 2
    call = (None, None, upconv.conv_transpose2d, upconv.conv_transpose3d)[rank]
    assert call is not None
    form = cpu.memory_format("channels_last" if last else "nchw", rank)
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=form)
    w = torch.randn(weight_shape, device="cuda").contiguous(memory_format=form) / 8
    b = torch.randn(weight_shape[1] * options.get("groups", 1), device="cuda")
    rounded = [t.detach().to(dtype).requires_grad_() for t in (x, w, b)]
    single = [t.requires_grad_() for t in (x, w, b)]
    with upconv.strict(True):
        wanted = call(*rounded, **options)
        with torch.autocast("cuda", dtype=dtype):
            out = call(*single, **options)
        with torch.no_grad(), torch.autocast("cuda", dtype=dtype):  # kept weights, twice
            again = [call(*single, **options) for _ in range(2)]
        grad = torch.randn_like(out)
        theirs, ours = torch.autograd.grad(wanted, rounded, grad), torch.autograd.grad(out, single, grad)
    for found in (out, *again):
        assert found.dtype is dtype and torch.equal(found, wanted)
    assert [t.dtype for t in ours] == [dtype, torch.float32, torch.float32]
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1].to(dtype), theirs[1])
    assert ours[1].stride() == theirs[1].stride()
    assert reference.relative_error(ours[2], grad.double().sum((0, *range(2, grad.dim())))) < 1e-5


@CUDA
def test_gpu_a_whole_training_step_is_captured() -> None:
    layer = upconv.ConvTranspose2d(8, 16, 4, 2, 1).cuda()
    x = torch.randn(2, 8, 16, 16, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # kernels are compiled and loaded ahead of the capture
        for _ in range(2):
            torch.autograd.grad(layer(x).square().sum(), (x, layer.weight, layer.bias))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight, layer.bias))
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        layer.weight.mul_(2)
    graph.replay()
    wanted = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight, layer.bias))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


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
