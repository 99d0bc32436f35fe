"""Calls that are replayed without Python once their passes are recorded.

A call that is recognised (`upconv.replay.calls`) is computed in Python once more, and its forward is recorded meanwhile
(`upconv.cuda.recording`), if the module of `upconv.replay.native` is there. From then on the module does what the pass
did, in training as one autograd function in C++; its gradients are recorded when they are first asked for. Most of a
small layer's host time is the Python around its launches.

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
from upconv.cuda.compile import cache
from upconv.cuda.gpu import capturing
from upconv.cuda.recording import Recording, Unrecorded
from upconv.planner import Plan
from upconv.replay import native
from upconv.replay.calls import Call, Operands, Operation

Results = Sequence["Tensor | None"]

CALLS = 3
"""Of a call, which is recorded with the last of them: the first two are noted (`calls.remember`)."""
hoped = True
"""Whether there may be a module in this process."""
NEVER = object()
"""In the place of what replays a pass that cannot be replayed."""


def replayed(known: Call, input: Tensor, weight: Tensor, bias: Tensor | None, training: bool) -> Tensor | None:
    """The result of a call that is known; None where Python must compute it.

    ``training``: whether its gradients are recorded. Whoever computes a frozen weight's gradient ends the promise, of
    which a replay knows nothing. Other calls of a frozen weight are replayed with its packed copy in its place, which
    Python looks for each time: no recording holds it. Where the kernel reads weights as they are, none is kept.
    """
    if engine._collectors:
        return None
    operation = known.operation if training else known.inference
    slot, read = int(training), weight
    kept = weights.frozen and (training or known.runner is not False)
    if kept and (entry := weights.held(weight)) is not None:
        if training or capturing():
            return None
        runner = known.runner or operation.runner(weight.get_device())  # another thread may note that none is needed
        copy = runner.kept(entry, weight, makes=False) if runner else weight
        if copy is None:  # the call in Python makes it
            return None
        known.runner = False if copy is weight else runner
        if copy is not weight:
            slot, read = 2, copy
    layer = known.layers[slot]
    if layer is NEVER:
        return None
    if layer is not None:
        out: Tensor | None = native.module().run(layer, input, read, bias)
        return out
    x = input if known.autocast is None else input.to(known.autocast)
    operands = x, read, bias
    if (module := recorder(operands)) is None:
        return None

    def compute() -> Results:
        return (operation.forward(x, weight, bias),)

    what, gradients = f"the forward of {operation.plan.problem}", _gradients_of(operation)
    found, layer = layer_of(module, operation.plan, what, operands, compute, known.autocast, gradients)
    if slot == 2 and layer is NEVER and runner.kept(entry, weight, makes=False) is not copy:
        layer = None  # another thread dropped the copy, so that the call packed anew: a later one may be recorded
    known.layers[slot] = layer
    return None if training else found[0]


def recorder(operands: Sequence[Tensor | None]) -> Any:
    """The module, if a pass on these operands may be recorded now; else None.

    What is captured does without what outlives it. A pass copies operands that do not begin at 16 bytes, or takes other
    kernels, and a recording would do so for all.
    """
    global hoped
    module = native.module()
    if module is None:
        hoped = not native.hopeless()
        return None
    return None if capturing() or any(t is not None and t.data_ptr() % 16 for t in operands) else module


def layer_of(
    module: Any,
    plan: Plan,
    what: str,
    operands: Operands,
    compute: Callable[[], Results],
    autocast: torch.dtype | None = None,
    call_back: Callable[..., Any] | None = None,
) -> tuple[Results, Any]:
    """The results of a pass by a plan, and what replays it; `NEVER` for one that cannot be repeated.

    ``operands``: the pass's, the second on its device. The rest is ``native.cpp``'s. Errors: those of ``compute``.
    """
    index, last = operands[1].get_device(), plan.problem.layout == "channels_last"
    try:
        with torch.no_grad():
            results, found = recording_of(what, operands, compute)
        if found is None:
            return results, NEVER
        return results, module.layer(index, _context(index), autocast, last, operands[2] is not None, found, call_back)
    except torch.OutOfMemoryError:  # which may pass: a later call is recorded
        raise
    except Exception as error:  # the pass's, or of its recording
        cache.tell(f"native: {what} stays in Python: {type(error).__name__}: {error}")
        return compute(), NEVER


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
        cache.tell(f"native: {what} stays in Python: {reason}")
        return results, None


def _gradients_of(operation: Operation) -> Callable[..., tuple[Any, ...]]:
    """What the module calls for gradients that no recording is for, or that do not fit it; with what records them."""

    def gradients(grad: Tensor, input: Tensor, weight: Tensor, mask: int, wanted: bool) -> tuple[Any, ...]:
        """The gradients that the bits of ``mask`` ask for, of input, weight and bias; if ``wanted`` their recording.

        In its place None where nothing is recorded now, and False where they cannot be repeated.
        """
        asked = [bool(mask >> i & 1) for i in range(3)]
        p = operation.plan.problem
        if wanted:
            grad = grad.contiguous(memory_format=cpu.memory_format(p.layout, p.rank))  # as the module makes others
        if not wanted or recorder((grad, input, weight)) is None:
            return (*operation.backward(grad, input, weight, asked), None)
        named = " and ".join(name for name, one in zip(("input", "weight", "bias"), asked) if one)

        def compute() -> Results:
            return operation.gradients(grad, input, weight, asked)

        with torch.autocast("cuda" if grad.is_cuda else "cpu", enabled=False):
            found, recording = recording_of(f"the gradients for {named} of {p}", (grad, input, weight), compute)
        return (*found, recording or False)

    return gradients
