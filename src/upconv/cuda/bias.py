"""The gradient for the bias on a GPU: a kernel of our own for tensors whose bytes are the work. It is ``bias.cu``.

``torch.sum`` over an NCHW tensor's images and pixels reaches half of the memory's bandwidth, which is a tenth of a
layer's training step. Small tensors are left to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.gpu import Gpu, threads_per_sm
from upconv.cuda.launches import THREADS, Given, Int, Launch, Long, Pointer, Scratch, Unit, Zeros
from upconv.cuda.scalars import PRECISIONS
from upconv.problem import Problem

_UNROLL = 8
_LEAST_BYTES = {"nchw": 1 << 20, "channels_last": 16 << 20}
"""Of the output's gradient. NCHW takes one launch, 2 us more of the host than torch's and, of 2 MB, 10 us less of the
GPU; channels_last takes two, of which the second costs small tensors more than the first saves."""


def serves(p: Problem) -> bool:
    """Whether the kernel takes the layer's gradient for the bias."""
    if p.dtype not in PRECISIONS or math.prod(p.output_shape) * p.dtype.itemsize < _LEAST_BYTES[p.layout]:
        return False
    return p.layout == "nchw" or p.out_channels * p.dtype.itemsize % 16 == 0


def shares(p: Problem, gpu: Gpu) -> tuple[int, int, tuple[int, ...]]:
    """How a tensor is divided among blocks: those of a range, ranges, and the arguments of ``sum`` beside tensors."""
    each, channels = 16 // p.dtype.itemsize, p.out_channels
    pixels = math.prod(p.out_size)
    most = threads_per_sm(gpu) // THREADS * gpu.multiprocessors
    if p.layout == "channels_last":
        pixels *= p.batch
        blocks = -(-channels // each // THREADS)
        rows = max(1, THREADS // (channels // each)) * _UNROLL
        share = max(rows, -(-pixels // max(1, most // blocks)))
        return blocks, -(-pixels // share), (channels, pixels, share)
    share = THREADS * _UNROLL * each  # which a block loads at a time
    pieces = -(-pixels // share)
    if pieces == 1:
        share = -(-pixels // each) * each
    width = min(THREADS, 1 << max(3, (-(-pixels // each) - 1).bit_length()))
    every = p.batch * pieces
    items = max(THREADS // width, -(-every // max(1, most // channels)))
    return channels, -(-every // items), (channels, pixels, share, pieces, every, items, width)


@dataclass(frozen=True)
class Choice(family.Choice):
    """What sums an operand ``gradient`` into ``result``, which may be float32 where the gradient has 16 bits."""

    problem: Problem
    gpu: Gpu

    family = "bias"
    summary = "sums of ranges"

    @property
    def casts(self) -> bool:
        return self.problem.dtype.itemsize == 2

    def sources(self) -> tuple[Unit, ...]:
        p = self.problem
        entries = ("sum_last",) if p.layout == "channels_last" else ("sum", "sum_at_once")
        names = [f"{entry}<{jit.CONFIG}>" for entry in (*entries, "finish")]
        source = jit.instance("bias.cu", {"precision": PRECISIONS[p.dtype]}, names)
        return (Unit(f"bias {p.precision} {p.layout}", source, (*entries, "finish")),)

    def launches(self, given: Given) -> tuple[Launch, ...]:
        """One launch may do where the call is a lasting one."""
        p, last = self.problem, self.problem.layout == "channels_last"
        channels, (blocks, ranges, numbers) = p.out_channels, shares(p, self.gpu)
        (unit,) = self.sources()
        of_image = (Int, Long, Long) if last else (Int, Long, Long, *(Int,) * 4)
        sizes = tuple(kind(value) for kind, value in zip(of_image, numbers, strict=True))
        gradient, result = Pointer("gradient", alignment=16 if last else 1), Pointer("result")
        element, grid, wide = 8 if p.dtype is torch.float64 else 4, blocks * ranges, Int(given.single)
        if given.lasting and not last:
            behind = -(-4 * channels // 16) * 16  # bytes of the counters, behind which partial sums are
            zeros = Zeros((behind + ranges * channels * element) // 4)
            arguments = (gradient, Pointer(zeros, behind), result, Pointer(zeros), wide, Int(ranges), *sizes)
            return (Launch(unit, "sum_at_once", grid, THREADS, 0, arguments),)
        partial = Pointer(Scratch("partial sums", ranges * channels * element))
        to = (partial, result, wide, Int(channels), Int(ranges))
        return (
            Launch(unit, unit.entries[0], grid, THREADS, 0, (gradient, partial, *sizes)),
            Launch(unit, "finish", -(-channels // (THREADS // 32)), THREADS, 0, to),
        )
