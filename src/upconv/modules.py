"""How torch.nn's convolutions come to compute with upconv's engines, and layers that always do.

- `install` gives one of torch.nn's classes a forward that looks whether its module carries the `MARK`, which
  `upconv.accelerate` sets. A marked module is computed by upconv, any other one by the forward that was there before.
  Neither the module's class nor anything else changes, so tools that look layers up by ``type(module)`` (tracing,
  fusion, quantisation, profilers) find what they know, and a pickle holds PyTorch's classes alone.
- ``ConvTranspose1d/2d/3d`` and their lazy twins are subclasses of torch.nn's for those who change an import.

Both kinds of forward wrap PyTorch's own. So TorchScript, which compiles a forward's text and follows ``__wrapped__`` to
find it, compiles PyTorch's, and a script can be loaded where this package is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.compiler import is_compiling
from torch.nn.modules import conv

from upconv import dispatch
from upconv.convolutions import convolution, eager, explicit, small
from upconv.cuda import engine, weights
from upconv.ops import conv_transpose, repeated
from upconv.replay import calls

MARK = "_upconv"
"""The attribute of a module that is accelerated: True in its ``__dict__``, which copies, replicas, wrappers and pickles
have too. Other modules find their class's, False (`install`)."""

TRANSPOSED: dict[type[nn.Module], int] = {nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}
"""The classes of transposed convolutions, and their ranks."""
PLAIN: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
"""The same of plain convolutions."""
Called = tuple[int, str, Any]
"""A rank, and the function of torch.nn.functional that a forward calls: its name, and itself."""
_CALLED: dict[type[nn.Module], Called] = {
    **{base: (n, f"conv_transpose{n}d", dispatch.TORCH[n]) for base, n in TRANSPOSED.items()},
    **{base: (n, f"conv{n}d", getattr(torch, f"conv{n}d")) for base, n in PLAIN.items()},
}


def is_torchs(function: Any) -> bool:
    """Whether a method of a convolution is PyTorch's own and nobody's in its place, such as a profiler's."""
    return getattr(function, "__globals__", None) is vars(conv)


_OUTPUT_PADDING = conv._ConvTransposeNd._output_padding if is_torchs(conv._ConvTransposeNd._output_padding) else None


# --- transposed convolutions -----------------------------------------------------------------------------------------


def _transposed(module: Any, stock: Callable[..., Tensor], called: Called, input: Tensor, output_size: Any) -> Tensor:
    """What PyTorch's forward (``stock``) does, by upconv's operator.

    ``stock`` itself runs where somebody replaced the function that it calls, and where it must say what is wrong.
    """
    _note_training(module)
    rank, name, function = called
    padding = module.padding
    if (
        getattr(F, name) is not function
        or not isinstance(input, Tensor)
        or not isinstance(padding, tuple)
        or module.padding_mode != "zeros"
    ):
        return stock(module, input, output_size)
    stride, dilation, output_padding = module.stride, module.dilation, module.output_padding
    cls: Any = type(module)
    if (  # then neither the output's padding nor a parameter needs a call to be found
        output_size is None
        and not is_compiling()
        and cls in _LAYERS
        and type(output_padding) is tuple
        and cls._output_padding is _OUTPUT_PADDING
        and "_output_padding" not in module.__dict__
    ):
        weight, bias = _parameters(module)
    else:
        weight, bias = module.weight, module.bias
        output_padding = module._output_padding(input, output_size, stride, padding, module.kernel_size, rank, dilation)
    return conv_transpose(rank, input, weight, bias, stride, padding, output_padding, module.groups, dilation)


def _note_training(module: Any) -> None:
    """Ends a frozen layer's promise if it is called in training mode: not each way there is through its ``train``."""
    if not is_compiling() and weights.frozen and getattr(module, "training", False):
        weight = module.__dict__.get("_parameters", {}).get("weight")
        if type(weight) is nn.Parameter and weights.is_frozen(weight):
            weights.thaw(weight)


def _parameters(module: Any) -> tuple[Any, Any]:
    """The weight and the bias of a layer whose class adds nothing to torch.nn's."""
    own, held = module._parameters, module.__dict__
    if type(own) is dict and "weight" not in held and "bias" not in held and "bias" in own:
        weight = own.get("weight")
        if weight is not None:
            return weight, own["bias"]
    return module.weight, module.bias  # tensors in their place


def _forward_of(base: Any) -> Any:
    """The forward of a subclass of ours. Where somebody replaced that of ``base``, theirs runs and sees the call."""
    stock, called = base.forward, _CALLED[base]
    known = stock if is_torchs(stock) else None

    @wraps(stock)
    def forward(self: Any, input: Any, output_size: list[int] | None = None) -> Any:
        theirs = base.forward
        if theirs is not known and theirs is not _installed.get(base):
            return theirs(self, input, output_size)
        if isinstance(input, fx.Proxy) and _is_leaf(self, input.tracer, forward):
            return _leaf(self, input, output_size)
        return _transposed(self, stock, called, input, output_size)

    return forward


def _is_leaf(module: nn.Module, tracer: object, forward: object) -> bool:
    """Whether a graph may call the module: only if that is what is traced, this forward and nothing around it."""
    alone = type(module).forward is forward and "forward" not in vars(module)
    hooked = module._forward_hooks or module._forward_pre_hooks
    return isinstance(tracer, fx.Tracer) and tracer.root is not module and alone and not hooked


def _leaf(module: nn.Module, input: fx.Proxy, output_size: Any) -> fx.Proxy:
    """A call of the module in a graph. Tracers record one for torch.nn's classes; those of others they look into."""
    tracer: Any = input.tracer
    kwargs = {} if output_size is None else {"output_size": output_size}
    found: fx.Proxy = tracer.create_proxy("call_module", tracer.path_of_module(module), (input,), kwargs)
    return found


class ConvTranspose1d(nn.ConvTranspose1d):
    """Drop-in for `torch.nn.ConvTranspose1d`: same arguments, weights and results, faster.

    Shape: ``(batch, in_channels, length)`` or ``(in_channels, length)`` in; the length out is
    ``(length-1)*stride - 2*padding + dilation*(kernel-1) + output_padding + 1``.

    A pickle of it needs upconv where it is loaded; that of an accelerated model, or a state_dict, does not.
    """

    forward = _forward_of(nn.ConvTranspose1d)


class ConvTranspose2d(nn.ConvTranspose2d):
    """Drop-in for `torch.nn.ConvTranspose2d`, like `ConvTranspose1d`, of images: ``(batch, in_channels, height,
    width)``, or without the batch.
    """

    forward = _forward_of(nn.ConvTranspose2d)


class ConvTranspose3d(nn.ConvTranspose3d):
    """Drop-in for `torch.nn.ConvTranspose3d`, like `ConvTranspose1d`, of volumes: ``(batch, in_channels, depth,
    height, width)``, or without the batch.
    """

    forward = _forward_of(nn.ConvTranspose3d)


OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose3d: ConvTranspose3d,
}
"""torch.nn's classes, and those of ours that are always computed by upconv."""
_LAYERS = frozenset((*OURS, *OURS.values()))


class LazyConvTranspose1d(nn.LazyConvTranspose1d, ConvTranspose1d):  # type: ignore[misc]
    """`torch.nn.LazyConvTranspose1d` that becomes upconv's `ConvTranspose1d` on its first call."""

    cls_to_become = ConvTranspose1d


class LazyConvTranspose2d(nn.LazyConvTranspose2d, ConvTranspose2d):  # type: ignore[misc]
    """`torch.nn.LazyConvTranspose2d` that becomes upconv's `ConvTranspose2d` on its first call."""

    cls_to_become = ConvTranspose2d


class LazyConvTranspose3d(nn.LazyConvTranspose3d, ConvTranspose3d):  # type: ignore[misc]
    """`torch.nn.LazyConvTranspose3d` that becomes upconv's `ConvTranspose3d` on its first call."""

    cls_to_become = ConvTranspose3d


# --- plain convolutions ----------------------------------------------------------------------------------------------


_left: dict[int, tuple[Any, Any]] = {}
"""By a module's `id`, of its last call that was PyTorch's: shapes and settings (`_described`), and None where it is by
these (too small, say, whatever else changes), else the rest of what the rule goes by (`_state`).

So a call that is PyTorch's costs a model that waits for its host 2 or 6 us more, not 20 to 40.
"""
_CONV_FORWARD = {cls: cls._conv_forward if is_torchs(cls._conv_forward) else None for cls in PLAIN}  # type: ignore[attr-defined]


def _convolve(module: Any, called: Called, input: Tensor) -> Tensor:
    """The layer, by our kernels or by PyTorch's operator."""
    if is_compiling():  # nothing else, since a compiled graph guards whatever is looked at
        traced: Tensor = module._conv_forward(input, module.weight, module.bias)
        return traced
    _note_training(module)
    # Once: a parametrisation may compute them, and count that.
    cls = type(module)
    weight, bias = _parameters(module) if cls in PLAIN else (module.weight, module.bias)
    if eager(input) and not _watched(module, called):
        known = _left.get(id(module))
        if (
            known is None
            or known[0] != _described(module, input, weight)
            or (known[1] is not None and known[1] != _state(input, weight, bias))
        ):
            found = _ours(module, called[0], input, weight, bias)
            if found is not None:
                return found
    out: Tensor = module._conv_forward(input, weight, bias)
    return out


def _watched(module: Any, called: Called) -> bool:
    """Whether somebody replaced a function that PyTorch's forward calls, and so must see the call."""
    _, name, function = called
    cls = type(module)
    stock = _CONV_FORWARD.get(cls) or _CONV_FORWARD[base_of(cls)]  # type: ignore[index]
    return getattr(F, name) is not function or cls._conv_forward is not stock or "_conv_forward" in module.__dict__


def settings(module: Any, weight: Tensor) -> tuple[Any, Any, Any] | None:
    """Stride, padding (as numbers) and dilation of a plain convolution; None where they are not upconv's to serve."""
    stride, padding, dilation = module.stride, module.padding, module.dilation
    if type(padding) is str:
        named = padding == "valid" or (padding == "same" and stride == (1,) * len(module.kernel_size))  # as PyTorch
        padding = explicit(padding, weight.shape[2:], dilation) if named and type(dilation) is tuple else None
    grouped = type(module.groups) is not int or module.groups != 1
    odd = grouped or module.padding_mode != "zeros" or padding is None
    return None if odd else (stride, padding, dilation)


def _ours(module: Any, rank: int, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    numbers, state = settings(module, weight), None
    if numbers is not None:
        stride, padding, dilation = numbers
        found = repeated(True, rank, input, weight, bias, stride, padding, 0, 1, dilation)
        if found is not None:
            return found
        if not small(input.shape, weight.shape, stride):
            found = convolution(rank, input, weight, bias, stride, padding, dilation)
            if found is not None or dispatch.observed():
                return found
            state = _state(input, weight, bias)
    if len(_left) >= calls.MOST:
        _left.clear()
    _left[id(module)] = _described(module, input, weight), state
    return None


def _described(module: Any, input: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """Shapes and settings, which may be another module's by now: of one that took the place of one that is gone."""
    settings = module.stride, module.padding, module.dilation, module.groups, module.padding_mode
    return input.shape, weight.shape, *settings


def _state(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """What the rule goes by beside a module's own settings and its input's shape."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    precision = calls.float32_precision() if input.dtype is torch.float32 and autocast is None else None
    return (
        autocast, precision, input.dtype, input.stride(), input.get_device(),
        type(weight), weight.dtype, weight.stride(), weight.get_device(), bias is None or bias.dtype,
        weight.requires_grad and torch.is_grad_enabled(), engine.warming(), calls._cudnn_enabled(),
    )  # fmt: skip


# --- which modules are upconv's --------------------------------------------------------------------------------------

_installed: dict[type[nn.Module], Any] = {}
"""The forwards that `install` made, by the class that they are for."""


def _dispatching(stock: Callable[..., Tensor], called: Called) -> Any:
    @wraps(stock)
    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if getattr(self, MARK, False):  # foreign classes may have borrowed the forward, and have no such attribute
            return _transposed(self, stock, called, input, output_size)
        return stock(self, input, output_size)

    return forward


def _dispatching_plain(stock: Callable[..., Tensor], called: Called) -> Any:
    @wraps(stock)
    def forward(self: Any, input: Tensor) -> Tensor:
        return _convolve(self, called, input) if getattr(self, MARK, False) else stock(self, input)

    return forward


def base_of(cls: type) -> type[nn.Module] | None:
    """The class of torch.nn's that has the forward of a convolution's class; None for a foreign one."""
    return next((base for base in cls.__mro__ if base in TRANSPOSED or base in PLAIN), None)


def replaced(base: Any) -> str | None:
    """The name of what somebody put in the place of torch.nn's ``base.forward``; None where nobody did."""
    forward = base.forward
    if is_torchs(forward) or forward is _installed.get(base):
        return None
    return f"{getattr(forward, '__module__', '?')}.{getattr(forward, '__qualname__', type(forward).__qualname__)}"


def install(base: Any) -> None:
    """Has modules of a class of torch.nn's, and those that inherit its forward, computed by upconv if they are marked.

    Once a process; nothing happens where it is done already, or where somebody else replaced the forward (`replaced`).
    Graphs that torch.compile made before cannot know of marks, so they are dropped.
    """
    if not is_torchs(base.forward):
        return
    if base not in _installed:
        dispatching = _dispatching if base in TRANSPOSED else _dispatching_plain
        _installed[base] = dispatching(base.forward, _CALLED[base])
    setattr(base, MARK, False)  # first: another thread may be calling
    base.forward = _installed[base]
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def require(model: object, caller: str) -> None:
    """Raises TypeError, in a sentence, for what is not a module."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"{caller} takes a torch.nn.Module as its model, got {got}")


def is_ours(module: nn.Module) -> bool:
    """Whether a module's forward is upconv's: a layer of ours, or a marked one."""
    base = base_of(type(module))
    own = OURS.get(base) if base is not None else None
    return MARK in vars(module) or (own is not None and type(module).forward is own.forward)


def left(module: nn.Module) -> str | None:
    """Why upconv cannot compute a convolution's module, in a few words; None where it can."""
    cls: Any = type(module)
    name, base = f"{cls.__module__}.{cls.__qualname__}", base_of(cls)
    if base is None:
        return f"{name} is no subclass of a convolution of torch.nn's that upconv knows"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if cls.forward is not base.forward and cls.forward is not getattr(OURS.get(base), "forward", None):
        return f"{name} has a forward of its own"
    if base in PLAIN and cls._conv_forward is not base._conv_forward:  # type: ignore[attr-defined]
        return f"{name} has a _conv_forward of its own"
    if (other := replaced(base)) is not None:
        return f"torch.nn.{base.__name__}.forward was replaced by {other}, which must see the calls"
    return None


def passed_over(module: nn.Module) -> str | None:
    """Why PyTorch's forward computes a convolution's module as things are now, in a few words; None where upconv's
    does.
    """
    reason, base = left(module), base_of(type(module))
    if reason is not None or base is None:
        return reason
    if not is_ours(module):
        return "it is not accelerated"
    if MARK in vars(module) and base.forward is not _installed.get(base):
        return f"torch.nn.{base.__name__}.forward looks for no marks in this process; call upconv.accelerate"
    _, name, function = _CALLED[base]
    if getattr(F, name) is not function:
        return f"torch.nn.functional.{name} was replaced by somebody who must see the calls"
    return None
