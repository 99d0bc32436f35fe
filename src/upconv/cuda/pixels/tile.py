"""What tiles of all modes have: a layer's sizes, packed weights, and a ring whose stages fill shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Five, dense
from upconv.cuda.cost import Work
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import THREADS, Argument, Given, Map, Pointer, ints
from upconv.derived import derived_without, varied
from upconv.problem import Problem, Triple, triple

CONSUMERS = 2
MOST_COLUMNS = 256
"""Of a matrix instruction."""
MOST_STAGES = 8
"""Of a ring."""
_OTHER_REGISTERS = 56  # of a consumer's thread, beside its sums and fragments: addresses and the like

T = TypeVar("T", bound="Tile")


def stores_wide(element: int, columns: int, channels: int) -> bool:
    """Whether lanes may exchange float32 results of so many columns and channels, to store 16 bytes each."""
    return element == 4 and columns % 16 == 0 and channels % 4 == 0


class Numbers(SimpleNamespace):
    """A kernel's struct of constants: integers, booleans and arrays of them, by name."""

    def of_axes(self, name: str, values: tuple[int, ...]) -> None:
        """Constants of three axes."""
        for axis, value in zip("dhw", values):
            setattr(self, f"{name}_{axis}", value)


@dataclass(frozen=True)
class Tile:
    """A tile's shape and the kernel's constants for one layer at any size: all but the sizes of input and batch.

    A mode is a subclass. Its `numbers` are the kernel's constants. What it says of a size has the problem as an
    argument.
    """

    problem: Problem
    stages: int = field(default=2, kw_only=True)
    """Of a ring."""

    family: ClassVar[str] = "pixels"
    mode: ClassVar[str]
    file: ClassVar[str] = "pixels"
    rings: ClassVar[int] = 1
    registers: ClassVar[tuple[int, int]] = 40, 232
    """Of a producer's thread and of a consumer's."""
    threads: ClassVar[int] = 128 * (1 + CONSUMERS)
    """Of a block: a producer's warpgroup and the consumers'."""
    beside_pack: ClassVar[bool] = True
    """Whether the kernel may begin while its weights are packed."""
    serves: ClassVar[tuple[tuple[str, str], ...]]
    """Passes and layouts."""
    none: ClassVar[str]
    """Why there is none where `candidates` has no tile."""

    @classmethod
    def refused(cls, p: Problem) -> str | None:
        """Why the mode's kernel cannot serve a problem that `refusal` lets pass, in a sentence."""
        raise NotImplementedError

    @classmethod
    def refusal(cls, p: Problem, gpu: Gpu) -> str | None:
        """Why the mode's kernel cannot serve a problem, in a sentence; None when it may."""
        if gpu.arch != "90a":
            return "the kernel multiplies by wgmma alone"
        if (p.pass_, p.layout) not in cls.serves:
            return f"{cls.mode} is for " + " and ".join(f"{pass_} in {layout}" for pass_, layout in cls.serves)
        if p.precision not in ("tf32", "fp16", "bf16"):
            return f"precision {p.precision} is none of the kernel's"
        if p.groups > 1:
            return "the kernel knows no groups"
        if 0 in source_shape(p) + result_shape(p):
            return "there is nothing to sum"
        return cls.refused(p)

    @classmethod
    def candidates(cls, p: Problem, gpu: Gpu) -> Iterable[Tile]:
        """Every tile worth a look for a problem that the mode may serve."""
        raise NotImplementedError

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

    # --- the kernel --------------------------------------------------------------------------------------------------

    def numbers(self, c: Any) -> None:
        """Fills the mode's part of `c`: with ``stage_bytes``, ``fixed_bytes`` of shared memory beside the rings, and
        ``packed_words`` of 32 bits."""
        raise NotImplementedError

    @derived_without("cluster", "stages", "stages_s", "stages_w", "w_stage")
    def c(self) -> Any:
        """The kernel's constants, but for those that follow from these fields."""
        cin, cout = self.channels
        found = Numbers(precision=jit.PRECISIONS[self.problem.precision], cin=cin, cout=cout, fixed_bytes=0)
        found.producer_registers, found.consumer_registers = self.registers
        self.numbers(found)
        return found

    def constants(self) -> dict[str, jit.Constant]:
        """The kernel's struct."""
        return vars(self.c) | {"stages": self.stages, "shared_bytes": self.shared_bytes}

    @property
    def sums(self) -> int:
        """Of a consumer's thread, with fragments that it keeps beside."""
        raise NotImplementedError

    @property
    def holds(self) -> bool:
        """Whether a consumer's registers hold its sums."""
        return self.sums <= self.registers[1] - _OTHER_REGISTERS

    @property
    def fits(self) -> bool:
        """Whether the kernel can run it on a GPU with enough shared memory."""
        return self.holds and self.stages >= 2

    @property
    def ring_bytes(self) -> int:
        """Of all rings' stages, for each of the `stages`."""
        return int(self.rings * (self.c.stage_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        return int(self.c.fixed_bytes + self.stages * self.ring_bytes)

    @property
    def packed_as(self) -> tuple[Any, ...]:
        """What the packed weight depends on beside the weight, and the mode."""
        raise NotImplementedError

    @property
    def packed_words(self) -> int:
        """32-bit words of the packed weights."""
        return int(self.c.packed_words)

    @property
    def pack_blocks(self) -> int:
        """Blocks that pack, a unit of 16 bytes a thread."""
        return -(-self.packed_words // 4 // THREADS)

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
        d, h, w = triple(size)
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


def fitted(tiles: Iterable[T], gpu: Gpu) -> tuple[T, ...]:
    """Of tiles those that fit, each with as many stages as shared memory has room for."""

    def stages(t: T) -> int:
        return min(MOST_STAGES, (gpu.shared_bytes - t.c.fixed_bytes) // t.ring_bytes)

    return tuple(varied(t, stages=stages(t)) for t in tiles if t.fits and stages(t) >= 2)
