"""The grad-weight family on tensor cores: candidates, kernels and choices. What it computes: test_wgrad_modes.py."""

from __future__ import annotations

import math
import pickle
import random
import re
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from conftest import EVERY, Stubs, by_turns
from upconv.bench.suites import SUITES
from upconv.cuda.compile import jit, launch
from upconv.cuda.compile.boxes import fullest
from upconv.cuda.gpu import A100, B200, H200, RTX3090, RTX4090, RTX5090, Gpu
from upconv.cuda.wgrad import wgrad, wgrad_costs, wgrad_search
from upconv.cuda.wgrad.wgrad_tiling import WARPS, SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Layout, Precision, Problem, output_length

DTYPES = {"tf32": torch.float32, "ieee": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
AnyTiling = SyncTiling | WarpgroupTiling


# --- random layers and tilings ---------------------------------------------------------------------------------------


def draw_problem(rng: random.Random) -> Problem:
    """A small layer: all ranks, asymmetric everything, output paddings beyond the stride, odd sizes and channels."""
    rank = rng.choice((1, 2, 2, 3))
    axes = []
    for i in range(rank):
        kernel, stride = rng.choice((1, 2, 3, 3, 4, 5)), rng.choice((1, 1, 2, 2, 3, 4))
        dilation = rng.choice((1, 1, 2, 3, 9))
        if rank == 3:
            kernel, stride = min(kernel, 3), min(stride, 2)
        output_padding = rng.choice((0, rng.randrange(max(stride, dilation))))
        size = rng.randint(1, (70, 9, 4)[rank - 1])
        if i == rank - 1:  # rows of whole 16 bytes now and then
            size = rng.choice((size, 8 * rng.randint(1, (9, 3, 2)[rank - 1])))
        free = output_length(size, kernel, stride, 0, output_padding, dilation)
        axes.append((size, kernel, stride, rng.randint(0, min((free - 1) // 2, 5)), output_padding, dilation))
    size, kernel, stride, padding, output_padding, dilation = zip(*axes)
    precision: Precision = rng.choice(("tf32", "tf32", "ieee", "fp16", "bf16"))
    groups = rng.choice((1, 1, 1, 2, 3))
    return Problem.make(
        rng.randint(1, 3),
        groups * rng.choice((4, 5, 8, 16, 17, 24, 32, 40, 72)),
        groups * rng.choice((1, 2, 3, 4, 8, 16, 17, 32, 40)),
        size,
        kernel,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        dtype=DTYPES[precision],
        precision=precision,
        layout=rng.choice(("nchw", "channels_last")) if rank > 1 else "nchw",
        pass_="grad-weight",
    )


def tilings(p: Problem) -> list[AnyTiling]:
    """All candidates of a layer."""
    aligned, aligned_g = (size[-1] * p.dtype.itemsize % 16 == 0 for size in (p.size, p.out_size))
    of_size = wgrad_search.narrow(p), wgrad_search.classes_of(p), False, wgrad_search.lined(p)
    return list(wgrad_search.candidates(wgrad_search.any_size(p), H200, aligned, aligned_g, *of_size))


def other_size(p: Problem, rng: random.Random) -> Problem:
    """The layer at another batch and size, whose rows have the same alignment."""
    size = [n + rng.randint(0, 3) for n in p.size]
    size[-1] = p.size[-1] + 8 * rng.randint(0, 2)
    return p.with_(batch=rng.randint(1, 5), size=tuple(size))


def serves(t: AnyTiling, p: Problem, q: Problem) -> bool:
    """Whether a tiling of a layer at one size serves it at another."""
    if not isinstance(t, WarpgroupTiling):
        return True
    whole = (not t.lines or p.size[-1] == q.size[-1]) and (not t.lined or wgrad_search.lined(q))
    return whole and (not t.classed or wgrad_search.classes_of(q) == t.classes)


def work(tiling: AnyTiling, p: Problem) -> int:
    """What a tiling brings to multiply, in elements of operands."""
    tiling = wgrad_costs.boxed(tiling, p)
    taps = tiling.set_taps * tiling.block[1] + tiling.block[0]
    return math.prod(tiling.counts(p)) * tiling.tiles * math.prod(tiling.tile) * taps


@lru_cache
def layer(seed: int) -> tuple[Problem, tuple[AnyTiling, ...]]:
    p = draw_problem(random.Random(seed))
    return p, tuple(tilings(p))


def test_boxes_of_chunks_fill_them() -> None:
    """The fewest boxes that a search of all shapes finds; whole images of 4 x 4, and rows of 14 of several."""
    assert fullest(64, (4, 4), (2, 2), 64) == (16, (4, 1, 4, 4))
    assert fullest(512, (14, 14), (2, 2), 128)[0] * 128 < 1.03 * 512 * 14 * 14
    rng = random.Random(0)
    for _ in range(300):
        size, batch = tuple(rng.randint(1, 12) for _ in range(rng.randint(1, 3))), rng.randint(1, 9)
        stride, pixels = tuple(rng.randint(1, 3) for _ in size), rng.choice((16, 64, 96))
        count, box = fullest(batch, size, stride, pixels)
        sides = (batch, *(1,) * (3 - len(size)), *size)
        assert math.prod(box) <= pixels
        assert count == math.prod(-(-n // of) for n, of in zip(sides, box))
        shapes = product(*(range(1, n + 1) for n in sides))
        fit = (s for s in shapes if math.prod(s) <= pixels)
        assert count == min(math.prod(-(-n // of) for n, of in zip(sides, s)) for s in fit)


@pytest.mark.parametrize(
    "cin,steep,rows_of_32,widths",
    [
        (24, False, False, (32,)), (32, True, False, (32,)), (48, False, True, (64, 48)), (64, False, False, (64,)),
        (80, False, False, (64, 128, 80)), (80, False, True, (64, 128)), (96, False, True, (64, 128, 96)),
        (128, False, False, (64, 128)), (192, False, False, (64, 128, 96)), (256, True, False, (64, 128, 256)),
        (384, True, False, (64, 128, 256)),
        (320, False, True, (64, 128, 160)), (320, True, False, (64, 128, 256, 160)), (512, False, False, (64, 128)),
    ],
)  # fmt: skip
def test_widths_of_blocks(cin: int, steep: bool, rows_of_32: bool, widths: tuple[int, ...]) -> None:
    """One more where it leaves fewer columns empty; by boxes of pixels' channels not where they are the narrowest."""
    assert wgrad_search._widths(cin, steep, rows_of_32) == widths


def test_wide_blocks_are_not_turned() -> None:
    """Float32 channels-last pixels, which are turned in shared memory: no block of 96 or 160 channels."""
    p = Problem.make(
        2, 320, 64, (8, 16), 2, 2, precision="tf32", layout="channels_last", pass_="grad-weight"
    )  # fmt: skip
    found = {t.block[0] for t in tilings(p) if isinstance(t, WarpgroupTiling)}
    assert found == {64, 128}
    assert 160 in {t.block[0] for t in tilings(p.with_(layout="nchw")) if isinstance(t, WarpgroupTiling)}


# --- candidates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(120, 150))
def test_candidates_keep_the_hardwares_limits(seed: int) -> None:
    """Shared memory, registers, boxes of the tensor copy engine, and whole matrix instructions."""
    every = layer(seed)[1]
    assert every
    for t in every:
        assert t.shared_bytes <= H200.shared_bytes
        gapless = t.gapless if isinstance(t, WarpgroupTiling) else 0
        assert (gapless or math.prod(t.tile)) % (32 // t.element) == 0
        assert gapless or t.tile[3] % 8 == 0
        if isinstance(t, SyncTiling):
            assert WARPS % t.warps == 0
            assert t.warps * t.warp[0] * t.warp[1] == t.block[0] * t.block[1]
            assert t.accumulators <= 144
            assert t.k_steps >= t.k_slices
            continue
        producer, consumer = t.registers
        assert 128 * (producer + t.warpgroups * consumer) <= 65536
        assert producer % 8 == consumer % 8 == 0
        assert t.accumulators < consumer
        if t.stacked:
            assert t.tile[3] * t.element // 32 % t.unrolled == 0
            assert t.stack * (t.block[0] if t.turned or not t.channels_last else t.x_width) <= 256
        else:
            assert t.k_steps * t.entries % t.unrolled == 0
            assert t.unrolled % t.entries == 0
        assert t.warpgroups % t.split_m == 0
        # 2 to the power of 8 elements at most, whole 16 bytes, and no more than the swizzle's span.
        for box, span in ((t.box, None if t.turned else t.segment), (t.g_box, None)) if t.box_g else ((t.box, None),):
            assert max(box) <= 256 and max(t.g_box_steps) <= 8
            assert box[0] * t.element % 16 == 0
            assert span is None or box[0] * t.element <= span


@pytest.mark.parametrize("seed", range(150, 170))
def test_constants_do_not_depend_on_the_size(seed: int) -> None:
    """One compiled kernel serves a layer at every batch, and at every image size whose rows are aligned alike."""
    rng = random.Random(seed)
    p, every = layer(seed)
    other = other_size(p, rng)
    assert wgrad_search.any_size(p) == wgrad_search.any_size(other)
    for t in rng.sample(every, min(20, len(every))):
        assert replace(t, problem=other).constants() == t.constants()
        (one, *alone), (same, *at_once) = (
            wgrad.Choice(t, q, H200, n, 0.0, "").sources() for q, n in ((p, 1), (other, 7))
        )
        assert one.source == same.source
        if not isinstance(t, WarpgroupTiling):
            assert not (alone or at_once)
            continue
        adds_up, expected = t.adds_up, []
        assert [u.source for u in alone] == ([wgrad.one_step("", t, alone=True).source] if adds_up else [])
        if adds_up:
            if t.tiles <= H200.clusters(7) * -(-7 * t.tiles // 132):
                expected = [wgrad.one_step("", t, cluster=7).source]
            elif 7 * t.tiles <= 132:
                expected = [wgrad.one_step("", t, together=True).source]
        assert [unit.source for unit in at_once] == expected


# --- what is chosen --------------------------------------------------------------------------------------------------

SUITE = tuple({c.problem: c for name in ("kernelbench", "models") for c in SUITES[name]}.values())
GPUS = (H200, A100, RTX3090, RTX4090, B200, RTX5090)

BOUNDS = {"bytes", "tensor cores", "shared memory", "L2", "copies"}


def versions(p: Problem) -> list[Problem]:
    """A layer's weight gradient in every precision and layout."""
    layouts = ("nchw", "channels_last") if p.rank > 1 else ("nchw",)
    return [
        p.with_(dtype=DTYPES[a], precision=a, layout=b, bias=False, pass_="grad-weight")
        for a, b in product(DTYPES, layouts)
    ]


def sample(count: int) -> list[tuple[Problem, Gpu]]:
    """For each layer `count` of its versions, each for one GPU; every other one for the H200."""
    cases = []
    for i, case in enumerate(SUITE):
        every = versions(case.problem)
        if EVERY:
            cases += list(product(every, GPUS))
            continue
        for k in range(count):
            at = i * count + k
            cases.append((every[(at // 2 + at) % len(every)], H200 if at % 2 == 0 else GPUS[1 + at // 2 % 5]))
    return cases


def case_id(value: object) -> str:
    return value.name if isinstance(value, Gpu) else f"{value} {value.precision}"  # type: ignore[attr-defined]


def kinds(cases: list[tuple[Problem, Gpu]]) -> dict[tuple[Precision, Layout, bool], tuple[Problem, Gpu]]:
    """2-D cases by their precision and layout, and whether they are for the H200."""
    return {(p.precision, p.layout, gpu is H200): (p, gpu) for p, gpu in cases if p.rank == 2}


def compiled() -> list[tuple[Problem, Gpu]]:
    """One version of every other layer for the H200 and of every other one for others, and of kinds that they lack."""
    one, every = sample(1), kinds(sample(2))
    one = one if EVERY else [case for i, case in enumerate(one) if i // 2 % 3 == 0]
    return one + [every[kind] for kind in every if kind not in kinds(one)]


def test_the_samples_have_every_precision_layout_and_gpu() -> None:
    for cases in (sample(2), compiled()):
        assert len(kinds(cases)) == 16
        assert {gpu for _, gpu in cases} == set(GPUS)


def refused(p: Problem, gpu: Gpu) -> str | None:
    """What `choose` must say of layers of the suites that have no tiling.

    kb81 in TF32 and channels_last: with few taps a warp takes a whole block, and eight warps that divide K need 64
    positions, whose g at a stride of 5 takes 112 KB.
    """
    if p.in_channels == p.groups > 1:
        return "1 input channels per group leave most of a matrix instruction empty"
    if gpu.shared_bytes < 100 * 1024 and p.stride == (5, 5) and (p.precision, p.layout) == ("tf32", "channels_last"):
        return "no tile of this layer with its halo fits in 99 KB of shared memory"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("p,gpu", sample(2), ids=case_id)
def test_choices_are_sound(p: Problem, gpu: Gpu) -> None:
    choice = wgrad.choose(p, gpu)
    if isinstance(choice, str):
        assert choice == refused(p, gpu)
        return
    t = choice.tiling
    assert isinstance(t, WarpgroupTiling) <= (gpu is H200 and p.precision != "ieee")
    assert t.shared_bytes <= gpu.shared_bytes
    chunks = math.prod(t.counts(p))
    per_split = -(-chunks // choice.splits)  # as the kernel takes them
    ranges = [range(i * per_split, min((i + 1) * per_split, chunks)) for i in range(choice.splits)]
    assert all(ranges), "a split without work"
    assert sum(map(len, ranges)) == chunks
    partial = 4 * choice.splits * t.k_slices * math.prod(p.weight_shape)
    assert choice.splits == 1 or partial <= wgrad_costs._MAX_SLICE_BYTES
    assert choice.seconds >= p.dtype.itemsize * (math.prod(p.input_shape) + math.prod(p.output_shape)) / gpu.bandwidth
    assert choice.bound in BOUNDS
    for part in (p.precision, f"{t.block[0]}x{t.block[1]}", f"grid {t.tiles * choice.splits}"):
        assert part in choice.summary


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("general", [False, True])
def test_what_a_search_leaves_out_is_never_the_best(layout: Layout, general: bool) -> None:
    for case, dtype in product(SUITE[::9], (torch.float32, torch.bfloat16)):
        p = case.problem.with_(dtype=dtype, precision="tf32" if dtype is torch.float32 else "bf16", layout=layout)
        p = p.with_(pass_="grad-weight", bias=False) if p.rank > 1 else p.with_(pass_="grad-weight", layout="nchw")
        if wgrad.refusal(p, H200):
            continue
        for t in list(wgrad_search.candidates(p, H200, True, True, general=general))[::7]:
            clocks = wgrad_costs.chunk_clocks(t)
            least = wgrad_costs.least(t, clocks[0], p, H200)
            assert 0 < least <= wgrad_costs.whole(t, clocks, p, H200, general=general)[0]


@pytest.mark.parametrize("index", range(0, len(SUITE), 6))
def test_the_same_choice_twice(index: int) -> None:
    """Nothing but the problem and the GPU decides, and a choice can be a key and go to another process."""
    p = versions(SUITE[index].problem)[0]
    found = []
    for _ in range(2):
        wgrad._choose.cache_clear()
        wgrad_search._sketches.cache_clear()
        found.append(wgrad.choose(p, H200))
    assert found[0] == found[1]
    assert hash(found[0]) == hash(found[1])
    assert pickle.loads(pickle.dumps(found[0])) == found[0]


def test_refusals_are_sentences() -> None:
    p = Problem.make(2, 8, 8, (9, 9), 3, precision="tf32", pass_="grad-weight")
    old = replace(A100, capability=(7, 5), arch="75")
    for q, gpu, sentence in (
        (
            p.with_(dtype=torch.float64, precision="fp64"),
            H200,
            "tensor cores multiply float64 only by mma.m8n8k4, which this family does not use",
        ),
        (p, old, "tensor cores of compute capability 7.5 lack TF32 and bfloat16"),
        (p.with_(groups=4), H200, "2 input channels per group leave most of a matrix instruction empty"),
        (
            Problem.make(1, 8, 8, (40,), 3, 1000, precision="tf32", pass_="grad-weight"),
            A100,
            "no tile of this layer with its halo fits in 163 KB of shared memory",
        ),
    ):
        assert wgrad.choose(q, gpu) == sentence
    assert not isinstance(wgrad.choose(p.with_(in_channels=3, out_channels=3), H200), str), "few channels, one group"


@pytest.mark.parametrize("change", [{"batch": 0}, {"size": (0, 4)}], ids=str)
def test_empty_inputs_are_refused(change: dict[str, object]) -> None:
    p = Problem.make(2, 8, 8, (9, 9), 3, precision="tf32", pass_="grad-weight").with_(**change)
    assert wgrad.choose(p, H200) == "an empty input has no work"


# --- what is launched ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lasting_call_is_one_cooperative_launch(
    dtype: torch.dtype, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream has its own counters; other calls take two steps, which are loaded when the first of them comes."""
    stream = [7]
    monkeypatch.setattr(launch, "current_stream", lambda index: stream[0])
    p = Problem.make(128, 128, 64, (16, 16), 4, 2, 1, bias=False, dtype=dtype, pass_="grad-weight")
    choice = wgrad.choose(p.with_(precision="tf32" if dtype is torch.float32 else "bf16"), H200)
    assert isinstance(choice, wgrad.Choice) and choice.together
    t, prepared = choice.tiling, choice.prepare(0)
    assert isinstance(t, WarpgroupTiling) and not prepared.loaded
    x, g = torch.randn(p.input_shape, dtype=dtype), torch.randn(p.output_shape, dtype=dtype)
    kept = []
    for of_stream, out in product((7, 8), (torch.empty(p.weight_shape, dtype=dtype), torch.empty(p.weight_shape))):
        stream[0] = of_stream
        prepared.run(x, g, out, lasting=True)
        name, grid, dependent, args = stubs.pop()
        assert (name, grid, dependent) == (
            "wgrad_whole together",
            t.tiles * choice.splits,
            False,
        ) and not stubs.launched
        assert args[:2] == (g.data_ptr(), out.data_ptr())
        assert args[16:20] == (*out.stride()[:2], out.stride()[-1], out.dtype is torch.float32)
        kept.append(args[3])
    assert kept[0] == kept[1] != kept[2] == kept[3]
    (counters,) = prepared.counters.values()
    assert [zeros.numel() for zeros in counters.of_streams.values()] == [2 * t.tiles] * 2
    prepared.run(x, g, torch.empty(p.weight_shape, dtype=dtype))
    assert stubs.names() == ["wgrad_wgmma", "reduce"]
    single = ["reduce_float"] if dtype is torch.bfloat16 else []
    prepared.load()
    assert prepared.loaded and sorted(stubs.loaded) == sorted(["wgrad_whole", "wgrad_wgmma", "reduce", *single])

    def refused(*_: object) -> None:  # a stream of a part of the GPU
        raise launch.TooManyBlocks("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")

    def broken(*_: object) -> None:
        raise launch.LaunchError("CUDA_ERROR_LAUNCH_FAILED")

    def together(args: tuple[Any, ...]) -> bool:
        return stubs.names()[-1] == "wgrad_whole together"

    stubs.act = lambda args: broken() if together(args) else None
    with pytest.raises(launch.LaunchError, match="LAUNCH_FAILED"):  # not hidden by the two steps
        prepared.run(x, g, torch.empty(p.weight_shape, dtype=dtype), lasting=True)
    stubs.launched.clear()
    stubs.act = lambda args: refused() if together(args) else None
    for _ in range(2):
        prepared.run(x, g, torch.empty(p.weight_shape, dtype=dtype), lasting=True)
    assert stubs.names() == ["wgrad_whole together", "wgrad_wgmma", "reduce"] * 2
    stubs.launched.clear()
    stubs.act = len
    prepared.run(x, g, torch.empty(p.weight_shape, dtype=dtype), lasting=True)
    assert stubs.names() == ["wgrad_whole together"], "on another stream it is not refused"


def handing() -> tuple[Problem, wgrad.Choice]:
    """A layer whose two splits hand over sums."""
    (layer,) = (case.problem for case in SUITES["models"] if case.name == "unet1")
    p = layer.with_(
        batch=8, dtype=torch.bfloat16, precision="bf16", layout="channels_last", pass_="grad-weight", bias=False
    )
    choice = wgrad.choose(p, H200)
    assert isinstance(choice, wgrad.Choice) and choice.hands_over
    return p, choice


def test_blocks_that_hand_over_are_launched_at_once_or_by_clusters(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cooperatively where a call lasts, with counters of its stream; else, and where that is refused, by clusters."""
    monkeypatch.setattr(launch, "current_stream", lambda index: 7)
    p, choice = handing()
    t, prepared = choice.tiling, choice.prepare(0)
    assert isinstance(t, WarpgroupTiling) and not prepared.loaded
    x, g = (torch.randn(shape, dtype=p.dtype) for shape in (p.input_shape, p.output_shape))
    out = torch.empty(p.weight_shape, dtype=p.dtype).contiguous(memory_format=torch.channels_last)
    prepared.run(x, g, out, lasting=True)
    name, grid, _, args = stubs.pop()
    assert (name, grid) == ("wgrad_whole together", 2 * t.tiles) and not stubs.launched
    (of_streams,) = prepared.counters.values()
    (counters,) = of_streams.of_streams.values()
    assert counters.numel() == 2 * t.tiles and args[:2] == (g.data_ptr(), out.data_ptr())
    assert args[3] == counters.data_ptr() and args[16:20] == (*out.stride()[:2], out.stride()[-1], False)
    prepared.run(x, g, out)
    name, grid, _, args = stubs.pop()
    assert (name, grid) == ("wgrad_cluster", 2 * t.tiles) and prepared.loaded
    assert stubs.loaded == ["wgrad_whole", "wgrad_cluster"]
    assert args[:2] == (g.data_ptr(), out.data_ptr()) and args[2] and not args[3]
    assert args[16:20] == (*out.stride()[:2], out.stride()[-1], False)

    def refused(*_: object) -> None:
        raise launch.TooManyBlocks("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")

    stubs.act = lambda args: refused() if stubs.names()[-1] == "wgrad_whole together" else None
    for _ in range(2):
        prepared.run(x, g, out, lasting=True)
    assert stubs.names() == ["wgrad_whole together", "wgrad_cluster"] * 2
    stubs.act = len
    prepared.run(x, g, out, lasting=True)
    assert stubs.names()[4:] == ["wgrad_whole together"], "on another stream it is not refused"


@pytest.mark.parametrize("fit", (0, 1, 20))
def test_pairs_that_hand_over_may_take_turns(fit: int, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a part of a GPU, where fewer pairs than tiles run at once; never two steps, which round otherwise."""
    p, choice = handing()
    assert choice.tiling.tiles > 20
    monkeypatch.setattr(wgrad.Launcher, "clusters", lambda self, device, blocks: fit)
    x, g = (torch.randn(shape, dtype=p.dtype) for shape in (p.input_shape, p.output_shape))
    choice.prepare(0).run(x, g, torch.empty(p.weight_shape, dtype=p.dtype))
    assert stubs.names() == ["wgrad_cluster"]


def test_one_box_of_x_has_the_elements_of_several() -> None:
    """In the order in which boxes of 64 channels lie in shared memory; of groups, with a halo of rows, images."""
    layers = (
        Problem.make(3, 256, 64, (6, 24), 2, 2), Problem.make(2, 384, 192, (5, 16), (3, 2), groups=3),
        Problem.make(4, 128, 128, (7, 8), 4, 2, 1),
    )  # fmt: skip
    some = 0
    for layer in layers:
        p = layer.with_(dtype=torch.bfloat16, precision="bf16", layout="channels_last", pass_="grad-weight")
        kinds: dict[Any, WarpgroupTiling] = {}
        for t in wgrad_search.candidates(wgrad_search.any_size(p), H200, True, True):
            if isinstance(t, WarpgroupTiling) and t.x_one_box:
                kinds.setdefault((t.block[0], t.stacked, t.tile), t)
        x = torch.arange(math.prod(p.input_shape)).view(p.batch, *p.size, p.in_channels)
        for t in kinds.values():
            (joined,), (apart,) = (wgrad.tensors(replace(t, x_one_box=one), p, False) for one in (True, False))
            assert t.boxes == replace(t, x_one_box=False).boxes - t.block[0] // 64 + 1
            whole, n = x.flatten(), t.tile[0]
            last = p.size[1] - t.box[1], p.size[0] - t.box[2], p.batch - n
            if min(last) < 0:
                continue
            for group in range(p.groups):
                channel, (w, h, image) = group * p.in_channels // p.groups, last
                found = whole.as_strided(
                    t.box[::-1], (*(s // 2 for s in joined.strides[::-1]), 1),
                    sum(at * s // 2 for at, s in zip((w, h, image, channel // 64), joined.strides)),
                )  # fmt: skip
                expected = torch.stack([
                    x[image : image + n, h : h + t.box[2], w : w + t.box[1], c : c + 64]
                    for c in range(channel, channel + t.block[0], 64)
                ])  # fmt: skip
                assert torch.equal(found, expected) and apart.dims[0] == p.in_channels
                some += 1
    assert some > 20


# --- what is compiled ------------------------------------------------------------------------------------------------

needs_nvrtc = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))
INSTRUCTIONS = {
    ("tf32", True): r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k8\.f32\.tf32\.tf32",
    ("fp16", True): r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.f16\.f16",
    ("bf16", True): r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    ("tf32", False): r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32",
    ("fp16", False): r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32",
    ("bf16", False): r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32",
}


def check_compiled(tiling: AnyTiling, source: str, gpu: Gpu, ptx: bool = True) -> None:
    """Both kernels compile, without spills, with the precision's matrix instruction and no other."""
    code, text, log = jit.built(source, gpu.arch, "wgrad")
    assert jit.serialised(log) is None, tiling
    found = jit.inspect(code)
    assert set(found) == {name.partition("<")[0] for name in jit.entries_of(source)}
    for entry, (registers, local, shared) in found.items():
        assert 0 < registers <= 255
        assert local == 0, f"{entry} for sm_{gpu.arch} has {local} bytes of local memory: {tiling}"
        rows = wgrad.reduce_shape(tiling)[2]
        assert shared == (-(-max(rows, 8) * 33 * 4 // 1024) * 1024 if "reduce" in entry else 0)
    assert tiling.shared_bytes <= gpu.shared_bytes
    if not ptx:
        return
    precision = "tf32" if tiling.problem.precision == "ieee" else tiling.problem.precision
    present = {key for key, name in INSTRUCTIONS.items() if re.search(rf"(?<![.\w]){name}(?![.\w])", text)}
    assert present == {(precision, isinstance(tiling, WarpgroupTiling))}
    assert ("cp.async.bulk.tensor" in text) == isinstance(tiling, WarpgroupTiling)


@pytest.mark.parametrize(("name", "layout", "dtype", "adding"), (
    ("unet1", "channels_last", torch.bfloat16, "of blocks that hand over half"),
    ("dcgan1", "nchw", torch.float32, "in clusters of 2 that add up"),
    ("unet1", "nchw", torch.bfloat16, "in clusters of 2 that add up"),
    ("hifigan", "nchw", torch.float32, "in clusters of 2 that add up"),
    ("hifigan", "nchw", torch.bfloat16, "in clusters of 2 that add up"),  # several taps in a fragment, interleaved
    # 16 clusters of 8 do not run at once, 128 blocks do
    ("dcgan2", "channels_last", torch.bfloat16, "of blocks that add up"),
    ("dcgan3", "channels_last", torch.bfloat16, "of blocks that add up"),  # too many splits for a cluster
))  # fmt: skip
def test_splits_that_run_at_once_add_up_their_sums(name: str, layout: Layout, dtype: torch.dtype, adding: str) -> None:
    (layer,) = (case.problem for case in SUITES["models"] if case.name == name)
    precision: Precision = "tf32" if dtype is torch.float32 else "bf16"
    p = layer.with_(dtype=dtype, precision=precision, layout=layout, pass_="grad-weight", bias=False)
    choice = wgrad.choose(p, H200)
    assert isinstance(choice, wgrad.Choice)
    assert f" {adding} " in choice.summary
    assert choice.together == (adding == "of blocks that add up") and choice.cluster == (1 if choice.together else 2)
    assert choice.hands_over == ("hand over" in adding) and len(choice.sources()) == (3 if choice.hands_over else 2)
    if choice.hands_over:
        texts = [unit.source for unit in choice.sources()]
        assert ["bool handover = true;" in text for text in texts] == [False, True, True]
        assert ["bool together = true;" in text for text in texts] == [False, False, True]
        assert ["int cluster = 2;" in text for text in texts] == [False, True, False]
        # Of more blocks than run at once each pair is a cluster, which adds up at the end.
        assert not replace(choice, gpu=replace(H200, multiprocessors=100)).hands_over
    for other in (replace(choice, gpu=A100), replace(choice, gpu=A100, splits=1)):
        assert not other.hands_over
        assert other.cluster == 1 and not other.together and not other.alone and len(other.sources()) == 1
    alone = replace(choice, splits=1)
    assert alone.alone and alone.cluster == 1 and not alone.together and "that write the weight" in alone.summary
    assert "bool alone = true;" in alone.sources()[1].source and "bool alone = false;" in alone.sources()[0].source
    assert not replace(choice, gpu=replace(H200, multiprocessors=40)).together


@needs_nvrtc
@pytest.mark.parametrize("precision", ("tf32", "bf16"))  # fp16's kernels are the same but for a word
def test_every_way_of_copying_compiles(precision: Precision) -> None:
    """Of g: by a box for all rows, for each row, by threads; whole columns and parted ones; strides beyond a box's."""
    layers: tuple[tuple[Any, ...], ...] = (
        (2, 160, 3, (16, 16), 4, 4), (2, 64, 64, (9, 40), 3, (1, 9), 1, 0, (9, 1)), (2, 32, 32, (24, 32), 3, 1, 4),
        (2, 48, 408, (9, 8), 5, (3, 4), 3, (0, 3), 1, 3), (2, 24, 9, (7, 16), 2, 4, (2, 3), (3, 0), (2, 1), 3),
        (2, 64, 16, (8, 32), (3, 5), (4, 2), 0, 0, (3, 1)), (2, 32, 20, (9, 16), 3, 2), (2, 32, 64, (9, 16), (4, 3), 1),
        (2, 128, 64, (6, 8, 8), 3, 2, 1), (2, 96, 72, (9, 32), (5, 1), (3, 1), (2, 3), (0, 1), (1, 2), 3),
    )  # fmt: skip
    ways: dict[tuple[bool, ...], WarpgroupTiling] = {}
    for batch, cin, cout, *rest in layers:
        p = Problem.make(
            batch, cin, cout, *rest, dtype=DTYPES[precision], precision=precision, layout="channels_last",
            pass_="grad-weight",
        )  # fmt: skip
        for t in tilings(p):
            if isinstance(t, WarpgroupTiling):
                ways.setdefault((t.box_g, t.g_one_box, t.parted, t.stacked, t.block[0] > 64), t)
    kinds = {(box, one and box, parted and box) for box, one, parted, *_ in ways}
    by_threads = set() if precision == "tf32" else {(False, False, False)}
    assert kinds >= {(True, True, True), (True, True, False), (True, False, False)} | by_threads
    for t in by_turns(ways.values(), 2, precision == "bf16"):
        check_compiled(t, wgrad.two_steps("", t).source, H200, ptx=False)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p,gpu", compiled(), ids=case_id)
def test_chosen_kernels_compile_without_spills(p: Problem, gpu: Gpu) -> None:
    choice = wgrad.choose(p, gpu)
    if isinstance(choice, str):
        assert choice == refused(p, gpu)
        return
    steps, *at_once = choice.sources()
    assert steps.entries == (choice.tiling.entry, "reduce")
    assert all(unit.entries in (("wgrad_whole",), ("wgrad_cluster",)) for unit in at_once)
    assert bool(at_once) == (choice.cluster > 1 or choice.together or choice.alone)
    assert len(at_once) < 2 or choice.hands_over
    for unit in (steps, *at_once):
        check_compiled(choice.tiling, unit.source, gpu)
        cluster = re.search(r"int cluster = (\d+);", unit.source)
        by_clusters = cluster is not None and cluster.group(1) != "1"
        ways = (by_clusters, "bool together = true;" in unit.source)
        third = unit in at_once[1:]
        assert ways == (
            (choice.cluster > 1 and not third, choice.together or third) if unit in at_once else (False,) * 2
        )


@pytest.mark.parametrize("name,shared,most", [("nnunet", False, 1.2), ("unet1", True, 1.3), ("kb77", True, 1.0)])
def test_a_stage_that_is_given_back_late_counts_where_chunks_are_short(name: str, shared: bool, most: float) -> None:
    """Operands that both come by descriptors: nnunet took 33.4 us so, of three stages, and takes 30.3 by fragments."""
    (p,) = {c.problem for suite in SUITES.values() for c in suite if c.name == name}
    p = p.with_(dtype=torch.bfloat16, precision="bf16", layout="channels_last", pass_="grad-weight", bias=False)
    choice = wgrad.choose(p, H200)
    assert isinstance(choice, wgrad.Choice) and isinstance(choice.tiling, WarpgroupTiling)
    assert choice.tiling.a_shared == shared
    late = choice.tiling if shared else replace(choice.tiling, warpgroups=2, split_m=1, subs=1)
    stages = [replace(late, stages=n) for n in (6, 4, 3)]
    assert all(t.a_shared for t in stages)
    clocks = [wgrad_costs.chunk_clocks(t)[0] for t in stages]
    assert clocks == sorted(clocks) and clocks[-1] > most * clocks[0]
