"""The sweep kernel in NumPy and float64: what `kernels/sweep.cu` does with its macros and arguments.

It follows the kernel's formulas: packing with its swizzle, the walks of blocks, the slices' sums that move from slot to
slot, and the addresses of the stores. The tile's pixels are those of `gather_interpreter`. What moves data without
changing its place (slots of boxes, barriers, rings, the buffer of the epilogue) is left out.
"""

from __future__ import annotations

import numpy as np

from gather_interpreter import Floats, Interpreter, Ints, Tiles, constants
from upconv.cuda.axes import result_shape
from upconv.cuda.sweep import Sweep
from upconv.problem import Problem


class SweepInterpreter:
    """One sweep."""

    def __init__(self, sweep: Sweep, macros: dict[str, int | float | str] | None = None) -> None:
        self.sweep = sweep
        self.m = m = constants(sweep.macros() if macros is None else macros)
        self.pixels = Interpreter(sweep.pixels)
        self.row_bytes = m["CK"] * m["ELEMENT"]
        self.units, self.vec = self.row_bytes // 16, 16 // m["ELEMENT"]
        self.k_steps = self.row_bytes // 32
        self.chunks = -(-m["CIN"] // m["CK"])

    def unit_at(self, row: Ints, unit: Ints) -> Ints:
        """Unit of 16 bytes, counted from the tile's begin, that has unit ``unit`` of row ``row``."""
        swizzle = {32: row >> 2 & 1, 64: row >> 1 & 3, 128: row & 7}[self.row_bytes]
        return row * self.units + (unit ^ swizzle)

    # --- weights -----------------------------------------------------------------------------------------------------

    def pack(self, weight: Floats, tap_step: int = 1) -> Floats:
        """``pack``: [unit of 16 bytes, element] of a weight, given in the order of memory."""
        m = self.m
        count = self.chunks * m["TAP_ENTRIES"] * m["COLUMNS_OF_B"] * self.units
        assert count * 4 == self.sweep.packed_words and self.sweep.pack_blocks * 256 >= count
        i = np.arange(count)
        unit, column, rest = i % self.units, i // self.units % m["COLUMNS_OF_B"], i // (self.units * m["COLUMNS_OF_B"])
        entry, first = rest % m["TAP_ENTRIES"], rest // m["TAP_ENTRIES"] * m["CK"] + unit * self.vec
        slot, cout = column // m["SLOT_COLUMNS"], column % m["SLOT_COLUMNS"]
        tap = (m["SLOTS"] - 1 - slot if m["GRAD_INPUT"] else slot) * m["TAPS"] + m["TAP_INDICES"][entry]
        kernel = m["SLOTS"] * m["TAPS"]
        packed = np.full((count, self.vec), np.nan)
        to = rest * m["COLUMNS_OF_B"] * self.units + self.unit_at(column, unit)
        for e in range(self.vec):
            cin = first + e
            outer, inner = (cout, cin) if m["GRAD_INPUT"] else (cin, cout)
            of_inner = m["CIN"] if m["GRAD_INPUT"] else m["COUT"]
            at = outer * of_inner * kernel + (inner * kernel + tap if tap_step == 1 else tap * tap_step + inner)
            have = (cin < m["CIN"]) & (cout < m["COUT"])
            packed[to, e] = np.where(have, weight.reshape(-1)[np.where(have, at, 0)], 0.0)
        assert not np.isnan(packed).any(), "a unit that no thread writes"
        return packed

    def operand(self, packed: Floats, chunk: int, entry: int) -> Floats:
        """A tap's operand B for a chunk, [column, k], by the addresses that descriptors and their swizzle give."""
        m = self.m
        begin = (chunk * m["TAP_ENTRIES"] + entry) * m["COLUMNS_OF_B"] * self.units
        column, unit = np.indices((m["COLUMNS_OF_B"], self.units))
        return packed[begin + self.unit_at(column, unit)].reshape(m["COLUMNS_OF_B"], m["CK"])

    # --- the kernel --------------------------------------------------------------------------------------------------

    def __call__(
        self, p: Problem, x: Floats, packed: Floats, bias: Floats | None, blocks: int, multiprocessors: int
    ) -> tuple[Floats, Ints]:
        """The result of ``p``, of the sweep's layer at any size, NaN where nothing is stored; stores per element."""
        m = self.m
        arguments = self.sweep.arguments(p, multiprocessors)
        batch, in_d, _, _, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles = arguments
        slots, columns = m["SLOTS"], m["SLOT_COLUMNS"]
        segment = -(-out_d // tiles_d)
        steps = segment + slots - 1
        operands = [[self.operand(packed, c, e) for e in range(m["TAP_ENTRIES"])] for c in range(self.chunks)]
        positions = np.arange(m["NB"] * 128)
        row, w = positions // self.pixels.pitch, positions % self.pixels.pitch
        out = np.full((batch, m["COUT"], out_d, out_h, out_w), np.nan)
        stores = np.zeros(out.shape, np.int64)
        seen = []
        for block in range(blocks):
            acc = np.full((len(positions), slots, columns), np.nan)  # what registers hold at first is nothing
            index = block * steps
            while index < tiles:
                seen.append(index)
                q, step = divmod(index, steps)
                q, tile_w = divmod(q, tiles_w)
                q, tile_h = divmod(q, tiles_h)
                n, part = divmod(q, tiles_d)
                at = [
                    n,
                    part * segment + step - (slots - 1) - m["FIRST_SLOT"],
                    tile_h * m["TILE_H"],
                    tile_w * m["TILE_W"],
                ]
                moved = np.zeros_like(acc)
                if step > 0:
                    moved[:, :-1] = acc[:, 1:]
                acc = moved
                if slots == 1 or 0 <= at[1] < in_d:
                    place = [np.array([v]) for v in (0, 0, 0, *at)]
                    pixels = self.pixels.pixel_rows(x, Tiles(*place))[0, :, 0]
                    assert np.isfinite(pixels[:, : m["CIN"]]).all()
                    for chunk, taps in enumerate(operands):
                        channels = slice(chunk * m["CK"], (chunk + 1) * m["CK"])
                        for shift, b in zip(m["TAP_ROWS"], taps):
                            rows = positions + shift
                            # Rows behind the tile are of other tiles; no position with an output reads one.
                            a = np.where(
                                rows[:, None] < len(pixels), pixels[np.minimum(rows, len(pixels) - 1), channels], np.inf
                            )
                            live = np.isfinite(a).all(axis=1)
                            acc[live] += (a[live] @ b.T).reshape(-1, slots, columns)
                            acc[~live] = np.nan
                od = at[1] + m["FIRST_SLOT"]
                if step >= slots - 1 and od < out_d:
                    stored = (row < m["TILE_H"]) & (w < m["TILE_W"]) & (at[2] + row < out_h) & (at[3] + w < out_w)
                    oh, ow = at[2] + row[stored], at[3] + w[stored]
                    values = acc[stored, 0, : m["COUT"]].T
                    assert not np.isnan(values).any(), "a sum of rows behind the tile, or of what registers held"
                    out[n, :, od, oh, ow] = (values if bias is None else values + bias[:, None]).T
                    stores[n, :, od, oh, ow] += 1
                index += 1
                if index % steps == 0:
                    index += (blocks - 1) * steps
        assert sorted(seen) == list(range(tiles)), "blocks divide the slices of all walks"
        return out.reshape(result_shape(p)), stores.reshape(result_shape(p))
