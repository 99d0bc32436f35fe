"""The operators of compiled graphs.

Dynamo records ``upconv::conv_transpose``. It is composite: its Python runs whenever a graph is traced further, on fake
tensors, and becomes one of two things.

- *PyTorch's operator*, which has rules for everything: under a functorch transform, for dual numbers, and where `rule`
  leaves the call to PyTorch.
- *Ours*: ``upconv::conv_transpose_forward``, and ``upconv::conv_transpose_backward`` in the graph of the gradients.

These two only compute. Where someone derives a graph that has them, as PyTorch's ``scan`` does, PyTorch's operator runs
in their place. Their kernels are registered for the autograd keys too, so that a compiled graph enters Python once a
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from upconv import autograd, cpu, dispatch, planner, refusals
from upconv.compiler import flops, layouts, recorded, rule
from upconv.compiler.arguments import Arguments, arguments_of, text_of
from upconv.problem import PRECISIONS, output_length
from upconv.replay import calls

_LIBRARY = torch.library.Library("upconv", "DEF")
_SCHEMA = "SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt groups, SymInt[] dilation"
_OPERANDS = "Tensor input, Tensor weight, Tensor? bias"
for _signature in (
    f"conv_transpose({_OPERANDS}, {_SCHEMA}) -> Tensor",
    f"conv_transpose_forward({_OPERANDS}, str arguments) -> Tensor",
    "conv_transpose_backward(Tensor grad, Tensor input, Tensor weight, str arguments, int mask) -> (Tensor, Tensor)",
):
    _LIBRARY.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))


# --- the composite operator ------------------------------------------------------------------------------------------


def _composite(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    layouts.teach()
    flops.teach()
    operands = (input, weight, bias)
    if dispatch.transforms_active() or any(map(_is_dual, operands)):
        return _theirs(input, weight, bias, *arguments)
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    plan = _planned(input, weight, bias, arguments)
    if plan is None or not (refusals.active or rule.verdict(plan, differentiable).ours):
        return _theirs(input, weight, bias, *arguments)
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        input, weight, bias = dispatch.autocast(input, weight, bias, kind in dispatch.ROUNDING)
    text = text_of(*arguments)
    if differentiable:
        out: Tensor = _ConvTranspose.apply(input, weight, bias, text)
        return out
    return _forward(input, weight, bias, text)


def _theirs(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """PyTorch's operator; it casts under autocast, and its errors are those of an invalid call."""
    out: Tensor = dispatch.TORCH[input.dim() - 2](input, weight, bias, *arguments)
    return out


def _below_autograd() -> bool:
    """Whether someone else takes the derivatives, as PyTorch does around the branches of ``torch.cond``."""
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    return excluded


def _is_dual(t: Tensor | None) -> bool:
    """Whether a tensor has a tangent. Levels that a graph enters are unknown to `torch.autograd.forward_ad`.

    Below autograd none is seen, and ``_unpack_dual`` fails.
    """
    return t is not None and not _below_autograd() and torch._VF._unpack_dual(t, 0)[1] is not None


def _planned(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> planner.Plan | None:
    """The plan for a call on fake tensors, of symbolic sizes for the sizes that were seen; None where there is none."""
    kind, rank = input.device.type, input.dim() - 2
    tensors = [t for t in (input, weight, bias) if t is not None]
    if kind not in dispatch.DEVICES or any(t.device != input.device or t.layout is not torch.strided for t in tensors):
        return None
    dtypes = [t.dtype for t in tensors]
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        dtypes = [lower if d.is_floating_point and d is not torch.float64 else d for d in dtypes]
    stride, padding, output_padding, groups, dilation = arguments
    try:
        sizes = [_hints(t.shape) for t in tensors]
        strides = [_hints(t.stride()) for t in tensors]
        numbers = [_hints(v) for v in (stride, padding, output_padding, dilation)]
        (groups,) = _hints((groups,))
    except ValueError:
        return None
    if any(dtype is not dtypes[0] or dtype not in PRECISIONS for dtype in dtypes):
        return None
    cuda = kind == "cuda"
    return dispatch.resolve(
        rank, torch.Size(sizes[0]), strides[0], torch.Size(sizes[1]), strides[1],
        None if bias is None else torch.Size(sizes[2]), *numbers[:3], groups, numbers[3], dtypes[0],
        calls.float32_precision() if cuda and dtypes[0] is torch.float32 else None,
        input.get_device() if cuda else planner.cpu_device(),
    )  # fmt: skip


def _hints(values: Sequence[Any]) -> tuple[int, ...]:
    """Sizes as integers, symbolic ones as the graph is traced with. Errors: ValueError for one that depends on data."""
    found = []
    for value in values:
        if not isinstance(value, int):
            value = value.node.hint
        if not isinstance(value, int):
            raise ValueError("a size that depends on data")
        found.append(value)
    return tuple(found)


class _ConvTranspose(torch.autograd.Function):
    """As `upconv.autograd`'s, of operators that can be traced. The bias's gradient is a sum, which a compiler fuses."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, text: str) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.text, ctx.of_bias = text, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return _forward(input, weight, bias, text)

    @staticmethod
    @autograd.uncast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        mask = autograd.asked(ctx)
        for_input, for_weight = _gradients(grad, input, weight, ctx.text, mask)
        for_bias = grad.sum((0, *range(2, grad.dim())), dtype=ctx.of_bias) if mask[2] else None
        return for_input, for_weight, for_bias, None


def _gradients(
    grad: Tensor, input: Tensor, weight: Tensor, text: str, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    if not any(mask[:2]):
        return None, None
    derived = torch.is_grad_enabled() or dispatch.transforms_active() or any(map(_is_dual, (grad, input, weight)))
    compute = _their_gradients if derived else torch.ops.upconv.conv_transpose_backward
    found = compute(grad, input, weight, text, mask[0] + 2 * mask[1])
    return (found[0] if mask[0] else None), (found[1] if mask[1] else None)


# --- the operators that compute --------------------------------------------------------------------------------------


def _their_forward(input: Tensor, weight: Tensor, bias: Tensor | None, text: str) -> Tensor:
    bias = None if bias is None else bias.to(input.dtype)
    return _theirs(input, weight.to(input.dtype), bias, *arguments_of(text))


def _their_gradients(grad: Tensor, input: Tensor, weight: Tensor, text: str, mask: int) -> tuple[Tensor, Tensor]:
    stride, padding, output_padding, groups, dilation = arguments_of(text)
    asked = [bool(mask & 1), bool(mask & 2), False]
    found = torch.ops.aten.convolution_backward(
        grad, input, weight.to(input.dtype), None, stride, padding, dilation, True, output_padding, groups, asked
    )
    return (
        found[0] if asked[0] else grad.new_empty(0),
        found[1].to(weight.dtype) if asked[1] else grad.new_empty(0),
    )


def _run(input: Tensor, weight: Tensor, bias: Tensor | None, text: str) -> Tensor:
    arguments = arguments_of(text)
    rank, rounded = len(arguments[0]), weight.dtype is not input.dtype
    plan = dispatch.find_plan(rank, input, weight, bias, *arguments, rounded)
    if plan is not None and plan.choice is not None:
        doubtful = dispatch.doubtful(plan.problem, input.device.type)
        found = recorded.compute(plan, 0, (input, weight, bias), None if doubtful else text)[0]
        assert found is not None
        if plan.problem.layout != "nchw" or not doubtful:
            return found
    elif plan is None or plan.forward == "native":
        bias = None if bias is None else bias.to(input.dtype)
        found = dispatch.TORCH[rank](input, weight.to(input.dtype), bias, *arguments)
        if refusals.active:
            refusals.refuse(found, plan, input, weight, bias, *arguments)
    else:
        found = cpu.forward(plan.problem, plan.forward, input, weight, bias)
    return found.contiguous(memory_format=_format(input, weight))  # as _fake says


def _run_backward(grad: Tensor, input: Tensor, weight: Tensor, text: str, mask: int) -> tuple[Tensor, Tensor]:
    arguments = arguments_of(text)
    plan = dispatch.find_plan(len(arguments[0]), input, weight, None, *arguments, weight.dtype is not input.dtype)
    asked = (bool(mask & 1), bool(mask & 2), False)
    found: Sequence[Tensor | None]
    if plan is None:
        channels = weight.shape[1] * arguments[3]
        found = cpu.torch_gradients(grad, input, weight.to(input.dtype), channels, *arguments, asked)
    elif plan.backward == planner.FAMILIES:
        if refusals.active:
            refusals.refuse_gradients(plan, asked)
        exact = not dispatch.doubtful(plan.problem, grad.device.type)
        found = recorded.compute(plan, mask, (grad, input, weight), text if exact else None)
    else:
        found = autograd.transposed(plan).taken(grad, input, weight, asked)
    layout = _format(input, weight)
    for_input, for_weight = found[0], found[1]
    return (
        grad.new_empty(0) if for_input is None else for_input.contiguous(memory_format=layout),
        grad.new_empty(0) if for_weight is None else for_weight.to(weight.dtype).contiguous(memory_format=layout),
    )


def _format(input: Tensor, weight: Tensor) -> torch.memory_format:
    return cpu.memory_format(dispatch.layout_of(input, weight), input.dim() - 2)


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, text: str) -> Tensor:
    stride, padding, output_padding, groups, dilation = arguments_of(text)
    axes = zip(input.shape[2:], weight.shape[2:], stride, padding, output_padding, dilation)
    shape = (input.shape[0], weight.shape[1] * groups, *(output_length(*axis) for axis in axes))
    return torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=_format(input, weight))


def _fake_backward(grad: Tensor, input: Tensor, weight: Tensor, text: str, mask: int) -> tuple[Tensor, ...]:
    layout = _format(input, weight)

    def like(t: Tensor, wanted: int) -> Tensor:
        if not wanted:
            return grad.new_empty(0)
        return torch.empty(t.shape, dtype=t.dtype, device=t.device, memory_format=layout)

    return like(input, mask & 1), like(weight, mask & 2)


def _replayed(a: Tensor, b: Tensor, c: Tensor | None, text: str, mask: int = 0) -> Any:
    """What an operator returns for a call that was made before; None for another."""
    found = recorded.replayed(text, mask, a, b, c)
    if found is None or not mask:
        return found
    return tuple(a.new_empty(0) if each is None else each for each in found[:2])


def _replaying(run: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel below autograd."""

    def kernel(*given: Any) -> Any:
        found = _replayed(*given)
        return run(*given) if found is None else found

    return kernel


def _recorded(name: str, run: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel for autograd's keys: computes at once, where neither a mode nor a subclass of Tensor wants to see.

    ``theirs`` is by PyTorch's operator, which has derivatives of all kinds.
    """

    def kernel(*given: Any) -> Any:
        tensors = [t for t in given[:3] if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return theirs(*given)
        plain = all(type(t) in dispatch.PLAIN for t in tensors)
        if plain and (found := _replayed(*given)) is not None:
            return found
        if (forward_ad._current_level >= 0 or dispatch.transforms_active()) and any(map(_is_dual, tensors)):
            return theirs(*given)
        if torch._C._len_torch_dispatch_stack() > 0 or not plain:
            flops.teach()
            with torch._C._AutoDispatchBelowAutograd():
                return getattr(torch.ops.upconv, name)(*given)
        return run(*given)

    return kernel


for _name, _call, _derived, _shapes in (
    ("conv_transpose_forward", _run, _their_forward, _fake),
    ("conv_transpose_backward", _run_backward, _their_gradients, _fake_backward),
):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _replaying(_call), _key)
        _LIBRARY.impl(_name, _recorded(_name, _call, _derived), f"Autograd{_key}")
    torch.library.register_fake(f"upconv::{_name}", _shapes, lib=_LIBRARY)
for _key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
    _LIBRARY.impl("conv_transpose", _composite, _key)
_forward = torch.ops.upconv.conv_transpose_forward
