"""Tensors of more than 2^31 elements, by every family that serves them: kernels count places in memory in 64 bits.

Elements are random; windows at the image's first and last corner and around the 2^31st element are compared with the
float64 reference of what reaches them, so that no reference is as large.
"""

from __future__ import annotations

import fcntl
import gc
import math
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import THEIRS
from test_large import LARGE, made
from upconv import cpu, reference
from upconv.cuda import families
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.gpu import gpu
from upconv.problem import Layout, Pass, Problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WINDOW = 12
BOUND = 5e-3
"""Of the error in norm: results are rounded to 8 bits."""


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """One such test at a time, of all processes: each takes up to 20 GB."""
    with (Path(tempfile.gettempdir()) / "upconv-large-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if torch.cuda.mem_get_info()[0] < 32 << 30:
            pytest.skip("needs 32 GB of free memory")
        yield
        gc.collect()
        torch.cuda.empty_cache()


def cropped(t: Tensor, begin: Sequence[int], length: Sequence[int], image: int) -> Tensor:
    """A part of an image in float64, zeros where it reaches beyond it."""
    ends = [b + n for b, n in zip(begin, length)]
    inside = tuple(slice(max(0, b), max(0, min(e, size))) for b, e, size in zip(begin, ends, t.shape[2:]))
    beyond = [
        n for b, e, size in zip(begin, ends, t.shape[2:]) for n in (max(0, -b), max(0, e - max(size, b)))
    ]  # fmt: skip
    flat = [n for pair in zip(beyond[-2::-2], beyond[-1::-2]) for n in pair]
    return F.pad(t[(slice(image, image + 1), slice(None), *inside)].double(), flat)


def windows(p: Problem) -> list[tuple[int, list[int]]]:
    """Image and first place, in the input, of windows at its corners and where the 2^31st element of a tensor is."""
    size = p.input_shape[2:]
    ends = [max(0, n - WINDOW) for n in size]
    found = [(0, [0] * len(size)), (p.batch - 1, ends)]
    for shape in (p.input_shape, p.output_shape):
        rest = min(2**31, math.prod(shape) - 1)
        image, rest = divmod(rest, math.prod(shape[1:]))
        rest = rest // shape[1] if p.layout == "channels_last" else rest % math.prod(shape[2:])
        begin = []
        for n, end, step in zip(reversed(shape[2:]), reversed(ends), reversed(p.stride)):
            rest, at = divmod(rest, n)
            begin.insert(0, min(end, max(0, at // (step if shape == p.output_shape else 1) - WINDOW // 2)))
        if not any(image == other and max(abs(a - b) for a, b in zip(begin, at)) < WINDOW for other, at in found):
            found.append((image, begin))
    return found


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("pass_", ["fwd", "grad-input", "grad-weight"])
@pytest.mark.parametrize("name", [name for name in LARGE if name != "a row of groups"])
def test_tensors_of_more_than_2_31_elements(name: str, pass_: Pass, layout: Layout) -> None:
    if len(LARGE[name][4]) == 1 and layout != "nchw":
        pytest.skip("1-D tensors have no channels_last")
    p = made(name, pass_, layout)
    size, kernel, stride, padding = p.size, p.kernel, p.stride, p.padding
    torch.manual_seed(zlib.crc32(str(p).encode()))
    form = cpu.memory_format(layout, p.rank)

    def random(shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=p.dtype, memory_format=form).normal_()

    # What a window of the input reaches, and what reaches its outputs: it and a pixel on either side.
    length = [min(WINDOW, n) for n in size]
    halo = [int(taps > 1) for taps in kernel]
    reached = [(n - 1) * step + taps for n, step, taps in zip(length, stride, kernel)]
    transposed: Any = THEIRS[p.rank]
    plain: Any = getattr(F, f"conv{p.rank}d")

    found = {family: choice for family, choice in families.choose(p, gpu(0)).items() if not isinstance(choice, str)}
    assert found
    weight = random(p.weight_shape)
    if pass_ == "grad-weight":
        x, grad = torch.zeros_like(random(p.input_shape)), random(p.output_shape)
        truth = torch.zeros(p.weight_shape, device="cuda", dtype=torch.float64)
        for image, begin in windows(p):
            within = tuple(slice(b, b + n) for b, n in zip(begin, length))
            given = x[(image, slice(None), *within)].normal_().double()[None]
            outer = [b * step - pad for b, step, pad in zip(begin, stride, padding)]
            of = weight.double().requires_grad_()
            transposed(given, of, None, stride).backward(cropped(grad, outer, reached, image))
            assert of.grad is not None
            truth += of.grad
        for family, choice in found.items():
            out = torch.full_like(weight, math.nan)
            choice.prepare(0).run(x, grad, out)
            assert reference.relative_error(out, truth) < BOUND, family
        return
    source = random(source_shape(p))
    for family, choice in found.items():
        out = torch.empty(result_shape(p), device="cuda", dtype=p.dtype, memory_format=form).fill_(math.nan)
        prepared = choice.prepare(0)
        prepared.run(source, prepared.pack(weight), None, out)
        for image, begin in windows(p):
            if pass_ == "fwd":
                given = [b - h for b, h in zip(begin, halo)], [n + 2 * h for n, h in zip(length, halo)]
                lost = [step * h + pad for step, h, pad in zip(stride, halo, padding)]
                truth = transposed(cropped(source, *given, image), weight.double(), None, stride, lost)
                begin = [b * step for b, step in zip(begin, stride)]
            else:
                outer = [b * step - pad for b, step, pad in zip(begin, stride, padding)]
                truth = plain(cropped(source, outer, reached, image), weight.double(), None, stride)
            ours = cropped(out, begin, truth.shape[2:], image)
            assert reference.relative_error(ours, truth) < BOUND, (family, image, begin)
        dense = out if layout == "nchw" else out.movedim(1, -1)
        assert not any(bool(part.isnan().any()) for part in dense.view(-1).split(2**30)), family
        del out, dense, prepared
