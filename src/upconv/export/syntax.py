"""The syntax tree of kernel files, and what is known of their constants by the structs that instantiate them."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import tree_sitter_cuda
from tree_sitter import Language, Node, Parser, Query, QueryCursor

Constants = Mapping[str, int | list[int]]
"""The integers and arrays of a struct, by name."""
EVERYTHING, NO_LOOPS, NO_VALUES = range(3)
"""What is folded of a part."""
WORD = re.compile(r"[A-Za-z_]\w*")
PART, PRAGMA = "//part", "//ragma"  # a line ahead of each part; a comment as long as #pragma

_CUDA = Language(tree_sitter_cuda.language())
_PARSER = Parser(_CUDA)
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: int(a / b),
    "%": lambda a, b: a - b * int(a / b), "<<": lambda a, b: a << b, ">>": lambda a, b: a >> b,
    "&": lambda a, b: a & b, "|": lambda a, b: a | b, "==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b), ">": lambda a, b: int(a > b), "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b), "&&": lambda a, b: int(bool(a and b)), "||": lambda a, b: int(bool(a or b)),
}  # fmt: skip
DECIDED_BY = {("*", 0): "0", ("&&", 0): "false", ("||", 1): "true", ("&", 0): "0"}
"""What operators give with a value on either side."""
TRUTH = {"true": 1, "false": 0}
_CONSTANTS = {
    "enumerator", "function_definition", "declaration", "field_declaration", "parameter_declaration",
    "optional_parameter_declaration", "variadic_parameter_declaration",
}  # fmt: skip
DECLARATIONS = ("declaration", "field_declaration")
_FOUND = _CONSTANTS | {
    "alias_declaration", "argument_list", "assignment_expression", "gnu_asm_expression", "init_declarator",
    "parameter_list", "static_assert_declaration", "struct_specifier", "template_function", "template_type",
    "update_expression",
}  # fmt: skip
_NAME = re.compile(r"\b(?!__restrict__\b|const\b)[A-Za-z_]\w*")  # a parameter's, which may be "(&name)[3]"
_QUERY = Query(_CUDA, f"[{' '.join(f'({one})' for one in sorted(_FOUND))}] @found")


class Tree:
    """A text's syntax tree, and what is known of its constants."""

    def __init__(
        self,
        text: str,
        structs: Sequence[Sequence[Constants]],
        literals: frozenset[str] = frozenset(),
        levels: Sequence[int] | None = None,
    ) -> None:
        self.source, self.literals = text.encode(), literals
        self.structs = [list(of) or [{}] for of in structs]
        self.root = _PARSER.parse(self.source).root_node
        found = QueryCursor(_QUERY).captures(self.root).get("found", [])
        self.nodes = sorted(found, key=lambda n: (n.start_byte, -n.end_byte))
        """Of the types that are looked for, in the text's order."""
        self.begins = [found.start() for found in re.finditer(PART.encode(), self.source)] or [0]
        precisions = {of["precision"] for part in self.structs for of in part if "precision" in of}
        self.precision = precisions.pop() if len(precisions) == 1 else None
        """That of all structs, which templates call P."""
        self.local: dict[str, int] = {}
        self.levels = list(levels or [EVERYTHING] * len(structs))
        self._values: dict[tuple[int, int | None], int | None] = {}
        """By expression and struct, where `local` is what it is."""
        self._members: dict[tuple[int, str, int | None], int | None] = {}
        self._variables_of: dict[int, set[str]] = {}

    def text(self, n: Node) -> str:
        return self.source[n.start_byte : n.end_byte].decode()

    def part(self, n: Node) -> int:
        return bisect_right(self.begins, n.start_byte) - 1

    def within(self, n: Node) -> list[Node]:
        """Of `nodes` those in one."""
        begin, end = (bisect_left(self._starts, at) for at in (n.start_byte, n.end_byte))
        return self.nodes[begin:end]

    @cached_property
    def _starts(self) -> list[int]:
        return [n.start_byte for n in self.nodes]

    @contextmanager
    def locally(self, local: dict[str, int]) -> Iterator[None]:
        """With these values of local variables."""
        before = self.local, self._values
        self.local, self._values = local, {}
        try:
            yield
        finally:
            self.local, self._values = before

    @cached_property
    def constants(self) -> list[dict[str, list[Node | int | None]]]:
        """By part and name: the values that are declared."""
        found: list[dict[str, list[Node | int | None]]] = [{} for _ in self.structs]
        self.again: list[set[str]] = [set() for _ in self.structs]
        for n in self.nodes:
            if n.type not in _CONSTANTS:
                continue
            names = found[self.part(n)]
            if n.type == "enumerator" and n.parent is not None:
                names.setdefault(self.text(n.named_children[0]), []).append(
                    [one for one in n.parent.named_children if one.type == "enumerator"].index(n)
                )
            elif n.type in DECLARATIONS and re.match(r"(static )?(__device__ )?constexpr", self.text(n)):
                for of, value in declared(n):
                    if value is not None and self.text(value).rpartition("::")[2] == self.text(of):
                        self.again[self.part(n)].add(self.text(of))
                    else:
                        names.setdefault(self.text(of), []).append(value)
            elif n.type == "function_definition" and (head := name_of(n.child_by_field_name("declarator"))) is not None:
                names.setdefault(self.text(head), []).append(_result(n))
        return found

    @cached_property
    def parameters(self) -> list[set[str]]:
        """By part: names of templates' and functions' parameters."""
        found: list[set[str]] = [set() for _ in self.structs]
        for n in self.nodes:
            if n.type.endswith("parameter_declaration") and (name := n.child_by_field_name("declarator")) is not None:
                found[self.part(n)].update(_NAME.findall(self.text(name))[:1])
        return found

    @cached_property
    def members(self) -> dict[tuple[int, str], list[Node | int | None]]:
        """By struct and name: the values of constants, results of functions, and None of fields."""
        found: dict[tuple[int, str], list[Node | int | None]] = {}
        for owner, n in self._in_structs():
            if n.type == "function_definition" and (name := name_of(n.child_by_field_name("declarator"))) is not None:
                found.setdefault((owner.id, self.text(name)), []).append(_result(n))
            elif n.type in DECLARATIONS:
                fixed = re.match(r"(static )?constexpr", self.text(n))
                for of, value in declared(n):
                    found.setdefault((owner.id, self.text(of)), []).append(value if fixed else None)
        return found

    @cached_property
    def aliases(self) -> dict[tuple[int, str], Node]:
        """By struct and name: the struct that a name stands for there, if there is one of that other name."""
        structs: dict[str, list[Node]] = {}
        for n in self.nodes:
            if n.type == "struct_specifier" and n.child_by_field_name("body") is not None:
                name = n.child_by_field_name("name")
                head = name.named_children[0] if name is not None and name.type == "template_type" else name
                structs.setdefault(self.text(head) if head is not None else "", []).append(n)
        found: dict[tuple[int, str], Node] = {}
        for owner, n in self._in_structs():
            if n.type == "alias_declaration":
                alias, _, of = self.text(n).removeprefix("using ").partition(" = ")
                if len(one := structs.get(re.split(r"[<;]", of)[0], [])) == 1:
                    found[owner.id, alias] = one[0]
        return found

    def _in_structs(self) -> Iterator[tuple[Node, Node]]:
        """Each struct with what it declares, templates of its functions too."""
        for owner in self.nodes:
            body = owner.child_by_field_name("body") if owner.type == "struct_specifier" else None
            for n in body.named_children if body is not None else ():
                yield owner, n.named_children[-1] if n.type == "template_declaration" else n

    @cached_property
    def uses(self) -> dict[str, list[Node]]:
        """Where templates are given arguments, by name."""
        found: dict[str, list[Node]] = {}
        for n in self.nodes:
            if n.type in ("template_type", "template_function"):
                found.setdefault(self.text(n.named_children[0]), []).append(n)
        return found

    @cached_property
    def same(self) -> list[dict[str, str]]:
        """By part: constants that are but other ones, or numbers."""
        found: list[dict[str, str]] = [{} for _ in self.structs]
        for part, (mine, names) in enumerate(zip(found, self.constants)):
            for name, values in names.items():
                constants = (isinstance(one, Node) and not _within(one) for one in values)
                texts = {self.text(one) if well else "" for one, well in zip(values, constants)}  # type: ignore[arg-type]
                text = texts.pop() if len(texts) == 1 else ""
                if text in self.parameters[part] or (name in self.again[part] and not text.isdigit()):
                    continue
                if re.fullmatch(r"\d+|true|false|(\w::)?\w+", text):
                    mine[name] = text
        return found

    @property
    def numbers(self) -> frozenset[str]:
        return frozenset(name for mine in self.same for name, text in mine.items() if text.isdigit())

    @cached_property
    def known(self) -> list[list[dict[str, int]]]:
        """By part and struct: constants that have one value wherever one of their name is declared."""
        self.known = [[{} for _ in of] for of in self.structs]  # in which the values of others are looked up
        with self.locally({}):
            while self._learn():
                pass
        return self.known

    def _learn(self) -> bool:
        """Whether a constant's value follows from those that are known."""
        self._values, self._members, new = {}, {}, False
        for part, names in enumerate(self.constants):
            for name, values in names.items():
                for struct, known in enumerate(self.known[part]):
                    if name in known:
                        continue
                    given = {one if isinstance(one, int) else self.value(one, struct) for one in values}
                    if len(given) == 1 and (value := given.pop()) is not None:
                        known[name], new = value, True
        return new

    def find(self, n: Node, name: str, struct: int) -> int | None:
        """A constant's value by a struct, as a node names it.

        A name without a scope is a local variable's, its struct's or all constants' and functions' of that name. With
        one it is a struct's, if its scope is an alias of one alone.
        """
        part = self.part(n)
        scope = self.text(n).rpartition("::")[0].rpartition("::")[2] if n.type == "qualified_identifier" else ""
        for at in self._around(n):
            if at.type == "function_definition" and not scope and name in self._variables(at):
                return None
            owner = self.aliases.get((at.id, scope)) if scope else at
            if owner is not None and (owner.id, name) in self.members:
                return self._member(owner.id, name, struct if self.part(owner) == part else None)
        if None in self.constants[part].get(name, []):
            return None
        return self.known[part][struct].get(name, self.known[0][0].get(name))

    def _member(self, owner: int, name: str, struct: int | None) -> int | None:
        """A struct's constant or function of one value."""
        key = owner, name, struct
        if key not in self._members:
            self._members[key] = None  # of one that is declared by itself
            with self.locally({}):
                given = {one if isinstance(one, int) else self.value(one, struct) for one in self.members[owner, name]}
            self._members[key] = given.pop() if len(given) == 1 else None
        return self._members[key]

    def _around(self, n: Node) -> Iterator[Node]:
        """Functions and structs that a node is in, the innermost first."""
        at: int | None = bisect_right(self._scopes[0], n.start_byte) - 1
        while at is not None and at >= 0:
            scope, outer = self._scopes[1][at]
            if n.end_byte <= scope.end_byte:
                yield scope
            at = outer

    @cached_property
    def _scopes(self) -> tuple[list[int], list[tuple[Node, int | None]]]:
        """Where functions and structs begin; each with the place of the one that it is in."""
        found: list[tuple[Node, int | None]] = []
        for n in self.nodes:
            if n.type in ("function_definition", "struct_specifier"):
                outer: int | None = len(found) - 1 if found else None
                while outer is not None and found[outer][0].end_byte <= n.start_byte:
                    outer = found[outer][1]
                found.append((n, outer))
        return [n.start_byte for n, _ in found], found

    def _variables(self, function: Node) -> set[str]:
        """Names of a function's variables that are no constants of it."""
        if function.id not in self._variables_of:
            found = {self.text(of) for n in self.within(function) if n.type == "declaration"
                     and not re.match(r"(static )?constexpr", self.text(n)) for of, _ in declared(n)}  # fmt: skip
            self._variables_of[function.id] = found
        return self._variables_of[function.id]

    def value(self, n: Node | None, struct: int | None = None) -> int | None:
        """An expression's value where it is known: by one of its part's structs, or by all of them."""
        if n is None:
            return None
        if (n.id, struct) not in self._values:
            if struct is not None:
                value = self._value(n, struct)
            else:
                values = {self.value(n, i) for i in range(len(self.structs[self.part(n)]))}
                value = values.pop() if len(values) == 1 else None
            self._values[n.id, struct] = value
        return self._values[n.id, struct]

    def _value(self, n: Node, struct: int) -> int | None:
        kind, parts = n.type, n.named_children
        if kind in ("number_literal", "true", "false"):
            text = self.text(n).rstrip("uUlL")
            return TRUTH.get(text, int(text, 0) if re.fullmatch(r"0x[\da-f]+|\d+", text) else None)
        if kind in ("identifier", "type_identifier", "field_identifier"):
            if self.text(n) == "P" and isinstance(self.precision, int):
                return self.precision
            mine = self.text(n) not in self.parameters[self.part(n)]
            return self.local.get(self.text(n), self.find(n, self.text(n), struct) if mine else None)
        if kind == "call_expression":
            return self.value(n.child_by_field_name("function"), struct)
        if kind in ("template_function", "template_type"):
            return self.find(n, self.text(parts[0]), struct)
        if kind == "qualified_identifier":
            scope, _, name = self.text(n).rpartition("::")
            of = self.structs[self.part(n)][struct]
            found = of.get(name) if re.search(r"\bC$", scope) else self.find(n, name, struct)
            return found if isinstance(found, int) else None
        if kind in ("parenthesized_expression", "condition_clause", "type_descriptor"):
            return self.value(parts[0], struct) if len(parts) == 1 else None
        if kind == "unary_expression" and (one := self.value(parts[-1], struct)) is not None:
            return {"!": int(not one), "-": -one, "~": ~one}.get(self.text(n)[0])
        if kind == "subscript_expression" and self.text(parts[0]).startswith("C::"):
            array = self.structs[self.part(n)][struct].get(self.text(parts[0])[3:])
            at = self.value(parts[1].named_children[0], struct)
            return array[at] if isinstance(array, list) and at is not None and at < len(array) else None
        if kind == "conditional_expression":
            one = self.value(n.child_by_field_name("condition"), struct)
            return None if one is None else self.value(branch(n, one), struct)
        return self._binary(n, struct) if kind == "binary_expression" else None

    def _binary(self, n: Node, struct: int) -> int | None:
        operator = self.text(n.children[1])
        left, right = self.value(n.children[0], struct), self.value(n.children[2], struct)
        for one in (left, right):
            if one is not None and (operator, one) in DECIDED_BY:
                return int(DECIDED_BY[operator, one] == "true")
        if operator == "%" and right == 1:
            return 0
        if left is None or right is None or operator not in _OPERATORS or (operator in "/%" and not right):
            return None
        return _OPERATORS[operator](left, right)


def walk(n: Node) -> Iterator[Node]:
    """A node and all in it, in the text's order."""
    left = [n]
    while left:
        n = left.pop()
        yield n
        left += reversed(n.children)


def _result(n: Node) -> Node | None:
    """What a function returns, if that is all that it does."""
    body = n.child_by_field_name("body")
    only = body.named_children[0] if body is not None and body.named_child_count == 1 else None
    return (
        only.named_children[0] if only is not None and only.type == "return_statement" and only.named_children else None
    )


def _within(n: Node) -> bool:
    """Whether a constant is a function's."""
    return n.parent is not None and (n.parent.type == "compound_statement" or _within(n.parent))


def branch(n: Node, condition: int) -> Node | None:
    found = n.child_by_field_name("consequence" if condition else "alternative")
    return found.named_children[-1] if found is not None and found.type == "else_clause" else found


def declared(n: Node) -> Iterator[tuple[Node, Node | None]]:
    """Name and value of each variable of a declaration."""
    for i, one in enumerate(n.children):
        if n.field_name_for_child(i) == "declarator":
            if one.type == "init_declarator":
                yield one.named_children[0], one.child_by_field_name("value")
            else:
                has = i + 2 < len(n.children) and n.children[i + 1].type == "="
                yield one, n.children[i + 2] if has else None


def name_of(n: Node | None) -> Node | None:
    """The name in a declarator; None of a constructor or an operator, which stays with its struct."""
    while n is not None and n.type not in ("identifier", "field_identifier", "template_function"):
        if n.type in ("operator_name", "operator_cast", "destructor_name"):
            return None
        n = n.named_children[0] if n.named_children else None
    if n is not None and n.type == "template_function":
        return n.named_children[0]
    struct = n
    while struct is not None and struct.type != "struct_specifier":
        struct = struct.parent
    own = struct.child_by_field_name("name") if struct is not None else None
    return None if n is None or (own is not None and own.text == n.text) else n


Put = list[tuple[int, int, bytes]]
"""Replaced text: begin, end and what it becomes."""


def without(tree: Tree, cut: Sequence[Node], put: Put | None = None) -> str:
    """The text without nodes and the comments directly above them; ``put``: what else is replaced, and by what.

    A node goes with its lines, or alone where others are on these.
    """
    edits = list(put or ())
    for n in cut:
        begin = tree.source.rfind(b"\n", 0, n.start_byte) + 1
        end = tree.source.find(b"\n", n.end_byte - 1) + 1 or len(tree.source)
        rest = tree.source[n.end_byte : end].lstrip(b" ;")
        if tree.source[begin : n.start_byte].strip() or not re.match(rb"//|\s*$", rest):
            edits.append((n.start_byte, end - len(rest), b""))
            continue
        while begin and (line := tree.source[tree.source.rfind(b"\n", 0, begin - 1) + 1 : begin]).lstrip().startswith(
            b"//"
        ):
            if line.lstrip().startswith((b"// ---", PART.encode())):
                break
            begin -= len(line)
        edits.append((begin, end, b""))
    found, at = b"", 0
    for begin, end, text in sorted(edits):
        if begin >= at:
            found, at = found + tree.source[at:begin] + text, end
    return re.sub(r"\n{3,}", "\n\n", (found + tree.source[at:]).decode())
