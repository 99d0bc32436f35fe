"""Weights that change between calls in ways that PyTorch does not count, and `upconv.freeze`.

On a GPU each change is made to a stock model and to an accelerated one, and their validations are compared.
"""

from __future__ import annotations

import copy
import os
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrizations

import upconv
from conftest import printed
from twins import lines_of
from upconv import planner
from upconv.cuda import engine, weights
from upconv.problem import Problem

CUDA = pytest.mark.gpu
Model = nn.Sequential
Run = Callable[[Model, Tensor], list[Tensor]]


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """No promise of one test reaches another."""
    weights.frozen.clear()
    yield
    weights.frozen.clear()


def net(device: str = "cpu") -> Model:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ConvTranspose2d(16, 16, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 3, 2),
    )
    return nn.Sequential(*layers).to(device)


def ours(device: str = "cpu") -> Model:
    """The same, accelerated."""
    return upconv.accelerate(net(device), convolutions=True)


# --- the promise -----------------------------------------------------------------------------------------------------


def frozen_layers(model: nn.Module) -> list[bool]:
    return [weights.is_frozen(m.weight) for m in model.modules() if isinstance(m, _ConvNd)]


def test_a_model_in_training_is_not_frozen() -> None:
    with pytest.raises(ValueError, match=r"^freeze needs a model in eval mode, got one in training mode; call model"):
        upconv.freeze(ours())
    with pytest.raises(ValueError, match="freeze needs a model in eval mode"), upconv.frozen(ours()):
        pass


def test_freeze_says_what_it_froze(packing: None) -> None:
    model = nn.Sequential(
        nn.ConvTranspose2d(4, 4, 3),
        parametrizations.weight_norm(nn.ConvTranspose2d(4, 4, 3)),
        nn.LazyConvTranspose2d(4, 3),
        nn.Linear(4, 4),
        nn.ConvTranspose2d(4, 4, 3),
    ).eval()
    upconv.accelerate(model).append(nn.ConvTranspose2d(4, 4, 3).eval())
    model[4].train()
    assert lines_of(upconv.freeze, model) == [
        "0: frozen",
        "1: not frozen: its weight is computed at each call (a parametrisation or a hook)",
        "2: not frozen: its weight has no shape before the first call",
        "4: not frozen: it is in training mode",
        "5: not frozen: it is not accelerated",
        "1 of 5 convolutions frozen",
    ]


def test_on_a_cpu_nothing_is_frozen() -> None:
    each = [f"{i}: not frozen: only calls on a GPU pack weights, and its weight is on cpu" for i in (0, 1, 3)]
    assert lines_of(upconv.freeze, ours().eval()) == [*each, "0 of 3 convolutions frozen"]
    assert not weights.frozen


def test_the_promise_ends_with_thaw_and_the_context(packing: None) -> None:
    model = upconv.freeze(ours().eval())
    assert frozen_layers(model) == [True] * 3
    assert upconv.thaw(model) is model
    assert frozen_layers(model) == [False] * 3
    with upconv.frozen(model):
        assert frozen_layers(model) == [True] * 3
    assert frozen_layers(model) == [False] * 3
    with pytest.raises(KeyError), upconv.frozen(model):
        raise KeyError
    assert not weights.frozen


@pytest.mark.parametrize(
    "function", (upconv.freeze, upconv.thaw, upconv.accelerate, upconv.restore, upconv.warmup, upconv.summary)
)
@pytest.mark.parametrize(("given", "got"), [(5, "a int"), ([], "a list"), (nn.Conv2d, "the class Conv2d")])
def test_what_is_no_model_is_an_error(function: Callable[[object], object], given: object, got: str) -> None:
    wanted = f"^{function.__name__} takes a torch.nn.Module as its model, got {got}$"
    with pytest.raises(TypeError, match=wanted):
        function(given)


def _loaded(model: Model, assign: bool = False) -> None:
    model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()}, assign=assign)


def _initialised(model: Model) -> None:
    for layer in model:
        if isinstance(layer, _ConvNd):
            layer.reset_parameters()


def _stepped(model: Model) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), 0.1).step()


CHANGES: dict[str, Callable[[Model], object]] = {
    "loaded": _loaded,
    "assigned": partial(_loaded, assign=True),
    "trained for a moment": lambda model: model.train().eval(),
    "initialised": _initialised,
    "stepped": _stepped,
}
ON_A_CPU = CHANGES | {
    "to float64": nn.Module.double,
    "to float16": nn.Module.half,
    "loaded in inference mode": torch.inference_mode()(_loaded),
    "restored": upconv.restore,
}
ON_A_GPU = CHANGES | {"moved to and fro": lambda model: model.cpu().cuda()}


@pytest.mark.parametrize("change", ON_A_CPU)
def test_what_pytorch_can_see_ends_the_promise(change: str, packing: None) -> None:
    model = upconv.freeze(ours().eval())
    model.eval()
    assert frozen_layers(model) == [True] * 3
    ON_A_CPU[change](model)
    assert frozen_layers(model) == [False] * 3
    assert not weights.frozen, "what nobody may use is held"


def test_a_call_in_training_mode_ends_the_promise(packing: None) -> None:
    """Also where a container's own ``train`` sets the mode of its layers, without a call of theirs."""
    model = upconv.freeze(ours().eval())
    for layer in model[:2]:  # type: ignore[attr-defined]
        layer.training = True
    assert frozen_layers(model) == [True] * 3
    model(torch.randn(1, 8, 5, 5))
    assert frozen_layers(model) == [False, False, True]


def test_copies_are_not_frozen_and_a_dead_model_holds_nothing(packing: None) -> None:
    model = upconv.freeze(ours().eval())
    assert frozen_layers(copy.deepcopy(model)) == [False] * 3
    del model
    assert not weights.frozen


def test_a_gradient_for_the_weight_ends_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever computes it is about to change the weight, in a way that nothing may count."""
    weight = torch.randn(4, 3, 3, 3)
    weights.freeze(weight)
    plan = planner.plan(Problem.make(1, 4, 3, (5, 5), 3), planner.cpu_device())
    monkeypatch.setattr(engine, "_current_device", lambda: -1)
    monkeypatch.setattr(engine.cpu, "gradients", lambda *_: (None, torch.zeros(()), None))
    for asked, frozen in ((False, True), (True, False)):
        engine.gradients(plan, torch.randn(1, 3, 7, 7), torch.randn(1, 4, 5, 5), weight, (False, asked, False))
        assert weights.is_frozen(weight) is frozen


# --- validations of models whose weights change, on a GPU ------------------------------------------------------------


def evaluated(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).clone()


def trained(make: Callable[[Model], torch.optim.Optimizer]) -> Run:
    """Validates behind each of some training steps."""

    def run(model: Model, x: Tensor) -> list[Tensor]:
        optimizer, found = make(model), []
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            found.append(evaluated(model, x))
        return found

    return run


def changed(change: Callable[[Tensor, int], object]) -> Run:
    """Validates behind each of some changes of every parameter; the second argument counts them."""

    def run(model: Model, x: Tensor) -> list[Tensor]:
        found = [evaluated(model, x)]
        for turn in range(3):
            for p in model.parameters():
                change(p, turn)
            found.append(evaluated(model, x))
        return found

    return run


def _noise(p: Tensor, turn: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(turn)).to(p.device, p.dtype) * 0.1


def _replayed_step(model: Model, x: Tensor) -> list[Tensor]:
    """The training step is a CUDA graph; validations in between are not, and one more is a graph of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            step()
            evaluated(model, x)
    torch.cuda.current_stream().wait_stream(side)
    train, validate = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(train):
        step()
    with torch.no_grad(), torch.cuda.graph(validate):
        captured = model(x)
    found = []
    for _ in range(3):
        for _ in range(20):
            train.replay()
        found.append(evaluated(model, x))
        validate.replay()
        found.append(captured.clone())
    return found


RUNS: dict[str, Run] = {
    "fused AdamW": trained(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True)),
    "foreach SGD": trained(lambda m: torch.optim.SGD(m.parameters(), lr=0.05, foreach=True)),
    "capturable Adam": trained(lambda m: torch.optim.Adam(m.parameters(), lr=0.01, capturable=True)),
    "param.data in place": changed(lambda p, turn: p.data.mul_(0.5).add_(_noise(p, turn))),
    "param.data set": changed(lambda p, turn: setattr(p, "data", _noise(p, turn))),
    "DLPack alias": changed(lambda p, turn: torch.from_dlpack(p.detach()).copy_(_noise(p, turn))),
    "step in a CUDA graph": _replayed_step,
}


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative difference of the validations."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))


@CUDA
@pytest.mark.parametrize("convolutions", (False, True), ids=("transposed", "all"))
@pytest.mark.parametrize("name", RUNS)
def test_gpu_validations_agree_while_weights_change(name: str, convolutions: bool, ieee: None) -> None:
    x = torch.randn(4, 8, 12, 12, device="cuda")
    theirs = RUNS[name](net("cuda"), x)
    ours = RUNS[name](upconv.accelerate(net("cuda"), convolutions=convolutions), x)
    assert apart(ours, theirs) < 1e-3
    assert apart(theirs[1:], theirs[:-1]) > 1e-3, "the weights did not change"


_SHARDED = """
    import os, sys, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    sys.path[:0] = [{tests!r}]
    import upconv
    from test_weights import apart, evaluated, net, trained
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT={port!r}, RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl")
    torch.backends.cudnn.conv.fp32_precision = "ieee"

    def sharded(model, x):
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
        return trained(lambda m: torch.optim.Adam(m.parameters(), lr=0.01))(model, x)

    zero = trained(lambda m: ZeroRedundancyOptimizer(m.parameters(), torch.optim.Adam, lr=0.01))
    x = torch.randn(4, 8, 12, 12, device="cuda")
    for run in (sharded, zero):
        print(apart(run(upconv.accelerate(net("cuda")), x), run(net("cuda"), x)))
    dist.destroy_process_group()
"""


@CUDA
def test_gpu_sharded_training(tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    tests = Path(__file__).resolve().parent
    script.write_text(textwrap.dedent(_SHARDED).format(tests=str(tests), port=str(29500 + os.getpid() % 1000)))
    found = printed(script)
    assert all(float(line) < 1e-3 for line in found.split()[-2:]), found


def _doubles(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)
    torch.cuda.synchronize()


@CUDA
def test_gpu_weights_that_another_process_changes(ieee: None) -> None:
    model, x = upconv.accelerate(nn.Sequential(net("cuda")[1])), torch.randn(4, 16, 12, 12, device="cuda")
    before = evaluated(model, x)
    child = torch.multiprocessing.get_context("spawn").Process(target=_doubles, args=(model[0].weight.detach(),))
    child.start()
    child.join()
    assert child.exitcode == 0
    bias = model[0].bias.view(-1, 1, 1)
    assert apart([evaluated(model, x) - bias], [2 * (before - bias)]) < 1e-4


@CUDA
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("autocast", (False, True))
def test_gpu_a_frozen_model_gives_the_same_results(dtype: torch.dtype, autocast: bool) -> None:
    """In float32 by TF32, whose kernels may read a kept copy in another order: as near as two roundings."""
    layers = nn.Conv2d(8, 128, 3, padding=1), nn.ConvTranspose2d(128, 128, 4, 2, 1)  # whose weights are packed
    model = upconv.accelerate(nn.Sequential(*layers).to("cuda", dtype).eval(), convolutions=True)
    x = torch.randn(4, 8, 12, 12, device="cuda", dtype=dtype)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        fresh = evaluated(model, x)
        with upconv.frozen(model):
            outs = [evaluated(model, x) for _ in range(6)]  # the last are replayed, where there is a C++ compiler
            assert all(frozen_layers(model))
            held = [entry.packed for entry in weights.frozen.values()]
        again = evaluated(model, x)
    assert any(held)
    assert apart([out.float() for out in outs], [fresh.float()] * 6) < 2e-3
    assert all(torch.equal(outs[1], out) for out in outs[2:]) and torch.equal(fresh, again)


@CUDA
@pytest.mark.parametrize("change", ON_A_GPU)
def test_gpu_a_frozen_model_is_right_behind_a_change(change: str, ieee: None) -> None:
    x = torch.randn(4, 8, 12, 12, device="cuda")
    model, theirs = upconv.accelerate(net("cuda").eval()), net("cuda").eval()
    upconv.freeze(model)
    assert apart([evaluated(model, x) for _ in range(6)], [evaluated(theirs, x)] * 6) < 1e-4
    for each in (model, theirs):
        torch.manual_seed(1)
        ON_A_GPU[change](each)
    assert apart([evaluated(model, x)], [evaluated(theirs, x)]) < 1e-4
    assert not any(frozen_layers(model)[1:])
