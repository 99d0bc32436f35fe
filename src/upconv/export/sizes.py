"""What a pass is launched with at every size of a call, as expressions that are Python and C++ alike.

They name ``batch``, ``processors``, and the depth, height and width of what is read and written: ``source_d``,
``result_w`` and so on; of the gradient for the weight the source is the input and the result the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from upconv.cuda.direct import costs, direct, tiles
from upconv.cuda.gemm import gather, joined
from upconv.cuda.gpu import Gpu
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.phases import Phases
from upconv.cuda.pixels.sweep import Sweep
from upconv.cuda.pixels.tile import CONSUMERS
from upconv.cuda.wgrad import wgrad
from upconv.cuda.wgrad.wgrad_costs import Model
from upconv.export.passes import Kernel, whole_rows

_SOURCE = ("source_d", "source_h", "source_w")
_RESULT = ("result_d", "result_h", "result_w")
_TILES = ("tiles_d", "tiles_h", "tiles_w")


@dataclass(frozen=True)
class Sizes:
    """Expressions; each of ``steps`` may name those before it."""

    what: str
    """In a sentence."""
    steps: dict[str, str]
    blocks: str
    numbers: tuple[str, ...]
    """The integers that the kernel is given."""
    slices: str | None = None
    """Of sums that a second kernel adds."""

    @property
    def counts(self) -> dict[str, str]:
        """All that have names."""
        return {**self.steps, "blocks": self.blocks, **({"slices": self.slices} if self.slices else {})}


def of(k: Kernel, gpu: Gpu) -> Sizes:
    """A kernel's."""
    c = k.choice
    if isinstance(c, gather.Choice):
        return _gather(c)
    if isinstance(c, wgrad.Choice):
        return _wgrad(c, gpu)
    if isinstance(c, joined.Choice):
        return _joined(c.tile)
    if isinstance(c, TileChoice):
        return _sweep(c.tile) if isinstance(c.tile, Sweep) else _phases(c.tile)
    return _direct_weight(c, gpu) if k.pass_ == "grad-weight" else _direct(c)


def python(found: Sequence[Kernel], gpu: Gpu) -> str:
    """The functions of a file that compute them, of (depth, height, width) of source and result."""
    bodies: dict[str, str] = {}
    for k in found:
        bodies[k.name] = _body(k, gpu)
    texts = []
    for name, body in bodies.items():
        first = next(one for one in bodies if bodies[one] == body)
        head = f"def {name}_launch(batch, source, result, processors):\n"
        texts.append(f"{head}{body}\n" if first == name else f"{name}_launch = {first}_launch  # tiles are alike\n")
    return "\n\n".join(texts)


def _body(k: Kernel, gpu: Gpu) -> str:
    s = of(k, gpu)
    numbers = ", ".join(s.numbers).replace(", ".join(_SOURCE), "*source").replace(", ".join(_RESULT), "*result")
    lines = f'"""({"blocks, slices of sums" if s.slices else "blocks"}, sizes): {s.what}"""'.split("\n")
    lines += [f"{name} = {text}" for name, text in s.steps.items()]
    lines.append(f"return {', '.join(filter(None, (s.blocks, s.slices)))}, ({numbers})")
    body = "\n".join(f"    {line}" for line in lines)
    for tensor, names in (("source", _SOURCE), ("result", _RESULT)):
        for axis, name in enumerate(names):
            body = body.replace(name, f"{tensor}[{axis}]")
    return body.replace("isqrt(", "math.isqrt(")


def c(k: Kernel, gpu: Gpu) -> list[str]:
    """Statements of C++ that compute them: ``blocks``, ``slices`` and ``sizes``."""
    s = of(k, gpu)
    lines = [f"const int {name} = {text.replace(' // ', ' / ')};" for name, text in s.counts.items()]
    return [*lines, f"const int sizes[] = {{{', '.join(s.numbers)}}};"]


def _product(*factors: object) -> str:
    """Without factors of 1."""
    return " * ".join(str(one) for one in factors if one != 1) or "1"


def _ceil(text: str, by: int) -> str:
    return f"ceil({text}, {by})" if by > 1 else text


def _gather(c: gather.Choice) -> Sizes:
    t = c.tiling
    strides = (1, 1, 1) if t.shuffle is None else t.shuffle.strides
    each = (n * s * tile for n, s, tile in zip(t.out_steps, strides, t.tile[1:]))
    tiles = {name: _ceil(result, step) for name, result, step in zip(_TILES, _RESULT, each)}
    blocks = "min(tiles, processors)"
    if t.resident and t.m_groups > 1:  # a block keeps the weights of one group of rows, so all have as many blocks
        blocks = f"max(1, {blocks} // {t.m_groups}) * {t.m_groups}"
    return Sizes(
        f"persistent blocks, which take tile after tile of {'x'.join(map(str, t.tile))} positions (NxDxHxW).",
        {**tiles, "tiles": _product(_ceil("batch", t.tile[0]), *_TILES, t.m_groups)},
        blocks,
        ("batch", *_SOURCE, *_RESULT, *_TILES, "tiles"),
    )


def _sweep(t: Sweep) -> Sizes:
    slots = t.c.slots
    rows, columns = t.shape
    more = f" + {slots - 1}" if slots > 1 else ""
    return Sizes(
        f"persistent blocks, which take tiles of {rows} x {columns} positions slice by slice along the depth.",
        {
            "rows": _ceil("result_h", rows),
            "columns": _ceil("result_w", columns),
            "parts": f"segments(batch * rows * columns, result_d, {slots}, processors)",
            "walks": "batch * parts * rows * columns",
        },
        "min(walks, processors)",
        ("batch", *_SOURCE, *_RESULT, "parts", "rows", "columns", f"walks * (ceil(result_d, parts){more})"),
    )


def _phases(t: Phases) -> Sizes:
    d, h, w = t.strides
    return Sizes(
        f"persistent blocks, whose two consumers take tile after tile of {t.tile_w} places of a row.",
        {
            "tiles_d": _ceil("result_d", d),
            "tiles_h": _ceil("result_h", h),
            "tiles_w": _ceil("result_w", w * t.tile_w),
            "tiles": "batch * tiles_d * tiles_h * tiles_w",
        },
        f"min(ceil(tiles, {CONSUMERS}), processors)",
        (*_RESULT, *_TILES, "tiles"),
    )


def _joined(t: joined.Tile) -> Sizes:
    rows, columns = t.reach
    return Sizes(
        f"persistent blocks, which take tile after tile of {t.places} neighbouring places of a slice.",
        {
            "plane": "result_h * result_w",
            "tiles_of_slice": _ceil("plane", t.places),
            "tiles": _product("batch", "result_d", "tiles_of_slice", t.c.blocks),
            "rows": f"{rows + 2} + {columns + t.places - 2} // result_w",
            "columns": f"{_ceil('source_w', t.columns(1))} * {t.columns(1)}",
        },
        "min(tiles, processors)",
        ("source_d", "result_d", "result_w", "plane", "tiles_of_slice", "tiles", "rows", "columns"),
    )


def _wgrad(c: wgrad.Choice, gpu: Gpu) -> Sizes:
    t = c.tiling
    waves = _waves(c, gpu)
    rows = f"source_h + {t.halo}" if t.halo else "source_h"
    tiles = {name: _ceil(n, by) for name, n, by in zip(_TILES, ("source_d", rows, "source_w"), t.tile[1:])}
    shares = _product("processors", waves) + (f" // {t.tiles}" if t.tiles > 1 else "")
    shares = f"max(1, {shares})" if t.tiles > 1 else shares
    cheap = round(Model(c.problem, gpu, general=True).shares_of_chunk(t)) or 1
    how = f"{waves} wave{'s' * (waves > 1)} of blocks share" if waves else "one block has"
    more = f"\nFew chunks have fewer shares: the sums of {cheap} are added in a chunk's time." if waves else ""
    return Sizes(
        f"{how} the chunks of {'x'.join(map(str, t.tile))} pixels.{more}",
        {
            **tiles,
            "chunks": _product(_ceil("batch", t.tile[0]), *_TILES),
            "each": f"max(ceil(chunks, {shares}), isqrt(chunks // {cheap}))" if waves else "chunks",
            "shares": "ceil(chunks, each)",
        },
        _product("shares", t.tiles),
        ("batch", *_SOURCE, *_RESULT, *_TILES, "chunks", "each"),
        _product("shares", t.k_slices),
    )


def _waves(c: wgrad.Choice, gpu: Gpu) -> int:
    """Waves of blocks that the plan has; 0 for one share of the chunks, whatever there is to fill."""
    chunks = math.prod(c.tiling.counts(c.problem))
    for waves in (1, 2, 3, 4):
        each = -(-chunks // max(1, min(chunks, gpu.multiprocessors * waves // c.tiling.tiles)))
        if -(-chunks // each) == c.splits:
            return waves
    return 0


def _whole(c: direct.Choice, row: str) -> str:
    unit = whole_rows(c)
    return f"int({row} % {unit} == 0)" if unit > 1 else str(unit)


def _direct(c: direct.Choice) -> Sizes:
    t = c.tile
    _, h, w = t.axes
    return Sizes(
        "a block takes a tile, and what it needs of the source.",
        {
            "rows": _ceil("result_h", t.h * h.out_step),
            "columns": _ceil("result_w", t.w * w.out_step),
        },
        _product("batch", "result_d", "rows", "columns", t.channel_blocks),
        ("batch", *_SOURCE, *_RESULT, "rows", "columns", _whole(c, "source_w")),
    )


def _direct_weight(c: direct.Choice, gpu: Gpu) -> Sizes:
    t = c.tile
    blocks, filled = tiles.weight_blocks(t), 2 * costs.resident(t, gpu)
    share = f"rounded({filled} * processors, {blocks})"
    return Sizes(
        f"blocks that fill the processors about twice share tiles of {t.h} x {t.w} positions.",
        {
            "rows": _ceil("source_h", t.h),
            "columns": _ceil("source_w", t.w),
            "tiles": "batch * source_d * rows * columns",
            "each": f"ceil(tiles, max(1, min(min(tiles, {costs.most_ranges(c.problem, t)}), {share})))",
            "shares": "ceil(tiles, each)",
        },
        _product("shares", blocks),
        ("batch", *_RESULT, *_SOURCE, "rows", "columns", _whole(c, "result_w"), "each"),
        "shares",
    )
