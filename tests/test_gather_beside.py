"""Small images side by side in a tile of a forward in NCHW: which layers have them, their kernels and results."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import HOPPER, assert_accurate, by_turns
from one_mapped_gpu import operands, poisoned
from test_gather import check_compiled, needs_nvrtc
from test_gather_gpu import PRECISIONS, _layer
from upconv.cuda.axes import Unfit, any_size, source_shape
from upconv.cuda.gemm import gather, gather_search
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import A100, H200, Gpu, gpu
from upconv.problem import Precision, Problem

# batch, channels in and out, size, kernel, stride, padding, output_padding, dilation, groups
LAYERS: dict[str, tuple[Any, ...]] = {
    "4x4": (37, 72, 136, (4, 4), 4, 2, 1),
    "4x4 k3s2": (29, 64, 40, (4, 4), 3, 2, 1, 1),
    "4x4 s1": (25, 40, 64, (4, 4), 3, 1, 1),
    "4x4 p0": (14, 32, 72, (4, 4), 3),
    "2x2": (50, 64, 72, (2, 2), 4, 2, 1),
    "8x6": (10, 72, 64, (8, 6), 4, 2, 1),
    "3x4 s3": (13, 48, 32, (3, 4), (3, 5), (2, 3), (1, 1)),
    "d2": (17, 32, 64, (4, 4), 3, 1, 2, 0, 2),
    "g2": (20, 128, 64, (4, 4), 4, 2, 1, 0, 1, 2),
    "1-D": (40, 96, 64, (4,), 4, 2, 1),
    "1-D k25": (11, 72, 64, (16,), 25, 4, 11, 1),
    "4^3": (15, 48, 64, (4, 4, 4), 4, 2, 1),
}


def problem(name: str, precision: Precision) -> Problem:
    return _layer(LAYERS[name], precision, "nchw", "fwd")


def tilings(p: Problem, chip: Gpu) -> list[Tiling]:
    return list(gather_search.candidates(any_size(p), chip, size=p.size, beside=True))


FEW = (
    Problem.make(128, 512, 256, (4, 4), 4, 2, 1, precision="tf32"),
    Problem.make(128, 512, 256, (4, 4), 4, 2, 1, dtype=torch.bfloat16),
    Problem.make(64, 1024, 512, (4, 4), 4, 2, 1, dtype=torch.float16),
    Problem.make(64, 512, 256, (2, 2), 3, 2, 1, 1, precision="tf32"),
)


@pytest.mark.parametrize("p", FEW, ids=str)
def test_small_images_lie_side_by_side(p: Problem) -> None:
    chosen = gather.choose(p, H200)
    assert isinstance(chosen, gather.Choice) and chosen.tiling.beside > 1
    assert "images side by side" in chosen.summary
    alone = min(seconds for seconds, _, t in gather_search.considered(p, H200) if not t.beside)
    assert chosen.seconds < 0.9 * alone
    for chip, general in ((H200, True), (A100, False)):
        other = gather.choose(p, chip, general)
        assert isinstance(other, gather.Choice) and not other.tiling.beside


def test_other_images_do_not() -> None:
    p = FEW[0]
    for q in (
        p.with_(size=(8, 8)),  # as wide as a group of columns
        p.with_(layout="channels_last"),
        p.with_(pass_="grad-input"),
        p.with_(size=(3, 3)),  # channels that begin off 16 bytes
        p.with_(size=(5, 4)),  # one of too many sizes
    ):
        assert all(not t.beside for _, _, t in gather_search.considered(q, H200))


def test_images_have_room_for_each_others_halos() -> None:
    """No tap of an image's outputs reads another's pixels."""
    for name in LAYERS:
        p = problem(name, "bf16")
        for t in tilings(p, H200)[:3]:
            assert t.whole is not None
            reached = {q + off for q in range(t.image_columns) for off in t.offsets[2]}
            own = set(range(t.whole[2]))
            for other in (-t.period, t.period):
                assert not reached & {w + other for w in own}, name


def test_what_cannot_lie_side_by_side_is_unfit() -> None:
    t = tilings(FEW[0], H200)[0]
    for other in (
        replace(t, beside=t.beside - 1),
        replace(t, tile=(2, *t.tile[1:])),
        replace(t, sub=(8, 8), tile=(1, 1, 8, 16)),
        replace(t, run_groups=4),
        replace(t, whole=None),
    ):
        with pytest.raises(Unfit, match="side by side"):
            other.checked(H200.shared_bytes)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p", FEW, ids=str)
def test_compiled_kernels_spill_nothing(p: Problem) -> None:
    chosen = gather.choose(p, H200)
    assert isinstance(chosen, gather.Choice) and chosen.tiling.beside
    units = (*chosen.sources(), *chosen.packing_sources)  # with packed weights and, of two kernels, one that packs
    for unit in by_turns(units, len(units), FEW.index(p)):
        check_compiled(chosen.tiling, unit.source, "90a", packs="pack" in unit.entries)


class TestOnGpu:
    pytestmark = HOPPER

    @pytest.mark.parametrize("precision", list(PRECISIONS))
    @pytest.mark.parametrize("name", list(LAYERS))
    def test_results(self, name: str, precision: Precision) -> None:
        p = problem(name, precision)
        every = tilings(p, gpu(0))
        if not every:
            pytest.skip("channels begin off 16 bytes")
        chosen = random.Random(name).sample(every, min(4, len(every)))
        shared = [replace(t, cluster=2) for t in every if t.chunks > 1 and t.split != 2 and not t.resident]
        for t in random.Random(name).sample(shared, len(shared)):
            try:
                chosen.append(t.checked(gpu(0).shared_bytes))
                break
            except Unfit:
                continue
        products = source_shape(p)[1] // p.groups * p.taps
        x, weight, bias, truth, magnitude = operands(p, products)
        for t in chosen:
            prepared = gather.Choice(t, p, gpu(0), 0.0, "").prepare(0)
            outs = [poisoned(p) for _ in range(2)]
            for out in outs:
                prepared.run(x, prepared.pack(weight), bias, out, fresh=True)
            assert torch.equal(*outs), t
            assert_accurate(outs[0], truth, magnitude, products + 1)
