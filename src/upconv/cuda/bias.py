"""The gradient for the bias on a GPU: a kernel of our own for tensors whose bytes are the work. It is ``bias.cu``.

``torch.sum`` over an NCHW tensor's images and pixels reaches half of the memory's bandwidth, which is a tenth of a
layer's training step. Small tensors are left to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from upconv.cuda.compile import jit
from upconv.cuda.compile.launch import Counters, Launcher, as_run
from upconv.cuda.gpu import Gpu
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.scalars import PRECISIONS
from upconv.problem import Problem

_THREADS, _UNROLL = 256, 8
_LEAST_BYTES = {"nchw": 1 << 20, "channels_last": 16 << 20}
"""Of the output's gradient. NCHW takes one launch, 2 us more of the host than torch's and, of 2 MB, 10 us less of the
GPU; channels_last takes two, of which the second costs small tensors more than the first saves."""
_BLOCKS = 8  # of a multiprocessor, which so has all of its threads


@dataclass(frozen=True)
class Shape:
    """How a tensor is divided among blocks."""

    blocks: int
    """Of a range."""
    ranges: int
    arguments: tuple[int, ...]
    """Of ``sum``, beside the tensors."""


def serves(p: Problem) -> bool:
    """Whether the kernel takes the layer's gradient for the bias."""
    if p.dtype not in PRECISIONS or math.prod(p.output_shape) * p.dtype.itemsize < _LEAST_BYTES[p.layout]:
        return False
    return p.layout == "nchw" or p.out_channels * p.dtype.itemsize % 16 == 0


def shape(p: Problem, gpu: Gpu) -> Shape:
    """The blocks of a layer's sums."""
    each, channels = 16 // p.dtype.itemsize, p.out_channels
    pixels, most = math.prod(p.out_size), _BLOCKS * gpu.multiprocessors
    if p.layout == "channels_last":
        pixels *= p.batch
        blocks = -(-channels // each // _THREADS)
        rows = max(1, _THREADS // (channels // each)) * _UNROLL
        share = max(rows, -(-pixels // max(1, most // blocks)))
        return Shape(blocks, -(-pixels // share), (channels, pixels, share))
    share = _THREADS * _UNROLL * each  # which a block loads at a time
    pieces = -(-pixels // share)
    if pieces == 1:
        share = -(-pixels // each) * each
    width = min(_THREADS, 1 << max(3, (-(-pixels // each) - 1).bit_length()))
    every = p.batch * pieces
    items = max(_THREADS // width, -(-every // max(1, most // channels)))
    return Shape(channels, -(-every // items), (channels, pixels, share, pieces, every, items, width))


def instance(p: Problem) -> str:
    """The source of a layer's kernels."""
    sums = ("sum_last",) if p.layout == "channels_last" else ("sum", "sum_at_once")
    entries = (*sums, "finish", *(("finish_float",) if p.dtype.itemsize == 2 else ()))
    return jit.instance("bias.cu", {"precision": PRECISIONS[p.dtype]}, [f"{entry}<{jit.CONFIG}>" for entry in entries])


class BiasRunner:
    """The sums of a layer's output gradients on one device."""

    def __init__(self, p: Problem, index: int) -> None:
        gpu = gpu_of(index)
        last = p.layout == "channels_last"
        self.index, self.channels = index, p.out_channels
        self.aligned = last
        """Whether the tensor must begin at 16 bytes."""
        self.sums = torch.float64 if p.dtype is torch.float64 else torch.float32
        self.shape = shape(p, gpu)
        source = instance(p)
        label = f"bias {p.precision} {p.layout}"
        letters = "iqq" if last else "iqqiiii"
        self._sizes = as_run(letters, self.shape.arguments)
        self._at_once = None
        if not last:
            self._partial_at = -(-4 * p.out_channels // 16) * 16  # bytes, behind the counters
            words = self.shape.ranges * p.out_channels * self.sums.itemsize // 4
            self._counters = Counters(index, self._partial_at // 4 + words)
            kernel = jit.kernel(source, "sum_at_once", gpu.arch, label)
            self._at_once = Launcher(kernel, _THREADS, 0, f"PPPPii({letters})")
        self._sum = Launcher(
            jit.kernel(source, "sum_last" if last else "sum", gpu.arch, label), _THREADS, 0, f"PP({letters})"
        )
        self._finish = Launcher(jit.kernel(source, "finish", gpu.arch, label), _THREADS, 0, "PPii")
        self._finish_float = None
        if p.dtype.itemsize == 2:
            self._finish_float = Launcher(jit.kernel(source, "finish_float", gpu.arch, label), _THREADS, 0, "PPii")

    def __call__(self, grad: Tensor, dtype: torch.dtype, lasting: bool = False) -> Tensor:
        """The sums, ``(out_channels)``.

        ``grad``: the output's gradient, dense in the problem's layout; ``dtype``: its own, or float32 for 16 bits.
        ``lasting``: the call may allocate what outlives it, and is not captured in a graph; then one launch may do.
        """
        if self.aligned and grad.data_ptr() & 15:
            grad = grad.clone()  # a view that begins off 16 bytes; PyTorch's allocations never do
        s, out = self.shape, grad.new_empty_strided((self.channels,), (1,), dtype=dtype)
        if lasting and self._at_once is not None:
            counters, wide = self._counters.address(grad), int(dtype is torch.float32)
            args = (grad.data_ptr(), counters + self._partial_at, out.data_ptr(), counters, wide, s.ranges, self._sizes)
            self._at_once(self.index, s.blocks * s.ranges, args)
            return out
        partial = grad.new_empty_strided((s.ranges * self.channels,), (1,), dtype=self.sums)
        finish = self._finish if dtype is grad.dtype else self._finish_float
        assert finish is not None
        self._sum(self.index, s.blocks * s.ranges, (grad.data_ptr(), partial.data_ptr(), self._sizes))
        grid = -(-self.channels // (_THREADS // 32))
        finish(self.index, grid, (partial.data_ptr(), out.data_ptr(), self.channels, s.ranges))
        return out
