"""The gather-GEMM's tilings: which are worth a look for a layer, and what the model has each of them at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch

from upconv.cuda.axes import Unfit, any_size, gather_axes, positions, result_shape, source_shape
from upconv.cuda.compile.boxes import alignment_classes
from upconv.cuda.gemm.gather_floor import CLUSTERS, Floor, Shape
from upconv.cuda.gemm.gather_model import CLUSTER, Clocks, alignment_of, fragment_clocks, seconds_of, tile_clocks
from upconv.cuda.gemm.shuffle import Shuffle, Triple, countable, ways
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gemm.tiling_pixels import narrow_source, whole_source
from upconv.cuda.gpu import Gpu
from upconv.derived import derived, settled, varied
from upconv.problem import Problem

_ACCUMULATORS = 4  # blocks of 64 x 64 that a consumer warpgroup holds: 128 registers of a thread's 200
_MMA_ACCUMULATORS = 2  # without setmaxnreg a thread has 168 registers
_MAX_TAPS = 4096  # of all phases; the tables lie in constant memory
_CLUSTER_HOPE = 1.0, 1.05  # by how much the model hopes where clusters share a tile's chunks: NCHW, channels_last
MOST_SKETCHES = 250
"""Sketches whose tilings a search makes, those with the least bound first."""
_PROMISING = 12  # of the tilings that promise most with clusters so many are looked at
_AHEAD = 4500.0  # clocks that the rings should look ahead
_SPREAD = 1.2  # of tiles that store between others' results; asked only against phases as rows, fitted to one 1-D layer
# Of channels-last tiles that wait for memory, 64 neighbours of a row as one (docs/experiments.md). Not in files: their
# boxes ask for a line, and were not timed so.
_LONG = 1.003
_SHORT_ROWS = 64  # bytes, up to which threads may copy rows that begin anywhere better than boxes
_TAPS = "problem", "unroll", "subs", "w_subs"


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why no tiling can serve a problem, in a sentence; None when one may."""
    if p.dtype is torch.float64:
        return "tensor cores multiply float64 only by mma.m8n8k4, which this family does not use"
    if gpu.capability < (8, 0):
        return f"tensor cores of compute capability {gpu.capability[0]}.{gpu.capability[1]} lack TF32 and bfloat16"
    if p.taps > _MAX_TAPS:
        return f"{p.taps} taps are too many for the kernel's tables"
    if p.pass_ not in ("fwd", "grad-input"):
        return f"pass {p.pass_} sums over pixels, which this family does not"
    channels = source_shape(p)[1] // p.groups
    if channels < 4 and p.groups > 1:
        side = "input" if p.pass_ == "fwd" else "output"
        return f"{channels} {side} channels per group leave most of a matrix instruction empty"
    return None


@dataclass(frozen=True, eq=False)
class _Search:
    """What all tilings of a search share; the arguments of `candidates`."""

    problem: Problem
    """The layer, or the one without its stride."""
    gpu: Gpu
    fast: bool
    """By wgmma."""
    steps: Triple
    classes: tuple[int, int] | None
    whole: Triple | None
    result: tuple[int, ...]
    """Of a size's search its results along D, H and W."""
    shuffle: Shuffle | None
    drained: bool
    beside: bool

    @property
    def far(self) -> bool:
        """Whether taps step over the source."""
        return self.problem.pass_ != "fwd" and max(self.problem.stride) > 1

    @derived
    def planewise(self) -> tuple[bool, ...]:
        p = self.problem
        apart = self.far and self.fast and p.layout == "channels_last" and p.precision != "ieee"
        return (False, True) if apart else (False,)

    @derived
    def accumulators(self) -> int:
        found = _ACCUMULATORS if self.fast else _MMA_ACCUMULATORS
        return found // 2 if self.problem.precision == "ieee" else found

    @derived
    def shaped(self) -> dict[tuple[Any, ...], Tiling]:
        """Tilings by their taps and tile, which several splits and chunks share."""
        return {}


class Sketch:
    """Tilings of one shape, which are made when somebody asks."""

    def __init__(self, of: _Search, taps: Tiling, shape: Shape, classes: tuple[int, int] | None) -> None:
        self._of, self.taps, self.shape, self._classes = of, taps, shape, classes
        self._clocks: dict[int, tuple[tuple[Tiling, Clocks], ...]] = {}
        self._tilings: tuple[Tiling, ...] | None = None

    @property
    def planewise(self) -> tuple[bool, ...]:
        """The values that `Tiling.planewise` has."""
        return self._of.planewise

    def tilings(self) -> tuple[Tiling, ...]:
        """Those that fit."""
        if self._tilings is None:
            self._tilings = tuple(self._found())
        return self._tilings

    def clocks(self, alignment: int) -> tuple[tuple[Tiling, Clocks], ...]:
        """They, with the clocks of their tiles."""
        found = self._clocks.get(alignment)
        if found is None:
            found = self._clocks[alignment] = tuple((t, tile_clocks(t, alignment)) for t in self.tilings())
        return found

    def _shaped(self) -> Tiling:
        key = id(self.taps), self.shape.sub, self.shape.tile
        known = self._of.shaped
        if key not in known:
            varies = varied(self.taps, sub=self.shape.sub, tile=self.shape.tile)
            known[key] = settled(varies, *_TAPS, "tile", "planewise")
        return known[key]

    def _found(self) -> Iterator[Tiling]:
        of, sub, tile = self._of, self.shape.sub, self.shape.tile
        base = varied(self._shaped(), split=self.shape.split, chunk=self.shape.chunk, classes=self._classes)
        if self._classes is None and of.classes is not None and base.staging_units * 16 > _SHORT_ROWS:
            return
        even = len(base.distinct_entries) == 1
        residence = (False, True) if even or base.m_groups == 1 else (False,)
        pairs = (False, True) if of.fast and sub == (8, 8) and tile[2] % 16 == 0 and base.nb % 2 == 0 else (False,)
        for resident, paired, run_groups, by_plane in product(residence, pairs, self._groups(base), of.planewise):
            base = varied(base, paired=paired, run_groups=run_groups, planewise=by_plane)
            t = _fitted(varied(base, resident=resident), of.gpu)
            if t is None and not of.drained and not base.channels_last and not resident:
                t = _fitted(base, of.gpu, scarce=True)
            if t is not None:
                yield t

    def _groups(self, base: Tiling) -> tuple[int, ...]:
        """`Tiling.run_groups`."""
        sub, tile = self.shape.sub, self.shape.tile
        # Short ones where many sub-positions would fill shared memory. The ends of long runs share fewer sectors of 32
        # bytes with other runs (docs/experiments.md).
        # channels_last makes the same rounds of both.
        if base.width_subs >= 3 and sub == (1, 64):
            return (4,) if base.channels_last else (4, 8)
        # Runs of two subtiles, where rows are long enough for them.
        long = self._of.fast and not base.channels_last and sub == (1, 64) and tile[3] % 128 == 0
        return (8, 16) if long and base.width_subs == 1 and base.nb % 2 == 0 else (8,)


def candidates(
    p: Problem,
    gpu: Gpu,
    wgmma: bool | None = None,
    classes: tuple[int, int] | None = (0, 0),
    size: tuple[int, ...] | None = None,
    shuffle: Shuffle | None = None,
    drained: bool = False,
    beside: bool = False,
) -> Iterator[Tiling]:
    """Every tiling worth a look. ``classes``: of an NCHW source's rows (`Tiling.classes`); by default as ``p``'s are.

    Where shared memory has no room for a second pixel tile, producers and consumers share one and wait for each other.
    ``size``: those for an input of this size alone, which hold whole images of the source; none where it is not small.
    ``shuffle``: those of the layer without its stride; one of `shuffle.ways`.
    ``drained``: those whose outputs the tensor copy engine stores.
    ``beside``: with a ``size``, those of such images side by side.
    """
    for sketch in sketches(p, gpu, wgmma, classes, size, shuffle, drained, beside):
        yield from sketch.tilings()


def sketches(
    p: Problem,
    gpu: Gpu,
    wgmma: bool | None = None,
    classes: tuple[int, int] | None = (0, 0),
    size: tuple[int, ...] | None = None,
    shuffle: Shuffle | None = None,
    drained: bool = False,
    beside: bool = False,
) -> Iterator[Sketch]:
    """Those of `candidates`, in their order."""
    fast = gpu.arch == "90a" if wgmma is None else wgmma
    if classes == (0, 0):
        classes = classes_of(p)
    whole: Triple | None = None
    result: tuple[int, ...] = ()
    if size is not None:
        whole = (narrow_source if beside else whole_source)(p.with_(size=size))
        if whole is None or not fast:
            return
        result = positions(p.with_(size=size), shuffle)
    steps = (1, 1, 1) if p.pass_ != "fwd" or shuffle is not None else _full(p.stride)
    layer = p if shuffle is None else shuffle.unstrided
    of = _Search(layer, gpu, fast, steps, classes, whole, result, shuffle, drained, beside)
    for taps in _divisions(of):
        yield from _of_taps(of, taps)


def _full(stride: tuple[int, ...]) -> Triple:
    d, h, w = (1,) * (3 - len(stride)) + stride
    return d, h, w


def _divisions(of: _Search) -> Iterator[Tiling]:
    """A tiling for each way to share blocks among sub-positions."""
    p = of.problem
    first = Tiling(
        p, (1, 64), (1, 1, 1, 64), 0, chunk_sizes(p)[0], wgmma=of.fast, whole=of.whole, shuffle=of.shuffle,
        drained=of.drained,
    )  # fmt: skip
    layer, cout_g = settled(first, "problem"), result_shape(p)[1] // p.groups
    for (subs, unroll), w_subs in product(_subs(p, cout_g), _w_subs(of.steps[2])):
        if of.drained and subs > 1:
            continue  # before tilings are made of them, which `checked` would refuse
        of_width = gather_axes(p, unroll)[2]
        if (len(of_width.taps) if w_subs == of_width.out_step else w_subs) > of.accumulators:
            continue
        try:
            taps = settled(varied(layer, subs=subs, unroll=unroll, w_subs=w_subs), *_TAPS)
        except Unfit:
            continue
        if not of.beside:
            yield taps
        elif unroll == (1, 1, 1) and taps.contiguous and not taps.fills and taps.period <= 32:
            yield varied(taps, beside=64 // taps.period)


def _of_taps(of: _Search, taps: Tiling) -> Iterator[Sketch]:
    p, subs, unroll = of.problem, taps.subs, taps.unroll
    wide = taps.cout_g > 64 // subs and of.fast  # enough for two consumers
    plain = p.layout != "nchw" or of.classes in (None, (1, 1))
    brought = (of.classes,) if plain else (of.classes, None)
    for (sub, tile), split in product(_rows_of_images(p) if of.beside else _tiles(p), (0, 1, 2)):
        if split == 1 and not wide:
            continue
        # Before Hopper only where the halo of a strided source leaves room for no more than 64 pixels, which cannot be
        # halved: no epilogue is worth hiding there.
        if split == 2 and (of.drained or not (of.fast or (of.far and math.prod(tile) == 64))):
            continue
        if min(unroll[1], 2) > 1 and sub == (8, 8) and tile[2] > 8:
            continue  # the rows of an unrolled tile are many already
        short = any(n > s * u * t for n, s, u, t in zip(of.result, of.steps, unroll, tile[1:]))
        if short and not of.beside:
            continue
        for chunk in chunk_sizes(p):
            shape = Shape(sub, tile, split, chunk)
            if 1 <= taps.mb * shape.consumer_subtiles <= of.accumulators:
                yield from (Sketch(of, taps, shape, by) for by in brought)


def chunk_sizes(p: Problem) -> list[int]:
    """Channels that a chunk may have: 32, 64 or 128 bytes of a pixel, no more than half of them beyond the last."""
    least, channels = 32 // p.dtype.itemsize, source_shape(p)[1] // p.groups
    return [c for c in (least, 2 * least, 4 * least) if c == least or c < 2 * channels]


def _subs(p: Problem, cout_g: int) -> Iterator[tuple[int, Triple]]:
    """(d, h) sub-positions that share a block of 64 rows, and how rows are unrolled for them."""
    yield 1, (1, 1, 1)
    axes = gather_axes(p)[:2]
    every, tapped = math.prod(axis.out_step for axis in axes), math.prod(len(axis.taps) for axis in axes)
    for subs in (2, 4):
        if cout_g <= 64 // subs and p.rank > 1:
            # Those without taps fill no blocks; where tiles lack some along W, they are stored as the others are.
            if tapped % subs == 0 and (every % subs == 0 or p.layout == "channels_last"):
                yield subs, (1, 1, 1)
            else:
                yield subs, (1, subs, 1)
                if p.rank == 3:
                    yield subs, (2, subs // 2, 1)


def _w_subs(stride: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(n for n in (stride, 4, 2, 1) if stride % n == 0 and n <= stride)) if stride > 1 else (1,)


def _tiles(p: Problem) -> tuple[tuple[tuple[int, int], tuple[int, int, int, int]], ...]:
    row, strip = (1, 64), (8, 8)
    if p.rank == 1:
        shapes = [(row, (1, 1, 1, 64 * n)) for n in (1, 2, 4, 8)]
        shapes += [(row, (n, 1, 1, 64)) for n in (2, 4, 8)]
        shapes += [(row, (n, 1, 1, 128)) for n in (2, 4)] + [(row, (2, 1, 1, 192)), (row, (1, 1, 1, 192))]
        return tuple(shapes)
    shapes = [(row, (1, 1, n, 64)) for n in (1, 2, 4, 8)] + [(row, (1, 1, n, 128)) for n in (1, 2, 4)]
    shapes += [
        (strip, (1, 1, h, w)) for h, w in ((8, 8), (8, 16), (8, 32), (16, 16), (16, 32), (8, 64), (8, 24), (8, 40))
    ]
    shapes += [(strip, (n, 1, 8, 8)) for n in (2, 4, 8)]
    if p.rank == 3:
        shapes += [(strip, (1, 2, 8, 24)), (strip, (2, 1, 8, 24))]
        shapes += [(strip, (1, d, 8, w)) for d, w in ((2, 8), (2, 16), (4, 8), (2, 32), (4, 16), (8, 8))]
        shapes += [(row, (1, d, h, 64)) for d, h in ((2, 1), (2, 2), (2, 4), (4, 2))]
    return tuple(shapes)


def _rows_of_images(p: Problem) -> tuple[tuple[tuple[int, int], tuple[int, int, int, int]], ...]:
    """Tiles of 64 columns of images side by side, and some of their rows."""
    rows = [(1, h) for h in (1, 2, 4, 8)]
    if p.rank == 3:
        rows += [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
    return tuple(((1, 64), (1, d, h, 64)) for d, h in rows)


def _fitted(t: Tiling, gpu: Gpu, scarce: bool = False) -> Tiling | None:
    """The tiling with stages that look ahead far enough, as shared memory allows; None when it does not fit at all.

    A load takes about a thousand clocks from its request to its use (docs/experiments.md), so stages go where the least
    time lies ahead. ``scarce``: with one pixel tile.
    """
    fragment_time = fragment_clocks(t)
    chunk_time = t.most_entries * t.k_steps * t.parts * fragment_time
    most = 8 if t.wgs_m == 1 and not scarce else 4
    w_stage = -(-t.longest_stretch // -(-t.longest_stretch // most))  # a stretch ends with its last stage
    if t.parts == 2:
        w_stage = -(-w_stage // 2) * 2  # both parts of a step's weights
    elif t.channels_last and t.shuffle is None:
        w_stage = -(-w_stage // t.k_steps) * t.k_steps  # of whole taps, which boxes bring

    def stages(pixels: int) -> tuple[int, int]:
        return (pixels, 2) if t.channels_last else (1 if scarce else 2, pixels)

    pixels, weights = 1 if t.planewise else 2, 2
    stages_p, stages_s = stages(pixels)
    t = varied(t, stages_p=stages_p, stages_s=stages_s, stages_w=weights, w_stage=w_stage)
    try:
        t.checked(gpu.shared_bytes)
    except Unfit:
        return None
    best = pixels, weights
    while True:
        ahead = (pixels - (1 / t.plane_barriers if t.planewise else 0)) * chunk_time, weights * w_stage * fragment_time
        if min(ahead) >= _AHEAD or (t.resident and ahead[0] >= _AHEAD):
            break
        if t.resident or not t.wgmma or ahead[0] <= ahead[1]:
            pixels += 1
        else:
            weights += 1
        if max(pixels, weights) > 8 or t.shared_with(*stages(pixels), weights) > gpu.shared_bytes:
            break
        best = pixels, weights
    stages_p, stages_s = stages(best[0])
    return varied(t, stages_p=stages_p, stages_s=stages_s, stages_w=best[1])


def classes_of(p: Problem, general: bool = False) -> tuple[int, int] | None:
    """`Tiling.classes` of an NCHW source. ``general``: none where they are several, since they are a size's."""
    batch, channels, *size = source_shape(p)
    found = alignment_classes(batch, channels, size, p.dtype.itemsize)
    return None if general and found != (1, 1) else found


def drains(p: Problem) -> bool:
    """Whether the tensor copy engine may store a problem's result: NCHW images of 16 bits whose rows are whole units.

    Of a strided forward each phase must have as many rows. Not where a tile reads more than it stores, as of gradients
    of strided layers, nor in 1-D, where the model does not know the best tile (docs/experiments.md).
    """
    if p.dtype.itemsize != 2 or p.layout != "nchw" or p.rank != 2 or p.groups > 1:
        return False
    if p.pass_ != "fwd" and max(p.stride) > 1:
        return False
    h, w = result_shape(p)[2:]
    return w % 8 == 0 and h % p.stride[0] == 0


def considered(p: Problem, gpu: Gpu, general: bool = False, slack: float = math.inf) -> list[tuple[float, str, Tiling]]:
    """(seconds, what bounds them, tiling) by the model of every tiling that `choose` looks at.

    ``slack``: those that may take up to so many times the least; of others some are left out.
    """
    most = MOST_SKETCHES if slack < math.inf else math.inf
    found = _every(p, gpu, general)
    floors = _floors(found, p, gpu) if slack < math.inf else [0.0] * len(found)
    made = 0
    seen: dict[int, list[tuple[float, str, Tiling, Clocks]]] = {}
    best = math.inf
    for i in sorted(range(len(found)), key=floors.__getitem__):
        if floors[i] > slack * best or made >= most:
            break
        seen[i] = list(_timed(found[i], p, gpu, general))
        made += bool(seen[i])  # of a layer with a large halo most sketches fit nowhere
        best = min([best, *(one[0] for one in seen[i])])
    timed = [(found[i], one) for i in sorted(seen) for one in seen[i]]
    few = [(t, clocks, one.spread) for one, (_, _, t, clocks) in timed if one.clusters]
    return [(seconds, bound, t) for _, (seconds, bound, t, _) in timed] + list(_clustered(few, p, gpu))


class _Considered(NamedTuple):
    sketch: Sketch
    spread: float
    """Factor of its seconds."""
    clusters: bool
    """Whether blocks may share its tiles' chunks."""


def _every(p: Problem, gpu: Gpu, general: bool) -> list[_Considered]:
    """All sketches for a problem."""
    classes = classes_of(p, general) if p.layout == "nchw" else (1, 1)
    layer = any_size(p)
    shuffles = ways(layer) if countable(p) else ()
    kinds: list[tuple[Shuffle | None, bool]] = [(shuffle, False) for shuffle in (None, *shuffles)]
    if not general and not shuffles and gpu.arch == "90a" and drains(p):
        kinds.append((None, True))
    found = []
    for shuffle, drained in kinds:
        sketched = _of_layer(layer, gpu, classes, shuffle, drained)
        if not general:
            sketched += _of_size(layer, gpu, p.size, shuffle, drained)
        if not general and shuffle is None and not drained and narrow_source(p) is not None:
            sketched += _of_size(layer, gpu, p.size, None, beside=True)
        for sketch in sketched:
            spread = _SPREAD if shuffles and shuffle is None and not sketch.taps.contiguous else 1.0
            clusters = not general and sketch.taps.wgmma and shuffle is None and not drained
            found.append(_Considered(sketch, spread, clusters))
    return found


def _floors(found: Sequence[_Considered], p: Problem, gpu: Gpu) -> list[float]:
    """What no tiling of each is below, in seconds."""
    known: dict[int, Floor] = {}
    floors = []
    for sketch, spread, clusters in found:
        floor = known.get(id(sketch.taps))
        if floor is None:
            floor = known[id(sketch.taps)] = Floor(sketch.taps, p, gpu, sketch.planewise, clusters)
        floors.append(spread * floor.seconds(sketch.shape))
    return floors


def _timed(one: _Considered, p: Problem, gpu: Gpu, general: bool) -> Iterator[tuple[float, str, Tiling, Clocks]]:
    for t, clocks in one.sketch.clocks(alignment_of(p)):
        seconds, bound = seconds_of(t, clocks, p, gpu)
        seconds *= one.spread
        if bound == "bytes" and t.channels_last and t.sub == (1, 64) and not general:
            seconds *= _LONG
        yield seconds, bound, t, clocks


def _clustered(
    found: Sequence[tuple[Tiling, Clocks, float]], p: Problem, gpu: Gpu
) -> Iterator[tuple[float, str, Tiling]]:
    """Of tilings whose tiles leave multiprocessors idle those that promise most where clusters share the chunks.

    All clusters must run at once: a block has one tile, so a second would begin where the first ends. Nor are those
    looked at whose loads the model has far too cheap: planes of 32 bytes of a pixel, and halves of rows of several
    classes (docs/experiments.md). ``found``: each with a factor of its seconds.
    """
    promising: list[tuple[float, int, int, Tiling, float]] = []
    for t, clocks, factor in found:
        tiles = math.prod(t.counts(p)) * t.m_groups
        cheap = (t.planewise and t.row_bytes == 32) or (t.classed and t.element == 2)
        if t.split == 2 or t.resident or cheap:
            continue
        for cluster in CLUSTERS:
            if 2 * cluster <= t.chunks and tiles <= gpu.clusters(cluster):
                rough = factor * (clocks.tile / cluster + cluster * CLUSTER[1])
                promising.append((rough, len(promising), cluster, t, factor))
    for _, _, cluster, t, factor in sorted(promising)[:_PROMISING]:
        shared = varied(t, cluster=cluster)
        try:
            shared.checked(gpu.shared_bytes)
        except Unfit:
            continue
        seconds, bound = seconds_of(shared, tile_clocks(shared, alignment_of(p)), p, gpu)
        yield factor * seconds * _CLUSTER_HOPE[shared.channels_last], bound, shared


@lru_cache(maxsize=256)
def _of_layer(
    layer: Problem, gpu: Gpu, classes: tuple[int, int] | None, shuffle: Shuffle | None, drained: bool = False
) -> tuple[Sketch, ...]:
    """A layer's sketches for all sizes of the input; the tilings that were made of them are kept."""
    return tuple(sketches(layer, gpu, classes=classes, shuffle=shuffle, drained=drained))


@lru_cache(maxsize=256)
def _of_size(
    layer: Problem,
    gpu: Gpu,
    size: tuple[int, ...],
    shuffle: Shuffle | None,
    drained: bool = False,
    beside: bool = False,
) -> tuple[Sketch, ...]:
    """Those for this size of the input alone."""
    return tuple(sketches(layer, gpu, size=size, shuffle=shuffle, drained=drained, beside=beside))
