"""Timing two implementations against each other: interleaved in one process, on fresh random inputs, medians.

On a CPU the clock is ``perf_counter``. On a GPU it is a pair of CUDA events behind two writes of 256 MB, which empty
the L2 cache (50 MB on an H200). A wait on the GPU ahead of them gives the host time to enqueue the call (10 to 30 us, a
backward pass 100 to 300), so that the events enclose the kernels and not the host.

PyTorch remembers a cuDNN plan per problem and thread, whether it was found with ``cudnn.benchmark`` on or off, and
looks there first. So what runs with the flag on runs in a thread of its own: in the other thread it would find the plan
of the flag off, and nothing would ever be tuned. Source: ``run_single_conv`` in ATen/native/cudnn/Conv_v8.cpp.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from statistics import median, quantiles
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import upconv
from upconv.cpu import memory_format
from upconv.modules import TRANSPOSED
from upconv.problem import Precision, Problem

Side = Literal["ours", "torch", "frozen"]
"""``frozen`` is ours with `upconv.freeze`, by which packed weights are kept between calls."""
Results = tuple[Tensor, ...]
Work = Callable[[], Results]


class Operands(NamedTuple):
    """One set of random tensors for a `Problem`; ``grad`` arrives at the output, of a pass that has gradients."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    grad: Tensor | None


def operands(p: Problem, device: torch.device, seed: int, *, positive: bool = False) -> Operands:
    """Random tensors in the problem's dtype and layout.

    The input is normal, or with ``positive`` as KernelBench's, uniform on [0, 1). Weight and bias are as ``torch.nn``
    initialises a layer's, uniform within ``1 / sqrt(out_channels / groups * taps)``.
    """
    generator = torch.Generator(device).manual_seed(seed)
    reach = 1 / math.sqrt(p.out_channels // p.groups * p.taps)  # Source: torch.nn.init._calculate_fan_in_and_fan_out

    def uniform(shape: Sequence[int]) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=p.dtype, device=device)

    def normal(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=p.dtype, device=device)

    def laid(t: Tensor) -> Tensor:
        return t.contiguous(memory_format=memory_format(p.layout, p.rank))

    x = laid((uniform if positive else normal)(p.input_shape))
    weight = laid(uniform(p.weight_shape).mul_(2 * reach).sub_(reach))
    bias = uniform((p.out_channels,)).mul_(2 * reach).sub_(reach) if p.bias else None
    return Operands(x, weight, bias, None if p.pass_ == "fwd" else laid(normal(p.output_shape)))


def work(side: Side, p: Problem, given: Operands) -> Work:
    """A pass of ``p`` as a user would call it, ready to run: what it needs from outside of the timed region is done.

    Its results are those of `result_names`: the output, or gradients through autograd. For ``grad-input`` and
    ``grad-weight`` the forward has run and its graph is kept; a step is the forward and all gradients.
    """
    module: Any = layer(side, p, given)
    if p.pass_ == "fwd":
        return lambda: (module(given.input),)
    x = given.input.detach().requires_grad_()
    every = [t for t in (x, module.weight, module.bias) if t is not None]

    def step() -> Results:
        out = module(x)
        return (out.detach(), *torch.autograd.grad(out, every, given.grad))

    if p.pass_ == "step":
        return step
    kept, wanted = module(x), x if p.pass_ == "grad-input" else module.weight
    return lambda: torch.autograd.grad(kept, wanted, given.grad, retain_graph=True)


def layer(side: Side, p: Problem, given: Operands) -> nn.Module:
    """A side's module: PyTorch's layer with the given weights, accelerated, or also frozen."""
    sizes = (p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, p.output_padding)
    module = list(TRANSPOSED)[p.rank - 1](*sizes, p.groups, p.bias, p.dilation, device="meta", dtype=p.dtype)
    training = p.pass_ != "fwd"
    weight = given.weight.clone() if side == "frozen" else given.weight  # what is kept of it must serve no other side
    for name, value in (("weight", weight), ("bias", given.bias)):
        if value is not None:
            module.register_parameter(name, nn.Parameter(value, requires_grad=training))
    module.train(training)
    if side != "torch":
        upconv.accelerate(module)
    if side == "frozen":
        upconv.freeze(module)
    return module


def result_names(p: Problem) -> tuple[str, ...]:
    """What the tensors of a pass's results are, in order."""
    if p.pass_ == "step":
        return ("output", "grad-input", "grad-weight", *(("grad-bias",) if p.bias else ()))
    return ("output" if p.pass_ == "fwd" else p.pass_,)


@contextmanager
def precision_flags(precision: Precision) -> Iterator[None]:
    """Sets how every backend multiplies float32: as TF32 for ``tf32``, else as IEEE 754 has it; restores it after."""
    wanted = "tf32" if precision == "tf32" else "ieee"
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)  # their stubs lack conv and matmul
    holders = [torch.backends.cuda.matmul, *(backend.conv for backend in backends), backends[1].matmul]
    before = [holder.fp32_precision for holder in holders]
    try:
        for holder in holders:
            holder.fp32_precision = wanted
        yield
    finally:
        for holder, value in zip(holders, before):
            holder.fp32_precision = value


# --- clocks ----------------------------------------------------------------------------------------------------------

Clock = Callable[[Callable[[], object]], float]
"""Runs a function once and says how many seconds it took; freeing its result is not part of it."""

FLUSH_BYTES = 256 * 10**6
WAIT_CYCLES = 1_200_000
"""Of a GPU ahead of a run: 0.6 ms at 2 GHz, since the writes alone are over before a slow host has launched the run."""


def clock(device: torch.device, *, flush: bool = True, wait: bool = True) -> Clock:
    """The clock for a device.

    Args:
        device: where.
        flush: on a GPU, whether the L2 cache is flushed before each run.
        wait: on a GPU, whether the host has time to enqueue a run before its clock starts: else a run for which the
            GPU waits for the host is timed as what it takes both.
    """
    if device.type != "cuda":
        return _cpu_clock
    buffer = torch.empty(FLUSH_BYTES if flush else 0, dtype=torch.uint8, device=device)

    def take(run: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if wait:
                torch.cuda._sleep(WAIT_CYCLES)
            buffer.fill_(1)
            buffer.fill_(2)
            begin.record()
            result = run()
            end.record()
            end.synchronize()
            del result
            return float(begin.elapsed_time(end)) / 1e3

    return take


def _cpu_clock(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    result = run()
    end = time.perf_counter()
    del result
    return end - begin


def cudnn_clocks(take: Clock) -> tuple[Clock, Clock]:
    """The clocks of work under ``cudnn.benchmark`` off and on, which times in its own thread (see this module's head).

    Gradients are taken in the calling thread, as cuDNN's plans for them are kept per thread too.
    """

    def under(flag: bool, run: Callable[[], object]) -> float:
        was, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, flag
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return take(run)
        finally:
            torch.backends.cudnn.benchmark = was

    return partial(under, False), lambda run: _tuned.submit(under, True, run).result()


# One thread for the whole process: it starts with its first work, and keeps what cuDNN found for each problem.
_tuned = ThreadPoolExecutor(1, thread_name_prefix="upconv-cudnn-benchmark")


# --- what a row says of times ----------------------------------------------------------------------------------------

UNSTEADY = 0.5
"""Quartiles that are further apart than this share of the median make a row that says little."""
NAMES = {
    "ours": "upconv",
    "torch": "PyTorch",
    "frozen": "frozen upconv",
    "convolutions": "upconv with convolutions",
    "compile": "compiled",
    "compile_ours": "compiled, with upconv",
    "tuned": "PyTorch with cudnn.benchmark",
    "library": "the library",
}
"""The sides of reports in words."""
_RATIOS = {
    "ratio": ("torch", "ours"),
    "frozen_ratio": ("torch", "frozen"),
    "tuned_ratio": ("tuned", "ours"),
    "library_ratio": ("library", "ours"),
    "convolutions_ratio": ("torch", "convolutions"),
    "compile_ratio": ("compile", "compile_ours"),
}
Taken = Mapping[str, Sequence[float]]
"""Seconds by side, one a round."""


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles of timings, interpolated between neighbours as NumPy does; of one timing itself, thrice."""
    lower, middle, upper = quantiles([*values, *values[:1]][: max(2, len(values))], n=4, method="inclusive")
    return lower, middle, upper


def entries(taken: Taken) -> dict[str, Any]:
    """A row's entries for timings: medians and quartiles in milliseconds, ratios, rounds, and `unsteady`."""
    found: dict[str, Any] = {"rounds": len(next(iter(taken.values())))}
    for side, seconds in taken.items():
        names = (f"{side}_lower_ms", f"{side}_ms", f"{side}_upper_ms")
        found |= {name: 1e3 * value for name, value in zip(names, quartiles(seconds))}
    found |= {
        name: found[f"{a}_ms"] / found[f"{b}_ms"] for name, (a, b) in _RATIOS.items() if a in taken and b in taken
    }
    return found | {"warning": unsteady(taken)}


def unsteady(taken: Taken) -> str | None:
    """A warning of the sides whose times vary by more than half, in a sentence; None where none do."""
    found = []
    for side, seconds in taken.items():
        lower, middle, upper = quartiles(seconds)
        if middle and (share := (upper - lower) / middle) > UNSTEADY:
            found.append(f"{NAMES[side]}'s by {share:.0%} of their median")
    if not found:
        return None
    return f"times vary by more than half: {', '.join(found)}; measure again on an idle machine"


# --- interleaving ----------------------------------------------------------------------------------------------------


class Repeats(NamedTuple):
    """How often a row is timed: until the seconds are spent, within bounds."""

    seconds: float
    least: int
    most: int


QUICK = Repeats(1.0, 5, 60)
FULL = Repeats(4.0, 15, 200)
SWEEP = Repeats(0.5, 7, 100)
"""For the many rows of a whole suite on a GPU, of which most take PyTorch under 5 ms and few 30."""
Runs = Mapping[str, Sequence[Callable[[], object]]]
"""By name the same work on several sets of inputs, which are taken in rotation."""


def interleave(runs: Runs, take: Clock | Mapping[str, Clock], repeats: Repeats) -> dict[str, list[float]]:
    """Seconds of several implementations, timed in turn; every second round in reverse order.

    Each set is taken once ahead of the rounds, or twice: kernels are compiled and cuDNN's plans found in first calls.

    Args:
        runs: what is timed.
        take: the clock, or one for each name.
        repeats: how often.
    """
    clocks = take if isinstance(take, Mapping) else dict.fromkeys(runs, take)

    def one(name: str, turn: int) -> float:
        return clocks[name](runs[name][turn % len(runs[name])])

    for turn in range(max(2, *(len(works) for works in runs.values()))):
        for name in runs:
            one(name, turn)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    begin, turn = time.perf_counter(), 0
    while turn < repeats.least or (turn < repeats.most and time.perf_counter() - begin < repeats.seconds):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            taken[name].append(one(name, turn))
        turn += 1
    return taken


def compare(runs: Runs, device: torch.device, repeats: Repeats, tuned: Sequence[str], wait: bool = True) -> Taken:
    """As `interleave`; a GPU times what ``tuned`` names with ``cudnn.benchmark`` on too, and the better median counts.

    ``wait``: see `clock`.
    """
    take = clock(device, wait=wait)
    if device.type != "cuda":
        return interleave(runs, take, repeats)
    off, on = cudnn_clocks(take)
    again = {f"{name}, tuned": runs[name] for name in tuned}
    taken = interleave({**runs, **again}, dict.fromkeys(runs, off) | dict.fromkeys(again, on), repeats)
    return {name: min(taken[name], taken.get(f"{name}, tuned", taken[name]), key=median) for name in runs}
