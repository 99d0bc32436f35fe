"""The pages say what the reports say, and their commands and examples run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from upconv.bench import roofline, timing
from upconv.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
USING = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
PAGES = sorted(path for folder in ("docs", "models") for path in (ROOT / folder).glob("*.md"))
CEILINGS = roofline.Ceilings(copy_bytes_per_s=4e12, matmul_flops_per_s={"tf32": 4e14, "ieee": 5e13})


@pytest.fixture
def readme(monkeypatch: pytest.MonkeyPatch):
    """The program, with the repository's reports."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    return readme


# --- pages -----------------------------------------------------------------------------------------------------------


def test_a_user_with_a_minute_can_read_it() -> None:
    assert README.count("\n") <= 150
    assert (ROOT / "docs" / "benchmarks.md").stat().st_size <= 40_000


def test_pages_are_what_the_reports_say(readme, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    assert (readme.main(), capsys.readouterr().out) == (0, "")
    marked = {name for page in readme.PAGES for name in re.findall(r"<!-- (\w+) -->\n", (ROOT / page).read_text())}
    assert marked == set(readme.SECTIONS)


@pytest.mark.parametrize("page", ("README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))))
def test_pictures_and_documents_it_names_exist(page: str) -> None:
    """Files, and headings of files, by GitHub's rule for their anchors."""
    path = ROOT / page
    for link, heading in re.findall(r"\]\(((?!https?:)[^)#]+)(#[^)]*)?\)", path.read_text(encoding="utf-8")):
        target = path.parent / link
        assert target.exists(), link
        if heading:
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading[1:] in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]


# --- commands and examples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ("README.md", "docs/using.md"))
def test_its_python_runs(page: str) -> None:
    """All Python blocks in turn, as a user would paste them."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    assert isinstance(names["model"], torch.nn.Module)
    if "out" in names:
        expected = torch.nn.ConvTranspose2d.forward(names["layer"], names["image"])
        torch.testing.assert_close(names["out"], expected)


def commands(text: str) -> list[list[str]]:
    """The words of each command of upconv's in a page's blocks."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    written = "".join(block for language, block in blocks if not language).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in written if line.startswith("upconv ")]


def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("upconv.cli.bench.QUICK", timing.Repeats(0.0, 3, 3))
    monkeypatch.setattr(roofline, "measure", lambda kinds, device: CEILINGS)
    for words in commands(README):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output)
    assert (tmp_path / "model_57.py").exists() and len(commands(README)) == 3


def named(text: str) -> list[list[str]]:
    """The words of each command of upconv's with options in a page's sentences."""
    return [shlex.split(found)[1:] for found in re.findall(r"`(upconv [^`]+ --[^`]+)`", text)]


def test_the_other_pages_commands_are_understood() -> None:
    """Options that the program does not have are errors, also of commands in sentences."""
    group = typer.main.get_command(app)
    for text in (README, *(path.read_text(encoding="utf-8") for path in PAGES)):
        for words in commands(text) + named(text):
            command: Any = group
            while isinstance(command, typer.core.TyperGroup) and words and words[0] in command.commands:
                command, words = command.commands[words[0]], words[1:]
            command.make_context(command.name, [*words])
    assert len(commands(USING)) > 8


def test_every_variable_is_explained() -> None:
    """Those that the package reads are those of the page."""
    read = {name for path in (ROOT / "src").rglob("*.py") for name in re.findall(r'"(UPCONV_\w+)"', path.read_text())}
    assert read == set(re.findall(r"^\| `(UPCONV_\w+)", USING, re.MULTILINE))


# --- figures ---------------------------------------------------------------------------------------------------------


def test_every_report_with_speeds_has_a_line(readme) -> None:
    """Also those of tomorrow: a report that no rule knows is no error, but it must not be lost."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    speeds = [path for path in readme.RESULTS.rglob("*.json") if '"ratio"' in path.read_text()]
    missing = {path.parent.name for path in speeds if f"/results/{path.relative_to(readme.RESULTS)})" not in page}
    assert missing <= {"checkouts"}, "which compare two commits"


# --- docs/explain.md -------------------------------------------------------------------------------------------------


def test_docs_say_what_the_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the layers in docs/explain.md: stale where `benchmarks/explain.py` was not run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import explain

    page = explain.PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- explain-") == 2 and explain.rewritten(page) == page
    stale = page.replace("\nplan ", "\nplans ", 1)
    assert stale != page and explain.rewritten(stale) == page
    with pytest.raises(ValueError, match="must succeed; it says "):
        explain.rewritten(page.replace("--gpu H200", "--gpu H2000"))
