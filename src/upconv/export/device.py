"""The device code of an exported file: each kernel's templates once, and a struct of constants for every pass.

Of ``cuda/kernels`` a file has what its kernels need, by its structs (`fold`), and of the constants those that are read.
That both compile to the same instructions is found out at each export.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence

from upconv.cuda.compile import jit, nvrtc
from upconv.cuda.gpu import Gpu
from upconv.export import comments
from upconv.export.comments import WIDTH
from upconv.export.passes import Kernel

try:
    from upconv.export import fold, syntax
except ImportError:  # without tree-sitter files have all of their kernels' text
    fold = None  # type: ignore[assignment]

_ANGLED = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>.*\n?", re.MULTILINE)
_QUOTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_SPACES = "namespace kernels {{\n\n{}\n}}  // namespace kernels\n"
_GLOBAL = re.compile(r'(?<![\w>:"])::(?=[A-Za-z_])')
_DROPPED = re.compile(r"^[ \t]*#[ \t]*(?:include|pragma once)\b.*$", re.MULTILINE)
_ALIGNED = re.compile(r"__shared__ __align__\(\d+\) unsigned char memory")  # a name that all kernels of a file share
_FILE = "//file"  # a line ahead of each
_NARROW = re.compile(r"^ +else (?:if constexpr \(P == FP16\) )?asm volatile\(WGMMA_.*\n", re.MULTILINE)  # 16 bits
_INTEGERS = re.compile(
    r"(?:@!?\s*)?(?:\.(?:reg|const|global)\b|//|\$|:|$|bra\b|mov\b|cvta\b|ld\.param\b|[a-z]\w*(?:\.\w+)*\.(?:[bsu]\d+|pred)\s[^[]*$)"
)
_NAMES = re.compile(r"%[a-z]+\d+|\$L\w+|\b_Z\w+?(?=_param_\d|\b)")


def includes(found: Sequence[Kernel]) -> tuple[str, ...]:
    """System headers that the kernels need, without the angle brackets."""
    return tuple(dict.fromkeys(name for k in found for name in _ANGLED.findall(k.unit.source)))


def templates(found: Sequence[Kernel], gpu: Gpu) -> str:
    """What the kernels need of their files."""
    text = "\n".join(_folded(found, gpu.arch))
    flags = {name: False for k in found for kind, name, _ in _members(k) if kind == "bool"}
    for k in found:
        flags.update({name: True for kind, name, value in _members(k) if kind == "bool" and value == "true"})
    flags["16 bits"] = any(k.choice.problem.dtype.itemsize == 2 for k in found)
    flags["IEEE"] = any(k.choice.problem.precision == "ieee" for k in found)
    flags["mma.sync"] = "mma.sync.aligned" in text
    return comments.fitting(text, flags)


def constants(k: Kernel, found: Sequence[Kernel], templates: str) -> str:
    """The struct of constants by which a pass' kernels are instantiated; those that the templates read, by type.

    It inherits those of an earlier pass with the same templates, and has what differs.
    """
    read = set(re.findall(r"\bC::(\w+)", templates))
    like = next(one for one in found if _file(one) == _file(k))
    alike = set(_members(like)) if like is not k else set()
    lines = [f"struct {k.config}{f' : {like.config}' if alike else ''} {{"]
    for kind, name, value in sorted(_members(k), key=lambda one: one[0] == "bool"):
        if name.partition("[")[0] not in read or (kind, name, value) in alike:
            continue
        begin, one = f"  static constexpr {kind} ", f"{name} = {value};"
        if lines[-1].startswith(begin) and len(lines[-1]) + len(one) < WIDTH:
            lines[-1] = f"{lines[-1][:-1]}, {one}"
        else:
            lines.append(begin + one)
    return "\n".join((*lines, "};", ""))


def _members(k: Kernel) -> list[tuple[str, str, str]]:
    """Type, name and value of a pass' constants."""
    return _MEMBER.findall(jit.parts_of(k.unit.source)[0])


def _values(k: Kernel) -> dict[str, int | list[int]]:
    found: dict[str, int | list[int]] = {}
    for _, name, text in _members(k):
        value = json.loads(text.strip().replace("{", "[").replace("}", "]"))
        found[name.partition("[")[0]] = value if isinstance(value, list) else int(value)
    return found


_MEMBER = re.compile(r"^  static constexpr (\w[\w ]*?) (\w+(?:\[\d+\])*) = (.*);$", re.MULTILINE)


def spaced(*parts: str) -> str:
    """Texts in the kernels' namespace, which is what kernels call the global one."""
    return _SPACES.format(_GLOBAL.sub("kernels::", "\n".join(parts)))


def _add(file: str, files: dict[str, str]) -> None:
    """Adds a file of ``kernels`` behind those that it includes."""
    if file not in files:
        text = (jit.KERNELS / file).read_text(encoding="utf-8")
        for name in _QUOTED.findall(text):
            _add(name, files)
        files[file] = text


def _folded(found: Sequence[Kernel], arch: str) -> list[str]:
    """The kernels' files in parts, by the kernels that have them, those of several first; of these what they need.

    All without NVRTC or tree-sitter, or if that did not compile, or to something else.
    """
    files: dict[str, str] = {}
    users: dict[str, list[str]] = {}
    for main, those in {_file(k): jit.files_of(k.unit.source) for k in found}.items():
        mine: dict[str, str] = {}
        for file in those:
            _add(file, mine)
        for name, text in mine.items():
            files[name] = text
            users.setdefault(name, []).append(main)
    groups = ["", *sorted({mains[0] for mains in users.values() if len(mains) == 1})]
    texts = ["".join(f"{_FILE}\n{_stripped(files[name])}\n" for name, mains in users.items() if _group(mains) == one)
             for one in groups]  # fmt: skip
    if fold is None or nvrtc.unavailable() is not None:
        return [text.replace(f"{_FILE}\n", "") for text in texts]
    whole = {k: _compiled(k, _of(k, groups, texts), arch) for k in found}
    widths = {width for ptx in whole.values() for width in re.findall(r"m64n(\d+)k", ptx)}
    parts: list[tuple[str, list[dict[str, int | list[int]]]]] = []
    for one, text in zip(groups, texts):
        text = _conditions(text, int(arch.rstrip("af")))
        if all(k.choice.problem.dtype.itemsize > 2 for k in found):
            text = _NARROW.sub("", text).replace("if constexpr (P < FP16) asm volatile(WGMMA_", "asm volatile(WGMMA_")
        text = re.sub(r"^WGMMA_WIDTH\((\d+),.*\n", lambda m: m[0] if m[1] in widths else "", text, flags=re.MULTILINE)
        parts.append((text, [_values(k) for k in found if one in ("", _file(k))]))
    names = {word for k in found for entry in k.entries for word in re.findall(r"\w+", entry)}
    levels = [syntax.EVERYTHING] * len(groups)
    while max(levels) <= syntax.NO_VALUES:
        needed = fold.folded(parts, names, levels)
        other = {k for k in found if not _makes(k, _of(k, groups, needed), arch, whole[k])}
        if not other:
            return needed
        for i in {groups.index(_group([_file(k)])) for k in other}:
            levels[i] += 1
    return [text.replace(f"{_FILE}\n", "") for text in texts]


def _file(k: Kernel) -> str:
    return jit.parts_of(k.unit.source)[1]


def _group(mains: Sequence[str]) -> str:
    """Whose a file is: one kernel's, or several kernels'."""
    return mains[0] if len(mains) == 1 else ""


def _of(k: Kernel, groups: Sequence[str], texts: Sequence[str]) -> str:
    """The parts that a pass' kernels have."""
    return "\n".join(text for one, text in zip(groups, texts) if one in ("", _file(k)))


def _compiled(k: Kernel, text: str, arch: str) -> str:
    """PTX of a pass' kernels, with the templates of a text."""
    head = "".join(f"#include <{name}>\n" for name in includes([k])) + jit.parts_of(k.unit.source)[0]
    return nvrtc.build(f"{head}\n{text}", arch, k.unit.label, k.compiled, ptx=True).ptx


def _makes(k: Kernel, text: str, arch: str, ptx: str) -> bool:
    """Whether a text compiles, to the instructions of this PTX."""
    try:
        return _instructions(_compiled(k, text, arch)) == _instructions(ptx)
    except nvrtc.CompileError:
        return False


def _instructions(ptx: str) -> Counter[str]:
    """What PTX loads, stores, multiplies and waits for.

    Without integers, branches, names of registers and an order, in which folded text may be ahead of the compiler.
    """
    lines = (_NAMES.sub("", line.strip()) for line in ptx.splitlines())
    return Counter(line for line in lines if not _INTEGERS.match(line))


def _stripped(text: str) -> str:
    """A file's text without includes, which a file of all of them does not have."""
    return _ALIGNED.sub("__shared__ __align__(1024) unsigned char memory", _DROPPED.sub("", text))


def _conditions(text: str, arch: int) -> str:
    """A text without what preprocessor conditions leave out for a GPU."""
    lines, taken, values = [], [True], {"arch": arch * 10}
    for line in text.split("\n"):
        word, _, rest = line.partition("//")[0].strip().partition(" ")
        if word == "#if":
            condition = rest.replace("defined(__CUDA_ARCH__)", "True").replace("__CUDA_ARCH__", "arch")
            condition = condition.replace("&&", " and ").replace("||", " or ").replace("!", " not ")
            taken.append(bool(eval(condition, {}, values)))
        elif word == "#else":
            taken[-1] = not taken[-1]
        elif word == "#endif":
            taken.pop()
        elif all(taken):
            lines.append(line)
            if found := re.match(r"#define (\w+) (\d+)\b", line):
                values[found[1]] = int(found[2])
    return "\n".join(lines)
