"""Launches: the bytes and numbers that the driver gets, threads, devices, errors; and real launches where a GPU is."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import needs_nvrtc
from situations.processes import in_threads
from upconv.cuda import launches
from upconv.cuda.compile import driver as driver_module
from upconv.cuda.compile import jit
from upconv.cuda.compile import launch as launch_module
from upconv.cuda.compile.boxes import Tensor5
from upconv.cuda.compile.driver import Kernel
from upconv.cuda.compile.launch import Launcher, LaunchError, TooManyBlocks
from upconv.cuda.gpu import gpu
from upconv.cuda.launches import Int, Launch, Long, Map, Pointer, Unit

TYPES = {"P": ctypes.c_uint64, "i": ctypes.c_int32, "q": ctypes.c_int64, "f": ctypes.c_float}
FORMS = {"P": "Q", "i": "i4x", "q": "q", "f": "f4x"}
"""A parameter's type, and 8 bytes of `struct` for it."""
MOST_SHARED = 232448


class Result(IntEnum):
    """The driver's answers; false when all is right, as the bindings' are."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720


SUCCESS = Result.CUDA_SUCCESS
STREAM = "stream"


class Driver:
    """Takes the place of the bindings: records the calls, and reads a launch's arguments as the driver would."""

    CUresult = Result
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="optin")
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static", CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic"
    )
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self) -> None:
        self.arguments = ""
        self.calls: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.answers: list[Result] = []
        self.delay = 0.0
        self.mode = "global"

    def CUfunction(self, handle: int) -> tuple[str, int]:
        return ("function", handle)

    def CUkernel(self, handle: int) -> tuple[str, int]:
        return ("kernel", handle)

    def CUstream(self, handle: int) -> tuple[str, int]:
        self.calls.append(("CUstream", handle))
        return ("stream", handle)

    def cuLaunchKernel(self, function: Any, *numbers: Any) -> tuple[Result]:
        *shape, stream, pointers, extra = numbers
        answer = self.answers.pop(0) if self.answers else SUCCESS
        if not answer:
            slots = (ctypes.c_void_p * len(self.arguments)).from_address(pointers)
            first = [TYPES[letter].from_address(slot).value for letter, slot in zip(self.arguments, slots)]  # type: ignore[attr-defined]
            time.sleep(self.delay)
            values = [TYPES[letter].from_address(slot).value for letter, slot in zip(self.arguments, slots)]  # type: ignore[attr-defined]
            assert repr(values) == repr(first), "another launch wrote into this one's arguments"
            assert len({*slots}) == len(slots) and all(slot % 8 == 0 for slot in slots)
            self.launches.append((function, tuple(shape), stream, tuple(values), extra))
        return (answer,)

    def cuLaunchCooperativeKernel(self, *arguments: Any) -> tuple[Result]:
        self.calls.append(("cuLaunchCooperativeKernel", *arguments))
        return (self.answers.pop(0) if self.answers else SUCCESS,)

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[Result, str]:
        old, self.mode = self.mode, mode
        return SUCCESS, old

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            results = {
                "cuDeviceGet": arguments[0] if arguments else None,
                "cuCtxGetCurrent": 1,
                "cuDeviceGetAttribute": MOST_SHARED,
                "cuKernelGetAttribute": 512,
                "cuKernelGetFunction": "loaded function",
                "cuDevicePrimaryCtxRetain": "primary context",
                "cuLibraryLoadData": "library",
                "cuLibraryGetKernel": len(self.calls),
            }
            if name in ("cuLibraryLoadData", "cuKernelSetAttribute", "cuFuncLoad"):
                assert self.mode == "relaxed"
            return (SUCCESS, results[name]) if name in results else (SUCCESS,)

        call.__name__ = name
        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The stub, in the bindings' place."""
    found = Driver()
    monkeypatch.setattr(driver_module, "bindings", lambda: found)
    return found


def launcher(driver: Driver, arguments: str, block: int = 128, shared: int = 0) -> Launcher:
    driver.arguments = arguments
    return Launcher(Kernel("f", 77), 0, block, shared, form(arguments))


def form(arguments: str) -> str:
    return "".join(FORMS[letter] for letter in arguments)


# --- what the driver gets --------------------------------------------------------------------------------------------


def test_a_cooperative_launch_is_another_call_of_the_drivers(driver: Driver) -> None:
    """Without the last argument; where its blocks are too many the error says so, and others are as they were."""
    plain = launcher(driver, "iP", 384, 2048)
    launch = Launcher(plain.kernel, 0, 384, 2048, form("iP"), cooperative=True)
    launch(STREAM, 132, (3, 7))
    (made,) = (call for call in driver.calls if call[0] == "cuLaunchCooperativeKernel")
    assert made[1:10] == (("function", 77), 132, 1, 1, 384, 1, 1, 2048, STREAM) and len(made) == 11
    assert not driver.launches, "an ordinary launch"
    for error, kind in (("COOPERATIVE_LAUNCH_TOO_LARGE", TooManyBlocks), ("INVALID_VALUE", LaunchError)):
        driver.answers = [Result[f"CUDA_ERROR_{error}"]]
        with pytest.raises(LaunchError, match=error) as raised:
            launch(STREAM, 132, (3, 7))
        assert type(raised.value) is kind


VALUES = {
    "P": st.integers(0, 2**64 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "q": st.integers(-(2**63), 2**63 - 1),
    "f": st.floats(width=32, allow_nan=False),
}


@settings(max_examples=100)
@given(data=st.data(), runs=st.lists(st.tuples(st.text("Piqf", max_size=8), st.booleans()), max_size=4))
def test_every_argument_arrives(driver: Driver, data: st.DataObject, runs: list[tuple[str, bool]]) -> None:
    driver.arguments = "".join(letters for letters, _ in runs)
    forms = "".join(f"{8 * len(letters)}s" if whole else form(letters) for letters, whole in runs)
    launch = Launcher(Kernel("f", 77), 0, 128, 0, forms)
    for _ in range(2):  # the second time into memory that holds the first one's
        expected, arguments = list[Any](), list[Any]()
        for letters, whole in runs:
            values = [data.draw(VALUES[letter]) for letter in letters]
            expected += values
            arguments += [struct.pack("<" + form(letters), *values)] if whole else values
        launch(STREAM, 1, tuple(arguments))
        assert driver.launches[-1][3] == tuple(expected)


def test_threads_do_not_share_arguments(driver: Driver) -> None:
    launch = launcher(driver, "iq")
    driver.delay = 0.002
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for n in range(10):
            launch(STREAM, 1, (number, n))

    assert in_threads([partial(work, n) for n in range(8)]) == [None] * 8
    assert sorted(found[3] for found in driver.launches) == [(n, m) for n in range(8) for m in range(10)]


@needs_nvrtc
def test_a_source_is_loaded_once_for_all_its_entries(driver: Driver, cold: Path) -> None:
    fill = jit.kernel(SOURCE, "fill", "90a", "test")
    mirror = jit.kernel(SOURCE, "mirror", "90a", "test")
    assert jit.kernel(SOURCE, "fill", "90a") is fill and mirror is not fill
    loads = [call for call in driver.calls if call[0] == "cuLibraryLoadData"]
    assert len(loads) == 1 and loads[0][1] == jit.cubin(SOURCE, "90a")
    assert [call[1:] for call in driver.calls if call[0] == "cuLibraryGetKernel"] == [
        ("library", b"fill"), ("library", b"mirror"),
    ]  # fmt: skip
    assert fill.handle != mirror.handle
    assert mirror.name == "mirror"
    other = jit.kernel(SOURCE, "fill", "80", "test")
    assert other is not fill and len([c for c in driver.calls if c[0] == "cuLibraryLoadData"]) == 2


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_names_the_launch_and_cudas_code(driver: Driver) -> None:
    launch = launcher(driver, "i", 2048, 99)
    driver.answers = [Result.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(LaunchError, match=r"launch of f .* 7, .* 2048 .* 99 .* cuda:0 .* CUDA_ERROR_INVALID_VALUE$"):
        launch(STREAM, 7, (1,))
    driver.answers = [Result.CUDA_ERROR_OUT_OF_MEMORY]
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        launch(STREAM, 7, (1,))
    launch(STREAM, 7, (2,))
    assert driver.launches[-1][3] == (2,)


def test_a_thread_without_a_context_gets_the_devices_and_launches_again(driver: Driver) -> None:
    launch = launcher(driver, "i")
    launch(STREAM, 1, (1,))
    driver.answers = [Result.CUDA_ERROR_INVALID_CONTEXT]
    launch(STREAM, 1, (2,))
    assert ("cuCtxSetCurrent", "primary context") in driver.calls
    assert [found[3] for found in driver.launches] == [(1,), (2,)]
    driver.answers = [Result.CUDA_ERROR_INVALID_CONTEXT] * 2
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_CONTEXT"):
        launch(STREAM, 1, (3,))


def test_a_map_that_does_not_begin_with_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches write addresses there."""
    box = Map("source", Tensor5(0, (1,) * 5, (16,) * 4), torch.float32, (1,) * 5)
    launch = Launch(Unit("f", "f", ("f",)), "f", 1, 64, 16, (Pointer("source"), box))
    monkeypatch.setattr(launches, "encode", lambda of, address: struct.pack("<16Q", *[address >> 4] * 16))
    with pytest.raises(RuntimeError, match=r"first word must be its tensor.s address; got 0x10000000000$"):
        _ = launch.encoded


@pytest.mark.parametrize("argument", [Int(2**31), Int(-(2**31) - 1), Long(2**63)], ids=repr)
def test_a_records_values_fit(argument: Int | Long) -> None:
    with pytest.raises(OverflowError):
        argument.encoded()
    assert type(argument)(-5).encoded() == struct.pack("<q", -5)


# --- on a GPU --------------------------------------------------------------------------------------------------------

SOURCE = """
extern "C" __global__ void fill(float* x, int n, long long huge, float value) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = value * (i + (int)(huge >> 40));
}
extern "C" __global__ void mirror(float* x, int n) {
    extern __shared__ float d[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) d[n - 1 - i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = d[i] + 1;
}
extern "C" __global__ void spin(float* x, long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
    x[0] += 1;
}
"""


def real(entry: str, block: int, shared: int, arguments: str) -> Launcher:
    torch.cuda.init()
    return Launcher(jit.kernel(SOURCE, entry, gpu(0).arch, "test"), 0, block, shared, form(arguments))


def current() -> Any:
    """PyTorch's current stream, for a launch."""
    return launch_module.stream_handle(torch.cuda.current_stream().cuda_stream)


def filled(n: int, value: float) -> torch.Tensor:
    return torch.arange(3, n + 3, dtype=torch.float32, device="cuda") * value


@pytest.mark.gpu
def test_a_block_gets_all_the_shared_memory_there_is(cold: Path) -> None:
    torch.cuda.init()
    kernel = jit.kernel(SOURCE, "mirror", gpu(0).arch, "test")
    most = gpu(0).shared_bytes
    n = most // 4
    x = torch.randn(n, device="cuda")
    expected = x.flip(0) + 1
    Launcher(kernel, 0, 256, most, form("Pi"))(current(), 1, (x.data_ptr(), n))
    assert torch.equal(x, expected)
    with pytest.raises(LaunchError, match="blocks of 256 threads"):
        Launcher(kernel, 0, 256, most + 4, form("Pi"))(current(), 1, (x.data_ptr(), n))
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
        Launcher(kernel, 0, 4096, 0, form("Pi"))(current(), 1, (x.data_ptr(), 0))
    torch.cuda.synchronize()  # a refused launch breaks nothing
    Launcher(kernel, 0, 64, 4 * n, form("Pi"))(current(), 1, (x.data_ptr(), n))
    assert torch.equal(x, expected.flip(0) + 1)


@pytest.mark.gpu
def test_launches_are_on_pytorchs_current_stream(cold: Path) -> None:
    spin, fill = real("spin", 1, 0, "Pq"), real("fill", 128, 0, "Piqf")
    x = torch.zeros(100, device="cuda")
    spin(current(), 1, (x.data_ptr(), 1))  # both are loaded now, for which the driver may wait
    fill(current(), 1, (x.data_ptr(), 100, 0, 0.0))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        spin(current(), 1, (x.data_ptr(), 200_000_000))  # 0.1 s
        fill(current(), 1, (x.data_ptr(), 100, 3 << 40, 1.0))
    assert not side.query() and torch.cuda.default_stream().query()
    side.synchronize()
    assert torch.equal(x, filled(100, 1.0))


def test_counters_of_a_stream_are_one_tensor_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads that come first both get the one that is kept; what was replaced outlives a launch."""
    counters, like = launch_module.Counters(4), torch.empty(0)
    meet = threading.Barrier(2, timeout=10)
    zeros = torch.zeros

    def slow(*given: Any, **named: Any) -> torch.Tensor:
        meet.wait()  # both have seen that there is none
        return zeros(*given, **named)

    monkeypatch.setattr(torch, "zeros", slow)
    found = in_threads([lambda: counters.make(0, like)] * 2)
    monkeypatch.undo()
    assert all(one is counters.of_streams[0] for one in found)
    kept = counters.of_streams[0]
    for stream in range(1, launch_module._STREAMS + 1):
        counters.make(stream, like)
    assert 0 not in counters.of_streams and counters._before[0] is kept
