"""Calls of training that are replayed without Python once their passes are recorded.

A training call that is recognised (`upconv.replay.calls`) is computed in Python once more, and its forward is recorded
meanwhile (`upconv.cuda.recording`), if the module of `upconv.replay.native` is there. From then on the module does what
the pass did, as one autograd function in C++; its gradients are recorded when they are first asked for. Most of a small
layer's host time in a training step is the Function in Python and the Python around its launches.

A call that a recording does not fit (``native.cpp``) stays in Python. A recording does what the pass in Python did,
kernel by kernel, so that results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from upconv import cpu
from upconv.cuda import engine, weights
from upconv.cuda.gpu import capturing
from upconv.cuda.recording import Recording, Unrecorded
from upconv.planner import Plan
from upconv.replay import calls, native
from upconv.replay.calls import Call, Operands, Operation

Results = Sequence["Tensor | None"]

CALLS = 3
"""Of a call, which is recorded with the last of them: the first two are noted (`calls.remember`)."""
hoped = True
"""Whether there may be a module in this process."""
NEVER = object()
"""In the place of what replays a pass that cannot be replayed."""


def replayed(known: Call, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The result of a training call that is known; None where Python must compute it, which the first time records it.

    Whoever computes a frozen weight's gradient ends the promise, of which a replay knows nothing.
    """
    layer = known.replay
    if layer is NEVER or engine._collectors or (weights.frozen and weights.is_frozen(weight)):
        return None
    if layer is not None:
        out: Tensor | None = native.module().run(layer, input, weight, bias)
        return out
    tensors = (input, weight) if bias is None else (input, weight, bias)
    trained = weight.requires_grad and not any(calls.unwrapped(t) is not t or t.data_ptr() % 16 for t in tensors)
    # Autocast leaves float64 as it is.
    if trained and not (known.autocast and input.dtype is torch.float64) and (module := recorder()) is not None:
        known.replay = _recorded(module, known, (input, weight, bias)) or NEVER
    return None


def recorder() -> Any:
    """The module; None where there is none, or where nothing is to be recorded now."""
    global hoped
    module = native.module()
    if module is None:
        hoped = not native.hopeless()
        return None
    return None if capturing() else module  # what is captured does without what outlives it


def _recorded(module: Any, known: Call, given: Operands) -> Any:
    """A ``Layer`` for a call that is made with these operands; None where its forward cannot be repeated."""
    input, weight, bias = given
    operation, x = known.operation, input if known.autocast is None else input.to(known.autocast)
    what, operands = f"the forward of {operation.plan.problem}", (x, weight, bias)

    def compute() -> Results:
        return (operation.forward(x, weight, bias),)

    return layer(
        module, operation.plan, what, operands, compute, known.autocast, bias is not None, _Gradients(operation)
    )


def layer(
    module: Any,
    plan: Plan,
    what: str,
    operands: tuple[Tensor, Tensor, Tensor | None],
    compute: Callable[[], Results],
    autocast: torch.dtype | None = None,
    biased: bool = False,
    call_back: Callable[..., Any] | None = None,
) -> Any:
    """A ``Layer`` that replays a pass by a plan, which is computed once more; None for one that cannot be repeated.

    ``operands``: the pass's, the second on its device. The rest is ``native.cpp``'s.
    """
    index, last = operands[1].get_device(), plan.problem.layout == "channels_last"
    try:
        with torch.no_grad():
            _, found = recording_of(what, operands, compute)
    except Exception as error:  # whatever it is, the call itself meets it too
        tell(f"native: {what} stays in Python: {type(error).__name__}: {error}")
        return None
    return found and module.Layer(index, _context(index), autocast, last, biased, found, call_back)


def _context(index: int) -> int:
    """A device's primary context, for a thread in which PyTorch has called nothing yet; 0 where there is none."""
    from upconv.cuda.compile import driver

    try:
        return int(driver.context(index))
    except Exception:  # each release of the bindings has its own for a driver that is not there
        return 0


def recording_of(
    what: str, operands: Sequence[Tensor | None], compute: Callable[[], Results]
) -> tuple[Results, tuple[Any, ...] | None]:
    """The results of a pass on operands, and what the module repeats; None where it cannot be repeated."""
    with Recording(operands) as to:
        results = compute()
    try:
        return results, to.repeatable(results)
    except Unrecorded as reason:
        tell(f"native: {what} stays in Python: {reason}")
        return results, None


class _Gradients:
    """What the module calls for gradients that no recording is for, or that do not fit it; with what records them."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def __call__(self, grad: Tensor, input: Tensor, weight: Tensor, mask: int, wanted: bool) -> tuple[Any, ...]:
        """The gradients that the bits of ``mask`` ask for, of input, weight and bias; if ``wanted`` their recording."""
        asked = [bool(mask >> i & 1) for i in range(3)]
        if not wanted:
            return (*self._operation.backward(grad, input, weight, asked), None)
        p = self._operation.plan.problem
        grad = grad.contiguous(memory_format=cpu.memory_format(p.layout, p.rank))  # as the module makes others
        what = f"the gradients {_named(asked)} of {p}"

        def compute() -> Results:
            return self._operation.gradients(grad, input, weight, asked)

        with torch.autocast("cuda" if grad.is_cuda else "cpu", enabled=False):
            found, recording = recording_of(what, (grad, input, weight), compute)
        return (*found, recording)


def tell(line: str) -> None:
    from upconv.cuda.compile import jit  # which a CPU's calls do without

    jit.tell(line)


def _named(asked: Sequence[bool]) -> str:
    names = zip(("input", "weight", "bias"), asked)
    return "for " + " and ".join(name for name, wanted in names if wanted)
