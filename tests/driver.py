"""A driver whose kernels are Python's: calls on CPU tensors are recorded and replayed by the module in C++."""

from __future__ import annotations

import ctypes
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from emulator import arguments_of
from standins import Kernels, StandIn
from upconv import reference
from upconv.cuda import launches, prepared
from upconv.cuda.compile import driver as driver_module
from upconv.cuda.compile.boxes import Tensor5
from upconv.cuda.compile.driver import Kernel
from upconv.cuda.compile.launch import LaunchError
from upconv.cuda.launches import NULL, Given, Int, Launch, Map, Pointer, Scratch, Unit, Zeros
from upconv.cuda.packs import PacksWeights
from upconv.problem import Problem
from upconv.replay import calls, native, replays


class Machine:
    """Kernels by their handles, called with the words of their arguments, and what was launched."""

    def __init__(self) -> None:
        self.sources: dict[str, dict[str, Callable[..., None]]] = {}
        self.kernels: dict[int, tuple[int, Callable[..., None]]] = {}
        self.launched: list[tuple[str, int, int]] = []
        self.answer = 0
        self.context_bound = 0
        shape = [ctypes.c_uint] * 7
        self.callbacks = (
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *shape, *[ctypes.c_void_p] * 3)(self._ordinary),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *shape, *[ctypes.c_void_p] * 2)(self._cooperative),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_void_p] * 3)(self._extended),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda stream, status: 0),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._bind),
        )

    def unit(self, name: str, **kernels: Callable[..., None]) -> Unit:
        """What `loaded` finds such kernels by."""
        self.sources[name] = kernels
        return Unit(name, name, tuple(kernels))

    def loaded(self, launch: Launch, arguments: str, device: int) -> Loaded:
        """`prepared.loaded`."""
        handle = 1000 + len(self.kernels)
        found = Loaded(self, Kernel("f", handle), arguments, launch.cooperative)
        self.kernels[handle] = struct.calcsize(arguments) // 8, self.sources[launch.unit.source][launch.entry]
        return found

    def addresses(self) -> list[int]:
        return [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self.callbacks]

    def run(self, how: str, handle: int, grid: int, pointers: int) -> int:
        if self.answer:
            return self.answer
        count, kernel = self.kernels[handle]
        slots = (ctypes.c_void_p * count).from_address(pointers)
        self.launched.append((how, handle, grid))
        kernel(*(ctypes.c_uint64.from_address(slot).value for slot in slots))
        return 0

    def _ordinary(
        self, f: int, x: int, y: int, z: int, bx: int, by: int, bz: int, s: int, st: Any, p: int, e: Any
    ) -> int:
        assert (y, z, bx, by, bz, s, st, e) == (1, 1, 64, 1, 1, 16, None, None)
        return self.run("ordinary", f, x, p)

    def _cooperative(self, function: int, grid: int, *rest: Any) -> int:
        *shape, stream, pointers = rest
        assert (shape, stream) == ([1, 1, 64, 1, 1, 16], None)
        return self.run("cooperative", function, grid, pointers)

    def _extended(self, configuration: int, f: int, p: int, e: Any) -> int:
        numbers = (ctypes.c_uint * 14).from_address(configuration)
        attribute = (ctypes.c_int * 18).from_address(ctypes.c_uint64.from_address(configuration + 40).value)
        assert (
            list(numbers[1:7]) == [1, 1, 64, 1, 1, 16] and numbers[12] == 1 and (attribute[0], attribute[2]) == (6, 1)
        )
        return self.run("dependent", f, numbers[0], p)

    def _bind(self, context: int) -> int:
        self.context_bound, self.answer = context, 0
        return 0


@dataclass(frozen=True)
class Loaded:
    """In the place of a `Launcher`, of calls that Python launches."""

    machine: Machine
    kernel: Kernel
    form: str
    cooperative: bool

    def __call__(self, stream: Any, grid: int, args: tuple[Any, ...], dependent: bool = False) -> None:
        if self.machine.answer:
            raise LaunchError(f"the driver answered {self.machine.answer}")
        how = "cooperative" if self.cooperative else "dependent" if dependent else "ordinary"
        self.machine.launched.append((how, self.kernel.handle, grid))
        _, kernel = self.machine.kernels[self.kernel.handle]
        with _disable_current_modes():  # PyTorch's operators within a kernel are no steps of a pass
            kernel(*(word % 2**64 for word in arguments_of(self.form, args)))


DRIVER = SimpleNamespace(cuDeviceGet=lambda device: (0, device), cuDevicePrimaryCtxRetain=lambda device: (0, 77))


def at(address: int, like: Tensor | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """The dense tensor at an address."""
    shape = tuple(like.shape if isinstance(like, Tensor) else like)
    of = dtype or (like.dtype if isinstance(like, Tensor) else torch.float32)
    count = torch.Size(shape).numel()
    return torch.frombuffer((ctypes.c_char * (count * of.itemsize)).from_address(address), dtype=of).view(shape)


# --- passes of such kernels -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launched(PacksWeights, StandIn):
    """A stand-in whose passes are launches: one that packs and a dependent one, or a cooperative one; with a map."""

    unit: Any = None
    packer = None, 0, 0  # it has a `pack` of its own

    def packed_bytes(self, given: Given) -> int:
        p = self.problem
        return (torch.Size(p.weight_shape).numel() + p.out_channels * (given.bias == "single")) * p.dtype.itemsize

    def pack(self, given: Given) -> Launch:
        bias = Pointer("bias") if given.bias == "single" else NULL
        arguments = Pointer("weight"), Pointer("packed"), Int(given.single), bias
        return Launch(self.unit, "pack", 3, 64, 16, arguments)

    def multiply(self, given: Given) -> Launch:
        p = self.problem
        behind = Pointer("packed", torch.Size(p.weight_shape).numel() * p.dtype.itemsize)
        bias = behind if given.bias == "single" else Pointer("bias") if given.bias == "given" else NULL
        box = Map("source", Tensor5(0, (1,) * 5, (16,) * 4), p.dtype, (1,) * 5)
        arguments = Pointer("source"), box, Pointer("packed"), bias, Pointer("result"), Pointer(Zeros(3)), Int(3)
        return Launch(self.unit, "multiply", 5, 64, 16, arguments, dependent=True)

    def launches(self, given: Given) -> tuple[Launch, ...]:
        if self.problem.pass_ != "grad-weight":
            return super().launches(given)
        pointers = Pointer("input"), Pointer("gradient"), Pointer(Scratch("sums", 32)), Pointer("result")
        return (Launch(self.unit, "sum", 2, 64, 16, (*pointers, Int(given.single)), cooperative=True),)


def kernels_of(p: Problem) -> dict[str, Callable[..., None]]:
    """The kernels of `Launched`, on memory of the CPU."""
    source = p.input_shape if p.pass_ == "fwd" else p.output_shape
    result = p.output_shape if p.pass_ == "fwd" else p.input_shape

    def dense(address: int, shape: tuple[int, ...], dtype: torch.dtype = p.dtype) -> Tensor:
        if p.layout != "channels_last":
            return at(address, shape, dtype)
        return at(address, (shape[0], *shape[2:], shape[1]), dtype).movedim(-1, 1)

    def pack(weight: int, packed: int, single: int, bias: int) -> None:
        parts = [at(weight, p.weight_shape, torch.float32 if single else p.dtype)]
        if bias:
            parts.append(at(bias, (p.out_channels,)))
        whole = torch.cat([t.flatten().to(p.dtype) for t in parts])
        at(packed, whole.shape, p.dtype).copy_(whole)

    def multiply(x: int, *rest: int) -> None:
        packed, bias, out, zeros, scale = rest[16:]
        assert rest[:3] == (x, 7, 2**64 - 1) and scale == 3
        assert not at(zeros, (3,), torch.int32).any(), "words that kernels find zeros"
        weight = at(packed, p.weight_shape, p.dtype)
        b = None if not bias else at(bias, (p.out_channels,), p.dtype)
        if p.pass_ == "fwd":
            dense(out, result).copy_(reference.forward(p, dense(x, source), weight, b))
        else:
            found = reference.gradients(p, dense(x, source), torch.zeros(p.input_shape), weight)[0]
            dense(out, result).copy_(found)

    def sum(x: int, grad: int, sums: int, out: int, single: int) -> None:
        given = dense(grad, p.output_shape), dense(x, p.input_shape)
        found = reference.gradients(p, *given, torch.zeros(p.weight_shape))[1]
        at(sums, (8,)).fill_(1.0)  # it may
        dense(out, p.weight_shape, torch.float32 if single else p.dtype).copy_(found)

    return {"pack": pack, "multiply": multiply, "sum": sum}


class LoggedData(prepared.Prepared):
    def run(self, *given: Any) -> None:
        self.choice.log.append(("run", self.choice.problem.pass_))
        super().run(*given)


class LoggedWeight(prepared.PreparedWeight):
    def run(self, *given: Any) -> None:
        self.choice.log.append(("run", "grad-weight"))
        super().run(*given)


@pytest.fixture(scope="session")
def module() -> Any:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    found = native.wait()
    assert found is not None, native.state()
    return found


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which none was loaded yet."""
    for name, value in (("_module", None), ("_builder", None), ("_done", threading.Event()), ("_reason", "")):
        monkeypatch.setattr(native, name, value)


def encode(of: Map, address: int) -> bytes:
    return struct.pack("<16Q", address + of.tensor.begin, 7, 2**64 - 1, *[0] * 13)


@pytest.fixture
def machine(kernels: Kernels, module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Calls on CPU tensors are by the kernels above, and replayed from the fourth on."""
    found = Machine()
    monkeypatch.setattr(driver_module, "bindings", lambda: DRIVER)
    monkeypatch.setattr(prepared, "current_stream", lambda device: 0)
    monkeypatch.setattr(prepared, "stream_handle", lambda stream: stream)
    monkeypatch.setattr(Kernel, "ready", lambda self, device: None)
    monkeypatch.setattr(prepared, "bind", lambda device: None)
    monkeypatch.setattr(launches, "encode", encode)
    monkeypatch.setattr(replays, "hoped", True)

    def prepare(self: StandIn, device: int) -> Any:
        p = self.problem
        self.log.append(("prepare", p.pass_))
        kind = LoggedWeight if p.pass_ == "grad-weight" else LoggedData
        return kind(Launched(p, self.log, unit=found.unit(f"{p} {p.pass_}", **kernels_of(p))), device)

    monkeypatch.setattr(prepared, "loaded", found.loaded)
    monkeypatch.setattr(StandIn, "prepare", prepare)
    module.set_driver(*found.addresses())
    calls.forget()
    yield found
    calls.forget()
