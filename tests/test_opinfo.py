"""PyTorch's own OpInfo samples of conv_transpose1d/2d/3d, on upconv's functions.

The samples are tiny, so the planner would seldom choose an engine for them: every test also runs with each plan forced.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import noncontiguous_like

from conftest import OURS, THEIRS, Call, assert_close, assert_equal, by_turns
from upconv.problem import Problem

RANKS = pytest.mark.parametrize("rank", (1, 2, 3), ids="{}d".format)
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
EXACT = (torch.complex64, torch.complex128, torch.int64)


@cache
def _opinfo(rank: int) -> Any:
    return next(op for op in op_db if op.name == f"nn.functional.conv_transpose{rank}d")


def samples(rank: int, device: str, dtype: torch.dtype) -> list[Call]:
    found = []
    for sample in _opinfo(rank).sample_inputs(device, dtype):
        weight, bias = sample.args
        found.append(
            Call(sample.input.detach(), weight.detach(), None if bias is None else bias.detach(), sample.kwargs)
        )
    assert len(found) >= 10
    return found


def _dtypes(rank: int, device: str) -> set[torch.dtype]:
    supported: set[torch.dtype] = set(_opinfo(rank).supported_dtypes(device))
    return supported


def _expanded(t: Tensor) -> Tensor:
    """The first entry of every dimension, repeated by a stride of 0."""
    return t[(slice(0, 1),) * t.dim()].expand(t.shape)


# --- as the planner chooses ------------------------------------------------------------------------------------------


@RANKS
def test_dtypes_of_the_samples_are_all_tested(rank: int) -> None:
    assert _dtypes(rank, "cpu") == {*FLOATING, *EXACT}


@RANKS
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_samples(rank: int, dtype: torch.dtype, device: str) -> None:
    for call in samples(rank, device, dtype):
        call.check()


@RANKS
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_samples_of_delegated_dtypes_equal_torchs(rank: int, dtype: torch.dtype, device: str) -> None:
    if dtype not in _dtypes(rank, device):
        pytest.skip(f"PyTorch has no {dtype} on {device}")
    for call in samples(rank, device, dtype):
        if not dtype.is_complex:
            assert_equal(call.run(OURS), call.run(THEIRS))
            continue
        grad = torch.randn_like(call.run(THEIRS))
        for ours, theirs in zip(call.gradients(OURS, grad), call.gradients(THEIRS, grad)):
            # The same operator twice; on a GPU two runs of it differ in the order of their sums.
            (assert_equal if device == "cpu" else assert_close)(ours, theirs)


@RANKS
@pytest.mark.parametrize("change", (noncontiguous_like, _expanded), ids=("noncontiguous", "expanded"))
def test_samples_with_odd_strides(rank: int, change: Any, device: str) -> None:
    for call in samples(rank, device, torch.float32):
        changed = call.map(change)
        changed.check()
        Call(changed.input, call.weight, call.bias, call.kwargs).check()
        Call(call.input, changed.weight, call.bias, call.kwargs).check()


# --- with each plan forced -------------------------------------------------------------------------------------------


@RANKS
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_samples_by_each_plan(
    rank: int, dtype: torch.dtype, each_plan: list[Problem], request: pytest.FixtureRequest
) -> None:
    for call in by_turns(samples(rank, "cpu", dtype), 2, FLOATING.index(dtype)):
        call.check()
    # In two bytes the bias cannot be added after the rounding, so this one plan is refused.
    refused = dtype.itemsize == 2 and request.node.callspec.params["each_plan"][0] == "unbiased"
    assert bool(each_plan) != refused


# --- derivatives against finite differences --------------------------------------------------------------------------


def _gradcheck(call: Call, *, fast: bool) -> None:
    """First and second derivatives; ``fast`` compares a random projection of the Jacobian, not all of it."""
    operands = tuple(t.detach().clone().requires_grad_() for t in call.operands)

    def function(*operands: Tensor) -> Tensor:
        bias = operands[2] if len(operands) > 2 else None
        return Call(operands[0], operands[1], bias, call.kwargs).run(OURS)

    # PyTorch's own operator on a GPU adds in another order from run to run; on the CPU nothing may differ.
    nondet = 0.0 if call.input.device.type == "cpu" else 1e-10
    assert gradcheck(
        function, operands, fast_mode=fast, check_batched_grad=True, check_forward_ad=True,
        check_batched_forward_grad=True, check_undefined_grad=True, nondet_tol=nondet,
    )  # fmt: skip
    assert gradgradcheck(
        function, operands, fast_mode=fast, check_batched_grad=True, check_fwd_over_rev=True, nondet_tol=nondet
    )


@RANKS
def test_derivatives(rank: int, device: str) -> None:
    for call in samples(rank, device, torch.float64):
        _gradcheck(call, fast=rank > 1)


@RANKS
def test_derivatives_by_each_plan(rank: int, each_plan: list[Problem]) -> None:
    calls = samples(rank, "cpu", torch.float64)
    for call in by_turns(calls, rank + 1):
        _gradcheck(call, fast=True)
    assert each_plan


@RANKS
def test_complex_derivatives(rank: int) -> None:
    for call in by_turns(samples(rank, "cpu", torch.complex128), 5):
        _gradcheck(call, fast=True)
