"""The kernel of pixels as rows in NumPy and float64: what `kernels/pixels.cu` does with its macros and arguments.

It follows the kernel's formulas: packing with its swizzle, boxes with their steps and zeros beyond the borders, bytes
as the tensor copy engine swizzles them and matrix instructions read them, tiles, and the sums that each thread stores.
Barriers are left out.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from gather_interpreter import Floats, Ints, constants
from upconv.cuda.axes import result_shape
from upconv.cuda.packs import PACK_THREADS
from upconv.cuda.pixels import Tile
from upconv.problem import Problem


class PixelsInterpreter:
    """One tile. Shared memory is counted in units of 16 bytes, from where swizzles begin."""

    def __init__(self, tile: Tile, macros: dict[str, int | float | str] | None = None) -> None:
        self.tile = tile
        self.m = m = constants(tile.macros() if macros is None else macros)
        self.vec = 16 // m["ELEMENT"]
        self.units = m["CK"] // self.vec  # of a row
        self.k_steps = self.units // 2
        self.chunks = -(-m["CIN"] // m["CK"])
        sub_h, sub_w = 64 // m["SUB_W"], m["SUB_W"]
        axes = (
            range(m["TILE_D"]),
            range(0, m["TILE_H"] // sub_h * sub_h, sub_h),
            range(0, m["TILE_W"] // sub_w * sub_w, sub_w),
        )
        self.subtiles = list(product(*axes))
        """Of a tile, in the order of their sums: the first result of each along D, H and W."""

    def swizzled(self, unit: Ints) -> Ints:
        """Where hardware puts and finds the unit of an address."""
        if self.units == 8:
            return unit ^ (unit >> 3 & 7)
        return unit ^ (unit >> 3 & 3) if self.units == 4 else unit ^ (unit >> 3 & 1)

    # --- weights -----------------------------------------------------------------------------------------------------

    def pack(self, weight: Floats, tap_step: int = 1) -> Floats:
        """``pack``: [unit, element] of a weight, given in the order of memory."""
        m = self.m
        count = self.chunks * m["TAPS"] * m["COLUMNS"] * self.units
        assert count == self.tile.weight_bytes // 16 and self.tile.pack_blocks * PACK_THREADS >= count
        i = np.arange(count)
        unit, column = i % self.units, i // self.units % m["COLUMNS"]
        rest = i // (self.units * m["COLUMNS"])
        tap, first = m["TAP_INDICES"][rest % m["TAPS"]], rest // m["TAPS"] * m["CK"] + unit * self.vec
        shift = {8: column & 7, 4: column >> 1 & 3, 2: column >> 2 & 1}[self.units]
        packed = np.full((count, self.vec), np.nan)
        for e in range(self.vec):
            cin = first + e
            at = column * (m["CIN"] * m["TAPS"]) + (cin * m["TAPS"] + tap if tap_step == 1 else tap * tap_step + cin)
            have = (cin < m["CIN"]) & (column < m["COUT"])
            packed[i - unit + (unit ^ shift), e] = np.where(have, weight.reshape(-1)[np.where(have, at, 0)], 0.0)
        assert not np.isnan(packed).any(), "a unit that no thread writes"
        return packed

    def boxed(self, weight: Floats) -> Floats:
        """What boxes bring instead of channels-last weights: (result's channels, taps, source's channels)."""
        m = self.m
        found = np.full((self.chunks * m["TAPS"] * m["COLUMNS"] * self.units, self.vec), np.nan)
        padded = np.zeros((m["COLUMNS"], m["TAPS"], self.chunks * m["CK"]))
        padded[: m["COUT"], :, : m["CIN"]] = weight.reshape(m["COUT"], m["TAPS"], m["CIN"])
        rows = np.arange(m["COLUMNS"] * self.units)
        for i in range(self.chunks * m["TAPS"]):
            chunk, tap = i // m["TAPS"], m["TAP_INDICES"][i % m["TAPS"]]
            box = padded[:, tap, chunk * m["CK"] : (chunk + 1) * m["CK"]].reshape(-1, self.vec)
            found[self.swizzled(i * len(rows) + rows)] = box
        return found

    def operand(self, packed: Floats, chunk: int, entry: int) -> Floats:
        """Operand B of a tap, [k of all steps, column], by its descriptors."""
        m = self.m
        begin = (chunk * m["TAPS"] + entry) * m["COLUMNS"] * self.units
        column, step, half = np.indices((m["COLUMNS"], self.k_steps, 2))
        at = begin + step * 2 + column // 8 * (8 * self.units) + column % 8 * self.units + half
        return packed[self.swizzled(at)].reshape(m["COLUMNS"], -1).T

    # --- pixels ------------------------------------------------------------------------------------------------------

    def box(self, g: Floats, plane: int, chunk: int, n: int, corner: tuple[int, int, int]) -> Floats:
        """A stage as a plane's box leaves it: ``g`` is (N, D, H, W, channels), zeros beyond its borders."""
        m, t = self.m, self.tile
        box = t.boxes[m["PLANES_MAP"][plane]]
        steps = (m["STEP_D"], m["STEP_H"], m["STEP_W"])
        firsts = (m["PLANES_D"][plane], m["PLANES_H"][plane], m["PLANES_W"][plane])
        axes = [
            at * step + first + np.arange(0, traversed, step)
            for at, step, first, traversed in zip(corner, steps, firsts, (box[3], box[2], box[1]))
        ]
        inside = [(axis >= 0) & (axis < size) for axis, size in zip(axes, g.shape[1:4])]
        channels = chunk * m["CK"] + np.arange(m["CK"])
        index = np.ix_(
            *(np.where(ok, axis, 0) for ok, axis in zip(inside, axes)), np.where(channels < m["CIN"], channels, 0)
        )
        there = inside[0][:, None, None, None] & inside[1][:, None, None] & inside[2][:, None] & (channels < m["CIN"])
        rows = np.where(there, g[n][index], 0.0).reshape(-1, self.vec)
        assert len(rows) * 16 == m["PLANES_BYTES"][plane] <= m["STAGE_BYTES"]
        assert [len(axis) for axis in axes[1:]] == [m["PLANES_ROWS"][plane], m["PLANES_PITCH"][plane]]
        stage = np.full((m["STAGE_BYTES"] // 16, self.vec), np.nan)
        stage[self.swizzled(np.arange(len(rows)))] = rows
        return stage

    def __call__(self, p: Problem, g: Floats, packed: Floats, blocks: int) -> tuple[Floats, Ints]:
        """The result of ``p``, of the tile's layer at any size, NaN where nothing is stored; stores per element.

        ``g`` and the result are (N, channels, size), as tensors are indexed.
        """
        m = self.m
        out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles = self.tile.arguments(p)
        shape = (1,) * (3 - p.rank) + g.shape[2:]
        last = np.moveaxis(g.reshape(*g.shape[:2], *shape), 1, -1)
        out = np.full((p.batch, out_d, out_h, out_w, m["COUT"]), np.nan)
        stores = np.zeros(out.shape, np.int64)
        # Rows of M by thread: warp, lane / 4, the second eight; columns by lane % 4.
        warp, lane, eight = (a.reshape(-1) for a in np.indices((4, 8, 2)))
        row = warp * 16 + lane + eight * 8
        assert sorted(row) == list(range(64))
        seen = []
        for index in (i for block in range(blocks) for i in range(block, tiles, blocks)):
            seen.append(index)
            q, w = index // tiles_w, index % tiles_w * m["TILE_W"]
            q, h = q // tiles_h, q % tiles_h * m["TILE_H"]
            n, d = q // tiles_d, q % tiles_d * m["TILE_D"]
            acc = np.zeros((len(self.subtiles), 64, m["COLUMNS"]))
            for plane in range(m["PLANES"]):
                for chunk in range(self.chunks):
                    stage = self.box(last, plane, chunk, n, (d, h, w))
                    rows, pitch = m["PLANES_ROWS"][plane], m["PLANES_PITCH"][plane]
                    for entry in range(m["PLANES_FIRST"][plane], m["PLANES_FIRST"][plane + 1]):
                        b = self.operand(packed, chunk, entry)
                        for i, (down_d, down_h, right) in enumerate(self.subtiles):
                            first = m["TAP_ROWS"][entry] + (down_d * rows + down_h) * pitch + right
                            r, step, half = np.indices((64, self.k_steps, 2))
                            apart = pitch if m["SUB_W"] == 8 else 8
                            at = (first + r // 8 * apart + r % 8) * self.units + step * 2 + half
                            acc[i] += stage[self.swizzled(at)].reshape(64, -1) @ b
            for i, (down_d, down_h, right) in enumerate(self.subtiles):
                at_d, at_h = d + down_d, h + down_h + row // m["SUB_W"]
                at_w = w + right + row % m["SUB_W"]
                ok = (at_d < out_d) & (at_h < out_h) & (at_w < out_w)
                if at_d < out_d:
                    out[n, at_d, at_h[ok], at_w[ok]] = acc[i][row[ok], : m["COUT"]]
                    stores[n, at_d, at_h[ok], at_w[ok]] += 1
        assert sorted(seen) == list(range(tiles)), "blocks divide all tiles"
        found = [np.moveaxis(a, -1, 1).reshape(result_shape(p)) for a in (out, stores)]
        return found[0], found[1]
