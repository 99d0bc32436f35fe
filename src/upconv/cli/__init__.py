"""The command ``upconv``: bench, explain, export, env, cache.

Exit codes: 0 all right, 1 a wrong result (or a case that could not run), 2 bad arguments, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import typer

from upconv import __version__
from upconv.cli import bench, explain, export, machine

# Options are named in full: left to guess, some versions of typer take a metavar like DTYPE for the name.
app = typer.Typer(
    name="upconv",
    help="Transposed convolution in PyTorch, as fast as the hardware allows.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="bench", help=bench.HELP)(bench.command)
app.command(name="explain", help=explain.HELP)(explain.command)
app.command(name="export", help=export.HELP)(export.command)
app.command(name="env")(machine.env)
app.add_typer(machine.cache_app, name="cache")


def main() -> None:
    """The entry point; ends the process with the command's exit code."""
    app(prog_name="upconv")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"upconv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it and exit."),
) -> None:
    pass
