"""Phases as columns without a GPU (what they compute: test_emulated.py): packing, choices, compiled code, launches."""

from __future__ import annotations

import ctypes
import pickle
import random
import re
from dataclasses import replace
from itertools import combinations, permutations, product

import numpy as np
import pytest
import torch

from conftest import Stubs, needs_gxx, needs_nvrtc, off_16_bytes
from drawn import DTYPES
from emulator import Emulator, emulator
from upconv import planner
from upconv.bench.suites import SUITES, parse_layer
from upconv.cuda import families
from upconv.cuda.axes import Unfit, any_size
from upconv.cuda.compile import elf, jit, nvrtc
from upconv.cuda.cost import Cost
from upconv.cuda.family import weighed
from upconv.cuda.gpu import A100, B200, H200
from upconv.cuda.pixels import phases
from upconv.cuda.pixels.phases import Tile
from upconv.cuda.pixels.tile import CONSUMERS
from upconv.problem import Precision, Problem, output_length

__all__ = ["emulator"]

EACH: tuple[Precision, ...] = ("tf32", "bf16", "fp16")
FORWARDS = "phases as columns are for forwards in NCHW"
STRIDES = "the kernel is for layers with a stride, without groups"
TOO_SMALL = "every tile is more than twice as long as this input along an axis"
NO_ROOM = "this layer's weights leave no room for rings in shared memory, or its sums in registers"
COUNTS = "the kernel counts a channel's elements, and tiles, in 32 bits"


def draw_problem(rng: random.Random) -> Problem:
    """A small strided layer's forward; its phases may lack taps."""
    rank = rng.choice((1, 2, 2, 3, 3))
    precision: Precision = rng.choice(EACH)
    stride = [*(rng.choice((1, 2, 2, 3)) for _ in range(rank - 1)), rng.choice((1, 2, 2, 3, 4, 5))]
    kernel = [rng.choice([k for k in (1, 2, 3, 3, 4, 5, 7) if k >= s]) for s in stride]
    dilation = [rng.choice((1, 1, 1, 2, 3)) for _ in range(rank)]
    wide = [40, 72, 136] if rank == 1 else [8, 16, 24, 40]
    if precision == "tf32":
        wide += [36, 44] if rank == 1 else [4, 12, 20]
    sizes = [rng.choice(of) for of in ([1, 2, 4], [1, 3, 5, 9], wide)[3 - rank :]]
    axes = list(zip(sizes, kernel, stride, dilation))
    padding = [rng.randint(0, min((output_length(n, k, s, 0, 0, e) - 1) // 2, k * e)) for n, k, s, e in axes]
    output_padding = [rng.randrange(max(s, e)) for s, e in zip(stride, dilation)]
    return Problem.make(
        rng.randint(1, 3), rng.choice((1, 5, 8, 19, 40)), rng.choice((1, 3, 8, 12, 16, 20)), sizes, kernel, stride,
        padding, output_padding, dilation, bias=rng.random() < 0.5, dtype=DTYPES[precision], precision=precision,
    )  # fmt: skip


def draw_tile(p: Problem, rng: random.Random) -> Tile | None:
    """One worth a look at the problem's size, or at another; or one of two slices, which no candidate has."""
    if phases.refusal(p, H200) is not None:
        return None
    aligned = p.out_size[-1] * p.dtype.itemsize % 16 == 0
    every = list(phases.candidates(p, H200))
    if rng.random() < 0.3 or not every:
        every = list(phases._candidates(any_size(p), H200, aligned))
    if not every:
        return None
    t = rng.choice(every)
    _, h, w = t.shape
    if p.rank == 3 and rng.random() < 0.3 and (h > 1 or w > 16):
        t = replace(t, shape=(2, h // 2, w) if h > 1 else (2, h, w // 2), stages=2)
        try:
            t.checked(H200.shared_bytes)
        except Unfit:
            return None
    return t


def test_shifts_have_the_fewest_columns() -> None:
    """All taps of all phases along W, each a column of its shift, whose columns begin with the first phase."""
    rng = random.Random(0)
    done, shorter = 0, 0
    while done < 300:
        p = draw_problem(rng)
        if phases.refusal(p, H200) is not None:
            continue
        step, pad, dilation = p.stride[-1], p.padding[-1], p.dilation[-1]
        # Output step * q + u is of a source's place q + offset by tap k where (u + pad - k * dilation) is offset steps.
        taps = {
            ((u + pad - k * dilation) // step, u): k
            for u, k in product(range(step), range(p.kernel[-1]))
            if (u + pad - k * dilation) % step == 0
        }
        order, shifts = phases.shifts_of(p)
        assert sorted(order) == list(range(step))
        assert [s.offset for s in shifts] == sorted({offset for offset, _ in taps})
        found = {(s.offset, u): k for s in shifts for u, k in zip(order, s.taps) if k >= 0}
        assert found == taps and all(s.taps[-1] >= 0 for s in shifts)

        def columns(order: tuple[int, ...], taps: dict[tuple[int, int], int] = taps) -> int:
            last: dict[int, int] = {}
            for offset, u in taps:
                last[offset] = max(last.get(offset, 0), order.index(u) + 1)
            return sum(last.values())

        counts = [columns(o) for o in permutations(range(step))]
        assert sum(len(s.taps) for s in shifts) == min(counts)
        shorter += min(counts) < counts[0]  # than in the phases' own order
        done += 1
    assert shorter > 10


def test_candidates_obey_limits() -> None:
    rng = random.Random(0)
    count = 0
    for _ in range(300):
        p = draw_problem(rng)
        if phases.refusal(p, H200) is not None:
            continue
        for t in phases.candidates(p, H200):
            m = t.constants()
            mb, columns, pairs = (m[name] for name in ("mb", "co_columns", "pairs"))
            sums = pairs * mb * p.stride[-1] * columns // 2
            assert sums + 2 * 4 * mb * m["shifts"] <= 216 - 48, "registers"
            assert columns % 8 == 0 and 0 <= columns - p.out_channels < 8
            assert 64 * mb == t.shape[0] * t.shape[1] * t.shape[2]
            assert t.shared_bytes <= H200.shared_bytes and 2 <= t.stages <= 8
            assert max(t.box) <= 256 and t.box[0] * t.element % 32 == 16, "rows are an odd number of 16 bytes apart"
            assert t.problem.size == any_size(p).size and t.problem.batch == 1
            assert t.widths[-1] <= 256 and len(t.widths) <= 4
            count += 1
    assert count > 300


@pytest.mark.parametrize(("stride", "channels"), [(5, 51), (3, 85)])
def test_no_instruction_has_more_than_256_columns(stride: int, channels: int) -> None:
    """Though output channels are filled up to a multiple of 8: 5 x 51 are 255, 5 x 56 are 280."""
    p = Problem.make(1, 8, channels, (128,), stride + 1, stride, precision="tf32")
    assert all(t.widths[-1] <= 256 for t in phases.candidates(p, H200))


def test_lanes_that_meet_in_shared_memory_have_different_banks() -> None:
    """A warp's loads of fragments, and its stores of sums to the buffer but for what unaligned rows begin beyond."""
    lane = np.arange(32)
    for precision in EACH:
        p = Problem.make(2, 32, 24, (16, 48), 4, 2, 1, dtype=DTYPES[precision], precision=precision)
        for t in phases.candidates(p, H200):
            words = ((lane & 3) * 2 * t.pitch + (lane >> 2)) * t.element // 4
            assert len(set(words % 32)) == len(set(words)) == (32 if t.element == 4 else 16)
            channel = t.buffer_bytes // t.passed
            assert channel % 64 == 16
            first = (lane & 3) * 2 * channel + (lane >> 2) * t.strides[2] * t.element  # in bytes
            together = 32 if t.element == 2 else 16  # lanes; 64 bits each pass half a warp at a time
            stored = {int(at) // 4 + i for at in first[:together] for i in range(32 // together)}
            assert len({word % 32 for word in stored}) == len(stored) == 32


@needs_gxx
def test_packed_weights_are_shared_only_where_they_are_the_same(emulator: Emulator) -> None:
    """A weight may serve layers of several strides; kept packings go by its shape and what `packing` says."""
    weight = torch.randn(24, 8, 3, 3)
    layer = Problem.make(1, 24, 8, (32, 32), 3, 2, 1, precision="tf32")
    packed: dict[object, torch.Tensor] = {}
    for stride, padding, dilation in (
        ((2, 2), (1, 1), (1, 1)),
        ((2, 3), (1, 1), (1, 1)),
        ((2, 2), (0, 2), (1, 1)),
        ((2, 2), (1, 1), (1, 5)),
    ):
        p = layer.with_(stride=stride, padding=padding, dilation=dilation)
        every = list(phases.candidates(p, H200))
        for t in (every[0], every[-1]) if not packed else every[:1]:
            prepared = phases.Choice(t, p, H200, Cost()).prepare(0)
            ours = prepared.pack(weight)
            assert torch.equal(packed.setdefault(prepared.packing, ours), ours)
    found = list(packed.values())
    assert len(found) == 4 and not any(a.shape == b.shape and torch.equal(a, b) for a, b in combinations(found, 2))


@pytest.mark.parametrize(
    ("layer", "size", "settings", "reason"),
    [
        ("16,16,3,stride=2", "1x16x8x8", {"layout": "channels_last"}, FORWARDS),
        ("16,16,3,stride=2", "1x16x8x8", {"pass_": "grad-input"}, FORWARDS),
        ("16,16,3,stride=2", "1x16x8x8", {"precision": "ieee"}, "precision ieee is none of the kernel's"),
        ("16,16,3", "1x16x8x8", {}, STRIDES),
        ("16,16,3,stride=2,groups=2", "1x16x8x8", {}, STRIDES),
        (
            "16,4,7,stride=(1,6)", "1x16x8x8", {},
            "a stride of 6 along the width has more phases than the 5 that the kernel orders",
        ),
        ("16,33,3,stride=2", "1x16x8x8x8", {}, "8 phases of 33 channels are more than 256 columns"),
        ("16,16,(2,3),stride=3", "1x16x8x8", {}, "some phases have no taps, for which the kernel would multiply zeros"),
        (
            "16,16,4,stride=2,dilation=2", "1x16x8x8", {},
            "some phases have no taps, for which the kernel would multiply zeros",
        ),
        (
            "16,16,(2,3),stride=(2,3)", "1x16x8x8", {},
            "of one tap for each output there is no row that several phases read",
        ),
        ("16,16,3,stride=2", "1x16x8x9", {}, "boxes want rows of whole 16 bytes"),
        ("16,16,3,stride=2", "1x16x8x20", {"precision": "bf16"}, "boxes want rows of whole 16 bytes"),
        ("16,16,3,stride=2", "1x16x65536x16384", {}, COUNTS),
        ("16,16,3,stride=2", "33554432x16x8x8", {}, COUNTS),
        ("512,64,3,stride=2", "1x512x16x16", {}, NO_ROOM),
        ("16,16,3,stride=2,padding=1", "1x16x1x8", {}, TOO_SMALL),
        ("8,128,(3,13),stride=(1,2),dilation=(1,9)", "1x8x16x64", {}, NO_ROOM),
    ],
)  # fmt: skip
def test_refusals_are_sentences(layer: str, size: str, settings: dict[str, str], reason: str) -> None:
    precision = settings.get("precision", "tf32")
    p = parse_layer(f"{layer},bias=False", size)
    p = p.with_(**{"precision": precision, "dtype": DTYPES[precision], **settings})
    assert phases.choose(p, H200) == reason


def test_other_gpus_and_exported_files_have_none() -> None:
    p = parse_layer("16,16,3,stride=2,bias=False", "1x16x32x32").with_(precision="tf32")
    for gpu in (A100, B200):
        assert phases.choose(p, gpu) == "pixels as rows are multiplied by wgmma alone"
    assert isinstance(families.choose(p, H200)["pixels"], phases.Choice)
    assert "exported files have no host code for pixels as rows" in families.choose(p, H200, general=True)["pixels"]


def test_counts_of_32_bits_are_not_exceeded() -> None:
    p = Problem.make(2, 8, 8, (32, 32), 3, 2, 1, precision="tf32")
    for fewer in (p.with_(batch=1, size=(2**15, 2**14)), p.with_(batch=2**31 // 32**2 - 1)):
        found = phases.choose(fewer, H200)
        assert isinstance(found, phases.Choice)
        assert max(found.tile.arguments(fewer)) + CONSUMERS * found.grid < 2**31


def kb73(precision: Precision) -> Problem:
    (layer,) = {case.problem for case in SUITES["cuda"] if case.name == "kb73"}
    return layer.with_(dtype=DTYPES[precision], precision=precision)


def test_kb73_comes_from_phases_in_tf32_alone() -> None:
    p = kb73("tf32")
    found = planner.select(p, planner.Device("cuda", gpu=H200))
    assert found.name == "pixels" and isinstance(found.choice, phases.Choice)
    assert found.choice.summary in found.candidates[0].reason
    assert re.fullmatch(
        r"pixels as rows, phases as columns: wgmma tf32, 2 tiles of 1x\d+x\d+ \(DxHxW of q\), 4 x 64 columns, rings of "
        r"\d of \d+ channels, weights resident, \d+ KB shared, grid 13\d",
        found.choice.summary,
    )
    others = [c for name, c in families.choose(p, H200).items() if name != "pixels"]
    assert all(weighed(found.choice) < weighed(c) for c in others if not isinstance(c, str))
    t, grid, tiles = found.choice.tile, found.choice.grid, -(-found.choice.tile.tiles(p) // CONSUMERS)
    assert 100 < grid <= 132 and -(-tiles // grid) == -(-tiles // 132), "as soon done as by all multiprocessors"
    assert not t.aligned and t.shared_bytes <= H200.shared_bytes
    for precision in EACH[1:]:
        assert planner.select(kb73(precision), planner.Device("cuda", gpu=H200)).name == "gather"
        assert isinstance(phases.choose(kb73(precision), H200), phases.Choice)


def test_what_registers_and_shared_memory_cannot_hold_is_unfit() -> None:
    layer = any_size(kb73("tf32"))
    few = Problem.make(1, 8, 8, (1024, 1024), (3, 5), (2, 2), precision="tf32")
    five = Problem.make(1, 8, 8, (1024,), 8, 5, 1, 0, 3, precision="tf32")  # phases' taps at six places
    for t, reason in (
        (Tile(layer, (1, 1, 128), 8), "256 sums and fragments beside are more than 168 registers"),
        (Tile(few, (1, 1, 256), 8), "boxes have at most 256 elements along a dimension"),
        (Tile(few, (1, 1, 64), 264), "boxes have at most 256 elements along a dimension"),
        (Tile(five, (1, 1, 64), 8), "matrix instructions have 5 widths, more than the kernel's 4"),
        (Tile(few, (1, 1, 64), 8, stages=1), "a ring has a stage that is read, and one that is filled"),
        (Tile(layer, (1, 1, 64), 16, stages=8), r"the tile takes \d+ bytes of shared memory, the device has 232448"),
    ):
        with pytest.raises(Unfit, match=reason):
            t.checked(H200.shared_bytes)


def test_the_same_choice_twice() -> None:
    """Nothing but the problem and the GPU decides, and a choice can be a key and go to another process."""
    found = []
    for _ in range(2):
        phases.choose.cache_clear()
        phases._candidates.cache_clear()
        phases.shifts_of.cache_clear()
        found.append(phases.choose(kb73("tf32"), H200))
    assert found[0] == found[1]
    assert hash(found[0]) == hash(found[1])
    assert pickle.loads(pickle.dumps(found[0])) == found[0]


def test_constants_have_no_size() -> None:
    """Only whether the output's rows begin at 16 bytes."""
    for precision, padding in product(EACH, (0, 1)):
        p = Problem.make(2, 24, 12, (16, 64), 4, 2, 1, padding, dtype=DTYPES[precision], precision=precision)
        every = list(phases.candidates(p, H200))
        assert every and all(t.aligned == (padding == 0) for t in every)
        for size, batch in (((16, 64), 1), ((17, 72), 9), ((200, 128), 4)):
            q = p.with_(size=size, batch=batch, bias=True)
            for t in every:
                assert replace(t, problem=q).constants() == t.constants()
            assert set(phases.candidates(q, H200)) & set(every), "found again, not planned anew"


def test_sizes_share_kernels() -> None:
    """Kernels go by the tile alone: a layer's 27 sizes and 3 batches share nine at most."""
    layer = kb73("tf32")
    sizes = [(d, h, w) for d in (8, 17, 32) for h in (20, 33, 64) for w in (24, 68, 132)]
    found = [phases.choose(layer.with_(size=size, batch=b), H200) for size in sizes for b in (1, 4, 9)]
    sources = {c.sources()[0].source for c in found if isinstance(c, phases.Choice)}
    assert len(sources) <= 9 and not any(isinstance(c, str) for c in found)


def compiled() -> list[tuple[Problem, int]]:
    """Layers, each with which of its candidates is compiled; -1: the model's."""
    layers: tuple[tuple[Problem, int, tuple[Precision, ...]], ...] = (
        (kb73("tf32"), -1, ("tf32", "bf16")),
        (Problem.make(2, 24, 12, (32, 64), 4, 2, 1, bias=True), -1, ("tf32", "fp16")),
        (Problem.make(2, 19, 3, (40, 72), (5, 4), (2, 3), 1), 5, ("tf32", "bf16")),
        (Problem.make(2, 40, 48, (1000,), 7, 5, 1), 0, ("tf32", "fp16")),
        (Problem.make(2, 16, 20, (6, 24, 64), 3, (1, 2, 2), 1, dilation=(2, 1, 3)), 1, ("tf32",)),
    )
    return [(p.with_(dtype=DTYPES[each], precision=each), index) for p, index, all_ in layers for each in all_]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(("p", "index"), compiled(), ids=lambda p: f"{p}".replace(" ", "-"))
def test_kernels_compile_without_spills(p: Problem, index: int) -> None:
    choice = phases.choose(p, H200)
    assert isinstance(choice, phases.Choice)
    if index >= 0:
        choice = replace(choice, tile=list(phases.candidates(p, H200))[index])
    (unit,) = choice.sources()
    code, text, log = jit.built(unit.source, H200.arch, unit.label)
    found = elf.inspect(code)
    assert set(found) == {"pixels", "pack", *(("pack_float",) if p.dtype.itemsize == 2 else ())}
    assert all(local == 0 for _, local, _ in found.values()), choice.summary
    types = {"tf32": "f32.tf32.tf32", "bf16": "f32.bf16.bf16", "fp16": "f32.f16.f16"}[p.precision]
    assert set(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k\d+\." + re.escape(types), text)) == {
        str(width) for width in choice.tile.widths
    }
    assert "cp.async.bulk.tensor.5d" in text and nvrtc.serialised(log) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_launched(dtype: torch.dtype, stubs: Stubs) -> None:
    """Weights contiguous, channels-last, strided and rounded on their way; the bias; tensors off 16 bytes."""
    p = Problem.make(
        2, 24, 12, (10, 32), 4, 2, 1, bias=True, dtype=dtype, precision="tf32" if dtype is torch.float32 else "bf16"
    )
    choice = phases.choose(p, H200)
    assert isinstance(choice, phases.Choice) and choice.tile.aligned
    stubs.assert_one_mapped(choice)


def test_a_view_off_16_bytes_gets_the_output(stubs: Stubs) -> None:
    """It is copied from a whole one where rows begin at 16 bytes, and stored to where they begin anywhere."""
    p = Problem.make(2, 24, 12, (10, 32), 3, 2, 1, precision="tf32")
    for of, aligned in ((p, False), (p.with_(output_padding=(1, 1)), True)):
        choice = phases.choose(of, H200)
        assert isinstance(choice, phases.Choice) and choice.tile.aligned == aligned
        prepared = choice.prepare(0)
        packed = prepared.pack(torch.randn(of.weight_shape))
        x, out = torch.randn(of.input_shape), torch.randn(of.output_shape)
        place = off_16_bytes(out)
        for to in (out, place):
            prepared.run(x, packed, None, to)
            assert (stubs.pop()[3][2] == to.data_ptr()) == (to is out or not aligned)
        stubs.act = lambda args, size=out.nbytes: ctypes.memset(args[2], 0, size)
        prepared.run(x, packed, None, place.fill_(7.0))
        assert (place == 0.0).all()
        stubs.act = len
