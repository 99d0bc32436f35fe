"""The plans of the CPU engine on tensors: transposed convolution as one of PyTorch's dense forward convolutions.

No kernel is written here. A plan is a few parallel regions: each waits for all threads, which takes long where another
program uses the cores.

=========  ==========================================================================================================
native     PyTorch's own operator
unbiased   PyTorch's own operator without its bias, which is then added in place: where oneDNN builds a transposed
           convolution from another primitive ("conv:any"), it adds the bias in a scalar loop
wide       half precision in float32, rounded once: depthwise layers, a few channels of an image at a time, since
           oneDNN's depthwise kernel is far faster in float32; and what PyTorch computes wrong in bfloat16 (`unwritten`)
flip       stride 1: one correlation with the channels swapped and the taps flipped
shuffle    one correlation that computes every phase as further output channels, then one scatter to the output
=========  ==========================================================================================================

The gradients for input and weight are forward-shaped, and PyTorch's own operator computes them well; ``split`` takes
only the bias' gradient out of it, which oneDNN sums in a scalar loop. ``wide`` takes all three in float64, which oneDNN
does not serve, where its gradients cannot be trusted (see `untrusted_gradients`).

The only buffers beside the result are the packed weights, one correlation's output, and a copy of the input where
`shuffle` has NCHW turned. In channels_last that output is of as many images, or rows of one, as a bound allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from upconv.cpu.geometry import Axis, Piece, Window, tap_slice, windows
from upconv.cpu.onednn import HALF, own_kernel, untrusted, unwritten
from upconv.problem import Problem

FORWARD_PLANS = ("native", "unbiased", "wide", "flip", "shuffle")
BACKWARD_PLANS = ("native", "split", "wide")


def forward(p: Problem, plan: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The output of ``p`` by a plan that `refusal` admits; ``p.layout`` is the layout of the result."""
    if plan == "flip":
        return _flip(p, input, weight, bias)
    if plan == "shuffle":
        return _shuffle(p, input, weight, bias)
    if plan == "wide":
        return _wide(p, input, weight, bias)
    fused = bias if plan == "native" else None
    y = torch.convolution(input, weight, fused, p.stride, p.padding, p.dilation, True, p.output_padding, p.groups)
    return y if bias is fused or bias is None else y.add_(bias.view(-1, *(1,) * p.rank))


def refusal(p: Problem, plan: str) -> str | None:
    """Why ``plan`` cannot compute the forward of ``p``, in a sentence; None when it can.

    Raises:
        ValueError: there is no such plan.
    """
    if plan not in FORWARD_PLANS:
        raise ValueError(f"plan must be one of {', '.join(FORWARD_PLANS)}, got {plan!r}")
    if plan == "unbiased" and not p.bias:
        return "unbiased needs a bias, and this layer has none"
    if plan == "unbiased" and p.dtype in HALF:
        return f"unbiased would round the result twice in {p.dtype}, before and after the bias"
    if plan == "native" and unwritten(p):
        return "native would return memory that nothing wrote, for outputs along the depth that no tap reaches"
    if plan == "wide" and not (p.dtype in HALF and (p.depthwise or unwritten(p))):
        return f"wide is for depthwise layers in half precision, and this one has {p.groups} groups in {p.dtype}"
    if plan == "flip" and any(s != 1 for s in p.stride):
        return f"flip needs stride 1, and this layer has stride {p.stride}"
    if plan == "shuffle" and all(s == 1 for s in p.stride):
        return "shuffle needs a stride above 1; at stride 1 there is a single phase, which is flip"
    if plan in ("flip", "shuffle") and untrusted(p):
        return f"{plan} would read unwritten memory in oneDNN's half-precision kernels on images as narrow as {p.size}"
    if plan != "native" and (p.batch == 0 or min(p.size) == 0):
        return f"{plan} needs a non-empty input, and this one is {p.input_shape}"
    return None


def memory_format(layout: str, rank: int) -> torch.memory_format:
    """PyTorch's name for a layout; 1-D tensors have no channels_last."""
    if layout == "channels_last" and rank > 1:
        return torch.channels_last if rank == 2 else torch.channels_last_3d
    return torch.contiguous_format


def dense_strides(shape: Sequence[int], layout: torch.memory_format) -> tuple[int, ...]:
    """The strides of a tensor of a shape that is dense in a memory format."""
    return torch.empty(shape, device="meta", memory_format=layout).stride()


# --- the correlation all plans share ---------------------------------------------------------------------------------


def _spatial(t: Tensor, slices: Iterable[slice]) -> Tensor:
    """A view of the last dimensions."""
    key: Any = (..., *slices)
    return t[key]


def _convolve(x: Tensor, w: Tensor, bias: Tensor | None, groups: int, axes: Sequence[Axis]) -> Tensor:
    """The outputs of the correlation, and around them what unequal padding makes too many."""
    if any(axis.cropped for axis in axes):
        x = _spatial(x, (axis.crop for axis in axes))
    rank = len(axes)
    pads, steps = tuple(axis.pad for axis in axes), tuple(axis.step for axis in axes)
    return torch.convolution(x, w, bias, (1,) * rank, pads, steps, False, (0,) * rank, groups)


def _correlate(x: Tensor, w: Tensor, bias: Tensor | None, groups: int, axes: Sequence[Axis]) -> Tensor:
    """The live outputs of the correlation; a view of a slightly larger buffer where more had to be computed."""
    y = _convolve(x, w, bias, groups, axes)
    if all(axis.keep == slice(0, n) for axis, n in zip(axes, y.shape[2:])):
        return y  # not as a view of itself: autograd forbids changing views made inside a Function in place
    return _spatial(y, (axis.keep for axis in axes))


def _flipped(p: Problem, weight: Tensor) -> Tensor:
    """Weights for a correlation: ``(groups, out_channels/groups, in_channels/groups, *kernel)``, taps reversed."""
    spatial = tuple(range(2, 2 + p.rank))
    return weight.flip(spatial).unflatten(0, (p.groups, -1)).transpose(1, 2)


def _pack(weight: Tensor, layout: str) -> Tensor:
    """Groups and channels joined, in a layout (the format of either operand decides the correlation's)."""
    return weight.flatten(0, 1).contiguous(memory_format=memory_format(layout, weight.dim() - 3))


def _empty_output(p: Problem, like: Tensor) -> Tensor:
    return torch.empty(
        p.output_shape, dtype=like.dtype, device=like.device, memory_format=memory_format(p.layout, p.rank)
    )


def _fill(view: Tensor, bias: Tensor | None, rank: int) -> None:
    view.copy_(bias.view(-1, *(1,) * rank)) if bias is not None else view.zero_()


# --- the plans -------------------------------------------------------------------------------------------------------


def _flip(p: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    phase = [phases[0] for phases in p.axis_phases]
    axes = [Axis(n, len(a.taps), a.first - a.offsets[-1], a.count, a.step) for n, a in zip(p.size, phase)]
    packed = _pack(_flipped(p, weight), p.layout)
    if all(axis.whole for axis in axes):
        y, layout = _correlate(x, packed, bias, p.groups, axes), memory_format(p.layout, p.rank)
        return y.clone(memory_format=layout) if y._is_view() else y.contiguous(memory_format=layout)
    out = _empty_output(p, x)
    _fill(out, bias, p.rank)
    if not any(axis.dead for axis in axes):
        _spatial(out, (axis.live for axis in axes)).copy_(_correlate(x, packed, bias, p.groups, axes))
    return out


# A chunk's input and output exist twice in float32, once as oneDNN blocks them: at most a quarter of the output at a
# time keeps that below the temporaries of PyTorch's half-precision operator in NCHW, and 2^20 outputs stay in cache. In
# channels_last PyTorch's has none, and a chunk is an image: more chunks are more waits for all threads.
_WIDE_OUTPUTS = 1 << 20
_WIDE_SHARE = 4
_WIDE_CHANNELS = 16  # what oneDNN's depthwise kernel takes at once


def wide_channels(p: Problem) -> int:
    """Input channels per chunk of `wide`: a multiple of 16 where 16 fit, else all of an image, as in channels_last."""
    if p.layout == "channels_last":
        return p.in_channels
    per_channel = math.prod(p.output_shape[2:]) * (p.out_channels // p.groups)
    most = min(_WIDE_OUTPUTS, math.prod(p.output_shape) // _WIDE_SHARE) // per_channel
    return most // _WIDE_CHANNELS * _WIDE_CHANNELS or p.in_channels


def wide_bytes(p: Problem) -> int:
    """What `wide` holds beside input and result: a chunk's, in float32."""
    return 4 * (math.prod(p.input_shape) + math.prod(p.output_shape)) // p.batch * wide_channels(p) // p.in_channels


def _wide(p: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = _empty_output(p, x)
    w, b = weight.float(), None if bias is None else bias.float().view(-1, *(1,) * p.rank)
    step, ratio = (wide_channels(p), p.out_channels // p.groups) if p.depthwise else (p.in_channels, 0)
    for image, result in zip(x.split(1), out.split(1)):
        for i in range(0, p.in_channels, step):
            chunk, channels = image[:, i : i + step].float(), slice(i * ratio, (i + step) * ratio or None)
            groups = chunk.shape[1] if p.depthwise else p.groups
            y = torch.convolution(
                chunk, w[i : i + step], None, p.stride, p.padding, p.dilation, True, p.output_padding, groups
            )
            result[:, channels].copy_(y if b is None else y.add_(b[channels]))
    return out


# oneDNN's NCHW convolutions read and write copies whose channels are padded to a multiple of so many. Below that many
# input channels it is faster to turn the input: with channels_last weights PyTorch does (docs/experiments.md).
_PADDED_CHANNELS = 16
# What a correlation holds beside PyTorch's operator is this part of that operator's peak at most.
_EXCESS = 1 / 20
# A share of less ends before threads that wait for a core are run again, and beside other programs each share waits.
_SHARE_BYTES = 1 << 20


View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, stride and offset in a dense buffer, for ``torch.as_strided``."""


def _view_of(t: Tensor) -> View:
    return tuple(t.shape), t.stride(), int(t.storage_offset())


def _outputs(out: Tensor, pieces: Sequence[Piece], windows: Sequence[Window], shape: torch.Size) -> View:
    """The outputs of a piece per dimension as (images, groups, channels, *(q, residue of each axis))."""
    strides, start = [out.stride(0), shape[2] * out.stride(1), out.stride(1)], 0
    for piece, window, step in zip(pieces, windows, out.stride()[2:]):
        strides += [window.stride * step, window.residues.step * step]
        start += piece.start * step
    return tuple(shape), tuple(strides), start


class _Geometry:
    """What `shuffle` moves where for a Problem, found once on meta tensors: building the views takes as long as a small
    layer. ``rows`` are the results along the first axis that are computed, of all that its window counts.
    """

    def __init__(self, p: Problem, rows: range | None) -> None:
        self.windows = windows(p)
        if rows is not None:
            self.windows[0] = self.windows[0].part(rows)
        self.axes = [w.axis for w in self.windows]
        self.whole = all(window.covers_all for window in self.windows)
        self.dead = any(axis.dead for axis in self.axes)
        # Either operand in channels_last makes the correlation's result so.
        self.layout = "channels_last" if turned(p) else p.layout
        self.residues = tuple(len(w.residues) for w in self.windows)
        self.packed_shape = (
            p.groups, *self.residues, p.out_channels // p.groups, p.in_channels // p.groups,
            *(w.size for w in self.windows),
        )  # fmt: skip
        self.taps = list(self._taps(p)) if rows is None else []
        self.scatter = [] if self.dead else list(self._scatter(p))

    def _taps(self, p: Problem) -> Iterator[tuple[View, View]]:
        """For each phase its taps in the packed weight, and in the flipped one."""
        flipped = torch.empty(p.weight_shape, device="meta").unflatten(0, (p.groups, -1)).transpose(1, 2)
        packed = torch.empty(self.packed_shape, device="meta")
        for phase in p.phases:
            if phase.output_count:
                at = (w.residues.index(a.residue) for w, a in zip(self.windows, phase.axes))
                residues: Any = (slice(None), *at)
                into = _spatial(packed[residues], (w.place(a) for w, a in zip(self.windows, phase.axes)))
                taps = _spatial(flipped, (tap_slice(a, k) for a, k in zip(phase.axes, p.kernel)))
                yield _view_of(into), _view_of(taps)

    def _scatter(self, p: Problem) -> Iterator[tuple[View, View]]:
        """For each piece its outputs, and the correlation's results that go there."""
        out = torch.empty(p.output_shape, device="meta", memory_format=memory_format(p.layout, p.rank))
        channels = math.prod(self.packed_shape[: p.rank + 2])
        shape = (p.batch, channels, *(axis.made for axis in self.axes))
        y = torch.empty(shape, device="meta", memory_format=memory_format(self.layout, p.rank))
        y = _spatial(y, (axis.keep for axis in self.axes)).unflatten(1, self.packed_shape[: p.rank + 2])
        # From (images, groups, *residues, channels, *q) to (images, groups, channels, *(q, residue of each axis)).
        order = [0, 1, 2 + p.rank, *(i for axis in range(p.rank) for i in (3 + p.rank + axis, 2 + axis))]
        for pieces in product(*(w.pieces() for w in self.windows)):
            select: Any = (slice(None), slice(None), *(piece.residues for piece in pieces), slice(None))
            source = y[(*select, *(piece.results for piece in pieces))].permute(order)
            yield _outputs(out, pieces, self.windows, source.shape), _view_of(source)


_geometry = lru_cache(maxsize=1024)(_Geometry)


def _shuffle(p: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    geometry = _geometry(p, None)
    if geometry.dead:
        return _blank(p, x, bias, filled=True)
    images, bands = _shares(p, geometry)
    each = p.with_(batch=images)
    filled = not (geometry.whole and all(_geometry(each, rows).whole for rows in bands))  # no tap may reach a band
    several = images < p.batch or len(bands) > 1
    packed, repeated = _packed(p, geometry, weight, bias)
    # The results of several shares take turns in memory only if no block that stays was put behind the first. A single
    # correlation's own temporaries are gone when it is done.
    out = _blank(p, x, bias, filled) if several else None
    for begin, given in zip(range(0, p.batch, images), x.split(images)):
        for rows in bands:
            share = _geometry(p.with_(batch=given.shape[0]), rows)
            if share.dead:
                continue
            y = _convolve(given, packed, repeated, p.groups, share.axes)
            # It is dense in this format already, but for 1x1 weights of one channel, which are read as either format's.
            y = y.contiguous(memory_format=memory_format(share.layout, p.rank))
            out = _blank(p, x, bias, filled) if out is None else out
            for (shape, strides, start), results in share.scatter:
                start += begin * out.stride(0)
                torch.as_strided(out, shape, strides, start).copy_(torch.as_strided(y, *results))
            del y
    assert out is not None
    return out


def _blank(p: Problem, like: Tensor, bias: Tensor | None, filled: bool) -> Tensor:
    out = _empty_output(p, like)
    if filled:
        _fill(out, bias, p.rank)
    return out


def _packed(p: Problem, geometry: _Geometry, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The weights and the bias of the correlation: one channel for each residue and output channel."""
    flipped = weight.flip(tuple(range(2, 2 + p.rank))).contiguous()
    packed = flipped.new_zeros(geometry.packed_shape)
    for into, taps in geometry.taps:
        torch.as_strided(packed, *into).copy_(torch.as_strided(flipped, *taps))
    packed = _pack(packed.flatten(1, 1 + p.rank), geometry.layout)
    if bias is None:
        return packed, None
    every, co = math.prod(geometry.residues), p.out_channels // p.groups
    return packed, bias.view(-1, 1, co).expand(p.groups, every, co).reshape(-1)


def turned(p: Problem) -> bool:
    """Whether `shuffle` turns an NCHW input, because oneDNN's padded copies would be slow or larger than PyTorch's.

    PyTorch's operator, where oneDNN has a kernel for it, holds the turned input and output without padding.
    """
    if p.layout == "channels_last" or p.in_channels < _PADDED_CHANNELS:
        return p.layout == "nchw"
    inputs, outputs, pixels = (math.prod(shape) for shape in (p.input_shape, p.output_shape, (p.batch, *p.size)))
    padding = -p.in_channels % _PADDED_CHANNELS + -(p.out_channels * math.prod(p.stride)) % _PADDED_CHANNELS
    return p.groups == 1 and own_kernel(p) and padding * pixels > _EXCESS * (2 * inputs + outputs)


def shares(p: Problem) -> int:
    """How many correlations `shuffle` takes."""
    images, bands = _shares(p, _geometry(p, None))
    return -(-p.batch // images) * len(bands)


def _shares(p: Problem, geometry: _Geometry) -> tuple[int, Sequence[range | None]]:
    """Images per correlation of `shuffle`, and the rows of results that each computes, None for all.

    In NCHW it is all of them: PyTorch's operator holds as much there. In channels_last it holds a copy of the input,
    an image's im2col, or little, where oneDNN has a kernel for the layer; then an image is divided too.
    """
    if p.layout == "nchw" or geometry.dead:
        return p.batch, [None]
    copied = not own_kernel(p) and p.groups == 1 and max(p.dilation) == 1
    held = math.prod(p.input_shape) * p.dtype.itemsize if copied else 0
    most = max(_SHARE_BYTES, held + int(_EXCESS * p.bytes))
    channels = math.prod(geometry.packed_shape[: p.rank + 2])
    row = channels * math.prod(axis.made for axis in geometry.axes[1:]) * p.dtype.itemsize
    images = most // (row * geometry.axes[0].made)
    few_slices = p.rank == 3 and p.dtype in HALF  # a band would be an `untrusted` image
    if images or few_slices or not own_kernel(p):
        return max(1, min(p.batch, images)), [None]
    live = range(geometry.axes[0].live.start, geometry.axes[0].live.stop)
    step = -(-len(live) // -(-len(live) // max(1, most // row)))
    return 1, [live[begin : begin + step] for begin in range(0, len(live), step)]


# --- gradients -------------------------------------------------------------------------------------------------------


def gradients(
    p: Problem, plan: str, grad: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients for input, weight and bias, as far as ``mask`` asks; every operation in it is differentiable again."""
    if plan == "wide":
        exact = gradients(p, "native", grad.double(), input.double(), weight.double(), mask)
        layout = memory_format(p.layout, p.rank)  # both gradients have the output's, as PyTorch's
        x, w = (None if g is None else g.to(p.dtype, memory_format=layout, copy=True) for g in exact[:2])
        return x, w, None if exact[2] is None else exact[2].to(p.dtype)
    split = plan == "split"
    asked = (mask[0], mask[1], mask[2] and not split)
    for_input = for_weight = for_bias = None
    if any(asked):
        for_input, for_weight, for_bias = torch_gradients(
            grad, input, weight, p.out_channels, p.stride, p.padding, p.output_padding, p.groups, p.dilation, asked
        )
    if split and mask[2]:
        for_bias = _sum_channels(grad)
    return for_input, for_weight, for_bias


def torch_gradients(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    channels: int,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    mask: Sequence[bool],
    transposed: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """PyTorch's gradients for input, weight and the bias of ``channels``, as far as ``mask`` asks."""
    found = torch.ops.aten.convolution_backward(
        grad, input, weight, [channels], stride, padding, dilation, transposed, output_padding, groups, mask
    )
    # With the bias' gradient oneDNN returns the weight's, asked for or not, and for 1-D layers then a 4-D one.
    x, w, b = (g if asked else None for g, asked in zip(found, mask))
    return x, w, b


# PyTorch sums half precisions by converting the whole tensor to float32 first. From 32 MiB on that copy is mapped anew
# at every call.
_SUM_AT_ONCE = 4 << 20


def _sum_channels(grad: Tensor) -> Tensor:
    """The sum over everything but the channels: half precisions are added in float32 and rounded once."""
    dims = (0, *range(2, grad.dim()))
    if grad.dtype not in HALF or grad.numel() <= _SUM_AT_ONCE:
        return grad.sum(dims)
    parts = [image.unsqueeze(0).sum(dims, dtype=torch.float32) for image in grad.unbind(0)]
    return torch.stack(parts).sum(0).to(grad.dtype)
