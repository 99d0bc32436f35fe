"""The layout in which Inductor is to hand operands to our operators: that of the result, as for PyTorch's convolutions.

Inductor writes what it computes itself in the layout that is asked for, so that no kernel of ours copies an operand.
Where it turns a graph's convolutions to channels_last (``layout_optimization``), ours are turned too. Its own decision
does not count our operators. A graph for inference whose only convolutions are ours is therefore decided here, by
Inductor's rule: channels_last, unless they are grouped.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from upconv import dispatch
from upconv.compiler.arguments import arguments_of

_LOWERING = "torch._inductor.lowering"
_taught = False
TURNED = ("cuda",)
"""Devices whose graphs follow Inductor's choice of channels_last."""


def teach() -> None:
    """Tells Inductor of the layouts, once it is there. Without it, Inductor keeps the strides of the traced graph."""
    global _taught
    lowering: Any = sys.modules.get(_LOWERING)
    if _taught or not hasattr(lowering, "make_fallback"):
        return
    operators = torch.ops.upconv
    for operator in (operators.conv_transpose_forward.default, operators.conv_transpose_backward.default):
        lowering.make_fallback(operator, layout_constraint=_constrained, warn=False)
    _taught = True


def _constrained(node: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An operator's arguments, its input and the output's gradient in the layout of the result."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    first = 0 if node.target is torch.ops.upconv.conv_transpose_forward.default else 1
    input, weight = (node.args[first + i].meta["val"] for i in range(2))
    rank = input.dim() - 2
    last = dispatch.layout_of(input, weight) == "channels_last"
    if rank == 2 and input.device.type in TURNED:
        last = last or _turned(V.graph, node)
    order = [rank + 1, *range(rank, -1, -1)]  # of strides, the smallest 0
    if last and rank > 1:
        order = [rank + 1, 0, *range(rank, 0, -1)]
    placed = [ir.ExternKernel.require_stride_order(t, order) for t in args[: first + 1]]
    return (*placed, *args[first + 1 :]), kwargs  # weights are packed from any strides


def _turned(graph: Any, node: Any) -> bool:
    """Whether convolutions of two dimensions are computed in channels_last in a graph."""
    from torch._inductor import config

    if graph.layout_opt or not (config.layout_optimization and graph.is_inference):
        return bool(graph.layout_opt)
    for each in node.graph.nodes:
        if each.target is torch.ops.aten.convolution.default:
            return False  # Inductor has decided
        if each.target is torch.ops.upconv.conv_transpose_forward.default:
            input, weight = (of.meta["val"] for of in each.args[:2])
            symbolic = not all(isinstance(n, int) for n in (*input.shape, *weight.shape))
            if symbolic or (arguments_of(each.args[3])[3] != 1 and weight.shape[1] > 1):
                return False
    return True
