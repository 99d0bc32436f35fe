"""The gather-GEMM kernel in NumPy and float64: what `kernels/gather.cu` does with a tiling's macros and arguments.

It follows the kernel's own formulas: packing, tiles, halo rows, shifts, accumulators and the addresses of the epilogue.
It does not follow what moves data without changing its place (staging slots, barriers, rings, swizzles). What no store
depends on, rows of M past the last channel and positions past the last output, is left out.
"""

from __future__ import annotations

import re
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upconv.cuda.axes import result_shape
from upconv.cuda.gemm.tiling import Tiling
from upconv.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FRAGMENT_WORDS = 512
WARPS, LANES, REGISTERS = 4, 32, 4


def constants(macros: dict[str, int | float | str]) -> dict[str, Any]:
    """The macros as the compiler sees them: integers, arrays for lists in braces, other text as it is."""
    found: dict[str, Any] = {}
    for name, value in macros.items():
        text = str(value)
        if text.startswith("{"):
            found[name] = np.array([int(v) for v in text.strip("{}").split(",")], np.int64)
        else:
            bare = re.fullmatch(r"\(?(-?\d+)\)?", text)
            found[name] = int(bare[1]) if bare else text
    return found


def fragment_place(element: int) -> tuple[Ints, Ints]:
    """(row, k) of a warp's operand A by [lane, register, element of the word], as documented.

    PTX ISA, "Matrix fragments for mma.m16n8k8" (.tf32) and "for mma.m16n8k16" (.f16, .bf16). wgmma's A in registers
    ("Register fragments for wgmma.mma_async.m64nNk8" and "k16") gives each of its four warps 16 rows the same way.
    """
    per_word = 4 // element
    rows = np.zeros((LANES, REGISTERS, per_word), np.int64)
    ks = np.zeros_like(rows)
    for lane in range(LANES):
        group, thread = lane >> 2, lane % 4
        for i in range(REGISTERS * per_word):
            if element == 4:
                row = group if i in (0, 2) else group + 8
                k = thread if i in (0, 1) else thread + 4
            else:
                row = group if i in (0, 1, 4, 5) else group + 8
                k = thread * 2 + (i & 1) + (0 if i < 4 else 8)
            rows[lane, i // per_word, i % per_word] = row
            ks[lane, i // per_word, i % per_word] = k
    return rows, ks


class Tiles(NamedTuple):
    """Fields of the kernel's ``Tile`` for many indices."""

    group: Ints
    cout_block: Ints
    variant: Ints
    n: Ints
    d: Ints
    h: Ints
    w: Ints


class Columns(NamedTuple):
    """The columns of N of all consumers: the row of the pixel tile that each multiplies, and where its result goes."""

    pixel: Ints
    """Row of the tile, for a tap of shift 0."""
    n: Ints
    d: Ints
    h: Ints
    run_w: Ints
    """First q of the run along W in which the epilogue stores the column ..."""
    position: Ints
    """... and the column's place in the run."""


class Interpreter:
    """One tiling. ``coarse`` is the step of the rounding that stands for TF32's where an operand has two parts."""

    def __init__(
        self, tiling: Tiling, macros: dict[str, int | float | str] | None = None, coarse: float = 0.25
    ) -> None:
        self.tiling = tiling
        self.m = m = constants(tiling.macros() if macros is None else macros)
        self.coarse = coarse
        self.vec = 16 // m["ELEMENT"]
        self.k_steps = m["CK"] * m["ELEMENT"] // 32
        self.step_k = 32 // m["ELEMENT"]
        self.segments = m["TILE_N"] * m["ROWS_D"] * m["ROWS_H"]
        self.strided = bool(m["STRIDED_BOX"])
        self.pitch = m["PLANE"] if self.strided else m["PLANES"] * m["PLANE"]
        self.plane_pitch = -(-self.segments * m["PLANE"] // 8) * 8 if self.strided else m["PLANE"]
        self.pixels = m["PLANES"] * self.plane_pitch if self.strided else self.segments * self.pitch
        self.chunks = -(-m["CIN_G"] // m["CK"])
        self.wgs_m = 2 if m["SPLIT"] == 1 else 1
        self.w_subtiles, self.h_subtiles = m["TILE_W"] // m["SUB_W"], m["TILE_H"] // m["SUB_H"]
        self.subtiles = m["TILE_N"] * m["TILE_D"] * self.h_subtiles * self.w_subtiles
        self.nb = self.subtiles // 2 if m["SPLIT"] == 0 else self.subtiles
        self.entry = m["ENTRIES"].reshape(m["VARIANTS"], m["MB"] + 1)
        self.groups = m["CIN"] // m["CIN_G"]

    def split(self, values: Floats) -> tuple[Floats, ...]:
        """The parts of an operand."""
        if self.m["PARTS"] == 1:
            return (values,)
        high = np.round(values / self.coarse) * self.coarse
        return high, values - high

    def entries_of(self, variant: int) -> int:
        return int(self.entry[variant, -1] - self.entry[variant, 0])

    # --- weights -----------------------------------------------------------------------------------------------------

    def pack(self, weight: Floats) -> Floats:
        """``pack``: (words, elements of a word) of a weight (CIN, COUT_G, ...), for GRAD_INPUT (COUT, CIN_G, ...)."""
        m = self.m
        words = self.tiling.packed_words
        flat, element = weight.reshape(-1), m["ELEMENT"]
        i = np.arange(words)
        r, lane, warp, rest = i & 3, i >> 2 & 31, i >> 7 & 3, i >> 9
        wg, rest = rest % self.wgs_m, rest // self.wgs_m
        part, rest = rest % m["PARTS"], rest // m["PARTS"]
        k_step, rest = rest % self.k_steps, rest // self.k_steps
        per_block = self.chunks * int(self.entry[-1, -1])
        block, within = rest // per_block, rest % per_block
        counts = self.chunks * (self.entry[:, -1] - self.entry[:, 0])
        ends = np.cumsum(counts)
        variant = np.searchsorted(ends, within, side="right")
        within = within - (ends - counts)[variant]
        entries = (self.entry[:, -1] - self.entry[:, 0])[variant]
        chunk, entry = within // entries, self.entry[variant, 0] + within % entries
        cout_block, group = block % m["COUT_BLOCKS"] * self.wgs_m + wg, block // m["COUT_BLOCKS"]
        row = warp * 16 + (lane >> 2) + (r & 1) * 8
        k = (lane & 3) * (4 // element) + (r >> 1) * (16 // element)
        sub, cout = row // m["ROWS_PER_SUB"], cout_block * m["ROWS_PER_SUB"] + row % m["ROWS_PER_SUB"]
        tap = m["TAP_INDICES"][entry * m["SUBS"] + sub]
        packed = np.zeros((words, 4 // element))
        for e in range(4 // element):
            cin = chunk * m["CK"] + k_step * self.step_k + k + e
            have = (cin < m["CIN_G"]) & (cout < m["COUT_G"]) & (tap >= 0)
            if m["SHUFFLED"]:
                place = self.weight_of(cout, tap)
                have &= place >= 0
                at = (cin * (weight.size // m["CIN"]) + place)[have]
            elif m["GRAD_INPUT"]:
                at = (((group * m["COUT_G"] + cout) * m["CIN_G"] + cin) * m["TAPS"] + tap)[have]
            else:
                at = (((group * m["CIN_G"] + cin) * m["COUT_G"] + cout) * m["TAPS"] + tap)[have]
            values = np.stack(self.split(flat[at]))
            packed[have, e] = values[part[have], np.arange(len(at))]
        return packed

    def row_of(self, row: Ints) -> tuple[Ints, tuple[Ints, Ints, Ints], Ints]:
        """SHUFFLED: (output channel, phases along D, H, W, whether it exists) of rows of M."""
        m = self.m
        of_slab, place = row % 16 // m["INNER"], row % 16 % m["INNER"]
        line = row // 16 * m["PER_SLAB"] + of_slab
        exists = (of_slab < m["PER_SLAB"]) & (line < m["LINES"])
        h, rest = line % m["LAYER_STRIDE_H"], line // m["LAYER_STRIDE_H"]
        d, channel = rest % m["LAYER_STRIDE_D"], rest // m["LAYER_STRIDE_D"]
        if m["CHANNELS_LAST"]:
            return place % m["LAYER_CHANNELS"], (rest, h, place // m["LAYER_CHANNELS"]), exists
        return channel, (d, h, place), exists

    def weight_of(self, row: Ints, tap: Ints) -> Ints:
        """SHUFFLED: which of an input channel's weights (output channel, kernel) a row has at a tap; -1 for none."""
        m = self.m
        channel, phases, exists = self.row_of(row)
        kernel, stride, zeros = (
            [m[f"{name}_{axis}"] for axis in "DHW"] for name in ("LAYER_KERNEL", "LAYER_STRIDE", "ZEROS")
        )
        at = channel
        for axis, of in enumerate(zip(kernel, stride, zeros)):
            later = [-(-(k + z) // s) for k, s, z in zip(kernel, stride, zeros)][axis + 1 :]
            k = tap // np.prod(later, dtype=np.int64) % -(-(of[0] + of[2]) // of[1]) * of[1] + phases[axis] - of[2]
            exists = exists & (k >= 0) & (k < of[0])
            at = at * of[0] + k
        return np.where(exists, at, -1)

    def matrices(self, packed: Floats, group: int, cout_block: int, variant: int) -> Floats:
        """An M-group's operand A, [part, chunk, entry, row of M, k], from fragments in the order of their use.

        Rows are those of one warpgroup, or of two below each other.
        """
        m = self.m
        scale = self.chunks * self.k_steps * m["PARTS"]
        begin = (group * m["COUT_BLOCKS"] + cout_block) * scale * int(self.entry[-1, -1])
        begin += scale * int(self.entry[variant, 0])
        count = scale * self.entries_of(variant)
        words = packed[begin * self.wgs_m * FRAGMENT_WORDS : (begin + count) * self.wgs_m * FRAGMENT_WORDS]
        shape = (self.chunks, self.entries_of(variant), self.k_steps, m["PARTS"], self.wgs_m, WARPS, LANES, REGISTERS)
        fragments = words.reshape(*shape, -1)
        rows, ks = fragment_place(m["ELEMENT"])
        warps = np.full((*shape[:-2], 16, self.step_k), np.nan)
        warps[..., rows, ks] = fragments
        # [chunk, entry, k step, part, wg, warp, row, k] -> [part, chunk, entry, (wg, warp, row), (k step, k)]
        return warps.transpose(3, 0, 1, 4, 5, 6, 2, 7).reshape(
            m["PARTS"], self.chunks, shape[1], self.wgs_m * 64, m["CK"]
        )

    @property
    def shares(self) -> list[tuple[int, int]]:
        """The chunks (first, end) of each block of a cluster."""
        count = self.m["CLUSTER"]
        return [(rank * self.chunks // count, (rank + 1) * self.chunks // count) for rank in range(count)]

    # --- tiles -------------------------------------------------------------------------------------------------------

    def tile_at(self, index: Ints, tiles_d: int, tiles_h: int, tiles_w: int) -> Tiles:
        m = self.m
        group, q = index % m["M_GROUPS"], index // m["M_GROUPS"]
        if not m["RESIDENT"] and m["VARIANTS"] > 1:
            group = (group + q) % m["M_GROUPS"]
        variant, cout_block = group % m["VARIANTS"], group // m["VARIANTS"] % m["COUT_BLOCKS"]
        group = group // (m["VARIANTS"] * m["COUT_BLOCKS"])
        w, q = q % tiles_w * m["TILE_W"], q // tiles_w
        h, q = q % tiles_h * m["TILE_H"], q // tiles_h
        images = m["BESIDE"] or m["TILE_N"]
        return Tiles(group, cout_block, variant, q // tiles_d * images, q % tiles_d * m["TILE_D"], h, w)

    def pixel_rows(self, x: Floats, t: Tiles) -> Floats:
        """The pixel rows of tiles, [tile, pixel, group, channel of the group's chunks], from x as (N, C, D, H, W)."""
        m = self.m
        batch, _, in_d, in_h, in_w = x.shape
        i = np.arange(self.segments)
        if m["TENSOR_MAP"] and not m["WHOLE"]:  # a box of rows at even distances
            steps = self.tiling.box_steps
            assert max(self.tiling.box) <= 256 and max(steps) <= 8
            box = [-(-n // step) for n, step in zip(self.tiling.box, steps)]
            if m["CHANNELS_LAST"]:
                assert np.prod(box) == self.segments * m["PLANE"] * m["CK"], "a box is a plane"
                assert steps[1] == m["IN_STEP_W"]
            else:
                assert self.tiling.row_boxes * box[0] >= m["COLUMN_PAD"] + m["COLUMNS"], "boxes hold a row"
                classes = m["ROW_CLASSES"] * m["CHANNEL_CLASSES"]
                copied = box[0] * np.prod(box[1:]) * classes
                assert box[0] == m["BOX_UNITS"] * self.vec and copied >= box[0] * self.segments * m["CK"]
                first = t.w * m["IN_STEP_W"] + m["FIRST_W"] - m["COLUMN_PAD"]
                assert m["CLASSED"] or (first % self.vec == 0).all(), "a box begins at 16 bytes"
            step_h, step_d = steps[2:4] if m["CHANNELS_LAST"] else steps[1:3]
            if m["CLASSED"]:  # a box has every so manieth row, whose neighbours are in the other classes' boxes
                assert step_h * m["ROW_PERIOD"] == m["ROWS_APART"] * m["ROW_CLASSES"]
                assert m["TILE_H"] * m["IN_STEP_H"] % m["ROW_PERIOD"] == 0 == m["CK"] % m["CHANNEL_CLASSES"]
                step_h = m["ROWS_APART"]
            offset_d = m["FIRST_D"] + i // m["ROWS_H"] % m["ROWS_D"] * step_d
            offset_h = m["FIRST_H"] + i % m["ROWS_H"] * step_h
        else:
            packed = (i // (m["ROWS_H"] * m["ROWS_D"])) << 24
            packed |= (m["OFFSETS_D"][i // m["ROWS_H"] % m["ROWS_D"]] & 0xFFF) << 12
            packed |= m["OFFSETS_H"][i % m["ROWS_H"]] & 0xFFF
            packed = packed.astype(np.uint32).astype(np.int32)
            assert (packed >> 24 == i // (m["ROWS_H"] * m["ROWS_D"])).all()
            offset_d, offset_h = (packed << 8) >> 20, (packed << 20) >> 20
        if m["WHOLE"]:  # all pixels of an image in one or more boxes
            assert m["TENSOR_MAP"], "threads copy rows with their halo"
            assert (m["IMAGE_D"], m["IMAGE_H"], m["IMAGE_W"]) == (in_d, in_h, in_w) and not t.w.any()
            assert m["BESIDE"] or not (t.d | t.h).any()
            assert in_d * in_h * in_w % m["BOX_PIXELS"] == 0 and max(self.tiling.box) <= 256
            assert m["BOX_PIXELS"] * self.tiling.element % 16 == 0, "a channel begins at 16 bytes"
        within = np.arange(m["PLANES"] * m["PLANE"])
        offset_d, offset_h = offset_d[:, None], offset_h[:, None]
        if self.strided:  # a plane has its own first rows
            offset_d = offset_d - m["FIRST_D"] + m["PLANES_D"][within // m["PLANE"]]
            offset_h = offset_h - m["FIRST_H"] + m["PLANES_H"][within // m["PLANE"]]
        column = within % m["PLANE"] * m["IN_STEP_W"] + m["RESIDUES"][within // m["PLANE"]]
        whole_box = bool(m["TENSOR_MAP"] and m["CHANNELS_LAST"])
        n = (t.n[:, None] + i // (m["ROWS_H"] * m["ROWS_D"]))[:, :, None]
        d = t.d[:, None, None] * m["IN_STEP_D"] + offset_d
        h = t.h[:, None, None] * m["IN_STEP_H"] + offset_h
        w = (t.w[:, None] * m["IN_STEP_W"] + m["FIRST_W"] + column)[:, None, :]
        if m["BESIDE"]:  # columns are of several images, and of none
            beside = np.floor_divide(w, m["PERIOD"])
            w = np.where((beside >= 0) & (beside < m["BESIDE"]), w - beside * m["PERIOD"], -1)
            n = n + np.where(w >= 0, beside, 0)
        ok = (
            (n < batch)
            & (d >= 0)
            & (d < in_d)
            & (h >= 0)
            & (h < in_h)
            & (w >= 0)
            & (w < in_w)
            & (whole_box | (column < m["COLUMNS"]))
        )
        c = np.arange(self.chunks * m["CK"])
        channel = np.arange(self.groups)[:, None] * m["CIN_G"] + c
        # A box of channels-last pixels ends with the tensor's channels, everything else with the group's.
        have = channel < m["CIN"] if whole_box else np.broadcast_to(c < m["CIN_G"], channel.shape)
        source = np.zeros((*np.array(x.shape)[[0, 2, 3, 4]], *channel.shape))
        source[..., have] = x.transpose(0, 2, 3, 4, 1)[..., channel[have]]
        rows = np.zeros((*ok.shape, *channel.shape))
        n, d, h, w = (np.broadcast_to(a, ok.shape)[ok] for a in (n, d, h, w))
        rows[ok] = source[n, d, h, w]
        place = i[:, None] * self.pitch + within // m["PLANE"] * self.plane_pitch + within % m["PLANE"]
        tiles = np.full((len(t.n), self.pixels, *channel.shape), np.nan)  # between planes lies anything
        tiles[:, place] = rows
        return tiles

    def place_of(self, subtile: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        m, plane = self.m, self.w_subtiles * self.h_subtiles
        across, down = subtile % self.w_subtiles, subtile // self.w_subtiles % self.h_subtiles
        if m["PAIRED"]:  # one below the other
            across, down = (
                subtile % plane // 2 % self.w_subtiles,
                subtile % plane // (2 * self.w_subtiles) * 2 + subtile % 2,
            )
        return subtile // (plane * m["TILE_D"]), subtile // plane % m["TILE_D"], down * m["SUB_H"], across * m["SUB_W"]

    @cached_property
    def columns(self) -> Columns:
        """Every consumer's columns, concatenated."""
        m, wide = self.m, self.m["SUB_H"] == 1
        first = np.array([0, self.nb] if m["SPLIT"] == 0 else [0])[:, None, None]
        nb, column = np.arange(self.nb)[:, None], np.arange(64)
        n, d, h, w = self.place_of(first + nb)
        row = ((n * m["ROWS_D"] + d * m["ROW_STEP_D"]) * m["ROWS_H"] + h * m["ROW_STEP_H"]) * self.pitch + w
        group_rows = 8 if wide else m["ROW_STEP_H"] * self.pitch
        pixel = row + column // 8 * group_rows + column % 8
        if m["WIDE"]:  # a matrix instruction's sixteen groups of columns lie evenly
            groups_at = pixel[..., ::8].reshape(len(first), self.nb // 2, 16)
            assert (np.diff(groups_at) == group_rows).all()
        groups = m["RUN_GROUPS"]
        if wide and groups <= 8:  # runs of a subtile
            run, k = column // 8 // groups, column // 8 % groups
            kept = np.broadcast_to(run < 8 // groups, pixel.shape)
            n, d, h, w = self.place_of(first + nb)
            w = w + run * groups * 8
        else:  # runs over subtiles that are neighbours along W
            across = groups // 8 if wide else groups
            run, k, begin = nb // across, nb % across, nb // across * across
            if m["PAIRED"]:
                k = nb % (2 * across) // 2
                begin = nb // (2 * across) * (2 * across) + nb % 2
                run = nb // (2 * across) * 2 + nb % 2
            kept = np.broadcast_to(run < self.nb // across, pixel.shape)
            n, d, h, w = self.place_of(first + begin)
            if wide:
                k = k * 8 + column // 8
            else:
                h = h + column // 8
        fields = (pixel, n, d, h, w, k * 8 + column % 8)
        return Columns(*(np.broadcast_to(field, pixel.shape)[kept] for field in fields))

    def rows_stored(self, cout_block: int) -> tuple[Ints, Ints, Ints]:
        """(row of M, sub-position's number, output channel of the group) of every row that is stored."""
        m = self.m
        row = np.arange(self.wgs_m * 64)
        wg, within = row // 64, row % 64
        base = (cout_block * self.wgs_m + wg) * m["ROWS_PER_SUB"]
        if m["CHANNELS_LAST"]:  # a warp's 16 rows go together, a unit of 16 bytes at a time
            first, c = within // 16 * 16, within % 16
            sub, cout = first // m["ROWS_PER_SUB"], base + first % m["ROWS_PER_SUB"] + c
            decides = cout - c % self.vec if m["ALIGNED_COUT"] else cout
        else:
            sub, cout = within // m["ROWS_PER_SUB"], base + within % m["ROWS_PER_SUB"]
            decides = cout
        if m["SHUFFLED"]:
            sub, cout = within // m["ROWS_PER_SUB"], base + within % m["ROWS_PER_SUB"]
            kept = (cout < m["COUT_G"]) & self.row_of(cout)[2]
            return row[kept], sub[kept], cout[kept]
        kept = (sub < m["SUBS"]) & (decides < m["COUT_G"])
        return row[kept], sub[kept], cout[kept]

    def bare(
        self, p: Problem, group: int, variant: int, row: Ints, cout: Ints, t: Tiles, bias: Floats | None
    ) -> tuple[Ints, Floats]:
        """Places and values of the outputs without taps that the tiles of an M-group store.

        They are told by tiles as the outputs with taps are. The kernel's tiles divide whole planes and rows among them
        in another way, which tests/host follows.
        """
        m, batch = self.m, p.batch
        sizes = (1,) * (3 - p.rank) + result_shape(p)[2:]
        tile = [m["TILE_N"], m["TILE_D"], m["TILE_H"], m["TILE_W"]]
        qn, qd, qh, qw = (np.indices(tile).reshape(4, 1, -1)[i] + getattr(t, a)[:, None] for i, a in enumerate("ndhw"))
        places, values = [np.zeros(0, np.int64)], [np.zeros(0)]
        first, last = m["BARES"][variant : variant + 2]
        for b in range(first, last):
            rows = range(m["BARES_ROWS"][b] or m["OUT_STEP_H"])
            subs = range(m["OUT_STEP_W"]) if m["BARES_W"][b] < 0 else m["BARES_W"][b] + np.arange(m["W_SUBS"])
            own = cout[row % 64 // m["ROWS_PER_SUB"] == (b - first) % m["SUBS"]]
            for h, u, c in product(rows, subs, own):
                od = m["OUT_STEP_D"] * qd + m["BARES_D"][b]
                oh = m["OUT_STEP_H"] * qh + m["BARES_H"][b] + h
                ow = m["OUT_STEP_W"] * qw + u
                inside = (qn < batch) & (od < sizes[0]) & (oh < sizes[1]) & (ow < sizes[2])
                channel = group * m["COUT_G"] + c
                pixel = (od * sizes[1] + oh) * sizes[2] + ow
                if m["CHANNELS_LAST"]:
                    at = (qn * np.prod(sizes) + pixel) * m["COUT"] + channel
                else:
                    at = (qn * m["COUT"] + channel) * np.prod(sizes) + pixel
                places.append(at[inside])
                values.append(np.full(inside.sum(), 0.0 if bias is None else bias[channel]))
        return np.concatenate(places), np.concatenate(values)

    # --- the kernel --------------------------------------------------------------------------------------------------

    def __call__(self, p: Problem, x: Floats, weight: Floats, bias: Floats | None) -> tuple[Floats, Ints]:
        """The result of ``p``, of the tiling's layer at any size, NaN where nothing is stored; stores per element."""
        m = self.m
        batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, count = self.tiling.arguments(p)
        x5 = x.reshape(batch, -1, in_d, in_h, in_w)
        packed = self.pack(weight)
        index = np.arange(count)
        t = self.tile_at(index, tiles_d, tiles_h, tiles_w)
        work = (t.group * m["COUT_BLOCKS"] + t.cout_block) * m["VARIANTS"] + t.variant
        work = work.reshape(-1, m["M_GROUPS"])
        assert (np.sort(work, axis=1) == np.arange(m["M_GROUPS"])).all(), "a tile meets each M-group once"
        positions = t._replace(**{name: getattr(t, name)[:: m["M_GROUPS"]] for name in ("n", "d", "h", "w")})
        for name in ("n", "d", "h", "w"):
            assert (getattr(t, name).reshape(work.shape) == getattr(positions, name)[:, None]).all()
        parts = self.split(self.pixel_rows(x5, positions))
        c = self.columns
        assert c.pixel.min() >= 0
        assert c.pixel.max() + m["TAP_ROWS"].max(initial=0) < self.pixels, "a tap reads past the tile"
        assert m["TAP_ROWS"].min(initial=0) >= 0, "a tap reads before the tile"

        # Columns with an output of some sub-position, and the q of the runs in which they are stored.
        n, qd, qh = ((getattr(positions, a)[:, None] + getattr(c, a)) for a in "ndh")
        run_w = positions.w[:, None] + c.run_w
        of_image = np.ones_like(run_w, bool)
        if m["BESIDE"]:  # a run's columns are of several images
            assert m["W_SUBS"] == m["OUT_STEP_W"]
            column = c.run_w + c.position
            beside, within = column // m["PERIOD"], column % m["PERIOD"]
            n = n + beside
            run_w = positions.w[:, None] + within - c.position
            of_image &= (beside < m["BESIDE"]) & (within * m["W_SUBS"] < m["BESIDE_W"])
        stride, lead = [1, 1, 1], [0, 0, 0]
        if m["SHUFFLED"]:
            stride, lead = ([m[f"{name}_{axis}"] for axis in "DHW"] for name in ("LAYER_STRIDE", "LEAD"))
        many_d, many_h, many_w = (-(-(o + a) // s) for o, a, s in zip((out_d, out_h, out_w), lead, stride))
        live = (n < batch) & (m["OUT_STEP_D"] * qd < many_d) & (m["OUT_STEP_H"] * qh < many_h)
        live &= (m["OUT_STEP_W"] * (run_w + c.position) < many_w) & of_image
        tile, column = np.nonzero(live)
        n, qd, qh, run_w = (a[live] for a in (n, qd, qh, run_w))
        position, pixel = c.position[column], c.pixel[column]

        channels = m["LAYER_CHANNELS"] if m["SHUFFLED"] else m["COUT"]
        out = np.full(batch * channels * out_d * out_h * out_w, np.nan)
        stores = np.zeros(out.size, np.int64)
        for group_index in range(m["M_GROUPS"]):
            group, cout_block, variant = (int(a[group_index]) for a in (t.group, t.cout_block, t.variant))
            row, sub, cout = self.rows_stored(cout_block)
            acc = np.zeros((m["MB"], len(row), len(tile)))
            if self.entries_of(variant):
                a = self.matrices(packed, group, cout_block, variant)[:, :, :, row]
                start = int(self.entry[variant, 0])
                for block, (begin, end) in product(range(m["MB"]), self.shares):
                    first, last = (int(e) for e in self.entry[variant, block : block + 2])
                    rows = (pixel[:, None] + m["TAP_ROWS"][first:last],)
                    channels_of = slice(begin * m["CK"], end * m["CK"])
                    b = [part[(tile[:, None], *rows, group)][..., channels_of].reshape(len(tile), -1) for part in parts]
                    for part in range(m["PARTS"]):
                        # [chunk, entry, row, k] -> [row, (entry, chunk, k)], the order of the pixels' channels
                        weights = a[part, begin:end, first - start : last - start]
                        weights = weights.transpose(2, 1, 0, 3).reshape(len(row), -1)
                        acc[block] += weights @ b[0].T
                        if m["PARTS"] == 2 and part == 0:
                            acc[block] += weights @ b[1].T
            values = np.zeros((len(row), len(tile), m["W_SUBS"]))
            for u, block in enumerate(m["BLOCKS_OF_W"]):
                if block >= 0:
                    values[:, :, u] = acc[block]
            if bias is not None:
                channel = self.row_of(cout)[0] if m["SHUFFLED"] else group * m["COUT_G"] + cout
                values += bias[np.minimum(channel, channels - 1)][:, None, None]

            u = np.arange(m["W_SUBS"])
            if m["CHANNELS_LAST"]:
                ow = m["OUT_STEP_W"] * (run_w + position)[:, None] + m["SUBS_W"][variant] + u
            else:  # `e`: place in a row of the shared buffer, which is stored to consecutive outputs if it has all
                e = position[:, None] * m["W_SUBS"] + u
                o = e if m["W_SUBS"] == m["OUT_STEP_W"] else e // m["W_SUBS"] * m["OUT_STEP_W"] + e % m["W_SUBS"]
                ow = m["OUT_STEP_W"] * run_w[:, None] + m["SUBS_W"][variant] + o
            od = m["OUT_STEP_D"] * qd + m["SUBS_D"][variant * m["SUBS"] + sub][:, None]
            oh = m["OUT_STEP_H"] * qh + m["SUBS_H"][variant * m["SUBS"] + sub][:, None]
            channel = (group * m["COUT_G"] + cout)[:, None]
            if m["SHUFFLED"]:
                of, phases, _ = self.row_of(cout)
                channel = of[:, None]
                od, oh = (o * stride[i] + phases[i][:, None] - lead[i] for i, o in ((0, od), (1, oh)))
                ow = ow[None] * stride[2] + phases[2][:, None, None] - lead[2]
            inside = ((od >= 0) & (oh >= 0) & (od < out_d) & (oh < out_h))[:, :, None] & (ow >= 0) & (ow < out_w)
            if m["CHANNELS_LAST"]:
                pixel_at = (((n * out_d + od) * out_h + oh) * out_w)[:, :, None] + ow
                at = pixel_at * channels + channel[:, :, None]
            else:
                at = ((((n * channels + channel) * out_d + od) * out_h + oh) * out_w)[:, :, None] + ow
            at = at[inside]
            assert at.size == 0 or (at.min() >= 0 and at.max() < out.size), "a store outside of the output"
            out[at] = values[inside]
            stores += np.bincount(at, minlength=out.size)
            if m["BARE"]:
                at, value = self.bare(p, group, variant, row, cout, positions, bias)
                out[at] = value
                stores += np.bincount(at, minlength=out.size)

        if m["CHANNELS_LAST"]:
            shape = (batch, *(1,) * (3 - p.rank), *result_shape(p)[2:], channels)
            out, stores = (np.moveaxis(a.reshape(shape), -1, 1) for a in (out, stores))
        return out.reshape(result_shape(p)), stores.reshape(result_shape(p))
