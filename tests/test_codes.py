"""The program that compares machine code with another commit's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from upconv.cuda.compile import jit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import codes  # noqa: E402

SOURCE = """
__constant__ const int TABLE[] = {%s};
extern "C" __global__ void add(int* y) { y[threadIdx.x] += TABLE[threadIdx.x] * 3; }  // %s
extern "C" __global__ void other(int* y) { *y = %s; }
"""


def of(table: str, comment: str, value: str) -> dict[str, str]:
    return codes.sections(jit.cubin(SOURCE % (table, comment, value), "90a", "test"))


def test_code_and_constants_count_and_text_does_not() -> None:
    first = of("1,2,3", "one", "5")
    assert {".text.add", ".text.other"} <= first.keys() and any(name.startswith(".nv.constant3") for name in first)
    assert of("1,2,3", "two", "2 + 3") == first
    changed = of("1,2,3", "one", "6")
    assert {name for name in first if changed[name] != first[name]} == {".text.other"}
    tables = of("1,2,4", "one", "5")
    assert {name for name in first if tables[name] != first[name]} == {".nv.constant3"}
    with pytest.raises(ValueError, match="64-bit little-endian ELF"):
        codes.sections(b"PTX")


def test_each_difference_has_a_line() -> None:
    old = {
        "a": ["gather x", "0.text.k 1"],
        "b": ["gather x", "0.text.k 1"],
        "c": ["gather x", "0.text.k 1"],
        "d": ["g"],
    }
    new = {
        "a": ["gather x", "0.text.k 1"],
        "b": ["gather y", "0.text.k 1"],
        "c": ["gather x", "0.text.k 2"],
        "e": ["g"],
    }
    assert codes.differences(old, new) == [
        "b: another choice, gather x -> gather y",
        "c: other code, 0.text.k",
        "d: only before",
        "e: only now",
    ]


def test_a_commit_is_the_same_as_itself(capfd: pytest.CaptureFixture[str]) -> None:
    """The checkout as it is against its commit: compiled by both, a line says how many differ."""
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if git.returncode:
        pytest.skip("not a checkout")
    changed = subprocess.run(["git", "-C", str(ROOT), "diff", "--quiet", "HEAD", "--", "src"]).returncode
    case = ["--cases", "dcganO", "--precisions", "tf32", "--layouts", "nchw", "--passes", "fwd"]
    returned = codes.main(["HEAD", *case])
    out, err = capfd.readouterr()
    found = re.search(r"(\d) of 1 differ", out)
    assert found, err
    assert returned == int(found[1] != "0")
    if not changed:
        assert found[1] == "0", out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-commit"], "COMMIT must be one of this repository's, got 'no-such-commit'"),
        ([], "COMMIT must be named"),
        (["HEAD", "--cases", "kb99"], "got 'kb99'"),
        (["HEAD", "--passes", "step"], "got 'step'"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        codes.main(arguments)
    assert message in capsys.readouterr().err
