"""A choice that runs in another's place where that finds no memory for its temporaries."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Reserve:
    """The gradients of one layer by a choice that is prepared when it is first needed."""

    def __init__(self, choice: Any, device: int) -> None:
        self._choice, self._device = choice, device

    @cached_property
    def _prepared(self) -> Any:
        return self._choice.prepare(self._device)

    def grad_input(self, grad: Tensor, weight: Tensor, out: Tensor) -> None:
        """Writes the gradient for the input into ``out``; ``weight`` may be float32 for 16 bits."""
        prepared = self._prepared
        if weight.dtype is not grad.dtype and not getattr(prepared, "casts", False):
            weight = weight.to(grad.dtype)
        prepared.run(grad, prepared.pack(weight), None, out)

    def grad_weight(self, x: Tensor, grad: Tensor, out: Tensor) -> None:
        """Writes the gradient for the weight into ``out``, which may be float32 for 16 bits."""
        prepared = self._prepared
        if out.dtype is x.dtype or getattr(prepared, "casts", False):
            prepared.run(x, grad, out)
            return
        single = torch.empty_like(out, dtype=x.dtype)
        prepared.run(x, grad, single)
        out.copy_(single)
