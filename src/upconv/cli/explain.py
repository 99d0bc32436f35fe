"""``upconv explain``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import typer
from rich.console import Group
from typer import Option

from upconv import planner
from upconv.bench import roofline
from upconv.bench.roofline import Ceilings
from upconv.bench.run import ways
from upconv.bench.suites import parse_layer, parse_shape
from upconv.cli.arguments import DEVICE, DTYPES, MODEL, PRECISION, Dtype, console, device_of, network, stop
from upconv.cuda.gpu import Gpu, by_name
from upconv.explain import estimated_ceilings, explanation, model_explanation, precision_text
from upconv.model_layers import calls
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
_GPU = "Plan for a GPU that need not be there: H200, A100 40GB, L4, RTX 4090, ..."


class _Asked(NamedTuple):
    """What the options say of the pass and of where it is to run."""

    dtype: torch.dtype
    precision: Sequence[Precision]
    layout: Layout
    pass_: Pass
    device: torch.device
    planned: planner.Device
    named: Gpu | None
    """The GPU of ``--gpu``."""

    def rates(self, kinds: Sequence[Precision]) -> Ceilings:
        """The roof's rates: estimated for a GPU that need not be there, else measured."""
        return estimated_ceilings(self.named) if self.named else roofline.measure(kinds, self.device, seconds=0.1)

    def of(self, p: Problem) -> Problem:
        """A forward as the options have it: the pass, and the precision where the dtype is that of the options."""
        kinds = self.precision if p.dtype is self.dtype else ()
        (way,) = ways(self.device, [p.dtype], kinds, [p.layout], [self.pass_])
        return p.with_(**way._asdict())


def command(
    layer: str | None = _LAYER,
    input: list[str] = Option(..., "--input", metavar="NxCxHxW", help=_INPUT),
    model: str | None = MODEL,
    device: str | None = DEVICE,
    dtype: Dtype = Option("float32", "--dtype"),
    layout: Layout = Option("nchw", "--layout"),
    pass_: Pass = Option("fwd", "--pass"),
    precision: Precision | None = PRECISION,
    gpu: str | None = Option(None, "--gpu", metavar="NAME", help=_GPU),
) -> None:
    try:
        if gpu is not None and device is not None:
            raise ValueError(f"--gpu and --device exclude each other; got {gpu!r} and {device!r}")
        if (layer is None) == (model is None):
            raise ValueError(f"explain takes either LAYER or --model; got {layer!r} and {model!r}")
        named = None if gpu is None else by_name(gpu)
        where = torch.device("cuda") if named else device_of(device)
        planned = planner.Device("cuda", gpu=named) if named else planner.device_of(where)
        kinds = [] if precision is None else [precision]
        asked = _Asked(DTYPES[dtype], kinds, layout, pass_, where, planned, named)
        found = _of_layer(layer, input, asked) if layer is not None else _of_model(str(model), input, asked)
    except ValueError as error:
        stop(error)
    console().print(found)


def _of_layer(layer: str, inputs: Sequence[str], asked: _Asked) -> Group:
    if len(inputs) != 1:
        raise ValueError(f"--input must be given once for a layer; got {' '.join(inputs)!r}")
    problem = asked.of(parse_layer(layer, inputs[0]).with_(dtype=asked.dtype, layout=asked.layout))
    return explanation(problem, planner.plan(problem, asked.planned), asked.rates([problem.precision]))


def _of_model(model: str, inputs: Sequence[str], asked: _Asked) -> Group:
    shapes = [parse_shape(text) for text in inputs]
    found = calls(lambda: network(model), shapes, asked.dtype, asked.layout)
    of_all = [call._replace(problem=asked.of(call.problem)) for call in found]
    lines = [(call, planner.plan(call.problem, asked.planned)) for call in of_all]
    rates = asked.rates(list(dict.fromkeys(call.problem.precision for call in of_all)))
    kinds = dict.fromkeys(precision_text(call.problem) for call in of_all)
    title = " · ".join([f"{model} on {', '.join(inputs)}", *kinds, asked.pass_])
    return model_explanation(title, lines, rates)
