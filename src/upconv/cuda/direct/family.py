"""The family `direct`: CUDA cores, for few channels of a group and for float64. Of its modes the fastest is taken."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from upconv.cuda.direct import direct, plain, staged
from upconv.cuda.family import Choice, answer_of, best_of, weighed
from upconv.cuda.gpu import Gpu
from upconv.problem import Pass, Problem

MODES: dict[Pass, tuple[ModuleType, ...]] = {
    "fwd": (direct,),
    "grad-input": (staged,),
    "grad-weight": (staged,),
}
"""Those of a pass, beside `plain`, which serves every layer."""


def candidate(p: Problem, gpu: Gpu, best: Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks; the sentences why not, where `plain` alone has a choice, and is no faster."""
    found: dict[str, Choice | str] = {}
    for mode in MODES[p.pass_]:
        others: dict[str, Choice | str] = found if best is None else {**found, "": best}
        found[mode.__name__] = mode.candidate(p, gpu, best_of(others), general)
    slow: Any = plain.candidate(p, gpu)
    fastest = best_of(found)
    if fastest is not None:
        return min(fastest, slow, key=weighed)
    if best is None or weighed(slow) < weighed(best):
        return slow
    return answer_of(found)
