"""What a call costs beside its kernel: the host's time per call of a tiny layer, and first calls on new input sizes.

Whole training steps (`upconv.bench.training`) and cold kernels (`upconv.bench.cold`) are reports of this form too.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

import upconv
from upconv import env, planner
from upconv.bench import files, report
from upconv.bench.timing import Repeats, interleave, quartiles, unsteady
from upconv.bench.uncached import no_caches
from upconv.cuda.compile import provisional
from upconv.problem import PRECISIONS, Problem, dtype_name
from upconv.replay import native

Kind = Literal["host", "shapes", "training", "cold"]
Value = str | int | float | None
KINDS: tuple[Kind, ...] = ("host", "shapes", "training", "cold")


class Latency(report.Head):
    """A run as JSON holds it; `KEYS` has its rows' keys."""

    kind: Kind
    layer: str
    rows: list[dict[str, Value]]


HOST_KEYS = (
    "dtype", "mode", "engine", "ours_us", "torch_us", "added_us", "calls", "ours_lower_us", "ours_upper_us",
    "torch_lower_us", "torch_upper_us", "warning",
)  # fmt: skip
"""Medians and quartiles in microseconds per call; ``added_us`` is ours less PyTorch's, ``calls`` how many each median
stands on, ``warning`` as in `upconv.bench.run.Row`."""
SHAPES_KEYS = (
    "shape", "engine", "ours_ms", "torch_ms", "torch_benchmark_ms", "ours_again_ms", "torch_again_ms", "ours_compiled",
)  # fmt: skip
"""First calls in milliseconds, compilation and tuning counted, and the median of the calls after them. On a GPU
``ours_compiled`` counts the kernels that the first call compiled; how many cuDNN built, it does not tell."""
TRAINING_SIDES = ("ours", "convolutions", "torch", "compile", "compile_ours")
TRAINING_KEYS = (
    "case", "pass", "layout", *(f"{side}_ms" for side in TRAINING_SIDES), "ratio", "convolutions_ratio",
    "compile_ratio", *(f"{side}_peak_bytes" for side in TRAINING_SIDES), "rounds", "failure",
    *(f"{side}_{which}_ms" for side in TRAINING_SIDES for which in ("lower", "upper")), "warning",
)  # fmt: skip
"""Medians and quartiles in milliseconds of a training step (``pass`` is ``step``) or of inference (``fwd``), and what
one asks memory for at its peak beside what it holds between two; ``failure`` says why a row has none. A ratio is
PyTorch's time over ours. ``convolutions``: ours, plain convolutions too. ``compile``: PyTorch's model under
``torch.compile``; ``compile_ours``: ours under it, and ``compile_ratio`` is the former over the latter."""
COLD_KEYS = ("case", "precision", "layout", "fwd_s", "grad_input_s", "grad_weight_s", "later_s", "cached_ms")
"""Seconds of NVRTC for the kernel that a pass's first call waits for longest, and for the longest of those that follow
it in a thread; None for a pass without a kernel of ours, and where nothing follows. And milliseconds for the kernel
that takes longest to load from disk (older reports lack it)."""
_FIRST_TRAINING = {
    "case", "ours_ms", "torch_ms", "compile_ms", "ratio", "ours_peak_bytes", "torch_peak_bytes", "compile_peak_bytes",
    "rounds", "failure",
}  # fmt: skip
_LATER: dict[Kind, set[str]] = {
    "host": {key for key in HOST_KEYS if key.endswith(("lower_us", "upper_us"))} | {"warning"},
    "shapes": set(),
    "training": set(TRAINING_KEYS) - _FIRST_TRAINING,
    "cold": {"cached_ms"},
}
"""Which keys older reports lack."""
KEYS: dict[Kind, tuple[str, ...]] = {
    "host": HOST_KEYS,
    "shapes": SHAPES_KEYS,
    "training": TRAINING_KEYS,
    "cold": COLD_KEYS,
}


def build(
    kind: Kind,
    device: torch.device,
    layer: str,
    rows: Iterable[dict[str, Value]],
    begun: list[float] | None = None,
) -> Latency:
    """The report of rows that are measured here, as they are taken from ``rows``.

    Raises:
        report.Interrupted: Ctrl-C, with the report of the rows before it.
    """
    found, complete = report.gather(rows)
    head = report.head(device, begun, complete=complete)
    made: Latency = {**head, "kind": kind, "layer": layer, "rows": found}
    if not complete:
        raise report.Interrupted(made)
    return made


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
    begun = env.load_average()
    if device.type == "cuda":
        native.wait()  # a training run has it from its first half a minute on
    modes = ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False))
    rows = (_host_row(device, dtype, training, repeats) for dtype, training in modes)
    return build("host", device, str(TINY).rsplit(" ", 3)[0], rows, begun)


def _host_row(device: torch.device, dtype: torch.dtype, training: bool, repeats: Repeats) -> dict[str, Value]:
    p = TINY.with_(dtype=dtype, precision=PRECISIONS[dtype][0])
    torch.manual_seed(0)
    arguments: Any = (p.in_channels, p.out_channels, p.kernel, p.stride, p.padding)
    theirs = torch.nn.ConvTranspose2d(*arguments).to(device, dtype)
    ours = upconv.ConvTranspose2d(*arguments).to(device, dtype)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    x = torch.randn(p.input_shape, device=device, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=2e-2, atol=2e-2)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # as timeit does: a collection is paid by whoever comes next
    try:
        runs = {"ours": [lambda: ours(x)], "torch": [lambda: theirs(x)]}
        taken = interleave(runs, lambda layer: _enqueued(layer, device, training), repeats)
    finally:
        if collecting:
            gc.enable()
    found = {name: quartiles([1e6 * value for value in values]) for name, values in taken.items()}
    row: dict[str, Value] = {
        "dtype": dtype_name(dtype),
        "mode": "training" if training else "no_grad",
        "engine": _engine(p, device),
        "ours_us": found["ours"].median,
        "torch_us": found["torch"].median,
        "added_us": found["ours"].median - found["torch"].median,
        "calls": CALLS * len(taken["ours"]),
        "warning": unsteady({"upconv": found["ours"], "PyTorch": found["torch"]}),
    }
    for side, values in found.items():
        row[f"{side}_lower_us"], row[f"{side}_upper_us"] = values.lower, values.upper
    return row


def _enqueued(layer: Callable[[], object], device: torch.device, training: bool) -> float:
    """The host's seconds per call, of `CALLS` in a row."""
    synchronize(device)
    with nullcontext() if training else torch.no_grad():
        begin = time.perf_counter()
        for _ in range(CALLS):
            layer()
        end = time.perf_counter()
    synchronize(device)
    return (end - begin) / CALLS


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
    begun = env.load_average()
    layer = str(DECODER).rsplit(" on ", 1)[0]
    return build("shapes", device, layer, _shape_rows(device, sizes), begun)


def _shape_rows(device: torch.device, sizes: tuple[tuple[int, int], ...]) -> Iterator[dict[str, Value]]:
    sides = ["ours", "torch", *(("torch-benchmark",) if device.type == "cuda" else ())]
    found: dict[str, list[First]] = {}
    threads = torch.get_num_threads()
    context = multiprocessing.get_context("spawn")
    for side in sides:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found[side] = pool.submit(_first_calls, side, str(device), sizes, threads).result()
    for i, size in enumerate(sizes):
        p = DECODER.with_(size=size)
        ours, theirs = found["ours"][i], found["torch"][i]
        tuned = found["torch-benchmark"][i][0] if "torch-benchmark" in found else None
        yield {
            "shape": "x".join(map(str, p.input_shape)),
            "engine": _engine(p, device),
            "ours_ms": 1e3 * ours[0],
            "torch_ms": 1e3 * theirs[0],
            "torch_benchmark_ms": None if tuned is None else 1e3 * tuned,
            "ours_again_ms": 1e3 * ours[1],
            "torch_again_ms": 1e3 * theirs[1],
            "ours_compiled": ours[2],
        }


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
    from upconv.cuda.compile import cache

    return cache.contents().entries


# --- files and the terminal ------------------------------------------------------------------------------------------


def load(path: str | Path) -> Latency:
    """Reads a report.

    Raises:
        ValueError: the file is missing, is no JSON, or holds no such report; in one sentence.
    """
    found = files.read(path)
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind not in KINDS or found.get("schema") != report.SCHEMA:
        raise ValueError(f"{path} must be a report of kind {' or '.join(KINDS)}, got {kind!r}")
    report.complete_head(found)
    missing = Latency.__required_keys__ - set(found) or {
        f"rows[].{key}" for row in found["rows"] for key in KEYS[kind] if key not in row and key not in _LATER[kind]
    }
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    loaded: Latency = found
    return loaded


Column = tuple[str, Callable[[Mapping[str, Any]], str]]
"""A column's head, and its text for a row."""


def columns(found: Latency) -> list[Column]:
    """What a table of the report shows; columns that no row has a value for are left out."""
    made = {"host": _host_columns, "training": _training_columns, "cold": _cold_columns, "shapes": _shapes_columns}
    return made[found["kind"]](found)


def _number(key: str, form: str = ".3g", unit: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row.get(key) is None else format(row[key] / unit, form)


def _times(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row.get(key) is None else f"{row[key]:.2f}x"


def _host_columns(found: Latency) -> list[Column]:
    return [
        ("dtype", lambda row: row["dtype"]),
        ("mode", lambda row: row["mode"]),
        ("PyTorch us", _number("torch_us", ".1f")),
        ("upconv us", _number("ours_us", ".1f")),
        ("added us", _number("added_us", "+.1f")),
        ("engine", lambda row: row["engine"]),
    ]


def _training_columns(found: Latency) -> list[Column]:
    there = {key for row in found["rows"] for key, value in row.items() if value is not None}
    megabytes = [("PyTorch", "torch"), ("upconv", "ours"), ("convolutions too", "convolutions")]
    some: list[tuple[str, str, Callable[[Mapping[str, Any]], str]]] = [
        ("torch.compile ms", "compile_ms", _number("compile_ms")),
        ("upconv ms", "ours_ms", _number("ours_ms")),
        ("ratio", "case", lambda row: row["failure"] or f"{row['ratio']:.2f}x"),
        ("convolutions too ms", "convolutions_ms", _number("convolutions_ms")),
        ("ratio, convolutions too", "convolutions_ratio", _times("convolutions_ratio")),
        ("torch.compile, with upconv ms", "compile_ours_ms", _number("compile_ours_ms")),
        ("ratio, compiled", "compile_ratio", _times("compile_ratio")),
        *(
            (f"{head} peak MB", f"{side}_peak_bytes", _number(f"{side}_peak_bytes", ".0f", 1e6))
            for head, side in megabytes
        ),
    ]
    return [
        ("case", lambda row: row["case"]),
        ("PyTorch ms", _number("torch_ms")),
        *((head, shown) for head, key, shown in some if key in there or key == "ours_ms"),
    ]


def _cold_columns(found: Latency) -> list[Column]:
    return [
        *((key, lambda row, key=key: row[key]) for key in ("case", "precision", "layout")),
        ("forward s", _number("fwd_s")),
        ("for the input s", _number("grad_input_s")),
        ("for the weight s", _number("grad_weight_s")),
        ("later s", _number("later_s")),
        ("from disk ms", _number("cached_ms")),
    ]


def _shapes_columns(found: Latency) -> list[Column]:
    every: list[tuple[str, str]] = [
        ("PyTorch first ms", "torch_ms"),
        ("tuned first ms", "torch_benchmark_ms"),
        ("upconv first ms", "ours_ms"),
        ("compiled", "ours_compiled"),
        ("PyTorch again ms", "torch_again_ms"),
        ("upconv again ms", "ours_again_ms"),
    ]
    used = [(head, _number(key)) for head, key in every if any(row[key] is not None for row in found["rows"])]
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
    report.show_conditions(found, console)
    grid = Table(header_style="bold", pad_edge=False)
    shown = columns(found)
    for head, _ in shown:
        grid.add_column(head, justify="right" if head[-2:] in ("ms", "us", "ed", " s") else "left")
    for row in found["rows"]:
        grid.add_row(*(text(row) for _, text in shown))
    console.print(grid)
    for row in found["rows"]:
        if row.get("warning"):
            name = row.get("case") or f"{row.get('dtype')} {row.get('mode')}"
            console.print(Text(f"{name}: {row['warning']}", style="yellow"))
