"""A family's random choices: small random layers, and for each a tile that the family's search has for it."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import combinations, count, islice
from operator import or_
from pathlib import Path
from typing import Any, TypeVar

import torch

from results import Way, drawn_way
from upconv.cuda.axes import Unfit, any_size, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.cost import Cost
from upconv.cuda.direct import direct, plain, tiles
from upconv.cuda.gemm import gather, gather_search, joined
from upconv.cuda.gemm.shuffle import shuffled
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import A100, B200, H200, RTX3090, RTX4090, RTX5090, Gpu
from upconv.cuda.launches import Given, Launch, Pointer, Zeros
from upconv.cuda.pixels import implicit
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.family import MODES
from upconv.cuda.rearrange import rearranged
from upconv.cuda.wgrad import wgrad, wgrad_search
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import LAYOUTS, Layout, Pass, Precision, Problem, output_length, triple

DTYPES: dict[Precision, torch.dtype] = {
    "tf32": torch.float32,
    "ieee": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
WGMMA: tuple[Precision, ...] = ("tf32", "fp16", "bf16")
TENSOR: tuple[Precision, ...] = (*WGMMA, "ieee")
SCALAR: tuple[Precision, ...] = ("ieee", "fp16", "bf16", "fp64")
PASSES: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight")
FORWARD_LIKE, GRADIENTS = PASSES[:2], PASSES[1:]
GPUS = (A100, RTX3090, RTX4090, H200, B200, RTX5090)
MOST_MACS = 5e9  # of a layer, so that float64 does not take long
MOST = 3e7  # products of a small choice's tiles, padding included: an emulator takes a second for them

T = TypeVar("T")
Draw = Callable[[random.Random, Problem, Gpu], Any]


# --- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """Of what random layers are made; each number is one of its field's."""

    passes: tuple[Pass, ...]
    precisions: tuple[Precision, ...]
    layouts: tuple[Layout, ...] = LAYOUTS
    ranks: tuple[int, ...] = (1, 2, 2, 3)
    inputs: tuple[int, ...] = (1, 2, 3, 5, 8, 9, 17)
    """Channels of a group."""
    outputs: tuple[int, ...] = (1, 2, 3, 4, 8, 17, 33, 65, 70)
    groups: tuple[int, ...] = (1, 1, 1, 2, 3)
    heights: tuple[int, ...] = (1, 2, 3, 5, 8)
    widths: tuple[int, ...] = (1, 3, 7, 8, 12, 16, 20, 24, 33)
    """Of the last axis; of one dimension twice as wide."""
    kernels: tuple[int, ...] = (1, 2, 3, 3, 4, 5)
    strides: tuple[int, ...] = (1, 1, 2, 2, 3, 4)
    dilations: tuple[int, ...] = (1, 1, 1, 2, 3)
    paddings: int = 5
    """At most."""

    def draw(self, rng: random.Random, larger: int = 1) -> Problem:
        """``larger``: times as many images and, in half of the layers, rows and columns."""
        rank = rng.choice(self.ranks)
        groups, precision = rng.choice(self.groups), rng.choice(self.precisions)
        axes = []
        wider = rng.choice((1, larger))
        for axis in range(rank):
            size = rng.choice(self.heights if axis < rank - 1 else self.widths) * (2 if rank == 1 else 1) * wider
            kernel, stride, dilation = rng.choice(self.kernels), rng.choice(self.strides), rng.choice(self.dilations)
            if axis < rank - 2:
                kernel, stride = min(kernel, 3), min(stride, 3)
            more = rng.choice((0, 0, rng.randrange(max(stride, dilation))))
            free = output_length(size, kernel, stride, 0, more, dilation)
            axes.append((size, kernel, stride, rng.randint(0, min((free - 1) // 2, self.paddings)), more, dilation))
        size, kernel, stride, padding, more, dilation = zip(*axes)
        pass_ = rng.choice(self.passes)
        channels = groups * rng.choice(self.inputs), groups * rng.choice(self.outputs)
        return Problem.make(
            rng.randint(1, 3) * larger, *channels, size, kernel, stride, padding, more, dilation, groups,
            bias=pass_ == "fwd" and rng.random() < 0.5, dtype=DTYPES[precision], precision=precision,
            layout=rng.choice(self.layouts) if rank > 1 else "nchw", pass_=pass_,
        )  # fmt: skip


def gpus(rng: random.Random, gpu: Gpu) -> Gpu:
    """With fewer multiprocessors now and then, so that a block has several tiles."""
    return replace(gpu, multiprocessors=rng.choice((1, 2, 7, gpu.multiprocessors)))


def one_of(rng: random.Random, every: Iterable[T], most: int = 500) -> T | None:
    found = list(islice(every, most))
    return rng.choice(found) if found else None


# --- the families' tiles ---------------------------------------------------------------------------------------------


def gather_tilings(p: Problem, gpu: Gpu, rng: random.Random) -> Sequence[Tiling]:
    """Those of a random search for the layer: for any size or its own, by phases as rows, images side by side, ..."""
    classes = gather_search.classes_of(p) if p.layout == "nchw" else (1, 1)
    common: list[dict[str, Any]] = [{"classes": classes}, {"classes": classes, "wgmma": False}]
    special: list[dict[str, Any]] = [{"size": p.size}, {"size": p.size, "beside": True}]
    if gather_search.drains(p):
        special += [{"classes": classes, "drained": True}, {"size": p.size, "drained": True}]
    if shuffle := shuffled(any_size(p)):
        special.append({"classes": classes, "shuffle": shuffle})
    searches = rng.sample(special, len(special)) if rng.random() < 0.6 else []
    every = (gather_search.candidates(any_size(p), gpu, **how) for how in (*searches, rng.choice(common)))
    return next(filter(None, every), ())


def serves(t: Tiling, p: Problem) -> bool:
    """Whether a tiling of a layer at one size serves it at another."""
    if t.drained and not gather_search.drains(p):
        return False
    if t.whole is not None:
        return t.whole == triple(source_shape(p)[2:])
    return t.channels_last or not t.tensor_map or t.classes == gather_search.classes_of(p)


def gather_choice(rng: random.Random, p: Problem, gpu: Gpu, resized: bool = True) -> Any:
    """By a tile that was found for the layer's size, at that size or at another; now and then by clusters."""
    if gather_search.refusal(p, gpu) is not None:
        return None
    tiling = one_of(rng, gather_tilings(p, gpu, rng))
    if tiling is None:
        return None
    if rng.random() < 0.5:
        with suppress(Unfit):
            tiling = replace(tiling, cluster=rng.choice((2, 2, 3, 4))).checked(gpu.shared_bytes)
    if resized and rng.random() < 0.5:
        with suppress(ValueError):  # no output
            other = p.with_(size=tuple(max(1, rng.choice((n, n // 2, n + 3))) for n in p.size))
            p = other if serves(tiling, other) else p
    if not serves(tiling, p):
        return None
    cost = Cost(rng.choice((1e-6, 1e-3)))  # of a long call weights are packed
    return gather.Choice(tiling, p, gpus(rng, gpu), cost, general=rng.random() < 0.2)


def joined_choice(rng: random.Random, p: Problem, gpu: Gpu) -> Any:
    """Also by a tile that was chosen for longer rows."""
    if joined.refusal(p, gpu) is not None:
        return None
    width = rng.choice((p.size[-1], 24, 64, 128, 192))
    every = joined.candidates(p.with_(size=(*p.size[:-1], width)), gpu)
    tile = one_of(rng, (t for t in every if t.serves_width(p.size[-1])))
    return tile and joined.Choice(tile, p, gpus(rng, gpu), Cost(1e-5))


def pixels_choice(name: str) -> Draw:
    """Of the family's modes one."""
    mode = MODES[name]

    def choice(rng: random.Random, p: Problem, gpu: Gpu) -> Any:
        tile = one_of(rng, mode.candidates(p, gpu)) if mode.refusal(p, gpu) is None else None
        return tile and TileChoice(tile, p, gpus(rng, gpu), Cost(1e-5))

    return choice


def short_rings(mode: str, p: Problem, gpu: Gpu, stages: range) -> Iterator[Any]:
    """A tile of each way in which consumers share them, with the fewest of these stages that it can have."""
    every = implicit.alone(any_size(p), gpu) if mode == "implicit" else MODES[mode].candidates(p, gpu)
    ways = {tuple(getattr(t, name, None) for name in ("mb", "halves", "rows")): t for t in every}
    for t in ways.values():
        rings = (replace(t, stages=count) for count in stages if count <= t.stages)
        yield from islice((ring for ring in rings if ring.fits), 1)


@lru_cache(maxsize=1)
def wgrad_tilings(p: Problem, gpu: Gpu) -> list[Any]:
    """All, which takes long to list, of the layer that was asked for last."""
    return [] if wgrad.refusal(p, gpu) is not None else list(wgrad_search.candidates(p, gpu))


def wgrad_choice(rng: random.Random, p: Problem, gpu: Gpu, kind: type) -> Any:
    every = [t for t in wgrad_tilings(p, gpu) if isinstance(t, kind)]
    if not every:
        return None
    tiling = rng.choice(every)
    count = math.prod(tiling.counts(p))  # type: ignore[attr-defined]
    splits = min(count, rng.choice((1, 2, 3, 5, 9, 20)))
    return wgrad.Choice(tiling, p, gpus(rng, gpu), -(-count // -(-count // splits)), Cost(1e-5))  # none without work


def fitting(p: Problem, gpu: Gpu) -> list[tiles.Tile]:
    """The tiles of `direct` that a GPU can run."""
    found = ([tile for tile in tried if tile.fits(gpu.shared_bytes)] for tried in tiles.tried(p))
    return next(filter(None, found), [])


def direct_choice(rng: random.Random, p: Problem, gpu: Gpu) -> Any:
    every = fitting(p, gpu)
    tile = rng.choice(every) if every else None
    return tile and direct.Choice(p, tile, rng.choice((1, 2, 5)) if tile.weight else 1, Cost(1e-5))


def depthwise_choice(rng: random.Random, p: Problem, gpu: Gpu) -> Any:
    return direct_choice(rng, p.with_(out_channels=p.in_channels, groups=p.in_channels), gpu)


def plain_choice(rng: random.Random, p: Problem, gpu: Gpu) -> Any:
    return plain.candidate(p, gpu)


def rearranged_choice(mode: str) -> Callable[[random.Random, Problem, Gpu], Any]:
    """Draws a problem's choice by a mode of `rearrange`, whatever it is estimated to take."""

    def draw(rng: random.Random, p: Problem, gpu: Gpu) -> Any:
        if rearranged.refusal(mode, p, gpu) is not None:
            return None
        inner = rearranged.choose(rearranged.MODES[mode].rearranged(p), gpu)
        return None if isinstance(inner, str) else rearranged.Choice(mode, inner, p, Cost(1e-5))

    return draw


def of_the_same_bytes(rng: random.Random, p: Problem, other: str) -> Problem:
    """The layer, mostly changed so that it has another problem of this name (`upconv.problem`)."""
    zeros, ones = (0,) * p.rank, (1,) * p.rank
    bare: dict[str, Any] = {"padding": zeros, "output_padding": zeros, "dilation": ones}
    if rng.random() < 0.4:
        del bare[rng.choice(list(bare))]
    changes: dict[str, dict[str, Any]] = {
        "abreast": {"layout": "channels_last"},
        "flat": {**bare, "size": ones, "groups": 1, "bias": False, "layout": "nchw"},
    }
    return p.with_(**changes[other])


def batches_choice(rng: random.Random, p: Problem, gpu: Gpu) -> Any:
    """Of another problem whose tensors are the same bytes (`gather.candidate`): with the layer's own."""
    other = rng.choice(("abreast", "flat"))
    try:
        p = of_the_same_bytes(rng, p, other)
    except ValueError:  # no output
        return None
    q: Problem | None = getattr(p, other)
    if q is None:
        return None
    choice = gather_choice(rng, q, gpu, resized=False)
    if choice is not None and other == "flat":
        choice = replace(choice, flat=True)
    return choice and (choice, p)


_GATHER = Layers(
    FORWARD_LIKE, TENSOR, inputs=(4, 8, 16, 40, 72, 136), outputs=(3, 8, 16, 23, 40, 64, 72, 136),
    heights=(1, 3, 4, 5, 6, 7, 8, 9, 11, 16), widths=(1, 3, 4, 6, 7, 8, 9, 12, 16, 17, 20), dilations=(1, 1, 2, 3, 9),
)  # fmt: skip
_DENSE = replace(_GATHER, layouts=("nchw",), dilations=(1,))
GATHER = (
    Layers(FORWARD_LIKE, TENSOR),
    _GATHER,
    replace(_GATHER, layouts=("channels_last",), ranks=(2, 2, 3), outputs=(8, 16, 40, 64, 72, 136)),
    # Many taps, or phases, along W.
    replace(_GATHER, ranks=(1,), kernels=(3, 7, 8, 9, 16), strides=(1, 2, 4, 8, 20), dilations=(1,)),
    # Slices without taps, of many outputs.
    replace(_DENSE, passes=("fwd",), ranks=(3,), inputs=(8,), heights=(3, 9, 30), widths=(15, 16), kernels=(1, 2, 3),
            strides=(2, 2, 4)),
    # Small images, whole and side by side.
    replace(_DENSE, heights=(4, 8, 16), widths=(4, 8, 16, 32), kernels=(1, 2, 3, 4), strides=(1, 2, 4)),
    replace(_DENSE, passes=("fwd",), heights=(1, 2, 3, 4, 6), widths=(1, 2, 3, 4, 6), kernels=(3, 4), strides=(1, 2),
            paddings=1),
    # Few output channels, whose phases are rows of M.
    replace(_DENSE, passes=("fwd",), layouts=LAYOUTS, groups=(1,), inputs=(3, 16), outputs=(1, 2, 3, 5),
            strides=(1, 2, 3)),
    # Rows of 16 bits that the copy engine may store.
    replace(_DENSE, passes=("fwd",), precisions=("fp16", "bf16"), ranks=(2,), groups=(1,), inputs=(16,),
            outputs=(8, 40, 72, 136), heights=(2, 3, 5, 9), widths=(8, 16, 24), kernels=(1, 2, 3, 4, 6),
            strides=(1, 2, 4), paddings=1),
)  # fmt: skip
WGRAD = (
    Layers(("grad-weight",), WGMMA, inputs=(4, 8, 16, 24, 32, 72), outputs=(1, 3, 4, 8, 16, 40),
           widths=(4, 8, 12, 16, 24, 33)),
    # Neighbouring taps of a wide stride, and columns of taps, whose rows of x follow each other.
    Layers(("grad-weight",), WGMMA, ("nchw",), (1, 2), (8, 16), (32, 72), kernels=(2, 4, 8, 16), strides=(2, 4, 8),
           dilations=(1, 2), widths=(16, 24, 32), paddings=4),
    Layers(("grad-weight",), WGMMA, LAYOUTS, (2, 2, 3), (16, 24, 40, 64), (16, 32, 64), (1,), widths=(16, 24),
           kernels=(1, 2, 3, 4, 5, 5), strides=(1, 1, 1, 2, 3), dilations=(1,), paddings=0),
    # Input channels that fill no power of two; weights of many elements.
    Layers(("grad-weight",), WGMMA, LAYOUTS, (1, 2, 2), (40, 48, 70, 80, 96, 256, 320), (32,), (1,), heights=(1, 3),
           widths=(16, 32), kernels=(1, 2, 3), strides=(1, 3), dilations=(1,), paddings=1),
    Layers(("grad-weight",), WGMMA, LAYOUTS, (2,), (64, 128, 192), (64, 128, 192), (1,), heights=(3, 8, 16),
           widths=(8,), kernels=(2, 4), strides=(1, 2), dilations=(1,), paddings=0),
    # Rows that begin off 16 bytes, at few places.
    Layers(("grad-weight",), WGMMA, ("nchw",), (2, 3), (16,), (32, 48), (1, 2), heights=(2, 5, 6, 7, 8),
           widths=(24, 32, 64), kernels=(2, 3), strides=(1,), dilations=(1,), paddings=1),
    # Long columns of taps.
    Layers(("grad-weight",), WGMMA, ("channels_last",), (2,), (16, 24, 40), (16, 32), (1,), widths=(16, 24),
           kernels=(4, 5), strides=(1,), dilations=(1,), paddings=0),
)  # fmt: skip
FEW = (1, 2, 3, 5)
ALIGNED = (4, 8, 12, 16, 20, 24, 32, 40)
FAMILIES: dict[str, tuple[Layers | tuple[Layers, ...], Draw]] = {
    "gather": (GATHER, gather_choice),
    "joined": (
        Layers(("fwd",), WGMMA, ("nchw",), (2, 3), groups=(1,), widths=ALIGNED, strides=(1,)),
        joined_choice,
    ),
    "implicit": (
        Layers(FORWARD_LIKE, WGMMA, ("channels_last",), (2, 2, 3), (7, 8, 16, 40), (8, 33, 40, 64), (1,), (1, 2, 5),
               (1, 3, 8, 9, 20), strides=(1, 2, 2, 3, 5)),
        pixels_choice("implicit"),
    ),
    "subpixel": (
        Layers(("fwd",), WGMMA, ("nchw",), (1, 2, 2, 3), (1, 5, 24, 70), (1, 3, 20), (1,), widths=ALIGNED,
               kernels=(1, 2, 2, 3, 4), strides=(1, 2, 2, 3, 4), dilations=(1,), paddings=0),
        pixels_choice("subpixel"),
    ),
    "pairs": (
        Layers(("grad-input",), WGMMA, ("nchw",), (1, 1, 2, 2, 3), (1, 9, 33), (1, 9, 33), (1,), widths=ALIGNED,
               kernels=(2, 3, 4, 4, 5, 6, 8), strides=(2, 2, 3, 4, 8), dilations=(1,), paddings=4),
        pixels_choice("pairs"),
    ),
    "pairs, forward": (
        Layers(("fwd",), WGMMA, ("nchw",), (1,), (1, 9, 33), (1, 9, 33), (1,), widths=ALIGNED,
               kernels=(1, 2, 3, 4, 5, 6, 8, 16, 25), strides=(2, 2, 3, 4, 5, 8), dilations=(1,), paddings=11),
        pixels_choice("pairs"),
    ),
    "sweep": (
        Layers(FORWARD_LIKE, WGMMA, ranks=(3,), inputs=(1, 3, 8, 17, 40), outputs=(1, 2, 5, 8, 11, 24), groups=(1,),
               heights=(1, 2, 4, 6, 9), widths=(1, 4, 7, 8, 12, 13, 16, 20), kernels=(1, 2, 3, 4), strides=(1,)),
        pixels_choice("sweep"),
    ),
    "phases": (
        Layers(("fwd",), WGMMA, ("nchw",), (1, 2, 2, 3), (1, 5, 8, 19, 40), (1, 3, 8, 12, 20), (1,), widths=ALIGNED,
               kernels=(2, 3, 3, 4, 5, 7), strides=(1, 2, 2, 3, 4, 5)),
        pixels_choice("phases"),
    ),
    "wgrad by mma.sync": (
        Layers(("grad-weight",), TENSOR, inputs=(4, 5, 8, 17, 32, 72), outputs=(1, 3, 4, 8, 17, 40)),
        lambda rng, p, gpu: wgrad_choice(rng, p, gpu, SyncTiling),
    ),
    "wgrad by wgmma": (WGRAD, lambda rng, p, gpu: wgrad_choice(rng, p, gpu, WarpgroupTiling)),
    "direct": (
        Layers(("fwd",), SCALAR, inputs=(1, 3, 4, 8, 16), outputs=(1, 2, 3, 4, 9, 17), groups=(1, 1, 2, 3, 8),
               widths=(1, 3, 4, 8, 12, 16, 20, 33)),
        direct_choice,
    ),
    "direct gradients": (
        Layers(GRADIENTS, SCALAR, inputs=(1, 2, 3, 8), outputs=(1, 2, 3, 5), groups=(1, 2, 3)), direct_choice,
    ),
    "direct depthwise": (
        Layers(PASSES, SCALAR, inputs=(1, 2, 3, 10, 16, 33), groups=(1,)), depthwise_choice,
    ),
    "plain": (Layers(PASSES, SCALAR, dilations=(1, 1, 2, 3, 50)), plain_choice),
    "unshuffle": (
        Layers(GRADIENTS, WGMMA, inputs=(8, 16, 40), outputs=FEW, groups=(1,), strides=(2, 3), dilations=(1,)),
        rearranged_choice("unshuffle"),
    ),
    "relayout": (
        Layers(PASSES, WGMMA, inputs=(8, 16, 24, 30), outputs=(8, 16, 17, 32), groups=(1,)),
        rearranged_choice("relayout"),
    ),
    "batches": (
        Layers(FORWARD_LIKE, WGMMA, ranks=(2, 2, 3), inputs=(8, 16, 40), outputs=(8, 24, 40),
               groups=(1, 1, 2), widths=(2, 4, 7, 8), kernels=(2, 3, 4)),
        batches_choice,
    ),
}  # fmt: skip
"""Of what layers, and the choice of a random tile for one; None where the kernel has none."""


def gather_work(t: Tiling, p: Problem) -> float:
    """Products of a layer's tiles, padding included."""
    tiles_of = math.prod(t.counts(p)) * p.groups * t.cout_blocks
    return float(tiles_of * math.prod(t.tile) * 64 * t.wgs_m * t.multiplied.total * t.chunks * t.chunk)


def work(choice: Any) -> float:
    """Products of a choice's tiles, padding included, as far as that may be far more than a layer's."""
    p = choice.problem
    if isinstance(choice, gather.Choice):
        return gather_work(choice.tiling, p)
    if isinstance(choice, wgrad.Choice):
        t = choice.tiling
        taps = t.set_taps * t.block[1] + t.block[0]  # type: ignore[attr-defined]
        return float(math.prod(t.counts(p)) * t.tiles * math.prod(t.tile) * taps * 64)  # type: ignore[attr-defined]
    if isinstance(choice, TileChoice) and choice.tile.mode == "implicit":
        tile = choice.tile
        return float(tile.tiles(p) * max(tile.steps) * tile.rows * tile.columns * 128 // tile.element)
    return 0.0


@dataclass(frozen=True)
class Case:
    """A random choice, the problem whose tensors it takes, and how it is called."""

    choice: Any
    problem: Problem
    way: Way

    @property
    def launches(self) -> tuple[Launch, ...]:
        way, reads = self.way, self.choice.reads
        order = "channels_last" if way.last and not way.strided else "contiguous"
        form = "in place" if order == reads and self.problem.pass_ != "grad-weight" else order
        found: tuple[Launch, ...] = self.choice.launches(Given(form, way.single, lasting=way.once, aligned=not way.off))
        return found

    @property
    def work(self) -> float:
        return work(getattr(self.choice, "inner", self.choice))


def case(family: str, seed: int, gpu: Gpu = H200, larger: int = 1) -> Case | None:
    """A family's random choice of this seed, if there is one."""
    rng = random.Random(f"{family} {seed}")
    layers, draw = FAMILIES[family]
    p = (layers if isinstance(layers, Layers) else rng.choice(layers)).draw(rng, larger)
    if p.macs > MOST_MACS or (found := draw(rng, p, gpu)) is None:
        return None
    choice, tensors = found if isinstance(found, tuple) else (found, found.problem)
    made = Case(choice, tensors, drawn_way(tensors, choice.casts, rng.randrange(2**30)))
    return made if larger > 1 or made.work < MOST else None


def choices(family: str, gpu: Gpu = H200, larger: int = 1) -> Iterator[tuple[Any, Problem]]:
    """A family's random choices, each with the problem whose tensors it takes."""
    for seed in count():
        if (found := case(family, seed, gpu, larger)) is not None:
            yield found.choice, found.problem


# --- few cases with every mode ---------------------------------------------------------------------------------------

CASES = Path(__file__).with_name("cases.json")
"""Each family's seeds of few cases, which this file writes as a program."""
DRAWS, MOST_CASES = 300, 6
MANY = {"gather": (2400, 90), "wgrad by wgmma": (700, 32), "wgrad by mma.sync": (300, 14), "batches": (300, 14)}
"""Of families with many modes more draws, and more cases of these."""
CONSTANT = re.compile(r"static constexpr (?:bool|int) (\w+) = (true|false|-?\d+);")
Mode = tuple[str, str]


def modes(case: Case) -> set[Mode]:
    """Of a case the problem and the way, what the choice and its tile say of themselves, and its kernels' constants."""
    inner = getattr(case.choice, "inner", case.choice)
    found = [(name, getattr(case.problem, name)) for name in ("pass_", "layout", "precision", "rank")]
    found += vars(case.way).items()
    found += told(inner)
    found += told(getattr(inner, "tile", None) or getattr(inner, "tiling", None))
    for launch in case.launches:
        found += CONSTANT.findall(jit.parts_of(launch.unit.source)[0])
        found += [("entry", launch.entry), ("cooperative", launch.cooperative), ("few blocks", launch.grid < 3)]
        found += [("zeros", any(isinstance(a, Pointer) and isinstance(a.operand, Zeros) for a in launch.arguments))]
    return {(name, coarse(value)) for name, value in found}


def told(of: Any) -> Iterator[tuple[str, Any]]:
    """An object's flags, numbers, pairs of these, and how sums end."""
    for name in dir(of):
        with suppress(Exception):  # what other tiles have
            value = getattr(of, name) if name[0] != "_" else None
            several = value if isinstance(value, tuple) and len(value) < 3 else (value,)
            if all(isinstance(one, int) for one in several) or name == "ending":
                yield name, value


def coarse(value: Any) -> str:
    """Of numbers only small ones and powers of two have names of their own."""
    if isinstance(value, tuple):
        return " ".join(map(coarse, value))
    text = str(value).lower()
    number = int(text) if text.lstrip("-").isdigit() else 0
    return text if -1 <= number < 4 or number.bit_count() == 1 else "more"


def of_few(every: Sequence[set[Mode]], most: int) -> list[set[Mode]]:
    """Without those of which there are more: they are sizes."""
    names = Counter(name for name, _ in set().union(*every))
    return [{mode for mode in own if names[mode[0]] <= most} for own in every]


def words(modes: set[Mode]) -> set[Mode]:
    """Those that are no numbers."""
    return {(name, value) for name, value in modes if not re.fullmatch(r"[-\d ]*|.*more.*", value)}


def covering(every: Sequence[Case], most: int) -> list[int]:
    """Few of the cases, by number: with every mode, and with as many pairs of flags as so few can have.

    In turn the one with the most that none before has, for its time.
    """
    have = of_few([modes(case) for case in every], 6)
    pairs = [set(combinations(sorted(own), 2)) for own in of_few(have, 3)]
    found: list[int] = []
    for has in have, pairs:
        bits = {one: 1 << i for i, one in enumerate(set[Any]().union(*has))}
        masks = [sum(bits[one] for one in own) for own in has]
        left = sum(bits.values()) & ~reduce(or_, (masks[i] for i in found), 0)
        news = [(mask, 1 + 4 * case.work / MOST) for mask, case in zip(masks, every)]
        while left and len(found) < most:
            found.append(max(range(len(every)), key=lambda i: (news[i][0] & left).bit_count() / news[i][1]))
            left &= ~masks[found[-1]]
    return found


def main() -> None:
    found = {}
    for family in FAMILIES:
        draws, most = MANY.get(family, (DRAWS, MOST_CASES))
        every = {seed: one for seed in range(draws) if (one := case(family, seed)) is not None}
        chosen = covering(list(every.values()), most)
        found[family] = sorted(list(every)[i] for i in chosen)
    lines = ",\n".join(f"{json.dumps(family)}: {json.dumps(seeds)}" for family, seeds in found.items())
    CASES.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
