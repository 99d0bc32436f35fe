"""``ConvTranspose1d/2d/3d`` and their lazy twins: subclasses of torch.nn's that compute with upconv's engines.

And ``Conv1d/2d/3d``, by which `upconv.accelerate` replaces plain convolutions if it is asked to.

Constructor, parameters, initial weights, state_dict, repr and errors are the parents'. Code that asks for
``isinstance(m, torch.nn.ConvTranspose2d)`` (weight and spectral norm, quantisation, channels_last conversion) finds
what it looks for.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.compiler import is_compiling
from torch.nn.modules.conv import _ConvNd

from upconv import calls, ops, replays
from upconv.convolutions import convolution, eager, explicit, least, small
from upconv.cuda import engine
from upconv.ops import conv_transpose

# The three forwards differ in PyTorch's own function for TorchScript, which compiles a forward's text and takes the
# first branch alone: a script can be loaded where this package is not installed.


def _forward(module: Any, rank: int, input: Tensor, output_size: list[int] | None) -> Tensor:
    """What the parents' forward does.

    Of the classes below, where nothing says otherwise, parameters are found without ``Module.__getattr__`` (NOTES: 1.2
    us each of a call's 22 beside its launches) and the padding of the output without a call.
    """
    if module.padding_mode != "zeros":
        raise ValueError(f"Only `zeros` padding mode is supported for ConvTranspose{rank}d")
    stride, padding, dilation = module.stride, module.padding, module.dilation
    if type(module) in _OURS and output_size is None and not is_compiling():
        output_padding = module.output_padding
        weight, bias = _parameters(module)
    else:
        weight, bias = module.weight, module.bias
        output_padding = module._output_padding(input, output_size, stride, padding, module.kernel_size, rank, dilation)
    return conv_transpose(rank, input, weight, bias, stride, padding, output_padding, module.groups, dilation)


def _parameters(module: Any) -> tuple[Any, Any]:
    """The weight and the bias of a layer of ours."""
    own, held = module._parameters, module.__dict__
    if type(own) is dict and "weight" not in held and "bias" not in held and "bias" in own:
        weight = own.get("weight")
        if weight is not None:
            return weight, own["bias"]
    return module.weight, module.bias  # tensors in their place


class ConvTranspose1d(nn.ConvTranspose1d):
    """Drop-in for `torch.nn.ConvTranspose1d`: same arguments, weights and results, faster.

    Shape: ``(batch, in_channels, length)`` or ``(in_channels, length)`` in; the length out is
    ``(length-1)*stride - 2*padding + dilation*(kernel-1) + output_padding + 1``.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Computes the layer; ``output_size`` (elements) replaces ``output_padding``, as in PyTorch."""
        if is_scripting():
            if self.padding_mode != "zeros":
                raise ValueError("Only `zeros` padding mode is supported for ConvTranspose1d")
            output_padding = self._output_padding(
                input, output_size, self.stride, self.padding, self.kernel_size, 1, self.dilation  # type: ignore[arg-type]
            )  # fmt: skip
            args = (self.stride, self.padding, output_padding, self.groups, self.dilation)
            return F.conv_transpose1d(input, self.weight, self.bias, *args)  # type: ignore[arg-type]
        else:
            return _forward(self, 1, input, output_size)


class ConvTranspose2d(nn.ConvTranspose2d):
    """Drop-in for `torch.nn.ConvTranspose2d`: same arguments, weights and results, faster.

    Shape: ``(batch, in_channels, height, width)`` or without the batch in; each size out is
    ``(n-1)*stride - 2*padding + dilation*(kernel-1) + output_padding + 1``.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Computes the layer; ``output_size`` (pixels) replaces ``output_padding``, as in PyTorch."""
        if is_scripting():
            if self.padding_mode != "zeros":
                raise ValueError("Only `zeros` padding mode is supported for ConvTranspose2d")
            output_padding = self._output_padding(
                input, output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation  # type: ignore[arg-type]
            )  # fmt: skip
            args = (self.stride, self.padding, output_padding, self.groups, self.dilation)
            return F.conv_transpose2d(input, self.weight, self.bias, *args)  # type: ignore[arg-type]
        else:
            return _forward(self, 2, input, output_size)


class ConvTranspose3d(nn.ConvTranspose3d):
    """Drop-in for `torch.nn.ConvTranspose3d`: same arguments, weights and results, faster.

    Shape: ``(batch, in_channels, depth, height, width)`` or without the batch in; each size out is
    ``(n-1)*stride - 2*padding + dilation*(kernel-1) + output_padding + 1``.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Computes the layer; ``output_size`` (voxels) replaces ``output_padding``, as in PyTorch."""
        if is_scripting():
            if self.padding_mode != "zeros":
                raise ValueError("Only `zeros` padding mode is supported for ConvTranspose3d")
            output_padding = self._output_padding(
                input, output_size, self.stride, self.padding, self.kernel_size, 3, self.dilation  # type: ignore[arg-type]
            )  # fmt: skip
            args = (self.stride, self.padding, output_padding, self.groups, self.dilation)
            return F.conv_transpose3d(input, self.weight, self.bias, *args)  # type: ignore[arg-type]
        else:
            return _forward(self, 3, input, output_size)


_OURS = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)


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


_left: dict[int, tuple[Any, Any, Any]] = {}
"""By a module's `id`, of its last call that was PyTorch's: the input's shape, the size of the kernel, and None where it
is by these (too small, say, whatever else changes), else the rest of what the rule goes by (`_state`).

So a call that is PyTorch's costs a model that waits for its host 2 or 6 us more, not 20 to 40.
"""


def _convolve(module: Any, input: Tensor) -> Tensor:
    """The layer, by our kernels or by PyTorch's operator."""
    if is_compiling():  # nothing else, since a compiled graph guards whatever is looked at
        traced: Tensor = module._conv_forward(input, module.weight, module.bias)
        return traced
    # Once: a parametrisation may compute them, and count that.
    weight, bias = _parameters(module) if type(module) in _PLAIN else (module.weight, module.bias)
    if eager(input):
        known = _left.get(id(module))
        if (
            known is None
            or known[0] != input.shape
            or known[1] is not module.kernel_size
            or (known[2] is not None and known[2] != _state(input, weight, bias))
        ):
            found = _ours(module, input, weight, bias)
            if found is not None:
                return found
    out: Tensor = module._conv_forward(input, weight, bias)
    return out


def _ours(module: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    stride, padding, dilation = module.stride, module.padding, module.dilation
    if type(padding) is str:
        padding = explicit(padding, weight.shape[2:], dilation) if type(dilation) is tuple else None
    odd = module.groups != 1 or module.padding_mode != "zeros" or padding is None
    host = replays.host
    if host is not None and not odd and not engine._collectors:
        found: Tensor | None = host.replay(True, input, weight, bias, module.rank, stride, padding, 0, 1, dilation)
        if found is not None:
            return found
    state = None
    if not odd and not small(input.shape, weight.shape, stride, least()):
        found = convolution(module.rank, input, weight, bias, stride, padding, dilation)
        if found is not None or ops._observed():
            return found
        state = _state(input, weight, bias)
    if len(_left) >= calls.MOST:
        _left.clear()
    _left[id(module)] = input.shape, module.kernel_size, state
    return None


def _state(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """What the rule goes by beside a module's own settings and its input's shape."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    precision = calls.float32_precision() if input.dtype is torch.float32 and autocast is None else None
    return (
        autocast, precision, input.dtype, input.stride(), input.get_device(),
        type(weight), weight.dtype, weight.stride(), weight.get_device(), bias is None or bias.dtype,
        weight.requires_grad and torch.is_grad_enabled(), engine.warming(), calls._cudnn_enabled(),
    )  # fmt: skip


class _Conv(_ConvNd):
    """What the three layers share."""

    rank: ClassVar[int]

    def forward(self, input: Tensor) -> Tensor:
        """Computes the layer, as PyTorch's does."""
        if is_scripting():
            return self._conv_forward(input, self.weight, self.bias)
        else:
            return _convolve(self, input)


class Conv1d(_Conv, nn.Conv1d):
    """Drop-in for `torch.nn.Conv1d`, many of whose calls on a GPU take our kernels (`upconv.convolutions`)."""

    rank = 1


class Conv2d(_Conv, nn.Conv2d):
    """Drop-in for `torch.nn.Conv2d`, many of whose calls on a GPU take our kernels (`upconv.convolutions`)."""

    rank = 2


class Conv3d(_Conv, nn.Conv3d):
    """Drop-in for `torch.nn.Conv3d`, many of whose calls on a GPU take our kernels (`upconv.convolutions`)."""

    rank = 3


_PLAIN = (Conv1d, Conv2d, Conv3d)


class LazyConv1d(nn.LazyConv1d, Conv1d):  # type: ignore[misc]
    """`torch.nn.LazyConv1d` that becomes upconv's `Conv1d` on its first call."""

    cls_to_become = Conv1d


class LazyConv2d(nn.LazyConv2d, Conv2d):  # type: ignore[misc]
    """`torch.nn.LazyConv2d` that becomes upconv's `Conv2d` on its first call."""

    cls_to_become = Conv2d


class LazyConv3d(nn.LazyConv3d, Conv3d):  # type: ignore[misc]
    """`torch.nn.LazyConv3d` that becomes upconv's `Conv3d` on its first call."""

    cls_to_become = Conv3d
