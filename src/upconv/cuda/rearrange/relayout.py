"""Gradients by the kernels for channels_last tensors, on copies. The copying kernels are ``relayout.cu``.

Where a stride is wide, NCHW rows are turned to rows of channels in shared memory for few products; where they are
shorter than 16 bytes, no box brings them. Then it is cheaper to turn a tensor once: a copy of the source, the
channels_last kernel, and for the gradient for the input a copy of its result.

Nor do boxes bring pixels whose channels are no whole 16 bytes. For the weight such tensors are copied, in either memory
format, into pixels of some channels more, which are zeros.

The copies take as much memory as the tensors, while the gradient is computed. cuDNN's kernels for these layers do too
(docs/experiments.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
# Elements that a block copies, by their bytes.
_TILE = {2: 16384, 4: 4096}
_SMALL = 64  # pixels of an image, up to which a block copies those of several; each number of them is a kernel
_RATE = 0.83  # of the device's copy rate: 3.5 TB/s on an H200 for 67 to 1,250 MB
_COPY = 4e-6  # of a copy beside its bytes: 17 MB took 17 us
# Share of the fastest kernel's time up to which copies are worth the search for what would follow them, up to a second
# for a new layer.
_MOST_COPYING = 0.55
# The weight's gradient: copies cost least in the cache (docs/experiments.md). Beyond it and in TF32 times are the
# model's to 15 %, and so much better they must be.
_MANY_TAPS = 256  # from which on the model is far too low
_HOPED = 1.15


@dataclass(frozen=True)
class Choice(around.Choice):
    """A choice for the problem in channels_last."""

    family = "relayout"

    @property
    def summary(self) -> str:
        p, q = self.problem, self.inner.problem
        wider = {a: b for a, b in ((p.in_channels, q.in_channels), (p.out_channels, q.out_channels)) if a != b}
        of = "".join(f" of {a} channels as {b}" for a, b in wider.items())
        return f"by copies in channels_last{of}, {self._memory}: {self.inner.summary}"

    @property
    def temporary_bytes(self) -> int:
        """Of the copies."""
        q = self.inner.problem
        shapes = (
            shape for output, shape in enumerate((q.input_shape, q.output_shape)) if copied(self.problem, bool(output))
        )
        return sum(math.prod(shape) for shape in shapes) * q.dtype.itemsize

    @property
    def bound(self) -> str:
        return "copies" if self.seconds > 2 * self.inner.seconds else self.inner.bound

    def sources(self) -> tuple[Any, ...]:
        """What NVRTC must compile: the copying kernels for the channels of both tensors, and the channels_last one."""
        p = self.problem
        sides = ((p.in_channels, p.size), (p.out_channels, p.out_size))
        tiles = dict.fromkeys(tile(p, *side) for output, side in enumerate(sides) if copied(p, bool(output)))
        return (*(unit(p, *each) for each in tiles), *self.inner_units)

    def prepare(self, device: int) -> GradInput | GradWeight:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return GradInput(self, device) if self.problem.pass_ == "grad-input" else GradWeight(self, device)


def tile(p: Problem, channels: int, size: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels and pixels that a block copies: of both no more than there are, as far as powers of 2 let it. And the
    pixels of an image where a block copies those of several, else 0.
    """
    of_channels = min(64, max(8, 1 << (channels - 1).bit_length()))
    pixels = _TILE[p.dtype.itemsize] // of_channels
    least = max(64, THREADS * 16 // p.dtype.itemsize // of_channels)  # a unit for each thread
    image = math.prod(size)
    if 1 < image <= _SMALL and image * p.dtype.itemsize % 4 == 0:
        return of_channels, least, image
    while pixels > least and pixels // 2 >= image:
        pixels //= 2
    return of_channels, pixels, 0


def unit(p: Problem, channels: int, pixels: int, image: int) -> Unit:
    """The copying kernels for tiles of so many channels and pixels (`tile`)."""
    constants = {"element": p.dtype.itemsize, "tile_c": channels, "tile_p": pixels, "image": image}
    entries = ("to_channels_last", "to_contiguous", "widen")
    label = f"relayout of {channels} channels x {pixels} pixels of {8 * p.dtype.itemsize} bits"
    return Unit(label, jit.instance("relayout.cu", constants, [f"{entry}<{jit.CONFIG}>" for entry in entries]), entries)


def width(p: Problem, channels: int) -> int:
    """Channels of a copy's pixel: whole 16 bytes."""
    each = 16 // p.dtype.itemsize
    return -(-channels // each) * each


def copied(p: Problem, output: bool) -> bool:
    """Whether a tensor must be: not where a copy would be the same bytes in the same places."""
    channels, size = (p.out_channels, p.out_size) if output else (p.in_channels, p.size)
    return width(p, channels) != channels or (p.layout == "nchw" and math.prod(size) > 1)


class Copies:
    """Copies one of a problem's tensors into channels_last, and back."""

    def __init__(self, p: Problem, device: int, output: bool) -> None:
        self.alike = not copied(p, output)
        """Whether a copy would be the same bytes in the same places."""
        p = p.lifted
        batch, channels, *size = p.output_shape if output else p.input_shape
        pixels, wide = math.prod(size), width(p, channels)
        self.shape, self._device = (batch, wide, *size), device
        self.strides = cpu.dense_strides(self.shape, cpu.memory_format("channels_last", p.rank))
        of_channels, of_pixels, image = tile(p, channels, tuple(size))
        widens = p.layout == "channels_last"
        if image or widens:
            batch, pixels = 1, batch * pixels
        self._sizes, self._words = (channels, pixels), image > 0 and not widens
        self._width = wide
        self._grid = batch * -(-channels // of_channels) * -(-pixels // of_pixels)
        if widens:
            self._grid = -(-pixels * wide * p.dtype.itemsize // 16 // THREADS)
        if self.alike:
            return
        code, arch = unit(p, of_channels, of_pixels, image), gpu_of(device).arch
        self._last, self._contiguous = (
            Launcher(jit.kernel(code.source, entry, arch, code.label), THREADS, 0, codes)
            for entry, codes in (("widen" if widens else "to_channels_last", "PPiii"), ("to_contiguous", "PPii"))
        )

    def empty(self, like: Tensor) -> Tensor:
        """A tensor of the shape, in channels_last, of the dtype and on the device of another."""
        return like.new_empty_strided(self.shape, self.strides)

    def channels_last(self, t: Tensor) -> Tensor:
        """A copy of a tensor of the problem's layout in channels_last, or the tensor itself."""
        if self.alike:
            return t
        if self._words and t.data_ptr() & 3:
            t = t.clone()  # a view that begins off words; PyTorch's allocations never do
        out = self.empty(t)
        self._last(self._device, self._grid, (t.data_ptr(), out.data_ptr(), *self._sizes, self._width))
        return out

    def contiguous(self, t: Tensor, out: Tensor) -> None:
        """Copies a tensor in channels_last into a contiguous one."""
        self._contiguous(self._device, self._grid, (t.data_ptr(), out.data_ptr(), *self._sizes))


class GradInput(around.GradInput):
    """The gradient for the input, its kernels loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        super().__init__(choice, device)
        self._input, self._output = (Copies(choice.problem, device, output) for output in (False, True))

    def run(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False, claim: bool = False
    ) -> None:
        """`around.GradInput.run`."""
        source, result = self._output.channels_last(x), out if self._input.alike else self._input.empty(out)
        self._run_inner(source, packed, result, fresh, claim)
        if result is not out:
            self._input.contiguous(result, out)


class GradWeight(around.GradWeight):
    """The gradient for the weight, its kernels loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        super().__init__(choice, device)
        self._input, self._output = (Copies(choice.problem, device, output) for output in (False, True))
        wide = _wider(choice.problem)
        self._whole = wide.weight_shape if wide != choice.problem else None

    def run(self, x: Tensor, grad: Tensor, out: Tensor, lasting: bool = False) -> None:
        """`around.GradWeight.run`."""
        x, grad = self._input.channels_last(x), self._output.channels_last(grad)
        if self._whole is None:
            self._inner.run(x, grad, out, lasting)
            return
        whole = out.new_empty(self._whole)  # of the channels that are zeros, too
        self._inner.run(x, grad, whole, lasting)
        out.copy_(whole[: out.shape[0], : out.shape[1]])


def _wider(p: Problem) -> Problem:
    """The problem of the copies' channels, which stay as they are where there are groups."""
    if p.groups > 1:
        return p
    return p.with_(in_channels=width(p, p.in_channels), out_channels=width(p, p.out_channels))


def _bytes(p: Problem) -> int:
    """Of both tensors: the output's gradient, and the input or its gradient."""
    return (math.prod(p.input_shape) + math.prod(p.output_shape)) * p.dtype.itemsize


def copy_seconds(p: Problem, gpu: Gpu) -> float:
    """What the copies take."""
    q = _wider(p)
    if p == q:
        return 2 * _bytes(p) / (_RATE * gpu.bandwidth) + 2 * _COPY
    sides = ((p.input_shape, q.input_shape), (p.output_shape, q.output_shape))
    moved = [math.prod(a) + math.prod(b) for output, (a, b) in enumerate(sides) if copied(p, bool(output))]
    return sum(moved) * p.dtype.itemsize / (_RATE * gpu.bandwidth) + (len(moved) + 1) * _COPY


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why a gradient is not computed on copies, whatever that would cost, in a sentence; None when it may be."""
    refused = around.refusal(p, gpu)
    if refused:
        return refused
    each = 16 // p.dtype.itemsize
    widened = p.in_channels % each or p.out_channels % each
    if p.layout != "nchw" and (p.pass_ != "grad-weight" or not widened):
        return "only NCHW tensors have another memory format to be copied into"
    if widened and (p.pass_ != "grad-weight" or p.groups > 1):
        return f"{p.in_channels} and {p.out_channels} channels are no multiples of the {each} in 16 bytes"
    if widened and p.taps >= _MANY_TAPS:
        return f"of {p.taps} taps the kernels on wider pixels take far longer than their model says"
    if max(math.prod(p.size), math.prod(p.out_size), _SMALL * p.batch) >= 2**31 - max(_TILE.values()):
        return "an image has nearly 2^31 pixels and more"
    wide = _wider(p)
    units = max(map(math.prod, (wide.input_shape, wide.output_shape))) // each
    if p.layout != "nchw" and units >= 2**31 - THREADS:
        return "a tensor of nearly 2^31 units of 16 bytes and more is not copied into wider pixels"
    apart = (s // math.gcd(s, d) for s, d in zip(p.stride, p.dilation))  # taps of different phases
    if p.pass_ == "grad-input" and all(k <= n for k, n in zip(p.kernel, apart)):
        return "taps that do not overlap read every output once in either memory format"
    if p.pass_ == "grad-weight" and p.groups > 1:
        return "for the weight copies pay without groups alone"
    return None


def choose(p: Problem, gpu: Gpu, otherwise: Any, general: bool = False) -> Choice | str:
    """The channels_last kernel to run on copies, or the sentence why none is worth it.

    ``otherwise``: the fastest choice without copies, or None. ``general``: one for every size of the input.
    """
    refused = refusal(p, gpu)
    if refused:
        return refused
    if general:
        return "whether copies pay depends on the size of the input"
    if otherwise is None:
        return "there is no kernel without copies, whose estimate would tell whether they pay"
    copies = copy_seconds(p, gpu)
    if copies > _MOST_COPYING * weighed(otherwise):
        return f"slower: the copies alone take {copies * 1e3:.3g} ms"
    inner = around.choose(_wider(p.lifted).with_(layout="channels_last"), gpu, others=True)  # 1-D tensors: of one row
    if isinstance(inner, str):
        return inner
    cached = p.pass_ == "grad-weight" and p.dtype.itemsize == 2 and _bytes(p) <= gpu.cache_bytes
    found = Choice(inner, p, inner.seconds + copies)
    hoped = 1.0 if cached or p.pass_ == "grad-input" else _HOPED
    if not around.gains(weighed(found) * hoped, otherwise):
        return f"slower, or too little faster: {found.seconds * 1e3:.3g} ms by the model, with copies"
    return found


candidate = choose
