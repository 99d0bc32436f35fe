"""What families plan alike whose columns of N are channels: those of pixels as rows, some of wgrad; and `joined`.

See kernels/columns.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from upconv.cuda import family
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import Gpu
from upconv.problem import Problem

T = TypeVar("T")

PRECISIONS = {"tf32": 0, "fp16": 2, "bf16": 3}
"""The precisions that they have, as their kernels number them."""


def stores_wide(element: int, columns: int, channels: int) -> bool:
    """Whether lanes may exchange float32 results of so many columns and channels, to store 16 bytes each."""
    return element == 4 and columns % 16 == 0 and channels % 4 == 0


@dataclass(frozen=True)
class TileChoice(family.Defaults, Generic[T]):
    """A tile for a problem on a GPU, and what the model thinks of it."""

    tile: T
    """Of the layer at any size; its own problem's size and batch mean nothing."""
    problem: Problem
    gpu: Gpu
    cost: Cost
    """The model's estimate."""

    @property
    def seconds(self) -> float:
        return self.cost.seconds

    @property
    def bound(self) -> str:
        """What limits it, by the model."""
        return self.cost.bound

    @property
    def terms(self) -> str:
        return self.cost.text

    @property
    def in_place(self) -> bool:
        """Whether the kernel reads channels-last weights as they lie, so that nothing is packed."""
        return False

    @property
    def packing_seconds(self) -> float:
        return 0.0 if self.in_place else family.packing_seconds(self.problem, self.gpu)

    def even_grid(self, tiles: int) -> int:
        """Blocks for so many tiles: at most one for each multiprocessor, no more than it takes to be done as soon.

        So the last tiles are those of many blocks, whose loads hide each other's latency.
        """
        return -(-tiles // -(-tiles // self.gpu.multiprocessors))
