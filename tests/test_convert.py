"""`accelerate`, `restore` and `fold_batchnorm` on whole models: what changes, what stays, and what is said about it."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

import upconv
from conftest import assert_close, assert_equal, forced_plans
from upconv import cpu, modules

RANKS = pytest.mark.parametrize("rank", (1, 2, 3), ids="{}d".format)


class Net(nn.Module):
    """A decoder of the usual kind: convolution, transposed convolutions of several strides, norms, a nested block."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1)
        self.block = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.ConvTranspose2d(8, 6, 3, groups=2))
        self.last = nn.ConvTranspose2d(6, 3, 3, stride=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.block(self.up(self.encode(x))))
        return out


def lines_of(change: Callable[..., nn.Module], model: nn.Module) -> list[str]:
    lines: list[str] = []
    assert change(model, report=lines.append) is model
    return lines


def accelerated(model: nn.Module) -> list[str]:
    """What `accelerate` reports of its layers, up to why."""
    *lines, closing = lines_of(upconv.accelerate, model)
    assert "convolution" in closing
    return [re.split("(?<=accelerated)[:,]", line)[0] for line in lines]


def marked(model: nn.Module) -> list[bool]:
    """Of each transposed convolution of torch.nn's own class, whether upconv computes it."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvTransposeNd)]
    assert all(type(m).__module__.startswith("torch.nn") for m in layers)
    return [modules.is_ours(m) for m in layers]


# --- accelerate and restore ------------------------------------------------------------------------------------------


def test_accelerates_and_says_so() -> None:
    model = Net()
    assert accelerated(model) == ["up: accelerated", "block.2: accelerated", "last: accelerated"]
    assert marked(model) == [True] * 3
    assert lines_of(upconv.restore, model) == ["up: restored", "block.2: restored", "last: restored"]
    assert marked(model) == [False] * 3
    assert lines_of(upconv.restore, model) == []


def test_logs_what_it_reports(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = lines_of(upconv.accelerate, Net())
    with caplog.at_level(logging.INFO, "upconv"):
        upconv.accelerate(Net())
    assert [r.getMessage() for r in caplog.records] == wanted
    assert capsys.readouterr() == ("", "")


def test_all_but_the_mark_stays() -> None:
    model = Net()
    model.block.eval()
    model.up.weight.requires_grad_(False)
    before = {name: (id(m), m.training, dict(vars(m))) for name, m in model.named_modules()}
    tensors = {name: (id(t), t.data_ptr(), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    described, names = repr(model), [name for name, _ in model.named_modules()]
    upconv.accelerate(model)
    assert {name: (id(t), t.data_ptr(), t._version) for name, t in model.state_dict(keep_vars=True).items()} == tensors
    for name, m in model.named_modules():
        assert (id(m), m.training) == before[name][:2]
    assert repr(model) == described and [name for name, _ in model.named_modules()] == names
    upconv.restore(model)
    for name, m in model.named_modules():
        assert type(m).__module__.startswith(("torch.nn", __name__)) and dict(vars(m)) == before[name][2]


@pytest.mark.parametrize("plan", ("as planned", "shuffle"))
@pytest.mark.parametrize("channels_last", (False, True))
def test_outputs_and_gradients_stay(plan: str, channels_last: bool) -> None:
    model = Net()
    x = torch.randn(2, 3, 8, 8)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)

    def step() -> list[Tensor]:
        model.zero_grad()
        out = model(x)
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]

    wanted = step()
    upconv.accelerate(model)
    if plan == "as planned":
        found = step()
    else:
        with forced_plans(plan) as forced:
            found = step()
        assert len(forced) >= 2
    for a, b in zip(found, wanted):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    upconv.restore(model)
    for a, b in zip(step(), wanted):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_the_engine_runs_only_while_accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    right = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *args: calls.append(args[0]) or right(*args))
    model, x = Net().eval(), torch.randn(1, 3, 6, 6)
    with forced_plans("shuffle"):
        model(x)
        assert calls == []
        upconv.accelerate(model)(x)
        assert len(calls) == 2  # the layers with a stride
        upconv.restore(model)(x)
        assert len(calls) == 2


@RANKS
def test_the_model_itself(rank: int) -> None:
    layer = getattr(nn, f"ConvTranspose{rank}d")(3, 4, 3)
    assert accelerated(layer) == ["(the model itself): accelerated"]
    assert marked(layer) == [True] and type(layer) is getattr(nn, f"ConvTranspose{rank}d")
    assert lines_of(upconv.restore, layer) == ["(the model itself): restored"]
    assert marked(layer) == [False]


def test_what_is_left_and_why() -> None:
    class Doubled(nn.ConvTranspose2d):
        def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
            return 2 * super().forward(input, output_size)

    class Tripled(upconv.ConvTranspose2d):
        def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
            return 3 * super().forward(input, output_size)

    class Renamed(nn.ConvTranspose2d):
        pass

    class Foreign(nn.modules.conv._ConvTransposeNd):
        def __init__(self) -> None:
            super().__init__(2, 2, (3,), (1,), (0,), (1,), True, (0,), 1, True, "zeros")

    replaced = nn.ConvTranspose2d(2, 2, 3)
    replaced.forward = lambda x: x  # type: ignore[method-assign,assignment]
    model = nn.ModuleDict(
        {
            "a": Doubled(2, 2, 3),
            "b": Renamed(2, 2, 3),
            "c": replaced,
            "d": upconv.ConvTranspose2d(2, 2, 3),
            "e": nn.Conv2d(2, 2, 3),
            "f": Tripled(2, 2, 3),
            "g": Foreign(),
        }
    )
    here = f"{__name__}.test_what_is_left_and_why.<locals>"
    assert accelerated(model) == [
        f"a: left: {here}.Doubled has a forward of its own",
        "b: accelerated",
        "c: left: its forward was replaced on the instance",
        "d: accelerated",
        f"f: left: {here}.Tripled has a forward of its own",
        f"g: left: {here}.Foreign is no subclass of a convolution of torch.nn's that upconv knows",
    ]
    assert lines_of(upconv.accelerate, model)[-1].startswith("2 of 6 transposed convolutions accelerated; on a CPU")
    assert [modules.MARK in vars(m) for m in model.values()] == [False, True, *[False] * 5]
    assert lines_of(upconv.restore, model) == ["b: restored"]  # what was built as upconv's stays
    assert type(model["d"]) is upconv.ConvTranspose2d


def test_twice_is_once() -> None:
    model = Net()
    once = lines_of(upconv.accelerate, model)
    assert lines_of(upconv.accelerate, model) == once
    assert len(lines_of(upconv.restore, model)) == 3 and marked(model) == [False] * 3


def test_shared_modules_are_named_once_and_stay_shared() -> None:
    shared = nn.ConvTranspose2d(4, 4, 3, padding=1)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    x = torch.randn(1, 4, 5, 5)
    wanted = model(x)
    assert accelerated(model) == ["0 = 2: accelerated"]
    assert model[0] is model[2] is shared and marked(shared) == [True]
    assert_close(model(x).detach(), wanted.detach(), length=512)
    assert lines_of(upconv.restore, model) == ["0 = 2: restored"]


def test_shared_parameters_stay_shared() -> None:
    first, second = nn.ConvTranspose2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3)
    second.weight = first.weight
    model = upconv.accelerate(nn.Sequential(first, second))
    assert model[0].weight is model[1].weight is first.weight


def test_hooks_stay() -> None:
    model = Net()
    log: list[str] = []
    model.up.register_forward_pre_hook(lambda m, args: log.append("pre"))
    model.up.register_forward_hook(lambda m, args, out: log.append("forward"))
    model.up.register_full_backward_hook(lambda m, a, b: log.append("backward"))
    model.up.weight.register_hook(lambda g: log.append("weight"))
    model.up.register_load_state_dict_post_hook(lambda m, keys: log.append("load"))
    upconv.accelerate(model)(torch.randn(1, 3, 6, 6)).sum().backward()
    assert sorted(log) == ["backward", "forward", "pre", "weight"]
    model.load_state_dict(model.state_dict())
    assert log[-1] == "load"


@RANKS
@pytest.mark.parametrize("norm", (weight_norm, spectral_norm), ids=("weight_norm", "spectral_norm"))
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_norms_by_hooks_stay(rank: int, norm: Callable[..., nn.Module]) -> None:
    layer = norm(getattr(nn, f"ConvTranspose{rank}d")(4, 6, 3, stride=2)).eval()
    x = torch.randn(2, 4, *(5,) * rank)
    wanted, keys = layer(x).detach(), list(layer.state_dict())
    assert accelerated(layer) == ["(the model itself): accelerated"]
    assert list(layer.state_dict()) == keys
    assert_close(layer(x).detach(), wanted, length=512)
    with torch.no_grad():  # the weight is computed anew at every call
        getattr(layer, "weight_g" if norm is weight_norm else "bias").mul_(2)
    assert not torch.allclose(layer(x), wanted)


@RANKS
@pytest.mark.parametrize("which", ("weight norm", "spectral norm", "weight norm and a positive bias"))
def test_parametrisations_stay(rank: int, which: str) -> None:
    layer = getattr(nn, f"ConvTranspose{rank}d")(4, 6, 3, stride=2)
    if which == "spectral norm":
        parametrizations.spectral_norm(layer)
    else:
        parametrizations.weight_norm(layer)
    if which.endswith("bias"):
        parametrize.register_parametrization(layer, "bias", nn.Softplus())
    layer.eval()
    x = torch.randn(2, 4, *(5,) * rank)
    wanted, keys, described, cls = layer(x).detach(), list(layer.state_dict()), repr(layer), type(layer)
    assert accelerated(layer) == ["(the model itself): accelerated"]
    assert type(layer) is cls and modules.is_ours(layer)
    assert list(layer.state_dict()) == keys and repr(layer) == described
    for one in (layer, copy.deepcopy(layer)):
        assert_computed(one, x, wanted)
    assert lines_of(upconv.restore, layer) == ["(the model itself): restored"]
    assert_close(layer(x).detach(), wanted, length=512)
    upconv.accelerate(layer)
    for name in list(layer.parametrizations):
        parametrize.remove_parametrizations(layer, name)
    assert marked(layer) == [True]
    assert_computed(layer, x, wanted)


def assert_computed(layer: nn.Module, x: Tensor, wanted: Tensor) -> None:
    """That upconv computes a layer of any stride, and right."""
    with forced_plans("any") as forced:
        assert_close(layer(x).detach(), wanted, length=512)
    assert len(forced) == 1


def test_parametrised_later() -> None:
    layer = upconv.accelerate(nn.ConvTranspose2d(4, 6, 3, 2))
    parametrizations.weight_norm(layer)
    x = torch.randn(1, 4, 5, 5)
    wanted = layer(x).detach()
    assert_computed(layer, x, wanted)
    upconv.restore(layer)
    assert_close(layer(x).detach(), wanted, length=512)
    parametrize.remove_parametrizations(layer, "weight")
    assert marked(layer) == [False]


@pytest.mark.parametrize("optimiser", (torch.optim.SGD, torch.optim.Adam))
def test_an_optimiser_keeps_working(optimiser: Any) -> None:
    """Accelerated in the middle of training, and restored: the losses are those of a training without."""
    histories = []
    x, target = torch.randn(2, 3, 6, 6), torch.randn(2, 3, 42, 42)
    for swapping in (False, True):
        torch.manual_seed(4)
        model = Net()
        stepper = optimiser(model.parameters(), lr=0.01)
        history = []
        for i in range(9):
            if swapping and i == 3:
                upconv.accelerate(model)
            if swapping and i == 6:
                upconv.restore(model)
            stepper.zero_grad()
            with forced_plans("shuffle", "split"):
                loss = (model(x) - target).square().mean()
                loss.backward()
            stepper.step()
            history.append(loss.item())
        histories.append(history)
    assert histories[1] == pytest.approx(histories[0], rel=1e-4)
    assert histories[0][-1] < histories[0][0]


@pytest.mark.parametrize("copied", ("deepcopy", "pickle", "save"))
def test_copies_of_accelerated_models_restore(copied: str) -> None:
    model = upconv.accelerate(Net().eval())
    x = torch.randn(1, 3, 6, 6)
    if copied == "deepcopy":
        twin = copy.deepcopy(model)
    elif copied == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert marked(twin) == [True] * 3
    assert_equal(twin(x).detach(), model(x).detach())
    assert len(lines_of(upconv.restore, twin)) == 3
    assert marked(twin) == [False] * 3
    assert marked(model) == [True] * 3
    assert_close(twin(x).detach(), model(x).detach(), length=4096)


def test_state_dicts_are_interchangeable() -> None:
    model, plain = upconv.accelerate(Net()), Net()
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert list(model.state_dict()) == list(plain.state_dict())


@RANKS
def test_lazy_layers(rank: int) -> None:
    theirs = getattr(nn, f"ConvTranspose{rank}d")
    model = nn.Sequential(getattr(nn, f"LazyConvTranspose{rank}d")(4, 3, stride=2))
    lines = lines_of(upconv.accelerate, model)
    assert lines[0] == "0: accelerated: its first input decides whose operator computes it"
    assert "upconv computes 0 of 1, PyTorch's operator 0; of 1 the input decides" in lines[1]
    assert model[0].has_uninitialized_params()
    x = torch.randn(1, 3, *(4,) * rank)
    out = model(x).detach()
    assert type(model[0]) is theirs and marked(model) == [True]
    assert_computed(model, x, out)
    assert lines_of(upconv.restore, model) == ["0: restored"]
    assert_close(model(x).detach(), out, length=512)


def test_a_part_of_a_model() -> None:
    model = Net()
    upconv.accelerate(model.block)
    assert marked(model) == [False, True, False]
    assert lines_of(upconv.restore, model) == ["block.2: restored"]


def test_moving_and_casting_after_the_swap() -> None:
    model = upconv.accelerate(Net().eval()).double()
    x = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    found = model(x)
    torch.testing.assert_close(found, upconv.restore(model)(x), rtol=1e-12, atol=1e-12)
    assert upconv.accelerate(model).to("meta")(x.to("meta")).device.type == "meta"


# --- fold_batchnorm --------------------------------------------------------------------------------------------------


def randomise(norm: Any) -> Any:
    """Statistics and scales as after a training, so that a wrong fold shows."""
    with torch.no_grad():
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.2, 3)
        if norm.affine:
            norm.weight.uniform_(-2, 2)
            norm.bias.uniform_(-1, 1)
    return norm


def pair(rank: int, home: Any = nn, *, affine: bool = True, **kwargs: Any) -> nn.Sequential:
    arguments: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1, **kwargs}
    conv = getattr(home, f"ConvTranspose{rank}d")(4, 8, 3, **arguments)
    norm = getattr(nn, f"BatchNorm{rank}d")(8, affine=affine, eps=1e-3)
    return nn.Sequential(conv, randomise(norm), nn.ReLU()).eval()


@RANKS
@pytest.mark.parametrize("groups", (1, 2, 4), ids=("dense", "grouped", "depthwise"))
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "unbiased"))
@pytest.mark.parametrize("affine", (True, False), ids=("affine", "plain"))
@pytest.mark.parametrize("home", (nn, upconv), ids=("torch", "upconv"))
def test_folds_right(rank: int, groups: int, bias: bool, affine: bool, home: Any) -> None:
    model = pair(rank, home, groups=groups, bias=bias, affine=affine)
    x = torch.randn(2, 4, *(5,) * rank)
    wanted, exact = model(x).detach(), copy.deepcopy(model).double()(x.double()).detach()
    wide = copy.deepcopy(model).double()
    assert lines_of(upconv.fold_batchnorm, model) == ["1: folded into 0"]
    assert type(model[1]) is nn.Identity and type(model[0]) is getattr(home, f"ConvTranspose{rank}d")
    torch.testing.assert_close(model(x).detach(), wanted, rtol=1e-5, atol=1e-5)
    upconv.fold_batchnorm(wide)
    torch.testing.assert_close(wide(x.double()).detach(), exact, rtol=1e-12, atol=1e-12)
    assert isinstance(model[0].bias, nn.Parameter) and isinstance(model[0].weight, nn.Parameter)


def test_folds_an_accelerated_model_and_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *pair(2), *pair(2, groups=2)[1:], nn.ConvTranspose2d(8, 2, 2)).eval()
    x = torch.randn(1, 3, 6, 6)
    wanted = model(x)
    assert lines_of(upconv.fold_batchnorm, upconv.accelerate(model)) == ["2: folded into 1"]
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(upconv.restore(model)(x), wanted, rtol=1e-5, atol=1e-5)


def test_folding_keeps_layout_dtype_and_training_of_parameters() -> None:
    model = pair(2).to(memory_format=torch.channels_last)
    model[0].weight.requires_grad_(False)
    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    wanted = model(x).detach()
    upconv.fold_batchnorm(model)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last) and not model[0].weight.requires_grad
    assert model(x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x).detach(), wanted, rtol=1e-5, atol=1e-5)
    half = upconv.fold_batchnorm(pair(2).bfloat16())
    assert half[0].weight.dtype is half[0].bias.dtype is torch.bfloat16


def test_a_fold_saves_and_loads() -> None:
    model = upconv.fold_batchnorm(pair(2, bias=False))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    copied = pickle.loads(pickle.dumps(model))
    x = torch.randn(1, 4, 5, 5)
    assert_equal(copied(x).detach(), model(x).detach())


def test_training_models_are_refused() -> None:
    model = pair(2).train()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError) as error:
        upconv.fold_batchnorm(model)
    assert str(error.value) == (
        "fold_batchnorm needs a model in eval mode, got one in training mode; call model.eval() first"
    )
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values()))


def _refused(change: Callable[[nn.Sequential], object]) -> list[str]:
    model = pair(2)
    change(model)
    x = torch.randn(2, 4, 5, 5)
    wanted = copy.deepcopy(model)(x).detach()
    lines = lines_of(upconv.fold_batchnorm, model)
    assert isinstance(model[1], nn.BatchNorm2d)
    assert_equal(copy.deepcopy(model)(x).detach(), wanted)
    return lines


def test_what_is_not_folded_and_why() -> None:
    hook = "1: left: a module of the pair has forward hooks"
    assert _refused(lambda m: m[0].register_forward_hook(lambda *a: None)) == [hook]
    assert _refused(lambda m: m[0].register_forward_pre_hook(lambda *a: None)) == [hook]
    assert _refused(lambda m: m[1].register_forward_hook(lambda *a: None)) == [hook]
    assert _refused(lambda m: m[1].train()) == ["1: left: the pair is in training mode"]
    assert _refused(lambda m: m[0].train()) == ["1: left: the pair is in training mode"]
    assert _refused(lambda m: m.__setitem__(1, nn.BatchNorm2d(8, track_running_stats=False).eval())) == [
        "1: left: the norm keeps no running statistics"
    ]
    assert _refused(lambda m: parametrizations.weight_norm(m[0])) == [
        "1: left: a module of the pair is parametrised; remove the parametrisation first"
    ]
    assert _refused(lambda m: spectral_norm(m[0])) == [
        "1: left: the convolution's weight is computed by a hook (weight or spectral norm); remove it first"
    ]


class Branches(nn.Module):
    """A convolution whose output is read by its norm and by something else."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = pair(2)[:2]

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        out: Tensor = self.norm(y) + y
        return out


class Twice(Branches):
    """A convolution that is called twice, once without the norm."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x)) + self.conv(x * 2)
        return out


class Functional(Branches):
    """A relu between convolution and norm."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x).relu())
        return out


class Branching(Branches):
    """Control flow on data: cannot be traced, and so the order of its own two layers is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = pair(2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x)) if x.sum() > 1e9 else self.inner(x)
        return y


@pytest.mark.parametrize(
    ("model_class", "lines"),
    [
        (Branches, ["norm: left: the convolution's output is used elsewhere too"]),
        (Twice, ["norm: left: the convolution's output is used elsewhere too"]),
        (Functional, []),
        (Branching, ["inner.1: folded into inner.0"]),
    ],
)
def test_folds_only_what_the_graph_allows(model_class: type[nn.Module], lines: list[str]) -> None:
    model = model_class().eval()
    x = torch.randn(2, 4, 5, 5)
    wanted = model(x).detach()
    assert lines_of(upconv.fold_batchnorm, model) == lines
    torch.testing.assert_close(model(x).detach(), wanted, rtol=1e-5, atol=1e-5)


def test_shared_pairs_are_not_folded() -> None:
    block = pair(2, stride=1, output_padding=0)
    block[0] = nn.ConvTranspose2d(8, 8, 3, padding=1)
    first = nn.ConvTranspose2d(4, 8, 3)
    models = (
        nn.Sequential(first, block[:2], block[:2]).eval(),  # the pair is used twice
        nn.Sequential(nn.ConvTranspose2d(8, 8, 3), block[1], nn.Conv2d(8, 8, 3), block[1]).eval(),  # the norm is
    )
    for model, channels in zip(models, (4, 8)):
        x = torch.randn(1, channels, 6, 6)
        wanted = model(x).detach()
        lines = lines_of(upconv.fold_batchnorm, model)
        assert lines and all("left: " in line for line in lines)
        assert_equal(model(x).detach(), wanted)


def test_a_module_that_another_part_of_the_model_holds_is_not_folded() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.path = pair(2)
            self.also = self.path[0]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.path(x)
            return out

    model = Holder().eval()
    lines = lines_of(upconv.fold_batchnorm, model)
    assert len(lines) == 1 and lines[0].endswith("left: a module of the pair is used in several places")
    assert isinstance(model.path[1], nn.BatchNorm2d)


def test_a_norm_after_something_else_stays() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), randomise(nn.BatchNorm2d(8)), nn.ConvTranspose2d(8, 8, 3)).eval()
    assert lines_of(upconv.fold_batchnorm, model) == []
    assert isinstance(model[1], nn.BatchNorm2d)


def test_output_size_given_at_the_call_folds_too() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = pair(2)[:2]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(self.conv(x, output_size=[9, 10]))
            return out

    model = Sized().eval()
    x = torch.randn(2, 4, 5, 5)
    wanted = model(x).detach()
    assert lines_of(upconv.fold_batchnorm, model) == ["norm: folded into conv"]
    torch.testing.assert_close(model(x).detach(), wanted, rtol=1e-5, atol=1e-5)


def test_sync_batchnorm_and_instance_norm() -> None:
    model = pair(2)
    model[1] = nn.SyncBatchNorm.convert_sync_batchnorm(model[1])
    wanted = pair(2)
    wanted.load_state_dict(model.state_dict())
    x = torch.randn(1, 4, 5, 5)
    upconv.fold_batchnorm(model)
    torch.testing.assert_close(model(x).detach(), wanted(x).detach(), rtol=1e-5, atol=1e-5)
    other = pair(2)
    other[1] = nn.InstanceNorm2d(8, affine=True, track_running_stats=True).eval()
    assert lines_of(upconv.fold_batchnorm, other) == []
