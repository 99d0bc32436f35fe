"""Compiled kernels on disk: one file per kernel, private to the user, checked on every read, read without locks.

An entry is ``<key>.cubin``: the cubin, JSON that describes it (key, target, label, constants, NVRTC version, seconds),
the JSON's length, a digest of both and a mark. So an entry is published by one ``os.replace``, and tools for cubins
still read it. ``<key>.cu`` beside it is the source, for people. ``<key>.so`` is a library for the host, sealed alike
(`kept_library`).

``UPCONV_CACHE_DIR`` names the directory by an absolute path; else it is ``$XDG_CACHE_HOME/upconv`` or
``~/.cache/upconv``. It holds at most ``UPCONV_CACHE_BYTES``, else 2 GiB: what was used longest ago is removed.
``UPCONV_CACHE=off`` keeps kernels in memory only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upconv import forks
from upconv.cuda.compile.elf import arch_number
from upconv.cuda.compile.trust import insecure

_MARK = b"upconv01"
_TAIL = struct.Struct("<I32s8s")
_STALE_SECONDS = 3600.0  # a temporary file this old belongs to a process that died; a compilation takes seconds
_MOST_BYTES = 2 << 30
_EMPTIED_TO = 0.9  # of the limit, so that not each write removes something
_COUNTED_EVERY = 1 / 16  # of the limit: bytes that a process writes before it counts what the directory holds again
_USED_SECONDS = 86400.0  # the time of the last use is kept to a day

_state_lock = forks.Lock()
_warned = False
_swept = False
_uncounted = math.inf
"""Bytes that this process wrote since it last counted what the directory holds."""


def directory() -> Path | None:
    """Where entries are kept, or None when ``UPCONV_CACHE`` is off. Touches no file.

    Errors: ValueError for a relative ``UPCONV_CACHE_DIR``, which would name another directory in each working
    directory; OSError without a home.
    """
    if os.environ.get("UPCONV_CACHE", "").lower() in ("off", "0", "no", "false"):
        return None
    chosen = os.environ.get("UPCONV_CACHE_DIR")
    if chosen:
        if not os.path.isabs(chosen):
            raise ValueError(f"UPCONV_CACHE_DIR must be an absolute path; got {chosen!r}")
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "upconv"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise OSError(str(error)) from None
    if not home.is_absolute():
        raise OSError(f"the home directory must be an absolute path; got {str(home)!r}")
    return home / ".cache" / "upconv"


def most_bytes() -> int:
    """How many bytes the directory may hold. Errors: ValueError for a ``UPCONV_CACHE_BYTES`` that is no such number."""
    chosen = os.environ.get("UPCONV_CACHE_BYTES")
    if not chosen:
        return _MOST_BYTES
    if not (chosen.isascii() and chosen.isdigit() and int(chosen)):
        raise ValueError(f"UPCONV_CACHE_BYTES must be a number of bytes, at least 1; got {chosen!r}")
    return int(chosen)


def _refusal(found: os.stat_result) -> str | None:
    """Why a directory cannot hold code that this process will run; None when it can."""
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not to user {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _usable(create: bool) -> Path | None:
    """The directory when it can be trusted; None, with one warning per process, when not.

    Errors: ValueError, those of `directory` and `most_bytes`.
    """
    try:
        folder = directory()
        if folder is None:
            return None
        most_bytes()
        if create:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        try:
            found = folder.stat()
        except FileNotFoundError:
            return None
        reason = _refusal(found)
    except OSError as error:
        folder, reason = _named(), _cause(error)
    if reason:
        _warn(folder, reason)
        return None
    return folder


def _named() -> Path | None:
    try:
        return directory()
    except (OSError, ValueError):
        return None


def _cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _warn(folder: Path | None, reason: str) -> None:
    global _warned
    with _state_lock.now:
        if _warned:
            return
        _warned = True
    warnings.warn(
        f"upconv keeps compiled kernels in memory only, since its cache directory {folder or '~/.cache/upconv'} cannot "
        f"be used: {reason}; UPCONV_CACHE_DIR names another, UPCONV_CACHE=off silences this",
        RuntimeWarning,
        stacklevel=2,
    )


# --- entries ---------------------------------------------------------------------------------------------------------


def _seal(key: str, data: bytes, meta: dict[str, Any]) -> bytes:
    body = data + (text := json.dumps({**meta, "key": key, "bytes": len(data)}).encode())
    return body + _TAIL.pack(len(text), hashlib.sha256(body).digest(), _MARK)


Entry = tuple[bytes, dict[str, Any]]
"""Code, and its description."""


def _open(data: bytes, key: str, arch: str | None = None) -> Entry | None:
    """What a file holds; None for anything but the whole entry ``key`` for ``arch`` (None: for any).

    Nothing is synced to disk on writing, since a file that a crash cut short or left empty is found out here.
    """
    if len(data) < _TAIL.size:
        return None
    body = data[: -_TAIL.size]
    length, digest, mark = _TAIL.unpack(data[-_TAIL.size :])
    if mark != _MARK or length > len(body) or digest != hashlib.sha256(body).digest():
        return None
    code = body[: len(body) - length]
    try:
        meta = json.loads(body[len(body) - length :])
        target, name, size = str(meta["arch"]), meta["key"], meta["bytes"]
    except (ValueError, KeyError, TypeError):  # whole, but not written by this code
        return None
    if name != key or size != len(code) or (arch is not None and target != arch):
        return None
    if target != HOST and str(arch_number(code)) != target.rstrip("af"):
        return None
    return code, meta


def _read(name: str, arch: str) -> tuple[Path, Entry] | None:
    """The entry in a file, which is noted as used; a bad one is deleted. None when there is none."""
    folder = _usable(create=False)
    if folder is None:
        return None
    path = folder / name
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(folder, _cause(error))
        return None
    found = _open(data, path.stem, arch)
    with contextlib.suppress(OSError):  # a directory that is read-only
        if found is None:
            path.unlink()
        elif time.time() - path.stat().st_mtime > _USED_SECONDS:
            os.utime(path)
    return None if found is None else (path, found)


def read(key: str, arch: str) -> Entry | None:
    """The cubin kept under ``key`` and its description; a bad entry is deleted. None when there is none."""
    found = _read(f"{key}.cubin", arch)
    return None if found is None else found[1]


def write(key: str, cubin: bytes, source: str, meta: dict[str, Any]) -> None:
    """Publishes an entry; ``meta`` has ``arch`` at least. A directory that cannot be written gets one warning."""
    folder = _usable(create=True)
    if folder is None:
        return
    files = {f"{key}.cu": source.encode(), f"{key}.cubin": _seal(key, cubin, meta)}
    _kept(folder, key, files)


def keep_source(key: str, source: str) -> Path | None:
    """Publishes a source that did not compile, to be looked at; its path, or None without a directory."""
    folder = _usable(create=True)
    return None if folder is None else _kept(folder, key, {f"{key}.cu": source.encode()})


def _kept(folder: Path, key: str, files: dict[str, bytes]) -> Path | None:
    """Publishes files of a key by their names, in their order; the last one's path, or None with a warning."""
    _sweep(folder)
    path = None
    try:
        for name, data in files.items():
            path = folder / name
            _publish(path, data)
        _make_room(folder, key, sum(map(len, files.values())))
    except OSError as error:
        _warn(folder, _cause(error))
        return None
    return path


# --- libraries for the host ------------------------------------------------------------------------------------------

HOST = "host"
"""A library's architecture."""


def kept_library(key: str) -> Path | None:
    """The library kept under ``key``, whole as it was written; a bad one is deleted. None when there is none."""
    found = _read(f"{key}.so", HOST)
    return None if found is None else found[0]


def keep_library(key: str, data: bytes) -> Path | None:
    """Publishes a library (what loads it does not mind the seal behind it); its path, or None without a directory."""
    folder = _usable(create=True)
    return None if folder is None else _kept(folder, key, {f"{key}.so": _seal(key, data, {"arch": HOST})})


def untrusted() -> str | None:
    """Why no library may be loaded from the directory, in a sentence; None where it may. Makes the directory.

    A library is a part of the process that loads it, so nobody else may be able to put one in its place.
    """
    folder = _usable(create=True)
    return "there is no cache directory to keep it in" if folder is None else insecure(folder)


@contextlib.contextmanager
def alone(key: str, done: Callable[[], bool], seconds: float) -> Iterator[None]:
    """Within it no other process is, for the same key, but where files cannot be locked, or ``seconds`` were waited.

    It waits no longer either when what it waits for is ``done``. The lock ends with the process that holds it, and is
    not its children's.
    """
    folder = _usable(create=True)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            if folder is not None:
                file = held.enter_context(open(folder / f".{key}.lock", "w"))
                until = time.monotonic() + seconds
                while True:
                    try:
                        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except (BlockingIOError, PermissionError):
                        if done() or time.monotonic() > until:
                            break
                    time.sleep(0.2)
        yield


def _publish(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _sweep(folder: Path) -> None:
    """Removes what killed processes left behind, once per process."""
    global _swept
    with _state_lock.now:
        if _swept:
            return
        _swept = True
    oldest = time.time() - _STALE_SECONDS
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


# --- the limit -------------------------------------------------------------------------------------------------------


def _make_room(folder: Path, key: str, written: int) -> None:
    """Removes the entries that were used longest ago where there is more than may be, but for the one just written.

    Temporary files and locks stay: another process has them. What is removed while another reads it, that has read, or
    compiles again.
    """
    global _uncounted
    most = most_bytes()
    with _state_lock.now:
        _uncounted += written
        if _uncounted < most * _COUNTED_EVERY:
            return
        _uncounted = 0
    entries: dict[str, list[tuple[float, int, Path]]] = {}
    for path in _files(folder):
        if path.suffix in _KEPT:
            with contextlib.suppress(OSError):  # removed meanwhile
                found = path.stat()
                entries.setdefault(path.stem, []).append((found.st_mtime, found.st_size, path))
    total = sum(size for files in entries.values() for _, size, _ in files)
    if total <= most:
        return
    entries.pop(key, None)
    for files in sorted(entries.values(), key=lambda files: max(used for used, *_ in files)):
        for _, size, path in files:
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
        if total <= most * _EMPTIED_TO:
            break


# --- what the command shows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """What a cache directory holds."""

    folder: Path | None
    """None when ``UPCONV_CACHE`` is off."""
    problem: str | None
    """Why the directory is not used; None when it is, or does not exist yet."""
    entries: int = 0
    bytes: int = 0
    """Of all files, sources included."""
    archs: tuple[str, ...] = ()
    newest: float | None = None
    """Seconds since the epoch."""


_KEPT = ".cubin", ".cu", ".so"


def _files(folder: Path) -> list[Path]:
    """The files that are ours by their names: entries, sources, libraries, locks and temporary files."""
    digits = set("0123456789abcdef")

    def ours(path: Path) -> bool:
        if path.suffix in (".tmp", ".lock"):
            return path.name.startswith(".")
        return path.suffix in _KEPT and len(path.stem) == 64 and set(path.stem) <= digits

    return sorted(path for path in folder.iterdir() if ours(path))


def contents() -> Contents:
    """What the directory holds; warns about nothing."""
    try:
        folder = directory()
        if folder is None:
            return Contents(None, "UPCONV_CACHE is off")
        if not folder.exists():
            return Contents(folder, None)
        problem = _refusal(folder.stat())
        if problem:
            return Contents(folder, problem)
        files = _files(folder)
    except (OSError, ValueError) as error:
        return Contents(_named(), _cause(error))
    entries, size, newest, archs = 0, 0, None, set()
    for path in files:
        try:
            found = path.stat()
            size += found.st_size
            if path.suffix != ".cubin":
                continue
            opened = _open(path.read_bytes(), path.stem)
        except OSError:  # removed meanwhile
            continue
        if opened is not None:
            entries += 1
            archs.add(str(opened[1]["arch"]))
            newest = max(newest or 0.0, found.st_mtime)
    targets = sorted(archs, key=lambda arch: (int(arch.rstrip("af")), arch))
    return Contents(folder, None, entries, size, tuple(targets), newest)


def clear() -> int:
    """Removes every entry, source, library, lock and temporary file, and nothing else; how many files went.

    Errors: OSError; ValueError, that of `directory`.
    """
    folder = directory()
    if folder is None or not folder.is_dir():
        return 0
    removed = 0
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed += 1
    return removed
