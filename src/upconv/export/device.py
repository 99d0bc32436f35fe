"""The device code of an exported file: each kernel's templates once, and a struct of constants for every launch.

Of the files of ``cuda/kernels`` what no kernel of the file uses is left out, by whole definitions. What is left is as
it stands there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from upconv.cuda.compile import jit
from upconv.export.passes import Kernel

_ANGLED = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>.*\n?", re.MULTILINE)
_NOT_CODE = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"')
_SPACES = "namespace kernels {{\n\n{}\n}}  // namespace kernels\n"


def includes(found: Sequence[Kernel]) -> tuple[str, ...]:
    """System headers that the kernels need, without the angle brackets."""
    return tuple(dict.fromkeys(name for k in found for name in _ANGLED.findall(k.unit.source)))


def templates(found: Sequence[Kernel]) -> str:
    """The kernels' files behind what they include, each once, in a namespace."""
    seen: set[str] = set()
    files = [text for k in found for text in jit.with_includes(jit.parts_of(k.unit.source)[1], seen)]
    wanted = {word for k in found for entry in k.entries for word in re.findall(r"\w+", entry)}
    return _SPACES.format(used(_ANGLED.sub("", "\n".join(files)), wanted))


def constants(k: Kernel) -> str:
    """The struct of constants by which a pass' kernels are instantiated."""
    return _SPACES.format(re.sub(rf"\b{jit.CONFIG}\b", k.config, jit.parts_of(k.unit.source)[0]))


@dataclass(frozen=True)
class _Item:
    """A definition at the top level with the comment above it, or lines between definitions."""

    text: str
    names: tuple[str, ...]
    """What it defines; none of what stays."""


def used(text: str, wanted: set[str]) -> str:
    """What names need of a text: definitions that they or others here reach, and all that is no definition."""
    items = list(_items(text))
    words = [set(re.findall(r"\w+", _NOT_CODE.sub("", item.text))) for item in items]
    reached, kept = set(wanted), {i for i, item in enumerate(items) if not item.names}
    for i in kept:
        reached |= words[i]
    while more := {i for i, item in enumerate(items) if i not in kept and reached.intersection(item.names)}:
        kept |= more
        for i in more:
            reached |= words[i]
    found = "".join(item.text for i, item in enumerate(items) if i in kept)
    return re.sub(r"\n{3,}", "\n\n", found).strip() + "\n"


def _items(text: str) -> Iterator[_Item]:
    """The definitions of a text: each ends behind the line that closes its braces."""
    item, depth = "", 0
    for line in re.sub(r"\\\n", _JOINED, text).splitlines(keepends=True):
        code = _NOT_CODE.sub("", line).rstrip()
        item += line
        depth += 0 if line.startswith("#") else code.count("{") - code.count("}")
        begun = any(one.strip() and not one.startswith("//") for one in item.splitlines())
        if depth == 0 and (
            line.startswith("#") or _CALL.match(line) or code.endswith(("}", ";"))
            if begun
            else not code and line == "\n"
        ):
            yield _Item(item.replace(_JOINED, "\\\n"), _names(item))
            item = ""
    yield _Item(item, ())


_CALL = re.compile(r"[A-Z_]+\(.*\)$")  # of a macro, at the margin
_JOINED = "\0"  # for the line breaks of a macro
_MACRO = re.compile(r"^#define (\w+)", re.MULTILINE)
_STRUCT = re.compile(r"^(?:template <[^\n]*>\s*)?struct (?:alignas\(\d+\) )?(\w+)", re.MULTILINE)
_BOUNDS = re.compile(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)")
_FUNCTION = re.compile(r"__(?:device|global)__[^(]*?\b(\w+)\(")


def _names(text: str) -> tuple[str, ...]:
    code = _BOUNDS.sub("", _NOT_CODE.sub("", text))
    found = _MACRO.search(code) or _STRUCT.search(code) or _FUNCTION.search(code)
    return (found[1],) if found else ()
