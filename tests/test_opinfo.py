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

from conftest import OURS, RANKS, Call, by_turns
from upconv.problem import Problem


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
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_derivatives(rank: int, device: str) -> None:
    """By kernels; those of a CPU are below."""
    for call in samples(rank, device, torch.float64):
        _gradcheck(call, fast=rank > 1)


@RANKS
def test_derivatives_by_each_plan(rank: int, each_plan: list[Problem]) -> None:
    calls = samples(rank, "cpu", torch.float64)
    for call in by_turns(calls, rank + 1):
        _gradcheck(call, fast=True)
    assert each_plan
