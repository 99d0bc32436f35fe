"""The gather-GEMM's weights: rows of M, the entries that they multiply step by step, and the ring that feeds them.

See kernels/gather_weights.cuh and gather_multiply.cuh; packed weights gather_pack.cuh.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import lru_cache

from upconv.cuda.axes import Bare, Entries, Fill
from upconv.cuda.gemm.shuffle import Triple
from upconv.cuda.gemm.tiling_pixels import TiledPixels, of_pixels, of_taps
from upconv.derived import derived_from

_PACK_BLOCKS = 512  # wanted where weights are packed
_MOST_PACK_TAPS, _LEAST_PACK_TAPS = 64, 4  # of a block: shared memory is 33 KB; less would read parts of sectors
FRAGMENT = 2048  # bytes of weights that a warpgroup takes at a step: 64 rows x 32 bytes of K
STEPS_UNROLLED = 25  # code and compile time grow with it
_STEPS_STRAIGHT = 32, 64  # of a variant, of all, also where they share a stretch
_STEPS_ROLLED = 25  # of a variant's chunk, from which on its steps are a loop of rounds
_STEPS_OF_ROUND = 5, 16  # at least, at most
_SETS = 3, 4, 5, 7  # of fragments' registers that may come round with every round
_STEPS_PROMOTED = 12, 8  # after which IEEE sums leave the tensor cores; half of them have high parts: wgmma, mma.sync


_STEPS = "problem", "unroll", "subs", "w_subs", "chunk", "wgmma"
_of_steps = derived_from(*_STEPS)
_of_stretches = derived_from(*_STEPS, "planewise", "split", "sub", "tile")


@lru_cache(maxsize=4096)
def _unrolled(counts: frozenset[int], most: int) -> int:
    """Of so many taps at most those that blocks of these numbers of taps are whole multiples of, or as few steps of."""
    return max(range(1, most + 1), key=lambda n: (all(c % n == 0 for c in counts), n if n <= max(counts) else -n))


def _sets(steps: int) -> int:
    """Of fragments' registers that come round with a round of so many steps; 0 where these are too few or many."""
    least, most = _STEPS_OF_ROUND
    return next((n for n in _SETS if steps % n == 0), 0) if least <= steps <= most else 0


@lru_cache(maxsize=4096)
def _alike_rounds(blocks: tuple[tuple[Triple, ...], ...], in_steps: Triple, k_steps: int) -> tuple[int, int]:
    """Taps of a round that blocks of taps at these offsets are whole multiples of, as many as may be, and the sets of
    fragments that come round with it; (0, 0) where there are none.

    Rounds are alike but for where they begin, whole steps over the source apart along each axis: then all their taps
    are as many pixel rows of a tile apart, of whatever shape. Along axes where a round has one place, it may be any.
    """
    counts = {len(block) for block in blocks}
    for taps in range(max(counts) - 1, 0, -1):
        sets = _sets(taps * k_steps)
        if not sets or any(count % taps for count in counts):
            continue
        rounds = [block[i : i + taps] for block in blocks for i in range(0, len(block), taps)]
        for alone in (0, 1, 2):  # leading axes, along which a round has one place
            if any(len({offsets[:alone] for offsets in one}) > 1 for one in rounds):
                continue
            begins = [[one[0][i] // in_steps[i] * in_steps[i] for i in range(3)] for one in rounds]
            lie = {
                tuple(tuple(offsets[i] - begin[i] for i in range(alone, 3)) for offsets in one)
                for one, begin in zip(rounds, begins)
            }
            if len(lie) == 1:
                return taps, sets
    return 0, 0


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

    @_of_stretches
    def straight(self) -> bool:
        """Whether the steps of a variant's chunk are one stretch of code, without a loop."""
        return self._short and not self.rolled

    @_of_steps
    def _short(self) -> bool:
        one, every = _STEPS_STRAIGHT
        found = self._multiplied
        return (
            self.wgmma and self.parts == 1 and found.most * self.k_steps <= one and found.total * self.k_steps <= every
        )

    @_of_stretches
    def rolled(self) -> bool:
        """Whether a variant's chunk is a loop of rounds, between which the tensor cores do not drain.

        Straight code of so many matrix instructions takes twice as long to compile, and may spill. A loop costs other
        kernels little (docs/experiments.md).
        """
        if not self._short or self.mb > 1:
            return False
        if self._multiplied.most * self.k_steps < _STEPS_ROLLED:
            return False
        # With one instruction a step ptxas serialises some (C7513, C7515), but none of consumers in turn.
        return (self.nb > 1 or self.split == 2) and self._round_of_chunk[0] > 0

    @property
    def _round_of_chunk(self) -> tuple[int, int]:
        """Taps of a round, and sets of fragments; (0, 0) for none.

        Not of planes for consumers in turn, of which neither fills the other's gaps (docs/experiments.md).
        """
        if not self.planewise:
            return self._round
        return (0, 0) if self.split == 2 else self._round_of_planes

    @_of_steps
    def _round(self) -> tuple[int, int]:
        blocks = (tuple(offsets for offsets, _ in block) for blocks in self._multiplied.entries for block in blocks)
        return _alike_rounds(tuple(block for block in blocks if block), self.in_steps, self.k_steps)

    @_of_steps
    def _round_of_planes(self) -> tuple[int, int]:
        """`planewise`: as `_round`, of a plane each: the taps of one remainder by the steps over the source."""
        rounds = set()
        for block in (block for blocks in self._multiplied.entries for block in blocks):
            planes: dict[tuple[int, ...], list[Triple]] = {}
            for offsets, _ in block:
                planes.setdefault(tuple(map(operator.mod, offsets, self.in_steps)), []).append(offsets)
            rounds |= {tuple(tuple(map(operator.sub, offsets, of[0])) for offsets in of) for of in planes.values()}
        steps = len(min(rounds)) * self.k_steps
        sets = _sets(steps) if len(rounds) == 1 else 0
        return (steps // self.k_steps, sets) if sets else (0, 0)

    @property
    def round_shifts(self) -> tuple[int, ...]:
        """`rolled`: pixel rows from the first tap of a round to each."""
        if not self.rolled:
            return (0,)
        first = next(block for blocks in self.entries for block in blocks if block)
        shifts = [self.shift(offsets) for offsets, _ in first[: self.taps_unrolled]]
        return tuple(shift - shifts[0] for shift in shifts)

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
        return self._round_of_chunk[1] if self.rolled else 3

    @_of_stretches
    def longest_stretch(self) -> int:
        """Most steps of a stretch of code without a loop."""
        if self.straight:
            return self.most_entries * self.k_steps * self.parts
        return self.taps_unrolled * self.k_steps * self.parts

    @_of_stretches
    def taps_unrolled(self) -> int:
        """Taps whose steps are one stretch of code, between whose ends the tensor cores do not drain."""
        if self.rolled:
            return self._round_of_chunk[0]
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
