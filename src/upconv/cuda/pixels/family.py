"""The family `pixels`: of the modes that serve a layer the one that expects the least time."""

from __future__ import annotations

from functools import lru_cache

from upconv.cuda.family import Choice, answer_of, too_long
from upconv.cuda.gpu import Gpu
from upconv.cuda.pixels.choice import TileChoice, cheapest
from upconv.cuda.pixels.implicit import Implicit
from upconv.cuda.pixels.phases import Phases
from upconv.cuda.pixels.streamed import Pairs, Subpixel
from upconv.cuda.pixels.sweep import Sweep
from upconv.cuda.pixels.tile import Tile
from upconv.problem import Problem

MODES: dict[str, type[Tile]] = {mode.mode: mode for mode in (Phases, Subpixel, Pairs, Implicit, Sweep)}
"""Of equals the first is taken."""


@lru_cache(maxsize=4096)
def choose(mode: str, p: Problem, gpu: Gpu) -> TileChoice | str:
    """A mode's cheapest tile, or the sentence why it has none."""
    kind = MODES[mode]
    return kind.refusal(p, gpu) or cheapest(TileChoice, kind.candidates(p, gpu), p, gpu) or kind.none


def candidate(p: Problem, gpu: Gpu, best: Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks; of no mode the sentences why not."""
    if general:
        return "exported files have no host code for pixels as rows"
    serving = [mode for mode, kind in MODES.items() if (p.pass_, p.layout) in kind.serves]
    return too_long(p) or answer_of({mode: choose(mode, p, gpu) for mode in serving})
