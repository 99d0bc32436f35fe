"""The CUDA engine: planned passes on tensors. It allocates, packs weights and launches.

What runs is a kernel family's choice, prepared for a device (`upconv.cuda.families`). Everything between that and
PyTorch is here: the result's memory format, dense operands, the current stream and device, graph capture and errors.
Weights are packed at every call, unless the user has frozen them (`upconv.cuda.weights`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from upconv import cpu, forks
from upconv.cuda import weights
from upconv.cuda.gpu import capturing as _capturing
from upconv.cuda.gpu import current_device as _current_device
from upconv.problem import PASSES, Pass, is_channels_last

if TYPE_CHECKING:
    from upconv.cuda.prepared import PreparedBias
    from upconv.planner import Plan

Convolved = Any
"""A plain convolution: a `upconv.convolutions.Convolution`, whose module imports this one."""

# --- the call --------------------------------------------------------------------------------------------------------


def forward(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, lasting: bool = True) -> Tensor:
    """The output of ``plan.problem``, in its layout, by ``plan.choice`` on the tensors' device and current stream.

    Args:
        plan: a plan with a choice.
        x: ``problem.input_shape``, any strides.
        weight: ``problem.weight_shape``, any strides; float32 for a 16-bit problem too (autocast's), and the bias then.
        bias: ``(out_channels)`` or None.
        lasting: whether memory may be allocated that outlives the call, as a compiled graph's pool does not let it.

    Raises:
        torch.OutOfMemoryError: as for any tensor; the next call is as good as the first.
        RuntimeError: the kernel could not be compiled, loaded or launched; names the problem and the plan.
    """
    index = x.get_device()
    if _collectors and not ready(plan, index):  # who wants to know what is missing, not to compile it
        bias = None if bias is None else bias.to(x.dtype)
        return cpu.forward(plan.problem, "native", x, weight.to(x.dtype), bias)
    runner: Runner = loaded(plan, index)["fwd"]
    return runner(x, weight, bias, lasting)


def convolution(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The plain convolution that is the gradient for the input by a plan.

    Args:
        plan: one whose gradient for the input has a choice.
        x: ``problem.output_shape``, any strides.
        weight: ``problem.weight_shape``, any strides; float32 for a 16-bit problem too, and the bias then.
        bias: ``(in_channels)`` of the problem, which are the result's channels, or None.

    Returns:
        ``problem.input_shape``.

    Raises:
        as `forward`.
    """
    runner: Runner = loaded(plan, x.get_device())["grad-input"]
    if bias is None or runner.biased:  # rounded here: what packs weights counts the channels of the other result
        return runner(x, weight, bias if bias is None else bias.to(x.dtype))
    out = runner(x, weight, None)
    return out.add_(bias.view(-1, *(1,) * plan.problem.rank))


def gradients(
    plan: Plan,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Sequence[bool],
    lasting: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients for input, weight and bias, as far as ``mask`` asks; nothing else is computed, nor compiled.

    Args:
        plan: a plan whose gradients are planned; one without a kernel is PyTorch's own operator.
        grad: the gradient of the output, ``problem.output_shape``, any strides.
        x: ``problem.input_shape``, any strides.
        weight: ``problem.weight_shape``, any strides; float32 for a 16-bit problem too. The gradients for weight and
            bias are in its dtype.
        mask: which gradients are asked for.
        lasting: as for `forward`.

    Raises:
        as `forward`.
    """
    index = grad.get_device()
    if _current_device() != index:
        with torch.cuda.device(index):
            return gradients(plan, grad, x, weight, mask, lasting)
    runners = loaded(plan, index)
    grad_input = grad_weight = grad_bias = None
    by_input: Runner | None = runners["grad-input"] if mask[0] else None
    by_weight: WeightRunner | None = runners["grad-weight"] if mask[1] else None
    if by_input is not None or by_weight is not None:  # once for both
        grad = _dense(grad, runners.format)
    if mask[1] and weights.frozen:
        weights.thaw(weight)  # whoever asks for its gradient is about to change it
    if by_weight is not None:  # first, so that its partial sums are gone when the input's gradient is allocated
        grad_weight = by_weight(x, grad, weight.dtype, lasting)
    if by_input is not None:
        grad_input = by_input(grad, weight, None, lasting)
    rest = (mask[0] and by_input is None, mask[1] and by_weight is None, False)
    if rest[0] or rest[1]:
        found = cpu.gradients(plan.problem, "native", grad, x, weight.to(x.dtype), rest)
        grad_input = found[0] if rest[0] else grad_input
        grad_weight = found[1].to(weight.dtype) if rest[1] and found[1] is not None else grad_weight
    if mask[2]:
        by_bias: PreparedBias | None = runners["bias"]
        if by_bias is None:
            grad_bias = grad.sum((0, *range(2, grad.dim())), dtype=weight.dtype)
        else:
            grad_bias = grad.new_empty_strided((grad.shape[1],), (1,), dtype=weight.dtype)
            try:
                by_bias.run(_dense(grad, runners.format), grad_bias, lasting and not _capturing())
            except RuntimeError as error:
                raise failure(plan, index, error, None) from error
    return grad_input, grad_weight, grad_bias


def _dense(t: Tensor, layout: torch.memory_format) -> Tensor:
    """The tensor as kernels read it: without PyTorch's negative bit, dense in a layout."""
    if t.is_contiguous(memory_format=layout) and not t.is_neg():
        return t
    return t.resolve_neg().contiguous(memory_format=layout)


class _Runner:
    """A choice for a pass on one device, with all that stays from call to call."""

    def __init__(self, plan: Plan, index: int, pass_: Pass) -> None:
        p, choice = plan.problem, plan.selection(pass_).choice
        assert choice is not None
        self.plan, self.index, self.pass_ = plan, index, pass_
        self.shape = {"fwd": p.output_shape, "grad-input": p.input_shape}.get(pass_, p.weight_shape)
        self.format = cpu.memory_format(p.layout, p.rank)
        self.strides = cpu.dense_strides(self.shape, self.format)
        try:
            with torch.cuda.device(index):
                self.prepared: Any = choice.prepare(index)
        except RuntimeError as error:
            raise failure(plan, index, error, pass_) from error
        self.casts = self.prepared.casts


class WeightRunner(_Runner):
    """A choice for the gradient for the weight."""

    def __init__(self, plan: Plan, index: int, pass_: Pass) -> None:
        super().__init__(plan, index, pass_)
        p = plan.problem
        # An input of one channel, or of one pixel, can be dense in channels_last and yet not read as such. Then PyTorch
        # turns the output's gradient to NCHW, and the gradient for the weight follows it, whatever the weight's format.
        doubtful = p.layout == "channels_last" and (p.in_channels == 1 or max(p.size) == 1)
        self.otherwise = cpu.dense_strides(p.weight_shape, torch.contiguous_format) if doubtful else None

    def __call__(self, x: Tensor, grad: Tensor, dtype: torch.dtype, lasting: bool = True) -> Tensor:
        """The gradient for the weight, in its ``dtype`` and the problem's layout.

        ``grad`` (the output's) is dense, and the current device is this one's.
        """
        if x.is_neg() or not x.is_contiguous(memory_format=self.format):
            x = _dense(x, self.format)
        strides = self.strides
        if self.otherwise is not None and not is_channels_last(x.shape, x.stride()):
            strides = self.otherwise
        if dtype is x.dtype or not self.casts:
            out = x.new_empty_strided(self.shape, strides)
        else:
            out = x.new_empty_strided(self.shape, strides, dtype=dtype)
        try:
            self.prepared.run(x, grad, out, lasting and not _capturing())
        except RuntimeError as error:
            raise failure(self.plan, self.index, error, self.pass_) from error
        return out if out.dtype is dtype else out.to(dtype)


class Runner(_Runner):
    """A choice for the forward or the gradient for the input."""

    def __init__(self, plan: Plan, index: int, pass_: Pass) -> None:
        super().__init__(plan, index, pass_)
        p = plan.problem
        self.biased = self.prepared.biased
        self.packing = weights.number((pass_, self.prepared.packing, p.dtype, p.weight_shape))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, lasting: bool = True) -> Tensor:
        if _current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(x, weight, bias, lasting)
        if x.is_neg() or not x.is_contiguous(memory_format=self.format):
            x = _dense(x, self.format)
        if bias is not None and (bias.is_neg() or not bias.is_contiguous()):
            bias = bias.resolve_neg().contiguous()
        try:
            out = x.new_empty_strided(self.shape, self.strides)  # 0.5 us less than torch.empty_strided
            self._launch(x, weight, bias, out, lasting)
        except RuntimeError as error:
            raise failure(self.plan, self.index, error, self.pass_) from error
        return out

    def kept(self, entry: weights.Frozen, weight: Tensor, makes: bool) -> Tensor | None:
        """`weights.kept`; without ``makes`` what was packed before. Not where a graph is captured."""
        if not self.casts and weight.dtype is not self.plan.problem.dtype:
            return None
        return weights.kept(entry, weight, self.packing, self.index, self.prepared.pack if makes else None)

    def _launch(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, lasting: bool) -> None:
        """Packs the weight, or takes a frozen one's copy, and runs the kernel."""
        capturing = _capturing()
        entry = weights.held(weight) if weights.frozen and not capturing else None
        packed = None if entry is None else self.kept(entry, weight, lasting)
        if packed is weight:  # which the kernel reads as it is
            packed = None
        if weight.dtype is not x.dtype:
            if not self.casts:
                weight = weight.to(x.dtype)
            if bias is not None and bias.dtype is not x.dtype and (packed is not None or not self.casts):
                bias = bias.to(x.dtype)  # else it is rounded together with the weight
        if packed is None:
            # Drivers before CUDA 12.3 capture no dependents.
            if weight.is_neg():  # 0.2 us less than resolve_neg
                weight = weight.resolve_neg()
            self.prepared.run(x, weight, bias, out, not capturing, lasting and not capturing)
        else:
            self.prepared.run(x, packed, bias, out, False, lasting and not capturing)


def failure(plan: Plan, index: int, error: RuntimeError, pass_: Pass | None = "fwd") -> RuntimeError:
    """An exception that names a pass and its plan; out of memory stays PyTorch's own exception.

    ``pass_``: None for the gradient for the bias.
    """
    kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else RuntimeError
    if pass_ is None:
        where = f"the gradient for the bias of {plan.problem} on cuda:{index}"
        return kind(f"upconv could not compute {where}: {error}")
    selected = plan.selection(pass_)
    assert selected.choice is not None
    where = f"{plan.device.kind}:{selected.name} on cuda:{index} ({selected.choice.summary})"
    return kind(f"upconv could not compute {plan.problem.with_(pass_=pass_)} by {where}: {error}")


# --- loading and compiling -------------------------------------------------------------------------------------------


class Loaded(dict[str, Any]):
    """A plan's kernels on one device: of a pass its `Runner` or `WeightRunner`, of ``bias`` a `PreparedBias`.

    Each is loaded when it is first asked for. None is PyTorch's operator, which small sums are left to.
    """

    def __init__(self, plan: Plan, index: int) -> None:
        super().__init__()
        self.plan, self.index = plan, index
        self.format = cpu.memory_format(plan.problem.layout, plan.problem.rank)

    def __missing__(self, name: str) -> Any:
        with _preparing.now:
            if name not in self:  # no other thread was faster
                self[name] = self._found(name)
            return self[name]

    def _found(self, name: Any) -> Any:
        if name == "bias":
            from upconv.cuda import bias, prepared

            p, gpu = self.plan.problem, self.plan.device.gpu
            return prepared.PreparedBias(bias.Choice(p, gpu), self.index) if gpu and bias.serves(p) else None
        if self.plan.selection(name).choice is None:
            return None
        kind = WeightRunner if name == "grad-weight" else Runner
        return kind(self.plan, self.index, name)


@lru_cache(maxsize=4096)
def loaded(plan: Plan, index: int) -> Loaded:
    """What is loaded of a plan on the device of an index; of the plans used last."""
    return Loaded(plan, index)


_preparing = forks.Lock(threading.RLock)

_local = threading.local()
_collectors: set[int] = set()
"""The threads within `collecting`; looked at by every call."""
forks.in_child(lambda: _collectors.intersection_update({threading.get_ident()}))


def warming() -> bool:
    """Whether this thread is within ``collecting(every=True)``."""
    return bool(_collectors) and getattr(_local, "wanted", None) is not None and bool(_local.every)


class Wanted(NamedTuple):
    """A plan on a device, and which of its passes calls need."""

    plan: Plan
    device: int
    passes: tuple[Pass, ...]
    sums: Plan | None
    """By which the gradient for the bias is taken; None where it is not needed."""


def ready(plan: Plan, index: int, of: Convolved | None = None, biased: bool = True) -> bool:
    """Whether a forward's kernel may run: outside `collecting`, or loaded already; else the call is noted there.

    ``of``: the plain convolution that the plan is for, whose forward is ``grad-input``.
    """
    wanted: list[Wanted] | None = getattr(_local, "wanted", None)
    if wanted is None:
        return True
    ready = is_loaded(plan, index, "fwd" if of is None else "grad-input")
    if _local.every or not ready:
        ours: dict[Pass, bool] = {"fwd": True} if of is None else {"grad-input": of.for_output}
        if _local.every:
            more = (True, True, True) if of is None else (of.for_input, of.for_output, of.for_weight)
            ours.update(zip(PASSES, more))
        sums = (plan if of is None else of.sums) if _local.every and biased else None
        wanted.append(Wanted(plan, index, tuple(name for name, own in ours.items() if own), sums))
    return ready


@contextmanager
def collecting(every: bool = False) -> Iterator[list[Wanted]]:
    """Within it, calls of this thread whose kernels are not loaded run PyTorch's operator and are noted.

    ``every``: for gradients that will be asked for, whose passes are noted too; also of calls whose forward is loaded.
    """
    before = getattr(_local, "wanted", None), getattr(_local, "every", False)
    _local.wanted, _local.every = [], every
    _collectors.add(threading.get_ident())
    try:
        yield _local.wanted
    finally:
        _local.wanted, _local.every = before
        if before[0] is None:
            _collectors.discard(threading.get_ident())


def is_loaded(plan: Plan, index: int, pass_: Pass) -> bool:
    """Whether a pass's kernels are."""
    asked = loaded(plan, index)
    return pass_ in asked and (asked[pass_] is None or asked[pass_].prepared.loaded)
