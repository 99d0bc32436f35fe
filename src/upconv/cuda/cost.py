"""One cost model: what a family counts of its tile, and the rule that makes seconds of it.

A family counts a tile's instructions, bytes, boxes and sectors (`Work`). `cost` knows what each takes on a chip
(`upconv.cuda.gpu.Rates`) and what overlaps: matrix instructions, shared memory, the copy engine and producers do, which
is a norm of high exponent; stores do where another consumer multiplies meanwhile; the device memory is a floor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from upconv.cuda.gpu import RATES, Gpu


@dataclass(frozen=True)
class Work:
    """What an average tile asks of its multiprocessor, and a launch of the device memory."""

    instructions: float
    """Matrix instructions, of 64 rows and 32 bytes of K."""
    columns: float
    """Of all of these together."""
    waves: float
    """Tiles of the multiprocessor that has most."""
    moved: float
    """Bytes that the launch reads from and writes to the device memory."""
    steps: float = 0.0
    """Stages of the ring that the tile takes."""
    stages: float = 1
    """Of the ring."""
    weight_steps: float = 0.0
    """Stages of a ring of weights that the tile takes."""
    weight_stages: int = 1
    """Of that ring."""
    lines: float = 0.0
    """Lines of 128 bytes, or shorter rows, that the copy engine traverses."""
    boxes: float = 0.0
    """Boxes that it is asked for."""
    shared: float = 0.0
    """Bytes of shared memory that descriptors and copies touch."""
    fragments: float = 0.0
    """Bytes that lanes load from it as fragments, times their bank conflicts."""
    loads: float = 0.0
    """Loads that the consumer itself waits for, of 32 lanes."""
    chunks_turned: float = 0.0
    """Chunks that producers transpose."""
    turned: float = 0.0
    """32 bytes of channels of a pixel, of a producer's thread, that they transpose."""
    dry: float = 0.0
    """Clocks in which the tensor cores have no instruction, as between stretches of code."""
    stored: float = 0.0
    """Clocks that stores take with nothing beside them."""
    descriptors: bool = False
    """Whether operand A comes by descriptor."""
    in_turn: bool = False
    """Whether a consumer stores while the other multiplies, since they take tiles in turn."""
    beside: float = 0.0
    """Clocks of a tile that nothing hides, beside those of every tile."""
    start: float = 0.0
    """Clocks until the first pixels of a launch are there, beside what every launch takes."""
    beside_memory: float = RATES.beside_memory
    """As `upconv.cuda.gpu.Rates.beside_memory`."""
    exchanged: float = 0.0
    """Sums of a tile that a cluster's blocks add up."""


@dataclass(frozen=True)
class Cost:
    """An estimate by named terms, in seconds of the multiprocessor that has most tiles; terms overlap."""

    seconds: float = 0.0
    """Of the launch."""
    tensor: float = 0.0
    """Matrix instructions."""
    issue: float = 0.0
    """Instructions of CUDA cores."""
    shared: float = 0.0
    """Shared memory: operands, copies, and pixels that producers transpose."""
    l2: float = 0.0
    """The copy engine, which brings lines from the second-level cache."""
    latency: float = 0.0
    """Waits of a ring too short for the copies' latency."""
    store: float = 0.0
    """Stores, and what a tile takes beside."""
    dram: float = 0.0
    """The device memory."""
    launch: float = 0.0
    """The launch."""

    def terms(self) -> Iterator[tuple[str, float]]:
        """Names and seconds."""
        yield "tensor cores", self.tensor
        yield "instruction issue", self.issue
        yield "shared memory", self.shared
        yield "L2", self.l2
        yield "latency", self.latency
        yield "stores", self.store
        yield "bytes", self.dram

    @property
    def bound(self) -> str:
        """What takes most."""
        return max(self.terms(), key=lambda term: term[1])[0]

    @property
    def text(self) -> str:
        """The terms in microseconds, those of next to nothing left out."""
        found = (f"{name} {1e6 * seconds:.3g}" for name, seconds in self.terms() if seconds > 0.01 * self.seconds)
        return ", ".join(found)


class _Tile(NamedTuple):
    """Clocks of a tile, by what they are spent on."""

    tensor: float
    shared: float
    copies: float
    ring: float
    loop: float
    """Of all these, which overlap."""


def _tile(work: Work) -> _Tile:
    of, each = RATES, work.columns / work.instructions / 2
    least = of.descriptor_instruction if work.descriptors else of.register_instruction
    tensor = work.instructions * (max(of.columns * each, least) + of.instruction)
    tensor += work.steps * of.step + work.loads * of.load + work.dry
    shared = (work.shared + work.fragments) / of.shared
    producers = work.chunks_turned * of.chunk_turned + work.turned * of.unit_turned
    copies = work.lines * of.line + work.boxes * of.box
    busy = _together((tensor, shared, producers, copies), of.overlap)
    ring = (work.steps * of.latency + copies + busy) / work.stages
    if work.weight_steps:
        ring = max(ring, (work.weight_steps * of.latency + copies + busy) / work.weight_stages)
    return _Tile(tensor, max(shared, producers), copies, ring, _together((busy, ring), of.ring_overlap))


def tile_clocks(work: Work) -> float:
    """Of a tile beside those of every tile, where nothing of it overlaps with the next one's."""
    return _tile(work).loop + work.stored + work.beside


def cost(work: Work, gpu: Gpu) -> Cost:
    """The estimate of a launch whose tiles ask for so much."""
    of, each = RATES, _tile(work)
    waves, fixed = work.waves, of.tile
    if work.exchanged:
        fixed += of.cluster + work.exchanged * of.sum
    tile = each.loop + work.stored + fixed
    if work.in_turn:
        alone = -(-waves // 2) * tile
        last = work.stored + fixed
        clocks = max(waves * each.loop, alone) + last + of.disturbed * waves * min(work.stored, each.loop)
    else:
        clocks = waves * tile
    clocks += waves * work.beside
    multiplying, dram = clocks / gpu.clock, work.moved / gpu.bandwidth
    launch = of.launch + work.start / gpu.clock
    seconds = max(multiplying, dram) + work.beside_memory * min(multiplying, dram) + launch
    tiles = waves / gpu.clock
    return Cost(
        seconds,
        tensor=tiles * each.tensor,
        shared=tiles * each.shared,
        l2=tiles * each.copies,
        latency=tiles * each.ring,
        store=tiles * (work.stored + fixed + work.beside),
        dram=dram,
        launch=launch,
    )


def _together(terms: tuple[float, ...], exponent: float) -> float:
    """Clocks of what overlaps: the largest, and more where others are nearly as large."""
    largest = max(terms)
    return float(largest * sum([(term / largest) ** exponent for term in terms if term]) ** (1 / exponent))
