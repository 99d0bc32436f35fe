"""Reports in a terminal: a title, where they were measured, a table and what is to be said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from upconv.bench import report
from upconv.bench.report import LAYERS, Report, Row, geometric_mean, kind_of

WIDE = 110
"""Columns of a terminal from which on the table of layers spells each layer out."""


class Column(NamedTuple):
    """A column of a table; a table of rows that have nothing there has no such column."""

    head: str
    text: Callable[[Row], str | Text]
    words: bool = False
    """Not numbers, which are aligned at the right."""
    when: Callable[[Sequence[Row]], bool] = lambda rows: True
    """Whether a table of these rows has the column."""


# --- cells -----------------------------------------------------------------------------------------------------------


def si(value: float, unit: str) -> str:
    """``1.23 GFLOP/s``: three digits and the prefix of the power of 1000."""
    for prefix, power in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= power:
            return f"{value / power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _value(head: str, key: str, shown: Callable[[Any], str]) -> Column:
    """A row's value; the column is left out where no row has one."""

    def text(row: Row) -> str:
        return "" if row.get(key) is None else shown(row[key])

    return Column(head, text, when=lambda rows: any(row.get(key) is not None for row in rows))


def _number(head: str, key: str, form: str = ".3g", unit: float = 1.0) -> Column:
    return _value(head, key, lambda value: f"{value / unit:{form}}")


def _ms(head: str, key: str) -> Column:
    return _value(head, key, lambda ms: f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 100 else f"{ms:.0f}")


def _times(head: str, key: str) -> Column:
    return _value(head, key, lambda ratio: f"{ratio:.2f}x")


def _word(key: str, head: str | None = None) -> Column:
    return Column(head or key, lambda row: str(row.get(key) or ""), words=True)


def _swept(key: str, text: Callable[[Row], str] | None = None) -> Column:
    """What a run of layers may sweep: a column where it does, a word in the title where it does not."""
    of = text or (lambda row: str(row[key]))
    return Column(key, of, words=True, when=lambda rows: len(set(map(of, rows))) > 1)


def _spread(row: Row) -> str:
    """How far the quartiles are apart in percent of the median, of the side where that is more."""
    shares = [
        (row[f"{side}_upper_ms"] - row[f"{side}_lower_ms"]) / row[f"{side}_ms"]
        for side in ("ours", "torch", "frozen")
        if row.get(f"{side}_upper_ms") is not None
    ]
    return f"{max(shares):.0%}" if shares else ""


def _ours(row: Row) -> str | Text:
    if row["ours_ms"] is None:
        return Text("wrong" if row.get("rel_error") is not None else "failed", style="bold red")
    return _OURS.text(row)


_OURS = _ms("upconv ms", "ours_ms")


def _ratio(row: Row) -> Text:
    if row["ratio"] is None:
        return Text("")
    if row["engine"] == "torch":
        return Text("torch", style="dim")
    # 5% is what the medians of two equal implementations differ by on a shared machine.
    ratio = row["ratio"]
    return Text(f"{ratio:.2f}x", style="green" if ratio > 1.05 else "yellow" if ratio >= 0.95 else "red")


def _scale(row: Row) -> str:
    scale = row.get("scale", 1)
    return "1" if scale == 1 else f"1/{1 / scale:.0f}"


def _ratio_or_failure(row: Row) -> str:
    return row["failure"] or f"{row['ratio']:.2f}x"


# --- columns by kind -------------------------------------------------------------------------------------------------

SWEPT = (
    _swept("suite"),
    _swept("dtype", lambda row: row["dtype"] if row["precision"] != "tf32" else "float32 as TF32"),
    _swept("layout"),
    _swept("pass"),
)
_LAYER = _word("layer", "layer and input")
_COLUMNS: dict[str, tuple[Column, ...]] = {
    LAYERS: (
        _word("case"),
        _LAYER,
        *SWEPT,
        Column("scale", _scale, when=lambda rows: any(row.get("scale", 1) != 1 for row in rows)),
        Column("upconv ms", _ours),
        _ms("PyTorch ms", "torch_ms"),
        Column("spread", _spread, when=lambda rows: any(map(_spread, rows))),
        Column("speed-up", _ratio),
        _value("of roof", "percent_of_roof", lambda percent: f"{percent:.0f}%"),
        _ms("frozen ms", "frozen_ms"),
        _times("frozen", "frozen_ratio"),
        _number("error", "rel_error", ".0e"),
        _number("of tolerance", "tolerance_used", ".0e"),
        Column("engine", lambda row: Text(row["engine"], style="dim" if row["engine"] == "torch" else ""), words=True),
    ),
    "host": (
        _word("dtype"),
        _word("mode"),
        _number("PyTorch us", "torch_us", ".1f"),
        _number("upconv us", "ours_us", ".1f"),
        _number("added us", "added_us", "+.1f"),
        _word("engine"),
    ),
    "training": (
        _word("case"),
        _number("PyTorch ms", "torch_ms"),
        _number("torch.compile ms", "compile_ms"),
        _number("upconv ms", "ours_ms"),
        Column("ratio", _ratio_or_failure),
        _number("convolutions too ms", "convolutions_ms"),
        _times("ratio, convolutions too", "convolutions_ratio"),
        _number("torch.compile, with upconv ms", "compile_ours_ms"),
        _times("ratio, compiled", "compile_ratio"),
        _number("PyTorch peak MB", "torch_peak_bytes", ".0f", 1e6),
        _number("upconv peak MB", "ours_peak_bytes", ".0f", 1e6),
        _number("convolutions too peak MB", "convolutions_peak_bytes", ".0f", 1e6),
    ),
    "cold": (
        _word("case"),
        _word("precision"),
        _word("layout"),
        _number("forward s", "fwd_s"),
        _number("for the input s", "grad_input_s"),
        _number("for the weight s", "grad_weight_s"),
        _number("from disk ms", "cached_ms"),
    ),
    "shapes": (
        _word("shape", "input"),
        _number("PyTorch first ms", "torch_ms"),
        _number("tuned first ms", "torch_benchmark_ms"),
        _number("upconv first ms", "ours_ms"),
        _number("compiled", "ours_compiled"),
        _number("PyTorch again ms", "torch_again_ms"),
        _number("upconv again ms", "ours_again_ms"),
        _word("engine"),
    ),
    "exported": (
        _word("case"),
        _word("layer"),
        _number("PyTorch ms", "torch_ms", ".3f"),
        _number("tuned ms", "tuned_ms", ".3f"),
        _number("upconv ms", "library_ms", ".3f"),
        _number("file ms", "ours_ms", ".3f"),
        Column("ratio", _ratio_or_failure),
        _times("ratio, tuned", "tuned_ratio"),
        _times("ratio, upconv", "library_ratio"),
        _number("of tolerance", "tolerance_used"),
        _number("grad-input error", "grad_input_error", ".1e"),
        _number("grad-weight error", "grad_weight_error", ".1e"),
        _value("rules", "rules", str),
        _number("lines", "lines", ".0f"),
        _number("build s", "build_s", ".0f"),
    ),
}
"""What tables of each kind show."""


def columns(found: Report) -> list[Column]:
    """What a table of the report shows."""
    return [column for column in _COLUMNS[kind_of(found)] if column.when(found["rows"])]


# --- words -----------------------------------------------------------------------------------------------------------

_TITLES = {
    "host": "time per call; on a GPU it is enqueued only",
    "shapes": "first calls on ten input sizes that the process has not seen",
    "training": "a training step: forward, loss, backward, Adam",
    "cold": "NVRTC's time for what a first call waits for, for what follows it in a thread, and to load from disk",
    "exported": "exported files by KernelBench's rules",
}


def title(found: Report) -> str:
    """What was measured, in a line; of layers what all of them have in common."""
    rows, kind = found["rows"], kind_of(found)
    if kind == LAYERS:
        words = [str(swept.text(rows[0])) for swept in SWEPT if rows and not swept.when(rows)]
    else:
        words = [_TITLES[kind], found.get("layer") or ""]
    return " · ".join(word for word in ("upconv bench", *words) if word)


def conditions(found: Report) -> str:
    """Where and with what a report was measured, in a line."""
    device, versions = found["device"], found["versions"]
    parts = [str(device.get("name"))]
    if device.get("type") == "cpu":
        parts.append(f"{device.get('threads')} threads, {device.get('capability')}")
    parts += [f"upconv {versions.get('upconv')}", f"PyTorch {versions.get('torch')}"]
    key, name = ("cudnn", "cuDNN") if device.get("type") == "cuda" else ("onednn", "oneDNN")
    parts += [f"{name} {versions[key]}"] if versions.get(key) else []
    return " · ".join([*parts, found["when"][:10]])


def ceiling_text(ceilings: Any) -> str:
    """The rates of a roof, in a line."""
    rates = [f"matmul {name} {si(rate, 'FLOP/s')}" for name, rate in ceilings["matmul_flops_per_s"].items()]
    return " · ".join([f"copy {si(ceilings['copy_bytes_per_s'], 'B/s')}", *rates])


def summary(found: Report) -> list[str]:
    """What all rows of layers say together, in sentences."""
    timed = [row for row in found["rows"] if row.get("ratio") is not None]
    if kind_of(found) == "exported":
        mean = geometric_mean([row["ratio"] for row in timed])
        return [f"{len(timed)} of {len(found['rows'])} files right, geometric mean {mean:.2f}x over PyTorch"]
    if kind_of(found) != LAYERS:
        return []
    ours, lines = [row for row in timed if row["engine"] != "torch"], []
    if ours:
        lowest = min(ours, key=lambda row: float(row["ratio"]))
        lines.append(
            f"[bold]{geometric_mean([row['ratio'] for row in ours]):.2f}x[/] PyTorch's speed, geometric mean over the "
            f"{len(ours)} rows that upconv's engine computes; lowest {lowest['case']} {lowest['ratio']:.2f}x"
        )
    for key, what in (("frozen_ratio", "of the same rows with upconv.freeze, which keeps packed weights"),):
        ratios = [row[key] for row in ours if row.get(key) is not None]
        lines += [f"{geometric_mean(ratios):.2f}x {what}"] if ratios else []
    theirs = [row["case"] for row in timed if row["engine"] == "torch"]
    if theirs:
        mean = geometric_mean([row["ratio"] for row in timed])
        names = ", ".join(dict.fromkeys(theirs))
        lines.append(f"{mean:.2f}x with the {len(theirs)} rows left to PyTorch's own operator at 1: {names}")
    return lines


def show(found: Report, console: Console) -> None:
    """Prints the report: title, conditions, table, summary, failures and warnings."""
    layers, wide = kind_of(found) == LAYERS, console.width >= WIDE
    console.print(Text(title(found), style="bold"))
    console.print(Text(conditions(found), style="dim"))
    start, end = found["load"]["start"], found["load"]["end"]
    if start and end:
        cores = found["device"].get("cores")
        on = f", on {cores} cores" if cores else ""
        console.print(Text(f"load average {start[0]:.2f} at the start, {end[0]:.2f} at the end{on}", style="dim"))
    if not found["complete"]:
        console.print(Text("incomplete: the run was interrupted", style="yellow"))
    # Without lines between columns 80 of a terminal are enough.
    grid = Table(header_style="bold", pad_edge=False, box=HEAVY_HEAD if wide else None, collapse_padding=not wide)
    shown = [column for column in columns(found) if column is not _LAYER or wide]
    for column in shown:
        unbroken = layers and column is not _LAYER
        grid.add_column(column.head, justify="left" if column.words else "right", no_wrap=unbroken, overflow="fold")
    for row in found["rows"]:
        grid.add_row(*(column.text(row) for column in shown))
    console.print(grid)
    for line in summary(found):
        console.print(line)
    for row in report.wrong(found["rows"]) if layers else ():
        console.print(Text(f"{row['case']}: {row.get('failure') or 'no result'}", style="red"))
    for row in found["rows"]:
        if row.get("warning"):
            name = row.get("case") or f"{row.get('dtype')} {row.get('mode')}"
            console.print(Text(f"{name}: {row['warning']}", style="yellow"))
    if layers and found["ceilings"]["matmul_flops_per_s"]:
        console.print(Text(f"roof: {ceiling_text(found['ceilings'])}", style="dim"))
