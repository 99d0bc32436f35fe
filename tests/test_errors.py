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
from upconv import planner

RANKS = pytest.mark.parametrize("rank", (1, 2, 3))
X, W = (2, 4, 5, 6), (4, 3, 3, 3)


@pytest.fixture(params=("native", "flip", "shuffle", pytest.param("cuda", marks=pytest.mark.gpu)))
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU with each plan forced, and a GPU."""
    with nullcontext() if request.param == "cuda" else forced_plans(request.param):
        yield "cuda" if request.param == "cuda" else "cpu"


def assert_same(ours: Callable[[], object], theirs: Callable[[], object], text: str | None = None) -> None:
    """The same error, which has the text; without a text also results of the same dtype, device, shape and strides."""
    found, wanted = error(ours), error(theirs)
    if text is None and isinstance(wanted, Tensor):
        for name in ("shape", "dtype", "device"):
            assert getattr(found, name) == getattr(wanted, name)
        assert found.stride() == wanted.stride()
    else:
        assert isinstance(wanted, tuple), "PyTorch accepts this call"
        assert found == wanted and (text or "") in wanted[1]


# --- functional ------------------------------------------------------------------------------------------------------

# (the text that PyTorch 2.13 gives on a CPU, or a part of it; what differs from a valid call)
INVALID: dict[str, tuple[str, dict[str, Any]]] = {
    "2-D input": (
        "Expected 3D (unbatched) or 4D (batched) input to conv_transpose2d, but got input of size: [5, 6]",
        {"x": (5, 6)},
    ),
    "5-D input": ("Expected 3D (unbatched) or 4D (batched) input", {"x": (1, 1, 4, 5, 6)}),
    "2-D weight": ("weight should have at least three dimensions", {"w": (4, 3)}),
    "3-D weight": ("", {"w": (4, 3, 3)}),
    "5-D weight": ("", {"w": (4, 3, 3, 3, 3)}),
    "stride of 3": (
        "expected stride to be a single integer value or a list of 2 values to match the convolution dimensions, "
        "but got stride=[2, 2, 2]",
        {"stride": (2, 2, 2)},
    ),
    "padding of 3": ("expected padding to be", {"padding": (1, 1, 1)}),
    "dilation of 3": ("expected dilation to be", {"dilation": (1, 1, 1)}),
    "output_padding of 3": ("expected output_padding to be", {"output_padding": (0, 0, 0)}),
    "stride of none": ("", {"stride": ()}),
    "groups 0": ("non-positive groups is not supported", {"groups": 0}),
    "groups -1": ("non-positive groups is not supported", {"groups": -1}),
    "stride 0": ("non-positive stride is not supported", {"stride": 0}),
    "stride -1": ("non-positive stride is not supported", {"stride": (2, -1)}),
    "padding -1": ("negative padding is not supported", {"padding": -1}),
    "output_padding -1": ("negative output_padding is not supported", {"output_padding": -1}),
    "dilation -1": ("dilation should be greater than zero", {"dilation": -1}),
    "dilation 0": ("", {"dilation": 0}),
    "channels": (
        "Given transposed=1, weight of size [4, 3, 3, 3], expected input[2, 5, 5, 6] to have 4 channels, but got 5 "
        "channels instead",
        {"x": (2, 5, 5, 6)},
    ),
    "bias of 4": (
        "Given transposed=1, weight of size [4, 3, 3, 3], expected bias to be 1-dimensional with 3 elements, but got "
        "bias of size [4] instead",
        {"b": (4,)},
    ),
    "bias of 1": ("expected bias to be 1-dimensional with 3 elements", {"b": (1,)}),
    "2-D bias": ("expected bias to be 1-dimensional with 3 elements", {"b": (3, 1)}),
    "bias per group": ("with 6 elements", {"b": (3,), "groups": 2}),
    "groups 3": (
        "Given groups=3, expected weight to be divisible by 3 at dimension 0, but got weight of size [[4, 3, 3, 3]] "
        "instead",
        {"groups": 3},
    ),
    "groups 8": (
        "Given groups=8, expected weight to be at least 8 at dimension 0, but got weight of size [4, 3, 3, 3] instead",
        {"groups": 8},
    ),
    "output_padding as large as the stride": (
        "output padding must be smaller than either stride or dilation, but got output_padding_height: 2 "
        "output_padding_width: 2 stride_height: 2 stride_width: 2 dilation_height: 1 dilation_width: 1",
        {"stride": 2, "output_padding": 2},
    ),
    "output_padding in one dimension": (
        "output padding must be smaller", {"stride": (2, 3), "output_padding": (1, 3), "dilation": (1, 2)},
    ),
    "no output left": (  # in float64: oneDNN, which serves float32, returns an empty tensor
        "Given input size per channel: (2 x 2). Calculated output size per channel: (0 x 0). Output size is too small",
        {"x": (2, 4, 2, 2), "padding": 2, "dtype": torch.float64},
    ),
    "negative output": ("Output size is too small", {"x": (2, 4, 2, 2), "padding": 5, "dtype": torch.float64}),
    "negative output in oneDNN": ("", {"x": (2, 4, 2, 2), "padding": 5}),
    "empty height": (
        "Only zero batch or zero channel inputs are supported, but got input shape: [2, 4, 0, 6]", {"x": (2, 4, 0, 6)},
    ),
    "empty and unbatched": ("", {"x": (4, 0, 6)}),
    "no output channels": ("", {"w": (4, 0, 3, 3)}),
    "no taps": ("", {"w": (4, 3, 0, 3)}),
    "no input channels": ("", {"x": (2, 0, 5, 6), "w": (0, 3, 3, 3)}),
    "text for a stride": ("", {"stride": ("a", "b")}),
    "float64 weight": (
        "Input type (torch.FloatTensor) and weight type (torch.DoubleTensor)", {"w_dtype": torch.float64},
    ),
    # PyTorch says it in another way on a CPU without bfloat16 instructions.
    "bfloat16 input": (
        "Input type (CPUBFloat16Type) and weight type (torch.FloatTensor)"
        if torch.bfloat16 in planner.cpu_device().onednn
        else "expected scalar type BFloat16 but found Float",
        {"dtype": torch.bfloat16, "w_dtype": torch.float32},
    ),
    "float64 bias": (
        "Input type (torch.FloatTensor) and bias type (torch.DoubleTensor)", {"b": (3,), "b_dtype": torch.float64},
    ),
    "integers": ("\"slow_conv_transpose2d_out_cpu\" not implemented for 'Int'", {"dtype": torch.int32}),
    "booleans": ("\"slow_conv_transpose2d_out_cpu\" not implemented for 'Bool'", {"dtype": torch.bool}),
    "8-bit floats": ('"slow_conv_transpose2d_out_cpu" not implemented for', {"dtype": torch.float8_e5m2}),
    "complex weight": ("should be the same", {"w_dtype": torch.complex64}),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_invalid_calls(case: str, device: str) -> None:
    """A GPU accepts some of them (an empty output), and has texts of its own."""
    text, change = INVALID[case]
    # All arguments by position, so that where PyTorch lists what it got, it got the same.
    arguments = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    args = [change.get(name, value) for name, value in arguments.items()]
    dtype, shapes = change.get("dtype", torch.float32), (change.get("x", X), change.get("w", W), change.get("b"))
    dtypes = dtype, change.get("w_dtype", dtype), change.get("b_dtype", torch.float32)
    given = [s if s is None else torch.randn(s, device=device).to(d) for s, d in zip(shapes, dtypes)]
    calls = (partial(home[2], *given, *args) for home in (OURS, THEIRS))
    assert_same(*calls, text if device == "cpu" else None)


@pytest.mark.parametrize("rank", (1, 3))
def test_invalid_calls_in_other_ranks(rank: int, device: str) -> None:
    x, w = (torch.randn(*n, *(k,) * rank, device=device) for n, k in (((2, 4), 5), ((4, 3), 3)))
    calls: list[tuple[Any, ...]] = [
        (x[0, 0, ...], w), (x, w[..., 0]), (x[:, :3], w), (x, w, torch.randn(5, device=device)), (x, w, None, -1),
        (x, w, None, (2,) * (rank + 1)), (x, w, None, 1, 7), (x, w, None, 2, 0, 2), (x, w, None, 1, 0, 0, 3),
        (x, w, None, 1, 0, 0, 1, -2), (x[..., :0], w),
    ]  # fmt: skip
    for args in calls:
        assert_same(partial(OURS[rank], *args), partial(THEIRS[rank], *args), "" if device == "cpu" else None)


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

MODE = 'Only "zeros" padding mode is supported for ConvTranspose'
CONSTRUCTIONS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *((MODE, (4, 4, 3), {"padding_mode": mode}) for mode in ("reflect", "replicate", "circular", "unknown")),
    (MODE, (4, 6, 3), {"padding_mode": "reflect", "groups": 0}),  # checked before the others
    ("groups must be a positive integer", (4, 4, 3), {"groups": 0}),
    ("groups must be a positive integer", (4, 4, 3), {"groups": -2}),
    ("in_channels must be divisible by groups", (4, 6, 3), {"groups": 3}),
    ("out_channels must be divisible by groups", (4, 6, 3), {"groups": 4}),
    ("", (4, 6, -3), {}),
    ("", (4, 6), {}),
    ("", (4, 6, 3), {"strides": 2}),
]


@RANKS
@pytest.mark.parametrize(("text", "args", "kwargs"), CONSTRUCTIONS)
def test_construction_errors(rank: int, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ours, theirs = (partial(getattr(home, f"ConvTranspose{rank}d"), *args, **kwargs) for home in (upconv, nn))
    assert_same(ours, theirs, text)


def _forward_errors(rank: int) -> list[tuple[str, dict[str, Any], Callable[[Any], object]]]:
    x, size = torch.randn(2, 4, *(5,) * rank), [9] * rank

    def other_mode(m: Any) -> object:
        m.padding_mode = "reflect"
        return m(x)

    got, asked = "output_size must have", "requested an output size of"
    least, most, shape = (f"[{', '.join([n] * rank)}]" for n in ("9", "10", "5"))
    strided = {"stride": 2, "padding": 1}
    return [
        (f"Only `zeros` padding mode is supported for ConvTranspose{rank}d", {}, other_mode),
        (
            f"ConvTranspose{rank}D: for {rank + 2}D input, {got} {rank} or {rank + 2} elements (got {rank + 1})",
            strided, lambda m: m(x, output_size=[9] * (rank + 1)),
        ),
        (
            f"ConvTranspose{rank}D: for {rank + 1}D input, {got} {rank} or {rank + 1} elements (got {rank + 2})",
            strided, lambda m: m(x[0], output_size=[9] * (rank + 2)),
        ),
        (
            f"{asked} {[8, *size[1:]]}, but valid sizes range from {least} to {most} (for an input of "
            f"torch.Size({shape}))",
            strided, lambda m: m(x, output_size=[8, *size[1:]]),
        ),
        (f"{asked} (", strided, lambda m: m(x, output_size=(*size[1:], 11))),
        (f"{asked} torch.Size(", strided, lambda m: m(x, output_size=torch.Size((3, 3, *size[1:], 11)))),
        (asked, strided, lambda m: m(x[0], output_size=[*size[1:], 20])),
        ("object of type 'int' has no len()", strided, lambda m: m(x, output_size=9)),
        ("to have 4 channels, but got 3 channels instead", {}, lambda m: m(x[:, :3])),
        (f"Expected {rank + 1}D (unbatched) or {rank + 2}D (batched) input to", {}, lambda m: m(x[0, 0])),
        ("Output size is too small", {"padding": 9, "dtype": torch.float64}, lambda m: m(x.double())),
        ("output padding must be smaller than either stride or dilation", {"output_padding": 1}, lambda m: m(x)),
        ("", {"padding": "same"}, lambda m: m(x)),
        ("", {}, lambda m: m(x.double())),
        ("", {}, lambda m: m(None)),
        ("", {}, lambda m: m()),
        ("", {"kernel_size": (3,) * (rank + 1)}, lambda m: m(x)),
        ("", {"stride": (2,) * (rank + 1)}, lambda m: m(x)),
        ("", {"stride": 0}, lambda m: m(x)),
        ("", {"padding": -1}, lambda m: m(x)),
        ("", {"kernel_size": 0}, lambda m: m(x)),
        ("", {"out_channels": 0}, lambda m: m(x)),
    ]  # fmt: skip


@RANKS
@pytest.mark.parametrize("case", range(len(_forward_errors(2))))
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_forward_errors(rank: int, case: int) -> None:
    text, kwargs, call = _forward_errors(rank)[case]
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **kwargs}
    ours, theirs = (getattr(home, f"ConvTranspose{rank}d")(**arguments) for home in (upconv, nn))
    wanted = error(partial(call, theirs))
    if wanted[0] == "TypeError" and "received an invalid combination" in wanted[1]:
        # PyTorch lists how it was called, and we call with one argument more by name.
        assert error(partial(call, ours))[0] == "TypeError"
    else:
        assert_same(partial(call, ours), partial(call, theirs), text)
