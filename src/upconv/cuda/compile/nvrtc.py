"""NVRTC: CUDA source -> machine code, nothing kept. Its bindings are imported on first use."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

_SCHEMA = "2"  # of the key; a new one leaves all old entries unused
FLAGS: tuple[str, ...] = ("-std=c++17",)
_ANGLED = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>", re.MULTILINE)


class CompileError(RuntimeError):
    """NVRTC rejected a source. The message: one sentence, NVRTC's log, the source's path and its constants."""


class Built(NamedTuple):
    """What NVRTC makes of a source."""

    code: bytes
    """The machine code; empty where only PTX was asked for."""
    ptx: str
    log: str


@lru_cache(maxsize=1)
def unavailable() -> str | None:
    """None when CUDA's Python bindings and NVRTC can be used, else a sentence that says why not."""
    try:
        version()
    except ImportError as error:
        return f"CUDA kernels need the package cuda-bindings, which cannot be imported: {error}."
    except Exception as error:  # each release of the bindings has its own for a library that is not found
        return f"CUDA kernels need NVRTC, which cannot be loaded: {' '.join(str(error).split())}."
    return None


def require() -> None:
    """Errors: RuntimeError with `unavailable`'s sentence."""
    reason = unavailable()
    if reason:
        raise RuntimeError(reason)


def bindings() -> Any:
    """The module of NVRTC's calls."""
    from cuda.bindings import nvrtc

    return nvrtc


@lru_cache(maxsize=1)
def version() -> str:
    """NVRTC's release, like ``13.0``."""
    error, major, minor = bindings().nvrtcVersion()
    _check(error, "nvrtcVersion")
    return f"{major}.{minor}"


# --- the key ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _include_folders() -> tuple[str, ...]:
    """Where CUDA's own headers are, of the release that NVRTC is of; may be empty.

    They come in the wheels beside NVRTC's (``nvidia/cu13/include``; for CUDA 12 ``nvidia/cuda_runtime/include``).
    ``CUDA_HOME`` is never asked: its headers may be of another release.
    """
    from importlib.util import find_spec

    try:
        spec = find_spec("nvidia")
    except (ImportError, ValueError):
        return ()
    major = version().split(".")[0]
    below = (f"cu{major}", "cuda_runtime") if int(major) < 13 else (f"cu{major}",)
    roots = list(spec.submodule_search_locations or ()) if spec else []
    folders = [Path(root) / name / "include" for root in roots for name in below]
    return tuple(str(folder) for folder in folders if (folder / "cuda_fp16.h").is_file())[:1]


@lru_cache(maxsize=64)
def _header_digest(name: str) -> str:
    """What a header of CUDA's holds, with the implementation that it includes (``cuda_fp16.hpp``)."""
    digest = hashlib.sha256()
    for folder in _include_folders():
        for path in (Path(folder) / name, (Path(folder) / name).with_suffix(".hpp")):
            if path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()


def key(text: str, arch: str) -> str:
    """The name of a cubin: a digest of everything that decides its content."""
    headers = [part for name in _ANGLED.findall(text) for part in (name, _header_digest(name))]
    digest = hashlib.sha256()
    for part in (_SCHEMA, arch, version(), str(len(FLAGS)), *FLAGS, *headers, text):
        data = part.encode()
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.hexdigest()


# --- compilation -----------------------------------------------------------------------------------------------------


def build(
    text: str, arch: str, label: str, entries: Sequence[str] = (), ptx: bool = False, flags: Sequence[str] = ()
) -> Built:
    """Compiles a text for ``sm_<arch>``, or to PTX alone.

    ``entries``: instances of templates that the code is to have; ``flags``: beside `FLAGS`. Errors: CompileError, with
    NVRTC's log; RuntimeError.
    """
    nvrtc = bindings()
    target = f"compute_{arch}" if ptx else f"sm_{arch}"
    flags = [f"--gpu-architecture={target}", *FLAGS, *flags, *(f"-I{folder}" for folder in _include_folders())]
    error, program = nvrtc.nvrtcCreateProgram(text.encode(), label.encode(), 0, [], [])
    _check(error, "nvrtcCreateProgram")
    try:
        for entry in entries:
            (error,) = nvrtc.nvrtcAddNameExpression(program, entry.encode())
            _check(error, "nvrtcAddNameExpression")
        (failed,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        told = log.rstrip(b"\0 \n").decode(errors="replace")
        if failed:
            name = nvrtc.nvrtcGetErrorString(failed)[1]
            name = name.decode() if isinstance(name, bytes) else str(name)
            first = f"NVRTC {version()} could not compile {label} for sm_{arch} ({name})."
            raise CompileError(f"{first}\n{told or '(NVRTC wrote no log)'}")
        assembly = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode()
        code = b"" if ptx else _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return Built(code, assembly, told)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(size_of: Callable[[Any], Any], get: Callable[[Any, bytes], Any], program: Any) -> bytes:
    error, size = size_of(program)
    _check(error, "NVRTC")
    # NVRTC writes into it, so it must be nobody else's: Python has one object for all equal bytes of length 0 and 1 (an
    # empty log's NUL made every b" " of the process a NUL, and so what print() puts between its arguments).
    data = bytes(max(size, 2))
    _check(get(program, data)[0], "NVRTC")
    return data[:size]


def _check(error: Any, call: str) -> None:
    if error:
        raise RuntimeError(f"{call} returned {error!r}")
