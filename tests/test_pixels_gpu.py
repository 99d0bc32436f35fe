"""The family `pixels` on a GPU: what test_families_gpu.py, whose tiles have full rings, does not show."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from conftest import HOPPER
from drawn import DTYPES, short_rings
from results import assert_computes
from upconv import reference
from upconv.cuda.cost import Cost
from upconv.cuda.gpu import gpu
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.family import choose
from upconv.problem import Precision, Problem

pytestmark = HOPPER

LAST: dict[str, Any] = {"layout": "channels_last"}
BACK: dict[str, Any] = {"pass_": "grad-input", "bias": False}
MANY: dict[str, tuple[str, Problem]] = {
    "implicit": ("implicit", Problem.make(2, 64, 72, (50, 70), 3, 2, 1, 1, **LAST)),
    "implicit dX": ("implicit", Problem.make(2, 64, 72, (50, 70), 3, 2, 1, 1, **LAST, **BACK)),
    "pairs": ("pairs", Problem.make(2, 64, 72, (50, 72), 4, 2, 1, **BACK)),
    "pairs, forward": ("pairs", Problem.make(3, 64, 40, (2000,), 8, 4, 2)),
    "phases": ("phases", Problem.make(3, 48, 16, (67, 144), 3, 2, 1, 1)),
    "subpixel": ("subpixel", Problem.make(2, 300, 24, (60, 64), 2, 2)),
    "sweep": ("sweep", Problem.make(2, 40, 16, (9, 30, 40), (3, 3, 5))),
    "sweep dX": ("sweep", Problem.make(2, 16, 40, (9, 30, 40), (3, 3, 5), 1, (1, 1, 2), **BACK)),
    "sweep last": ("sweep", Problem.make(2, 40, 16, (9, 30, 40), (3, 3, 5), **LAST)),
}


@pytest.mark.parametrize("stages", (2, 3, 5))
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", MANY)
def test_many_tiles_of_a_block_around_short_rings(name: str, precision: Precision, stages: int) -> None:
    """Few blocks: every stage is taken again, by another consumer or by both."""
    mode, p = MANY[name]
    p = p.with_(dtype=DTYPES[precision], precision=precision)
    tiles = list(short_rings(mode, p, gpu(0), range(stages, 9)))
    if not tiles:
        pytest.skip("it has no ring so long")
    for t, blocks in product(tiles, (3, 7)):
        assert_computes(TileChoice(t, p, replace(gpu(0), multiprocessors=blocks), Cost(1e-5)), None, stages)


@pytest.mark.parametrize("cout", [32, 48])
def test_long_rows_are_right_and_equal_to_the_bit(cout: int) -> None:
    """Stages of `phases` given back before their loads had arrived were overwritten where many stores delayed these."""
    p = Problem.make(8, 96, cout, (66000,), 8, 4, precision="tf32")
    choice = choose("phases", p, gpu(0))
    assert isinstance(choice, TileChoice) and choice.tile.stages > 4
    x, weight = (torch.randn(shape, device="cuda") for shape in (p.input_shape, p.weight_shape))
    prepared, outs = choice.prepare(0), [torch.empty(p.output_shape, device="cuda") for _ in range(4)]
    for out in outs:
        prepared.run(x, prepared.pack(weight), None, out)
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    assert reference.relative_error(outs[0], reference.forward(p, x, weight, None)) < 1e-3
