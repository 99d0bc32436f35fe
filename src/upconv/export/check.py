"""``upconv export --check``: an exported file against PyTorch, on the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from upconv.bench import timing
from upconv.bench.timing import clock, cudnn_clocks, interleave, precision_flags
from upconv.problem import Problem

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""Absolute and relative, KernelBench's by dtype."""
GRADIENTS = {torch.float32: 4e-3, torch.float64: 1e-9, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Largest norm of a gradient's difference from PyTorch's over its norm; both round (as in `upconv.bench.exported`)."""
SEEDS = 5


@dataclass(frozen=True)
class Comparison:
    """What a check found."""

    worst: float
    """The largest ``|ours - PyTorch's| / (tolerance + tolerance * |PyTorch's|)`` of all outputs; at most 1 passes."""
    gradients: tuple[float, ...]
    """``|ours - PyTorch's| / |PyTorch's|`` (norms) of the gradients for input and weight; none of a forward alone."""
    seconds: float
    """Median of a forward."""
    torch_seconds: float
    """PyTorch's, the better of ``cudnn.benchmark`` on and off."""
    tolerance: float
    gradient_tolerance: float

    @property
    def passed(self) -> bool:
        return self.worst <= 1 and max(self.gradients, default=0.0) <= self.gradient_tolerance

    @property
    def ratio(self) -> float:
        return self.torch_seconds / self.seconds


def load(source: str) -> dict[str, Any]:
    """The names that a file's text defines, by ``exec`` as KernelBench does it."""
    names: dict[str, Any] = {}
    exec(compile(source, "<exported>", "exec"), names)
    return names


def compare(
    source: str, p: Problem, attribute: str, arguments: Sequence[Any], device: torch.device, gradients: bool = True
) -> Comparison:
    """Compiles a file, compares its outputs and gradients with PyTorch's in the same precision, and times both.

    Args:
        source: the file's text.
        p: the layer and the input to compare on.
        attribute: of ``ModelNew`` that holds the layer.
        arguments: what ``ModelNew`` is constructed with.
        device: a CUDA device.
        gradients: whether the file has them.

    Raises:
        RuntimeError: the file could not be compiled.
    """
    with precision_flags(p.precision):
        return _compare(load(source), p, attribute, arguments, device, gradients)


def _compare(
    names: dict[str, Any], p: Problem, attribute: str, arguments: Sequence[Any], device: torch.device, both: bool
) -> Comparison:
    torch.manual_seed(42)
    ours: nn.Module = names["ModelNew"](*arguments)
    ours = ours.to(device, p.dtype)
    reference: Any = getattr(nn, f"ConvTranspose{p.rank}d")(
        p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, p.output_padding, p.groups, p.bias, p.dilation
    ).to(device, p.dtype)
    layer: Any = getattr(ours, attribute)
    reference.load_state_dict(layer.state_dict())
    tolerance = TOLERANCE[p.dtype]
    worst = 0.0
    with torch.no_grad():
        for seed in range(SEEDS):
            x = _input(p, device, seed)
            wanted = reference(x)
            distance = (ours(x) - wanted).abs_().div_(wanted.abs_().mul_(tolerance).add_(tolerance))
            worst = max(worst, float(distance.max()))
            del x, wanted, distance
    gradients = _gradients(p, ours, layer, reference, device) if both else ()
    x = _input(p, device, SEEDS)
    with torch.no_grad():
        clocks = cudnn_clocks(clock(device))
        runs = {"ours": [lambda: ours(x)], "off": [lambda: _without_grad(reference, x)]}
        runs["on"] = runs["off"]
        taken = interleave(runs, {"ours": clocks["off"], **clocks}, timing.SWEEP)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    theirs = min(medians["off"], medians["on"])
    return Comparison(worst, gradients, medians["ours"], theirs, tolerance, GRADIENTS[p.dtype])


def _gradients(p: Problem, ours: nn.Module, layer: Any, reference: Any, device: torch.device) -> tuple[float, ...]:
    x = _input(p, device, SEEDS).requires_grad_()
    grad = torch.randn(p.output_shape, device=device, dtype=p.dtype)
    found = torch.autograd.grad(ours(x), (x, layer.weight), grad)
    wanted = torch.autograd.grad(reference(x), (x, reference.weight), grad)
    return tuple(_distance(a, b) for a, b in zip(found, wanted))


def _without_grad(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():  # the flag is a thread's own, and one of the clocks has a thread
        return module(x)


def _input(p: Problem, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.rand(p.input_shape, generator=generator, device=device, dtype=p.dtype)
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=layouts[x.dim()]) if p.layout == "channels_last" else x


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
