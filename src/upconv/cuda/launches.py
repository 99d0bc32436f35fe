"""What a choice launches, as data: for each kernel its entry, its grid and its arguments.

`upconv.cuda.prepared` runs such records on tensors, and `upconv.replay` builds its recordings from them. An argument
names its operand. Operands of a call are strings: ``source``, ``weight``, ``packed`` (the packed weight), ``bias`` and
``result``, or for the gradient for the weight ``input``, ``gradient`` and ``result``. Others are memory that
launches share: `Scratch` and `Zeros`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from upconv.cuda.compile import driver
from upconv.cuda.compile.boxes import Five, Tensor5


@dataclass(frozen=True)
class Unit:
    """A source to be compiled and its kernels' names, without those that only autocast takes."""

    label: str
    source: str
    entries: tuple[str, ...]


@dataclass(frozen=True)
class Scratch:
    """Memory that a call allocates for its launches; of equal name it is the same."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Zeros:
    """Words of 32 bits that a kernel finds zero and leaves zero, or uses for something else behind those.

    They outlive the call, and each stream has its own.
    """

    words: int


Operand = str | Scratch | Zeros


class Argument:
    """One of a kernel, of 8 bytes but for a map; of a smaller parameter the driver reads as many as that has."""


@dataclass(frozen=True)
class Pointer(Argument):
    """The address of an operand."""

    operand: Operand
    offset: int = 0
    """In bytes."""
    alignment: int = 1
    """Bytes at a multiple of which the operand must begin; a launcher copies one that does not."""


@dataclass(frozen=True)
class Int(Argument):
    """32 bits."""

    value: int

    def encoded(self) -> bytes:
        """Errors: OverflowError for a value that does not fit."""
        if not -(2**31) <= self.value < 2**31:
            raise OverflowError(f"an int has 32 bits; got {self.value}")
        return self.value.to_bytes(8, "little", signed=True)


@dataclass(frozen=True)
class Long(Argument):
    """64 bits."""

    value: int

    def encoded(self) -> bytes:
        """Errors: OverflowError for a value that does not fit."""
        return self.value.to_bytes(8, "little", signed=True)


@dataclass(frozen=True)
class Map(Argument):
    """A ``CUtensorMap`` over an operand, which must begin at 16 bytes."""

    operand: Operand
    tensor: Tensor5
    """What is copied from, or to."""
    dtype: torch.dtype
    box: Five
    """Elements that a copy traverses along each dimension."""
    steps: Five = (1, 1, 1, 1, 1)
    """From one of them that is copied to the next."""
    span: int = 0
    """Bytes of the swizzle, 32, 64 or 128; 0: none."""
    rounded: bool = False
    """float32 becomes TF32 on its way, to nearest even."""


def encode(of: Map, address: int) -> bytes:
    """A map's 128 bytes for an operand at an address. Errors: RuntimeError with CUDA's, for what it does not take."""
    cuda: Any = driver.bindings()
    names = {
        torch.float32: "TFLOAT32" if of.rounded else "FLOAT32",
        torch.bfloat16: "BFLOAT16",
        torch.float16: "FLOAT16",
    }
    swizzle = f"{of.span}B" if of.span else "NONE"
    made = driver.drive(
        cuda.cuTensorMapEncodeTiled,
        getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{names[of.dtype]}"),
        5,
        address + of.tensor.begin,
        [cuda.cuuint64_t(n) for n in of.tensor.dims],
        [cuda.cuuint64_t(n) for n in of.tensor.strides],
        [cuda.cuuint32_t(n) for n in of.box],
        [cuda.cuuint32_t(n) for n in of.steps],
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return struct.pack("<16Q", *(int(word) for word in made.opaque))


NULL = Pointer("")
"""The null pointer, in the place of one to what a call does not have."""


def ints(values: Iterable[int]) -> tuple[Int, ...]:
    return tuple(map(Int, values))


def longs(values: Iterable[int]) -> tuple[Long, ...]:
    return tuple(map(Long, values))


THREADS = 256  # of a block that copies, packs or adds up
_ADDRESS = 1 << 44  # at which maps are encoded; who launches writes their tensor's there


class Encoded(NamedTuple):
    """A launch's arguments as the driver reads them, without addresses."""

    words: bytes
    places: tuple[tuple[int, Operand, int], ...]
    """Which of the words are addresses, rising: the word, the operand and the bytes from its begin."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    unit: Unit
    """What is compiled for it."""
    entry: str
    grid: int
    threads: int
    shared_bytes: int
    arguments: tuple[Argument, ...]
    cooperative: bool = False
    """Its blocks wait for each other, so that all must run at once."""
    dependent: bool = False
    """It may begin before the launch ahead of it ends, which packs its weights, and waits for that itself."""

    @cached_property
    def encoded(self) -> Encoded:
        """Its arguments. Errors: those of their own; RuntimeError for a map whose first word is no address."""
        words = b""
        places: list[tuple[int, Operand, int]] = []
        for a in self.arguments:
            if isinstance(a, Map):
                places.append((len(words) // 8, a.operand, a.tensor.begin))
                one = encode(a, _ADDRESS)
                if (first := int.from_bytes(one[:8], "little")) != _ADDRESS + a.tensor.begin:
                    raise RuntimeError(f"a tensor map's first word must be its tensor's address; got {first:#x}")
                words += one
            elif isinstance(a, Pointer):
                places += [(len(words) // 8, a.operand, a.offset)] if a != NULL else []
                words += bytes(8)
            else:
                assert isinstance(a, Int | Long)
                words += a.encoded()
        return Encoded(words, tuple(places))


WeightForm = Literal["packed", "in place", "contiguous", "channels_last"]
"""A weight that was packed before; one that the kernel reads as it is; one of this order, to be packed."""


class Given(NamedTuple):
    """How a call gives its operands, as far as its launches differ by it."""

    weight: WeightForm = "packed"
    """For the gradient for the weight the result's order."""
    single: bool = False
    """The weight, or its gradient, is float32 and the problem has 16 bits."""
    bias: Literal["none", "given", "single"] = "none"
    """``single``: of float32, and rounded where the weight was packed, behind it."""
    lasting: bool = False
    """The call may allocate what outlives it, and is not captured in a graph."""
    aligned: bool = True
    """The source (for the weight the gradient) begins at 16 bytes."""


def renamed(launches: Iterable[Launch], names: Mapping[Operand, Operand]) -> tuple[Launch, ...]:
    """The launches on other operands."""

    def of(argument: Argument) -> Argument:
        if isinstance(argument, Pointer | Map) and argument.operand in names:
            return replace(argument, operand=names[argument.operand])
        return argument

    return tuple(replace(one, arguments=tuple(map(of, one.arguments))) for one in launches)


def strides_of(shape: tuple[int, ...], order: WeightForm) -> tuple[int, ...]:
    """Of a weight of this shape, contiguous or in channels_last."""
    _, channels, *kernel = shape
    of_taps = tuple(math.prod(kernel[i + 1 :]) for i in range(len(kernel)))
    if order == "channels_last":
        return math.prod(shape[1:]), 1, *(n * channels for n in of_taps)
    return math.prod(shape[1:]), math.prod(kernel), *of_taps


def five_strides(shape: tuple[int, ...], order: WeightForm) -> tuple[Long, ...]:
    """The same of input and output channels, and of taps along D, H and W."""
    first, second, *spatial = strides_of(shape, order)
    return longs((first, second, *(0,) * (3 - len(spatial)), *spatial))
