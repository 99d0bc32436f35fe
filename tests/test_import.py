"""Importing upconv initialises no device, writes nothing, prints nothing, and costs next to nothing beside torch."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def _run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter whose home, caches, temporary files and working directory are in ``folder``."""
    places = {
        "HOME": "home", "XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config", "XDG_DATA_HOME": "data", "TMPDIR": "tmp"
    }  # fmt: skip
    for place in (*places.values(), "cwd"):
        (folder / place).mkdir(exist_ok=True)
    variables = {**os.environ, **{name: str(folder / place) for name, place in places.items()}, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder / "cwd", env=variables, capture_output=True, text=True, timeout=120
    )


def _files(folder: Path) -> dict[str, int]:
    return {str(f): f.stat().st_mtime_ns for f in folder.rglob("*") if f.is_file()}


def test_prints_nothing_and_writes_nothing(tmp_path: Path) -> None:
    import upconv

    package = Path(upconv.__file__).parent
    before = _files(package)
    done = _run("import upconv", tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert _files(tmp_path) == {}
    assert _files(package) == before


IMPORT_BEHIND_TORCH = """
import json, logging, random, signal, sys, threading, warnings, torch
def state():
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed(),
        torch.get_rng_state().tolist(), random.getstate(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark, torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision(),
        torch.nn.ConvTranspose2d, torch.nn.ConvTranspose2d.forward, torch.conv_transpose2d,
        torch.nn.functional.conv_transpose2d, threading.active_count(), len(logging.getLogger().handlers),
        signal.getsignal(signal.SIGINT),
    )
before, modules, initialised = state(), set(sys.modules), []
torch.cuda._lazy_init = torch.cuda.init = lambda *args, **kwargs: initialised.append("torch.cuda")
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")  # of the package's own import (torch's may warn of what they like)
    import upconv
found = {"warnings": [str(w.message) for w in warned], "new modules": sorted(set(sys.modules) - modules)}
found["same settings"] = state() == before
found["handlers"] = len(logging.getLogger("upconv").handlers)
upconv.conv_transpose2d(torch.ones(1, 2, 3, 3), torch.ones(2, 2, 3, 3), stride=2)
found["initialised"] = initialised + ["torch.cuda"] * torch.cuda.is_initialized()
with upconv.strict(False):
    upconv.ConvTranspose2d(2, 3, 3, stride=2)(torch.ones(1, 2, 4, 4)).sum().backward()
upconv.warmup(upconv.ConvTranspose2d(2, 3, 3), (1, 2, 4, 4))
lazy = ("cuda", *("upconv.cuda." + name for name in ("compile.jit", "compile.launch", "direct", "gemm", "axes")))
later = set(sys.modules) - modules  # torch itself imports CUDA's bindings where they are installed
found["imported by calls on the CPU"] = [name for name in later if name.startswith(lazy)]
print(json.dumps(found))
"""


@pytest.fixture
def imported(tmp_path: Path) -> dict[str, Any]:
    """What the package's import does to a process that has torch."""
    done = _run(IMPORT_BEHIND_TORCH, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_import_changes_nothing_but_what_it_is_for(imported: dict[str, Any]) -> None:
    """No setting of PyTorch's, no device, which a call on the CPU does not initialise either.

    The bench, the command line and what they stand on are imported by those who use them, CUDA's compiler and bindings
    by calls on a GPU.
    """
    assert imported["warnings"] == [] and imported["same settings"] and imported["handlers"] == 0
    assert imported["initialised"] == [] and imported["imported by calls on the CPU"] == []
    names = {name.partition(".")[0] for name in imported["new modules"]}
    heavy = {"rich", "typer", "click", "matplotlib", "numpy", "scipy", "PIL", "cuda", "triton", "hypothesis"}
    assert "upconv" in names and not names & heavy
    own = ("upconv.bench", "upconv.cli", "upconv.env", "upconv.explain")
    assert not [name for name in imported["new modules"] if name.startswith(own)]


def test_works_without_the_optional_packages(tmp_path: Path) -> None:
    code = """
import sys
for name in ("matplotlib", "rich", "typer", "skimage", "sklearn"):
    sys.modules[name] = None  # an import of it fails
import torch, upconv
model = torch.nn.Sequential(torch.nn.ConvTranspose2d(2, 3, 3, stride=2))
wanted = model(torch.ones(1, 2, 4, 4))
torch.testing.assert_close(upconv.accelerate(model)(torch.ones(1, 2, 4, 4)), wanted)
"""
    done = _run(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return found


def test_imports_have_no_circle() -> None:
    """Late ones count too, and those for types alone; the package itself, which imports what users call, does not."""
    import upconv

    package = Path(upconv.__file__).parent
    files = {".".join(("upconv", *f.relative_to(package).with_suffix("").parts)): f for f in package.rglob("*.py")}
    files = {name.removesuffix(".__init__"): file for name, file in files.items() if name != "upconv.__init__"}
    left = {  # a folder imports its files
        name: {other for other in _imports(file) if other in files and not f"{name}.".startswith(f"{other}.")}
        for name, file in files.items()
    }
    while leaves := [name for name, others in left.items() if not others]:
        left = {name: others.difference(leaves) for name, others in left.items() if others}
    assert left == {}
