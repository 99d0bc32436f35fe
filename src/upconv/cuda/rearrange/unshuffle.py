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

from upconv.cuda.compile import jit
from upconv.cuda.launches import NULL, THREADS, Given, Int, Launch, Operand, Pointer, Scratch, Unit, five_strides, ints
from upconv.cuda.rearrange.around import Around
from upconv.cuda.scalars import geometry
from upconv.problem import Problem, triple

_MOST_CHANNELS, _MANY_TAPS = 64, 256  # channels and phases beyond which only layers of so many taps gain
_MOST_PADDED = 2  # times as many channels in channels_last, where zeros make whole 16 bytes of them


def rearranged(p: Problem) -> Problem:
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
    q = rearranged(p)
    axes = zip("dhw", triple(p.padding, 0), triple(q.padding, 0), triple(p.stride))
    return geometry(p) | {
        "element": p.dtype.itemsize,
        "channels_last": p.layout == "channels_last",
        "cout": p.out_channels,
        "channels": q.out_channels,
        **{f"offset_{axis}": pad - crop * stride for axis, pad, crop, stride in axes},
    }


def unit(p: Problem) -> Unit:
    """The kernels around a layer's."""
    entries = ("unshuffle", "fold", *(("unshuffle_float", "fold_float") if p.dtype.itemsize == 2 else ()))
    label = f"unshuffle {str(p).split(' on ')[0]} {8 * p.dtype.itemsize} bits {p.layout}"
    named = [f"{entry}<{jit.CONFIG}>" for entry in entries]
    return Unit(label, jit.instance("unshuffle.cu", constants(p), named), entries)


def around(p: Problem, given: Given) -> Around:
    """The unshuffled gradient ahead of the inner kernel; with it expanded weights, or their gradient folded behind."""
    q, code, element = rearranged(p), unit(p), 4 if given.single else p.dtype.itemsize
    total = math.prod(q.output_shape)
    unshuffled = Scratch("unshuffled gradient", total * p.dtype.itemsize)
    wider = Scratch("weight by phases", math.prod(q.weight_shape) * element)
    sizes, strides = ints((total, *triple(p.out_size), *triple(q.out_size))), five_strides(p.weight_shape, given.weight)
    inner, kind = given._replace(weight="contiguous", aligned=True), "_float" if given.single else ""

    def unshuffle(source: Operand, weight: tuple[Pointer, Pointer], count: int, kind: str = "") -> Launch:
        arguments = (*weight, Int(count), *strides, Pointer(source), Pointer(unshuffled), *sizes)
        return Launch(code, f"unshuffle{kind}", -(-count // THREADS) + -(-total // THREADS), THREADS, 0, arguments)

    if p.pass_ == "grad-input":
        weights = Pointer("weight"), Pointer(wider)
        ahead = unshuffle("source", weights, math.prod(q.weight_shape), kind)
        return Around((ahead,), (), {"source": unshuffled, "weight": wider}, inner)
    count = math.prod(p.weight_shape)
    folded = Pointer(wider), Pointer("result"), Int(count), *strides
    behind = Launch(code, f"fold{kind}", -(-count // THREADS), THREADS, 0, folded)
    names: dict[Operand, Scratch] = {"gradient": unshuffled, "result": wider}
    return Around((unshuffle("gradient", (NULL, NULL), 0),), (behind,), names, inner)


def words(p: Problem) -> str:
    q = rearranged(p)
    return f"without the stride, {'x'.join(map(str, q.kernel))} taps of {q.out_channels} phases and channels"


def copies(p: Problem) -> tuple[int, int]:
    """Bytes that are moved, but for weights, and launches."""
    moved = math.prod(p.output_shape) + math.prod(rearranged(p).output_shape)
    return moved * p.dtype.itemsize, 1 if p.pass_ == "grad-input" else 2


def refusal(p: Problem) -> str | None:
    """Why a layer's gradients are not computed without its stride, in a sentence; None when they may be."""
    if math.prod(p.stride) == 1:
        return "there is no stride to be rid of"
    if p.pass_ == "fwd":
        return "a forward has its phases as rows of M, without a copy"
    if p.groups > 1 or max(p.dilation) > 1:
        return "only taps side by side, of layers without groups, are sorted by phase"
    if p.out_channels * math.prod(p.stride) > _MOST_CHANNELS and p.taps < _MANY_TAPS:
        return f"{p.out_channels} channels in {math.prod(p.stride)} phases are more than {_MOST_CHANNELS}"
    q = rearranged(p)
    if math.prod(q.output_shape) + math.prod(q.weight_shape) >= 2**31 - 3 * THREADS:  # the kernels' indices
        return "outputs and weights have nearly 2^31 elements and more"
    if q.out_channels > _MOST_PADDED * p.out_channels * math.prod(p.stride):
        return f"{q.out_channels} channels with zeros, for whole 16 bytes, would be too much memory"
    return None
