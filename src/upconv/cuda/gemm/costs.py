"""The constants of the gather-GEMM's cost model.

Those of NCHW are fitted to 1,792 timed tilings of 242 layers and passes on an H200, 2 to 22 each; `_OTHERS` is of an
earlier fit to 1,500. Of what was timed the model chooses tilings that take 1.5% longer than the best, where one set of
constants for all took 2.6%; within a layer its error is 6%, and a layer's times are off by 15%. Those of channels_last
are fitted to 276 tilings of 63 layers and passes, timed with the epilogue of whole pixels: it chooses what takes 0.7%
longer than a layer's best, and a time is off by 10%. Those of IEEE float32 are fitted to 1,325 tilings of 121 forwards
and gradients for the input, of which they choose what takes 1.5% (channels_last 0.7%) longer, times off by 14% (9%). No
tiling by mma.sync or in float16 was among any; channels_last by mma.sync has the new epilogue's formula with the
constants of `_OTHERS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from upconv.cuda.gemm.tiling import Tiling

T = TypeVar("T")
C = TypeVar("C")

LAUNCH = 3.5e-6  # seconds, that kernels take beside their tiles


@dataclass(frozen=True)
class Constants:
    """What the steps of a tile take, in clocks of a multiprocessor unless said otherwise."""

    step: tuple[float, float]
    """A step beyond its matrix instructions: of 64 columns, of 128 (`Tiling.wide`)."""
    drain: tuple[float, float]
    """The end of a stretch, likewise."""
    l2: float
    """Bytes a clock from L2: pixels, and to it outputs."""
    l2_weights: float
    """The same of weights, which all blocks read at about the same time."""
    row: float
    """Bytes that a row of a channels-last tile costs beside its own."""
    overlap: float
    """Share of the lesser of matrix instructions and L2 that the other does not hide."""
    exposed: float
    """Share of the waits for copies that nothing hides."""
    store: float
    """Bytes a clock that an epilogue stores."""
    store_share: float
    """Share of the epilogue that nothing hides where both consumers store at once."""
    lag: tuple[float, float]
    """An instruction of the epilogue, for a warp: both consumers store, one does."""
    tile: float
    """What else a tile takes."""
    turn: float
    """From one consumer's turn to the other's."""
    chunk: tuple[float, float]
    """A chunk, as the next is waited for; of 8 channels in TF32, shared by consumers."""
    turning: tuple[float, float, float]
    """The producers' pass: of a chunk; of 32 bytes of a pixel, float32, halves (which lie turned in channels-last)."""
    latency: float
    """From a copy's request to its use."""
    sector: float = 0.0
    """NCHW: bytes of a run that the unfilled sectors at its ends cost."""
    ragged_turn: float = 0.0
    """NCHW: more of a tile, where it stores float32 rows that are not aligned."""
    lost: float = 0.0
    """Channels-last: share of a line's rest that comes anew where the cache has lost it (`gather_model._LINES`)."""
    scale: float = 1.0
    """Factor of all of a tile's clocks, so that other families compare."""


# 3-D layers' forward in NCHW, which the other fit does not suit; mma.sync.
_OTHERS = Constants(
    step=(6.1, 5.9),
    drain=(190.0, 140.0),
    l2=29.0,
    l2_weights=29.0,
    row=0.0,
    overlap=0.14,
    exposed=0.0,
    store=15.0,
    sector=213.0,
    store_share=0.33,
    lag=(2.9, 4.2),
    tile=700.0,
    turn=177.0,
    ragged_turn=200.0,
    chunk=(138.0, 40.0),
    turning=(604.0, 93.0, 112.0),
    latency=885.0,
    lost=0.5,
)
# 1-D and 2-D layers' forward in NCHW.
_FORWARD = Constants(
    step=(3.08, 15.8),
    drain=(296.0, 253.0),
    l2=22.3,
    l2_weights=66.0,
    row=0.0,
    overlap=0.223,
    exposed=0.151,
    store=15.5,
    sector=165.0,
    store_share=0.416,
    lag=(3.6, 4.86),
    tile=414.0,
    turn=283.0,
    ragged_turn=1.69,
    chunk=(132.0, 291.0),
    turning=(649.0, 120.0, 143.0),
    latency=1140.0,
    scale=0.915,
)
# Gradients for the input in NCHW.
_GRAD_INPUT = replace(
    _FORWARD,
    step=(0.607, 15.8),
    drain=(281.0, 221.0),
    l2_weights=62.7,
    exposed=0.108,
    sector=182.0,
    lag=(3.6, 5.37),
    tile=449.0,
    turn=312.0,
    chunk=(136.0, 146.0),
    turning=(608.0, 120.0, 117.0),
    latency=901.0,
)
# Boxes bring pixels, and epilogues store outputs, more than twice as fast as in NCHW. So more tiles share their chunks
# than go in turn.
_CHANNELS_LAST = Constants(
    step=(5.71, 0.0165),
    drain=(523.0, 537.0),
    l2=49.7,
    l2_weights=28.0,
    row=8.23,
    overlap=0.0617,
    exposed=0.0961,
    store=35.2,
    store_share=0.924,
    lag=(3.64, 6.97),
    tile=164.0,
    turn=4.74,
    chunk=(0.319, 0.425),
    turning=(622.0, 103.0, 0.0),
    latency=2820.0,
    lost=0.957,
    scale=0.974,
)

# The same where planes come one by one: the loader is never far behind, so that tiles are large and chunks long.
_PLANEWISE = replace(
    _CHANNELS_LAST,
    step=(6.29, 0.0165),
    drain=(803.0, 417.0),
    l2=70.4,
    l2_weights=39.2,
    row=52.0,
    overlap=0.252,
    exposed=0.0641,
    store=29.8,
    store_share=0.386,
    lag=(1.33, 2.54),
    tile=1119.0,
    latency=1251.0,
    lost=0.989,
    scale=0.795,
)

# IEEE float32 by wgmma, forwards and gradients for the input: three matrix instructions for two fragments of weights,
# and sums that leave the tensor cores behind every stretch, which consumers in turn cannot hide from each other. TF32's
# constants therefore choose turns too often.
_IEEE = Constants(
    step=(5.38, 10.8),
    drain=(296.0, 253.0),
    l2=38.4,
    l2_weights=65.3,
    row=0.0,
    overlap=0.545,
    exposed=0.103,
    store=14.4,
    sector=30.1,
    store_share=0.429,
    lag=(2.86, 4.16),
    tile=1130.0,
    turn=1650.0,
    ragged_turn=506.0,
    chunk=(61.7, 0.0),
    turning=(0.0, 69.2, 0.0),
    latency=611.0,
    scale=0.831,
)
_IEEE_CHANNELS_LAST = Constants(
    step=(4.23, 0.0),
    drain=(297.0, 315.0),
    l2=66.4,
    l2_weights=68.3,
    row=62.0,
    overlap=0.142,
    exposed=0.108,
    store=25.8,
    store_share=0.501,
    lag=(5.68, 12.1),
    tile=1270.0,
    turn=592.0,
    chunk=(103.0, 0.0),
    turning=(252.0, 201.0, 0.0),
    latency=817.0,
    lost=0.956,
    scale=0.912,
)

SETS = {
    "1-D, 2-D forward": _FORWARD,
    "3-D forward, mma.sync": _OTHERS,
    "gradient for the input": _GRAD_INPUT,
    "channels_last": _CHANNELS_LAST,
    "planes one by one": _PLANEWISE,
    "IEEE float32": _IEEE,
    "IEEE float32, channels_last": _IEEE_CHANNELS_LAST,
}
"""All sets by what they are for: the first and third of NCHW by wgmma, the second of NCHW's 3-D forward and of all
mma.sync, the fourth and fifth of channels_last by wgmma, the last two of IEEE float32 by wgmma."""


def set_of(t: Tiling) -> str:
    """Which of `SETS` a tiling's clocks are counted with."""
    if t.parts == 2 and t.wgmma:
        return "IEEE float32, channels_last" if t.channels_last else "IEEE float32"
    if t.planewise:
        return "planes one by one"
    if t.channels_last and t.wgmma:
        return "channels_last"
    if not t.wgmma or (not t.channels_last and t.problem.rank == 3 and t.problem.pass_ == "fwd"):
        return "3-D forward, mma.sync"
    return "1-D, 2-D forward" if t.problem.pass_ == "fwd" else "gradient for the input"


def constants(t: Tiling) -> Constants:
    """Those of a tiling."""
    return SETS[set_of(t)]
