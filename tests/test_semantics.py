"""What PyTorch's operator does beside computing: edge shapes, dtypes, autocast, memory formats, transforms, modes.

The functions run with an engine forced on them. What layers do in whole programs is in `situations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from conftest import EVERY, OURS, PLANS, RANKS, THEIRS, Call, diagonal, forced_plans, make_call
from situations import differences
from situations.observers import Listing, Names
from strategies import gradient_problems, operands
from upconv import cpu, planner
from upconv.problem import Problem

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
Functions = Sequence[Any]


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


def leaves(call: Call, needed: Sequence[int] = (1, 1, 1)) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(bool(n)) for t, n in zip(call.operands, needed)]


def run(functions: Functions, call: Call, *operands: Tensor) -> Tensor:
    """The call with other operands."""
    return Call(*operands, call.kwargs).run(functions)  # type: ignore[arg-type]


def seeded(like: Tensor) -> Tensor:
    """A random gradient, the same for ours and for PyTorch's."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).to(like.dtype)


# --- the same by ours and by PyTorch's functions ---------------------------------------------------------------------

Case = Callable[[Functions, Call], Any]
CASES: dict[str, tuple[Case, float]] = {}


def case(tolerance: float = 1e-5) -> Callable[[Case], Case]:
    """Puts a function into the table. What it returns must agree; its tolerance is for float32, relative in norm."""

    def add(function: Case) -> Case:
        CASES[function.__name__] = function, tolerance
        return function

    return add


@case()
def batch_of_one_with_odd_strides(functions: Functions, call: Call) -> Any:
    """A dimension of size 1 may have any stride (PyTorch's test_contig_wrong_stride_cudnn)."""
    found = []
    for odd in (1, 3, 12345):
        x = call.input[:1].as_strided((1, *call.input.shape[1:]), [odd, *call.input.stride()[1:]])
        single = Call(x, call.weight, call.bias, call.kwargs)
        found.append(single.gradients(functions, seeded(single.run(THEIRS))))
    return found


@case()
def negated_views(functions: Functions, call: Call) -> Any:
    """The imaginary part of a conjugate is a view with the negative bit: no engine may read its memory as it is."""
    x, w = (torch.complex(torch.zeros_like(t), t).conj().imag for t in (call.input, call.weight))
    return [run(functions, call, *two, call.operands[2]) for two in ((x, call.weight), (call.input, w), (x, w))]


@case()
def saved_tensors(functions: Functions, call: Call) -> Any:
    """Input and weight are saved, and nothing beside."""
    tensors, packed = leaves(call), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.double(), Tensor.float):
        out = run(functions, call, *tensors)
    kept = [{t.data_ptr() for t in packed} == {t.data_ptr() for t in tensors[:2]}]
    return kept, torch.autograd.grad(out, tensors, seeded(out))


@case()
def function_modes_and_subclasses(functions: Functions, call: Call) -> Any:
    found = [call.run(functions)]
    with Names() as mode:
        found.append(call.run(functions))

    class Logged(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            mode.seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    logged = run(functions, call, call.input.as_subclass(Logged), *call.operands[1:])  # type: ignore[arg-type]
    return found, logged.as_subclass(Tensor), type(logged).__name__, [name for name in mode.seen if "conv" in name]


@case()
def dispatch_modes(functions: Functions, call: Call) -> Any:
    tensors = leaves(call)
    out = run(functions, call, *tensors)  # a forward that no mode was told of
    with Listing() as backward:
        found = torch.autograd.grad(out, tensors, seeded(out))
    with Listing() as whole:
        call.gradients(functions, seeded(out))
    return found, [sorted((+mode.seen).items()) for mode in (backward, whole)]


@case()
def without_onednn(functions: Functions, call: Call) -> Any:
    with torch.backends.mkldnn.flags(enabled=False):
        return call.gradients(functions, seeded(call.run(THEIRS)))


@RANKS
@pytest.mark.parametrize("name", CASES)
def test_it_is_as_pytorchs(name: str, rank: int, engine: str) -> None:
    function, tolerance = CASES[name]
    call = a_call(rank, engine)
    lines = differences(function(OURS, call), function(THEIRS, call), tolerance)
    assert not lines, "\n".join(lines)


# --- memory formats and memory ---------------------------------------------------------------------------------------


def _strides(call: Call, functions: Functions, grad_format: torch.memory_format) -> list[tuple[int, ...]]:
    grad = torch.ones_like(call.run(functions)).contiguous(memory_format=grad_format)
    return [t.stride() for t in call.gradients(functions, grad)]


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((2, 8, 4, 5), (8, 4, 3, 3)), ((2, 8, 4, 5), (8, 4, 1, 1)), ((2, 1, 4, 5), (1, 4, 3, 3)),
    ((2, 8, 4, 5), (8, 1, 3, 3)), ((2, 8, 1, 1), (8, 4, 3, 3)), ((1, 1, 1, 1), (1, 1, 1, 1)),
    ((1, 8, 1, 5), (8, 4, 1, 3)), ((2, 4, 3, 4, 5), (4, 3, 3, 2, 2)), ((1, 4, 3, 4, 5), (4, 3, 3, 2, 2)),
    ((2, 4, 3, 4, 5), (4, 3, 1, 1, 1)), ((2, 1, 3, 4, 5), (1, 3, 2, 2, 2)), ((2, 4, 1, 1, 1), (4, 1, 2, 2, 2)),
]  # fmt: skip
"""Of inputs and weights."""
DTYPES = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize(("shapes", "dtype", "plan"), diagonal(SHAPES, DTYPES, [("native", "native"), *PLANS]), ids=str)
def test_memory_formats(shapes: tuple[Any, Any], dtype: torch.dtype, plan: tuple[str, str]) -> None:
    """Output and gradients have PyTorch's strides for each mix of formats of input, weight and gradient."""
    if plan[1] == "wide" and dtype in cpu.HALF and dtype not in planner.cpu_device().onednn:
        pytest.skip("the planner never takes this plan where PyTorch has no oneDNN convolution of the dtype")
    formats = torch.contiguous_format, FORMATS[len(shapes[0])]
    for stride, x_format, w_format in product((1, 2), formats, formats):
        call = make_call(*shapes, dtype=dtype, stride=stride)
        # .contiguous() leaves an ambiguous tensor's strides alone; a fresh one gets the format's own.
        x = torch.empty_like(call.input, memory_format=x_format).copy_(call.input)
        w = torch.empty_like(call.weight, memory_format=w_format).copy_(call.weight)
        mixed = Call(x, w, call.bias, call.kwargs)
        for grad_format in formats:
            theirs = _strides(mixed, THEIRS, grad_format)
            with forced_plans(*plan):
                assert _strides(mixed, OURS, grad_format) == theirs, (stride, x_format, w_format, grad_format)


# The last has unequal padding at its ends and a single channel, where a narrowed result is still contiguous.
OWNERS = [
    *(a_call(rank, name) for rank in (1, 2, 3) for name in ("shuffle", "flip")),
    make_call((1, 2, 8, 8), (2, 1, 3, 3), padding=1, output_padding=(1, 0), dilation=2),
]


@pytest.mark.parametrize("call", OWNERS, ids=range(len(OWNERS)))
@pytest.mark.parametrize("plan", PLANS, ids="-".join)
def test_the_output_owns_its_memory_and_may_be_changed_in_place(call: Call, plan: tuple[str, str]) -> None:
    """A view of a larger buffer would keep that buffer alive as long as the output lives."""
    results = []
    for functions in (OURS, THEIRS):
        tensors = leaves(call)
        with forced_plans(*plan):
            out = run(functions, call, *tensors)
        assert not out._is_view() and out.untyped_storage().nbytes() == out.numel() * out.itemsize
        out.add_(1).mul_(3)
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in tensors)])
    assert not differences(*results, 1e-5)


@pytest.mark.parametrize("plan", PLANS, ids="-".join)
def test_deterministic_fill_reaches_no_result(plan: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With uninitialised memory filled with NaN, an element that no plan wrote would show."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # type: ignore[attr-defined]
    odd = make_call((2, 3, 4, 4), (3, 2, 2, 2), stride=5, output_padding=4)
    dilated = make_call((2, 3, 4, 4), (3, 2, 3, 3), stride=2, output_padding=2, dilation=3)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        with forced_plans(*plan):
            for call in (*OWNERS, odd, dilated):
                grad = seeded(call.run(THEIRS))
                found = call.gradients(OURS, grad)
                assert not differences(found, call.gradients(THEIRS, grad), 1e-5)
                assert all(t.isfinite().all() for t in found)
    finally:
        torch.use_deterministic_algorithms(False)


def test_repeated_calls_give_the_same_bits(engine: str) -> None:
    call = a_call(2, engine)
    first, *others = (call.gradients(OURS, seeded(call.run(THEIRS))) for _ in range(4))
    for other in others:
        assert not differences(other, first, 0)
        assert all(map(torch.equal, other, first))


# --- counts of operations --------------------------------------------------------------------------------------------


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
@settings(max_examples=200 if EVERY else 60)
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
