"""The command ``upconv bench``: what it writes and shows, with a terminal and without, to its end and up to Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from measured import CPU, LAYER, TINY, ceilings
from upconv.bench import report, roofline, run, suites, tables, timing, training
from upconv.bench.run import Job
from upconv.cli import app, arguments
from upconv.cuda.families import FAMILIES

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
# The command with a line for each row instead of one now and then.
TALKING = "import sys; from upconv.bench import progress; progress.EVERY = 0.0; from upconv.cli import main; main()"


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments, "--device", "cpu"])


@pytest.mark.parametrize("quick", [[], ["--quick"], ["--full"]])
def test_a_layer_is_measured_at_its_own_size(fast: None, quick: list[str], tmp_path: Path) -> None:
    """One of 2.1e9 multiplications, more than a row of a suite has on a CPU."""
    size = "2x16x256x513"
    given = ["--layer", "16,16,(5,7)", "--input", size]
    assert suites.parse_layer(given[1], size).macs > suites.QUICK_MACS
    done = bench(*given, *quick, "--json", str(tmp_path / "r.json"))
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert done.exit_code == 0 and row["layer"].endswith(f" on {size}")
    assert row["flops"] == suites.parse_layer(given[1], size).flops
    assert done.stderr == "0 of 1 done; measuring what the machine copies and multiplies\n"
    assert "done;" not in done.stdout and "the one row" in done.stdout


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "path", "reason"),
    [
        ("--json", "/proc/r.json", "--json cannot be written: No such file or directory; got '/proc/r.json'"),
        ("--plot", "/proc/r.png", "--plot cannot be written: No such file or directory; got '/proc/r.png'"),
        ("--json", "a" * 300, f"--json cannot be written: File name too long; got '{'a' * 300}'"),
        ("--json", ".", "--json cannot be written: Is a directory; got '.'"),
    ],
)
def test_a_path_that_cannot_be_written_is_a_sentence_at_once(
    option: str, path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*arguments: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(roofline, "measure", too_late)
    done = bench(*LAYER, option, path)
    assert (done.exit_code, done.output) == (2, f"upconv: {reason}\n") and not list(tmp_path.iterdir())


def test_a_link_stays_one(tmp_path: Path) -> None:
    """Also one to a file that is not there yet; a new path is tried and leaves nothing."""
    file, link = tmp_path / "r.json", tmp_path / "link.json"
    link.symlink_to(file)
    assert arguments.writable("--json", str(link)) == link and link.is_symlink()
    assert arguments.writable("--json", str(tmp_path / "new.json")) and not (tmp_path / "new.json").exists()
    file.write_text("old")
    assert arguments.writable("--json", str(link)).read_text() == "old"


def test_what_cannot_be_drawn_is_a_sentence(tmp_path: Path) -> None:
    """Layers alone have a roof."""
    file, picture = tmp_path / "r.json", tmp_path / "r.png"
    report.save(report.gather([{"case": "vae", "ratio": 1.0, "ours_ms": 1.0, "failure": None}], CPU, "training"), file)
    done = CliRunner().invoke(app, ["bench", "--from", str(file), "--plot", str(picture)])
    reason = "a plot needs at least one layer with a speed, and this report has none"
    assert (done.exit_code, done.stderr) == (1, f"upconv: {picture} was not drawn: {reason}\n")


# --- spread ----------------------------------------------------------------------------------------------------------


def test_a_row_has_the_quartiles_of_its_times(shuffled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"torch": (1, 2, 3, 4, 5), "ours": (10, 11, 12, 13, 30)}

    def interleave(runs, take, repeats):
        return {name: [1e-3 * value for value in taken[name]] for name in runs}

    monkeypatch.setattr(timing, "interleave", interleave)
    found = run.row(Job("custom", "x", TINY), CPU, timing.Repeats(0.0, 3, 3), ceilings())
    assert found["failure"] is None and found["rounds"] == 5
    assert [found[f"torch_{k}ms"] for k in ("lower_", "", "upper_")] == pytest.approx([2, 3, 4])
    assert [found[f"ours_{k}ms"] for k in ("lower_", "", "upper_")] == pytest.approx([11, 12, 13])
    assert found["warning"] and "PyTorch's by 67%" in found["warning"] and "upconv" not in found["warning"]
    console = Console(record=True, width=100, file=io.StringIO())
    tables.show(
        report.gather([found], CPU, "layers", ceilings={"copy_bytes_per_s": 1.0, "matmul_flops_per_s": {}}), console
    )
    text = console.export_text()
    assert all(part in text for part in ("spread", " 67%")), text
    assert "x: times vary by more than half: PyTorch's by 67%" in " ".join(text.split())


def test_the_load_is_in_the_report(fast: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([(0.5, 0.4, 0.3), (1.25, 0.6, 0.4)])
    monkeypatch.setattr(os, "getloadavg", lambda: next(loads))
    done = bench(*LAYER, "--json", str(tmp_path / "r.json"))
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["load"] == {"start": [0.5, 0.4, 0.3], "end": [1.25, 0.6, 0.4]} and found["complete"] is True
    assert "load average 0.50 at the start, 1.25 at the end\n" in done.stdout

    def none() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", none)
    assert bench(*LAYER, "--json", str(tmp_path / "r.json")).exit_code == 0
    assert report.load(tmp_path / "r.json")["load"] == {"start": None, "end": None}


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupted(at: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a run that gets SIGINT once it has said that it is ``at`` something."""
    command = [sys.executable, "-c", TALKING, "bench", "--device", "cpu", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if at in line:
            break
    else:
        raise AssertionError("it never was")
    for pause in (0.005, 0.05, 0.0):  # of an impatient user
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
    out, error = process.communicate(timeout=300)
    assert "Traceback" not in error, error
    return process.returncode, out


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    file, picture = tmp_path / "r.json", tmp_path / "r.png"
    code, out = interrupted("2 of 21 done; ", "--suite", "cpu", "--json", str(file), "--plot", str(picture))
    found = report.load(file)
    assert code == 130 and found["complete"] is False and 2 <= len(found["rows"]) < 21
    assert [row["case"] for row in found["rows"]] == [c.name for c in suites.SUITES["cpu"]][: len(found["rows"])]
    assert all(row["ours_ms"] and row["percent_of_roof"] for row in found["rows"])
    assert "incomplete: the run was interrupted" in out and f"written: {file}" in out and f"drawn: {picture}" in out
    assert all(row["case"] in out for row in found["rows"]) and picture.stat().st_size > 10_000
    again = CliRunner().invoke(app, ["bench", "--from", str(file)])
    assert again.exit_code == 0 and "incomplete" in again.stdout


def test_ctrl_c_among_whole_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = training.row, [0]

    def row(*given: Any) -> dict[str, Any]:
        count[0] += 1
        if count[0] == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(training, "row", row)
    monkeypatch.setattr(training, "REPEATS", timing.Repeats(0.0, 2, 2))
    file = tmp_path / "r.json"
    done = bench("--suite", "training", "--case", "vae", "--json", str(file))
    found = report.load(file)
    assert done.exit_code == 130 and found["complete"] is False and len(found["rows"]) == 1
    assert "incomplete: the run was interrupted" in done.stdout and f"written: {file}" in done.stdout


# --- without a terminal ----------------------------------------------------------------------------------------------


def test_nothing_is_cut_in_a_pipe(fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor filled with spaces, whatever COLUMNS says, which some shells export; a terminal has its own width."""
    settings = {**os.environ, "COLUMNS": "40"}
    layer = ["64,64,(3,7),stride=2,padding=1", "--input", "8x64x512x512", "--gpu", "H200"]
    done = CliRunner(env=settings).invoke(app, ["explain", *layer])
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) > 150 and "…" not in done.stdout
    assert sum(line.startswith(("roof ", "plan ", "model ", "launch ")) for line in lines) == 4
    candidates = [line for line in lines if re.match(r" +[·✓] ", line)]
    assert len(candidates) == len(FAMILIES) + 1  # a line for each, unbroken
    found = CliRunner(env=settings).invoke(app, ["bench", *LAYER, "--device", "cpu"])
    assert "4->6 k3 s2 p1 on 2x4x5x6" in found.stdout and "spread" in found.stdout
    assert all(line == line.rstrip() for text in (done.stdout, found.stdout) for line in text.splitlines())
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes stdout for a terminal
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert arguments.console().width == 90


# --- programs of benchmarks/ -----------------------------------------------------------------------------------------


def test_the_commands_of_a_gpus_reports_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import calls
    import h200

    asked: list[Any] = []
    monkeypatch.setattr("upconv.cli.bench.run", lambda options, given: asked.append(options) or 0)
    for name, (_, *words) in h200.COMMANDS.items():
        if words[:3] == ["-m", "upconv", "bench"]:
            assert CliRunner().invoke(app, [*words[2:], "--json", "r.json"]).exit_code == 0, name
        else:
            assert Path(words[0]).exists() and words[1] == name in calls.KINDS
    assert len(asked) == len(h200.SWEEPS) + 2


def test_the_hosts_time_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import calls

    monkeypatch.setattr(calls, "CALLS", 2)
    rows = list(calls.host(CPU, timing.Repeats(0.0, 2, 2)))
    assert [(row["dtype"], row["mode"]) for row in rows][::2] == [("float32", "no_grad"), ("bfloat16", "no_grad")]
    assert all(row["ours_us"] > 0 and row["torch_us"] > 0 for row in rows)
