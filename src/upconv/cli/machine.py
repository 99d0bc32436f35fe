"""``upconv env`` and ``upconv cache``: what this machine has, and the compiled kernels that are kept on it."""

from __future__ import annotations

import json as json_
from collections.abc import Mapping
from datetime import datetime

import torch
import typer
from rich.console import Console
from rich.text import Text
from typer import Option

from upconv import accelerate, warmup
from upconv import env as environment
from upconv.bench.progress import Progress
from upconv.bench.suites import parse_input
from upconv.bench.tables import si
from upconv.cli.arguments import DEVICE, DTYPES, MODEL, Dtype, console, device_of, network, stop
from upconv.cpu import memory_format
from upconv.cuda.compile import cache as kept
from upconv.problem import Layout


def env(json: bool = Option(False, "--json", help="Print JSON.")) -> None:
    """Print versions, devices, threads, flags and caches; what cannot be found out says why.

    Example: upconv env --json
    """
    found = environment.report()
    if json:
        print(json_.dumps(found, indent=1))
    else:
        print_values(console(), found, 0)


def print_values(screen: Console, values: Mapping[str, object], depth: int) -> None:
    """Names and values, a line each; those of a mapping are indented below its name."""
    for name, value in values.items():
        if isinstance(value, dict):
            screen.print(Text("  " * depth + name, style="" if depth else "bold"))
            print_values(screen, value, depth + 1)
        else:
            shown = "-" if value is None else str(value)
            screen.print(Text.assemble("  " * depth, (f"{name:<{28 - 2 * depth}}", "dim"), f" {shown}"), soft_wrap=True)


# --- cache -----------------------------------------------------------------------------------------------------------

_CACHE_HELP = """Show the compiled CUDA kernels that are kept on disk, remove them, or compile a model's ahead of time.

The directory is UPCONV_CACHE_DIR (an absolute path), else upconv in XDG_CACHE_HOME or ~/.cache. It holds at most
UPCONV_CACHE_BYTES, else 2 GiB. UPCONV_CACHE=off keeps none.

Examples:

  upconv cache

  upconv cache clear --yes

  upconv cache warm --model net.py:Generator --input 8x64x32x32
"""

cache_app = typer.Typer(
    help=_CACHE_HELP, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)


@cache_app.callback()
def cache(context: typer.Context) -> None:
    if context.invoked_subcommand is not None:
        return
    found = kept.contents()
    newest = None if found.newest is None else datetime.fromtimestamp(found.newest).isoformat(" ", "seconds")
    print_values(
        console(),
        {
            "directory": found.folder,
            "in use": f"no: {found.problem}" if found.problem else "yes",
            "kernels": found.entries,
            "size": si(found.bytes, "B"),
            "targets": ", ".join(f"sm_{arch}" for arch in found.archs) or None,
            "newest": newest,
        },
        0,
    )


@cache_app.command()
def clear(yes: bool = Option(False, "--yes", "-y", help="Do not ask.")) -> None:
    """Remove the compiled kernels; they are compiled again when they are needed.

    Example: upconv cache clear --yes
    """
    found = kept.contents()
    if found.folder is None or not found.folder.exists():
        print("there is no cache directory" if found.folder is None else f"{found.folder} does not exist")
        return
    if not yes:
        typer.confirm(f"Remove {found.entries} compiled kernels from {found.folder}?", abort=True)
    try:
        removed = kept.clear()
    except OSError as error:
        stop(f"{found.folder} cannot be cleared: {error.strerror or error}", 1)
    print(f"removed {removed} files from {found.folder}")


@cache_app.command()
def warm(
    model: str = MODEL,
    input: str = Option(..., "--input", metavar="NxCxHxW", help="The model's input: batch, channels, 1 to 3 sizes."),
    device: str | None = DEVICE,
    dtype: Dtype = Option("float32", "--dtype"),
    layout: Layout = Option("nchw", "--layout"),
    training: bool = Option(False, "--training", help="The gradients' kernels too."),
    convolutions: bool = Option(
        False, "--convolutions", help="Plain convolutions' kernels too, as accelerate(convolutions=True)."
    ),
) -> None:
    """Compile and keep every CUDA kernel that a model needs for an input of this shape.

    Example: upconv cache warm --model net.py:Generator --input 8x64x32x32 --dtype bfloat16
    """
    try:
        shape, where = parse_input(input), device_of(device)
        if where.type != "cuda":
            raise ValueError(f"--device must be a CUDA device, since only its kernels are compiled; got {str(where)!r}")
        made = network(model)
    except ValueError as error:
        stop(error)
    order = memory_format(layout, len(shape) - 2)
    accelerate(made.to(where, DTYPES[dtype]), convolutions=convolutions)
    example = torch.randn(shape, device=where, dtype=DTYPES[dtype]).contiguous(memory_format=order)
    try:
        with Progress() as tell:
            compiled = [str(line) for line in warmup(made, example, training=training, progress=tell)]
    except Exception as error:  # whatever the model's forward raises on this input
        stop(f"the model cannot be warmed up on {input}: {type(error).__name__}: {error}", 1)
    for line in compiled:
        print(line)
    print(f"{len(compiled)} kernels are ready")
