"""Calls of compiled graphs, replayed by the C++ module once their passes are on tape.

`upconv.replay.replays` has those outside of graphs, and says what can be recorded. What is recorded here allocates
nothing that outlives a call, since the memory pool of a captured graph does not allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from upconv.cuda import engine, weights
from upconv.planner import Plan
from upconv.replay import native, replays

Operands = tuple[Tensor, Tensor, "Tensor | None"]
Results = Sequence["Tensor | None"]
Pass = Callable[[Plan, Tensor, Tensor, "Tensor | None"], Results]


def compute(plan: Plan, what: Any, run: Pass, operands: Operands, may_copy: int) -> Results:
    """A pass by a plan, replayed where it can be; the third call like it is recorded.

    Args:
        plan: what the pass is computed by.
        what: names the pass among the plan's.
        run: the pass in Python, of the plan and the operands.
        operands: its three operands.
        may_copy: the index of the operand that may be copied to be dense; -1 for none.
    """
    a, b, c = operands
    if weights.frozen and (weights.is_frozen(b) or (c is not None and weights.is_frozen(c))):
        # A tape packs; the pass in Python reads the copy.
        return run(plan, a, b, c)
    key = (what, a.stride(), b.stride(), b.dtype, c if c is None else (c.stride(), c.dtype), a.get_device())
    held = replays.recorded(plan).get(key, 0)
    if type(held) is not int and held is not replays.NEVER:
        found: Results | None = native.module().play(held, a, b, c, may_copy)
        if found is not None:
            return found
    result = run(plan, a, b, c)
    if type(held) is int and replays.hoped and not engine._collectors:
        module, name = replays.recorder(), f"a compiled graph's pass of {plan.problem}"
        if module is not None:
            replays.counted(
                plan, key, lambda: replays.layer(module, plan, name, lambda given: run(plan, *given), operands)
            )
    return result
