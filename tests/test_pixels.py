"""The family `pixels` without a GPU: what test_families.py, test_emulated.py and test_every_kernel.py do not show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, permutations, product
from typing import Any

import numpy as np
import pytest
import torch

from conftest import EVERY, needs_gxx
from drawn import DTYPES, choices, short_rings
from emulator import Emulator
from results import Way, assert_computes, assert_infinities_reach_no_others
from upconv.bench.suites import parse_layer
from upconv.cuda.axes import any_size
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import H200
from upconv.cuda.pixels import family, implicit, phases, sweep
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.family import MODES
from upconv.cuda.pixels.streamed import Pairs
from upconv.problem import Precision, Problem

LAST: dict[str, Any] = {"layout": "channels_last"}
BACK: dict[str, Any] = {"pass_": "grad-input"}


def parsed(layer: str, size: str, **changes: Any) -> Problem:
    changes = {"precision": "tf32"} | changes
    return parse_layer(f"{layer},bias=False", size).with_(dtype=DTYPES[changes["precision"]], **changes)


def drawn(name: str, count: int) -> Iterator[TileChoice]:
    """Of random choices (`drawn.FAMILIES`) the first, each of another layer."""
    return (choice for choice, _ in islice(choices(name), count))


# --- what is served --------------------------------------------------------------------------------------------------


def test_counts_of_32_bits_are_not_exceeded() -> None:
    p = Problem.make(2, 8, 8, (32, 32), 3, 2, 1, 1, precision="tf32")
    for fewer in (p.with_(batch=1, size=(2**15 - 1, 2**14)), p.with_(batch=2**31 // 32**2 - 1)):
        found = family.choose("phases", fewer, H200)
        assert isinstance(found, TileChoice)
        assert max(found.tile.sizes(fewer, H200)) + 2 * found.grid < 2**31
    walk = Problem.make(10**7, 2, 8, (1, 1, 4), (5, 1, 3), 1, (2, 0, 0), precision="tf32")
    swept = family.choose("sweep", walk, H200)
    assert isinstance(swept, TileChoice) and swept.tile.sizes(walk, H200)[-1] < 2**30
    short = Problem.make(2**12, 8, 1, (2**18, 2), (1, 8), (1, 4), (0, 2), precision="tf32", bias=False, **BACK)
    for rows, served in ((short, True), (short.with_(batch=2**13), False)):
        assert isinstance(family.choose("pairs", rows, H200), TileChoice) == served


# --- tiles -----------------------------------------------------------------------------------------------------------

SMALL = Problem.make(2, 64, 32, (16, 32), 2, 2, precision="tf32")
SMALL_BACK = SMALL.with_(pass_="grad-input", bias=False)
FEW = Problem.make(1, 8, 8, (1024, 1024), (3, 5), 2, precision="tf32")
DEEP = any_size(parsed("16,16,3", "1x16x8x8x8"))
UNFIT: list[tuple[Any, dict[str, Any]]] = [
    (implicit.Implicit(SMALL.with_(layout="channels_last"), 256, 4, True), {"mb": 1}),
    (implicit.Implicit(SMALL.with_(layout="channels_last"), 64, 1, True, stages=1), {"stages": 2}),
    (Pairs(SMALL_BACK.with_(kernel=(2, 16), stride=(2, 8)), 64, 64), {"group": 16}),  # more than a box
    (phases.Phases(FEW, 256), {"tile_w": 64}),  # more than a box
    (sweep.Sweep(DEEP, (9, 16), 1, 8), {"shape": (5, 16)}),  # more pixels than subtiles have
    (sweep.Sweep(DEEP, (4, 16), 8, 8), {"nb": 2}),  # sums
    (sweep.Sweep(DEEP, (4, 16), 2, 16, w_stage=3), {"w_stage": 4}),  # parts of taps
    # What is read behind the last tile is not all of the kernel's shared memory.
    (sweep.Sweep(any_size(parsed("8,8,3", "1x8x4x40x120", **LAST)), (1, 16), 8, 8, w_stage=3), {"nb": 1}),
]


@pytest.mark.parametrize(("tile", "instead"), UNFIT, ids=lambda of: str(of))
def test_tiles_that_no_gpu_runs_do_not_fit(tile: Any, instead: dict[str, Any]) -> None:
    assert not tile.fits
    assert replace(tile, **instead).fits, "it is this alone"


def test_a_forwards_taps_fill_rows_of_weights() -> None:
    """With zeros for those that the kernel does not have; a kernel of too many strides has no tile."""
    for kernel, stride, taps in ((16, 8, 2), (10, 4, 3), (25, 4, 8), (9, 2, 6), (3, 5, 1)):
        p = Problem.make(1, 32, 32, (64,), kernel, stride, precision="tf32")
        assert {t.row.kernel for t in MODES["pairs"].candidates(p, H200)} == {taps}  # type: ignore[attr-defined]
    assert not list(MODES["pairs"].candidates(Problem.make(1, 8, 8, (64,), 999, 2, precision="tf32"), H200))


@pytest.mark.parametrize("name", [*MODES, "pairs, forward"])
def test_kernels_are_of_a_layer_at_any_size(name: str) -> None:
    """A tile's constants know neither its problem's size nor its batch, and other sizes find the same tiles."""
    for choice in drawn(name, 6):
        p, t = choice.problem, choice.tile
        other = p.with_(batch=p.batch + 3, size=tuple(3 * n + 8 - n % 8 for n in p.size))
        assert replace(t, problem=other).constants() == t.constants()
        assert t.problem == any_size(p)


@pytest.mark.parametrize("name", [*(mode for mode in MODES if mode != "implicit"), "pairs, forward"])
@needs_gxx
def test_packed_weights_are_shared_only_where_they_are_the_same(name: str, emulator: Emulator) -> None:
    """A weight may serve layers of several strides, sizes and paddings; kept packings go by what `packing` says."""
    packed: dict[object, torch.Tensor] = {}
    shared = 0
    for choice in drawn(name, 12 if EVERY else 4):
        p, mode = choice.problem, choice.tile.mode
        weight = torch.randn(p.weight_shape).to(p.dtype)
        for q in {p, p.with_(padding=tuple(n // 2 for n in p.padding), output_padding=(0,) * p.rank)}:
            if MODES[mode].refusal(q, H200) is not None:
                continue
            alike: dict[object, list[TileChoice]] = {}
            for t in MODES[mode].candidates(q, H200):
                alike.setdefault(TileChoice(t, q, H200, Cost()).packing, []).append(TileChoice(t, q, H200, Cost()))
            largest = max(alike.values(), key=len, default=[])
            for one in (*largest[:1], *largest[-1:]):
                found = one.prepare(0).pack(weight)
                shared += (p, one.packing) in packed
                assert torch.equal(packed.setdefault((p, one.packing), found), found), one
    assert shared


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lanes_that_load_together_meet_different_banks(precision: Precision) -> None:
    """A warp's fragments, of rows whose pitch the tile chose."""
    for kernel, stride, padding in ((2, 2, 0), (4, 2, 1), (4, 2, 0), (4, 4, 0), (8, 4, 2), (16, 8, 4), (8, 8, 0)):
        p = Problem.make(
            2, 64, 64, (256,), kernel, stride, padding, dtype=DTYPES[precision], precision=precision, **BACK
        )
        q = p.with_(pass_="fwd")
        for t in (*MODES["pairs"].candidates(p, H200), *MODES["pairs"].candidates(q, H200)):
            assert t.conflicts == 1  # type: ignore[attr-defined]
    lane = np.arange(32)
    p = Problem.make(2, 32, 24, (16, 48), 4, 2, 1, dtype=DTYPES[precision], precision=precision)
    for t in MODES["phases"].candidates(p, H200):
        words = ((lane & 3) * 2 * t.c.pitch + (lane >> 2)) * t.element // 4  # type: ignore[attr-defined]
        assert len(set(words % 32)) == len(set(words)) == (32 if t.element == 4 else 16)
        assert t.c.buffer_bytes // t.c.passed % 64 == 16, "and of what is stored, channels"  # type: ignore[attr-defined]


def test_shifts_have_the_fewest_columns() -> None:
    """All taps of all phases along W, each a column of its shift, whose columns begin with the first phase."""
    shorter = 0
    for choice in drawn("phases", 120):
        p = choice.problem
        step, pad, dilation = p.stride[-1], p.padding[-1], p.dilation[-1]
        # Output step * q + u is of a source's place q + offset by tap k where (u + pad - k * dilation) is offset steps.
        taps = {
            ((u + pad - k * dilation) // step, u): k
            for u, k in product(range(step), range(p.kernel[-1]))
            if (u + pad - k * dilation) % step == 0
        }
        order, shifts = phases.shifts_of(p)
        assert sorted(order) == list(range(step))
        assert {(s.offset, u): k for s in shifts for u, k in zip(order, s.taps) if k >= 0} == taps

        def columns(order: tuple[int, ...], taps: dict[tuple[int, int], int] = taps) -> int:
            last: dict[int, int] = {}
            for offset, u in taps:
                last[offset] = max(last.get(offset, 0), order.index(u) + 1)
            return sum(last.values())

        counts = [columns(o) for o in permutations(range(step))]
        assert sum(len(s.taps) for s in shifts) == min(counts)
        shorter += min(counts) < counts[0]  # than in the phases' own order
    assert shorter > 3


RINGS: dict[str, tuple[str, Problem]] = {
    "implicit": ("implicit", Problem.make(2, 160, 72, (5, 7), 3, 2, 1, 1, **LAST)),
    "implicit dX": ("implicit", Problem.make(2, 40, 160, (5, 7), 3, 2, 1, 1, **LAST, **BACK)),
    "pairs": ("pairs", Problem.make(2, 40, 40, (5, 24), 4, 2, 1, **BACK)),
    "pairs, forward": ("pairs", Problem.make(3, 40, 24, (40,), 8, 4, 2)),
    "phases": ("phases", Problem.make(3, 40, 16, (5, 24), 3, 2, 1, 1)),
    "subpixel": ("subpixel", Problem.make(2, 200, 24, (10, 16), 2, 2)),
    "sweep": ("sweep", Problem.make(1, 40, 16, (3, 8, 16), (3, 3, 5))),
    "sweep dX": ("sweep", Problem.make(1, 16, 40, (3, 8, 16), (3, 3, 5), 1, (1, 1, 2), **BACK)),
    "sweep last": ("sweep", Problem.make(1, 40, 16, (3, 8, 16), (3, 3, 5), **LAST)),
}


@pytest.mark.parametrize("name", RINGS)
@needs_gxx
def test_the_shortest_rings_do_not_deadlock(name: str, emulator: Emulator) -> None:
    """In one block, whose consumers have several tiles. A launch that can deadlock does so in the emulator."""
    mode, p = RINGS[name]
    p = p.with_(precision="tf32", bias=False)
    tiles = list(short_rings(mode, p, H200, range(2, 9)))
    assert tiles and min(t.stages for t in tiles) == 2
    for t in tiles:
        assert_computes(TileChoice(t, p, replace(H200, multiprocessors=1), Cost(1e-5)), emulator, 1)


# --- launches --------------------------------------------------------------------------------------------------------


@needs_gxx
def test_a_forwards_weights_are_right_where_they_lie(emulator: Emulator) -> None:
    """Channels-last ones of 16 bits, in place or packed, whose rows the tensor cores turn; random layers have few."""
    p = Problem.make(2, 72, 128, (5, 7), 3, 2, 1, dtype=torch.bfloat16, precision="bf16", bias=True, **LAST)
    for t in {t.columns: t for t in implicit.alone(any_size(p), H200)}.values():
        assert t.c.turned
        for seed in (0, 1):
            assert_computes(TileChoice(t, p, H200, Cost(1e-5)), emulator, seed, Way(last=seed > 0))


@pytest.mark.parametrize("name", ["implicit dX", "pairs", "sweep dX"])
@needs_gxx
def test_sums_of_gradients_begin_with_a_bias(name: str, emulator: Emulator) -> None:
    """That of a plain convolution."""
    mode, p = RINGS[name]
    choice = family.choose(mode, p.with_(precision="tf32", bias=False), H200)
    assert isinstance(choice, TileChoice) and choice.biased
    assert_computes(replace(choice, problem=choice.problem.with_(bias=True)), emulator, 0)


# --- infinities ------------------------------------------------------------------------------------------------------


@needs_gxx
def test_infinities_stay_in_their_outputs(emulator: Emulator) -> None:
    """Of `phases` where all columns of a shift have taps."""
    p = Problem.make(1, 40, 8, (8, 24), 3, 2, 1, 1, precision="tf32")
    assert all(tap >= 0 for s in phases.shifts_of(p)[1] for tap in s.taps)
    choice = family.choose("phases", p, H200)
    assert isinstance(choice, TileChoice)
    assert_infinities_reach_no_others(choice, emulator, Way())
