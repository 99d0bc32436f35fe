"""Reports: what a run of any kind measured, as JSON keeps it.

A report is a dictionary: `HEAD`, the keys of its kind, and ``rows``, each of which has the keys of its kind. Times are
medians; ``lower`` and ``upper`` are quartiles. A ratio is PyTorch's time over ours: above 1 ours is faster.
``failure`` says why a row has no times, ``warning`` that they vary by more than half (`timing.unsteady`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import geometric_mean as mean_of
from typing import Any

import torch

from upconv import env
from upconv.bench import files

SCHEMA = 1
Row = dict[str, Any]
Report = dict[str, Any]
HEAD = ("schema", "when", "commit", "device", "versions", "load", "complete", "rows")
"""``when``: UTC. ``load``: load averages at the run's start and end. ``complete``: whether Ctrl-C left no row out."""
LAYERS = "layers"
"""The kind of a report that names none: layers of suites."""
TRAINING_SIDES = ("ours", "convolutions", "torch", "compile", "compile_ours")


def _spread(sides: Sequence[str], unit: str = "ms") -> tuple[str, ...]:
    return tuple(f"{side}_{which}_{unit}" for side in sides for which in ("lower", "upper"))


_NEEDED: dict[str, tuple[str, ...]] = {
    LAYERS: (
        "suite", "case", "pass", "dtype", "precision", "layout", "ours_ms", "torch_ms", "ratio", "roof_ms",
        "percent_of_roof", "rel_error", "torch_rel_error", "engine", "plan",
    ),
    # Of a call. `added_us` is ours less PyTorch's, `calls` how many each median is of.
    "host": ("dtype", "mode", "engine", "ours_us", "torch_us", "added_us", "calls"),
    # First calls, compilation and tuning included, and the median of the calls after them. `ours_compiled`: kernels
    # that the first call compiled, on a GPU.
    "shapes": (
        "shape", "engine", "ours_ms", "torch_ms", "torch_benchmark_ms", "ours_again_ms", "torch_again_ms",
        "ours_compiled",
    ),
    # A training step, or inference (`pass`). `convolutions`: ours, plain convolutions too. `compile`: PyTorch's model
    # under torch.compile; `compile_ours`: ours under it, and `compile_ratio` is the former over the latter.
    "training": (
        "case", "ours_ms", "torch_ms", "compile_ms", "ratio", "ours_peak_bytes", "torch_peak_bytes",
        "compile_peak_bytes", "rounds", "failure",
    ),
    # NVRTC's seconds for the kernel that a pass's first call waits for longest, and for the longest of those that
    # follow it in a thread; milliseconds for the kernel that takes longest to load from disk. None: no such kernel.
    "cold": ("case", "precision", "layout", "fwd_s", "grad_input_s", "grad_weight_s", "cached_ms"),
    # `worst`: the largest difference from PyTorch's outputs in units of the tolerance, above 1 wrong. `library`:
    # upconv's layer in the file's place.
    "exported": (
        "case", "file", "layer", "failure", "build_s", "worst", "torch_ms", "ours_ms", "library_ms", "ratio",
        "library_precision", "grad_input_error", "grad_weight_error", "runs",
    ),
}  # fmt: skip
"""The keys that each row of a kind has."""
_LATER: dict[str, tuple[str, ...]] = {
    # `scale`: the share of the case's multiplications. Peak bytes: beside inputs and results. `tolerance_used`:
    # `check.tolerance_used` of a forward on a GPU. `wall_s`: what the row cost. `frozen`: ours with `upconv.freeze`.
    LAYERS: (
        "layer", "scale", "flops", "bytes", "rounds", "failure", "warning", *_spread(("ours", "torch", "frozen")),
        "frozen_ms", "frozen_ratio", "ours_peak_bytes", "torch_peak_bytes", "inputs", "tolerance_used", "wall_s",
    ),
    "host": (*_spread(("ours", "torch"), "us"), "warning"),
    "training": (
        "pass", "layout", "convolutions_ms", "compile_ours_ms", "convolutions_ratio", "compile_ratio",
        "convolutions_peak_bytes", "compile_ours_peak_bytes", *_spread(TRAINING_SIDES), "warning",
    ),
    "exported": ("lines", *_spread(("torch", "ours", "library")), "warning"),
}  # fmt: skip
"""The keys that older reports may lack."""
KEYS = {kind: (*needed, *_LATER.get(kind, ())) for kind, needed in _NEEDED.items()}
"""The keys of a row by the kind of its report."""
_ABSENT: Row = {"layer": "", "scale": 1.0}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a run, with the report of what was measured by then."""

    def __init__(self, found: Report) -> None:
        super().__init__()
        self.found = found


def kind_of(found: Report) -> str:
    """The kind of a report, one of `KEYS`."""
    return str(found.get("kind", LAYERS))


def build(
    rows: Sequence[Row], device: torch.device, begun: list[float] | None = None, complete: bool = True, **keys: Any
) -> Report:
    """The report of rows that were measured now, here.

    ``begun``: `env.load_average` as it was ahead of the first row. ``keys``: what the report has beside `HEAD`.
    """
    return {
        "schema": SCHEMA,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": env.commit(),
        "device": env.device(device),
        "versions": env.versions(),
        "load": {"start": begun, "end": env.load_average()},
        "complete": complete,
        **keys,
        "rows": list(rows),
    }


def gather(rows: Iterable[Row], device: torch.device, **keys: Any) -> Report:
    """The report of rows that are measured as they are taken from ``rows``.

    Raises:
        Interrupted: Ctrl-C, with the report of the rows before it.
    """
    begun, found = env.load_average(), list[Row]()
    try:
        found.extend(rows)
    except KeyboardInterrupt:
        raise Interrupted(build(found, device, begun, False, **keys)) from None
    return build(found, device, begun, **keys)


def load(path: str | Path) -> Report:
    """Reads a report of any kind; keys that older ones lack are filled in.

    Raises:
        ValueError: the file is missing, is no JSON, or holds no report of this schema; in one sentence.
    """
    found: Report = files.read(path)
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path} must be a report of schema {SCHEMA}, got {schema!r}")
    kind = kind_of(found)
    if kind not in KEYS:
        raise ValueError(f"{path} must be a report of kind {', '.join(KEYS)}; got {kind!r}")
    found = {"load": {"start": None, "end": None}, "complete": True, **found}
    missing = {*HEAD, *(("ceilings",) if kind == LAYERS else ())} - set(found)
    if not missing:
        missing = {f"rows[].{key}" for row in found["rows"] for key in _NEEDED[kind] if key not in row}
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    found["rows"] = [{**{key: _ABSENT.get(key) for key in KEYS[kind]}, **row} for row in found["rows"]]
    return found


# --- numbers ---------------------------------------------------------------------------------------------------------


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean that suits ratios; 1 for none."""
    return mean_of(ratios) if ratios else 1.0


def wrong(rows: Sequence[Row]) -> list[Row]:
    """The rows without a speed: a wrong result, or a case that could not run."""
    return [row for row in rows if row.get("failure") or row.get("ours_ms", 0.0) is None]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Layers in numbers: geometric means over our engine's rows, and over all right rows with delegated ones at 1."""
    timed = [row for row in rows if row["ratio"] is not None]
    ours = [row for row in timed if row["engine"] != "torch"]
    frozen = [row["frozen_ratio"] for row in ours if row["frozen_ratio"] is not None]
    return {
        "ours": len(ours),
        "mean_of_ours": geometric_mean([row["ratio"] for row in ours]),
        "delegated": [row["case"] for row in timed if row["engine"] == "torch"],
        "mean_of_all": geometric_mean([row["ratio"] for row in timed]),
        "lowest": min(ours, key=lambda row: float(row["ratio"]), default=None),
        "frozen": geometric_mean(frozen) if frozen else None,
        "wrong": len(wrong(rows)),
    }
