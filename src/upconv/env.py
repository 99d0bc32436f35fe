"""What a run depends on: versions, devices, threads, flags and caches. Every probe is guarded: a failure is a value."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

import upconv
from upconv.cuda import gpu
from upconv.cuda.compile import cache, nvrtc
from upconv.replay import native

Value = str | int | float | bool | None
_T = TypeVar("_T")


def probe(find: Callable[[], _T]) -> _T | str:
    """What ``find`` finds, or in its place why it could not, in a sentence."""
    try:
        return find()
    except Exception as error:  # whatever a broken installation raises
        return f"unavailable: {type(error).__name__}: {error}".splitlines()[0]


def _each(probes: Mapping[str, Callable[[], Value]]) -> dict[str, Value]:
    return {name: probe(find) for name, find in probes.items()}


# --- versions --------------------------------------------------------------------------------------------------------


def _package(name: str) -> Value:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cudnn() -> Value:
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else None


def _onednn() -> Value:
    found = re.search(r"(?:oneDNN|MKL-DNN) v(\S+)", torch.__config__.show())
    return found[1] if found else None


def versions() -> dict[str, Value]:
    """Versions of everything that decides speed or results; None for what is not installed."""
    return _each(
        {
            "upconv": lambda: upconv.__version__,
            "torch": lambda: str(torch.__version__),
            "python": platform.python_version,
            "cuda": lambda: torch.version.cuda,
            "cudnn": _cudnn,
            "cuda-bindings": lambda: _package("cuda-bindings"),
            "nvrtc": lambda: nvrtc.version() if _package("cuda-bindings") else None,
            "onednn": _onednn,
            "numpy": lambda: _package("numpy"),
        }
    )


# --- devices ---------------------------------------------------------------------------------------------------------


def _cpu_name() -> Value:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _cores() -> Value:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def device(which: torch.device) -> dict[str, Value]:
    """A device as reports name it: the model's name, and what of it a run can use."""
    common: dict[str, Callable[[], Value]] = {"type": lambda: which.type, "threads": torch.get_num_threads}
    if which.type != "cuda":
        capability = torch.backends.cpu.get_cpu_capability
        return _each({**common, "name": _cpu_name, "cores": _cores, "capability": capability})

    def properties() -> Any:
        return torch.cuda.get_device_properties(which)

    return _each(
        {
            **common,
            "name": lambda: torch.cuda.get_device_name(which),
            "capability": lambda: "{}.{}".format(*torch.cuda.get_device_capability(which)),
            "multiprocessors": lambda: int(properties().multi_processor_count),
            "memory_bytes": lambda: int(properties().total_memory),
        }
    )


def _devices() -> dict[str, dict[str, Value]]:
    found = {"cpu": device(torch.device("cpu"))}
    count = probe(torch.cuda.device_count)
    for i in range(count if isinstance(count, int) else 0):
        # What the CUDA engine goes by on a device.
        facts: dict[str, Callable[[], Value]] = {
            "kernels_for": lambda i=i: f"sm_{gpu.gpu(i).arch}",  # type: ignore[misc]
            "shared_bytes_per_block": lambda i=i: gpu.gpu(i).shared_bytes,  # type: ignore[misc]
            "copy_bytes_per_s_assumed": lambda i=i: gpu.gpu(i).bandwidth,  # type: ignore[misc]
            "clock_hz_assumed": lambda i=i: gpu.gpu(i).clock,  # type: ignore[misc]
        }
        found[f"cuda:{i}"] = device(torch.device("cuda", i)) | _each(facts)
    return found


def load_average() -> list[float] | None:
    """Processes that ran or waited to, over the last 1, 5 and 15 minutes; None where the system does not say."""
    try:
        return list(os.getloadavg())
    except (OSError, AttributeError):
        return None


# --- the whole -------------------------------------------------------------------------------------------------------


def _flags() -> dict[str, Value]:
    backends: Any = torch.backends  # its stubs lack the convolutions' settings
    return _each(
        {
            "cudnn.conv.fp32_precision": lambda: str(backends.cudnn.conv.fp32_precision),
            "cudnn.enabled": lambda: bool(backends.cudnn.enabled),
            "cudnn.benchmark": lambda: bool(backends.cudnn.benchmark),
            "cudnn.deterministic": lambda: bool(backends.cudnn.deterministic),
            "mkldnn.enabled": lambda: bool(backends.mkldnn.enabled),
            "mkldnn.conv.fp32_precision": lambda: str(backends.mkldnn.conv.fp32_precision),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
            "interop_threads": torch.get_num_interop_threads,
            "OMP_NUM_THREADS": lambda: os.environ.get("OMP_NUM_THREADS"),
        }
    )


def _kernels() -> Value:
    found = cache.contents()
    if found.problem:
        return f"in memory only, not in {found.folder}: {found.problem}" if found.folder else found.problem
    return f"{found.entries}, {found.bytes} bytes, in {found.folder}"


def _load() -> Value:
    found = load_average()
    return None if found is None else ", ".join(f"{value:.2f}" for value in found)


def report() -> dict[str, dict[str, Any]]:
    """Everything that ``upconv env`` prints, as JSON can hold it."""
    system: dict[str, Callable[[], Value]] = {
        "platform": platform.platform,
        "load_average": _load,
        "commit": commit,
        "package": lambda: str(_package_folder()),
        "cuda_compiler": lambda: nvrtc.unavailable() or "available",
        "native_host": native.state,
        "kernels": _kernels,
    }
    return {"versions": versions(), "system": _each(system), "devices": _devices(), "flags": _flags()}


def _package_folder() -> Path:
    return Path(upconv.__file__).resolve().parent


def commit() -> str | None:
    """The commit of the checkout that this package runs from, ``-dirty`` when its sources differ; else None."""
    folder = _package_folder()

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
        if done.returncode:
            raise OSError(done.stderr)
        return done.stdout.strip()

    try:
        # Installed below another project's checkout, the package is no part of that project's history.
        if Path(git("rev-parse", "--show-toplevel")).resolve() / "src" / "upconv" != folder:
            return None
        head, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", str(folder))
    except (OSError, subprocess.TimeoutExpired):  # no git, or no checkout
        return None
    return head + ("-dirty" if changed else "")
