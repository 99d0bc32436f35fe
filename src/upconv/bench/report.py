"""The report of a run: JSON as it is kept, the table in a terminal, and the plots."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from upconv import env
from upconv.bench.roofline import Ceilings
from upconv.bench.run import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMA = 1


class Report(TypedDict):
    """A run as JSON holds it."""

    schema: int
    when: str
    """UTC, ISO 8601."""
    commit: str | None
    device: dict[str, env.Value]
    versions: dict[str, env.Value]
    ceilings: Ceilings
    rows: list[Row]


def build(rows: Sequence[Row], ceilings: Ceilings, device: torch.device) -> Report:
    """The report of rows measured now, here."""
    return Report(
        schema=SCHEMA,
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=env.commit(),
        device=env.device(device),
        versions=env.versions(),
        ceilings=ceilings,
        rows=list(rows),
    )


# --- files -----------------------------------------------------------------------------------------------------------


def publish(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a temporary file beside ``path``, then moves it there: a reader sees the old or the new file.

    The temporary file ends as ``path`` does. When ``write`` fails it is removed, and ``path`` stays as it was.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp's file is for its owner alone
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(report: Report, path: Path) -> None:
    """Writes the report as JSON, in one step."""
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    publish(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def load(path: str | Path) -> Report:
    """Reads a report.

    Raises:
        ValueError: the file is missing, is no JSON, or holds no report of this schema; in one sentence.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path} must be a report of schema {SCHEMA}, got {schema!r}")
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


# Keys beyond the schema's, which a report by another tool may lack.
_ABSENT: dict[str, object] = {
    "layer": "", "scale": 1.0, "rounds": 0, "flops": 0, "bytes": 0, "inputs": "normal", "wall_s": 0.0,
}  # fmt: skip
_OPTIONAL = {*_ABSENT, "failure", "ours_peak_bytes", "torch_peak_bytes", "tolerance_used"}


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
    wrong: int


def summarise(rows: Sequence[Row]) -> Summary:
    """Geometric means over the rows that our engine computes, and over all right rows with delegated ones at 1."""
    timed = [row for row in rows if row["ratio"] is not None]
    ours = [row for row in timed if row["engine"] != "torch"]
    return Summary(
        ours=len(ours),
        mean_of_ours=geometric_mean([row["ratio"] or 1.0 for row in ours]),
        delegated=[row["case"] for row in timed if row["engine"] == "torch"],
        mean_of_all=geometric_mean([row["ratio"] or 1.0 for row in timed]),
        lowest=min(ours, key=lambda row: row["ratio"] or 1.0, default=None),
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


def _ceiling_text(ceilings: Ceilings) -> str:
    rates = [f"matmul {name} {si(rate, 'FLOP/s')}" for name, rate in ceilings["matmul_flops_per_s"].items()]
    return " · ".join([f"copy {si(ceilings['copy_bytes_per_s'], 'B/s')}", *rates])


# What a run may sweep; a column where it does, a word in the title where it does not.
_SWEPT: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("suite", lambda row: row["suite"]),
    ("dtype", lambda row: row["dtype"] if row["precision"] != "tf32" else "float32 as TF32"),
    ("layout", lambda row: row["layout"]),
    ("pass", lambda row: row["pass"]),
)


def _swept(rows: Sequence[Row]) -> tuple[list[str], list[tuple[str, Callable[[Row], str]]]]:
    """The words that hold for all rows, and the columns for what differs among them."""
    constant = [text(rows[0]) for _, text in _SWEPT if len({text(row) for row in rows}) == 1] if rows else []
    return constant, [(name, text) for name, text in _SWEPT if len({text(row) for row in rows}) > 1]


# --- the terminal ----------------------------------------------------------------------------------------------------

_WIDE = 110
"""Columns of a terminal from which on the table spells each layer out."""


def show(report: Report, console: Console) -> None:
    """Prints the table, its conditions and the summary."""
    rows = report["rows"]
    constant, columns = _swept(rows)
    console.print(Text(" · ".join(["upconv bench", *constant]), style="bold"))
    console.print(Text(conditions(report), style="dim"))
    console.print(table(rows, columns, layers=console.width >= _WIDE))
    summary = summarise(rows)
    if summary["ours"]:
        lowest = summary["lowest"]
        text = Text.assemble(
            (f"{summary['mean_of_ours']:.2f}x", "bold"),
            f" PyTorch's speed, geometric mean over the {summary['ours']} rows that upconv's engine computes",
        )
        if lowest is not None:
            text.append(f"; lowest {lowest['case']} {lowest['ratio']:.2f}x")
        console.print(text)
    if summary["delegated"]:
        names = ", ".join(dict.fromkeys(summary["delegated"]))
        count = len(summary["delegated"])
        console.print(
            f"{summary['mean_of_all']:.2f}x with the {count} rows left to PyTorch's own operator at 1: {names}"
        )
    for row in wrong(rows):
        console.print(Text(f"{row['case']}: {row.get('failure') or 'no result'}", style="red"))
    console.print(Text(f"roof: {_ceiling_text(report['ceilings'])}", style="dim"))


def table(rows: Sequence[Row], columns: Sequence[tuple[str, Callable[[Row], str]]], *, layers: bool) -> Table:
    """The rows as a table; ``columns`` are those beside the fixed ones, and ``layers`` spells each case out."""
    scaled = any(row["scale"] != 1 for row in rows)
    peaks = any(row["ours_peak_bytes"] is not None for row in rows)
    grid = Table(header_style="bold", pad_edge=False)
    grid.add_column("case", no_wrap=True)
    if layers:
        grid.add_column("layer and input", style="dim", overflow="fold")
    for name, _ in columns:
        grid.add_column(name, no_wrap=True)
    if scaled:
        grid.add_column("scale", justify="right", no_wrap=True)
    for name in ("upconv ms", "PyTorch ms", "speed-up", "of roof"):
        grid.add_column(name, justify="right", no_wrap=True)
    if peaks:
        grid.add_column("peak MB", justify="right", no_wrap=True)
        grid.add_column("PyTorch's", justify="right", no_wrap=True)
    compared = any(row["tolerance_used"] is not None for row in rows)
    for name in ("error", *(("PyTorch's", "of tolerance") if compared else ())):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("engine", no_wrap=True)
    for row in rows:
        cells: list[str | Text] = [
            row["case"],
            *([row["layer"]] if layers else []),
            *(text(row) for _, text in columns),
        ]
        if scaled:
            cells.append(_scale(row["scale"]))
        if row["ours_ms"] is None:
            cells += [Text("wrong" if row["rel_error"] is not None else "failed", style="bold red"), "", "", ""]
        else:
            cells += [_ms(row["ours_ms"]), _ms(row["torch_ms"]), _ratio(row), f"{row['percent_of_roof'] or 0:.0f}%"]
        if peaks:
            cells += [_megabytes(row["ours_peak_bytes"]), _megabytes(row["torch_peak_bytes"])]
        cells.append(_error(row["rel_error"]))
        if compared:
            cells += [_error(row["torch_rel_error"]), _error(row["tolerance_used"])]
        cells.append(Text(row["engine"], style="dim" if row["engine"] == "torch" else ""))
        grid.add_row(*cells)
    return grid


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f}"


def _ratio(row: Row) -> Text:
    ratio = row["ratio"] or 1.0
    if row["engine"] == "torch":
        return Text("torch", style="dim")
    # 5% is what the medians of two equal implementations differ by on a shared machine.
    return Text(f"{ratio:.2f}x", style="green" if ratio > 1.05 else "yellow" if ratio >= 0.95 else "red")


# --- plots -----------------------------------------------------------------------------------------------------------

_COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#b83280", "#6b46c1", "#b7791f", "#2c7a7b", "#9b2c2c")
_QUIET = "#8a8f98"


def plot(report: Report, path: Path) -> None:
    """Draws bars of speed-up beside a roofline, PNG or SVG by the path's suffix.

    Raises:
        ValueError: another suffix, or no row with a speed.
        ImportError: matplotlib is not installed.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"the plot's file must end in .png or .svg, got {str(path)!r}")
    rows = [row for row in report["rows"] if row["ratio"] is not None]
    if not rows:
        raise ValueError("a plot needs at least one row with a speed, and this report has none")

    import matplotlib
    from matplotlib.figure import Figure

    series = list(dict.fromkeys(_series(row) for row in rows))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(series)}
    cases = list(dict.fromkeys((row["suite"], row["case"]) for row in rows))
    height = min(40.0, max(4.6, 1.9 + 0.26 * len(cases) * max(1.0, 0.6 * len(series))))
    with matplotlib.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    ):
        figure = Figure(figsize=(12.5, height), layout="constrained")
        bars, roof = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
        _draw_bars(bars, rows, cases, series, colours)
        _draw_roofline(roof, rows, report["ceilings"], colours)
        figure.supxlabel(f"{conditions(report)}\n{_ceiling_text(report['ceilings'])}", fontsize=8, color="#555555")
        publish(path, lambda temporary: figure.savefig(temporary, dpi=150))


def plot_roofs(reports: Sequence[Report], path: Path) -> None:
    """Draws for each report, side by side, how much of the roof PyTorch and upconv reach in every case.

    Raises:
        ValueError: a path that ends neither in .png nor in .svg, or a report without a row that has a speed.
        ImportError: matplotlib is not installed.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"the plot's file must end in .png or .svg, got {str(path)!r}")
    timed = [[row for row in report["rows"] if row["ratio"] is not None] for report in reports]
    if not all(timed):
        raise ValueError("a plot needs at least one row with a speed, and this report has none")

    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    ):
        height = max(4.0, 1.6 + 0.27 * max(map(len, timed)))
        figure = Figure(figsize=(6.2 * len(reports), height), layout="constrained")
        panels = figure.subplots(1, len(reports), squeeze=False)[0]
        for axes, report, rows in zip(panels, reports, timed):
            _draw_roofs(axes, rows)
            axes.set_title(" · ".join(_swept(rows)[0][1:]), loc="left", fontweight="bold")
            axes.set_xlabel(f"percent of the roof ({_ceiling_text(report['ceilings'])})", fontsize=8)
        figure.supxlabel(conditions(reports[0]), fontsize=8, color="#555555")
        publish(path, lambda temporary: figure.savefig(temporary, dpi=150))


def _draw_roofs(axes: Axes, rows: Sequence[Row]) -> None:
    """A bar a case for each side; the ratio stands at the end of ours."""
    for i, row in enumerate(rows):
        ours, theirs = (100 * row["roof_ms"] / (ms or math.inf) for ms in (row["ours_ms"], row["torch_ms"]))
        axes.barh(i + 0.19, theirs, height=0.36, color="#c3c8cf", label="PyTorch" if i == 0 else None)
        axes.barh(i - 0.19, ours, height=0.36, color=_COLOURS[0], label="upconv" if i == 0 else None)
        axes.annotate(
            f"{ours:.0f}% · {_times(row['ratio'] or 1.0)}", (ours, i - 0.19), (3, 0), textcoords="offset points",
            va="center", fontsize=7.5,
        )  # fmt: skip
    axes.axvline(100, color="#333333", linewidth=0.9)
    best = max(100 * row["roof_ms"] / (row["ours_ms"] or math.inf) for row in rows)
    axes.set_xlim(0, 1.22 * max(100.0, best))
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(fontsize=7.5, loc="lower right")


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def _series(row: Row) -> str:
    return " · ".join(text(row) for _, text in _SWEPT[1:])


def _draw_bars(
    axes: Axes, rows: Sequence[Row], cases: list[tuple[str, str]], series: list[str], colours: dict[str, str]
) -> None:
    """Bars from 1 on a logarithmic axis: twice as fast is as long as half as fast, to the other side."""
    thickness = 0.8 / len(series)
    ratios = [row["ratio"] or 1.0 for row in rows]
    low, high = min(1.0, *ratios), max(2.0, *ratios)
    for row in rows:
        ratio, name = row["ratio"] or 1.0, _series(row)
        y = cases.index((row["suite"], row["case"])) + (series.index(name) - (len(series) - 1) / 2) * thickness
        if row["engine"] == "torch":
            axes.annotate(
                "PyTorch's own", (1, y), (3, 0), textcoords="offset points", va="center", fontsize=7, color=_QUIET
            )
            continue
        axes.barh(y, ratio - 1, left=1, height=thickness * 0.9, color=colours[name])
        side = 1 if ratio >= 1 else -1
        axes.annotate(
            _times(ratio), (ratio, y), (3 * side, 0), textcoords="offset points",
            va="center", ha="left" if side > 0 else "right", fontsize=7.5,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    room = (high / low) ** 0.13  # for the numbers at the bars' ends
    left, right = low / (room if low < 1 else 1.05), high * room
    axes.set_xlim(left, right)
    ticks = [2.0**e for e in range(-6, 10) if left <= 2.0**e <= right]
    axes.set_xticks(ticks, [f"{t:g}x" for t in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="#333333", linewidth=0.9)
    axes.set_yticks(range(len(cases)), [name for _, name in cases])
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("speed-up over PyTorch (logarithmic)")
    axes.set_title(series[0] if len(series) == 1 else "Speed-up by case", loc="left", fontweight="bold")
    if len(series) > 1:
        from matplotlib.patches import Patch

        handles = [Patch(color=colours[name], label=name) for name in series]
        axes.legend(handles=handles, fontsize=7.5, frameon=True, loc="best")


def _label(axes: Axes, points: Sequence[Row], unit: float) -> None:
    """Names each case once, at its fastest point, on the side where no other name is; without room, not at all."""
    best = {row["case"]: row for row in sorted(points, key=lambda row: row["flops"] / (row["ours_ms"] or 1.0))}
    width, height = (math.log10(high / low) for low, high in (axes.get_xlim(), axes.get_ylim()))
    taken: list[tuple[float, float, float, float]] = []
    for name, row in best.items():
        x, y = row["flops"] / row["bytes"], row["flops"] / (row["ours_ms"] or 1.0) * 1e3 / unit
        across, up = (math.log10(x / axes.get_xlim()[0]) / width, math.log10(y / axes.get_ylim()[0]) / height)
        wide, tall = 0.012 * len(name) + 0.01, 0.026  # a name's size as a share of the axes
        for rise, side in product((4, -4, 16, -16), (1, -1)):  # in points; a name is about 10 of them high
            begin, near = across if side > 0 else across - wide, up + rise * tall / 10
            bottom = near if rise > 0 else near - tall
            box = (begin, begin + wide, bottom, bottom + tall)
            inside = box[0] >= 0 and box[1] <= 1 and box[2] >= 0
            if inside and not any(box[0] < t[1] and t[0] < box[1] and box[2] < t[3] and t[2] < box[3] for t in taken):
                taken.append(box)
                axes.annotate(
                    name, (x, y), (4 * side, rise), textcoords="offset points", fontsize=7, color="#444444",
                    ha="left" if side > 0 else "right", va="bottom" if rise > 0 else "top",
                )  # fmt: skip
                break


def _draw_roofline(axes: Axes, rows: Sequence[Row], ceilings: Ceilings, colours: dict[str, str]) -> None:
    """FLOP/s reached over FLOP per compulsory byte; a line joins PyTorch's point with ours."""
    from matplotlib.lines import Line2D

    points = [row for row in rows if row["flops"] and row["bytes"]]
    copy, rates = ceilings["copy_bytes_per_s"], ceilings["matmul_flops_per_s"]
    intensities = [row["flops"] / row["bytes"] for row in points] or [1.0]
    left, right = min(intensities) / 2, max(*intensities, *(rate / copy for rate in rates.values())) * 2
    used = {row["precision"] for row in rows}
    unit, name = (1e12, "TFLOP/s") if max(rates.values()) >= 1e13 else (1e9, "GFLOP/s")
    for precision, rate in rates.items():
        if precision not in used:
            continue
        ridge = rate / copy
        axes.plot([left, ridge, right], [copy * left / unit, rate / unit, rate / unit], color="#333333", linewidth=1.2)
        axes.annotate(
            f"{precision} matmul {si(rate, 'FLOP/s')}", (right, rate / unit), (-2, 3), textcoords="offset points",
            ha="right", fontsize=7.5,
        )  # fmt: skip
    for row in points:
        x, colour = row["flops"] / row["bytes"], colours[_series(row)]
        ours, theirs = (row["flops"] / (ms or 1.0) * 1e3 / unit for ms in (row["ours_ms"], row["torch_ms"]))
        if row["engine"] == "torch":
            axes.plot(x, theirs, "o", markersize=5, markerfacecolor="none", color=_QUIET)
        else:
            axes.plot([x, x], [theirs, ours], color=colour, linewidth=0.8, alpha=0.6)
            axes.plot(x, theirs, "o", markersize=5, markerfacecolor="white", color=colour)
            axes.plot(x, ours, "o", markersize=5, color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    _label(axes, points, unit)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("useful FLOP per compulsory byte")
    axes.set_ylabel(name)
    axes.set_title(f"Roofline: copy {si(copy, 'B/s')}", loc="left", fontweight="bold")
    handles: list[Any] = [
        Line2D([], [], marker="o", linestyle="", color=_COLOURS[0], label="upconv"),
        Line2D([], [], marker="o", linestyle="", color=_COLOURS[0], markerfacecolor="white", label="PyTorch"),
        Line2D([], [], marker="o", linestyle="", color=_QUIET, markerfacecolor="none", label="left to PyTorch"),
    ]
    if not any(row["engine"] == "torch" for row in points):
        handles.pop()
    axes.legend(handles=handles, loc="lower right", fontsize=7.5)
