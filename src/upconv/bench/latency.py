"""What a call costs beside its kernel: the host's time per call of a tiny layer, and first calls on new input sizes.

Whole training steps (`upconv.bench.training`) and cold kernels (`upconv.bench.cold`) are reports of this form too.
"""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypedDict

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

import upconv
from upconv import env, planner
from upconv.bench import report
from upconv.bench.timing import Repeats, interleave
from upconv.bench.uncached import no_caches
from upconv.cuda import native, provisional
from upconv.problem import PRECISIONS, Problem

Kind = Literal["host", "shapes", "training", "cold"]
Value = str | int | float | None
KINDS: tuple[Kind, ...] = ("host", "shapes", "training", "cold")


class Latency(TypedDict):
    """A run as JSON holds it; `KEYS` has its rows' keys."""

    schema: int
    kind: Kind
    when: str
    commit: str | None
    device: dict[str, env.Value]
    versions: dict[str, env.Value]
    layer: str
    rows: list[dict[str, Value]]


HOST_KEYS = ("dtype", "mode", "engine", "ours_us", "torch_us", "added_us", "calls")
"""Medians in microseconds per call; ``added_us`` is ours less PyTorch's, ``calls`` how many each median stands on."""
SHAPES_KEYS = (
    "shape", "engine", "ours_ms", "torch_ms", "torch_benchmark_ms", "ours_again_ms", "torch_again_ms", "ours_compiled",
)  # fmt: skip
"""First calls in milliseconds, compilation and tuning counted, and the median of the calls after them. On a GPU
``ours_compiled`` counts the kernels that the first call compiled; how many cuDNN built, it does not tell."""
TRAINING_KEYS = (
    "case", "ours_ms", "convolutions_ms", "torch_ms", "compile_ms", "ratio", "convolutions_ratio", "ours_peak_bytes",
    "convolutions_peak_bytes", "torch_peak_bytes", "compile_peak_bytes", "rounds", "failure",
)  # fmt: skip
"""Median milliseconds of a training step, PyTorch's over ours, and what a step asks memory for at its peak beside what
it holds between steps; ``failure`` says why a row has none. ``convolutions``: ours, plain convolutions too (older
reports lack it)."""
COLD_KEYS = ("case", "precision", "layout", "fwd_s", "grad_input_s", "grad_weight_s", "later_s", "cached_ms")
"""Seconds of NVRTC for the kernel that a pass's first call waits for longest, and for the longest of those that follow
it in a thread; None for a pass without a kernel of ours, and where nothing follows. And milliseconds for the kernel
that takes longest to load from disk (older reports lack it)."""
# Which reports lack from before them.
_LATER = ("convolutions_ms", "convolutions_ratio", "convolutions_peak_bytes", "cached_ms")
KEYS: dict[Kind, tuple[str, ...]] = {
    "host": HOST_KEYS,
    "shapes": SHAPES_KEYS,
    "training": TRAINING_KEYS,
    "cold": COLD_KEYS,
}


def _report(kind: Kind, device: torch.device, layer: str, rows: list[dict[str, Value]]) -> Latency:
    return Latency(
        schema=report.SCHEMA,
        kind=kind,
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=env.commit(),
        device=env.device(device),
        versions=env.versions(),
        layer=layer,
        rows=rows,
    )


def _engine(p: Problem, device: torch.device) -> str:
    if device.type == "cuda" and p.dtype is torch.float32:
        p = p.with_(precision="tf32")
    return planner.plan(p, planner.device_of(device)).engine("fwd")


# --- the host's time -------------------------------------------------------------------------------------------------

TINY = Problem.make(1, 16, 16, (8, 8), 4, 2, 1, bias=True)
CALLS = 50
"""Calls between two synchronisations: 200 launches, PyTorch's four a call; a GPU's queue holds 1024."""
HOST = Repeats(1.0, 20, 400)


def host(device: torch.device, repeats: Repeats = HOST) -> Latency:
    """Host seconds per forward call of ``torch.nn.ConvTranspose2d`` and of ours on `TINY`, taken in turn.

    On a GPU the calls are only enqueued while the clock runs. On a CPU a call is the whole computation, of 65,536
    multiplications.
    """
    rows: list[dict[str, Value]] = []
    if device.type == "cuda":
        native.wait()  # a training run has it from its first half a minute on
    for dtype, training in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        p = TINY.with_(dtype=dtype, precision=PRECISIONS[dtype][0])
        torch.manual_seed(0)
        arguments = (p.in_channels, p.out_channels, p.kernel, p.stride, p.padding)
        theirs = torch.nn.ConvTranspose2d(*arguments, device=device, dtype=dtype)  # type: ignore[arg-type]
        ours = upconv.ConvTranspose2d(*arguments, device=device, dtype=dtype)  # type: ignore[arg-type]
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        x = torch.randn(p.input_shape, device=device, dtype=dtype)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x), rtol=2e-2, atol=2e-2)

        def take(layer: Callable[[], object], device: torch.device = device, training: bool = training) -> float:
            synchronize(device)
            with nullcontext() if training else torch.no_grad():
                begin = time.perf_counter()
                for _ in range(CALLS):
                    layer()
                end = time.perf_counter()
            synchronize(device)
            return (end - begin) / CALLS

        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # as timeit does: a collection is paid by whoever comes next
        try:
            runs = {"ours": [lambda ours=ours, x=x: ours(x)], "torch": [lambda theirs=theirs, x=x: theirs(x)]}
            taken = interleave(runs, take, repeats)
        finally:
            if collecting:
                gc.enable()
        mine, other = (1e6 * median(taken[name]) for name in ("ours", "torch"))
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "mode": "training" if training else "no_grad",
                "engine": _engine(p, device),
                "ours_us": mine,
                "torch_us": other,
                "added_us": mine - other,
                "calls": CALLS * len(taken["ours"]),
            }
        )
    return _report("host", device, str(TINY).rsplit(" ", 3)[0], rows)


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- first calls -----------------------------------------------------------------------------------------------------

DECODER = Problem.make(4, 64, 32, (64, 64), 4, 2, 1, bias=True)
SIZES = (
    (64, 64), (72, 72), (80, 96), (96, 96), (100, 120), (113, 157), (128, 96), (128, 128), (160, 120), (192, 160),
)  # fmt: skip
AGAIN = 5

First = tuple[float, float, int | None]
"""Seconds of the first call, of the median one after it, and the kernels compiled in the first."""


def shapes(device: torch.device, sizes: tuple[tuple[int, int], ...] = SIZES) -> Latency:
    """The first calls of `DECODER` on input sizes that it has not seen, one after the other.

    Each side runs in a fresh process with an empty kernel cache, after one call of another, 1-D layer that loads the
    libraries (cuDNN, NVRTC). On a GPU PyTorch's has a third run, with ``cudnn.benchmark`` on.
    """
    sides = ["ours", "torch", *(("torch-benchmark",) if device.type == "cuda" else ())]
    found: dict[str, list[First]] = {}
    threads = torch.get_num_threads()
    context = multiprocessing.get_context("spawn")
    for side in sides:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found[side] = pool.submit(_first_calls, side, str(device), sizes, threads).result()
    rows: list[dict[str, Value]] = []
    for i, size in enumerate(sizes):
        p = DECODER.with_(size=size)
        ours, theirs = found["ours"][i], found["torch"][i]
        tuned = found["torch-benchmark"][i][0] if "torch-benchmark" in found else None
        rows.append(
            {
                "shape": "x".join(map(str, p.input_shape)),
                "engine": _engine(p, device),
                "ours_ms": 1e3 * ours[0],
                "torch_ms": 1e3 * theirs[0],
                "torch_benchmark_ms": None if tuned is None else 1e3 * tuned,
                "ours_again_ms": 1e3 * ours[1],
                "torch_again_ms": 1e3 * theirs[1],
                "ours_compiled": ours[2],
            }
        )
    return _report("shapes", device, str(DECODER).rsplit(" on ", 1)[0], rows)


def _first_calls(side: str, where: str, sizes: tuple[tuple[int, int], ...], threads: int) -> list[First]:
    torch.set_num_threads(threads)
    device = torch.device(where)
    torch.backends.cudnn.benchmark = side == "torch-benchmark"
    package: Any = upconv if side == "ours" else torch.nn
    torch.manual_seed(0)
    p = DECODER
    layer = package.ConvTranspose2d(p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, device=device)
    other = package.ConvTranspose1d(8, 8, 3, device=device)
    found: list[First] = []
    with torch.no_grad(), no_caches() if side == "ours" else nullcontext():
        other(torch.randn(2, 8, 100, device=device))
        for size in sizes:
            x = torch.randn(p.batch, p.in_channels, *size, device=device)
            before = _compiled(device)
            first = _seconds(layer, x, device)
            provisional.settle()
            after = _compiled(device)
            again = median(_seconds(layer, x, device) for _ in range(AGAIN))
            found.append((first, again, None if before is None or after is None else after - before))
    return found


def _seconds(layer: Callable[[Tensor], Tensor], x: Tensor, device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    layer(x)
    synchronize(device)
    return time.perf_counter() - begin


def _compiled(device: torch.device) -> int | None:
    """Kernels in the cache, which was empty when this process began; none of a CPU's plans compiles any."""
    if device.type != "cuda":
        return None
    from upconv.cuda import cache

    return cache.contents().entries


# --- files and the terminal ------------------------------------------------------------------------------------------


def save(found: Latency, path: Path) -> None:
    """Writes the report as JSON, in one step."""
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    report.publish(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def load(path: str | Path) -> Latency:
    """Reads a report.

    Raises:
        ValueError: the file is missing, is no JSON, or holds no such report; in one sentence.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind not in KINDS or found.get("schema") != report.SCHEMA:
        raise ValueError(f"{path} must be a report of kind {' or '.join(KINDS)}, got {kind!r}")
    missing = Latency.__required_keys__ - set(found) or {
        f"rows[].{key}" for row in found["rows"] for key in KEYS[kind] if key not in row and key not in _LATER
    }
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    loaded: Latency = found
    return loaded


Column = tuple[str, Callable[[Mapping[str, Any]], str]]
"""A column's head, and its text for a row."""


def columns(found: Latency) -> list[Column]:
    """What a table of the report shows; columns that no row has a value for are left out."""
    if found["kind"] == "host":
        return [
            ("dtype", lambda row: row["dtype"]),
            ("mode", lambda row: row["mode"]),
            ("PyTorch us", lambda row: f"{row['torch_us']:.1f}"),
            ("upconv us", lambda row: f"{row['ours_us']:.1f}"),
            ("added us", lambda row: f"{row['added_us']:+.1f}"),
            ("engine", lambda row: row["engine"]),
        ]

    def number(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: "" if row.get(key) is None else f"{row[key]:.3g}"

    if found["kind"] == "training":

        def megabytes(key: str) -> Callable[[Mapping[str, Any]], str]:
            return lambda row: "" if row.get(key) is None else f"{row[key] / 1e6:.0f}"

        def times(key: str) -> Callable[[Mapping[str, Any]], str]:
            return lambda row: "" if row.get(key) is None else f"{row[key]:.2f}x"

        there = {key for row in found["rows"] for key, value in row.items() if value is not None}
        some: list[tuple[str, str, Callable[[str], Callable[[Mapping[str, Any]], str]]]] = [
            ("convolutions too ms", "convolutions_ms", number),
            ("ratio, convolutions too", "convolutions_ratio", times),
            ("PyTorch peak MB", "torch_peak_bytes", megabytes),
            ("upconv peak MB", "ours_peak_bytes", megabytes),
            ("convolutions too peak MB", "convolutions_peak_bytes", megabytes),
        ]
        return [
            ("case", lambda row: row["case"]),
            ("PyTorch ms", number("torch_ms")),
            *([("torch.compile ms", number("compile_ms"))] if "compile_ms" in there else []),
            ("upconv ms", number("ours_ms")),
            ("ratio", lambda row: row["failure"] or f"{row['ratio']:.2f}x"),
            *((head, shown(key)) for head, key, shown in some if key in there),
        ]

    if found["kind"] == "cold":
        return [
            *((key, lambda row, key=key: row[key]) for key in ("case", "precision", "layout")),
            ("forward s", number("fwd_s")),
            ("for the input s", number("grad_input_s")),
            ("for the weight s", number("grad_weight_s")),
            ("later s", number("later_s")),
            ("from disk ms", number("cached_ms")),
        ]

    every: list[tuple[str, str]] = [
        ("PyTorch first ms", "torch_ms"),
        ("tuned first ms", "torch_benchmark_ms"),
        ("upconv first ms", "ours_ms"),
        ("compiled", "ours_compiled"),
        ("PyTorch again ms", "torch_again_ms"),
        ("upconv again ms", "ours_again_ms"),
    ]
    used = [(head, number(key)) for head, key in every if any(row[key] is not None for row in found["rows"])]
    return [("input", lambda row: row["shape"]), *used, ("engine", lambda row: row["engine"])]


def title(found: Latency) -> str:
    """What was measured, in a line."""
    what = {
        "host": "host time per call, enqueued only" if found["device"].get("type") == "cuda" else "time per call",
        "shapes": "first calls on ten input sizes that the process has not seen",
        "training": "a training step: forward, loss, backward, Adam",
        "cold": "NVRTC's time for what a first call waits for, for what follows it in a thread, and to load from disk",
    }[found["kind"]]
    return f"{what} · {found['layer']}"


def show(found: Latency, console: Console) -> None:
    """Prints the table and its conditions."""
    console.print(Text(f"upconv bench · {title(found)}", style="bold"))
    console.print(Text(report.conditions(found), style="dim"))
    grid = Table(header_style="bold", pad_edge=False)
    shown = columns(found)
    for head, _ in shown:
        grid.add_column(head, justify="right" if head[-2:] in ("ms", "us", "ed", " s") else "left")
    for row in found["rows"]:
        grid.add_row(*(text(row) for _, text in shown))
    console.print(grid)
