"""Kernels on a CPU, from their own source: a stand-in for the driver, by which a family's launches run on CPU tensors.

Or are noted alone (`stubs`).

``host/machine.h`` is the GPU; ``host/ptx_host.h`` and ``host/wgmma_host.h`` stand for the headers that have PTX.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import compiled_for_host
from upconv.cuda.compile import jit, launch
from upconv.cuda.gpu import H200, Gpu
from upconv.cuda.launches import Map

_HEADER = r'#line 1 "{}\.cuh"\n.*?\n(?=#line )'
_CALL = """
extern "C" __attribute__((visibility("default")))
const char* run_{0}(
  int grid, int threads, int shared, const char* arguments, int together, int seed, int begin, int end) {{
  return machine::launch([] {{ machine::call({1}); }}, grid, threads, shared, arguments, together, seed, begin, end);
}}
"""


def for_host(source: str, entries: tuple[str, ...]) -> str:
    """A kernel's source for a C++ compiler, with a function for each entry that runs a grid."""
    for name in ("ptx", "wgmma"):
        source = re.sub(_HEADER.format(name), f'#include "{name}_host.h"\n', source, flags=re.DOTALL)
    source = re.sub(
        r"extern __shared__[^;]* memory\[\];", "unsigned char* const memory = machine::dynamic_memory();", source
    )
    names = {entry.partition("<")[0]: entry for entry in jit.entries_of(source)}
    return source + "".join(_CALL.format(entry, names.get(entry, entry)) for entry in entries)


@dataclass
class Code:
    """A source, compiled for the host when it is first launched, with the entries that are wanted until then."""

    source: str
    entries: list[str] = field(default_factory=list)
    library: Any = None

    def function(self, entry: str) -> Any:
        if self.library is None:
            with tempfile.TemporaryDirectory() as folder:
                main = Path(folder) / "kernel.cpp"
                main.write_text(for_host(self.source, tuple(self.entries)))
                self.library = ctypes.CDLL(str(compiled_for_host(main, Path(folder) / "kernel.so")))
        found = self.library["run_" + entry]
        found.restype = ctypes.c_char_p
        return found

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        found = re.search(
            r"^#define CLUSTER (\d+)$|^  static constexpr int cluster = (\d+);", self.source, re.MULTILINE
        )
        return int(found[1] or found[2]) if found else 1


def stand_in(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    """Puts these in the place of what modules of kernels import by the names (their launchers, their tensor maps)."""
    import_module("upconv.cuda.prepared")  # which families import late
    for module in [one for name, one in sys.modules.items() if name.startswith("upconv.cuda.")]:
        if not module.__name__.startswith("upconv.cuda.compile."):
            for name in names.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, names[name])


def arguments_of(form: str, args: tuple[Any, ...]) -> Iterator[int]:
    """A launch's arguments one by one, strings of them taken apart (`Launcher`)."""
    for kind, given in zip(re.findall(r"Q|\d+s", form), args, strict=True):
        if kind == "Q":
            yield given
            continue
        assert len(given) == struct.calcsize(kind)
        yield from struct.unpack(f"<{len(given) // 8}q", given)


@dataclass
class Emulator:
    """What launches are made of.

    ``seed``: an odd one does copies and matrix instructions as late as a kernel lets it. ``mutate``: what becomes of a
    source before it is compiled.
    """

    gpu: Gpu
    seed: int = 0
    mutate: Callable[[str], str] = str
    codes: dict[str, Code] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    """The entries that were asked for."""
    launched: list[tuple[str, int, bool]] = field(default_factory=list)
    """Entry, blocks, and whether it is the dependent of the launch before."""
    arguments: list[tuple[int, ...]] = field(default_factory=list)
    """Of each launch."""
    act: Callable[[str, bool], object] = lambda entry, cooperative: None
    """What a launch does first, with its entry and whether its blocks wait for each other."""
    counters: list[torch.Tensor] = field(default_factory=list)
    """Zeros that kernels count in, and leave as zeros."""
    blocks: Callable[[str, int], Iterable[range]] = lambda entry, grid: (range(grid),)
    """Of a kernel's grid those that run."""

    def kernel(self, source: str, entry: str, arch: str, label: str = "") -> tuple[Code, str]:
        self.loaded.append(entry)
        code = self.codes.setdefault(source, Code(self.mutate(source)))
        if entry not in code.entries:
            code.entries.append(entry)
            code.library = None
        return code, entry

    def launcher(
        self, kernel: Any, device: int, threads: int, shared: int, form: str, cooperative: bool = False
    ) -> Any:
        return _Launcher(self, kernel, threads, shared, form, cooperative)


class _Launcher:
    def __init__(
        self, emulator: Emulator, kernel: Any, threads: int, shared: int, form: str, cooperative: bool
    ) -> None:
        self._emulator, (self._code, self._entry) = emulator, kernel
        self._threads, self._shared, self._cooperative = threads, shared, cooperative
        self._form = form

    def __call__(self, stream: Any, grid: int, args: tuple[Any, ...], dependent: bool = False) -> None:
        e = self._emulator
        e.launched.append((self._entry, grid, dependent))
        e.arguments.append(tuple(arguments_of(self._form, args)))
        e.act(self._entry, self._cooperative)
        together = grid if self._cooperative else self._code.cluster
        if not self._shared:  # it is a static array, which blocks have in common
            together = 1
        elif together == 1:
            together += e.seed // 2 % 2
        arguments = struct.pack("<" + self._form, *args)
        for blocks in e.blocks(self._entry, grid):
            run = self._code.function(self._entry)
            wrong = run(grid, self._threads, self._shared, arguments, together, e.seed, blocks.start, blocks.stop)
            assert wrong is None, f"{self._entry}: {wrong.decode()}"


def encode(of: Map, address: int) -> bytes:
    """`launches.encode` for the host: a ``TensorMap`` of ``host/ptx_host.h``. It takes what hardware takes."""
    box, steps, element = of.box, of.steps, of.dtype.itemsize
    assert len(box) == 5 and max(box) <= 256 and min(box) >= 1 and max(steps) <= 8 and min(steps) >= 1
    assert steps[0] == 1 and (not of.span or box[0] * element <= of.span), "a row of the box is within the swizzle"
    strides, rounded = (element, *of.tensor.strides), of.rounded and of.dtype is torch.float32
    numbers = (address + of.tensor.begin, *strides, *of.tensor.dims, *box, *steps, of.span, rounded, 0)
    return struct.pack("<6Q5I5H5H2HI4x", *numbers).ljust(128, b"\0")


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """Families launch on CPU tensors."""
    found = Emulator(H200)

    make = launch.Counters.make

    def noted(self: launch.Counters, stream: int, like: torch.Tensor) -> torch.Tensor:
        found.counters.append(make(self, stream, like))
        return found.counters[-1]

    monkeypatch.setattr(launch.Counters, "make", noted)
    monkeypatch.setattr(jit, "kernel", found.kernel)
    stand_in(
        monkeypatch,
        Launcher=found.launcher,
        gpu_of=lambda device: found.gpu,
        cluster_fits=lambda device, blocks: True,
        bind=lambda device: None,
        stream_handle=lambda stream: stream,
        encode=encode,
    )
    return found


@pytest.fixture
def stubs(emulator: Emulator) -> Emulator:
    """The same, whose launches are noted and not run."""
    emulator.blocks = lambda entry, grid: ()
    return emulator
