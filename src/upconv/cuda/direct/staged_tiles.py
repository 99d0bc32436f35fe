"""Tiles of ``staged.cu``: what a block computes at a time, and which of them are tried for a layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from upconv.cuda.gpu import Gpu
from upconv.cuda.scalars import PRECISIONS, geometry
from upconv.derived import derived
from upconv.problem import Problem

_UNROLLED = 512  # multiply-adds of a thread in a straight stretch of code (longer: registers spill)
_SUMS = 72  # registers of a thread that hold sums (float64: half of them)
_INPUTS = 16  # and the input's elements that meet them (grad-weight; 32 spill)
_UNIT = 16  # bytes
_HOISTED = 110  # sums and elements of a column of g from which on the compiler keeps all of them in registers
_BATCH_OF = (4, 20)  # units of 16 bytes, at least and at most, that a thread has on their way to shared memory
_SHARED = 228 << 10  # bytes of a multiprocessor; others have less, which leaves registers of theirs unused
_MOST_WARPS = 16
_POSITIONS = 256, 4096  # of a tile, at least and at most, where lanes are columns (grad-weight)


class Unfit(ValueError):
    """A tile that the kernels cannot run, and why."""


@dataclass(frozen=True)
class Tile:
    """What a block computes at a time, for a layer; all constants of the kernels but sizes.

    Raises (from `checked`): Unfit.
    """

    problem: Problem
    """The layer; of its sizes nothing is used."""
    h: int
    w: int
    rows: int
    """Positions of a thread, one below the other."""
    ci: int = 1
    """Input channels of a thread."""
    kh: int = 1
    kw: int = 1
    """Taps of a thread along H and W (of grad-input all)."""
    warps: int = 8
    vector: int = 1
    """Elements of a unit."""

    # --- geometry ----------------------------------------------------------------------------------------------------

    @derived
    def axes(self) -> tuple[tuple[int, int, int, int], ...]:
        """(kernel, stride, dilation, padding) along D, H and W."""
        p = self.problem
        lead = ((1, 1, 1, 0),) * (3 - p.rank)
        return lead + tuple(zip(p.kernel, p.stride, p.dilation, p.padding))

    @property
    def weight(self) -> bool:
        return self.problem.pass_ == "grad-weight"

    @property
    def cin_g(self) -> int:
        return self.problem.in_channels // self.problem.groups

    @property
    def cout_g(self) -> int:
        return self.problem.out_channels // self.problem.groups

    @property
    def lanes_are_channels(self) -> bool:
        return self.problem.layout == "channels_last" and self.cin_g == self.cout_g == 1 and self.problem.groups > 8

    @property
    def channels(self) -> int:
        """Channels of a block where lanes are channels."""
        return min(32, self.problem.groups) if self.lanes_are_channels else 1

    @property
    def accumulator(self) -> int:
        """Bytes of a word of shared memory."""
        return 8 if self.problem.dtype is torch.float64 else 4

    @property
    def shift(self) -> int:
        """Columns by which a tile of g begins early, so that it begins at a unit."""
        return 0 if self.lanes_are_channels else -self.axes[2][3] % self.vector

    @derived
    def span(self) -> tuple[int, int]:
        """Rows and columns of g that a tile needs."""
        (_, (kernel_h, step_h, dil_h, _), (kernel_w, step_w, dil_w, _)) = self.axes
        if self.weight:  # rows of taps that pad the last group are read, not stored
            kernel_h = -(-kernel_h // self.kh) * self.kh
        h = (self.h - 1) * step_h + (kernel_h - 1) * dil_h + 1
        w = (self.w - 1) * step_w + (kernel_w - 1) * dil_w + 1
        if not self.lanes_are_channels:
            return h, -(-(w + self.shift) // self.vector) * self.vector
        if self.channels < self.problem.groups:
            return h, w
        least = self.vector // math.gcd(self.vector, self.channels)  # columns whose channels are whole units
        return h, -(-w // least) * least

    @derived
    def plane(self) -> int:
        """Words from one plane of columns to the next, of equal residues modulo the stride each.

        That of the next few whose stores of units and reads of rows meet in the fewest banks.
        """
        step = self.axes[2][1]
        least = -(-self.span[1] // step)
        if self.lanes_are_channels:
            return least
        return min(range(least, least + 9), key=lambda pitch: (sum(self._conflicts(pitch)), pitch))

    def _conflicts(self, pitch: int) -> tuple[float, int]:
        """Words in the fullest bank, of a warp's stores of one of its units' columns and of its reads of a tap."""
        step = self.axes[2][1]
        below = self.rows * self.axes[1][1] * step * pitch
        return _conflicts(self.vector, step, pitch % 32, min(self.w, 32), below % 32)

    @derived
    def row_pitch(self) -> int:
        return self.span[1] * self.channels if self.lanes_are_channels else self.axes[2][1] * self.plane

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tap_groups(self) -> int:
        return -(-self.axes[1][0] // self.kh) * -(-self.axes[2][0] // self.kw)

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.kh * self.kw * self.ci if self.weight else self.rows * self.ci

    @property
    def stored(self) -> int:
        """Input channels that a thread stores at a time (grad-input, CHANNELS_LAST)."""
        return math.gcd(self.ci, self.cin_g, _UNIT // self.problem.dtype.itemsize)

    @property
    def weights(self) -> int:
        """Words of a tap's weights (grad-input)."""
        if self.lanes_are_channels:
            return self.channels
        vec = 16 // self.accumulator
        return 1 if self.ci == 1 else -(-self.ci // vec) * vec

    @derived
    def shared_bytes(self) -> int:
        g = -(-self.span[0] * self.row_pitch // 4) * 4
        column = self.axes[1][0] * self.weights
        if self.weight:
            words = g + max(self.ci, self.channels) * self.h * self.w
            words = max(words, self.warps * self.sums * self.channels)
        else:
            words = g + -(-column // 4) * 4 * self.axes[2][0]
        return -(-words * self.accumulator // 16) * 16

    @property
    def channel_blocks(self) -> int:
        """Blocks that share a tile's positions."""
        if self.lanes_are_channels:
            return -(-self.problem.groups // self.channels)
        return self.problem.groups * -(-self.cin_g // self.ci)

    def checked(self, shared_limit: int) -> Tile:
        """This tile, when the kernels can run it."""
        if self.shared_bytes > shared_limit:
            raise Unfit(f"the tile takes {self.shared_bytes} bytes of shared memory, the device has {shared_limit}")
        if self.sums > (_SUMS // 2 if self.accumulator == 8 else _SUMS):
            raise Unfit(f"{self.sums} sums of a thread are too many")
        if not 1 <= self.warps <= _MOST_WARPS or (self.weight and self.tap_groups > self.warps):
            raise Unfit(f"{self.warps} warps cannot share {self.tap_groups} groups of taps")
        if self._registers + 16 > min(255, 65536 // self.threads):
            raise Unfit(f"a thread wants {self._registers} registers")
        lanes = 1 if self.lanes_are_channels else 32
        units = self.h * self.w // self.rows
        if self.h % self.rows or units % lanes or (not self.weight and units != self.warps * lanes):
            raise Unfit(f"{self.h} x {self.w} positions by {self.rows} are not those of {self.warps} warps")
        return self

    def blocks_of(self, p: Problem) -> tuple[int, int, int]:
        """(tiles along H, along W, tiles in all) for a problem of this layer."""
        d, h, w = (1,) * (3 - p.rank) + p.size
        tiles_h, tiles_w = -(-h // self.h), -(-w // self.w)
        return tiles_h, tiles_w, p.batch * d * tiles_h * tiles_w

    @derived
    def resident(self) -> int:
        """Blocks that a multiprocessor is to hold, which bounds the registers of their threads."""
        least = 16 * _BATCH_OF[0] // 4 + self._registers
        return max(1, min(65536 // (-(-least // 8) * 8 * self.threads), _SHARED // (self.shared_bytes + 1024), 4))

    @property
    def _registers(self) -> int:
        """Of a thread, those that units do not take."""
        words = self.accumulator // 4
        _, step_h, dil_h, _ = self.axes[1]
        if self.weight:
            ahead, sums = max(self.ci, self.channels) * self.h * self.w, self.sums + self.rows * self.ci
            column = (self.rows - 1) * step_h + (self.kh - 1) * dil_h + 1  # of g, of which some are on their way
            # A long column is counted whole: beside many sums it spills (docs/experiments.md).
            sums += column if self.sums + column > _HOISTED else min(column, 24)
        else:
            ahead, sums = self.axes[1][0] * self.axes[2][0] * self.weights, self.sums + 12
            sums += self.weights if self.ci > 1 else 0
        return words * (sums + -(-ahead // self.threads)) + 40

    @property
    def batch(self) -> int:
        """Units of a thread that are on their way at a time."""
        most = min(65536 // (self.resident * self.threads), 255) - self._registers
        unit = max(1, self.vector * self.problem.dtype.itemsize // 4)
        return max(1, min(most // unit, _BATCH_OF[1], self.passes[1]))

    @derived
    def passes(self) -> tuple[int, int]:
        """In which a block's threads bring the units of a tile's rows, and its rows."""
        units = self.span[1] * self.channels // self.vector
        return -(-units // self.threads), -(-self.span[0] // max(1, self.threads // units))

    def constants(self) -> dict[str, int]:
        """The kernels', see kernels/staged.cu."""
        p = self.problem
        return geometry(p) | {
            "precision": PRECISIONS[p.dtype],
            "channels_last": p.layout == "channels_last",
            "lanes_are_channels": self.lanes_are_channels,
            "channels": self.channels,
            "groups": p.groups,
            "cin_g": self.cin_g,
            "cout_g": self.cout_g,
            "tile_h": self.h,
            "tile_w": self.w,
            "rows": self.rows,
            "ci_tile": self.ci,
            "span_h": self.span[0],
            "span_w": self.span[1],
            "shift": self.shift,
            "plane_pitch": self.plane,
            "vector": self.vector,
            "batch": self.batch,
            "threads": self.threads,
            "min_blocks": self.resident,
            "kw_tile": self.kw,
            "kh_tile": self.kh if self.weight else 1,
            **self._of_input,
        }

    @property
    def _of_input(self) -> dict[str, int]:
        """The constants of the gradient for the input, which are 1 for the other's."""
        if self.weight:
            return dict.fromkeys(("weights_read", "stored", "unroll_h", "unroll_w"), 1)
        taps_h, taps_w = self.axes[1][0], self.axes[2][0]
        column = taps_h * self.rows * self.ci
        return {
            "weights_read": 1 if self.lanes_are_channels else self.weights,
            "stored": self.stored,
            "unroll_h": taps_h if column <= _UNROLLED else 1,
            "unroll_w": min(2, self.kw) if taps_w <= 4 and column <= _UNROLLED // 8 else 1,
        }


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


def whole_units(p: Problem, tile: Tile) -> bool:
    """Whether rows of g end at whole units; a tensor that begins elsewhere is read element by element."""
    return unit_of(p, tile) % tile.vector == 0


def unit_of(p: Problem, tile: Tile) -> int:
    """Elements of the widest unit for a problem and a tile that has none yet."""
    most = _UNIT // p.dtype.itemsize
    (_, step, _, pad), out = tile.axes[2], p.out_size[-1]
    if tile.lanes_are_channels and tile.channels == p.groups:  # rows are lines of all channels
        return math.gcd(most, *(n * p.groups for n in (tile.w * step, pad, out)))
    if tile.lanes_are_channels:
        return math.gcd(most, p.groups)
    if p.layout == "channels_last" and p.out_channels > 1:
        return 1
    # Wider, and the words of a unit would meet in a quarter of the banks.
    return math.gcd(min(most, 4), tile.w * step, out)


def weight_blocks(p: Problem, tile: Tile) -> int:
    """Blocks that one range of tiles takes."""
    return tile.channel_blocks * tile.cout_g * tile.axes[0][0]


def fitting(p: Problem, gpu: Gpu) -> Iterator[Tile]:
    """Those of `tiles` that a GPU can run; of a weight's gradient with few positions, tiles larger than the image."""
    found = False
    for tile in tiles(p):
        with suppress(Unfit):
            yield tile.checked(gpu.shared_bytes)
            found = True
    if not found and p.pass_ == "grad-weight":
        for tile in tiles(p, beyond=True):
            with suppress(Unfit):
                yield tile.checked(gpu.shared_bytes)


def _with_units(p: Problem, tile: Tile) -> Tile:
    return replace(tile, vector=unit_of(p, tile))


def tiles(p: Problem, beyond: bool = False) -> Iterator[Tile]:
    """Every tile that is tried for a layer; ``beyond``: those of one warp's positions, whatever the image has."""
    layer = p.with_(batch=1, size=tuple(1024 + 2 * pad // s for pad, s in zip(p.padding, p.stride)))
    rank, cin = p.rank, p.in_channels // p.groups
    height, width = (p.size[-2] if rank > 1 else 1), p.size[-1]
    probe = Tile(layer, 1, 1, 1)
    most = _SUMS // 2 if probe.accumulator == 8 else _SUMS
    rows = [n for n in (1, 2, 4, 8) if n == 1 or n < 2 * height]
    most_w = min(128, 1 << (width - 1).bit_length())
    widths = [w for w in (1, 2, 4, 8, 16) if w <= most_w]
    if not probe.lanes_are_channels:
        widths = sorted({max(1, most_w // n) for n in (1, 2, 4)})
    if p.pass_ == "grad-input":
        per = (1,) if cin == 1 else tuple({-(-cin // -(-cin // n)) for n in (4, 8, 16, 32)})
        kernel_h, kernel_w = probe.axes[1][0], probe.axes[2][0]
        for ci, warps, r, w in product(sorted(per), (4, 8), rows, widths):
            units = warps * (1 if probe.lanes_are_channels else 32)
            if w <= units and r * ci <= most:
                yield _with_units(p, Tile(layer, units // w * r, w, r, ci, kernel_h, kernel_w, warps))
        return
    kernel_h, kernel_w = probe.axes[1][0], probe.axes[2][0]
    kh = -(-kernel_h // -(-kernel_h // 16))
    for ci in (1,) if cin == 1 else tuple(n for n in (2, 4, 8) if n < 2 * cin):
        for kw in sorted({-(-kernel_w // n) for n in range(1, kernel_w + 1)}):
            tile = Tile(layer, 1, 1, 1, ci, kh, kw)
            if tile.sums > most or tile.tap_groups > _MOST_WARPS:
                continue
            warps = tile.tap_groups * max(1, 8 // tile.tap_groups)
            lanes = 1 if probe.lanes_are_channels else 32
            if beyond:
                yield from (_with_units(p, Tile(layer, -(-lanes // w), w, 1, ci, kh, kw, warps)) for w in widths)
                continue
            for r, w, groups in product(rows, widths, (1, 2, 4, 8, 16)):
                if lanes > 1 and not min(_POSITIONS[0], height * width) <= r * w * groups <= _POSITIONS[1]:
                    continue
                if groups * w % lanes == 0 and groups * r < 4 * height and r * ci <= _INPUTS:
                    yield _with_units(p, Tile(layer, groups * r, w, r, ci, kh, kw, warps))
