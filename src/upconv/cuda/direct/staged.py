"""Gradients on CUDA cores from tiles in shared memory. The kernels are ``staged.cu``.

Depthwise layers, small groups and few channels: a tile of the output's gradient is read once, in whole units, and its
taps meet it in shared memory. Read through the first-level cache, a stride of 8 would make each load eight.

`choose` tries every tile of a small grid; the cost model counts what a multiprocessor issues, what its shared memory
serves and what the memories bring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.direct.staged_costs import cost, least_seconds
from upconv.cuda.direct.staged_tiles import Tile, fitting, weight_blocks, whole_units
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Given, Int, Launch, Pointer, Scratch, Unit, ints, longs, strides_of
from upconv.cuda.rearrange import batches
from upconv.problem import Pass, Problem

_REDUCE_THREADS = 256  # of a block that adds the ranges' sums


@dataclass(frozen=True)
class Choice(family.Defaults):
    """A tile for a problem on a GPU, and what the model thinks of it."""

    seconds: float
    """The model's estimate."""
    summary: str
    bound: str
    """What limits it, by the model."""
    problem: Problem
    tile: Tile
    splits: int
    """Ranges of tiles whose sums are added in a second step (grad-weight)."""

    family: ClassVar[str] = "direct"

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all sizes."""
        p = self.problem
        label = f"staged {p.pass_} {str(p).split(' on ')[0]} {p.precision} {p.layout}"
        entries = ("grad_weight", "reduce_staged") if self.tile.weight else ("grad_input",)
        named = [
            f"reduce_staged<Staged<{jit.CONFIG}>>" if e == "reduce_staged" else f"{e}<{jit.CONFIG}>" for e in entries
        ]
        return (Unit(label, jit.instance("staged.cu", self.tile.constants(), named), entries),)

    reads = "contiguous"

    @property
    def packing(self) -> tuple[str, Pass]:
        return "contiguous", self.problem.pass_

    def launches(self, given: Given) -> tuple[Launch, ...]:
        (unit,), p, t = self.sources(), self.problem, self.tile
        tiles_h, tiles_w, tiles = t.blocks_of(p)
        units = given.aligned and t.vector > 1 and whole_units(p, t)
        sizes = ints((p.batch, *_full(p.size), *_full(p.out_size), tiles_h, tiles_w, int(units)))
        if not t.weight:
            pointers = Pointer("source"), Pointer("weight"), Pointer("result")
            grid = tiles * t.channel_blocks
            return (Launch(unit, "grad_input", grid, t.threads, t.shared_bytes, (*pointers, *sizes)),)
        count, element = math.prod(p.weight_shape), 8 if p.dtype is torch.float64 else 4
        sums = Pointer(Scratch("sums", self.splits * count * element))
        arguments = (Pointer("input"), Pointer("gradient"), sums, *sizes, Int(-(-tiles // self.splits)))
        grid = weight_blocks(p, t) * self.splits
        strides = strides_of(p.weight_shape, given.weight)
        to = (sums, Pointer("result"), Int(self.splits), *longs((strides[0], strides[1], strides[-1])))
        return (
            Launch(unit, "grad_weight", grid, t.threads, t.shared_bytes, arguments),
            Launch(unit, "reduce_staged", -(-count // _REDUCE_THREADS), _REDUCE_THREADS, 0, to),
        )


def _full(values: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes along D, H and W of those along the last axes."""
    return (1,) * (3 - len(values)) + values


# --- the choice ------------------------------------------------------------------------------------------------------


def choose(p: Problem, gpu: Gpu) -> Choice | str:
    """The tile that the model expects to be fastest, or the sentence why these kernels cannot serve the problem."""
    if p.batch == 0 or 0 in p.size:
        return "an empty input has no work"
    return _choose(p, gpu)


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks; of what CUDA cores cannot do as fast no tile is looked for."""
    if too_long := batches.too_long(p):
        return too_long
    if best is not None and (least := least_seconds(p, gpu)) > family.weighed(best):
        return f"slower: its multiply-adds alone take {least * 1e3:.3g} ms on CUDA cores"
    return choose(p, gpu)


@lru_cache(maxsize=4096)
def _choose(p: Problem, gpu: Gpu) -> Choice | str:
    best: Choice | None = None
    for tile in fitting(p, gpu):
        seconds, bound, splits = cost(p, tile, gpu)
        if tile.blocks_of(p)[2] * tile.channel_blocks >= 2**31:  # of a grid, or their index
            continue
        if best is None or seconds < best.seconds:
            best = Choice(seconds, _summary(p, tile, splits), bound, p, tile, splits)
    return best or "no tile of positions and taps fits these kernels"


def _summary(p: Problem, tile: Tile, splits: int) -> str:
    each = f"{tile.kh}x{tile.kw} taps x {tile.ci} input channels" if tile.weight else f"{tile.ci} input channels"
    lanes = "channels" if tile.lanes_are_channels else "columns"
    ranges = f", {splits} ranges of tiles" if tile.weight else ""
    return (
        f"tiles of {tile.h}x{tile.w} positions in {tile.shared_bytes >> 10} KB, lanes are {lanes}, a thread takes "
        f"{tile.rows} rows x {each}{ranges}"
    )
