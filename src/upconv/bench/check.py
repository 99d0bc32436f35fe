"""Is a result right? Each tensor that a pass yields is compared with the float64 reference, on a slice of it.

The whole result of the timed shape is computed; the reference covers as many images, groups and channels of it as its
budget allows, always the last of each (where an overflowing offset shows first) and otherwise spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from upconv import reference
from upconv.bench.timing import Operands, Results, result_names
from upconv.problem import Precision, Problem

CPU_MACS, GPU_MACS = 2 * 10**8, 4 * 10**9
"""Multiplications of the reference per result: about 0.2 s on two cores, and on a GPU."""

# Unit roundoffs of an operand or a result in a precision; every engine keeps its sums in float32 or wider.
_ROUNDOFF: dict[Precision, float] = {"tf32": 2**-11, "ieee": 2**-24, "bf16": 2**-8, "fp16": 2**-11, "fp64": 2**-53}
_SAFETY = 2.0


def bound(precision: Precision, reduction: int, torch_error: float) -> float:
    """The largest relative error (of norms) that a right result can have.

    Rounding an operand or the result costs at most one unit roundoff ``u``; rounding errors of a sum of ``K`` terms
    grow as ``u sqrt(K)`` in the mean (Higham and Mary, "A new approach to probabilistic rounding error analysis",
    2019). Twice their sum, and never less than twice PyTorch's own error. A lost column of a 1026-wide output is an
    error of 3e-2, a lost tap of an 81-tap kernel 1e-1; the bound for bfloat16 is 8e-3.

    Args:
        precision: of the multiplications.
        reduction: terms of one sum, ``K``.
        torch_error: PyTorch's relative error on the same tensor.
    """
    unit = _ROUNDOFF[precision]
    accumulate = min(unit, 2**-24)
    return max(_SAFETY * (unit + accumulate * math.sqrt(reduction)), 2 * torch_error)


@dataclass(frozen=True)
class Truth:
    """The reference's values for a slice of one result."""

    name: str
    cut: Callable[[Tensor], Tensor]
    """Takes the same slice of a result."""
    value: Tensor
    shape: tuple[int, ...]
    """The whole result's."""
    reduction: int
    """Terms of one sum."""

    def error(self, result: Tensor, p: Problem) -> float:
        """Relative error of a whole result on the slice; infinite for another shape or dtype, or values not finite."""
        if tuple(result.shape) != self.shape or result.dtype is not p.dtype:
            return math.inf
        found = reference.relative_error(self.cut(result), self.value)
        return found if math.isfinite(found) else math.inf


def truths(p: Problem, given: Operands) -> list[Truth]:
    """The reference for each result of ``p``'s pass, in `result_names`' order."""
    budget = GPU_MACS if given.input.device.type == "cuda" else CPU_MACS
    return [_truth(name, p, given, budget) for name in result_names(p)]


def errors(p: Problem, known: Sequence[Truth], ours: Results, theirs: Results) -> tuple[float, float, bool]:
    """The largest relative error of our results and of PyTorch's, and whether all of ours are within `bound`."""
    pairs = [(t, t.error(a, p), t.error(b, p)) for t, a, b in zip(known, ours, theirs, strict=True)]
    right = all(error <= bound(p.precision, t.reduction, their_error) < math.inf for t, error, their_error in pairs)
    return max(error for _, error, _ in pairs), max(error for _, _, error in pairs), right


TOLERANCE: dict[Precision, float] = {"tf32": 1e-4, "ieee": 1e-4, "bf16": 1e-2, "fp16": 1e-2, "fp64": 1e-4}
"""KernelBench's, absolute and relative; half precision has one hundred times float32's."""


def tolerance_used(precision: Precision, ours: Tensor, theirs: Tensor) -> float:
    """The largest ``|ours - theirs| / (atol + rtol |theirs|)``: up to 1 KernelBench's ``torch.allclose`` passes.

    Both tolerances are 1e-4 in float32 and 1e-2 in half precision. Infinite for other shapes, dtypes or values that are
    not finite. The tensors are compared image by image, since a whole batch may fill the device.

    Source: KernelBench, src/eval.py, ``get_tolerance_for_precision``.
    """
    if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        return math.inf
    tolerance, worst = TOLERANCE[precision], 0.0
    for a, b in zip(ours.detach(), theirs.detach()):
        used = ((a.float() - b.float()).abs_() / b.float().abs().mul_(tolerance).add_(tolerance)).max().item()
        worst = max(worst, used if math.isfinite(used) else math.inf)
    return worst


def _truth(name: str, p: Problem, given: Operands, budget: int) -> Truth:
    images, groups, ins, outs = _counts(name, p, budget)
    of_group = p.in_channels // p.groups, p.out_channels // p.groups

    def spread(total: int, count: int) -> Tensor:
        """``count`` indices below ``total``, evenly spread, the last one always among them."""
        return total - 1 - torch.arange(count, device=given.input.device).flip(0) * total // count

    chosen, in_local, columns = spread(p.groups, groups), spread(of_group[0], ins), spread(of_group[1], outs)
    batch = spread(p.batch, images)
    in_channels = (chosen[:, None] * of_group[0] + in_local).flatten()
    out_channels = (chosen[:, None] * of_group[1] + columns).flatten()

    def images_and(channels: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda t: t.index_select(0, batch).index_select(1, channels)

    def rows_and_columns(t: Tensor) -> Tensor:
        return t.index_select(0, in_channels).index_select(1, columns)

    part = p.with_(batch=images, in_channels=len(in_channels), out_channels=len(out_channels), groups=groups)
    x, w, pixels = images_and(in_channels)(given.input), rows_and_columns(given.weight), math.prod(p.size)
    if name == "output":
        b = None if given.bias is None else given.bias[out_channels]
        terms = of_group[0] * max(phase.tap_count for phase in p.phases)
        return Truth(name, images_and(out_channels), reference.forward(part, x, w, b), p.output_shape, terms)
    assert given.grad is not None
    found = reference.gradients(part, images_and(out_channels)(given.grad), x, w)
    if name == "grad-input":
        return Truth(name, images_and(in_channels), found[0], p.input_shape, of_group[1] * p.taps)
    if name == "grad-weight":
        return Truth(name, rows_and_columns, found[1], p.weight_shape, p.batch * pixels)
    return Truth(name, lambda t: t[out_channels], found[2], (p.out_channels,), p.batch * math.prod(p.out_size))


def _counts(name: str, p: Problem, budget: int) -> tuple[int, int, int, int]:
    """How many images, groups, and input and output channels of each group a slice has.

    What its sums run over is whole. Of the rest the budget of multiplications is given to images first.
    """
    most = {"images": p.batch, "groups": p.groups, "ins": p.in_channels // p.groups, "outs": p.out_channels // p.groups}
    whole = {"output": "ins", "grad-input": "outs"}.get(name, "images")
    found = {whole: most.pop(whole)}
    rest = budget // max(1, math.prod(p.size) * p.taps * found[whole])
    for what, limit in (("images", 2), ("groups", 4), ("outs", None), ("ins", None)):
        if what in most:
            found[what] = max(1, min(most[what], rest, limit or rest))
            rest //= found[what]
    return found["images"], found["groups"], found["ins"], found["outs"]
