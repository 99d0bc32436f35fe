"""Blocks that walk along D, whose sums move from slot to slot: what `sweep` and `rows` plan alike."""

from __future__ import annotations

import math

from upconv.cuda.axes import result_shape
from upconv.problem import Problem


class Walks:
    """Of a family's tiles: how results are cut into walks. Sizes are run-time arguments, so ``p`` has them."""

    def extent(self) -> tuple[int, int]:
        """Results of a tile along H and W."""
        raise NotImplementedError

    def segments(self, walks: int, slices: int, multiprocessors: int) -> int:
        """Into how many segments walks are cut, so that the blocks are busy alike."""
        raise NotImplementedError

    def counts(self, p: Problem, multiprocessors: int) -> tuple[int, int, int, int]:
        """Images, segments of a walk along D, and tiles along H and W, of a problem of this layer."""
        d, h, w = result_shape(p)[2:]
        height, width = self.extent()
        rows, columns = -(-h // height), -(-w // width)
        return p.batch, self.segments(p.batch * rows * columns, d, multiprocessors), rows, columns

    def walk(self, p: Problem, multiprocessors: int) -> int:
        """Result slices of a walk, which takes a step more for each slot but one."""
        return -(-result_shape(p)[2] // self.counts(p, multiprocessors)[1])

    def grid(self, p: Problem, multiprocessors: int) -> int:
        """Blocks: one for each multiprocessor."""
        return min(math.prod(self.counts(p, multiprocessors)), multiprocessors)

    def arguments(self, p: Problem, multiprocessors: int) -> tuple[int, ...]:
        """The kernel's integer arguments behind its pointers; the last is what its blocks count."""
        raise NotImplementedError
