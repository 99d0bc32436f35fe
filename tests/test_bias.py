"""The gradient for the bias: which tensor's elements a block adds, compiled kernels, and sums on a GPU."""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import HOST, host_program, instance_header, needs_gxx
from upconv import cpu
from upconv.cuda import bias
from upconv.cuda.compile import elf, jit, nvrtc
from upconv.cuda.gpu import A100, B200, H200, RTX3090, RTX4090, RTX5090
from upconv.cuda.scalars import PRECISIONS
from upconv.problem import LAYOUTS, Layout, Problem

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))


def layer(batch: int, channels: int, size: tuple[int, ...], dtype: torch.dtype, layout: Layout = "nchw") -> Problem:
    """One whose output has this size."""
    return Problem.make(batch, 8, channels, size, 1, dtype=dtype, layout=layout)


def counted(p: Problem, s: bias.Shape, base: int) -> np.ndarray:
    """How often ``sum`` adds each element of a tensor that begins ``base`` elements off 16 bytes."""
    each = 16 // p.dtype.itemsize
    pixels = int(np.prod(p.out_size))
    if p.layout == "channels_last":
        found = np.zeros((p.batch * pixels, p.out_channels), np.int64)
        channels, total, share = s.arguments
        units = channels // each
        assert total == len(found) and s.blocks == -(-units // 256)
        for block in range(s.blocks * s.ranges):
            first, begin = block % s.blocks * 256, block // s.blocks * share
            width = min(256, units - first)
            rows, end = 256 // width, min(begin + share, total)
            for row in range(rows):
                found[begin + row : end : rows, first * each : (first + width) * each] += 1
        return found
    found = np.zeros((p.batch, p.out_channels, pixels), np.int64)
    channels, total, share, pieces, every, items, width = s.arguments
    assert total == pixels and share % each == 0 and 256 % width == 0
    for block in range(s.blocks * s.ranges):
        channel, begin = block % channels, block // channels * items
        for item in range(begin, min(begin + items, every)):
            n, piece = divmod(item, pieces)
            ahead = min(-(base + (n * channels + channel) * pixels) % each, pixels)
            whole = ahead + (pixels - ahead) // each * each
            at = ahead + piece * share
            if piece == 0:
                assert ahead <= width and pixels - whole <= width
                found[n, channel, :ahead] += 1
                found[n, channel, whole:] += 1
            found[n, channel, at : min(at + share, whole)] += 1
    return found


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("seed", range(12))
def test_every_element_is_added_once(seed: int, layout: Layout) -> None:
    r = random.Random(f"{seed} {layout}")
    dtype = r.choice(DTYPES)
    size = r.choice([(7, 9), (1, 1), (64, 67), (5, 131), (130, 140)])
    channels = r.choice((8, 24, 40, 2048 + 64)) if layout == "channels_last" else r.choice((1, 3, 8, 40))
    p = layer(r.randint(1, 5), channels, size, dtype, layout)
    base = 0 if layout == "channels_last" else r.randrange(16 // dtype.itemsize)
    assert (counted(p, bias.shape(p, H200), base) == 1).all()


def program(dtype: torch.dtype, last: bool, folder: Path) -> Path:
    """The kernels as a program of their own."""
    (folder / "kernel.h").write_text(instance_header("bias.cu", {"precision": PRECISIONS[dtype]}, "Bias"))
    (folder / "bias.cpp").write_text(f"#define CHANNELS_LAST {int(last)}\n" + (HOST / "bias.cpp").read_text())
    return host_program(folder / "bias.cpp", folder)


@needs_gxx
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_on_the_host(dtype: torch.dtype, layout: Layout, tmp_path: Path) -> None:
    """The kernels' own text, thread by thread: sums of numbers that are exact in every type, with NaNs around them."""
    r = random.Random(f"{dtype} {layout}")
    last, each = layout == "channels_last", 16 // dtype.itemsize
    made = program(dtype, last, tmp_path)
    few = replace(H200, multiprocessors=2)  # so that blocks have several pieces
    for size in ((7, 9), (1, 1), (64, 67), (5, 131), (150, 290)):
        channels = r.choice((8, 24, 2048 + 64)) if last else r.choice((1, 3, 8))
        if size == (150, 290):
            channels = 8 if last else 2
        p = layer(r.randint(1, 3), channels, size, dtype, layout)
        s = bias.shape(p, r.choice((few, H200)))
        grad = torch.from_numpy(np.random.default_rng(r.randrange(99)).integers(-4, 5, (p.batch, channels, *size)) / 2)
        flat = (grad.movedim(1, -1) if last else grad).to(dtype).contiguous()
        given = (flat.view(torch.int16) if dtype.itemsize == 2 else flat).numpy().tobytes()
        offset = 0 if last else r.randrange(each)
        arguments = (s.blocks * s.ranges, -(-channels // 8), channels, s.ranges, offset, *s.arguments[1:])
        done = subprocess.run([str(made), *map(str, arguments)], input=given, capture_output=True)
        assert done.returncode == 0, done.stdout[:400]
        found = torch.frombuffer(bytearray(done.stdout), dtype=torch.int16 if dtype.itemsize == 2 else dtype)
        assert torch.equal(found.view(dtype), grad.sum((0, 2, 3)).to(dtype)), (p, s)


def test_small_tensors_and_channels_off_16_bytes_are_pytorchs() -> None:
    assert bias.serves(layer(8, 64, (128, 128), torch.float32)) and bias.serves(layer(1, 64, (64, 64), torch.float32))
    assert not bias.serves(layer(1, 64, (32, 32), torch.float32))
    assert not bias.serves(layer(8, 64, (64, 64), torch.float32, "channels_last"))
    assert not bias.serves(layer(64, 65, (128, 128), torch.float32, "channels_last"))
    assert bias.serves(layer(64, 65, (128, 128), torch.float32))


@needs_nvrtc
@pytest.mark.parametrize("gpu", [A100, RTX3090, RTX4090, H200, B200, RTX5090], ids=lambda gpu: gpu.name)
def test_kernels_compile_without_spills(gpu: object) -> None:
    for dtype in DTYPES:
        for layout in LAYOUTS:
            source = bias.instance(layer(1, 8, (8, 8), dtype, layout))
            found = elf.inspect(jit.cubin(source, gpu.arch, "bias"))  # type: ignore[attr-defined]
            more = ("finish_float",) * (dtype.itemsize == 2)
            sums = ("sum_last",) if layout == "channels_last" else ("sum", "sum_at_once")
            assert set(found) == {*sums, "finish", *more}
            assert all(local == 0 for _, local, _ in found.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_on_a_gpu(dtype: torch.dtype, layout: Layout) -> None:
    """Against float64, bit-equal the second time; memory around the tensor is NaN, and so is the result's before."""
    r = random.Random(f"{dtype} {layout}")
    for _ in range(12):
        size = r.choice([(7, 9), (64, 67), (5, 131), (130, 140), (4, 1000)])
        channels = r.choice((8, 24, 40, 2048 + 64)) if layout == "channels_last" else r.choice((1, 3, 8, 40))
        p = layer(r.randint(1, 9), channels, size, dtype, layout)
        offset = r.randrange(16)
        shape = (p.batch, channels, *size)
        memory = torch.full((int(np.prod(shape)) + 64,), torch.nan, dtype=dtype, device="cuda")
        like = torch.empty(shape, device="meta").contiguous(memory_format=cpu.memory_format(layout, 2))
        grad = memory.as_strided(shape, like.stride(), offset)
        grad.copy_(torch.randn(shape, device="cuda"))
        runner = bias.BiasRunner(p, 0)
        found, again = runner(grad, dtype), runner(grad, dtype)
        for _ in range(2):  # by one launch
            assert torch.equal(runner(grad, dtype, lasting=True), found)
        assert torch.equal(found, again)
        assert layout != "nchw" or not any(all_[:channels].any() for all_ in runner._counters.of_streams.values())
        assert found.dtype is dtype and found.shape == (channels,)
        exact, most = grad.double().sum((0, 2, 3)), grad.double().abs().sum((0, 2, 3))
        rounding = {torch.float32: 0.0, torch.float64: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        exactness = 1e-14 if dtype is torch.float64 else 2e-6
        assert ((found.double() - exact).abs() <= rounding * exact.abs() + exactness * most).all(), str(p)
        if dtype.itemsize == 2:  # the gradient of autocast's float32 bias
            single = runner(grad, torch.float32)
            assert single.dtype is torch.float32 and torch.equal(single.to(dtype), found)
            assert torch.equal(runner(grad, torch.float32, lasting=True), single)
            assert ((single.double() - exact).abs() <= exactness * most).all(), str(p)
