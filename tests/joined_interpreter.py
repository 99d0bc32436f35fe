"""Joined rows in NumPy: what ``kernels/joined.cu`` computes, from where it has each value.

Boxes of the copy engine with their swizzle, the pass that turns them, packed weights, what descriptors read of both,
sums by the places that have them, and stores: every index is the kernel's own, so a wrong plan or formula gives wrong
results.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
        flat = weight.reshape(self.m["CIN"], self.m["COUT"], self.kernel)
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

    def tile_at(self, index: int, out_d: int, plane: int, tiles_f: int) -> tuple[int, int, int, int]:
        """(image, slice, block of output channels, first place)."""
        q = index // self.blocks
        d = q // tiles_f % out_d
        first = q % tiles_f * self.m["PLACES"] - (d * plane & (self.vec - 1))
        return q // tiles_f // out_d, d, index % self.blocks, first

    def slices(self, d: int, in_d: int) -> range:
        """The kernel's slices that meet the input's."""
        d += self.m["PADDING_D"]
        first = 0 if d < in_d else (d - in_d) // self.m["DILATION_D"] + 1
        return range(first, min(d // self.m["DILATION_D"], self.m["KERNEL_D"] - 1) + 1)

    def halo(self, pitch: int) -> int:
        """Places ahead of a tile that its taps reach."""
        m = self.m
        return (m["KERNEL_H"] - 1) * m["DILATION_H"] * pitch + (m["KERNEL_W"] - 1) * m["DILATION_W"]

    # --- pixels ------------------------------------------------------------------------------------------------------

    def box(self, x: Array, n: int, chunk: int, d: int, row: int) -> Array:
        """[channel][row][column] of a slot: zeros beyond the input."""
        found = np.zeros((self.ck, self.m["ROWS"], self.m["BOX_W"]))
        _, cin, in_d, in_h, in_w = x.shape
        if not 0 <= d < in_d:
            return found
        channels = min(self.ck, cin - chunk * self.ck)
        a, z = max(row, 0), min(row + self.m["ROWS"], in_h)
        if a < z:
            of = x[n, chunk * self.ck : chunk * self.ck + channels, d, a:z]
            found[:channels, a - row : z - row, : min(in_w, self.m["BOX_W"])] = of
        return found

    def turned(self, box: Array, column: int, span: int, pitch: int) -> Array:
        """What a stage has, NaN where nothing was written."""
        stage = np.full(self.m["SPAN"] * self.ck, np.nan)
        if self.element == 4:
            p = np.arange(span)
            row, w = (column + p) // pitch, (column + p) % pitch
            assert row.max() < self.m["ROWS"], "a row that the slot has not"
            inside = w < self.m["BOX_W"]
            values = np.where(inside, box[:, row, np.minimum(w, self.m["BOX_W"] - 1)], 0.0)
            self.write(stage, p, values.T)
            return stage
        boxes = self.m["BOX_W"] // 64
        # [box][row][channel][64 columns], units of 16 bytes exchanged by the channel modulo 8, as the engine does.
        slot = box.reshape(self.ck, self.m["ROWS"], boxes, 8, 8).transpose(2, 1, 0, 3, 4)
        swizzled = np.empty_like(slot)
        for c in range(self.ck):
            swizzled[:, :, c, np.arange(8) ^ (c & 7)] = slot[:, :, c]
        rows = (column + span - 1) // pitch + 1
        assert rows <= self.m["ROWS"], "rows that the slot has not"
        lane = np.arange(32)
        half, own, second = lane >> 3 & 1, lane & 7, lane >> 4
        for row in range(rows):
            for pair in range(boxes * 4):
                w = second * 8 + own + pair * 16
                p = row * pitch + w - column
                # A lane's address: of 8 columns of one channel; then of a place, whose 8 channels come from 8 lanes.
                read = swizzled[pair // 4, row, half * 8 + own, (pair % 4 * 2 + second) ^ own]
                for matrix in range(4):
                    lanes = slice(matrix * 8, matrix * 8 + 8)
                    live = (p[lanes] >= 0) & (p[lanes] < span) & (w[lanes] < pitch)
                    at = self.unit_at(p[lanes][live], half[lanes][live])
                    where = at[:, None] + np.arange(8)
                    assert np.isnan(stage[where]).all(), "a place is written twice"
                    stage[where] = read[lanes].T[live]
        behind = pitch - self.m["BOX_W"]
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
        """The output; NaN where nothing was stored."""
        m, places = self.m, self.m["PLACES"]
        in_d, out_d, pitch, plane, tiles_f, tiles = self.tile.arguments(p)
        x = x.reshape(*x.shape[:2], in_d, *x.shape[-2:])
        y = np.full((p.batch, m["COUT"], out_d, plane), np.nan)
        halo = self.halo(pitch)
        for index in range(tiles):
            n, d, block, first = self.tile_at(index, out_d, plane, tiles_f)
            row, column = (first - halo) // pitch, (first - halo) % pitch
            acc = np.zeros((ROWS_M, places))
            for chunk in range(self.chunks):
                for kd in self.slices(d, in_d):
                    depth = d + m["PADDING_D"] - kd * m["DILATION_D"]
                    box = self.box(x, n, chunk, depth, row + m["PADDING_H"])
                    stage = self.turned(box, column, places + halo, pitch)
                    for tap in range(self.taps):
                        kh, kw = divmod(tap, m["KERNEL_W"])
                        shift = halo - kh * m["DILATION_H"] * pitch - kw * m["DILATION_W"]
                        b = self.rows(stage, shift + np.arange(places))
                        acc += self.rows(packed[block, chunk, kd, tap], np.arange(ROWS_M)) @ b.T
            for channel in range(block * ROWS_M, min((block + 1) * ROWS_M, m["COUT"])):
                self.store(y[n, channel], d, first, acc[channel % ROWS_M] + (0.0 if bias is None else bias[channel]))
        return y.reshape(p.output_shape)

    def store(self, channel: Array, d: int, first: int, sums: Array) -> None:
        """A channel's places of a tile: what the engine stores in 16 bytes, and what is left at a slice's ends."""
        places, span = self.m["PLACES"], 512 // self.element
        plane = channel.shape[1]
        for part in range(0, places, span):
            of = min(span, places - part)
            begin, end = max(-first - part, 0), min(plane - first - part, of)
            a, z = -(-begin // self.vec) * self.vec, end // self.vec * self.vec
            pieces = [(a, z)] if z > a else []
            if z > a:
                assert (d * plane + first + part + a) % self.vec == 0, "the engine stores off 16 bytes"
            if begin < a:
                pieces.append((begin, min(a, end)))
            if a <= z < end:
                pieces.append((z, end))
            for i, j in pieces:
                at = slice(first + part + i, first + part + j)
                assert 0 <= at.start < at.stop <= plane and np.isnan(channel[d, at]).all()
                channel[d, at] = sums[part + i : part + j]
