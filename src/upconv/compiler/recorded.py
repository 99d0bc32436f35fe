"""Calls of compiled graphs, replayed by the C++ module once their passes are recorded.

`upconv.replay.replays` has those outside of graphs, and says what can be recorded. What is recorded here allocates
nothing that outlives a call, since the memory pool of a captured graph does not allow it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from upconv.cuda import engine, weights
from upconv.planner import Plan
from upconv.replay import native, replays
from upconv.replay.calls import Operands
from upconv.replay.replays import Results

Mask = tuple[bool, bool, bool]


def compute(plan: Plan, mask: Mask | None, operands: Operands) -> Results:
    """A pass by a plan, replayed where it can be; the third call like it is recorded.

    Args:
        plan: what the pass is computed by.
        mask: the gradients that are asked for; None for the forward.
        operands: input, weight and bias, or the output's gradient, input and weight.
    """
    a, b, c = operands

    def run() -> Results:
        if mask is None:
            return (engine.forward(plan, a, b, c, lasting=False),)
        assert c is not None
        return engine.gradients(plan, a, b, c, mask, lasting=False)

    if weights.frozen and (weights.is_frozen(b) or (c is not None and weights.is_frozen(c))):
        return run()  # a recording packs, and the pass in Python reads the copy
    held = _held(
        plan, mask, a.stride(), b.stride(), b.dtype, None if c is None else (c.stride(), c.dtype), a.get_device()
    )
    if held.layer is not None and held.layer is not replays.NEVER:
        found = native.module().run(held.layer, a, b, c)
        return run() if found is None else (found,) if mask is None else found
    if held.layer is None and replays.hoped and not engine._collectors:
        held.calls += 1
        module = replays.recorder(operands)
        if module is not None and held.calls >= replays.CALLS:
            what = f"a compiled graph's pass of {plan.problem}"
            found, held.layer = replays.layer_of(module, plan, what, operands, run)
            return found
    return run()


class _Held:
    """Of calls that are alike how many there were, and what replays them."""

    __slots__ = ("calls", "layer")

    def __init__(self, *described: Any) -> None:
        self.calls = 0
        self.layer: Any = None


_held = lru_cache(maxsize=4096)(_Held)
"""That of a call that was described so before, of those used last."""
