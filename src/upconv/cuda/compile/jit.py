"""From a file of ``cuda/kernels`` and constants to a loaded kernel. Knows no convolution.

`instance` puts a source together. `cubin` compiles it (``nvrtc``) once: the latest cubins are kept in memory, more of
them on disk (``cache``). `kernel` loads it (``driver``), and what is loaded stays.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from upconv import forks
from upconv.cuda.compile import cache, driver, nvrtc
from upconv.cuda.compile.driver import Kernel
from upconv.problem import Precision

CONFIG = "Config"
"""The struct of constants by which a source's templates are instantiated."""
_PRECISIONS: tuple[Precision, ...] = "tf32", "ieee", "fp16", "bf16", "fp64"
PRECISIONS = {kind: i for i, kind in enumerate(_PRECISIONS)}
"""`Precision` of kernels/number.cuh."""
KERNELS = Path(__file__).parent.parent / "kernels"

_QUOTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)".*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.MULTILINE)  # NVRTC warns of it outside a header
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z")
_LINE = re.compile(r'^#line \d+ "([^"\n]+)"\n', re.MULTILINE)
_FIRST = re.compile(r'^#line 1 "([^"\n]+)"\n', re.MULTILINE)
_SECTION = re.compile(rb"\0\.text\.(\w+)(?=\0)")
_TEMPLATE = re.compile(rf"_Z(\d+)(\w+?)I(?:\d+\w+?I)?{len(CONFIG)}{CONFIG}E")
_ENTRIES = "// entries: "

Constant = Any
"""A bool, an integer, a float, or a tuple of some, which becomes an array."""


# --- sources ---------------------------------------------------------------------------------------------------------


def instance(file: str, constants: Mapping[str, Constant], entries: Sequence[str], more: Sequence[str] = ()) -> str:
    """The text of ``kernels/<file>``, whose kernels are templates over a struct of constants, with such a struct.

    ``more``: files behind it, which have other kernels of the struct. Every ``#include "..."`` is put in once, and must
    not depend on an ``#if``. Includes in angle brackets stay. ``#line`` keeps NVRTC's messages at the files' own lines.
    ``entries``: the kernels that are wanted, each a template's instance such as ``sum<Config>``.

    Errors: ValueError for a name that is no identifier; FileNotFoundError for a file that ``kernels`` does not have.
    """
    text = _whole(*(KERNELS / one for one in (file, *more)))
    return f"{_ENTRIES}{'; '.join(entries)}\n{struct_of(CONFIG, constants)}\n{text}"


def struct_of(name: str, constants: Mapping[str, Constant]) -> str:
    """C++ of a struct of constants. Errors: ValueError for a name that is no identifier."""
    for one in (name, *constants):
        if not _IDENTIFIER.match(one):
            raise ValueError(f"constants must have identifiers for names; got {one!r}")
    lines = "".join(f"  static constexpr {_declared(of, value)};\n" for of, value in constants.items())
    return f"struct {name} {{\n{lines}}};\n"


def _declared(name: str, value: Constant) -> str:
    sizes, one = "", value
    while isinstance(one, tuple):
        sizes, one = f"{sizes}[{len(one)}]", one[0]
    if isinstance(one, int) and not isinstance(one, bool):
        kind = "int" if abs(one) < 2**31 else "long long"
    else:
        kind = type(one).__name__
    return f"{kind} {name}{sizes} = {_literal(value)}"


def _literal(value: Constant) -> str:
    if isinstance(value, tuple):
        return "{" + ", ".join(map(_literal, value)) + "}"
    return (
        str(value).lower() if isinstance(value, bool) else f"{value!r}f" if isinstance(value, float) else f"{value:d}"
    )


def entries_of(text: str) -> tuple[str, ...]:
    """The kernels that an `instance` is to have; none of another text."""
    head = text.partition("\n")[0]
    return tuple(head.removeprefix(_ENTRIES).split("; ")) if head.startswith(_ENTRIES) else ()


def parts_of(text: str) -> tuple[str, str]:
    """Of an `instance` its struct of constants, and the file in ``kernels`` that it was made of."""
    struct_text, _, rest = text.partition("\n")[2].partition("\n};\n")
    found = _LINE.search(rest)
    assert found is not None, text
    return f"{struct_text}\n}};\n", found[1]


def files_of(text: str) -> tuple[str, ...]:
    """The files in ``kernels`` that an `instance` has, in the order in which they begin."""
    return tuple(_FIRST.findall(text))


@functools.cache
def _whole(*paths: Path) -> str:
    """Files with those that they include, which do not change while they are in use."""
    seen: set[str] = set()
    return "\n".join(_inline(path, seen) for path in paths)


def _inline(path: Path, seen: set[str]) -> str:
    seen.add(path.name)
    text = _ONCE.sub("", path.read_text(encoding="utf-8"))

    def put(found: re.Match[str]) -> str:
        name = found[1]
        if name in seen:
            return ""
        back = text.count("\n", 0, found.start()) + 2
        return f'{_inline(path.with_name(name), seen)}\n#line {back} "{path.name}"'

    return f'#line 1 "{path.name}"\n' + _QUOTED.sub(put, text)


# --- machine code ----------------------------------------------------------------------------------------------------

_lock = forks.Lock()
_cubins: dict[str, Future[bytes]] = {}
"""The latest, which are loaded soon, and those that a thread compiles; of the others the disk has most."""
_MOST_CUBINS = 256


def cubin(source: str, arch: str, label: str = "kernel") -> bytes:
    """The machine code for ``sm_<arch>``: from memory, else from disk, else compiled.

    ``label`` names the source in messages. Threads that ask for the same code compile it once. Errors: CompileError;
    RuntimeError when NVRTC cannot be used, with `nvrtc.unavailable`'s sentence.
    """
    nvrtc.require()
    name = _name(source, arch)
    with _lock.now:
        found = _cubins.get(name)
        if found is None:
            mine = _cubins[name] = Future()
    if found is not None:
        return found.result()
    try:
        kept = cache.read(name)
        if kept is not None:
            code = kept[1]
            cache.tell(f"loaded {label} for sm_{arch} (cached)")
        else:
            start = time.perf_counter()
            code = built(source, arch, label).code
            cache.tell(f"compiled {label} for sm_{arch} in {time.perf_counter() - start:.1f} s")
            cache.write(name, code)
    except BaseException as error:
        with _lock.now:
            _cubins.pop(name, None)
        mine.set_exception(error)
        raise
    mine.set_result(code)
    with _lock.now:
        while len(_cubins) > _MOST_CUBINS:
            del _cubins[next(iter(_cubins))]
    return code


def _name(source: str, arch: str) -> str:
    return f"sm_{arch}-{nvrtc.key(source, arch)}.cubin"


def built(source: str, arch: str, label: str = "kernel") -> nvrtc.Built:
    """The machine code with its PTX and NVRTC's log, never cached. Errors: those of `cubin`."""
    nvrtc.require()
    try:
        return nvrtc.build(source, arch, label, entries_of(source))
    except nvrtc.CompileError as error:
        path = cache.write(f"{nvrtc.key(source, arch)}.cu", source.encode(), seal=False)
        raise nvrtc.CompileError(f"{error}\nsource: {path or 'not kept'}") from None


# --- loaded kernels --------------------------------------------------------------------------------------------------

_libraries: dict[str, Any] = {}
"""Cubins as the driver has loaded them."""
_kernels: dict[tuple[str, str], Kernel] = {}
_load_lock = forks.Lock()


def kernels_of(code: bytes) -> dict[str, str]:
    """The symbols of a cubin's kernels by their names in the source, where they may be templates: from its sections."""
    found = {}
    for symbol in (name.decode() for name in _SECTION.findall(code)):
        template = _TEMPLATE.match(symbol)
        found[template[2] if template and len(template[2]) == int(template[1]) else symbol] = symbol
    return found


def kernel(source: str, entry: str, arch: str, label: str = "kernel") -> Kernel:
    """The kernel ``entry`` of a source, compiled and loaded on first use.

    Errors: those of `cubin`; ValueError for an entry that the source does not have; RuntimeError from the driver.
    """
    nvrtc.require()
    name = _name(source, arch)
    found = _kernels.get((name, entry))
    if found is not None:
        return found
    code = cubin(source, arch, label)
    symbols = kernels_of(code)
    if entry not in symbols:
        raise ValueError(f"entry must be one of {label}'s, {', '.join(symbols) or 'which has none'}; got {entry!r}")
    with _load_lock.now:
        if name not in _libraries:
            _libraries[name] = driver.library(code)
        found = _kernels.get((name, entry))
        if found is None:
            found = _kernels[name, entry] = driver.kernel(_libraries[name], entry, symbols[entry])
    return found


def forget() -> None:
    """Forgets machine code and kernels, which stay loaded: the next call has them from disk, or compiles them."""
    for kept in (_kernels, _cubins, _libraries):
        kept.clear()


# A child has no thread that compiles, nor one that is about to give the lock of what it compiled back.
forks.in_child(lambda: _cubins.clear())
