"""compute-sanitizer's racecheck and memcheck over small runs of the kernels that hand shared memory over by barriers.

    python benchmarks/racecheck.py              all cases, a line each; exit code 1 for hazards
    python benchmarks/racecheck.py planes --as-compiled
    python benchmarks/racecheck.py --memcheck   accesses out of bounds or misaligned; exit code 1 for any

A warp arrives at a barrier by one lane, behind ``__syncwarp``. Racecheck does not follow the order of the other lanes'
reads through that, and reports what is written next in their place: a copy by the engine. So the cases run with kernels
in which every lane arrives (and barriers expect as many), which changes who arrives and nothing else;
``--as-compiled`` runs what is shipped, and so does ``--memcheck``, which knows no barriers.

Racecheck looks at a case's own kernels. Memcheck looks at all of its process, those that pack weights and add up sums
among them, in allocations of each tensor's own size; and it is not told of failing API calls, of which the driver's
bindings make 34 when they ask for entry points that a driver lacks.

Where there are 8 cores, four cases run at a time: each waits for PyTorch's start and for the compiler first.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from upconv.cpu import memory_format
from upconv.cuda.axes import any_size, result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.cost import Cost
from upconv.cuda.gemm import gather, gather_search, joined
from upconv.cuda.gpu import A100, gpu
from upconv.cuda.launches import Given, Scratch
from upconv.cuda.pixels import implicit
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.family import MODES, choose
from upconv.cuda.pixels.tile import CONSUMERS
from upconv.cuda.prepared import Program
from upconv.cuda.rearrange import relayout
from upconv.cuda.wgrad import wgrad, wgrad_search
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Layout, Pass, Precision, Problem

TIMEOUT = 150.0
"""Of a case, in seconds."""
TOOLS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "racecheck": (
        ("--racecheck-report", "all", "--print-limit", "1000"),
        r"RACECHECK SUMMARY: (.*)",
        "0 hazards displayed (0 errors, 0 warnings)",
    ),
    "memcheck": (("--leak-check", "no", "--report-api-errors", "no"), r"ERROR SUMMARY: (.*)", "0 errors"),
}
"""Of each tool of compute-sanitizer its options, what its summary is found by, and how that reads where all is well."""
# Of each source: what is written there, and how it reads where every lane arrives.
EVERY_LANE = {
    "gather.cu": (
        ("if (lane == 0) barrier_arrive(full);", "barrier_arrive(full);"),
        ("if (lane == 0 && barrier) barrier_arrive(barrier);", "if (barrier) barrier_arrive(barrier);"),
        (
            "G::DIRECT_BOX ? 1 : G::PRODUCER_WARPS, G::RELEASES * 4);",
            "G::DIRECT_BOX ? 1 : G::PRODUCER_THREADS, G::RELEASES * 128);",
        ),
        ("memory.weights.init(1, G::RELEASES * 4);", "memory.weights.init(1, G::RELEASES * 128);"),
        ("memory.slots.init(1, G::PRODUCER_WARPS);", "memory.slots.init(1, G::PRODUCER_THREADS);"),
    ),
    "joined.cu": (
        ("if (lane == 0 && barrier) barrier_arrive(barrier);", "if (barrier) barrier_arrive(barrier);"),
        ("if (thread % 32 == 0) barrier_arrive(memory.stages", "barrier_arrive(memory.stages"),
        ("if (thread % 32 == 0) barrier_arrive(memory.slots", "barrier_arrive(memory.slots"),
        ("if (own == 1 && lane == 0) barrier_arrive(memory.turns);", "if (own == 1) barrier_arrive(memory.turns);"),
        ("if (lane == 0) barrier_arrive(memory.turns + ", "barrier_arrive(memory.turns + "),
        ("memory.stages.init(C::warps_of_stage, 4);", "memory.stages.init(LANES, 128);"),
        ("memory.slots.init(1, C::warps_of_stage);", "memory.slots.init(1, LANES);"),
        ("memory.weights.init(1, 4);", "memory.weights.init(1, 128);"),
        ("barrier_init(memory.turns + 8 * i, 4);", "barrier_init(memory.turns + 8 * i, 128);"),
    ),
    "sweep.cu": (
        ("if (lane == 0 && barrier) barrier_arrive(barrier);", "if (barrier) barrier_arrive(barrier);"),
        ("if (lane == 0) barrier_arrive(full);", "barrier_arrive(full);"),
        ("FILLERS = T::DIRECT_BOX ? 1 : PRODUCER_WARPS,", "FILLERS = T::DIRECT_BOX ? 1 : T::PRODUCER_THREADS,"),
        (".init(M::FILLERS, 4 * M::READERS);", ".init(M::FILLERS, 128 * M::READERS);"),
        (".init(1, CONSUMERS * 4);", ".init(1, CONSUMERS * 128);"),
        (".init(1, PRODUCER_WARPS);", ".init(1, T::PRODUCER_THREADS);"),
    ),
    "pixels.cu": (
        ("if (lane == 0 && barrier) barrier_arrive(barrier);", "if (barrier) barrier_arrive(barrier);"),
        (".init(M::FILLERS, 4 * M::READERS);", ".init(M::FILLERS, 128 * M::READERS);"),
    ),
    "wgrad_wgmma.cu": (
        ("if (lane == 0 && barrier) barrier_arrive(barrier);", "if (barrier) barrier_arrive(barrier);"),
        ("::ARRIVALS, C::warpgroups * 4);", "::ARRIVALS, C::warpgroups * 128);"),
    ),
}


def every_lane(name: str, text: str) -> str:
    """A kernel's source in which all lanes of a warp arrive. Errors: ValueError where the source reads otherwise."""
    for old, new in EVERY_LANE.get(name, ()):
        if text.count(old) != 1:
            raise ValueError(f"{name} must have {old!r} once; it has it {text.count(old)} times")
        text = text.replace(old, new)
    return text


STRIDED = Problem.make(2, 64, 64, (16, 32), 4, 2, 1, bias=False)
NARROW = Problem.make(2, 64, 32, (16, 32), 4, 2, 1, bias=False)  # two teams of two warps
FEW = Problem.make(2, 64, 3, (16, 32), 4, 2, 1, bias=False)
PLAIN = Problem.make(4, 64, 64, (16, 32), 3, bias=False)
SHEETS = Problem.make(1, 40, 70, (3, 14, 24), 3, bias=False)
DEEP = Problem.make(1, 32, 16, (4, 12, 24), (3, 5, 7), bias=False)
SHORT = Problem.make(1, 16, 32, (3, 6, 40), 3, 2, 1, 1, bias=False)
LONE = Problem.make(1, 300, 24, (16, 24), 2, 2, bias=False)  # more chunks than stages
TAPPED = Problem.make(3, 300, 24, (72,), 8, 4, 2, bias=False)
VOICE = Problem.make(2, 300, 24, (80,), 8, 4, 2, bias=False)
LONE_BACK = LONE.with_(in_channels=24, out_channels=300)
TAPPED_BACK = TAPPED.with_(in_channels=24, out_channels=300)
TINY = Problem.make(80, 128, 72, (4, 4), 4, 2, 1, bias=False)
CROSSED = Problem.make(1, 328, 72, (8, 8), 4, 2, 1, bias=False)  # more chunks than stages for each block of a cluster
CROSSED_BACK = CROSSED.with_(in_channels=72, out_channels=328)
SMALL = Problem.make(40, 64, 64, (4, 4), 4, 2, 1, bias=False)
DTYPES = {"tf32": torch.float32, "ieee": torch.float32, "bf16": torch.bfloat16}


def problem(p: Problem, precision: Precision, layout: Layout, pass_: Pass) -> Problem:
    return p.with_(dtype=DTYPES[precision], precision=precision, layout=layout, pass_=pass_)


def tensor(shape: tuple[int, ...], p: Problem) -> torch.Tensor:
    found = torch.randn(shape, device="cuda").to(p.dtype)
    last = p.layout == "channels_last" and not p.batch_as_width  # of which the addresses alone matter here
    return found.contiguous(memory_format=memory_format(p.layout, p.rank)) if last else found


def run_prepared(prepared: Any, p: Problem, claim: bool = False) -> None:
    """A choice's kernels on random operands; ``claim``: blocks claim tiles."""
    x, weight, out = (tensor(shape, p) for shape in (source_shape(p), p.weight_shape, result_shape(p)))
    prepared.run(x, prepared.pack(weight), None, out, *((False, True) if claim else ()))


def run_claimed(p: Problem, wanted: Callable[[Any], bool]) -> None:
    """Blocks that claim tiles, several each."""
    chip = replace(gpu(0), multiprocessors=3)
    gather.CLAIMED_TILES = 3
    fitting = (gather.Choice(t, p, chip) for _, t in gather_search.considered(p, chip) if wanted(t))
    run_prepared(next(choice for choice in fitting if choice.claimed).prepare(0), p, claim=True)


def run_gather(p: Problem, wanted: Callable[[Any], bool], again: bool = False) -> None:
    """The first tiling of a kind. ``again``: blocks have three tiles and more."""
    chip = replace(gpu(0), multiprocessors=2) if again else gpu(0)
    tiling = next(t for _, t in gather_search.considered(p, chip) if wanted(t))
    choice = gather.Choice(tiling, p, chip)
    if again and tiling.arguments(p)[-1] < 3 * choice.grid:
        raise RuntimeError(f"{tiling.arguments(p)[-1]} tiles give {choice.grid} blocks no third one")
    prepared = choice.prepare(0)
    run_prepared(prepared, p)


def run_abreast(p: Problem, wanted: Callable[[Any], bool]) -> None:
    """`run_gather` of a batch of images as one."""
    assert p.abreast is not None
    run_gather(p.abreast, wanted)


def run_sweep(p: Problem) -> None:
    """The first tile, which is small."""
    found = next(iter(MODES["sweep"].candidates(p, gpu(0))))
    prepared = TileChoice(found, p, gpu(0), Cost()).prepare(0)
    run_prepared(prepared, p)


def run_choice(p: Problem, mode: str) -> None:
    """The cheapest tile of a mode of `pixels`."""
    found = choose(mode, p, gpu(0))
    if isinstance(found, str):
        raise RuntimeError(found)
    prepared = found.prepare(0)
    run_prepared(prepared, p)


def run_joined(p: Problem) -> None:
    """A tile whose consumers have several tiles each and go round their rings again and again."""
    chip = replace(gpu(0), multiprocessors=2)
    choice = joined.choose(p, chip)
    if isinstance(choice, str) or choice.tile.tiles(p) < 4 * choice.grid:
        raise RuntimeError(f"{choice}: no consumer has a second tile")
    run_prepared(choice.prepare(0), p)


def run_implicit(p: Problem, halves: bool, stages: int = 0) -> None:
    """A tile of consumers' halves or turns, whose blocks go round a ring of so many stages; without, of a cluster."""
    chip = replace(gpu(0), multiprocessors=2)
    whole = next(t for t in implicit.alone(any_size(p), chip) if t.halves == halves and t.stages >= stages)
    tile = replace(whole, stages=stages) if stages else next(implicit._clustered(whole, p, gpu(0)))
    choice = TileChoice(tile, p, chip, Cost())
    if stages and tile.tiles(p) < 4 * choice.grid:
        raise RuntimeError(f"{tile.tiles(p)} tiles give no consumer of {choice.grid} blocks a second one")
    prepared = choice.prepare(0)
    run_prepared(prepared, p)


def run_phases(p: Problem, stages: int) -> None:
    """A tile of several chunks, whose consumers have several tiles each and go round their rings again and again."""
    chip = replace(gpu(0), multiprocessors=2)
    tile = next(t for t in MODES["phases"].candidates(p, chip) if t.c.chunks > 1 and t.stages >= stages)
    choice = TileChoice(replace(tile, stages=stages), p, chip, Cost())
    if tile.tiles(p) < 2 * CONSUMERS * choice.grid:
        raise RuntimeError(f"{tile.tiles(p)} tiles give no consumer of {choice.grid} blocks a second one")
    prepared = choice.prepare(0)
    run_prepared(prepared, p)


def run_wgrad(
    p: Problem,
    splits: int,
    descriptors: bool = False,
    interleaved: bool = False,
    steps: bool = False,
    stages: int = 0,
) -> None:
    """The first tiling whose blocks can add up the splits.

    ``descriptors``: both operands come by these. ``interleaved``: the taps of an instruction are neighbours in M.
    ``steps``: in two steps, as on a GPU whose blocks do not add up. ``stages``: of the ring, at least.
    """
    wanted = (t for t in wgrad_search.candidates(p, gpu(0)) if isinstance(t, WarpgroupTiling))
    wanted = (t for t in wanted if (t.a_shared, t.interleaved) == (descriptors, interleaved))
    tiling = next(t for t in wanted if t.tiles <= 9 and t.stages >= stages)
    prepared = wgrad.Choice(tiling, p, A100 if steps else gpu(0), splits, Cost(1e-5)).prepare(0)
    prepared.run(tensor(p.input_shape, p), tensor(p.output_shape, p), tensor(p.weight_shape, p), lasting=True)
    one_step = len(prepared.choice.launches(Given("contiguous", lasting=True))) == 1
    if one_step == steps:
        raise RuntimeError(f"{splits} splits were not launched as expected")


def run_relayout(p: Problem) -> None:
    x, turned = tensor(p.output_shape, p), Scratch("turned", 2 * math.prod(p.output_shape) * p.dtype.itemsize)
    launches = relayout.copy(p, True, "source", turned), relayout.copy(p, True, turned, "result", back=True)
    out = torch.empty_like(x)
    Program(launches, ("source", "result"), 0, {}, {})((x, out), [x.data_ptr(), out.data_ptr()], False)


def case(kernel: str, run: Callable[..., None], p: Problem, how: str, *options: Any) -> tuple[str, Callable[[], None]]:
    """How a problem is run: its precision, layout and pass; ``options`` are those of ``run``."""
    precision, layout, pass_ = how.split()
    return kernel, lambda: run(problem(p, precision, layout, pass_), *options)  # type: ignore[arg-type]


CASES: dict[str, tuple[str, Callable[[], None]]] = {
    "forward": case("gather", run_gather, STRIDED, "tf32 nchw fwd", lambda t: t.wgmma),
    "forward-claimed": case("gather", run_claimed, STRIDED, "tf32 nchw fwd", lambda t: t.split != 2),
    "forward-claimed-turns": case("gather", run_claimed, PLAIN, "bf16 channels_last fwd", lambda t: t.split == 2),
    "forward-ieee": case(
        "gather", run_gather, PLAIN, "ieee nchw fwd", lambda t: t.wgmma and t.taps_unrolled > 2 and not t.resident
    ),
    "forward-drained": case("gather", run_gather, STRIDED, "bf16 nchw fwd", lambda t: t.drained, True),
    "forward-shuffled": case("gather", run_gather, FEW, "tf32 nchw fwd", lambda t: t.wgmma and t.shuffle is not None),
    "forward-last": case("gather", run_gather, STRIDED, "bf16 channels_last fwd", lambda t: t.wgmma),
    "forward-teams": case("gather", run_gather, NARROW, "bf16 channels_last fwd", lambda t: t.wgmma and t.subs == 2),
    "forward-boxes": case(
        "gather", run_gather, STRIDED, "tf32 channels_last fwd", lambda t: t.boxable and not t.resident
    ),
    "forward-width": case("gather", run_abreast, SMALL, "bf16 channels_last fwd", lambda t: t.split != 2),
    "forward-cluster": case("gather", run_gather, CROSSED, "tf32 nchw fwd", lambda t: t.cluster > 1),
    "forward-beside": case("gather", run_gather, TINY, "bf16 nchw fwd", lambda t: t.beside > 0, True),
    "planes-cluster": case(
        "gather", run_gather, CROSSED_BACK, "bf16 channels_last grad-input", lambda t: t.cluster > 1
    ),
    "planes": case("gather", run_gather, STRIDED, "bf16 channels_last grad-input", lambda t: t.strided_box),
    "boxes": case("gather", run_gather, STRIDED, "tf32 channels_last grad-input", lambda t: t.boxable),
    "joined": case("joined", run_joined, SHEETS, "tf32 nchw fwd"),
    "joined-16": case("joined", run_joined, SHEETS, "bf16 nchw fwd"),
    "sweep": case("sweep", run_sweep, DEEP, "tf32 nchw fwd"),
    "sweep-16": case("sweep", run_sweep, DEEP, "bf16 nchw fwd"),
    "sweep-last": case("sweep", run_sweep, DEEP, "tf32 channels_last fwd"),
    "sweep-last-16": case("sweep", run_sweep, DEEP, "bf16 channels_last fwd"),
    "subpixel": case("pixels", run_choice, LONE, "tf32 nchw fwd", "subpixel"),
    "subpixel-16": case("pixels", run_choice, LONE, "bf16 nchw fwd", "subpixel"),
    "pairs": case("pixels", run_choice, LONE_BACK, "tf32 nchw grad-input", "pairs"),
    "pairs-forward": case("pixels", run_choice, VOICE, "tf32 nchw fwd", "pairs"),
    "pairs-forward-16": case("pixels", run_choice, VOICE, "bf16 nchw fwd", "pairs"),
    "pairs-16": case("pixels", run_choice, TAPPED_BACK, "bf16 nchw grad-input", "pairs"),
    "implicit": case("pixels_last", run_implicit, STRIDED, "tf32 channels_last grad-input", True, 2),
    "implicit-turns": case("pixels_last", run_implicit, STRIDED, "bf16 channels_last fwd", False, 3),
    "implicit-cluster": case("pixels_last", run_implicit, CROSSED, "tf32 channels_last fwd", True),
    "phases": case("pixels", run_phases, SHORT, "tf32 nchw fwd", 2),
    "phases-16": case("pixels", run_phases, NARROW, "bf16 nchw fwd", 3),
    "two-steps": case("wgrad", run_wgrad, PLAIN, "tf32 nchw grad-weight", 3, False, False, True),
    "alone": case("wgrad", run_wgrad, PLAIN, "bf16 channels_last grad-weight", 1),
    "together": case("wgrad", run_wgrad, PLAIN, "bf16 nchw grad-weight", 10),
    "together-last": case("wgrad", run_wgrad, PLAIN, "tf32 channels_last grad-weight", 9),
    "neighbours": case("wgrad", run_wgrad, TAPPED, "tf32 nchw grad-weight", 3, False, True),
    "neighbours-16": case("wgrad", run_wgrad, LONE, "bf16 nchw grad-weight", 4, False, True),
    "descriptors": case("wgrad", run_wgrad, PLAIN, "bf16 channels_last grad-weight", 2, True),
    "deep-last": case("wgrad", run_wgrad, PLAIN, "bf16 channels_last grad-weight", 2, False, False, False, 6),
    "relayout": case("to_", run_relayout, STRIDED, "bf16 nchw grad-input"),
}
"""Of each case the kernels' names begin so, and what runs them."""
WIDTH = max(map(len, CASES))


def _run(name: str, as_compiled: bool) -> None:
    if not as_compiled:
        shipped = jit.instance
        jit.instance = lambda file, constants, entries, more=(): every_lane(
            file, shipped(file, constants, entries, more)
        )
    CASES[name][1]()
    torch.cuda.synchronize()
    entries = {entry for _, entry in jit._kernels}
    if not any(CASES[name][0] in entry for entry in entries):
        raise RuntimeError(f"no kernel of {name} is named {CASES[name][0]}; they are {sorted(entries)}")
    print("ran", name)


def command(name: str, tool: str, as_compiled: bool) -> list[str]:
    """What runs a case under a tool. Memcheck looks at every kernel, as compiled."""
    found = ["compute-sanitizer", "--tool", tool, *TOOLS[tool][0]]
    if tool == "racecheck":
        found += ["--kernel-name", f"kernel_substring={CASES[name][0]}"]
    found += [sys.executable, __file__, name, "--run"]
    return found + ["--as-compiled"] * (as_compiled or tool == "memcheck")


def verdict(name: str, tool: str, code: int, said: str) -> tuple[bool, str]:
    """Whether a case ran to its end and nothing was found, and a line of that.

    ``code`` is the process' exit code (the program's own: the tool leaves it as it is), ``said`` all that it printed.
    """
    _, pattern, well = TOOLS[tool]
    summaries = re.findall(pattern, said)
    if code == 0 and f"ran {name}" in said.splitlines() and summaries == [well]:
        return True, f"{name:{WIDTH}} {well}"
    found = [summary for summary in summaries if summary != well]
    if found:
        return False, f"{name:{WIDTH}} {found[0]} {', '.join(_places(tool, said))}".rstrip()
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith("=====")]
    return False, f"{name:{WIDTH}} did not run (exit code {code}): {' | '.join(lines[-3:])} {summaries}"


def _places(tool: str, said: str) -> list[str]:
    """Where in kernels something was found: ``gather+0x1a0``, with what memcheck calls it in front."""
    if tool == "racecheck":
        return sorted(set(re.findall(r"(?:Read|Write) Thread .* at (\w+\+0x\w+)", said)))
    found = re.findall(r"Invalid (\S+ \w+) of size .*\n=+ +at ([^(\n]*)(?:\(.*\))?(\+0x\w+)?", said)
    return sorted({f"{what} at {kernel.strip()}{offset}" for what, kernel, offset in found})


def _check(name: str, tool: str, as_compiled: bool) -> tuple[bool, str]:
    """Runs a case under a tool, with a folder of its own for what is compiled; see `verdict`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "UPCONV_CACHE_DIR": str(Path(folder))}
        if tool == "memcheck":  # a tensor's end is that of its allocation, not somewhere in PyTorch's pool
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        try:
            done = subprocess.run(
                command(name, tool, as_compiled), capture_output=True, text=True, timeout=TIMEOUT, env=environment
            )
        except subprocess.TimeoutExpired:
            return False, f"{name:{WIDTH}} no end within {TIMEOUT:.0f} s"
    return verdict(name, tool, done.returncode, done.stdout + done.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--as-compiled", action="store_true", help="one lane of a warp arrives, as shipped")
    parser.add_argument("--memcheck", action="store_true", help="look for invalid accesses, not hazards; as compiled")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = set(given.cases) - set(CASES)
    if unknown:
        parser.error(f"CASE must be one of {', '.join(CASES)}; got {sorted(unknown)[0]!r}")
    if given.run:
        _run(given.cases[0], given.as_compiled)
        return 0
    tool, clean = "memcheck" if given.memcheck else "racecheck", True
    with ThreadPoolExecutor(4 if (os.cpu_count() or 1) >= 8 else 1) as pool:
        for right, line in pool.map(lambda name: _check(name, tool, given.as_compiled), given.cases or CASES):
            print(line, flush=True)  # in the order of the cases, whichever ends first
            clean = clean and right
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
