"""What planner and kernels may know of a GPU. It can be written down by hand, so that plans need no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

# PyTorch's own bindings, since torch.cuda.current_stream() costs 3 us; a PyTorch built without CUDA lacks them.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
capturing: Callable[[], bool] = (
    torch._C._cuda_isCurrentStreamCapturing if torch.backends.cuda.is_built() else lambda: False
)


class Chip(NamedTuple):
    """What data sheets say of a GPU, as far as plans need it. Tensor rates follow from the capability."""

    capability: tuple[int, int]
    multiprocessors: int
    """0 where data sheets do not give it: such a GPU is known by name only where the driver gives the number."""
    bandwidth: float
    """Copy rate in bytes/s, 85 to 90 % of the data sheet's."""
    clock: float
    """Boost clock in Hz; of data centre GPUs what they hold under load."""
    cache_bytes: int
    """Of the second-level cache."""


# Sources: NVIDIA's data sheets and architecture whitepapers; TechPowerUp's GPU database for clocks and caches.
CHIPS: dict[str, Chip] = {
    "H200": Chip((9, 0), 132, 4.2e12, 1.755e9, 50 << 20),
    "GH200": Chip((9, 0), 132, 3.6e12, 1.755e9, 50 << 20),
    "H100": Chip((9, 0), 132, 3.0e12, 1.755e9, 50 << 20),
    "H100 NVL": Chip((9, 0), 132, 3.4e12, 1.755e9, 50 << 20),
    "H100 PCIe": Chip((9, 0), 114, 1.8e12, 1.755e9, 50 << 20),
    "H800": Chip((9, 0), 132, 3.0e12, 1.755e9, 50 << 20),
    "H20": Chip((9, 0), 78, 3.6e12, 1.755e9, 60 << 20),
    "A100": Chip((8, 0), 108, 1.7e12, 1.41e9, 40 << 20),
    "A100 80GB": Chip((8, 0), 108, 1.7e12, 1.41e9, 40 << 20),
    "A100 40GB": Chip((8, 0), 108, 1.35e12, 1.41e9, 40 << 20),
    "A800": Chip((8, 0), 108, 1.7e12, 1.41e9, 40 << 20),
    "A30": Chip((8, 0), 56, 0.83e12, 1.44e9, 24 << 20),
    "A10": Chip((8, 6), 72, 0.54e12, 1.695e9, 6 << 20),
    "A10G": Chip((8, 6), 80, 0.54e12, 1.71e9, 6 << 20),
    "A40": Chip((8, 6), 84, 0.63e12, 1.74e9, 6 << 20),
    "RTX A6000": Chip((8, 6), 84, 0.69e12, 1.8e9, 6 << 20),
    "L4": Chip((8, 9), 58, 0.27e12, 2.04e9, 48 << 20),
    "L40": Chip((8, 9), 142, 0.78e12, 2.49e9, 96 << 20),
    "L40S": Chip((8, 9), 142, 0.78e12, 2.52e9, 96 << 20),
    "RTX 6000 Ada": Chip((8, 9), 142, 0.86e12, 2.505e9, 96 << 20),
    "B200": Chip((10, 0), 148, 7.0e12, 1.85e9, 126 << 20),
    "GB200": Chip((10, 0), 0, 7.0e12, 1.85e9, 126 << 20),
    "B300": Chip((10, 3), 0, 7.0e12, 1.85e9, 126 << 20),
    "GB300": Chip((10, 3), 0, 7.0e12, 1.85e9, 126 << 20),
    "RTX 5090": Chip((12, 0), 170, 1.6e12, 2.407e9, 96 << 20),
    "RTX 5080": Chip((12, 0), 84, 0.86e12, 2.617e9, 64 << 20),
    "RTX 5070 Ti": Chip((12, 0), 70, 0.81e12, 2.452e9, 48 << 20),
    "RTX 5070": Chip((12, 0), 48, 0.6e12, 2.512e9, 48 << 20),
    "RTX 5060 Ti": Chip((12, 0), 36, 0.4e12, 2.572e9, 32 << 20),
    "RTX 5060": Chip((12, 0), 30, 0.4e12, 2.497e9, 32 << 20),
    "RTX 4090": Chip((8, 9), 128, 0.92e12, 2.52e9, 72 << 20),
    "RTX 4080 Super": Chip((8, 9), 80, 0.66e12, 2.55e9, 64 << 20),
    "RTX 4080": Chip((8, 9), 76, 0.65e12, 2.505e9, 64 << 20),
    "RTX 4070 Ti Super": Chip((8, 9), 66, 0.6e12, 2.61e9, 48 << 20),
    "RTX 4070 Ti": Chip((8, 9), 60, 0.45e12, 2.61e9, 48 << 20),
    "RTX 4070 Super": Chip((8, 9), 56, 0.45e12, 2.475e9, 48 << 20),
    "RTX 4070": Chip((8, 9), 46, 0.45e12, 2.475e9, 36 << 20),
    "RTX 4060 Ti": Chip((8, 9), 34, 0.26e12, 2.535e9, 32 << 20),
    "RTX 4060": Chip((8, 9), 24, 0.245e12, 2.46e9, 24 << 20),
    "RTX 3090 Ti": Chip((8, 6), 84, 0.91e12, 1.86e9, 6 << 20),
    "RTX 3090": Chip((8, 6), 82, 0.85e12, 1.695e9, 6 << 20),
    "RTX 3080 Ti": Chip((8, 6), 80, 0.82e12, 1.665e9, 6 << 20),
    "RTX 3080": Chip((8, 6), 68, 0.68e12, 1.71e9, 5 << 20),
    "RTX 3070 Ti": Chip((8, 6), 48, 0.55e12, 1.77e9, 4 << 20),
    "RTX 3070": Chip((8, 6), 46, 0.4e12, 1.725e9, 4 << 20),
    "RTX 3060 Ti": Chip((8, 6), 38, 0.4e12, 1.665e9, 4 << 20),
    "RTX 3060": Chip((8, 6), 28, 0.32e12, 1.777e9, 3 << 20),
    "Jetson AGX Orin": Chip((8, 7), 16, 0.18e12, 1.3e9, 4 << 20),
}
"""GPUs by the words of their names."""

SECTOR = 32  # bytes that memory brings, and is written, at a time
LINE = 128  # bytes of a cache's line, and of a row of the widest swizzle
ROWS_M, ROW_BYTES = 64, 32  # of wgmma: rows of operand A, and bytes of K of a row
FRAGMENT = ROWS_M * ROW_BYTES  # bytes of weights that a warpgroup takes at a step
CLUSTERS = 2, 4, 8  # blocks of one; every GPU that has clusters has the largest
MAX_BOX = 256  # elements that the tensor copy engine traverses along a dimension
MAX_BOX_STEP = 8  # and its largest step

_UNKNOWN = Chip((0, 0), 0, 1e12, 1.5e9, 6 << 20)  # where neither its name nor the driver says more

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


class Rates(NamedTuple):
    """What steps of a tile take on a multiprocessor, in clocks unless said otherwise; see `upconv.cuda.cost`."""

    columns: float
    """Of a matrix instruction for two columns of N."""
    register_instruction: float
    """The least of an instruction whose operand A is in registers."""
    descriptor_instruction: float
    """And of one whose operand A comes by descriptor."""
    instruction: float
    """Of any instruction beside."""
    step: float
    """From a stage of the ring to the next."""
    load: float
    """A load of a warp that its consumer waits for."""
    shared: float
    """Bytes of shared memory a clock."""
    line: float
    """Of the copy engine for a line of 128 bytes, or a shorter row."""
    box: float
    """Of the copy engine for a box."""
    latency: float
    """From a box's request to its use."""
    chunk_turned: float
    """Of producers that transpose a chunk."""
    unit_turned: float
    """And for each 32 bytes of a pixel of a thread's."""
    store: float
    """Of a consumer for 8 results of `pixels` and `joined`; `sweep` has its own."""
    tile: float
    """A tile beside its steps and stores."""
    disturbed: float
    """Share of the lesser of stores and instructions that does not overlap where consumers take turns."""
    cluster: float
    """Of a cluster that adds up its sums."""
    sum: float
    """For each of a block's sums there."""
    overlap: float
    """The exponent by which what overlaps is added."""
    ring_overlap: float
    """The same of the ring's waits."""
    beside_memory: float
    """Share of the lesser of multiplying and the device memory that the other does not hide."""
    launch: float
    """Seconds of a kernel beside its tiles."""


RATES = Rates(
    columns=1.0,
    register_instruction=17.2,
    descriptor_instruction=23.9,
    instruction=3.7,
    step=5.0,
    load=3.3,
    shared=118.0,
    line=1.67,
    box=45.5,
    latency=818.0,
    chunk_turned=528.0,
    unit_turned=90.5,
    store=1.0,
    tile=912.0,
    disturbed=0.5,
    cluster=3320.0,
    sum=0.25,
    overlap=7.65,
    ring_overlap=3.21,
    beside_memory=0.21,
    launch=3.9e-6,
)
"""Hopper's, fitted to what timed tiles of all families took on an H200 (docs/design.md, Cost models)."""


class CoreRates(NamedTuple):
    """What steps of a tile on CUDA cores take, in instructions or clocks; see `upconv.cuda.direct.costs`."""

    issue: float
    """Clocks of four instructions of warps, or of a multiply-add."""
    mix: float
    """Share of the lesser of loads and instructions that does not overlap."""
    overlap: float
    """Share of the second of what limits, beside the first."""
    unit: float
    """Instructions that bring a unit to shared memory beside its stores."""
    batch: float
    """And a batch of them: its place, its borders."""
    element: float
    """And an element of the input (grad-weight)."""
    line_stored: float
    """Instructions that store a line of results."""
    turned_line: float
    """And one that goes through shared memory."""
    latency: float
    """Clocks that a block waits for a batch of units."""
    barriers: float
    """And for its last warps."""
    l2: float
    """Bytes a second of the second-level cache."""
    launch: float
    """Seconds of a kernel beside its tiles."""


CORES = CoreRates(
    issue=1.6,
    mix=0.2,
    overlap=0.2,
    unit=8.0,
    batch=70.0,
    element=38.0,
    line_stored=8.0,
    turned_line=20.0,
    latency=520.0,
    barriers=270.0,
    l2=3.3e12,
    launch=4e-6,
)
"""Hopper's, fitted to what tiles of gradients took on an H200."""


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

        A cluster stays in one part of the GPU. Parts differ in size, and from device to device (docs/experiments.md).
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
    for model in sorted(CHIPS, key=lambda model: len(model.split()), reverse=True):
        if words.issuperset(model.split()) and "Laptop" not in words:  # a laptop's is another chip of the same name
            chip = CHIPS[model]
            return chip.bandwidth, chip.clock, chip.cache_bytes
    kilohertz = float(getattr(properties, "memory_clock_rate", 0))
    bits = float(getattr(properties, "memory_bus_width", 0))
    sheet = 2 * 1e3 * kilohertz * bits / 8  # two transfers a clock
    return (
        0.9 * sheet or _UNKNOWN.bandwidth,
        1e3 * float(getattr(properties, "clock_rate", 0)) or _UNKNOWN.clock,
        int(getattr(properties, "L2_cache_size", 0)) or _UNKNOWN.cache_bytes,
    )


# --- GPUs by name ----------------------------------------------------------------------------------------------------


def _described(model: str) -> Gpu:
    chip = CHIPS[model]
    maker = "NVIDIA GeForce" if re.match("RTX [345]0", model) else "NVIDIA"
    shared_bytes, shared_per_sm = _SHARED[chip.capability]
    return Gpu(
        name="NVIDIA A100-SXM4-80GB" if model == "A100" else f"{maker} {model}",
        capability=chip.capability,
        arch=arch_of(chip.capability),
        multiprocessors=chip.multiprocessors,
        shared_bytes=shared_bytes,
        shared_per_sm=shared_per_sm,
        bandwidth=chip.bandwidth,
        clock=chip.clock,
        cache_bytes=chip.cache_bytes,
    )


KNOWN: dict[str, Gpu] = {model: _described(model) for model, chip in CHIPS.items() if chip.multiprocessors}
"""The GPUs that plans can be made for without having one, by name."""

H200, A100, B200 = KNOWN["H200"], KNOWN["A100"], KNOWN["B200"]
RTX3090, RTX4090, RTX5090 = KNOWN["RTX 3090"], KNOWN["RTX 4090"], KNOWN["RTX 5090"]

_MAKERS = r"nvidia|geforce|tesla|quadro|jetson|generation|gpu|sxm\d*|hbm\d*e?"


def by_name(name: str) -> Gpu:
    """A GPU by its usual name; case, spaces, hyphens and the maker's words do not count.

    ``by_name("h100-pcie")`` and ``by_name("NVIDIA H100 PCIe")`` are the same, ``by_name("4090")`` is the RTX 4090.

    Args:
        name: like ``H100``, ``A100 40GB``, ``RTX 3060 Ti`` or ``NVIDIA GeForce RTX 4090``.

    Raises:
        ValueError: a GPU that is not one of `KNOWN`, in one sentence.
    """
    found = {_key(model): gpu for model, gpu in KNOWN.items()}
    # The memory decides of the A100 alone, PCIe of the H100.
    memory, bus = (re.compile(rf"(?<![a-z0-9]){word}(?![a-z0-9])", re.IGNORECASE) for word in (r"\d+ ?GB", "PCIe"))
    plain = memory.sub("", name)
    for text in (name, bus.sub("", name), plain, bus.sub("", plain)):
        if _key(text) in found:
            return found[_key(text)]
    raise ValueError(f"--gpu must be one of {', '.join(KNOWN)}; got {name!r}")


def _key(name: str) -> str:
    """A name without case, separators and the words that its maker adds."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    joined = "".join(word for word in words if not re.fullmatch(_MAKERS, word))
    return re.sub(r"^(nvidia|geforce|tesla|quadro|jetson)*(rtx)?", "", joined)


def fma_lanes(gpu: Gpu, double: bool) -> int:
    """Multiply-adds per clock and multiprocessor. Source: CUDA C++ Programming Guide, "Arithmetic Instructions"."""
    if double:
        return {(8, 0): 32, (9, 0): 64, (10, 0): 64}.get(gpu.capability, 2)
    return 64 if gpu.capability == (8, 0) else 128


def threads_per_sm(gpu: Gpu) -> int:
    """Threads that a multiprocessor holds. Source: as `fma_lanes`, its table of compute capabilities."""
    return 2048 if gpu.capability in ((8, 0), (9, 0), (10, 0), (10, 3)) else 1536
