"""Files that a run writes and reads: whether they can be written is known ahead of it, and they change in one step."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any


def writable(option: str, text: str, suffixes: Sequence[str] = ()) -> Path:
    """The path of a file to be written later, tried ahead of a long run.

    A temporary file is opened beside it, as `publish` will, and removed. A file that exists stays as it is.

    Args:
        option: the option that names the path, for the error.
        text: the path.
        suffixes: those that the path may have, in lower case; any for none.

    Raises:
        ValueError: the path has another suffix, or cannot be written, in one sentence.
    """
    path = Path(text)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} must end in {' or '.join(suffixes)}; got {text!r}")
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"{option} must be a file in a folder that exists; got {text!r}")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if path.is_file() or not path.exists():
            _beside(path).unlink()
    except OSError as error:
        raise ValueError(f"{option} cannot be written: {error.strerror}; got {text!r}") from None
    return path


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a temporary file beside ``path``, then moves it there: a reader sees the old or the new file.

    The temporary file ends as ``path`` does. When ``write`` fails it is removed, and ``path`` stays as it was. A link
    stays one. What is no file (a device, a pipe) is written through.
    """
    file = path.is_file() or not path.exists()
    temporary = _beside(path) if file else _beside(Path(gettempdir(), f"upconv{path.suffix}"))
    try:
        write(temporary)
        if not file:
            path.write_bytes(temporary.read_bytes())
        else:
            if path.exists():
                shutil.copymode(path, temporary)
            os.replace(temporary, os.path.realpath(path))
    finally:
        temporary.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """An empty temporary file in the folder of a file, or of what a link names."""
    real = Path(os.path.realpath(path))
    found = real.with_name(f".{real.stem[:40]}-{os.getpid()}-{threading.get_ident()}{real.suffix}")
    found.touch(exist_ok=False)
    return found


def save(found: Mapping[str, Any], path: Path) -> None:
    """Writes a report as JSON, in one step. Errors: OSError; ValueError for numbers that are not finite."""
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    publish(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read(path: str | Path) -> Any:
    """What a JSON file holds. Errors: ValueError, one sentence, where it cannot be read or is no JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
