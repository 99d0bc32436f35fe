"""How families choose that look at a layer's tiles by a cost model and serve one kind of size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from upconv.cuda.cost import Cost
from upconv.cuda.family import Choice
from upconv.cuda.gpu import Gpu
from upconv.cuda.rearrange import batches
from upconv.problem import Problem


class Tiled(Protocol):
    def tiles(self, p: Problem) -> int: ...


T = TypeVar("T")
C = TypeVar("C", bound=Choice)
A = TypeVar("A", bound=Tiled)


def countable(tiles: Callable[[Problem, Gpu], Iterable[A]]) -> Callable[[Problem, Gpu], Iterator[A]]:
    """Of these, those whose tiles a kernel counts in 32 bits, a grid beyond the last."""
    return lambda p, gpu: (t for t in tiles(p, gpu) if t.tiles(p) < 2**31 - gpu.multiprocessors)


class Chooser(Generic[T, C]):
    """A family's ``choose``: the cheapest tile by its model, or the sentence why there is none. Answers are kept.

    Args:
        refusal: why the kernels cannot serve a problem, in a sentence; None when they may.
        tiles: those that can run it.
        estimate: what a problem takes by a tile.
        choice: of a tile, problem, GPU and cost.
        general: why there is none that serves every size of the input, as exported files must.
        none: why there is none where `tiles` has none.
    """

    def __init__(
        self,
        refusal: Callable[[Problem, Gpu], str | None],
        tiles: Callable[[Problem, Gpu], Iterable[T]],
        estimate: Callable[[T, Problem, Gpu], Cost],
        choice: Callable[[T, Problem, Gpu, Cost], C],
        *,
        general: str = "exported files have no host code for pixels as rows",
        none: str | Callable[[Problem, Gpu], str],
    ) -> None:
        def found(p: Problem, gpu: Gpu) -> C | str:
            refused = refusal(p, gpu)
            if refused:
                return refused
            timed = ((estimate(t, p, gpu), t) for t in tiles(p, gpu))
            best = min(timed, key=lambda one: one[0].seconds, default=None)
            if best is None:
                return none if isinstance(none, str) else none(p, gpu)
            cost, tile = best
            return choice(tile, p, gpu, cost)

        self._found = lru_cache(maxsize=4096)(found)
        self._general = general

    def __call__(self, p: Problem, gpu: Gpu, general: bool = False) -> C | str:
        """``general``: of choices that serve every size of the input, of which there are none."""
        return self._general if general else self._found(p, gpu)

    def candidate(self, p: Problem, gpu: Gpu, best: Choice | None = None, general: bool = False) -> C | str:
        """As `upconv.cuda.family` asks."""
        return batches.too_long(p) or self(p, gpu, general)

    def cache_clear(self) -> None:
        """Forgets the answers."""
        self._found.cache_clear()
