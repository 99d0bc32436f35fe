"""Tiles of NCHW places times columns, whose pixels and weights come through one ring: `subpixel` and `pairs`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from upconv.cuda.cost import Work
from upconv.cuda.gpu import Gpu
from upconv.cuda.pixels.tile import CONSUMERS, SPAN, Tile, moved
from upconv.problem import Problem

SUBTILES = 1, 2
_MOST_REGISTERS = 184  # of a consumer's thread for sums and fragments


@dataclass(frozen=True)
class Streamed(Tile):
    """As `Tile`; a stage has pixels, and rows of weights: for each column 128 bytes of K."""

    columns: int
    """Of a tile."""
    mb: int
    """Subtiles of 64 places that a consumer accumulates."""

    rows = 1
    """Of a stage's weights."""

    @property
    def places(self) -> int:
        """Of a tile."""
        return CONSUMERS * 64 * self.mb

    @property
    def all_columns(self) -> int:
        """The layer's."""
        raise NotImplementedError

    @property
    def blocks(self) -> int:
        """Tiles along the columns."""
        return -(-self.all_columns // self.columns)

    @property
    def stages_k(self) -> int:
        """That a tile takes."""
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return self.rows * self.columns * SPAN

    @property
    def packed_words(self) -> int:
        return self.blocks * self.stages_k * self.weight_bytes // 4

    def faults(self) -> Iterator[str]:
        if self.mb * (self.columns // 2 + 16) > _MOST_REGISTERS:
            yield f"{self.mb} x 64 x {self.columns} sums are more than registers hold"

    def work_of(
        self, p: Problem, gpu: Gpu, boxes: int, box_bytes: int, box_lines: float, loaded: int, stored: float
    ) -> Work:
        """`work`, of the boxes of a stage, bytes that lanes load for an instruction, and clocks of a tile's stores."""
        instructions = 2 * self.mb * 4 * self.rows * self.stages_k
        copied = (boxes * box_bytes + self.weight_bytes) * self.stages_k
        return Work(
            instructions,
            instructions * self.columns,
            waves=-(-self.tiles(p) // gpu.multiprocessors),
            moved=moved(p),
            steps=self.stages_k,
            stages=self.stages,
            lines=self.stages_k * boxes * box_lines,
            boxes=self.stages_k * boxes,
            shared=instructions * self.columns * 32 + copied,
            fragments=instructions * loaded,
            stored=stored,
        )
