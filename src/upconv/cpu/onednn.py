"""What is known of oneDNN's convolutions as PyTorch 2.13 calls them on a CPU: their kernels and their faults."""

from __future__ import annotations

import torch

from upconv.problem import Problem

HALF = (torch.bfloat16, torch.float16)


def unwritten(p: Problem) -> bool:
    """Whether PyTorch's own operator may return memory that nothing wrote, in planes behind the last tap.

    PyTorch 2.13's bfloat16 forward does so in 3-D, with an output padding along the depth and a dilation along another
    axis. It does not in other dtypes, in 2-D, or without either (docs/experiments.md).
    """
    behind = p.rank == 3 and p.output_padding[0] > 0 and max(p.dilation) > 1
    return behind and p.dtype is torch.bfloat16 and p.batch > 0 and min(p.size) > 0


def untrusted(p: Problem) -> bool:
    """Whether oneDNN's half-precision kernels may read memory that nothing wrote.

    PyTorch 2.13's bfloat16 weight gradient, and now and then its input gradient, holds garbage or NaN, or corrupts the
    heap, for images with a last dimension of 1, and in 3-D with any dimension under 4. Its channels_last forward
    convolutions do so in 3-D with a depth of 1. With all sizes from 4 on no such result was found
    (docs/experiments.md). So nothing is lost by staying clear of sizes under 4.
    """
    return p.dtype in HALF and min(p.size if p.rank == 3 else p.size[-1:]) < 4


def untrusted_gradients(p: Problem) -> bool:
    """As `untrusted`, for the gradients.

    bfloat16 ones crash in channels_last where the padding exceeds the kernel's reach. In float32 it is the input
    gradient of channels_last images one pixel wide, with one output channel. PyTorch's float32 gradients of images with
    sizes under 4 corrupt the heap besides, rarely; which ones is not known, so those stay PyTorch's. The bfloat16
    weight gradient of 3-D channels_last layers is wrong, by half and more, where the padding along the depth reaches
    half of it (docs/experiments.md).
    """
    single = p.rank == 2 and p.size[-1] == 1 and p.out_channels == p.groups and p.layout == "channels_last"
    beyond = any(pad > d * (k - 1) for pad, d, k in zip(p.padding, p.dilation, p.kernel))
    deep = p.rank == 3 and p.layout == "channels_last" and 2 * p.padding[0] >= p.size[0]
    wrong = (p.dtype in HALF and beyond) or (p.dtype is torch.bfloat16 and deep)
    return untrusted(p) or wrong or (p.dtype is torch.float32 and single)


def own_kernel(p: Problem) -> bool:
    """Whether oneDNN has a transposed kernel of its own for a layer (``brg_deconv``), as far as it was seen to choose.

    Other layers it builds from the backward of a forward convolution (``conv:any``).
    """
    if p.dtype is torch.float64:
        return False
    if all(s == 1 for s in p.stride):
        return p.layout == "channels_last" and p.groups < 8
    whole = all(n % s == 0 for n, s in zip(p.out_size, p.stride))
    narrow = min(p.in_channels, p.out_channels) // p.groups
    # In groups, bfloat16 has a kernel for one and for two channels (slow, but of its own), float32 none below 16.
    small_groups = p.groups > 1 and narrow < 16 and (narrow > 2 or p.dtype not in HALF)
    return whole and max(p.dilation) == 1 and not small_groups
