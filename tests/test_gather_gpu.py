"""The gather-GEMM's tilings on a GPU, each against the float64 reference: what the interpreter leaves out.

That is the rings and barriers, the pass through shared memory, the order of registers, and the stores of the epilogue
for every width of a run and every alignment of a row.
"""

from __future__ import annotations

import random
import zlib

import pytest
import torch

from conftest import assert_accurate
from upconv.cuda import gather
from upconv.cuda.gpu import gpu
from upconv.problem import Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PRECISIONS = {
    "tf32": torch.float32,
    "ieee": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# batch, channels in and out, size, kernel, stride, padding, output_padding, dilation, groups: rows of every alignment
LAYERS = {
    "k3": (2, 64, 64, (20, 72), 3),
    "k3 odd": (2, 40, 70, (21, 75), 3),
    "k3 even": (3, 24, 64, (19, 70), (3, 5), 1, (1, 2)),
    "k4s2": (2, 48, 130, (18, 24), 4, 2, 1),
    "k2s2": (2, 64, 136, (17, 23), 2, 2),
    "k3s2": (2, 32, 64, (18, 33), 3, 2, 1, 1),
    "s23 d21 g4": (2, 32, 64, (18, 40), (3, 5), (2, 3), (1, 2), 0, (2, 1), 4),
    "s5 d2": (2, 16, 64, (9, 30), 3, 5, 1, 0, 2),
    "32 rows": (2, 32, 32, (20, 66), (3, 7), 1, (1, 3)),
    "16 rows": (2, 20, 13, (20, 66), 3),
    "1-D": (3, 64, 128, (700,), 5, 1, 0, 0, 3),
    "1-D s8": (2, 64, 64, (101,), 16, 8, 4),
    "3-D": (2, 24, 48, (6, 9, 26), 3),
    "3-D s2": (2, 32, 32, (5, 9, 35), 3, 2, 1),
}


def _layer(name: str, precision: str, layout: str) -> Problem:
    batch, cin, cout, size, *rest = LAYERS[name]
    dtype = PRECISIONS[precision]
    return Problem.make(batch, cin, cout, size, *rest, bias=True, dtype=dtype, precision=precision, layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("name", list(LAYERS))
def test_tilings(name: str, precision: str, layout: str) -> None:
    p = _layer(name, precision, layout)
    if p.rank == 1 and layout != "nchw":
        pytest.skip("1-D tensors have no channels_last")
    device, chip = torch.device("cuda", 0), gpu(0)
    torch.manual_seed(zlib.crc32(str(p).encode()))
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    memory_format = torch.contiguous_format if layout == "nchw" else formats[p.rank]
    x = torch.randn(p.input_shape, device=device).to(p.dtype).contiguous(memory_format=memory_format)
    weight = (torch.randn(p.weight_shape, device=device) / 8).to(p.dtype)
    bias = torch.randn(p.out_channels, device=device).to(p.dtype)
    function = (None, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[p.rank]
    assert function is not None
    arguments = (p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    truth = function(x.double(), weight.double(), bias.double(), *arguments)
    size = function(x.double().abs(), weight.double().abs(), bias.double().abs(), *arguments)
    if precision == "tf32":  # operands lose up to 2^-11 each
        size = size * (1 + 2**-10 / 2**-24 / (2 * (p.in_channels // p.groups * p.taps + 2) + 2))
    chosen = gather.choose(p, chip)
    assert not isinstance(chosen, str), chosen
    others = list(gather.candidates(p, chip)) + list(gather.candidates(p, chip, wgmma=False))
    tilings = [chosen.tiling, *random.Random(zlib.crc32(str(p).encode())).sample(others, min(2, len(others)))]
    for tiling in tilings:
        prepared = gather.Choice(tiling, p, chip, 0.0, "").prepare(0)
        outs = []
        for _ in range(2):
            out = torch.full(p.output_shape, float("nan"), device=device, dtype=p.dtype)
            out = out.contiguous(memory_format=memory_format)
            prepared.run(x, prepared.pack(weight), bias, out)
            outs.append(out)
        assert torch.equal(outs[0], outs[1]), tiling
        assert_accurate(outs[0], truth, size, p.in_channels // p.groups * p.taps + 1)
