"""Calls that were made before: by what a call is recognised as one whose plan is known.

A training step finds the host's caches cold, and there each attribute of a tensor and each flag of PyTorch's that a
call asks for costs it half a microsecond (docs/experiments.md). PyTorch's own guards, which its compiler has for
graphs, compare tensors' types, dispatch keys, dtypes, devices, shapes, strides and ``requires_grad`` by one call. The
keys are those that its dispatcher would see, so that autocast, inference mode, functorch transforms, dispatch modes,
tracing, and negated, sparse or wrapped tensors are a difference too. What keys do not tell is asked for beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from upconv.problem import Precision

if TYPE_CHECKING:
    from upconv.planner import Plan

Operands = tuple[Tensor, Tensor, "Tensor | None"]
"""Input, weight and bias."""
Arguments = tuple[int, Any, Any, Any, Any, Any]
"""The rank, and a call's stride, padding, output_padding, groups and dilation as the caller gave them."""
Gradients = tuple["Tensor | None", "Tensor | None", "Tensor | None"]
"""For input, weight and bias."""


class Operation(Protocol):
    """What a call leads to: a transposed convolution by a plan, or a plain one."""

    def __hash__(self) -> int: ...

    @property
    def plain(self) -> bool: ...

    @property
    def plan(self) -> Plan:
        """A plain convolution's is that of the transposed one whose gradient for the input it is."""

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the result, whose layout is that of the plan's problem."""

    @property
    def inference(self) -> Operation:
        """What computes the same call where no gradient is recorded."""

    def loaded(self, index: int) -> bool:
        """Whether the forward was computed on a device."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """By our kernels, keeping nothing: on the current stream, without autograd."""

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        """As `forward`, those that ``mask`` asks for."""

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        """The same in every state of autograd, autocast and functorch that a backward may run in."""


MOST = 4096
"""Weights that are remembered."""
MOST_CALLS = 3
"""Of a weight: an image size each for training and validation, say, and a last batch."""
MOST_GUARDS = 16
"""Made for one plan of a weight: where what requires a gradient alternates, calls do without."""

_function_stack: Callable[[], int] = torch._C._len_torch_function_stack
_cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_enabled
unwrapped: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
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
    """A call as it was made before, and the operation that it led to.

    ``dtype`` is what it computes in, whatever the input's; ``made`` how many guards were made for the operation.
    """

    __slots__ = (
        "_arguments", "_check", "_kind", "_last", "_precision", "_unbiased", "autocast", "differentiable", "inference",
        "made", "operation",
    )  # fmt: skip

    def __init__(
        self, operation: Operation, given: Operands, dtype: torch.dtype, arguments: Arguments, made: int = 1
    ) -> None:
        input, weight, bias = given
        tensors = (input, weight) if bias is None else (input, weight, bias)
        self.operation, self.inference, self.made = operation, operation.inference, made
        self.differentiable = any(t.requires_grad for t in tensors)
        """Whether an operand requires a gradient."""
        self._kind = "cuda" if input.is_cuda else "cpu"
        self.autocast = dtype if torch.is_autocast_enabled(self._kind) else None
        """What autocast turns the input into; None where it is off."""
        self._arguments = arguments
        self._unbiased = bias is None
        self._precision = float32_precision() if dtype is torch.float32 and input.is_cuda else None
        self._last = operation.plan.problem.layout != "nchw"
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        assert _GUARDS is not None
        self._check = _GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def is_this(
        self,
        rank: int,
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
        known = self._arguments  # a layer's own attributes
        return (
            known[1] is stride
            and known[2] is padding
            and known[3] is output_padding
            and known[4] is groups
            and known[5] is dilation
            and known[0] == rank
            and self._unbiased is (bias is None)
            and (self._check(input, weight) if bias is None else self._check(input, weight, bias))
            and forward_ad._current_level < 0
            and not _function_stack()
            and (self._precision is None or self._precision == float32_precision())
            and (self.autocast is None or self.autocast is torch.get_autocast_dtype(self._kind))
            and (not self._last or _cudnn_enabled())
        )


class Seen:
    """What is remembered of a weight: the calls that led to one operation twice in turn, and the last call's."""

    __slots__ = ("calls", "last")

    def __init__(self, last: Operation) -> None:
        self.calls: tuple[Call, ...] = ()
        self.last = last


seen: dict[int, Seen] = {}
"""Transposed convolutions, by the weight's `id`; of a weight that has the same by chance, `Call.is_this` knows that it
is another."""
seen_plain: dict[int, Seen] = {}
"""Plain convolutions."""


def forget() -> None:
    """Drops what is remembered."""
    seen.clear()
    seen_plain.clear()


_IMMUTABLE = (int, tuple)


def lasting(arguments: Arguments) -> bool:
    """Whether arguments that are the same objects are the same numbers; a list may hold others by now."""
    return all(type(a) in _IMMUTABLE for a in arguments)


def remember(operation: Operation, given: Operands, dtype: torch.dtype, arguments: Arguments) -> None:
    """Notes a call that found its operation by its description; of the second in turn with one, its guards too.

    ``dtype`` is what the call computes in.
    """
    if _GUARDS is None or _function_stack() or not lasting(arguments):
        return
    among, weight = seen_plain if operation.plain else seen, given[1]
    known = among.get(id(weight))
    if known is None or known.last is not operation:  # not every size of an image is seen again
        if known is None:
            if len(among) >= MOST:
                among.clear()
            among[id(weight)] = Seen(operation)
        else:
            known.last = operation
        return
    if any(unwrapped(t) is not t for t in given if t is not None):
        return  # left over from a functorch transform
    made = sum(call.made for call in known.calls if call.operation is operation)
    if made >= MOST_GUARDS:
        return
    others = tuple(call for call in known.calls if call.operation is not operation)[: MOST_CALLS - 1]
    known.calls = (Call(operation, given, dtype, arguments, made + 1), *others)
