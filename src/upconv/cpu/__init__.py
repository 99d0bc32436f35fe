"""The CPU engine: which plan computes a layer (`rule`), and the plans on tensors (`run`)."""

from __future__ import annotations

from upconv.cpu.geometry import shuffle_blowup
from upconv.cpu.onednn import HALF, own_kernel, untrusted, untrusted_gradients, unwritten
from upconv.cpu.run import (
    BACKWARD_PLANS,
    FORWARD_PLANS,
    dense_strides,
    forward,
    gradients,
    memory_format,
    refusal,
    torch_gradients,
    wide_channels,
)

__all__ = [
    "BACKWARD_PLANS",
    "FORWARD_PLANS",
    "HALF",
    "dense_strides",
    "forward",
    "gradients",
    "memory_format",
    "own_kernel",
    "refusal",
    "shuffle_blowup",
    "torch_gradients",
    "untrusted",
    "untrusted_gradients",
    "unwritten",
    "wide_channels",
]
