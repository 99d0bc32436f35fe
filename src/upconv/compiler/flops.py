"""The FLOPs of our operators, which ``FlopCounterMode`` counts by PyTorch's formulas for transposed convolutions.

Of calls of our functions a counter sees PyTorch's own operator anyway; these are for the operators themselves, as a
compiled graph has them. A counter copies PyTorch's formulas when it is made, so ours are given to active ones too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from upconv.compiler.arguments import arguments_of


def teach() -> None:
    """Has the active counters know our operators, and those made from now on.

    A counter counts what a call finds, so a call itself may tell it. In inference mode a call of an operator comes by
    no key of autograd's, and tells nobody; counters know of a compiled graph's since it was traced.
    """
    counter = sys.modules.get("torch.utils.flop_counter")  # importing it takes 20 to 30 ms
    if counter is None:
        return
    if torch.ops.upconv.conv_transpose_forward not in counter.flop_registry:
        counter.flop_registry.update(_formulas(counter))
    for mode in _get_current_dispatch_mode_stack():
        active = getattr(mode, "counter", None)
        if isinstance(active, counter.FlopCounterMode):
            active.flop_registry.update(_formulas(counter))


def _formulas(counter: Any) -> dict[Any, Callable[..., int]]:
    """By operator, of its raw arguments; ``counter`` is PyTorch's module of them."""

    def forward(input: Any, weight: Any, bias: Any, text: str, **rest: Any) -> int:
        stride, padding, output_padding, groups, dilation = arguments_of(text)
        found: int = counter.conv_flop(
            input, weight, bias, stride, padding, dilation, True, output_padding, groups, **rest
        )
        return found

    def backward(grad: Any, input: Any, weight: Any, text: str, mask: int, **rest: Any) -> int:
        stride, padding, output_padding, groups, dilation = arguments_of(text)
        asked = [bool(mask & 1), bool(mask & 2), False]
        found: int = counter.conv_backward_flop(
            grad, input, weight, None, stride, padding, dilation, True, output_padding, groups, asked, **rest
        )
        return found

    return {torch.ops.upconv.conv_transpose_forward: forward, torch.ops.upconv.conv_transpose_backward: backward}
