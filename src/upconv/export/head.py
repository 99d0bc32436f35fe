"""The head of an exported file: what the layer is, what its kernels want, and what each of them does."""

from __future__ import annotations

import textwrap

from upconv.cuda.direct import direct
from upconv.cuda.gemm import gather, joined
from upconv.cuda.gpu import Gpu
from upconv.cuda.pixels.choice import TileChoice
from upconv.cuda.pixels.sweep import Sweep
from upconv.export.comments import WIDTH
from upconv.export.passes import Choice, Kernel
from upconv.export.signatures import Signature
from upconv.problem import Problem

_MULTIPLIED = {
    "tf32": (
        "float32, rounded to TF32 (nearest even) for tensor cores, as PyTorch's defaults have it; where its flags ask"
        " for IEEE float32, the plain kernels compute"
    ),
    "ieee": (
        "float32, multiplied as such or, on tensor cores, as two TF32 parts in three products, which keeps float32's"
        " accuracy"
    ),
    "fp16": "float16, summed in float32",
    "bf16": "bfloat16, summed in float32",
    "fp64": "float64",
}
_PASSES = {"fwd": "forward", "grad-input": "gradient for the input", "grad-weight": "gradient for the weight"}
_FORMULA = """\
Along each axis output p, tap k and input i meet where p + padding = i * stride + k * dilation. For channels c and o of
one group

  y[n, o, p] = bias[o] + sum over c, k of x[n, c, i] * w[c, o, k]"""


def head(p: Problem, signature: Signature, gpu: Gpu, found: tuple[Kernel, ...], forward_only: bool = False) -> str:
    """The file's docstring."""
    multiplied = _MULTIPLIED[p.precision]
    if p.precision == "ieee" and p.groups > 1:
        multiplied += "; PyTorch's kernel for these groups is IEEE float32 whatever its TF32 flag says, so these are"
    layout = "contiguous" if p.layout == "nchw" else "channels_last"
    multiple = max(n for k in found for n in k.multiples)
    rows = f"; so are those whose rows are no multiple of {multiple} columns" * (multiple > 1)
    rows += "".join(f". Rows of more than {k.columns} columns are cut for the forward" for k in found if k.columns)
    computes = "the forward, and no gradients" if forward_only else "forward, first and second gradients"
    paragraphs = [
        f"{signature.title}: a transposed convolution with CUDA kernels of its own, in one file.",
        f"Layer: ConvTranspose{p.rank}d({_arguments(p)}).",
        _FORMULA,
        "ModelNew has the constructor, the parameters (equal under a seed) and the state_dict of the original, and"
        f" computes {computes}.",
        "Constraints:",
        f"- The fast kernels serve this layer with {p.dtype} on CUDA devices of sm_{gpu.arch}. Plain kernels, which are"
        " slow, serve other arguments and dtypes, and other devices from sm_70 on. A reader begins with these.",
        "- nvcc, a C++ compiler and ninja are needed at the first call, which takes a minute.",
        f"- Values: {multiplied}.",
        f"- Tensors are copied to the {layout} memory format where needed{rows}. Results are {layout}.",
        "- Results are bit-equal from run to run. Under torch.autocast they have the weights' dtype.",
        f"Kernels, which serve every batch and spatial size, as planned for inputs of"
        f" {' x '.join(map(str, p.input_shape))} on an {gpu.name}:",
        *(f"- {_PASSES[k.pass_]}: {k.choice.summary.rsplit(', grid', 1)[0]}." for k in found),
        *(f"{_DRAWN}{_PASSES[k.pass_]}:\n{_picture(k)}" for k in found[:1] if _drawn(k)),
        signature.measured,
    ]
    lines: list[str] = []
    for text in paragraphs:
        bullet = text.startswith("- ")
        if lines and not bullet:
            lines.append("")
        if text.startswith((_DRAWN, _FORMULA)):
            lines += text.splitlines()
        else:
            lines += textwrap.wrap(text, WIDTH - 4, subsequent_indent="  " if bullet else "", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _arguments(p: Problem) -> str:
    """Those of torch.nn's layer that are no defaults."""
    given = {"stride": p.stride, "padding": p.padding, "output_padding": p.output_padding, "dilation": p.dilation}
    least = {"stride": 1, "dilation": 1}
    more = [f"{name}={value}" for name, value in given.items() if set(value) != {least.get(name, 0)}]
    more += [f"groups={p.groups}"] * (p.groups > 1)
    return ", ".join((str(p.in_channels), str(p.out_channels), f"kernel_size={p.kernel}", *more))


_DRAWN = "A block of the "
_TURNED = "six warps that turn, a thread that loads pixels, one that loads weights, two warpgroups that multiply"


def _drawn(k: Kernel) -> bool:
    c = k.choice
    return k.pass_ != "grad-weight" and (not isinstance(c, gather.Choice) or (c.tiling.wgmma and c.tiling.tensor_map))


def _picture(k: Kernel) -> str:
    """What a block does with its tensors, and which of its threads."""
    source = "output's gradient" if k.pass_ == "grad-input" else "input"
    pixels, weights, roles = _ways(k.choice)
    first, second = f"{source} -> {pixels}", f"weights -> {weights}"
    wide = max(len(first), len(second))
    first, second = (f"  {one} {'-' * (wide - len(one))}--+" for one in (first, second))
    return f"{first}\n{second}-> result\n  Roles: {roles}."


def _ways(c: Choice) -> tuple[str, str, str]:
    """How a choice's pixels and weights come to be multiplied, and by whom."""
    if isinstance(c, gather.Choice):
        t = c.tiling
        turned = f"{t.stages_s} slots -> turned by 6 warps -> " * (not t.channels_last)
        tile = " x ".join(map(str, t.tile[1:]))
        weights = "resident" if t.resident else f"ring of {t.stages_w} x {t.w_stage} fragments"
        return (
            f"{turned}ring of {t.stages_p} tiles ({tile} pixels, halo, {t.chunk} channels)",
            f"packed -> {weights}",
            _TURNED if turned else "threads that load pixels and weights, two warpgroups that multiply",
        )
    if isinstance(c, joined.Choice):
        return (
            f"{c.tile.slots} slots of rows -> joined by 2 warps -> ring of {c.tile.stages} stages of places",
            f"packed -> ring of {c.tile.weight_stages} stages",
            "a thread that loads rows, one that loads weights, two warps that join, two warpgroups that multiply",
        )
    if isinstance(c, direct.Choice):
        return "tile of cells in shared memory -> registers", "shared memory -> registers", "all threads alike"
    if isinstance(c, TileChoice) and isinstance(c.tile, Sweep):
        return (
            "slots -> turned by 6 warps -> ring of chunks of a slice",
            "packed -> ring, or resident",
            _TURNED,
        )
    return (
        "ring of rows of channels -> registers",
        "packed -> resident",
        "a warp that loads pixels and weights, two warpgroups that multiply, each its own tiles",
    )
