"""Joined rows in NumPy: what ``kernels/joined.cu`` computes, from where it has each value.

Boxes of the copy engine with their swizzle, the pass that turns them, packed weights, what descriptors read of both,
sums by the places that have them, and stores: every index is the kernel's own, so a wrong plan or formula gives wrong
results.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from upconv.cuda.axes import result_shape
from upconv.cuda.joined import Tile
from upconv.problem import Problem

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

ROWS_M = 64


class JoinedInterpreter:
    """Runs a tile on a problem of its layer."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        m = {name: value for name, value in tile.macros().items() if isinstance(value, int)}
        self.m = m
        self.element = m["ELEMENT"]
        self.vec, self.ck = 16 // self.element, 32 // self.element
        self.chunks = -(-m["CIN"] // self.ck)
        self.blocks = -(-m["COUT"] // ROWS_M)
        self.taps = m["KERNEL_H"] * m["KERNEL_W"]
        self.kernel = m["KERNEL_D"] * self.taps

    # --- packed weights ----------------------------------------------------------------------------------------------

    def unit_at(self, row: Ints, unit: Ints) -> Ints:
        """In elements: where a row of 32 bytes has a unit of 16."""
        return (row * 32 + ((unit ^ (row >> 2 & 1)) << 4)) // self.element

    def rows(self, memory: Array, row: Ints) -> Array:
        """Rows of 32 bytes as matrix instructions read them: [row][CK]."""
        units = [memory[self.unit_at(row, np.array(u))[:, None] + np.arange(self.vec)] for u in range(2)]
        return np.concatenate(units, axis=1)

    def pack(self, weight: Array) -> Array:
        """[block][chunk][tap of the kernel][what 64 rows of 32 bytes have], NaN where nothing was written."""
        packed = np.full((self.blocks * self.chunks * self.kernel, ROWS_M * self.ck), np.nan)
        first, second = ("COUT", "CIN") if self.m["FLIPPED"] else ("CIN", "COUT")
        flat = weight.reshape(self.m[first], self.m[second], self.kernel)
        if self.m["FLIPPED"]:
            flat = flat.transpose(1, 0, 2)[..., ::-1]
        i = np.arange(packed.size // self.vec)
        unit, row, rest = i % 2, i // 2 % ROWS_M, i // (2 * ROWS_M)
        tap, chunk = rest % self.kernel, rest // self.kernel % self.chunks
        cout = rest // (self.kernel * self.chunks) * ROWS_M + row
        at = self.unit_at(row, unit)
        for e in range(self.vec):
            cin = chunk * self.ck + unit * self.vec + e
            live = (cin < self.m["CIN"]) & (cout < self.m["COUT"])
            clipped = flat[np.minimum(cin, self.m["CIN"] - 1), np.minimum(cout, self.m["COUT"] - 1), tap]
            assert np.isnan(packed[rest, at + e]).all(), "a place is written twice"
            packed[rest, at + e] = np.where(live, clipped, 0.0)
        return packed.reshape(self.blocks, self.chunks, self.m["KERNEL_D"], self.taps, -1)

    # --- tiles -------------------------------------------------------------------------------------------------------

    def tile_at(self, index: int, out_d: int, tiles_f: int) -> tuple[int, int, int, int]:
        """(image, slice, block of output channels, first place)."""
        q = index // self.blocks
        d = q // tiles_f % out_d
        return q // tiles_f // out_d, d, index % self.blocks, q % tiles_f * self.m["PLACES"]

    def slices(self, d: int, in_d: int) -> range:
        """The kernel's slices that meet the input's."""
        d += self.m["PADDING_D"]
        first = 0 if d < in_d else (d - in_d) // self.m["DILATION_D"] + 1
        return range(first, min(d // self.m["DILATION_D"], self.m["KERNEL_D"] - 1) + 1)

    def halo(self, pitch: int) -> int:
        """Places ahead of a tile that its taps reach."""
        m = self.m
        return (m["KERNEL_H"] - 1) * m["DILATION_H"] * pitch + (m["KERNEL_W"] - 1) * m["DILATION_W"]

    def corner(self, first: int, pitch: int) -> tuple[int, int, int]:
        """Where a tile's slots begin in the source, (row, column), and places ahead of its first with the halo."""
        f = first - self.halo(pitch)
        if self.m["LINE"]:
            f += self.m["PADDING_W"]
            return 0, f // self.vec * self.vec, f % self.vec
        return f // pitch + self.m["PADDING_H"], 0, f % pitch

    # --- pixels ------------------------------------------------------------------------------------------------------

    def box(self, x: Array, n: int, chunk: int, d: int, row: int, w: int) -> Array:
        """[channel][row][column] of a slot, all its boxes: zeros beyond the source."""
        assert w % self.vec == 0, "a box begins off 16 bytes, which is an illegal instruction"
        found = np.zeros((self.ck, self.m["ROWS"], self.m["BOX_W"]))
        _, cin, in_d, in_h, in_w = x.shape
        channels = min(self.ck, cin - chunk * self.ck)
        a, z, left, right = max(row, 0), min(row + self.m["ROWS"], in_h), max(w, 0), min(w + self.m["BOX_W"], in_w)
        if 0 <= d < in_d and a < z and left < right:
            of = x[n, chunk * self.ck : chunk * self.ck + channels, d, a:z, left:right]
            found[:channels, a - row : z - row, left - w : right - w] = of
        return found

    def turned(self, box: Array, column: int, span: int, pitch: int) -> Array:
        """What a stage has, NaN where nothing was written."""
        stage = np.full(self.m["SPAN"] * self.ck, np.nan)
        if self.element == 4:
            p = np.arange(span)
            row = (column + p) // pitch * (1 - self.m["LINE"])
            w = column + p - row * pitch
            assert row.max() < self.m["ROWS"], "a row that the slot has not"
            inside = w < self.m["BOX_W"]
            assert inside.all() or not self.m["LINE"], "a column that the slot has not"
            values = np.where(inside, box[:, row, np.minimum(w, self.m["BOX_W"] - 1)], 0.0)
            self.write(stage, p, values.T)
            return stage
        boxes = self.m["BOXES"]
        # [box][row][channel][64 columns], units of 16 bytes exchanged by the channel modulo 8, as the engine does.
        slot = box.reshape(self.ck, self.m["ROWS"], boxes, 8, 8).transpose(2, 1, 0, 3, 4)
        swizzled = np.empty_like(slot)
        for c in range(self.ck):
            swizzled[:, :, c, np.arange(8) ^ (c & 7)] = slot[:, :, c]
        rows = 1 if self.m["LINE"] else (column + span - 1) // pitch + 1
        assert rows <= self.m["ROWS"], "rows that the slot has not"
        lane = np.arange(32)
        half, own, second = lane >> 3 & 1, lane & 7, lane >> 4
        for row in range(rows):
            for pair in range(boxes * 4):
                w = second * 8 + own + pair * 16
                p = row * pitch + w - column
                width = 2**30 if self.m["LINE"] else pitch
                # A lane's address: of 8 columns of one channel; then of a place, whose 8 channels come from 8 lanes.
                read = swizzled[pair // 4, row, half * 8 + own, (pair % 4 * 2 + second) ^ own]
                for matrix in range(4):
                    lanes = slice(matrix * 8, matrix * 8 + 8)
                    live = (p[lanes] >= 0) & (p[lanes] < span) & (w[lanes] < width)
                    at = self.unit_at(p[lanes][live], half[lanes][live])
                    where = at[:, None] + np.arange(8)
                    assert np.isnan(stage[where]).all(), "a place is written twice"
                    stage[where] = read[lanes].T[live]
        behind = 0 if self.m["LINE"] else pitch - self.m["BOX_W"]
        for i in range(rows * max(behind, 0)):
            p = i // behind * pitch + self.m["BOX_W"] + i % behind - column
            if 0 <= p < span:
                self.write(stage, np.array([p]), np.zeros((1, self.ck)))
        return stage

    def write(self, stage: Array, p: Ints, values: Array) -> None:
        """Rows of channels to a stage, by units of 16 bytes."""
        for unit in range(2):
            at = self.unit_at(p, np.array(unit))[:, None] + np.arange(self.vec)
            assert np.isnan(stage[at]).all(), "a place is written twice"
            stage[at] = values[:, unit * self.vec : (unit + 1) * self.vec]

    # --- the kernel --------------------------------------------------------------------------------------------------

    def run(self, p: Problem, x: Array, packed: Array, bias: Array | None) -> Array:
        """The result; NaN where nothing was stored."""
        m, places = self.m, self.m["PLACES"]
        in_d, out_d, pitch, plane, tiles_f, tiles = self.tile.arguments(p)
        x = x.reshape(*x.shape[:2], in_d, *((1,) * m["LINE"]), *x.shape[2 if m["LINE"] else -2 :])
        y = np.full((p.batch, m["COUT"], out_d * plane), np.nan)
        halo = self.halo(pitch)
        for index in range(tiles):
            n, d, block, first = self.tile_at(index, out_d, tiles_f)
            row, w, ahead = self.corner(first, pitch)
            acc = np.zeros((ROWS_M, places))
            for chunk in range(self.chunks):
                for kd in self.slices(d, in_d):
                    depth = d + m["PADDING_D"] - kd * m["DILATION_D"]
                    stage = self.turned(self.box(x, n, chunk, depth, row, w), ahead, places + halo, pitch)
                    for tap in range(self.taps):
                        kh, kw = divmod(tap, m["KERNEL_W"])
                        shift = halo - kh * m["DILATION_H"] * pitch - kw * m["DILATION_W"]
                        b = self.rows(stage, shift + np.arange(places))
                        acc += self.rows(packed[block, chunk, kd, tap], np.arange(ROWS_M)) @ b.T
            for channel in range(block * ROWS_M, min((block + 1) * ROWS_M, m["COUT"])):
                sums = acc[channel % ROWS_M] + (0.0 if bias is None else bias[channel])
                begin = (n * m["COUT"] + channel) * out_d * plane + d * plane + first
                self.store(y.reshape(-1), begin, sums[: plane - first])
        return y.reshape(result_shape(p))

    def store(self, y: Array, begin: int, sums: Array) -> None:
        """A channel's places of a tile: 16 bytes a lane, and up to three words at either end."""
        word = 4 // self.element
        for part in range(0, len(sums), 512 // self.element):
            of = sums[part : part + 512 // self.element]
            late = (begin + part) % self.vec
            end = late + len(of)
            a, z = -(-late // self.vec) * self.vec, end // self.vec * self.vec
            pieces = [(a, z)] if z > a else []
            for q in range(4):
                head, tail = late + q * word, z + q * word
                pieces += [(head, head + word)] if head < a and head < end else []
                pieces += [(tail, tail + word)] if a <= tail < end else []
            for i, j in pieces:
                at = slice(begin + part - late + i, begin + part - late + j)
                assert at.start % word == 0 and np.isnan(y[at]).all()
                y[at] = of[i - late : j - late]
