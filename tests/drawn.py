"""A family's random choices: small random layers, and for each a tile that the family's search has for it."""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

import torch

from upconv.cuda.axes import Unfit, any_size
from upconv.cuda.compile import jit
from upconv.cuda.cost import Cost
from upconv.cuda.direct import direct, plain, tiles
from upconv.cuda.gemm import gather, gather_search, joined
from upconv.cuda.gemm.shuffle import shuffled
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import A100, B200, H200, RTX3090, RTX4090, RTX5090, Gpu
from upconv.cuda.pixels import implicit
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.family import MODES
from upconv.cuda.rearrange import rearranged
from upconv.cuda.wgrad import wgrad, wgrad_search
from upconv.cuda.wgrad.wgrad_tiling import SyncTiling
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import LAYOUTS, Layout, Pass, Precision, Problem, output_length

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


def gather_choice(rng: random.Random, p: Problem, gpu: Gpu) -> Any:
    """At any size, at the layer's own, with images side by side, with phases as rows, or stored by the copy engine."""
    if gather_search.refusal(p, gpu) is not None:
        return None
    classes = gather_search.classes_of(p) if p.layout == "nchw" else (1, 1)
    if classes is None:
        return None
    searches: list[dict[str, Any]] = [{"classes": classes}, {"classes": classes, "wgmma": False}, {"size": p.size}]
    searches.append({"size": p.size, "beside": True})
    searches += [{"classes": classes, "drained": True}] if gather_search.drains(p) else []
    shuffle = shuffled(any_size(p))
    searches += [{"classes": classes, "shuffle": shuffle}] if shuffle else []
    tiling = one_of(rng, gather_search.candidates(any_size(p), gpu, **rng.choice(searches)))
    if tiling is None or (p.layout == "nchw" and tiling.tensor_map and tiling.classes != classes):
        return None  # rows that boxes do not bring
    if rng.random() < 0.2:
        try:
            tiling = replace(tiling, cluster=rng.choice((2, 3))).checked(gpu.shared_bytes)
        except Unfit:
            return None
    return gather.Choice(tiling, p, gpus(rng, gpu), Cost(rng.choice((1e-6, 1e-3))))


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
    splits = min(math.prod(tiling.counts(p)), rng.choice((1, 2, 3, 5)))  # type: ignore[attr-defined]
    return wgrad.Choice(tiling, p, gpus(rng, gpu), splits, Cost(1e-5))


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
    choice = gather_choice(rng, q, gpu)
    if choice is not None and other == "flat":
        choice = replace(choice, flat=True)
    return choice and (choice, p)


FEW = (1, 2, 3, 5)
ALIGNED = (4, 8, 12, 16, 20, 24, 32, 40)
FAMILIES: dict[str, tuple[Layers, Draw]] = {
    "gather": (Layers(FORWARD_LIKE, TENSOR), gather_choice),
    "gather, few sizes": (
        Layers(FORWARD_LIKE, TENSOR, inputs=(4, 8, 16, 40), heights=(1, 4, 8), widths=(4, 8, 16, 24), paddings=1),
        gather_choice,
    ),
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
    "wgrad by wgmma": (
        Layers(("grad-weight",), WGMMA, inputs=(4, 8, 16, 24, 32, 72), outputs=(1, 3, 4, 8, 16, 40),
               widths=(4, 8, 12, 16, 24, 33)),
        lambda rng, p, gpu: wgrad_choice(rng, p, gpu, WarpgroupTiling),
    ),
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


def choices(family: str, gpu: Gpu = H200, larger: int = 1) -> Iterator[tuple[Any, Problem]]:
    """A family's random choices, in an order of their own, each with the problem whose tensors it takes."""
    rng = random.Random(f"drawn {family}")
    layers, draw = FAMILIES[family]
    while True:
        p = layers.draw(rng, larger)
        if p.macs > MOST_MACS or (found := draw(rng, p, gpu)) is None:
            continue
        choice, tensors = found if isinstance(found, tuple) else (found, found.problem)
        if larger > 1 or work(getattr(choice, "inner", choice)) < MOST:
            yield choice, tensors


FLAG = re.compile(r"static constexpr (?:bool|int) (\w+) = (true|false|\d{1,2});")


def modes(choice: Any) -> set[tuple[str, str, str]]:
    """What a choice's kernels are: their constants that are flags or small numbers, the pass, the layout, the dtype."""
    p = choice.problem
    found = {("", "pass", f"{p.pass_} {p.layout}"), ("", "precision", p.precision)}
    for unit in choice.sources():
        struct, file = jit.parts_of(unit.source)
        found |= {(file, name, value) for name, value in FLAG.findall(struct)}
    return found


def varied(family: str, draws: int, most: int) -> list[tuple[Any, Problem]]:
    """Few of so many random choices that together have all values of each constant that has up to four."""
    have = [
        ((choice, p), modes(choice), work(getattr(choice, "inner", choice)) / MOST)
        for choice, p in islice(choices(family), draws)
    ]
    values: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for _, own, _ in have:
        for file, name, value in own:
            values[file, name].add(value)
    return covering(have, {(*of, value) for of, every in values.items() if len(every) <= 4 for value in every})[:most]


def covering(have: Sequence[tuple[T, set[Any], float]], left: set[Any]) -> list[T]:
    """Few that together have all that is left: the cheapest of those with the most that none before has, in turn."""
    found: list[T] = []
    while left:
        one, own, _ = max(have, key=lambda each: len(each[1] & left) / (1 + each[2]))
        found.append(one)
        left = left - own
    return found
