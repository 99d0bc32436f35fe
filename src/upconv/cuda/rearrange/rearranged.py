"""The family `rearrange`: passes by another family's kernel on rearranged tensors.

A mode is a module that says which problem has the same answer, and what is launched around that problem's kernel. The
rearranged tensors take memory, which `Choice.temporary_bytes` states. Where it cannot be had, PyTorch's
OutOfMemoryError rises: another kernel in their place would round otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from upconv.cuda import family
from upconv.cuda.cost import Cost
from upconv.cuda.family import call_seconds
from upconv.cuda.gemm import gather
from upconv.cuda.gpu import RATES, Gpu
from upconv.cuda.launches import Given, Launch, Operand, Scratch, renamed
from upconv.cuda.pixels import family as pixels
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.rearrange import relayout, unshuffle
from upconv.cuda.rearrange.around import Around
from upconv.cuda.wgrad import wgrad
from upconv.problem import Problem

Inner = gather.Choice | TileChoice | wgrad.Choice
_RATE = 0.83  # of the device's copy rate, that copies reach
_GAIN = 5e-6  # seconds at least: three or four launches stand against one or two, each some 10 us of a host's step


class Mode(Protocol):
    """A way to rearrange tensors."""

    def refusal(self, p: Problem) -> str | None:
        """Why it does not serve a problem that `refusal` takes, in a sentence; None when it does."""

    def rearranged(self, p: Problem) -> Problem:
        """The inner problem."""

    def copies(self, p: Problem) -> tuple[int, int]:
        """Bytes that are moved around the inner kernel, and launches."""

    def around(self, p: Problem, given: Given) -> Around: ...

    def words(self, p: Problem) -> str:
        """For a summary."""


MODES: dict[str, Mode] = {"unshuffle": unshuffle, "relayout": relayout}


@dataclass(frozen=True)
class Choice(family.Choice):
    """A choice for the rearranged problem."""

    mode: str
    """By its name in `MODES`, since a choice is pickled."""
    inner: Inner
    problem: Problem
    cost: Cost

    family = "rearrange"

    @property
    def _contiguous(self) -> Around:
        """Of contiguous weights in the problem's dtype."""
        return MODES[self.mode].around(self.problem, Given("contiguous"))

    @property
    def temporary_bytes(self) -> int:
        """Of the rearranged tensors, which a call allocates and releases."""
        return sum(one.bytes for one in self._contiguous.names.values())

    @property
    def summary(self) -> str:
        memory = f"{self.temporary_bytes / 1e6:.3g} MB of temporaries"
        return f"{MODES[self.mode].words(self.problem)}, {memory}: {self.inner.summary}"

    @property
    def bound(self) -> str:
        return "copies" if self.seconds > 2 * self.inner.seconds else self.inner.bound

    @property
    def packs(self) -> bool:
        """Whether a call packs its weights, which are contiguous; of one tap they lie as boxes want them."""
        return self.problem.pass_ != "grad-weight" and (self.inner.problem.taps > 1 or self.inner.reads is None)

    @property
    def packing_seconds(self) -> float:
        return family.packing_seconds(self.inner.problem, self.inner.gpu) if self.packs else 0.0

    @property
    def casts(self) -> bool:
        return self.inner.casts

    @property
    def result_shape(self) -> tuple[int, ...]:
        p, q = self.problem, MODES[self.mode].rearranged(self.problem)
        return (*q.weight_shape[:2], *p.kernel) if self._writes_result else p.weight_shape

    @property
    def _writes_result(self) -> bool:
        """Whether the inner kernel writes the weight's gradient, which may have more channels."""
        return self.problem.pass_ == "grad-weight" and "result" not in self._contiguous.names

    def on(self, device: int) -> Any:
        return replace(self, inner=self.inner.on(device))

    def sources(self) -> tuple[Any, ...]:
        """What NVRTC must compile: the copying kernels, and the inner one."""
        around, inner = self._contiguous, self.inner.sources()
        if self.packs:
            inner = inner[:1]  # the others have weights in place
        return (*dict.fromkeys(one.unit for one in (*around.ahead, *around.behind)), *inner)

    @property
    def _keeps(self) -> bool:
        """Whether packed weights may be kept: they are the weight's own, not of one that is rearranged too."""
        return self.packs and "weight" not in self._contiguous.names

    @property
    def packing(self) -> Any:
        return self.inner.packing if self._keeps else self

    def packed_bytes(self, given: Given) -> int:
        return self.inner.packed_bytes(given)

    def pack(self, given: Given) -> Launch | None:
        return self.inner.pack(given) if self._keeps else None

    def launches(self, given: Given) -> tuple[Launch, ...]:
        around = MODES[self.mode].around(self.problem, given)
        return *around.ahead, *self._inner(around), *around.behind

    def _inner(self, around: Around) -> tuple[Launch, ...]:
        """The inner kernel's launches; of weights of one tap in place, where it can."""
        inner: Any = self.inner
        given, names = around.given, dict[Operand, Operand](around.names)
        if self.problem.pass_ == "grad-weight":
            return renamed(inner.launches(given), names)
        if given.weight == "packed":  # behind a copy, for which the kernel does not wait
            return renamed((replace(inner.multiply(given), dependent=False),), names)
        if not self.packs and not given.single:
            return renamed((inner.multiply(given._replace(weight="in place")),), names)
        packed = Scratch("packed", inner.packed_bytes(given))
        return renamed((inner.pack(given), inner.multiply(given)), {"packed": packed, **names})


def refusal(mode: str, p: Problem, gpu: Gpu) -> str | None:
    """Why a problem's tensors are not rearranged, whatever that would cost, in a sentence; None when they may be."""
    if too_long := family.too_long(p):
        return too_long
    if gpu.capability[0] != 9:
        return "that rearranging pays was measured on compute capability 9.0 alone"
    if p.precision not in ("tf32", "bf16", "fp16"):
        return "that rearranging pays was measured for TF32 and 16 bits alone"
    if reason := MODES[mode].refusal(p):
        return reason
    memory = MODES[mode].copies(p)[0] // 2
    if p.pass_ == "fwd" and memory > gpu.cache_bytes:
        return f"a forward's copies of {memory / 1e6:.3g} MB would not stay in the second-level cache"
    return None


def choose(q: Problem, gpu: Gpu) -> Inner | str:
    """The choice for a rearranged problem, or the sentence why there is none."""
    inner: tuple[Any, ...] = (wgrad,) if q.pass_ == "grad-weight" else (gather, pixels)
    found = [one.candidate(q, gpu) for one in inner]
    choices: list[Inner] = [choice for choice in found if not isinstance(choice, str)]
    return min(choices, key=call_seconds) if choices else str(found[0])


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> family.Choice | str:
    """As `upconv.cuda.family` asks; of no mode the sentences why not."""
    unshuffled = _faster("unshuffle", p, gpu, best, general)
    fastest = best if isinstance(unshuffled, str) else unshuffled
    return family.answer_of({"unshuffle": unshuffled, "relayout": _faster("relayout", p, gpu, fastest, general)})


def _faster(mode: str, p: Problem, gpu: Gpu, best: family.Choice | None, general: bool) -> Choice | str:
    """A mode's choice, or the sentence why it is not faster than the best so far."""
    if reason := refusal(mode, p, gpu):
        return reason
    if general:
        return "whether it pays depends on the size of the input"
    if best is None:
        return "there is no kernel for the tensors as they are, whose estimate would tell whether this pays"
    of = MODES[mode]
    q, (moved, launches) = of.rearranged(p), of.copies(p)
    copies = moved / (_RATE * gpu.bandwidth) + launches * RATES.launch
    bytes_alone, most = copies + q.bytes / gpu.bandwidth, call_seconds(best) - _GAIN
    if bytes_alone > most:  # so that nothing is searched
        return f"slower: {bytes_alone * 1e3:.3g} ms for its bytes alone, its tensors rearranged"
    inner = choose(q, gpu)
    if isinstance(inner, str):
        return inner
    found = Choice(mode, inner, p, Cost(inner.seconds + copies))
    if call_seconds(found) > most:
        return f"slower, or too little faster: {found.seconds * 1e3:.3g} ms by the model, its tensors rearranged"
    return found
