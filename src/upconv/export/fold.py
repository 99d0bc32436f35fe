"""Of kernel files what some kernels need, for the structs of constants that they are compiled with.

Conditions that these decide are folded, and so are loops of one turn and specialisations that no struct takes. Then
stays what the kernels' names reach, with the comments above it. The syntax tree is tree-sitter's; `device` compares
what the compiler makes of the text with the whole files'.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle

from tree_sitter import Node

from upconv.export.specialisations import specialised
from upconv.export.syntax import (
    DECIDED_BY,
    DECLARATIONS,
    NO_LOOPS,
    NO_VALUES,
    PART,
    PRAGMA,
    WORD,
    Constants,
    Put,
    Tree,
    branch,
    declared,
    name_of,
    walk,
    without,
)

FILE = "//file"
"""A line ahead of each file of a part."""
_MASKED = (
    ("#pragma", PRAGMA), ("__align__(1024)", "/*lign__(1024*/"), ("__grid_constant__", "/*grid_constant*/"),
    ("CLUSTER_DIMS(C::cluster)", "/*USTER_DIMS(C::cluste*/"),
    ("__cluster_dims__(M::CLUSTER)", "/*cluster_dims__(M::CLUSTE*/"),
)  # fmt: skip
"""What the grammar does not know, and comments as long, which it has anywhere."""
_KEPT_BY = {("*", 1), ("+", 0), ("&&", 1), ("||", 0), ("|", 0)}  # operators and values that change nothing
_KEPT_BY_RIGHT = _KEPT_BY | {("-", 0), ("/", 1), ("<<", 0), (">>", 0)}
_ACTS = ("call_expression", "assignment_expression", "update_expression")  # as a condition seldom does
_DECIDING = {"&&", "||", "==", "!=", "<", ">", "<=", ">="}
_COMMENT = re.compile(r'//(?!ragma)[^\n]*|"(?:\\.|[^"\\\n])*"')
_CALLED = re.compile(r"(?<=::)\w+|(?<=&)\w+|[A-Za-z_]\w*(?=\s*[(<])")
_ATOM = re.compile(r"[\w:]+(?:<[\w:, ]*>)?(?:::\w+)*(?:\[[^\[\]]*\]|\([^()]*\))*")
_BLOCK = "compound_statement"
_NAMING = ("enumerator", "template_function", "template_type")


def folded(
    parts: Sequence[tuple[str, Sequence[Constants]]], wanted: set[str], levels: Sequence[int] | None = None
) -> list[str]:
    """Parts of a text, each for its structs; the first is what others share.

    Args:
        parts: texts and structs.
        wanted: names that are reached.
        levels: of each part `EVERYTHING`; `NO_LOOPS`, without which the compiler may unroll others; or `NO_VALUES`.
    """
    text = "".join(f"{PART}\n{text}\n" for text, _ in parts)
    for known, comment in _MASKED:
        text = text.replace(known, comment)
    structs = [of for _, of in parts]
    tree, unchanged = Tree(text, structs, levels=levels), 0
    literals = tree.literals = tree.numbers
    for step in cycle((_reached, specialised, _evaluated)):
        before, text = text, re.sub(rf"[ \t]+$|^[ \t]+(?={PRAGMA})", "", step(tree, wanted), flags=re.MULTILINE)
        unchanged = unchanged + 1 if text == before else 0
        if unchanged == 3:
            break
        if text != before:
            tree = Tree(text, structs, literals, levels)
    text = re.sub(r"(\{\n)\n+(?=[ \t]+\S)|\n+(\n\}\n)", r"\1\2", text)
    for known, comment in _MASKED:
        text = text.replace(comment, known)
    return [_tidied(part) for part in text.split(f"{PART}\n")[1:]]


def _tidied(text: str) -> str:
    """A part without comments of which nothing is left: heads of files, and of sections of one."""
    kept: list[str] = []
    waiting: list[str] = []
    for block in re.split(r"\n{2,}", text.replace(f"{FILE}\n", f"\n\n{FILE}\n\n").strip()):
        if block == FILE:
            waiting = []
        elif all(line.startswith("//") for line in block.splitlines()):
            if block.startswith("// ---"):
                waiting = [one for one in waiting if not one.startswith("// ---")]
            waiting.append(block)
        else:
            kept += [*waiting, block]
            waiting = []
    return "\n\n".join(kept) + "\n"


# --- conditions and loops ---------------------------------------------------------------------------------------------


def _evaluated(tree: Tree, _: set[str]) -> str:
    found, at = "", 0
    for n in tree.root.children:
        put = tree.text(n) if tree.levels[tree.part(n)] >= NO_VALUES else _emit(tree, n)
        found, at = found + tree.source[at : n.start_byte].decode() + put, n.end_byte
    return found + tree.source[at:].decode()


def _emit(tree: Tree, n: Node) -> str:
    """A node's text with what is known folded."""
    kind = n.type
    if kind == "identifier" and (name := tree.text(n)) in tree.local:
        return str(tree.local[name])
    if kind == "declaration" and n.parent is not None and n.parent.type == "compound_statement" and tree.local:
        return _left(tree, n)
    if kind in ("using_declaration", "alias_declaration"):
        return tree.text(n)
    if kind in ("identifier", "qualified_identifier", "type_identifier") and (other := _other(tree, n)) is not None:
        return other
    if kind == "qualified_identifier":
        return tree.text(n)
    if kind == "conditional_expression" and (of := tree.value(n.child_by_field_name("condition"))) is not None:
        return _emit(tree, branch(n, of))  # type: ignore[arg-type]
    if kind == "binary_expression" and (found := _shorter(tree, n)) is not None:
        return found
    if kind == "call_expression" and (of := tree.value(n)) is not None:
        return str(of)
    if kind == "function_definition" and (fixed := _fixed(tree, n)):
        with tree.locally({**tree.local, **fixed}):
            return _joined(tree, n)
    if kind in ("expression_statement", "if_statement") and _changes_nothing(tree, n):
        return "" if n.parent is not None and n.parent.type == "compound_statement" else ";"
    if kind == "unary_expression" and tree.text(n)[0] == "!" and (of := tree.value(n)) is not None:
        return ("false", "true")[of]
    if kind == "parenthesized_expression" and n.parent is not None and not n.parent.type.endswith("_statement"):
        inner = _emit(tree, n.named_children[0]) if n.named_child_count == 1 else ""
        if inner != tree.text(n)[1:-1] and _ATOM.fullmatch(inner):
            return inner
    if kind == "if_statement" and (of := tree.value(n.child_by_field_name("condition"))) is not None:
        return _alone(tree, n, branch(n, of))
    if kind == "for_statement" and (turns := _turns(tree, n)) is not None:
        name, first, any_ = turns
        with tree.locally({**tree.local, name: first}):
            return _alone(tree, n, n.child_by_field_name("body") if any_ else None)
    text = _joined(tree, n)
    return "" if text == "else ;" else text


def _joined(tree: Tree, n: Node) -> str:
    """A node's children, folded, with what is between them."""
    found, at = "", n.start_byte
    for one in n.named_children:
        if _is_pragma(tree, one) and (loop := one.next_sibling) is not None and _turns(tree, loop) is not None:
            found += tree.source[at : one.start_byte].decode()
            at = tree.source.rfind(b"\n", 0, loop.start_byte) + 1
            continue
        put, gap = _emit(tree, one), tree.source[at : one.start_byte].decode()
        found, at = found + gap + put, one.end_byte
        if (
            not put and one.type.endswith(("statement", "declaration")) and one.end_byte > one.start_byte
        ):  # with its line
            found, at = found.rstrip(" "), at + (tree.source[at : at + 1] == b"\n")
    return found + tree.source[at : n.end_byte].decode()


def _left(tree: Tree, n: Node) -> str:
    """A declaration of local variables without those that have one known value."""
    stay = [one for one in n.children_by_field_name("declarator")
            if one.type != "init_declarator" or tree.text(one.named_children[0]) not in tree.local]  # fmt: skip
    first = n.children_by_field_name("declarator")[0]
    if len(stay) == len(n.children_by_field_name("declarator")):
        return _joined(tree, n)
    head = tree.source[n.start_byte : first.start_byte].decode()
    return f"{head}{', '.join(_emit(tree, one) for one in stay)};" if stay else ""


def _fixed(tree: Tree, function: Node) -> dict[str, int]:
    """Local variables of a function that are an int or a bool, as digits are, of one known value."""
    found: dict[str, int] = {}
    seen: Counter[str] = Counter()
    for n in tree.within(function):
        if n.type == "init_declarator" and n.parent is not None:
            name, value = n.named_children[0], tree.value(n.child_by_field_name("value"))
            seen[tree.text(name)] += 1
            plain = re.match(r"(const )?(int|bool)\b|constexpr bool\b", tree.text(n.parent))
            if value is not None and name.type == "identifier" and plain:
                found[tree.text(name)] = value
        elif n.type in ("assignment_expression", "update_expression"):
            of = n.child_by_field_name("left") or n.child_by_field_name("argument")
            seen[tree.text(of) if of is not None else ""] += 2
        elif n.type in ("argument_list", "gnu_asm_expression", "parameter_list"):
            seen.update({tree.text(one).rpartition(" ")[2]: 2 for one in n.named_children})
    return {name: value for name, value in found.items() if seen[name] == 1}


def _is_pragma(tree: Tree, n: Node | None) -> bool:
    return n is not None and n.type == "comment" and tree.text(n).startswith(PRAGMA)


def _other(tree: Tree, n: Node) -> str | None:
    """What a constant is only another name of."""
    part, (scope, _, name) = tree.part(n), tree.text(n).rpartition("::")
    found = tree.same[part].get(name) or tree.same[0].get(name)
    if found is None or found == name or (part and name in tree.constants[0] and name in tree.constants[part]):
        return None
    if scope == "C" or name in tree.literals or (not scope and name in tree.parameters[part]):
        return None
    if n.parent is not None and (n.parent.type in _NAMING or n in n.parent.children_by_field_name("declarator")):
        return None
    if found.startswith("C::") and not _has_struct(tree, n):
        return None
    if not scope or not re.search(r"[A-Z]{2}", found) or found.startswith("C::"):
        return found
    return None if "::" in found else f"{scope}::{found}"  # whose name of it is its own


def _has_struct(tree: Tree, n: Node) -> bool:
    """Whether C is a struct of constants where a node is."""
    while n.parent is not None:
        n = n.parent
        if n.type == "template_declaration" and re.match(r"template <class C\b", tree.text(n)):
            return True
        if n.type == "field_declaration_list" and re.search(r"using C = ", tree.text(n)):
            return True
    return False


def _changes_nothing(tree: Tree, n: Node) -> bool:
    """Whether a statement is an assignment like ``a /= 1``, or one under a condition that does nothing else."""
    if n.type == "if_statement" and n.child_by_field_name("alternative") is None:
        condition, kept = (n.child_by_field_name(name) for name in ("condition", "consequence"))
        acts = any(one.type in _ACTS for one in walk(condition))  # type: ignore[arg-type]
        return not acts and kept is not None and _changes_nothing(tree, kept)
    if n.type != "expression_statement" or not n.named_children or n.named_children[0].type != "assignment_expression":
        return False
    _, operator, right = n.named_children[0].children
    value = tree.value(right)
    return value is not None and (tree.text(operator)[:-1], value) in _KEPT_BY_RIGHT


def _shorter(tree: Tree, n: Node) -> str | None:
    """A binary expression without an operand that changes nothing."""
    left, operator, right = n.children[0], tree.text(n.children[1]), n.children[2]
    a, b = tree.value(left), tree.value(right)
    if (both := tree.value(n)) is not None and operator in _DECIDING:
        return ("false", "true")[both]
    for one in (a, b):
        if one is not None and (operator, one) in DECIDED_BY:
            return DECIDED_BY[operator, one]
    if operator == "%" and (b == 1 or tree.text(left) == tree.text(right)):
        return "0"
    if operator == "/" and tree.text(left) == tree.text(right):
        return "1"
    if b is not None and (operator, b) in _KEPT_BY_RIGHT:
        return _emit(tree, left)
    if a is not None and (operator, a) in _KEPT_BY:
        return _emit(tree, right)
    return None


def _turns(tree: Tree, n: Node) -> tuple[str, int, bool] | None:
    """The variable of a loop that has one turn or none, its value, and whether there is one."""
    if n.type != "for_statement" or tree.levels[tree.part(n)] >= NO_LOOPS:
        return None
    if tree.value(n.child_by_field_name("condition")) == 0:
        return "", 0, False
    head = re.match(r"for \(int (\w+) = ([^;]*); (\w+) < ([^;]*); (\w+)(\+\+| \+= ([^;]*))\)", tree.text(n))
    start, condition, update, body = (
        n.child_by_field_name(one) for one in ("initializer", "condition", "update", "body")
    )
    if not head or not head[1] == head[3] == head[5] or not (start and condition and update and body):
        return None
    if condition.type != "binary_expression":
        return None
    (_, value), *others = declared(start)
    if others:
        return None
    first, end = tree.value(value), tree.value(condition.children[2])
    step = 1 if head[6] == "++" else tree.value(update.children[-1])
    if first is None or end is None or step is None or first + step < end:
        return None
    if any(one.type in ("break_statement", "continue_statement") for one in walk(body)):
        return None
    return head[1], first, first < end


def _alone(tree: Tree, n: Node, kept: Node | None) -> str:
    """A statement in the place of the one that decides over it."""
    within = n.parent is not None and n.parent.type == "compound_statement"
    if kept is None:
        return "" if within else ";"
    text = _emit(tree, kept)
    if _is_pragma(tree, pragma := kept.prev_sibling) and _turns(tree, kept) is None:
        text = f"{tree.text(pragma)}\n{' ' * kept.start_point[1]}{text}"  # type: ignore[arg-type]
    if kept.type != "compound_statement" or not within:
        return text
    function = n
    while function.parent is not None and function.type != "function_definition":
        function = function.parent
    outside = tree.source[function.start_byte : kept.start_byte] + tree.source[kept.end_byte : function.end_byte]
    mine = {tree.text(name) for one in kept.children if one.type == "declaration" for name, _ in declared(one)}
    lines = text[1:-1].strip("\n").rstrip().splitlines()
    if mine & set(WORD.findall(outside.decode())):
        return text  # with its braces, since a name is another's, too
    if len(lines) < 2:
        return "".join(lines).strip()
    less = max(
        0,
        min(len(one) - len(one.lstrip()) for one in lines if one.strip() and not one.startswith(PRAGMA))
        - n.start_point[1],
    )
    return "\n".join(one[less:] if one[:less].isspace() else one for one in lines).lstrip(" ")


# --- names ------------------------------------------------------------------------------------------------------------


def _reached(tree: Tree, wanted: set[str]) -> str:
    """The text without declarations that ``wanted`` names do not reach, and local variables that nothing reads."""
    begin = wanted | {f"{name}(" for name in wanted}
    words, kept, before = [set(begin) for _ in tree.structs], set[int](), -1
    every = set(begin)  # that any part names; of the shared part's templates some are members of other parts' structs
    items = list(_items(tree.root))
    while len(kept) > before:
        before = len(kept)
        for n, names, owner in items:
            if n.id in kept or (owner is not None and owner.id not in kept):
                continue
            part = tree.part(n)
            of = n.named_children[-1] if n.type == "template_declaration" else n
            end = "(" if of.type == "function_definition" else ""  # a variable of a function's name is another's
            mine = (f"{tree.text(one)}{end}" for one in names or ())
            if names is None or (words[part] | words[0] if part else every).intersection(mine):
                kept.add(n.id)
                text = _COMMENT.sub("", _head(tree, n))
                found = {*WORD.findall(text), *(f"{name}(" for name in _CALLED.findall(text))}
                words[part] |= found
                every |= found
    cut = [n for n, _, owner in items if n.id not in kept and (owner is None or owner.id in kept)]
    unread, put = _unread(tree)
    return without(tree, cut + unread, put)


def _items(n: Node, owner: Node | None = None) -> Iterator[tuple[Node, list[Node] | None, Node | None]]:
    """Declarations, their names, and the struct that each is in; no names of what stays with that struct."""
    for one in n.children:
        of = one.named_children[-1] if one.type == "template_declaration" and one.named_children else one
        if of.type == "field_declaration" and of.named_child_count == 1:  # a struct in a struct
            of = of.named_children[0]
        if of.type == "static_assert_declaration":
            yield one, [], owner
            continue
        names = _names(of)
        if owner is None and names is None and one.type in ("comment", ";"):
            continue
        yield one, names, owner
        body = of.child_by_field_name("body") if of.type == "struct_specifier" else None
        if body is not None and body.end_point[0] > body.start_point[0]:
            yield from _items(body, one)


def _names(n: Node) -> list[Node] | None:
    """What a declaration names; None of what is none, or a field."""
    found: list[Node | None] = []
    if n.type in ("alias_declaration", "struct_specifier"):
        name = n.child_by_field_name("name")
        found = [name.named_children[0] if name is not None and name.type == "template_type" else name]
    elif n.type in ("preproc_def", "preproc_function_def"):
        found = [n.child_by_field_name("name")]
    elif n.type == "enum_specifier":
        found = [one.named_children[0] for one in walk(n) if one.type == "enumerator"]
    elif n.type == "function_definition" or (
        n.type in DECLARATIONS and re.search(rb"constexpr|__constant__", (n.text or b"")[:40])
    ):
        found = [name_of(one) for one in n.children_by_field_name("declarator")]
    return None if not found or None in found else found  # type: ignore[return-value]


def _head(tree: Tree, n: Node) -> str:
    """A declaration's text, of a struct without its members."""
    of = n.named_children[-1] if n.type == "template_declaration" else n
    body = of.child_by_field_name("body") if of.type == "struct_specifier" else None
    if body is not None and body.end_point[0] > body.start_point[0]:
        return tree.source[n.start_byte : body.start_byte].decode()
    return tree.text(n)


def _unread(tree: Tree) -> tuple[list[Node], Put]:
    """Assertions, and declarations of local variables that nothing reads; what stays of those of several."""
    cut, put = list[Node](), Put()
    for function in tree.nodes:
        if function.type != "function_definition":
            continue
        words = Counter(WORD.findall(_COMMENT.sub("", tree.text(function))))
        for n in tree.within(function):
            if n.type == "static_assert_declaration":
                cut.append(n)
            if n.type not in ("declaration", "alias_declaration") or not n.parent or n.parent.type != _BLOCK:
                continue
            variables = n.children_by_field_name("declarator")
            names = [name for name, _ in declared(n)] or n.children_by_field_name("name")
            read = [words[tree.text(name)] != 1 for name in names]
            if all(read) or any(one.type in ("call_expression", "assignment_expression") for one in walk(n)):
                continue
            if any(read):
                head = tree.source[n.start_byte : variables[0].start_byte]
                stay = ", ".join(tree.text(one) for one, well in zip(variables, read) if well)
                put.append((n.start_byte, n.end_byte, head + stay.encode() + b";"))
            else:
                cut.append(n)
    return cut, put
