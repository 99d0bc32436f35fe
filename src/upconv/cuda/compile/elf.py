"""What a cubin says of itself, read from its ELF sections, so that no GPU is needed."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

CONFIG = "Config"
"""The struct of constants by which a source's templates are instantiated."""
_TEMPLATE = re.compile(rf"_Z(\d+)(\w+?)I(?:\d+\w+?I)?{len(CONFIG)}{CONFIG}E")
_REGISTERS, _FRAME = 0x2F, 0x11  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
_RESERVED = 1024  # bytes of a block's shared memory that are the system's from sm_90 on, beside the opt-in maximum


def arch_number(cubin: bytes) -> int | None:
    """The ``sm_`` number in a cubin's ELF header, or None when it is no cubin."""
    if len(cubin) < 64 or cubin[:4] != b"\x7fELF" or cubin[18:20] != b"\xbe\x00":  # EM_CUDA is 190
        return None
    flags = int.from_bytes(cubin[48:52], "little")
    # CUDA 13 writes OS ABI 0x41 and has the number in the second byte; before, it was 0x33 and the first byte.
    return flags >> 8 & 0xFF if cubin[7] == 0x41 else flags & 0xFF


def inspect(cubin: bytes) -> dict[str, tuple[int, int, int]]:
    """Per entry of a cubin: registers per thread, local memory per thread in bytes, static shared memory in bytes.

    Local memory is the stack frame: arrays that are indexed at run time, and spills. Errors: ValueError for what is no
    cubin.
    """
    if arch_number(cubin) is None:
        raise ValueError(f"cubin must be an ELF file for CUDA; got {len(cubin)} bytes that start with {cubin[:4]!r}")
    try:
        return {entry_of(symbol): needs for symbol, needs in resources(cubin).items()}
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise ValueError(f"cubin must be a whole ELF file; got one that is cut or damaged ({error})") from None


def entry_of(symbol: str) -> str:
    """The name in the source of a kernel with such a symbol, which may be a template's instance."""
    found = _TEMPLATE.match(symbol)
    return found[2] if found and len(found[2]) == int(found[1]) else symbol


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    step: int


def resources(elf: bytes) -> dict[str, tuple[int, int, int]]:
    """`inspect`'s numbers by symbol, of what is known to be a cubin."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    count, names = struct.unpack_from("<HH", elf, 0x3C)
    headers = [_Section(*struct.unpack_from("<IIQQQQIIQQ", elf, table + 64 * i)) for i in range(count)]

    def text(section: int, offset: int) -> str:
        start = headers[section].offset + offset
        return elf[start : elf.index(b"\0", start)].decode()

    sections = {text(names, header.name): header for header in headers}
    symbols: list[str] = []
    if ".symtab" in sections:
        s = sections[".symtab"]
        at = range(s.offset, s.offset + s.size // s.step * s.step, s.step)
        symbols = [text(s.link, struct.unpack_from("<I", elf, i)[0]) for i in at]
    info = sections[".nv.info"]
    values = _attributes(elf[: info.offset + info.size], info.offset, symbols)
    reserved = _RESERVED if ".nv.reservedSmem.offset0" in symbols else 0
    found = {}
    for name in (section.removeprefix(".text.") for section in sections if section.startswith(".text.")):
        shared = sections.get(f".nv.shared.{name}")
        static = 0 if shared is None else max(shared.size - reserved, 0)
        found[name] = (values[_REGISTERS].get(name, 0), values[_FRAME].get(name, 0), static)
    return found


def _attributes(elf: bytes, at: int, symbols: list[str]) -> dict[int, dict[str, int]]:
    """Registers and stack frames by symbol, of a section ``.nv.info`` from there to the end."""
    values: dict[int, dict[str, int]] = {_REGISTERS: {}, _FRAME: {}}
    while at < len(elf):
        form, attribute, length = struct.unpack_from("<BBH", elf, at)
        at += 4
        if form == 0x04:  # EIFMT_SVAL: the length, then a symbol and a value; other formats have the value in its place
            if attribute in values and length >= 8:
                symbol, value = struct.unpack_from("<II", elf, at)
                values[attribute][symbols[symbol]] = value
            at += length
    return values
