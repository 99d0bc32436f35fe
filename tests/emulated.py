"""Choices that are launched on the emulator: on what, and what must be right about their results.

Numbers are small integers, so that every product and sum is exact and the result has one right value. What is to be
rounded on its way, to TF32 or from float32, lies a little below them. Results lie between guards.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from emulator import Emulator
from upconv import reference
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.gpu import H200, Gpu
from upconv.cuda.launches import Given
from upconv.cuda.pixels import phases
from upconv.cuda.prepared import Prepared
from upconv.problem import Problem

GUARD = 64  # elements ahead of a result, and behind it
BELOW = 1 - 2**-14  # of a number whose nearest one of TF32 or 16 bits is meant


@dataclass(frozen=True)
class Way:
    """How a choice is called."""

    last: bool = False
    """With a weight, or for one, in channels_last."""
    single: bool = False
    """With a float32 weight and bias, or for a float32 weight, of 16-bit problems."""
    packing: bool = False
    """By a kernel that packs the weight itself, where there is one."""
    once: bool = False
    """As a call that may leave something behind: blocks claim tiles, or wait for each other."""


def drawn_way(choice: Any, seed: int) -> Way:
    """One of the ways, without a kernel more than others'."""
    return Way(choice.problem.rank > 1 and seed % 3 == 0, False, seed % 2 == 1, seed % 4 > 1)


def gpus(rng: random.Random) -> Gpu:
    return replace(H200, multiprocessors=rng.choice((1, 2, 7, 132)))


def numbers(shape: tuple[int, ...], p: Problem) -> Tensor:
    """Small integers; for IEEE numbers of which TF32 has not all bits."""
    if p.precision == "ieee":
        return torch.randn(shape, dtype=p.dtype)
    return torch.randint(-3, 4, shape).to(p.dtype)


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


def guarded(like: Tensor, beyond: int = 0) -> tuple[Tensor, Tensor]:
    """A result of NaNs that is laid out alike, so many elements beyond 16 bytes, and the memory around it."""
    around = torch.full((like.numel() + beyond + 2 * GUARD,), math.nan, dtype=like.dtype)
    return around[GUARD:].as_strided(like.shape, like.stride(), GUARD + beyond), around


def assert_computes(choice: Any, emulator: Emulator, seed: int, way: Way | None = None) -> None:
    """What a choice launches gives its pass's result, to the last bit, and stores nothing beside it."""
    p = choice.problem
    torch.manual_seed(seed)
    emulator.seed, emulator.gpu = seed, choice.gpu
    way = way or drawn_way(choice, seed)
    (out, around), truth = (gradient_of_weight if p.pass_ == "grad-weight" else result)(choice, seed, way)
    wrong = (out - truth).abs() > 1e-5 * truth.abs().max() if p.precision == "ieee" else out != truth.to(out.dtype)
    wrong |= out.isnan()
    about = f"{p} {p.precision} {p.layout}\n{choice}\n{way}, seed {seed}"
    first = wrong.nonzero()[:1].tolist()
    assert not first, f"{int(wrong.sum())} of {out.numel()} are wrong, the first at {first}: {about}"
    assert around[:GUARD].isnan().all() and around[-GUARD:].isnan().all(), f"a store beside the result: {about}"
    assert not any(zeros.any() for zeros in emulator.counters), f"counters are left: {about}"


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
    (out, _), truth = result(choice, 0, way, infinite=True)
    assert 0 < truth.isfinite().sum() < truth.numel() and torch.equal(out.isfinite(), truth.isfinite()), str(choice)


def result(choice: Any, seed: int, way: Way, infinite: bool = False) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Of a forward or of the gradient for the input: what is launched leaves with its guards, and the reference.

    ``infinite``: of a source with an infinity.
    """
    p, prepared = original(choice.problem), choice.prepare(0)
    x, w = laid_out(numbers(source_shape(p), p), p), laid_out(numbers(p.weight_shape, p), p, way.last)
    if infinite:
        for _ in range(3):  # some pixels may be read by no tap
            x[-1, -1][tuple(random.randrange(n) for n in x.shape[2:])] = math.inf
    bias = numbers(result_shape(p)[1:2], p) if p.bias and (p.pass_ == "fwd" or prepared.biased) else None
    anywhere = isinstance(choice, phases.Choice) and not choice.aligned  # the kernel stores to any address
    like = laid_out(torch.empty(result_shape(p), dtype=p.dtype), p)
    out, around = guarded(like, seed % 8 if anywhere else 0)
    source, weight = given(x, p), given(w, p, way.single)
    rounded = None if bias is None else given(bias, p, True) if way.single else bias
    if way.packing and getattr(choice, "packs", 0):
        prepared.run(source, weight, bias, out, claim=True)
    else:
        if isinstance(prepared, Prepared) and (form := prepared._form(weight)) is not None:
            prepared._program(Given(form, way.single))  # of one source, which is compiled once
        packed = prepared.pack(weight, rounded) if way.single and bias is not None else prepared.pack(weight)
        prepared.run(source, packed, rounded, out, claim=way.once)
    if p.pass_ == "fwd":
        return (out, around), reference.forward(p, x, w, bias)
    truth = reference.gradients(p, x, torch.zeros(p.input_shape), w)[0]
    return (out, around), truth if bias is None else truth + bias.view(1, -1, *(1,) * p.rank)


def gradient_of_weight(choice: Any, seed: int, way: Way) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """As `result`."""
    p = original(choice.problem)
    x, grad = (laid_out(numbers(shape, p), p) for shape in (p.input_shape, p.output_shape))
    like = torch.empty(p.weight_shape, dtype=torch.float32 if way.single else p.dtype)
    out, around = guarded(laid_out(like, p, way.last))
    choice.prepare(0).run(given(x, p), given(grad, p), out, way.once)
    return (out, around), reference.gradients(p, grad, x, torch.zeros(p.weight_shape))[1]


# --- modes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A choice, and how it is called."""

    choice: Any
    way: Way
    work: float
    """Products of its tiles."""


def fewest(layers: Iterable[Iterable[Case]], modes: Mapping[str, Callable[[Case], bool]]) -> list[Case]:
    """Few cases that together have every mode, of the first layers that do.

    That is the cheapest of those with the most modes that none before has, in turn.
    """
    have, left = [], set(modes)
    for layer in layers:
        if not left:
            break
        new = [(case, {name for name, fits in modes.items() if fits(case)}) for case in layer]
        have += new
        left -= {name for _, own in new for name in own}
    assert not left, f"no case has {sorted(left)}"
    found, left = [], set(modes)
    while left:
        case, own = max(have, key=lambda one: len(one[1] & left) / (1 + one[0].work / 5e7))
        found.append(case)
        left -= own
    return found
