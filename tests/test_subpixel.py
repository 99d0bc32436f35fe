"""Pixels as rows without a GPU (what they compute: test_emulated.py): refusals, kernels compiled, what is launched."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch

from conftest import Stubs, needs_nvrtc, precision_by_turns, spread_by_precision
from drawn import DTYPES
from upconv.bench.suites import SUITES
from upconv.cuda import families, family
from upconv.cuda.axes import Unfit
from upconv.cuda.compile import elf, jit, nvrtc
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import A100, B200, H200
from upconv.cuda.pixels import subpixel
from upconv.problem import Precision, Problem


def random_problem(rng: random.Random) -> Problem:
    precision: Precision = rng.choice(("tf32", "bf16", "fp16"))
    rank = rng.choice((1, 2, 2, 3))
    kernel = (*(rng.choice((1, 2, 3)) for _ in range(rank - 1)), rng.choice((2, 2, 4)))
    while True:
        size = tuple(rng.randint(1, (90, 14, 6)[rank - 1]) for _ in range(rank))
        if math.prod(size) % 8 == 0:
            break
    return Problem.make(
        rng.randint(1, 2), rng.randint(1, 70), rng.randint(1, 20), size, kernel, kernel, bias=rng.random() < 0.5,
        dtype=DTYPES[precision], precision=precision,
    )  # fmt: skip


def test_lanes_that_load_together_meet_different_banks() -> None:
    """A warp's 32 words of float32 fragments lie in 32 banks, for every load."""
    for thread in range(0, 128, 32):
        for step in range(4):
            for i in range(4):
                banks = set()
                for lane in range(32):
                    t, g = lane & 3, lane >> 2
                    pixel = (thread >> 5) * 16 + g
                    own = pixel // 32 * 4096 + 2 * t * 128 + ((pixel % 32 * 4) ^ (2 * t << 4))
                    banks.add(((own + (8 * step + i // 2) * 128) ^ ((i // 2) << 4) ^ ((i % 2) << 5)) // 4 % 32)
                assert len(banks) == 32


def layer(**changes: object) -> Problem:
    settings: dict[str, object] = {"dtype": torch.float32, "precision": "tf32"}
    return Problem.make(2, 64, 32, (16, 16), 2, 2, **(settings | changes))  # type: ignore[arg-type]


def test_what_is_refused_and_why() -> None:
    lone = "the kernel is for layers whose kernel is their stride, without padding or groups"
    refused = {
        layer(precision="ieee"): "precision ieee is none of the kernel's",
        layer(layout="channels_last"): "pixels as they lie are for forwards in NCHW",
        layer(pass_="grad-input"): "pixels as they lie are for forwards in NCHW",
        layer(padding=1): lone,
        layer(output_padding=1): lone,
        layer(groups=2): lone,
        layer(dilation=(2, 1)): lone,
        Problem.make(1, 8, 8, (8, 8), 3, 2, precision="tf32"): lone,
        Problem.make(1, 8, 8, (8, 8), (2, 3), (2, 3), precision="tf32"): "the kernel stores two taps of a row together",
        layer().with_(size=(5, 5)): "channels begin at places off 16 bytes, where no box does",
        layer().with_(size=(2**16, 2**15)): "the kernel counts a channel's outputs, and packed weights, in 32 bits",
    }
    for p, reason in refused.items():
        assert subpixel.choose(p, H200) == reason, p
    for chip in (A100, B200):
        assert subpixel.choose(layer(), chip) == "pixels as rows are multiplied by wgmma alone"
    assert subpixel.choose(layer(), H200, general=True) == "exported files have no host code for pixels as rows"
    many = layer().with_(batch=2**31 - 1)
    assert subpixel.choose(many, H200) == "there are more tiles than the kernel counts in 32 bits"
    assert isinstance(subpixel.choose(layer(), H200), subpixel.Choice)


def test_tiles_that_do_not_fit_say_why() -> None:
    p = layer()
    for t, reason in (
        (subpixel.Tile(p, 256, 2), "2 x 64 x 256 sums are more than registers hold"),
        (subpixel.Tile(p, 128, 1, stages=1), "a ring has a stage that is read, and one that is filled"),
        (subpixel.Tile(p, 256, 1, stages=5), "the tile takes 245840 bytes of shared memory, the device has 232448"),
    ):
        with pytest.raises(Unfit, match=re.escape(reason)):
            t.checked(H200.shared_bytes)


def case(name: str, precision: Precision) -> Problem:
    (p,) = {each.problem for cases in SUITES.values() for each in cases if each.name == name}
    return p.with_(dtype=DTYPES[precision], precision=precision)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_it_is_the_fastest_family_for_many_channels(precision: Precision) -> None:
    for name in ("unet1", "unet4", "nnunet"):
        found = families.choose(case(name, precision), H200)
        choices = {name: choice for name, choice in found.items() if not isinstance(choice, str)}
        best = min(choices.values(), key=family.weighed)
        assert isinstance(best, subpixel.Choice) and 0 < best.seconds < 1e-3
        assert re.fullmatch(
            rf"pixels as rows, each output a tap: wgmma {precision}, tile of \d+ pixels x \d+ columns, \d stages of "
            r"(32|64) channels, \d+ KB shared, grid 132",
            best.summary,
        )
    found = families.choose(case("nnunet2", precision), H200)  # 64 channels: as fast by its model, slower when timed
    assert isinstance(subpixel.choose(case("nnunet2", precision), H200), subpixel.Choice)
    assert min((c for c in found.values() if not isinstance(c, str)), key=family.weighed).family == "gather"


def test_sizes_share_kernels() -> None:
    """Kernels go by the tile alone: 48 sizes and batches share those of a layer's few tiles."""
    p = case("unet1", "tf32")
    sizes = [(h, w) for h in (8, 20, 32, 64) for w in (16, 36, 64, 100)]
    found = [subpixel.choose(p.with_(size=size, batch=b), H200) for size in sizes for b in (1, 9, 16)]
    sources = {c.sources()[0].source for c in found if isinstance(c, subpixel.Choice)}
    assert len(found) == 48 and len(sources) <= len(list(subpixel.candidates(p, H200))) <= 12


def compiled() -> list[Problem]:
    layers = (
        layer(),
        layer(bias=True).with_(in_channels=40, out_channels=10),
        Problem.make(1, 24, 20, (8, 8, 8), (2, 3, 4), (2, 3, 4), precision="tf32"),
    )
    return [p.with_(dtype=DTYPES[each], precision=each) for i, p in enumerate(layers) for each in precision_by_turns(i)]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p", compiled(), ids=lambda p: f"{p} {p.precision}".replace(" ", "-"))
def test_kernels_compile_without_spills_of_note(p: Problem) -> None:
    """Up to 16 bytes, which ptxas spills around a tile's stores, not in its loop."""
    for t in spread_by_precision(list(subpixel.candidates(p, H200)), p.precision):
        (unit,) = subpixel.Choice(t, p, H200, Cost()).sources()
        code, text, log = jit.built(unit.source, H200.arch, unit.label)
        found = elf.inspect(code)
        assert set(found) == {"pixels", "pack", *(("pack_float",) if p.dtype.itemsize == 2 else ())}
        assert all(local <= 16 for _, local, _ in found.values()), t
        types = {"tf32": "f32.tf32.tf32", "bf16": "f32.bf16.bf16", "fp16": "f32.f16.f16"}[p.precision]
        assert set(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k\d+\." + re.escape(types), text)) == {str(t.columns)}
        assert "cp.async.bulk.tensor" in text and nvrtc.serialised(log) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_launched(dtype: torch.dtype, stubs: Stubs) -> None:
    """Weights contiguous, channels-last, strided and rounded on their way; the bias; tensors off 16 bytes."""
    p = layer(bias=True, dtype=dtype, precision="tf32" if dtype is torch.float32 else "bf16")
    choice = subpixel.choose(p, H200)
    assert isinstance(choice, subpixel.Choice)
    stubs.assert_one_mapped(choice)
