"""Whole kernels on a CPU, from their own source: random layers, random tiles, against the float64 reference.

Copies and matrix instructions are done at once, or as late as a kernel lets them.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from conftest import EVERY, needs_gxx
from emulated import assert_computes, gpus
from emulator import Emulator, emulator
from test_gather import DTYPES, draw_shuffle, draw_tiling
from test_gather import draw_problem as gather_problem
from test_joined import random_problem as joined_problem
from test_pairs import random_problem as pairs_problem
from test_phases import draw_problem as phases_problem
from test_phases import draw_tile as phases_tile
from test_subpixel import random_problem as subpixel_problem
from test_sweep import draw_problem as deep_problem
from test_wgrad import draw_problem as wgrad_problem
from test_wgrad import tilings, work
from upconv.cuda.axes import any_size
from upconv.cuda.compile import jit
from upconv.cuda.gemm import gather, gather_search, joined
from upconv.cuda.gpu import H200
from upconv.cuda.pixels import implicit, pairs, phases, subpixel, sweep
from upconv.cuda.wgrad import wgrad, wgrad_costs
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Precision, Problem, output_length

pytestmark = needs_gxx
__all__ = ["emulator"]

MOST = 3e6  # products of a layer at most, padding by the tile included


# --- a family's random choices ---------------------------------------------------------------------------------------


def last_problem(rng: random.Random) -> Problem:
    """A small channels-last layer's gradient for the input."""
    rank = rng.choice((2, 2, 3))
    kernel = [rng.choice((1, 2, 3, 3, 4, 5)) for _ in range(rank)]
    stride = [rng.choice((1, 2, 2, 3, 5)) for _ in range(rank)]
    dilation = [rng.choice((1, 1, 2, 3)) for _ in range(rank)]
    size = [rng.choice((1, 3, 8, 9, 20) if axis else (1, 2, 5)) for axis in range(3 - rank, 3)]
    axes = list(zip(size, kernel, stride, dilation))
    padding = [rng.randint(0, min((output_length(n, k, s, 0, 0, e) - 1) // 2, (k - 1) * e)) for n, k, s, e in axes]
    output_padding = [rng.randrange(max(s, e)) for s, e in zip(stride, dilation)]
    precision: Precision = rng.choice(("tf32", "fp16", "bf16"))
    return Problem.make(
        rng.randint(1, 3), rng.choice((1, 7, 8, 24)), rng.choice((8, 16, 40)), size, kernel, stride, padding,
        output_padding, dilation, dtype=DTYPES[precision], precision=precision, layout="channels_last",
        pass_="grad-input",
    )  # fmt: skip


def implicit_choice(rng: random.Random) -> Any:
    p = last_problem(rng)
    if rng.random() < 0.5:
        p = p.with_(pass_="fwd", in_channels=rng.choice((8, 16, 40)), out_channels=rng.choice((7, 24, 64, 120)))
    if implicit.refusal(p, H200) is not None:
        return None
    every = implicit.candidates(any_size(p), H200)
    tiles = [t for whole in every for t in (whole, *implicit._clustered(whole, p, H200))]
    tile = rng.choice(tiles)
    work = tile.tiles(p) * max(tile.steps) * tile.rows * tile.columns * tile.chunk
    return implicit.Choice(tile, p, gpus(rng), 1e-5, "") if work < MOST * 10 else None


def subpixel_choice(rng: random.Random) -> Any:
    p = subpixel_problem(rng)
    tile = rng.choice(list(subpixel.candidates(p, H200)))
    return subpixel.Choice(tile, p, gpus(rng), 1e-5, "")


def pairs_choice(rng: random.Random) -> Any:
    p = pairs_problem(rng)
    tile = rng.choice([t for t in pairs.candidates(p, H200) if t.serves(p)])
    return pairs.Choice(tile, p, gpus(rng), 1e-5, "")


def sweep_choice(rng: random.Random) -> Any:
    p = deep_problem(rng)
    every = list(sweep.candidates(p, H200))
    return sweep.Choice(rng.choice(every), p, gpus(rng), 1e-5, "") if every else None


def joined_choice(rng: random.Random) -> Any:
    p = joined_problem(rng)
    return joined.Choice(rng.choice(list(joined.candidates(p, H200))), p, gpus(rng), 1e-5, "")


def joined_rows_choice(rng: random.Random) -> Any:
    """TF32 has another way to turn rows of pixels. Here a block has several tiles, a slice several weight stages."""
    choice = joined_choice(rng)
    t, p = choice.tile, choice.problem
    if p.precision != "tf32" or p.rank == 1 or t.taps == t.taps_of_stage or not 6 <= t.tiles(p) <= 20:
        return None
    return replace(choice, gpu=replace(H200, multiprocessors=2))


def phases_choice(rng: random.Random) -> Any:
    p = phases_problem(rng)
    tile = phases_tile(p, rng)
    return None if tile is None else phases.Choice(tile, p, gpus(rng), 1e-5, "")


def gather_choice(rng: random.Random) -> Any:
    """A tiling drawn at random, or one of a search's: at any size, at the layer's own, or stored by the copy engine."""
    p = gather_problem(rng)
    shuffle = draw_shuffle(p, rng) if rng.random() < 0.2 else None
    if rng.random() < 0.4:
        tiling = draw_tiling(p, rng, shuffle)
    else:
        channels = p.groups * rng.choice((4, 8, 16, 40))
        p = p.with_(size=(*p.size[:-1], rng.choice((8, 16, 24))), padding=(0,) * p.rank, in_channels=channels)
        classes = gather_search.classes_of(p) if p.layout == "nchw" else (1, 1)
        ways = ({"classes": classes}, {"size": p.size}, {"classes": classes, "drained": True})
        every = list(islice(gather_search.candidates(any_size(p), H200, **rng.choice(ways)), 300))
        tiling = rng.choice(every) if every else None
    if tiling is None or (p.layout == "nchw" and tiling.tensor_map and tiling.classes != gather_search.classes_of(p)):
        return None  # rows that boxes do not bring
    return gather.Choice(tiling, p, gpus(rng), rng.choice((1e-6, 1e-3)), "")


def wgrad_choice(rng: random.Random, warpgroups: bool) -> Any:
    p = wgrad_problem(rng)
    every = [t for t in tilings(p) if isinstance(t, WarpgroupTiling) == warpgroups]
    few = [t for t in rng.sample(every, min(20, len(every))) if t.tiles <= 12 and work(t, p) < 1e6]
    if not few:
        return None
    tiling = wgrad_costs.boxed(few[0], p)
    splits = min(math.prod(tiling.counts(p)), rng.choice((1, 2, 3, 5)))
    return wgrad.Choice(tiling, p, gpus(rng), splits, 1e-5, "")


FAMILIES: dict[str, Callable[[random.Random], Any]] = {
    "implicit": implicit_choice,
    "subpixel": subpixel_choice,
    "pairs": pairs_choice,
    "sweep": sweep_choice,
    "joined": joined_choice,
    "joined TF32": joined_rows_choice,
    "phases": phases_choice,
    "gather": gather_choice,
    "wgrad by mma.sync": lambda rng: wgrad_choice(rng, False),
    "wgrad by wgmma": lambda rng: wgrad_choice(rng, True),
}


def choices(family: str) -> Iterator[Any]:
    """A family's random choices, in a seed's order."""
    rng = random.Random(f"emulated {family}")
    while True:
        if (choice := FAMILIES[family](rng)) is not None:
            yield choice


@pytest.mark.parametrize("family", FAMILIES)
def test_random_layers_by_random_tiles(family: str, emulator: Emulator) -> None:
    for seed, choice in zip(range(60 if EVERY else 3 if family[0] in "gw" else 2), choices(family)):
        for late in (0, 1):
            assert_computes(choice, emulator, 2 * seed + late)


# --- the emulator itself ---------------------------------------------------------------------------------------------


ARRAY_OF_A_TEMPLATE = """
#define SIZE {}
#include "machine.h"
template <class Number> void find(u64* place) {{
  __shared__ Number array[SIZE];
  *place = (u64)array;
}}
extern "C" void where(u64* place) {{ find<int>(place); }}
"""


def test_two_kernels_have_no_shared_array_in_common(emulator: Emulator) -> None:
    """Sources define a function template alike but for its array's size, as `implicit`'s packing does."""
    places = torch.zeros(2, dtype=torch.int64)
    for place, size in zip(places, (1, 1000)):
        kernel = emulator.kernel(ARRAY_OF_A_TEMPLATE.format(size), "where", "")
        emulator.launcher(kernel, 32, 0, "P")(0, 1, (place.data_ptr(),))
    assert places[0] != places[1]


TURNED_BOTH = """
#include "ptx_host.h"
// movmatrix: a lane has two neighbours of row lane / 4 of a matrix, then of its transpose.
static u32 transposed(u32 v) {
  const auto& shown = machine::exchange({v});
  const int lane = threadIdx.x & 31, row = lane / 4, column = lane % 4 * 2;
  u32 found = 0;
  for (int j = 0; j < 2; j++) found |= (u32)(shown[(column + j) * 4 + row / 2][0] >> 16 * (row % 2) & 0xffff) << 16 * j;
  return found;
}
// Before Hopper, of ptx.cuh.
template <int N> static void store_turned(u32 a, const u32 (&v)[N]) {
BODY
}
template <int N> static void store(u32* out) {
  const int lane = threadIdx.x & 31, row = 1024 + lane * 7 % (8 * N) * 16;
  u32 v[N];
  for (int i = 0; i < N; i++) v[i] = (lane * N + i) * 0x20001 + 0x10000;
  store_turned(row, v);
  store_matrices_turned(row + 1024, v);
  __syncwarp();
  for (int i = lane; i < 32 * N; i += 32)
    for (int way = 0; way < 2; way++) out[way * 128 + i] = load_shared_u32(1024 + way * 1024 + i * 4);
}
extern "C" void both(u32* out) { store<4>(out), store<2>(out + 256); }
"""


def test_matrices_are_turned_alike_before_hopper(emulator: Emulator) -> None:
    """Of what the emulator has in place of ``ptx.cuh`` this has two forms."""
    text = (jit.KERNELS / "ptx.cuh").read_text()
    body = text[text.index("void store_matrices_turned") :]
    body = body[body.index("#else\n") + 6 : body.index("#endif")]
    for pattern, call in (
        (r'asm volatile\("movmatrix[^"]*" : "=r"\(turned\) : "r"\((.*?)\)\);', r"turned = transposed(\1);"),
        (
            r'asm volatile\("st.shared.u32[^"]*" ::"r"\((.*?)\), "r"\((.*?)\) : "memory"\);',
            r"store_shared_u32(\1, \2);",
        ),
    ):
        body, found = re.subn(pattern, call, body)
        assert found == 1
    out = torch.zeros(2, 2, 128, dtype=torch.int32)
    kernel = emulator.kernel(TURNED_BOTH.replace("BODY", body), "both", "")
    emulator.launcher(kernel, 32, 4096, "P")(0, 1, (out.data_ptr(),))
    assert torch.equal(out[:, 0], out[:, 1]) and len(out[0, 0].unique()) == 128 and len(out[1, 0].unique()) == 65


# --- what random draws seldom meet -----------------------------------------------------------------------------------


def stored_by_the_copy_engine(rng: random.Random) -> Any:
    p = Problem.make(2, 32, 64, (8, 24), 4, 2, 1, dtype=torch.float16)
    layer, classes = any_size(p), gather_search.classes_of(p)
    every = [t for t in gather_search.candidates(layer, H200, classes=classes, drained=True) if t.drained]
    return gather.Choice(rng.choice(every), p, replace(H200, multiprocessors=2), 1e-3, "")


def chunks_of_a_cluster(rng: random.Random) -> Any:
    p = Problem.make(2, 128, 16, (4, 16), 3, 1, 1, precision="tf32")
    every = gather_search.candidates(any_size(p), H200, classes=gather_search.classes_of(p))
    tiling = next(t for t in every if t.wgmma and t.chunks > 2 and t.split == 0)
    return gather.Choice(replace(tiling, cluster=2).checked(H200.shared_bytes), p, H200, 1e-3, "")


def sums_that_are_handed_over(rng: random.Random) -> Any:
    p = Problem.make(1, 64, 64, (16, 16), 2, 2, layout="channels_last", pass_="grad-weight", **HALVES)
    every = [wgrad_costs.boxed(t, p) for t in tilings(p)]
    tiling = rng.choice([t for t in every if wgrad_costs.hands_over(t, 2, H200)])
    return wgrad.Choice(tiling, p, H200, 2, 1e-5, "")


HALVES: Any = {"dtype": torch.bfloat16, "precision": "bf16"}
SELDOM = (stored_by_the_copy_engine, chunks_of_a_cluster, sums_that_are_handed_over)


@pytest.mark.parametrize("ways", SELDOM, ids=[of.__name__ for of in SELDOM])
def test_what_random_draws_seldom_meet(ways: Callable[[random.Random], Any], emulator: Emulator) -> None:
    """At once and late; sums that are handed over by a cluster, and by blocks of a cooperative launch."""
    choice = ways(random.Random(0))
    for seed in (0, 3):
        assert_computes(choice, emulator, seed)


# --- faults ----------------------------------------------------------------------------------------------------------

FULL = r"barrier_wait\(full \+ (cursor\.)?stage \* 8, (cursor\.)?parity\);"
OF_RING = r"ring\.wait_full\(cursor\);"
FAULTS = {
    "implicit: no wait for a stage": ("implicit", OF_RING, ""),
    "implicit: a tap's shift": ("implicit", r"\+ constant_at<C::taps_w>\(tap\)", "+ constant_at<C::taps_w>(tap) + 1"),
    "implicit: a stage given back too early": ("implicit", r"wgmma_wait<LAG>\(\);", ""),
    "subpixel: a place": ("subpixel", r"t\.p \+ b \* ROW_PIXELS", "t.p + b * ROW_PIXELS + 1"),
    "pairs: no wait for a free stage": ("pairs", r"ring\.wait_empty\(cursor\);", ""),
    "sweep: the first slot": ("sweep", r"int first_slot = (-?\d+);", r"int first_slot = \1 + 1;"),
    "gather: no wait for a stage": ("gather", FULL, ""),
    "joined: no wait for a slot": ("joined", r"memory\.slots\.wait_full\(slot\);", ""),
    "joined: a tap's row": ("joined", r"tap / C::kernel_w \* shift_h", "(tap / C::kernel_w + 1) * shift_h"),
    "phases: no wait for a stage": ("phases", OF_RING, ""),
    "phases: a shift's place": ("phases", r"= value_at<C::shifts_at>\(shift\)", "= value_at<C::shifts_at>(shift) + 1"),
    "wgrad: no wait for copies": ("wgrad by mma.sync", r"copy_wait<1>\(\);", ""),
    "wgrad: a tap's shift": ("wgrad by wgmma", r"taps\.at\[u\] = ([^;]*);", r"taps.at[u] = \1 + 1;"),
}
"""By what: a family, a pattern of its source and what is put there."""


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_noticed(what: str, emulator: Emulator) -> None:
    family, pattern, instead = FAULTS[what]
    planted = []

    def mutate(source: str) -> str:
        changed, found = re.subn(pattern, instead, source)
        planted.append(found)
        return changed

    emulator.mutate = mutate
    with pytest.raises(AssertionError, match=r"are wrong|wait for each other|arrivals|left before|outside"):
        for seed, choice in zip(range(3), choices(family)):
            for late in (0, 1):
                assert_computes(choice, emulator, 2 * seed + late)
    assert any(planted)
