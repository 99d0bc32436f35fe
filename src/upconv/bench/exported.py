"""Exported files as one more side of the bench: ``upconv bench --suite kernelbench --exported models``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn

from upconv.bench.timing import Operands, Work
from upconv.export.signatures import init_arguments
from upconv.problem import Problem


def files(folder: Path, cases: Iterable[str]) -> dict[str, Path]:
    """The ``model_<number>.py`` of a folder for these cases of KernelBench.

    Raises:
        ValueError: the folder lacks one; in one sentence.
    """
    found = {case: folder / f"model_{case.removeprefix('kb')}.py" for case in cases}
    for path in found.values():
        if not path.is_file():
            raise ValueError(
                f"--exported must be a folder with {path.name}, as `upconv export` writes it; got {folder}"
            )
    return found


_BUILD = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='model')['build']()"


def build(paths: Mapping[str, Path], tell: Callable[..., object]) -> None:
    """Compiles all files' extensions at once, a process for each; they stay in PyTorch's folder for extensions.

    One that cannot be compiled is left to its row, which says so.
    """

    def one(path: Path) -> None:
        tell(f"building {path.name}")
        command = [sys.executable, "-c", _BUILD, str(path)]
        subprocess.run(command, env={**os.environ, "MAX_JOBS": "2"}, capture_output=True, check=False)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            list(pool.map(one, paths.values()))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # else it builds the rest first
            raise


def model(path: Path) -> Callable[..., nn.Module]:
    """The ``ModelNew`` of a file, run by ``exec`` in an empty namespace as KernelBench does."""
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
    made: Callable[..., nn.Module] = namespace["ModelNew"]
    return made


def work(path: Path, p: Problem, given: Operands) -> Work:
    """A forward of a file's module with these weights, as `timing.work`'s."""
    module = model(path)(*init_arguments(int(path.stem.removeprefix("model_")), p))
    for parameter, value in zip(module.parameters(), (given.weight, given.bias)):
        parameter.requires_grad_(False)
        parameter.data = value  # type: ignore[assignment]
    return lambda: (module(given.input),)
