"""The float64 truth that every kernel, plan and gradient is compared with: written to be read, not to be fast.

A transposed convolution scatters: input pixel ``i`` times tap ``k`` is added to output ``o = i*stride + k*dilation -
padding``. For one tap, all input pixels land on a strided grid of outputs, so the whole layer is one matrix product
over channels per tap, added to a strided view of a buffer, from which the padding is cropped at the end. No
convolution of PyTorch's is used.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from upconv.problem import Problem


def _grids(p: Problem) -> list[tuple[Any, Any]]:
    """For each tap the strided slice of the uncropped output that the whole input lands on under it."""
    grids = []
    for tap in product(*(range(k) for k in p.kernel)):
        starts = [k * d for k, d in zip(tap, p.dilation)]
        ends = [a + (n - 1) * s + 1 for a, n, s in zip(starts, p.size, p.stride)]
        grids.append((tap, tuple(slice(a, b, s) for a, b, s in zip(starts, ends, p.stride))))
    return grids


def _uncropped(p: Problem) -> tuple[int, ...]:
    """Output sizes before ``padding`` is cropped at both ends (``output_padding`` lengthens the far end)."""
    return tuple(n + 2 * pad for n, pad in zip(p.out_size, p.padding))


def _crop(p: Problem) -> tuple[slice, ...]:
    return tuple(slice(pad, pad + n) for n, pad in zip(p.out_size, p.padding))


def forward(p: Problem, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The output in float64: ``(batch, out_channels, *out_size)`` from any floating input and weight."""
    x = input.detach().double().unflatten(1, (p.groups, -1))
    w = weight.detach().double().unflatten(0, (p.groups, -1))
    out = x.new_zeros(p.batch, p.groups, p.out_channels // p.groups, *_uncropped(p))
    for tap, grid in _grids(p):
        out[(..., *grid)] += torch.einsum("ngi...,gio->ngo...", x, w[(..., *tap)])
    out = out.flatten(1, 2)[(..., *_crop(p))]
    if bias is not None:
        out = out + bias.detach().double().view(-1, *(1,) * p.rank)
    return out.contiguous()


def gradients(p: Problem, grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for input, weight and bias in float64, the transposes of the same scatter: each tap gathers."""
    x = input.detach().double().unflatten(1, (p.groups, -1))
    w = weight.detach().double().unflatten(0, (p.groups, -1))
    grad = x.new_zeros(p.batch, p.out_channels, *_uncropped(p))
    grad[(..., *_crop(p))] = grad_output.detach().double()
    grad = grad.unflatten(1, (p.groups, -1))
    grad_x, grad_w = torch.zeros_like(x), torch.zeros_like(w)
    for tap, grid in _grids(p):
        seen = grad[(..., *grid)]
        grad_x += torch.einsum("ngo...,gio->ngi...", seen, w[(..., *tap)])
        grad_w[(..., *tap)] = torch.einsum("ngis,ngos->gio", x.flatten(3), seen.flatten(3))
    grad_bias = grad_output.detach().double().sum((0, *range(2, 2 + p.rank)))
    return grad_x.flatten(1, 2), grad_w.flatten(0, 1), grad_bias


def relative_error(out: Tensor, truth: Tensor) -> float:
    """``‖out - truth‖ / ‖truth‖`` in float64; the plain norm of ``out`` where the truth is all zeros."""
    truth = truth.detach().double()
    scale = truth.norm().item()
    return (out.detach().double() - truth).norm().item() / (scale or 1.0)
