"""Says which targets of targets.json the reports in benchmarks/results meet.

    python benchmarks/targets.py    a line for each group of cases; exit code 1 unless all targets are met

A target is PyTorch's time over ours: of each case, and of a group's geometric mean (``mean``). ``error`` is the most
that our error may be, as a multiple of PyTorch's. With ``peak`` our peak memory must not be above PyTorch's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upconv.bench import report

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
TARGETS = HERE / "targets.json"
CONVOLUTIONS = ", convolutions too"
"""Ends the name of a training case that was run with ``accelerate(convolutions=True)``."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """Cases that are judged together, with their rows as far as they were measured."""

    title: str
    targets: Mapping[str, float]
    """The least ratio of each case."""
    mean_target: float | None
    error_target: float | None
    peak: bool
    rows: Mapping[str, Row]

    @property
    def mean(self) -> float:
        """The geometric mean over the rows that have a ratio."""
        return report.geometric_mean([row["ratio"] for row in self.rows.values() if row["ratio"] is not None])

    @property
    def missed(self) -> list[str]:
        """The cases that were not measured, failed, are slower than their target, less exact or take more memory."""
        return [case for case in self.targets if not self._met(case)]

    def _met(self, case: str) -> bool:
        row = self.rows.get(case)
        if row is None or row["ratio"] is None or row["ratio"] < self.targets[case]:
            return False
        if self.peak and (row["ours_peak_bytes"] or 0) > (row["torch_peak_bytes"] or 0):
            return False
        if self.error_target is None:
            return True
        ours, theirs = row["rel_error"], row["torch_rel_error"]
        return ours is not None and theirs is not None and bool(ours <= self.error_target * theirs)

    @property
    def met(self) -> bool:
        """Whether every case meets its target, and the mean its own."""
        return not self.missed and (self.mean_target is None or self.mean >= self.mean_target)

    def __str__(self) -> str:
        wanted = "" if self.mean_target is None else f" of {self.mean_target:g}x"
        missed = f"; missed: {', '.join(self.missed)}" if self.missed else ""
        text = f"geometric mean {self.mean:.2f}x{wanted}{missed}" if self.rows else "not measured"
        return f"{'met   ' if self.met else 'missed'} {self.title}: {text}"


def groups(name: str, rows: Sequence[Row]) -> list[Group]:
    """The groups of a report's targets, each with its rows. ``name``: the report's stem, like ``h200-tf32``."""
    by_case = {row["case"]: row for row in rows}
    found = []
    for given in json.loads(TARGETS.read_text(encoding="utf-8"))[name]:
        mine = {case: by_case[case] for case in given["cases"] if case in by_case}
        peak = given.get("peak", False)
        found.append(Group(given["title"], given["cases"], given.get("mean"), given.get("error"), peak, mine))
    return found


def rows_of(path: Path) -> list[Row]:
    """A report's rows; a training step with plain convolutions is a row of its own. None where there is no report."""
    if not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    with_convolutions = [
        {
            **row,
            "case": f"{row['case']}{CONVOLUTIONS}",
            "ratio": row["convolutions_ratio"],
            "ours_peak_bytes": row["convolutions_peak_bytes"],
        }
        for row in rows
        if row.get("convolutions_ratio") is not None
    ]
    return [*rows, *with_convolutions]


def every() -> Iterator[Group]:
    """All groups of all targets."""
    for name in json.loads(TARGETS.read_text(encoding="utf-8")):
        yield from groups(name, rows_of(RESULTS / f"{name}.json"))


def main() -> int:
    found = list(every())
    for group in found:
        print(group)
    return int(not all(group.met for group in found))


if __name__ == "__main__":
    sys.exit(main())
