"""Calls that were made before: by what a call is recognised as one whose plan is known.

A training step finds the host's caches cold, and there each attribute of a tensor and each flag of PyTorch's that a
call asks for costs it half a microsecond (docs/experiments.md). PyTorch's own guards, which its compiler has for
graphs, compare tensors' types, dispatch keys, dtypes, devices, shapes, strides and ``requires_grad`` by one call. The
keys are those that its dispatcher would see, so that autocast, inference mode, functorch transforms, dispatch modes,
tracing, and negated, sparse or wrapped tensors are a difference too. What keys do not tell is asked for beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from upconv.problem import Precision

Operation = Any
"""What computes a call: an `upconv.autograd.Operation`, whose module imports this one."""
Operands = tuple[Tensor, Tensor, "Tensor | None"]
"""Input, weight and bias."""
Arguments = tuple[int, Any, Any, Any, Any, Any]
"""The rank, and a call's stride, padding, output_padding, groups and dilation as the caller gave them."""
Gradients = tuple["Tensor | None", "Tensor | None", "Tensor | None"]
"""For input, weight and bias."""


MOST = 4096
"""Shapes of operands that are remembered."""
MOST_CALLS = 8
"""Of the same shapes: layers that differ by their padding, say, and operands with and without a gradient."""
MOST_GUARDS = 32
"""Made for the same shapes: where they alternate more, calls do without."""

_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_enabled
# The getter of the attribute that `float32_precision` names, without the module in between (0.3 us against 1.5).
_conv_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
unwrapped: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
GUARDS: Callable[..., Any] | None = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None
)  # a private class: without it every call finds its plan by its description


def float32_precision() -> Precision:
    """How float32 is multiplied on CUDA now: by PyTorch's own setting for convolutions.

    That is ``torch.backends.cudnn.conv.fp32_precision``, which inherits from the general ones where it is ``none``. The
    kernels that PyTorch takes without cuDNN know no TF32.
    """
    return "tf32" if _cudnn_enabled() and _conv_precision("cuda", "conv") == "tf32" else "ieee"


def modes_watch() -> bool:
    """Whether a ``__torch_function__`` mode wants to see calls; a default device is such a mode and does not."""
    return _function_modes() > 0 and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


class Guarded:
    """Operands of a call that was made before, and PyTorch's flags that its plan depends on.

    ``dtype`` is what the call computes in, ``last`` whether in channels_last. No tensor is held.
    """

    __slots__ = ("_check", "_last", "_precision")

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype, last: bool) -> None:
        self._precision = float32_precision() if dtype is torch.float32 and tensors[0].is_cuda else None
        self._last = last
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        assert GUARDS is not None
        self._check = GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def fits(self, *tensors: Tensor) -> bool:
        """Whether a call on as many operands has the same plan."""
        return (
            self._check(*tensors)
            and forward_ad._current_level < 0
            and (self._precision is None or self._precision == float32_precision())
            and (not self._last or _cudnn_enabled())
        )


class Call(Guarded):
    """A call as it was made before, and the operation that it led to. ``dtype`` is what it computes in."""

    __slots__ = (
        "_arguments", "_kind", "_unbiased", "autocast", "differentiable", "inference", "layers", "operation", "runner",
    )  # fmt: skip

    def __init__(self, operation: Operation, given: Operands, dtype: torch.dtype, arguments: Arguments) -> None:
        input, weight, bias = given
        tensors = (input, weight) if bias is None else (input, weight, bias)
        super().__init__(tensors, dtype, operation.plan.problem.layout != "nchw")
        self.operation, self.inference = operation, operation.inference
        self.differentiable = any(t.requires_grad for t in tensors)
        """Whether an operand requires a gradient."""
        self.layers: list[Any] = [None, None, None]
        """What replays it (`upconv.replay.replays`), once it is recorded: without its gradients, with them, and of a
        frozen weight."""
        self.runner: Any = None
        """Whose copies of frozen weights are read; False where weights are read as they are, None if not known yet."""
        self._kind = "cuda" if input.is_cuda else "cpu"
        self.autocast = dtype if torch.is_autocast_enabled(self._kind) else None
        """What autocast turns the input into; None where it is off."""
        self._arguments = arguments
        self._unbiased = bias is None

    def is_this(self, input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> bool:
        """Whether a call leads to the same plan."""
        return (
            self._arguments == arguments
            # A layer's own attributes are the same objects, and a copy's are integers.
            and (all(map(is_, self._arguments, arguments)) or all(map(integral, arguments)))
            and self._unbiased is (bias is None)
            and (self.fits(input, weight) if bias is None else self.fits(input, weight, bias))
            and not (_function_modes() and modes_watch())
            and (self.autocast is None or self.autocast is torch.get_autocast_dtype(self._kind))
        )


_INTEGERS = frozenset((int,))


def integral(value: Any) -> bool:
    """Whether an argument is an integer, or a tuple of some. True and 1.0 equal 1, and PyTorch takes neither."""
    return type(value) is int or (type(value) is tuple and _INTEGERS.issuperset(map(type, value)))


class Seen:
    """What is remembered of operands of some shapes: the calls that led to one operation twice in turn, the latest
    first, and the last call's operation.
    """

    __slots__ = ("calls", "last", "made")

    def __init__(self, last: Operation) -> None:
        self.calls: tuple[Call, ...] = ()
        self.last = last
        self.made = 0
        """How many calls were remembered."""


Key = tuple[bool, torch.Size, torch.Size]
"""Whether a call is a plain convolution, and the shapes of its input and weight."""
seen: dict[Key, Seen] = {}
_forgotten: list[Callable[[], object]] = [seen.clear]


def at_forget(drop: Callable[[], object]) -> None:
    """Has `forget` call a function of a module that remembers calls too."""
    _forgotten.append(drop)


def forget() -> None:
    """Drops what is remembered, and what replays it."""
    for drop in _forgotten:
        drop()


def known(plain: bool, input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> Call | None:
    """The remembered call that a call is; None for another.

    The operands must be of PyTorch's own types, and not nested: these have no shapes, and guards end the process.
    """
    noted = seen.get((plain, input.shape, weight.shape))
    if noted is not None:
        for call in noted.calls:
            if call.is_this(input, weight, bias, arguments):
                return call
    return None


def remember(operation: Operation, given: Operands, dtype: torch.dtype, arguments: Arguments) -> None:
    """Notes a call that found its operation by its description; of the second in turn with one, its guards too.

    ``dtype`` is what the call computes in.
    """
    if GUARDS is None or modes_watch() or not all(map(integral, arguments)):
        return
    key = operation.plain, given[0].shape, given[1].shape
    noted = seen.get(key)
    if noted is None:  # not every size of an image is seen again
        if len(seen) >= MOST:
            seen.clear()
        seen[key] = Seen(operation)
    elif noted.last is not operation:
        noted.last = operation
    elif noted.made < MOST_GUARDS and not any(unwrapped(t) is not t for t in given if t is not None):
        noted.calls = (Call(operation, given, dtype, arguments), *noted.calls[: MOST_CALLS - 1])
        noted.made += 1  # none of what a functorch transform left over
