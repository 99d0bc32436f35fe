"""Parts of the kernels, compiled for the host from the very source: stores, staging slots, packed weights, fragments.

The plan interpreter walks neither, and a GPU is not always at hand; alignment, borders and the order in which lanes
fill buffers are tried here on every kind of row.
"""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import EVERY, HOST, diagonal, host_program, needs_gxx, seeds
from emulator import for_host
from gather_interpreter import Interpreter
from test_gather import draw_problem, draw_shuffled, draw_tiling
from upconv.cuda.axes import Unfit, any_size, result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.gemm import gather_search
from upconv.cuda.gemm.gather_constants import ROLLED, constants
from upconv.cuda.gemm.tiling import CLAIMS, CLAIMS_BYTES, Tiling
from upconv.cuda.gpu import H200
from upconv.cuda.packs import PACK_THREADS
from upconv.cuda.wgrad import wgrad, wgrad_search
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Layout, Pass, Precision, Problem

pytestmark = needs_gxx

KINDS = ((torch.float32, "tf32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16"))


def cut(source: str, first: str, end: str) -> str:
    """Of a source the part from one text up to another."""
    begin = source.index(first)
    return source[begin : source.index(end, begin)]


KERNELS = jit.KERNELS
PTX = (KERNELS / "ptx.cuh").read_text()
FUNCTION = r"^(template <[^\n]*>\n?)?\s*__device__ __forceinline__ (\w[^\n{;]*\([^\n{;]*\)) \{"
DECLARED = re.compile(FUNCTION, re.MULTILINE)


def kernel_files(folder: Path, constants: Mapping[str, jit.Constant], **files: tuple[str, ...]) -> None:
    """A struct of constants and, for each name, so many of the kernels' headers that those before do not have.

    What has PTX is declared alone: a program defines what it uses.
    """
    declared = "".join(f"{found[1] or ''}{found[2]};\n" for found in DECLARED.finditer(PTX))
    (folder / "declared.h").write_text(declared)
    seen = {"ptx.cuh", "wgmma.cuh"}
    text = '#include "names.h"\n' + jit.struct_of(jit.CONFIG, constants)
    for name, wanted in files.items():
        for file in wanted:
            if file.startswith("-"):
                seen.add(file[1:])
            else:
                text += "\n".join(jit.with_includes(file, seen))
        (folder / f"{name}.h").write_text(text)
        text = ""


def compiled(program: str, folder: Path) -> Path:
    """tests/host/{program}.cpp with the parts of the kernel that are in the folder."""
    return host_program(HOST / f"{program}.cpp", folder)


def with_box(folder: Path, extents: tuple[int, ...], steps: tuple[int, ...] = (1,) * 5) -> None:
    """Adds a box of the tensor copy engine to kernel.h."""
    file = folder / "kernel.h"
    file.write_text(file.read_text() + jit.struct_of("Box", {"extents": extents, "steps": steps}))


def epilogue(tiling: Tiling, folder: Path, movmatrix: bool = False, store_unit: int = 0) -> Path:
    """A program that runs the epilogue of a tiling. ``movmatrix``: turns matrices as GPUs before Hopper do."""
    ways = tuple(f"gather_store_{way}.cuh" for way in ("rows", "pixels", "phases", "boxes"))
    kernel_files(folder, constants(tiling, store_unit=store_unit), kernel=("gather_work.cuh",), epilogue=ways)
    with_box(folder, tiling.out_box)
    if movmatrix:
        (folder / "kernel.h").write_text("#define MOVMATRIX\n" + (folder / "kernel.h").read_text())
    turned = cut(
        PTX,
        "template <int N>\n__device__ __forceinline__ void store_matrices_turned",
        "__device__ __forceinline__ float load",
    )
    for pattern, call in (
        (r'asm volatile\("movmatrix[^"]*" : "=r"\(turned\) : "r"\((.*?)\)\);\n', r"turned = movmatrix(\1);\n"),
        (
            r'asm volatile\("st.shared.u32[^"]*" ::"r"\((.*?)\), "r"\((.*?)\) : "memory"\);\n',
            r"store_shared_u32(\1, \2);\n",
        ),
    ):
        turned, found = re.subn(pattern, call, turned)
        assert found == 1
    (folder / "turned.h").write_text(turned)
    return compiled("epilogue", folder)


def turn(tiling: Tiling, folder: Path) -> Path:
    """A program that runs a tiling's pass from a slot of the tensor copy engine to rows of channels."""
    kernel_files(folder, constants(tiling), kernel=("gather_turn.cuh",))
    with_box(folder, tiling.box, tiling.box_steps)
    return compiled("turn", folder)


def packing(tiling: Tiling, folder: Path) -> Path:
    """A program that packs a tiling's weights."""
    kernel_files(folder, constants(tiling), kernel=("gather_pack.cuh",))
    return compiled("pack", folder)


def fragments(tiling: WarpgroupTiling, folder: Path, program: str = "fragments") -> Path:
    """A program that compares a tiling's ways to fragments of the output's gradient, or follows its descriptors."""
    (folder / "kernel.h").write_text(for_host(wgrad.two_steps("", tiling).source, ()))
    return compiled(program, folder)


def ring(tiling: Tiling, folder: Path, boxed: bool = False) -> Path:
    """A program that follows a tiling's weights, packed or as they lie in memory, through the ring to the consumers."""
    ways = tuple(f"gather_{way}.cuh" for way in ("straight", "rolled", "looped"))
    kernel_files(folder, constants(tiling, boxed), kernel=("gather_weights.cuh",), steps=("-gather_columns.cuh", *ways))
    return compiled("ring", folder)


def claims(folder: Path, stages: int, step: int, rounds: int) -> Path:
    """A program whose threads claim tiles: so many stages, blocks with a remainder, last rounds."""
    kernel_files(folder, {"stages": stages, "step": step, "last_rounds": rounds}, kernel=("claims.cuh",))
    return compiled("claims", folder)


def halves(folder: Path, ci_tiles: int, co_tiles: int) -> Path:
    """A program that goes through the chunks and tiles of blocks that hand over sums."""
    sizes = f"constexpr int CI_TILES = {ci_tiles}, CO_TILES = {co_tiles};\n"
    order = cut((KERNELS / "wgrad_handover.cuh").read_text(), "struct WgradHalves {", "// --- the thread that loads")
    (folder / "kernel.h").write_text(sizes + order)
    return compiled("halves", folder)


def tiles(program: Path, seed: int, count: int) -> int:
    """Numbers checked in so many random tiles."""
    done = subprocess.run([str(program), str(seed), str(count)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    return int(done.stdout)


def tiling_of(
    seed: int,
    fit: Callable[[Tiling], bool] = lambda t: True,
    last: bool | None = None,
    couts: tuple[int, ...] = (3, 8, 16, 40, 64),
    wgmma: bool = True,
) -> Tiling:
    """A random tiling of a random layer, whose sizes mean nothing here. ``couts``: output channels of a group."""
    r = random.Random(seed)
    dtype, precision = KINDS[seed % 3]
    while True:
        rank, groups, stride = r.choice((1, 2, 3)), r.choice((1, 1, 2)), r.choice((1, 1, 2, 3, 4, 5))
        kernel = tuple(r.randint(1, 5) for _ in range(rank))
        channels = groups * r.choice((4, 8, 40)), groups * r.choice(couts)
        size = tuple(r.choice((4, 8, 16)) for _ in range(rank))
        try:
            p = Problem.make(2, *channels, size, kernel, stride, 1, 0, r.choice((1, 2)), groups, dtype=dtype)
        except ValueError:
            continue
        if last and rank == 1:
            continue
        layout = "channels_last" if rank > 1 and (r.random() < 0.2 if last is None else last) else "nchw"
        p = p.with_(precision=precision, layout=layout, pass_=r.choice(("fwd", "fwd", "grad-input")), bias=False)
        if dtype is torch.float32 and r.random() < 0.2:
            p = p.with_(precision="ieee")
        layer = any_size(p)
        every = list(gather_search.candidates(layer, H200, wgmma))
        if wgmma:
            every += gather_search.candidates(layer, H200, size=p.size)
        found = [t for t in every if fit(t)]
        if found:
            return r.choice(found)


@pytest.mark.parametrize("seed", seeds(6, 12))
def test_every_output_arrives_and_nothing_else_is_written(seed: int, tmp_path: Path) -> None:
    assert tiles(epilogue(tiling_of(seed), tmp_path), seed, 80) > 500


@pytest.mark.parametrize(("unit", "seed"), diagonal(("16 bytes", "two outputs", "one"), range(1, 5)))
def test_rows_whose_beginnings_the_plan_knows(seed: int, unit: str, tmp_path: Path) -> None:
    """Ways to store rows that begin elsewhere are not compiled."""

    def fit(t: Tiling) -> bool:
        return t.shuffle is None and t.contiguous and (seed > 2 or t.sub == (8, 8))

    tiling = tiling_of(seed, fit, last=False)
    store_unit = {"16 bytes": 16, "two outputs": 2 * tiling.element, "one": tiling.element}[unit]
    assert tiles(epilogue(tiling, tmp_path, store_unit=store_unit), seed, 80) > 500


@pytest.mark.parametrize("seed", (0, 3, 6))
def test_float32_rows_that_begin_anywhere_of_whole_slabs(seed: int, tmp_path: Path) -> None:
    """Eight rows at a time, of 16 channels that all exist, so that no row is asked whether it does."""

    def fit(t: Tiling) -> bool:
        p = t.problem
        return t.shuffle is None and t.contiguous and result_shape(p)[1] // p.groups % 16 == 0

    tiling = tiling_of(seed, fit, last=False, couts=(16, 64))
    assert tiling.element == 4
    assert tiles(epilogue(tiling, tmp_path, store_unit=4), seed, 80) > 500


@pytest.mark.parametrize(("runs", "subs"), diagonal((1, 2, 3, 4, 8), (1, 2, 4)))
def test_channels_last_pixels_leave_through_a_teams_buffer(runs: int, subs: int, tmp_path: Path) -> None:
    """Rounds of one row or several, of rows that a thread's units cross or not; teams of 4, 2 and 1 warps."""
    seed = runs + subs  # all three dtypes
    tiling = tiling_of(seed, lambda t: t.runs == runs and t.subs == subs and t.shuffle is None, last=True)
    assert tiles(epilogue(tiling, tmp_path), seed, 80) > 500


@pytest.mark.parametrize(("seed", "subs"), diagonal(range(3), (1, 2)))
def test_channels_that_do_not_fill_a_team(seed: int, subs: int, tmp_path: Path) -> None:
    """The last warp's, or of several blocks the last one's; units that are stored whole or element by element."""
    tiling = tiling_of(
        seed, lambda t: t.subs == subs and t.shuffle is None, True, (20, 23) if subs == 2 else (36, 50, 84)
    )
    assert tiles(epilogue(tiling, tmp_path), seed, 80) > 500


@pytest.mark.parametrize(("kind", "seed"), diagonal(("halved rows", "pairs", "mma.sync"), range(3)))
def test_channels_last_pixels_leave_from_every_kind_of_tile(seed: int, kind: str, tmp_path: Path) -> None:
    def fit(t: Tiling) -> bool:
        wanted = {"halved rows": t.split == 1, "pairs": t.paired, "mma.sync": not t.wgmma}
        return wanted[kind] and t.shuffle is None

    tiling = tiling_of(seed, fit, True, (8, 40, 72, 136), wgmma=kind != "mma.sync")
    assert tiles(epilogue(tiling, tmp_path), seed, 80) > 500


@pytest.mark.parametrize(("runs", "subs"), diagonal((1, 3, 8), (1, 2, 4)))
def test_matrices_are_turned_before_hopper_too(runs: int, subs: int, tmp_path: Path) -> None:
    seed = 1 + (runs + subs) % 2  # both 16-bit dtypes
    tiling = tiling_of(seed, lambda t: t.runs == runs and t.subs == subs and t.shuffle is None, last=True)
    assert tiles(epilogue(tiling, tmp_path, movmatrix=True), seed, 80) > 500


@pytest.mark.parametrize(
    ("split_subs", "last"), diagonal(((0, 1), (0, 2), (0, 4), (1, 1), (2, 1), (2, 2), (2, 4)), (False, True))
)
def test_outputs_without_taps_are_stored_with_a_tiles_own(
    split_subs: tuple[int, int], last: bool, tmp_path: Path
) -> None:
    """Of both consumers each once, where a tile is as wide as the output or not, rows together or one by one."""
    split, subs = split_subs
    seed = split + subs

    def fit(t: Tiling) -> bool:
        return t.split == split and t.subs == subs and any(t.bare)

    tiling = tiling_of(seed, fit, last, (72, 136) if split == 1 else (8, 23, 40) if subs == 1 else (13, 16))
    assert constants(tiling)["bare"] is True
    assert tiles(epilogue(tiling, tmp_path), seed, 80) > 500


def shuffled_tiling(seed: int, most: int = 10**9) -> Tiling:
    """A random tiling of which phases are rows of M, of at most so many words of packed weights."""
    r = random.Random(seed)
    while True:
        p, tiling = draw_shuffled(r)
        if tiling.packed_words <= most and p.precision != "ieee":
            return tiling


@pytest.mark.parametrize("seed", seeds(5, 10))
def test_every_output_of_phases_arrives(seed: int, tmp_path: Path) -> None:
    tiling = shuffled_tiling(seed)
    assert tiles(epilogue(tiling, tmp_path), seed, 80) > 200, tiling


@pytest.mark.parametrize(("seed", "at_once"), diagonal(range(6), (1, 64)))
def test_weights_of_phases_are_packed(seed: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word is the interpreter's, from contiguous weights and from channels-last ones."""
    monkeypatch.setattr(Tiling, "pack_taps", property(lambda tiling: min(at_once, tiling.problem.taps)))
    tiling = shuffled_tiling(seed + 100, 60_000)
    assert tiling.shuffle is not None
    p = tiling.shuffle.layer
    weight = torch.randint(1, 120, p.weight_shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
    expected = Interpreter(tiling).pack(weight.double().numpy())
    program = packing(tiling, tmp_path)
    kind = torch.int16 if p.dtype.itemsize == 2 else torch.float32
    for step, given in ((1, weight.flatten(2)), (p.out_channels, weight.flatten(2).mT)):
        arguments = map(str, (tiling.pack_blocks, step, tiling.packed_words))
        data = given.contiguous().view(kind).numpy().tobytes()
        done = subprocess.run([str(program), *arguments], input=data, capture_output=True)
        assert done.returncode == 0, done.stdout[:400]
        words = torch.frombuffer(bytearray(done.stdout), dtype=p.dtype).view(-1, 4 // p.dtype.itemsize)
        assert np.array_equal(words.double().numpy(), expected), tiling
        assert expected.any()
    if p.dtype.itemsize == 2:  # float32 weights, and a bias of as many as the strided layer has
        single, bias = torch.randn(p.weight_shape), torch.randn(p.out_channels)
        arguments = map(str, (tiling.pack_blocks, 1, tiling.packed_words, p.out_channels))
        data = torch.cat((single.flatten(), bias)).numpy().tobytes()
        done = subprocess.run([str(program), *arguments], input=data, capture_output=True)
        found = torch.frombuffer(bytearray(done.stdout), dtype=p.dtype)
        words = found[: 2 * tiling.packed_words].view(-1, 2).double().numpy()
        assert np.array_equal(words, Interpreter(tiling).pack(single.to(p.dtype).double().numpy()))
        assert torch.equal(found[2 * tiling.packed_words :], bias.to(p.dtype))


@pytest.mark.parametrize(("dtype", "stride"), diagonal((0, 1), (1, 2, 3, 4)))
def test_long_rows_at_any_alignment(dtype: int, stride: int, tmp_path: Path) -> None:
    """Rows of 64 positions, of which the buffer holds a whole number of sectors."""
    kind, precision = KINDS[dtype]
    p = Problem.make(1, 16, 16, (9, 9), 4, stride, 1, dtype=kind).with_(precision=precision, bias=False)
    every = [
        t
        for t in gather_search.candidates(any_size(p), H200)
        if t.sub == (1, 64) and t.width_subs == stride and t.runs > 2
    ]
    assert every
    assert tiles(epilogue(every[0], tmp_path), 1, 60) > 1000


@pytest.mark.parametrize(("seed", "whole"), diagonal(range(9), (False, True)))
def test_a_slot_becomes_rows_of_channels(seed: int, whole: bool, tmp_path: Path) -> None:
    def fit(t: Tiling) -> bool:
        return t.tensor_map and not t.channels_last and (t.whole is not None) == whole

    assert tiles(turn(tiling_of(seed, fit), tmp_path), seed, 40) > 500


@pytest.mark.parametrize(
    ("classes", "pass_", "dtype"),
    [
        (classes, *of)
        for classes, of in diagonal(
            [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (1, 4)], [("fwd", 0), ("fwd", 1), ("grad-input", 1)]
        )
    ],
)
def test_rows_that_begin_at_several_places_of_a_unit(
    classes: tuple[int, int], dtype: int, pass_: Pass, tmp_path: Path
) -> None:
    """By a program for one layer, or for two."""
    r = random.Random(f"{classes} {dtype} {pass_}")
    checked = 0
    layers = [(1, 1, 0), (1, 1, 2), (2, 1, 1), (1, 2, 1), ((2, 3), (2, 1), (1, 2)), (3, 1, 2), (1, 9, 9), (1, 20, 20)]
    r.shuffle(layers)
    done = 0
    for stride, dilation, padding in layers:
        if classes[0] == 1:
            stride, dilation, padding = (v if isinstance(v, int) else v[1] for v in (stride, dilation, padding))
        size = (40,) if classes[0] == 1 else (40, 40)
        kind, precision = KINDS[dtype]
        p = Problem.make(2, 16, 16, size, 3, stride, padding, dilation=dilation, dtype=kind)
        layer = any_size(p.with_(precision=precision, pass_=pass_, bias=False))
        found = [t for t in gather_search.candidates(layer, H200, classes=classes) if t.tensor_map and t.classed]
        if found:
            folder = tmp_path / str(checked)
            folder.mkdir()
            checked += tiles(turn(r.choice(found), folder), 1, 30)
            done += 1
        if done == 1 + EVERY:  # a program takes a second to compile
            break
    assert checked > 2_000 * done > 0


@pytest.mark.parametrize("precision,dtype", [("tf32", torch.float32), ("bf16", torch.bfloat16)])
def test_rows_of_several_boxes(precision: Precision, dtype: torch.dtype, tmp_path: Path) -> None:
    """A gradient's source of stride 8 has rows longer than a box; its columns are turned in their own order."""
    p = Problem.make(2, 16, 24, (64,), 16, 8, 4, dtype=dtype).with_(precision=precision, pass_="grad-input", bias=False)
    every = [t for t in gather_search.candidates(any_size(p), H200) if t.tensor_map and t.row_boxes > 2]
    assert every
    for t in (every[0], every[-1]):
        assert tiles(turn(t, tmp_path), 1, 30) > 10_000


def test_columns_behind_the_last_box_are_not_looked_for(tmp_path: Path) -> None:
    """Planes are filled up to one length; 462 columns of which taps read 456, in two boxes of 228."""
    p = Problem.make(8, 128, 64, (32, 512), (2, 8), (2, 7), dilation=(1, 2), dtype=torch.float32)
    p = p.with_(precision="tf32", pass_="grad-input", bias=False)
    every = [t for t in gather_search.candidates(any_size(p), H200) if t.tensor_map and t.row_boxes > 1]
    found = next(t for t in every if t.tile == (1, 1, 2, 64))
    assert found.columns == 456 and found.box[0] == 228
    assert tiles(turn(found, tmp_path), 1, 20) > 10_000


def test_whole_images_of_several_boxes(tmp_path: Path) -> None:
    """A gradient's source of 32 x 32 comes in four boxes, each with all images of the tile."""
    p = Problem.make(4, 8, 8, (8, 8), 4, 4, dtype=torch.float32).with_(precision="tf32", pass_="grad-input", bias=False)
    tiling = next(gather_search.candidates(any_size(p), H200, size=p.size))
    assert tiling.whole == (1, 32, 32)
    two_images = replace(tiling, tile=(2, *tiling.tile[1:]))  # more than fits in shared memory today
    assert tiles(turn(two_images, tmp_path), 1, 20) > 10_000


@pytest.mark.parametrize(("seed", "stride", "aligned"), diagonal(range(3), (1, 2, 3), (False, True)))
def test_taps_shift_their_fragments_out_of_common_words(seed: int, stride: int, aligned: bool, tmp_path: Path) -> None:
    r = random.Random(seed)
    while True:
        rank, k = r.choice((1, 2)), r.randint(2, 7)
        kernel = (k,) if rank == 1 else (r.randint(1, 3), k)
        p = Problem.make(2, 64, 64, (64,) * rank, kernel, stride, r.randint(0, 1), 0, r.choice((1, 1, 2, 3)))
        p = p.with_(dtype=torch.bfloat16, precision="bf16", pass_="grad-weight", bias=False)
        classes = (1, 1) if aligned else r.choice(((1, 1), (2, 1), (4, 2)))
        candidates = wgrad_search.candidates(p, H200, True, aligned, classes=classes)
        every = [t for t in candidates if isinstance(t, WarpgroupTiling)]
        stacked = [t for t in every if t.stacked and t.shared_words]
        tiling = r.choice(stacked if stacked and seed else every)
        if tiling.shared_words and tiling.aligned_g == aligned:
            break
    assert tiles(fragments(tiling, tmp_path), seed, 200) > 1000


@pytest.mark.parametrize(("seed", "stacked"), diagonal(range(6), (False, True)))
def test_descriptors_name_the_pixels_of_a_tap(seed: int, stacked: bool, tmp_path: Path) -> None:
    r = random.Random(seed)
    while True:
        rank, stride = r.choice((2, 2, 3)), r.choice((1, 2, 2, 3))
        kernel, dilation = tuple(r.randint(1, 4) for _ in range(rank)), 1 if stacked else r.choice((1, 1, 2))
        p = Problem.make(2, 64, r.choice((64, 128)), (9,) * rank, kernel, stride, 1, 0, dilation, dtype=torch.bfloat16)
        p = p.with_(precision="bf16", layout="channels_last", pass_="grad-weight", bias=False)
        every = wgrad_search.candidates(wgrad_search.any_size(p), H200, True, True)
        fit = [t for t in every if isinstance(t, WarpgroupTiling) and t.a_shared and t.stacked == stacked]
        if fit:
            break
    # A step's halves lie in different rows where these are of 8 pixels.
    chosen = [r.choice(fit), r.choice([t for t in fit if t.tile[3] == 8] or fit)]
    assert stacked or chosen[1].tile[3] == 8
    for i, tiling in enumerate(chosen):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert tiles(fragments(tiling, folder, "descriptors"), seed, 8) > 100


@pytest.mark.parametrize(
    ("precision", "pass_", "at_once"),
    diagonal(("tf32", "ieee", "fp16", "bf16"), ("fwd", "grad-input"), (1, 4, 5, 64)),
)
def test_weights_are_packed(
    precision: Precision, pass_: Pass, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every word is the interpreter's, from contiguous weights, from channels-last ones and from float32 ones.

    Blocks that take one tap of many look for its entries. Blocks that take four of sixteen bring them by one load.
    """
    monkeypatch.setattr(Tiling, "pack_taps", property(lambda tiling: min(at_once, tiling.problem.taps)))
    r = random.Random(f"{precision} {pass_} {at_once}")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    tiling = None
    # Rows of two warpgroups and more than eight taps; sixteen taps; several sub-positions in a block; many taps.
    while (
        tiling is None
        or tiling.packed_words > (200_000 if at_once == 64 else 60_000)
        or min(tiling.problem.taps, tiling.problem.weight_shape[1]) < 2
        or (at_once == 1 and precision != "ieee" and tiling.wgs_m == 1)
        or (at_once == 1 and tiling.problem.taps <= 8)
        or (at_once == 5 and tiling.subs == 1)
    ):
        p = draw_problem(r).with_(pass_=pass_, precision=precision, dtype=dtype)
        if at_once == 4:
            p = p.with_(kernel=((16,), (4, 4), (4, 2, 2))[p.rank - 1])
        if at_once == 64:
            if p.rank != 2:
                continue
            p = p.with_(kernel=(9, 8), stride=(2, 1), padding=(2, 3), output_padding=(0, 0))
        tiling = draw_tiling(p, r)
    p = tiling.problem
    # TF32 has the even numbers from 2,048 to 4,096; IEEE's second part is what it leaves of the odd ones.
    least, most = (1, 250) if p.dtype.itemsize == 2 else (2048, 4096)
    weight = torch.randint(least, most, p.weight_shape, generator=torch.Generator().manual_seed(at_once))
    weight = (weight // 2 * 2 if precision == "tf32" else weight).to(dtype)
    expected = Interpreter(tiling, coarse=2.0).pack(weight.double().numpy())
    program = packing(tiling, tmp_path)
    kind = torch.int16 if dtype.itemsize == 2 else torch.float32
    for step, given in ((1, weight.flatten(2)), (p.weight_shape[1], weight.flatten(2).mT)):
        arguments = map(str, (tiling.pack_blocks, step, tiling.packed_words))
        data = given.contiguous().view(kind).numpy().tobytes()
        done = subprocess.run([str(program), *arguments], input=data, capture_output=True)
        assert done.returncode == 0, done.stdout[:400]
        words = torch.frombuffer(bytearray(done.stdout), dtype=dtype).view(-1, 4 // dtype.itemsize)
        assert np.array_equal(words.double().numpy(), expected), tiling
    if dtype.itemsize == 4:
        return
    single, bias = (torch.randn(shape, generator=torch.Generator().manual_seed(at_once)) for shape in (
        p.weight_shape, (result_shape(p)[1],)
    ))  # fmt: skip
    expected = Interpreter(tiling).pack(single.to(dtype).double().numpy())
    for biases in (bias, bias[:0]):
        arguments = map(str, (tiling.pack_blocks, 1, tiling.packed_words, len(biases)))
        data = torch.cat((single.flatten(), biases)).numpy().tobytes()
        done = subprocess.run([str(program), *arguments], input=data, capture_output=True)
        assert done.returncode == 0, done.stdout[:400]
        found = torch.frombuffer(bytearray(done.stdout), dtype=dtype)
        words = found[: 2 * tiling.packed_words].view(-1, 2)
        assert np.array_equal(words.double().numpy(), expected), tiling
        assert torch.equal(found[2 * tiling.packed_words :], biases.to(dtype))


def test_blocks_that_pack_have_the_kernels_threads() -> None:
    assert f"constexpr int PACK_THREADS = {PACK_THREADS};\n" in (KERNELS / "packing.cuh").read_text()


@pytest.mark.parametrize("seed", seeds(12, 24))  # each split with weights that stay and that do not, twice
def test_consumers_find_the_weights_where_the_stream_puts_them(seed: int, tmp_path: Path) -> None:
    """Every fragment of every tile is loaded once, in the packed order; stages are taken and given back in theirs.

    By blocks of a cluster those of its chunks.
    """
    rng = random.Random(seed)
    split, resident = seed % 3, seed % 2 == 1
    while True:
        tiling = draw_tiling(draw_problem(rng), rng)
        if tiling is None or not tiling.wgmma or tiling.split != split:
            continue
        with contextlib.suppress(Unfit):
            w_stage = rng.randint(1, 9) * (2 if tiling.parts == 2 else 1)
            tiling = replace(tiling, w_stage=w_stage, resident=resident).checked(H200.shared_bytes)
            break
    assert tiles(ring(tiling, tmp_path), seed, 7) > 0


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "phases", "stretches"),
    [(4, 2, 1, 4, 1), (6, 3, 1, 9, 1), (2, 2, 1, 4, 1), (3, 2, 1, 4, 4), (3, 5, 2, 25, 2), ((4, 3), (2, 3), 1, 6, 1)],
)
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_phases_whose_taps_lie_alike_share_a_stretch(
    kernel: Any, stride: Any, dilation: int, phases: int, stretches: int, layout: Layout, tmp_path: Path
) -> None:
    """Each has its own pixels there; where a tile has all phases along W, those of the rows."""
    if dilation > 1 and layout == "channels_last":
        phases, stretches = 9, 1  # those without taps are none of them
    p = Problem.make(1, 16, 64, (32, 32), kernel, stride, 1, dilation=dilation, bias=False).with_(precision="tf32")
    every = [
        t
        for t in gather_search.candidates(any_size(p.with_(layout=layout)), H200)
        if t.straight and t.width_subs == 1 and len(t.variants) == phases and not t.resident
    ]
    assert every and {len({first for first, _ in t.stretches}) for t in every} == {stretches}
    for i, tiling in enumerate(random.Random(1).sample(every, 1 + EVERY)):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert constants(tiling)["stretches"] == stretches
        assert tiles(ring(tiling, folder), i, 3) > 0


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "precision", "layout", "pass_"),
    [
        ((5, 5), 1, 1, "tf32", "nchw", "fwd"),
        ((3, 5), 1, 1, "bf16", "nchw", "grad-input"),
        ((2, 7), 1, 2, "bf16", "channels_last", "fwd"),
        ((5, 10), (1, 2), 1, "tf32", "nchw", "fwd"),  # two phases
        ((3, 3, 3), 1, 1, "tf32", "channels_last", "fwd"),
        ((5, 5), 2, 1, "tf32", "channels_last", "grad-input"),
        ((4, 4), 2, 1, "bf16", "channels_last", "grad-input"),
        ((4, 4), 2, 3, "tf32", "channels_last", "grad-input"),
        ((30,), 1, 1, "tf32", "nchw", "fwd"),
    ],
)
def test_rounds_find_their_weights_and_pixels(
    kernel: Any, stride: Any, dilation: int, precision: Precision, layout: Layout, pass_: Pass, tmp_path: Path
) -> None:
    """Of loops of rounds: weights that stay and that come through a ring, for consumers that share and take turns."""
    size = (12, 40, 40)[-len(kernel) :]
    p = Problem.make(2, 72, 64, size, kernel, stride, dilation=dilation, bias=False)
    dtype = torch.float32 if precision == "tf32" else torch.bfloat16
    p = p.with_(dtype=dtype, precision=precision, pass_=pass_, layout=layout)
    every = [t for t in gather_search.candidates(any_size(p), H200) if t.rolled]
    kinds = {(t.split, t.resident, t.boxable, t.planewise, t.k_steps): t for t in every}
    assert kinds
    for i, tiling in enumerate(random.Random(1).sample(list(kinds.values()), min(len(kinds), 1 + EVERY))):
        assert constants(tiling)["steps"] == ROLLED
        for boxed in {False, tiling.boxable}:
            folder = tmp_path / f"{i}{boxed}"
            folder.mkdir()
            assert tiles(ring(tiling, folder, boxed), i, 7) > 0


@pytest.mark.parametrize(
    ("pass_", "seed"), [*(("grad-input", seed) for seed in seeds(12, 16)), *(("fwd", seed) for seed in seeds(3, 8))]
)
def test_consumers_find_weights_as_they_lie_in_memory(seed: int, pass_: str, tmp_path: Path) -> None:
    """The same of boxes: each lane of a step gets the row, the tap and the channels that its matrix wants."""
    rng = random.Random(seed)
    split, resident, several = seed % 3, seed % 2 == 1, seed % 4 == 3 and seed % 3 != 1 and pass_ != "fwd"
    for _ in range(20_000):
        p = draw_problem(rng).with_(pass_=pass_, layout="channels_last", bias=False)
        vec = 16 // p.dtype.itemsize
        even = source_shape(p)[1] % vec == 0 == p.out_channels // p.groups % vec  # else no tiling is `boxable`
        tiling = draw_tiling(p, rng) if p.rank > 1 and even and p.precision != "ieee" else None
        if tiling is None or not tiling.wgmma or tiling.split != split or (tiling.subs > 1) != several:
            continue
        with contextlib.suppress(Unfit):
            stage = tiling.k_steps * rng.randint(1, 8 // tiling.k_steps)
            tiling = replace(tiling, w_stage=stage, resident=resident).checked(H200.shared_bytes)
            if tiling.boxable:
                break
    else:
        pytest.fail("no tiling takes weights as they lie")
    assert tiles(ring(tiling, tmp_path, boxed=True), seed, 7) > 0


@pytest.mark.parametrize(("stages", "step", "rounds"), [(1, 1, 0), (CLAIMS - 3, 1, 0), (5, 2, 0), (2, 1, 4), (5, 2, 9)])
def test_each_tile_is_claimed_once_and_all_of_a_block_know(stages: int, step: int, rounds: int, tmp_path: Path) -> None:
    text = (KERNELS / "claims.cuh").read_text()
    assert f"constexpr int CLAIMS = {CLAIMS};" in text and f"CLAIMS_BYTES = CLAIMS * {CLAIMS_BYTES // CLAIMS};" in text
    assert tiles(claims(tmp_path, stages, step, rounds), stages, 5) > 0


@pytest.mark.parametrize(("ci_tiles", "co_tiles"), [(8, 8), (1, 2), (2, 1), (4, 3), (5, 6), (12, 7), (16, 32)])
def test_blocks_that_hand_over_take_each_chunk_and_each_tile_once(ci_tiles: int, co_tiles: int, tmp_path: Path) -> None:
    found = subprocess.run([halves(tmp_path, ci_tiles, co_tiles)], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout.strip()) == (0, str(ci_tiles * co_tiles)), found.stdout
