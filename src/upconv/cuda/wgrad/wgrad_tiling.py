"""How a weight's gradient is cut into the grad-weight kernels' tiles: pure arithmetic.

`Tiling` is what both kernels share, `SyncTiling` those of ``wgrad.cu``; those of ``wgrad_wgmma.cu`` are in
`upconv.cuda.wgrad.wgrad_warpgroups`.

A chunk is a box of positions q of the input; a tap of a position lies at ``q * stride + tap * dilation - padding`` of
the output's gradient ``g``. All axes are three (D, H, W); 1-D and 2-D problems have leading axes of size 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from upconv.cuda.compile import jit
from upconv.derived import derived, derived_from, derived_without
from upconv.problem import Problem, Triple, triple

Chunk = tuple[int, int, int, int]
"""Images and positions along D, H and W."""
of_chunk = derived_without("stages")

WARPS = 8  # of the mma.sync kernel


def counts(p: Problem, chunk: Chunk, halo: int) -> tuple[int, int, int, int]:
    """Chunks of a problem per axis: images, D, H, W."""
    d, h, w = triple(p.size, 1)
    n, d, h, w = (-(-size // of) for size, of in zip((p.batch, d, h + halo, w), chunk))
    return n, d, h, w


class Rows(NamedTuple):
    """Rows of g's tile along D or H."""

    held: int
    of_q: int
    """Rows from a position's to the next position's."""
    of_tap: int
    """Rows from a tap's to the next tap's."""
    apart: int
    """Rows of g from one that is held to the next: others no tap reads."""


@dataclass(frozen=True)
class Tiling:
    """A block's tile and the kernel's constants; everything but the sizes of input and batch."""

    file: ClassVar[str] = ""
    """The kernel's source."""
    entry: ClassVar[str] = ""
    """What leaves partial sums to a second step."""

    problem: Problem
    block: tuple[int, int]
    """Input channels x output channels of a block."""
    taps: Triple
    """Taps (D, H, W) of a set."""
    tile: Chunk
    """Positions q of a chunk, of whose rows K is."""
    aligned: bool = True
    """NCHW: rows of the input begin at 16 bytes."""

    # --- the layer ---------------------------------------------------------------------------------------------------

    @derived_from("problem")
    def kernel(self) -> Triple:
        return triple(self.problem.kernel)

    @derived_from("problem")
    def steps(self) -> Triple:
        return triple(self.problem.stride)

    @derived_from("problem")
    def dilation(self) -> Triple:
        return triple(self.problem.dilation)

    @derived_from("problem")
    def padding(self) -> Triple:
        return triple(self.problem.padding, 0)

    @derived_from("problem")
    def element(self) -> int:
        return self.problem.dtype.itemsize

    @derived_from("problem")
    def vec(self) -> int:
        return 16 // self.element

    @derived_from("problem")
    def channels_last(self) -> bool:
        return self.problem.layout == "channels_last"

    @derived_from("problem")
    def channels(self) -> tuple[int, int]:
        """Input and output channels of a group."""
        p = self.problem
        return p.in_channels // p.groups, p.out_channels // p.groups

    # --- M, N and taps -----------------------------------------------------------------------------------------------

    @derived_from("problem", "taps")
    def sets(self) -> Triple:
        d, h, w = (-(-k // t) for k, t in zip(self.kernel, self.taps))
        return d, h, w

    @derived_from("problem", "taps")
    def set_taps(self) -> int:
        return math.prod(self.taps)

    @derived_from("problem", "block", "taps")
    def tiles(self) -> int:
        """Blocks that one split of K takes."""
        channel_tiles = math.prod(-(-count // of) for count, of in zip(self.channels, self.block))
        return self.problem.groups * channel_tiles * math.prod(self.sets)

    # --- K and shared memory -----------------------------------------------------------------------------------------

    @of_chunk
    def rows(self) -> tuple[Rows, Rows]:
        """Rows of g (D, H) that a chunk holds."""
        return self._rows(0), self._rows(1)

    def _rows(self, axis: int) -> Rows:
        count, taps, step, dilation = self.tile[1 + axis], self.taps[axis], self.steps[axis], self.dilation[axis]
        apart = math.gcd(step if count > 1 else 0, dilation if taps > 1 else 0) or 1
        return Rows(((count - 1) * step + (taps - 1) * dilation) // apart + 1, step // apart, dilation // apart, apart)

    @of_chunk
    def columns(self) -> int:
        """Columns of g from the first that a chunk's taps read to the last."""
        return (self.tile[3] - 1) * self.steps[2] + (self.taps[2] - 1) * self.dilation[2] + 1

    @property
    def gapless(self) -> bool:
        """Whether a chunk is a box of any shape, whose positions in their order are the one row of `tile`."""
        return False

    @property
    def chunk(self) -> Chunk:
        """Positions of a chunk, as they are in the tensor."""
        return self.tile

    @property
    def halo(self) -> int:
        """Rows of x's tile ahead of the chunk's own."""
        return 0

    @of_chunk
    def strips(self) -> int:
        """Strips of 8 positions of a row."""
        return math.prod(self.tile) // 8

    @property
    def k_steps(self) -> int:
        return self.strips if self.element == 4 else self.strips // 2

    @of_chunk
    def units(self) -> tuple[int, int]:
        """16-byte units of a row of one channel (NCHW) of x and of g."""
        x = self.tile[3] + (0 if self.aligned else self.vec - 1)
        return -(-x // self.vec), -(-(self.columns + self.vec - 1) // self.vec)

    @of_chunk
    def g_row_units(self) -> int:
        """16-byte units from one channel's row of g to the next's (NCHW): an odd number, for banks."""
        return self.units[1] | 1

    @of_chunk
    def g_rows(self) -> int:
        """Rows of g's tile, of all images."""
        of_d, of_h = self.rows
        return self.tile[0] * of_d.held * of_h.held

    @of_chunk
    def g_bytes(self) -> int:
        """Bytes of g's tile in shared memory."""
        return self.g_rows * (self.columns if self.channels_last else self.block[1]) * self.g_pitch * self.element

    @of_chunk
    def g_units(self) -> int:
        """16-byte copies of g's tile."""
        if self.channels_last:
            return self.g_rows * self.columns * -(-self.block[1] // self.vec)
        return self.g_rows * self.block[1] * self.units[1]

    @property
    def g_pitch(self) -> int:
        """Elements of g's tile from one pixel to the next, or (NCHW) from one channel's row to the next."""
        raise NotImplementedError

    @property
    def needs_alignment(self) -> bool:
        """Whether both tensors must begin at 16 bytes."""
        return self.channels_last or self.aligned

    def counts(self, p: Problem) -> tuple[int, int, int, int]:
        """Chunks per axis: images, D, H, W."""
        return counts(p, self.chunk, self.halo)

    def chunks(self, p: Problem) -> int:
        """All chunks of a problem."""
        return math.prod(self.counts(p))

    @derived_from("block", "taps")
    def sums_bytes(self) -> int:
        """Bytes of the record that a block leaves of its sums."""
        return self.set_taps * (self.block[0] * (self.block[1] + 4) + 8) * 4

    def constants(self) -> dict[str, int]:
        """The kernel's."""
        found = {
            "precision": jit.PRECISIONS[self.problem.precision],
            "channels_last": self.channels_last,
            "gapless": self.gapless,
            "groups": self.problem.groups,
            "cin": self.channels[0],
            "cout": self.channels[1],
            "block_ci": self.block[0],
            "block_co": self.block[1],
            "g_columns": self.columns,
            "g_units": self.units[1],
            "g_pitch": self.g_pitch,
            "tile_n": self.tile[0],
        }
        for i, axis in enumerate("dhw"):
            found |= {
                f"kernel_{axis}": self.kernel[i],
                f"step_{axis}": self.steps[i],
                f"dilation_{axis}": self.dilation[i],
                f"padding_{axis}": self.padding[i],
                f"taps_{axis}": self.taps[i],
                f"sets_{axis}": self.sets[i],
                f"tile_{axis}": self.tile[1 + i],
            }
        for axis, rows in zip("dh", self.rows):
            found |= {
                f"g_rows_{axis}": rows.held,
                f"q_rows_{axis}": rows.of_q,
                f"tap_rows_{axis}": rows.of_tap,
                f"apart_{axis}": rows.apart,
            }
        return found


@dataclass(frozen=True)
class SyncTiling(Tiling):
    """A tiling of ``wgrad.cu`` (mma.sync): warps divide channels, and what is left of them K."""

    file: ClassVar[str] = "wgrad.cu"
    entry: ClassVar[str] = "wgrad"
    threads: ClassVar[int] = 32 * WARPS
    warp: tuple[int, int] = (16, 8)
    """Input channels x output channels of a warp."""

    @derived_from("block", "warp")
    def warps(self) -> int:
        """Warps that divide the channels."""
        return self.block[0] // self.warp[0] * (self.block[1] // self.warp[1])

    @property
    def k_slices(self) -> int:
        """Warps that divide K, each with sums of its own."""
        return WARPS // self.warps

    @property
    def promote(self) -> bool:
        """IEEE: sums leave the tensor cores, which truncate them, after every chunk."""
        return self.problem.precision == "ieee"

    def _pitch(self, channels: int) -> int:
        """Elements from one pixel to the next (channels_last)."""
        return (channels + 23) // 32 * 32 + 8 if self.element == 4 else channels + 8

    @property
    def x_pitch(self) -> int:
        """As `g_pitch`, of x's tile."""
        return self._pitch(self.block[0]) if self.channels_last else (self.units[0] | 1) * self.vec

    @property
    def g_pitch(self) -> int:
        return self._pitch(self.block[1]) if self.channels_last else self.g_row_units * self.vec

    @property
    def x_bytes(self) -> int:
        """Bytes of x's tile in shared memory."""
        n, d, h, w = self.tile
        return n * d * h * (w if self.channels_last else self.block[0]) * self.x_pitch * self.element

    @derived
    def shared_bytes(self) -> int:
        return 2 * (self.x_bytes + self.g_bytes)

    @property
    def copied_units(self) -> int:
        """16-byte copies of a chunk."""
        n, d, h, w = self.tile
        if self.channels_last:
            return n * d * h * w * -(-self.block[0] // self.vec) + self.g_units
        return n * d * h * self.block[0] * self.units[0] + self.g_units

    def constants(self) -> dict[str, int]:
        return super().constants() | {
            "warp_m": self.warp[0],
            "warp_n": self.warp[1],
            "aligned_x": self.aligned,
            "x_units": self.units[0],
            "x_pitch": self.x_pitch,
            "row_classes": 1,
            "shared_bytes": self.shared_bytes,
        }
