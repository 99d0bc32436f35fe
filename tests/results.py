"""Choices that are launched, on the emulator or a GPU: on what, and what must be right about their results.

Numbers are small integers, so that every product and sum is exact and the result has one right value. What is to be
rounded on its way, to TF32 or from float32, lies a little below them. Results lie between guards.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emulator import Emulator
from upconv import reference
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.gpu import H200
from upconv.cuda.launches import Given
from upconv.problem import Problem

GUARD = 64  # elements ahead of a result, and behind it
BELOW = 1 - 2**-14  # of a number whose nearest one of TF32 or 16 bits is meant
FINE = 1 + 2**-12  # times a small integer: float32 has it and sums of it, TF32 has not
LONGEST_FINE = 5000  # products of a sum of these that float32 has exactly


@dataclass(frozen=True)
class Way:
    """How a choice is called."""

    last: bool = False
    """With a weight, or for one, in channels_last."""
    single: bool = False
    """With a float32 weight and bias, or for a float32 weight, of 16-bit problems."""
    packing: bool = False
    """Packed and multiplied by one call."""
    once: bool = False
    """As a call that may leave something behind: blocks claim tiles, or wait for each other."""
    off: int = 0
    """Elements by which operands begin off 16 bytes, and results but a weight's gradient."""
    strided: bool = False
    """With a weight that is neither contiguous nor in channels_last."""


def drawn_way(p: Problem, casts: bool, seed: int) -> Way:
    """One of the ways. No seed needs a kernel that others do not, but for autocast's."""
    rng = random.Random(seed // 2)  # at once and late alike
    return Way(
        last=p.rank > 1 and rng.random() < 0.4, single=casts and rng.random() < 0.2, packing=rng.random() < 0.5,
        once=rng.random() < 0.5, off=rng.choice((0, 0, 1, 3, 8)), strided=rng.random() < 0.2,
    )  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a choice runs: on the emulator, or on a GPU."""

    emulator: Emulator | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.emulator else "cuda"

    def guarded(self, like: Tensor, beyond: int = 0) -> tuple[Tensor, Tensor]:
        """A tensor of NaNs that is laid out alike, so many elements beyond 16 bytes, and the memory around it."""
        around = torch.full((like.numel() + beyond + 2 * GUARD,), math.nan, dtype=like.dtype, device=self.device)
        return around.as_strided(like.shape, like.stride(), GUARD + beyond), around

    def given(self, t: Tensor, beyond: int = 0) -> Tensor:
        """A copy among NaNs."""
        return self.guarded(t, beyond)[0].copy_(t)


@dataclass(frozen=True)
class Result:
    """What a choice leaves, with the memory around it, and what it should leave."""

    out: Tensor
    around: Tensor
    truth: Tensor

    @property
    def wrong(self) -> Tensor:
        return self.out.isnan() | (self.out != self.truth.to(self.out.dtype))

    @property
    def strayed(self) -> bool:
        """Whether something beside the result was stored."""
        inside = self.around.new_empty(0).set_(self.around.untyped_storage())
        flat = torch.zeros_like(inside, dtype=torch.bool)
        flat.as_strided(self.out.shape, self.out.stride(), self.out.storage_offset()).fill_(True)
        return not bool(inside[~flat].isnan().all())


def numbers(shape: tuple[int, ...], p: Problem) -> Tensor:
    """Small integers."""
    return torch.randint(-3, 4, shape).to(p.dtype)


def two_of(shapes: tuple[tuple[int, ...], tuple[int, ...]], p: Problem) -> tuple[Tensor, Tensor]:
    """The operands of a pass; for IEEE one of them has numbers of which TF32 has not all bits."""
    first, second = (numbers(shape, p) for shape in shapes)
    result = {"fwd": p.output_shape, "grad-input": p.input_shape, "grad-weight": p.weight_shape}[p.pass_]
    if p.precision == "ieee" and p.macs < LONGEST_FINE * math.prod(result):
        (first if torch.rand(()) < 0.5 else second).mul_(FINE)
    return first, second


def given(t: Tensor, p: Problem, single: bool = False) -> Tensor:
    """What a kernel gets for a tensor's numbers."""
    if single:
        t = t.float()
    return t * BELOW if p.precision == "tf32" or single else t


def laid_out(t: Tensor, p: Problem, last: bool | None = None) -> Tensor:
    """As the problem's layout has it, or as told."""
    if not (p.layout == "channels_last" if last is None else last):
        return t.contiguous()
    return t.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[t.ndim - 4])


def assert_computes(
    choice: Any, emulator: Emulator | None, seed: int, way: Way | None = None, p: Problem | None = None, calls: int = 0
) -> None:
    """What a choice launches gives its pass's result, to the last bit, and stores nothing beside it.

    ``p``: whose tensors it takes; by default its own problem's, of a batch as width one of two dimensions.
    ``calls``: so many, each with what those before left; by default one on an emulator and two on a GPU.
    """
    torch.manual_seed(seed)
    if emulator is not None:
        emulator.seed, emulator.gpu = seed, choice.gpu if hasattr(choice, "gpu") else H200
    p, prepared = p or original(choice.problem), choice.prepare(0)
    if choice.family == "direct" and p.precision == "tf32":
        p = p.with_(precision="ieee")  # they round nothing
    way = way or drawn_way(p, prepared.casts, seed)
    about = f"{p} {p.precision} {p.layout}\n{choice}\n{way}, seed {seed}"
    for _ in range(calls or (1 if emulator else 2)):
        found = (gradient_of_weight if p.pass_ == "grad-weight" else result)(p, prepared, Place(emulator), way)
        first = found.wrong.nonzero()[:1].tolist()
        assert not first, f"{int(found.wrong.sum())} of {found.out.numel()} are wrong, the first at {first}: {about}"
        assert not found.strayed, f"a store beside the result: {about}"
    assert emulator is None or not any(zeros.any() for zeros in emulator.counters), f"counters are left: {about}"


def original(p: Problem) -> Problem:
    """The problem whose tensors a problem reads: of a batch as width one of two dimensions."""
    if not p.batch_as_width:
        return p
    *size, batch = p.size
    axes = (p.kernel, p.stride, p.padding, p.output_padding, p.dilation)
    return Problem.make(
        batch, p.in_channels, p.out_channels, size, *(axis[:-1] for axis in axes), p.groups,
        bias=p.bias, dtype=p.dtype, precision=p.precision, layout=p.layout, pass_=p.pass_,
    )  # fmt: skip


def assert_infinities_reach_no_others(choice: Any, emulator: Emulator, way: Way) -> None:
    """Nothing but a tap's own pixels and channels is multiplied, not even by 0, which would make an infinity NaN."""
    torch.manual_seed(0)
    random.seed(0)
    emulator.seed, emulator.gpu = 0, choice.gpu
    found = result(choice.problem, choice.prepare(0), Place(emulator), way, infinite=True)
    assert 0 < found.truth.isfinite().sum() < found.truth.numel(), str(choice)
    assert torch.equal(found.out.isfinite(), found.truth.isfinite()), str(choice)


def result(p: Problem, prepared: Any, place: Place, way: Way, infinite: bool = False) -> Result:
    """Of a forward or of the gradient for the input. ``infinite``: of a source with an infinity."""
    x, w = two_of((source_shape(p), p.weight_shape), p)
    x, w = laid_out(x.to(place.device), p), laid_out(w.to(place.device), p, way.last)
    if way.strided:
        w = w.transpose(0, -1).contiguous().transpose(0, -1)
    if infinite:
        for _ in range(3):  # some pixels may be read by no tap
            x[-1, -1][tuple(random.randrange(n) for n in x.shape[2:])] = math.inf
    biased = p.bias and (p.pass_ == "fwd" or prepared.biased)
    bias = numbers(result_shape(p)[1:2], p).to(place.device) if biased else None
    out, around = place.guarded(laid_out(torch.empty(result_shape(p), dtype=p.dtype), p), way.off)
    source, weight = place.given(given(x, p), way.off), place.given(given(w, p, way.single), way.off)
    rounded = None if bias is None else place.given(given(bias, p, True) if way.single else bias)
    if way.packing:
        prepared.run(source, weight, rounded, out, lasting=True)
    else:
        if (form := prepared._form(weight)) is not None:
            prepared._program(Given(form, way.single))  # of one source, which is compiled once
        prepared.run(source, prepared.pack(weight), bias, out, lasting=way.once)
    if p.pass_ == "fwd":
        return Result(out, around, reference.forward(p, x, w, bias))
    truth = reference.gradients(p, x, x.new_zeros(p.input_shape), w)[0]
    return Result(out, around, truth if bias is None else truth + bias.view(1, -1, *(1,) * p.rank))


def gradient_of_weight(p: Problem, prepared: Any, place: Place, way: Way) -> Result:
    x, grad = (laid_out(t.to(place.device), p) for t in two_of((p.input_shape, p.output_shape), p))
    like = torch.empty(p.weight_shape, dtype=torch.float32 if way.single else p.dtype)
    out, around = place.guarded(laid_out(like, p, way.last))  # at 16 bytes, as PyTorch's allocations
    prepared.run(place.given(given(x, p), way.off), place.given(given(grad, p), way.off), out, way.once)
    return Result(out, around, reference.gradients(p, grad, x, x.new_zeros(p.weight_shape))[1])
