"""Kernels that are compiled fast and run until their final forms are there."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache as cached
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ptxas
import upconv
from conftest import by_turns, needs_nvrtc
from drawn import DTYPES
from upconv import reference
from upconv.bench.suites import SUITES
from upconv.cuda import prepared, warming
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.compile import cache, jit, nvrtc, provisional
from upconv.cuda.compile.provisional import Provisional
from upconv.cuda.gemm import gather, joined
from upconv.cuda.gpu import H200
from upconv.cuda.launches import Launch, Unit
from upconv.problem import Problem
from upconv.replay import replays


class Launches:
    """Takes note of launches, and of a form's loading."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def form(self, name: str) -> Any:
        launches = self

        class Form:
            def __call__(self, stream: Any, grid: int, args: tuple[Any, ...], dependent: bool = False) -> None:
                launches.made.append(f"{name} {grid}")

        self.made.append(f"load {name}")
        return Form()

    def kernel(self, compile: Callable[[], object]) -> Provisional:
        return Provisional(lambda: self.form("quick"), compile, lambda: self.form("final"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Launches on a device that captures nothing."""
    monkeypatch.setattr(provisional, "capturing", lambda: False)
    yield Launches()
    assert not provisional.pending()


# --- one form after the other ----------------------------------------------------------------------------------------


def test_the_quick_form_runs_until_the_final_one_is_compiled(made: Launches) -> None:
    compiled = threading.Event()
    kernel = made.kernel(compiled.wait)
    assert provisional.pending()
    kernel(0, 1, ())
    kernel(0, 2, ())
    compiled.set()
    future: Future[Any] | None = kernel._compiled
    assert future is not None
    future.result(10)
    kernel(0, 3, ())
    kernel(0, 4, ())
    assert made.made == ["load quick", "quick 1", "quick 2", "load final", "final 3", "final 4"]


def test_a_graph_waits_for_the_final_form(made: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = threading.Event()
    kernel = made.kernel(compiled.wait)
    kernel(0, 1, ())
    threading.Timer(0.05, compiled.set).start()
    monkeypatch.setattr(provisional, "capturing", lambda: True)
    kernel(0, 3, ())
    assert compiled.is_set() and made.made == ["load quick", "quick 1", "load final", "final 3"]


def test_a_recording_waits_for_the_final_form(made: Launches) -> None:
    compiled = threading.Event()
    kernel = made.kernel(compiled.wait)
    threading.Timer(0.05, compiled.set).start()
    kernel.final()(0, 3, ())  # type: ignore[call-arg]
    assert compiled.is_set() and made.made == ["load quick", "load final", "final 3"]


def test_a_form_that_is_compiled_holds_nobody_back(made: Launches) -> None:
    compiled = threading.Event()
    kernel = made.kernel(compiled.wait)
    assert provisional.pending()
    future = kernel._compiled
    compiled.set()
    assert future is not None and future.result(10)
    assert not provisional.pending()  # though it was never launched
    assert warming.compile_all([]) == []  # as a warm-up of what is loaded
    assert made.made == ["load quick", "load final"]


def test_an_interrupt_or_an_error_of_the_driver_is_no_end(made: Launches) -> None:
    errors: list[BaseException] = [KeyboardInterrupt(), RuntimeError("cuLibraryLoadData returned CUDA_ERROR")]

    def final() -> Any:
        if errors:
            raise errors.pop(0)
        return made.form("final")

    kernel = Provisional(lambda: made.form("quick"), lambda: None, final)
    with pytest.raises(KeyboardInterrupt):
        kernel.settle()
    with pytest.raises(RuntimeError, match="cuLibraryLoadData"):
        kernel.settle()
    kernel.settle()
    kernel(0, 1, ())
    assert made.made == ["load quick", "load final", "final 1"]


def test_all_are_waited_for(made: Launches) -> None:
    compiled = threading.Event()
    kernels = [made.kernel(compiled.wait) for _ in range(5)]
    threading.Timer(0.05, compiled.set).start()
    provisional.settle()
    assert compiled.is_set() and made.made.count("load final") == 5
    kernels[4](0, 9, ())
    assert made.made[-1] == "final 9"


def test_what_no_thread_has_begun_is_compiled_by_who_needs_it(made: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provisional, "_begin", lambda job: Future())
    kernel = made.kernel(lambda: made.made.append("compile"))
    kernel(0, 1, ())
    kernel.settle()
    kernel.settle()
    assert made.made == ["load quick", "quick 1", "load final"]


def test_a_child_compiles_what_its_parents_thread_was_compiling(made: Launches) -> None:
    """And waits for nobody, as its parent's threads are not its own."""
    begun, compiled = threading.Event(), threading.Event()
    kernel = made.kernel(lambda: begun.set() or compiled.wait(60))
    assert begun.wait(10)
    with kernel._settling:  # as a thread has it that loads the final form just then
        child = os.fork()
        if not child:
            signal.alarm(20)
            kernel(0, 1, ())
            provisional.settle()
            os._exit(0 if made.made[-2:] == ["load final", "final 1"] and not provisional.pending() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    compiled.set()
    kernel.settle()


def test_a_kernel_that_is_gone_is_not_kept(made: Launches) -> None:
    """One of two that threads loaded in the same first call, say, or of a model that was deleted meanwhile."""
    compiled = threading.Event()
    kernels = [made.kernel(compiled.wait) for _ in range(2)]
    gone = weakref.ref(kernels.pop())
    gc.collect()
    assert gone() is None and provisional.pending()
    compiled.set()
    provisional.settle()
    assert made.made.count("load final") == 1


def test_a_final_form_that_cannot_be_compiled_is_told_once(made: Launches) -> None:
    def broken() -> None:
        raise nvrtc.CompileError("NVRTC 99 could not compile it.")

    kernel = Provisional(lambda: made.form("quick"), broken, broken)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="keeps its quick form.*NVRTC 99 could not compile it"):
        kernel.settle()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel(0, 1, ())
    assert made.made == ["load quick", "quick 1"]


def test_a_quick_form_that_cannot_be_compiled_raises(made: Launches) -> None:
    def broken() -> Any:
        raise nvrtc.CompileError("NVRTC 99 could not compile it.")

    with pytest.raises(nvrtc.CompileError, match="NVRTC 99"):
        Provisional(broken, lambda: None, lambda: made.form("final"))
    assert made.made == [] and not provisional.pending()


def test_threads_see_either_form(made: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, stop = threading.Event(), threading.Event()
    kernel = made.kernel(compiled.wait)

    def launches() -> None:
        while not stop.is_set():
            kernel(0, 1, ())

    threads = [threading.Thread(target=launches) for _ in range(4)]
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    for thread in threads:
        thread.start()
    compiled.set()
    kernel.settle()
    stop.set()
    for thread in threads:
        thread.join()
    kernel(0, 2, ())
    assert raised == [] and made.made.count("load final") == 1 and made.made[-1] == "final 2"
    assert set(made.made) <= {"load quick", "load final", "quick 1", "final 1", "final 2"}


ENDS = """
import sys, threading, time
from upconv.cuda.compile import jit, nvrtc, provisional

provisional._slots.now = threading.Semaphore(1)

def compile(name):
    print("begin", name, flush=True)
    time.sleep(0.5)
    print("end", name, flush=True)

for name in "abc":
    provisional.Provisional(lambda: None, lambda name=name: compile(name), lambda: None)
time.sleep(0.2)
print("main ends", flush=True)
"""


def test_a_program_ends_with_what_a_thread_compiles() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stderr == ""
    assert ended.stdout.splitlines() == ["begin a", "main ends", "end a"]


def test_nothing_is_recorded_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(replays.native, "module", lambda: object())
    monkeypatch.setattr(replays, "capturing", lambda: asked.append(True) or True)
    x, w = torch.randn(1, 4, 5, 5), torch.randn(4, 3, 3, 3, requires_grad=True)
    given: Any = (None, (x, w, None), ())
    monkeypatch.setattr(provisional, "pending", lambda: True)
    replays.offer(*given)
    assert asked == []
    monkeypatch.setattr(provisional, "pending", lambda: False)
    replays.offer(*given)
    assert asked == [True]


# --- of the library's kernels ----------------------------------------------------------------------------------------


@needs_nvrtc
def test_what_is_loaded_of_a_unit(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, str]] = []
    final, quick = (f'extern "C" __global__ void run() {{ {body} }}\n' for body in ("", ";"))

    def kernel(source: str, entry: str, arch: str, label: str, keep: bool) -> str:
        jit.cubin(source, arch, label, keep)
        loaded.append((label, entry))
        return label

    monkeypatch.setattr(jit, "kernel", kernel)
    monkeypatch.setattr(prepared, "Launcher", lambda *given: given)
    monkeypatch.setattr(prepared, "gpu_of", lambda device: H200)
    unit = Unit("it", final, ("pack", "run"), lambda: Unit("it", quick, ("pack", "run")).passing())

    def load(entry: str) -> Any:
        return prepared.loaded(Launch(unit, entry, 1, 1, 0, ()), "P", 0)

    load("pack")
    run = load("run")
    assert isinstance(run, Provisional) and loaded == [("it, quick", "pack"), ("it, quick", "run")]
    run.settle()
    assert loaded.pop() == ("it", "run") and cache.contents().entries == 1  # the quick form is not on disk
    for in_memory in (jit._cubins, {}):  # the same process, and another
        monkeypatch.setattr(jit, "_cubins", in_memory)
        assert not isinstance(load("run"), Provisional)
        assert loaded.pop() == ("it", "run")


CASES = (
    "kb57-tf32-nchw-fwd", "kb57-bf16-channels_last-grad-input", "kb65-tf32-nchw-fwd", "kb69-tf32-channels_last-fwd",
    "kb72-tf32-channels_last-fwd", "kb73-tf32-channels_last-fwd", "kb73-bf16-nchw-fwd", "kb74-bf16-nchw-grad-input",
    "kb75-bf16-channels_last-grad-input", "pix8-bf16-channels_last-grad-input", "kb61-bf16-nchw-grad-input",
)  # fmt: skip
LAYERS = {case.name: case.problem for name in ("cuda", "field") for case in SUITES[name]}


@cached
def chosen(case: str) -> gather.Choice:
    """The gather-GEMM's choice for a case, which has a quick form."""
    name, precision, layout, pass_ = case.split("-", 3)
    p = LAYERS[name].with_(dtype=DTYPES[precision], precision=precision, layout=layout, pass_=pass_, bias=False)
    choice = gather.choose(p, H200)
    assert isinstance(choice, gather.Choice) and choice.quick is not None
    return choice


@pytest.mark.parametrize("case", CASES)
def test_quick_forms_take_what_final_ones_do(case: str) -> None:
    choice = chosen(case)
    quick, t = choice.quick, choice.tiling
    assert quick is not None and quick.quick is None
    q = quick.tiling
    assert q.shared_bytes <= t.shared_bytes
    for key in ("entries", "packed_words", "ring_fragments", "chunks", "w_stage", "pack_blocks"):
        assert getattr(q, key) == getattr(t, key), key
    assert q.arguments(choice.problem) == t.arguments(choice.problem) and not q.straight
    assert q.longest_stretch < t.longest_stretch
    assert q.rolled == case.startswith("pix")  # planes of as many taps each; kb75's are of other numbers
    assert [u.entries for u in quick.sources()] == [u.entries for u in choice.sources()]


JOINED = ("kb61-bf16-fwd", "kb68-tf32-fwd", "kb68-bf16-fwd", "kb69-tf32-fwd", "line-fp16-grad-input")


@cached
def joined_rows(case: str) -> joined.Choice:
    """Of kb61 the last stage of a slice has fewer taps than the others, as of the line's."""
    name, precision, pass_ = case.split("-", 2)
    line = Problem.make(3, 70, 40, (1000,), 11, 1, 25, 0, 5)
    p = line if name == "line" else LAYERS[name]
    choice = joined.choose(p.with_(dtype=DTYPES[precision], precision=precision, pass_=pass_, bias=True), H200)
    assert isinstance(choice, joined.Choice)
    return choice


@pytest.mark.parametrize("case", JOINED)
def test_joined_rows_of_several_stages_have_a_quick_form(case: str) -> None:
    choice = joined_rows(case)
    (unit,) = choice.sources()
    assert choice.tile.taps > choice.tile.taps_of_stage and unit.quick is not None
    quick = unit.quick()
    assert quick is not None and quick.quick is None and not quick.kept
    assert quick.entries == unit.entries and quick.source != unit.source
    few = joined.choose(LAYERS["kb74"].with_(dtype=torch.bfloat16, precision="bf16"), H200)
    assert isinstance(few, joined.Choice) and few.tile.taps == few.tile.taps_of_stage
    assert few.sources()[0].quick is None


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("case", by_turns(JOINED, 2, 1))
def test_quick_joined_rows_compile_without_spills_to_less_code(case: str) -> None:
    (final,) = joined_rows(case).sources()
    assert final.quick is not None
    quick = final.quick()
    assert quick is not None
    (_, text, log), needs = ptxas.report(quick.source, H200.arch)
    assert all(local == 0 for _, local, _ in needs.values()) and nvrtc.serialised(log) is None
    assert 0 < text.count("wgmma.mma_async") < jit.built(final.source, H200.arch, ptx=True).ptx.count("wgmma.mma_async")


def test_only_long_code_has_a_quick_form() -> None:
    p = Problem.make(16, 256, 128, (32, 32), 2, 2, dtype=torch.bfloat16, precision="bf16")
    short = gather.choose(p, H200)
    assert isinstance(short, gather.Choice) and short.tiling.longest_stretch * short.tiling.nb < 32
    assert short.quick is None
    (unit, *_) = short.sources()
    assert unit.quick is not None and unit.quick() is None


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("case", ("kb65-tf32-nchw-fwd", "kb72-tf32-channels_last-fwd", *CASES[8:10]))
def test_quick_forms_compile_without_spills_to_less_code(case: str) -> None:
    choice = chosen(case)
    assert choice.quick is not None
    quick, final = choice.quick.sources()[0], choice.sources()[0]
    (_, text, log), needs = ptxas.report(quick.source, "90a")
    assert all(local == 0 for _, local, _ in needs.values()) and nvrtc.serialised(log) is None
    final_ptx = jit.built(final.source, "90a", ptx=True).ptx
    assert 0 < text.count("wgmma.mma_async") * 2 <= final_ptx.count("wgmma.mma_async")


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_quick_forms_compute_the_same_to_the_last_bit(case: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    found = chosen(case)
    assert found.quick is not None
    p = found.problem.with_(batch=max(1, found.problem.batch // 4))
    order = {2: torch.channels_last, 3: torch.channels_last_3d}[p.rank] if p.layout == "channels_last" else None
    shapes = (p.input_shape, p.output_shape) if p.pass_ == "fwd" else (p.output_shape, p.input_shape)
    torch.manual_seed(0)
    x, w = (torch.randn(shape, device="cuda").to(p.dtype) for shape in (shapes[0], p.weight_shape))
    x = x if order is None else x.contiguous(memory_format=order)
    weights = [w] if order is None else [w, w.contiguous(memory_format=order)]
    outs: list[list[torch.Tensor]] = []
    for tiling in (found.tiling, found.quick.tiling):
        choice = gather.Choice(tiling, p, found.gpu, found.cost)
        prepared, results = choice.prepare(0), []
        for weight, packing, claim in product(weights, (False, True), (False, True)):
            if packing and (claim or not choice.packs):
                continue
            out = torch.full(shapes[1], math.nan, device="cuda", dtype=p.dtype)
            out = out if order is None else out.contiguous(memory_format=order)
            for _ in range(2):  # what was loaded, and what is launched from then on
                out.fill_(math.nan)
                if packing:
                    prepared.run(x, weight, None, out, True, True)
                else:
                    prepared.run(x, prepared.pack(weight), None, out, lasting=claim)
                provisional.settle()
            results.append(out)
        outs.append(results)
    first = outs[0][0]
    assert not first.isnan().any() and len(outs[0]) == len(outs[1]) >= 2
    assert all(torch.equal(first, out) for out in (*outs[0], *outs[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", JOINED)
def test_quick_joined_rows_compute_the_same_to_the_last_bit(
    case: str, cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(provisional, "_begin", lambda job: Future())  # the final form is compiled when it is waited for
    choice = joined_rows(case)
    p = choice.problem
    shapes = source_shape(p), p.weight_shape, result_shape(p)[1:2]
    x, weight, bias = (torch.randn(shape, device="cuda").to(p.dtype) for shape in shapes)
    prepared = choice.prepare(0)
    prepared.load()
    assert any(isinstance(one, Provisional) for one in prepared._launchers.values())
    outs = [torch.full(result_shape(p), math.nan, device="cuda", dtype=p.dtype) for _ in range(2)]
    for out in outs:
        prepared.run(x, prepared.pack(weight), bias, out)
        provisional.settle()
    again = choice.prepare(0)
    again.load()
    assert not any(isinstance(one, Provisional) for one in again._launchers.values())
    if p.pass_ == "fwd":
        truth = reference.forward(p, x, weight, bias)
    else:
        truth = reference.gradients(p, x, x.new_zeros(p.input_shape), weight)[0] + bias.view(1, -1, *(1,) * p.rank)
    assert reference.relative_error(outs[0], truth) < (1e-3 if p.dtype is torch.float32 else 5e-3)
    assert torch.equal(*outs)


@pytest.mark.gpu
def test_a_layer_on_a_gpu_with_a_cold_cache(cold: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    provisional.settle()
    torch.manual_seed(0)
    layer = upconv.ConvTranspose2d(64, 64, (3, 7), padding=(1, 3), device="cuda")  # as kb65 is
    x = torch.randn(8, 64, 128, 128, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        first = layer(x)
        assert provisional.pending()
        again = layer(x)
        out = torch.empty_like(first)
        with torch.cuda.graph(graph):
            out.copy_(layer(x))
        assert not provisional.pending()  # what is captured is the final form
        graph.replay()
        final = layer(x)
    torch.cuda.synchronize()
    assert cache.contents().entries >= 1
    for other in (again, out, final):
        assert torch.equal(first, other)
    truth = torch.nn.functional.conv_transpose2d(x.double(), layer.weight.double(), layer.bias.double(), padding=(1, 3))
    assert (first - truth).norm() <= 1e-3 * truth.norm()
