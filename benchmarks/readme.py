"""Writes the README's tables and pictures from the reports in benchmarks/results, the only source of its figures.

    python benchmarks/readme.py          rewrites README.md between its markers, and docs/*.png
    python benchmarks/readme.py --check  exit code 1 when README.md is not what the reports say

A section between ``<!-- NAME -->`` and ``<!-- /NAME -->`` belongs to this program; NAME is the stem of a report.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from upconv.bench import report
from upconv.bench.run import Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def pivot(found: report.Report) -> str:
    """One line a case, one column a dtype and layout: speed-ups, and a dash where PyTorch's own operator runs."""
    rows = found["rows"]
    columns = list(dict.fromkeys((row["dtype"], row["layout"]) for row in rows))
    cases = {row["case"]: row["layer"].split(" on ")[0] for row in rows}
    cells = {(row["case"], row["dtype"], row["layout"]): row for row in rows}
    heads = ["case", "layer", *(f"{DTYPES[dtype]} {layout}" for dtype, layout in columns)]
    lines = [_line(heads), _line(["---", "---", *("---:" for _ in columns)])]
    for case, layer in cases.items():
        lines.append(_line([case, layer, *(_speedup(cells.get((case, *column))) for column in columns)]))
    summary = report.summarise(rows)
    closing = (
        f"{report.conditions(found)}. Geometric mean over the {summary['ours']} rows that upconv computes: "
        f"{summary['mean_of_ours']:.2f}x. A dash: left to PyTorch's own operator, which nothing of ours beats there."
    )
    return "\n".join([*lines, "", closing])


def _speedup(row: Row | None) -> str:
    if row is None:
        return ""
    if row["ours_ms"] is None:
        return "wrong"
    return "–" if row["engine"] == "torch" else f"{row['ratio']:.2f}x"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def rewritten(text: str) -> str:
    """The README with every section that a report stands behind made anew."""
    for path in sorted(RESULTS.glob("*.json")):
        name = path.stem
        section = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(\n<!-- /{re.escape(name)} -->)", re.DOTALL)
        table = pivot(report.load(path))
        text = section.sub(lambda match, table=table: f"{match[1]}{table}{match[2]}", text)  # type: ignore[misc]
    return text


def main() -> int:
    readme = ROOT / "README.md"
    was = readme.read_text(encoding="utf-8")
    new = rewritten(was)
    if "--check" in sys.argv[1:]:
        if new != was:
            print("README.md differs from benchmarks/results; run: make readme")
        return int(new != was)
    report.publish(readme, lambda path: path.write_text(new, encoding="utf-8"))
    for name in re.findall(r"\(docs/([\w-]+)\.png\)", new):
        if (RESULTS / f"{name}.json").exists():
            report.plot(report.load(RESULTS / f"{name}.json"), ROOT / "docs" / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
