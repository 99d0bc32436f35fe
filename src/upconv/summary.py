"""`summary`: whose operator computes each convolution of a model, and why, for an example."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from upconv import convert, convolutions, dispatch, modules, planner, refusals
from upconv.cuda import engine
from upconv.model_layers import described, output_padding
from upconv.problem import short

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

PYTORCH = "PyTorch"
"""What a row says of a pass that is PyTorch's own operator."""


@dataclass(frozen=True)
class Row:
    """A layer's calls that are alike."""

    name: str
    layer: str
    """Its class and settings, like ``ConvTranspose2d 64->32 k4 s2 p1``."""
    input: str
    """The shape, like ``8x64x32x32``; empty for a layer that the model did not call."""
    device: str
    forward: str
    """`PYTORCH`, or ``upconv`` and the kernel's name."""
    grad_input: str
    grad_weight: str
    why: str
    """Why the forward is computed so, in a sentence."""
    calls: int = 1

    @property
    def ours(self) -> bool:
        """Whether the forward is upconv's."""
        return self.forward != PYTORCH


class Summary:
    """What `summary` returns: ``rows``, and as text or for a rich console a table with a closing line.

    ``scripted``: whether the model has modules of TorchScript, of which there are no rows.
    """

    def __init__(self, rows: Sequence[Row], scripted: bool = False) -> None:
        self.rows = tuple(rows)
        self.scripted = scripted

    @property
    def closing(self) -> str:
        """How many calls PyTorch's operator computes on which device and why, how many upconv; by device."""
        called = [row for row in self.rows if row.input]
        if called:
            lines = [_closing(device, called) for device in dict.fromkeys(row.device for row in called)]
        elif self.rows:
            lines = ["No call of its convolutions was seen on this example; calls of forward alone are not seen."]
        else:
            lines = ["The model has no transposed convolution module to list; calls of functions are not listed."]
        if self.scripted:
            lines.append("Its scripted modules are PyTorch's.")
        return " ".join(lines)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        # As wide as it takes: nothing is cut or broken where the text is piped or searched.
        Console(file=text, width=4096, color_system=None, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        if self.rows:
            yield _table(self.rows)
        yield Text(self.closing)


def _closing(device: str, called: Sequence[Row]) -> str:
    here = [row for row in called if row.device == device]
    total = sum(row.calls for row in here)
    theirs = Counter[str]()
    for row in here:
        if not row.ours:
            theirs[row.why] += row.calls
    on, left = "a CPU" if device == "cpu" else device, theirs.total()
    reasons = [f"{count} since {why}" if len(theirs) > 1 else f"since {why}" for why, count in theirs.most_common()]
    because = f" ({'; '.join(reasons)})" if reasons else ""
    line = f"On {on} PyTorch's own operator computes {left} of {total} calls{because}, upconv {total - left}."
    if device == "cpu":
        return f"{line} Gradients on a CPU are by PyTorch's operator; the bias's may be summed apart."
    counts = [sum(row.calls for row in here if getattr(row, name) != PYTORCH) for name in ("grad_input", "grad_weight")]
    return f"{line} Of the gradients for the input {counts[0]} of {total} are upconv's, for the weight {counts[1]}."


def _table(rows: Sequence[Row]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("name", "layer", "input", "forward", "gradient for input", "for weight", "why"):
        table.add_column(head, overflow="fold")
    for row in rows:
        times = f" ({row.calls} times)" if row.calls > 1 else ""
        whose = (
            Text(text, style="dim" if text == PYTORCH else "green")
            for text in (row.forward, row.grad_input, row.grad_weight)
        )
        table.add_row(Text(row.name), Text(row.layer), Text(row.input + times), *whose, Text(row.why))
    return table


def summary(model: nn.Module, *example: Any) -> Summary:
    """Whose operator computes each convolution of a model for an example, pass by pass, and why.

        print(upconv.summary(model, (8, 3, 256, 256)))

    The model runs once on the example, in eval mode and without gradients. Afterwards its buffers' values, its modes
    and the state of the random generators are as before. Kernels that are not loaded are not compiled; PyTorch's
    operator stands in. Autocast and precision settings count as they are now.

    Args:
        model: any module, accelerated or not; its transposed convolutions are listed, and plain ones if some are
            accelerated. Scripted modules are PyTorch's and are not listed. A model with such or lazy layers is run as a
            copy. Of a compiled model the rows tell what runs outside of its graphs.
        example: the model's arguments, tensors or shapes, as for `upconv.warmup`.

    Returns:
        A `Summary`, which is a table for ``print``, and for a `rich.console.Console`.

    Raises:
        TypeError: the model is no module.
        Whatever the model raises on the example.
    """
    modules.require(model, "summary")
    scripted = any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
    copied = scripted or any(isinstance(m, LazyModuleMixin) for m in model.modules())
    model = copy.deepcopy(model) if copied else model
    listed: list[tuple[str, Any]] = [
        (" = ".join(names), module)
        for names, module in convert.modules_of(model, _ConvNd)
        if module.transposed or modules.is_ours(module)
    ]
    with torch.random.fork_rng(convert.devices_of(model)):
        args, kwargs = convert.arguments(model, example)
        # The forward has copies of the buffers.
        spare = {} if copied else {name: t.detach().clone() for name, t in model.named_buffers()}
        with convert.evaluated(model), torch.no_grad(), engine.collecting():
            run = (
                partial(functional_call, model, spare, tuple(args), kwargs)
                if spare
                else partial(model, *args, **kwargs)
            )
            calls = described(listed, _row, run)
    rows = []
    for name, module in listed:
        rows += [replace(row, name=name, calls=count) for row, count in calls[name].items()]
        if not calls[name]:
            rows.append(Row(name, _layer(module), "", "", "", "", "", "no call of it was seen on this example"))
    return Summary(rows, scripted)


# --- a call ----------------------------------------------------------------------------------------------------------

_Whose = tuple[str, str, str, str]  # the forward, both gradients, and why


def _row(module: Any, given: Sequence[Any]) -> Row:
    """What describes a call, but for the module's name."""
    x = given[0]
    if not isinstance(x, Tensor) or x.is_nested:
        shown = "nested" if isinstance(x, Tensor) else type(x).__name__
        why = "nested tensors are PyTorch's" if shown == "nested" else f"the input is a {shown}, not a tensor"
        where = str((x if isinstance(x, Tensor) else module.weight).device)
        return Row("", _layer(module), shown, where, PYTORCH, PYTORCH, PYTORCH, why)
    reason = modules.passed_over(module)
    if reason is None and dispatch.observed():
        reason = "PyTorch must see the call: a transform, a trace or a mode is active"
    if reason is not None:
        whose: _Whose = PYTORCH, PYTORCH, PYTORCH, reason
    else:
        whose = _transposed(module, given) if module.transposed else _plain(module, x)
    device = str(x.device) + (f" ({torch.cuda.get_device_name(x.device)})" if x.is_cuda else "")
    return Row("", _layer(module), "x".join(map(str, x.shape)), device, *whose)


def _transposed(module: Any, given: Sequence[Any]) -> _Whose:
    x, weight, bias, kind, plan = given[0], module.weight, module.bias, given[0].device.type, None
    if all(t is None or type(t) in dispatch.PLAIN for t in (x, weight, bias)):
        if kind in dispatch.DEVICES and torch.is_autocast_enabled(kind):
            x, weight, bias = dispatch.autocast(x, weight, bias)
        plan = dispatch.find_plan(
            len(module.kernel_size), x, weight, bias, module.stride, module.padding, output_padding(module, given),
            module.groups, module.dilation,
        )  # fmt: skip
    if plan is None:
        return PYTORCH, PYTORCH, PYTORCH, refusals.unserved(x, weight, bias)
    names = plan.forward, plan.grad_input.name, plan.grad_weight.name
    forward, *gradients = (PYTORCH if name == "native" else f"upconv ({name})" for name in names)
    return forward, gradients[0], gradients[1], plan.candidates[0].reason


def _plain(module: Any, x: Tensor) -> _Whose:
    weight, bias = module.weight, module.bias
    reason = convert.plain_refusal(module, planner.device_of(x.device))
    numbers = modules.settings(module, weight)
    if reason is None and (numbers is None or not convolutions.eager(x)):
        reason = "upconv serves plain tensors and paddings that are the same on both sides"
    if reason is None and numbers is not None:
        if convolutions.small(x.shape, weight.shape, numbers[0]):
            reason = "the call is too short to be worth a kernel of its own"
        else:
            return _estimated(len(module.kernel_size), x, weight, bias, numbers)
    return PYTORCH, PYTORCH, PYTORCH, str(reason)


def _estimated(rank: int, x: Tensor, weight: Tensor, bias: Tensor | None, numbers: tuple[Any, Any, Any]) -> _Whose:
    """Of a plain convolution, whose passes are upconv's where they are expected to be faster."""
    once = convolutions.find(rank, x, weight, bias, *numbers, False)
    trained = convolutions.find(rank, x, weight, bias, *numbers, True)
    asked = once and once.for_output, trained and trained.for_input, trained and trained.for_weight
    forward, *gradients = ("upconv" if ours else PYTORCH for ours in asked)
    why = "expected to be faster than cuDNN" if asked[0] else "cuDNN is expected to be as fast"
    return forward, gradients[0], gradients[1], why


def _layer(module: Any) -> str:
    """A module's class and settings, in a line."""

    def text(value: Any) -> str:
        return short(value if isinstance(value, (tuple, list)) else (value,))

    parts = [type(module).__name__, f"{module.in_channels}->{module.out_channels}"]
    named = (("k", module.kernel_size), ("s", module.stride), ("p", module.padding))
    parts += [f"{letter}{text(value)}" for letter, value in named]
    usual = (("op", module.output_padding, "0"), ("d", module.dilation, "1"), ("g", module.groups, "1"))
    parts += [f"{letter}{text(value)}" for letter, value, default in usual if text(value) != default]
    return " ".join(parts)
