"""CUDA's driver: calls whose errors are exceptions, and machine code that is loaded for a device.

The bindings are imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


def bindings() -> Any:
    """The module of the driver's calls."""
    from cuda.bindings import driver

    return driver


def drive(call: Callable[..., Any], *arguments: Any) -> Any:
    """A driver call's result. Errors: `failure`, with the call's and the error's names."""
    error, *results = call(*arguments)
    if error:
        raise failure(f"{call.__name__} returned {getattr(error, 'name', error)}", error)
    return results[0] if results else None


def failure(message: str, error: Any, kind: type[RuntimeError] = RuntimeError) -> RuntimeError:
    """The exception for a driver's error: out of memory is PyTorch's own, which callers catch; others are of a kind."""
    if error == bindings().CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        import torch  # which who only compiles does without

        kind = torch.OutOfMemoryError
    return kind(message)


def context(device: int) -> Any:
    """A device's primary context. Errors: those of `drive`."""
    cuda = bindings()
    return drive(cuda.cuDevicePrimaryCtxRetain, drive(cuda.cuDeviceGet, device))


@contextmanager
def _uncaptured(driver: Any) -> Iterator[None]:
    """Lets this thread load code while it captures a graph: nothing here is an operation of a stream."""
    mode = drive(driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        drive(driver.cuThreadExchangeStreamCaptureMode, mode)


@dataclass(frozen=True, eq=False)
class Kernel:
    """An entry of a loaded cubin, good for every device of its architecture."""

    name: str
    handle: int
    """A ``CUkernel``, which the driver's launches take in a ``CUfunction``'s place."""
    _ready: set[int] = field(default_factory=set, repr=False)

    def ready(self, device: int) -> None:
        """Loads the kernel on the current device, and lets its blocks use all shared memory; the first call does it.

        ``device`` must be the current one. Errors: RuntimeError from the driver.
        """
        if device in self._ready:
            return
        driver = bindings()
        attributes, limits = driver.CUdevice_attribute, driver.CUfunction_attribute
        handle = driver.CUkernel(self.handle)
        with _uncaptured(driver):
            ordinal = drive(driver.cuDeviceGet, device)
            if not int(drive(driver.cuCtxGetCurrent)):  # a thread in which PyTorch has called nothing yet
                drive(driver.cuCtxSetCurrent, context(device))
            most = drive(
                driver.cuDeviceGetAttribute, attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, ordinal
            )
            static = drive(driver.cuKernelGetAttribute, limits.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle, ordinal)
            dynamic = limits.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            drive(driver.cuKernelSetAttribute, dynamic, most - static, handle, ordinal)
            # CUDA loads lazily otherwise, at the first launch, which may be one that is being captured.
            drive(driver.cuFuncLoad, drive(driver.cuKernelGetFunction, handle))
        self._ready.add(device)


def library(code: bytes) -> Any:
    """A cubin as the driver has loaded it. Errors: RuntimeError from the driver."""
    driver = bindings()
    drive(driver.cuInit, 0)
    with _uncaptured(driver):
        return drive(driver.cuLibraryLoadData, code, [], [], 0, [], [], 0)


def kernel(of: Any, name: str, symbol: str) -> Kernel:
    """A kernel of a `library`."""
    return Kernel(name, int(drive(bindings().cuLibraryGetKernel, of, symbol.encode())))
