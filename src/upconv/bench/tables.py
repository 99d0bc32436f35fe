"""Reports in a terminal: a title, where they were measured, a table and what is to be said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from upconv.bench.report import Report, Row, geometric_mean

WIDE = 110
"""Columns of a terminal from which on the table of layers spells each layer out."""


class Column(NamedTuple):
    """A column of a table; a table of rows that have nothing there has no such column."""

    head: str
    text: Callable[[Row], str | Text]
    words: bool = False
    """Not numbers, which are aligned at the right."""


# --- cells -----------------------------------------------------------------------------------------------------------


def si(value: float, unit: str) -> str:
    """``1.23 GFLOP/s``: three digits and the prefix of the power of 1000."""
    for prefix, power in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= power:
            return f"{value / power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def times(ratio: float) -> str:
    """``1.25x``; with a third digit where two would hide that a ratio is below 1."""
    return f"{ratio:.3f}x" if 0.995 <= ratio < 1 else f"{ratio:.2f}x"


def _value(head: str, key: str, form: str = ".3g", unit: float = 1.0) -> Column:
    return Column(head, lambda row: "" if row.get(key) is None else f"{row[key] / unit:{form}}")


def _ms(head: str, key: str) -> Column:
    def text(row: Row) -> str:
        ms = row.get(key)
        return "" if ms is None else f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"

    return Column(head, text)


def _times(head: str, key: str) -> Column:
    return Column(head, lambda row: "" if row.get(key) is None else times(row[key]))


def _word(key: str) -> Column:
    return Column(key, lambda row: str(row.get(key) or ""), words=True)


def _spread(row: Row) -> str:
    """How far the quartiles are apart in percent of the median, of the side where that is more."""
    sides = [side for side in ("ours", "torch", "frozen") if row.get(f"{side}_upper_ms") is not None]
    shares = [(row[f"{side}_upper_ms"] - row[f"{side}_lower_ms"]) / row[f"{side}_ms"] for side in sides]
    return f"{max(shares):.0%}" if shares else ""


def _ratio(row: Row) -> Text:
    if row["ratio"] is None:
        failure = row["failure"] or ""
        return Text("wrong" if failure.startswith("wrong") else "failed" if failure else "", style="bold red")
    if row.get("engine") == "torch":
        return Text("torch", style="dim")
    # 5% is what the medians of two equal implementations differ by on a shared machine.
    ratio = row["ratio"]
    return Text(times(ratio), style="green" if ratio > 1.05 else "yellow" if ratio >= 0.95 else "red")


# --- columns by kind -------------------------------------------------------------------------------------------------

SWEPT = (
    _word("suite"),
    Column("dtype", lambda row: row["dtype"] if row["precision"] != "tf32" else "float32 as TF32", words=True),
    _word("layout"),
    _word("pass"),
)
"""What a run of layers may sweep: a column where it does, a word in the title where it does not."""
_LAYER = _word("layer")
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "layers": (
        _word("case"),
        _LAYER,
        *SWEPT,
        _ms("upconv ms", "ours_ms"),
        _ms("PyTorch ms", "torch_ms"),
        Column("spread", _spread),
        Column("ratio", _ratio),
        _value("of roof", "percent_of_roof", ".0%", 100),
        _ms("frozen ms", "frozen_ms"),
        _times("frozen", "frozen_ratio"),
        _value("error", "rel_error", ".0e"),
        _value("of tolerance", "tolerance_used", ".0e"),
        _word("engine"),
    ),
    "training": (
        _word("case"),
        _ms("PyTorch ms", "torch_ms"),
        _ms("torch.compile ms", "compile_ms"),
        _ms("upconv ms", "ours_ms"),
        Column("ratio", _ratio),
        _ms("convolutions too ms", "convolutions_ms"),
        _times("ratio, convolutions too", "convolutions_ratio"),
        _ms("torch.compile, with upconv ms", "compile_ours_ms"),
        _times("ratio, compiled", "compile_ratio"),
        _value("PyTorch peak MB", "torch_peak_bytes", ".0f", 1e6),
        _value("upconv peak MB", "ours_peak_bytes", ".0f", 1e6),
        _value("convolutions too peak MB", "convolutions_peak_bytes", ".0f", 1e6),
    ),
    "exported": (
        _word("case"),
        _LAYER,
        _value("PyTorch ms", "torch_ms", ".3f"),
        _value("tuned ms", "tuned_ms", ".3f"),
        _value("upconv ms", "library_ms", ".3f"),
        _value("file ms", "ours_ms", ".3f"),
        Column("ratio", _ratio),
        _times("ratio, tuned", "tuned_ratio"),
        _times("ratio, upconv", "library_ratio"),
        _value("of tolerance", "tolerance_used"),
        _value("grad-input error", "grad_input_error", ".1e"),
        _value("grad-weight error", "grad_weight_error", ".1e"),
        _word("rules"),
        _value("lines", "lines", ".0f"),
        _value("build s", "build_s", ".0f"),
    ),
}
"""What tables of each kind show."""


def columns(found: Report) -> list[Column]:
    """What a table of the report shows: of `SWEPT` what differs, of the others what some row has."""

    def shown(column: Column) -> bool:
        texts = {str(column.text(row)) for row in found["rows"]}
        return len(texts) > 1 if column in SWEPT else texts != {""}

    return [column for column in _COLUMNS[found["kind"]] if shown(column)]


# --- words -----------------------------------------------------------------------------------------------------------


def title(found: Report) -> str:
    """What was measured, in a line; of layers what all of them have in common."""
    words = {"training": ["whole models"], "exported": ["exported files by KernelBench's rules"]}.get(found["kind"], [])
    if found["kind"] == "layers" and found["rows"]:
        kept = columns(found)
        words = [str(column.text(found["rows"][0])) for column in SWEPT if column not in kept]
    return " · ".join(("upconv bench", *words))


def where(found: Report) -> str:
    """The device and the versions of a report."""
    device, versions = found["device"], found["versions"]
    if device["type"] == "cpu":
        return f"CPU ({device['name']}, {device['threads']} threads), PyTorch {versions['torch']}"
    return f"{device['name']}, PyTorch {versions['torch']}, cuDNN {versions['cudnn']}"


def conditions(found: Report) -> str:
    """Where, of what commit and when a report was measured, in a line."""
    commit = found["commit"] or "unknown"
    return f"{where(found)}, commit {commit[:7]}{commit[40:]}, {found['when'][:10]}"  # which may be dirty


def ceiling_text(ceilings: Any) -> str:
    """The rates of a roof, in a line."""
    rates = [f"matmul {name} {si(rate, 'FLOP/s')}" for name, rate in ceilings["matmul_flops_per_s"].items()]
    return " · ".join([f"copy {si(ceilings['copy_bytes_per_s'], 'B/s')}", *rates])


def summary(found: Report) -> list[str]:
    """What all rows say together, in sentences; nothing of whole models."""

    def mean(rows: list[Row], key: str = "ratio") -> float:
        return geometric_mean([row[key] for row in rows if row.get(key) is not None])

    timed = [row for row in found["rows"] if row.get("ratio") is not None]
    if found["kind"] == "exported":
        tuned = (
            f", {mean(timed, 'tuned_ratio'):.2f}x with cudnn.benchmark" if "tuned_ratio" in (timed or [{}])[0] else ""
        )
        return [
            f"{len(timed)} of {len(found['rows'])} files right, geometric mean {mean(timed):.2f}x over PyTorch{tuned}"
        ]
    if found["kind"] == "training":
        return []
    ours, lines = [row for row in timed if row["engine"] != "torch"], []
    if ours:
        lowest = min(ours, key=lambda row: float(row["ratio"]))
        lines.append(
            f"[bold]{mean(ours):.2f}x[/] PyTorch's speed, geometric mean over {_rows(len(ours))} that upconv's engine "
            f"computes; lowest {lowest['case']} {lowest['ratio']:.2f}x"
        )
        if "frozen_ratio" in ours[0]:
            lines.append(
                f"{mean(ours, 'frozen_ratio'):.2f}x of the same rows with upconv.freeze, which keeps packed weights"
            )
    if theirs := [row["case"] for row in timed if row["engine"] == "torch"]:
        names = ", ".join(dict.fromkeys(theirs))
        counted = f"{len(theirs)} of PyTorch's own operator counted as 1"
        lines.append(f"{mean(timed):.2f}x over {_rows(len(timed))}, {counted}: {names}")
    return lines


def _rows(count: int) -> str:
    return f"{count} rows" if count > 1 else "the one row"


def show(found: Report, console: Console) -> None:
    """Prints the report: title, conditions, table, summary, failures and warnings."""
    console.print(Text(title(found), style="bold"))
    console.print(Text(conditions(found), style="dim"))
    start, end = found["load"]["start"], found["load"]["end"]
    if start and end:
        console.print(Text(f"load average {start[0]:.2f} at the start, {end[0]:.2f} at the end", style="dim"))
    if not found["complete"]:
        console.print(Text("incomplete: the run was interrupted", style="yellow"))
    wide, layers = console.width >= WIDE, found["kind"] == "layers"
    shown = [column for column in columns(found) if column is not _LAYER or wide]
    # With little between columns, and without the layers, 80 columns of a terminal are enough.
    grid = Table(header_style="bold", box=None, pad_edge=False, collapse_padding=not wide)
    for column in shown:
        unbroken = layers and column is not _LAYER
        grid.add_column(column.head, justify="left" if column.words else "right", no_wrap=unbroken, overflow="fold")
    for row in found["rows"]:
        grid.add_row(*(column.text(row) for column in shown))
    console.print(grid)
    for line in summary(found):
        console.print(line)
    for row in found["rows"]:
        for key in ("failure", "compile_failure", "compile_ours_failure", "warning"):
            if row.get(key):
                console.print(Text(f"{row['case']}: {row[key]}", style="yellow" if key == "warning" else "red"))
    if "ceilings" in found:
        console.print(Text(f"roof: {ceiling_text(found['ceilings'])}", style="dim"))
