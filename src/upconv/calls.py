"""Calls that were made before: by what a call is recognised as one whose plan is known.

A training step finds the host's caches cold, and there each attribute of a tensor and each flag of PyTorch's that a
call asks for costs it half a microsecond (NOTES: a recorded forward with a stub for the driver takes 13 us in a loop
and 71 in a step; recognised 11 and 60). PyTorch's own guards, which its compiler has for graphs, compare tensors'
types, dispatch keys, dtypes, devices, shapes, strides and ``requires_grad`` by one call. The keys are those that its
dispatcher would see, so that autocast, inference mode, functorch transforms, dispatch modes, tracing, and negated,
sparse or wrapped tensors are a difference too. What keys do not tell is asked for beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from upconv.problem import Precision

if TYPE_CHECKING:
    from upconv.planner import Plan

MOST = 4096
"""Weights that are remembered."""
MOST_GUARDS = 16
"""Made for a weight: one whose calls alternate does without."""

_function_stack: Callable[[], int] = torch._C._len_torch_function_stack
_cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_enabled
_GUARDS: Callable[..., Any] | None = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None
)  # a private class: without it every call finds its plan by its description


def _conv_precision_attribute(backend: str, operation: str) -> str:
    setting: Any = torch.backends.cudnn
    return str(setting.conv.fp32_precision)


# The attribute's getter without the module attribute in between (0.3 us against 1.5).
_conv_precision = getattr(torch._C, "_get_fp32_precision_getter", _conv_precision_attribute)


def float32_precision() -> Precision:
    """How float32 is multiplied on CUDA now: by PyTorch's own setting for convolutions.

    That is ``torch.backends.cudnn.conv.fp32_precision``, which inherits from the general ones where it is ``none``. The
    kernels that PyTorch takes without cuDNN know no TF32.
    """
    return "tf32" if _cudnn_enabled() and _conv_precision("cuda", "conv") == "tf32" else "ieee"


class Call:
    """A call as it was made before, and the plan that it led to."""

    __slots__ = (
        "_last", "_precision", "_unbiased", "autocast", "check", "differentiable", "dilation", "groups", "kind", "made",
        "output_padding", "padding", "plan", "stride",
    )  # fmt: skip

    def __init__(self, plan: Plan, made: int = 0) -> None:
        self.plan = plan
        self.made = made
        """Guards made for the weight so far."""
        self.check: Callable[..., bool] | None = None
        """PyTorch's guards of the tensors; None where the call was made but once: not every size is seen again."""
        self.autocast: torch.dtype | None = None
        """What autocast turns the input into; None where it is off."""
        self.differentiable = False
        """Whether an operand requires a gradient."""

    def guard(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        stride: Any,
        padding: Any,
        output_padding: Any,
        groups: Any,
        dilation: Any,
    ) -> None:
        """Notes what `is_this` compares; ``dtype``: what the call computes in, whatever the input's."""
        tensors = (input, weight) if bias is None else (input, weight, bias)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.groups, self.dilation = groups, dilation
        self.differentiable = any(t.requires_grad for t in tensors)
        self.kind = "cuda" if input.is_cuda else "cpu"
        self.autocast = dtype if torch.is_autocast_enabled(self.kind) else None
        self._unbiased = bias is None
        self._precision = float32_precision() if dtype is torch.float32 and input.is_cuda else None
        self._last = self.plan.problem.layout != "nchw"
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        assert _GUARDS is not None
        self.check = _GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def is_this(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Any,
        padding: Any,
        output_padding: Any,
        groups: Any,
        dilation: Any,
    ) -> bool:
        """Whether a call leads to the same plan. Of equal arguments that are other objects it does not say so."""
        return (
            self.check is not None
            and self.stride is stride  # a layer's own attributes
            and self.padding is padding
            and self.output_padding is output_padding
            and self.groups is groups
            and self.dilation is dilation
            and self._unbiased is (bias is None)
            and (self.check(input, weight) if bias is None else self.check(input, weight, bias))
            and forward_ad._current_level < 0
            and not _function_stack()
            and (self._precision is None or self._precision == float32_precision())
            and (self.autocast is None or self.autocast is torch.get_autocast_dtype(self.kind))
            and (not self._last or _cudnn_enabled())
        )


seen: dict[int, Call] = {}
"""The last call with a weight, by the weight's `id`; of what has the same by chance, `Call.is_this` knows better."""


def remember(
    known: Call | None, plan: Plan, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *rest: Any
) -> None:
    """Notes a call that found its plan by its description; of the second in turn with a plan, its guards too.

    ``known`` is what was seen of the weight before, ``dtype`` what the call computes in, ``rest`` its other arguments.
    """
    made = 0 if known is None else known.made
    if _GUARDS is None or made >= MOST_GUARDS:
        return
    if len(seen) >= MOST:
        seen.clear()
    if known is None or known.plan is not plan:
        seen[id(weight)] = Call(plan, made)
        return
    found = Call(plan, made + 1)
    found.guard(input, weight, bias, dtype, *rest)
    seen[id(weight)] = found
