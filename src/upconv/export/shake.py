"""Of kernel files what some kernels need, told by the compiler.

Compiled without optimisation for a debugger, a kernel's code names the place of every statement that it has. A function
without such a place is not part of the kernel, nor is a branch. Declarations stay where what stays names them. This is
no C++ front end: it knows the one style of ``cuda/kernels``, and `device` compares the PTX with the whole files'.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

Places = set[tuple[str, int, int]]
"""File, line and column, both from 1."""

_NOT_CODE = re.compile(r'//[^\n]*|/\*~\*/|"(?:\\.|[^"\\\n])*"')
_BREAK = "/*~*/\n"
_BREAKS = re.compile(r"[ \t]*/\*~\*/\n[ \t]*")
_DROPPED = re.compile(r"^[ \t]*#[ \t]*(?:include|pragma once)\b.*$", re.MULTILINE)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]+)"', re.MULTILINE)
_PLACE = re.compile(r"^\s*\.loc\s+(\d+) (\d+) (\d+)", re.MULTILINE)
_BEGIN = re.compile(r"^(?:\.weak |\.visible )?\.(?:func|entry)\b", re.MULTILINE)
_BOUNDS = re.compile(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)|__cluster_dims__\([^)]*\)|alignas\([^)]*\)")
_STRUCT = re.compile(r"^(?:template <[^{;]*>\s*)?struct +(\w+)(<)?")
_FUNCTION = re.compile(r"__(?:device|global)__[^(=]*?\b(\w+)\(")
_DEFINED = re.compile(r"\busing (\w+) =|(\w+)(?:<[^=;]*>)?(?:\[[^\]]*\])*\s*=[^=]|\btypedef .* (\w+);")
_CALL = re.compile(r"[A-Z_]+\(.*\)$")
_ASSERT = re.compile(r"^[ \t]*static_assert\(.*\);.*\n", re.MULTILINE)
_SECTIONS = ("// ---", "// ===")
_IF = re.compile(r"\bif (constexpr )?\(")


def places(ptx: str) -> list[Places]:
    """The places that PTX compiled for a debugger names, of each function."""
    files = dict(_FILE.findall(ptx))
    functions = ({(files[number], int(line), int(column)) for number, line, column in _PLACE.findall(part)}
                 for part in _BEGIN.split(ptx))  # fmt: skip
    return [found for found in functions if found]


def stripped(text: str) -> str:
    """A file's text without includes, which a file of all of them does not have."""
    return _DROPPED.sub("", text)


def prepared(text: str, arch: int) -> str:
    """A file's text to be compiled for `places`: without conditions, none inlined, and each branch on its own line."""
    text = _conditions(stripped(text), arch)
    source = _Source("", text, [])
    ends = [source._closed(found.end() - 1) for found in _IF.finditer(source.mask)]
    ends += [found.end() for found in re.finditer(r"\belse\b", source.mask)]
    for end in sorted(ends, reverse=True):
        lines = text[:end].rsplit("\n", 2)[-2:]
        if not (lines[-1].lstrip().startswith("#") or lines[0].endswith("\\")):  # a macro has one line
            text = text[:end] + _BREAK + text[end:]
    return text.replace("__forceinline__", "inline __noinline__")


def shaken(files: dict[str, str], found: list[Places], wanted: set[str]) -> str:
    """What kernels named ``wanted`` need of `prepared` files; ``found``: the places of each function's code."""
    trees = [_Source(name, text, found) for name, text in files.items()]
    items = [item for tree in trees for item in tree.items]
    _keep(items, wanted)
    text = _BREAKS.sub(" ", "\n".join("".join(_kept(tree, tree.items)) for tree in trees))
    text = text.replace("inline __noinline__", "__forceinline__")
    text = re.sub(r"^[ \t]+\n|[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(\{\n)\n+(?=[ \t]+\S)|\n+(\n\}\n)", r"\1\2", text)  # where conditions were
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@dataclass
class _Item:
    """A declaration with the comment above it, or a comment or an empty line between declarations."""

    source: _Source
    begin: int
    end: int
    kind: str
    """``struct``, ``function``, ``call`` (of a macro, or an assertion), ``other`` or ``comment``."""
    names: tuple[str, ...] = ()
    special: bool = False
    """A template's specialisation."""
    inner: list[_Item] = field(default_factory=list)
    """Of a struct."""
    body: tuple[int, int] = (0, 0)
    kept: bool = False

    @property
    def code(self) -> frozenset[int]:
        """The instances of functions that have code of it."""
        return self.source.live(self.begin, self.end)

    @property
    def text(self) -> str:
        """As it stays."""
        if self.kind == "function" and self.code and "constexpr" not in self.head:
            return _ASSERT.sub("", self.source.folded(self.begin, self.end, self.code))
        return self.source.text[self.begin : self.end]

    @property
    def head(self) -> str:
        return self.source.mask[self.begin : self.end].partition("{")[0]


class _Source:
    """A file: its text, the same with comments and strings blanked, and the places of its code."""

    def __init__(self, name: str, text: str, found: list[Places]) -> None:
        self.text = text
        self.mask = _NOT_CODE.sub(lambda one: " " * len(one[0]), text)
        starts = list(accumulate((len(line) for line in text.splitlines(keepends=True)), initial=0))
        self.code = [
            sorted(starts[line - 1] + column - 1 for file, line, column in places if file == name) for places in found
        ]
        self.items = list(self._items(0, len(text)))

    def live(self, begin: int, end: int) -> frozenset[int]:
        """The instances of functions that have code here."""
        return frozenset(i for i, code in enumerate(self.code) if bisect_left(code, begin) < bisect_left(code, end))

    def _items(self, at: int, end: int) -> Iterator[_Item]:
        begin, depth, begun = at, 0, False
        while at < end:
            after = min(self.text.find("\n", at) % (len(self.text) + 1) + 1, end)
            line = self.mask[at:after].strip()
            depth += line.count("{") + line.count("(") - line.count("}") - line.count(")")
            macro = self.mask[begin:at].lstrip().startswith("#") or line.startswith("#")
            begun = begun or bool(line)
            whole = macro or line.endswith(("}", ";")) or _CALL.match(line)
            if (begun and depth == 0 and whole and not line.endswith("\\")) or not (
                begun or self.text[at:after].strip()
            ):
                yield self._item(begin, after)
                begin, begun = after, False
            at = after
        if begin < end:
            yield self._item(begin, end)

    def _item(self, begin: int, end: int) -> _Item:
        code = _BOUNDS.sub(lambda one: " " * len(one[0]), self.mask[begin:end])
        first = len(code) - len(code.lstrip())
        if not code.strip():
            return _Item(self, begin, end, "comment")
        if macro := re.match(r"\s*#define (\w+)", code):
            return _Item(self, begin, end, "other", (macro[1],))
        if code.lstrip().startswith("static_assert") or _CALL.match(code.strip()):
            return _Item(self, begin, end, "call")
        if struct := _STRUCT.match(code[first:]):
            item = _Item(self, begin, end, "struct", (struct[1],), special=bool(struct[2]))
            brace = code.find("{")
            if brace >= 0 and code.count("\n", brace) > 1:
                inside = self.text.index("\n", begin + brace) + 1
                item.body = inside, self.text.rindex("\n", begin, begin + code.rindex("}")) + 1
                item.inner = list(self._items(*item.body))
            return item
        if (function := _FUNCTION.search(code)) and "{" in code:
            return _Item(self, begin, end, "function", (function[1],))
        names = tuple(name for groups in _DEFINED.findall(code[first:]) for name in groups if name)
        if code.lstrip().startswith("enum"):
            names = tuple(re.findall(r"\w+", code))
        return _Item(self, begin, end, "other", names)

    # --- branches -------------------------------------------------------------------------------------------------

    def folded(self, begin: int, end: int, instances: frozenset[int]) -> str:
        """A part of a function, of which some ``instances`` have code, without branches that have none, and without
        conditions that are the same for all."""
        found = _IF.search(self.mask, begin, end)
        if found is None:
            return self.text[begin:end]
        at = found.start()
        then = self._behind(self._closed(found.end() - 1))
        last = then_end = self._statement(then)
        other = self._behind(then_end)
        if self.mask.startswith("else", other):
            other = self._behind(other + 4)
            last = self._statement(other)
        first, second = (self.live(*part) & instances for part in ((then, then_end), (other, last)))
        if found[1] and first == instances and not second:
            put = self._alone(at, then, then_end, instances)
        elif second == instances and not first:
            put = self._alone(at, other, last, instances)
        elif not first and not second:
            put = ";" if self._below(at) else ""
        else:
            # A branch that is not constexpr is compiled for all.
            put = self.folded(then, then_end, instances - second if found[1] else instances) if first else "{}"
            put = self.text[at:then] + put
            if second:
                put += self.text[then_end:other] + self.folded(
                    other, last, instances - first if found[1] else instances
                )
        if not put:  # with its line
            at = len(self.text[:at].rstrip(" "))
            last += self.text[last : last + 1] == "\n"
        return self.text[begin:at] + put + self.folded(last, end, instances)

    def _below(self, at: int) -> bool:
        """Whether a statement is all that a loop or another condition has."""
        before = self.mask[:at].rstrip()
        return before.endswith((")", "else"))

    def _alone(self, at: int, begin: int, end: int, instances: frozenset[int]) -> str:
        """A branch in the place of the condition at ``at``."""
        text = self.folded(begin, end, instances)
        if not text.startswith("{") or self._below(at):
            return text
        if "\n" not in text:
            return text[1:-1].strip()
        lines = text[1:-1].strip("\n").rstrip().splitlines()
        margin = at - self.text.rfind("\n", 0, at) - 1
        deep = min((len(line) - len(line.lstrip()) for line in lines if line.strip() and line[0] != "#"), default=0)
        less = max(0, deep - margin)
        return "\n".join(line[less:] if line[:less].isspace() else line for line in lines).lstrip()

    def _behind(self, at: int) -> int:
        """The next character that is code."""
        while self.mask[at].isspace():
            at += 1
        return at

    def _closed(self, at: int) -> int:
        """Behind the bracket that closes the one at ``at``."""
        depth = 0
        while True:
            depth += (self.mask[at] in "({[") - (self.mask[at] in ")}]")
            at += 1
            if depth == 0:
                return at

    def _statement(self, at: int) -> int:
        """Behind the statement that begins at ``at``."""
        if self.mask[at] == "{":
            return self._closed(at)
        if self.mask[at] == "#":
            return self._statement(self._behind(self.text.index("\n", at)))
        if head := re.compile(r"(?:if(?: constexpr)?|for|while) \(").match(self.mask, at):
            end = self._statement(self._behind(self._closed(head.end() - 1)))
            other = self._behind(end)
            return self._statement(self._behind(other + 4)) if self.mask.startswith("else", other) else end
        while self.mask[at] != ";":
            at = self._closed(at) if self.mask[at] in "({[" else at + 1
        return at + 1


def _conditions(text: str, arch: int) -> str:
    """A text without what preprocessor conditions leave out for a GPU, in lines of the same numbers."""
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
            continue
        lines.append("")
    return "\n".join(lines)


def _keep(items: list[_Item], wanted: set[str]) -> None:
    """Marks what names reach: those ``wanted``, and those in the text of what stays."""
    live = {name for item in items for one in (item, *item.inner) if one.code for name in one.names}
    reached, counted = set(wanted), set[int]()
    while True:
        before = len(counted)
        for item in _open(items):
            item.kept = item.kept or _stays(item, reached, live)
            if item.kept and id(item) not in counted:
                counted.add(id(item))
                text = item.head if item.inner else item.text
                reached.update(re.findall(r"\w+", _NOT_CODE.sub("", text)))
        if len(counted) == before:
            return


def _open(items: list[_Item]) -> Iterator[_Item]:
    """Items, and those of structs that are kept."""
    for item in items:
        yield item
        if item.kept:
            yield from _open(item.inner)


def _stays(item: _Item, reached: set[str], live: set[str]) -> bool:
    """Whether a declaration stays, by the names that are reached and those of what has code, ``live``.

    Of functions of one name, and of a template's specialisations with functions, those that have code stay.
    """
    if item.kind in ("comment", "call"):
        return item.kind == "call" and bool(item.code)
    if not reached.intersection(item.names):
        return item.kind == "other" and not item.names  # a field
    if item.code or item.names[0] not in live:
        return True
    if item.kind == "function":
        return "constexpr" in item.head or "{}" in item.text
    return not (item.special and any(one.kind == "function" for one in item.inner))


def _kept(source: _Source, items: list[_Item]) -> Iterator[str]:
    """The text of what is kept, and of comments above it."""
    comments: list[str] = []
    for item in items:
        if item.kind == "comment":
            if item.text.lstrip().startswith(_SECTIONS):  # the one before is empty
                comments = [one for one in comments if not one.lstrip().startswith(_SECTIONS)]
            comments.append(item.text)
        elif item.kept:
            yield "".join(comments)
            comments = []
            if not item.inner:
                yield item.text
            else:
                begin, end = item.body
                yield source.text[item.begin : begin] + "".join(_kept(source, item.inner)) + source.text[end : item.end]
