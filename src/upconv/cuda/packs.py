"""What choices share whose kernels read packed weights, or weights that boxes take as they lie."""

from __future__ import annotations

from abc import abstractmethod

from upconv.cuda.axes import result_shape
from upconv.cuda.compile.boxes import Five, Tensor5
from upconv.cuda.family import Choice
from upconv.cuda.launches import NULL, THREADS, Given, Int, Launch, Map, Pointer, Scratch, Unit, renamed
from upconv.problem import Problem


def packing_entries(kernel: str, p: Problem) -> tuple[str, ...]:
    """The entries of ``kernels/packing.cuh`` that pack weights for a kernel; of 16 bits also float32 weights."""
    return (f"pack<{kernel}>", *((f"pack_float<{kernel}>",) if p.dtype.itemsize == 2 else ()))


class PacksWeights(Choice):
    """A choice whose kernel reads weights that ``kernels/packing.cuh`` packs, or weights in place."""

    @property
    def casts(self) -> bool:
        return self.problem.dtype.itemsize == 2

    @property
    @abstractmethod
    def packer(self) -> tuple[Unit, int, int]:
        """The source of what packs weights, words of packed weights and blocks of the launch."""

    @abstractmethod
    def multiply(self, given: Given) -> Launch:
        """Reads ``packed``, or ``weight`` in place."""

    def launches(self, given: Given) -> tuple[Launch, ...]:
        """What a call launches, in this order."""
        if given.weight in ("packed", "in place"):
            return (self.multiply(given),)
        packed = Scratch("packed", self.packed_bytes(given))
        return renamed((self.pack(given), self.multiply(given)), {"packed": packed})

    def packed_bytes(self, given: Given) -> int:
        """Of the packed weight, and of a bias that is rounded behind it."""
        _, words, _ = self.packer
        return 4 * (words + (result_shape(self.problem)[1] + 1) // 2 * (given.bias == "single"))

    def pack(self, given: Given) -> Launch:
        """Reads ``weight`` of one of the orders, and a float32 ``bias``, and writes ``packed``."""
        unit, words, blocks = self.packer
        arguments = Pointer("weight"), Pointer("packed"), Int(self.tap_step(given))
        if not given.single:
            return Launch(unit, "pack", blocks, THREADS, 0, arguments)
        bias = (Pointer("bias"), Pointer("packed", 4 * words)) if given.bias == "single" else (NULL, NULL)
        return Launch(unit, "pack_float", blocks, THREADS, 0, (*arguments, *bias))

    def tap_step(self, given: Given) -> int:
        """Elements between a weight's taps."""
        return 1 if given.weight == "contiguous" else self.problem.weight_shape[1]

    def bias(self, given: Given) -> Pointer:
        """Where the kernel finds the bias."""
        if given.bias == "single":
            return Pointer("packed", 4 * self.packer[1])
        return NULL if given.bias == "none" else Pointer("bias")


def rows_of_taps(p: Problem, rows: int, channels: int) -> Tensor5:
    """Weights that are ``rows`` of taps, each of ``channels`` side by side."""
    size = p.dtype.itemsize
    row = p.taps * channels * size
    return Tensor5(0, (channels, p.taps, rows, 1, 1), (channels * size, row, rows * row, rows * row))


def weight_map(p: Problem, box: Five, span: int) -> Map:
    """Over channels-last weights in place, with a box of a tap's for a chunk."""
    tensor = rows_of_taps(p, *p.weight_shape[:2])
    return Map("weight", tensor, p.dtype, box, span=span, rounded=p.precision == "tf32")


def layer_text(p: Problem) -> str:
    return str(p).split(" on ")[0] + f" {p.precision} {p.layout}" + (f" {p.pass_}" if p.pass_ != "fwd" else "")
