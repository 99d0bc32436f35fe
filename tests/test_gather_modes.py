"""Every mode of the gather-GEMM's kernel, run from its source on a CPU: random layers that together have them all."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from conftest import needs_gxx
from drawn import FAMILIES, LAYOUTS, TENSOR, Layers, batches_choice, gather_choice
from emulator import Emulator, emulator
from modes import SEEDS, Case, OfCase, OfTiling, cases, few, fewest, having, of_cases, where
from results import Way, assert_computes, assert_infinities_reach_no_others
from upconv.cuda.axes import Unfit, result_shape
from upconv.cuda.gemm import gather
from upconv.cuda.gemm.tiling import Tiling
from upconv.cuda.gpu import Gpu
from upconv.problem import Pass, Precision, Problem

pytestmark = needs_gxx
__all__ = ["emulator"]

PARTS = 6  # tests that divide the cases
FIRST = (
    26, 42, 46, 54, 69, 164, 167, 170, 182, 205, 253, 254, 304, 355, 423, 736, 795, 924, 1016, 1061,
    1160, 1320, 1561, 1617, 1646, 1895, 2266, 2585, 2983,
)  # fmt: skip
"""Of the seeds a few whose layers have every mode. Others are drawn where these do no longer."""
PASSES: tuple[Pass, ...] = ("fwd", "grad-input")
HALVES: tuple[Precision, ...] = ("fp16", "bf16")


def any_choice(rng: random.Random, p: Problem, gpu: Gpu) -> Any:
    """Of exported files' kernels too, and with other rings of stages."""
    choice = gather_choice(rng, p, gpu)
    if choice is None:
        return None
    changes: list[dict[str, Any]] = [
        {}, {}, {"planewise": True, "stages_p": 1}, {"resident": not choice.tiling.resident},
        {"stages_w": 2, "w_stage": rng.randint(1, 9)}, {"cluster": rng.randint(2, 4)},
    ]  # fmt: skip
    with contextlib.suppress(Unfit):
        tiling = replace(choice.tiling, **rng.choice(changes)).checked(gpu.shared_bytes)
        choice = replace(choice, tiling=tiling)
    return replace(choice, general=rng.random() < 0.2)


DRAWN = [(layers, any_choice) for layers in (
    FAMILIES["gather"][0],
    FAMILIES["gather, few sizes"][0],
    # Channels that boxes of weights want.
    Layers(PASSES, TENSOR, LAYOUTS, (1, 2, 3), (8, 16, 40, 72), (8, 16, 40, 64, 72, 136), (1, 1, 2)),
    Layers(PASSES, TENSOR, ("channels_last",), (2, 3), (16, 40, 136), (16, 40, 64, 72), (1,), kernels=(3, 4, 5),
           strides=(2, 3, 4), dilations=(1,)),
    # Many taps or phases along W; slices without taps, of many outputs.
    Layers(("fwd",), TENSOR, LAYOUTS, (1, 2), (8, 16), (3, 16, 40), heights=(1,), kernels=(3, 8, 16),
           strides=(1, 8, 20), dilations=(1,)),
    Layers(PASSES, TENSOR, LAYOUTS, (1, 2, 2), (8, 16), (16, 40), (1,), heights=(1, 3), kernels=(1, 7, 8, 9, 16),
           strides=(1, 2, 4, 8), dilations=(1,)),
    Layers(("fwd",), TENSOR, ("nchw",), (3,), (8,), (3, 8, 23), (1,), heights=(3, 9, 16), widths=(15, 16, 33),
           kernels=(1, 2, 3), strides=(2, 4), dilations=(1,), paddings=0),
    # Small images, which lie side by side or fill a tile, and sources of gradients of a few sizes.
    Layers(("fwd",), TENSOR, ("nchw",), (1, 2, 3), (4, 8, 40), (8, 23, 64), heights=(1, 2, 3, 4, 6),
           widths=(1, 2, 3, 4, 6), kernels=(3, 4), strides=(1, 2), dilations=(1,), paddings=1),
    Layers(PASSES, TENSOR, ("nchw",), (1, 2, 2, 3), (8, 16, 40), (8, 23, 64), heights=(4, 8, 16), widths=(4, 8, 16, 32),
           kernels=(1, 4), strides=(1, 4), dilations=(1,), paddings=0),
    # Few output channels, whose phases are rows of M.
    Layers(("fwd",), TENSOR, LAYOUTS, (1, 2, 2, 3), (3, 16), (1, 2, 3, 5), (1,), dilations=(1,)),
    # Rows of 16 bits that the copy engine may store.
    Layers(("fwd",), HALVES, ("nchw",), (2,), (16,), (8, 40, 72, 136), (1,), heights=(2, 3, 5, 9), widths=(8, 16, 24),
           kernels=(1, 2, 3, 4, 6), strides=(1, 2, 4), dilations=(1,), paddings=1),
)]  # fmt: skip
DRAWN.append((replace(FAMILIES["batches"][0], passes=PASSES), batches_choice))


# --- modes -----------------------------------------------------------------------------------------------------------


def kinds() -> OfTiling:
    """What is multiplied, and by which instruction."""
    found: OfTiling = {}
    for name, values in (("precision", TENSOR), ("pass_", PASSES)):
        for kind in product(values, ("nchw", "channels_last"), (True, False)):
            found[str(kind)] = lambda t, a=name, kind=kind: (getattr(t.problem, a), t.problem.layout, t.wgmma) == kind
    return found


NCHW: OfTiling = {
    "rows by threads": lambda t: not t.tensor_map and t.wgmma,
    "rows by boxes": lambda t: t.tensor_map and not t.classed and t.whole is None,
    "columns of a stride": lambda t: t.tensor_map and t.in_steps[2] > 1 and t.whole is None,
    "columns of a stride of four": lambda t: t.tensor_map and t.in_steps[2] % 4 == 0 and t.whole is None,
    "rows of several boxes": lambda t: t.tensor_map and t.row_boxes > 1 and t.whole is None,
    "small images": lambda t: t.whole is not None and not t.beside,
    "small images of several boxes": lambda t: t.whole_pixels > t.box_pixels,
    "several small images": lambda t: t.whole is not None and t.tile[0] > 1,
    "both parts of rows by boxes": lambda t: t.tensor_map and t.parts == 2 and t.whole is None,
    "rows that only taps far apart read": lambda t: any(len(firsts) > 1 for firsts, _, _ in t.bands),
    "rows that only taps far apart read, unrolled": lambda t: len(t.bands[1][0]) > 1 and t.unroll[1] > 1,
    "stores between others": lambda t: not t.contiguous and t.element == 4,
    "stores of 2 bytes between others": lambda t: not t.contiguous and t.element == 2,
    "more than 16 phases": lambda t: t.width_subs > 16,
    "phases without taps": lambda t: -1 in t.blocks_of_w and t.contiguous,
}
LAST: OfTiling = {
    "a box": lambda t: t.tensor_map and not t.strided_box,
    "a box for each remainder of columns": lambda t: t.strided_box and len(t.residues) > 1 and not t.planewise,
    "a box for each band of rows": lambda t: t.strided_box and t.plane_count > len(t.residues),
    "boxes that step over rows": lambda t: t.tensor_map and max(t.box_steps[2:4]) > 1,
    "planes one by one": lambda t: t.planewise and t.straight,
    "planes one by one, in rounds": lambda t: t.planewise and t.rolled,
    "pixels by threads": lambda t: not t.tensor_map and t.aligned_channels and t.wgmma,
    "channels off 16 bytes": lambda t: not t.aligned_channels and t.wgmma,
    "both parts of a box": lambda t: t.tensor_map and t.parts == 2,
    "a batch as width": lambda t: t.problem.batch_as_width and t.problem.pass_ == "fwd",
    "a batch as width, of gradients": lambda t: t.problem.batch_as_width and t.problem.pass_ != "fwd",
    "clusters": lambda t: t.cluster > 1,
}
STEPS: OfTiling = {
    "straight": lambda t: t.straight,
    "straight, for several phases": lambda t: len({first for first, _ in t.stretches}) < len(t.variants),
    "in rounds": lambda t: t.rolled,
    "in a loop": lambda t: not (t.straight or t.rolled) and t.parts == 1,
    "continued": lambda t: t.continued,
    "continued in rounds": lambda t: t.continued and t.rolled,
    "of four sets of fragments": lambda t: t.fragment_sets == 4,
    "of two subtiles": lambda t: t.wide and not t.paired,
    "of pairs of subtiles": lambda t: t.wide and t.paired,
    "of several blocks": lambda t: t.mb > 1 and t.nb > 1,
    "of parts": lambda t: t.parts == 2,
    "of resident parts": lambda t: t.parts == 2 and t.resident,
    "clusters": lambda t: t.cluster > 1 and t.parts == 1,
    "clusters of more than two": lambda t: t.cluster > 2,
    "clusters of parts": lambda t: t.cluster > 1 and t.parts == 2,
    "rows unrolled": lambda t: t.unroll[1] > 1,
    "slices unrolled": lambda t: t.unroll[0] > 1,
    "groups whose chunks have others' channels": lambda t: t.problem.groups > 1 and t.cin_g % t.chunk > 0,
}
DRAINED: OfTiling = {
    "rows": lambda t: t.sub == (1, 64),
    "patches": lambda t: t.sub == (8, 8) and not t.paired,
    "pairs": lambda t: t.paired,
    "channels halved": lambda t: t.split == 1,
    "images": lambda t: t.tile[0] > 1,
    "rows of two runs": lambda t: t.sub == (1, 64) and t.nb > 1,
}


def numbered() -> OfTiling:
    """Modes that differ by numbers."""
    found: OfTiling = {}
    for kind in product((0, 1, 2), (True, False)):
        found[f"split {kind[0]}, resident {kind[1]}"] = lambda t, kind=kind: t.wgmma and (t.split, t.resident) == kind
    found |= where(
        lambda t: t.tensor_map and t.classed,
        having("rows of {name} {value}", classes=((1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (1, 4)), element=(2, 4)),
    )
    found |= where(lambda t: t.beside > 0, having("images side by side, {name} {value}", element=(2, 4)))
    found |= where(lambda t: t.beside > 0, {f"of {n} axes": lambda t, n=n: t.problem.rank == n for n in (1, 2, 3)})
    found |= where(lambda t: not t.wgmma, having("by mma.sync, {name} {value}", split=(0, 2)))
    return found | having("{name} {value}", k_steps=(1, 2, 4))


def stores() -> OfTiling:
    """How results leave."""
    found: OfTiling = {}
    pixels = having("pixels, {name} {value}", runs=(1, 2, 3, 4, 8), subs=(1, 2, 4))
    found |= where(lambda t: t.channels_last and t.shuffle is None, pixels)
    for runs in (*product((8, 16), (1,)), *product((1, 2, 3), (8,))):
        found[f"runs {runs}"] = lambda t, kind=runs: (
            not t.channels_last and t.shuffle is None and t.contiguous and (t.runs, t.sub[0]) == kind
        )
    for way in ((True, False, 0), (False, True, 0), (False, False, 0), (True, False, 1), (False, True, 1)):
        found[f"phases as rows {way}"] = lambda t, way=way: (
            t.shuffle is not None and (t.shuffle.ahead, any(t.shuffle.leads), t.channels_last) == way
        )
    boxes = having("by the copy engine, {name} {value}", width_subs=(1, 2, 4), out_span=(32, 64, 128))
    found |= where(lambda t: t.drained, boxes)
    without: OfTiling = {
        "planes": lambda one: one.rows == 0,
        "rows": lambda one: one.rows > 0 and one.w < 0,
        "phases": lambda one: one.rows > 0 and one.w >= 0,  # of NCHW these go with a row's own
    }
    for name, layout in (*product(without, ("channels_last",)), ("planes", "nchw"), ("rows", "nchw")):
        found[f"{name} without taps, {layout}"] = lambda t, fits=without[name], layout=layout: (
            t.problem.layout == layout and any(fits(one) for of_variant in t.bare for one in of_variant)
        )
    return found


def calls() -> OfCase:
    """How weights come, how tiles are taken, and what is known of a result's rows."""
    found: OfCase = {
        "weights as they lie for several sub-positions": lambda case: as_they_lie(case) and of(case).subs > 1,
        "weights as they lie in clusters": lambda case: as_they_lie(case) and of(case).cluster > 1,
        "packing some of many taps": lambda case: of(case).problem.taps > 8 * of(case).pack_taps,
        "packing a bias": lambda case: case.way.single and case.choice.problem.bias and not packs(case),
        "a kernel that packs phases as rows": lambda case: packs(case) and of(case).shuffle is not None,
        "tiles claimed by blocks of one M-group": lambda case: (
            claims(case) and of(case).resident and of(case).m_groups > 1
        ),
        "long runs without taps, 4 bytes": lambda case: longest_run(case) > 2100 and of(case).element == 4,
        "long runs without taps, 2 bytes": lambda case: longest_run(case) > 2100 and of(case).element == 2,
        "runs off 16 bytes without taps, 4 bytes": lambda case: longest_run(case) % 16 > 0 and of(case).element == 4,
    }
    for pass_, (name, n) in product(
        PASSES, (("element", 2), ("element", 4), ("resident", 0), ("resident", 1), ("split", 1))
    ):
        found[f"{pass_} of weights as they lie, {name} {n}"] = lambda case, pass_=pass_, a=name, n=n: (
            as_they_lie(case) and case.choice.problem.pass_ == pass_ and getattr(of(case), a) == n
        )
    for size, how in ((2, ""), (2, "last"), (2, "single"), (4, ""), (4, "last")):
        found[f"weights of {size} bytes for phases as rows, {how}"] = lambda case, kind=(size, how): (
            of(case).shuffle is not None and (of(case).element, lies(case)) == kind
        )
        for pass_ in PASSES:
            found[f"{pass_}, packing weights of {size} bytes, {how}"] = lambda case, kind=(pass_, size, how): (
                packs(case) and (case.choice.problem.pass_, of(case).element, lies(case)) == kind
            )
    for kind in product((0, 2), (True, False)):
        found[f"tiles claimed, split and resident {kind}"] = lambda case, kind=kind: (
            claims(case) and (of(case).split, of(case).resident) == kind
        )
    for kind in ((4, 16), (4, 8), (4, 4), (2, 16), (2, 4), (2, 2)):
        found[f"rows of so many bytes at multiples of {kind}"] = lambda case, kind=kind: (
            stores_rows(case) and (of(case).element, gather.store_unit(of(case), case.choice.problem)) == kind
        )
    for size in (2, 4):
        found[f"rows of {size} bytes of any size"] = lambda case, size=size: (
            stores_rows(case) and case.choice.general and of(case).element == size
        )
    return found


def of(case: Case) -> Tiling:
    found: Tiling = case.choice.tiling
    return found


def lies(case: Case) -> str:
    return "single" if case.way.single else "last" if case.way.last else ""


def as_they_lie(case: Case) -> bool:
    return case.choice.boxable and lies(case) == "last"


def packs(case: Case) -> bool:
    return case.choice.packs > 0 and case.way.packing and not as_they_lie(case)


def claims(case: Case) -> bool:
    return case.choice.claimed and case.way.once and not packs(case)


def stores_rows(case: Case) -> bool:
    t = of(case)
    return not t.channels_last and t.shuffle is None and t.contiguous and not (t.drained or t.beside)


def longest_run(case: Case) -> int:
    """Bytes that a tile stores together of an NCHW plane without taps."""
    t, p = of(case), case.choice.problem
    depth = (1, 1, *result_shape(p)[2:])[-3]
    planes = not t.channels_last and any(one.rows == 0 and one.d < depth for every in t.bare for one in every)
    return planes * math.prod(result_shape(p)[-2:]) * t.element // math.prod(t.counts(p)[2:])


MODES = calls() | of_cases(
    {
        "": (kinds() | numbered() | stores(), lambda t: True),
        "NCHW: ": (NCHW, lambda t: not t.channels_last and t.shuffle is None),
        "channels_last: ": (LAST, lambda t: t.channels_last and t.shuffle is None),
        "steps: ": (STEPS, lambda t: t.wgmma),
        "by the copy engine: ": (DRAINED, lambda t: t.drained),
    }
)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_mode(part: int, emulator: Emulator) -> None:
    """At once and late."""
    for case in few(cases(DRAWN), FIRST, MODES)[part::PARTS]:
        for seed in (0, 3):
            assert_computes(case.choice, emulator, seed, case.way, case.tensors)


def reads_all(case: Case) -> bool:
    """Whether taps read every pixel but those at the border."""
    p = case.choice.problem
    return all(k >= s and d == 1 and pad < k for k, s, d, pad in zip(p.kernel, p.stride, p.dilation, p.padding))


def test_infinities_reach_only_the_outputs_that_read_them(emulator: Emulator) -> None:
    """Where sub-positions share a block (`subs` > 1) its rows do multiply the union of their taps' pixels; so do phases
    as rows. Chunks of groups must not end in the next group.
    """
    wanted: OfCase = {
        f"{layout}, groups of chunks that are {'full' if full else 'not full'}": lambda case, kind=(layout, full): (
            (of(case).problem.layout, of(case).cin_g % of(case).chunk == 0) == kind and of(case).problem.groups > 1
        )
        for layout, full in product(("nchw", "channels_last"), (False, True))
    }
    alone = (
        (case for case in cases(DRAWN)(seed) if of(case).subs == 1 and not of(case).shuffle and reads_all(case))
        for seed in SEEDS
    )
    for case in fewest(alone, wanted):
        assert_infinities_reach_no_others(case.choice, emulator, Way())
