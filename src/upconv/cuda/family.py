"""The interface of a kernel family: what it answers a `Problem` with, and what of that runs on a device.

A family is a module with ``candidate(p, gpu, best, general)``: its best `Choice` for a problem, or the sentence why it
has none. A choice, prepared for a device, is what `upconv.cuda.engine` runs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from torch import Tensor

from upconv.cuda.gpu import Gpu
from upconv.problem import Problem

_PACK_LAUNCH = 1.5e-6  # seconds, by a launch of its own or within the kernel's


class Unit(Protocol):
    """One source to be compiled."""

    @property
    def label(self) -> str: ...

    @property
    def source(self) -> str: ...


class Prepared:
    """A choice for ``fwd`` or ``grad-input`` whose kernels are loaded on a device; what is here are the defaults."""

    packing: Hashable
    """What `pack`'s result depends on beside the weight: choices of equal packing share packed weights."""
    casts = False
    """Whether it takes float32 weights for a 16-bit problem.

    `pack` then rounds them, and a float32 bias with them, which `run` reads from the packed weights.
    """
    biased = False
    """Whether `run` adds a bias of the input's channels for ``grad-input``, which is then a plain convolution."""
    claims = False
    """Whether `run` takes a last argument: whether the call may allocate what outlives it."""
    packs = False
    """Whether `run_packing` is there."""
    recorded = False
    """Whether it is a `upconv.cuda.prepared.Prepared`, whose `run` takes weights that are not packed."""

    @property
    def loaded(self) -> bool:
        """Whether the kernels for every call are; those that the first call does not want may be left out."""
        return True

    def load(self) -> None:
        """Loads the kernels for every call."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The weight as `run` takes it, made on the current stream."""
        raise NotImplementedError

    def pack_to_keep(self, weight: Tensor) -> Tensor:
        """`pack`, where what comes back is kept for other calls."""
        return self.pack(weight)

    def run(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False, claim: bool = False
    ) -> None:
        """Reads ``x`` and writes ``out``: the input and the output, or their gradients the other way round.

        ``fresh``: `pack` was the last kernel on this stream, so that this launch may overlap with it.
        """
        raise NotImplementedError

    def run_packing(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """`pack` and `run` by one launch, which may allocate what outlives the call."""
        raise NotImplementedError


class PreparedWeight:
    """A choice for ``grad-weight`` whose kernels are loaded on a device; what is here are the defaults."""

    casts = False
    """Whether a 16-bit problem's gradient may be float32."""
    together = False
    """Whether one launch does all in calls that may allocate what outlives them, `run`'s last argument."""

    @property
    def loaded(self) -> bool:
        """As `Prepared.loaded`."""
        return True

    def load(self) -> None:
        """As `Prepared.load`."""

    def run(self, x: Tensor, grad: Tensor, out: Tensor, lasting: bool = False) -> None:
        """Writes the weight's gradient into ``out``, in its strides."""
        raise NotImplementedError


class Choice(Protocol):
    """A family's best configuration for a problem; hashable. `Defaults` has what most choices have alike."""

    @property
    def family(self) -> str: ...

    @property
    def problem(self) -> Problem: ...

    @property
    def seconds(self) -> float:
        """The cost model's estimate of its kernel."""

    @property
    def summary(self) -> str: ...

    @property
    def bound(self) -> str: ...

    @property
    def terms(self) -> str:
        """The estimate's terms in words; empty where the family's model has no `upconv.cuda.cost.Cost`."""

    @property
    def margin(self) -> float:
        """By what `seconds` is multiplied beside another family's, where its model is the more optimistic one."""

    @property
    def packing_seconds(self) -> float:
        """What every call takes to pack the weights ahead of the kernel."""

    @property
    def packing_sources(self) -> Sequence[Unit]:
        """What compiles a kernel that packs the weights itself, if there is one."""

    def sources(self) -> Sequence[Unit]: ...

    def prepare(self, device: int) -> Any:
        """A `Prepared`, for ``grad-weight`` a `PreparedWeight`."""


class Defaults:
    """A choice whose estimate needs no correction, and which packs nothing."""

    @property
    def terms(self) -> str:
        return ""

    @property
    def margin(self) -> float:
        return 1.0

    @property
    def packing_seconds(self) -> float:
        return 0.0

    @property
    def packing_sources(self) -> Sequence[Unit]:
        return ()


def packing_seconds(p: Problem, gpu: Gpu | None = None) -> float:
    """Seconds that packing takes: a launch that reads the weights once and writes them once.

    Without a ``gpu`` the weights are few.
    """
    return _PACK_LAUNCH + (0.0 if gpu is None else 2 * math.prod(p.weight_shape) * p.dtype.itemsize / gpu.bandwidth)


def weighed(choice: Choice) -> float:
    """What a family expects of its choice in seconds, as it stands beside other families'."""
    return choice.seconds * choice.margin + choice.packing_seconds


def best_of(found: dict[str, Choice | str]) -> Choice | None:
    """The choice of the least time among families' answers; of equals the first."""
    return min((c for c in found.values() if not isinstance(c, str)), key=weighed, default=None)
