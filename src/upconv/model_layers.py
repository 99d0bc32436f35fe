"""The transposed convolutions that a model calls on an input, found without computing anything where that is possible.

The model runs once on the meta device, where tensors have shapes and no values. A model whose forward needs values runs
on the CPU instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from upconv import dispatch
from upconv.cpu import memory_format
from upconv.problem import Layout, Problem


class Call(NamedTuple):
    """A transposed convolution that a model calls."""

    name: str
    """The module that calls it, by its name in the model."""
    problem: Problem
    """Its forward, in the dtype and layout that it gets."""
    times: int
    """How often this module calls it with this input."""


def calls(
    make: Callable[[], nn.Module], shapes: Sequence[Sequence[int]], dtype: torch.dtype, layout: Layout = "nchw"
) -> list[Call]:
    """The transposed convolutions of a model's forward in eval mode, in the order of their first calls.

        calls(lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 2, 2)), [(1, 3, 16, 16)], torch.float32)

    Args:
        make: makes the model; called again where the first one did not run. A model that it gives stays as it is.
        shapes: of the model's arguments, in order; all are floating-point tensors.
        dtype: of weights and arguments.
        layout: of weights and of the arguments with the most dimensions.

    Raises:
        ValueError: the model does not run on these arguments; in one sentence. Errors of ``make`` pass through.
    """
    try:
        return _run(copy.deepcopy(make()), shapes, dtype, layout, "meta")
    except Exception:  # it needs values, or an operator that the meta device lacks
        network = make()
    try:
        return _run(copy.deepcopy(network), shapes, dtype, layout, "cpu")
    except Exception as error:  # whatever the user's code raises
        given = ", ".join("x".join(map(str, shape)) for shape in shapes)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"the model does not run on {given}: {reason}") from error


def _run(
    network: nn.Module, shapes: Sequence[Sequence[int]], dtype: torch.dtype, layout: Layout, device: str
) -> list[Call]:
    rank = max(len(shape) for shape in shapes) - 2
    order = memory_format(layout, rank)
    network = network.to(device, dtype).eval()
    for module in network.modules():
        if type(module).__module__.startswith("upconv."):  # on a CPU its engines call no transposed convolution
            module.__class__ = next(cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn."))
    if order is not torch.contiguous_format:
        network = network.to(memory_format=order)  # type: ignore[call-overload]
    given = [torch.zeros(tuple(shape), dtype=dtype, device=device) for shape in shapes]
    given = [t.contiguous(memory_format=order) if t.dim() == rank + 2 else t for t in given]
    with _named(network) as stack, torch.device(device), torch.no_grad(), _Collector(stack) as found:
        network(*given)
    return [Call(name, problem, times) for (name, problem), times in found.calls.items()]


@contextmanager
def _named(network: nn.Module) -> Iterator[list[str]]:
    """The names of the modules whose forward runs, the innermost last."""
    stack: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    def leave(*_: object) -> None:
        stack.pop()

    hooks = []
    for name, module in network.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(name or "(the model itself)"), prepend=True))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


class _Collector(TorchDispatchMode):
    """Counts calls of ATen's transposed convolution, whoever makes them: a module or a function.

    On the meta device it also does two things that a real device does and that one leaves out. It refuses a transposed
    convolution whose tensors do not fit, and gives results of convolutions in channels_last where PyTorch does.
    """

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.stack = stack
        self.calls: dict[tuple[str, Problem], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.convolution.default:
            return out
        if args[6]:
            if out.is_meta:
                _check(args[0], args[1], args[2], args[8])
            key = self.stack[-1] if self.stack else "(the model itself)", _problem(*args)
            self.calls[key] = self.calls.get(key, 0) + 1
        layout = dispatch.layout_of(args[0], args[1])
        return out.contiguous(memory_format=memory_format(layout, out.dim() - 2)) if out.is_meta else out


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: int) -> None:
    """Raises where PyTorch does on other devices; on a CPU, which runs next, it then says what does not fit."""
    channels = weight.shape[1] * groups
    if x.shape[1] != weight.shape[0] or weight.shape[0] % groups or (bias is not None and bias.shape != (channels,)):
        raise ValueError("the channels of a transposed convolution's tensors do not fit each other")


def _problem(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Problem:
    batch, channels, *size = x.shape
    last = memory_format("channels_last", len(size))
    layout: Layout = "channels_last" if not x.is_contiguous() and x.is_contiguous(memory_format=last) else "nchw"
    return Problem.make(
        batch, channels, weight.shape[1] * groups, size, tuple(weight.shape[2:]), tuple(stride), tuple(padding),
        tuple(output_padding), tuple(dilation), groups, bias=bias is not None, dtype=x.dtype, layout=layout,
    )  # fmt: skip
