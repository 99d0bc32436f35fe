"""The interface of a kernel family: what it answers a `Problem` with, and what of that runs on a device.

A family is a module with ``candidate(p, gpu, best, general)``: its best `Choice` for a problem, or the sentence why it
has none. A choice, prepared for a device, is what `upconv.cuda.engine` runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from upconv.cuda.cost import Cost
from upconv.cuda.gpu import Gpu
from upconv.problem import Problem

if TYPE_CHECKING:
    from upconv.cuda.launches import Given, Launch, Unit

MOST_COUNTED = 2**31
"""What kernels count in 32 bits."""
BEYOND = 2**20
"""Of these, positions along an axis that are left to the ends of tiles and halos."""
LONGEST = MOST_COUNTED - BEYOND
"""Positions along an axis that a tensor may have."""
_PACK_LAUNCH = 1.5e-6  # seconds, by a launch of its own or within the kernel's


class Choice(ABC):
    """A family's best configuration for a problem; hashable."""

    problem: Problem
    cost: Cost
    """The model's estimate of its kernel."""
    casts: Any = False
    """Whether a weight, or its gradient, may be float32 in a 16-bit problem; a float32 bias is rounded with it."""
    biased: Any = False
    """Whether ``grad-input`` takes a bias of the input's channels; it is then a plain convolution."""
    reads: Any = None
    """The order of weights that the kernel reads in place: ``contiguous`` or ``channels_last`` ones."""
    keeps_packed: Any = False
    """Whether packed weights that are kept for many calls are better than weights in place."""

    @property
    @abstractmethod
    def family(self) -> str:
        """The family's name."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """The configuration, in words."""

    @property
    def seconds(self) -> float:
        """The cost model's estimate."""
        return self.cost.seconds

    @property
    def bound(self) -> str:
        """What limits it, by the model."""
        return self.cost.bound

    @property
    def packing_seconds(self) -> float:
        """What every call takes to pack the weights ahead of the kernel."""
        return 0.0

    @abstractmethod
    def sources(self) -> Sequence[Unit]:
        """What NVRTC must compile."""

    @property
    def packing(self) -> Hashable:
        """What the packed weight depends on beside the weight."""
        return self

    def packed_bytes(self, given: Given) -> int:
        """Of what `pack` writes."""
        return 0

    def pack(self, given: Given) -> Launch | None:
        """What writes ``packed``; None for a weight that is packed by what else is launched, or not at all."""
        return None

    @abstractmethod
    def launches(self, given: Given) -> tuple[Launch, ...]:
        """What a call launches, in this order."""

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Of the weight's gradient as it is written, which may be wider than the weight."""
        return self.problem.weight_shape

    def on(self, device: int) -> Any:
        """The choice as a device runs it, which may be a part of the GPU. Errors: those of ``jit.kernel``."""
        return self

    def prepare(self, device: int) -> Any:
        """A `upconv.cuda.prepared.Prepared`, for ``grad-weight`` a `PreparedWeight`."""
        from upconv.cuda import prepared  # which loads kernels; a CPU needs none of it

        kind = prepared.PreparedWeight if self.problem.pass_ == "grad-weight" else prepared.Prepared
        choice: Any = self.on(device)
        return kind(choice, device)


def too_long(p: Problem) -> str | None:
    """Why kernels that count along an axis in 32 bits cannot serve a problem, in a sentence; None where they can."""
    longest = max(p.batch, *p.size, *p.out_size)
    if longest <= LONGEST:
        return None
    return f"the kernel counts along an axis in 32 bits, which {longest} elements are too many for"


def packing_seconds(p: Problem, gpu: Gpu | None = None) -> float:
    """Seconds that packing takes: a launch that reads the weights once and writes them once.

    Without a ``gpu`` the weights are few.
    """
    return _PACK_LAUNCH + (0.0 if gpu is None else 2 * math.prod(p.weight_shape) * p.dtype.itemsize / gpu.bandwidth)


def call_seconds(choice: Choice) -> float:
    """What a call is expected to take, in seconds, by which choices are compared."""
    return choice.seconds + choice.packing_seconds


def best_of(found: dict[str, Choice | str]) -> Choice | None:
    """The choice of the least time among families' answers; of equals the first."""
    return min((c for c in found.values() if not isinstance(c, str)), key=call_seconds, default=None)


def answer_of(found: dict[str, Choice | str]) -> Choice | str:
    """A family's answer by those of its modes: `best_of`, or the sentences why there is none, with whose they are."""
    if (best := best_of(found)) is not None:
        return best
    modes: dict[str, list[str]] = {}
    for mode, sentence in found.items():
        modes.setdefault(str(sentence), []).append(mode)
    if len(modes) == 1:
        return next(iter(modes))
    return "; ".join(f"{' and '.join(of)}: {sentence}" for sentence, of in modes.items())
