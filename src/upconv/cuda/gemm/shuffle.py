"""Strided layers of few output channels, or of wide strides, in the gather-GEMM: phases are rows of M.

A transposed convolution of stride s to C channels is one without a stride to ``C s^n`` channels, whose pixels are then
shuffled (Shi et al., Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel Convolutional
Neural Network, 2016). A matrix instruction has 64 rows, of which the strided layer fills ``C`` for each phase along W.
Here the tiling is that of the layer without a stride (`Shuffle.unstrided`), whose rows of M are channels and phases;
only the packed weights and the epilogue know of the stride (``kernels/shuffle.cuh``). No memory is needed: the results
of one q lie ``s`` outputs apart from the next one's, and the epilogue writes whole lines.

A large stride along W gains by it with many channels too: a consumer's registers hold four of its phases, so that the
strided layer's tiles write 16 of 32 bytes and other tiles those between (docs/experiments.md).

Per axis, with the padding p: an output is ``o + p = q s + u``, a tap ``k = a s + u``, and phase u at q sums input
``q - a`` times tap a. Counting q from the first one that has an output leaves ``lead = p mod s`` outputs of it before
the image, and one position more than the image has strides: 33 for the 64 columns of a GAN's output of stride 2 and
padding 1. With ``s - lead`` taps of zeros `ahead` of the kernel (and the padding so much larger) there is no lead, and
a phase has a tap more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from upconv.cuda.gpu import ROWS_M
from upconv.derived import derived
from upconv.problem import Problem, Triple, triple

SLAB = 16  # rows of M that a warp has
# From which on more rows gain than an instruction has: other tiles hold fewer phases along W than there are, and store
# between each other's results.
_WIDE_STRIDE = 5


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
    if rows.rows > ROWS_M and (rows.channels_last or p.stride[-1] < _WIDE_STRIDE):
        return f"{p.out_channels} channels in {math.prod(p.stride)} phases take more than {ROWS_M} rows"
    return None


def countable(p: Problem) -> bool:
    """Whether the kernel's 32-bit counts are enough for a layer's weights and, in channels_last, rows of its output."""
    row = (p.out_size[-1] + 2**16) * (p.out_channels if p.layout == "channels_last" else 1)
    return max(row, math.prod(p.weight_shape)) < 2**31


def ways(p: Problem) -> tuple[Shuffle, ...]:
    """The ways to make phases rows of M; none where `refusal` says why."""
    if refusal(p) is not None:
        return ()
    found = Shuffle(p), Shuffle(p, ahead=True)
    return found if any(found[0].leads) else found[:1]


@dataclass(frozen=True)
class Shuffle:
    """How a strided layer's channels and phases are rows of M. Rows that are neighbours in memory make lines."""

    layer: Problem
    ahead: bool = False
    """Whether zeros ahead of the kernel take the place of outputs before the image."""

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
        return triple(tuple(-pad % s * self.ahead for pad, s in ends), 0)

    @derived
    def leads(self) -> Triple:
        """Outputs of the first position along D, H, W that the padding has cut off."""
        ends = zip(self.layer.padding, self.layer.stride)
        return triple(tuple(pad % s * (not self.ahead) for pad, s in ends), 0)

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
        d, h, w = (-(-(n + lead) // s) for n, lead, s in zip(out, self.leads, self.strides))
        return d, h, w

    def line_words(self, run: int) -> int:
        """Words of a line in the epilogue's buffer, for a run of positions; the last let lines meet different banks."""
        return (run + 1) * self.inner

    def constants(self) -> dict[str, int]:
        """The kernel's, beside those of the layer without a stride."""
        found = {"inner": self.inner, "lines": self.lines, "per_slab": self.per_slab}
        for name, stride, kernel, lead, zeros in zip("dhw", self.strides, self.kernel, self.leads, self.zeros):
            found |= {f"layer_stride_{name}": stride, f"layer_kernel_{name}": kernel}
            found |= {f"lead_{name}": lead, f"zeros_{name}": zeros}
        return found
