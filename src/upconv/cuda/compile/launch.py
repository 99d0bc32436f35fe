"""Kernel launches at little host time.

The arguments' memory and the array of pointers to it are made once per thread. A launch writes the values into it and
calls the driver.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from functools import cache, lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from upconv.cuda.compile import driver, jit
from upconv.cuda.compile.driver import Kernel
from upconv.cuda.gpu import gpu

_STREAMS = 256  # of which something is kept; PyTorch has pools of 32 streams per device and priority


class LaunchError(RuntimeError):
    """The driver rejected a launch. The message names the kernel, its launch configuration and CUDA's error."""


class TooManyBlocks(LaunchError):
    """The blocks of a cooperative launch cannot all run at once, on a stream of a part of the GPU, say."""


def bind(device: int) -> None:
    """Makes a device's primary context the calling thread's.

    A thread in which PyTorch has called nothing yet (as those that run backward) has none; PyTorch's own calls would
    make it. Errors: those of `driver.drive`.
    """
    driver.drive(driver.bindings().cuCtxSetCurrent, driver.context(device))


@lru_cache(maxsize=_STREAMS)
def stream_handle(stream: int) -> Any:
    """A stream as the bindings take it at least time."""
    return driver.bindings().CUstream(stream)


class Counters:
    """Words of a device's memory that are zeros for a kernel, and that it leaves zeros, or uses for something else.

    Each stream has its own, since kernels of two may run at once. They outlive the call, and must not be in a graph's
    memory pool, nor in a captured launch, whose replays may run at once too.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self.of_streams: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}  # a thread may be about to launch with one of these

    def make(self, stream: int, like: torch.Tensor) -> torch.Tensor:
        """Those of a stream that has none, zeroed on it; it is the current one, and ``like`` is on its device."""
        if len(self.of_streams) >= _STREAMS:
            self._before, self.of_streams = self.of_streams, {}
        with _disable_current_modes():  # a recording has words of its own
            zeros = torch.zeros(self._words, dtype=torch.int32, device=like.device)
        return self.of_streams.setdefault(stream, zeros)


class Launcher:
    """Launches one kernel on a device, with blocks of ``block`` threads and ``shared`` bytes of dynamic shared memory.

    ``arguments``: the format of `struct` for its arguments, of 8 bytes for each kernel parameter: ``Q`` for an address,
    and for parameters side by side whose bytes are known one string, as looking at each at a launch would cost more.
    ``cooperative``: its blocks wait for each other, so that all must run at once. Errors: ValueError for other formats.
    """

    def __init__(
        self, kernel: Kernel, device: int, block: int, shared: int, arguments: str, cooperative: bool = False
    ) -> None:
        self.kernel = kernel
        self.device = device
        self.block = block
        self.shared = shared
        self.cooperative = cooperative
        form = struct.Struct("<" + arguments)
        if form.size % 8:
            raise ValueError(f"arguments must be of 8 bytes each; got {arguments!r}")
        self._bytes, self._pack_into = form.size, form.pack_into
        self._local = threading.local()
        self._configurations: dict[tuple[int, Any], Any] = {}
        cuda = driver.bindings()
        self._launch = cuda.cuLaunchCooperativeKernel if cooperative else cuda.cuLaunchKernel
        self._shape = 1, 1, block, 1, 1, shared  # of a launch's arguments behind the grid
        self._rest = () if cooperative else (0,)  # and the last
        self._launch_ex = cuda.cuLaunchKernelEx
        self._function = cuda.CUfunction(kernel.handle)

    def __call__(self, stream: Any, grid: int, args: tuple[Any, ...], dependent: bool = False) -> None:
        """Launches ``grid`` blocks on a stream of the device, which is the current one.

        Args:
            stream: a `stream_handle`.
            args: in the parameters' order.
            dependent: of the kernel that was launched just before on the same stream, whose end this one need not wait
                for, since it waits for its results itself (sm_90 and up).

        Thread-safe; may be captured in a graph. Errors: LaunchError; torch.OutOfMemoryError; struct.error for arguments
        that do not fit.
        """
        try:
            buffer, pointers, _ = self._local.state
        except AttributeError:
            buffer, pointers, _ = self._local.state = self._allocate()
        self._pack_into(buffer, 0, *args)
        if dependent:
            config = self._configurations.get((grid, stream)) or self._configuration(grid, stream)
            (error,) = self._launch_ex(config, self._function, pointers, 0)
        else:
            (error,) = self._launch(self._function, grid, *self._shape, stream, pointers, *self._rest)
        if error:
            self._failed(error, grid, stream, pointers)

    def clusters(self, blocks: int) -> int:
        """How many clusters of so many blocks run at once on the device when it is idle; 0 where none fits on it.

        Errors: RuntimeError from the driver.
        """
        self.kernel.ready(self.device)
        cuda = driver.bindings()
        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = blocks
        attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
        config = self._described(attribute)
        config.gridDimX = blocks
        bind(self.device)
        error, found = cuda.cuOccupancyMaxActiveClusters(self._function, config)
        if error == cuda.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE:
            return 0
        if error:
            raise RuntimeError(f"cuOccupancyMaxActiveClusters returned {getattr(error, 'name', error)}")
        return int(found)

    def _allocate(self) -> tuple[Any, int, Any]:
        """A thread's argument memory, the address of the pointers to it, and what keeps these alive."""
        self.kernel.ready(self.device)
        count = self._bytes // 8
        buffer = ctypes.create_string_buffer(max(self._bytes, 8))
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * max(count, 1))(*(start + 8 * i for i in range(count)))
        return buffer, ctypes.addressof(pointers), pointers

    def _configuration(self, grid: int, stream: Any) -> Any:
        """How a dependent is launched on a stream; it is kept, and never changed."""
        cuda = driver.bindings()
        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = self._described(attribute)
        config.gridDimX, config.hStream = grid, stream
        if len(self._configurations) >= _STREAMS:
            self._configurations.clear()
        self._configurations[grid, stream] = config
        return config

    def _described(self, attribute: Any) -> Any:
        """A launch with one attribute, but for its grid and stream."""
        config = driver.bindings().CUlaunchConfig()
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.sharedMemBytes = self.block, self.shared
        config.attrs, config.numAttrs = [attribute], 1
        return config

    def _failed(self, error: Any, grid: int, stream: Any, pointers: int) -> None:
        cuda = driver.bindings()
        results = cuda.CUresult
        if error == results.CUDA_ERROR_INVALID_CONTEXT:
            bind(self.device)
            (error,) = self._launch(self._function, grid, *self._shape, stream, pointers, *self._rest)
            if not error:
                return
        message = (
            f"the launch of {self.kernel.name} with a grid of {grid}, blocks of {self.block} threads and {self.shared} "
            f"bytes of shared memory on cuda:{self.device} failed with {getattr(error, 'name', error)}"
        )
        too_many = error == results.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
        raise driver.failure(message, error, TooManyBlocks if too_many else LaunchError)


_PROBE = 'extern "C" __global__ void probe() {}\n'


@cache
def cluster_fits(device: int, blocks: int) -> bool:
    """Whether a cluster of so many blocks, each with a multiprocessor of its own, runs on a device.

    It is a fact of the device, or of the part of it that the process has: the same at every call and in every run.
    Errors: those of ``jit.kernel`` and `Launcher.clusters`.
    """
    chip = gpu(device)
    probe = jit.kernel(_PROBE, "probe", chip.arch, "the probe of clusters")
    return Launcher(probe, device, 32, chip.shared_bytes, "").clusters(blocks) > 0
