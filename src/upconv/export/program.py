"""The text of an exported file: constants, device code, launches, autograd and ``ModelNew``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from upconv.cuda.gpu import Gpu
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
    RESULT,
    ROUNDED,
    SEGMENTS,
    TF32,
    WIDE,
)
from upconv.problem import Pass, Problem

_TITLES = {"fwd": "Forward", "grad-input": "Gradient for the input", "grad-weight": "Gradient for the weight"}
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
    launches = "\n\n".join(sizes.python(k, gpu) for k in found)
    by_flags = p.precision == "tf32"
    values = {
        "HEAD": head(p, signature, gpu, found, forward_only),
        "CONSTANTS": _constants(p),
        "PLAIN": plain.text(names),
        "FAST": fast(found, gpu),
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
            fast_call = _filled(FAST_CALLS[pass_], values)
    return CALLS[pass_].replace("@FAST_CALL@", fast_call)


def fast(found: tuple[Kernel, ...], gpu: Gpu) -> str:
    """The kernels' templates, a struct of constants for each pass, then the host's code."""
    templates = device.templates(found, gpu)
    parts = [
        cpp.INCLUDES + "".join(f"#include <{name}>\n" for name in device.includes(found)),
        device.spaced(templates, *(f"{_banner(k)}\n{device.constants(k, templates)}" for k in found)),
        cpp.helpers(found),
        *map(cpp.definition, found),
    ]
    return "\n".join(part for part in parts if part)


def _banner(k: Kernel) -> str:
    line = "// " + "=" * (WIDTH - 3)
    text = textwrap.fill(
        f"{_TITLES[k.pass_]}: {k.choice.summary.rsplit(', grid', 1)[0]}.",
        WIDTH,
        initial_indent="// ",
        subsequent_indent="// ",
        break_on_hyphens=False,
    )
    return f"{line}\n{text}\n{line}\n"


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
