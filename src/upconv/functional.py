"""``conv_transpose1d``, ``conv_transpose2d`` and ``conv_transpose3d`` with ``torch.nn.functional``'s signatures."""

from __future__ import annotations

from torch import Tensor

from upconv.ops import IntOrInts, conv_transpose


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
) -> Tensor:
    """1-D transposed convolution: `torch.nn.functional.conv_transpose1d`, by upconv's engines.

    Args:
        input: ``(batch, in_channels, length)``, or without the batch.
        weight: ``(in_channels, out_channels // groups, kernel)``.
        bias: ``(out_channels)`` or None.
        stride, padding, output_padding, dilation: in elements; an integer or a sequence of one.
        groups: in how many groups channels are connected.

    Returns:
        ``(batch, out_channels, (length-1)*stride - 2*padding + dilation*(kernel-1) + output_padding + 1)``.

    Raises:
        RuntimeError: PyTorch's own messages, for arguments that fit no transposed convolution.
    """
    return conv_transpose(1, input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
) -> Tensor:
    """2-D transposed convolution: `torch.nn.functional.conv_transpose2d`, by upconv's engines.

    Args:
        input: ``(batch, in_channels, height, width)``, or without the batch; contiguous, channels_last or strided.
        weight: ``(in_channels, out_channels // groups, kernel_height, kernel_width)``.
        bias: ``(out_channels)`` or None.
        stride, padding, output_padding, dilation: in pixels; an integer for both dimensions or a pair.
        groups: in how many groups channels are connected.

    Returns:
        ``(batch, out_channels, out_height, out_width)``, each size ``(n-1)*stride - 2*padding + dilation*(kernel-1) +
        output_padding + 1``; channels_last when input or weight is.

    Raises:
        RuntimeError: PyTorch's own messages, for arguments that fit no transposed convolution.
    """
    return conv_transpose(2, input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    groups: int = 1,
    dilation: IntOrInts = 1,
) -> Tensor:
    """3-D transposed convolution: `torch.nn.functional.conv_transpose3d`, by upconv's engines.

    Args:
        input: ``(batch, in_channels, depth, height, width)``, or without the batch.
        weight: ``(in_channels, out_channels // groups, kernel_depth, kernel_height, kernel_width)``.
        bias: ``(out_channels)`` or None.
        stride, padding, output_padding, dilation: in voxels; an integer for all dimensions or three.
        groups: in how many groups channels are connected.

    Returns:
        ``(batch, out_channels, out_depth, out_height, out_width)``, sizes as for `conv_transpose2d`.

    Raises:
        RuntimeError: PyTorch's own messages, for arguments that fit no transposed convolution.
    """
    return conv_transpose(3, input, weight, bias, stride, padding, output_padding, groups, dilation)
