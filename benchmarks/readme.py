"""Writes the README's tables and pictures from the reports in benchmarks/results, the only source of its figures.

    python benchmarks/readme.py          rewrites README.md and docs/benchmarks.md between their markers, and docs/*.png
    python benchmarks/readme.py --check  exit code 1 when one of them is not what the reports say
    python benchmarks/readme.py --targets  prints which targets are met; exit code 1 unless all are

A section between ``<!-- NAME -->`` and ``<!-- /NAME -->`` belongs to this program; NAME is the stem of a report,
``h200-summary``, ``h100-summary`` (the same of an H100's reports, beside the H200's targets), ``h200-commits`` (of
which commit reports are), or ``h200-picture``, which is empty until there are reports to draw. Of reports with targets
(targets.json) there is a table per group of cases. A target is PyTorch's time over ours: of every case, of the group's
geometric mean (``mean``), and of our error over PyTorch's (``error``).
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import curves

from upconv.bench import exported, latency, plots, report
from upconv.bench.files import publish
from upconv.bench.run import Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = ROOT / "benchmarks" / "targets.json"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
LATENCY = {f"h200-{kind}" for kind in latency.KINDS}
TRAINING = "h200-training"
CONVOLUTIONS = ", convolutions too"
"""Behind a training case: `upconv.accelerate` with plain convolutions."""
EXPORTED = "h200-exported"
PLANNING = "planning"  # of benchmarks/planning.py, which no page has
CURVES = curves.REPORT.stem
SUMMARY = "h200-summary"
COMMITS = "h200-commits"
KINDS = {
    "forwards": "(cl-)?(tf32|bf16|fp16|ieee)",
    "gradients for the input": "gi-.+",
    "gradients for the weight": "gw-.+",
    "steps of 1-D and 3-D layers": "step-.+",
    "plain convolutions": "conv-.+",
    "exported files": "exported",
    "frozen weights": "frozen-.+",
    "whole training steps": "training",
    "training curves": "curves",
    "the host's time": "host",
    "first calls on new sizes": "shapes",
    "cold kernels": "cold",
}
"""The kinds of reports of an H200, by what follows ``h200-`` in their stems."""
PICTURE = "h200-fwd"
"""The stem of the picture that is drawn from `PICTURED`, not from a report of its own name."""
PICTURED = ("h200-tf32", "h200-bf16")
PAGES = ("README.md", "docs/benchmarks.md")
ABSENT = "Not measured yet."


# --- reports without targets -----------------------------------------------------------------------------------------


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


def unjudged(found: report.Report) -> str:
    """A report without targets: speed-ups by case, or, where frozen weights were measured, times with and without."""
    return frozen(found) if any(row["frozen_ms"] is not None for row in found["rows"]) else pivot(found)


def frozen(found: report.Report) -> str:
    """A line a row: PyTorch's time, ours with packing at each call and with `upconv.freeze`, and both speed-ups."""
    heads = ["case", "layer", "dtype", "PyTorch ms", "upconv ms", "frozen ms", "ratio", "frozen ratio", "engine"]
    numeric = {"PyTorch ms", "upconv ms", "frozen ms", "ratio", "frozen ratio"}
    lines = [_line(heads), _line(["---:" if head in numeric else "---" for head in heads])]
    for row in found["rows"]:
        kept = ["", ""] if row["frozen_ms"] is None else [f"{row['frozen_ms']:.3f}", f"{row['frozen_ratio']:.2f}x"]
        theirs, ours, ratio = _times(row)
        kind = f"{DTYPES[row['dtype']]} {row['layout']}"
        lines.append(_line([row["case"], row["layer"], kind, theirs, ours, kept[0], ratio, kept[1], row["engine"]]))
    means = report.summarise(found["rows"])
    closing = (
        f"{report.conditions(found)}. Geometric means over the {means['ours']} rows that upconv computes: "
        f"{means['mean_of_ours']:.2f}x, frozen {means['frozen'] or 1.0:.2f}x."
    )
    return "\n".join([*lines, "", closing])


def compiled(found: Mapping[str, Any]) -> str:
    """A line a model: its time by ``torch.compile``, without upconv and with it."""
    heads = ["model", "layout", "pass", "compiled ms", "compiled, with upconv ms", "ratio"]
    lines = [_line(heads), _line(["---"] * 3 + ["---:"] * 3)]
    for row in found["rows"]:
        times = [f"{row[key]:.2f}" for key in ("compiled_ms", "compiled_with_upconv_ms")]
        lines.append(_line([row["model"], row["layout"], row["mode"], *times, f"{row['ratio']:.2f}x"]))
    versions = f"PyTorch {found['versions']['torch']} · cuDNN {found['versions']['cudnn']}"
    return "\n".join([*lines, "", f"{found['device']} · {versions} · {found['commit'][:7]} · {found['date']}."])


def _speedup(row: Row | None) -> str:
    if row is None:
        return ""
    if row["ours_ms"] is None:
        return "wrong"
    return "–" if row["engine"] == "torch" else f"{row['ratio']:.2f}x"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# --- reports with targets --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Cases that are judged together, with their rows as far as they were measured."""

    title: str
    targets: dict[str, float]
    """The least ratio of each case; empty for a group that has none."""
    mean_target: float | None
    error_target: float | None
    """The most that our relative error may be, as a multiple of PyTorch's."""
    rows: dict[str, Row]
    peak: bool = False
    """Whether a case also misses where its peak memory is above PyTorch's."""

    @property
    def mean(self) -> float:
        """The geometric mean over the right rows; where PyTorch's own operator runs the ratio is 1."""
        return report.geometric_mean([row["ratio"] for row in self.rows.values() if row["ratio"] is not None])

    @property
    def missed(self) -> list[str]:
        """The cases that were not measured, are wrong, are slower than their target or less exact."""
        return [case for case in self.targets if not self._met(case)]

    def _met(self, case: str) -> bool:
        row = self.rows.get(case)
        if row is None or row["ratio"] is None or row["ratio"] < self.targets[case]:
            return False
        if self.peak and (row["ours_peak_bytes"] or 0) > (row["torch_peak_bytes"] or 0):
            return False
        if self.error_target is None:
            return True
        ours, theirs = row["rel_error"], row["torch_rel_error"]
        return ours is not None and theirs is not None and ours <= self.error_target * theirs

    @property
    def mean_met(self) -> bool:
        """Whether the mean reaches its target, with every case measured and right."""
        whole = all(case in self.rows and self.rows[case]["ratio"] is not None for case in self.targets)
        return self.mean_target is None or (whole and self.mean >= self.mean_target)

    @property
    def met(self) -> bool:
        """Whether every target is met."""
        return not self.missed and self.mean_met


def groups(name: str, rows: Sequence[Row]) -> list[Group]:
    """A report's rows by the groups of its targets, then those that have none."""
    found, rest = [], {row["case"]: row for row in rows}
    for given in _targets()[_judge(name)]:
        mine = {case: rest.pop(case) for case in given["cases"] if case in rest}
        peak = given.get("peak", False)
        found.append(Group(given["title"], given["cases"], given.get("mean"), given.get("error"), mine, peak))
    if rest:
        found.append(Group("Without targets", {}, None, None, rest))
    return found


def _targets() -> dict[str, list[dict[str, Any]]]:
    loaded: dict[str, list[dict[str, Any]]] = json.loads(TARGETS.read_text(encoding="utf-8"))
    return loaded


def _judge(name: str) -> str:
    """The report by whose targets one is judged: an H100's by the H200's."""
    return name.replace("h100-", "h200-", 1)


def judged(name: str, found: report.Report) -> str:
    """A table per group: times, ratio and target, roof, engine; what was missed; where it was measured."""
    parts = []
    for group in groups(name, found["rows"]):
        heads = ["case", "layer", "PyTorch ms", "upconv ms", "ratio", "target", "roof ms", "of roof", "engine"]
        if not group.targets:
            heads.remove("target")
        if group.error_target is not None:
            heads.append("error, PyTorch's")
        numeric = {"PyTorch ms", "upconv ms", "ratio", "roof ms", "of roof"}
        lines = [f"**{group.title}**", "", _line(heads)]
        lines.append(_line(["---:" if head in numeric else "---" for head in heads]))
        for case in [*group.targets, *(case for case in group.rows if case not in group.targets)]:
            row = group.rows.get(case)
            cells = [case, "" if row is None else row["layer"], *_times(row)]
            if group.targets:
                mark = "" if row is None else "missed" if case in group.missed else "met"
                cells.append(f"{group.targets[case]:g}x {mark}".strip())
            cells += _roof(row)
            if group.error_target is not None:
                cells.append("" if row is None else _errors(row))
            lines.append(_line(cells))
        parts.append("\n".join([*lines, "", _verdict(group)]))
    rates = found["ceilings"]["matmul_flops_per_s"]
    roof = ", ".join(f"{precision} matmul {report.si(rate, 'FLOP/s')}" for precision, rate in rates.items())
    copy = report.si(found["ceilings"]["copy_bytes_per_s"], "B/s")
    parts.append(f"{report.conditions(found)}{_older(found)}. Roof: copy {copy}, {roof}.")
    return "\n\n".join(parts)


def _older(found: report.Report) -> str:
    """Which rows of a report are of earlier commits, by how many."""
    commits = Counter(row["commit"][:7] for row in cast(list[dict[str, Any]], found["rows"]) if "commit" in row)
    of = ", ".join(f"{count} of {commit}" for commit, count in commits.items())
    return f" (of {len(found['rows'])} rows {of}, measured then)" if of else ""


def _times(row: Row | None) -> list[str]:
    if row is None:
        return ["", "", "not measured"]
    if row["ours_ms"] is None or row["torch_ms"] is None:
        return ["", "", "wrong" if (row["failure"] or "").startswith("wrong") else "failed"]
    return [f"{row['torch_ms']:.3f}", f"{row['ours_ms']:.3f}", f"{row['ratio']:.2f}x"]


def _roof(row: Row | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    share = "" if row["percent_of_roof"] is None else f"{row['percent_of_roof']:.0f}%"
    return [f"{row['roof_ms']:.3f}", share, row["engine"]]


def _errors(row: Row) -> str:
    return ", ".join("–" if error is None else f"{error:.1e}" for error in (row["rel_error"], row["torch_rel_error"]))


def _verdict(group: Group) -> str:
    text = f"Geometric mean {group.mean:.2f}x"
    if group.mean_target is not None:
        text += f" (target {group.mean_target:g}x: {'met' if group.mean_met else 'missed'})"
    if group.targets:
        text += f"; {len(group.targets) - len(group.missed)} of {len(group.targets)} cases meet their targets"
        text += f", missed: {', '.join(group.missed)}" if group.missed else ""
    if group.error_target is not None:
        text += f". A case also misses when its error is over {group.error_target:g} times PyTorch's"
    used = {case: row["tolerance_used"] for case, row in group.rows.items() if row["tolerance_used"] is not None}
    if used:
        worst = max(used, key=lambda case: used[case] or 0.0)
        text += f". Largest difference from PyTorch's result: {used[worst]:.2g} of KernelBench's tolerance ({worst})"
    return text + "."


def summary(gpu: str = "h200") -> str:
    """One line a group of every report with targets that is there, of a GPU."""
    heads = ["group", "geometric mean", "target", "cases that meet their targets", "lowest"]
    lines = [_line(heads), _line(["---", "---:", "---", "---", "---"])]
    for name in (target.replace("h200", gpu, 1) for target in _targets()):
        if not (RESULTS / f"{name}.json").exists():
            continue
        for group in groups(name, measured_rows(name)):
            if not group.targets or (not group.rows and all(case.endswith(CONVOLUTIONS) for case in group.targets)):
                continue  # reports from before convolutions
            target = ""
            if group.mean_target is not None:
                target = f"{group.mean_target:g}x {'met' if group.mean_met else 'missed'}"
            met = f"{len(group.targets) - len(group.missed)} of {len(group.targets)}"
            timed = [row for row in group.rows.values() if row["ratio"] is not None]
            lowest = min(timed, key=lambda row: row["ratio"] or 0.0, default=None)
            least = "" if lowest is None else f"{lowest['case']} {lowest['ratio']:.2f}x"
            lines.append(_line([group.title, f"{group.mean:.2f}x", target, met, least]))
    return "\n".join(lines) if len(lines) > 2 else ABSENT


def trained(found: latency.Latency) -> str:
    """The table of training steps, with what was to be reached."""
    judged_by = {case: group for group in groups(TRAINING, _rows(found)) for case in group.targets}

    def target(row: Mapping[str, Any]) -> str:
        marks = []
        for case in (row["case"], f"{row['case']}{CONVOLUTIONS}"):
            group = judged_by.get(case)
            if group is not None and case in group.rows:
                marks.append(f"{group.targets[case]:g}x {'missed' if case in group.missed else 'met'}")
        return ", ".join(marks)

    shown = [*latency.columns(found), ("target", target)]
    lines = [_line([head for head, _ in shown]), _line(["---" for _ in shown])]
    lines += [_line([text(row) for _, text in shown]) for row in found["rows"]]
    verdicts = [
        f"{group.title}: {_verdict(group)}" for group in groups(TRAINING, _rows(found)) if group.targets and group.rows
    ]
    closing = f"A case also misses when its peak memory is above PyTorch's. {report.conditions(found)}."
    return "\n\n".join(["\n".join(lines), *verdicts, closing])


def files(found: exported.Exported) -> str:
    """The table of the exported files under KernelBench's rules, with what was to be reached."""
    by_case = {row["case"]: row for row in found["rows"]}
    judged_by = [group for group in groups(EXPORTED, _rows(found)) if group.targets]
    shown = exported.columns(found)
    lines = [_line([*(head for head, _ in shown), "target"])]
    lines.append(_line(["---" if head in ("case", "layer") else "---:" for head, _ in shown] + ["---"]))
    for group in judged_by:
        for case, target in group.targets.items():
            row = by_case.get(case)
            if row is not None:
                mark = "missed" if case in group.missed else "met"
                lines.append(_line([*(text(row) for _, text in shown), f"{target:g}x {mark}"]))
    verdicts = [f"{group.title}: {_verdict(group)}" for group in judged_by]
    closing = f"{exported.summary(found)}. {report.conditions(found)}."
    return "\n\n".join(["\n".join(lines), *verdicts, closing])


def _rows(found: latency.Latency | exported.Exported) -> list[Row]:
    """Rows of training and of exported files as far as `Group` reads them; of a file that is wrong without a ratio.

    A training step with plain convolutions has a row of its own.
    """
    blank = {"rel_error": None, "torch_rel_error": None, "tolerance_used": None}
    plain: Any = [{**blank, **row} for row in found["rows"]]
    for row in found["rows"]:
        if row.get("convolutions_ratio") is not None:
            ratio, peak = row["convolutions_ratio"], row["convolutions_peak_bytes"]
            case = f"{row['case']}{CONVOLUTIONS}"
            plain.append({**blank, **row, "case": case, "ratio": ratio, "ours_peak_bytes": peak})
    rows: list[Row] = plain
    return rows


def measured_rows(name: str) -> list[Row]:
    """The rows of a report with targets; none of one that does not exist."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    if _judge(name) == EXPORTED:
        return _rows(exported.load(path))
    return _rows(latency.load(path)) if _judge(name) == TRAINING else report.load(path)["rows"]


def waiting(found: latency.Latency) -> str:
    """The table of a report of `upconv.bench.latency`."""
    shown = latency.columns(found)
    lines = [_line([head for head, _ in shown]), _line(["---" for _ in shown])]
    lines += [_line([text(row) for _, text in shown]) for row in found["rows"]]
    closing = f"{latency.title(found).capitalize()}. {report.conditions(found)}."
    return "\n".join([*lines, "", closing])


def commits() -> str:
    """Of which commit each kind of report is; where one kind has several, which report is of which."""
    parts = []
    for kind, pattern in KINDS.items():
        stems: dict[str, list[str]] = {}
        for path in sorted(RESULTS.glob("h200-*.json")):
            if re.fullmatch(f"h200-{pattern}", path.stem):
                commit: str | None = json.loads(path.read_text(encoding="utf-8"))["commit"]
                short = "an unknown commit" if commit is None else commit[:7] + commit[40:]  # what may follow: -dirty
                stems.setdefault(short, []).append(f"`{path.stem}`")
        if len(stems) > 1:
            each = (f"{commit} ({', '.join(of)})" for commit, of in stems.items())
            parts.append(f"{kind} {', '.join(each)}")
        elif stems:
            parts.append(f"{kind} {next(iter(stems))}")
    text = f"Reports by the commit that they were measured of: {'; '.join(parts)}."
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False) if parts else ABSENT


def picture() -> str:
    """The README's link to the picture of the roofs; empty while there is nothing to draw."""
    if not any((RESULTS / f"{stem}.json").exists() for stem in PICTURED):
        return ""
    return f"![Share of the roof and speed-up over PyTorch of every layer, H200](docs/{PICTURE}.png)"


# --- the pages -------------------------------------------------------------------------------------------------------


def sections() -> Iterator[tuple[str, str]]:
    """Every section's name and content; of a report that does not exist, that it was not measured."""
    judgeable = _targets()
    for name in sorted(
        {path.stem for path in RESULTS.glob("*.json")} - {PLANNING} | set(judgeable) | LATENCY | {CURVES}
    ):
        path, kind = RESULTS / f"{name}.json", _judge(name)
        if not path.exists():
            yield name, ABSENT
        elif kind == CURVES:
            yield name, curves.stated(curves.load(path))
        elif kind == TRAINING:
            yield name, trained(latency.load(path))
        elif kind == EXPORTED:
            yield name, files(exported.load(path))
        elif kind in LATENCY:
            yield name, waiting(latency.load(path))
        else:
            found = report.load(path)
            yield name, judged(name, found) if kind in judgeable else unjudged(found)
    yield SUMMARY, summary()
    yield "h100-summary", summary("h100")
    yield COMMITS, commits()
    yield "h200-picture", picture()
    graphs = RESULTS / "compiled" / "h200.json"
    yield "h200-compiled", compiled(json.loads(graphs.read_text(encoding="utf-8"))) if graphs.exists() else ABSENT


def rewritten(text: str) -> str:
    """A page with every section that a report stands behind made anew."""
    for name, content in sections():
        section = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(\n<!-- /{re.escape(name)} -->)", re.DOTALL)
        text = section.sub(lambda match, content=content: f"{match[1]}{content}{match[2]}", text)  # type: ignore[misc]
    return text


def draw(text: str) -> None:
    """Draws the pictures that a page links as the README does, as far as there are reports for them."""
    for name in re.findall(r"\(docs/([\w-]+)\.png\)", text):
        target = ROOT / "docs" / f"{name}.png"
        if name == PICTURE:
            paths = [RESULTS / f"{stem}.json" for stem in PICTURED]
            shown = [report.load(path) for path in paths if path.exists()]
            if shown:
                plots.plot_roofs(shown, target)
        elif (RESULTS / f"{name}.json").exists():
            plots.plot(report.load(RESULTS / f"{name}.json"), target)


def main() -> int:
    if "--targets" in sys.argv[1:]:
        found = []
        for name in _targets():
            for group in groups(name, measured_rows(name)):
                if group.targets:
                    found.append(group)
                    verdict = _verdict(group) if group.rows else ABSENT.lower()
                    print(f"{'met   ' if group.met else 'missed'} {group.title}: {verdict}")
        return int(not all(group.met for group in found))
    stale = False
    for page in PAGES:
        was = (ROOT / page).read_text(encoding="utf-8")
        new = rewritten(was)
        if "--check" not in sys.argv[1:]:
            publish(ROOT / page, lambda path, new=new: path.write_text(new, encoding="utf-8"))  # type: ignore[misc]
            draw(new)
            if f"]({curves.PICTURE.name})" in new:
                curves.draw(curves.load(RESULTS / f"{CURVES}.json"), curves.PICTURE)
        elif new != was:
            print(f"{page} differs from benchmarks/results; run: make readme")
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
