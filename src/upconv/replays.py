"""Recorded calls of training, replayed without Python once their passes are on tape.

A layer's call under autograd that is made again and again (`upconv.calls`) is first computed in Python. When the module
of `upconv.cuda.native` is there, its forward is recorded (`upconv.cuda.tape`), and from the next call on one autograd
function in C++ does what it did; its gradients are recorded when they are first asked for. NOTES: of a layer's host
time in a training step whose caches are cold, 200 us of forward and backward, half is a Function in Python and 90 are
the Python around its launches.

What cannot be recorded (passes that copy operands, or leave a gradient to PyTorch) stays in Python, and so does each
call that a tape does not fit (``native.cpp``). A tape does what the pass in Python does, kernel by kernel, so that
results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from upconv import calls, cpu
from upconv.cuda import jit, native, tape
from upconv.cuda.gpu import current_device
from upconv.planner import Plan

Gradients = tuple["Tensor | None", "Tensor | None", "Tensor | None"]
"""For input, weight and bias."""


class Passes(Protocol):
    """What a recorded call computes: a transposed convolution, or a plain one."""

    plan: Plan
    result: tuple[int, ...]
    """The shape of its result, which lies in the layout of the plan's problem."""

    def loaded(self, index: int) -> bool:
        """Whether the forward's kernels are, on a device."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """By our kernels, keeping nothing: on the current stream, without autograd."""

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        """As `forward`, those that ``mask`` asks for; ``grad`` is dense."""

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        """The same in every state of autograd, autocast and functorch that a backward may run in."""


def of(call: calls.Call[Any], passes: Passes) -> calls.Replay | None:
    """What a call asks first; None where it is not recorded: without gradients, or off the GPU."""
    return Pending(call, passes) if call.differentiable and call.on_cuda else None


class Pending:
    """Asked until the module is there; then records the call, and gives its place to what replays it."""

    def __init__(self, call: calls.Call[Any], passes: Passes) -> None:
        self._call, self._passes = call, passes

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """None: the call is computed in Python once more."""
        host = native.module()
        if host is not None:
            self._call.replay = recorded(host, self._call, self._passes, input, weight, bias)
        elif native.hopeless():
            self._call.replay = None
        return None


def recorded(
    host: Any, call: calls.Call[Any], passes: Passes, input: Tensor, weight: Tensor, bias: Tensor | None
) -> calls.Replay | None:
    """What replays a call that is made with these operands; None where its forward is no tape."""
    index, p = input.get_device(), passes.plan.problem
    # Without a weight's gradient its packed weights are kept from call to call.
    if not weight.requires_grad or not passes.loaded(index) or current_device() != index:
        return None
    x = input if call.autocast is None else torch.empty_like(input, dtype=call.autocast, device="meta")
    with torch.no_grad():
        found = _tape(
            f"the forward of {p}", lambda given: [passes.forward(*given)], (x, weight, bias), weight, host
        )  # fmt: skip
    if found is None:
        return None
    driver = jit._driver()
    context = int(jit._drive(driver.cuDevicePrimaryCtxRetain, jit._drive(driver.cuDeviceGet, index)))
    last = p.layout == "channels_last"
    layer = host.Layer(index, context, call.autocast, last, bias is not None, found, _Gradients(host, passes))
    replay: calls.Replay = layer.forward
    return replay


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

    def __init__(self, host: Any, passes: Passes) -> None:
        self._host, self._passes = host, passes

    def __call__(self, grad: Tensor, input: Tensor, weight: Tensor, mask: int, wanted: bool) -> tuple[Any, ...]:
        """The gradients for input, weight and bias that the bits of ``mask`` ask for; and their tape, if ``wanted``."""
        asked = [bool(mask >> i & 1) for i in range(3)]
        found = self._passes.backward(grad, input, weight, asked)
        return (*found, self._recorded(input, weight, asked) if wanted else None)

    def _recorded(self, input: Tensor, weight: Tensor, asked: Sequence[bool]) -> bytes | None:
        p, shape = self._passes.plan.problem, self._passes.result
        strides = cpu.dense_strides(shape, cpu.memory_format(p.layout, p.rank))
        grad = torch.empty_strided(shape, strides, dtype=input.dtype, device="meta")
        with torch.no_grad():
            return _tape(
                f"the gradients {_named(asked)} of {p}",
                lambda given: self._passes.gradients(given[0], given[1], given[2], asked),
                (grad, input, weight),
                weight,
                self._host,
            )


def _named(asked: Sequence[bool]) -> str:
    names = zip(("input", "weight", "bias"), asked)
    return "for " + " and ".join(name for name, wanted in names if wanted)
