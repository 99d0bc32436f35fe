"""Odd shapes, strides and dtypes, and the errors that they give."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from situations import BF16, Lab, error, seen, situation, step


@situation("pytorch/pytorch#88647", "The output has no pixels: an error on a CPU, an empty tensor on a GPU", ours=False)
def no_output(lab: Lab) -> Any:
    layer, x = lab.done(lab.layer(1, 1, 2, 2, 2)), lab.x(1, 1, 2, 2)
    double = error(lambda: seen(layer.double(), x.double()))
    return error(lambda: seen(layer.float(), x)), double, error(lambda: step(layer.float(), x))


@situation("pytorch/pytorch#12013", "Batches are empty now and then; gradients are zeros, not None", ours=False)
def empty_batch(lab: Lab) -> Any:
    model, found = lab.model(), []
    for batch in (2, 0, 1, 0):
        out = model(lab.x(batch, 16, 4, 4))
        model.zero_grad()
        out.sum().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters())])
    return found


@situation("PaddlePaddle/Paddle#73698", "An empty batch with an empty image, and other empty operands", ours=False)
def empty_operands(lab: Lab) -> Any:
    layer = lab.one()
    shapes = ((0, 16, 0, 4), (2, 16, 0, 4), (2, 0, 4, 4), (16, 0, 4), (0, 16, 4))
    return [error(lambda shape=shape: step(layer, lab.x(*shape))) for shape in shapes]


@situation("pytorch/pytorch#68775", "Inputs and weights are in oneDNN's own layout", devices=("cpu",), ours=False)
def onednn_tensors(lab: Lab) -> Any:
    layer, x = lab.one(), lab.x()
    first = seen(layer, x)
    inputs = error(lambda: seen(layer, x.to_mkldnn()).to_dense())
    layer.weight = nn.Parameter(layer.weight.detach().to_mkldnn(), requires_grad=False)
    weights = error(lambda: seen(layer, x))
    return first, inputs, weights


@situation("pytorch/pytorch#16557", "The weight is one number expanded, and so are input and gradient")
def expanded(lab: Lab) -> Any:
    layer = lab.one()
    layer.weight = nn.Parameter(torch.full((1, 1, 1, 1), 0.5, device=lab.device).expand(16, 16, 4, 4))
    x = torch.randn(1, 1, 1, 6, device=lab.device).expand(2, 16, 5, 6)
    out = layer(x)
    grads = torch.autograd.grad(out, list(layer.parameters()), torch.ones(1, device=lab.device).expand(out.shape))
    return seen(layer, x), out.detach(), grads


@situation("pytorch/pytorch#120547", "Transposed sequences and weights of 1-D layers look like channels_last images")
def transposed_sequence(lab: Lab) -> Any:
    layer, found = lab.done(lab.layer(16, 8, 4, 2, 1, rank=1)), []
    for length in (1, 5):
        x = lab.x(1, length, 16).transpose(1, 2)
        found += [x.stride(), seen(layer, x), *step(layer, x)]
    return found


@situation("intel/auto-round#1500", "The bias alone has another dtype, without autocast and with it", tolerance=BF16)
def other_bias(lab: Lab) -> Any:
    layer, x = lab.one(), lab.x()
    found = [seen(layer, x)]
    layer.weight.data = layer.weight.data.bfloat16()
    found.append(error(lambda: seen(layer, x.bfloat16())))
    with torch.autocast(lab.device, torch.bfloat16):
        found += [seen(layer, x), *step(layer, x)]
    return found


@situation("kohya-ss/ControlNet-LLLite-ComfyUI#11", "Weights are kept as 8-bit floats and used as they are", ours=False)
def float8_weights(lab: Lab) -> Any:
    layer, x = lab.one().to(torch.float8_e4m3fn), lab.x()
    found = [error(lambda d=d: seen(layer, x.to(d))) for d in (torch.float32, torch.float16, torch.float8_e4m3fn)]
    with torch.autocast(lab.device, torch.bfloat16):
        return found, error(lambda: seen(layer, x))


@situation(
    "pytorch/pytorch#68775",
    "The input is no tensor, or one that is sparse, quantised or without dimensions",
    ours=False,
)
def odd_inputs(lab: Lab) -> Any:
    layer, x = lab.done(lab.layer(4, 6, 3)), lab.x(1, 4, 5, 5)
    given = [
        np.zeros((1, 4, 5, 5), np.float32),
        None,
        [[1.0]],
        x.to_sparse(),
        x[0, 0].to_sparse_csr(),
        x.sum(),
        x[0, 0, 0],
    ]
    if lab.device == "cpu":
        given.append(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8))
    return seen(layer, x), [error(lambda value=value: seen(layer, value)) for value in given]
