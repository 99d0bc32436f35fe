"""Arguments that several commands share: how they are read, and the one sentence of those that do not fit."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn, TextIO, TypeVar, cast

import torch
import typer
from rich.console import Console
from typer import Option

from upconv.problem import PRECISIONS, dtype_name

Choice = TypeVar("Choice", bound=str)
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
DTYPES: dict[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in PRECISIONS}

DEVICE = Option(None, "--device", metavar="cpu|cuda[:i]", help="Where to run; default: CUDA if there is one.")
PRECISION = Option(None, "--precision", help="Default of float32: ieee, on CUDA tf32.")
MODEL = Option(None, "--model", metavar="FILE.py:NAME", help="A module, or what makes one when called.")


def stop(message: object, code: int = 2) -> NoReturn:
    """Ends the command with one sentence on stderr."""
    print(f"upconv: {message}", file=sys.stderr)
    raise typer.Exit(code)


def console() -> Console:
    """The console of stdout: as wide as the terminal, and without one so wide that nothing is cut or broken."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(file=_unpadded(sys.stdout), highlight=False, width=10_000)


def _unpadded(file: TextIO) -> TextIO:
    """A file that gets lines without the spaces by which tables fill them, which a pager would wrap."""

    class Unpadded:
        def write(self, text: str) -> int:
            return file.write(re.sub(r" +(?=\n)", "", text))

        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

    return cast(TextIO, Unpadded())


def writable(option: str, text: str, suffixes: Sequence[str] = ("",)) -> Path:
    """The path of a file that is written after a long run, opened once ahead of it.

    Args:
        option: the option that names the path, for the error.
        text: the path.
        suffixes: those that the path may have, in lower case; any by default.

    Raises:
        ValueError: the path has another suffix, or cannot be written, in one sentence.
    """
    path = Path(text)
    if not path.name.lower().endswith(tuple(suffixes)):
        raise ValueError(f"{option} must end in {' or '.join(suffixes)}; got {text!r}")
    try:
        new = not os.path.lexists(path)  # what a link names may be missing, and the link stays
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option} cannot be written: {error.strerror}; got {text!r}") from None
    return path


def repeated(name: str, allowed: Sequence[str], help: str) -> Any:
    """An option that may be given several times, each time with one of these values."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise typer.BadParameter(f"must be one of {', '.join(allowed)}; got {text!r}")
        return text

    return Option([], name, parser=parse, metavar=name[2:].upper(), help=f"{', '.join(allowed)}; repeated. {help}")


def several(values: Sequence[str], allowed: Sequence[Choice]) -> list[Choice]:
    """Repeated values, without doubles, in ``allowed``'s order; ``all`` stands for every one of them."""
    return [choice for choice in allowed if choice in values or "all" in values]


def device_of(text: str | None) -> torch.device:
    """The device of ``--device``; without it a CUDA device where there is one, else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text is None:
        text = "cuda" if count else "cpu"
    if text == "cpu":
        return torch.device("cpu")
    found = re.fullmatch(r"cuda(?::(\d+))?", text)
    if not found or int(found[1] or 0) >= count:
        raise ValueError(f"--device must be cpu, or a CUDA device of this machine like cuda:0; got {text!r}")
    return torch.device("cuda", int(found[1] or 0))


def network(text: str) -> torch.nn.Module:
    """The model that ``file.py:Name`` or ``package.module:Name`` names, made if it is a class or a function.

    Raises:
        ValueError: there is no such file or name, it makes no module, or the user's code raises; in one sentence.
    """
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(f"--model must be FILE.py:NAME or a module's name and NAME; got {text!r}")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"--model must name a file that exists; got {text!r}")
    try:
        found = getattr(module_of(place), name)
        made = found if isinstance(found, torch.nn.Module) else found()
    except Exception as error:  # whatever the user's code raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"--model {text} cannot be made: {reason}") from error
    if not isinstance(made, torch.nn.Module):
        raise ValueError(f"--model must be a torch.nn.Module or make one; got {text!r}, a {type(made).__name__}")
    return made


def module_of(place: str) -> ModuleType:
    """A module by its file or its name."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None and spec.loader is not None  # both exist for every path that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look there
    sys.path.insert(0, str(Path(place).resolve().parent))
    spec.loader.exec_module(module)
    return module
