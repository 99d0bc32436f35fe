"""What tests of the bench and of the command line share: quick runs, known ceilings, forced plans, commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

from conftest import forced_plans
from upconv.bench import roofline, timing
from upconv.cli import app
from upconv.problem import Problem

CPU = torch.device("cpu")
SHORT = timing.Repeats(0.0, 3, 3)
TINY = Problem.make(2, 4, 6, (5, 6), (3, 2), (2, 1), (1, 0), (1, 0), groups=2, bias=True)
LAYER = ["--layer", "4,6,3,stride=2,padding=1", "--input", "2x4x5x6"]


def command(*arguments: str, input: str | None = None) -> tuple[int, str]:
    """The exit code of a command line, and what it says: on stdout, else on stderr."""
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, list(arguments), input=input)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout or done.stderr


def ceilings(copy: float = 1e10, flops: float = 1e11, kinds: tuple[str, ...] = ("ieee",)) -> roofline.Ceilings:
    return roofline.Ceilings(copy_bytes_per_s=copy, matmul_flops_per_s=dict.fromkeys(kinds, flops))


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds a row, and ceilings that need no measuring."""
    for name in ("QUICK", "FULL"):
        monkeypatch.setattr(f"upconv.cli.bench.{name}", SHORT)
    monkeypatch.setattr(roofline, "measure", lambda kinds, device, seconds=0.0: ceilings(kinds=tuple(kinds)))


@pytest.fixture
def shuffled() -> Iterator[None]:
    """Forwards are by the engine's plan `shuffle`, of the bench and of the calls that it makes."""
    with forced_plans("shuffle"):
        yield
