"""Taps in pairs in NumPy: what ``kernels/pairs.cu`` computes, from where it has each value.

Boxes of the copy engine, packed weights, the lanes' fragments and the descriptors' rows, sums by the registers that
have them, and stores: every index is the kernel's own, so a wrong plan or formula gives wrong results.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from subpixel_interpreter import weights
from upconv.cuda.pairs import Tile
from upconv.problem import Problem

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Slot = TypeVar("Slot", int, NDArray[np.int64])

THREAD = np.arange(128)


class Group(NamedTuple):
    n: int
    d: int
    h: int
    w: int


class PairsInterpreter:
    """Runs a tile on a problem of its layer."""

    def __init__(self, tile: Tile) -> None:
        self.tile, self.m = tile, tile.macros()
        names = ("CIN", "COUT", "COLUMNS", "MB", "GROUP", "CHANNELS", "PITCH", "LINE", "LEAD", "SLOT", "SLOTS_LANE")
        self.cin, self.cout, self.columns, self.mb, self.group, *rest = (int(self.m[name]) for name in names)
        self.channels, self.pitch, self.line, self.lead, self.slot, self.slots_lane = rest
        self.first = int(str(self.m["FIRST"]).strip("()"))
        self.kernel, self.step = (tuple(int(self.m[f"{name}_{a}"]) for a in "DHW") for name in ("KERNEL", "STEP"))
        self.pad, self.dilation = (tuple(int(self.m[f"{name}_{a}"]) for a in "DH") for name in ("PAD", "DILATION"))
        self.element, self.vec = tile.element, 16 // tile.element
        self.slots = 32 // self.element // self.slot
        self.channels_step = self.slots // self.slots_lane
        self.steps_w = self.kernel[2] // self.slot // self.slots_lane
        self.chunks = -(-self.cout // self.channels)
        self.rows = self.channels * self.kernel[2] * self.element // 128
        self.taps = self.kernel[0] * self.kernel[1]
        self.places, self.blocks = 128 * self.mb, -(-self.cin // self.columns)
        self.groups = self.places // self.group
        self.box_place = -(-self.channels * self.pitch * self.element // 128) * 128 // self.element

    def channel_of(self, step: int, slot: Slot) -> Slot:
        return step // self.steps_w * self.channels_step + slot // self.slots_lane

    def tap_of(self, step: int, slot: Slot) -> Slot:
        return self.slot * (step % self.steps_w * self.slots_lane + slot % self.slots_lane)

    def slot_at(self, step: int, slot: Slot) -> Slot:
        return self.channel_of(step, slot) * self.pitch + self.tap_of(step, slot) + self.lead

    def pack(self, weight: Array) -> Array:
        """[block][chunk][row of the kernel][row][column][place]: packed elements, NaN where nothing was written."""
        per_row = 128 // self.element
        count = self.blocks * self.chunks * self.taps * self.rows * self.columns
        packed = np.full(count * per_row, np.nan)
        kernel, of_step = self.taps * self.kernel[2], 32 // self.element
        flat = weight.reshape(-1)
        i, e = np.arange(count * 8)[:, None], np.arange(self.vec)
        unit, column, rest = i % 8, i // 8 % self.columns, i // (8 * self.columns)
        row, tap = rest % self.rows, rest // self.rows % self.taps
        chunk = rest // (self.rows * self.taps) % self.chunks
        cin = rest // (self.rows * self.chunks * self.taps) * self.columns + column
        at = (i - unit) * self.vec + (unit ^ (column & 7)) * self.vec
        assert len(np.unique(at)) == at.size, "a place is written twice"
        k = unit * self.vec + e
        step, place = row * 4 + k // of_step, k % of_step
        if self.slot == 1:
            slot, second = place, np.zeros_like(place)
        else:
            slot, second = (place % 4, place // 4) if self.element == 4 else (place // 2, place % 2)
        cout = chunk * self.channels + self.channel_of(step, slot)
        kw = self.tap_of(step, slot) + second
        live = (cin < self.cin) & (cout < self.cout)
        index = (cin * self.cout + cout) * kernel + tap * self.kernel[2] + kw
        packed[at + e] = np.where(live, flat[np.where(live, index, 0)], 0.0)
        shape = self.blocks, self.chunks, self.taps, self.rows, self.columns, per_row
        return packed.reshape(shape)

    def group_at(self, index: int, p: Problem) -> Group:
        _, in_d, in_h, _, groups_w, *_ = self.tile.arguments(p)
        row, q = index // groups_w, index // groups_w // in_h
        return Group(q // in_d, q % in_d, row % in_h, index % groups_w * self.group)

    def box(self, g: Array, group: Group, tap: int, chunk: int) -> Array:
        """[channel][element of a row] that the copy engine brings of (images, channels, D, H, W): zeros beyond."""
        found = np.zeros((self.channels, self.pitch))
        w = group.w * self.step[2] + self.first
        unit = self.line or self.vec
        assert w % unit == 0 and self.pitch % unit == 0, "a box begins off 16 bytes, which is an illegal instruction"
        d, h = (
            at * step - pad + k * dilation
            for at, step, pad, k, dilation in zip(
                group[1:3], self.step, self.pad, (tap // self.kernel[1], tap % self.kernel[1]), self.dilation
            )
        )
        if self.line:
            assert g.shape[4] % self.line == 0 and g.shape[2] == g.shape[3] == 1
        if group.n >= g.shape[0] or not (0 <= d < g.shape[2] and 0 <= h < g.shape[3]):
            return found
        a, z = max(w, 0), min(w + self.pitch, g.shape[4])
        channels = g[group.n, chunk * self.channels : (chunk + 1) * self.channels, d, h]
        if a < z:
            found[: len(channels), a - w : z - w] = channels[:, a:z]
        return found

    def stage(self, g: Array, p: Problem, first: int, tap: int, chunk: int) -> Array:
        """A stage's boxes, NaN between them."""
        found = np.full((self.groups, self.box_place), np.nan)
        for i in range(self.groups):
            box = self.box(g, self.group_at(first + i, p), tap, chunk).reshape(-1)
            found[i, : box.size] = box
        return found.reshape(-1)

    def words(self, wg: int, thread: Ints, m: int, step: int, i: int, half: int) -> tuple[Ints, ...]:
        """In elements: what lanes read of places g + 8i, of the half of a step's places of K that they have."""
        position, t = wg * (self.mb * 64) + thread // 32 * 16, thread & 3
        wide = self.element == 2 and self.slot == 1
        at = position // self.group * self.box_place
        at += (position % self.group + thread // 4 % 8) * self.step[2] + self.slot_at(0, t * (2 if wide else 1))
        at += m * (64 // self.group) * self.box_place + self.slot_at(step, 0) - self.slot_at(0, 0)
        at += i * (self.box_place if self.group == 8 else 8 * self.step[2])
        if self.element == 4 and self.slot == 2:
            assert (at % 2 == 0).all(), "64 bits off 8 bytes"
            return (at + half,)
        at += half * (self.slot_at(0, self.slots // 2) - self.slot_at(0, 0))
        if self.element == 4:
            return (at,)
        assert (at % 2 == 0).all() or not int(self.m["TOGETHER"]), "32 bits off 4 bytes"
        return at, at + (1 if self.slot == 2 else self.pitch)

    def fragments(self, stage: Array, wg: int, m: int, step: int) -> Array:
        """A of one matrix instruction: [64 places][places of K]."""
        found = np.full((64, 32 // self.element), np.nan)
        t, g = THREAD & 3, THREAD // 4 % 8
        for i, half in product(range(2), range(2)):
            row = THREAD // 32 * 16 + g + 8 * i
            first = t + 4 * half if self.element == 4 else 2 * t + 8 * half
            for e, at in enumerate(self.words(wg, THREAD, m, step, i, half)):
                found[row, first + e] = stage[at]
        return found

    def run(self, p: Problem, g: Array, packed: Array) -> Array:
        """The gradient for the input; NaN where nothing was stored."""
        batch, in_d, in_h, in_w, _, groups, tiles = self.tile.arguments(p)
        g = g.reshape(batch, self.cout, *(1,) * (3 - p.rank), *p.out_size)
        plane = in_d * in_h * in_w
        y = np.full(batch * self.cin * plane, np.nan)
        for tile in range(tiles):
            block, first = tile % self.blocks, tile // self.blocks * self.groups
            acc = np.zeros((2, self.mb, 64, self.columns))
            for chunk in range(self.chunks):
                for tap in range(self.taps):
                    stage = self.stage(g, p, first, tap, chunk)
                    for row in range(self.rows):
                        for step in range(4):
                            b = weights(packed[block, chunk, tap, row], step)
                            for wg in range(2):
                                for m in range(self.mb):
                                    acc[wg, m] += self.fragments(stage, wg, m, row * 4 + step) @ b
            for wg in range(2):
                for m in range(self.mb):
                    for place in range(64):
                        self.store(p, y, acc[wg, m, place], first, (wg * self.mb + m) * 64 + place, block, groups)
        return y.reshape(p.input_shape)

    def store(self, p: Problem, y: Array, sums: Array, first: int, position: int, block: int, groups: int) -> None:
        """A place's columns. Lanes that exchange have the same places and columns, two of a row with pairs."""
        _, in_d, in_h, in_w, *_ = self.tile.arguments(p)
        index = first + position // self.group
        group = self.group_at(index, p)
        w, plane = group.w + position % self.group, in_d * in_h * in_w
        if index >= groups or w >= in_w:
            return
        for column in range(self.columns):
            cin = block * self.columns + column
            if cin < self.cin:
                at = (group.n * self.cin + cin) * plane + (group.d * in_h + group.h) * in_w + w
                assert math.isnan(y[at]), "a place is stored twice"
                y[at] = sums[column]
