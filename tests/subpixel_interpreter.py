"""Pixels as rows in NumPy: what ``kernels/subpixel.cu`` computes, from where it has each value.

Boxes of the copy engine with their swizzle, packed weights, the lanes' fragments and the descriptors' rows, sums by the
registers that have them, and stores: every index is the kernel's own, so a wrong plan or formula gives wrong results.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from upconv.cuda.subpixel import Tile
from upconv.problem import Problem

Array = NDArray[np.float64]


def weights(packed: Array, step: int) -> Array:
    """B of one matrix instruction, [places of K][columns], of a chunk's packed [column][place], 128 bytes each."""
    columns, places = packed.shape
    vec = places // 8
    k = np.arange(places // 4)
    units = (step * 2 + k[:, None] // vec) ^ (np.arange(columns)[None, :] & 7)
    found: Array = packed[np.arange(columns)[None, :], units * vec + k[:, None] % vec]
    return found


class SubpixelInterpreter:
    """Runs a tile on a problem of its layer."""

    def __init__(self, tile: Tile) -> None:
        self.tile, self.m = tile, tile.macros()
        self.cin, self.cout, self.columns, self.mb = (int(self.m[name]) for name in ("CIN", "COUT", "COLUMNS", "MB"))
        self.kernel = tuple(int(self.m[f"KERNEL_{axis}"]) for axis in "DHW")
        self.ck, self.vec = 128 // tile.element, 16 // tile.element
        self.chunks = -(-self.cin // self.ck)
        self.all_columns = self.cout * math.prod(self.kernel)
        self.blocks = -(-self.all_columns // self.columns)

    def channel_at(self, k: NDArray[np.int64]) -> NDArray[np.int64]:
        return k if self.tile.element == 2 else k // 8 * 8 + k % 4 * 2 + k // 4 % 2

    def pack(self, weight: Array) -> Array:
        """[block][chunk][column][place]: the packed elements, NaN where nothing was written."""
        packed = np.full(self.blocks * self.chunks * self.columns * self.ck, np.nan)
        kd, kh, kw_all = self.kernel
        flat = weight.reshape(self.cin, self.cout, kd * kh * kw_all)
        i, e = np.arange(self.blocks * self.chunks * self.columns * 8)[:, None], np.arange(self.vec)
        unit, column, rest = i % 8, i // 8 % self.columns, i // (8 * self.columns)
        chunk, of = rest % self.chunks, rest // self.chunks * self.columns + column
        kw, cout = of % kw_all, of // kw_all % self.cout
        tap = of // (kw_all * self.cout) * kw_all + kw
        cin = chunk * self.ck + self.channel_at(unit * self.vec + e)
        live = (cin < self.cin) & (of < self.all_columns)
        values = flat[np.minimum(cin, self.cin - 1), cout, np.minimum(tap, flat.shape[2] - 1)]
        at = (i - unit) * self.vec + (unit ^ (column & 7)) * self.vec
        assert len(np.unique(at)) == at.size, "a place is written twice"
        packed[at + e] = np.where(live, values, 0.0)
        return packed.reshape(self.blocks, self.chunks, self.columns, self.ck)

    def boxes(self, x: Array, first: int, chunk: int) -> Array:
        """[box][channel][place] of an image (channels, pixels): zeros beyond it, units swapped by the channel."""
        count = self.tile.pixels // self.ck
        found = np.zeros((count, self.ck, self.ck))
        for b in range(count):
            p, c = first + b * self.ck, chunk * self.ck
            part = x[c : c + self.ck, p : p + self.ck] if p < x.shape[1] else x[:0, :0]
            whole = np.zeros((self.ck, self.ck))
            whole[: part.shape[0], : part.shape[1]] = part
            for row in range(self.ck):
                for unit in range(8):
                    to = (unit ^ (row & 7)) * self.vec
                    found[b, row, to : to + self.vec] = whole[row, unit * self.vec : (unit + 1) * self.vec]
        return found

    def fragments(self, boxes: Array, wg: int, m: int, step: int) -> Array:
        """A of one matrix instruction: [64 pixels][places of K]."""
        if self.tile.element == 2:  # a descriptor along M: a row for each place of K
            box = boxes[wg * self.mb + m]
            rows = step * 16 + np.arange(16)
            units = (np.arange(64)[:, None] // 8) ^ (rows[None, :] & 7)
            return box[rows[None, :], units * 8 + np.arange(64)[:, None] % 8]
        words = boxes.reshape(-1)
        found = np.full((64, 8), np.nan)
        for thread in range(128):
            lane = thread & 31
            t, g = lane & 3, lane >> 2
            pixel = (thread >> 5) * 16 + g
            own = wg * (self.mb * 2 * 4096) + pixel // 32 * 4096 + 2 * t * 128 + ((pixel % 32 * 4) ^ (2 * t << 4))
            for i in range(4):
                c = 8 * step + i // 2
                at = (own + m * 2 * 4096 + c * 128) ^ ((i // 2) << 4) ^ ((i % 2) << 5)
                found[pixel + 8 * (i % 2), t + 4 * (i // 2)] = words[at // 4]
        return found

    def run(self, p: Problem, x: Array, packed: Array, bias: Array | None) -> Array:
        """The output; NaN where nothing was stored."""
        batch, in_h, in_w, pixels, tiles_p, tiles = self.tile.arguments(p)
        kd, kh, kw_all = self.kernel
        plane = pixels * kd * kh * kw_all
        out_h, out_w = in_h * kh, in_w * kw_all
        y = np.full(batch * self.cout * plane, np.nan)
        flat = x.reshape(batch, self.cin, pixels)
        for index in range(tiles):
            block, q = index % self.blocks, index // self.blocks
            n, first = q // tiles_p, q % tiles_p * self.tile.pixels
            acc = np.zeros((2, self.mb, 64, self.columns))
            for chunk in range(self.chunks):
                boxes = self.boxes(flat[n], first, chunk)
                for step in range(4):
                    b = weights(packed[block, chunk], step)
                    for wg in range(2):
                        for m in range(self.mb):
                            acc[wg, m] += self.fragments(boxes, wg, m, step) @ b
            for wg in range(2):
                for m in range(self.mb):
                    for row in range(64):
                        pixel = first + (wg * self.mb + m) * 64 + row
                        if pixel >= pixels:
                            continue
                        w, r = pixel % in_w, pixel // in_w
                        at = (r // in_h * kd * out_h + r % in_h * kh) * out_w + w * kw_all
                        for column in range(0, self.columns, 2):
                            of = block * self.columns + column
                            if of >= self.all_columns:
                                continue
                            cout, tap = of // kw_all % self.cout, of // (kw_all * self.cout)
                            to = cout * plane + (tap // kh * out_h + tap % kh) * out_w + of % kw_all + at
                            place = n * self.cout * plane + to
                            assert place % 2 == 0 and np.isnan(y[place : place + 2]).all()
                            y[place : place + 2] = acc[wg, m, row, column : column + 2] + (
                                0.0 if bias is None else bias[cout]
                            )
        return y.reshape(p.output_shape)
