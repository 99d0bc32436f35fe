"""Kernel families: which there are, what each answers and gives, and the choice of each for a problem.

A family is a module of this package: for the forward and the gradient for the input `upconv.cuda.gather`,
`upconv.cuda.joined`, `upconv.cuda.sweep`, `upconv.cuda.implicit`,
`upconv.cuda.subpixel`, `upconv.cuda.pairs`, `upconv.cuda.phases`, `upconv.cuda.direct`; for the
gradient for the weight `upconv.cuda.wgrad`; for both `upconv.cuda.staged`,
`upconv.cuda.unshuffle`, `upconv.cuda.relayout`. It answers a `Problem` with a `Choice`, its best configuration by its
own cost model, or with the sentence why it has none; the choice, prepared for a device, is what `upconv.cuda.engine`
runs. The planner asks all of them and takes the one that expects the least time. Nothing here needs a GPU or loads a
compiler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

from upconv.cuda import batches
from upconv.cuda.gpu import Gpu
from upconv.problem import Problem

FAMILIES = (
    "gather",
    "joined",
    "sweep",
    "implicit",
    "subpixel",
    "pairs",
    "phases",
    "direct",
    "staged",
    "unshuffle",
    "relayout",
)
"""The kernel families of the forward and of the gradient for the input, as modules of this package.

Of equals the first is taken.
"""
WEIGHT_FAMILIES = ("wgrad", "staged", "unshuffle", "relayout")
"""As `FAMILIES`, of the gradient for the weight."""
# Families that have kernels for one size of the input alone.
_TENSOR_CORES = (
    "gather", "joined", "sweep", "implicit", "subpixel", "pairs", "phases", "wgrad",
)  # fmt: skip
_PACK_LAUNCH = 1.5e-6  # seconds, by a launch of its own or within the kernel's
_AROUND = ("unshuffle", "relayout")  # which call the others' kernels, and are asked behind them


class Unit(Protocol):
    """One source to be compiled."""

    @property
    def label(self) -> str: ...

    @property
    def source(self) -> str: ...


class Prepared(Protocol):
    """A choice for ``fwd`` or ``grad-input`` whose kernels are loaded on a device.

    `run` reads ``x`` and writes ``out``: the input and the output, or their gradients the other way round. ``fresh``:
    but for memory that is filled, nothing was launched on the current stream since `pack`, if that launched anything.

    With a true attribute ``casts`` it takes float32 weights for a 16-bit problem: `pack` then rounds them, and beside
    them a float32 ``bias``, if it is given one, which `run` reads from the packed weights.

    Where kernels differ by how a weight lies, or by whether packed weights are kept, those that the first call does not
    want may be left out: then ``loaded`` is false, and ``load`` loads all.

    With a true attribute ``biased`` `run` adds a bias for ``grad-input`` too, of the input's channels: the pass is then
    a plain convolution (`upconv.convolutions`).

    With a true attribute ``packs`` it has ``run_packing(x, weight, bias, out)`` beside, which does both by one launch
    and may allocate what outlives the call.

    It may have ``pack_to_keep(weight)``, called for `pack` where what comes back is kept for other calls.

    It may have an attribute ``packing``: what `pack`'s result depends on beside the weight, hashable. Choices of equal
    packing share packed weights; without it only equal choices do.
    """

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def run(self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False) -> None: ...


class PreparedWeight(Protocol):
    """A choice for ``grad-weight`` whose kernels are loaded on a device; it writes in the strides of ``out``.

    With a true attribute ``casts``, for a 16-bit problem into a float32 ``out`` too. With a true attribute ``together``
    `run` takes a fourth argument, whether the call is not captured and may allocate what outlives it: then one launch
    does all. ``loaded`` and ``load``: as a `Prepared`'s.
    """

    def run(self, x: Tensor, grad: Tensor, out: Tensor) -> None: ...


class Choice(Protocol):
    """A family's best configuration for a problem; hashable.

    It may have an attribute ``margin``: by what its ``seconds`` are multiplied beside another family's, where its model
    is the more hopeful one. It may have an attribute ``in_place``: whether its kernel reads channels-last weights in
    place, so that nothing is packed. Both count in `weighed`.
    """

    @property
    def family(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    @property
    def summary(self) -> str: ...

    @property
    def bound(self) -> str: ...

    def sources(self) -> Sequence[Unit]: ...

    def prepare(self, device: int) -> Any:
        """A `Prepared`, for ``grad-weight`` a `PreparedWeight`."""


def choose(p: Problem, gpu: Gpu, general: bool = False) -> dict[str, Choice | str]:
    """Each family's best configuration for a problem, or the sentence why it has none.

    ``general``: of those that serve every size of the input (the CUDA-core families have no others).
    """
    found: dict[str, Choice | str] = {}
    longest = max(p.batch, *p.size, *p.out_size)
    for name in WEIGHT_FAMILIES if p.pass_ == "grad-weight" else FAMILIES:
        if find_spec(f"upconv.cuda.{name}") is None:
            found[name] = "this family is not installed"
            continue
        if longest > batches.LONGEST and (name, p.pass_) != ("direct", "fwd"):
            found[name] = f"the kernel counts along an axis in 32 bits, which {longest} elements are too many for"
            continue
        family = import_module(f"upconv.cuda.{name}")
        fastest = min((weighed(c) for c in found.values() if not isinstance(c, str)), default=math.inf)
        searches = name == ("direct" if p.pass_ == "fwd" else "staged")
        if searches and (least := family.least_seconds(p, gpu)) > fastest:
            found[name] = f"slower: its multiply-adds alone take {least * 1e3:.3g} ms on CUDA cores"
        elif name == "direct":
            found[name] = family.choose(p, gpu, fastest)
        elif name in _AROUND:
            best = min((c for c in found.values() if not isinstance(c, str)), key=weighed, default=None)
            found[name] = family.choose(p, gpu, best, general)
        elif name in _TENSOR_CORES:
            found[name] = batches.choose(family, p, gpu, general)
        else:
            found[name] = family.choose(p, gpu)
    return found


def weighed(choice: Any) -> float:
    """What a family expects of its choice, in seconds, as it stands beside other families' (`Choice`)."""
    return float(choice.seconds * getattr(choice, "margin", 1.0)) + packing_seconds(choice)


def packing_seconds(choice: Any) -> float:
    """What every call takes to pack the weights ahead of the kernel: it reads them once and writes them once."""
    inner = getattr(choice, "inner", choice)  # of tensors that are rearranged before
    p: Problem = inner.problem
    if p.pass_ == "grad-weight" or getattr(inner, "in_place", False):
        return 0.0
    gpu: Gpu | None = getattr(inner, "gpu", None)  # CUDA cores' choices know none, and have small weights
    bandwidth = math.inf if gpu is None else gpu.bandwidth
    return _PACK_LAUNCH + 2 * math.prod(p.weight_shape) * p.dtype.itemsize / bandwidth
