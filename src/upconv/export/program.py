"""The text of an exported file: constants, device code, launches, autograd and ``ModelNew``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from upconv.cuda.gpu import Gpu
from upconv.export import cpp, device, passes, sizes
from upconv.export.head import WIDTH, head
from upconv.export.passes import Kernel
from upconv.export.signatures import Signature
from upconv.problem import Problem


def program(p: Problem, signature: Signature, gpu: Gpu) -> str:
    """The file for a layer at every batch and spatial size, planned for ``p``'s.

    Args:
        p: the forward, with the precision and the layout that the file is to have.
        signature: the constructor of ``ModelNew``.
        gpu: the GPU that the kernels are chosen and compiled for.

    Raises:
        ValueError: no kernel serves the layer.
    """
    found = passes.kernels(p, gpu)
    values = {
        "HEAD": head(p, signature, gpu, found),
        "CONSTANTS": _constants(p),
        "CUDA": cuda(found, gpu),
        "DECLARATIONS": ";\n".join(map(cpp.prototype, found)) + ";",
        "ARCH": gpu.arch,
        "CAPABILITY": str(gpu.capability),
        "DEVICES": _devices(gpu),
        "LAUNCHES": "\n\n".join(sizes.launch(k, gpu) for k in found),
        **_multiples(found),
        "PRECISION": _PRECISION.get(p.precision, ""),
        "CHECK_PRECISION": "    check_precision()\n" if p.precision in _PRECISION else "",
        "MODEL": signature.model().rstrip("\n"),
        "ATTRIBUTE": signature.attribute,
        "NAMES": _names(p.rank),
        "EXPECTED": signature.expected(),
    }
    return _filled(_FILE, values)


def cuda(found: tuple[Kernel, ...], gpu: Gpu) -> str:
    """The file's CUDA C++: the kernels' templates, a struct of constants for each pass, then the host's code."""
    templates = device.templates(found, gpu)
    parts = [
        cpp.includes() + "".join(f"\n#include <{name}>" for name in device.includes(found)) + "\n",
        device.spaced(templates, *(f"{_banner(k)}\n{device.constants(k, templates)}" for k in found)),
        cpp.helpers(found),
        *map(cpp.definition, found),
    ]
    return "\n".join(parts)


def _banner(k: Kernel) -> str:
    line = "// " + "=" * (WIDTH - 3)
    text = textwrap.fill(
        f"{TITLES[k.pass_]}: {k.choice.summary.rsplit(', grid', 1)[0]}.",
        WIDTH,
        initial_indent="// ",
        subsequent_indent="// ",
        break_on_hyphens=False,
    )
    return f"{line}\n{text}\n{line}\n"


TITLES = {"fwd": "Forward", "grad-input": "Gradient for the input", "grad-weight": "Gradient for the weight"}


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _names(rank: int) -> str:
    return ("batch, channels, length", "batch, channels, height, width", "batch, channels, depth, height, width")[
        rank - 1
    ]


def _constants(p: Problem) -> str:
    layout = "contiguous_format" if p.layout == "nchw" else "channels_last" if p.rank == 2 else "channels_last_3d"
    return "\n".join(
        (
            f"IN_CHANNELS, OUT_CHANNELS, GROUPS = {p.in_channels}, {p.out_channels}, {p.groups}",
            f"KERNEL, STRIDE, PADDING = {p.kernel}, {p.stride}, {p.padding}",
            f"OUTPUT_PADDING, DILATION = {p.output_padding}, {p.dilation}",
            f"DTYPE, FORMAT, RANK = {p.dtype}, torch.{layout}, {p.rank}",
        )
    )


def _multiples(found: tuple[Kernel, ...]) -> dict[str, str]:
    """For each tensor that ``dense`` is called with the argument behind it."""
    forward, grad_input, grad_weight = (k.multiples for k in found)
    values = {"FORWARD": forward[0], "GRAD_INPUT": grad_input[0], "X": grad_weight[0], "GRAD": grad_weight[1]}
    return {f"{name}_ROWS": f", {n}" if n > 1 else "" for name, n in values.items()}


def _devices(gpu: Gpu) -> str:
    """The condition under which a device of capability ``have`` runs what is compiled for the GPU's."""
    if gpu.arch.endswith("a"):
        return "have == CAPABILITY"
    return "have[0] == CAPABILITY[0] and have >= CAPABILITY"


_PRECISION = {
    "tf32": '''
def check_precision() -> None:
    """These kernels round float32 to TF32, as PyTorch does unless it is told not to."""
    cudnn = torch.backends.cudnn
    precision = cudnn.conv.fp32_precision if hasattr(cudnn, "conv") else "tf32" if cudnn.allow_tf32 else "ieee"
    if precision != "tf32" or not cudnn.enabled:
        raise RuntimeError(
            "ModelNew multiplies in TF32, and torch.backends.cudnn (conv.fp32_precision, allow_tf32, enabled) now asks "
            f"for IEEE float32; got {precision!r}"
        )

'''
}

_FILE = '''"""@HEAD@"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import shutil

import torch
from torch import Tensor, nn
from torch.utils import cpp_extension

# --- the layer that everything here is specialised for ---------------------------------------------------------------

@CONSTANTS@
CAPABILITY = @CAPABILITY@  # of the GPUs that the kernels are compiled for: sm_@ARCH@

# --- CUDA C++ --------------------------------------------------------------------------------------------------------

CUDA = r"""
@CUDA@"""

DECLARATIONS = r"""
#include <array>
#include <optional>
@DECLARATIONS@
"""


@functools.cache
def build():
    """Compiles the kernels and loads them; PyTorch keeps what is compiled in its folder for extensions.

    The first call of ModelNew does it by itself; it takes a minute or two.

    Raises:
        RuntimeError: one sentence on what is missing, or the compiler's messages.
    """
    if torch.version.cuda is None:
        raise RuntimeError("ModelNew's kernels need a PyTorch with CUDA, and this one is built without")
    if cpp_extension.CUDA_HOME is None:
        raise RuntimeError("ModelNew compiles its kernels with nvcc; install the CUDA toolkit or set CUDA_HOME")
    if not cpp_extension.is_ninja_available():
        raise RuntimeError("ModelNew compiles its kernels with ninja, which is missing: pip install ninja")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise RuntimeError("ModelNew compiles its kernels with a C++ compiler, and there is none; set CXX")
    digest = hashlib.sha256((CUDA + DECLARATIONS).encode()).hexdigest()
    return cpp_extension.load_inline(
        name=f"conv_transpose_{digest[:16]}",
        cpp_sources=DECLARATIONS,
        cuda_sources=CUDA,
        functions=["forward", "grad_input", "grad_weight"],
        extra_cuda_cflags=["-O3", "-gencode=arch=compute_@ARCH@,code=sm_@ARCH@"],
    )


# --- how much each kernel is launched with ---------------------------------------------------------------------------
# source and result are (depth, height, width) of what is read and written; of the weight's gradient of input and output


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def output_size(size):
    """Of every spatial dimension."""
    axes = zip(size, KERNEL, STRIDE, PADDING, OUTPUT_PADDING, DILATION)
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, more, d in axes)


def full(t: Tensor):
    """(depth, height, width); dimensions that the layer lacks have size 1."""
    return (1,) * (3 - RANK) + tuple(t.shape[2:])


@LAUNCHES@

@functools.cache
def processors(device: int) -> int:
    """Multiprocessors of a CUDA device, after a look whether the kernels run there."""
    properties = torch.cuda.get_device_properties(device)
    have = properties.major, properties.minor
    if not (@DEVICES@):
        raise RuntimeError(
            f"ModelNew's kernels are compiled for sm_@ARCH@; got cuda:{device} ({properties.name}) of compute "
            f"capability {have[0]}.{have[1]}"
        )
    return properties.multi_processor_count


# --- the three passes on tensors -------------------------------------------------------------------------------------


def dense(t: Tensor, multiple: int = 1) -> Tensor:
    """The tensor in the kernels' memory format, beginning at 16 bytes; with zeros at the end of each row, so that its
    columns are a multiple, where rows must begin at 16 bytes, too: they add nothing to any sum."""
    more = -t.shape[-1] % multiple
    if more:
        wide = t.new_zeros((*t.shape[:-1], t.shape[-1] + more))
        wide[..., : t.shape[-1]] = t
        return wide
    t = t.contiguous(memory_format=FORMAT)
    return t.clone() if t.data_ptr() % 16 else t


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(batch, IN_CHANNELS, *size) -> (batch, OUT_CHANNELS, *output_size(size)). Weights are packed at each call."""
    shape = (x.shape[0], OUT_CHANNELS, *output_size(x.shape[2:]))
    out = torch.empty(shape, dtype=DTYPE, device=x.device, memory_format=FORMAT)
    if out.numel():
        x, bias = dense(x@FORWARD_ROWS@), None if bias is None else bias.contiguous()
        launch = forward_launch(x.shape[0], full(x), full(out), processors(x.get_device()))
        build().forward(x, weight.contiguous(), bias, out, *launch)
    return out


def grad_input(grad: Tensor, weight: Tensor, size) -> Tensor:
    """(batch, OUT_CHANNELS, *output_size(size)) -> (batch, IN_CHANNELS, *size)."""
    shape = (grad.shape[0], IN_CHANNELS, *size)
    out = torch.empty(shape, dtype=DTYPE, device=grad.device, memory_format=FORMAT)
    if out.numel():
        grad = dense(grad@GRAD_INPUT_ROWS@)
        launch = grad_input_launch(grad.shape[0], full(grad), full(out), processors(grad.get_device()))
        build().grad_input(grad, weight.contiguous(), out, *launch)
    return out


def grad_weight(x: Tensor, grad: Tensor) -> Tensor:
    """Inputs and gradients of the outputs -> (IN_CHANNELS, OUT_CHANNELS // GROUPS, *KERNEL)."""
    out = torch.zeros((IN_CHANNELS, OUT_CHANNELS // GROUPS, *KERNEL), dtype=DTYPE, device=x.device)
    if x.numel():
        x, grad = dense(x@X_ROWS@), dense(grad@GRAD_ROWS@)
        launch = grad_weight_launch(x.shape[0], full(x), full(grad), processors(x.get_device()))
        build().grad_weight(x, grad, out, *launch)
    return out


# --- autograd: each of the three is linear in both of its tensors, and the derivatives are the other two --------------


class ForwardFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return forward(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad
        return (
            GradInputFunction.apply(grad, weight, x.shape[2:]) if by_x else None,
            GradWeightFunction.apply(x, grad) if by_weight else None,
            grad.sum((0, *range(2, grad.dim()))) if by_bias else None,
        )


class GradInputFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, weight, size):
        ctx.save_for_backward(grad, weight)
        return grad_input(grad, weight, size)

    @staticmethod
    def backward(ctx, other):  # of the input's shape
        grad, weight = ctx.saved_tensors
        by_grad, by_weight, _ = ctx.needs_input_grad
        return (
            ForwardFunction.apply(other, weight, None) if by_grad else None,
            GradWeightFunction.apply(other, grad) if by_weight else None,
            None,
        )


class GradWeightFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grad):
        ctx.save_for_backward(x, grad)
        return grad_weight(x, grad)

    @staticmethod
    def backward(ctx, other):  # of the weight's shape
        x, grad = ctx.saved_tensors
        by_x, by_grad = ctx.needs_input_grad
        return (
            GradInputFunction.apply(grad, other, x.shape[2:]) if by_x else None,
            ForwardFunction.apply(x, other, None) if by_grad else None,
        )


# --- the module ------------------------------------------------------------------------------------------------------

@PRECISION@
def check(x: Tensor, weight: Tensor) -> None:
    """Raises ValueError, in a sentence, for an input that the kernels cannot take."""
    if x.dim() != RANK + 2:
        shapes = "(@NAMES@), batched or not"
        raise ValueError(f"ModelNew takes inputs {shapes}; got shape {tuple(x.shape)}")
    if x.shape[1] != IN_CHANNELS:
        raise ValueError(f"ModelNew takes inputs of {IN_CHANNELS} channels; got shape {tuple(x.shape)}")
    if min(x.shape[2:]) < 1 or min(output_size(x.shape[2:])) < 1:
        raise ValueError(f"ModelNew takes inputs that leave an output; got shape {tuple(x.shape)}")
    if x.dtype != DTYPE or weight.dtype != DTYPE:
        raise ValueError(f"ModelNew takes inputs and weights of {DTYPE}; got {x.dtype} and {weight.dtype}")
    if not x.is_cuda or x.device != weight.device:
        raise ValueError(f"ModelNew takes inputs and weights on one CUDA device; got {x.device} and {weight.device}")
@CHECK_PRECISION@

EXPECTED = @EXPECTED@


class Layer(nn.Module):
    """The parameters of the original's layer, drawn as PyTorch draws them; the arguments are torch.nn's.

    Raises:
        ValueError: for another layer than the one that the kernels are specialised for.
    """

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        output_padding=0,
        groups=1,
        bias=True,
        dilation=1,
    ) -> None:
        super().__init__()
        sizes = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
        sizes |= {"output_padding": output_padding, "dilation": dilation}
        given = {name: (value,) * RANK if isinstance(value, int) else tuple(value) for name, value in sizes.items()}
        given |= {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
        for name, value in EXPECTED.items():
            if given[name] != value:
                raise ValueError(f"ModelNew is specialised for {name}={value!r}; got {given[name]!r}")
        self.weight = nn.Parameter(torch.empty(IN_CHANNELS, OUT_CHANNELS // GROUPS, *KERNEL))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.register_parameter("bias", nn.Parameter(torch.empty(OUT_CHANNELS)) if bias else None)
        if bias:
            bound = 1 / math.sqrt(self.weight[0].numel())
            nn.init.uniform_(self.bias, -bound, bound)


@MODEL@

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (@NAMES@) or the same without batch, any sizes -> likewise."""
        single = x.dim() == RANK + 1
        if single:
            x = x.unsqueeze(0)
        layer = self.@ATTRIBUTE@
        weight, bias = layer.weight, layer.bias
        check(x, weight)
        if torch.is_grad_enabled():
            out = ForwardFunction.apply(x, weight, bias)
        else:
            out = forward(x, weight, bias)
        return out.squeeze(0) if single else out
'''
