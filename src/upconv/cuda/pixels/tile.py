"""What tiles of all modes have: a layer's sizes, packed weights, and a ring whose stages fill shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from upconv.cuda.axes import Unfit, result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.gemm.shuffle import Triple
from upconv.cuda.gpu import Gpu
from upconv.cuda.packs import PACK_THREADS
from upconv.derived import varied
from upconv.problem import Problem

PRECISIONS = {"tf32": 0, "fp16": 2, "bf16": 3}
"""The precisions that these kernels have, as they number them."""
CONSUMERS = 2
MOST_COUNTED = 2**31
"""What a kernel counts in 32 bits."""
SPAN = 128
"""Bytes of a row of weights in shared memory, and of a swizzled row of pixels."""
_MOST_STAGES = 8


T = TypeVar("T", bound="Tile")


def triple(values: tuple[int, ...], lone: int = 1) -> Triple:
    """Along D, H and W, with ``lone`` for an axis that the layer does not have."""
    d, h, w = (lone,) * (3 - len(values)) + values
    return d, h, w


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why no mode serves a problem, in a sentence; None when one may."""
    if gpu.arch != "90a":
        return "pixels as rows are multiplied by wgmma alone"
    if p.precision not in PRECISIONS:
        return f"precision {p.precision} is none of the kernel's"
    return None


def stores_wide(element: int, columns: int, channels: int) -> bool:
    """Whether lanes may exchange float32 results of so many columns and channels, to store 16 bytes each."""
    return element == 4 and columns % 16 == 0 and channels % 4 == 0


def of_axes(name: str, values: tuple[int, ...]) -> dict[str, jit.Constant]:
    """A kernel's constants of three axes."""
    return {f"{name}_{axis}": value for axis, value in zip("dhw", values)}


@dataclass(frozen=True)
class Tile:
    """A tile's shape and the kernel's constants for one layer at any size: all but the sizes of input and batch.

    Raises, on `checked`:
        Unfit: the kernel cannot run it.
    """

    problem: Problem
    stages: int = field(default=2, kw_only=True)
    """Of a ring."""

    @property
    def element(self) -> int:
        """Bytes."""
        return self.problem.dtype.itemsize

    @property
    def channels(self) -> tuple[int, int]:
        """The source's and the result's."""
        return source_shape(self.problem)[1], result_shape(self.problem)[1]

    @property
    def kernel(self) -> Triple:
        return triple(self.problem.kernel)

    @property
    def strides(self) -> Triple:
        return triple(self.problem.stride)

    @property
    def packed_words(self) -> int:
        """32-bit words of the packed weights."""
        raise NotImplementedError

    @property
    def pack_blocks(self) -> int:
        """Blocks that pack, a unit of 16 bytes a thread."""
        return -(-self.packed_words // 4 // PACK_THREADS)

    @property
    def stage_bytes(self) -> int:
        raise NotImplementedError

    def shared_with(self, stages: int) -> int:
        """`shared_bytes` of the tile with other stages."""
        return stages * (self.stage_bytes + 16)

    @property
    def shared_bytes(self) -> int:
        return self.shared_with(self.stages)

    def faults(self) -> Iterator[str]:
        """Why the kernel cannot run it on any GPU, whatever its stages."""
        raise NotImplementedError

    def checked(self: T, shared_limit: int) -> T:
        """This, when the kernel can run it."""
        for fault in self.faults():
            raise Unfit(fault)
        if self.stages < 2:
            raise Unfit("a ring has a stage that is read, and one that is filled")
        if self.shared_bytes > shared_limit:
            raise Unfit(f"the tile takes {self.shared_bytes} bytes of shared memory, the device has {shared_limit}")
        return self

    def constants(self) -> dict[str, jit.Constant]:
        """The kernel's; here what all modes have."""
        cin, cout = self.channels
        return {
            "precision": PRECISIONS[self.problem.precision],
            "cin": cin,
            "cout": cout,
            "stages": self.stages,
            "shared_bytes": self.shared_bytes,
        }


def fitted(tiles: Iterable[T], gpu: Gpu) -> tuple[T, ...]:
    """Of tiles those that fit, each with as many stages as shared memory has room for."""
    found = []
    for t in tiles:
        if any(True for _ in t.faults()):
            continue
        fixed = t.shared_with(0)
        stages = (gpu.shared_bytes - fixed) // (t.shared_with(1) - fixed)
        if stages >= 2:
            found.append(varied(t, stages=min(stages, _MOST_STAGES)))
    return tuple(found)
