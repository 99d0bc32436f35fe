"""What an export folds in kernels' templates: constants go, and what only looks like one stays."""

from __future__ import annotations

import pytest

pytest.importorskip("tree_sitter_cuda")
from upconv.export import fold


def folded(text: str, **constants: int) -> str:
    """What ``Kernel::run`` needs."""
    (found,) = fold.folded([(text, [constants])], {"Kernel", "run"})
    return found


def test_conditions_of_constants_are_folded() -> None:
    text = """
template <class C>
struct Kernel {
static constexpr bool WIDE = C::bytes == 4;
static int run(int a) {
  if constexpr (WIDE) return a * 2;
  else return other(a);
}
static int other(int a) { return a * 3; }
};
"""
    assert "other" in folded(text, bytes=2) and "a * 2" not in folded(text, bytes=2)
    assert "other" not in folded(text, bytes=4) and "return a * 2;" in folded(text, bytes=4)


@pytest.mark.parametrize("call", ("place_of(a, 2)", "this->place_of(a, 2)", "Kernel::place_of(a, 2)"))
def test_a_call_is_no_constant_by_another_functions_name(call: str) -> None:
    """One struct's function returns a constant, another's of that name does not."""
    text = f"""
template <class C>
struct Stack {{
static int place_of(int tap) {{
  if constexpr (!C::stacked) return 0;
  else return tap;
}}
}};
template <class C>
struct Kernel {{
static int place_of(int a, int b) {{
  int c = a * b;
  c += a;
  return c;
}}
static int run(int a) {{
  const int to = {call};
  return to + Stack<C>::place_of(a);
}}
}};
"""
    found = folded(text, stacked=0)
    assert f"const int to = {call};" in found and "return to" in found


@pytest.mark.parametrize("declared", ("int rows = a;", "int rows;"))
def test_a_variable_is_no_constant_by_a_functions_name(declared: str) -> None:
    text = f"""
template <class C>
struct Tile {{
static int rows() {{ return C::rows; }}
}};
template <class C>
struct Kernel {{
static int run(int a) {{
  {declared}
  rows += a;
  if (rows == 1) return Tile<C>::rows();
  return a;
}}
}};
"""
    assert "if (rows == 1)" in folded(text, rows=1)


def test_a_structs_own_function_is_known() -> None:
    """Whatever another struct's is."""
    text = """
template <class C>
struct Other {
static bool shifted(int rows) {
  rows *= 2;
  return rows > 3;
}
};
template <class C>
struct Kernel {
static bool shifted(int unit) { return C::element == 2; }
static int run(int a) {
  if (shifted(a)) return Other<C>::shifted(a);
  return a;
}
};
"""
    found = folded(text, element=4)
    assert "Other" not in found and "return a;" in found


def test_a_parameter_is_no_variable_of_the_caller() -> None:
    text = """
template <class C>
struct Kernel {
static bool first(int step) { return step == 0; }
static int run(int a) {
  const int step = C::zero;
  if (first(a)) return step;
  return a;
}
};
"""
    found = folded(text, zero=0)
    assert "if (first(a)) return 0;" in found and "return step == 0;" in found


@pytest.mark.parametrize(
    ("statement", "put"),
    (
        ("if (a > 2) a /= C::step;", ""),
        ("if (a > 2) a /= C::step; else a = 1;", "if (a > 2) ; else a = 1;"),
        ("if (next(a)) a /= C::step;", "if (next(a)) ;"),
        ("for (int i = 0; i < a; i++) a -= C::step - 1;", "for (int i = 0; i < a; i++) ;"),
        ("a /= C::step;", ""),
    ),
)
def test_what_changes_nothing_leaves_no_condition_to_the_next_statement(statement: str, put: str) -> None:
    text = f"""
template <class C>
struct Kernel {{
static int run(int a) {{
  {statement}
  return a;
}}
}};
"""
    body = folded(text, step=1).partition("run(int a) {")[2].partition("}")[0]
    assert " ".join(body.split()) == f"{put} return a;".strip()


def test_a_function_stays_only_where_it_is_called() -> None:
    text = """
template <class C>
struct Kernel {
static int shift(int a) { return a * 3; }
static int run(int a) {
  int shift = a;
  shift += 2;
  return shift;
}
};
"""
    assert "a * 3" not in folded(text) and "a * 3" in folded(text.replace("+= 2", "+= shift(2)"))


def test_what_shared_templates_name_of_other_parts_structs_stays() -> None:
    shared = """
template <class K>
struct Packs {
static int pack(int i) { return K::unit(i); }
};
"""
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
    text = f"""
template <class C>
struct Kernel {{
static int run(int a) {{
  {kind} step = C::step;
  return (a - step) / 2;
}}
}};
"""
    found = folded(text, step=3)
    assert ("return (a - 3) / 2;" in found) == kind.endswith("int")
    assert (f"{kind} step = " in found) != kind.endswith("int")


def test_a_loop_of_two_variables_stays() -> None:
    text = """
template <class C>
struct Kernel {
static int run(int a) {
  for (int i = 0, of = 0; i < 1; i++, of ^= 1) a += of;
  return a;
}
};
"""
    assert "for (int i = 0, of = 0; i < 1; i++, of ^= 1) a += of;" in folded(text)


def test_a_loop_that_never_runs_goes_with_what_it_decides() -> None:
    text = """
template <class C>
struct Kernel {
static constexpr bool alike() {
  for (int i = 1; C::split == 0 && i < 4; i++)
    if (i * i != i) return false;
  return true;
}
static int run(int a) {
  constexpr bool all = alike();
  return all ? a : a * 3;
}
};
"""
    assert "for" in folded(text, split=0) and "a * 3" in folded(text, split=0)
    assert "alike" not in folded(text, split=1) and "return a;" in folded(text, split=1)


def test_a_struct_that_nothing_names_goes_with_its_comment() -> None:
    text = """
template <class C>
struct Kernel {
// Of what nobody has.
struct Other {
  int a;
};
struct Pair { int a, b; };
static int run(int a) {
  Pair both = {a, a};
  return both.a + both.b;
}
};
"""
    found = folded(text)
    assert "Other" not in found and "nobody" not in found and "struct Pair" in found


@pytest.mark.parametrize("statements", ("int unread = a;  a *= 3;", "a *= 3;  int unread = a;  // to {}"))
def test_what_goes_leaves_what_else_is_on_its_line(statements: str) -> None:
    text = f"""
template <class C>
struct Kernel {{
static int run(int a) {{
  // Of both.
  {statements}
  return a;
}}
}};
"""
    body = folded(text).partition("run(int a) {")[2].partition("return")[0]
    assert "unread" not in body and " ".join(body.split()).startswith("// Of both. a *= 3;")


def test_an_else_of_nothing_goes() -> None:
    text = """
template <class C>
struct Kernel {
static int run(int a) {
  if (a > 2) a *= 5;
  else if constexpr (C::more) a *= 7;
  return a;
}
};
"""
    body = folded(text, more=0).partition("run(int a) {")[2].partition("}")[0]
    assert " ".join(body.split()) == "if (a > 2) a *= 5; return a;"


def test_another_structs_name_of_a_constant_is_not_looked_for_elsewhere() -> None:
    """``Operand`` has no name of what ``S`` calls G_ROWS."""
    text = """
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
    assert "Operand::ROWS" in folded(text, first=2)
