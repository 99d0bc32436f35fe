"""The gather-GEMM kernel's constants: what ``kernels/gather.cu`` is told of a tiling beside sizes of input and batch.

Each function has those of one step of the kernel. `pixel_constants` has those of ``kernels/gather_tile.cuh`` and of
what brings pixels there, which `sweep` shares.
"""

from __future__ import annotations

import math
from itertools import accumulate

from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.gemm.tiling import CLAIMS_BYTES, Tiling

Constants = dict[str, int | tuple[int, ...]]
"""By names in lower case; booleans, integers, or arrays of some."""

PRECISIONS = {"tf32": 0, "ieee": 1, "fp16": 2, "bf16": 3}
"""`Precision` of kernels/number.cuh."""
BY_THREADS, BY_BOXES, BY_CLASSES, WHOLE_IMAGES, IMAGES_BESIDE = range(5)
"""How pixels come: `Fetch` of kernels/gather_tile.cuh."""
STRAIGHT, ROLLED, LOOPED = range(3)
"""How a chunk's steps are gone through: `Steps` of kernels/gather_work.cuh."""
STORE_ROWS, STORE_PIXELS, STORE_PHASES, STORE_BOXES = range(4)
"""How results are stored: `Stores` of kernels/gather_work.cuh."""


def constants(
    t: Tiling,
    boxed: bool = False,
    store_unit: int = 0,
    packs: bool = False,
    claimed: bool = False,
) -> Constants:
    """All constants of a kernel.

    ``boxed``: its weights are not packed. ``store_unit``: bytes at multiples of which the result's rows begin and
    end (`gather.store_unit`), an element's if never at more; 0 for a kernel that serves all. ``packs``: it packs
    weights itself. ``claimed``: its blocks claim tiles (`Tiling.claimable`).
    """
    return (
        pixel_constants(t)
        | row_constants(t)
        | step_constants(t)
        | weight_constants(t, boxed, packs)
        | store_constants(t, store_unit)
        | block_constants(t, claimed)
    )


# --- pixels, N -------------------------------------------------------------------------------------------------------


def pixel_constants(t: Tiling) -> Constants:
    """Of a chunk's pixels in shared memory, and of who brings them."""
    p = t.problem
    (rows_d, rows_h), (step_d, step_h) = t.rows, t.row_steps
    tile = dict(zip(("tile_n", "tile_d", "tile_h", "tile_w"), t.tile))
    steps = dict(zip(("in_step_d", "in_step_h", "in_step_w"), t.in_steps))
    found: Constants = {
        "precision": PRECISIONS[p.precision],
        "wgmma": t.wgmma,
        "channels_last": t.channels_last,
        "cin": source_shape(p)[1],
        "cin_g": t.cin_g,
        "ck": t.chunk,
        **tile,
        **steps,
        "rows_d": len(rows_d),
        "rows_h": len(rows_h),
        "row_step_d": step_d,
        "row_step_h": step_h,
        "offsets_d": rows_d,
        "offsets_h": rows_h,
        "first_w": t.first_w,
        "columns": t.columns,
        "plane": t.plane,
        "planes": t.plane_count if t.strided_box else len(t.residues),
        "residues": tuple(w for _, _, w in t.planes) if t.strided_box else t.residues,
        "strided_box": t.strided_box,
        "plane_barriers": t.plane_barriers,
        "stages_p": t.stages_p,
        "stages_s": t.stages_s,
    }
    return found | _fetch_constants(t)


def fetch_of(t: Tiling) -> int:
    """How a tiling's pixels come."""
    if not t.tensor_map:
        return BY_THREADS
    if t.beside:
        return IMAGES_BESIDE
    if t.whole is not None:
        return WHOLE_IMAGES
    return BY_CLASSES if t.classed else BY_BOXES


def _fetch_constants(t: Tiling) -> Constants:
    """Of the way in which pixels come."""
    fetch = fetch_of(t)
    found: Constants = {"fetch": fetch}
    if t.whole is not None and fetch != BY_THREADS:
        found |= dict(zip(("image_d", "image_h", "image_w"), t.whole)) | {"box_pixels": t.box_pixels}
        if fetch == IMAGES_BESIDE:
            found |= {"beside": t.beside, "period": t.period, "beside_w": t.image_width}
        return found
    if fetch == BY_THREADS:
        return found | ({"aligned_channels": t.aligned_channels} if t.channels_last else {})
    (rows_d, rows_h), (_, (_, _, apart)) = t.rows, t.bands
    found |= {"first_d": rows_d[0], "first_h": rows_h[0]}
    if t.channels_last:
        return found | {"planes_d": tuple(d for d, _, _ in t.planes), "planes_h": tuple(h for _, h, _ in t.planes)}
    found["box_units"] = t.box[0] // t.vec
    if fetch == BY_BOXES:
        return found | {"column_pad": t.first_w % t.vec}
    assert t.classes is not None
    return found | {
        "row_classes": t.row_classes,
        "channel_classes": t.channel_classes,
        "row_period": t.classes[0],
        "rows_apart": apart,
    }


# --- weights, M and K ------------------------------------------------------------------------------------------------


def row_constants(t: Tiling) -> Constants:
    """Of rows of M: output channels and sub-positions, and of the consumers that share them."""
    p = t.problem
    steps = dict(zip(("out_step_d", "out_step_h", "out_step_w"), t.out_steps))
    return {
        "grad_input": p.pass_ != "fwd",
        "cout": result_shape(p if t.shuffle is None else t.shuffle.layer)[1],
        "cout_g": t.cout_g,
        "taps": p.taps,
        **steps,
        "sub_h": t.sub[0],
        "sub_w": t.sub[1],
        "split": t.split,
        "wide": t.wide,
        "mb": t.mb,
        "subs": t.subs,
        "rows_per_sub": t.rows_per_sub,
        "w_subs": t.width_subs,
        "variants": len(t.variants),
        "cout_blocks": t.cout_blocks,
        "m_groups": t.m_groups,
        "subs_d": tuple(ud for pairs, _ in t.variants for ud, _ in pairs),
        "subs_h": tuple(uh for pairs, _ in t.variants for _, uh in pairs),
        "subs_w": tuple(u for _, u in t.variants),
        "blocks_of_w": t.blocks_of_w,
    }


def step_constants(t: Tiling) -> Constants:
    """Of the steps of K that a chunk is multiplied in."""
    flat = [(off, taps) for blocks in t.entries for block in blocks for off, taps in block]
    found: Constants = {
        "steps": STRAIGHT if t.straight else ROLLED if t.rolled else LOOPED,
        "taps_unrolled": t.taps_unrolled,
        "fragment_sets": t.fragment_sets,
        "entries": _bounds(t),
        "tap_rows": tuple(t.shift(off) for off, _ in flat),
        "tap_indices": tuple(tap for _, taps in flat for tap in taps),
    }
    if t.rolled:
        found["round_shifts"] = t.round_shifts
    if t.straight:
        found |= _stretch_constants(t)
    if t.straight and t.plane_barriers > 1:
        found["planes_of_entries"] = tuple(t.plane_of(off) for off, _ in flat)
    return found


def _bounds(t: Tiling) -> tuple[int, ...]:
    """[variant][block, and the end]: where its entries begin."""
    found: list[int] = []
    begin = 0
    for blocks in t.entries:
        ends = list(accumulate(map(len, blocks), initial=begin))
        found += ends
        begin = ends[-1]
    return tuple(found)


def _stretch_constants(t: Tiling) -> Constants:
    """Of the stretches of code that variants share."""
    stretches = t.stretches
    numbers = {first: i for i, first in enumerate(dict.fromkeys(first for first, _ in stretches))}
    found: Constants = {"stretches": len(numbers), "first_of_stretches": tuple(numbers)}
    if len(numbers) < len(t.variants):
        found["stretches_of"] = tuple(numbers[first] for first, _ in stretches)
        found["variant_rows"] = tuple(shift for _, shift in stretches)
    return found


def weight_constants(t: Tiling, boxed: bool, packs: bool) -> Constants:
    """Of how weights come to a consumer's registers, and of packing them."""
    found: Constants = {
        "resident": t.resident,
        "stages_w": max(1, t.ring_stages) if t.wgmma else 0,
        "w_stage": t.w_stage,
        "ring_fragments": t.ring_fragments,
        "boxed": boxed,
        "packs": packs,
        "pack_taps": t.pack_taps,
    }
    if not boxed:
        found["pack_wide"] = math.gcd(t.problem.taps, t.pack_taps, 8)
    if packs:
        found["pack_parts"] = t.pack_blocks
    return found


# --- results, and a block --------------------------------------------------------------------------------------------


def store_constants(t: Tiling, store_unit: int) -> Constants:
    """Of the epilogue."""
    p = t.problem
    found: Constants = {"run_groups": t.runs, "bare": bool(t.bare)}
    if t.shuffle is not None:
        return found | {"store": STORE_PHASES} | t.shuffle.constants()
    if t.bare:
        bare = [one for of_variant in t.bare for one in of_variant]
        found["bares"] = tuple(accumulate(map(len, t.bare), initial=0))
        found |= {f"bares_{name}": tuple(getattr(one, name) for one in bare) for name in ("d", "h", "w", "rows")}
    if t.drained:
        return found | {"store": STORE_BOXES, "out_span": t.out_span}
    if not t.channels_last:
        return found | {"store": STORE_ROWS, "store_unit": store_unit}
    units = result_shape(p)[1] % t.vec == 0 and not (p.groups > 1 and t.cout_g % t.vec)
    return found | {"store": STORE_PIXELS, "aligned_cout": units, "batch_as_width": p.batch_as_width}


def block_constants(t: Tiling, claimed: bool) -> Constants:
    """Of a block: which tiles are its own, its shared memory and its registers."""
    found: Constants = {
        "cluster": t.cluster,
        "claimed": claimed,
        "shared_bytes": t.shared_bytes + (CLAIMS_BYTES if claimed else 0),
    }
    if t.wgmma:  # both warpgroups of each kind together have a block's 65,536
        producers = producer_registers(t)
        found |= {"producer_registers": producers, "consumer_registers": 256 - producers}
    return found


def producer_registers(t: Tiling) -> int:
    """Registers of a producer's thread.

    Producers that copy rows, or make two parts of each value, need most; those that know few pixels, least.
    """
    if t.channels_last:
        return 48
    if t.tensor_map and t.parts == 1:
        return 48 if t.pixels <= 4 * 192 else 56
    # Consumers of few accumulators do with 160; 7 pixels a thread spill 104 B at 72.
    return 96 if not t.tensor_map and t.mb * t.nb * t.parts <= 2 else 72
