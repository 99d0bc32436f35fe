"""The text of an exported file: constants, device code, launches, autograd and ``ModelNew``."""

from __future__ import annotations

from collections.abc import Mapping

from upconv.cuda.gpu import Gpu
from upconv.export import cpp, device, passes, plain, sizes
from upconv.export.comments import WIDTH
from upconv.export.head import head
from upconv.export.passes import Kernel
from upconv.export.signatures import Signature
from upconv.export.template import (
    ASKED,
    AUTOGRAD,
    CALLS,
    CUT,
    DENSE,
    FAST_CALLS,
    FILE,
    FORWARD_ONLY,
    RESULT,
    ROUNDED,
    ROWS,
    SEGMENTS,
    SHARED_GRAD,
    SHARED_X,
    TF32,
    WIDE,
)
from upconv.problem import Layout, Pass, Problem

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
        "DENSE": ROWS if any(max(k.multiples) > 1 for k in found) else DENSE,
        "WIDE": WIDE if any(k.result_multiple > 1 for k in found) else "",
        "ARCH": gpu.arch,
        "CAPABILITY": str(gpu.capability),
        "DEVICES": _devices(gpu),
        "LAUNCHES": launches,
        "ROUNDED": (ROUNDED if "rounded(" in launches else "") + (SEGMENTS if "segments(" in launches else ""),
        "PASSES": "forward" if forward_only else "three passes",
        "CALLS": "\n\n".join(
            (*(_call(one, found, p.layout) for one in names), FORWARD_ONLY if forward_only else AUTOGRAD)
        ),
        **_shared(found),
        "TF32": TF32 if by_flags else "",
        "ASKED": ASKED if by_flags else "",
        "FLAGS": " and rounds_to_tf32()" if by_flags else "",
        "MODEL": signature.model().rstrip("\n"),
        "ATTRIBUTE": signature.attribute,
        "NAMES": _NAMES[p.rank - 1],
    }
    return _filled(FILE, values)


def _call(pass_: Pass, found: tuple[Kernel, ...], layout: Layout) -> str:
    """A pass on tensors: by its fast kernel, if it has one and that serves them, else by the plain one."""
    fast_call = ""
    for k in found:
        if k.pass_ == pass_:
            rows, of_grad = (f", {n}" if n > 1 else "" for n in k.multiples)
            result = RESULT if k.result_multiple > 1 else {"RESULT": "", "OUT": "out", "RETURNED": "out"}
            step = k.columns and k.cut
            cut = {"CUT": CUT if k.columns else "", "STEP": str(step), "OVERLAP": str(k.columns - step)}
            cut["COLUMNS"] = str(k.columns)
            more = f", {k.result_more}" if k.result_more else ""
            values = {
                **cut,
                **result,
                "MULTIPLE": str(k.result_multiple),
                "MORE": more,
                "ROWS": rows,
                "GRAD_ROWS": of_grad,
            }
            fast_call = _filled(FAST_CALLS[pass_], values)
    of = "grad" if pass_ == "grad-input" else "x"
    empty = f"torch.empty(shape, dtype={of}.dtype, device={of}.device, memory_format=FORMAT)"
    values = {"FAST_CALL": fast_call, "EMPTY": f"{of}.new_empty(shape)" if layout == "nchw" else empty}
    return _filled(CALLS[pass_], values)


def _shared(found: tuple[Kernel, ...]) -> dict[str, str]:
    """What has tensors that two kernels read copied once, where both have the same multiple of columns."""
    of: dict[str, tuple[int, int]] = dict.fromkeys(passes.NAMES, (1, 1))
    of |= {k.pass_: k.multiples for k in found}
    x, grad = of["grad-weight"]
    same_x, same_grad = x == of["fwd"][0] > 1, grad == of["grad-input"][0] > 1
    return {
        "SHARED_X": _filled(SHARED_X if same_x else "", {"MULTIPLE": str(x)}),
        "SHARED_GRAD": _filled(SHARED_GRAD if same_grad else "", {"MULTIPLE": str(grad)}),
    }


def fast(found: tuple[Kernel, ...], gpu: Gpu) -> str:
    """The kernels' templates, a struct of constants for each pass, then the host's code."""
    templates = device.templates(found, gpu)
    kernel, launch = cpp.copies(found)
    constants = (f"{_banner(k)}\n{device.constants(k, found, templates)}" for k in found)
    parts = [
        cpp.INCLUDES + "".join(f"#include <{name}>\n" for name in device.includes(found)),
        device.spaced(templates, *constants, *filter(None, [kernel])),
        cpp.helpers(found),
        *map(cpp.definition, found),
        launch,
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
