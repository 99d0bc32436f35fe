"""Tiles whose chunks the blocks of a cluster share: which layers have them, their kernels, their results on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from conftest import HOPPER, Stubs, assert_accurate, by_turns
from one_mapped_gpu import operands
from test_gather import check_compiled, needs_nvrtc
from test_gather_gpu import PRECISIONS, _layer
from upconv.cuda.axes import Unfit, any_size, result_shape, source_shape
from upconv.cuda.gemm import gather, gather_search
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import A100, H200, MAX_CLUSTER, Gpu, gpu
from upconv.problem import Layout, Pass, Precision, Problem

# batch, channels in and out, size, kernel, stride, padding, output_padding, dilation, groups: chunks that no cluster
# divides evenly, tiles of one cluster and of several waves
LAYERS = {
    "lone": (1, 328, 72, (8, 8), 4, 2, 1),
    "odd": (2, 150, 70, (21, 75), 3),
    "k2s2": (1, 264, 136, (17, 24), 2, 2),
    "k3s2": (2, 136, 264, (9, 33), 3, 2, 1, 1),
    "groups": (2, 512, 96, (18, 40), (3, 5), 1, (1, 2), 0, 1, 2),
    "rows of M": (3, 136, 32, (20, 66), (3, 7), 1, (1, 3)),
    "1-D": (3, 200, 128, (700,), 5, 1, 0, 0, 3),
    "3-D": (1, 136, 72, (5, 8, 24), 3, 2, 1, 1),
}


def tilings(p: Problem, chip: Gpu) -> list[Tiling]:
    """Every candidate by every cluster that may share its chunks."""
    found = []
    for t in gather_search.candidates(any_size(p), chip, classes=gather_search.classes_of(p)):
        for cluster in range(2, min(MAX_CLUSTER, t.chunks) + 1):
            try:
                found.append(replace(t, cluster=cluster).checked(chip.shared_bytes))
            except Unfit:
                break
    return found


FEW = (  # layers of few tiles and many channels
    Problem.make(1, 1024, 512, (8, 8), 4, 2, 1, precision="tf32"),
    Problem.make(1, 1024, 512, (8, 8), 4, 2, 1, dtype=torch.bfloat16, pass_="grad-input"),
    Problem.make(1, 1024, 512, (8, 8), 4, 2, 1, dtype=torch.float16, layout="channels_last"),
    Problem.make(1, 1024, 512, (28, 28), 2, 2, layout="channels_last", pass_="grad-input", precision="tf32"),
    Problem.make(4, 256, 256, (24, 24), 4, 4, layout="channels_last", pass_="grad-input", precision="tf32"),
    Problem.make(16, 512, 256, (32,), 16, 8, 4, pass_="grad-input", precision="tf32"),
    Problem.make(1, 2048, 1024, (6, 6), 3, 2, 1, 1, precision="ieee"),
)


@pytest.mark.parametrize("p", FEW, ids=str)
def test_layers_of_few_tiles_have_clusters(p: Problem) -> None:
    chosen = gather.choose(p, H200)
    assert isinstance(chosen, gather.Choice)
    t = chosen.tiling
    assert t.cluster > 1 and f"clusters of {t.cluster}" in chosen.summary
    assert chosen.grid == t.arguments(p)[-1] * t.cluster, "a tile for each cluster"
    assert t.arguments(p)[-1] <= H200.clusters(t.cluster), "which all run at once"
    alone = min(seconds for seconds, _, other in gather_search.considered(p, H200) if other.cluster == 1)
    assert chosen.seconds < alone
    assert not chosen.packs
    for chip, general in ((H200, True), (A100, False)):
        other = gather.choose(p, chip, general)
        assert isinstance(other, gather.Choice) and other.tiling.cluster == 1


def test_a_launch_is_worth_more_than_a_small_gain() -> None:
    """Kernels that pack weights themselves have no clusters; elsewhere the same gain would do."""
    p = Problem.make(8, 64, 48, (16, 16), 4, 2, 1, precision="ieee")
    best = min(gather_search.considered(p, H200), key=lambda found: found[0])
    chosen = gather.choose(p, H200)
    assert isinstance(chosen, gather.Choice) and chosen.packs
    assert best[2].cluster > 1 and best[0] < chosen.seconds < best[0] + 3e-6


def test_other_layers_have_none() -> None:
    for p in (
        Problem.make(64, 1024, 512, (8, 8), 4, 2, 1),  # tiles enough
        Problem.make(1, 8, 512, (8, 8), 4, 2, 1),  # one chunk
    ):
        chosen = gather.choose(p, H200)
        assert isinstance(chosen, gather.Choice) and chosen.tiling.cluster == 1


def test_what_cannot_share_chunks_is_unfit() -> None:
    p = FEW[0]
    chosen = gather.choose(p, H200)
    assert isinstance(chosen, gather.Choice)
    t = chosen.tiling
    shared = r"blocks of a cluster"
    for other in (
        replace(t, cluster=MAX_CLUSTER + 1),
        replace(t, split=2),
        replace(t, resident=True, chunk=8, tile=(1, 1, 8, 8)),
        replace(t, problem=p.with_(in_channels=t.chunk)),
        replace(t, problem=p.with_(kernel=(1, 1), output_padding=(1, 1))),  # phases without taps
    ):
        with pytest.raises(Unfit, match=shared if not other.resident else "."):
            other.checked(H200.shared_bytes)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p", FEW, ids=str)
def test_compiled_kernels_spill_nothing(p: Problem) -> None:
    chosen = gather.choose(p, H200)
    assert isinstance(chosen, gather.Choice) and chosen.tiling.cluster > 1
    units = chosen.sources()
    for unit in by_turns(units, len(units), FEW.index(p)):
        text = check_compiled(chosen.tiling, unit.source, "90a", packs="pack" in unit.entries)
        assert "ld.shared::cluster" in text and f".reqnctapercluster {chosen.tiling.cluster}" in text


@pytest.mark.parametrize("p", (FEW[0], FEW[3]), ids=str)
def test_where_no_cluster_fits_blocks_have_tiles_of_their_own(
    p: Problem, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a part of a device; decided before the first call, with either form of the weights."""
    chosen = gather.choose(p, H200)
    assert isinstance(chosen, gather.Choice)
    alone = replace(chosen, tiling=replace(chosen.tiling, cluster=1))
    assert alone.grid < chosen.grid
    x, out = torch.empty(source_shape(p), dtype=p.dtype), torch.empty(result_shape(p), dtype=p.dtype)
    weight = torch.empty(p.weight_shape, dtype=p.dtype)
    last = weight.contiguous(memory_format=torch.channels_last) if chosen.boxable else weight
    for fits, grid in ((True, chosen.grid), (False, alone.grid)):
        asked: list[tuple[int, int]] = []
        monkeypatch.setattr(gather, "cluster_fits", lambda *given, a=asked, fits=fits: a.append(given) or fits)
        prepared = chosen.prepare(0)
        assert asked == [(0, chosen.tiling.cluster)]
        before = prepared.choice
        for given in (weight, last, weight):
            prepared.run(x, prepared.pack(given), None, out)
            name, blocks, *_ = stubs.pop()
            assert (name, blocks) == ("gather", grid)
        assert prepared.choice is before, "nothing changes in the middle of a call"
        assert before == (chosen if fits else alone) and len(asked) == 1


class TestOnGpu:
    pytestmark = HOPPER

    @pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
    @pytest.mark.parametrize("layout", ["nchw", "channels_last"])
    @pytest.mark.parametrize("precision", list(PRECISIONS))
    @pytest.mark.parametrize("name", list(LAYERS))
    def test_results(self, name: str, precision: Precision, layout: Layout, pass_: Pass) -> None:
        p = _layer(LAYERS[name], precision, layout, pass_)
        if p.rank == 1 and layout != "nchw":
            pytest.skip("1-D tensors have no channels_last")
        every = tilings(p, gpu(0))
        kinds: dict[tuple[object, ...], Tiling] = {}
        shuffled = random.Random(str(p)).sample(every, len(every))
        for t in shuffled:  # both ways to share pixels, short and long runs, large clusters and small
            kinds.setdefault((t.split, t.cluster > 3, t.sub), t)
        if not kinds:
            assert (name, precision, pass_) == ("3-D", "ieee", "grad-input")
            pytest.skip("no tile has room for its sums")
        last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(p.rank, torch.contiguous_format)
        order = last if layout == "channels_last" else torch.contiguous_format
        products = source_shape(p)[1] // p.groups * p.taps
        given = operands(p, products)
        x, weight = given.x.contiguous(memory_format=order), given.weight
        for t in kinds.values():
            prepared = gather.Choice(t, p, gpu(0), 0.0, "").prepare(0)
            outs = []
            for w in (weight, weight, weight.contiguous(memory_format=last)):  # the last as it lies, where it may
                out = torch.full(result_shape(p), float("nan"), device="cuda", dtype=p.dtype)
                outs.append(out.contiguous(memory_format=order))
                prepared.run(x, prepared.pack(w), given.bias, outs[-1], fresh=True)
            assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]), t
            assert_accurate(outs[0], given.truth, given.magnitude, products + 1)
