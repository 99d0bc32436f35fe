"""The fast kernels of an exported file: one for a pass, which serves every batch and spatial size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from upconv.cuda.compile import jit
from upconv.cuda.direct import direct
from upconv.cuda.gemm import gather
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Unit
from upconv.cuda.wgrad import wgrad
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.planner import Device, select
from upconv.problem import Pass, Problem

Choice = gather.Choice | direct.Choice | wgrad.Choice

NAMES: dict[Pass, str] = {"fwd": "forward", "grad-input": "grad_input", "grad-weight": "grad_weight"}


@dataclass(frozen=True)
class Kernel:
    """A kernel family's choice for a pass."""

    pass_: Pass
    choice: Choice

    @property
    def name(self) -> str:
        return NAMES[self.pass_]

    @property
    def config(self) -> str:
        """The struct of the kernels' constants."""
        return self.name.title().replace("_", "")

    @property
    def unit(self) -> Unit:
        """Of a file weights are packed, and the sums of the weight's gradient are added in a second step."""
        return self.choice.sources()[0]

    @property
    def packed_words(self) -> int:
        """Elements of the packed weights; 0 where the kernel reads weights as they are, or none."""
        return self.choice.tiling.packed_words if isinstance(self.choice, gather.Choice) else 0

    @property
    def entries(self) -> tuple[str, ...]:
        """Of the unit, in C++: what packs weights, if anything does, what computes, and what adds sums."""
        named = (re.sub(rf"\b{jit.CONFIG}\b", self.config, one) for one in self.compiled)
        return tuple(re.sub(r"(\w+)(?=[<>])", r"kernels::\1", one) for one in named)

    @property
    def compiled(self) -> tuple[str, ...]:
        """The same in the unit's words: what autocast alone takes is not in the file."""
        return tuple(one for one in jit.entries_of(self.unit.source) if not one.startswith("pack_float"))

    @property
    def multiples(self) -> tuple[int, int]:
        """Columns at a multiple of which the source's rows must begin, of the weight's gradient the input's and the
        output's. Other tensors are copied, with zeros at the end of each row."""
        c = self.choice
        if isinstance(c, gather.Choice):
            t = c.tiling
            return (t.vec if t.tensor_map and not t.channels_last else 1), 1
        if isinstance(c, wgrad.Choice) and not c.tiling.channels_last:
            w = c.tiling
            by_boxes = isinstance(w, WarpgroupTiling) and w.box_g
            return (w.vec if w.aligned else 1), (w.vec if by_boxes else 1)
        return 1, 1


def kernels(p: Problem, gpu: Gpu, forward_only: bool = False) -> tuple[Kernel, ...]:
    """The kernel of each pass, planned for ``p``'s own size; none of a pass that plain kernels serve alone."""
    wanted = tuple(NAMES)[: 1 if forward_only else None]
    choices = {pass_: select(_pass(p, pass_), Device("cuda", gpu=gpu), general=True).choice for pass_ in wanted}
    return tuple(Kernel(pass_, choice) for pass_, choice in choices.items() if isinstance(choice, Choice))


def _pass(p: Problem, pass_: Pass) -> Problem:
    return p.with_(pass_="fwd") if pass_ == "fwd" else p.with_(pass_=pass_, bias=False)


def whole_rows(c: direct.Choice) -> int:
    """Of which the columns of the source's rows must be a multiple to be read in whole units; 0 where they never are.

    The file's tensors begin at 16 bytes, so that nothing else decides it.
    """
    p, tile = c.problem, c.tile
    if tile.vector == 1:
        return 0
    if not tile.lanes_are_channels:
        return tile.vector
    return tile.vector // math.gcd(tile.vector, p.groups)
