"""``upconv export``."""

from __future__ import annotations

from typing import Annotated

import typer

from upconv.cli.arguments import stop

HELP = """Write one layer as a self-contained Python file: ModelNew with its CUDA kernels inline.

The file imports torch and the standard library alone, and serves every batch and spatial size.

Examples:

  upconv export --kernelbench 57 -o model_57.py --check

  upconv export --layer "64,64,(3,7),stride=2,bias=False" --input 8x64x512x512 -o layer.py
"""


def command(
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE.py", help="The file to write.")],
    number: Annotated[
        int | None,
        typer.Option(
            "--kernelbench", metavar="NUMBER", help="A transposed convolution of KernelBench level 1, like 57."
        ),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option("--layer", metavar="LAYER", help='Like "64,64,(3,7),stride=2,padding=1,bias=False".'),
    ] = None,
    input: Annotated[
        str | None,
        typer.Option("--input", metavar="NxCxHxW", help="The input to plan for; others run as well."),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="Of --layer: float32, bfloat16, float16, float64.")
    ] = "float32",
    precision: Annotated[
        str | None,
        typer.Option("--precision", metavar="KIND", help="Of --layer in float32: tf32, ieee; default tf32."),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch", metavar="ARCH", help="80, 86, 89, 90a, 100a, 120; default this machine's GPU, else 90a."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compile the file, compare it with PyTorch and time both.")
    ] = False,
) -> None:
    from upconv.bench.files import writable
    from upconv.export import command as exports

    try:
        path = writable("--output", output, (".py",))
        made = exports.make(number, layer, input, dtype, precision, arch)
        if check:
            exports.need_gpu()
    except ValueError as error:
        stop(error)
    made.write(path)
    print(f"{path}: {made.summary}")
    if check:
        try:
            found = made.check()
        except RuntimeError as error:
            stop(error, 1)
        print(found.text)
        if not found.passed:
            raise typer.Exit(1)
