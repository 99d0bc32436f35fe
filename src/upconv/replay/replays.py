"""Recorded calls of training, replayed without Python once their passes are on tape.

A layer's call under autograd that is made again and again is first computed in Python. When the module of
`upconv.replay.native` is there, its forward is recorded (`upconv.replay.tape`), and from the next call on the module
recognises it and does what it did, as one autograd function in C++; its gradients are recorded when they are first
asked for. Most of a small layer's host time in a training step is the Function in Python and the Python around its
launches.

What cannot be recorded (passes that copy operands) stays in Python, and so does each call that a tape does not fit
(``native.cpp``); a pass of a plain convolution that is PyTorch's is a step of a tape. A tape does what the pass in
Python does, kernel by kernel, so that results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from upconv import cpu
from upconv.cuda import engine, weights
from upconv.cuda.compile import provisional
from upconv.planner import Plan
from upconv.replay import calls, native

if TYPE_CHECKING:
    from upconv.replay import tape

Gradients = tuple["Tensor | None", "Tensor | None", "Tensor | None"]
"""For input, weight and bias."""


class Passes(Protocol):
    """What a recorded call computes: a transposed convolution, or a plain one."""

    plan: Plan
    result: tuple[int, ...]
    """The shape of its result, which lies in the layout of the plan's problem."""

    def loaded(self, index: int) -> bool:
        """Whether the forward was computed on a device."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """By our kernels, keeping nothing: on the current stream, without autograd."""

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        """As `forward`, those that ``mask`` asks for; ``grad`` is dense."""

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        """The same in every state of autograd, autocast and functorch that a backward may run in."""


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

    A value is the number of calls like it, or what replays them, or `_NEVER`.
    """
    return {}


def offer(
    holder: Any,
    passes: Callable[[Any], Passes],
    plain: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arguments: tuple[Any, ...],
) -> None:
    """Told of each training call that Python computes; the third like it is recorded, if the module is there.

    Args:
        holder: what planned it, hashable.
        passes: what it computes, of the holder.
        plain: whether it is a plain convolution's.
        input, weight, bias: as the caller gave them.
        arguments: the rank, stride, padding, output_padding, groups and dilation, as the caller gave them.
    """
    global host, hoped
    if not weight.requires_grad or any(type(a) not in _IMMUTABLE for a in arguments):
        return  # only layers that are trained are recorded
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if engine._collectors or any(calls._unwrapped(t) is not t for t in tensors) or weights.is_frozen(weight):
        return
    kind = "cuda" if input.is_cuda else "cpu"
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if autocast is not None and input.dtype is torch.float64:
        return  # which autocast leaves as it is
    module = native.module()
    if module is None:
        hoped = not native.hopeless()
        return
    if provisional.pending():  # a tape has final kernels, and nobody is to wait for them here
        return
    if engine._capturing():  # passes that are captured do without what outlives them
        return
    key = (autocast, weight.dtype, arguments, *((t.stride(), t.requires_grad) for t in tensors), input.get_device())
    known = recorded(holder)
    found = known.get(key, 0)
    if type(found) is int:
        if found < CALLS - 1:
            known[key] = found + 1
            return
        found = known[key] = _recorded(module, passes(holder), input, weight, bias, autocast) or _NEVER
    if found is not _NEVER:
        p = passes(holder).plan.problem
        precision = _PRECISIONS[p.precision] if p.dtype is torch.float32 and input.is_cuda else 0
        module.note(plain, found, precision, input, weight, bias, *arguments)
        host = module


_IMMUTABLE = (int, tuple)
_NEVER = object()
_PRECISIONS = {"ieee": 1, "tf32": 2}


def _recorded(
    module: Any, passes: Passes, input: Tensor, weight: Tensor, bias: Tensor | None, autocast: torch.dtype | None
) -> Any:
    """A ``Layer`` for a call that is made with these operands; None where its forward is no tape."""
    index, p = input.get_device(), passes.plan.problem
    if not passes.loaded(index):
        return None
    x = input if autocast is None else torch.empty_like(input, dtype=autocast, device="meta")

    def forward(given: Sequence[Any]) -> list[Tensor]:
        return [passes.forward(given[0], given[1], given[2])]

    with torch.no_grad(), torch.autocast("cuda", enabled=False), _on(index):
        found = _tape(f"the forward of {p}", forward, (x, weight, bias), weight, module)
    if found is None:
        return None
    last = p.layout == "channels_last"
    return module.Layer(index, _context(index), autocast, last, bias is not None, found, _Gradients(module, passes))


def _context(index: int) -> int:
    """A device's primary context, for a thread in which PyTorch has called nothing yet; 0 where there is none."""
    from upconv.cuda.compile import jit

    try:
        driver = jit._driver()
        return int(jit._drive(driver.cuDevicePrimaryCtxRetain, jit._drive(driver.cuDeviceGet, index)))
    except Exception:  # each release of the bindings has its own for a driver that is not there
        return 0


def _on(index: int) -> AbstractContextManager[object]:
    return torch.cuda.device(index) if index >= 0 else nullcontext()


def _tape(what: str, run: tape.Pass, operands: Sequence[Tensor | None], like: Tensor, module: Any) -> bytes | None:
    """A pass as the module takes it; None where it cannot be recorded. ``like``: a tensor on its device."""
    from upconv.cuda.compile import jit
    from upconv.replay import tape

    try:
        return tape.record(run, operands, like, module.blob).packed(module.number)
    except tape.NoTape as reason:
        jit._tell(f"native: {what} stays in Python: {reason}")
    except Exception as error:  # whatever a dry run meets, the pass itself was computed
        jit._tell(f"native: {what} stays in Python: {type(error).__name__}: {error}")
    return None


class _Gradients:
    """What the module calls for gradients that no tape is for, or that do not fit it; with what records them."""

    def __init__(self, module: Any, passes: Passes) -> None:
        self._module, self._passes = module, passes

    def __call__(self, grad: Tensor, input: Tensor, weight: Tensor, mask: int, wanted: bool) -> tuple[Any, ...]:
        """The gradients for input, weight and bias that the bits of ``mask`` ask for; and their tape, if ``wanted``."""
        asked = [bool(mask >> i & 1) for i in range(3)]
        found = self._passes.backward(grad, input, weight, asked)
        return (*found, self._recorded(input, weight, asked) if wanted else None)

    def _recorded(self, input: Tensor, weight: Tensor, asked: Sequence[bool]) -> bytes | None:
        p, shape = self._passes.plan.problem, self._passes.result
        strides = cpu.dense_strides(shape, cpu.memory_format(p.layout, p.rank))
        grad = torch.empty_strided(shape, strides, dtype=input.dtype, device="meta")
        with torch.no_grad(), _on(weight.get_device()):
            return _tape(
                f"the gradients {_named(asked)} of {p}",
                lambda given: self._passes.gradients(given[0], given[1], given[2], asked),
                (grad, input, weight),
                weight,
                self._module,
            )


def _named(asked: Sequence[bool]) -> str:
    names = zip(("input", "weight", "bias"), asked)
    return "for " + " and ".join(name for name, wanted in names if wanted)
