"""Calls that were made before: what makes a call another one, and that results do not depend on what was seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import upconv
from situations.observers import Listing as Dispatch
from situations.observers import Names as Function
from standins import kernels_fixture  # noqa: F401
from upconv import dispatch
from upconv.replay import calls
from upconv.replay.calls import Call

OPERATION: Any = SimpleNamespace(plan=SimpleNamespace(problem=SimpleNamespace(layout="nchw")), inference=None)
ARGUMENTS: tuple[Any, ...] = ((2, 2), (1, 1), (0, 0), 1, (1, 1))
CALLED: tuple[Any, ...] = (2, *ARGUMENTS)


class Subclass(Tensor):
    pass


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    layer = nn.ConvTranspose2d(4, 6, 3)
    assert layer.bias is not None
    return torch.randn(2, 4, 5, 6), layer.weight, layer.bias


def remembered(*given: Any) -> Call:
    return Call(OPERATION, given, torch.float32, CALLED)


def test_the_same_call_is_recognised_with_and_without_a_bias() -> None:
    x, w, b = tensors()
    for bias in (b, None):
        known = remembered(x, w, bias)
        assert known.is_this(2, x, w, bias, *ARGUMENTS)
        assert known.is_this(2, torch.randn_like(x), nn.Parameter(torch.randn_like(w)), bias, *ARGUMENTS)
        assert not known.is_this(2, x, w, None if bias is b else b, *ARGUMENTS)
        with torch.no_grad():  # which is asked for behind it
            assert known.is_this(2, x, w, bias, *ARGUMENTS)
        assert known.differentiable and not remembered(x, w.detach(), None).differentiable
    assert not known.is_this(1, x, w, None, *ARGUMENTS) and not known.is_this(3, x, w, None, *ARGUMENTS)


@pytest.mark.parametrize("changed", (
    lambda x: x[:1], lambda x: x[..., 1:], lambda x: x.contiguous(memory_format=torch.channels_last),
    lambda x: x.double(), lambda x: x.clone().requires_grad_(), lambda x: nn.Parameter(x), lambda x: x[0],
    lambda x: x.to("meta"), lambda x: torch._neg_view(x), lambda x: x.to_sparse(), lambda x: x.to_mkldnn(),
    lambda x: x.as_subclass(Subclass), lambda x: None, lambda x: 3,
), ids=(
    "batch", "width", "layout", "dtype", "gradient", "parameter", "unbatched", "device", "negated", "sparse", "mkldnn",
    "subclass", "none", "number",
))  # fmt: skip
def test_other_tensors_are_another_call(changed: Callable[[Tensor], Any]) -> None:
    x, w, b = tensors()
    assert not remembered(x, w, b).is_this(2, changed(x), w, b, *ARGUMENTS)
    assert not remembered(x, w.detach(), b).is_this(2, x, changed(w.detach()), b, *ARGUMENTS)


def test_other_arguments_are_another_call() -> None:
    x, w, b = tensors()
    known = remembered(x, w, b)
    for i, other in enumerate(((2, 1), 1, [0, 0], True, (1, 2))):
        assert not known.is_this(2, x, w, b, *(other if i == j else v for j, v in enumerate(ARGUMENTS)))


@pytest.mark.parametrize("within", (
    lambda: torch.autocast("cpu"), lambda: torch.inference_mode(), Dispatch, Function, forward_ad.dual_level,
), ids=("autocast", "inference", "dispatch", "function", "dual"))  # fmt: skip
def test_what_pytorch_must_see_is_another_call(within: Callable[[], AbstractContextManager[object]]) -> None:
    x, w, b = tensors()
    known = remembered(x, w, b)
    with within():
        assert not known.is_this(2, x, w, b, *ARGUMENTS)
    assert known.is_this(2, x, w, b, *ARGUMENTS)


def test_transforms_and_traces_are_another_call() -> None:
    x, w, b = tensors()
    known, found = remembered(x, w, b), []

    def looked(t: Tensor) -> Tensor:
        found.append(known.is_this(2, x, w, b, *ARGUMENTS))
        found.append(known.is_this(2, t, w, b, *ARGUMENTS))
        return t.sum()

    torch.func.grad(looked)(x)
    torch.func.vmap(looked)(torch.stack((x, x)))
    torch.jit.trace(looked, x, check_trace=False)
    assert found == [False] * 6


def test_autocasts_dtype_and_pytorchs_flags_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        known = Call(OPERATION, (x, w, b), torch.bfloat16, CALLED)
        assert known.autocast is torch.bfloat16 and known.is_this(2, x, w, b, *ARGUMENTS)
    with torch.autocast("cpu", torch.float16):
        assert not known.is_this(2, x, w, b, *ARGUMENTS)
    assert not known.is_this(2, x, w, b, *ARGUMENTS)
    known = remembered(x, w, b)
    flags = {"precision": "tf32", "cudnn": True}
    monkeypatch.setattr(calls, "float32_precision", lambda: flags["precision"])
    monkeypatch.setattr(calls, "_cudnn_enabled", lambda: flags["cudnn"])
    monkeypatch.setattr(known, "_precision", "tf32")  # as on a GPU
    monkeypatch.setattr(known, "_last", True)
    assert known.is_this(2, x, w, b, *ARGUMENTS)
    for name, value in (("precision", "ieee"), ("cudnn", False)):
        monkeypatch.setitem(flags, name, value)
        assert not known.is_this(2, x, w, b, *ARGUMENTS)
        monkeypatch.undo() if name == "cudnn" else monkeypatch.setitem(flags, name, "tf32")


@pytest.mark.usefixtures("kernels")
def test_the_third_call_looks_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And computes the same, gradients too; one of another size does look, and nothing is remembered without guards."""
    layer = upconv.ConvTranspose2d(4, 6, 3, 2, 1)
    x = torch.randn(2, 4, 5, 6, requires_grad=True)
    found, looked = dispatch.find_plan, []
    monkeypatch.setattr(dispatch, "find_plan", lambda *given: looked.append(given[1].shape) or found(*given))
    outs = [layer(x) for _ in range(4)]
    assert looked == [x.shape] * 2 and all(torch.equal(outs[0], out) for out in outs)
    grads = [torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]) for out in outs]
    assert all(torch.equal(a, b) for pair in zip(*grads) for a, b in zip(pair, pair[1:]))
    layer(x[:1])
    assert len(looked) == 3
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    assert layer(x).is_contiguous(memory_format=torch.channels_last) and len(looked) == 4
    calls.seen.clear()
    monkeypatch.setattr(calls, "_GUARDS", None)
    for _ in range(4):
        layer(x)
    assert len(looked) == 8 and not calls.seen


@pytest.mark.usefixtures("kernels")
def test_guards_are_not_made_without_end() -> None:
    layer = upconv.ConvTranspose2d(4, 6, 3)
    x = torch.randn(2, 4, 5, 6)
    for i in range(100):  # the same plan, other guards
        layer(x.clone().requires_grad_(bool(i % 2)))
    (call,) = calls.seen[id(layer.weight)].calls
    assert call.made == calls.MOST_GUARDS
    for size in range(4, 10):  # other plans
        for _ in range(3):
            layer(torch.randn(2, 4, size, 6))
    assert len(calls.seen[id(layer.weight)].calls) == calls.MOST_CALLS


@pytest.mark.usefixtures("kernels")
def test_weights_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST", 8)
    x, weights = torch.randn(2, 4, 5, 6), [torch.randn(4, 6, 3, 3) for _ in range(20)]
    sizes = []
    for w in weights:
        upconv.conv_transpose2d(x, w)
        sizes.append(len(calls.seen))
    assert max(sizes) == 8 and sizes[8] == 1


@pytest.mark.usefixtures("kernels")
def test_training_and_validation_are_both_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many epochs, with a last batch that is smaller."""
    layer = upconv.ConvTranspose2d(4, 6, 3)
    found, looked = dispatch.find_plan, []
    monkeypatch.setattr(dispatch, "find_plan", lambda *given: looked.append(1) or found(*given))
    for epoch in range(30):
        if epoch == 2:
            looked.clear()
        for batch, count in ((8, 5), (3, 1)):
            for _ in range(count):
                layer(torch.randn(batch, 4, 5, 6))
        with torch.no_grad():
            for _ in range(3):
                layer(torch.randn(4, 4, 5, 6))
    assert len(looked) <= 2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("seed", range(20))
def test_results_do_not_depend_on_what_was_seen(seed: int) -> None:
    """Random calls in turn, each as it is computed when nothing was seen before."""
    rng = random.Random(seed)
    layers = [upconv.ConvTranspose2d(4, 6, 3, stride, 1, bias=bias) for stride, bias in ((1, True), (2, False))]
    for _ in range(60):
        layer = rng.choice(layers)
        x = torch.randn(rng.choice((1, 2)), 4, 5, 6).requires_grad_(rng.random() < 0.5)
        if rng.random() < 0.3:
            x = x.contiguous(memory_format=torch.channels_last)
        if rng.random() < 0.2:
            x = x[0]
        if rng.random() < 0.1:
            layer.padding = rng.choice(((0, 0), (1, 1), (1, 0)))
        if rng.random() < 0.1:
            layer.weight.requires_grad_(not layer.weight.requires_grad)
        modes: tuple[Callable[[], AbstractContextManager[object]], ...] = (
            nullcontext, nullcontext, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16), Function
        )  # fmt: skip
        with rng.choice(modes)():
            out = layer(x)
            kept, calls.seen = calls.seen, {}
            try:
                expected = layer(x)
            finally:
                calls.seen = kept
        assert torch.equal(out, expected) and out.stride() == expected.stride() and out.dtype is expected.dtype
        assert out.requires_grad == expected.requires_grad
        leaves = [t for t in (x, *layer.parameters()) if t.requires_grad]
        if out.requires_grad:
            both = [torch.autograd.grad(t.float().sum(), leaves) for t in (out, expected)]
            assert all(map(torch.equal, *both))
