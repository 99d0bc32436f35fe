"""Gradients by another family's kernel on rearranged tensors: what `unshuffle` and `relayout` share.

Both need memory for what they rearrange, which `Choice.temporary_bytes` states. Where it cannot be had, PyTorch's
OutOfMemoryError rises: another kernel in their place would round otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from upconv.cuda import family
from upconv.cuda.family import weighed
from upconv.cuda.gemm import gather
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Given
from upconv.cuda.pixels import implicit
from upconv.cuda.rearrange import batches
from upconv.cuda.wgrad import wgrad
from upconv.problem import Problem

Inner = gather.Choice | implicit.Choice | wgrad.Choice
_GAIN = 5e-6  # at least: three or four launches stand against one or two, each some 10 us of a host's training step


@dataclass(frozen=True)
class Choice(family.Defaults, ABC):
    """A choice for the rearranged problem."""

    inner: Inner
    problem: Problem
    seconds: float
    """The model's estimate."""

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
    def packing_seconds(self) -> float:
        return self.inner.packing_seconds

    @property
    def inner_units(self) -> tuple[Any, ...]:
        """What NVRTC must compile of the inner choice."""
        found = self.inner.sources()
        if self.problem.pass_ == "grad-input" and self.inner.problem.taps > 1:
            found = found[:1]  # its weights are contiguous, and packed; of one tap they lie as boxes want them
        return found


class GradInput(family.Prepared, ABC):
    """The gradient for the input by an inner kernel, loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        inner: Any = choice.inner
        self._inner = inner.prepare(device)
        self.casts, self.packing = self._inner.casts, choice
        self.claims = isinstance(inner, gather.Choice) and inner.claimed
        if choice.inner.problem.taps == 1:
            self._inner.load()
        for single in (False, self.casts):
            self._inner._program(Given("contiguous", single))

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The weight itself: `run` packs what it makes of it."""
        return weight

    @abstractmethod
    def run(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False, claim: bool = False
    ) -> None:
        """Writes the input's gradient into ``out``; ``x`` is the output's gradient, ``packed`` the weight.

        Both gradients are dense in the problem's layout; the weight has the problem's dtype, or float32 for 16 bits.
        ``claim``: as for the inner kernel, which `claims`. Errors: torch.OutOfMemoryError.
        """

    def _run_inner(self, x: Tensor, weight: Tensor, out: Tensor, fresh: bool, claim: bool) -> None:
        """Packs and multiplies; nothing may begin beside what rearranged the operands, but beside the packing."""
        packed = self._inner.pack(weight)
        self._inner.run(x, packed, None, out, fresh, claim)


class GradWeight(family.PreparedWeight, ABC):
    """The gradient for the weight by an inner kernel, loaded for a device."""

    def __init__(self, choice: Choice, device: int) -> None:
        inner: Any = choice.inner
        self._inner = inner.prepare(device)
        self.casts, self.together = self._inner.casts, self._inner.together

    @property
    def loaded(self) -> bool:
        return bool(self._inner.loaded)

    def load(self) -> None:
        self._inner.load()

    @abstractmethod
    def run(self, x: Tensor, grad: Tensor, out: Tensor, lasting: bool = False) -> None:
        """Writes the weight's gradient into ``out``, of any strides, in the problem's dtype or float32 for 16 bits.

        ``x`` (the input) and ``grad`` (the output's gradient) are dense in the problem's layout; ``lasting`` as for the
        inner kernel. Errors: torch.OutOfMemoryError.
        """


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
    inner: tuple[Any, ...] = (gather, implicit) if q.pass_ == "grad-input" else (wgrad,)
    found = [one.candidate(q, gpu) if others else one.choose(q, gpu) for one in inner]
    choices: list[Inner] = [choice for choice in found if not isinstance(choice, str)]
    return min(choices, key=weighed) if choices else str(found[0])


def gains(seconds: float, otherwise: Any) -> bool:
    """Whether so much time is enough less than the fastest choice takes for the problem as it is."""
    return seconds <= weighed(otherwise) - _GAIN
