"""Kernels of several strides in NumPy: what ``kernels/strides.cu`` computes, from where it has each value.

Boxes of the copy engine, packed weights, the lanes' fragments and the descriptors' rows, sums by the
registers that have them, and stores: every index is the kernel's own, so a wrong plan or formula gives wrong results.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from subpixel_interpreter import weights
from upconv.cuda.strides import Tile
from upconv.problem import Problem

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

THREAD = np.arange(128)


class StridesInterpreter:
    """Runs a tile on a problem of its layer."""

    def __init__(self, tile: Tile) -> None:
        self.tile, self.m = tile, tile.macros()
        names = ("CIN", "COUT", "COLUMNS", "MB", "TAPS", "STEP_W", "LEAD", "FIRST_TAP", "IMAGES", "PITCH")
        self.cin, self.cout, self.columns, self.mb, self.taps, *rest = (int(self.m[name]) for name in names)
        self.step, self.lead, self.first_tap, self.images, self.pitch = rest
        self.first = int(str(self.m["FIRST"]).strip("()"))
        self.ck, self.vec = 128 // tile.element, 16 // tile.element
        self.chunks = -(-self.cin // self.ck)
        self.all_columns = self.cout * self.step
        self.blocks = -(-self.all_columns // self.columns)
        self.unit, self.width = 64 * self.mb, 64 * self.mb // self.images
        self.of_image = self.ck * self.pitch  # elements

    def channel_at(self, k: Ints) -> Ints:
        return k if self.tile.element == 2 else k // 8 * 8 + k % 4 * 2 + k // 4 % 2

    def pack(self, weight: Array) -> Array:
        """[block][chunk][tap][column][place]: the packed elements, NaN where nothing was written."""
        packed = np.full(self.blocks * self.chunks * self.taps * self.columns * self.ck, np.nan)
        kernel = self.taps * self.step
        flat = weight.reshape(self.cin, self.cout, kernel)
        i, e = np.arange(self.blocks * self.chunks * self.taps * self.columns * 8)[:, None], np.arange(self.vec)
        unit, column, rest = i % 8, i // 8 % self.columns, i // (8 * self.columns)
        chunk, of = rest // self.taps % self.chunks, rest // (self.taps * self.chunks) * self.columns + column
        kw, cout = rest % self.taps * self.step + of % self.step, of // self.step
        cin = chunk * self.ck + self.channel_at(unit * self.vec + e)
        live = (cin < self.cin) & (of < self.all_columns)
        values = flat[np.minimum(cin, self.cin - 1), np.minimum(cout, self.cout - 1), kw]
        at = (i - unit) * self.vec + (unit ^ (column & 7)) * self.vec
        assert len(np.unique(at)) == at.size, "a place is written twice"
        packed[at + e] = np.where(live, values, 0.0)
        return packed.reshape(self.blocks, self.chunks, self.taps, self.columns, self.ck)

    def unit_of(self, tile: int, consumer: int, units: int) -> tuple[int, int]:
        """(first image, first pixel of each) of a consumer's unit."""
        unit = tile // self.blocks * 2 + consumer
        return unit // units * self.images, unit % units * self.width

    def box(self, x: Array, p: int, c: int, n: int, size: tuple[int, int, int]) -> Array:
        """[image][channel][pixel] that the copy engine brings of (images, channels, pixels): zeros beyond."""
        images, channels, pixels = size
        assert p % self.vec == 0, "a box begins off 16 bytes, which is an illegal instruction"
        found = np.zeros(size)
        for i, j in (
            (i, j) for i in range(images) for j in range(channels) if n + i < x.shape[0] and c + j < x.shape[1]
        ):
            a, z = max(p, 0), min(p + pixels, x.shape[2])
            if a < z:
                found[i, j, a - p : z - p] = x[n + i, c + j, a:z]
        return found

    def stage(self, x: Array, tile: int, chunk: int, units: int) -> Array:
        """A stage of pixels, both consumers'."""
        boxes = []
        for consumer in range(2):
            n, p = self.unit_of(tile, consumer, units)
            boxes.append(self.box(x, p + self.first, chunk * self.ck, n, (self.images, self.ck, self.pitch)))
        return np.concatenate([box.reshape(-1) for box in boxes])

    def own_place(self, wg: int, thread: Ints) -> Ints:
        """In bytes: where a stage has lanes' first pixels, of the first tap, and first channels."""
        position, t, element = thread // 32 * 16, thread & 3, self.tile.element
        pixel = position % self.width + thread // 4 % 8
        image = wg * self.images + position // self.width
        return (image * self.of_image + 2 * t * self.pitch + pixel + self.first_tap) * element

    def words(self, wg: int, thread: Ints, tap: int, m: int, step: int, i: int) -> tuple[Ints, ...]:
        """In bytes: where the lanes read the elements of a register of A."""
        own, element = self.own_place(wg, thread) - tap * self.tile.element, self.tile.element
        at = own + (m * 64 // self.width * self.of_image + m * 64 % self.width + i % 2 * 8) * element
        pitch = self.pitch * element
        if element == 4:
            return (at + (step * 8 + i // 2) * pitch,)
        at += (step * 16 + i // 2 * 8) * pitch
        return at, at + pitch

    def fragments(self, stage: Array, wg: int, m: int, tap: int, step: int) -> Array:
        """A of one matrix instruction: [64 pixels][places of K]."""
        found = np.full((64, 32 // self.tile.element), np.nan)
        t, g = THREAD & 3, THREAD // 4 % 8
        for i in range(4):
            row = THREAD // 32 * 16 + g + 8 * (i % 2)
            first = t + 4 * (i // 2) if self.tile.element == 4 else 2 * t + 8 * (i // 2)
            for e, at in enumerate(self.words(wg, THREAD, tap, m, step, i)):
                found[row, first + e] = stage[at // self.tile.element]
        return found

    def run(self, p: Problem, x: Array, packed: Array, bias: Array | None) -> Array:
        """The output; NaN where nothing was stored."""
        batch, out_w, places, units, tiles = self.tile.arguments(p)
        y = np.full(batch * self.cout * out_w, np.nan)
        for tile in range(tiles):
            block = tile % self.blocks
            acc = np.zeros((2, self.mb, 64, self.columns))
            for chunk in range(self.chunks):
                stage = self.stage(x, tile, chunk, units)
                for tap in range(self.taps):
                    for step in range(4):
                        b = weights(packed[block, chunk, tap], step)
                        for wg in range(2):
                            for m in range(self.mb):
                                acc[wg, m] += self.fragments(stage, wg, m, tap, step) @ b
            for wg in range(2):
                first_image, first = self.unit_of(tile, wg, units)
                for position in range(self.unit):
                    image, pixel = first_image + position // self.width, first + position % self.width
                    if pixel >= places or image >= batch:
                        continue
                    at = pixel * self.step - self.lead
                    for column in range(0, self.columns, 2):
                        of = block * self.columns + column
                        u, cout = of % self.step, of // self.step
                        if of >= self.all_columns or not 0 <= at + u < out_w:
                            continue
                        place = (image * self.cout + cout) * out_w + u + at
                        assert place % 2 == 0 and np.isnan(y[place : place + 2]).all()
                        sums = acc[wg, position // 64, position % 64, column : column + 2]
                        y[place : place + 2] = sums + (0.0 if bias is None else bias[cout])
        return y.reshape(p.output_shape)
