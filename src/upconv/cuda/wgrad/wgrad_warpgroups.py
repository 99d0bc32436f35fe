"""A tile of ``wgrad_wgmma.cu`` (sm_90a): who multiplies what of a chunk, in which steps, and how the sums leave.

Pure arithmetic, as all of a tiling is (`upconv.cuda.wgrad.wgrad_tiling`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from upconv.cuda.wgrad.wgrad_boxes import BoxedTiling
from upconv.derived import derived

COMMON_WIDTHS = (32, 64, 128, 256)  # columns that exported files have
_MAX_STACK = 5  # rows of x in one instruction's columns
_UNROLLED = 40  # matrix instructions of a warpgroup between whose ends the tensor cores do not drain


@dataclass(frozen=True)
class WarpgroupTiling(BoxedTiling):
    """A tiling of ``wgrad_wgmma.cu``: warpgroups divide output channels and taps."""

    file: ClassVar[str] = "wgrad_wgmma.cu"
    struct: ClassVar[str] = "WgradWgmma"
    entry: ClassVar[str] = "wgrad_wgmma"
    warpgroups: int = 2
    """That multiply; one more copies."""
    split_m: int = 1
    """Of them, those that divide the output channels."""

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    @property
    def k_slices(self) -> int:
        return 1

    @property
    def of_unit(self) -> int:
        """Taps that share their fragments of g: a column of them, or one."""
        return self.taps[1] if self.stacked else 1

    @derived
    def unit_count(self) -> int:
        """Fragments of g of a warpgroup, for each step of K."""
        return -(-self.set_taps // (self.of_unit * self.subs * (self.warpgroups // self.split_m)))

    @derived
    def entries(self) -> int:
        """Accumulators of 64 rows of a warpgroup."""
        return self.unit_count * self.of_unit

    @derived
    def accumulators(self) -> int:
        """Registers of a thread."""
        return self.entries * self.block[0] // 2

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that copies, and of one that multiplies."""
        if self.warpgroups == 2:
            return 72, 216
        return (80, 144) if self.turned else (56, 152)  # with 56 the warps that turn pixels spill

    @property
    def row_columns(self) -> int:
        """Columns of a matrix instruction that one row of x takes."""
        halves = self.channels_last and not self.turned
        return min(self.block[0], 64) if self.stacked and halves else self.block[0]

    @property
    def stackable(self) -> bool:
        """Whether `stacked` is of use, and rows of x can follow each other in an instruction's columns."""
        width = self.block[0] if not self.channels_last or self.turned else self.x_width
        whole_steps = self.tile[3] * self.element % 32 == 0
        # Neighbours by taps are to be neighbours in shared memory.
        if not whole_steps or self.dilation[1] > 1 or self.stack < 2 or self.lines:
            return False
        if self.channels_last and not self.turned and self.x_width < min(self.block[0], 64):
            return False  # columns beyond a swizzled line are the next row's
        return self.stack <= _MAX_STACK and self.stack * width <= 256

    @derived
    def a_shared(self) -> bool:
        """Whether matrix instructions read g's tile by descriptors: 16-bit rows of 64 channels, whose pixels of a tap
        are neighbours. A stage is given back a chunk later, so that copies want three.

        Where three warpgroups take many rows or channels a fragment serves it gains nothing (docs/experiments.md).
        """
        if not (self.channels_last and self.element == 2 and self.g_width == 64 and self.subs == 1):
            return False
        if self.stages < 3 or not (self.parted or self.steps[2] == 1):
            return False
        return self.warpgroups == 2 or (self.stack <= 2 if self.stacked else self.block[0] <= 64)

    @derived
    def run(self) -> int:
        """Units of a warpgroup that are neighbours along W."""
        width, units = self.taps[2], self.unit_count
        if self.set_taps == width * self.of_unit or width % units == 0:
            return units
        return width if units % width == 0 else 1

    @derived
    def run_words(self) -> int:
        """Words of two pixels (half precision, NCHW) that a run of taps takes for one of its registers."""
        step, dilation, run = self.steps[2], self.dilation[2], self.run
        even_sets = self.sets[2] == 1 or self.taps[2] * dilation % 2 == 0
        known = self.aligned_g and step % 2 == 0 and run * dilation % 2 == 0 and even_sets
        odd = self.padding[2] % 2 if known else 1
        return (odd + (run - 1) * dilation + step) // 2 + 1

    @property
    def shared_words(self) -> bool:
        """Whether neighbouring taps shift their fragments out of words that they load together."""
        if self.element == 4 or self.channels_last or self.interleaved:
            return False
        return self.run > 1 and self.run_words < 2 * self.run

    @derived
    def unrolled(self) -> int:
        """Steps of a warpgroup that are unrolled: as many of K as fit, a power of two.

        ``stacked``: steps of K of every row.
        """
        if self.stacked:
            k = self.tile[3] * self.element // 32
            while k > 1 and k * self.row_steps > _UNROLLED:
                k //= 2
            return k
        k = self.k_steps
        while k > 1 and k * self.entries > _UNROLLED:
            k //= 2
        return k * self.entries

    @derived
    def row_steps(self) -> int:
        """``stacked``: fragments of a warpgroup for one column of K."""
        return self.tile[0] * self.tile[1] * self.spans[1] * self.unit_count

    @derived
    def adds_up(self) -> bool:
        """Whether blocks may write the weight themselves: of several splits as a cluster or together, or of one alone.

        Of 16-bit NCHW tilings not those that have several taps in a fragment, which are slower for an unknown reason,
        but interleaved ones (docs/experiments.md).
        """
        if self.subs > 1 and self.element == 2 and not self.channels_last and not self.interleaved:
            return False
        return self.sums_bytes <= self.shared_bytes - 16 * self.stages - 16

    @derived
    def sums_bytes(self) -> int:
        """Bytes of a block's sums in shared memory, where its stages were."""
        return self.set_taps * (self.block[0] * (self.block[1] + 4) + 8) * 4

    def constants(self, cluster: int = 1, together: int = 0, alone: int = 0) -> dict[str, int]:
        """The kernel's. ``cluster``: splits whose blocks are one; ``together``: they add up in global memory;
        ``alone``: there is one split (all: `adds_up`).
        """
        found = {
            "cluster": cluster,
            "together": bool(together),
            "alone": bool(alone),
            "warpgroups": self.warpgroups,
            "split_m": self.split_m,
            "subs": self.subs,
            "interleaved": self.interleaved,
            "entries": self.entries,
            "stages": self.stages,
            "unrolled": self.unrolled,
            "gapless": self.gapless > 0,
            "aligned_g": self.aligned_g,
            "lines": self.lines,
            "stacked": self.stacked,
            "row_classes": self.classes[0],
            "channel_classes": self.classes[1],
            "box_g": self.box_g,
            "parted": self.parted,
            "a_shared": self.a_shared,
            "g_planes": self.g_planes[0],
            "plane_columns": self.g_planes[1],
            "plane_taps": self.g_planes[2],
            "producer_registers": self.registers[0],
            "consumer_registers": self.registers[1],
            "shared_bytes": self.shared_bytes,
        }
        if self.gapless:
            found |= {"tile_n": 1, "tile_d": 1, "tile_h": 1, "tile_w": self.gapless}
        return super().constants() | found
