"""One layer -> one self-contained Python file: ``ModelNew`` with its CUDA kernels inline.

The file imports torch and the standard library alone. Its kernels are those which the planner chooses for the layer on
a GPU (`upconv.export.passes`), at every batch and spatial size, and plain ones for all other layers. `device` prints
their templates, `cpp` their launches, `sizes` what those depend on, and `program` puts all into the `template`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from upconv.cuda.gpu import Gpu
    from upconv.problem import Precision, Problem

_LAYERS: dict[int, type[nn.Module]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_SIZES = {1: (65536,), 2: (256, 256), 3: (64, 64, 64)}
_BATCH = 8


def export(
    module: nn.Module,
    example: Tensor | Sequence[int] | None,
    path: str | os.PathLike[str],
    *,
    precision: Precision | None = None,
    arch: str | None = None,
    forward_only: bool = False,
) -> None:
    """Writes a file whose ``ModelNew()`` computes what a transposed convolution computes, with kernels of its own.

    Args:
        module: a ConvTranspose1d, 2d or 3d of torch.nn or upconv; its dtype and arguments are the file's.
        example: an input ``(batch, in_channels, *size)``, or its shape, that the kernels are planned for (other sizes
            run as well); a tensor's memory format is the file's. None for a size of moderate length.
        path: the file, replaced if it exists.
        precision: how float32 is multiplied; by default as PyTorch's flags have it by default: ``tf32``.
        arch: what the kernels are compiled for, like ``90a`` for sm_90a; by default the current CUDA device's, without
            one ``90a``.
        forward_only: the file computes no gradients.

    Raises:
        TypeError: ``module`` is no transposed convolution.
        ValueError: one sentence that names the argument and the value got.
    """
    Path(path).resolve().parent.stat()
    publish(path, source(problem_of(module, example, precision), arch, forward_only))


def problem_of(
    module: nn.Module, example: Tensor | Sequence[int] | None = None, precision: Precision | None = None
) -> Problem:
    """The forward of a layer on an example. Errors: those of `export`."""
    from upconv.problem import Problem, is_channels_last

    rank = next((rank for rank, kind in _LAYERS.items() if isinstance(module, kind)), None)
    if rank is None:
        raise TypeError(f"module must be a ConvTranspose1d, ConvTranspose2d or ConvTranspose3d, got {_name(module)}")
    layer: Any = module
    shape = tuple(example.shape if isinstance(example, Tensor) else example or ())
    if example is None:
        shape = (_BATCH, layer.in_channels, *_SIZES[rank])
    if len(shape) != rank + 2 or shape[1] != layer.in_channels or min(shape) < 1:
        raise ValueError(
            f"example must be an input of {rank + 2} dimensions with {layer.in_channels} channels, got shape {shape}"
        )
    weight: Tensor = layer.weight
    if isinstance(example, Tensor) and example.dtype != weight.dtype:
        raise ValueError(f"example must have the layer's dtype {weight.dtype}, got {example.dtype}")
    last = (
        isinstance(example, Tensor)
        and not example.is_contiguous()
        and is_channels_last(example.shape, example.stride())
    )
    return Problem.make(
        shape[0], layer.in_channels, layer.out_channels, shape[2:], layer.kernel_size, layer.stride, layer.padding,
        layer.output_padding, layer.dilation, layer.groups, bias=layer.bias is not None, dtype=weight.dtype,
        precision=precision or default_precision(weight.dtype), layout="channels_last" if last else "nchw",
    )  # fmt: skip


def default_precision(dtype: torch.dtype) -> Precision:
    """How PyTorch's flags have a dtype multiplied by default: float32 as TF32."""
    from upconv.problem import PRECISIONS

    if dtype is torch.float32:
        return "tf32"
    if dtype not in PRECISIONS:
        raise ValueError(f"the layer's dtype must be float32, bfloat16, float16 or float64, got {dtype}")
    return PRECISIONS[dtype][0]


def source(p: Problem, arch: str | None = None, forward_only: bool = False) -> str:
    """The file for a layer, with torch.nn's constructor. Errors: ValueError as for `export`."""
    from upconv.export import signatures
    from upconv.export.program import program

    return program(p, signatures.layer(p), gpu_of(arch), forward_only)


def kernelbench(number: int, arch: str | None = "90a", shape: Sequence[int] | None = None) -> str:
    """The file for a KernelBench level-1 problem, with that problem's constructor.

    Args:
        number: 57 for the problem of that number.
        arch: as for `export`; the default is that of ``models/``.
        shape: of the input to plan for, instead of the problem's own.

    Raises:
        ValueError: no transposed convolution has this number; or as for `export`.
    """
    from upconv.export import signatures
    from upconv.export.program import program

    p = kernelbench_problem(number)
    if shape is not None:
        if len(shape) != p.rank + 2 or shape[1] != p.in_channels:
            raise ValueError(
                f"the input must have {p.rank + 2} dimensions and {p.in_channels} channels, got {tuple(shape)}"
            )
        p = p.with_(batch=shape[0], size=tuple(shape[2:]))
    return program(p, signatures.kernelbench(number, p), gpu_of(arch))


def kernelbench_problem(number: int) -> Problem:
    """A KernelBench level-1 problem at its own size, multiplied as PyTorch does it by default.

    That is TF32, but not with groups: cuDNN's grouped kernels know no TF32, so 72's and 75's outputs in TF32 are not
    within KernelBench's 1e-4 of PyTorch's. (Nor are those of the other 3-D layers in IEEE float32: cuDNN takes TF32
    there, with a relative error of 3e-4.)
    """
    from upconv.bench.suites import SUITES

    found = {case.name: case.problem for case in SUITES["kernelbench"]}.get(f"kb{number}")
    if found is None:
        numbers = ", ".join(case.name[2:] for case in SUITES["kernelbench"])
        raise ValueError(f"the KernelBench problem must be one of {numbers}; got {number}")
    return found.with_(precision="ieee" if found.groups > 1 else default_precision(found.dtype))


def gpu_of(arch: str | None) -> Gpu:
    """The GPU that kernels are chosen for."""
    from upconv.cuda import gpu

    if arch is None:
        return gpu.gpu(torch.cuda.current_device()) if torch.cuda.is_available() else gpu.H200
    known = {g.arch: g for g in (gpu.A100, gpu.RTX3090, gpu.RTX4090, gpu.H200, gpu.B200, gpu.RTX5090)}
    if arch not in known:
        raise ValueError(f"arch must be one of {', '.join(known)}; got {arch!r}")
    return known[arch]


def publish(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file whole or not at all. Errors: OSError."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _name(module: object) -> str:
    return type(module).__name__
