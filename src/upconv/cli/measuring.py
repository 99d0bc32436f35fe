"""What ``upconv bench`` does: reads what was asked for, measures it, shows and writes the report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from upconv import env
from upconv.bench import exported, files, latency, models, plots, report, tables, training
from upconv.bench import run as runs
from upconv.bench.progress import Progress
from upconv.bench.report import Interrupted, Report, Row
from upconv.bench.roofline import Ceilings
from upconv.bench.run import How, Job, Way
from upconv.bench.suites import SUITES, Case, choose, parse_layer
from upconv.bench.timing import FULL, INPUTS, QUICK, SWEEP
from upconv.cli.arguments import console, device_of, dtypes, one, precisions, several
from upconv.problem import LAYOUTS, PASSES, PRECISIONS

WRONG, INTERRUPTED = 1, 130
"""Exit codes: a row has no speed, and Ctrl-C."""


class Options(SimpleNamespace):
    """The options of ``upconv bench``, by the names of its parameters; ``given`` names those that were."""

    given: frozenset[str]

    def only(self, kind: str, *allowed: str) -> None:
        """Refuses what a kind of run does not take. Errors: ValueError, one sentence."""
        for name, value in vars(self).items():
            if name in self.given.difference(allowed):
                got = value if isinstance(value, (str, bool)) else " ".join(value)
                raise ValueError(f"{option(name)} does not go with {kind}; got {got!r}")

    def small(self, device: torch.device) -> bool:
        """Whether sizes are scaled down."""
        return device.type == "cpu" if self.quick is None else bool(self.quick)


def option(name: str) -> str:
    """An option as it is typed, by the name of its parameter."""
    return f"--{name.rstrip('_').replace('_', '-')}"


class Outputs(NamedTuple):
    """The files that a run writes, tried ahead of it."""

    json: Path | None
    plot: Path | None


Measure = Callable[[Progress], Report]


def run(options: Options) -> int:
    """Runs the command; its exit code.

    Raises:
        ValueError: an argument that does not fit, in one sentence.
    """
    outputs = _outputs(options)
    alone = [kind for kind in ("--host", "--shapes") if getattr(options, kind[2:])]
    if len(alone) > 1:
        raise ValueError(f"{' and '.join(alone)} are runs of their own; got {len(alone)} of them")
    if options.from_ is not None:
        return _again(options, outputs)
    if alone:
        measure = _latency(options, alone[0])
    elif "training" in (options.suite or ()):
        measure = _training(options)
    else:
        measure = _exported(options) if options.as_exported else _layers(options)
    try:
        with Progress() as tell:
            found = measure(tell)
    except Interrupted as stopped:
        return _finish(stopped.found, outputs, INTERRUPTED)
    return _finish(found, outputs)


def _outputs(options: Options) -> Outputs:
    picture = None if options.plot is None else files.writable("--plot", options.plot, (".png", ".svg"))
    if picture and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; pip install 'upconv[plot]' brings it")
    return Outputs(None if options.json is None else files.writable("--json", options.json), picture)


def _again(options: Options, outputs: Outputs) -> int:
    """A report that was written before."""
    options.only("--from", "from_", "json", "plot")
    try:
        found = report.load(options.from_)
    except ValueError as error:
        raise ValueError(f"--from: {error}") from None
    return _finish(found, outputs)


def _finish(found: Report, outputs: Outputs, code: int = 0) -> int:
    """Shows a report and writes its files; the exit code, which is 1 in place of 0 where something failed."""
    screen, failed = console(), bool(report.wrong(found["rows"]))
    tables.show(found, screen)
    for done, path, write in (
        ("written", outputs.json, lambda path: files.save(found, path)),
        ("drawn", outputs.plot, lambda path: plots.plot([found], path)),
    ):
        if path is None:
            continue
        try:
            write(path)
        except (OSError, ValueError) as error:
            print(f"upconv: {path} was not {done}: {error}", file=sys.stderr)
            failed = True
        else:
            screen.print(f"{done}: {path}", soft_wrap=True)
    return code or (WRONG if failed else 0)


# --- kinds of runs ---------------------------------------------------------------------------------------------------


def _latency(options: Options, kind: str) -> Measure:
    """The runs of ``--host`` and ``--shapes``."""
    options.only(kind, kind[2:], "device", "json")
    device = device_of(options.device)

    def measure(tell: Progress) -> Report:
        tell(f"measuring {kind[2:]}")
        return latency.host(device) if kind == "--host" else latency.shapes(device)

    return measure


def _training(options: Options) -> Measure:
    """Whole models; ``--quick``: of an eighth of the width."""
    allowed = ("suite", "case", "device", "dtype", "layout", "pass_", "quick", "compiled", "json")
    options.only("--suite training", *allowed)
    if len(options.suite) > 1:
        raise ValueError(f"--suite training is a run of its own; got {' and '.join(options.suite)}")
    device = device_of(options.device)
    small = options.small(device)
    whole = device.type == "cuda" and not small if options.compiled is None else options.compiled
    every = models.cases(8 if small else 1)
    for name in options.case or ():
        one("--case", name, [case.name for case in every])
    todo = training.runs(
        [case for case in every if not options.case or case.name in options.case],
        autocast=[d == "bfloat16" for d in several("--dtype", options.dtype, training.DTYPES) or training.DTYPES],
        layouts=several("--layout", options.layout, LAYOUTS) or LAYOUTS[: 2 if whole else 1],
        modes=several("--pass", options.pass_, training.MODES) or training.MODES[: 2 if whole else 1],
    )
    if not todo:
        raise ValueError("--layout must be nchw for hifigan, which has no channels_last; got 'channels_last'")
    return lambda tell: training.measure(device, todo, compiled=whole, progress=tell)


def _exported(options: Options) -> Measure:
    """KernelBench's rules for exported files."""
    if list(options.suite or ()) != ["kernelbench"]:
        raise ValueError(f"--as-exported goes with --suite kernelbench alone; got {options.suite or None}")
    options.only("--as-exported", "as_exported", "suite", "case", "device", "pass_", "models", "json")
    passes = list(options.pass_ or ["fwd"])
    if passes not in (["fwd"], ["step"]):
        raise ValueError(f"--pass must be fwd or step with --as-exported; got {', '.join(passes)}")
    device = device_of(options.device)
    every = exported.files(Path(options.models), options.case)
    return lambda tell: exported.measure(every, device, gradients=passes == ["step"], progress=tell)


def _layers(options: Options) -> Measure:
    """Layers of suites, or one from the command line."""
    for name, kind in (("compiled", "--suite training"), ("models", "--as-exported")):
        if name in options.given:
            raise ValueError(f"{option(name)} goes with {kind} alone; got {getattr(options, name)!r}")
    device = device_of(options.device)
    small = options.small(device)
    drawn = one("--inputs", options.inputs, INPUTS)
    ways = _ways(options, device)
    passes = dict.fromkeys(way.pass_ for way in ways)
    if options.frozen and list(passes) != ["fwd"]:
        raise ValueError(f"--frozen goes with --pass fwd alone; got {', '.join(passes)}")
    chosen = _cases(options, device)
    todo = [job for name, cases in chosen for job in runs.jobs(name, cases, ways, small=small, bias=options.bias)]
    if not todo:
        raise ValueError("--layout must be nchw for 1-D layers, which have no channels_last; got 'channels_last'")
    # Suites of five or six layers are timed at length, a sweep of dozens of rows on a GPU is not.
    repeats = QUICK if small else SWEEP if device.type == "cuda" and len(todo) > 12 else FULL
    how = How(repeats, options.memory, drawn, options.frozen)
    return lambda tell: _measure_layers(todo, device, how, tell)


def _ways(options: Options, device: torch.device) -> list[Way]:
    known = dtypes()
    chosen = [known[found] for found in several("--dtype", options.dtype, list(known))]
    kinds = several("--precision", options.precision, precisions())
    if options.precision and "all" in options.precision:  # all that the dtypes and the device have
        fitting = {kind for d in chosen or PRECISIONS for kind in PRECISIONS[d]}
        kinds = [kind for kind in kinds if kind in fitting and (kind != "tf32" or device.type != "cpu")]
    layouts, passes = several("--layout", options.layout, LAYOUTS), several("--pass", options.pass_, PASSES)
    return runs.ways(device, chosen, kinds, layouts, passes)


def _cases(options: Options, device: torch.device) -> list[tuple[str, Sequence[Case]]]:
    """Each suite's name and its cases; a layer makes the suite ``custom``."""
    layer, input = options.layer, options.input
    default = "custom" if layer is not None else "founding" if device.type == "cuda" else "cpu"
    names = list(options.suite or (default,))
    for name in names:
        one("--suite", name, [*SUITES, "custom", "training"])
    suites = dict(SUITES)
    if "custom" not in names:
        if layer is not None or input is not None:
            raise ValueError(f"--layer and --input go with --suite custom; got --suite {names[0]}")
    elif layer is None or input is None:
        raise ValueError(f"--suite custom needs --layer and --input; got {layer!r} and {input!r}")
    else:
        suites["custom"] = (Case("custom", parse_layer(layer, input)),)
    found = {name: suites[name] for name in names}
    chosen = set(choose([case for cases in found.values() for case in cases], options.case or ()))
    return [(name, [case for case in cases if case in chosen]) for name, cases in found.items()]


def _measure_layers(todo: Sequence[Job], device: torch.device, how: How, tell: Progress) -> Report:
    begun, complete = env.load_average(), True
    rows: list[Row] = []
    ceilings = Ceilings(copy_bytes_per_s=0.0, matmul_flops_per_s={})

    def say(what: str, job: Job) -> None:
        p = job.problem
        name = f"{job.case} {str(p.dtype).removeprefix('torch.')} {p.layout} {p.pass_}"
        if what == "plan":
            tell(f"planning {name}")
        else:
            tell(name, len(rows), len(todo))

    try:
        tell("measuring what the machine copies and multiplies", 0, len(todo))
        for rows, ceilings in runs.run(todo, device, how, tell=say):  # noqa: B007 the last ones are the report's
            continue
    except KeyboardInterrupt:
        complete = False
    found = report.build(rows, device, begun, complete, ceilings=ceilings)
    if not complete:
        raise Interrupted(found)
    return found
