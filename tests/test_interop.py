"""Layers beside the tools that people use on them: traces, fusion, patches, copies, other tensors.

Each is compared with the same done to torch.nn's layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvTransposeNd

import upconv
from conftest import RANKS, assert_close, assert_equal
from situations import differences, error
from standins import Kernels
from strategies import changed_settings
from twins import WAYS, assert_computed, image, lines_of, twins
from upconv import modules

# --- traces ----------------------------------------------------------------------------------------------------------


class Sized(nn.Module):
    """A layer that is told the size of what it returns, by a shape that a trace knows as a proxy."""

    def __init__(self, rank: int, layer: nn.Module) -> None:
        super().__init__()
        self.rank = rank
        self.down = getattr(nn, f"Conv{rank}d")(3, 4, 3, 2, 1)
        self.up = layer
        self.again = nn.Sequential(nn.ReLU(), getattr(nn, f"Conv{rank}d")(3, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(self.up(self.down(x), output_size=x.shape[-self.rank :]))
        return out


@RANKS
@WAYS
def test_a_trace_has_stocks_leaves(rank: int, way: str) -> None:
    ours, theirs = twins(way, rank, 4, 3, 3, 2, 1)
    stock = Sized(rank, theirs)
    model = copy.deepcopy(stock)
    model.up = ours
    traced, wanted = fx.symbolic_trace(model), fx.symbolic_trace(stock)
    assert [str(node) + node.format_node() for node in traced.graph.nodes] == [  # type: ignore[operator]
        str(node) + node.format_node()
        for node in wanted.graph.nodes  # type: ignore[operator]
    ]
    x = image(rank, 3)
    assert type(traced.up) is type(ours)
    assert_close(traced(x), stock(x), length=512)
    again = fx.symbolic_trace(copy.deepcopy(traced))
    assert_close(again(x), stock(x), length=512)


class Doubled(upconv.ConvTranspose2d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return 2 * super().forward(input, output_size)


def _patched(layer: Any) -> None:
    before = layer.forward
    layer.forward = lambda x: 2 * before(x)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (Doubled, lambda layer: None),
        (upconv.ConvTranspose2d, _patched),
        (upconv.ConvTranspose2d, lambda layer: layer.register_forward_hook(lambda m, args, out: 2 * out)),
        (upconv.ConvTranspose2d, lambda layer: layer.register_forward_pre_hook(lambda m, args: 2 * args[0])),
    ],
    ids=("subclass", "instance", "hook", "pre-hook"),
)
def test_a_trace_holds_what_is_around_a_layer_once(make: Any, change: Callable[[Any], object]) -> None:
    layer, x = make(4, 3, 3, 2), image(2)
    change(layer)
    wanted = layer(x)
    assert_close(fx.symbolic_trace(nn.Sequential(layer))(x), wanted, length=512)


# --- fusion and quantisation -----------------------------------------------------------------------------------------


def decoder() -> nn.Module:
    """Convolutions of both kinds before their norms, with running statistics as after a training."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 4, 2, 1),
        nn.BatchNorm2d(6),
    )
    for norm in (model[1], model[4]):
        norm.running_mean.uniform_(-1, 1)  # type: ignore[operator, union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[operator, union-attr]
    return model.eval()


@pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning")
def test_fused_as_stock() -> None:
    """By lists of names, and by the graph."""
    from torch.fx.experimental.optimization import fuse

    def by_names(model: nn.Module) -> Any:
        return torch.ao.quantization.fuse_modules(model, [["0", "1", "2"], ["3", "4"]])

    x = torch.randn(2, 3, 6, 7)
    for fused in (by_names, fuse):
        wanted, found = fused(decoder()), fused(upconv.accelerate(decoder()))
        assert [(name, type(m)) for name, m in found.named_modules()][1:] == [
            (name, type(m)) for name, m in wanted.named_modules()
        ][1:]
        assert_computed(found, x, wanted(x))


# --- profilers and other patches -------------------------------------------------------------------------------------


@contextmanager
def counting(owner: Any, name: str) -> Iterator[list[Any]]:
    """As a profiler does it: a function in the place of another one, which it calls."""
    seen, old = [], getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return old(*args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield seen
    finally:
        setattr(owner, name, old)


@RANKS
@WAYS
def test_a_patched_functional_sees_the_call(rank: int, way: str) -> None:
    ours, theirs = twins(way, rank, 4, 3, 3, 2)
    x = image(rank)
    with counting(F, f"conv_transpose{rank}d") as seen:
        assert_equal(ours(x), theirs(x))
        assert len(seen) == 2 and len(seen[0]) == len(seen[1])
        compiled = torch.compile(ours, backend="eager", fullgraph=True)
        assert_close(compiled(x), theirs(x), length=512)
        assert len(seen) >= 4
    assert_computed(ours, x, theirs(x))


@WAYS
def test_a_patched_forward_sees_the_call(way: str) -> None:
    """Whatever the order in which people patch and accelerate, undo and restore."""
    x = image(2)
    for steps in permutations(("accelerate", "patch", "unpatch", "restore")):
        if steps.index("unpatch") < steps.index("patch"):
            continue
        _forget_installed()
        ours, theirs = twins("class", 2, 4, 3, 3, 2) if way == "class" else (None, nn.ConvTranspose2d(4, 3, 3, 2))
        if ours is None:
            ours = copy.deepcopy(theirs)
        wanted = theirs(x)
        patched = False
        patch = counting(nn.ConvTranspose2d, "forward")
        for step in steps:
            if step == "patch":
                seen, patched = patch.__enter__(), True
            elif step == "unpatch":
                patch.__exit__(None, None, None)
                patched = False
            else:
                getattr(upconv, step)(ours)
            before = len(seen) if patched else 0
            assert_close(ours(x), wanted, length=512)
            assert not patched or len(seen) == before + 1, steps
        upconv.accelerate(ours)
        assert_computed(ours, x, wanted)


def _forget_installed() -> None:
    """As in a process where nothing was accelerated yet."""
    for base, forward in modules._installed.items():
        if base.forward is forward:  # type: ignore[comparison-overlap]
            base.forward = forward.__wrapped__  # type: ignore[method-assign, attr-defined]
    modules._installed.clear()


@RANKS
@WAYS
@pytest.mark.parametrize("where", ("instance", "class"))
def test_a_patched_output_padding_is_used(rank: int, way: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = twins(way, rank, 4, 3, 3, 2)
    x = image(rank)
    plain = theirs(x)
    if where == "class":
        monkeypatch.setattr(_ConvTransposeNd, "_output_padding", lambda *args, **kwargs: [1] * rank)
    else:
        for layer in (ours, theirs):
            monkeypatch.setattr(layer, "_output_padding", lambda *args, **kwargs: [1] * rank)
    assert theirs(x).shape != plain.shape
    assert_computed(ours, x, theirs(x))


# --- settings changed after construction -----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", (1, 2, 3), ids="{}d".format)
@settings(max_examples=120)
@given(data=st.data())
def test_changed_settings_are_stocks(rank: int, data: st.DataObject) -> None:
    """The same result, or the same error to the letter; both ways and with or without an output_size."""
    changed = data.draw(changed_settings(rank))
    size = data.draw(st.sampled_from((None, None, [10] * rank, [11] * rank, [3])))
    x = image(rank)
    for way in ("accelerated", "class"):
        made = twins(way, rank, 4, 4, 3, 2, 1)
        for layer in made:
            vars(layer).update(changed)
        found, wanted = (error(lambda layer=layer: layer(x, size).detach()) for layer in made)
        assert not differences(found, wanted, 1e-5)


# --- other tensors, transforms, copies -------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("which", ("input", "weight", "bias"))
@pytest.mark.parametrize("layout", (torch.strided, torch.jagged), ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_raise_as_stock(way: str, which: str, layout: torch.layout, kernels: Kernels) -> None:
    """Also of a layer whose plain calls are recognised, by guards of PyTorch's that would end the process."""
    ours, theirs = twins(way, 2, 4, 3, 3)
    x = image(2)
    parts = [torch.randn(5, 4, 5), torch.randn(6, 4, 5)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    for layer in (ours, theirs):
        for _ in range(3):
            layer(x)
        if which != "input":
            del layer._parameters[which]
            setattr(layer, which, nested)
    assert kernels.ran() == ["fwd"] * 3
    given_ = nested if which == "input" else x
    found, wanted = (error(lambda layer=layer: layer(given_)) for layer in (ours, theirs))
    assert found == wanted and not isinstance(wanted, Tensor)


def test_wrappers_that_derive_a_class_stay_accelerated() -> None:
    """As FSDP does (`fully_shard`): a class derived from the module's own takes its place."""
    ours, theirs = twins("accelerated", 2, 4, 3, 3, 2)
    ours.__class__ = type("FSDPConvTranspose2d", (nn.ConvTranspose2d,), {})
    x = image(2)
    assert_computed(ours, x, theirs(x))
    assert len(lines_of(upconv.restore, ours)) == 1


# --- torch.compile and torch.export ----------------------------------------------------------------------------------


def _noting(graphs: list[list[Any]]) -> Any:
    def backend(module: fx.GraphModule, example: Any) -> Any:
        graphs.append([node.target for node in module.graph.nodes if node.op.startswith("call")])
        return module.forward

    return backend


def test_a_compiled_model_follows_marks() -> None:
    """Those that are set before it was compiled, and after."""
    torch.compiler.reset()
    _forget_installed()
    model, x = nn.Sequential(nn.ConvTranspose2d(4, 3, 3, 2)), image(2)
    graphs: list[list[Any]] = []
    compiled = torch.compile(model, backend=_noting(graphs), fullgraph=True)
    wanted = compiled(x)
    upconv.accelerate(model)
    assert_close(compiled(x), wanted, length=512)
    upconv.restore(model)
    assert_close(compiled(x), wanted, length=512)
    upconv.accelerate(model)
    assert_close(compiled(x), wanted, length=512)
    ours = [any("upconv" in str(target) for target in graph) for graph in graphs]
    assert ours == [False, True, False]  # the last call finds the second graph
    assert all(len(graph) == 1 for graph in graphs)
