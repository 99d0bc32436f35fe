"""From a file of ``cuda/kernels`` and constants to a loaded kernel. Knows no convolution.

`instance` puts a source together. `cubin` compiles it (``nvrtc``) once: the latest cubins are kept in memory, more of
them on disk (``cache``). `kernel` loads it (``driver``), and what is loaded stays. ``UPCONV_DEBUG=1`` tells on stderr
what was compiled and what came from the cache.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from upconv import forks
from upconv.cuda.compile import cache, driver, elf, nvrtc
from upconv.cuda.compile.driver import Kernel

CONFIG = elf.CONFIG
KERNELS = Path(__file__).parents[1] / "kernels"

_QUOTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)".*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.MULTILINE)  # NVRTC warns of it outside a header
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z")
_LINE = re.compile(r'^#line \d+ "([^"\n]+)"\n', re.MULTILINE)
_CONSTANT = re.compile(r"^  static constexpr [\w ]+? (\w+)(?:\[\d+\])* = (.*);$", re.MULTILINE)
_ENTRIES = "// entries: "

Constant = Any
"""A bool, an integer, a float, or a tuple of some, which becomes an array."""


def tell(line: str) -> None:
    """Says something on stderr if ``UPCONV_DEBUG`` is set."""
    if os.environ.get("UPCONV_DEBUG", "") not in ("", "0"):
        sys.stderr.write(f"upconv: {line}\n")


# --- sources ---------------------------------------------------------------------------------------------------------


def instance(file: str, constants: Mapping[str, Constant], entries: Sequence[str]) -> str:
    """The text of ``kernels/<file>``, whose kernels are templates over a struct of constants, with such a struct.

    Every ``#include "..."`` is put in once, and must not depend on an ``#if``. Includes in angle brackets stay.
    ``#line`` keeps NVRTC's messages at the files' own lines. ``entries``: the kernels that are wanted, each a
    template's instance such as ``sum<Config>``.

    Errors: ValueError for a name that is no identifier; FileNotFoundError for a file that ``kernels`` does not have.
    """
    return f"{_ENTRIES}{'; '.join(entries)}\n{struct_of(CONFIG, constants)}\n{_inline(file, set())}"


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
    return str(value).lower() if isinstance(value, bool) else f"{value!r}f" if isinstance(value, float) else str(value)


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


def constants_of(text: str) -> dict[str, str]:
    """The constants of an `instance` as its text has them; none of another text."""
    return dict(_CONSTANT.findall(text.partition("\n};\n")[0])) if text.startswith(_ENTRIES) else {}


def with_includes(file: str, seen: set[str]) -> Iterator[str]:
    """The texts of ``kernels/<file>`` and of what it includes of ``kernels``, which come before it.

    Those ``seen`` are left out; the set grows. Errors: FileNotFoundError.
    """
    if file in seen:
        return
    seen.add(file)
    text = (KERNELS / file).read_text(encoding="utf-8")
    for included in _QUOTED.findall(text):
        yield from with_includes(included, seen)
    yield _QUOTED.sub("", _ONCE.sub("", text)).strip() + "\n"


def _inline(file: str, seen: set[str]) -> str:
    seen.add(file)
    text = _ONCE.sub("", (KERNELS / file).read_text(encoding="utf-8"))

    def put(found: re.Match[str]) -> str:
        name = found[1]
        if name in seen:
            return ""
        back = text.count("\n", 0, found.start()) + 2
        return f'{_inline(name, seen)}\n#line {back} "{file}"'

    return f'#line 1 "{file}"\n' + _QUOTED.sub(put, text)


# --- machine code ----------------------------------------------------------------------------------------------------

_lock = forks.Lock()
_busy: dict[str, threading.Lock] = {}
_cubins: dict[str, bytes] = {}
"""The latest, which are loaded soon; of the others the disk has most."""
_MOST_CUBIN_BYTES = 128 << 20


def cubin(source: str, arch: str, label: str = "kernel", keep: bool = True) -> bytes:
    """The machine code for ``sm_<arch>``: from memory, else from disk, else compiled.

    ``label`` names the source in messages. ``keep``: the code is looked for on disk, and kept there. Threads that ask
    for the same code compile it once. Errors: CompileError; RuntimeError when NVRTC cannot be used, with
    `nvrtc.unavailable`'s sentence.
    """
    nvrtc.require()
    key = nvrtc.key(source, arch)
    found = _cubins.get(key)
    if found is not None:
        return found
    with _lock.now:
        busy = _busy.setdefault(key, threading.Lock())
    try:
        with busy:
            found = _cubins.get(key) or (_from_disk(arch, label, key) if keep else None)
            if found is None:
                found = _compiled(source, arch, label, key, keep)
            _remember(key, found)
    finally:
        with _lock.now:
            _busy.pop(key, None)
    return found


def at_hand(source: str, arch: str, label: str = "kernel") -> bool:
    """Whether `cubin` would compile nothing. Errors: RuntimeError when NVRTC cannot be used."""
    nvrtc.require()
    key = nvrtc.key(source, arch)
    if key in _cubins:
        return True
    kept = _from_disk(arch, label, key)
    if kept is not None:
        _remember(key, kept)
    return kept is not None


def _remember(key: str, code: bytes) -> None:
    """Keeps a cubin in memory, and of the others no more than there is room for."""
    with _lock.now:
        _cubins.pop(key, None)
        _cubins[key] = code
        while sum(map(len, _cubins.values())) > _MOST_CUBIN_BYTES and len(_cubins) > 1:
            del _cubins[next(iter(_cubins))]


def _from_disk(arch: str, label: str, key: str) -> bytes | None:
    kept = cache.read(key, arch)
    if kept is None:
        return None
    tell(f"loaded {label} for sm_{arch} (cached)")
    return kept[0]


def _compiled(source: str, arch: str, label: str, key: str, keep: bool) -> bytes:
    start = time.perf_counter()
    code, _, log = built(source, arch, label)
    seconds = time.perf_counter() - start
    tell(f"compiled {label} for sm_{arch} in {seconds:.1f} s")
    if keep:
        meta = {
            "arch": arch,
            "label": label,
            "constants": constants_of(source),
            "nvrtc": nvrtc.version(),
            "flags": list(nvrtc.FLAGS),
            "seconds": round(seconds, 3),
            "serialised": nvrtc.serialised(log),
        }
        cache.write(key, code, source, meta)
    return code


def built(source: str, arch: str, label: str = "kernel", ptx: bool = False) -> nvrtc.Built:
    """The machine code with its PTX and NVRTC's log, or PTX alone, never cached. Errors: those of `cubin`."""
    nvrtc.require()
    try:
        return nvrtc.build(source, arch, label, entries_of(source), ptx)
    except nvrtc.CompileError as error:
        path = cache.keep_source(nvrtc.key(source, arch), source)
        constants = " ".join(f"{name}={value}" for name, value in constants_of(source).items())
        raise nvrtc.CompileError(f"{error}\nsource: {path or 'not kept'}\nconstants: {constants or '(none)'}") from None


# --- loaded kernels --------------------------------------------------------------------------------------------------

_libraries: dict[str, Any] = {}
_kernels: dict[tuple[str, str], Kernel] = {}
_load_lock = forks.Lock()


def kernel(source: str, entry: str, arch: str, label: str = "kernel", keep: bool = True) -> Kernel:
    """The kernel ``entry`` of a source, compiled and loaded on first use.

    Errors: those of `cubin`; ValueError for an entry that the source does not have; RuntimeError from the driver.
    """
    nvrtc.require()
    key = nvrtc.key(source, arch)
    found = _kernels.get((key, entry))
    if found is not None:
        return found
    code = cubin(source, arch, label, keep)
    with _load_lock.now:
        found = _kernels.get((key, entry))
        if found is None:
            found = _kernels[key, entry] = _load(code, entry, key, label)
    return found


def _load(code: bytes, entry: str, key: str, label: str) -> Kernel:
    needs = elf.resources(code)
    symbols = {elf.entry_of(symbol): symbol for symbol in needs}
    if entry not in symbols:
        raise ValueError(f"entry must be one of {label}'s, {', '.join(symbols) or 'which has none'}; got {entry!r}")
    if key not in _libraries:
        _libraries[key] = driver.library(code)
    return driver.kernel(_libraries[key], symbols[entry], needs[symbols[entry]])


def forget() -> None:
    """Forgets machine code and kernels, which stay loaded: the next call has them from disk, or compiles them."""
    for kept in (_kernels, _cubins, _libraries):
        kept.clear()


def _forked() -> None:
    """A child has no thread that compiles."""
    _busy.clear()


forks.in_child(_forked)
