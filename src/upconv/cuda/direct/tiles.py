"""Tiles of ``direct.cu`` and ``direct_weight.cu``: what a block computes at a time, and which are tried for a layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch

from upconv.cuda.axes import Axis, any_size, gather_axes, source_shape
from upconv.cuda.family import BEYOND
from upconv.cuda.gpu import H200
from upconv.cuda.scalars import PRECISIONS, geometry
from upconv.derived import derived, derived_from, settled, varied
from upconv.problem import Problem, triple

_UNROLLED = 512  # multiply-adds of a thread for a column of taps (longer: registers spill)
_MOST_UNROLLED = 1024  # and for all taps: 1.0 s of NVRTC
_SUMS = 72  # of a thread (more spill)
_INPUTS = 16  # and the input's elements that meet them (grad-weight; 32 spill)
_UNIT = 16  # bytes
_BATCH_OF = (4, 20)  # units of 16 bytes, at least and at most, that a thread has on their way to shared memory
_RESIDENT = 4  # blocks of a multiprocessor: while one waits for memory, others multiply
_MOST_WARPS = 16
_POSITIONS = 256, 4096  # of a tile, at least and at most, where lanes are columns (grad-weight)


_SHAPE = "problem", "h", "w", "rows", "kh", "vector"
_of_shape = derived_from(*_SHAPE)


@dataclass(frozen=True)
class Tile:
    """What a block computes at a time, for a layer; all constants of the kernels but sizes."""

    problem: Problem
    """The layer; of its sizes nothing is used."""
    h: int
    w: int
    """Cells."""
    rows: int
    """Cells of a thread, one below the other."""
    channels: int = 1
    """Of a thread: the result's, or of grad-weight the input's."""
    chunk: int = 1
    """Channels of the source that a block has at a time (grad-weight: one)."""
    kh: int = 1
    kw: int = 1
    """Taps of a thread along H and W (grad-weight)."""
    warps: int = 8
    vector: int = 1
    """Elements of a unit."""

    # --- geometry ----------------------------------------------------------------------------------------------------

    @derived_from("problem")
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return gather_axes(self.problem)

    @derived_from("problem")
    def geometry(self) -> dict[str, int]:
        return geometry(self.problem)

    @property
    def weight(self) -> bool:
        return self.problem.pass_ == "grad-weight"

    @property
    def forward(self) -> bool:
        return self.problem.pass_ == "fwd"

    @derived_from("problem")
    def groups_of(self) -> tuple[int, int]:
        """Channels of a group, of the source and of the other tensor."""
        cin, cout = self.problem.in_channels // self.problem.groups, self.problem.out_channels // self.problem.groups
        return (cin, cout) if self.forward else (cout, cin)

    @derived_from("problem")
    def lanes_are_channels(self) -> bool:
        return self.problem.layout == "channels_last" and self.groups_of == (1, 1) and self.problem.groups > 8

    @property
    def lanes(self) -> int:
        """Channels of a block where lanes are channels."""
        return min(32, self.problem.groups) if self.lanes_are_channels else 1

    @derived_from("problem")
    def accumulator(self) -> int:
        """Bytes of a word of shared memory."""
        return 8 if self.problem.dtype is torch.float64 else 4

    @derived_from("problem")
    def least(self) -> tuple[int, int]:
        """Where along H and W the source of a cell begins, from the cell's first on."""
        _, h, w = self.axes
        return min(_offsets(h)), min(_offsets(w))

    @property
    def first_w(self) -> int:
        """Columns by which a tile begins early, so that it begins at a unit."""
        return 0 if self.lanes_are_channels else self.least[1] % self.vector

    @_of_shape
    def span(self) -> tuple[int, int]:
        """Rows and columns of the source that a tile needs."""
        _, axis_h, axis_w = self.axes
        h, w = (
            (n - 1) * axis.in_step + max(_offsets(axis)) - min(_offsets(axis)) + 1
            for n, axis in ((self.h, axis_h), (self.w, axis_w))
        )
        if self.weight:  # rows of taps that pad the last group are read, not stored
            h += -self.geometry["kernel_h"] % self.kh * self.geometry["dilation_h"]
        if not self.lanes_are_channels:
            return h, -(-(w + self.first_w) // self.vector) * self.vector
        if self.lanes < self.problem.groups:
            return h, w
        least = self.vector // math.gcd(self.vector, self.lanes)  # columns whose channels are whole units
        return h, -(-w // least) * least

    @_of_shape
    def plane(self) -> int:
        """Words from one plane of columns to the next, of equal residues modulo their step each.

        That of the next few whose stores of units and reads of rows meet in the fewest banks.
        """
        least = -(-self.span[1] // self.axes[2].in_step)
        if self.lanes_are_channels:
            return least
        return min(range(least, least + 9), key=lambda pitch: (sum(self.conflicts(pitch)), pitch))

    def conflicts(self, pitch: int) -> tuple[float, int]:
        """Words in the fullest bank, of a warp's stores of one of its units' columns and of its reads of a tap."""
        step = self.axes[2].in_step
        below = self.rows * self.axes[1].in_step * step * pitch
        return _conflicts(self.vector, step, pitch % 32, min(self.w, 32), below % 32)

    @_of_shape
    def meeting(self) -> tuple[float, int]:
        """Words of a bank that meet in stores of units and in reads of rows (`conflicts`)."""
        return (1.0, 1) if self.lanes_are_channels else self.conflicts(self.plane)

    @_of_shape
    def rows_read(self) -> int:
        """Rows of a column of the source that a thread reads: those that several taps share once."""
        axis, dilation = self.axes[1], self.geometry["dilation_h"]
        offsets = [k * dilation for k in range(self.kh)] if self.weight else _offsets(axis)
        return len({r * axis.in_step + offset for r in range(self.rows) for offset in offsets})

    @derived_from("problem", "kw")
    def columns_read(self) -> int:
        """As `rows_read`; of taps that have no phases each is read."""
        if self.axes[2].out_step > 1:
            return len(set(_offsets(self.axes[2])))
        return self.kw if self.weight else self.geometry["kernel_w"]

    @_of_shape
    def row_pitch(self) -> int:
        return self.span[1] * self.lanes if self.lanes_are_channels else self.axes[2].in_step * self.plane

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def taps_h(self) -> int:
        """Taps along H that a thread has."""
        return self.kh if self.weight else self.geometry["kernel_h"]

    @property
    def tap_groups(self) -> int:
        return -(-self.geometry["kernel_h"] // self.kh) * -(-self.geometry["kernel_w"] // self.kw)

    @derived
    def sums(self) -> int:
        """Of a thread."""
        of_cell = self.kh * self.kw if self.weight else self.rows * self.axes[1].out_step * self.axes[2].out_step
        return of_cell * self.channels

    @property
    def run(self) -> tuple[int, int]:
        """Neighbouring results of a thread, and those that are stored at once."""
        if self.lanes_are_channels:
            return 1, 1
        found, all_channels = self.axes[2].out_step, self.problem.groups == 1 and self.channels == self.groups_of[1]
        if self.problem.layout == "channels_last":
            found = found * self.channels if all_channels else self.channels
        return found, min(found & -found, _UNIT // self.problem.dtype.itemsize)

    @derived
    def weights(self) -> int:
        """Words of a tap's weights."""
        if self.lanes_are_channels:
            return self.lanes
        vec = 16 // self.accumulator
        return 1 if self.channels == 1 else -(-self.channels // vec) * vec

    @derived
    def shared_bytes(self) -> int:
        words = -(-self.chunk * self.span[0] * self.row_pitch // 4) * 4
        if self.weight:
            words += max(self.channels, self.lanes) * self.h * self.w
            at_end = self.warps * self.sums * self.lanes * self.accumulator
        else:
            words += self.chunk * -(-self.taps_h * self.weights // 4) * 4 * self.geometry["kernel_w"]
            run, line = self.run
            at_end = 0 if run == line else self.threads * run * self.problem.dtype.itemsize
        return -(-max(words * self.accumulator, at_end) // _UNIT) * _UNIT

    @property
    def channel_blocks(self) -> int:
        """Blocks that share a tile's positions."""
        if self.lanes_are_channels:
            return -(-self.problem.groups // self.lanes)
        return self.problem.groups * -(-self.groups_of[1] // self.channels)

    def fits(self, shared_limit: int) -> bool:
        """Whether the kernels can run it, within so many bytes of shared memory."""
        lanes = 1 if self.lanes_are_channels else 32
        strips = self.h * self.w // self.rows  # columns of `rows` cells
        of_warps = self.tap_groups <= self.warps if self.weight else strips == self.warps * lanes
        return (
            self.shared_bytes <= shared_limit
            and self.sums <= _SUMS
            and self.warps <= _MOST_WARPS
            and self.unrolled <= _MOST_UNROLLED
            and self.h * self.axes[1].out_step < BEYOND
            and self._registers + 16 <= min(255, 65536 // self.threads)
            and self.h % self.rows == strips % lanes == 0
            and of_warps
        )

    @property
    def unrolled(self) -> int:
        """Multiply-adds of a slice that must be straight code, since each phase has sums of its own."""
        taps_h = self.geometry["kernel_h"] if self.axes[1].out_step > 1 else 1
        taps_w = self.geometry["kernel_w"] if self.axes[2].out_step > 1 else 1
        return 0 if self.weight else taps_h * taps_w * self.rows * self.channels

    def blocks_of(self, p: Problem) -> tuple[int, int, int]:
        """(tiles along H, along W, tiles in all) for a problem of this layer."""
        d, h, w = cells(p)
        tiles_h, tiles_w = -(-h // self.h), -(-w // self.w)
        return tiles_h, tiles_w, p.batch * d * tiles_h * tiles_w

    @derived
    def resident(self) -> int:
        """Blocks that a multiprocessor is to hold, which bounds the registers of their threads."""
        least = 16 * _BATCH_OF[0] // 4 + self._registers
        of_registers = 65536 // (-(-least // 8) * 8 * self.threads)
        # Other GPUs have less shared memory, which leaves registers of theirs unused.
        return max(1, min(of_registers, H200.shared_per_sm // (self.shared_bytes + 1024), _RESIDENT))

    @derived
    def _registers(self) -> int:
        """Of a thread, those that units do not take."""
        words = self.accumulator // 4
        if self.weight:
            ahead, sums = max(self.channels, self.lanes) * self.h * self.w, self.sums + self.rows * self.channels
            column = (self.rows - 1) * self.axes[1].in_step + (self.kh - 1) * self.geometry["dilation_h"] + 1
            sums += min(column, 24)
        else:
            ahead, sums = self.chunk * self.taps_h * self.geometry["kernel_w"] * self.weights, self.sums + 12
            sums += self.weights if self.channels > 1 else 0
        return words * (sums + -(-ahead // self.threads)) + 40

    @derived
    def batch(self) -> int:
        """Units of a thread that are on their way at a time."""
        most = min(65536 // (self.resident * self.threads), 255) - self._registers
        unit = max(1, self.vector * self.problem.dtype.itemsize // 4)
        return max(1, min(most // unit, _BATCH_OF[1], math.prod(self.passes[1:])))

    @derived
    def passes(self) -> tuple[int, int, int]:
        """In which a block's threads bring the units of a tile's rows, its rows, and in NCHW a chunk's channels."""
        pixels = self.problem.layout == "channels_last" and not self.lanes_are_channels
        units = self.span[1] * (self.chunk if pixels else self.lanes) // self.vector
        lines = max(1, self.threads // units)  # at a time
        rows = min(lines, self.span[0])
        channels = 1 if pixels else -(-self.chunk // (lines // rows))
        return -(-units // self.threads), -(-self.span[0] // rows), channels

    @property
    def rounds(self) -> int:
        """Times that a block waits for units of a slice."""
        width, rows, channels = self.passes
        at_once = min(self.batch, rows)
        return width * -(-rows // at_once) * -(-channels // max(1, self.batch // at_once))

    def constants(self) -> dict[str, int]:
        """The kernels', see kernels/direct_tile.cuh."""
        p, (_, axis_h, axis_w) = self.problem, self.axes
        return self.geometry | {
            "precision": PRECISIONS[p.dtype],
            "channels_last": p.layout == "channels_last",
            "forward": self.forward,
            "lanes_are_channels": self.lanes_are_channels,
            "lanes": self.lanes,
            "groups": p.groups,
            "from_g": self.groups_of[0],
            "to_g": self.groups_of[1],
            "tile_h": self.h,
            "tile_w": self.w,
            "rows": self.rows,
            "channels": self.channels,
            "chunk": self.chunk,
            "in_h": axis_h.in_step,
            "in_w": axis_w.in_step,
            "out_h": axis_h.out_step,
            "out_w": axis_w.out_step,
            "min_h": self.least[0],
            "min_w": self.least[1],
            "span_h": self.span[0],
            "span_w": self.span[1],
            "first_w": self.first_w,
            "plane_pitch": self.plane,
            "vector": self.vector,
            "batch": self.batch,
            "threads": self.threads,
            "min_blocks": self.resident,
            **({"kh_tile": self.kh, "kw_tile": self.kw} if self.weight else self._unrolls),
        }

    @property
    def _unrolls(self) -> dict[str, int]:
        """Taps of `direct.cu` along H and W in a straight stretch of code: all where each phase has sums of its own."""
        column, width = self.taps_h * self.rows * self.channels, self.geometry["kernel_w"]
        fits = column <= _UNROLLED or self.axes[1].out_step > 1
        few = min(2, width) if width <= 4 and column <= _UNROLLED // 8 else 1
        return {
            "unroll_h": self.taps_h if fits else 1,
            "unroll_w": width if self.axes[2].out_step > 1 else few,
        }


@lru_cache(maxsize=4096)
def _offsets(axis: Axis) -> tuple[int, ...]:
    return tuple(offset for _, taps in axis.taps for _, offset in taps)


@lru_cache(maxsize=4096)
def _conflicts(vector: int, step: int, pitch: int, width: int, below: int) -> tuple[float, int]:
    stores = [
        _fullest((lane * vector + k) % step * pitch + (lane * vector + k) // step for lane in range(32))
        for k in range(vector)
    ]
    return sum(stores) / vector, _fullest(lane % width + lane // width * below for lane in range(32))


def _fullest(words: Iterable[int]) -> int:
    """Words of the bank that has most, of different words."""
    banks = [0] * 32
    for word in words:
        banks[word % 32] += 1
    return max(banks)


@lru_cache(maxsize=1024)
def cells(p: Problem) -> tuple[int, int, int]:
    """Along D, H and W: results of the forward along D, a stride of them along H and W, else inputs."""
    size = p.size
    if p.pass_ == "fwd":
        size = tuple(-(-out // (s if i >= p.rank - 2 else 1)) for i, (out, s) in enumerate(zip(p.out_size, p.stride)))
    return triple(size)


def whole_units(p: Problem, tile: Tile) -> bool:
    """Whether the source's rows end at whole units; a tensor that begins elsewhere is read element by element."""
    return unit_of(p, tile) % tile.vector == 0


def unit_of(p: Problem, tile: Tile) -> int:
    """Elements of the widest unit for a problem and a tile that has none yet."""
    most, step, width = _UNIT // p.dtype.itemsize, tile.axes[2].in_step, source_shape(p)[-1]
    if tile.lanes_are_channels and tile.lanes == p.groups:  # rows are lines of all channels
        return math.gcd(most, *(n * p.groups for n in (tile.w * step, tile.least[1], width)))
    if tile.lanes_are_channels:
        return math.gcd(most, p.groups)
    if p.layout == "channels_last" and tile.groups_of[0] * p.groups > 1:
        return 1
    # Wider, and the words of a unit would meet in a quarter of the banks.
    return math.gcd(min(most, 4), tile.w * step, width)


def weight_blocks(tile: Tile) -> int:
    """Blocks that one range of tiles takes (grad-weight)."""
    return tile.channel_blocks * tile.groups_of[0] * tile.geometry["kernel_d"]


# --- which are tried -------------------------------------------------------------------------------------------------


def tried(p: Problem) -> Iterator[Iterable[Tile]]:
    """The tiles worth a look; of a weight's gradient, where none fits, tiles larger than the image."""
    layer = any_size(p)
    if p.pass_ != "grad-weight":
        yield _tiles(layer, p)
        return
    yield _weight_tiles(layer, p)
    yield _weight_tiles(layer, p, beyond=True)


def _shaped(probe: Tile, p: Problem, **shape: int) -> Tile:
    """A tile of a shape with the problem's units; what is varied from it has the numbers that follow from these."""
    tile = varied(probe, **shape)
    return settled(varied(tile, vector=unit_of(p, tile)), *_SHAPE)


def _shapes(probe: Tile, p: Problem) -> tuple[list[int], list[int]]:
    """Rows of a thread and columns of a tile that are tried."""
    _, height, width = cells(p)
    most = min(128, 1 << (width - 1).bit_length())
    rows = [n for n in (1, 2, 4, 8) if n == 1 or n < 2 * height]
    if probe.lanes_are_channels:
        return rows, [w for w in (1, 2, 4, 8, 16) if w <= most]
    return rows, sorted({max(1, most // n) for n in (1, 2, 4)})


def _tiles(layer: Problem, p: Problem) -> Iterator[Tile]:
    """Of the forward and of grad-input."""
    probe = Tile(layer, 1, 1, 1)
    rows, widths = _shapes(probe, p)
    to = probe.groups_of[1]
    channels = sorted({-(-to // -(-to // n)) for n in (1, 4, 8, 16, 32)})
    chunks = sorted({min(n, probe.groups_of[0]) for n in (1, 4, 16)})
    lanes, shapes = 1 if probe.lanes_are_channels else 32, []
    for warps, r, w in product((1, 4, 8), rows, widths):
        if w <= warps * lanes:
            shapes.append(_shaped(probe, p, h=warps * lanes // w * r, w=w, rows=r, warps=warps))
    for of_thread, shape in product(channels, shapes):
        tile = varied(shape, channels=of_thread)
        if tile.sums <= _SUMS:
            yield from (varied(tile, chunk=chunk) for chunk in chunks)


def _weight_tiles(layer: Problem, p: Problem, beyond: bool = False) -> Iterator[Tile]:
    """Of grad-weight; ``beyond``: those of one warp's positions, whatever the image has."""
    probe = Tile(layer, 1, 1, 1)
    (rows, widths), (_, height, width), cin = _shapes(probe, p), cells(p), probe.groups_of[1]
    kernel_h, kernel_w = probe.geometry["kernel_h"], probe.geometry["kernel_w"]
    lanes = 1 if probe.lanes_are_channels else 32
    probe = varied(probe, kh=-(-kernel_h // -(-kernel_h // 16)))
    shapes = [_shaped(probe, p, h=-(-lanes // w), w=w) for w in widths] if beyond else []
    for r, w, groups in () if beyond else product(rows, widths, (1, 2, 4, 8, 16)):
        if lanes > 1 and not min(_POSITIONS[0], height * width) <= r * w * groups <= _POSITIONS[1]:
            continue
        if groups * w % lanes == 0 and groups * r < 4 * height:
            shapes.append(_shaped(probe, p, h=groups * r, w=w, rows=r))
    for ci in (1,) if cin == 1 else tuple(n for n in (2, 4, 8) if n < 2 * cin):
        for kw in sorted({-(-kernel_w // n) for n in range(1, kernel_w + 1)}):
            tile = varied(probe, channels=ci, kw=kw)
            if tile.sums > _SUMS or tile.tap_groups > _MOST_WARPS:
                continue
            warps = tile.tap_groups * max(1, 8 // tile.tap_groups)
            tiles = (varied(shape, channels=ci, kw=kw, warps=warps) for shape in shapes)
            yield from (one for one in tiles if beyond or one.rows * ci <= _INPUTS)
