"""The README says what the reports say, and its commands and five lines run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from upconv.bench import files, latency, plots, report, roofline, run
from upconv.bench.suites import SUITES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


CPU = torch.device("cpu")
CEILINGS = roofline.Ceilings(copy_bytes_per_s=4e12, matmul_flops_per_s={"tf32": 4e14, "ieee": 5e13})


@pytest.fixture
def readme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The program, with an empty folder of results."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    return readme


def measured(path: Path, precision: str, ratios: dict[str, float | None], **changes: object) -> report.Report:
    """A report in which PyTorch takes twice the roof and we that by the ratio; None is a wrong row."""
    what = run.Sweep(dtypes=[torch.float32], precisions=[precision], layouts=["nchw"], passes=["fwd"])  # type: ignore
    rows = []
    for job in run.jobs("cuda", SUITES["cuda"], what, small=False, bias=None):
        if job.case not in ratios:
            continue
        row = run.blank(job, CPU)
        ratio = ratios[job.case]
        run.set_roof(row, CEILINGS)
        row.update({"engine": "cuda:gather", "rel_error": 3e-4, "torch_rel_error": 3e-4, "tolerance_used": 0.25})
        if ratio is None:
            run.fail(row, "wrong result: relative error 1.0e+00, PyTorch's 2.9e-04")
        else:
            theirs = 2 * row["roof_ms"]
            row.update({"torch_ms": theirs, "ours_ms": theirs / ratio, "ratio": ratio, **changes})  # type: ignore
        run.set_roof(row, CEILINGS)
        rows.append(row)
    found = report.build(rows, CEILINGS, CPU)
    files.save(found, path)
    return found


def test_tables_are_generated_from_the_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    assert (readme.main(), capsys.readouterr().out) == (0, "")


def test_a_changed_figure_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    figure = re.search(r"\| (\d+\.\d\dx) \|", README)
    assert figure is not None
    wrong = README.replace(figure[1], "99.99x")
    assert readme.rewritten(wrong) == README != wrong


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


def test_every_report_of_an_h200_has_a_place(readme) -> None:
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in readme.PAGES]
    assert "benchmarks/results" in pages[0] and "docs/benchmarks.md" in pages[0]
    names = {name for name, _ in readme.sections()}
    assert names >= {"h200-tf32", "h200-cl-fp16", "h200-host", "h200-shapes", "h200-summary", "h200-picture"}
    for name in names:
        marked = [page for page in pages if f"<!-- {name} -->\n" in page and f"\n<!-- /{name} -->" in page]
        assert marked, f"no page has the markers of {name}"


def test_every_page_is_rewritten(readme, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "docs").mkdir()
    for page in readme.PAGES:
        (tmp_path / page).write_text("<!-- h200-tf32 -->\nold\n<!-- /h200-tf32 -->\n")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    assert readme.main() == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(readme.PAGES)
    monkeypatch.setattr(sys, "argv", ["readme.py"])
    assert readme.main() == 0
    assert all("\nNot measured yet.\n" in (tmp_path / page).read_text() for page in readme.PAGES)
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    assert readme.main() == 0


def test_the_picture_is_linked_once_there_is_something_to_draw(readme, tmp_path: Path) -> None:
    empty = "<!-- h200-picture -->\n\n<!-- /h200-picture -->"
    assert readme.rewritten(empty) == empty
    measured(tmp_path / "h200-bf16.json", "tf32", {"kb57": 2.0})
    assert "](docs/h200-fwd.png)" in readme.rewritten(empty)


def test_commits_are_those_of_the_reports(readme, tmp_path: Path) -> None:
    """By kind, seven characters; where reports of a kind differ, which is of which. A report of no kind is left out."""
    empty = "<!-- h200-commits -->\nold\n<!-- /h200-commits -->\n"
    assert "\nNot measured yet.\n" in readme.rewritten(empty)
    for stem, commit in (
        ("h200-tf32", "a" * 40), ("h200-cl-bf16", "a" * 40), ("h200-gw-cl-tf32", "b" * 40), ("h200-gw-tf32", "c" * 40),
        ("h200-gw-bf16", "c" * 40), ("h200-cold", None), ("h200-host", "e" * 40 + "-dirty"),
        ("h100-training", "d" * 40), ("h200-founding", "f" * 40),
    ):  # fmt: skip
        (tmp_path / f"{stem}.json").write_text(json.dumps({"commit": commit}))
    lines = readme.commits().splitlines()
    assert len(lines) > 1 and all(len(line) <= 120 for line in lines)
    assert " ".join(lines) == (
        "Reports by the commit that they were measured of: forwards aaaaaaa; gradients for the weight ccccccc "
        "(`h200-gw-bf16`, `h200-gw-tf32`), bbbbbbb (`h200-gw-cl-tf32`); the host's time eeeeeee-dirty; "
        "cold kernels an unknown commit."
    )


def test_every_report_of_an_h200_is_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    stems = {path.stem for path in readme.RESULTS.glob("h200-*.json")} - {"h200-founding"}  # which no page has
    kinds = {stem: [k for k, of in readme.KINDS.items() if re.fullmatch(f"h200-{of}", stem)] for stem in stems}
    assert stems and all(len(of) == 1 for of in kinds.values()), kinds
    assert all(f" {kind} " in readme.commits().replace("\n", " ") for of in kinds.values() for kind in of)


def test_docs_say_what_the_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the layers in docs/explain.md: stale where `benchmarks/explain.py` was not run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import explain

    page = explain.PAGE.read_text(encoding="utf-8")
    assert [name for name, _ in explain.sections()] == [f"explain-{name}" for name in explain.CASES]
    assert explain.rewritten(page) == page
    stale = page.replace("\nplan ", "\nplans ", 1)
    assert stale != page and explain.rewritten(stale) == page
    with pytest.raises(ValueError, match="markers of explain-kb57 once; it has them 0 times"):
        explain.rewritten(page.replace("<!-- explain-kb57 -->\n", ""))


def test_its_python_runs() -> None:
    """The first Python block, as a user would paste it."""
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    names: dict[str, object] = {}
    exec(block[1], names)
    layer, image, out = names["layer"], names["image"], names["out"]
    assert isinstance(layer, torch.nn.ConvTranspose2d) and isinstance(image, torch.Tensor)
    torch.testing.assert_close(out, torch.nn.ConvTranspose2d.forward(layer, image))


# --- targets ---------------------------------------------------------------------------------------------------------

TF32 = {
    "kb57": 2.3, "kb65": 1.8, "kb69": 1.5, "kb71": 3.5, "kb75": 14, "kb78": 3, "kb81": 4, "dcgan1": 1.5, "dcgan2": 1.5,
    "dcgan3": 1.5, "dcganO": 3, "unet1": 1.5, "unet4": 3, "pix": 1.4, "vae": 1.6, "fsrcnn": 3, "depthw": 8, "fcn8s": 40,
    "hifigan": 1.3,
}  # fmt: skip
EMPTY = "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in ("h200-tf32", "h200-host", "h200-summary"))


def test_targets_are_those_of_the_issue(readme) -> None:
    found = readme.groups("h200-tf32", [])
    assert found[0].targets == TF32 and found[0].mean_target == 3.3
    assert set(found[1].targets.values()) == {2.5} and set(found[2].targets.values()) == {4}
    assert [len(group.targets) for group in found] == [19, 3, 9]
    deep = set(found[2].targets)
    for name, error, least in (("ieee", 2, 1.0), ("fp16", 1.1, 1.2), ("bf16", 1.1, None)):
        every = readme.groups(f"h200-{name}", [])
        assert [len(group.targets) for group in every] == [19, 3, 9]
        assert all(group.error_target == error for group in every)
        assert least is None or all(set(group.targets.values()) == {least} for group in every)
    for name, error in (("tf32", None), ("bf16", 1.1), ("fp16", 1.1)):
        flat, of_3d = readme.groups(f"h200-cl-{name}", [])
        assert set(flat.targets) == set(TF32) - {"hifigan"} and set(of_3d.targets) == deep
        assert set(flat.targets.values()) == set(of_3d.targets.values()) == {1.0}
        assert flat.mean_target == 1.5 and flat.error_target == of_3d.error_target == error


def test_without_reports_a_section_says_so(readme) -> None:
    text = readme.rewritten(EMPTY)
    assert text.count("\nNot measured yet.\n") == 3 and "old" not in text


def test_rows_are_marked_by_their_targets(readme, tmp_path: Path) -> None:
    ratios: dict[str, float | None] = {**TF32, "kb57": 2.29, "kb65": 1.8, "kb71": None, "fcn8s": 400.0, "kb64": 9.0}
    del ratios["pix"]
    measured(tmp_path / "h200-tf32.json", "tf32", ratios)
    text = readme.rewritten(EMPTY)
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "| 2.29x | 2.3x missed |" in lines["kb57"] and "| 1.80x | 1.8x met |" in lines["kb65"]
    assert "| wrong | 3.5x missed |" in lines["kb71"] and "| not measured | 1.4x |" in lines["pix"]
    assert "| 9.00x | 2.5x met |" in lines["kb64"] and lines["kb64"].endswith("| 450% | cuda:gather |")
    assert "16 of 19 cases meet their targets, missed: kb57, kb71, pix." in text
    group = readme.groups("h200-tf32", report.load(tmp_path / "h200-tf32.json")["rows"])[0]
    assert group.mean > 3.3 and not group.mean_met  # for a case is missing and one wrong
    assert "(target 3.3x: missed)" in text and "0.25 of KernelBench's tolerance" in text
    assert f"| 2-D, float32 as TF32, NCHW | {group.mean:.2f}x | 3.3x missed | 16 of 19 | hifigan 1.30x |" in text


def test_an_h100_is_judged_by_the_h200s_targets(readme, tmp_path: Path) -> None:
    page = "<!-- h100-summary -->\nold\n<!-- /h100-summary -->\n<!-- h100-tf32 -->\nold\n<!-- /h100-tf32 -->\n"
    assert "Not measured yet." in readme.rewritten(page) and "x |" not in readme.summary("h100")
    measured(tmp_path / "h100-tf32.json", "tf32", {**TF32, "kb57": 2.29})
    text = readme.rewritten(page)
    assert "| 2.29x | 2.3x missed |" in text and "old" not in text
    assert "| 3.3x missed | 18 of 19 |" in text and readme.summary() == readme.ABSENT


def test_a_group_is_met_when_all_of_it_is(readme, tmp_path: Path) -> None:
    every: dict[str, float | None] = dict.fromkeys(TF32, 1.5)
    rows = measured(tmp_path / "r.json", "ieee", every)["rows"]
    assert readme.groups("h200-ieee", rows)[0].met
    rows[3]["rel_error"] = 2.1 * (rows[3]["torch_rel_error"] or 0)
    group = readme.groups("h200-ieee", rows)[0]
    assert group.missed == [rows[3]["case"]] and group.mean_met and not group.met
    assert f"{rows[3]['rel_error']:.1e}, 3.0e-04 |" in readme.judged("h200-ieee", report.build(rows, CEILINGS, CPU))
    rows = measured(tmp_path / "r.json", "ieee", {**every, "kb57": 1.2})["rows"]
    assert not readme.groups("h200-ieee", rows)[0].mean_met


def test_rows_outside_of_every_group_have_a_table_without_targets(readme, tmp_path: Path) -> None:
    found = measured(tmp_path / "r.json", "ieee", {"kb57": 1.5, "kb70": 1.1})
    found["rows"][1]["case"] = "elsewhere"
    last = readme.groups("h200-ieee", found["rows"])[-1]
    assert list(last.rows) == ["elsewhere"] and not last.targets and last.met
    text = readme.judged("h200-ieee", found).split("**Without targets**")[1]
    assert "target" not in text.split("Roof:")[0].replace("**", "") and "| 1.10x |" in text


def test_latency_reports_are_tables(readme, tmp_path: Path) -> None:
    row = {"dtype": "float32", "mode": "no_grad", "engine": "cuda:gather", "ours_us": 12.34, "torch_us": 15.0,
           "added_us": -2.66, "calls": 100}  # fmt: skip
    found = latency.build("host", CPU, "16->16 k4", [row])  # type: ignore[list-item]
    files.save(found, tmp_path / "h200-host.json")
    text = readme.rewritten(EMPTY)
    assert "| float32 | no_grad | 15.0 | 12.3 | -2.7 | cuda:gather |" in text


def test_the_command_says_which_targets_are_met(readme, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["readme.py", "--targets"])
    measured(tmp_path / "h200-tf32.json", "tf32", dict.fromkeys(TF32, 50.0))
    assert readme.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("met    2-D, float32 as TF32, NCHW: Geometric mean 50.00x (target 3.3x: met)")
    assert lines[1] == "missed 1-D, float32 as TF32: not measured yet."
    assert len(lines) == sum(map(len, readme._targets().values()))


def test_the_picture_of_the_roofs(readme, tmp_path: Path) -> None:
    from matplotlib.image import imread

    found = [measured(tmp_path / "r.json", kind, dict.fromkeys(TF32, 1.5)) for kind in ("tf32", "ieee")]
    plots.plot_roofs(found, tmp_path / "r.svg")
    text = (tmp_path / "r.svg").read_text()
    assert "75% · 1.50x" in text and "float32 as TF32" in text and "hifigan" in text
    plots.plot_roofs(found, tmp_path / "r.png")
    assert imread(tmp_path / "r.png").shape[1] > 1500
    with pytest.raises(ValueError, match="a plot needs at least one row with a speed"):
        plots.plot_roofs([measured(tmp_path / "r.json", "tf32", {"kb57": None})], tmp_path / "r.png")
    assert json.loads((ROOT / "benchmarks" / "targets.json").read_text()).keys() >= set(readme.PICTURED)


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


def test_training_curves_are_stated(readme, tmp_path: Path) -> None:
    """Distances of windows' means: noise within a window counts for nothing, a shift for itself."""
    import curves

    path = tmp_path / "h200-curves.json"
    empty = "<!-- h200-curves -->\nold\n<!-- /h200-curves -->\n"
    assert "Not measured yet." in readme.rewritten(empty)
    curves.save(curves_of(0.25, 0.1), path)
    text = readme.rewritten(empty)
    rows = [line for line in text.splitlines() if line.startswith(("| DCGAN", "| U-Net"))]
    assert len(rows) == 3 and all("| 0.25 (0.25 to 0.25) | 0 | 0.9 (0.3 to 2.1) | yes |" in row for row in rows)
    assert "1.900000, 2.150000" in rows[0] and "3 windows of 45 steps" in text and "cuDNN 9.19.0" in text
    curves.save(curves_of(-0.95, 0.1), path)
    assert readme.rewritten(empty).count("| 0.95 (0.95 to 0.95) | 0 | 0.9 (0.3 to 2.1) | no |") == 3, "in the mean"
    found = curves_of(0.0, 0.0)
    runs = found["models"]["unet"]["losses"]
    runs["upconv, seed 3"]["loss"] = [v + 2.4 for v in runs["torch, seed 3"]["loss"]]
    curves.save(found, path)
    assert readme.rewritten(empty).count("| 0.3 (0 to 2.4) | 0 | 0.9 (0.3 to 2.1) | no |") == 1, "at most"
    ours, theirs = (runs[f"{side}, seed 0"]["loss"] for side in ("upconv", "torch"))
    ours[44] += 1.0
    assert curves.distance(ours, theirs) == pytest.approx(0.2 / 3), "the last window has five steps"


def test_training_curves_are_drawn_by_make_readme(readme, tmp_path: Path, monkeypatch) -> None:
    import curves
    from matplotlib.image import imread

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "benchmarks.md").write_text("<!-- h200-curves -->\nold\n<!-- /h200-curves -->\n")
    (tmp_path / "README.md").write_text("")
    curves.save(curves_of(0.01, 0.1), tmp_path / "h200-curves.json")
    picture = tmp_path / "docs" / "training-curves.png"
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(curves, "PICTURE", picture)
    monkeypatch.setattr(sys, "argv", ["readme.py"])
    assert readme.main() == 0
    assert imread(picture).shape[1] > 1500
    assert "](training-curves.png)" in (tmp_path / "docs" / "benchmarks.md").read_text()


@pytest.mark.parametrize("change", [{"schema": 2}, {"runs": ["torch"]}])
def test_training_curves_of_another_form_are_refused(readme, tmp_path: Path, change: dict[str, Any]) -> None:
    import curves

    found = curves_of(0.0, 0.0)
    if "schema" in change:
        found.update(change)
    else:
        del found["models"]["unet"]["losses"][curves.AGAIN]
    curves.save(found, tmp_path / "c.json")
    with pytest.raises(ValueError, match=r"c\.json must h(old|ave)"):
        curves.load(tmp_path / "c.json")


def test_training_steps_are_judged(readme, tmp_path: Path) -> None:
    """By their ratio and by their peak memory, in the table and in the list of targets."""
    empty = dict.fromkeys(latency.TRAINING_KEYS)
    rows: list[dict[str, Any]] = []
    for case in ("dcgan", "unet", "vae", "hifigan"):
        times = {"torch_ms": 12.0, "ours_ms": 10.0, "compile_ms": 11.0, "ratio": 1.2, "rounds": 9}
        peaks = {"ours_peak_bytes": 10**9 + (case == "vae"), "torch_peak_bytes": 10**9}
        rows += [{**empty, **times, **peaks, "case": f"{case} {dtype}"} for dtype in ("fp32", "bf16")]
    rows[0].update(ours_ms=None, torch_ms=None, ratio=None, failure="torch: out of memory")
    rows[3].update(ratio=1.1)
    files.save(latency.build("training", CPU, "steps", rows), tmp_path / "h200-training.json")
    (table,) = [content for name, content in readme.sections() if name == "h200-training"]
    lines = {line.split(" | ")[0].strip("| "): line for line in table.splitlines() if line.startswith("| ")}
    assert "torch: out of memory" in lines["dcgan fp32"] and "1x missed" in lines["dcgan fp32"]
    assert (
        "1x met" in lines["unet fp32"] and "1.15x missed" in lines["unet bf16"] and "1.15x met" in lines["dcgan bf16"]
    )
    assert "1x missed" in lines["vae fp32"], "its peak is a byte above PyTorch's"
    assert "1.20x" in lines["hifigan bf16"] and "1000" in lines["hifigan bf16"]
    assert "bfloat16 autocast" in readme.summary()
