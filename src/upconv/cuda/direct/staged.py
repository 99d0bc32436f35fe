"""Gradients on CUDA cores from tiles in shared memory. The kernels are ``staged.cu``.

Depthwise layers, small groups and few channels: a tile of the output's gradient is read once, in whole units, and its
taps meet it in shared memory. (`upconv.cuda.direct.direct_grad` reads every tap through the first-level cache: a stride
of 8 makes each such load eight.)

`choose` tries every tile of a small grid; the cost model counts what a multiprocessor issues, what its shared memory
serves and what the memories bring.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from upconv.cuda import family
from upconv.cuda.compile import jit
from upconv.cuda.direct.direct_grad import full
from upconv.cuda.gpu import Gpu, fma_lanes, threads_per_sm
from upconv.cuda.launches import Given, Int, Launch, Pointer, Scratch, Unit, ints, longs, strides_of
from upconv.cuda.rearrange import batches
from upconv.cuda.scalars import PRECISIONS, geometry
from upconv.derived import derived
from upconv.problem import Pass, Problem

_UNROLLED = 512  # multiply-adds of a thread in a straight stretch of code (longer: registers spill)
_SUMS = 72  # registers of a thread that hold sums (float64: half of them)
_INPUTS = 16  # and the input's elements that meet them (grad-weight; 32 spill)
_UNIT = 16  # bytes
_SECTOR = 32  # bytes that memory brings at a time
_HOISTED = 110  # sums and elements of a column of g from which on the compiler keeps all of them in registers
_BATCH_OF = (4, 20)  # units of 16 bytes, at least and at most, that a thread has on their way to shared memory
_SHARED = 228 << 10  # bytes of a multiprocessor; others have less, which leaves registers of theirs unused
_SPLITS = 512  # ranges of tiles at most; their partial sums are added in a second step
_MAX_BYTES = 64 << 20  # of partial sums
_MOST_WARPS = 16
_REDUCE_THREADS = 256  # of a block that adds the ranges' sums
_POSITIONS = 256, 4096  # of a tile, at least and at most, where lanes are columns (grad-weight)
_LAUNCH = 4e-6  # seconds
_LOADS, _ISSUE, _MIX = 1.0, 1.6, 0.2  # clocks of a wavefront, of four instructions, and of the lesser of both
_OVERLAP = 0.2  # of the second of what limits, beside the first
_SPREAD = 20.0  # clocks of a store whose lanes lie in a sector each
_L2 = 3.3e12  # bytes a second
_LATENCY = 520.0  # clocks that a block waits for memory, for a batch of units
_END = 270.0  # and for its last warps
_UNIT_ISSUE = 12.0  # instructions that bring a unit beside its stores
_X_ISSUE = 38.0  # and an element of the input
_PASS_ISSUE = 70.0  # and a batch of them: its place, its borders


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


@dataclass(frozen=True)
class Choice(family.Defaults):
    """A tile for a problem on a GPU, and what the model thinks of it."""

    family: str
    seconds: float
    """The model's estimate."""
    summary: str
    bound: str
    """What limits it, by the model."""
    problem: Problem
    tile: Tile
    splits: int
    """Ranges of tiles whose sums are added in a second step (grad-weight)."""

    def sources(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all sizes."""
        p = self.problem
        label = f"staged {p.pass_} {str(p).split(' on ')[0]} {p.precision} {p.layout}"
        entries = ("grad_weight", "reduce_staged") if self.tile.weight else ("grad_input",)
        named = [
            f"reduce_staged<Staged<{jit.CONFIG}>>" if e == "reduce_staged" else f"{e}<{jit.CONFIG}>" for e in entries
        ]
        return (Unit(label, jit.instance("staged.cu", self.tile.constants(), named), entries),)

    reads = "contiguous"

    @property
    def packing(self) -> tuple[str, Pass]:
        return "contiguous", self.problem.pass_

    def launches(self, given: Given) -> tuple[Launch, ...]:
        (unit,), p, t = self.sources(), self.problem, self.tile
        tiles_h, tiles_w, tiles = t.blocks_of(p)
        units = given.aligned and t.vector > 1 and _whole_units(p, t)
        sizes = ints((p.batch, *full(p.size), *full(p.out_size), tiles_h, tiles_w, int(units)))
        if not t.weight:
            pointers = Pointer("source"), Pointer("weight"), Pointer("result")
            grid = tiles * t.channel_blocks
            return (Launch(unit, "grad_input", grid, t.threads, t.shared_bytes, (*pointers, *sizes)),)
        count, element = math.prod(p.weight_shape), 8 if p.dtype is torch.float64 else 4
        sums = Pointer(Scratch("sums", self.splits * count * element))
        arguments = (Pointer("input"), Pointer("gradient"), sums, *sizes, Int(-(-tiles // self.splits)))
        grid = _weight_blocks(p, t) * self.splits
        strides = strides_of(p.weight_shape, given.weight)
        to = (sums, Pointer("result"), Int(self.splits), *longs((strides[0], strides[1], strides[-1])))
        return (
            Launch(unit, "grad_weight", grid, t.threads, t.shared_bytes, arguments),
            Launch(unit, "reduce_staged", -(-count // _REDUCE_THREADS), _REDUCE_THREADS, 0, to),
        )


def _whole_units(p: Problem, tile: Tile) -> bool:
    """Whether rows of g end at whole units; a tensor that begins elsewhere is read element by element."""
    return _unit(p, tile) % tile.vector == 0


def _unit(p: Problem, tile: Tile) -> int:
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


# --- the choice ------------------------------------------------------------------------------------------------------


def _weight_blocks(p: Problem, tile: Tile) -> int:
    """Blocks that one range of tiles takes."""
    return tile.channel_blocks * tile.cout_g * tile.axes[0][0]


def choose(p: Problem, gpu: Gpu) -> Choice | str:
    """The tile that the model expects to be fastest, or the sentence why these kernels cannot serve the problem."""
    if p.pass_ not in ("grad-input", "grad-weight"):
        return f"these kernels compute gradients only, not {p.pass_}"
    if p.batch == 0 or 0 in p.size:
        return "an empty input has no work"
    return _choose(p, gpu)


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks; of what CUDA cores cannot do as fast no tile is looked for."""
    if too_long := batches.too_long(p):
        return too_long
    if p.pass_ != "fwd" and best is not None and (least := least_seconds(p, gpu)) > family.weighed(best):
        return f"slower: its multiply-adds alone take {least * 1e3:.3g} ms on CUDA cores"
    return choose(p, gpu)


def least_seconds(p: Problem, gpu: Gpu) -> float:
    """What a problem's multiply-adds alone take, in seconds, by the model of `choose`."""
    rate = fma_lanes(gpu, p.dtype is torch.float64) * gpu.multiprocessors * gpu.clock
    return _ISSUE * p.flops / 2 / rate


@lru_cache(maxsize=4096)
def _choose(p: Problem, gpu: Gpu) -> Choice | str:
    best: Choice | None = None
    for tile in fitting(p, gpu):
        seconds, bound, splits = _cost(p, tile, gpu)
        if tile.blocks_of(p)[2] * tile.channel_blocks >= 2**31:  # of a grid, or their index
            continue
        if best is None or seconds < best.seconds:
            best = Choice("staged", seconds, _summary(p, tile, splits), bound, p, tile, splits)
    return best or "no tile of positions and taps fits these kernels"


def _summary(p: Problem, tile: Tile, splits: int) -> str:
    each = f"{tile.kh}x{tile.kw} taps x {tile.ci} input channels" if tile.weight else f"{tile.ci} input channels"
    lanes = "channels" if tile.lanes_are_channels else "columns"
    ranges = f", {splits} ranges of tiles" if tile.weight else ""
    return (
        f"tiles of {tile.h}x{tile.w} positions in {tile.shared_bytes >> 10} KB, lanes are {lanes}, a thread takes "
        f"{tile.rows} rows x {each}{ranges}"
    )


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
    return replace(tile, vector=_unit(p, tile))


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


@dataclass(frozen=True)
class _Slice:
    """What a multiprocessor does for a block and a slice of g."""

    loads: float
    """Wavefronts of loads and stores, of shared memory above all."""
    issue: float
    """Clocks in which its schedulers issue instructions."""
    rounds: int
    """Times that the block waits for memory."""

    @property
    def clocks(self) -> float:
        return max(_LOADS * self.loads, _ISSUE * self.issue) + _MIX * min(self.loads, self.issue)


def _slice(tile: Tile, gpu: Gpu) -> _Slice:
    element, wide = tile.problem.dtype.itemsize, tile.accumulator // 4
    (kernel_h, step_h, dil_h, _), kernel_w = tile.axes[1], tile.axes[2][0]
    words = tile.span[0] * tile.span[1] * tile.channels / 32
    store, read = (1.0, 1) if tile.lanes_are_channels else tile._conflicts(tile.plane)
    passes = math.prod(tile.passes) * tile.warps  # of warps
    rounds = tile.passes[0] * -(-tile.passes[1] // tile.batch)
    loads = words * store * wide + max(passes, words * element / 4 * _overread(tile.problem, tile))
    issue = passes * (_UNIT_ISSUE + tile.vector * (1 if element == 4 else 2)) + rounds * tile.warps * _PASS_ISSUE
    taps_h = tile.kh if tile.weight else kernel_h
    rows = len({r * step_h + k * dil_h for r in range(tile.rows) for k in range(taps_h)})
    reads = 1.0 * tile.kw * rows * read
    products = tile.kw * taps_h * tile.rows * tile.ci
    if tile.weight:
        strips = tile.h * tile.w // tile.rows / (1 if tile.lanes_are_channels else 32)
        groups = tile.warps // tile.tap_groups
        walks: float = -(-strips // groups) * groups * tile.tap_groups  # of warps, which wait for the last
        reads += tile.rows * tile.ci
        x = tile.h * tile.w * max(tile.ci, tile.channels) / 32
        loads += 2 * x
        issue += _X_ISSUE * x
    else:
        walks = 1.0 * tile.warps
        taps = kernel_h * tile.kw
        reads += taps * (1.0 if tile.lanes_are_channels else tile.weights * tile.accumulator / 16)
        weights = kernel_h * kernel_w * tile.weights / 32
        loads += weights
        issue += 8 * weights
    loads += walks * reads * wide
    lanes = fma_lanes(gpu, tile.accumulator == 8)
    issue = (issue + walks * (reads + (0 if tile.weight else 20))) / 4 + walks * products * 32 / lanes
    return _Slice(loads, issue, rounds)


def _cost(p: Problem, tile: Tile, gpu: Gpu) -> tuple[float, str, int]:
    """(seconds, what limits them, ranges of tiles) of a tile by the model."""
    one = _slice(tile, gpu)
    count = tile.blocks_of(p)[2]
    slices = 1 if tile.weight else tile.axes[0][0] * tile.cout_g
    clocks = slices * one.clocks
    if not tile.weight and p.layout == "channels_last" and not tile.lanes_are_channels:
        clocks += _SPREAD * tile.warps * tile.sums / tile.stored  # lanes store a pixel apart
    block = clocks + slices * (one.rounds * _LATENCY + _END)
    held = resident(tile, gpu)
    blocks = _weight_blocks(p, tile) if tile.weight else tile.channel_blocks
    staged = slices * tile.span[0] * tile.span[1] * tile.channels * _overread(p, tile)
    if tile.weight:
        staged += tile.h * tile.w * max(tile.ci, tile.channels)
    moved = count * blocks * staged * p.dtype.itemsize
    splits, work, tail = 1, count * blocks, 0.0
    if tile.weight:
        splits = ranges(count, blocks, _most_ranges(p, tile), gpu.multiprocessors * held)
        each = -(-count // splits)
        work = blocks * splits
        clocks, block = clocks * each, block * each + tile.sums * 12 * tile.warps + _LATENCY
        tail = 2 * splits * math.prod(p.weight_shape) * tile.accumulator / gpu.bandwidth + splits * 20e-9 + 2e-6
    waves = work / gpu.multiprocessors
    busy = min(float(held), max(1.0, waves))
    full = -(-waves // busy) * busy if waves < 8 * busy else waves + busy / 2  # of the fullest multiprocessor
    compute = full * max(clocks, block / busy) / gpu.clock
    terms = {
        "loads" if one.loads > one.issue else "instruction issue": compute,
        "bytes": (math.prod(p.input_shape) + math.prod(p.output_shape)) * p.dtype.itemsize / gpu.bandwidth,
        "second-level cache": moved / min(_L2, 2 * gpu.bandwidth),
    }
    bound = max(terms, key=lambda name: terms[name])
    second = sorted(terms.values())[1]
    return terms[bound] + _OVERLAP * second + tail + _LAUNCH, bound, splits


def resident(tile: Tile, gpu: Gpu) -> int:
    """Blocks of a tile that a GPU's multiprocessor holds."""
    by_shared = gpu.shared_per_sm // (tile.shared_bytes + 1024)
    return max(1, min(tile.resident, by_shared, threads_per_sm(gpu) // tile.threads))


def _overread(p: Problem, tile: Tile) -> float:
    """Bytes of sectors over those of g's columns, where a column is every so many channels (CHANNELS_LAST)."""
    if tile.lanes_are_channels or p.layout != "channels_last":
        return 1.0
    return min(_SECTOR / p.dtype.itemsize, p.out_channels)


def _most_ranges(p: Problem, tile: Tile) -> int:
    """Ranges of tiles whose partial sums take no more memory than they may."""
    return max(1, min(_SPLITS, _MAX_BYTES // (math.prod(p.weight_shape) * tile.accumulator)))


def ranges(tiles: int, blocks: int, most: int, slots: int) -> int:
    """Ranges into which grad-weight's tiles are cut: so many that blocks fill a GPU's ``slots`` about twice.

    Args:
        tiles: of all images.
        blocks: that one range takes.
        most: ranges, for their partial sums' sake.
        slots: blocks that a GPU holds at a time.
    """
    wanted = max(1, min(tiles, most, round(2 * slots / blocks)))
    return -(-tiles // -(-tiles // wanted))
