"""What planner and kernels may know of a GPU. It can be written down by hand, so that plans need no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# PyTorch's own bindings, since torch.cuda.current_stream() costs 3 us; a PyTorch built without CUDA lacks them.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)

_CHIPS = {
    "H200": (4.2e12, 1.755e9, 50 << 20),
    "GH200": (3.6e12, 1.755e9, 50 << 20),
    "H100": (3.0e12, 1.755e9, 50 << 20),
    "H100 NVL": (3.4e12, 1.755e9, 50 << 20),
    "H100 PCIe": (1.8e12, 1.755e9, 50 << 20),
    "H800": (3.0e12, 1.755e9, 50 << 20),
    "H20": (3.6e12, 1.755e9, 60 << 20),
    "A100": (1.7e12, 1.41e9, 40 << 20),
    "A800": (1.7e12, 1.41e9, 40 << 20),
    "A30": (0.83e12, 1.44e9, 24 << 20),
    "A10": (0.54e12, 1.695e9, 6 << 20),
    "L40S": (0.78e12, 2.52e9, 96 << 20),
    "L40": (0.78e12, 2.49e9, 96 << 20),
    "L4": (0.27e12, 2.04e9, 48 << 20),
    "B200": (7.0e12, 1.85e9, 126 << 20),
    "GB200": (7.0e12, 1.85e9, 126 << 20),
    "B300": (7.0e12, 1.85e9, 126 << 20),
    "GB300": (7.0e12, 1.85e9, 126 << 20),
    "RTX 5090": (1.6e12, 2.407e9, 96 << 20),
    "RTX 4090": (0.92e12, 2.52e9, 72 << 20),
    "RTX 3090": (0.85e12, 1.695e9, 6 << 20),
}
"""By the words of the name: estimates of the copy rate in bytes/s (85 to 90 % of the data sheets') and the clock in Hz,
and the bytes of the second-level cache."""

MAX_CLUSTER = 8  # blocks, on every GPU that has clusters
MAX_BOX = 256  # elements that the tensor copy engine traverses along a dimension
MAX_BOX_STEP = 8  # and its largest step

_UNKNOWN_BANDWIDTH = 1e12
_UNKNOWN_CLOCK = 1.5e9
_UNKNOWN_CACHE = 6 << 20

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
    cache_bytes: int
    """Of the second-level cache."""

    def clusters(self, blocks: int) -> int:
        """How many clusters of so many blocks run at once, where a block takes a multiprocessor; an estimate.

        A cluster stays in one part of the GPU. Parts differ in size, and from device to device (NOTES: one H200 ran 66
        clusters of 2 blocks, 39 of 3, 30 of 4, 22 of 5, 17 of 6, 15 of 7, 15 of 8).
        """
        if self.capability < (9, 0):
            return 0
        whole = self.multiprocessors // blocks
        return whole if blocks == 2 else whole * 3 // 4


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
    bandwidth, clock, cache_bytes = _rates(properties)
    return Gpu(
        name=str(properties.name),
        capability=capability,
        arch=arch_of(capability),
        multiprocessors=int(properties.multi_processor_count),
        shared_bytes=int(getattr(properties, "shared_memory_per_block_optin", known[0])),
        shared_per_sm=int(getattr(properties, "shared_memory_per_multiprocessor", known[1])),
        bandwidth=bandwidth,
        clock=clock,
        cache_bytes=cache_bytes,
    )


def _rates(properties: Any) -> tuple[float, float, int]:
    """(bytes/s, Hz, bytes of cache) of a known chip by its name, else from what the driver says, else typical ones."""
    words = set(str(properties.name).replace("-", " ").split())
    for model in sorted(_CHIPS, key=lambda model: len(model.split()), reverse=True):
        if words.issuperset(model.split()):
            return _CHIPS[model]
    kilohertz = float(getattr(properties, "memory_clock_rate", 0))
    bits = float(getattr(properties, "memory_bus_width", 0))
    sheet = 2 * 1e3 * kilohertz * bits / 8  # two transfers a clock
    return (
        0.9 * sheet or _UNKNOWN_BANDWIDTH,
        1e3 * float(getattr(properties, "clock_rate", 0)) or _UNKNOWN_CLOCK,
        int(getattr(properties, "L2_cache_size", 0)) or _UNKNOWN_CACHE,
    )


def _known(name: str, capability: tuple[int, int], multiprocessors: int, chip: str) -> Gpu:
    bandwidth, clock, cache_bytes = _CHIPS[chip]
    shared = _SHARED[capability]
    return Gpu(name, capability, arch_of(capability), multiprocessors, *shared, bandwidth, clock, cache_bytes)


H200 = _known("NVIDIA H200", (9, 0), 132, "H200")
A100 = _known("NVIDIA A100-SXM4-80GB", (8, 0), 108, "A100")
RTX3090 = _known("NVIDIA GeForce RTX 3090", (8, 6), 82, "RTX 3090")
RTX4090 = _known("NVIDIA GeForce RTX 4090", (8, 9), 128, "RTX 4090")
B200 = _known("NVIDIA B200", (10, 0), 148, "B200")
RTX5090 = _known("NVIDIA GeForce RTX 5090", (12, 0), 170, "RTX 5090")


def fma_lanes(gpu: Gpu, double: bool) -> int:
    """Multiply-adds per clock and multiprocessor. Source: CUDA C++ Programming Guide, "Arithmetic Instructions"."""
    if double:
        return {(8, 0): 32, (9, 0): 64, (10, 0): 64}.get(gpu.capability, 2)
    return 64 if gpu.capability == (8, 0) else 128


def threads_per_sm(gpu: Gpu) -> int:
    """Threads that a multiprocessor holds. Source: as `fma_lanes`, its table of compute capabilities."""
    return 2048 if gpu.capability in ((8, 0), (9, 0), (10, 0), (10, 3)) else 1536
