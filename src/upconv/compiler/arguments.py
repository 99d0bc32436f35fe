"""A call's arguments as one string: PyTorch hands it to an operator in Python much faster than lists of integers."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

Arguments = tuple[Sequence[int], Sequence[int], Sequence[int], int, Sequence[int]]
"""Stride, padding, output_padding, groups and dilation, in the order of PyTorch's function."""


def text_of(stride: Any, padding: Any, output_padding: Any, groups: Any, dilation: Any) -> str:
    """A call's arguments as our operators take them; symbolic ones become what the graph is traced with, by guards."""
    spread = [tuple(int(n) for n in values) for values in (stride, padding, output_padding, dilation)]
    return str((*spread[:3], int(groups), spread[3]))


@lru_cache(maxsize=4096)
def arguments_of(text: str) -> Arguments:
    """What `text_of` was given."""
    found: Arguments = literal_eval(text)
    return found
