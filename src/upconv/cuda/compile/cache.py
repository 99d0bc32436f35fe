"""Compiled code on disk: files of one directory, private to the user, checked on every read, read without locks.

An entry ends with a digest of its name and what is ahead of it, which tools and loaders for ELF files do not mind. So
one `os.replace` publishes it, and a file that a crash cut short is found out. Kernels are
``sm_<arch>-<key>.cubin``, libraries for the host ``<key>.so``, and sources that did not compile ``<key>.cu``.

``UPCONV_CACHE_DIR`` names the directory by an absolute path; else it is ``$XDG_CACHE_HOME/upconv`` or
``~/.cache/upconv``. It holds about ``UPCONV_CACHE_BYTES`` at most, else 2 GiB: what was used longest ago is removed.
``UPCONV_CACHE=off`` keeps kernels in memory only.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import stat
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size
_MOST_BYTES = 2 << 30
_TIDIED_EVERY = 64  # writes of a process
_DAY = 86400.0  # to which the time of the last use is kept; a temporary file so old belongs to a process that died

_OURS = re.compile(r"(?:sm_(\w+)-)?[0-9a-f]{64}\.(?:cubin|so|cu)|\..*\.(?:tmp|lock)")

_writes = itertools.count()
_warned: list[str] = []


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


def usable(create: bool = True) -> Path | None:
    """The directory when it can be trusted; None, with one warning per process, when not.

    Errors: ValueError, those of `directory` and `most_bytes`.
    """
    folder = None
    try:
        folder = directory()
        if folder is None:
            return None
        most_bytes()
        if create:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        reason = _refusal(folder.stat())
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = _cause(error)
    if reason:
        _warn(folder, reason)
        return None
    return folder


def _cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _warn(folder: Path | None, reason: str) -> None:
    if _warned:
        return
    _warned.append(reason)
    warnings.warn(
        f"upconv keeps compiled kernels in memory only, since its cache directory {folder or '~/.cache/upconv'} cannot "
        f"be used: {reason}; UPCONV_CACHE_DIR names another, UPCONV_CACHE=off silences this",
        RuntimeWarning,
        stacklevel=2,
    )


def tell(line: str) -> None:
    """Says something on stderr if ``UPCONV_DEBUG`` is set: what was compiled, and what came from the cache."""
    if os.environ.get("UPCONV_DEBUG", "") not in ("", "0"):
        sys.stderr.write(f"upconv: {line}\n")


# --- entries ---------------------------------------------------------------------------------------------------------


def _sealed(name: str, data: bytes) -> bytes:
    return data + hashlib.sha256(name.encode() + data).digest()


def read(name: str) -> tuple[Path, bytes] | None:
    """An entry's path and content, which is noted as used; one that is not whole is deleted. None without one."""
    folder = usable(create=False)
    if folder is None:
        return None
    path = folder / name
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(folder, _cause(error))
        return None
    data = whole[:-_DIGEST]
    good = len(whole) >= _DIGEST and whole == _sealed(name, data)
    with contextlib.suppress(OSError):  # a directory that is read-only
        if not good:
            path.unlink()
        elif time.time() - path.stat().st_mtime > _DAY:
            os.utime(path)
    return (path, data) if good else None


def write(name: str, data: bytes, seal: bool = True) -> Path | None:
    """Publishes an entry, or without its ``seal`` a text to look at.

    Returns its path; None without a directory, or with one warning per process where that cannot be written.
    """
    folder = usable()
    if folder is None:
        return None
    try:
        _publish(folder / name, _sealed(name, data) if seal else data)
        if next(_writes) % _TIDIED_EVERY == 0:
            _tidy(folder)
    except OSError as error:
        _warn(folder, _cause(error))
        return None
    return folder / name


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


def _tidy(folder: Path) -> None:
    """Removes what killed processes left behind and, above the limit, the entries that were used longest ago.

    What is removed while another process reads it, that has read, or compiles again.
    """
    entries: list[tuple[float, int, Path]] = []
    for path, found in _files(folder):
        if not path.name.startswith("."):
            entries.append((found.st_mtime, found.st_size, path))
        elif path.suffix == ".tmp" and found.st_mtime < time.time() - _DAY:
            path.unlink(missing_ok=True)
    most, total = most_bytes(), sum(size for _, size, _ in entries)
    if total <= most:
        return
    for _, size, path in sorted(entries)[:-1]:
        path.unlink(missing_ok=True)
        total -= size
        if total <= most:
            return


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The files that are ours by their names: entries, sources, locks and temporary files."""
    found = []
    for path in sorted(folder.iterdir()):
        if _OURS.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found.append((path, path.stat()))
    return found


# --- for people ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """What a cache directory holds."""

    folder: Path | None
    """None when ``UPCONV_CACHE`` is off."""
    problem: str | None
    """Why the directory is not used; None when it is, or does not exist yet."""
    entries: int = 0
    """Kernels."""
    bytes: int = 0
    """Of all files."""
    archs: tuple[str, ...] = ()
    newest: float | None = None
    """Seconds since the epoch, of the last kernel."""


def contents() -> Contents:
    """What the directory holds; warns about nothing."""
    folder = None
    try:
        folder = directory()
        if folder is None:
            return Contents(None, "UPCONV_CACHE is off")
        most_bytes()
        if not folder.exists():
            return Contents(folder, None)
        problem = _refusal(folder.stat())
        if problem:
            return Contents(folder, problem)
        files = _files(folder)
    except (OSError, ValueError) as error:
        return Contents(folder, _cause(error))
    kernels = [(path, found) for path, found in files if path.suffix == ".cubin"]
    archs = {name[1] for path, _ in kernels if (name := _OURS.fullmatch(path.name)) and name[1]}
    return Contents(
        folder,
        None,
        len(kernels),
        sum(found.st_size for _, found in files),
        tuple(sorted(archs, key=lambda arch: (int(arch.rstrip("af")), arch))),
        max((found.st_mtime for _, found in kernels), default=None),
    )


def clear() -> int:
    """Removes every entry, source, lock and temporary file, and nothing else; how many files went.

    Errors: OSError; ValueError, that of `directory`.
    """
    folder = directory()
    if folder is None or not folder.is_dir():
        return 0
    files = _files(folder)
    for path, _ in files:
        path.unlink(missing_ok=True)
    return len(files)
