"""Layers of both homes with the same parameters, and what tests of layers look at."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import upconv
from conftest import assert_close, forced_plans
from situations import differences, step

WAYS = pytest.mark.parametrize("way", ("accelerated", "class"))
"""A layer of torch.nn's that is accelerated, and one of upconv's own class."""


def twins(
    way: str, rank: int, *args: Any, prepare: Callable[[Any], Any] | None = None, lazy: bool = False, **kwargs: Any
) -> Any:
    """(ours, torch.nn's) with the same parameters; ``prepare`` changes a layer before it is accelerated."""
    made = []
    for home in (upconv if way == "class" else nn, nn):
        torch.manual_seed(0)
        layer = getattr(home, f"{'Lazy' * lazy}ConvTranspose{rank}d")(*args, **kwargs).eval()
        made.append(layer if prepare is None else prepare(layer))
    return (upconv.accelerate(made[0]) if way == "accelerated" else made[0]), made[1]


def image(rank: int, channels: int = 4, **kwargs: Any) -> Tensor:
    """The same at each call."""
    return torch.randn(2, channels, *(5, 6, 4)[:rank], generator=torch.Generator().manual_seed(0), **kwargs)


def assert_computed(layer: Any, x: Tensor, wanted: Tensor) -> None:
    """That upconv computes a layer of any stride, and right."""
    with forced_plans("any") as forced:
        assert_close(layer(x).detach(), wanted.detach(), length=512)
    assert len(forced) == 1


def assert_same_step(ours: Any, theirs: Any, x: Tensor, **kwargs: Any) -> None:
    """The same output and gradients, as planned and by the engine; ``kwargs`` are the calls'."""

    def of(layer: Any) -> list[Tensor]:
        return step(lambda t: layer(t, **kwargs), x, list(layer.parameters()))

    wanted, found = of(theirs), [of(ours)]
    with forced_plans("any", "split"):
        found.append(of(ours))
    lines = [line for each in found for line in differences(each, wanted, 1e-4)]
    assert not lines, "\n".join(lines)


def lines_of(change: Callable[..., nn.Module], model: nn.Module, **kwargs: Any) -> list[str]:
    """What `accelerate`, `restore`, `fold_batchnorm` or `freeze` reports."""
    lines: list[str] = []
    assert change(model, report=lines.append, **kwargs) is model
    return lines


def copies() -> list[Callable[[Any], Any]]:
    """By all ways in which people copy modules."""
    return [copy.copy, copy.deepcopy, _pickled, _saved, _replica]


def _pickled(module: Any) -> Any:
    import pickle

    return pickle.loads(pickle.dumps(module))


def _saved(module: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _replica(layer: Any) -> Any:
    """As DataParallel makes them: parameters are plain tensors beside the module."""
    twin = layer._replicate_for_data_parallel()
    for name, parameter in layer._parameters.items():
        setattr(twin, name, None if parameter is None else parameter.detach().clone())
    return twin
