"""Which comments of kernel files an exported file has."""

from __future__ import annotations

import pytest

from upconv.export.comments import fitting


@pytest.mark.parametrize(
    ("comment", "kept"),
    (
        ("// Of `rows`, as sizes.", "// Of `rows`, as sizes."),
        ("// Of `other`, as sizes.", ""),
        ("// Of `rows::other(row)`, as sizes.", ""),
        ("// It counts. Kernels with `other` divide.", "// It counts."),
        ("// It counts (tiles.cuh).", "// It counts."),
        ("// It counts, see tiles.cuh.", "// It counts."),
        ("// It counts, as tiles.py says.", ""),
        ("// It counts. What `other` is:\n//   a list", "// It counts. What `other` is:\n//   a list"),
    ),
)
def test_sentences_on_what_a_file_does_not_have_go(comment: str, kept: str) -> None:
    assert (
        fitting(f"int rows;\n{comment}\nint columns;\n", {}) == f"int rows;\n{kept}{chr(10) * bool(kept)}int columns;\n"
    )


def test_a_comment_behind_code_goes_alone() -> None:
    assert fitting("int rows;  // as tiles.cuh has them\nint columns;  // of `rows`\n", {}) == (
        "int rows;\nint columns;  // of `rows`\n"
    )


def test_a_long_block_is_filled_anew() -> None:
    text = f"  // {'It counts what follows. ' * 3}Of `other`\n  // more is not known. {'It ends here. ' * 5}\nint a;\n"
    found = fitting(text, {})
    assert "other" not in found and max(map(len, found.splitlines())) <= 120
    assert found.splitlines()[1].startswith("  // ")


def test_comments_for_a_flag_are_on_kernels_that_have_it() -> None:
    text = """\
// It counts.
// [wide] So do others,
// two by two.
// [narrow] None does.
// [library] See elsewhere.
int rows;
"""
    found = fitting(text, {"wide": True, "narrow": False})
    assert found == "// It counts.\n// So do others,\n// two by two.\nint rows;\n"
