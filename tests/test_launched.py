"""What choices launch on tensors, with stand-ins for their kernels: which of their forms a call takes, and when."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from drawn import FAMILIES, choices
from emulator import Emulator
from results import laid_out
from upconv.cuda import families, launches, recording
from upconv.cuda import prepared as prepared_module
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.compile import launch
from upconv.cuda.gemm import gather
from upconv.cuda.gpu import H200
from upconv.cuda.launches import Launch, Map, Pointer, Unit, Zeros
from upconv.cuda.wgrad import wgrad
from upconv.problem import Problem

WIDE = Problem.make(16, 32, 64, (256, 320), 3, 1, 1).with_(precision="tf32")  # many tiles for a multiprocessor


# --- calls of every form ---------------------------------------------------------------------------------------------


def calls(p: Problem, prepared: Any, lasting: bool, beyond: int = 0) -> Iterator[tuple[Callable[[], object], int]]:
    """A call with each form of a weight (contiguous, channels-last, strided, float32, packed), and its source's place.

    ``beyond``: elements by which the source begins off 16 bytes.
    """
    last = [w for w in (torch.randn(p.weight_shape, dtype=p.dtype),) if p.rank > 1]
    wide = [torch.float32] if prepared.casts else []

    def image(shape: tuple[int, ...], off: int = 0) -> torch.Tensor:
        dense = laid_out(torch.empty(shape, dtype=p.dtype), p)
        whole = torch.empty(dense.numel() + off, dtype=p.dtype)
        return whole.as_strided(dense.shape, dense.stride(), off)

    if p.pass_ == "grad-weight":
        x, grad = image(p.input_shape, beyond), image(p.output_shape)
        outs = [torch.empty(p.weight_shape, dtype=dtype) for dtype in (p.dtype, *wide)]
        for out in (*outs, *(laid_out(w, p, True) for w in last)):
            yield lambda out=out: prepared.run(x, grad, out, lasting), x.data_ptr()
        return
    source, out = image(source_shape(p), beyond), image(result_shape(p))
    weight = torch.randn(p.weight_shape, dtype=p.dtype)
    forms = [weight, *(laid_out(w, p, True) for w in last), weight.transpose(0, -1).contiguous().transpose(0, -1)]
    for w in (*forms, *(weight.to(dtype) for dtype in wide)):
        yield lambda w=w: prepared.run(source, w, None, out, True, lasting), source.data_ptr()
        yield lambda w=w: prepared.run(source, prepared.pack(w), None, out, True, lasting), source.data_ptr()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current stream, as the only element."""
    found = [7]
    monkeypatch.setattr(prepared_module, "current_stream", lambda index: found[0])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_load_nothing_that_a_warm_up_did_not(family: str, stubs: Emulator, stream: list[int]) -> None:
    for choice, p in islice(choices(family), 3):
        prepared = choice.prepare(0)
        assert not prepared.loaded
        prepared.load()
        assert prepared.loaded and stubs.loaded
        stubs.loaded.clear()
        for lasting in (False, True):
            for call, _ in calls(p, prepared, lasting):
                call()
                assert not stubs.loaded, (choice, lasting)


WIDER = Problem.make(
    32, 256, 17, (14, 14), 4, 2, 1, bias=False, dtype=torch.bfloat16, pass_="grad-weight", layout="channels_last"
)


def test_later_calls_find_nothing_anew(stubs: Emulator, stream: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither launches nor shapes: with a large choice either takes longer than its kernels."""
    drawn = [one for family in FAMILIES for one in islice(choices(family), 3)]
    wider = families.choose(WIDER, H200)["rearrange"]
    assert "24" in wider.summary, "which writes a weight of other channels"
    for choice, p in (*drawn, (wider, WIDER)):
        prepared = choice.prepare(0)
        for call, _ in calls(p, prepared, False):
            call()
            with monkeypatch.context() as patched:
                patched.setattr(type(choice), "launches", forbidden)
                patched.setattr(Problem, "with_", forbidden)
                call()


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("a later call finds its plan anew")


def test_no_launch_overlaps_with_a_copy_that_it_reads(stubs: Emulator, stream: list[int]) -> None:
    """A kernel that reads pixels at 16 bytes gets a copy of others; without one, launches do overlap."""
    copied = overlapping = 0
    for choice, p in (one for family in FAMILIES for one in islice(choices(family), 2)):
        if p.pass_ == "grad-weight" or hasattr(choice, "inner"):
            continue
        prepared = choice.prepare(0)
        for beyond in (0, 1):
            for call, source in calls(p, prepared, False, beyond):
                stubs.launched.clear()
                stubs.arguments.clear()
                call()
                name, _, dependent = stubs.launched[-1]
                copy = source not in stubs.arguments[-1]
                copied += copy
                overlapping += dependent
                assert not (copy and dependent), name
    assert copied > 10 and overlapping > 10


def test_launches_of_one_kernel_may_have_other_blocks(stubs: Emulator) -> None:
    one = Launch(Unit("f", "f", ("f",)), "f", 1, 64, 16, (Pointer("source"),))
    every: dict[Any, Any] = {}
    for threads, shared in ((64, 16), (32, 16), (64, 0), (64, 16)):
        prepared_module.Program((replace(one, threads=threads, shared_bytes=shared),), ("source",), 0, every, {})
    assert sorted((found._threads, found._shared) for found in every.values()) == [(32, 16), (64, 0), (64, 16)]


TOGETHER = Problem.make(128, 128, 64, (16, 16), 4, 2, 1, bias=False, precision="tf32", pass_="grad-weight")


@pytest.mark.parametrize(("family", "p"), [(gather, WIDE), (wgrad, TOGETHER)], ids=("gather", "wgrad"))
def test_streams_have_counters_of_their_own(family: Any, p: Problem, stubs: Emulator, stream: list[int]) -> None:
    """Zeros, as kernels leave them; a call that may leave nothing behind has none."""
    prepared = family.choose(p, H200).prepare(0)
    for lasting in (False, True):
        for stream[0] in (7, 8, 7):
            for call, _ in calls(p, prepared, lasting):
                made = len(stubs.counters)
                stubs.launched.clear()
                call()
                overlapping = [entry for entry, _, dependent in stubs.launched if dependent]
                assert len(stubs.counters) == made or not overlapping, "they overlap with what zeroes their counters"
        assert bool(prepared.counters) == lasting
    for counters in prepared.counters.values():
        first, second = counters.of_streams.values()
        assert counters.of_streams.keys() == {7, 8} and first is not second
        assert not first.any() and not second.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_too_many_blocks_for_a_stream_take_two_launches(dtype: torch.dtype, stubs: Emulator, stream: list[int]) -> None:
    """Of a part of the GPU. Other errors rise, and elsewhere blocks that wait for each other are launched as before."""
    p = TOGETHER.with_(dtype=dtype, precision="tf32" if dtype is torch.float32 else "bf16")
    choice = wgrad.choose(p, H200)
    assert isinstance(choice, wgrad.Choice) and choice.ending == "together"
    prepared = choice.prepare(0)
    x, g, out = (torch.empty(shape, dtype=dtype) for shape in (p.input_shape, p.output_shape, p.weight_shape))

    def run(error: Exception | None) -> list[str]:
        entries: list[str] = []

        def act(entry: str, cooperative: bool) -> None:
            entries.append(entry + " together" * cooperative)
            if error is not None and cooperative:
                raise error

        stubs.act = act
        prepared.run(x, g, out, lasting=True)
        return entries

    assert run(None) == ["wgrad_whole together"]
    with pytest.raises(launch.LaunchError, match="LAUNCH_FAILED"):
        run(launch.LaunchError("CUDA_ERROR_LAUNCH_FAILED"))
    too_large = launch.TooManyBlocks("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")
    assert run(too_large) == ["wgrad_whole together", "wgrad_wgmma", "reduce"]
    assert run(None) == ["wgrad_whole together"]


FEW_TILES = (
    Problem.make(1, 1024, 512, (8, 8), 4, 2, 1, precision="tf32"),
    Problem.make(1, 1024, 512, (16, 16), 2, 2, layout="channels_last", pass_="grad-input", precision="tf32"),
)


@pytest.mark.parametrize("p", FEW_TILES, ids=str)
def test_where_no_cluster_fits_blocks_have_tiles_of_their_own(
    p: Problem, stubs: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a part of a device; decided before the first call, with either form of the weights."""
    chosen = gather.choose(p, H200)
    assert isinstance(chosen, gather.Choice)
    alone = replace(chosen, tile=replace(chosen.tiling, cluster=1))
    assert alone.grid < chosen.grid
    x, out = torch.empty(source_shape(p), dtype=p.dtype), torch.empty(result_shape(p), dtype=p.dtype)
    weight = torch.empty(p.weight_shape, dtype=p.dtype)
    last = weight.contiguous(memory_format=torch.channels_last) if chosen.boxable else weight
    for fits, grid in ((True, chosen.grid), (False, alone.grid)):
        asked: list[tuple[int, int]] = []
        monkeypatch.setattr(
            "upconv.cuda.pixels.choice.cluster_fits", lambda *given, a=asked, fits=fits: a.append(given) or fits
        )
        prepared = chosen.prepare(0)
        assert asked == [(0, chosen.tiling.cluster)]
        before = prepared.choice
        for given in (weight, last, weight):
            prepared.run(x, prepared.pack(given), None, out)
            assert stubs.launched[-1][:2] == ("gather", grid)
        assert prepared.choice is before, "nothing changes in the middle of a call"
        assert before == (chosen if fits else alone) and len(asked) == 1


NAMES = {
    "fwd": {"source", "weight", "packed", "bias", "result"},
    "grad-input": {"source", "weight", "packed", "bias", "result"},
    "grad-weight": {"input", "gradient", "result"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_records_are_well_formed_and_are_what_is_launched(family: str, stubs: Emulator, monkeypatch: Any) -> None:
    """Of every form of a call: known operands, the result among them, blocks and threads; what is launched is these.

    The recording has the same steps, with an address for each pointer and each map (`upconv.cuda.recording`).
    """
    monkeypatch.setattr(prepared_module, "current_stream", lambda index: 0)
    monkeypatch.setattr(launches, "encode", lambda of, at: struct.pack("<16Q", at + of.tensor.begin, *range(1, 16)))
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
            assert [launched[:2] for launched in stubs.launched] == [(one.entry, one.grid) for one in records]
            at = {a.operand: i for i, a in enumerate(used) if a.operand != ""}
            for one, args in zip(records, stubs.arguments):
                step = recording.step(one, 7, at, True)
                words = struct.unpack(f"<{len(args)}q", step.words)
                assert len(words) == sum(16 if isinstance(a, Map) else 1 for a in one.arguments)
                addresses = [a for a in one.arguments if isinstance(a, Pointer | Map) and a.operand != ""]
                assert [buffer for _, buffer, _ in step.places] == [at[a.operand] for a in addresses]
                assert (step.grid, step.block, step.shared) == (one.grid, one.threads, one.shared_bytes)
                places_of = {word for word, _, _ in step.places}
                fixed = [i for i in range(len(args)) if i not in places_of]
                assert all((args[i] - words[i]) % 2**32 == 0 for i in fixed), "the same sizes and maps"
