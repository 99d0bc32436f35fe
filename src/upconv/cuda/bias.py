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
from upconv.cuda.compile.launch import Counters
from upconv.cuda.gpu import Gpu
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.launches import THREADS, Int, Launch, Long, Pointer, Scratch, Unit, Zeros
from upconv.cuda.prepared import Program
from upconv.cuda.scalars import PRECISIONS
from upconv.problem import Problem

_UNROLL = 8
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
        blocks = -(-channels // each // THREADS)
        rows = max(1, THREADS // (channels // each)) * _UNROLL
        share = max(rows, -(-pixels // max(1, most // blocks)))
        return Shape(blocks, -(-pixels // share), (channels, pixels, share))
    share = THREADS * _UNROLL * each  # which a block loads at a time
    pieces = -(-pixels // share)
    if pieces == 1:
        share = -(-pixels // each) * each
    width = min(THREADS, 1 << max(3, (-(-pixels // each) - 1).bit_length()))
    every = p.batch * pieces
    items = max(THREADS // width, -(-every // max(1, most // channels)))
    return Shape(channels, -(-every // items), (channels, pixels, share, pieces, every, items, width))


def instance(p: Problem) -> str:
    """The source of a layer's kernels."""
    sums = ("sum_last",) if p.layout == "channels_last" else ("sum", "sum_at_once")
    entries = (*sums, "finish", *(("finish_float",) if p.dtype.itemsize == 2 else ()))
    return jit.instance("bias.cu", {"precision": PRECISIONS[p.dtype]}, [f"{entry}<{jit.CONFIG}>" for entry in entries])


def launches(p: Problem, gpu: Gpu, single: bool, lasting: bool) -> tuple[Launch, ...]:
    """What sums an operand ``gradient`` into ``result``.

    ``single``: the result is float32, and the gradient may have 16 bits. ``lasting``: the call may allocate what
    outlives it, and is not captured in a graph; then one launch may do.
    """
    last, channels, s = p.layout == "channels_last", p.out_channels, shape(p, gpu)
    entries = ["sum_last" if last else "sum", "sum_at_once", "finish", "finish_float"]
    unit = Unit(f"bias {p.precision} {p.layout}", instance(p), tuple(entries))
    of_image = (Int, Long, Long) if last else (Int, Long, Long, *(Int,) * 4)
    sizes = tuple(kind(value) for kind, value in zip(of_image, s.arguments, strict=True))
    gradient, result = Pointer("gradient", alignment=16 if last else 1), Pointer("result")
    element, grid = 8 if p.dtype is torch.float64 else 4, s.blocks * s.ranges
    if lasting and not last:
        behind = -(-4 * channels // 16) * 16  # bytes of the counters, behind which partial sums are
        zeros = Zeros((behind + s.ranges * channels * element) // 4)
        arguments = (gradient, Pointer(zeros, behind), result, Pointer(zeros), Int(int(single)), Int(s.ranges), *sizes)
        return (Launch(unit, "sum_at_once", grid, THREADS, 0, arguments),)
    partial = Pointer(Scratch("partial sums", s.ranges * channels * element))
    finish = "finish_float" if single and p.dtype.itemsize == 2 else "finish"
    to = (partial, result, Int(channels), Int(s.ranges))
    return (
        Launch(unit, entries[0], grid, THREADS, 0, (gradient, partial, *sizes)),
        Launch(unit, finish, -(-channels // (THREADS // 32)), THREADS, 0, to),
    )


class BiasRunner:
    """The sums of a layer's output gradients on one device."""

    def __init__(self, p: Problem, index: int) -> None:
        self._problem, self._index, self._gpu = p, index, gpu_of(index)
        self._programs: dict[tuple[bool, bool], Program] = {}

    def _program(self, single: bool, lasting: bool) -> Program:
        found = self._programs.get((single, lasting))
        if found is None:
            of = launches(self._problem, self._gpu, single, lasting)
            found = self._programs[single, lasting] = Program(of, ("gradient", "result"), self._index)
        return found

    @property
    def counters(self) -> list[Counters]:
        """Words that kernels find zero."""
        return [counters for program in self._programs.values() for _, counters in program.zeros]

    def __call__(self, grad: Tensor, dtype: torch.dtype, lasting: bool = False) -> Tensor:
        """The sums, ``(out_channels)``.

        ``grad``: the output's gradient, dense in the problem's layout; ``dtype``: its own, or float32 for 16 bits.
        ``lasting``: as for `launches`.
        """
        out = grad.new_empty_strided((self._problem.out_channels,), (1,), dtype=dtype)
        program = self._program(dtype is torch.float32, lasting)
        values = [grad.data_ptr(), out.data_ptr()]
        (program.anywhere if values[0] & 15 else program)((grad, out), values, False)
        return out
