"""Replayed calls: recordings, and the module in C++ on the CPU, whose driver and kernels are Python's (`driver`)."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import upconv
from conftest import assert_equal
from driver import LoggedData, LoggedWeight, Machine
from situations import differences
from situations.processes import in_threads
from standins import Kernels
from test_calls import called, random_calls
from upconv import convolutions, dispatch, modules, ops
from upconv.cpu import memory_format
from upconv.cuda import recording, weights
from upconv.cuda.compile import cache
from upconv.problem import LAYOUTS, Layout
from upconv.replay import calls, native, replays


@contextmanager
def in_python() -> Iterator[None]:
    """No call is replayed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "hoped", False)
        yield


class Layers:
    """A layer of ours and a copy whose calls are never replayed."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.replayed = make()
        self.plain = make()
        self.plain.load_state_dict(self.replayed.state_dict())

    def step(self, layer: nn.Module, x: Tensor, grad: Tensor | None = None, autocast: bool = False) -> list[Tensor]:
        """The output and the gradients; by default of a random gradient in the output's own format."""
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            out = layer(x)
        if grad is None:
            grad = torch.empty_like(out).copy_(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
        return [out, *torch.autograd.grad(out, [x, *layer.parameters()], grad)]

    def alike(self, x: Tensor, grad: Tensor | None = None, autocast: bool = False) -> bool:
        """Whether the call is replayed. Results, gradients, dtypes and strides of both are the same."""
        ours = self.step(self.replayed, x, grad, autocast)
        with in_python():
            theirs = self.step(self.plain, x, grad, autocast)
        for a, b in zip(ours, theirs):
            assert_equal(a, b)
        return is_replayed(ours[0])


def is_replayed(out: Tensor) -> bool:
    return out.grad_fn is not None and "upconv::ConvTranspose" in out.grad_fn.name()


def warm(layer: nn.Module, x: Tensor, times: int = 4, autocast: bool = False) -> None:
    """So many calls and backwards, behind which calls are replayed."""
    for _ in range(times):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = layer(x)
        out.sum().backward()


CASES = (
    lambda: upconv.ConvTranspose2d(5, 6, 3, 2, 1),
    lambda: upconv.ConvTranspose2d(4, 6, (3, 4), (2, 1), 1, groups=2, bias=False),
    lambda: upconv.ConvTranspose1d(5, 3, 4, 2, 1, 1, dilation=2),
    lambda: upconv.ConvTranspose3d(3, 4, 2, 2),
)
SIZES = ((2, 5, 4, 7), (3, 4, 5, 3), (2, 5, 9), (2, 3, 3, 2, 4))


# --- recordings -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_repeated_is_computed_all_the_same() -> None:
    x, other = torch.randn(8), torch.randn(8)
    for run, reason in (
        (lambda: torch.cat([x, x]), "takes several tensors as one argument"),
        (lambda: x.add(other), "reads a tensor that is neither"),
    ):
        with recording.Recording((x,)) as to:
            run()
        with pytest.raises(recording.Unrecorded, match=reason):
            to.repeatable((x,))


# --- replayed calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make, size", list(zip(CASES, SIZES)), ids=("bias", "groups", "1d", "3d"))
def test_replayed_calls_are_what_they_were(
    machine: Machine, kernels: Kernels, make: Any, size: Any, layout: Layout
) -> None:
    if layout == "channels_last" and len(size) == 3:
        pytest.skip("no such layout")
    order = memory_format(layout, len(size) - 2)
    layers = Layers(make)
    for _ in range(4):
        layers.alike(x := torch.randn(size).contiguous(memory_format=order))
    kernels.log.clear()
    machine.launched.clear()
    out = layers.replayed(x.requires_grad_())
    assert is_replayed(out)
    out.sum().backward()  # an expanded gradient, which is made dense
    assert kernels.log == [], "Python computed none of it"
    hows = [how for how, _, _ in machine.launched]
    assert hows == ["ordinary", "dependent", "cooperative", "ordinary", "dependent"]
    for _ in range(3):
        layers.alike(torch.randn(size).contiguous(memory_format=order), torch.randn(out.shape))


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_are_what_python_computes(seed: int, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain calls, which are replayed in the end, and any others in between; also autocast's, with float32 weights."""
    monkeypatch.setattr(dispatch, "ROUNDING", ("cpu",))
    rng, replayed = random.Random(seed), 0
    for layer, x, context in random_calls(rng, 120, 0.2, 0.02, 0.3):
        with context:
            found = called(layer, x, None)
            with in_python(), monkeypatch.context() as m:
                m.setattr(calls, "seen", {})
                wanted = called(layer, x, None)
        replayed += isinstance(found, list) and is_replayed(found[0])
        assert not differences(found, wanted, 0)
    assert replayed > 10


@pytest.mark.parametrize("mask", range(1, 8))
def test_only_what_is_asked_is_computed(machine: Machine, mask: int) -> None:
    layer = CASES[0]()
    x = torch.randn(SIZES[0], requires_grad=True)
    given = [t for i, t in enumerate((x, layer.weight, layer.bias)) if mask >> i & 1]
    for _ in range(5):
        truth = torch.autograd.grad(layer(x).pow(2).sum(), given)
    machine.launched.clear()
    out = layer(x)
    forward = len(machine.launched)
    assert is_replayed(out) and forward == 2
    found = torch.autograd.grad(out.pow(2).sum(), given)
    for a, b in zip(found, truth):
        assert_equal(a, b)
    assert len(machine.launched) - forward == 2 * (mask & 1) + (mask >> 1 & 1)


@pytest.mark.parametrize("within", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("autocast", (False, True), ids=("float32", "autocast"))
def test_calls_without_gradients_are_replayed(
    within: Any, autocast: bool, machine: Machine, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "ROUNDING", ("cpu",))
    layer, x = CASES[0](), torch.randn(SIZES[0])
    warm(layer, x, autocast=autocast)
    with within(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outs = [layer(x) for _ in range(4)]
        kernels.log.clear()
        machine.launched.clear()
        out = layer(x)
        assert kernels.log == [] and [how for how, *_ in machine.launched] == ["ordinary", "dependent"]
        assert not out.requires_grad and out.is_inference() == torch.is_inference_mode_enabled()
        for other in outs:
            assert_equal(out, other)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        again = layer(x)
    assert is_replayed(again)
    assert_equal(again.detach(), out.clone())


@pytest.mark.parametrize("failing", ("inference", "training", "gradients"))
def test_running_out_of_memory_once_leaves_no_call_to_python(
    failing: str, machine: Machine, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a pass is recorded, which a later call does then."""
    layer, x = CASES[0](), torch.randn(SIZES[0])

    def step(backward: bool = True) -> None:
        with torch.set_grad_enabled(failing != "inference"):
            out = layer(x)
        if out.requires_grad and backward:
            torch.autograd.grad(out.sum(), list(layer.parameters()))

    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("2 GiB more than there is")

    for _ in range(3 if failing == "gradients" else 2):
        step(backward=False)
    with monkeypatch.context() as m:
        m.setattr(LoggedWeight if failing == "gradients" else LoggedData, "run", full)
        with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
            step()
    for _ in range(2):
        step()
    kernels.log.clear()
    step()
    assert kernels.log == []


def test_a_gradient_that_begins_elsewhere_is_not_what_is_recorded(machine: Machine, monkeypatch: Any) -> None:
    """The pass copies it, and a recording would have other gradients copied too."""
    layer, x = CASES[0](), torch.randn(SIZES[0], requires_grad=True)
    steps: list[Any] = []
    repeatable = recording.Recording.repeatable
    monkeypatch.setattr(
        recording.Recording, "repeatable", lambda self, found: steps.extend(self.steps) or repeatable(self, found)
    )
    for beyond in (0, 0, 0, 1, 0):
        out = layer(x)
        grad = torch.randn(out.numel() + 1)[beyond : out.numel() + beyond].view(out.shape)
        torch.autograd.grad(out, [x, *layer.parameters()], grad)
    called = [one.name for one in steps if isinstance(one, recording.Call)]
    assert not set(called) & {"aten::clone", "aten::copy_"} and is_replayed(out)


def test_graphs_behave_as_pytorchs(machine: Machine) -> None:
    layer = CASES[0]()
    x = torch.randn(SIZES[0], requires_grad=True)
    warm(layer, x)
    out = layer(x)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()
    out = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    seen = []
    out = layer(x)
    out.register_hook(lambda g: seen.append("tensor"))
    out.grad_fn.register_hook(lambda *g: seen.append("node"))
    out.sum().backward()
    assert seen == ["tensor", "node"]
    x.grad = None
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t.clone(), lambda t: t):
        out = layer(x)
    out.sum().backward()
    assert len(kept) == 2 and is_replayed(out)
    before, x.grad = x.grad, None
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert_equal(x.grad, before)
    out = layer(x)
    batch = torch.randn(3, *out.shape)
    (found,) = torch.autograd.grad(out, x, batch, is_grads_batched=True, retain_graph=True)
    for g, each in zip(batch, found):
        torch.testing.assert_close(each, torch.autograd.grad(out, x, g, retain_graph=True)[0])
    out = layer(x)
    assert torch.autograd.grad(out, x, torch.ones_like(out).requires_grad_(), create_graph=True)[0].requires_grad


def test_a_frozen_layer_is_not_replayed_as_another_that_is_alike(machine: Machine, packing: None) -> None:
    """Its gradient ends the promise, since an optimiser may step behind PyTorch's back then: of earlier calls too."""
    trained, kept = (upconv.ConvTranspose2d(5, 6, 3, 2, 1) for _ in range(2))
    x = torch.randn(2, 5, 4, 7)
    warm(trained, x)
    before = trained(x)
    with upconv.frozen(kept.eval()), upconv.frozen(trained.eval()):
        after = kept(x)
        assert is_replayed(before) and not is_replayed(after)
        for layer, out in ((kept, after), (trained, before)):
            assert weights.is_frozen(layer.weight)
            out.sum().backward()
            assert not weights.is_frozen(layer.weight)
        assert is_replayed(kept(x))


def infer(model: nn.Module, x: Tensor, autocast: bool = False) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out: Tensor = model(x)
    return out


class FrozenLayers:
    """Two frozen models that are alike, whose calls are replayed, and what Python computes."""

    def __init__(self, machine: Machine, kernels: Kernels) -> None:
        self._machine, self._kernels = machine, kernels
        torch.manual_seed(0)
        layers = (nn.ConvTranspose2d(5, 6, 3, 2, 1) for _ in range(2))
        self.models = [upconv.freeze(upconv.accelerate(nn.Sequential(layer)).eval()) for layer in layers]
        self.x = torch.randn(2, 5, 4, 7)
        for model in self.models * 5:
            infer(model, self.x)

    def replayed(self, model: nn.Module, autocast: bool = False, packs: bool = False) -> Tensor:
        """The result of a call, in which Python takes no part and the frozen weight's copy is read."""
        self._kernels.log.clear()
        self._machine.launched.clear()
        out = infer(model, self.x, autocast)
        assert self._kernels.log == []
        assert [how for how, *_ in self._machine.launched] == (["ordinary", "dependent"] if packs else ["ordinary"])
        return out

    def truth(self, model: nn.Module, autocast: bool = False) -> Tensor:
        plain = upconv.accelerate(nn.Sequential(nn.ConvTranspose2d(5, 6, 3, 2, 1)).eval())
        plain.load_state_dict(model.state_dict())
        with in_python():
            return infer(plain, self.x, autocast)

    def copies(self, model: Any) -> list[weakref.ref[Tensor]]:
        entry = weights.held(model[0].weight)
        assert entry is not None
        return [weakref.ref(found.tensor) for found in entry.packed.values() if found is not None]


@pytest.fixture
def frozen_layers(machine: Machine, kernels: Kernels, packing: None) -> FrozenLayers:
    return FrozenLayers(machine, kernels)


@pytest.mark.parametrize("autocast", (False, True), ids=("float32", "autocast"))
def test_frozen_layers_are_replayed_each_with_its_copy(
    frozen_layers: FrozenLayers, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "ROUNDING", ("cpu",))
    for model in frozen_layers.models * 5:
        infer(model, frozen_layers.x, autocast)
    for model in frozen_layers.models:
        assert_equal(frozen_layers.replayed(model, autocast), frozen_layers.truth(model, autocast))


def test_a_frozen_layer_whose_copy_is_dropped_while_it_is_recorded_is_recorded_later(
    frozen_layers: FrozenLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = frozen_layers.models[0], torch.randn(3, 5, 4, 7)
    record = replays.layer_of

    def dropping(*given: Any) -> Any:
        monkeypatch.setattr(replays, "layer_of", record)
        weights.frozen[next(at for at in weights.frozen if at[1] == model[0].weight.data_ptr())].packed.clear()
        return record(*given)

    monkeypatch.setattr(replays, "layer_of", dropping)
    for _ in range(6):
        infer(model, x)
    assert replays.layer_of is record
    frozen_layers.x = x
    assert_equal(frozen_layers.replayed(model), frozen_layers.truth(model))


Change = Callable[[Any, Tensor], object]


def behind(ends: Change, then: Callable[[Any], object] = lambda model: None) -> Change:
    """What ends the promise, and then a change of the weight that nothing counts."""

    def change(model: Any, x: Tensor) -> None:
        ends(model, x)
        model[0].weight.data.mul_(0.5)
        then(model)

    return change


def _in_training_mode(model: Any, x: Tensor) -> None:
    model[0].training = True
    infer(model, x)
    model[0].training = False


def _loaded(model: Any, x: Tensor, assign: bool = False) -> None:
    model.load_state_dict({name: t * 0.5 for name, t in model.state_dict().items()}, assign=assign)


CHANGES: dict[str, Change] = {
    "trained": behind(lambda model, x: model(x).sum().backward()),
    "trained for a moment": behind(lambda model, x: model.train(), nn.Module.eval),
    "called in training mode": behind(_in_training_mode),
    "restored": behind(lambda model, x: upconv.restore(model), upconv.accelerate),
    "thawed": behind(lambda model, x: upconv.thaw(model)),
    "moved": lambda model, x: setattr(model[0].weight, "data", torch.randn_like(model[0].weight)),
    "seen in place": torch.no_grad()(lambda model, x: model[0].weight.mul_(0.5)),
    "loaded": _loaded,
    "assigned": partial(_loaded, assign=True),
}


@pytest.mark.parametrize("again", (False, True), ids=("thawed", "frozen anew"))
@pytest.mark.parametrize("change", CHANGES)
def test_what_replays_a_frozen_layer_ends_with_its_promise(
    change: str, again: bool, frozen_layers: FrozenLayers
) -> None:
    model, other = frozen_layers.models
    before, copies = frozen_layers.replayed(model), frozen_layers.copies(model)
    CHANGES[change](model, frozen_layers.x)
    if again:
        upconv.freeze(model)
    for _ in range(3):
        after = infer(model, frozen_layers.x)
        assert_equal(after, frozen_layers.truth(model))
    assert not torch.equal(before, after)
    assert len(copies) == 1 and copies[0]() is None, "nothing holds a copy for longer than the promise"
    assert weights.is_frozen(model[0].weight) is again
    assert_equal(frozen_layers.replayed(model, packs=not again), after)
    assert_equal(frozen_layers.replayed(other), frozen_layers.truth(other))


@pytest.fixture
def read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take weights as they are in memory."""
    monkeypatch.setattr(LoggedData, "pack", lambda self, weight: weight)


def test_a_frozen_weight_that_is_read_as_it_is_is_replayed_as_any_other(
    read_as_they_are: None, frozen_layers: FrozenLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept of it, so that nobody looks for a copy, and a change that nothing counts is seen."""
    looked: list[int] = []
    held = weights.held
    monkeypatch.setattr(weights, "held", lambda weight: looked.append(1) or held(weight))
    for model in frozen_layers.models:
        weight: Any = model[0].weight  # type: ignore[index]
        looked.clear()
        out = frozen_layers.replayed(model, packs=True)
        assert looked == [] and weights.is_frozen(weight) and frozen_layers.copies(model) == []
        assert_equal(out, frozen_layers.truth(model))
        weight.data.mul_(0.5)
        assert_equal(frozen_layers.replayed(model, packs=True), frozen_layers.truth(model))


def test_a_thread_finds_meanwhile_that_a_weight_is_read_as_it_is(
    read_as_they_are: None, frozen_layers: FrozenLayers
) -> None:
    """Between any two looks at what the calls have noted of the weight."""
    left: list[Any] = []

    class Meanwhile(calls.Call):
        __slots__ = ()

        @property
        def runner(self) -> Any:
            return left.pop() if left else False

        @runner.setter
        def runner(self, value: Any) -> None:
            pass

    model = frozen_layers.models[0]
    truth = frozen_layers.truth(model)
    (call,) = (call for seen in calls.seen.values() for call in seen.calls)
    noted = call.operation.runner(-1)
    call.__class__ = Meanwhile
    for looks in range(5):
        left[:] = [noted] * looks
        assert_equal(infer(model, frozen_layers.x), truth)


def test_replays_of_a_frozen_layer_on_other_streams(
    frozen_layers: FrozenLayers, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call there waits until the copy is packed; none reads it while a graph is captured."""
    model = frozen_layers.models[0]
    truth = frozen_layers.truth(model)
    kernels.stream = 1
    monkeypatch.setattr(replays, "capturing", lambda: kernels.capturing)
    kernels.capturing = True
    assert_equal(infer(model, frozen_layers.x), truth)
    assert not kernels.waits
    kernels.capturing = False
    for _ in range(2):
        assert_equal(frozen_layers.replayed(model), truth)
    assert kernels.waits == [0]


def test_pytorchs_compiler_of_backwards(machine: Machine) -> None:
    from torch._dynamo import compiled_autograd

    layer = CASES[0]()
    x = torch.randn(SIZES[0])
    warm(layer, x)
    wanted = torch.autograd.grad(layer(x).pow(2).sum(), layer.weight)[0]
    layer.weight.grad = None
    out = layer(x)
    assert is_replayed(out)
    with compiled_autograd._enable(lambda graph: graph):
        out.pow(2).sum().backward()
    assert_equal(layer.weight.grad, wanted)


def test_threads_replay_at_once(machine: Machine) -> None:
    layer = CASES[3]()
    x = torch.randn(SIZES[3])
    warm(layer, x)
    given = [torch.randn(SIZES[3]) for _ in range(4)]
    truth = [torch.autograd.grad(layer(each).pow(2).sum(), layer.weight)[0] for each in given]

    def work(x: Tensor) -> list[Tensor]:
        outs = [layer(x) for _ in range(20)]
        assert all(map(is_replayed, outs))
        return [torch.autograd.grad(out.pow(2).sum(), layer.weight)[0] for out in outs]

    for found, wanted in zip(in_threads([partial(work, each) for each in given]), truth):
        assert all(torch.equal(each, wanted) for each in found)


@pytest.mark.parametrize("theirs", ("never", "fwd", "grad-input", "grad-weight"))
def test_plain_convolutions_are_replayed_with_pytorchs_passes_too(
    machine: Machine, stand_ins: Kernels, theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "faster", lambda plan, pass_, *_: pass_ != theirs)
    layers = Layers(lambda: upconv.accelerate(nn.Conv2d(5, 6, 3, 2, 1), convolutions=True))
    x = torch.randn(2, 5, 7, 8)
    for _ in range(5):
        layers.alike(x)
    stand_ins.log.clear()
    out = layers.replayed(x.requires_grad_())
    assert is_replayed(out)
    torch.autograd.grad(out.sum(), [x, *layers.replayed.parameters()])
    assert stand_ins.log == []
    layers.alike(torch.randn(2, 5, 7, 8), torch.randn(out.shape))


# --- the library ------------------------------------------------------------------------------------------------------


def test_a_process_waits_for_another_that_compiles_the_library(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for ever."""
    monkeypatch.setattr(native, "_load", lambda path: path.read_bytes()[:7])
    monkeypatch.setattr(native, "_compiled", lambda: b"library" * 9)
    begin = time.monotonic()
    with native._alone(native._name()):
        waiting = threading.Thread(target=native.found)
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        cache.write(native._name(), b"another" * 9)
    waiting.join(10)
    assert native.found() == b"another" and not waiting.is_alive()
    monkeypatch.setattr(native, "_MOST_SECONDS", 0.3)
    cache.clear()
    with native._alone(native._name()):
        assert native.found() == b"library" and 0.3 < time.monotonic() - begin < 30


def test_a_refused_launch_leaves_no_layer_to_python_for_ever(machine: Machine) -> None:
    layer = CASES[0]()
    x = torch.randn(SIZES[0])
    warm(layer, x)
    assert is_replayed(layer(x))
    machine.answer = 1
    for _ in range(3):
        with pytest.raises(RuntimeError, match="could not compute"):
            layer(x)
    machine.answer = 0
    assert is_replayed(layer(x))
    machine.answer = 201  # a thread without a context gets it
    assert is_replayed(layer(x)) and machine.context_bound == 77
    ops.forget_plans()
    assert [is_replayed(layer(x)) for _ in range(replays.CALLS + 1)] == [False] * replays.CALLS + [True]


@pytest.fixture
def compiler(cold: Path, no_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """A process in which nothing was compiled yet, and the compiler is a script."""
    monkeypatch.setattr(native, "_python_headers", lambda: tmp_path)
    (tmp_path / "Python.h").touch()

    def make(script: str) -> Path:
        path = tmp_path / "c++"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


def test_a_compiler_that_fails_leaves_everything_in_python(compiler: Callable[[str], Path]) -> None:
    broken = compiler("echo 'no header' >&2\nexit 3")
    assert native.wait(60) is None and native.hopeless()
    assert native.state() == f"RuntimeError: {broken} returned 3: no header"


def test_nobody_waits_for_a_compiler_that_hangs(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But its thread, which stops it in the end."""
    compiler(f"echo $$ > {tmp_path / 'pid'}\nexec sleep 600")
    monkeypatch.setattr(native, "_COMPILING_SECONDS", 2.0)
    begin = time.monotonic()
    assert native.off() is None and native.module() is None and not native.hopeless()
    assert time.monotonic() - begin < 1.5
    assert native.wait(60) is None and native.hopeless() and "TimeoutExpired" in native.state()
    child = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while time.monotonic() < until and not _gone(child):
        time.sleep(0.05)
    assert _gone(child)


def _gone(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().split()[2] == "Z"
    except FileNotFoundError:
        return True


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", (False, True), ids=("float32", "autocast"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make, size", (
    (lambda: upconv.ConvTranspose2d(64, 32, 4, 2, 1), (8, 64, 16, 16)),
    (lambda: upconv.ConvTranspose2d(100, 64, 4, bias=False), (32, 100, 1, 1)),
    (lambda: upconv.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), (16, 64, 32, 32)),
    (lambda: upconv.ConvTranspose2d(64, 64, 3, 2, 1, groups=4), (8, 64, 17, 19)),
    (lambda: upconv.ConvTranspose2d(64, 64, 4, 2, 1, groups=64), (8, 64, 32, 32)),
    (lambda: upconv.ConvTranspose2d(256, 128, 2, 2), (2, 256, 32, 32)),
    (lambda: upconv.ConvTranspose1d(64, 32, 16, 8, 4), (4, 64, 128)),
    (lambda: upconv.ConvTranspose3d(32, 16, 3, 2, 1, 1), (2, 32, 8, 8, 8)),
    (lambda: upconv.accelerate(nn.Conv2d(64, 128, 4, 2, 1), convolutions=True), (16, 64, 32, 32)),
    (lambda: upconv.accelerate(nn.Conv1d(128, 128, 3, padding=3, dilation=3), convolutions=True), (16, 128, 2048)),
), ids=("k4", "latent", "rgb", "groups", "depthwise", "k2", "1d", "3d", "conv2d", "conv1d"))  # fmt: skip
def test_replayed_calls_on_a_gpu(
    make: Any, size: Any, layout: Layout, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as in Python, over changing values, and after the memory of earlier calls was used otherwise."""
    monkeypatch.setattr(convolutions, "faster", lambda plan, pass_, *_: plan.selection(pass_).choice is not None)
    monkeypatch.setattr(modules, "small", lambda *shapes: False)
    convolutions.forget()
    if native.wait() is None:
        pytest.skip(native.state())
    if layout == "channels_last" and len(size) == 3:
        pytest.skip("no such layout")
    order = memory_format(layout, len(size) - 2)
    layers = Layers(lambda: make().cuda().to(memory_format=order))
    replayed = False
    for _ in range(8):
        x = torch.randn(size, device="cuda").contiguous(memory_format=order)
        replayed |= layers.alike(x, autocast=autocast)
        torch.full((1 << 22,), float("nan"), device="cuda")
    assert replayed


@pytest.mark.gpu
def test_replayed_calls_on_other_streams_and_in_graphs() -> None:
    if native.wait() is None:
        pytest.skip(native.state())
    layer = upconv.ConvTranspose2d(64, 32, 4, 2, 1).cuda()
    x = torch.randn(8, 64, 16, 16, device="cuda", requires_grad=True)

    def step() -> tuple[bool, list[Tensor]]:
        out = layer(x)
        found = torch.autograd.grad(out.pow(2).sum(), [x, *layer.parameters()])
        return is_replayed(out), [out.detach(), *found]

    first = torch.cuda.Stream()  # whose leaves a graph may wait for, which it may not for the default stream's
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        for _ in range(5):
            replayed, wanted = step()
    assert replayed
    for _ in range(3):
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            replayed, found = step()
        torch.cuda.synchronize()
        assert replayed
        for a, b in zip(found, wanted):
            assert_equal(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=first):
        replayed, captured = step()
    assert not replayed
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(captured, wanted):
            assert_equal(a, b)
    with torch.cuda.stream(first):
        assert step()[0]
