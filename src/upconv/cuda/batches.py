"""Batches of small images as other problems, whose tensors have the same bytes in the same places.

Tiles of `upconv.cuda.gather` and chunks of `upconv.cuda.wgrad` are neighbouring positions of an image, and images of
4 x 4 leave most of these empty (NOTES: 512->256 k4 s2 on 128 of them in channels_last, bfloat16: forward, gradient for
the input, for the weight 53, 46, 52 us; PyTorch's 25, 30, 25). But images of one pixel may be the pixels of one image
(`Problem.flat`), small ones lie side by side (`Problem.abreast`), and, where the kernel is the stride, one below the
other (`Problem.stacked`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from upconv.cuda.gpu import Gpu
from upconv.problem import Problem

# Pixels along a side of images that are tried side by side, each by another search for tiles. What tiles of larger ones
# read comes from many places of the memory (NOTES: 256->256 k2 s2 on 512 images of 14 x 14, gradient for the input in
# TF32 274 -> 343 us, where the model has 226 -> 198).
_LARGEST = {"gather": 16, "wgrad": 32}
_ROWS = 16  # of an image that tiles have, at most: only what ends amid them is tried one below the other
_FEWEST = 8  # of them, a group of columns
_GAIN = 0.95  # of the other choice's time, since both are estimates


def choose(family: Any, p: Problem, gpu: Gpu, general: bool = False) -> Any:
    """A family's best choice for a problem, or for one that is the same; or the sentence why it has none.

    ``general``: of those that serve every size of the input.
    """
    chosen = family.choose(p, gpu, general)
    largest = _LARGEST.get(family.__name__.rpartition(".")[2])  # of these families' choices some are for such a problem
    if general or largest is None:
        return chosen
    flat = p.flat
    if flat is not None:
        chosen = _faster(chosen, _flattened(family.choose(flat, gpu)))
    if max(*p.size, *p.out_size) <= largest and p.batch >= _FEWEST and (abreast := p.abreast) is not None:
        chosen = _faster(chosen, family.choose(abreast, gpu), _GAIN)
    if p.batch > 1 and p.size[0] % _ROWS and (stacked := p.stacked) is not None:
        chosen = _faster(chosen, family.choose(stacked, gpu), _GAIN)
    return chosen


def _flattened(choice: Any) -> Any:
    return choice if isinstance(choice, str) else replace(cast(Any, choice), flat=True)


def _faster(chosen: Any, other: Any, gain: float = 1.0) -> Any:
    if isinstance(other, str):
        return chosen
    return other if isinstance(chosen, str) or other.seconds < gain * chosen.seconds else chosen
