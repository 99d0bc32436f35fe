"""An exported file's Python: for each pass a function that computes what its kernel is launched with."""

from __future__ import annotations

import math
from textwrap import dedent

from upconv.cuda.direct import costs, direct, tiles
from upconv.cuda.gemm import gather
from upconv.cuda.gpu import Gpu
from upconv.cuda.wgrad import wgrad
from upconv.export.passes import Kernel, whole_rows

_SUM_BYTES = 96 << 20  # of the slices of sums of a gradient for the weight, at most

_BODIES = {
    "gather": '''
        """(blocks, sizes): persistent blocks, which take tile after tile of {tile} positions (NxDxHxW)."""
        counts = [ceil(n + lead, step) for n, lead, step in zip(result, {leads}, {steps})]
        tiles = {images} * math.prod(counts){groups}
        return {blocks}, (batch, *source, *result, *counts, tiles)
        ''',
    "direct": '''
        """(blocks, sizes): a block takes a tile, and what it needs of the source."""
        rows, columns = ceil(result[1], {rows}), ceil(result[2], {columns})  # of blocks
        blocks = batch * result[0] * rows * columns{groups}
        return blocks, (batch, *source, *result, rows, columns, {whole})
        ''',
    "wgrad": '''
        """(blocks, slices of sums, sizes): blocks share the chunks of {tile} pixels, their sums are added after.

        The chunks are cut into {how}, and no more than 96 MB of sums are made.
        """
        counts = [ceil(n, tile) for n, tile in zip((batch, source[0], {rows}, source[2]), {tiles})]
        chunks = math.prod(counts)
        each = {each}  # of a share
        shares = ceil(chunks, each)
        return {blocks}, {slices}, (batch, *source, *result, *counts[1:], chunks, each)
        ''',
    "direct_weight": '''
        """(blocks, slices of sums, sizes): blocks share the tiles of {h} x {w} positions, their sums are added after.

        The tiles are cut into as many shares as fill the processors about twice.
        """
        rows, columns = ceil(source[1], {h}), ceil(source[2], {w})
        tiles = batch * source[0] * rows * columns
        each = ceil(tiles, max(1, min(tiles, {most}, round({fill}))))
        shares = ceil(tiles, each)
        return {blocks}, shares, (batch, *result, *source, rows, columns, {whole}, each)
        ''',
}


def launch(k: Kernel, gpu: Gpu) -> str:
    """The function; ``source`` and ``result`` are (depth, height, width), for the gradient for the weight those of the
    input and of the output."""
    kind, values = _values(k, gpu)
    body = dedent(_BODIES[kind].format(**values)).strip()
    lines = "\n".join(f"    {line}" if line else "" for line in body.splitlines())
    return f"def {k.name}_launch(batch, source, result, processors):\n{lines}\n"


def _values(k: Kernel, gpu: Gpu) -> tuple[str, dict[str, object]]:
    c = k.choice
    if isinstance(c, gather.Choice):
        return "gather", _gather(c)
    if isinstance(c, wgrad.Choice):
        return "wgrad", _wgrad(c, gpu)
    return "direct_weight" if k.pass_ == "grad-weight" else "direct", _direct(k, c, gpu)


def _times(n: int) -> str:
    return f" * {n}" if n > 1 else ""


def _ceil(of: str, by: int) -> str:
    return f"ceil({of}, {by})" if by > 1 else of


def _gather(c: gather.Choice) -> dict[str, object]:
    t = c.tiling
    strides, leads = ((1, 1, 1), (0, 0, 0)) if t.shuffle is None else (t.shuffle.strides, t.shuffle.leads)
    steps = tuple(n * s * tile for n, s, tile in zip(t.out_steps, strides, t.tile[1:]))
    blocks = "min(tiles, processors)"
    if t.resident and t.m_groups > 1:  # a block keeps the weights of one group of rows, so all have as many blocks
        blocks = f"max(1, {blocks} // {t.m_groups}) * {t.m_groups}"
    tile = "x".join(map(str, t.tile))
    images = _ceil("batch", t.tile[0])
    return {
        "tile": tile,
        "leads": leads,
        "steps": steps,
        "images": images,
        "groups": _times(t.m_groups),
        "blocks": blocks,
    }


def _wgrad(c: wgrad.Choice, gpu: Gpu) -> dict[str, object]:
    t = c.tiling
    most = max(1, _SUM_BYTES // (4 * math.prod(c.problem.weight_shape) * t.k_slices))
    waves = _waves(c, most, gpu)
    share = f"processors{_times(waves)}" + (f" // {t.tiles}" if t.tiles > 1 else "")
    return {
        "tile": "x".join(map(str, t.tile)), "tiles": t.tile,
        "how": f"as many shares as make {waves} wave{'s' * (waves > 1)} of blocks" if waves else "one share",
        "rows": f"source[1] + {t.halo}" if t.halo else "source[1]",
        "each": f"ceil(chunks, max(1, min(chunks, {most}, {share})))" if waves else "chunks",
        "blocks": f"shares{_times(t.tiles)}", "slices": f"shares{_times(t.k_slices)}",
    }  # fmt: skip


def _waves(c: wgrad.Choice, most: int, gpu: Gpu) -> int:
    """Waves of blocks that the plan has; 0 for one share of the chunks, whatever there is to fill."""
    chunks = math.prod(c.tiling.counts(c.problem))
    for waves in (1, 2, 3, 4):
        each = -(-chunks // max(1, min(chunks, most, gpu.multiprocessors * waves // c.tiling.tiles)))
        if -(-chunks // each) == c.splits:
            return waves
    return 0


def _direct(k: Kernel, c: direct.Choice, gpu: Gpu) -> dict[str, object]:
    t, unit = c.tile, whole_rows(c)
    whole = f"int({'result' if t.weight else 'source'}[2] % {unit} == 0)" if unit > 1 else str(unit)
    if not t.weight:
        _, h, w = t.axes
        return {
            "rows": t.h * h.out_step, "columns": t.w * w.out_step,
            "groups": _times(t.channel_blocks), "whole": whole,
        }  # fmt: skip
    blocks = tiles.weight_blocks(t)
    return {
        "h": t.h, "w": t.w, "whole": whole, "blocks": f"shares{_times(blocks)}",
        "fill": f"{2 * costs.resident(t, gpu)} * processors / {blocks}", "most": costs.most_ranges(c.problem, t),
    }  # fmt: skip
