"""The grad-weight family's tilings: which are worth a look for a layer, and which of them a bound leaves to look at.

A `Sketch` is all tilings of a block and a set of taps. Those are never made whose bound from below
(`wgrad_costs.Floor`) is above the best time so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import product

import torch

from upconv.cuda.compile.boxes import alignment_classes, fullest, parts
from upconv.cuda.gpu import Gpu
from upconv.cuda.wgrad.wgrad_boxes import MAX_CLASSES
from upconv.cuda.wgrad.wgrad_costs import AnyTiling, Clocks, Floor, chunk_clocks, straddling_of
from upconv.cuda.wgrad.wgrad_tiling import WARPS, SyncTiling, Triple
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.derived import settled, varied
from upconv.problem import Problem

_ACCUMULATORS = 144  # registers of a thread of the mma.sync kernel; beside them fragments and addresses
_MOST_WIDTH = 160  # input channels of a block that needs two accumulators of 64 rows
MOST_MADE = 1000
"""Tilings that a search makes."""
_GAPLESS = 64, 96, 128, 192, 256  # positions of their chunks


@dataclass(frozen=True)
class _Search:
    """What all tilings of a search share; the arguments of `candidates`."""

    problem: Problem
    gpu: Gpu
    aligned: bool
    aligned_g: bool
    width: int
    classes: tuple[int, int]
    general: bool

    @property
    def last(self) -> bool:
        return self.problem.layout == "channels_last"

    @property
    def boxed(self) -> bool:
        """Whether boxes may bring both tensors in NCHW."""
        return not (self.last or self.general) and self.aligned_g


Chunk = tuple[int, int, int, int] | int
"""Images and positions along D, H and W; or positions of `WarpgroupTiling.gapless`."""


class Sketch:
    """The tilings of a block and a set of taps, by their chunks: they are made when somebody asks."""

    def __init__(self, of: _Search, base: AnyTiling, chunks: tuple[Chunk, ...]) -> None:
        self._of, self._base, self.chunks = of, base, chunks
        self._made: dict[Chunk, AnyTiling | None] = {}
        self._clocks: dict[tuple[Chunk, float], tuple[AnyTiling, Clocks] | None] = {}

    def tiling(self, chunk: Chunk) -> AnyTiling | None:
        """That of a chunk; None where it does not fit, or is never of use."""
        if not self._made:
            self._base = settled(self._base, "problem", "block", "taps")
        if chunk not in self._made:
            if isinstance(self._base, SyncTiling):
                self._made[chunk] = _sync_tiling(self._of, self._base, chunk)
            else:
                self._made[chunk] = _warpgroup_tiling(self._of, self._base, chunk)
        return self._made[chunk]

    def timed(self, chunk: Chunk, straddling: float) -> tuple[AnyTiling, Clocks] | None:
        """It, with the clocks of its chunk."""
        key = chunk, straddling
        if key not in self._clocks:
            t = self.tiling(chunk)
            self._clocks[key] = None if t is None else (t, chunk_clocks(t, straddling))
        return self._clocks[key]

    def floor(self, p: Problem, gpu: Gpu) -> Floor:
        """What no tiling is below for a problem."""
        return Floor(self._base, p, gpu, self._of.general)


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why this family cannot serve a problem, in a sentence; None when it can."""
    if p.dtype is torch.float64:
        return "tensor cores multiply float64 only by mma.m8n8k4, which this family does not use"
    if gpu.capability < (8, 0):
        return f"tensor cores of compute capability {gpu.capability[0]}.{gpu.capability[1]} lack TF32 and bfloat16"
    if p.batch == 0 or 0 in p.size:
        return "an empty input has no work"
    if p.in_channels // p.groups < 4 and p.groups > 1:
        return f"{p.in_channels // p.groups} input channels per group leave most of a matrix instruction empty"
    return None


def candidates(
    p: Problem,
    gpu: Gpu,
    aligned: bool,
    aligned_g: bool,
    width: int = 0,
    classes: tuple[int, int] = (1, 1),
    general: bool = False,
) -> Iterator[AnyTiling]:
    """Every tiling worth a look.

    ``aligned``, ``aligned_g``: rows of an NCHW input and output begin at 16 bytes. ``width``: of images so narrow that
    a chunk takes whole rows (`narrow`); some tilings then serve this width alone. ``classes``: of the rows of an NCHW
    output that are not aligned (`classes_of`); some tilings serve these alone. ``general``: those of exported files, of
    which NCHW's stay as they are.
    """
    for sketch in _sketches(p, gpu, aligned, aligned_g, width, classes, general):
        yield from filter(None, map(sketch.tiling, sketch.chunks))


def promising(p: Problem, gpu: Gpu, general: bool) -> Iterator[tuple[tuple[int, int], float, tuple[AnyTiling, Clocks]]]:
    """A problem's tilings by rising bound, `MOST_MADE` at most: each one's place among `candidates`, its bound in
    seconds, and the tiling with the clocks of its chunk.

    A layer's sketches are found once, and their tilings kept.
    """
    aligned, aligned_g = (size[-1] * p.dtype.itemsize % 16 == 0 for size in (p.size, p.out_size))
    width, classes = 0 if general else narrow(p), classes_of(p, general)
    sketches = _sketches(any_size(p), gpu, aligned, aligned_g, width, classes, general)
    straddling = 1.0 if general else straddling_of(p)
    counts = {chunk: _chunks(p, chunk) for chunk in {chunk for sketch in sketches for chunk in sketch.chunks}}
    floors = [sketch.floor(p, gpu) for sketch in sketches]
    heap = [(floor.seconds, i, -1) for i, floor in enumerate(floors)]
    heapify(heap)
    made = 0
    while heap and made < MOST_MADE:
        seconds, i, j = heappop(heap)
        sketch = sketches[i]
        if j < 0:  # a sketch, whose tilings take its place
            for j, chunk in enumerate(sketch.chunks):
                heappush(heap, (max(seconds, floors[i].of(*counts[chunk])), i, j))
            continue
        made += 1
        timed = sketch.timed(sketch.chunks[j], straddling)
        if timed is not None:
            yield (i, j), seconds, timed


def _chunks(p: Problem, chunk: Chunk) -> tuple[int, int]:
    """How many chunks a problem has, and positions of each."""
    if isinstance(chunk, int):
        return fullest(p.batch, p.size, p.stride, chunk)[0], chunk
    sizes = p.batch, *(1,) * (3 - p.rank), *p.size
    return math.prod(-(-size // of) for size, of in zip(sizes, chunk)), math.prod(chunk)


@lru_cache(maxsize=256)
def _sketches(
    p: Problem,
    gpu: Gpu,
    aligned: bool,
    aligned_g: bool,
    width: int,
    classes: tuple[int, int],
    general: bool,
) -> tuple[Sketch, ...]:
    of = _Search(p, gpu, aligned, aligned_g, width, classes, general)
    found, tiles = [], _tiles(p, 32 if of.boxed else 64)
    for base in _warpgroup_bases(of):
        # Those without gaps are at any size; `boxed` has the box of one.
        gapless = of.last and not (general or base.stacked or p.batch_as_width)
        found.append(Sketch(of, base, (*tiles, *_GAPLESS) if gapless else tiles))
    if not p.batch_as_width:  # whose threads read images as they lie
        found += [Sketch(of, base, _tiles(p)) for base in _sync_bases(of)]
    return tuple(found)


def any_size(p: Problem) -> Problem:
    """The layer at one size for all, so that its tilings and kernels are found again at the next size."""
    size = tuple(1024 + 2 * pad // s for pad, s in zip(p.padding, p.stride))
    return p.with_(batch=1, size=size, bias=False, pass_="grad-weight")


def _sync_bases(of: _Search) -> Iterator[SyncTiling]:
    p = of.problem
    aligned = of.aligned and p.layout == "nchw"
    layer = settled(SyncTiling(p, (16, 8), (1, 1, 1), (1, 1, 1, 8), aligned), "problem")
    for block, taps in product(_blocks(p.in_channels // p.groups, p.out_channels // p.groups), _tap_sets(p)):
        warp = _warps(p, block, math.prod(taps))
        if warp is not None:
            yield varied(layer, block=block, taps=taps, warp=warp)


def _sync_tiling(of: _Search, base: SyncTiling, tile: Chunk) -> SyncTiling | None:
    t = varied(base, tile=tile)
    fits = t.shared_bytes <= of.gpu.shared_bytes and t.k_steps >= t.k_slices
    return t if fits and (t.element == 4 or t.strips % 2 == 0) else None


def narrow(p: Problem) -> int:
    """The width of images whose rows a chunk takes whole, or 0; few, since each is a kernel."""
    width = p.size[-1]
    return width if p.rank > 1 and p.layout == "nchw" and width in (8, 16, 32) else 0


def classes_of(p: Problem, general: bool = False) -> tuple[int, int]:
    """`WarpgroupTiling.classes` of an NCHW output; (1, 1) where rows are aligned, or classes too many.

    ``general``: (1, 1), since they are a size's.
    """
    found = None
    if p.layout == "nchw" and not general:
        found = alignment_classes(p.batch, p.out_channels, p.out_size, p.dtype.itemsize)
    return found if found is not None and math.prod(found) <= MAX_CLASSES else (1, 1)


def _by_boxes(of: _Search) -> bool:
    """Whether the tensor copy engine can bring the input's pixels.

    It wants pitches of whole 16 bytes, and so must a box begin where its rows are swizzled: a group's that begins off
    16 bytes is an illegal instruction.
    """
    p = of.problem
    if of.gpu.arch != "90a" or p.precision == "ieee":
        return False
    channels = p.in_channels if p.groups == 1 else p.in_channels // p.groups
    return channels % (16 // p.dtype.itemsize) == 0 if of.last else of.aligned


def _warpgroup_bases(of: _Search) -> Iterator[WarpgroupTiling]:
    p, boxed = of.problem, of.boxed
    if not _by_boxes(of):
        return
    cin, cout = p.in_channels // p.groups, p.out_channels // p.groups
    # Where a position meets many outputs, few output channels by many input channels read the least.
    steep = math.prod(p.stride) >= 8
    widths = _widths(cin, steep or boxed, rows_of_32=of.last and p.dtype.itemsize == 2)
    sets = [(taps, False) for taps in _tap_sets(p, 36)] + [(taps, True) for taps in _column_sets(p)]
    shared_rows = [(subs, False) for subs in (1, 2, 4)] + [(subs, True) for subs in (2, 4, 8) if boxed]
    layer = settled(WarpgroupTiling(p, (64, 64), (1, 1, 1), (1, 1, 1, 8), of.aligned), "problem")
    for ci, (groups, split_m), (subs, interleaved), (taps, stacked) in product(
        widths, ((2, 1), (2, 2), (3, 1), (3, 3)), shared_rows, sets
    ):
        if (subs > 1 and cout > 64 // subs and not (steep or interleaved)) or (
            split_m > 1 and cout <= 64 // subs * (split_m - 1)
        ):
            continue
        if interleaved and (stacked or taps[2] % subs or p.stride[-1] == 1):
            continue
        block = ci, 64 // subs * split_m
        base = varied(
            layer, block=block, taps=taps, subs=subs, stacked=stacked, interleaved=interleaved,
            warpgroups=groups, split_m=split_m,
        )  # fmt: skip
        if base.accumulators > (160 if groups == 2 else 104):
            continue
        # Pixels of float32 that are turned take longer in such widths, which the model does not know.
        if base.turned and ci >= 96 and ci % 64:
            continue
        if base.entries * subs * (groups // split_m) <= 1.5 * base.set_taps:
            yield base


def _warpgroup_tiling(of: _Search, base: WarpgroupTiling, chunk: Chunk) -> WarpgroupTiling | None:
    most = 8 if of.last and not of.general else 4
    if isinstance(chunk, int):
        t = varied(base, tile=(1, 1, 1, 1), gapless=chunk)
        return _staged(t, of.gpu, most) if t.box_g and t.segment >= 32 else None
    whole = _of_tile(of, base, chunk)
    return None if whole is None else _staged(whole, of.gpu, most)


def _of_tile(of: _Search, base: WarpgroupTiling, tile: tuple[int, int, int, int]) -> WarpgroupTiling | None:
    """A tiling without its stages; None where it is none of the kernel's, or never of use."""
    p, last, width = of.problem, of.last, of.width
    # Rows of 128 bytes rather than of 32: the tensor copy engine takes as long for either.
    lines = tile[3] == width and tile[2] > 1 and width * p.dtype.itemsize < 128
    t = varied(base, tile=tile, aligned_g=of.aligned_g and not last, lines=lines, classes=of.classes)
    if t.classed and not t.classes_fit:
        t = varied(t, classes=(1, 1))
    if (last or t.aligned_g or t.classed) and not t.box_g:
        return None
    if ((not last or t.turned) and t.segment < 32) or (t.element == 2 and t.strips % 2):
        return None
    if last and max(tile) > 256:
        return None
    return None if t.stacked and not t.stackable else t


def _staged(t: WarpgroupTiling, gpu: Gpu, most: int) -> WarpgroupTiling | None:
    """A tiling with as many stages as fit, or None where two do not."""
    stages = min(most, (gpu.shared_bytes - t.raw_bytes - 16) // (t.stage_bytes + 16))
    return varied(t, stages=stages) if stages >= 2 else None


def _widths(cin: int, steep: bool, rows_of_32: bool) -> tuple[int, ...]:
    """Input channels that a block of `WarpgroupTiling` may have.

    ``rows_of_32``: boxes bring pixels' channels (channels_last of 16 bits), 32 or 64 at a time, or 16 at a time slowly.
    """
    found: tuple[int, ...] = (32,) if cin <= 32 else (64,) if cin <= 64 else (64, 128)
    if steep and cin > 128:
        found += (256,)
    # And as wide as sums allow, where fewer columns then have no channel (docs/experiments.md).
    blocks = -(-cin // _MOST_WIDTH)
    even = -(-cin // (16 * blocks)) * 16
    if cin <= 32 or even in found or even * blocks >= -(-cin // found[-1]) * found[-1]:
        return found
    if rows_of_32 and even > 64 and even % 32:
        return found
    return (*found, even)


def _blocks(cin: int, cout: int) -> Iterator[tuple[int, int]]:
    for m, n in product((16, 32, 64, 128), (8, 16, 32, 64, 128)):
        if (m < 2 * cin or m == 16) and (n < 2 * cout or n == 8) and 4 * m * n >= min(cin, 64) * min(cout, 64):
            yield m, n


def _tap_sets(p: Problem, most: int = 36) -> tuple[Triple, ...]:
    """Boxes of neighbouring taps."""
    d, h, w = (1,) * (3 - p.rank) + p.kernel
    wide = [v for v in parts(w) if v <= 9]
    found = [(1, 1, v) for v in wide]
    if max(wide) == w:
        found += [(1, v, w) for v in parts(h)[1:]]
        found += [(v, h, w) for v in parts(d)[1:]]
    if 1 not in wide or w == 2:
        found += [(1, v, 1) for v in parts(h)]
    return tuple(dict.fromkeys(t for t in found if math.prod(t) <= most))


def _column_sets(p: Problem) -> tuple[Triple, ...]:
    """Boxes of columns of taps, whose rows of x an instruction may take together."""
    d, h, w = (1,) * (3 - p.rank) + p.kernel
    heights = [v for v in parts(h) if v > p.stride[-2]] if p.rank > 1 and p.dilation[-2] == 1 else []
    found = [(1, v, u) for v in heights for u in parts(w)]
    found += [(v, h, u) for v in parts(d)[1:] for u in (1, w) if h in heights]
    return tuple(dict.fromkeys(t for t in found if math.prod(t) <= 36))


def _warps(p: Problem, block: tuple[int, int], taps: int) -> tuple[int, int] | None:
    """The warp's share of a block with the fewest reads of fragments that leaves its sums in registers."""
    most = _ACCUMULATORS // 2 if p.precision == "ieee" else _ACCUMULATORS
    best: tuple[float, tuple[int, int]] | None = None
    for m, n in product((16, 32, 64), (8, 16, 32, 64)):
        if block[0] % m or block[1] % n or taps * m * n // 32 > most:
            continue
        warps = block[0] // m * (block[1] // n)
        if warps > WARPS or WARPS % warps:
            continue
        reads = (m / 4 + taps * n / 4) / (m * n * taps)
        if best is None or reads < best[0]:
            best = reads, (m, n)
    return None if best is None else best[1]


def _tiles(p: Problem, least: int = 64) -> tuple[tuple[int, int, int, int], ...]:
    """Chunks; ``least``: positions of one in 1-D."""
    if p.rank == 1:
        return tuple((n, 1, 1, w) for n in (1, 2, 4) for w in (8, 16, 32, 64, 128, 256) if least <= n * w <= 512)
    shapes = [(n, 1, h, w) for n in (1, 2, 4) for h in (1, 2, 4, 8) for w in (8, 16, 32, 64) if 32 <= n * h * w <= 256]
    if p.rank == 3:
        shapes += [(1, d, h, w) for d in (2, 4) for h in (2, 4, 8) for w in (8, 16, 32) if 32 <= d * h * w <= 256]
    return tuple(shapes)
