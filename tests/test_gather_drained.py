"""Results that the copy engine stores: which are, where their map has them, and their compiled kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import by_turns
from upconv.cuda.axes import Unfit, any_size, result_shape
from upconv.cuda.compile import elf, jit, nvrtc
from upconv.cuda.gemm import gather, gather_search
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import H200
from upconv.cuda.launches import Map
from upconv.problem import Problem

FORWARD = Problem.make(4, 32, 64, (8, 24), 4, 2, 1, dtype=torch.float16)
NEVER = {3: 3, 5: 5, 6: 7, 8: 8}


def tilings(p: Problem) -> list[Tiling]:
    layer = any_size(p)
    return [
        *gather_search.candidates(layer, H200, classes=gather_search.classes_of(p), drained=True),
        *gather_search.candidates(layer, H200, size=p.size, drained=True),
    ]


@pytest.mark.parametrize("stride", NEVER)
def test_strides_whose_lanes_have_no_whole_store(stride: int) -> None:
    """A lane has three words, or more than four; or phases without taps, which others store."""
    p = Problem.make(4, 64, 64, (16, 32), (3, NEVER[stride]), (2, stride), 1, (1, 0), dtype=torch.float16)
    p = p.with_(output_padding=(1, -(p.with_(output_padding=(1, 0)).out_size[1]) % 8 % stride))
    assert gather_search.drains(p) and not tilings(p)
    chosen = gather.choose(p, H200)
    assert not isinstance(chosen, str) and not chosen.tiling.drained


def test_what_cannot_be_drained_is_unfit() -> None:
    t = tilings(FORWARD)[0]
    for other in (replace(t, split=2), replace(t, subs=2), replace(t, w_subs=1)):
        with pytest.raises(Unfit):
            other.checked(H200.shared_bytes)


@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (4, 2), (3, 1)])
def test_the_results_map(stride: tuple[int, int]) -> None:
    """Its dimensions and strides lead to each output once, rows of a phase side by side."""
    p = Problem.make(3, 16, 24, (8, 16), 4, stride, 0, dtype=torch.bfloat16)
    p = p.with_(output_padding=(-p.out_size[0] % stride[0], -p.out_size[1] % 8 % stride[1]))
    p = p.with_(size=(8, 16 + next(n for n in range(8) if (p.out_size[1] + n * stride[1]) % 8 == 0)))
    assert gather_search.drains(p)
    t = tilings(p)[0]
    found = gather.result_map(t, p)
    assert found == Map("result", found.tensor, p.dtype, t.out_box, span=t.out_span)
    assert found.box[0] * 2 == found.span and found.span in (32, 64, 128)
    tensor = found.tensor
    assert all(n % 16 == 0 for n in tensor.strides)
    batch, channels, height, width = result_shape(p)
    assert tensor.dims == (width, channels, height // stride[0], stride[0], batch)
    at = sum(i * n for i, n in zip(np.indices(tensor.dims), (2, *tensor.strides)))
    w, c, h, phase, n = np.indices(tensor.dims)
    assert (at // 2 == ((n * channels + c) * height + h * stride[0] + phase) * width + w).all()
    assert sorted(np.ravel(at // 2)) == list(range(math.prod(result_shape(p))))


def test_which_results_are_drained() -> None:
    p = FORWARD
    assert gather_search.drains(p)
    assert not gather_search.drains(p.with_(dtype=torch.float32, precision="tf32")), "a tile's outputs are too many"
    assert not gather_search.drains(p.with_(layout="channels_last"))
    assert not gather_search.drains(p.with_(size=(8, 18))), "rows of 72 bytes begin off 16"
    assert not gather_search.drains(p.with_(output_padding=(1, 0))), "the phases of H have unequal rows"
    assert not gather_search.drains(p.with_(pass_="grad-input")), "such tiles read more than they store"
    assert gather_search.drains(p.with_(stride=(1, 1), padding=(0, 0), size=(8, 24), pass_="grad-input"))
    assert not gather_search.drains(p.with_(groups=2))
    for size in ((24,), (4, 8, 24)):
        assert not gather_search.drains(Problem.make(4, 32, 64, size, 4, 2, 1, dtype=torch.float16))


CHOSEN = (  # as gradients for the input those without a stride
    Problem.make(128, 512, 256, (8, 8), 4, 2, 1, dtype=torch.bfloat16),
    Problem.make(128, 256, 128, (16, 16), 4, 2, 1, dtype=torch.float16),
    Problem.make(16, 256, 128, (64, 64), 4, 2, 1, dtype=torch.bfloat16),
    Problem.make(16, 256, 256, (64, 64), 3, 2, 1, 1, dtype=torch.float16),
    Problem.make(8, 64, 64, (1024, 1024), 3, 1, dtype=torch.bfloat16, pass_="grad-input"),
)


@pytest.mark.parametrize("p", CHOSEN, ids=str)
def test_compiled_kernels_spill_nothing(p: Problem) -> None:
    chosen = gather.choose(p, H200)
    assert not isinstance(chosen, str) and chosen.tiling.drained and "copy engine" in chosen.summary
    units = (*chosen.sources(), *chosen.packing_sources)
    for unit in by_turns(units, len(units), CHOSEN.index(p)):
        code, _, log = jit.built(unit.source, "90a", unit.label)
        assert elf.inspect(code)["gather"][1] == 0 and not nvrtc.serialised(log)
    general = gather.choose(p, H200, general=True)
    assert not isinstance(general, str) and not general.tiling.drained, "exported files have no map of the result"
