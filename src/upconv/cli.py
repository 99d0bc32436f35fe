"""The command ``upconv``: bench, explain, export, env, cache.

Exit codes: 0 all right, 1 a wrong result (or a case that could not run), 2 bad arguments.
"""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from upconv.bench.report import Report
    from upconv.bench.roofline import Ceilings
    from upconv.bench.run import Job, Row, Sweep
    from upconv.bench.suites import Case
    from upconv.bench.timing import Inputs

# Options are named in full: left to guess, some versions of typer take a metavar like DTYPE for the name.
Choice = TypeVar("Choice", bound=str)

app = typer.Typer(
    name="upconv",
    help="Transposed convolution in PyTorch, as fast as the hardware allows.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point; ends the process with the command's exit code."""
    app(prog_name="upconv")


def _stop(message: object, code: int = 2) -> NoReturn:
    """Ends the command with one sentence on stderr."""
    print(f"upconv: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        from upconv import __version__

        print(f"upconv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# --- arguments that the commands share -------------------------------------------------------------------------------


def _one(name: str, value: str, allowed: Sequence[Choice]) -> Choice:
    for choice in allowed:
        if value == choice:
            return choice
    raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def _several(name: str, values: Sequence[str] | None, allowed: Sequence[Choice]) -> list[Choice]:
    """Repeated values, without doubles, in ``allowed``'s order; ``all`` stands for every one of them."""
    choices: list[str] = [*allowed, "all"]
    for value in values or ():
        _one(name, value, choices)
    return [choice for choice in allowed if values and (choice in values or "all" in values)]


def _device(text: str | None) -> torch.device:
    """The device of ``--device``; without it a CUDA device where there is one, else the CPU."""
    import torch

    if text is None:
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:<index>; got {text!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise ValueError(f"--device must be cpu here, since PyTorch finds no CUDA device; got {text!r}")
        if (device.index or 0) >= count:
            raise ValueError(
                f"--device must be one of {', '.join(f'cuda:{i}' for i in range(count))} here; got {text!r}"
            )
        device = torch.device("cuda", device.index or 0)
    elif device.index:
        raise ValueError(f"--device must be cpu, cuda or cuda:<index>; got {text!r}")
    return device


def _sweep(
    device: torch.device,
    dtype: Sequence[str] | None,
    precision: Sequence[str] | None,
    layout: Sequence[str] | None,
    pass_: Sequence[str] | None,
) -> Sweep:
    from upconv.bench.run import sweep
    from upconv.problem import LAYOUTS, PASSES, PRECISIONS

    dtypes = {str(d).removeprefix("torch."): d for d in PRECISIONS}
    chosen = [dtypes[found] for found in _several("--dtype", dtype, list(dtypes))]
    kinds = [kind for found in PRECISIONS.values() for kind in found]
    precisions = _several("--precision", precision, kinds)
    if precision and "all" in precision:  # all that the dtypes and the device have
        fitting = {kind for d in chosen or PRECISIONS for kind in PRECISIONS[d]} - (
            {"tf32"} if device.type == "cpu" else set()
        )
        precisions = [kind for kind in precisions if kind in fitting]
    return sweep(device, chosen, precisions, _several("--layout", layout, LAYOUTS), _several("--pass", pass_, PASSES))


def _output_file(name: str, text: str, suffixes: Sequence[str] = ()) -> Path:
    """A path that can be written, checked ahead of a long run."""
    path = Path(text)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{name} must end in {' or '.join(suffixes)}; got {text!r}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{name} must be a file in a folder that exists; got {text!r}")
    return path


_Device = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda[:i]", help="Where to run; default: CUDA if there is one.")
]
_Input = Annotated[
    str | None,
    typer.Option("--input", metavar="NxCxHxW", help="The layer's input: batch, channels, 1 to 3 spatial sizes."),
]


# --- bench -----------------------------------------------------------------------------------------------------------

_BENCH_HELP = """Measure upconv against PyTorch: interleaved, fresh inputs, medians, every row checked in float64.

A speed-up is PyTorch's time over upconv's. A row that the plan leaves to PyTorch's own operator is shown as
[bold]torch[/] and counts as 1. A wrong result has no speed and makes the exit code 1.

Examples:

  upconv bench

  upconv bench --suite models --dtype all --layout all --json models.json --plot models.png

  upconv bench --layer "64,64,(3,7),stride=2,padding=1" --input 8x64x128x128 --pass step

  upconv bench --suite training --json training.json

  upconv bench --suite kernelbench --as-exported --models models --pass step --json exported.json

  upconv bench --from models.json --plot models.svg
"""


@app.command(help=_BENCH_HELP)
def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite",
            metavar="NAME",
            help="founding, kernelbench, models, cuda (both), field, convolutions, cpu, custom, training; repeated; "
            "default: cpu, founding.",
        ),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option("--case", metavar="NAME", help="Only this case; may be repeated.")
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option("--layer", metavar="ARGS", help="A layer of your own, in torch.nn.ConvTranspose2d's arguments."),
    ] = None,
    input: _Input = None,
    device: _Device = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype", metavar="DTYPE", help="float32 (default), bfloat16, float16, float64; repeated, or all."
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            "--precision", metavar="KIND", help="tf32, ieee, bf16, fp16, fp64; float32 default: ieee, on CUDA tf32."
        ),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", metavar="LAYOUT", help="nchw (default), channels_last; repeated, or all."),
    ] = None,
    pass_: Annotated[
        list[str] | None,
        typer.Option("--pass", metavar="PASS", help="fwd (default), grad-input, grad-weight, step; repeated, or all."),
    ] = None,
    bias: Annotated[bool | None, typer.Option("--bias/--no-bias", help="Override what the suite says.")] = None,
    quick: Annotated[
        bool | None,
        typer.Option("--quick/--full", help="Scaled-down sizes and fewer rounds; the default on a CPU."),
    ] = None,
    inputs: Annotated[
        str,
        typer.Option("--inputs", metavar="KIND", help="normal, or rand: KernelBench's inputs and torch.nn's weights."),
    ] = "normal",
    memory: Annotated[
        bool, typer.Option("--memory", help="Also measure peak memory beside inputs and results.")
    ] = False,
    host: Annotated[
        bool, typer.Option("--host", help="Measure instead what a call of a tiny layer costs the host.")
    ] = False,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="Measure instead the first calls of a layer on ten new input sizes.")
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Measure instead how long a first call waits for its kernels.")
    ] = False,
    as_exported: Annotated[
        bool,
        typer.Option(
            "--as-exported", help="Judge the files of suite kernelbench by its rules; --pass step: gradients."
        ),
    ] = False,
    models: Annotated[
        str, typer.Option("--models", metavar="DIR", help="Where --as-exported finds model_57.py and its like.")
    ] = "models",
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")] = None,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw speed-ups and a roofline, .png or .svg.")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="FILE", help="Measure nothing: show this JSON report again.")
    ] = None,
) -> None:
    from rich.console import Console

    from upconv.bench import report as reports
    from upconv.bench.run import jobs
    from upconv.bench.timing import INPUTS

    console = Console(highlight=False)
    try:
        picture = None if plot is None else _output_file("--plot", plot, (".png", ".svg"))
        if picture:
            _need_matplotlib()
        file = None if json is None else _output_file("--json", json)
        if from_ is not None:
            found = _load(from_)
        else:
            where = _device(device)
            small = where.type == "cpu" if quick is None else quick
            alone = [name for name, asked in (("--host", host), ("--shapes", shapes), ("--cold", cold)) if asked]
            if alone:
                if len(alone) > 1:
                    raise ValueError(f"{' and '.join(alone)} are runs of their own; got {len(alone)} of them")
                if picture:
                    raise ValueError(f"--plot does not go with {alone[0]}; got {plot!r}")
                _latency(alone[0], where, file, console)
                return
            if suite and "training" in suite:
                if len(suite) > 1 or case or layer or picture:
                    raise ValueError("--suite training is a run of its own, without --case, --layer and --plot")
                _training(where, small, file, console)
                return
            if as_exported:
                if list(suite or ()) != ["kernelbench"] or layer or picture:
                    raise ValueError("--as-exported goes with --suite kernelbench alone, without --layer and --plot")
                if list(pass_ or ["fwd"]) not in (["fwd"], ["step"]):
                    raise ValueError(f"--pass must be fwd or step with --as-exported; got {', '.join(pass_ or [])}")
                _exported(where, Path(models), case, "step" in (pass_ or ()), file, console)
                return
            kind = _one("--inputs", inputs, INPUTS)
            what = _sweep(where, dtype, precision, layout, pass_)
            chosen = _cases(suite, case, layer, input, where)
            todo = [job for name, cases in chosen for job in jobs(name, cases, what, small=small, bias=bias)]
            if not todo:
                raise ValueError(
                    "--layout must be nchw for 1-D layers, which have no channels_last; got 'channels_last'"
                )
    except ValueError as error:
        _stop(error)
    if from_ is None:
        rows, ceilings = _measure(todo, where, small, memory, kind)
        found = reports.build(rows, ceilings, where)
    reports.show(found, console)
    if file:
        reports.save(found, file)
        console.print(f"written: {file}")
    if picture:
        try:
            reports.plot(found, picture)
        except ValueError as error:
            _stop(error, 1 if from_ is None else 2)
        console.print(f"drawn: {picture}")
    if reports.wrong(found["rows"]):
        raise typer.Exit(1)


def _need_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed; pip install 'upconv[plot]' brings it")


def _load(path: str) -> Report:
    from upconv.bench.report import load

    try:
        return load(path)
    except ValueError as error:
        raise ValueError(f"--from: {error}") from None


def _latency(kind: str, device: torch.device, file: Path | None, console: Console) -> None:
    """The runs of ``--host``, ``--shapes`` and ``--cold``, whose reports are tables of their own."""
    from upconv.bench import cold, latency

    if kind == "--cold":
        with console.status("") as status:
            found = cold.measure(device, progress=lambda label: status.update(f"compiling {label}"))
    else:
        found = latency.host(device) if kind == "--host" else latency.shapes(device)
    latency.show(found, console)
    if file:
        latency.save(found, file)
        console.print(f"written: {file}")


def _training(device: torch.device, small: bool, file: Path | None, console: Console) -> None:
    """Whole training steps; ``small``: models of an eighth of the width, without ``torch.compile``."""
    from upconv.bench import latency, training

    cases = training.cases(8) if small else training.cases()
    with console.status("") as status:
        found = training.measure(device, cases, compiled=not small, progress=lambda case: status.update(case))
    latency.show(found, console)
    if file:
        latency.save(found, file)
        console.print(f"written: {file}")
    if any(row["failure"] for row in found["rows"]):
        raise typer.Exit(1)


def _exported(
    device: torch.device,
    folder: Path,
    case: Sequence[str] | None,
    gradients: bool,
    file: Path | None,
    console: Console,
) -> None:
    """KernelBench's rules for exported files."""
    from upconv.bench import exported

    every = exported.files(folder, case)
    with console.status("") as status:
        found = exported.measure(every, device, gradients=gradients, progress=lambda line: status.update(line))
    exported.show(found, console)
    if file:
        exported.save(found, file)
        console.print(f"written: {file}")
    if any(row["failure"] for row in found["rows"]):
        raise typer.Exit(1)


def _cases(
    suites: Sequence[str] | None, case: Sequence[str] | None, layer: str | None, input: str | None, device: torch.device
) -> list[tuple[str, Sequence[Case]]]:
    """Each suite's name and its cases; a layer makes the suite ``custom``."""
    from upconv.bench.suites import SUITES, Case, choose, parse_layer

    names = list(suites or ("custom" if layer is not None else "founding" if device.type == "cuda" else "cpu",))
    choices = [*SUITES, "custom", "training"]
    for name in names:
        _one("--suite", name, choices)
    if "custom" not in names:
        if layer is not None or input is not None:
            raise ValueError(f"--layer and --input go with --suite custom; got --suite {names[0]}")
    elif layer is None or input is None:
        raise ValueError(f"--suite custom needs --layer and --input; got {layer!r} and {input!r}")
    else:
        SUITES = {**SUITES, "custom": (Case("custom", parse_layer(layer, input)),)}
    found = {name: SUITES[name] for name in names}
    chosen = set(choose([one for cases in found.values() for one in cases], case or ()))
    return [(name, [one for one in cases if one in chosen]) for name, cases in found.items()]


def _measure(
    todo: Sequence[Job], device: torch.device, small: bool, memory: bool, inputs: Inputs
) -> tuple[list[Row], Ceilings]:
    """The rows and the ceilings, behind a progress bar where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from upconv.bench.run import run
    from upconv.bench.timing import FULL, QUICK, SWEEP

    # Suites of five or six layers are timed at length, a sweep of dozens of rows on a GPU is not.
    repeats = QUICK if small else SWEEP if device.type == "cuda" and len(todo) > 12 else FULL
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("", total=len(todo))
        done = iter(range(len(todo)))

        def tell(job: Job) -> None:
            p = job.problem
            dtype = str(p.dtype).removeprefix("torch.")
            progress.update(task, completed=next(done), description=f"{job.case} {dtype} {p.layout} {p.pass_}")

        return run(todo, device, repeats, peaks=memory, inputs=inputs, progress=tell)


# --- explain ---------------------------------------------------------------------------------------------------------

_EXPLAIN_HELP = """Say what upconv does with a layer: sizes, phases and taps, the roof, the plan and why no other.

The layer is given in torch.nn.ConvTranspose2d's argument order and names; its rank is the input's.

Examples:

  upconv explain "64,64,(3,7)" --input 8x64x512x512

  upconv explain "256,256,4,stride=2,padding=1,groups=256,bias=False" --input 4x256x32x32 --dtype bfloat16

  upconv explain "64,64,(3,7)" --input 8x64x512x1024 --gpu H200
"""


@app.command(help=_EXPLAIN_HELP)
def explain(
    layer: Annotated[str, typer.Argument(metavar="LAYER", help='Like "64,64,(3,7),stride=2,padding=1,bias=False".')],
    input: Annotated[
        str,
        typer.Option("--input", metavar="NxCxHxW", help="The layer's input: batch, channels, 1 to 3 spatial sizes."),
    ],
    device: _Device = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16, float16, float64.")
    ] = "float32",
    layout: Annotated[str, typer.Option("--layout", metavar="LAYOUT", help="nchw, channels_last.")] = "nchw",
    pass_: Annotated[str, typer.Option("--pass", metavar="PASS", help="fwd, grad-input, grad-weight, step.")] = "fwd",
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision", metavar="KIND", help="tf32, ieee, bf16, fp16, fp64; float32 default: ieee, on CUDA tf32."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="Plan for a GPU that need not be there: H200, A100, RTX4090, ..."),
    ] = None,
    ceilings: Annotated[
        str | None,
        typer.Option(
            "--ceilings",
            metavar="B/S,FLOP/S",
            help="Copy and matmul rates for the roof, like 37e9,190e9; default: measured, with --gpu estimated.",
        ),
    ] = None,
) -> None:
    import torch
    from rich.console import Console

    from upconv import planner
    from upconv.bench.roofline import measure
    from upconv.bench.run import sweep
    from upconv.bench.suites import parse_layer
    from upconv.explain import Explanation, estimated_ceilings, known_gpu, parse_ceilings
    from upconv.problem import LAYOUTS, PASSES, PRECISIONS

    try:
        dtypes = {str(d).removeprefix("torch."): d for d in PRECISIONS}
        kind = dtypes[_one("--dtype", dtype, list(dtypes))]
        if gpu is not None and device is not None:
            raise ValueError(f"--gpu and --device exclude each other; got {gpu!r} and {device!r}")
        named = None if gpu is None else known_gpu(gpu)
        where = _device(device) if named is None else torch.device("cuda")
        kinds = [value for found in PRECISIONS.values() for value in found]
        asked = [] if precision is None else [_one("--precision", precision, kinds)]
        problem = parse_layer(layer, input).with_(
            dtype=kind,
            precision=sweep(where, [kind], asked)["precisions"][0],
            layout=_one("--layout", layout, LAYOUTS),
            pass_=_one("--pass", pass_, PASSES),
        )
        known = None if ceilings is None else parse_ceilings(ceilings, problem)
    except ValueError as error:
        _stop(error)
    if named is None:
        plan = planner.plan(problem, planner.device_of(where))
        rates = known or measure([problem.precision], where, seconds=0.1)
    else:
        plan = planner.plan(problem, planner.Device("cuda", gpu=named))
        rates = known or estimated_ceilings(named)
    Console(highlight=False).print(Explanation(problem, plan, rates))


# --- export ----------------------------------------------------------------------------------------------------------

_EXPORT_HELP = """Write one layer as a self-contained Python file: ModelNew with its CUDA kernels inline.

The file imports torch and the standard library alone, and serves every batch and spatial size.

Examples:

  upconv export --kernelbench 57 -o model_57.py --check

  upconv export --layer "64,64,(3,7),stride=2,bias=False" --input 8x64x512x512 -o layer.py
"""


@app.command(help=_EXPORT_HELP)
def export(
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
    from upconv.export import command

    try:
        path = _output_file("--output", output, (".py",))
        made = command.make(number, layer, input, dtype, precision, arch)
        if check:
            command.need_gpu()
    except ValueError as error:
        _stop(error)
    made.write(path)
    print(f"{path}: {made.summary}")
    if check:
        try:
            found = made.check()
        except RuntimeError as error:
            _stop(error, 1)
        print(found.text)
        if not found.passed:
            raise typer.Exit(1)


# --- env -------------------------------------------------------------------------------------------------------------


@app.command()
def env(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print versions, devices, threads, flags and caches; what cannot be found out says why.

    Example: upconv env --json
    """
    from upconv.env import report

    found = report()
    if json:
        print(json_.dumps(found, indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for name, values in found.items():
        console.print(name, style="bold")
        _print_values(console, values, 1)


def _print_values(console: Console, values: Mapping[str, object], depth: int) -> None:
    from rich.text import Text

    for name, value in values.items():
        if isinstance(value, dict):
            console.print(Text("  " * depth + name))
            _print_values(console, value, depth + 1)
        else:
            shown = "-" if value is None else str(value)
            console.print(
                Text.assemble("  " * depth, (f"{name:<{28 - 2 * depth}}", "dim"), f" {shown}"), soft_wrap=True
            )


# --- cache -----------------------------------------------------------------------------------------------------------

_CACHE_HELP = """Show the compiled CUDA kernels that are kept on disk, remove them, or compile a model's ahead of time.

The directory is UPCONV_CACHE_DIR, else upconv in XDG_CACHE_HOME or ~/.cache; UPCONV_CACHE=off keeps none.

Examples:

  upconv cache

  upconv cache clear --yes

  upconv cache warm --model net.py:Generator --input 8x64x32x32
"""

cache_app = typer.Typer(
    help=_CACHE_HELP, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
app.add_typer(cache_app, name="cache")


@cache_app.callback()
def cache(context: typer.Context) -> None:
    if context.invoked_subcommand is not None:
        return
    from datetime import datetime

    from rich.console import Console

    from upconv.bench.report import si
    from upconv.cuda.cache import contents

    found = contents()
    newest = None if found.newest is None else datetime.fromtimestamp(found.newest).isoformat(" ", "seconds")
    _print_values(
        Console(highlight=False),
        {
            "directory": None if found.folder is None else str(found.folder),
            "in use": f"no: {found.problem}" if found.problem else "yes",
            "kernels": found.entries,
            "size": si(found.bytes, "B"),
            "targets": ", ".join(f"sm_{arch}" for arch in found.archs) or None,
            "newest": newest,
        },
        0,
    )


@cache_app.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove the compiled kernels; they are compiled again when they are needed.

    Example: upconv cache clear --yes
    """
    from upconv.cuda import cache as kept

    found = kept.contents()
    if found.folder is None or not found.folder.exists():
        print("there is no cache directory" if found.folder is None else f"{found.folder} does not exist")
        return
    if not yes and not typer.confirm(f"Remove {found.entries} compiled kernels from {found.folder}?"):
        raise typer.Abort
    try:
        removed = kept.clear()
    except OSError as error:
        _stop(f"{found.folder} cannot be cleared: {error.strerror or error}", 1)
    print(f"removed {removed} files from {found.folder}")


@cache_app.command()
def warm(
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="FILE.py:NAME", help="A module, or what makes one when called without arguments."
        ),
    ],
    input: Annotated[
        str, typer.Option("--input", metavar="NxCxHxW", help="The model's input: batch, channels, 1 to 3 sizes.")
    ],
    device: _Device = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16, float16, float64.")
    ] = "float32",
    layout: Annotated[str, typer.Option("--layout", metavar="LAYOUT", help="nchw, channels_last.")] = "nchw",
    training: Annotated[bool, typer.Option("--training", help="The gradients' kernels too.")] = False,
    convolutions: Annotated[
        bool, typer.Option("--convolutions", help="Plain convolutions' kernels too, as accelerate(convolutions=True).")
    ] = False,
) -> None:
    """Compile and keep every CUDA kernel that a model needs for an input of this shape.

    Example: upconv cache warm --model net.py:Generator --input 8x64x32x32 --dtype bfloat16
    """
    import torch

    from upconv import accelerate
    from upconv.bench.suites import parse_input
    from upconv.cpu import memory_format
    from upconv.problem import LAYOUTS, PRECISIONS

    try:
        dtypes = {str(d).removeprefix("torch."): d for d in PRECISIONS}
        kind = dtypes[_one("--dtype", dtype, list(dtypes))]
        shape = parse_input(input)
        where = _device(device)
        if where.type != "cuda":
            raise ValueError(f"--device must be a CUDA device, since only its kernels are compiled; got {str(where)!r}")
        order = memory_format(_one("--layout", layout, LAYOUTS), len(shape) - 2)
        network = _network(model)
    except ValueError as error:
        _stop(error)
    accelerate(network.to(where, kind), convolutions=convolutions)
    example = torch.randn(shape, device=where, dtype=kind).contiguous(memory_format=order)
    try:
        compiled = _warm(network, example, training)
    except Exception as error:  # whatever the model's forward raises on this input
        _stop(f"the model cannot be warmed up on {input}: {type(error).__name__}: {error}", 1)
    for line in compiled:
        print(line)
    print(f"{len(compiled)} kernels are ready")


def _network(text: str) -> torch.nn.Module:
    """The model that ``file.py:Name`` or ``package.module:Name`` names, made if it is a class or a function."""
    import importlib
    import importlib.util

    import torch

    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(f"--model must be FILE.py:NAME or a module's name and NAME; got {text!r}")
    try:
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise ValueError(f"--model must name a file that exists; got {text!r}")
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None  # both exist for every path that ends in .py
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses and pickle look there
            sys.path.insert(0, str(Path(place).resolve().parent))
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        found = getattr(module, name)
        network = found if isinstance(found, torch.nn.Module) else found()
    except ValueError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"--model {text} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(network, torch.nn.Module):
        raise ValueError(f"--model must be a torch.nn.Module or make one; got {text!r}, a {type(network).__name__}")
    return network


def _warm(network: torch.nn.Module, example: torch.Tensor, training: bool) -> list[str]:
    """Warms up behind a progress bar where stderr is a terminal; what was compiled."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from upconv import warmup

    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def tell(label: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=label)

        return [str(line) for line in warmup(network, example, training=training, progress=tell)]
