"""The layers that the bench measures, and how a layer on the command line is read."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from upconv.modules import TRANSPOSED
from upconv.problem import Problem

IntOrInts = int | tuple[int, ...]


class Case(NamedTuple):
    """A layer and its input under the name that reports use."""

    name: str
    problem: Problem


Named = TypeVar("Named", bound=Any)
"""A case of any kind."""


def _case(
    name: str,
    shape: str,
    out_channels: int,
    kernel: IntOrInts,
    stride: IntOrInts = 1,
    padding: IntOrInts = 0,
    output_padding: IntOrInts = 0,
    dilation: IntOrInts = 1,
    groups: int = 1,
    bias: bool = False,
) -> Case:
    batch, in_channels, *size = map(int, shape.split("x"))
    problem = Problem.make(
        batch, in_channels, out_channels, size, kernel, stride, padding, output_padding, dilation, groups, bias=bias
    )
    return Case(name, problem)


# KernelBench level 1 (github.com/ScalingIntelligence/KernelBench), every transposed convolution, by problem number.
_KERNELBENCH = (
    _case("kb57", "8x64x1024x1024", 64, 3),
    _case("kb58", "16x32x16x32x64", 16, (3, 5, 7)),
    _case("kb61", "8x48x64x64x64", 48, 3),
    _case("kb64", "64x128x65536", 128, 3),
    _case("kb65", "8x64x512x512", 64, (3, 7)),
    _case("kb68", "16x32x64x64x64", 64, (3, 5, 5)),
    _case("kb69", "64x64x128x256", 128, (3, 5)),
    _case("kb70", "8x48x96x96x96", 24, 3),
    _case("kb71", "8x32x512x1024", 32, 3),
    _case("kb72", "8x32x12x24x48", 32, (3, 5, 7), 2, (1, 2, 3), 1, groups=4),
    _case("kb73", "4x32x32x64x128", 32, 3, 2, 1),
    _case("kb74", "32x32x131072", 64, 5, dilation=3),
    _case("kb75", "16x32x128x256", 64, (3, 5), (2, 3), (1, 2), dilation=(2, 1), groups=4),
    _case("kb77", "16x32x16x32x32", 64, 3, 2, 1, dilation=2),
    _case("kb78", "8x32x512x1024", 32, (3, 7), padding=(1, 3)),
    _case("kb79", "16x32x131072", 64, 3, 2, 1, dilation=2),
    _case("kb81", "16x32x64x128", 64, 3, 5, 1, dilation=2),
)

_FOUNDING = tuple(c for name in ("kb71", "kb65", "kb75", "kb69", "kb57") for c in _KERNELBENCH if c.name == name)

# Layers of published models at their usual sizes: DCGAN, U-Net, pix2pix, a VAE, FSRCNN, a depthwise upsampler, FCN-8s,
# HiFi-GAN's first stage (1-D, as it is there), nnU-Net.
_MODELS = (
    _case("dcgan1", "128x512x8x8", 256, 4, 2, 1),
    _case("dcgan2", "128x256x16x16", 128, 4, 2, 1),
    _case("dcgan3", "128x128x32x32", 64, 4, 2, 1),
    _case("dcganO", "128x64x32x32", 3, 4, 2, 1),
    _case("unet1", "16x1024x32x32", 512, 2, 2),
    _case("unet4", "16x128x256x256", 64, 2, 2),
    _case("pix", "16x256x64x64", 128, 4, 2, 1),
    _case("vae", "16x256x64x64", 256, 3, 2, 1, 1),
    _case("fsrcnn", "16x56x128x128", 1, 9, 3, 4, 2),
    _case("depthw", "32x256x64x64", 256, 4, 2, 1, groups=256),
    _case("fcn8s", "16x21x64x64", 21, 16, 8, 4, groups=21),
    _case("hifigan", "16x512x800", 256, 16, 8, 4),
    _case("nnunet", "2x320x16x16x16", 256, 2, 2),
    _case("nnunet2", "2x64x64x64x64", 32, 2, 2),
)

# Layers of published models in the shapes in which they are trained and used: many more than those of `models`, and of
# sizes that tiles do not fit: images of 1 x 1 to 8 x 8, of 14 x 14, rows of odd lengths, one image, large kernels, many
# channels. What was first measured on them: docs/experiments.md.
_FIELD = (
    # DCGAN's generator, others', and decoders of variational autoencoders on MNIST, CIFAR and CelebA.
    _case("dcgan128.1", "128x100x1x1", 512, 4),
    _case("dcgan128.2", "128x512x4x4", 256, 4, 2, 1),
    _case("dcgan128.3", "128x256x8x8", 128, 4, 2, 1),
    _case("dcgan128.4", "128x128x16x16", 64, 4, 2, 1),
    _case("dcgan128.5", "128x64x32x32", 3, 4, 2, 1),
    _case("gan1024", "64x1024x4x4", 512, 4, 2, 1),
    _case("mnistvae1", "128x64x7x7", 32, 3, 2, 1, 1),
    _case("mnistvae2", "128x32x14x14", 16, 3, 2, 1, 1),
    _case("mnistvae3", "256x128x7x7", 64, 4, 2, 1),
    _case("mnistvae4", "256x64x14x14", 1, 4, 2, 1),
    _case("cifarvae", "128x256x4x4", 128, 3, 2, 1, 1),
    _case("cifarvae2", "128x128x8x8", 64, 3, 2, 1, 1),
    _case("cvae", "64x256x16x16", 128, 4, 2, 1),
    _case("celebvae1", "64x512x2x2", 256, 3, 2, 1, 1),
    _case("celebvae2", "64x256x4x4", 128, 3, 2, 1, 1),
    _case("celebvae3", "64x32x32x32", 32, 3, 2, 1, 1),
    # U-Nets, pix2pix, CycleGAN.
    _case("unetA1", "4x1024x32x32", 512, 2, 2),
    _case("unetA2", "4x512x64x64", 256, 2, 2),
    _case("unetA3", "4x256x128x128", 128, 2, 2),
    _case("unetA4", "4x128x256x256", 64, 2, 2),
    _case("unetB1", "1x1024x28x28", 512, 2, 2),
    _case("unetB2", "1x512x56x56", 256, 2, 2),
    _case("unetB4", "1x128x224x224", 64, 2, 2),
    _case("unetS", "16x256x16x16", 128, 2, 2),
    _case("pix8", "16x1024x8x8", 512, 4, 2, 1),
    _case("pix4", "16x1024x4x4", 512, 4, 2, 1),
    _case("pix2", "16x1024x2x2", 512, 4, 2, 1),
    _case("pix1", "16x512x1x1", 512, 4, 2, 1),
    _case("pixb1", "1x1024x8x8", 512, 4, 2, 1),
    _case("pixb2", "1x512x64x64", 128, 4, 2, 1),
    _case("pixO", "16x128x128x128", 3, 4, 2, 1),
    _case("cyc1", "1x256x64x64", 128, 3, 2, 1, 1),
    _case("cyc2", "1x128x128x128", 64, 3, 2, 1, 1),
    _case("cyc4", "4x256x64x64", 128, 3, 2, 1, 1),
    # Pose estimation, detection, point clouds, segmentation: heads and necks.
    _case("pose1", "32x2048x8x6", 256, 4, 2, 1),
    _case("pose2", "32x256x16x12", 256, 4, 2, 1),
    _case("pose3", "32x256x32x24", 256, 4, 2, 1),
    _case("centernet", "16x256x32x32", 256, 4, 2, 1),
    _case("dlaup", "16x64x64x64", 64, 4, 2, 1, groups=64),
    _case("second1", "4x64x248x216", 128, 1, 1),
    _case("second2", "4x128x124x108", 128, 2, 2),
    _case("second3", "4x256x62x54", 128, 4, 4),
    _case("sam1", "4x256x64x64", 64, 2, 2),
    _case("sam2", "4x64x128x128", 32, 2, 2),
    _case("sam1b", "1x256x64x64", 64, 2, 2),
    _case("vitdet", "8x768x32x32", 384, 2, 2),
    _case("vit16", "8x768x14x14", 768, 2, 2),
    _case("mrcnn", "512x256x14x14", 256, 2, 2),
    _case("mrcnn100", "100x256x14x14", 256, 2, 2),
    _case("kprcnn", "100x512x14x14", 17, 4, 2, 1),
    _case("dpt4", "4x256x24x24", 256, 4, 4),
    _case("dpt2", "4x512x24x24", 512, 2, 2),
    # FCN-32s, bilinear upsampling, StyleGAN2's modulated convolutions, with a group for each image.
    _case("fcn32", "4x21x16x16", 21, 64, 32),
    _case("bil21", "8x21x32x32", 21, 4, 2, 1, groups=21),
    _case("sgan", "1x4096x16x16", 4096, 3, 2, 0, groups=8),
    _case("sgan32", "1x4096x32x32", 4096, 3, 2, 0, groups=8),
    _case("sgan128", "1x1024x128x128", 512, 3, 2, 0, groups=8),
    # Super-resolution, segmentation, depth, optical flow.
    _case("fsrcnn2", "16x56x64x64", 1, 9, 2, 4, 1),
    _case("fsrcnn4", "16x56x64x64", 1, 9, 4, 4, 3),
    _case("espcn", "16x64x64x64", 3, 6, 4, 1),
    _case("linknet", "8x128x64x64", 128, 3, 2, 1, 1),
    _case("linknet2", "8x32x256x256", 32, 3, 2, 1, 1),
    _case("erfnet", "8x128x64x128", 64, 3, 2, 1, 1),
    _case("enet", "8x64x128x256", 16, 3, 2, 1, 1),
    _case("depth3", "8x512x15x20", 256, 3, 2, 1, 1),
    _case("flow", "8x1024x6x8", 512, 4, 2, 1),
    _case("flow2", "8x770x24x32", 128, 4, 2, 1),
    _case("flow3", "8x386x48x64", 64, 4, 2, 1),
    # 1-D: HiFi-GAN at a training segment's length, EnCodec, WaveGAN, Demucs, MelGAN.
    _case("hifi1", "16x512x32", 256, 16, 8, 4),
    _case("hifi2", "16x256x256", 128, 16, 8, 4),
    _case("hifi3", "16x128x2048", 64, 4, 2, 1),
    _case("hifi4", "16x64x4096", 32, 4, 2, 1),
    _case("enc1", "16x512x150", 256, 16, 8, 4),
    _case("enc2", "16x256x1200", 128, 10, 5, 2),
    _case("enc4", "16x64x12000", 32, 4, 2, 1),
    _case("wavegan", "64x1024x16", 512, 25, 4, 11, 1),
    _case("wavegan4", "64x128x1024", 64, 25, 4, 11, 1),
    _case("demucs1", "8x1024x1000", 512, 8, 4),
    _case("demucs4", "8x96x66000", 48, 8, 4),
    _case("melgan", "16x256x256", 128, 16, 8, 4),
    # 3-D: V-Net, 3-D U-Net, VQ-VAE of videos, 3-D GANs, occupancy, autoencoders.
    _case("vnet1", "2x256x8x8x8", 128, 2, 2),
    _case("vnet3", "2x64x32x32x32", 32, 2, 2),
    _case("unet3d1", "2x256x16x16x16", 128, 3, 2, 1, 1),
    _case("unet3d2", "2x128x32x32x32", 64, 3, 2, 1, 1),
    _case("unet3dk2", "2x128x32x32x32", 64, 2, 2),
    _case("vq3d", "4x256x4x16x16", 256, 4, 2, 1),
    _case("gan3d1", "32x512x4x4x4", 256, 4, 2, 1),
    _case("gan3d2", "32x256x8x8x8", 128, 4, 2, 1),
    _case("gan3d3", "32x128x16x16x16", 64, 4, 2, 1),
    _case("occ", "1x128x100x100x8", 64, 2, 2),
    _case("c3dae", "8x64x8x28x28", 32, 3, 2, 1, 1),
)

# Plain convolutions as `upconv.convolutions` sees them: each is the gradient for the input of the transposed one here,
# so that the step of this, all three passes, is the convolution's. Named by the convolution's channels and image: those
# of the U-Net of `upconv.bench.training`, a decoder's last, a ResNet's first and one with a stride, one of audio,
# nnU-Net's.
_CONVOLUTIONS = (
    _case("c3-64@256", "16x64x256x256", 3, 3, 1, 1),
    _case("c64-64@256", "16x64x256x256", 64, 3, 1, 1),
    _case("c64-128@128", "16x128x128x128", 64, 3, 1, 1),
    _case("c128-128@128", "16x128x128x128", 128, 3, 1, 1),
    _case("c128-256@64", "16x256x64x64", 128, 3, 1, 1),
    _case("c256-256@64", "16x256x64x64", 256, 3, 1, 1),
    _case("c256-512@32", "16x512x32x32", 256, 3, 1, 1),
    _case("c512-512@32", "16x512x32x32", 512, 3, 1, 1),
    _case("c512-1024@16", "16x1024x16x16", 512, 3, 1, 1),
    _case("c1024-1024@16", "16x1024x16x16", 1024, 3, 1, 1),
    _case("c1024-512@32", "16x512x32x32", 1024, 3, 1, 1),
    _case("c512-256@64", "16x256x64x64", 512, 3, 1, 1),
    _case("c256-128@128", "16x128x128x128", 256, 3, 1, 1),
    _case("c128-64@256", "16x64x256x256", 128, 3, 1, 1),
    _case("c64-3@256", "16x3x256x256", 64, 3, 1, 1),
    _case("c3-64@224s2", "32x64x112x112", 3, 7, 2, 3, 1),
    _case("c64-128@112s2", "32x128x56x56", 64, 3, 2, 1, 1),
    _case("c512-512@8192", "16x512x8192", 512, 3, 1, 1),
    _case("c32-32@128^3", "2x32x128x128x128", 32, 3, 1, 1),
    _case("c64-64@64^3", "2x64x64x64x64", 64, 3, 1, 1),
    _case("c128-128@32^3", "2x128x32x32x32", 128, 3, 1, 1),
    _case("c32-64@128^3s2", "2x64x64x64x64", 32, 3, 2, 1, 1),
)

# Sizes that a laptop runs in a fraction of a second; one case for every way in which oneDNN's transposed convolutions
# are slow, and the dense ones where they are not. With the bias that torch.nn's layers have by default.
_CPU = tuple(
    Case(case.name, case.problem.with_(bias=True))
    for case in (
        _case("A", "2x32x128x256", 32, 3),
        _case("B", "2x64x128x128", 64, (3, 7)),
        _case("C", "2x32x64x128", 64, (3, 5), (2, 3), (1, 2), dilation=(2, 1), groups=4),
        _case("D", "4x64x64x128", 128, (3, 5)),
        _case("E", "2x64x256x256", 64, 3),
        _case("GAN1", "8x512x16x16", 256, 4, 2, 1),
        _case("GAN2", "8x256x32x32", 128, 4, 2, 1),
        _case("GAN3", "8x128x64x64", 64, 4, 2, 1),
        _case("GAN4", "8x64x64x64", 3, 4, 2, 1),
        _case("UNET", "2x128x128x128", 64, 2, 2),
        _case("FSR-s3", "2x56x128x128", 1, 9, 3, 4),
        _case("FSR-s4", "2x56x128x128", 1, 9, 4, 4),
        _case("depthwise", "4x256x32x32", 256, 4, 2, 1, groups=256),
        _case("FCN", "1x21x64x64", 21, 16, 8, 4, groups=21),
        _case("HiFi-GAN", "4x512x800", 256, 16, 8, 4),
        _case("dilation2-s1", "2x64x128x128", 64, 3, dilation=2),
        _case("dilation2-s2", "2x64x64x64", 64, 3, 2, dilation=2),
        _case("3->5 s2", "8x3x128x128", 5, 3, 2, 1),
        _case("7->13 s1", "4x7x128x128", 13, 3, padding=1),
        _case("groups32", "4x128x64x64", 128, 3, padding=1, groups=32),
        _case("g4 k4s2", "4x128x64x64", 128, 4, 2, 1, groups=4),
    )
)

SUITES: dict[str, tuple[Case, ...]] = {
    "founding": _FOUNDING,
    "kernelbench": _KERNELBENCH,
    "models": _MODELS,
    "cuda": (*_KERNELBENCH, *_MODELS),
    "field": _FIELD,
    "convolutions": _CONVOLUTIONS,
    "cpu": _CPU,
}
"""The suites by name; ``custom`` is one more, one layer from the command line."""


def choose(cases: Sequence[Named], names: Sequence[str]) -> tuple[Named, ...]:
    """The cases of these names (case-insensitive), in the suite's order; all of them for no names.

    Raises:
        ValueError: a name that no case has.
    """
    known = {case.name.casefold() for case in cases}
    for name in names:
        if name.casefold() not in known:
            raise ValueError(f"--case must be one of {', '.join(case.name for case in cases)}; got {name!r}")
    wanted = {name.casefold() for name in names} or known
    return tuple(case for case in cases if case.name.casefold() in wanted)


# --- quick sizes -----------------------------------------------------------------------------------------------------

QUICK_MACS = 2 * 10**9
"""Multiplications of a quick row: 20 ms at the 200 GFLOP/s of two cores, 1 s on PyTorch's slowest path (4 GFLOP/s)."""
QUICK_ELEMENTS = 16 * 2**20
"""Elements of a quick row's input and output together: 64 MiB of float32, past every cache."""
QUICK_SIZE = 16
"""No spatial size is scaled below this: borders and phases stay what they are in the whole."""


def quick(p: Problem) -> Problem:
    """The problem at a size that a CPU runs in a fraction of a second: the batch is halved, then the longest side.

    Channels, kernel, strides and everything else that decides which kernel runs stay as they are.
    """
    while p.macs > QUICK_MACS or _elements(p) > QUICK_ELEMENTS:
        longest = max(p.size)
        if p.batch > 1:
            p = p.with_(batch=p.batch // 2)
        elif longest // 2 >= QUICK_SIZE:
            axis = p.size.index(longest)
            p = p.with_(size=(*p.size[:axis], longest // 2, *p.size[axis + 1 :]))
        else:
            break
    return p


def _elements(p: Problem) -> int:
    return math.prod(p.input_shape) + math.prod(p.output_shape)


# --- a layer from the command line -----------------------------------------------------------------------------------

_EXAMPLE = '"64,64,(3,7),stride=2,padding=1"'


def parse_shape(text: str) -> tuple[int, ...]:
    """``8x100`` as ``(8, 100)``: the sizes of a tensor of any rank. Errors: ValueError, one sentence."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise ValueError(f"--input must be sizes of at least 1 joined by x, like 8x64x512x512 or 8x100; got {text!r}")
    return tuple(map(int, text.split("x")))


def parse_input(text: str) -> tuple[int, ...]:
    """``8x64x512x512``: batch, channels, then 1 to 3 spatial sizes. Errors: ValueError, one sentence."""
    shape = parse_shape(text)
    if not 3 <= len(shape) <= 5:
        raise ValueError(f"--input must be batch, channels and 1 to 3 spatial sizes, like 8x64x512x512; got {text!r}")
    return shape


def parse_layer(text: str, input: str) -> Problem:
    """A layer in ``torch.nn.ConvTranspose2d``'s argument order and names, on an input; the rank is the input's.

    Args:
        text: ``64,64,(3,7),stride=2,bias=False``; literals only, nothing is evaluated.
        input: ``8x64x512x512``, see `parse_input`.

    Raises:
        ValueError: one sentence that names the argument and the value got.
    """
    batch, channels, *size = parse_input(input)
    try:
        call = ast.parse(f"_({text}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "_":
            raise ValueError
        positional = [ast.literal_eval(value) for value in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"the layer must be torch.nn's arguments as literals, like {_EXAMPLE}; got {text!r}") from None
    try:
        made: Any = list(TRANSPOSED)[len(size) - 1](*positional, **named, device="meta")
        problem = Problem.make(
            batch, made.in_channels, made.out_channels, size, made.kernel_size, made.stride, made.padding,
            made.output_padding, made.dilation, made.groups, bias=made.bias is not None,
        )  # fmt: skip
    except (TypeError, ValueError, RuntimeError) as error:  # PyTorch's own words for what it does not take
        reason = str(error).splitlines()[0]
        raise ValueError(f"the layer must be torch.nn's arguments, like {_EXAMPLE}; got {text!r}: {reason}") from None
    if channels != problem.in_channels:
        raise ValueError(f"--input must have the layer's {problem.in_channels} channels; got {input!r} with {channels}")
    return problem
