"""Pixels as rows: the kernel in an interpreter, its packing, its choice, its compiled code, what is launched."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from conftest import EVERY, Stubs, assert_interpreted, precision_by_turns, seeds
from pixels_interpreter import PixelsInterpreter
from test_gather import DTYPES, needs_nvrtc, truth_of
from upconv import planner
from upconv.bench.suites import SUITES, parse_layer
from upconv.cuda import families, jit, pixels
from upconv.cuda.axes import Unfit, any_size, result_shape, source_shape
from upconv.cuda.family import weighed
from upconv.cuda.gpu import A100, B200, H200
from upconv.cuda.pixels import Tile
from upconv.problem import Precision, Problem, output_length

LAST = "pixels as rows of channels-last tensors are for gradients for the input"
NO_ROOM = "this layer's weights leave no room for a ring of planes in shared memory, or its sums in registers"


def draw_problem(rng: random.Random) -> Problem:
    """A small channels-last layer's gradient for the input."""
    rank = rng.choice((2, 2, 3))
    kernel = [rng.choice((1, 2, 3, 3, 4, 5)) for _ in range(rank)]
    stride = [rng.choice((1, 2, 2, 3, 5)) for _ in range(rank)]
    dilation = [rng.choice((1, 1, 2, 3)) for _ in range(rank)]
    size = [rng.choice((1, 3, 8, 9, 20) if axis else (1, 2, 5)) for axis in range(3 - rank, 3)]
    axes = list(zip(size, kernel, stride, dilation))
    padding = [rng.randint(0, min((output_length(n, k, s, 0, 0, e) - 1) // 2, (k - 1) * e)) for n, k, s, e in axes]
    output_padding = [rng.randrange(max(s, e)) for s, e in zip(stride, dilation)]
    precision: Precision = rng.choice(("tf32", "fp16", "bf16"))
    return Problem.make(
        rng.randint(1, 3), rng.choice((1, 7, 8, 24)), rng.choice((8, 16, 40)), size, kernel, stride, padding,
        output_padding, dilation, dtype=DTYPES[precision], precision=precision, layout="channels_last",
        pass_="grad-input",
    )  # fmt: skip


def check(t: Tile, p: Problem, seed: int, blocks: int) -> None:
    """The interpreted kernel stores every result once, and what it stores is the gradient, in float64."""
    numbers = np.random.default_rng(seed)
    g, w = numbers.standard_normal(source_shape(p)), numbers.standard_normal(p.weight_shape)
    interpreter = PixelsInterpreter(t)
    packed = interpreter.pack(w)
    last = np.ascontiguousarray(np.moveaxis(w, 1, -1))
    np.testing.assert_array_equal(interpreter.pack(last, w.shape[1]), packed)
    np.testing.assert_array_equal(interpreter.boxed(last), packed)
    out, stores = interpreter(p, g, packed, blocks)
    assert_interpreted(out, stores, truth_of(p, g, w, None))


@pytest.mark.parametrize("seed", seeds(4, 8))
def test_random_tiles_compute_their_layers(seed: int) -> None:
    rng = random.Random(seed)
    done = 0
    while done < 20:
        p = draw_problem(rng)
        every = list(pixels.candidates(p, H200)) if pixels.refusal(p, H200) is None else []
        if not every:
            continue
        t = rng.choice(every)
        try:
            check(t, p, done, min(rng.choice((1, 2, 7, 132)), t.tiles(p)))
        except AssertionError as error:
            raise AssertionError(f"{p}, {p.precision}: {error}\n{t}") from error
        done += 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PLANES_W", "{0, 0, 0, 0}"),
        ("PLANES_H", "{-1, -1, -1, -1}"),
        ("PLANES_FIRST", "{0, 1, 2, 3, 9}"),
        ("TAP_ROWS", "{0, 0, 0, 0, 0, 0, 0, 0, 0}"),
        ("TAP_INDICES", "{0, 1, 2, 3, 4, 5, 6, 7, 8}"),
        ("PLANES_PITCH", "{9, 9, 9, 9}"),
        ("STEP_H", 1),
        ("TILE_W", 8),
        ("CK", 8),
    ],
)
def test_the_interpreter_notices_a_wrong_plan(name: str, value: int | str) -> None:
    p = Problem.make(
        2, 8, 16, (9, 20), 3, 2, 1, precision="tf32", layout="channels_last", pass_="grad-input"
    )  # fmt: skip
    t = next(t for t in pixels.candidates(p, H200) if t.sub_w == 8 and t.shape == (1, 8, 16))
    numbers = np.random.default_rng(0)
    g, w = numbers.standard_normal(source_shape(p)), numbers.standard_normal(p.weight_shape)
    assert str(t.macros()[name]) != str(value)
    interpreter = PixelsInterpreter(t, t.macros() | {name: value})
    try:
        out, stores = interpreter(p, g, interpreter.pack(w), 4)
    except (AssertionError, IndexError, ValueError):
        return
    assert not ((stores == 1).all() and np.allclose(out, truth_of(p, g, w, None).numpy())), name


def test_planes_have_every_tap_once() -> None:
    """Those of one plane are whole steps apart, so that shifts of one box are all that they read."""
    rng = random.Random(0)
    for _ in range(200):
        p = draw_problem(rng)
        found = pixels.planes(p)
        assert sorted(index for plane in found for index, _ in plane.taps) == list(range(p.taps))
        lead = 3 - p.rank
        for plane in found:
            for index, shift in plane.taps:
                k = np.unravel_index(index, (1,) * lead + p.kernel)
                for axis in range(3):
                    step, pad, dilation = (
                        (1, 0, 1)
                        if axis < lead
                        else (p.stride[axis - lead], p.padding[axis - lead], p.dilation[axis - lead])
                    )
                    assert plane.first[axis] + shift[axis] * step == k[axis] * dilation - pad
                    assert 0 <= shift[axis] <= plane.halo[axis]
            assert all(any(shift[axis] == plane.halo[axis] for _, shift in plane.taps) for axis in range(3))


def test_packed_weights_are_shared_only_where_they_are_the_same(stubs: Stubs) -> None:
    """A weight may serve layers of several strides; kept packings go by its shape and what `packing` says."""
    weight = np.random.default_rng(0).standard_normal((8, 16, 3, 3))
    layer = Problem.make(1, 8, 16, (20, 20), 3, 2, 1, precision="tf32", layout="channels_last", pass_="grad-input")
    packed: dict[object, np.ndarray] = {}
    different = 0
    for stride, dilation in (((1, 2), 1), ((2, 2), 1), ((3, 2), 1), ((2, 1), 1), ((2, 2), 2), ((4, 3), 3)):
        p = layer.with_(stride=stride, dilation=(dilation, dilation))
        for t in pixels.candidates(p, H200):
            key = pixels.Choice(t, p, H200, 0.0, "").prepare(0).packing
            ours = PixelsInterpreter(t).pack(weight)
            np.testing.assert_array_equal(packed.setdefault(key, ours), ours)
            different += any(not np.array_equal(one, ours) for one in packed.values())
    assert different and len(packed) < 20


@pytest.mark.parametrize(
    ("layer", "size", "settings", "reason"),
    [
        ("16,16,3,stride=2", "1x16x8x8", {"layout": "nchw"}, LAST),
        ("16,16,3,stride=2", "1x16x8x8", {"pass_": "fwd"}, LAST),
        ("16,16,3,stride=2,groups=2", "1x16x8x8", {}, "the kernel knows no groups"),
        ("16,16,3,stride=9", "1x16x8x8", {}, "boxes take steps of at most 8 pixels"),
        ("16,6,3,stride=2", "1x16x8x8", {}, "boxes want pixels of whole 16 bytes"),
        ("16,16,1", "1x16x8x8", {}, "of one tap there is nothing that the gather-GEMM would read twice"),
        (
            "300,16,3,stride=2", "1x300x8x8", {},
            "300 channels of the result are more than the 256 columns of an instruction",
        ),
        ("8,8,8,stride=8", "1x8x8x8x8", {}, "taps read 512 planes, more than the kernel's 64"),
        ("16,16,3,stride=2", "1x16x8x8", {"precision": "ieee"}, "precision ieee is none of the kernel's"),
        ("256,256,3,stride=2", "1x256x8x8", {}, NO_ROOM),
    ],
)  # fmt: skip
def test_refusals_are_sentences(layer: str, size: str, settings: dict[str, str], reason: str) -> None:
    p = parse_layer(f"{layer},bias=False", size)
    p = p.with_(**{"precision": "tf32", "pass_": "grad-input", "layout": "channels_last", **settings})
    assert pixels.choose(p, H200) == reason


def test_other_gpus_and_exported_files_have_none() -> None:
    p = parse_layer("16,16,3,stride=2,bias=False", "1x16x8x8")
    p = p.with_(precision="tf32", pass_="grad-input", layout="channels_last")
    for gpu in (A100, B200):
        assert pixels.choose(p, gpu) == "pixels as rows want both operands by descriptors, which wgmma alone takes"
    assert isinstance(families.choose(p, H200)["pixels"], pixels.Choice)
    assert families.choose(p, H200, general=True)["pixels"] == "exported files have no host code for pixels as rows"


def layer_of(name: str, precision: Precision) -> Problem:
    (layer,) = {case.problem for cases in SUITES.values() for case in cases if case.name == name}
    return layer.with_(dtype=DTYPES[precision], precision=precision, layout="channels_last", pass_="grad-input")


@pytest.mark.parametrize(
    ("name", "precision"), [("kb73", "tf32"), ("kb73", "bf16"), ("kb81", "tf32"), ("kb70", "tf32"), ("kb70", "bf16")]
)
def test_what_has_few_channels_comes_from_pixels(name: str, precision: Precision) -> None:
    p = layer_of(name, precision)
    found = planner.select(p, planner.Device("cuda", gpu=H200))
    assert found.name == "pixels" and isinstance(found.choice, pixels.Choice)
    assert f"pixels as rows, channels last: wgmma {precision}, tile " in found.candidates[0].reason
    others = [c for family, c in families.choose(p, H200).items() if family != "pixels"]
    assert all(weighed(found.choice) < weighed(c) for c in others if not isinstance(c, str))
    t, tiles = found.choice.tile, found.choice.tile.tiles(p)
    assert t.shared_bytes <= H200.shared_bytes and 66 < found.choice.grid <= 132
    assert -(-tiles // found.choice.grid) == -(-tiles // 132), "as soon done as by all multiprocessors"


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "tf32") for name in ("kb57", "kb65", "kb78", "dcgan1", "nnunet2")), ("unet4", "bf16")],
)
def test_what_multiplies_most_or_gains_nothing_stays_with_the_gather_gemm(name: str, precision: Precision) -> None:
    assert planner.select(layer_of(name, precision), planner.Device("cuda", gpu=H200)).name == "gather"


def test_what_registers_and_shared_memory_cannot_hold_is_unfit() -> None:
    layer = any_size(layer_of("kb73", "tf32"))
    for t, reason in (
        (Tile(layer, (4, 8, 16), 8, 32, 3, 2), "128 sums are more than 104 registers"),
        (Tile(layer, (1, 2, 256), 64, 32, 2, 2), "boxes traverse at most 256 elements along a dimension"),
        (Tile(layer, (4, 8, 8), 8, 32, 2, 1), "a stage is given back while the next is read"),
        (Tile(layer, (4, 8, 8), 8, 32, 2, 3), "the tile takes .* bytes of shared memory, the device has 232448"),
    ):
        with pytest.raises(Unfit, match=reason):
            t.checked(H200.shared_bytes)


def test_registers_are_no_more_than_a_block_begins_with() -> None:
    """`setmaxnreg` waits for registers that nobody gives back."""
    for consumers, (producer, consumer) in pixels._REGISTERS.items():
        begins = 65536 // (128 + 128 * consumers) // 8 * 8 * (128 + 128 * consumers)
        assert 128 * producer + 128 * consumers * consumer <= begins and producer % 8 == consumer % 8 == 0


def test_whole_lines_are_promoted_where_all_pixels_are_read() -> None:
    """Of pixels of two lines, that is: of a kernel smaller than its stride the second may be of no tap."""
    small = Problem.make(1, 16, 64, (64, 64), 2, 3, precision="tf32", layout="channels_last", pass_="grad-input")
    for p, read, promotion in (
        (layer_of("unet4", "tf32"), 1, 256),
        (layer_of("unet4", "bf16"), 1, 128),
        (layer_of("kb81", "tf32"), 9 / 25, 128),
        (layer_of("kb73", "tf32"), 1, 128),
        (small, 4 / 9, 128),
    ):
        t = next(iter(pixels.candidates(p, H200)))
        assert t.read == pytest.approx(read) and t.promotion == promotion, p


def problems() -> list[Problem]:
    layers = (
        layer_of("kb73", "tf32"),
        layer_of("kb81", "tf32"),
        layer_of("kb70", "tf32"),
        layer_of("unet4", "tf32"),
        Problem.make(16, 64, 64, (128, 128), 3, 2, 1, 1, layout="channels_last", pass_="grad-input"),
        Problem.make(2, 33, 24, (70, 70), (2, 5), (2, 3), 1, layout="channels_last", pass_="grad-input"),
    )
    found = [
        p.with_(dtype=DTYPES[each], precision=each) for i, p in enumerate(layers) for each in precision_by_turns(i)
    ]
    return found + [
        layer_of(name, each) for i, name in enumerate(("kb61", "kb77")) for each in precision_by_turns(2 * i + 1)
    ]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p", problems(), ids=lambda p: f"{p} {p.precision}".replace(" ", "-"))
def test_chosen_kernels_compile_without_spills(p: Problem) -> None:
    choice = pixels.choose(p, H200)
    assert isinstance(choice, pixels.Choice)
    types = {"tf32": "f32.tf32.tf32", "bf16": "f32.bf16.bf16", "fp16": "f32.f16.f16"}[p.precision]
    for unit in choice.sources():
        code, text, log = jit.built(unit.source, H200.arch, unit.label)
        found = jit.inspect(code)
        assert set(found) == {"pixels", "pack", *(("pack_float",) if p.dtype.itemsize == 2 else ())}
        assert all(local == 0 for _, local, _ in found.values()), choice.summary
        assert set(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k\d+\." + re.escape(types), text)) == {
            str(choice.tile.columns)
        }
        assert "cp.async.bulk.tensor.5d" in text and jit.serialised(log) is None


@needs_nvrtc
@pytest.mark.slow
def test_no_tile_s_instructions_are_serialised() -> None:
    """ptxas does that where sums are copied between loops, for some tiles only."""
    rng = random.Random(0)
    for name in ("kb73", "kb81"):
        for t in rng.sample(list(pixels.candidates(layer_of(name, "tf32"), H200)), 8 if EVERY else 4):
            code, _, log = jit.built(jit.source("pixels.cu", t.macros()), H200.arch, str(t.shape))
            assert jit.serialised(log) is None, t
            assert all(local == 0 for _, local, _ in jit.inspect(code).values()), t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_launched(dtype: torch.dtype, stubs: Stubs) -> None:
    """Weights contiguous are packed, channels-last ones come by boxes; what begins off 16 bytes is copied."""
    p = Problem.make(
        2, 8, 16, (9, 17), (3, 5), 2, 1, dtype=dtype, layout="channels_last", pass_="grad-input",
        precision="tf32" if dtype is torch.float32 else "bf16",
    )  # fmt: skip
    choice = pixels.choose(p, H200)
    assert isinstance(choice, pixels.Choice)
    prepared, t = choice.prepare(0), choice.tile
    weight = torch.randn(p.weight_shape, dtype=dtype)
    last = weight.contiguous(memory_format=torch.channels_last)
    grad, out = (
        torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
        for shape in (source_shape(p), result_shape(p))
    )
    packed = stubs.assert_packs_beside_boxes(prepared, weight, t.packed_words, t.pack_blocks)
    maps = (grad.data_ptr(),) * 16 * len(t.boxes)
    prepared.run(grad, packed, None, out, fresh=True)
    assert stubs.pop() == ("pixels", choice.grid, True, (packed.data_ptr(), out.data_ptr(), *t.arguments(p), *maps))
    prepared.run(grad, last, None, out, fresh=True)
    boxed = (last.data_ptr(), out.data_ptr(), *t.arguments(p), *maps, *(last.data_ptr(),) * 16)
    assert stubs.pop() == ("pixels", choice.grid, False, boxed)
    off = torch.empty(grad.numel() + 1, dtype=dtype)[1:].as_strided(grad.shape, grad.stride(), 1)
    prepared.run(off, packed, None, out, fresh=True)
    assert stubs.encoded[-1] != off.data_ptr() and stubs.encoded[-1] % 16 == 0
    assert stubs.pop()[2] is False, "it does not begin beside the copy"


def test_sizes_share_kernels() -> None:
    """Kernels go by the tile alone: a layer's 27 sizes share nine at most."""
    layer = layer_of("kb73", "tf32")
    sizes = [(d, h, w) for d in (8, 17, 32) for h in (20, 33, 64) for w in (24, 65, 130)]
    found = [pixels.choose(layer.with_(size=size), H200) for size in sizes]
    sources = {c.sources()[0].source for c in found if isinstance(c, pixels.Choice)}
    assert len(sources) <= 9 and not any(isinstance(c, str) for c in found)
