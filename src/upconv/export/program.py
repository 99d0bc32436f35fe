"""The text of an exported file: constants, device code, launches, autograd and ``ModelNew``."""

from __future__ import annotations

from collections.abc import Mapping

from upconv.cuda.gpu import Gpu
from upconv.cuda.wgrad.wgrad_costs import AnyTiling
from upconv.export import cpp, device, passes, plain, sizes
from upconv.export.device import WIDTH
from upconv.export.head import head
from upconv.export.passes import Kernel
from upconv.export.signatures import Signature
from upconv.export.template import (
    AUTOGRAD,
    CALLS,
    CUT,
    FAST_CALLS,
    FILE,
    FORWARD_ONLY,
    RECORDS,
    RESULT,
    ROUNDED,
    SEGMENTS,
    TF32,
    WEIGHT_OF,
    WIDE,
)
from upconv.problem import Pass, Problem

_TITLES = {"fwd": "forward", "grad-input": "gradient for the input", "grad-weight": "gradient for the weight"}
_NAMES = ("batch, channels, length", "batch, channels, height, width", "batch, channels, depth, height, width")


def program(p: Problem, signature: Signature, gpu: Gpu, forward_only: bool = False) -> str:
    """The file for a layer at every batch and spatial size, planned for ``p``'s.

    Args:
        p: the forward, with the precision and the layout that the file is to have.
        signature: the constructor of ``ModelNew``.
        gpu: the GPU that the kernels are chosen and compiled for.
        forward_only: the file has no gradients.
    """
    found = passes.kernels(p, gpu, forward_only)
    names = {one: name for one, name in passes.NAMES.items() if one == "fwd" or not forward_only}
    launches = sizes.python(found, gpu)
    by_flags = p.precision == "tf32"
    values = {
        "HEAD": head(p, signature, gpu, found, forward_only),
        "CONSTANTS": _constants(p),
        "PLAIN": plain.text(names),
        "FAST": fast(found, gpu),
        "WEIGHT_OF": "".join(_weight_of(k.records) for k in found if k.records),
        "WIDE": WIDE if any(k.result_multiple > 1 for k in found) else "",
        "ARCH": gpu.arch,
        "CAPABILITY": str(gpu.capability),
        "DEVICES": _devices(gpu),
        "LAUNCHES": launches,
        "ROUNDED": (ROUNDED if "rounded(" in launches else "") + (SEGMENTS if "segments(" in launches else ""),
        "PASSES": "forward" if forward_only else "three passes",
        "CALLS": "\n\n".join((*(_call(one, found) for one in names), FORWARD_ONLY if forward_only else AUTOGRAD)),
        "TF32": TF32 if by_flags else "",
        "FLAGS": " and rounds_to_tf32()" if by_flags else "",
        "MODEL": signature.model().rstrip("\n"),
        "ATTRIBUTE": signature.attribute,
        "NAMES": _NAMES[p.rank - 1],
    }
    return _filled(FILE, values)


def _call(pass_: Pass, found: tuple[Kernel, ...]) -> str:
    """A pass on tensors: by its fast kernel, if it has one and that serves them, else by the plain one."""
    fast_call = ""
    for k in found:
        if k.pass_ == pass_:
            rows, of_grad = (f", {n}" if n > 1 else "" for n in k.multiples)
            result = RESULT if k.result_multiple > 1 else {"RESULT": "", "OUT": "out", "RETURNED": "out"}
            cut = {"CUT": CUT if k.columns else "", "COLUMNS": str(k.columns)}
            values = {**cut, **result, "MULTIPLE": str(k.result_multiple), "ROWS": rows, "GRAD_ROWS": of_grad}
            text = FAST_CALLS[pass_]
            if (t := k.records) is not None:
                text, values["WORDS"] = RECORDS, str(t.tiles * t.sums_bytes // 4)
            fast_call = _filled(text, values)
    return CALLS[pass_].replace("@FAST_CALL@", fast_call)


def _weight_of(t: AnyTiling) -> str:
    """How a weight's gradient lies in the sums of its tiles (`WgradShape`)."""
    p, (ci, co), taps, sets = t.problem, t.block, t.taps, t.sets
    tiles = [-(-count // of) for count, of in zip(t.channels, t.block)]
    pitch = co + 4
    tap = ci * pitch + 8
    sizes = (p.groups, *tiles, *sets, *taps, ci, co)
    strides = [1, pitch, tap, tap * taps[2], tap * taps[2] * taps[1]]
    strides.append(t.sums_bytes // 4)
    for n in (sets[2], sets[1], sets[0], tiles[1], tiles[0]):
        strides.append(strides[-1] * n)
    kernel = (1,) * (3 - p.rank) + p.kernel
    whole = (p.groups, tiles[0] * ci, tiles[1] * co, *(a * b for a, b in zip(sets, taps)))
    values = dict(zip(("CIN", "COUT", "KERNEL_D", "KERNEL_H", "KERNEL_W"), map(str, (*t.channels, *kernel))))
    return _filled(
        WEIGHT_OF, {**values, "SIZES": str(sizes), "STRIDES": str(tuple(strides[::-1])), "WHOLE": str(whole)}
    )


def fast(found: tuple[Kernel, ...], gpu: Gpu) -> str:
    """The kernels' templates, a struct of constants for each pass, then the host's code."""
    templates = device.templates(found, gpu)
    parts = [
        cpp.INCLUDES + "".join(f"#include <{name}>\n" for name in device.includes(found)),
        device.spaced(templates, *(f"{_banner(k)}\n{device.constants(k, found, templates)}" for k in found)),
        cpp.helpers(found),
        *map(cpp.definition, found),
    ]
    return "\n".join(part for part in parts if part)


def _banner(k: Kernel) -> str:
    return f"// --- constants: {_TITLES[k.pass_]} ".ljust(WIDTH, "-") + "\n"


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _constants(p: Problem) -> str:
    layout = "contiguous_format" if p.layout == "nchw" else "channels_last" if p.rank == 2 else "channels_last_3d"
    given = f"stride={p.stride}, padding={p.padding}, output_padding={p.output_padding}, dilation={p.dilation}"
    return "\n".join(
        (
            f"WEIGHT = {p.weight_shape}",
            f"LAYER = Arguments({given}, groups={p.groups})",
            f"DTYPE, FORMAT, RANK = {p.dtype}, torch.{layout}, {p.rank}",
        )
    )


def _devices(gpu: Gpu) -> str:
    """The condition under which a device of capability ``have`` runs what is compiled for the GPU's."""
    if gpu.arch.endswith("a"):
        return "have == CAPABILITY"
    return "have[0] == CAPABILITY[0] and have >= CAPABILITY"
