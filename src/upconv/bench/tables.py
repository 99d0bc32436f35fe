"""Reports in a terminal: a title, where they were measured, a table and what is to be said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from upconv.bench import report
from upconv.bench.report import LAYERS, Report, Row, kind_of

WIDE = 110
"""Columns of a terminal from which on the table of layers spells each layer and the quartiles out."""
WITHIN = 1.05
"""An exported file is to take at most this many times the library's own layer."""


class Column(NamedTuple):
    """A column of a table."""

    head: str
    text: Callable[[Row], str | Text]
    words: bool = False
    """Not numbers, which are aligned at the right."""
    when: Callable[[Sequence[Row]], bool] = lambda rows: True
    """Whether a table of these rows has the column."""
    wide: bool | None = None
    """True: only in a wide terminal; False: only in a narrow one."""


# --- cells -----------------------------------------------------------------------------------------------------------


def si(value: float, unit: str) -> str:
    """``1.23 GFLOP/s``: three digits and the prefix of the power of 1000."""
    for prefix, power in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= power:
            return f"{value / power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _has(key: str) -> Callable[[Sequence[Row]], bool]:
    return lambda rows: any(row[key] is not None for row in rows)


def _number(head: str, key: str, form: str = ".3g", unit: float = 1.0, after: str = "") -> Column:
    """A row's value; the column is left out where no row has one."""

    def text(row: Row) -> str:
        return "" if row[key] is None else f"{row[key] / unit:{form}}{after}"

    return Column(head, text, when=_has(key))


def _word(key: str, head: str | None = None) -> Column:
    return Column(head or key, lambda row: str(row[key]), words=True)


def _swept(key: str, text: Callable[[Row], str] | None = None) -> Column:
    """What a run of layers may sweep: a column where it does, a word in the title where it does not."""
    of = text or (lambda row: str(row[key]))
    return Column(key, of, words=True, when=lambda rows: len(set(map(of, rows))) > 1)


def _quartiles(side: str) -> Column:
    def text(row: Row) -> str:
        lower, upper = row[f"{side}_lower_ms"], row[f"{side}_upper_ms"]
        return "" if lower is None else f"{_ms(lower)}-{_ms(upper)}"

    return Column("quartiles", text, when=_has(f"{side}_upper_ms"), wide=True)


def _spread(row: Row) -> str:
    """How far the quartiles are apart in percent of the median, of the side where that is more."""
    shares = [
        (row[f"{side}_upper_ms"] - row[f"{side}_lower_ms"]) / row[f"{side}_ms"]
        for side in ("ours", "torch", "frozen")
        if row[f"{side}_upper_ms"] is not None
    ]
    return f"{max(shares):.0%}" if shares else ""


def _ours(row: Row) -> str | Text:
    if row["ours_ms"] is None:
        return Text("wrong" if row["rel_error"] is not None else "failed", style="bold red")
    return _ms(row["ours_ms"])


def _ratio(row: Row) -> Text:
    if row["ratio"] is None:
        return Text("")
    if row["engine"] == "torch":
        return Text("torch", style="dim")
    # 5% is what the medians of two equal implementations differ by on a shared machine.
    ratio = row["ratio"]
    return Text(f"{ratio:.2f}x", style="green" if ratio > 1.05 else "yellow" if ratio >= 0.95 else "red")


def _ratio_or_failure(row: Row) -> str:
    return row["failure"] or f"{row['ratio']:.2f}x"


# --- columns by kind -------------------------------------------------------------------------------------------------

SWEPT = (
    _swept("suite"),
    _swept("dtype", lambda row: row["dtype"] if row["precision"] != "tf32" else "float32 as TF32"),
    _swept("layout"),
    _swept("pass"),
)
_COLUMNS: dict[str, tuple[Column, ...]] = {
    LAYERS: (
        _word("case"),
        _word("layer", "layer and input")._replace(wide=True),
        *SWEPT,
        Column(
            "scale",
            lambda row: "1" if row["scale"] == 1 else f"1/{1 / row['scale']:.0f}",
            when=lambda rows: any(row["scale"] != 1 for row in rows),
        ),
        Column("upconv ms", _ours),
        _quartiles("ours"),
        Column("PyTorch ms", lambda row: _ms(row["torch_ms"])),
        _quartiles("torch"),
        Column("spread", _spread, when=_has("torch_upper_ms"), wide=False),
        Column("speed-up", _ratio),
        Column("of roof", lambda row: "" if row["ours_ms"] is None else f"{row['percent_of_roof'] or 0:.0f}%"),
        Column("frozen ms", lambda row: _ms(row["frozen_ms"]), when=_has("frozen_ms")),
        _quartiles("frozen"),
        _number("frozen", "frozen_ratio", ".2f", after="x"),
        _number("peak MB", "ours_peak_bytes", ".1f", 1e6),
        _number("PyTorch's", "torch_peak_bytes", ".1f", 1e6),
        _number("error", "rel_error", ".0e"),
        _number("PyTorch's", "torch_rel_error", ".0e")._replace(when=_has("tolerance_used")),
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
        _number("ratio, convolutions too", "convolutions_ratio", ".2f", after="x"),
        _number("torch.compile, with upconv ms", "compile_ours_ms"),
        _number("ratio, compiled", "compile_ratio", ".2f", after="x"),
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
        _number("exported ms", "ours_ms", ".3f"),
        Column("ratio", _ratio_or_failure),
        _number("upconv ms", "library_ms", ".3f"),
        Column(
            "exported / upconv",
            lambda row: "" if row["library_ms"] is None else f"{row['ours_ms'] / row['library_ms']:.2f}x",
        ),
        _number("of tolerance", "worst"),
        _number("grad-input error", "grad_input_error", ".1e"),
        _number("grad-weight error", "grad_weight_error", ".1e"),
        _number("lines", "lines", ".0f"),
        _number("build s", "build_s", ".0f"),
    ),
}
"""What tables of each kind show."""


def constant(rows: Sequence[Row]) -> list[str]:
    """The words that hold for all layers; none without any."""
    return [str(swept.text(rows[0])) for swept in SWEPT if rows and not swept.when(rows)]


def columns(found: Report, wide: bool = True) -> list[Column]:
    """What a table of the report shows."""
    rows = found["rows"]
    return [column for column in _COLUMNS[kind_of(found)] if column.wide in (None, wide) and column.when(rows)]


# --- words -----------------------------------------------------------------------------------------------------------


def title(found: Report) -> str:
    """What was measured, in a line."""
    what = {
        "host": "host time per call, enqueued only" if found["device"].get("type") == "cuda" else "time per call",
        "shapes": "first calls on ten input sizes that the process has not seen",
        "training": "a training step: forward, loss, backward, Adam",
        "cold": "NVRTC's time for what a first call waits for, for what follows it in a thread, and to load from disk",
        "exported": "exported files by KernelBench's rules",
    }
    words = constant(found["rows"]) if kind_of(found) == LAYERS else [what[found["kind"]], found.get("layer")]
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
    rates = [f"matmul {name} {si(rate, 'FLOP/s')}" for name, rate in ceilings["matmul_flops_per_s"].items()]
    return " · ".join([f"copy {si(ceilings['copy_bytes_per_s'], 'B/s')}", *rates])


def summary(found: Report) -> list[str]:
    """What all rows together say, in sentences; of some kinds nothing."""
    kind, rows = kind_of(found), found["rows"]
    return _means(report.summarise(rows)) if kind == LAYERS else [_files(rows)] if kind == "exported" else []


def _means(of: dict[str, Any]) -> list[str]:
    lines = []
    if of["ours"]:
        lines.append(
            f"[bold]{of['mean_of_ours']:.2f}x[/] PyTorch's speed, geometric mean over the {of['ours']} rows that "
            f"upconv's engine computes; lowest {of['lowest']['case']} {of['lowest']['ratio']:.2f}x"
        )
    if of["frozen"] is not None:
        lines.append(f"{of['frozen']:.2f}x of the same rows with upconv.freeze, which keeps packed weights")
    if of["delegated"]:
        names, count = ", ".join(dict.fromkeys(of["delegated"])), len(of["delegated"])
        lines.append(f"{of['mean_of_all']:.2f}x with the {count} rows left to PyTorch's own operator at 1: {names}")
    return lines


def _files(rows: Sequence[Row]) -> str:
    right = [row for row in rows if not row["failure"]]
    text = f"{len(right)} of {len(rows)} files correct"
    if not right:
        return text
    near = sum(row["ours_ms"] <= WITHIN * row["library_ms"] for row in right)
    mean = report.geometric_mean([row["ratio"] for row in right])
    return f"{text}, geometric mean {mean:.2f}x over PyTorch; {near} within 5% of upconv's layer"


def show(found: Report, console: Console) -> None:
    """Prints the report: title, conditions, table, summary, failures and warnings."""
    layers = kind_of(found) == LAYERS
    wide = not layers or console.width >= WIDE
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
    shown = columns(found, wide)
    for column in shown:
        folded = column.head == "layer and input"
        grid.add_column(
            column.head, justify="left" if column.words else "right", style="dim" if folded else None,
            no_wrap=layers and not folded, overflow="fold",
        )  # fmt: skip
    for row in found["rows"]:
        grid.add_row(*(column.text(row) for column in shown))
    console.print(grid)
    for line in summary(found):
        console.print(line)
    for row in report.wrong(found["rows"]) if layers else ():
        console.print(Text(f"{row['case']}: {row['failure'] or 'no result'}", style="red"))
    for row in found["rows"]:
        if row.get("warning"):
            name = row.get("case") or f"{row.get('dtype')} {row.get('mode')}"
            console.print(Text(f"{name}: {row['warning']}", style="yellow"))
    if layers and found["ceilings"]["matmul_flops_per_s"]:
        console.print(Text(f"roof: {ceiling_text(found['ceilings'])}", style="dim"))
