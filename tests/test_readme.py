"""The pages say what the reports say, and their commands and examples run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from upconv.bench import files, report, roofline, timing
from upconv.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
USING = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
CPU = torch.device("cpu")
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


def test_a_changed_figure_is_noticed(readme, tmp_path: Path, monkeypatch, capsys) -> None:
    figure = re.search(r"\| (\d+\.\d\dx) \|", README)
    assert figure is not None
    wrong = README.replace(figure[1], "99.99x")
    assert readme.rewritten(wrong) == README != wrong
    (tmp_path / "README.md").write_text(wrong, encoding="utf-8")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "PAGES", ("README.md",))
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    assert readme.main() == 1 and "README.md differs from benchmarks/results" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["readme.py"])
    (tmp_path / "docs").mkdir()
    assert readme.main() == 0 and (tmp_path / "README.md").read_text(encoding="utf-8") == README
    assert {path.name for path in (tmp_path / "docs").iterdir()} == {
        "h200-fwd.png",
        "cpu-fwd.png",
        "training-curves.png",
    }


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


def test_the_other_page_s_commands_are_understood() -> None:
    group = typer.main.get_command(app)
    for words in commands(USING):
        group.make_context("upconv", [*words])
        command: Any = group
        while isinstance(command, typer.core.TyperGroup) and words and words[0] in command.commands:
            command, words = command.commands[words[0]], words[1:]
        command.make_context(command.name, [*words])
    assert len(commands(USING)) > 8


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.MULTILINE))
def test_its_make_targets_exist(target: str) -> None:
    """What make would run is found out without running it."""
    done = subprocess.run(["make", "-n", target, "PY=python3"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "python3 -m" in done.stdout


def test_its_examples_exist() -> None:
    named = re.findall(r"python (examples/\w+\.py)", USING)
    assert sorted(named) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.py"))


def test_every_variable_is_explained() -> None:
    """Those that the package reads are those of the page."""
    read = {name for path in (ROOT / "src").rglob("*.py") for name in re.findall(r'"(UPCONV_\w+)"', path.read_text())}
    assert read == set(re.findall(r"^\| `(UPCONV_\w+)", USING, re.MULTILINE))


# --- figures ---------------------------------------------------------------------------------------------------------


def measured(precision: str, ratios: dict[str, float | None], **changes: object) -> report.Report:
    """A report of the suite's layers; None is a wrong row."""
    rows = [
        {
            "suite": "cuda", "case": case, "pass": "fwd", "dtype": "float32", "precision": precision, "layout": "nchw",
            "engine": "torch" if ratio is None else "cuda:gather", "ratio": ratio, "frozen_ratio": None,
            "failure": "wrong result" if ratio is None else None, **(changes if ratio is not None else {}),
        }
        for case, ratio in ratios.items()
    ]  # fmt: skip
    return report.gather(rows, CPU, ceilings=CEILINGS)


@pytest.fixture
def lines(readme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Saves a report of a commit; the lines of the table of all reports then."""

    def found(given: report.Report, commit: str | None) -> list[list[str]]:
        given["commit"] = commit
        files.save(given, tmp_path / "h200-tf32.json")
        return [cells for _, cells in readme.lines()]

    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    return found


def test_a_report_is_summed_up_in_a_line(readme, lines) -> None:
    given = measured("tf32", {"kb57": 4.0, "kb65": 0.5, "kb69": 0.996, "kb71": None, "kb78": 1.0})
    given["rows"][0]["commit"] = "b" * 40
    given["rows"][4]["engine"] = "torch"  # which is not ours
    ((link, *cells),) = lines(given, "a" * 40)
    assert link == "[h200-tf32](../benchmarks/results/h200-tf32.json)"
    assert cells[:-1] == [
        "Forward, float32 as TF32, NCHW", "each call", "3 of 5", "1.26x", "kb65 0.50x", "kb65 0.50x, kb69 0.996x",
        "aaaaaaa, 1 of bbbbbbb",
    ]  # fmt: skip
    given = measured("tf32", {"kb57": 2.0}, frozen_ms=0.5, frozen_ratio=4.0)
    first, second = lines(given, "a" * 40)
    assert (first[2], first[4]) == ("each call", "2.00x") and (second[2], second[4]) == ("frozen", "4.00x")
    given["rows"][0]["frozen_ratio"] = None
    assert lines(given, sorted(readme.KEPT)[0] + "0" * 33)[0][2] == "kept", "of commits that kept them"
    assert lines(given, None) == [], "a report of an unknown commit proves nothing"
    given["rows"][0]["pass"] = "grad-weight"
    assert lines(given, "a" * 40)[0][1:3] == ["Gradient for the weight, float32 as TF32, NCHW", "none"]


def test_models_have_a_line_for_steps_and_one_for_inference(lines) -> None:
    rows = [
        {"case": f"vae {n}", "pass": pass_, "ratio": ratio, "convolutions_ratio": None, "compile_ratio": 3.0}
        for n, (pass_, ratio) in enumerate((("step", 2.0), ("step", None), ("fwd", 0.5)))
    ]
    given: Any = {**measured("tf32", {}), "kind": "training", "rows": rows}
    assert [(cells[1], cells[3], cells[4]) for cells in lines(given, "a" * 40)] == [
        ("Training steps of models", "1 of 2", "2.00x"), ("Training steps of models, by `torch.compile`", "2", "3.00x"),
        ("Inference of models", "1", "0.50x"), ("Inference of models, by `torch.compile`", "1", "3.00x"),
    ]  # fmt: skip


def test_every_report_with_speeds_has_a_line(readme) -> None:
    """Also those of tomorrow: a report that no rule knows is no error, but it must not be lost."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    speeds = [path for path in readme.RESULTS.rglob("*.json") if '"ratio"' in path.read_text()]
    missing = [path.stem for path in speeds if f"/results/{path.relative_to(readme.RESULTS)})" not in page]
    assert missing == ["h200-founding"], "of no known commit, from before upconv had kernels"


def test_the_readme_s_table_is_short_and_says_where_nothing_is_gained(readme) -> None:
    rows = readme.gains().splitlines()[2:]
    assert len(rows) <= 12
    assert rows[-1].startswith("| Other layers") and "| CPU | none: PyTorch's operator |" in rows[-1]
    assert readme._slower([0.5, 0.9, 1.0, None]) == "2 of 4, lowest 0.50x" and readme._slower([1.0]) == "0 of 1"


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


# --- training curves -------------------------------------------------------------------------------------------------


def curves_of(shift: float, noise: float) -> dict[str, Any]:
    """A report of training curves: PyTorch's of each seed lie 0.3 above those of the one before, upconv's ``shift``
    above PyTorch's of their seed."""
    import curves

    steps = 45
    models = {}
    for name, losses in (("dcgan", ("generator", "discriminator")), ("unet", ("loss",))):
        base = [2.0 - i / steps + (noise if i % 2 else -noise) for i in range(steps)]
        ups = {run: 0.3 * seed + ours * shift for run, (ours, seed) in curves.RUNS.items()}
        made = {run: {loss: [v + up for v in base] for loss in losses} for run, up in ups.items()}
        models[name] = {"width": 8, "batch": 4, "losses": made, "seconds": dict.fromkeys(ups, 1.0)}
    where = {"type": "cuda", "name": "NVIDIA H200"}
    versions = {"upconv": "0.1.0", "torch": "2.11.0", "cudnn": "9.19.0"}
    return {"schema": 1, "when": "2026-11-21T00:00:00+00:00", "commit": None, "device": where, "versions": versions,
            "steps": steps, "models": models}  # fmt: skip


def test_training_curves_are_stated(readme) -> None:
    """Distances of windows' means: noise within a window counts for nothing, a shift for itself."""
    import curves

    text = curves.stated(curves_of(0.25, 0.1))
    rows = [line for line in text.splitlines() if line.startswith(("| DCGAN", "| U-Net"))]
    assert len(rows) == 3 and all("| 0.25 (0.25 to 0.25) | 0 | 0.9 (0.3 to 2.1) | yes |" in row for row in rows)
    assert "1.900000, 2.150000" in rows[0] and "3 windows of 45 steps" in text and "cuDNN 9.19.0" in text
    text = curves.stated(curves_of(-0.95, 0.1))
    assert text.count("| 0.95 (0.95 to 0.95) | 0 | 0.9 (0.3 to 2.1) | no |") == 3, "in the mean"
    found = curves_of(0.0, 0.0)
    runs = found["models"]["unet"]["losses"]
    runs["upconv, seed 3"]["loss"] = [v + 2.4 for v in runs["torch, seed 3"]["loss"]]
    assert curves.stated(found).count("| 0.3 (0 to 2.4) | 0 | 0.9 (0.3 to 2.1) | no |") == 1, "at most"
    ours, theirs = (runs[f"{side}, seed 0"]["loss"] for side in ("upconv", "torch"))
    ours[44] += 1.0
    assert curves.distance(ours, theirs) == pytest.approx(0.2 / 3), "the last window has five steps"
