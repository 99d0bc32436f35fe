"""Peak memory of one call beside its inputs and results: of a fresh process, or on a GPU of PyTorch's allocator."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from upconv.bench.timing import Side, operands, work
from upconv.problem import Problem

_PROC = Path("/proc/self")


def peak_bytes(p: Problem, side: Side, device: torch.device) -> int | None:
    """Bytes that a pass holds at its peak beside inputs and results; None where the system does not say (no Linux)."""
    if device.type == "cuda":
        return _cuda_peak(p, side, device)
    # A new process each time: what one side's libraries keep (scratchpads, packed weights) must not serve the other.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_cpu_peak, p, side, torch.get_num_threads()).result()


def _cpu_peak(p: Problem, side: Side, threads: int) -> int | None:
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    # A first call pays for what is no part of a call: libraries' pages, threads, plans, oneDNN's primitives.
    work(side, p, operands(p, device, 0))()
    run = work(side, p, operands(p, device, 1))
    gc.collect()
    _trim()
    try:
        (_PROC / "clear_refs").write_text("5")  # proc(5): sets the peak to the present resident size
        before = _resident("VmRSS")
        results = run()
        peak = _resident("VmHWM")
    except (OSError, LookupError):
        return None
    return max(0, peak - before - _size(results))


def _trim() -> None:
    """Gives freed heap pages back, so that they count again when used again."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # a C library without it keeps fewer
        return


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", (_PROC / "status").read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(field)
    return int(found[1]) * 1024


def _cuda_peak(p: Problem, side: Side, device: torch.device) -> int:
    run = work(side, p, operands(p, device, 1))
    run()  # plans, packed weights and autotuning are kept by design and no part of a call
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = run()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before - _size(results))


def _size(results: tuple[torch.Tensor, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in results)
