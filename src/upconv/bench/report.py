"""The report of a run: JSON as it is kept, and the table in a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

import torch
from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from upconv import env
from upconv.bench import files
from upconv.bench.roofline import Ceilings
from upconv.bench.run import Row

SCHEMA = 1
WIDE = 110
"""Columns of a terminal from which on the table spells each layer and the quartiles out."""


class Load(TypedDict):
    """The load averages of `env.load_average` when a run began and when it ended."""

    start: list[float] | None
    end: list[float] | None


class Head(TypedDict):
    """What reports of every kind begin with."""

    schema: int
    when: str
    """UTC, ISO 8601."""
    commit: str | None
    device: dict[str, env.Value]
    versions: dict[str, env.Value]
    load: Load
    complete: bool
    """Whether the run reached its end; Ctrl-C ends it early."""


class Report(Head):
    """A run as JSON holds it."""

    ceilings: Ceilings
    rows: list[Row]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a run, with the report of what was measured by then."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


_Row = TypeVar("_Row")


def gather(rows: Iterable[_Row]) -> tuple[list[_Row], bool]:
    """All rows as they are measured, up to Ctrl-C; whether it were all."""
    found: list[_Row] = []
    try:
        found.extend(rows)
    except KeyboardInterrupt:
        return found, False
    return found, True


def head(device: torch.device, begun: list[float] | None, *, complete: bool = True) -> Head:
    """What a report begins with. ``begun``: `env.load_average` as it was ahead of the first row."""
    return Head(
        schema=SCHEMA,
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=env.commit(),
        device=env.device(device),
        versions=env.versions(),
        load=Load(start=begun, end=env.load_average()),
        complete=complete,
    )


def build(
    rows: Sequence[Row],
    ceilings: Ceilings,
    device: torch.device,
    *,
    begun: list[float] | None = None,
    complete: bool = True,
) -> Report:
    """The report of rows measured now, here; see `head`."""
    return {**head(device, begun, complete=complete), "ceilings": ceilings, "rows": list(rows)}


def load(path: str | Path) -> Report:
    """Reads a report.

    Raises:
        ValueError: the file is missing, is no JSON, or holds no report of this schema; in one sentence.
    """
    found = files.read(path)
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path} must be a report of schema {SCHEMA}, got {schema!r}")
    complete_head(found)
    missing = (Report.__required_keys__ - set(found)) or {
        f"rows[].{key}" for row in found["rows"] for key in Row.__required_keys__ - _OPTIONAL - set(row)
    }
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    for row in found["rows"]:
        for key in _OPTIONAL - set(row):
            row[key] = _ABSENT.get(key)
    loaded: Report = found
    return loaded


def complete_head(found: dict[str, Any]) -> None:
    """Fills in what older reports lack: they tell no load, and were written at their end alone."""
    found.setdefault("load", Load(start=None, end=None))
    found.setdefault("complete", True)


# Keys beyond the schema's, which a report by another tool may lack.
_ABSENT: dict[str, object] = {
    "layer": "", "scale": 1.0, "rounds": 0, "flops": 0, "bytes": 0, "inputs": "normal", "wall_s": 0.0,
}  # fmt: skip
_OPTIONAL = {
    *_ABSENT, "failure", "warning", "ours_peak_bytes", "torch_peak_bytes", "tolerance_used", "ours_lower_ms",
    "ours_upper_ms", "torch_lower_ms", "torch_upper_ms", "frozen_ms", "frozen_lower_ms", "frozen_upper_ms",
    "frozen_ratio",
}  # fmt: skip


# --- numbers ---------------------------------------------------------------------------------------------------------


def si(value: float, unit: str) -> str:
    """``1.23 GFLOP/s``: three digits and the prefix of the power of 1000."""
    for prefix, power in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= power:
            return f"{value / power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _scale(value: float) -> str:
    return "1" if value == 1 else f"1/{1 / value:.0f}"


def wrong(rows: Iterable[Row]) -> list[Row]:
    """The rows without a speed: a wrong result, or a case that could not run."""
    return [row for row in rows if row["ours_ms"] is None]


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean that suits ratios; 1 for none."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


class Summary(TypedDict):
    """A run in numbers: ratios are PyTorch's time over ours."""

    ours: int
    mean_of_ours: float
    delegated: list[str]
    mean_of_all: float
    lowest: Row | None
    frozen: float | None
    """The mean of our rows with frozen weights; None where these were not measured."""
    wrong: int


def summarise(rows: Sequence[Row]) -> Summary:
    """Geometric means over the rows that our engine computes, and over all right rows with delegated ones at 1."""
    timed = [row for row in rows if row["ratio"] is not None]
    ours = [row for row in timed if row["engine"] != "torch"]
    frozen = [row["frozen_ratio"] for row in ours if row["frozen_ratio"] is not None]
    return Summary(
        ours=len(ours),
        mean_of_ours=geometric_mean([row["ratio"] or 1.0 for row in ours]),
        delegated=[row["case"] for row in timed if row["engine"] == "torch"],
        mean_of_all=geometric_mean([row["ratio"] or 1.0 for row in timed]),
        lowest=min(ours, key=lambda row: row["ratio"] or 1.0, default=None),
        frozen=geometric_mean(frozen) if frozen else None,
        wrong=len(wrong(rows)),
    )


class Measured(Protocol):
    """A report of any kind: where, with what and when it was measured."""

    def __getitem__(self, key: str, /) -> Any: ...


def conditions(report: Measured) -> str:
    """Where and with what a report was measured, in a line."""
    device, versions = report["device"], report["versions"]
    parts = [str(device.get("name"))]
    if device.get("type") == "cpu":
        parts.append(f"{device.get('threads')} threads, {device.get('capability')}")
    parts += [f"upconv {versions.get('upconv')}", f"PyTorch {versions.get('torch')}"]
    for key, name in (("cudnn", "cuDNN"), ("onednn", "oneDNN")):
        if versions.get(key) and (key == "cudnn") == (device.get("type") == "cuda"):
            parts.append(f"{name} {versions[key]}")
    return " · ".join([*parts, report["when"][:10]])


def ceiling_text(ceilings: Ceilings) -> str:
    rates = [f"matmul {name} {si(rate, 'FLOP/s')}" for name, rate in ceilings["matmul_flops_per_s"].items()]
    return " · ".join([f"copy {si(ceilings['copy_bytes_per_s'], 'B/s')}", *rates])


# What a run may sweep; a column where it does, a word in the title where it does not.
SWEPT: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("suite", lambda row: row["suite"]),
    ("dtype", lambda row: row["dtype"] if row["precision"] != "tf32" else "float32 as TF32"),
    ("layout", lambda row: row["layout"]),
    ("pass", lambda row: row["pass"]),
)


def swept(rows: Sequence[Row]) -> tuple[list[str], list[tuple[str, Callable[[Row], str]]]]:
    """The words that hold for all rows, and the columns for what differs among them."""
    constant = [text(rows[0]) for _, text in SWEPT if len({text(row) for row in rows}) == 1] if rows else []
    return constant, [(name, text) for name, text in SWEPT if len({text(row) for row in rows}) > 1]


# --- the terminal ----------------------------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Prints the table, its conditions and the summary."""
    rows = report["rows"]
    constant, columns = swept(rows)
    console.print(Text(" · ".join(["upconv bench", *constant]), style="bold"))
    show_conditions(report, console)
    console.print(table(rows, columns, wide=console.width >= WIDE))
    for line in summary_lines(summarise(rows)):
        console.print(line)
    for row in wrong(rows):
        console.print(Text(f"{row['case']}: {row.get('failure') or 'no result'}", style="red"))
    for row in rows:
        if row["warning"]:
            console.print(Text(f"{row['case']}: {row['warning']}", style="yellow"))
    if report["ceilings"]["matmul_flops_per_s"]:
        console.print(Text(f"roof: {ceiling_text(report['ceilings'])}", style="dim"))


def show_conditions(found: Measured, console: Console) -> None:
    """Where a report of any kind was measured, under which load, and whether it is whole."""
    console.print(Text(conditions(found), style="dim"))
    start, end = found["load"]["start"], found["load"]["end"]
    if start and end:
        cores = found["device"].get("cores")
        on = f", on {cores} cores" if cores else ""
        console.print(Text(f"load average {start[0]:.2f} at the start, {end[0]:.2f} at the end{on}", style="dim"))
    if not found["complete"]:
        console.print(Text("incomplete: the run was interrupted", style="yellow"))


def summary_lines(summary: Summary) -> list[Text]:
    """Geometric means in sentences."""
    lines = []
    if summary["ours"]:
        lowest = summary["lowest"]
        text = Text.assemble(
            (f"{summary['mean_of_ours']:.2f}x", "bold"),
            f" PyTorch's speed, geometric mean over the {summary['ours']} rows that upconv's engine computes",
        )
        if lowest is not None:
            text.append(f"; lowest {lowest['case']} {lowest['ratio']:.2f}x")
        lines.append(text)
    if summary["frozen"] is not None:
        lines.append(Text(f"{summary['frozen']:.2f}x of the same rows with upconv.freeze, which keeps packed weights"))
    if summary["delegated"]:
        names = ", ".join(dict.fromkeys(summary["delegated"]))
        count = len(summary["delegated"])
        all_of_them = f"{summary['mean_of_all']:.2f}x with the {count} rows left to PyTorch's own operator at 1"
        lines.append(Text(f"{all_of_them}: {names}"))
    return lines


Column = tuple[str, Callable[[Row], "str | Text"]]
"""A column's head, and its cell for a row."""


def table(rows: Sequence[Row], swept: Sequence[tuple[str, Callable[[Row], str]]], *, wide: bool) -> Table:
    """The rows as a table.

    Args:
        rows: of a report.
        swept: columns beside the fixed ones.
        wide: spell each layer and the quartiles of its times out; else only how far the quartiles are apart, without
            lines between columns, so that 80 of a terminal do.
    """
    grid = Table(header_style="bold", pad_edge=False, box=HEAVY_HEAD if wide else None, collapse_padding=not wide)
    grid.add_column("case", no_wrap=True)
    if wide:
        grid.add_column("layer and input", style="dim", overflow="fold")
    for name, _ in swept:
        grid.add_column(name, no_wrap=True)
    columns = _columns(rows, wide)
    for name, _ in columns:
        grid.add_column(name, justify="left" if name == "engine" else "right", no_wrap=True)
    for row in rows:
        fixed = [row["case"], *([row["layer"]] if wide else []), *(text(row) for _, text in swept)]
        grid.add_row(*fixed, *(cell(row) for _, cell in columns))
    return grid


def _columns(rows: Sequence[Row], wide: bool) -> list[Column]:
    """The columns of numbers that these rows have something for."""

    def any_of(key: str) -> bool:
        return any(row[key] is not None for row in rows)  # type: ignore[literal-required]

    found: list[Column] = (
        [("scale", lambda row: _scale(row["scale"]))] if any(row["scale"] != 1 for row in rows) else []
    )
    found += [("upconv ms", _ours), *_quartiles(rows, "ours", wide), ("PyTorch ms", lambda row: _ms(row["torch_ms"]))]
    found += _quartiles(rows, "torch", wide)
    if not wide and any_of("torch_upper_ms"):
        found.append(("spread", _spread))
    found += [("speed-up", _ratio), ("of roof", _share)]
    if any_of("frozen_ms"):
        found += [("frozen ms", lambda row: _ms(row["frozen_ms"])), *_quartiles(rows, "frozen", wide)]
        found.append(("frozen", lambda row: "" if row["frozen_ratio"] is None else f"{row['frozen_ratio']:.2f}x"))
    if any_of("ours_peak_bytes"):
        found.append(("peak MB", lambda row: _megabytes(row["ours_peak_bytes"])))
        found.append(("PyTorch's", lambda row: _megabytes(row["torch_peak_bytes"])))
    found.append(("error", lambda row: _error(row["rel_error"])))
    if any_of("tolerance_used"):
        found.append(("PyTorch's", lambda row: _error(row["torch_rel_error"])))
        found.append(("of tolerance", lambda row: _error(row["tolerance_used"])))
    found.append(("engine", lambda row: Text(row["engine"], style="dim" if row["engine"] == "torch" else "")))
    return found


def _quartiles(rows: Sequence[Row], side: str, wide: bool) -> list[Column]:
    """The lower and the upper quartile of a side's times, in a wide table of a report that has them."""

    def text(row: Row) -> str:
        lower, upper = (row[f"{side}_{which}_ms"] for which in ("lower", "upper"))  # type: ignore[literal-required]
        return "" if lower is None else f"{_ms(lower)}-{_ms(upper)}"

    return [("quartiles", text)] if wide and any(map(text, rows)) else []


def _spread(row: Row) -> str:
    """How far the quartiles are apart in percent of the median, of the side where that is more."""
    shares = [
        (row[f"{side}_upper_ms"] - row[f"{side}_lower_ms"]) / row[f"{side}_ms"]  # type: ignore[literal-required]
        for side in ("ours", "torch", "frozen")
        if row[f"{side}_upper_ms"] is not None  # type: ignore[literal-required]
    ]
    return f"{max(shares):.0%}" if shares else ""


def _ours(row: Row) -> str | Text:
    if row["ours_ms"] is None:
        return Text("wrong" if row["rel_error"] is not None else "failed", style="bold red")
    return _ms(row["ours_ms"])


def _share(row: Row) -> str:
    return "" if row["ours_ms"] is None else f"{row['percent_of_roof'] or 0:.0f}%"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f}"


def _ratio(row: Row) -> Text:
    if row["ratio"] is None:
        return Text("")
    if row["engine"] == "torch":
        return Text("torch", style="dim")
    # 5% is what the medians of two equal implementations differ by on a shared machine.
    ratio = row["ratio"]
    return Text(f"{ratio:.2f}x", style="green" if ratio > 1.05 else "yellow" if ratio >= 0.95 else "red")
