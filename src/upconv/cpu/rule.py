"""Which plan computes a layer on a CPU. By rule, never by timing; PyTorch's own operator wherever a plan gains little.

What PyTorch's operator costs follows from what oneDNN builds for it (``ONEDNN_VERBOSE=1`` shows it):

- a kernel of its own (``brg_deconv``) for layers without dilation whose output is a whole number of strides, and for
  channels_last layers of stride 1. It pads few output channels to a vector.
- anything else from another primitive (``conv:any``), after which a scalar loop adds the bias.
- layers that are grouped, or dilated with a stride, by im2col.

A plan is taken where it gains a third at least, alone on the machine or beside another program that uses the cores.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from upconv.cpu import run
from upconv.cpu.geometry import shuffle_blowup
from upconv.cpu.onednn import HALF, own_kernel, untrusted, untrusted_gradients, unwritten
from upconv.problem import Problem, dtype_name

Choice = tuple[str, str]
"""A plan and the reason for it, in a sentence."""

_WEIGHTS_PER_OUTPUT = 1 / 4  # above this, packing the weights takes as long as the layer
_SMALL_OUTPUT = 1 << 18  # elements below which waiting for all threads once more takes as long as a plan gains
_SMALL_WORK = 10_000_000  # multiplications per thread below which the same holds of `shuffle`
_MOST_TAPS = 4096  # the geometry of `shuffle` lists the taps; no known layer has as many
_BLOWUP = 2.0  # multiplications of `shuffle` over the useful ones that its single pass still pays for
_FEW_CHANNELS = 4  # output channels that PyTorch's kernels pad to twice as many at least
# Of all bytes, what `wide` may hold for an image in channels_last, where PyTorch's operator holds nothing beside them.
_WIDE_MEMORY = 1 / 25
_MANY_PHASES = 16  # phases from which oneDNN's half-precision depthwise kernel is slow in small chunks too
_FEW_ROW = 32  # pixels in a row of the input below which the correlation of few channels is slow
_LEAST_RESULTS = 8  # output channels of the correlation that fill a vector
# Multiplications per output from which that padding sets the time, not the pass over the results.
_FEW_CHANNELS_WORK = {"nchw": 200, "channels_last": 400}
# PyTorch's multiplications, per output channel, thread and share of `shuffle`, below which waiting for several shares'
# threads beside other programs takes what the plan gains.
_SHARE_WORK = {torch.float32: 25_000_000, torch.bfloat16: 50_000_000, torch.float16: 50_000_000}
_TURNED_TAPS = 32  # taps below which turning the input takes as long as a correlation of few channels gains
# Where oneDNN's float32 sum for the bias takes a fifth of a step: output channels of a group from which it is slower
# than torch.sum, elements from which the calls do not matter, and multiplications per output up to which it shows.
_SPLIT_CHANNELS, _SPLIT_OUTPUT, _SPLIT_WORK = 32, 1 << 20, 128
# Multiplications per output up to which the scalar bias loop takes a third of the time at least.
_BIAS_WORK = {torch.float32: 150, torch.bfloat16: 256, torch.float16: 256}

_IM2COL = "dilated with a stride: PyTorch's operator falls back to im2col"


def choose_forward(p: Problem, onednn: Collection[torch.dtype], threads: int) -> Choice:
    """The forward's plan on a CPU where PyTorch uses oneDNN for the dtypes ``onednn``, with so many threads.

    >>> choose_forward(Problem.make(1, 8, 8, (4, 4), 3), {torch.float32}, threads=2)[0]
    'native'
    """
    plan, reason = _fastest_forward(p, onednn, threads)
    if plan == "native" and unwritten(p):
        return "wide", "PyTorch's bfloat16 operator would return memory that nothing wrote; in float32 it does not"
    return plan, reason


def choose_backward(p: Problem, onednn: Collection[torch.dtype]) -> Choice:
    """How the gradients are taken together."""
    if p.dtype in onednn and untrusted_gradients(p):
        return "wide", "oneDNN's gradients may be wrong on images so narrow or so padded; float64 goes without oneDNN"
    if not p.bias:
        return "native", "PyTorch's operator computes both gradients with forward-shaped kernels"
    if p.dtype not in onednn:
        return "native", f"PyTorch runs no oneDNN convolution in {dtype_name(p.dtype)} here"
    fast = p.dtype is torch.float32 and (p.out_channels < _SPLIT_CHANNELS * p.groups or max(p.stride) == 1)
    if p.layout == "nchw" or p.rank > 2 or fast:
        return "native", "oneDNN sums the bias' gradient at the speed of memory here"
    if math.prod(p.output_shape) < _SPLIT_OUTPUT:
        return "native", "the output is small, so the call is bound by its overhead"
    if p.macs > _SPLIT_WORK * math.prod(p.output_shape):
        return "native", "the bias' gradient takes little beside the other two"
    return "split", "the bias' gradient is summed apart: in channels_last oneDNN's primitive sums it in a scalar loop"


def why_not(p: Problem, name: str, why: str) -> str:
    """Why a candidate was not chosen when another one was, for the reason ``why``."""
    refused = run.refusal(p, name)
    if refused:
        return refused
    if name == "native":
        return "oneDNN would add the bias in a scalar loop" if scalar_bias(p) else f"slower: {why}"
    if name == "unbiased" and not scalar_bias(p):
        return "oneDNN's kernel for this shape adds the bias itself"
    if name == "wide":
        return f"chunks of float32 pay without dilation, of more images than one or 16 channels; {why}"
    if name == "shuffle" and p.taps <= _MOST_TAPS:
        return f"its common window takes {shuffle_blowup(p):.2g} times the useful multiplications; {why}"
    return f"no gain of a third: {why}"


def scalar_bias(p: Problem) -> bool:
    """Whether PyTorch's operator would add the bias in oneDNN's scalar loop."""
    return p.bias and p.dtype is not torch.float64 and not own_kernel(p)


def _fastest_forward(p: Problem, onednn: Collection[torch.dtype], threads: int) -> Choice:
    """The fastest plan, where PyTorch's own operator is right."""
    if p.batch == 0 or min(p.size) == 0:
        return "native", "the input is empty"
    if untrusted(p):
        return "native", "oneDNN's half-precision forward kernels are not to be trusted on images this narrow"
    if p.dtype not in onednn:
        reason = f"PyTorch runs no oneDNN convolution in {dtype_name(p.dtype)} here, and the other plans rest on them"
        return "native", reason
    outputs = math.prod(p.output_shape)
    if outputs < _SMALL_OUTPUT:
        return "native", "the output is small, so the call is bound by its overhead"
    if any(d * (k - 1) >= s * n for d, k, s, n in zip(p.dilation, p.kernel, p.stride, p.size)):
        # Every output then sees the border, and oneDNN's forward kernels refuse a padding as wide as the input.
        return _relieved(p, "the kernel reaches across the whole input")
    if math.prod(p.weight_shape) > _WEIGHTS_PER_OUTPUT * outputs:
        return _relieved(p, "the weights are large beside the output, so packing them costs more than it gains")
    if all(s == 1 for s in p.stride):
        return _choose_unstrided(p)
    return _choose_strided(p, threads)


def _light(p: Problem) -> bool:
    """Whether the scalar bias loop takes a third of the time of PyTorch's operator at least."""
    return scalar_bias(p) and p.macs <= _BIAS_WORK[p.dtype] * math.prod(p.output_shape)


def _relieved(p: Problem, reason: str) -> Choice:
    """PyTorch's operator, relieved of a slow bias where that costs no accuracy."""
    spared = p.rank == 3 or (p.groups > 1 and not p.depthwise and max(p.stride) > 1)  # gains too little there
    if _light(p) and not spared and run.refusal(p, "unbiased") is None:
        return "unbiased", f"{reason}; oneDNN would add the bias in a scalar loop"
    return "native", reason


def _choose_unstrided(p: Problem) -> Choice:
    if p.layout == "channels_last" and (p.groups < 8 or p.dtype is torch.float32):
        return "native", "oneDNN has a kernel of its own for channels_last at stride 1"
    if p.dtype in HALF and scalar_bias(p):
        return "flip", "the bias is fused into the forward convolution, where oneDNN would add it in a scalar loop"
    if p.groups > 1 and p.out_channels > p.in_channels:
        return "flip", "im2col of the output, by which oneDNN's transposed kernel goes, is larger than of the input"
    return _relieved(p, "oneDNN's transposed kernel is as fast as its forward one here")


def _choose_strided(p: Problem, threads: int) -> Choice:
    dilated = any(d > 1 and s > 1 for d, s in zip(p.dilation, p.stride))
    if p.depthwise and p.dtype in HALF and not dilated and p.rank < 3:
        chunk = run.wide_channels(p)
        if p.layout == "channels_last" and run.wide_bytes(p) > _WIDE_MEMORY * p.bytes:
            return _relieved(p, "an image in float32 would take more memory than PyTorch's operator")
        if chunk < p.batch * p.in_channels and chunk % 16 == 0:
            return "wide", "oneDNN's depthwise kernel is far faster in float32, and chunks of it stay in cache"
    if p.taps > _MOST_TAPS or shuffle_blowup(p) > _BLOWUP:
        return _relieved(p, "one correlation of all phases would multiply with too many zeros")
    if p.dtype in HALF and dilated:
        return "shuffle", _IM2COL
    if p.dtype in HALF and _light(p):
        return "shuffle", "the bias is fused into one correlation, where oneDNN would add it in a scalar loop"
    if p.dtype in HALF and p.depthwise and p.layout == "nchw" and math.prod(p.stride) >= _MANY_PHASES:
        return "shuffle", "depthwise with many phases: one correlation reads the input once"
    if p.macs < _SMALL_WORK * threads:
        return _relieved(p, "one correlation of all phases would not pay for moving its results")
    if dilated and _large_im2col(p):
        return "shuffle", _IM2COL
    if _few_channels(p) and _shares_pay(p, threads):
        return "shuffle", f"few output channels ({p.out_channels}) would be padded to a vector for every phase"
    return _relieved(p, "oneDNN's own transposed kernel is the fastest for this shape")


def _large_im2col(p: Problem) -> bool:
    """Whether im2col costs PyTorch's float32 operator so much that two more passes over the output do not matter."""
    grouped = p.groups > 1 and not p.depthwise and p.rank < 3
    return grouped and (p.layout == "channels_last" or p.out_channels > p.in_channels)


def _few_channels(p: Problem) -> bool:
    """Whether PyTorch's operator spends most of its time on the channels that it pads a layer with."""
    few = p.groups == 1 and p.out_channels <= _FEW_CHANNELS and p.rank == 2 and p.size[-1] >= _FEW_ROW
    fills = p.out_channels * math.prod(p.stride) >= _LEAST_RESULTS
    pays = p.taps >= _TURNED_TAPS or not run.turned(p)
    return few and fills and pays and p.macs >= _FEW_CHANNELS_WORK[p.layout] * math.prod(p.output_shape)


def _shares_pay(p: Problem, threads: int) -> bool:
    """Whether what `shuffle` computes at a time, to hold no more memory than PyTorch's operator, is work enough."""
    shares = run.shares(p)
    return shares == 1 or p.macs >= _SHARE_WORK[p.dtype] * threads * shares * p.out_channels
