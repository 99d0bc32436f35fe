"""A lower bound of the gather-GEMM's cost model, from what is known before a tiling is made.

`gather_search` looks only at sketches of tilings whose bound is below the best time so far. Each term here is at most
that of `gather_model`: matrix instructions without their waits, the pixels of a tile without its halo, stores without
their addresses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from upconv.cuda.axes import positions, result_shape, source_shape
from upconv.cuda.gemm.costs import LAUNCH, Constants, constants
from upconv.cuda.gemm.gather_model import CLUSTER, HALVED, MANY, MMA_SYNC, STAGED
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gemm.tiling_weights import STEPS_UNROLLED
from upconv.cuda.gpu import Gpu
from upconv.derived import varied
from upconv.problem import Problem

_MOST_STAGES = 8
CLUSTERS = (2, 4, 8)
"""Blocks of a cluster that may share a tile's chunks."""


@dataclass(frozen=True)
class Shape:
    """A tiling before its stages: what the bound depends on beside the taps."""

    sub: tuple[int, int]
    tile: tuple[int, int, int, int]
    split: int
    chunk: int

    @property
    def consumer_subtiles(self) -> int:
        """`Tiling.nb`."""
        n, d, h, w = self.tile
        subtiles = n * d * (h // self.sub[0]) * (w // self.sub[1])
        return subtiles // 2 if self.split == 0 else subtiles


class Floor:
    """What no tiling of a problem by some taps is below.

    Args:
        t: any tiling of these taps; ``subs``, ``unroll`` and ``w_subs`` count, and what all of a layer share.
        planewise: the values that `Tiling.planewise` may have.
        clusters: whether blocks may share chunks.
    """

    def __init__(self, t: Tiling, p: Problem, gpu: Gpu, planewise: tuple[bool, ...], clusters: bool) -> None:
        self._t, self._gpu, self._clusters = t, gpu, clusters
        self._planewise = any(planewise)
        self._sets = [constants(varied(t, planewise=by_plane)) for by_plane in planewise]
        self._axes = tuple(zip(positions(p, t.shuffle), t.out_steps))
        self._batch, self._groups, self._variants = p.batch, t.problem.groups, len(t.variants)
        self._couts = t.cout_g if t.shuffle is None else t.shuffle.used
        self._outputs = 0 if t.beside else t.width_subs * t.subs * t.element  # bytes, of a q and a row of M
        residues = [len({offset % step for offset in offsets}) for offsets, step in zip(t.offsets, t.in_steps)]
        self._read = 0 if t.whole is not None else math.prod(residues)  # pixels of a tile for each of its q
        spared = enumerate(zip(residues, t.in_steps))
        share = math.prod(r / step for axis, (r, step) in spared if axis < 2 or t.channels_last)
        moved = math.prod(result_shape(p)) + math.prod(source_shape(p)) * share
        self._memory = moved * t.element / gpu.bandwidth

    def seconds(self, shape: Shape) -> float:
        """The least time of a tiling of this shape, in seconds."""
        t, gpu = self._t, self._gpu
        rows = t.rows_per_sub * (2 if shape.split == 1 else 1)
        tiles = -(-self._batch // (t.beside or shape.tile[0])) * self._groups * -(-t.cout_g // rows) * self._variants
        for (count, step), of in zip(self._axes, shape.tile[1:]):
            tiles *= -(-count // (step * of))
        chunks = -(-t.cin_g // shape.chunk)
        waves = -(-tiles // gpu.multiprocessors)
        clocks = min(self._clocks(shape, c, rows, chunks, 1, waves) for c in self._sets)
        if self._clusters and shape.split != 2:
            for cluster in CLUSTERS:
                if 2 * cluster <= chunks and tiles <= gpu.clusters(cluster):
                    shared = -(-chunks // cluster)
                    clocks = min(clocks, *(self._clocks(shape, c, rows, shared, cluster, 1) for c in self._sets))
        found = clocks / gpu.clock
        halved = HALVED if shape.split == 0 and t.shuffle is None else 1.0
        return halved * (max(self._memory, found) + 0.15 * min(self._memory, found) + LAUNCH)

    def _clocks(self, shape: Shape, c: Constants, rows: int, chunks: int, cluster: int, waves: int) -> float:
        """Clocks of so many waves of tiles, as `gather_model.tile_clocks` has them, or less."""
        t, split = self._t, shape.split
        nb, k_steps, q = shape.consumer_subtiles, shape.chunk * t.element // 32, math.prod(shape.tile)
        pixels = q * self._read
        copied = pixels * (shape.chunk * t.element + (c.row if t.channels_last else 0.0))
        turned = t.parts * k_steps * (2 if not t.channels_last else (t.parts == 2) * 0.7)
        turn = -(-pixels // (192 if t.wgmma else 128)) * turned * c.turning[1 if t.element == 4 else 2] + c.turning[0]
        latency = 0.0 if self._planewise else c.latency / _MOST_STAGES  # of a chunk
        stored = q * self._outputs * min(self._couts, rows) // cluster
        store = stored / (STAGED[0] if t.drained else c.store)
        fragment = nb * (32 if split == 2 else 64) * (3 if t.parts == 2 else 1) / t.parts
        step, drain = (c.step[0], c.drain[0]) if nb % 2 else (min(c.step), min(c.drain))
        longest = max(t.most_entries * k_steps * t.parts, STEPS_UNROLLED)
        of_step = fragment + step + drain / longest if t.wgmma else fragment / MMA_SYNC
        many = waves >= MANY
        total = 0.0
        for entries, times in t.repeated_entries:
            of_chunks = chunks if entries else 0
            matrix, l2 = of_chunks * entries * k_steps * t.parts * of_step, (of_chunks * copied + stored) / c.l2
            body = max(matrix, l2, of_chunks * max(turn, latency)) + c.overlap * min(matrix, l2)
            body += of_chunks * (c.exposed * latency + min(c.chunk))
            every = body + store + c.tile  # of the last tile, whose stores nothing hides
            if split == 2:
                tile = max(body + c.turn, every / 2)
            else:
                beside = CLUSTER[0] + cluster * CLUSTER[1] if cluster > 1 else 0.0
                tile = body + c.store_share * store + c.tile + beside
                every += beside
            total += times * (waves * tile if many else (waves - 1) * tile + every)
        return c.scale * total / self._variants
