"""What computes a call, and its gradients of every order: operations, and the autograd functions that run them.

Without its bias a transposed convolution F(x, w) is bilinear, and so are the gradients I(g, w) for the input and
W(x, g) for the weight. The three are each other's derivatives: each is linear in both operands, and <g, F(x, w)> =
<x, I(g, w)> = <w, W(x, g)>. So with a gradient arriving at the result, e at F's, y at I's, v at W's,

    F(x, w):  I(e, w) for x,  W(x, e) for w
    I(g, w):  F(y, w) for g,  W(y, g) for w
    W(x, g):  I(g, v) for x,  F(x, v) for g

and every derivative of any order is a forward or a gradient of the same layer, by the same plan. A plain convolution
is I of the transposed one that has its weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from upconv import cpu, dispatch, planner, refusals
from upconv.cuda import engine, weights
from upconv.planner import Plan
from upconv.replay.calls import Gradients


def uncast(backward: Callable[[Any, Tensor], tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """A Function's backward as PyTorch's own are: outside autocast, and nothing for a gradient that is undefined."""

    @wraps(backward)
    def wrapped(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        with _uncasting(grad):
            return backward(ctx, grad)

    return wrapped


def _uncasting(grad: Tensor) -> AbstractContextManager[object]:
    """Within it autocast is off, as in a backward of PyTorch's own."""
    kind = "cuda" if grad.is_cuda else "cpu"
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


_NOTHING = nullcontext()


def asked(ctx: Any) -> tuple[bool, ...]:
    """Which of a Function's operands (its first arguments) the running backward wants gradients of.

    ``needs_input_grad`` knows only who requires a gradient: under ``autograd.grad(out, x)`` that may be more, and a
    gradient of PyTorch's own is not computed then either.
    """
    needed: tuple[bool, ...] = ctx.needs_input_grad[:3]
    if sum(needed) == 1:  # then it is the one that this backward is for
        return needed
    wanted = [node is not None and _wants(node) for node, _ in ctx.next_functions]
    return (*wanted, False) if len(wanted) == 2 else tuple(wanted)  # without a bias


def _wants(node: Any) -> bool:
    try:
        return _will_execute(node)
    except RuntimeError:  # a leaf whose gradient ``autograd.grad`` returns; or a backward that the engine does not run
        return True


# A private function, which PyTorch's own hooks on several tensors use.
_will_execute: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", lambda node: True)
_is_batched: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda t: False)


def _observed_backward(*tensors: Tensor) -> bool:
    """Whether PyTorch must see how gradients are taken: under ``vmap`` (a transform, or ``autograd.grad``'s
    ``is_grads_batched``), or under a dispatch mode that the forward was not, such as a counter of FLOPs.
    """
    return dispatch.transforms_active() or torch._C._len_torch_dispatch_stack() > 0 or any(map(_is_batched, tensors))


# --- operations ------------------------------------------------------------------------------------------------------


class Operation(ABC):
    """What computes a call: a transposed convolution by a plan, or a plain one. Hashable.

    Its derivatives of every order are transposed convolutions and their gradients.
    """

    plan: Plan
    """A plain convolution's is that of the transposed one whose gradient for the input it is."""
    plain: bool

    @property
    @abstractmethod
    def inference(self) -> Operation:
        """What computes the same call where no gradient is recorded."""

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """By our kernels, keeping nothing: on the current stream, without autograd."""

    @abstractmethod
    def runner(self, index: int) -> Any:
        """What runs the forward on a device (`engine.Runner`); None where PyTorch's operator does."""

    @abstractmethod
    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        """As `forward`, those for input, weight and bias that ``mask`` asks for."""

    @abstractmethod
    def theirs(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        """As `gradients`, by PyTorch's operator, of a weight in the input's dtype."""

    def taken(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        """As `gradients`, by PyTorch's operator where PyTorch must see them: that has rules for it."""
        if not _observed_backward(grad, x, weight):
            return self.gradients(grad, x, weight, mask)
        for_input, *others = self.theirs(grad, x, weight.to(x.dtype), mask)
        for_weight, for_bias = (None if g is None else g.to(weight.dtype) for g in others)
        return for_input, for_weight, for_bias

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        """As `taken`, in every state of autograd and autocast: recorded where gradients are."""
        if mask[1] and weights.frozen:
            weights.thaw(weight)  # whoever asks for its gradient, PyTorch's or ours, is about to change it
        with _uncasting(grad):
            if not torch.is_grad_enabled() or _observed_backward(grad, x, weight):
                return self.taken(grad, x, weight, mask)
            of, rounded = transposed(self.plan), weight.to(x.dtype)
            for_input = for_weight = None
            if mask[0]:
                for_input = _unbiased(of, grad, rounded) if self.plain else _gradient(grad, rounded, x, of, False)
            if mask[1]:
                for_weight = _gradient(*((grad, x) if self.plain else (x, grad)), rounded, of, for_weight=True)
            for_bias = grad.sum((0, *range(2, grad.dim())), dtype=weight.dtype) if mask[2] else None
            return for_input, None if for_weight is None else for_weight.to(weight.dtype), for_bias


class Transposed(Operation):
    """A transposed convolution by a plan."""

    plain = False

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def inference(self) -> Transposed:
        return self

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.plan.choice is not None:
            return engine.forward(self.plan, x, weight, bias)
        return cpu.forward(self.plan.problem, self.plan.forward, x, weight, bias)

    def runner(self, index: int) -> Any:
        return engine.loaded(self.plan, index)["fwd"]

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        if self.plan.backward != planner.FAMILIES:
            return cpu.gradients(self.plan.problem, self.plan.backward, grad, x, weight, mask)
        if refusals.active:
            refusals.refuse_gradients(self.plan, mask)
        return engine.gradients(self.plan, grad, x, weight, mask)

    def theirs(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        return cpu.gradients(self.plan.problem, "native", grad, x, weight, mask)


transposed = lru_cache(maxsize=4096)(Transposed)
"""The operation of a plan, the same object each time."""


# --- autograd functions ----------------------------------------------------------------------------------------------


class _Convolution(torch.autograd.Function):
    """An operation and its bias. Under autocast weight and bias are float32 where the engine rounds them
    (`upconv.dispatch.autocast`), and so are their gradients.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, of: Operation) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.of = of
        ctx.set_materialize_grads(False)
        return of.forward(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        input, weight = ctx.saved_tensors
        return (*ctx.of.backward(grad, input, weight, asked(ctx)), None)


# What ``Function.apply`` comes to where no functorch transform is active (who calls it knows that none is), without its
# look-ups before: 7 us of 17 on a CPU.
apply = super(torch.autograd.Function, _Convolution).apply


class _Gradient(torch.autograd.Function):
    """I(a, b), or W(a, b) for the weight. PyTorch's operator asks for a third tensor, whose values are not read."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, like: Tensor, of: Transposed, for_weight: bool) -> Tensor | None:
        ctx.save_for_backward(a, b)
        ctx.of, ctx.for_weight = of, for_weight
        ctx.set_materialize_grads(False)
        return _taken(a, b, like, of, for_weight)

    @staticmethod
    @uncast
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        of, mask = ctx.of, asked(ctx)
        if ctx.for_weight:
            for_a = _gradient(b, e, a, of, for_weight=False) if mask[0] else None
            for_b = _unbiased(of, a, e) if mask[1] else None
        else:
            for_a = _unbiased(of, e, b) if mask[0] else None
            for_b = _gradient(e, a, b, of, for_weight=True) if mask[1] else None
        return for_a, for_b, None, None, None


def _gradient(a: Tensor, b: Tensor, like: Tensor, of: Transposed, for_weight: bool) -> Tensor | None:
    """As `_Gradient`, differentiable where gradients are recorded."""
    if torch.is_grad_enabled() and not _observed_backward(a, b):
        return _Gradient.apply(a, b, like, of, for_weight)
    return _taken(a, b, like, of, for_weight)


def _taken(a: Tensor, b: Tensor, like: Tensor, of: Transposed, for_weight: bool) -> Tensor | None:
    if for_weight:
        return of.taken(b, a, like, (False, True, False))[1]
    return of.taken(a, like, b, (True, False, False))[0]


def _unbiased(of: Transposed, x: Tensor, weight: Tensor) -> Tensor | None:
    """F(x, w), differentiable where gradients are recorded."""
    p = of.plan.problem
    if _observed_backward(x, weight):
        return cpu.forward(p, "native", x, weight, None)
    bare = transposed(planner.plan(p.with_(bias=False), of.plan.device)) if p.bias else of
    return _Convolution.apply(x, weight, None, bare) if torch.is_grad_enabled() else bare.forward(x, weight, None)
