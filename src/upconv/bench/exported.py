"""Exported files as one more side of the bench: ``upconv bench --suite kernelbench --as-exported``."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn

from upconv.bench.timing import Operands, Work
from upconv.export.signatures import init_arguments
from upconv.problem import Problem

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


_BUILD = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='model')['build']()"


def build(paths: Mapping[str, Path], tell: Callable[..., object]) -> dict[str, float | None]:
    """Compiles all files' extensions at once, a process for each; they stay in PyTorch's folder for extensions.

    Returns:
        By case the seconds that it took beside the others, next to none for a file that is compiled already. None for
        one that cannot be compiled, whose row says why.
    """

    def one(path: Path) -> float | None:
        tell(f"building {path.name}")
        begin, command = time.perf_counter(), [sys.executable, "-c", _BUILD, str(path)]
        done = subprocess.run(command, env={**os.environ, "MAX_JOBS": "2"}, capture_output=True, check=False)
        return None if done.returncode else time.perf_counter() - begin

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            return dict(zip(paths, pool.map(one, paths.values())))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # else it builds the rest first
            raise


# --- the static check ------------------------------------------------------------------------------------------------

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
    for node in ast.walk(ast.parse(text)):
        if (reason := _refused(node)) is not None:
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


# --- as a side of a row ----------------------------------------------------------------------------------------------


def model(path: Path) -> Callable[..., nn.Module]:
    """The ``ModelNew`` of a file, run by ``exec`` in an empty namespace as KernelBench does.

    Raises:
        ValueError: KernelBench's static check would refuse the file.
    """
    text = path.read_text(encoding="utf-8")
    if (reason := refusal(text)) is not None:
        raise ValueError(f"KernelBench would refuse {path.name}: {reason}")
    namespace: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), namespace)
    made: Callable[..., nn.Module] = namespace["ModelNew"]
    return made


def work(path: Path, p: Problem, given: Operands) -> Work:
    """A forward of a file's module with these weights, as `timing.work`'s."""
    module = model(path)(*init_arguments(int(path.stem.removeprefix("model_")), p))
    for parameter, value in zip(module.parameters(), (given.weight, given.bias)):
        parameter.requires_grad_(False)
        parameter.data = value  # type: ignore[assignment]
    return lambda: (module(given.input),)
