"""``upconv bench``: its options. What they do is in `upconv.cli.measuring`."""

from __future__ import annotations

from typing import Annotated

import typer

from upconv.cli.arguments import Device, stop

HELP = """Measure upconv against PyTorch: interleaved, fresh inputs, medians, every row checked in float64.

A speed-up is PyTorch's time over upconv's. A row that the plan leaves to PyTorch's own operator is shown as
[bold]torch[/] and counts as 1. A wrong result has no speed and makes the exit code 1. Ctrl-C prints and writes what was
measured by then, and makes the exit code 130.

Examples:

  upconv bench

  upconv bench --suite models --dtype all --layout all --json models.json --plot models.png

  upconv bench --layer "64,64,(3,7),stride=2,padding=1" --input 8x64x128x128 --pass step

  upconv bench --suite cuda --frozen --json frozen.json

  upconv bench --suite training --json training.json

  upconv bench --suite kernelbench --as-exported --models models --pass step --json exported.json

  upconv bench --from models.json --plot models.svg
"""

_Names = list[str] | None
_Suite = Annotated[
    _Names,
    typer.Option(
        "--suite",
        metavar="NAME",
        help="founding, kernelbench, models, cuda (both), field, convolutions, cpu, custom, training; repeated; "
        "default: cpu, founding.",
    ),
]
_Case = Annotated[_Names, typer.Option("--case", metavar="NAME", help="Only this case; may be repeated.")]
_Layer = Annotated[
    str | None,
    typer.Option("--layer", metavar="ARGS", help="A layer of your own, in torch.nn.ConvTranspose2d's arguments."),
]
_Input = Annotated[
    str | None,
    typer.Option("--input", metavar="NxCxHxW", help="Its input: batch, channels, 1 to 3 sizes; measured as given."),
]
_Dtype = Annotated[
    _Names,
    typer.Option("--dtype", metavar="DTYPE", help="float32 (default), bfloat16, float16, float64; repeated, or all."),
]
_Precision = Annotated[
    _Names,
    typer.Option(
        "--precision", metavar="KIND", help="tf32, ieee, bf16, fp16, fp64; float32 default: ieee, on CUDA tf32."
    ),
]
_Layout = Annotated[
    _Names, typer.Option("--layout", metavar="LAYOUT", help="nchw (default), channels_last; repeated, or all.")
]
_Pass = Annotated[
    _Names,
    typer.Option("--pass", metavar="PASS", help="fwd (default), grad-input, grad-weight, step; repeated, or all."),
]
_Bias = Annotated[bool | None, typer.Option("--bias/--no-bias", help="Override what the suite says.")]
_Quick = Annotated[
    bool | None, typer.Option("--quick/--full", help="Scaled-down sizes and fewer rounds; the default on a CPU.")
]
_Inputs = Annotated[
    str, typer.Option("--inputs", metavar="KIND", help="normal, or rand: KernelBench's inputs and torch.nn's weights.")
]
_Memory = Annotated[bool, typer.Option("--memory", help="Also measure peak memory beside inputs and results.")]
_Frozen = Annotated[
    bool, typer.Option("--frozen", help="Also time forwards with upconv.freeze, which keeps packed weights.")
]
_Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compiled/--eager",
        help="Suite training: also under torch.compile, in both layouts, steps and inference; the default on a GPU.",
    ),
]
_Host = Annotated[bool, typer.Option("--host", help="Measure instead what a call of a tiny layer costs the host.")]
_Shapes = Annotated[
    bool, typer.Option("--shapes", help="Measure instead the first calls of a layer on ten new input sizes.")
]
_AsExported = Annotated[
    bool,
    typer.Option("--as-exported", help="Judge the files of suite kernelbench by its rules; --pass step: gradients."),
]
_Models = Annotated[
    str, typer.Option("--models", metavar="DIR", help="Where --as-exported finds model_57.py and its like.")
]
_Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")]
_Plot = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="Draw speed-ups and a roofline, .png or .svg.")
]
_From = Annotated[
    str | None, typer.Option("--from", metavar="FILE", help="Measure nothing: show this JSON report again.")
]


def command(
    context: typer.Context,
    suite: _Suite = None,
    case: _Case = None,
    layer: _Layer = None,
    input: _Input = None,
    device: Device = None,
    dtype: _Dtype = None,
    precision: _Precision = None,
    layout: _Layout = None,
    pass_: _Pass = None,
    bias: _Bias = None,
    quick: _Quick = None,
    inputs: _Inputs = "normal",
    memory: _Memory = False,
    frozen: _Frozen = False,
    compiled: _Compiled = None,
    host: _Host = False,
    shapes: _Shapes = False,
    as_exported: _AsExported = False,
    models: _Models = "models",
    json: _Json = None,
    plot: _Plot = None,
    from_: _From = None,
) -> None:
    from upconv.cli.measuring import Options, run

    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
    try:
        code = run(Options(**context.params, given=given))
    except ValueError as error:
        stop(error)
    if code:
        raise typer.Exit(code)
