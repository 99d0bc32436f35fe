"""The program that has compute-sanitizer look at the kernels: what it changes in their sources, runs and tells."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from upconv.cuda.compile import jit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import racecheck


@pytest.mark.parametrize("name", list(racecheck.EVERY_LANE))
def test_every_arrival_of_one_lane_is_made_by_all(name: str) -> None:
    text = jit.instance(name, {}, [])  # with its includes
    changed = racecheck.every_lane(name, text)
    by_one = r"(lane|threadIdx\.x & 31\)) == 0[^;{]*\) (barrier_arrive|release)\("
    assert re.search(by_one, text) and not re.search(by_one, changed)
    for arrival in ("barrier_arrive(", "release("):
        assert changed.count(arrival) == text.count(arrival)
    with pytest.raises(ValueError, match="must have"):
        racecheck.every_lane(name, changed)


# --- the tools -------------------------------------------------------------------------------------------------------


RAN = "========= COMPUTE-SANITIZER\nran boxes\n"
NO_HAZARD = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
HAZARD = """========= Error: Race reported between Write access at gather+0x1a0
=========     and Read Thread (32,0,0) in block (0,0,0) at gather+0x2b0
=========     Write Thread (0,0,0) in block (0,0,0) at gather+0x1a0
=========     Write Thread (1,0,0) in block (0,0,0) at gather+0x1a0
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INVALID = """========= Invalid __global__ write of size 4 bytes
=========     at gather+0x490
=========     by thread (1,0,0) in block (0,0,0)
=========     Access at 0x7f71b9e01360 is out of bounds
========= Invalid __shared__ read of size 16 bytes
=========     at pack(const float *, float *, int)+0x60
=========     by thread (2,0,0) in block (0,0,0)
========= ERROR SUMMARY: 2 errors
"""


@pytest.mark.parametrize(
    ("tool", "code", "said", "right", "line"),
    (
        ("racecheck", 0, RAN + NO_HAZARD, True, "0 hazards displayed (0 errors, 0 warnings)"),
        (
            "racecheck", 0, RAN + HAZARD, False,
            "1 hazard displayed (1 error, 0 warnings) gather+0x1a0, gather+0x2b0",
        ),
        (
            "racecheck", 1, "Traceback:\nRuntimeError: no\n" + NO_HAZARD, False,
            "did not run (exit code 1): Traceback: | RuntimeError: no ['0 hazards displayed (0 errors, 0 warnings)']",
        ),
        ("racecheck", 0, "ran boxes-too\n" + NO_HAZARD, False, None),
        ("racecheck", 0, RAN, False, "did not run (exit code 0): ran boxes []"),
        ("racecheck", 0, RAN + 2 * NO_HAZARD, False, None),
        ("memcheck", 0, RAN + "========= ERROR SUMMARY: 0 errors\n", True, "0 errors"),
        (
            "memcheck", 0, RAN + INVALID, False,
            "2 errors __global__ write at gather+0x490, __shared__ read at pack+0x60",
        ),
        ("memcheck", 1, "========= ERROR SUMMARY: 1 error\n", False, "1 error"),
        ("memcheck", 1, "========= ERROR SUMMARY: 0 errors\n", False, "did not run (exit code 1):  ['0 errors']"),
    ),
)  # fmt: skip
def test_verdicts(tool: str, code: int, said: str, right: bool, line: str | None) -> None:
    found = racecheck.verdict("boxes", tool, code, said)
    name = f"{'boxes':{racecheck.WIDTH}} "
    assert found[0] is right and found[1].startswith(name) and "\n" not in found[1]
    if line is not None:
        assert found[1] == name + line


SANITIZER = """#!{python}
import os, pathlib, sys, time
tool, name = sys.argv[2], sys.argv[sys.argv.index("--run") - 1]
log = pathlib.Path({folder!r})
(log / name).write_text(os.environ["UPCONV_CACHE_DIR"])
while {together} and name == "sweep" and not (log / "pairs").exists():  # the first case waits for the fourth
    time.sleep(0.05)
assert os.path.isdir(os.environ["UPCONV_CACHE_DIR"])
assert (os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1") == (tool == "memcheck")
print("ran", name)
if tool == "memcheck":
    print("========= ERROR SUMMARY:", "3 errors" if name == "boxes" else "0 errors")
else:
    print("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
"""
