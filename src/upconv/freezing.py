"""`freeze`: the user's promise that a model's weights stay, so that packed copies of them may be kept.

Without the promise every call packs the weights that it reads (`upconv.cuda.weights` says why).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from upconv.cuda import weights

Model = TypeVar("Model", bound=nn.Module)


def freeze(model: Model, *, report: Callable[[str], object] | None = None) -> Model:
    """Promises that the weights of a model's convolutions stay as they are, so that calls need not pack them again.

        upconv.freeze(upconv.accelerate(model.eval()))   # until further notice
        with upconv.frozen(model): model(image)          # or for a while

    The promise covers changes that PyTorch cannot see: fused optimizers, ``param.data`` updates, replayed CUDA graphs
    and other processes. Changes that it can see end the promise for a weight: ``.train()``, a loaded state_dict, a move
    to another device or dtype, and any in-place operation. Then the layer is right, and packs at each call again. Only
    calls on a GPU pack weights, so on a CPU this does nothing. Kept copies take up to twice the memory of the weights.

    Args:
        model: a model in eval mode, in place.
        report: called with a line for each convolution: frozen, or why not.

    Returns:
        The same model.

    Raises:
        ValueError: the model is in training mode.
    """
    if model.training:
        raise ValueError("freeze needs a model in eval mode, got one in training mode; call model.eval() first")
    _watch_training()
    for name, module in model.named_modules():
        if isinstance(module, _ConvNd):
            reason = _refusal(module)
            if report is not None:
                report(f"{name or '(the model itself)'}: " + (f"not frozen: {reason}" if reason else "frozen"))
    return model


def thaw(model: Model) -> Model:
    """Takes the promise of `freeze` back and drops the packed copies, in place; returns the same model."""
    for module in model.modules():
        if isinstance(module, _ConvNd):
            _thaw(module)
    return model


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Within it the model is frozen, as by `freeze`; behind it the packed copies are dropped.

    Raises:
        ValueError: as `freeze`.
    """
    freeze(model)
    try:
        yield
    finally:
        thaw(model)


def _refusal(module: nn.Module) -> str | None:
    """Freezes a layer's weight; or says why that cannot be done, in a clause."""
    weight = _weight(module)
    if weight is None:
        return "its weight is computed at each call (a parametrisation or a hook)"
    if is_lazy(weight):
        return "its weight has no shape before the first call"
    if module.training:
        return "it is in training mode"
    if not _packed_on(weight):
        return f"only calls on a GPU pack weights, and its weight is on {weight.device}"
    if weight.is_inference():
        return "its weight is an inference tensor, whose changes PyTorch does not count"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, whose changes may be its own"
    weights.freeze(weight)
    return None


def _packed_on(weight: Tensor) -> bool:
    """Whether calls on the weight's device pack it."""
    return weight.is_cuda


def _weight(module: nn.Module) -> Tensor | None:
    """The layer's own parameter; None where something else stands in its place."""
    return None if "weight" in vars(module) else module._parameters.get("weight")


def _thaw(module: nn.Module) -> None:
    weight = _weight(module)
    if weight is not None and weight.layout is torch.strided and not is_lazy(weight):
        weights.thaw(weight)


def _watch_training() -> None:
    """Has ``.train()`` of every convolution end its promise. PyTorch has no hook for that method."""
    if "train" not in vars(_ConvNd):
        _ConvNd.train = _train  # type: ignore[method-assign]


def _train(self: Any, mode: bool = True) -> Any:
    if mode:
        _thaw(self)
    return nn.Module.train(self, mode)
