"""Calls of compiled graphs, replayed by the C++ module once their passes are recorded.

`upconv.replay.replays` has those outside of graphs, and says what can be recorded. What is recorded here allocates
nothing that outlives a call, since the memory pool of a captured graph does not allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from upconv.cuda import engine, weights
from upconv.planner import Plan
from upconv.replay import native, replays

Operands = tuple[Tensor, Tensor, "Tensor | None"]
Results = Sequence["Tensor | None"]
Mask = tuple[bool, bool, bool]


def compute(plan: Plan, mask: Mask | None, operands: Operands) -> Results:
    """A pass by a plan, replayed where it can be; the third call like it is recorded.

    Args:
        plan: what the pass is computed by.
        mask: the gradients that are asked for; None for the forward.
        operands: input, weight and bias, or the output's gradient, input and weight.
    """
    a, b, c = operands
    if weights.frozen and (weights.is_frozen(b) or (c is not None and weights.is_frozen(c))):
        # A recording packs; the pass in Python reads the copy.
        return _run(plan, mask, *operands)
    key = (mask, a.stride(), b.stride(), b.dtype, c if c is None else (c.stride(), c.dtype), a.get_device())
    known = _known(plan)
    held = known.get(key, 0)
    if type(held) is not int and held is not replays.NEVER:
        may_copy = -1 if mask is None else 0  # an output's gradient, to be dense
        found: Results | None = native.module().play(held, a, b, c, may_copy)
        if found is not None:
            return found
    result = _run(plan, mask, *operands)
    if type(held) is int and replays.hoped and not engine._collectors and (module := replays.recorder()) is not None:
        known[key] = held + 1 if held < replays.CALLS - 1 else _layer(module, plan, mask, operands) or replays.NEVER
    return result


@lru_cache(maxsize=4096)
def _known(plan: Plan) -> dict[Any, Any]:
    """Of the plans used last how many calls like each there were, or what replays them."""
    return {}


def _run(plan: Plan, mask: Mask | None, a: Tensor, b: Tensor, c: Any) -> Results:
    if mask is None:
        return (engine.forward(plan, a, b, c, lasting=False),)
    return engine.gradients(plan, a, b, c, mask, lasting=False)


def _layer(module: Any, plan: Plan, mask: Mask | None, operands: Operands) -> Any:
    what = f"a compiled graph's pass of {plan.problem}"
    return replays.layer(module, plan, what, operands, lambda: _run(plan, mask, *operands))
