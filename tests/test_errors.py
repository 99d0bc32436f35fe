"""Errors are PyTorch's to the letter: each invalid call is made on both in the same run, and the texts are compared.

The engines must not serve a call that PyTorch refuses, so the functional calls run with plans forced as well. Random
invalid layers are in `situations.fuzz`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import upconv
from conftest import EVERY, OURS, THEIRS, forced_plans
from situations import error

X, W = (2, 4, 5, 6), (4, 3, 3, 3)


@pytest.fixture(params=("native", "flip", "shuffle", pytest.param("cuda", marks=pytest.mark.gpu)))
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU with each plan forced, and a GPU."""
    with nullcontext() if request.param == "cuda" else forced_plans(request.param):
        yield "cuda" if request.param == "cuda" else "cpu"


def assert_same(ours: Callable[[], object], theirs: Callable[[], object]) -> None:
    """The same error; or where PyTorch accepts the call a result of the same dtype, device, shape and strides."""
    found, wanted = error(ours), error(theirs)
    if isinstance(wanted, Tensor):
        for name in ("shape", "dtype", "device"):
            assert getattr(found, name) == getattr(wanted, name)
        assert found.stride() == wanted.stride()
    else:
        assert found == wanted


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool, torch.float8_e5m2, torch.complex64)
NUMBERS = st.integers(-1, 3)
ARGUMENTS = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, list[list[int] | None], list[torch.dtype], list[Any]]:
    """Rank, shapes and dtypes of the operands, and arguments, of a valid call of which up to three things change."""
    rank = draw(st.integers(1, 3))
    shapes = [[2, 4, *(5, 6, 4)[:rank]], [4, 3, *[3] * rank], draw(st.sampled_from((None, [3])))]
    dtypes, values = [draw(st.sampled_from(DTYPES))] * 3, dict(ARGUMENTS)
    several = st.lists(NUMBERS, max_size=rank + 1) | st.lists(NUMBERS, min_size=rank, max_size=rank)
    for _ in range(draw(st.integers(1, 3))):
        what, which = draw(st.sampled_from(("size", "rank", "dtype", *ARGUMENTS))), draw(st.integers(0, 2))
        shape = list(shapes[which] or [])
        if what in ARGUMENTS:
            values[what] = draw(NUMBERS | several.map(tuple) | st.just(("a",) * rank))
        elif what == "dtype":
            dtypes[which] = draw(st.sampled_from(DTYPES))
        elif what == "rank" and draw(st.booleans()):
            shapes[which] = [draw(st.integers(0, 4)), *shape]
        elif shape:
            gone = draw(st.integers(0, len(shape) - 1))
            between = [draw(st.integers(0, 8))] if what == "size" else []
            shapes[which] = [*shape[:gone], *between, *shape[gone + 1 :]]
    return rank, shapes, dtypes, list(values.values())


@settings(max_examples=500 if EVERY else 150)
@given(call=calls())
def test_calls_that_may_be_invalid(call: tuple[Any, ...], device: str) -> None:
    """A GPU accepts some that a CPU does not (an empty output), as does oneDNN."""
    # All arguments by position, so that where PyTorch lists what it got, it got the same.
    rank, shapes, dtypes, args = call
    given_ = [s if s is None else torch.randn(s, device=device).to(d) for s, d in zip(shapes, dtypes)]
    assert_same(*(partial(home[rank], *given_, *args) for home in (OURS, THEIRS)))


def test_tensors_on_other_devices_and_in_other_layouts(device: str) -> None:
    x, w, b = (torch.randn(size, device=device) for size in (X, W, (3,)))
    other = "meta" if device == "cpu" else "cpu"
    for args in ((x.to("meta"), w), (x, w.to(other)), (x, w, b.to(other)), (x.to_sparse(), w), (x, w.to_sparse(), b)):
        assert_same(partial(upconv.conv_transpose2d, *args), partial(torch.conv_transpose2d, *args))


@pytest.mark.parametrize(
    "change",
    ({"input": None}, {"input": [1.0]}, {"weight": None}, {"stride": 1.5}, {"groups": 2.0}, {"bias": 3.0}),
    ids=str,
)
def test_arguments_of_wrong_types_raise_type_errors(change: dict[str, Any]) -> None:
    """The text differs where PyTorch lists the arguments that it was given: ours passes on all of them by position."""
    args = {"input": torch.randn(X), "weight": torch.randn(W), **change}
    for call in (torch.conv_transpose2d, upconv.conv_transpose2d):
        with pytest.raises(TypeError, match=r"conv_transpose2d\(\)"):
            call(**args)
