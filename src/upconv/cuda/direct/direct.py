"""All three passes on CUDA cores from tiles in shared memory: the choice of a tile, and its launch.

For depthwise layers, few channels and float64. A tile of the source is read once, in whole units, and its taps meet it
in shared memory. Read through the first-level cache, a stride of 8 would make each load eight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.cost import Cost
from upconv.cuda.direct import plain
from upconv.cuda.direct.costs import cost, least, least_seconds
from upconv.cuda.direct.tiles import Tile, tried, weight_blocks, whole_units
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import NULL, THREADS, Given, Int, Launch, Pointer, Scratch, Unit, ints, longs, strides_of
from upconv.problem import Pass, Problem, triple


@dataclass(frozen=True)
class Choice(family.Choice):
    """A tile for a problem on a GPU, and what the model thinks of it."""

    problem: Problem
    tile: Tile
    ranges: int
    """Of tiles, whose sums are added in a second step (grad-weight)."""
    cost: Cost

    family = "direct"
    reads = "contiguous"

    @property
    def summary(self) -> str:
        t = self.tile
        each = f"{t.kh}x{t.kw} taps x {t.channels} input channels" if t.weight else f"{t.channels} channels"
        lanes = "channels" if t.lanes_are_channels else "columns"
        ranges = f", {self.ranges} ranges of tiles" if t.weight else ""
        return (
            f"tiles of {t.h}x{t.w} cells in {t.shared_bytes >> 10} KB, lanes are {lanes}, a thread takes "
            f"{t.rows} rows x {each}{ranges}"
        )

    @property
    def packing(self) -> tuple[str, Pass]:
        return "contiguous", self.problem.pass_

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all sizes."""
        p = self.problem
        label = f"direct {p.pass_} {str(p).split(' on ')[0]} {p.precision} {p.layout}"
        entries = ("direct_weight", "direct_reduce") if self.tile.weight else ("direct",)
        named = [f"{entry}<{jit.CONFIG}>" for entry in entries]
        return (Unit(label, jit.instance(f"{entries[0]}.cu", self.tile.constants(), named), entries),)

    def launches(self, given: Given) -> tuple[Launch, ...]:
        (unit,), p, t = self.sources(), self.problem, self.tile
        tiles_h, tiles_w, tiles = t.blocks_of(p)
        units = given.aligned and t.vector > 1 and whole_units(p, t)
        source, other = (p.size, p.out_size) if t.forward else (p.out_size, p.size)
        sizes = ints((p.batch, *triple(source), *triple(other), tiles_h, tiles_w, int(units)))
        if not t.weight:
            bias = NULL if given.bias == "none" else Pointer("bias")
            pointers = Pointer("source"), Pointer("weight"), bias, Pointer("result")
            grid = tiles * t.channel_blocks
            return (Launch(unit, "direct", grid, t.threads, t.shared_bytes, (*pointers, *sizes)),)
        count = math.prod(p.weight_shape)
        sums = Pointer(Scratch("sums", self.ranges * count * t.accumulator))
        arguments = (Pointer("input"), Pointer("gradient"), sums, *sizes, Int(-(-tiles // self.ranges)))
        grid = weight_blocks(t) * self.ranges
        strides = strides_of(p.weight_shape, given.weight)
        to = (sums, Pointer("result"), Int(self.ranges), *longs((strides[0], strides[1], strides[-1])))
        return (
            Launch(unit, "direct_weight", grid, t.threads, t.shared_bytes, arguments),
            Launch(unit, "direct_reduce", -(-count // THREADS), THREADS, 0, to),
        )


# --- the choice ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def choose(p: Problem, gpu: Gpu) -> Choice | str:
    """The tile that the model expects to be fastest, or the sentence why these kernels cannot serve the problem."""
    if p.batch == 0 or 0 in p.size:
        return "an empty input has no work"
    found = (_cheapest(tiles, p, gpu) for tiles in tried(p))
    return next(filter(None, found), "no tile of positions and taps fits these kernels")


def _cheapest(tiles: Iterable[Tile], p: Problem, gpu: Gpu) -> Choice | None:
    """Of equals the first. What is slower by `least` is not looked at."""
    best: tuple[float, int] = math.inf, 0
    choice: Choice | None = None
    bounded = ((least(p, tile, gpu), i, tile) for i, tile in enumerate(tiles))
    for bound, i, tile in sorted(bounded, key=itemgetter(0)):
        if bound > best[0]:
            break
        # Blocks are counted, of a grid or by their index, in 32 bits.
        if tile.fits(gpu.shared_bytes) and tile.blocks_of(p)[2] * tile.channel_blocks < 2**31:
            found, ranges = cost(p, tile, gpu)
            if (found.seconds, i) < best:
                best, choice = (found.seconds, i), Choice(p, tile, ranges, found)
    return choice


def _tiled(p: Problem, gpu: Gpu, best: family.Choice | None) -> Choice | str:
    """`choose`, but of what CUDA cores cannot do as fast no tile is looked for."""
    if too_long := family.too_long(p):
        return too_long
    if best is not None and (least := least_seconds(p, gpu)) > family.call_seconds(best):
        return f"slower: its multiply-adds alone take {least * 1e3:.3g} ms on CUDA cores"
    return choose(p, gpu)


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Any:
    """As `upconv.cuda.family` asks: the faster of a tile and `plain`, which serves every layer.

    The sentence why not, where `plain` alone has a choice, and is no faster.
    """
    tiled: Any = _tiled(p, gpu, best)
    slow: Any = plain.candidate(p, gpu)
    if not isinstance(tiled, str):
        return min(tiled, slow, key=family.call_seconds)
    return slow if best is None or family.call_seconds(slow) < family.call_seconds(best) else tiled
