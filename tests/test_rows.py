"""Rows as they lie: the kernel in an interpreter, its packing, its choice, its compiled code, what is launched."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from conftest import Stubs, assert_interpreted, precision_by_turns, seeds
from rows_interpreter import RowsInterpreter
from test_gather import DTYPES, needs_nvrtc, truth_of
from upconv import planner
from upconv.bench.suites import SUITES, parse_layer
from upconv.cuda import families, jit, rows
from upconv.cuda.axes import Unfit, any_size, result_shape, source_shape
from upconv.cuda.family import weighed
from upconv.cuda.gpu import A100, B200, H200
from upconv.cuda.rows import Rows
from upconv.problem import Precision, Problem, output_length

NO_ROOM = "this layer's weights leave no room for a ring of rows in shared memory, or its sums in registers"
STRIDES = "the kernel is for strides along the width, without groups or dilation"


def draw_problem(rng: random.Random) -> Problem:
    """A small strided 3-D layer's gradient for the input."""
    kernel = rng.choice((1, 2, 3, 3, 4, 5)), rng.choice((1, 2, 3, 3, 4)), rng.choice((1, 2, 3, 3, 4, 5))
    stride = rng.choice((1, 2, 2, 3)), rng.randint(1, min(kernel[1], 3)), rng.choice((2, 2, 3))
    size = rng.randint(1, 5), rng.randint(1, 9), rng.choice((1, 3, 8, 13, 31, 66, 70))
    axes = list(zip(size, kernel, stride))
    padding = tuple(rng.randint(0, min((output_length(n, k, s, 0, 0, 1) - 1) // 2, k)) for n, k, s in axes)
    output_padding = tuple(rng.randrange(s) for s in stride)
    precision: Precision = rng.choice(("tf32", "fp16", "bf16"))
    return Problem.make(
        rng.randint(1, 3), rng.choice((1, 3, 8, 11)), rng.choice((1, 5, 8, 17, 40)), size, kernel, stride, padding,
        output_padding, dtype=DTYPES[precision], precision=precision, pass_="grad-input",
    )  # fmt: skip


def check(s: Rows, p: Problem, seed: int, blocks: int, multiprocessors: int, address: int) -> None:
    """The interpreted kernel stores every result once, and what it stores is the gradient, in float64."""
    numbers = np.random.default_rng(seed)
    g, w = numbers.standard_normal(source_shape(p)), numbers.standard_normal(p.weight_shape)
    interpreter = RowsInterpreter(s)
    packed = interpreter.pack(w)
    last = np.ascontiguousarray(np.moveaxis(w, 1, -1))
    np.testing.assert_array_equal(interpreter.pack(last, w.shape[1]) if w.shape[1] > 1 else packed, packed)
    out, stores = interpreter(p, g, packed, blocks, multiprocessors, address)
    assert_interpreted(out, stores, truth_of(p, g, w, None))


@pytest.mark.parametrize("seed", seeds(3, 6))
def test_random_rows_compute_their_layers(seed: int) -> None:
    rng = random.Random(seed)
    done = 0
    while done < 20:
        p = draw_problem(rng)
        every = list(rows.candidates(p, H200)) if rows.refusal(p, H200) is None else []
        if not every:
            continue
        s, multiprocessors = rng.choice(every), rng.choice((1, 2, 7, 132))
        blocks = min(multiprocessors, int(np.prod(s.counts(p, multiprocessors))))
        try:
            check(s, p, done, blocks, multiprocessors, rng.randrange(s.vec))
        except AssertionError as error:
            raise AssertionError(f"{p}, {p.precision}: {error}\n{s}") from error
        done += 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PAD_D", "(0)"),
        ("PAD_H", "(0)"),
        ("PAD_W", "(0)"),
        ("STEP_W", 1),
        ("STEP_D", 1),
        ("ROW_UNITS", 19),
        ("SLOTS", 1),
    ],
)
def test_the_interpreter_notices_a_wrong_plan(name: str, value: int | str) -> None:
    p = Problem.make(2, 8, 8, (4, 6, 40), 3, 2, 1, precision="tf32", pass_="grad-input")
    s = next(s for s in rows.candidates(p, H200) if s.mb == 1)
    numbers = np.random.default_rng(0)
    g, w = numbers.standard_normal(source_shape(p)), numbers.standard_normal(p.weight_shape)
    assert str(s.macros()[name]) != str(value)
    interpreter = RowsInterpreter(s, s.macros() | {name: value})
    try:
        out, stores = interpreter(p, g, interpreter.pack(w), 4, 4)
    except (AssertionError, IndexError, ValueError):
        return
    assert not ((stores == 1).all() and np.allclose(out, truth_of(p, g, w, None).numpy())), name


def test_a_row_s_neighbour_is_masked() -> None:
    """Without the mask of columns ahead of a row, what its first unit brings beside it would be multiplied."""
    p = Problem.make(1, 8, 8, (3, 4, 20), 3, 2, 1, precision="tf32", pass_="grad-input")
    s = next(iter(rows.candidates(p, H200)))
    numbers = np.random.default_rng(0)
    g, w = numbers.standard_normal(source_shape(p)), numbers.standard_normal(p.weight_shape)
    interpreter = RowsInterpreter(s)
    setattr(interpreter, "masked", lambda values, column, columns: values)  # noqa: B010
    out, _ = interpreter(p, g, interpreter.pack(w), 2, 2)
    assert not np.allclose(out, truth_of(p, g, w, None).numpy())


def test_packed_weights_are_shared_only_where_they_are_the_same(stubs: Stubs) -> None:
    """A weight may serve layers of several strides; kept packings go by its shape and what `packing` says."""
    weight = np.random.default_rng(0).standard_normal((8, 16, 3, 3, 3))
    layer = Problem.make(1, 8, 16, (6, 6, 20), 3, 2, 1, precision="tf32", pass_="grad-input")
    packed: dict[object, np.ndarray] = {}
    different = 0
    for stride in ((1, 2, 2), (2, 2, 2), (3, 2, 2), (2, 1, 3), (2, 3, 2)):
        p = layer.with_(stride=stride)
        for s in rows.candidates(p, H200):
            key = rows.Choice(s, p, H200, 0.0, "").prepare(0).packing
            ours = RowsInterpreter(s).pack(weight)
            np.testing.assert_array_equal(packed.setdefault(key, ours), ours)
            different += any(not np.array_equal(one, ours) for one in packed.values())
    assert different and len(packed) < 20


@pytest.mark.parametrize(
    ("layer", "size", "settings", "reason"),
    [
        (
            "16,16,3,stride=2", "1x16x8x8", {},
            "rows as they lie are for gradients for the input of 3-D layers in NCDHW",
        ),
        (
            "16,16,3,stride=2", "1x16x8x8x8", {"layout": "channels_last"},
            "rows as they lie are for gradients for the input of 3-D layers in NCDHW",
        ),
        (
            "16,16,3,stride=2", "1x16x8x8x8", {"pass_": "fwd"},
            "rows as they lie are for gradients for the input of 3-D layers in NCDHW",
        ),
        ("16,16,3", "1x16x8x8x8", {}, STRIDES),
        ("16,16,3,stride=2,groups=2", "1x16x8x8x8", {}, STRIDES),
        ("16,16,3,stride=2,dilation=2", "1x16x8x8x8", {}, STRIDES),
        ("16,16,3,stride=2", "1x16x8x8x8", {"precision": "ieee"}, "precision ieee is none of the kernel's"),
        (
            "16,16,(3,1,3),stride=2", "1x16x8x8x8", {},
            "the kernel reads all rows, of which a kernel shorter than its stride leaves some out",
        ),
        ("128,64,3,stride=2", "1x128x8x8x8", {}, NO_ROOM),
    ],
)  # fmt: skip
def test_refusals_are_sentences(layer: str, size: str, settings: dict[str, str], reason: str) -> None:
    p = parse_layer(f"{layer},bias=False", size).with_(**{"precision": "tf32", "pass_": "grad-input", **settings})
    assert rows.choose(p, H200) == reason


def test_other_gpus_and_exported_files_have_none() -> None:
    p = parse_layer("16,16,3,stride=2,bias=False", "1x16x8x8x8").with_(precision="tf32", pass_="grad-input")
    for gpu in (A100, B200):
        assert rows.choose(p, gpu) == "rows as they lie are multiplied by wgmma alone"
    assert isinstance(families.choose(p, H200)["rows"], rows.Choice)
    assert families.choose(p, H200, general=True)["rows"] == "exported files have no host code for rows as they lie"


def test_counts_of_32_bits_are_not_exceeded() -> None:
    p = Problem.make(2, 8, 8, (8, 8, 8), 3, 2, 1, precision="tf32", pass_="grad-input")
    reason = "the kernel counts a channel's elements, and the images' channels, in 32 bits"
    for more in (p.with_(size=(1024, 1024, 1024)), p.with_(batch=2**28, size=(1, 1, 2))):
        assert rows.choose(more, H200) == reason
    for fewer in (p.with_(size=(512, 512, 512)), p.with_(batch=2**28 - 1, size=(1, 1, 2))):
        found = rows.choose(fewer, H200)
        assert isinstance(found, rows.Choice) and found.rows.arguments(fewer, 132)[-1] <= 2**30


def kb73(precision: Precision) -> Problem:
    (layer,) = {case.problem for cases in SUITES.values() for case in cases if case.name == "kb73"}
    return layer.with_(dtype=DTYPES[precision], precision=precision, pass_="grad-input")


@pytest.mark.parametrize(
    ("precision", "tile"),
    [("tf32", "tile 2x128 (HxW), walks of 32 slices, 64 columns, ring of 7 rows of 16 channels"), ("bf16", "tile ")],
)
def test_kb73_s_gradient_comes_from_rows(precision: Precision, tile: str) -> None:
    found = planner.select(kb73(precision), planner.Device("cuda", gpu=H200))
    assert found.name == "rows" and isinstance(found.choice, rows.Choice)
    assert f"rows as they lie: wgmma {precision}, {tile}" in found.candidates[0].reason
    others = [c for name, c in families.choose(kb73(precision), H200).items() if name != "rows"]
    assert all(weighed(found.choice) < weighed(c) for c in others if not isinstance(c, str))
    assert 100 < found.choice.grid <= 132 and found.choice.rows.shared_bytes <= H200.shared_bytes


def test_what_registers_and_shared_memory_cannot_hold_is_unfit() -> None:
    layer = any_size(kb73("tf32"))
    for s, reason in (
        (Rows(layer, 4, 2, 8, 14), "64 sums and fragments in 24 registers are more than 64"),
        (Rows(layer, 2, 2, 8, 5), "the ring has fewer units than a tile's slice, 5, and one"),
        (Rows(layer, 2, 2, 16, 8), "the tile takes .* bytes of shared memory, the device has 232448"),
    ):
        with pytest.raises(Unfit, match=reason):
            s.checked(H200.shared_bytes)


def test_no_segment_is_empty() -> None:
    for slices in range(1, 71):
        for walks in (1, 20, 128, 133):
            for multiprocessors in (1, 108, 132):
                found = rows._segments(walks, slices, 2, multiprocessors)
                assert -(-slices // found) * (found - 1) < slices


def problems() -> list[Problem]:
    layers = (
        kb73("tf32"),
        Problem.make(2, 16, 32, (48, 48, 48), 4, 2, 1, pass_="grad-input"),
        Problem.make(2, 8, 32, (24, 32, 40), 5, 3, 1, pass_="grad-input"),
        Problem.make(2, 24, 48, (32, 96, 96), (1, 2, 2), (1, 2, 2), pass_="grad-input"),
    )
    return [p.with_(dtype=DTYPES[each], precision=each) for i, p in enumerate(layers) for each in precision_by_turns(i)]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("p", problems(), ids=lambda p: f"{p} {p.precision}".replace(" ", "-"))
def test_chosen_kernels_compile_without_spills(p: Problem) -> None:
    choice = rows.choose(p, H200)
    assert isinstance(choice, rows.Choice)
    (unit,) = choice.sources()
    code, text, log = jit.built(unit.source, H200.arch, unit.label)
    found = jit.inspect(code)
    assert set(found) == {"rows", "pack", *(("pack_float",) if p.dtype.itemsize == 2 else ())}
    assert all(local == 0 for _, local, _ in found.values()), choice.summary
    types = {"tf32": "f32.tf32.tf32", "bf16": "f32.bf16.bf16", "fp16": "f32.f16.f16"}[p.precision]
    s = choice.rows
    met = {len(range(f, p.kernel[0], p.stride[0])) for f in range(p.stride[0])} - {0}
    assert set(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k\d+\." + re.escape(types), text)) == {
        str(slots * s.slot_columns) for slots in met
    }
    assert "cp.async.cg" in text and jit.serialised(log) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_launched(dtype: torch.dtype, stubs: Stubs) -> None:
    """Weights contiguous, channels-last, strided and rounded on their way; a source off 16 bytes as it is."""
    p = Problem.make(2, 8, 5, (4, 6, 17), (3, 3, 5), 2, 1, dtype=dtype, pass_="grad-input")
    p = p.with_(precision="tf32" if dtype is torch.float32 else "bf16")
    choice = rows.choose(p, H200)
    assert isinstance(choice, rows.Choice)
    prepared, s = choice.prepare(0), choice.rows
    weight = torch.randn(p.weight_shape, dtype=dtype)
    packed = stubs.assert_packs(prepared, weight, s.packed_words, s.pack_blocks)
    grad, out = (torch.randn(shape, dtype=dtype) for shape in (source_shape(p), result_shape(p)))
    off = torch.empty(grad.numel() + 1, dtype=dtype)[1:].view(grad.shape)
    for given in (grad, off):
        prepared.run(given, packed, None, out, fresh=True)
        pointers = given.data_ptr(), packed.data_ptr(), out.data_ptr()
        assert stubs.pop() == ("rows", choice.grid, True, (*pointers, *s.arguments(p, 132)))
    if dtype is not torch.float32:
        packed = prepared.pack(weight.float())
        name, grid, _, args = stubs.pop()
        assert (name, grid, args[1:]) == ("pack_float", s.pack_blocks, (packed.data_ptr(), 1, 0, 0))


def test_sizes_share_kernels() -> None:
    """Kernels go by the tile alone: a layer's 27 sizes share six at most."""
    layer = kb73("tf32")
    sizes = [(d, h, w) for d in (8, 17, 32) for h in (20, 33, 64) for w in (24, 65, 130)]
    found = [rows.choose(layer.with_(size=size), H200) for size in sizes]
    sources = {c.sources()[0].source for c in found if isinstance(c, rows.Choice)}
    assert len(sources) <= 6 and not any(isinstance(c, str) for c in found)
