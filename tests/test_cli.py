"""The command line: exit codes, one sentence for a bad argument, and numbers that are those of the library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import upconv
from measured import LAYER, command
from upconv import cpu
from upconv.bench.suites import parse_layer

# --- bench -----------------------------------------------------------------------------------------------------------


def test_a_run_is_a_table_a_report_and_a_plot(fast: None, shuffled: None, tmp_path: Path) -> None:
    file, picture = tmp_path / "r.json", tmp_path / "r.svg"
    code, out = command(
        "bench", *LAYER, "--device", "cpu", "--dtype", "all", "--pass", "fwd", "--pass", "grad-weight",
        "--json", str(file), "--plot", str(picture),
    )  # fmt: skip
    assert code == 0, out
    found = json.loads(file.read_text())
    keys = {"schema", "kind", "when", "commit", "device", "versions", "load", "complete", "ceilings", "rows"}
    assert set(found) == keys and found["schema"] == 1
    assert found["device"]["type"] == "cpu" and found["device"]["threads"] == torch.get_num_threads()
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["upconv"] == upconv.__version__
    assert found["ceilings"] == {
        "copy_bytes_per_s": 1e10,
        "matmul_flops_per_s": {"ieee": 1e11, "bf16": 1e11, "fp16": 1e11, "fp64": 1e11},
    }
    rows = found["rows"]
    assert len(rows) == 8
    assert {(row["dtype"], row["precision"]) for row in rows} == {
        ("float32", "ieee"), ("bfloat16", "bf16"), ("float16", "fp16"), ("float64", "fp64"),
    }  # fmt: skip
    p = parse_layer(LAYER[1], LAYER[3])
    for row in rows:
        ours = row["pass"] == "fwd"
        assert row["engine"] == ("cpu:shuffle" if ours else "torch") and row["suite"] == row["case"] == "custom"
        assert row["ratio"] == (pytest.approx(row["torch_ms"] / row["ours_ms"]) if ours else 1.0)
        item = p.with_(dtype=getattr(torch, row["dtype"]), precision=row["precision"], pass_=row["pass"])
        assert row["roof_ms"] == pytest.approx(1e3 * item.roof_seconds(1e11, 1e10))
    assert "geometric mean over 4 rows that" in out
    assert re.search(r"x over \d+ rows, 4 of PyTorch's own operator counted as 1: custom", out)
    assert "<svg" in picture.read_text()

    code, again = command("bench", "--from", str(file))
    assert code == 0 and again == out.split("written: ")[0]


@pytest.mark.parametrize("engine", ["zeros", "rounded"])
def test_a_wrong_engine_prints_no_speed_and_exits_with_1(
    fast: None, shuffled: None, monkeypatch, tmp_path: Path, engine
) -> None:

    def wrong(p, plan, input, weight, bias):
        out = torch.conv_transpose2d(input, weight, bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
        return torch.zeros_like(out) if engine == "zeros" else out.bfloat16().float()

    monkeypatch.setattr(cpu, "forward", wrong)
    file = tmp_path / "r.json"
    code, out = command("bench", *LAYER, "--device", "cpu", "--json", str(file))
    row = json.loads(file.read_text())["rows"][0]
    assert code == 1 and row["ours_ms"] is None and row["ratio"] is None
    assert row["rel_error"] == (pytest.approx(1.0) if engine == "zeros" else pytest.approx(1.6e-3, rel=0.5))
    line = next(line for line in out.splitlines() if "cpu:shuffle" in line)
    assert "wrong" in line and "x " not in line.split("wrong")[1]
    assert "custom: wrong result: relative error " in out and "PyTorch's speed" not in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("bench --device gpu", "--device must be cpu, or a CUDA device of this machine like cuda:0; got 'gpu'"),
        pytest.param(
            "bench --device cuda",
            "--device must be cpu, or a CUDA device of this machine like cuda:0; got 'cuda'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        (
            "bench --device cpu --precision tf32",
            "--precision must be one of ieee, bf16, fp16 and fp64 on a CPU; got 'tf32'",
        ),
        ("bench --dtype bfloat16 --precision ieee", "--precision must be one of bf16 for bfloat16; got 'ieee'"),
        ("bench --suite founding --case kb58", "--case must be one of kb71, kb65, kb75, kb69, kb57; got 'kb58'"),
        ("bench --suite training --suite cpu", "--suite training is a run of its own; got training and cpu"),
        ("bench --suite training --plot r.png", "--plot does not go with --suite training"),
        ("bench --suite kernelbench --as-exported --frozen", "--frozen does not go with --as-exported"),
        ("bench --from r.json --dtype float32", "--dtype does not go with --from"),
        ("bench --compiled", "--compiled and --eager go with --suite training alone"),
        ("bench --frozen --pass step", "--frozen goes with --pass fwd alone"),
        (
            "bench --as-exported --suite cuda",
            "--as-exported goes with --suite kernelbench alone, at full sizes on a CUDA GPU",
        ),
        ("bench --suite training --case pix", "--case must be one of dcgan, unet, vae, hifigan; got 'pix'"),
        ("bench --layer 4,4,3", "--layer and --input go together; got '4,4,3' and None"),
        ("bench --suite cpu --layer 4,4,3 --input 1x4x8", "--layer goes without --suite; got cpu"),
        (
            "bench --layer 4,4,3 --input 1x4x8 --layout channels_last",
            "--layout must be nchw for 1-D layers, which have no channels_last; got 'channels_last'",
        ),
        ("bench --json nowhere/r.json", "--json cannot be written: No such file or directory; got 'nowhere/r.json'"),
        ("bench --plot r.pdf", "--plot must end in .png or .svg; got 'r.pdf'"),
        ("bench --from r.json", "r.json cannot be read: No such file or directory"),
    ],
)
def test_a_bad_argument_is_one_sentence_and_exit_code_2(
    arguments: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(*arguments.split()) == (2, f"upconv: {sentence}\n")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "upconv", "--version"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"upconv {upconv.__version__}\n", "")
