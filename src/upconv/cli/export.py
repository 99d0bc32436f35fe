"""``upconv export``."""

from __future__ import annotations

import typer
from typer import Option

from upconv.cli.arguments import Dtype, stop, writable
from upconv.export import command as exports
from upconv.problem import Precision

HELP = """Write one layer as a self-contained Python file: ModelNew with its CUDA kernels inline.

The file imports torch and the standard library alone, and serves every batch and spatial size.

Examples:

  upconv export --kernelbench 57 -o model_57.py --check

  upconv export --layer "64,64,(3,7),stride=2,bias=False" --input 8x64x512x512 -o layer.py

  upconv export --layer "64,32,4,stride=2,padding=1" --input 8x64x64x64 --c -o layer.cu
"""
_ARCH = "80, 86, 89, 90a, 100a, 120; default this machine's GPU, else 90a."


def command(
    output: str = Option(..., "--output", "-o", metavar="FILE", help="The file to write, .py, or with --c .cu."),
    number: int | None = Option(
        None, "--kernelbench", metavar="NUMBER", help="A transposed convolution of KernelBench level 1, like 57."
    ),
    layer: str | None = Option(
        None, "--layer", metavar="LAYER", help='Like "64,64,(3,7),stride=2,padding=1,bias=False".'
    ),
    input: str | None = Option(None, "--input", metavar="NxCxHxW", help="The input to plan for; others run as well."),
    dtype: Dtype = Option("float32", "--dtype", help="Of --layer."),
    precision: Precision | None = Option(None, "--precision", help="Of --layer in float32: tf32, ieee; default tf32."),
    arch: str | None = Option(None, "--arch", metavar="ARCH", help=_ARCH),
    forward_only: bool = Option(False, "--forward-only", help="Inference alone, without gradients."),
    c: bool = Option(False, "--c", help="Write the kernels as FILE.cu, with a C header and a JSON table of launches."),
    check: bool = Option(False, "--check", help="Compile the file, compare it with PyTorch and time both."),
) -> None:
    try:
        path = writable("--output", output, (".cu",) if c else (".py",))
        if c and check:
            raise ValueError("--check must go without --c: it loads files of Python")
        made = exports.make(number, layer, input, dtype, precision, arch, forward_only, c)
        if check:
            exports.need_gpu()
        made.write(path)
    except ValueError as error:
        stop(error)
    print(f"{path}: {made.summary}")
    if check:
        try:
            found = made.check()
        except RuntimeError as error:
            stop(error, 1)
        print(found.text)
        if found.found.failure is not None:
            raise typer.Exit(1)
