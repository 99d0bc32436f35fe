"""Calls of compiled graphs, replayed by the C++ module once their passes are recorded.

`upconv.replay.replays` has those outside of graphs, and says what can be recorded. What is recorded here allocates
nothing that outlives a call, since the memory pool of a captured graph does not allow it.

Most calls of a graph are those that it made before. `replayed` recognises them by PyTorch's own guards, as
`upconv.replay.calls` does outside of graphs, before a plan is looked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from upconv import refusals
from upconv.cuda import engine, weights
from upconv.planner import Plan
from upconv.replay import calls, native, replays
from upconv.replay.calls import Guarded, Operands
from upconv.replay.replays import Results


class _Known(Guarded):
    """Operands of a graph's call, and what replays it."""

    __slots__ = ("layer",)

    def __init__(self, plan: Plan, operands: list[Tensor], layer: Any) -> None:
        super().__init__(operands, plan.problem.dtype, plan.problem.layout != "nchw")
        self.layer = layer


class _Seen:
    """What is remembered of calls with operands of some shapes: those noted last, and how many were noted."""

    __slots__ = ("known", "made")

    def __init__(self) -> None:
        self.known: tuple[_Known, ...] = ()
        self.made = 0


_seen: dict[tuple[Any, ...], _Seen] = {}
calls.at_forget(_seen.clear)


def _key(text: str, mask: int, a: Tensor, b: Tensor, c: Tensor | None) -> tuple[Any, ...]:
    return text, mask, a.shape, b.shape, c is None


def _watched(weight: Tensor) -> bool:
    """Whether a call depends on what no guard sees: a promise that its weight stays, a warm-up, `refusals.strict`."""
    return bool(engine._collectors or refusals.active or (weights.frozen and weights.is_frozen(weight)))


def replayed(text: str, mask: int, a: Tensor, b: Tensor, c: Tensor | None) -> Any:
    """The result of a pass that was made before, or a tuple of its gradients; None where it must be looked at.

    The guards see transforms, modes and subclasses of Tensor. Whether the call itself must be differentiable is for the
    caller to see.

    Args:
        text: the arguments of the operator.
        mask: the gradients that are asked for, in bits; 0 for the forward.
        a: the input, or the output's gradient.
        b: the weight, or the input.
        c: the bias, or the weight.
    """
    seen = _seen.get(_key(text, mask, a, b, c))
    if seen is None or _watched(c if mask and c is not None else b):
        return None
    for known in seen.known:
        if known.fits(a, b) if c is None else known.fits(a, b, c):
            return native.module().run(known.layer, a, b, c)
    return None


def _note(key: tuple[Any, ...], plan: Plan, operands: Operands, layer: Any) -> None:
    if calls.GUARDS is None or engine._collectors or refusals.active:
        return
    if key not in _seen and len(_seen) >= calls.MOST:
        _seen.clear()
    seen = _seen.setdefault(key, _Seen())
    if seen.made < calls.MOST_GUARDS:
        tensors = [t for t in operands if t is not None]
        seen.known = (_Known(plan, tensors, layer), *seen.known[: calls.MOST_CALLS - 1])
        seen.made += 1


def compute(plan: Plan, mask: int, operands: Operands, text: str | None = None) -> Results:
    """A pass by a plan, replayed where it can be; the third call like it is recorded.

    Args:
        plan: what the pass is computed by.
        mask: the gradients that are asked for, in bits; 0 for the forward.
        operands: input, weight and bias, or the output's gradient, input and weight.
        text: the arguments of the operator, by which `replayed` finds the call from then on; None where its results
            are changed later.
    """
    a, b, c = operands

    def run() -> Results:
        if not mask:
            return (engine.forward(plan, a, b, c, lasting=False),)
        assert c is not None
        return engine.gradients(plan, a, b, c, (bool(mask & 1), bool(mask & 2), False), lasting=False)

    if weights.frozen and (weights.is_frozen(b) or (c is not None and weights.is_frozen(c))):
        return run()  # a recording packs, and the pass in Python reads the copy
    held = _held(
        plan, mask, a.stride(), b.stride(), b.dtype, None if c is None else (c.stride(), c.dtype), a.get_device()
    )
    if held.layer is not None and held.layer is not replays.NEVER:
        found = native.module().run(held.layer, a, b, c)
        if found is not None and text is not None:
            _note(_key(text, mask, a, b, c), plan, operands, held.layer)
        return run() if found is None else found if mask else (found,)
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
calls.at_forget(lambda: _held.cache_clear())
