"""The staged gradients: their kernels on the host against the float64 reference, their choices, what is compiled."""

from __future__ import annotations

import math
import pickle
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import HOST, host_program, instance_header, needs_gxx
from strategies import DTYPES, problems
from test_direct_grad import GPUS, GRADIENTS, SUITE, needs_nvrtc, versions
from upconv import planner, reference
from upconv.bench.suites import SUITES, Case
from upconv.cuda.compile import elf, jit
from upconv.cuda.direct import staged
from upconv.cuda.direct.staged import Choice, Tile, Unfit
from upconv.cuda.gpu import H200, Gpu
from upconv.problem import Problem

# --- the kernels, compiled for the host ------------------------------------------------------------------------------


def program(tile: Tile, folder: Path) -> Path:
    """The kernels of a tile as a program of their own."""
    text = instance_header("staged.cu", tile.constants(), "Staged").replace("extern __shared__", "//")
    (folder / "kernel.h").write_text(text)
    heads = f"#define GRAD_WEIGHT {int(tile.weight)}\n#define SHARED_BYTES {tile.shared_bytes}\n"
    (folder / "staged.cpp").write_text(heads + (HOST / "staged.cpp").read_text())
    return host_program(folder / "staged.cpp", folder)


def stored(t: torch.Tensor, p: Problem) -> bytes:
    """Elements in the problem's layout."""
    t = t.movedim(1, -1) if p.layout == "channels_last" else t
    kind = t.to(p.dtype).contiguous()
    return bytes((kind.view(torch.int16) if kind.element_size() == 2 else kind).numpy().tobytes())


def check_on_host(p: Problem, tile: Tile, splits: int, whole: bool, seed: int, folder: Path) -> None:
    numbers = torch.Generator().manual_seed(seed)
    x, g, w = (
        torch.randint(-4, 5, shape, generator=numbers).double() / 2
        for shape in (p.input_shape, p.output_shape, p.weight_shape)
    )  # exact in every type, and so are their sums
    tile.checked(H200.shared_bytes)
    tiles_h, tiles_w, tiles = tile.blocks_of(p)
    lead = (1,) * (3 - p.rank)
    blocks = staged._weight_blocks(p, tile) * splits if tile.weight else tiles * tile.channel_blocks
    arguments = (p.batch, *lead, *p.size, *lead, *p.out_size, tiles_h, tiles_w, int(whole), splits, blocks)
    flat = w.contiguous().to(p.dtype)
    weights = bytes((flat.view(torch.int16) if flat.element_size() == 2 else flat).numpy().tobytes())
    given_ = stored(x, p) + stored(g, p) if tile.weight else stored(g, p) + weights
    done = subprocess.run([str(program(tile, folder)), *map(str, arguments)], input=given_, capture_output=True)
    assert done.returncode == 0, done.stdout[:400]
    kind = torch.int16 if p.dtype.itemsize == 2 else p.dtype
    out = torch.frombuffer(bytearray(done.stdout), dtype=kind).view(p.dtype).double()
    truth = reference.gradients(p, g, x, w)
    if tile.weight:
        expected = truth[1]
        out = out.reshape(p.weight_shape)
    else:
        expected = truth[0]
        shape = (p.batch, *p.size, p.in_channels) if p.layout == "channels_last" else p.input_shape
        out = out.reshape(shape)
        out = out.movedim(-1, 1) if p.layout == "channels_last" else out
    torch.testing.assert_close(out, expected.to(p.dtype).double(), rtol=0, atol=0)


def draw(p: Problem, rng: random.Random) -> Tile:
    """One of the tiles that are tried for a problem and fit."""
    return rng.choice(list(staged.fitting(p, H200)))


TOLERATED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@st.composite
def depthwise(draw: st.DrawFn) -> Problem:
    """Depthwise problems of ranks 2 and 3 with up to 40 channels, in both layouts."""
    rank = draw(st.integers(2, 3))
    groups = draw(st.sampled_from((9, 12, 21, 32, 40)))
    axes = []
    for axis in range(rank):
        wide = axis == rank - 1 and draw(st.booleans())
        kernel, stride = (16, 8) if wide else (draw(st.integers(1, 5)), draw(st.integers(1, 4)))
        dilation = 1 if wide else draw(st.integers(1, 3))
        axes.append((draw(st.integers(1, (12, 4)[rank - 2])), kernel, stride, 0 if kernel < 3 else 1, dilation))
    size, kernels, strides, paddings, dilations = zip(*axes)
    return Problem.make(
        draw(st.integers(1, 2)), groups, groups, size, kernels, strides, paddings, 0, dilations, groups,
        dtype=draw(st.sampled_from(DTYPES)), layout=draw(st.sampled_from(("nchw", "channels_last"))),
    )  # fmt: skip


def check_any_tile(p: Problem, rng: random.Random, folder: Path) -> None:
    """One tile of those that are tried, units whole or not, up to as many ranges of tiles as there are tiles."""
    tile = draw(p, rng)
    tiles = tile.blocks_of(p)[2]
    splits = min(tiles, rng.choice((1, 2, 3, 7, tiles)))
    splits = -(-tiles // -(-tiles // splits))
    whole = staged._whole_units(p, tile) and rng.random() < 0.7
    check_on_host(p, tile, splits, whole, rng.randrange(1000), folder)


@needs_gxx
@settings(max_examples=24, deadline=None, suppress_health_check=TOLERATED)
@given(problems(), st.sampled_from(GRADIENTS), st.randoms(use_true_random=False))
def test_tiles_compute_the_gradients(tmp_path: Path, p: Problem, pass_: str, rng: random.Random) -> None:
    """The very source, every thread of it, on small problems of every kind."""
    check_any_tile(p.with_(pass_=pass_), rng, tmp_path)


@needs_gxx
@settings(max_examples=16, deadline=None, suppress_health_check=TOLERATED)
@given(depthwise(), st.sampled_from(GRADIENTS), st.randoms(use_true_random=False))
def test_depthwise_tiles_compute_the_gradients(tmp_path: Path, p: Problem, pass_: str, rng: random.Random) -> None:
    """Lanes that are channels: a part of them, all of them, more than a warp has; and strides of whole planes."""
    check_any_tile(p.with_(pass_=pass_), rng, tmp_path)


# --- what is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index,case", list(enumerate(SUITE)), ids=lambda v: getattr(v, "name", ""))
def test_choices_are_sound(index: int, case: Case) -> None:
    for i, p in enumerate(versions(case.problem)):
        if i % 3 != index % 3:
            continue
        gpu = GPUS[(i + index) % len(GPUS)]
        choice = staged.choose(p, gpu)
        assert isinstance(choice, Choice)
        assert choice.family == "staged"
        assert choice.bound in ("bytes", "loads", "instruction issue", "second-level cache")
        memory = p.dtype.itemsize * (math.prod(p.input_shape) + math.prod(p.output_shape)) / gpu.bandwidth
        assert memory <= choice.seconds < 10
        assert choice.tile.checked(gpu.shared_bytes) is choice.tile
        tiles = choice.tile.blocks_of(p)[2]
        per_split = -(-tiles // choice.splits)  # as the kernel takes them
        assert choice.splits * per_split >= tiles > (choice.splits - 1) * per_split
        assert choice.tile.weight or choice.splits == 1
        assert choice.splits * math.prod(p.weight_shape) * choice.tile.accumulator <= max(
            staged._MAX_BYTES, math.prod(p.weight_shape) * choice.tile.accumulator
        )


@given(st.integers(1, 10**6), st.integers(1, 5000), st.integers(1, 512), st.integers(1, 2000))
def test_ranges_cover_the_tiles(tiles: int, blocks: int, most: int, slots: int) -> None:
    found = staged.ranges(tiles, blocks, most, slots)
    each = -(-tiles // found)
    assert 1 <= found <= max(1, min(most, tiles))
    assert found * each >= tiles > (found - 1) * each


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from(GRADIENTS), st.integers(1, 5), st.integers(1, 3))
def test_constants_do_not_depend_on_the_size(p: Problem, pass_: str, batch: int, more: int) -> None:
    """One compiled kernel serves a layer at every batch and size that takes its tile."""
    p = p.with_(pass_=pass_)
    other = p.with_(batch=batch, size=tuple(n + 16 * more for n in p.size))
    tried = {replace(t, problem=p): t for t in staged.tiles(other)}
    for tile in staged.tiles(p):
        same = tried.get(replace(tile, problem=p))
        assert same is None or same.constants() == tile.constants()


def test_the_same_choice_twice() -> None:
    p = Problem.make(4, 32, 32, (31, 40), 4, 2, 1, groups=32, pass_="grad-weight")
    found = []
    for _ in range(2):
        staged._choose.cache_clear()
        found.append(staged.choose(p, H200))
    assert found[0] == found[1]
    assert hash(found[0]) == hash(found[1])
    assert pickle.loads(pickle.dumps(found[0])) == found[0]


def test_it_is_chosen_where_it_was_measured_to_be_faster() -> None:
    """Depthwise and few channels; not where tensor cores have work, or where channels lie between columns."""
    cases = {c.name: c.problem for c in SUITES["cuda"]}
    wanted = {
        ("depthw", "nchw", "grad-input"): "staged",
        ("depthw", "channels_last", "grad-weight"): "staged",
        ("fcn8s", "nchw", "grad-weight"): "staged",
        ("fcn8s", "channels_last", "grad-input"): "staged",
        ("fsrcnn", "nchw", "grad-input"): "unshuffle",
        ("kb57", "nchw", "grad-input"): "gather",
        ("kb75", "channels_last", "grad-input"): "gather",
        ("kb57", "nchw", "grad-weight"): "wgrad",
    }
    for (name, layout, pass_), family in wanted.items():
        p = cases[name].with_(layout=layout, pass_=pass_, bias=False, precision="tf32")
        assert planner.select(p, planner.Device("cuda", gpu=H200)).name == family, (name, layout, pass_)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "stride"), [((6, 6, 1), (5, 3, 1)), ((6, 1, 3), (1, 1, 3)), ((2, 4, 2), (1, 2, 1))])
def test_few_positions_have_a_tile(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
    """A warp's lanes are columns of the weight's gradient: an image may have fewer positions than a warp has lanes."""
    p = Problem.make(4, 12, 84, size, (3, 4, 5), stride, (0, 1, 1), groups=4, pass_="grad-weight", dtype=dtype)
    assert not [tile for tile in staged.tiles(p) if math.prod(size[1:]) >= tile.h * tile.w]
    for gpu in GPUS:
        assert isinstance(staged.choose(p, gpu), Choice)


def test_refusals_are_sentences() -> None:
    p = Problem.make(1, 2, 2, (4, 4), 3, pass_="grad-weight")
    assert staged.choose(p.with_(pass_="fwd"), H200) == "these kernels compute gradients only, not fwd"
    for empty in ({"batch": 0}, {"size": (0, 4)}):
        for pass_ in GRADIENTS:
            assert staged.choose(p.with_(pass_=pass_, **empty), H200) == "an empty input has no work"


def test_tiles_that_do_not_fit_say_why() -> None:
    p = Problem.make(1, 64, 64, (64, 64), 4, 2, 1, groups=64, pass_="grad-input")
    tile = next(staged.tiles(p))
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"h": 4096}, "shared memory"),
        ({"ci": 512}, "sums of a thread"),
        ({"warps": 32}, "warps cannot share"),
        ({"rows": tile.rows * 3}, "positions by"),
    )
    for change, message in changes:
        with pytest.raises(Unfit, match=message):
            replace(tile, **change).checked(H200.shared_bytes)


# --- what is compiled ------------------------------------------------------------------------------------------------


def check_compiled(choice: Choice, gpu: Gpu, most: int) -> None:
    p = choice.problem
    (unit,) = choice.sources()
    assert set(unit.entries) == ({"grad_input"} if p.pass_ == "grad-input" else {"grad_weight", "reduce_staged"})
    found = elf.inspect(jit.cubin(unit.source, gpu.arch, unit.label))
    assert set(unit.entries) <= set(found)
    for entry in unit.entries:
        registers, local, shared = found[entry]
        assert 0 < registers <= 255
        assert local <= most, f"{entry} of {p} spills {local} bytes for {choice.tile} on sm_{gpu.arch}"
        assert shared == 0


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("index,case", list(enumerate(SUITE)), ids=lambda v: getattr(v, "name", ""))
def test_chosen_kernels_compile_without_spills(index: int, case: Case) -> None:
    """A sample: each layer on one GPU in one of its dtypes, layouts and passes; together all of them appear."""
    every = list(versions(case.problem))
    choice = staged.choose(every[index * 5 % len(every)], gpu := GPUS[index % len(GPUS)])
    assert isinstance(choice, Choice)
    check_compiled(choice, gpu, 128)  # dense layers' sums, where tensor cores are chosen


@needs_nvrtc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_depthwise_kernels_compile_without_spills(dtype: torch.dtype) -> None:
    for kernel, stride, gpus in ((4, 2, GPUS), (16, 8, (H200,))):
        for i, p in enumerate(versions(Problem.make(8, 64, 64, (32, 32), kernel, stride, 1, groups=64))):
            if p.dtype is dtype:
                choice = staged.choose(p, gpus[i % len(gpus)])
                assert isinstance(choice, Choice)
                check_compiled(choice, gpus[i % len(gpus)], 16)
