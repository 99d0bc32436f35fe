"""The gradient for the input on CUDA cores: an interpreter of its indices, its choice, its compiled kernels."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
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
from upconv.cuda.compile import elf, jit, nvrtc
from upconv.cuda.direct import direct, direct_grad
from upconv.cuda.direct.direct_grad import Choice
from upconv.cuda.gpu import A100, B200, H200, RTX3090, RTX4090, RTX5090, Gpu
from upconv.export import source
from upconv.planner import Device, plan
from upconv.problem import PRECISIONS, Pass, Problem

Array = NDArray[np.float64]
THREADS = 256
GRADIENTS: tuple[Pass, ...] = ("grad-input", "grad-weight")


# --- the kernels' arithmetic in NumPy, from the same constants -------------------------------------------------------


class Interpreter:
    """``direct_grad.cu``: threads as the kernel numbers them, tensors as flat memory."""

    def __init__(self, p: Problem, channels: int) -> None:
        self.p, self.channels = p, channels
        self.m = m = {name: int(value) for name, value in direct_grad.constants(p, channels).items()}
        self.taps = m["kernel_d"] * m["kernel_h"] * m["kernel_w"]
        self.cin, self.cout = m["groups"] * m["cin_g"], m["groups"] * m["cout_g"]
        lead = (1,) * (3 - p.rank)
        self.size, self.out_size = (*lead, *p.size), (*lead, *p.out_size)
        self.last = bool(m["channels_last"])

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
        kernel = (tap // (m["kernel_h"] * m["kernel_w"]), tap // m["kernel_w"] % m["kernel_h"], tap % m["kernel_w"])
        at = tuple(
            q * m[f"stride_{axis}"] - m[f"padding_{axis}"] + k * m[f"dilation_{axis}"]
            for axis, q, k in zip("dhw", place, kernel)
        )
        inside = np.broadcast_to(tap < self.taps, np.broadcast_shapes(*(a.shape for a in at), channel.shape))
        for a, size in zip(at, self.out_size):
            inside = inside & (a >= 0) & (a < size)
        where = np.broadcast_to(self.element(n, channel, at, self.cout, self.out_size), inside.shape)
        found = np.zeros(inside.shape)
        found[inside] = g[where[inside]]
        return found

    def grad_input(self, g: Array, weight: Array) -> Array:
        m = self.m
        blocks = -(-m["cin_g"] // self.channels)
        pixels = math.prod(self.size)
        total = self.p.batch * pixels * m["groups"] * blocks
        index = np.arange(-(-total // THREADS) * THREADS)
        index = index[index < total]
        if self.last:
            which, (n, place) = index % (m["groups"] * blocks), self.place_of(index // (m["groups"] * blocks))
        else:
            rest = index // pixels
            which, (_, place) = rest % (m["groups"] * blocks), self.place_of(index % pixels)
            n = rest // (m["groups"] * blocks)
        group, ci = which // blocks, which % blocks * self.channels
        g, flat = self.memory(g), weight.reshape(-1)
        acc = np.zeros((self.channels, total))
        for co, tap in product(range(m["cout_g"]), range(self.taps)):
            v = self.gradient(g, n, group * m["cout_g"] + co, place, np.array(tap))
            for t in range(self.channels):
                ok = ci + t < m["cin_g"]
                at = ((group * m["cin_g"] + ci + t) * m["cout_g"] + co) * self.taps + tap
                acc[t, ok] += (v * flat[np.where(ok, at, 0)])[ok]
        out = np.full(self.p.batch * self.cin * pixels, np.nan)
        for t in range(self.channels):
            ok = ci + t < m["cin_g"]
            at = self.element(n, group * m["cin_g"] + ci + t, place, self.cin, self.size)[ok]
            assert np.isnan(out[at]).all(), "an element is stored twice"
            out[at] = acc[t, ok]
        shape = (self.p.batch, *self.size, self.cin) if self.last else (self.p.batch, self.cin, *self.size)
        out = out.reshape(shape)
        return (np.moveaxis(out, -1, 1) if self.last else out).reshape(self.p.input_shape)


def check_interpreted(p: Problem, channels: int, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    x, g = numbers.standard_normal(p.input_shape), numbers.standard_normal(p.output_shape)
    w = numbers.standard_normal(p.weight_shape)
    expected = reference.gradients(p, *(torch.from_numpy(a) for a in (g, x, w)))[0]
    out = Interpreter(p, channels).grad_input(g, w)
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-11, atol=1e-11)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.sampled_from((1, 2, 4, 8)), st.integers(0, 999))
def test_interpreted_kernels_compute_the_gradient(p: Problem, channels: int, seed: int) -> None:
    """Channels of a thread that divide nothing."""
    check_interpreted(p.with_(pass_="grad-input"), channels, seed)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_interpreted_choice_computes_the_gradient(p: Problem) -> None:
    choice = direct_grad.choose(p.with_(pass_="grad-input"), H200)
    assert isinstance(choice, Choice)
    check_interpreted(choice.problem, choice.channels, 1)


# --- what is chosen --------------------------------------------------------------------------------------------------

SUITE = tuple({c.problem: c for name in ("kernelbench", "models") for c in SUITES[name]}.values())
GPUS = (H200, A100, RTX3090, RTX4090, B200, RTX5090)


def versions(p: Problem, passes: Sequence[Pass] = GRADIENTS) -> Iterator[Problem]:
    """A layer's gradients in every dtype and layout."""
    for dtype, layout, pass_ in product(DTYPES, ("nchw", "channels_last"), passes):
        if p.rank > 1 or layout == "nchw":
            yield p.with_(dtype=dtype, precision=PRECISIONS[dtype][0], layout=layout, pass_=pass_, bias=False)


@pytest.mark.parametrize("case", SUITE, ids=lambda c: c.name)
def test_choices_are_sound(case: Case) -> None:
    for i, p in enumerate(versions(case.problem, ["grad-input"])):
        gpu = GPUS[i % len(GPUS)]
        choice = direct_grad.choose(p, gpu)
        assert isinstance(choice, Choice)
        assert choice.family == "direct"
        assert choice.bound in ("bytes", "loads", "latency")
        memory = p.dtype.itemsize * (math.prod(p.input_shape) + math.prod(p.output_shape)) / gpu.bandwidth
        assert memory <= choice.seconds < 10
        assert direct.choose(p, gpu) == choice


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 5), st.integers(0, 9))
def test_constants_do_not_depend_on_the_size(p: Problem, batch: int, more: int) -> None:
    """One compiled kernel serves a layer at every batch and image size."""
    p = p.with_(pass_="grad-input")
    other = p.with_(batch=batch, size=tuple(n + more for n in p.size))
    small, large = (direct_grad.choose(q, H200) for q in (p, other))
    assert isinstance(small, Choice)
    assert isinstance(large, Choice)
    assert small.channels == large.channels
    assert direct_grad.constants(p, small.channels) == direct_grad.constants(other, large.channels)


def test_the_same_choice_twice() -> None:
    p = Problem.make(4, 32, 32, (31, 40), 4, 2, 1, groups=32, pass_="grad-input")
    found = []
    for _ in range(2):
        direct_grad.choose.cache_clear()
        found.append(direct_grad.choose(p, H200))
    assert found[0] == found[1]
    assert hash(found[0]) == hash(found[1])
    assert pickle.loads(pickle.dumps(found[0])) == found[0]


def test_few_threads_wait_for_their_loads() -> None:
    """A layer of one pixel and many rows of taps is slow by these loads; of depthwise layers nothing changes."""
    deep = Problem.make(16, 1, 512, (1, 1), (4, 4), dtype=torch.bfloat16, precision="bf16").with_(pass_="grad-input")
    found = direct_grad.choose(deep, H200)
    assert not isinstance(found, str) and found.bound == "latency" and found.seconds > 300e-6
    chosen = plan(deep.with_(pass_="fwd"), Device("cuda", gpu=H200)).selection("grad-input").choice
    assert chosen is not None and chosen.family == "gather"
    large = direct_grad.choose(deep.with_(in_channels=64, out_channels=64, groups=64, size=(64, 64)), H200)
    assert not isinstance(large, str) and large.bound != "latency"


def test_refusals_are_sentences() -> None:
    p = Problem.make(1, 2, 2, (4, 4), 3, pass_="grad-input")
    for other in ("fwd", "grad-weight"):
        expected = f"this kernel computes gradients for the input only, not {other}"
        assert direct_grad.choose(p.with_(pass_=other), H200) == expected
    for empty in ({"batch": 0}, {"size": (0, 4)}):
        assert direct_grad.choose(p.with_(**empty), H200) == "an empty input has no work"


# --- what is compiled ------------------------------------------------------------------------------------------------

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))


def check_compiled(choice: Choice, gpu: Gpu, most: int) -> None:
    p = choice.problem
    (unit,) = choice.sources()
    assert unit.entries == ("direct_grad",)
    registers, local, shared = elf.inspect(jit.cubin(unit.source, gpu.arch, unit.label))["direct_grad"]
    assert 0 < registers <= 255
    assert local <= most, f"{p} spills {local} bytes for {choice.channels} channels on sm_{gpu.arch}"
    assert shared == 0


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("index,case", list(enumerate(SUITE)), ids=lambda v: getattr(v, "name", ""))
def test_chosen_kernels_compile_without_spills(index: int, case: Case) -> None:
    """A sample: each layer on one GPU in one of its dtypes and layouts; together all of them appear."""
    every = list(versions(case.problem, ["grad-input"]))
    gpu = GPUS[index % len(GPUS)]
    choice = direct_grad.choose(every[index % len(every)], gpu)
    assert isinstance(choice, Choice)
    check_compiled(choice, gpu, 24)  # dense layers, where tensor cores are chosen; why is not known


@needs_nvrtc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_depthwise_kernels_compile_without_spills(dtype: torch.dtype) -> None:
    for i, p in enumerate(versions(Problem.make(8, 64, 64, (32, 32), 4, 2, 1, groups=64), ["grad-input"])):
        if p.dtype is dtype:
            choice = direct_grad.choose(p, GPUS[i % len(GPUS)])
            assert isinstance(choice, Choice)
            check_compiled(choice, GPUS[i % len(GPUS)], 0)


@pytest.mark.parametrize(
    "p",
    [
        Problem.make(2, 64, 64, (8, 8), 64, 32, groups=64),
        Problem.make(2, 8, 8, (8, 8), 33, 16, dtype=torch.float64),
    ],
    ids=str,
)
def test_a_weights_gradient_that_no_tile_fits_is_pytorchs(p: Problem) -> None:
    found = plan(p, Device("cuda", gpu=H200))
    assert "native" not in (found.forward, found.grad_input.name)
    assert found.grad_weight.name == "native"
    assert found.grad_weight.candidates[0].reason == "none of upconv's kernels fits"
    with pytest.raises(ValueError, match="must have kernels to be exported, and for grad-weight there is none"):
        source(p)
