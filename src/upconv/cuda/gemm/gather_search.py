"""The gather-GEMM's tilings: those of a layer that fit, and what each of them costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from upconv.cuda.axes import Unfit, any_size, gather_axes, positions, result_shape, source_shape
from upconv.cuda.compile.boxes import alignment_classes
from upconv.cuda.cost import Cost
from upconv.cuda.gemm.gather_cost import estimate, fragment_clocks, least
from upconv.cuda.gemm.shuffle import Shuffle, countable, shuffled
from upconv.cuda.gemm.tiling import MOST_ACCUMULATORS, Tiling
from upconv.cuda.gpu import CLUSTERS, FRAGMENT, MAX_BOX, Gpu
from upconv.derived import derived, settled, varied
from upconv.problem import Problem, Triple, triple

_MAX_TAPS = 4096  # of all phases; the tables are in constant memory
_AHEAD = 4500.0  # clocks that the rings should look ahead
_WHOLE = (4, 8, 16, 32)  # sizes of images that are copied whole; few, since each is a kernel
NARROW = (1, 2, 3, 4, 6, 8, 16)  # sizes of images that may lie side by side, few again
_TAPS = "problem", "unroll", "subs", "w_subs", "classes"
_ROW, _STRIP = (1, 64), (8, 8)


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


@dataclass(frozen=True)
class Kind:
    """Which tilings of a layer a search is for."""

    wgmma: bool
    classes: tuple[int, int] | None = (1, 1)
    """Of an NCHW source's rows (`Tiling.classes`)."""
    size: tuple[int, ...] | None = None
    """Of the input, of which tiles hold whole images; None: tiles serve every size."""
    shuffle: Shuffle | None = None
    """Those of the layer without its stride; as `shuffle.shuffled` has it."""
    drained: bool = False
    """Those whose outputs the tensor copy engine stores."""
    beside: bool = False
    """With a ``size``, those of such images side by side."""

    def accumulators(self, p: Problem) -> int:
        """Most blocks of 64 x 64 sums that a consumer holds: half as many without wgmma, which setmaxnreg is for."""
        return MOST_ACCUMULATORS // (1 if self.wgmma else 2) // (2 if p.precision == "ieee" else 1)


def candidates(p: Problem, gpu: Gpu, **kind: Any) -> tuple[Tiling, ...]:
    """Every tiling worth a look. ``kind``: fields of `Kind`, by default for the GPU and rows as ``p``'s are."""
    of = Kind(**{"wgmma": gpu.arch == "90a", "classes": classes_of(p), **kind})
    return tuple(t for group in _groups(p, gpu, of) for t in group.tilings)


@dataclass(frozen=True, eq=False)
class Group:
    """Tilings that multiply the same pixels by the same weights, and store them alike."""

    kind: Kind
    gpu: Gpu
    widest: Tiling
    """Of the longest chunk, which may not fit."""

    @derived
    def tilings(self) -> tuple[Tiling, ...]:
        """Those that fit, of chunks."""
        t = self.widest
        found = (_fitting(varied(t, chunk=chunk), self.gpu) for chunk in chunk_sizes(t.problem))
        return tuple(one for one in found if one is not None)


@lru_cache(maxsize=256)
def _groups(layer: Problem, gpu: Gpu, kind: Kind) -> tuple[Group, ...]:
    """All tilings of a kind, for all sizes that it serves."""
    whole: Triple | None = None
    result: Triple = (0, 0, 0)
    if kind.size is not None:
        sized = layer.with_(size=kind.size)
        whole = (narrow_source if kind.beside else whole_source)(sized)
        if whole is None or not kind.wgmma:
            return ()
        result = positions(sized, kind.shuffle)
    p = layer if kind.shuffle is None else kind.shuffle.unstrided
    return tuple(Group(kind, gpu, t) for taps in _divisions(p, kind, whole) for t in _of_taps(taps, kind, result))


def _divisions(p: Problem, kind: Kind, whole: Triple | None) -> Iterator[Tiling]:
    """A tiling for each way to share blocks among sub-positions."""
    first = Tiling(
        p, _ROW, (1, 1, 1, 64), 0, chunk_sizes(p)[-1], wgmma=kind.wgmma, whole=whole, shuffle=kind.shuffle,
        drained=kind.drained, classes=kind.classes,
    )  # fmt: skip
    layer, cout_g = settled(first, "problem"), result_shape(p)[1] // p.groups
    stride = p.stride[-1] if p.pass_ == "fwd" else 1
    for (subs, unroll), w_subs in product(_subs(p, cout_g), _w_subs(stride)):
        if kind.drained and subs > 1:
            continue  # before tilings are made of them, which `checked` would refuse
        of_width = gather_axes(p, unroll)[2]
        if (len(of_width.taps) if w_subs == of_width.out_step else w_subs) > kind.accumulators(p):
            continue
        try:
            taps = settled(varied(layer, subs=subs, unroll=unroll, w_subs=w_subs), *_TAPS)
        except Unfit:
            continue
        if not kind.beside:
            yield taps
        elif unroll == (1, 1, 1) and taps.contiguous and not taps.multiplied.bare and taps.image_columns <= 32:
            yield varied(taps, beside=64 // taps.image_columns // 2 * 2)


def _of_taps(taps: Tiling, kind: Kind, result: Triple) -> Iterator[Tiling]:
    """A tiling for each shape and split."""
    p = taps.problem
    wide = taps.cout_g > taps.rows_per_sub and taps.wgmma  # enough for two consumers
    far = p.pass_ != "fwd" and max(p.stride) > 1  # taps step over the source
    for sub, tile in _rows_of_images(p) if kind.beside else _shapes(p):
        if min(taps.unroll[1], 2) > 1 and sub == _STRIP and tile[2] > 8:
            continue  # the rows of an unrolled tile are many already
        if not kind.beside and any(n > step * t for n, step, t in zip(result, taps.out_steps, tile[1:])):
            continue  # an image is not whole
        shaped = settled(varied(taps, sub=sub, tile=tile), *_TAPS, "tile")
        # Before Hopper in turn only where the halo of a strided source leaves room for no more than 64 pixels.
        in_turn = not kind.drained and (taps.wgmma or (far and math.prod(tile) == 64))
        splits = (0, *((1,) if wide else ()), *((2,) if in_turn else ()))
        for split in splits:
            found = varied(shaped, split=split)
            if 1 <= taps.mb * found.nb <= kind.accumulators(p) and (found.out_span or not kind.drained):
                yield found


def _fitting(base: Tiling, gpu: Gpu) -> Tiling | None:
    """A tiling that fits, with weights that stay in shared memory wherever all have room."""
    stays = len(base.multiplied.distinct) == 1 or base.m_groups == 1
    room = not base.wgmma or base.fragments(base.multiplied.most) * base.wgs_m * FRAGMENT < gpu.shared_bytes
    t = _fitted(varied(base, resident=True), gpu) if stays and room else None
    return t or _fitted(base, gpu)


def chunk_sizes(p: Problem) -> list[int]:
    """Channels that a chunk may have: 32, 64 or 128 bytes of a pixel, no more than half of them beyond the last."""
    least, channels = 32 // p.dtype.itemsize, source_shape(p)[1] // p.groups
    return [c for c in (least, 2 * least, 4 * least) if c == least or c < 2 * channels]


def _subs(p: Problem, cout_g: int) -> Iterator[tuple[int, Triple]]:
    """(d, h) sub-positions that share a block of 64 rows, and how rows are unrolled for them."""
    yield 1, (1, 1, 1)
    axes = gather_axes(p)[:2]
    tapped = math.prod(len(axis.taps) for axis in axes)
    for subs in (2, 4):
        if cout_g <= 64 // subs and p.rank > 1:
            yield subs, (1, 1 if tapped % subs == 0 else subs, 1)


def _w_subs(stride: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(n for n in (stride, 4, 2, 1) if stride % n == 0 and n <= stride)) if stride > 1 else (1,)


def _shapes(p: Problem) -> tuple[tuple[tuple[int, int], tuple[int, int, int, int]], ...]:
    """Shapes of subtiles and tiles."""
    if p.rank == 1:
        tiles = (1, 1, 1, 64), (1, 1, 1, 128), (4, 1, 1, 64), (2, 1, 1, 128)
        return tuple((_ROW, tile) for tile in tiles)
    rows = [(1, 1, h, 64) for h in (1, 2, 4, 8)] + [(1, 1, h, 128) for h in (1, 2)]
    strips = [(1, 1, 8, w) for w in (8, 16, 24, 32)] + [(1, 1, 16, 16)]
    strips += [(n, 1, 8, 8) for n in (2, 4)]
    if p.rank == 3:
        strips += [(1, d, 8, w) for d, w in ((2, 8), (2, 16), (4, 8), (4, 16))]
    return tuple([(_ROW, tile) for tile in rows] + [(_STRIP, tile) for tile in strips])


def _rows_of_images(p: Problem) -> tuple[tuple[tuple[int, int], tuple[int, int, int, int]], ...]:
    """Tiles of 64 columns of images side by side, and some of their rows."""
    rows = [(1, h) for h in (1, 2, 4, 8)]
    if p.rank == 3:
        rows += [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
    return tuple((_ROW, (1, d, h, 64)) for d, h in rows)


def _fitted(t: Tiling, gpu: Gpu) -> Tiling | None:
    """The tiling with stages that look ahead far enough, as shared memory allows; None when it does not fit at all.

    A load takes about a thousand clocks from its request to its use (docs/experiments.md), so stages go where the least
    time lies ahead.
    """
    fragment_time = fragment_clocks(t)
    chunk_time = t.multiplied.most * t.k_steps * t.parts * fragment_time
    most = t.longest_stretch if t.resident else 8 if t.wgs_m == 1 else 4
    w_stage = -(-t.longest_stretch // -(-t.longest_stretch // most))  # a stretch ends with its last stage
    if t.parts == 2:
        w_stage = -(-w_stage // 2) * 2  # both parts of a step's weights
    elif t.channels_last and t.shuffle is None:
        w_stage = -(-w_stage // t.k_steps) * t.k_steps  # of whole taps, which boxes bring

    def stages(pixels: int) -> tuple[int, int]:
        return (pixels, 2) if t.channels_last else (2, pixels)

    pixels = weights = 2
    stages_p, stages_s = stages(pixels)
    t = varied(t, stages_p=stages_p, stages_s=stages_s, stages_w=weights, w_stage=w_stage)
    if t.shared_bytes > gpu.shared_bytes:
        return None
    try:
        t.checked(gpu.shared_bytes)
    except Unfit:
        return None
    best = pixels, weights
    while True:
        ahead = pixels * chunk_time, weights * w_stage * fragment_time
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


def whole_source(p: Problem) -> Triple | None:
    """The source's size (D, H, W) where tiles may hold whole images; the leading axes of 1-D and 2-D problems are 1."""
    found = _small_source(p, _WHOLE, max(_WHOLE) ** 2)
    # The tensor copy engine's pitch of channels.
    return None if found is None or math.prod(found) * p.dtype.itemsize % 16 else found


def narrow_source(p: Problem) -> Triple | None:
    """The source's size (D, H, W) where a forward's images may lie side by side in a tile."""
    if p.pass_ != "fwd" or (p.rank > 1 and p.size[-1] >= _STRIP[1]):
        return None
    return _small_source(p, NARROW, MAX_BOX)


def _small_source(p: Problem, sizes: tuple[int, ...], most: int) -> Triple | None:
    """The size of an NCHW source of such sizes and so many pixels at most, whose channels boxes bring."""
    size = source_shape(p)[2:]
    pixels = math.prod(size)
    if p.layout == "channels_last" or any(n not in sizes for n in size) or pixels > most:
        return None
    return triple(size)


def considered(p: Problem, gpu: Gpu, general: bool = False, best: bool = False) -> list[tuple[Cost, Tiling]]:
    """Every tiling with its estimate. ``general``: those for every size of the input.

    ``best``: only as many as have the fastest among them. Groups are gone through by the least that they may take, of
    few tiles a share of it, since clusters may have their chunks together.
    """
    groups = [group for kind in _kinds(p, gpu, general) for group in _groups(any_size(p), gpu, kind)]
    leasts = [least(group.widest, p, gpu) for group in groups]
    found: dict[int, list[tuple[Cost, Tiling]]] = {}
    fastest = math.inf
    for i in sorted(range(len(groups)), key=leasts.__getitem__):
        if best and leasts[i] > fastest * (1 if general else _most_shares(groups[i].widest, p, gpu)):
            continue
        found[i] = [(estimate(t, p, gpu), t) for t in groups[i].tilings]
        fastest = min([fastest, *(cost.seconds for cost, _ in found[i])])
    every = [one for i in sorted(found) for one in found[i]]
    return every if general else [*every, *_clustered(every, p, gpu)]


def _most_shares(t: Tiling, p: Problem, gpu: Gpu) -> int:
    """Blocks of the largest cluster that may share a tile's chunks, of whatever channels."""
    tiles, chunks = _tiles_of(t, p), -(-t.cin_g // chunk_sizes(t.problem)[0])
    return max((c for c in CLUSTERS if 2 * c <= chunks and tiles <= gpu.clusters(c)), default=1)


def _tiles_of(t: Tiling, p: Problem) -> int:
    return math.prod(t.counts(p)) * t.m_groups


def _kinds(p: Problem, gpu: Gpu, general: bool) -> list[Kind]:
    """What to search for a problem."""
    fast = gpu.arch == "90a"
    classes = classes_of(p, general) if p.layout == "nchw" else (1, 1)
    shuffle = shuffled(any_size(p)) if countable(p) else None
    kinds = [Kind(fast, classes), *([Kind(fast, classes, shuffle=shuffle)] if shuffle else [])]
    if not general and not shuffle and fast and drains(p):
        kinds.append(Kind(fast, classes, drained=True))
    if not general and whole_source(p) is not None:
        kinds += [replace(kind, classes=(1, 1), size=p.size) for kind in kinds]
    if not general and narrow_source(p) is not None:
        kinds.append(Kind(fast, size=p.size, beside=True))
    return kinds


def _clustered(every: list[tuple[Cost, Tiling]], p: Problem, gpu: Gpu) -> Iterator[tuple[Cost, Tiling]]:
    """Of tilings whose tiles leave multiprocessors idle those that promise most where clusters share the chunks.

    All clusters must run at once: a block has one tile, so a second would begin where the first ends. Nor are those
    looked at whose loads are far too cheap by estimate: halves of rows of several classes (docs/experiments.md).
    """
    promising: list[tuple[float, int, int, Tiling]] = []
    fastest = min((cost.seconds for cost, _ in every), default=math.inf)
    for cost, t in every:
        tiles = _tiles_of(t, p)
        if t.split == 2 or (t.classed and t.element == 2) or not t.tensor_map or t.shuffle or t.drained:
            continue
        for cluster in CLUSTERS:
            if 2 * cluster <= t.chunks and tiles <= gpu.clusters(cluster):
                rough = cost.launch + (cost.seconds - cost.launch) / cluster
                promising.append((rough, len(promising), cluster, t))
    for rough, _, cluster, t in sorted(promising):
        if rough > fastest:
            break
        shared = _fitted(varied(t, cluster=cluster, resident=False), gpu)
        if shared is not None:
            yield (found := estimate(shared, p, gpu)), shared
            fastest = min(fastest, found.seconds)
