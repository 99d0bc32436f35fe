"""Strided layers of few output channels in the gather-GEMM: phases are rows of M.

A transposed convolution of stride s to C channels is one without a stride to ``C s^n`` channels, whose pixels are then
shuffled (Shi et al., Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel Convolutional
Neural Network, 2016). A matrix instruction has 64 rows, of which the strided layer fills ``C`` for each phase along W.
Here the tiling is that of the layer without a stride (`Shuffle.unstrided`), whose rows of M are channels and phases;
only the packed weights and the epilogue know of the stride (``kernels/shuffle.cuh``). No memory is needed: the results
of one q lie ``s`` outputs apart from the next one's, and the epilogue writes whole lines.

Per axis, with the padding p: an output is ``o + p = q s + u``, a tap ``k = a s + u``, and phase u at q sums input
``q - a`` times tap a. Zeros ahead of the kernel make the padding a multiple of the stride, so that the first position
has no outputs before the image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from upconv.cuda.gpu import ROWS_M
from upconv.derived import derived
from upconv.problem import Problem, Triple, triple

SLAB = 16  # rows of M that a warp has


def refusal(p: Problem) -> str | None:
    """Why a layer's phases are no rows of M, in a sentence; None when they may be."""
    if p.pass_ != "fwd" or math.prod(p.stride) == 1:
        return "only a forward with a stride has phases to shuffle"
    if p.batch_as_width:
        return "neighbouring outputs of images side by side are no line of memory"
    if p.groups > 1 or max(p.dilation) > 1:
        return "only taps side by side, of layers without groups, are sorted by phase"
    rows = Shuffle(p)
    if rows.inner > SLAB:
        return f"{rows.inner} neighbouring outputs of a position are more than the {SLAB} rows of a warp"
    if rows.rows > ROWS_M:
        return f"{p.out_channels} channels in {math.prod(p.stride)} phases take more than {ROWS_M} rows"
    return None


def countable(p: Problem) -> bool:
    """Whether the kernel's 32-bit counts are enough for a layer's weights and, in channels_last, rows of its output."""
    row = (p.out_size[-1] + 2**16) * (p.out_channels if p.layout == "channels_last" else 1)
    return max(row, math.prod(p.weight_shape)) < 2**31


def shuffled(p: Problem) -> Shuffle | None:
    """How phases are rows of M; None where `refusal` says why not."""
    return Shuffle(p) if refusal(p) is None else None


@dataclass(frozen=True)
class Shuffle:
    """How a strided layer's channels and phases are rows of M. Rows that are neighbours in memory make lines."""

    layer: Problem

    @derived
    def unstrided(self) -> Problem:
        """The layer without its stride, whose output channels are rows of M: channels and phases, and some empty ones.

        Its output may be smaller by some positions than what a strided output takes, whose number is `positions`.
        """
        p = self.layer
        ends = tuple(zip(p.kernel, p.padding, p.stride, self.zeros[3 - p.rank :]))
        taps = tuple(-(-(k + zeros) // s) for k, _, s, zeros in ends)
        crop = tuple((pad + zeros) // s for _, pad, s, zeros in ends)
        return Problem.make(
            p.batch, p.in_channels, self.rows, p.size, taps, 1, crop, dtype=p.dtype, precision=p.precision, bias=False,
            layout=p.layout,
        )  # fmt: skip

    @derived
    def strides(self) -> Triple:
        return triple(self.layer.stride)

    @derived
    def kernel(self) -> Triple:
        return triple(self.layer.kernel)

    @derived
    def zeros(self) -> Triple:
        """Taps of zeros ahead of the kernel along D, H, W."""
        ends = zip(self.layer.padding, self.layer.stride)
        return triple(tuple(-pad % s for pad, s in ends), 0)

    @property
    def channels_last(self) -> bool:
        return self.layer.layout == "channels_last"

    @property
    def inner(self) -> int:
        """Rows that are neighbours in memory at one position: phases along W, in channels_last with all channels."""
        return self.strides[2] * (self.layer.out_channels if self.channels_last else 1)

    @property
    def lines(self) -> int:
        """Sets of so many rows: each phase along D and H, in NCHW of each channel."""
        return self.strides[0] * self.strides[1] * (1 if self.channels_last else self.layer.out_channels)

    @property
    def per_slab(self) -> int:
        """Lines of a warp's rows."""
        return min(SLAB // self.inner, self.lines)

    @property
    def used(self) -> int:
        """Rows that are stored."""
        return self.inner * self.lines

    @property
    def rows(self) -> int:
        """Rows with those that complete a warp's."""
        return SLAB * -(-self.lines // max(1, self.per_slab))

    def positions(self, out: Triple) -> Triple:
        """Positions q along D, H, W that an output of this size takes."""
        d, h, w = (-(-n // s) for n, s in zip(out, self.strides))
        return d, h, w

    def line_words(self, run: int) -> int:
        """Words of a line in the epilogue's buffer, for a run of positions; the last let lines meet different banks."""
        return (run + 1) * self.inner

    def constants(self) -> dict[str, int]:
        """The kernel's, beside those of the layer without a stride."""
        found = {"inner": self.inner, "lines": self.lines, "per_slab": self.per_slab}
        for name, stride, kernel, zeros in zip("dhw", self.strides, self.kernel, self.zeros):
            found |= {f"layer_stride_{name}": stride, f"layer_kernel_{name}": kernel, f"zeros_{name}": zeros}
        return found
