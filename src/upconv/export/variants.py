"""The kernels of an exported file: for each pass one that serves every size, and where these are faster others ahead.

A kernel's *variant* is one choice of a kernel family in a namespace of its own. Families whose source depends on how
rows are aligned have two: one for the example's alignment and one for any. Ahead of these stands, where it is the
faster one, a kernel for rows about as long as the example's, which are joined.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from upconv.cuda.axes import source_shape
from upconv.cuda.compile import jit
from upconv.cuda.direct import direct, direct_grad, plain, staged, staged_costs
from upconv.cuda.direct.walks import Walk
from upconv.cuda.gemm import gather, joined
from upconv.cuda.gpu import Gpu
from upconv.cuda.wgrad import wgrad
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.planner import Device, select
from upconv.problem import Pass, Problem

Choice = (
    gather.Choice | joined.Choice | direct.Choice | direct_grad.Choice | plain.Choice | wgrad.Choice | staged.Choice
)

# Of the time of the kernel for every size, by their models, from which on joined rows are worth a kernel more. As the
# models have it, not `family.weighed`: the gather-GEMM's estimate is right for such layers.
_JOINED = 0.95

PASSES: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight")
NAMES: dict[Pass, str] = {"fwd": "forward", "grad-input": "grad_input", "grad-weight": "grad_weight"}


@dataclass(frozen=True)
class Variant:
    """One kernel family's choice for a pass, with the name of its namespace."""

    name: str
    pass_: Pass
    choice: Choice
    unit: int = 1
    """Columns of the source (for the weight's gradient: of the input) must be a multiple of it."""
    unit_out: int = 1
    """As ``unit``, of the output; of the weight's gradient alone."""
    pack: str | None = None
    """Entry that packs the weights; None where the kernel reads them as they are."""
    entry: str = ""
    """Entry that computes."""
    entries: tuple[str, ...] = field(default=())
    resident: int = 1
    """Blocks that a multiprocessor holds (of staged kernels alone)."""

    @property
    def config(self) -> str:
        """The struct of the kernels' constants."""
        return self.name.title().replace("_", "")

    @property
    def source(self) -> str:
        """Of its kernels; the weights of an exported file are packed."""
        return self.choice.sources()[0].source

    def kernel(self, entry: str) -> str:
        """An entry in C++."""
        names = {one.partition("<")[0]: one for one in jit.entries_of(self.source)}
        return re.sub(r"(\w+)([<>])", r"kernels::\1\2", re.sub(rf"\b{jit.CONFIG}\b", self.config, names[entry]))

    @property
    def kind(self) -> str:
        """The class of the exported file that computes the launch."""
        c = self.choice
        if isinstance(c, gather.Choice):
            return "Gather"
        if isinstance(c, joined.Choice):
            return "Joined"
        if isinstance(c, wgrad.Choice):
            return "GradWeight"
        if isinstance(c, direct_grad.Choice):
            return "DirectGradInput"
        if isinstance(c, staged.Choice):
            return "StagedGradInput" if self.pass_ == "grad-input" else "StagedGradWeight"
        if isinstance(c, plain.Choice):
            return "Plain"
        return "DirectWalk" if isinstance(c.tile, Walk) else "Direct"


def variants(p: Problem, gpu: Gpu) -> tuple[Variant, ...]:
    """The kernels that serve a layer at every size, for each pass the one for ``p``'s own first.

    Raises:
        ValueError: no kernel serves a pass.
    """
    found = []
    for pass_ in PASSES:
        choice = _choice(p, pass_, gpu)
        name = NAMES[pass_]
        rows = _joined(p, pass_, gpu)
        if rows is not None and rows.seconds < _JOINED * choice.seconds:
            found.append(_variant(f"{name}_joined", pass_, rows, 16 // rows.tile.element, 1, gpu))
        unit, unit_out = _units(choice)
        found.append(_variant(name, pass_, choice, unit, unit_out, gpu))
        general = _general(p, pass_, unit, unit_out)
        if general is not None:
            found.append(_variant(f"{name}_unaligned", pass_, _choice(general, pass_, gpu), 1, 1, gpu))
    return tuple(found)


def _choice(p: Problem, pass_: Pass, gpu: Gpu) -> Choice:
    wanted = p.with_(pass_="fwd") if pass_ == "fwd" else p.with_(pass_=pass_, bias=False)
    selection = select(wanted, Device("cuda", gpu=gpu), general=True)
    choice = selection.choice
    served = (gather.Choice, direct.Choice, direct_grad.Choice, plain.Choice, wgrad.Choice, staged.Choice)
    if not isinstance(choice, served) or (choice.family == "plain" and pass_ == "grad-weight"):
        reason = "; ".join(c.reason for c in selection.candidates)
        raise ValueError(f"the layer must have kernels to be exported, and for {pass_} there is none: {reason}")
    return choice


def _joined(p: Problem, pass_: Pass, gpu: Gpu) -> joined.Choice | None:
    """A pass by joined rows, which serve some lengths of rows; None where these cannot be."""
    if pass_ == "grad-weight" or p.rank == 1:
        return None
    q = p.with_(pass_=pass_, bias=p.bias and pass_ == "fwd")
    choice = joined.choose(q, gpu)
    return None if isinstance(choice, str) else choice


def _units(choice: Choice) -> tuple[int, int]:
    """Multiples of which the columns (of the source or input, of the output) must be for a choice's kernel."""
    if isinstance(choice, gather.Choice):
        t = choice.tiling
        return (t.vec if t.tensor_map and not t.channels_last else 1), 1
    if isinstance(choice, wgrad.Choice):
        w = choice.tiling
        if w.channels_last:
            return 1, 1
        by_boxes = isinstance(w, WarpgroupTiling) and w.box_g
        return (w.vec if w.aligned else 1), (w.vec if by_boxes else 1)
    return 1, 1


def _general(p: Problem, pass_: Pass, unit: int, unit_out: int) -> Problem | None:
    """The layer at a size that a kernel for these multiples does not serve; None where it serves all sizes."""
    for more in range(1, 65):
        q = p.with_(size=(*p.size[:-1], p.size[-1] + more))
        width = source_shape(q.with_(pass_=pass_))[-1] if pass_ != "grad-weight" else q.size[-1]
        # A kernel for the input's rows at any alignment serves the output's too, but not the other way round.
        if width % unit or (unit == 1 and q.out_size[-1] % unit_out):
            return q
    return None


def _variant(name: str, pass_: Pass, choice: Choice, unit: int, unit_out: int, gpu: Gpu) -> Variant:
    source = choice.sources()[0]  # weights of a file are packed
    entries = tuple(source.entries)
    if isinstance(choice, (gather.Choice, joined.Choice, direct.Choice)):
        return Variant(name, pass_, choice, unit, unit_out, entries[0], entries[1], entries)
    if isinstance(choice, plain.Choice):
        return Variant(name, pass_, choice, unit, unit_out, None, plain.ENTRIES[pass_], entries)
    resident = staged_costs.resident(choice.tile, gpu) if isinstance(choice, staged.Choice) else 1
    return Variant(name, pass_, choice, unit, unit_out, None, entries[0], entries, resident)


def packed_words(v: Variant) -> int:
    """Elements of a kernel's packed weights."""
    c = v.choice
    if isinstance(c, gather.Choice):
        return c.tiling.packed_words
    if isinstance(c, joined.Choice):
        return c.tile.packed_words
    if isinstance(c, direct.Choice):
        return c.packed_words
    return 0
