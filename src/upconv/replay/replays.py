"""Calls of training that are replayed without Python once their passes are recorded.

A layer's call under autograd that is made again and again is first computed in Python. When the module of
`upconv.replay.native` is there, its forward is recorded (`upconv.cuda.recording`), and from the next call on the module
recognises it and does what it did, as one autograd function in C++; its gradients are recorded when they are first
asked for. Most of a small layer's host time in a training step is the Function in Python and the Python around its
launches.

A call that a recording does not fit (``native.cpp``) stays in Python. A recording does what the pass in Python did,
kernel by kernel, so that results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from upconv import cpu
from upconv.cuda import engine, weights
from upconv.cuda.gpu import capturing
from upconv.cuda.recording import Recording, Unrecorded
from upconv.planner import Plan
from upconv.replay import calls, native
from upconv.replay.calls import Arguments, Operands, Operation

Results = Sequence["Tensor | None"]

CALLS = 3
"""Of a training call, which is recorded with the last of them."""

host: Any = None
"""The module, once a call is recorded. Its ``replay`` is asked before anything else, but where a graph is compiled or
`engine.collecting` wants to know of calls: it gives the recorded result of a call that it knows."""
hoped = True
"""Whether there may be a module in this process."""


def forget() -> None:
    """Drops what is known of calls; Python computes each once more. What is `recorded` stays."""
    if host is not None:
        host.forget()


@lru_cache(maxsize=4096)
def recorded(holder: Any) -> dict[Any, Any]:
    """What is known of the calls of a plan or a convolution, by what tells them apart; of those used last.

    A value is the number of calls like it, or what replays them, or `NEVER`.
    """
    return {}


def offer(operation: Operation, given: Operands, arguments: Arguments) -> None:
    """Told of each training call that Python computes; the third like it is recorded, if the module is there.

    Args:
        operation: what computes it, hashable.
        given: input, weight and bias as the caller gave them.
        arguments: the call's others, as the caller gave them.
    """
    global host
    input, weight, bias = given
    if not weight.requires_grad or not calls.lasting(arguments):
        return  # only layers that are trained are recorded
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if engine._collectors or any(calls.unwrapped(t) is not t for t in tensors) or weights.is_frozen(weight):
        return
    if any(t.data_ptr() % 16 for t in tensors):
        return  # which no replay takes
    kind = "cuda" if input.is_cuda else "cpu"
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if autocast is not None and input.dtype is torch.float64:
        return  # which autocast leaves as it is
    module = recorder()
    if module is None:
        return
    key = (autocast, weight.dtype, arguments, *((t.stride(), t.requires_grad) for t in tensors), input.get_device())
    found = counted(operation, key, lambda: _recorded(module, operation, given, autocast))
    if found is not None:
        p = operation.plan.problem
        precision = _PRECISIONS[p.precision] if p.dtype is torch.float32 and input.is_cuda else 0
        module.note(operation.plain, found, precision, input, weight, bias, *arguments)
        host = module


def recorder() -> Any:
    """The module; None where there is none, or where nothing is to be recorded now."""
    global hoped
    module = native.module()
    if module is None:
        hoped = not native.hopeless()
        return None
    return None if capturing() else module  # what is captured does without what outlives it


def counted(holder: Any, key: Any, record: Callable[[], Any]) -> Any:
    """Counts a call, and records the last of `CALLS`; what replays calls like it, None while there is nothing."""
    known = recorded(holder)
    found = known.get(key, 0)
    if type(found) is int:
        found = known[key] = found + 1 if found < CALLS - 1 else record() or NEVER
    return None if type(found) is int or found is NEVER else found


NEVER = object()
"""In the place of what replays calls that cannot be replayed."""
_PRECISIONS = {"ieee": 1, "tf32": 2}


def _recorded(module: Any, operation: Operation, given: Operands, autocast: torch.dtype | None) -> Any:
    """A ``Layer`` for a call that is made with these operands; None where its forward cannot be repeated."""
    input, weight, bias = given
    if not operation.loaded(input.get_device()):
        return None
    x = input if autocast is None else input.to(autocast)
    plan, call_back = operation.plan, _Gradients(operation)
    what, operands = f"the forward of {plan.problem}", (x, weight, bias)

    def compute() -> Results:
        return (operation.forward(x, weight, bias),)

    return layer(module, plan, what, operands, compute, autocast, bias is not None, call_back)


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
