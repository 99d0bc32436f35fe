"""Which calls are ours, and the plan that a transposed convolution gets.

A call is ours, eagerly, if it is of plain strided tensors of a floating dtype on the CPU or one CUDA device, and
PyTorch need not see it (`observed`). Its plan is looked up by its description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from upconv import cpu, planner
from upconv.planner import Plan
from upconv.problem import PRECISIONS, Layout, Precision, Problem, is_channels_last
from upconv.replay import calls

TORCH: tuple[Any, ...] = (None, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
"""PyTorch's own operators by their rank."""
PLAIN = (Tensor, Parameter)
"""The types of plain tensors."""
DEVICES = ("cpu", "cuda")
"""Those that have an engine."""
ROUNDING = ("cuda",)
"""Devices whose engine takes autocast's float32 weights as they are."""
IntOrInts = int | Sequence[int]

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def observed() -> bool:
    """Whether PyTorch itself must see the call: a transform, dual numbers, a trace or a dispatch mode is active."""
    return (
        transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or calls.modes_watch()
    )


# --- which plan ------------------------------------------------------------------------------------------------------


def find_plan(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntOrInts,
    padding: IntOrInts,
    output_padding: IntOrInts,
    groups: int,
    dilation: IntOrInts,
    rounded: bool = False,
) -> Plan | None:
    """The plan for a call, or None when PyTorch's own operator must judge it (and raise what is wrong with it).

    ``rounded``: weight and bias are float32, which the engine rounds to the input's dtype.
    """
    dtype, cuda, index = input.dtype, input.is_cuda, input.get_device()
    of_weight = torch.float32 if rounded else dtype
    if (
        dtype not in PRECISIONS
        or weight.dtype is not of_weight
        or not (cuda or input.is_cpu)
        or not (weight.is_cuda if cuda else weight.is_cpu)
        or weight.get_device() != index
        or input.layout is not torch.strided
        or weight.layout is not torch.strided
    ):
        return None
    if bias is not None and (
        bias.dtype is not of_weight
        or bias.get_device() != index
        or not (bias.is_cuda if cuda else bias.is_cpu)
        or bias.layout is not torch.strided
    ):
        return None
    where: planner.Device | int
    if cuda:  # by its index: hashing a description would cost more than the rest of the look-up
        where, precision = index, calls.float32_precision() if dtype is torch.float32 else None
    else:
        where, precision = planner.cpu_device(), None
    try:
        stride = stride if type(stride) is tuple else _tuple(stride)
        padding = padding if type(padding) is tuple else _tuple(padding)
        output_padding = output_padding if type(output_padding) is tuple else _tuple(output_padding)
        dilation = dilation if type(dilation) is tuple else _tuple(dilation)
        if not calls.integral((groups, *stride, *padding, *output_padding, *dilation)):
            return None
        plan = resolve(
            rank, input.shape, input.stride(), weight.shape, weight.stride(), None if bias is None else bias.shape,
            stride, padding, output_padding, groups, dilation, dtype, precision, where,
        )  # fmt: skip
    except TypeError:  # something that is no integer: PyTorch says which
        return None
    if plan is None or plan.problem.layout == "nchw":
        return plan
    if doubtful(plan.problem, "cuda" if cuda else "cpu"):
        x = input if input.dim() == rank + 2 else input.unsqueeze(0)
        if not _keeps_channels_last(plan.problem, x, weight.to(x.dtype)):
            return planner.plan(plan.problem.with_(layout="nchw"), plan.device)
    return plan


def doubtful(p: Problem, device: str) -> bool:
    """Whether PyTorch may return a contiguous result although an operand is channels_last.

    Its backends without oneDNN or cuDNN do. On CUDA those are taken without cuDNN, and where ``output_padding`` reaches
    the stride (which only a dilation allows).
    """
    if device == "cpu":
        return p.rank == 3
    return not torch._C._get_cudnn_enabled() or any(op >= s for op, s in zip(p.output_padding, p.stride))


def _keeps_channels_last(p: Problem, input: Tensor, weight: Tensor) -> bool:
    """Whether the backend that PyTorch chooses returns its result in channels_last."""
    backend = torch._C._select_conv_backend(
        input, weight, None, p.stride, p.padding, p.dilation, True, p.output_padding, p.groups, None
    )
    found = torch._C._conv_determine_backend_memory_format(input, weight, backend)
    return bool(found is cpu.memory_format("channels_last", p.rank))


def forget_plans() -> None:
    """Drops what is remembered of calls: each finds its plan anew."""
    calls.forget()
    resolve.cache_clear()


@lru_cache(maxsize=4096)
def resolve(
    rank: int,
    shape: torch.Size,
    strides: tuple[int, ...],
    weight_shape: torch.Size,
    weight_strides: tuple[int, ...],
    bias_shape: torch.Size | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: Any,
    dilation: Any,
    dtype: torch.dtype,
    precision: Precision | None,
    where: planner.Device | int,
) -> Plan | None:
    if len(shape) == rank + 1:
        shape, strides = torch.Size((1, *shape)), (shape[0] * strides[0], *strides)
    if len(shape) != rank + 2 or len(weight_shape) != rank + 2 or shape[1] != weight_shape[0]:
        return None
    if 0 in shape or 0 in weight_shape:
        return None
    if rank == 1 and (reads_as_image(weight_shape, weight_strides) or reads_as_image(shape, strides, copied=True)):
        return None
    out_channels = weight_shape[1] * groups
    if bias_shape is not None and tuple(bias_shape) != (out_channels,):
        return None
    device = where if isinstance(where, planner.Device) else planner.cuda_device(where)
    layout = _layout(shape, strides, weight_shape, weight_strides, device.kind == "cuda" and dtype is torch.float64)
    try:
        problem = Problem.make(
            shape[0], shape[1], out_channels, shape[2:], weight_shape[2:], stride, padding, output_padding, dilation,
            groups, bias=bias_shape is not None, dtype=dtype, precision=precision,
            layout=layout,
        )  # fmt: skip
    except ValueError:
        return None
    return planner.plan(problem, device)


def _tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if type(value) is int else tuple(value)


def reads_as_image(shape: Sequence[int], strides: Sequence[int], copied: bool = False) -> bool:
    """Whether PyTorch takes a 1-D layer's operand for channels_last, and returns strides that no engine of ours makes.

    It computes 1-D layers as 2-D ones of height 1. ``copied``: the input is made contiguous before.
    """
    step = 1
    for n, s in zip(reversed(shape), reversed(strides)):
        if copied and n != 1 and s != step:
            return False
        step *= n
    return is_channels_last((*shape[:2], 1, shape[2]), (*strides[:2], shape[2] * strides[2], strides[2]))


def layout_of(input: Tensor, weight: Tensor) -> Layout:
    """The layout of the result: channels_last when either operand is, as PyTorch chooses, but for float64 on CUDA.

    Source for CUDA: ``cudnn_conv_suggest_memory_format`` in ``ATen/native/ConvUtils.h``.
    """
    double = input.dtype is torch.float64 and input.device.type == "cuda"
    return _layout(input.shape, input.stride(), weight.shape, weight.stride(), double)


def _layout(
    shape: Sequence[int],
    strides: Sequence[int],
    weight_shape: Sequence[int],
    weight_strides: Sequence[int],
    double: bool,
) -> Layout:
    """As `layout_of`; ``double``: float64 on CUDA."""
    last = not double and (is_channels_last(shape, strides) or is_channels_last(weight_shape, weight_strides))
    return "channels_last" if last else "nchw"


def autocast(
    input: Tensor, weight: Tensor, bias: Tensor | None, rounding: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands in autocast's dtype: every floating tensor of the device but float64, as PyTorch casts them.

    ``rounding``: float32 weights and biases stay, for an engine that rounds them where it reads them. That spares a
    training step each cast and its derivative; and the gradients for weight and bias come in float32, by tensor cores
    without a rounding to 16 bits (but where they are differentiated again, or batched).
    """
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor) -> Tensor:
        eligible = t.device.type == kind and t.is_floating_point() and t.dtype is not torch.float64
        return t.to(dtype) if eligible else t

    single = weight.dtype is torch.float32 and (bias is None or bias.dtype is torch.float32)
    if rounding and single and dtype.itemsize == 2 and (cast_input := cast(input)).dtype is dtype:
        return cast_input, weight, bias
    return cast(input), cast(weight), None if bias is None else cast(bias)
