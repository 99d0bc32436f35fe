"""A tile for a problem: what every mode's choice says and launches, and the cheapest; `joined` has them too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from upconv.cuda import cost, family
from upconv.cuda.compile import jit
from upconv.cuda.compile.launch import cluster_fits
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Given, Launch, Pointer, Unit, WeightForm
from upconv.cuda.packs import PacksWeights, layer_text, packing_entries
from upconv.cuda.pixels.tile import Tile
from upconv.problem import Problem


@dataclass(frozen=True)
class TileChoice(PacksWeights):
    """A tile for a problem on a GPU, and what the model thinks of it.

    Its kernel is the entry of the tile's ``<file>.cu``, a template over the mode's struct.
    """

    tile: Any
    """A `Tile` of the layer at any size; its own problem's size and batch mean nothing."""
    problem: Problem
    gpu: Gpu
    cost: Cost
    """The model's estimate."""

    biased = True

    @property
    def family(self) -> str:
        return str(self.tile.family)

    @property
    def summary(self) -> str:
        return (
            f"{self.tile.summary(self.problem, self.gpu)}, {self.tile.shared_bytes // 1024} KB shared, grid {self.grid}"
        )

    @property
    def grid(self) -> int:
        """Blocks of a launch."""
        return int(self.tile.grid(self.problem, self.gpu))

    def on(self, device: int) -> Any:
        """Where no cluster fits on it (on a small part of one), tiles have a block each, whose sums round otherwise. So
        the device decides, always alike. Errors: those of `cluster_fits`.
        """
        fits = self.tile.cluster == 1 or cluster_fits(device, self.tile.cluster)
        return self if fits else replace(self, tile=replace(self.tile, cluster=1))

    # --- sources -----------------------------------------------------------------------------------------------------

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all input sizes that share the tile."""
        t, p = self.tile, self.problem
        source = jit.instance(f"{t.file}.cu", t.constants(), (*packing_entries(t.struct, p), t.instance))
        return (Unit(f"{t.mode} {layer_text(p)}", source, ("pack", t.entry)),)

    # --- launches ----------------------------------------------------------------------------------------------------

    @property
    def in_place(self) -> bool:
        """Whether the kernel reads channels-last weights as they lie, so that nothing is packed."""
        return bool(self.tile.in_place)

    @property
    def reads(self) -> WeightForm | None:
        return "channels_last" if self.in_place else None

    @property
    def packing_seconds(self) -> float:
        return 0.0 if self.in_place else family.packing_seconds(self.problem, self.gpu)

    @property
    def packing(self) -> tuple[Any, ...]:
        return self.tile.mode, *self.tile.packed_as

    @property
    def packer(self) -> tuple[Unit, int, int]:
        return self.sources()[0], self.tile.packed_words, self.tile.pack_blocks

    def multiply(self, given: Given) -> Launch:
        t = self.tile
        result = Pointer("result", alignment=16 if t.aligned else 1)
        arguments = t.arguments(self.problem, self.gpu, given, self.bias(given), result)
        unit, beside = self.sources()[0], t.beside_pack
        return Launch(unit, t.entry, self.grid, t.threads, t.shared_bytes, arguments, dependent=beside)


C = TypeVar("C", bound=TileChoice)


def cheapest(choice: type[C], tiles: Iterable[Tile], p: Problem, gpu: Gpu) -> C | None:
    """The choice of the tile of least time by its model; none where no kernel counts the tiles, and a grid more, in 32
    bits."""
    served = (t for t in tiles if t.tiles(p) < family.MOST_COUNTED - 2 * gpu.multiprocessors)
    timed = ((cost.cost(t.work(p, gpu), gpu), t) for t in served)
    best = min(timed, key=lambda one: one[0].seconds, default=None)
    return None if best is None else choice(best[1], p, gpu, best[0])
