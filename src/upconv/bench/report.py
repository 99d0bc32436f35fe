"""Reports: what a run of any kind measured, as JSON keeps it.

A report is a dictionary: `HEAD`, the keys of its kind, and ``rows``. Times are medians; ``lower`` and ``upper`` are
quartiles. A ratio is PyTorch's time over ours: above 1 ours is faster. ``failure`` says what of ours has no times,
``warning`` that they vary by more than half (`timing.unsteady`). A row may lack what its kind does not measure, or did
not when it was written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import geometric_mean as mean_of
from typing import Any

import torch

from upconv import env

SCHEMA = 1
Row = dict[str, Any]
Report = dict[str, Any]
HEAD = ("schema", "kind", "when", "commit", "device", "versions", "load", "complete", "rows")
"""``when``: UTC. ``load``: load averages at the run's start and end. ``complete``: whether Ctrl-C left no row out."""
KINDS = ("layers", "training", "exported")
"""Those that `tables` shows."""


def gather(rows: Iterable[Row], device: torch.device, kind: str, **keys: Any) -> Report:
    """The report of rows that are measured here as they are taken from ``rows``.

    Ctrl-C ends it: the report then has the rows before, and is not ``complete``. ``keys``: what it has beside `HEAD`.
    """
    begun, complete, found = env.load_average(), True, list[Row]()
    try:
        found.extend(rows)
    except KeyboardInterrupt:
        complete = False
    return {
        "schema": SCHEMA,
        "kind": kind,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": env.commit(),
        "device": env.device(device),
        "versions": env.versions(),
        "load": {"start": begun, "end": env.load_average()},
        "complete": complete,
        **keys,
        "rows": found,
    }


def save(found: Mapping[str, Any], path: Path) -> None:
    """Writes a report as JSON. Errors: OSError; ValueError for numbers that are not finite."""
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load(path: str | Path) -> Report:
    """Reads a report of `KINDS`.

    Raises:
        ValueError: the file is missing, is no JSON, or holds no such report; in one sentence.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    schema, kind = (found.get(key) for key in ("schema", "kind")) if isinstance(found, dict) else (None, None)
    if (schema, kind in KINDS) != (SCHEMA, True):
        raise ValueError(
            f"{path} must be a report of schema {SCHEMA} and kind {', '.join(KINDS)}; got {schema}, {kind}"
        )
    if missing := set(HEAD) - set(found):
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    report: Report = found
    return report


# --- numbers ---------------------------------------------------------------------------------------------------------


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean that suits ratios; 1 for none."""
    return mean_of(ratios) if ratios else 1.0


def finite(value: float) -> float | None:
    """A number as JSON has it: none that is not finite."""
    return value if math.isfinite(value) else None


def wrong(rows: Sequence[Row]) -> list[Row]:
    """The rows without a speed: a wrong result, or a case that could not run."""
    return [row for row in rows if row.get("failure") or row.get("ours_ms", 0.0) is None]
