"""The gather-GEMM kernel's constants: what ``kernels/gather.cu`` is told of a tiling beside sizes of input and batch.

Each function has those of one step of the kernel. `pixel_constants` has those of ``kernels/gather_tile.cuh`` and of
what brings pixels there, which `sweep` shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from itertools import accumulate

from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.compile import jit
from upconv.cuda.gemm.tiling import CLAIMS_BYTES, Tiling
from upconv.cuda.gemm.tiling_pixels import Fetch

Constants = dict[str, int | tuple[int, ...]]
"""By names in lower case; booleans, integers, or arrays of some."""


class Steps(IntEnum):
    """How a chunk's steps are gone through: `Steps` of kernels/gather_work.cuh."""

    STRAIGHT, ROLLED = range(2)


class Stores(IntEnum):
    """How results are stored: `Stores` of kernels/gather_work.cuh."""

    STORE_ROWS, STORE_PIXELS, STORE_PHASES, STORE_BOXES = range(4)


def constants(
    t: Tiling, boxed: bool = False, store_unit: int = 0, any_rows: bool = False, claimed: bool = False
) -> Constants:
    """All constants of a kernel.

    ``boxed``: its weights are not packed. ``store_unit``: bytes at multiples of which the result's rows begin and
    end (`gather.store_unit`), an element's if never at more; 0 for a kernel that serves all. ``any_rows``: an exported
    file's, which stores other rows by elements. ``claimed``: its blocks claim tiles (`Tiling.claimable`).
    """
    found = pixel_constants(t) | _weight_constants(t) | _step_constants(t)
    found |= _store_constants(t, store_unit, any_rows)
    found |= {"boxed": boxed, "claimed": claimed, "cluster": t.cluster}
    found["shared_bytes"] = t.shared_bytes + (CLAIMS_BYTES if claimed else 0)
    producers = producer_registers(t) if t.wgmma else 0  # both warpgroups of each kind together have a block's 65,536
    return found | {"producer_registers": producers, "consumer_registers": 256 - producers if producers else 0}


def _named(t: Tiling, *names: str) -> Constants:
    """Properties that are constants by the same name."""
    return {name: getattr(t, name) for name in names}


def _of_axes(name: str, axes: str, values: Iterable[int | tuple[int, ...]]) -> Constants:
    return {f"{name}_{axis}": value for axis, value in zip(axes, values)}


def pixel_constants(t: Tiling) -> Constants:
    """N: of a chunk's pixels in shared memory, and of who brings them."""
    rows = t.rows
    found = _named(t, "wgmma", "channels_last", "cin_g", "first_w", "columns", "plane", "strided_box")
    found |= {"precision": jit.PRECISIONS[t.problem.precision], "cin": source_shape(t.problem)[1], "ck": t.chunk}
    found |= _of_axes("tile", "ndhw", t.tile) | _of_axes("in_step", "dhw", t.in_steps)
    found |= _of_axes("rows", "dh", map(len, rows)) | _of_axes("row_step", "dh", t.row_steps)
    return (
        found
        | {
            "offsets_d": rows[0],
            "offsets_h": rows[1],
            "planes": t.plane_count if t.strided_box else len(t.residues),
            "residues": tuple(w for _, _, w in t.planes) if t.strided_box else t.residues,
            "stages_p": t.stages_p,
            "stages_s": t.stages_s,
            "own_rows": t.own_rows,
        }
        | _fetch_constants(t)
    )


def _fetch_constants(t: Tiling) -> Constants:
    """Of the way in which pixels come."""
    found = _named(t, "fetch")
    if not t.channels_last:
        found |= _named(t, "slot_boxes", "slot_channel", "slot_copied")
        found |= {} if t.whole else _named(t, "slot_units")
    if t.fetch == Fetch.BY_THREADS:
        return found | (_named(t, "aligned_channels") if t.channels_last else {})
    if t.whole is not None:
        found |= _of_axes("image", "dhw", t.whole) | _named(t, "box_pixels")
        found |= {"beside": t.beside or 1, "box_channels": t.box_channels if t.beside else 1}
        return found | ({"beside_columns": t.image_columns, "beside_w": t.image_width} if t.beside else {})
    found |= _of_axes("first", "dh", (rows[0] for rows in t.rows))
    if t.channels_last:
        return found | {"planes_d": tuple(d for d, _, _ in t.planes), "planes_h": tuple(h for _, h, _ in t.planes)}
    if t.fetch == Fetch.BY_BOXES:
        return found | {"column_pad": t.first_w % t.vec}
    assert t.classes is not None
    found |= _named(t, "row_classes", "channel_classes")
    return found | {"row_period": t.classes[0], "rows_apart": t.bands[1][2]}


def _weight_constants(t: Tiling) -> Constants:
    """M: of output channels and sub-positions, of the consumers that share them, and of weights' way to registers."""
    p, layer = t.problem, t.problem if t.shuffle is None else t.shuffle.layer
    found = _named(t, "cout_g", "split", "wide", "mb", "subs", "rows_per_sub", "cout_blocks", "m_groups")
    found |= _named(t, "resident", "w_stage") | _of_axes("out_step", "dhw", t.out_steps)
    if t.own_rows:
        found |= _of_axes("origins", "dh", zip(*t.multiplied.origins))
    return found | {
        "grad_input": p.pass_ != "fwd",
        "cout": result_shape(layer)[1],
        "taps": layer.taps,
        "sub_h": t.sub[0],
        "sub_w": t.sub[1],
        "w_subs": t.width_subs,
        "blocks_of_w": t.multiplied.blocks_of_w,
        "variants": len(t.multiplied.variants),
        "subs_d": tuple(ud for pairs, _ in t.multiplied.variants for ud, _ in pairs),
        "subs_h": tuple(uh for pairs, _ in t.multiplied.variants for _, uh in pairs),
        "subs_w": tuple(u for _, u in t.multiplied.variants),
        "stages_w": max(1, t.ring_stages) if t.wgmma else 0,
    }


def _step_constants(t: Tiling) -> Constants:
    """K: of the steps that a chunk is multiplied in."""
    flat = [(off, taps) for blocks in t.entries for block in blocks for off, taps in block]
    found: Constants = {
        "steps": Steps.STRAIGHT if t.straight else Steps.ROLLED,
        "taps_unrolled": t.taps_unrolled,
        "queued": t.queued,
        "fragment_sets": t.fragment_sets,
        "entries": _bounds(t),
        "tap_rows": tuple(t.shift(off) for off, _ in flat),
        "tap_indices": tuple(tap for _, taps in flat for tap in taps),
    }
    if t.queued:
        shifts = [t.shift(off) for off, _ in flat[: t.taps_unrolled]]
        found["round_shifts"] = tuple(shift - shifts[0] for shift in shifts)
    if t.straight:
        stretches = t.stretches
        numbers = {first: i for i, first in enumerate(dict.fromkeys(first for first, _ in stretches))}
        found |= {"stretches": len(numbers), "first_of_stretches": tuple(numbers)}
        if len(numbers) < len(t.multiplied.variants):
            found["stretches_of"] = tuple(numbers[first] for first, _ in stretches)
            found["variant_rows"] = tuple(shift for _, shift in stretches)
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


def _store_constants(t: Tiling, store_unit: int, any_rows: bool) -> Constants:
    """Of the epilogue."""
    p = t.problem
    found: Constants = {"run_groups": t.runs, "bare": bool(t.multiplied.bare)}
    if t.shuffle is not None:
        return found | {"store": Stores.STORE_PHASES} | t.shuffle.constants()
    if t.multiplied.bare:
        found["bares"] = len(t.multiplied.bare)
        for name in ("d", "h", "rows"):
            found[f"bares_{name}"] = tuple(getattr(one, name) for one in t.multiplied.bare)
    if t.drained:
        return found | {"store": Stores.STORE_BOXES, "out_span": t.out_span}
    if not t.channels_last:
        return found | {"store": Stores.STORE_ROWS, "store_unit": store_unit, "any_rows": any_rows}
    units = result_shape(p)[1] % t.vec == 0 and not (p.groups > 1 and t.cout_g % t.vec)
    return found | {"store": Stores.STORE_PIXELS, "aligned_cout": units, "batch_as_width": p.batch_as_width}


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
