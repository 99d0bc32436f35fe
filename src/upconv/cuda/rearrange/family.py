"""The family `rearrange`: gradients by another family's kernel on rearranged tensors."""

from __future__ import annotations

from upconv.cuda.family import Choice, answer_of
from upconv.cuda.gpu import Gpu
from upconv.cuda.rearrange import rearranged
from upconv.problem import Problem


def candidate(p: Problem, gpu: Gpu, best: Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks; of no mode the sentences why not."""
    unshuffled = rearranged.candidate("unshuffle", p, gpu, best, general)
    fastest = best if isinstance(unshuffled, str) else unshuffled
    return answer_of({"unshuffle": unshuffled, "relayout": rearranged.candidate("relayout", p, gpu, fastest, general)})
