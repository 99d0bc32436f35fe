"""The staged gradients: their kernels on the host against the float64 reference, their choices, what is compiled."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategies import problems
from upconv import reference
from upconv.cuda import jit, staged
from upconv.cuda.gpu import A100, B200, H200, RTX3090, RTX4090, RTX5090
from upconv.cuda.staged import Tile, Unfit
from upconv.problem import Problem

HOST = Path(__file__).resolve().parent / "host"
KERNELS = Path(jit.__file__).parent / "kernels"
GRADIENTS = ("grad-input", "grad-weight")
GPUS = (H200, A100, RTX3090, RTX4090, B200, RTX5090)
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_nvrtc = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))


# --- the kernels, compiled for the host ------------------------------------------------------------------------------


def program(tile: Tile, folder: Path) -> Path:
    """The kernels of a tile as a program of their own."""
    macros = {**tile.macros(), "SHARED_BYTES": tile.shared_bytes}
    body = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    body += (KERNELS / "staged.cu").read_text().replace('#include "direct.cuh"', "").replace("extern __shared__", "//")
    shared = (KERNELS / "direct.cuh").read_text().replace("#pragma once", "")
    asm = '    float f;\n    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));\n    return f;\n'
    assert asm in shared
    shared = shared.replace(asm, "    _Float16 h;\n    memcpy(&h, &v, 2);\n    return (float)h;\n")
    for name, value in (("bf16", "bfloat_bits(v)"), ("f16", "half_bits(v)")):
        asm = f'    T r;\n    asm("cvt.rn.{name}.f32 %0, %1;" : "=h"(r) : "f"(v));\n    return r;\n'
        assert asm in shared
        shared = shared.replace(asm, f"    return {value};\n")
    heads = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    main = (HOST / "staged.cpp").read_text()
    (folder / "kernel.h").write_text(shared + body[len(heads) :])
    (folder / "staged.cpp").write_text(heads + main)
    paths = [f"-I{folder}", f"-I{HOST}", str(folder / "staged.cpp"), "-o", str(folder / "staged")]
    done = subprocess.run(["g++", "-std=c++17", "-O1", "-w", *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return folder / "staged"


def stored(t: torch.Tensor, p: Problem) -> bytes:
    """Elements in the problem's layout."""
    t = t.movedim(1, -1) if p.layout == "channels_last" else t
    kind = t.to(p.dtype).contiguous()
    return bytes((kind.view(torch.int16) if kind.element_size() == 2 else kind).numpy().tobytes())


def check_on_host(p: Problem, tile: Tile, splits: int, whole: bool, seed: int, folder: Path) -> None:
    numbers = torch.Generator().manual_seed(seed)
    x, g, w = (
        torch.randint(-4, 5, shape, generator=numbers).double() / 2
        for shape in (p.input_shape, p.output_shape, p.weight_shape)
    )  # exact in every type, and so are their sums
    tile.checked(H200.shared_bytes)
    tiles_h, tiles_w, tiles = tile.blocks_of(p)
    lead = (1,) * (3 - p.rank)
    blocks = staged._weight_blocks(p, tile) * splits if tile.weight else tiles * tile.channel_blocks
    arguments = (p.batch, *lead, *p.size, *lead, *p.out_size, tiles_h, tiles_w, int(whole), splits, blocks)
    flat = w.contiguous().to(p.dtype)
    weights = bytes((flat.view(torch.int16) if flat.element_size() == 2 else flat).numpy().tobytes())
    given_ = stored(x, p) + stored(g, p) if tile.weight else stored(g, p) + weights
    done = subprocess.run([str(program(tile, folder)), *map(str, arguments)], input=given_, capture_output=True)
    assert done.returncode == 0, done.stdout[:400]
    kind = torch.int16 if p.dtype.itemsize == 2 else p.dtype
    out = torch.frombuffer(bytearray(done.stdout), dtype=kind).view(p.dtype).double()
    truth = reference.gradients(p, g, x, w)
    if tile.weight:
        expected = truth[1]
        out = out.reshape(p.weight_shape)
    else:
        expected = truth[0]
        shape = (p.batch, *p.size, p.in_channels) if p.layout == "channels_last" else p.input_shape
        out = out.reshape(shape)
        out = out.movedim(-1, 1) if p.layout == "channels_last" else out
    torch.testing.assert_close(out, expected.to(p.dtype).double(), rtol=0, atol=0)


def draw(p: Problem, rng: random.Random) -> Tile:
    """One of the tiles that are tried for a problem, with a fitting shared memory."""
    fitting = []
    for tile in staged.tiles(p):
        try:
            fitting.append(tile.checked(H200.shared_bytes))
        except Unfit:
            continue
    return rng.choice(fitting)


@needs_gxx
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(problems(), st.sampled_from(GRADIENTS), st.randoms(use_true_random=False))
def test_tiles_compute_the_gradients(tmp_path: Path, p: Problem, pass_: str, rng: random.Random) -> None:
    """The very source, every thread of it: any tile, units whole or not, as many ranges of tiles as there are tiles."""
    p = p.with_(pass_=pass_)
    tile = draw(p, rng)
    tiles = tile.blocks_of(p)[2]
    splits = min(tiles, rng.choice((1, 2, 3, 7, tiles)))
    splits = -(-tiles // -(-tiles // splits))
    whole = staged._whole_units(p, tile) and rng.random() < 0.7
    check_on_host(p, tile, splits, whole, rng.randrange(1000), tmp_path)
