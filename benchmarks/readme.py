"""Writes the figures of README.md and docs from the reports in benchmarks/results.

    python benchmarks/readme.py          rewrites the pages between their markers and draws docs/*.png
    python benchmarks/readme.py --check  exit code 1 where a page is not what the reports say

A section between ``<!-- NAME -->`` and ``<!-- /NAME -->`` belongs to this program. `SECTIONS` says what writes it.
A ratio is PyTorch's time over ours.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import curves

from upconv.bench import plots, report, tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/benchmarks.md", "docs/founding-models.md")

Row = Mapping[str, Any]


# --- reading ---------------------------------------------------------------------------------------------------------


def load(stem: str) -> dict[str, Any]:
    """A report as it is in its file, by the name of the file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{stem}.json").read_text(encoding="utf-8"))
    return found


def mean(rows: Sequence[Row], key: str = "ratio") -> float:
    """The geometric mean of the rows' ratios, but for rows that failed."""
    return report.geometric_mean([row[key] for row in rows if row.get(key) is not None])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: int) -> str:
    """A table of Markdown, with numbers from the column ``numeric`` on."""
    rule = ["---"] * numeric + ["---:"] * (len(heads) - numeric)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def of(found: Mapping[str, Any], heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: int) -> str:
    """A table with the conditions of its report."""
    return f"{table(heads, rows, numeric)}\n\n{tables.conditions(found)}."


def times(ratio: float | None) -> str:
    """A ratio as `tables` has it."""
    return "failed" if ratio is None else tables.times(ratio)


# --- every report in a line ------------------------------------------------------------------------------------------

PASSES = {
    "fwd": "Forward", "grad-input": "Gradient for the input", "grad-weight": "Gradient for the weight",
    "step": "Forward and gradients",
}  # fmt: skip
TRAINED = {"ratio": "", "convolutions_ratio": ", plain convolutions too", "compile_ratio": ", by `torch.compile`"}
LAYOUTS = {"nchw": "NCHW", "channels_last": "channels_last"}
DEVICES = ("h200", "h100", "cpu")
WHATS = ("training", "compiled", "exported", "frozen", "conv-", "")
"""How reports' names begin, and what is in them: models ahead of layers."""


Line = tuple[str, list[str]]
"""The device with its versions, and the cells of a line of the table of all reports."""


def lines() -> Iterator[Line]:
    """Every report that compares speeds with PyTorch's."""
    stems = [str(path.relative_to(RESULTS).with_suffix("")) for path in RESULTS.rglob("*.json")]

    def rank(stem: str) -> tuple[int, int, str]:
        device = next(i for i, name in enumerate(DEVICES) if name in stem)
        return device, next(i for i, name in enumerate(WHATS) if name in stem), stem

    found = {stem: load(stem) for stem in stems}
    newest = [row for _, row in compiled_rows()]
    for stem in stems:
        if stem.startswith("compiled/"):
            found[stem]["rows"] = [row for row in found[stem]["rows"] if row in newest]
    for stem in sorted((stem for stem in stems if found[stem].get("kind") in TITLED), key=rank):
        yield from _lines(stem, found[stem])


TITLED = (*report.KINDS, "neighbours")


def compiled_rows() -> list[tuple[dict[str, Any], Row]]:
    """Of every compiled model, layout and pass the newest row, with its report; by name."""
    found = sorted((load(f"compiled/{path.stem}") for path in RESULTS.glob("compiled/*.json")), key=lambda r: r["when"])
    newest = {row["case"]: (each, row) for each in found for row in each["rows"] if row.get("compile_ms")}
    return [newest[case] for case in sorted(newest)]


def _lines(stem: str, found: Mapping[str, Any]) -> Iterator[Line]:
    rows: list[dict[str, Any]] = found["rows"]
    commit, kind = found["commit"][:7], found["kind"]
    weights = found.get("weights", "each call")
    older = Counter(row["commit"][:7] for row in rows if "commit" in row)
    at = commit + "".join(f", {count} of {of}" for of, count in older.items())

    def line(what: str, packed: str, mine: Sequence[Row], key: str = "ratio") -> Iterator[Line]:
        """Rows that are summed up, if there are some; those that PyTorch's own operator computes only count."""
        ratios = {_name(row, rows): row[key] for row in mine if row.get("engine") != "torch" and row.get(key)}
        if ratios:
            lowest = min(ratios, key=lambda name: float(ratios[name]))
            below = [f"{name} {times(ratio)}" for name, ratio in ratios.items() if ratio < 1]
            count = f"{len(ratios)} of {len(mine)}" if len(ratios) < len(mine) else str(len(mine))
            yield tables.where(found), [
                f"[{stem}](../benchmarks/results/{stem}.json)", what, packed, count,
                times(report.geometric_mean([*ratios.values()])), f"{lowest} {times(ratios[lowest])}",
                ", ".join(below) or "none", at, found["when"][:10],
            ]  # fmt: skip

    if kind == "training":
        for pass_, what in (("step", "Training steps"), ("fwd", "Inference")):
            for key, how in TRAINED.items():
                packed = "each step" if pass_ == "step" else "each call"
                yield from line(f"{what} of models{how}", packed, [row for row in rows if row["pass"] == pass_], key)
    elif kind == "exported":
        yield from line("Exported files of KernelBench's layers", weights, rows)
    elif kind == "neighbours":
        beside = "quiet" if found["neighbours"] == "quiet" else "other processes on all cores"
        for pass_ in ("fwd", "step"):
            what = f"{PASSES[pass_]}, float32, {beside}"
            yield from line(what, weights, [row for row in rows if row["pass"] == pass_])
    else:
        yield from line(_title(rows), "none" if rows[0]["pass"] == "grad-weight" else weights, rows)
        yield from line(_title(rows), "frozen", rows, "frozen_ratio")


def _title(rows: Sequence[Row]) -> str:
    row = rows[0]
    subject = "Plain convolutions, forward and gradients" if row["suite"] == "convolutions" else PASSES[row["pass"]]
    if row["pass"] == "step" and row["suite"] != "convolutions":
        subject += " of 1-D and 3-D layers"
    kind = {"tf32": "float32 as TF32", "ieee": "float32 as IEEE"}.get(row["precision"], row["dtype"])
    layouts = {row["layout"] for row in rows}
    return f"{subject}, {kind}, {LAYOUTS[row['layout']] if len(layouts) == 1 else 'both layouts'}"


def _name(row: Row, rows: Sequence[Row]) -> str:
    """A row's case; with its layout where its report has both and the case does not say it."""
    both = len({other.get("layout") for other in rows}) > 1
    return f"{row['case']} {row['layout']}" if both and row["layout"] not in row["case"] else str(row["case"])


def reports() -> str:
    """A table for each device with its versions, and a line for each report."""
    heads = ["report", "what", "weights", "rows", "mean", "lowest", "below PyTorch", "commit", "date"]
    by_device: dict[str, list[list[str]]] = {}
    for where, cells in lines():
        by_device.setdefault(where, []).append(cells)
    return "\n\n".join(f"**{where}**\n\n{table(heads, mine, len(heads))}" for where, mine in by_device.items())


# --- README ----------------------------------------------------------------------------------------------------------

KINDS = ("tf32", "bf16")
"""Of the columns float32 and bfloat16, in the reports' names."""
MODELS = {"dcgan": "DCGAN", "unet": "U-Net", "vae": "VAE decoder", "hifigan": "HiFi-GAN generator"}
CPU_MODELS = {"GAN1": "GANs", "UNET": "U-Nets", "HiFi-GAN": "HiFi-GAN"}
"""Cases of the CPU's suite that stand for a kind of model."""


def gains() -> str:
    """What is gained by kind of model and device: README's table."""
    heads = [
        "what", "device", "float32", "bfloat16", "float32, `convolutions=True`",
        "bfloat16, `convolutions=True`", "slower than PyTorch",
    ]  # fmt: skip
    return table(heads, [*_models(), *_layers(), *_cpu()], 2)


def _models() -> Iterator[list[str]]:
    keys = ("ratio", "convolutions_ratio")
    steps = {row["case"]: row for row in load("h200-training")["rows"]}
    for name, title in MODELS.items():
        both = [steps[f"{name} {dtype}"][key] for key in keys for dtype in ("fp32", "bf16")]
        yield [f"{title}, training step", "H200", *map(times, both), _slower(both)]
    steps = {row["case"]: row for row in load("h100-training")["rows"]}
    pairs = [[steps[f"{name} {dtype}"] for name in MODELS] for dtype in ("fp32", "bf16")]
    means = [mean(rows, key) for key in keys for rows in pairs]
    both = [row[key] for rows in pairs for row in rows for key in keys]
    yield ["These four, mean", "H100", *map(times, means), _slower(both)]
    rows = [row for _, row in compiled_rows()]
    halves = [[row for row in rows if row["case"].startswith("kb") == level2] for level2 in (True, False)]
    means, slower = (
        [mean(half, "compile_ratio") for half in halves],
        _slower([row.get("compile_ratio") for row in rows]),
    )
    yield ["Models by `torch.compile`, mean", "H200", *map(times, means), "", "", slower]


def _layers() -> Iterator[list[str]]:
    count = len(load(f"h200-frozen-{KINDS[0]}")["rows"])
    for title, stems, key in (
        (f"One layer, forward ({count} layers)", ("frozen-",), "ratio"),
        ("The same, weights frozen", ("frozen-",), "frozen_ratio"),
        ("One layer, forward, channels_last, weights kept", ("cl-",), "ratio"),
        ("One layer, its gradients, both layouts, weights kept", ("gi-", "gi-cl-", "gw-", "gw-cl-"), "ratio"),
    ):
        pairs = [[row for stem in stems for row in load(f"h200-{stem}{kind}")["rows"]] for kind in KINDS]
        slower = _slower([row[key] for rows in pairs for row in rows])
        yield [title, "H200", *(times(mean(rows, key)) for rows in pairs), "", "", slower]


def _cpu() -> Iterator[list[str]]:
    rows = load("cpu-fwd")["rows"]
    ours = [row for row in rows if row["engine"] != "torch"]
    left = [title for case, title in CPU_MODELS.items() if not any(row["case"] == case for row in ours)]
    what = f"Grouped, dilated or few-channel layers ({len(ours)} of {len(rows)} rows)"
    yield [what, "CPU", times(mean(ours)), "", "", "", _slower([row["ratio"] for row in ours])]
    yield [f"Other layers, such as the wide ones of {', '.join(left)}", "CPU", "none: PyTorch's operator", *[""] * 4]


def _slower(ratios: Sequence[float | None]) -> str:
    below = [ratio for ratio in ratios if ratio is not None and ratio < 1]
    return f"{len(below)} of {len(ratios)}, lowest {times(min(below))}" if below else f"0 of {len(ratios)}"


# --- docs ------------------------------------------------------------------------------------------------------------


def layers() -> str:
    """Forwards of single layers: TF32 and bfloat16 side by side, weights packed at each call and frozen."""
    kinds = {name: load(f"h200-frozen-{stem}") for name, stem in zip(("TF32", "bf16"), KINDS)}
    columns = {"PyTorch ms": "torch_ms", "upconv ms": "ours_ms", "ratio": "ratio", "frozen": "frozen_ratio"}
    cells: dict[str, list[str]] = {}
    for found in kinds.values():
        for row in found["rows"]:
            line = cells.setdefault(row["case"], [row["case"], row["layer"]])
            for head, key in columns.items():
                in_ms = head.endswith("ms") and row[key] is not None
                line.append(f"{row[key]:.3f}" if in_ms else times(row[key]))
    heads = ["case", "layer", *(f"{name} {head}" for name in kinds for head in columns)]
    return of(kinds["TF32"], heads, list(cells.values()), 2)


def rounding() -> str:
    """The layers whose TF32 result differs from PyTorch's by more than KernelBench's tolerance."""
    ieee = {row["case"]: row for row in load("h200-ieee")["rows"]}
    found = load("h200-tf32")
    cells = []
    for row in found["rows"]:
        if row["tolerance_used"] > 1:
            exact = ieee[row["case"]]
            errors = [f"{row[key]:.1e}" for key in ("rel_error", "torch_rel_error")]
            shares = [f"{of['tolerance_used']:.2g}" for of in (row, exact)]
            cells.append([row["case"], *errors, shares[0], times(row["ratio"]), shares[1], times(exact["ratio"])])
    heads = ["case", "TF32: upconv's error", "PyTorch's error", "of tolerance", "ratio", "IEEE: of tolerance", "ratio"]
    return of(found, heads, cells, 1)


def as_shown(stem: str) -> str:
    """The table that the bench shows of a report."""
    found = report.load(RESULTS / f"{stem}.json")
    shown = [column for column in tables.columns(found) if column.head != "engine"]
    cells = [[str(column.text(row)) for column in shown] for row in found["rows"]]
    words = sum(column.words for column in shown)
    summary = [f"{line}." for line in tables.summary(found)]
    return "\n\n".join([*summary, of(found, [column.head for column in shown], cells, words)])


def compiled() -> str:
    """Models by ``torch.compile``, without upconv and with it."""
    cells = []
    for each, row in compiled_rows():
        ms = [f"{row[key]:.2f}" if row.get(key) else "" for key in ("compile_ms", "compile_ours_ms")]
        ratio = times(row.get("compile_ratio"))
        cells.append([row["case"], *ms, ratio, each["commit"][:7], each["when"][:10]])
    heads = ["model", "compiled ms", "compiled, with upconv ms", "ratio", "commit", "date"]
    return f"{table(heads, cells, 1)}\n\n{tables.where(compiled_rows()[0][0])}."


def host() -> str:
    """What a call costs the host."""
    found, cells = load("h200-host"), []
    for row in found["rows"]:
        us = (row["torch_us"], row["ours_us"], row["ours_us"] - row["torch_us"])
        cells.append([row["dtype"], row["mode"], *(f"{value:.1f}" for value in us)])
    return of(found, ["dtype", "mode", "PyTorch us", "upconv us", "added us"], cells, 2)


def shapes() -> str:
    """First calls on new sizes."""
    heads = {
        "input": "shape", "PyTorch first ms": "torch_ms", "tuned first ms": "torch_benchmark_ms",
        "upconv first ms": "ours_ms", "compiled": "ours_compiled", "PyTorch again ms": "torch_again_ms",
        "upconv again ms": "ours_again_ms",
    }  # fmt: skip
    found = load("h200-shapes")
    cells = [[row[key] if key == "shape" else f"{row[key]:.3g}" for key in heads.values()] for row in found["rows"]]
    return of(found, list(heads), cells, 1)


def cold() -> str:
    """How long NVRTC takes for the kernels that a first call waits for."""
    found = load("h200-cold")
    cells = []
    for pass_, key in (("fwd", "fwd_s"), ("grad-input", "grad_input_s"), ("grad-weight", "grad_weight_s")):
        values = [row[key] for row in found["rows"] if row[key] is not None]
        cells.append([PASSES[pass_], f"{median(values):.2g}", f"{max(values):.2g}"])
    return of(found, ["pass", "median s", "longest s"], cells, 1)


def cpu() -> str:
    """Speed-ups on a CPU by layer, a column for each layout; a dash where PyTorch's own operator runs."""
    found = load("cpu-fwd")
    layouts = list(dict.fromkeys(row["layout"] for row in found["rows"]))
    cells: dict[str, list[str]] = {}
    for row in found["rows"]:
        line = cells.setdefault(row["case"], [row["case"], row["layer"].split(" on ")[0], *[""] * len(layouts)])
        line[2 + layouts.index(row["layout"])] = "–" if row["engine"] == "torch" else times(row["ratio"])
    heads = ["case", "layer", *(LAYOUTS[layout] for layout in layouts)]
    return of(found, heads, list(cells.values()), 2)


def other_sizes() -> str:
    """How files do at other sizes than they were planned for, beside the library, which plans each anew."""
    found = load("exported/h200-sizes")
    timed: list[Row] = [row for row in found["rows"] if row.get("library_ratio")]
    rows = []
    for size in dict.fromkeys(row["size"] for row in timed):
        cells = [size]
        for run in ("forward", "step"):
            mine = [row for row in timed if (row["size"], row["run"]) == (size, run)]
            lowest = min(mine, key=lambda row: float(row["library_ratio"]))
            cells += [times(mean(mine, "library_ratio")), f"{lowest['case']} {times(lowest['library_ratio'])}"]
        rows.append(cells)
    return of(found, ["size", "forward", "lowest", "forward and gradients", "lowest"], rows, 1)


def checkouts() -> str:
    """How commits of upconv did beside others; a ratio is the other's time over the commit's."""
    rows = []
    for path in sorted((RESULTS / "checkouts").glob("*.json")):
        found = load(f"checkouts/{path.stem}")
        timed: list[Row] = [row for row in found["rows"] if "ratio" in row]
        lowest = min(timed, key=lambda row: float(row["ratio"]))
        link = f"[{path.stem}](../benchmarks/results/checkouts/{path.name})"
        counts = [str(len(timed)), times(mean(timed)), f"{lowest['row']} {times(lowest['ratio'])}"]
        rows.append([link, found["commit"][:7], found["old"][:7], *counts])
    return table(["report", "commit", "against", "rows", "mean", "lowest"], rows, 3)


# --- the pages -------------------------------------------------------------------------------------------------------


SECTIONS: dict[str, Callable[[], str]] = {
    "gains": gains, "reports": reports, "layers": layers, "rounding": rounding, "cold": cold, "cpu": cpu,
    "compiled": compiled, "host": host, "shapes": shapes,
    "training": lambda: as_shown("h200-training"),
    "exported": lambda: as_shown("h200-exported"),
    "sizes": other_sizes,
    "checkouts": checkouts,
    "curves": lambda: curves.stated(load("h200-curves")),
}  # fmt: skip


def rewritten(text: str) -> str:
    """A page with its sections made anew.

    Raises:
        KeyError: a marker that names no section.
        OSError: a report that is not there.
    """

    def section(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{SECTIONS[match[1]]()}\n<!-- /{match[1]} -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?\n<!-- /\1 -->", section, text, flags=re.DOTALL)


def draw() -> None:
    """Draws the pictures of the pages."""
    shown = [report.load(RESULTS / f"h200-frozen-{kind}.json") for kind in KINDS]
    for found in shown:  # the layers of KernelBench and those best known: all of them are too many for a picture
        found["rows"] = [row for row in found["rows"] if row["suite"] == "cuda"]
    plots.plot(shown, ROOT / "docs" / "h200-fwd.png")
    plots.plot([report.load(RESULTS / "cpu-fwd.json")], ROOT / "docs" / "cpu-fwd.png")
    curves.draw(load("h200-curves"), ROOT / "docs" / "training-curves.png")


def main() -> int:
    check, stale = "--check" in sys.argv[1:], False
    for page in PAGES:
        was = (ROOT / page).read_text(encoding="utf-8")
        new = rewritten(was)
        if check and new != was:
            print(f"{page} differs from benchmarks/results; run: make readme")
            stale = True
        elif not check:
            (ROOT / page).write_text(new, encoding="utf-8")
    if not check:
        draw()
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
