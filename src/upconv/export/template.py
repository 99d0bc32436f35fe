"""An exported file without what is its layer's: names between ``@`` stand for that."""

FILE = '''"""@HEAD@"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import shutil
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import cpp_extension


class Arguments(NamedTuple):
    """Of a transposed convolution, beside its channels and its kernel."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


# --- the layer that the fast kernels are for; the plain ones serve every other ----------------------------------------

@CONSTANTS@
CAPABILITY = @CAPABILITY@  # of the GPUs that they are compiled for: sm_@ARCH@

# --- CUDA C++: what both kinds of kernels are launched by -------------------------------------------------------------

HOST = r"""
@HOST@"""

# --- CUDA C++: plain kernels, which state what is computed ------------------------------------------------------------

PLAIN = r"""
@PLAIN@"""

PLAIN_DECLARATIONS = r"""
#include <array>
#include <optional>
@PLAIN_DECLARATIONS@
"""

# --- CUDA C++: fast kernels -------------------------------------------------------------------------------------------

FAST = r"""
@FAST@"""

FAST_DECLARATIONS = r"""
#include <array>
#include <optional>
@DECLARATIONS@
"""


@functools.cache
def build(fast: bool = True):
    """Compiles the fast or the plain kernels and loads them; PyTorch keeps what is compiled in its extensions' folder.

    The first call of ModelNew does it by itself; it takes a minute or two. Plain ones are for the GPU that there is.

    Raises:
        RuntimeError: one sentence on what is missing, or the compiler's messages.
    """
    if torch.version.cuda is None:
        raise RuntimeError("ModelNew's kernels need a PyTorch with CUDA, and this one is built without")
    if cpp_extension.CUDA_HOME is None:
        raise RuntimeError("ModelNew compiles its kernels with nvcc; install the CUDA toolkit or set CUDA_HOME")
    if not cpp_extension.is_ninja_available():
        raise RuntimeError("ModelNew compiles its kernels with ninja, which is missing: pip install ninja")
    if shutil.which(os.environ.get("CXX", "c++").partition(" ")[0]) is None:  # options may follow the name
        raise RuntimeError("ModelNew compiles its kernels with a C++ compiler, and there is none; set CXX")
    code, declarations = (FAST, FAST_DECLARATIONS) if fast else (PLAIN, PLAIN_DECLARATIONS)
    digest = hashlib.sha256((HOST + code + declarations).encode()).hexdigest()
    return cpp_extension.load_inline(
        name=f"conv_transpose_{digest[:16]}",
        cpp_sources=declarations,
        cuda_sources=HOST + code,
        functions=["forward", "grad_input", "grad_weight"],
        extra_cuda_cflags=["-O3", *(["-gencode=arch=compute_@ARCH@,code=sm_@ARCH@"] if fast else [])],
    )


# --- how much each kernel is launched with ---------------------------------------------------------------------------
# source and result are (depth, height, width) of what is read and written; of the weight's gradient of input and output


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def output_size(size, kernel, given: Arguments):
    """Of every spatial dimension."""
    axes = zip(size, kernel, *given[:4])
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, more, d in axes)


def full(t: Tensor):
    """(depth, height, width); dimensions that the layer lacks have size 1."""
    return (1,) * (3 - RANK) + tuple(t.shape[2:])


@LAUNCHES@

@functools.cache
def processors(device: int) -> int:
    """Multiprocessors of a CUDA device that runs the fast kernels; 0 of another."""
    properties = torch.cuda.get_device_properties(device)
    have = properties.major, properties.minor
    return properties.multi_processor_count if @DEVICES@ else 0


def plain_layer(x: Tensor, weight: Tensor, y: Tensor, given: Arguments):
    """The numbers of the plain kernels' PlainLayer."""
    lack = 3 - RANK
    sizes = zip(x.shape[2:], y.shape[2:], weight.shape[2:], given.stride, given.padding, given.dilation)
    axes = [number for n, o, k, s, p, d in sizes for number in (n, o, k, s, p, d, s // math.gcd(s, d))]
    steps = [step for t in (x, weight, y) for step in (*t.stride()[:2], *(0,) * lack, *t.stride()[2:])]
    channels = [x.shape[0], given.groups, weight.shape[0] // given.groups, weight.shape[1]]
    return [*channels, *(1, 1, 1, 1, 0, 1, 1) * lack, *axes, *steps]


# --- the three passes on tensors -------------------------------------------------------------------------------------


@TF32@def is_fast(x: Tensor, shape, given: Arguments) -> bool:
    """Whether the fast kernels serve a layer with weights of this shape."""
    fitting = tuple(shape) == WEIGHT and given == LAYER and x.dtype == DTYPE@FLAGS@
    positions = math.prod(x.shape[2:]) * math.prod(LAYER.stride)  # of an image, at most, which kernels count in 32 bits
    return fitting and max(x.shape[0], positions) < 2**30 and processors(x.get_device()) > 0


def dense(t: Tensor, multiple: int = 1) -> Tensor:
    """The tensor in the fast kernels' memory format, beginning at 16 bytes; with zeros at the end of each row, so that
    its columns are a multiple, where rows must begin at 16 bytes, too: they add nothing to any sum."""
    more = -t.shape[-1] % multiple
    if more:
        wide = t.new_zeros((*t.shape[:-1], t.shape[-1] + more))
        wide[..., : t.shape[-1]] = t
        return wide
    t = t.contiguous(memory_format=FORMAT)
    return t.clone() if t.data_ptr() % 16 else t


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, given: Arguments) -> Tensor:
    """(batch, channels, *size) -> (batch, other channels, *output_size). Weights are packed at each call."""
    x, weight = x.resolve_neg(), weight.resolve_neg()
    shape = (x.shape[0], weight.shape[1] * given.groups, *output_size(x.shape[2:], weight.shape[2:], given))
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=FORMAT)
    if out.numel() == 0:
        return out
    bias = None if bias is None else bias.resolve_neg().contiguous()
    if is_fast(x, weight.shape, given):
        x = dense(x@FORWARD_ROWS@)
        launch = forward_launch(x.shape[0], full(x), full(out), processors(x.get_device()))
        build(True).forward(x, weight.contiguous(), bias, out, *launch)
    else:
        build(False).forward(x, weight, bias, out, plain_layer(x, weight, out, given))
    return out


def grad_input(grad: Tensor, weight: Tensor, size, given: Arguments) -> Tensor:
    """(batch, other channels, *output_size) -> (batch, channels, *size)."""
    grad, weight = grad.resolve_neg(), weight.resolve_neg()
    shape = (grad.shape[0], weight.shape[0], *size)
    out = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=FORMAT)
    if out.numel() == 0:
        return out
    if is_fast(grad, weight.shape, given):
        grad = dense(grad@GRAD_INPUT_ROWS@)
        launch = grad_input_launch(grad.shape[0], full(grad), full(out), processors(grad.get_device()))
        build(True).grad_input(grad, weight.contiguous(), out, *launch)
    else:
        build(False).grad_input(grad, weight, out, plain_layer(out, weight, grad, given))
    return out


def grad_weight(x: Tensor, grad: Tensor, shape, given: Arguments) -> Tensor:
    """Inputs and gradients of the outputs -> (channels, other channels // groups, *kernel), which is the shape."""
    x, grad = x.resolve_neg(), grad.resolve_neg()
    out = torch.zeros(shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    if is_fast(x, shape, given):
        x, grad = dense(x@X_ROWS@), dense(grad@GRAD_ROWS@)
        launch = grad_weight_launch(x.shape[0], full(x), full(grad), processors(x.get_device()))
        build(True).grad_weight(x, grad, out, *launch)
    else:
        build(False).grad_weight(x, grad, out, plain_layer(x, out, grad, given))
    return out


# --- autograd: each of the three is linear in both of its tensors, and the derivatives are the other two --------------


class ForwardFunction(torch.autograd.Function):
    forward = staticmethod(forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, ctx.given = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias, _ = ctx.needs_input_grad
        return (
            GradInputFunction.apply(grad, weight, x.shape[2:], ctx.given) if by_x else None,
            GradWeightFunction.apply(x, grad, weight.shape, ctx.given) if by_weight else None,
            grad.sum((0, *range(2, grad.dim()))) if by_bias else None,
            None,
        )


class GradInputFunction(torch.autograd.Function):
    forward = staticmethod(grad_input)

    @staticmethod
    def setup_context(ctx, inputs, output):
        grad, weight, _, ctx.given = inputs
        ctx.save_for_backward(grad, weight)

    @staticmethod
    def backward(ctx, other):  # of the input's shape
        grad, weight = ctx.saved_tensors
        by_grad, by_weight, *_ = ctx.needs_input_grad
        return (
            ForwardFunction.apply(other, weight, None, ctx.given) if by_grad else None,
            GradWeightFunction.apply(other, grad, weight.shape, ctx.given) if by_weight else None,
            None,
            None,
        )


class GradWeightFunction(torch.autograd.Function):
    forward = staticmethod(grad_weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, grad, _, ctx.given = inputs
        ctx.save_for_backward(x, grad)

    @staticmethod
    def backward(ctx, other):  # of the weight's shape
        x, grad = ctx.saved_tensors
        by_x, by_grad, *_ = ctx.needs_input_grad
        return (
            GradInputFunction.apply(grad, other, x.shape[2:], ctx.given) if by_x else None,
            ForwardFunction.apply(x, other, None, ctx.given) if by_grad else None,
            None,
            None,
        )


# --- the module ------------------------------------------------------------------------------------------------------


def check(x: Tensor, weight: Tensor, given: Arguments) -> None:
    """Raises ValueError, in a sentence, for an input that no kernel can take."""
    if x.dim() != RANK + 2:
        shapes = "(@NAMES@), batched or not"
        raise ValueError(f"ModelNew takes inputs {shapes}; got shape {tuple(x.shape)}")
    if x.shape[1] != weight.shape[0]:
        raise ValueError(f"ModelNew takes inputs of {weight.shape[0]} channels; got shape {tuple(x.shape)}")
    if min(x.shape[2:]) < 1 or min(output_size(x.shape[2:], weight.shape[2:], given)) < 1:
        raise ValueError(f"ModelNew takes inputs that leave an output; got shape {tuple(x.shape)}")
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise ValueError(f"ModelNew takes inputs of its weights' floating dtype; got {x.dtype} and {weight.dtype}")
    if not x.is_cuda or x.device != weight.device:
        raise ValueError(f"ModelNew takes inputs and weights on one CUDA device; got {x.device} and {weight.device}")


class Layer(nn.Module):
    """The parameters of the original's layer, drawn as PyTorch draws them; the arguments are torch.nn's.

    Raises:
        ValueError: for arguments that PyTorch refuses, too.
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
        values = (kernel_size, stride, padding, output_padding, dilation)
        kernel, *sizes = ((v,) * RANK if isinstance(v, int) else tuple(v) for v in values)
        if any(len(v) != RANK for v in (kernel, *sizes)):
            raise ValueError(f"sizes must be integers or {RANK} of them; got {values}")
        self.given = Arguments(*sizes, groups)
        stride, padding, output_padding, dilation, _ = self.given
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(f"channels must be a multiple of groups; got {in_channels}, {out_channels} and {groups}")
        if min(*kernel, *stride, *dilation, 1) < 1 or min(*padding, *output_padding, 0) < 0:
            raise ValueError(f"sizes must be positive and paddings not negative; got {kernel} and {self.given}")
        if any(more >= max(s, d) for more, s, d in zip(output_padding, stride, dilation)):
            raise ValueError(f"output_padding must be smaller than stride or dilation; got {output_padding}")
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels // groups, *kernel))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
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
        if torch.is_autocast_enabled():
            x = x.to(weight.dtype)
        check(x, weight, layer.given)
        out = ForwardFunction.apply(x, weight, bias, layer.given)
        return out.squeeze(0) if single else out
'''

TF32 = '''def rounds_to_tf32() -> bool:
    """Whether PyTorch's flags have float32 rounded to TF32, as it is by default."""
    cudnn = torch.backends.cudnn
    precision = cudnn.conv.fp32_precision if hasattr(cudnn, "conv") else "tf32" if cudnn.allow_tf32 else "ieee"
    return precision == "tf32" and cudnn.enabled


'''
