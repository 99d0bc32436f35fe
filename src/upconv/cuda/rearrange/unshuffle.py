"""Gradients of strided layers with few output channels, by tensor cores. The kernels around them are ``unshuffle.cu``.

A transposed convolution of stride s to C channels is one without a stride to ``C s^n`` channels, whose pixels are then
shuffled: the phases of the output are its channels (Shi et al., Real-Time Single Image and Video Super-Resolution Using
an Efficient Sub-Pixel Convolutional Neural Network, 2016). For the gradients the output's is unshuffled first. Then
what a matrix instruction sums over is phases and channels, where the strided layer has channels alone, mostly zeros
(docs/experiments.md).

Per axis: with the padding p an output is ``o + p = q s + u``, a tap ``t = a s + u``, and output phase u at q sums input
``q - a`` times tap a of that phase.

The unshuffled gradient is a temporary of the gradient's size, in channels_last of up to twice that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upconv import cpu
from upconv.cuda.compile import jit
from upconv.cuda.compile.launch import Launcher
from upconv.cuda.family import weighed
from upconv.cuda.gpu import Gpu
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.rearrange import around
from upconv.cuda.wgrad.wgrad import Unit
from upconv.problem import Problem

THREADS = 256
_MOST_CHANNELS = 64  # of output channels and phases: beyond, the strided layer has channels enough of its own
# But layers that no tensor cores take as they are have no choice, and of many taps these take longer.
_CUDA_CORES = "direct", "staged"
_MANY_TAPS = 256
_MOST_PADDED = 2  # times as many in channels_last, where zeros make whole 16 bytes of them
_RATE = 0.5  # of the device's copy rate, of single elements with some read from afar; and the launches:
_UNSHUFFLE, _WEIGHTS = 4e-6, 3e-6
_LEAST = 5e-6  # of the inner kernel beside its bytes


@dataclass(frozen=True)
class Choice(around.Choice):
    """A choice for the layer without a stride."""

    family = "unshuffle"

    @property
    def summary(self) -> str:
        q = self.inner.problem
        shape = f"{'x'.join(map(str, q.kernel))} taps of {q.out_channels} phases and channels"
        return f"without the stride, {shape}, {self._memory}: {self.inner.summary}"

    @property
    def temporary_bytes(self) -> int:
        """Of the unshuffled gradient, and the weight without the stride or its gradient."""
        q = self.inner.problem
        return (math.prod(q.output_shape) + math.prod(q.weight_shape)) * q.dtype.itemsize

    def sources(self) -> tuple[Any, ...]:
        """What NVRTC must compile: the kernels around, and the inner layer's."""
        return (unit(self.problem), *self.inner_units)

    def prepare(self, device: int) -> GradInput | GradWeight:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return GradInput(self, device) if self.problem.pass_ == "grad-input" else GradWeight(self, device)


def unstrided(p: Problem) -> Problem:
    """The layer without a stride whose output channels are the channels and phases of another's.

    In channels_last its channels are made whole 16 bytes, with zeros.
    """
    channels = p.out_channels * math.prod(p.stride)
    if p.layout == "channels_last":
        each = 16 // p.dtype.itemsize
        channels = -(-channels // each) * each
    taps = tuple(-(-k // s) for k, s in zip(p.kernel, p.stride))
    # What both ends have of positions without an output is cropped.
    ends = zip(p.size, taps, p.stride, p.padding, p.out_size)
    crop = tuple(max(0, min(pad // s, n + a - 2 - (out - 1 + pad) // s)) for n, a, s, pad, out in ends)
    return Problem.make(
        p.batch, p.in_channels, channels, p.size, taps, 1, crop, dtype=p.dtype, precision=p.precision, bias=False,
        layout=p.layout,
    ).with_(pass_=p.pass_)  # fmt: skip


def constants(p: Problem) -> dict[str, int]:
    """The kernels', see kernels/unshuffle.cu."""
    q, lead = unstrided(p), 3 - p.rank
    found = {
        "element": p.dtype.itemsize,
        "channels_last": p.layout == "channels_last",
        "cout": p.out_channels,
        "channels": q.out_channels,
    }
    for i, axis in enumerate("dhw"):
        at = i - lead
        stride, kernel, pad, crop = (
            (1, 1, 0, 0) if at < 0 else (p.stride[at], p.kernel[at], p.padding[at], q.padding[at])
        )
        found |= {f"stride_{axis}": stride, f"kernel_{axis}": kernel, f"offset_{axis}": pad - crop * stride}
    return found


def unit(p: Problem) -> Unit:
    """The kernels around a layer's."""
    single = ("unshuffle_and_expand_float", "fold_float") if p.dtype.itemsize == 2 else ()
    entries = ("unshuffle", "unshuffle_and_expand", "fold", *single)
    label = f"unshuffle {str(p).split(' on ')[0]} {8 * p.dtype.itemsize} bits {p.layout}"
    named = [f"{entry}<{jit.CONFIG}>" for entry in entries]
    return Unit(label, jit.instance("unshuffle.cu", constants(p), named), entries)


class _Around:
    """The kernels around the inner layer's, on a device, and their sizes."""

    def __init__(self, choice: Choice, device: int) -> None:
        p, q = choice.problem, choice.inner.problem
        self.device, self._problem, self.weight_shape = device, p, q.weight_shape
        self._shape = q.output_shape
        self._strides = cpu.dense_strides(q.output_shape, cpu.memory_format(q.layout, q.rank))
        full = (1,) * (3 - p.rank)
        self.sizes = (math.prod(q.output_shape), *full, *p.out_size, *full, *q.out_size)
        self.of_weight = math.prod(q.weight_shape)
        self.blocks, self.weight_blocks = -(-self.sizes[0] // THREADS), -(-self.of_weight // THREADS)
        self._code = unit(p)

    def launcher(self, entry: str) -> Launcher:
        codes = "PPi" + ("i" * 6 if entry == "unshuffle" else "q" * 5)
        if entry.startswith("unshuffle_and"):
            codes += "PPi" + "i" * 6
        arch = gpu_of(self.device).arch
        return Launcher(jit.kernel(self._code.source, entry, arch, self._code.label), THREADS, 0, codes)

    def for_weights(self, entry: str) -> dict[torch.dtype, Launcher]:
        """A kernel by the weights' dtypes."""
        found = {self._problem.dtype: self.launcher(entry)}
        if self._problem.dtype.itemsize == 2:
            found[torch.float32] = self.launcher(f"{entry}_float")
        return found

    def empty(self, grad: Tensor) -> Tensor:
        """For the output's gradient with its phases as channels."""
        return grad.new_empty_strided(self._shape, self._strides)


def _strides(weight: Tensor) -> tuple[int, ...]:
    """Of input and output channels, and of taps along D, H and W."""
    first, second, *spatial = weight.stride()
    return (first, second, *(0,) * (3 - len(spatial)), *spatial)


class GradInput(around.GradInput):
    """The gradient for the input, its kernels loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        super().__init__(choice, device)
        self._around = _Around(choice, device)
        self._unshuffle = self._around.for_weights("unshuffle_and_expand")

    def run(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False, claim: bool = False
    ) -> None:
        """`around.GradInput.run`."""
        of = self._around
        grad, expanded = of.empty(x), packed.new_empty(of.weight_shape)
        args = (packed.data_ptr(), expanded.data_ptr(), of.of_weight, *_strides(packed))
        launch = self._unshuffle[packed.dtype]
        launch(of.device, of.weight_blocks + of.blocks, (*args, x.data_ptr(), grad.data_ptr(), *of.sizes))
        self._run_inner(grad, expanded, out, fresh, claim)


class GradWeight(around.GradWeight):
    """The gradient for the weight, its kernels loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        super().__init__(choice, device)
        self._around = _Around(choice, device)
        self._unshuffle, self._fold = self._around.launcher("unshuffle"), self._around.for_weights("fold")

    def run(self, x: Tensor, grad: Tensor, out: Tensor, lasting: bool = False) -> None:
        """`around.GradWeight.run`."""
        of = self._around
        unshuffled, found = of.empty(grad), out.new_empty(of.weight_shape)
        self._unshuffle(of.device, of.blocks, (grad.data_ptr(), unshuffled.data_ptr(), *of.sizes))
        self._inner.run(x, unshuffled, found, lasting)
        count = out.numel()
        args = (found.data_ptr(), out.data_ptr(), count, *_strides(out))
        self._fold[out.dtype](of.device, -(-count // THREADS), args)


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why a layer's gradients are not computed without its stride, in a sentence; None when they may be."""
    refused = around.refusal(p, gpu)
    if refused:
        return refused
    if math.prod(p.stride) == 1:
        return "there is no stride to be rid of"
    if p.groups > 1 or max(p.dilation) > 1:
        return "only taps side by side, of layers without groups, are sorted by phase"
    q = unstrided(p)
    if math.prod(q.output_shape) + math.prod(q.weight_shape) >= 2**31 - 3 * THREADS:  # the kernels' indices
        return "outputs and weights have nearly 2^31 elements and more"
    if q.out_channels > _MOST_PADDED * p.out_channels * math.prod(p.stride):
        return f"{q.out_channels} channels with zeros, for whole 16 bytes, would be too much memory"
    return None


def choose(p: Problem, gpu: Gpu, otherwise: Any, general: bool = False) -> Choice | str:
    """The layer without its stride, or the sentence why it is not worth it.

    ``otherwise``: the fastest choice for the layer as it is, or None. ``general``: one for every size of the input.
    """
    refused = refusal(p, gpu)
    if refused:
        return refused
    if general:
        return "whether it pays depends on the size of the input"
    if otherwise is None:
        return "there is no kernel for the layer as it is, whose estimate would tell whether this pays"
    many = p.out_channels * math.prod(p.stride) > _MOST_CHANNELS
    if many and otherwise.family not in _CUDA_CORES and p.taps < _MANY_TAPS:
        return f"{p.out_channels} channels in {math.prod(p.stride)} phases are more than {_MOST_CHANNELS}"
    q = unstrided(p)
    nbytes = (math.prod(p.output_shape) + math.prod(q.output_shape)) * p.dtype.itemsize
    beside = nbytes / (_RATE * gpu.bandwidth) + _UNSHUFFLE + _WEIGHTS
    read = (math.prod(q.output_shape) + math.prod(q.input_shape)) * p.dtype.itemsize / gpu.bandwidth
    if not around.gains(beside + read + _LEAST, otherwise):  # a search takes 50 to 150 ms for a new layer
        return f"slower: {(beside + read) * 1e3:.3g} ms for its bytes alone, its stride undone first"
    inner = around.choose(q, gpu)
    if isinstance(inner, str):
        return inner
    found = Choice(inner, p, inner.seconds + beside)
    if not around.gains(weighed(found), otherwise):
        return f"slower, or too little faster: {found.seconds * 1e3:.3g} ms by the model, its stride undone first"
    return found


candidate = choose
