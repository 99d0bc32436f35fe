"""What the tests share: devices, error bounds, one call made on PyTorch and on upconv, and plans forced on calls."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any, TypeVar

# Before NumPy's first import: as PyTorch's (below), its threads wait for each other and for other workers' cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest
import torch
from torch import Tensor

import upconv
from upconv import autograd, cpu, dispatch, freezing, planner
from upconv.bench.timing import precision_flags
from upconv.cuda import engine
from upconv.cuda.compile import cache as cubins
from upconv.cuda.compile import jit, launch, nvrtc
from upconv.cuda.gpu import gpu
from upconv.planner import Candidate, Device, Plan
from upconv.problem import Problem
from upconv.replay import calls, replays

pytest_plugins = ("emulator", "standins", "driver", "measured")
"""Whose fixtures tests take by name."""

# Fixtures stay as they are between a test's examples, and how long one takes depends on a machine's other programs.
hypothesis.settings.register_profile(
    "upconv", deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
hypothesis.settings.load_profile("upconv")

T = TypeVar("T")
RANKS = pytest.mark.parametrize("rank", (1, 2, 3), ids="{}d".format)
OURS = (None, upconv.conv_transpose1d, upconv.conv_transpose2d, upconv.conv_transpose3d)
THEIRS = (None, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)

EVERY = os.environ.get("UPCONV_TEST_EVERY", "") not in ("", "0")
"""Whether tests take every choice, layer, dtype, layout and GPU (an hour), or a sample in which each appears."""


def seeds(most: int, every: int) -> range:
    """So many random seeds or draws of a sample, or every one."""
    return range(every if EVERY else most)


def by_turns(every: Iterable[T], turns: int, first: int = 0) -> list[T]:
    """A sample of one in so many, from the ``first`` of them on, or all."""
    return list(every) if EVERY else list(every)[first % turns :: turns]


def diagonal(*axes: Sequence[Any], turns: int = 2) -> list[tuple[Any, ...]]:
    """A sample of one in so many of all combinations, in which each value meets all others' by turns; or all."""
    every = product(*map(enumerate, axes))
    return [tuple(v for _, v in each) for each in every if EVERY or sum(i for i, _ in each) % turns == 0]


if not torch.cuda.is_available():  # stand-ins' training calls would have a library compiled beside the tests
    replays.hoped = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each device that the machine may have; on CUDA float32 is float32, since the bounds are not TF32's."""
    if request.param == "cpu":
        yield "cpu"
        return
    torch.backends.cudnn.allow_tf32 = False  # which sets all flags alike, as torch.export wants them
    yield str(request.param)
    torch.backends.cudnn.allow_tf32 = True


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Seed 0, and one thread: on shared cores the barriers between threads cost 20 times these tiny problems' work."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ieee() -> Iterator[None]:
    """Float32 is float32 on a GPU too."""
    with precision_flags("ieee"):
        yield


@pytest.fixture
def tf32() -> Iterator[None]:
    """Float32 is multiplied in TF32, as by default."""
    with precision_flags("tf32"):
        yield


NANS = """
extern "C" __global__ void nans(int words) {
  extern __shared__ volatile unsigned int memory[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = 0x7fffffffu;
}
"""


@pytest.fixture(autouse=True)
def _shared_memory_of_nans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of each launch every multiprocessor's shared memory is filled with what is a NaN in all dtypes.

    Else a kernel that reads what nobody brought finds what an earlier launch left there, maybe its own right numbers.
    """
    name = request.node.path.stem
    if not request.node.get_closest_marker("gpu") or not name.endswith("_gpu"):
        return
    launch_it = launch.Launcher.__call__

    @cache
    def filler(device: int) -> tuple[launch.Launcher, int, int]:
        chip = gpu(device)
        kernel = jit.kernel(NANS, "nans", chip.arch, "NaNs")
        fill = launch.Launcher(kernel, device, 512, chip.shared_bytes, "q")
        return fill, chip.multiprocessors, chip.shared_bytes // 4

    def behind_nans(
        self: launch.Launcher, stream: Any, grid: int, args: tuple[Any, ...], dependent: bool = False
    ) -> None:
        if not (dependent or torch.cuda.is_current_stream_capturing()):
            fill, blocks, words = filler(self.device)
            launch_it(fill, stream, blocks, (words,))
        launch_it(self, stream, grid, args, dependent)

    monkeypatch.setattr(launch.Launcher, "__call__", behind_nans)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No kernel is in memory, nothing was warned of; an empty directory for the disk cache, which is returned."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("UPCONV_CACHE_DIR", str(folder))
    for name in ("UPCONV_CACHE", "UPCONV_CACHE_BYTES", "UPCONV_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    for name in ("_cubins", "_kernels", "_libraries"):
        monkeypatch.setattr(jit, name, {})
    monkeypatch.setattr(cubins, "_warned", [])
    monkeypatch.setattr(cubins, "_writes", count())
    return folder


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of what NVRTC is asked to compile, while it compiles it."""
    asked: list[str] = []
    real = nvrtc.build

    def counted(source: str, arch: str, label: str, *given: Any) -> nvrtc.Built:
        asked.append(label)
        return real(source, arch, label, *given)

    monkeypatch.setattr(nvrtc, "build", counted)
    return asked


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on the CPU count as packed, as on a GPU."""
    monkeypatch.setattr(freezing, "_packed_on", lambda weight: True)


BARE = f"""
import sys, types
sys.modules["upconv"] = types.ModuleType("upconv")
sys.modules["upconv"].__path__ = {list(upconv.__path__)}
"""
"""The head of a program that wants only the compiler or the cache: the package without its import of PyTorch, 2.7 s."""


def printed(*arguments: object, **environment: str) -> str:
    """What Python prints in a process of its own that is given these arguments, and ends well."""
    command, variables = [sys.executable, *map(str, arguments)], {**os.environ, **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- error bounds ----------------------------------------------------------------------------------------------------


def rounding_bound(dtype: torch.dtype, length: int) -> float:
    """Bound of ``|error| / sum |products|`` for a sum of ``length`` products, rounded to ``dtype`` at its end.

    Sums run in float32 at least, each step with one rounding: ``gamma_length`` (Higham, "Accuracy and Stability of
    Numerical Algorithms", 2002, section 3.1). The result is rounded to its dtype, and once more when a bias joins it.
    """
    steps = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    return torch.finfo(dtype).eps + (length + 2) * torch.finfo(steps).eps


def assert_equal(ours: Any, theirs: Any) -> None:
    """Same values to the last bit, dtype, shape and strides."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert ours.stride() == theirs.stride(), (ours.shape, ours.stride(), theirs.stride())


def assert_close(ours: Tensor, theirs: Tensor, length: int = 64) -> None:
    """Same dtype, shape and strides; values within the bound for ``length`` products of the tensors' own magnitude."""
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    if ours.numel():
        scale = theirs.abs().max().item()
        atol = 2 * scale * rounding_bound(ours.dtype, length)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def assert_sentence(reason: str) -> None:
    """What says why something is not done."""
    assert len(reason) > 15 and not reason.endswith(".") and "\n" not in reason, reason


# --- the same call on both -------------------------------------------------------------------------------------------


@dataclass
class Call:
    """Operands and arguments of one transposed convolution; ``bias`` may be None."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.weight.dim() - 2

    @property
    def operands(self) -> list[Tensor]:
        return [t for t in (self.input, self.weight, self.bias) if t is not None]

    def run(self, functions: Sequence[Any]) -> Tensor:
        out: Tensor = functions[self.rank](self.input, self.weight, self.bias, **self.kwargs)
        return out

    def gradients(self, functions: Sequence[Any], grad: Tensor) -> tuple[Tensor, ...]:
        """(output, and a gradient for every operand)"""
        operands = [t.detach().requires_grad_() for t in self.operands]
        call = Call(operands[0], operands[1], operands[2] if self.bias is not None else None, self.kwargs)
        out = call.run(functions)
        return (out.detach(), *torch.autograd.grad(out, operands, grad))


def make_call(
    shape: Sequence[int],
    weight: Sequence[int],
    bias: bool = True,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **kwargs: Any,
) -> Call:
    """A call on random tensors; ``shape`` without the batch makes it an unbatched one."""
    channels = weight[1] * kwargs.get("groups", 1)

    def tensor(*size: int) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(size, dtype=dtype, device=device)
        return torch.randint(-4, 5, size, dtype=dtype, device=device)

    return Call(tensor(*shape), tensor(*weight), tensor(channels) if bias else None, kwargs)


# --- plans forced on calls -------------------------------------------------------------------------------------------


def _forget_plans() -> None:
    calls.forget()
    for module in (dispatch, autograd, planner, engine, replays):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextmanager
def forced_plans(forward: str = "native", backward: str = "native") -> Iterator[list[Problem]]:
    """Every call gets these plans where `cpu` admits them (PyTorch's own operator where it does not).

    ``any``: the first of the engine's own plans that it admits.

    Yields the list of problems that got a plan other than PyTorch's operator: a test looks there whether anything was
    forced at all.
    """
    forced: list[Problem] = []

    def plan(p: Problem, device: Device) -> Plan:
        asked = ("shuffle", "flip", "unbiased") if forward == "any" else (forward,)
        name = next((one for one in asked if not cpu.refusal(p, one)), "native")
        back = "split" if backward == "wide" and p.dtype not in cpu.HALF else backward
        if (name, back) != ("native", "native"):
            forced.append(p)
        return Plan(p, device, name, back, (Candidate(name, True, "forced by a test"),))

    patch = pytest.MonkeyPatch()
    _forget_plans()
    patch.setattr(planner, "plan", plan)
    try:
        yield forced
    finally:
        patch.undo()
        _forget_plans()


PLANS: list[tuple[str, str]] = [
    *((name, "native") for name in cpu.FORWARD_PLANS if name not in ("native", "wide")),
    *(("native", name) for name in cpu.BACKWARD_PLANS if name != "native"),
    ("flip", "split"),
    ("shuffle", "split"),
]
"""Each plan of the CPU engine that is for all layers alone, and two pairs of forward and backward together."""


# --- on a GPU --------------------------------------------------------------------------------------------------------


HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
"""The marks of tests of kernels by wgmma."""


def replayed(step: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """What a step leaves in its results when it is captured in a CUDA graph and replayed over NaNs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for t in captured:
        t.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    return captured


# --- kernels on the host ---------------------------------------------------------------------------------------------

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))
HOST = Path(__file__).parent / "host"
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def _gxx(*arguments: str) -> None:
    # Fortified, as some systems do by themselves, the jumps of host/fibers.h from stack to stack end the program.
    flags = ("-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-pthread")
    linker = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()  # 0.1 s less of a program's 0.5
    done = subprocess.run(["g++", *flags, *linker, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


# All libraries of a process share an exported template's static array, which has the size of the first library's.
# What a CPU does not trap, machine.cpp's handlers do: misaligned accesses, indexes beyond an array, and integers that
# overflow, as places in large tensors do.
_OF_LIBRARIES = (
    "-fPIC", "-fno-strict-aliasing", "-fvisibility=hidden", "-fno-sanitize-recover=all",
    "-fsanitize=alignment,bounds,signed-integer-overflow",
)  # fmt: skip


@cache
def _machine() -> tempfile.TemporaryDirectory[str]:
    """What all kernels have in common of ``host/machine.h``, compiled: half of what a kernel alone would take."""
    folder = tempfile.TemporaryDirectory()
    for name in ("machine.h", "standard.h"):
        shutil.copy(HOST / name, folder.name)
    _gxx(*_OF_LIBRARIES, "-x", "c++-header", f"{folder.name}/machine.h", "-o", f"{folder.name}/machine.h.gch")
    _gxx(*_OF_LIBRARIES, "-c", f"-I{HOST}", str(HOST / "machine.cpp"), "-o", f"{folder.name}/machine.o")
    return folder


def compiled_for_host(main: Path, made: Path) -> Path:
    """A kernel's library, of a source that ``emulator.for_host`` gives. It exports only what is marked as visible."""
    machine = Path(_machine().name)
    heads = ("-include", str(machine / "machine.h"), f"-I{HOST}")
    _gxx("-shared", *_OF_LIBRARIES, *heads, str(main), str(machine / "machine.o"), "-o", str(made))
    return made
