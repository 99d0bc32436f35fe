"""Calls that were made before: results do not depend on what was seen, and what is remembered has bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import upconv
from situations import differences, error
from situations.observers import Listing as Dispatch
from situations.observers import Names as Function
from upconv import dispatch
from upconv.replay import calls

pytestmark = pytest.mark.usefixtures("kernels")


class Subclass(Tensor):
    pass


OTHERS: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.contiguous(memory_format=torch.channels_last), lambda x: x[0], lambda x: x[..., 1:], torch._neg_view,
    lambda x: x.double(), lambda x: nn.Parameter(x), lambda x: x.to("meta"), lambda x: x.as_subclass(Subclass),
    lambda x: x.mT.contiguous().mT, lambda x: x.to_sparse(), lambda x: None,
)  # fmt: skip
"""Other inputs than a plain one."""
WITHIN: tuple[Callable[[], AbstractContextManager[object]], ...] = (
    torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), Dispatch, Function,
    forward_ad.dual_level,
)  # fmt: skip
TRANSFORMS: tuple[Callable[[Any, Tensor], Any], ...] = (
    lambda layer, x: torch.func.grad(lambda t: layer(t).sum())(x),
    lambda layer, x: torch.func.vmap(layer)(torch.stack((x, x))),
    lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
)


def changed(layer: Any, rng: random.Random) -> None:
    """Something of a layer, some of which no version counts."""
    rng.choice((
        lambda: setattr(layer, "padding", rng.choice(((0, 0), (1, 1), (1, 0), [1, 1], 1))),
        lambda: layer.weight.requires_grad_(not layer.weight.requires_grad),
        lambda: layer.weight.data.mul_(1.1),
        lambda: setattr(layer.weight, "data", layer.weight.data.contiguous(memory_format=torch.channels_last)),
        lambda: setattr(layer.weight, "data", layer.weight.data.mT.contiguous().mT),
        lambda: setattr(layer, "weight", nn.Parameter(torch.randn_like(layer.weight))),
        lambda: setattr(layer, "bias", None if layer.bias is not None else nn.Parameter(torch.randn(6))),
    ))()  # fmt: skip


def called(layer: Any, x: Any, transform: Any) -> Any:
    """The result, or the error, and the gradients."""
    out = error(partial(layer, x) if transform is None else partial(transform, layer, x))
    if not isinstance(out, Tensor) or not out.requires_grad or out.device.type != "cpu":
        return out
    leaves = [t for t in (x, *layer.parameters()) if t.requires_grad]
    return [out, *torch.autograd.grad(out.double().square().sum(), leaves, allow_unused=True)]


def random_calls(
    rng: random.Random, count: int, other: float, change: float, within: float
) -> Iterator[tuple[Any, Any, AbstractContextManager[object]]]:
    """Layers, inputs and contexts, and the chances of other inputs, of changes of the layer and of contexts."""
    layers = [upconv.ConvTranspose2d(4, 6, 3, stride, 1, bias=bias) for stride, bias in ((1, True), (2, False))]
    for _ in range(count):
        layer = rng.choice(layers)
        x: Any = torch.randn(rng.choice((1, 2)), 4, 5, 6)
        x = rng.choice(OTHERS)(x) if rng.random() < other else x.requires_grad_(rng.random() < 0.5)
        if rng.random() < change:
            changed(layer, rng)
        yield layer, x, rng.choice(WITHIN)() if rng.random() < within else nullcontext()


@pytest.mark.parametrize("seed", range(20))
def test_results_do_not_depend_on_what_was_seen(seed: int) -> None:
    """Random calls in turn, each as it is computed when nothing was seen before."""
    rng = random.Random(seed)
    for layer, x, context in random_calls(rng, 60, 0.3, 0.2, 0.4):
        transform = rng.choice(TRANSFORMS) if isinstance(x, Tensor) and rng.random() < 0.1 else None
        with context:
            found = called(layer, x, transform)
            kept, calls.seen = calls.seen, {}
            try:
                wanted = called(layer, x, transform)
            finally:
                calls.seen = kept
        assert not differences(found, wanted, 0)


def test_the_third_call_looks_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of training and of validation, over many epochs, with a last batch that is smaller; with guards alone."""
    layer = upconv.ConvTranspose2d(4, 6, 3)
    found, looked = dispatch.find_plan, []
    monkeypatch.setattr(dispatch, "find_plan", lambda *given: looked.append(1) or found(*given))
    for epoch in range(30):
        if epoch == 2:
            looked.clear()
        for batch in (8, 8, 8, 8, 3):
            layer(torch.randn(batch, 4, 5, 6))
        with torch.no_grad():
            for _ in range(3):
                layer(torch.randn(4, 4, 5, 6))
    assert len(looked) <= 2
    calls.forget()
    looked.clear()
    with torch.device("cpu"):  # a mode, but one that wants to see no call
        for _ in range(6):
            layer(torch.randn(4, 4, 5, 6))
    assert len(looked) == 2
    calls.forget()
    looked.clear()
    monkeypatch.setattr(calls, "GUARDS", None)
    for _ in range(4):
        layer(torch.randn(4, 4, 5, 6))
    assert len(looked) == 4 and not calls.seen


def test_guards_are_not_made_without_end() -> None:
    x = torch.randn(2, 4, 5, 6)
    layers = [upconv.ConvTranspose2d(4, 6, 3, 1, i % 2, dilation=1 + i // 2) for i in range(6)]
    for i in range(100):  # layers of the same shapes, and other guards
        for layer in layers:
            for _ in range(2):
                layer(x.clone().requires_grad_(bool(i % 2)))
    (noted,) = calls.seen.values()
    assert len(noted.calls) == calls.MOST_CALLS and noted.made == calls.MOST_GUARDS


def test_sizes_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST", 8)
    sizes = []
    for n in range(20):
        upconv.conv_transpose2d(torch.randn(1 + n, 4, 5, 6), torch.randn(4, 6, 3, 3))
        sizes.append(len(calls.seen))
    assert max(sizes) == 8 and sizes[8] == 1
