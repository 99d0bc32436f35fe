"""The gradients on CUDA cores: an interpreter of their index arithmetic, their choices, their compiled kernels."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strategies import DTYPES, problems
from upconv import reference
from upconv.bench.suites import SUITES, Case
from upconv.cuda import direct, direct_wgrad, jit
from upconv.cuda.direct_wgrad import Choice, Tile
from upconv.cuda.gpu import A100, B200, H200, RTX3090, RTX4090, RTX5090, Gpu
from upconv.planner import Device, plan
from upconv.problem import PRECISIONS, Problem

Array = NDArray[np.float64]
THREADS = 256
GRADIENTS = ("grad-input", "grad-weight")


# --- the kernels' arithmetic in NumPy, from the same macros ----------------------------------------------------------


class Interpreter:
    """``direct_grad.cu``: threads and blocks as the kernels number them, tensors as flat memory."""

    def __init__(self, p: Problem, tile: Tile) -> None:
        self.p, self.tile = p, tile
        self.m = m = {name: int(value) for name, value in direct_wgrad.macros(p, tile).items()}
        self.taps = m["KERNEL_D"] * m["KERNEL_H"] * m["KERNEL_W"]
        self.cin, self.cout = m["GROUPS"] * m["CIN_G"], m["GROUPS"] * m["COUT_G"]
        lead = (1,) * (3 - p.rank)
        self.size, self.out_size = (*lead, *p.size), (*lead, *p.out_size)
        self.last = bool(m["CHANNELS_LAST"])

    def memory(self, values: Array) -> Array:
        """A tensor's elements in the problem's layout."""
        return (np.moveaxis(values, 1, -1) if self.last else values).reshape(-1)

    def element(
        self, n: Array, channel: Array, place: tuple[Array, ...], channels: int, size: tuple[int, ...]
    ) -> Array:
        (d, h, w), (depth, height, width) = place, size
        at = (d * height + h) * width + w
        pixels = depth * height * width
        return (n * pixels + at) * channels + channel if self.last else (n * channels + channel) * pixels + at

    def place_of(self, q: Array) -> tuple[Array, tuple[Array, ...]]:
        """(image, (d, h, w)) of positions."""
        w, q = q % self.size[2], q // self.size[2]
        h, q = q % self.size[1], q // self.size[1]
        return q // self.size[0], (q % self.size[0], h, w)

    def gradient(self, g: Array, n: Array, channel: Array, place: tuple[Array, ...], tap: Array) -> Array:
        """Elements of the output's gradient that a tap meets, zeros beyond its borders."""
        m = self.m
        kernel = (tap // (m["KERNEL_H"] * m["KERNEL_W"]), tap // m["KERNEL_W"] % m["KERNEL_H"], tap % m["KERNEL_W"])
        at = tuple(
            q * m[f"STEP_{axis}"] - m[f"PAD_{axis}"] + k * m[f"DIL_{axis}"] for axis, q, k in zip("DHW", place, kernel)
        )
        inside = np.broadcast_to(tap < self.taps, np.broadcast_shapes(*(a.shape for a in at), channel.shape))
        for a, size in zip(at, self.out_size):
            inside = inside & (a >= 0) & (a < size)
        where = np.broadcast_to(self.element(n, channel, at, self.cout, self.out_size), inside.shape)
        found = np.zeros(inside.shape)
        found[inside] = g[where[inside]]
        return found

    def grad_input(self, g: Array, weight: Array) -> Array:
        m, tile = self.m, self.tile
        blocks = -(-m["CIN_G"] // tile.ci)
        pixels = math.prod(self.size)
        total = self.p.batch * pixels * m["GROUPS"] * blocks
        index = np.arange(-(-total // THREADS) * THREADS)
        index = index[index < total]
        if self.last:
            which, (n, place) = index % (m["GROUPS"] * blocks), self.place_of(index // (m["GROUPS"] * blocks))
        else:
            rest = index // pixels
            which, (_, place) = rest % (m["GROUPS"] * blocks), self.place_of(index % pixels)
            n = rest // (m["GROUPS"] * blocks)
        group, ci = which // blocks, which % blocks * tile.ci
        g, flat = self.memory(g), weight.reshape(-1)
        acc = np.zeros((tile.ci, total))
        for co, tap in product(range(m["COUT_G"]), range(self.taps)):
            v = self.gradient(g, n, group * m["COUT_G"] + co, place, np.array(tap))
            for t in range(tile.ci):
                ok = ci + t < m["CIN_G"]
                at = ((group * m["CIN_G"] + ci + t) * m["COUT_G"] + co) * self.taps + tap
                acc[t, ok] += (v * flat[np.where(ok, at, 0)])[ok]
        out = np.full(self.p.batch * self.cin * pixels, np.nan)
        for t in range(tile.ci):
            ok = ci + t < m["CIN_G"]
            at = self.element(n, group * m["CIN_G"] + ci + t, place, self.cin, self.size)[ok]
            assert np.isnan(out[at]).all(), "an element is stored twice"
            out[at] = acc[t, ok]
        shape = (self.p.batch, *self.size, self.cin) if self.last else (self.p.batch, self.cin, *self.size)
        out = out.reshape(shape)
        return (np.moveaxis(out, -1, 1) if self.last else out).reshape(self.p.input_shape)

    def grad_weight(self, x: Array, g: Array, splits: int) -> Array:
        m, tile = self.m, self.tile
        tap_blocks, co_blocks = -(-self.taps // tile.taps), -(-m["COUT_G"] // tile.co)
        channel_blocks = -(-self.cin // 32) if self.last else self.cin
        positions = self.p.batch * math.prod(self.size)
        per_split = -(-positions // splits)
        numel = self.cin * m["COUT_G"] * self.taps
        partial = np.full((splits, numel), np.nan)
        x, g = self.memory(x), self.memory(g)
        for index in range(direct_wgrad._weight_blocks(self.p, tile) * splits):
            rest, tap_block = divmod(index, tap_blocks)
            rest, co_block = divmod(rest, co_blocks)
            split, channel_block = divmod(rest, channel_blocks)
            tap, co = (tap_block * tile.taps + np.arange(tile.taps))[:, None, None], co_block * tile.co
            q = np.arange(split * per_split, min((split + 1) * per_split, positions))
            channel = (channel_block * 32 + np.arange(32) if self.last else np.array([channel_block]))[:, None]
            channel = channel[channel[:, 0] < self.cin]
            group = channel // m["CIN_G"]
            n, place = self.place_of(q)
            v = x[self.element(n, channel, place, self.cin, self.size)]  # [channel, position]
            for c in range(co, min(co + tile.co, m["COUT_G"])):
                met = self.gradient(g, n, group * m["COUT_G"] + c, place, tap)  # [tap, channel, position]
                sums = (met * v).sum(-1)
                at = (channel * m["COUT_G"] + c) * self.taps + tap[:, :, 0].T  # [channel, tap]
                ok = np.broadcast_to((tap < self.taps)[:, :, 0].T, at.shape)
                assert np.isnan(partial[split, at[ok]]).all(), "a partial sum is stored twice"
                partial[split, at[ok]] = sums.T[ok]
        return partial.sum(0).reshape(self.p.weight_shape)


def check_interpreted(p: Problem, tile: Tile, splits: int, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    x, g = numbers.standard_normal(p.input_shape), numbers.standard_normal(p.output_shape)
    w = numbers.standard_normal(p.weight_shape)
    truth = reference.gradients(p, *(torch.from_numpy(a) for a in (g, x, w)))
    interpreter = Interpreter(p, tile)
    if p.pass_ == "grad-input":
        out, expected = interpreter.grad_input(g, w), truth[0]
    else:
        out, expected = interpreter.grad_weight(x, g, splits), truth[1]
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-11, atol=1e-11)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.sampled_from(GRADIENTS), st.randoms(use_true_random=False))
def test_interpreted_tiles_compute_the_gradients(p: Problem, pass_: str, rng: random.Random) -> None:
    """Tiles that divide nothing, and as many ranges of positions as there are positions."""
    p = p.with_(pass_=pass_)
    tile = Tile(rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 4, 8)), rng.randint(1, min(p.taps, 32)))
    positions = p.batch * math.prod(p.size)
    check_interpreted(p, tile, min(positions, rng.choice((1, 2, 3, 7, positions))), rng.randrange(1000))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.sampled_from(GRADIENTS))
def test_interpreted_choice_computes_the_gradients(p: Problem, pass_: str) -> None:
    choice = direct_wgrad.choose(p.with_(pass_=pass_), H200)
    assert isinstance(choice, Choice)
    check_interpreted(choice.problem, choice.tile, choice.splits, 1)


# --- what is chosen --------------------------------------------------------------------------------------------------

SUITE = tuple({c.problem: c for name in ("kernelbench", "models") for c in SUITES[name]}.values())
GPUS = (H200, A100, RTX3090, RTX4090, B200, RTX5090)


def versions(p: Problem) -> Iterator[Problem]:
    """A layer's gradients in every dtype and layout."""
    for dtype, layout, pass_ in product(DTYPES, ("nchw", "channels_last"), GRADIENTS):
        if p.rank > 1 or layout == "nchw":
            yield p.with_(dtype=dtype, precision=PRECISIONS[dtype][0], layout=layout, pass_=pass_, bias=False)


@pytest.mark.parametrize("case", SUITE, ids=lambda c: c.name)
def test_choices_are_sound(case: Case) -> None:
    for i, p in enumerate(versions(case.problem)):
        gpu = GPUS[i % len(GPUS)]
        choice = direct_wgrad.choose(p, gpu)
        assert isinstance(choice, Choice)
        assert choice.family == ("direct" if p.pass_ == "grad-input" else "direct_wgrad")
        assert choice.bound in ("bytes", "loads")
        memory = p.dtype.itemsize * (math.prod(p.input_shape) + math.prod(p.output_shape)) / gpu.bandwidth
        assert memory <= choice.seconds < 10
        assert choice.tile.co * choice.tile.taps <= (16 if p.dtype is torch.float64 else 32)
        if p.pass_ == "grad-input":
            assert choice.splits == 1
            assert direct.choose(p, gpu) == choice
            continue
        positions = p.batch * math.prod(p.size)
        per_split = -(-positions // choice.splits)  # as the kernel takes them
        assert choice.splits * per_split >= positions > (choice.splits - 1) * per_split
        partial = choice.splits * math.prod(p.weight_shape) * (8 if p.dtype is torch.float64 else 4)
        assert choice.splits == 1 or partial <= direct_wgrad._MAX_BYTES
        assert direct_wgrad._weight_blocks(p, choice.tile) * choice.splits < 2**31


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(GRADIENTS), st.integers(1, 5), st.integers(0, 9))
def test_constants_do_not_depend_on_the_size(p: Problem, pass_: str, batch: int, more: int) -> None:
    """One compiled kernel serves a layer at every batch and image size."""
    p = p.with_(pass_=pass_)
    other = p.with_(batch=batch, size=tuple(n + more for n in p.size))
    small, large = (direct_wgrad.choose(q, H200) for q in (p, other))
    assert isinstance(small, Choice)
    assert isinstance(large, Choice)
    assert small.tile == large.tile
    assert direct_wgrad.macros(p, small.tile) == direct_wgrad.macros(other, large.tile)


def test_the_same_choice_twice() -> None:
    p = Problem.make(4, 32, 32, (31, 40), 4, 2, 1, groups=32, pass_="grad-weight")
    found = []
    for _ in range(2):
        direct_wgrad._choose.cache_clear()
        found.append(direct_wgrad.choose(p, H200))
    assert found[0] == found[1]
    assert hash(found[0]) == hash(found[1])
    assert pickle.loads(pickle.dumps(found[0])) == found[0]


def test_few_threads_wait_for_their_loads() -> None:
    """NOTES: 1->512 k4 on 16 images of a pixel 445 us, where 12 were expected; of depthwise layers nothing changes."""
    deep = Problem.make(16, 1, 512, (1, 1), (4, 4), dtype=torch.bfloat16, precision="bf16").with_(pass_="grad-input")
    found = direct_wgrad.choose(deep, H200)
    assert not isinstance(found, str) and found.bound == "latency" and found.seconds > 300e-6
    chosen = plan(deep.with_(pass_="fwd"), Device("cuda", gpu=H200)).selection("grad-input").choice
    assert chosen is not None and chosen.family == "gather"
    large = direct_wgrad.choose(deep.with_(in_channels=64, out_channels=64, groups=64, size=(64, 64)), H200)
    assert not isinstance(large, str) and large.bound != "latency"


def test_refusals_are_sentences() -> None:
    p = Problem.make(1, 2, 2, (4, 4), 3, pass_="grad-weight")
    assert direct_wgrad.choose(p.with_(pass_="fwd"), H200) == "these kernels compute gradients only, not fwd"
    for empty in ({"batch": 0}, {"size": (0, 4)}):
        for pass_ in GRADIENTS:
            assert direct_wgrad.choose(p.with_(pass_=pass_, **empty), H200) == "an empty input has no work"


# --- what is compiled ------------------------------------------------------------------------------------------------

needs_nvrtc = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))


def check_compiled(choice: Choice, gpu: Gpu) -> None:
    p = choice.problem
    (unit,) = choice.sources()
    assert set(unit.entries) == ({"grad_input"} if p.pass_ == "grad-input" else {"grad_weight", "reduce"})
    found = jit.inspect(jit.cubin(unit.source, gpu.arch, unit.label))
    lanes, accumulator = 32 if p.layout == "channels_last" else 1, 8 if p.dtype is torch.float64 else 4
    assert set(unit.entries) <= set(found)
    # ptxas stops at 128 registers: of many sums (25 taps, in float64 9 or more) up to 16 bytes lie in local memory.
    for entry in unit.entries:
        registers, local, shared = found[entry]
        assert 0 < registers <= 255
        most = 16 if entry == "grad_weight" else 0
        assert local <= most, f"{entry} of {p} spills {local} bytes for {choice.tile} on sm_{gpu.arch}"
        assert shared == (THREADS // 32 * lanes * accumulator if entry == "grad_weight" else 0)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("index,case", list(enumerate(SUITE)), ids=lambda v: getattr(v, "name", ""))
def test_chosen_kernels_compile_without_spills(index: int, case: Case) -> None:
    """A sample: each layer on one GPU in one of its dtypes, layouts and passes; together all of them appear."""
    every = list(versions(case.problem))
    gpu = GPUS[index % len(GPUS)]
    choice = direct_wgrad.choose(every[index % len(every)], gpu)
    assert isinstance(choice, Choice)
    check_compiled(choice, gpu)


@needs_nvrtc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_depthwise_kernels_compile_without_spills(dtype: torch.dtype) -> None:
    for i, p in enumerate(versions(Problem.make(8, 64, 64, (32, 32), 4, 2, 1, groups=64))):
        if p.dtype is dtype:
            choice = direct_wgrad.choose(p, GPUS[i % len(GPUS)])
            assert isinstance(choice, Choice)
            check_compiled(choice, GPUS[i % len(GPUS)])
