"""An exported file against PyTorch and the library: outputs, gradients and times, by KernelBench's rules.

Source: KernelBench, src/eval.py and src/timing.py. Both layers have the same weights and run under the same flags.
Outputs of five random inputs must be within a tolerance, absolute and relative. Then each side has 100 timed runs, with
the L2 cache emptied ahead of each. KernelBench knows nothing of gradients: these are compared by norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import upconv
from upconv import reference
from upconv.bench.check import TOLERANCE, tolerance_used
from upconv.bench.timing import Repeats, Taken, clock, cudnn_clocks, interleave, precision_flags
from upconv.cpu import memory_format
from upconv.problem import Precision, Problem

GRADIENTS: dict[Precision, float] = {"tf32": 4e-3, "ieee": 1e-5, "fp16": 1e-2, "bf16": 2e-2, "fp64": 1e-9}
"""Largest norm of a gradient's difference from PyTorch's over its norm; both sides round."""
SEEDS = 5
RUNS = Repeats(0.0, 100, 100)


@dataclass(frozen=True)
class Comparison:
    """What a check found."""

    precision: Precision
    used: float
    """The largest `tolerance_used` of all outputs; at most 1 is right."""
    gradients: tuple[float, ...]
    """`reference.relative_error` of the gradients for input and weight; none of a forward alone."""
    taken: Taken
    """Seconds of ``ours`` (the file), ``torch``, ``tuned`` (``cudnn.benchmark``) and ``library``; none if wrong."""

    @property
    def failure(self) -> str | None:
        """What is wrong, in words."""
        limit = GRADIENTS[self.precision]
        if not self.used <= 1:
            tolerance = TOLERANCE[self.precision]
            return f"wrong: outputs differ from PyTorch's by {self.used:.3g} times the tolerance of {tolerance:g}"
        for name, error in zip(("input", "weight"), self.gradients):
            if not error <= limit:
                return f"wrong: the gradient for the {name} differs from PyTorch's by {error:.1e}, more than {limit:g}"
        return None


def load(source: str) -> dict[str, Any]:
    """The names that a file's text defines, by ``exec`` as KernelBench does it."""
    names: dict[str, Any] = {}
    exec(compile(source, "<exported>", "exec"), names)
    return names


def compare(
    source: str,
    p: Problem,
    attribute: str,
    arguments: Sequence[Any],
    device: torch.device,
    gradients: bool = True,
    flags: Precision | None = None,
) -> Comparison:
    """Compiles a file, compares its outputs and gradients with PyTorch's, and times it if they are right.

    Args:
        source: the file's text.
        p: the layer and the input to compare on; its precision is the file's, the gradients' and the library's.
        attribute: of ``ModelNew`` that holds the layer.
        arguments: what ``ModelNew`` is constructed with.
        device: a CUDA device.
        gradients: whether the file has them.
        flags: the precision that PyTorch's flags allow while outputs are compared and times taken; by default ``p``'s.

    Raises:
        RuntimeError: the file could not be compiled.
    """
    torch.manual_seed(42)
    ours: nn.Module = load(source)["ModelNew"](*arguments)
    ours = ours.to(device, p.dtype)
    layer: Any = getattr(ours, attribute)
    theirs: Any = getattr(nn, f"ConvTranspose{p.rank}d")(
        p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, p.output_padding, p.groups, p.bias, p.dilation
    ).to(device, p.dtype)
    theirs.load_state_dict(layer.state_dict())
    with precision_flags(flags or p.precision), torch.no_grad():
        used = max(_used(p, ours, theirs, _input(p, device, seed)) for seed in range(SEEDS))
    x, found = _input(p, device, SEEDS), tuple[float, ...]()
    if gradients:
        with precision_flags(p.precision):
            grad = torch.randn(p.output_shape, device=device, dtype=p.dtype)
            pairs = zip(*(_gradients(module, x, grad) for module in (ours, theirs)))
            found = tuple(reference.relative_error(a, b) for a, b in pairs)
    compared = Comparison(p.precision, used, found, {})
    if compared.failure is not None:
        return compared
    with precision_flags(flags or p.precision):
        return Comparison(p.precision, used, found, _taken(p, ours, theirs, x))


def _used(p: Problem, ours: nn.Module, theirs: nn.Module, x: Tensor) -> float:
    return tolerance_used(p.precision, ours(x), theirs(x))


def _gradients(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    given, weight = x.detach().requires_grad_(), next(module.parameters())
    return torch.autograd.grad(module(given), (given, weight), grad)


def _taken(p: Problem, ours: nn.Module, theirs: nn.Module, x: Tensor) -> Taken:
    """Seconds of each side, one a round; the library multiplies as the file does, whatever PyTorch's flags allow."""
    off, on = cudnn_clocks(clock(x.device))

    def as_the_file(run: Callable[[], object]) -> float:
        with precision_flags(p.precision):
            return off(run)

    library = upconv.accelerate(deepcopy(theirs))
    sides = {"ours": (ours, off), "torch": (theirs, off), "tuned": (theirs, on), "library": (library, as_the_file)}
    runs = {side: [partial(_forward, module, x)] for side, (module, _) in sides.items()}
    return interleave(runs, {side: take for side, (_, take) in sides.items()}, RUNS)


@torch.no_grad()
def _forward(module: nn.Module, x: Tensor) -> Any:
    return module(x)  # no_grad here: the mode is a thread's own, and one of the clocks has a thread


def _input(p: Problem, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.rand(p.input_shape, generator=generator, device=device, dtype=p.dtype)
    return x.contiguous(memory_format=memory_format(p.layout, p.rank))
