"""Small scripts from public reports, a line a case: PyTorch's layers beside ours (tests/cases)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).resolve().parent / "cases"
NAMES = re.findall(r"@case\ndef (\w+)", (CASES / "cpu.py").read_text(encoding="utf-8"))


def lines(script: str, *names: str, timeout: float = 300) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CASES / script), *names], capture_output=True, text=True, timeout=timeout
    )
    found = [line for line in done.stdout.splitlines() if " OK" in line or " FAIL" in line]
    assert found, done.stderr[-2000:]
    return found


@pytest.mark.slow
def test_cases_on_a_cpu() -> None:
    found = {line.split()[0]: line for line in lines("cpu.py")}
    assert set(found) == set(NAMES)
    assert not [line for line in found.values() if line.split()[1] != "OK"]


@pytest.mark.gpu
def test_cases_on_a_gpu() -> None:
    found = lines("gpu.py")
    assert len(found) == 5 and not [line for line in found if " OK " not in line]
