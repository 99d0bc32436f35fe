"""The layers: how they are built and copied, lazy ones, norms, and where their weights are found."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

import upconv
from conftest import RANKS, assert_close, assert_equal
from situations import differences
from twins import WAYS, assert_computed, assert_same_step, copies, image, lines_of, twins
from upconv import modules


def assert_same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()):
        assert_equal(a, b)


# --- construction ----------------------------------------------------------------------------------------------------

LAYERS: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2},
    {"groups": 2, "bias": False},
    {"groups": 4, "stride": 3, "dtype": torch.float64},
    {"dtype": torch.bfloat16, "padding_mode": "zeros"},
]


@RANKS
@pytest.mark.parametrize("kwargs", LAYERS, ids=str)
def test_construction_is_torchs(rank: int, kwargs: dict[str, Any]) -> None:
    """And state dicts load both ways."""
    ours, theirs = twins("class", rank, 4, 8, 3, **kwargs)
    assert_same_parameters(ours, theirs)
    assert repr(ours) == repr(theirs) and ours.__constants__ == theirs.__constants__
    assert isinstance(ours, type(theirs))
    settings = [{k: v for k, v in vars(m).items() if k != "_parameters"} for m in (ours, theirs)]
    assert settings[0] == settings[1]
    other = type(theirs)(4, 8, 3, **kwargs)
    for source, target in ((other, ours), (ours, theirs)):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        assert str(target.load_state_dict(torch.load(file, weights_only=True))) == "<All keys matched successfully>"
    assert_same_parameters(theirs, other)
    assert_same_step(ours, other, image(rank, dtype=kwargs.get("dtype", torch.float32)))
    with pytest.raises(RuntimeError, match=re.escape("size mismatch for weight")):
        ours.load_state_dict(type(theirs)(4, 8, 5, **kwargs).state_dict())


def test_weights_are_found_as_python_finds_them() -> None:
    """Where something stands before a parameter, or a class or a mapping finds it in its own way."""

    class Scaled(upconv.ConvTranspose2d):
        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)
            return found * 3 if name == "weight" else found

    class Larger(upconv.ConvTranspose2d):
        def _output_padding(self, *args: Any, **kwargs: Any) -> list[int]:
            return [1, 1]

    class Doubled(upconv.ConvTranspose2d):
        def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
            return 2 * super().forward(input, output_size)

    class Gathered(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            found = super().__getitem__(name)
            return found if found is None else found * 2

    def layer(kind: Any = upconv.ConvTranspose2d, **kwargs: Any) -> Any:
        torch.manual_seed(3)
        return kind(4, 4, 3, 2, bias=False, **kwargs)

    x = image(2)
    weight, plain = layer().weight.detach(), layer()(x)
    scaled = layer(Scaled)  # which was initialised through its own attribute
    scaled._parameters["weight"] = layer().weight
    gathered, before, replaced, biased, whole = (layer() for _ in range(5))
    gathered._parameters = Gathered(gathered._parameters)
    before.__dict__["weight"] = 5 * weight
    del replaced._parameters["weight"], biased._parameters["bias"]
    replaced.weight = 7 * weight
    biased.bias = torch.ones(4)
    whole.output_padding = 1
    wider = layer(output_padding=1)(x)
    for found, wanted in (
        (scaled(x), 3 * plain), (layer(Doubled)(x), 2 * plain), (gathered(x), 2 * plain), (before(x), 5 * plain),
        (replaced(x), 7 * plain), (biased(x), plain + 1), (layer(Larger)(x), wider),
        (whole(x, output_size=[12, 14]), wider),
    ):  # fmt: skip
        assert_close(found, wanted)


# --- copies, lazy layers, norms, formats -----------------------------------------------------------------------------


@RANKS
@WAYS
@pytest.mark.parametrize("copied", copies())
def test_copies_are_the_same_layer(rank: int, way: str, copied: Callable[[Any], Any]) -> None:
    """Also of a layer that has already run; a copy is restored by itself."""
    ours, theirs = twins(way, rank, 4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
    x = image(rank)
    ours(x)
    twin = copied(ours)
    assert type(twin) is type(ours) and repr(twin) == repr(ours) and modules.is_ours(twin)
    assert_computed(twin, x, theirs(x))
    if way == "accelerated":
        assert lines_of(upconv.restore, twin) == ["(the model itself): restored"]
        assert not modules.is_ours(twin) and modules.is_ours(ours)
        assert_equal(twin(x), theirs(x))


@RANKS
@pytest.mark.parametrize("kwargs", ({}, {"stride": 2, "groups": 2, "bias": False}, {"dtype": torch.float64}), ids=str)
def test_lazy_layers_become_ours(rank: int, kwargs: dict[str, Any]) -> None:
    ours, theirs = twins("class", rank, 6, 3, lazy=True, **kwargs)
    assert repr(ours) == repr(theirs) and "(0, 6" in repr(ours)
    full = getattr(upconv, f"ConvTranspose{rank}d")
    assert isinstance(ours, full) and isinstance(ours, type(theirs)) and ours.has_uninitialized_params()
    x = image(rank, dtype=kwargs.get("dtype", torch.float32))
    for layer in (ours, theirs):
        torch.manual_seed(7)
        layer(x)
    assert type(ours) is full and repr(ours) == repr(theirs) and ours.in_channels == 4
    assert_same_parameters(ours, theirs)
    assert_same_step(ours, theirs, x)


def _positive_bias(layer: Any) -> Any:
    parametrizations.weight_norm(layer)
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Softplus())
    return layer


NORMS = weight_norm, spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm, _positive_bias


@RANKS
@WAYS
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_norms_are_torchs(rank: int, way: str, norm: Callable[..., nn.Module]) -> None:
    """Of a layer that is accelerated behind its norm; and once the norm is taken away."""
    ours, theirs = twins(way, rank, 4, 6, 3, stride=2, prepare=norm)
    assert_same_parameters(ours, theirs)
    assert repr(ours) == repr(theirs) and modules.is_ours(ours)
    if way == "accelerated":
        assert type(ours).__name__ == type(theirs).__name__
    x = image(rank)
    for training in (True, True, False):  # spectral norm iterates once a training step
        for layer in (ours, theirs):
            layer.train(training)
        assert not differences(ours(x), theirs(x), 1e-5)
        assert_same_parameters(ours, theirs)
    assert_same_step(ours, theirs, x)
    assert_computed(ours, x, theirs(x))
    if is_parametrized(ours):
        for name in list(ours.parametrizations):
            remove_parametrizations(ours, name)
        assert modules.is_ours(ours)
        assert_computed(ours, x, theirs(x))
