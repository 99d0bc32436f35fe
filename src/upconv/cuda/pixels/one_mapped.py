"""What families share whose kernel reads its source by one tensor map: joined, subpixel, pairs, phases.

Such a kernel has the arguments ``(packed, bias, result, sizes..., map)`` and is in one source with what packs weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Words
from upconv.cuda.compile.launch import as_run
from upconv.cuda.packs import Packs, Unit, layer_text, packing_entries, run_beside
from upconv.cuda.pixels.columns import T, TileChoice


class OneMappedChoice(TileChoice[T]):
    """A tile for a problem whose kernel is ``<family>.cu``'s entry ``<family>``."""

    family: ClassVar[str]
    entry: ClassVar[str] = "pixels"
    """The kernel, and its file."""
    threads: ClassVar[int]
    """Of a block."""
    biased: ClassVar[bool] = False
    """Whether the gradient for the input takes a bias too (`upconv.cuda.family.Prepared`)."""
    tile: Any
    """With ``constants()``, ``arguments`` and ``tiles`` of a problem, its packed words and blocks, and shared bytes."""

    @property
    def grid(self) -> int:
        """Blocks: at most one for each multiprocessor."""
        return min(self.tile.tiles(self.problem), self.gpu.multiprocessors)

    @property
    def packing(self) -> tuple[Any, ...]:
        """What `pack`'s result depends on beside the weight, and the family."""
        raise NotImplementedError

    @property
    def aligned(self) -> bool:
        """Whether a result is stored by units that it must begin at, up to 16 bytes."""
        return True

    def tensor_map(self, address: int) -> Words:
        """A ``CUtensorMap`` over the source at an address, as 16 signed words."""
        raise NotImplementedError

    @property
    def long_code(self) -> bool:
        """Whether the kernel is straight code for which NVRTC takes long, and has a quick form (``QUICK``)."""
        return False

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all input sizes that share the tile."""
        unit = self._unit(self.tile.constants())
        return (replace(unit, quick=self._quick) if self.long_code else unit,)

    def _instance(self, kernel: str) -> str:
        """The entry for a kernel's struct."""
        return f"{self.entry}<{kernel}>"

    def _quick(self) -> Unit:
        """The same to the last bit, compiled fast."""
        return self._unit(self.tile.constants() | {"quick": True}).passing()

    def _unit(self, constants: dict[str, Any]) -> Unit:
        kernel = f"{self.family.capitalize()}<{jit.CONFIG}>"
        entries = (*packing_entries(kernel, self.problem), self._instance(kernel))
        source = jit.instance(f"{self.entry}.cu", constants, entries)
        return Unit(f"{self.family} {layer_text(self.problem)}", source, ("pack", self.entry))

    def prepare(self, device: int) -> Prepared:
        """Compiles (or finds) and loads the kernels for a CUDA device. Errors: those of ``jit.kernel``."""
        return Prepared(self, device)


class Prepared(Packs):
    """A choice's kernels, loaded for a device."""

    def __init__(self, choice: OneMappedChoice[Any], device: int) -> None:
        t, p = choice.tile, choice.problem
        super().__init__(p, device, t.packed_words, t.pack_blocks)
        (unit,) = choice.sources()
        self._load_packing(unit)
        sizes = t.arguments(p)
        integers = "i" * len(sizes)
        self._run = self._load(unit, choice.entry, choice.threads, t.shared_bytes, f"PPP({integers}{'q' * 16})")
        self._grid, self._sizes, self._aligned = choice.grid, as_run(integers, sizes), choice.aligned
        self.biased = choice.biased
        self._map = choice.tensor_map
        self._tails: dict[int, Words] = {}
        self.packing = (choice.family, *choice.packing)
        """What `pack`'s result depends on beside the weight."""

    def run(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False, claim: bool = False
    ) -> None:
        """Launches the kernel: ``x`` and ``out`` contiguous, ``packed`` what `pack` returned.

        ``fresh``: `pack` was called just before, and the kernel loads its first pixels beside what that launched.
        """
        if out.data_ptr() & 15 and self._aligned:
            run_beside(out, lambda whole: self.run(x, packed, bias, whole, fresh))
            return
        address, at = x.data_ptr(), packed.data_ptr()
        if address & 15:
            fresh, x = False, x.clone()  # a view that begins off 16 bytes; PyTorch's allocations never do
            address = x.data_ptr()
        tail = self._tails.get(address)
        if tail is None:
            tail = self._kept(self._tails, address, lambda: [self._sizes, self._map(address)])
        args = (at, self._bias_of(at, bias), out.data_ptr(), tail)
        self._run(self._device, self._grid, args, fresh)
