"""What families share whose kernel reads its source by one tensor map: joined, subpixel, pairs, phases.

Such a kernel has the arguments ``(packed, bias, result, sizes..., map)`` and is in one source with what packs weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from upconv.cuda.compile import jit
from upconv.cuda.launches import Argument, Given, Launch, Map, Pointer, Unit, ints
from upconv.cuda.packs import PackingLaunch, layer_text, packing_entries
from upconv.cuda.pixels.columns import T, TileChoice


class OneMappedChoice(TileChoice[T], PackingLaunch):
    """A tile for a problem whose kernel is ``<family>.cu``'s entry ``<family>``."""

    family: ClassVar[str]
    entry: ClassVar[str] = "pixels"
    """The kernel, and its file."""
    threads: ClassVar[int]
    """Of a block."""
    tile: Any
    """With ``constants()``, ``arguments`` and ``tiles`` of a problem, its packed words and blocks, and shared bytes."""

    @property
    def grid(self) -> int:
        """Blocks: at most one for each multiprocessor."""
        return min(self.tile.tiles(self.problem), self.gpu.multiprocessors)

    @property
    def packed_as(self) -> tuple[Any, ...]:
        """What the packed weight depends on beside the weight, and the family."""
        raise NotImplementedError

    @property
    def packing(self) -> tuple[Any, ...]:
        return self.family, *self.packed_as

    @property
    def packer(self) -> tuple[Unit, int, int]:
        return self.sources()[0], self.tile.packed_words, self.tile.pack_blocks

    def multiply(self, given: Given) -> Launch:
        pointers = (
            Pointer("packed"), self.bias(given), Pointer("result", alignment=16 if self.aligned else 1),
        )  # fmt: skip
        arguments: tuple[Argument, ...] = (*pointers, *ints(self.tile.arguments(self.problem)), self.source_map)
        threads, shared = self.threads, self.tile.shared_bytes
        return Launch(self.sources()[0], self.entry, self.grid, threads, shared, arguments, dependent=True)

    @property
    def aligned(self) -> bool:
        """Whether a result is stored by units that it must begin at, up to 16 bytes."""
        return True

    @property
    def source_map(self) -> Map:
        """By which the kernel reads the source."""
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
