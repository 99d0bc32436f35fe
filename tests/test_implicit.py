"""The implicit GEMM (what it computes: test_emulated.py): its choice, its compiled code, what is launched."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from conftest import EVERY, Stubs, needs_nvrtc, precision_by_turns
from drawn import DTYPES
from upconv import planner
from upconv.bench.suites import SUITES, parse_layer
from upconv.cuda import families
from upconv.cuda.axes import any_size, result_shape, source_shape
from upconv.cuda.compile import elf, jit, nvrtc
from upconv.cuda.cost import Cost
from upconv.cuda.family import weighed
from upconv.cuda.gpu import A100, B200, H200, Gpu
from upconv.cuda.pixels import implicit
from upconv.cuda.pixels.implicit import Tile
from upconv.cuda.rearrange import relayout
from upconv.problem import Pass, Precision, Problem

LAST = "the implicit GEMM is for forwards and gradients for the input in channels_last"


def tiles_of(p: Problem) -> list[Tile]:
    """All candidates of a problem, clusters too."""
    every = implicit.candidates(any_size(p), H200)
    return [t for whole in every for t in (whole, *implicit._clustered(whole, p, H200))]


def layer_of(name: str, precision: Precision) -> Problem:
    (layer,) = {case.problem for cases in SUITES.values() for case in cases if case.name == name}
    return layer.with_(dtype=DTYPES[precision], precision=precision, layout="channels_last", pass_="grad-input")


@pytest.mark.parametrize(
    ("layer", "size", "settings", "reason"),
    [
        ("16,16,3,stride=2", "1x16x8x8", {"layout": "nchw"}, LAST),
        ("16,16,3,stride=2", "1x16x8x8", {"pass_": "grad-weight"}, LAST),
        ("16,16,3,stride=2,groups=2", "1x16x8x8", {}, "the kernel knows no groups"),
        ("16,16,3,stride=9", "1x16x8x8", {}, "boxes take steps of at most 8 pixels"),
        ("8,32,2,stride=32", "1x8x8x8", {"pass_": "fwd"}, "1024 phases are more than the 512 of the kernel's tables"),
        ("16,6,3,stride=2", "1x16x8x8", {}, "boxes want pixels of whole 16 bytes"),
        ("8,8,9,stride=8", "1x8x8x8x8", {}, "729 taps are more than the 512 of the kernel's tables"),
        ("16,16,3,stride=2", "1x16x8x8", {"precision": "ieee"}, "precision ieee is none of the kernel's"),
    ],
)
def test_refusals_are_sentences(layer: str, size: str, settings: dict[str, str], reason: str) -> None:
    p = parse_layer(f"{layer},bias=False", size)
    p = p.with_(**{"precision": "tf32", "pass_": "grad-input", "layout": "channels_last", **settings})
    assert implicit.choose(p, H200) == reason


def test_forwards_take_any_stride() -> None:
    p = parse_layer("16,32,3,stride=9,bias=False", "1x16x8x8").with_(precision="tf32", layout="channels_last")
    assert isinstance(implicit.choose(p, H200), implicit.Choice)


def test_other_gpus_and_exported_files_have_none() -> None:
    p = parse_layer("16,16,3,stride=2,bias=False", "1x16x8x8")
    p = p.with_(precision="tf32", pass_="grad-input", layout="channels_last")
    for gpu in (A100, B200):
        assert implicit.choose(p, gpu) == "pixels as rows are multiplied by wgmma alone"
    assert isinstance(families.choose(p, H200)["pixels"], implicit.Choice)
    assert "exported files have no host code for pixels as rows" in families.choose(p, H200, general=True)["pixels"]


@pytest.mark.parametrize(("name", "precision"), [("nnunet", "tf32"), ("nnunet", "bf16"), ("mrcnn", "tf32")])
def test_taps_that_share_nothing_are_multiplied_one_by_one(name: str, precision: Precision) -> None:
    """320 channels by two blocks of 160, and images of 14 x 14 in boxes that leave little of a tile empty."""
    p = layer_of(name, precision)
    found = planner.select(p, planner.Device("cuda", gpu=H200))
    assert found.name == "pixels" and isinstance(found.choice, implicit.Choice)
    assert f"implicit GEMM, channels last: wgmma {precision}, tile of " in found.candidates[0].reason
    others = [c for family, c in families.choose(p, H200).items() if family != "pixels"]
    assert all(weighed(found.choice) < weighed(c) for c in others if not isinstance(c, str))
    t = found.choice.tile
    assert p.in_channels % t.columns == 0
    filled = p.batch * np.prod(p.size) / (t.tiles(p) // t.column_blocks * t.rows)
    assert filled > 0.95 and t.shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
@pytest.mark.parametrize(("name", "precision"), [("kb57", "tf32"), ("unet4", "tf32"), ("unet4", "bf16")])
def test_what_is_shared_or_bound_by_memory_stays_with_others(name: str, precision: Precision, pass_: Pass) -> None:
    p = layer_of(name, precision).with_(pass_=pass_)
    assert planner.select(p, planner.Device("cuda", gpu=H200)).name != "pixels"


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", ["gan3d1", "gan1024", "vit16", "unetB1"])
def test_forwards_of_small_images_and_many_channels(name: str, precision: Precision) -> None:
    p = layer_of(name, precision).with_(pass_="fwd")
    found = planner.select(p, planner.Device("cuda", gpu=H200))
    assert isinstance(found.choice, implicit.Choice)
    phases = found.choice.tile.phases
    assert f"tiles of {len(phases)} phases" in found.choice.summary and len(phases) == np.prod(p.stride)
    assert sorted(tap for phase in phases for tap, _ in phase.taps) == list(range(p.taps))


def test_few_columns_are_not_worth_their_instructions() -> None:
    p = layer_of("fsrcnn", "tf32").with_(pass_="fwd", in_channels=64)
    assert implicit.choose(p, H200) == "of 1 channels a matrix instruction waits for its pixels"


def test_the_order_of_phases() -> None:
    """Of few tiles whose phases differ those of most taps come first; some of a phase lie side by side."""
    few = Problem.make(1, 64, 64, (16, 16), 3, 2, 1, 1, layout="channels_last")
    t = next(iter(implicit.candidates(any_size(few), H200)))
    assert t.steps[0] == 4 * t.steps[-1] > 0 and t.sorted(few, H200) and t.column_blocks == 2
    assert t.arguments(few, H200)[-2] == t.tiles(few) // 8
    heavy = Problem.make(
        4, 256, 128, (4, 16, 16), 4, 2, 1, layout="channels_last"
    )  # whose weights are more than the pixels
    t = next(t for t in implicit.candidates(any_size(heavy), H200) if t.columns == 64)
    assert t.even and not t.sorted(heavy, H200) and t.order(heavy, H200)[0] == 132 // 2
    light = heavy.with_(batch=32)
    assert t.order(light, H200) == (1, 132 // 16)


def steps_of_blocks(t: Tile, p: Problem, gpu: Gpu) -> NDArray[np.int64]:
    """Each block's steps, as the kernel orders tiles."""
    count, of = t.tiles(p), len(t.phases)
    *_, abreast, turn = t.arguments(p, gpu)
    q = np.arange(count) // t.column_blocks
    first = q // (of * abreast) * abreast
    width = np.minimum(abreast, count // (t.column_blocks * of) - first)
    steps = np.array(t.steps)[((q - first * of) // width + first // turn) % of]
    grid = implicit.Choice(t, p, gpu, Cost()).grid
    return np.array([steps[b::grid].sum() for b in range(grid)])


@pytest.mark.parametrize("multiprocessors", [132, 114, 78])
@pytest.mark.parametrize("channels", [128, 256, 512])
@pytest.mark.parametrize(("batch", "size"), [(16, (128, 128)), (16, (28, 28)), (64, (28, 28)), (1, (64, 64, 64))])
def test_blocks_have_as_much_to_do_where_phases_differ(
    batch: int, size: tuple[int, ...], channels: int, multiprocessors: int
) -> None:
    """A block's tiles are of all phases by turns, or those of most taps come first: about what the model counts."""
    gpu = replace(H200, multiprocessors=multiprocessors)
    p = Problem.make(batch, 128, channels, size, 3, 2, 1, 1, layout="channels_last")
    for t in implicit.candidates(any_size(p), gpu):
        if t.rows < 128 or t.columns < 128:  # one of these is chosen
            continue
        each, waves = steps_of_blocks(t, p, gpu), t.tiles(p) / multiprocessors
        counted = implicit._waves(t, p, gpu)[1]
        assert each.max() <= 1.3 * each.mean() or waves < 8, (t, waves, each.max() / each.mean())
        assert 0.7 * each.max() <= counted <= 1.2 * each.max(), (t, waves, counted / each.max())


def test_copies_of_nchw_tensors_may_come_to_it() -> None:
    """512->256 k4 s2 on 4^3 in NCHW: copies in channels_last, and this kernel between them."""
    p = Problem.make(32, 512, 256, (4, 4, 4), 4, 2, 1, precision="tf32", pass_="grad-input")
    choice = planner.select(p, planner.Device("cuda", gpu=H200)).choice
    assert isinstance(choice, relayout.Choice) and isinstance(choice.inner, implicit.Choice)


def test_sums_leave_registers_for_addresses() -> None:
    every = tiles_of(layer_of("nnunet", "tf32"))
    assert max(t.sums for t in every) <= 232 - 56 and max(t.columns for t in every) <= 256
    assert {t.cluster for t in every} == {1, 2} and all(t.stages >= 2 for t in every)


def test_widths_leave_few_columns_empty() -> None:
    assert implicit._widths(320) == (32, 64, 80, 160) and implicit._widths(3) == (8,) and implicit._widths(33) == (40,)
    for result in range(1, 2100, 7):
        widths = implicit._widths(result)
        assert widths and all(w % 8 == 0 and w <= 256 for w in widths)
        assert min(-(-result // w) * w for w in widths) < max(1.04 * result, result + 8 * -(-result // 256)) + 1, result


@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
def test_sizes_share_kernels(pass_: Pass) -> None:
    """Kernels go by the tile alone: a layer's 60 sizes share a dozen at most."""
    layer = layer_of("vae", "tf32").with_(pass_=pass_)
    found = [implicit.choose(layer.with_(batch=n, size=(s, s)), H200) for n in (1, 4, 16, 64) for s in range(2, 62, 4)]
    sources = {c.sources()[0].source for c in found if isinstance(c, implicit.Choice)}
    assert len(sources) <= 12 and not any(isinstance(c, str) for c in found)


def test_kernels_are_of_a_layer_at_any_size() -> None:
    """A new image size asks for no new kernel where the tile is the same."""
    p = layer_of("nnunet", "bf16")
    every = {u.source for u in implicit.Choice(tiles_of(p)[0], p, H200, Cost()).sources()}
    for size in ((5, 6, 7), (1, 1, 1), (40, 3, 9)):
        q = p.with_(size=size, batch=3)
        assert {u.source for u in implicit.Choice(tiles_of(q)[0], q, H200, Cost()).sources()} == every


def problems() -> list[Problem]:
    layers = (
        layer_of("nnunet", "tf32"),
        layer_of("vae", "tf32"),
        Problem.make(128, 256, 128, (4, 4), 3, 2, 1, 1, layout="channels_last", pass_="grad-input"),
        Problem.make(16, 1024, 512, (2, 2), 4, 2, 1, layout="channels_last", pass_="grad-input"),
        Problem.make(2, 33, 24, (70, 70), (2, 5), (2, 3), 1, layout="channels_last", pass_="grad-input"),
        layer_of("gan3d1", "tf32").with_(pass_="fwd"),
        Problem.make(2, 40, 72, (30, 30), (2, 5), (2, 3), 1, layout="channels_last"),
    )
    return [p.with_(dtype=DTYPES[each], precision=each) for i, p in enumerate(layers) for each in precision_by_turns(i)]


def test_boxes_beyond_the_last_channel_cost_the_model() -> None:
    """48 channels in chunks of 32: by 64 no box reaches beyond, though there is more to multiply. On an H100 48->48
    k3 on 8 x 64^3 took 2,660 us, which the model has within 5%; without this it had 1,535."""
    layer = Problem.make(8, 48, 48, (64, 64, 64), 3, precision="tf32", layout="channels_last")
    partial, whole = (implicit.choose(p, H200) for p in (layer, layer.with_(in_channels=64)))
    assert isinstance(partial, implicit.Choice) and isinstance(whole, implicit.Choice)
    assert whole.seconds < 0.7 * partial.seconds
    assert abs(partial.seconds - 2660e-6) < 0.05 * 2660e-6


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p", problems(), ids=lambda p: f"{p} {p.precision}".replace(" ", "-"))
def test_chosen_kernels_compile_without_spills(p: Problem) -> None:
    choice = implicit.choose(p, H200)
    assert isinstance(choice, implicit.Choice)
    types = {"tf32": "f32.tf32.tf32", "bf16": "f32.bf16.bf16", "fp16": "f32.f16.f16"}[p.precision]
    units = choice.sources()
    assert len(units) == 1 + choice.tile.turnable
    packing = ("pack", *(("pack_float",) if p.dtype.itemsize == 2 else ()))
    for unit in units:
        code, text, log = jit.built(unit.source, H200.arch, unit.label)
        found = elf.inspect(code)
        assert set(found) == {choice.entry, *(packing if "pack" in unit.entries else ())}
        assert all(local == 0 for _, local, _ in found.values()), choice.summary
        columns = set(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k\d+\." + re.escape(types), text))
        assert columns == {str(choice.tile.columns)}
        assert "cp.async.bulk.tensor.5d" in text and nvrtc.serialised(log) is None


@needs_nvrtc
@pytest.mark.slow
def test_no_tile_s_instructions_are_serialised() -> None:
    """ptxas does that where sums are copied between loops, for some tiles only; of halves, turns and clusters."""
    rng = random.Random(0)
    for precision in ("tf32", "bf16"):
        p = layer_of("pix4", precision)
        every = tiles_of(p)
        kinds = {(t.halves, t.cluster, t.mb): t for t in rng.sample(every, len(every))}
        assert {cluster for _, cluster, _ in kinds} == {1, 2, 4, 8}
        for t in rng.sample(list(kinds.values()), 6 if EVERY else 3):
            unit = implicit.Choice(t, p, H200, Cost()).sources()[0]
            code, _, log = jit.built(unit.source, H200.arch, unit.label)
            assert nvrtc.serialised(log) is None, t
            assert all(local == 0 for _, local, _ in elf.inspect(code).values()), t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_launched(dtype: torch.dtype, stubs: Stubs) -> None:
    """Weights contiguous are packed, channels-last ones read as they lie; what begins off 16 bytes is copied."""
    p = Problem.make(
        2, 40, 16, (9, 17), (3, 5), 2, 1, dtype=dtype, layout="channels_last", pass_="grad-input",
        precision="tf32" if dtype is torch.float32 else "bf16",
    )  # fmt: skip
    choice = implicit.choose(p, H200)
    assert isinstance(choice, implicit.Choice)
    prepared, t = choice.prepare(0), choice.tile
    weight = torch.randn(p.weight_shape, dtype=dtype)
    last = weight.contiguous(memory_format=torch.channels_last)
    grad, out = (
        torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
        for shape in (source_shape(p), result_shape(p))
    )
    packed = stubs.assert_packs_beside_boxes(prepared, weight, t.packed_words, t.pack_blocks)

    def launched(weights: torch.Tensor, fresh: bool, bias: int = 0) -> tuple[object, ...]:
        maps = *(grad.data_ptr(),) * 16, *(weights.data_ptr(),) * 16
        return "pixels_last", choice.grid, fresh, (out.data_ptr(), bias, *t.arguments(p, H200), *maps)

    prepared.run(grad, packed, None, out, fresh=True)
    assert stubs.pop() == launched(packed, True)
    bias = torch.randn(p.in_channels, dtype=dtype)  # a plain convolution's
    prepared.run(grad, last, bias, out)
    assert prepared.biased and stubs.pop() == launched(last, False, bias.data_ptr())
    off = torch.empty(grad.numel() + 1, dtype=dtype)[1:].as_strided(grad.shape, grad.stride(), 1)
    prepared.run(off, packed, None, out, fresh=True)
    assert stubs.pop()[2] is False, "it does not begin beside the copy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_launched_for_a_forward(dtype: torch.dtype, stubs: Stubs) -> None:
    """Weights are packed; channels-last ones of 16 bits are read as they lie, by a kernel of their own."""
    p = Problem.make(
        2, 48, 128, (9, 17), (3, 4), 2, 1, dtype=dtype, layout="channels_last",
        precision="tf32" if dtype is torch.float32 else "bf16",
    )  # fmt: skip
    t = next(t for t in implicit.candidates(any_size(p), H200) if t.columns == 128)
    choice = implicit.Choice(t, p, H200, Cost())
    prepared, weight = choice.prepare(0), torch.randn(p.weight_shape, dtype=dtype)
    last = weight.contiguous(memory_format=torch.channels_last)
    x, out = (
        torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
        for shape in (p.input_shape, p.output_shape)
    )
    bias = torch.randn(p.out_channels, dtype=dtype)

    def launched(weights: torch.Tensor, fresh: bool, at_bias: int) -> tuple[object, ...]:
        maps = *(x.data_ptr(),) * 16, *(weights.data_ptr(),) * 16
        return "pixels_last", choice.grid, fresh, (out.data_ptr(), at_bias, *t.arguments(p, H200), *maps)

    if dtype is torch.float32:
        assert not t.turnable
        packed = stubs.assert_packs(prepared, weight, t.packed_words, t.pack_blocks)
    else:
        assert t.turnable and not prepared.loaded
        packed = stubs.assert_packs_beside_boxes(prepared, weight, t.packed_words, t.pack_blocks)
        prepared.run(x, last, bias, out)
        assert stubs.pop() == launched(last, False, bias.data_ptr())
        rounded = prepared.pack(weight.float(), bias.float())  # behind the weights
        stubs.pop()
        prepared.run(x, rounded, bias.float(), out)
        assert stubs.pop() == launched(rounded, False, rounded.data_ptr() + 4 * t.packed_words)
    prepared.run(x, packed, bias, out, fresh=True)
    assert stubs.pop() == launched(packed, True, bias.data_ptr())
    assert prepared.loaded or dtype is not torch.float32


def test_every_problem_that_the_suites_give_it_is_served() -> None:
    """Each case in channels_last has a tile, or a reason that has nothing to do with its size."""
    reasons = set()
    for case in SUITES["cuda"]:
        if case.problem.rank > 1:
            found = implicit.choose(layer_of(case.name, "bf16"), H200)
            reasons |= {found} if isinstance(found, str) else set()
    assert reasons <= {"the kernel knows no groups", "boxes want pixels of whole 16 bytes"}
    assert result_shape(layer_of("nnunet", "bf16"))[1] == 320
