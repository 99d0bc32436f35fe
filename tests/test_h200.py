"""benchmarks/h200.py: what it measures, what it leaves, and what it does when the time is up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from measured import CPU, command
from upconv.bench import files, report, suites
from upconv.cli import bench

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch):
    """The program, on a machine with an H200."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import h200

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    return h200


def test_each_report_is_what_its_command_measures(h200, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(todo: list[Any], device: torch.device, how: Any, tell: object) -> report.Report:
        asked.append((todo, how.frozen))
        return report.gather([], CPU, ceilings={"copy_bytes_per_s": 1.0, "matmul_flops_per_s": {}})

    monkeypatch.setattr(bench, "device_of", lambda text: torch.device(text))
    monkeypatch.setattr(bench.layers, "measure", measure)
    assert set(h200.ORDER) == set(h200.COMMANDS) == {*h200.SWEEPS, "training", "host", "shapes", "cold"}
    passes = {"gi": "grad-input", "gw": "grad-weight", "step": "step", "conv": "step"}
    counts = {"step": 10, "conv": len(suites.SUITES["convolutions"]), "frozen": 31 + 91}
    for name, sweep in h200.SWEEPS.items():
        assert command(*h200.COMMANDS[name][3:])[0] == 0
        todo, frozen = asked.pop()
        assert todo == sweep.jobs() and frozen == sweep.frozen == name.startswith("frozen-")
        kind = name.split("-")[0]
        assert len(todo) == counts.get(kind, 27 if "cl-" in name else 31)
        assert {job.problem.pass_ for job in todo} == {passes.get(kind, "fwd")}
        assert all(job.problem.bias for job in todo) or kind != "step"
        assert all(job.scale == 1 for job in todo)


def test_complete_reports_of_this_commit_stay(h200, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[str] = []

    def measure(words: list[str], seconds: float) -> int:
        begun.append(Path(words[-1]).stem)
        found = report.gather([], CPU, kind="host")
        files.save({**found, "commit": None, "complete": len(begun) != 2}, Path(words[-1]))
        return 0

    monkeypatch.setattr(h200, "measure", measure)
    given = ["--only", "host,tf32,shapes", "--out", str(tmp_path), "--commit", "a" * 40]
    assert h200.main(given) == h200.DONE
    assert begun == ["h200-tf32", "h200-host", "h200-shapes"], "in order of importance"
    assert report.load(tmp_path / "h200-tf32.json")["commit"] == "a" * 40
    assert h200.main(given) == h200.DONE and begun[3:] == ["h200-host"], "which was not complete"
    assert h200.main(given) == h200.DONE and len(begun) == 4
    assert h200.main([*given[:-1], "b" * 40]) == h200.DONE and len(begun) == 7
    assert h200.main([*given[:-1], "b" * 40, "--fresh"]) == h200.DONE and len(begun) == 10
    assert h200.main([*given, "--budget", "0"]) == h200.TIME_UP and len(begun) == 10
    monkeypatch.setattr(h200, "measure", lambda words, seconds: 1)
    assert h200.main([*given, "--fresh"]) == h200.WRONG
    monkeypatch.setattr(h200, "measure", lambda words, seconds: None)
    assert h200.main([*given, "--fresh"]) == h200.TIME_UP
