"""The kernel of phases as columns in NumPy and float64: what `kernels/phases.cu` does with its macros and arguments.

It follows the kernel's formulas: packing with its swizzle and order of channels, boxes of the source's rows with zeros
beyond its borders, the places from which lanes load fragments, the columns that each matrix instruction has and the
registers that its sums are in, a consumer's buffer, and which units and elements are stored from it, and where. What
nothing writes of a buffer is NaN. Rings and barriers are left out, and that counts wrap at 32 bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gather_interpreter import LANES, WARPS, Floats, Ints, constants, fragment_place
from upconv.cuda.packs import PACK_THREADS
from upconv.cuda.phases import Tile
from upconv.problem import Problem


class PhasesInterpreter:
    """One tile. Shared memory and the output's are counted in elements, packed weights in units of 16 bytes."""

    def __init__(self, tile: Tile, macros: dict[str, int | float | str] | None = None) -> None:
        self.tile = tile
        self.m = m = constants(tile.macros() if macros is None else macros)
        self.element = m["ELEMENT"]
        self.vec, self.step_k = 16 // self.element, 32 // self.element
        self.k_steps = m["CK"] * self.element // 32
        self.chunks = -(-m["CIN"] // m["CK"])
        self.row = m["CK"] * m["PITCH"]  # of the source, in shared memory
        self.source_rows = m["ROWS_D"] * m["ROWS_H"]
        self.stage = self.source_rows * self.row
        self.step_units = m["USERS"] * m["SHIFT_COLUMNS"] * 2  # of 16 bytes, of a step of K
        self.weight_units = self.chunks * self.k_steps * self.step_units
        self.runs, run = m["TILE_D"] * m["TILE_H"], m["TILE_W"] * m["STEP_W"]
        self.units = run // self.vec  # whole ones that a row of outputs may have
        line_words = (self.units + (not m["ALIGNED"])) * 4
        channel_bytes = ((self.runs * line_words + 11) // 16 * 16 + 4) * 4
        self.line, self.channel = line_words * 4 // self.element, channel_bytes // self.element
        self.of_warp = m["PASS"] // 4
        self.rounds = (self.of_warp * self.units + 31) // 32
        buffers = m["CONSUMERS"] * m["PASS"] * channel_bytes
        rings = m["CONSUMERS"] * m["STAGES"] * (self.stage * self.element + 16)
        shared_bytes = -(-self.weight_units * 16 // 128) * 128 + rings + buffers + 8
        assert m["SHARED_BYTES_PLANNED"] == shared_bytes == tile.shared_bytes, "the kernel's #error"
        self.widths = {m[f"WIDTH_{i}"] for i in range(m["WIDTHS"])}
        for i in range(m["WIDTHS"]):
            assert m[f"W{i}_COLUMNS"] == f'"{m[f"WIDTH_{i}"]}"'

    # --- weights -----------------------------------------------------------------------------------------------------

    def channel_at(self, k: Ints) -> Ints:
        """The channel of a step at a place of K."""
        return k if self.element == 2 else k % 4 * 2 + k // 4

    def pack(self, weight: Floats, tap_step: int = 1) -> Floats:
        """``pack``: [unit of 16 bytes, element] of a weight, given in the order of memory."""
        m = self.m
        count = self.weight_units
        assert count == self.tile.packed_words // 4 and self.tile.pack_blocks * PACK_THREADS >= count
        i = np.arange(count)
        unit, column = i % 2, i // 2 % m["SHIFT_COLUMNS"]
        user, step = i // (2 * m["SHIFT_COLUMNS"]) % m["USERS"], i // self.step_units
        cout, of_w = column % m["CO_COLUMNS"], m["COLUMN_TAPS"][column // m["CO_COLUMNS"]]
        tap = m["USER_TAPS"][user] * m["KERNEL_W"] + of_w
        kernel = m["KERNEL_D"] * m["KERNEL_H"] * m["KERNEL_W"]
        packed = np.full((count, self.vec), np.nan)
        to = i - unit + (unit ^ (column >> 2 & 1))
        for e in range(self.vec):
            cin = step * self.step_k + self.channel_at(unit * self.vec + e)
            at = cin * (m["COUT"] * kernel) + (cout * kernel + tap if tap_step == 1 else tap * tap_step + cout)
            have = (cin < m["CIN"]) & (cout < m["COUT"]) & (of_w >= 0)
            packed[to, e] = np.where(have, weight.reshape(-1)[np.where(have, at, 0)], 0.0)
        assert not np.isnan(packed).any(), "a unit that no thread writes"
        return packed

    def operand(self, packed: Floats, user: int, shift: int) -> Floats:
        """Operands B of all steps, [k, column], by their descriptors: groups of 8 rows of 32 bytes."""
        m = self.m
        width = int(m["SHIFT_WIDTHS"][shift])
        step, column, unit = np.indices((self.chunks * self.k_steps, width, 2))
        begin = step * self.step_units + (user * m["SHIFT_COLUMNS"] + m["SHIFT_BEFORE"][shift]) * 2
        place = begin + column // 8 * 16 + column % 8 * 2 + unit
        place ^= place >> 3 & 1  # what hardware does with addresses of this swizzle
        return packed[place].transpose(0, 2, 3, 1).reshape(-1, width)

    # --- producers ---------------------------------------------------------------------------------------------------

    def stages(self, x: Floats, n: int, d: int, h: int, w: int) -> Floats:
        """[chunk, element] of shared memory as boxes leave it for a tile; ``x`` is (N, C, D, H, W)."""
        m = self.m
        assert self.tile.box == (m["PITCH"], 1, 1, m["CK"], 1), "what the map has is not what barriers expect"
        assert (w + m["FIRST_W"]) * self.element % 16 == 0, "a box that begins off 16 bytes"
        assert self.row * self.element % 128 == 0, "a box that lands off 128 bytes"
        row = np.arange(self.source_rows)
        corners = d + m["FIRST_D"] + row // m["ROWS_H"], h + m["FIRST_H"] + row % m["ROWS_H"]
        places = np.arange(self.chunks * m["CK"]), w + m["FIRST_W"] + np.arange(m["PITCH"])
        # [row, channel, place]
        index = (places[0][:, None], corners[0][:, None, None], corners[1][:, None, None], places[1])
        inside = [(at >= 0) & (at < size) for at, size in zip(index, x.shape[1:])]
        values = x[n][tuple(np.where(ok, at, 0) for ok, at in zip(inside, index))]
        found = np.where(inside[0] & inside[1] & inside[2] & inside[3], values, 0.0)
        of_chunk = found.reshape(self.source_rows, self.chunks, self.row).transpose(1, 0, 2)
        return of_chunk.reshape(self.chunks, self.stage)

    # --- consumers ---------------------------------------------------------------------------------------------------

    def fragments(self) -> Ints:
        """Where operands A lie of the first row and step, [shift, row of M of all subtiles, k]."""
        m = self.m
        rows, ks = fragment_place(self.element)
        lane, register, low = np.indices(rows.shape)
        mb, warp = np.arange(m["MB"])[:, None, None, None, None], np.arange(WARPS)[:, None, None, None]
        position = mb * 64 + warp * 16
        run = position // m["TILE_W"]
        own = (run // m["TILE_H"] * m["ROWS_H"] + run % m["TILE_H"]) * self.row
        own = own + (lane & 3) * 2 * m["PITCH"] + position % m["TILE_W"] + (lane >> 2)
        half = register // 2
        channel = half if self.element == 4 else half * 8 + low
        at = own + register % 2 * 8 + channel * m["PITCH"]
        found = np.full((m["MB"], WARPS, 16, self.step_k), -1)
        found[:, :, rows, ks] = at
        assert found.min() >= 0, "a place of A that no register has"
        return m["SHIFTS_AT"][:, None, None] + found.reshape(-1, self.step_k)

    def operands(self, packed: Floats) -> dict[tuple[int, int], Floats]:
        """By user and shift."""
        return {(i, j): self.operand(packed, i, j) for i in range(self.m["USERS"]) for j in range(self.m["SHIFTS"])}

    def sums(self, stages: Floats, operands: dict[tuple[int, int], Floats]) -> Floats:
        """[pair, row of M of all subtiles, column] of a tile."""
        m = self.m
        acc = np.zeros((m["PAIRS"], m["MB"] * 64, m["STEP_W"] * m["CO_COLUMNS"]))
        begins = self.fragments()
        steps = np.arange(self.k_steps) * (self.step_k * m["PITCH"])
        for row in range(m["SOURCE_ROWS"]):
            at = begins[:, :, None] + (m["SOURCE_ROWS_AT"][row] * self.row + steps)[:, None]
            assert at.min() >= 0 and at.max() < self.stage, "a lane reads beside its stage"
            a = stages[:, at].transpose(1, 2, 0, 3, 4).reshape(*at.shape[:2], -1)  # chunks, steps, places of K
            for shift in range(m["SHIFTS"]):
                width = int(m["SHIFT_WIDTHS"][shift])
                if width not in self.widths:
                    continue  # no instruction is of this width
                for user in range(m["FIRST_USERS"][row], m["FIRST_USERS"][row + 1]):
                    acc[m["USER_PAIRS"][user], :, :width] += a[shift] @ operands[user, shift]
        return acc

    def registers(self, sums: Floats) -> Floats:
        """The same as threads have them: [pair, thread, subtile, register]."""
        m = self.m
        thread, i = np.indices((128, sums.shape[-1] // 2))
        row = (thread >> 5) * 16 + (thread % LANES >> 2) + 8 * (i % 4 // 2)
        column = 8 * (i // 4) + 2 * (thread & 3) + i % 2
        return sums.reshape(m["PAIRS"], m["MB"], 64, -1)[:, :, row, column].transpose(0, 2, 1, 3)

    def buffer(
        self, acc: Floats, bias: Floats | None, first: int, begin: int, plane: int, out: tuple[int, int]
    ) -> Floats:
        """A consumer's buffer with the channels from ``first`` on of one pair's registers.

        ``begin``: of the pair's first output in memory; ``out``: the output's size along H and W.
        """
        m = self.m
        out_h, out_w = out
        thread, j, c, mb, h, u = np.indices((128, m["PASS"] // 8, 2, m["MB"], 2, m["STEP_W"]))
        lane, j = thread & 31, first // 8 + j
        channel, of = (lane & 3) * 2, 8 * j + c
        position = mb * 64 + (thread >> 5) * 16 + h * 8
        run = position // m["TILE_W"]
        to = (of - first + channel) * self.channel + (lane >> 2) * m["STEP_W"]
        to += run * self.line + position % m["TILE_W"] * m["STEP_W"]
        if not m["ALIGNED"]:
            above = (run // m["TILE_H"] * m["STEP_D"] * out_h + run % m["TILE_H"] * m["STEP_H"]) * out_w
            to += (begin + (of + channel) * plane + above) % self.vec
        values = acc[thread, mb, m["PLACES_OF_PHASES"][u] * (m["CO_COLUMNS"] // 2) + 4 * j + 2 * h + c]
        if bias is not None:
            have = of + channel < m["COUT"]
            values = values + np.where(have, bias[np.where(have, of + channel, 0)], 0.0)
        if m["STEP_W"] % 2 == 0 and m["ALIGNED"]:  # neighbours are stored together
            assert (to % 2 == 0).all(), "two outputs that are stored off their size"
        found = np.full(m["PASS"] * self.channel, np.nan)
        to = to + u
        assert np.bincount(to.reshape(-1)).max() == 1, "a place of the buffer is written twice"
        found[to] = values
        return found

    def store(
        self, memory: Floats, stores: Ints, acc: Floats, bias: Floats | None, address: int, out: tuple[int, int, int],
        tile: tuple[int, int, int, int],
    ) -> None:  # fmt: skip
        """Stores a tile's registers; ``address``: of the output in ``memory``, whose first element is at 16 bytes."""
        m = self.m
        (out_d, out_h, out_w), (n, d, h, w), vec = out, tile, self.vec
        plane = out_d * out_h * out_w
        columns = min(out_w - w * m["STEP_W"], self.units * vec)
        run = np.arange(self.runs)[:, None, None, None]
        warp, lane = np.arange(WARPS)[:, None, None], np.arange(LANES)[:, None]
        down_d, down_h = run // m["TILE_H"] * m["STEP_D"], run % m["TILE_H"] * m["STEP_H"]
        index = lane + np.arange(self.rounds) * 32
        some = index < self.of_warp * self.units
        c, unit = warp * self.of_warp + np.where(some, index // self.units, 0), index % self.units
        within = np.arange(vec)

        def put(to: Ints, values: Floats, ok: NDArray[np.bool_]) -> None:
            at = to[ok]
            assert at.min(initial=0) >= 0 and at.max(initial=0) < len(memory), "a store outside of memory"
            np.add.at(stores, at, 1)
            memory[at] = values[ok]

        for pair in range(m["PAIRS"]):
            first_d = d * m["STEP_D"] + m["PAIR_PHASES_D"][pair]
            first_h = h * m["STEP_H"] + m["PAIR_PHASES_H"][pair]
            begin = address + n * m["COUT"] * plane + (first_d * out_h + first_h) * out_w + w * m["STEP_W"]
            row = (first_d + down_d < out_d) & (first_h + down_h < out_h)
            to_run = begin + (down_d * out_h + down_h) * out_w
            for first in range(0, m["CO_COLUMNS"], m["PASS"]):
                buffer = self.buffer(acc[pair], bias, first, begin, plane, (out_h, out_w))
                to = to_run + (first + c) * plane
                phase = np.zeros_like(to) if m["ALIGNED"] else to % vec
                of = unit + (phase > 0)  # the one before is whole in no row
                at = of * vec - phase
                from_ = run * self.line + c * self.channel + of * vec
                assert (from_ % vec == 0).all() and from_.max() + vec <= len(buffer)
                whole = row & (at + vec <= columns) & (first + c < m["COUT"]) & some
                assert ((to + at)[whole] % vec == 0).all(), "a unit that is stored off 16 bytes"
                ok = np.broadcast_to(whole[..., None], (*whole.shape, vec))
                put((to + at)[..., None] + within, buffer[from_[..., None] + within], ok)
                if m["ALIGNED"]:
                    continue
                # A lane for each end of a channel's row.
                of_end = warp * self.of_warp + lane // 2 % self.of_warp
                line = to_run + (first + of_end) * plane
                phase = line % vec
                end = np.where(lane % 2, (columns + phase) // vec, 0)
                at = end * vec - phase
                part = row & (lane < 2 * self.of_warp) & (first + of_end < m["COUT"])
                part &= np.where(lane % 2, end > 0, (phase > 0) | (columns < vec))
                assert end.max() <= self.units
                elements = at[..., None] + within
                ok = part[..., None] & (elements >= 0) & (elements < columns)
                from_ = run * self.line + of_end * self.channel + end * vec
                put(line[..., None] + elements, buffer[from_[..., None] + within], ok)

    def __call__(
        self, p: Problem, x: Floats, packed: Floats, bias: Floats | None, blocks: int, address: int = 0
    ) -> tuple[Floats, Ints]:
        """The output of ``p``, of the tile's layer at any size, NaN where nothing is stored; stores per element.

        ``address``: of the output in memory, in elements of which the first is at 16 bytes.
        """
        m = self.m
        out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles = self.tile.arguments(p)
        last = x.reshape(*x.shape[:2], *(1,) * (3 - p.rank), *x.shape[2:])
        count = p.batch * m["COUT"] * out_d * out_h * out_w
        memory = np.full(address + count + 2 * self.vec, np.nan)
        stores = np.zeros(memory.shape, np.int64)
        operands, seen = self.operands(packed), []
        for block in range(blocks):
            for consumer in range(m["CONSUMERS"]):
                for index in range(block * m["CONSUMERS"] + consumer, tiles, blocks * m["CONSUMERS"]):
                    seen.append(index)
                    q, w = index // tiles_w, index % tiles_w * m["TILE_W"]
                    q, h = q // tiles_h, q % tiles_h * m["TILE_H"]
                    n, d = q // tiles_d, q % tiles_d * m["TILE_D"]
                    acc = self.registers(self.sums(self.stages(last, n, d, h, w), operands))
                    self.store(memory, stores, acc, bias, address, (out_d, out_h, out_w), (n, d, h, w))
        assert sorted(seen) == list(range(tiles)), "blocks divide all tiles"
        inside = slice(address, address + count)
        assert stores.sum() == stores[inside].sum(), "a store beside the output"
        return memory[inside].reshape(p.output_shape), stores[inside].reshape(p.output_shape)
