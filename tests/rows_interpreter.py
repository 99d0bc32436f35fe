"""The kernel of rows as they lie in NumPy and float64: what `kernels/rows.cu` does with its macros and arguments.

It follows the kernel's formulas: packing with its swizzle, the walks of blocks, units of 16 bytes copied at addresses
rounded down, the bytes that lanes read and their border's mask, and the slices' sums that move from slot to slot. What
a unit brings from before its row is what lies there, NaN before and behind the source. Barriers' phases are left out,
but not the counts that release the ring's units.
"""

from __future__ import annotations

import numpy as np

from gather_interpreter import LANES, WARPS, Floats, Ints, constants, fragment_place
from upconv.cuda.axes import result_shape
from upconv.cuda.packs import PACK_THREADS
from upconv.cuda.rows import Rows
from upconv.problem import Problem


class RowsInterpreter:
    """One tile of rows. Addresses of memory and of shared memory are counted in elements."""

    def __init__(self, rows: Rows, macros: dict[str, int | float | str] | None = None) -> None:
        self.rows = rows
        self.m = m = constants(rows.macros() if macros is None else macros)
        self.element = m["ELEMENT"]
        self.vec = 16 // self.element
        self.k_steps = m["CK"] * self.element // 32
        self.step_k = 32 // self.element
        self.chunks = -(-m["CIN"] // m["CK"])
        self.plane_rows = m["STEP_H"] * (m["CONSUMERS"] - 1) + m["KERNEL_H"]
        self.users = -(-m["KERNEL_H"] // m["STEP_H"])
        self.pitch, self.group_pad = m["ROW_PITCH"] * self.vec, 0 if self.element == 4 else 32 // self.element
        self.unit = m["CK"] * self.pitch + (m["CK"] // self.vec - 1) * self.group_pad
        self.block_units = m["SLOT_COLUMNS"] * 2  # of 16 bytes, of one kernel slice, a step of K
        self.weight_steps = self.chunks * m["KERNEL_H"] * m["KERNEL_W"] * self.k_steps

    def meets(self, f: int) -> int:
        """Kernel slices that source slice ``f`` of a step meets."""
        kernel, step = self.m["KERNEL_D"], self.m["STEP_D"]
        return -(-(kernel - f) // step) if f < kernel else 0

    def met_before(self, f: int) -> int:
        return sum(self.meets(before) for before in range(f))

    def channel_at(self, step: Ints, t: Ints, half: Ints, low: Ints) -> Ints:
        """The channel of a chunk at a fragment's place in K."""
        if self.element == 4:
            return step * 8 + (t & 1) * 4 + (t >> 1) + half * 2
        if self.m["CK"] == 32:
            return t * 8 + step * 4 + half * 2 + low
        return step * 16 + (t & 1) * 8 + (t >> 1) * 4 + half * 2 + low

    # --- weights -----------------------------------------------------------------------------------------------------

    def pack(self, weight: Floats, tap_step: int = 1) -> Floats:
        """``pack``: [unit of 16 bytes, element] of a weight, given in the order of memory."""
        m = self.m
        count = self.weight_steps * m["KERNEL_D"] * self.block_units
        assert count == self.rows.weight_bytes // 16 and self.rows.pack_blocks * PACK_THREADS >= count
        i = np.arange(count)
        ends = np.cumsum([self.weight_steps * self.meets(f) * self.block_units for f in range(m["STEP_D"])])
        assert ends[-1] == count, "slices of a step have all kernel slices"
        f = np.searchsorted(ends, i, side="right")
        meets = np.array([self.meets(one) for one in range(m["STEP_D"])])[f]
        rest, columns = i - np.concatenate([[0], ends])[f], meets * m["SLOT_COLUMNS"]
        unit, column, of = rest % 2, rest // 2 % columns, rest // (2 * columns)
        taps = m["KERNEL_H"] * m["KERNEL_W"]
        step, tap, chunk = of % self.k_steps, of // self.k_steps % taps, of // (self.k_steps * taps)
        cout, kd = column % m["SLOT_COLUMNS"], f + m["STEP_D"] * (column // m["SLOT_COLUMNS"])
        tap = tap + kd * taps
        kernel = m["KERNEL_D"] * taps
        packed = np.full((count, self.vec), np.nan)
        to = i - unit + (unit ^ (column >> 2 & 1))
        for e in range(self.vec):
            t, low = (e, 0) if self.element == 4 else (e // 2, e % 2)
            cin = chunk * m["CK"] + self.channel_at(step, np.array(t), unit, np.array(low))
            at = cout * (m["CIN"] * kernel) + (cin * kernel + tap if tap_step == 1 else tap * tap_step + cin)
            have = (cin < m["CIN"]) & (cout < m["COUT"])
            packed[to, e] = np.where(have, weight.reshape(-1)[np.where(have, at, 0)], 0.0)
        assert not np.isnan(packed).any(), "a unit that no thread writes"
        return packed

    def operand(self, packed: Floats, f: int, chunk: int) -> Floats:
        """Operands B of a slice's chunk, [(tap of H, tap of W, step of K, k), column], by descriptors and swizzle."""
        m = self.m
        meets, (kh, kw, step) = self.meets(f), np.indices((m["KERNEL_H"], m["KERNEL_W"], self.k_steps))
        begin = self.met_before(f) * self.weight_steps
        begin += (chunk * m["KERNEL_H"] + kh) * (m["KERNEL_W"] * self.k_steps) * meets
        begin = (begin + (kw * self.k_steps + step) * meets) * self.block_units
        column, unit = np.indices((meets * m["SLOT_COLUMNS"], 2))
        place = begin[..., None, None] + column // 8 * 16 + column % 8 * 2 + unit  # groups of 8 rows of 32 bytes
        place ^= place >> 3 & 1  # what hardware does with addresses of this swizzle
        assert place.max(initial=0) < len(packed)
        return packed[place].transpose(0, 1, 2, 4, 5, 3).reshape(-1, meets * m["SLOT_COLUMNS"])

    # --- producers ---------------------------------------------------------------------------------------------------

    def copied(self, memory: Floats, begin: Ints, left: int, exists: Ints, in_w: int) -> Floats:
        """The ring's units of rows whose first columns are at ``begin`` [row, channel] of memory; NaN: not written."""
        m = self.m
        lane = np.arange(m["ROW_UNITS"])
        column = (left - begin % self.vec)[..., None] + lane * self.vec
        there = np.minimum(in_w - column, self.vec)
        ok = exists[..., None] & (there > 0) & (column + self.vec > 0)
        begins = (begin // self.vec * self.vec)[..., None] + lane * self.vec
        within = np.arange(self.vec)
        some = ok[..., None] & (within < there[..., None])
        at = begins[..., None] + within
        assert at[some].min(initial=0) >= 0 and at[some].max(initial=0) < len(memory), "a copy outside of memory"
        c = np.arange(m["CK"])
        to = (c * self.pitch + c // self.vec * self.group_pad)[:, None, None] + lane[:, None] * self.vec + within
        units = np.full((len(begin), self.unit), np.nan)
        units[:, to] = np.where(some, memory[np.where(some, at, 0)], 0.0)
        return units

    # --- consumers ---------------------------------------------------------------------------------------------------

    def releases(self, row: int, wg: int) -> int:
        """How often a consumer that read row ``row`` of a tile's slice arrives at its barrier."""
        m = self.m
        first = 0 if row < m["KERNEL_H"] else (row - m["KERNEL_H"]) // m["STEP_H"] + 1
        last = min(row // m["STEP_H"], m["CONSUMERS"] - 1)
        return self.users - (last - first) if wg == first else 1

    def check_ring(self) -> None:
        """All rows of a slice are there at once, and each is released by as many as its barrier counts."""
        m = self.m
        assert m["STAGES"] > self.plane_rows, "a consumer waits for a row that has no unit"
        released = np.zeros(self.plane_rows, np.int64)
        for wg in range(m["CONSUMERS"]):
            for kh in range(m["KERNEL_H"]):
                released[wg * m["STEP_H"] + kh] += self.releases(wg * m["STEP_H"] + kh, wg)
        assert (released == self.users).all(), f"units are released {released} times of {self.users}"

    def fragments(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Of a consumer's operand A, [row of M, step of K, k]: lanes' pixel, quarter, and registers' half and place.

        ``(pixel, channel, moved channel, eight)``: a lane's first pixel and channel, and what its registers add.
        """
        rows, ks = fragment_place(self.element)
        lane, register, low = np.indices(rows.shape)
        place = np.full((16, self.step_k, 3), -1)
        place[rows, ks] = np.stack([lane, register, low], axis=-1)
        assert lane.max() + 1 == LANES and place.min() >= 0
        lane, register, low = (place[None, :, None, :, i] for i in range(3))
        warp, step = np.arange(WARPS)[:, None, None, None], np.arange(self.k_steps)[:, None]
        zero = np.zeros_like(lane)
        shape = (WARPS, 16, self.k_steps, self.step_k)
        channel = self.channel_at(zero, lane & 3, zero, zero)
        moved = self.channel_at(step, zero, register >> 1, low)
        every = warp * 16 + (lane >> 2), channel, moved, register & 1
        pixel, channel, moved, eight = (np.broadcast_to(a, shape).reshape(64, *shape[2:]) for a in every)
        return pixel, channel, moved, eight

    def masked(self, values: Floats, column: Ints, columns: Ints) -> Floats:
        """Without what units bring from before their rows: no source column is left of the padding's."""
        return np.where((columns < self.m["PAD_W"]) & (column + columns < 0), 0.0, values)

    def __call__(
        self, p: Problem, g: Floats, packed: Floats, blocks: int, multiprocessors: int, address: int = 0
    ) -> tuple[Floats, Ints]:
        """The result of ``p``, of the tile's layer at any size, NaN where nothing is stored; stores per element.

        ``address``: of the source in memory, in elements of which the first is at 16 bytes.
        """
        m = self.m
        arguments = self.rows.arguments(p, multiprocessors)
        batch, in_d, in_h, in_w, out_d, out_h, out_w, segments, tiles_h, tiles_w, walks = arguments
        self.check_ring()
        memory = np.full(address + g.size + 2 * self.vec, np.nan)
        memory[address : address + g.size] = g.reshape(-1)
        plane, slices, slots = in_d * in_h * in_w, -(-out_d // segments), m["SLOTS"]
        met = [f for f in range(m["STEP_D"]) if self.meets(f)]
        operands = {f: [self.operand(packed, f, c) for c in range(self.chunks)] for f in met}
        # [row of M, tap of W, step of K, k], a row of M being a pixel of a warpgroup's `MB` subtiles.
        pixel, first, moved, eight = (np.tile(a, (m["MB"], 1, 1))[:, None] for a in self.fragments())
        subtile = np.repeat(np.arange(m["MB"]), 64)[:, None, None, None]
        columns = m["STEP_W"] * (subtile * 64 + eight * 8) + np.arange(m["KERNEL_W"])[:, None, None]
        lane_at = first * self.pitch + first // self.vec * self.group_pad + pixel * m["STEP_W"]
        base = lane_at + moved * self.pitch + columns
        place_w = (subtile * 64 + eight * 8 + pixel)[:, 0, 0, 0]
        kh, wgs = np.arange(m["KERNEL_H"]), np.arange(m["CONSUMERS"])
        row = np.arange(self.plane_rows)[:, None]
        out = np.full((batch, m["COUT"], out_d, out_h, out_w), np.nan)
        stores = np.zeros(out.shape, np.int64)
        seen = []
        for block in range(blocks):
            ring, cursor = np.full((m["STAGES"], self.unit), np.nan), 0
            for index in range(block, walks, blocks):
                seen.append(index)
                q, walk_w = index // tiles_w, index % tiles_w * (m["MB"] * 64)
                q, walk_h = q // tiles_h, q % tiles_h * m["CONSUMERS"]
                n, begin = q // segments, q % segments * slices
                end = min(begin + slices, out_d)
                left = walk_w * m["STEP_W"] - m["PAD_W"]
                # No store depends on rows of M and warpgroups past the result.
                live, wg = np.flatnonzero(walk_w + place_w < out_w), wgs[walk_h + wgs < out_h]
                column = left + pixel[live] * m["STEP_W"]
                lane_phase = address + (n * m["CIN"] + first[live]) * plane + left
                acc = np.full((len(wg), len(live), slots, m["SLOT_COLUMNS"]), np.nan)  # what registers held
                for step in range(begin, end + slots - 1):
                    moving = np.zeros_like(acc)
                    if step > begin:
                        moving[:, :, 1:] = acc[:, :, :-1]
                    acc = moving
                    for f in range(m["STEP_D"]):
                        d, meets = step * m["STEP_D"] - m["PAD_D"] + f, self.meets(f)
                        if not (meets and 0 <= d < in_d and step - meets + 1 < end):
                            continue
                        phase = (walk_h + wg[:, None]) * m["STEP_H"] - m["PAD_H"] + kh
                        phase = (phase * in_w + d * in_h * in_w)[:, None, :, None, None, None]
                        from_ = base[live][:, None] + (
                            phase + lane_phase[:, None] + moved[live][:, None] * plane & self.vec - 1
                        )
                        assert from_.max() < self.unit, "a lane reads behind its unit"
                        for chunk in range(self.chunks):
                            h, c = walk_h * m["STEP_H"] - m["PAD_H"] + row, chunk * m["CK"] + np.arange(m["CK"])
                            begins = address + (n * m["CIN"] + c) * plane + (d * in_h + h) * in_w + left
                            exists = (h >= 0) & (h < in_h) & (c < m["CIN"])
                            stages = (cursor + np.arange(self.plane_rows)) % m["STAGES"]
                            ring[stages] = self.copied(memory, begins, left, exists, in_w)
                            at = stages[wg[:, None] * m["STEP_H"] + kh][:, None, :, None, None, None]
                            a = self.masked(ring[at, from_], column[:, None], columns[live][:, None])
                            products = a.reshape(len(wg), len(live), -1) @ operands[f][chunk]
                            acc[:, :, :meets] += products.reshape(*a.shape[:2], meets, -1)
                            cursor = (cursor + self.plane_rows) % m["STAGES"]
                    if step - begin >= slots - 1:
                        where = walk_h + wg[:, None], walk_w + place_w[live]
                        at_d = (n, slice(None), step - (slots - 1))
                        out[(*at_d, *where)] = acc[:, :, -1, : m["COUT"]]
                        stores[(*at_d, *where)] += 1
        assert sorted(seen) == list(range(walks)), "blocks divide all walks"
        return out.reshape(result_shape(p)), stores.reshape(result_shape(p))
