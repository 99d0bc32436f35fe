"""The gather-GEMM family on tensor cores: a choice, made ready for a device.

The tiling's arithmetic is in `tiling`, candidates in `gather_search`, what they cost in `gather_cost`, the kernel in
``kernels/gather.cu``. Nothing here is timed at run time: the model chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

from upconv.cuda import family
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.compile.boxes import Tensor5, channels_last, dense, of_class
from upconv.cuda.cost import Cost
from upconv.cuda.gemm.gather_constants import constants
from upconv.cuda.gemm.gather_cost import alignment_of
from upconv.cuda.gemm.gather_search import NARROW, considered, refusal
from upconv.cuda.gemm.tiling import CLAIMS_BYTES, Tiling
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import NULL, THREADS, Given, Launch, Map, Pointer, Unit, WeightForm, Zeros, ints
from upconv.cuda.packs import layer_text, packing_entries, weight_map
from upconv.cuda.pixels.choice import TileChoice
from upconv.derived import derived
from upconv.problem import Problem, triple

# Pixels along a side of images that are tried side by side. What tiles of larger ones read comes from many places
# of the memory, which is slower (docs/experiments.md).
WIDEST = max(NARROW)
_FOUR_LOADS = 0.03  # of a TF32 forward's time, by which multiplying weights as they lie is slower (docs/experiments.md)
CLAIMED_TILES = 18  # for each multiprocessor


@dataclass(frozen=True)
class Choice(TileChoice):
    """A tiling for a problem on a GPU, and what the model thinks of it."""

    cost: Cost = field(default_factory=Cost)
    flat: bool = False
    """Whether the problem is another's `Problem.flat`."""
    general: bool = False
    """Whether its kernel serves every size of the input, beginnings of rows included."""
    family = "gather"

    @property
    def tiling(self) -> Tiling:
        found: Tiling = self.tile
        return found

    @property
    def grid(self) -> int:
        """Blocks: one for each multiprocessor, and with resident weights as many for each M-group; of clusters all."""
        t = self.tiling
        tiles = t.arguments(self.problem)[-1]
        if t.cluster > 1:
            return tiles * t.cluster
        blocks = min(tiles, self.gpu.multiprocessors)
        if t.resident and t.m_groups > 1:
            blocks = max(1, blocks // t.m_groups) * t.m_groups
        return blocks

    @property
    def claimed(self) -> bool:
        """Whether its blocks claim tiles.

        Else they are dealt out: to blocks that read the same pixels for other channels, where these are more than the
        results; to blocks whose groups share lines; and to blocks with few tiles, for which asking takes longer than
        waiting for the last (docs/experiments.md).
        """
        t, p = self.tiling, self.problem
        if not t.claimable(self.gpu.shared_bytes):
            return False
        read_twice = t.resident and t.m_groups > 1 and math.prod(source_shape(p)) > math.prod(result_shape(p))
        if read_twice or (t.channels_last and p.groups > 1):
            return False
        return t.arguments(self.problem)[-1] >= CLAIMED_TILES * self.gpu.multiprocessors

    @property
    def summary(self) -> str:
        t = self.tiling
        shape = "x".join(str(v) for v in t.tile)
        if t.whole:
            shape += f" of {t.beside} images side by side" if t.beside else " of whole images"
        split = ("pixels halved", "output channels halved", "in turn")[t.split]
        weights = "resident" if t.resident else f"ring of {t.stages_w} x {t.w_stage} fragments" if t.wgmma else "L2"
        beside = "the batch as pixels: " if self.flat else "the batch as width: " if self.problem.batch_as_width else ""
        instruction = beside + ("phases as rows: " if t.shuffle else "")
        instruction += "wgmma" if t.wgmma else "mma.sync"
        return (
            f"{instruction} {t.problem.precision}, tile {shape} (NxDxHxW of q) x {t.mb * t.wgs_m * 64} rows, chunk of "
            f"{t.chunk} channels, {split}, weights {weights}, {t.shared_bytes // 1024} KB shared, grid {self.grid}"
            + (", results stored by the copy engine" if t.drained else "")
            + (f", chunks shared by clusters of {t.cluster} that add up their sums" if t.cluster > 1 else "")
        )

    @property
    def boxable(self) -> bool:
        """Whether weights that lie as the kernel's boxes take them need no packing (`Tiling.boxable`), where that pays.

        A forward's in TF32 are read in four loads instead of one, so their packing must take some of its time.
        """
        t = self.tiling
        if self.flat or not t.boxable:
            return False
        if t.unpacked:
            return True
        return family.packing_seconds(self.problem, self.gpu) > _FOUR_LOADS * self.seconds

    @property
    def in_place(self) -> bool:
        return self.boxable and self.problem.layout == "channels_last"

    def sources(self) -> tuple[Unit, ...]:
        return self.units

    @derived
    def units(self) -> tuple[Unit, ...]:
        """What NVRTC must compile; the same for all input sizes with one tile, `store_unit`, `claimed`.

        The first packs weights; the second, where they are `boxable`, takes channels-last ones as they are.
        """
        t, label = self.tiling, f"gather {layer_text(self.problem)}"
        unit = 0 if self.general else store_unit(t, self.problem)
        text = source(t, store_unit=unit, claimed=self.claimed)
        packed = Unit(label, text, ("pack", "gather"))
        if not self.boxable:
            return (packed,)
        boxed = source(t, boxed=True, store_unit=unit, claimed=self.claimed)
        return packed, Unit(f"{label} unpacked", boxed, ("gather",))

    # --- launches -----------------------------------------------------------------------------------------------------

    @property
    def reads(self) -> WeightForm | None:
        return "channels_last" if self.boxable else None

    @property
    def keeps_packed(self) -> bool:
        """Packed weights are multiplied faster in TF32 than a forward's in place."""
        return self.problem.pass_ == "fwd" and not self.casts

    @property
    def packing(self) -> tuple[Any, ...]:
        t, p = self.tiling, self.problem
        in_place = self.boxable and not self.keeps_packed
        order = t.entries, t.chunk, t.parts, t.split == 1, t.subs, t.shuffle
        return (*order, p.precision, p.groups, p.pass_, p.out_channels, in_place)

    @property
    def packer(self) -> tuple[Unit, int, int]:
        words = self.tiling.packed_words
        return self.units[0], words, -(-words // (4 * THREADS))

    def multiply(self, given: Given) -> Launch:
        """Where the call may leave something behind, blocks claim tiles, by counters; else they have as many each, to
        the same bits."""
        t, p, boxed = self.tiling, self.problem, given.weight == "in place"
        unit, shared = self.units[int(boxed)], t.shared_bytes
        counters: tuple[Pointer, ...] = ()
        if self.claimed:
            counters = (Pointer(Zeros(t.m_groups + 1)) if given.lasting else NULL,)
            shared += CLAIMS_BYTES
        elif t.tensor_map:
            counters = (NULL,)
        # The result's rows are stored by units that go by sizes alone (`store_unit`).
        whole_units = t.tensor_map or (t.channels_last and t.aligned_channels)
        source = Pointer("source", alignment=16 if whole_units else 1)
        pointers = source, Pointer("weight" if boxed else "packed"), self.bias(given), Pointer("result", alignment=16)
        more = (
            *((result_map(t, p),) if t.drained else ()),
            *((weight_map(p, t.weight_box, t.weight_span),) if boxed else ()),
        )
        arguments = (*pointers, *counters, *ints(t.arguments(p)), *source_maps(t, p), *more)
        overlaps = not boxed and self._overlaps
        return Launch(unit, "gather", self.grid, 512 if t.wgmma else 384, shared, arguments, dependent=overlaps)

    @property
    def _overlaps(self) -> bool:
        """Whether the kernel may begin beside the launch that packs its weights.

        Blocks that begin one by one drift apart. Groups of a channels-last pixel share sectors: such blocks are to stay
        together (docs/experiments.md).
        """
        t = self.tiling
        shared = t.channels_last and self.problem.groups > 1
        return t.wgmma and self.gpu.capability >= (9, 0) and not shared


def source(t: Tiling, boxed: bool = False, **settings: Any) -> str:
    """A kernel's text; with what packs its weights, unless they need no packing.

    ``settings``: those of `gather_constants.constants`.
    """
    packing = () if boxed else packing_entries(f"GatherPack<{jit.CONFIG}>", t.problem)
    found = constants(t, boxed=boxed, **settings)
    return jit.instance("gather.cu", found, (*packing, f"gather<{jit.CONFIG}>"))


def tensors(t: Tiling, p: Problem) -> tuple[Tensor5, ...]:
    """The tensors that a tiling's boxes are cut from; none where threads copy."""
    if not t.tensor_map:
        return ()
    channels, *size = source_shape(p)[1:]
    d, h, w = triple(size)
    if t.channels_last:
        return (channels_last(p.batch, channels, size, t.element, p.batch_as_width),)
    if t.beside:
        channel = w * h * d * t.element
        image, every, of_row = channel * channels, channel * channels * p.batch, t.box_channels
        dims = w * h * d * of_row, p.batch, channels // of_row, 1, 1
        return (Tensor5(0, dims, (image, channel * of_row, every, every)),)
    if t.whole is not None:
        dims = (w * h * d, 1, 1, channels, p.batch)
    else:
        dims = (w, h, d, channels, p.batch)
    if not t.classed:
        return (dense(dims, t.element),)
    assert t.classes is not None
    rows, of_channels = t.classes
    first, _, apart = t.bands[1]
    return tuple(
        of_class(p.batch, channels, size, t.element, (rows, (first[0] + j * apart) % rows), (of_channels, k))
        for k, j in product(range(t.channel_classes), range(t.row_classes))
    )


def source_maps(t: Tiling, p: Problem) -> tuple[Map, ...]:
    """Over each of a tiling's `tensors`, with its box."""
    rounded = t.channels_last and p.precision == "tf32"  # the box is the tile
    span = t.row_bytes if t.channels_last else 0
    return tuple(Map("source", one, p.dtype, t.box, t.box_steps, span, rounded) for one in tensors(t, p))


def result_map(t: Tiling, p: Problem) -> Map:
    """Over a `Tiling.drained` result, whose rows along H are apart by phase: W, channels, H, phases of H, images."""
    channels, h, w = result_shape(p)[1:]
    row, phases = w * t.element, t.out_steps[1]
    dims = (w, channels, h // phases, phases, p.batch)
    strides = (h * row, phases * row, row, channels * h * row)
    box = t.out_span // t.element, 16, t.sub[0], 1, 1
    return Map("result", Tensor5(0, dims, strides), p.dtype, box, span=t.out_span)


def store_unit(t: Tiling, p: Problem) -> int:
    """Bytes at multiples of which all rows of ``p``'s result begin and end: 16 or two elements; else 0.

    One element: where a channel's outputs are no whole pairs, since eight rows of as many channels are stored together.
    A kernel has no way to store rows that begin elsewhere then; where runs begin at more it still finds out. A kernel
    with all three ways takes up to twice as long to compile.
    """
    if t.channels_last or t.shuffle is not None or not t.contiguous:
        return 0
    alignment, pair = alignment_of(p), 2 * t.element
    if alignment >= pair:
        return 16 if alignment >= 16 else pair
    return 0 if math.prod(result_shape(p)[2:]) % 2 == 0 else t.element


@lru_cache(maxsize=4096)
def choose(p: Problem, gpu: Gpu, general: bool = False) -> Choice | str:
    """The cheapest tiling by the model, or the sentence why tensor cores cannot serve the problem.

    ``general``: of those that serve every size of the input.
    """
    if refused := refusal(p, gpu):
        return refused
    found = considered(p, gpu, general, best=True)
    if not found:
        return f"no tile of this layer with its halo fits in {gpu.shared_bytes // 1024} KB of shared memory"
    cost, t = min(found, key=lambda one: one[0].seconds)
    return Choice(t, p, gpu, cost, general=general)


def candidate(p: Problem, gpu: Gpu, best: family.Choice | None = None, general: bool = False) -> Choice | str:
    """As `upconv.cuda.family` asks: `choose`, for the problem or for one whose tensors have the same bytes.

    Images of one pixel may be the pixels of one image (`Problem.flat`), and small ones lie side by side
    (`Problem.abreast`); tiles of either would be nearly empty.
    """
    if refused := family.too_long(p):
        return refused
    found = [choose(p, gpu, general)]
    if not general and (flat := p.flat) is not None and not isinstance(other := choose(flat, gpu), str):
        found.append(replace(other, flat=True))
    narrow = max(*p.size, *p.out_size) <= WIDEST
    if not general and narrow and (abreast := p.abreast) is not None:
        found.append(choose(abreast, gpu))
    return min(found, key=lambda one: math.inf if isinstance(one, str) else one.seconds)
