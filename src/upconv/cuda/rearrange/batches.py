"""Batches of small images as other problems, whose tensors have the same bytes in the same places.

Tiles of `upconv.cuda.gemm.gather` are neighbouring positions of an image, and images of 4 x 4 leave most of these
empty. Those of `upconv.cuda.pixels.implicit`, and the weight's in channels_last, are boxes of any shape. But images of
one pixel may be the pixels of one image (`Problem.flat`), and small ones lie side by side (`Problem.abreast`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from upconv.cuda.gpu import Gpu
from upconv.problem import Problem

LONGEST = 2**31 - 2**20
"""Positions along an axis that kernels count to: tiles and halos end beyond."""


def too_long(p: Problem) -> str | None:
    """Why kernels that count along an axis in 32 bits cannot serve a problem, in a sentence; None where they can."""
    longest = max(p.batch, *p.size, *p.out_size)
    if longest <= LONGEST:
        return None
    return f"the kernel counts along an axis in 32 bits, which {longest} elements are too many for"


def choose(search: Callable[..., Any], p: Problem, gpu: Gpu, general: bool, widest: int = 0) -> Any:
    """A family's best choice for a problem, or for one that is the same; or the sentence why it has none.

    Args:
        search: the family's ``choose(problem, gpu, general)``.
        general: of choices that serve every size of the input.
        widest: pixels along a side of images that are tried side by side, each by another search for tiles; of a
            weight's gradient none, since its chunks of small images may be boxes of any shape.
    """
    chosen = search(p, gpu, general)
    if general:
        return chosen
    if (flat := p.flat) is not None and not isinstance(other := search(flat, gpu), str):
        chosen = _faster(chosen, replace(other, flat=True))
    narrow = max(*p.size, *p.out_size) <= widest
    if narrow and (abreast := p.abreast) is not None:
        chosen = _faster(chosen, search(abreast, gpu))
    return chosen


def _faster(chosen: Any, other: Any) -> Any:
    if isinstance(other, str):
        return chosen
    return other if isinstance(chosen, str) or other.seconds < chosen.seconds else chosen
