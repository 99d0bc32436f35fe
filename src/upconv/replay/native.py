"""The module that replays recordings (``native.cpp``): compiled once by the machine's C++ compiler, in the background.

A training step of a small model waits for its host, and there a layer in Python costs more than its kernels. The same
in C++ needs a C++ compiler and Python's headers, as ``torch.compile`` does; PyTorch brings the rest. Where they are
missing, or where ``UPCONV_NATIVE=off``, everything runs in Python as before.

The library is kept beside the compiled kernels (`upconv.cuda.compile.cache`), for this PyTorch and this Python, and
needs no compiler once it is there. Nothing waits for its compilation, which takes 15 to 30 s of one core, but `wait`;
nor is a compiler run anywhere but in the background. Whether there is a module changes no result, nor which kernel
computes it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock

from upconv import forks
from upconv.cuda import weights
from upconv.cuda.compile import cache
from upconv.cuda.compile.trust import insecure

_NAME = "upconv_native"
_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
_LIBRARIES = ("torch_python", "torch_cpu", "c10")
_FUNCTIONS = (
    "cuLaunchKernel", "cuLaunchCooperativeKernel", "cuLaunchKernelEx", "cuStreamIsCapturing", "cuCtxSetCurrent",
)  # fmt: skip

_MOST_SECONDS = 180.0  # that a process waits for another that compiles
_COMPILING_SECONDS = 900.0  # of a compiler, at the lowest priority, that is taken to hang then

_lock = forks.Lock()
_done = threading.Event()
_builder: threading.Thread | None = None
_module: Any = None
_reason = "not needed yet"
_child: subprocess.Popen[bytes] | None = None


def off() -> str | None:
    """Why this process will have no module: a sentence; None where it may have one. Runs no compiler.

    Errors: those of `cache.usable`.
    """
    if os.environ.get("UPCONV_NATIVE", "").lower() in ("off", "0", "no", "false"):
        return "UPCONV_NATIVE is off"
    if os.name != "posix":
        return "it is compiled on POSIX systems alone"
    folder = cache.usable()
    if folder is None:
        return "there is no cache directory to keep it in"
    reason = insecure(folder)  # a library is a part of the process, so nobody else may be able to put one in its place
    if reason is not None or cache.read(_name()) is not None:
        return reason
    if compiler() is None:
        return "there is no C++ compiler (CXX, c++, g++ or clang++)"
    if not (_python_headers() / "Python.h").exists():
        return f"Python's headers are not in {_python_headers()}"
    return None


def _last(text: str) -> str:
    """The last lines of a compiler's complaint, as one."""
    return " ".join(text.strip().splitlines()[-5:])[:2000]


def compiler() -> str | None:
    """The C++ compiler: ``CXX``, or the first of the usual names that is there."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)


def module() -> Any:
    """The module of ``native.cpp``, or None while there is none; the first call has it loaded or compiled."""
    if _module is None and _builder is None:
        _start()
    return _module


def hopeless() -> bool:
    """Whether there will be no module in this process."""
    return _done.is_set() and _module is None


def wait(seconds: float | None = None) -> Any:
    """`module`, but waits until it is there, or is known not to come, or for so many seconds."""
    if module() is None:
        _done.wait(seconds)
    return _module


def state() -> str:
    """What to tell people: ``loaded``, or why there is none."""
    if _module is not None:
        return "loaded"
    try:
        return (off() if _builder is None else None) or _reason
    except (OSError, ValueError) as error:
        return str(error)


def _start() -> None:
    global _builder, _reason
    with _lock.now:
        if _builder is not None:
            return
        _reason = "is being compiled"
        _builder = threading.Thread(target=_build, name="upconv-native", daemon=True)
        try:
            _builder.start()
        except RuntimeError as error:  # as many threads as the machine allows
            _reason = str(error)
            _done.set()


def _forked() -> None:
    """A child has no thread of its parent's."""
    global _builder, _done, _child
    _child = None
    if _module is None:
        _builder, _done = None, threading.Event()


forks.in_child(_forked)


def _build() -> None:
    global _module, _reason
    try:
        reason = off()
        if reason is None:
            _module = found()
        else:
            _reason = reason
    except Exception as error:  # whatever is wrong with a compiler, Python is there
        _reason = " ".join(f"{type(error).__name__}: {error}".split())[:2000]
    finally:
        _done.set()
        cache.tell(f"native: {state()}")


def found() -> Any:
    """The library from the cache, or compiled, and loaded.

    Errors: RuntimeError with the compiler's last lines; OSError; ImportError for a library that cannot be loaded.
    """
    name = _name()
    kept = cache.read(name)
    if kept is None:
        with _alone(name):
            if cache.read(name) is None:
                cache.write(name, _compiled())
            kept = cache.read(name)
    if kept is not None:
        with contextlib.suppress(ImportError):  # of another machine's making, or where nothing may be executed
            return _load(kept[0])
    data = _compiled()
    cache.write(name, data)
    with tempfile.TemporaryDirectory(prefix="upconv-") as folder:
        if reason := insecure(Path(folder)):
            raise RuntimeError(reason)
        path = Path(folder) / f"{_NAME}.so"
        path.write_bytes(data)
        return _load(path)


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Within it no other process is that compiles the same, but where files cannot be locked, or one takes too long."""
    folder = cache.usable()
    with contextlib.ExitStack() as held:
        if folder is not None:
            with contextlib.suppress(OSError, NotImplementedError):
                held.enter_context(FileLock(folder / f".{name}.lock", timeout=_MOST_SECONDS))
        yield


def _name() -> str:
    """The library's, in the cache."""
    parts = (
        _SOURCE.read_text(), torch.__version__, str(torch.version.git_version), str(sysconfig.get_config_var("SOABI")),
        platform.machine(), *platform.libc_ver(), *_FLAGS,
    )  # fmt: skip
    return f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.so"


def _python_headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


def command(out: Path) -> list[str]:
    """How the library is compiled."""
    torch_folder = Path(torch.__file__).parent
    include, libraries = torch_folder / "include", torch_folder / "lib"
    folders = (include, include / "torch" / "csrc" / "api" / "include", _python_headers())
    nice = shutil.which("nice")
    return [
        *([nice, "-n", "19"] if nice else []),
        compiler() or "c++",
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{folder}" for folder in folders),
        str(_SOURCE),
        "-o",
        str(out),
        f"-L{libraries}",
        *(f"-l{name}" for name in _LIBRARIES),
    ]


def _compiled() -> bytes:
    """The library, by a compiler that is stopped when this process exits."""
    global _child
    with tempfile.TemporaryDirectory(prefix="upconv-") as folder:
        out = Path(folder) / f"{_NAME}.so"
        cache.tell(f"compiling {_SOURCE.name} with {compiler()}")
        child = _child = subprocess.Popen(
            command(out), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            text, _ = child.communicate(timeout=_COMPILING_SECONDS)
        except subprocess.TimeoutExpired:
            _stop()
            raise
        finally:
            _child = None
        if child.returncode:
            raise RuntimeError(f"{compiler()} returned {child.returncode}: {_last(text.decode(errors='replace'))}")
        return out.read_bytes()


@atexit.register
def _stop() -> None:
    child = _child
    if child is not None and child.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGTERM)


def _load(path: Path) -> ModuleType:
    spec = spec_from_file_location(_NAME, path, loader=ExtensionFileLoader(_NAME, str(path)))
    assert spec is not None and spec.loader is not None
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    loaded.set_promises(ctypes.addressof(weights.promises))
    with contextlib.suppress(OSError):  # no driver: a test's
        driver = ctypes.CDLL("libcuda.so.1")
        loaded.set_driver(*(ctypes.cast(getattr(driver, name), ctypes.c_void_p).value for name in _FUNCTIONS))
    return loaded
