"""The grad-weight kernels in NumPy and float64: what `wgrad.cu` and `wgrad_wgmma.cu` do with a tiling's constants.

It follows the kernels' own formulas: blocks, chunks, the rows and units of both tiles in shared memory with their
borders, the registers of every lane, partial sums and the second step. Memory and shared memory hold NaNs wherever
nothing was written, so that a wrong address shows. Barriers, stages and the order in which threads come are left out.
"""

from __future__ import annotations

from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from upconv.cuda.wgrad import wgrad
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RUNS = 8
LANE = np.arange(32)


class Rows(NamedTuple):
    """(n, d, h) of rows of a tile, counted from its chunk's first."""

    n: Ints
    d: Ints
    h: Ints


class Place(NamedTuple):
    """A chunk's first image, slice, row and column, one for each chunk."""

    n: Ints
    d: Ints
    h: Ints
    w: Ints


class Work(NamedTuple):
    """A block's group, first channels within the group, and first tap."""

    group: int
    ci: int
    co: int
    tap: tuple[int, int, int]
    split: int


class Memory(NamedTuple):
    """A tensor in memory: its elements between NaNs, and where the first one lies."""

    words: Floats
    base: int
    batch: int
    channels: int
    size: tuple[int, int, int]


@cache
def fragment_a(element: int) -> tuple[Ints, Ints]:
    """(row, k) of [lane, register, element of the word] of A: PTX ISA, "Matrix fragments for mma.m16n8k8", "k16"."""
    lane, r, e = LANE[:, None, None], np.arange(4)[:, None], np.arange(4 // element)
    row = np.broadcast_to((lane >> 2) + (r & 1) * 8, (32, 4, 4 // element))
    if element == 4:
        return row, np.broadcast_to(lane % 4 + (r >> 1) * 4 + 0 * e, row.shape)
    return row, np.broadcast_to(lane % 4 * 2 + e + (r >> 1) * 8, row.shape)


def fragment_b(element: int) -> tuple[Ints, Ints]:
    """(column, k) of [lane, register, element of the word] of B of the same instructions."""
    rows, ks = fragment_a(element)
    return rows[:, ::2], ks[:, ::2]


def load_transposed(addresses: Ints, registers: int) -> Ints:
    """Elements that ``ldmatrix.trans`` gives [..., lane, register, element] for the lanes' addresses [..., lane].

    PTX ISA, "ldmatrix": lanes 8i to 8i + 7 address the rows of matrix i; with .trans lane L gets of it the elements
    2 (L % 4) and 2 (L % 4) + 1 of column L / 4.
    """
    r, e = np.arange(registers)[:, None], np.arange(2)
    row = 8 * r + 2 * (LANE % 4)[:, None, None] + e
    return addresses[..., row] + (LANE // 4)[:, None, None]


def swizzled(address: Ints, span: int) -> Ints:
    """Where the tensor copy engine, and wgmma's descriptors, put the byte of a tile with rows of ``span`` bytes."""
    return address ^ ((address >> 7 & span // 16 - 1) << 4)


class Interpreter:
    """One tiling. ``coarse`` is the step of the rounding that stands for TF32's where an operand has two parts."""

    def __init__(self, tiling: SyncTiling | WarpgroupTiling, coarse: float = 0.25) -> None:
        self.tiling, self.coarse = tiling, coarse
        self.m = m = tiling.constants()
        self.wgmma = isinstance(tiling, WarpgroupTiling)
        self.element, self.last = tiling.element, bool(m["channels_last"])
        self.vec = 16 // self.element
        self.k = 32 // self.element  # of a matrix instruction
        self.parts = 2 if m["precision"] == 1 else 1
        self.taps = m["kernel_d"] * m["kernel_h"] * m["kernel_w"]
        self.set_taps = m["taps_d"] * m["taps_h"] * m["taps_w"]
        self.cin, self.cout = m["groups"] * m["cin"], m["groups"] * m["cout"]
        self.dense, spans = {}, {}
        for axis in "dhw":
            count, taps = m[f"tile_{axis}"], m[f"taps_{axis}"]
            span = ((count - 1) * m[f"step_{axis}"] + (taps - 1) * m[f"dilation_{axis}"]) // m[f"apart_{axis}"] + 1
            self.dense[axis] = axis == "w" or span <= count * taps
            spans[axis] = span if self.dense[axis] else count * taps
        self.stacked = bool(m.get("stacked", 0))
        self.stack = -(-m["taps_h"] // m["step_h"]) if self.stacked else 1
        if self.stacked:
            self.dense["h"], spans["h"] = True, m["tile_h"] * m["step_h"]
        self.gapless = bool(m.get("gapless", 0))
        if self.gapless:
            spans["d"] = spans["h"] = 1
        self.x_rows_h = m["tile_h"] + self.stack - 1
        self.g_rows_d, self.g_rows_h, self.g_columns = spans["d"], spans["h"], spans["w"]
        self.x_rows = m["tile_n"] * m["tile_d"] * self.x_rows_h
        self.row_classes, self.channel_classes = m.get("row_classes", 1), m.get("channel_classes", 1)
        self.classed = self.row_classes * self.channel_classes > 1
        self.class_rows = -(-self.g_rows_h // self.row_classes)
        self.g_rows = m["tile_n"] * self.g_rows_d * self.row_classes * self.class_rows
        self.g_channels = m["block_co"] // self.channel_classes
        self.w_strips = m["tile_w"] // 8
        self.pixels = self.x_rows * m["tile_w"]
        self.k_steps = m["tile_n"] * m["tile_d"] * m["tile_h"] * m["tile_w"] // self.k
        assert m["tile_w"] % 8 == 0
        assert m["tile_n"] * m["tile_d"] * m["tile_h"] * m["tile_w"] % self.k == 0
        self.box_g = bool(m.get("box_g", 0))
        self.turn_x = self.wgmma and self.last and self.element == 4
        self.pitches()
        if self.wgmma:
            self.wgmma_constants()
        else:
            self.sync_constants()

    def pitches(self) -> None:
        m, vec = self.m, self.vec
        self.g_pitch = m["g_pitch"]
        if self.last:
            self.x_pitch, g_pitch = (
                (n + 23) // 32 * 32 + 8 if self.element == 4 else n + 8 for n in (m["block_ci"], m["block_co"])
            )
            assert self.box_g or self.g_pitch == g_pitch
            self.x_size = self.pixels * self.x_pitch
            self.g_size = self.g_rows * self.g_columns * self.g_pitch
        else:
            self.x_units = (m["tile_w"] + (0 if m.get("aligned_x", 1) else vec - 1) + vec - 1) // vec
            self.g_units = (self.g_columns + vec - 1 + vec - 1) // vec
            self.x_pitch = (self.x_units | 1) * vec
            assert m.get("interleaved") or self.g_pitch == (self.g_units | 1) * vec
            self.x_size = self.x_rows * m["block_ci"] * self.x_pitch
            self.g_size = self.g_rows * m["block_co"] * self.g_pitch

    def sync_constants(self) -> None:
        m = self.m
        warps_m, warps_n = m["block_ci"] // m["warp_m"], m["block_co"] // m["warp_n"]
        self.k_slices = 8 // (warps_m * warps_n)
        assert warps_m * m["warp_m"] == m["block_ci"]
        assert warps_n * m["warp_n"] == m["block_co"]
        assert self.k_slices * warps_m * warps_n == 8
        assert m["x_pitch"] == self.x_pitch
        assert 2 * (self.x_size + self.g_size) * self.element == m["shared_bytes"]
        self.g_at = self.x_size  # element of the stage at which g's tile begins
        self.stage_size = self.x_size + self.g_size

    def wgmma_constants(self) -> None:
        m, element = self.m, self.element
        self.k_slices = 1
        self.rows_per_sub = 64 // m["subs"]
        # Of a warp's sixteen rows: taps that are neighbours in M, and elements at multiples of which boxes of g begin.
        self.neighbours = m["subs"] if m["interleaved"] else 1
        self.g_begin = 128 // element if m["lined"] else self.vec
        self.n_width = next(w for w in (64, 32, 16) if m["block_ci"] % w == 0)  # of a swizzled line
        self.k_major = not self.last or self.turn_x
        self.of_unit = m["taps_h"] if self.stacked else 1
        self.unit_count, self.set_units = m["entries"] // self.of_unit, self.set_taps // self.of_unit
        if self.k_major:
            self.line_bytes = m["tile_w"] * (m["tile_h"] if m["lines"] else 1) * element
            self.segment = min(self.line_bytes, 128)
            self.boxes = self.line_bytes // self.segment
            self.box_bytes = self.pixels * m["block_ci"] * element // self.boxes
            self.x_row_bytes = m["block_ci"] * self.segment
        else:
            self.segment = self.n_width * element
            self.boxes, self.box_bytes = m["block_ci"] // self.n_width, self.pixels * self.segment
            self.x_row_bytes = m["tile_w"] * self.segment
        assert self.segment in (32, 64, 128)
        assert self.box_bytes % (8 * self.segment) == 0, "a box begins where its swizzle does"
        self.g_at = self.boxes * self.box_bytes // element
        if self.last:
            wide = m["block_co"] % 64 == 0 and element == 2
            self.g_width = 64 if wide else 32 if m["block_co"] % 32 == 0 else 16
            self.g_boxes = m["block_co"] // self.g_width
            pixel_bytes = self.g_width * element
            assert not self.box_g or self.g_pitch == self.g_width
            self.plane_bytes = 0
            if m["g_one_box"]:
                self.g_box_bytes, self.g_line = m["plane_columns"] * pixel_bytes, m["plane_columns"]
                self.plane_bytes = -(-self.g_rows * self.g_box_bytes // 128) * 128
                self.g_slab_bytes = m["g_planes"] * self.plane_bytes
            else:
                self.g_box_bytes = -(-self.g_columns * pixel_bytes // 128) * 128
                self.g_line = self.g_box_bytes // pixel_bytes if self.box_g else self.g_columns
                self.g_slab_bytes = self.g_rows * self.g_box_bytes
            if self.box_g:
                self.g_size = self.g_boxes * self.g_slab_bytes // element
        self.parted = bool(m["parted"])
        self.g_step = 1 if self.parted else m["step_w"]
        self.stage_size = -(-(self.g_at + self.g_size) * element // 1024) * 1024 // element
        raw = self.pixels * m["block_ci"] * element if self.turn_x else 0
        assert m["stages"] * (self.stage_size * element + 16) + raw + 16 == m["shared_bytes"]

    # --- rows --------------------------------------------------------------------------------------------------------

    def x_row(self, r: Ints) -> Rows:
        m = self.m
        rows = self.x_rows_h
        return Rows(r // (m["tile_d"] * rows), r // rows % m["tile_d"], r % rows)

    def g_row(self, r: Ints) -> Rows:
        m, h, d = self.m, r % self.g_rows_h, r // self.g_rows_h % self.g_rows_d
        d, h = (
            at * m[f"apart_{axis}"]
            if self.dense[axis]
            else at // m[f"taps_{axis}"] * m[f"step_{axis}"] + at % m[f"taps_{axis}"] * m[f"dilation_{axis}"]
            for axis, at in (("d", d), ("h", h))
        )
        return Rows(r // (self.g_rows_h * self.g_rows_d), d, h)

    def tile_row(self, q: Rows) -> Ints:
        """Row of g's tile of the first tap of a row of q."""
        m = self.m
        d = q.d * (m["step_d"] // m["apart_d"] if self.dense["d"] else m["taps_d"])
        h = q.h * (m["step_h"] // m["apart_h"] if self.dense["h"] else m["taps_h"])
        return (q.n * self.g_rows_d + d) * self.class_rows + h

    def g_place(self, c: Place, tap: tuple[int, int, int]) -> Place:
        """Where a chunk's tile of g begins."""
        m = self.m
        found = (
            at * m[f"step_{axis}"] + t * m[f"dilation_{axis}"] - m[f"padding_{axis}"]
            for axis, at, t in zip("dhw", (c.d, c.h, c.w), tap)
        )
        return Place(c.n, *found)

    # --- copies ------------------------------------------------------------------------------------------------------

    def element_at(self, t: Memory, n: Ints, channel: Ints, d: Ints, h: Ints, w: Ints) -> Ints:
        depth, height, width = t.size
        if self.last:
            return t.base + (((n * depth + d) * height + h) * width + w) * t.channels + channel
        return t.base + (((n * t.channels + channel) * depth + d) * height + h) * width + w

    def read(self, t: Memory, at: Ints, inside: NDArray[np.bool_]) -> Floats:
        """Elements, zeros where not ``inside``."""
        found = np.zeros(inside.shape)
        found[inside] = t.words[np.broadcast_to(at, inside.shape)[inside]]
        return found

    def box(self, t: Memory, n: Ints, channel: Ints, d: Ints, h: Ints, w: Ints) -> Floats:
        """Elements by their coordinates, as the tensor copy engine gives them: zeros beyond the tensor."""
        n, channel, d, h, w = np.broadcast_arrays(n, channel, d, h, w)
        inside = (n >= 0) & (n < t.batch) & (channel >= 0) & (channel < t.channels)
        for at, size in zip((d, h, w), t.size):
            inside = inside & (at >= 0) & (at < size)
        return self.read(t, self.element_at(t, n, channel, d, h, w), inside)

    def copy_tile(
        self, t: Memory, stage: Floats, at: int, is_x: bool, c: Place, channel: int, left: int, channels_g: int
    ) -> None:
        """``copy_tile`` and ``clear_borders``: threads copy the rows of a tile of all chunks, units of 16 bytes."""
        m, vec = self.m, self.vec
        rows, block = (self.x_rows, m["block_ci"]) if is_x else (self.g_rows, m["block_co"])
        pitch = self.x_pitch if is_x else self.g_pitch
        r = np.arange(rows)
        row = self.x_row(r) if is_x else self.g_row(r)
        n, d, h = ((first[:, None] + step)[:, :, None, None, None] for first, step in zip(c[:3], row))
        depth, height, width = t.size
        inside = (n < t.batch) & (d >= 0) & (d < depth) & (h >= 0) & (h < height)
        e = np.arange(vec)
        if self.last:
            columns = np.arange(m["tile_w"] if is_x else self.g_columns)
            units = np.arange(block // vec)
            assert block % vec == 0
            w = c.w[:, None, None, None, None] + columns[:, None, None]
            have = left - units[:, None] * vec
            inside = inside & (w >= 0) & (w < width) & (have > 0)
            if t.channels % vec == 0 and channels_g % vec == 0:  # whole units
                assert (t.base + channel) % vec == 0, "a copy of 16 bytes begins off 16 bytes"
                inside = inside & (e >= 0)
            else:
                inside = inside & (e < have)
            to = ((r[:, None, None] * len(columns) + columns[:, None]) * pitch + units * vec)[..., None] + e
            values = self.read(t, self.element_at(t, n, channel + units[:, None] * vec + e, d, h, w), inside)
            stage[:, at + to] = values
            return
        units = np.arange(self.x_units if is_x else self.g_units)
        extent, columns_ = len(units) * vec, m["tile_w"] if is_x else self.g_columns
        b = np.arange(block)[:, None, None]
        w0 = c.w[:, None, None, None, None]
        start = self.element_at(t, n, channel + b, d, h, w0)
        misaligned = start % vec
        first = w0 + units[:, None] * vec - misaligned
        inside = inside & (b < left) & (first + vec > 0) & (first < width)
        from_ = start - misaligned + units[:, None] * vec
        end = t.base + t.batch * t.channels * depth * height * width
        touched = np.broadcast_to(from_, inside.shape)[inside]
        assert ((touched + vec > t.base) & (touched < end)).all(), "a unit without an element of the tensor is read"
        values = self.read(t, from_ + e, np.broadcast_to(inside, np.broadcast_shapes(inside.shape, (vec,))))
        values = values.reshape(*values.shape[:3], extent)
        border = (c.w < 0) | (c.w + columns_ > width)
        zero = (misaligned - w0)[..., 0]
        end_ = zero + width
        place = np.arange(extent)
        clear = (zero > 0) & (zero < extent) & (place >= zero // vec * vec) & (place < zero)
        clear |= (end_ > 0) & (end_ < extent) & (place >= end_) & (place < -(-end_ // vec) * vec)
        values[clear & border[:, None, None, None]] = 0
        stage[:, at + (r[:, None] * block + b[:, 0, 0]).reshape(rows, block, 1) * pitch + place] = values

    # --- registers ---------------------------------------------------------------------------------------------------

    def matrix(self, registers: Ints, place: tuple[Ints, Ints]) -> Ints:
        """[..., row, k] from [..., lane, register, element of the word]."""
        rows, ks = place
        found = np.full((*registers.shape[:-3], rows.max() + 1, self.k), -1)
        found[..., rows, ks] = registers
        assert (found >= 0).all()
        return found

    @property
    def half(self) -> Ints:
        """Of K's elements: the strip, or half strip, from which each comes."""
        return np.arange(self.k) // (self.k // 2)

    def strips(self) -> tuple[Ints, Ints]:
        """(strip, column in the row) of [step, half of K]."""
        step, k = np.arange(self.k_steps)[:, None], np.arange(2)
        strip = step + 0 * k if self.element == 4 else 2 * step + k
        return strip, strip % self.w_strips * 8 + (4 * k if self.element == 4 else 0)

    @cached_property
    def sync_a(self) -> Ints:
        """Elements of the stage: x [step, channel of the block, k], before the rows' misalignments."""
        m = self.m
        strip, column = self.strips()
        x_at = strip // self.w_strips * (m["tile_w"] if self.last else m["block_ci"] * self.x_pitch) + column
        g, q = LANE >> 2, LANE & 3
        found = []
        for first in range(0, m["block_ci"], 16):
            if self.last and self.element == 2:
                lane_at = x_at[:, LANE >> 4] + (LANE & 7)
                registers = load_transposed(lane_at * self.x_pitch + first + (LANE >> 3 & 1) * 8, 4)
            else:
                r = np.arange(4)
                channel = first + (r & 1) * 8 + g[:, None]
                at = x_at[:, None, r >> 1]
                if self.last:
                    registers = ((at + q[:, None]) * self.x_pitch + channel)[..., None]
                else:
                    per = 4 // self.element
                    registers = (at + channel * self.x_pitch + q[:, None] * per)[..., None] + np.arange(per)
            found.append(self.matrix(registers, fragment_a(self.element)))
        return np.concatenate(found, axis=1)

    @cached_property
    def sync_b(self) -> Ints:
        """Elements of g's tile [step, tap of the set, output channel of the block, k], before misalignments."""
        m = self.m
        strip, column = self.strips()
        row = self.tile_row(self.x_row(strip // self.w_strips))
        g, q, per = LANE >> 2, LANE & 3, 4 // self.element
        taps = []
        for td, th, tw in product(*(range(m[f"taps_{axis}"]) for axis in "dhw")):
            shift = (td * (m["dilation_d"] // m["apart_d"]) if self.dense["d"] else td) * self.g_rows_h
            shift += th * (m["dilation_h"] // m["apart_h"]) if self.dense["h"] else th
            base = (row + shift) * (self.g_columns if self.last else m["block_co"] * self.g_pitch)
            base = base + column * m["step_w"]
            found = []
            for warp_n in range(0, m["block_co"], m["warp_n"]):
                fragments = m["warp_n"] // 8
                if self.last and self.element == 2:
                    lane_at = base[:, LANE >> 3 & 1] + (LANE & 7) * m["step_w"] + tw * m["dilation_w"]
                    address = lane_at * self.g_pitch + warp_n + (LANE >> 4) * 8
                    for j in range(0, fragments - 1, 2):
                        four = load_transposed(address + j * 8, 4)
                        found += [four[..., :2, :], four[..., 2:, :]]
                    if fragments % 2:
                        found.append(load_transposed(address - (LANE >> 4) * 8 + (fragments - 1) * 8, 2))
                    continue
                for j in range(fragments):
                    n = (warp_n + j * 8 + g)[:, None]
                    at, column_ = base[:, None, :], q[:, None] * m["step_w"] + tw * m["dilation_w"]
                    if self.last:
                        found.append(((at + column_) * self.g_pitch + n)[..., None])
                    else:
                        column_ = q[:, None] * per * m["step_w"] + tw * m["dilation_w"]
                        found.append((at + n * self.g_pitch + column_)[..., None] + np.arange(per) * m["step_w"])
            taps.append(np.concatenate([self.matrix(r, fragment_b(self.element)) for r in found], axis=1))
        return np.stack(taps, axis=1)

    def steps_of_rows(self, tap_h: int) -> tuple[Ints, Ints, Ints, Ints]:
        """STACKED: image, slice, row of x's tile and row of g's slice for every step of K that a tap takes part in."""
        m = self.m
        i = np.arange(self.k_steps)
        row_steps = m["tile_w"] // self.k
        q, slice_ = i // row_steps % m["tile_h"], i // (row_steps * m["tile_h"])
        remainder, above = tap_h % m["step_h"], tap_h // m["step_h"]
        of = -(-(m["taps_h"] - remainder) // m["step_h"])
        first = q + self.stack - of  # of the instruction's rows of x; a tap further down meets a row further up
        x_row = first + of - 1 - above
        return slice_ // m["tile_d"], slice_ % m["tile_d"], x_row, q * m["step_h"] + remainder

    @cached_property
    def wgmma_a(self) -> tuple[Ints, Ints]:
        """Of g's tile, [warpgroup, entry, step, row of M, k]: bytes (CHANNELS_LAST with boxes) or elements.

        Also the taps of [warpgroup, entry, row]. Rows' misalignments (NCHW) are left out. STACKED: an entry's steps are
        those of its own rows of g.
        """
        m, element, per = self.m, self.element, 4 // self.element
        g, q = LANE >> 2, LANE & 3
        found = np.full((m["warpgroups"], m["entries"], self.k_steps, 64, self.k), -1)
        taps = np.full((m["warpgroups"], m["entries"], 64), -1)
        strips, _ = self.strips()
        columns = strips % self.w_strips * 8 * self.g_step
        for wg, warp, u, i in product(range(m["warpgroups"]), range(4), range(self.unit_count), range(self.of_unit)):
            channel, units = self.rows_of(wg, warp, u)
            channel = int(channel[0])
            entry = u * self.of_unit + i
            taps[wg, entry, warp * 16 : warp * 16 + 16] = [self.tap_of(int(unit), i) for unit in units]
            unit = np.minimum(units[g], self.set_units - 1)  # of each lane's row g
            if not m["interleaved"]:
                unit = unit[0]
            td, tw = unit // (self.set_units // m["taps_d"]), unit % m["taps_w"]
            th = 0 * unit if self.stacked else unit // m["taps_w"] % m["taps_h"]
            shift = (td * (m["dilation_d"] // m["apart_d"]) if self.dense["d"] else td) * self.class_rows
            shift = shift + (th * (m["dilation_h"] // m["apart_h"]) if self.dense["h"] else th)
            if self.gapless:
                tap_at = unit * (self.plane_bytes // (self.g_width * element))
            elif self.parted:
                plane, on = tw % m["g_planes"], tw // m["g_planes"] * m["plane_taps"]
                tap_at = shift * self.g_line + plane * (self.plane_bytes // (self.g_width * element)) + on
            elif self.last:
                tap_at = shift * self.g_line + tw * m["dilation_w"]
            else:
                tap_at = shift * self.g_channels * self.g_pitch + tw * m["dilation_w"]
            if self.stacked:
                n, d, _, r = self.steps_of_rows(i)
                rows = self.tile_row(Rows(n, d, 0 * n)) + r // self.row_classes
                rows = rows + r % self.row_classes * (self.g_rows // self.row_classes)
                rows = np.broadcast_to(rows[:, None], strips.shape)
            else:
                rows = self.tile_row(self.x_row(strips // self.w_strips))
            if self.turn_x:
                registers = self.turned_registers(channel, tap_at, rows[:, :1], columns[:, :1])[..., None]
            elif self.last:
                pixel = tap_at + (rows * self.g_line + columns)[:, LANE >> 4] + (LANE & 7) * self.g_step
                c8 = channel + (LANE >> 3 & 1) * 8
                if self.box_g:
                    address = pixel * self.g_width * 2 + c8 // self.g_width * self.g_slab_bytes
                    address = swizzled(address + c8 % self.g_width * 2, self.g_width * 2)
                    assert (address % 16 == 0).all()
                    registers = load_transposed(address // 2, 4)
                else:
                    address = pixel * self.g_pitch + c8
                    assert (address % 8 == 0).all()
                    registers = load_transposed(address, 4)
            else:
                k, h = np.arange(4) >> 1, np.arange(4) & 1
                apart = 8 // self.neighbours * self.g_pitch  # from row g to row g + 8
                constant = rows[:, k] * self.g_channels * self.g_pitch + columns[:, k] + h * apart
                constant += 4 * k * m["step_w"] if element == 4 else 0
                assert element == 4 or (constant % 2 == 0).all(), "constants are whole words"
                own = channel + g // self.neighbours
                lane_at = own // self.g_channels * (self.g_size // self.channel_classes)
                lane_at = lane_at + own % self.g_channels * self.g_pitch + q * per * m["step_w"] + tap_at
                registers = (lane_at[:, None] + constant[:, None])[..., None] + np.arange(per) * m["step_w"]
            found[wg, entry, :, warp * 16 : warp * 16 + 16] = self.matrix(registers, fragment_a(element))
        return found, taps

    def rows_of(self, wg: int, warp: int, u: int) -> tuple[Ints, Ints]:
        """(channels of the block, units) of a warp's sixteen rows of M."""
        m, row = self.m, np.arange(16)
        first, subs = wg % m["split_m"] * self.rows_per_sub, m["subs"]
        if m["interleaved"]:
            unit = wg // m["split_m"] * subs * self.unit_count + row % subs + u * subs
            return first + warp * (16 // subs) + row // subs, unit
        sub = warp * 16 // self.rows_per_sub
        return first + warp * 16 % self.rows_per_sub + row, (
            wg // m["split_m"] * subs + sub
        ) * self.unit_count + u + 0 * row

    def tap_of(self, unit: int, i: int) -> int:
        """Index within the set of a unit's tap; the set's own number of taps where there is none."""
        if unit >= self.set_units:
            return self.set_taps
        if not self.stacked:
            return unit
        taps_w, taps_h = self.m["taps_w"], self.m["taps_h"]
        return (unit // taps_w * taps_h + i) * taps_w + unit % taps_w

    def turned_registers(self, channel: int, tap_at: Ints, row: Ints, column: Ints) -> Ints:
        """Elements of g's tile of [step, lane, register] where x is turned (TURN_X)."""
        g, q = LANE >> 2, LANE & 3
        pixel = tap_at + row * self.g_line + column
        first = (pixel + self.strip_pixel(q) * self.g_step) * self.g_width * 4
        first = first + (channel + g) // self.g_width * self.g_slab_bytes
        first = first + (channel + g) % self.g_width * 4
        found = []
        for k in range(2):
            address = first + k * int(self.strip_pixel(np.array(4))) * self.g_step * self.g_width * 4
            address = swizzled(address, self.g_width * 4)
            found += [address // 4, (address ^ 32) // 4]
        return np.stack(found, axis=-1)

    def strip_pixel(self, j: Ints) -> Ints:
        return j % 4 * 2 + j // 4 if self.g_step % 2 else j

    @cached_property
    def wgmma_b(self) -> Ints:
        """Elements of the stage: x [tap of a unit, step, channel of the block, k], as a descriptor addresses them.

        PTX ISA, "Matrix descriptors": eight rows are 8 x SEGMENT bytes apart from the next eight; of MN-major tiles so
        are eight of K, and the columns beyond a swizzled line lie in the next row of x. STACKED: a tap's columns are
        those of its own row of x.
        """
        channel, k = np.arange(self.m["block_ci"])[:, None], np.arange(self.k)
        nb, n = channel // self.n_width, channel % self.n_width
        found = []
        for i in range(self.of_unit):
            start = self.x_at(np.arange(self.k_steps))
            if self.stacked:
                image, d, row, _ = self.steps_of_rows(i)
                row = (image * self.m["tile_d"] + d) * self.x_rows_h + row
                start = self.x_at(np.arange(self.k_steps) % (self.m["tile_w"] // self.k)) + row * self.x_row_bytes
            start = start[:, None, None]
            if self.k_major:
                address = start + (nb * self.n_width + n) * self.segment + k * self.element
            else:
                address = start + nb * self.box_bytes + k * self.segment + n * self.element
            found.append(swizzled(address, self.segment) // self.element)
        return np.stack(found)

    def x_at(self, k_step: Ints) -> Ints:
        """Byte at which a step of K begins in x's tile."""
        if not self.k_major:
            return k_step * 16 * self.segment
        steps = self.line_bytes // 32
        within = k_step % steps * 32
        return within // self.segment * self.box_bytes + k_step // steps * self.x_row_bytes + within % self.segment

    # --- the kernels -------------------------------------------------------------------------------------------------

    def load_x(self, x: Memory, stage: Floats, c: Place, work: Work) -> None:
        """x's tile by boxes, and turned (TURN_X)."""
        m, element = self.m, self.element
        first = work.group * m["cin"] + work.ci
        if self.gapless and not self.turn_x:
            self.gapless_plane(x, stage, c, (1, 1, 1), first, m["block_ci"], self.n_width, self.box_bytes, 0)
            return
        n, d, h, w = (a[:, None, None] for a in c)
        h = h - (self.stack - 1)
        channel = np.arange(m["block_ci"])
        if not self.k_major or self.turn_x:
            pixel = np.arange(self.pixels)
            row = self.x_row(pixel // m["tile_w"])
            places = ((first + a[:, None] for first, a in zip((n, d, h), row)), w + (pixel % m["tile_w"])[:, None])
            (n, d, h), w = places
            values = self.box(x, n, first + channel, d, h, w)  # [chunk, pixel, channel]
            if self.gapless:
                values = self.of_box(x, c, (1, 1, 1), first + channel)
            if self.turn_x:
                j = np.arange(8)
                order = np.arange(0, self.pixels, 8)[:, None] + self.strip_pixel(j)
                quad = np.arange(self.pixels // 4)
                address = self.x_at(quad // 2) + quad % 2 * 16
                address = swizzled(address[:, None] + channel * self.segment, self.segment) // element
                four = values[:, order.reshape(-1, 4)].transpose(0, 1, 3, 2)
                stage[:, address[..., None] + np.arange(4)] = four
                return
            box, inner = channel // self.n_width, channel % self.n_width
            address = box * self.box_bytes + pixel[:, None] * self.segment + inner * element
        else:
            box = np.arange(self.boxes)[:, None, None, None]
            lines = self.x_rows // (m["tile_h"] if m["lines"] else 1)
            line = np.arange(lines)[:, None, None]
            row = self.x_row(line * (m["tile_h"] if m["lines"] else 1))
            column = np.arange(self.segment // element)
            w = w[..., None, None] + box * (self.segment // element) + column
            n, d, h = (a[..., None, None] + b for a, b in zip((n, d, h), row))
            if m["lines"]:  # the image is a line; one beyond its end lies in no row
                assert x.size[2] == m["tile_w"] and (c.w == 0).all()
                pixel = h * m["tile_w"] + w
                h, w = pixel // m["tile_w"], pixel % m["tile_w"]
            values = self.box(x, n, first + channel[:, None], d, h, w)
            address = box * self.box_bytes + line * self.x_row_bytes + channel[:, None] * self.segment
            address = address + column * element
        stage[:, swizzled(address, self.segment) // element] = values

    def of_box(self, t: Memory, c: Place, steps: tuple[int, ...], channel: Ints) -> Floats:
        """GAPLESS: [chunk, pixel, channel] of a chunk's box of pixels in order; zeros behind the last."""
        box = self.tiling.tile
        i = np.indices(box).reshape(4, -1)
        assert i.shape[1] <= self.pixels
        assert max((n - 1) * step for n, step in zip(box, (1, *steps))) < 256
        n, d, h, w = (at[:, None] + k * step for at, k, step in zip(c, i, (1, *steps)))
        values = self.box(t, n[..., None], channel, d[..., None], h[..., None], w[..., None])
        return np.pad(values, ((0, 0), (0, self.pixels - i.shape[1]), (0, 0)))

    def gapless_plane(
        self,
        t: Memory,
        stage: Floats,
        c: Place,
        steps: tuple[int, ...],
        first: int,
        block: int,
        width: int,
        slab: int,
        at: int,
    ) -> None:
        """GAPLESS: the pixels of a box, `width` channels in a swizzled line, for each of these `slab` bytes on."""
        channel, pixel = np.arange(block), np.arange(self.pixels)[:, None]
        address = channel // width * slab + (pixel * width + channel % width) * self.element
        values = self.of_box(t, c, steps, first + channel)
        stage[:, at + swizzled(address, width * self.element) // self.element] = values

    def class_of(self, g: Memory, row: Ints, channel: Ints, w: Ints) -> tuple[Ints, Ints]:
        """(elements by which a class's rows begin early, those by which a tile of it begins off 16 bytes)."""
        depth, height, width = g.size
        of_rows, of_channels = row % self.row_classes, channel % self.channel_classes
        lead = (of_channels * depth * height * width + of_rows * width) % self.vec
        return lead, (w + lead) % self.vec

    def load_classes(self, g: Memory, stage: Floats, c: Place, first: int) -> None:
        """CLASSED: a box for each class of rows and channels; what a row has ahead of it is the memory before."""
        t, (_, height, width) = self.tiling, g.size
        assert isinstance(t, WarpgroupTiling)
        i = np.arange(self.g_rows // self.row_classes)
        slices = i // self.class_rows
        step = t.g_box_steps[3]
        n = (c.n[:, None] + slices // self.g_rows_d)[..., None, None]
        d = (c.d[:, None] + slices % self.g_rows_d * step)[..., None, None]
        column = np.arange(self.g_pitch)
        for k, j in product(range(self.channel_classes), range(self.row_classes)):
            h = (c.h[:, None] + j + i % self.class_rows * self.row_classes)[..., None, None]
            channel = (first + k + np.arange(self.g_channels) * self.channel_classes)[:, None]
            lead, phase = (a[:, None, None, None] for a in self.class_of(g, c.h + j, np.array(first + k), c.w))
            at = c.w[:, None, None, None] + lead - phase + column  # of the class's own rows
            inside = (n < g.batch) & (d >= 0) & (d < g.size[0]) & (h >= 0) & (h < height) & (channel < g.channels)
            inside = inside & (at >= 0) & (at < width + lead)
            values = self.read(g, self.element_at(g, n, channel, d, h, at - lead), inside)
            to = (i[:, None, None] * self.g_channels + np.arange(self.g_channels)[:, None]) * self.g_pitch + column
            box = (k * self.row_classes + j) * (self.g_size // (self.row_classes * self.channel_classes))
            stage[:, self.g_at + box + to] = values

    def load_g(self, g: Memory, stage: Floats, c: Place, work: Work) -> None:
        """g's tile by boxes, a row each or all of it."""
        m, element = self.m, self.element
        first = work.group * m["cout"] + work.co
        if self.classed:
            self.load_classes(g, stage, c, first)
            return
        if self.gapless:
            steps = tuple(m[f"step_{axis}"] for axis in "dhw")
            for plane, taps in enumerate(product(*(range(m[f"taps_{axis}"]) for axis in "dhw"))):
                d, h, w = (a + tap * m[f"dilation_{axis}"] for a, tap, axis in zip(c[1:], taps, "dhw"))
                at = self.g_at + plane * self.plane_bytes // element
                self.gapless_plane(
                    g, stage, Place(c.n, d, h, w), steps, first, m["block_co"], self.g_width, self.g_slab_bytes, at
                )
            return
        r = np.arange(self.g_rows)
        row = self.g_row(r)
        if m["g_one_box"]:  # what the box brings, in its order
            t = self.tiling
            assert isinstance(t, WarpgroupTiling)
            _, _, count_h, count_d, count_n = (-(-n // step) for n, step in zip(t.g_box, t.g_box_steps))
            if m["lined"]:  # of lines, channels
                assert (count_h, count_d) == (m["block_co"], 1) and t.g_box[0] * t.g_box[1] == self.g_pitch
                count_h = 1
            i = np.indices((count_n, count_d, count_h)).reshape(3, -1)
            row = Rows(i[0], i[1] * t.g_box_steps[3], i[2] * t.g_box_steps[2])
            assert i.shape[1] == self.g_rows
        n, d, h = ((a[:, None] + b)[..., None, None] for a, b in zip(c[:3], row))
        channel = np.arange(m["block_co"])
        if self.last:
            count, step = m["plane_columns"] if m["g_one_box"] else self.g_columns, 1
            if self.parted:
                assert isinstance(self.tiling, WarpgroupTiling)
                step = self.tiling.g_box_steps[1]
                assert (count - 1) * step + 1 == self.tiling.g_box[1]
            column = np.arange(count)[:, None]
            for plane in range(m["g_planes"]):
                w = c.w[:, None, None, None] + plane * m["dilation_w"] + column * step
                values = self.box(g, n, first + channel, d, h, w)
                address = channel // self.g_width * self.g_slab_bytes + plane * self.plane_bytes
                address = address + r[:, None, None] * self.g_box_bytes
                address = address + column * self.g_width * element + channel % self.g_width * element
                stage[:, self.g_at + swizzled(address, self.g_width * element) // element] = values
        else:
            column = np.arange(self.g_pitch)
            w = c.w - c.w % self.g_begin
            if m["lined"]:
                assert g.size[2] % self.g_begin == 0 and self.g_pitch % self.g_begin == 0, "rows are no whole lines"
                assert g.size[:2] == (1, 1)
            else:
                assert self.g_pitch <= 256
            values = self.box(g, n, first + channel[:, None], d, h, w[:, None, None, None] + column)
            to = (r[:, None, None] * m["block_co"] + channel[:, None]) * self.g_pitch + column
            stage[:, self.g_at + to] = values

    def misaligned(self, t: Memory, c: Place, channel: int, row: Rows) -> Ints:
        """By how many elements rows of memory are off 16 bytes: [chunk, *row's shape, channel modulo 8]."""
        shape = (-1, *(1 for _ in row.h.shape), 1)
        n, d, h, w = (a.reshape(shape) for a in c)
        n, d, h = (a + b[..., None] for a, b in zip((n, d, h), row))
        return self.element_at(t, n, channel + np.arange(8), d, h, w) % self.vec

    def split_parts(self, values: Floats) -> tuple[Floats, ...]:
        """The parts of an operand."""
        if self.parts == 1:
            return (values,)
        high = np.round(values / self.coarse) * self.coarse
        return high, values - high

    def __call__(
        self, p: Problem, x: Floats, g: Floats, splits: int, bases: tuple[int, int] = (0, 0)
    ) -> tuple[Floats, Ints]:
        """(the gradient (CIN, COUT_G, taps), how often each partial sum is stored) of a layer of any size.

        ``bases``: elements by which x and g begin off 16 bytes.
        """
        m, t = self.m, self.tiling
        full = (1,) * (3 - p.rank)
        memory = []
        for array, channels, size, base in (
            (x, p.in_channels, (*full, *p.size), bases[0]),
            (g, p.out_channels, (*full, *p.out_size), bases[1]),
        ):
            flat = array.reshape(p.batch, channels, *size)
            flat = (flat.transpose(0, 2, 3, 4, 1) if self.last else flat).reshape(-1)
            words = np.full(base + flat.size + 64, np.nan)
            words[base : base + flat.size] = flat
            memory.append(Memory(words, base, p.batch, channels, (size[0], size[1], size[2])))
        counts = t.counts(p)
        chunks = int(np.prod(counts))
        per_split = -(-chunks // splits)
        slices = splits * self.k_slices
        numel = self.taps * self.cin * m["cout"]
        partial, stores = np.full(slices * numel, np.nan), np.zeros(slices * numel, np.int64)
        for index in range(t.tiles * splits):
            work = self.work_of(index)
            chunk = np.arange(work.split * per_split, min((work.split + 1) * per_split, chunks))
            for at, values in self.block(work, self.places(chunk, counts), *memory):
                partial[at] = values
                np.add.at(stores, at, 1)
        return self.reduce(partial, slices), stores.reshape(slices, numel)

    def work_of(self, index: int) -> Work:
        m = self.m
        sets = [m[f"sets_{axis}"] for axis in "dhw"]
        index, which = divmod(index, sets[0] * sets[1] * sets[2])
        index, co = divmod(index, -(-m["cout"] // m["block_co"]))
        index, ci = divmod(index, -(-m["cin"] // m["block_ci"]))
        split, group = divmod(index, m["groups"])
        tap = (
            which // (sets[2] * sets[1]) * m["taps_d"],
            which // sets[2] % sets[1] * m["taps_h"],
            which % sets[2] * m["taps_w"],
        )
        return Work(group, ci * m["block_ci"], co * m["block_co"], tap, split)

    def places(self, i: Ints, counts: tuple[int, int, int, int]) -> Place:
        m, (_, tiles_d, tiles_h, tiles_w) = self.m, counts
        box = self.tiling.tile if self.gapless else tuple(m[f"tile_{axis}"] for axis in "ndhw")
        w, i = i % tiles_w * box[3], i // tiles_w
        h, i = i % tiles_h * box[2], i // tiles_h
        return Place(i // tiles_d * box[0], i % tiles_d * box[1], h, w)

    def block(self, work: Work, c: Place, x: Memory, g: Memory) -> list[tuple[Ints, Floats]]:
        """(where, partial sums) of one block."""
        m = self.m
        at_g = self.g_place(c, work.tap)
        first_x, first_g = work.group * m["cin"] + work.ci, work.group * m["cout"] + work.co
        stage = np.full((len(c.n), self.stage_size), np.nan)
        if self.wgmma:
            self.load_x(x, stage, c, work)
        else:
            self.copy_tile(x, stage, 0, True, c, first_x, m["cin"] - work.ci, m["cin"])
        if self.box_g:
            self.load_g(g, stage, at_g, work)
        else:
            self.copy_tile(g, stage, self.g_at, False, at_g, first_g, m["cout"] - work.co, m["cout"])
        return self.warpgroups(work, c, at_g, stage, g) if self.wgmma else self.warps(work, c, at_g, stage, x, g)

    def warps(
        self, work: Work, c: Place, at_g: Place, stage: Floats, x: Memory, g: Memory
    ) -> list[tuple[Ints, Floats]]:
        m, chunks = self.m, np.arange(len(c.n))
        a, b = self.sync_a[None], self.sync_b[None] + self.g_at
        if not self.last:
            strip, _ = self.strips()
            row = self.x_row(strip // self.w_strips)
            ci, co = np.arange(m["block_ci"]), np.arange(m["block_co"])
            if not m["aligned_x"]:  # [chunk, step, half of K, channel % 8]
                off = self.misaligned(x, c, work.group * m["cin"] + work.ci, row)
                a = a + off[:, :, self.half[None, :], (ci % 8)[:, None]]
            found = []
            for td, th, _ in product(*(range(m[f"taps_{axis}"]) for axis in "dhw")):
                d, h = row.d * m["step_d"] + td * m["dilation_d"], row.h * m["step_h"] + th * m["dilation_h"]
                off = self.misaligned(g, at_g, work.group * m["cout"] + work.co, Rows(row.n, d, h))
                found.append(off[:, :, self.half[None, :], (co % 8)[:, None]])
            b = b + np.stack(found, axis=2)
        x_parts, g_parts = (self.split_parts(stage[chunks.reshape(-1, *(1,) * (i.ndim - 1)), i]) for i in (a, b))
        stored = []
        for warp_k in range(self.k_slices):
            own = slice(warp_k, None, self.k_slices)
            acc = np.zeros((m["block_ci"], self.set_taps, m["block_co"]))
            for i, j in ((0, 0), (1, 0), (0, 1)) if self.parts == 2 else ((0, 0),):
                acc += np.tensordot(x_parts[i][:, own], g_parts[j][:, own], ((0, 1, 3), (0, 1, 4)))
            part = work.split * self.k_slices + warp_k
            for tap in range(self.set_taps):
                kernel_tap = self.kernel_tap(work, tap)
                if kernel_tap is None:
                    continue
                ci, co = work.ci + np.arange(m["block_ci"])[:, None], work.co + np.arange(m["block_co"])
                ok = (ci < m["cin"]) & (co < m["cout"])
                at = part * self.taps * self.cin * m["cout"]
                at = at + (kernel_tap * self.cin + work.group * m["cin"] + ci) * m["cout"] + co
                assert m["cout"] % 2 or (at[..., ::2] % 2 == 0).all(), "pairs begin at 8 bytes"
                stored.append((at[ok], acc[:, tap][ok]))
        return stored

    def kernel_tap(self, work: Work, tap: int) -> int | None:
        """Index in the kernel of a tap of the block's set; none of those beyond the kernel."""
        m = self.m
        within = (tap // (m["taps_h"] * m["taps_w"]), tap // m["taps_w"] % m["taps_h"], tap % m["taps_w"])
        at = [first + t for first, t in zip(work.tap, within)]
        if tap >= self.set_taps or any(i >= m[f"kernel_{axis}"] for i, axis in zip(at, "dhw")):
            return None
        return (at[0] * m["kernel_h"] + at[1]) * m["kernel_w"] + at[2]

    def warpgroups(self, work: Work, c: Place, at_g: Place, stage: Floats, g: Memory) -> list[tuple[Ints, Floats]]:
        m, chunks = self.m, np.arange(len(c.n))
        a, taps = self.wgmma_a
        a, b = a[None] + self.g_at, self.wgmma_b[:, None]
        if not self.last:
            if m["aligned_g"]:
                a = a + (at_g.w % self.g_begin).reshape(-1, 1, 1, 1, 1, 1)
            else:  # [chunk, step, half of K, channel % 8] of each row's tap
                off = np.zeros((len(c.n), *a.shape[1:]), np.int64)
                for wg, e, warp in product(range(m["warpgroups"]), range(m["entries"]), range(4)):
                    row = self.memory_rows(min(int(taps[wg, e, warp * 16]), self.set_taps - 1))
                    rows = slice(warp * 16, warp * 16 + 16)
                    if self.classed:
                        channel = wg % m["split_m"] * self.rows_per_sub + warp * 16 % self.rows_per_sub
                        of_channels = work.group * m["cout"] + work.co + channel // self.g_channels
                        h, w = at_g.h[:, None, None] + row.h, at_g.w[:, None, None]
                        _, phase = self.class_of(g, h, np.array(of_channels), w)
                        off[:, wg, e, :, rows] = phase[:, :, None, self.half]
                        continue
                    found = self.misaligned(g, at_g, work.group * m["cout"] + work.co, row)
                    off[:, wg, e, :, rows] = found[:, :, self.half[None, :], (np.arange(16) % 8)[:, None]]
                a = a + off
        g_values = stage[chunks.reshape(-1, *(1,) * (a.ndim - 1)), a]
        x_values = stage[chunks.reshape(1, -1, 1, 1, 1), b]
        # [chunk, warpgroup, entry, step, row, k] by [entry's tap of a unit, chunk, step, channel, k]
        acc = np.stack(
            [
                np.tensordot(g_values[:, :, e], x_values[e % self.of_unit], ((0, 2, 4), (0, 1, 3)))
                for e in range(m["entries"])
            ],
            axis=1,
        )
        stored = []
        for wg, e, warp in product(range(m["warpgroups"]), range(m["entries"]), range(4)):
            channels, _ = self.rows_of(wg, warp, 0)
            of = taps[wg, e, warp * 16 : warp * 16 + 16]
            for tap in np.unique(of):
                kernel_tap = self.kernel_tap(work, int(tap))
                if kernel_tap is None:
                    continue
                row = channels[of == tap]
                co = (work.co + row % self.g_channels * self.channel_classes + row // self.g_channels)[:, None]
                ci = work.ci + np.arange(m["block_ci"])
                ok = (co < m["cout"]) & (ci < m["cin"])
                at = (work.split * self.taps + kernel_tap) * self.cout + work.group * m["cout"] + co
                at = at * m["cin"] + ci
                assert m["cin"] % 2 or (at[..., ::2] % 2 == 0).all(), "pairs begin at 8 bytes"
                stored.append((at[ok], acc[wg, e, warp * 16 : warp * 16 + 16][of == tap][ok]))
        return stored

    def memory_rows(self, tap: int) -> Rows:
        """Rows of g in memory, from a chunk's first, of [step, half of K] of a tap."""
        m = self.m
        td, th = tap // (m["taps_h"] * m["taps_w"]), tap // m["taps_w"] % m["taps_h"]
        if self.stacked:
            n, d, _, r = (a[:, None] + np.zeros(2, np.int64) for a in self.steps_of_rows(th))
            return Rows(n, d * m["step_d"] + td * m["dilation_d"], r)
        row = self.x_row(self.strips()[0] // self.w_strips)
        return Rows(row.n, row.d * m["step_d"] + td * m["dilation_d"], row.h * m["step_h"] + th * m["dilation_h"])

    def reduce(self, partial: Floats, slices: int) -> Floats:
        """The second step: slices, or eight runs of them, in their order; (CIN, COUT_G, taps)."""
        m = self.m
        innermost, outer = (m["cin"], self.cout) if self.wgmma else (m["cout"], self.cin)
        sums = partial.reshape(slices, self.taps, outer, innermost)
        columns, rows, per_block = wgrad.reduce_shape(self.tiling)
        assert (columns - 1) * 32 < innermost <= columns * 32 and rows == outer * self.taps
        each = slices if per_block > 1 else -(-slices // RUNS)
        total = np.zeros(sums.shape[1:])
        for begin in range(0, slices, each):
            total += sums[begin : begin + each].sum(0)
        blocks = np.arange(wgrad.reduce_blocks(self.tiling))
        c = (blocks % columns * 32)[:, None, None] + np.arange(32)
        row = (blocks // columns * per_block)[:, None, None] + np.arange(per_block)[:, None]
        c, row = np.broadcast_arrays(c, row)
        c, row = (a[(c < innermost) & (row < rows)] for a in (c, row))
        if self.wgmma:
            group, j = row // (m["cout"] * self.taps), row % (m["cout"] * self.taps)
            co, tap, ci = j // self.taps, j % self.taps, group * innermost + c
            found = total[tap, group * m["cout"] + co, c]
        else:
            ci, tap, co = row // self.taps, row % self.taps, c
            found = total[tap, ci, c]
        out = np.full((self.cin, m["cout"], self.taps), np.nan)
        assert len(found) == out.size, "every weight is written once"
        out[ci, co, tap] = found
        return out
