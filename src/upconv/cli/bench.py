"""``upconv bench``: reads what was asked for, measures it, shows and writes the report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import torch
import typer
from typer import Option

from upconv.bench import exported, files, latency, models, plots, report, tables, training
from upconv.bench import run as layers
from upconv.bench.progress import Progress
from upconv.bench.report import Report
from upconv.bench.suites import SUITES, Case, choose, parse_layer
from upconv.bench.timing import FULL, QUICK, SWEEP
from upconv.cli.arguments import DEVICE, DTYPES, console, device_of, repeated, several, stop
from upconv.problem import LAYOUTS, PASSES, Precision

WRONG, INTERRUPTED = 1, 130
"""Exit codes: a row has no speed, and Ctrl-C."""

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

  upconv bench --suite kernelbench --as-exported --json exported.json

  upconv bench --from models.json --plot models.svg
"""
ALONE = ("training", "host", "shapes")
"""Suites that are runs of their own, of other things than layers."""
_PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_SUITE = (
    "Layers: default cpu, on CUDA founding; custom is that of --layer. training: whole models; host: what a call costs "
    "the host; shapes: first calls on ten new input sizes."
)
_COMPILED = "Suite training: also under torch.compile, in both layouts, steps and inference; the default on a GPU."


class Options(SimpleNamespace):
    """The options, by the names of the command's parameters; ``given`` names those that were."""

    given: frozenset[str]

    def only(self, kind: str, *allowed: str) -> None:
        """Refuses what a kind of run does not take. Errors: ValueError, one sentence."""
        for name in vars(self):
            if name in self.given.difference(allowed):
                raise ValueError(f"--{name.rstrip('_').replace('_', '-')} does not go with {kind}")

    def small(self, device: torch.device) -> bool:
        """Whether sizes are scaled down."""
        return device.type == "cpu" if self.quick is None else bool(self.quick)


def command(
    context: typer.Context,
    suite: list[str] = repeated("--suite", (*SUITES, "custom", *ALONE), _SUITE),
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
    as_exported: bool = Option(
        False,
        "--as-exported",
        help="Suite kernelbench: measure models/model_57.py and its like by KernelBench's rules.",
    ),
    compiled: bool | None = Option(None, "--compiled/--eager", help=_COMPILED),
    json: str | None = Option(None, "--json", metavar="FILE", help="Write the report as JSON."),
    plot: str | None = Option(
        None, "--plot", metavar="FILE", help="Draw shares of the roof and speed-ups, .png or .svg."
    ),
    from_: str | None = Option(None, "--from", metavar="FILE", help="Measure nothing: show this JSON report again."),
) -> None:
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
    try:
        code = run(Options(**context.params, given=given))
    except ValueError as error:
        stop(error)
    if code:
        raise typer.Exit(code)


def run(options: Options) -> int:
    """Runs the command; its exit code. Errors: ValueError for an argument that does not fit, in one sentence."""
    picture = None if options.plot is None else files.writable("--plot", options.plot, (".png", ".svg"))
    if picture and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; pip install 'upconv[plot]' brings it")
    path = None if options.json is None else files.writable("--json", options.json)
    if options.from_ is not None:
        options.only("--from", "from_", "json", "plot")
        try:
            found = report.load(options.from_)
        except ValueError as error:
            raise ValueError(f"--from: {error}") from None
    else:
        measure = _measured(options)
        with Progress() as tell:
            found = measure(tell)
    screen, failed = console(), bool(report.wrong(found["rows"]))
    tables.show(found, screen)
    for done, to, write in (("written", path, files.save), ("drawn", picture, _draw)):
        if to is None:
            continue
        try:
            write(found, to)
        except (OSError, ValueError) as error:
            print(f"upconv: {to} was not {done}: {error}", file=sys.stderr)
            failed = True
        else:
            screen.print(f"{done}: {to}", soft_wrap=True)
    if options.from_ is None and not found["complete"]:
        return INTERRUPTED
    return WRONG if failed else 0


def _draw(found: Report, path: Path) -> None:
    plots.plot([found], path)


# --- kinds of runs ---------------------------------------------------------------------------------------------------

Measure = Callable[[Progress], Report]


def _measured(options: Options) -> Measure:
    """What the options ask to measure."""
    alone = [name for name in options.suite if name in ALONE]
    if alone and len(options.suite) > 1:
        raise ValueError(f"--suite {alone[0]} is a run of its own; got {' and '.join(options.suite)}")
    if not alone:
        return _exported(options) if options.as_exported else _layers(options)
    if alone[0] == "training":
        return _training(options)
    options.only(f"--suite {alone[0]}", "suite", "device", "json")
    device, measure = device_of(options.device), latency.host if alone[0] == "host" else latency.shapes
    return lambda tell: measure(device, tell)


def _training(options: Options) -> Measure:
    """Whole models; ``--quick``: of an eighth of the width."""
    allowed = ("suite", "case", "device", "dtype", "layout", "pass_", "quick", "compiled", "json")
    options.only("--suite training", *allowed)
    device = device_of(options.device)
    small = options.small(device)
    whole = device.type == "cuda" and not small if options.compiled is None else options.compiled
    every = {case.name: case for case in models.cases(8 if small else 1)}
    for name in options.case:
        if name not in every:
            raise ValueError(f"--case must be one of {', '.join(every)}; got {name!r}")
    kinds = ("float32", "bfloat16")  # bfloat16 is autocast's
    todo = training.runs(
        [case for name, case in every.items() if not options.case or name in options.case],
        autocast=[kind == "bfloat16" for kind in several(options.dtype, kinds) or kinds],
        layouts=several(options.layout, LAYOUTS) or LAYOUTS[: 2 if whole else 1],
        modes=several(options.pass_, training.MODES) or training.MODES[: 2 if whole else 1],
    )
    if not todo:
        raise ValueError("--layout must be nchw for hifigan, which has no channels_last; got 'channels_last'")
    return lambda tell: training.measure(device, todo, tell, compiled=whole)


def _exported(options: Options) -> Measure:
    """Files of KernelBench's layers."""
    options.only("--as-exported", "suite", "case", "device", "quick", "as_exported", "json")
    device = device_of(options.device)
    if set(options.suite) != {"kernelbench"} or options.small(device):
        raise ValueError("--as-exported goes with --suite kernelbench alone, at full sizes on a CUDA GPU")
    paths = exported.files(exported.FOLDER, [case.name for case in choose(SUITES["kernelbench"], options.case)])
    return lambda tell: exported.measure(paths, device, tell)


def _layers(options: Options) -> Measure:
    """Layers of suites, or one from the command line."""
    if options.compiled is not None:
        raise ValueError("--compiled and --eager go with --suite training alone")
    device = device_of(options.device)
    small = options.small(device)
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
    how = layers.How(repeats, options.frozen)
    return lambda tell: layers.measure(todo, device, how, tell)


def _cases(options: Options, device: torch.device) -> list[tuple[str, Sequence[Case]]]:
    """Each suite's name and its cases; a layer makes the suite ``custom``."""
    layer, input = options.layer, options.input
    default = "custom" if layer is not None else "founding" if device.type == "cuda" else "cpu"
    names, suites = list(dict.fromkeys(options.suite or (default,))), dict(SUITES)
    if "custom" not in names:
        if layer is not None or input is not None:
            raise ValueError(f"--layer and --input go with --suite custom; got --suite {names[0]}")
    elif layer is None or input is None:
        raise ValueError(f"--suite custom needs --layer and --input; got {layer!r} and {input!r}")
    else:
        suites["custom"] = (Case("custom", parse_layer(layer, input)),)
    chosen = set(choose([case for name in names for case in suites[name]], options.case))
    return [(name, [case for case in suites[name] if case in chosen]) for name in names]
