"""The layers: PyTorch's ModuleInfo samples and legacy module tests, and all that a module does beside its forward."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import (
    convert_conv2d_weight_memory_format,
    fusion,
    parametrizations,
    remove_spectral_norm,
    skip_init,
    spectral_norm,
    weight_norm,
)
from torch.nn.utils.parametrize import is_parametrized
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_nn import NewModuleTest, NNTestCase, get_new_module_tests
from torch.testing._internal.common_utils import freeze_rng_state

import upconv
from conftest import assert_close, assert_equal, forced_plans

RANKS = pytest.mark.parametrize("rank", (1, 2, 3), ids="{}d".format)
NAMES = [f"ConvTranspose{rank}d" for rank in (1, 2, 3)]
LAZY_NAMES = [f"Lazy{name}" for name in NAMES]


def classes(rank: int, *, lazy: bool = False) -> tuple[Any, Any]:
    """(upconv's class, torch.nn's)"""
    name = f"{'Lazy' if lazy else ''}ConvTranspose{rank}d"
    return getattr(upconv, name), getattr(nn, name)


def pair(rank: int, *args: Any, lazy: bool = False, **kwargs: Any) -> tuple[Any, Any]:
    """The same layer of upconv and of torch.nn, built under the same seed."""
    made = []
    for cls in classes(rank, lazy=lazy):
        torch.manual_seed(1)
        made.append(cls(*args, **kwargs))
    return made[0], made[1]


def assert_same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()):
        assert_equal(a, b)


def step(module: nn.Module, x: Tensor, **kwargs: Any) -> list[Tensor]:
    """The output, the input's gradient and every parameter's."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    module.zero_grad()
    out = module(x, **kwargs)
    generator = torch.Generator().manual_seed(2)
    out.backward(torch.randn(out.shape, generator=generator).to(out))
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def assert_same_step(ours: nn.Module, theirs: nn.Module, x: Tensor, **kwargs: Any) -> None:
    found, wanted = step(ours, x, **kwargs), step(theirs, x, **kwargs)
    assert len(found) == len(wanted) >= 3
    for a, b in zip(found, wanted):
        assert_close(a, b, length=512)


# --- PyTorch's own module tests --------------------------------------------------------------------------------------


def _module_info(name: str) -> Any:
    return next(info for info in module_db if info.name == f"nn.{name}")


@pytest.mark.parametrize("name", NAMES + LAZY_NAMES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16, torch.complex64), ids=str)
@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
def test_module_info_samples(name: str, dtype: torch.dtype, training: bool, device: str) -> None:
    info = _module_info(name)
    inputs = info.module_inputs_func(info, device, dtype, requires_grad=False, training=training)
    assert len(inputs) >= 2
    for sample in inputs:
        made = []
        for cls in (getattr(upconv, name), info.module_cls):
            torch.manual_seed(1)
            args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
            made.append(cls(*args, **kwargs, device=device, dtype=dtype).train(training))
        x = sample.forward_input.args[0].detach()
        torch.manual_seed(3)  # a lazy module draws its weights in its first forward
        ours = made[0](x, **sample.forward_input.kwargs)
        torch.manual_seed(3)
        assert_close(ours, made[1](x, **sample.forward_input.kwargs), length=512)
        assert_same_parameters(made[0], made[1])
        assert repr(made[0]) == repr(made[1])
        if dtype.is_floating_point:
            assert_same_step(made[0], made[1], x)
            noncontiguous = torch.stack([x, x], -1)[..., 0]
            assert_same_step(made[0], made[1], noncontiguous)


class _Legacy(NNTestCase):  # type: ignore[misc]
    """What PyTorch's legacy module tests ask of their test case, as its own test_nn.py answers."""

    def runTest(self) -> None:
        """unittest asks a test case for a method to run; the tests call the others."""

    def _forward(self, module: nn.Module, input: Any) -> Any:
        with freeze_rng_state():
            return module(*input) if isinstance(input, tuple) else module(input)

    def _backward(
        self, module: nn.Module, input: Any, output: Any, grad_output: Any, create_graph: bool = False
    ) -> Any:
        output.backward(grad_output, retain_graph=True, create_graph=create_graph)
        return tuple(i.grad for i in input) if isinstance(input, tuple) else input.grad

    def _get_parameters(self, module: nn.Module) -> tuple[list[Any], list[Any]]:
        return list(module.parameters()), [p.grad for p in module.parameters()]

    def _zero_grad_parameters(self, module: nn.Module) -> None:
        for p in module.parameters():
            if p.grad is not None:
                p.grad = torch.zeros_like(p)


def _legacy_tests() -> list[Any]:
    found = []
    for entry in get_new_module_tests():
        name = entry.get("fullname") or entry.get("module_name", "")
        if name.startswith("ConvTranspose"):
            found.append(pytest.param(entry, id=f"{name}-{entry.get('desc', 'default')}"))
    assert len(found) == 10
    return found


@pytest.mark.parametrize("entry", _legacy_tests())
@pytest.mark.parametrize("plan", ("as planned", "flip", "shuffle"))
def test_legacy_module_tests(entry: dict[str, Any], plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setattr(nn, name, getattr(upconv, name))  # the constructors look the class up in torch.nn
    built = []
    arguments = dict(entry)
    if "module_name" in arguments:
        arguments["constructor"] = getattr(nn, arguments.pop("module_name"))
    test = NewModuleTest(**arguments)
    constructor = test.constructor
    test.constructor = lambda *args: built.append(constructor(*args)) or built[-1]  # type: ignore[func-returns-value]
    if plan == "as planned":
        test(_Legacy())
    else:
        with forced_plans(plan):
            test(_Legacy())
    assert built and all(type(m).__module__ == "upconv.modules" for m in built)


# --- construction ----------------------------------------------------------------------------------------------------

LAYERS: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2},
    {"groups": 2, "bias": False},
    {"groups": 4, "stride": 3, "dtype": torch.float64},
    {"dtype": torch.bfloat16},
    {"padding_mode": "zeros"},
]


@RANKS
@pytest.mark.parametrize("kwargs", LAYERS, ids=str)
def test_construction_is_torchs(rank: int, kwargs: dict[str, Any]) -> None:
    ours, theirs = pair(rank, 4, 8, 3, **kwargs)
    assert_same_parameters(ours, theirs)
    assert repr(ours) == repr(theirs)
    assert ours.__constants__ == theirs.__constants__
    assert isinstance(ours, classes(rank)[1])
    own = {k: v for k, v in vars(theirs).items() if k not in ("_parameters",)}
    assert {k: v for k, v in vars(ours).items() if k not in ("_parameters",)} == own


@pytest.mark.parametrize("dtype", (torch.complex64, torch.complex128), ids=str)
def test_complex_initial_weights(dtype: torch.dtype) -> None:
    ours, theirs = pair(2, 4, 6, 3, dtype=dtype)
    assert_same_parameters(ours, theirs)
    assert_equal(ours(torch.ones(1, 4, 5, 5, dtype=dtype)), theirs(torch.ones(1, 4, 5, 5, dtype=dtype)))


def test_reset_of_noncontiguous_weights_draws_the_same_numbers() -> None:
    ours, theirs = pair(2, 4, 6, (3, 5))
    for module in (ours, theirs):
        module.to(memory_format=torch.channels_last)
        torch.manual_seed(5)
        module.reset_parameters()
        assert not module.weight.is_contiguous()
    assert_same_parameters(ours, theirs)


def test_weights_follow_device_and_dtype_arguments() -> None:
    ours, theirs = pair(2, 2, 3, 3, device="meta", dtype=torch.float64)
    assert ours.weight.device.type == "meta" and ours.weight.dtype is theirs.weight.dtype
    loaded = skip_init(upconv.ConvTranspose2d, 2, 3, kernel_size=3)
    assert type(loaded) is upconv.ConvTranspose2d and loaded.weight.device.type == "cpu"
    source = nn.ConvTranspose2d(2, 3, 3)
    loaded.load_state_dict(source.state_dict())
    x = torch.randn(1, 2, 5, 5)
    assert_close(loaded(x), source(x))


def test_iterables_are_taken_as_torch_takes_them() -> None:
    for value in ([3, 5], (3, 5), torch.Size((3, 5)), range(3, 6, 2)):
        ours, theirs = pair(2, 2, 3, value, stride=[2, 1], padding=(1, 0), output_padding=(1, 0), dilation=(1, 2))
        assert ours.kernel_size == theirs.kernel_size == (3, 5)
        assert repr(ours) == repr(theirs)
        x = torch.randn(2, 2, 4, 5)
        assert_close(ours(x), theirs(x))
    ours, theirs = pair(2, 2, 3, 3, stride=(2,))  # one value stands for both dimensions, in the operator
    assert_close(ours(x), theirs(x))


def test_weights_are_found_as_python_finds_them() -> None:
    """Where something stands before a parameter, or a class or a mapping finds it in its own way."""

    class Scaled(upconv.ConvTranspose2d):
        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)
            return found * 3 if name == "weight" else found

    class Larger(upconv.ConvTranspose2d):
        def _output_padding(self, *args: Any, **kwargs: Any) -> list[int]:
            return [1, 1]

    class Gathered(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            found = super().__getitem__(name)
            return found if found is None else found * 2

    x = torch.randn(2, 3, 5, 6)

    def layer(kind: Any = upconv.ConvTranspose2d, **kwargs: Any) -> Any:
        torch.manual_seed(3)
        return kind(3, 4, 3, 2, bias=False, **kwargs)

    plain = layer()(x)
    scaled = layer(Scaled)  # which was initialised through its own attribute
    scaled._parameters["weight"] = layer().weight
    assert_close(scaled(x), 3 * plain)
    assert layer(Larger)(x).shape == layer(output_padding=1)(x).shape
    gathered = layer()
    gathered._parameters = Gathered(gathered._parameters)
    assert_close(gathered(x), 2 * plain)
    before = layer()
    before.__dict__["weight"] = 5 * before.weight.detach()
    assert_close(before(x), 5 * plain)
    replaced = layer()
    weight = replaced.weight.detach()
    del replaced._parameters["weight"]
    replaced.weight = 7 * weight
    assert_close(replaced(x), 7 * plain)
    biased = layer()
    del biased._parameters["bias"]
    biased.bias = torch.ones(4)
    assert_close(biased(x), plain + 1)
    whole = layer()
    whole.output_padding = 1
    assert_close(whole(x, output_size=[12, 14]), layer(output_padding=1)(x))


def test_subclasses_keep_working() -> None:
    class Scaled(upconv.ConvTranspose2d):
        def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
            return 2 * super().forward(input, output_size)

    layer = Scaled(2, 3, 3, stride=2)
    plain = nn.ConvTranspose2d(2, 3, 3, stride=2)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(1, 2, 5, 5)
    assert_close(layer(x), 2 * plain(x))


# --- saving and copying ----------------------------------------------------------------------------------------------


@RANKS
@pytest.mark.parametrize("kwargs", LAYERS[:5], ids=str)
def test_state_dict_loads_both_ways(rank: int, kwargs: dict[str, Any]) -> None:
    torch.manual_seed(1)
    ours, theirs = (cls(4, 8, 3, **kwargs) for cls in classes(rank))
    assert not torch.equal(ours.weight, theirs.weight)
    x = torch.randn(2, 4, *(5,) * rank, dtype=kwargs.get("dtype", torch.float32))
    kept = ours(x)
    back = classes(rank)[1](4, 8, 3, **kwargs)
    assert str(back.load_state_dict(ours.state_dict(), strict=True)) == "<All keys matched successfully>"
    assert_close(back(x), kept, length=512)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_close(ours(x), theirs(x), length=512)
    with pytest.raises(RuntimeError, match=re.escape("size mismatch for weight")):
        ours.load_state_dict(classes(rank)[1](4, 8, 5, **kwargs).state_dict())


def _pickled(module: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(module))
    return loaded


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@RANKS
@pytest.mark.parametrize("copied", (copy.copy, copy.deepcopy, _pickled, _saved), ids=lambda f: f.__name__.strip("_"))
def test_copies_are_the_same_layer(rank: int, copied: Callable[[nn.Module], nn.Module]) -> None:
    layer = classes(rank)[0](4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
    x = torch.randn(2, 4, *(5,) * rank)
    before = step(layer, x)  # also: a layer that has already run can be copied
    twin = copied(layer)
    assert type(twin) is type(layer) and repr(twin) == repr(layer)
    for a, b in zip(step(twin, x), before):
        assert_equal(a, b)


@RANKS
def test_state_dict_is_saved_as_weights_only(rank: int) -> None:
    ours, theirs = pair(rank, 4, 6, 3)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    theirs.load_state_dict(torch.load(file, weights_only=True))
    assert_same_parameters(ours, theirs)


@RANKS
def test_pickles_from_before_padding_mode_load(rank: int) -> None:
    ours, theirs = pair(rank, 4, 6, 3)
    x = torch.randn(2, 4, *(5,) * rank)
    wanted = theirs(x)
    for layer in (ours, theirs):
        state = layer.__getstate__() if hasattr(layer, "__getstate__") else layer.__dict__.copy()
        state = dict(state)
        del state["padding_mode"]
        old = type(layer).__new__(type(layer))
        old.__setstate__(state)
        assert old.padding_mode == "zeros"
        assert_close(old(x), wanted)


# --- output_size -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("h", range(15, 22))
@pytest.mark.parametrize("w", range(15, 22))
def test_output_size_window(h: int, w: int) -> None:
    """The window of PyTorch's own test_ConvTranspose2d_output_size: 18 to 20 fit, 15, 16, 17 and 21 do not."""
    ours, theirs = pair(2, 3, 4, 3, stride=3, padding=0)
    x = torch.randn(1, 3, 6, 6)
    for size in ((h, w), (1, 4, h, w), (77, 88, h, w), torch.Size((h, w)), [h, w]):
        if 18 <= h <= 20 and 18 <= w <= 20:
            out = ours(x, output_size=size)
            assert out.shape[2:] == (h, w)
            assert_close(out, theirs(x, output_size=size))
        else:
            with pytest.raises(ValueError) as wanted:
                theirs(x, output_size=size)
            with pytest.raises(ValueError) as found:
                ours(x, output_size=size)
            assert str(found.value) == str(wanted.value)


@RANKS
def test_output_size_replaces_output_padding_and_takes_unbatched_input(rank: int) -> None:
    ours, theirs = pair(rank, 3, 4, 4, stride=3, padding=1, output_padding=2)
    x = torch.randn(3, *(5,) * rank)
    for size in ([14] * rank, [15] * rank, [16] * rank, [9, *[15] * rank]):
        assert_same_step(ours, theirs, x, output_size=size)
        assert ours(x, output_size=size).shape[1:] == tuple(size[-rank:])
    assert ours(x).shape[1:] == (16,) * rank


def test_downsampled_size_comes_back_through_upsampling() -> None:
    """Every odd and even size that a strided convolution maps to one size is reached again."""
    up = pair(2, 8, 3, 3, stride=2, padding=1)
    down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    for h in range(15, 22):
        for w in range(15, 22):
            x = torch.randn(2, 3, h, w)
            ours, theirs = (layer(down(x), output_size=x.size()) for layer in up)
            assert ours.shape == x.shape
            assert_close(ours.detach(), theirs.detach())


# --- lazy layers -----------------------------------------------------------------------------------------------------


@RANKS
@pytest.mark.parametrize("kwargs", ({}, {"stride": 2, "groups": 2, "bias": False}, {"dtype": torch.float64}), ids=str)
def test_lazy_layers_become_ours(rank: int, kwargs: dict[str, Any]) -> None:
    ours, theirs = pair(rank, 6, 3, lazy=True, **kwargs)
    assert repr(ours) == repr(theirs) and "(0, 6" in repr(ours)
    assert isinstance(ours, classes(rank)[0]) and isinstance(ours, classes(rank, lazy=True)[1])
    assert ours.has_uninitialized_params()
    x = torch.randn(2, 4, *(5,) * rank, dtype=kwargs.get("dtype", torch.float32))
    outs = []
    for layer in (ours, theirs):
        torch.manual_seed(7)
        outs.append(layer(x))
    assert type(ours) is classes(rank)[0]
    assert repr(ours) == repr(theirs) and ours.in_channels == 4
    assert_same_parameters(ours, theirs)
    assert_close(outs[0].detach(), outs[1].detach(), length=512)
    assert_same_step(ours, theirs, x)


@RANKS
def test_lazy_state_dicts_load_both_ways(rank: int) -> None:
    x = torch.randn(2, 4, *(5,) * rank)
    ours, theirs = pair(rank, 6, 3, lazy=True)
    full = classes(rank)[1](4, 6, 3)
    ours.load_state_dict(full.state_dict())
    assert_close(ours(x), full(x), length=512)
    theirs.load_state_dict(ours.state_dict())
    assert_close(theirs(x), ours(x), length=512)
    fresh = classes(rank, lazy=True)[0](6, 3)
    fresh.load_state_dict(classes(rank, lazy=True)[1](6, 3).state_dict())  # lazy into lazy stays lazy
    assert fresh.has_uninitialized_params()
    assert type(pickle.loads(pickle.dumps(fresh))) is classes(rank, lazy=True)[0]


def test_lazy_errors_are_torchs() -> None:
    ours, theirs = pair(2, 6, 3, lazy=True)
    for call in (lambda m: m(torch.randn(4, 5)), lambda m: m.reset_parameters() or m.weight.sum()):
        with pytest.raises((RuntimeError, ValueError)) as wanted:
            call(theirs)
        with pytest.raises(type(wanted.value)) as found:
            call(ours)
        assert str(found.value) == str(wanted.value)


# --- norms, fusion, formats ------------------------------------------------------------------------------------------


@RANKS
@pytest.mark.parametrize(
    "norm", (weight_norm, spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm)
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_norms_are_torchs(rank: int, norm: Callable[..., nn.Module]) -> None:
    made = []
    for layer in pair(rank, 4, 6, 3, stride=2):
        torch.manual_seed(11)
        made.append(norm(layer))
    ours, theirs = made
    assert_same_parameters(ours, theirs)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    x = torch.randn(2, 4, *(5,) * rank)
    for _ in range(2):  # spectral norm iterates once a training step
        assert_same_step(ours, theirs, x)
    assert_close(ours.eval()(x).detach(), theirs.eval()(x).detach(), length=512)
    if norm is spectral_norm:
        assert sorted(remove_spectral_norm(ours).state_dict()) == ["bias", "weight"]
    if is_parametrized(ours):
        nn.utils.parametrize.remove_parametrizations(ours, "weight")
        assert type(ours) is classes(rank)[0]


def test_channels_last_conversions() -> None:
    for convert in (
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: convert_conv2d_weight_memory_format(m, torch.channels_last),
    ):
        ours, theirs = (convert(nn.Sequential(layer))[0] for layer in pair(2, 4, 6, 3, stride=2, padding=1))
        assert ours.weight.stride() == theirs.weight.stride() and not ours.weight.is_contiguous()
        x = torch.randn(2, 4, 5, 7)
        assert_same_step(ours, theirs, x)
        assert_same_step(ours, theirs, x.contiguous(memory_format=torch.channels_last))
        assert ours(x).is_contiguous(memory_format=torch.channels_last)


@RANKS
def test_torchs_batchnorm_fusion(rank: int) -> None:
    norm = getattr(nn, f"BatchNorm{rank}d")(6).eval()
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    ours, theirs = (layer.eval() for layer in pair(rank, 4, 6, 3, stride=2))
    fused = [fusion.fuse_conv_bn_eval(layer, norm, transpose=True) for layer in (ours, theirs)]
    assert type(fused[0]) is classes(rank)[0]
    x = torch.randn(2, 4, *(5,) * rank)
    assert_close(fused[0](x).detach(), fused[1](x).detach(), length=512)
    assert_close(fused[0](x).detach(), norm(ours(x)).detach(), length=512)


# --- TorchScript -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@RANKS
@pytest.mark.parametrize("how", ("script", "trace"))
def test_torchscript(rank: int, how: str, tmp_path: Path) -> None:
    layer = classes(rank)[0](4, 6, 3, stride=2, padding=1, output_padding=1)
    x = torch.randn(2, 4, *(5,) * rank)
    scripted = torch.jit.script(layer) if how == "script" else torch.jit.trace(layer, x)
    kinds = {node.kind() for node in scripted.inlined_graph.nodes()}
    assert kinds & {f"aten::conv_transpose{rank}d", "aten::_convolution"} and not any(
        "upconv" in kind for kind in kinds
    )
    file = str(tmp_path / "layer.pt")
    torch.jit.save(scripted, file)
    loaded = torch.jit.load(file)
    assert_same_step(loaded, layer, x)
    if how == "script":
        size = [2, 6, *(9,) * rank]
        assert_close(loaded(x, size).detach(), layer(x, size).detach(), length=512)
