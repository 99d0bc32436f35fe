"""The CPU engine: transposed convolution lowered to PyTorch's dense forward convolutions.

oneDNN's forward convolutions run near the machine's peak; its transposed ones often do not. So no kernel is written
here: a `Problem` becomes one or several stride-1 correlations, whose weights are slices of the layer's own, flipped.

=========  ==========================================================================================================
native     PyTorch's own operator
unbiased   PyTorch's own operator without its bias, which is then added in place: where oneDNN builds a transposed
           convolution from another primitive ("conv:any"), it adds the bias in a scalar loop
wide       depthwise in half precision: PyTorch's own operator in float32 on a few channels of an image at a time, each
           rounded once; oneDNN's depthwise kernel is 20 times faster in float32 than its bfloat16 one. And, an image
           at a time, what PyTorch computes wrong in bfloat16 (`unwritten`)
flip       stride 1: one correlation with the channels swapped and the taps flipped
shuffle    one correlation that computes every phase as further output channels, then one scatter to the output
phases     one correlation per phase, each scattered to its strided view of the output
=========  ==========================================================================================================

The gradients for input and weight are forward-shaped, and PyTorch's own operator computes them well; ``split`` takes
only the bias' gradient out of it, which oneDNN sums in a scalar loop. ``wide`` takes all three in float64, which oneDNN
does not serve, where its gradients cannot be trusted (see `untrusted_gradients`).

The only buffers beside the result are the packed weights and one correlation's output: never a copy of an activation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from upconv.problem import AxisPhase, Problem

FORWARD_PLANS = ("native", "unbiased", "wide", "flip", "shuffle", "phases")
BACKWARD_PLANS = ("native", "split", "wide")
HALF = (torch.bfloat16, torch.float16)


def forward(p: Problem, plan: str, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The output of ``p`` by a plan that `refusal` admits; ``p.layout`` is the layout of the result."""
    if plan == "flip":
        return _flip(p, input, weight, bias)
    if plan == "shuffle":
        return _shuffle(p, input, weight, bias)
    if plan == "phases":
        return _phases(p, input, weight, bias)
    if plan == "wide":
        return _wide(p, input, weight, bias)
    fused = bias if plan == "native" else None
    y = torch.convolution(input, weight, fused, p.stride, p.padding, p.dilation, True, p.output_padding, p.groups)
    return y if bias is fused or bias is None else y.add_(bias.view(-1, *(1,) * p.rank))


def refusal(p: Problem, plan: str) -> str | None:
    """Why ``plan`` cannot compute the forward of ``p``, in a sentence; None when it can."""
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
    if plan in ("shuffle", "phases") and all(s == 1 for s in p.stride):
        return f"{plan} needs a stride above 1; at stride 1 there is a single phase, which is flip"
    if plan in ("flip", "shuffle", "phases") and untrusted(p):
        return f"{plan} would read unwritten memory in oneDNN's half-precision kernels on images as narrow as {p.size}"
    if plan != "native" and (p.batch == 0 or min(p.size) == 0):
        return f"{plan} needs a non-empty input, and this one is {p.input_shape}"
    return None


def unwritten(p: Problem) -> bool:
    """Whether PyTorch's own operator may return memory that nothing wrote, in planes behind the last tap.

    NOTES: PyTorch 2.13's bfloat16 forward of 3-D layers with an output padding along the depth and a dilation along
    another axis: 4->4 k(2,3,3) s2 d(1,1,3) op(1,0,0) on 1x4x4x4x6 in 47 of 60 calls among spoilt memory, without the
    dilation or the output padding in none, nor in float16, float32 or 2-D.
    """
    behind = p.rank == 3 and p.output_padding[0] > 0 and max(p.dilation) > 1
    return behind and p.dtype is torch.bfloat16 and p.batch > 0 and min(p.size) > 0


def untrusted(p: Problem) -> bool:
    """Whether oneDNN's half-precision kernels may read memory that nothing wrote.

    NOTES: PyTorch 2.13's bfloat16 weight gradient, and now and then its input gradient, holds garbage or NaN, or
    corrupts the heap, for images with a last dimension of 1, and in 3-D with any dimension under 4 (20 of 4,000 random
    layers); its channels_last forward convolutions do so in 3-D with a depth of 1. None with all sizes from 4 on:
    nothing is lost by staying clear of sizes under 4.
    """
    return p.dtype in HALF and min(p.size if p.rank == 3 else p.size[-1:]) < 4


def untrusted_gradients(p: Problem) -> bool:
    """As `untrusted`, for the gradients.

    NOTES: bfloat16 ones crash in channels_last where the padding exceeds the kernel's reach. In float32 it is the input
    gradient of channels_last images one pixel wide, with one output channel (4 of 6,600 random layers, all such).
    PyTorch's float32 gradients of images with sizes under 4 corrupt the heap besides, twice in about 15,000 random
    layers; which ones is not known, so those stay PyTorch's. The bfloat16 weight gradient of 3-D channels_last layers
    is wrong, by half and more, where the padding along the depth reaches half of it: 146 of 1,444 such layers of
    stride 1 to 3, with one thread and with two, and none of 3,912 others.
    """
    single = p.rank == 2 and p.size[-1] == 1 and p.out_channels == p.groups and p.layout == "channels_last"
    beyond = any(pad > d * (k - 1) for pad, d, k in zip(p.padding, p.dilation, p.kernel))
    deep = p.rank == 3 and p.layout == "channels_last" and 2 * p.padding[0] >= p.size[0]
    wrong = (p.dtype in HALF and beyond) or (p.dtype is torch.bfloat16 and deep)
    return untrusted(p) or wrong or (p.dtype is torch.float32 and single)


def own_kernel(p: Problem) -> bool:
    """Whether oneDNN has a transposed kernel of its own for a layer (``brg_deconv``), as far as it was seen to choose.

    Other layers it builds from the backward of a forward convolution (``conv:any``).
    """
    if p.dtype is torch.float64:
        return False
    if all(s == 1 for s in p.stride):
        return p.layout == "channels_last" and p.groups < 8
    whole = all(n % s == 0 for n, s in zip(p.out_size, p.stride))
    narrow = min(p.in_channels, p.out_channels) // p.groups
    # In groups, bfloat16 has a kernel for one and for two channels (slow, but of its own), float32 none below 16.
    small_groups = p.groups > 1 and narrow < 16 and (narrow > 2 or p.dtype not in HALF)
    return whole and max(p.dilation) == 1 and not small_groups


def memory_format(layout: str, rank: int) -> torch.memory_format:
    """PyTorch's name for a layout; 1-D tensors have no channels_last."""
    if layout == "channels_last" and rank > 1:
        return torch.channels_last if rank == 2 else torch.channels_last_3d
    return torch.contiguous_format


def dense_strides(shape: Sequence[int], layout: torch.memory_format) -> tuple[int, ...]:
    """The strides of a tensor of a shape that is dense in a memory format."""
    return torch.empty(shape, device="meta", memory_format=layout).stride()


# --- the correlation all plans share ---------------------------------------------------------------------------------


class _Axis:
    """One dimension of a correlation ``y[t] = sum_j w[j] x[start + t + j*step]``, ``t`` in ``range(count)``.

    NOTES: oneDNN's fast kernels refuse a padding of the window's reach or more and fall back to im2col (8.6 -> 37 ms
    measured), so outputs whose window misses the input altogether (``output_padding`` makes such) are not computed:
    ``live`` is the range of ``t`` that is, and the caller fills the others with the bias. Taps that lie further apart
    than the input is long may miss it for every output, though windows do not: oneDNN's bfloat16 kernels for AMX crash
    where there is none (a size of 1, taps 3 apart).
    """

    def __init__(self, size: int, taps: int, start: int, count: int, step: int) -> None:
        self.step = step
        reach = (taps - 1) * step
        hit = [(max(0, -start - at), min(count, size - start - at)) for at in range(0, reach + 1, step)]
        hit = [(low, high) for low, high in hit if low < high]  # by a tap each
        low = min((low for low, _ in hit), default=max(0, -start - reach))
        self.live = slice(low, max((high for _, high in hit), default=low))
        first, n = start + low, self.live.stop - low
        # Unequal padding is computed with the larger on both sides and the result narrowed, unless that wastes more
        # than an eighth of the outputs: then the input is narrowed, at the price of PyTorch's copy of that view.
        self.crop = slice(0, size)
        left, right = -first, first + n + reach - size
        if min(left, right) < 0 and size + 2 * max(left, right, 0) - reach - n > (n >> 3):
            self.crop = slice(max(first, 0), min(first + n + reach, size))
            left, right = self.crop.start - first, first + n + reach - self.crop.stop
        self.pad = max(left, right, 0)
        self.keep = slice(self.pad - left, self.pad - left + n)
        self.made = (
            self.crop.stop - self.crop.start + 2 * self.pad - reach
        )  # outputs computed, those to keep among them
        self.cropped = self.crop != slice(0, size)
        self.whole = self.live == slice(0, count)
        self.dead = self.live.start == self.live.stop


def _spatial(t: Tensor, slices: Iterable[slice]) -> Tensor:
    """A view of the last dimensions."""
    key: Any = (..., *slices)
    return t[key]


def _convolve(x: Tensor, w: Tensor, bias: Tensor | None, groups: int, axes: Sequence[_Axis]) -> Tensor:
    """The outputs of the correlation, and around them what unequal padding makes too many."""
    if any(axis.cropped for axis in axes):
        x = _spatial(x, (axis.crop for axis in axes))
    rank = len(axes)
    pads, steps = tuple(axis.pad for axis in axes), tuple(axis.step for axis in axes)
    return torch.convolution(x, w, bias, (1,) * rank, pads, steps, False, (0,) * rank, groups)


def _correlate(x: Tensor, w: Tensor, bias: Tensor | None, groups: int, axes: Sequence[_Axis]) -> Tensor:
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


# NOTES: correlations run over as many images at a time as keep memory below that of PyTorch's operator: in NCHW it
# reorders the output, and otherwise holds it once more, unless oneDNN's own kernel writes it directly. From 4 MiB a
# result is better made in parts anyway: it leaves the cache (UNET float32 NCHW 1.4x -> 1.9x).
_CACHED_RESULT = 4 << 20
_DIRECT_RESULT = 1 << 20  # where PyTorch's kernel holds next to nothing; one image at a time would cost 1.9x -> 1.3x


def _image_chunks(p: Problem, results: int) -> list[slice]:
    """Slices of the batch, of at least one image each; ``results``: elements that a correlation returns for one."""
    result = max(1, results) * p.dtype.itemsize
    direct = p.layout == "channels_last" and own_kernel(p)
    most = (_DIRECT_RESULT if direct else _CACHED_RESULT) // result
    parts = -(-p.batch // max(1, most))
    step = -(-p.batch // parts)
    return [slice(i, min(i + step, p.batch)) for i in range(0, p.batch, step)]


def _empty_output(p: Problem, like: Tensor) -> Tensor:
    return torch.empty(
        p.output_shape, dtype=like.dtype, device=like.device, memory_format=memory_format(p.layout, p.rank)
    )


def _fill(view: Tensor, bias: Tensor | None, rank: int) -> None:
    view.copy_(bias.view(-1, *(1,) * rank)) if bias is not None else view.zero_()


# --- the plans -------------------------------------------------------------------------------------------------------


def _flip(p: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    phase = [phases[0] for phases in p.axis_phases]
    axes = [_Axis(n, len(a.taps), a.first - a.offsets[-1], a.count, a.step) for n, a in zip(p.size, phase)]
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
# time keeps that below the temporaries of PyTorch's half-precision operator, and 2^20 outputs stay in cache.
_WIDE_OUTPUTS = 1 << 20
_WIDE_SHARE = 4
_WIDE_CHANNELS = 16  # what oneDNN's depthwise kernel takes at once


def wide_channels(p: Problem) -> int:
    """Input channels per chunk of `wide`: a multiple of 16 where 16 fit, else all channels of an image."""
    per_channel = math.prod(p.output_shape[2:]) * (p.out_channels // p.groups)
    most = min(_WIDE_OUTPUTS, math.prod(p.output_shape) // _WIDE_SHARE) // per_channel
    return most // _WIDE_CHANNELS * _WIDE_CHANNELS or p.in_channels


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


def _tap_slice(axis: AxisPhase, kernel: int) -> slice:
    """The phase's taps in a reversed kernel dimension, in rising input order."""
    step = axis.taps[1] - axis.taps[0] if len(axis.taps) > 1 else 1
    first = kernel - 1 - axis.taps[-1]
    return slice(first, first + (len(axis.taps) - 1) * step + 1, step)


def _phases(p: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = _empty_output(p, x)
    for dim, phases in enumerate(p.axis_phases, 2):  # whole rows without taps at once (C: 5.7 -> 3.9 ms)
        for axis in phases:
            if axis.count and not axis.taps:
                _fill(out[(slice(None),) * dim + (slice(axis.start, None, p.stride[dim - 2]),)], bias, p.rank)
    flipped = _flipped(p, weight)
    work = []
    for phase in p.phases:
        if not phase.output_count or not phase.tap_count:
            continue
        view = _spatial(out, (slice(a.start, None, s) for a, s in zip(phase.axes, p.stride)))
        axes = [_Axis(n, len(a.taps), a.first - a.offsets[-1], a.count, a.step) for n, a in zip(p.size, phase.axes)]
        if not all(axis.whole for axis in axes):
            _fill(view, bias, p.rank)
            view = _spatial(view, (axis.live for axis in axes))
        if not any(axis.dead for axis in axes):
            taps = _spatial(flipped, (_tap_slice(a, k) for a, k in zip(phase.axes, p.kernel)))
            work.append((view, _pack(taps, p.layout), axes))
    largest = max((view[0].numel() for view, _, _ in work), default=0)
    for images in _image_chunks(p, largest):
        for view, w, axes in work:
            view[images].copy_(_correlate(x[images], w, bias, p.groups, axes))
    return out


class _Window:
    """One dimension of `shuffle`: the common window of input offsets that serves every phase, and where its results go.

    The window's result at ``q`` holds, for every residue ``r``, the output ``o = q * stride + r - padding``.
    """

    def __init__(self, phases: tuple[AxisPhase, ...], size: int, stride: int, padding: int, out: int) -> None:
        used = [a for a in phases if a.count]
        offsets = sorted({o for a in used for o in a.offsets}) or [0]
        gaps = [b - a for a, b in zip(offsets, offsets[1:])]
        self.step = math.gcd(*gaps) if gaps else 1
        self.high = offsets[-1]
        self.size = (self.high - offsets[0]) // self.step + 1
        self.stride, self.padding, self.out = stride, padding, out
        self.first = min(a.first for a in used)
        count = max(a.first + a.count for a in used) - self.first
        self.axis = _Axis(size, self.size, self.first - self.high, count, self.step)

    def place(self, axis: AxisPhase) -> slice:
        """Where the phase's taps, last first, go in the window."""
        at = [(self.high - o) // self.step for o in reversed(axis.offsets)]
        return slice(at[0], at[-1] + 1, at[1] - at[0] if len(at) > 1 else 1)

    def pieces(self) -> list[tuple[slice, slice, slice]]:
        """The outputs in up to three pieces ``(outputs, results, residues)``: whole strides, and the ends cut short.

        ``results`` index the correlation's live outputs.
        """
        live = range(self.first + self.axis.live.start, self.first + self.axis.live.stop)  # the q's computed
        begin = max(self.padding, live.start * self.stride)  # outputs shifted by the padding: o + padding
        end = min(self.padding + self.out, live.stop * self.stride)
        head, tail = -(-begin // self.stride) * self.stride, end // self.stride * self.stride
        bounds = [begin, head, tail, end] if head <= tail else [begin, end]
        pieces = []
        for a, b in zip(bounds, bounds[1:]):
            if a < b:
                whole = a % self.stride == 0 and b % self.stride == 0
                residues = slice(0, self.stride) if whole else slice(a % self.stride, (b - 1) % self.stride + 1)
                results = slice(a // self.stride - live.start, -(-b // self.stride) - live.start)
                pieces.append((slice(a - self.padding, b - self.padding), results, residues))
        return pieces


def _windows(p: Problem) -> list[_Window]:
    return [_Window(*axis) for axis in zip(p.axis_phases, p.size, p.stride, p.padding, p.out_size)]


def shuffle_blowup(p: Problem) -> float:
    """Multiplications of `shuffle` over the useful ones: what the zeros in its common window cost."""
    return math.prod(w.size * w.stride for w in _windows(p)) / p.taps


# NOTES: below 16 input channels oneDNN reads NCHW through a padded copy; with channels_last weights PyTorch has the
# input reordered once instead (2 channels, 1178x1178: 26.9 -> 7.5 ms; 56 channels: 2.2 -> 2.5).
_NARROW_INPUT = 16


View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, stride and offset in a dense buffer, for ``torch.as_strided``."""


def _view_of(t: Tensor) -> View:
    return tuple(t.shape), t.stride(), int(t.storage_offset())


class _Geometry:
    """What `shuffle` moves where for a Problem: found once on meta tensors, since building the views anew at every call
    took 0.2 of the 1.5 ms of GAN4.
    """

    def __init__(self, p: Problem) -> None:
        self.p, self.windows = p, _windows(p)
        self.axes = [w.axis for w in self.windows]
        self.whole = all(axis.whole for axis in self.axes)
        self.dead = any(axis.dead for axis in self.axes)
        # Either operand in channels_last makes the correlation's result so.
        self.layout = "channels_last" if p.in_channels < _NARROW_INPUT else p.layout
        self.channels = (p.in_channels // p.groups, p.out_channels // p.groups)
        ci, co = self.channels
        flipped = torch.empty(p.weight_shape, device="meta").unflatten(0, (p.groups, -1)).transpose(1, 2)
        self.packed_shape = (p.groups, *p.stride, co, ci, *(w.size for w in self.windows))
        packed = torch.empty(self.packed_shape, device="meta")
        self.taps: list[tuple[View, View]] = []
        for phase in p.phases:
            if phase.tap_count and phase.output_count:
                residues: Any = (slice(None), *(a.residue for a in phase.axes))
                into = _spatial(packed[residues], (w.place(a) for w, a in zip(self.windows, phase.axes)))
                taps = _spatial(flipped, (_tap_slice(a, k) for a, k in zip(phase.axes, p.kernel)))
                self.taps.append((_view_of(into), _view_of(taps)))
        self.results = math.prod((p.groups, *p.stride, co, *(axis.live.stop - axis.live.start for axis in self.axes)))
        parts = -(-self.results * p.dtype.itemsize // _CACHED_RESULT) if p.layout == "nchw" else 1
        parts = max(1, min(p.groups, parts))
        step = -(-p.groups // parts)
        self.group_chunks = [slice(i, min(i + step, p.groups)) for i in range(0, p.groups, step)]
        self.image_chunks = _image_chunks(p, self.results)
        self._scatters: dict[tuple[int, int], list[tuple[View, View]]] = {}

    def result_shape(self, images: int, groups: int) -> tuple[int, ...]:
        channels = groups * math.prod(self.p.stride) * self.channels[1]
        return (images, channels, *(axis.made for axis in self.axes))

    def scatter(self, images: int, groups: int) -> list[tuple[View, View]]:
        """From the correlation's result for some images and groups to the output: pairs of views (output, result)."""
        key = (images, groups)
        if key not in self._scatters:
            p, co = self.p, self.channels[1]
            out = torch.empty(p.output_shape, device="meta", memory_format=memory_format(p.layout, p.rank))
            out = out[:images, : groups * co]
            y = torch.empty(self.result_shape(*key), device="meta", memory_format=memory_format(self.layout, p.rank))
            y = _spatial(y, (axis.keep for axis in self.axes)).unflatten(1, (groups, *p.stride, co))
            order = [
                0,
                1,
                2 + p.rank,
            ]  # (images, groups, *residues, channels, *q) -> channels, then q and residue in turn
            for axis in range(p.rank):
                order += [3 + p.rank + axis, 2 + axis]
            found = []
            for pieces in product(*(w.pieces() for w in self.windows)):
                view = _spatial(out, (outputs for outputs, _, _ in pieces)).unflatten(1, (groups, co))
                for axis, (_, _, residues) in enumerate(pieces):  # o -> (q, residue)
                    view = view.unflatten(3 + 2 * axis, (-1, residues.stop - residues.start))
                select: Any = (slice(None), slice(None), *(residues for _, _, residues in pieces), slice(None))
                source = y[(*select, *(results for _, results, _ in pieces))].permute(order)
                found.append((_view_of(view), _view_of(source)))
            self._scatters[key] = found
        return self._scatters[key]


_geometry = lru_cache(maxsize=1024)(_Geometry)


def _shuffle(p: Problem, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    geometry, (ci, co), every = (
        _geometry(p),
        (p.in_channels // p.groups, p.out_channels // p.groups),
        math.prod(p.stride),
    )
    out = _empty_output(p, x)
    if not geometry.whole:
        _fill(out, bias, p.rank)
    if geometry.dead:
        return out
    flipped = weight.flip(tuple(range(2, 2 + p.rank))).contiguous()
    packed = flipped.new_zeros(geometry.packed_shape)
    for into, taps in geometry.taps:
        torch.as_strided(packed, *into).copy_(torch.as_strided(flipped, *taps))
    packed = _pack(packed.flatten(1, 1 + p.rank), geometry.layout)
    spread = bias.view(-1, 1, co).expand(p.groups, every, co).reshape(-1) if bias is not None else None
    image_step, channel_step = out.stride(0), out.stride(1)
    result_format = memory_format(geometry.layout, p.rank)
    for images in geometry.image_chunks:
        for groups in geometry.group_chunks:
            n = groups.stop - groups.start
            rows = slice(groups.start * every * co, groups.stop * every * co)
            part = x[images, groups.start * ci : groups.stop * ci]
            y = _convolve(part, packed[rows], None if spread is None else spread[rows], n, geometry.axes)
            y = y.contiguous(memory_format=result_format)  # it is, but for 1x1 weights of one channel, read as either
            offset = images.start * image_step + groups.start * co * channel_step
            for (size, stride, start), source in geometry.scatter(images.stop - images.start, n):
                torch.as_strided(out, size, stride, start + offset).copy_(torch.as_strided(y, *source))
    return out


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
    found: list[Tensor | None] = [None, None, None]
    asked = (mask[0], mask[1], mask[2] and not split)
    if any(asked):
        found = torch_gradients(
            grad, input, weight, p.out_channels, p.stride, p.padding, p.output_padding, p.groups, p.dilation, asked
        )
    if split and mask[2]:
        found[2] = _sum_channels(grad)
    return found[0], found[1], found[2]


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
) -> list[Tensor | None]:
    """PyTorch's gradients for input, weight and the bias of ``channels``, as far as ``mask`` asks."""
    found = torch.ops.aten.convolution_backward(
        grad, input, weight, [channels], stride, padding, dilation, True, output_padding, groups, mask
    )
    # With the bias' gradient oneDNN returns the weight's, asked for or not, and for 1-D layers then a 4-D one.
    return [g if asked else None for g, asked in zip(found, mask)]


# NOTES: PyTorch sums half precisions by converting the whole tensor to float32 first; from 32 MiB on that copy is
# mapped anew at every call (8.4 million elements: 9.2 ms, in two halves 0.6).
_SUM_AT_ONCE = 4 << 20


def _sum_channels(grad: Tensor) -> Tensor:
    """The sum over everything but the channels: half precisions are added in float32 and rounded once."""
    dims = (0, *range(2, grad.dim()))
    if grad.dtype not in HALF or grad.numel() <= _SUM_AT_ONCE:
        return grad.sum(dims)
    parts = [image.unsqueeze(0).sum(dims, dtype=torch.float32) for image in grad.unbind(0)]
    return torch.stack(parts).sum(0).to(grad.dtype)
