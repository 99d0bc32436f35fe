"""Forwards on CUDA cores, for few channels per group and for float64.

``kernels/direct.cu`` and, for depthwise layers in NCHW, ``direct_walk.cu`` say how a block works.
Here is the choice among their configurations, and its launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.direct import tile_costs, tiles, walks
from upconv.cuda.direct.cells import Cost, axes
from upconv.cuda.direct.tiles import Tile
from upconv.cuda.direct.walks import Walk
from upconv.cuda.gpu import Gpu, fma_lanes
from upconv.cuda.launches import (
    NULL,
    Given,
    Int,
    Launch,
    Long,
    PacksWeights,
    Pointer,
    Unit,
    five_strides,
    ints,
)  # fmt: skip
from upconv.problem import Problem

_PACK_THREADS = 256
_BLOCKS = 8  # of a kind of thread whose chunks are all estimated
MARGIN = 1.1  # `Choice.margin`
_PACKING = {"direct": "WeightRows", "direct_walk": "DirectWalk"}
"""What packs the weights of each kernel."""


@dataclass(frozen=True)
class Choice(PacksWeights, family.Defaults):
    """A configuration of the direct kernels for a problem, and what the model thinks of it."""

    seconds: float
    """The model's estimate."""
    summary: str
    """One line: tile, grid, predicted bound."""
    bound: str
    """What limits it, by the model."""
    problem: Problem
    tile: Tile | Walk

    family: ClassVar[str] = "direct"

    @property
    def margin(self) -> float:
        """Its model is too optimistic near a tie with other families."""
        return MARGIN

    @property
    def packing_seconds(self) -> float:
        return family.packing_seconds(self.problem)

    def constants(self) -> dict[str, int]:
        """The kernel's."""
        if isinstance(self.tile, Walk):
            return walks.constants(self.problem, self.tile)
        return tiles.constants(self.problem, self.tile)

    @property
    def entry(self) -> str:
        """The kernel's name, and its file's."""
        return "direct_walk" if isinstance(self.tile, Walk) else "direct"

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.constants()["threads"]

    @property
    def shared_bytes(self) -> int:
        """That a launch asks for."""
        if not isinstance(self.tile, Tile):
            return 0
        return tiles.shared_words(self.problem, self.constants())[2] * self.sums.itemsize

    @property
    def sums(self) -> torch.dtype:
        """The accumulators', and of packed weights."""
        return torch.float64 if self.problem.dtype == torch.float64 else torch.float32

    @property
    def packed_words(self) -> int:
        """Elements of the packed weights."""
        if isinstance(self.tile, Walk):
            return walks.packed_words(self.problem)
        return tiles.packed_words(self.problem, self.tile.co)

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile."""
        packing = _PACKING[self.entry]
        entries = (f"direct_pack<{packing}<{jit.CONFIG}>>", f"{self.entry}<{jit.CONFIG}>")
        source = jit.instance(f"{self.entry}.cu", self.constants(), entries)
        return (Unit(f"{self.entry} {self.summary}", source, ("direct_pack", self.entry)),)

    # --- launches -----------------------------------------------------------------------------------------------------

    def packed_bytes(self, given: Given) -> int:
        return self.packed_words * self.sums.itemsize

    def pack(self, given: Given) -> Launch:
        (unit,) = self.sources()
        strides = five_strides(self.problem.weight_shape, given.weight)
        blocks = min(-(-self.packed_words // _PACK_THREADS), 2**16)
        arguments = (Pointer("weight"), Pointer("packed"), *strides, Long(self.packed_words))
        return Launch(unit, "direct_pack", blocks, _PACK_THREADS, 0, arguments)

    def multiply(self, given: Given) -> Launch:
        (unit,) = self.sources()
        grid, sizes = _grid(self.problem, self.tile)
        bias = NULL if given.bias == "none" else Pointer("bias")
        pointers = Pointer("source"), Pointer("packed"), bias, Pointer("result")
        return Launch(unit, self.entry, grid, self.threads, self.shared_bytes, (*pointers, *sizes))


def _grid(p: Problem, tile: Tile | Walk) -> tuple[int, tuple[Int, ...]]:
    """Blocks, and the arguments behind the tensors."""
    d, h, w = axes(p)
    sizes = (d.size, h.size, w.size, d.out, h.out, w.out)
    if isinstance(tile, Walk):
        runs, strips, threads = walks.grid(p, tile)
        tail = (h.size, w.size, h.out, w.out, runs, strips, tile.strip, threads)
        return -(-threads // walks.THREADS), ints(tail)
    tiles_h, tiles_w, blocks = tiles.grid(p, tile)
    return blocks, ints((*sizes, tiles_h, tiles_w))


@lru_cache(maxsize=1024)
def choose(p: Problem, gpu: Gpu, limit: float = math.inf) -> Choice | str:
    """The tile that the model expects to be fastest, or the sentence why this family has none.

    ``limit``: seconds of another family's choice; tiles that cannot be faster need not be looked at.
    """
    if p.batch == 0 or 0 in p.size:
        return "an empty input has no work"
    found, least = costs(p, gpu, limit / MARGIN)
    if not found and least < math.inf:
        return f"slower: it takes at least {least * 1e3:.3g} ms on CUDA cores"
    best = min(found, key=lambda one: one[0].seconds, default=None)
    if best is None:
        return "no tile of cells and channels fits these kernels"
    cost, chosen = best
    return Choice(cost.seconds, _summary(p, chosen, cost), cost.bound, p, chosen)


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks; of what CUDA cores cannot do as fast no tile is looked for."""
    fastest = math.inf if best is None else family.weighed(best)
    if (least := least_seconds(p, gpu)) > fastest:
        return f"slower: its multiply-adds alone take {least * 1e3:.3g} ms on CUDA cores"
    return choose(p, gpu, fastest)


def costs(p: Problem, gpu: Gpu, limit: float) -> tuple[list[tuple[Cost, Tile | Walk]], float]:
    """Configurations with what the model says of them, and the least bound of those that were left out.

    These are tiles of a `Kind` whose bound is above ``limit`` or the best of another.
    """
    found: list[tuple[Cost, Tile | Walk]] = [(walks.cost(p, walk, gpu), walk) for walk in walks.walks(p)]
    best = min((cost.seconds for cost, _ in found), default=math.inf)
    layer = p.with_(batch=1, size=tuple(1024 + 2 * pad // s for pad, s in zip(p.padding, p.stride)))

    def cost(tile: Tile) -> Cost | None:
        return tile_costs.cost(p, tile, tile_costs.facts(layer, tile), gpu)

    kinds = [(tile_costs.least(p, kind, gpu), i, kind) for i, kind in enumerate(tiles.kinds(p))]
    of_kinds: dict[int, list[tuple[Cost, Tile | Walk]]] = {}
    for least, i, kind in sorted(kinds):
        if least > min(best, limit):
            break
        of_kinds[i] = _best_blocks(tiles.of_kind(p, kind), cost)
        best = min([best, *(cost.seconds for cost, _ in of_kinds[i])])
    left = min((least for least, i, _ in kinds if i not in of_kinds), default=math.inf)
    return found + [one for i in sorted(of_kinds) for one in of_kinds[i]], left


def _best_blocks(every: Iterable[Tile], cost: Callable[[Tile], Cost | None]) -> list[tuple[Cost, Tile | Walk]]:
    """Every tile of the blocks that are the best with one of their tiles, each with its cost."""
    blocks: dict[tuple[int, int, int], list[Tile]] = {}
    for tile in every:
        blocks.setdefault((tile.block_x, tile.block_h, tile.slots), []).append(tile)
    seconds = {}
    for block, of in blocks.items():  # by its largest chunk that fits
        costs = map(cost, sorted(of, key=lambda t: -t.chunk))
        if (fitting := next((each for each in costs if each is not None), None)) is not None:
            seconds[block] = fitting.seconds
    kept = sorted(seconds, key=lambda block: seconds[block])[:_BLOCKS]
    found = ((cost(tile), tile) for block in kept for tile in blocks[block])
    return [(each, tile) for each, tile in found if each is not None]


def least_seconds(p: Problem, gpu: Gpu) -> float:
    """What a problem's multiply-adds alone take on CUDA cores, in seconds, by the model of `choose`."""
    return p.flops / 2 / (fma_lanes(gpu, p.dtype == torch.float64) * gpu.multiprocessors * gpu.clock * 0.85)


def _summary(p: Problem, tile: Tile | Walk, cost: Cost) -> str:
    """A configuration in one line."""
    w = axes(p)[2]
    if isinstance(tile, Walk):
        return (
            f"depthwise walk of {tile.strip} x {tile.cells} cells per thread, "
            f"{cost.blocks} blocks of {walks.THREADS} threads"
        )
    m = tiles.constants(p, tile)
    return (
        f"{tile.block_h}x{tile.cells * tile.block_x} cells x {tile.slots * tile.co} channels, {m['threads']} threads x "
        f"{tile.co}x{tile.phases}x{tile.cells * w.stride} outputs, {m['stages']} stages of {tile.chunk} channels"
        f", {cost.blocks} blocks"
    )
