"""The head of an exported file: what the layer is, what its kernels want, and what each of them does."""

from __future__ import annotations

import textwrap

from upconv.cuda.gemm import gather
from upconv.cuda.gpu import Gpu
from upconv.export.device import WIDTH
from upconv.export.passes import Kernel
from upconv.export.signatures import Signature
from upconv.problem import Problem

_MULTIPLIED = {
    "tf32": (
        "float32, rounded to TF32 (nearest even) and multiplied on tensor cores, as PyTorch's defaults have it; where"
        " its flags ask for IEEE float32 the plain kernels do"
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


def head(p: Problem, signature: Signature, gpu: Gpu, found: tuple[Kernel, ...], forward_only: bool = False) -> str:
    """The file's docstring."""
    arguments = [f"{p.in_channels}, {p.out_channels}, kernel_size={p.kernel}", f"stride={p.stride}"]
    arguments += [f"padding={p.padding}", f"output_padding={p.output_padding}", f"dilation={p.dilation}"]
    shape = " x ".join(map(str, p.input_shape))
    multiplied = _MULTIPLIED[p.precision]
    if p.precision == "ieee" and p.groups > 1:
        multiplied += "; PyTorch's kernel for these groups is IEEE float32 whatever its TF32 flag says, so these are"
    layout = "contiguous" if p.layout == "nchw" else "channels_last"
    multiple = max((n for k in found if not k.columns for n in k.multiples), default=1)
    widths = [f"- Rows that are no multiple of {multiple} columns are copied, with zeros behind them."] * (multiple > 1)
    widths += [
        f"- The forward's rows have {k.columns} columns: shorter ones are copied likewise, and longer ones are cut."
        for k in found
        if k.columns
    ]
    computes = "the forward, and no gradients" if forward_only else "forward, first and second gradients"
    paragraphs = [
        f"{signature.title}: a transposed convolution with CUDA kernels of its own, in one file.",
        f"Layer: ConvTranspose{p.rank}d({', '.join(arguments)}, groups={p.groups}).",
        "Along each axis output o, tap k and input i meet where o + padding = i * stride + k * dilation. An output is"
        " the bias plus the sum, over input channels and taps, of input times weight.",
        "ModelNew has the constructor, the parameters (equal under a seed) and the state_dict of the original, and"
        f" computes {computes}, with the kernels below. They are chosen for inputs of {shape}"
        f" on an {gpu.name} and serve every batch and spatial size.",
        "Constraints:",
        f"- The fast kernels serve this layer with {p.dtype} on CUDA devices of sm_{gpu.arch}. Plain kernels serve"
        " other arguments and dtypes, and other devices from sm_70 on. A reader begins with these.",
        "- nvcc, a C++ compiler and ninja are needed at the first call, which takes a minute.",
        f"- Values: {multiplied}.",
        f"- For the fast kernels tensors are copied to the {layout} memory format where needed; results are {layout}.",
        *widths,
        "- Results are bit-equal from run to run. Under torch.autocast inputs are cast to the weights' dtype, which"
        " results have, too.",
        "Kernels:",
        *(f"- {_PASSES[k.pass_]}: {k.choice.summary.rsplit(', grid', 1)[0]}." for k in found),
        *_picture(found),
        f"Measured by `{signature.measured}`.",
    ]
    lines: list[str] = []
    for text in paragraphs:
        bullet = text.startswith("- ")
        if lines and not bullet:
            lines.append("")
        if text.startswith(_DRAWN):
            lines += text.splitlines()
        else:
            lines += textwrap.wrap(text, WIDTH - 4, subsequent_indent="  " if bullet else "", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


_DRAWN = "A block of the "


def _picture(found: tuple[Kernel, ...]) -> list[str]:
    """How the first kernel of `gather` feeds its tensor cores, if there is one."""
    for k in found:
        if isinstance(k.choice, gather.Choice) and k.choice.tiling.wgmma:
            t = k.choice.tiling
            source = "output's gradient" if k.pass_ == "grad-input" else "input"
            tile = " x ".join(map(str, t.tile[1:]))
            turned = f" -> {t.stages_s} slots -> turned by 6 warps" * (not t.channels_last)
            weights = "resident" if t.resident else f"ring of {t.stages_w} x {t.w_stage} fragments"
            lines = [
                f"{source}{turned} -> ring of {t.stages_p} tiles ({tile} pixels, halo, {t.chunk} channels) --+",
                f"weights -> packed -> {weights} --+-> wgmma -> result",
            ]
            wide = max(line.index("--+") for line in lines)
            lines = [line.replace(" --+", f" {'-' * (wide - line.index('--+'))}--+") for line in lines]
            return [
                f"{_DRAWN}{_PASSES[k.pass_]}, whose rings are of shared memory:\n"
                + "\n".join(f"  {one}" for one in lines)
            ]
    return []
