"""Tensors of more than 2^31 elements without a GPU: the first and the last blocks of huge launches, on the emulator.

Memory that nobody touches is not there, so tensors of zeros are as long as they like. Only the source's first and last
corner has numbers. `test_large_gpu` runs whole launches.
"""

from __future__ import annotations

import math
import mmap
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import EVERY, needs_gxx
from drawn import FORWARD_LIKE, LAYOUTS, fitting, plain_choice
from emulator import Emulator
from upconv import reference
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.cost import Cost
from upconv.cuda.direct import direct, plain, tiles
from upconv.cuda.gpu import H200
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.family import MODES
from upconv.cuda.wgrad import wgrad, wgrad_search
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.problem import Layout, Pass, Problem

pytestmark = needs_gxx

CORNER = 40  # positions along each axis that have numbers
COMPARED = 16  # elements at a result's ends
PLAIN_SWEEP = 2**20 * 256  # results that the plain kernels' threads have at a time

SAME, DOUBLED = (3, 1, 1), (4, 2, 1)  # kernel, stride, padding

# batch, channels in and out, groups, size, and the geometry
LARGE: dict[str, tuple[int, int, int, int, tuple[int, ...], tuple[int, int, int]]] = {
    "images": (70, 32, 32, 1, (512, 512), DOUBLED),
    "a plane": (1, 8, 8, 1, (16_500, 16_503), SAME),
    "a strided plane": (1, 8, 16, 1, (6_000, 6_008), DOUBLED),
    "a channel": (1, 1, 1, 1, (23_200, 23_200), DOUBLED),
    "a row": (1, 16, 16, 1, (1, 2**27 + 24), SAME),
    "a line": (1, 4, 4, 1, (2**29 + 4096,), SAME),
    "long rows": (2, 1, 1, 1, (1, 2**31 - 2**20), SAME),
    "a volume": (1, 8, 8, 1, (520, 720, 720), SAME),
    "a strided volume": (1, 16, 8, 1, (400, 420, 417), DOUBLED),
    "a row of groups": (1, 64, 64, 64, (1, 2**25 + 24), DOUBLED),
}
HERE = ("images", "a plane", "a channel", "a row", "long rows", "a volume", "a row of groups")
"""Of these the layers of tests without a GPU."""


def made(name: str, pass_: Pass, layout: Layout) -> Problem:
    batch, cin, cout, groups, size, geometry = LARGE[name]
    kernel, stride, padding = (tuple(still if n == 1 else of for n in size) for of, still in zip(geometry, (1, 1, 0)))
    p = Problem.make(
        batch, cin, cout, size, kernel, stride, padding, groups=groups, bias=False, dtype=torch.bfloat16,
        precision="bf16", pass_=pass_, layout=layout,
    )  # fmt: skip
    assert max(math.prod(p.input_shape), math.prod(p.output_shape)) > 2**31
    return p


def zeros(shape: Sequence[int], layout: Layout) -> Tensor:
    """Pages that are there once something is written to them."""
    pages = mmap.mmap(-1, 2 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=torch.bfloat16)
    if layout == "nchw":
        return flat.view(*shape)
    return flat.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def flat(t: Tensor, layout: Layout) -> Tensor:
    """In the order of its memory."""
    return (t if layout == "nchw" else t.movedim(1, -1)).reshape(-1)


def corner(t: Tensor, last: bool, length: int = CORNER) -> Tensor:
    """The first or the last of an image's positions along each axis."""
    within = tuple(slice(max(0, n - length), None) if last else slice(length) for n in t.shape[2:])
    return t[(slice(-1, None) if last else slice(1), slice(None), *within)]


def at_corners(shape: Sequence[int], layout: Layout, length: int = CORNER) -> Tensor:
    """Small integers there, else zeros."""
    t = zeros(shape, layout)
    for last in (False, True):
        part = corner(t, last, length)
        part.copy_(torch.randint(-3, 4, part.shape))
    return t


def of_corner(p: Problem, t: Tensor, last: bool) -> tuple[Problem, Tensor]:
    """The problem of a corner alone: the same numbers at its end, since what it lacks are zeros."""
    part = corner(t, last).contiguous()
    size = tuple(part.shape[2:])
    if p.pass_ == "grad-input":  # of so many outputs
        size = tuple((n + 2 * pad - k) // s + 1 for n, pad, k, s in zip(size, p.padding, p.kernel, p.stride))
    return p.with_(batch=1, size=size), part


def of_tensors(choice: Any, p: Problem) -> None:
    """The first and last elements of the forward's or the input gradient's result."""
    source, weight = at_corners(source_shape(p), p.layout), torch.randint(-3, 4, p.weight_shape).to(p.dtype)
    out = zeros(result_shape(p), p.layout)
    ends = slice(COMPARED), slice(-COMPARED, None)
    for end in ends:
        flat(out[:1] if end.start is None else out[-1:], p.layout)[end] = math.nan
    prepared = choice.prepare(0)
    prepared.run(source, prepared.pack(weight), None, out)
    for last, end in enumerate(ends):
        q, part = of_corner(p, source, bool(last))
        if p.pass_ == "fwd":
            truth = reference.forward(q, part, weight, None)
        else:
            truth = reference.gradients(q, part, torch.zeros(q.input_shape, dtype=p.dtype), weight)[0]
        ours = flat(out[-1:] if last else out[:1], p.layout)[end].double()
        assert torch.equal(ours, flat(truth, p.layout)[end].to(p.dtype).double()), (p, choice)


def of_weight(choice: Any, p: Problem) -> None:
    """The gradient for the weight, of the first and the last pixel alone."""
    x, grad = at_corners(p.input_shape, p.layout, 1), at_corners(p.output_shape, p.layout)
    out = torch.full(p.weight_shape, math.nan, dtype=p.dtype)
    choice.prepare(0).run(x, grad, out)
    truth = torch.zeros(p.weight_shape, dtype=torch.float64)
    for last in (False, True):
        part = corner(x, last, CORNER // 4).contiguous()
        q = p.with_(batch=1, size=tuple(part.shape[2:]))
        within = tuple(slice(-n, None) if last else slice(n) for n in q.output_shape[2:])
        met = corner(grad, last)[(..., *within)].contiguous()
        truth += reference.gradients(q, met, part, torch.zeros(p.weight_shape, dtype=p.dtype))[1]
    assert torch.equal(out.double(), truth.to(p.dtype).double()), (p, choice)


def drawn_tile(p: Problem) -> tiles.Tile:
    return random.Random(f"{p} {p.layout}").choice(fitting(p, H200))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HERE)
def test_ends_by_tiles(name: str, layout: Layout, emulator: Emulator) -> None:
    torch.manual_seed(0)
    for pass_ in FORWARD_LIKE if EVERY else random.Random(f"{name} {layout}").sample(FORWARD_LIKE, 1):
        p = made(name, pass_, layout)
        tile = drawn_tile(p)
        emulator.blocks = lambda entry, grid, n=tile.channel_blocks: (range(n), range(grid - n, grid))
        of_tensors(direct.Choice(p, tile, 1, Cost()), p)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ends_by_sweep(layout: Layout, emulator: Emulator) -> None:
    """More images than 2^31 by channels; each is a block's."""
    p = Problem.make(
        2**24 + 2, 8, 128, (2, 1, 8), (2, 1, 1), 1, (1, 0, 3), bias=False, dtype=torch.bfloat16, precision="bf16",
        layout=layout,
    )  # fmt: skip
    tile = next(iter(MODES["sweep"].candidates(p, H200)))
    emulator.blocks = lambda entry, grid: (range(1), range(grid - 1, grid)) if entry == "sweep" else (range(grid),)
    of_tensors(TileChoice(tile, p, replace(H200, multiprocessors=p.batch), Cost()), p)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["images", "a channel", "long rows", "a row of groups"])
def test_gradients_for_weights_by_tiles(name: str, layout: Layout, emulator: Emulator) -> None:
    """Of each range of tiles its first and its last one."""
    p = made(name, "grad-weight", layout)
    torch.manual_seed(0)
    emulator.mutate = lambda source: re.sub(
        r"for \(int i = begin; i < end; i\+\+\)", "for (int i = begin; i < end; i += end - begin - 1)", source
    )
    of_weight(direct.Choice(p, drawn_tile(p), 2, Cost()), p)


def test_gradients_for_weights_by_tensor_cores(emulator: Emulator) -> None:
    """Of rows whose bytes are beyond an integer: of two ranges of chunks one has the first, the other the last."""
    p = Problem.make(
        1, 4, 4, (2**28 + 30,), 4, 4, bias=False, dtype=torch.bfloat16, precision="bf16", pass_="grad-weight"
    )
    assert p.out_size[0] * 2 > 2**31
    torch.manual_seed(0)
    emulator.mutate = lambda source: re.sub(
        r"int begin = split \* s\.per_split, end = [^;]*;",
        "int begin = split ? s.chunks - 1 : 0, end = begin + 1;",
        source,
    )
    tiling = next(t for t in wgrad_search.candidates(p, H200) if isinstance(t, SyncTiling))
    of_weight(wgrad.Choice(tiling, p, H200, 2, Cost()), p)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pass_", FORWARD_LIKE)
def test_ends_by_plain_kernels(pass_: Pass, layout: Layout, emulator: Emulator) -> None:
    for name in ("images", "a row"):
        p = made(name, pass_, layout)
        final = (math.prod(result_shape(p)) - 1) % PLAIN_SWEEP // 256
        assert plain.blocks(p) * 256 == PLAIN_SWEEP
        emulator.blocks = lambda entry, grid, n=final: (range(1), range(n - 1, n + 1))
        of_tensors(plain_choice(random.Random(0), p, H200), p)
