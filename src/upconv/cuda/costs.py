"""The constants of the gather-GEMM's cost model.

Fitted to 1,792 timed tilings of 242 layers and passes on an H200, 2 to 22 each; `_OTHERS` is of an earlier fit to
1,500, `_PLANEWISE` of a later one to 176, of which it chooses what takes 0.6% longer than a layer's best. Of what was
timed the model chooses tilings that take 1.5% longer than the best, where one set of constants for all took 2.6%;
within a layer its error is 6%, and a layer's times are off by 15%. No tiling by mma.sync, float16 or gradient in IEEE
float32 was among them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from upconv.cuda.tiling import Tiling


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
    """Channels-last: share of a line's rest that comes anew where the cache has lost it (`gather._LINES`)."""
    scale: float = 1.0
    """Factor of all of a tile's clocks, so that other families compare (NOTES: the forward's times are right on
    average, those of gradients in NCHW 4% too long, of channels_last 9%)."""


# 3-D layers' forward in NCHW, where the other fit lost 5 to 11% on kb61 and kb73; mma.sync.
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
# NOTES: pixels come at 49 bytes a clock where NCHW's boxes bring 22, but a row of a box costs as much as 41 bytes
# more: so chunks are long (unet4's gradient for the input in TF32 440 -> 409 us), and whole tiles go in turn (pix's in
# bfloat16 108 -> 101).
_CHANNELS_LAST = Constants(
    step=(7.0, 0.0165),
    drain=(431.0, 314.0),
    l2=49.2,
    l2_weights=51.0,
    row=41.0,
    overlap=0.215,
    exposed=0.0991,
    store=20.4,
    store_share=0.4,
    lag=(1.86, 3.65),
    tile=915.0,
    turn=4.76,
    chunk=(0.319, 0.425),
    turning=(622.0, 103.0, 0.0),
    latency=1840.0,
    lost=0.989,
)

# The same where planes come one by one: the loader is never far behind, so that tiles are large and chunks long
# (NOTES: unet1's gradient for the input in TF32 213 -> 183 us).
_PLANEWISE = replace(
    _CHANNELS_LAST,
    step=(6.29, 0.0165),
    drain=(803.0, 417.0),
    l2=58.9,
    l2_weights=32.4,
    row=52.0,
    overlap=0.252,
    exposed=0.0641,
    store=29.9,
    store_share=0.383,
    lag=(1.33, 2.54),
    tile=985.0,
    turn=4.77,
    latency=1251.0,
    scale=0.852,
)

SETS = {
    "1-D, 2-D forward": _FORWARD,
    "3-D forward, mma.sync": _OTHERS,
    "gradient for the input": _GRAD_INPUT,
    "channels_last": _CHANNELS_LAST,
    "planes one by one": _PLANEWISE,
}
"""All sets by what they are for: the first and third of NCHW by wgmma, the second of NCHW's 3-D forward and of all
mma.sync, the last two of channels_last by wgmma."""


def constants(t: Tiling) -> Constants:
    """Those of a tiling."""
    if t.planewise:
        return _PLANEWISE
    if t.channels_last:
        return _CHANNELS_LAST if t.wgmma else _OTHERS
    if not t.wgmma or (t.problem.rank == 3 and t.problem.pass_ == "fwd"):
        return _OTHERS
    return _FORWARD if t.problem.pass_ == "fwd" else _GRAD_INPUT
