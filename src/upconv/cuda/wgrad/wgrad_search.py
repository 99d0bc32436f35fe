"""The grad-weight family's tilings: which are worth a look for a layer, and the one that its model finds cheapest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, product
from operator import itemgetter
from typing import NamedTuple

import torch

from upconv.cuda.axes import any_size
from upconv.cuda.compile.boxes import MAX_CLASSES, alignment_classes, fullest, parts
from upconv.cuda.gpu import Gpu
from upconv.cuda.wgrad.wgrad_costs import AnyTiling, Blocks, Model
from upconv.cuda.wgrad.wgrad_tiling import WARPS, Chunk, SyncTiling, counts
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.derived import settled, varied
from upconv.problem import Problem, Triple, triple

_ACCUMULATORS = 144  # registers of a thread of the mma.sync kernel; beside them fragments and addresses
_MOST_WIDTH = 160  # input channels of a block that needs two accumulators of 64 rows
_GAPLESS = 64, 96, 128, 192, 256  # positions of such chunks

Boxed = tuple[Chunk, Chunk | None]
"""Fields of a tiling: `tile` and `box`."""


class Found(NamedTuple):
    """A tiling for a problem, and by the model its seconds in so many splits."""

    seconds: float
    splits: int
    tiling: AnyTiling


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


def candidates(p: Problem, gpu: Gpu, general: bool = False) -> Iterator[AnyTiling]:
    """Every tiling worth a look for a problem. ``general``: of those that serve every size whose rows begin alike."""
    for base in chain[AnyTiling](_warpgroup_bases(p, gpu, general), _sync_bases(p, general)):
        for chunk in _chunks(p, base, general):
            if (t := _tiling(p, gpu, base, chunk, general)) is not None:
                yield t


def best(p: Problem, gpu: Gpu, general: bool = False) -> Found | None:
    """The cheapest tiling that is found; None where nothing fits. Of mma.sync only where no boxes bring the pixels."""
    return _best(p, gpu, _warpgroup_bases(p, gpu, general), general) or _best(p, gpu, _sync_bases(p, general), general)


def _best(p: Problem, gpu: Gpu, bases: Iterable[AnyTiling], general: bool) -> Found | None:
    """Tilings in the order of the least that each may take; none that takes longer than the best so far is made."""
    model, covered = Model(p, gpu, general), _covered(p)
    every: list[tuple[float, int, int, AnyTiling, Blocks, Boxed]] = []
    for place, base in enumerate(bases):
        blocks, halo = model.blocks(settled(base, "problem", "block", "taps")), base.halo
        for i, chunk in enumerate(_chunks(p, base, general)):
            every.append((blocks.least(*covered(chunk[1] or chunk[0], halo)), place, i, base, blocks, chunk))
    fastest, best = (math.inf, 0, 0), None
    for least, place, i, base, blocks, chunk in sorted(every, key=itemgetter(0, 1, 2)):
        if least > fastest[0]:
            break
        number, positions = covered(chunk[1] or chunk[0], base.halo)
        clocks = blocks.of_chunk + blocks.of_position * (positions // number)
        if best is not None and blocks.fastest(number, clocks)[0] > fastest[0]:
            continue
        if (t := _tiling(p, gpu, base, chunk, general)) is not None:
            seconds, splits = blocks.fastest(number, model.clocks(t))
            if (seconds, place, i) < fastest:
                fastest, best = (seconds, place, i), Found(seconds, splits, t)
    return best


def _covered(p: Problem) -> Callable[[Chunk, int], tuple[int, int]]:
    """Of a chunk and a halo so many chunks, and the positions of all of them."""

    @cache  # of tens of blocks for each
    def found(chunk: Chunk, halo: int) -> tuple[int, int]:
        number = math.prod(counts(p, chunk, halo))
        return number, number * math.prod(chunk)

    return found


# --- chunks ----------------------------------------------------------------------------------------------------------


def _chunks(p: Problem, base: AnyTiling, general: bool) -> tuple[Boxed, ...]:
    """The chunks of a block with its taps."""
    if isinstance(base, SyncTiling):
        return _tiles(p.rank, 64)
    found = _tiles(p.rank, 32)
    if base.channels_last and not (general or base.stacked):
        boxes = ((positions, gapless_box(p, positions)) for positions in _GAPLESS)
        found += tuple(((1, 1, 1, positions), box) for positions, box in boxes if box is not None)
    return found


@cache
def _tiles(rank: int, least: int) -> tuple[Boxed, ...]:
    """Those of whole strips; ``least``: positions of one in 1-D."""
    if rank == 1:
        shapes = [(n, 1, 1, w) for n in (1, 2, 4) for w in (8, 16, 32, 64, 128, 256) if least <= n * w <= 512]
    else:
        sides = product((1, 2, 4), (1, 2, 4, 8), (8, 16, 32, 64))
        shapes = [(n, 1, h, w) for n, h, w in sides if 32 <= n * h * w <= 256]
    if rank == 3:
        shapes += [(1, d, h, w) for d in (2, 4) for h in (2, 4, 8) for w in (8, 16, 32) if 32 <= d * h * w <= 256]
    return tuple((tile, None) for tile in shapes)


def gapless_box(p: Problem, positions: int) -> Chunk | None:
    """The box of so many positions of which fewest are needed; None where one of no shape has as many."""
    *_, d, h, w = fullest(p.batch, p.size, p.stride, positions)[1]
    images, rest = divmod(positions, d * h * w)
    return None if rest else (images, d, h, w)


def _tiling(p: Problem, gpu: Gpu, base: AnyTiling, chunk: Boxed, general: bool) -> AnyTiling | None:
    """The tiling of a chunk; None where it does not fit, is none of the kernel's, or never of use."""
    tile, box = chunk
    if isinstance(base, SyncTiling):
        one = varied(base, tile=tile)
        fits = one.shared_bytes <= gpu.shared_bytes and one.k_steps >= one.k_slices
        return one if fits and (one.element == 4 or one.strips % 2 == 0) else None
    rows, width = tile[2:]
    # Rows of 128 bytes rather than of 32: the tensor copy engine takes as long for either.
    lines = not general and width == narrow(p) and rows > 1 and width * base.element < 128
    t = varied(base, tile=tile, box=box, lines=lines)
    if t.segment < 32 or (t.element == 2 and t.strips % 2) or (t.stacked and not t.stackable):
        return None
    if t.classed and not t.classes_fit:
        t = varied(t, classes=(1, 1))
    if not t.box_g and (t.channels_last or t.aligned_g or t.classed):
        return None
    # As many stages as fit
    most = 8 if t.channels_last else 4
    stages = min(most, (gpu.shared_bytes - t.raw_bytes - 16) // (t.stage_bytes + 16))
    fits = stages >= 2 and t.sums_bytes + 16 * (stages + 1) <= gpu.shared_bytes
    return varied(t, stages=stages) if fits else None


def narrow(p: Problem) -> int:
    """The width of images whose rows a chunk takes whole, or 0; few, since each is a kernel."""
    width = p.size[-1]
    return width if p.rank > 1 and p.layout == "nchw" and width in (8, 16, 32) else 0


def classes_of(p: Problem) -> tuple[int, int]:
    """`WarpgroupTiling.classes` of an NCHW output; (1, 1) where rows are aligned, or classes too many."""
    found = None
    if p.layout == "nchw":
        found = alignment_classes(p.batch, p.out_channels, p.out_size, p.dtype.itemsize)
    return found if found is not None and math.prod(found) <= MAX_CLASSES else (1, 1)


# --- blocks and taps: tilings whose chunks are yet to be chosen ------------------------------------------------------
# They are of the layer at one size for all, so that kernels are found again at the next size.


def _sync_bases(p: Problem, general: bool) -> Iterator[SyncTiling]:
    aligned = not general and _aligned(p, p.size)
    layer = settled(SyncTiling(any_size(p), (16, 8), (1, 1, 1), (1, 1, 1, 8), aligned), "problem")
    for block, taps in product(_blocks(*layer.channels), _tap_sets(p)):
        warp = _warps(p, block, math.prod(taps))
        if warp is not None:
            yield varied(layer, block=block, taps=taps, warp=warp)


def _aligned(p: Problem, size: tuple[int, ...]) -> bool:
    """Whether rows of an NCHW tensor begin at 16 bytes."""
    return p.layout == "nchw" and size[-1] * p.dtype.itemsize % 16 == 0


def _by_boxes(p: Problem, gpu: Gpu) -> bool:
    """Whether the tensor copy engine can bring the input's pixels, and in channels_last the gradient's too.

    It wants pitches of whole 16 bytes, and so must a box begin where its rows are swizzled: a group's that begins off
    16 bytes is an illegal instruction.
    """
    if gpu.arch != "90a" or p.precision == "ieee":
        return False
    if p.layout == "nchw":
        return _aligned(p, p.size)
    return all(channels // p.groups % (16 // p.dtype.itemsize) == 0 for channels in (p.in_channels, p.out_channels))


def _warpgroup_bases(p: Problem, gpu: Gpu, general: bool) -> Iterator[WarpgroupTiling]:
    if not _by_boxes(p, gpu):
        return
    classes = (1, 1) if general else classes_of(p)
    first = WarpgroupTiling(any_size(p), (64, 64), (1, 1, 1), (1, 1, 1, 8), True, classes=classes)
    layer = settled(varied(first, aligned_g=_aligned(p, p.out_size)), "problem")
    cin, cout = layer.channels
    # Where a position meets many outputs, few output channels by many input channels read the least.
    steep = math.prod(p.stride) >= 8
    widths = _widths(cin, steep or layer.aligned_g, rows_of_32=layer.channels_last and layer.element == 2)
    sets = [(taps, False) for taps in _tap_sets(p)] + [(taps, True) for taps in _column_sets(p)]
    shared_rows = [(subs, False) for subs in (1, 2, 4)] + [(subs, True) for subs in (2, 4) if layer.aligned_g]
    for ci, (groups, split_m), (subs, interleaved), (taps, stacked) in product(
        widths, ((2, 1), (2, 2), (3, 1)), shared_rows, sets
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
        if base.entries * ci // 2 > (160 if groups == 2 else 104):  # registers of a thread
            continue
        # Pixels of float32 that are turned take longer in such widths, which the model does not know.
        if base.turned and ci >= 96 and ci % 64:
            continue
        if base.entries * subs * (groups // split_m) <= 1.5 * base.set_taps:
            yield base


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
    """Blocks of `SyncTiling`."""
    for m, n in product((16, 32, 64, 128), (8, 16, 32, 64, 128)):
        if (m < 2 * cin or m == 16) and (n < 2 * cout or n == 8) and 4 * m * n >= min(cin, 64) * min(cout, 64):
            yield m, n


def _tap_sets(p: Problem) -> tuple[Triple, ...]:
    """Boxes of neighbouring taps."""
    d, h, w = triple(p.kernel)
    wide = [v for v in parts(w) if v <= 9]
    found = [(1, 1, v) for v in wide]
    if max(wide) == w:
        found += [(1, v, w) for v in parts(h)[1:]]
        found += [(v, h, w) for v in parts(d)[1:]]
    if 1 not in wide or w == 2:
        found += [(1, v, 1) for v in parts(h)]
    return tuple(dict.fromkeys(found))


def _column_sets(p: Problem) -> tuple[Triple, ...]:
    """Boxes of columns of taps, whose rows of x an instruction may take together."""
    d, h, w = triple(p.kernel)
    heights = [v for v in parts(h) if v > p.stride[-2]] if p.rank > 1 and p.dilation[-2] == 1 else []
    found = [(1, v, u) for v in heights for u in parts(w)]
    found += [(v, h, u) for v in parts(d)[1:] for u in (1, w) if h in heights]
    return tuple(dict.fromkeys(found))


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
