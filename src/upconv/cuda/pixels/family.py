"""The family `pixels`: of the modes that serve a layer the one that expects the least time."""

from __future__ import annotations

from types import ModuleType

from upconv.cuda.family import Choice, answer_of
from upconv.cuda.gpu import Gpu
from upconv.cuda.pixels import implicit, pairs, phases, subpixel, sweep
from upconv.problem import Problem


def modes(p: Problem) -> tuple[ModuleType, ...]:
    """Those for a problem's pass and layout."""
    if p.layout == "channels_last":
        return implicit, sweep
    return (phases, subpixel, sweep) if p.pass_ == "fwd" else (pairs, sweep)


def candidate(p: Problem, gpu: Gpu, best: Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks; of no mode the sentences why not."""
    return answer_of({mode.__name__: mode.choose.candidate(p, gpu, best, general) for mode in modes(p)})
