"""The modules that a model calls, call by call: what `upconv.summary` and ``upconv explain --model`` describe."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from upconv import convert
from upconv.problem import Layout, Problem

Said = TypeVar("Said")


def described(
    listed: Sequence[tuple[str, nn.Module]], describe: Callable[[Any, Sequence[Any]], Said], run: Callable[[], object]
) -> dict[str, Counter[Said]]:
    """What is said of the calls that each listed module gets during ``run``, counted.

    ``describe`` gets the module, its input and its ``output_size``, as far as they are given.
    """
    calls: dict[str, Counter[Said]] = {name: Counter() for name, _ in listed}

    def noting(name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = (*args, *(kwargs[key] for key in ("input", "output_size") if key in kwargs))
            if given:  # else the forward says what is missing
                calls[name][describe(module, given)] += 1

        return hook

    with ExitStack() as stack:
        for name, module in listed:
            stack.callback(module.register_forward_pre_hook(noting(name), with_kwargs=True).remove)
        if "torch._dynamo" in sys.modules:  # a graph of a compiled model would have the hooks in it, or refuse them
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        run()
    return calls


def output_padding(module: Any, given: Sequence[Any]) -> Any:
    """The ``output_padding`` of a transposed convolution's call, which an ``output_size`` may decide."""
    x, size = given[0], given[1] if len(given) > 1 else None
    rank = len(module.kernel_size)
    return module._output_padding(x, size, module.stride, module.padding, module.kernel_size, rank, module.dilation)


# --- without computing -----------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A transposed convolution that a model calls."""

    name: str
    """The module's name in the model; all its names, where it has several."""
    problem: Problem
    times: int
    """How often this module is called with this input."""


def calls(
    make: Callable[[], nn.Module], shapes: Sequence[Sequence[int]], dtype: torch.dtype, layout: Layout = "nchw"
) -> list[Call]:
    """The transposed convolutions of a model's forward in eval mode.

        calls(lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 2, 2)), [(1, 3, 16, 16)], torch.float32)

    The model runs once on the meta device, where tensors have shapes and no values; where it needs values, on the CPU.

    Args:
        make: makes the model; called again where the first one did not run. A model that it gives stays as it is.
        shapes: of the model's arguments, in order; all are floating-point tensors.
        dtype: of weights and arguments.
        layout: that of all layers of two and three dimensions.

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
    network = network.to(device, dtype).eval()
    given = [torch.zeros(tuple(shape), dtype=dtype, device=device) for shape in shapes]
    listed = [(" = ".join(names), module) for names, module in convert.modules_of(network, _ConvTransposeNd)]

    def problem(module: Any, given: Sequence[Any]) -> Problem:
        x, rank = given[0], len(module.kernel_size)
        batch, channels, *size = x.shape if x.dim() == rank + 2 else (1, *x.shape)
        if x.is_meta and channels != module.in_channels:  # which the meta device lets pass; the CPU says what is wrong
            raise ValueError("the input's channels are not the layer's")
        return Problem.make(
            batch, module.in_channels, module.out_channels, size, module.kernel_size, module.stride, module.padding,
            output_padding(module, given), module.dilation, module.groups, bias=module.bias is not None, dtype=x.dtype,
            layout=layout if rank > 1 else "nchw",
        )  # fmt: skip

    with torch.device(device), torch.no_grad():
        found = described(listed, problem, lambda: network(*given))
    return [Call(name, one, times) for name, counted in found.items() for one, times in counted.items()]
