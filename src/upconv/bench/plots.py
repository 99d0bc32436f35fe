"""Pictures of a report: speed-ups as bars, and how much of the roof is reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upconv.bench import files
from upconv.bench.report import Report, Row
from upconv.bench.roofline import Ceilings
from upconv.bench.tables import SWEPT, ceiling_text, conditions, constant, si

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        figure.supxlabel(f"{conditions(report)}\n{ceiling_text(report['ceilings'])}", fontsize=8, color="#555555")
        files.publish(path, lambda temporary: figure.savefig(temporary, dpi=150))


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
            axes.set_title(" · ".join(constant(rows)[1:]), loc="left", fontweight="bold")
            axes.set_xlabel(f"percent of the roof ({ceiling_text(report['ceilings'])})", fontsize=8)
        figure.supxlabel(conditions(reports[0]), fontsize=8, color="#555555")
        files.publish(path, lambda temporary: figure.savefig(temporary, dpi=150))


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
    return " · ".join(str(column.text(row)) for column in SWEPT[1:])


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
