"""Taps in pairs without a GPU (what they compute: test_emulated.py): refusals, kernels compiled, launches."""

from __future__ import annotations

import random
import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from conftest import EVERY, Stubs, needs_gxx, needs_nvrtc, precision_by_turns, spread_by_precision
from drawn import DTYPES
from emulator import Emulator, emulator
from upconv.bench.suites import SUITES
from upconv.cuda import families, family
from upconv.cuda.axes import Unfit
from upconv.cuda.compile import elf, jit, nvrtc
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import A100, B200, H200
from upconv.cuda.pixels import pairs
from upconv.problem import Precision, Problem

__all__ = ["emulator"]


def random_problem(rng: random.Random) -> Problem:
    precision: Precision = rng.choice(("tf32", "bf16", "fp16"))
    while True:
        rank = rng.choice((1, 1, 2, 2, 3))
        kernel, stride = rng.choice(((2, 2), (4, 2), (3, 2), (6, 2), (4, 4), (8, 4), (16, 8), (5, 3), (8, 8), (5, 4)))

        def axes(most: int, last: int, least: int = 1, rank: int = rank) -> tuple[int, ...]:
            return (*(rng.randint(least, most) for _ in range(rank - 1)), last)

        size = axes(5, rng.choice((4, 7, 8, 12, 20, 32, 64, 100)))
        kernels, strides, dilations = axes(3, kernel), axes(3, stride), axes(3, 1)
        paddings, more = axes(2, rng.choice((0, 1, 2, 4, 5)), 0), axes(0, rng.choice((0, 0, stride - 1, 1)), 0)
        try:
            p = Problem.make(
                rng.randint(1, 4), rng.randint(1, 40), rng.randint(1, 40), size, kernels, strides, paddings, more,
                dilations, bias=False, dtype=DTYPES[precision], precision=precision, pass_="grad-input",
            )  # fmt: skip
        except ValueError:  # no output is left, or as much padding as a stride
            continue
        if pairs.refusal(p, H200) is None and any(t.serves(p) for t in pairs.candidates(p, H200)):
            return p


KERNELS = ((2, 2, 0), (4, 2, 1), (4, 2, 0), (4, 4, 0), (8, 4, 2), (16, 8, 4), (8, 8, 0))


def words(tile: pairs.Tile, thread: NDArray[np.int64], step: int, i: int, half: int) -> tuple[NDArray[np.int64], ...]:
    """In elements of a stage: what lanes read of places g + 8i, of the half of a step's places of K that they have."""
    m, element, slot = tile.constants(), tile.element, tile.slot
    group, pitch, step_w, kernel_w, lane_slots = (
        m[name] for name in ("group", "pitch", "step_w", "kernel_w", "slots_lane")
    )
    slots = 32 // element // slot
    steps_w = kernel_w // slot // lane_slots

    def slot_at(step: int, of: Any) -> Any:
        channel = step // steps_w * (slots // lane_slots) + of // lane_slots
        return channel * pitch + slot * (step % steps_w * lane_slots + of % lane_slots) + m["lead"]

    position, t = tile.mb * 64 + thread // 32 * 16, thread & 3
    box_place = -(-tile.chunk * pitch * element // 128) * 128 // element
    at = position // group * box_place + (position % group + thread // 4 % 8) * step_w
    at += slot_at(0, t * (2 if element == 2 and slot == 1 else 1)) + slot_at(step, 0) - slot_at(0, 0)
    at += i * (box_place if group == 8 else 8 * step_w)
    if element == 4 and slot == 2:
        return (at + half,)
    at += half * (slot_at(0, slots // 2) - slot_at(0, 0))
    return (at,) if element == 4 else (at, at + (1 if slot == 2 else pitch))


@pytest.mark.parametrize("kernel, stride, padding", KERNELS)
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lanes_that_load_together_meet_different_banks(
    precision: Precision, kernel: int, stride: int, padding: int
) -> None:
    """Each of a warp's loads of fragments meets a bank at one word alone, as the plan has it.

    64 bits are loaded by half a warp at a time.
    """
    p = Problem.make(
        2, 64, 64, (256,), kernel, stride, padding, dtype=DTYPES[precision], precision=precision, pass_="grad-input"
    )
    for t in list(pairs.candidates(p, H200))[:: 7 if EVERY else 14]:
        assert t.conflicts == 1 or t.line, t
        for thread, step, i, half in product((0, 32, 64, 96), range(4 * t.rows), range(2), range(2)):
            wide = t.element == 4 and t.slot == 2
            for at in words(t, thread + np.arange(32), step, i, half):
                for some in (at[:16], at[16:]) if wide else (at,):
                    met = {*(some * t.element // 4).tolist()}
                    if wide:
                        met |= {word ^ 1 for word in met}
                    banks = [word % 32 for word in met]
                    assert max(banks.count(bank) for bank in banks) <= t.conflicts, t


def layer(**changes: object) -> Problem:
    settings: dict[str, object] = {"dtype": torch.float32, "precision": "tf32", "pass_": "grad-input"}
    return Problem.make(2, 64, 32, (16, 32), 2, 2, 0, bias=False, **(settings | changes))  # type: ignore[arg-type]


def test_what_is_refused_and_why() -> None:
    plain = "the kernel is for layers without groups, or a dilation along the width"
    passes = "taps in pairs are for gradients for the input in NCHW"

    def other(kernel: int, stride: int, size: int = 8, **more: int) -> Problem:
        return Problem.make(1, 8, 8, (size,), kernel, stride, precision="tf32", pass_="grad-input", **more)

    refused = {
        layer(precision="ieee"): "precision ieee is none of the kernel's",
        layer(pass_="fwd"): passes,
        layer(layout="channels_last"): passes,
        layer(groups=2): plain,
        other(4, 2, dilation=2): plain,
        other(3, 1): "the kernel is for strides along the width",
        other(2, 2, 9): "rows begin at places off 16 bytes, where no box does",
        layer().with_(size=(2**16, 2**15)): "the kernel counts a channel's places, and packed weights, in 32 bits",
        layer().with_(kernel=(1, 64), stride=(1, 64)): "no tile fits a row of such strides, or the tiles are too many",
        other(7, 2, 9, output_padding=1): "no tile fits a row of such strides, or the tiles are too many",
    }
    for p, reason in refused.items():
        assert pairs.choose(p, H200) == reason, p
    for chip in (A100, B200):
        assert pairs.choose(layer(), chip) == "pixels as rows are multiplied by wgmma alone"
    assert pairs.choose(layer(), H200, general=True) == "exported files have no host code for pixels as rows"
    assert isinstance(pairs.choose(layer(), H200), pairs.Choice)


def test_tiles_that_do_not_fit_say_why() -> None:
    p = layer()
    for t, reason in (
        (pairs.Tile(p, 256, 2, 32, 1), "2 x 64 x 256 sums are more than registers hold"),
        (pairs.Tile(p, 128, 1, 32, 1, stages=1), "a ring has a stage that is read, and one that is filled"),
        (pairs.Tile(p, 256, 1, 32, 1, stages=6), "the tile takes 307296 bytes of shared memory, the device has 232448"),
        (pairs.Tile(p, 64, 4, 8, 1), "64 groups are more than a warp's lanes"),
    ):
        with pytest.raises(Unfit, match=re.escape(reason)):
            t.checked(H200.shared_bytes)
    for kernel, stride, group, rows, line, reason in (
        (3, 2, 32, 1, 0, "1 rows of weights are no whole channels of 3 taps"),
        (16, 8, 32, 1, 0, "32 places have 264 elements of a row, more than a box"),
        (4, 2, 8, 1, 32, "8 places are no whole lines"),
    ):
        q = Problem.make(1, 8, 8, (64,), kernel, stride, stride // 2, precision="tf32", pass_="grad-input")
        with pytest.raises(Unfit, match=re.escape(reason)):
            pairs.Tile(q, 64, 1, group, rows, line).checked(H200.shared_bytes)


def case(name: str, precision: Precision) -> Problem:
    (p,) = {each.problem for cases in SUITES.values() for each in cases if each.name == name}
    return p.with_(dtype=DTYPES[precision], precision=precision, pass_="grad-input", bias=False)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["unet1", "hifigan", "nnunet"])
def test_it_is_the_fastest_family_for_u_nets_and_vocoders(name: str, precision: Precision) -> None:
    found = families.choose(case(name, precision), H200)
    best = min((c for c in found.values() if not isinstance(c, str)), key=family.weighed)
    assert isinstance(best, pairs.Choice) and 0 < best.seconds < 1e-3
    assert re.fullmatch(
        rf"pixels as rows, taps in pairs: wgmma {precision}, tile of \d+ x \d+ places x \d+ columns, \d stages of \d+ "
        r"channels, \d+ KB shared, grid \d+",
        best.summary,
    )


def test_sizes_share_kernels() -> None:
    """Kernels go by the tile alone: 48 sizes and batches share those of a layer's tiles, and are few."""
    p = case("hifigan", "tf32")
    found = [pairs.choose(p.with_(size=(w,), batch=b), H200) for w in range(160, 1440, 80) for b in (1, 9, 16)]
    sources = {c.sources()[0].source for c in found if isinstance(c, pairs.Choice)}
    assert len(found) == 48 and len(sources) <= 32


def compiled() -> list[Problem]:
    layers = (
        layer(),
        layer().with_(in_channels=40, out_channels=33, size=(5, 28)),
        Problem.make(1, 40, 64, (64,), 16, 8, 4, precision="tf32", pass_="grad-input"),
        Problem.make(1, 64, 64, (8, 8), 4, 2, 1, precision="tf32", pass_="grad-input"),
        Problem.make(1, 64, 64, (8, 8), 3, 2, 1, 1, precision="tf32", pass_="grad-input"),
    )
    return [p.with_(dtype=DTYPES[each], precision=each) for i, p in enumerate(layers) for each in precision_by_turns(i)]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p", compiled(), ids=lambda p: f"{p} {p.precision}".replace(" ", "-"))
def test_kernels_compile_without_spills_of_note(p: Problem) -> None:
    """Up to 48 bytes, which ptxas spills around a tile's stores."""
    for t in spread_by_precision(list(pairs.candidates(p, H200)), p.precision):
        (unit,) = pairs.Choice(t, p, H200, Cost()).sources()
        code, text, log = jit.built(unit.source, H200.arch, unit.label)
        found = elf.inspect(code)
        assert set(found) == {"pixels", "pack", *(("pack_float",) if p.dtype.itemsize == 2 else ())}
        assert all(local <= 48 for _, local, _ in found.values()), t
        types = {"tf32": "f32.tf32.tf32", "bf16": "f32.bf16.bf16", "fp16": "f32.f16.f16"}[p.precision]
        assert set(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k\d+\." + re.escape(types), text)) == {str(t.columns)}
        assert "cp.async.bulk.tensor" in text and nvrtc.serialised(log) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_launched(dtype: torch.dtype, stubs: Stubs) -> None:
    """Weights contiguous, strided, channels-last and rounded on their way; tensors off 16 bytes."""
    p = layer(dtype=dtype, precision="tf32" if dtype is torch.float32 else "bf16")
    choice = pairs.choose(p, H200)
    assert isinstance(choice, pairs.Choice)
    stubs.assert_one_mapped(choice)


@needs_gxx
def test_what_kept_packings_go_by(emulator: Emulator) -> None:
    """A weight may serve layers of several paddings, by which its taps lie in K in pairs or one by one."""
    packed: dict[object, torch.Tensor] = {}
    weight = torch.randn(32, 16, 4, 4)
    orders = set()
    for padding, precision in ((0, "tf32"), (1, "tf32"), (2, "tf32"), (0, "bf16"), (1, "bf16")):
        p = Problem.make(
            1, 32, 16, (8, 16), 4, 2, padding, dtype=DTYPES[precision], precision=precision, pass_="grad-input"
        )
        t = next(t for t in pairs.candidates(p, H200) if (t.columns, t.mb, t.group, t.rows) == (32, 1, 16, 1))
        choice = pairs.Choice(t, p, H200, Cost())
        found = choice.prepare(0).pack(weight.to(p.dtype))
        assert torch.equal(packed.setdefault(choice.packing, found), found)
        orders.add(choice.packing)
    assert len(orders) == 3
