"""The operator for torch: the way that a call takes.

A call takes one of three ways.

- *Ours, eagerly*: what `upconv.dispatch` finds a plan for. The call is recognised (`repeated`) or its plan looked up by
  its description, the engine is called directly, and gradients go through one ``autograd.Function``
  (`upconv.autograd`). No dispatcher is involved: registering an operator costs 5 to 12 us a call, a Function 2.
- *Ours, compiled*: ``torch.compile`` traces an operator, and a rule says whose kernel its graph calls
  (`upconv.compiler`).
- *PyTorch's own operator*: whatever the engines do not serve (complex and integer dtypes, empty tensors, other devices,
  tensor subclasses), whatever PyTorch has rules for and we do not (functorch transforms, forward-mode AD, tracing,
  export, dispatch modes), and every invalid call, so that the error is PyTorch's to the letter.

`strict` makes the third way an error where an engine could have been expected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from upconv import autograd, dispatch, refusals
from upconv.dispatch import PLAIN, TORCH, IntOrInts, forget_plans
from upconv.refusals import strict
from upconv.replay import calls, replays

__all__ = ["IntOrInts", "computed", "conv_transpose", "forget_plans", "repeated", "strict"]


def conv_transpose(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntOrInts,
    padding: IntOrInts,
    output_padding: IntOrInts,
    groups: int,
    dilation: IntOrInts,
) -> Tensor:
    """A transposed convolution of ``rank`` spatial dimensions, by the best way that this call allows."""
    if is_compiling():
        return _traced(rank, input, weight, bias, stride, padding, output_padding, groups, dilation)
    if calls.seen:  # none are where every layer is on a CPU
        out = repeated(False, rank, input, weight, bias, stride, padding, output_padding, groups, dilation)
        if out is not None:
            return out
    plan, given, rounded = None, (input, weight, bias), False
    plain = type(input) in PLAIN and type(weight) in PLAIN and (bias is None or type(bias) in PLAIN)
    # Asking a device for its type costs three times as much.
    kind = ("cuda" if input.is_cuda else "cpu" if input.is_cpu else "") if plain else ""
    if kind and (input.is_nested or weight.is_nested or (bias is not None and bias.is_nested)):
        kind = ""  # plain by its type, but without a shape
    if kind and not dispatch.observed():
        if torch.is_autocast_enabled(kind):
            input, weight, bias = dispatch.autocast(input, weight, bias, kind in dispatch.ROUNDING)
            rounded = weight.dtype is torch.float32 and input.dtype.itemsize == 2
        plan = dispatch.find_plan(
            rank, input, weight, bias, stride, padding, output_padding, groups, dilation, rounded
        )  # fmt: skip
    if plan is None or (plan.choice is None and (plan.delegates or (refusals.active and plan.forward == "native"))):
        out = TORCH[rank](input, weight, bias, stride, padding, output_padding, groups, dilation)
        if refusals.active:
            refusals.refuse(out, plan, input, weight, bias, stride, padding, output_padding, groups, dilation)
        return out
    own = weight is given[1] and bias is given[2]  # not autocast's copies
    batched = input.dim() == rank + 2
    again = own and batched and plan.choice is not None and not dispatch.doubtful(plan.problem, "cuda")
    arguments = (rank, stride, padding, output_padding, groups, dilation) if again else None
    cast = (input if batched else input.unsqueeze(0)), weight, bias
    out = computed(autograd.transposed(plan), given, cast, arguments)
    return out if batched else out.squeeze(0)


def _traced(rank: int, input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """What ``torch.compile`` traces for a call: the operator that `upconv.compiler` defines.

    An exported program must run without this package, so ``torch.export`` records PyTorch's operator. So are calls
    that only PyTorch's operator takes.
    """
    # Under torch.compile, is_exporting() says True before 2.13.
    if torch.compiler._is_exporting_flag or input.dim() != rank + 2 or weight.dim() != rank + 2:
        out: Tensor = TORCH[rank](input, weight, bias, *arguments)
        return out
    stride, padding, output_padding, groups, dilation = arguments
    spread = [[v] * rank if isinstance(v, int) else list(v) for v in (stride, padding, output_padding, dilation)]
    call: Callable[..., Tensor] = torch.ops.upconv.conv_transpose
    return call(input, weight, bias, *spread[:3], groups, spread[3])


# --- calls that an operation computes --------------------------------------------------------------------------------


def repeated(
    plain: bool,
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: Any,
    dilation: Any,
) -> Tensor | None:
    """The result of a call that was made before, and is `computed` as then; None for another.

    ``plain``: whether it is a plain convolution.
    """
    if type(input) not in PLAIN or type(weight) not in PLAIN or input.is_nested or weight.is_nested:
        return None
    if bias is not None and (type(bias) not in PLAIN or bias.is_nested):
        return None
    known = calls.known(plain, input, weight, bias, (rank, stride, padding, output_padding, groups, dilation))
    if known is None:
        return None
    training = known.differentiable and torch.is_grad_enabled()
    out = replays.replayed(known, input, weight, bias, training) if replays.hoped else None
    if out is not None:
        return out
    x = input if known.autocast is None else input.to(known.autocast)
    return autograd.apply(x, weight, bias, known.operation) if training else known.inference.forward(x, weight, bias)


def computed(
    by: autograd.Operation,
    given: calls.Operands,
    cast: calls.Operands,
    arguments: calls.Arguments | None,
) -> Tensor:
    """The result of a call by an operation.

    Args:
        by: the operation.
        given: input, weight and bias as the caller gave them.
        cast: the same in the dtypes that the operation takes.
        arguments: the call's rank, stride, padding, output_padding, groups and dilation, as the caller gave them, by
            which it will be known when it is `repeated`; None where it shall not.
    """
    if arguments is not None:
        calls.remember(by, given, cast[0].dtype, arguments)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in cast):
        return by.forward(*cast)
    out: Tensor = autograd.apply(*(t if t is None else calls.unwrapped(t) for t in cast), by)
    return out
