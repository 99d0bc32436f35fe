"""A tile for a problem: what a choice of any mode says, and what it launches; `joined` has it too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Argument, Given, Launch, Map, Pointer, Unit, ints
from upconv.cuda.packs import PackingLaunch, layer_text, packing_entries
from upconv.problem import Problem

T = TypeVar("T")


@dataclass(frozen=True)
class TileChoice(PackingLaunch, Generic[T]):
    """A tile for a problem on a GPU, and what the model thinks of it.

    Its kernel is the entry ``entry`` of ``<file>.cu``, a template over the mode's struct. Its arguments are the packed
    weight, the bias, the result, sizes and a map of the source; a mode may have others.
    """

    tile: T
    """Of the layer at any size; its own problem's size and batch mean nothing."""
    problem: Problem
    gpu: Gpu
    cost: Cost
    """The model's estimate."""

    family: ClassVar[str] = "pixels"
    mode: ClassVar[str]
    file: ClassVar[str] = "pixels"
    threads: ClassVar[int] = 384
    """Of a block: a producer's warpgroup and two consumers'."""

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
    def of(self) -> Any:
        """The tile, with ``constants()``, ``arguments`` and ``tiles`` of a problem, and its bytes."""
        return self.tile

    @property
    def entry(self) -> str:
        return self.file

    @property
    def in_place(self) -> bool:
        """Whether the kernel reads channels-last weights as they lie, so that nothing is packed."""
        return False

    @property
    def packing_seconds(self) -> float:
        return 0.0 if self.in_place else family.packing_seconds(self.problem, self.gpu)

    @property
    def grid(self) -> int:
        """Blocks: at most one for each multiprocessor."""
        return min(self.of.tiles(self.problem), self.gpu.multiprocessors)

    def even_grid(self, tiles: int) -> int:
        """Blocks for so many tiles: at most one for each multiprocessor, no more than it takes to be done as soon.

        So the last tiles are those of many blocks, whose loads hide each other's latency.
        """
        return -(-tiles // -(-tiles // self.gpu.multiprocessors))

    # --- sources -----------------------------------------------------------------------------------------------------

    @property
    def long_code(self) -> bool:
        """Whether the kernel is straight code for which NVRTC takes long, and has a quick form (``QUICK``)."""
        return False

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all input sizes that share the tile."""
        unit = self.unit(self.of.constants())
        return (replace(unit, quick=self._quick) if self.long_code else unit,)

    def instance(self, struct: str) -> str:
        """The entry for a mode's struct."""
        return f"{self.entry}<{struct}>"

    def unit(self, constants: dict[str, Any]) -> Unit:
        """The kernel and what packs its weights."""
        struct = f"{self.mode.capitalize()}<{jit.CONFIG}>"
        entries = (*packing_entries(struct, self.problem), self.instance(struct))
        source = jit.instance(f"{self.file}.cu", constants, entries)
        return Unit(f"{self.mode} {layer_text(self.problem)}", source, ("pack", self.entry))

    def _quick(self) -> Unit:
        """The same to the last bit, compiled fast."""
        return self.unit(self.of.constants() | {"quick": True}).passing()

    # --- launches ----------------------------------------------------------------------------------------------------

    @property
    def packed_as(self) -> tuple[Any, ...]:
        """What the packed weight depends on beside the weight, and the mode."""
        raise NotImplementedError

    @property
    def packing(self) -> tuple[Any, ...]:
        return self.mode, *self.packed_as

    @property
    def packer(self) -> tuple[Unit, int, int]:
        return self.sources()[0], self.of.packed_words, self.of.pack_blocks

    @property
    def aligned(self) -> bool:
        """Whether a result is stored by units that it must begin at, up to 16 bytes."""
        return True

    @property
    def result(self) -> Pointer:
        return Pointer("result", alignment=16 if self.aligned else 1)

    @property
    def source_map(self) -> Map:
        """By which the kernel reads the source."""
        raise NotImplementedError

    @property
    def overlaps(self) -> bool:
        """Whether the kernel may begin beside what packs its weights."""
        return True

    def arguments(self, given: Given) -> tuple[Argument, ...]:
        sizes = ints(self.of.arguments(self.problem))
        return Pointer("packed"), self.bias(given), self.result, *sizes, self.source_map

    def multiply(self, given: Given) -> Launch:
        unit = self.sources()[-1 if given.weight == "in place" else 0]
        arguments, shared = self.arguments(given), self.of.shared_bytes
        return Launch(unit, self.entry, self.grid, self.threads, shared, arguments, dependent=self.overlaps)
