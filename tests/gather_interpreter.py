"""The gather-GEMM kernel in NumPy and float64: what `kernels/gather.cu` does with a tiling's constants and arguments.

It follows the kernel's own formulas: packing, tiles, halo rows, shifts, accumulators and the addresses of the epilogue.
It does not follow what moves data without changing its place (staging slots, barriers, rings, swizzles). What no store
depends on, rows of M past the last channel and positions past the last output, is left out.
"""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upconv.cuda.axes import result_shape
from upconv.cuda.gemm import gather_constants
from upconv.cuda.gemm.tiling import Tiling
from upconv.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FRAGMENT_WORDS = 512
WARPS, LANES, REGISTERS = 4, 32, 4


def constants(tiling: Tiling, found: gather_constants.Constants) -> dict[str, Any]:
    """The kernel's constants, arrays of NumPy for its arrays, and what the kernel derives from them first."""
    m: dict[str, Any] = {"beside": 0, "row_classes": 1, "channel_classes": 1, "aligned_cout": False, "column_pad": 0}
    m |= {name: np.array(value, np.int64) if isinstance(value, tuple) else value for name, value in found.items()}
    fetch = m["fetch"]
    return m | {
        "element": tiling.element,
        "parts": 2 if m["precision"] == gather_constants.PRECISIONS["ieee"] else 1,
        "boxes": fetch != gather_constants.BY_THREADS,
        "whole": fetch in (gather_constants.WHOLE_IMAGES, gather_constants.IMAGES_BESIDE),
        "classed": fetch == gather_constants.BY_CLASSES,
        "shuffled": m["store"] == gather_constants.STORE_PHASES,
    }


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

    def __init__(self, tiling: Tiling, found: gather_constants.Constants | None = None, coarse: float = 0.25) -> None:
        self.tiling = tiling
        self.m = m = constants(tiling, gather_constants.constants(tiling) if found is None else found)
        self.coarse = coarse
        self.vec = 16 // m["element"]
        self.k_steps = m["ck"] * m["element"] // 32
        self.step_k = 32 // m["element"]
        self.segments = m["tile_n"] * m["rows_d"] * m["rows_h"]
        self.strided = bool(m["strided_box"])
        self.pitch = m["plane"] if self.strided else m["planes"] * m["plane"]
        self.plane_pitch = -(-self.segments * m["plane"] // 8) * 8 if self.strided else m["plane"]
        self.pixels = m["planes"] * self.plane_pitch if self.strided else self.segments * self.pitch
        self.chunks = -(-m["cin_g"] // m["ck"])
        self.wgs_m = 2 if m["split"] == 1 else 1
        self.w_subtiles, self.h_subtiles = m["tile_w"] // m["sub_w"], m["tile_h"] // m["sub_h"]
        self.subtiles = m["tile_n"] * m["tile_d"] * self.h_subtiles * self.w_subtiles
        self.nb = self.subtiles // 2 if m["split"] == 0 else self.subtiles
        self.entry = m["entries"].reshape(m["variants"], m["mb"] + 1)
        self.groups = m["cin"] // m["cin_g"]

    def split(self, values: Floats) -> tuple[Floats, ...]:
        """The parts of an operand."""
        if self.m["parts"] == 1:
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
        flat, element = weight.reshape(-1), m["element"]
        i = np.arange(words)
        r, lane, warp, rest = i & 3, i >> 2 & 31, i >> 7 & 3, i >> 9
        wg, rest = rest % self.wgs_m, rest // self.wgs_m
        part, rest = rest % m["parts"], rest // m["parts"]
        k_step, rest = rest % self.k_steps, rest // self.k_steps
        per_block = self.chunks * int(self.entry[-1, -1])
        block, within = rest // per_block, rest % per_block
        counts = self.chunks * (self.entry[:, -1] - self.entry[:, 0])
        ends = np.cumsum(counts)
        variant = np.searchsorted(ends, within, side="right")
        within = within - (ends - counts)[variant]
        entries = (self.entry[:, -1] - self.entry[:, 0])[variant]
        chunk, entry = within // entries, self.entry[variant, 0] + within % entries
        cout_block, group = block % m["cout_blocks"] * self.wgs_m + wg, block // m["cout_blocks"]
        row = warp * 16 + (lane >> 2) + (r & 1) * 8
        k = (lane & 3) * (4 // element) + (r >> 1) * (16 // element)
        sub, cout = row // m["rows_per_sub"], cout_block * m["rows_per_sub"] + row % m["rows_per_sub"]
        tap = m["tap_indices"][entry * m["subs"] + sub]
        packed = np.zeros((words, 4 // element))
        for e in range(4 // element):
            cin = chunk * m["ck"] + k_step * self.step_k + k + e
            have = (cin < m["cin_g"]) & (cout < m["cout_g"]) & (tap >= 0)
            if m["shuffled"]:
                place = self.weight_of(cout, tap)
                have &= place >= 0
                at = (cin * (weight.size // m["cin"]) + place)[have]
            elif m["grad_input"]:
                at = (((group * m["cout_g"] + cout) * m["cin_g"] + cin) * m["taps"] + tap)[have]
            else:
                at = (((group * m["cin_g"] + cin) * m["cout_g"] + cout) * m["taps"] + tap)[have]
            values = np.stack(self.split(flat[at]))
            packed[have, e] = values[part[have], np.arange(len(at))]
        return packed

    def row_of(self, row: Ints) -> tuple[Ints, tuple[Ints, Ints, Ints], Ints]:
        """SHUFFLED: (output channel, phases along D, H, W, whether it exists) of rows of M."""
        m = self.m
        of_slab, place = row % 16 // m["inner"], row % 16 % m["inner"]
        line = row // 16 * m["per_slab"] + of_slab
        exists = (of_slab < m["per_slab"]) & (line < m["lines"])
        h, rest = line % m["layer_stride_h"], line // m["layer_stride_h"]
        d, channel = rest % m["layer_stride_d"], rest // m["layer_stride_d"]
        if m["channels_last"]:
            return place % m["cout"], (rest, h, place // m["cout"]), exists
        return channel, (d, h, place), exists

    def weight_of(self, row: Ints, tap: Ints) -> Ints:
        """SHUFFLED: which of an input channel's weights (output channel, kernel) a row has at a tap; -1 for none."""
        m = self.m
        channel, phases, exists = self.row_of(row)
        kernel, stride, zeros = (
            [m[f"{name}_{axis}"] for axis in "dhw"] for name in ("layer_kernel", "layer_stride", "zeros")
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
        scale = self.chunks * self.k_steps * m["parts"]
        begin = (group * m["cout_blocks"] + cout_block) * scale * int(self.entry[-1, -1])
        begin += scale * int(self.entry[variant, 0])
        count = scale * self.entries_of(variant)
        words = packed[begin * self.wgs_m * FRAGMENT_WORDS : (begin + count) * self.wgs_m * FRAGMENT_WORDS]
        shape = (self.chunks, self.entries_of(variant), self.k_steps, m["parts"], self.wgs_m, WARPS, LANES, REGISTERS)
        fragments = words.reshape(*shape, -1)
        rows, ks = fragment_place(m["element"])
        warps = np.full((*shape[:-2], 16, self.step_k), np.nan)
        warps[..., rows, ks] = fragments
        # [chunk, entry, k step, part, wg, warp, row, k] -> [part, chunk, entry, (wg, warp, row), (k step, k)]
        return warps.transpose(3, 0, 1, 4, 5, 6, 2, 7).reshape(
            m["parts"], self.chunks, shape[1], self.wgs_m * 64, m["ck"]
        )

    @property
    def shares(self) -> list[tuple[int, int]]:
        """The chunks (first, end) of each block of a cluster."""
        count = self.m["cluster"]
        return [(rank * self.chunks // count, (rank + 1) * self.chunks // count) for rank in range(count)]

    # --- tiles -------------------------------------------------------------------------------------------------------

    def tile_at(self, index: Ints, tiles_d: int, tiles_h: int, tiles_w: int) -> Tiles:
        m = self.m
        group, q = index % m["m_groups"], index // m["m_groups"]
        if not m["resident"] and m["variants"] > 1:
            group = (group + q) % m["m_groups"]
        variant, cout_block = group % m["variants"], group // m["variants"] % m["cout_blocks"]
        group = group // (m["variants"] * m["cout_blocks"])
        w, q = q % tiles_w * m["tile_w"], q // tiles_w
        h, q = q % tiles_h * m["tile_h"], q // tiles_h
        images = m["beside"] or m["tile_n"]
        return Tiles(group, cout_block, variant, q // tiles_d * images, q % tiles_d * m["tile_d"], h, w)

    def pixel_rows(self, x: Floats, t: Tiles) -> Floats:
        """The pixel rows of tiles, [tile, pixel, group, channel of the group's chunks], from x as (N, C, D, H, W)."""
        m = self.m
        batch, _, in_d, in_h, in_w = x.shape
        i = np.arange(self.segments)
        if m["boxes"] and not m["whole"]:  # a box of rows at even distances
            steps = self.tiling.box_steps
            assert max(self.tiling.box) <= 256 and max(steps) <= 8
            box = [-(-n // step) for n, step in zip(self.tiling.box, steps)]
            if m["channels_last"]:
                assert np.prod(box) == self.segments * m["plane"] * m["ck"], "a box is a plane"
                assert steps[1] == m["in_step_w"]
            else:
                assert self.tiling.row_boxes * box[0] >= m["column_pad"] + m["columns"], "boxes hold a row"
                classes = m["row_classes"] * m["channel_classes"]
                copied = box[0] * np.prod(box[1:]) * classes
                assert box[0] == m["box_units"] * self.vec and copied >= box[0] * self.segments * m["ck"]
                first = t.w * m["in_step_w"] + m["first_w"] - m["column_pad"]
                assert m["classed"] or (first % self.vec == 0).all(), "a box begins at 16 bytes"
            step_h, step_d = steps[2:4] if m["channels_last"] else steps[1:3]
            if m["classed"]:  # a box has every so manieth row, whose neighbours are in the other classes' boxes
                assert step_h * m["row_period"] == m["rows_apart"] * m["row_classes"]
                assert m["tile_h"] * m["in_step_h"] % m["row_period"] == 0 == m["ck"] % m["channel_classes"]
                step_h = m["rows_apart"]
            offset_d = m["first_d"] + i // m["rows_h"] % m["rows_d"] * step_d
            offset_h = m["first_h"] + i % m["rows_h"] * step_h
        else:
            packed = (i // (m["rows_h"] * m["rows_d"])) << 24
            packed |= (m["offsets_d"][i // m["rows_h"] % m["rows_d"]] & 0xFFF) << 12
            packed |= m["offsets_h"][i % m["rows_h"]] & 0xFFF
            packed = packed.astype(np.uint32).astype(np.int32)
            assert (packed >> 24 == i // (m["rows_h"] * m["rows_d"])).all()
            offset_d, offset_h = (packed << 8) >> 20, (packed << 20) >> 20
        if m["whole"]:  # all pixels of an image in one or more boxes
            assert m["boxes"], "threads copy rows with their halo"
            assert (m["image_d"], m["image_h"], m["image_w"]) == (in_d, in_h, in_w) and not t.w.any()
            assert m["beside"] or not (t.d | t.h).any()
            assert in_d * in_h * in_w % m["box_pixels"] == 0 and max(self.tiling.box) <= 256
            assert m["box_pixels"] * self.tiling.element % 16 == 0, "a channel begins at 16 bytes"
        within = np.arange(m["planes"] * m["plane"])
        offset_d, offset_h = offset_d[:, None], offset_h[:, None]
        if self.strided:  # a plane has its own first rows
            offset_d = offset_d - m["first_d"] + m["planes_d"][within // m["plane"]]
            offset_h = offset_h - m["first_h"] + m["planes_h"][within // m["plane"]]
        column = within % m["plane"] * m["in_step_w"] + m["residues"][within // m["plane"]]
        whole_box = bool(m["boxes"] and m["channels_last"])
        n = (t.n[:, None] + i // (m["rows_h"] * m["rows_d"]))[:, :, None]
        d = t.d[:, None, None] * m["in_step_d"] + offset_d
        h = t.h[:, None, None] * m["in_step_h"] + offset_h
        w = (t.w[:, None] * m["in_step_w"] + m["first_w"] + column)[:, None, :]
        if m["beside"]:  # columns are of several images, and of none
            beside = np.floor_divide(w, m["period"])
            w = np.where((beside >= 0) & (beside < m["beside"]), w - beside * m["period"], -1)
            n = n + np.where(w >= 0, beside, 0)
        ok = (
            (n < batch)
            & (d >= 0)
            & (d < in_d)
            & (h >= 0)
            & (h < in_h)
            & (w >= 0)
            & (w < in_w)
            & (whole_box | (column < m["columns"]))
        )
        c = np.arange(self.chunks * m["ck"])
        channel = np.arange(self.groups)[:, None] * m["cin_g"] + c
        # A box of channels-last pixels ends with the tensor's channels, everything else with the group's.
        have = channel < m["cin"] if whole_box else np.broadcast_to(c < m["cin_g"], channel.shape)
        source = np.zeros((*np.array(x.shape)[[0, 2, 3, 4]], *channel.shape))
        source[..., have] = x.transpose(0, 2, 3, 4, 1)[..., channel[have]]
        rows = np.zeros((*ok.shape, *channel.shape))
        n, d, h, w = (np.broadcast_to(a, ok.shape)[ok] for a in (n, d, h, w))
        rows[ok] = source[n, d, h, w]
        place = i[:, None] * self.pitch + within // m["plane"] * self.plane_pitch + within % m["plane"]
        tiles = np.full((len(t.n), self.pixels, *channel.shape), np.nan)  # between planes lies anything
        tiles[:, place] = rows
        return tiles

    def place_of(self, subtile: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        m, plane = self.m, self.w_subtiles * self.h_subtiles
        across, down = subtile % self.w_subtiles, subtile // self.w_subtiles % self.h_subtiles
        if m["paired"]:  # one below the other
            across, down = (
                subtile % plane // 2 % self.w_subtiles,
                subtile % plane // (2 * self.w_subtiles) * 2 + subtile % 2,
            )
        return subtile // (plane * m["tile_d"]), subtile // plane % m["tile_d"], down * m["sub_h"], across * m["sub_w"]

    @cached_property
    def columns(self) -> Columns:
        """Every consumer's columns, concatenated."""
        m, wide = self.m, self.m["sub_h"] == 1
        first = np.array([0, self.nb] if m["split"] == 0 else [0])[:, None, None]
        nb, column = np.arange(self.nb)[:, None], np.arange(64)
        n, d, h, w = self.place_of(first + nb)
        row = ((n * m["rows_d"] + d * m["row_step_d"]) * m["rows_h"] + h * m["row_step_h"]) * self.pitch + w
        group_rows = 8 if wide else m["row_step_h"] * self.pitch
        pixel = row + column // 8 * group_rows + column % 8
        if m["wide"]:  # a matrix instruction's sixteen groups of columns lie evenly
            groups_at = pixel[..., ::8].reshape(len(first), self.nb // 2, 16)
            assert (np.diff(groups_at) == group_rows).all()
        groups = m["run_groups"]
        if wide and groups <= 8:  # runs of a subtile
            run, k = column // 8 // groups, column // 8 % groups
            kept = np.broadcast_to(run < 8 // groups, pixel.shape)
            n, d, h, w = self.place_of(first + nb)
            w = w + run * groups * 8
        else:  # runs over subtiles that are neighbours along W
            across = groups // 8 if wide else groups
            run, k, begin = nb // across, nb % across, nb // across * across
            if m["paired"]:
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
        base = (cout_block * self.wgs_m + wg) * m["rows_per_sub"]
        if m["channels_last"]:  # a warp's 16 rows go together, a unit of 16 bytes at a time
            first, c = within // 16 * 16, within % 16
            sub, cout = first // m["rows_per_sub"], base + first % m["rows_per_sub"] + c
            decides = cout - c % self.vec if m["aligned_cout"] else cout
        else:
            sub, cout = within // m["rows_per_sub"], base + within % m["rows_per_sub"]
            decides = cout
        if m["shuffled"]:
            sub, cout = within // m["rows_per_sub"], base + within % m["rows_per_sub"]
            kept = (cout < m["cout_g"]) & self.row_of(cout)[2]
            return row[kept], sub[kept], cout[kept]
        kept = (sub < m["subs"]) & (decides < m["cout_g"])
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
        tile = [m["tile_n"], m["tile_d"], m["tile_h"], m["tile_w"]]
        qn, qd, qh, qw = (np.indices(tile).reshape(4, 1, -1)[i] + getattr(t, a)[:, None] for i, a in enumerate("ndhw"))
        places, values = [np.zeros(0, np.int64)], [np.zeros(0)]
        first, last = m["bares"][variant : variant + 2]
        for b in range(first, last):
            rows = range(m["bares_rows"][b] or m["out_step_h"])
            subs = range(m["out_step_w"]) if m["bares_w"][b] < 0 else m["bares_w"][b] + np.arange(m["w_subs"])
            own = cout[row % 64 // m["rows_per_sub"] == (b - first) % m["subs"]]
            for h, u, c in product(rows, subs, own):
                od = m["out_step_d"] * qd + m["bares_d"][b]
                oh = m["out_step_h"] * qh + m["bares_h"][b] + h
                ow = m["out_step_w"] * qw + u
                inside = (qn < batch) & (od < sizes[0]) & (oh < sizes[1]) & (ow < sizes[2])
                channel = group * m["cout_g"] + c
                pixel = (od * sizes[1] + oh) * sizes[2] + ow
                if m["channels_last"]:
                    at = (qn * np.prod(sizes) + pixel) * m["cout"] + channel
                else:
                    at = (qn * m["cout"] + channel) * np.prod(sizes) + pixel
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
        work = (t.group * m["cout_blocks"] + t.cout_block) * m["variants"] + t.variant
        work = work.reshape(-1, m["m_groups"])
        assert (np.sort(work, axis=1) == np.arange(m["m_groups"])).all(), "a tile meets each M-group once"
        positions = t._replace(**{name: getattr(t, name)[:: m["m_groups"]] for name in ("n", "d", "h", "w")})
        for name in ("n", "d", "h", "w"):
            assert (getattr(t, name).reshape(work.shape) == getattr(positions, name)[:, None]).all()
        parts = self.split(self.pixel_rows(x5, positions))
        c = self.columns
        assert c.pixel.min() >= 0
        assert c.pixel.max() + m["tap_rows"].max(initial=0) < self.pixels, "a tap reads past the tile"
        assert m["tap_rows"].min(initial=0) >= 0, "a tap reads before the tile"

        # Columns with an output of some sub-position, and the q of the runs in which they are stored.
        n, qd, qh = ((getattr(positions, a)[:, None] + getattr(c, a)) for a in "ndh")
        run_w = positions.w[:, None] + c.run_w
        of_image = np.ones_like(run_w, bool)
        if m["beside"]:  # a run's columns are of several images
            assert m["w_subs"] == m["out_step_w"]
            column = c.run_w + c.position
            beside, within = column // m["period"], column % m["period"]
            n = n + beside
            run_w = positions.w[:, None] + within - c.position
            of_image &= (beside < m["beside"]) & (within * m["w_subs"] < m["beside_w"])
        stride, lead = [1, 1, 1], [0, 0, 0]
        if m["shuffled"]:
            stride, lead = ([m[f"{name}_{axis}"] for axis in "dhw"] for name in ("layer_stride", "lead"))
        many_d, many_h, many_w = (-(-(o + a) // s) for o, a, s in zip((out_d, out_h, out_w), lead, stride))
        live = (n < batch) & (m["out_step_d"] * qd < many_d) & (m["out_step_h"] * qh < many_h)
        live &= (m["out_step_w"] * (run_w + c.position) < many_w) & of_image
        tile, column = np.nonzero(live)
        n, qd, qh, run_w = (a[live] for a in (n, qd, qh, run_w))
        position, pixel = c.position[column], c.pixel[column]

        channels = m["cout"]
        out = np.full(batch * channels * out_d * out_h * out_w, np.nan)
        stores = np.zeros(out.size, np.int64)
        for group_index in range(m["m_groups"]):
            group, cout_block, variant = (int(a[group_index]) for a in (t.group, t.cout_block, t.variant))
            row, sub, cout = self.rows_stored(cout_block)
            acc = np.zeros((m["mb"], len(row), len(tile)))
            if self.entries_of(variant):
                a = self.matrices(packed, group, cout_block, variant)[:, :, :, row]
                start = int(self.entry[variant, 0])
                for block, (begin, end) in product(range(m["mb"]), self.shares):
                    first, last = (int(e) for e in self.entry[variant, block : block + 2])
                    rows = (pixel[:, None] + m["tap_rows"][first:last],)
                    channels_of = slice(begin * m["ck"], end * m["ck"])
                    b = [part[(tile[:, None], *rows, group)][..., channels_of].reshape(len(tile), -1) for part in parts]
                    for part in range(m["parts"]):
                        # [chunk, entry, row, k] -> [row, (entry, chunk, k)], the order of the pixels' channels
                        weights = a[part, begin:end, first - start : last - start]
                        weights = weights.transpose(2, 1, 0, 3).reshape(len(row), -1)
                        acc[block] += weights @ b[0].T
                        if m["parts"] == 2 and part == 0:
                            acc[block] += weights @ b[1].T
            values = np.zeros((len(row), len(tile), m["w_subs"]))
            for u, block in enumerate(m["blocks_of_w"]):
                if block >= 0:
                    values[:, :, u] = acc[block]
            if bias is not None:
                channel = self.row_of(cout)[0] if m["shuffled"] else group * m["cout_g"] + cout
                values += bias[np.minimum(channel, channels - 1)][:, None, None]

            u = np.arange(m["w_subs"])
            if m["channels_last"]:
                ow = m["out_step_w"] * (run_w + position)[:, None] + m["subs_w"][variant] + u
            else:  # `e`: place in a row of the shared buffer, which is stored to consecutive outputs if it has all
                e = position[:, None] * m["w_subs"] + u
                o = e if m["w_subs"] == m["out_step_w"] else e // m["w_subs"] * m["out_step_w"] + e % m["w_subs"]
                ow = m["out_step_w"] * run_w[:, None] + m["subs_w"][variant] + o
            od = m["out_step_d"] * qd + m["subs_d"][variant * m["subs"] + sub][:, None]
            oh = m["out_step_h"] * qh + m["subs_h"][variant * m["subs"] + sub][:, None]
            channel = (group * m["cout_g"] + cout)[:, None]
            if m["shuffled"]:
                of, phases, _ = self.row_of(cout)
                channel = of[:, None]
                od, oh = (o * stride[i] + phases[i][:, None] - lead[i] for i, o in ((0, od), (1, oh)))
                ow = ow[None] * stride[2] + phases[2][:, None, None] - lead[2]
            inside = ((od >= 0) & (oh >= 0) & (od < out_d) & (oh < out_h))[:, :, None] & (ow >= 0) & (ow < out_w)
            if m["channels_last"]:
                pixel_at = (((n * out_d + od) * out_h + oh) * out_w)[:, :, None] + ow
                at = pixel_at * channels + channel[:, :, None]
            else:
                at = ((((n * channels + channel) * out_d + od) * out_h + oh) * out_w)[:, :, None] + ow
            at = at[inside]
            assert at.size == 0 or (at.min() >= 0 and at.max() < out.size), "a store outside of the output"
            out[at] = values[inside]
            stores += np.bincount(at, minlength=out.size)
            if m["bare"]:
                at, value = self.bare(p, group, variant, row, cout, positions, bias)
                out[at] = value
                stores += np.bincount(at, minlength=out.size)

        if m["channels_last"]:
            shape = (batch, *(1,) * (3 - p.rank), *result_shape(p)[2:], channels)
            out, stores = (np.moveaxis(a.reshape(shape), -1, 1) for a in (out, stores))
        return out.reshape(result_shape(p)), stores.reshape(result_shape(p))
