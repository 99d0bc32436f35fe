"""What choices launch on tensors, with stand-ins for their kernels: which of their forms a call takes, and when."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import islice, product
from typing import Any

import pytest
import torch

from conftest import Stubs
from drawn import FAMILIES, choices
from upconv.bench.suites import SUITES
from upconv.cuda import launches, recording
from upconv.cuda import prepared as prepared_module
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.compile import jit, launch
from upconv.cuda.cost import Cost
from upconv.cuda.gemm import gather
from upconv.cuda.gpu import H200
from upconv.cuda.launches import Given, Map, Pointer, Scratch, Zeros
from upconv.cuda.rearrange import rearranged, relayout
from upconv.cuda.wgrad import wgrad
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Precision, Problem


@pytest.mark.parametrize("name", ["dcgan1", "unet1", "vae", "nnunet"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_gradients_take_weights_as_they_lie(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kernels are there, each is loaded when a weight wants it; what is kept for the one is not the other's."""
    (layer,) = (case.problem for case in SUITES["models"] if case.name == name)
    precision: Precision = "tf32" if dtype is torch.float32 else "bf16"
    p = layer.with_(dtype=dtype, precision=precision, layout="channels_last", pass_="grad-input", bias=False)
    loaded: list[str] = []

    def kernel(source: str, entry: str, arch: str, label: str, keep: bool) -> str:
        loaded.append(entry + (" unpacked" if "bool boxed = true" in source else ""))
        return entry

    monkeypatch.setattr(jit, "kernel", kernel)
    monkeypatch.setattr(jit, "at_hand", lambda source, arch, label: True)
    monkeypatch.setattr(prepared_module, "Launcher", lambda *arguments: lambda *call: None)
    monkeypatch.setattr(prepared_module, "gpu_of", lambda device: H200)
    choice, other = gather.choose(p, H200), gather.choose(p.with_(layout="nchw"), H200)
    assert isinstance(choice, gather.Choice) and isinstance(other, gather.Choice)
    assert choice.boxable and not other.boxable
    prepared, contiguous = choice.prepare(0), other.prepare(0)
    assert prepared.packing != contiguous.packing
    packing = ["pack_float"] if dtype.itemsize == 2 else []
    contiguous.load()
    assert sorted(loaded) == sorted(["gather", "pack", *packing, *(["gather"] if other.packs else [])])
    assert contiguous.loaded and not prepared.loaded
    loaded.clear()
    last = (torch.channels_last, torch.channels_last_3d)[p.rank - 2]
    weight = torch.empty(p.weight_shape, dtype=dtype).contiguous(memory_format=last)
    assert prepared.pack(weight) is weight and not loaded
    assert prepared.pack(weight.contiguous()).dtype is torch.int32 and loaded == ["pack"]
    off = torch.empty(weight.numel() + 1, dtype=dtype)[1:].as_strided(weight.shape, weight.stride())
    assert prepared.pack(off).dtype is torch.int32
    prepared.load()
    assert sorted(loaded) == sorted(["gather", "gather unpacked", "pack", *packing]) and prepared.loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forwards_take_weights_as_they_lie_unless_they_keep_them(dtype: torch.dtype, stubs: Stubs) -> None:
    """At each call; kept for many calls they are packed in TF32, and in 16 bits used as they lie.

    `load` loads what both want, then nothing is loaded at the calls.
    """
    p = Problem.make(128, 512, 256, (8, 8), 4, 2, 1, dtype=dtype, layout="channels_last")
    p = p.with_(precision="tf32" if dtype is torch.float32 else "bf16")
    choice = gather.choose(p, H200)
    assert isinstance(choice, gather.Choice) and choice.boxable
    prepared = choice.prepare(0)
    weight = torch.randn(p.weight_shape, dtype=dtype)
    last = weight.contiguous(memory_format=torch.channels_last)
    prepared.load()
    assert prepared.loaded
    stubs.loaded.clear()
    x, out = (
        torch.empty(s, dtype=dtype).contiguous(memory_format=torch.channels_last)
        for s in (p.input_shape, p.output_shape)
    )
    kept = prepared.pack_to_keep(last)
    assert (kept is last) == (dtype is torch.bfloat16) and (kept.dtype is torch.int32) == (dtype is torch.float32)
    prepared.run(x, kept, None, out)
    assert stubs.pop()[3][1] == kept.data_ptr() and not stubs.loaded
    assert prepared.pack_to_keep(weight).dtype is torch.int32 and prepared.pack(last) is last
    backward = gather.choose(p.with_(pass_="grad-input"), H200)
    assert isinstance(backward, gather.Choice) and backward.prepare(0).pack_to_keep(last) is last
    # A kernel that packs leaves them as they lie, too; float32 weights of 16 bits it packs.
    packing = replace(choice, cost=Cost(1e-5))
    if packing.packs:
        other = packing.prepare(0)
        other.run(x, last, None, out, True, True)
        assert stubs.pop()[3][1] == last.data_ptr()
        other.run(x, weight, None, out, True, True)
        assert weight.data_ptr() in stubs.pop()[3]


def test_frozen_weights_are_packed_once_for_all_sizes(stubs: Stubs) -> None:
    """In TF32 boxes bring weights where the estimate is short, but what is kept is packed alike."""
    p = Problem.make(128, 512, 256, (8, 8), 4, 2, 1, layout="channels_last").with_(precision="tf32")
    choice = gather.choose(p, H200)
    assert isinstance(choice, gather.Choice)
    short, long = replace(choice, cost=Cost(1e-5)), replace(choice, cost=Cost(1e-2))
    assert short.boxable and not long.boxable
    assert short.prepare(0).packing == long.prepare(0).packing


WIDE = Problem.make(16, 32, 64, (256, 320), 3, 1, 1).with_(precision="tf32")  # many tiles for a multiprocessor


def test_a_thread_may_load_kernels_while_another_asks_whether_all_are(stubs: Stubs) -> None:
    choice = gather.choose(WIDE, H200)
    assert isinstance(choice, gather.Choice)
    prepared = choice.prepare(0)
    prepared.load()
    before = dict(prepared._launchers)

    class Key(tuple[Any, ...]):
        """Another thread's turn comes when it is looked into."""

        def __iter__(self) -> Any:
            prepared._launchers.update(before)
            return super().__iter__()

    prepared._launchers = {Key(key): value for key, value in list(before.items())[:1]}
    prepared._launchers["other", "entry", "", False] = before[next(iter(before))]
    _ = prepared.loaded  # while they are loaded
    assert len(prepared._launchers) == len(before) + 1 and prepared.loaded


def test_what_a_kernel_that_claims_is_told(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream's own counters, or none; it begins beside its packing, unless its zeros are made in between."""
    stream = [7]
    monkeypatch.setattr(prepared_module, "current_stream", lambda index: stream[0])
    choice = gather.choose(WIDE, H200)
    assert isinstance(choice, gather.Choice) and choice.claimed
    prepared = choice.prepare(0)
    x, out = torch.empty(WIDE.input_shape), torch.empty(WIDE.output_shape)
    packed = prepared.pack(torch.randn(WIDE.weight_shape))
    stubs.launched.clear()
    told = []
    for on, claim in ((7, False), (7, True), (7, True), (8, True), (8, True)):
        stream[0] = on
        prepared.run(x, packed, None, out, True, claim)
        name, grid, dependent, args = stubs.pop()
        assert (name, grid, args[5:16]) == ("gather", choice.grid, choice.tiling.arguments(WIDE))
        told.append((args[4], dependent))
    none, first, second, third, fourth = told
    assert none == (0, True) and first == (second[0], False) and second[1] and third[0] != first[0] != 0
    assert not third[1] and fourth == (third[0], True)
    (counters,) = prepared.counters.values()
    assert all(zeros.numel() == choice.tiling.m_groups + 1 for zeros in counters.of_streams.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_kernel_that_packs_is_told(dtype: torch.dtype, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights where they lie, each stream's own zeros; two launches where weights lie otherwise or results do."""
    stream = [7]
    monkeypatch.setattr(prepared_module, "current_stream", lambda index: stream[0])
    p = Problem.make(2, 64, 48, (16, 16), 4, 2, 1, dtype=dtype)
    p = p.with_(precision="tf32" if dtype is torch.float32 else "bf16")
    choice = gather.choose(p, H200)
    assert isinstance(choice, gather.Choice)
    prepared = choice.prepare(0)
    assert choice.packs and not stubs.loaded, "which kernels are wanted, the first weight says"
    x, out, weight = (torch.randn(shape, dtype=dtype) for shape in (p.input_shape, p.output_shape, p.weight_shape))
    bias = torch.randn(48, dtype=dtype)
    kept = []
    for given, step, single in (
        (weight, 1, dtype is torch.float32),
        (weight.float(), 1, True),
        (weight.contiguous(memory_format=torch.channels_last), 48, dtype is torch.float32),
    ):
        prepared.run(x, given, bias, out, True, True)
        name, grid, dependent, args = stubs.pop()
        assert (name, grid, dependent) == ("gather", choice.packs, False) and not stubs.launched
        assert (args[0], *args[2:5]) == (x.data_ptr(), bias.data_ptr(), out.data_ptr(), given.data_ptr())
        assert args[6:8] == (step, single) and args[8:19] == choice.tiling.arguments(p)
        kept.append(args[5])
    stream[0] = 8
    prepared.run(x, weight, None, out, True, True)
    args = stubs.pop()[3]
    assert len({*kept}) == 1 and args[5] not in kept and args[2] == 0
    (counters,) = prepared.counters.values()
    assert all(not zeros.any() for zeros in counters.of_streams.values())
    off = torch.empty(out.numel() + 1, dtype=dtype)[1:].view(out.shape)
    for given, to in ((weight.mT.contiguous().mT, out), (weight, off)):
        prepared.run(x, given, bias, to, True, True)
        *_, args = stubs.pop()
        assert (args[3] == to.data_ptr()) == (to is out) and (args[4] == weight.data_ptr()) == (given is weight)
    assert stubs.loaded == ["gather"] and not prepared.loaded
    trained = choice.prepare(0)
    trained.run(x, weight, None, out, True, True)
    assert not trained.loaded
    trained.load()
    assert trained.loaded
    for number in range(100):
        stream[0] = number
        prepared.run(x, weight, None, out, True, True)
    assert len(counters.of_streams) <= 64


FEW_TILES = (
    Problem.make(1, 1024, 512, (8, 8), 4, 2, 1, precision="tf32"),
    Problem.make(1, 1024, 512, (16, 16), 2, 2, layout="channels_last", pass_="grad-input", precision="tf32"),
)


@pytest.mark.parametrize("p", FEW_TILES, ids=str)
def test_where_no_cluster_fits_blocks_have_tiles_of_their_own(
    p: Problem, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a part of a device; decided before the first call, with either form of the weights."""
    chosen = gather.choose(p, H200)
    assert isinstance(chosen, gather.Choice)
    alone = replace(chosen, tiling=replace(chosen.tiling, cluster=1))
    assert alone.grid < chosen.grid
    x, out = torch.empty(source_shape(p), dtype=p.dtype), torch.empty(result_shape(p), dtype=p.dtype)
    weight = torch.empty(p.weight_shape, dtype=p.dtype)
    last = weight.contiguous(memory_format=torch.channels_last) if chosen.boxable else weight
    for fits, grid in ((True, chosen.grid), (False, alone.grid)):
        asked: list[tuple[int, int]] = []
        monkeypatch.setattr(gather, "cluster_fits", lambda *given, a=asked, fits=fits: a.append(given) or fits)
        prepared = chosen.prepare(0)
        assert asked == [(0, chosen.tiling.cluster)]
        before = prepared.choice
        for given in (weight, last, weight):
            prepared.run(x, prepared.pack(given), None, out)
            name, blocks, *_ = stubs.pop()
            assert (name, blocks) == ("gather", grid)
        assert prepared.choice is before, "nothing changes in the middle of a call"
        assert before == (chosen if fits else alone) and len(asked) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lasting_call_is_one_cooperative_launch(
    dtype: torch.dtype, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream has its own counters; other calls take two steps, which are loaded when the first of them comes."""
    stream = [7]
    monkeypatch.setattr(prepared_module, "current_stream", lambda index: stream[0])
    p = Problem.make(128, 128, 64, (16, 16), 4, 2, 1, bias=False, dtype=dtype, pass_="grad-weight")
    choice = wgrad.choose(p.with_(precision="tf32" if dtype is torch.float32 else "bf16"), H200)
    assert isinstance(choice, wgrad.Choice) and choice.ending == "together"
    t, prepared = choice.tiling, choice.prepare(0)
    assert isinstance(t, WarpgroupTiling) and not prepared.loaded
    x, g = torch.randn(p.input_shape, dtype=dtype), torch.randn(p.output_shape, dtype=dtype)
    kept = []
    for of_stream, out in product((7, 8), (torch.empty(p.weight_shape, dtype=dtype), torch.empty(p.weight_shape))):
        stream[0] = of_stream
        prepared.run(x, g, out, lasting=True)
        name, grid, dependent, args = stubs.pop()
        assert (name, grid, dependent) == (
            "wgrad_whole together",
            t.tiles * choice.splits,
            False,
        ) and not stubs.launched
        assert args[:2] == (g.data_ptr(), out.data_ptr())
        assert args[16:20] == (*out.stride()[:2], out.stride()[-1], out.dtype is torch.float32)
        kept.append(args[3])
    assert kept[0] == kept[1] != kept[2] == kept[3]
    (counters,) = prepared.counters.values()
    assert [zeros.numel() for zeros in counters.of_streams.values()] == [2 * t.tiles] * 2
    prepared.run(x, g, torch.empty(p.weight_shape, dtype=dtype))
    assert stubs.names() == ["wgrad_wgmma", "reduce"] and stubs.loaded == ["wgrad_whole", "wgrad_wgmma", "reduce"]
    prepared.load()
    assert prepared.loaded and not stubs.loaded[3:]

    def refused(*_: object) -> None:  # a stream of a part of the GPU
        raise launch.TooManyBlocks("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")

    def broken(*_: object) -> None:
        raise launch.LaunchError("CUDA_ERROR_LAUNCH_FAILED")

    def together() -> bool:
        return stubs.names()[-1] == "wgrad_whole together"

    stubs.act = lambda args: broken() if together() else None
    with pytest.raises(launch.LaunchError, match="LAUNCH_FAILED"):  # not hidden by the two steps
        prepared.run(x, g, torch.empty(p.weight_shape, dtype=dtype), lasting=True)
    stubs.launched.clear()
    stubs.act = lambda args: refused() if together() else None
    for _ in range(2):
        prepared.run(x, g, torch.empty(p.weight_shape, dtype=dtype), lasting=True)
    assert stubs.names() == ["wgrad_whole together", "wgrad_wgmma", "reduce"] * 2
    stubs.launched.clear()
    stubs.act = len
    prepared.run(x, g, torch.empty(p.weight_shape, dtype=dtype), lasting=True)
    assert stubs.names() == ["wgrad_whole together"], "on another stream it is not refused"


HALVES: dict[str, Any] = {"dtype": torch.bfloat16, "precision": "bf16"}


@pytest.mark.parametrize("p", [
    Problem.make(4, 32, 32, (32, 64, 128), 3, 2, 1, pass_="grad-input", **HALVES),
    Problem.make(128, 512, 256, (4, 4), 4, 2, 1, pass_="grad-weight", **HALVES),
    Problem.make(100, 512, 17, (14, 14), 4, 2, 1, layout="channels_last", pass_="grad-weight", **HALVES),
], ids=str)  # fmt: skip
def test_the_memory_for_copies_is_stated(p: Problem) -> None:
    """As many bytes as its launches have for them, and in the summary."""
    inner = rearranged.choose(relayout._wider(p.lifted).with_(layout="channels_last"), H200, others=True)
    assert not isinstance(inner, str)
    choice = relayout.Choice(inner, p, 0.0)
    arguments = [a for launch in choice.launches(Given("contiguous")) for a in launch.arguments]
    scratch = {a.operand for a in arguments if isinstance(a, Pointer | Map) and isinstance(a.operand, Scratch)}
    copies = sum(one.bytes for one in scratch if one.name.endswith("channels_last"))
    assert choice.temporary_bytes == copies > 0
    assert f"{copies / 1e6:.3g} MB of temporaries" in choice.summary


NAMES = {
    "fwd": {"source", "weight", "packed", "bias", "result"},
    "grad-input": {"source", "weight", "packed", "bias", "result"},
    "grad-weight": {"input", "gradient", "result"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_records_are_well_formed_and_are_what_is_launched(family: str, stubs: Stubs, monkeypatch: Any) -> None:
    """Of every form of a call: known operands, the result among them, blocks and threads; what is launched is these.

    The recording has the same steps, with an address for each pointer and each map (`upconv.cuda.recording`).
    """
    monkeypatch.setattr(prepared_module, "current_stream", lambda index: 0)
    monkeypatch.setattr(launches, "encode", lambda of, at, *_: struct.pack("<16Q", at + of.begin, *range(1, 16)))
    for choice, _ in islice(choices(family), 3):
        p, prepared = choice.problem, choice.prepare(0)
        for given in prepared._every():
            records = prepared.choice.launches(given)
            program, operands = prepared._program(given), prepared._operands(given)
            assert program.launches == records and set(operands) <= NAMES[p.pass_]
            used = [a for one in records for a in one.arguments if isinstance(a, Pointer | Map)]
            named = {a.operand for a in used if isinstance(a.operand, str)} - {""}
            assert "result" in named <= set(operands), (choice, given)
            assert all(a.offset >= 0 and a.alignment in (1, 4, 16) for a in used if isinstance(a, Pointer))
            for one in records:
                assert one.entry in one.unit.source and 0 < one.grid < 2**31 and 32 <= one.threads <= 1024
                assert 0 <= one.shared_bytes <= H200.shared_bytes and not (one.cooperative and one.dependent)
                assert given.lasting or not any(isinstance(a.operand, Zeros) for a in used), "what outlives a call"
            places = [torch.empty(64, dtype=torch.int32) for _ in operands]
            stubs.launched.clear()
            stubs.arguments.clear()
            program(places, [t.data_ptr() for t in places], True)
            launched = [(name.removesuffix(" together"), grid) for name, grid, _ in stubs.launched]
            assert launched == [(one.entry, one.grid) for one in records]
            at = {a.operand: i for i, a in enumerate(used) if a.operand != ""}
            for one, args in zip(records, stubs.arguments):
                step = recording.step(one, 7, at, True)
                assert len(args) == len(step.words) == sum(16 if isinstance(a, Map) else 1 for a in one.arguments)
                addresses = [a for a in one.arguments if isinstance(a, Pointer | Map) and a.operand != ""]
                assert [buffer for _, buffer, _ in step.places] == [at[a.operand] for a in addresses]
                assert (step.grid, step.block, step.shared) == (one.grid, one.threads, one.shared_bytes)
                places_of = {word for word, _, _ in step.places}
                fixed = [i for i in range(len(args)) if i not in places_of]
                assert all((args[i] - step.words[i]) % 2**32 == 0 for i in fixed), "the same sizes and maps"
