"""The family `pixels`: of the modes that serve a layer the one that expects the least time."""

from __future__ import annotations

from upconv.cuda.family import Choice, answer_of
from upconv.cuda.gpu import Gpu
from upconv.cuda.pixels.choice import Chooser, TileChoice
from upconv.cuda.pixels.implicit import IMPLICIT
from upconv.cuda.pixels.phases import PHASES
from upconv.cuda.pixels.streamed import PAIRS, SUBPIXEL
from upconv.cuda.pixels.sweep import SWEEP
from upconv.problem import Problem

MODES: dict[str, Chooser[TileChoice]] = {
    "implicit": IMPLICIT,
    "subpixel": SUBPIXEL,
    "pairs": PAIRS,
    "phases": PHASES,
    "sweep": SWEEP,
}
_MODES = {
    ("fwd", "nchw"): ("phases", "subpixel", "sweep"),
    ("grad-input", "nchw"): ("pairs", "sweep"),
    ("fwd", "channels_last"): ("implicit", "sweep"),
    ("grad-input", "channels_last"): ("implicit", "sweep"),
}
"""Those for a problem's pass and layout."""


def candidate(p: Problem, gpu: Gpu, best: Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks; of no mode the sentences why not."""
    return answer_of({mode: MODES[mode].candidate(p, gpu, best, general) for mode in _MODES[p.pass_, p.layout]})
