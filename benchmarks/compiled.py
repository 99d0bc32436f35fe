"""Models by torch.compile, with upconv and without: each compiled in a process of its own, all timed in turn.

    python benchmarks/compiled.py                    writes results/compiled/h200-bf16.json
    python benchmarks/compiled.py --json FILE --seconds 5

Compilers take most of the time, and run beside each other. While a model is timed the others wait.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from upconv.bench import models, report, training
from upconv.bench.report import Row
from upconv.bench.timing import Repeats
from upconv.replay import native

RESULT = Path(__file__).resolve().parent / "results" / "compiled" / "h200-bf16.json"
SIDES: tuple[training.Side, ...] = ("torch", "compile", "compile_ours")
FAILING = ("dcgan bf16 channels_last",)
"""What PyTorch itself cannot compile."""


def runs() -> dict[str, training.Run]:
    """Every model in bfloat16 by name, as a step and as inference, in both layouts."""
    layouts = ("nchw", "channels_last")
    every = training.runs(models.cases(), autocast=(True,), layouts=layouts, modes=training.MODES)  # type: ignore[arg-type]
    return {run.name: run for run in every if run.name not in FAILING}


def measure(name: str, seconds: float, parent: Connection) -> None:
    """Sends a model's row. Ahead of its times it says that it is ready, and waits for an answer."""

    def ready() -> None:
        parent.send(None)
        parent.recv()

    torch.set_num_threads(1)
    native.wait()
    device = torch.device("cuda")
    repeats = Repeats(seconds, 10, 200)
    parent.send(training.row(runs()[name], device, repeats, SIDES, lambda what: None, ready))
    torch.cuda.synchronize(device)


def rows(seconds: float) -> Iterator[Row]:
    """All models' rows, printed."""
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    for name in runs():
        ends[name], other = context.Pipe()
        context.Process(target=measure, args=(name, seconds, other), daemon=True).start()
        other.close()  # so that a process that died is the end of its pipe
    told = {name: _told(end) for name, end in ends.items()}  # when all have, nothing is left to compile
    for name, end in ends.items():
        row = told[name]
        if row is None:
            with suppress(BrokenPipeError):  # of a process that died; what it told says so
                end.send(None)
            row = _told(end)
        assert row is not None
        print(f"{name:36s} {row.get('compile_ratio') or row['failure']}", flush=True)
        yield {"case": name, **row}


def _told(end: Connection) -> Row | None:
    """A row, or None from a process that is ready for its times."""
    try:
        found: Row | None = end.recv()
    except EOFError:
        return {"failure": "its process died", "ratio": None}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each side of a row")
    given = parser.parse_args()
    found = report.gather(rows(given.seconds), torch.device("cuda"), "training")
    report.save(found, given.json)
    return bool(report.wrong(found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
