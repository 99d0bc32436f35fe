"""Forward and gradient for the input of channels-last layers as an implicit GEMM, a tap at a time. wgmma only.

`gather` reads a pixel of the source once for several taps, which are shifts of one tile; so tiles are whole
rows of 8 pixels and more, and images of 14 x 14 leave a quarter of them empty. Where taps share little (the kernel is
about the stride), or channels are many and images small, there is nothing to gain by that: here each tap has pixels of
its own, a tile is a box of any shape, and channels of the result are columns of any number. Weights stream through the
ring beside the pixels, so that layers of any width are served (``kernels/pixels_implicit.cuh``). A forward has a GEMM
for each phase, whose K is the phase's taps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple

from upconv.cuda.axes import any_size, gather_axes, result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Five, channels_last, fullest
from upconv.cuda.compile.launch import cluster_fits
from upconv.cuda.cost import Cost, Work, cost
from upconv.cuda.gemm.shuffle import Triple
from upconv.cuda.gpu import MAX_BOX_STEP, Gpu
from upconv.cuda.launches import Argument, Given, Map, Operand, Unit, WeightForm, ints
from upconv.cuda.packs import rows_of_taps
from upconv.cuda.pixels import tile
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.choosing import Chooser
from upconv.cuda.pixels.tile import CONSUMERS, fitted, of_axes, stores_wide, triple
from upconv.cuda.pixels.tile import Tile as Base
from upconv.derived import derived
from upconv.problem import Problem

_MOST_SUMS = 176  # of a consumer's thread, whose addresses and the like take 56 registers
_MOST_COLUMNS = 256
_MOST_TAPS = 512  # and phases
_MOST_TILES = 2**30  # which the kernel counts in 32 bits, a grid beyond the last
_CLUSTERS = 2, 4, 8
_BESIDE_PACK = 40e-6  # seconds of a kernel that begins beside `pack`, at most
_FEWEST = 32  # channels of a forward's result (of 1 to 24 half of an instruction's clocks wait for pixels)
_WASTE = 1.04  # columns that all blocks have, of a result's channels
_TURNED = 64  # channels of the result in a box of weights as a forward's lie
_LONG = 16  # steps of a tile, from which on stores have time
_PARTIAL = 2.1  # lines of the copy engine for a pixel of a box that reaches beyond the last channel
_STORE = {"fwd": 1.19, "grad-input": 0.3}  # clocks for 8 results, by pass; twice as many where lanes store 8 bytes
_FEW = 1.5  # tiles of each phase that a block has
_SQUARE = 64  # of a forward's weights, which a block of `pack` turns


class Phase(NamedTuple):
    """Results that see the same taps; triples are along D, H and W."""

    first: tuple[int, int, int]
    """Its first result; the next ones are the strides apart."""
    taps: tuple[tuple[int, tuple[int, int, int]], ...]
    """Its taps' indices in the kernel, and each one's pixel of the source, less that of the tile's first."""


@lru_cache(maxsize=256)
def phases(p: Problem) -> tuple[Phase, ...]:
    """A layer's at any size, those of most taps first; a gradient for the input has one, of all taps."""
    axes, (_, of_h, of_w) = gather_axes(p), triple(p.kernel)
    found = []
    for first in product(*(range(axis.out_step) for axis in axes)):
        each = product(*(axis.at(at) for axis, at in zip(axes, first)))
        taps = (((i * of_h + j) * of_w + k, (d, h, w)) for (i, d), (j, h), (k, w) in each)
        found.append(Phase((first[0], first[1], first[2]), tuple(taps)))
    return tuple(sorted(found, key=lambda phase: -len(phase.taps)))


@dataclass(frozen=True)
class Tile(Base):
    """As `Base`; its box of pixels is a problem's own. A stage has a step's pixels and weights."""

    columns: int
    """Of a matrix instruction: channels of the result, a multiple of 8."""
    mb: int
    """Subtiles of 64 pixels of a consumer."""
    chunk: int
    """Source channels of a step."""
    halves: bool
    """Whether both consumers share a tile, each with half of its pixels; else they take whole tiles in turn."""
    cluster: int = 1
    """Blocks that share a tile's steps and add up their sums."""

    @property
    def row_bytes(self) -> int:
        """Of a pixel in shared memory."""
        return self.chunk * self.element

    @property
    def weight_span(self) -> int:
        """Bytes of a row of a box of weights."""
        return self.row_bytes

    @property
    def weight_box(self) -> tuple[int, int, int, int, int]:
        """The box of a tap's weights for a chunk, where they come as they lie."""
        return self.chunk, 1, self.columns, 1, 1

    @property
    def column_blocks(self) -> int:
        return -(-self.channels[1] // self.columns)

    @property
    def rows(self) -> int:
        """Pixels of a tile, at most."""
        return 64 * self.mb * (CONSUMERS if self.halves else 1)

    @property
    def forward(self) -> bool:
        return self.problem.pass_ == "fwd"

    @property
    def phases(self) -> tuple[Phase, ...]:
        return phases(self.problem)

    @derived
    def steps(self) -> tuple[int, ...]:
        """Of each phase's tiles: a tap's chunk each."""
        chunks = -(-self.channels[0] // self.chunk)
        return tuple(len(phase.taps) * chunks for phase in self.phases)

    @property
    def stage_bytes(self) -> int:
        return self.rows * self.row_bytes + -(-self.columns * self.row_bytes // 1024) * 1024

    @property
    def sums(self) -> int:
        """Of a consumer's thread."""
        return self.mb * self.columns // 2

    @property
    def packed_words(self) -> int:
        return math.prod(self.problem.weight_shape) * self.element // 4

    @property
    def pack_blocks(self) -> int:
        if self.forward:
            channels, columns = self.channels
            return -(-columns * self.problem.taps // _SQUARE) * -(-channels // _SQUARE)
        return self.channels[1] * -(-self.channels[0] // self.pack_channels)

    @property
    def pack_channels(self) -> int:
        """Source channels of a gradient's weights, all taps of which a block of `pack` turns."""
        return next(n for n in (64, 32, 16, 8) if n * self.problem.taps <= _SQUARE**2)

    @property
    def steps_between(self) -> tuple[Triple, Triple]:
        """Pixels of the source, and of the result, from one of a tile to the next along D, H and W."""
        one = (1, 1, 1)
        return (one, self.strides) if self.forward else (self.strides, one)

    @property
    def wide_stores(self) -> bool:
        """Whether float32 results are stored 16 bytes a lane, where they may be (`stores_wide`).

        Not where one consumer of a forward stores while the other has long tiles to multiply, which that disturbs
        (docs/experiments.md). Nor of clusters, whose blocks then have more to divide.
        """
        short = self.halves or not self.forward or self.mean_steps < _LONG
        return stores_wide(self.element, self.columns, self.channels[1]) and self.cluster == 1 and short

    @property
    def turnable(self) -> bool:
        """Whether a forward's channels-last weights may come as they lie, whose rows are channels of the result."""
        return self.forward and self.element == 2 and self.columns % _TURNED == 0 and self.channels[1] % 8 == 0

    def faults(self) -> Iterator[str]:
        if self.sums > _MOST_SUMS:
            yield f"{self.mb} x 64 x {self.columns} sums are more than registers hold"

    def constants(self, turned: bool = False) -> dict[str, jit.Constant]:
        """The kernel's, see kernels/pixels_implicit.cuh. ``turned``: of weights as a forward's lie."""
        found: dict[str, jit.Constant] = super().constants() | {
            "chunk": self.chunk,
            "columns": self.columns,
            "mb": self.mb,
            "halves": self.halves,
            "cluster": self.cluster,
            "forward": self.forward,
            "turned": turned,
            "wide_stores": self.wide_stores,
            "taps": self.problem.taps,
            "phases": len(self.phases),
        }
        if not self.forward:
            found["pack_channels"] = self.pack_channels
        taps = [tap for phase in self.phases for tap in phase.taps]
        of_source, of_result = self.steps_between
        found |= of_axes("step", of_source)
        for axis, name in enumerate("dhw"):
            found[f"taps_{name}"] = tuple(offsets[axis] for _, offsets in taps)
        if len(self.phases) > 1:
            found["kernel_taps"] = tuple(index for index, _ in taps)
            found["first_taps"] = tuple(accumulate((len(phase.taps) for phase in self.phases), initial=0))
            found |= of_axes("out_step", of_result)
            for axis, name in enumerate("dhw"):
                found[f"phases_{name}"] = tuple(phase.first[axis] for phase in self.phases)
        return found

    # --- sizes, which are run-time arguments -------------------------------------------------------------------------

    def _fullest(self, p: Problem) -> tuple[int, tuple[int, int, int, int]]:
        of_source, of_result = (steps[3 - p.rank :] for steps in self.steps_between)
        size = tuple(-(-n // step) for n, step in zip(result_shape(p)[2:], of_result))
        return fullest(p.batch, size, of_source, self.rows)

    def box(self, p: Problem) -> tuple[int, int, int, int]:
        """Images, D, H and W of a problem's tiles: the fewest that hold all pixels of a phase."""
        return self._fullest(p)[1]

    def tiles(self, p: Problem) -> int:
        """Of all phases."""
        return self._fullest(p)[0] * self.column_blocks * len(self.phases)

    @property
    def mean_steps(self) -> float:
        return sum(self.steps) / len(self.steps)

    @derived
    def even(self) -> bool:
        """Whether all phases have as many taps."""
        return len({*self.steps}) == 1

    def sorted(self, p: Problem, gpu: Gpu) -> bool:
        """Whether tiles of most taps come first: where blocks have few, and phases differ."""
        few = self.tiles(p) < _FEW * len(self.phases) * gpu.multiprocessors
        return not self.even and (few or self.cluster > 1)

    def order(self, p: Problem, gpu: Gpu) -> tuple[int, int]:
        """(tiles of a phase before those of the next, tiles of which the first phase is another).

        Few tiles of the same pixels, a phase each, have L2 read pixels once; some of a phase side by side its weights.
        Where the latter are more than the pixels, in 3-D, all blocks have one phase at a time. How many side by side,
        with weights that blocks share, is as measured (docs/experiments.md). Where phases differ, eight only if a block
        comes to all of them again and again.
        """
        blocks, of = max(1, gpu.multiprocessors // self.column_blocks), len(self.phases)
        # From tile to tile a block's phase moves on by as much as the blocks leave beyond whole rounds, or one more.
        turn = _MOST_TILES if math.gcd(blocks, of) == 1 else max(1, blocks // of)
        if self.sorted(p, gpu):
            return _MOST_TILES, _MOST_TILES
        if p.rank < 3 and self.even:
            return 4, turn
        if p.rank < 3:
            apart = blocks % (8 * of)  # a block's next tile, among those of eight places
            stays = -(-8 // apart) if apart else 0  # tiles of a block until its phase is another
            rounds = self.tiles(p) // gpu.multiprocessors // of
            return (8, _MOST_TILES) if apart and math.gcd(apart, 8 * of) <= 8 and rounds >= stays else (1, turn)
        if math.prod(p.weight_shape) > math.prod(source_shape(p)):
            return blocks, _MOST_TILES
        return 1, turn

    def arguments(self, p: Problem, gpu: Gpu) -> tuple[int, ...]:
        """The kernel's integer arguments behind its pointers."""
        count, box = self._fullest(p)
        sides = (p.batch, *triple(result_shape(p)[2:]))
        steps = (1, *self.steps_between[1])
        counts = tuple(-(-n // (of * step)) for n, of, step in zip(sides, box, steps))
        assert math.prod(counts) == count
        abreast, turn = self.order(p, gpu)
        return (*sides, *box, *counts[1:], self.tiles(p), min(count, abreast), turn)


class Choice(TileChoice[Tile]):
    """A tile for a problem on a GPU, and what the model thinks of it."""

    mode = "implicit"
    biased = True

    @property
    def in_place(self) -> bool:
        return not self.tile.forward or self.tile.turnable

    @property
    def grid(self) -> int:
        """Blocks."""
        t, tiles = self.tile, self.tile.tiles(self.problem)
        if t.cluster > 1:
            return tiles * t.cluster
        return self.even_grid(tiles) if t.even else min(tiles, self.gpu.multiprocessors)

    @property
    def summary(self) -> str:
        t = self.tile
        phases = f", tiles of {len(t.phases)} phases" if len(t.phases) > 1 else ""
        shared = f", steps shared by clusters of {t.cluster} that add up their sums" if t.cluster > 1 else ""
        return (
            f"implicit GEMM, channels last: wgmma {t.problem.precision}, tile of "
            f"{'x'.join(map(str, t.box(self.problem)))} pixels (NxDxHxW) of {t.rows} x {t.columns} channels, "
            f"{'halved' if t.halves else 'in turn'}, ring of {t.stages} of {t.chunk} channels of a tap, "
            f"{t.shared_bytes // 1024} KB shared, grid {self.grid}{phases}{shared}"
        )

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all sizes.

        The first packs weights; the second, of some forwards, takes channels-last ones as they lie.
        """
        packed = super().sources()
        if not self.tile.turnable:
            return packed
        kernel = self.instance(f"Implicit<{jit.CONFIG}>")
        turned = jit.instance("pixels.cu", self.tile.constants(turned=True), (kernel,))
        return *packed, Unit(f"{packed[0].label} unpacked", turned, (self.entry,))

    def on(self, device: int) -> Choice:
        """As `gather.Choice.on`."""
        fits = self.tile.cluster == 1 or cluster_fits(device, self.tile.cluster)
        alone: Any = replace(self.tile, cluster=1)
        return self if fits else replace(self, tile=alone)

    @property
    def entry(self) -> str:
        return "pixels_last_clusters" if self.tile.cluster > 1 else "pixels_last"

    @property
    def reads(self) -> WeightForm | None:
        return "channels_last" if self.in_place else None

    @property
    def packed_as(self) -> tuple[Any, ...]:
        return self.problem.precision, self.problem.pass_, self.tile.turnable

    @property
    def overlaps(self) -> bool:
        """Blocks that begin one by one beside `pack` lose touch with those that read the same pixels and weights
        (docs/experiments.md)."""
        return self.seconds < _BESIDE_PACK

    def arguments(self, given: Given) -> tuple[Argument, ...]:
        t, p, in_place = self.tile, self.problem, given.weight == "in place"
        weight = turned_map(t, p) if in_place and t.forward else packed_map(t, p, "weight" if in_place else "packed")
        return self.result, self.bias(given), *ints(t.arguments(p, self.gpu)), source_map(t, p), weight


def source_box(t: Tile, p: Problem) -> Five:
    """What the box of a step's pixels traverses: channels, W, H, D, images."""
    images, *counts = t.box(p)
    d, h, w = ((count - 1) * step + 1 for count, step in zip(counts, t.steps_between[0]))
    return t.chunk, w, h, d, images


def source_map(t: Tile, p: Problem) -> Map:
    """Over the source with a problem's box."""
    channels, *size = source_shape(p)[1:]
    tensor, (d, h, w) = channels_last(p.batch, channels, size, t.element), t.steps_between[0]
    return Map("source", tensor, p.dtype, source_box(t, p), (1, w, h, d, 1), t.row_bytes, p.precision == "tf32")


def packed_map(t: Tile, p: Problem, operand: Operand) -> Map:
    """Over packed weights, with a box of a tap's for a chunk; a gradient's channels-last weights are alike."""
    channels, columns = t.channels
    tensor = rows_of_taps(p, columns, channels)
    return Map(operand, tensor, p.dtype, t.weight_box, span=t.weight_span, rounded=p.precision == "tf32")


def turned_map(t: Tile, p: Problem) -> Map:
    """Over a forward's channels-last weights of 16 bits, whose rows are of channels of the result."""
    channels, columns = t.channels
    return Map("weight", rows_of_taps(p, channels, columns), p.dtype, (_TURNED, 1, t.chunk, 1, 1), span=128)


# --- candidates ------------------------------------------------------------------------------------------------------


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why these kernels cannot serve a problem, in a sentence; None when one may."""
    if refused := tile.refusal(p, gpu):
        return refused
    if p.pass_ == "grad-weight" or p.layout != "channels_last":
        return "the implicit GEMM is for forwards and gradients for the input in channels_last"
    if p.groups > 1:
        return "the kernel knows no groups"
    if p.batch == 0 or 0 in p.size:
        return "an empty input has no work"
    if p.pass_ != "fwd" and max(p.stride) > MAX_BOX_STEP:
        return f"boxes take steps of at most {MAX_BOX_STEP} pixels"
    if p.taps > _MOST_TAPS:
        return f"{p.taps} taps are more than the {_MOST_TAPS} of the kernel's tables"
    if p.pass_ == "fwd" and math.prod(p.stride) > _MOST_TAPS:
        return f"{math.prod(p.stride)} phases are more than the {_MOST_TAPS} of the kernel's tables"
    if source_shape(p)[1] * p.dtype.itemsize % 16:
        return "boxes want pixels of whole 16 bytes"
    if math.prod(p.weight_shape) * p.dtype.itemsize >= 2**35 or source_shape(p)[1] * p.taps >= 2**31:
        return "units of the weight are counted in 32 bits, which 2^31 of 16 bytes are too many for"
    return None


def _widths(result: int) -> tuple[int, ...]:
    """Columns of a block for so many channels of a result: few, since each is a kernel."""
    even = {-(-result // (16 * n)) * 16 for n in range(1, -(-result // 32) + 1)}
    fitting = {n for n in even if n <= _MOST_COLUMNS and -(-result // n) * n <= _WASTE * result}
    blocks = -(-result // _MOST_COLUMNS)
    return tuple(sorted(fitting or {-(-result // (8 * blocks)) * 8}))


@lru_cache(maxsize=256)
def candidates(layer: Problem, gpu: Gpu) -> tuple[Tile, ...]:
    """A layer's tiles, for all sizes."""
    source, result = source_shape(layer)[1], result_shape(layer)[1]
    element = layer.dtype.itemsize
    row_bytes = next((n for n in (32, 64) if source * element <= n), 128)
    shapes = product(_widths(result), (1, 2, 4), (row_bytes // element,), (True, False))
    found = fitted((Tile(layer, *shape) for shape in shapes), gpu)
    # Weights as they lie spare a training step their packing (docs/experiments.md).
    return tuple(t for t in found if t.turnable) or found


def _clustered(t: Tile, p: Problem, gpu: Gpu) -> Iterator[Tile]:
    """With clusters that share its steps, where tiles leave multiprocessors idle and sums have room in the ring."""
    tiles, sums = t.tiles(p), CONSUMERS * 128 * t.sums * 4
    for cluster in _CLUSTERS:
        fits = t.halves and sums <= t.stages * t.stage_bytes
        if fits and 2 * cluster <= t.steps[0] and tiles <= gpu.clusters(cluster):
            yield replace(t, cluster=cluster)


# --- the cost model --------------------------------------------------------------------------------------------------


def _waves(t: Tile, p: Problem, gpu: Gpu) -> tuple[int, int]:
    """(tiles of the block that has most, their steps): sorted, of each round those of its first tile's phase."""
    tiles, of = t.tiles(p) * t.cluster, len(t.phases)
    waves = -(-tiles // gpu.multiprocessors)
    if t.even or t.cluster > 1:
        return waves, waves * -(-t.steps[0] // t.cluster)
    if t.sorted(p, gpu):
        firsts = (wave * gpu.multiprocessors * of // tiles for wave in range(waves))
        return waves, sum(t.steps[phase] for phase in firsts)
    rounds, rest = divmod(waves, of)
    return waves, rounds * sum(t.steps) + sum(t.steps[:rest])


def estimate(t: Tile, p: Problem, gpu: Gpu) -> Cost:
    """What a problem takes by a tile."""
    waves, every = _waves(t, p, gpu)
    steps = every / waves
    instructions = t.row_bytes // 32 * t.rows // 64 * steps
    lines = (t.rows + t.columns) * steps
    if t.channels[0] % t.chunk:  # the last of a tap's
        lines += t.rows * steps / -(-t.channels[0] // t.chunk) * _PARTIAL
    narrow = 2 if t.element == 4 and not t.wide_stores else 1
    read = float(math.prod(source_shape(p)))
    if not t.forward:
        read *= math.prod(min(k, s) / s for k, s in zip(p.kernel, p.stride))
    return cost(
        Work(
            instructions,
            instructions * t.columns,
            waves=waves,
            moved=(math.prod(result_shape(p)) + read) * t.element,
            steps=steps,
            stages=t.stages,
            lines=lines,
            boxes=2 * steps,
            stored=t.rows * t.columns / t.cluster * narrow / 8 * _STORE[p.pass_],
            descriptors=True,
            in_turn=not t.halves,
            exchanged=t.rows * t.columns if t.cluster > 1 else 0,
        ),
        gpu,
    )


def _unwanted(p: Problem, gpu: Gpu) -> str | None:
    """`refusal`, or why there is no need to look."""
    refused = refusal(p, gpu)
    if refused is None and p.pass_ == "fwd" and p.out_channels < _FEWEST:
        return f"of {p.out_channels} channels a matrix instruction waits for its pixels"
    return refused


def _countable(p: Problem, gpu: Gpu) -> Iterator[Tile]:
    """Tiles for one of a problem's, and those of clusters."""
    every = (t for whole in candidates(any_size(p), gpu) for t in (whole, *_clustered(whole, p, gpu)))
    return (t for t in every if t.tiles(p) < _MOST_TILES)


choose = Chooser(
    _unwanted,
    _countable,
    estimate,
    Choice,
    none="no tile's stages fit in shared memory, or its tiles are too many to count",
)
"""The cheapest tile by the model, or the sentence why there is none."""
candidate = choose.candidate
