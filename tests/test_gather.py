"""The gather-GEMM family: its tilings, its compiled kernels, its choices (what it computes: test_gather_modes.py)."""

from __future__ import annotations

import math
import random
import re
import time
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from conftest import EVERY, Stubs, by_turns, seeds
from upconv.bench.suites import SUITES, parse_layer
from upconv.cuda import prepared as prepared_module
from upconv.cuda.axes import Unfit, any_size, result_shape, source_shape
from upconv.cuda.compile import jit, launch
from upconv.cuda.gemm import costs, gather, gather_search
from upconv.cuda.gemm.gather_constants import constants
from upconv.cuda.gemm.shuffle import Shuffle, countable, ways
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import A100, B200, H200, RTX3090, RTX4090, RTX5090, Gpu
from upconv.problem import Layout, Pass, Precision, Problem, output_length

DTYPES = {"tf32": torch.float32, "ieee": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


PASSES: tuple[Pass, ...] = ("fwd", "grad-input")


def draw_problem(rng: random.Random) -> Problem:
    """A small layer: all ranks, asymmetric everything, output paddings beyond the stride, odd sizes and channels.

    Every other one is of the gradient for the input.
    """
    pass_ = rng.choice(PASSES)
    rank = rng.choice((1, 2, 2, 3))
    largest = (40, 11, 6)[rank - 1]
    axes = []
    for _ in range(rank):
        kernel, stride, dilation = (
            rng.choice((1, 2, 3, 4, 5)),
            rng.choice((1, 1, 2, 2, 3, 4)),
            rng.choice((1, 1, 2, 3, 9)),
        )
        if rank == 3:
            kernel, stride = min(kernel, 4), min(stride, 3)
        output_padding = rng.randrange(max(stride, dilation))
        size = rng.randint(1, largest)
        free = output_length(size, kernel, stride, 0, output_padding, dilation)
        axes.append((size, kernel, stride, rng.randint(0, min((free - 1) // 2, 5)), output_padding, dilation))
    size, kernel, stride, padding, output_padding, dilation = zip(*axes)
    precision: Precision = rng.choice(("tf32", "tf32", "ieee", "fp16", "bf16"))
    groups = rng.choice((1, 1, 1, 2, 3))
    return Problem.make(
        rng.randint(1, 3),
        groups * rng.choice((1, 2, 3, 5, 8, 9, 17)),
        groups * rng.choice((1, 2, 3, 4, 8, 17, 33, 65, 70)),
        size,
        kernel,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        bias=rng.random() < 0.5 and pass_ == "fwd",
        dtype=DTYPES[precision],
        precision=precision,
        layout=rng.choice(("nchw", "channels_last")) if rank > 1 else "nchw",
        pass_=pass_,
    )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def draw_tiling(p: Problem, rng: random.Random, shuffle: Shuffle | None = None) -> Tiling | None:
    """A tiling of the layer that the kernel can run, or None where ten draws give none."""
    p = p if shuffle is None else shuffle.unstrided
    for _ in range(10):
        sub = rng.choice(((1, 64), (8, 8)))
        tile = (
            rng.choice((1, 1, 2, 3)),
            rng.choice((1, 1, 2)) if p.rank == 3 else 1,
            sub[0] * rng.choice((1, 1, 2, 3)),
            sub[1] * rng.choice((1, 1, 2, 3, 4)),
        )
        unroll = tuple(rng.choice((1, 1, 1, 2, 3)) if axis >= 3 - p.rank else 1 for axis in range(3))
        strides = (1,) * (3 - p.rank) + p.stride if p.pass_ == "fwd" else (1, 1, 1)
        steps = [n * u for n, u in zip(strides, unroll)]
        tiling = Tiling(
            p,
            sub,
            tile,
            split=rng.choice((0, 1, 2)),
            chunk=rng.choice((32, 64, 128)) // p.dtype.itemsize,
            subs=rng.choice([n for n in (1, 2, 4) if steps[0] * steps[1] % n == 0]),
            w_subs=rng.choice((0, *divisors(steps[2]))),
            unroll=(unroll[0], unroll[1], unroll[2]),
            stages_s=2,
            run_groups=rng.choice((1, 2, 4, 8, 8, 16, 32)),
            classes=rng.choice(((1, 1), (1, 2), (2, 1), (4, 2), None)),
            wgmma=rng.random() < 0.7,
            paired=sub == (8, 8) and tile[2] % 16 == 0 and rng.random() < 0.7,
            shuffle=shuffle,
            cluster=rng.choice((1, 1, 1, 2, 3)),
            quick=rng.random() < 0.2,
        )
        try:
            return tiling.checked(H200.shared_bytes)
        except Unfit:
            continue
    return None


def draw_shuffle(p: Problem, rng: random.Random) -> Shuffle | None:
    """A way to make a layer's phases rows of M, at no size in particular; None where there is none."""
    found = ways(any_size(p))
    return rng.choice(found) if found else None


def test_many_phases_are_planned_in_seconds() -> None:
    """512 phases: 1.3 s, which took 111 while each tiling counted the taps of each phase anew."""
    p = Problem.make(1, 32, 16, (16, 16, 16), 8, 8)
    begin = time.process_time()
    assert isinstance(gather.choose(p, H200), gather.Choice)
    assert time.process_time() - begin < 15


def test_phases_are_rows_where_32_bits_count_them() -> None:
    """A channels-last row of 2^31 elements and a weight of as many are left to the strided layer's tilings."""
    row = Problem.make(1, 56, 2, (1, 2**29), (1, 9), (1, 3), (0, 4), dtype=torch.bfloat16, layout="channels_last")
    weight = Problem.make(1, 8192, 4096, (8, 8), 8, 8, dtype=torch.bfloat16)
    for p, smaller in ((row, row.with_(size=(1, 2**20))), (weight, weight.with_(in_channels=4096))):
        assert ways(p) and not countable(p) and countable(smaller)
    chosen = gather.choose(row.with_(precision="bf16", bias=False), H200)
    assert not isinstance(chosen, str) and chosen.tiling.shuffle is None
    chosen = gather.choose(row.with_(precision="bf16", bias=False, size=(1, 2**20)), H200)
    assert not isinstance(chosen, str) and chosen.tiling.shuffle is not None


def test_two_lines_at_a_time_where_one_tile_reads_both() -> None:
    """Of channels-last layers whose kernel is their stride, by weights that stay; else a line."""
    alone = Problem.make(2, 64, 64, (16, 64), 2, 2, precision="tf32", layout="channels_last")
    gradient = alone.with_(pass_="grad-input")
    for p, bytes_ in (
        (alone, 256),
        (alone.with_(in_channels=32), 128),  # half a pixel more is another's
        (gradient, 256),
        (gradient.with_(out_channels=32), 256),  # two neighbours of a row
        (gradient.with_(out_channels=16), 128),
        (alone.with_(padding=(1, 1)), 128),
        (alone.with_(in_channels=128, out_channels=128, groups=2), 128),  # another group's tile may read the second
        (alone.with_(kernel=(3, 3)), 128),  # a halo
        (gradient.with_(stride=(3, 3)), 128),  # pixels that none reads
        (alone.with_(layout="nchw"), 128),
    ):
        found = [t for _, _, t in gather_search.considered(p, H200) if t.wgmma]
        assert found and {gather.promotion(t) for t in found if t.resident} <= {bytes_}, p
        assert {gather.promotion(t) for t in found if not t.resident} <= {128}
        assert bytes_ == 128 or any(t.resident for t in found)


def test_planes_that_come_one_by_one() -> None:
    """Every residue of rows and columns as a box of its own, in whose order taps are multiplied."""
    rng = random.Random(0)
    done = [0, 0, 0]
    while done[1] < 25 or done[2] < 5:
        p = draw_problem(rng)
        if p.pass_ != "grad-input" or p.rank == 1 or p.dtype.itemsize > 4 or p.precision == "ieee":
            continue
        p = p.with_(groups=1, in_channels=rng.choice((3, 70)), out_channels=8, layout="channels_last")
        tiling = draw_tiling(p, rng)
        if tiling is None or not tiling.tensor_map:
            continue
        try:
            tiling = replace(tiling, planewise=True, quick=False).checked(H200.shared_bytes)
        except Unfit:
            continue
        planes = [[tiling.plane_of(offsets) for offsets, _ in block] for (block,) in tiling.entries]
        assert all(found == sorted(found) and {*found} == {*range(len(tiling.planes))} for found in planes)
        done[sum(len(firsts) > 1 for firsts, _, _ in tiling.bands)] += 1


def test_tensors_of_rows_that_begin_anywhere() -> None:
    """The copy engine's rules for each class's tensor, and that together they have every element once."""
    rng = random.Random(0)
    seen: set[tuple[int, int]] = set()
    while len(seen) < 9:
        p = draw_problem(rng)
        if p.layout != "nchw":
            continue
        channels, sizes = rng.choice((4, 6, 16)), tuple(rng.randint(4, 40) for _ in p.size)
        try:
            p = p.with_(groups=1, in_channels=channels, out_channels=channels, size=sizes)
        except ValueError:  # no output
            continue
        if p.dtype.itemsize > 4 or max(p.output_shape[2:]) > 200:
            continue
        classes = gather_search.classes_of(p)
        for t in gather_search.candidates(any_size(p), H200, classes=classes):
            if not (t.tensor_map and t.classed):
                continue
            assert classes is not None
            seen.add(classes)
            shape, element = source_shape(p), p.dtype.itemsize
            found = []
            for tensor in gather.tensors(t, p):
                assert tensor.begin % 16 == 0 and all(stride % 16 == 0 for stride in tensor.strides)
                assert all(n > 0 for n in tensor.dims)
                strides = (1, *(stride // element for stride in tensor.strides))
                at = sum(np.ogrid[tuple(slice(n) for n in tensor.dims)][i] * strides[i] for i in range(5))
                places = np.asarray(at) + tensor.begin // element
                lead = tensor.dims[0] - shape[-1]
                assert 0 <= lead < t.vec and places.max() < math.prod(shape)
                found.append(places[lead:].ravel())
            taken = np.concatenate(found)
            assert len(np.unique(taken)) == len(taken)
            if t.row_classes == classes[0]:
                assert len(taken) == math.prod(shape)
            break


def test_constants_do_not_depend_on_the_size() -> None:
    """One compiled kernel serves a layer at every batch and image size."""
    for seed in range(200):
        rng = random.Random(seed)
        p = draw_problem(rng)
        tiling = draw_tiling(p, rng)
        if tiling is None:
            continue
        other = p.with_(batch=p.batch + 3, size=tuple(n + rng.randint(0, 50) for n in p.size))
        assert constants(Tiling(**{**vars_of(tiling), "problem": other})) == constants(tiling)


def vars_of(tiling: Tiling) -> dict[str, object]:
    return {name: getattr(tiling, name) for name in tiling.__dataclass_fields__}


# --- what is compiled ------------------------------------------------------------------------------------------------

needs_nvrtc = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))
INSTRUCTIONS = {
    ("tf32", True): "wgmma.mma_async.sync.aligned.m64nNk8.f32.tf32.tf32",
    ("fp16", True): "wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16",
    ("bf16", True): "wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16",
    ("tf32", False): "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    ("fp16", False): "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    ("bf16", False): "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
}


def _pattern(name: str) -> str:
    """A regular expression for an instruction; N is 64, or 128 where one takes two subtiles."""
    return re.escape(name).replace("m64nN", "m64n(64|128)")


def check_compiled(tiling: Tiling, source: str, arch: str, most_local: int = 0, packs: bool = True) -> str:
    """Both kernels compile (or the one alone), without spills, with the precision's matrix instruction and no other.

    Returns their PTX.
    """
    code, text, log = jit.built(source, arch, "gather")
    found = jit.inspect(code)
    packing = ("pack", "pack_float")[: 1 + (tiling.element == 2)] if packs else ()
    assert set(found) == {"gather", *packing}
    for entry, (registers, local, shared) in found.items():
        assert 0 < registers <= 255
        assert local <= most_local, f"{entry} for sm_{arch} has {local} bytes of local memory: {tiling}"
        rows = 16 * 32 * (tiling.pack_taps | 1)  # bytes of 16 rows of M and a step of K
        assert rows <= shared < rows + 1024 if "pack" in entry else shared == 0
    precision = "tf32" if tiling.problem.precision == "ieee" else tiling.problem.precision
    present = {key for key, name in INSTRUCTIONS.items() if re.search(rf"(?<![.\w]){_pattern(name)}(?![.\w])", text)}
    assert present == {(precision, tiling.wgmma)}
    if tiling.wgmma:
        assert ("m64n128" in text) == tiling.wide
        assert jit.serialised(log) is None, tiling
    assert tiling.wgmma == (arch == "90a")
    assert ("cp.async.bulk.tensor" in text) == tiling.tensor_map
    return text


# (layer, sub, tile, split, subs, unroll), with 128 accumulators in a thread.
KERNELS = (
    (Problem.make(8, 64, 64, (64, 128), 3), (1, 64), (1, 1, 8, 64), 0, 1, (1, 1, 1)),
    (Problem.make(4, 256, 128, (33, 31), 4, 2, 1, bias=True), (8, 8), (1, 1, 8, 32), 0, 1, (1, 1, 1)),
    (Problem.make(8, 32, 30, (64, 200), (3, 5), 1, 1), (1, 64), (1, 1, 4, 64), 2, 2, (1, 2, 1)),
    (Problem.make(2, 34, 150, (5, 9, 70), 3, 2, 1, 1, groups=2), (1, 64), (1, 1, 2, 64), 1, 1, (1, 1, 1)),
)
OLDER = (A100, RTX3090, RTX4090, B200, RTX5090)


def kernel_case(index: int) -> tuple[Tiling, Gpu]:
    """Every precision and layout, on the older chips in turn and on sm_90a where threads copy NCHW.

    IEEE has each accumulator twice, and the others' consumers have 168 registers: both get half the accumulators.
    """
    combinations = list(product(DTYPES, ("nchw", "channels_last")))
    turn, i = divmod(index, len(combinations))
    precision, layout = combinations[i]
    gpu = OLDER[i % len(OLDER)] if turn == 0 else H200
    layer, sub, (images, d, h, w), split, subs, unroll = KERNELS[(i + turn + 1) % len(KERNELS)]
    p = layer.with_(dtype=DTYPES[precision], precision=precision, layout=layout)
    split, w_subs = 0 if split == 1 and precision == "ieee" else split, 0
    for _ in range((precision == "ieee" and layer.rank == 2) + (gpu is not H200)):
        if w == 64 and h > 2:
            h //= 2
        elif w == 32:
            w //= 2
        else:
            w_subs = 1
    tiling = Tiling(
        p,
        sub,
        (images, d, h, w),
        split,
        32 // p.dtype.itemsize,
        subs,
        w_subs,
        unroll,
        stages_s=2,
        run_groups=4,
        classes=None,
        wgmma=gpu is H200,
    )
    return tiling.checked(gpu.shared_bytes), gpu


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("index", [i for i in range(16) if EVERY or (i % 8 + i // 8) % 2 == 0])  # of each kind one
def test_kernels_compile_without_spills(index: int) -> None:
    tiling, gpu = kernel_case(index)
    check_compiled(tiling, gather.source(tiling), gpu.arch)


# --- what is chosen --------------------------------------------------------------------------------------------------

SUITE = tuple({c.problem: c for name in ("kernelbench", "models") for c in SUITES[name]}.values())
GPUS = (H200, A100, RTX3090, RTX4090, B200, RTX5090)


def versions(p: Problem) -> list[Problem]:
    """A layer in every precision and layout."""
    layouts = ("nchw", "channels_last") if p.rank > 1 else ("nchw",)
    return [p.with_(dtype=DTYPES[a], precision=a, layout=b) for a, b in product(DTYPES, layouts)]


def sample() -> list[tuple[Problem, Gpu]]:
    """For each layer and pass one of its versions for one GPU; every other one for the H200."""
    cases = []
    for (i, case), (turn, pass_) in product(enumerate(SUITE), enumerate(PASSES)):
        every = versions(case.problem.with_(pass_=pass_))
        if EVERY:
            cases += list(product(every, GPUS))
            continue
        at = i + turn * 3
        cases.append((every[(at // 2 + at) % len(every)], H200 if at % 2 == 0 else GPUS[1 + at // 2 % 5]))
    return cases


def kinds(cases: list[tuple[Problem, Gpu]]) -> dict[tuple[Precision, Layout, Pass, bool], tuple[Problem, Gpu]]:
    """Cases but of 1-D and depthwise layers by precision, layout and pass, and whether they are for the H200."""
    dense = [(p, gpu) for p, gpu in cases if p.rank > 1 and p.groups < p.in_channels]
    return {(p.precision, p.layout, p.pass_, gpu is H200): (p, gpu) for p, gpu in dense}


def compiled() -> list[tuple[Problem, Gpu]]:
    """One pass of one layer in three, of every other layer for the H200, and cases of the kinds that these lack."""
    every = sample()
    one = every if EVERY else [case for i, case in enumerate(every) if (i // 4 + i) % 2 and i % 3 == 0]
    return one + [case for kind, case in kinds(every).items() if kind not in kinds(one)]


def test_the_samples_have_every_kind() -> None:
    for cases in (sample(), compiled()):
        found = kinds(cases)
        for gpus in (True, False):
            of_gpus = {kind[:3] for kind in found if kind[3] == gpus}
            assert {kind[:2] for kind in of_gpus} == {*product(DTYPES, ("nchw", "channels_last"))}
            assert {kind[::2] for kind in of_gpus} == {*product(DTYPES, PASSES)}
        of_chips = [gpu for _, gpu in cases]
        assert all(of_chips.count(gpu) >= 3 for gpu in GPUS)
        assert {(p.rank, p.pass_) for p, _ in cases} == {*product((1, 2, 3), PASSES)}


def case_id(value: object) -> str:
    return value.name if isinstance(value, Gpu) else f"{value} {value.precision}"  # type: ignore[attr-defined]


def refused(p: Problem, gpu: Gpu) -> bool:
    """Layers of the suites that have no tiling: depthwise ones, and those whose halo is too large.

    That is 3-D kernels and gradients of strided layers where a block has 99 KB, and these with 3x5x7 taps where it
    has 163 KB.
    """
    strided = p.pass_ == "grad-input" and max(p.stride) > 1
    if gpu.shared_bytes < 100 * 1024 and (p.rank == 3 or strided):
        return True
    return source_shape(p)[1] // p.groups < 4 or (strided and p.kernel == (3, 5, 7) and gpu.shared_bytes < 200 * 1024)


def least_bytes(p: Problem) -> float:
    """Bytes of a layer's result, and of its source those of rows (channels-last: pixels) that some tap reads."""
    read = 1.0
    for axis, (kernel, stride, dilation) in enumerate(zip(p.kernel, p.stride, p.dilation)):
        if p.pass_ == "grad-input" and (axis < p.rank - 1 or p.layout == "channels_last"):
            read *= len({k * dilation % stride for k in range(kernel)}) / stride
    return (math.prod(result_shape(p)) + read * math.prod(source_shape(p))) * p.dtype.itemsize


@pytest.mark.slow
@pytest.mark.parametrize("p,gpu", sample(), ids=case_id)
def test_choices_are_sound(p: Problem, gpu: Gpu) -> None:
    choice = gather.choose(p, gpu)
    if isinstance(choice, str):
        assert refused(p, gpu), choice
        return
    assert choice.tiling.checked(gpu.shared_bytes).wgmma == (gpu is H200)
    assert choice.seconds >= least_bytes(p) / gpu.bandwidth


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p,gpu", compiled(), ids=case_id)
def test_chosen_kernels_compile_without_spills(p: Problem, gpu: Gpu) -> None:
    choice = gather.choose(p, gpu)
    if isinstance(choice, str):
        assert refused(p, gpu), choice
        return
    packed, *unpacked = choice.sources()
    assert set(packed.entries) == {"gather", "pack"} and [u.entries for u in unpacked] in ([], [("gather",)])
    assert bool(unpacked) == choice.boxable <= choice.tiling.boxable
    for unit in (packed, *unpacked):
        # NCHW gradients on sm_90a with 4 accumulators, or 7 pixels for a thread to turn, do spill a little; kb58
        # in half precision, with both, 112 bytes.
        spilling = p.pass_ == "grad-input" and p.layout == "nchw" and choice.tiling.wgmma
        most = 112 if choice.tiling.mb * choice.tiling.nb == 4 and choice.tiling.pixels > 7 * 192 else 72
        check_compiled(choice.tiling, unit.source, gpu.arch, most if spilling else 0, unit is packed)


def rows_begin(p: Problem) -> int:
    """Of 16 bytes and two elements the most that divides a result's rows; else an element, or 0 for pairs of rows."""
    size, (*_, height, width) = p.dtype.itemsize, result_shape(p)
    found = next((unit for unit in (16, 2 * size) if width * size % unit == 0), 0)
    return found or (size if height % 2 else 0)


@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("text", ["32,64,3", "64,32,4,stride=2,padding=1", "16,16,5,stride=3,output_padding=1"])
def test_a_kernel_knows_where_rows_of_its_sizes_begin(text: str, precision: str, pass_: Pass) -> None:
    """And one for every size finds it out. Sizes whose rows begin alike share a kernel."""
    found = set()
    for width in range(60, 68):  # 16 bytes are 8 elements at most
        p = parse_layer(text + ",bias=False", f"2x{text.split(',')[0]}x40x{width}")
        p = p.with_(dtype=DTYPES[precision], precision=precision, pass_=pass_)
        choice = gather.choose(p, H200)
        assert not isinstance(choice, str)
        if choice.tiling.shuffle is not None or not choice.tiling.contiguous:
            continue
        of_kernel = jit._macros(choice.sources()[0].source)
        assert rows_begin(p) == (16 if choice.tiling.drained else int(of_kernel["store_unit"]))
        found.add(rows_begin(p))
        wider = p.with_(size=(44, width + 32))
        assert replace(choice, problem=wider).sources() == choice.sources()
        general = gather.choose(p, H200, general=True)
        assert not isinstance(general, str)
        assert general.tiling.drained or jit._macros(general.sources()[0].source)["store_unit"] == "0"
    even = pass_ == "fwd" and "stride=2" in text  # all its widths are
    odd = pass_ == "fwd" and "stride=3" in text  # all its heights are
    others = set() if even else {p.dtype.itemsize if odd else 0}
    assert found == {16, 2 * p.dtype.itemsize} | others


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"), [("kb57", "tf32"), ("kb61", "tf32"), ("vae", "fp16"), *[("kb68", "tf32")] * EVERY]
)
def test_every_way_to_store_compiles_without_spills(name: str, precision: str) -> None:
    (case,) = (c for c in SUITES["cuda"] if c.name == name)
    p = case.problem.with_(dtype=DTYPES[precision], precision=precision)
    choice = gather.choose(p, H200)
    assert not isinstance(choice, str)
    ways = [16, 2 * p.dtype.itemsize, p.dtype.itemsize, 0]
    for unit in ways[::3] if p.rank == 3 else by_turns(ways, 2, name == "vae"):  # each of one of the 2-D layers
        check_compiled(choice.tiling, gather.source(choice.tiling, store_unit=unit), H200.arch)


@pytest.mark.parametrize(
    ("text", "size", "settings", "wgmma", "wanted"),
    (
        ("64,64,3", "1x64x8x8", {}, True, "1-D, 2-D forward"),
        ("64,64,3", "1x64x99", {}, True, "1-D, 2-D forward"),
        ("64,64,3", "1x64x8x8x8", {}, True, "3-D forward, mma.sync"),
        ("64,64,3", "1x64x8x8x8", {"pass_": "grad-input"}, True, "gradient for the input"),
        ("64,64,3", "1x64x8x8", {"pass_": "grad-input"}, True, "gradient for the input"),
        ("64,64,3", "1x64x8x8", {"layout": "channels_last"}, True, "channels_last"),
        ("64,64,3", "1x64x8x8x8", {"layout": "channels_last", "pass_": "grad-input"}, True, "channels_last"),
        ("64,64,3", "1x64x8x8", {}, False, "3-D forward, mma.sync"),
        ("64,64,3", "1x64x8x8", {"layout": "channels_last", "pass_": "grad-input"}, False, "3-D forward, mma.sync"),
    ),
)
def test_each_source_has_its_set_of_costs(
    text: str, size: str, settings: dict[str, Any], wgmma: bool, wanted: str
) -> None:
    p = parse_layer(text + ",bias=False", size).with_(precision="tf32", **settings)
    found = list(gather_search.candidates(p, H200 if wgmma else A100))
    assert found and all(costs.constants(t) is costs.SETS[wanted] for t in found)


@pytest.mark.parametrize("channels", [24, 6])
def test_threads_copy_a_stage_ahead_and_planes_come_by_boxes(channels: int) -> None:
    """Rows of 259 columns fit no box, nor do channels off 16 bytes: what copies them has a stage of its own."""
    p = Problem.make(2, 16, channels, (4, 6, 19), (3, 2, 3), 2, 1, 0, 2, bias=False)
    p = p.with_(precision="tf32", layout="channels_last", pass_="grad-input")
    found = list(gather_search.candidates(p, H200))
    by_threads = [t for t in found if not t.tensor_map]
    assert by_threads and all(t.stages_p >= 2 and not t.planewise for t in by_threads)
    assert all(len(t.planes) > 1 for t in found if t.planewise)
    for wrong, told in (({"planewise": True}, "planes come by no boxes"), ({"stages_p": 1}, "a stage ahead")):
        with pytest.raises(Unfit, match=told):
            replace(by_threads[0], **wrong).checked(H200.shared_bytes)


@needs_nvrtc
def test_a_stage_of_threads_that_copy_is_refused_by_the_kernel_too() -> None:
    p = Problem.make(2, 16, 24, (4, 6, 19), (3, 2, 3), 2, 1, 0, 2, bias=False)
    p = p.with_(precision="tf32", layout="channels_last", pass_="grad-input")
    tiling = next(t for t in gather_search.candidates(p, H200) if not t.tensor_map)
    with pytest.raises(jit.CompileError, match="a stage ahead"):
        jit.cubin(gather.source(replace(tiling, stages_p=1)), H200.arch)


def test_planes_that_come_one_by_one_have_costs_of_their_own() -> None:
    settings: dict[str, Any] = {"precision": "tf32", "layout": "channels_last", "pass_": "grad-input"}
    p = parse_layer("64,64,4,stride=2,padding=1,bias=False", "1x64x8x8").with_(**settings)
    found = list(gather_search.candidates(p, H200))
    assert {t.planewise for t in found} == {False, True}
    names = {False: "channels_last", True: "planes one by one"}
    assert all(costs.constants(t) is costs.SETS[names[t.planewise]] for t in found)
    assert not any(t.planewise for t in gather_search.candidates(p, A100))


@pytest.mark.parametrize("name", ["dcgan1", "unet1", "vae", "nnunet"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_gradients_take_weights_as_they_lie(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kernels are there, each is loaded when a weight wants it; what is kept for the one is not the other's."""
    (layer,) = (case.problem for case in SUITES["models"] if case.name == name)
    precision: Precision = "tf32" if dtype is torch.float32 else "bf16"
    p = layer.with_(dtype=dtype, precision=precision, layout="channels_last", pass_="grad-input", bias=False)
    loaded: list[str] = []

    def kernel(source: str, entry: str, arch: str, label: str, keep: bool) -> str:
        loaded.append(entry + (" unpacked" if "bool boxed = true" in source else ""))
        return entry

    monkeypatch.setattr(jit, "kernel", kernel)
    monkeypatch.setattr(jit, "at_hand", lambda source, arch, label: True)
    monkeypatch.setattr(prepared_module, "Launcher", lambda *arguments: lambda *call: None)
    monkeypatch.setattr(prepared_module, "gpu_of", lambda device: H200)
    choice, other = gather.choose(p, H200), gather.choose(p.with_(layout="nchw"), H200)
    assert isinstance(choice, gather.Choice) and isinstance(other, gather.Choice)
    assert choice.boxable and not other.boxable
    prepared, contiguous = choice.prepare(0), other.prepare(0)
    assert prepared.packing != contiguous.packing
    packing = ["pack_float"] if dtype.itemsize == 2 else []
    contiguous.load()
    assert sorted(loaded) == sorted(["gather", "pack", *packing, *(["gather"] if other.packs else [])])
    assert contiguous.loaded and not prepared.loaded
    loaded.clear()
    last = (torch.channels_last, torch.channels_last_3d)[p.rank - 2]
    weight = torch.empty(p.weight_shape, dtype=dtype).contiguous(memory_format=last)
    assert prepared.pack(weight) is weight and not loaded
    assert prepared.pack(weight.contiguous()).dtype is torch.int32 and loaded == ["pack"]
    off = torch.empty(weight.numel() + 1, dtype=dtype)[1:].as_strided(weight.shape, weight.stride())
    assert prepared.pack(off).dtype is torch.int32
    prepared.load()
    assert sorted(loaded) == sorted(["gather", "gather unpacked", "pack", *packing]) and prepared.loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forwards_take_weights_as_they_lie_unless_they_keep_them(dtype: torch.dtype, stubs: Stubs) -> None:
    """At each call; kept for many calls they are packed in TF32, and in 16 bits used as they lie.

    `load` loads what both want, then nothing is loaded at the calls.
    """
    p = Problem.make(128, 512, 256, (8, 8), 4, 2, 1, dtype=dtype, layout="channels_last")
    p = p.with_(precision="tf32" if dtype is torch.float32 else "bf16")
    choice = gather.choose(p, H200)
    assert isinstance(choice, gather.Choice) and choice.boxable
    prepared = choice.prepare(0)
    weight = torch.randn(p.weight_shape, dtype=dtype)
    last = weight.contiguous(memory_format=torch.channels_last)
    prepared.load()
    assert prepared.loaded
    stubs.loaded.clear()
    x, out = (
        torch.empty(s, dtype=dtype).contiguous(memory_format=torch.channels_last)
        for s in (p.input_shape, p.output_shape)
    )
    kept = prepared.pack_to_keep(last)
    assert (kept is last) == (dtype is torch.bfloat16) and (kept.dtype is torch.int32) == (dtype is torch.float32)
    prepared.run(x, kept, None, out)
    assert stubs.pop()[3][1] == kept.data_ptr() and not stubs.loaded
    assert prepared.pack_to_keep(weight).dtype is torch.int32 and prepared.pack(last) is last
    backward = gather.choose(p.with_(pass_="grad-input"), H200)
    assert isinstance(backward, gather.Choice) and backward.prepare(0).pack_to_keep(last) is last
    # A kernel that packs leaves them as they lie, too; float32 weights of 16 bits it packs.
    packing = replace(choice, seconds=1e-5)
    if packing.packs:
        other = packing.prepare(0)
        other.run(x, last, None, out, True, True)
        assert stubs.pop()[3][1] == last.data_ptr()
        other.run(x, weight, None, out, True, True)
        assert weight.data_ptr() in stubs.pop()[3]


def test_frozen_weights_are_packed_once_for_all_sizes(stubs: Stubs) -> None:
    """In TF32 boxes bring weights where the estimate is short, but what is kept is packed alike."""
    p = Problem.make(128, 512, 256, (8, 8), 4, 2, 1, layout="channels_last").with_(precision="tf32")
    choice = gather.choose(p, H200)
    assert isinstance(choice, gather.Choice)
    short, long = replace(choice, seconds=1e-5), replace(choice, seconds=1e-2)
    assert short.boxable and not long.boxable
    assert short.prepare(0).packing == long.prepare(0).packing


@needs_nvrtc
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_tables_fit_in_constant_memory(layout: str) -> None:
    """Of layers of thousands of taps and phases; those whose tables do not are refused."""
    refused = 0
    for size, kernel, stride in (((4, 4), 64, 32), ((4, 4), 64, 128), ((4, 4, 4), 16, 17), ((8, 8), 45, 90)):
        p = Problem.make(2, 64, 64, size, kernel, stride, dtype=torch.bfloat16, layout=layout).with_(precision="bf16")
        choice = gather.choose(p, H200)
        if isinstance(choice, str):
            refused += 1
            continue
        assert choice.tiling.table_bytes <= 65536
        jit.cubin(choice.sources()[0].source, "90a", "tables")
    assert 0 < refused < 4


# --- kernels that pack the weights themselves ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pass_", "precision"), [*product(PASSES, ("tf32", "ieee")), ("fwd", "fp16"), ("grad-input", "bf16")]
)
def test_kernels_that_pack_have_no_spills(pass_: Pass, precision: Precision) -> None:
    """Matrix instructions as without it, nothing serialised, no kernels beside.

    Kernels of both 16-bit types are the same but for one word: each has a pass.
    """
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    every: tuple[tuple[Any, Any, Any], ...] = (((64, 60), 3, 1), ((16, 16), 4, 2), ((9, 13), (3, 5), (2, 3)))
    layers = every if precision == "tf32" else every[1:]
    for size, kernel, stride in by_turns(layers, 2, (pass_ == "grad-input") != (precision == "ieee")):
        p = Problem.make(8, 64, 48, size, kernel, stride, 1, bias=False, dtype=dtype).with_(
            precision=precision, pass_=pass_
        )
        choice = gather.choose(p, H200)
        assert isinstance(choice, gather.Choice) and choice.packs
        (unit,) = choice.packing_sources
        code, text, log = jit.built(unit.source, H200.arch, unit.label)
        found = jit.inspect(code)
        assert set(found) == {"gather"} and found["gather"][1] <= 32, found
        assert "wgmma.mma_async" in text and jit.serialised(log) is None


def test_only_small_weights_are_packed_by_the_kernel() -> None:
    small = Problem.make(8, 64, 48, (16, 16), 4, 2, 1, bias=False).with_(precision="tf32")
    found = gather.choose(small, H200)
    assert isinstance(found, gather.Choice) and found.packs
    assert found.grid <= found.packs <= H200.multiprocessors and found.tiling.pack_blocks <= 4 * found.packs
    assert not replace(found, general=True).packs and not replace(found, seconds=1e-3).packs
    for other in (small.with_(in_channels=1024, out_channels=1024), small.with_(batch=512, size=(256, 256))):
        large = gather.choose(other, H200)
        assert isinstance(large, gather.Choice) and not large.packs and not large.packing_sources
    for before in (A100, RTX4090):  # without wgmma
        sync = gather.choose(small, before)
        assert isinstance(sync, gather.Choice) and not sync.packs
    last = gather.choose(small.with_(layout="channels_last", pass_="grad-input"), H200)
    assert isinstance(last, gather.Choice) and last.boxable and not last.packs  # needs no packing


def test_blocks_that_pack_are_as_many_as_weights_that_stay() -> None:
    """A block with a tile of another M-group would multiply its first tile's weights."""
    many = Problem.make(1, 16, 1024, (4, 4), 6, 6, layout="channels_last", precision="tf32")
    found = gather.choose(many, H200)
    assert isinstance(found, gather.Choice) and found.tiling.resident
    assert found.packs == found.grid == found.tiling.m_groups > H200.multiprocessors


WIDE = Problem.make(8, 32, 64, (256, 320), 3, 1, 1).with_(precision="tf32")  # 19 tiles for a multiprocessor


@pytest.mark.parametrize("seed", seeds(4, 20))
def test_rounds_are_alike_but_for_where_they_begin(seed: int) -> None:
    """In pixel rows of every tile, with all sets of fragments in each; rounds of planes are one each."""
    random.seed(seed)
    kernels = ((5, 5), (5, 6), (4, 7), (3, 9), (3, 5), (4, 4), (5, 10), (3, 3, 3), (27,))
    seen = 0
    while not seen:
        kernel = random.choice(kernels)
        stride, dilation = ([random.choice((1, 1, most)) for _ in kernel] for most in (2, 3))
        size = [random.randint(20, 40) for _ in kernel]
        p = Problem.make(2, 40, 48, size, kernel, stride, dilation=dilation)
        precision: Precision = random.choice(("tf32", "bf16"))
        layout: Layout = random.choice(("nchw", "channels_last")) if len(kernel) > 1 else "nchw"
        pass_: Pass = random.choice(("fwd", "grad-input"))
        p = p.with_(dtype=DTYPES[precision], precision=precision, layout=layout, pass_=pass_, bias=False)
        for t in gather_search.candidates(p, H200):
            if not t.rolled:
                assert t.round_shifts == (0,)
                continue
            seen += 1
            check_rounds(t)


def check_rounds(t: Tiling) -> None:
    taps, steps = t.taps_unrolled, t.taps_unrolled * t.k_steps
    assert not t.straight and t.most_entries * t.k_steps >= 25 and steps <= 16 and len(t.round_shifts) == taps
    assert t.fragment_sets >= 3 and steps % t.fragment_sets == 0 and (t.nb > 1 or t.split == 2)
    for block in (block for blocks in t.entries for block in blocks):
        shifts = [t.shift(offsets) for offsets, _ in block]
        assert len(shifts) % taps == 0
        for i in range(0, len(shifts), taps):
            assert tuple(shift - shifts[i] for shift in shifts[i : i + taps]) == t.round_shifts
        if t.planewise:
            assert [t.plane_of(offsets) for offsets, _ in block] == [i // taps for i in range(taps * len(t.planes))]


def test_dilated_planes_are_no_rounds_where_they_are_more_than_remainders() -> None:
    p = Problem.make(64, 128, 64, (1, 128), 4, 2, 1, dilation=3, bias=False)
    p = p.with_(precision="tf32", layout="channels_last", pass_="grad-input")
    planewise = [t for t in gather_search.candidates(p, H200) if t.planewise and t.rolled]
    assert {len(t.planes) for t in planewise} == {4} and all(t.tile[2] > 1 for t in planewise)
    for t in planewise:
        check_rounds(t)


@needs_nvrtc
@pytest.mark.parametrize(
    "p",
    [
        Problem.make(4, 128, 128, (16, 16), 5, 2, 2, dtype=torch.bfloat16),
        Problem.make(4, 256, 32, (14, 14), (3, 5), 2, 1, dtype=torch.bfloat16),
        Problem.make(4, 256, 32, (16, 16), 4, 1, 1, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_one_instruction_a_step_is_straight_code(p: Problem) -> None:
    """ptxas serialises the instructions of rounds of these."""
    choice = gather.choose(p.with_(bias=False, pass_="grad-input"), H200)
    assert isinstance(choice, gather.Choice) and choice.tiling.nb == 1 and choice.tiling.straight
    assert jit.serialised(jit.built(choice.sources()[0].source, "90a", "gather").log) is None


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "precision", "layout", "pass_"),
    [
        ("kb77", "tf32", "nchw", "fwd"),
        ("kb78", "bf16", "channels_last", "fwd"),
        ("kb69", "tf32", "channels_last", "grad-input"),
        ("kb75", "bf16", "nchw", "grad-input"),
    ],
)
def test_the_tensor_cores_do_not_drain_between_rounds(
    name: str, precision: Precision, layout: Layout, pass_: Pass
) -> None:
    """As many matrix instructions as a round has, none serialised, nothing spilled."""
    (p,) = (c.problem for c in SUITES["kernelbench"] if c.name == name)
    p = p.with_(dtype=DTYPES[precision], precision=precision, layout=layout, pass_=pass_, bias=False)
    choice = gather.choose(p, H200)
    assert isinstance(choice, gather.Choice) and choice.tiling.rolled
    t = choice.tiling
    code, text, log = jit.built(choice.sources()[0].source, "90a", name)
    assert text.count("wgmma.mma_async") == t.taps_unrolled * t.k_steps * t.nb * t.mb // (2 if t.wide else 1)
    assert jit.serialised(log) is None and jit.inspect(code)["gather"][1] == 0


def test_which_blocks_claim_tiles() -> None:
    def claimed(p: Problem, gpu: Gpu = H200, **how: bool) -> bool:
        found = gather.choose(p, gpu, **how)
        assert isinstance(found, gather.Choice)
        units, t = found.sources(), found.tiling
        assert all(("bool claimed = true;" in unit.source) is found.claimed for unit in units)
        bytes_ = t.shared_bytes + (192 if found.claimed else 0)
        assert all(f"int shared_bytes = {bytes_};" in unit.source for unit in units)
        assert bytes_ <= gpu.shared_bytes
        return found.claimed

    assert claimed(WIDE) and not claimed(WIDE.with_(batch=7)), "18 tiles each"
    assert claimed(WIDE, general=True)
    assert not claimed(WIDE, A100), "no boxes"
    up = SUITES["cuda"]
    unet4, kb75 = (next(c.problem for c in up if c.name == name) for name in ("unet4", "kb75"))
    last = {"precision": "tf32", "layout": "channels_last"}
    assert claimed(kb75.with_(precision="tf32")) and not claimed(kb75.with_(**last)), "groups share lines"

    def last_rounds(p: Problem) -> int:
        assert claimed(p)
        found = gather.choose(p, H200)
        assert isinstance(found, gather.Choice)
        assert all(f"int last_rounds = {found.last_rounds};" in unit.source for unit in found.sources())
        return found.last_rounds

    assert last_rounds(unet4.with_(**last)) == last_rounds(unet4.with_(pass_="grad-input", **last)) == 4, (
        "blocks stay abreast"
    )
    assert last_rounds(kb75.with_(pass_="grad-input", **last)) == 4 and last_rounds(WIDE) == 0
    nnunet2 = next(c.problem for c in up if c.name == "nnunet2")
    assert last_rounds(nnunet2.with_(**last)) == 0, "results are most of the bytes"


def test_what_a_kernel_that_claims_is_told(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream's own counters, or none; it begins beside its packing, unless its zeros are made in between."""
    stream = [7]
    monkeypatch.setattr(launch, "current_stream", lambda index: stream[0])
    choice = gather.choose(WIDE, H200)
    assert isinstance(choice, gather.Choice) and choice.claimed
    prepared = choice.prepare(0)
    x, out = torch.empty(WIDE.input_shape), torch.empty(WIDE.output_shape)
    packed = prepared.pack(torch.randn(WIDE.weight_shape))
    stubs.launched.clear()
    told = []
    for on, claim in ((7, False), (7, True), (7, True), (8, True), (8, True)):
        stream[0] = on
        prepared.run(x, packed, None, out, True, claim)
        name, grid, dependent, args = stubs.pop()
        assert (name, grid, args[5:16]) == ("gather", choice.grid, choice.tiling.arguments(WIDE))
        told.append((args[4], dependent))
    none, first, second, third, fourth = told
    assert none == (0, True) and first == (second[0], False) and second[1] and third[0] != first[0] != 0
    assert not third[1] and fourth == (third[0], True)
    (counters,) = prepared.counters.values()
    assert all(zeros.numel() == choice.tiling.m_groups + 1 for zeros in counters.of_streams.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_kernel_that_packs_is_told(dtype: torch.dtype, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights where they lie, each stream's own zeros; two launches where weights lie otherwise or results do."""
    stream = [7]
    monkeypatch.setattr(launch, "current_stream", lambda index: stream[0])
    p = Problem.make(2, 64, 48, (16, 16), 4, 2, 1, dtype=dtype)
    p = p.with_(precision="tf32" if dtype is torch.float32 else "bf16")
    choice = gather.choose(p, H200)
    assert isinstance(choice, gather.Choice)
    prepared = choice.prepare(0)
    assert choice.packs and not stubs.loaded, "which kernels are wanted, the first weight says"
    x, out, weight = (torch.randn(shape, dtype=dtype) for shape in (p.input_shape, p.output_shape, p.weight_shape))
    bias = torch.randn(48, dtype=dtype)
    kept = []
    for given, step, single in (
        (weight, 1, dtype is torch.float32),
        (weight.float(), 1, True),
        (weight.contiguous(memory_format=torch.channels_last), 48, dtype is torch.float32),
    ):
        prepared.run(x, given, bias, out, True, True)
        name, grid, dependent, args = stubs.pop()
        assert (name, grid, dependent) == ("gather", choice.packs, False) and not stubs.launched
        assert (args[0], *args[2:5]) == (x.data_ptr(), bias.data_ptr(), out.data_ptr(), given.data_ptr())
        assert args[6:8] == (step, single) and args[8:19] == choice.tiling.arguments(p)
        kept.append(args[5])
    stream[0] = 8
    prepared.run(x, weight, None, out, True, True)
    args = stubs.pop()[3]
    assert len({*kept}) == 1 and args[5] not in kept and args[2] == 0
    (counters,) = prepared.counters.values()
    assert all(not zeros.any() for zeros in counters.of_streams.values())
    off = torch.empty(out.numel() + 1, dtype=dtype)[1:].view(out.shape)
    for given, to in ((weight.mT.contiguous().mT, out), (weight, off)):
        prepared.run(x, given, bias, to, True, True)
        *_, args = stubs.pop()
        assert (args[3] == to.data_ptr()) == (to is out) and (args[4] == weight.data_ptr()) == (given is weight)
    assert stubs.loaded == ["gather"] and not prepared.loaded
    trained = choice.prepare(0)
    trained.run(x, weight, None, out, True, True)
    assert not trained.loaded
    trained.load()
    assert trained.loaded
    for number in range(100):
        stream[0] = number
        prepared.run(x, weight, None, out, True, True)
    assert len(counters.of_streams) <= 64
