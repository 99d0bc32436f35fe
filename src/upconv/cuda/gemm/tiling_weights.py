"""The gather-GEMM's weights: rows of M, the entries that they multiply step by step, and the ring that feeds them.

See kernels/gather_weights.cuh and gather_multiply.cuh; packed weights gather_pack.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from upconv.cuda.axes import Bare, Entries, Fill
from upconv.cuda.gemm.tiling_pixels import TiledPixels, of_pixels, of_taps
from upconv.derived import derived_from

FRAGMENT = 2048  # bytes of weights that a warpgroup takes at a step: 64 rows x 32 bytes of K
STEPS_UNROLLED = 25  # code and compile time grow with it
_STEPS_STRAIGHT = 32, 64  # of a variant, of all, also where they share a stretch
_STEPS_PROMOTED = 12, 8  # after which IEEE sums leave the tensor cores; half of them have high parts: wgmma, mma.sync


_STEPS = "problem", "unroll", "subs", "w_subs", "chunk", "wgmma"
_of_steps = derived_from(*_STEPS)


@lru_cache(maxsize=4096)
def _unrolled(counts: frozenset[int], most: int) -> int:
    """Of so many taps at most those that blocks of these numbers of taps are whole multiples of, or as few steps of."""
    return max(range(1, most + 1), key=lambda n: (all(c % n == 0 for c in counts), n if n <= max(counts) else -n))


@dataclass(frozen=True)
class TiledWeights(TiledPixels):
    """What tiles multiply their pixels by: M of the GEMM, and K in the order of its steps."""

    stages_w: int = 3
    """Stages of the weights' ring, where they are not `resident`."""
    w_stage: int = 8
    """Fragments of a stage of the weights' ring."""
    resident: bool = False
    """All weights of an M-group stay in shared memory."""

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

    @of_taps
    def mb(self) -> int:
        """Blocks of 64 rows that a consumer accumulates at once."""
        return max(self.blocks_of_w) + 1

    @of_pixels
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

    @of_taps
    def variant_entries(self) -> tuple[int, ...]:
        """Entries of all blocks of each variant."""
        return self._multiplied.counts

    @property
    def fills(self) -> tuple[tuple[Fill, int], ...]:
        """What `bare` has of each variant, and how many variants have as much; empty where no variant has any."""
        return self._multiplied.fills

    @of_taps
    def most_entries(self) -> int:
        """Of a variant."""
        return self._multiplied.most

    @of_taps
    def distinct_entries(self) -> frozenset[int]:
        """Every number of entries that some variant has."""
        return self._multiplied.distinct

    # --- K: steps ----------------------------------------------------------------------------------------------------

    @_of_steps
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

    @_of_steps
    def longest_stretch(self) -> int:
        """Most steps of a stretch of code without a loop."""
        if self.straight:
            return self.most_entries * self.k_steps * self.parts
        return self.taps_unrolled * self.k_steps * self.parts

    @_of_steps
    def taps_unrolled(self) -> int:
        """Taps whose steps are one stretch of code, between whose ends the tensor cores do not drain."""
        counts = self._multiplied.lengths
        steps = STEPS_UNROLLED if self.wgmma else 2
        if self.parts == 2:
            steps = _STEPS_PROMOTED[0 if self.wgmma else 1]
        return _unrolled(counts, max(1, steps // (self.k_steps * self.parts)))

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
        per_block = self.fragments(self._multiplied.total) * self.wgs_m
        return self.problem.groups * self.cout_blocks * per_block * (FRAGMENT // 4)

    @property
    def boxable(self) -> bool:
        """Whether weights may come as they lie in memory, channels-last, by the tensor copy engine, and not packed.

        A tap's boxes are rows of `weight_span` bytes. Of 32 these take the engine longer than the multiplications,
        unless they are brought once. So do a forward's small boxes where sub-positions share a block
        (docs/experiments.md).
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

    @property
    def weight_boxes(self) -> int:
        """Boxes of a tap's weights where they are `boxable`."""
        return self.wgs_m * 64 * self.element // self.weight_span if self.problem.pass_ == "fwd" else self.subs

    # --- the ring of weights in shared memory ------------------------------------------------------------------------

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
