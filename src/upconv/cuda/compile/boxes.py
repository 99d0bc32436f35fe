"""What the tensor copy engine reads or writes: tensors of five dimensions, in boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from upconv.cuda.gpu import MAX_BOX
from upconv.problem import triple

Five = tuple[int, int, int, int, int]

MAX_CLASSES = 8  # of rows and channels: a box each, and a tensor map of 128 bytes among the kernel's arguments


@dataclass(frozen=True)
class Tensor5:
    """A tensor, or one class of its rows and channels, as the tensor copy engine sees it, innermost dimension first."""

    begin: int
    """Bytes from the tensor's begin."""
    dims: Five
    strides: tuple[int, int, int, int]
    """In bytes, of all dimensions but the first."""

    def channels_second(self) -> Tensor5:
        """Of W, H, D, channels and images the same with channels behind W, so that a box has rows of all channels."""
        (w, h, d, c, n), (row, slice_, channel, image) = self.dims, self.strides
        return Tensor5(self.begin, (w, c, h, d, n), (channel, row, slice_, image))


def dense(dims: Five, element: int) -> Tensor5:
    """A dense tensor of these dimensions, innermost first, of elements of so many bytes."""
    a, b, c, e = (math.prod(dims[:i]) * element for i in range(1, 5))
    return Tensor5(0, dims, (a, b, c, e))


def channels_last(
    batch: int, channels: int, size: Sequence[int], element: int, batch_as_width: bool = False
) -> Tensor5:
    """A dense tensor in channels_last: channels, W, H, D, images. ``batch_as_width``: `Problem.batch_as_width`."""
    d, h, w = triple(size)
    if not batch_as_width:
        return dense((channels, w, h, d, batch), element)
    pixel = channels * element
    return Tensor5(0, (channels, w, h, d, batch), (d * h * pixel, pixel, h * pixel, d * h * w * pixel))


def of_class(
    batch: int, channels: int, size: Sequence[int], element: int, rows: tuple[int, int], channels_: tuple[int, int]
) -> Tensor5:
    """One class of a dense NCHW tensor's rows along H and of its channels: W, H, D, channels, images.

    ``rows``, ``channels_``: how many classes there are, and which. Its rows begin at 16 bytes and so early: with the
    end of the row before (their lead).
    """
    (of_rows, j), (of_channels, k) = rows, channels_
    d, h, w = triple(size)
    row, channel = w * element, d * h * w * element
    begin = k * channel + j * row
    dims = (w + begin % 16 // element, -(-(h - j) // of_rows), d, -(-(channels - k) // of_channels), batch)
    units = of_channels * channel  # of a dimension of one the stride means nothing, but must be whole units
    strides = (
        of_rows * row if h > 1 else units,
        h * row if d > 1 else units,
        units,
        channels * channel if batch > 1 else units,
    )
    return Tensor5(begin - begin % 16, dims, strides)


def alignment_classes(batch: int, channels: int, size: Sequence[int], element: int) -> tuple[int, int] | None:
    """Classes of rows along H, and of channels, of a dense NCHW tensor, by where they begin in units of 16 bytes.

    Those of a class are a tensor that the engine reads. ``size``: spatial; ``element``: in bytes. (1, 1) where every
    row begins at 16 bytes; None where slices or images have classes too, or one would be of nothing.
    """
    d, h, w = triple(size)
    row = w * element
    slice_, channel = h * row, d * h * row
    if row % 16 == 0:
        return 1, 1
    rows, of_channels = 16 // math.gcd(16, row) if len(size) > 1 else 1, 16 // math.gcd(16, channel)
    whole = (slice_ % 16 == 0 or d == 1) and (channels * channel % 16 == 0 or batch == 1)
    return (rows, of_channels) if whole and h >= rows and channels >= of_channels else None


def parts(size: int) -> list[int]:
    """Lengths of the pieces into which an axis can be divided evenly."""
    return sorted({-(-size // n) for n in range(1, size + 1)})


def _even(size: int, most: int) -> list[int]:
    """Of `parts` those of at most ``most``, found without a step for each element of a long axis."""
    return sorted({-(-size // -(-size // n)) for n in range(1, min(size, most) + 1)})


@lru_cache(maxsize=4096)
def fullest(
    batch: int, size: tuple[int, ...], stride: tuple[int, ...], most: int
) -> tuple[int, tuple[int, int, int, int]]:
    """(how many, images, D, H, W) of the boxes of at most ``most`` pixels, of which the fewest are needed.

    Of equals that of the fewest images, then the narrowest: with a step along W the engine is slower
    (docs/experiments.md). ``stride``: from one of its pixels to the next in the tensor that is traversed.
    """
    d, h, w = triple(size)
    slices_, rows_, columns_ = (
        [n for n in _even(of, most) if (n - 1) * step < MAX_BOX] for of, step in zip((d, h, w), triple(stride))
    )
    best: tuple[tuple[int, ...], tuple[int, int, int, int]] | None = None
    for columns, rows in product(columns_, rows_):
        held, of_slice = most // (columns * rows), -(-h // rows) * -(-w // columns)
        if held and best is not None and -(-batch * d // held) * of_slice > best[0][0]:
            continue  # however images and slices share a box
        for slices in slices_:
            of_image = columns * rows * slices
            if of_image > most:
                break
            times = -(-batch // min(batch, most // of_image, MAX_BOX))
            count = times * -(-d // slices) * of_slice
            rank = count, -of_image
            if best is None or rank < best[0]:
                best = rank, (-(-batch // times), slices, rows, columns)
    assert best is not None
    return best[0][0], best[1]
