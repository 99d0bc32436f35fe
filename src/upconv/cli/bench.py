"""``upconv bench``: reads what was asked for, measures it, shows and writes the report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import torch
import typer
from typer import Option

from upconv.bench import exported, models, plots, report, tables, training
from upconv.bench import run as layers
from upconv.bench.progress import Progress
from upconv.bench.report import Report
from upconv.bench.suites import SUITES, Case, choose, parse_layer
from upconv.bench.timing import FULL, QUICK, SWEEP
from upconv.cli.arguments import DEVICE, DTYPES, console, device_of, repeated, several, stop, writable
from upconv.problem import LAYOUTS, PASSES, Precision

WRONG, INTERRUPTED = 1, 130
"""Exit codes: a row has no speed, and Ctrl-C."""

HELP = """Measure upconv against PyTorch: interleaved, fresh inputs, medians, every row checked in float64.

A ratio is PyTorch's time over upconv's.
A row that the plan leaves to PyTorch's own operator is shown as [bold]torch[/] and counts as 1.
A wrong result has no speed and makes the exit code 1.
Ctrl-C prints and writes what was measured by then, and makes the exit code 130.

Examples:

  upconv bench

  upconv bench --suite models --dtype all --layout all --json models.json --plot models.png

  upconv bench --layer "64,64,(3,7),stride=2,padding=1" --input 8x64x128x128 --pass step

  upconv bench --suite cuda --frozen --json frozen.json

  upconv bench --suite training --json training.json

  upconv bench --suite kernelbench --as-exported --json exported.json

  upconv bench --from models.json --plot models.svg
"""
_PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_SUITE = "Layers: default cpu, on CUDA founding. training: whole models."
_COMPILED = "Suite training: also under torch.compile, in both layouts, steps and inference; the default on a GPU."
_EXPORTED = "Suite kernelbench: measure models/model_57.py and its like by KernelBench's rules."


def command(
    context: typer.Context,
    suite: list[str] = repeated("--suite", (*SUITES, "training"), _SUITE),
    case: list[str] = Option([], "--case", metavar="NAME", help="Only this case; may be repeated."),
    layer: str | None = Option(
        None, "--layer", metavar="ARGS", help="A layer of your own, as torch.nn.ConvTranspose2d's."
    ),
    input: str | None = Option(None, "--input", metavar="NxCxHxW", help="Its input: batch, channels, 1 to 3 sizes."),
    device: str | None = DEVICE,
    dtype: list[str] = repeated("--dtype", (*DTYPES, "all"), "Default float32."),
    precision: list[str] = repeated("--precision", _PRECISIONS, "Default of float32: ieee, on CUDA tf32."),
    layout: list[str] = repeated("--layout", (*LAYOUTS, "all"), "Default nchw."),
    pass_: list[str] = repeated("--pass", (*PASSES, "all"), "Default fwd."),
    bias: bool | None = Option(None, "--bias/--no-bias", help="Override what the suite says."),
    quick: bool | None = Option(
        None, "--quick/--full", help="Scaled-down sizes and fewer rounds; the default on a CPU."
    ),
    frozen: bool = Option(False, "--frozen", help="Also time forwards with upconv.freeze, which keeps packed weights."),
    as_exported: bool = Option(False, "--as-exported", help=_EXPORTED),
    compiled: bool | None = Option(None, "--compiled/--eager", help=_COMPILED),
    json: str | None = Option(None, "--json", metavar="FILE", help="Write the report as JSON."),
    plot: str | None = Option(
        None, "--plot", metavar="FILE", help="Draw shares of the roof and speed-ups, .png or .svg."
    ),
    from_: str | None = Option(None, "--from", metavar="FILE", help="Measure nothing: show this JSON report again."),
) -> None:
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    try:
        code = run(SimpleNamespace(**context.params), given)
    except ValueError as error:
        stop(error)
    if code:
        raise typer.Exit(code)


def run(options: SimpleNamespace, given: set[str]) -> int:
    """Runs the command; its exit code. Errors: ValueError for an argument that does not fit, in one sentence.

    ``options``: by the names of the command's parameters; ``given`` are those that are not by default.
    """
    picture = None if options.plot is None else writable("--plot", options.plot, (".png", ".svg"))
    if picture and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; pip install 'upconv[plot]' brings it")
    path = None if options.json is None else writable("--json", options.json)
    if options.from_ is not None:
        _only(given, "--from", "from_ json plot")
        return WRONG if _told(report.load(options.from_), path, picture) else 0
    measure = _measured(options, given)
    with _interrupted_once():
        with Progress() as tell:
            found = measure(tell)
        failed = _told(found, path, picture)
    if not found["complete"]:
        return INTERRUPTED
    return WRONG if failed else 0


@contextmanager
def _interrupted_once() -> Iterator[None]:
    """The first Ctrl-C is an interrupt and others are ignored, to the process's end: what was measured gets written."""

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    was = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is first:
            signal.signal(signal.SIGINT, was)


def _told(found: Report, path: Path | None, picture: Path | None) -> bool:
    """Shows, writes and draws a report; whether a row is wrong or something was not written."""
    screen, failed = console(), bool(report.wrong(found["rows"]))
    tables.show(found, screen)
    for done, to, write in (
        ("written", path, report.save),
        ("drawn", picture, lambda found, to: plots.plot([found], to)),
    ):
        if to is not None:
            try:
                write(found, to)
                screen.print(f"{done}: {to}", soft_wrap=True)
            except (OSError, ValueError) as error:
                print(f"upconv: {to} was not {done}: {error}", file=sys.stderr)
                failed = True
    return failed


# --- kinds of runs ---------------------------------------------------------------------------------------------------

Measure = Callable[[Progress], Report]


def _only(given: set[str], kind: str, allowed: str) -> None:
    """Refuses what a kind of run does not take. Errors: ValueError, one sentence."""
    for name in sorted(given.difference(allowed.split())):
        raise ValueError(f"--{name.rstrip('_').replace('_', '-')} does not go with {kind}")


def _measured(options: SimpleNamespace, given: set[str]) -> Measure:
    """What the options ask to measure."""
    device = device_of(options.device)
    small = device.type == "cpu" if options.quick is None else options.quick
    if "training" in options.suite:
        _only(given, "--suite training", "suite device json case dtype layout pass_ quick compiled")
        return _training(options, device, small)
    if options.as_exported:
        _only(given, "--as-exported", "suite device json case quick as_exported")
        if set(options.suite) != {"kernelbench"} or small:
            raise ValueError("--as-exported goes with --suite kernelbench alone, at full sizes on a CUDA GPU")
        paths = exported.files(exported.FOLDER, [case.name for case in choose(SUITES["kernelbench"], options.case)])
        return lambda tell: exported.measure(paths, device, tell)
    if options.compiled is not None:
        raise ValueError("--compiled and --eager go with --suite training alone")
    return _layers(options, device, small)


def _training(options: SimpleNamespace, device: torch.device, small: bool) -> Measure:
    """Whole models; small ones have an eighth of the width."""
    if len(options.suite) > 1:
        raise ValueError(f"--suite training is a run of its own; got {' and '.join(options.suite)}")
    whole = device.type == "cuda" and not small if options.compiled is None else options.compiled
    kinds = ("float32", "bfloat16")  # bfloat16 is autocast's
    todo = training.runs(
        choose(models.cases(8 if small else 1), options.case),
        autocast=[kind == "bfloat16" for kind in several(options.dtype, kinds) or kinds],
        layouts=several(options.layout, LAYOUTS) or LAYOUTS[: 2 if whole else 1],
        modes=several(options.pass_, training.MODES) or training.MODES[: 2 if whole else 1],
    )
    if not todo:
        raise ValueError("--layout must be nchw for hifigan, which has no channels_last; got 'channels_last'")
    return lambda tell: training.measure(device, todo, tell, compiled=whole)


def _layers(options: SimpleNamespace, device: torch.device, small: bool) -> Measure:
    """Layers of suites, or one from the command line."""
    ways = layers.ways(
        device,
        [DTYPES[name] for name in several(options.dtype, list(DTYPES))],
        several(options.precision, _PRECISIONS),
        several(options.layout, LAYOUTS),
        several(options.pass_, PASSES),
    )
    chosen = _cases(options, device)
    todo = [job for name, cases in chosen for job in layers.jobs(name, cases, ways, small=small, bias=options.bias)]
    if not todo:
        raise ValueError("--layout must be nchw for 1-D layers, which have no channels_last; got 'channels_last'")
    if options.frozen and any(way.pass_ != "fwd" for way in ways):
        raise ValueError("--frozen goes with --pass fwd alone")
    # Suites of five or six layers are timed at length, a sweep of dozens of rows on a GPU is not.
    repeats = QUICK if small else SWEEP if device.type == "cuda" and len(todo) > 12 else FULL
    return lambda tell: layers.measure(todo, device, repeats, tell, options.frozen)


def _cases(options: SimpleNamespace, device: torch.device) -> list[tuple[str, Sequence[Case]]]:
    """Each suite's name and its cases; a layer is the suite ``custom``."""
    layer, input = options.layer, options.input
    if (layer is None) != (input is None):
        raise ValueError(f"--layer and --input go together; got {layer!r} and {input!r}")
    if layer is not None:
        if options.suite:
            raise ValueError(f"--layer goes without --suite; got {' and '.join(options.suite)}")
        return [("custom", choose([Case("custom", parse_layer(layer, input))], options.case))]
    names = list(dict.fromkeys(options.suite)) or ["founding" if device.type == "cuda" else "cpu"]
    chosen = set(choose([case for name in names for case in SUITES[name]], options.case))
    return [(name, [case for case in SUITES[name] if case in chosen]) for name in names]
