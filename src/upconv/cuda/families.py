"""Kernel families: which there are, and the answer of each to a problem.

A family is a module of this package with the interface of `upconv.cuda.family`. The planner asks all of them and takes
the one that expects the least time. Nothing here needs a GPU or loads a compiler.
"""

from __future__ import annotations

from importlib import import_module

from upconv.cuda.family import Choice, best_of
from upconv.cuda.gpu import Gpu
from upconv.problem import Problem

FAMILIES = {
    "gather": "gemm.gather",
    "joined": "gemm.joined",
    "pixels": "pixels.family",
    "direct": "direct.direct",
    "rearrange": "rearrange.rearranged",
}
"""The kernel families of the forward and of the gradient for the input, and their modules of this package.

Of equals the first is taken.
"""
WEIGHT_FAMILIES = {"wgrad": "wgrad.wgrad", "direct": "direct.direct", "rearrange": "rearrange.rearranged"}
"""As `FAMILIES`, of the gradient for the weight."""


def choose(p: Problem, gpu: Gpu, general: bool = False) -> dict[str, Choice | str]:
    """Each family's best configuration for a problem, or the sentence why it has none.

    ``general``: of those that serve every size of the input (the CUDA-core families have no others).
    """
    found: dict[str, Choice | str] = {}
    for name, module in (WEIGHT_FAMILIES if p.pass_ == "grad-weight" else FAMILIES).items():
        found[name] = import_module(f"upconv.cuda.{module}").candidate(p, gpu, best_of(found), general)
    return found
