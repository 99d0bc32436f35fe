"""Plain convolutions on a GPU by the kernels of transposed ones, whose gradients they are.

A convolution of x with w is the gradient for the input of the transposed convolution that has this weight; its own
gradient for the input is that layer's forward, and its gradient for the weight that layer's with both operands
exchanged (`upconv.ops` has the three maps). So a model's plain convolutions can take the same kernels, which read and
write NCHW as it lies, where cuDNN copies both tensors to its own layout and back.

A call is ours where our estimate says that it is the faster one (`expected`) and long enough that the GPU, not the
host, decides (`LEAST`); else, and wherever PyTorch must see the call, it is PyTorch's operator. The rule is by shape,
never by timing. Gradients are chosen one by one, by the same rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from upconv import calls, ops, planner
from upconv.cuda import engine
from upconv.cuda.gpu import Gpu
from upconv.planner import Plan
from upconv.problem import Pass, Precision, Problem, is_channels_last, output_length

LEAST = 45e-6
"""Seconds of a forward from which on calls are ours. A recorded call takes the host 65 us among a step's work (NOTES:
steps of shorter ones, as DCGAN's discriminator has them, wait for their host anyway)."""
MARGIN = 0.85
"""Our estimate must be below this share of `expected` (NOTES: of 288 passes timed on an H100, 49 layers in TF32 and
bfloat16, 200 are, in which PyTorch takes 1.01 to 9 times as long, 2.2 in the mean; below 0.9 one took 0.93)."""
_RATE = 0.65  # of the tensor cores' products, which cuDNN's kernels reach
_LAUNCHES = 15e-6  # its kernels' beginnings and ends
_PADDED = 8  # channels, to whose multiples cuDNN pads
_COPIES = 2.0  # of both tensors, which go to its layout and back
_RELAYOUT = 1.5  # `relayout`'s estimates are low: 1.2 to 2.2 times for layers of many channels
_MACS = {2: 2048, 4: 1024}  # of a multiprocessor's tensor cores a clock, by an element's bytes (sm_90)
_SURELY_SMALL = 4e9, 32e6  # products and elements that no GPU of sm_90 needs `LEAST` for


@dataclass(frozen=True)
class Convolution:
    """How a convolution is computed: by the plan of the transposed one, a gradient perhaps by PyTorch's operator."""

    plan: Plan

    @property
    def problem(self) -> Problem:
        """The transposed convolution's."""
        return self.plan.problem

    @cached_property
    def for_input(self) -> bool:
        """Whether the gradient for the input is our kernels'; found when it is first asked for."""
        return faster(self.plan, "fwd")

    @cached_property
    def for_weight(self) -> bool:
        """As `for_input`, for the weight."""
        return faster(self.plan, "grad-weight")

    @cached_property
    def sums(self) -> Plan:
        """A plan whose output has the shape of this one's, for the gradient for the bias alone."""
        p = self.problem
        one, zero = (1,) * p.rank, (0,) * p.rank
        like = p.with_(
            out_channels=p.in_channels, kernel=one, stride=one, padding=zero, output_padding=zero, dilation=one,
            groups=1, bias=True,
        )  # fmt: skip
        return Plan(like, self.plan.device, "native", planner.FAMILIES, ())


def convolution(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor | None:
    """A convolution of ``rank`` spatial dimensions by our kernels; None where PyTorch's operator is to compute it.

    Shapes as `torch.nn.functional.conv2d`'s. It looks for a plan, so that callers should know `small` ones before.
    Errors: those of `engine.convolution`.
    """
    seen = _seen.get(id(weight))
    for known in () if seen is None else seen.calls:
        if known.is_this(rank, input, weight, bias, stride, padding, 0, groups, dilation):
            if known.autocast is not None:
                input = input.to(known.autocast)
            if known.differentiable and torch.is_grad_enabled():
                found: Tensor = _apply(input, weight, bias, known.plan)
                return found
            return _forward(known.plan, input, weight, bias, keep=True)
    if groups != 1 or not _plain(input) or not _on_gpu(input) or not _plain(weight):
        return None
    if not (bias is None or _plain(bias)) or ops._observed():
        return None
    given, rounded = (input, weight, bias), False
    if torch.is_autocast_enabled("cuda" if input.is_cuda else "cpu"):
        input, weight, bias = ops._autocast(input, weight, bias, rounding=True)
        rounded = weight.dtype is torch.float32 and input.dtype.itemsize == 2
    chosen = _find(rank, input, weight, bias, stride, padding, dilation, rounded)
    if chosen is None:
        return None
    own = weight is given[1] and bias is given[2]
    if own:
        calls.remember(chosen, *given, input.dtype, rank, stride, padding, 0, groups, dilation, among=_seen)
    differentiable = input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if differentiable and torch.is_grad_enabled():
        out: Tensor = _apply(*(t if t is None else ops._unwrap(t) for t in (input, weight, bias)), chosen)
        return out
    return _forward(chosen, input, weight, bias, keep=own)


# --- which calls -----------------------------------------------------------------------------------------------------


def _plain(t: Any) -> bool:
    return type(t) in ops._PLAIN


def _on_gpu(t: Tensor) -> bool:
    return t.is_cuda


_seen: dict[int, calls.Seen[Convolution]] = {}


@lru_cache(maxsize=4096)
def small(shape: torch.Size | None, weight_shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether a convolution is certainly shorter than `LEAST`, whatever it computes in (or none at all)."""
    if shape is None or len(shape) != len(weight_shape) or not shape[1] or len(stride) != len(shape) - 2:
        return True
    pixels = math.prod(shape) / shape[1]
    outputs = pixels / math.prod(stride)
    products, elements = _SURELY_SMALL
    of_both = pixels * shape[1] + outputs * weight_shape[0]
    return outputs * math.prod(weight_shape) < products and of_both < elements


def _find(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    rounded: bool,
) -> Convolution | None:
    dtype, index = input.dtype, input.get_device()
    of_weight = torch.float32 if rounded else dtype
    if any(
        t is not None and (t.dtype is not of_weight or t.get_device() != index or t.layout is not torch.strided)
        for t in (weight, bias)
    ):
        return None
    if not (input.layout is torch.strided and input.is_contiguous() and weight.is_contiguous()):
        return None
    if is_channels_last(input.shape, input.stride()) or is_channels_last(weight.shape, weight.stride()):
        return None  # of one pixel, so that it is both
    precision = calls.float32_precision() if dtype is torch.float32 else None
    biased = None if bias is None else bias.shape
    try:
        return _resolve(
            rank, input.shape, weight.shape, biased, stride, padding, dilation, dtype, precision, index
        )  # fmt: skip
    except TypeError:  # something that is no tuple of integers: PyTorch says what
        return None


@lru_cache(maxsize=4096)
def _resolve(
    rank: int,
    shape: torch.Size,
    weight_shape: torch.Size,
    bias_shape: torch.Size | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    dtype: torch.dtype,
    precision: Precision | None,
    index: int,
) -> Convolution | None:
    if len(shape) != rank + 2 or len(weight_shape) != rank + 2 or shape[1] != weight_shape[1]:
        return None
    if bias_shape is not None and tuple(bias_shape) != (weight_shape[0],):
        return None
    p = transposed(shape, weight_shape, stride, padding, dilation, dtype, precision)
    return None if p is None else choose(p, planner.cuda_device(index))


def transposed(
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    dtype: torch.dtype,
    precision: Precision | None = None,
) -> Problem | None:
    """The transposed convolution whose gradient for the input is this convolution; None where there is none.

    Its input has the shape of the convolution's output, and its output that of ``shape``, the convolution's input.
    """
    sizes, kernel = shape[2:], weight_shape[2:]
    if 0 in shape:
        return None
    axes = list(zip(sizes, kernel, stride, padding, dilation))
    out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
    if min(out) < 1:
        return None
    rest = [n - output_length(o, k, s, p, 0, d) for o, (n, k, s, p, d) in zip(out, axes)]
    try:
        return Problem.make(
            shape[0], weight_shape[0], weight_shape[1], out, kernel, stride, padding, rest, dilation, dtype=dtype,
            precision=precision,
        )  # fmt: skip
    except (ValueError, TypeError):
        return None


@lru_cache(maxsize=4096)
def choose(p: Problem, device: planner.Device) -> Convolution | None:
    """How the convolution that is ``p``'s gradient for the input is computed; None where PyTorch's operator is to."""
    if device.gpu is None or device.unavailable is not None or device.gpu.capability != (9, 0):  # where it was measured
        return None
    if p.taps == 1 or p.groups != 1 or p.dtype is torch.float64 or p.precision == "ieee":
        return None
    plan = planner.plan(p, device)
    choice = plan.grad_input.choice
    return Convolution(plan) if choice and choice.seconds >= LEAST and faster(plan, "grad-input") else None


def faster(plan: Plan, pass_: Pass) -> bool:
    """Whether a pass of a plan takes less than what is expected of PyTorch's operator."""
    choice, gpu = plan.selection(pass_).choice, plan.device.gpu
    if choice is None or gpu is None:
        return False
    seconds = choice.seconds * (_RELAYOUT if choice.family == "relayout" else 1.0)
    return seconds <= MARGIN * expected(plan.problem, gpu)


def expected(p: Problem, gpu: Gpu) -> float:
    """Seconds that PyTorch's operator takes at best for a convolution that is a pass of ``p``, or its gradients.

    The products at what cuDNN's kernels reach, with channels padded, and its copies of both tensors to its own layout
    and back.
    """
    channels = [-(-c // _PADDED) * _PADDED for c in (p.in_channels, p.out_channels)]
    products = p.macs / (p.in_channels * p.out_channels) * math.prod(channels)
    rate = _RATE * _MACS[p.dtype.itemsize] * gpu.clock * gpu.multiprocessors
    elements = p.batch * (channels[0] * math.prod(p.size) + channels[1] * math.prod(p.out_size))
    return products / rate + _COPIES * elements * p.dtype.itemsize / gpu.bandwidth + _LAUNCHES


# --- the call --------------------------------------------------------------------------------------------------------


def _forward(c: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None, keep: bool) -> Tensor:
    return engine.convolution(c.plan, x, weight, bias, keep)


def _theirs(c: Convolution, grad: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]) -> Any:
    p = c.problem
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, p.stride, p.padding, p.dilation, False, (0,) * p.rank, 1, mask
    )


class _Convolution(torch.autograd.Function):
    """I(x, w) of the transposed convolution, and a bias. Under autocast weight and bias are float32."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, chosen: Convolution) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.chosen = chosen
        ctx.set_materialize_grads(False)
        return _forward(chosen, input, weight, bias, not weight.requires_grad)

    @staticmethod
    @ops._uncast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        c: Convolution = ctx.chosen
        mask = ops._asked(ctx)
        plan, rounded = c.plan, weight
        for_input = for_weight = for_bias = None
        if torch.is_grad_enabled() or ops._batched(grad, input, weight):
            rounded = weight.to(input.dtype)
            for_weight = ops._for_weight(plan, grad, input, rounded) if mask[1] else None
            for_input = ops._unbiased(plan, grad, rounded) if mask[0] else None
            for_bias = grad.sum((0, *range(2, grad.dim())), dtype=weight.dtype) if mask[2] else None
        else:
            grad = grad.contiguous()  # once for both
            if mask[1] and c.for_weight:
                for_weight = engine.gradients(plan, input, grad, weight, (False, True, False))[1]
            elif mask[1]:
                for_weight = _theirs(c, grad, input, weight.to(input.dtype), (False, True, False))[1]
            if mask[0] and c.for_input:
                for_input = engine.forward(plan, grad, weight, None, not ctx.needs_input_grad[1])
            elif mask[0]:
                for_input = _theirs(c, grad, input, weight.to(input.dtype), (True, False, False))[0]
            if mask[2]:
                for_bias = engine.gradients(c.sums, grad, input, weight, (False, False, True))[2]
        if for_weight is not None:
            for_weight = for_weight.to(weight.dtype)
        return for_input, for_weight, for_bias, None


_apply = super(torch.autograd.Function, _Convolution).apply


def forget() -> None:
    """Drops what is remembered of calls: each finds its plan anew."""
    _seen.clear()
    _resolve.cache_clear()
