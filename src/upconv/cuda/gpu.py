"""What planner and kernels may know of a GPU. It can be written down by hand, so that plans need no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

_BANDWIDTHS = {
    "H200": 4.2e12,
    "GH200": 3.6e12,
    "H100 NVL": 3.4e12,
    "H100 PCIe": 1.8e12,
    "H100": 3.0e12,
    "H800": 3.0e12,
    "H20": 3.6e12,
    "A100": 1.7e12,
    "A800": 1.7e12,
    "A30": 0.85e12,
    "A10": 0.55e12,
    "L40S": 0.78e12,
    "L40": 0.78e12,
    "L4": 0.27e12,
    "B200": 7.2e12,
    "GB200": 7.2e12,
    "B300": 7.2e12,
    "GB300": 7.2e12,
    "RTX 5090": 1.6e12,
    "RTX 4090": 0.92e12,
    "RTX 3090": 0.85e12,
}
"""Copy rates in bytes/s: measured for H200, H100 and A100, else about 90 % of what the data sheet says."""

_UNKNOWN_BANDWIDTH = 1e12
_UNKNOWN_CLOCK = 1.5e9

# (opt-in maximum per block, total per SM) in bytes. Source: CUDA C++ Programming Guide, "Compute Capabilities". The
# difference is the 1 KB that every resident block takes for the system.
_SHARED = {
    (8, 0): (166912, 167936),
    (8, 6): (101376, 102400),
    (8, 7): (166912, 167936),
    (8, 9): (101376, 102400),
    (9, 0): (232448, 233472),
    (10, 0): (232448, 233472),
    (10, 3): (232448, 233472),
    (12, 0): (101376, 102400),
    (12, 1): (101376, 102400),
}
_SPECIFIC = {(9, 0), (10, 0), (10, 3)}


@dataclass(frozen=True)
class Gpu:
    """A GPU as the cost models see it."""

    name: str
    """The model's name, like ``NVIDIA H200``."""
    capability: tuple[int, int]
    """Compute capability, like ``(9, 0)``."""
    arch: str
    """What NVRTC compiles for, without ``sm_``: ``90a``."""
    multiprocessors: int
    shared_bytes: int
    """Shared memory that one block may ask for, in bytes."""
    shared_per_sm: int
    """Shared memory of a multiprocessor, in bytes; every resident block takes 1024 of them besides its own."""
    bandwidth: float
    """Copy rate of the device memory in bytes/s, an estimate."""
    clock: float
    """Multiprocessor clock in Hz."""


def arch_of(capability: tuple[int, int]) -> str:
    """NVRTC's target for a compute capability, without ``sm_``.

    9.0, 10.0 and 10.3 get the ``a`` targets, which have their tensor-core instructions; all others the plain ones.
    """
    return f"{capability[0]}{capability[1]}" + ("a" if capability in _SPECIFIC else "")


@cache
def gpu(device_index: int) -> Gpu:
    """The description of a CUDA device, cached. Errors: those of ``torch.cuda.get_device_properties``."""
    properties = torch.cuda.get_device_properties(device_index)
    capability = (int(properties.major), int(properties.minor))
    known = _SHARED.get(capability, (49152, 65536))
    return Gpu(
        name=str(properties.name),
        capability=capability,
        arch=arch_of(capability),
        multiprocessors=int(properties.multi_processor_count),
        shared_bytes=int(getattr(properties, "shared_memory_per_block_optin", known[0])),
        shared_per_sm=int(getattr(properties, "shared_memory_per_multiprocessor", known[1])),
        bandwidth=_bandwidth(properties),
        clock=float(getattr(properties, "clock_rate", 0)) * 1e3 or _UNKNOWN_CLOCK,
    )


def _bandwidth(properties: object) -> float:
    """A known chip's copy rate by its name, else 90 % of memory clock times bus width, else 1 TB/s."""
    name = str(getattr(properties, "name", ""))
    words = f" {name} ".replace("-", " ")
    for model in sorted(_BANDWIDTHS, key=len, reverse=True):
        if all(f" {word} " in words for word in model.split()):
            return _BANDWIDTHS[model]
    clock = float(getattr(properties, "memory_clock_rate", 0)) * 1e3
    width = float(getattr(properties, "memory_bus_width", 0)) / 8
    return 0.9 * 2 * clock * width or _UNKNOWN_BANDWIDTH  # two transfers a clock


def _known(name: str, capability: tuple[int, int], multiprocessors: int, bandwidth: float, clock: float) -> Gpu:
    return Gpu(name, capability, arch_of(capability), multiprocessors, *_SHARED[capability], bandwidth, clock)


H200 = _known("NVIDIA H200", (9, 0), 132, 4.2e12, 1.755e9)
A100 = _known("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.7e12, 1.41e9)
RTX3090 = _known("NVIDIA GeForce RTX 3090", (8, 6), 82, 0.85e12, 1.695e9)
RTX4090 = _known("NVIDIA GeForce RTX 4090", (8, 9), 128, 0.92e12, 2.52e9)
B200 = _known("NVIDIA B200", (10, 0), 148, 7.2e12, 1.965e9)
RTX5090 = _known("NVIDIA GeForce RTX 5090", (12, 0), 170, 1.6e12, 2.407e9)
