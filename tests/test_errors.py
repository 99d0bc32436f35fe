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
from torch import Tensor, nn

import upconv
from conftest import OURS, THEIRS, forced_plans
from situations import error

RANKS = pytest.mark.parametrize("rank", (1, 2, 3))
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


# --- functional ------------------------------------------------------------------------------------------------------

DOUBLE = torch.float64  # oneDNN, which serves float32, returns an empty tensor where no output is left
INVALID: list[dict[str, Any]] = [
    # shapes
    {"x": (5, 6)}, {"x": (1, 1, 4, 5, 6)}, {"w": (4, 3)}, {"w": (4, 3, 3)}, {"w": (4, 3, 3, 3, 3)},
    {"x": (2, 5, 5, 6)}, {"b": (4,)}, {"b": (1,)}, {"b": (3, 1)}, {"b": (3,), "groups": 2}, {"groups": 3},
    {"groups": 8}, {"x": (2, 4, 0, 6)}, {"x": (4, 0, 6)}, {"w": (4, 0, 3, 3)}, {"w": (4, 3, 0, 3)},
    {"x": (2, 0, 5, 6), "w": (0, 3, 3, 3)},
    {"x": (2, 4, 2, 2), "padding": 2, "dtype": DOUBLE}, {"x": (2, 4, 2, 2), "padding": 5, "dtype": DOUBLE},
    {"x": (2, 4, 2, 2), "padding": 5},
    # arguments
    {"stride": (2, 2, 2)}, {"padding": (1, 1, 1)}, {"dilation": (1, 1, 1)}, {"output_padding": (0, 0, 0)},
    {"stride": ()}, {"groups": 0}, {"groups": -1}, {"stride": 0}, {"stride": (2, -1)}, {"padding": -1},
    {"output_padding": -1}, {"dilation": -1}, {"dilation": 0}, {"stride": 2, "output_padding": 2},
    {"stride": ("a", "b")}, {"stride": (2, 3), "output_padding": (1, 3), "dilation": (1, 2)},
    # dtypes
    {"w_dtype": DOUBLE}, {"dtype": torch.bfloat16, "w_dtype": torch.float32}, {"b": (3,), "b_dtype": DOUBLE},
    {"dtype": torch.int32}, {"dtype": torch.bool}, {"dtype": torch.float8_e5m2}, {"w_dtype": torch.complex64},
]  # fmt: skip
"""What differs from a valid call."""


@pytest.mark.parametrize("change", INVALID, ids=str)
def test_invalid_calls(change: dict[str, Any], device: str) -> None:
    """A GPU accepts some of them (an empty output), as does oneDNN."""
    # All arguments by position, so that where PyTorch lists what it got, it got the same.
    arguments = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    args = [change.get(name, value) for name, value in arguments.items()]
    dtype, shapes = change.get("dtype", torch.float32), (change.get("x", X), change.get("w", W), change.get("b"))
    dtypes = dtype, change.get("w_dtype", dtype), change.get("b_dtype", torch.float32)
    given = [s if s is None else torch.randn(s, device=device).to(d) for s, d in zip(shapes, dtypes)]
    assert_same(*(partial(home[2], *given, *args) for home in (OURS, THEIRS)))


@pytest.mark.parametrize("rank", (1, 3))
def test_invalid_calls_in_other_ranks(rank: int, device: str) -> None:
    x, w = (torch.randn(*n, *(k,) * rank, device=device) for n, k in (((2, 4), 5), ((4, 3), 3)))
    calls: list[tuple[Any, ...]] = [
        (x[0, 0, ...], w), (x, w[..., 0]), (x[:, :3], w), (x, w, torch.randn(5, device=device)), (x, w, None, -1),
        (x, w, None, (2,) * (rank + 1)), (x, w, None, 1, 7), (x, w, None, 2, 0, 2), (x, w, None, 1, 0, 0, 3),
        (x, w, None, 1, 0, 0, 1, -2), (x[..., :0], w),
    ]  # fmt: skip
    for args in calls:
        assert_same(partial(OURS[rank], *args), partial(THEIRS[rank], *args))


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


# --- modules ---------------------------------------------------------------------------------------------------------

CONSTRUCTIONS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    *(((4, 4, 3), {"padding_mode": mode}) for mode in ("reflect", "replicate", "circular", "unknown")),
    ((4, 6, 3), {"padding_mode": "reflect", "groups": 0}),  # the mode is checked before the others
    ((4, 4, 3), {"groups": 0}), ((4, 4, 3), {"groups": -2}), ((4, 6, 3), {"groups": 3}), ((4, 6, 3), {"groups": 4}),
    ((4, 6, -3), {}), ((4, 6), {}), ((4, 6, 3), {"strides": 2}),
]  # fmt: skip


@RANKS
@pytest.mark.parametrize(("args", "kwargs"), CONSTRUCTIONS)
def test_construction_errors(rank: int, args: tuple[int, ...], kwargs: dict[str, Any]) -> None:
    ours, theirs = (partial(getattr(home, f"ConvTranspose{rank}d"), *args, **kwargs) for home in (upconv, nn))
    assert_same(ours, theirs)


def _forward_errors(rank: int) -> list[tuple[dict[str, Any], Callable[[Any], object]]]:
    x, size = torch.randn(2, 4, *(5,) * rank), [9] * rank
    strided = {"stride": 2, "padding": 1}
    return [
        ({}, lambda m: setattr(m, "padding_mode", "reflect") or m(x)),
        (strided, lambda m: m(x, output_size=[9] * (rank + 1))),
        (strided, lambda m: m(x[0], output_size=[9] * (rank + 2))),
        (strided, lambda m: m(x, output_size=[8, *size[1:]])),
        (strided, lambda m: m(x, output_size=(*size[1:], 11))),
        (strided, lambda m: m(x, output_size=torch.Size((3, 3, *size[1:], 11)))),
        (strided, lambda m: m(x[0], output_size=[*size[1:], 20])),
        (strided, lambda m: m(x, output_size=9)),
        ({"padding": 9, "dtype": DOUBLE}, lambda m: m(x.double())),
        *(({}, call) for call in (
            lambda m: m(x[:, :3]), lambda m: m(x[0, 0]), lambda m: m(x.double()), lambda m: m(None), lambda m: m(),
        )),
        *((kwargs, lambda m: m(x)) for kwargs in (
            {"output_padding": 1}, {"padding": "same"}, {"kernel_size": (3,) * (rank + 1)},
            {"stride": (2,) * (rank + 1)}, {"stride": 0}, {"padding": -1}, {"kernel_size": 0}, {"out_channels": 0},
        )),
    ]  # fmt: skip


@RANKS
@pytest.mark.parametrize("case", range(len(_forward_errors(2))))
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_forward_errors(rank: int, case: int) -> None:
    kwargs, call = _forward_errors(rank)[case]
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **kwargs}
    ours, theirs = (getattr(home, f"ConvTranspose{rank}d")(**arguments) for home in (upconv, nn))
    wanted = error(partial(call, theirs))
    if wanted[0] == "TypeError" and "received an invalid combination" in wanted[1]:
        # PyTorch lists how it was called, and we call with one argument more by name.
        assert error(partial(call, ours))[0] == "TypeError"
    else:
        assert_same(partial(call, ours), partial(call, theirs))
