"""The device code of an exported file: each kernel's templates once, and a struct of constants for every pass.

Of ``cuda/kernels`` a file has what its kernels need (`shake`), as it stands there, and of the constants those that are
read. That both compile to the same is found out at each export.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from upconv.cuda.compile import jit, nvrtc
from upconv.cuda.gpu import Gpu
from upconv.export import shake
from upconv.export.passes import Kernel

_ANGLED = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>.*\n?", re.MULTILINE)
_QUOTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_SPACES = "namespace kernels {{\n\n{}\n}}  // namespace kernels\n"
WIDTH = 120
"""Columns of the file."""
_DEAD = re.compile(r"^\.(?:global|const)\b[^\n]*\n", re.MULTILINE)  # PTX has constants that no code reads


def includes(found: Sequence[Kernel]) -> tuple[str, ...]:
    """System headers that the kernels need, without the angle brackets."""
    return tuple(dict.fromkeys(name for k in found for name in _ANGLED.findall(k.unit.source)))


def templates(found: Sequence[Kernel], gpu: Gpu) -> str:
    """What the kernels need of their files."""
    return _shaken([_unit(k) for k in found], gpu.arch)


def constants(k: Kernel, templates: str) -> str:
    """The struct of constants by which a pass' kernels are instantiated; those that the templates read, by type."""
    read = set(re.findall(r"\bC::(\w+)", templates))
    lines = [f"struct {k.config} {{"]
    members = _MEMBER.findall(jit.parts_of(k.unit.source)[0])
    for kind, name, value in sorted(members, key=lambda one: one[0] == "bool"):
        if name.partition("[")[0] not in read:
            continue
        begin, one = f"  static constexpr {kind} ", f"{name} = {value};"
        if lines[-1].startswith(begin) and len(lines[-1]) + len(one) < WIDTH:
            lines[-1] = f"{lines[-1][:-1]}, {one}"
        else:
            lines.append(begin + one)
    return "\n".join((*lines, "};", ""))


_MEMBER = re.compile(r"^  static constexpr (\w[\w ]*?) (\w+(?:\[\d+\])*) = (.*);$", re.MULTILINE)


def spaced(*parts: str) -> str:
    """Texts in the kernels' namespace."""
    return _SPACES.format("\n".join(parts))


_Unit = tuple[str, str, Sequence[str], str]
"""A label, what stands ahead of the templates, the kernels, and their file."""


def _unit(k: Kernel) -> _Unit:
    head = "".join(f"#include <{name}>\n" for name in includes([k])) + jit.parts_of(k.unit.source)[0]
    return k.unit.label, head, k.compiled, jit.parts_of(k.unit.source)[1]


def _add(file: str, files: dict[str, str]) -> None:
    """Adds a file of ``kernels`` behind those that it includes."""
    if file not in files:
        text = (jit.KERNELS / file).read_text(encoding="utf-8")
        for name in _QUOTED.findall(text):
            _add(name, files)
        files[file] = text


def _shaken(units: Sequence[_Unit], arch: str) -> str:
    """What the units' kernels need of their files.

    All without NVRTC, or if that compiled to something else.
    """
    files: dict[str, str] = {}
    for *_, file in units:
        _add(file, files)
    whole = re.sub(r"\n{3,}", "\n\n", "\n".join(shake.stripped(text) for text in files.values())).strip() + "\n"
    if nvrtc.unavailable() is not None:
        return whole
    prepared = {name: shake.prepared(text, int(arch.rstrip("af"))) for name, text in files.items()}
    places: list[shake.Places] = []
    for unit in units:
        mine: dict[str, str] = {}
        _add(unit[-1], mine)
        text = "\n".join(f'#line 1 "{name}"\n{prepared[name]}' for name in mine)
        places += shake.places(_compiled(unit, text, arch, "-G"))
    words = {word for unit in units for entry in unit[2] for word in re.findall(r"\w+", entry)}
    needed = shake.shaken(prepared, places, words)
    same = all(_DEAD.sub("", _compiled(u, needed, arch)) == _DEAD.sub("", _compiled(u, whole, arch)) for u in units)
    return needed if same else whole


def _compiled(unit: _Unit, text: str, arch: str, *flags: str) -> str:
    """PTX of a unit's kernels, with the templates of a text."""
    label, head, entries, _ = unit
    return nvrtc.build(f"{head}\n{text}", arch, label, entries, ptx=True, flags=flags).ptx
