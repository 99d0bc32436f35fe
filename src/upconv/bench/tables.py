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


# --- cells -----------------------------------------------------------------------------------------------------------


def si(value: float, unit: str) -> str:
    """``1.23 GFLOP/s``: three digits and the prefix of the power of 1000."""
    for prefix, power in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= power:
            return f"{value / power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _number(key: str, form: str = ".3g", unit: float = 1.0, after: str = "") -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{row[key] / unit:{form}}{after}"


def _word(key: str, head: str | None = None) -> Column:
    return Column(head or key, lambda row: str(row[key]), words=True)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _used(rows: Sequence[Row], *columns: tuple[str, Column]) -> list[Column]:
    """The columns for whose key some row has a value."""
    return [column for key, column in columns if any(row[key] is not None for row in rows)]


# --- columns by kind -------------------------------------------------------------------------------------------------

# What a run of layers may sweep; a column where it does, a word in the title where it does not.
SWEPT = (
    _word("suite"),
    Column("dtype", lambda row: row["dtype"] if row["precision"] != "tf32" else "float32 as TF32", words=True),
    _word("layout"),
    _word("pass"),
)


def constant(rows: Sequence[Row]) -> list[str]:
    """The words that hold for all layers; none without any."""
    return [str(swept.text(rows[0])) for swept in SWEPT if len({swept.text(row) for row in rows}) == 1]


def _layers(rows: Sequence[Row], wide: bool) -> list[Column]:
    def quartiles(side: str) -> tuple[str, Column]:
        def text(row: Row) -> str:
            lower, upper = row[f"{side}_lower_ms"], row[f"{side}_upper_ms"]
            return "" if lower is None else f"{_ms(lower)}-{_ms(upper)}"

        return (f"{side}_upper_ms" if wide else "narrow", Column("quartiles", text))

    def used(*columns: tuple[str, Column]) -> list[Column]:
        return _used(rows, *(one for one in columns if one[0] != "narrow"))

    swept = [column for column in SWEPT if len({column.text(row) for row in rows}) > 1]
    scaled = any(row["scale"] != 1 for row in rows)
    return [
        _word("case"),
        *([_word("layer", "layer and input")] if wide else []),
        *swept,
        *([Column("scale", lambda row: "1" if row["scale"] == 1 else f"1/{1 / row['scale']:.0f}")] if scaled else []),
        Column("upconv ms", _ours),
        *used(quartiles("ours")),
        Column("PyTorch ms", lambda row: _ms(row["torch_ms"])),
        *used(quartiles("torch"), ("narrow" if wide else "torch_upper_ms", Column("spread", _spread))),
        Column("speed-up", _ratio),
        Column("of roof", lambda row: "" if row["ours_ms"] is None else f"{row['percent_of_roof'] or 0:.0f}%"),
        *used(
            ("frozen_ms", Column("frozen ms", lambda row: _ms(row["frozen_ms"]))),
            quartiles("frozen"),
            ("frozen_ms", Column("frozen", _number("frozen_ratio", ".2f", after="x"))),
            ("ours_peak_bytes", Column("peak MB", _number("ours_peak_bytes", ".1f", 1e6))),
            ("ours_peak_bytes", Column("PyTorch's", _number("torch_peak_bytes", ".1f", 1e6))),
        ),
        Column("error", _number("rel_error", ".0e")),
        *used(
            ("tolerance_used", Column("PyTorch's", _number("torch_rel_error", ".0e"))),
            ("tolerance_used", Column("of tolerance", _number("tolerance_used", ".0e"))),
        ),
        Column("engine", lambda row: Text(row["engine"], style="dim" if row["engine"] == "torch" else ""), words=True),
    ]


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


def _host(rows: Sequence[Row]) -> list[Column]:
    numbers = [("PyTorch us", "torch_us", ".1f"), ("upconv us", "ours_us", ".1f"), ("added us", "added_us", "+.1f")]
    return [
        _word("dtype"),
        _word("mode"),
        *(Column(head, _number(key, form)) for head, key, form in numbers),
        _word("engine"),
    ]


def _training(rows: Sequence[Row]) -> list[Column]:
    megabytes = (("PyTorch", "torch"), ("upconv", "ours"), ("convolutions too", "convolutions"))
    return [
        _word("case"),
        Column("PyTorch ms", _number("torch_ms")),
        *_used(rows, ("compile_ms", Column("torch.compile ms", _number("compile_ms")))),
        Column("upconv ms", _number("ours_ms")),
        Column("ratio", lambda row: row["failure"] or f"{row['ratio']:.2f}x"),
        *_used(
            rows,
            ("convolutions_ms", Column("convolutions too ms", _number("convolutions_ms"))),
            ("convolutions_ratio", Column("ratio, convolutions too", _number("convolutions_ratio", ".2f", after="x"))),
            ("compile_ours_ms", Column("torch.compile, with upconv ms", _number("compile_ours_ms"))),
            ("compile_ratio", Column("ratio, compiled", _number("compile_ratio", ".2f", after="x"))),
            *(
                (f"{side}_peak_bytes", Column(f"{head} peak MB", _number(f"{side}_peak_bytes", ".0f", 1e6)))
                for head, side in megabytes
            ),
        ),
    ]


def _cold(rows: Sequence[Row]) -> list[Column]:
    seconds = (
        ("forward s", "fwd_s"), ("for the input s", "grad_input_s"), ("for the weight s", "grad_weight_s"),
        ("later s", "later_s"), ("from disk ms", "cached_ms"),
    )  # fmt: skip
    words = [_word(key) for key in ("case", "precision", "layout")]
    return [*words, *(Column(head, _number(key)) for head, key in seconds)]


def _shapes(rows: Sequence[Row]) -> list[Column]:
    every = (
        ("PyTorch first ms", "torch_ms"), ("tuned first ms", "torch_benchmark_ms"), ("upconv first ms", "ours_ms"),
        ("compiled", "ours_compiled"), ("PyTorch again ms", "torch_again_ms"), ("upconv again ms", "ours_again_ms"),
    )  # fmt: skip
    numbers = _used(rows, *((key, Column(head, _number(key))) for head, key in every))
    return [_word("shape", "input"), *numbers, _word("engine")]


def _exported(rows: Sequence[Row]) -> list[Column]:
    errors = [(f"{key}_error", f"{key.replace('_', '-')} error") for key in ("grad_input", "grad_weight")]
    return [
        _word("case"),
        _word("layer"),
        Column("PyTorch ms", _number("torch_ms", ".3f")),
        Column("exported ms", _number("ours_ms", ".3f")),
        Column("ratio", lambda row: row["failure"] or f"{row['ratio']:.2f}x"),
        Column("upconv ms", _number("library_ms", ".3f")),
        Column(
            "exported / upconv",
            lambda row: "" if row["library_ms"] is None else f"{row['ours_ms'] / row['library_ms']:.2f}x",
        ),
        Column("of tolerance", _number("worst")),
        *_used(rows, *((key, Column(head, _number(key, ".1e"))) for key, head in errors)),
    ]


_COLUMNS = {"host": _host, "training": _training, "cold": _cold, "shapes": _shapes, "exported": _exported}


def columns(found: Report, wide: bool = True) -> list[Column]:
    """What a table of the report shows; columns that no row has a value for are left out."""
    kind, rows = kind_of(found), found["rows"]
    return _layers(rows, wide) if kind == LAYERS else _COLUMNS[kind](rows)


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
    rows = found["rows"]
    if kind_of(found) == LAYERS:
        return _means(report.summarise(rows))
    if kind_of(found) == "exported":
        return [_files(rows)]
    return []


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


def _name(row: Row) -> str:
    return str(row.get("case") or f"{row.get('dtype')} {row.get('mode')}")


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
            console.print(Text(f"{_name(row)}: {row['warning']}", style="yellow"))
    if layers and found["ceilings"]["matmul_flops_per_s"]:
        console.print(Text(f"roof: {ceiling_text(found['ceilings'])}", style="dim"))
