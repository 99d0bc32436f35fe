"""Plain convolutions on a GPU by the kernels of transposed ones: the rule that says whose a call is.

A convolution of x with w is the gradient for the input of the transposed convolution with the same weight. Its own
gradient for the input is that layer's forward. Its gradient for the weight is that layer's, with both operands
exchanged (`upconv.autograd` has the three maps). So the same kernels compute it. In NCHW they read and write tensors in
place, where cuDNN copies both to its own layout and back. In channels_last they are faster for up to 64 channels, and
for the weight in TF32.

A call is ours if our estimate says that it is faster (`expected`) and it is worth a kernel's compilation (`LEAST`). In
training a short call is also ours if the host decides, since a replayed call takes the host less time (`MARGIN_SHORT`).
All others, and those that PyTorch must see, are left to PyTorch's operator. The forward and the gradients are chosen
one by one, by the same rule.

The rule goes by the call, never by timing. It depends neither on a C++ compiler nor on whether the module that replays
calls is there yet, so the same kernels compute a call always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from upconv import cpu, dispatch, ops, planner
from upconv.autograd import Operation
from upconv.cuda import engine
from upconv.cuda.family import call_seconds
from upconv.cuda.gpu import Gpu
from upconv.planner import Plan
from upconv.problem import Layout, Pass, Precision, Problem, is_channels_last, output_length
from upconv.replay import calls

LEAST = 1e-6
"""Seconds of a forward, by the bound of `small`, from which on calls may be ours. Shorter ones are not worth a kernel's
compilation."""
MARGIN = 0.85
"""Our estimate must be below this share of `expected`, so that of the timed passes all but one gain
(docs/experiments.md)."""
SHORT = 45e-6
"""Seconds that PyTorch is expected to take for a pass, below which a training step waits for its host."""
MARGIN_SHORT = 1.25
"""`MARGIN` of `SHORT` passes in training. There the host decides, whose time for a replayed call and its backward is
shorter than that for PyTorch's operator. A few of these passes are slower on the GPU (docs/experiments.md). A graph
that is captured behind such steps has these too."""
_MACS = {2: 2048, 4: 1024}  # of a multiprocessor's tensor cores a clock, by an element's bytes (sm_90)
_PADDED = 8  # channels, to whose multiples cuDNN pads
_RATE_WEIGHT = 0.45  # of the products' rate, which cuDNN's kernels of the gradient for the weight reach in TF32
# NCHW: that of its others; copies of both tensors, to its own layout and back; its kernels' beginnings and ends. And
# copies of the weight, where a pass is short. Long ones were not timed so.
_RATE, _COPIES, _LAUNCHES, _COPIES_WEIGHT = 0.65, 2.0, 15e-6, 5.0
# channels_last: the same, and how much longer a tile of 64 columns takes for its products than one of 128.
_RATE_LAST, _LAUNCH, _NARROW = 0.72, 5e-6, 1.4
# `rearrange`'s estimates are low: 1.2 to 2.2 times for layers of many channels, of short passes 1.1 to 1.4.
_RELAYOUT, _RELAYOUT_SHORT = 1.5, 1.2
_SMALL = 156e12, 533e9  # products and elements a second, about what TF32 and an H100's memory do


def convolution(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor | None:
    """A convolution of ``rank`` spatial dimensions by our kernels; None where PyTorch's operator is to compute it.

    Shapes as `torch.nn.functional.conv2d`'s. It looks for a plan, so that callers ask `ops.repeated`, `eager` and
    `small` before. Errors: those of `engine.convolution`.
    """
    if not _plain(weight) or not (bias is None or _plain(bias)) or dispatch.observed():
        return None
    given = input, weight, bias
    # A weight may be computed, without gradients.
    trained = engine.warming() or (weight.requires_grad and torch.is_grad_enabled())
    chosen = find(rank, input, weight, bias, stride, padding, dilation, trained)
    if chosen is None or not (chosen.for_output or (trained and chosen.for_weight)):
        return None
    cast: calls.Operands = given
    if torch.is_autocast_enabled("cuda" if input.is_cuda else "cpu"):  # not before: PyTorch would cast once more
        cast = dispatch.autocast(input, weight, bias, rounding=True)
    own = cast[1] is weight and cast[2] is bias
    return ops.computed(chosen, given, cast, (rank, stride, padding, 0, 1, dilation) if own else None)


# --- which calls -----------------------------------------------------------------------------------------------------

_CAST = (torch.float32, torch.bfloat16, torch.float16)  # what autocast casts


def eager(input: Any) -> bool:
    """Whether an input is a plain tensor on a GPU, and not traced."""
    return _plain(input) and _on_gpu(input) and not input.is_nested and torch._C._get_tracing_state() is None


def _plain(t: Any) -> bool:
    return type(t) in dispatch.PLAIN


def _on_gpu(t: Tensor) -> bool:
    return t.is_cuda


def small(shape: torch.Size, weight_shape: torch.Size, stride: Any) -> bool:
    """Whether a convolution is shorter than `LEAST` by a rough bound, whatever its dtype; or none that we know."""
    try:
        return _small(shape, weight_shape, stride, LEAST)
    except TypeError:  # a stride that is no tuple of integers
        return True


@lru_cache(maxsize=4096)
def _small(shape: torch.Size, weight_shape: torch.Size, stride: tuple[int, ...], least: float) -> bool:
    if len(shape) != len(weight_shape) or not shape[1] or len(stride) != len(shape) - 2 or min(stride) < 1:
        return True
    pixels = math.prod(shape) / shape[1]
    outputs = pixels / math.prod(stride)
    padded = math.prod(_padded(c) for c in weight_shape[:2]) * math.prod(weight_shape[2:])
    products, elements = (rate * least for rate in _SMALL)
    return outputs * padded < products and pixels * shape[1] + outputs * weight_shape[0] < elements


@lru_cache(maxsize=4096)
def explicit(padding: str, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...] | None:
    """A padding by name as numbers, the same object each time; None for one that is more on one side.

    ``kernel``: the weight's own, which may be another than its layer's ``kernel_size`` by now.
    """
    whole = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel)]
    return None if any(n % 2 for n in whole) else tuple(n // 2 for n in whole)


def _padded(channels: int, multiple: int = _PADDED) -> int:
    return -(-channels // multiple) * multiple


def find(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    training: bool,
) -> Convolution | None:
    """How a call is computed, the same object each time; None where PyTorch's operator is to."""
    dtype, index = input.dtype, input.get_device()
    others = [t for t in (weight, bias) if t is not None]
    if any(t.get_device() != index or t.layout is not torch.strided for t in others):
        return None
    if input.dim() != rank + 2 or weight.dim() != rank + 2 or input.shape[1] != weight.shape[1]:
        return None
    layout = _layout(rank, input, weight) if input.layout is torch.strided else None
    if layout is None or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    kind = "cuda" if input.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind):
        if any(t.dtype not in _CAST for t in (input, *others)):
            return None
        dtype = torch.get_autocast_dtype(kind)
    elif any(t.dtype is not dtype for t in others):
        return None
    precision = calls.float32_precision() if dtype is torch.float32 else None
    try:
        if not calls.integral((*stride, *padding, *dilation)):
            return None
        return _resolve(
            index, training, input.shape, weight.shape, stride, padding, dilation, dtype, precision, layout
        )  # fmt: skip
    except TypeError:  # something that is no tuple of integers: PyTorch says what
        return None


def _layout(rank: int, input: Tensor, weight: Tensor) -> Layout | None:
    """That of the result, as cuDNN's; None where it is in doubt: of tensors that are dense in no layout or in both.

    In channels_last also for one output channel, and without cuDNN.
    """
    both = (input, weight)
    last = [is_channels_last(t.shape, t.stride()) for t in both]
    contiguous = [t.is_contiguous() for t in both]
    if not any(last):
        return "nchw" if all(contiguous) else None
    if any(a and b for a, b in zip(last, contiguous)) or weight.shape[0] == 1 or not calls._cudnn_enabled():
        return None
    order = cpu.memory_format("channels_last", rank)
    dense = all(a or t.is_contiguous(memory_format=order) for a, t in zip(contiguous, both))
    return "channels_last" if dense else None


@lru_cache(maxsize=4096)
def _resolve(index: int, training: bool, *described: Any) -> Convolution | None:
    """`choose` of a device and the convolution that `transposed` is told of."""
    p = transposed(*described)
    return None if p is None else choose(p, planner.cuda_device(index), training)


def transposed(
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    dtype: torch.dtype,
    precision: Precision | None = None,
    layout: Layout = "nchw",
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
            precision=precision, layout=layout,
        )  # fmt: skip
    except (ValueError, TypeError):
        return None


def choose(p: Problem, device: planner.Device, training: bool = False) -> Convolution | None:
    """How the convolution that is ``p``'s gradient for the input is computed; None where PyTorch's operator is to."""
    gpu = device.gpu
    if gpu is None or device.unavailable is not None or gpu.capability != (9, 0):  # where it was measured
        return None
    if p.taps == 1 or p.dtype is torch.float64 or p.precision == "ieee":
        return None
    if p.layout == "channels_last" and set(p.size) == {1}:  # gradients of one pixel are in both layouts
        return None
    return Convolution(planner.plan(p, device), training)


def faster(plan: Plan, pass_: Pass, training: bool = False) -> bool:
    """Whether a pass of a plan is to be ours, by our estimate and what is expected of PyTorch's operator.

    ``training``: whether its call may be replayed, which spares the host time (`MARGIN_SHORT`).
    """
    choice, gpu, p = plan.selection(pass_).choice, plan.device.gpu, plan.problem
    if choice is None or gpu is None:
        return False
    seconds, theirs = call_seconds(choice), expected(p, pass_, gpu)
    margin, relayout = MARGIN, _RELAYOUT
    if training and theirs < SHORT:
        margin, relayout = MARGIN_SHORT, _RELAYOUT_SHORT
        if p.layout == "nchw":
            weight = math.prod(_padded(c) for c in (p.in_channels, p.out_channels)) * p.taps
            theirs += _COPIES_WEIGHT * weight * p.dtype.itemsize / gpu.bandwidth
    return seconds * (relayout if choice.family == "rearrange" else 1.0) <= margin * theirs


def expected(p: Problem, pass_: Pass, gpu: Gpu) -> float:
    """Seconds that PyTorch's operator takes at best for the convolution, or a gradient of it, that is a pass of ``p``.

    In NCHW the products at what cuDNN's kernels reach, with channels padded, and its copies of both tensors to its own
    layout and back. In channels_last the products in tiles of 64 columns or of 128, which are the result's channels, or
    the bytes if they take longer.
    """
    size, channels = p.dtype.itemsize, (p.in_channels, p.out_channels)
    rate = _MACS[size] * gpu.clock * gpu.multiprocessors
    pairs, nchw = p.macs / math.prod(channels), p.layout == "nchw"
    rate *= _RATE_WEIGHT if pass_ == "grad-weight" and size == 4 else _RATE if nchw else _RATE_LAST
    if nchw:
        a, b = map(_padded, channels)
        elements = p.batch * (a * math.prod(p.size) + b * math.prod(p.out_size))
        return pairs * a * b / rate + _COPIES * elements * size / gpu.bandwidth + _LAUNCHES
    if pass_ == "grad-weight":
        columns, others = min(channels), max(channels)
    else:
        columns, others = channels if pass_ == "grad-input" else channels[::-1]
    columns = _padded(columns, 64)
    products = pairs * columns * _padded(others) * (_NARROW if columns < 128 else 1.0)
    return max(products / rate, p.bytes / gpu.bandwidth) + _LAUNCH


# --- how it is computed ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution(Operation):
    """A convolution by the plan of the transposed one, of whose passes some may be PyTorch's operator."""

    plan: Plan
    training: bool = False
    """Whether the weight's gradient is recorded, so that its calls may be replayed."""
    plain = True

    @cached_property
    def inference(self) -> Convolution:
        """As its other calls are computed."""
        return replace(self, training=False) if self.training else self

    @cached_property
    def for_output(self) -> bool:
        """Whether the forward is our kernels'; found when it is first asked for."""
        return faster(self.plan, "grad-input", self.training)

    @cached_property
    def for_input(self) -> bool:
        """As `for_output`, the gradient for the input."""
        return faster(self.plan, "fwd", self.training)

    @cached_property
    def for_weight(self) -> bool:
        """As `for_output`, the gradient for the weight."""
        return faster(self.plan, "grad-weight", self.training)

    @cached_property
    def sums(self) -> Plan:
        """A plan whose output has the shape of this one's, for the gradient for the bias alone."""
        p = self.plan.problem
        one, zero = (1,) * p.rank, (0,) * p.rank
        like = p.with_(
            out_channels=p.in_channels, kernel=one, stride=one, padding=zero, output_padding=zero, dilation=one,
            bias=True,
        )  # fmt: skip
        return Plan(like, self.plan.device, "native", planner.FAMILIES, ())

    @cached_property
    def _format(self) -> torch.memory_format:
        return cpu.memory_format(self.plan.problem.layout, self.plan.problem.rank)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        """Of a result, and of its gradient as it is recorded."""
        return cpu.dense_strides(self.plan.problem.input_shape, self._format)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ready = not engine._collectors or engine.ready(self.plan, x.get_device(), self, bias is not None)
        if ready and self.for_output:
            return engine.convolution(self.plan, x, weight, bias)
        p, rounded = self.plan.problem, None if bias is None else bias.to(x.dtype)
        return torch.convolution(
            x, weight.to(x.dtype), rounded, p.stride, p.padding, p.dilation, False, (0,) * p.rank, 1
        )

    def runner(self, index: int) -> Any:
        return engine.loaded(self.plan, index)["grad-input"] if self.for_output else None

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> calls.Gradients:
        grad = grad.contiguous(memory_format=self._format)  # once for both
        theirs = mask[0] and not self.for_input, mask[1] and not self.for_weight, False
        for_input = for_weight = for_bias = None
        if any(theirs):
            for_input, for_weight, _ = self.theirs(grad, x, weight.to(x.dtype), theirs)
        if mask[1] and self.for_weight:
            # It is the transposed convolution's input, whose strides decide where sizes of 1 leave them in doubt; here
            # PyTorch goes by the layer's own input.
            told = grad if grad.stride() == self._strides else grad.as_strided(grad.shape, self._strides)
            for_weight = engine.gradients(self.plan, x, told, weight, (False, True, False))[1]
        if mask[0] and self.for_input:
            for_input = engine.forward(self.plan, grad, weight, None)
        if mask[2]:
            for_bias = engine.gradients(self.sums, grad, x, weight, (False, False, True))[2]
        return for_input, for_weight, for_bias

    def theirs(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> calls.Gradients:
        p = self.plan.problem
        return cpu.torch_gradients(
            grad, x, weight, p.in_channels, p.stride, p.padding, (0,) * p.rank, 1, p.dilation, mask, transposed=False
        )


def forget() -> None:
    """Drops what is remembered of calls: each finds its plan anew."""
    ops.forget_plans()
    _resolve.cache_clear()
