"""Which targets reports meet: benchmarks/targets.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TF32 = {
    "kb57": 2.3, "kb65": 1.8, "kb69": 1.5, "kb71": 3.5, "kb75": 14, "kb78": 3, "kb81": 4, "dcgan1": 1.5, "dcgan2": 1.5,
    "dcgan3": 1.5, "dcganO": 3, "unet1": 1.5, "unet4": 3, "pix": 1.4, "vae": 1.6, "fsrcnn": 3, "depthw": 8, "fcn8s": 40,
    "hifigan": 1.3,
}  # fmt: skip


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The program, with an empty folder of results."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import targets

    monkeypatch.setattr(targets, "RESULTS", tmp_path)
    return targets


def rows(ratios: dict[str, float], error: float = 1e-4) -> list[dict[str, Any]]:
    return [{"case": case, "ratio": r, "rel_error": error, "torch_rel_error": 1e-4} for case, r in ratios.items()]


def test_targets_are_those_of_the_issue(targets) -> None:
    found = targets.groups("h200-tf32", [])
    assert found[0].targets == TF32 and found[0].mean_target == 3.3
    assert set(found[1].targets.values()) == {2.5} and set(found[2].targets.values()) == {4}
    assert [len(group.targets) for group in found] == [19, 3, 9]
    for name, error in (("ieee", 2), ("fp16", 1.1), ("bf16", 1.1)):
        every = targets.groups(f"h200-{name}", [])
        assert [len(group.targets) for group in every] == [19, 3, 9]
        assert all(group.error_target == error for group in every)
    for name, error in (("tf32", None), ("bf16", 1.1), ("fp16", 1.1)):
        flat, of_3d = targets.groups(f"h200-cl-{name}", [])
        assert set(flat.targets) == set(TF32) - {"hifigan"} and set(of_3d.targets) == set(found[2].targets)
        assert flat.mean_target == 1.5 and flat.error_target == of_3d.error_target == error


def test_cases_miss_that_are_slow_wrong_or_not_there(targets) -> None:
    ratios: dict[str, Any] = {**TF32, "kb57": 2.29, "kb71": None, "fcn8s": 400.0}
    del ratios["pix"]
    group = targets.groups("h200-tf32", rows(ratios))[0]
    assert group.missed == ["kb57", "kb71", "pix"] and not group.met
    assert str(group).startswith("missed 2-D, float32 as TF32, NCHW: geometric mean ")
    assert str(group).endswith("x of 3.3x; missed: kb57, kb71, pix")


def test_a_group_is_met_when_all_of_it_is(targets) -> None:
    every = rows(dict.fromkeys(TF32, 1.5))
    assert targets.groups("h200-ieee", every)[0].met
    every[3]["rel_error"] = 2.1e-4
    assert targets.groups("h200-ieee", every)[0].missed == [every[3]["case"]], "less exact than is allowed"
    slow = targets.groups("h200-ieee", rows(dict.fromkeys(TF32, 1.2)))[0]
    assert not slow.missed and not slow.met, "the mean has a target too"


def test_training_is_judged_by_speed_and_memory(targets, tmp_path: Path) -> None:
    row = {"ratio": 1.1, "convolutions_ratio": 1.5, "ours_peak_bytes": 9, "torch_peak_bytes": 9,
           "convolutions_peak_bytes": 10}  # fmt: skip
    names = [f"{name} {dtype}" for name in ("dcgan", "unet", "vae", "hifigan") for dtype in ("fp32", "bf16")]
    found = [{**row, "case": name} for name in names]
    (tmp_path / "h200-training.json").write_text(json.dumps({"rows": found}))
    by_title = {group.title: group for group in targets.every()}
    assert by_title["Training steps, float32 (TF32 where PyTorch's defaults say so)"].met
    assert by_title["Training steps, bfloat16 autocast"].missed == ["dcgan bf16", "unet bf16"]
    both = by_title["Training steps, float32, plain convolutions too"]
    assert len(both.rows) == len(both.missed) == 4, "their peak is a byte above PyTorch's"


def test_the_command_names_each_group(targets, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "h200-tf32.json").write_text(json.dumps({"rows": rows(dict.fromkeys(TF32, 50.0))}))
    assert targets.main() == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "met    2-D, float32 as TF32, NCHW: geometric mean 50.00x of 3.3x"
    assert said[1] == "missed 1-D, float32 as TF32: not measured"
    assert len(said) == sum(map(len, json.loads(targets.TARGETS.read_text()).values()))
