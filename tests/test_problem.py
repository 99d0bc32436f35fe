"""The arithmetic of transposed convolution: sizes, phases and taps against brute force and against PyTorch."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings

from conftest import THEIRS
from strategies import problems
from upconv import reference
from upconv.problem import AxisPhase, Problem


@given(p=problems())
@settings(max_examples=400)
def test_phases_cover_each_tap_and_input_pair_exactly_once(p: Problem) -> None:
    """Walk all phases of all dimensions: every (output, tap, input) triple of the definition turns up once."""
    walked: Counter[tuple[tuple[int, int, int], ...]] = Counter()

    def triples(axis: AxisPhase, stride: int, size: int) -> list[tuple[int, int, int]]:
        found = []
        for j in range(axis.count):
            q = axis.first + j
            for tap, offset in zip(axis.taps, axis.offsets):
                if 0 <= q - offset < size:
                    found.append((axis.start + j * stride, tap, q - offset))
        return found

    for phase in p.phases:
        walked.update(product(*(triples(a, s, n) for a, s, n in zip(phase.axes, p.stride, p.size))))
    expected = product(
        *(
            [(i * s + k * d - pad, k, i) for i in range(n) for k in range(kernel) if 0 <= i * s + k * d - pad < out]
            for n, kernel, s, pad, d, out in zip(p.size, p.kernel, p.stride, p.padding, p.dilation, p.out_size)
        )
    )
    assert walked == Counter(expected)


@pytest.mark.parametrize("stride", [3, 1000, 200_000, 2**63 - 1])
def test_phases_do_not_grow_with_the_stride(stride: int) -> None:
    """A listing of all residues would never end."""
    p = Problem.make(1, 2, 2, (5, 1), 3, stride, 1)
    assert len(p.phases) == 9 and p.tapless_phases == stride**2 - 9
    assert [[(a.residue, a.taps) for a in axis] for axis in p.axis_phases] == [[(0, (0,)), (1, (1,)), (2, (2,))]] * 2


@given(p=problems(dtypes=(torch.float64,)))
@settings(max_examples=300)
def test_reference_equals_pytorch_in_float64(p: Problem) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(p.input_shape, dtype=torch.float64, generator=generator).requires_grad_()
    w = torch.randn(p.weight_shape, dtype=torch.float64, generator=generator).requires_grad_()
    b = torch.randn(p.out_channels, dtype=torch.float64, generator=generator).requires_grad_()
    y = THEIRS[p.rank](x, w, b, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    assert tuple(y.shape) == p.output_shape
    torch.testing.assert_close(reference.forward(p, x, w, b), y.detach(), rtol=1e-12, atol=1e-12)
    g = torch.randn(p.output_shape, dtype=torch.float64, generator=generator)
    for ours, theirs in zip(reference.gradients(p, g, x, w), torch.autograd.grad(y, (x, w, b), g)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel,stride", [((4, 4), 1), ((2, 3), 5), ((8,), 1), ((2, 1, 3), 2)])
def test_images_of_one_pixel_are_a_matrix(kernel: tuple[int, ...], stride: int) -> None:
    """Input and output of the flat problem have the same bytes in the same places."""
    p = Problem.make(5, 7, 3, (1,) * len(kernel), kernel, stride, dtype=torch.float64)
    flat = p.flat
    assert flat is not None and flat.layout == "channels_last" and flat.size == (1, 5)
    x, w = (torch.randint(-9, 10, s).to(p.dtype) for s in (p.input_shape, p.weight_shape))  # in any order exact
    rows = x.as_strided(flat.input_shape, (35, 1, 35, 7))
    assert rows.is_contiguous(memory_format=torch.channels_last)
    out = reference.forward(flat, rows, w.view(flat.weight_shape), None)
    assert torch.equal(out.permute(0, 2, 3, 1).reshape(p.output_shape), reference.forward(p, x, w, None))


# problems.md of the founding models: GFLOP, and the roof in ms at 4.27 TB/s and 411 TFLOP/s in TF32.
@pytest.mark.parametrize(
    ("p", "gflop", "roof"),
    [
        (Problem.make(8, 64, 64, (1024, 1024), 3), 618.5, 1.504),
        (Problem.make(16, 32, 64, (128, 256), (3, 5), (2, 3), (1, 2), 0, (2, 1), 4), 8.1, 0.204),
        (Problem.make(32, 256, 256, (64, 64), 4, 2, 1, 0, 1, 256), 1.1, 0.157),
    ],
)
def test_flops_and_roof_of_the_known_layers(p: Problem, gflop: float, roof: float) -> None:
    assert p.flops / 1e9 == pytest.approx(gflop, abs=0.06)
    assert p.roof_seconds(411.2e12, 4.2718e12) * 1e3 == pytest.approx(roof, abs=0.0015)


def test_bytes_count_each_tensor_once() -> None:
    p = Problem.make(2, 4, 6, (5, 7), 3, bias=True, dtype=torch.bfloat16)
    x, w, y = 2 * 4 * 35, 4 * 6 * 9, 2 * 6 * 7 * 9
    assert p.bytes == 2 * (x + w + y + 6)
    assert p.with_(pass_="grad-weight").bytes == 2 * (x + w + y)
    assert p.with_(pass_="step").bytes == 2 * (3 * (x + w + y) + 12)
    assert p.with_(pass_="step").flops == 3 * p.flops


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": (1, 2, 3, 4)}, "size must have 1 to 3 spatial dimensions, got (1, 2, 3, 4)"),
        ({"stride": (0, 1)}, "stride must be at least 1 in every dimension, got (0, 1)"),
        ({"groups": 4}, "out_channels must be a positive multiple of groups=4, got 6"),
        ({"layout": "nhwc"}, "layout must be one of ('nchw', 'channels_last'), got 'nhwc'"),
        ({"precision": "bf16"}, "precision must be one of ('ieee', 'tf32') for torch.float32, got 'bf16'"),
        ({"padding": (4, 0)}, "padding=(4, 0) leaves no output: input size (5, 7) gives (-1, 9)"),
        (
            {"output_padding": (1, 0)},
            "output_padding must be smaller than either stride or dilation, got output_padding=(1, 0) "
            "with stride=(1, 1) and dilation=(1, 1)",
        ),
    ],
)
def test_bad_problems_are_named(changes: dict[str, object], message: str) -> None:
    p = Problem.make(2, 4, 6, (5, 7), 3)
    with pytest.raises(ValueError) as error:
        p.with_(**changes)
    assert str(error.value) == message


def test_another_dtype_has_a_precision_of_its_own() -> None:
    tf32 = Problem.make(1, 4, 4, (5,), 3, precision="tf32")
    assert tf32.with_(dtype=torch.float32).precision == tf32.with_(stride=(2,)).precision == "tf32"
    for dtype, precision in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float64, "fp64")):
        assert tf32.with_(dtype=dtype).precision == precision
        with pytest.raises(ValueError, match=f"precision must be one of .* for {dtype}, got 'tf32'"):
            tf32.with_(dtype=dtype, precision="tf32")
