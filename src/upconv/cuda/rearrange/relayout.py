"""Passes by the kernels for channels_last tensors, on copies. The copying kernels are ``relayout.cu``.

Where a stride is wide, NCHW rows are turned to rows of channels in shared memory for few products; where they are
shorter than 16 bytes, no box brings them; and small images leave most of a tile of NCHW rows empty. Then it is cheaper
to turn a tensor once: a copy of the source, the channels_last kernel, and but for the weight a copy of its result.

Nor do boxes bring pixels whose channels are no whole 16 bytes. For the weight such tensors are copied, in either memory
format, into pixels of some channels more, which are zeros.

The copies take as much memory as the tensors, while the pass is computed. cuDNN's kernels for these layers do too
(docs/experiments.md).
"""

from __future__ import annotations

import math

from upconv.cuda.compile import jit
from upconv.cuda.launches import THREADS, Given, Launch, Operand, Pointer, Scratch, Unit, ints
from upconv.cuda.rearrange.around import Around
from upconv.problem import Pass, Problem

_TILE = {2: 16384, 4: 4096}
"""Elements that a block copies, by their bytes."""
_OPERANDS: dict[Pass, tuple[str, str]] = {
    "fwd": ("source", "result"),
    "grad-input": ("result", "source"),
    "grad-weight": ("input", "gradient"),
}
"""What the input's side and the output's are to a pass."""
_SMALL = 64  # pixels of an image, up to which a block copies those of several; each number of them is a kernel
_MANY_TAPS = 256  # from which on the model of the weight's gradient is far too low


def rearranged(p: Problem) -> Problem:
    """The problem in channels_last, of whole 16 bytes of channels; 1-D tensors are lifted to images of one row."""
    return _wider(p.lifted).with_(layout="channels_last")


def around(p: Problem, given: Given) -> Around:
    """Copies of both tensors; behind the inner kernel one of its result back, but for the weight's gradient."""
    ahead, behind, names, q = list[Launch](), list[Launch](), dict[Operand, Scratch](), rearranged(p)
    for output, name in enumerate(_OPERANDS[p.pass_]):
        if not copied(p, bool(output)):
            continue
        shape = q.output_shape if output else q.input_shape
        names[name] = place = Scratch(f"{name} in channels_last", math.prod(shape) * p.dtype.itemsize)
        if name == "result":
            behind.append(copy(p, bool(output), place, name, back=True))
        else:
            ahead.append(copy(p, bool(output), name, place))
    return Around(tuple(ahead), tuple(behind), names, given)


def words(p: Problem) -> str:
    q = rearranged(p)
    wider = {a: b for a, b in ((p.in_channels, q.in_channels), (p.out_channels, q.out_channels)) if a != b}
    return f"by copies in channels_last{''.join(f' of {a} channels as {b}' for a, b in wider.items())}"


def tile(p: Problem, channels: int, size: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels and pixels that a block copies: of both no more than there are, as far as powers of 2 let it. And the
    pixels of an image where a block copies those of several, else 0.
    """
    of_channels = min(64, max(8, 1 << (channels - 1).bit_length()))
    pixels = _TILE[p.dtype.itemsize] // of_channels
    least = max(64, THREADS * 16 // p.dtype.itemsize // of_channels)  # a unit for each thread
    image = math.prod(size)
    if 1 < image <= _SMALL:
        return of_channels, least, image
    while pixels > least and pixels // 2 >= image:
        pixels //= 2
    return of_channels, pixels, 0


def unit(p: Problem, channels: int, pixels: int, image: int) -> Unit:
    """The copying kernels for tiles of so many channels and pixels (`tile`)."""
    constants = {"element": p.dtype.itemsize, "tile_c": channels, "tile_p": pixels, "image": image}
    entries = ("to_channels_last", "to_contiguous", "widen")
    label = f"relayout of {channels} channels x {pixels} pixels of {8 * p.dtype.itemsize} bits"
    return Unit(label, jit.instance("relayout.cu", constants, [f"{entry}<{jit.CONFIG}>" for entry in entries]), entries)


def width(p: Problem, channels: int) -> int:
    """Channels of a copy's pixel: whole 16 bytes."""
    each = 16 // p.dtype.itemsize
    return -(-channels // each) * each


def copied(p: Problem, output: bool) -> bool:
    """Whether a tensor must be: not where a copy would be the same bytes in the same places."""
    channels, size = (p.out_channels, p.out_size) if output else (p.in_channels, p.size)
    return width(p, channels) != channels or (p.layout == "nchw" and math.prod(size) > 1)


def copy(p: Problem, output: bool, source: Operand, to: Operand, back: bool = False) -> Launch:
    """What copies one of a problem's tensors into channels_last, or ``back``."""
    p = p.lifted
    batch, channels, *size = p.output_shape if output else p.input_shape
    pixels, wide, widens = math.prod(size), width(p, channels), p.layout == "channels_last"
    of_channels, of_pixels, image = tile(p, channels, tuple(size))
    if image or widens:
        batch, pixels = 1, batch * pixels
    grid = batch * -(-channels // of_channels) * -(-pixels // of_pixels)
    if widens:
        grid = -(-pixels * wide * p.dtype.itemsize // 16 // THREADS)
    code = unit(p, of_channels, of_pixels, image)
    if back:
        return Launch(
            code, "to_contiguous", grid, THREADS, 0, (Pointer(source), Pointer(to), *ints((channels, pixels)))
        )
    arguments = (Pointer(source), Pointer(to), *ints((channels, pixels, wide)))
    return Launch(code, "widen" if widens else "to_channels_last", grid, THREADS, 0, arguments)


def _wider(p: Problem) -> Problem:
    """The problem of the copies' channels, which stay as they are where there are groups."""
    if p.groups > 1:
        return p
    return p.with_(in_channels=width(p, p.in_channels), out_channels=width(p, p.out_channels))


def copies(p: Problem) -> tuple[int, int]:
    """Bytes that are moved, and launches."""
    q = rearranged(p)
    sides = enumerate(((p.input_shape, q.input_shape), (p.output_shape, q.output_shape)))
    moved = [math.prod(a) + math.prod(b) for output, (a, b) in sides if copied(p, bool(output))]
    return sum(moved) * p.dtype.itemsize, len(moved)


def refusal(p: Problem) -> str | None:
    """Why a pass is not computed on copies, whatever that would cost, in a sentence; None when it may be."""
    each = 16 // p.dtype.itemsize
    widened = p.in_channels % each or p.out_channels % each
    if p.layout != "nchw" and (p.pass_ != "grad-weight" or not widened):
        return "only NCHW tensors have another memory format to be copied into"
    if widened and (p.pass_ != "grad-weight" or p.groups > 1):
        return f"{p.in_channels} and {p.out_channels} channels are no multiples of the {each} in 16 bytes"
    if widened and p.taps >= _MANY_TAPS:
        return f"of {p.taps} taps the kernels on wider pixels take far longer than their model says"
    if max(math.prod(p.size), math.prod(p.out_size), _SMALL * p.batch) >= 2**31 - max(_TILE.values()):
        return "an image has nearly 2^31 pixels and more"
    wide = _wider(p)
    units = max(map(math.prod, (wide.input_shape, wide.output_shape))) // each
    if p.layout != "nchw" and units >= 2**31 - THREADS:
        return "a tensor of nearly 2^31 units of 16 bytes and more is not copied into wider pixels"
    apart = (s // math.gcd(s, d) for s, d in zip(p.stride, p.dilation))  # taps of different phases
    if p.pass_ != "grad-weight" and all(k <= n for k, n in zip(p.kernel, apart)):
        return "taps that do not overlap meet every output once in either memory format"
    if p.pass_ == "grad-weight" and p.groups > 1:
        return "for the weight copies pay without groups alone"
    return None
