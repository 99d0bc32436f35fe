"""Recorded calls of training, replayed without Python once their passes are on tape.

A layer's call under autograd that is made again and again (`upconv.calls`) is first computed in Python. When the module
of `upconv.cuda.native` is there, its forward is recorded (`upconv.cuda.tape`), and from the next call on one autograd
function in C++ does what it did; its gradients are recorded when they are first asked for. NOTES: of a layer's host
time in a training step whose caches are cold, 200 us of forward and backward, half is a Function in Python and 90 are
the Python around its launches.

What cannot be recorded (passes that copy operands, or leave a gradient to PyTorch) stays in Python, and so does each
call that a tape does not fit (``native.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from upconv import calls, cpu
from upconv.cuda import engine, jit, native, tape
from upconv.cuda.gpu import current_device

Backward = Callable[..., "tuple[Tensor | None, Tensor | None, Tensor | None]"]
"""The gradients for input, weight and bias: of a plan, the output's gradient, the input, the weight and a mask."""


def of(call: calls.Call[Any], backward: Backward) -> calls.Replay | None:
    """What a call asks first; None where it is not recorded: without a weight's gradient, or off the GPU."""
    if not call.differentiable or not call.on_cuda:
        return None
    return Pending(call, backward)


class Pending:
    """Asked until the module is there; then records the call, and gives its place to what replays it."""

    def __init__(self, call: calls.Call[Any], backward: Backward) -> None:
        self._call, self._backward = call, backward

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """None: the call is computed in Python once more."""
        host = native.module()
        if host is not None:
            self._call.replay = recorded(host, self._call, self._backward, input, weight, bias)
        elif native.hopeless():
            self._call.replay = None
        return None


def recorded(
    host: Any, call: calls.Call[Any], backward: Backward, input: Tensor, weight: Tensor, bias: Tensor | None
) -> calls.Replay | None:
    """What replays a call that is made with these operands; None where its forward is no tape."""
    plan = call.plan
    if not weight.requires_grad:  # whose packed weights are kept from call to call
        return None
    index = input.get_device()
    if plan.runners.get(index) is None or current_device() != index:
        return None
    x = input if call.autocast is None else _like(input, call.autocast)

    def forward(given: Sequence[Tensor]) -> list[Tensor]:
        return [engine.forward(plan, given[0], given[1], given[2], keep=False)]

    with torch.no_grad():
        found = _tape(str(plan.problem), forward, (x, weight, bias), weight, host)
    if found is None:
        return None
    driver = jit._driver()
    context = int(jit._drive(driver.cuDevicePrimaryCtxRetain, jit._drive(driver.cuDeviceGet, index)))
    last = plan.problem.layout == "channels_last"
    layer = host.Layer(index, context, call.autocast, last, found, _Gradients(host, plan, backward))
    replay: calls.Replay = layer.forward
    return replay


def _like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast's copy of a tensor lies."""
    return torch.empty_like(t, dtype=dtype, device="meta")


def _tape(what: str, run: tape.Pass, operands: Sequence[Tensor | None], like: Tensor, host: Any) -> bytes | None:
    """A pass as the module takes it; None where it cannot be recorded. ``like``: a tensor on its device."""
    try:
        return tape.record(run, operands, like, host.blob).packed(host.number)
    except tape.NoTape as reason:
        jit._tell(f"native: {what} stays in Python: {reason}")
    except Exception as error:  # whatever a dry run meets, the pass itself was computed
        jit._tell(f"native: {what} stays in Python: {type(error).__name__}: {error}")
    return None


class _Gradients:
    """What the module calls for gradients that no tape is for, or that do not fit it; with what records them."""

    def __init__(self, host: Any, plan: Any, backward: Backward) -> None:
        self._host, self._plan, self._backward = host, plan, backward

    def __call__(self, grad: Tensor, input: Tensor, weight: Tensor, mask: int, wanted: bool) -> tuple[Any, ...]:
        """The gradients for input, weight and bias that the bits of ``mask`` ask for; and their tape, if ``wanted``."""
        asked = [bool(mask >> i & 1) for i in range(3)]
        found = self._backward(self._plan, grad, input, weight, asked)
        return (*found, self._recorded(input, weight, asked) if wanted else None)

    def _recorded(self, input: Tensor, weight: Tensor, asked: Sequence[bool]) -> bytes | None:
        p = self._plan.problem
        strides = cpu.dense_strides(p.output_shape, cpu.memory_format(p.layout, p.rank))
        grad = torch.empty_strided(p.output_shape, strides, dtype=input.dtype, device="meta")

        def gradients(given: Sequence[Tensor]) -> Sequence[Tensor | None]:
            return engine.gradients(self._plan, given[0], given[1], given[2], asked)

        with torch.no_grad():
            what = f"the gradients {_named(asked)} of {p}"
            return _tape(what, gradients, (grad, input, weight), weight, self._host)


def _named(asked: Sequence[bool]) -> str:
    names = zip(("input", "weight", "bias"), asked)
    return "for " + " and ".join(name for name, wanted in names if wanted)
