"""What families plan alike whose columns of N are channels: those of pixels as rows, some of wgrad; and `joined`.

See kernels/columns.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from upconv.cuda import family
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.gpu import Gpu
from upconv.problem import Problem

T = TypeVar("T")

PRECISIONS = {"tf32": 0, "fp16": 2, "bf16": 3}
"""The precisions that they have, as their kernels number them."""


def instruction(prefix: str, columns: int, words_of_a: int = 0) -> dict[str, str]:
    """Macros for a matrix instruction of so many columns, as PTX and an asm's constraints name its operands.

    Its sums are ``d[0]`` and on; A is a descriptor, or ``words_of_a`` registers; B is a descriptor.
    """
    sums = columns // 2
    rows = [range(i, min(i + 16, sums)) for i in range(0, sums, 16)]
    a = "{" + ",".join(f"%{sums + i}" for i in range(words_of_a)) + "}" if words_of_a else f"%{sums}"
    return {
        f"{prefix}COLUMNS": f'"{columns}"',
        # Many literals and spaces, so that an exported file can break the line.
        f"{prefix}REGISTERS": '"' + '," "'.join(",".join(f"%{i}" for i in row) for row in rows) + '"',
        f"{prefix}SUMS": ", ".join(f'"+f"(d[{i}])' for i in range(sums)),
        f"{prefix}A_AND_B": f'"{a}, %{sums + (words_of_a or 1)}"',
    }


def stores_wide(element: int, columns: int, channels: int) -> bool:
    """Whether lanes may exchange float32 results of so many columns and channels, to store 16 bytes each."""
    return element == 4 and columns % 16 == 0 and channels % 4 == 0


class PixelTile:
    """What tiles of `pixels` and `implicit` have alike: a problem, columns of N, and source channels of a box."""

    problem: Problem
    chunk: int
    columns: Any
    """Of a matrix instruction: channels of the result, a multiple of 8."""

    @property
    def element(self) -> int:
        return self.problem.dtype.itemsize

    @property
    def channels(self) -> tuple[int, int]:
        """The source's and the result's."""
        return source_shape(self.problem)[1], result_shape(self.problem)[1]

    @property
    def strides(self) -> tuple[int, ...]:
        """Along D, H, W."""
        return (1,) * (3 - self.problem.rank) + self.problem.stride

    @property
    def row_bytes(self) -> int:
        """Of a pixel in shared memory."""
        return self.chunk * self.element

    @property
    def exchanges(self) -> bool:
        """Whether lanes may exchange float32 results with a neighbour, to store 16 bytes each."""
        return stores_wide(self.element, self.columns, self.channels[1])

    @property
    def weight_span(self) -> int:
        """Bytes of a row of a box of weights."""
        return self.row_bytes

    @property
    def weight_box(self) -> tuple[int, int, int, int, int]:
        """The box of a tap's weights for a chunk, where they come as they lie."""
        return self.chunk, 1, self.columns, 1, 1


@dataclass(frozen=True)
class TileChoice(family.Defaults, Generic[T]):
    """A tile for a problem on a GPU, and what the model thinks of it."""

    tile: T
    """Of the layer at any size; its own problem's size and batch mean nothing."""
    problem: Problem
    gpu: Gpu
    seconds: float
    """The model's estimate."""
    bound: str
    """What limits it, by the model."""

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
