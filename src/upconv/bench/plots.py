"""Pictures of reports: how much of the roof PyTorch and upconv reach in every case, and the speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from upconv.bench.report import Report, Row
from upconv.bench.tables import SWEPT, ceiling_text, conditions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"torch": "#c3c8cf", "ours": "#2b6cb0"}
_ABREAST = 3
"""Panels side by side."""


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draws a panel for each dtype, layout and pass of the reports, PNG or SVG by the path's suffix.

    Raises:
        ValueError: a report without a layer that has a speed.
        ImportError: matplotlib is not installed.
    """
    panels: list[tuple[str, list[Row]]] = []
    for found in reports:
        rows = [row for row in found["rows"] if "roof_ms" in row and row["ratio"] is not None]
        if not rows:
            raise ValueError("a plot needs at least one layer with a speed, and this report has none")
        by_way: dict[str, list[Row]] = {}
        for row in rows:
            by_way.setdefault(" · ".join(str(column.text(row)) for column in SWEPT[1:]), []).append(row)
        panels += [(f"{name}\n(roof: {ceiling_text(found['ceilings'])})", mine) for name, mine in by_way.items()]
    import matplotlib
    from matplotlib.figure import Figure

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    with matplotlib.rc_context(style):  # type: ignore[arg-type]
        across = min(_ABREAST, len(panels))
        down = -(-len(panels) // across)
        height = max(4.0, 1.6 + 0.27 * max(len(rows) for _, rows in panels))
        figure = Figure(figsize=(6.2 * across, height * down), layout="constrained")
        axes = list(figure.subplots(down, across, squeeze=False).flat)
        for (name, rows), panel in zip(panels, axes):
            _draw(panel, rows)
            panel.set_title(name, loc="left", fontsize=8)
        for panel in axes[len(panels) :]:
            panel.set_axis_off()
        figure.supxlabel(conditions(reports[0]), fontsize=8, color="#555555")
        figure.savefig(path, dpi=150)


def _draw(axes: Axes, rows: Sequence[Row]) -> None:
    """Two bars a case, from the top down; the ratio stands at the end of ours."""
    places = range(len(rows))
    for side, name, up in (("torch", "PyTorch", 0.19), ("ours", "upconv", -0.19)):
        shares = [100 * row["roof_ms"] / row[f"{side}_ms"] for row in rows]
        bars = axes.barh([i + up for i in places], shares, height=0.36, color=_COLOURS[side], label=name)
    texts = [
        f"{share:.0f}% · " + ("PyTorch's own" if row["engine"] == "torch" else f"{row['ratio']:.2f}x")
        for share, row in zip(shares, rows)
    ]
    axes.bar_label(bars, texts, padding=3, fontsize=7.5)
    axes.axvline(100, color="#333333", linewidth=0.9)
    axes.set_xlabel("percent of the roof, speed-up over PyTorch", fontsize=8)
    axes.set_xlim(0, 1.22 * max(100.0, *shares))
    axes.set_yticks(places, [row["case"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(fontsize=7.5, loc="lower right")
