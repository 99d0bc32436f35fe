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

from upconv.cuda.compile import jit
from upconv.cuda.family import weighed
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Given, Int, Launch, Operand, Pointer, Scratch, Unit, five_strides, ints
from upconv.cuda.rearrange import rearranged
from upconv.cuda.rearrange.rearranged import THREADS
from upconv.problem import Problem

_MOST_CHANNELS = 64  # of output channels and phases: beyond, the strided layer has channels enough of its own
# But layers that no tensor cores take as they are have no choice, and of many taps these take longer.
_MANY_TAPS = 256
_MOST_PADDED = 2  # times as many in channels_last, where zeros make whole 16 bytes of them
_RATE = 0.5  # of the device's copy rate, of single elements with some read from afar; and the launches:
_UNSHUFFLE, _WEIGHTS = 4e-6, 3e-6
_LEAST = 5e-6  # of the inner kernel beside its bytes


@dataclass(frozen=True)
class Choice(rearranged.Choice):
    """A choice for the layer without a stride."""

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

    def launches(self, given: Given) -> tuple[Launch, ...]:
        of_weight = self.problem.pass_ == "grad-weight"
        return self._for_weight(given) if of_weight else self._for_input(given)

    def _for_input(self, given: Given) -> tuple[Launch, ...]:
        code, count = unit(self.problem), math.prod(self.inner.problem.weight_shape)
        element = 4 if given.single else self.problem.dtype.itemsize
        expanded, unshuffled = Scratch("expanded weight", count * element), self._unshuffled
        strides = five_strides(self.problem.weight_shape, given.weight)
        arguments = (Pointer("weight"), Pointer(expanded), Int(count), *strides)
        arguments += (Pointer("source"), Pointer(unshuffled), *self._sizes)
        entry = "unshuffle_and_expand_float" if given.single else "unshuffle_and_expand"
        grid = -(-count // THREADS) + self._blocks
        names: dict[Operand, Operand] = {"source": unshuffled, "weight": expanded}
        inner = self.inner_launches(given._replace(weight="contiguous"), names)
        return Launch(code, entry, grid, THREADS, 0, arguments), *inner

    def _for_weight(self, given: Given) -> tuple[Launch, ...]:
        code, p, count = unit(self.problem), self.problem, math.prod(self.problem.weight_shape)
        element = 4 if given.single else p.dtype.itemsize
        found = Scratch("folded gradient", math.prod(self.inner.problem.weight_shape) * element)
        arguments = (Pointer("gradient"), Pointer(self._unshuffled), *self._sizes)
        names: dict[Operand, Operand] = {"gradient": self._unshuffled, "result": found}
        inner = self.inner_launches(given._replace(weight="contiguous", aligned=True), names)
        to = (Pointer(found), Pointer("result"), Int(count), *five_strides(p.weight_shape, given.weight))
        return (
            Launch(code, "unshuffle", self._blocks, THREADS, 0, arguments),
            *inner,
            Launch(code, "fold_float" if given.single else "fold", -(-count // THREADS), THREADS, 0, to),
        )

    @property
    def _unshuffled(self) -> Scratch:
        """The output's gradient with its phases as channels."""
        q = self.inner.problem
        return Scratch("unshuffled gradient", math.prod(q.output_shape) * q.dtype.itemsize)

    @property
    def _sizes(self) -> tuple[Int, ...]:
        p, q, full = self.problem, self.inner.problem, (1,) * (3 - self.problem.rank)
        return ints((math.prod(q.output_shape), *full, *p.out_size, *full, *q.out_size))

    @property
    def _blocks(self) -> int:
        return -(-math.prod(self.inner.problem.output_shape) // THREADS)


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


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why a layer's gradients are not computed without its stride, in a sentence; None when they may be."""
    refused = rearranged.refusal(p, gpu)
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
    if many and otherwise.family != "direct" and p.taps < _MANY_TAPS:
        return f"{p.out_channels} channels in {math.prod(p.stride)} phases are more than {_MOST_CHANNELS}"
    q = unstrided(p)
    nbytes = (math.prod(p.output_shape) + math.prod(q.output_shape)) * p.dtype.itemsize
    beside = nbytes / (_RATE * gpu.bandwidth) + _UNSHUFFLE + _WEIGHTS
    read = (math.prod(q.output_shape) + math.prod(q.input_shape)) * p.dtype.itemsize / gpu.bandwidth
    if not rearranged.gains(beside + read + _LEAST, otherwise):  # a search takes 50 to 150 ms for a new layer
        return f"slower: {(beside + read) * 1e3:.3g} ms for its bytes alone, its stride undone first"
    inner = rearranged.choose(q, gpu)
    if isinstance(inner, str):
        return inner
    found = Choice(inner, p, inner.seconds + beside)
    if not rearranged.gains(weighed(found), otherwise):
        return f"slower, or too little faster: {found.seconds * 1e3:.3g} ms by the model, its stride undone first"
    return found


candidate = choose
