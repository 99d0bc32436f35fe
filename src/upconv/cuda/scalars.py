"""Constants that the kernels for CUDA cores share (``kernels/scalar.cuh``)."""

from __future__ import annotations

import torch

from upconv.cuda.compile import jit
from upconv.problem import Precision, Problem, triple

_EXACT: dict[torch.dtype, Precision] = {
    torch.float32: "ieee",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
}
PRECISIONS = {dtype: jit.PRECISIONS[precision] for dtype, precision in _EXACT.items()}
"""How a dtype's numbers are multiplied, as ``kernels/number.cuh`` numbers it."""


def geometry(p: Problem) -> dict[str, int]:
    """A layer's kernel, stride, dilation and padding along D, H and W; axes that it lacks have one tap."""
    found: dict[str, int] = {}
    for name, values, fill in (
        ("kernel", p.kernel, 1),
        ("stride", p.stride, 1),
        ("dilation", p.dilation, 1),
        ("padding", p.padding, 0),
    ):
        found |= {f"{name}_{axis}": value for axis, value in zip("dhw", triple(values, fill))}
    return found
