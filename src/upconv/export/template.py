"""An exported file without what is its layer's: names between ``@`` stand for that."""

FILE = '''"""@HEAD@"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import os
import re
import shutil
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
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

# --- CUDA C++: plain kernels, which state what is computed ------------------------------------------------------------

PLAIN = r"""
@PLAIN@"""

# --- CUDA C++: fast kernels -------------------------------------------------------------------------------------------

FAST = r"""
@FAST@"""


@functools.cache
def build(fast: bool = True):
    """Compiles the fast or the plain kernels and loads them; PyTorch keeps what is compiled in its extensions' folder.

    The first call of ModelNew does it by itself; it takes a minute. Plain ones are for the GPU that there is.

    Raises:
        RuntimeError: one sentence on what is missing, or the compiler's messages.
    """
    compiler = os.environ.get("CXX", "c++").partition(" ")[0]  # options may follow the name
    for missing, what in (
        (torch.version.cuda is None, "need a PyTorch with CUDA, and this one is built without"),
        (cpp_extension.CUDA_HOME is None, "are compiled by nvcc: install the CUDA toolkit or set CUDA_HOME"),
        (not cpp_extension.is_ninja_available(), "are compiled by ninja, which is missing: pip install ninja"),
        (shutil.which(compiler) is None, "are compiled by a C++ compiler, and there is none: set CXX"),
    ):
        if missing:
            raise RuntimeError(f"ModelNew's kernels {what}")
    code = FAST if fast else PLAIN
    functions = re.findall(r"^void (\\w+)\\((const at::Tensor& [^)]*)\\)", code, re.MULTILINE)
    digest = hashlib.sha256(code.encode()).hexdigest()
    return cpp_extension.load_inline(
        name=f"conv_transpose_{digest[:16]}",
        cpp_sources=["#include <array>\\n#include <optional>", *(f"void {name}({of});" for name, of in functions)],
        cuda_sources=code,
        functions=[name for name, _ in functions],
        extra_cuda_cflags=["-O3", *(["-gencode=arch=compute_@ARCH@,code=sm_@ARCH@"] if fast else [])],
    )


# --- how much each kernel is launched with ---------------------------------------------------------------------------
# source and result are (depth, height, width) of what is read and written; of the weight's gradient of input and output


def ceil(a: int, b: int) -> int:
    return -(-a // b)


@ROUNDED@def output_size(size, kernel, given: Arguments):
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
    """The numbers of the plain kernels' Layer; dimensions that the layer lacks have size 1."""
    axes = (x.shape[2:], y.shape[2:], weight.shape[2:], given.stride, given.padding, given.dilation)
    numbers = [n for values, none in zip(axes, (1, 1, 1, 1, 0, 1)) for n in (*(none,) * (3 - RANK), *values)]
    return [x.shape[0], given.groups, weight.shape[0] // given.groups, weight.shape[1], *numbers]


# --- the @PASSES@ on tensors -------------------------------------------------------------------------------------


@TF32@def is_fast(x: Tensor, shape, given: Arguments) -> bool:
    """Whether the fast kernels serve a layer with weights of this shape."""
    fitting = shape == WEIGHT and given == LAYER and x.dtype == DTYPE@FLAGS@
    positions = math.prod(x.shape[2:]) * math.prod(LAYER.stride)  # of an image, at most, which kernels count in 32 bits
    return fitting and max(x.shape[0], positions) < 2**30 and processors(x.get_device()) > 0


def recorded() -> bool:
    """Whether autograd looks at calls, for gradients or for derivatives in forward mode."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


@DENSE@@WIDE@@CALLS@

ConvTranspose.forward.__signature__ = inspect.signature(ConvTranspose.forward)  # which each apply would compute anew

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
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, output_padding=0, groups=1, bias=True,
        dilation=1, padding_mode="zeros", device=None, dtype=None,
    ) -> None:  # fmt: skip
        super().__init__()
        values = (kernel_size, stride, padding, output_padding, dilation)
        kernel, *sizes = (tuple(v) if hasattr(v, "__iter__") else (v,) * RANK for v in values)
        sizes = [v * RANK if len(v) == 1 else v for v in sizes]
        if any(len(v) != RANK for v in (kernel, *sizes)):
            raise ValueError(f"sizes must be integers or {RANK} of them; got {values}")
        self.given = Arguments(*sizes, groups)
        stride, padding, output_padding, dilation, _ = self.given
        if padding_mode != "zeros":
            raise ValueError(f"padding_mode must be zeros; got {padding_mode!r}")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(f"channels must be a multiple of groups; got {in_channels}, {out_channels} and {groups}")
        if min(*kernel, *stride, *dilation, 1) < 1 or min(*padding, *output_padding, 0) < 0:
            raise ValueError(f"sizes must be positive and paddings not negative; got {kernel} and {self.given}")
        if any(more >= max(s, d) for more, s, d in zip(output_padding, stride, dilation)):
            raise ValueError(f"output_padding must be smaller than stride or dilation; got {output_padding}")
        made = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels // groups, *kernel, **made))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels, **made)) if bias else None)
        if bias:
            bound = 1 / math.sqrt(self.weight[0].numel())
            nn.init.uniform_(self.bias, -bound, bound)


@MODEL@

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (@NAMES@) or the same without batch, any sizes -> likewise."""
        single = x.dim() == RANK + 1
        x = x.unsqueeze(0) if single else x
        layer = self.@ATTRIBUTE@
        weight, bias = layer.weight, layer.bias
        if torch.is_autocast_enabled():
            x = x.to(weight.dtype)
        check(x, weight, layer.given)
        fast = is_fast(x, weight.shape, layer.given)
@SHARED_X@        run = ConvTranspose.apply if recorded() else ConvTranspose.forward
        out = run(x, weight, None, bias, (x.shape[2:], weight.shape, layer.given, fast))
        return out.squeeze(0) if single else out
'''

CALLS = {
    "fwd": '''def forward(x: Tensor, weight: Tensor, bias: Tensor | None, given: Arguments, fast: bool) -> Tensor:
    """(batch, channels, *size) -> (batch, other channels, *output_size). Weights are packed at each call."""
    x, weight = x.resolve_neg(), weight.resolve_neg().contiguous()
    bias = None if bias is None else bias.resolve_neg().contiguous()
    shape = (x.shape[0], weight.shape[1] * given.groups, *output_size(x.shape[2:], weight.shape[2:], given))
    out = @EMPTY@
    if out.numel() == 0:
        return out
@FAST_CALL@    x, result = x.contiguous(), out.contiguous()
    build(False).forward(x, weight, bias, result, plain_layer(x, weight, result, given))
    return out.copy_(result)
''',
    "grad-input": '''def grad_input(grad: Tensor, weight: Tensor, size, given: Arguments, fast: bool) -> Tensor:
    """(batch, other channels, *output_size) -> (batch, channels, *size)."""
    grad, weight = grad.resolve_neg(), weight.resolve_neg().contiguous()
    shape = (grad.shape[0], weight.shape[0], *size)
    out = @EMPTY@
    if out.numel() == 0:
        return out
@FAST_CALL@    grad, result = grad.contiguous(), out.contiguous()
    build(False).grad_input(grad, weight, result, plain_layer(result, weight, grad, given))
    return out.copy_(result)
''',
    "grad-weight": '''def grad_weight(x: Tensor, grad: Tensor, shape, given: Arguments, fast: bool) -> Tensor:
    """Inputs and gradients of the outputs -> (channels, other channels // groups, *kernel), which is the shape."""
    x, grad = x.resolve_neg(), grad.resolve_neg()
    if x.numel() == 0:
        return x.new_zeros(shape)
    out = x.new_empty(shape)
@FAST_CALL@    x, grad = x.contiguous(), grad.contiguous()
    build(False).grad_weight(x, grad, out, plain_layer(x, out, grad, given))
    return out
''',
}
"""Each pass; `FAST_CALLS` are those that their kernels serve."""

FAST_CALLS = {
    "fwd": """    if fast:
        x = dense(x@ROWS@)
@CUT@@RESULT@        launch = forward_launch(x.shape[0], full(x), full(@OUT@), processors(x.get_device()))
        build(True).forward(x, weight, bias, @OUT@, *launch)
        return @RETURNED@
""",
    "grad-input": """    if fast:
@RESULT@        launch = grad_input_launch(grad.shape[0], full(grad), full(@OUT@), processors(grad.get_device()))
        build(True).grad_input(dense(grad@ROWS@), weight, @OUT@, *launch)
        return @RETURNED@
""",
    "grad-weight": """    if fast:
        launch = grad_weight_launch(x.shape[0], full(x), full(grad), processors(x.get_device()))
        build(True).grad_weight(dense(x@ROWS@), dense(grad@GRAD_ROWS@), out, *launch)
        return out
""",
}
AUTOGRAD = '''class ConvTranspose(torch.autograd.Function):
    """Of an input x, a weight w and an output y two give the third, linearly in both: so do the derivatives."""

    @staticmethod
    def forward(x, w, y, bias, layer):
        size, shape, given, fast = layer
        if y is None:
            return forward(x, w, bias, given, fast)
        return grad_input(y, w, size, given, fast) if x is None else grad_weight(x, y, shape, given, fast)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, y, _, ctx.layer = inputs
        ctx.save_for_backward(x, w, y)

    @staticmethod
    def backward(ctx, grad):
        *layer, fast = ctx.layer
@ASKED@@SHARED_GRAD@        x, w, y = (grad if t is None else t for t in ctx.saved_tensors)
        run = ConvTranspose.apply if recorded() else ConvTranspose.forward  # the second costs less
        by_x, by_w, by_y, by_bias, _ = ctx.needs_input_grad
        return (
            run(None, w, y, None, (*layer, fast)) if by_x else None,
            run(x, None, y, None, (*layer, fast)) if by_w else None,
            run(x, w, None, None, (*layer, fast)) if by_y else None,
            grad.sum((0, *range(2, grad.dim()))) if by_bias else None,
            None,
        )
'''

SHARED_X = """        if fast and x.shape[-1] % @MULTIPLE@:
            x = dense(x, @MULTIPLE@)  # once for the forward and a gradient
"""
ASKED = """        fast = fast and rounds_to_tf32()  # PyTorch's own gradients ask the flags again
"""
SHARED_GRAD = """        if fast and grad.shape[-1] % @MULTIPLE@:
            grad = dense(grad, @MULTIPLE@)  # once for both gradients
"""

FORWARD_ONLY = '''class ConvTranspose(torch.autograd.Function):
    """The file has the forward alone."""

    @staticmethod
    def forward(x, w, y, bias, layer):
        return forward(x, w, bias, *layer[2:])

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("this file computes no gradients: export the layer without --forward-only")
'''

ROUNDED = """def rounded(a: int, b: int) -> int:
    return round(a / b)


"""
SEGMENTS = '''def segments(walks: int, slices: int, slots: int, processors: int) -> int:
    """Into how many parts blocks cut a walk along the depth, so that all are over soonest; each has slots - 1 more."""

    def steps(parts: int) -> int:
        return ceil(walks * parts, processors) * (ceil(slices, parts) + slots - 1)

    return min(range(1, min(slices, 256) + 1), key=steps)


'''
TF32 = '''def rounds_to_tf32() -> bool:
    """Whether PyTorch's flags have float32 rounded to TF32, as it is by default."""
    cudnn = torch.backends.cudnn
    precision = cudnn.conv.fp32_precision if hasattr(cudnn, "conv") else "tf32" if cudnn.allow_tf32 else "ieee"
    return precision == "tf32" and cudnn.enabled


'''

DENSE = '''def dense(t: Tensor) -> Tensor:
    """The tensor in the fast kernels' memory format, beginning at 16 bytes."""
    t = t.contiguous(memory_format=FORMAT)
    return t.clone() if t.data_ptr() % 16 else t


'''
ROWS = '''def dense(t: Tensor, multiple: int = 1) -> Tensor:
    """The tensor in the fast kernels' memory format, beginning at 16 bytes; or dense but for its rows, which begin a
    multiple of columns apart: at 16 bytes too, as the tensor copy engine wants them."""
    whole = t.is_contiguous()
    if multiple == 1 or (whole and t.shape[-1] == t.stride(-2) and t.shape[-1] % multiple == 0):
        t = t.contiguous(memory_format=FORMAT)
        return t.clone() if t.data_ptr() % 16 else t
    wider = ceil(t.shape[-1], multiple) * multiple
    if whole and 0 < t.numel() < 2**31 and not recorded():
        out = t.new_empty((*t.shape[:-1], wider))[..., : t.shape[-1]]
        build(True).pad_rows(t.resolve_neg(), out)  # is faster than PyTorch's copy, and unknown to autograd
        return out
    for row in (t.stride(-2), wider):
        strides = tuple(math.prod((*t.shape[1:-1], row)[i:]) for i in range(t.dim()))
        if t.stride() == strides and row >= t.shape[-1] and row % multiple == 0 and t.data_ptr() % 16 == 0:
            return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


'''
"""Where kernels' rows are to begin at 16 bytes."""
WIDE = '''def wide(t: Tensor, multiple: int, behind: int = 0) -> Tensor:
    """A tensor, or memory like it whose columns but so many are a multiple: kernels store whole units of a row."""
    more = (behind - t.shape[-1]) % multiple
    return t.new_empty((*t.shape[:-1], t.shape[-1] + more)) if more else t


'''
CUT = """        if x.shape[-1] > @COLUMNS@:  # rows are cut into parts, which overlap by as much as the kernel reaches
            reach = out.shape[-1] - x.shape[-1]
            for begin in range(0, x.shape[-1] - @OVERLAP@, @STEP@):
                first = reach if begin else 0  # a later part's results before it lack columns of the part before
                part = forward(x[..., begin : begin + @COLUMNS@], weight, bias, given, fast)[..., first:]
                out[..., begin + first :][..., : part.shape[-1]] = part
            return out
"""
"""Of a kernel for rows of up to so many columns."""
RESULT = {
    "RESULT": "        result = wide(out, @MULTIPLE@@MORE@)\n",
    "OUT": "result",
    "RETURNED": "out if result is out else out.copy_(result[..., : out.shape[-1]])",
}
"""Of a kernel whose result's rows must be a multiple of columns."""
