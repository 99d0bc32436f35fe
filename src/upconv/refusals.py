"""`strict`: calls that no engine serves as errors, and the sentences that say why none does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from upconv import dispatch
from upconv.planner import Plan
from upconv.problem import PRECISIONS, Pass

active = False
"""Whether `strict` is in force."""


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
        global active
        self._before = active
        active = bool(enabled)

    def __enter__(self) -> strict:
        return self

    def __exit__(self, *_: object) -> None:
        global active
        active = self._before


def refuse(out: Tensor, plan: Plan | None, input: Tensor, weight: Tensor, bias: Tensor | None, *args: object) -> None:
    """Raises for a valid call that was left to PyTorch, unless it is exempt; ``out`` is what PyTorch returned."""
    from torch._subclasses.fake_tensor import FakeTensor

    if plan is not None:
        reason, call = plan.candidates[0].reason, str(plan.problem)
    elif dispatch.observed() or isinstance(out, FakeTensor) or out.device.type == "meta" or not out.numel():
        return
    else:
        names = ("stride", "padding", "output_padding", "groups", "dilation")
        given = ", ".join(f"{name}={value}" for name, value in zip(names, args))
        call = f"input {tuple(input.shape)} {input.dtype}, weight {tuple(weight.shape)}, {given} on {input.device}"
        reason = unserved(input, weight, bias)
    raise RuntimeError(f"upconv.strict: no engine of upconv's serves {call}: {reason}")


def unserved(input: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Why no engine serves a call for which there is no plan, in a sentence."""
    kinds = {type(t) for t in (input, weight, bias) if t is not None}.difference(dispatch.PLAIN)
    if kinds:
        return f"the engines take plain tensors, and one is a {sorted(kind.__name__ for kind in kinds)[0]}"
    if input.device.type not in dispatch.DEVICES:
        return f"upconv has no engine for {input.device.type} devices"
    if input.dtype not in PRECISIONS:
        return f"the engines compute in float32, bfloat16, float16 and float64, and the input is {input.dtype}"
    if weight.dim() == 3 and dispatch.reads_as_image(weight.shape, weight.stride()):
        return "PyTorch takes the strides of this 1-D weight for channels_last"
    if input.dim() == 3 and dispatch.reads_as_image(input.shape, input.stride(), copied=True):
        return "PyTorch takes the strides of this 1-D input for channels_last"
    return "the engines take integers and tuples of them as arguments"


def refuse_gradients(plan: Plan, mask: Sequence[bool]) -> None:
    """Raises where a gradient that is asked for would be PyTorch's own operator."""
    passes: tuple[Pass, Pass] = ("grad-input", "grad-weight")
    for name, asked in zip(passes, mask):
        selected = plan.selection(name)
        if asked and selected.choice is None:
            what = f"the gradient for the {name.removeprefix('grad-')} of {plan.problem}"
            raise RuntimeError(f"upconv.strict: no engine of upconv's serves {what}: {selected.candidates[0].reason}")
