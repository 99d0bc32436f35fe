"""The direct family: an interpreter of its kernel's index arithmetic, its compiled kernels, and both on a GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from conftest import EVERY, by_turns
from strategies import DTYPES, forward_excess, operands, problems
from upconv import cpu, reference
from upconv.bench.suites import SUITES, Case
from upconv.cuda.compile import elf, jit, nvrtc
from upconv.cuda.direct import direct, tiles, walks
from upconv.cuda.direct.cells import axes
from upconv.cuda.direct.direct import Choice
from upconv.cuda.direct.tiles import Tile
from upconv.cuda.direct.walks import Walk
from upconv.cuda.gpu import A100, H200, RTX3090, RTX5090, Gpu
from upconv.problem import PRECISIONS, Problem

Array = NDArray[np.float64]


# --- the kernel's arithmetic in NumPy, from the same constants -------------------------------------------------------


def pack(p: Problem, m: dict[str, int], weight: Array) -> Array:
    """What ``direct_pack`` writes."""
    d, h, w = axes(p)
    row, blocks = tiles.weight_row(p, m["co_tile"]), -(-m["cout_g"] // m["co_tile"])
    packed = np.zeros((m["groups"], blocks, d.kernel, m["cin_g"], h.kernel, row))
    for block, kw, c in product(range(blocks), range(w.kernel), range(m["co_tile"])):
        co = block * m["co_tile"] + c
        if co < m["cout_g"]:
            taps = weight.reshape(m["groups"], m["cin_g"], m["cout_g"], d.kernel, h.kernel, w.kernel)[:, :, co, ..., kw]
            packed[:, block, :, :, :, kw * m["co_tile"] + c] = taps.transpose(0, 2, 1, 3)
    assert packed.size == tiles.packed_words(p, m["co_tile"])
    return packed.reshape(-1)


class Interpreter:
    """``direct`` block by block, thread by thread, on a shared memory that starts as NaN."""

    def __init__(self, p: Problem, tile: Tile) -> None:
        self.p, self.tile, self.m = p, tile, tiles.constants(p, tile)
        m, (_, h, w) = self.m, axes(p)
        self.weight_words, self.stage_words, self.shared_words = tiles.shared_words(p, m)
        self.run = m["cells"] * w.stride
        self.rows = m["block_h"] * h.stride // m["phases_h"]
        self.units = self.rows * m["block_x"]
        self.pitch = m["cells"] | 1
        self.in_rows = m["block_h"] + h.span
        self.in_cols = m["block_x"] * m["cells"] + w.span + m["lead"]
        self.row_pitch = m["row_pitch"]
        assert self.row_pitch > self.word(self.in_cols - 1)
        self.plane = self.in_rows * self.row_pitch | 1
        self.weight_row = tiles.weight_row(p, m["co_tile"])
        self.weight_channel = h.kernel * self.weight_row
        self.vec = 2 if p.dtype == torch.float64 else 4
        # Sixteen bytes of shared memory at once: weights of a stage, runs in the epilogue.
        assert self.stage_words % self.vec == 0
        assert self.weight_channel % self.vec == 0
        assert self.run % self.vec or m["run_pitch"] % self.vec == 0
        assert m["channels_last"] or m["run_pitch"] >= self.run
        assert m["quads"] or m["lead"] == 0
        assert m["co_tile"] % m["part"] == 0
        assert m["split"] == 1 or (m["slots"] == 1 and self.units % 32 == 0)
        assert m["threads"] >= m["split"] * m["slots"] * self.units

    def __call__(self, x: Array, weight: Array, bias: Array | None) -> Array:
        d, h, w = axes(self.p)
        self.x = x.reshape(self.p.batch, -1, d.size, h.size, w.size)
        self.packed = pack(self.p, self.m, weight)
        self.bias = bias
        self.out = np.full((self.p.batch, self.p.out_channels, d.out, h.out, w.out), np.nan)
        tiles_h, tiles_w, blocks = tiles.grid(self.p, self.tile)
        for block in range(blocks):
            self.block(block, tiles_h, tiles_w)
        return self.out.reshape(self.p.output_shape)

    def word(self, c: int) -> int:
        return c // self.m["cells"] * self.pitch + c % self.m["cells"]

    def block(self, at: int, tiles_h: int, tiles_w: int) -> None:
        m, (d, _, _) = self.m, axes(self.p)
        couts, groups = -(-m["cout_g"] // m["co_tile"]), -(-m["groups"] // m["slots"])
        at, tile_w = divmod(at, tiles_w)
        at, tile_h = divmod(at, tiles_h)
        at, self.cout_block = divmod(at, couts)
        at, group_block = divmod(at, groups)
        self.image, self.od = divmod(at, d.out)
        self.group = group_block * m["slots"]
        self.cell_h, self.cell_w = tile_h * m["block_h"], tile_w * m["block_x"] * m["cells"]
        self.sums = np.zeros((m["split"], m["slots"], self.rows, m["phases_h"], m["block_x"], m["co_tile"], self.run))
        for kd in range(d.kernel):
            reach = self.od + d.padding - kd * d.dilation
            if reach < 0 or reach % d.stride or reach // d.stride >= d.size:
                continue
            for first in range(0, m["cin_g"], m["chunk"]):
                self.multiply(self.load(kd, reach // d.stride, first), min(m["chunk"], m["cin_g"] - first))
        self.store()

    def load(self, kd: int, depth: int, first: int) -> Array:
        m, (d, h, w) = self.m, axes(self.p)
        stage = np.full(self.stage_words, np.nan)
        channels = min(m["chunk"], m["cin_g"] - first)
        for slot in range(m["slots"]):
            g = min(self.group + slot, m["groups"] - 1)
            blocks = -(-m["cout_g"] // m["co_tile"])
            start = (((g * blocks + self.cout_block) * d.kernel + kd) * m["cin_g"] + first) * self.weight_channel
            to, count = slot * m["chunk"] * self.weight_channel, channels * self.weight_channel
            stage[to : to + count] = self.packed[start : start + count]
        present = (m["groups"] - self.group) * m["cin_g"] if m["slots"] > 1 else channels
        row, col = self.cell_h + h.least, self.cell_w + w.least - m["lead"]
        words = self.weight_words + np.array([self.word(c) for c in range(self.in_cols)])
        iw = col + np.arange(self.in_cols)
        inside = (iw >= 0) & (iw < self.x.shape[4])
        if m["quads"] and m["channels_last"]:  # four channels are one load: aligned, all present or none
            assert (self.group * m["cin_g"] + first) % 4 == 0
            assert m["groups"] * m["cin_g"] % 4 == 0
            assert present % 4 == 0
            assert m["slots"] * m["chunk"] % 4 == 0
        elif m["quads"] and self.x.shape[4] % 4 == 0:  # four columns
            assert col % 4 == 0
            inside = np.repeat(inside[::4], 4)[: self.in_cols]
        for channel, r in product(range(m["slots"] * m["chunk"]), range(self.in_rows)):
            line = np.zeros(self.in_cols)
            if channel < present and 0 <= row + r < self.x.shape[3]:
                source = self.x[self.image, self.group * m["cin_g"] + first + channel, depth, row + r]
                line[inside] = source[iw[inside]]
            stage[words + channel * self.plane + r * self.row_pitch] = line
        return stage

    def multiply(self, stage: Array, channels: int) -> None:
        m, (_, h, _) = self.m, axes(self.p)
        for my_row in range(self.rows):
            if m["phases_h"] > 1:
                for kh in range(h.kernel):
                    t = (kh * h.dilation - h.padding) % h.stride
                    r, left = divmod(t + h.padding - kh * h.dilation - h.least * h.stride, h.stride)
                    assert left == 0 and 0 <= r <= h.span
                    self.multiply_row(stage, channels, my_row, t, kh, my_row + r)
            else:
                th, jh = divmod(my_row, m["block_h"])
                hits = [
                    k for k in range(h.kernel) if k < m["step_kh"] and (th + h.padding - k * h.dilation) % h.stride == 0
                ]
                first_kh = hits[-1] if hits else h.kernel
                r = jh + (th + h.padding - first_kh * h.dilation - h.least * h.stride) // h.stride
                for step, kh in enumerate(range(first_kh, h.kernel, m["step_kh"])):
                    self.multiply_row(stage, channels, my_row, 0, kh, r - step * m["step_row"])

    def multiply_row(self, stage: Array, channels: int, my_row: int, t: int, kh: int, r: int) -> None:
        m, (_, _, w) = self.m, axes(self.p)
        tx = np.arange(m["block_x"]) * self.pitch
        for slot, ci in product(range(m["slots"]), range(channels)):
            line = self.weight_words + (slot * m["chunk"] + ci) * self.plane + r * self.row_pitch
            weights = (slot * m["chunk"] + ci) * self.weight_channel + kh * self.weight_row
            for kw in range(w.kernel):
                u = (kw * w.dilation - w.padding) % w.stride
                shift, left = divmod(u + w.padding - kw * w.dilation - w.least * w.stride, w.stride)
                assert left == 0 and 0 <= shift <= w.span
                for cell, c in product(range(m["cells"]), range(m["co_tile"])):
                    window = stage[line + tx + self.word(cell + shift + m["lead"])]
                    product_ = stage[weights + kw * m["co_tile"] + c] * window
                    self.sums[ci % m["split"], slot, my_row, t, :, c, cell * w.stride + u] += product_

    def store(self) -> None:
        m, (_, h, w) = self.m, axes(self.p)
        couts = min(m["co_tile"], m["cout_g"] - self.cout_block * m["co_tile"])
        sums = self.sums.sum(0)
        places = product(range(m["slots"]), range(self.rows), range(m["phases_h"]), range(m["block_x"]), range(couts))
        for slot, my_row, t, tx, c in places:
            th, jh = divmod(my_row, m["block_h"]) if m["phases_h"] == 1 else (t, my_row)
            g, oh = self.group + slot, (self.cell_h + jh) * h.stride + th
            ow = (self.cell_w + tx * m["cells"]) * w.stride
            count = min(self.run, w.out - ow)
            if g >= m["groups"] or oh >= h.out or count <= 0:
                continue
            channel = g * m["cout_g"] + self.cout_block * m["co_tile"] + c
            to = self.out[self.image, channel, self.od, oh, ow : ow + count]
            assert np.isnan(to).all(), "an output is stored twice"
            if not m["channels_last"]:  # a run starts at a multiple of its vectors
                wide = math.gcd(self.run, w.out, self.vec)
                assert ((self.image * self.p.out_channels + channel) * h.out * w.out + oh * w.out + ow) % wide == 0
            to[:] = sums[slot, my_row, t, tx, c, :count] + (0 if self.bias is None else self.bias[channel])


def interpret_walk(p: Problem, walk: Walk, x: Array, weight: Array, bias: Array | None) -> Array:
    """``direct_walk``, thread by thread."""
    _, h, w = axes(p)
    last, pieces, ring = p.layout == "channels_last", walk.pieces, h.span + 1
    run = walk.cells * w.stride // pieces
    columns = w.kernel // w.stride if pieces > 1 else walk.cells + w.span
    x = x.reshape(p.batch, p.groups, h.size, w.size)
    taps = weight.reshape(p.groups, h.kernel, w.kernel)
    out = np.full((p.batch, p.groups, h.out, w.out), np.nan)
    runs, strips, threads = walks.grid(p, walk)
    wide = walk.channels if last else math.gcd(run & -run, 16 // p.dtype.itemsize)
    assert p.groups % walk.channels == 0
    parts = -(-runs * strips // walks.THREADS)
    for thread in range(threads):
        at, channel = thread, 0
        if last:
            at, block = divmod(at, p.groups // walk.channels)
            channel = block * walk.channels
            at, cell_w = divmod(at, runs)
            image, cell_h = divmod(at, strips)
        else:  # a block has threads of one channel of one image
            image, part = divmod(thread // walks.THREADS, parts)
            cell_h, cell_w = divmod(part * walks.THREADS + thread % walks.THREADS, runs)
            if cell_h >= strips:
                continue
            image, channel = divmod(image, p.groups)
        cell_w, piece = divmod(cell_w, pieces)
        cell_w, cell_h = cell_w * walk.cells, cell_h * walk.strip
        first_col = cell_w + w.least
        if pieces > 1:  # the columns that all outputs of its vector meet
            first_col = cell_w + (piece * run + w.padding) // w.stride - (columns - 1)
        own = slice(channel, channel + walk.channels)
        strip_ = np.zeros((h.size, columns, walk.channels))  # what its columns of the input hold
        for c in range(columns):
            if 0 <= first_col + c < w.size:
                strip_[:, c] = x[image, own, :, first_col + c].T
        window = np.full((ring, columns, walk.channels), np.nan)
        for r in range(h.span):
            row = cell_h + h.least + r
            window[r] = strip_[row] if 0 <= row < h.size else 0
        for step in range(min(walk.strip, h.cells - cell_h)):
            i = step % ring
            row = cell_h + h.least + h.span + step
            window[(i + h.span) % ring] = strip_[row] if 0 <= row < h.size else 0
            sums = np.zeros((h.stride, run, walk.channels))
            if bias is not None:
                sums += bias[own]
            for kh, kw, c in product(range(h.kernel), range(w.kernel), range(walk.cells)):
                t, u = (kh * h.dilation - h.padding) % h.stride, (kw * w.dilation - w.padding) % w.stride
                r = (t + h.padding - kh * h.dilation - h.least * h.stride) // h.stride
                shift = (u + w.padding - kw * w.dilation - w.least * w.stride) // w.stride
                if pieces > 1:
                    first = piece * run + w.padding
                    j, v = divmod(kw - first % w.stride, w.stride)
                    if kw < first % w.stride or v >= run:  # another thread's, or of the next j
                        continue
                    u, shift = v, columns - 1 - j
                sums[t, c * w.stride + u] += taps[own, kh, kw] * window[(i + r) % ring, c + shift]
            for t, v in product(range(h.stride), range(run)):
                oh, ow = (cell_h + step) * h.stride + t, cell_w * w.stride + piece * run + v
                if oh < h.out and ow < w.out:
                    assert np.isnan(out[image, own, oh, ow]).all(), "an output is stored twice"
                    out[image, own, oh, ow] = sums[t, v]
                if not last and w.out % wide == 0 and v % wide == 0 and oh < h.out:
                    # One vector: aligned in memory, and in or out of the row as one.
                    assert (oh * w.out + ow) % wide == 0
                    assert (ow < w.out) == (ow + wide <= w.out)
    return out.reshape(p.output_shape)


def check_interpreted(p: Problem, tile: Tile | Walk, seed: int) -> None:
    x, w, b, _ = operands(p, seed)
    arrays = x.double().numpy(), w.double().numpy(), None if b is None else b.double().numpy()
    out = interpret_walk(p, tile, *arrays) if isinstance(tile, Walk) else Interpreter(p, tile)(*arrays)
    truth = reference.forward(p, x, w, b)
    torch.testing.assert_close(torch.from_numpy(out), truth, rtol=1e-11, atol=1e-11)


@settings(max_examples=150 if EVERY else 50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.randoms(use_true_random=False))
def test_interpreted_tiles_compute_the_layer(p: Problem, rng: random.Random) -> None:
    candidates = list(tiles.tiles(p))
    assert candidates, "small problems all have tiles"
    check_interpreted(p, rng.choice(candidates), rng.randrange(1000))


@settings(max_examples=100 if EVERY else 25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.randoms(use_true_random=False))
def test_interpreted_tiles_of_halves_compute_the_layer(p: Problem, rng: random.Random) -> None:
    """Sizes that are multiples of four, where halves travel four at a time."""
    size = tuple(-(-n // 4) * 4 for n in p.size)
    p = p.with_(dtype=torch.bfloat16, precision="bf16", size=size)
    check_interpreted(p, rng.choice(list(tiles.tiles(p))), rng.randrange(1000))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.randoms(use_true_random=False))
def test_interpreted_walks_compute_the_layer(p: Problem, rng: random.Random) -> None:
    channels = rng.choice((1, 2, 3, 4, 8))
    p = p.with_(in_channels=channels, out_channels=channels, groups=channels)
    candidates = list(walks.walks(p))
    if candidates:
        check_interpreted(p, rng.choice(candidates), rng.randrange(1000))


@pytest.mark.parametrize("kernel, stride, padding", [((32, 32), (1, 32), (0, 0)), ((15, 64), (1, 32), (7, 16))])
def test_wide_runs_beside_tall_windows_are_no_walks(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    """Both in registers spilled 56 and 16 bytes."""
    p = Problem.make(1, 4, 4, (40, 8), kernel, stride, padding, groups=4)
    found = list(walks.walks(p))
    assert found and all(walk.pieces > 1 for walk in found)
    assert any(walk.pieces == 1 for walk in walks.walks(p.with_(kernel=(4, 32), stride=(1, 16), padding=(0, 0))))


# Upsampling's kernels, by the columns of taps that an output meets, paddings that are vectors, and rows that are none.
IN_PIECES = (
    Problem.make(2, 3, 3, (5, 9), 16, 8, 4, groups=3, bias=True),
    Problem.make(1, 2, 2, (3, 7), (5, 24), (2, 8), (1, 8), (1, 3), groups=2),
    Problem.make(1, 2, 2, (4, 5), (4, 12), (3, 12), (2, 4), (2, 1), (2, 1), groups=2, bias=True),
    Problem.make(1, 2, 2, (2, 6), 32, 16, 8, groups=2, dtype=torch.bfloat16, precision="bf16", bias=True),
    Problem.make(2, 3, 3, (37,), 16, 16, 0, 5, groups=3, dtype=torch.float16, precision="fp16"),
)


def in_pieces(p: Problem) -> list[Walk]:
    return [walk for walk in walks.walks(p) if walk.pieces > 1]


@pytest.mark.parametrize("p", IN_PIECES, ids=str)
def test_cells_in_pieces_compute_the_layer(p: Problem) -> None:
    found = in_pieces(p)
    assert found and all(walk.cells == 1 for walk in found)
    for walk in found:
        check_interpreted(p, walk, walk.strip)


def test_cells_are_in_pieces_where_the_taps_of_vectors_are_neighbours() -> None:
    p = IN_PIECES[0]
    assert not in_pieces(p.with_(padding=(4, 3))), "outputs of a vector that meet other columns"
    assert not in_pieces(p.with_(kernel=(16, 15))), "outputs of a vector with fewer taps"
    assert not in_pieces(p.with_(dilation=(1, 2))), "taps that are not neighbours"
    assert not in_pieces(p.with_(kernel=(16, 8), stride=(8, 4))), "a cell that is one vector"
    assert not in_pieces(p.with_(layout="channels_last"))
    assert not in_pieces(p.with_(dtype=torch.float64, precision="fp64"))
    assert in_pieces(p.with_(padding=(3, 0), kernel=(15, 8), dilation=(2, 1)))


@pytest.mark.parametrize(
    "kernel, stride, padding", [((128, 128), (16, 64), (56, 32)), ((3, 4096), (1, 4096), (1, 0)), (16384, 16384, 0)]
)
def test_taps_of_walks_fit_in_shared_memory(
    kernel: int | tuple[int, int], stride: int | tuple[int, int], padding: int | tuple[int, int]
) -> None:
    """Pieces make a cell as wide as one likes: what a block keeps of its taps must not grow with it."""
    p = Problem.make(1, 4, 4, (8, 8) if isinstance(kernel, tuple) else (8,), kernel, stride, padding, groups=4)
    assert not list(walks.walks(p))
    assert isinstance(direct.choose(p, H200), Choice)


def test_walks_are_found_for_depthwise_layers_alone() -> None:
    p = Problem.make(1, 8, 8, (9, 9), 4, 2, 1, groups=8)
    assert list(walks.walks(p))
    assert not list(walks.walks(p.with_(groups=4)))
    assert not list(walks.walks(p.with_(out_channels=16)))
    assert not list(walks.walks(Problem.make(1, 8, 8, (4, 4, 4), 4, 2, 1, groups=8)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_interpreted_choice_computes_the_layer(p: Problem) -> None:
    choice = direct.choose(p, H200)
    assert isinstance(choice, Choice)
    assert choice.tile is not None
    check_interpreted(p, choice.tile, 1)


# --- what is chosen --------------------------------------------------------------------------------------------------


def variants(p: Problem) -> Iterator[Problem]:
    """A layer in every dtype and layout."""
    for dtype, layout in product(DTYPES, ("nchw", "channels_last")):
        if p.rank > 1 or layout == "nchw":
            yield p.with_(dtype=dtype, precision=PRECISIONS[dtype][0], layout=layout)


SUITE = tuple({c.problem: c for name in ("kernelbench", "models", "cpu") for c in SUITES[name]}.values())


@settings(max_examples=100, deadline=None)
@given(problems())
def test_every_forward_has_a_choice(p: Problem) -> None:
    for gpu in (H200, A100, RTX3090):
        choice = direct.choose(p, gpu)
        assert isinstance(choice, Choice)
        assert choice.family == "direct"
        assert 0 < choice.seconds < 1
        if isinstance(choice.tile, Tile):
            assert tiles.shared_words(p, choice.constants())[2] * 8 <= 2 * gpu.shared_bytes


@pytest.mark.parametrize(
    ("turn", "case"), [pytest.param(i, case, id=case.name) for i, case in by_turns(enumerate(SUITE), 2)]
)
def test_estimates_are_never_below_the_roof(turn: int, case: Case) -> None:
    """Half of a layer's versions: every dtype, where there are two layouts in each of them by turns."""
    found = list(variants(case.problem))
    for p in [p for i, p in enumerate(found) if (i // 2 + i + turn) % 2 == 0] if case.problem.rank > 1 else found:
        choice = direct.choose(p, H200)
        assert isinstance(choice, Choice)
        lanes = 64 if p.dtype == torch.float64 else 128
        assert choice.seconds >= p.roof_seconds(2 * lanes * H200.multiprocessors * H200.clock, H200.bandwidth)


def test_geometry_has_no_strip_size() -> None:
    small = Problem.make(2, 4, 4, (40, 40), 4, 2, 1)
    large = small.with_(size=(123, 77), batch=5)
    tile = Tile(4, 2, 8, 4, 1, 4)
    assert tiles.constants(small, tile) == tiles.constants(large, tile)


@pytest.mark.parametrize(
    "p",
    [
        Problem.make(1, 2, 3, (5,), 3, 200),
        Problem.make(1, 2, 2, (3, 4), 3, 1, 0, 0, 500),
        Problem.make(1, 1, 1, (4, 4), (2, 300), 2, dtype=torch.float64),
        Problem.make(1, 1, 2, (2, 2), 2, (600, 1)),
    ],
    ids=str,
)
def test_geometry_without_a_tile_gets_the_general_kernel(p: Problem) -> None:
    choice = direct.choose(p, H200)
    assert isinstance(choice, Choice)
    assert choice.tile is None
    assert choice.entry == "direct_any"


def test_refusals_are_sentences() -> None:
    p = Problem.make(1, 2, 2, (4, 4), 3)
    assert (
        direct.choose(p.with_(pass_="step"), H200)
        == "the direct kernels compute forwards and gradients for the input, not step"
    )
    assert direct.choose(p.with_(batch=0), H200) == "an empty input has no work"


# --- what is compiled ------------------------------------------------------------------------------------------------

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))


def check_compiled(choice: Choice, gpu: Gpu) -> None:
    m, static = choice.constants(), 0
    if isinstance(choice.tile, Walk) and not m["channels_last"]:  # a channel's taps, and the outputs that a warp turns
        vec = 16 // max(4, choice.problem.dtype.itemsize)
        static = 16 * m["kernel_h"] * -(-m["kernel_w"] // vec)
        static += m["threads"] * m["cells"] * m["stride_w"] // m["pieces"] * choice.problem.dtype.itemsize
    for unit in choice.sources():
        found = elf.inspect(jit.cubin(unit.source, gpu.arch, unit.label))
        assert set(found) == set(unit.entries)
        for entry, (registers, local, shared) in found.items():
            assert 0 < registers <= 255
            assert local == 0, f"{entry} of {choice.problem} spills {local} bytes for {choice.tile}"
            assert shared == (static if entry == "direct_walk_nchw" else 0)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("index,case", list(enumerate(SUITE)), ids=lambda v: getattr(v, "name", ""))
def test_chosen_kernels_compile_without_spills(index: int, case: Case) -> None:
    """A sample: each layer on one GPU in one of its dtypes and layouts (or all; 1-D ones, which are few, in two)."""
    every = list(variants(case.problem))
    some = (index, index + len(every) // 2 + 1) if case.problem.rank == 1 else (index,)
    for k in range(len(every)) if EVERY else some:
        gpu = (H200, A100, RTX5090)[k % 3]
        choice = direct.choose(every[k % len(every)], gpu)
        assert isinstance(choice, Choice)
        check_compiled(choice, gpu)


@needs_nvrtc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_general_kernel_compiles(dtype: torch.dtype) -> None:
    p = Problem.make(1, 2, 2, (3, 4), 3, 1, 0, 0, 500, dtype=dtype)
    for gpu in (H200, A100, RTX5090):
        choice = direct.choose(p, gpu)
        assert isinstance(choice, Choice)
        check_compiled(choice, gpu)


# --- on a GPU --------------------------------------------------------------------------------------------------------


def launch(choice: Choice, x: Tensor, w: Tensor, b: Tensor | None, offset: int = 0) -> Tensor:
    """Runs a choice on the current device into a poisoned output that starts ``offset`` elements off alignment."""
    p = choice.problem
    fmt = cpu.memory_format(p.layout, p.rank)

    def place(t: Tensor) -> Tensor:
        buffer = torch.full((t.numel() + offset + 64,), math.nan, dtype=t.dtype, device="cuda")
        like = torch.empty(t.shape, dtype=t.dtype).contiguous(memory_format=fmt)
        return buffer[offset:].as_strided(t.shape, like.stride(), offset)

    source, out = place(x), place(torch.empty(p.output_shape, dtype=p.dtype))
    source.copy_(x)
    prepared = choice.prepare(torch.cuda.current_device())
    packed = prepared.pack(w.cuda())
    prepared.run(source, packed, None if b is None else b.cuda(), out)
    tail = out.new_empty(0).set_(out.untyped_storage())[offset + out.numel() :]
    assert tail.isnan().all(), "stores beyond the output"
    return out


@pytest.mark.gpu
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.randoms(use_true_random=False))
def test_random_problems_on_the_gpu(p: Problem, rng: random.Random) -> None:
    from upconv.cuda.gpu import gpu

    tile = rng.choice([None, *tiles.tiles(p), *walks.walks(p)])
    choice = Choice("direct", 1.0, "drawn by a test", "", p, tile)
    if rng.random() < 0.5 or (
        isinstance(tile, Tile) and tiles.shared_words(p, choice.constants())[2] * 8 > gpu(0).shared_bytes
    ):
        chosen = direct.choose(p, gpu(0))
        assert isinstance(chosen, Choice)
        choice = chosen
    x, w, b, _ = operands(p, rng.randrange(1000))
    out = launch(choice, x, w, b, rng.choice((0, 0, 1)))
    assert forward_excess(p, out.cpu(), x, w, b) <= 1, (p, choice.tile)
    assert torch.equal(out, launch(choice, x, w, b)), "not bit-equal from run to run"


GPU_CASES = (
    Problem.make(2, 24, 24, (13, 28), 4, 2, 1, groups=24, bias=True),
    Problem.make(2, 6, 6, (7, 9), (3, 5), (3, 1), (0, 2), 0, (1, 2), groups=6, bias=True),
    Problem.make(3, 16, 16, (33, 47), 4, 2, 1, groups=16, bias=True),
    Problem.make(2, 5, 5, (19, 64), 16, 8, 4, groups=5),
    Problem.make(2, 21, 1, (37, 41), 9, 3, 4, 2, bias=True),
    Problem.make(4, 24, 3, (32, 32), 4, 2, 1, bias=True),
    Problem.make(2, 16, 32, (21, 100), (3, 5), (2, 3), (1, 2), 0, (2, 1), 2),
    Problem.make(2, 16, 16, (6, 12, 24), (3, 5, 7), 2, (1, 2, 3), 1, groups=2, bias=True),
    Problem.make(2, 3, 7, (1001,), 7, 3, 2, 1, bias=True),
    Problem.make(2, 32, 40, (16, 18), 3, 1, 1),
    Problem.make(1, 2, 3, (5,), 3, 200, bias=True),
    Problem.make(1, 2, 2, (3, 4), 3, 1, 0, 0, 500),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_typical_layers_on_the_gpu(case: Problem) -> None:
    from upconv.cuda.gpu import gpu

    for p in variants(case):
        choice = direct.choose(p, gpu(0))
        assert isinstance(choice, Choice)
        x, w, b, _ = operands(p)
        out = launch(choice, x, w, b)
        assert forward_excess(p, out.cpu(), x, w, b) <= 1, (p, choice.tile)
        again = launch(choice, x, w, b, 1)  # unaligned: other loads and stores, the same sums
        assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize("p", IN_PIECES, ids=str)
@pytest.mark.parametrize("offset", (0, 1))
def test_cells_in_pieces_on_the_gpu(p: Problem, offset: int) -> None:
    """The sums of one thread a cell, to the last bit."""
    x, w, b, _ = operands(p)
    (one, *_) = (walk for walk in walks.walks(p) if walk.pieces == 1)
    of_one = launch(Choice("direct", 1.0, "a test's", "", p, one), x, w, b, offset)
    for walk in in_pieces(p)[:3]:
        out = launch(Choice("direct", 1.0, "a test's", "", p, walk), x, w, b, offset)
        assert forward_excess(p, out.cpu(), x, w, b) <= 1, walk
        assert torch.equal(out, of_one), walk


@needs_nvrtc
@pytest.mark.parametrize("kernel, stride", [(16, 8), ((3, 128), (1, 8)), ((15, 64), (1, 32)), (32, 16)], ids=str)
def test_cells_in_pieces_compile_without_spills(kernel: int | tuple[int, int], stride: int | tuple[int, int]) -> None:
    p = Problem.make(1, 4, 4, (40, 40), kernel, stride, groups=4)
    check_compiled(Choice("direct", 1.0, "a test's", "", p, in_pieces(p)[0]), H200)


@pytest.mark.gpu
def test_weights_of_any_strides_are_packed_alike() -> None:
    from upconv.cuda.gpu import gpu

    p = Problem.make(1, 6, 10, (9, 9), 3, 2, groups=2)
    choice = direct.choose(p, gpu(0))
    assert isinstance(choice, Choice)
    prepared = choice.prepare(0)
    w = torch.randn(p.weight_shape, device="cuda")
    strided = torch.empty(tuple(reversed(p.weight_shape)), device="cuda").permute(3, 2, 1, 0).copy_(w)
    expected = torch.from_numpy(pack(p, choice.constants(), w.double().cpu().numpy())).float()
    for weight in (w, strided, w.contiguous(memory_format=torch.channels_last)):
        assert torch.equal(prepared.pack(weight).cpu(), expected)
