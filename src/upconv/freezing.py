"""`freeze`: the user's promise that a model's weights stay, so that packed copies of them may be kept.

Without the promise every call packs the weights that it reads (`upconv.cuda.weights` says why).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from upconv import modules
from upconv.cuda import weights

Model = TypeVar("Model", bound=nn.Module)


def freeze(model: Model, *, report: Callable[[str], object] | None = None) -> Model:
    """Promises that the weights of a model's convolutions stay as they are, so that calls need not pack them again.

        upconv.freeze(upconv.accelerate(model.eval()))   # until further notice
        with upconv.frozen(model): model(image)          # or for a while

    The promise covers changes that PyTorch cannot see: fused optimizers, ``param.data`` updates, replayed CUDA graphs
    and other processes. It ends for a weight with what can be seen: ``.train()``, a loaded state_dict, a move to
    another device or dtype, an in-place operation, a gradient that is computed for it. Then the layer is right, and
    packs at each call again. Only calls on a GPU pack weights, so move the model there first. At most two copies of a
    weight are kept. Each is padded to whole tiles of channels, so that layers of few channels keep a multiple of their
    weights.

    Args:
        model: an accelerated model in eval mode, in place.
        report: called with a line for each convolution: frozen, or why not; and with a line that counts them.

    Returns:
        The same model.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: the model is in training mode.
    """
    _freeze(model, report)
    return model


def thaw(model: Model) -> Model:
    """Takes the promise of `freeze` back and drops the packed copies, in place; returns the same model."""
    modules.require(model, "thaw")
    for module in model.modules():
        if isinstance(module, _ConvNd):
            _thaw(module)
    return model


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Within it the model is frozen, as by `freeze`; behind it what was not frozen before is thawed.

    Raises:
        TypeError, ValueError: as `freeze`.
    """
    own = _freeze(model)
    try:
        yield
    finally:
        for module in own:
            _thaw(module)


def _freeze(model: nn.Module, report: Callable[[str], object] | None = None) -> list[nn.Module]:
    """Freezes a model; returns the layers that were not frozen before."""
    modules.require(model, "freeze")
    if model.training:
        raise ValueError("freeze needs a model in eval mode, got one in training mode; call model.eval() first")
    _watch_training()
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, _ConvNd)]
    own: list[nn.Module] = []
    done = 0
    for name, module in found:
        reason = _refusal(module)
        if reason is None:
            weight, done = module.weight, done + 1
            if not weights.is_frozen(weight):
                weights.freeze(weight)
                own.append(module)
        if report is not None:
            report(f"{name or '(the model itself)'}: " + (f"not frozen: {reason}" if reason else "frozen"))
    if report is not None:
        report(f"{done} of {len(found)} convolutions frozen")
    return own


def _refusal(module: nn.Module) -> str | None:
    """Why a layer's weight cannot be frozen, in a clause; None where it can."""
    weight = _weight(module)
    if not modules.is_ours(module):
        return "it is not accelerated"
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
    return None


def _packed_on(weight: Tensor) -> bool:
    """Whether calls on the weight's device pack it."""
    return weight.is_cuda


def _weight(module: nn.Module) -> Tensor | None:
    """The layer's own parameter; None where something else stands in its place."""
    return None if "weight" in vars(module) else module._parameters.get("weight")


def _thaw(module: nn.Module) -> None:
    weight = _weight(module)
    if type(weight) is nn.Parameter and _packed_on(weight):  # no other was frozen
        weights.thaw(weight)


def _watch_training() -> None:
    """Has ``.train()`` of every convolution end its promise. PyTorch has no hook for that method."""
    if "train" not in vars(_ConvNd):
        _ConvNd.train = _train  # type: ignore[method-assign]


def _train(self: Any, mode: bool = True) -> Any:
    if mode:
        _thaw(self)
    return super(_ConvNd, self).train(mode)
