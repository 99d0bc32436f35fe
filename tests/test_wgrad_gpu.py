"""The gradients' kernels on a GPU against the float64 reference: the weight's by both families, the input's by direct.

Random layers, each by what `choose` picks and by tilings drawn from all that fit. Every tensor lies in memory full of
NaNs, so that what is read beyond a tensor, or never written, shows in the result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import upconv
from upconv import cpu, dispatch, reference
from upconv.cuda import engine
from upconv.cuda.compile.launch import Launcher
from upconv.cuda.direct import direct, staged
from upconv.cuda.gpu import A100, gpu
from upconv.cuda.launches import Given
from upconv.cuda.wgrad import wgrad, wgrad_costs, wgrad_search
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Layout, Precision, Problem, output_length

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = {
    "tf32": torch.float32,
    "ieee": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
# Relative error, norm by norm. Measured: 3e-4, 5e-7, 2.4e-3 and 3e-4.
BOUNDS = {"tf32": 1e-3, "ieee": 2e-6, "bf16": 4e-3, "fp16": 6e-4, "fp64": 1e-12}
LAYOUTS: tuple[Layout, ...] = ("nchw", "channels_last")
TENSOR_CORES: tuple[Precision, ...] = ("tf32", "ieee", "bf16", "fp16")
CUDA_CORES: tuple[Precision, ...] = ("ieee", "bf16", "fp16", "fp64")


def draw_problem(
    rng: random.Random, precision: Precision, layout: Layout, channels: tuple[tuple[int, ...], tuple[int, ...]]
) -> Problem:
    """A layer with ``channels`` (those of a group, in and out, to choose from), rows of every alignment."""
    while True:
        rank = rng.choice((2, 2, 2, 3) if layout == "channels_last" else (1, 2, 2, 2, 3))
        groups = rng.choice((1, 1, 1, 2, 3))
        axes = []
        for _ in range(rank):
            size = rng.choice((1, 3, 5, 8, 9, 16, 17, 24, 32, 40, 64, 65))
            kernel, stride, dilation = rng.randint(1, 5), rng.choice((1, 1, 2, 2, 3, 4)), rng.choice((1, 1, 2, 3))
            if rank == 3:
                size, kernel = min(size, 17), min(kernel, 4)
            output_padding = rng.choice((0, 0, rng.randrange(max(stride, dilation))))
            free = output_length(size, kernel, stride, 0, output_padding, dilation)
            axes.append((size, kernel, stride, rng.randint(0, min((free - 1) // 2, 3)), output_padding, dilation))
        size, kernel, stride, padding, output_padding, dilation = zip(*axes)
        p = Problem.make(
            rng.choice((1, 2, 3, 7)),
            groups * rng.choice(channels[0]),
            groups * rng.choice(channels[1]),
            size,
            kernel,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
            dtype=DTYPES[precision],
            precision=precision,
            layout=layout,
            pass_="grad-weight",
        )
        # Enough products for an error in norm, few enough for the reference.
        if 32 <= math.prod(p.weight_shape) <= 1 << 20 and max(math.prod(p.input_shape), math.prod(p.output_shape)) < (
            1 << 23
        ):
            return p


def place(shape: tuple[int, ...], p: Problem, layout: Layout, offset: int = 0) -> Tensor:
    """NaNs, dense in the layout, which begin ``offset`` elements into more NaNs."""
    buffer = torch.full((math.prod(shape) + offset + 64,), math.nan, dtype=p.dtype, device="cuda")
    fmt = cpu.memory_format(layout, p.rank)
    strides = torch.empty(shape, dtype=p.dtype, device="meta").contiguous(memory_format=fmt).stride()
    return buffer.as_strided(shape, strides, offset)


def moved(t: Tensor, p: Problem, offset: int = 0) -> Tensor:
    """A copy ``offset`` elements off alignment."""
    return place(tuple(t.shape), p, p.layout, offset).copy_(t)


def operands(p: Problem, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The input and the output's gradient."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x, g = (
        torch.randn(s, generator=generator, device="cuda", dtype=torch.float64).to(p.dtype)
        for s in (p.input_shape, p.output_shape)
    )
    return moved(x, p), moved(g, p)


def weight_truth(p: Problem, x: Tensor, g: Tensor) -> Tensor:
    return reference.gradients(p, g, x, torch.zeros(p.weight_shape, device="cuda"))[1]


def guarded(out: Tensor) -> None:
    """Nothing was stored beyond a tensor of `place`."""
    tail = out.new_empty(0).set_(out.untyped_storage())[out.storage_offset() + out.numel() :]
    assert tail.isnan().all(), "stores beyond the result"


def check_weight(choice: wgrad.Choice | staged.Choice, x: Tensor, g: Tensor, truth: Tensor) -> None:
    """A choice's gradient is the truth, and the same to the last bit again, from views off alignment too, when it is
    written in the other memory format, and when blocks add up their sums together."""
    p = choice.problem
    prepared = choice.prepare(0)
    found = []
    for offset, layout in ((0, p.layout), (0, "nchw"), (1, "channels_last" if p.rank > 1 else "nchw")):
        out = place(p.weight_shape, p, layout)
        # Partial sums come from the allocator's cache, whose blocks are full of NaNs like this one.
        torch.full((min(1 << 24, 64 * out.numel()),), math.nan, device="cuda")
        prepared.run(moved(x, p, offset), moved(g, p, offset), out)
        guarded(out)
        found.append(out)
    if at_once(choice):
        found.append(place(p.weight_shape, p, p.layout))
        torch.full((min(1 << 24, 64 * found[0].numel()),), math.nan, device="cuda")
        prepared.run(x, g, found[-1], lasting=True)
        guarded(found[-1])
    about = f"{p} {p.precision}\n{choice}"
    error, bound = reference.relative_error(found[0], truth), BOUNDS[p.precision]
    if p.precision == "ieee" and isinstance(choice, wgrad.Choice):
        # A sum's chunks are added one by one, and each addition rounds: 2^-25 for each, in any direction. A choice of
        # the planner's has splits enough; drawn ones have sums of 50,000.
        bound = max(bound, 2**-25 * math.sqrt(math.prod(choice.tiling.counts(p)) / choice.splits))
    assert error < bound, f"error {error:.2e} of {about}"
    again, unaligned, *together = (torch.equal(found[0], other) for other in found[1:])
    assert again, f"not bit-equal from run to run: {about}"
    assert unaligned, f"not bit-equal off alignment: {about}"
    assert all(together), f"not bit-equal where blocks add up: {about}"


# --- tensor cores ----------------------------------------------------------------------------------------------------

WIDE = ((4, 5, 8, 16, 17, 32, 40, 64, 96, 130), (1, 3, 5, 8, 16, 24, 32, 64, 72, 136))


def drawn(p: Problem, rng: random.Random) -> Iterator[wgrad.Choice]:
    """A few tilings of each kind, by splits of K that do not divide its chunks."""
    aligned, aligned_g = (size[-1] * p.dtype.itemsize % 16 == 0 for size in (p.size, p.out_size))
    of_size = wgrad_search.narrow(p), wgrad_search.classes_of(p), False, wgrad_search.lined(p)
    every = list(wgrad_search.candidates(wgrad_search.any_size(p), gpu(0), aligned, aligned_g, *of_size))
    own = [t for t in every if isinstance(t, WarpgroupTiling)]
    sync = [t for t in every if not isinstance(t, WarpgroupTiling)]
    kinds = [t for t in own if not t.gapless], [t for t in own if t.gapless], sync
    for tilings, count in zip(kinds, (2, 2, 1)):
        for t in rng.sample(tilings, min(count, len(tilings))):
            t = wgrad_costs.boxed(t, p)
            chunks = math.prod(t.counts(p))
            most = min(chunks, (1 << 24) // (t.k_slices * math.prod(p.weight_shape)))
            yield wgrad.Choice(t, p, gpu(0), max(1, min(most, rng.choice((1, 2, 3, 7, chunks)))), 0.0, "")


@pytest.mark.parametrize("seed", range(11))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", TENSOR_CORES)
def test_weight_gradients_on_tensor_cores(precision: Precision, layout: Layout, seed: int) -> None:
    rng = random.Random(f"{precision} {layout} {seed}")
    p = draw_problem(rng, precision, layout, WIDE)
    choice = wgrad.choose(p, gpu(0))
    assert not isinstance(choice, str), choice
    x, g = operands(p, seed)
    truth = weight_truth(p, x, g)
    for c in (choice, *drawn(p, rng)):
        check_weight(c, x, g, truth)


NEIGHBOURS = {
    "2 taps": Problem.make(3, 264, 40, (6, 40), 2, 2),
    "2 taps in 3-D": Problem.make(2, 64, 24, (4, 6, 16), 2, 2),
    "4 taps, narrow": Problem.make(8, 128, 72, (8, 8), 4, 2, 1),
    "4 taps": Problem.make(2, 320, 64, (9, 32), 4, 2, 1),
    "8 taps": Problem.make(3, 40, 48, (104,), 8, 4, 2),
    "16 taps, lines": Problem.make(3, 256, 40, (160,), 16, 8, 4),
    "4 taps, no channels for all": Problem.make(2, 36, 20, (5, 24), 4, 4),
}


@pytest.mark.parametrize("name", list(NEIGHBOURS))
@pytest.mark.parametrize("precision", ("tf32", "bf16", "fp16"))
def test_taps_that_are_neighbours_in_m(precision: Precision, name: str) -> None:
    """Of each number of them, divided among warpgroups in each way; by boxes of rows and of lines, split and not."""
    if gpu(0).arch != "90a":
        pytest.skip("needs wgmma")
    p = NEIGHBOURS[name].with_(dtype=DTYPES[precision], precision=precision, pass_="grad-weight")
    rng = random.Random(f"{precision} {name}")
    aligned, aligned_g = (size[-1] * p.dtype.itemsize % 16 == 0 for size in (p.size, p.out_size))
    of_size = wgrad_search.narrow(p), wgrad_search.classes_of(p), False, wgrad_search.lined(p)
    every = wgrad_search.candidates(wgrad_search.any_size(p), gpu(0), aligned, aligned_g, *of_size)
    own = [t for t in every if isinstance(t, WarpgroupTiling) and t.interleaved]
    few = {(t.subs, t.lined, t.split_m, t.warpgroups): t for t in rng.sample(own, len(own))}
    assert {subs for subs, *_ in few} == {n for n in (2, 4, 8) if p.kernel[-1] % n == 0}
    assert any(lined for _, lined, *_ in few) == wgrad_search.lined(p)
    x, g = operands(p)
    truth = weight_truth(p, x, g)
    for t in few.values():
        splits = min(math.prod(t.counts(p)), rng.choice((1, 2, 3)))
        check_weight(wgrad.Choice(t, p, gpu(0), splits, 0.0, ""), x, g, truth)


def at_once(choice: Any) -> bool:
    """Whether a lasting call's blocks add up their sums, or exchange them, in a cooperative launch."""
    return any(launch.cooperative for launch in choice.launches(Given("contiguous", lasting=True)))


def in_two_steps(choice: wgrad.Choice) -> wgrad.Choice:
    """The same for a GPU whose blocks do not add up their sums, which this GPU runs as well."""
    return replace(choice, gpu=A100)


@pytest.mark.parametrize("splits", (1, 2, 3, 5, 8, 9, 14))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ("tf32", "bf16", "fp16"))
def test_blocks_add_up_as_the_second_step_does(precision: Precision, layout: Layout, splits: int) -> None:
    """To the last bit, into both memory formats and into float32; channels that are no multiple of 4 among them.

    One split alone; as a cluster up to 8, where enough of these run at once, else together. Two that hand over sums
    divide K otherwise, and so round otherwise.
    """
    if gpu(0).arch != "90a":
        pytest.skip("needs wgmma")
    layers = (
        Problem.make(4, 64, 64, (16, 32), 3),
        Problem.make(5, 80, 46, (16, 32), 4, 2, 1),
        Problem.make(4, 40, 72, (17, 32), 3, 1, 1, groups=1),
        Problem.make(3, 64, 64, (4, 8, 16), 2, 2, groups=2),
        Problem.make(9, 256, 128, (16, 16), 4, 2, 1),  # its second step turns rows
    )
    rng = random.Random(f"{precision} {layout} {splits}")
    for layer in layers:
        p = layer.with_(dtype=DTYPES[precision], precision=precision, layout=layout, pass_="grad-weight")
        x, g = operands(p)
        truth = weight_truth(p, x, g)
        aligned, aligned_g = (size[-1] * p.dtype.itemsize % 16 == 0 for size in (p.size, p.out_size))
        classes = wgrad_search.classes_of(p)
        every = wgrad_search.candidates(
            wgrad_search.any_size(p), gpu(0), aligned, aligned_g, wgrad_search.narrow(p), classes
        )
        most = gpu(0).multiprocessors // splits
        fitting = [t for t in every if isinstance(t, WarpgroupTiling) and t.adds_up and t.tiles <= most]
        if len(fitting) < 2:  # tiles too many; or float32 pixels are turned, which wants whole units of 16 bytes
            turned = (precision, layout) == ("tf32", "channels_last") and p.out_channels % 4
            assert turned or (math.prod(p.weight_shape) >= 1 << 18 and splits > 8)
            continue
        kinds = "stacked", "classed", "gapless"
        stacked, classed, gapless = ([t for t in fitting if getattr(t, kind)] for kind in kinds)
        assert classed or classes == (1, 1)
        handing = [t for t in fitting if t.hands_over]
        handing = rng.sample(handing, min(2, len(handing)))
        by_rows = [t for t in fitting if t.a_shared and not t.stacked and splits == 1]  # from registers
        for t in rng.sample(fitting, 2) + stacked[:1] + classed[:1] + gapless[:1] + handing + by_rows[:1]:
            choice = wgrad.Choice(wgrad_costs.boxed(t, p), p, gpu(0), splits, 0.0, "")
            fast, steps = choice.prepare(0), in_two_steps(choice).prepare(0)
            handed = choice.hands_over
            assert handed == (splits == 2 and t.hands_over), choice
            one_step = len(fast.choice.launches(Given("contiguous"))) == 1
            assert at_once(choice) == (handed or not one_step) and (at_once(choice) or splits <= 8), choice
            assert len(steps.choice.launches(Given("contiguous"))) == 2 and not at_once(steps.choice)
            check_weight(choice, x, g, truth)
            for dtype in dict.fromkeys((p.dtype, torch.float32)):
                kept: Precision = precision if dtype is p.dtype else "ieee"
                for out_layout in LAYOUTS:
                    outs = [place(p.weight_shape, p.with_(dtype=dtype, precision=kept), out_layout) for _ in range(2)]
                    fast.run(x, g, outs[0], lasting=True)
                    steps.run(x, g, outs[1], lasting=True)
                    guarded(outs[0])
                    if handed:
                        assert reference.relative_error(outs[0], outs[1].double()) < BOUNDS[kept], choice
                    else:
                        assert torch.equal(*outs), choice
            if at_once(choice):
                (of_streams,) = fast.counters.values()
                assert not any(counters.any() for counters in of_streams.of_streams.values())
                assert all(given.lasting for given in fast._programs), "a launch was refused, and two steps ran"


def handing_tilings(p: Problem, most: int) -> list[WarpgroupTiling]:
    """Tilings of at most so many tiles whose blocks, of two splits, hand over sums."""
    every = wgrad_search.candidates(wgrad_search.any_size(p), gpu(0), True, True)
    return [t for t in every if isinstance(t, WarpgroupTiling) and t.hands_over and t.tiles <= most]


@pytest.mark.parametrize(("size", "counts"), (((2, 32), {1, 2}), ((5, 64), {5, 6, 8, 10})))
@pytest.mark.parametrize("precision", ("bf16", "fp16"))
def test_few_chunks_are_handed_over(precision: Precision, size: tuple[int, ...], counts: set[int]) -> None:
    """As many as are handed and fewer, so that a block's sums of the other's units are zeros, and a few more."""
    if gpu(0).arch != "90a":
        pytest.skip("needs wgmma")
    p = Problem.make(1, 136, 72, size, 2, 2, bias=False).with_(
        dtype=DTYPES[precision], precision=precision, layout="channels_last", pass_="grad-weight"
    )
    x, g = operands(p)
    truth = weight_truth(p, x, g)
    found = {math.prod(t.counts(p)): t for t in handing_tilings(p, 60)}
    assert counts <= found.keys()
    for t in found.values():
        choice = wgrad.Choice(t, p, gpu(0), 2, 0.0, "")
        assert choice.hands_over
        check_weight(choice, x, g, truth)


@pytest.mark.parametrize("handed", (False, True))
def test_blocks_add_up_on_streams_at_once(handed: bool) -> None:
    """Each stream has its own counters; kernels of two whose blocks wait for each other do not stop one another."""
    p = Problem.make(16, 256, 128, (16, 16), 4, 2, 1).with_(
        dtype=torch.bfloat16, precision="bf16", layout="channels_last", pass_="grad-weight"
    )
    choice = wgrad.choose(p, gpu(0))
    assert isinstance(choice, wgrad.Choice)
    if handed and gpu(0).arch == "90a":
        choice = wgrad.Choice(handing_tilings(p, 64)[0], p, gpu(0), 2, 0.0, "")
    if not (choice.hands_over if handed else choice.together):
        pytest.skip("needs wgmma and 128 multiprocessors")
    prepared, streams = choice.prepare(0), [torch.cuda.Stream() for _ in range(4)]
    given = [operands(p, seed) for seed in range(len(streams))]
    expected = [place(p.weight_shape, p, p.layout) for _ in given]
    for (x, g), out in zip(given, expected):
        prepared.run(x, g, out)  # in two steps, or by clusters
    torch.cuda.synchronize()
    for _ in range(20):
        found = [place(p.weight_shape, p, p.layout) for _ in given]
        torch.cuda.synchronize()
        for stream, (x, g), out in zip(streams, given, found):
            with torch.cuda.stream(stream):
                prepared.run(x, g, out, lasting=True)
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))
    (of_streams,) = prepared.counters.values()
    assert at_once(choice) and len(of_streams.of_streams) == 4
    assert not any(counters.any() for counters in of_streams.of_streams.values())


def test_a_training_step_adds_up_at_once_and_a_captured_one_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = upconv.ConvTranspose2d(256, 128, 4, 2, 1, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(16, 256, 16, 16, device="cuda", dtype=torch.bfloat16)
    p = Problem.make(16, 256, 128, (16, 16), 4, 2, 1, bias=False, dtype=x.dtype, pass_="grad-weight")
    choice = wgrad.choose(p, gpu(0))
    if not isinstance(choice, wgrad.Choice) or not choice.together:
        pytest.skip("needs wgmma and 128 multiprocessors")
    names: list[str] = []
    launch = Launcher.__call__

    def noted(self: Launcher, *args: object, **more: object) -> None:
        names.append(self.kernel.name)
        launch(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Launcher, "__call__", noted)
    y = layer(x)
    g = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, layer.weight, g)
    assert names[-1:] == ["wgrad_whole"]
    plan = dispatch.find_plan(2, x, layer.weight, None, (2, 2), (1, 1), (0, 0), 1, (1, 1))
    assert plan is not None
    runner = engine.loaded(plan).gradients[0].weight
    assert runner is not None and not runner.prepared.loaded  # type: ignore[attr-defined]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # compiles and loads what it needs
        captured = runner(x, g, x.dtype)
    assert names[-2:] == ["wgrad_wgmma", "reduce"]
    captured.fill_(math.nan)
    graph.replay()
    assert torch.equal(captured, found)


# Where the tilings differ most: strides with many outputs (wide blocks of input channels), long taps, 1-D.
CORNERS = (
    Problem.make(2, 160, 3, (16, 16), 4, 4),
    Problem.make(2, 320, 64, (12, 16), 8, 8),
    Problem.make(3, 64, 32, (256,), 16, 8, 4),
    Problem.make(1, 48, 96, (5, 8, 16), (3, 5, 7), 2, (1, 2, 3), 1),
    Problem.make(2, 32, 32, (24, 32), 3, 1, 4, 0, 4),
    Problem.make(2, 64, 64, (9, 40), 3, (1, 9), 1, 0, (9, 1)),
    Problem.make(300, 32, 32, (1, 1), 4, 1),
    Problem.make(5, 136, 72, (7, 8), 4, 2, 1),
    Problem.make(2, 64, 40, (3, 9, 16), 3, 1, 1),
    # Blocks as wide as the layer: 112, 144, 160, and 48 of a group.
    Problem.make(2, 112, 64, (9, 32), 5, 1, 2),
    Problem.make(3, 144, 96, (16, 16), 3, 2, 1),
    Problem.make(2, 320, 96, (8, 16), 2, 2),
    Problem.make(2, 96, 96, (12, 24), 3, 1, 1, groups=2),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", TENSOR_CORES)
@pytest.mark.parametrize("layer", CORNERS, ids=str)
def test_corners_on_tensor_cores(layer: Problem, precision: Precision, layout: Layout) -> None:
    if layer.rank == 1 and layout != "nchw":
        pytest.skip("1-D tensors have no channels_last")
    p = layer.with_(dtype=DTYPES[precision], precision=precision, layout=layout, pass_="grad-weight")
    choice = wgrad.choose(p, gpu(0))
    assert not isinstance(choice, str), choice
    x, g = operands(p)
    truth = weight_truth(p, x, g)
    for c in (choice, *drawn(p, random.Random(f"{p}"))):
        check_weight(c, x, g, truth)


# --- CUDA cores ------------------------------------------------------------------------------------------------------

# Channels of a group, in and out: depthwise, few, and for float64 anything.
FEW = {"depthwise": ((1,), (1,)), "multiplied": ((1, 2, 3), (1, 2, 3, 5)), "few": ((1, 3, 8, 33), (1, 2, 3, 9, 16))}


def draw_few(rng: random.Random, kind: str, precision: Precision, layout: Layout) -> Problem:
    p = draw_problem(rng, precision, layout, FEW[kind])
    if kind == "depthwise":
        channels = rng.choice((3, 8, 31, 32, 40))
        p = p.with_(in_channels=channels, out_channels=channels, groups=channels)
    return p


def any_tile(p: Problem, rng: random.Random) -> staged.Choice:
    """A choice of any tile that fits."""
    tile = rng.choice(list(staged.fitting(p, gpu(0))))
    seconds, bound, splits = staged._cost(p, tile, gpu(0))
    return staged.Choice("staged", seconds, "drawn", bound, p, tile, splits)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", list(FEW))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", CUDA_CORES)
def test_weight_gradients_on_cuda_cores(precision: Precision, layout: Layout, kind: str, seed: int) -> None:
    rng = random.Random(f"{precision} {layout} {kind} {seed}")
    for i in range(2):
        p = draw_few(rng, kind, precision, layout)
        x, g = operands(p, i)
        truth = weight_truth(p, x, g)
        for found in (staged.choose(p, gpu(0)), any_tile(p, rng)):
            assert isinstance(found, staged.Choice), found
            check_weight(found, x, g, truth)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", list(FEW))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", CUDA_CORES)
def test_input_gradients_on_cuda_cores(precision: Precision, layout: Layout, kind: str, seed: int) -> None:
    rng = random.Random(f"input {precision} {layout} {kind} {seed}")
    for i in range(2):
        p = draw_few(rng, kind, precision, layout).with_(pass_="grad-input")
        x, g = operands(p, i)
        weight = (torch.randn(p.weight_shape, device="cuda", dtype=torch.float64) / 4).to(p.dtype)
        truth = reference.gradients(p, g, x, weight)[0]
        strided = weight.contiguous(memory_format=cpu.memory_format("channels_last" if p.rank > 1 else "nchw", p.rank))
        for choice in (direct.choose(p, gpu(0)), staged.choose(p, gpu(0)), any_tile(p, rng)):
            assert not isinstance(choice, str), choice
            prepared = choice.prepare(0)
            found = []
            for offset, w in ((0, weight), (0, strided), (1, weight)):
                out = place(p.input_shape, p, p.layout, offset)
                prepared.run(moved(g, p, offset), prepared.pack(w), None, out)
                guarded(out)
                found.append(out)
            error = reference.relative_error(found[0], truth)
            assert error < BOUNDS[precision], f"error {error:.2e} of {p} by {choice.family}"
            again, unaligned = (torch.equal(found[0], other) for other in found[1:])
            assert again, f"not bit-equal from run to run: {p} by {choice.family}"
            assert unaligned, f"not bit-equal off alignment: {p} by {choice.family}"


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["wgrad", "staged", "direct", "staged input"])
@pytest.mark.parametrize("precision", ["ieee", "bf16"])
def test_batches_beyond_65535(precision: Precision, family: str, layout: Layout) -> None:
    """No dimension of a grid but the first may follow the batch."""
    channels, groups = (8, 1) if family == "wgrad" else (4, 4)
    p = Problem.make(
        70_001, channels, channels, (4, 8) if "staged" in family else (2, 4), 2, 2, groups=groups,
        dtype=DTYPES[precision], precision=precision, layout=layout,
        pass_="grad-input" if family in ("direct", "staged input") else "grad-weight",
    )  # fmt: skip
    x, g = operands(p)
    if p.pass_ == "grad-input":
        choice = direct.choose(p, gpu(0)) if family == "direct" else staged.choose(p, gpu(0))
        assert not isinstance(choice, str), choice
        weight = torch.randn(p.weight_shape, device="cuda").to(p.dtype)
        prepared, out = choice.prepare(0), place(p.input_shape, p, p.layout)
        prepared.run(g, prepared.pack(weight), None, out)
        assert reference.relative_error(out, reference.gradients(p, g, x, weight)[0]) < BOUNDS[precision]
        return
    truth = weight_truth(p, x, g)
    if family != "wgrad":
        few = staged.choose(p, gpu(0))
        assert not isinstance(few, str), few
        check_weight(few, x, g, truth)
        return
    chosen = wgrad.choose(p, gpu(0))
    assert not isinstance(chosen, str), chosen
    for c in (chosen, *drawn(p, random.Random(layout))):
        check_weight(c, x, g, truth)


LARGE = {
    "aligned": Problem.make(130, 64, 64, (512, 512), 1),
    "unaligned": Problem.make(130, 64, 64, (511, 513), 1),
    "depthwise": Problem.make(130, 64, 64, (512, 512), 1, groups=64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(LARGE))
def test_tensors_of_more_than_2_31_elements(name: str, layout: Layout) -> None:
    """All images are zeros but the last, which begins beyond 2^31 elements: its own gradient is the result."""
    p = LARGE[name].with_(dtype=torch.bfloat16, precision="bf16", layout=layout, pass_="grad-weight")
    assert math.prod(p.input_shape[1:]) * (p.batch - 1) > 2**31
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free memory")
    few = name == "depthwise"
    choices = (staged.choose(p, gpu(0)) if few else wgrad.choose(p, gpu(0)),)
    last = p.with_(batch=1)
    tensors = []
    for shape, t in zip((p.input_shape, p.output_shape), operands(last)):
        whole = torch.empty(shape, dtype=p.dtype, device="cuda", memory_format=cpu.memory_format(p.layout, p.rank))
        whole.zero_()[-1:] = t
        tensors.append((whole, t))
    (x, last_x), (g, last_g) = tensors
    truth = weight_truth(last, last_x, last_g)
    for choice in choices:
        assert not isinstance(choice, str), choice
        out = place(p.weight_shape, p, p.layout)
        choice.prepare(0).run(x, g, out)
        guarded(out)
        assert reference.relative_error(out, truth) < BOUNDS["bf16"]
    if few:
        by_input = staged.choose(p.with_(pass_="grad-input"), gpu(0))
        assert not isinstance(by_input, str), by_input
        weight = torch.randn(p.weight_shape, device="cuda").to(p.dtype)
        found = torch.full_like(x, math.nan)
        prepared = by_input.prepare(0)
        prepared.run(g, prepared.pack(weight), None, found)
        assert (
            reference.relative_error(found[-1:], reference.gradients(last, last_g, last_x, weight)[0]) < BOUNDS["bf16"]
        )
        assert not found[:-1].any()
        del found
    del x, g, tensors
    torch.cuda.empty_cache()
