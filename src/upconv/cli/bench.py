"""``upconv bench``: its options. What they do is in `upconv.cli.measuring`."""

from __future__ import annotations

import typer
from typer import Option

from upconv.cli.arguments import DEVICE, PRECISION, stop

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
_SUITES = (
    "founding, kernelbench, models, cuda (both), field, convolutions, cpu, custom, training; repeated; "
    "default: cpu, founding."
)
_COMPILED = "Suite training: also under torch.compile, in both layouts, steps and inference; the default on a GPU."
_JUDGE = "Judge the files of suite kernelbench by its rules; --pass step: gradients."
Names = list[str] | None


def command(
    context: typer.Context,
    suite: Names = Option(None, "--suite", metavar="NAME", help=_SUITES),
    case: Names = Option(None, "--case", metavar="NAME", help="Only this case; may be repeated."),
    layer: str | None = Option(
        None, "--layer", metavar="ARGS", help="A layer of your own, as torch.nn.ConvTranspose2d's."
    ),
    input: str | None = Option(None, "--input", metavar="NxCxHxW", help="Its input: batch, channels, 1 to 3 sizes."),
    device: str | None = DEVICE,
    dtype: Names = Option(
        None, "--dtype", metavar="DTYPE", help="float32 (default), bfloat16, float16, float64; repeated, or all."
    ),
    precision: Names = PRECISION,
    layout: Names = Option(None, "--layout", metavar="LAYOUT", help="nchw (default), channels_last; repeated, or all."),
    pass_: Names = Option(
        None, "--pass", metavar="PASS", help="fwd (default), grad-input, grad-weight, step; repeated, or all."
    ),
    bias: bool | None = Option(None, "--bias/--no-bias", help="Override what the suite says."),
    quick: bool | None = Option(
        None, "--quick/--full", help="Scaled-down sizes and fewer rounds; the default on a CPU."
    ),
    inputs: str = Option(
        "normal", "--inputs", metavar="KIND", help="normal, or rand: KernelBench's inputs, torch.nn's weights."
    ),
    memory: bool = Option(False, "--memory", help="Also measure peak memory beside inputs and results."),
    frozen: bool = Option(False, "--frozen", help="Also time forwards with upconv.freeze, which keeps packed weights."),
    compiled: bool | None = Option(None, "--compiled/--eager", help=_COMPILED),
    host: bool = Option(False, "--host", help="Measure instead what a call of a tiny layer costs the host."),
    shapes: bool = Option(False, "--shapes", help="Measure instead the first calls of a layer on ten new input sizes."),
    as_exported: bool = Option(False, "--as-exported", help=_JUDGE),
    models: str = Option(
        "models", "--models", metavar="DIR", help="Where --as-exported finds model_57.py and its like."
    ),
    json: str | None = Option(None, "--json", metavar="FILE", help="Write the report as JSON."),
    plot: str | None = Option(
        None, "--plot", metavar="FILE", help="Draw shares of the roof and speed-ups, .png or .svg."
    ),
    from_: str | None = Option(None, "--from", metavar="FILE", help="Measure nothing: show this JSON report again."),
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
