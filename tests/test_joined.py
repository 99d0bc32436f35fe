"""Joined rows without a GPU (what they compute: test_emulated.py): refusals, kernels compiled, launches."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch

from conftest import Stubs, precision_by_turns, spread_by_precision
from test_gather import DTYPES, needs_nvrtc
from upconv.bench.suites import SUITES
from upconv.cuda import families, family
from upconv.cuda.axes import Unfit
from upconv.cuda.compile import elf, jit, nvrtc
from upconv.cuda.gemm import joined
from upconv.cuda.gpu import A100, B200, H200
from upconv.problem import Pass, Precision, Problem


def random_problem(rng: random.Random) -> Problem:
    precision: Precision = rng.choice(("tf32", "bf16", "fp16"))
    pass_: Pass = rng.choice(("fwd", "grad-input"))
    vec = 4 if precision == "tf32" else 8
    while True:
        rank = rng.choice((1, 1, 2, 3, 3))
        kernel = (rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 7))[-rank:]
        dilation = (rng.choice((1, 1, 2)), rng.choice((1, 1, 2)), rng.choice((1, 1, 3)))[-rank:]
        reach = [(k - 1) * d for k, d in zip(kernel, dilation)]
        padding = [rng.choice((0, 0, 1, 3)), rng.choice((0, 0, 1, 2)), rng.choice((0, 1, 4)) if rank == 1 else 0][
            -rank:
        ]
        if pass_ == "grad-input" and rank > 1:
            padding = [max(n - padding, 0) for n, padding in zip(reach, padding)]
        more = tuple(rng.choice((0, 0, d - 1)) for d in dilation)
        width = vec * rng.randint(1, 72 // vec if rank > 1 else 99) + (pass_ == "grad-input") * (
            2 * padding[-1] - reach[-1] - more[-1]
        )
        size = (rng.randint(1, 6), rng.randint(1, 12), max(width, 1))[-rank:]
        try:
            p = Problem.make(
                rng.randint(1, 2), rng.randint(1, 24), rng.choice((1, 5, 64, 70)), size, kernel, 1, tuple(padding),
                more, dilation, bias=rng.random() < 0.5, dtype=DTYPES[precision], precision=precision, pass_=pass_,
            )  # fmt: skip
        except ValueError:  # no output is left
            continue
        if joined.refusal(p, H200) is None and any(joined.candidates(p, H200)):
            return p


def layer(**changes: object) -> Problem:
    settings: dict[str, object] = {"dtype": torch.float32, "precision": "tf32"}
    return Problem.make(2, 32, 64, (4, 14, 64), 3, 1, 0, **(settings | changes))  # type: ignore[arg-type]


def test_what_is_refused_and_why() -> None:
    zeros = "between joined rows are zeros, which padding takes away"

    def other(
        size: tuple[int, ...], kernel: int = 3, stride: int = 1, padding: int | tuple[int, ...] = 0, **more: Any
    ) -> Problem:
        return Problem.make(1, 8, 8, size, kernel, stride, padding, precision="tf32", **more)

    refused = {
        layer(precision="ieee"): "precision ieee is none of the kernel's",
        layer(layout="channels_last"): "rows are joined for forwards and gradients for the input in NCHW",
        layer(groups=2): "rows are joined without strides or groups",
        other((14, 64), 3, 2): "rows are joined without strides or groups",
        other((14, 64), 3, 1, (0, 1)): zeros,
        layer(pass_="grad-input"): zeros,
        other((18, 67), 3, 1, 2, output_padding=1, dilation=2, pass_="grad-input"): zeros,
        other((14, 60), 3, 1, (4, 2), pass_="grad-input"): "more padding than a kernel reaches is for 1-D layers",
        other((14, 64), 9): "the kernel has straight code for 64 taps of a slice at most",
        other((64,), 65): "the kernel has straight code for 64 taps of a slice at most",
        other((14, 62)): "rows of 62 columns begin off 16 bytes, where no box does",
        other((14, 260)): "rows of 260 columns are too long to be joined: a tile's halo is whole rows",
        other((14, 0)): "there is nothing to sum",
        other((14, 64), 1): "slices of one tap have no halo, and tiles of any shape",
        other((64,), 4): "slices of the result of an odd number begin off pairs, which the kernel stores together",
        layer().with_(size=(2**16, 2**10, 64)): "the kernel counts a channel's results, and packed weights, in 32 bits",
    }
    for p, reason in refused.items():
        assert joined.choose(p, H200) == reason, p
    for chip in (A100, B200):
        assert joined.choose(layer(), chip) == "joined rows are multiplied by wgmma alone"
    assert (
        joined.choose(layer(), H200, general=True) == "joined rows serve one class of lengths of rows, not every size"
    )
    nothing = "no tile fits shared memory, or there are more than the kernel counts in 32 bits"
    assert joined.choose(layer().with_(batch=2**31 - 1), H200) == nothing
    assert joined.choose(other((17, 256), 8), H200) == nothing
    for p in (
        layer(),
        other((14, 64), 3, 1, (1, 0)),
        other((64,), 3, 1, 9),
        other((14, 66), 3, 1, 2, pass_="grad-input"),
    ):
        assert isinstance(joined.choose(p, H200), joined.Choice)


def test_tiles_that_do_not_fit_say_why() -> None:
    p, tall = layer(), Problem.make(1, 8, 8, (400, 16), (51, 1), 1, dilation=(6, 1), precision="tf32")
    for t, reason in (
        (joined.Tile(p, 64, stages=1), "a ring needs a stage to fill and one to read"),
        (joined.Tile(p, 64, slots=1), "a ring needs a stage to fill and one to read"),
        (joined.Tile(p, 64, weight_stages=1), "a ring needs a stage to fill and one to read"),
        (
            joined.Tile(p, 64, stages=3, slots=4),
            "two warps that turn every second stage need even numbers of stages and slots",
        ),
        (
            joined.Tile(p, 64, stages=4, slots=5),
            "two warps that turn every second stage need even numbers of stages and slots",
        ),
        (joined.Tile(tall, 16), "a box of 365 rows is more than the copy engine has"),
        (joined.Tile(p, 64, 256, 9), "the tile takes 205296 bytes of shared memory, the device has 200000"),
    ):
        with pytest.raises(Unfit, match=re.escape(reason)):
            t.checked(200_000)


def case(name: str, precision: Precision) -> Problem:
    (p,) = {each.problem for cases in SUITES.values() for each in cases if each.name == name}
    return p.with_(dtype=DTYPES[precision], precision=precision)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["kb61", "kb68", "kb69"])
def test_it_is_the_fastest_family_for_narrow_images(name: str, precision: Precision) -> None:
    found = families.choose(case(name, precision), H200)
    best = min((c for c in found.values() if not isinstance(c, str)), key=family.weighed)
    assert best.family == "joined" and 0 < best.seconds < 1e-2
    assert re.fullmatch(
        rf"rows joined to one: wgmma {precision}, tile of \d+ places x 64 channels, \d stages of \d+ places x "
        r"(8|16) channels, \d of \d+ x \d+ pixels, \d of \d taps, \d+ KB shared, grid 132",
        best.summary,
    )


def test_sizes_share_kernels() -> None:
    """Kernels go by the tile alone: 48 sizes and batches of a class of widths have no others than its tiles'."""
    p = case("kb61", "tf32")
    sizes = [(d, h, w) for d in (16, 33, 64) for h in (32, 50) for w in (36, 40, 44, 48)]
    found = [joined.choose(p.with_(size=size, batch=b), H200) for size in sizes for b in (1, 8)]
    sources = {c.sources()[0].source for c in found if isinstance(c, joined.Choice)}
    assert all(isinstance(c, joined.Choice) for c in found)
    tiles = joined.candidates(p.with_(size=(8, 8, 48)), H200)
    assert sources <= {joined.Choice(t, p, H200, 0.0, "").sources()[0].source for t in tiles}


def test_layers_whose_padding_takes_away_most_are_planned() -> None:
    """Tiles are looked for at a size of their own, of which as much padding must leave something."""
    for p in (
        Problem.make(1, 8, 8, (2000, 64), 3, 1, (600, 0), precision="tf32"),
        Problem.make(1, 8, 8, (20000,), 3, 1, 8200, precision="tf32"),
        Problem.make(1, 8, 8, (40000,), 3, 1, 18000, dilation=9000, precision="tf32", pass_="grad-input"),
    ):
        assert isinstance(joined.choose(p, H200), joined.Choice | str)


def test_packed_weights_beyond_32_bits_are_refused() -> None:
    p = Problem.make(1, 1, 1, (1, 8, 64), (2**18, 7, 9), 1, (2**17 - 1, 0, 0), precision="tf32")
    assert math.prod(p.weight_shape) * 4 < 2**31 and joined.refusal(p, H200) is None
    assert joined.choose(p, H200) == "no tile fits shared memory, or there are more than the kernel counts in 32 bits"


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_tile_serves_every_width_of_its_class(precision: Precision) -> None:
    """Of what it plans for, a stage's places and a slot's rows, each image as narrow or wide needs no more."""
    p = layer(dtype=DTYPES[precision], precision=precision)
    vec = 16 // p.dtype.itemsize
    for of_class in range(16, 257, 16):
        wide = p.with_(size=(4, 14, of_class))
        for t in joined.candidates(wide, H200):
            for w in range(of_class - 16 + vec, of_class + 1, vec):
                narrow = p.with_(size=(4, 14, w))
                assert t in list(joined.candidates(narrow, H200))
                pitch = narrow.out_size[-1]
                halo = t.halo(pitch)
                assert t.places + halo <= t.span
                assert (pitch - 1 + t.places + halo - 1) // pitch < t.rows


def compiled() -> list[Problem]:
    layers = (
        layer(),
        layer(bias=True).with_(in_channels=40, out_channels=33, size=(4, 14, 100)),
        Problem.make(1, 24, 130, (20, 48), (3, 7), 1, dilation=(2, 1), precision="tf32"),
        Problem.make(1, 24, 130, (8000,), 11, 1, 25, dilation=5, precision="tf32"),
        Problem.make(1, 64, 64, (256,), 3, 1, 1, precision="tf32", pass_="grad-input"),
    )
    return [p.with_(dtype=DTYPES[each], precision=each) for i, p in enumerate(layers) for each in precision_by_turns(i)]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p", compiled(), ids=lambda p: f"{p} {p.precision}".replace(" ", "-"))
def test_kernels_compile_without_spills(p: Problem) -> None:
    for t in spread_by_precision(list(joined.candidates(p, H200)), p.precision, 2):
        (unit,) = joined.Choice(t, p, H200, 0.0, "").sources()
        code, text, log = jit.built(unit.source, H200.arch, unit.label)
        found = elf.inspect(code)
        assert set(found) == {"joined", "pack", *(("pack_float",) if p.dtype.itemsize == 2 else ())}
        assert all(local == 0 for _, local, _ in found.values()), t
        types = {"tf32": "f32.tf32.tf32", "bf16": "f32.bf16.bf16", "fp16": "f32.f16.f16"}[p.precision]
        assert set(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k\d+\." + re.escape(types), text)) == {str(t.places)}
        assert "cp.async.bulk.tensor" in text and nvrtc.serialised(log) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
def test_what_is_launched(pass_: Pass, dtype: torch.dtype, stubs: Stubs) -> None:
    """Weights contiguous, strided and rounded on their way; the bias; tensors off 16 bytes."""
    p = layer(bias=True, dtype=dtype, precision="tf32" if dtype is torch.float32 else "bf16")
    if pass_ == "grad-input":
        p = p.with_(pass_=pass_, size=(4, 18, 66), padding=(2, 2, 2))
    choice = joined.choose(p, H200)
    assert isinstance(choice, joined.Choice)
    stubs.assert_one_mapped(choice)
