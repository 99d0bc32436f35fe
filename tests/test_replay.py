"""Calls that come again: when they are recorded, that a replay is the same call, and what ends one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import upconv
from upconv import planner
from upconv.cuda import launch, replay
from upconv.cuda.gpu import H200
from upconv.cuda.launch import LaunchError
from upconv.problem import Problem


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    replay.forget()
    yield
    replay.forget()


# --- a kind of calls, without a GPU ----------------------------------------------------------------------------------


class Machine:
    """Recorded launches are lists of what was launched; a graph repeats its list."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.recording: list[Any] | None = None
        self.recorded = 0
        self.stream = 7
        self.failure: RuntimeError | None = None

    def launch(self, *what: Any) -> None:
        (self.ran if self.recording is None else self.recording).append(what)

    def record(self, device: int, launches: Callable[[], object]) -> Any:
        if self.failure is not None:
            raise self.failure
        self.recording = []
        try:
            launches()
        finally:
            steps, self.recording = self.recording, None
        self.recorded += 1
        return Replay(self, steps)


class Replay:
    def __init__(self, machine: Machine, steps: list[Any]) -> None:
        self.machine, self.steps, self.used = machine, steps, True

    def __call__(self) -> None:
        self.used = True
        self.machine.ran.append(("graph", *self.steps))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(launch, "record", found.record)
    monkeypatch.setattr(replay, "current_stream", lambda device: found.stream)
    return found


LIKE = torch.zeros(4)


def caller(
    machine: Machine, sizes: Sequence[int] = (100, 30), more: Callable[[], object] = lambda: None
) -> Callable[..., None]:
    """Calls of one kind: launches with two temporaries, at addresses given."""
    replays = replay.Replays(0)

    def launches(*addresses: int) -> None:
        rooms = [LIKE.new_empty_strided((size,), (1,), dtype=torch.int16) for size in sizes]
        more()
        machine.launch(*addresses, *(room.data_ptr() for room in rooms))

    def call(*addresses: int) -> None:
        kind = replays.kind("these")
        if kind is None:
            launches(*addresses)
        else:
            kind(addresses, LIKE, launches, addresses)

    return call


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The block that every call gets; as from an allocator that gives out what was freed."""
    found = torch.zeros(1 << 20, dtype=torch.uint8)
    plain = Tensor.new_empty_strided

    def given(self: Tensor, shape: Any, strides: Any, dtype: Any = None, **rest: Any) -> Tensor:
        if dtype is torch.uint8:
            return found[: shape[0]]
        return plain(self, shape, strides, dtype=dtype, **rest)

    monkeypatch.setattr(Tensor, "new_empty_strided", given)
    return found


def test_a_call_is_recorded_when_its_addresses_were_seen_twice_and_then_replayed(
    machine: Machine, block: Tensor
) -> None:
    call = caller(machine)
    for _ in range(9):
        call(1, 2)
    kinds = [step[0] == "graph" for step in machine.ran]
    assert kinds == [False] * 4 + [True] * 5, "the first, one that is watched, and two that are counted"
    assert machine.recorded == 1
    (step,) = machine.ran[-1][1:]
    assert step == (1, 2, block.data_ptr(), block.data_ptr() + 512), "the temporaries are parts of the block"


def test_other_addresses_streams_and_blocks_are_other_calls(
    machine: Machine, block: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = caller(machine)
    for _ in range(6):
        call(1, 2)
    assert machine.ran[-1][0] == "graph"
    call(1, 3)
    assert machine.ran[-1][:2] == (1, 3)
    machine.stream = 8
    call(1, 2)
    assert machine.ran[-1][:2] == (1, 2)
    machine.stream = 7
    call(1, 2)
    assert machine.ran[-1][0] == "graph"
    monkeypatch.undo()  # the block lies elsewhere
    monkeypatch.setattr(launch, "record", machine.record)
    monkeypatch.setattr(replay, "current_stream", lambda device: 7)
    call(1, 2)
    assert machine.ran[-1][:2] == (1, 2)


@pytest.mark.parametrize(
    "sizes,more",
    [
        ((100,), lambda: LIKE.clone()),
        ((100,), lambda: LIKE.mul_(1)),
        ((100,), lambda: torch.zeros(3)),
        ((replay.MOST_ROOM,), lambda: None),
    ],
    ids=("copy", "in place", "zeros", "much memory"),
)
def test_what_asks_pytorch_for_more_than_a_little_memory_is_never_recorded(
    sizes: Sequence[int], more: Callable[[], object], machine: Machine
) -> None:
    call = caller(machine, sizes, more)
    for _ in range(9):
        call(1, 2)
    assert machine.recorded == 0 and len(machine.ran) == 9


def test_views_are_no_more_than_memory(machine: Machine, block: Tensor) -> None:
    call = caller(machine, more=lambda: LIKE.view(2, 2).t())
    for _ in range(9):
        call(1, 2)
    assert machine.recorded == 1


@pytest.mark.parametrize("change", ("size", "number", "copy", "failure"))
def test_a_call_that_changes_or_cannot_be_recorded_is_made_as_before(
    change: str, machine: Machine, block: Tensor
) -> None:
    sizes, copies = [100, 30], [False]
    call = caller(machine, sizes, lambda: LIKE.clone() if copies[0] else None)
    for _ in range(4):
        call(1, 2)
    if change == "size":
        sizes[0] = 90
    elif change == "number":
        sizes.append(5)
    elif change == "copy":
        copies[0] = True
    else:
        machine.failure = LaunchError("no")
    for _ in range(5):
        call(1, 2)
    assert [step[:2] for step in machine.ran] == [(1, 2)] * 9 and machine.recorded == 0


def test_looking_for_graphs_pauses_where_addresses_never_come_again(
    machine: Machine, block: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_PAUSE", 50)
    call, asked = caller(machine), [0]
    stream = machine.stream

    def current(device: int) -> int:
        asked[0] += 1
        return stream

    monkeypatch.setattr(replay, "current_stream", current)
    for n in range(2 + 64 + 50):
        call(n)
    assert asked[0] == 64, "none in the pause"
    for _ in range(4):
        call(-1)
    assert machine.ran[-1][0] == "graph", "and then again"


def test_graphs_that_are_not_used_make_room_for_others(
    machine: Machine, block: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST", 4)
    call = caller(machine)
    for n in range(4):
        for _ in range(6):
            call(n)
    assert machine.recorded == 4
    for _ in range(3):
        call(9)
    assert machine.recorded == 4 and machine.ran[-1][0] == 9, "all were used since they were made"
    other = caller(machine)  # the first one pauses
    call_until(other, 0, 5)
    assert machine.recorded == 5, "the others were not, since there were too many"
    assert len(replay._kept) <= 4


def call_until(call: Callable[..., None], address: int, times: int) -> None:
    for _ in range(times):
        call(address)


def test_graphs_go_with_their_runner(machine: Machine, block: Tensor) -> None:
    call = caller(machine)
    call_until(call, 1, 6)
    assert len(replay._kept) == 1 and replay._kept[0][0]() is not None
    del call
    gc.collect()
    assert replay._kept[0][0]() is None


def test_forgotten_graphs_are_recorded_anew(machine: Machine, block: Tensor) -> None:
    call = caller(machine)
    call_until(call, 1, 6)
    replay.forget()
    before = len(machine.ran)
    call_until(call, 1, 5)
    assert [step[0] == "graph" for step in machine.ran[before:]] == [False, False, True, True, True]
    assert machine.recorded == 2


def test_replays_can_be_switched_off(machine: Machine, block: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "ENABLED", False)
    call = caller(machine)
    call_until(call, 1, 9)
    assert machine.recorded == 0 and len(machine.ran) == 9


# --- layers, on a GPU ------------------------------------------------------------------------------------------------

LAYERS = {
    "gather": Problem.make(2, 48, 32, (12, 20), 4, 2, 1, bias=True),
    "groups": Problem.make(2, 64, 96, (9, 11), 3, 2, 1, 1, groups=4, bias=True),
    "subpixel": Problem.make(2, 64, 32, (32, 32), 2, 2, bias=True),
    "together": Problem.make(16, 256, 128, (32, 32), 4, 2, 1, bias=True),
    "images": Problem.make(32, 256, 128, (8, 8), 4, 2, 1, bias=True),
    "depthwise": Problem.make(2, 24, 24, (16, 16), 4, 2, 1, groups=24, bias=True),
    "few": Problem.make(2, 4, 3, (31, 29), 5, 3, 2, bias=True),
    "latent": Problem.make(16, 100, 64, (1, 1), 4, bias=True),
    "1-D": Problem.make(4, 128, 64, (64,), 16, 8, 4, bias=True),
    "3-D": Problem.make(1, 32, 16, (6, 10, 12), 3, 2, 1, bias=True),
    "3-D unstrided": Problem.make(1, 16, 8, (8, 12, 33), 3, 1, 1, bias=True),
    "shuffled": Problem.make(2, 32, 3, (32, 32), 4, 2, 1, bias=True),
}


class Used:
    """How many graphs were launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        real = launch.Graph.__call__

        def counted(graph: launch.Graph) -> None:
            self.times += 1
            real(graph)

        monkeypatch.setattr(launch.Graph, "__call__", counted)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Used:
    return Used(monkeypatch)


def layer_of(p: Problem, **changes: Any) -> Any:
    torch.manual_seed(0)
    kind = (upconv.ConvTranspose1d, upconv.ConvTranspose2d, upconv.ConvTranspose3d)[p.rank - 1]
    return kind(
        p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, p.output_padding, p.groups, p.bias, p.dilation,
        device="cuda", **changes,
    )  # fmt: skip


def steps(
    layer: Any, x: Tensor, grad: Tensor, times: int = 9, dtype: torch.dtype | None = None, change: bool = True
) -> list[list[Tensor]]:
    """Outputs and gradients of steps in which the same tensors have new values each time."""
    generator = torch.Generator("cuda").manual_seed(1)
    found = []
    for _ in range(times):
        with torch.no_grad():
            for t in (x, grad, *layer.parameters()) if change else ():
                t.copy_(torch.randn(t.shape, generator=generator, device="cuda", dtype=torch.float32).to(t.dtype))
        for t in (x, *layer.parameters()):
            t.grad = None
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            y = layer(x)
        y.backward(grad)
        found.append([y.detach(), *(t.grad for t in (x, *layer.parameters()) if t.grad is not None)])
        found[-1] = [t.clone() for t in found[-1]]
        del y
    return found


def compare(
    monkeypatch: pytest.MonkeyPatch, used: Used, p: Problem, dtype: torch.dtype | None = None, last: bool = False
) -> int:
    """Steps with replays are to the last bit those without; how many graphs they launched."""
    layer = layer_of(p)
    x = torch.randn(p.input_shape, device="cuda")
    grad = torch.randn(p.output_shape, device="cuda", dtype=dtype)
    if last:
        fmt = torch.channels_last if p.rank == 2 else torch.channels_last_3d
        layer, x, grad = (
            layer.to(memory_format=fmt),
            x.contiguous(memory_format=fmt),
            grad.contiguous(memory_format=fmt),
        )
    x.requires_grad_()
    monkeypatch.setattr(replay, "ENABLED", False)
    truths = steps(layer, x, grad, dtype=dtype)
    assert not used.times
    monkeypatch.setattr(replay, "ENABLED", True)
    found = steps(layer, x, grad, dtype=dtype)
    for ours, theirs in zip(found, truths, strict=True):
        assert len(ours) == len(theirs) == 4
        assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(ours, theirs))
    return used.times


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (None, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_gpu_steps_are_equal_with_replays_and_without(
    name: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch, used: Used
) -> None:
    times = compare(monkeypatch, used, LAYERS[name], dtype)
    assert times >= 4, "neither forwards nor gradients were replayed"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", [name for name, p in LAYERS.items() if p.rank > 1])
def test_gpu_steps_in_channels_last(
    name: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch, used: Used
) -> None:
    times = compare(monkeypatch, used, LAYERS[name], dtype, last=True)
    assert times >= (0 if name == "latent" else 4), "neither forwards nor gradients were replayed"


@pytest.mark.gpu
def test_gpu_copies_in_channels_last_are_part_of_a_replay(monkeypatch: pytest.MonkeyPatch, used: Used) -> None:
    """Families that run others on copies allocate those, and the graph has them as parts of its block."""
    p = Problem.make(128, 512, 256, (4, 4), 4, 2, 1, bias=True)
    plan = planner.plan(p.with_(dtype=torch.bfloat16, precision="bf16"), planner.Device("cuda", gpu=H200))
    families = [plan.selection(name).choice.family for name in ("grad-input", "grad-weight")]  # type: ignore[union-attr]
    assert "relayout" in families
    assert compare(monkeypatch, used, p, torch.bfloat16) >= 8, "forwards or gradients were not replayed"


@pytest.mark.gpu
def test_gpu_inference_replays_kept_weights_and_sees_changed_ones(used: Used) -> None:
    layer = layer_of(LAYERS["gather"]).requires_grad_(False)
    x = torch.randn(LAYERS["gather"].input_shape, device="cuda")
    for n in range(12):
        with torch.no_grad():
            layer.weight.mul_(-1.5) if n in (6, 9) else x.mul_(1.1)
        out = layer(x)
        truth = torch.nn.functional.conv_transpose2d(x.double(), layer.weight.double(), layer.bias.double(), 2, 1)
        assert float((out - truth).norm() / truth.norm()) < 1e-3
        del out, truth
    assert used.times >= 4


@pytest.mark.gpu
def test_gpu_only_gradients_that_are_asked_for(used: Used) -> None:
    p = LAYERS["gather"]
    layer, x = layer_of(p), torch.randn(p.input_shape, device="cuda", requires_grad=True)
    grad = torch.randn(p.output_shape, device="cuda")
    asked = {"x": [x], "w": [layer.weight], "b": [layer.bias], "xw": [x, layer.weight]}
    truths = dict(zip(("x", "w", "b"), torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), grad)))
    for _ in range(7):
        for name, inputs in asked.items():
            for letter, found in zip(name, torch.autograd.grad(layer(x), inputs, grad)):
                assert torch.equal(found, truths[letter]), name
    assert used.times >= 8


@pytest.mark.gpu
def test_gpu_streams_have_their_own_graphs(used: Used) -> None:
    p = LAYERS["together"]
    layer, x = layer_of(p), torch.randn(p.input_shape, device="cuda", requires_grad=True)
    grad = torch.randn(p.output_shape, device="cuda")
    truths = steps(layer, x, grad, 1, change=False)[0]
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()) * 4:
        with torch.cuda.stream(stream):
            found = steps(layer, x, grad, 3, change=False)
        stream.synchronize()
        assert all(torch.equal(a, b) for step in found for a, b in zip(step, truths))
    assert used.times >= 8


@pytest.mark.gpu
def test_gpu_threads(used: Used) -> None:
    """Threads share plans, a runner's graphs and the stream, and may record at once."""
    p = LAYERS["gather"]
    layers = [layer_of(p) for _ in range(4)]
    x = torch.randn(p.input_shape, device="cuda")
    grad = torch.randn(p.output_shape, device="cuda")
    truths = steps(layers[0], x.clone().requires_grad_(), grad, 1, change=False)[0]
    failures: list[BaseException] = []

    def work(layer: Any) -> None:
        try:
            mine = x.clone().requires_grad_()
            for step in steps(layer, mine, grad, 30, change=False):
                assert all(torch.equal(a, b) for a, b in zip(step, truths))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.gpu
def test_gpu_a_step_that_replays_can_be_captured(used: Used) -> None:
    p = LAYERS["gather"]
    layer, x = layer_of(p), torch.randn(p.input_shape, device="cuda", requires_grad=True)
    grad = torch.randn(p.output_shape, device="cuda")
    steps(layer, x, grad, 7, change=False)
    before = used.times
    assert before >= 4
    for t in (x, *layer.parameters()):
        t.grad = None
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side):
        y = layer(x)
        gradients = torch.autograd.grad(y, (x, *layer.parameters()), grad)
    assert used.times == before, "a graph of ours was launched into the capture"
    with torch.no_grad():
        x.mul_(-2)
    graph.replay()
    torch.cuda.synchronize()
    truth = layer(x)
    truths = torch.autograd.grad(truth, (x, *layer.parameters()), grad)
    assert torch.equal(y, truth) and all(torch.equal(a, b) for a, b in zip(gradients, truths))


@pytest.mark.gpu
def test_gpu_operands_off_16_bytes_are_not_replayed(used: Used) -> None:
    p = LAYERS["gather"]
    layer = layer_of(p)
    x = torch.randn(x_numel(p) + 1, device="cuda")[1:].view(p.input_shape)
    with torch.no_grad():
        truth = layer(x.clone())
        before = used.times
        for _ in range(8):
            assert torch.equal(layer(x), truth)
    assert used.times == before


def x_numel(p: Problem) -> int:
    return int(torch.Size(p.input_shape).numel())


@pytest.mark.gpu
def test_gpu_a_graph_that_fails_names_the_problem(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    p = LAYERS["gather"]
    layer, x = layer_of(p), torch.randn(p.input_shape, device="cuda", requires_grad=True)
    grad = torch.randn(p.output_shape, device="cuda")
    truths = steps(layer, x, grad, 7, change=False)[-1]
    assert used.times >= 2

    def fail(graph: launch.Graph) -> None:
        raise LaunchError("the launch of a recorded graph failed with CUDA_ERROR_STANDS_FOR_ONE")

    monkeypatch.setattr(launch.Graph, "__call__", fail)
    with pytest.raises(RuntimeError, match=r"upconv could not compute .* by .*CUDA_ERROR_STANDS_FOR_ONE"):
        steps(layer, x, grad, 1, change=False)
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(steps(layer, x, grad, 1, change=False)[0], truths))
