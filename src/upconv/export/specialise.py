"""A kernel's source as a person would have written it for one layer.

The families' sources (``cuda/kernels``) serve every layer: macros choose among branches and name the numbers. Here the
macros of one plan are put in: dead branches and what only they use go, constants become ``constexpr``, and what is left
is wrapped in a namespace, so that several kernels can share a file. The machine code stays what it was.

Written for the C++ of ``cuda/kernels``, no compiler's front end: one definition for a macro's name, line comments, and
no name that shadows a constant.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Specialised:
    """Device code for one namespace of a ``.cu`` file."""

    includes: tuple[str, ...]
    """System headers that it needs, without the angle brackets."""
    text: str
    """``namespace <name> { ... }`` and the ``#undef`` of the macros that are left."""


def specialise(source: str, namespace: str, entries: Sequence[str], arch: str = "90a") -> Specialised:
    """The parts of a source that its entries need, with its macros put in.

    Args:
        source: a whole source as ``jit.source`` makes it: macros on top, includes put in.
        namespace: of the result.
        entries: the kernels to keep; they lose their ``extern "C"``.
        arch: what ``__CUDA_ARCH__`` is to mean, as in ``sm_<arch>``.

    Errors: ValueError for a namespace that is no identifier, an entry that the source lacks, an ``#error`` that the
    macros run into, and an ``#if`` that they do not decide.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", namespace):
        raise ValueError(f"namespace must be an identifier; got {namespace!r}")
    number = re.match(r"\d+", arch)
    if number is None:
        raise ValueError(f"arch must begin with a number such as 90a; got {arch!r}")
    text, macros = _preprocess(source.removeprefix("// macros\n"), {"__CUDA_ARCH__": f"{number[0]}0"})
    includes = tuple(dict.fromkeys(_INCLUDE.findall(text)))
    text = _INCLUDE.sub("", text)
    nodes = _unwrapped(_tree(_tokens(text)))
    nodes = _inline_macros(nodes, macros)
    constants = _Constants(macros)
    while True:  # a constant that a fold has made plain may decide the next branch
        constants.collect(nodes)
        folder = _Folder(constants)
        nodes = folder.block(nodes)
        if not folder.changed:
            nodes, changed = _without_unused(nodes)
            if not changed:
                break
    items = [part for item in _items(nodes) for part in _apart(item)]
    _settle(items, constants)
    kept = _kept(items, entries)
    body, left = _render(kept, entries, constants)
    undefs = "\n" + "".join(f"#undef {name}\n" for name in left) if left else ""
    return Specialised(includes, f"namespace {namespace} {{\n\n{body}{undefs}}}  // namespace {namespace}\n")


_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>.*\n?", re.MULTILINE)


# --- the preprocessor ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Macro:
    name: str
    parameters: tuple[str, ...] | None
    """None for one without parentheses."""
    body: str
    index: int = 0


_DEFINE = re.compile(r"#[ \t]*define[ \t]+(\w+)(\([^)]*\))?(.*)", re.DOTALL)
_UNROLL = re.compile(r"#[ \t]*pragma[ \t]+unroll\b[ \t]*([^\n]*)")
_DIRECTIVE = re.compile(r"[ \t]*#[ \t]*(\w+)(.*)", re.DOTALL)


def _logical_lines(text: str) -> Iterator[str]:
    """Lines, those that end in a backslash joined to the next; each with its line break."""
    line = ""
    for part in text.splitlines(keepends=True):
        line += part
        if not part.rstrip("\n").endswith("\\"):
            yield line
            line = ""
    if line:
        yield line


def _comment_of(text: str) -> tuple[str, str]:
    """A directive's rest in two: code, and its trailing comment."""
    quoted = False
    for i, c in enumerate(text):
        if c == '"' and text[i - 1 : i] != "\\":
            quoted = not quoted
        elif text.startswith("//", i) and not quoted:
            return text[:i].strip(), text[i:].strip()
    return text.strip(), ""


def _macro(line: str) -> _Macro:
    found = _DEFINE.match(line.strip())
    assert found is not None, line
    code, _ = _comment_of(found[3].replace("\\\n", "\n"))
    parameters = None if found[2] is None else tuple(p.strip() for p in found[2][1:-1].split(",") if p.strip())
    return _Macro(found[1], parameters, code)


def _preprocess(source: str, given: Mapping[str, str]) -> tuple[str, dict[str, _Macro]]:
    """The text of the live branches, and its macros; a branch's own comment stays where it is taken."""
    macros = {name: _Macro(name, None, value) for name, value in given.items()}
    defined: dict[str, _Macro] = {}
    lines: list[str] = []
    stack: list[list[bool]] = []  # of each #if: its surroundings are live, a branch was taken, this one is live
    for line in _logical_lines(source):
        found = _DIRECTIVE.match(line)
        live = all(state[2] for state in stack)
        if found is None or found[1] not in (
            *("if", "ifdef", "ifndef", "elif", "else", "endif"),
            *("define", "undef", "error", "line"),
        ):
            if live:
                lines.append(line)
            continue
        word, (rest, comment) = found[1], _comment_of(found[2])
        if word in ("if", "ifdef", "ifndef"):
            taken = live and (_decides(rest, macros) if word == "if" else (rest in macros) == (word == "ifdef"))
            stack.append([live, taken, taken])
        elif word == "elif":
            state = stack[-1]
            state[2] = state[0] and not state[1] and _decides(rest, macros)
            state[1] |= state[2]
        elif word == "else":
            state = stack[-1]
            state[2] = state[0] and not state[1]
            state[1] = True
        elif word == "endif":
            stack.pop()
            continue
        elif live and word == "error":
            raise ValueError(f"source must suit its macros; it stops with #error {rest}")
        elif live and word == "undef":
            macros.pop(rest, None)
        elif live and word == "define":
            macro = _macro(line)
            before = defined.get(macro.name)
            if before is not None and before.body != macro.body:
                raise ValueError(f"source must define a macro once; it defines {macro.name} twice")
            macros[macro.name] = macro
            if before is None and macro.name not in given:
                defined[macro.name] = macro
                lines.append(line)
        elif live and word == "line":
            lines.append("\n")  # a file ends or goes on: what stands there are different comments
        if word in ("if", "ifdef", "ifndef", "elif", "else") and comment and stack[-1][2]:
            lines.append(comment + "\n")
    return "".join(lines), defined


def _decides(condition: str, macros: Mapping[str, _Macro]) -> bool:
    code = re.sub(r"\bdefined[ \t]*\(?[ \t]*(\w+)[ \t]*\)?", lambda m: str(int(m[1] in macros)), condition)
    words = [t for t in _tokens(_expand(code, macros)) if t.kind not in ("space", "comment")]
    value = _evaluate([_Token("number", "0") if t.kind == "name" else t for t in words], {}, {})
    if value is None:
        raise ValueError(f"source must decide its branches by its macros; it does not decide #if {condition}")
    return bool(value)


def _expand(code: str, macros: Mapping[str, _Macro], within: frozenset[str] = frozenset()) -> str:
    """Code with every macro put in, as the preprocessor does it."""
    tokens = list(_tokens(code))
    out: list[str] = []
    i = 0
    while i < len(tokens):
        token = tokens[i]
        macro = macros.get(token.text) if token.kind == "name" and token.text not in within else None
        if macro is None:
            out.append(token.text)
        elif macro.parameters is None:
            out.append(_expand(macro.body, macros, within | {macro.name}))
        else:
            j = i + 1
            while j < len(tokens) and tokens[j].kind == "space":
                j += 1
            if j == len(tokens) or tokens[j].text != "(":
                out.append(token.text)
            else:
                arguments, i = _arguments(tokens, j)
                values = [_expand(a.strip(), macros, within) for a in arguments]
                put = dict(zip(macro.parameters, values))
                body = "".join(put.get(t.text, t.text) for t in _tokens(macro.body))
                out.append(_expand(body, macros, within | {macro.name}))
        i += 1
    return "".join(out)


def _arguments(tokens: Sequence[_Token], i: int) -> tuple[list[str], int]:
    """A call's arguments, from its opening parenthesis, and the place of the closing one."""
    found, depth = [""], 0
    for j in range(i, len(tokens)):
        text = tokens[j].text
        depth += (text in "([{") - (text in ")]}") if len(text) == 1 else 0
        if depth == 0:
            return found, j
        if text == "," and depth == 1:
            found.append("")
        elif j > i:
            found[-1] += text
    raise ValueError("source must close its parentheses; it does not")


# --- tokens and their tree -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Token:
    kind: str
    """space, comment, directive, string, number, name or mark."""
    text: str


@dataclass(slots=True)
class _Group:
    """What stands between a pair of brackets."""

    open: str
    inside: list[_Node] = field(default_factory=list)
    close: str = ""
    folded: bool = False
    """A choice within has been made, so that the brackets may have lost their purpose."""


_Node = _Token | _Group

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<comment>//[^\n]*)|(?P<directive>\#(?:\\\n|[^\n])*)
    |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)|(?P<name>[A-Za-z_]\w*)
    |(?P<mark>::|<<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)""",
    re.VERBOSE,
)


def _tokens(text: str) -> Iterator[_Token]:
    for found in _TOKEN.finditer(text):
        assert found.lastgroup is not None
        yield _Token(found.lastgroup, found[0])


def _tree(tokens: Iterable[_Token]) -> list[_Node]:
    top: list[_Node] = []
    stack = [top]
    for token in tokens:
        if token.kind == "mark" and token.text in "([{":
            group = _Group(token.text)
            stack[-1].append(group)
            stack.append(group.inside)
        elif token.kind == "mark" and token.text in ")]}":
            stack.pop()
            if not stack:
                raise ValueError(f"source must open what it closes; it has a {token.text!r} too many")
            group = stack[-1][-1]  # type: ignore[assignment]
            group.close = token.text
        else:
            stack[-1].append(token)
    if len(stack) > 1:
        raise ValueError("source must close its brackets; it does not")
    return top


def _flat(nodes: Iterable[_Node]) -> Iterator[_Token]:
    for node in nodes:
        if isinstance(node, _Token):
            yield node
        else:
            yield _Token("mark", node.open)
            yield from _flat(node.inside)
            yield _Token("mark", node.close)


def _text(nodes: Iterable[_Node]) -> str:
    return "".join(t.text for t in _flat(nodes))


def _is(node: _Node | None, *texts: str) -> bool:
    return isinstance(node, _Token) and node.text in texts and node.kind in ("mark", "name")


def _trivial(node: _Node) -> bool:
    return isinstance(node, _Token) and node.kind in ("space", "comment")


def _solid(nodes: Iterable[_Node]) -> list[_Node]:
    return [node for node in nodes if not _trivial(node)]


# --- macros in the text ----------------------------------------------------------------------------------------------


def _inline_macros(nodes: list[_Node], macros: Mapping[str, _Macro]) -> list[_Node]:
    """Integers become ``constexpr``, macros with parameters stay, all others (types, lists, strings) are put in."""
    functions = {name: m for name, m in macros.items() if m.parameters is not None}
    known = _Constants(macros)
    known.collect(nodes)
    integers = {
        name
        for name, m in macros.items()
        if m.parameters is None
        and _evaluate(list(_tokens(_expand(m.body, macros))), known.values, known.sizes) is not None
    }
    others = {name: m for name, m in macros.items() if name not in functions and name not in integers}

    def put(code: str) -> str:
        return _expand(code, others)

    out: list[str] = []
    for token in _flat(nodes):
        found = _DEFINE.match(token.text) if token.kind == "directive" else None
        if found is None:
            if token.kind == "name" and token.text in others:
                value = put(token.text)
                if not value and out and out[-1].endswith(" "):
                    out[-1] = out[-1][:-1]
                out.append(value)
            else:
                out.append(token.text)
            continue
        name = found[1]
        if name in others:
            out.append(f"{_GONE}")
            continue
        code, comment = _comment_of(found[3])
        if name in functions:
            parameters = f"({', '.join(functions[name].parameters or ())})"
            out.append(_defined(name, parameters, put(code), comment))
        else:
            out.append(f"constexpr int {name} = {_bare(put(code))};" + (f"  {comment}" if comment else ""))
    return _tree(_tokens(_drop_gone("".join(out))))


def _defined(name: str, parameters: str, body: str, comment: str) -> str:
    return f"#define {name}{parameters} {body}" + (f"  {comment}" if comment else "")


_GONE = "\0"


def _drop_gone(text: str) -> str:
    """Without the lines of macros that were put in, and the comments that go on behind them."""
    return re.sub(rf"^[ \t]*{_GONE}[^\n]*\n(?:[ \t]{{8,}}//[^\n]*\n)*", "", text, flags=re.MULTILINE)


def _bare(code: str) -> str:
    """An expression without parentheses around all of it."""
    nodes = _tree(_tokens(code.strip()))
    while len(nodes) == 1 and isinstance(nodes[0], _Group) and nodes[0].open == "(":
        nodes = nodes[0].inside
    return _text(nodes).strip()


# --- values ----------------------------------------------------------------------------------------------------------

_SIZES = {"char": 1, "short": 2, "int": 4, "float": 4, "double": 8, "u16": 2, "u32": 4, "u64": 8, "i64": 8}
_CASTS = {"int", "bool", "unsigned", "u32", "i64", "u64", "long", "short", "float"}
_BINARY: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<": lambda a, b: int(a < b),
        ">": lambda a, b: int(a > b),
        "<=": lambda a, b: int(a <= b),
        ">=": lambda a, b: int(a >= b),
    },
    {"<<": lambda a, b: a << b, ">>": lambda a, b: a >> b},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {
        "*": lambda a, b: a * b,
        "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
        "%": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    },
)


class _Unknown(Exception):
    """An expression that is no constant of type int."""


def _evaluate(tokens: Sequence[_Token], names: Mapping[str, int], sizes: Mapping[str, int]) -> int | None:
    """An expression of constants; None when it is none. What ``&&``, ``||`` and ``?:`` do not reach may be unknown."""
    words = [t for t in tokens if t.kind not in ("space", "comment")]
    if not words:
        return None
    try:
        value, end = _Expression(words, names, sizes).choice(0)
    except (_Unknown, IndexError, ZeroDivisionError):
        return None
    return value if end == len(words) and value is not None and -(2**31) <= value < 2**31 else None


class _Expression:
    """Recursive descent; a value of None is one that is not known."""

    def __init__(self, words: Sequence[_Token], names: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        self.words, self.names, self.sizes = words, names, sizes

    def at(self, i: int) -> str:
        return self.words[i].text if i < len(self.words) else ""

    def choice(self, i: int) -> tuple[int | None, int]:
        value, i = self.logic(i, ("||", "&&"))
        if self.at(i) != "?":
            return value, i
        first, i = self.choice(i + 1)
        if self.at(i) != ":":
            raise _Unknown
        second, i = self.choice(i + 1)
        return None if value is None else first if value else second, i

    def logic(self, i: int, marks: tuple[str, ...]) -> tuple[int | None, int]:
        if not marks:
            return self.binary(i, 0)
        value, i = self.logic(i, marks[1:])
        while self.at(i) == marks[0]:
            second, i = self.logic(i + 1, marks[1:])
            decided = marks[0] == "||"
            if (value is not None and bool(value) == decided) or (second is not None and bool(second) == decided):
                value = int(decided)
            else:
                value = None if value is None or second is None else int(bool(second))
        return value, i

    def binary(self, i: int, level: int) -> tuple[int | None, int]:
        if level == len(_BINARY):
            return self.unary(i)
        value, i = self.binary(i, level + 1)
        while self.at(i) in _BINARY[level]:
            work = _BINARY[level][self.at(i)]
            second, i = self.binary(i + 1, level + 1)
            value = None if value is None or second is None else work(value, second)
        return value, i

    def unary(self, i: int) -> tuple[int | None, int]:
        word, kind = self.at(i), self.words[i].kind
        if word in ("-", "+", "!", "~"):
            value, i = self.unary(i + 1)
            if value is None:
                return None, i
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[word], i
        if word == "(":
            if self.at(i + 1) in ("int", "bool") and self.at(i + 2) == ")":
                value, end = self.unary(i + 3)
                return int(bool(value)) if value is not None and self.at(i + 1) == "bool" else value, end
            value, i = self.choice(i + 1)
            if self.at(i) != ")":
                raise _Unknown
            return self.suffix(value, i + 1)
        if word == "sizeof" and self.at(i + 1) == "(" and self.at(i + 3) == ")":
            return self.sizes.get(self.at(i + 2), _SIZES.get(self.at(i + 2))), i + 4
        if kind == "number":
            if not re.fullmatch(r"0[xX][\da-fA-F]+|\d+", word):
                raise _Unknown
            return int(word, 0) if word.strip("0") else 0, i + 1
        if kind == "name":
            if word in ("true", "false"):
                return int(word == "true"), i + 1
            if word in _CASTS:
                raise _Unknown
            return self.suffix(self.names.get(word), i + 1)
        raise _Unknown

    def suffix(self, value: int | None, i: int) -> tuple[int | None, int]:
        """Calls, subscripts and members have no known value."""
        while self.at(i) in ("(", "[", ".", "->", "::"):
            value = None
            if self.at(i) in ("(", "["):
                depth = 0
                while True:
                    depth += (self.words[i].text in ("(", "[")) - (self.words[i].text in (")", "]"))
                    i += 1
                    if depth == 0:
                        break
            else:
                i += 2
        return value, i


_TYPES = {"int", "bool", "char", "short", "long", "unsigned", "float", "double", "auto", "void"}
_TYPES |= {"u16", "u32", "u64", "i64", "T", "Acc", "Weight"}
"""Behind which ``*`` and ``&`` belong to a declaration: of other names they may be operators."""
_BEFORE_VALUES = {"return", "else", "case", "goto", "do", "sizeof", "operator"}


class _Constants:
    """What is known of the names of a text: constants of type int or bool, and sizes of its types."""

    def __init__(self, macros: Mapping[str, _Macro]) -> None:
        self._macros = {name: m for name, m in macros.items() if m.parameters is not None}
        self.values: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    def collect(self, nodes: Sequence[_Node]) -> None:
        bare = "".join(t.text for t in _flat(nodes) if t.kind != "comment")
        for name, alias in re.findall(r"typedef\s+([\w ]+?)\s+(\w+);", bare):
            size = _SIZES.get(name.split()[-1]) if "long long" not in name else 8
            if size:
                self.sizes[alias] = size
        declared = Counter(_declarators(nodes))
        for line in re.findall(r"\bconstexpr (?:int|bool) (\w+ =[^;]*);", bare):
            for declarator in _split(_tree(_tokens(line)), ","):
                words = _solid(declarator)
                if len(words) < 3 or not isinstance(words[0], _Token) or not _is(words[1], "="):
                    continue
                name = words[0].text
                if declared[name] > 1:
                    continue  # declared twice: its value may differ from place to place
                value = self.value(words[2:])
                if value is not None:
                    self.values[name] = value

    def value(self, nodes: Iterable[_Node]) -> int | None:
        code = _text(_solid_text(nodes))
        return _evaluate(list(_tokens(_expand(code, self._macros))), self.values, self.sizes)


def _declarators(nodes: Sequence[_Node]) -> Iterator[str]:
    """Every name that a text declares, parameters among them, as often as it does.

    Rather once too often: a name that seems to have two declarations is no constant, and stays as it is.
    """
    words = [n for n in nodes if not _trivial(n)]
    for i, node in enumerate(words):
        if isinstance(node, _Group):
            yield from _declarators(node.inside)
        elif node.kind == "directive":
            macro = _DEFINE.match(node.text)
            yield from _declarators(_tree(_tokens(_comment_of(macro[3])[0]))) if macro else ()
        elif node.kind == "name" and _has_type_before(words, i) and _ends_declarator(words, i + 1):
            yield node.text
            yield from _further_declarators(words, i + 1)


def _has_type_before(words: Sequence[_Node], i: int) -> bool:
    j = i - 1
    while j >= 0 and _is(words[j], "*", "&", "&&"):
        j -= 1
    before = words[j] if j >= 0 else None
    if not isinstance(before, _Token) or before.kind != "name" or before.text in _BEFORE_VALUES:
        return False
    return j == i - 1 or before.text in _TYPES


def _ends_declarator(words: Sequence[_Node], i: int) -> bool:
    after = words[i] if i < len(words) else None
    return after is None or isinstance(after, _Group) or _is(after, "=", ",", ";", ">", ":")


def _further_declarators(words: Sequence[_Node], i: int) -> Iterator[str]:
    """The names behind the commas of a declaration whose first declarator ends at ``i``."""
    while i < len(words) and not _is(words[i], ";"):
        node, before = words[i], words[i - 1]
        if isinstance(node, _Group) and node.open == "{" and isinstance(before, _Group):
            return  # a function's body
        i += 1
        if not _is(node, ","):
            continue
        while i < len(words) and _is(words[i], "*", "&"):
            i += 1
        if i < len(words) and _word(words[i]).isidentifier() and _ends_declarator(words, i + 1):
            yield _word(words[i])


def _solid_text(nodes: Iterable[_Node]) -> Iterator[_Node]:
    for token in _flat(nodes):
        yield token if token.kind != "comment" else _Token("space", " ")


def _split(nodes: Sequence[_Node], mark: str) -> list[list[_Node]]:
    found: list[list[_Node]] = [[]]
    for node in nodes:
        if _is(node, mark):
            found.append([])
        else:
            found[-1].append(node)
    return found


# --- folding ---------------------------------------------------------------------------------------------------------

_HEADS = ("if", "for", "while", "switch")
_SEPARATORS = {
    *(";", ",", "=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=", "::", "return", "else", "do"),
    *("case", "constexpr", *_HEADS),
}


_CHOOSING = {"?", "||", "&&", "0"}  # what an expression has in which there is something to do, or a folded group


class _Folder:
    """Takes branches whose conditions are constants: ``if``, ``?:``, ``&&`` and ``||``."""

    def __init__(self, constants: _Constants) -> None:
        self.constants = constants
        self.changed = False

    # statements

    def block(self, nodes: list[_Node]) -> list[_Node]:
        """A list of statements (or of declarations)."""
        nodes = self.expressions(nodes)
        out: list[_Node] = []
        i = 0
        while i < len(nodes):
            node = nodes[i]
            found = self._branch(nodes, i) if _is(node, "if") else self._loop(nodes, i) if _is(node, "for") else None
            if found is None:
                out.append(node)
                i += 1
                continue
            self.changed = True
            statement, i = found
            alone = self.in_list(out)
            if alone:
                indent = _indent_at(out)
                spliced = self._splice(statement, indent, nodes)
                if _solid(spliced):
                    if isinstance(spliced[0], _Token) and spliced[0].kind == "directive":
                        _end_line(out)
                    out += spliced
                else:
                    _drop_comment_before(out)
                    i = _skip_line(nodes, i, out)
            else:
                out += statement if _solid(statement) else [_Group("{", [], "}")]
        return self._after_return(out)

    def _branch(self, nodes: list[_Node], i: int) -> tuple[list[_Node], int] | None:
        """The statement that an ``if`` at ``i`` comes down to, and where it ends; None if that is open."""
        j = _next(nodes, i + 1)
        if _is(nodes[j], "constexpr"):
            j = _next(nodes, j + 1)
        head = nodes[j]
        assert isinstance(head, _Group)
        value = self.constants.value(head.inside)
        if value is None:
            return None
        begin = _next(nodes, j + 1)
        end = _statement_end(nodes, begin)
        otherwise = _next(nodes, end)
        if otherwise >= len(nodes) or not _is(nodes[otherwise], "else"):
            return (nodes[begin:end] if value else []), end
        second = _next(nodes, otherwise + 1)
        last = _statement_end(nodes, second)
        return nodes[begin:end] if value else nodes[second:last], last

    def _loop(self, nodes: list[_Node], i: int) -> tuple[list[_Node], int] | None:
        """Nothing for a ``for`` at ``i`` that never runs, and where it ends."""
        j = _next(nodes, i + 1)
        head = nodes[j]
        assert isinstance(head, _Group)
        parts = [_solid(part) for part in _split(head.inside, ";")]
        if len(parts) != 3 or not parts[1]:
            return None
        never = self.constants.value(parts[1]) == 0
        first = parts[0]
        if len(first) == 4 and _is(first[0], "int") and _is(first[2], "=") and len(parts[1]) >= 3:
            begin, counter, compare = self.constants.value(first[3:]), parts[1][0], parts[1][1]
            end = self.constants.value(parts[1][2:])
            if _is(counter, _word(first[1])) and _is(compare, "<") and begin is not None and end is not None:
                never |= begin >= end
        return ([], _statement_end(nodes, j + 1)) if never else None

    @staticmethod
    def in_list(before: Sequence[_Node]) -> bool:
        """Whether a statement behind these stands in a list of statements, not under a head or an ``else``."""
        for last in reversed(before):
            if isinstance(last, _Group):
                return last.open == "{"
            if last.kind not in ("space", "comment", "directive"):
                return _is(last, ";")
        return True

    def _splice(self, statement: list[_Node], indent: int, around: Sequence[_Node]) -> list[_Node]:
        solid = _solid(statement)
        if len(solid) == 1 and isinstance(solid[0], _Group) and solid[0].open == "{":
            inside = solid[0].inside
            if _declares(inside) & _names_at(n for n in around if n not in statement):
                return statement
            statement = list(inside)
            while statement and isinstance(statement[0], _Token) and statement[0].kind == "space":
                statement.pop(0)
            while statement and isinstance(statement[-1], _Token) and statement[-1].kind == "space":
                statement.pop()
            return _shift(statement, indent - _inner_indent(inside, indent))
        return statement

    def _after_return(self, nodes: list[_Node]) -> list[_Node]:
        """Without what follows a ``return`` in its list."""
        for i, node in enumerate(nodes):
            if _is(node, "return") and self.in_list(nodes[:i]):
                end = _statement_end(nodes, i)
                if _solid(nodes[end:]) and not any(_is(n, "else") for n in nodes[end : _next(nodes, end) + 1]):
                    if _is_conditional(nodes, i):
                        continue
                    self.changed = True
                    return [*nodes[:end], *_last_space(nodes)]
        return nodes

    # expressions

    def expressions(self, nodes: list[_Node]) -> list[_Node]:
        out: list[_Node] = []
        segment: list[_Node] = []
        head = False
        for node in nodes:
            if isinstance(node, _Group):
                before, self.changed = self.changed, False
                inside = self.block(node.inside) if node.open == "{" else self.expressions(node.inside)
                node = _Group(node.open, inside, node.close, node.folded or (self.changed and node.open == "("))
                self.changed |= before
                if (head and node.open == "(") or node.open == "{":
                    out += [*self.segment(segment), node]
                    segment, head = [], False
                    continue
                segment.append(node)
            elif node.kind == "directive":
                out += [*self.segment(segment), self._definition(node)]
                segment = []
            elif node.kind in ("mark", "name") and node.text in _SEPARATORS:
                out += [*self.segment(segment), node]
                segment = []
                if node.text in _HEADS:
                    head = True
            elif _is(node, ":") and not any(_is(n, "?") for n in segment):
                out += [*self.segment(segment), node]
                segment = []
            else:
                segment.append(node)
        return out + self.segment(segment)

    def _definition(self, node: _Token) -> _Token:
        """A macro with its body folded, where that is an expression; a loop's unrolling as a number."""
        pragma = _UNROLL.match(node.text)
        if pragma is not None:
            code, comment = _comment_of(pragma[1])
            times = self.constants.value(_tree(_tokens(code)))
            if times is not None and not re.fullmatch(r"\w+", code):
                node = _Token("directive", f"#pragma unroll {times}" + (f"  {comment}" if comment else ""))
            return node
        found = _DEFINE.match(node.text)
        if found is None or '"' in found[3] or "\\" in found[3]:
            return node
        code, comment = _comment_of(found[3])
        body = _text(self.expressions(_tree(_tokens(code))))
        return _Token("directive", node.text if body == code else _defined(found[1], found[2], body, comment))

    def segment(self, nodes: list[_Node]) -> list[_Node]:
        """An expression between separators; white space around it stays."""
        begin, end = 0, len(nodes)
        while begin < end and _trivial(nodes[begin]):
            begin += 1
        while end > begin and _trivial(nodes[end - 1]):
            end -= 1
        core = nodes[begin:end]
        if len(core) < 2 or not any(n.folded if isinstance(n, _Group) else n.text in _CHOOSING for n in core):
            return nodes
        return [*nodes[:begin], *self.choice(core), *nodes[end:]]

    def choice(self, nodes: list[_Node]) -> list[_Node]:
        asks = next((i for i, n in enumerate(nodes) if _is(n, "?")), None)
        if asks is None:
            return self.logic(nodes)
        depth = 0
        for j in range(asks + 1, len(nodes)):
            if _is(nodes[j], "?"):
                depth += 1
            elif _is(nodes[j], ":"):
                if depth == 0:
                    break
                depth -= 1
        else:
            return nodes
        condition, first, second = _strip(nodes[:asks]), _strip(nodes[asks + 1 : j]), _strip(nodes[j + 1 :])
        value = self.constants.value(condition)
        if value is not None:
            self.changed = True
            return self.choice(first if value else second)
        spaced = nodes[asks - 1 : asks + 2], nodes[j - 1 : j + 2]
        out = [*self.logic(condition), *[n for n in spaced[0] if _trivial(n) or _is(n, "?")]]
        return [*out, *self.choice(first), *[n for n in spaced[1] if _trivial(n) or _is(n, ":")], *self.choice(second)]

    def logic(self, nodes: list[_Node]) -> list[_Node]:
        for mark in ("||", "&&"):
            parts = _split(nodes, mark)
            if len(parts) == 1:
                continue
            kept: list[list[_Node]] = []
            dropped = False
            for part in parts:
                value = self.constants.value(part)
                if value is None:
                    kept.append(self.segment(part))
                elif bool(value) == (mark == "||"):
                    self.changed = True
                    return [_Token("name", "true" if value else "false")]
                else:
                    dropped = True
            if not kept:
                self.changed = True
                return [_Token("name", "false" if mark == "||" else "true")]
            if dropped:
                self.changed = True
            out = _strip(kept[0]) if dropped else kept[0]
            if dropped and len(kept) == 1 and len(out) == 1 and isinstance(out[0], _Group) and out[0].open == "(":
                return _strip(out[0].inside)
            for part in kept[1:]:
                if dropped:
                    out = [*out, _Token("space", " "), _Token("mark", mark), _Token("space", " "), *_strip(part)]
                else:
                    out = [*out, _Token("mark", mark), *part]
            return out
        return self._plain(nodes)

    def _plain(self, nodes: list[_Node]) -> list[_Node]:
        """Without the parentheses and zeros that a choice has left without a purpose."""
        out: list[_Node] = []
        for i, node in enumerate(nodes):
            if not (isinstance(node, _Group) and node.folded):
                out.append(node)
                continue
            before = next((n for n in reversed(nodes[:i]) if not _trivial(n)), None)
            after = next((n for n in nodes[i + 1 :] if not _trivial(n)), None)
            if before is None or _is(before, *"+-*/%<&|!?:", "==", "!=", "&&", "||", "<=", ">=", ">>", "<<"):
                solid = _solid(node.inside)
                marks = {n.text for n in solid if isinstance(n, _Token) and n.kind == "mark"}
                if len(solid) == 1 and (isinstance(solid[0], _Group) or solid[0].kind != "comment"):
                    out.append(solid[0])
                    continue
                sum_around = (before is None or _is(before, "+", "==", "<")) and (after is None or _is(after, "+", "-"))
                product = marks <= {"*", "/", "%"} and not any(
                    isinstance(n, _Token) and n.kind == "comment" for n in solid
                )
                if product and sum_around and not (before is None and after is None):
                    out += _strip(node.inside)
                    continue
            out.append(node)
        return self._without_zeros(out)

    def _without_zeros(self, nodes: list[_Node]) -> list[_Node]:
        """``a + 0`` and ``0 + a`` are ``a``."""
        for i, node in enumerate(nodes):
            if not (isinstance(node, _Token) and node.kind == "number" and node.text == "0"):
                continue
            j, k = i - 1, _next(nodes, i + 1)
            while j >= 0 and _trivial(nodes[j]):
                j -= 1
            before = nodes[j] if j >= 0 else None
            after = nodes[k] if k < len(nodes) else None
            if _is(before, "+") and j > 0 and (after is None or _is(after, "+", "-", "<", "==")):
                while j > 0 and _trivial(nodes[j - 1]):
                    j -= 1
                self.changed = True
                return self._without_zeros([*nodes[:j], *nodes[i + 1 :]])
            if before is None and _is(after, "+"):
                self.changed = True
                return self._without_zeros(nodes[_next(nodes, k + 1) :])
        return nodes


def _strip(nodes: Sequence[_Node]) -> list[_Node]:
    begin, end = 0, len(nodes)
    while begin < end and _trivial(nodes[begin]):
        begin += 1
    while end > begin and _trivial(nodes[end - 1]):
        end -= 1
    return list(nodes[begin:end])


def _next(nodes: Sequence[_Node], i: int) -> int:
    while i < len(nodes) and _trivial(nodes[i]):
        i += 1
    return i


def _statement_end(nodes: Sequence[_Node], i: int) -> int:
    """Where the statement that begins at or behind ``i`` ends."""
    while i < len(nodes) and (_trivial(nodes[i]) or (isinstance(nodes[i], _Token) and nodes[i].kind == "directive")):  # type: ignore[union-attr]
        i += 1
    node = nodes[i]
    if isinstance(node, _Group) and node.open == "{":
        return i + 1
    if _is(node, "if"):
        j = _next(nodes, i + 1)
        if _is(nodes[j], "constexpr"):
            j = _next(nodes, j + 1)
        end = _statement_end(nodes, j + 1)
        after = _next(nodes, end)
        return _statement_end(nodes, after + 1) if after < len(nodes) and _is(nodes[after], "else") else end
    if _is(node, "for", "while", "switch"):
        return _statement_end(nodes, _next(nodes, i + 1) + 1)
    while i < len(nodes) and not _is(nodes[i], ";"):
        i += 1
    return i + 1


def _is_conditional(nodes: Sequence[_Node], i: int) -> bool:
    """Whether the statement at ``i`` is a part of a longer one."""
    at = 0
    while at < len(nodes):
        begin = at
        while begin < len(nodes) and (
            _trivial(nodes[begin]) or (isinstance(nodes[begin], _Token) and nodes[begin].kind == "directive")  # type: ignore[union-attr]
        ):
            begin += 1
        if begin >= i:
            return begin > i
        at = _statement_end(nodes, begin)
    return True


def _last_space(nodes: Sequence[_Node]) -> list[_Node]:
    last = nodes[-1] if nodes else None
    return [last] if isinstance(last, _Token) and last.kind == "space" else []


def _indent_at(before: Sequence[_Node]) -> int:
    for node in reversed(before):
        if isinstance(node, _Token) and node.kind == "space" and "\n" in node.text:
            return len(node.text) - node.text.rfind("\n") - 1
    return 0


def _inner_indent(inside: Sequence[_Node], default: int) -> int:
    for node, following in zip(inside, [*inside[1:], None]):
        if isinstance(following, _Token) and following.kind == "directive":
            continue  # those stand at the beginning of their lines
        if isinstance(node, _Token) and node.kind == "space" and "\n" in node.text:
            return len(node.text) - node.text.rfind("\n") - 1
    return default


def _end_line(out: list[_Node]) -> None:
    """Takes the indent off that a directive is not to have."""
    last = out[-1] if out else None
    if isinstance(last, _Token) and last.kind == "space" and "\n" in last.text:
        out[-1] = _Token("space", last.text[: last.text.rfind("\n") + 1])


def _shift(nodes: Iterable[_Node], by: int) -> list[_Node]:
    out: list[_Node] = []
    every = list(nodes)
    for i, node in enumerate(every):
        if isinstance(node, _Group):
            out.append(_Group(node.open, _shift(node.inside, by), node.close, node.folded))
        elif node.kind == "space" and "\n" in node.text:
            following = every[i + 1] if i + 1 < len(every) else None
            if isinstance(following, _Token) and following.kind == "directive":
                out.append(node)
                continue
            head, _, indent = node.text.rpartition("\n")
            out.append(_Token("space", f"{head}\n{' ' * max(0, len(indent) + by)}"))
        else:
            out.append(node)
    return out


def _drop_comment_before(out: list[_Node]) -> None:
    """Takes the lines of comment off that stand right above a statement that is gone, and the statement's indent."""
    while len(out) >= 2 and isinstance(out[-1], _Token) and isinstance(out[-2], _Token):
        space, comment = out[-1], out[-2]
        if space.kind != "space" or space.text.count("\n") != 1 or comment.kind not in ("comment", "directive"):
            return
        before = out[-3] if len(out) >= 3 else None
        if not (isinstance(before, _Token) and before.kind == "space" and "\n" in before.text):
            return
        del out[-2:]


def _skip_line(nodes: Sequence[_Node], i: int, out: list[_Node]) -> int:
    """Past a statement that is gone: its trailing comment, and its line if it had one of its own."""
    while i < len(nodes):
        node = nodes[i]
        if not isinstance(node, _Token) or not (
            node.kind == "comment" or (node.kind == "space" and "\n" not in node.text)
        ):
            break
        i += 1
    if out and isinstance(out[-1], _Token) and out[-1].kind == "space" and "\n" in out[-1].text:
        following = nodes[i] if i < len(nodes) else None
        if isinstance(following, _Token) and following.kind == "space":
            out.pop()
    return i


def _declares(nodes: Sequence[_Node]) -> set[str]:
    """Names that a list of statements may declare for itself; some too many do no harm."""
    found: set[str] = set()
    words = [n for n in nodes if not _trivial(n)]
    for i in range(1, len(words)):
        word, before = words[i], words[i - 1]
        if not (isinstance(word, _Token) and word.kind == "name"):
            continue
        if isinstance(before, _Token) and (
            (before.kind == "name" and before.text not in ("return", "else", "constexpr", "const", "goto"))
            or before.text in ("*", "&", ",", ">")
        ):
            found.add(word.text)
    return found


def _names_at(nodes: Iterable[_Node]) -> set[str]:
    return _declares(list(nodes))


# --- variables that nothing reads ------------------------------------------------------------------------------------

_LOCAL = {"int", "bool", "u32", "u64", "i64", "float", "double", "T", "Acc", "uint2", "uint4", "Chunk"}


def _without_unused(nodes: list[_Node]) -> tuple[list[_Node], bool]:
    """Functions without variables that are never read, and whether there were any."""
    changed = False
    out: list[_Node] = []
    struct = False
    for node in nodes:
        if _is(node, "struct", "=", ";"):
            struct = not _is(node, ";")
        if isinstance(node, _Group) and node.open == "{" and not struct:
            counts: dict[str, int] = {}
            before = ""
            for token in _flat(node.inside):
                member, before = before in (".", "->"), token.text
                if token.kind == "name" and not member:
                    counts[token.text] = counts.get(token.text, 0) + 1
                elif token.kind == "directive":
                    for name in re.findall(r"[A-Za-z_]\w*", token.text):
                        counts[name] = counts.get(name, 0) + 1
            inside = _prune(node.inside, counts)
            changed |= inside is not node.inside
            node = _Group(node.open, inside, node.close, node.folded)
        out.append(node)
    return out, changed


def _prune(nodes: list[_Node], counts: Mapping[str, int]) -> list[_Node]:
    """The same list where nothing went."""
    out: list[_Node] = []
    changed = False
    i = 0
    while i < len(nodes):
        node = nodes[i]
        if isinstance(node, _Group):
            inside = _prune(node.inside, counts)
            if inside is not node.inside:
                node, changed = _Group(node.open, inside, node.close, node.folded), True
        elif (
            node.kind == "name"
            and (node.text in _LOCAL or node.text in ("const", "constexpr"))
            and _Folder.in_list(out)
        ):
            end = _statement_end(nodes, i)
            statement = nodes[i:end]
            kept = _pruned(statement, counts)
            if kept is not statement:
                changed, i = True, end
                if kept:
                    out += kept
                else:
                    i = _skip_line(nodes, i, out)
                continue
        out.append(node)
        i += 1
    return out if changed else nodes


def _pruned(statement: list[_Node], counts: Mapping[str, int]) -> list[_Node]:
    """A declaration without what is used nowhere else; its initial values must have no effects."""
    words = _solid(statement)
    at = 1 if _is(words[0], "const", "constexpr") else 0
    if not (isinstance(words[at], _Token) and words[at].text in _LOCAL) or len(words) < at + 3:  # type: ignore[union-attr]
        return statement
    parts = _split(statement[statement.index(words[at]) + 1 : -1], ",")

    def idle(part: list[_Node]) -> bool:
        solid = _solid(part)
        name = solid[0] if solid else None
        if not isinstance(name, _Token) or name.kind != "name" or counts.get(name.text, 0) != 1:
            return False
        if any(_is(n, "++", "--") for n in _flat(solid)):
            return False
        calls = (
            isinstance(b, _Group) and b.open == "(" and isinstance(a, _Token) and a.kind == "name"
            for a, b in _pairs(solid)
        )
        return not any(calls)

    kept = [part for part in parts if not idle(part)]
    if len(kept) == len(parts):
        return statement
    if not kept:
        return []
    head = list(statement[: statement.index(words[at]) + 1])
    out = [*head, _Token("space", " "), *_strip(kept[0])]
    for part in kept[1:]:
        out += [_Token("mark", ","), _Token("space", " "), *_strip(part)]
    return [*out, _Token("mark", ";")]


def _pairs(nodes: Sequence[_Node]) -> Iterator[tuple[_Node, _Node]]:
    return zip(nodes, nodes[1:])


# --- declarations ----------------------------------------------------------------------------------------------------


@dataclass
class _Item:
    """A declaration with the comments that belong to it, or (no names, no code) a comment that stands for itself."""

    lead: str
    code: list[_Node]
    trail: str
    names: tuple[str, ...]
    gap: int
    """Blank lines before it."""

    @property
    def uses(self) -> set[str]:
        found: set[str] = set()
        for token in _flat(self.code):
            if token.kind == "name":
                found.add(token.text)
            elif token.kind == "directive":
                found.update(re.findall(r"[A-Za-z_]\w*", _comment_of(token.text)[0]))
        return found - set(self.names)


def _unwrapped(nodes: list[_Node]) -> list[_Node]:
    """What a namespace around everything holds: the text may be one that this module has written."""
    solid = _solid(nodes)
    if len(solid) == 3 and _is(solid[0], "namespace") and isinstance(solid[2], _Group):
        return solid[2].inside
    return nodes


def _items(nodes: Sequence[_Node]) -> list[_Item]:
    found: list[_Item] = []
    lead = ""
    gap = 0
    i = 0
    while i < len(nodes):
        node = nodes[i]
        if isinstance(node, _Token) and node.kind == "space":
            blank = node.text.count("\n") - (1 if i and not (lead and nodes[i - 1] is not None and False) else 0)
            if lead and node.text.count("\n") > 1:
                found.append(_Item(lead, [], "", (), gap))
                lead, gap = "", 0
            gap = max(gap, blank) if not lead else gap
            i += 1
            continue
        if isinstance(node, _Token) and node.kind == "comment":
            lead += node.text + "\n"
            i += 1
            continue
        if isinstance(node, _Token) and node.kind == "directive":
            name = _DEFINE.match(node.text)
            if node.text.startswith("#undef"):
                i += 1
                continue
            found.append(_Item(lead, [node], "", (name[1],) if name else (), gap))
            i += 1
        else:
            end = _declaration_end(nodes, i)
            code = list(nodes[i:end])
            trail, i = _trail(nodes, end)
            found.append(_Item(lead, code, trail, _names_of(code), gap))
        lead, gap = "", 0
    if lead:
        found.append(_Item(lead, [], "", (), gap))
    return found


def _trail(nodes: Sequence[_Node], i: int) -> tuple[str, int]:
    """A comment on a declaration's last line, and those that go on below it."""
    trail = ""
    while i + 1 < len(nodes):
        space, comment = nodes[i], nodes[i + 1]
        if not (isinstance(space, _Token) and space.kind == "space"):
            break
        if not (isinstance(comment, _Token) and comment.kind == "comment"):
            break
        far = len(space.text) - space.text.rfind("\n") - 1
        if "\n" in space.text and not (trail and space.text.count("\n") == 1 and far >= 8):
            break
        trail += ("\n" if trail else "") + comment.text
        i += 2
    return trail, i


def _declaration_end(nodes: Sequence[_Node], i: int) -> int:
    called = struct = assigned = False
    for j in range(i, len(nodes)):
        node = nodes[j]
        if _is(node, "struct", "namespace", "union", "enum"):
            struct = True
        elif _is(node, "="):
            assigned = True
        elif isinstance(node, _Group) and node.open == "(":
            called = True
        body = isinstance(node, _Group) and node.open == "{" and called and not assigned and not struct
        if body or _is(node, ";"):
            return j + 1
    return len(nodes)


def _names_of(code: Sequence[_Node]) -> tuple[str, ...]:
    words = _solid(code)
    if _is(words[0], "template"):
        words = words[next(i for i, n in enumerate(words) if _is(n, ">")) + 1 :]
    last = words[-1]
    first = words[0]
    if _is(first, "static_assert"):
        return ()
    if _is(first, "typedef"):
        return (_word(words[-2]),)
    if _is(first, "using", "namespace"):
        return (_word(words[1]),)
    if _is(first, "struct"):
        at = 1
        while _is(words[at], "alignas") or isinstance(words[at], _Group):
            at += 1
        return (_word(words[at]),)
    if isinstance(last, _Group):  # a function: the word before its parameters
        calls = [i for i, n in enumerate(words) if isinstance(n, _Group) and n.open == "("]
        return (_word(words[calls[-1] - 1]),)
    return tuple(name for part in _split(words[:-1], ",") for name in [_declarator(part)] if name)


def _word(node: _Node) -> str:
    return node.text if isinstance(node, _Token) else ""


def _declarator(words: Sequence[_Node]) -> str:
    end = next((i for i, n in enumerate(words) if _is(n, "=") or isinstance(n, _Group)), len(words))
    names = [n.text for n in words[:end] if isinstance(n, _Token) and n.kind == "name"]
    return names[-1] if names else ""


def _kept(items: list[_Item], entries: Sequence[str]) -> list[_Item]:
    """The items that the entries reach, and the comments that still stand for something."""
    by_name: dict[str, list[_Item]] = {}
    for item in items:
        for name in item.names:
            by_name.setdefault(name, []).append(item)
    for entry in entries:
        if entry not in by_name:
            raise ValueError(f"source must have every entry; it has no {entry!r}")
    reached: set[int] = set()
    todo = [item for entry in entries for item in by_name[entry]]
    while todo:
        item = todo.pop()
        if id(item) in reached:
            continue
        reached.add(id(item))
        for name in item.uses | set(item.names):
            todo += by_name.get(name, [])
    kept: list[_Item] = []
    waiting: list[_Item] = []
    for i, item in enumerate(items):
        if not item.code:
            # The head of the file; behind the macros, unless it speaks of other files.
            first = all(_text(i_.code).startswith("constexpr") for i_ in items[:i])
            if first and not (any(i_.code for i_ in items[:i]) and _ELSEWHERE.search(item.lead)):
                kept.append(item)
                continue
            waiting = [item]  # a heading stands for what follows up to the next one
        elif id(item) in reached:
            kept += waiting
            waiting = []
            kept.append(item)
    return kept


# --- the result ------------------------------------------------------------------------------------------------------

WIDTH = 120
"""Columns of a line."""

_AXES = "DHW"
_ELSEWHERE = re.compile(r"NVRTC|\.py\b|\bplanner|come as macros|\bDTYPE\b")


def _render(items: Sequence[_Item], entries: Sequence[str], constants: _Constants) -> tuple[str, list[str]]:
    """The text of the items, and the macros that it leaves defined."""
    items = _headed(_explained(_grouped(list(items), constants), entries))
    out: list[str] = []
    left: list[str] = []
    for item in items:
        text = _text(item.code).replace('extern "C" ', "")
        if item.code and isinstance(item.code[0], _Token) and item.code[0].kind == "directive":
            left += item.names
        lead, trail = _about(item.lead), _about(item.trail, begins=False)
        if not item.code and not lead:
            continue
        out.append("\n" * min(item.gap, 1) + lead + text + (f"  {trail.strip()}" if trail else "") + "\n")
    body = "".join(out)
    for pattern, put in (
        (r"\n[ \t]*, ", ", "),  # parameters that had an #if of their own
        (r"(\w)\n\) \{", r"\1) {"),
        (r"\}\n[ \t]*else\b", "} else"),
        (r"\{\n\n+", "{\n"),
        (r"\n\n+([ \t]*\})", r"\n\1"),
        (r"[ \t]+\n", "\n"),
        (r"\n{3,}", "\n\n"),
    ):
        body = re.sub(pattern, put, body)
    body = _PARAMETERS.sub(_parameters, body)
    lines = [part for line in body.strip("\n").splitlines() for part in _wrapped(line)]
    return "\n".join(lines) + "\n", left


def _explained(items: list[_Item], entries: Sequence[str]) -> list[_Item]:
    """Comments for the constants that came as bare macros."""
    meanings = {**_EVERYWHERE, **next((_MEANINGS[entry] for entry in entries if entry in _MEANINGS), {})}
    for item in items:
        if item.code and _is(item.code[0], "constexpr") and not item.trail and not item.lead:
            stem = re.sub(r"_?[DHW]$", "", item.names[0]) if len(item.names) > 1 else item.names[0]
            meaning = meanings.get(stem) or meanings.get(item.names[0])
            item.trail = f"// {meaning}" if meaning else ""
    return items


# Of macros that a plan sets; what a source derives from them it explains itself.
_EVERYWHERE = {
    "ELEMENT": "bytes of an element",
    "CIN": "channels of what is read",
    "COUT": "channels of what is written",
    "CIN_G": "channels of a group in what is read",
    "COUT_G": "channels of a group in what is written",
    "TAPS": "of the kernel, over all axes",
    "PRODUCER_REGISTERS": "of a thread",
    "CONSUMER_REGISTERS": "of a thread",
    "TILE_N": "images of a tile",
}
_DIRECT = {
    "CI": "input channels of a group",
    "CO_GROUP": "output channels of a group",
    "CO": "output channels of a block",
    "K": "kernel",
    "S": "stride",
    "P": "padding",
    "D": "dilation",
    "CELLS": "neighbouring cells of a thread",
    "PIECES": "threads of a cell",
    "BLOCK_X": "threads along W",
    "BLOCK_H": "cells of a block along H",
    "SLOTS": "groups of a block",
    "CHUNK": "input channels of a stage",
    "STAGES": "of shared memory",
    "PHASES_H": "output rows of a thread",
    "SPLIT": "sets of threads that share the channels of a stage",
    "MIN": "first input row and column of cell 0",
    "SPAN": "rows and columns of a halo",
    "ROW_PITCH": "words from one input row to the next in shared memory",
    "RUN_PITCH": "words from one thread's outputs to the next one's in shared memory",
    "PART": "output channels that leave through shared memory together",
    "MIN_BLOCKS": "of a multiprocessor",
    "STEP_KH": "taps from one of a phase to the next",
    "STEP_ROW": "input rows between them",
}
_LAYER = {"KERNEL": "the layer's", "STEP": "stride", "DIL": "dilation", "PAD": "padding"}
# Of the gradients on CUDA cores.
_GRADIENT = {
    **_LAYER,
    "CIN": "the layer's input channels",
    "COUT": "the layer's output channels",
    "CIN_G": "input channels of a group",
    "COUT_G": "output channels of a group",
    "CI_TILE": "input channels of a thread",
    "CHANNELS": "channels of a block: the lanes of a warp",
    "TILE": "positions q of a tile",
    "ROWS": "positions of a thread, one below the other",
    "SPAN": "rows and columns of g that a tile needs",
    "SHIFT": "columns by which a tile of g begins early, so that it begins at a unit",
    "PLANE_PITCH": "words from one plane of g's columns to the next",
    "VECTOR": "elements of a unit",
    "BATCH": "units of a thread that are on their way at a time",
    "THREADS": "of a block",
    "WARPS": "of a block",
    "MIN_BLOCKS": "of a multiprocessor",
}
_MEANINGS: dict[str, dict[str, str]] = {
    "gather": {
        "PARTS": "TF32 parts of an operand: 2 for IEEE float32, in three products",
        "FIRST": "where a tile's halo begins, relative to IN_STEP q",
        "CK": "channels of a chunk",
        "SUB": "the 64 positions q that one matrix instruction takes",
        "SUBS": "(d, h) sub-positions in a block of 64 rows of M",
        "ROWS_PER_SUB": "output channels of a sub-position in a block",
        "W_SUBS": "W sub-positions of a tile, neighbours in a thread",
        "MB": "blocks of 64 rows that a consumer accumulates",
        "VARIANTS": "M-groups that differ in their taps",
        "STRETCHES": "of a chunk's code: variants whose taps lie alike share one",
        "COUT_BLOCKS": "M-groups that share the output channels of a group",
        "M_GROUPS": "groups x COUT_BLOCKS x VARIANTS",
        "STAGES_P": "input tiles in shared memory",
        "STAGES_S": "staging slots",
        "STAGES_W": "stages of the weights: of the ring, or chunks",
        "W_STAGE": "fragments of weights in a stage of the ring, at most",
        "RING_FRAGMENTS": "fragments of weights in shared memory",
        "RUN_GROUPS": "groups of 8 columns that the epilogue stores together",
        "ROWS": "input rows of a tile",
        "ROW_STEP": "rows of the tile from one q to the next",
        "COLUMNS": "input columns of a tile with its halo",
        "COLUMN_PAD": "columns by which a box begins early",
        "PLANE": "columns with one residue modulo IN_STEP_W",
        "PLANES": "residues that some tap reads; of several boxes all",
        "BOX_UNITS": "16-byte units of a row of a box",
        "TAPS_UNROLLED": "taps of one stretch of code",
        "FRAGMENT_SETS": "sets of registers that weights take in turn",
        "OUT_STEP": "outputs from one q to the next",
        "IN_STEP": "inputs from one q to the next",
        "TILE": "positions q of a tile",
    },
    "wgrad": {
        **_LAYER,
        "BLOCK_CI": "input channels of a block",
        "BLOCK_CO": "output channels of a block",
        "TAPS": "of a set, which a block multiplies",
        "SETS": "of taps",
        "TILE": "positions q of a chunk",
        "WGS": "warpgroups that multiply",
        "WGS_M": "of them, those that divide the output channels",
        "SUBS": "taps that share the 64 rows of a matrix instruction",
        "ENTRIES": "accumulators of 64 rows of a warpgroup",
        "STACK": "rows of x that may meet a row of g",
        "STAGES": "chunks in shared memory",
        "ROW_CLASSES": "of rows of g along H, by where they begin in 16 bytes",
        "CHANNEL_CLASSES": "and of channels",
        "STRETCH": "matrix instructions between whose ends the tensor cores do not drain",
        "WARP_M": "input channels of a warp",
        "WARP_N": "output channels of a warp",
    },
    "direct": _DIRECT,
    "direct_walk": _DIRECT,
    "direct_any": _DIRECT,
    "grad_input": {
        **_GRADIENT,
        "UNROLL": "taps in one stretch of code",
        "KW_TILE": "columns of the taps that a thread takes",
        "KW_PARTS": "sets of threads that share the columns of the taps",
        "WEIGHTS_READ": "words of a tap's weights that a thread reads",
        "STORED": "input channels that are stored together",
    },
    "grad_weight": {
        **_GRADIENT,
        "CO_TILE": "output channels of a thread",
        "TAP_TILE": "taps of a thread",
        "KH_TILE": "rows of the taps that a thread takes",
        "KW_TILE": "columns of the taps that a thread takes",
    },
}


def _headed(items: list[_Item]) -> list[_Item]:
    """The comment on the whole comes first, before the constants."""
    at = next((i for i, item in enumerate(items) if not item.code), None)
    if at is None or not all(_text(item.code).startswith("constexpr") for item in items[:at]):
        return items
    items[at].gap = 0
    if items[:at]:
        items[0].gap = 1
    return [items[at], *items[:at], *items[at + 1 :]]


def _apart(item: _Item) -> list[_Item]:
    """An item for each constant of a declaration."""
    words = _solid(item.code)
    if len(item.names) < 2 or not _is(words[0], "constexpr"):
        return [item]
    parts = _split(words[2:-1], ",")
    found = []
    for i, (name, part) in enumerate(zip(item.names, parts)):
        expression = _text(_spaced(part))
        code = _tree(_tokens(f"constexpr {_word(words[1])} {expression};"))
        lead, trail = item.lead if i == 0 else "", item.trail if i == len(parts) - 1 else ""
        found.append(_Item(lead, code, trail, (name,), item.gap if i == 0 else 0))
    return found


def _spaced(words: Sequence[_Node]) -> list[_Node]:
    """Words of a declarator with a space between them, as this module writes them."""
    out: list[_Node] = []
    for i, word in enumerate(words):
        if i and not (_is(words[i - 1], "-", "!") and (i == 1 or _is(words[i - 2], "=", "?", ":"))):
            out.append(_Token("space", " "))
        out.append(word)
    return out


def _grouped(items: list[_Item], constants: _Constants) -> list[_Item]:
    """Bare numbers of the three axes (``TILE_D``, ``TILE_H``, ``TILE_W``) share a line."""
    plain = {item.names[0]: item for item in items if _number(item, constants)}
    done: set[str] = set()
    out: list[_Item] = []
    for item in items:
        name = item.names[0] if len(item.names) == 1 else ""
        if name in done:
            continue
        stem = name[:-1] if re.fullmatch(r"\w+_[DHW]|[A-Z][DHW]", name) and name in plain else ""
        mates = [plain[stem + axis] for axis in _AXES if stem and stem + axis in plain]
        if len(mates) < 2:
            out.append(item)
            continue
        done.update(mate.names[0] for mate in mates)
        numbers = ", ".join(f"{mate.names[0]} = {constants.values[mate.names[0]]}" for mate in mates)
        lead = "".join(mate.lead for mate in mates)
        names = tuple(mate.names[0] for mate in mates)
        trail = next((mate.trail for mate in mates if mate.trail), "")
        out.append(_Item(lead, _tree(_tokens(f"constexpr int {numbers};")), trail, names, item.gap))
    return out


def _number(item: _Item, constants: _Constants) -> bool:
    words = _solid(item.code)
    found = len(item.names) == 1 and item.names[0] in constants.values and len(words) in (5, 6, 7)
    return found and _is(words[0], "constexpr") and not item.lead and _text(words[-2:-1]).isdigit()


def _settle(items: Sequence[_Item], constants: _Constants) -> None:
    """Gives every constant the form that it will have, which decides what else is needed."""
    declared: set[str] = set()
    for item in items:
        named = len(item.names) == 1 and item.names[0] in constants.values
        if named and _is(item.code[0], "constexpr"):
            item.code = _tree(_tokens(_constant(item, constants, declared)))
        declared.update(item.names)


def _constant(item: _Item, constants: _Constants, declared: set[str]) -> str:
    """A constant by its expression if that is simple and can be read here, else by its value."""
    name = item.names[0]
    value = constants.values[name]
    words = _solid(item.code)
    kind = _word(words[1])
    expression = item.code[item.code.index(next(n for n in words if _is(n, "="))) + 1 : -1]
    names = {t.text for t in _flat(expression) if t.kind == "name"}
    marks = {t.text for t in _flat(expression) if t.kind == "mark"}
    simple = marks <= {"(", ")", "+", "-", "*", "/", "%"} and names <= declared and names <= set(constants.values)
    if simple and names:
        return f"constexpr {kind} {name} = {_text(expression).strip()};"
    return f"constexpr {kind} {name} = {str(bool(value)).lower() if kind == 'bool' else value};"


def _about(comment: str, *, begins: bool = True) -> str:
    """A comment without what speaks of upconv's own files and compiler; ``begins``: its lines begin with a capital."""
    if not _ELSEWHERE.search(comment):
        return comment
    kept = []
    for line in comment.splitlines():
        body = line.removeprefix("//").strip()
        if _ELSEWHERE.search(body):
            body = " ".join(part for part in re.split(r"(?<=[.;]) ", body) if not _ELSEWHERE.search(part)).rstrip("; ")
            if not body:
                continue
            line = f"// {body[0].upper() if begins else body[0]}{body[1:]}"
        kept.append(line)
    while kept and kept[-1].strip() == "//":
        kept.pop()
    return "".join(f"{line}\n" for line in kept) if kept else ""


_PARAMETERS = re.compile(r"^(\w[^\n(){};#]*\()([^(){};]*,\n[^(){};]*)(\) \{)$", re.MULTILINE)


def _parameters(found: re.Match[str]) -> str:
    """A function's parameters over several lines, filled anew where one is too long."""
    if max(map(len, found[0].splitlines())) <= WIDTH:
        return found[0]
    begin, pad = found[1], " " * len(found[1])
    lines = [begin]
    parts = re.split(r",\s+", found[2])
    for part, end in zip(parts, [*"," * (len(parts) - 1), found[3]]):
        if len(f"{lines[-1]} {part}{end}") > WIDTH:
            lines.append(pad)
        lines[-1] += f"{'' if lines[-1] in (begin, pad) else ' '}{part}{end}"
    return "\n".join(lines)


def _head_end(code: str) -> int:
    """Where a line's head ``if (...)`` or the like ends, if its statement follows; else 0."""
    depth = place = 0
    if re.match(r"\s*(?:if|for|while) \(", code) is None:
        return 0
    for token in _tokens(code):
        place += len(token.text)
        depth += (token.text in "([{") - (token.text in ")]}") if token.kind == "mark" else 0
        if depth == 0 and token.text == ")":
            rest = code[place:].strip()
            return place if rest.endswith(";") and not rest.startswith(";") and " else " not in rest else 0
    return 0


def _wrapped(line: str) -> list[str]:
    """A line in parts of at most WIDTH columns, where it can be broken; macros that have several lines stay."""
    if len(line) > WIDTH and line.startswith("#define") and not line.endswith("\\") and "//" not in line:
        parts = textwrap.wrap(line, WIDTH - 6, break_long_words=False, break_on_hyphens=False)
        return " \\\n    ".join(parts).split("\n")
    if len(line) <= WIDTH or line.lstrip().startswith("#") or line.endswith("\\"):
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    if line.lstrip().startswith("//"):
        rule = re.fullmatch(r"(.*?)[-=]{8,}", line)
        if rule is not None:
            return [line[:WIDTH]]
        return [line] if len(line) <= WIDTH + 12 else _filled(line.lstrip()[2:].strip().split(), f"{indent}// ")
    code, comment = _comment_of(line)
    if comment:
        near = f"{indent}{code}  {comment}"  # comments may stand far off, in a column of their own
        return [near] if len(near) <= WIDTH else [*_wrapped(indent + comment), *_wrapped(indent + code)]
    numbers = re.fullmatch(r"(.* = \{)([-\d,]+)(\};)", line)
    if numbers is not None:
        rows = _filled(numbers[2].replace(",", ", ").split(), f"{indent}   ")
        return [numbers[1], *rows, f"{indent}{numbers[3]}"]
    short = re.fullmatch(r"(.*\)(?: const)? \{) (.*;) \}", line)
    if short is not None:
        return [*_wrapped(short[1]), *_wrapped(f"{indent}  {short[2]}"), f"{indent}}}"]
    if end := _head_end(line):
        return [*_wrapped(line[:end]), *_wrapped(f"{indent}  {line[end:].strip()}")]
    tokens = list(_tokens(line))
    best: tuple[int, int, int] | None = None  # depth, rank, place
    depth = column = 0
    for i, token in enumerate(tokens):
        column += len(token.text)
        if token.kind == "mark" and token.text in "([{":
            depth += 1
        elif token.kind == "mark" and token.text in ")]}":
            depth -= 1
        following = tokens[i + 1] if i + 1 < len(tokens) else None
        if following is None or following.kind != "space" or column > WIDTH:
            continue
        after = tokens[i + 2].text if i + 2 < len(tokens) else ""
        rank = 0 if token.text in (",", ";") or after == "::" else 1 if after in ("?", ":", "&&", "||") else 2
        breaks = after in ("?", ":", "::", "&&", "||", "+", "|") or token.text in (",", ";", "=")
        breaks = breaks or (token.text.startswith('"') and after.startswith('"%'))  # literals of an asm's registers
        if breaks and column > len(indent) + 20 and (best is None or (depth, rank) <= best[:2]):
            best = (depth, rank, i + 1)
    if best is None:
        return [line]
    first, rest = "".join(t.text for t in tokens[: best[2]]), "".join(t.text for t in tokens[best[2] + 1 :])
    same = (best[0] == 0 and first.endswith(";")) or line.lstrip().startswith('"')
    return [first, *_wrapped(indent + ("" if same else "    ") + rest)]


def _filled(words: Sequence[str], begin: str) -> list[str]:
    begin = begin if begin.isspace() else begin.rstrip()
    lines = [begin]
    for word in words:
        if len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append(begin)
        lines[-1] += f" {word}"
    return lines
