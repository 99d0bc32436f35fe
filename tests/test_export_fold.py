"""What an export folds in kernels' templates: constants go, and what only looks like one stays."""

from __future__ import annotations

import pytest

pytest.importorskip("tree_sitter_cuda")
from upconv.export import fold


def kernel(body: str, members: str = "", ahead: str = "") -> str:
    """A kernel whose ``run`` has this body, with members of its struct and templates ahead of it."""
    return f"{ahead}template <class C>\nstruct Kernel {{\n{members}static int run(int a) {{\n{body}\n}}\n}};\n"


def other(name: str, members: str) -> str:
    """Another template."""
    return f"template <class C>\nstruct {name} {{\n{members}}};\n"


def folded(text: str, **constants: int) -> str:
    """What ``Kernel::run`` needs."""
    (found,) = fold.folded([(text, [constants])], {"Kernel", "run"})
    return found


def run_of(found: str) -> str:
    """The body of ``run`` in one line."""
    return " ".join(found.partition("run(int a) {")[2].partition("\n}")[0].split())


CHOICE = kernel(
    "  if constexpr (WIDE) return a * 2;\n  else return other(a);",
    "static constexpr bool WIDE = C::bytes == 4;\nstatic int other(int a) { return a * 3; }\n",
)
OWN = kernel(
    "  if (shifted(a)) return Other<C>::shifted(a);\n  return a;",
    "static bool shifted(int unit) { return C::element == 2; }\n",
    other("Other", "static bool shifted(int rows) {\n  rows *= 2;\n  return rows > 3;\n}\n"),
)
OF_THE_CALLER = kernel(
    "  const int step = C::zero;\n  if (first(a)) return step;\n  return a;",
    "static bool first(int step) { return step == 0; }\n",
)
NOT_CALLED = kernel("  int shift = a;\n  shift += 2;\n  return shift;", "static int shift(int a) { return a * 3; }\n")
TWO_VARIABLES = kernel("  for (int i = 0, of = 0; i < 1; i++, of ^= 1) a += of;\n  return a;")
DECIDES = kernel(
    "  constexpr bool all = alike();\n  return all ? a : a * 3;",
    """static constexpr bool alike() {
  for (int i = 1; C::split == 0 && i < 4; i++)
    if (i * i != i) return false;
  return true;
}
""",
)
NAMED = kernel(
    "  Pair both = {a, a};\n  return both.a + both.b;",
    "// Of what nobody has.\nstruct Other {\n  int a;\n};\nstruct Pair { int a, b; };\n",
)
# ``Operand`` has no name of what ``S`` calls G_ROWS.
OF_ANOTHER = """
template <class C>
struct Shape {
static constexpr int G_ROWS = C::first * sizeof(C);
};
template <class S>
struct Pixels {
static constexpr int ROWS = S::G_ROWS;
};
template <class C, class Operand>
struct Copies {
static int copy(int a) { return a * Operand::ROWS; }
};
template <class C>
struct Kernel {
static int run(int a) { return Copies<C, Pixels<Shape<C>>>::copy(a); }
};
"""
FOLDED: dict[str, tuple[str, dict[str, int], tuple[str, ...], tuple[str, ...]]] = {
    "a condition that holds": (CHOICE, {"bytes": 4}, ("return a * 2;",), ("other",)),
    "a condition that does not hold": (CHOICE, {"bytes": 2}, ("other",), ("a * 2",)),
    "a struct's own function is known, whatever another's is": (OWN, {"element": 4}, ("return a;",), ("Other",)),
    "a parameter is no variable of the caller": (
        OF_THE_CALLER, {"zero": 0}, ("if (first(a)) return 0;", "return step == 0;"), (),
    ),
    "a function goes where a variable has its name": (NOT_CALLED, {}, (), ("a * 3",)),
    "a function stays where it is called": (NOT_CALLED.replace("+= 2", "+= shift(2)"), {}, ("a * 3",), ()),
    "a loop of two variables stays": (TWO_VARIABLES, {}, ("; i < 1; i++, of ^= 1) a += of;",), ()),
    "a loop that runs stays with what it decides": (DECIDES, {"split": 0}, ("for", "a * 3"), ()),
    "a loop that never runs goes with what it decides": (DECIDES, {"split": 1}, ("return a;",), ("alike",)),
    "a struct that nothing names goes with its comment": (NAMED, {}, ("struct Pair",), ("Other", "nobody")),
    "another struct's name of a constant is not looked for elsewhere": (
        OF_ANOTHER, {"first": 2}, ("Operand::ROWS",), (),
    ),
}  # fmt: skip
"""By what: a text, its constants, and what is there and gone when they are folded."""


@pytest.mark.parametrize("what", FOLDED)
def test_what_is_folded(what: str) -> None:
    text, constants, there, gone = FOLDED[what]
    found = folded(text, **constants)
    assert all(one in found for one in there) and not any(one in found for one in gone), found


@pytest.mark.parametrize("call", ("place_of(a, 2)", "this->place_of(a, 2)", "Kernel::place_of(a, 2)"))
def test_a_call_is_no_constant_by_another_functions_name(call: str) -> None:
    """One struct's function returns a constant, another's of that name does not."""
    text = kernel(
        f"  const int to = {call};\n  return to + Stack<C>::place_of(a);",
        "static int place_of(int a, int b) {\n  int c = a * b;\n  c += a;\n  return c;\n}\n",
        other(
            "Stack", "static int place_of(int tap) {\n  if constexpr (!C::stacked) return 0;\n  else return tap;\n}\n"
        ),
    )
    found = folded(text, stacked=0)
    assert f"const int to = {call};" in found and "return to" in found


@pytest.mark.parametrize("declared", ("int rows = a;", "int rows;"))
def test_a_variable_is_no_constant_by_a_functions_name(declared: str) -> None:
    body = f"  {declared}\n  rows += a;\n  if (rows == 1) return Tile<C>::rows();\n  return a;"
    text = kernel(body, ahead=other("Tile", "static int rows() { return C::rows; }\n"))
    assert "if (rows == 1)" in folded(text, rows=1)


@pytest.mark.parametrize(
    ("statements", "put"),
    (
        ("if (a > 2) a /= C::one;", ""),
        ("if (a > 2) a /= C::one; else a = 1;", "if (a > 2) ; else a = 1;"),
        ("if (next(a)) a /= C::one;", "if (next(a)) ;"),
        ("for (int i = 0; i < a; i++) a -= C::one - 1;", "for (int i = 0; i < a; i++) ;"),
        ("a /= C::one;", ""),
        ("if (a > 2) a *= 5;\n  else if constexpr (C::more) a *= 7;", "if (a > 2) a *= 5;"),
        ("// Of both.\n  int unread = a;  a *= 3;", "// Of both. a *= 3;"),
        ("// Of both.\n  a *= 3;  int unread = a;  // to {}", "// Of both. a *= 3; // to {}"),
    ),
)
def test_what_changes_nothing_leaves_the_statements_around_it(statements: str, put: str) -> None:
    assert run_of(folded(kernel(f"  {statements}\n  return a;"), one=1, more=0)) == f"{put} return a;".strip()


def test_what_shared_templates_name_of_other_parts_structs_stays() -> None:
    shared = "template <class K>\nstruct Packs {\nstatic int pack(int i) { return K::unit(i); }\n};\n"
    own = """
template <class C>
struct Kernel : Packs<Kernel<C>> {
static int unit(int i) { return i * 2; }
static int other(int i) { return i * 3; }
};
"""
    _, found = fold.folded([(shared, []), (own, [{}])], {"Kernel", "pack"})
    assert "unit" in found and "other" not in found


@pytest.mark.parametrize("kind", ("int", "const int", "u32", "const u32", "const long long", "const auto"))
def test_a_variable_is_a_number_only_where_that_is_as_wide(kind: str) -> None:
    found = folded(kernel(f"  {kind} step = C::step;\n  return (a - step) / 2;"), step=3)
    assert ("return (a - 3) / 2;" in found) == kind.endswith("int")
    assert (f"{kind} step = " in found) != kind.endswith("int")


@pytest.mark.parametrize(
    "declared",
    ("const int& STEPS", "const int* STEPS", "const int* __restrict__ STEPS", "const int (&STEPS)[3]", "int STEPS[3]"),
)
def test_a_functions_parameter_is_no_constant_of_that_name(declared: str) -> None:
    text = kernel(
        "  return sum(a) + Stores<C>::of(a);",
        f"static int sum({declared}) {{ return list(STEPS); }}\n",
        other("Stores", "static int of(int a) { return a * STEPS; }\n"),
    )
    found = folded(text + "template <class C> constexpr int STEPS = C::steps;\n", steps=5)
    assert f"sum({declared}) {{ return list(STEPS); }}" in found


@pytest.mark.parametrize(("parameter", "use"), (("int STEPS", "list(STEPS)"), ("int... STEPS", "list(STEPS...)")))
def test_a_templates_parameter_is_no_constant_of_that_name(parameter: str, use: str) -> None:
    text = kernel(
        "  return sum<1>(a) + Stores<C>::of(a);",
        f"template <{parameter}>\nstatic int sum(int a) {{ return a + {use}; }}\n",
        other("Stores", "static int of(int a) { return a * STEPS; }\n"),
    )
    found = folded(text + "template <class C> constexpr int STEPS = C::steps;\n", steps=5)
    assert use in found
