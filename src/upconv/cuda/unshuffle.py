"""Gradients of strided layers with few output channels, by tensor cores. The kernels around them are ``unshuffle.cu``.

A transposed convolution of stride s to C channels is one without a stride to ``C s^n`` channels, whose pixels are then
shuffled: the phases of the output are its channels (Shi et al., Real-Time Single Image and Video Super-Resolution Using
an Efficient Sub-Pixel Convolutional Neural Network, 2016). For the gradients the output's is unshuffled first. Then
what a matrix instruction sums over is phases and channels, where the strided layer has channels alone, mostly zeros
(NOTES: FSRCNN's last layer, one channel, 81 taps, stride 3: 9 channels and 9 taps; its gradients in TF32 took 78 and
163 us on CUDA cores, and would take 114 and 222 on tensor cores as they are).

Per axis: with the padding p an output is ``o + p = q s + u``, a tap ``t = a s + u``, and output phase u at q sums input
``q - a`` times tap a of that phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upconv import cpu
from upconv.cuda import gather, jit, wgrad
from upconv.cuda.gpu import Gpu
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.launch import Launcher
from upconv.cuda.wgrad import Unit
from upconv.problem import Problem

THREADS = 256
_MOST_CHANNELS = 64  # of output channels and phases: beyond, the strided layer has channels enough of its own
_RATE = 0.5  # of the device's copy rate, of single elements with some read from afar; and the launches:
_UNSHUFFLE, _WEIGHTS = 4e-6, 3e-6
_GAIN = 5e-6  # at least: four launches stand against one or two

Inner = gather.Choice | wgrad.Choice


@dataclass(frozen=True)
class Choice:
    """A choice for the layer without a stride."""

    inner: Inner
    problem: Problem
    seconds: float
    """The model's estimate."""
    family = "unshuffle"

    @property
    def summary(self) -> str:
        q = self.inner.problem
        shape = f"{'x'.join(map(str, q.kernel))} taps of {q.out_channels} phases and channels"
        return f"without the stride, {shape}: {self.inner.summary}"

    @property
    def bound(self) -> str:
        return self.inner.bound

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile: the kernels around, and the inner layer's."""
        found = self.inner.sources()
        if self.problem.pass_ == "grad-input":
            found = found[:1]  # expanded weights are contiguous, and packed
        return (unit(self.problem), *(Unit(u.label, u.source, u.entries) for u in found))

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


def macros(p: Problem) -> dict[str, int]:
    """The kernels' constants."""
    q, lead = unstrided(p), 3 - p.rank
    found = {
        "ELEMENT": p.dtype.itemsize,
        "CHANNELS_LAST": int(p.layout == "channels_last"),
        "COUT": p.out_channels,
        "CHANNELS": q.out_channels,
    }
    for i, axis in enumerate("DHW"):
        at = i - lead
        stride, kernel, pad, crop = (
            (1, 1, 0, 0) if at < 0 else (p.stride[at], p.kernel[at], p.padding[at], q.padding[at])
        )
        found |= {f"STRIDE_{axis}": stride, f"KERNEL_{axis}": kernel, f"OFFSET_{axis}": pad - crop * stride}
    return found


def unit(p: Problem) -> Unit:
    """The kernels around a layer's."""
    single = ("expand_float", "fold_float") if p.dtype.itemsize == 2 else ()
    label = f"unshuffle {str(p).split(' on ')[0]} {8 * p.dtype.itemsize} bits {p.layout}"
    return Unit(label, jit.source("unshuffle.cu", dict(macros(p))), ("unshuffle", "expand", "fold", *single))


class _Prepared:
    """What both gradients have: the inner layer's kernel, and the output's gradient unshuffled."""

    def __init__(self, choice: Choice, device: int) -> None:
        p, q = choice.problem, choice.inner.problem
        self._device, self._problem, self._inner_problem = device, p, q
        self._inner: Any = choice.inner.prepare(device)
        self.casts = self._inner.casts
        self._shape = q.output_shape
        self._strides = torch.empty(
            q.output_shape, device="meta", memory_format=cpu.memory_format(q.layout, q.rank)
        ).stride()
        full = (1,) * (3 - p.rank)
        self._sizes = (math.prod(q.output_shape), *full, *p.out_size, *full, *q.out_size)
        code = unit(p)
        self._launchers = {
            entry: Launcher(
                jit.kernel(code.source, entry, gpu_of(device).arch, code.label), THREADS, 0,
                "PPi" + ("i" * 6 if entry == "unshuffle" else "q" * 5),
            )
            for entry in code.entries
        }  # fmt: skip

    def _launch(self, entry: str, source: Tensor, out: Tensor, sizes: tuple[int, ...]) -> None:
        grid = -(-sizes[0] // THREADS)
        self._launchers[entry](self._device, grid, (source.data_ptr(), out.data_ptr(), *sizes))

    def unshuffled(self, grad: Tensor) -> Tensor:
        """The output's gradient, dense in the problem's layout, with its phases as channels."""
        out = grad.new_empty_strided(self._shape, self._strides)
        self._launch("unshuffle", grad, out, self._sizes)
        return out

    def _weights(self, name: str, dtype: torch.dtype) -> str:
        """The kernel ``expand`` or ``fold`` for weights of a dtype."""
        return name if dtype is self._problem.dtype else f"{name}_float"

    def _strided(self, t: Tensor) -> tuple[int, ...]:
        first, second, *spatial = t.stride()
        return (first, second, *(0,) * (3 - len(spatial)), *spatial)


class GradInput(_Prepared):
    """The gradient for the input, its kernels loaded for a device."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The inner layer's packed weights; ``weight`` has any strides, the problem's dtype or float32."""
        expanded = weight.new_empty(self._inner_problem.weight_shape)
        sizes = (expanded.numel(), *self._strided(weight))
        self._launch(self._weights("expand", weight.dtype), weight, expanded, sizes)
        packed: Tensor = self._inner.pack(expanded)
        return packed

    def run(self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False) -> None:
        """Writes the input's gradient into ``out``; ``x`` is the output's gradient. Both are dense in the layout."""
        self._inner.run(self.unshuffled(x), packed, None, out)


class GradWeight(_Prepared):
    """The gradient for the weight, its kernels loaded for a device."""

    def run(self, x: Tensor, grad: Tensor, out: Tensor) -> None:
        """Writes the weight's gradient into ``out``, of any strides; ``x`` and ``grad`` are dense in the layout."""
        found = out.new_empty(self._inner_problem.weight_shape)
        self._inner.run(x, self.unshuffled(grad), found)
        self._launch(self._weights("fold", out.dtype), found, out, (out.numel(), *self._strided(out)))


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why a layer's gradients are not computed without its stride, in a sentence; None when they may be."""
    if p.pass_ not in ("grad-input", "grad-weight"):
        return "these kernels compute gradients only: a forward takes no memory beside packed weights"
    if gpu.capability[0] != 9:
        return "that it pays was measured on compute capability 9.0 alone"
    if p.precision not in ("tf32", "bf16", "fp16"):
        return "that it pays was measured for TF32 and 16 bits alone"
    if math.prod(p.stride) == 1:
        return "there is no stride to be rid of"
    if p.groups > 1 or max(p.dilation) > 1:
        return "only taps side by side, of layers without groups, are sorted by phase"
    if p.out_channels * math.prod(p.stride) > _MOST_CHANNELS:
        return f"{p.out_channels} channels in {math.prod(p.stride)} phases are more than {_MOST_CHANNELS}"
    if math.prod(unstrided(p).output_shape) >= 2**31:
        return "the output has 2^31 elements and more"
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
    q = unstrided(p)
    inner = gather.choose(q, gpu) if p.pass_ == "grad-input" else wgrad.choose(q, gpu)
    if isinstance(inner, str):
        return inner
    nbytes = (math.prod(p.output_shape) + math.prod(q.output_shape)) * p.dtype.itemsize
    found = Choice(inner, p, inner.seconds + nbytes / (_RATE * gpu.bandwidth) + _UNSHUFFLE + _WEIGHTS)
    if otherwise is not None and found.seconds > otherwise.seconds - _GAIN:
        return f"slower, or too little faster: {found.seconds * 1e3:.3g} ms by the model, its stride undone first"
    return found
