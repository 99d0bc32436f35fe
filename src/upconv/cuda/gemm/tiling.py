"""How a transposed convolution is cut into the gather-GEMM's tiles: pure arithmetic, shared by kernel and interpreter.

`axes` has what there is to multiply, `tiling_pixels` a tile's pixels. Here are the weights that they are multiplied by,
the stores, all of shared memory, and what the kernel cannot run; `gather_constants` has what it is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from upconv.cuda.axes import MOST_CONSTANTS, Division, Entries, Unfit, multiplied, positions, result_shape, source_shape
from upconv.cuda.gemm.tiling_pixels import MAX_PIXELS, Fetch, TiledPixels, of_pixels, of_taps
from upconv.cuda.gpu import CLUSTERS, FRAGMENT, MAX_BOX
from upconv.derived import derived, derived_from
from upconv.problem import Problem, Triple, triple

MOST_ACCUMULATORS = 4  # of 64 x 64, which a consumer holds: 128 registers of a thread's 200
CLAIMS, CLAIMS_BYTES = 16, 192  # of kernels/claims.cuh: places of its ring, and its shared memory
_STEPS_STRAIGHT = 32, 64  # of a variant, of all, also where they share a stretch
_STEPS_OF_ROUND = 5, 16  # at least, where straight code is not too long; at most
_SETS = 3, 4, 5, 7  # of fragments' registers that may come round with every round
_STEPS_PROMOTED = 12, 8  # after which IEEE sums leave the tensor cores; half of them have high parts: wgmma, mma.sync


def _alike(blocks: Iterable[Sequence[Triple]], taps: int, step: int) -> bool:
    """Whether rounds of so many taps differ only in where they begin, along W by multiples of a step."""
    first: list[Triple] = []
    for one in (block[i : i + taps] for block in blocks for i in range(0, len(block), taps)):
        lie = [(d - one[0][0], h - one[0][1], w - one[0][2] // step * step) for d, h, w in one]
        first = first or lie
        if lie != first:
            return False
    return bool(first)


def _sets(steps: int) -> int:
    """Of fragments' registers that come round with a round of so many steps; 0 where none do."""
    return next((n for n in _SETS if steps % n == 0), 0)


@lru_cache(maxsize=1024)  # many tiles of a layer ask for one of few
def _taps_of_rounds(division: Division, width_step: int, k_steps: int, short: bool) -> int:
    """Most taps of a round of all blocks of a division of the taps (`multiplied`).

    ``short``: a block may be straight code, so that a round of all of its taps is none.
    """
    entries = multiplied(*division).entries
    blocks = [[offsets for offsets, _ in block] for blocks in entries for block in blocks if block]
    most = _STEPS_OF_ROUND[1] // k_steps
    few = (
        n
        for n in range(min(most, max(map(len, blocks)) - short), 0, -1)
        if _sets(n * k_steps) and _alike(blocks, n, width_step)
    )
    return next(few, 0)


@dataclass(frozen=True)
class Tiling(TiledPixels):
    """A tile's shape and the kernel's constants for one problem; everything but the sizes of input and batch.

    Raises, on `checked`:
        Unfit: the kernel cannot run this tiling.
    """

    stages_w: int = 3
    """Stages of the weights' ring, where they are not `resident`."""
    w_stage: int = 8
    """Fragments of a stage of the weights' ring."""
    resident: bool = False
    """All weights of an M-group stay in shared memory."""
    drained: bool = False
    """NCHW, 16 bits: a tile's outputs stay in shared memory while the tensor copy engine stores them."""

    # --- M: output channels and sub-positions ------------------------------------------------------------------------

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

    @of_taps
    def mb(self) -> int:
        """Blocks of 64 rows that a consumer accumulates at once."""
        return max(self.multiplied.blocks_of_w) + 1

    @property
    def entries(self) -> Entries:
        """[variant][block]: the (offsets, kernel tap of every sub or -1) that the block multiplies, in order."""
        return self.multiplied.entries

    @property
    def m_groups(self) -> int:
        return self.problem.groups * self.cout_blocks * len(self.multiplied.variants)

    # --- K: steps ----------------------------------------------------------------------------------------------------

    @of_pixels
    def straight(self) -> bool:
        """Whether the steps of a variant's chunk are one stretch of code, without a loop; else they are rounds."""
        if not self._short:
            return False
        # Rounds of few steps, or of one instruction a step, are not known to be as fast (docs/experiments.md).
        alone = self.nb == 1 and self.split != 2
        return alone or self._taps_alike * self.k_steps < _STEPS_OF_ROUND[0]

    @derived_from("problem", "unroll", "subs", "w_subs", "classes", "chunk", "wgmma")
    def _short(self) -> bool:
        most, total = self.multiplied.most * self.k_steps, self.multiplied.total * self.k_steps
        return self.wgmma and self.parts == 1 and most <= _STEPS_STRAIGHT[0] and total <= _STEPS_STRAIGHT[1]

    @of_pixels
    def queued(self) -> bool:
        """Whether rounds are alike but for where they begin, so that the tensor cores do not drain between them."""
        return self.wgmma and self.parts == 1 and not self.straight and self._taps_alike > 0

    @of_pixels
    def _taps_alike(self) -> int:
        """Most taps of a `queued` round; 0 where there is none."""
        # With several blocks registers spill; with several bands the rows of taps alike need not be.
        if self.mb > 1 or any(len(firsts) > 1 for firsts, _, _ in self.bands):
            return 0
        return _taps_of_rounds(self.division, self.in_steps[2], self.k_steps, self._short)

    @property
    def fragment_sets(self) -> int:
        """Sets of registers that fragments take in turn."""
        return _sets(self.taps_unrolled * self.k_steps) if self.queued else 3

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """Per variant: the first of those whose taps lie as its own, and by how many pixel rows its own are shifted.

        One stretch of code serves all of these, where a chunk is one (`straight`). The phases of a kernel whose sizes
        are multiples of its strides lie alike.
        """
        if not self.straight:
            return tuple((variant, 0) for variant in range(len(self.multiplied.variants)))
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
    def longest_stretch(self) -> int:
        """Most steps of a stretch of code."""
        return self.taps_unrolled * self.k_steps * self.parts

    @of_pixels
    def taps_unrolled(self) -> int:
        """Most taps of a stretch of code: of a variant's chunk where it is `straight`, else of a round."""
        if self.straight:
            return self.multiplied.most
        if self.queued:
            return self._taps_alike
        steps = _STEPS_OF_ROUND[1] if self.wgmma else 2
        if self.parts == 2:
            steps = _STEPS_PROMOTED[0 if self.wgmma else 1]
        lengths, most = self.multiplied.lengths, max(1, steps // (self.k_steps * self.parts))
        return max(n for n in range(1, most + 1) if all(length % n == 0 for length in lengths))

    def fragments(self, entries: int) -> int:
        """Fragments that a tile of a variant of so many entries multiplies (per warpgroup along M)."""
        return self.chunks * self.fragments_of_chunk(entries)

    def fragments_of_chunk(self, entries: int) -> int:
        """Of these, those of a chunk."""
        return entries * self.k_steps * self.parts

    # --- weights in memory -------------------------------------------------------------------------------------------

    @property
    def packed_words(self) -> int:
        """32-bit words of the packed weights."""
        per_block = self.fragments(self.multiplied.total) * self.wgs_m
        return self.problem.groups * self.cout_blocks * per_block * (FRAGMENT // 4)

    @property
    def boxable(self) -> bool:
        """Whether weights may come as they lie in memory, channels-last, by the tensor copy engine, and not packed.

        A tap's boxes are rows of `weight_span` bytes. Of 32 these take the engine longer than the multiplications,
        unless they are brought once. So do a forward's small boxes where sub-positions share a block
        (docs/experiments.md).
        """
        forward = self.problem.pass_ == "fwd"
        return (
            self.tensor_map
            and self.channels_last
            and self.shuffle is None
            and self.parts == 1
            and (self.subs == 1 or (self.wgs_m == 1 and not forward))
            and (self.cout_g if forward else self.cin_g) % self.vec == 0
            and self.w_stage % self.k_steps == 0
            and (self.resident or self.weight_span > 32)
        )

    @property
    def unpacked(self) -> bool:
        """Whether weights that are `boxable` always come so: a forward's in TF32 do only where packing takes long."""
        return self.boxable and (self.element == 2 or self.problem.pass_ != "fwd")

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

    @property
    def weight_boxes(self) -> int:
        """Boxes of a tap's weights where they are `boxable`."""
        return self.wgs_m * 64 * self.element // self.weight_span if self.problem.pass_ == "fwd" else self.subs

    # --- a staging slot: a chunk as it comes from memory (NCHW) ------------------------------------------------------

    @of_pixels
    def slot_boxes(self) -> int:
        """Boxes of a slot; what threads copy is one."""
        if self.fetch == Fetch.BY_THREADS:
            return 1
        if self.whole is not None:
            return self.whole_pixels // self.box_pixels
        return self.row_classes * self.channel_classes * self.row_boxes

    @of_pixels
    def slot_units(self) -> int:
        """Units of 16 bytes of a row of a box."""
        return self._units_at_any_alignment if self.fetch == Fetch.BY_THREADS else self.box[0] // self.vec

    @of_pixels
    def slot_channel(self) -> int:
        """Bytes from a channel of a box to the next."""
        if self.whole is not None:
            return (self.beside or 1) * self.box_pixels * self.element
        rows_d, rows_h = self.row_counts
        return rows_d * (self.class_rows if self.fetch == Fetch.BY_CLASSES else rows_h) * self.slot_units * 16

    @of_pixels
    def slot_copied(self) -> int:
        """Bytes of a box."""
        channels = self.chunk // (self.channel_classes if self.fetch == Fetch.BY_CLASSES else 1)
        return self.tile[0] * channels * self.slot_channel

    @of_pixels
    def slot_bytes(self) -> int:
        return self.slot_boxes * (-(-self.slot_copied // 128) * 128)

    # --- the ring of weights in shared memory ------------------------------------------------------------------------

    @property
    def ring_stages(self) -> int:
        """Stages of the ring; of weights that are `resident` all of a tile's."""
        if not (self.wgmma and self.resident):
            return self.stages_w if self.wgmma else 0
        return self.chunks * (self.multiplied.most // self.taps_unrolled) * -(-self.longest_stretch // self.w_stage)

    # --- the epilogue's stores ---------------------------------------------------------------------------------------

    @property
    def runs(self) -> int:
        """Groups of 8 columns that the epilogue passes through shared memory together.

        Of rows in NCHW two subtiles where that is possible: long runs share fewer sectors of 32 bytes with others.
        """
        if self.sub[0] > 1:
            return min(self.tile[3] // 8, self.nb)
        long = self.wgmma and not self.channels_last and self.tile[3] % 128 == 0
        return 16 if long and self.width_subs == 1 and self.nb % 2 == 0 else 8

    @property
    def sums_bytes(self) -> int:
        """Bytes of a block's sums, which it leaves in shared memory for its cluster."""
        return self.mb * self.nb * 2 * 64 * 64 * 4

    @property
    def out_span(self) -> int:
        """Bytes of a row of a result's box, which a run of the epilogue has a whole number of; 0 where none is so."""
        outputs = self.runs * 8 * self.width_subs
        return self.element * next((n for n in (64, 32, 16) if outputs % n == 0), 0)

    # --- shared memory -----------------------------------------------------------------------------------------------

    @derived
    def shared_bytes(self) -> int:
        return self.shared_with(self.stages_p, self.stages_s, self.stages_w)

    def shared_with(self, stages_p: int, stages_s: int, stages_w: int) -> int:
        """`shared_bytes` of the tiling with other stages."""
        buffers, rings = self._buffer_bytes, self.ring_stages if self.resident else stages_w
        before = self._operand_bytes(stages_p, stages_s, stages_w)
        slot_barriers = stages_s
        if self.channels_last:  # IEEE's boxes have barriers of their own, since they are to be parted
            slot_barriers = stages_p if self.tensor_map and self.parts == 2 else 0
        if self.drained:
            before, buffers = -(-before // 1024) * 1024, 8 * self.nb * 64 * self.width_subs * 16 * self.element
        barriers = stages_p + (rings if self.wgmma else 0) + slot_barriers
        return before + buffers + 16 * barriers

    @of_pixels
    def _buffer_bytes(self) -> int:
        """Of the warps, through which results pass."""
        run = self.runs * 8
        if self.shuffle is not None:
            return 8 * self.shuffle.per_slab * self.shuffle.line_words(run) * 4
        if self.channels_last:
            return 8 * (64 // run * run * 16 * self.element)
        row = -(-run * self.width_subs * self.element // 128) * 128 + (32 if self.element == 4 else 48)
        return 64 * row

    @of_pixels
    def _stage_bytes(self) -> int:
        """Of a pixel tile."""
        return self.parts * (-(-self.pixels * self.row_bytes // 1024) * 1024)

    def _operand_bytes(self, stages_p: int, stages_s: int, stages_w: int) -> int:
        """Of shared memory those of pixels and weights, ahead of the epilogue's buffers."""
        fragments = (self.ring_stages if self.resident else stages_w) * self.w_stage
        slots = 0 if self.channels_last else stages_s * self.slot_bytes
        return stages_p * self._stage_bytes + slots + (fragments * self.wgs_m * FRAGMENT if self.wgmma else 0)

    def claimable(self, shared_limit: int) -> bool:
        """Whether blocks can claim tiles as they come to them (kernels/claims.cuh): by the thread that loads boxes."""
        if not self.tensor_map or self.cluster > 1 or self.shared_bytes + CLAIMS_BYTES > shared_limit:
            return False
        ahead = (self.stages_p + self.stages_s) // self.chunks + 1  # tiles by which that thread may be
        return min(self.multiplied.counts) > 0 and ahead + 3 <= CLAIMS

    # --- validity ----------------------------------------------------------------------------------------------------

    def checked(self, shared_limit: int) -> Tiling:
        """This tiling, when the kernel can run it."""
        refused = next(chain(self._wrong_shapes(), self._wrong_ways(), self._too_large(shared_limit)), None)
        if refused is not None:
            raise Unfit(refused)
        return self

    def _wrong_shapes(self) -> Iterator[str]:
        """Why a tile of this shape is none of the kernel's, in sentences."""
        h, w = self.tile[2:]
        if self.subs not in (1, 2, 4) or self.split not in (0, 1, 2) or self.sub not in ((1, 64), (8, 8)):
            yield f"subs, split or sub is none of the kernel's: {self.subs}, {self.split}, {self.sub}"
        if not 1 <= self.mb * self.nb <= MOST_ACCUMULATORS:
            yield f"{self.mb} x {self.nb} blocks of accumulators are more than {MOST_ACCUMULATORS}"
        if h % self.sub[0] or w % self.sub[1]:
            yield f"tile {self.tile} is no multiple of {self.sub}"
        if self.split == 0 and self.subtiles % 2:
            yield f"{self.subtiles} subtiles cannot be halved"
        if self.channels_last and self.shuffle is None and self.runs > 8:
            yield f"a run of {self.runs} groups is longer than the 64 pixels that leave in a round"
        if self.sub[0] == 8 and (self.nb % self.runs or (w // 8) % self.runs):
            yield "strips of a consumer are not whole runs along W"
        if self.row_bytes not in (32, 64, 128):
            yield f"a chunk of {self.chunk} channels is {self.row_bytes} bytes, not 32, 64 or 128"
        if self.mb < 1 or not self.multiplied.most:
            yield "no output has a tap"
        if self.parts == 2 and self.split == 1:
            yield "IEEE accumulators leave no room for two blocks"

    def _wrong_ways(self) -> Iterator[str]:
        """Why pixels, weights or results cannot go these ways."""
        if self.wgmma and not self.resident and self.stages_w < 2:
            yield "a step waits for the next stage of the weights' ring before it gives back its own"
        if self.parts == 2 and self.wgmma and self.w_stage % 2:
            yield f"a stage has both parts of a step's weights, which {self.w_stage} fragments are not"
        if self.shuffle is not None and self.axes[2].out_step > 1:
            yield "the epilogue of phases as rows takes one W sub-position"
        if self.whole is not None and not self.tensor_map:
            yield "whole images come by boxes, of which none may end in the next group"
        if self.problem.batch_as_width and not (self.tensor_map and not self.multiplied.bare and self.shuffle is None):
            yield "a batch as width is read by boxes, and stored by one of the epilogues"
        # With one stage what is multiplied was never copied, or not yet.
        if not self.tensor_map and (self.stages_p if self.channels_last else self.stages_s) < 2:
            yield "threads that copy pixels have a stage ahead of the one that is read"
        if self.drained and not self._drainable:
            yield "the tensor copy engine stores 16-bit outputs of whole rows, in NCHW of two dimensions"
        if self.beside and not self._lie_beside:
            yield "images take turns in pairs and runs of whole rows, by boxes, with all their phases along W"
        if self.cluster > 1 and not self._clusters:
            yield "blocks of a cluster leave sums of whole tiles where boxes brought pixels, and stream weights"

    def _too_large(self, shared_limit: int) -> Iterator[str]:
        """Why there is no room."""
        if self.table_bytes > MOST_CONSTANTS:
            yield f"the kernel's tables take {self.table_bytes} bytes of constant memory, of {MOST_CONSTANTS}"
        if self.shared_bytes > shared_limit:
            yield f"the tile takes {self.shared_bytes} bytes of shared memory, the device has {shared_limit}"
        if self.pixels > MAX_PIXELS and not self.channels_last:
            yield f"the tile has {self.pixels} pixels with its halo, more than {MAX_PIXELS}"

    @property
    def _lie_beside(self) -> bool:
        """Whether images may lie side by side: as many as a run of the epilogue holds."""
        if self.whole is None or self.box[0] > MAX_BOX or not self.tensor_map or self.channels_last:
            return False
        if self.cin_g % self.box_channels:
            return False
        plain = self.problem.pass_ == "fwd" and self.shuffle is None and not self.drained and not self.multiplied.bare
        row = self.sub == (1, 64) and self.tile[0] == 1 and self.tile[3] == 64 and self.runs == 8
        pairs = self.beside % 2 == 0 and self.beside * self.image_columns <= 64  # a thread's sums are two columns
        return plain and row and self.contiguous and pairs

    @property
    def _clusters(self) -> bool:
        """Whether blocks may share a tile's chunks, and have room for their sums."""
        tapped = not self.multiplied.bare and min(self.multiplied.counts) > 0
        plain = self.tensor_map and self.split != 2 and not self.resident and self.shuffle is None and not self.drained
        room = self._operand_bytes(self.stages_p, self.stages_s, self.stages_w)
        return tapped and plain and self.chunks >= self.cluster <= max(CLUSTERS) and self.sums_bytes <= room

    @property
    def _drainable(self) -> bool:
        plain = self.element == 2 and self.tensor_map and not self.channels_last and self.shuffle is None
        p = self.problem
        one = p.rank == 2 and p.groups == 1 and self.unroll == (1, 1, 1) and not self.multiplied.bare
        # Lanes store 4, 8 or 16 bytes, whole in a row of a box. Tiles in turn hide their stores anyway.
        whole = self.contiguous and self.width_subs in (1, 2, 4) and self.out_span > 0
        return plain and one and whole and self.subs == 1 and self.split != 2

    @property
    def table_bytes(self) -> int:
        """Bytes of the kernel's tables in constant memory; about, and no less."""
        entries, variants = self.multiplied.total, len(self.multiplied.variants)
        of_entries = entries * (4 + 2 * self.subs)
        of_variants = variants * (4 * (self.mb + 1) + 8 + 4 * self.subs + 4 + 4)
        rows = sum(self.row_counts)
        return of_entries + of_variants + 4 * rows + 8 * len(self.multiplied.bare) + 12 * self.plane_count + 256

    # --- sizes, which are run-time arguments -------------------------------------------------------------------------

    def counts(self, p: Problem) -> tuple[int, int, int, int]:
        """Tiles along (N, D, H, W) for a problem of this layer."""
        steps = zip(positions(p, self.shuffle), self.out_steps, self.tile[1:])
        d, h, w = (-(-o // (s * t)) for o, s, t in steps)
        return -(-p.batch // self.images), d, h, w

    def arguments(self, p: Problem) -> tuple[int, ...]:
        """The kernel's integer arguments behind its four pointers."""
        counts = self.counts(p)
        sizes = *triple(source_shape(p)[2:]), *triple(result_shape(p)[2:])
        return p.batch, *sizes, *counts[1:], math.prod(counts) * self.m_groups
