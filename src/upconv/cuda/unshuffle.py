"""Gradients of strided layers with few output channels, by tensor cores. The kernels around them are ``unshuffle.cu``.

A transposed convolution of stride s to C channels is one without a stride to ``C s^n`` channels, whose pixels are then
shuffled: the phases of the output are its channels (Shi et al., Real-Time Single Image and Video Super-Resolution Using
an Efficient Sub-Pixel Convolutional Neural Network, 2016). For the gradients the output's is unshuffled first. Then
what a matrix instruction sums over is phases and channels, where the strided layer has channels alone, mostly zeros
(NOTES: FSRCNN's last layer, one channel, 81 taps, stride 3: 9 channels and 9 taps; its gradients in TF32 took 78 and
163 us on CUDA cores, and would take 114 and 222 on tensor cores as they are).

Per axis: with the padding p an output is ``o + p = q s + u``, a tap ``t = a s + u``, and output phase u at q sums input
``q - a`` times tap a of that phase.

The unshuffled gradient is a temporary of the gradient's size, in channels_last of up to twice that. Where it cannot be
had, the best kernel for the layer as it is runs.
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
from upconv.cuda.reserve import Reserve
from upconv.cuda.wgrad import Unit
from upconv.problem import Problem

THREADS = 256
_MOST_CHANNELS = 64  # of output channels and phases: beyond, the strided layer has channels enough of its own
_MOST_PADDED = 2  # times as many in channels_last, where zeros make whole 16 bytes of them
_RATE = 0.5  # of the device's copy rate, of single elements with some read from afar; and the launches:
_UNSHUFFLE, _WEIGHTS = 4e-6, 3e-6
_LEAST = 5e-6  # of the inner kernel beside its bytes
_GAIN = 5e-6  # at least: four launches stand against one or two

Inner = gather.Choice | wgrad.Choice


@dataclass(frozen=True)
class Choice:
    """A choice for the layer without a stride, and what runs where memory for that is short."""

    inner: Inner
    otherwise: Any
    """The fastest `engine.Choice` for the layer as it is."""
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
        if self.problem.pass_ == "grad-input" and self.inner.problem.taps > 1:
            found = found[:1]  # expanded weights are contiguous, and packed; of one tap they lie as boxes want them
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
    single = ("unshuffle_and_expand_float", "fold_float") if p.dtype.itemsize == 2 else ()
    label = f"unshuffle {str(p).split(' on ')[0]} {8 * p.dtype.itemsize} bits {p.layout}"
    return Unit(
        label, jit.source("unshuffle.cu", dict(macros(p))), ("unshuffle", "unshuffle_and_expand", "fold", *single)
    )


class _Prepared:
    """What both gradients have: the inner layer's kernel, and the output's gradient unshuffled."""

    def __init__(self, choice: Choice, device: int) -> None:
        p, q = choice.problem, choice.inner.problem
        self._device, self._problem, self._inner_problem = device, p, q
        self._inner: Any = choice.inner.prepare(device)
        self._reserve = Reserve(choice.otherwise, device)
        self.casts = self._inner.casts
        self._shape = q.output_shape
        self._strides = torch.empty(
            q.output_shape, device="meta", memory_format=cpu.memory_format(q.layout, q.rank)
        ).stride()
        full = (1,) * (3 - p.rank)
        self._sizes = (math.prod(q.output_shape), *full, *p.out_size, *full, *q.out_size)
        of_weight = math.prod(q.weight_shape)
        self._blocks, self._weight_blocks = -(-self._sizes[0] // THREADS), -(-of_weight // THREADS)
        self._of_weight = of_weight
        self._code = unit(p)

    def _launcher(self, entry: str) -> Launcher:
        codes = "PPi" + ("i" * 6 if entry == "unshuffle" else "q" * 5)
        if entry.startswith("unshuffle_and"):
            codes += "PPi" + "i" * 6
        arch = gpu_of(self._device).arch
        return Launcher(jit.kernel(self._code.source, entry, arch, self._code.label), THREADS, 0, codes)

    def _for_weights(self, entry: str) -> dict[torch.dtype, Launcher]:
        """A kernel by the weights' dtypes."""
        found = {self._problem.dtype: self._launcher(entry)}
        if self._problem.dtype.itemsize == 2:
            found[torch.float32] = self._launcher(f"{entry}_float")
        return found

    def _empty(self, grad: Tensor) -> Tensor:
        """For the output's gradient with its phases as channels."""
        return grad.new_empty_strided(self._shape, self._strides)


def _strides(weight: Tensor) -> tuple[int, ...]:
    """Of input and output channels, and of taps along D, H and W."""
    first, second, *spatial = weight.stride()
    return (first, second, *(0,) * (3 - len(spatial)), *spatial)


class GradInput(_Prepared):
    """The gradient for the input, its kernels loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        super().__init__(choice, device)
        self._unshuffle = self._for_weights("unshuffle_and_expand")
        self._inner.load() if self._inner_problem.taps == 1 else self._inner.load_packed()

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The weight itself, of any strides, the problem's dtype or float32; it is expanded in `run`'s first launch."""
        return weight

    def run(self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False) -> None:
        """Writes the input's gradient into ``out``; ``x`` is the output's gradient. Both are dense in the layout."""
        try:
            self._unstrided(x, packed, out, fresh)
            return
        except torch.OutOfMemoryError:
            pass  # what follows is behind the handler, whose exception keeps the temporaries alive
        self._reserve.grad_input(x, packed, out)

    def _unstrided(self, x: Tensor, packed: Tensor, out: Tensor, fresh: bool) -> None:
        grad, weight = self._empty(x), packed.new_empty(self._inner_problem.weight_shape)
        args = (packed.data_ptr(), weight.data_ptr(), self._of_weight, *_strides(packed))
        grid = self._weight_blocks + self._blocks
        launch = self._unshuffle[packed.dtype]
        launch(self._device, grid, (*args, x.data_ptr(), grad.data_ptr(), *self._sizes))
        self._inner.run(grad, self._inner.pack(weight), None, out, fresh)  # unshuffling ended before packing began


class GradWeight(_Prepared):
    """The gradient for the weight, its kernels loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        super().__init__(choice, device)
        self._unshuffle, self._fold = self._launcher("unshuffle"), self._for_weights("fold")

    def run(self, x: Tensor, grad: Tensor, out: Tensor) -> None:
        """Writes the weight's gradient into ``out``, of any strides; ``x`` and ``grad`` are dense in the layout."""
        try:
            self._unstrided(x, grad, out)
            return
        except torch.OutOfMemoryError:
            pass
        self._reserve.grad_weight(x, grad, out)

    def _unstrided(self, x: Tensor, grad: Tensor, out: Tensor) -> None:
        unshuffled, found = self._empty(grad), out.new_empty(self._inner_problem.weight_shape)
        self._unshuffle(self._device, self._blocks, (grad.data_ptr(), unshuffled.data_ptr(), *self._sizes))
        self._inner.run(x, unshuffled, found)
        count = out.numel()
        args = (found.data_ptr(), out.data_ptr(), count, *_strides(out))
        self._fold[out.dtype](self._device, -(-count // THREADS), args)


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
        return "nothing would run where memory for it is short"
    q = unstrided(p)
    nbytes = (math.prod(p.output_shape) + math.prod(q.output_shape)) * p.dtype.itemsize
    around = nbytes / (_RATE * gpu.bandwidth) + _UNSHUFFLE + _WEIGHTS
    read = (math.prod(q.output_shape) + math.prod(q.input_shape)) * p.dtype.itemsize / gpu.bandwidth
    if around + read + _LEAST > otherwise.seconds - _GAIN:  # a search takes 50 to 150 ms for a new layer
        return f"slower: {(around + read) * 1e3:.3g} ms for its bytes alone, its stride undone first"
    inner = gather.choose(q, gpu) if p.pass_ == "grad-input" else wgrad.choose(q, gpu)
    if isinstance(inner, str):
        return inner
    found = Choice(inner, otherwise, p, inner.seconds + around)
    if found.seconds > otherwise.seconds - _GAIN:
        return f"slower, or too little faster: {found.seconds * 1e3:.3g} ms by the model, its stride undone first"
    return found
