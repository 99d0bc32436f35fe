"""Errors are PyTorch's to the letter: each invalid call is made on both in the same run, and the texts are compared.

The engines must not serve a call that PyTorch refuses, so the functional calls run with plans forced as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import upconv
from conftest import OURS, THEIRS, assert_accurate, forced_plans
from upconv import planner

PLANS = ("native", "flip", "shuffle")


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_plans(request.param):
        yield request.param


def result_of(call: Callable[[], object]) -> object:
    """What the call returns, or the type and text of what it raises."""
    try:
        return call()
    except Exception as error:  # which one it is, is what the tests compare
        return type(error), str(error)


def error_of(call: Callable[[], object]) -> tuple[type[BaseException], str] | None:
    """The exception's type and text, or None when the call succeeds."""
    result = result_of(call)
    return result if isinstance(result, tuple) else None


def assert_same_error(ours: Callable[[], object], theirs: Callable[[], object], text: str | None = None) -> None:
    wanted = error_of(theirs)
    assert wanted is not None, "PyTorch accepts this call"
    if text is not None:
        assert text in wanted[1]
    assert error_of(ours) == wanted


# --- functional ------------------------------------------------------------------------------------------------------

# (the text that PyTorch 2.13 gives, or its beginning; sizes of input, weight and bias; arguments)
INVALID: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, dict[str, Any]]] = {
    "2-D input": (
        "Expected 3D (unbatched) or 4D (batched) input to conv_transpose2d, but got input of size: [5, 6]",
        (5, 6), (4, 3, 3, 3), None, {},
    ),
    "5-D input": ("Expected 3D (unbatched) or 4D (batched) input", (1, 1, 4, 5, 6), (4, 3, 3, 3), None, {}),
    "2-D weight": ("weight should have at least three dimensions", (2, 4, 5, 6), (4, 3), None, {}),
    "3-D weight": ("", (2, 4, 5, 6), (4, 3, 3), None, {}),
    "5-D weight": ("", (2, 4, 5, 6), (4, 3, 3, 3, 3), None, {}),
    "stride of 3": (
        "expected stride to be a single integer value or a list of 2 values to match the convolution dimensions, "
        "but got stride=[2, 2, 2]",
        (2, 4, 5, 6), (4, 3, 3, 3), None, {"stride": (2, 2, 2)},
    ),
    "padding of 3": ("expected padding to be", (2, 4, 5, 6), (4, 3, 3, 3), None, {"padding": (1, 1, 1)}),
    "dilation of 3": ("expected dilation to be", (2, 4, 5, 6), (4, 3, 3, 3), None, {"dilation": (1, 1, 1)}),
    "output_padding of 3": (
        "expected output_padding to be", (2, 4, 5, 6), (4, 3, 3, 3), None, {"output_padding": (0, 0, 0)},
    ),
    "stride of none": ("", (2, 4, 5, 6), (4, 3, 3, 3), None, {"stride": ()}),
    "groups 0": ("non-positive groups is not supported", (2, 4, 5, 6), (4, 3, 3, 3), None, {"groups": 0}),
    "groups -1": ("non-positive groups is not supported", (2, 4, 5, 6), (4, 3, 3, 3), None, {"groups": -1}),
    "stride 0": ("non-positive stride is not supported", (2, 4, 5, 6), (4, 3, 3, 3), None, {"stride": 0}),
    "stride -1": ("non-positive stride is not supported", (2, 4, 5, 6), (4, 3, 3, 3), None, {"stride": (2, -1)}),
    "padding -1": ("negative padding is not supported", (2, 4, 5, 6), (4, 3, 3, 3), None, {"padding": -1}),
    "output_padding -1": (
        "negative output_padding is not supported", (2, 4, 5, 6), (4, 3, 3, 3), None, {"output_padding": -1},
    ),
    "dilation -1": ("dilation should be greater than zero", (2, 4, 5, 6), (4, 3, 3, 3), None, {"dilation": -1}),
    "dilation 0": ("", (2, 4, 5, 6), (4, 3, 3, 3), None, {"dilation": 0}),
    "channels": (
        "Given transposed=1, weight of size [4, 3, 3, 3], expected input[2, 5, 5, 6] to have 4 channels, but got 5 "
        "channels instead",
        (2, 5, 5, 6), (4, 3, 3, 3), None, {},
    ),
    "bias of 4": (
        "Given transposed=1, weight of size [4, 3, 3, 3], expected bias to be 1-dimensional with 3 elements, but got "
        "bias of size [4] instead",
        (2, 4, 5, 6), (4, 3, 3, 3), (4,), {},
    ),
    "bias of 1": ("expected bias to be 1-dimensional with 3 elements", (2, 4, 5, 6), (4, 3, 3, 3), (1,), {}),
    "2-D bias": ("expected bias to be 1-dimensional with 3 elements", (2, 4, 5, 6), (4, 3, 3, 3), (3, 1), {}),
    "bias per group": ("with 6 elements", (2, 4, 5, 6), (4, 3, 3, 3), (3,), {"groups": 2}),
    "groups 3": (
        "Given groups=3, expected weight to be divisible by 3 at dimension 0, but got weight of size [[4, 3, 3, 3]] "
        "instead",
        (2, 4, 5, 6), (4, 3, 3, 3), None, {"groups": 3},
    ),
    "groups 8": (
        "Given groups=8, expected weight to be at least 8 at dimension 0, but got weight of size [4, 3, 3, 3] instead",
        (2, 4, 5, 6), (4, 3, 3, 3), None, {"groups": 8},
    ),
    "output_padding as large as the stride": (
        "output padding must be smaller than either stride or dilation, but got output_padding_height: 2 "
        "output_padding_width: 2 stride_height: 2 stride_width: 2 dilation_height: 1 dilation_width: 1",
        (2, 4, 5, 6), (4, 3, 3, 3), None, {"stride": 2, "output_padding": 2},
    ),
    "output_padding in one dimension": (
        "output padding must be smaller", (2, 4, 5, 6), (4, 3, 3, 3), None,
        {"stride": (2, 3), "output_padding": (1, 3), "dilation": (1, 2)},
    ),
    "no output left": (  # in float64: oneDNN, which serves float32, returns an empty tensor
        "Given input size per channel: (2 x 2). Calculated output size per channel: (0 x 0). Output size is too small",
        (2, 4, 2, 2), (4, 3, 3, 3), None, {"padding": 2, "dtype": torch.float64},
    ),
    "negative output": (
        "Output size is too small", (2, 4, 2, 2), (4, 3, 3, 3), None, {"padding": 5, "dtype": torch.float64},
    ),
    "negative output in oneDNN": ("", (2, 4, 2, 2), (4, 3, 3, 3), None, {"padding": 5}),
    "empty height": (
        "Only zero batch or zero channel inputs are supported, but got input shape: [2, 4, 0, 6]",
        (2, 4, 0, 6), (4, 3, 3, 3), None, {},
    ),
    "empty and unbatched": ("", (4, 0, 6), (4, 3, 3, 3), None, {}),
    "no output channels": ("", (2, 4, 5, 6), (4, 0, 3, 3), None, {}),
    "no taps": ("", (2, 4, 5, 6), (4, 3, 0, 3), None, {}),
    "no input channels": ("", (2, 0, 5, 6), (0, 3, 3, 3), None, {}),
    "text for a stride": ("", (2, 4, 5, 6), (4, 3, 3, 3), None, {"stride": ("a", "b")}),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_invalid_calls(case: str, plan: str) -> None:
    text, shape, weight_shape, bias_shape, kwargs = INVALID[case]
    # All arguments by position, so that where PyTorch lists what it got, it got the same.
    arguments = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1, **kwargs}
    dtype = arguments.pop("dtype", torch.float32)
    args = tuple(arguments.values())
    x, w = torch.randn(shape, dtype=dtype), torch.randn(weight_shape, dtype=dtype)
    b = None if bias_shape is None else torch.randn(bias_shape)
    assert_same_error(
        lambda: upconv.conv_transpose2d(x, w, b, *args), lambda: torch.conv_transpose2d(x, w, b, *args), text
    )


@pytest.mark.parametrize("rank", (1, 3))
def test_invalid_calls_in_other_ranks(rank: int, plan: str) -> None:
    x, w = torch.randn(2, 4, *(5,) * rank), torch.randn(4, 3, *(3,) * rank)
    calls: list[tuple[Any, ...]] = [
        (x[0, 0, ...], w),
        (x, w[..., 0]),
        (x[:, :3], w),
        (x, w, torch.randn(5)),
        (x, w, None, -1),
        (x, w, None, (2,) * (rank + 1)),
        (x, w, None, 1, 7),
        (x, w, None, 2, 0, 2),
        (x, w, None, 1, 0, 0, 3),
        (x, w, None, 1, 0, 0, 1, -2),
        (x[..., :0], w),
    ]
    for args in calls:
        assert_same_error(partial(OURS[rank], *args), partial(THEIRS[rank], *args))  # type: ignore[arg-type]


# PyTorch says it in another way on a CPU without bfloat16 instructions.
BFLOAT16_WITH_FLOAT = (
    "Input type (CPUBFloat16Type) and weight type (torch.FloatTensor)"
    if torch.bfloat16 in planner.cpu_device().onednn
    else "expected scalar type BFloat16 but found Float"
)


@pytest.mark.parametrize(
    ("left", "right", "third", "text"),
    [
        (torch.float32, torch.float64, None, "Input type (torch.FloatTensor) and weight type (torch.DoubleTensor)"),
        (torch.bfloat16, torch.float32, None, BFLOAT16_WITH_FLOAT),
        (
            torch.float32,
            torch.float32,
            torch.float64,
            "Input type (torch.FloatTensor) and bias type (torch.DoubleTensor)",
        ),
        (torch.int32, torch.int32, None, "\"slow_conv_transpose2d_out_cpu\" not implemented for 'Int'"),
        (torch.bool, torch.bool, None, "\"slow_conv_transpose2d_out_cpu\" not implemented for 'Bool'"),
        (torch.float8_e5m2, torch.float8_e5m2, None, '"slow_conv_transpose2d_out_cpu" not implemented for'),
        (torch.float32, torch.complex64, None, "should be the same"),
    ],
    ids=str,
)
def test_dtypes_that_do_not_fit(
    left: torch.dtype, right: torch.dtype, third: torch.dtype | None, text: str, plan: str
) -> None:
    x, w = torch.ones(2, 4, 5, 6).to(left), torch.ones(4, 3, 3, 3).to(right)
    b = None if third is None else torch.ones(3).to(third)
    assert_same_error(lambda: upconv.conv_transpose2d(x, w, b), lambda: torch.conv_transpose2d(x, w, b), text)


def test_tensors_on_other_devices_and_in_other_layouts() -> None:
    x, w = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 3)
    for args in ((x.to("meta"), w), (x, w.to("meta")), (x.to_sparse(), w), (x, w.to_sparse())):
        calls = [partial(call, *args) for call in (upconv.conv_transpose2d, torch.conv_transpose2d)]
        assert error_of(calls[0]) == error_of(calls[1])


def assert_same_result(ours: object, theirs: object) -> None:
    """The same error, or results of the same dtype, device, shape and strides."""
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor), ours
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert ours.device == theirs.device
    else:
        assert ours == theirs


@pytest.mark.gpu
@pytest.mark.parametrize("case", INVALID)
def test_invalid_calls_on_a_gpu(case: str) -> None:
    """PyTorch accepts some of them there (an empty output)."""
    _, shape, weight_shape, bias_shape, kwargs = INVALID[case]
    arguments = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1, **kwargs}
    dtype = arguments.pop("dtype", torch.float32)
    x, w = torch.randn(shape, dtype=dtype, device="cuda"), torch.randn(weight_shape, dtype=dtype, device="cuda")
    b = None if bias_shape is None else torch.randn(bias_shape, device="cuda")
    found = [result_of(partial(home[2], x, w, b, *arguments.values())) for home in (OURS, THEIRS)]
    assert_same_result(*found)


@pytest.mark.gpu
def test_operands_that_do_not_fit_together_on_a_gpu() -> None:
    x, w, b = (torch.randn(size, device="cuda") for size in ((2, 4, 5, 6), (4, 3, 3, 3), (3,)))
    raised = 0
    for args in (
        (x, w.half(), b), (x.half(), w.half(), b), (x, w.double(), b.double()), (x.int(), w.int(), None),
        (x.cpu(), w, b), (x, w.cpu(), b), (x, w, b.cpu()), (x.to("meta"), w, None), (x.to_sparse(), w, b),
    ):  # fmt: skip
        found = [result_of(partial(call, *args)) for call in (upconv.conv_transpose2d, torch.conv_transpose2d)]
        assert_same_result(*found)
        raised += not isinstance(found[0], Tensor)
    assert raised >= 6


@pytest.mark.parametrize(
    "change",
    ({"input": None}, {"input": [1.0]}, {"weight": None}, {"stride": 1.5}, {"groups": 2.0}, {"bias": 3.0}),
    ids=str,
)
def test_arguments_of_wrong_types_raise_type_errors(change: dict[str, Any]) -> None:
    """The text differs where PyTorch lists the arguments that it was given: ours passes on all of them by position."""
    args = {"input": torch.randn(2, 4, 5, 6), "weight": torch.randn(4, 3, 3, 3), **change}
    for call in (torch.conv_transpose2d, upconv.conv_transpose2d):
        with pytest.raises(TypeError, match=r"conv_transpose2d\(\)"):
            call(**args)


# --- modules ---------------------------------------------------------------------------------------------------------

CONSTRUCTIONS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *(
        ('Only "zeros" padding mode is supported for ConvTranspose', (4, 4, 3), {"padding_mode": mode})
        for mode in ("reflect", "replicate", "circular", "unknown")
    ),
    ('Only "zeros" padding mode', (4, 6, 3), {"padding_mode": "reflect", "groups": 0}),  # checked before the others
    ("groups must be a positive integer", (4, 4, 3), {"groups": 0}),
    ("groups must be a positive integer", (4, 4, 3), {"groups": -2}),
    ("in_channels must be divisible by groups", (4, 6, 3), {"groups": 3}),
    ("out_channels must be divisible by groups", (4, 6, 3), {"groups": 4}),
    ("", (4, 6, -3), {}),
    ("", (4, 6), {}),
    ("", (4, 6, 3), {"strides": 2}),
]


@pytest.mark.parametrize("rank", (1, 2, 3))
@pytest.mark.parametrize("case", range(len(CONSTRUCTIONS)))
def test_construction_errors(rank: int, case: int) -> None:
    text, args, kwargs = CONSTRUCTIONS[case]
    name = f"ConvTranspose{rank}d"
    assert_same_error(lambda: getattr(upconv, name)(*args, **kwargs), lambda: getattr(nn, name)(*args, **kwargs), text)


def _forward_errors(rank: int) -> list[tuple[str, dict[str, Any], Callable[[Any], object]]]:
    x, size = torch.randn(2, 4, *(5,) * rank), [9] * rank

    def other_mode(m: Any) -> object:
        m.padding_mode = "reflect"
        return m(x)

    got = "output_size must have"
    least, most = f"[{', '.join(['9'] * rank)}]", f"[{', '.join(['10'] * rank)}]"
    shape = f"torch.Size([{', '.join(['5'] * rank)}])"
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
            f"requested an output size of {[8, *size[1:]]}, but valid sizes range from {least} to {most} "
            f"(for an input of {shape})",
            strided, lambda m: m(x, output_size=[8, *size[1:]]),
        ),
        ("requested an output size of (", strided, lambda m: m(x, output_size=(*size[1:], 11))),
        (
            "requested an output size of torch.Size(",
            strided, lambda m: m(x, output_size=torch.Size((3, 3, *size[1:], 11))),
        ),
        ("requested an output size of", strided, lambda m: m(x[0], output_size=[*size[1:], 20])),
        ("object of type 'int' has no len()", strided, lambda m: m(x, output_size=9)),
        ("to have 4 channels, but got 3 channels instead", {}, lambda m: m(x[:, :3])),
        (f"Expected {rank + 1}D (unbatched) or {rank + 2}D (batched) input to", {}, lambda m: m(x[0, 0])),
        ("Output size is too small", {"padding": 9, "dtype": torch.float64}, lambda m: m(x.double())),
        ("output padding must be smaller than either stride or dilation", {"output_padding": 1}, lambda m: m(x)),
        ("", {"padding": "same"}, lambda m: m(x)),
        ("", {}, lambda m: m(x.double())),
        ("", {}, lambda m: m(None)),
        ("", {}, lambda m: m()),
    ]  # fmt: skip


@pytest.mark.parametrize("rank", (1, 2, 3))
@pytest.mark.parametrize("case", range(len(_forward_errors(2))))
def test_forward_errors(rank: int, case: int) -> None:
    text, kwargs, call = _forward_errors(rank)[case]
    ours, theirs = (getattr(home, f"ConvTranspose{rank}d")(4, 6, 3, **kwargs) for home in (upconv, nn))
    wanted = error_of(lambda: call(theirs))
    assert wanted is not None and text in wanted[1]
    found = error_of(lambda: call(ours))
    assert found is not None
    if wanted[0] is TypeError and "received an invalid combination" in wanted[1]:
        assert found[0] is TypeError  # PyTorch lists how it was called, and we call with one argument more by name
    else:
        assert found == wanted


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_layers_that_fail_only_when_called(rank: int) -> None:
    x = torch.randn(2, 4, *(5,) * rank)
    for args, kwargs in (
        ((4, 6, (3,) * (rank + 1)), {}),
        ((4, 6, 0), {}),
        ((4, 0, 3), {}),
        ((4, 6, 3), {"stride": (2,) * (rank + 1)}),
        ((4, 6, 3), {"stride": 0}),
        ((4, 6, 3), {"padding": -1}),
    ):
        with pytest.warns() if args == (4, 0, 3) or args == (4, 6, 0) else torch.no_grad():
            ours, theirs = (getattr(home, f"ConvTranspose{rank}d")(*args, **kwargs) for home in (upconv, nn))
        assert_same_error(partial(ours, x), partial(theirs, x))


# --- random calls ----------------------------------------------------------------------------------------------------


def _random_call(
    rng: random.Random, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, list[Any]]:
    """A call that fits in about half of the cases: sensible sizes, and up to two faults."""
    groups = rng.choice((1, 1, 2))
    channels, per_group = groups * rng.randint(1, 2), rng.randint(1, 3)
    shape = [rng.randint(1, 2), channels, *(rng.randint(1, 5) for _ in range(rank))]
    weight = [channels, per_group, *(rng.randint(1, 4) for _ in range(rank))]
    bias: list[int] | None = rng.choice((None, [per_group * groups]))
    stride, padding, output_padding, dilation = (
        [rng.randint(low, high) for _ in range(rank)] for low, high in ((1, 3), (0, 2), (0, 1), (1, 2))
    )
    for _ in range(rng.choice((0, 1, 1, 2))):
        fault = rng.randrange(12)
        target: list[int] = rng.choice((shape, weight, stride, padding, output_padding, dilation))
        if fault == 0 and target:
            target[rng.randrange(len(target))] = rng.choice((0, -1 if target not in (shape, weight) else 0))
        elif fault == 1:
            target.append(1)
        elif fault == 2 and target:
            target.pop()
        elif fault == 3:
            shape[1 % len(shape)] += rng.choice((1, 2))
        elif fault == 4:
            bias = rng.choice(([per_group], [per_group * groups + 1], [0], [1], [per_group * groups, 1], []))
        elif fault == 5:
            groups = rng.choice((0, -1, 3, 5, channels))
        elif fault == 6:
            output_padding = [rng.randint(1, 4) for _ in range(rank)]
        elif fault == 7:
            padding = [rng.randint(2, 7) for _ in range(rank)]
        elif fault == 8:
            shape[0] = 0
        elif fault == 9:
            shape = shape[1:]
        elif fault == 10:
            stride = [rng.randint(1, 3)]
        else:
            dilation = [rng.randint(1, 5) for _ in range(rank)]
    args: list[Any] = [stride, padding, output_padding, groups, dilation]
    for i in (0, 1, 2, 4):
        if len(args[i]) == 1 and rng.random() < 0.5:
            args[i] = args[i][0]
        elif rng.random() < 0.5:
            args[i] = tuple(args[i])
    return tuple(shape), tuple(weight), None if bias is None else tuple(bias), args


@pytest.mark.gpu
@pytest.mark.parametrize("rank", (1, 2, 3))
def test_random_calls_on_a_gpu_raise_or_return_what_torchs_do(rank: int) -> None:
    rng = random.Random(23 + rank)
    for _ in range(30):  # each valid one compiles a kernel
        shape, weight_shape, bias_shape, args = _random_call(rng, rank)
        sizes = (shape, weight_shape, bias_shape)
        x, w, b = (None if size is None else torch.randn(size, device="cuda").double() for size in sizes)
        theirs, ours = (result_of(partial(home[rank], x, w, b, *args)) for home in (THEIRS, OURS))
        assert_same_result(ours, theirs)
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_random_calls_raise_or_return_what_torchs_do(rank: int, plan: str) -> None:
    rng = random.Random(17 + rank)
    raised = returned = 0
    for _ in range(120):
        shape, weight_shape, bias_shape, args = _random_call(rng, rank)
        x, w = torch.randn(shape), torch.randn(weight_shape)
        b = None if bias_shape is None else torch.randn(bias_shape)
        theirs, ours = (result_of(partial(home[rank], x, w, b, *args)) for home in (THEIRS, OURS))
        if not isinstance(theirs, Tensor):
            raised += 1
            assert ours == theirs, (shape, weight_shape, bias_shape, args)
            continue
        returned += 1
        assert isinstance(ours, Tensor), (shape, weight_shape, bias_shape, args, ours)
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        if not theirs.numel():
            continue
        wide = [None if t is None else t.double() for t in (x, w, b)]
        truth = THEIRS[rank](*wide, *args)  # type: ignore[misc]
        size = THEIRS[rank](*(None if t is None else t.abs() for t in wide), *args)  # type: ignore[misc]
        assert_accurate(ours, truth, size, w.numel(), theirs)
    assert raised >= 30 and returned >= 30
