"""Exported files by KernelBench's rules: ``upconv bench --suite kernelbench --as-exported``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from upconv.bench import report, timing
from upconv.bench.report import Report, Row, finite
from upconv.export import default_precision, kernelbench_problem, signatures
from upconv.export.check import compare

FOLDER = Path("models")
"""Of exported files, where the bench is called."""


def files(folder: Path, cases: Iterable[str]) -> dict[str, Path]:
    """The ``model_<number>.py`` of a folder for these cases of KernelBench.

    Raises:
        ValueError: the folder lacks one; in one sentence.
    """
    found = {case: folder / f"model_{case.removeprefix('kb')}.py" for case in cases}
    for path in found.values():
        if not path.is_file():
            raise ValueError(
                f"--as-exported must have {path.name} in {folder}, as `python -m upconv.export models` writes it"
            )
    return found


_BUILD = """
import runpy, sys, time
build = runpy.run_path(sys.argv[1], run_name="model")["build"]
begin = time.perf_counter()
extension = build().__file__
print(time.perf_counter() - begin, extension)
"""


def build(paths: Mapping[str, Path], tell: Callable[..., object]) -> dict[str, float | None]:
    """Compiles all files' extensions, a process for each; they stay in PyTorch's folder for extensions.

    Each has two cores, so that it takes as long as alone.

    Returns:
        By case the seconds that it took. None for one that was compiled before, or cannot be, whose row says why.
    """

    def one(path: Path) -> float | None:
        tell(f"building {path.name}")
        command = [sys.executable, "-c", _BUILD, str(path)]
        with NamedTemporaryFile() as now:
            begin = os.stat(now.name).st_mtime
        done = subprocess.run(command, env={**os.environ, "MAX_JOBS": "2"}, capture_output=True, text=True, check=False)
        if done.returncode:
            return None
        seconds, extension = done.stdout.splitlines()[-1].split(" ", 1)
        return float(seconds) if os.stat(extension).st_mtime >= begin else None

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        try:
            return dict(zip(paths, pool.map(one, paths.values())))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # else it builds the rest first
            raise


# --- the static check ------------------------------------------------------------------------------------------------

_RULES = (
    (r"\bpass\b", "the word pass"),
    (r"\btry\s*:|\bexcept\b", "a try, which could fall back to PyTorch"),
    (r"\bthreading\b|\bconcurrent\.futures\b|\bmultiprocessing\b|\bThreadPool|\bProcessPool", "threads"),
    (r"_make_subclass|class\s+\w+\s*\([^)]*\bTensor\)", "a subclass of Tensor"),
    (r"torch\.cuda\.Event|torch\.cuda\.synchronize|\btime\.time\b", "what times are taken by"),
    (r"torch\.cuda\.[Ss]tream|\.wait_stream\(|\.record_stream\(", "streams"),
    (r"\bnn\.(?!Module\b|Parameter\b|ParameterList\b|ParameterDict\b|ModuleList\b|ModuleDict\b|init\b)\w+", "a layer"),
    (r"\bnn import functional\b|\bF\.\w+\(", "torch.nn.functional"),
    # PyTorch's, also of a layer that the model holds, and in C++ text.
    (r"[\w.:]*\b(?:\w*conv(?:_transpose)?[123]d|conv1d_transpose|\w*_convolution\w*|convolution)\(", "a convolution"),
    (r"(?i:\b(?:at|torch)::(?:\w+::)*\w*conv\w*|\bcudnn\w*\()", "a convolution in C++"),
)
"""What KernelBench's static check, or its intent, finds errors in or warns of, with its name."""


def refusal(text: str) -> str | None:
    """Why KernelBench's static check, or its intent, would refuse a file; None when it would not.

    Refused are what `_RULES` name outside of comments, and imports beside torch and the standard library.
    """
    allowed = {"torch", *sys.stdlib_module_names}
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"(#|//).*", "", line)
        for rule, what in _RULES:
            if found := re.search(rule, code):
                return f"line {number} has {what}: {found[0].strip()}"
        imported = re.match(r"\s*(?:import|from) (\w+)", code)
        if imported and imported[1] not in allowed:
            return f"line {number} imports {imported[1]}"
    return None


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(paths: Mapping[str, Path], device: torch.device, tell: Callable[..., object]) -> Report:
    """The report of these cases' files."""

    def rows() -> Iterator[Row]:
        seconds = build(paths, tell)
        for done, (case, path) in enumerate(paths.items()):
            tell(path.name, done, len(paths))
            yield row(case, path, device) | {"build_s": seconds[case]}
            if device.type == "cuda":
                torch.cuda.empty_cache()

    return report.gather(rows(), device, "exported")


def row(case: str, path: Path, device: torch.device) -> Row:
    """A file that KernelBench would accept and that computes what PyTorch does has times; any other has a failure."""
    number, text = int(case.removeprefix("kb")), path.read_text(encoding="utf-8")
    p = kernelbench_problem(number)
    found: Row = {
        "case": case, "file": path.name, "layer": p.layer, "precision": p.precision, "lines": text.count("\n"),
        "rules": "hold", "ours_ms": None, "ratio": None, "failure": None,
    }  # fmt: skip
    if (reason := refusal(text)) is not None:
        return found | {"rules": "do not", "failure": f"KernelBench would refuse {path.name}: {reason}"}
    attribute, flags = signatures.kernelbench(number, p).attribute, default_precision(p.dtype)
    try:
        compared = compare(text, p, attribute, signatures.init_arguments(number, p), device, flags=flags)
    except Exception as error:  # one file that cannot run does not cost the others
        return found | {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    errors = dict(zip(("grad_input_error", "grad_weight_error"), compared.gradients))
    found |= {name: finite(value) for name, value in {"tolerance_used": compared.used, **errors}.items()}
    found["failure"] = compared.failure
    return found if compared.failure else found | timing.entries(compared.taken)
