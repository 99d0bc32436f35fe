"""What choices share whose kernels read packed weights, or weights that boxes take as they lie."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Five, Tensor5, Words, encode
from upconv.cuda.compile.launch import Launcher, Launches, bind
from upconv.cuda.compile.provisional import Provisional
from upconv.cuda.gpu import gpu as gpu_of
from upconv.cuda.launches import NULL, Given, Int, Launch, PacksWeights, Pointer, Unit
from upconv.problem import Problem

PACK_THREADS = 256  # of a block that packs weights

K = TypeVar("K")

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions


def packing_entries(kernel: str, p: Problem) -> tuple[str, ...]:
    """The entries of ``kernels/packing.cuh`` that pack weights for a kernel; of 16 bits also float32 weights."""
    return (f"pack<{kernel}>", *((f"pack_float<{kernel}>",) if p.dtype.itemsize == 2 else ()))


class PackingLaunch(PacksWeights):
    """A choice whose weights ``kernels/packing.cuh`` packs. What is undocumented is as `prepared.Packs` has it."""

    problem: Problem
    biased: ClassVar[bool] = False
    reads: ClassVar[str | None] = None

    @property
    def casts(self) -> bool:
        return self.problem.dtype.itemsize == 2

    @property
    @abstractmethod
    def packer(self) -> tuple[Unit, int, int]:
        """The source of what packs weights, words of packed weights and blocks of the launch."""

    def packed_bytes(self, given: Given) -> int:
        _, words, _ = self.packer
        return 4 * (words + (self.problem.out_channels + 1) // 2 * (given.bias == "single"))

    def pack(self, given: Given) -> Launch:
        unit, words, blocks = self.packer
        tap_step = 1 if given.weight == "contiguous" else self.problem.weight_shape[1]
        arguments = Pointer("weight"), Pointer("packed"), Int(tap_step)
        if not given.single:
            return Launch(unit, "pack", blocks, PACK_THREADS, 0, arguments)
        bias = (Pointer("bias"), Pointer("packed", 4 * words)) if given.bias == "single" else (NULL, NULL)
        return Launch(unit, "pack_float", blocks, PACK_THREADS, 0, (*arguments, *bias))

    def bias(self, given: Given) -> Pointer:
        """Where the kernel finds the bias."""
        if given.bias == "single":
            return Pointer("packed", 4 * self.packer[1])
        return NULL if given.bias == "none" else Pointer("bias")


def run_beside(out: Tensor, run: Callable[[Tensor], None]) -> None:
    """Copies what a kernel writes elsewhere to a result that begins off 16 bytes; PyTorch's allocations never do."""
    whole = torch.empty_like(out)
    run(whole)
    out.copy_(whole)


class Packs(family.Prepared):
    """What choices share whose kernels read packed weights, on a device."""

    _boxed_unit: Unit | None = None
    """The kernel of weights that need no packing, if there is one."""
    _pack: Any
    _pack_float: Any

    def __init__(self, p: Problem, device: int, words: int, blocks: int) -> None:
        self._problem, self._device = p, device
        self._words, self._pack_blocks = words, blocks
        self.casts = p.dtype.itemsize == 2

    def _load(self, unit: Unit, entry: str, threads: int, shared: int, codes: str) -> Launches:
        """Compiles (or finds) and loads an entry of a unit; a `Provisional` where the unit has a quick form."""
        arch = gpu_of(self._device).arch

        def of(one: Unit) -> Launcher:
            return Launcher(jit.kernel(one.source, entry, arch, one.label, one.kept), threads, shared, codes)

        if unit.quick is None or jit.at_hand(unit.source, arch, unit.label) or (quick := unit.quick()) is None:
            return of(unit)
        if entry.startswith("pack"):  # which both forms have alike
            return of(quick)
        try:
            return Provisional(lambda: of(quick), lambda: jit.cubin(unit.source, arch, unit.label), lambda: of(unit))
        except jit.CompileError as error:
            jit._tell(f"{unit.label} has no quick form: {error}")
            return of(unit)

    def _load_pack(self, unit: Unit) -> Launches:
        return self._load(unit, "pack", PACK_THREADS, 0, "PPi")

    def _load_pack_float(self, unit: Unit) -> Launches:
        return self._load(unit, "pack_float", PACK_THREADS, 0, "PPiPP")

    def _load_packing(self, unit: Unit) -> None:
        """What packs every weight of the problem, at once."""
        self._pack = self._load_pack(unit)
        if self.casts:
            self._pack_float = self._load_pack_float(unit)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The weights in the order in which the kernel reads them: int32 words, launched on the current stream.

        Or the weights themselves, where boxes bring them: channels-last ones of the problem's dtype that begin at 16
        bytes. Float32 weights of a 16-bit problem are rounded on their way, and with them a float32 ``bias``, whose
        place is behind them.
        """
        return weight if self._boxes(weight) else self._packed(weight, bias)

    def _packed(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rounds = self.casts and weight.dtype is torch.float32
        tap_step = self._tap_step(weight)
        if not tap_step:
            weight, tap_step = weight.contiguous(), 1
        words = self._words if bias is None else self._words + (self._problem.out_channels + 1) // 2
        packed = weight.new_empty_strided((words,), (1,), dtype=torch.int32)  # 2 us less than torch.empty
        if rounds:
            at = packed.data_ptr()
            biases = (0, 0) if bias is None else (bias.data_ptr(), at + 4 * self._words)
            self._pack_float(self._device, self._pack_blocks, (weight.data_ptr(), at, tap_step, *biases))
        else:
            self._pack(self._device, self._pack_blocks, (weight.data_ptr(), packed.data_ptr(), tap_step))
        return packed

    def _boxes(self, weight: Tensor) -> bool:
        """Whether boxes bring it as it lies."""
        if self._boxed_unit is None or (self.casts and weight.dtype is torch.float32):
            return False
        return not weight.data_ptr() & 15 and self._lies_last(weight)

    def _tap_step(self, weight: Tensor) -> int:
        """Elements between a weight's taps, as kernels read it: contiguous or channels-last; 0 for another."""
        if weight.is_contiguous():
            return 1
        return weight.shape[1] if self._lies_last(weight) and weight.shape[:2] == self._problem.weight_shape[:2] else 0

    def _lies_last(self, weight: Tensor) -> bool:
        last = _LAST.get(weight.dim())  # the problem may have a dimension more (`Problem.abreast`)
        return last is not None and weight.is_contiguous(memory_format=last)

    def _kept(self, kept: dict[K, Words], address: K, encoded: Callable[[], list[Words]]) -> Words:
        if len(kept) >= 256:  # allocations come back to the same addresses; 128 bytes each
            kept.clear()
        bind(self._device)  # encoding wants a context
        found = kept[address] = b"".join(encoded())
        return found

    def _bias_of(self, packed: int, bias: Tensor | None) -> int:
        """Where the kernel finds the bias, or 0; `pack` left a rounded one behind the weights."""
        if bias is None:
            return 0
        return packed + 4 * self._words if self.casts and bias.dtype is torch.float32 else bias.data_ptr()


class LazyPacks(Packs):
    """Of these, choices whose kernels differ by how a weight lies: each is loaded with a weight that wants it."""

    _unit: Unit
    """The kernels of packed weights."""
    _tiling: Any
    """With the box of a tap's weights: `weight_map`'s."""

    def __init__(self, p: Problem, device: int, words: int, blocks: int) -> None:
        super().__init__(p, device, words, blocks)
        self._weight_maps: dict[tuple[int, Callable[..., Words]], Words] = {}

    @property
    def _launchers(self) -> tuple[str, ...]:
        """The attributes that load the kernels."""
        raise NotImplementedError

    @property
    def _packed_launchers(self) -> tuple[str, ...]:
        """Of these, those for weights that are packed by a launch of their own."""
        return "_pack", "_run", *(("_pack_float",) if self.casts else ())

    @property
    def loaded(self) -> bool:
        """Whether the kernels for every weight are."""
        return all(name in vars(self) for name in self._launchers)

    def load(self) -> None:
        """Compiles (or finds) and loads the kernels for every weight. Errors: those of ``jit.kernel``."""
        for name in self._launchers:
            getattr(self, name)

    def load_packed(self) -> None:
        """Loads those for packed weights alone."""
        for name in self._packed_launchers:
            getattr(self, name)

    @cached_property
    def _pack(self) -> Launches:
        return self._load_pack(self._unit)

    @cached_property
    def _pack_float(self) -> Launches:
        return self._load_pack_float(self._unit)

    def _weight_map(self, address: int, of: Callable[[Any, Problem, int], Words] | None = None) -> Words:
        """The tensor map of weights that boxes bring, as ``of`` has it, else `weight_map`; as `_kept`."""
        key = address, of or weight_map
        found = self._weight_maps.get(key)
        if found is None:
            found = self._kept(self._weight_maps, key, lambda: [key[1](self._tiling, self._problem, address)])
        return found


class BoxedWeights(Protocol):
    """What a tile knows of channels-last weights that come as they lie."""

    @property
    def element(self) -> int: ...

    @property
    def weight_span(self) -> int: ...

    @property
    def weight_box(self) -> Five: ...


def rows_of_taps(p: Problem, rows: int, channels: int) -> Tensor5:
    """Weights that are ``rows`` of taps, each of ``channels`` side by side."""
    size = p.dtype.itemsize
    row = p.taps * channels * size
    return Tensor5(0, (channels, p.taps, rows, 1, 1), (channels * size, row, rows * row, rows * row))


def weight_map(t: BoxedWeights, p: Problem, address: int) -> Words:
    """A ``CUtensorMap`` over channels-last weights, with a box of a tap's for a chunk, as 16 signed words."""
    tensor = rows_of_taps(p, *p.weight_shape[:2])
    return encode(tensor, address, p.dtype, t.weight_box, (1,) * 5, t.weight_span, p.precision == "tf32")


def layer_text(p: Problem) -> str:
    return str(p).split(" on ")[0] + f" {p.precision} {p.layout}" + (f" {p.pass_}" if p.pass_ != "fwd" else "")
