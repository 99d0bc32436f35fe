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
from upconv.bench.files import publish

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


def times(ratio: float | None) -> str:
    """``1.25x``; with a third digit where two would hide that a ratio is below 1."""
    if ratio is None:
        return "failed"
    return f"{ratio:.3f}x" if 0.995 <= ratio < 1 else f"{ratio:.2f}x"


# --- every report in a line ------------------------------------------------------------------------------------------

KEPT = frozenset({
    "39b22b3", "f3b6f8e", "cc56d63", "41efbe4", "b01cbc5", "85ae0f0", "58deefe", "4f7ef4a", "e960006", "e21f0f2",
})  # fmt: skip
"""Commits whose layers kept packed weights between calls without being asked. Later ones pack at each call."""
PASSES = {
    "fwd": "Forward", "grad-input": "Gradient for the input", "grad-weight": "Gradient for the weight",
    "step": "Forward and gradients",
}  # fmt: skip
TRAINED = {"ratio": "", "convolutions_ratio": ", plain convolutions too", "compile_ratio": ", by `torch.compile`"}
LAYOUTS = {"nchw": "NCHW", "channels_last": "channels_last"}


Line = tuple[str, list[str]]
"""The device with its versions, and the cells of a line of the table of all reports."""


def lines() -> Iterator[Line]:
    """Every report that compares speeds with PyTorch's and names its commit."""
    paths = (path for folder in ("", "cpu/", "compiled/") for path in RESULTS.glob(f"{folder}*.json"))
    for path in sorted(paths, key=_order):
        found, stem = json.loads(path.read_text(encoding="utf-8")), str(path.relative_to(RESULTS).with_suffix(""))
        rows = found.get("rows")
        if found.get("commit") and rows and "ratio" in rows[0]:
            yield from _lines(stem, found)


def _order(path: Path) -> tuple[int, int, str]:
    """By the device, then by the kind: models ahead of layers."""
    name = path.relative_to(RESULTS).as_posix()

    def rank(kinds: Sequence[str]) -> int:
        return next(i for i, kind in enumerate(kinds) if kind in name)

    return rank(("h200", "h100", "")), rank(("training", "compiled", "exported", "frozen", "conv-", "")), name


def _lines(stem: str, found: Mapping[str, Any]) -> Iterator[Line]:
    rows: list[dict[str, Any]] = found["rows"]
    commit, date = found["commit"][:7], (found.get("when") or found["date"])[:10]
    weights = "kept" if commit in KEPT else "each call"
    older = Counter(row["commit"][:7] for row in rows if "commit" in row)
    at = commit + "".join(f", {count} of {of}" for of, count in older.items())

    def line(what: str, packed: str, mine: Sequence[Row], key: str = "ratio") -> Line:
        """Rows that are summed up; those that PyTorch's own operator computes only count."""
        own = [row for row in mine if row.get("engine") != "torch" and row.get(key) is not None]
        ratios = {_name(row, rows): row[key] for row in own}
        lowest = min(ratios, key=lambda name: float(ratios[name]))
        below = [f"{name} {times(ratio)}" for name, ratio in ratios.items() if ratio < 1]
        count = f"{len(own)} of {len(mine)}" if len(own) < len(mine) else str(len(mine))
        return _where(found), [
            f"[{stem}](../benchmarks/results/{stem}.json)", what, packed, count, times(mean(own, key)),
            f"{lowest} {times(ratios[lowest])}", ", ".join(below) or "none", at, date,
        ]  # fmt: skip

    if found.get("kind") == "training":
        for pass_, what in (("step", "Training steps"), ("fwd", "Inference")):
            mine = [row for row in rows if row.get("pass", "step") == pass_]
            packed = "each step" if pass_ == "step" else "each call"
            for key, how in TRAINED.items():
                if any(row.get(key) for row in mine):
                    yield line(f"{what} of models{how}", packed, mine, key)
    elif found.get("kind") == "exported":
        yield line("Exported files of KernelBench's layers", weights, rows)
    elif stem.startswith("compiled"):
        yield line("Models by `torch.compile`, with upconv and without", weights, rows)
    elif stem.startswith("cpu/"):
        load_ = "quiet" if found["neighbours"] == "quiet" else "other processes on all cores"
        for pass_ in ("fwd", "step"):
            mine = [row for row in rows if row["pass"] == pass_]
            yield line(f"{PASSES[pass_]}, float32, {load_}", "each call", mine)
    else:
        what = _title(rows)
        yield line(what, "none" if rows[0]["pass"] == "grad-weight" else weights, rows)
        if any(row.get("frozen_ratio") for row in rows):
            yield line(what, "frozen", rows, "frozen_ratio")


def _title(rows: Sequence[Row]) -> str:
    row = rows[0]
    subject = "Plain convolutions, forward and gradients" if row["suite"] == "convolutions" else PASSES[row["pass"]]
    if row["pass"] == "step" and row["suite"] != "convolutions":
        subject += " of 1-D and 3-D layers"
    kind = {"tf32": "float32 as TF32", "ieee": "float32 as IEEE"}.get(row["precision"], row["dtype"])
    layouts = {row["layout"] for row in rows}
    return f"{subject}, {kind}, {LAYOUTS[row['layout']] if len(layouts) == 1 else 'both layouts'}"


def _name(row: Row, rows: Sequence[Row]) -> str:
    """A row's case; with what tells it from its report's other rows of that case."""
    differ = [key for key in ("layout", "mode") if len({other.get(key) for other in rows}) > 1]
    case: str = row["case"] if "case" in row else row["model"]
    return " ".join([case, *(row[key] for key in differ if row[key] not in case)])


def _where(found: Mapping[str, Any]) -> str:
    device, versions = found["device"], found["versions"]
    if isinstance(device, str):  # reports by programs of benchmarks/
        device = {"type": "cpu" if "threads" in found else "cuda", "name": device, "threads": found.get("threads")}
    if device["type"] == "cpu":
        return f"CPU ({device['name']}, {device['threads']} threads), PyTorch {versions['torch']}"
    return f"{device['name']}, PyTorch {versions['torch']}, cuDNN {versions['cudnn']}"


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
    rows = load("compiled/h200")["rows"]
    halves = [[row for row in rows if row["model"].startswith("kb") == level2] for level2 in (True, False)]
    slower = _slower([row["ratio"] for row in rows])
    yield ["Models by `torch.compile`, mean", "H200", *(times(mean(half)) for half in halves), "", "", slower]


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
    return f"{table(heads, list(cells.values()), 2)}\n\n{_conditions(kinds['TF32'])}"


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
    return f"{table(heads, cells, 1)}\n\n{_conditions(found)}"


def as_shown(stem: str) -> str:
    """The table that the bench shows of a report."""
    found = report.load(RESULTS / f"{stem}.json")
    shown = [column for column in tables.columns(found) if column.head != "engine"]
    cells = [[str(column.text(row)) for column in shown] for row in found["rows"]]
    words = sum(column.words for column in shown)
    summary = [f"{line}." for line in tables.summary(found)]
    return "\n\n".join([*summary, table([column.head for column in shown], cells, words), _conditions(found)])


def compiled() -> str:
    """Models by ``torch.compile``, without upconv and with it."""
    found = load("compiled/h200")
    cells = []
    for row in found["rows"]:
        ms = [f"{row[key]:.2f}" for key in ("compiled_ms", "compiled_with_upconv_ms")]
        cells.append([row["model"], row["layout"], row["mode"], *ms, times(row["ratio"])])
    heads = ["model", "layout", "pass", "compiled ms", "compiled, with upconv ms", "ratio"]
    return f"{table(heads, cells, 3)}\n\n{_conditions(found)}"


def cold() -> str:
    """How long a first call waits for its kernels."""
    found = load("h200-cold")
    heads = ["what", "median", "longest"]
    cells = []
    for head, key, unit in (
        ("forward", "fwd_s", "s"), ("gradient for the input", "grad_input_s", "s"),
        ("gradient for the weight", "grad_weight_s", "s"),
        ("a kernel from disk", "cached_ms", "ms"),
    ):  # fmt: skip
        values = [row[key] for row in found["rows"] if row[key] is not None]
        cells.append([head, f"{median(values):.2g} {unit}", f"{max(values):.2g} {unit}"])
    return f"{table(heads, cells, 1)}\n\n{len(found['rows'])} rows. {_conditions(found)}"


def cpu() -> str:
    """Speed-ups on a CPU by layer, a column for each layout; a dash where PyTorch's own operator runs."""
    found = load("cpu-fwd")
    layouts = list(dict.fromkeys(row["layout"] for row in found["rows"]))
    cells: dict[str, list[str]] = {}
    for row in found["rows"]:
        line = cells.setdefault(row["case"], [row["case"], row["layer"].split(" on ")[0], *[""] * len(layouts)])
        line[2 + layouts.index(row["layout"])] = "–" if row["engine"] == "torch" else times(row["ratio"])
    heads = ["case", "layer", *(LAYOUTS[layout] for layout in layouts)]
    return f"{table(heads, list(cells.values()), 2)}\n\n{_conditions(found)}"


def _conditions(found: Any) -> str:
    return f"{_where(found)}, commit {found['commit'][:7]}, {(found.get('when') or found['date'])[:10]}."


# --- the pages -------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[], str]] = {
    "gains": gains, "reports": reports, "layers": layers, "rounding": rounding, "compiled": compiled, "cold": cold,
    "cpu": cpu,
    **{kind: lambda kind=kind: as_shown(f"h200-{kind}") for kind in ("training", "host", "shapes", "exported")},
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
            publish(ROOT / page, lambda path, new=new: path.write_text(new, encoding="utf-8"))  # type: ignore[misc]
    if not check:
        draw()
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
