"""All arithmetic of transposed convolution, in one place.

Per spatial dimension, output index ``o``, tap ``k`` (an index into the kernel) and input index ``i`` meet when

    o + padding = i * stride + k * dilation

Outputs with the same residue ``r = (o + padding) mod stride`` form a *phase*. A phase uses the taps
``{k : k * dilation mod stride == r}`` and no others, and with ``q = (o + padding - r) / stride`` it reads
``i = q - (k * dilation - r) / stride``: a correlation of stride 1 with fixed offsets. In several dimensions the phases
multiply. The taps of all phases together are each tap once. Outputs whose residue no tap has are just the bias: such
residues are not listed as phases, so that describing a layer takes no longer for a larger stride.

Planner, engines, reference, bench and tests take sizes, phases and taps from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Literal

import torch

from upconv.derived import derived

Precision = Literal["tf32", "ieee", "bf16", "fp16", "fp64"]
Layout = Literal["nchw", "channels_last"]
Pass = Literal["fwd", "grad-input", "grad-weight", "step"]

PRECISIONS: dict[torch.dtype, tuple[Precision, ...]] = {
    torch.float32: ("ieee", "tf32"),
    torch.bfloat16: ("bf16",),
    torch.float16: ("fp16",),
    torch.float64: ("fp64",),
}
"""The precisions in which a dtype can be multiplied; the first is the default."""

PASSES: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight", "step")

Triple = tuple[int, int, int]
"""Along D, H and W."""


def triple(values: Sequence[int], lone: int = 1) -> Triple:
    """Along D, H and W, with ``lone`` for an axis that a layer does not have."""
    d, h, w = (*(lone,) * (3 - len(values)), *values)
    return d, h, w


LAYOUTS: tuple[Layout, ...] = ("nchw", "channels_last")


def output_length(size: int, kernel: int, stride: int, padding: int, output_padding: int, dilation: int) -> int:
    """Output length of one dimension, in pixels; may be zero or negative when the padding eats everything."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


@dataclass(frozen=True)
class AxisPhase:
    """One phase of one dimension: outputs ``o = start + j * stride`` for ``j`` in ``range(count)``."""

    residue: int
    """``r = (o + padding) mod stride`` of every output of the phase."""
    taps: tuple[int, ...]
    """Kernel indices, rising."""
    offsets: tuple[int, ...]
    """``(k * dilation - r) / stride`` for each tap: the output at ``q`` reads input ``q - offset``. Evenly spaced."""
    first: int
    """The ``q`` of the phase's first output."""
    count: int
    """How many outputs the phase has; may be zero."""
    start: int
    """The phase's first output index ``o``."""

    @property
    def step(self) -> int:
        """Distance between neighbouring offsets: the dilation of the phase's correlation; 1 for a lone tap."""
        return self.offsets[1] - self.offsets[0] if len(self.offsets) > 1 else 1


@dataclass(frozen=True)
class Phase:
    """The outputs that share a residue in every dimension, and therefore their taps."""

    axes: tuple[AxisPhase, ...]

    @property
    def taps(self) -> Iterator[tuple[int, ...]]:
        """Every tap of the phase as a kernel index per dimension."""
        return product(*(a.taps for a in self.axes))

    @property
    def tap_count(self) -> int:
        return math.prod(len(a.taps) for a in self.axes)

    @property
    def output_count(self) -> int:
        """Output pixels of the phase (per image and channel)."""
        return math.prod(a.count for a in self.axes)


@dataclass(frozen=True)
class Problem:
    """One transposed convolution, described once; hashable, so it keys planner, caches, tests and bench.

    Shapes: input ``(batch, in_channels, *size)``, weight ``(in_channels, out_channels // groups, *kernel)``, output
    ``(batch, out_channels, *out_size)``. All tuples have one entry per spatial dimension (1 to 3 of them).

    Raises:
        ValueError: one sentence that names the field and the value that fit no transposed convolution.
    """

    batch: int
    in_channels: int
    out_channels: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    bias: bool = False
    dtype: torch.dtype = torch.float32
    precision: Precision = "ieee"
    layout: Layout = "nchw"
    pass_: Pass = "fwd"
    batch_as_width: bool = False
    """channels_last: the last of three dimensions is a batch of images (`Problem.abreast`), the outermost in memory."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.size) <= 3:
            raise ValueError(f"size must have 1 to 3 spatial dimensions, got {self.size}")
        for name in ("kernel", "stride", "padding", "output_padding", "dilation"):
            value = getattr(self, name)
            if len(value) != self.rank:
                raise ValueError(f"{name} must have {self.rank} values like size {self.size}, got {value}")
        for name, least in (
            ("size", 0),
            ("kernel", 1),
            ("stride", 1),
            ("padding", 0),
            ("output_padding", 0),
            ("dilation", 1),
        ):
            value = getattr(self, name)
            if min(value) < least:
                raise ValueError(f"{name} must be at least {least} in every dimension, got {value}")
        for op, s, d in zip(self.output_padding, self.stride, self.dilation):
            if op >= s and op >= d:
                raise ValueError(
                    "output_padding must be smaller than either stride or dilation, got "
                    f"output_padding={self.output_padding} with stride={self.stride} and dilation={self.dilation}"
                )
        if self.batch < 0:
            raise ValueError(f"batch must be at least 0, got {self.batch}")
        if self.groups < 1:
            raise ValueError(f"groups must be at least 1, got {self.groups}")
        for name in ("in_channels", "out_channels"):
            value = getattr(self, name)
            if value < 1 or value % self.groups:
                raise ValueError(f"{name} must be a positive multiple of groups={self.groups}, got {value}")
        if self.dtype not in PRECISIONS:
            raise ValueError(f"dtype must be one of float32, bfloat16, float16 and float64, got {self.dtype}")
        if self.precision not in PRECISIONS[self.dtype]:
            raise ValueError(
                f"precision must be one of {PRECISIONS[self.dtype]} for {self.dtype}, got {self.precision!r}"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {LAYOUTS}, got {self.layout!r}")
        if self.pass_ not in PASSES:
            raise ValueError(f"pass must be one of {PASSES}, got {self.pass_!r}")
        if self.batch_as_width and (self.rank != 3 or self.layout != "channels_last" or self.batch != 1):
            raise ValueError(
                "batch_as_width must be of one image of three dimensions in channels_last, got "
                f"batch={self.batch}, size={self.size}, layout={self.layout!r}"
            )
        if min(self.out_size) < 1 and min(self.size) > 0:
            raise ValueError(f"padding={self.padding} leaves no output: input size {self.size} gives {self.out_size}")

    def __hash__(self) -> int:
        """Kept, since planning looks problems up thousands of times: 0.1 us instead of 1.8."""
        kept: int | None = self.__dict__.get("_hash")
        if kept is None:
            kept = hash(tuple(getattr(self, field.name) for field in fields(self)))
            self.__dict__["_hash"] = kept
        return kept

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}  # strings hash anew elsewhere

    @classmethod
    def make(
        cls,
        batch: int,
        in_channels: int,
        out_channels: int,
        size: Sequence[int],
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        precision: Precision | None = None,
        layout: Layout = "nchw",
        pass_: Pass = "fwd",
    ) -> Problem:
        """Builds a Problem from a layer's arguments; a single integer stands for every dimension, as in torch."""

        def full(value: int | Sequence[int]) -> tuple[int, ...]:
            values = (value,) if isinstance(value, int) else tuple(value)
            return values * len(size) if len(values) == 1 else values

        if dtype not in PRECISIONS:
            raise ValueError(f"dtype must be one of float32, bfloat16, float16 and float64, got {dtype}")
        return cls(
            batch, in_channels, out_channels, tuple(size), full(kernel), full(stride), full(padding),
            full(output_padding), full(dilation), groups, bias, dtype, precision or PRECISIONS[dtype][0], layout, pass_,
        )  # fmt: skip

    def with_(self, **changes: object) -> Problem:
        """The same problem with some fields changed; a dtype that lacks the present precision gets its default one."""
        dtype = changes.get("dtype", self.dtype)
        if "precision" not in changes and dtype in PRECISIONS and self.precision not in PRECISIONS[dtype]:
            changes["precision"] = PRECISIONS[dtype][0]
        return replace(self, **changes)  # type: ignore[arg-type]

    # --- sizes -------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Spatial dimensions: 1, 2 or 3."""
        return len(self.size)

    @derived
    def out_size(self) -> tuple[int, ...]:
        axes = zip(self.size, self.kernel, self.stride, self.padding, self.output_padding, self.dilation)
        return tuple(output_length(*axis) for axis in axes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.in_channels, *self.size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.out_channels // self.groups, *self.kernel)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.batch, self.out_channels, *self.out_size)

    @property
    def depthwise(self) -> bool:
        """One input channel per group."""
        return self.groups > 1 and self.groups == self.in_channels

    # --- phases ------------------------------------------------------------------------------------------------------

    @derived
    def axis_phases(self) -> tuple[tuple[AxisPhase, ...], ...]:
        """For each dimension its phases that have taps, by rising residue: at most ``kernel`` of them.

        >>> [[phase.taps for phase in axis] for axis in Problem.make(1, 1, 1, (4,), kernel=3, stride=2).axis_phases]
        [[(0, 2), (1,)]]
        """
        axes = zip(self.kernel, self.stride, self.padding, self.dilation, self.out_size)
        return tuple(_axis_phases(*axis) for axis in axes)

    @derived
    def phases(self) -> tuple[Phase, ...]:
        """All phases that have taps; their taps partition the kernel, and every other output is just the bias."""
        return tuple(Phase(axes) for axes in product(*self.axis_phases))

    @property
    def phase_count(self) -> int:
        """Phases that have taps, without listing them."""
        return math.prod(map(len, self.axis_phases))

    @property
    def tapless_phases(self) -> int:
        """Residues, one per dimension, that no tap has; some of them may have no outputs either."""
        return math.prod(self.stride) - self.phase_count

    @property
    def taps(self) -> int:
        """Taps of the whole kernel."""
        return math.prod(self.kernel)

    @property
    def flat(self) -> Problem | None:
        """The same pass as a layer of kernel 1 whose pixels are this one's batch; None unless images have one pixel.

        Where the taps of an image's only pixel are its outputs, input and output are matrices of a row for each image,
        which is channels_last: of ``in_channels`` and of ``out_channels * taps`` columns. Every tensor has the same
        bytes in the same places, the weight if it is contiguous.
        """
        one = self.layout == "nchw" and self.groups == 1 and not self.bias and set(self.size) == {1} and self.taps > 1
        if not one or self.out_size != self.kernel or any(self.padding) or any(self.output_padding):
            return None
        columns, pixels = self.out_channels * self.taps, (1, self.batch)
        return replace(
            self, batch=1, out_channels=columns, size=pixels, kernel=(1, 1), stride=(1, 1), padding=(0, 0),
            output_padding=(0, 0), dilation=(1, 1), layout="channels_last",
        )  # fmt: skip

    @property
    def abreast(self) -> Problem | None:
        """The same pass of one image of three dimensions, whose width is this one's batch; None but for channels_last
        images of two.

        Every tensor has the same bytes in the same places. A tile then has no halo along its width, and small images
        leave nothing of it empty.
        """
        if self.layout != "channels_last" or self.rank != 2 or self.batch < 1:
            return None
        return replace(
            self, batch=1, size=(*self.size, self.batch), kernel=(*self.kernel, 1), stride=(*self.stride, 1),
            padding=(*self.padding, 0), output_padding=(*self.output_padding, 0), dilation=(*self.dilation, 1),
            batch_as_width=True,
        )  # fmt: skip

    @property
    def lifted(self) -> Problem:
        """A pass of one dimension as the same of two, of images with one row; others as they are."""
        if self.rank > 1:
            return self
        return replace(
            self, size=(1, *self.size), kernel=(1, *self.kernel), stride=(1, *self.stride), padding=(0, *self.padding),
            output_padding=(0, *self.output_padding), dilation=(1, *self.dilation),
        )  # fmt: skip

    # --- the roof's two terms ----------------------------------------------------------------------------------------

    @property
    def macs(self) -> int:
        """Multiplications of one pass: every (input pixel, tap) pair for every channel pair of a group.

        Pairs that fall on outputs which the padding crops are counted, as ``torch.utils.flop_counter`` counts them.
        """
        channels = self.in_channels * (self.out_channels // self.groups)
        return self.batch * math.prod(self.size) * self.taps * channels

    @property
    def flops(self) -> int:
        """Useful floating-point operations: two per multiplication; a step is a forward and two gradients."""
        return 2 * self.macs * (3 if self.pass_ == "step" else 1)

    @property
    def bytes(self) -> int:
        """Compulsory bytes: each tensor that the pass must read or write moves once.

        A forward moves input, weight, bias and output, and each gradient three of the tensors of the same sizes. A step
        is a forward and two gradients, which cannot share a read.
        """
        item = self.dtype.itemsize
        three = math.prod(self.input_shape) + math.prod(self.weight_shape) + math.prod(self.output_shape)
        bias = self.out_channels if self.bias else 0
        per_pass = {"fwd": three + bias, "grad-input": three, "grad-weight": three, "step": 3 * three + 2 * bias}
        return item * per_pass[self.pass_]

    def roof_seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The least time that the pass can take: the larger of its arithmetic and its bytes at the two ceilings.

        The roofline model: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
        """
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)

    @property
    def layer(self) -> str:
        """The layer and its input's shape in words, without dtype, layout and pass."""
        parts = [
            f"{self.in_channels}->{self.out_channels}",
            f"k{short(self.kernel)}",
            f"s{short(self.stride)}",
            f"p{short(self.padding)}",
        ]
        if any(self.output_padding):
            parts.append(f"op{short(self.output_padding)}")
        if any(d != 1 for d in self.dilation):
            parts.append(f"d{short(self.dilation)}")
        if self.groups != 1:
            parts.append(f"g{self.groups}")
        return f"{' '.join(parts)} on {'x'.join(map(str, self.input_shape))}"

    def __str__(self) -> str:
        batch = " (batch as width)" if self.batch_as_width else ""
        return f"{self.layer} {dtype_name(self.dtype)} {self.layout}{batch} {self.pass_}"


def short(values: Sequence[int]) -> str:
    """A value for each dimension, in few characters: one for all where they are the same."""
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as people write it, like ``float32``."""
    return str(dtype).removeprefix("torch.")


def _axis_phases(kernel: int, stride: int, padding: int, dilation: int, out: int) -> tuple[AxisPhase, ...]:
    taps: dict[int, list[int]] = {}
    for k in range(kernel):
        taps.setdefault(k * dilation % stride, []).append(k)
    return tuple(_axis_phase(r, tuple(taps[r]), stride, padding, dilation, out) for r in sorted(taps))


def _axis_phase(residue: int, taps: tuple[int, ...], stride: int, padding: int, dilation: int, out: int) -> AxisPhase:
    offsets = tuple((k * dilation - residue) // stride for k in taps)
    start = (residue - padding) % stride
    count = max(0, -(-(out - start) // stride))
    return AxisPhase(residue, taps, offsets, (start + padding - residue) // stride, count, start)


def is_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether PyTorch reads these strides as channels_last (4-D) or channels_last_3d (5-D).

    The channels must be innermost, then the spatial dimensions from last to first, then the batch, each at least as far
    apart as the one before needs. Sizes of 1 leave room for doubt, which PyTorch resolves for channels_last, save where
    the batch has the channels' stride. Source: ``c10/core/MemoryFormat.h``.
    """
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * shape[d] if shape[d] > 1 else strides[d]
    return True
