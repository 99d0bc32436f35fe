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

    Arguments and errors as `conv_transpose1d`'s, with an integer for both dimensions or a pair. ``input`` is ``(batch,
    in_channels, height, width)``, or without the batch; contiguous, channels_last or strided. ``weight`` is
    ``(in_channels, out_channels // groups, kernel_height, kernel_width)``. The result is channels_last when either is.
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

    As `conv_transpose2d`, with three values for depth, height and width.
    """
    return conv_transpose(3, input, weight, bias, stride, padding, output_padding, groups, dilation)
