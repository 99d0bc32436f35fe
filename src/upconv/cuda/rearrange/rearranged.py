"""Gradients by another family's kernel on rearranged tensors: what `unshuffle` and `relayout` share.

Both need memory for what they rearrange, which `Choice.temporary_bytes` states. Where it cannot be had, PyTorch's
OutOfMemoryError rises: another kernel in their place would round otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from upconv.cuda import family
from upconv.cuda.family import weighed
from upconv.cuda.gemm import gather
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Given, Launch, Operand, Scratch, renamed
from upconv.cuda.pixels import family as pixels
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.rearrange import batches
from upconv.cuda.wgrad import wgrad
from upconv.problem import Problem

Inner = gather.Choice | TileChoice | wgrad.Choice
THREADS = 256  # of a block that copies
_GAIN = 5e-6  # at least: three or four launches stand against one or two, each some 10 us of a host's training step


@dataclass(frozen=True)
class Choice(family.Defaults, ABC):
    """A choice for the rearranged problem."""

    inner: Inner
    problem: Problem
    seconds: float
    """The model's estimate."""

    family: ClassVar[str] = "rearrange"

    @property
    @abstractmethod
    def temporary_bytes(self) -> int:
        """Of the rearranged tensors, which a call allocates and releases."""

    @property
    def _memory(self) -> str:
        """For a summary."""
        return f"{self.temporary_bytes / 1e6:.3g} MB of temporaries"

    @property
    def bound(self) -> str:
        return self.inner.bound

    @property
    def margin(self) -> float:
        return self.inner.margin

    @property
    def packs(self) -> bool:
        """Whether a call packs its weights, which are contiguous; of one tap they lie as boxes want them."""
        return self.problem.pass_ == "grad-input" and (self.inner.problem.taps > 1 or self.inner.reads is None)

    @property
    def packing_seconds(self) -> float:
        return family.packing_seconds(self.inner.problem, self.inner.gpu) if self.packs else 0.0

    @property
    def casts(self) -> bool:
        return self.inner.casts

    def on(self, device: int) -> Any:
        return replace(self, inner=self.inner.on(device))

    def inner_launches(self, given: Given, names: Mapping[Operand, Operand]) -> tuple[Launch, ...]:
        """The inner kernel's on other operands; of weights of one tap in place, where it can."""
        inner: Any = self.inner
        if self.problem.pass_ == "grad-weight":
            return renamed(inner.launches(given), names)
        if not self.packs and not given.single:
            return renamed((inner.multiply(given._replace(weight="in place")),), names)
        packed = Scratch("packed", inner.packed_bytes(given))
        return renamed((inner.pack(given), inner.multiply(given)), {"packed": packed, **names})

    @property
    def inner_units(self) -> tuple[Any, ...]:
        """What NVRTC must compile of the inner choice."""
        found = self.inner.sources()
        if self.problem.pass_ == "grad-input" and self.inner.problem.taps > 1:
            found = found[:1]  # its weights are contiguous, and packed; of one tap they lie as boxes want them
        return found


def refusal(p: Problem, gpu: Gpu) -> str | None:
    """Why tensors are not rearranged for a problem, in a sentence; None when they may be."""
    if too_long := batches.too_long(p):
        return too_long
    if p.pass_ not in ("grad-input", "grad-weight"):
        return "these kernels compute gradients only: a forward takes no memory beside packed weights"
    if gpu.capability[0] != 9:
        return "that rearranging pays was measured on compute capability 9.0 alone"
    if p.precision not in ("tf32", "bf16", "fp16"):
        return "that rearranging pays was measured for TF32 and 16 bits alone"
    return None


def choose(q: Problem, gpu: Gpu, others: bool = False) -> Inner | str:
    """The choice for a rearranged problem, or the sentence why there is none.

    ``others``: or for one of the same bytes (`batches`), which the choice then has.
    """
    inner: Any = gather if q.pass_ == "grad-input" else wgrad
    found = [inner.candidate(q, gpu) if others else inner.choose(q, gpu)]
    if q.pass_ == "grad-input":
        found.append(pixels.choose("implicit", q, gpu))
    choices: list[Inner] = [choice for choice in found if not isinstance(choice, str)]
    return min(choices, key=weighed) if choices else str(found[0])


def gains(seconds: float, otherwise: Any) -> bool:
    """Whether so much time is enough less than the fastest choice takes for the problem as it is."""
    return seconds <= weighed(otherwise) - _GAIN
