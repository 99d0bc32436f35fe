"""Kernels of several strides without a GPU: interpreter against reference, refusals, kernels compiled, launches."""

from __future__ import annotations

import random
import re
from itertools import product

import numpy as np
import pytest
import torch

from conftest import Stubs, precision_by_turns, seeds, spread_by_precision
from strides_interpreter import StridesInterpreter
from test_gather import DTYPES, needs_nvrtc
from upconv import reference
from upconv.bench.suites import SUITES
from upconv.cuda import families, family, jit, strides
from upconv.cuda.axes import Unfit
from upconv.cuda.gpu import A100, B200, H200
from upconv.problem import Precision, Problem


def random_problem(rng: random.Random) -> Problem:
    precision: Precision = rng.choice(("tf32", "bf16", "fp16"))
    while True:
        stride, taps = rng.choice((2, 2, 4, 6, 8)), rng.randint(2, 4)
        padding, more = rng.choice((0, 0, 2, 4, 6, 14)), rng.choice((0, 0, stride - 2))
        try:
            p = Problem.make(
                rng.randint(1, 9), rng.randint(1, 70), rng.randint(1, 9), (rng.choice((8, 24, 40, 64, 152)),),
                taps * stride, stride, padding, more, bias=rng.random() < 0.5, dtype=DTYPES[precision],
                precision=precision,
            )  # fmt: skip
        except ValueError:  # no output is left
            continue
        if strides.refusal(p, H200) is None:
            return p


@pytest.mark.parametrize("seed", seeds(40, 80))
def test_the_interpreter_gives_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    p = random_problem(rng)
    t = rng.choice(list(strides.candidates(p, H200)))
    numbers = np.random.default_rng(seed)
    x, weight, bias = (numbers.standard_normal(s) for s in (p.input_shape, p.weight_shape, (p.out_channels,)))
    interpreter = StridesInterpreter(t)
    packed = interpreter.pack(weight)
    assert packed.size * p.dtype.itemsize == t.packed_words * 4 and not np.isnan(packed).any()
    found = interpreter.run(p, x, packed, bias if p.bias else None)
    truth = reference.forward(
        p, *(torch.from_numpy(a) for a in (x, weight)), torch.from_numpy(bias) if p.bias else None
    )
    np.testing.assert_allclose(found, truth.numpy(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lanes_that_load_together_meet_different_banks(precision: Precision, taps: int) -> None:
    """Each of a warp's loads of fragments, of each tap, meets a bank at one word alone."""
    p = Problem.make(4, 64, 32, (256,), 4 * taps, 4, dtype=DTYPES[precision], precision=precision)
    for t in strides.candidates(p, H200):
        found = StridesInterpreter(t)
        for thread, tap, m, step, i in product((0, 32, 64, 96), range(taps), range(t.mb), range(4), range(4)):
            for at in found.words(1, thread + np.arange(32), tap, m, step, i):
                words = {*(at // 4).tolist()}
                assert len({word % 32 for word in words}) == len(words), t


def layer(**changes: object) -> Problem:
    settings: dict[str, object] = {"dtype": torch.float32, "precision": "tf32"}
    return Problem.make(2, 64, 32, (256,), 16, 8, 4, **(settings | changes))  # type: ignore[arg-type]


def test_what_is_refused_and_why() -> None:
    plain, pairs = (
        "the kernel is for 1-D layers without groups or dilation",
        "the kernel stores two neighbouring outputs together",
    )

    def other(kernel: int, stride: int, padding: int = 0, output_padding: int = 0, dilation: int = 1) -> Problem:
        return Problem.make(1, 8, 8, (8,), kernel, stride, padding, output_padding, dilation, precision="tf32")

    refused = {
        layer(precision="ieee"): "precision ieee is none of the kernel's",
        layer(pass_="grad-input"): "pixels as they lie are for forwards in NCHW",
        layer(groups=2): plain,
        other(4, 2, dilation=2): plain,
        Problem.make(1, 8, 8, (8, 8), 4, 2, precision="tf32"): plain,
        other(3, 2): "a kernel of 3 is no 2 to 4 strides of 2",
        other(4, 4): "a kernel of 4 is no 2 to 4 strides of 4",
        other(20, 4): "a kernel of 20 is no 2 to 4 strides of 4",
        other(4, 2, 1): pairs,
        other(10, 5): pairs,
        other(8, 4, 2, 3): pairs,
        layer().with_(size=(250,)): "channels begin at places off 16 bytes, where no box does",
        layer().with_(size=(2**30,)): "the kernel counts a channel's outputs, and packed weights, in 32 bits",
    }
    for p, reason in refused.items():
        assert strides.choose(p, H200) == reason, p
    for chip in (A100, B200):
        assert strides.choose(layer(), chip) == "pixels as rows are multiplied by wgmma alone"
    assert strides.choose(layer(), H200, general=True) == "exported files have no host code for pixels as rows"
    many = layer().with_(batch=2**31 - 1)
    assert strides.choose(many, H200) == "there are more tiles than the kernel counts in 32 bits"
    assert isinstance(strides.choose(layer(), H200), strides.Choice)


def test_tiles_that_do_not_fit_say_why() -> None:
    p = layer()
    for t, reason in (
        (strides.Tile(p, 256, 2), "2 x 64 x 256 sums are more than registers hold"),
        (strides.Tile(p, 128, 1, stages=1), "a stage is given back while the next is read"),
        (strides.Tile(p, 128, 1, weight_stages=1), "a stage is given back while the next is read"),
        (strides.Tile(p, 256, 1, 1, 3, 6), "the tile takes 248976 bytes of shared memory, the device has 232448"),
        (strides.Tile(p, 128, 1, 8), "8 images of 64 places are no whole 16 each, or more than a box has"),
    ):
        with pytest.raises(Unfit, match=re.escape(reason)):
            t.checked(H200.shared_bytes)


def case(name: str, precision: Precision) -> Problem:
    (p,) = {each.problem for cases in SUITES.values() for each in cases if each.name == name}
    return p.with_(dtype=DTYPES[precision], precision=precision)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_it_is_the_fastest_family_for_a_vocoders_upsampling(precision: Precision) -> None:
    found = families.choose(case("hifigan", precision), H200)
    best = min((c for c in found.values() if not isinstance(c, str)), key=family.weighed)
    assert best.family == "strides" and 0 < best.seconds < 1e-3
    assert re.fullmatch(
        rf"pixels as rows, each output 2 taps: wgmma {precision}, tile of \d+ x \d+ places x \d+ columns, stages of "
        r"(32|64) channels, \d of pixels, \d of weights, \d+ KB shared, grid 132",
        best.summary,
    )


def test_sizes_share_kernels() -> None:
    """Kernels go by the tile alone: 48 sizes and batches share those of a layer's tiles, and are few."""
    p = case("hifigan", "tf32")
    found = [strides.choose(p.with_(size=(w,), batch=b), H200) for w in range(160, 1440, 80) for b in (1, 9, 16)]
    sources = {c.sources()[0].source for c in found if isinstance(c, strides.Choice)}
    assert len(found) == 48 and len(sources) <= 24


def compiled() -> list[Problem]:
    layers = (
        layer(),
        layer(bias=True).with_(in_channels=40, out_channels=33),
        Problem.make(1, 40, 64, (64,), 8, 2, precision="tf32"),
    )
    return [p.with_(dtype=DTYPES[each], precision=each) for i, p in enumerate(layers) for each in precision_by_turns(i)]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p", compiled(), ids=lambda p: f"{p} {p.precision}".replace(" ", "-"))
def test_kernels_compile_without_spills_of_note(p: Problem) -> None:
    """Up to 16 bytes, which ptxas spills around a tile's stores; more where these divide by odd numbers of channels."""
    most = 16 if p.out_channels & (p.out_channels - 1) == 0 else 96
    for t in spread_by_precision(list(strides.candidates(p, H200)), p.precision):
        (unit,) = strides.Choice(t, p, H200, 0.0, "").sources()
        code, text, log = jit.built(unit.source, H200.arch, unit.label)
        found = jit.inspect(code)
        assert set(found) == {"strides", "pack", *(("pack_float",) if p.dtype.itemsize == 2 else ())}
        assert all(local <= most for _, local, _ in found.values()), t
        types = {"tf32": "f32.tf32.tf32", "bf16": "f32.bf16.bf16", "fp16": "f32.f16.f16"}[p.precision]
        assert set(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k\d+\." + re.escape(types), text)) == {str(t.columns)}
        assert "cp.async.bulk.tensor" in text and jit.serialised(log) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_launched(dtype: torch.dtype, stubs: Stubs) -> None:
    """Weights contiguous, strided and rounded on their way; the bias; tensors off 16 bytes."""
    p = layer(bias=True, dtype=dtype, precision="tf32" if dtype is torch.float32 else "bf16")
    choice = strides.choose(p, H200)
    assert isinstance(choice, strides.Choice)
    stubs.assert_one_mapped(choice)
