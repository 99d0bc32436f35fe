"""Exported files judged by KernelBench's rules: ``upconv bench --suite kernelbench --as-exported``.

The rules (github.com/ScalingIntelligence/KernelBench, ``src/eval.py``): the file is run by ``exec`` and may call no
convolution of PyTorch's; parameters are drawn under seed 42 for both models and never copied; outputs on five inputs
agree within ``atol = rtol = 1e-4`` with PyTorch's under its default flags; then 100 runs are timed by CUDA events, the
L2 cache flushed before each, under ``no_grad``. What differs: inputs are drawn on the GPU (KernelBench draws up to 2 GB
on the CPU and copies them, seconds each), the sides run in turn in one process, and medians are reported.

Beside the original model and the file's the library's own layer runs on the same input and weights. With groups, where
cuDNN multiplies float32 as IEEE 754 has it whatever the flags say, the files do too, and the library is told to.
"""

from __future__ import annotations

import ast
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from upconv.bench import report, suites, timing
from upconv.bench.check import tolerance_used
from upconv.bench.report import Report, Row
from upconv.bench.suites import Case
from upconv.bench.timing import Quartiles, Repeats
from upconv.export import kernelbench_problem
from upconv.export.signatures import init_arguments
from upconv.modules import OURS, TRANSPOSED
from upconv.problem import Precision

SEED = 42
TRIALS = 5
GRADIENT = 4e-3
"""Largest norm of a gradient's difference from PyTorch's over its norm: eight times TF32's unit roundoff.

About half of that is what cuDNN's own gradients differ by.
"""
RUNS = Repeats(math.inf, 100, 100)
Progress = Callable[[str], object]


# --- the files -------------------------------------------------------------------------------------------------------


class File(NamedTuple):
    """An exported model and the case that it is for."""

    case: Case
    path: Path

    @property
    def number(self) -> int:
        """KernelBench's number of the problem."""
        return int(self.case.name.removeprefix("kb"))


def files(folder: Path, names: Sequence[str] | None = None) -> list[File]:
    """The ``model_<number>.py`` of a folder, in the suite's order.

    Args:
        folder: where they are.
        names: of the cases (``kb57``); None for all that the folder has.

    Raises:
        ValueError: the folder has none, or lacks one that is named; in one sentence.
    """
    wanted = suites.choose(suites.SUITES["kernelbench"], names or ())
    found = [File(case, folder / f"model_{case.name.removeprefix('kb')}.py") for case in wanted]
    missing = [file.path.name for file in found if not file.path.is_file()]
    if missing and (names or len(missing) == len(found)):
        raise ValueError(f"--models must be a folder with {missing[0]}, as `upconv export` writes it; got {folder}")
    return [file for file in found if file.path.is_file()]


_CONVOLUTIONS = r"(?:\w*conv(?:_transpose)?[123]d|conv1d_transpose|_?(?:cudnn|mkldnn|miopen)?_?convolution\w*)"
_NATIVE = re.compile(r"\b(?:at|torch)::(?:\w+::)*\w*conv\w*|\bcudnn\w*\s*\(|#\s*include\s*[<\"]cudnn", re.IGNORECASE)
_RULES = (
    (r"\bpass\b", "the word pass"),
    (r"\btry\s*:|\bexcept\b", "a try, which could fall back to PyTorch"),
    (r"\bthreading\b|\bconcurrent\.futures\b|\bmultiprocessing\b|\bThreadPool|\bProcessPool", "threads"),
    (r"_make_subclass|class\s+\w+\s*\([^)]*\bTensor\)", "a subclass of Tensor"),
    (r"torch\.cuda\.Event|torch\.cuda\.synchronize|\btime\.time\b", "what times are taken by"),
    (r"torch\.cuda\.[Ss]tream|\.wait_stream\(|\.record_stream\(", "streams"),
    (r"\bnn\.(?!Module\b|Parameter\b|ParameterList\b|ParameterDict\b|ModuleList\b|ModuleDict\b|init\b)\w+", "a layer"),
)
"""What KernelBench's static check finds errors in, or warns of, with its name."""


def refusal(text: str) -> str | None:
    """Why KernelBench's static check, or its intent, would refuse a file; None when it would not.

    Refused are what `_RULES` name outside of comments, calls of a convolution of PyTorch's (also of a layer that the
    model holds), ``torch.nn.functional``, imports beside torch and the standard library, and convolutions of PyTorch's
    or cuDNN's in C++ text.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return f"line {error.lineno} is no Python: {error.msg}"
    for node in ast.walk(tree):
        reason = _refused(node)
        if reason is not None:
            return f"line {getattr(node, 'lineno', 0)} {reason}"
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"(#|//).*", "", line)
        for rule, what in _RULES:
            if found := re.search(rule, code):
                return f"line {number} has {what}: {found[0].strip()}"
    return None


def _refused(node: ast.AST) -> str | None:
    """What a file's syntax tree may not have, in words."""
    modules: list[str] = []
    match node:
        case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called)) if re.fullmatch(_CONVOLUTIONS, called):
            return f"calls {ast.unparse(node.func)}"
        case ast.Attribute(value=value, attr="functional") if ast.unparse(value).endswith("nn"):
            return "uses torch.nn.functional"
        case ast.Constant(value=str(value)) if "\n" in value and (native := _NATIVE.search(value)):
            return f"begins a text that calls {native[0].strip()}"
        case ast.Import():
            modules = [alias.name for alias in node.names]
        case ast.ImportFrom():
            modules = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
    allowed = {"torch", *sys.stdlib_module_names}
    for module in modules:
        if module.startswith("torch.nn.functional") or module.split(".")[0] not in allowed:
            return f"imports {module}"
    return None


def model(text: str, path: Path) -> Callable[..., nn.Module]:
    """The ``ModelNew`` of a file, run by ``exec`` in an empty namespace as KernelBench does.

    Raises:
        ValueError: the file is refused, or has no ``ModelNew``; in one sentence.
    """
    reason = refusal(text)
    if reason is not None:
        raise ValueError(f"{path.name} is refused: {reason}")
    namespace: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), namespace)
    if "ModelNew" not in namespace:
        raise ValueError(f"{path.name} must define ModelNew; it does not")
    made: Callable[..., nn.Module] = namespace["ModelNew"]
    return made


class Original(nn.Module):
    """KernelBench's ``Model``: one layer under the attribute that its problems use, sizes of a rank from 1 to 3."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._name = ("conv1d_transpose", "conv_transpose2d", "conv_transpose3d")[case.problem.rank - 1]
        setattr(self, self._name, _layer(list(TRANSPOSED), case))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(self, self._name)(x)
        return result


def _layer(classes: Sequence[type[nn.Module]], case: Case) -> nn.Module:
    """The case's layer, of the class for its rank."""
    p = case.problem
    given = (p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, p.output_padding, p.groups, p.bias)
    return classes[p.rank - 1](*given, dilation=p.dilation)


# --- building --------------------------------------------------------------------------------------------------------

_BUILD = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='model')['build']()"


def build(every: Sequence[File], progress: Progress = lambda line: None) -> dict[Path, tuple[float, str]]:
    """Compiles all files' extensions at once, a process for each; they stay in PyTorch's folder for extensions.

    Returns:
        For each file its seconds, and the last lines of what went wrong (empty when nothing did).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    settings = {**os.environ, "MAX_JOBS": "2"}

    def one(file: File) -> tuple[float, str]:
        begin, command = time.perf_counter(), [sys.executable, "-c", _BUILD, str(file.path)]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begin
        progress(f"{file.path.name} built in {seconds:.0f} s")
        said = (done.stderr or done.stdout).strip().splitlines()[-12:] if done.returncode else []
        return seconds, "\n".join(said)

    with ThreadPoolExecutor(max(1, cores)) as pool:
        try:
            return dict(zip([file.path for file in every], pool.map(one, every)))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # else it builds the rest first
            raise


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(
    every: Sequence[File],
    device: torch.device,
    *,
    gradients: bool = False,
    repeats: Repeats = RUNS,
    progress: Progress = lambda line: None,
) -> Report:
    """Builds the files, then judges and times them one after the other.

    Args:
        every: the files.
        device: a CUDA device.
        gradients: also compare gradients for input and weight with PyTorch's.
        repeats: how often a side is timed.
        progress: hears of each file as it is built and as it begins.

    Raises:
        ValueError: ``device`` is no CUDA device.
        report.Interrupted: Ctrl-C, with the report of the files before it.
    """
    if device.type != "cuda":
        raise ValueError(f"--as-exported needs a CUDA GPU, for which the files are written; got {device}")
    return report.gather(_rows(every, device, gradients, repeats, progress), device, kind="exported")


def _rows(
    every: Sequence[File], device: torch.device, gradients: bool, repeats: Repeats, progress: Progress
) -> Iterator[Row]:
    built = build(every, progress)
    for file in every:
        progress(file.case.name)
        seconds, failure = built[file.path]
        row: Row = dict.fromkeys(report.KEYS["exported"])
        row |= {"case": file.case.name, "file": file.path.name, "layer": file.case.problem.layer}
        row |= {"build_s": round(seconds, 1), "lines": len(file.path.read_text(encoding="utf-8").splitlines())}
        if failure:
            row["failure"] = f"build failed: {failure.splitlines()[-1]}"
        else:
            try:
                row |= judge(file, device, gradients=gradients, repeats=repeats)
            except Exception as error:  # one file's fault is one row's
                row["failure"] = f"{type(error).__name__}: {error}".splitlines()[0]
        torch.cuda.empty_cache()
        yield row


def judge(file: File, device: torch.device, *, gradients: bool, repeats: Repeats) -> Row:
    """Correctness by the rules, and times if it is given."""
    p = file.case.problem
    made = model(file.path.read_text(encoding="utf-8"), file.path)
    torch.manual_seed(SEED)
    theirs = Original(file.case).to(device)
    torch.manual_seed(SEED)
    ours = made(*init_arguments(file.number, p)).to(device)
    mine, other = ours.state_dict(), theirs.state_dict()
    if list(mine) != list(other) or not all(torch.equal(mine[name], other[name]) for name in other):
        return {"failure": "its parameters under seed 42 are not the original's"}
    torch.manual_seed(SEED)
    seeds = [int(torch.randint(0, 2**32 - 1, (1,)).item()) for _ in range(TRIALS)]
    worst = 0.0
    with torch.no_grad():
        for seed in seeds:
            x = draw(p.input_shape, device, seed)
            worst = max(worst, tolerance_used("tf32", ours(x), theirs(x)))
    found: Row = {"worst": worst if math.isfinite(worst) else None}
    if not worst <= 1:
        return {**found, "failure": f"its output differs by {worst:.3g} of the tolerance"}
    if gradients:
        errors = _gradient_errors(ours, theirs, draw(p.input_shape, device, seeds[0]), seeds[1])
        found["grad_input_error"], found["grad_weight_error"] = errors
        if not max(errors) <= GRADIENT:
            return {**found, "failure": f"its gradients differ by {max(errors):.3g} in norm"}
    precision = kernelbench_problem(file.number).precision  # the file's own
    library = _library(file.case, theirs, device)
    taken = _times(ours, theirs, library, draw(p.input_shape, device, SEED), precision, repeats)
    for name, side in taken.items():
        found |= timing.entries(name, side)
    found["warning"] = timing.unsteady({"PyTorch": taken["torch"], "the file": taken["ours"]})
    found |= {"ratio": taken["torch"].median / taken["ours"].median, "library_precision": precision}
    return found | {"runs": repeats.most}


def draw(shape: Sequence[int], device: torch.device, seed: int) -> Tensor:
    """An input of KernelBench's: uniform on [0, 1), drawn on the device."""
    return torch.rand(shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def _gradient_errors(ours: nn.Module, theirs: nn.Module, x: Tensor, seed: int) -> tuple[float, float]:
    found: list[list[Tensor]] = []
    for side in (ours, theirs):
        leaf = x.detach().requires_grad_()
        out = side(leaf)
        generator = torch.Generator(x.device).manual_seed(seed)
        grad = torch.randn(out.shape, generator=generator, device=x.device)
        found.append(list(torch.autograd.grad(out, [leaf, next(side.parameters())], grad)))
        del out, grad
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(*found)]
    return errors[0], errors[1]


def _library(case: Case, theirs: nn.Module, device: torch.device) -> nn.Module:
    layer = _layer(list(OURS.values()), case).to(device)
    layer.load_state_dict({name.split(".", 1)[1]: value for name, value in theirs.state_dict().items()})
    return layer


def _times(
    ours: nn.Module, theirs: nn.Module, library: nn.Module, x: Tensor, precision: Precision, repeats: Repeats
) -> dict[str, Quartiles]:
    """Seconds of the sides ``torch``, ``ours`` and ``library`` on one input."""
    take = timing.clock(x.device, wait=False)  # KernelBench's has none

    def exact(run: Callable[[], object]) -> float:
        with timing.precision_flags(precision):
            return take(run)

    clocks = {"torch": take, "ours": take, "library": exact if precision == "ieee" else take}
    sides = {"torch": theirs, "ours": ours, "library": library}
    with torch.no_grad():
        runs = {name: [lambda side=side: side(x)] for name, side in sides.items()}
        for name, works in runs.items():  # kernels are loaded and weights packed in the first call
            clocks[name](works[0])
        taken = timing.interleave(runs, clocks, repeats)
    return {name: timing.quartiles(values) for name, values in taken.items()}
