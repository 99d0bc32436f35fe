"""The family `pixels` without a GPU: what test_families.py, test_emulated.py and test_every_kernel.py do not show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from conftest import EVERY, needs_gxx
from drawn import DTYPES, FAMILIES, choices, short_rings
from emulator import Emulator, emulator
from results import Way, assert_computes, assert_infinities_reach_no_others
from upconv import planner
from upconv.bench.suites import SUITES, parse_layer
from upconv.cuda.axes import any_size
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import A100, B200, H200, Gpu
from upconv.cuda.launches import Given
from upconv.cuda.pixels import family, implicit, phases, sweep
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.family import MODES
from upconv.cuda.pixels.streamed import Pairs
from upconv.problem import Precision, Problem

__all__ = ["emulator"]

LAST: dict[str, Any] = {"layout": "channels_last"}
BACK: dict[str, Any] = {"pass_": "grad-input"}


def layer_of(name: str, **changes: Any) -> Problem:
    (layer,) = {case.problem for cases in SUITES.values() for case in cases if case.name == name}
    changes = {"precision": "tf32"} | changes
    p = layer.with_(dtype=DTYPES[changes["precision"]], **changes)
    return p if p.pass_ == "fwd" else p.with_(bias=False)


def parsed(layer: str, size: str, **changes: Any) -> Problem:
    changes = {"precision": "tf32"} | changes
    return parse_layer(f"{layer},bias=False", size).with_(dtype=DTYPES[changes["precision"]], **changes)


def drawn(mode: str, count: int) -> Iterator[TileChoice]:
    """The mode's first random tiles, each of another layer."""
    return (choice for choice, _ in islice(choices(mode), count))


# --- what is served --------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Problem, str]] = [
    ("implicit", parsed("16,16,3,stride=2", "1x16x8x8", **BACK), "channels_last"),
    ("implicit", parsed("16,16,3,stride=2,groups=2", "1x16x8x8", **LAST), "groups"),
    ("implicit", parsed("16,16,3,stride=9", "1x16x8x8", **LAST, **BACK), "steps of at most 8"),
    ("implicit", parsed("8,32,2,stride=32", "1x8x8x8", **LAST), "1024 phases"),
    ("implicit", parsed("8,8,9,stride=8", "1x8x8x8x8", **LAST, **BACK), "729 taps"),
    ("implicit", parsed("16,6,3,stride=2", "1x16x8x8", **LAST, **BACK), "16 bytes"),
    ("implicit", parsed("16,16,3", "1x16x8x8", **LAST, precision="ieee"), "precision ieee"),
    ("implicit", parsed("16,1,3", "1x16x8x8", **LAST), "of 1 channels"),
    ("pairs", parsed("8,8,4,stride=2,dilation=2", "1x8x8", **BACK), "dilation"),
    ("pairs", parsed("8,8,3", "1x8x8", **BACK), "strides along the width"),
    ("pairs", parsed("8,8,2,stride=2", "1x8x9", **BACK), "16 bytes"),
    ("pairs", parsed("8,8,2,stride=2", "1x8x65536x32768", **BACK), "32 bits"),
    ("pairs", parsed("8,8,(1,64),stride=(1,64)", "1x8x16x32", **BACK), "no tile fits"),
    ("subpixel", parsed("64,32,2,stride=2,padding=1", "2x64x16x16"), "kernel is their stride"),
    ("subpixel", parsed("64,32,2,stride=2,dilation=(2,1)", "2x64x16x16"), "kernel is their stride"),
    ("subpixel", parsed("8,8,(2,3),stride=(2,3)", "1x8x8x8"), "two taps of a row"),
    ("subpixel", parsed("64,32,2,stride=2", "2x64x5x5"), "16 bytes"),
    ("subpixel", parsed("8,8,2,stride=2", "1x8x65536x32768"), "32 bits"),
    ("phases", parsed("16,16,3", "1x16x8x8"), "with a stride"),
    ("phases", parsed("16,4,7,stride=(1,6)", "1x16x8x8"), "more phases than the 5"),
    ("phases", parsed("16,33,3,stride=2", "1x16x8x8x8"), "8 phases of 33 channels"),
    ("phases", parsed("16,16,(2,3),stride=3", "1x16x8x8"), "no taps"),
    ("phases", parsed("16,16,(2,3),stride=(2,3)", "1x16x8x8"), "one tap for each output"),
    ("phases", parsed("16,16,3,stride=2", "1x16x8x20", precision="bf16"), "16 bytes"),
    ("phases", parsed("16,16,3,stride=2", "33554432x16x8x8"), "32 bits"),
    ("phases", parsed("512,64,3,stride=2", "1x512x16x16"), "no tile"),
    ("sweep", parsed("16,16,3", "1x16x8x8"), "3-D"),
    ("sweep", parsed("16,16,3,stride=2", "1x16x8x8x8"), "without strides"),
    ("sweep", parsed("16,16,3,dilation=2", "1x16x8x8x8"), "dilation along the depth"),
    ("sweep", parsed("16,16,(1,3,3)", "1x16x8x8x8"), "no walk"),
    ("sweep", parsed("16,257,3", "1x16x8x8x8"), "257 output channels"),
    ("sweep", parsed("16,16,3", "2x16x5x7x7"), "16 bytes"),
    ("sweep", parsed("6,16,3", "1x6x8x8x8", **LAST), "16 bytes"),
    ("sweep", parsed("16,16,(3,15,15)", "2x16x5x32x32"), "no tile"),
    ("sweep", parsed("2,8,(5,1,3),padding=(2,0,0)", "2000000000x2x1x1x4"), "no tile"),
]


@pytest.mark.parametrize(("mode", "p", "words"), REFUSED, ids=lambda of: str(of).replace(" ", "-"))
def test_a_refusal_names_what_it_refuses(mode: str, p: Problem, words: str) -> None:
    answer = family.choose(mode, p, H200)
    assert isinstance(answer, str) and words in answer


@pytest.mark.parametrize("mode", MODES)
def test_other_gpus_and_exported_files_have_none(mode: str) -> None:
    p = next(drawn(mode, 1)).problem
    for gpu in (A100, B200):
        assert family.candidate(p, gpu) == "the kernel multiplies by wgmma alone"
    assert family.candidate(p, H200, general=True) == "exported files have no host code for pixels as rows"


CHOSEN = {
    "implicit": [("nnunet", LAST | BACK), ("mrcnn", LAST | BACK), ("gan3d1", LAST), ("unetB1", LAST)],
    "pairs": [("unet1", BACK), ("hifigan", BACK), ("nnunet", BACK)],
    "phases": [("kb73", {}), ("demucs4", {})],
    "subpixel": [("unet1", {}), ("nnunet", {}), ("sam1", {})],
    "sweep": [("kb58", {}), ("kb70", LAST), ("kb61", LAST)],
}


@pytest.mark.parametrize("mode", CHOSEN)
def test_what_the_planner_takes_a_mode_for(mode: str) -> None:
    for name, changes in CHOSEN[mode]:  # type: ignore[attr-defined]
        found = planner.select(layer_of(name, **changes), planner.Device("cuda", gpu=H200))
        assert isinstance(found.choice, TileChoice) and found.choice.tile.mode == mode, name
        assert found.choice.summary in found.candidates[0].reason and found.choice.grid <= 132


def test_counts_of_32_bits_are_not_exceeded() -> None:
    p = Problem.make(2, 8, 8, (32, 32), 3, 2, 1, precision="tf32")
    for fewer in (p.with_(batch=1, size=(2**15, 2**14)), p.with_(batch=2**31 // 32**2 - 1)):
        found = family.choose("phases", fewer, H200)
        assert isinstance(found, TileChoice)
        assert max(found.tile.sizes(fewer, H200)) + 2 * found.grid < 2**31
    walk = Problem.make(10**7, 2, 8, (1, 1, 4), (5, 1, 3), 1, (2, 0, 0), precision="tf32")
    swept = family.choose("sweep", walk, H200)
    assert isinstance(swept, TileChoice) and swept.tile.sizes(walk, H200)[-1] < 2**30


# --- tiles -----------------------------------------------------------------------------------------------------------

SMALL = Problem.make(2, 64, 32, (16, 32), 2, 2, precision="tf32")
SMALL_BACK = SMALL.with_(pass_="grad-input", bias=False)
FEW = Problem.make(1, 8, 8, (1024, 1024), (3, 5), 2, precision="tf32")
DEEP = any_size(parsed("16,16,3", "1x16x8x8x8"))
UNFIT: list[tuple[Any, dict[str, Any]]] = [
    (implicit.Implicit(SMALL.with_(layout="channels_last"), 256, 4, True), {"mb": 1}),
    (implicit.Implicit(SMALL.with_(layout="channels_last"), 64, 1, True, stages=1), {"stages": 2}),
    (Pairs(SMALL_BACK.with_(kernel=(2, 16), stride=(2, 8)), 64, 64), {"group": 16}),  # more than a box
    (phases.Phases(any_size(layer_of("kb73")), 128), {"tile_w": 64}),  # sums and fragments
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


@pytest.mark.parametrize("mode", MODES)
def test_kernels_are_of_a_layer_at_any_size(mode: str) -> None:
    """A tile's constants know neither its problem's size nor its batch, and other sizes find the same tiles."""
    for choice in drawn(mode, 6):
        p, t = choice.problem, choice.tile
        other = p.with_(batch=p.batch + 3, size=tuple(3 * n + 8 - n % 8 for n in p.size))
        assert replace(t, problem=other).constants() == t.constants()
        assert t.problem == any_size(p)


@pytest.mark.parametrize(
    ("mode", "name", "changes", "most"),
    [
        ("phases", "kb73", {}, 9),
        ("implicit", "vae", LAST, 12),
        ("pairs", "hifigan", BACK, 32),
        ("sweep", "kb58", {}, 20),
    ],
)
def test_sizes_share_kernels(mode: str, name: str, changes: dict[str, Any], most: int) -> None:
    layer = layer_of(name, **changes)
    sizes = product(
        *((64, 72, 128, 136, 160, 200) if axis + 1 == layer.rank else (8, 17, 33) for axis in range(layer.rank))
    )
    found = [family.choose(mode, layer.with_(size=size, batch=n), H200) for size in sizes for n in (1, 4, 9)]
    assert not any(isinstance(choice, str) for choice in found)
    assert len({choice.sources()[0].source for choice in found}) <= most


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "implicit"])
@needs_gxx
def test_packed_weights_are_shared_only_where_they_are_the_same(mode: str, emulator: Emulator) -> None:
    """A weight may serve layers of several strides, sizes and paddings; kept packings go by what `packing` says."""
    packed: dict[object, torch.Tensor] = {}
    shared = 0
    for choice in drawn(mode, 12 if EVERY else 4):
        p = choice.problem
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


def test_widths_leave_few_columns_empty() -> None:
    assert implicit._widths(320) == (32, 64, 80, 160) and implicit._widths(3) == (8,) and implicit._widths(33) == (40,)
    for result in range(1, 2100, 7):
        widths = implicit._widths(result)
        assert widths and all(w % 8 == 0 and w <= 256 for w in widths)
        assert min(-(-result // w) * w for w in widths) < max(1.04 * result, result + 8 * -(-result // 256)) + 1, result


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lanes_that_load_together_meet_different_banks(precision: Precision) -> None:
    """A warp's fragments, of rows whose pitch the tile chose."""
    for kernel, stride, padding in ((2, 2, 0), (4, 2, 1), (4, 2, 0), (4, 4, 0), (8, 4, 2), (16, 8, 4), (8, 8, 0)):
        p = Problem.make(
            2, 64, 64, (256,), kernel, stride, padding, dtype=DTYPES[precision], precision=precision, **BACK
        )
        assert all(t.conflicts == 1 for t in MODES["pairs"].candidates(p, H200))  # type: ignore[attr-defined]
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
    "phases": ("phases", Problem.make(3, 40, 16, (5, 24), 3, 2, 1)),
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


def test_consumers_in_turn_never_wait_for_what_both_have_to_read() -> None:
    """A consumer multiplies a slice's chunks before its turn ends, and the other has read none of them until then."""
    mode, p = RINGS["sweep last"]
    taken = [t for t in MODES[mode].candidates(p.with_(precision="tf32"), H200) if t.turns]
    assert taken
    for t in taken:
        assert t.fits and t.stages > t.pixels.chunks
        assert not replace(t, stages=t.pixels.chunks).fits


# --- the model -------------------------------------------------------------------------------------------------------


def steps_of_blocks(t: implicit.Implicit, p: Problem, gpu: Gpu) -> NDArray[np.int64]:
    """Each block's steps, as the kernel orders tiles."""
    count, of = t.tiles(p), len(t.steps)
    q = np.arange(count) // t.column_blocks
    steps = np.array(t.steps)[(q % of + q // of // t.turn(gpu)) % of]
    grid = t.grid(p, gpu)
    return np.array([steps[b::grid].sum() for b in range(grid)])


@pytest.mark.parametrize("multiprocessors", [132, 114])
@pytest.mark.parametrize(
    ("batch", "size", "channels"), [(4, (32, 32), 128), (16, (40, 56), 256), (2, (9, 30, 30), 128)]
)
def test_blocks_have_what_the_model_counts(
    batch: int, size: tuple[int, ...], channels: int, multiprocessors: int
) -> None:
    """A block's tiles are of all phases by turns."""
    gpu = replace(H200, multiprocessors=multiprocessors)
    p = Problem.make(batch, 128, channels, size, 3, 2, 1, 1, precision="tf32", layout="channels_last")
    for t in implicit.alone(any_size(p), gpu):
        if t.rows < 128 or t.columns < 128:  # one of these is chosen
            continue
        each, waves = steps_of_blocks(t, p, gpu), t.tiles(p) / multiprocessors
        counted = t.waves(p, gpu)[1]
        assert each.max() <= 1.3 * each.mean() or waves < 8, (t, waves, each.max() / each.mean())
        assert 0.7 * each.max() <= counted <= 1.2 * each.max(), (t, waves, counted / each.max())


def test_segments_keep_blocks_busy() -> None:
    for walks, slices, slots in ((96, 18, 3), (160, 98, 3), (1, 64, 5), (1000, 64, 3)):
        found = sweep._segments(walks, slices, slots, 132)
        steps = [-(-walks * n // 132) * (-(-slices // n) + slots - 1) for n in range(1, slices + 1)]
        assert steps[found - 1] == min(steps)


# --- launches --------------------------------------------------------------------------------------------------------


def test_implicit_does_not_begin_beside_its_packing() -> None:
    """Of blocks that read the same pixels and weights (docs/experiments.md)."""
    for mode, p, beside in (("implicit", SMALL.with_(**LAST), False), ("pairs", SMALL_BACK, True)):
        choice = family.choose(mode, p, H200)
        assert isinstance(choice, TileChoice) and choice.launches(Given("contiguous"))[-1].dependent == beside


@needs_gxx
def test_a_forwards_weights_are_right_where_they_lie(emulator: Emulator) -> None:
    """Channels-last ones of 16 bits, in place or packed, whose rows the tensor cores turn; random layers have few."""
    p = Problem.make(2, 72, 128, (5, 7), 3, 2, 1, dtype=torch.bfloat16, precision="bf16", bias=True, **LAST)
    for t in {t.columns: t for t in implicit.alone(any_size(p), H200)}.values():
        assert t.c.turned
        for seed in (0, 1):
            assert_computes(TileChoice(t, p, H200, Cost(1e-5)), emulator, seed, Way(last=seed > 0))


# --- infinities ------------------------------------------------------------------------------------------------------


@needs_gxx
def test_infinities_stay_in_their_outputs(emulator: Emulator) -> None:
    """Of `phases` where all columns of a shift have taps."""
    p = Problem.make(1, 40, 8, (8, 24), 3, 2, precision="tf32")
    assert all(tap >= 0 for s in phases.shifts_of(p)[1] for tap in s.taps)
    choice = family.choose("phases", p, H200)
    assert isinstance(choice, TileChoice)
    assert_infinities_reach_no_others(choice, emulator, Way())


def test_every_mode_is_drawn() -> None:
    assert MODES.keys() <= FAMILIES.keys()
