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
_DEAD = re.compile(r"^\.(?:global|const)\b[^\n]*\n", re.MULTILINE)  # PTX has constants that no code reads


def includes(found: Sequence[Kernel]) -> tuple[str, ...]:
    """System headers that the kernels need, without the angle brackets."""
    return tuple(dict.fromkeys(name for k in found for name in _ANGLED.findall(k.unit.source)))


def templates(found: Sequence[Kernel], gpu: Gpu) -> str:
    """What the kernels need of their files; where NVRTC is missing, or if that compiled to something else, all."""
    files: dict[str, str] = {}
    for k in found:
        _add(jit.parts_of(k.unit.source)[1], files)
    whole = re.sub(r"\n{3,}", "\n\n", "\n".join(shake.stripped(text) for text in files.values())).strip() + "\n"
    if nvrtc.unavailable() is not None:
        return whole
    needed = _needed(found, files, gpu)
    same = all(_ptx(k, needed, gpu) == _ptx(k, whole, gpu) for k in found)
    return needed if same else whole


def constants(k: Kernel, templates: str) -> str:
    """The struct of constants by which a pass' kernels are instantiated; those that the templates read."""
    text = re.sub(rf"\b{jit.CONFIG}\b", k.config, jit.parts_of(k.unit.source)[0])
    read = set(re.findall(r"\bC::(\w+)", templates))
    lines = (line for line in text.splitlines(keepends=True) if not (found := _MEMBER.match(line)) or found[1] in read)
    return "".join(lines)


_MEMBER = re.compile(r"  static constexpr [\w ]+? (\w+)(?:\[\d+\])* = ")


def spaced(*parts: str) -> str:
    """Texts in the kernels' namespace."""
    return _SPACES.format("\n".join(parts))


def _add(file: str, files: dict[str, str]) -> None:
    """Adds a file of ``kernels`` behind those that it includes."""
    if file not in files:
        text = (jit.KERNELS / file).read_text(encoding="utf-8")
        for name in _QUOTED.findall(text):
            _add(name, files)
        files[file] = text


def _needed(found: Sequence[Kernel], files: dict[str, str], gpu: Gpu) -> str:
    prepared = {name: shake.prepared(text, gpu.capability[0] * 10 + gpu.capability[1]) for name, text in files.items()}
    places: list[shake.Places] = []
    for k in found:
        mine: dict[str, str] = {}
        _add(jit.parts_of(k.unit.source)[1], mine)
        text = "\n".join(f'#line 1 "{name}"\n{prepared[name]}' for name in mine)
        places += shake.places(_compiled(k, text, gpu, "-G"))
    words = {word for k in found for entry in k.entries for word in re.findall(r"\w+", entry)}
    return shake.shaken(prepared, places, words)


def _ptx(k: Kernel, text: str, gpu: Gpu) -> str:
    return _DEAD.sub("", _compiled(k, text, gpu))


def _compiled(k: Kernel, text: str, gpu: Gpu, *flags: str) -> str:
    """PTX of a pass' kernels, with the templates of a text."""
    head = "".join(f"#include <{name}>\n" for name in includes([k]))
    entries = [one for one in jit.entries_of(k.unit.source) if "_float<" not in one]
    source = f"{head}{jit.parts_of(k.unit.source)[0]}\n{text}"
    return nvrtc.build(source, gpu.arch, k.unit.label, entries, ptx=True, flags=flags).ptx
