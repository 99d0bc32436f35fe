"""An exported file's Python: a class for each kind of kernel, which computes the sizes that a launch is given."""

from __future__ import annotations

import math
from textwrap import dedent

import torch

from upconv.cuda.direct import direct_grad, staged, staged_costs, staged_tiles
from upconv.cuda.direct.cells import axes
from upconv.cuda.direct.walks import Walk
from upconv.cuda.gemm import gather, joined
from upconv.cuda.wgrad import wgrad, wgrad_costs
from upconv.export.variants import Variant, packed_words

CLASSES = {
    "Gather": dedent(
        '''\
        class Gather(NamedTuple):
            """Forward or gradient for the input on tensor cores: persistent blocks that take tile after tile."""

            name: str
            unit: int  # the source's columns must be a multiple of it, so that rows begin at 16 bytes
            tile: tuple[int, int, int, int]  # positions of a tile: images, depth, height, width
            steps: tuple[int, int, int]  # results of a position along depth, height, width
            leads: tuple[int, int, int]  # of the first position, those ahead of the image
            m_groups: int  # sets of output channels and phases, each a tile of its own
            resident: bool  # a block keeps the weights of one set, so that all sets have as many blocks
            words: int  # of the packed weights
            packed: torch.dtype

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                axes = zip(result, self.leads, self.steps, self.tile[1:])
                counts = [ceil(size + lead, step * tile) for size, lead, step, tile in axes]
                tiles = ceil(batch, self.tile[0]) * math.prod(counts) * self.m_groups
                blocks = min(tiles, processors)
                if self.resident:
                    blocks = max(1, blocks // self.m_groups) * self.m_groups
                return blocks, (batch, *source, *result, *counts, tiles)
        '''
    ),
    "Joined": dedent(
        '''\
        class Joined(NamedTuple):
            """Forward or gradient for the input on tensor cores where rows are joined to one: tiles are neighbouring
            results of whatever rows of a slice."""

            name: str
            unit: int  # the source's columns must be a multiple of it, so that rows begin at 16 bytes
            columns: tuple[int, int]  # and as many as the first, at most the second
            places: int  # results of a tile
            blocks: int  # of output channels, each a tile of its own
            words: int  # of the packed weights
            packed: torch.dtype

            def fits(self, source, result):
                """Whether it serves the sizes: a slice's results are pairs, a channel's counted in 32 bits."""
                least, most = self.columns
                pairs = result[1] * result[2] % 2 == 0
                return least <= source[2] <= most and pairs and math.prod(result) < 2**31 - 4096

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                plane = result[1] * result[2]
                places = ceil(plane, self.places)
                tiles = batch * result[0] * places * self.blocks
                return min(tiles, processors), (source[0], result[0], result[2], plane, places, tiles)
        '''
    ),
    "Direct": dedent(
        '''\
        class Direct(NamedTuple):
            """Forward on CUDA cores: a block takes cells, the results between two strides, of one row of depth."""

            name: str
            unit: int
            cells: tuple[int, int]  # of a block along height, width
            stride: tuple[int, int]  # results of a cell along height, width
            channel_blocks: int  # blocks that the output channels of a cell take
            words: int  # of the packed weights
            packed: torch.dtype

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                rows, columns = (ceil(ceil(n, s), c) for n, s, c in zip(result[1:], self.stride, self.cells))
                return batch * result[0] * self.channel_blocks * rows * columns, (*source, *result, rows, columns)
        '''
    ),
    "DirectAny": dedent(
        '''\
        class DirectAny(NamedTuple):
            """Forward on CUDA cores, a thread for each result."""

            name: str
            unit: int
            channels: int  # of the result
            words: int  # of the packed weights
            packed: torch.dtype

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                total = batch * self.channels * math.prod(result)
                return min(ceil(total, 256), 2**20), (*source, *result, total)
        '''
    ),
    "DirectWalk": dedent(
        '''\
        class DirectWalk(NamedTuple):
            """Depthwise forward on CUDA cores: a thread walks down cells, the results between two strides."""

            name: str
            unit: int
            cells: int  # of a thread along width
            strip: int  # and along height
            stride: tuple[int, int]  # results of a cell along height, width
            channels: int
            whole: bool  # a block's threads are of one channel
            words: int  # of the packed weights
            packed: torch.dtype

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                runs = ceil(ceil(result[2], self.stride[1]), self.cells)
                strips = ceil(ceil(result[1], self.stride[0]), self.strip)
                of_channel = ceil(runs * strips, 128) * 128 if self.whole else runs * strips
                threads = batch * self.channels * of_channel
                return ceil(threads, 128), (*source[1:], *result[1:], runs, strips, self.strip, threads)
        '''
    ),
    "DirectGradInput": dedent(
        '''\
        class DirectGradInput(NamedTuple):
            """Gradient for the input on CUDA cores: a thread takes some input channels of a pixel."""

            name: str
            unit: int
            channel_blocks: int  # threads for the channels of a pixel

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                threads = batch * math.prod(result) * self.channel_blocks
                return ceil(threads, 256), (batch, *result, *source, threads)
        '''
    ),
    "GradWeight": dedent(
        '''\
        class GradWeight(NamedTuple):
            """Gradient for the weight on tensor cores: blocks share the pixels; their sums are added after."""

            name: str
            unit: int  # the input's columns must be a multiple of it, so that rows begin at 16 bytes
            unit_out: int  # and the output's
            tile: tuple[int, int, int, int]  # pixels of a chunk: images, depth, height, width
            halo: int  # rows that chunks reach beyond the input
            blocks: int  # for the channels and taps of the weight, with every share of the pixels
            slices: int  # of sums that a block writes
            chunk_seconds: float  # by the planner's model
            block_seconds: float  # beside its chunks

            def launch(self, batch, size, out_size, processors):
                """(blocks, slices of sums, the kernel's sizes); the sizes are (depth, height, width)."""
                depth, height, width = size
                counts = [ceil(n, t) for n, t in zip((batch, depth, height + self.halo, width), self.tile)]
                chunks = math.prod(counts)
                pixels = batch * (IN_CHANNELS * math.prod(size) + OUT_CHANNELS * math.prod(out_size))
                shares = self.shares(chunks, pixels * DTYPE.itemsize / BANDWIDTH, processors)
                sizes = (batch, *size, *out_size, *counts[1:], chunks, ceil(chunks, shares))
                return self.blocks * shares, self.slices * shares, sizes

            def shares(self, chunks, memory, processors):
                """How many shares the pixels are cut in: the model weighs waves of blocks against sums to add."""
                slice_bytes = 4 * WEIGHTS * self.slices
                most = max(1, min(chunks, SUM_BYTES // slice_bytes))
                best = None
                for n in sorted({min(most, max(1, processors * k // self.blocks)) for k in (1, 2, 3, 4)} | {1}):
                    each = ceil(chunks, n)
                    n = ceil(chunks, each)  # without shares that were empty
                    work = ceil(self.blocks * n, processors) * (each * self.chunk_seconds + self.block_seconds)
                    seconds = max(work, memory) + 0.21 * min(work, memory) + 4.2 * n * slice_bytes / BANDWIDTH
                    if best is None or seconds < best[0]:
                        best = seconds, n
                return best[1]
        '''
    ),
    "StagedGradInput": dedent(
        '''\
        class StagedGradInput(NamedTuple):
            """Gradient for the input on CUDA cores: a block takes a tile and what it needs of the output's gradient."""

            name: str
            unit: int
            tile: tuple[int, int]  # positions of a tile: height, width
            whole: int  # output rows of a multiple of so many columns are read in whole units; 0: none are
            channel_blocks: int  # blocks for the channels of a tile

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                counts = [ceil(n, t) for n, t in zip(result[1:], self.tile)]
                blocks = batch * result[0] * math.prod(counts) * self.channel_blocks
                whole = int(self.whole > 0 and source[2] % self.whole == 0)
                return blocks, (batch, *result, *source, *counts, whole)
        '''
    ),
    "StagedGradWeight": dedent(
        '''\
        class StagedGradWeight(NamedTuple):
            """Gradient for the weight on CUDA cores: blocks share the tiles; their sums are added after."""

            name: str
            unit: int
            unit_out: int
            tile: tuple[int, int]  # positions of a tile: height, width
            whole: int  # output rows of a multiple of so many columns are read in whole units; 0: none are
            blocks: int  # for the channels and taps of the weight, with every share of the tiles
            most: int  # shares, for the sake of the memory that their sums take
            resident: int  # blocks that a processor holds

            def launch(self, batch, size, out_size, processors):
                """(blocks, slices of sums, the kernel's sizes); the sizes are (depth, height, width)."""
                counts = [ceil(n, t) for n, t in zip(size[1:], self.tile)]
                tiles = batch * size[0] * math.prod(counts)
                shares = round(2 * processors * self.resident / self.blocks)  # which fill the processors about twice
                shares = max(1, min(tiles, self.most, shares))
                shares = ceil(tiles, ceil(tiles, shares))  # without shares that were empty
                whole = int(self.whole > 0 and out_size[2] % self.whole == 0)
                return self.blocks * shares, shares, (batch, *size, *out_size, *counts, whole, ceil(tiles, shares))
        '''
    ),
}


def record(v: Variant) -> str:
    """A variant as a call of its class in the exported file."""
    c = v.choice
    given: dict[str, object] = {"name": v.name, "unit": v.unit}
    if isinstance(c, gather.Choice):
        t = c.tiling
        strides, leads = ((1, 1, 1), (0, 0, 0)) if t.shuffle is None else (t.shuffle.strides, t.shuffle.leads)
        steps = tuple(n * s for n, s in zip(t.out_steps, strides))
        given |= {"tile": t.tile, "steps": steps, "leads": leads, "m_groups": t.m_groups, "resident": t.resident}
    elif isinstance(c, joined.Choice):
        given |= {"columns": c.tile.source_columns, "places": c.tile.places, "blocks": c.tile.blocks}
    elif isinstance(c, wgrad.Choice):
        w = c.tiling
        seconds = wgrad_costs.chunk_clocks(w) / c.gpu.clock
        given |= {"unit_out": v.unit_out, "tile": w.tile, "halo": w.halo, "blocks": w.tiles, "slices": w.k_slices}
        # Python 3.12 adds floats otherwise than 3.11, in the last digits; a file is to be the same by both.
        given |= {"chunk_seconds": float(f"{seconds:.9g}")}
        given |= {"block_seconds": float(f"{wgrad_costs.block_seconds(c.gpu):.9g}")}
    elif isinstance(c, direct_grad.Choice):
        given |= {"channel_blocks": c.channel_blocks}
    elif isinstance(c, staged.Choice):
        s = c.tile
        if v.pass_ == "grad-input":
            given |= {"tile": (s.h, s.w), "whole": _whole(c), "channel_blocks": s.channel_blocks}
        else:
            given |= {"unit_out": v.unit_out, "tile": (s.h, s.w), "whole": _whole(c)}
            given |= {
                "blocks": staged_tiles.weight_blocks(c.problem, s),
                "most": staged_costs.most_ranges(c.problem, s),
            }
            given |= {"resident": v.resident}
    elif c.tile is None:
        given |= {"channels": c.problem.out_channels}
    else:
        p, (_, h, w_axis) = c.problem, axes(c.problem)
        stride = (h.stride, w_axis.stride)
        if isinstance(c.tile, Walk):
            given |= {"cells": c.tile.cells, "strip": c.tile.strip}
            given |= {"stride": stride, "channels": p.groups, "whole": p.layout != "channels_last"}
        else:
            cells = (c.tile.block_h, c.tile.cells * c.tile.block_x)
            blocks = -(-p.groups // c.tile.slots) * -(-p.out_channels // p.groups // c.tile.co)
            given |= {"cells": cells, "stride": stride, "channel_blocks": blocks}
    if v.pack is not None:
        dtype = "torch.int32" if v.kind in ("Gather", "Joined") else "torch.float32"
        if c.problem.dtype is torch.float64:
            dtype = "torch.float64"
        given |= {"words": packed_words(v), "packed": _Literal(dtype)}
    lines = "".join(f"    {key}={_literal(value)},\n" for key, value in given.items())
    return f"{v.kind}(\n{lines})"


def _whole(c: staged.Choice) -> int:
    """Of which the columns of output rows must be a multiple to be read in whole units; 0 where they never are.

    The file's tensors begin at 16 bytes, so that nothing else decides it.
    """
    p, tile = c.problem, c.tile
    if tile.vector == 1:
        return 0
    if not tile.lanes_are_channels:
        return tile.vector
    return tile.vector // math.gcd(tile.vector, p.groups)


class _Literal(str):
    """Source as it is."""


def _literal(value: object) -> str:
    return value if isinstance(value, _Literal) else repr(value).replace("'", '"')
