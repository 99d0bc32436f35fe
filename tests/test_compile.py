"""torch.compile, torch.library.opcheck and torch.export: the operator for graphs, and graphs that need no upconv."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import upconv
from conftest import EVERY, assert_close, diagonal, forced_plans, make_call, needs_gxx
from situations import differences, step
from standins import Kernels
from upconv import dispatch, planner
from upconv.compiler import layouts, recorded, rule
from upconv.compiler.arguments import text_of
from upconv.cuda import gpu, weights
from upconv.problem import Problem
from upconv.replay import replays

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


ENGINES = ("shuffle", "native")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The compiled operator runs by an engine of ours, and by PyTorch's operator behind the same name."""
    with forced_plans(request.param, "split" if request.param == "shuffle" else "native"):
        yield request.param


def decoder(rank: int, home: Any = upconv) -> nn.Module:
    """Two transposed convolutions with a norm and an activation, without the batch norm's running state."""
    layer = getattr(home, f"ConvTranspose{rank}d")
    return nn.Sequential(
        layer(4, 8, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        layer(8, 3, 4, stride=2),
    )


def assert_same_step(compiled: Any, model: nn.Module, x: Tensor) -> None:
    """The same output and gradients, by the model's own parameters."""
    parameters = list(model.parameters())
    lines = differences(step(compiled, x, parameters), step(model, x, parameters), 1e-4)
    assert not lines, "\n".join(lines)


# --- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_compiles_without_a_break(rank: int, engine: str) -> None:
    model = decoder(rank)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same_step(compiled, model, torch.randn(2, 4, *(5, 4, 3)[:rank]))
    with torch.no_grad():
        x = torch.randn(2, 4, *(5, 4, 3)[:rank])
        assert_close(compiled(x), model(x), length=512)


def test_one_graph_serves_all_sizes(engine: str) -> None:
    model = decoder(2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, h, w in ((2, 5, 4), (3, 7, 9)):
        assert_same_step(compiled, model, torch.randn(n, 4, h, w))
    counted = CompileCounter()
    compiled = torch.compile(model, backend=counted, fullgraph=True, dynamic=True)
    for n, h, w in ((2, 5, 4), (3, 7, 5), (4, 6, 9)):
        compiled(torch.randn(n, 4, h, w))
    assert counted.frame_count == 1
    layer = upconv.ConvTranspose2d(4, 6, 3, stride=2, padding=1)
    sized = torch.compile(lambda x, y: layer(x, output_size=y.shape[-2:]), backend="aot_eager", fullgraph=True)
    for shape, size in (((2, 4, 5, 5), (9, 10)), ((4, 5, 5), (10, 9))):
        x = torch.randn(shape)
        assert_close(sized(x, torch.empty(size)).detach(), layer(x, output_size=size).detach())


@pytest.fixture(scope="module")
def inductor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The options of compilations with one cache, since Inductor's own headers take long to compile.

    By one compiler at a time, of scalar code: its processes, and what asks for vectors, import PyTorch again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield {} if EVERY else {"compile_threads": 1, "cpp.vec_isa_ok": False}


@pytest.mark.slow
@needs_gxx
@pytest.mark.parametrize(("channels_last", "engine"), diagonal((False, True), ENGINES), indirect=["engine"])
def test_inductor(channels_last: bool, engine: str, inductor: dict[str, Any]) -> None:
    model, x = decoder(2), torch.randn(2, 4, 6, 5)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, options=inductor)
    assert_same_step(compiled, model, x)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


# --- transforms within a graph ---------------------------------------------------------------------------------------


def _tangent(layer: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, 2 * x))).tangent
    assert found is not None
    return found


def _of_parameters(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return grad(lambda p: functional_call(layer, p, (x,)).pow(2).sum())(dict(layer.named_parameters()))


def _per_sample(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    def loss(p: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(layer, p, (one[None],)).pow(2).sum()

    return vmap(grad(loss), (None, 0))(dict(layer.named_parameters()), x)


def _of_weights(layer: nn.Module, x: Tensor, each: int | None) -> Tensor:
    weights = torch.stack([layer.weight, 2 * layer.weight])
    return vmap(lambda w, t: functional_call(layer, {"weight": w}, (t,)), (0, each))(weights, x)


def _sums(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x).sum(tuple(range(2, x.dim())))


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jvp": lambda layer, x: jvp(layer, (x,), (2 * x,)),
    "dual numbers": _tangent,
    "grad": lambda layer, x: grad(lambda t: layer(t).pow(3).sum())(x),
    "grad of grad": lambda layer, x: grad(lambda t: grad(lambda u: layer(u).pow(3).sum())(t).pow(2).sum())(x),
    "vjp": lambda layer, x: vjp(layer, x)[1](torch.ones_like(layer(x)))[0],
    "jacfwd": lambda layer, x: jacfwd(_sums(layer))(x),
    "jacrev": lambda layer, x: jacrev(_sums(layer))(x),
    "hessian": lambda layer, x: hessian(lambda t: layer(t).pow(3).sum())(x),
    "functional_call": _of_parameters,
    "vmap": lambda layer, x: vmap(lambda t: layer(t[None]))(x),
    "vmap over weights": lambda layer, x: _of_weights(layer, x, None),
    "vmap over both": lambda layer, x: _of_weights(layer, torch.stack([x, x + 1]), 0),
    "vmap of jvp": lambda layer, x: vmap(lambda t: jvp(layer, (t[None],), (t[None],))[1])(x),
    "per sample": _per_sample,
}


@pytest.mark.parametrize(("name", "backend"), diagonal(list(TRANSFORMS), ("eager", "aot_eager")))
def test_transforms_are_pytorchs(name: str, backend: str) -> None:
    """Values of stock layers, without a break, and without a warning: no derivative is silently zero."""
    rank, transform = 1 + list(TRANSFORMS).index(name) % 2, TRANSFORMS[name]
    stock = getattr(nn, f"ConvTranspose{rank}d")(4, 6, 3, 2, 1)
    ours = upconv.accelerate(copy.deepcopy(stock))
    x = torch.randn(2, 4, *(3, 4)[:rank])
    wanted = transform(stock, x)
    with forced_plans("any", "split"), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*torch.jit.script.*")  # PyTorch's own decompositions for jvp
        eager = transform(ours, x)
        found = torch.compile(lambda t: transform(ours, t), backend=backend, fullgraph=True)(x)
    torch.testing.assert_close([eager, found], [wanted, wanted], rtol=1e-4, atol=1e-4)


def test_a_compiled_layer_under_transforms() -> None:
    """The transform is outside of the graph."""
    layer = upconv.ConvTranspose1d(4, 6, 3, 2, 1)
    x = torch.randn(2, 4, 5)
    with forced_plans("any", "split"):
        compiled = torch.compile(layer, backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x))  # compiled without one before
        for name in ("jvp", "dual numbers", "grad"):
            try:
                found = TRANSFORMS[name](compiled, x)
            except RuntimeError:  # an error is as good; zeros are not
                continue
            torch.testing.assert_close(found, TRANSFORMS[name](layer, x), rtol=1e-4, atol=1e-4)


def test_derivatives_of_the_computing_operators_are_pytorchs() -> None:
    """For those who derive a graph that has them: of every order, and in forward mode."""
    x, w, b = (torch.randn(*n, dtype=torch.float64) for n in ((1, 2, 3, 3), (2, 3, 2, 2), (3,)))
    numbers = [2, 2], [1, 1], [0, 0], 1, [1, 1]
    text, g = text_of(*numbers), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    backward = torch.ops.upconv.conv_transpose_backward

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return torch.ops.upconv.conv_transpose_forward(x, w, b, text)

    def stock(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return torch.conv_transpose2d(x, w, b, *numbers)

    def both(g: Tensor, x: Tensor, w: Tensor) -> Any:
        return backward(g, x, w, text, 3)

    torch.testing.assert_close(jvp(forward, (x, w, b), (x, w, b)), jvp(stock, (x, w, b), (x, w, b)))
    leaves = [t.requires_grad_() for t in (x, w, b)]
    assert torch.autograd.gradcheck(forward, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(forward, leaves)
    assert torch.autograd.gradcheck(both, [g.requires_grad_(), x, w], check_forward_ad=True)
    for mask, sizes in ((1, (x.numel(), 0)), (2, (0, w.numel()))):
        assert tuple(t.numel() for t in backward(g, x, w, text, mask)) == sizes


def _loop(layer: nn.Module, x: Tensor) -> Any:
    return while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, layer(t)), (torch.tensor(0), x))[1]


CONTROL: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "cond": lambda layer, x: torch.cond(x.sum() > 0, lambda t: layer(t).relu(), lambda t: layer(t) * 2, (x,)),
    "map": lambda layer, x: map_over(lambda t: layer(t), x[:, None]),
    "scan": lambda layer, x: scan(lambda carry, t: (layer(carry), t * 2), x, x[:, 0])[0],
    "while": _loop,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize(("name", "backend"), diagonal(list(CONTROL), (None, "aot_eager")))
def test_control_flow_of_a_graph(name: str, backend: str | None, engine: str) -> None:
    """PyTorch traces what is inside below autograd, and derives it itself."""
    layer, x = upconv.ConvTranspose2d(4, 4, 3, 1, 1), torch.randn(2, 4, 5, 6)
    stock = nn.ConvTranspose2d(4, 4, 3, 1, 1)
    stock.load_state_dict(layer.state_dict())

    def run(layer: nn.Module) -> list[Tensor]:
        def call(t: Tensor) -> Any:
            return CONTROL[name](layer, t)

        compiled = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
        with torch.no_grad():
            found = [compiled(x)]
        return found if name == "while" else [*found, *step(compiled, x, layer.parameters())]

    torch.testing.assert_close(run(layer), run(stock), rtol=1e-4, atol=1e-4)


# --- whose operator --------------------------------------------------------------------------------------------------


def _aten(function: Callable[..., Any], *given: Tensor) -> list[str]:
    """The operators of a function's graphs, forward and backward, as a compiler gets them."""
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    out = torch.compile(function, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend), fullgraph=True)(
        *given
    )
    if out.requires_grad:
        out.sum().backward()
    return found


@pytest.mark.parametrize("training", (False, True))
def test_the_graph_has_the_operator_that_the_rule_says(training: bool) -> None:
    layer = upconv.ConvTranspose2d(4, 6, 3, 2, 1).requires_grad_(training)
    x = torch.randn(2, 4, 5, 6)
    for plan, ours in (("any", True), ("native", False)):
        torch._dynamo.reset()
        with forced_plans(plan, "native"):
            found = _aten(layer, x)
        assert ("upconv.conv_transpose_forward.default" in found) == ours
        assert ("upconv.conv_transpose_backward.default" in found) == (ours and training)
        assert ("aten.convolution.default" in found) == (not ours)


HOPPER = planner.Device("cuda", gpu=gpu.H200)


@pytest.mark.parametrize(
    ("p", "training", "ours"),
    [
        (Problem.make(16, 128, 64, (128, 128), (2, 2), 2, dtype=torch.bfloat16), True, True),
        (Problem.make(128, 100, 512, (1, 1), (4, 4), 1, dtype=torch.bfloat16), True, False),
        (Problem.make(128, 100, 512, (1, 1), (4, 4), 1, dtype=torch.bfloat16), False, False),
        (Problem.make(16, 32, 64, (128, 256), (3, 5), (2, 3), groups=4, dtype=torch.bfloat16), False, True),
    ],
    ids=str,
)
def test_the_rule_on_a_gpu(p: Problem, training: bool, ours: bool) -> None:
    plan = planner.plan(p, HOPPER)
    assert rule.verdict(plan, training).ours is ours
    said = rule.sentence(p, HOPPER, training)
    assert said.startswith("Under torch.compile it is ") and said.endswith(".")


# --- what a graph's call does ----------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_gxx
def test_inductor_turns_our_operators_with_its_own(inductor: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For inference the operands come in channels_last, and nothing is copied for a kernel of ours."""
    monkeypatch.setattr(layouts, "TURNED", ("cpu",))
    layer = upconv.ConvTranspose2d(8, 6, 4, 2, 1)
    x = torch.randn(2, 8, 6, 5)
    function = torch.compile(lambda t: layer(t.sigmoid()).tanh(), options=inductor, fullgraph=True)
    with forced_plans("any", "split"), torch.no_grad():
        out, code = torch._inductor.utils.run_and_get_code(function, x)
        torch.testing.assert_close(out, layer(x.sigmoid()).tanh(), rtol=1e-4, atol=1e-5)
    assert out.is_contiguous()  # what the caller sees is as it was traced
    assert "empty_strided_cpu((2, 8, 6, 5), (240, 1, 40, 8)" in code[0] and "conv_transpose_forward" in code[0]


@pytest.fixture
def ours(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every layer of a compiled graph is ours, and is replayed."""
    monkeypatch.setattr(rule, "verdict", lambda *_: rule.Verdict(True, ""))
    return machine


def test_calls_of_a_graph_are_replayed(ours: Any, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = upconv.ConvTranspose1d(4, 6, 3, 2, 1)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    looked: list[int] = []
    find_plan = dispatch.find_plan
    monkeypatch.setattr(dispatch, "find_plan", lambda *given: looked.append(1) or find_plan(*given))
    stock = nn.ConvTranspose1d(4, 6, 3, 2, 1)
    stock.load_state_dict(layer.state_dict())
    for times in range(replays.CALLS + 2):
        x = torch.randn(2, 4, 5)
        assert not differences(step(compiled, x, list(layer.parameters())), step(stock, x), 1e-4)
        assert kernels.ran() == ([] if times >= replays.CALLS else ["fwd", "grad-input", "grad-weight"])
    assert len(looked) == (replays.CALLS + 1) * 2  # then guards recognise the call
    with upconv.strict(True):
        step(compiled, x, list(layer.parameters()))
    assert len(looked) == (replays.CALLS + 2) * 2
    weights.freeze(layer.weight)
    step(compiled, x, list(layer.parameters()))
    assert len(looked) == (replays.CALLS + 3) * 2
    another = torch.randn(3)
    weights.freeze(another)
    step(compiled, x, list(layer.parameters()))
    weights.thaw(another)
    assert len(looked) == (replays.CALLS + 3) * 2
    assert {seen.made for seen in recorded._seen.values()} == {1}  # nor is more noted of calls that are watched
    monkeypatch.setattr(recorded, "_held", lru_cache(maxsize=4)(recorded._Held))  # strides are not noted without end
    with torch.no_grad():
        for wider in range(8):
            compiled(torch.randn(2, 4, 5 + wider)[..., :5])
    assert recorded._held.cache_info().currsize == 4


def test_layers_that_differ_by_bias_or_shape_are_told_apart(ours: Any) -> None:
    layers = [nn.ConvTranspose1d(4, 4, 3, 2, 1, bias=bias) for bias in (False, True)]
    model = upconv.accelerate(nn.Sequential(*layers))
    parameters = list(model.parameters())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    stock = upconv.restore(copy.deepcopy(model))
    for times in range(2 * (replays.CALLS + 2)):
        x = torch.randn(2, 4, 5 + times % 2)
        assert not differences(step(compiled, x, parameters), step(stock, x), 1e-4)
    assert len(recorded._seen) == 2 * 2 * 2  # sizes, layers, passes


def test_a_call_that_is_differentiated_is_not_replayed_as_one_that_was_not(ours: Any) -> None:
    x, weight = torch.randn(2, 4, 5), torch.randn(4, 6, 3, requires_grad=True)
    call, text = torch.ops.upconv.conv_transpose_forward, text_of([2], [1], [0], 1, [1])
    with torch.no_grad():
        for _ in range(replays.CALLS + 2):
            call(x, weight, None, text)
    assert len(recorded._seen) == 1
    (found,) = torch.autograd.grad(call(x, weight, None, text).sum(), weight)
    (right,) = torch.autograd.grad(F.conv_transpose1d(x, weight, None, 2, 1).sum(), weight)
    assert_close(found, right)


# --- the operator ----------------------------------------------------------------------------------------------------

SAMPLES: list[tuple[tuple[int, ...], tuple[int, ...], bool, list[list[int]], int]] = [
    ((2, 4, 7), (4, 3, 3), True, [[2], [1], [1], [1]], 1),
    ((2, 4, 5, 6), (4, 3, 3, 4), True, [[2, 3], [1, 0], [1, 2], [1, 1]], 2),
    ((2, 4, 5, 6), (4, 3, 3, 4), False, [[1, 1], [1, 2], [0, 0], [2, 1]], 1),
    ((2, 4, 5, 6), (4, 1, 3, 3), True, [[2, 2], [1, 1], [2, 2], [3, 3]], 4),
    ((2, 2, 3, 4, 5), (2, 3, 2, 3, 2), True, [[2, 1, 2], [0, 1, 0], [0, 0, 1], [1, 2, 1]], 1),
]


@pytest.mark.parametrize(
    ("sample", "dtype", "engine"),
    diagonal(SAMPLES, (torch.float32, torch.float64), ENGINES),
    indirect=["engine"],
    ids=str,
)
def test_opcheck(sample: Any, dtype: torch.dtype, engine: str) -> None:
    shape, weight, bias, (stride, padding, output_padding, dilation), groups = sample
    call = make_call(shape, weight, bias, dtype=dtype, groups=groups)
    operands = [t.requires_grad_() for t in call.operands]
    args = (*operands[:2], operands[2] if bias else None, stride, padding, output_padding, groups, dilation)
    torch.library.opcheck(torch.ops.upconv.conv_transpose.default, args, test_utils=UTILITIES)
    grad = torch.randn_like(torch.ops.upconv.conv_transpose(*args))
    x, w, *b = (t.detach() for t in operands)
    text = text_of(*args[3:])
    forward = (x, w, b[0] if bias else None, text)
    torch.library.opcheck(torch.ops.upconv.conv_transpose_forward.default, forward, test_utils=UTILITIES)
    for mask in (1, 2, 3):
        backward = (grad, x, w, text, mask)
        torch.library.opcheck(torch.ops.upconv.conv_transpose_backward.default, backward, test_utils=UTILITIES)


# --- torch.export ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", (1, 2, 3))
@pytest.mark.parametrize("strict", (False, True))
def test_exported_programs_hold_torchs_operator(rank: int, strict: bool) -> None:
    for home in (upconv, nn):  # built as ours, and accelerated
        model, x = upconv.accelerate(decoder(rank, home).eval()), torch.randn(2, 4, *(5, 4, 3)[:rank])
        program = torch.export.export(model, (x,), strict=strict)
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert sum(f"aten.conv_transpose{rank}d" in target for target in targets) == 2
        assert not any("upconv" in target for target in targets)
        assert_close(program.module()(x).detach(), model(x).detach(), length=512)
