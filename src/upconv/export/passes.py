"""The fast kernels of an exported file: one for a pass, which serves every batch and spatial size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product, takewhile
from typing import Any

from upconv.cuda import families, family
from upconv.cuda.compile import jit
from upconv.cuda.direct import direct
from upconv.cuda.family import best_of, call_seconds
from upconv.cuda.gemm import gather, joined
from upconv.cuda.gpu import MAX_BOX, Gpu
from upconv.cuda.launches import Unit
from upconv.cuda.pixels import family as pixels
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.phases import Phases
from upconv.cuda.pixels.sweep import Sweep
from upconv.cuda.wgrad import wgrad
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import Pass, Problem

Choice = TileChoice | direct.Choice | wgrad.Choice

_MODES = Sweep.mode, Phases.mode
"""Of `pixels` those whose tiles serve every size of NCHW tensors."""
_ALIKE = 1.05
"""By how much a gradient may be slower, by estimate, with the forward's family: its file then has one family less."""
ADDS, RECORDS = "add_records", "wgrad_records.cuh"
"""The kernel that adds the sums of blocks to a weight's gradient, and its file."""
NAMES: dict[Pass, str] = {"fwd": "forward", "grad-input": "grad_input", "grad-weight": "grad_weight"}


@dataclass(frozen=True)
class Kernel:
    """A kernel family's choice for a pass."""

    pass_: Pass
    choice: Choice
    alone: bool = False
    """Whether it is without PyTorch, which else cuts rows."""

    @property
    def name(self) -> str:
        return NAMES[self.pass_]

    @property
    def config(self) -> str:
        """The struct of the kernels' constants."""
        return self.name.title().replace("_", "")

    @cached_property
    def unit(self) -> Unit:
        """Of a file weights are packed, and the sums of the weight's gradient are added in a second step."""
        c, unit = self.choice, self.choice.sources()[0]
        if isinstance(c, wgrad.Choice):
            t, entries = c.tiling, (c.tiling.entry, ADDS)
            names = tuple(f"{one}<{jit.CONFIG}>" for one in entries)
            return Unit(unit.label, jit.instance(t.file, t.constants(), names, [RECORDS]), entries)
        if not isinstance(c, gather.Choice) or not self.store_unit:
            return unit
        any_rows = self.store_unit > c.tiling.element
        source = gather.source(c.tiling, store_unit=self.store_unit, any_rows=any_rows, claimed=c.claimed)
        return replace(unit, source=source)

    @property
    def store_unit(self) -> int:
        """Bytes at multiples of which rows of `gather`'s NCHW results are to begin, for one way to store them; those of
        others are stored by elements."""
        c = self.choice
        if not isinstance(c, gather.Choice) or c.tiling.channels_last or c.tiling.shuffle is not None:
            return 0
        return gather.store_unit(c.tiling, c.problem) or c.tiling.element

    @property
    def packed_words(self) -> int:
        """Elements of the packed weights; 0 where the kernel reads weights as they are, or none."""
        return int(self.choice.tile.packed_words) if isinstance(self.choice, TileChoice) else 0

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
    def result_multiple(self) -> int:
        """Columns at a multiple of which, and `result_more` behind it, the result's rows must end; others are computed
        wider, and copied."""
        c, element = self.choice, self.choice.problem.dtype.itemsize
        if isinstance(c, joined.Choice):
            return self.joined_rows[0]
        return 16 // element if isinstance(c, TileChoice) and not isinstance(c, gather.Choice) and c.tile.aligned else 1

    @property
    def result_more(self) -> int:
        """Those by which a row of results of joined rows is longer than one of the source."""
        return joined.gap(self.choice.problem) if isinstance(self.choice, joined.Choice) else 0

    @property
    def columns(self) -> int:
        """The longest of the source's rows; longer ones are cut. 0: any."""
        return self.joined_rows[1] if isinstance(self.choice, joined.Choice) else 0

    @cached_property
    def joined_rows(self) -> tuple[int, int]:
        """The least part of the plan's rows of whose every multiple rings have room for rows, up to the other number,
        which is no less than the plan's."""
        c: Any = self.choice
        planned, unit = c.problem.size[-1], self.multiples[0]
        for multiple in range(unit, planned + 1, unit):
            served = [*takewhile(c.tile.serves_width, range(multiple, MAX_BOX + 1, multiple))]
            if planned in served:
                break
        return multiple, served[-1]

    @property
    def cut(self) -> int:
        """Columns from one part of longer rows to the next. Parts overlap by as much as a position reaches, or more so
        that they begin at 16 bytes."""
        unit = self.multiples[0]
        return (self.columns - joined.gap(self.choice.problem)) // unit * unit

    @property
    def multiples(self) -> tuple[int, int]:
        """Columns at a multiple of which the source's rows must begin, of the weight's gradient the input's and the
        output's. Of other tensors the rows are copied."""
        c = self.choice
        if isinstance(c, gather.Choice):
            t = c.tiling
            return (t.vec if t.tensor_map and not t.channels_last else 1), 1
        if isinstance(c, TileChoice):
            return 16 // c.problem.dtype.itemsize, 1
        if isinstance(c, wgrad.Choice) and isinstance(c.tiling, WarpgroupTiling) and not c.tiling.channels_last:
            return c.tiling.vec, (c.tiling.vec if c.tiling.box_g else 1)
        return 1, 1


def kernels(p: Problem, gpu: Gpu, forward_only: bool = False, alone: bool = False) -> tuple[Kernel, ...]:
    """The kernel of each pass, planned for ``p``'s own size; none of a pass that plain kernels serve alone.

    ``alone``: those that need nothing of PyTorch's.
    """
    found: dict[Pass, Kernel] = {}
    for pass_ in tuple(NAMES)[: 1 if forward_only else None]:
        answers = _answers(_pass(p, pass_, gpu), gpu, alone)
        choice = best_of(answers)
        if pass_ == "grad-input" and choice is not None and "fwd" in found:
            alike = answers.get(_kind(found["fwd"].choice))
            if isinstance(alike, Choice) and call_seconds(alike) <= _ALIKE * call_seconds(choice):
                choice = alike
        if isinstance(choice, Choice):
            found[pass_] = Kernel(pass_, choice, alone)
    return tuple(found.values())


def _answers(p: Problem, gpu: Gpu, alone: bool) -> dict[str, family.Choice | str]:
    """The choice of each kind of kernels that serves every size, or the sentence why there is none."""
    found = families.choose(p, gpu, general=True)
    for mode in _MODES if p.layout == "nchw" and p.pass_ != "grad-weight" else ():
        choice = pixels.choose(mode, p, gpu)
        off = isinstance(choice, TileChoice) and mode == Sweep.mode and choice.tile.shape[1] * p.dtype.itemsize % 16
        found[mode] = "boxes of a second tile begin off 16 bytes" if off else choice
    if not alone and p.pass_ == "fwd":
        choice = joined.candidate(p, gpu)
        if joined.gap(p) % 2:
            choice = "slices of rows that are longer by an odd number have even places only where results are copied"
        elif isinstance(choice, joined.Choice) and Kernel("fwd", choice).cut <= 0:
            choice = "parts of longer rows would have no results of their own"
        found["joined"] = choice
    return found


def _kind(choice: Choice) -> str:
    """A choice's name among the `_answers`."""
    return str(choice.tile.mode) if isinstance(choice, TileChoice) and choice.family == "pixels" else choice.family


def _pass(p: Problem, pass_: Pass, gpu: Gpu) -> Problem:
    """A gradient is of tensors whose rows are copied where they do not begin at units of 16 bytes.

    The tensor copy engine then brings them, as it does a forward's input, and the file has one way to load pixels.
    """
    if pass_ == "fwd":
        return p.with_(pass_="fwd")
    p, unit = p.with_(pass_=pass_, bias=False), 16 // p.dtype.itemsize
    if p.layout == "channels_last" or gpu.arch != "90a":
        return p
    *size, width = p.size
    *more, _ = p.output_padding
    ways = product(range(unit), range(max(p.stride[-1], p.dilation[-1])))
    wider = [p.with_(size=(*size, width + columns), output_padding=(*more, extra)) for columns, extra in ways]
    whole = [one for one in wider if one.output_shape[-1] % unit == 0]
    both = [one for one in whole if one.size[-1] % unit == 0]
    return (both or (whole if pass_ == "grad-input" else []) or [p])[0]


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
