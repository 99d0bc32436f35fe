"""The CUDA engine: without a GPU on a stand-in kernel that runs on CPU tensors, with one on the real kernels."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import upconv
from conftest import OURS, Call, make_call
from situations.processes import in_threads
from standins import H200, Data, Kernels, Log, StandIn
from strategies import operands
from upconv import dispatch, reference
from upconv.compiler.arguments import text_of
from upconv.cuda import bias, engine, prepared
from upconv.cuda import weights as packed
from upconv.cuda.compile import driver, jit
from upconv.planner import Candidate, Plan
from upconv.problem import Problem
from upconv.replay import calls


def a_plan(p: Problem, **changes: Any) -> tuple[Plan, Log]:
    choice = StandIn(p, [], **changes)
    return Plan(p, H200, "stand-in", "native", (Candidate("stand-in", True, "a test"),), choice), choice.log


def names(log: Log) -> list[str]:
    return [what for what, _ in log]


P = Problem.make(2, 4, 6, (5, 4), 3, 2, 1, 1, groups=2, bias=True)


# --- the call --------------------------------------------------------------------------------------------------------


def test_a_failure_names_problem_and_plan_and_leaves_the_library_usable(kernels: Kernels) -> None:
    x, w, b, _ = operands(P)
    plan, _ = a_plan(P, failure=RuntimeError("CUDA said no"))
    with pytest.raises(RuntimeError) as error:
        engine.forward(plan, x, w, b)
    for part in (str(P), "cuda:stand-in", "one tile", "CUDA said no"):
        assert part in str(error.value)
    plan, _ = a_plan(P, failure=torch.OutOfMemoryError("2 GiB more than there is"))
    with pytest.raises(torch.OutOfMemoryError, match=r"cuda:stand-in.*2 GiB"):
        engine.forward(plan, x, w, b)
    plan, _ = a_plan(P)
    assert reference.relative_error(engine.forward(plan, x, w, b), reference.forward(P, x, w, b)) < 1e-6


def test_a_kernel_that_finds_no_memory_to_load_is_out_of_memory(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an allocation is, so that who catches that and tries smaller batches catches it."""

    def prepare(self: StandIn, device: int) -> Any:
        full = driver.bindings().CUresult.CUDA_ERROR_OUT_OF_MEMORY
        return driver.drive(lambda *code: (full, None), b"code")

    monkeypatch.setattr(StandIn, "prepare", prepare)
    x, w, b, _ = operands(P)
    with pytest.raises(torch.OutOfMemoryError, match=r"upconv could not compute .* CUDA_ERROR_OUT_OF_MEMORY"):
        engine.forward(a_plan(P)[0], x, w, b)


def test_another_device_is_made_current_for_a_pass(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [-1]

    @contextmanager
    def on(device: int) -> Iterator[None]:
        before, current[0] = current[0], device
        yield
        current[0] = before

    def check(self: StandIn, *tensors: Tensor) -> None:
        assert current == [-1]

    monkeypatch.setattr(StandIn, "check", check)
    x, weight = torch.randn(2, 4, 5, 6, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    upconv.conv_transpose2d(x, weight)  # loads
    current[0] = 3
    monkeypatch.setattr(engine, "_current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    upconv.conv_transpose2d(x, weight).sum().backward()
    assert kernels.ran() == ["fwd", "fwd", "grad-input", "grad-weight"] and current == [3]


def test_threads_prepare_once(kernels: Kernels) -> None:
    x, w, b, _ = operands(P)
    plan, log = a_plan(P)
    results = in_threads([lambda: engine.forward(plan, x, w, b)] * 8)
    assert names(log).count("prepare") == 1
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_child_forgets_what_its_parents_threads_collect() -> None:
    """Calls that are collected take a longer way; the thread that forks may be within itself."""
    inside, done = threading.Event(), threading.Event()

    def collect() -> None:
        with engine.collecting():
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=collect)
    thread.start()
    inside.wait(10)
    try:
        with engine.collecting(), engine.collecting():
            child = os.fork()
            if not child:
                os._exit(0 if engine._collectors == {threading.get_ident()} else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert len(engine._collectors) == 2
    finally:
        done.set()
        thread.join()
    assert not engine._collectors


# --- packed weights --------------------------------------------------------------------------------------------------


class Weights:
    """A layer's weight, and calls on it that check the result and tell whether the weights were packed anew."""

    def __init__(self, weight: Tensor, **changes: Any) -> None:
        self.weight = weight
        self.x, _, self.b, _ = operands(P)
        self.plan, self.log = a_plan(P, **changes)

    def packs(self, weight: Tensor | None = None, lasting: bool = True) -> int:
        weight = self.weight if weight is None else weight
        before = names(self.log).count("pack")
        with torch.no_grad():
            out = engine.forward(self.plan, self.x, weight, self.b, lasting)
        truth = reference.forward(P, self.x, weight, self.b)
        assert reference.relative_error(out, truth) < 1e-6, "computed with weights that are no longer the layer's"
        return names(self.log).count("pack") - before


@pytest.fixture
def weights(kernels: Kernels) -> Weights:
    return Weights(nn.Parameter(torch.randn(P.weight_shape)))


@pytest.fixture
def frozen(weights: Weights) -> Weights:
    packed.freeze(weights.weight)
    return weights


def test_a_kernel_may_begin_beside_its_own_packing_alone(weights: Weights, kernels: Kernels) -> None:
    """Not beside what a frozen weight was packed for (an event is behind it), nor in a capture."""
    choice = weights.plan.choice
    assert isinstance(choice, StandIn)
    for freezes, capturing, expected in (
        (False, False, True), (True, False, False), (True, False, False), (False, False, True), (False, True, False),
        (True, True, False),
    ):  # fmt: skip
        kernels.capturing = capturing
        (packed.freeze if freezes else packed.thaw)(weights.weight)
        weights.packs()
        assert choice.fresh[-1] is expected


def test_compiled_graphs_allocate_nothing_that_outlives_them(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's pool refuses what a kernel keeps for its next launch."""
    told: list[bool] = []
    monkeypatch.setattr(StandIn, "prepare", lambda self, device: Data(replace(self, lasting=told)))
    x, weight = torch.randn(1, 2, 4), torch.randn(2, 3, 3)
    grad = torch.randn(1, 3, 6)
    arguments = ([1], [0], [0], 1, [1])
    stood: list[bool] = []
    for graph in (True, False):
        kernels.log.clear()
        if graph:
            out = torch.ops.upconv.conv_transpose(x, weight, None, *arguments)
            torch.ops.upconv.conv_transpose_backward(grad, x, weight, text_of(*arguments), 1)
        else:
            out = upconv.conv_transpose1d(x, weight.requires_grad_())
        torch.testing.assert_close(out, torch.conv_transpose1d(x, weight))
        stood.append(any(told))
        told.clear()
        assert "fwd" in kernels.ran()
    assert stood == [False, True]


@pytest.mark.parametrize("end", ("thawed", "dead"))
def test_packed_weights_are_gone_at_once(end: str, frozen: Weights) -> None:
    """Not with the next collection, since they are memory of a GPU. They stay as long as the storage does."""
    frozen.packs()
    (entry,) = packed.frozen.values()
    gone = [weakref.ref(copy.tensor) for copy in entry.packed.values()]
    del entry
    gc.disable()
    try:
        view = frozen.weight.detach()
        if end == "thawed":
            packed.thaw(frozen.weight)
        else:
            frozen.weight = torch.empty(0)
            assert gone[0]() is not None
            del view
        assert len(gone) == 1 and gone[0]() is None and not packed.frozen
    finally:
        gc.enable()


def test_frozen_weights_swapped_at_one_address(weights: Weights) -> None:
    """A storage may be freed and another given its address, while the parameter's version does not move."""
    version, seen = weights.weight._version, set()
    for times in range(1, _MOST_TURNS):
        weights.weight.data = torch.empty(0)
        weights.weight.data = torch.randn(P.weight_shape)
        seen.add(weights.weight.data_ptr())
        assert weights.packs() == 1
        packed.freeze(weights.weight)
        assert [weights.packs(), weights.packs()] == [1, 0]
        if times >= 50 and len(seen) < times:
            break
    assert weights.weight._version == version
    assert len(seen) < times, "no address was ever used twice, so the test tested nothing"


_MOST_TURNS = 20_000  # a heap with as many free places of one size gives each out before the first comes back


def test_views_of_one_storage_are_told_apart(kernels: Kernels) -> None:
    both = torch.randn(2, *P.weight_shape)
    weights = Weights(both[0])
    packed.freeze(both[0])
    packed.freeze(both[1])
    assert [weights.packs(weight=both[i]) for i in (0, 1, 0, 1)] == [1, 1, 0, 0]
    square = torch.randn(4, 3, 3, 3)
    packed.freeze(square)
    assert [weights.packs(weight=w) for w in (square, square, square.mT, square)] == [1, 0, 1, 0]
    assert [weights.packs(weight=w) for w in (square, square, torch._neg_view(square))] == [0, 0, 1]


def test_a_weight_has_few_copies(frozen: Weights) -> None:
    """A layer that runs at many sizes may have a packing for each; the oldest copies go."""
    plans = [a_plan(P, packing=f"order {i}") for i in range(packed.MOST_COPIES + 2)]
    for plan, log in plans:
        frozen.plan, frozen.log = plan, log
        assert [frozen.packs(), frozen.packs()] == [1, 0]
        (entry,) = packed.frozen.values()
        assert len(entry.packed) <= packed.MOST_COPIES
    frozen.plan, frozen.log = plans[0]
    assert frozen.packs() == 1


def test_captured_graphs_pack_for_themselves(kernels: Kernels, frozen: Weights) -> None:
    """A graph lives longer than a promise may, and must find its packed weights where they were."""
    assert frozen.packs() == 1
    kernels.capturing = True
    assert [frozen.packs(), frozen.packs()] == [1, 1]
    kernels.capturing = False
    assert frozen.packs() == 0


def test_compiled_graphs_read_copies_and_make_none(frozen: Weights) -> None:
    assert [frozen.packs(lasting=False), frozen.packs(lasting=False)] == [1, 1]
    assert [frozen.packs(), frozen.packs(lasting=False)] == [1, 0]


def test_another_stream_waits_for_the_packing_once(kernels: Kernels, frozen: Weights) -> None:
    assert frozen.packs() == 1
    kernels.stream = 7
    assert [frozen.packs(), frozen.packs()] == [0, 0]
    assert kernels.waits == [0]
    kernels.stream = 0
    assert frozen.packs() == 0
    assert kernels.waits == [0]
    with torch.no_grad():
        frozen.weight.mul_(3)
    assert not packed.is_frozen(frozen.weight)
    packed.freeze(frozen.weight)
    kernels.stream = 7
    assert frozen.packs() == 1
    kernels.stream = 0
    assert frozen.packs() == 0
    assert kernels.waits == [0, 7]


# --- precision and memory format -------------------------------------------------------------------------------------


@pytest.fixture
def settings_of_precision() -> Iterator[Any]:
    """``torch.backends``, whose precision settings are put back."""
    cudnn: Any = torch.backends.cudnn
    general: Any = torch.backends
    before = (cudnn.conv.fp32_precision, cudnn.fp32_precision, general.fp32_precision, cudnn.enabled)
    yield torch.backends
    cudnn.conv.fp32_precision, cudnn.fp32_precision, general.fp32_precision, cudnn.enabled = before


def test_float32_precision_follows_pytorchs_setting(settings_of_precision: Any) -> None:
    cudnn = settings_of_precision.cudnn
    for value in ("tf32", "ieee", "tf32"):
        cudnn.conv.fp32_precision = value
        assert calls.float32_precision() == value
    cudnn.enabled = False
    assert calls.float32_precision() == "ieee"
    cudnn.enabled = True
    cudnn.conv.fp32_precision = "none"  # inherits
    for value in ("ieee", "tf32"):
        cudnn.fp32_precision = value
        assert calls.float32_precision() == value == cudnn.conv.fp32_precision
    # Reading the old flag raises where convolutions and RNNs differ; nothing here may.
    cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = "ieee", "tf32"
    try:
        assert calls.float32_precision() == "ieee"
    finally:
        cudnn.rnn.fp32_precision = "tf32"


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("rank", (1, 2, 3))
def test_memory_format_rule(rank: int, dtype: torch.dtype) -> None:
    """channels_last where either operand is, but for float64; 1-D always contiguous (``ConvUtils.h``)."""
    x, w = torch.randn(2, 4, *(5,) * rank, dtype=dtype), torch.randn(4, 3, *(3,) * rank, dtype=dtype)
    usual = torch.contiguous_format
    formats = [usual, {2: torch.channels_last, 3: torch.channels_last_3d}.get(rank, usual)]
    arguments = (1,) * rank, (0,) * rank, (0,) * rank, 1, (1,) * rank, dtype, None, H200
    for x_format, w_format in product(formats, formats):
        of = [(t.shape, t.contiguous(memory_format=f).stride()) for t, f in ((x, x_format), (w, w_format))]
        plan = dispatch.resolve(rank, *of[0], *of[1], None, *arguments)
        last = {x_format, w_format} != {usual} and dtype is not torch.float64
        assert plan is not None and plan.problem.layout == ("channels_last" if last else "nchw")


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("rank", (1, 2, 3))
def test_compiled_graphs_predict_the_same_formats(rank: int, dtype: torch.dtype) -> None:
    """The operator's fake result on CUDA tensors has the strides of `test_memory_format_rule`."""
    last = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}[rank]
    wanted = torch.contiguous_format if dtype is torch.float64 else last
    text = text_of([2] * rank, [1] * rank, [0] * rank, 1, [1] * rank)
    shape = (2, 4, *(5,) * rank), (4, 3, *(3,) * rank)
    with torch._subclasses.FakeTensorMode():
        usual = torch.contiguous_format
        x, x_last = (torch.empty(shape[0], dtype=dtype, device="cuda", memory_format=f) for f in (usual, last))
        w, w_last = (torch.empty(shape[1], dtype=dtype, device="cuda", memory_format=f) for f in (usual, last))
        out = torch.ops.upconv.conv_transpose_forward(x, w, None, text)
        assert out.shape == (2, 3, *(9,) * rank) and out.is_contiguous()
        for pair in ((x_last, w), (x, w_last)):
            out = torch.ops.upconv.conv_transpose_forward(*pair, None, text)
            assert out.is_contiguous(memory_format=wanted) and out.device.type == "cuda"
            grads = torch.ops.upconv.conv_transpose_backward(out, *pair, text, 3)
            assert [g.shape for g in grads] == [x.shape, w.shape]
            assert all(g.is_contiguous(memory_format=wanted) for g in grads)


# --- strict ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _lenient() -> Iterator[None]:
    yield
    upconv.strict(False)


def test_strict_refuses_what_pytorch_would_serve() -> None:
    call = make_call((2, 4, 5, 6), (4, 3, 3, 3), False, stride=2)
    call.run(OURS)
    with upconv.strict(True):
        with pytest.raises(RuntimeError, match=r"4->3 k3 s2 p0 on 2x4x5x6 float32.*the output is small"):
            call.run(OURS)
        with pytest.raises(RuntimeError, match="complex64"):
            make_call((2, 4, 5, 6), (4, 3, 3, 3), dtype=torch.complex64).run(OURS)
        with pytest.raises(RuntimeError, match="a Mine"):
            Call(call.input.as_subclass(Mine), call.weight, call.bias).run(OURS)
        w = torch.randn(4, 3, 5).mT.contiguous().mT
        with pytest.raises(RuntimeError, match="strides of this 1-D input for channels_last"):
            upconv.conv_transpose1d(torch.randn(2, 1, 4).mT, w.contiguous())
        with pytest.raises(RuntimeError, match="strides of this 1-D weight for channels_last"):
            upconv.conv_transpose1d(torch.randn(2, 4, 6), w)
        with pytest.raises(RuntimeError, match=r"upconv\.strict"):
            torch.ops.upconv.conv_transpose(call.input, call.weight, None, [2, 2], [0, 0], [0, 0], 1, [1, 1])
        with upconv.strict(False):
            call.run(OURS)
        with pytest.raises(RuntimeError, match=r"upconv\.strict"):
            call.run(OURS)
    call.run(OURS)


class Mine(Tensor):
    pass


def test_strict_exempts_what_pytorch_must_see() -> None:
    call = make_call((2, 4, 5, 6), (4, 3, 3, 3), stride=2)
    x, w = call.input, call.weight
    with upconv.strict(True):
        torch.func.vmap(lambda t: upconv.conv_transpose2d(t, w))(x)
        torch.func.jvp(lambda t: upconv.conv_transpose2d(t, w), (x,), (x,))
        assert upconv.conv_transpose2d(x[:0], w).shape[0] == 0
        assert upconv.conv_transpose2d(x.to("meta"), w.to("meta")).device.type == "meta"
        with torch._subclasses.FakeTensorMode() as mode:
            fake = [mode.from_tensor(t) for t in (x, w)]
            upconv.conv_transpose2d(*fake)
        upconv.conv_transpose2d(*fake)
        torch.export.export(upconv.ConvTranspose2d(4, 3, 3), (x,))


# --- warmup ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the compiler was asked for."""
    found: list[tuple[str, str]] = []

    def cubin(source: str, arch: str, label: str = "") -> bytes:
        found.append((source, arch))
        return b""

    monkeypatch.setattr(jit, "cubin", cubin)
    return found


def test_warmup_compiles_and_loads_everything(kernels: Kernels, compiled: list[tuple[str, str]]) -> None:
    model = nn.Sequential(upconv.ConvTranspose2d(4, 6, 3, 2), nn.BatchNorm2d(6), upconv.ConvTranspose2d(6, 3, 5))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    told: list[tuple[str, int, int]] = []
    model[1].eval()
    lines = upconv.warmup(model, torch.randn(2, 4, 5, 5), progress=lambda *args: told.append(args))
    assert lines == ["fwd (3, 3) for sm_90a", "fwd (5, 5) for sm_90a"]
    assert [arch for _, arch in compiled] == ["90a", "90a"] and len(set(compiled)) == 2
    assert [args[1:] for args in told] == [(1, 2), (2, 2)]
    assert names(kernels.log) == ["prepare", "prepare"]  # loaded, and nothing was run
    assert model.training and model[0].training and not model[1].training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert upconv.warmup(model, torch.randn(2, 4, 5, 5)) == []
    more = upconv.warmup(model, (2, 4, 5, 5), training=True)  # although the forward's kernels are loaded
    assert more == [f"{pass_} ({k}, {k}) for sm_90a" for pass_ in ("grad-input", "grad-weight") for k in (3, 5)]
    assert upconv.warmup(model, (2, 4, 5, 5), training=True) == []
    kernels.log.clear()
    model(torch.randn(2, 4, 5, 5, requires_grad=True)).sum().backward()
    assert kernels.log and "prepare" not in names(kernels.log)


def test_warmup_compiles_sums_for_the_bias_with_the_rest(
    kernels: Kernels, compiled: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(bias, "serves", lambda p: True)
    monkeypatch.setattr(prepared, "loaded", lambda launch, arguments, device: loaded.append(launch.entry))
    layer = upconv.ConvTranspose2d(4, 6, 3)
    lines = upconv.warmup(layer, (2, 4, 5, 5), training=True)
    assert [line.split()[0] for line in lines] == ["bias", "fwd", "grad-input", "grad-weight"]
    assert len(compiled) == 4 and set(loaded) == {"sum", "sum_at_once", "finish"}
    assert upconv.warmup(layer, (2, 4, 5, 5), training=True) == []

    def cubin(source: str, arch: str, label: str) -> bytes:
        if label.startswith("bias"):
            raise RuntimeError("no compiler")
        return b""

    monkeypatch.setattr(jit, "cubin", cubin)
    strided, said = upconv.ConvTranspose2d(4, 6, 3, stride=2), r"the gradient for the bias of 4->6 k3 .*: no compiler"
    with pytest.raises(RuntimeError, match=said):
        upconv.warmup(strided, (3, 4, 5, 5), training=True)
    monkeypatch.setattr(prepared, "loaded", lambda launch, arguments, device: cubin("", "90a", "bias"))
    with pytest.raises(RuntimeError, match=said):
        strided(torch.randn(3, 4, 5, 5)).sum().backward()


# --- on a GPU --------------------------------------------------------------------------------------------------------

CUDA = pytest.mark.gpu


def _layer_on_gpu() -> tuple[upconv.ConvTranspose2d, Tensor]:
    return upconv.ConvTranspose2d(16, 24, 4, stride=2, padding=1).cuda(), torch.randn(4, 16, 20, 20, device="cuda")


def _theirs(layer: upconv.ConvTranspose2d, x: Tensor) -> Tensor:
    out: Tensor = torch.conv_transpose2d(x.double(), layer.weight.double(), layer.bias.double(), 2, 1)  # type: ignore[union-attr]
    return out


def near(out: Tensor, truth: Tensor) -> bool:
    return reference.relative_error(out, truth) < 1e-3


@CUDA
def test_gpu_two_streams_share_packed_weights() -> None:
    layer, x = _layer_on_gpu()
    truth = _theirs(layer, x)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    with torch.no_grad():
        for turn in range(20):
            if turn % 5 == 0:
                upconv.freeze(layer.eval())
            with torch.cuda.stream(streams[turn % 2]):
                torch.cuda._sleep(200_000)
                outs.append(layer(x))
    torch.cuda.synchronize()
    assert all(near(out, truth) for out in outs)


@CUDA
def test_gpu_calls_do_not_synchronise() -> None:
    layer, x = _layer_on_gpu()
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
        with torch.no_grad():
            layer(x)
            layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@CUDA
def test_gpu_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    layer, x = _layer_on_gpu()
    truth = _theirs(layer, x)
    other = upconv.ConvTranspose2d(16, 24, 4, stride=2, padding=1).to("cuda:1")
    other.load_state_dict(layer.state_dict())
    with torch.no_grad(), upconv.strict(True):
        for _ in range(3):
            assert near(layer(x), truth)
            assert near(other(x.to("cuda:1")).to("cuda:0"), truth)
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError):
        layer(x.to("cuda:1"))


@CUDA
def test_gpu_out_of_memory_leaves_the_library_usable() -> None:
    layer, x = _layer_on_gpu()
    torch.cuda.empty_cache()
    images = int(1.5 * torch.cuda.mem_get_info()[0] / (24 * 40 * 40 * 4))  # an output of 1.5 times what is free
    with torch.no_grad():
        with pytest.raises(torch.OutOfMemoryError):
            layer(x[:1].expand(images, 16, 20, 20))
        assert near(layer(x), _theirs(layer, x))
