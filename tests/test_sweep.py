"""The sweep family (what it computes: test_emulated.py): its choice, its compiled kernels."""

from __future__ import annotations

import random
import re
import time
from itertools import product

import pytest
import torch

from conftest import Stubs, by_turns, needs_nvrtc, off_16_bytes
from drawn import DTYPES
from drawn import FORWARD_LIKE as PASSES
from upconv import planner
from upconv.bench.suites import SUITES, parse_layer
from upconv.cuda import families
from upconv.cuda.axes import Unfit, any_size
from upconv.cuda.compile import elf, jit, nvrtc
from upconv.cuda.gemm import gather
from upconv.cuda.gpu import A100, B200, H200
from upconv.cuda.pixels import sweep
from upconv.problem import Layout, Pass, Precision, Problem, output_length

NO_TILE = "no tile of this layer fits in registers, shared memory and one stretch of code"
WALKS = "the kernel walks without strides, groups or a dilation along the depth"


def draw_problem(rng: random.Random) -> Problem:
    """A small 3-D layer without strides; every other one is of the gradient for the input."""
    kernel = rng.choice((1, 2, 3, 3, 4, 5)), rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4))
    dilation = 1, rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2))
    size = rng.randint(1, 6), rng.randint(1, 9), rng.choice((1, 4, 7, 8, 12, 13, 16, 20))
    axes = zip(size, kernel, dilation)
    padding = tuple(rng.randint(0, min((output_length(n, k, 1, 0, 0, d) - 1) // 2, k)) for n, k, d in axes)
    output_padding = tuple(rng.randrange(d) for d in dilation)
    precision: Precision = rng.choice(("tf32", "fp16", "bf16"))
    return Problem.make(
        rng.randint(1, 3), rng.choice((1, 3, 8, 17, 40)), rng.choice((1, 2, 5, 8, 11, 24)), size, kernel, 1, padding,
        output_padding, dilation, bias=rng.random() < 0.5, dtype=DTYPES[precision], precision=precision,
        pass_=rng.choice(PASSES), layout=rng.choice(("nchw", "channels_last")),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "size", "settings", "reason"),
    [
        ("16,16,3", "1x16x8x8", {}, "walks are for 3-D layers, whose images are not side by side"),
        ("6,16,3", "1x6x8x8x8", {"layout": "channels_last"}, "boxes want pixels of whole 16 bytes"),
        ("16,16,3,stride=2", "1x16x8x8x8", {}, WALKS),
        ("16,16,3,groups=2", "1x16x8x8x8", {}, WALKS),
        ("16,16,3,dilation=2", "1x16x8x8x8", {}, WALKS),
        ("16,16,3", "1x16x8x8x8", {"precision": "ieee"}, "precision ieee is none of the kernel's"),
        ("16,257,3", "1x16x8x8x8", {}, "257 output channels are more than the 256 columns of a matrix instruction"),
        ("16,16,3", "2x16x5x7x7", {}, "rows begin at more places of 16 bytes than boxes are sorted by"),
        ("16,16,(3,15,15)", "2x16x5x32x32", {}, NO_TILE),
    ],
)  # fmt: skip
def test_refusals_are_sentences(layer: str, size: str, settings: dict[str, str], reason: str) -> None:
    p = parse_layer(f"{layer},bias=False", size).with_(**{"precision": "tf32", **settings})
    assert sweep.choose(p, H200) == reason


def test_other_gpus_have_no_sweeps() -> None:
    p = parse_layer("16,16,3,bias=False", "1x16x8x8x8").with_(precision="tf32")
    for gpu in (A100, B200):
        assert sweep.choose(p, gpu) == "pixels as rows are multiplied by wgmma alone"
    assert sweep.choose(p, H200, general=True) == "exported files have no host code for pixels as rows"


@pytest.mark.parametrize(
    ("name", "precision", "layout"),
    [*product(("kb58", "kb70"), ("tf32", "bf16"), ("nchw", "channels_last")), ("kb61", "bf16", "channels_last")],
)
def test_layers_of_few_output_channels_are_swept(name: str, precision: Precision, layout: Layout) -> None:
    (layer,) = {case.problem for cases in SUITES.values() for case in cases if case.name == name}
    p = layer.with_(dtype=DTYPES[precision], precision=precision, layout=layout)
    device = planner.Device("cuda", gpu=H200)
    found = planner.select(p, device)
    assert found.name == "pixels" and isinstance(found.choice, sweep.Choice)
    other = gather.choose(p, H200)
    assert not isinstance(other, str) and found.choice.seconds < other.seconds
    assert "pixels as rows: wgmma" in found.candidates[0].reason
    assert planner.select(p, device, general=True).name != "pixels"


def test_what_registers_and_shared_memory_cannot_hold_is_unfit() -> None:
    p = parse_layer("16,16,3,bias=False", "1x16x8x8x8").with_(precision="tf32")
    layer = any_size(p)
    for s, reason in (
        (sweep.Tile(layer, 3, (9, 16), 1, 8), "9 rows of 18 pixels are more than 128"),
        (sweep.Tile(layer, 3, (4, 16), 8, 8), "8 x 64 x 48 sums are more than registers hold"),
        (sweep.Tile(layer, 3, (4, 16), 2, 16, w_stage=3), "a stage of the ring has parts of taps"),
        (
            sweep.Tile(layer, 3, (4, 16), 2, 8, stages=60),
            "the tile takes .* bytes of shared memory, the device has 232448",
        ),
    ):
        with pytest.raises(Unfit, match=reason):
            s.checked(H200.shared_bytes)


def test_a_new_size_is_planned_in_milliseconds_and_mostly_shares_kernels() -> None:
    layer = parse_layer("32,16,(3,5,7),bias=False", "2x32x16x32x64").with_(precision="tf32")
    sources, slowest = set(), 0.0
    sizes = [(d, h, w) for d in (10, 17, 24) for h in (20, 33, 48) for w in (24, 40, 64, 80)]
    for i, size in enumerate(sizes):
        begin = time.perf_counter()
        choice = sweep.choose(layer.with_(size=size), H200)
        taken = time.perf_counter() - begin
        assert isinstance(choice, sweep.Choice)
        slowest = max(slowest, taken if i else 0.0)
        sources.add(choice.sources()[0].source)
    assert len(sources) <= 12 and slowest < 0.1


def test_counts_of_32_bits_are_not_exceeded() -> None:
    p = Problem.make(2 * 10**9, 2, 8, (1, 1, 4), (5, 1, 3), 1, (2, 0, 0), precision="tf32")
    assert sweep.choose(p, H200) == NO_TILE
    fewer = sweep.choose(p.with_(batch=10**7), H200)
    assert isinstance(fewer, sweep.Choice) and fewer.tile.arguments(fewer.problem, 132)[-1] < 2**30


def test_segments_keep_blocks_busy() -> None:
    for walks, slices, slots in ((96, 18, 3), (160, 98, 3), (1, 64, 5), (1000, 64, 3)):
        found = sweep._segments(walks, slices, slots, 132)
        steps = [-(-walks * n // 132) * (-(-slices // n) + slots - 1) for n in range(1, slices + 1)]
        assert steps[found - 1] == min(steps)


def problems() -> list[Problem]:
    """Layers of the suites that may be swept, in one of three of these versions, by turns."""
    layers = {case.problem for case in SUITES["cuda"] if case.problem.rank == 3 and max(case.problem.stride) == 1}
    each: list[tuple[Precision, Layout, Pass]] = [
        ("tf32", "nchw", "fwd"),
        ("bf16", "nchw", "fwd"),
        ("tf32", "nchw", "grad-input"),
        ("fp16", "nchw", "grad-input"),
        ("bf16", "channels_last", "fwd"),
        ("tf32", "channels_last", "grad-input"),
    ]
    found = [
        p.with_(dtype=DTYPES[precision], precision=precision, layout=layout, pass_=pass_)
        for i, p in enumerate(sorted(layers, key=str)) for precision, layout, pass_ in by_turns(each, 3, i)
    ]  # fmt: skip
    return [p for p in found if not isinstance(sweep.choose(p, H200), str)]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p", problems(), ids=lambda p: f"{p} {p.precision}".replace(" ", "-"))
def test_chosen_kernels_compile_without_spills(p: Problem) -> None:
    choice = sweep.choose(p, H200)
    assert isinstance(choice, sweep.Choice)
    (unit,) = choice.sources()
    code, text, log = jit.built(unit.source, H200.arch, unit.label)
    found = elf.inspect(code)
    assert set(found) == {"sweep", "pack", *(("pack_float",) if p.dtype.itemsize == 2 else ())}
    assert all(local == 0 for _, local, _ in found.values()), choice.summary
    types = {"tf32": "f32.tf32.tf32", "bf16": "f32.bf16.bf16", "fp16": "f32.f16.f16"}[p.precision]
    assert set(re.findall(r"wgmma\.mma_async\S*\.(m64n\d+)k\d+\." + re.escape(types), text)) == {
        f"m64n{choice.tile.columns}"
    }
    assert "cp.async.bulk.tensor" in text and nvrtc.serialised(log) is None


def test_it_is_among_the_families() -> None:
    p = parse_layer("16,16,3,bias=False", "1x16x8x8x8").with_(precision="tf32")
    assert isinstance(families.choose(p, H200)["pixels"], sweep.Choice)
    assert "exported files have no host code for pixels as rows" in families.choose(p, H200, general=True)["pixels"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_launched(dtype: torch.dtype, stubs: Stubs) -> None:
    """Weights contiguous, channels-last, strided and rounded on their way; the bias; a source off 16 bytes."""
    p = Problem.make(2, 8, 5, (4, 6, 16), (3, 3, 5), 1, 1, bias=True, dtype=dtype)
    p = p.with_(precision="tf32" if dtype is torch.float32 else "bf16")
    choice = sweep.choose(p, H200)
    assert isinstance(choice, sweep.Choice)
    prepared, s = choice.prepare(0), choice.tile
    weight = torch.randn(p.weight_shape, dtype=dtype)
    packed = stubs.assert_packs(prepared, weight, s.packed_words, s.pack_blocks)
    x, out = (torch.randn(shape, dtype=dtype) for shape in (p.input_shape, p.output_shape))
    bias = torch.randn(5, dtype=dtype)
    for _ in range(2):
        prepared.run(x, packed, bias, out, fresh=True)
        sizes = s.arguments(p, 132)
        pointers = x.data_ptr(), packed.data_ptr(), bias.data_ptr(), out.data_ptr()
        assert stubs.pop() == ("sweep", choice.grid, True, (*pointers, *sizes, *(x.data_ptr(),) * 16))
    assert stubs.encoded == [x.data_ptr()], "a map is kept"
    off = torch.empty(x.numel() + 1, dtype=dtype)[1:].view(x.shape)
    prepared.run(off, packed, None, out, fresh=True)
    _, _, dependent, args = stubs.pop()
    assert args[0] not in (off.data_ptr(), x.data_ptr()) and args[0] % 16 == 0 and args[2] == 0 and not dependent
    if dtype is not torch.float32:
        single = bias.float()
        packed = prepared.pack(weight.float(), single)
        words = s.packed_words
        assert packed.shape == (words + 3,)
        place = packed.data_ptr() + 4 * words
        name, grid, _, args = stubs.pop()
        assert (name, grid, args[1:]) == ("pack_float", s.pack_blocks, (packed.data_ptr(), 1, single.data_ptr(), place))
        prepared.run(x, packed, single, out)
        assert stubs.pop()[3][2] == place
        prepared.pack(weight.float())
        assert stubs.pop()[3][3:] == (0, 0)


def test_a_channels_last_result_off_16_bytes_is_copied(stubs: Stubs) -> None:
    p = Problem.make(2, 8, 5, (4, 6, 16), (3, 3, 5), 1, 1, bias=True, dtype=torch.float32)
    choice = sweep.choose(p.with_(precision="tf32", layout="channels_last"), H200)
    assert isinstance(choice, sweep.Choice) and choice.tile.channels_last
    prepared = choice.prepare(0)
    x, out = (
        torch.randn(shape).contiguous(memory_format=torch.channels_last_3d) for shape in (p.input_shape, p.output_shape)
    )
    packed = prepared.pack(torch.randn(p.weight_shape))
    bias, off = torch.randn(5), off_16_bytes(out)
    for result in (out, off):
        prepared.run(x, packed, bias, result)
        _, _, _, args = stubs.pop()
        assert args[:3] == (x.data_ptr(), packed.data_ptr(), bias.data_ptr())
        assert args[3] % 16 == 0 and (args[3] == out.data_ptr()) == (result is out)


def test_what_is_read_behind_the_last_tile_is_shared_memory() -> None:
    """A ring of weights lies there, which a tile of few rows for many positions would read beyond."""
    layer = any_size(Problem.make(1, 8, 8, (4, 40, 120), 3, precision="tf32", layout="channels_last"))
    for rows, fits in ((1, False), (56, True)):
        s = sweep.Tile(layer, 3, (rows, 16), 8, 8, w_stage=3)
        if fits:
            assert s.checked(H200.shared_bytes) is s
            continue
        with pytest.raises(Unfit, match="what is read behind the last tile is not all of the kernel's shared memory"):
            s.checked(H200.shared_bytes)


def test_margins_of_layouts() -> None:
    """Of unrolled rows the gather-GEMM's model hopes but in channels_last without a stride."""
    p = parse_layer("48,24,3,bias=False", "8x48x96x96x96").with_(precision="tf32")
    strided = parse_layer("32,64,3,stride=2,padding=1,dilation=2,bias=False", "16x32x16x32x32").with_(
        precision="tf32", layout="channels_last", pass_="grad-input"
    )
    for q, unrolled in (
        (p, 1.22),
        (p.with_(layout="channels_last"), 1.0),
        (strided, 1.22),
    ):
        choice = gather.choose(q, H200)
        assert isinstance(choice, gather.Choice) and choice.tiling.unroll != (1, 1, 1)
        assert choice.margin == unrolled
