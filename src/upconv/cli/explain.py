"""``upconv explain``."""

from __future__ import annotations

import torch
import typer
from typer import Option

from upconv import planner
from upconv.bench import roofline
from upconv.bench.run import ways
from upconv.bench.suites import parse_layer, parse_shape
from upconv.cli.arguments import DEVICE, DTYPES, MODEL, PRECISION, Dtype, console, device_of, network, stop
from upconv.cuda.gpu import by_name
from upconv.explain import estimated_ceilings, explanation, model_explanation, precision_text
from upconv.model_layers import Call, calls
from upconv.problem import Layout, Pass, Precision

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
        if layer is not None and len(input) != 1:
            raise ValueError(f"--input must be given once for a layer; got {' '.join(input)!r}")
        named = None if gpu is None else by_name(gpu)
        where = torch.device("cuda") if named else device_of(device)
        if layer is not None:
            found = [Call("", parse_layer(layer, input[0]).with_(dtype=DTYPES[dtype], layout=layout), 1)]
        else:
            shapes = [parse_shape(text) for text in input]
            found = calls(lambda: network(str(model)), shapes, DTYPES[dtype], layout)
        planned, lines = planner.Device("cuda", gpu=named) if named else planner.device_of(where), []
        for call in found:
            p = call.problem
            kinds = [precision] if precision is not None and p.dtype is DTYPES[dtype] else []
            (way,) = ways(where, [p.dtype], kinds, [p.layout], [pass_])
            p = p.with_(**way._asdict())
            lines.append((call._replace(problem=p), planner.plan(p, planned)))
    except ValueError as error:
        stop(error)
    asked = [call.problem for call, _ in lines]
    precisions = list(dict.fromkeys(p.precision for p in asked))
    rates = estimated_ceilings(named) if named else roofline.measure(precisions, where, seconds=0.1)
    if layer is not None:
        console().print(explanation(asked[0], lines[0][1], rates))
    else:
        words = [f"{model} on {', '.join(input)}", *dict.fromkeys(map(precision_text, asked)), pass_]
        console().print(model_explanation(" · ".join(words), lines, rates))
