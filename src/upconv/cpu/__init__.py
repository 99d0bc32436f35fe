"""The CPU engine: which plan computes a layer (`rule`), and the plans on tensors (`run`)."""

from __future__ import annotations

from upconv.cpu.onednn import HALF, untrusted_gradients
from upconv.cpu.run import (
    BACKWARD_PLANS,
    FORWARD_PLANS,
    dense_strides,
    forward,
    gradients,
    memory_format,
    refusal,
    torch_gradients,
)

__all__ = [
    "BACKWARD_PLANS",
    "FORWARD_PLANS",
    "HALF",
    "dense_strides",
    "forward",
    "gradients",
    "memory_format",
    "refusal",
    "torch_gradients",
    "untrusted_gradients",
]
