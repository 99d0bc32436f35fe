"""The implicit GEMM in NumPy and float64: what `kernels/implicit.cu` does with its macros and arguments.

It follows the kernel's formulas: packing, boxes with their steps and zeros beyond the borders, bytes as the tensor copy
engine swizzles them and matrix instructions read them, tiles, the shares of a cluster's blocks, and the sums that each
thread stores. Shared memory holds NaNs wherever nothing was written. Barriers are left out.
"""

from __future__ import annotations

import numpy as np

from gather_interpreter import Floats, Ints, constants
from upconv.cuda.axes import result_shape
from upconv.cuda.gpu import H200, Gpu
from upconv.cuda.implicit import Tile, source_box
from upconv.problem import Problem


class ImplicitInterpreter:
    """One tile. Shared memory is counted in units of 16 bytes, from where swizzles begin."""

    def __init__(self, tile: Tile, macros: dict[str, int | float | str] | None = None, gpu: Gpu = H200) -> None:
        self.tile, self.gpu = tile, gpu
        self.m = m = constants(tile.macros() if macros is None else macros)
        self.vec = 16 // m["ELEMENT"]
        self.units = m["CK"] // self.vec  # of a row
        self.k_steps = self.units // 2
        self.chunks = -(-m["CIN"] // m["CK"])
        self.rows = 64 * m["MB"] * (m["CONSUMERS"] if m["HALVES"] else 1)
        row = m["CK"] * m["ELEMENT"]
        self.pixel_units = self.rows * self.units
        self.stage_units = self.pixel_units + -(-m["COLUMNS"] * row // 1024) * 64
        assert m["STAGES"] * (self.stage_units * 16 + 16) == m["SHARED_BYTES_PLANNED"]
        assert self.pixel_units % 64 == 0, "weights begin where their swizzle does"

    def swizzled(self, unit: Ints, of_row: int = 0) -> Ints:
        """Where hardware puts and finds the unit of an address, of rows of so many; else of a stage's pixels."""
        if (of_row or self.units) == 8:
            return unit ^ (unit >> 3 & 7)
        return unit ^ (unit >> 3 & 3) if (of_row or self.units) == 4 else unit ^ (unit >> 3 & 1)

    def pack(self, weight: Floats, tap_step: int = 1) -> Floats:
        """``pack``: (result's channels, taps, source's channels) of a weight, given in the order of memory."""
        return self._turned(weight, tap_step) if self.m["FORWARD"] else self._gathered(weight, tap_step)

    def _turned(self, weight: Floats, tap_step: int) -> Floats:
        """A forward's, square by square; NaN where no block writes."""
        m, square = self.m, 64
        row = m["COUT"] * m["TAPS"]
        flat, squares = weight.reshape(m["CIN"], row), -(-row // square)
        packed = np.full((row, m["CIN"]), np.nan)
        assert self.tile.pack_blocks == squares * -(-m["CIN"] // square)
        for block in range(self.tile.pack_blocks):
            at = block % squares * square + np.arange(square)
            cin = block // squares * square + np.arange(square)
            at, cin = at[at < row], cin[cin < m["CIN"]]
            to = at if tap_step == 1 else at % m["COUT"] * m["TAPS"] + at // m["COUT"]
            packed[np.ix_(to, cin)] = flat[np.ix_(cin, at)].T
        return packed.reshape(m["COUT"], m["TAPS"], m["CIN"])

    def _gathered(self, weight: Floats, tap_step: int) -> Floats:
        """A gradient's, some channels of a row at a time; NaN where no block writes."""
        m = self.m
        taps, apart = m["TAPS"], m["PACK_CHANNELS"]
        parts = -(-m["CIN"] // apart)
        flat, packed = weight.reshape(-1), np.full((m["COUT"], taps, m["CIN"]), np.nan)
        assert self.tile.pack_blocks == parts * m["COUT"] and apart * taps <= 4096
        for block in range(self.tile.pack_blocks):
            first, row = block % parts * apart, block // parts * m["CIN"] * taps
            count = min(apart, m["CIN"] - first)
            if tap_step == 1:
                own = flat[row + first * taps : row + (first + count) * taps].reshape(count, taps).T
            else:
                own = flat[row + np.arange(taps)[:, None] * tap_step + first + np.arange(count)]
            packed[block // parts, :, first : first + count] = own
        return packed

    # --- a step's stage ----------------------------------------------------------------------------------------------

    def pixels(self, g: Floats, p: Problem, step: int, corner: tuple[int, ...]) -> Floats:
        """The box of a tap's pixels: ``g`` is (N, D, H, W, channels), zeros beyond its borders."""
        m = self.m
        tap, channel = step // self.chunks, step % self.chunks * m["CK"]
        traversed, steps = source_box(self.tile, p), (1, m["STEP_D"], m["STEP_H"], m["STEP_W"])
        assert max(traversed) <= 256 and max(steps) <= 8
        firsts = (0, m["TAPS_D"][tap], m["TAPS_H"][tap], m["TAPS_W"][tap])
        ends = (traversed[4], traversed[3], traversed[2], traversed[1])
        axes = [at * by + first + np.arange(0, end, by) for at, by, first, end in zip(corner, steps, firsts, ends)]
        inside = [(axis >= 0) & (axis < size) for axis, size in zip(axes, g.shape)]
        channels = channel + np.arange(m["CK"])
        have = channels < m["CIN"]
        index = np.ix_(*(np.where(ok, axis, 0) for ok, axis in zip(inside, axes)), np.where(have, channels, 0))
        found = g[index]
        for axis, ok in enumerate((*inside, have)):
            found = np.where(ok.reshape((-1, *(1,) * (4 - axis))), found, 0.0)
        return found.reshape(-1, self.vec)

    def weights(self, packed: Floats, step: int, column: int) -> Floats:
        """The box of a tap's weights, zeros beyond the tensor."""
        m = self.m
        tap, channel = step // self.chunks, step % self.chunks * m["CK"]
        box = np.zeros((m["COLUMNS"], m["CK"]))
        if m["PHASES"] > 1:
            tap = m["TAPS_OF"][tap]
        own = packed[column : column + m["COLUMNS"], tap, channel : channel + m["CK"]]
        box[: own.shape[0], : own.shape[1]] = own
        if m["B_TURNED"]:  # boxes of 64 columns, whose rows are channels of the source
            box = box.reshape(-1, 64, m["CK"]).swapaxes(1, 2)
        return box.reshape(-1, self.vec)

    def operand_of_weights(self, stage: Floats) -> Floats:
        """[column, k] as descriptors read the weights."""
        m = self.m
        if not m["B_TURNED"]:
            return self.operand(stage, self.pixel_units, m["COLUMNS"])
        column, k = np.indices((m["COLUMNS"], m["CK"]))
        unit = self.pixel_units + (column // 64 * m["CK"] + k) * 8 + column % 64 // 8
        return stage[self.swizzled(unit, 8), column % 8]

    def operand(self, stage: Floats, begin: int, rows: int) -> Floats:
        """[row, k] as descriptors read rows from unit `begin` on."""
        row, step, half = np.indices((rows, self.k_steps, 2))
        return stage[self.swizzled(begin + row * self.units + step * 2 + half)].reshape(rows, -1)

    # --- the kernel --------------------------------------------------------------------------------------------------

    def _result(self, axis: str, position: int, phase: int) -> int:
        if self.m["PHASES"] == 1:
            return position
        return int(position * self.m[f"OUT_STEP_{axis}"] + self.m[f"PHASES_{axis}"][phase])

    def __call__(self, p: Problem, g: Floats, packed: Floats, blocks: int) -> tuple[Floats, Ints]:
        """The result of ``p``, of the tile's layer at any size, NaN where nothing is stored; stores per element.

        ``g`` and the result are (N, channels, size), as tensors are indexed.
        """
        m, cluster = self.m, self.m["CLUSTER"]
        *sizes, tiles_d, tiles_h, tiles_w, tiles, abreast, turn = self.tile.arguments(p, self.gpu)
        phases, phase = m["PHASES"], 0
        ends = m["PHASES_TAP"] if phases > 1 else (0, m["TAPS"])
        sides, box = sizes[:4], sizes[4:]
        assert np.prod(box) <= self.rows
        last = np.moveaxis(g.reshape(*g.shape[:2], *(1,) * (3 - p.rank), *g.shape[2:]), 1, -1)
        out = np.full((*sides, m["COUT"]), np.nan)
        stores, seen = np.zeros(out.shape, np.int64), []
        column_blocks = -(-m["COUT"] // m["COLUMNS"])
        firsts = range(tiles) if cluster > 1 else (i for b in range(blocks) for i in range(b, tiles, blocks))
        for index in firsts:
            seen.append(index)
            q, column = index // column_blocks, index % column_blocks * m["COLUMNS"]
            if phases > 1:
                first = q // (phases * abreast) * abreast
                rest, width = q - first * phases, min(abreast, tiles // (column_blocks * phases) - first)
                phase, q = (rest // width + first // turn) % phases, first + rest % width
            q, w = q // tiles_w, q % tiles_w * box[3]
            q, h = q // tiles_h, q % tiles_h * box[2]
            n, d = q // tiles_d * box[0], q % tiles_d * box[1]
            total = np.zeros((self.rows, m["COLUMNS"]))
            taken = []
            begin, count = ends[phase] * self.chunks, (ends[phase + 1] - ends[phase]) * self.chunks
            for rank in range(cluster):
                for step in range(begin + rank * count // cluster, begin + (rank + 1) * count // cluster):
                    taken.append(step)
                    stage = np.full((self.stage_units, self.vec), np.nan)
                    own = self.pixels(last, p, step, (n, d, h, w))
                    assert len(own) == np.prod(box) * self.units, "the barrier expects other bytes"
                    stage[self.swizzled(np.arange(len(own)))] = own
                    rows = self.weights(packed, step, column)
                    of_row = 8 * m["B_TURNED"]
                    stage[self.swizzled(self.pixel_units + np.arange(len(rows)), of_row)] = rows
                    total += self.operand(stage, 0, self.rows) @ self.operand_of_weights(stage).T
            assert taken == list(range(begin, begin + count))
            for row in range(self.rows):
                at, rest = row % box[3], row // box[3]
                i_h, rest = rest % box[2], rest // box[2]
                i_d, i_n = rest % box[1], rest // box[1]
                place = n + i_n, *(self._result(*of, phase) for of in zip("DHW", (d + i_d, h + i_h, w + at)))
                if i_n < box[0] and all(a < size for a, size in zip(place, sides)):
                    own_columns = slice(column, min(column + m["COLUMNS"], m["COUT"]))
                    out[place][own_columns] = total[row, : own_columns.stop - column]
                    stores[place][own_columns] += 1
        assert sorted(seen) == list(range(tiles)), "blocks divide all tiles"
        found = [np.moveaxis(a, -1, 1).reshape(result_shape(p)) for a in (out, stores)]
        return found[0], found[1]
