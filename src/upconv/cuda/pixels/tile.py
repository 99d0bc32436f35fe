"""What tiles of all modes have: a layer's sizes, packed weights, and a ring whose stages fill shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Five, dense
from upconv.cuda.cost import Work
from upconv.cuda.gemm.shuffle import Triple
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Argument, Given, Map, Pointer, ints
from upconv.cuda.packs import PACK_THREADS
from upconv.derived import varied
from upconv.problem import Problem

PRECISIONS = {"tf32": 0, "fp16": 2, "bf16": 3}
"""The precisions that these kernels have, as they number them."""
CONSUMERS = 2
MOST_COUNTED = 2**31
"""What a kernel counts in 32 bits."""
MOST_COLUMNS = 256
"""Of a matrix instruction."""
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
    if p.groups > 1:
        return "the kernel knows no groups"
    if 0 in source_shape(p) + result_shape(p):
        return "there is nothing to sum"
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

    A mode is a subclass. What it says of a size has the problem as an argument.
    """

    problem: Problem
    stages: int = field(default=2, kw_only=True)
    """Of a ring."""

    family: ClassVar[str] = "pixels"
    mode: ClassVar[str]
    file: ClassVar[str] = "pixels"
    named: ClassVar[tuple[str, ...]] = ()
    """Properties that are constants of the kernel by the same name."""
    threads: ClassVar[int] = 128 * (1 + CONSUMERS)
    """Of a block: a producer's warpgroup and the consumers'."""
    biased: ClassVar[bool] = False
    """Whether a gradient may have a bias."""
    beside_pack: ClassVar[bool] = True
    """Whether the kernel may begin while its weights are packed."""

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

    # --- weights and shared memory -----------------------------------------------------------------------------------

    @property
    def packed_as(self) -> tuple[Any, ...]:
        """What the packed weight depends on beside the weight, and the mode."""
        raise NotImplementedError

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

    # --- the kernel --------------------------------------------------------------------------------------------------

    @property
    def entry(self) -> str:
        return self.file

    @property
    def struct(self) -> str:
        """The mode's, of the kernel's constants."""
        return f"{self.mode.capitalize()}<{jit.CONFIG}>"

    @property
    def instance(self) -> str:
        """The entry as a template's."""
        return f"{self.entry}<{self.struct}>"

    @property
    def cluster(self) -> int:
        """Blocks that share a tile."""
        return 1

    @property
    def in_place(self) -> bool:
        """Whether the kernel reads channels-last weights as they lie, so that nothing is packed."""
        return False

    @property
    def aligned(self) -> bool:
        """Whether a result is stored by units of up to 16 bytes, at which it must begin."""
        return True

    def constants(self) -> dict[str, jit.Constant]:
        """The kernel's; here what all modes have."""
        cin, cout = self.channels
        own = {name: getattr(self, name) for name in ("stages", "shared_bytes", *self.named)}
        return {"precision": PRECISIONS[self.problem.precision], "cin": cin, "cout": cout} | own

    # --- a size ------------------------------------------------------------------------------------------------------

    def tiles(self, p: Problem) -> int:
        raise NotImplementedError

    def grid(self, p: Problem, gpu: Gpu) -> int:
        """Blocks: at most one for each multiprocessor."""
        return min(self.tiles(p), gpu.multiprocessors)

    def sizes(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        """The kernel's integer arguments behind its pointers."""
        raise NotImplementedError

    @property
    def box(self) -> Five:
        """Of the source in NCHW: W, H, D, channels, images."""
        raise NotImplementedError

    def source_map(self, p: Problem) -> Map:
        """Over the source, here one in NCHW. float32 is rounded to TF32 on its way."""
        channels, *size = source_shape(p)[1:]
        d, h, w = triple(tuple(size))
        tensor = dense((w, h, d, channels, p.batch), self.element)
        return Map("source", tensor, p.dtype, self.box, (1,) * 5, rounded=p.precision == "tf32")

    def arguments(self, p: Problem, gpu: Gpu, given: Given, bias: Pointer, result: Pointer) -> tuple[Argument, ...]:
        """The kernel's."""
        return Pointer("packed"), bias, result, *ints(self.sizes(p, gpu)), self.source_map(p)

    def work(self, p: Problem, gpu: Gpu) -> Work:
        """What an average tile asks of its multiprocessor."""
        raise NotImplementedError

    def summary(self, p: Problem, gpu: Gpu) -> str:
        """The tile in words."""
        return f"pixels as rows, {self.mode}: wgmma {p.precision}, {self.text(p, gpu)}"

    def text(self, p: Problem, gpu: Gpu) -> str:
        """The tile's shape and rings in words."""
        raise NotImplementedError


def moved(p: Problem, written: float = 1.0, read: float = 1.0) -> float:
    """Bytes of a source and a result, each counted so many times."""
    return (math.prod(source_shape(p)) * read + math.prod(result_shape(p)) * written) * p.dtype.itemsize


def even_grid(tiles: int, gpu: Gpu) -> int:
    """Blocks for so many tiles: at most one for each multiprocessor, no more than it takes to be done as soon.

    So the last tiles are those of many blocks, whose loads hide each other's latency.
    """
    return -(-tiles // -(-tiles // gpu.multiprocessors))


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
