"""`accelerate`, `restore` and `fold_batchnorm` on whole models: what changes, what stays, and what is said about it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import upconv
from conftest import RANKS, assert_equal
from situations import differences
from twins import image, lines_of
from upconv import modules


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


def test_accelerates_restores_and_says_so() -> None:
    block = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 6, 3, groups=2))
    up, last = nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ConvTranspose2d(6, 3, 3, 3, bias=False)
    model = nn.ModuleDict({"encode": nn.Conv2d(4, 8, 3), "up": up, "block": block, "last": last})
    names = ["up", "block.2", "last"]
    for _ in range(2):  # twice is once
        assert accelerated(model) == [f"{name}: accelerated" for name in names]
        assert marked(model) == [True] * 3
    assert lines_of(upconv.restore, model) == [f"{name}: restored" for name in names]
    assert marked(model) == [False] * 3 and lines_of(upconv.restore, model) == []
    upconv.accelerate(block)
    assert marked(model) == [False, True, False]
    assert lines_of(upconv.restore, model) == ["block.2: restored"]


def test_what_reports_must_be_called() -> None:
    layer: Any = nn.ConvTranspose2d(2, 2, 2)
    with pytest.raises(TypeError, match="report must be called with each line, like print; got True"):
        upconv.accelerate(layer, report=True)  # type: ignore[arg-type]
    assert upconv.accelerate(layer, report=None) is layer


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
            "a": Doubled(2, 2, 3), "b": Renamed(2, 2, 3), "c": replaced, "d": upconv.ConvTranspose2d(2, 2, 3),
            "e": nn.Conv2d(2, 2, 3), "f": Tripled(2, 2, 3), "g": Foreign(),
        }
    )  # fmt: skip
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


def test_a_warm_up_draws_no_random_numbers() -> None:
    model = upconv.accelerate(nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.Dropout()))
    torch.manual_seed(3)
    upconv.warmup(model, (2, 3, 5, 5))
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))


# --- fold_batchnorm --------------------------------------------------------------------------------------------------


def test_folding_takes_modules() -> None:
    with pytest.raises(TypeError, match=r"fold_batchnorm takes a torch\.nn\.Module as its model, got a str"):
        upconv.fold_batchnorm("x")  # type: ignore[type-var]


def randomise(norm: Any) -> Any:
    """Statistics and scales as after a training, so that a wrong fold shows."""
    with torch.no_grad():
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.2, 3)
        if norm.affine:
            norm.weight.uniform_(-2, 2)
            norm.bias.uniform_(-1, 1)
    return norm


def pair(rank: int = 2, home: Any = nn, *, affine: bool = True, **kwargs: Any) -> nn.Sequential:
    arguments: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1, **kwargs}
    conv = getattr(home, f"ConvTranspose{rank}d")(4, 8, 3, **arguments)
    norm = getattr(nn, f"BatchNorm{rank}d")(8, affine=affine, eps=1e-3)
    return nn.Sequential(conv, randomise(norm), nn.ReLU()).eval()


def assert_folds(model: nn.Module, lines: list[str], x: Tensor | None = None) -> None:
    """What is said, and that the outputs stay: to the last bit where nothing is folded."""
    x = image(2) if x is None else x
    wanted = model(x)
    assert lines_of(upconv.fold_batchnorm, model) == lines
    assert not differences(model(x).detach(), wanted.detach(), 1e-5 if any("folded" in line for line in lines) else 0)


@RANKS
@pytest.mark.parametrize("groups", (1, 2, 4), ids=("dense", "grouped", "depthwise"))
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "unbiased"))
@pytest.mark.parametrize("affine", (True, False), ids=("affine", "plain"))
@pytest.mark.parametrize("home", (nn, upconv), ids=("torch", "upconv"))
def test_folds_right(rank: int, groups: int, bias: bool, affine: bool, home: Any) -> None:
    model = pair(rank, home, groups=groups, bias=bias, affine=affine)
    assert_folds(copy.deepcopy(model).double(), ["1: folded into 0"], image(rank, dtype=torch.float64))
    assert_folds(model, ["1: folded into 0"], image(rank))
    assert type(model[1]) is nn.Identity and type(model[0]) is getattr(home, f"ConvTranspose{rank}d")
    assert list(dict(model.named_parameters())) == list(model.state_dict()) == ["0.weight", "0.bias"]


HOOKS = "a module of the pair has forward hooks"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m[0].register_forward_hook(lambda *a: None), HOOKS),
        (lambda m: m[0].register_forward_pre_hook(lambda *a: None), HOOKS),
        (lambda m: m[1].register_forward_hook(lambda *a: None), HOOKS),
        (lambda m: m[1].train(), "the pair is in training mode"),
        (lambda m: m[0].train(), "the pair is in training mode"),
        (
            lambda m: m.__setitem__(1, nn.BatchNorm2d(8, track_running_stats=False).eval()),
            "the norm keeps no running statistics",
        ),
        (
            lambda m: parametrizations.weight_norm(m[0]),
            "a module of the pair is parametrised; remove the parametrisation first",
        ),
        (
            lambda m: spectral_norm(m[0]),
            "the convolution's weight is computed by a hook (weight or spectral norm); remove it first",
        ),
    ],
)
def test_what_is_not_folded_and_why(change: Callable[[nn.Sequential], object], why: str) -> None:
    model = pair()
    change(model)
    x = image(2)
    wanted = copy.deepcopy(model)(x)
    assert lines_of(upconv.fold_batchnorm, model) == [f"1: left: {why}"]
    assert isinstance(model[1], nn.BatchNorm2d)
    assert_equal(copy.deepcopy(model)(x).detach(), wanted.detach())


class Graph(nn.Module):
    """A convolution, its norm and a pair, in a graph that is a function of the module and its input."""

    def __init__(self, graph: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.norm = pair()[:2]
        self.inner, self.graph = pair(), graph

    def forward(self, x: Tensor) -> Any:
        return self.graph(self, x)


ELSEWHERE = ["norm: left: the convolution's output is used elsewhere too"]
PLACES = "a module of the pair is used in several places"


@pytest.mark.parametrize(
    ("graph", "lines"),
    [
        (lambda m, x: (lambda y: m.norm(y) + y)(m.conv(x)), ELSEWHERE),
        (lambda m, x: m.norm(m.conv(x)) + m.conv(x * 2), ELSEWHERE),
        (lambda m, x: m.norm(m.conv(x).relu()), []),
        (lambda m, x: m.norm(m.conv(x, output_size=[9, 11])), ["norm: folded into conv"]),
        # Control flow on data cannot be traced, and so the order of its own two layers is not known.
        (lambda m, x: m.norm(m.conv(x)) if x.sum() > 1e9 else m.inner(x), ["inner.1: folded into inner.0"]),
    ],
)
def test_folds_only_what_the_graph_allows(graph: Any, lines: list[str]) -> None:
    assert_folds(Graph(graph).eval(), lines)


def test_modules_in_several_places_are_not_folded() -> None:
    block = nn.Sequential(nn.ConvTranspose2d(8, 8, 3, padding=1), randomise(nn.BatchNorm2d(8)))
    norm = block[1]
    for model in (
        nn.Sequential(nn.ConvTranspose2d(4, 8, 3), block, block),  # the pair is used twice
        nn.Sequential(nn.ConvTranspose2d(4, 8, 3), norm, nn.Conv2d(8, 8, 3), norm),  # the norm is
    ):
        wanted = model.eval()(image(2))
        lines = lines_of(upconv.fold_batchnorm, model)
        assert lines and all("left: " in line for line in lines)
        assert_equal(model(image(2)).detach(), wanted.detach())
    held = Graph(lambda m, x: m.inner(x)).eval()
    held.conv = held.inner[0]  # another part of the model holds it
    (line,) = lines_of(upconv.fold_batchnorm, held)
    assert line.endswith(f"left: {PLACES}") and isinstance(held.inner[1], nn.BatchNorm2d)
