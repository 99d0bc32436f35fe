"""What PyTorch's operator does beside computing: edge shapes, dtypes, autocast, memory formats, transforms, modes."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import upconv
from conftest import EVERY, OURS, PLANS, THEIRS, Call, assert_close, assert_equal, forced_plans, make_call
from strategies import gradient_problems, operands
from upconv import cpu, planner
from upconv.problem import Problem, is_channels_last

RANKS = pytest.mark.parametrize("rank", (1, 2, 3), ids="{}d".format)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(params=("shuffle", "flip"))
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forces an engine forward and backward: PyTorch serves small calls, and would be compared with itself."""
    with forced_plans(request.param, "split") as forced:
        yield request.param
        assert forced, "no call of the test reached the engine"


def a_call(rank: int, engine: str = "shuffle", **changes: Any) -> Call:
    """Two images, 4 -> 6 channels in two groups, an odd kernel; strided unless the engine is for stride 1."""
    arguments: dict[str, Any] = {"stride": 1 if engine == "flip" else 2, "padding": 1, "groups": 2, **changes}
    return make_call((2, 4, *(5, 4, 6)[:rank]), (4, 3, *(3, 4, 2)[:rank]), **arguments)


# --- edge shapes -----------------------------------------------------------------------------------------------------


@RANKS
@pytest.mark.parametrize("bias", (True, False))
def test_zero_batch(rank: int, bias: bool, device: str) -> None:
    call = make_call((0, 4, *(5,) * rank), (4, 3, *(3,) * rank), bias, stride=2, padding=1, device=device)
    out = call.run(THEIRS)
    ours, theirs = call.gradients(OURS, out), call.gradients(THEIRS, out)
    assert ours[0].shape == (0, 3, *(9,) * rank)
    for a, b in zip(ours, theirs):
        assert_equal(a, b)
    assert all(g.eq(0).all() for g in ours[2:])  # zeros, not None


@RANKS
def test_zero_batch_with_empty_space(rank: int) -> None:
    call = make_call((0, 4, 0, *(5,) * (rank - 1)), (4, 3, *(3,) * rank), stride=2)
    assert_equal(call.run(OURS), call.run(THEIRS))


@RANKS
def test_unbatched(rank: int, engine: str) -> None:
    call = a_call(rank, engine)
    single = Call(call.input[0], call.weight, call.bias, call.kwargs)
    single.check()
    assert single.run(OURS).dim() == rank + 1
    assert_close(single.run(OURS), call.run(OURS)[0].contiguous())


@RANKS
def test_batch_of_one_with_odd_strides(rank: int, engine: str) -> None:
    """A dimension of size 1 may have any stride (PyTorch's test_contig_wrong_stride_cudnn)."""
    call = a_call(rank, engine)
    strides = list(call.input.stride())
    for odd in (1, 3, 12345):
        x = call.input[:1].as_strided((1, *call.input.shape[1:]), [odd, *strides[1:]])
        Call(x, call.weight, call.bias, call.kwargs).check()


@pytest.mark.parametrize(
    ("shape", "weight", "kwargs"),
    [
        ((1, 1, 1, 1), (1, 1, 1, 1), {}),
        ((2, 3, 1, 1), (3, 2, 5, 5), {"stride": 3, "padding": 2}),
        ((2, 3, 1, 7), (3, 2, 1, 3), {"stride": (1, 2), "padding": (0, 1)}),
        ((2, 3, 4, 4), (3, 2, 2, 2), {"stride": 5, "output_padding": 4}),
        ((2, 3, 4, 4), (3, 2, 1, 1), {"stride": 3}),
        ((2, 3, 4, 4), (3, 2, 3, 3), {"stride": 2, "output_padding": 2, "dilation": 3}),
        ((2, 3, 4, 4), (3, 2, 3, 3), {"stride": 1, "output_padding": 1, "dilation": 2, "padding": 3}),
        ((2, 3, 9, 9), (3, 2, 3, 3), {"padding": 9}),
        ((2, 3, 9, 9), (3, 2, 3, 3), {"padding": 5}),
        ((2, 6, 4, 4), (6, 1, 3, 3), {"groups": 6, "stride": 2, "dilation": 2}),
    ],
    ids=str,
)
def test_corner_geometries(
    shape: tuple[int, ...], weight: tuple[int, ...], kwargs: dict[str, Any], each_plan: list[Any]
) -> None:
    if kwargs.get("padding") == 9:
        call = make_call(shape, weight, **kwargs)
        with pytest.raises(RuntimeError) as theirs:
            call.run(THEIRS)
        with pytest.raises(RuntimeError) as ours:
            call.run(OURS)
        assert str(ours.value) == str(theirs.value)
    else:
        make_call(shape, weight, **kwargs).check()


# --- dtypes and autocast ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.complex64, torch.complex128), ids=str)
def test_conjugated_operands(dtype: torch.dtype) -> None:
    call = a_call(2, dtype=dtype)
    for x, w in ((call.input.conj(), call.weight), (call.input, call.weight.conj()), (call.input.mH, call.weight)):
        changed = Call(x if x.shape == call.input.shape else x.mT.conj(), w, call.bias, call.kwargs)
        assert_equal(changed.run(OURS), changed.run(THEIRS))


def test_negated_views() -> None:
    """The imaginary part of a conjugate is a view with the negative bit: no engine may read its memory as it is."""
    call = a_call(2)
    x, w = (torch.complex(torch.zeros_like(t), t).conj().imag for t in (call.input, call.weight))
    assert x.is_neg() and w.is_neg()
    with forced_plans("shuffle", "split"):
        for input, weight in ((x, call.weight), (call.input, w), (x, w)):
            changed = Call(input, weight, call.bias, call.kwargs)
            assert_close(changed.run(OURS), changed.run(THEIRS))


def _under_autocast(call: Call, functions: Any, dtype: torch.dtype, backward_inside: bool) -> list[Tensor]:
    operands = [t.detach().clone().requires_grad_() for t in call.operands]
    bias = operands[2] if call.bias is not None else None
    with torch.autocast("cpu", dtype=dtype):
        out = Call(operands[0], operands[1], bias, call.kwargs).run(functions)
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(out.shape, generator=generator).to(out.dtype)
        if backward_inside:
            out.backward(grad)
    if not backward_inside:
        out.backward(grad)
    assert all(t.grad is not None and t.grad.dtype is t.dtype for t in operands)
    return [out.detach(), *(t.grad for t in operands)]  # type: ignore[list-item]


@RANKS
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("backward_inside", (True, False), ids=("inside", "outside"))
def test_autocast(rank: int, dtype: torch.dtype, backward_inside: bool, engine: str) -> None:
    call = a_call(rank, engine)
    ours = _under_autocast(call, OURS, dtype, backward_inside)
    theirs = _under_autocast(call, THEIRS, dtype, backward_inside)
    assert ours[0].dtype is theirs[0].dtype is dtype
    assert [g.dtype for g in ours] == [g.dtype for g in theirs]
    for a, b in zip(ours, theirs):
        assert a.stride() == b.stride()
        # Both round operands and results to the lower dtype, which the gradients' float32 does not show.
        scale = b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=8 * torch.finfo(dtype).eps * scale)


def test_autocast_casts_mixed_operands_and_leaves_float64_alone(engine: str) -> None:
    call = a_call(2, engine)
    mixed = Call(call.input.bfloat16(), call.weight, call.bias, call.kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(mixed.run(OURS), mixed.run(THEIRS))
        wide = call.map(Tensor.double)
        assert wide.run(OURS).dtype is torch.float64
        assert_close(wide.run(OURS), wide.run(THEIRS))
        half = Call(
            call.input.double(), call.weight, call.bias, call.kwargs
        )  # float64 input, bfloat16 weight: an error
        with pytest.raises(RuntimeError) as theirs:
            half.run(THEIRS)
        with pytest.raises(RuntimeError) as ours:
            half.run(OURS)
        assert str(ours.value) == str(theirs.value)
        with torch.autocast("cpu", enabled=False):
            assert call.run(OURS).dtype is torch.float32
            assert_close(call.run(OURS), call.run(THEIRS))


def test_autocast_inside_a_model(engine: str) -> None:
    torch.manual_seed(0)
    stride = 1 if engine == "flip" else 2
    models = [
        nn.Sequential(
            nn.Conv2d(3, 8, 3), cls(8, 4, 3, stride=stride), nn.ReLU(), cls(4, 3, 3, stride=stride, dtype=torch.float32)
        )
        for cls in (upconv.ConvTranspose2d, nn.ConvTranspose2d)
    ]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(2, 3, 8, 8)
    results = []
    for model in models:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*results):
        assert a.dtype is b.dtype is torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * b.abs().max().item())


# --- memory formats --------------------------------------------------------------------------------------------------


def _strides(call: Call, functions: Any, grad_format: torch.memory_format) -> list[tuple[int, ...]]:
    out = call.run(functions)
    grad = torch.ones_like(out).contiguous(memory_format=grad_format)
    return [t.stride() for t in call.gradients(functions, grad)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("shape", "weight"),
    [
        ((2, 8, 4, 5), (8, 4, 3, 3)),
        ((2, 8, 4, 5), (8, 4, 1, 1)),
        ((2, 1, 4, 5), (1, 4, 3, 3)),
        ((2, 8, 4, 5), (8, 1, 3, 3)),
        ((2, 8, 1, 1), (8, 4, 3, 3)),
        ((1, 1, 1, 1), (1, 1, 1, 1)),
        ((1, 8, 1, 5), (8, 4, 1, 3)),
        ((2, 4, 3, 4, 5), (4, 3, 3, 2, 2)),
        ((1, 4, 3, 4, 5), (4, 3, 3, 2, 2)),
        ((2, 4, 3, 4, 5), (4, 3, 1, 1, 1)),
        ((2, 1, 3, 4, 5), (1, 3, 2, 2, 2)),
        ((2, 4, 1, 1, 1), (4, 1, 2, 2, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("plan", [("native", "native"), *PLANS], ids="-".join)
def test_memory_formats(
    shape: tuple[int, ...], weight: tuple[int, ...], dtype: torch.dtype, plan: tuple[str, str]
) -> None:
    """Output and gradients have PyTorch's strides for each mix of formats of input, weight and gradient."""
    if plan[1] == "wide" and dtype in cpu.HALF and dtype not in planner.cpu_device().onednn:
        pytest.skip("the planner never takes this plan where PyTorch has no oneDNN convolution of the dtype")
    last, usual = FORMATS[len(shape)], torch.contiguous_format
    for stride in (1, 2):
        call = make_call(shape, weight, dtype=dtype, stride=stride)
        for x_format in (usual, last):
            for w_format in (usual, last):
                # .contiguous() leaves an ambiguous tensor's strides alone; a fresh one gets the format's own.
                x = torch.empty_like(call.input, memory_format=x_format).copy_(call.input)
                w = torch.empty_like(call.weight, memory_format=w_format).copy_(call.weight)
                mixed = Call(x, w, call.bias, call.kwargs)
                for grad_format in (usual, last):
                    theirs = _strides(mixed, THEIRS, grad_format)
                    with forced_plans(*plan):
                        assert _strides(mixed, OURS, grad_format) == theirs, (stride, x_format, w_format, grad_format)


@pytest.mark.parametrize("rank", (2, 3))
def test_layout_rule_is_torchs(rank: int) -> None:
    """`is_channels_last` reads strides as PyTorch does, also where sizes of 1 leave room for doubt."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 4, (400, rank + 2), generator=generator).tolist()
    seen = set()
    for size in sizes:
        base = torch.empty(size)
        for order in (range(rank + 2), torch.randperm(rank + 2, generator=generator).tolist()):
            t = base.permute(*order)
            for tensor in (t, t.contiguous(memory_format=FORMATS[rank + 2]), t[..., ::2], t.expand(t.shape)):
                theirs = torch.empty_like(tensor).copy_(tensor)  # preserve_format: dense, in the suggested format
                suggested = torch._prims_common.suggest_memory_format(tensor)
                found = is_channels_last(tensor.shape, tensor.stride())
                assert found == (suggested is FORMATS[rank + 2]), (tensor.shape, tensor.stride(), theirs.stride())
                seen.add(found)
    assert seen == {True, False}


# --- which gradients are computed ------------------------------------------------------------------------------------


@RANKS
@pytest.mark.parametrize("needed", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)])
def test_only_needed_gradients_are_computed(
    rank: int, needed: tuple[int, ...], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    right = cpu.gradients
    monkeypatch.setattr(cpu, "gradients", lambda *args: found.append(right(*args)) or found[-1])
    call = a_call(rank, engine)
    operands = [t.clone().requires_grad_(bool(n)) for t, n in zip(call.operands, needed)]
    out = Call(*operands, call.kwargs).run(OURS)  # type: ignore[arg-type]
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted = call.gradients(THEIRS, grad)[1:]
    for t, n, g in zip(operands, needed, wanted):
        assert (t.grad is not None) == bool(n)
        if t.grad is not None:
            assert_close(t.grad, g, length=512)
    assert [[g is not None for g in gradients] for gradients in found] == [list(map(bool, needed))]


def test_no_graph_is_kept_where_none_is_needed(engine: str) -> None:
    call = a_call(2, engine)
    assert not call.run(OURS).requires_grad
    wanting = Call(call.input.requires_grad_(), call.weight, call.bias, call.kwargs)
    assert wanting.run(OURS).requires_grad
    with torch.no_grad():
        assert not wanting.run(OURS).requires_grad
    with torch.inference_mode():
        out = wanting.run(OURS)
        assert out.is_inference() and not out.requires_grad
        assert_close(out, wanting.run(THEIRS))
        inside = Call(torch.ones_like(call.input), call.weight, call.bias, call.kwargs)
        assert inside.run(OURS).is_inference()


def test_an_undefined_gradient_stays_undefined(engine: str) -> None:
    call = a_call(2, engine)
    x = call.input.requires_grad_()

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    Nothing.apply(Call(x, call.weight, call.bias, call.kwargs).run(OURS)).sum().backward()
    assert x.grad is None


def test_a_changed_operand_is_noticed(engine: str) -> None:
    """A backward after an in-place change of a saved operand would be wrong: PyTorch refuses it, and so do we."""
    texts = []
    for functions in (OURS, THEIRS):
        call = a_call(2, engine)
        x, w = call.input.requires_grad_(), call.weight.requires_grad_()
        out = Call(x, w, call.bias, call.kwargs).run(functions)
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            out.sum().backward()
        texts.append(str(error.value).split(";")[0].partition("[torch.FloatTensor")[2])
    assert texts[0] == texts[1]


# The last has unequal padding at its ends and a single channel, where a narrowed result is still contiguous.
OWNERS = [
    *(a_call(rank, name) for rank in (1, 2, 3) for name in ("shuffle", "flip")),
    make_call((1, 2, 8, 8), (2, 1, 3, 3), padding=1, output_padding=(1, 0), dilation=2),
]


@pytest.mark.parametrize("case", range(len(OWNERS)))
def test_the_output_may_be_changed_in_place(case: int, each_plan: list[Any]) -> None:
    call = OWNERS[case]
    results = []
    for functions in (OURS, THEIRS):
        x = call.input.detach().clone().requires_grad_()
        out = Call(x, call.weight, call.bias, call.kwargs).run(functions)
        out.add_(1).mul_(3)
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
    for a, b in zip(*results):
        assert_close(a, b, length=512)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", range(len(OWNERS)))
def test_the_output_owns_its_memory(case: int, each_plan: list[Any]) -> None:
    """A view of a larger buffer would keep that buffer alive as long as the output lives."""
    out = OWNERS[case].run(OURS)
    assert not out._is_view()
    assert out.untyped_storage().nbytes() == out.numel() * out.itemsize


# --- higher derivatives and transforms -------------------------------------------------------------------------------


@RANKS
def test_double_backward(rank: int, engine: str) -> None:
    call = a_call(rank, engine, dtype=torch.float64)
    grad = torch.randn_like(call.run(THEIRS))
    tangents = [torch.randn_like(t) for t in call.operands]
    results = []
    for functions in (OURS, THEIRS):
        operands = [t.detach().clone().requires_grad_() for t in call.operands]
        seed = grad.clone().requires_grad_()
        out = Call(*operands, call.kwargs).run(functions)  # type: ignore[arg-type]
        first = torch.autograd.grad(out, operands, seed, create_graph=True)
        value = sum((g.square() * v).sum() for g, v in zip(first, tangents))
        assert isinstance(value, Tensor)
        results.append([value.detach(), *torch.autograd.grad(value, (*operands[:2], seed))])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * b.abs().max().item())
        assert a.abs().max() > 0


@RANKS
def test_forward_mode(rank: int, engine: str) -> None:
    call = a_call(rank, engine)
    call.run(OURS)
    tangents = [torch.randn_like(t) for t in call.operands]
    results = []
    for functions in (OURS, THEIRS):
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(t, v) for t, v in zip(call.operands, tangents)]
            out = Call(*duals, call.kwargs).run(functions)  # type: ignore[arg-type]
            primal, tangent = torch.autograd.forward_ad.unpack_dual(out)
            assert tangent is not None
            results.append((primal, tangent))
    for a, b in zip(*results):
        assert_equal(a, b)


@RANKS
@pytest.mark.parametrize(
    "in_dims", [(0, None, None), (None, 0, None), (0, 0, 0), (1, None, 0), (None, None, 0)], ids=str
)
def test_vmap(rank: int, in_dims: tuple[int | None, ...], engine: str) -> None:
    call = a_call(rank, engine)
    operands = [t if d is None else torch.randn_like(torch.stack([t] * 3, d)) for t, d in zip(call.operands, in_dims)]

    def one(functions: Any) -> Any:
        return lambda *tensors: Call(*tensors, call.kwargs).run(functions)

    mapped = torch.vmap(one(OURS), in_dims)(*operands)
    assert_close(mapped, torch.vmap(one(THEIRS), in_dims)(*operands), length=512)
    loop = [one(OURS)(*(t if d is None else t.select(d, i) for t, d in zip(operands, in_dims))) for i in range(3)]
    torch.testing.assert_close(mapped, torch.stack(loop), rtol=1e-4, atol=1e-4)


def test_per_sample_gradients(engine: str) -> None:
    stride = 1 if engine == "flip" else 2
    layers = [cls(4, 6, 3, stride=stride, groups=2) for cls in (upconv.ConvTranspose2d, nn.ConvTranspose2d)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(5, 4, 6, 6)
    results = []
    for layer in layers:
        params = {k: v.detach() for k, v in layer.named_parameters()}

        def loss(params: Any, sample: Tensor, layer: nn.Module = layer) -> Tensor:
            out: Tensor = torch.func.functional_call(layer, params, (sample[None],))
            return out.square().sum()

        results.append(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x))
    for name in ("weight", "bias"):
        assert results[0][name].shape[0] == 5
        torch.testing.assert_close(results[0][name], results[1][name])
    single = layers[0]
    single.zero_grad()
    single(x[2:3]).square().sum().backward()
    torch.testing.assert_close(results[0]["weight"][2], single.weight.grad)


def test_jacobians_and_hessians(engine: str) -> None:
    call = a_call(1, engine, dtype=torch.float64)
    call.run(OURS)

    def function(functions: Any) -> Any:
        return lambda w: Call(call.input, w, call.bias, call.kwargs).run(functions).sin().sum((0, 2))

    for transform in (torch.func.jacfwd, torch.func.jacrev, torch.func.hessian):
        ours, theirs = (transform(function(functions))(call.weight) for functions in (OURS, THEIRS))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert ours.abs().max() > 0
    ours, theirs = (
        torch.autograd.functional.hessian(lambda w, f=f: function(f)(w).sum(), call.weight) for f in (OURS, THEIRS)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_batched_gradients(engine: str) -> None:
    call = a_call(2, engine)
    results = []
    grads: Tensor | None = None
    for functions in (OURS, THEIRS):
        operands = [t.detach().clone().requires_grad_() for t in call.operands]
        out = Call(*operands, call.kwargs).run(functions)  # type: ignore[arg-type]
        grads = torch.randn(3, *out.shape) if grads is None else grads
        results.append(torch.autograd.grad(out, operands, grads, is_grads_batched=True))
    for a, b in zip(*results):
        assert_close(a, b, length=512)


# --- modes, hooks and counters ---------------------------------------------------------------------------------------


def test_torch_function_sees_torchs_function(engine: str) -> None:
    seen = []

    class Spy(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    class Logged(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    call = a_call(2, engine)
    wanted = call.run(OURS)
    with Spy():
        assert_close(call.run(OURS), wanted)
    assert "conv_transpose2d" in seen
    seen.clear()
    logged = Call(call.input.as_subclass(Logged), call.weight, call.bias, call.kwargs).run(OURS)
    assert "conv_transpose2d" in seen and type(logged) is Logged
    assert_close(logged.as_subclass(Tensor), wanted)


def test_dispatch_modes_see_torchs_operators(engine: str) -> None:
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    call = a_call(2, engine)
    call.run(OURS)
    names = []
    for functions in (OURS, THEIRS):
        seen.clear()
        with Spy():
            call.gradients(functions, torch.ones_like(call.run(THEIRS)))
        names.append([name for name in seen if "conv" in name])
    assert names[0] == names[1] and names[0]
    names.clear()
    for functions in (OURS, THEIRS):  # of a forward that no mode was told of
        seen.clear()
        operands = [t.detach().requires_grad_() for t in call.operands]
        out = Call(*operands, call.kwargs).run(functions)
        grad = torch.ones_like(out)
        with Spy():
            out.backward(grad)
        names.append([name for name in seen if "detach" not in name])
    assert names[0] == names[1] == ["aten.convolution_backward.default"]


@RANKS
@pytest.mark.parametrize("groups", (1, 2))
def test_flop_counter(rank: int, groups: int, engine: str) -> None:
    call = a_call(rank, engine)
    call = Call(call.input, call.weight, None if groups == 1 else call.bias, {**call.kwargs, "groups": groups})
    call.run(OURS)
    totals = []
    for functions in (OURS, THEIRS):
        grad = torch.ones_like(call.run(THEIRS))
        counter = FlopCounterMode(display=False)
        with counter:
            call.gradients(functions, grad)
        totals.append(counter.get_flop_counts()["Global"])
    assert totals[0] == totals[1] and sum(totals[0].values()) > 0
    layer = getattr(upconv, f"ConvTranspose{rank}d")(4, 6, 3, groups=groups)
    counter = FlopCounterMode(display=False)
    with counter:
        layer(call.input)
    assert counter.get_total_flops() == 2 * call.input.numel() * 6 // groups * 3**rank


def flops(run: Callable[[], Any]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return counter.get_total_flops()


@given(
    p=gradient_problems(),
    needed=st.lists(st.booleans(), min_size=3, max_size=3).filter(any),
    asked=st.lists(st.booleans(), min_size=3, max_size=3).filter(any),
)
@settings(max_examples=200 if EVERY else 60, deadline=None)
def test_flops_are_those_of_torchs_operator(p: Problem, needed: list[bool], asked: list[bool]) -> None:
    """By the function and by the operator for graphs: of the forward, of the gradients for operands that require them
    (the forward made outside the counter too), and of those that are asked for alone.
    """
    x, w, b, g = operands(p)
    tail = (p.stride, p.padding, p.output_padding, p.groups, p.dilation)

    def operator(*given: Tensor | None) -> Tensor:
        lists = (list(a) for a in (p.stride, p.padding, p.output_padding))
        return torch.ops.upconv.conv_transpose(*given, *lists, p.groups, list(p.dilation))

    def counts(function: Callable[..., Tensor]) -> list[int]:
        some = [t if t is None else t.detach().requires_grad_(n) for t, n in zip((x, w, b), needed)]
        out = function(*some)
        found = [flops(lambda: function(*some))]
        if out.requires_grad:
            found += [flops(lambda: out.backward(g)), flops(lambda: function(*some).backward(g))]
        every = [t if t is None else t.detach().requires_grad_() for t in (x, w, b)]
        wanted = [t for t, n in zip(every, asked) if n and t is not None]
        if wanted:
            whole = function(*every)
            found.append(flops(lambda: torch.autograd.grad(whole, wanted, g)))
            found.append(flops(lambda: torch.autograd.grad(function(*every), wanted, g)))
        return found

    theirs = counts(lambda *given: THEIRS[p.rank](*given, *tail))
    assert counts(lambda *given: OURS[p.rank](*given, *tail)) == theirs and theirs[0] > 0
    assert counts(operator) == theirs


def test_flops_of_the_operator_are_counted_once_by_its_name() -> None:
    x, w = torch.randn(2, 4, 5, 5, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter, forced_plans("shuffle", "split"):
        out = torch.ops.upconv.conv_transpose(x, w, None, [2, 2], [1, 1], [0, 0], groups=2, dilation=[1, 1])
        out.sum().backward()
    found = counter.get_flop_counts()["Global"]
    ours = torch.ops.upconv
    assert set(found) == {ours.conv_transpose_forward, ours.conv_transpose_backward}
    assert found[ours.conv_transpose_forward] == 2 * x.numel() * 3 * 9


IMPORTED = """
import sys, torch
def count():
    import upconv
    return torch.ops.upconv.conv_transpose(torch.ones(1, 2, 3), torch.ones(2, 4, 3), None, [1], [0], [0], 1, [1])
def loaded():
    return "torch.utils.flop_counter" in sys.modules
"""
ORDERS = {
    "upconv, then the counter": """
import upconv
assert not loaded() and not torch.cuda.is_initialized()
import torch.utils.flop_counter as found
with found.FlopCounterMode(display=False) as counter:
    count()
assert found.__spec__.loader is found.__loader__ and type(found.__loader__) is type(torch.__loader__)
assert not any("upconv" in type(finder).__module__ for finder in sys.meta_path)
""",
    "the counter, then upconv": """
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    count()
with FlopCounterMode(display=False) as second:
    count()
assert second.get_flop_counts() == counter.get_flop_counts()
""",
}


@pytest.mark.parametrize("order", list(ORDERS))
def test_flops_are_counted_whatever_is_imported_first(order: str) -> None:
    """Also where upconv is imported under a counter; and upconv alone does not import it."""
    code = f"{IMPORTED}{ORDERS[order]}print(counter.get_total_flops())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{2 * 3 * 2 * 4 * 3}\n")


def test_hooks_retained_graphs_and_gradients(engine: str) -> None:
    call = a_call(2, engine)
    results = []
    for functions in (OURS, THEIRS):
        x = call.input.detach().clone().requires_grad_()
        w = call.weight.detach().clone().requires_grad_()
        hidden = x * 2
        hidden.retain_grad()
        out = Call(hidden, w, call.bias, call.kwargs).run(functions)
        out.retain_grad()
        hooked: list[Tensor] = []
        hidden.register_hook(hooked.append)
        out.register_hook(lambda g: g * 3)
        grad = torch.linspace(-1, 1, out.numel()).view_as(out)
        out.backward(grad, retain_graph=True)
        first = w.grad.clone()  # type: ignore[union-attr]
        out.backward(grad)
        torch.testing.assert_close(w.grad, 2 * first)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            out.backward(grad)
        results.append([out.grad, hidden.grad, x.grad, w.grad, *hooked])
    assert len(results[0]) == 6
    for a, b in zip(*results):
        assert_close(a, b, length=512)  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointing(reentrant: bool, engine: str) -> None:
    layer = upconv.ConvTranspose2d(4, 6, 3, stride=1 if engine == "flip" else 2)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    layer(x).square().sum().backward()
    wanted = [x.grad.clone(), layer.weight.grad.clone(), layer.bias.grad.clone()]  # type: ignore[union-attr]
    x.grad = None
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    for a, b in zip((x.grad, layer.weight.grad, layer.bias.grad), wanted):  # type: ignore[union-attr]
        assert_equal(a, b)


def test_saved_tensor_hooks(engine: str) -> None:
    call = a_call(2, engine)
    packed: list[Tensor] = []
    x = call.input.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.double(), lambda t: t.float()):
        out = Call(x, call.weight.requires_grad_(), call.bias, call.kwargs).run(OURS)
    assert {t.data_ptr() for t in packed} == {call.input.data_ptr(), call.weight.data_ptr()}  # and nothing beside
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, call.weight), grad)
    wanted = call.gradients(THEIRS, grad)[1:3]
    for a, b in zip(found, wanted):
        assert_close(a, b, length=512)
    with torch.autograd.graph.save_on_cpu():
        again = torch.autograd.grad(Call(x, call.weight, call.bias, call.kwargs).run(OURS), (x, call.weight), grad)
    for a, b in zip(again, found):
        assert_equal(a, b)


def test_module_hooks(engine: str) -> None:
    layer = upconv.ConvTranspose2d(4, 6, 3, stride=1 if engine == "flip" else 2)
    log: list[str] = []
    layer.register_forward_pre_hook(lambda m, args: log.append("pre") or (args[0] * 2,))
    layer.register_forward_hook(lambda m, args, out: log.append("post") or out + 1)
    layer.register_full_backward_hook(
        lambda m, gi, go: log.append(f"backward {tuple(gi[0].shape)} {tuple(go[0].shape)}")
    )
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    plain = copy.deepcopy(layer)
    for hooks in (plain._forward_hooks, plain._forward_pre_hooks, plain._backward_hooks):
        hooks.clear()
    out = layer(x)
    assert_equal(out.detach(), plain(x * 2).detach() + 1)
    out.sum().backward()
    assert log == ["pre", "post", f"backward (2, 4, 5, 5) {tuple(out.shape)}"]


@RANKS
def test_meta_and_fake_tensors(rank: int, engine: str) -> None:
    call = a_call(rank, engine)
    real = call.run(OURS)
    meta = call.map(lambda t: t.to("meta"))
    for a, b in zip(meta.gradients(OURS, real.to("meta")), meta.gradients(THEIRS, real.to("meta"))):
        assert a.device.type == "meta"
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    assert meta.run(OURS).shape == real.shape
    with FakeTensorMode() as mode:
        x, w, b = (mode.from_tensor(t) for t in call.operands)
        out = Call(x, w, b, call.kwargs).run(OURS)
        assert (out.shape, out.stride(), out.device) == (real.shape, real.stride(), real.device)
    layer = getattr(upconv, f"ConvTranspose{rank}d")(4, 6, 3, device="meta")
    assert layer(meta.input).device.type == "meta"
    with torch.device("meta"):
        assert getattr(upconv, f"ConvTranspose{rank}d")(4, 6, 3).weight.device.type == "meta"


@pytest.mark.parametrize("plan", PLANS, ids="-".join)
def test_deterministic_fill_reaches_no_result(plan: tuple[str, str]) -> None:
    """With uninitialised memory filled with NaN, an element that no plan wrote would show."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    calls = [a_call(rank, engine) for rank in (1, 2, 3) for engine in ("shuffle", "flip")]
    calls.append(make_call((2, 3, 4, 4), (3, 2, 2, 2), stride=5, output_padding=4))
    calls.append(make_call((2, 3, 4, 4), (3, 2, 3, 3), stride=2, output_padding=2, dilation=3))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        assert torch.empty(3).isnan().all()
        with forced_plans(*plan):
            for call in calls:
                call.check()
                assert call.run(OURS).isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@RANKS
def test_without_onednn(rank: int, engine: str) -> None:
    call = a_call(rank, engine)
    with torch.backends.mkldnn.flags(enabled=False):
        call.check()


@RANKS
def test_changing_the_number_of_threads(rank: int, engine: str) -> None:
    call = a_call(rank, engine)
    for threads in (1, 2, 1, 3):
        torch.set_num_threads(threads)
        call.check()


def test_repeated_calls_give_the_same_bits(engine: str) -> None:
    call = a_call(2, engine)
    grad = torch.randn_like(call.run(OURS))
    first = call.gradients(OURS, grad)
    for _ in range(3):
        for a, b in zip(call.gradients(OURS, grad), first):
            assert_equal(a, b)


def test_training_follows_torchs(engine: str) -> None:
    """Ten steps of SGD on the same data: the same losses, and weights that stay together."""
    stride = 1 if engine == "flip" else 2
    x = torch.randn(4, 3, 6, 6)
    losses = []
    for cls in (upconv.ConvTranspose2d, nn.ConvTranspose2d):
        torch.manual_seed(2)
        model = nn.Sequential(cls(3, 8, 3, stride=stride, padding=1), nn.Tanh(), cls(8, 3, 4, stride=stride, padding=1))
        target = torch.zeros_like(model(x)) + 0.5
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        history = []
        for _ in range(10):
            optimiser.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimiser.step()
            history.append(loss.item())
        losses.append(history)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
