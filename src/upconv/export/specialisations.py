"""Of a kernel file's templates the specialisations that some struct of constants takes."""

from __future__ import annotations

import re

from tree_sitter import Node

from upconv.export.syntax import TRUTH, WORD, Put, Tree, declared, without

_TEMPLATE = re.compile(r"template <([^;{]*?)>\s*(?:struct|(?:static )?constexpr int) (\w+)(?:<([^;{=:]*)>)?")

_Form = tuple[Node, list[str], list[str]]
"""A template: its declaration, its parameters, and what a specialisation has for them."""


def specialised(tree: Tree, _: set[str]) -> str:
    """The text without specialisations that no struct takes."""
    forms: dict[str, list[_Form]] = {}
    for n in tree.root.children:
        if n.type == "template_declaration" and (head := _TEMPLATE.match(tree.text(n))):
            forms.setdefault(head[2], []).append((n, _split(head[1]), _split(head[3] or "")))
    cut, put = _kernels(tree)
    for name, mine in forms.items():
        taken = _taken(tree, name, mine) if len(mine) > 1 else None
        if not taken:
            continue
        cut += [form[0] for i, form in enumerate(mine) if i and i not in taken]
        n, parameters, last = *mine[0][:2], max(taken)
        text = tree.text(n)
        if taken == {last} and last and mine[last][1] == parameters[:1] and _short(tree, name):  # it is the template
            cut.append(n)
            alone = mine[last][0]
            text = re.sub(rf"\b{name}<[^{{;=:]*>", name, tree.text(alone), count=1)
            put.append((alone.start_byte, alone.end_byte, text.encode()))
        elif 0 not in taken and "{" in text and "struct" in text.partition("{")[0]:  # only declared
            text = text.partition("{")[0].partition(" : ")[0].split("//")[0].rstrip() + ";"
            end = n.end_byte + (tree.source[n.end_byte : n.end_byte + 1] == b";")
            put.append((n.start_byte, end, text.encode()))
    return without(tree, cut, put)


def _kernels(tree: Tree) -> tuple[list[Node], Put]:
    """Kernels of one name with other parameters, by the result ``OnlyIf<C, KIND>::Kernel``: those of no struct's kind;
    and where all have one kind, the result is void."""
    cut, put = list[Node](), Put()
    last = tree.uses.get("KIND_OF", [])[-1:]
    kinds = {tree.value(one, i) for one in last for i in range(len(tree.structs[tree.part(one)]))}
    for n in tree.uses.get("OnlyIf", []) if None not in kinds else ():
        function = n
        while function.parent is not None and function.parent.type != "translation_unit":
            function = function.parent
        if "__global__" not in tree.text(function):
            continue
        if tree.value(n.named_children[1].named_children[-1]) not in kinds:
            cut.append(function)
        elif len(kinds) == 1:
            begin = tree.source.rfind(b"typename", 0, n.start_byte)
            put.append((begin, tree.source.index(b"::Kernel", begin) + len("::Kernel"), b"void"))
    return cut, put


def _short(tree: Tree, name: str) -> bool:
    """Whether a template is given one argument everywhere but where it is specialised."""
    uses = tree.uses.get(name, [])
    given = (n for n in uses if n.parent is not None and n.parent.type != "struct_specifier")
    return all(n.named_children[1].named_child_count == 1 for n in given)


def _split(text: str) -> list[str]:
    """Arguments between commas that are not in brackets."""
    found, depth = [""], 0
    for c in text:
        depth += (c in "<({[") - (c in ">)}]")
        found[-1] += c if c != "," or depth else ""
        if c == "," and depth == 0:
            found.append("")
    return [one.strip() for one in found if one.strip()]


def _taken(tree: Tree, name: str, forms: list[_Form]) -> set[int] | None:
    """Which forms of a template are used; None where that is not known."""
    taken: set[int] = set()
    heads = {tree.source.find(name.encode(), n.start_byte) for n, _, _ in forms}
    for n in tree.uses.get(name, []):
        if n.start_byte in heads:
            continue
        given = [tree.text(one) for one in n.named_children[1].named_children]
        given += [one.partition("= ")[2] for one in forms[0][1][len(given) :]]
        for struct in range(len(tree.structs[tree.part(n)])):
            values = [_argument(tree, n, one, struct) for one in given]
            scores = [_matching(tree, n, fixed, parameters, values) if fixed else 1 for _, parameters, fixed in forms]
            if None in scores:
                return None
            taken.add(max(range(len(forms)), key=lambda i: scores[i]))  # type: ignore[arg-type, return-value]
    return taken


def _argument(tree: Tree, at: Node, text: str, struct: int) -> int | None:
    """A template's argument by one struct, if it is a known integer."""
    part = tree.part(at)
    one = Tree(f"int a = {text};", [[tree.structs[part][struct]]])
    one.parameters = [set()]
    one.precision = tree.precision
    one.known = [[{**tree.known[0][0], **tree.known[part][struct]}]]
    ((_, value),) = declared(one.root.children[0])
    return one.value(value)


def _matching(tree: Tree, at: Node, fixed: list[str], parameters: list[str], values: list[int | None]) -> int | None:
    """More for each argument that a specialisation fixes as given; 0 where others were given, None if not known."""
    score, unknown = 1, False
    for text, value in zip(fixed, values):
        wanted = int(text) if text.isdigit() else TRUTH.get(text, tree.find(at, text, 0))
        if wanted is None or any(text in WORD.findall(one) for one in parameters) or text == "P":
            continue
        if value is not None and value != wanted:
            return 0
        unknown = unknown or value is None
        score += 1
    return None if unknown else score
