"""The family `direct`: CUDA cores, for few channels of a group and float64; or `plain`, which serves every layer."""

from __future__ import annotations

from typing import Any

from upconv.cuda.direct import direct, plain
from upconv.cuda.family import Choice, weighed
from upconv.cuda.gpu import Gpu
from upconv.problem import Problem


def candidate(p: Problem, gpu: Gpu, best: Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks; the sentence why not, where `plain` alone has a choice, and is no faster."""
    tiled: Any = direct.candidate(p, gpu, best, general)
    slow: Any = plain.candidate(p, gpu)
    if not isinstance(tiled, str):
        return min(tiled, slow, key=weighed)
    return slow if best is None or weighed(slow) < weighed(best) else tiled
