"""How a transposed convolution is cut into the gather-GEMM's tiles: pure arithmetic, shared by kernel and interpreter.

Everything has three spatial axes (D, H, W); 1-D and 2-D problems have leading axes of size 1. On an axis, outputs are
``o = out_step * q + u`` with a sub-position ``u < out_step``, and tap ``k`` of sub-position ``u`` reads the input at
``in_step * q + offset``. The sub-positions of a stride are its phases; `unroll` makes more of them from consecutive
``q``, so that a layer of few output channels fills the 64 rows of a matrix instruction (with ``U`` rows unrolled and
``K`` taps, ``K / (K + U - 1)`` of the multiplications are useful instead of a fraction ``1 / U`` of the rows).

The forward has ``out_step = stride``, ``in_step = 1`` and a sub-position for every phase. The gradient for the input
exchanges the steps: ``grad_input[i]`` sums ``grad[i * stride + k * dilation - padding]`` over all taps, so its one
sub-position has them all and ``in_step = stride``. What is read is called source, what is written result; "input" and
"output" channels, rows and pixels of a tiling and its kernel are the source's and the result's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, product

from upconv.cuda.shuffle import Shuffle, Triple
from upconv.problem import Problem

PACK_THREADS = 256  # of a block that packs weights
_PACK_BLOCKS = 512  # wanted
_MOST_PACK_TAPS, _LEAST_PACK_TAPS = 64, 4  # of a block: shared memory is 33 KB; less would read parts of sectors
FRAGMENT = 2048  # bytes of weights that a warpgroup takes at a step: 64 rows x 32 bytes of K
_MOST_ACCUMULATORS = 5  # 64 x 64 each, 32 registers of a consumer's thread
MAX_PIXELS = 12 * 192  # a producer thread keeps track of 12
_STEPS_UNROLLED = 25  # code and compile time grow with it
_STEPS_STRAIGHT = 32, 64  # of a variant, of all, also where they share a stretch
_STEPS_CONTINUED = 12  # of a chunk, from which on the pipeline of matrix instructions does not drain behind it
_STEPS_PROMOTED = 8  # after which IEEE sums leave the tensor cores; half of them carry two products, the others one
MAX_BOX = 256  # elements that the tensor copy engine traverses along a dimension
MAX_BOX_STEP = 8  # and its largest step
_MAX_ROW_BOXES = 8
_MAX_PLANES = 32
_MAX_CLASSES = 8  # of rows and channels; each has a tensor map of 128 bytes among the kernel's arguments
_WHOLE = (4, 8, 16, 32)  # sizes of images that are copied whole; few, since each is a kernel
_MAX_WHOLE = 1024  # pixels
_NARROW = (1, 2, 3, 4, 6, 8, 16)  # sizes of images that may lie side by side, few again
_GROUP = 8  # columns, which images of two dimensions and more fill in tiles of their own
_MOST_CONSTANTS = 65536  # bytes that a kernel has
_FEW_TAPS = 500  # and phases, whose tables are never too large
_MAX_OFFSET = 2000  # rows' offsets are packed in 12 bits, signed
MAX_CLUSTER = 8  # blocks, on every GPU that has clusters


class Unfit(ValueError):
    """A tiling that the kernel cannot run; the message says why, in a sentence."""


@dataclass(frozen=True)
class Axis:
    """One axis in gather form."""

    out_step: int
    in_step: int
    taps: tuple[tuple[tuple[int, int], ...], ...]
    """For every sub-position its (kernel index, offset) pairs; may be empty."""


def source_shape(p: Problem) -> tuple[int, ...]:
    """Shape of the tensor that a pass gathers from: the input, or of the gradient for it the output's gradient."""
    return p.input_shape if p.pass_ == "fwd" else p.output_shape


def result_shape(p: Problem) -> tuple[int, ...]:
    """Shape of the tensor that a pass writes: the output, or the gradient for the input."""
    return p.output_shape if p.pass_ == "fwd" else p.input_shape


def positions(p: Problem, shuffle: Shuffle | None) -> Triple:
    """Results along D, H, W of a problem; with `shuffle` those of the layer without a stride, at the problem's size."""
    lead = (1,) * (3 - p.rank)
    d, h, w = lead + result_shape(p)[2:]
    return (d, h, w) if shuffle is None else shuffle.positions((d, h, w))


def whole_source(p: Problem) -> Triple | None:
    """The source's size (D, H, W) where tiles may hold whole images; the leading axes of 1-D and 2-D problems are 1."""
    return _small_source(p, _WHOLE, _MAX_WHOLE)


def narrow_source(p: Problem) -> Triple | None:
    """The source's size (D, H, W) where a forward's images may lie side by side in a tile."""
    if p.pass_ != "fwd" or (p.rank > 1 and p.size[-1] >= _GROUP):
        return None
    return _small_source(p, _NARROW, MAX_BOX)


def _small_source(p: Problem, sizes: tuple[int, ...], most: int) -> Triple | None:
    """The size of an NCHW source of such sizes and so many pixels at most, whose channels boxes bring."""
    size = source_shape(p)[2:]
    pixels = math.prod(size)
    if p.layout == "channels_last" or any(n not in sizes for n in size) or pixels > most:
        return None
    if pixels * p.dtype.itemsize % 16:  # the tensor copy engine's pitch of channels
        return None
    d, h, w = (1,) * (3 - p.rank) + size
    return d, h, w


def any_size(p: Problem) -> Problem:
    """The layer at one size for all, so that its tilings and kernels are found again at the next size."""
    size = tuple(1024 + 2 * pad // s for pad, s in zip(p.padding, p.stride))
    return p.with_(batch=1, size=size, bias=False)


@lru_cache(maxsize=1024)
def gather_axes(p: Problem, unroll: Triple = (1, 1, 1)) -> tuple[Axis, Axis, Axis]:
    """The axes (D, H, W) of a problem's pass, with `unroll` consecutive ``q`` of each axis made sub-positions."""
    lead = 3 - p.rank
    axes = [Axis(1, 1, (((0, 0),),))] * lead
    if p.pass_ == "fwd":
        for phases, stride in zip(p.axis_phases, p.stride):
            by_start = sorted(phases, key=lambda phase: phase.start)
            taps = tuple(tuple((k, a.first - off) for k, off in zip(a.taps, a.offsets)) for a in by_start)
            axes.append(Axis(stride, 1, taps))
    else:
        for kernel, stride, padding, dilation in zip(p.kernel, p.stride, p.padding, p.dilation):
            axes.append(Axis(1, stride, (tuple((k, k * dilation - padding) for k in range(kernel)),)))
    full = []
    for axis, times in zip(axes, unroll):
        subs = tuple(tuple((k, off + axis.in_step * t) for k, off in sub) for t in range(times) for sub in axis.taps)
        full.append(Axis(axis.out_step * times, axis.in_step * times, subs))
    return full[0], full[1], full[2]


@dataclass(frozen=True)
class Bare:
    """Sub-positions without taps, whose outputs are the bias alone."""

    d: int
    h: int
    """The first of `rows`, which are neighbours."""
    w: int
    """The first of as many as a tile has; -1: all."""
    rows: int
    """Along H; 0: all."""


Entries = tuple[tuple[tuple[tuple[Triple, tuple[int, ...]], ...], ...], ...]


@dataclass(frozen=True, eq=False)
class _Multiplied:
    """What a layer's M-groups multiply; hundreds of tilings share each of a dozen."""

    variants: tuple[tuple[tuple[tuple[int, int], ...], int], ...]
    bare: tuple[tuple[Bare, ...], ...]
    """Per variant the sub-positions without taps that its tiles store; empty where no variant has any."""
    blocks_of_w: tuple[int, ...]
    entries: Entries
    """In the order of their offsets."""
    counts: tuple[int, ...]
    """Entries of all blocks of each variant."""
    most: int
    """Of them."""
    total: int
    distinct: frozenset[int]
    lengths: frozenset[int]
    """Entries that a block may have, but none."""
    offsets: tuple[tuple[int, ...], ...]
    """Of each axis the offsets of all taps, in order."""


@lru_cache(maxsize=1024)
def _multiplied(p: Problem, unroll: Triple, subs: int, w_subs: int) -> _Multiplied:
    """NOTES: kept, planning a layer of 16 x 16 phases (768 -> 3 k16 s16) takes 0.7 s instead of 30 (on a slow core)."""
    axis_d, axis_h, axis_w = gather_axes(p, unroll)
    if axis_w.out_step % w_subs:
        raise Unfit("W sub-positions do not fill the tiles")
    kernel = (1,) * (3 - p.rank) + p.kernel

    def tapped(pair: tuple[int, int]) -> bool:
        return bool(axis_d.taps[pair[0]] and axis_h.taps[pair[1]])

    # Those without taps last, so that they share blocks with each other and nothing is multiplied for them.
    pairs = sorted(product(range(axis_d.out_step), range(axis_h.out_step)), key=lambda pair: not tapped(pair))
    sets = [tuple(pairs[i : i + subs]) for i in range(0, len(pairs), subs)]
    variants = tuple((s, u) for s in sets for u in range(0, axis_w.out_step, w_subs))
    bare: tuple[tuple[Bare, ...], ...] = ()
    if w_subs == axis_w.out_step or p.layout == "channels_last":
        kept = {v for v in variants if any(map(tapped, v[0])) and any(axis_w.taps[v[1] : v[1] + w_subs])}
        places = ((*pair, first_w) for s, first_w in variants if (s, first_w) not in kept for pair in s)
        runs = _bare(places, axis_h.out_step, axis_w.out_step // w_subs)
        variants = tuple(v for v in variants if v in kept)
        bare = _shared_out(runs, variants, axis_h.out_step, w_subs)
    if any(len(s) != subs for s, _ in variants):
        raise Unfit("sub-positions do not fill the blocks")
    blocks_of_w = tuple(range(w_subs))
    if w_subs == axis_w.out_step:
        full = [bool(taps) for taps in axis_w.taps]
        blocks_of_w = tuple(sum(full[:u]) if full[u] else -1 for u in range(len(full)))
    entries = []
    for s, first_u in variants:
        blocks = []
        for u, block in enumerate(blocks_of_w):
            if block < 0:
                continue
            found: dict[Triple, list[int]] = {}
            for i, (ud, uh) in enumerate(s):
                for (kd, od), (kh, oh), (kw, ow) in product(axis_d.taps[ud], axis_h.taps[uh], axis_w.taps[first_u + u]):
                    taps = found.setdefault((od, oh, ow), [-1] * subs)
                    taps[i] = (kd * kernel[1] + kh) * kernel[2] + kw
            blocks.append(tuple((offsets, tuple(taps)) for offsets, taps in sorted(found.items())))
        entries.append(tuple(blocks))
    counts = tuple(sum(len(b) for b in blocks) for blocks in entries)
    lengths = frozenset(len(b) for blocks in entries for b in blocks if b)
    every = {entry[0] for blocks in entries for block in blocks for entry in block}
    offsets = tuple(tuple(sorted({off[axis] for off in every})) or (0,) for axis in range(3))
    return _Multiplied(
        variants,
        bare,
        blocks_of_w,
        tuple(entries),
        counts,
        max(counts),
        sum(counts),
        frozenset(counts),
        lengths,
        offsets,
    )


def _bare(places: Iterable[Triple], heights: int, widths: int) -> tuple[Bare, ...]:
    """Sub-positions (d, h, w) of ``heights`` along H and ``widths`` along W, as few as whole planes and rows allow."""
    planes: dict[int, dict[int, list[int]]] = {}
    for d, h, w in sorted(places):
        planes.setdefault(d, {}).setdefault(h, []).append(w)
    found = []
    for d, rows in planes.items():
        whole = {h for h, ws in rows.items() if len(ws) == widths}
        if len(whole) == heights:
            found.append(Bare(d, 0, -1, 0))
            continue
        firsts = sorted(h for h in whole if h - 1 not in whole)
        found += [Bare(d, h, -1, next(n for n in range(1, heights + 1) if h + n not in whole)) for h in firsts]
        found += [Bare(d, h, w, 1) for h, ws in rows.items() if h not in whole for w in ws]
    return tuple(found)


def _shared_out(
    runs: Sequence[Bare], variants: Sequence[tuple[tuple[tuple[int, int], ...], int]], heights: int, w_subs: int
) -> tuple[tuple[Bare, ...], ...]:
    """Runs by variant: rows go to the one whose row follows them in memory, so that what both have of a sector comes
    together, and what none follows to the one with the fewest. Empty without runs."""
    found: list[list[Bare]] = [[] for _ in variants]
    owners = {(*pair, w): i for i, (pairs, w) in enumerate(variants) for pair in pairs}
    left = []
    for run in runs:
        behind = (run.d, run.h, run.w + w_subs) if run.w >= 0 else (run.d, run.h + run.rows, 0)
        owner = owners.get(behind) if run.rows else None
        if owner is None:
            left.append(run)
        else:
            found[owner].append(run)
    loads = [(sum(run.rows for run in mine), i) for i, mine in enumerate(found)]
    heapify(loads)
    for run in left:
        load, i = loads[0]
        found[i].append(run)
        heapreplace(loads, (load + (run.rows or heights), i))
    return tuple(map(tuple, found)) if runs else ()


@dataclass(frozen=True)
class Tiling:
    """A tile's shape and the kernel's constants for one problem; everything but the sizes of input and batch.

    Raises, on `checked`:
        Unfit: the kernel cannot run this tiling.
    """

    problem: Problem
    sub: tuple[int, int]
    """Shape (H, W) of the 64 q that one matrix instruction takes: (1, 64) or (8, 8)."""
    tile: tuple[int, int, int, int]
    """q of a tile: images, D, H, W."""
    split: int
    """0: consumers halve the pixels; 1: they halve 128 rows of M; 2: ping-pong, whole tiles in turn."""
    chunk: int
    """Input channels of a chunk."""
    subs: int = 1
    """(D, H) sub-positions that share a block of 64 rows: 1, 2 or 4."""
    w_subs: int = 0
    """W sub-positions of a tile, neighbours in a thread; 0 means all of them."""
    unroll: Triple = (1, 1, 1)
    stages_p: int = 2
    """Pixel tiles in shared memory."""
    stages_s: int = 3
    """Staging slots (NCHW)."""
    stages_w: int = 3
    """Stages of the weights' ring, where they are not `resident`."""
    w_stage: int = 8
    """Fragments of a stage of the weights' ring."""
    resident: bool = False
    """All weights of an M-group stay in shared memory."""
    run_groups: int = 8
    """Groups of 8 columns that the epilogue passes through shared memory together, for sub (1, 64)."""
    classes: tuple[int, int] | None = (1, 1)
    """NCHW: classes of rows along H, and of channels, by where they begin in units of 16 bytes. The tensor copy engine,
    whose strides are whole units, has a map for each; None: too many, threads copy."""
    wgmma: bool = True
    """Multiply with wgmma (sm_90a), else with mma.sync (sm_80 and up)."""
    whole: Triple | None = None
    """NCHW: size (D, H, W) of small sources, of which a tile holds whole images: copied as lines, without a halo."""
    paired: bool = False
    """Sub (8, 8): subtiles lie in pairs, one below the other, so that one matrix instruction takes both (`wide`)."""
    planewise: bool = False
    """Channels-last, where taps step over rows and columns: every residue of these is a box and a plane of its own,
    waited for and given back by itself, so that a chunk's first plane is loaded anew while its last is multiplied."""
    shuffle: Shuffle | None = None
    """A strided layer's channels and phases as rows of M; ``problem`` is then the layer without its stride."""
    drained: bool = False
    """NCHW, 16 bits: a tile's outputs stay in shared memory while the tensor copy engine stores them."""
    cluster: int = 1
    """Blocks of a cluster that share a tile's chunks and add up their sums."""
    beside: int = 0
    """NCHW: images of `whole` side by side along a tile's width, with columns of zeros between them; 0: none."""

    # --- types -------------------------------------------------------------------------------------------------------

    @cached_property
    def element(self) -> int:
        """Bytes of an element."""
        return self.problem.dtype.itemsize

    @property
    def parts(self) -> int:
        """TF32 parts of an operand: 2 for IEEE float32 (three products), else 1."""
        return 2 if self.problem.precision == "ieee" else 1

    @property
    def vec(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.element

    @property
    def row_bytes(self) -> int:
        return self.chunk * self.element

    @property
    def k_steps(self) -> int:
        return self.row_bytes // 32

    @property
    def cin_g(self) -> int:
        """Channels of a group in the source."""
        return source_shape(self.problem)[1] // self.problem.groups

    @property
    def cout_g(self) -> int:
        """Channels of a group in the result."""
        return result_shape(self.problem)[1] // self.problem.groups

    @property
    def chunks(self) -> int:
        return -(-self.cin_g // self.chunk)

    @property
    def chunks_of_block(self) -> int:
        """Most chunks of a tile that a block multiplies."""
        return -(-self.chunks // self.cluster)

    @cached_property
    def channels_last(self) -> bool:
        return self.problem.layout == "channels_last"

    # --- M: output channels and sub-positions ------------------------------------------------------------------------

    @cached_property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return gather_axes(self.problem, self.unroll)

    @cached_property
    def out_steps(self) -> Triple:
        d, h, w = self.axes
        return d.out_step, h.out_step, w.out_step

    @cached_property
    def in_steps(self) -> Triple:
        d, h, w = self.axes
        return d.in_step, h.in_step, w.in_step

    @property
    def rows_per_sub(self) -> int:
        """Rows of M, that is output channels, of one sub-position in a block."""
        return 64 // self.subs

    @property
    def wgs_m(self) -> int:
        return 2 if self.split == 1 else 1

    @property
    def cout_blocks(self) -> int:
        """M-tiles that a group's output channels make."""
        return -(-self.cout_g // (self.rows_per_sub * self.wgs_m))

    @property
    def width_subs(self) -> int:
        return self.w_subs or self.axes[2].out_step

    @property
    def contiguous(self) -> bool:
        """Whether a tile's outputs of a row are neighbours in memory: it has all phases along W."""
        return self.width_subs == self.out_steps[2]

    @cached_property
    def _multiplied(self) -> _Multiplied:
        return _multiplied(self.problem, self.unroll, self.subs, self.width_subs)

    @property
    def variants(self) -> tuple[tuple[tuple[tuple[int, int], ...], int], ...]:
        """Per variant: its (D, H) sub-positions, `subs` of them, and its first W sub-position."""
        return self._multiplied.variants

    @property
    def bare(self) -> tuple[tuple[Bare, ...], ...]:
        """Per variant the sub-positions without taps that a tile of it stores with its own, if there are any at all."""
        return self._multiplied.bare

    @property
    def blocks_of_w(self) -> tuple[int, ...]:
        """For each W sub-position of a tile the block of accumulators that has it; -1 for one without taps."""
        return self._multiplied.blocks_of_w

    @property
    def mb(self) -> int:
        """Blocks of 64 rows that a consumer accumulates at once."""
        return max(self.blocks_of_w) + 1

    @cached_property
    def entries(self) -> Entries:
        """[variant][block]: the (offsets, kernel tap of every sub or -1) that the block multiplies, in order."""
        found = self._multiplied.entries
        if not self.planewise:
            return found
        return tuple(
            tuple(tuple(sorted(block, key=lambda entry: self.plane_of(entry[0]))) for block in blocks)
            for blocks in found
        )

    @property
    def m_groups(self) -> int:
        return self.problem.groups * self.cout_blocks * len(self.variants)

    @property
    def variant_entries(self) -> tuple[int, ...]:
        """Entries of all blocks of each variant."""
        return self._multiplied.counts

    @property
    def most_entries(self) -> int:
        """Of a variant."""
        return self._multiplied.most

    @property
    def distinct_entries(self) -> frozenset[int]:
        """Every number of entries that some variant has."""
        return self._multiplied.distinct

    @cached_property
    def straight(self) -> bool:
        """Whether the steps of a variant's chunk are one stretch of code, without a loop."""
        one, every = _STEPS_STRAIGHT
        found = self._multiplied
        return (
            self.wgmma and self.parts == 1 and found.most * self.k_steps <= one and found.total * self.k_steps <= every
        )

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """Per variant: the first of those whose taps lie as its own, and by how many pixel rows its own are shifted.

        One stretch of code serves all of these, where a chunk is one (`straight`). The phases of a kernel whose sizes
        are multiples of its strides lie alike.
        """
        if not self.straight or self.plane_barriers > 1:
            return tuple((variant, 0) for variant in range(len(self.variants)))
        found = []
        firsts: dict[tuple[tuple[int, ...], ...], tuple[int, int]] = {}
        for variant, blocks in enumerate(self.entries):
            shifts = [self.shift(offsets) for block in blocks for offsets, _ in block]
            begin = shifts[0] if shifts else 0
            lie = tuple(len(block) for block in blocks), tuple(shift - begin for shift in shifts)
            first, shift = firsts.setdefault(lie, (variant, begin))
            found.append((first, begin - shift))
        return tuple(found)

    @property
    def fragment_sets(self) -> int:
        """Sets of registers that fragments take in turn."""
        steps = [n * self.k_steps for n in self.distinct_entries]
        fours = any(n % 3 for n in steps) and not any(n % 4 for n in steps)
        return 4 if self.split == 2 and self.straight and fours else 3

    @property
    def continued(self) -> bool:
        """Whether a chunk's last step is multiplied while the next chunk begins: then sets come round with every chunk.

        A chunk's pixel tile (`planewise`: its last plane) is given back in the next chunk, which must have one of its
        own. Where consumers share chunks each fills the other's gaps, and of few steps the late return costs more than
        it gains (NOTES: consumers that share, unet1's gradient for the input 282 -> 304 us; 9 steps, kb81's in bfloat16
        126 -> 156. What it gains elsewhere, kb57 2.04 -> 1.99 ms, is of separate runs and within their spread).
        """
        steps = [n * self.k_steps for n in self.distinct_entries if n]
        if not self.straight or self.split != 2 or min(steps) < _STEPS_CONTINUED:
            return False
        if self.stages_p * self.plane_barriers < 2:
            return False
        return all(n % self.fragment_sets == 0 for n in steps)

    @property
    def longest_stretch(self) -> int:
        """Most steps of a stretch of code without a loop."""
        if self.straight:
            return self.most_entries * self.k_steps * self.parts
        return self.taps_unrolled * self.k_steps * self.parts

    @property
    def taps_unrolled(self) -> int:
        """Taps whose steps are one stretch of code, between whose ends the tensor cores do not drain."""
        counts = self._multiplied.lengths
        steps = _STEPS_UNROLLED if self.wgmma else 2
        if self.parts == 2:
            steps = _STEPS_PROMOTED
        most = max(1, steps // (self.k_steps * self.parts))
        return max(range(1, most + 1), key=lambda n: (all(c % n == 0 for c in counts), n if n <= max(counts) else -n))

    def fragments(self, entries: int) -> int:
        """Fragments that a tile of a variant of so many entries multiplies (per warpgroup along M)."""
        return self.chunks * self.fragments_of_chunk(entries)

    def fragments_of_chunk(self, entries: int) -> int:
        """Of these, those of a chunk."""
        return entries * self.k_steps * self.parts

    @property
    def packed_words(self) -> int:
        """32-bit words of the packed weights."""
        per_block = self.fragments(self._multiplied.total) * self.wgs_m
        return self.problem.groups * self.cout_blocks * per_block * (FRAGMENT // 4)

    @property
    def pack_taps(self) -> int:
        """Taps that a block of `pack` takes: few where weights are small, so that a GPU has blocks enough."""
        taps, shares = self.problem.taps, -(-_PACK_BLOCKS // self._pack_tiles)
        return min(taps, _MOST_PACK_TAPS, max(_LEAST_PACK_TAPS, -(-taps // shares)))

    @property
    def pack_blocks(self) -> int:
        """Blocks that pack weights."""
        return self._pack_tiles * -(-self.problem.taps // self.pack_taps)

    @property
    def packs(self) -> bool:
        """Whether a kernel can pack the weights itself: its ring of weights has room for a block's tile of them."""
        tile = 16 * (32 // self.element) * (self.pack_taps | 1) * self.element
        boxed = self.boxable and self.problem.pass_ != "fwd"  # a forward's may as well be float32, under autocast
        room = self.ring_fragments * self.wgs_m * FRAGMENT
        return self.wgmma and self.cluster == 1 and not boxed and 16 + tile <= room

    @property
    def _pack_tiles(self) -> int:
        """Tiles of 16 rows of M and a step of K."""
        return self.problem.groups * self.cout_blocks * self.chunks * self.k_steps * self.wgs_m * 4

    @property
    def boxable(self) -> bool:
        """Whether weights may come as they lie in memory, channels-last, by the tensor copy engine, and not packed.

        A tap's boxes are rows of `weight_span` bytes. Of 32 these take the engine longer than the multiplications
        (NOTES: gradients for the input, kb73 TF32 507 -> 1,001 us, kb78 613 -> 941), unless they are brought once. So
        do a forward's small boxes where sub-positions share a block (NOTES: kb70 bfloat16 1,193 -> 2,543, kb58 TF32 448
        -> 1,436).
        """
        forward = self.problem.pass_ == "fwd"
        rings = self.w_stage % self.k_steps == 0 and self.weight_span > 32
        return (
            self.tensor_map
            and self.channels_last
            and self.shuffle is None
            and self.parts == 1
            and (self.subs == 1 or (self.wgs_m == 1 and not forward))
            and (self.cout_g if forward else self.cin_g) % self.vec == 0
            and (self.resident or rings)
        )

    @property
    def weight_span(self) -> int:
        """Bytes of a row of a tap's boxes: of a chunk's channels; in a forward, whose rows of M lie side by side, of
        some of these."""
        return 128 if self.problem.pass_ == "fwd" else self.row_bytes

    @property
    def weight_box(self) -> tuple[int, int, int, int, int]:
        """A box of a tap's weights where they are `boxable`: channels, taps, rows of M, and two dimensions of one; in a
        forward rows of M, taps, channels."""
        if self.problem.pass_ == "fwd":
            return self.weight_span // self.element, 1, self.chunk, 1, 1
        return self.chunk, 1, self.rows_per_sub * self.wgs_m, 1, 1

    # --- N: pixels ---------------------------------------------------------------------------------------------------

    @property
    def images(self) -> int:
        """Of a tile."""
        return self.beside or self.tile[0]

    @cached_property
    def period(self) -> int:
        """Columns of a tile from an image to the next, where they lie side by side: the taps of none reach another."""
        assert self.whole is not None
        columns = self.image_columns
        return max(self.whole[2] - min(0, self.first_w), columns + max(0, self.offsets[2][-1]))

    @property
    def image_columns(self) -> int:
        """Of these, those that have outputs."""
        return -(-self.image_width // self.width_subs)

    @property
    def image_width(self) -> int:
        """Outputs along an image's width, where they lie side by side."""
        assert self.whole is not None
        return result_shape(self.problem.with_(size=self.whole[3 - self.problem.rank :]))[-1]

    @property
    def subtiles(self) -> int:
        n, d, h, w = self.tile
        return n * d * (h // self.sub[0]) * (w // self.sub[1])

    @property
    def nb(self) -> int:
        """Subtiles of 64 pixels that a consumer accumulates."""
        return self.subtiles // 2 if self.split == 0 else self.subtiles

    def pixel_row_of(self, subtile: int) -> int:
        """The tile's pixel row of a subtile's first pixel, for a tap of shift 0."""
        _, d_of_tile, h_of_tile, w_of_tile = self.tile
        across, down = w_of_tile // self.sub[1], h_of_tile // self.sub[0]
        plane, within = divmod(subtile, across * down)
        n, d = divmod(plane, d_of_tile)
        if self.paired:
            pair, below = divmod(within, 2)
            h, w = pair // across * 2 + below, pair % across
        else:
            h, w = divmod(within, across)
        (rows_d, step_d, _), (rows_h, step_h, _) = self.rows
        row = (n * len(rows_d) + d * step_d) * len(rows_h) + h * self.sub[0] * step_h
        return row * self.pitch + w * self.sub[1]

    @cached_property
    def wide(self) -> bool:
        """Whether one matrix instruction takes two subtiles: the pixel rows of their groups of 8 columns lie evenly."""
        if not self.wgmma or self.nb % 2:
            return False
        apart = 8 * (self.rows[1][1] * self.pitch if self.sub[0] == 8 else 8)
        rows = [self.pixel_row_of(i) for i in range(self.subtiles)]
        return all(b - a == apart for a, b in zip(rows[::2], rows[1::2]))

    @property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Of each axis the offsets of all taps, in order."""
        return self._multiplied.offsets

    @cached_property
    def bands(self) -> tuple[tuple[tuple[int, ...], int, int], ...]:
        """For D and H: the input offset of each band's first row, the rows of a band, and from one of them to the next.

        A dense axis is one band of every row of the halo, or, where steps and offsets have a common divisor (a stride
        of 2 with a dilation of 2), of every second. With a large dilation only the rows that some tap reads are held: a
        band for each offset. `planewise`: a band for each residue modulo the step, where that is no more.
        """
        result = []
        for axis in (0, 1):
            count, step, offsets = self.tile[1 + axis], self.in_steps[axis], self.offsets[axis]
            if self.planewise and step > 1:
                firsts = tuple(sorted({off % step: off for off in reversed(offsets)}.values()))
                reach = max((off - f) // step for off in offsets for f in firsts if (off - f) % step == 0)
                if (count + reach) * len(firsts) <= count * len(offsets):
                    result.append((firsts, count + reach, step))
                    continue
            apart = math.gcd(step, *(off - offsets[0] for off in offsets))
            dense = (offsets[-1] - offsets[0] + (count - 1) * step) // apart + 1
            result.append(((offsets[0],), dense, apart) if dense <= count * len(offsets) else (offsets, count, step))
        return tuple(result)

    @cached_property
    def rows(self) -> tuple[tuple[tuple[int, ...], int, dict[int, int]], ...]:
        """For D and H: (input offset of each row of the tile, rows from q to q + 1, first row of each tap offset).

        Where bands are boxes of their own, these are the rows of the first.
        """
        result = []
        for axis, (firsts, count, apart) in enumerate(self.bands):
            first = {}
            for off in self.offsets[axis]:
                band = self.band_of(axis, off)
                first[off] = (off - firsts[band]) // apart + (0 if self.strided_box else band * count)
            held = firsts[:1] if self.strided_box else firsts
            rows = tuple(off + i * apart for off in held for i in range(count))
            result.append((rows, self.in_steps[axis] // apart, first))
        return tuple(result)

    def band_of(self, axis: int, offset: int) -> int:
        """The band that has an offset's rows."""
        firsts, _, apart = self.bands[axis]
        if len(firsts) == 1:
            return 0
        if offset in firsts:
            return firsts.index(offset)
        return next(i for i, f in enumerate(firsts) if f < offset and (offset - f) % apart == 0)

    @property
    def first_w(self) -> int:
        return self.offsets[2][0]

    @cached_property
    def columns(self) -> int:
        """Input columns of a tile with its halo."""
        offsets = self.offsets[2]
        return (self.tile[3] - 1) * self.in_steps[2] + offsets[-1] - offsets[0] + 1

    @cached_property
    def residues(self) -> tuple[int, ...]:
        """Residues modulo the input step of the columns that some tap reads, counted from the first column."""
        return tuple(sorted({(off - self.first_w) % self.in_steps[2] for off in self.offsets[2]}))

    @cached_property
    def plane(self) -> int:
        """Columns of a segment with one residue modulo the input step: these are neighbours in the tile."""
        return -(-self.columns // self.in_steps[2])

    @cached_property
    def strided_box(self) -> bool:
        """Whether a chunk is several boxes, one for each of `planes`, which lands as a plane of the whole tile."""
        return self.tensor_map and self.channels_last and (self.in_steps[2] > 1 or len(self.planes) > 1)

    @cached_property
    def planes(self) -> tuple[Triple, ...]:
        """Channels-last: the first row of D and H and the residue of columns of each box."""
        (bands_d, _, _), (bands_h, _, _) = self.bands
        return tuple(product(bands_d, bands_h, self.residues))

    @cached_property
    def pitch(self) -> int:
        """Pixel rows from a segment to the next: it has a plane of every residue, or a tile's plane has it."""
        return self.plane if self.strided_box else len(self.residues) * self.plane

    @cached_property
    def plane_pitch(self) -> int:
        """Pixel rows from a residue's plane to the next; a box begins where the swizzle's pattern of 8 rows does."""
        return -(-self.segments * self.plane // 8) * 8 if self.strided_box else self.plane

    @cached_property
    def segments(self) -> int:
        return self.tile[0] * len(self.rows[0][0]) * len(self.rows[1][0])

    @cached_property
    def pixels(self) -> int:
        """Pixel rows of a tile in shared memory."""
        return len(self.planes) * self.plane_pitch if self.strided_box else self.segments * self.pitch

    def shift(self, offsets: Triple) -> int:
        """A tap's shift in pixel rows."""
        column = offsets[2] - self.first_w
        row = self.rows[0][2][offsets[0]] * len(self.rows[1][0]) + self.rows[1][2][offsets[1]]
        return row * self.pitch + self.plane_of(offsets) * self.plane_pitch + column // self.in_steps[2]

    def plane_of(self, offsets: Triple) -> int:
        """The plane that a tap reads."""
        residue = self.residues.index((offsets[2] - self.first_w) % self.in_steps[2])
        if not self.strided_box:
            return residue
        d, h = self.band_of(0, offsets[0]), self.band_of(1, offsets[1])
        return (d * len(self.bands[1][0]) + h) * len(self.residues) + residue

    @property
    def plane_barriers(self) -> int:
        """Pairs of barriers of a pixel tile."""
        return len(self.planes) if self.planewise else 1

    @cached_property
    def staging_units(self) -> int:
        if self.tensor_map and self.whole is None and not self.classed:
            return self.row_boxes * self.box[0] // self.vec
        return self._units_at_any_alignment

    @property
    def _units_at_any_alignment(self) -> int:
        return (self.columns + 2 * self.vec - 2) // self.vec

    @cached_property
    def classed(self) -> bool:
        """Whether rows begin at several places of a unit, so that boxes are of one class of rows and channels each."""
        return not self.channels_last and self.whole is None and self.classes not in (None, (1, 1))

    @property
    def row_classes(self) -> int:
        """Classes that a tile's rows have, which take turns."""
        return self.classes[0] // math.gcd(self.classes[0], self.bands[1][2]) if self.classes and self.classed else 1

    @property
    def channel_classes(self) -> int:
        return self.classes[1] if self.classes and self.classed else 1

    @property
    def class_rows(self) -> int:
        """Rows of a tile (along H) of one class."""
        return -(-self.bands[1][1] // self.row_classes)

    @cached_property
    def row_boxes(self) -> int:
        """Boxes that a row of an NCHW source takes (those of small images aside)."""
        if self.channels_last or self.classed:
            return 1
        return -(-self._columns_from_unit // MAX_BOX)

    @property
    def _columns_from_unit(self) -> int:
        """Columns of a row from the 16-byte unit on that has its first: there a box begins."""
        return self.columns + self.first_w % self.vec

    @property
    def aligned_channels(self) -> bool:
        """Whether every chunk of a channels-last pixel begins at 16 bytes."""
        return source_shape(self.problem)[1] % self.vec == 0 and (
            self.problem.groups == 1 or self.cin_g % self.vec == 0
        )

    @cached_property
    def tensor_map(self) -> bool:
        """Whether the tensor copy engine loads a chunk (sm_90), as a box or several: of planes, classes, long rows."""
        if not self.wgmma:
            return False
        if self.whole is not None:
            return self.problem.groups == 1 or self.cin_g % self.chunk == 0
        even = self.channels_last or all(len(firsts) == 1 for firsts, _, _ in self.bands)
        # A chunk that ended in the next group would bring its values, and 0 times infinity is no 0.
        whole = self.problem.groups == 1 or self.cin_g % self.chunk == 0
        if not (
            even
            and whole
            and max(self.box) <= MAX_BOX
            and self.row_boxes <= _MAX_ROW_BOXES
            and (not self.channels_last or len(self.planes) <= _MAX_PLANES)
            and 1 <= min(self.box_steps) <= max(self.box_steps) <= MAX_BOX_STEP
        ):
            return False
        return self.aligned_channels if self.channels_last else self._classes_fit

    @property
    def _classes_fit(self) -> bool:
        """NCHW: whether every tile and chunk has its rows and channels in the same classes, and these are few."""
        if self.classes is None:
            return False
        rows, channels = self.classes
        few = self.row_classes * self.channel_classes <= _MAX_CLASSES
        # Only the first tile of a row may read ahead of the image, where a lead is to be masked.
        once = not self.classed or self.tile[3] * self.in_steps[2] + self.first_w >= 0
        return few and once and self.chunk % channels == 0 and self.tile[2] * self.in_steps[1] % rows == 0

    @property
    def needs_alignment(self) -> bool:
        """Whether the input must begin at 16 bytes."""
        return self.tensor_map or (self.channels_last and self.aligned_channels)

    @cached_property
    def box(self) -> tuple[int, int, int, int, int]:
        """The tensor copy engine's box, innermost first: channels, W, H, D, images, or W, H, D, channels, images.

        These are the elements traversed: of ``n`` along a dimension of step ``s``, ``ceil(n / s)`` are copied. (CUDA
        driver API, cuTensorMapEncodeTiled: ``elementStrides``.)
        """
        if self.beside:
            return self.box_pixels, self.beside, self.chunk, 1, 1
        if self.whole is not None:
            return self.box_pixels, 1, 1, self.chunk, self.tile[0]
        (_, rows_d, _), (_, rows_h, _) = self.bands
        if self.channels_last:
            counts = (self.chunk, self.plane, rows_h, rows_d, self.tile[0])
        elif self.classed:
            units, channels = self._units_at_any_alignment, self.chunk // self.channel_classes
            counts = (units * self.vec, self.class_rows, rows_d, channels, self.tile[0])
        else:  # a box begins at 16 bytes, or the copy is an illegal instruction
            columns = -(-self._columns_from_unit // self.row_boxes)
            counts = (-(-columns // self.vec) * self.vec, rows_h, rows_d, self.chunk, self.tile[0])
        ends = (((n - 1) * step + 1, n * step) for n, step in zip(counts, self.box_steps))
        a, b, c, d, e = (max(least, min(most, MAX_BOX)) for least, most in ends)
        return a, b, c, d, e

    @cached_property
    def box_steps(self) -> tuple[int, int, int, int, int]:
        """From one element of a box to the next along each of its dimensions."""
        if self.whole is not None:
            return 1, 1, 1, 1, 1
        d, h = (apart if rows > 1 else 1 for _, rows, apart in self.bands)
        if self.classed and self.classes:
            h = self.bands[1][2] * self.row_classes // self.classes[0]  # a class is a tensor of its own
        return (1, self.in_steps[2], h, d, 1) if self.channels_last else (1, h, d, 1, 1)

    @property
    def whole_pixels(self) -> int:
        """Pixels of an image that is copied whole."""
        return math.prod(self.whole or (0,))

    @property
    def box_pixels(self) -> int:
        """Of them, those of one box."""
        return min(self.whole_pixels, MAX_BOX)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a staging slot: a chunk as it comes from memory (NCHW)."""
        if self.whole is not None:
            return self.images * self.chunk * self.whole_pixels * self.element
        if self.tensor_map and self.classed:
            rows = self.tile[0] * (self.chunk // self.channel_classes) * self.bands[0][1] * self.class_rows
            box = -(-rows * self.staging_units * 16 // 128) * 128
            return self.row_classes * self.channel_classes * box
        return self.chunk * self.segments * self.staging_units * 16

    # --- the kernel's shared memory ----------------------------------------------------------------------------------

    @property
    def runs(self) -> int:
        """Groups of 8 columns in one run of the epilogue."""
        if self.sub[0] == 1:
            return self.run_groups
        return min(self.tile[3] // 8, self.nb // 2 if self.paired else self.nb)

    @property
    def ring_stages(self) -> int:
        return self._ring_stages(self.stages_w)

    def _ring_stages(self, stages_w: int) -> int:
        if not self.wgmma:
            return 0
        return self.chunks if self.resident else stages_w

    @property
    def ring_fragments(self) -> int:
        """Fragments of weights that shared memory holds, for each warpgroup along M."""
        return self._ring_fragments(self.stages_w)

    def _ring_fragments(self, stages_w: int) -> int:
        if not self.wgmma:
            return 0
        if self.resident:
            return self.fragments(self.most_entries)
        return stages_w * self.w_stage

    @cached_property
    def shared_bytes(self) -> int:
        return self.shared_with(self.stages_p, self.stages_s, self.stages_w)

    def shared_with(self, stages_p: int, stages_s: int, stages_w: int) -> int:
        """`shared_bytes` of the tiling with other stages."""
        slot_barriers = 0
        if self.tensor_map:
            slot_barriers = stages_p if self.channels_last else stages_s
        run = self.runs * 8
        row = -(-run * self.width_subs * self.element // 128) * 128 + (32 if self.element == 4 else 48)
        buffer = 64 // run * run * 16 * self.element if self.channels_last else 8 * row
        if self.shuffle is not None:
            buffer = self.shuffle.per_slab * self.shuffle.line_words(run) * 4
        before = self._operand_bytes(stages_p, stages_s, stages_w)
        if self.drained:
            before, buffer = -(-before // 1024) * 1024, self.nb * 64 * self.width_subs * 16 * self.element
        return (
            before
            + 8 * buffer
            + 16 * (stages_p * self.plane_barriers + self._ring_stages(stages_w) + slot_barriers)
            + 4 * self.segments
        )

    def _operand_bytes(self, stages_p: int, stages_s: int, stages_w: int) -> int:
        """Of these, those of pixels and weights, ahead of the epilogue's buffers."""
        tiles = stages_p * self.parts * (-(-self.pixels * self.row_bytes // 1024) * 1024)
        ring = self._ring_fragments(stages_w) * self.wgs_m * FRAGMENT
        return tiles + ring + (0 if self.channels_last else stages_s * self.slot_bytes)

    # --- validity ----------------------------------------------------------------------------------------------------

    def checked(self, shared_limit: int) -> Tiling:
        """This tiling, when the kernel can run it."""
        h, w = self.tile[2:]
        if self.subs not in (1, 2, 4) or self.split not in (0, 1, 2) or self.sub not in ((1, 64), (8, 8)):
            raise Unfit(f"subs, split or sub is none of the kernel's: {self.subs}, {self.split}, {self.sub}")
        if not 1 <= self.mb * self.nb <= _MOST_ACCUMULATORS:
            raise Unfit(f"{self.mb} x {self.nb} blocks of accumulators are more than {_MOST_ACCUMULATORS}")
        if self.sub[0] == 1 and not (self.run_groups in (1, 2, 4) or self.run_groups % 8 == 0 < self.run_groups):
            raise Unfit(f"runs of {self.run_groups} groups do not tile a subtile")
        if h % self.sub[0] or w % self.sub[1]:
            raise Unfit(f"tile {self.tile} is no multiple of {self.sub}")
        p = self.problem
        if max(p.taps, math.prod(p.stride)) > _FEW_TAPS and self.table_bytes > _MOST_CONSTANTS:
            raise Unfit(f"the kernel's tables take {self.table_bytes} bytes of constant memory, of {_MOST_CONSTANTS}")
        if self.wgmma and not self.resident and self.stages_w < 2:
            raise Unfit("a step waits for the next stage of the weights' ring before it gives back its own")
        if self.split == 0 and self.subtiles % 2:
            raise Unfit(f"{self.subtiles} subtiles cannot be halved")
        if (
            self.sub[0] == 1
            and self.run_groups > 8
            and (self.nb % (self.run_groups // 8) or self.tile[3] // 64 % (self.run_groups // 8))
        ):
            raise Unfit(f"a run of {self.run_groups} groups crosses rows")
        if self.paired and (self.sub[0] == 1 or self.nb % 2 or h % 16):
            raise Unfit(f"the subtiles of tile {self.tile} are no pairs one below the other")
        if self.channels_last and self.shuffle is None and self.runs > 8:
            raise Unfit(f"a run of {self.runs} groups is longer than the 64 pixels that leave in a round")
        if self.sub[0] == 8 and (self.nb % (self.runs * (2 if self.paired else 1)) or (w // 8) % self.runs):
            raise Unfit("strips of a consumer are not whole runs along W")
        if self.row_bytes not in (32, 64, 128):
            raise Unfit(f"a chunk of {self.chunk} channels is {self.row_bytes} bytes, not 32, 64 or 128")
        if self.mb < 1 or not self.most_entries:
            raise Unfit("no output has a tap")
        if max(abs(r) for axis in self.rows for r in axis[0]) > _MAX_OFFSET:
            raise Unfit(f"the taps reach more than {_MAX_OFFSET} rows away")
        if self.shuffle is not None and self.axes[2].out_step > 1:
            raise Unfit("the epilogue of phases as rows takes one W sub-position")
        if self.whole is not None and not self.tensor_map:
            raise Unfit("whole images come by boxes, of which none may end in the next group")
        if self.problem.batch_as_width and not (self.tensor_map and not self.bare and self.shuffle is None):
            raise Unfit("a batch as width is read by boxes, and stored by one of the epilogues")
        if self.planewise and not self._planes_in_turn:
            raise Unfit("not every variant reads all planes in turn in one stretch of code")
        if self.drained and not self._drainable:
            raise Unfit("the tensor copy engine stores 16-bit outputs of whole rows, in NCHW of two dimensions")
        if self.beside and not self._lie_beside:
            raise Unfit("images lie side by side in runs of whole rows, in boxes, with all their phases along W")
        if self.cluster > 1 and not self._clusters:
            raise Unfit(
                "blocks of a cluster leave sums of whole tiles where pixels and weights were, and stream weights"
            )
        if self.parts == 2 and self.split == 1:
            raise Unfit("IEEE accumulators leave no room for two blocks")
        if self.shared_bytes > shared_limit:
            raise Unfit(f"the tile takes {self.shared_bytes} bytes of shared memory, the device has {shared_limit}")
        if self.pixels > MAX_PIXELS and not self.channels_last:
            raise Unfit(f"the tile has {self.pixels} pixels with its halo, more than {MAX_PIXELS}")
        return self

    @property
    def _lie_beside(self) -> bool:
        """Whether images may lie side by side: as many as a run of the epilogue holds."""
        if self.whole is None or self.whole_pixels > MAX_BOX or not self.tensor_map or self.channels_last:
            return False
        plain = self.problem.pass_ == "fwd" and self.shuffle is None and not self.drained and not self.bare
        row = self.sub == (1, 64) and self.tile[0] == 1 and self.tile[3] == 64 and self.runs == 8
        return plain and row and self.contiguous and 2 <= self.beside == 64 // self.period

    @property
    def _clusters(self) -> bool:
        """Whether blocks may share a tile's chunks, and have room for their sums."""
        tapped = not self.bare and min(self.variant_entries) > 0
        plain = self.wgmma and self.split != 2 and not self.resident and self.shuffle is None and not self.drained
        room = self._operand_bytes(self.stages_p, self.stages_s, self.stages_w)
        return tapped and plain and self.chunks >= self.cluster <= MAX_CLUSTER and self.sums_bytes <= room

    @property
    def sums_bytes(self) -> int:
        """Bytes of a block's sums, which it leaves in shared memory for its cluster."""
        return self.mb * self.nb * 2 * 64 * 64 * 4

    @property
    def _drainable(self) -> bool:
        plain = self.element == 2 and self.tensor_map and not self.channels_last and self.shuffle is None
        one = self.problem.rank == 2 and self.problem.groups == 1 and self.unroll == (1, 1, 1) and not self.bare
        # Lanes store 4, 8 or 16 bytes, whole in a row of a box. Tiles in turn hide their stores anyway.
        whole = self.contiguous and self.width_subs in (1, 2, 4) and self.out_span > 0
        return plain and one and whole and self.subs == 1 and self.split != 2

    @property
    def out_span(self) -> int:
        """Bytes of a row of a result's box, which a run of the epilogue has a whole number of; 0 where none is so."""
        outputs = self.runs * 8 * self.width_subs
        return self.element * next((n for n in (64, 32, 16) if outputs % n == 0), 0)

    @property
    def out_box(self) -> tuple[int, int, int, int, int]:
        """A result's box (`drained`): W, channels, H of one phase, phases of H, images."""
        return self.out_span // self.element, 16, self.sub[0], 1, 1

    @property
    def _planes_in_turn(self) -> bool:
        if not (self.strided_box and self.straight and self.mb == 1 and len(self.planes) > 1):
            return False
        return all(len({self.plane_of(off) for off, _ in block}) == len(self.planes) for (block,) in self.entries)

    @property
    def table_bytes(self) -> int:
        """Bytes of the kernel's tables in constant memory; about, and no less."""
        entries, variants = self._multiplied.total, len(self.variants)
        of_entries = entries * (4 + 2 * self.subs + (1 if self.planewise else 0))
        of_variants = variants * (4 * (self.mb + 1) + 8 + 4 * self.subs + 2 + 2)
        rows, bare = sum(len(axis[0]) for axis in self.rows), sum(map(len, self.bare))
        return of_entries + of_variants + 4 * rows + 8 * bare + 12 * len(self.planes) + 256

    # --- the kernel's macros -----------------------------------------------------------------------------------------

    def macros(self, boxed: bool = False, store_unit: int = 0, packs: bool = False) -> dict[str, int | float | str]:
        """The kernel's constants by macro name; see kernels/gather.cu.

        ``boxed``: its weights are not packed. ``store_unit``: bytes at multiples of which the result's rows begin and
        end (`gather.store_unit`), an element's if never at more; 0 for a kernel that serves all. ``packs``: it packs
        weights itself.
        """
        p = self.problem
        order = ("tf32", "ieee", "fp16", "bf16")
        flat = [(off, taps) for blocks in self.entries for block in blocks for off, taps in block]
        bounds: list[int] = []
        begin = 0
        for blocks in self.entries:
            bounds.append(begin)
            for block in blocks:
                begin += len(block)
                bounds.append(begin)
        (rows_d, step_d, _), (rows_h, step_h, _) = self.rows
        stretches = self.stretches
        numbers = {first: i for i, first in enumerate(dict.fromkeys(first for first, _ in stretches))}
        alignment = self.vec
        grouped = p.groups > 1
        classed = self.tensor_map and self.classed
        value = {"fp16": "half_value", "bf16": "bfloat_value"}.get(p.precision, "(float)")
        # Producers that copy rows, or make two parts of each value, need most; those that know few pixels, least.
        producer_registers = 72
        if self.channels_last or (self.tensor_map and self.parts == 1):
            producer_registers = 48 if self.channels_last or self.pixels <= 4 * 192 else 56
        elif not self.tensor_map and self.mb * self.nb * self.parts <= 2:
            producer_registers = 96  # consumers of few accumulators do with 160; 7 pixels a thread spill 104 B at 72
        names: dict[str, int | float | str] = {
            "PRECISION": order.index(p.precision),
            "ELEMENT": self.element,
            "ELEMENT_TYPE": "float" if self.element == 4 else "unsigned short",
            "ELEMENT_BITS": "unsigned int" if self.element == 4 else "unsigned short",
            "VALUE": value,
            "PARTS": self.parts,
            "PROMOTE": int(self.parts == 2),
            "WGMMA": int(self.wgmma),
            "CHANNELS_LAST": int(self.channels_last),
            "ALIGNED_CHANNELS": int(self.aligned_channels),
            "TENSOR_MAP": int(self.tensor_map),
            "FIRST_D": f"({rows_d[0]})",
            "FIRST_H": f"({rows_h[0]})",
            "ALIGNED_COUT": int(result_shape(p)[1] % alignment == 0 and not (grouped and self.cout_g % alignment)),
            "CIN": source_shape(p)[1],
            "COUT": result_shape(p)[1],
            "CIN_G": self.cin_g,
            "COUT_G": self.cout_g,
            "TAPS": p.taps,
            "PACK_TAPS": self.pack_taps,
            "PACK_PARTS": self.pack_blocks,
            "PACKS": int(packs),
            "GRAD_INPUT": int(p.pass_ != "fwd"),
            "CK": self.chunk,
            "SUB_H": self.sub[0],
            "SUB_W": self.sub[1],
            "PAIRED": int(self.paired),
            "WIDE": int(self.wide),
            "SPLIT": self.split,
            "SUBS": self.subs,
            "ROWS_PER_SUB": self.rows_per_sub,
            "W_SUBS": self.width_subs,
            "MB": self.mb,
            "VARIANTS": len(self.variants),
            "COUT_BLOCKS": self.cout_blocks,
            "M_GROUPS": self.m_groups,
            "STAGES_P": self.stages_p,
            "STAGES_S": self.stages_s,
            "STAGES_W": max(1, self.ring_stages) if self.wgmma else 0,
            "W_STAGE": self.w_stage,
            "RING_FRAGMENTS": self.ring_fragments,
            "RESIDENT": int(self.resident),
            "WEIGHTS_BOX": int(boxed),
            "RUN_GROUPS": self.runs,
            "DRAINED": int(self.drained),
            "CLUSTER": self.cluster,
            "BESIDE": self.beside,
            "PERIOD": self.period if self.beside else 0,
            "BESIDE_W": self.image_width if self.beside else 0,
            "BATCH_AS_WIDTH": int(p.batch_as_width),
            "OUT_SPAN": self.out_span if self.drained else 0,
            "STORE_UNIT": store_unit,
            "ROWS_D": len(rows_d),
            "ROWS_H": len(rows_h),
            "ROW_STEP_D": step_d,
            "ROW_STEP_H": step_h,
            "FIRST_W": f"({self.first_w})",
            "COLUMNS": self.columns,
            "COLUMN_PAD": self.first_w % self.vec
            if self.tensor_map and not self.channels_last and not self.whole and not self.classed
            else 0,
            "CLASSED": int(classed),
            "ROW_CLASSES": self.row_classes if classed else 1,
            "CHANNEL_CLASSES": self.channel_classes if classed else 1,
            "ROW_PERIOD": self.classes[0] if classed and self.classes else 1,
            "ROWS_APART": self.bands[1][2],
            "WHOLE": int(self.whole is not None),
            "IMAGE_D": (self.whole or (0, 0, 0))[0],
            "IMAGE_H": (self.whole or (0, 0, 0))[1],
            "IMAGE_W": (self.whole or (0, 0, 0))[2],
            "BOX_PIXELS": max(1, self.box_pixels),
            "BOX_UNITS": self.box[0] // self.vec
            if self.tensor_map and not self.channels_last and self.whole is None
            else 0,
            "PLANE": self.plane,
            "STRIDED_BOX": int(self.strided_box),
            "PLANES": len(self.planes) if self.strided_box else len(self.residues),
            "RESIDUES": table(w for _, _, w in self.planes) if self.strided_box else table(self.residues),
            "PLANE_BARRIERS": self.plane_barriers,
            "PLANES_OF_ENTRIES": table(self.plane_of(off) if self.planewise else 0 for off, _ in flat),
            "PLANES_D": table(d for d, _, _ in self.planes),
            "PLANES_H": table(h for _, h, _ in self.planes),
            "TAPS_UNROLLED": self.taps_unrolled,
            "TAPS_LEFT": int(any(len(b) % self.taps_unrolled for blocks in self.entries for b in blocks)),
            "STRAIGHT": int(self.straight),
            "STRETCHES": len(numbers),
            "FIRST_OF_STRETCHES": table(numbers),
            "STRETCHES_OF": table(numbers[first] for first, _ in stretches),
            "VARIANT_ROWS": table(shift for _, shift in stretches),
            "FRAGMENT_SETS": self.fragment_sets,
            "CONTINUED": int(self.continued),
            # Both warpgroups of each kind together have a block's 65,536.
            "PRODUCER_REGISTERS": producer_registers,
            "CONSUMER_REGISTERS": 256 - producer_registers,
            "SHARED_BYTES_PLANNED": self.shared_bytes,
            "TAP_ROWS": table(self.shift(off) for off, _ in flat),
            "TAP_INDICES": table(t for _, taps in flat for t in taps),
            "ENTRIES": table(bounds),
            "SUBS_D": table(ud for pairs, _ in self.variants for ud, _ in pairs),
            "SUBS_H": table(uh for pairs, _ in self.variants for _, uh in pairs),
            "SUBS_W": table(u for _, u in self.variants),
            "OFFSETS_D": table(rows_d),
            "OFFSETS_H": table(rows_h),
            "BLOCKS_OF_W": table(self.blocks_of_w),
            "BARE": int(bool(self.bare)),
            "SHUFFLED": int(self.shuffle is not None),
        }
        for name, out_step, in_step, tile in zip("DHW", self.out_steps, self.in_steps, self.tile[1:]):
            names[f"OUT_STEP_{name}"], names[f"IN_STEP_{name}"], names[f"TILE_{name}"] = out_step, in_step, tile
        names["TILE_N"] = self.tile[0]
        if self.bare:
            bare = [one for of_variant in self.bare for one in of_variant]
            names["BARES"] = table(accumulate(map(len, self.bare), initial=0))
            for name in ("d", "h", "w", "rows"):
                names[f"BARES_{name.upper()}"] = table(getattr(one, name) for one in bare)
        return names if self.shuffle is None else names | self.shuffle.macros()

    # --- sizes, which are run-time arguments -------------------------------------------------------------------------

    def counts(self, p: Problem) -> tuple[int, int, int, int]:
        """Tiles along (N, D, H, W) for a problem of this layer."""
        steps = zip(positions(p, self.shuffle), self.out_steps, self.tile[1:])
        d, h, w = (-(-o // (s * t)) for o, s, t in steps)
        return -(-p.batch // self.images), d, h, w

    def arguments(self, p: Problem) -> tuple[int, ...]:
        """The kernel's integer arguments behind its four pointers."""
        lead = (1,) * (3 - p.rank)
        n, d, h, w = self.counts(p)
        return (
            p.batch,
            *lead,
            *source_shape(p)[2:],
            *lead,
            *result_shape(p)[2:],
            d,
            h,
            w,
            n * d * h * w * self.m_groups,
        )


def table(values: Iterable[int]) -> str:
    """A macro's value that initialises an array of a kernel's."""
    return "{" + ",".join(str(v) for v in values) + "}"


def useful(tiling: Tiling) -> float:
    """Useful multiplications over issued ones, borders of tiles aside: rows of M, union of taps, chunk padding."""
    issued = sum(tiling.variant_entries) * tiling.cout_blocks * tiling.wgs_m * 64 * tiling.chunks * tiling.chunk
    p = tiling.problem if tiling.shuffle is None else tiling.shuffle.layer
    couts = result_shape(p)[1] // p.groups
    return math.prod(tiling.unroll) * p.taps * tiling.cin_g * couts / max(1, issued)
