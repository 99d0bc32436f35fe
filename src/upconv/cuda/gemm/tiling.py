"""How a transposed convolution is cut into the gather-GEMM's tiles: pure arithmetic, shared by kernel and interpreter.

`axes` has what there is to multiply, `tiling_pixels` a tile's pixels, `tiling_weights` what they are multiplied by.
Here are the stores, all of shared memory, what the kernel cannot run, and the macros that tell it of everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from upconv.cuda.axes import MOST_CONSTANTS, Unfit, positions, result_shape, source_shape, table
from upconv.cuda.gemm.tiling_pixels import MAX_PIXELS
from upconv.cuda.gemm.tiling_weights import FRAGMENT, TiledWeights
from upconv.cuda.gpu import MAX_BOX, MAX_CLUSTER
from upconv.derived import derived
from upconv.problem import Problem

_MOST_ACCUMULATORS = 5  # 64 x 64 each, 32 registers of a consumer's thread
_FEW_TAPS = 500  # and phases, whose tables are never too large
CLAIMS, CLAIMS_BYTES = 16, 192  # of kernels/claims.cuh: places of its ring, and its shared memory
_MAX_OFFSET = 2000  # rows' offsets are packed in 12 bits, signed


@dataclass(frozen=True)
class Tiling(TiledWeights):
    """A tile's shape and the kernel's constants for one problem; everything but the sizes of input and batch.

    Raises, on `checked`:
        Unfit: the kernel cannot run this tiling.
    """

    run_groups: int = 8
    """Groups of 8 columns that the epilogue passes through shared memory together, for sub (1, 64)."""
    drained: bool = False
    """NCHW, 16 bits: a tile's outputs stay in shared memory while the tensor copy engine stores them."""

    # --- the epilogue's stores ---------------------------------------------------------------------------------------

    @property
    def runs(self) -> int:
        """Groups of 8 columns in one run of the epilogue."""
        if self.sub[0] == 1:
            return self.run_groups
        return min(self.tile[3] // 8, self.nb // 2 if self.paired else self.nb)

    @property
    def sums_bytes(self) -> int:
        """Bytes of a block's sums, which it leaves in shared memory for its cluster."""
        return self.mb * self.nb * 2 * 64 * 64 * 4

    @property
    def out_span(self) -> int:
        """Bytes of a row of a result's box, which a run of the epilogue has a whole number of; 0 where none is so."""
        outputs = self.runs * 8 * self.width_subs
        return self.element * next((n for n in (64, 32, 16) if outputs % n == 0), 0)

    @property
    def out_box(self) -> tuple[int, int, int, int, int]:
        """A result's box (`drained`): W, channels, H of one phase, phases of H, images."""
        return self.out_span // self.element, 16, self.sub[0], 1, 1

    # --- shared memory -----------------------------------------------------------------------------------------------

    @derived
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

    def claimable(self, shared_limit: int) -> bool:
        """Whether blocks can claim tiles as they come to them (kernels/claims.cuh): by the thread that loads boxes."""
        if not self.tensor_map or self.cluster > 1 or self.shared_bytes + CLAIMS_BYTES > shared_limit:
            return False
        ahead = -(-(self.stages_p + self.stages_s) // self.chunks)  # tiles by which that thread may be
        return min(self.variant_entries) > 0 and ahead + 3 <= CLAIMS

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
        if max(p.taps, math.prod(p.stride)) > _FEW_TAPS and self.table_bytes > MOST_CONSTANTS:
            raise Unfit(f"the kernel's tables take {self.table_bytes} bytes of constant memory, of {MOST_CONSTANTS}")
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
        if self.reach > _MAX_OFFSET:
            raise Unfit(f"the taps reach more than {_MAX_OFFSET} rows away")
        if self.shuffle is not None and self.axes[2].out_step > 1:
            raise Unfit("the epilogue of phases as rows takes one W sub-position")
        if self.whole is not None and not self.tensor_map:
            raise Unfit("whole images come by boxes, of which none may end in the next group")
        if self.problem.batch_as_width and not (self.tensor_map and not self.bare and self.shuffle is None):
            raise Unfit("a batch as width is read by boxes, and stored by one of the epilogues")
        if self.planewise and not self._planes_apart:
            raise Unfit("a tile has one plane, or its planes come by no boxes")
        if self.plane_barriers > 1 and not self._planes_in_turn:
            raise Unfit("not every variant reads all planes in turn in one stretch of code")
        # With one stage what is multiplied was never copied, or not yet.
        if not self.tensor_map and (self.stages_p if self.channels_last else self.stages_s) < 2:
            raise Unfit("threads that copy pixels have a stage ahead of the one that is read")
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
        if self.parts == 2 and self.wgmma and not self.resident and self.w_stage % 2:
            raise Unfit(f"a stage has both parts of a step's weights, which {self.w_stage} fragments are not")
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
    def _drainable(self) -> bool:
        plain = self.element == 2 and self.tensor_map and not self.channels_last and self.shuffle is None
        one = self.problem.rank == 2 and self.problem.groups == 1 and self.unroll == (1, 1, 1) and not self.bare
        # Lanes store 4, 8 or 16 bytes, whole in a row of a box. Tiles in turn hide their stores anyway.
        whole = self.contiguous and self.width_subs in (1, 2, 4) and self.out_span > 0
        return plain and one and whole and self.subs == 1 and self.split != 2

    @property
    def _planes_apart(self) -> bool:
        """Whether a tile has planes that may land one by one."""
        return self.strided_box and self.plane_count > 1

    @property
    def _planes_in_turn(self) -> bool:
        if not ((self.straight or self.rolled) and self.mb == 1):
            return False
        # A round is a plane. Dilated taps of tiles of one row are in more planes than there are remainders.
        if self.rolled and any(len(block) != self.plane_count * self.taps_unrolled for (block,) in self.entries):
            return False
        return all(len({self.plane_of(off) for off, _ in block}) == self.plane_count for (block,) in self.entries)

    @property
    def table_bytes(self) -> int:
        """Bytes of the kernel's tables in constant memory; about, and no less."""
        entries, variants = self._multiplied.total, len(self.variants)
        of_entries = entries * (4 + 2 * self.subs + (1 if self.planewise else 0))
        of_variants = variants * (4 * (self.mb + 1) + 8 + 4 * self.subs + 2 + 2)
        rows = sum(self.row_counts)
        bare = sum(times * (fill.planes + fill.runs + fill.parts) for fill, times in self._multiplied.fills)
        return of_entries + of_variants + 4 * rows + 8 * bare + 12 * self.plane_count + 256

    # --- the kernel's macros -----------------------------------------------------------------------------------------

    def macros(
        self, boxed: bool = False, store_unit: int = 0, packs: bool = False, claimed: bool = False, last_rounds: int = 0
    ) -> dict[str, int | float | str]:
        """The kernel's constants by macro name; see kernels/gather.cu.

        ``boxed``: its weights are not packed. ``store_unit``: bytes at multiples of which the result's rows begin and
        end (`gather.store_unit`), an element's if never at more; 0 for a kernel that serves all. ``packs``: it packs
        weights itself. ``claimed``: its blocks claim tiles (`claimable`), all or those of so many ``last_rounds``.
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
        (rows_d, rows_h), (step_d, step_h) = self.rows, self.row_steps
        stretches = self.stretches
        numbers = {first: i for i, first in enumerate(dict.fromkeys(first for first, _ in stretches))}
        alignment = self.vec
        grouped = p.groups > 1
        classed = self.tensor_map and self.classed
        # Producers that copy rows, or make two parts of each value, need most; those that know few pixels, least.
        producer_registers = 72
        if self.channels_last or (self.tensor_map and self.parts == 1):
            producer_registers = 48 if self.channels_last or self.pixels <= 4 * 192 else 56
        elif not self.tensor_map and self.mb * self.nb * self.parts <= 2:
            producer_registers = 96  # consumers of few accumulators do with 160; 7 pixels a thread spill 104 B at 72
        names: dict[str, int | float | str] = {
            "PRECISION": order.index(p.precision),
            "ELEMENT": self.element,
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
            "PACK_WIDE": math.gcd(self.problem.taps, self.pack_taps, 8),
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
            "PLANES": self.plane_count if self.strided_box else len(self.residues),
            "RESIDUES": table(w for _, _, w in self.planes) if self.strided_box else table(self.residues),
            "PLANE_BARRIERS": self.plane_barriers,
            "PLANES_OF_ENTRIES": table(self.plane_of(off) if self.planewise else 0 for off, _ in flat),
            "PLANES_D": table(d for d, _, _ in self.planes),
            "PLANES_H": table(h for _, h, _ in self.planes),
            "TAPS_UNROLLED": self.taps_unrolled,
            "TAPS_LEFT": int(any(len(b) % self.taps_unrolled for blocks in self.entries for b in blocks)),
            "STRAIGHT": int(self.straight),
            "ROLLED": int(self.rolled),
            "ROUND_SHIFTS": table(self.round_shifts),
            "STRETCHES": len(numbers),
            "FIRST_OF_STRETCHES": table(numbers),
            "STRETCHES_OF": table(numbers[first] for first, _ in stretches),
            "VARIANT_ROWS": table(shift for _, shift in stretches),
            "FRAGMENT_SETS": self.fragment_sets,
            "CONTINUED": int(self.continued),
            # Both warpgroups of each kind together have a block's 65,536.
            "PRODUCER_REGISTERS": producer_registers,
            "CONSUMER_REGISTERS": 256 - producer_registers,
            "SHARED_BYTES_PLANNED": self.shared_bytes + (CLAIMS_BYTES if claimed else 0),
            "CLAIMED": int(claimed),
            "LAST_ROUNDS": last_rounds,
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


def useful(tiling: Tiling) -> float:
    """Useful multiplications over issued ones, borders of tiles aside: rows of M, union of taps, chunk padding."""
    issued = sum(tiling.variant_entries) * tiling.cout_blocks * tiling.wgs_m * 64 * tiling.chunks * tiling.chunk
    p = tiling.problem if tiling.shuffle is None else tiling.shuffle.layer
    couts = result_shape(p)[1] // p.groups
    return math.prod(tiling.unroll) * p.taps * tiling.cin_g * couts / max(1, issued)
