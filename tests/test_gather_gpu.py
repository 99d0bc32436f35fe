"""The gather-GEMM's tilings on a GPU, each against the float64 reference: what the interpreter leaves out.

That is the rings and barriers, the pass through shared memory, the order of registers, and the stores of the epilogue
for every width of a run and every alignment of a row.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import upconv
from conftest import HOPPER, assert_accurate, tf32_magnitude
from upconv import reference
from upconv.bench.timing import precision_flags
from upconv.cpu import memory_format
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.compile.launch import Launcher
from upconv.cuda.gemm import gather, gather_search, tiling_weights
from upconv.cuda.gemm.shuffle import ways
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import gpu
from upconv.cuda.prepared import Prepared
from upconv.problem import Pass, Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PRECISIONS = {
    "tf32": torch.float32,
    "ieee": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# batch, channels in and out, size, kernel, stride, padding, output_padding, dilation, groups: rows of every alignment
LAYERS = {
    "k3": (2, 64, 64, (20, 72), 3),
    "k3 odd": (2, 40, 70, (21, 75), 3),
    "k3 even": (3, 24, 64, (19, 70), (3, 5), 1, (1, 2)),
    "k4s2": (2, 48, 130, (18, 24), 4, 2, 1),
    "k2s2": (2, 64, 136, (17, 23), 2, 2),
    "k3s2": (2, 32, 64, (18, 33), 3, 2, 1, 1),
    "s23 d21 g4": (2, 32, 64, (18, 40), (3, 5), (2, 3), (1, 2), 0, (2, 1), 4),
    "s5 d2": (2, 16, 64, (9, 30), 3, 5, 1, 0, 2),
    "32 rows": (2, 32, 32, (20, 66), (3, 7), 1, (1, 3)),
    "16 rows": (2, 20, 13, (20, 66), 3),
    "1-D": (3, 64, 128, (700,), 5, 1, 0, 0, 3),
    "1-D s8": (2, 64, 64, (101,), 16, 8, 4),
    "3-D": (2, 24, 48, (6, 9, 26), 3),
    "3-D s2": (2, 32, 32, (5, 9, 35), 3, 2, 1),
    "k1s2": (2, 32, 64, (19, 70), 1, 2),
    "s2 d2": (2, 64, 32, (17, 66), 3, 2, 1, 1, 2),
    "8x8 whole": (9, 64, 96, (8, 8), 4, 2, 1),
    "4x16 whole": (5, 40, 64, (4, 16), (3, 4), (1, 2), 1),
    "16x16 whole": (3, 24, 32, (16, 16), 3, 1, 1),
    "1-D whole": (6, 72, 64, (32,), 16, 8, 4),
    "8x8 g3": (5, 120, 96, (8, 8), 4, 2, 1, 0, 1, 3),
    "8x8 g4 whole": (5, 128, 96, (8, 8), 3, 1, 1, 0, 1, 4),
    "3-D whole": (3, 32, 40, (4, 8, 8), 3, 1, 1),
    "rows at 4 places": (2, 32, 48, (20, 33), (3, 5), 1, (1, 2)),
    "rows at 2 places": (2, 24, 40, (18, 34), 3),
    "s2 rows at 2 places": (2, 16, 64, (9, 33), (3, 5), (2, 2), (1, 3)),
    "1-D odd": (2, 64, 32, (303,), 5, 1, 2),
    "3-D odd": (1, 24, 32, (6, 16, 17), 3, 1, 1),
    "wide s2": (2, 136, 64, (18, 20), 4, 2, 1),
    "few": (3, 56, 1, (18, 37), 9, 3, 4, 2),
    "few whole": (5, 64, 3, (16, 16), 4, 2, 1),
    "few odd": (2, 17, 5, (9, 21), (5, 3), (2, 3), (1, 2), (0, 1)),
    "1-D few": (2, 40, 4, (700,), 8, 4, 2),
    "3-D few": (2, 24, 2, (5, 6, 20), (4, 2, 3), 2, (1, 0, 1), (0, 0, 1)),
    "3-D s2 d2": (2, 16, 24, (4, 6, 19), (3, 2, 3), 2, 1, 0, 2),
    "3-D s2 d2 narrow": (2, 16, 72, (3, 5, 9), 3, 2, 1, 0, 2),
    "k2s3": (2, 32, 40, (10, 45), 2, 3),
    "k1s2 g2": (2, 32, 32, (10, 66), 1, 2, 0, 1, 1, 2),
    "s3 d2 op": (1, 72, 40, (11, 35), (4, 3), 3, (2, 0), (1, 2), (3, 2)),
}


def _layer(layer: tuple[Any, ...], precision: str, layout: str, pass_: Pass) -> Problem:
    batch, cin, cout, size, *rest = layer
    dtype = PRECISIONS[precision]
    return Problem.make(
        batch, cin, cout, size, *rest, bias=True, dtype=dtype, precision=precision, layout=layout, pass_=pass_  # type: ignore[arg-type]
    )  # fmt: skip


def _truth(p: Problem, source: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The pass's result from operands in float64."""
    if p.pass_ == "fwd":
        forward = (None, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[p.rank]
        assert forward is not None
        return forward(source, weight, bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    transpose = (None, torch.conv1d, torch.conv2d, torch.conv3d)[p.rank]
    assert transpose is not None
    found = transpose(source, weight, None, p.stride, p.padding, p.dilation, p.groups)
    # An output padding beyond the stride gives the convolution positions that no input has.
    return found[(..., *(slice(n) for n in p.size))]


@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("name", list(LAYERS))
def test_tilings(name: str, precision: str, layout: str, pass_: Pass) -> None:
    p = _layer(LAYERS[name], precision, layout, pass_)
    if p.rank == 1 and layout != "nchw":
        pytest.skip("1-D tensors have no channels_last")
    device, chip = torch.device("cuda", 0), gpu(0)
    torch.manual_seed(zlib.crc32(str(p).encode()))
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    memory_format = torch.contiguous_format if layout == "nchw" else formats[p.rank]
    x = torch.randn(source_shape(p), device=device).to(p.dtype).contiguous(memory_format=memory_format)
    weight = (torch.randn(p.weight_shape, device=device) / 8).to(p.dtype)
    bias = torch.randn(p.out_channels, device=device).to(p.dtype) if pass_ == "fwd" else None
    operands = [None if t is None else t.double() for t in (x, weight, bias)]
    truth = _truth(p, *operands)  # type: ignore[arg-type]
    size = _truth(p, *(None if t is None else t.abs() for t in operands))  # type: ignore[arg-type]
    products = source_shape(p)[1] // p.groups * p.taps
    if precision == "tf32":
        size = tf32_magnitude(size, products)
    chosen = gather.choose(p, chip)
    assert not isinstance(chosen, str), chosen
    others = list(gather_search.candidates(p, chip)) + list(gather_search.candidates(p, chip, wgmma=False))
    tilings = [chosen.tiling, *random.Random(zlib.crc32(str(p).encode())).sample(others, min(2, len(others)))]
    tilings += [t for t in others if t.strided_box or t.split == 2][:1]
    tilings += [t for t in others if t.tensor_map and t.classed][:2]
    tilings += [t for t in others if t.strided_box and len(t.bands[1][0]) > 1][:1]
    tilings += [t for t in others if t.continued][:1]
    planewise = [t for t in others if t.planewise]
    tilings += random.Random(2).sample(planewise, min(2, len(planewise)))
    tilings += [t for t in planewise if t.stages_p == 1 and t.continued][:1]
    unpacked = [t for t in others if t.boxable]
    expected = layout == "channels_last" and pass_ == "grad-input" and precision != "ieee" and p.groups == 1
    assert unpacked or not expected or p.out_channels % 8
    for kind in (lambda t: t.resident, lambda t: t.subs > 1, lambda t: t.split == 1, lambda t: not t.resident):
        tilings += [t for t in unpacked if kind(t)][:1]
    tilings += list(gather_search.candidates(p, chip, scarce=True))[:1]
    for how in ways(p):
        every = [
            *gather_search.candidates(p, chip, shuffle=how),
            *gather_search.candidates(p, chip, wgmma=False, shuffle=how),
        ]
        tilings += random.Random(3).sample(every, min(3, len(every)))
        tilings += list(gather_search.candidates(p, chip, size=p.size, shuffle=how))[:1]
    if name in ("few", "few whole", "1-D few") and pass_ == "fwd" and (precision, layout) != ("ieee", "channels_last"):
        assert chosen.tiling.shuffle is not None
    whole = list(gather_search.candidates(p, chip, size=p.size))
    tilings += random.Random(1).sample(whole, min(3, len(whole)))
    assert whole or "whole" not in name or layout != "nchw" or p.pass_ != "fwd"
    packing = [
        chosen.tiling,
        *random.Random(4).sample([t for t in tilings if t.packs], 1 if chosen.tiling.packs else 0),
    ]
    for i, tiling in enumerate(tilings):  # kernels for this size, and for all
        prepared = gather.Choice(tiling, p, chip, 0.0, "", general=i % 3 == 2).prepare(0)
        outs = []
        for _ in range(2):
            out = torch.full(result_shape(p), float("nan"), device=device, dtype=p.dtype)
            out = out.contiguous(memory_format=memory_format)
            prepared.run(x, prepared.pack(weight), bias, out)
            outs.append(out)
        if tiling.boxable:  # weights as they lie, to the last bit as packed ones; off 16 bytes they are packed
            last = weight.contiguous(memory_format=memory_format)
            off = torch.empty(last.numel() + 1, device=device, dtype=p.dtype)[1:].as_strided(last.shape, last.stride())
            assert prepared.pack(last) is last
            assert prepared.pack(off.copy_(last)).dtype is torch.int32
            for given in (last, off):
                out = torch.full_like(outs[0], float("nan"))
                prepared.run(x, prepared.pack(given), bias, out)
                outs.append(out)
        if tiling.shuffle is not None and p.rank > 1:
            last = weight.contiguous(memory_format=formats[p.rank])
            outs.append(torch.full_like(outs[0], float("nan")))
            prepared.run(x, prepared.pack(last), bias, outs[-1])
        packs = prepared.choice.packs
        assert packs or not tiling.packs or tiling.pack_blocks > 4 * 132 or prepared.choice.general
        alone = packs and tiling in packing
        for given in (weight, weight.contiguous(memory_format=memory_format)) if alone else ():
            for _ in range(3):  # one kernel, on counters that the one before left
                outs.append(torch.full_like(outs[0], float("nan")))
                prepared.run(x, given, bias, outs[-1], True, True)
        assert all(not zeros.any() for of in prepared.counters.values() for zeros in of.of_streams.values())
        assert all(torch.equal(outs[0], other) for other in outs[1:]), tiling
        assert_accurate(outs[0], truth, size, products + 1)


# Layers whose 16-bit results the copy engine may store, in NCHW, but for those of three phases along W; the last as a
# gradient for the input.
DRAINED = {
    "k4s2": (7, 40, 72, (19, 72), 4, 2, 1),
    "s1": (7, 32, 48, (21, 136), 3, 1, 1),
    "s4": (7, 48, 24, (15, 72), (4, 5), 4, (0, 1), (0, 1)),
    "k3s2": (5, 72, 136, (16, 88), 3, 2, 1, 1),
    "whole": (60, 64, 200, (8, 8), 4, 2, 1),
    "s3": (5, 32, 64, (16, 40), 3, 3),
    "gradient": (7, 40, 72, (21, 136), 3, 1, 1),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", list(DRAINED))
def test_results_by_the_copy_engine(name: str, precision: str) -> None:
    """Blocks have many tiles, so that a buffer is used again and again; also packed by the same kernel."""
    batch, cin, cout, size, *rest = DRAINED[name]
    pass_: Pass = "grad-input" if name == "gradient" else "fwd"
    p = Problem.make(
        batch, cin, cout, size, *rest, bias=pass_ == "fwd", dtype=PRECISIONS[precision], pass_=pass_  # type: ignore[arg-type]
    )  # fmt: skip
    assert gather_search.drains(p)
    few = replace(gpu(0), multiprocessors=2)
    every = [t for _, _, t in gather_search.considered(p, few) if t.drained]
    assert bool(every) == (name != "s3")
    torch.manual_seed(zlib.crc32(str(p).encode()))
    x = torch.randn(source_shape(p), device="cuda").to(p.dtype)
    weight = (torch.randn(p.weight_shape, device="cuda") / 8).to(p.dtype)
    bias = torch.randn(p.out_channels, device="cuda").to(p.dtype) if p.bias else None
    operands = [None if t is None else t.double() for t in (x, weight, bias)]
    truth = _truth(p, *operands)  # type: ignore[arg-type]
    size_of = _truth(p, *(None if t is None else t.abs() for t in operands))  # type: ignore[arg-type]
    chosen = gather.choose(p, gpu(0))
    assert isinstance(chosen, gather.Choice)
    choices = [gather.Choice(t, p, few, 0.0, "") for t in random.Random(name).sample(every, min(6, len(every)))]
    assert all(choice.tiling.arguments(p)[-1] >= 3 * choice.grid for choice in choices)
    for choice in (chosen, *choices):
        prepared = choice.prepare(0)
        outs = [torch.full(result_shape(p), float("nan"), device="cuda", dtype=p.dtype) for _ in range(4)]
        for out in outs[:2]:
            prepared.run(x, prepared.pack(weight), bias, out)
        off = torch.empty(outs[0].numel() + 1, device="cuda", dtype=p.dtype)[1:].view(outs[0].shape)
        prepared.run(x, prepared.pack(weight), bias, off)  # a result that no box may begin at
        outs[2] = off
        if choice.packs:
            prepared.run(x, weight, bias, outs[3], True, True)
        assert all(torch.equal(outs[0], other) for other in outs[1 : 3 + bool(choice.packs)]), choice.tiling
        assert_accurate(outs[0], truth, size_of, source_shape(p)[1] * p.taps + 1)


# Sums of 32 (a tap's) to 864 products, which PyTorch adds on CUDA cores: the shortest have its least errors.
SHORT_SUMS = {
    "3-D s2": (2, 32, 32, (8, 16, 64), 3, 2, 1),
    "3-D s2 g4": (2, 32, 32, (6, 12, 48), (3, 5, 7), 2, (1, 2, 3), 1, 1, 4),
    "3-D k2 s2": (2, 64, 32, (8, 32, 64), 2, 2),
    "3-D d2": (2, 32, 64, (8, 16, 32), 3, 2, 1, 0, 2),
    "2-D k3": (2, 32, 64, (64, 64), 3),
}


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("name", list(SHORT_SUMS))
def test_ieee_errors_are_at_most_twice_pytorchs(name: str, layout: str) -> None:
    """By stretches of every length, by wgmma and by mma.sync."""
    p = _layer(SHORT_SUMS[name], "ieee", layout, "fwd").with_(bias=False)
    generator = torch.Generator("cuda").manual_seed(zlib.crc32(name.encode()))
    x = torch.randn(p.input_shape, device="cuda", generator=generator)
    weight = torch.randn(p.weight_shape, device="cuda", generator=generator)
    x = x.contiguous(memory_format=memory_format(p.layout, p.rank))
    truth = _truth(p, x.double(), weight.double(), None)
    with precision_flags("ieee"):
        theirs = reference.relative_error(_truth(p, x, weight, None), truth)
    tilings = list(gather_search.candidates(p, gpu(0)))
    kinds = {(t.wgmma, t.taps_unrolled * t.k_steps): t for t in tilings}
    kinds |= {(t.wgmma, t.taps_unrolled * t.k_steps): t for t in gather_search.candidates(p, gpu(0), wgmma=False)}
    assert len(kinds) > 1
    for tiling in kinds.values():
        prepared = gather.Choice(tiling, p, gpu(0), 0.0, "").prepare(0)
        out = torch.full(truth.shape, float("nan"), device="cuda")
        out = out.contiguous(memory_format=memory_format(p.layout, p.rank))
        prepared.run(x, prepared.pack(weight), None, out)
        assert reference.relative_error(out, truth) <= 2 * theirs, tiling


@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_kernels_that_pack_on_streams_at_once(precision: str, pass_: Pass) -> None:
    """More blocks than fit at once wait for parts that others pack; weights change between, some are rounded."""
    p = Problem.make(9, 64, 48, (40, 36), 4, 2, 1, bias=pass_ == "fwd", dtype=PRECISIONS[precision]).with_(
        precision=precision,  # type: ignore[arg-type]
        pass_=pass_,
    )
    choice = gather.choose(p, gpu(0))
    assert isinstance(choice, gather.Choice) and choice.packs
    prepared = choice.prepare(0)
    x = torch.randn(source_shape(p), device="cuda").to(p.dtype)
    bias = torch.randn(p.out_channels, device="cuda").to(p.dtype) if p.bias else None
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs: list[list[torch.Tensor]] = [[] for _ in streams]
    given = [torch.randn(p.weight_shape, device="cuda") for _ in range(12)]
    given = [w if p.dtype.itemsize == 2 and i % 2 else w.to(p.dtype) for i, w in enumerate(given)]
    expected = [torch.empty(result_shape(p), device="cuda", dtype=p.dtype) for _ in given]
    for weight, out in zip(given, expected):
        prepared.run(x, prepared.pack(weight), bias, out)
    torch.cuda.synchronize()
    for weight in given:
        for stream, mine in zip(streams, outs):
            with torch.cuda.stream(stream):
                mine.append(torch.full_like(expected[0], float("nan")))
                prepared.run(x, weight, bias, mine[-1], True, True)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for mine in outs for a, b in zip(mine, expected))
    (counters,) = prepared.counters.values()
    assert len(counters.of_streams) == len(streams) and all(not zeros.any() for zeros in counters.of_streams.values())


@HOPPER[1]
@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("name", ["k3", "k2s2", "k3s2", "1-D s8", "3-D", "8x8 whole", "rows at 2 places", "few"])
def test_claimed_tiles(name: str, precision: str, layout: str, pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that claim tiles give the bits of those that have them dealt out, and leave zeros; so do many blocks at
    once on several streams.
    """
    p = _layer(LAYERS[name], precision, layout, pass_)
    if p.rank == 1 and layout != "nchw":
        pytest.skip("1-D tensors have no channels_last")
    monkeypatch.setattr(gather, "_CLAIMED_TILES", 0)
    chip = replace(gpu(0), multiprocessors=7)
    every = [t for t in gather_search.candidates(p, chip) if t.claimable(chip.shared_bytes)]
    kinds = {(t.split, t.resident, t.m_groups > 1, t.stages_p > 1): t for t in every}
    whole = [t for t in gather_search.candidates(p, chip, size=p.size) if t.claimable(chip.shared_bytes)][:1]
    shuffled = [t for how in ways(p) for t in gather_search.candidates(p, chip, shuffle=how)]
    whole += [t for t in shuffled if t.claimable(chip.shared_bytes)][:1]
    torch.manual_seed(zlib.crc32(str(p).encode()))
    given = memory_format(p.layout, p.rank)
    x = torch.randn(source_shape(p), device="cuda").to(p.dtype).contiguous(memory_format=given)
    weight = torch.randn(p.weight_shape, device="cuda").to(p.dtype)
    bias = torch.randn(p.out_channels, device="cuda").to(p.dtype) if pass_ == "fwd" else None
    claiming = 0
    for tiling in (*kinds.values(), *whole):
        choice = gather.Choice(tiling, p, chip, 0.0, "")
        if not choice.claimed:
            continue
        prepared = choice.prepare(0)
        claiming += choice.claimed
        packed = prepared.pack(weight.contiguous(memory_format=given))  # in channels_last as boxes may take it
        dealt = torch.full(result_shape(p), float("nan"), device="cuda", dtype=p.dtype).contiguous(memory_format=given)
        prepared.run(x, packed, bias, dealt)
        assert not torch.isnan(dealt).any()
        streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        outs = []
        for i in range(9):
            with torch.cuda.stream(streams[i % 3]):
                outs.append(torch.full_like(dealt, float("nan")))
                prepared.run(x, packed, bias, outs[-1], False, True)
        torch.cuda.synchronize()
        assert all(torch.equal(out, dealt) for out in outs), tiling
        (counters,) = prepared.counters.values()
        assert len(counters.of_streams) == 3
        assert all(not zeros.any() for zeros in counters.of_streams.values())
    assert claiming or name in ("k2s2", "k3s2", "3-D", "few")  # whose rows boxes may not bring


@HOPPER[1]
def test_calls_claim_tiles_and_captured_ones_have_them_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = upconv.ConvTranspose2d(32, 64, 3, 1, 1, device="cuda")
    x = torch.randn(16, 32, 256, 320, device="cuda")
    calls: list[bool] = []
    run = Prepared.run

    def noted(self: Prepared, *arguments: Any) -> None:
        calls.append(isinstance(self.choice, gather.Choice) and self.choice.claimed and arguments[5])
        run(self, *arguments)

    monkeypatch.setattr(Prepared, "run", noted)
    with torch.no_grad():
        y = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(x)
        graph.replay()
        again = layer(x)
    assert calls == [True, False, True]
    assert torch.equal(captured, y) and torch.equal(again, y)


def test_a_training_call_packs_by_the_kernel_and_a_captured_one_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = upconv.ConvTranspose2d(64, 48, 5, 2, 2, bias=False).cuda()
    x = torch.randn(9, 64, 40, 36, device="cuda", requires_grad=True)
    names: list[str] = []
    launch = Launcher.__call__

    def noted(self: Launcher, *arguments: Any, **named: Any) -> None:
        names.append(self.kernel.name)
        launch(self, *arguments, **named)

    monkeypatch.setattr(Launcher, "__call__", noted)
    y = layer(x)
    assert names == ["gather"]
    (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert names == ["gather"] * 2
    names.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    graph.replay()
    assert names == ["pack", "gather"] and torch.equal(captured, y)
    with torch.no_grad():
        layer.weight.mul_(2)
        assert torch.equal(layer(x), layer(x))
    assert torch.equal(torch.autograd.grad(layer(x), x, torch.ones_like(y))[0], 2 * g)


@HOPPER[1]
@pytest.mark.parametrize("pass_", ["fwd", "grad-input"])
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["k5", "3-D", "k5s2", "k4s2", "k3x10 d2"])
def test_rounds_give_the_bits_of_straight_code(
    name: str, precision: str, layout: str, pass_: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that stay and that come through a ring, consumers that share and that take turns, claimed or not."""
    layers = {
        "k5": (2, 72, 64, (20, 70), (6, 5), 1, (2, 3)),
        "3-D": (1, 40, 64, (6, 9, 70), 3, 1, 1),
        "k5s2": (2, 64, 64, (18, 33), 5, 2, 2),
        "k4s2": (2, 72, 96, (18, 34), 4, 2, 1),
        "k3x10 d2": (2, 72, 32, (20, 70), (3, 10), 1, 2, 0, (1, 2)),
    }
    p = _layer(layers[name], precision, layout, pass_)
    monkeypatch.setattr(gather, "_CLAIMED_TILES", 0)
    chip = replace(gpu(0), multiprocessors=7)
    torch.manual_seed(zlib.crc32(str(p).encode()))
    given = memory_format(p.layout, p.rank)
    x = torch.randn(source_shape(p), device="cuda").to(p.dtype).contiguous(memory_format=given)
    weight = torch.randn(p.weight_shape, device="cuda").to(p.dtype).contiguous(memory_format=given)
    bias = torch.randn(p.out_channels, device="cuda").to(p.dtype) if pass_ == "fwd" else None

    def results(tiling: Tiling) -> list[torch.Tensor]:
        choice = gather.Choice(tiling, p, chip, 0.0, "")
        prepared = choice.prepare(0)
        packed, found = prepared.pack(weight), []
        for claim in (False, True) if choice.claimed else (False,):
            out = torch.full(result_shape(p), float("nan"), device="cuda", dtype=p.dtype)
            found.append(out.contiguous(memory_format=given))
            prepared.run(x, packed, bias, found[-1], False, claim)
        return found

    every = [t for t in gather_search.candidates(p, chip) if t.rolled]
    kinds = {(t.split, t.resident, t.continued, t.planewise, t.taps_unrolled): t for t in every}
    rolled = [results(t) for t in kinds.values()]
    monkeypatch.setattr(tiling_weights, "_STEPS_ROLLED", 1 << 30)
    fields_of, compared = [{f.name: getattr(t, f.name) for f in fields(t)} for t in kinds.values()], 0
    for of, found in zip(fields_of, rolled):
        straight = gather_search._fitted(Tiling(**of), chip) or gather_search._fitted(Tiling(**of), chip, scarce=True)
        if straight is None:  # other stages do not fit
            continue
        compared += 1
        assert straight.straight
        (expected, *_) = results(straight)
        assert not torch.isnan(expected).any()
        assert all(torch.equal(out, expected) for out in found), straight
    assert compared or (pass_ == "fwd" and name in ("k5s2", "k4s2"))  # whose phases have few taps
