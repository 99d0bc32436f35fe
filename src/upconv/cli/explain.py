"""``upconv explain``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import typer
from typer import Option

from upconv.cli.arguments import (
    DEVICE,
    DTYPE,
    LAYOUT,
    PRECISION,
    console,
    device_of,
    dtypes,
    network,
    one,
    precisions,
    stop,
)

if TYPE_CHECKING:
    import torch

    from upconv import planner
    from upconv.bench.roofline import Ceilings
    from upconv.cuda.gpu import Gpu
    from upconv.explain import Explanation, ModelExplanation
    from upconv.problem import Layout, Pass, Precision, Problem

HELP = """Say what upconv does with a layer: sizes, phases and taps, the roof, the plan and why no other.

The layer is given in torch.nn.ConvTranspose2d's argument order and names; its rank is the input's. With --model there
is a line for each transposed convolution of a model.

Examples:

  upconv explain "64,64,(3,7)" --input 8x64x512x512

  upconv explain "256,256,4,stride=2,padding=1,groups=256,bias=False" --input 4x256x32x32 --dtype bfloat16

  upconv explain "64,64,(3,7)" --input 8x64x512x1024 --gpu H100

  upconv explain --model net.py:Generator --input 8x3x512x512 --gpu "RTX 4090"
"""
_LAYER = typer.Argument(None, metavar="LAYER", help='Like "64,64,(3,7),stride=2,padding=1,bias=False".')
_INPUT = "The input: batch, channels, 1 to 3 sizes; for each argument of a model."
_MODEL = "A module, or what makes one when called, in place of LAYER."
_GPU = "Plan for a GPU that need not be there: H200, A100 40GB, L4, RTX 4090, ..."
_CEILINGS = "Copy and matmul rates for the roof, like 37e9,190e9; default: measured, with --gpu estimated."


class _Asked(NamedTuple):
    """What the options say of the pass and of where it is to run."""

    dtype: torch.dtype
    precision: str | None
    layout: Layout
    pass_: Pass
    device: torch.device
    planned: planner.Device
    named: Gpu | None
    """The GPU of ``--gpu``."""
    ceilings: str | None

    def rates(self, kinds: Sequence[Precision]) -> Ceilings:
        """The roof's rates: given, estimated for a GPU that need not be there, else measured."""
        from upconv.bench.roofline import measure
        from upconv.explain import estimated_ceilings, parse_ceilings

        if self.ceilings is not None:
            return parse_ceilings(self.ceilings, kinds)
        return estimated_ceilings(self.named) if self.named else measure(kinds, self.device, seconds=0.1)

    def of(self, p: Problem, dtype: torch.dtype, layout: Layout) -> Problem:
        """A forward as the options have it: the pass, and the precision where the dtype is that of the options."""
        from upconv.bench.run import ways

        given = self.precision is not None and dtype is self.dtype
        kinds = [one("--precision", str(self.precision), precisions())] if given else []
        (way,) = ways(self.device, [dtype], kinds, [layout], [self.pass_])
        return p.with_(**way._asdict())


def command(
    layer: str | None = _LAYER,
    input: list[str] = Option(..., "--input", metavar="NxCxHxW", help=_INPUT),
    model: str | None = Option(None, "--model", metavar="FILE.py:NAME", help=_MODEL),
    device: str | None = DEVICE,
    dtype: str = DTYPE,
    layout: str = LAYOUT,
    pass_: str = Option("fwd", "--pass", metavar="PASS", help="fwd, grad-input, grad-weight, step."),
    precision: str | None = PRECISION,
    gpu: str | None = Option(None, "--gpu", metavar="NAME", help=_GPU),
    ceilings: str | None = Option(None, "--ceilings", metavar="B/S,FLOP/S", help=_CEILINGS),
) -> None:
    from upconv.problem import LAYOUTS, PASSES

    try:
        kind = dtypes()[one("--dtype", dtype, list(dtypes()))]
        order, wanted = one("--layout", layout, LAYOUTS), one("--pass", pass_, PASSES)
        asked = _Asked(kind, precision, order, wanted, *_target(gpu, device), ceilings)
        if (layer is None) == (model is None):
            raise ValueError(f"explain takes either LAYER or --model; got {layer!r} and {model!r}")
        found = _of_model(model, input, asked) if model is not None else _of_layer(layer or "", input, asked)
    except ValueError as error:
        stop(error)
    console().print(found)


def _target(gpu: str | None, device: str | None) -> tuple[torch.device, planner.Device, Gpu | None]:
    """Where plans are made for, and the GPU of ``--gpu``."""
    import torch

    from upconv import planner
    from upconv.cuda.gpu import by_name

    if gpu is None:
        found = device_of(device)
        return found, planner.device_of(found), None
    if device is not None:
        raise ValueError(f"--gpu and --device exclude each other; got {gpu!r} and {device!r}")
    named = by_name(gpu)
    return torch.device("cuda"), planner.Device("cuda", gpu=named), named


def _of_layer(layer: str, inputs: Sequence[str], asked: _Asked) -> Explanation:
    from upconv import planner
    from upconv.bench.suites import parse_layer
    from upconv.explain import Explanation

    if len(inputs) != 1:
        raise ValueError(f"--input must be given once for a layer; got {' '.join(inputs)!r}")
    problem = asked.of(parse_layer(layer, inputs[0]), asked.dtype, asked.layout)
    return Explanation(problem, planner.plan(problem, asked.planned), asked.rates([problem.precision]))


def _of_model(model: str, inputs: Sequence[str], asked: _Asked) -> ModelExplanation:
    from upconv import planner
    from upconv.bench.suites import parse_shape
    from upconv.explain import ModelExplanation, precision_text
    from upconv.model_layers import calls

    shapes = [parse_shape(text) for text in inputs]
    found = calls(lambda: network(model), shapes, asked.dtype, asked.layout)
    of_all = [call._replace(problem=asked.of(p := call.problem, p.dtype, p.layout)) for call in found]
    lines = [(call, planner.plan(call.problem, asked.planned)) for call in of_all]
    rates = asked.rates(list(dict.fromkeys(call.problem.precision for call in of_all)))
    kinds = dict.fromkeys(precision_text(call.problem) for call in of_all)
    title = " · ".join([f"{model} on {', '.join(inputs)}", *kinds, asked.pass_])
    return ModelExplanation(title, lines, rates)
