"""The operation for torch: which calls are ours, the lean eager path, and autograd.

A call takes one of three ways.

- *Ours, eagerly*: plain strided tensors of a floating dtype on the CPU or one CUDA device. The call is recognised
  (`upconv.replay.calls`) or its plan looked up by its description, the engine is called directly, and gradients go
  through one ``autograd.Function``. No dispatcher is involved: registering an operator costs 5 to 12 us a call, a
  Function 2.
- *Ours, compiled*: ``torch.compile`` traces an operator, and a rule says whose kernel its graph calls
  (`upconv.compiler`).
- *PyTorch's own operator*: whatever the engines do not serve (complex and integer dtypes, empty tensors, other devices,
  tensor subclasses), whatever PyTorch has rules for and we do not (functorch transforms, forward-mode AD, tracing,
  export, dispatch modes), and every invalid call, so that the error is PyTorch's to the letter.

`strict` makes the third way an error where an engine could have been expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from upconv import cpu, planner
from upconv.cuda import engine
from upconv.planner import Plan
from upconv.problem import PRECISIONS, Layout, Pass, Precision, Problem, is_channels_last
from upconv.replay import calls, replays

_TORCH: tuple[Any, ...] = (None, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_PLAIN = (Tensor, Parameter)
_DEVICES = ("cpu", "cuda")  # those that have an engine
_ROUNDING = ("cuda",)  # whose engine takes autocast's float32 weights as they are
IntOrInts = int | Sequence[int]


def conv_transpose(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntOrInts,
    padding: IntOrInts,
    output_padding: IntOrInts,
    groups: int,
    dilation: IntOrInts,
) -> Tensor:
    """A transposed convolution of ``rank`` spatial dimensions, by the best way that this call allows."""
    if is_compiling():
        from upconv import compiler

        return compiler.traced(rank, input, weight, bias, stride, padding, output_padding, groups, dilation)
    host = replays.host
    if host is not None and not engine._collectors:
        replayed: Tensor | None = host.replay(
            False, input, weight, bias, rank, stride, padding, output_padding, groups, dilation
        )
        if replayed is not None:
            return replayed
    known = calls.recognised(
        calls.seen, rank, input, weight, bias, stride, padding, output_padding, groups, dilation
    )  # fmt: skip
    if known is not None:
        recorded = known.differentiable and torch.is_grad_enabled()
        if recorded and replays.hoped:
            arguments = rank, stride, padding, output_padding, groups, dilation
            _offer(known.plan, (input, weight, bias), arguments)
        if known.autocast is not None:
            input = input.to(known.autocast)
        if recorded:
            found: Tensor = _apply(input, weight, bias, known.plan)
            return found
        return engine.forward(known.plan, input, weight, bias)
    plan, given, rounded = None, (input, weight, bias), False
    plain = type(input) in _PLAIN and type(weight) in _PLAIN and (bias is None or type(bias) in _PLAIN)
    # Asking a device for its type costs three times as much.
    kind = ("cuda" if input.is_cuda else "cpu" if input.is_cpu else "") if plain else ""
    if kind and (input.is_nested or weight.is_nested or (bias is not None and bias.is_nested)):
        kind = ""  # plain by its type, but without a shape
    if kind and not _observed():
        if torch.is_autocast_enabled(kind):
            input, weight, bias = _autocast(input, weight, bias, kind in _ROUNDING)
            rounded = weight.dtype is torch.float32 and input.dtype.itemsize == 2
        plan = _find_plan(rank, input, weight, bias, stride, padding, output_padding, groups, dilation, rounded)
    if plan is None or (plan.choice is None and (plan.delegates or (_strict and plan.forward == "native"))):
        out: Tensor = _TORCH[rank](input, weight, bias, stride, padding, output_padding, groups, dilation)
        if _strict:
            _refuse(out, plan, input, weight, bias, stride, padding, output_padding, groups, dilation)
        return out
    own = weight is given[1] and bias is given[2]  # not autocast's copies
    batched = input.dim() == rank + 2
    again = own and batched and plan.choice is not None and not _doubtful(plan.problem, "cuda")
    if again:
        calls.remember(plan, *given, input.dtype, rank, stride, padding, output_padding, groups, dilation)
    x = input if batched else input.unsqueeze(0)
    differentiable = input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if differentiable and torch.is_grad_enabled():
        if again and replays.hoped:
            _offer(plan, given, (rank, stride, padding, output_padding, groups, dilation))
        out = _apply(_unwrap(x), _unwrap(weight), bias if bias is None else _unwrap(bias), plan)
    else:
        out = _forward(plan, x, weight, bias)
    return out if batched else out.squeeze(0)


def _forward(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, lasting: bool = True) -> Tensor:
    """The forward by the plan; ``lasting``: as for `engine.forward`."""
    if plan.choice is not None:
        return engine.forward(plan, x, weight, bias, lasting)
    return cpu.forward(plan.problem, plan.forward, x, weight, bias)


_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def _observed() -> bool:
    """Whether PyTorch itself must see the call: a transform, dual numbers, a trace or a dispatch mode is active."""
    return (
        _transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or (torch._C._len_torch_function_stack() > 0 and _function_mode_active())
    )


def _function_mode_active() -> bool:
    """Whether a ``__torch_function__`` mode wants to see calls; a default device is such a mode and does not."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


# --- strict ----------------------------------------------------------------------------------------------------------

_strict = False


class strict:
    """Makes calls that no engine of upconv's serves an error, instead of leaving them to PyTorch's own operator.

        upconv.strict(True)        # from here on, in all threads
        with upconv.strict(True):  # or for a while
            model(x)

    On a GPU that holds for the forward and for each gradient when it is computed. On a CPU many layers are PyTorch's by
    choice, since its kernel is the fastest for them; they are errors too, but gradients there, always its operator in
    the end, are none. Exempt are calls that PyTorch must see for what it does around them (``torch.func`` transforms,
    forward-mode derivatives, tracing, export, dispatch modes), calls on tensors without data (``meta``, fake), and
    empty results. An invalid call raises PyTorch's own error, and a graph compiled
    under it raises when it runs.

    Raises:
        RuntimeError: (the calls) names the problem and the reason.
    """

    def __init__(self, enabled: bool = True) -> None:
        global _strict
        self._before = _strict
        _strict = bool(enabled)

    def __enter__(self) -> strict:
        return self

    def __exit__(self, *_: object) -> None:
        global _strict
        _strict = self._before


def _refuse(out: Tensor, plan: Plan | None, input: Tensor, weight: Tensor, bias: Tensor | None, *args: object) -> None:
    """Raises for a valid call that was left to PyTorch, unless it is exempt; ``out`` is what PyTorch returned."""
    from torch._subclasses.fake_tensor import FakeTensor

    if plan is not None:
        reason, call = plan.candidates[0].reason, str(plan.problem)
    elif _observed() or isinstance(out, FakeTensor) or out.device.type == "meta" or not out.numel():
        return
    else:
        names = ("stride", "padding", "output_padding", "groups", "dilation")
        given = ", ".join(f"{name}={value}" for name, value in zip(names, args))
        call = f"input {tuple(input.shape)} {input.dtype}, weight {tuple(weight.shape)}, {given} on {input.device}"
        reason = unserved(input, weight, bias)
    raise RuntimeError(f"upconv.strict: no engine of upconv's serves {call}: {reason}")


def unserved(input: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Why no engine serves a call for which there is no plan, in a sentence."""
    kinds = {type(t) for t in (input, weight, bias) if t is not None}.difference(_PLAIN)
    if kinds:
        return f"the engines take plain tensors, and one is a {sorted(kind.__name__ for kind in kinds)[0]}"
    if input.device.type not in _DEVICES:
        return f"upconv has no engine for {input.device.type} devices"
    if input.dtype not in PRECISIONS:
        return f"the engines compute in float32, bfloat16, float16 and float64, and the input is {input.dtype}"
    if weight.dim() == 3 and _reads_as_image(weight.shape, weight.stride()):
        return "PyTorch takes the strides of this 1-D weight for channels_last"
    if input.dim() == 3 and _reads_as_image(input.shape, input.stride(), copied=True):
        return "PyTorch takes the strides of this 1-D input for channels_last"
    return "the engines take integers and tuples of them as arguments"


def _refuse_gradients(plan: Plan, mask: Sequence[bool]) -> None:
    """Raises where a gradient that is asked for would be PyTorch's own operator."""
    passes: tuple[Pass, Pass] = ("grad-input", "grad-weight")
    for name, asked in zip(passes, mask):
        selected = plan.selection(name)
        if asked and selected.choice is None:
            what = f"the gradient for the {name.removeprefix('grad-')} of {plan.problem}"
            raise RuntimeError(f"upconv.strict: no engine of upconv's serves {what}: {selected.candidates[0].reason}")


# --- which plan ------------------------------------------------------------------------------------------------------


def _find_plan(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntOrInts,
    padding: IntOrInts,
    output_padding: IntOrInts,
    groups: int,
    dilation: IntOrInts,
    rounded: bool = False,
) -> Plan | None:
    """The plan for a call, or None when PyTorch's own operator must judge it (and raise what is wrong with it).

    ``rounded``: weight and bias are float32, which the engine rounds to the input's dtype.
    """
    dtype, cuda, index = input.dtype, input.is_cuda, input.get_device()
    of_weight = torch.float32 if rounded else dtype
    if (
        dtype not in PRECISIONS
        or weight.dtype is not of_weight
        or not (cuda or input.is_cpu)
        or not (weight.is_cuda if cuda else weight.is_cpu)
        or weight.get_device() != index
        or input.layout is not torch.strided
        or weight.layout is not torch.strided
    ):
        return None
    if bias is not None and (
        bias.dtype is not of_weight
        or bias.get_device() != index
        or not (bias.is_cuda if cuda else bias.is_cpu)
        or bias.layout is not torch.strided
    ):
        return None
    where: planner.Device | int
    if cuda:  # by its index: hashing a description would cost more than the rest of the look-up
        where, precision = index, calls.float32_precision() if dtype is torch.float32 else None
    else:
        where, precision = planner.cpu_device(), None
    try:
        stride = stride if type(stride) is tuple else _tuple(stride)
        padding = padding if type(padding) is tuple else _tuple(padding)
        output_padding = output_padding if type(output_padding) is tuple else _tuple(output_padding)
        dilation = dilation if type(dilation) is tuple else _tuple(dilation)
        if not integers(groups, *stride, *padding, *output_padding, *dilation):
            return None
        plan = _resolve(
            rank, input.shape, input.stride(), weight.shape, weight.stride(), None if bias is None else bias.shape,
            stride, padding, output_padding, groups, dilation, dtype, precision, where,
        )  # fmt: skip
    except TypeError:  # something that is no integer: PyTorch says which
        return None
    if plan is None or plan.problem.layout == "nchw":
        return plan
    if _doubtful(plan.problem, "cuda" if cuda else "cpu"):
        x = input if input.dim() == rank + 2 else input.unsqueeze(0)
        if not _keeps_channels_last(plan.problem, x, weight.to(x.dtype)):
            return planner.plan(plan.problem.with_(layout="nchw"), plan.device)
    return plan


def _doubtful(p: Problem, device: str) -> bool:
    """Whether PyTorch may return a contiguous result although an operand is channels_last.

    Its backends without oneDNN or cuDNN do. On CUDA those are taken without cuDNN, and where ``output_padding`` reaches
    the stride (which only a dilation allows).
    """
    if device == "cpu":
        return p.rank == 3
    return not torch._C._get_cudnn_enabled() or any(op >= s for op, s in zip(p.output_padding, p.stride))


def _keeps_channels_last(p: Problem, input: Tensor, weight: Tensor) -> bool:
    """Whether the backend that PyTorch chooses returns its result in channels_last."""
    backend = torch._C._select_conv_backend(
        input, weight, None, p.stride, p.padding, p.dilation, True, p.output_padding, p.groups, None
    )
    found = torch._C._conv_determine_backend_memory_format(input, weight, backend)
    return bool(found is cpu.memory_format("channels_last", p.rank))


def forget_plans() -> None:
    """Drops what is remembered of calls: each finds its plan anew."""
    calls.seen.clear()
    replays.forget()
    _resolve.cache_clear()


@lru_cache(maxsize=4096)
def _resolve(
    rank: int,
    shape: torch.Size,
    strides: tuple[int, ...],
    weight_shape: torch.Size,
    weight_strides: tuple[int, ...],
    bias_shape: torch.Size | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: Any,
    dilation: Any,
    dtype: torch.dtype,
    precision: Precision | None,
    where: planner.Device | int,
) -> Plan | None:
    if len(shape) == rank + 1:
        shape, strides = torch.Size((1, *shape)), (shape[0] * strides[0], *strides)
    if len(shape) != rank + 2 or len(weight_shape) != rank + 2 or shape[1] != weight_shape[0]:
        return None
    if 0 in shape or 0 in weight_shape:
        return None
    if rank == 1 and (_reads_as_image(weight_shape, weight_strides) or _reads_as_image(shape, strides, copied=True)):
        return None
    out_channels = weight_shape[1] * groups
    if bias_shape is not None and tuple(bias_shape) != (out_channels,):
        return None
    device = where if isinstance(where, planner.Device) else planner.cuda_device(where)
    last = is_channels_last(shape, strides) or is_channels_last(weight_shape, weight_strides)
    if device.kind == "cuda" and dtype is torch.float64:
        last = False
    try:
        problem = Problem.make(
            shape[0], shape[1], out_channels, shape[2:], weight_shape[2:], stride, padding, output_padding, dilation,
            groups, bias=bias_shape is not None, dtype=dtype, precision=precision,
            layout="channels_last" if last else "nchw",
        )  # fmt: skip
    except ValueError:
        return None
    return planner.plan(problem, device)


def _tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if type(value) is int else tuple(value)


def integers(*values: Any) -> bool:
    """Whether all are integers. The caches of plans take True and 1.0 for 1, PyTorch does not."""
    return _INTEGERS.issuperset(map(type, values))


_INTEGERS = frozenset((int,))


def _reads_as_image(shape: Sequence[int], strides: Sequence[int], copied: bool = False) -> bool:
    """Whether PyTorch takes a 1-D layer's operand for channels_last, and returns strides that no engine of ours makes.

    It computes 1-D layers as 2-D ones of height 1. ``copied``: the input is made contiguous before.
    """
    step = 1
    for n, s in zip(reversed(shape), reversed(strides)):
        if copied and n != 1 and s != step:
            return False
        step *= n
    return is_channels_last((*shape[:2], 1, shape[2]), (*strides[:2], shape[2] * strides[2], strides[2]))


def layout_of(input: Tensor, weight: Tensor) -> Layout:
    """The layout of the result: channels_last when either operand is, as PyTorch chooses, but for float64 on CUDA.

    Source for CUDA: ``cudnn_conv_suggest_memory_format`` in ``ATen/native/ConvUtils.h``.
    """
    if input.dtype is torch.float64 and input.device.type == "cuda":
        return "nchw"
    for t in (input, weight):
        if is_channels_last(t.shape, t.stride()):
            return "channels_last"
    return "nchw"


def _autocast(
    input: Tensor, weight: Tensor, bias: Tensor | None, rounding: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands in autocast's dtype: every floating tensor of the device but float64, as PyTorch casts them.

    ``rounding``: float32 weights and biases stay, for an engine that rounds them where it reads them. That spares a
    training step each cast and its derivative; and the gradients for weight and bias come in float32, by tensor cores
    without a rounding to 16 bits (but where they are differentiated again, or batched).
    """
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor) -> Tensor:
        eligible = t.device.type == kind and t.is_floating_point() and t.dtype is not torch.float64
        return t.to(dtype) if eligible else t

    single = weight.dtype is torch.float32 and (bias is None or bias.dtype is torch.float32)
    if rounding and single and dtype.itemsize == 2 and (cast_input := cast(input)).dtype is dtype:
        return cast_input, weight, bias
    return cast(input), cast(weight), None if bias is None else cast(bias)


# --- autograd --------------------------------------------------------------------------------------------------------


#
# Without its bias a transposed convolution F(x, w) is bilinear, and so are the gradients I(g, w) for the input and
# W(x, g) for the weight. The three are each other's derivatives: each is linear in both operands, and <g, F(x, w)> =
# <x, I(g, w)> = <w, W(x, g)>. So with a gradient arriving at the result, e at F's, y at I's, v at W's,
#
#     F(x, w):  I(e, w) for x,  W(x, e) for w
#     I(g, w):  F(y, w) for g,  W(y, g) for w
#     W(x, g):  I(g, v) for x,  F(x, v) for g
#
# and every derivative of any order is a forward or a gradient of the same layer, by the same plan.

Gradients = replays.Gradients


def _uncast(backward: Callable[[Any, Tensor], tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """A Function's backward as PyTorch's own are: outside autocast, and nothing for a gradient that is undefined."""

    @wraps(backward)
    def wrapped(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        with _uncasting(grad):
            return backward(ctx, grad)

    return wrapped


def _uncasting(grad: Tensor) -> AbstractContextManager[object]:
    """Within it autocast is off, as in a backward of PyTorch's own."""
    kind = "cuda" if grad.is_cuda else "cpu"
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


_NOTHING = nullcontext()


def _asked(ctx: Any) -> tuple[bool, ...]:
    """Which of a Function's operands (its first arguments) the running backward wants gradients of.

    ``needs_input_grad`` knows only who requires a gradient: under ``autograd.grad(out, x)`` that may be more, and a
    gradient of PyTorch's own is not computed then either.
    """
    needed: tuple[bool, ...] = ctx.needs_input_grad[:3]
    if sum(needed) == 1:  # then it is the one that this backward is for
        return needed
    wanted = [node is not None and _wants(node) for node, _ in ctx.next_functions]
    return (*wanted, False) if len(wanted) == 2 else tuple(wanted)  # without a bias


def _wants(node: Any) -> bool:
    try:
        return _will_execute(node)
    except RuntimeError:  # a leaf whose gradient ``autograd.grad`` returns; or a backward that the engine does not run
        return True


# A private function, which PyTorch's own hooks on several tensors use.
_will_execute: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", lambda node: True)
_is_batched: Callable[[Tensor], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda t: False)


def _observed_backward(*tensors: Tensor) -> bool:
    """Whether PyTorch must see how gradients are taken: under ``vmap`` (a transform, or ``autograd.grad``'s
    ``is_grads_batched``), or under a dispatch mode that the forward was not, such as a counter of FLOPs.
    """
    return _transforms_active() or torch._C._len_torch_dispatch_stack() > 0 or any(map(_is_batched, tensors))


class _ConvTranspose(torch.autograd.Function):
    """F(x, w) and a bias. Under autocast w and the bias are float32 where the engine rounds them (`_autocast`), and so
    are their gradients.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return _forward(plan, input, weight, bias)

    @staticmethod
    @_uncast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        return (*_backward_of(ctx.plan, grad, input, weight, _asked(ctx)), None)


def _backward_of(plan: Plan, grad: Tensor, input: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
    """The gradients that ``mask`` asks for, recorded where gradients are."""
    if not torch.is_grad_enabled() or _observed_backward(grad, input, weight):
        return _gradients(plan, grad, input, weight, mask)
    rounded = weight.to(input.dtype)
    return (
        _GradInput.apply(grad, rounded, input, plan) if mask[0] else None,
        _GradWeight.apply(input, grad, rounded, plan).to(weight.dtype) if mask[1] else None,
        grad.sum((0, *range(2, grad.dim())), dtype=weight.dtype) if mask[2] else None,
    )


class _Passes:
    """A transposed convolution's, to be replayed (`upconv.replay.replays`)."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.result = plan, plan.problem.output_shape

    def loaded(self, index: int) -> bool:
        return index in engine.loaded(self.plan).runners

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return engine.forward(self.plan, x, weight, bias)

    def gradients(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        return engine.gradients(self.plan, grad, x, weight, mask)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        with _uncasting(grad):
            return _backward_of(self.plan, grad, x, weight, mask)


def _offer(plan: Plan, given: tuple[Tensor, Tensor, Tensor | None], arguments: tuple[Any, ...]) -> None:
    """Has a training call recorded that is made again."""
    if plan.backward == planner.FAMILIES:
        replays.offer(plan, _Passes, False, *given, arguments)


# What ``Function.apply`` comes to where no functorch transform is active (`conv_transpose` knows that none is), without
# its look-ups before: 7 us of 17 on a CPU.
_apply = super(torch.autograd.Function, _ConvTranspose).apply
_unwrap: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


class _GradInput(torch.autograd.Function):
    """I(g, w). PyTorch's operator asks for an ``input`` besides, whose values are not read."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, weight: Tensor, input: Tensor, plan: Plan) -> Tensor | None:
        ctx.save_for_backward(grad, weight)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return _gradients(plan, grad, weight=weight, input=input, mask=(True, False, False))[0]

    @staticmethod
    @_uncast
    def backward(ctx: Any, y: Tensor) -> tuple[Tensor | None, ...]:
        grad, weight = ctx.saved_tensors
        mask = _asked(ctx)
        return (
            _unbiased(ctx.plan, y, weight) if mask[0] else None,
            _for_weight(ctx.plan, y, grad, weight) if mask[1] else None,
            None,
            None,
        )


class _GradWeight(torch.autograd.Function):
    """W(x, g). PyTorch's operator asks for a ``weight`` besides, whose values are not read."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, grad: Tensor, weight: Tensor, plan: Plan) -> Tensor | None:
        ctx.save_for_backward(input, grad)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return _gradients(plan, grad, weight=weight, input=input, mask=(False, True, False))[1]

    @staticmethod
    @_uncast
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        input, grad = ctx.saved_tensors
        mask = _asked(ctx)
        return (
            _for_input(ctx.plan, grad, v, input) if mask[0] else None,
            _unbiased(ctx.plan, input, v) if mask[1] else None,
            None,
            None,
        )


def _unbiased(plan: Plan, x: Tensor, weight: Tensor) -> Tensor | None:
    """F(x, w), differentiable where gradients are recorded."""
    if _observed_backward(x, weight):
        p = plan.problem
        return torch.convolution(x, weight, None, p.stride, p.padding, p.dilation, True, p.output_padding, p.groups)
    bare = planner.plan(plan.problem.with_(bias=False), plan.device) if plan.problem.bias else plan
    if torch.is_grad_enabled():
        return _ConvTranspose.apply(x, weight, None, bare)
    return _forward(bare, x, weight, None)


def _for_input(plan: Plan, grad: Tensor, weight: Tensor, input: Tensor) -> Tensor | None:
    """I(g, w), differentiable where gradients are recorded."""
    if torch.is_grad_enabled() and not _observed_backward(grad, weight):
        return _GradInput.apply(grad, weight, input, plan)
    return _gradients(plan, grad, input, weight, (True, False, False))[0]


def _for_weight(plan: Plan, input: Tensor, grad: Tensor, weight: Tensor) -> Tensor | None:
    """W(x, g), differentiable where gradients are recorded."""
    if torch.is_grad_enabled() and not _observed_backward(input, grad):
        return _GradWeight.apply(input, grad, weight, plan)
    return _gradients(plan, grad, input, weight, (False, True, False))[1]


def _gradients(
    plan: Plan,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    mask: Sequence[bool],
    lasting: bool = True,
) -> Gradients:
    """The gradients for input, weight and bias that ``mask`` asks for; ``lasting``: as for `_forward`."""
    if _observed_backward(grad, input, weight):  # PyTorch's operator has rules for it
        found = cpu.gradients(plan.problem, "native", grad, input, weight.to(input.dtype), mask)
        for_weight, for_bias = (None if g is None else g.to(weight.dtype) for g in found[1:])
        return found[0], for_weight, for_bias
    if plan.backward == planner.FAMILIES:
        if _strict:
            _refuse_gradients(plan, mask)
        return engine.gradients(plan, grad, input, weight, mask, lasting)
    return cpu.gradients(plan.problem, plan.backward, grad, input, weight, mask)
