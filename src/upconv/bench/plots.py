"""Pictures of a report: speed-ups as bars, and how much of the roof is reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from upconv.bench import files
from upconv.bench.report import Report, Row
from upconv.bench.roofline import Ceilings
from upconv.bench.tables import SWEPT, ceiling_text, conditions, constant, si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#b83280", "#6b46c1", "#b7791f", "#2c7a7b", "#9b2c2c")
_QUIET = "#8a8f98"


def plot(report: Report, path: Path) -> None:
    """Draws bars of speed-up beside a roofline, PNG or SVG by the path's suffix.

    Raises:
        ValueError: another suffix, or no row with a speed.
        ImportError: matplotlib is not installed.
    """
    (rows,) = _timed([report], path)
    series = list(dict.fromkeys(map(_series, rows)))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(series)}
    cases = list(dict.fromkeys((row["suite"], row["case"]) for row in rows))
    height = min(40.0, max(4.6, 1.9 + 0.26 * len(cases) * max(1.0, 0.6 * len(series))))
    with _figure(12.5, height, path) as figure:
        bars, roof = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
        _draw_bars(bars, rows, cases, colours)
        _draw_roofline(roof, rows, report["ceilings"], colours)
        figure.supxlabel(f"{conditions(report)}\n{ceiling_text(report['ceilings'])}", fontsize=8, color="#555555")


def plot_roofs(reports: Sequence[Report], path: Path) -> None:
    """Draws for each report, side by side, how much of the roof PyTorch and upconv reach in every case.

    Raises:
        ValueError: a path that ends neither in .png nor in .svg, or a report without a row that has a speed.
        ImportError: matplotlib is not installed.
    """
    timed = _timed(reports, path)
    with _figure(6.2 * len(reports), max(4.0, 1.6 + 0.27 * max(map(len, timed))), path) as figure:
        panels = figure.subplots(1, len(reports), squeeze=False)[0]
        for axes, report, rows in zip(panels, reports, timed):
            _draw_roofs(axes, rows)
            axes.set_title(" · ".join(constant(rows)[1:]), loc="left", fontweight="bold")
            axes.set_xlabel(f"percent of the roof ({ceiling_text(report['ceilings'])})", fontsize=8)
        figure.supxlabel(conditions(reports[0]), fontsize=8, color="#555555")


def _timed(reports: Sequence[Report], path: Path) -> list[list[Row]]:
    """The rows with a speed of each report."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"the plot's file must end in .png or .svg, got {str(path)!r}")
    found = [[row for row in report["rows"] if row.get("ratio") is not None] for report in reports]
    if not all(found):
        raise ValueError("a plot needs at least one row with a speed, and this report has none")
    return found


@contextmanager
def _figure(width: float, height: float, path: Path) -> Iterator[Figure]:
    """A figure of inches, which is written as it is left."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        files.publish(path, lambda temporary: figure.savefig(temporary, dpi=150))


def _draw_roofs(axes: Axes, rows: Sequence[Row]) -> None:
    """A bar a case for each side; the ratio stands at the end of ours."""
    places = range(len(rows))
    for side, name, colour, up in (("torch", "PyTorch", "#c3c8cf", 0.19), ("ours", "upconv", _COLOURS[0], -0.19)):
        shares = [100 * row["roof_ms"] / row[f"{side}_ms"] for row in rows]
        bars = axes.barh([i + up for i in places], shares, height=0.36, color=colour, label=name)
    texts = [f"{share:.0f}% · {_times(row['ratio'])}" for share, row in zip(shares, rows)]
    axes.bar_label(bars, texts, padding=3, fontsize=7.5)
    axes.axvline(100, color="#333333", linewidth=0.9)
    axes.set_xlim(0, 1.22 * max(100.0, *shares))
    _list_cases(axes, [row["case"] for row in rows])
    axes.legend(fontsize=7.5, loc="lower right")


def _list_cases(axes: Axes, names: Sequence[str]) -> None:
    """Names the cases at the left, from the top down."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def _series(row: Row) -> str:
    return " · ".join(str(column.text(row)) for column in SWEPT[1:])


def _draw_bars(axes: Axes, rows: Sequence[Row], cases: list[tuple[str, str]], colours: dict[str, str]) -> None:
    """Bars from 1 on a logarithmic axis: twice as fast is as long as half as fast, to the other side."""
    thickness = 0.8 / len(colours)
    for i, (name, colour) in enumerate(colours.items()):
        mine = [row for row in rows if _series(row) == name]
        up = (i - (len(colours) - 1) / 2) * thickness
        places = [cases.index((row["suite"], row["case"])) + up for row in mine]
        bars = axes.barh(
            places, [row["ratio"] - 1 for row in mine], left=1, height=0.9 * thickness, color=colour, label=name
        )
        texts = ["PyTorch's own" if row["engine"] == "torch" else _times(row["ratio"]) for row in mine]
        axes.bar_label(bars, texts, padding=3, fontsize=7.5)
    ratios = [row["ratio"] for row in rows]
    low, high = min(1.0, *ratios), max(2.0, *ratios)
    room = (high / low) ** 0.13  # for the numbers at the bars' ends
    left, right = low / (room if low < 1 else 1.05), high * room
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, right)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.minorticks_off()
    axes.axvline(1, color="#333333", linewidth=0.9)
    _list_cases(axes, [name for _, name in cases])
    axes.set_xlabel("speed-up over PyTorch (logarithmic)")
    axes.set_title(next(iter(colours)) if len(colours) == 1 else "Speed-up by case", loc="left", fontweight="bold")
    if len(colours) > 1:
        axes.legend(fontsize=7.5, loc="best")


def _draw_roofline(axes: Axes, rows: Sequence[Row], ceilings: Ceilings, colours: dict[str, str]) -> None:
    """FLOP/s reached over FLOP per compulsory byte; a line joins PyTorch's point with ours."""
    points = [row for row in rows if row["flops"] and row["bytes"]]
    copy, rates = ceilings["copy_bytes_per_s"], ceilings["matmul_flops_per_s"]
    intensities = [row["flops"] / row["bytes"] for row in points] or [1.0]
    left, right = min(intensities) / 2, max(*intensities, *(rate / copy for rate in rates.values())) * 2
    unit, name = (1e12, "TFLOP/s") if max(rates.values()) >= 1e13 else (1e9, "GFLOP/s")
    used = {row["precision"] for row in rows}
    for precision, rate in rates.items():
        if precision in used:
            ridge = rate / copy
            top = [copy * left / unit, rate / unit, rate / unit]
            axes.plot([left, ridge, right], top, color="#333333", linewidth=1.2)
            axes.annotate(
                f"{precision} matmul {si(rate, 'FLOP/s')}", (right, rate / unit), (-2, 3), textcoords="offset points",
                ha="right", fontsize=7.5,
            )  # fmt: skip
    named: set[str] = set()
    for row in points:
        x, delegated = row["flops"] / row["bytes"], row["engine"] == "torch"
        ours, theirs = (row["flops"] / row[f"{side}_ms"] * 1e3 / unit for side in ("ours", "torch"))
        colour = _QUIET if delegated else colours[_series(row)]
        axes.plot([x, x], [theirs, ours], color=colour, linewidth=0.8, alpha=0.6)
        axes.plot(x, theirs, "o", markersize=5, markerfacecolor="none" if delegated else "white", color=colour)
        if not delegated:
            axes.plot(x, ours, "o", markersize=5, color=colour)
        if row["case"] not in named:
            named.add(row["case"])
            axes.annotate(row["case"], (x, ours), (4, 4), textcoords="offset points", fontsize=7, color="#444444")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("useful FLOP per compulsory byte")
    axes.set_ylabel(name)
    axes.set_title(f"Roofline: copy {si(copy, 'B/s')}", loc="left", fontweight="bold")
    for label, colour, face in (
        ("upconv", _COLOURS[0], _COLOURS[0]), ("PyTorch", _COLOURS[0], "white"), ("left to PyTorch", _QUIET, "none")
    ):  # fmt: skip
        if face != "none" or any(row["engine"] == "torch" for row in points):
            axes.plot([], [], "o", color=colour, markerfacecolor=face, label=label)
    axes.legend(loc="lower right", fontsize=7.5)
