"""What a mode of `rearrange` launches around another family's kernel."""

from __future__ import annotations

from typing import NamedTuple

from upconv.cuda.launches import Given, Launch, Operand, Scratch


class Around(NamedTuple):
    """What a call launches around the inner kernel."""

    ahead: tuple[Launch, ...]
    behind: tuple[Launch, ...]
    names: dict[Operand, Scratch]
    """The rearranged tensors, by the operands that they are in the place of."""
    given: Given
    """How the inner call has its operands."""
