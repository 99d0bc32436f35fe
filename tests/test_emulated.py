"""Whole kernels on a CPU, from their own source: random layers, random tiles, against the float64 reference.

Copies and matrix instructions are done at once, or as late as a kernel lets them.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from conftest import EVERY, needs_gxx
from drawn import CASES, DTYPES, LAYOUTS, MANY, SCALAR, case, choices, gpus, modes, words
from emulator import Emulator
from results import Place, Way, assert_computes, assert_infinities_reach_no_others, laid_out, numbers
from upconv.cuda import bias
from upconv.cuda.compile import jit
from upconv.cuda.cost import Cost
from upconv.cuda.gemm import joined
from upconv.cuda.gpu import H200
from upconv.cuda.prepared import PreparedBias
from upconv.cuda.rearrange import rearranged, relayout
from upconv.problem import Layout, Precision, Problem

pytestmark = needs_gxx


SEEDS: dict[str, list[int]] = json.loads(CASES.read_text())
OF_A_PART = 12  # cases
PARTS = [(family, part) for family, seeds in SEEDS.items() for part in range(-(-len(seeds) // OF_A_PART))]


@pytest.mark.parametrize(("family", "part"), PARTS)
def test_random_layers_by_random_tiles(family: str, part: int, emulator: Emulator) -> None:
    """Those that together have most of their kernels' modes, at once and late."""
    parts = sum(of == family for of, _ in PARTS)
    for seed in (range(400) if EVERY else SEEDS[family])[part::parts]:
        if (one := case(family, seed)) is not None:
            for late in (0, 3):
                assert_computes(one.choice, emulator, late, one.way, one.problem)


@pytest.mark.parametrize("family", MANY)
def test_cases_have_every_mode(family: str) -> None:
    """That the first random ones have. Else ``python tests/drawn.py`` finds others."""
    chosen = [one for seed in SEEDS[family] if (one := case(family, seed))]
    assert len(chosen) > 0.9 * len(SEEDS[family]), "searches have changed"
    others = [one for seed in range(60) if (one := case(family, seed))]
    assert words(set().union(*map(modes, others))) <= set().union(*map(modes, chosen))


def test_infinities_reach_only_the_outputs_that_read_them(emulator: Emulator) -> None:
    """By `gather`, whose chunks of groups must not end in the next group.

    Where sub-positions share a block (`subs` > 1) its rows do multiply the union of their taps' pixels; so do phases as
    rows. Of padded layers there may be pixels that no tap reads.
    """
    found: dict[tuple[Layout, bool], Any] = {}
    for choice, p in choices("gather"):
        t = choice.tiling
        if p.groups > 1 and not any(p.padding) and t.subs == 1 and t.shuffle is None:
            found.setdefault((p.layout, t.cin_g % t.chunk == 0), choice)
        if len(found) == 4:
            break
    for choice in found.values():
        assert_infinities_reach_no_others(choice, emulator, Way())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", SCALAR)
def test_gradients_for_the_bias(precision: Precision, layout: Layout, emulator: Emulator) -> None:
    """By one launch and by two, of 16 bits also for float32; from images of pixels off 16 bytes."""
    rng = random.Random(f"bias {precision} {layout}")
    for size in ((7, 9), (1, 1), (64, 67), (5, 131), (150, 290)):
        channels = rng.choice((8, 24, 2048 + 64) if layout == "channels_last" else (1, 3, 8))
        p = Problem.make(
            rng.randint(1, 3), 1, channels if size[0] < 100 else 8, size, 1, dtype=DTYPES[precision],
            precision=precision, layout=layout,
        )  # fmt: skip
        emulator.gpu, emulator.seed = gpus(rng, H200), rng.randrange(4)
        grad = laid_out(numbers(p.output_shape, p), p)
        sums = PreparedBias(bias.Choice(p, emulator.gpu), 0)
        given = Place(emulator).given(grad, rng.choice((0, 1, 3)))
        for dtype, lasting in product({p.dtype, torch.float32} if p.dtype.itemsize == 2 else {p.dtype}, (False, True)):
            sums.run(given, out := torch.empty(p.out_channels, dtype=dtype), lasting)
            assert torch.equal(out, grad.double().sum((0, 2, 3)).to(dtype)), (p, dtype)


def test_gradients_for_widened_weights_again(emulator: Emulator) -> None:
    """The wider result of the kernel has the strides of the gradient itself, whose memory is shorter."""
    p = Problem.make(
        6, 30, 32, (3, 24), (1, 4), dtype=torch.bfloat16, precision="bf16", layout="channels_last", pass_="grad-weight"
    )
    inner = rearranged.choose(relayout.rearranged(p), H200)
    assert not isinstance(inner, str)
    assert_computes(rearranged.Choice("relayout", inner, p, Cost()), emulator, 0, calls=2)


@pytest.mark.parametrize("seed", (46, 47))
def test_joined_slices_that_no_tap_meets(seed: int, emulator: Emulator) -> None:
    """Consumers take turns at tiles without stages too, where nothing but the turn keeps a warp's lanes together."""
    p = Problem.make(
        2, 8, 70, (1, 3, 96), (5, 2, 5), 1, (2, 1, 0), (0, 1, 0), (3, 3, 1), dtype=torch.bfloat16, precision="bf16"
    )
    gpu = replace(H200, multiprocessors=1)  # whose block has all tiles
    assert_computes(joined.Choice(next(joined.candidates(p, gpu)), p, gpu, Cost()), emulator, seed)


# --- the emulator itself ---------------------------------------------------------------------------------------------


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
    emulator.launcher(kernel, 0, 32, 4096, "Q")(0, 1, (out.data_ptr(),))
    assert torch.equal(out[:, 0], out[:, 1]) and len(out[0, 0].unique()) == 128 and len(out[1, 0].unique()) == 65


# --- faults ----------------------------------------------------------------------------------------------------------

NOTICED = r"are wrong|stored twice|wait for each other|arrivals|left before|outside|misaligned|beyond its integer"
MOST_TRIES = 100  # choices of a family, among which a fault must show
FULL = r"memory\.pixels\.wait_full\(cursor\);"
OF_RING = r"ring\.wait_full\(cursor\);"
FAULTS = {
    "implicit: no wait for a stage": ("implicit", OF_RING, ""),
    "implicit: a stage given back too early": ("implicit", r"wgmma_wait<HOLDS>\(\);", ""),
    "subpixel: a place": ("subpixel", r"tile\.p \+ lane \* ROW_PIXELS", "tile.p + lane * ROW_PIXELS + 1"),
    "pairs: no wait for a free stage": ("pairs", r"ring\.wait_empty\(cursor\);", ""),
    "pairs: a tap's stride": ("pairs, forward", r"\(C::kernel_w - 1 - kw\) \* OUT", "(C::kernel_w - 1 - kw)"),
    "pairs: the end of a row": ("pairs, forward", r" < \(u32\)row", " <= (u32)row"),
    "subpixel: the second pixel": ("subpixel", r"channel \+ at\[h\]", "channel + at[0]"),
    "sweep: the first slot": ("sweep", r"int first_slot = (-?\d+);", r"int first_slot = \1 + 1;"),
    "gather: no wait for a stage": ("gather", FULL, ""),
    "joined: no wait for a slot": ("joined", r"memory\.slots\.wait_full\(slot\);", ""),
    "phases: no wait for a stage": ("phases", OF_RING, ""),
    "wgrad: no wait for copies": ("wgrad by mma.sync", r"copy_wait<1>\(\);", ""),
    "wgrad: a tap's shift": ("wgrad by wgmma", r"taps\.at\[u\] = ([^;]*);", r"taps.at[u] = \1 + 1;"),
    "direct: a tap's row": ("direct", r"Base::row_of_tap\(kh\)", "kh"),
    "direct: no barrier behind the tile": (
        "direct",
        r"store_weights\(weights, taps\);\s*__syncthreads\(\);",
        "store_weights(weights, taps);",
    ),
    "direct: the channels of lanes": ("direct depthwise", r"C::in_w \* LANES \+ mine", "C::in_w * LANES"),
    "plain: a remainder": ("plain", r"% a\.stride != 0\) \+\+k;", "% a.stride < 0) ++k;"),
    "plain: no barrier between sums": ("plain", r"half /= 2\) \{\s*__syncthreads\(\);", "half /= 2) {"),
    "direct gradients: no barrier ahead of a tile": (
        "direct gradients",
        r"__syncthreads\(\); +// the (slice|tile) before has been read",
        "",
    ),
    "unshuffle: a phase": ("unshuffle", r"u % C::stride_w - C::offset_w", "u % C::stride_w"),
    "relayout: no barrier": ("relayout", r"= v\[k\];\s*\}\s*__syncthreads\(\);", "= v[k]; }"),
    "relayout: a unit's channels": ("relayout", r"EACH \+ e\)\[pixel\]", "EACH)[pixel]"),
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
    with pytest.raises(AssertionError, match=NOTICED):
        for seed, (choice, p) in zip(range(MOST_TRIES), choices(family)):
            for late in (0, 1):
                assert_computes(choice, emulator, 2 * seed + late, p=p)
    assert any(planted)
