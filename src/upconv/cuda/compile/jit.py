"""CUDA source and macros -> cubin -> loaded kernel. Knows no convolution.

NVRTC compiles; its latest cubins are kept in memory, more of them on disk (``cache``), and what is loaded stays. NVRTC,
the driver and their Python bindings are imported on first use, so that importing this module needs none of them.
``UPCONV_DEBUG=1`` tells on stderr what was compiled and what came from the cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from upconv import forks
from upconv.cuda.compile import cache

KERNELS = Path(__file__).parents[1] / "kernels"

_SCHEMA = "2"  # of the key; a new one leaves all old entries unused
_FLAGS = ("-std=c++17",)


class CompileError(RuntimeError):
    """NVRTC rejected a source. The message: one sentence, NVRTC's log, the source's path and the macros."""


@lru_cache(maxsize=1)
def unavailable() -> str | None:
    """None when CUDA's Python bindings and NVRTC can be used, else a sentence that says why not."""
    try:
        _nvrtc_version()
    except ImportError as error:
        return f"CUDA kernels need the package cuda-bindings, which cannot be imported: {error}."
    except Exception as error:  # each release of the bindings has its own for a library that is not found
        return f"CUDA kernels need NVRTC, which cannot be loaded: {' '.join(str(error).split())}."
    return None


def _available() -> None:
    """Errors: RuntimeError with `unavailable`'s sentence."""
    reason = unavailable()
    if reason:
        raise RuntimeError(reason)


def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@lru_cache(maxsize=1)
def _nvrtc_version() -> str:
    error, major, minor = _nvrtc().nvrtcVersion()
    if error:
        raise RuntimeError(f"nvrtcVersion returned {error!r}")
    return f"{major}.{minor}"


def _tell(line: str) -> None:
    if os.environ.get("UPCONV_DEBUG", "") not in ("", "0"):
        sys.stderr.write(f"upconv: {line}\n")


# --- source ----------------------------------------------------------------------------------------------------------

_QUOTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)".*$', re.MULTILINE)
_ANGLED = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>", re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.MULTILINE)  # NVRTC warns of it outside a header
_DEFINE = re.compile(r"[A-Za-z_]\w*\Z")
_LINE = re.compile(r'^#line \d+ "([^"\n]+)"\n', re.MULTILINE)
_HEAD = "// macros\n"
_ENTRIES = "// entries: "
CONFIG = "Config"
"""The struct of constants of which a source's templates are instantiated."""


def source(file: str, macros: Mapping[str, int | float | str]) -> str:
    """The text of ``kernels/<file>``: macros as ``#define`` on top, every ``#include "..."`` put in once.

    An include must not depend on an ``#if``. Includes in angle brackets stay. ``#line`` keeps NVRTC's messages at the
    files' own lines.

    Errors: ValueError for a macro that is no identifier or whose value has a line break; FileNotFoundError for a file
    that ``kernels`` does not have.
    """
    lines = []
    for name, value in macros.items():
        text = str(int(value)) if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)
        if not _DEFINE.match(name) or "\n" in text:
            raise ValueError(f"macros must map identifiers to text of one line; got {name!r}: {value!r}")
        lines.append(f"#define {name} {text}\n")
    return _HEAD + "".join(lines) + _inline(file, set())


Constant = Any
"""A bool, an integer, a float, or a tuple of some, which becomes an array."""


def instance(file: str, constants: Mapping[str, Constant], entries: Sequence[str]) -> str:
    """The text of ``kernels/<file>``, whose kernels are templates over a struct of constants, with such a struct.

    ``entries``: the kernels that are wanted, each a template's instance such as ``sum<Config>``. Errors: as `source`.
    """
    return f"{_ENTRIES}{'; '.join(entries)}\n{struct_of(CONFIG, constants)}\n{_inline(file, set())}"


def struct_of(name: str, constants: Mapping[str, Constant]) -> str:
    """C++ of a struct of constants. Errors: ValueError for a name that is no identifier."""
    for one in (name, *constants):
        if not _DEFINE.match(one):
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
    """The kernels that an `instance` is to have; none of a `source`."""
    head = text.partition("\n")[0]
    return tuple(head.removeprefix(_ENTRIES).split("; ")) if head.startswith(_ENTRIES) else ()


def parts_of(text: str) -> tuple[str, str]:
    """Of an `instance` its struct of constants, and the file in ``kernels`` that it was made of."""
    struct_text, _, rest = text.partition("\n")[2].partition("\n};\n")
    found = _LINE.search(rest)
    assert found is not None, text
    return f"{struct_text}\n}};\n", found[1]


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


def _macros(text: str) -> dict[str, str]:
    """The macros, or constants, that ``source`` or ``instance`` put on top of a text."""
    if text.startswith(_ENTRIES):
        struct_text = text.partition("\n};\n")[0]
        return dict(re.findall(r"^  static constexpr [\w ]+? (\w+)(?:\[\d+\])* = (.*);$", struct_text, re.MULTILINE))
    if not text.startswith(_HEAD):
        return {}
    found: dict[str, str] = {}
    for line in text[len(_HEAD) :].splitlines():
        if not line.startswith("#define "):
            break
        _, name, *value = line.split(" ", 2)
        found[name] = value[0] if value else ""
    return found


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
    major = _nvrtc_version().split(".")[0]
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


def _key(text: str, arch: str) -> str:
    """The name of a cubin: a digest of everything that decides its content."""
    headers = [part for name in _ANGLED.findall(text) for part in (name, _header_digest(name))]
    digest = hashlib.sha256()
    for part in (_SCHEMA, arch, _nvrtc_version(), str(len(_FLAGS)), *_FLAGS, *headers, text):
        data = part.encode()
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.hexdigest()


# --- compilation -----------------------------------------------------------------------------------------------------

_lock = forks.Lock()
_busy: dict[str, threading.Lock] = {}
_cubins: dict[str, bytes] = {}
"""The latest, which are loaded soon; of the others the disk has most."""
_MOST_CUBIN_BYTES = 128 << 20


def cubin(source: str, arch: str, label: str = "") -> bytes:
    """The machine code for ``sm_<arch>``: from memory, else from disk, else compiled.

    ``label`` names the source in messages. Threads that ask for the same code compile it once. Errors: CompileError;
    RuntimeError when NVRTC cannot be used, with ``unavailable``'s sentence.
    """
    _available()
    return _cubin(source, arch, label, _key(source, arch))


def at_hand(source: str, arch: str, label: str = "") -> bool:
    """Whether `cubin` would compile nothing. Errors: RuntimeError when NVRTC cannot be used."""
    _available()
    key = _key(source, arch)
    if key in _cubins:
        return True
    kept = _from_disk(arch, label or "kernel", key)
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


def _cubin(source: str, arch: str, label: str, key: str, keep: bool = True) -> bytes:
    found = _cubins.get(key)
    if found is not None:
        return found
    with _lock.now:
        busy = _busy.setdefault(key, threading.Lock())
    try:
        with busy:
            found = _cubins.get(key)
            if found is None:
                found = _load_or_compile(source, arch, label or "kernel", key, keep)
                _remember(key, found)
    finally:
        with _lock.now:
            _busy.pop(key, None)
    return found


def _from_disk(arch: str, label: str, key: str) -> bytes | None:
    kept = cache.read(key, arch)
    if kept is None:
        return None
    _tell(f"loaded {label} for sm_{arch} (cached)")
    return kept[0]


def _load_or_compile(source: str, arch: str, label: str, key: str, keep: bool) -> bytes:
    kept = _from_disk(arch, label, key) if keep else None
    if kept is not None:
        return kept
    start = time.perf_counter()
    code, _, log = _compile(source, arch, label, key)
    seconds = time.perf_counter() - start
    _tell(f"compiled {label} for sm_{arch} in {seconds:.1f} s")
    if not keep:
        return code
    meta = {
        "arch": arch,
        "label": label,
        "macros": _macros(source),
        "nvrtc": _nvrtc_version(),
        "flags": list(_FLAGS),
        "seconds": round(seconds, 3),
        "serialised": serialised(log),
    }
    cache.write(key, code, source, meta)
    return code


def ptx(source: str, arch: str, label: str = "") -> str:
    """The PTX for ``compute_<arch>``, never cached. Errors: those of ``cubin``."""
    _available()
    return _compile(source, arch, label or "kernel", _key(source, arch), ptx=True).ptx


def serialised(log: str) -> str | None:
    """Of NVRTC's log the line where ptxas says that it makes each wgmma wait for the one before; None without one."""
    return next((line.strip() for line in log.splitlines() if "instructions are serialized" in line), None)


def built(source: str, arch: str, label: str = "") -> Built:
    """The machine code with its PTX and NVRTC's log, never cached. Errors: those of ``cubin``."""
    _available()
    return _compile(source, arch, label or "kernel", _key(source, arch))


class Built(NamedTuple):
    """What NVRTC makes of a source."""

    code: bytes
    """The machine code; empty where only PTX was asked for."""
    ptx: str
    log: str


def _compile(source: str, arch: str, label: str, key: str, ptx: bool = False) -> Built:
    nvrtc = _nvrtc()
    target = f"compute_{arch}" if ptx else f"sm_{arch}"
    flags = [f"--gpu-architecture={target}", *_FLAGS, *(f"-I{folder}" for folder in _include_folders())]
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), label.encode(), 0, [], [])
    _check(error, "nvrtcCreateProgram")
    try:
        for entry in entries_of(source):
            (error,) = nvrtc.nvrtcAddNameExpression(program, entry.encode())
            _check(error, "nvrtcAddNameExpression")
        (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        if error:
            raise CompileError(_complaint(_text(nvrtc, program), nvrtc, error, source, arch, label, key))
        text = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode()
        code = b"" if ptx else _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return Built(code, text, _text(nvrtc, program))
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


def _text(nvrtc: Any, program: Any) -> str:
    log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    return log.rstrip(b"\0 \n").decode(errors="replace")


def _complaint(log: str, nvrtc: Any, error: Any, source: str, arch: str, label: str, key: str) -> str:
    name = nvrtc.nvrtcGetErrorString(error)[1]
    name = name.decode() if isinstance(name, bytes) else str(name)
    macros = " ".join(f"-D{name}={value}" for name, value in _macros(source).items())
    path = cache.keep_source(key, source)
    return (
        f"NVRTC {_nvrtc_version()} could not compile {label} for sm_{arch} ({name}).\n"
        f"{log or '(NVRTC wrote no log)'}\nsource: {path or 'not kept'}\nmacros: {macros or '(none)'}"
    )


def _check(error: Any, call: str) -> None:
    if error:
        raise RuntimeError(f"{call} returned {error!r}")


# --- what a cubin needs ----------------------------------------------------------------------------------------------


def inspect(cubin: bytes) -> dict[str, tuple[int, int, int]]:
    """Per entry of a cubin: registers per thread, local memory per thread in bytes, static shared memory in bytes.

    Local memory is the stack frame: arrays that are indexed at run time, and spills. Read from the ELF sections, so
    that no GPU is needed. Errors: ValueError for what is no cubin.
    """
    if cache.arch_number(cubin) is None:
        raise ValueError(f"cubin must be an ELF file for CUDA; got {len(cubin)} bytes that start with {cubin[:4]!r}")
    try:
        return {entry_of(symbol): needs for symbol, needs in _resources(cubin).items()}
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise ValueError(f"cubin must be a whole ELF file; got one that is cut or damaged ({error})") from None


_TEMPLATE = re.compile(rf"_Z(\d+)(\w+?)I(?:\d+\w+?I)?{len(CONFIG)}{CONFIG}E")


def entry_of(symbol: str) -> str:
    """The name in the source of a kernel with such a symbol, which may be a template's instance."""
    found = _TEMPLATE.match(symbol)
    return found[2] if found and len(found[2]) == int(found[1]) else symbol


def _resources(elf: bytes) -> dict[str, tuple[int, int, int]]:
    table, count, names_at = (
        *struct.unpack_from("<Q", elf, 0x28),
        *struct.unpack_from("<H", elf, 0x3C),
        *struct.unpack_from("<H", elf, 0x3E),
    )
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + 64 * i) for i in range(count)]

    def text(section: int, offset: int) -> str:
        start = headers[section][4] + offset
        return elf[start : elf.index(b"\0", start)].decode()

    sections = {text(names_at, h[0]): h for h in headers}
    symbols: list[str] = []
    if ".symtab" in sections:
        _, _, _, _, at, size, link, _, _, step = sections[".symtab"]
        symbols = [text(link, struct.unpack_from("<I", elf, at + i * step)[0]) for i in range(size // step)]
    values: dict[int, dict[str, int]] = {0x2F: {}, 0x11: {}}  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
    _, _, _, _, at, size, *_ = sections[".nv.info"]
    end = at + size
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", elf, at)
        at += 4
        if form == 0x04:  # EIFMT_SVAL: the length, then a symbol and a value; other formats have the value in its place
            if attribute in values and length >= 8:
                symbol, value = struct.unpack_from("<II", elf, at)
                values[attribute][symbols[symbol]] = value
            at += length
    entries = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    registers, frames = values[0x2F], values[0x11]
    # From sm_90 on a block's shared memory starts with 1 KB of the system's, which the opt-in maximum leaves out.
    reserved = 1024 if ".nv.reservedSmem.offset0" in symbols else 0
    shared = {
        name: sections[f".nv.shared.{name}"][5] - reserved for name in entries if f".nv.shared.{name}" in sections
    }
    return {name: (registers.get(name, 0), frames.get(name, 0), max(shared.get(name, 0), 0)) for name in entries}


# --- loaded kernels --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Kernel:
    """An entry of a loaded cubin, good for every device of its architecture."""

    name: str
    handle: int
    """A ``CUkernel``, which the driver's launches take in a ``CUfunction``'s place."""
    registers: int
    """Per thread."""
    local_bytes: int
    """Per thread; 0 for a kernel that neither spills nor indexes local arrays."""
    shared_bytes: int
    """Static shared memory of a block."""
    _ready: set[int] = field(default_factory=set, repr=False)

    def ready(self, device: int) -> None:
        """Loads the kernel on the current device, and lets its blocks use all shared memory; the first call does it.

        ``device`` must be the current one. Errors: RuntimeError from the driver.
        """
        if device in self._ready:
            return
        driver = _driver()
        attributes, limits = driver.CUdevice_attribute, driver.CUfunction_attribute
        handle = driver.CUkernel(self.handle)
        with _uncaptured(driver):
            ordinal = _drive(driver.cuDeviceGet, device)
            if not int(_drive(driver.cuCtxGetCurrent)):  # a thread in which PyTorch has called nothing yet
                _drive(driver.cuCtxSetCurrent, _drive(driver.cuDevicePrimaryCtxRetain, ordinal))
            most = _drive(
                driver.cuDeviceGetAttribute, attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, ordinal
            )
            static = _drive(driver.cuKernelGetAttribute, limits.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle, ordinal)
            dynamic = limits.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _drive(driver.cuKernelSetAttribute, dynamic, most - static, handle, ordinal)
            # CUDA loads lazily otherwise, at the first launch, which may be one that is being captured.
            _drive(driver.cuFuncLoad, _drive(driver.cuKernelGetFunction, handle))
        self._ready.add(device)


@contextmanager
def _uncaptured(driver: Any) -> Iterator[None]:
    """Lets this thread load code while it captures a graph: nothing here is an operation of a stream."""
    mode = _drive(driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        _drive(driver.cuThreadExchangeStreamCaptureMode, mode)


_libraries: dict[str, Any] = {}
_kernels: dict[tuple[str, str], Kernel] = {}
_load_lock = forks.Lock()


def kernel(source: str, entry: str, arch: str, label: str = "", keep: bool = True) -> Kernel:
    """The kernel ``entry`` of a source, compiled and loaded on first use.

    ``keep``: its code is looked for on disk, and kept there, as it is in memory. Errors: those of ``cubin``; ValueError
    for an entry that the source does not have; RuntimeError from the driver.
    """
    _available()
    key = _key(source, arch)
    found = _kernels.get((key, entry))
    if found is not None:
        return found
    code = _cubin(source, arch, label, key, keep)
    with _load_lock.now:
        found = _kernels.get((key, entry))
        if found is None:
            found = _kernels[key, entry] = _load(code, entry, key, label or "kernel")
    return found


def _load(code: bytes, entry: str, key: str, label: str) -> Kernel:
    needs = _resources(code)
    symbols = {entry_of(symbol): symbol for symbol in needs}
    if entry not in symbols:
        raise ValueError(f"entry must be one of {label}'s, {', '.join(symbols) or 'which has none'}; got {entry!r}")
    symbol = symbols[entry]
    driver = _driver()
    library = _libraries.get(key)
    if library is None:
        _drive(driver.cuInit, 0)
        with _uncaptured(driver):
            library = _libraries[key] = _drive(driver.cuLibraryLoadData, code, [], [], 0, [], [], 0)
    handle = _drive(driver.cuLibraryGetKernel, library, symbol.encode())
    return Kernel(entry, int(handle), *needs[symbol])


def _drive(call: Callable[..., Any], *arguments: Any) -> Any:
    """A driver call's result. Errors: RuntimeError with the call's and the error's names."""
    error, *results = call(*arguments)
    if error:
        raise RuntimeError(f"{call.__name__} returned {getattr(error, 'name', error)}")
    return results[0] if results else None


def _forked() -> None:
    """A child has no thread that compiles."""
    _busy.clear()


forks.in_child(_forked)
