"""The compiler: sources put together, compiled without a GPU for every target, kept once, and errors that help."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import BARE, needs_nvrtc, printed
from situations.processes import in_threads
from upconv.cuda.compile import jit, nvrtc
from upconv.cuda.gpu import gpu

pytestmark = pytest.mark.usefixtures("cold")

SOURCE = """
extern "C" __global__ void reversed(float* x) { x[threadIdx.x] = x[blockDim.x - threadIdx.x]; }
extern "C" __global__ void plain(float* x) { x[threadIdx.x] += 1; }
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources in place of the package's."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.setattr(jit, "KERNELS", folder)
    return folder


# --- compilation -----------------------------------------------------------------------------------------------------


@needs_nvrtc
def test_a_compilation_leaves_pythons_shared_bytes_alone(tmp_path: Path) -> None:
    """An empty log is one NUL, which must not be written into the object that every ``b" "`` is."""
    program = (
        f"{BARE}from upconv.cuda.compile import jit\n"
        "jit.cubin('extern \"C\" __global__ void f(int* p) { *p = 1; }', '90a', 'test')\n"
        "assert all(bytes([i])[0] == i for i in range(256)), [i for i in range(256) if bytes([i])[0] != i]\n"
        "print('two', 'words')\n"
    )
    assert printed("-c", program, UPCONV_CACHE_DIR=str(tmp_path)) == "two words\n"


@needs_nvrtc
def test_a_compile_error_tells_what_where_and_why(kernels: Path, cold: Path) -> None:
    (kernels / "part.cuh").write_text("__device__ int half(int n) { return n / WRONG_NAME; }\n")
    (kernels / "whole.cu").write_text('// one\n#include "part.cuh"\n__global__ void f() {}\n')
    text = jit.instance("whole.cu", {"block_m": 64}, ["f"])
    with pytest.raises(nvrtc.CompileError) as caught:
        jit.cubin(text, "90a", "whole 64")
    message = str(caught.value)
    first, *rest = message.splitlines()
    assert re.fullmatch(r"NVRTC \d+\.\d+ could not compile whole 64 for sm_90a \(NVRTC_ERROR_COMPILATION\)\.", first)
    assert any("part.cuh(1): error" in line and "WRONG_NAME" in line for line in rest)
    path = Path(next(line for line in rest if line.startswith("source: ")).removeprefix("source: "))
    assert path.parent == cold and path.read_text() == text
    assert isinstance(caught.value, RuntimeError)


@needs_nvrtc
def test_an_entry_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^entry must be one of x\.cu's, .*reversed.*; got 'absent'"):
        jit.kernel(SOURCE, "absent", "80", "x.cu")


def test_without_nvrtc_every_call_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise OSError("no libnvrtc\nanywhere")

    monkeypatch.setattr(nvrtc, "version", broken)
    nvrtc.unavailable.cache_clear()
    try:
        assert nvrtc.unavailable() == "CUDA kernels need NVRTC, which cannot be loaded: no libnvrtc anywhere."
        for call in (jit.cubin, jit.built):
            with pytest.raises(RuntimeError, match="no libnvrtc anywhere"):
                call(SOURCE, "80")
        with pytest.raises(RuntimeError, match="no libnvrtc anywhere"):
            jit.kernel(SOURCE, "plain", "80")
    finally:
        nvrtc.unavailable.cache_clear()


# --- what is compiled how often --------------------------------------------------------------------------------------


@needs_nvrtc
def test_memory_then_disk_then_compiler(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UPCONV_DEBUG", "1")
    first = jit.cubin(SOURCE, "80", "x.cu")
    assert re.fullmatch(r"upconv: compiled x\.cu for sm_80 in \d+\.\d s\n", capsys.readouterr().err)
    assert jit.cubin(SOURCE, "80", "x.cu") is first
    assert capsys.readouterr().err == ""
    jit._cubins.clear()
    assert jit.cubin(SOURCE, "80", "x.cu") == first
    assert capsys.readouterr().err == "upconv: loaded x.cu for sm_80 (cached)\n"
    monkeypatch.delenv("UPCONV_DEBUG")
    jit.cubin(SOURCE, "86", "other target")
    jit.cubin(SOURCE + " ", "80", "other source")
    monkeypatch.setattr(nvrtc, "version", lambda: "99.9")
    jit.cubin(SOURCE, "80", "other compiler")
    monkeypatch.setattr(nvrtc, "FLAGS", ("-std=c++17", "-lineinfo"))
    jit.cubin(SOURCE, "80", "other flags")
    assert compilations == ["x.cu", "other target", "other source", "other compiler", "other flags"]
    assert capsys.readouterr() == ("", "")


@needs_nvrtc
def test_threads_that_want_the_same_compile_it_once(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPCONV_CACHE", "off")
    start = threading.Barrier(8)

    def work() -> bytes:
        start.wait()
        return jit.cubin(SOURCE, "80")

    found = in_threads([work] * 8)
    assert len(compilations) == 1 and all(code is found[0] for code in found)


# --- sources ---------------------------------------------------------------------------------------------------------


@needs_nvrtc
def test_a_changed_cuda_header_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '#include <cuda_fp16.h>\nextern "C" __global__ void f(int* x) { *x = VALUE; }\n'
    keys, codes = set(), set()
    for value in (1, 2):
        folder = tmp_path / f"include{value}"
        folder.mkdir()
        (folder / "cuda_fp16.h").write_text('#include "cuda_fp16.hpp"\n')
        (folder / "cuda_fp16.hpp").write_text(f"#define VALUE {value}\n")
        monkeypatch.setattr(nvrtc, "_include_folders", lambda folder=folder: (str(folder),))
        nvrtc._header_digest.cache_clear()
        keys.add(nvrtc.key(text, "80"))
        codes.add(jit.cubin(text, "80"))
    nvrtc._header_digest.cache_clear()
    assert len(keys) == len(codes) == 2


SUMS = """
template <class C> struct Sum { static __device__ int of(int i) { return C::terms[1][0] + C::first + i; } };
template <class C> __global__ void plain(int* x) { *x = C::big ? C::first : 0; }
template <class K> __global__ void packed(float* x) { *x = K::of(threadIdx.x); }
template <class C> __global__ void unwanted(int* x) { *x = C::absent; }
"""


@needs_nvrtc
def test_an_instance_has_its_constants_and_the_entries_that_are_named(kernels: Path) -> None:
    (kernels / "k.cu").write_text(SUMS)
    constants = {"first": 3, "big": True, "terms": ((1, 2), (3, 4)), "scale": 0.5, "far": 2**40}
    text = jit.instance("k.cu", constants, ("plain<Config>", "packed<Sum<Config>>"))
    assert set(jit.kernels_of(jit.cubin(text, "80"))) == {"plain", "packed"}
    struct_text, file = jit.parts_of(text)
    assert struct_text == jit.struct_of("Config", constants) and file == "k.cu"
    with pytest.raises(nvrtc.CompileError, match="absent"):
        jit.cubin(jit.instance("k.cu", constants, ("unwanted<Config>",)), "80")


@needs_nvrtc
def test_an_instance_has_kernels_of_more_files(kernels: Path) -> None:
    """What several of them include once."""
    (kernels / "sum.cuh").write_text("template <class C> struct Sum { static constexpr int OF = C::first + 1; };\n")
    for name in ("one", "two"):
        kernel = f"template <class C> __global__ void {name}(int* x) {{ *x = Sum<C>::OF; }}\n"
        (kernels / f"{name}.cu").write_text(f'#include "sum.cuh"\n{kernel}')
    text = jit.instance("one.cu", {"first": 3}, ("one<Config>", "two<Config>"), ["two.cu"])
    assert set(jit.kernels_of(jit.cubin(text, "80"))) == {"one", "two"}
    assert jit.parts_of(text)[1] == "one.cu" and jit.files_of(text) == ("one.cu", "sum.cuh", "two.cu")


# --- descriptions of GPUs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [("NVIDIA H200", 4.2e12), ("NVIDIA H100 PCIe", 1.8e12), ("NVIDIA RTX A4000", 0.9 * 448e9),
     ("NVIDIA GeForce RTX 4090 Laptop GPU", 0.9 * 448e9)],  # a smaller chip of the same name
)  # fmt: skip
def test_bandwidth_goes_by_the_name_or_else_by_what_the_driver_tells(
    monkeypatch: pytest.MonkeyPatch, name: str, bandwidth: float
) -> None:
    told = SimpleNamespace(
        name=name, major=8, minor=6, multi_processor_count=48, shared_memory_per_block_optin=101376,
        shared_memory_per_multiprocessor=102400, memory_clock_rate=7_000_000, memory_bus_width=256,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    gpu.cache_clear()
    found = gpu(0)
    gpu.cache_clear()
    assert found.bandwidth == pytest.approx(bandwidth)
    assert (found.name, found.arch, found.multiprocessors, found.shared_bytes) == (name, "86", 48, 101376)


@pytest.mark.gpu
def test_the_description_of_the_device_at_hand() -> None:
    found, properties = gpu(0), torch.cuda.get_device_properties(0)
    assert found.name == properties.name and found.multiprocessors == properties.multi_processor_count
    assert found.capability == torch.cuda.get_device_capability(0)
    assert found.shared_per_sm - 1024 >= found.shared_bytes - 1024 > 0 and 1e8 < found.clock < 1e10
    assert jit.cubin(SOURCE, found.arch)


FORKED = (
    BARE
    + """
import os, signal, threading
from concurrent.futures import Future
from upconv.cuda.compile import jit

source = 'extern "C" __global__ void plain() {}'
jit._cubins[jit._name(source, "80")] = Future()  # as of a thread that compiles
jit._lock.now.acquire()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if jit.cubin(source, "80") else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
)


@needs_nvrtc
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_compiles_what_a_thread_of_its_parent_does() -> None:
    assert printed("-c", FORKED) == "0\n"
