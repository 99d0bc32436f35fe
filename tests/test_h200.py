"""benchmarks/h200.py: what it measures, what it keeps when it is stopped, and what a lost device costs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from measured import CPU, SHORT, TINY, ceilings
from upconv.bench import files, models, report, roofline, suites, training
from upconv.bench.run import Job, Way

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
TARGETS = json.loads((BENCHMARKS / "targets.json").read_text())


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import h200

    monkeypatch.setattr(roofline, "measure", lambda precisions, device: ceilings(1e9, 1e10))
    monkeypatch.setattr(h200, "SWEEP", SHORT)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: report.env.device(CPU)["name"])
    return h200


@pytest.fixture
def tiny(h200, monkeypatch: pytest.MonkeyPatch):
    """Report tf32 has three tiny layers on a CPU."""
    todo = [Job("cuda", name, TINY.with_(batch=n)) for n, name in enumerate("abc", 1)]
    monkeypatch.setitem(h200.SWEEPS, "tf32", Way(torch.float32, "ieee"))
    monkeypatch.setattr(h200, "jobs", lambda name: todo)
    return h200


def later() -> float:
    return time.monotonic() + 100


# --- what is measured ------------------------------------------------------------------------------------------------


def test_every_case_that_has_a_target_is_measured_2d_first(h200) -> None:
    frozen = {"frozen-tf32", "frozen-bf16"}
    assert {f"h200-{name}" for name in {*h200.SWEEPS} - frozen} == set(TARGETS) - {"h200-training", "h200-exported"}
    assert [len(h200.jobs(name)) for name in sorted(frozen)] == [31 + 91] * 2
    assert set(h200.ORDER) == {*h200.SWEEPS, *h200.UNSWEPT, "training"}
    passes = {"gi": "grad-input", "gw": "grad-weight", "step": "step", "conv": "step"}
    for name in {*h200.SWEEPS} - frozen:
        found = h200.jobs(name)
        cases = [job.case for job in found]
        counts = {"step": 10, "conv": len(suites.SUITES["convolutions"])}
        count = counts.get(name.split("-")[0], 27 if "cl-" in name else 31)
        assert len(set(cases)) == len(cases) == count
        assert {job.problem.pass_ for job in found} == {passes.get(name.split("-")[0], "fwd")}
        assert all(job.problem.bias for job in found) or not name.startswith("step-")
        wanted = [list(group["cases"]) for group in TARGETS[f"h200-{name}"]]
        assert {case for group in wanted for case in group} <= set(cases)
        assert set(wanted[0]) == set(cases[: len(wanted[0])])
        assert all(job.scale == 1 for job in found)


def test_training_cases_are_the_targets() -> None:
    wanted = {case for group in TARGETS["h200-training"] for case in group["cases"]}
    measured = {f"{case.name} {dtype}" for case in models.cases() for dtype in ("fp32", "bf16")}
    assert wanted == measured | {f"{case}, convolutions too" for case in measured}


@pytest.mark.parametrize(("name", "frozen"), [("frozen-bf16", True), ("bf16", False)])
def test_frozen_reports_time_frozen_weights(h200, monkeypatch, tmp_path: Path, name: str, frozen: bool) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(h200.run, "run", lambda todo, device, how, **rest: asked.append(how.frozen) or iter(()))
    assert h200.sweep(name, tmp_path / "r.json", CPU, later(), False, (), {})
    assert asked == [frozen]


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_stopped_measurement_goes_on(tiny, tmp_path: Path) -> None:
    path = tmp_path / "r.json"

    def sweep(end: float, cases: tuple[str, ...] = (), failed: dict[str, str] | None = None) -> bool:
        return tiny.sweep("tf32", path, CPU, end, False, cases, failed or {})

    assert sweep(later(), ("b",)) is True
    first = report.load(path)
    assert [row["case"] for row in first["rows"]] == ["b"]
    with pytest.raises(tiny.TimeUp):
        sweep(time.monotonic() - 1)
    assert report.load(path)["rows"] == first["rows"]
    assert sweep(later(), (), {"a": "no sign for 5 s"}) is False
    whole = report.load(path)
    assert [row["case"] for row in whole["rows"]] == ["a", "b", "c"]
    assert whole["rows"][1]["ours_ms"] == first["rows"][0]["ours_ms"]
    assert whole["rows"][0]["failure"] == "no sign for 5 s" and whole["rows"][0]["ours_ms"] is None
    before = path.read_bytes()
    assert sweep(time.monotonic() - 1) is False and path.read_bytes() == before
    # Rows of other sources do not count.
    whole["versions"]["sources"] = "another"
    files.save(whole, path)
    assert sweep(later()) is True and all(row["failure"] is None for row in report.load(path)["rows"])


def test_some_rows_are_measured_anew(tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By other sources: the others stay as they were, and say of which commit they are, until they are measured too."""
    path, end = tmp_path / "r.json", later()

    def sweep(*cases: str, keep: bool = True) -> list[tuple[bool, str | None]]:
        assert tiny.sweep("tf32", path, CPU, end, keep, cases, {})
        found = report.load(path)
        assert found["versions"]["sources"] == tiny.sources()
        return [(row["ours_ms"] == 1e6, row.get("commit")) for row in found["rows"]]

    assert sweep(keep=False) == [(False, None)] * 3
    old = report.load(path)
    old["versions"]["sources"], old["commit"] = "another", "0" * 40
    for row in old["rows"]:
        row["ours_ms"], row["roof_ms"] = 1e6, 7.0
    files.save(old, path)
    stays, new = (True, "0" * 40), (False, None)
    for _ in range(2):  # a second time there is nothing to do
        assert sweep("b") == [stays, new, stays]
        assert [row["roof_ms"] == 7.0 for row in report.load(path)["rows"]] == [True, False, True]
    assert sweep("a") == [new, new, stays] == sweep()
    with pytest.raises(tiny.TimeUp):
        tiny.sweep("tf32", path, CPU, time.monotonic() - 1, True, ("c",), {})
    assert sweep() == [new, new, stays], "what was not measured again is there"
    assert sweep(keep=False) == [new] * 3
    files.save({**report.load(path), "commit": None, "versions": {"sources": "another"}}, path)
    with pytest.raises(ValueError, match="must name the commit of the rows that stay"):
        sweep("b")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    with pytest.raises(ValueError, match="must be of this GPU, a another GPU, for its rows to stay"):
        sweep("b")


def test_whole_models_are_measured_row_by_row(h200, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []
    fixed = dict.fromkeys(report.KEYS["training"], 1.0)

    def measure(device: torch.device, todo: list, *, compiled: bool, progress: object) -> report.Report:
        asked.append((todo[0].name, compiled))
        row = {**fixed, "case": todo[0].name, "ours_ms": float(len(asked))}
        return report.build([row], device, kind="training", layer="models")

    monkeypatch.setattr(h200.training, "measure", measure)
    path = tmp_path / "h200-training.json"
    every = [run.name for run in training.runs(layouts=h200.LAYOUTS, modes=training.MODES)]
    vae = [name for name in every if name.startswith("vae ")]
    with pytest.raises(h200.TimeUp):
        h200.train(path, CPU, time.monotonic() - 1, True, [])
    h200.train(path, CPU, later(), True, ["vae"])
    h200.train(path, CPU, later(), True, [])  # goes on with the rest
    assert asked == [(name, True) for name in (*vae, *(name for name in every if name not in vae))]
    h200.train(path, CPU, later(), False, ["dcgan"])  # anew
    found = report.load(path)
    assert [row["case"] for row in found["rows"]] == every and asked[-1] == (every[7], False)
    assert found["rows"][0]["ours_ms"] == len(every) + 1 and found["rows"][8]["ours_ms"] == 17
    monkeypatch.setattr(h200, "sources", lambda: "others")
    h200.train(path, CPU, later(), True, [], keep=True)
    assert report.load(path) == found and len(asked) == len(every) + 8
    h200.train(path, CPU, later(), True, [])  # of these sources nothing is there
    assert len(asked) == 2 * len(every) + 8


# --- children --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("print('report tf32', flush=True); print('row tf32 a', flush=True); exit(7)", (7, "tf32:a")),
        ("print('row tf32 a'); print('report cl-tf32'); exit(0)", (0, None)),
        ("print('report host', flush=True); import time; time.sleep(60)", (None, "host:host")),
    ],
)
def test_a_child_that_crashes_or_hangs_is_told_from_one_that_ends(h200, code: str, found) -> None:
    begin = time.monotonic()
    assert h200.watch([sys.executable, "-c", code], 2.0, begin + 30) == found
    assert time.monotonic() - begin < 20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """A machine with a GPU of this name."""

    def named(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)

    return named


def test_a_failed_row_is_given_to_the_next_child(h200, gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu("NVIDIA H200")
    ends = [(h200.CHILD_LOST, "tf32:a"), (None, "tf32:b"), (-11, "ieee:c"), (h200.DONE, None)]
    commands: list[list[str]] = []

    def watch(command: list[str], stall: float, end: float) -> tuple[int | None, str | None]:
        commands.append(command)
        return ends[len(commands) - 1]

    monkeypatch.setattr(h200, "watch", watch)
    assert h200.main(["--out", str(tmp_path), "--stall", "9", "--budget", "50"]) == h200.WRONG
    failed = [[b for a, b in zip(command, command[1:]) if a == "--failed"] for command in commands]
    hung, crashed = "tf32:b:no sign for 9 s", "ieee:c:the process ended with -11"
    assert failed == [[], [], [hung], [hung, crashed]] and all("--child" in command for command in commands)


def test_another_gpus_reports_are_not_written(h200, gpu, monkeypatch, tmp_path: Path, capsys) -> None:
    gpu("NVIDIA H100 80GB HBM3")
    with pytest.raises(SystemExit):
        h200.main(["--out", str(tmp_path)])
    assert "--stem must be part of the GPU's name, a NVIDIA H100 80GB HBM3, got h200" in capsys.readouterr().err
    monkeypatch.setattr(h200, "parent", lambda options, arguments: options.stem)
    assert h200.main(["--out", str(tmp_path), "--stem", "h100"]) == "h100"
