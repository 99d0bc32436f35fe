"""The gather-GEMM's epilogue, compiled for the host from the very source: what it stores, and where.

The plan interpreter does not walk stores, and a GPU is not always at hand; alignment, borders and the order in which
lanes fill the buffer are tried here on every kind of row.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from upconv.cuda import gather, jit
from upconv.cuda.gpu import H200
from upconv.cuda.tiling import Tiling
from upconv.problem import Problem

HOST = Path(__file__).resolve().parent / "host"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

KINDS = ((torch.float32, "tf32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16"))


def cut(source: str, first: str, end: str) -> str:
    """Of a source the part from one text up to another."""
    begin = source.index(first)
    return source[begin : source.index(end, begin)]


def built(tiling: Tiling, folder: Path) -> Path:
    """A program that runs the epilogue of a tiling."""
    source = (Path(jit.__file__).parent / "kernels" / "gather.cu").read_text()
    macros = "".join(f"#define {name} {value}\n" for name, value in tiling.macros().items())
    types = cut(
        source, "#if PRECISION == 0 || PRECISION == 1", "#if ELEMENT == 2\n__device__ __forceinline__ u32 pack_pair"
    )
    tables = cut(source, "__constant__ const short SUB_D[]", "__constant__ const int ROW_D[]")
    structs = cut(source, "struct Sizes {", "struct alignas(64) TensorMap")
    tile = cut(source, "struct Tile {", "__device__ __forceinline__ Tile tile_at")
    constants = cut(source, "#define WORDS 4", "__constant__ const short TAP_ROW[]")
    (folder / "kernel.h").write_text(macros + constants + tables + types + structs + tile)
    places = cut(source, "struct Place {", "#define GROUP_ROWS")
    epilogue = cut(source, "#define RUN (RUN_GROUPS * 8)", "__device__ __forceinline__ void consume")
    (folder / "epilogue.h").write_text(places + re.sub(r'asm volatile\(""[^;]*;', "", epilogue))
    program = folder / "epilogue"
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-w",
        f"-I{folder}",
        f"-I{HOST}",
        str(HOST / "epilogue.cpp"),
        "-o",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return program


def tiles(program: Path, seed: int, count: int) -> int:
    """Outputs checked in so many random tiles."""
    done = subprocess.run([str(program), str(seed), str(count)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return int(done.stdout)


def tiling_of(seed: int) -> Tiling:
    """A random tiling of a random layer, whose sizes mean nothing here."""
    r = random.Random(seed)
    dtype, precision = KINDS[seed % 3]
    while True:
        rank, groups, stride = r.choice((1, 2, 3)), r.choice((1, 1, 2)), r.choice((1, 1, 2, 3, 4, 5))
        kernel = tuple(r.randint(1, 5) for _ in range(rank))
        channels = groups * r.choice((4, 8, 40)), groups * r.choice((3, 8, 16, 40, 64))
        try:
            p = Problem.make(2, *channels, (9,) * rank, kernel, stride, 1, 0, r.choice((1, 2)), groups, dtype=dtype)
        except ValueError:
            continue
        layout = "channels_last" if rank > 1 and r.random() < 0.2 else "nchw"
        p = p.with_(precision=precision, layout=layout, pass_=r.choice(("fwd", "fwd", "grad-input")), bias=False)
        every = list(gather.candidates(gather._any_size(p), H200))
        if every:
            return r.choice(every)


@pytest.mark.parametrize("seed", range(24))
def test_every_output_arrives_and_nothing_else_is_written(seed: int, tmp_path: Path) -> None:
    assert tiles(built(tiling_of(seed), tmp_path), seed, 80) > 500


@pytest.mark.parametrize("dtype", [0, 1])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_long_rows_at_any_alignment(dtype: int, stride: int, tmp_path: Path) -> None:
    """Rows of 64 positions, of which the buffer holds a whole number of sectors."""
    kind, precision = KINDS[dtype]
    p = Problem.make(1, 16, 16, (9, 9), 4, stride, 1, dtype=kind).with_(precision=precision, bias=False)
    every = [
        t
        for t in gather.candidates(gather._any_size(p), H200)
        if t.sub == (1, 64) and t.width_subs == stride and t.runs > 2
    ]
    assert every
    assert tiles(built(every[0], tmp_path), 1, 60) > 1000
