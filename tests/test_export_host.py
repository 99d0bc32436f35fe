"""Exported files whole on a CPU: their Python, their host code in C++ and their kernels, against float64."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import by_turns, compiled_for_host, needs_gxx
from upconv import reference
from upconv.cuda.compile import jit
from upconv.cuda.gemm import joined
from upconv.cuda.gpu import H200

pytest.importorskip("tree_sitter")
from upconv.bench.suites import parse_layer
from upconv.export import fold, kernelbench_problem, passes, signatures, source, syntax
from upconv.export.check import load
from upconv.problem import Precision, Problem

pytestmark = needs_gxx
MODELS = Path(__file__).parent.parent / "models"
FILES = list(signatures.KERNELBENCH)
_FUNCTION = re.compile(r"^void (\w+)\(const at::Tensor& ", re.MULTILINE)
_LAUNCH = re.compile(r"(kernels::\w+(?:<[^<>]*(?:<[^<>]*>)?[^<>]*>)?)<<<(.*?)>>>\(")
_CALL = """
extern "C" __attribute__((visibility("default")))
const char* run_{0}(void** given, int seed) {{ return host::run({0}, given, seed); }}
"""


class Host(ctypes.Structure):
    """A tensor of ``host/torch_host.h``."""

    _fields_ = (("memory", ctypes.c_void_p), ("sizes", ctypes.c_longlong * 12))


def of_hardware() -> set[str]:
    """Names in the headers of PTX, for which ``tests/host`` has others."""
    found: set[str] = set()
    for name in ("ptx", "wgmma"):
        tree = syntax.Tree((jit.KERNELS / f"{name}.cuh").read_text(), [[]])
        found.update(re.findall(r"\b(\w+)\(", tree.source.decode()))
        found.update(re.findall(r"struct (?:alignas\(\d+\) )?(\w+)", tree.source.decode()))
        found.update(re.findall(r"^#define (\w+)", tree.source.decode(), re.MULTILINE))
    return found


def for_host(code: str) -> str:
    """A file's fast kernels and host code for a C++ compiler."""
    begin, end = code.index("namespace kernels {") + len("namespace kernels {"), code.index("}  // namespace kernels")
    tree = syntax.Tree(code[begin:end], [[]])
    names = of_hardware()
    cut = [
        n for n, of, owner in fold._items(tree.root) if owner is None and of and {tree.text(one) for one in of} & names
    ]
    kernels = syntax.without(tree, cut)
    kernels = re.sub(
        r"^(?:typedef .* u(?:16|32|64);|template <int N> struct WgmmaOf;|WGMMA_WIDTH\(.*|#.*)$",
        "",
        kernels,
        flags=re.MULTILINE,
    )
    kernels = re.sub(
        r"extern __shared__[^;]* memory\[\];", "unsigned char* const memory = machine::dynamic_memory();", kernels
    )
    rest = _LAUNCH.sub(r"host::launched(\1, \2)(", code[end:])
    functions = "".join(_CALL.format(name) for name in _FUNCTION.findall(code))
    return f'#include "torch_host.h"\nnamespace kernels {{\nusing ::TensorMap;\n{kernels}{rest}{functions}'


class Extension:
    """A file's fast kernels on CPU tensors."""

    def __init__(self, code: str, folder: Path, seed: int) -> None:
        main = folder / "file.cpp"
        main.write_text(for_host(code))
        self._library, self.seed = ctypes.CDLL(str(compiled_for_host(main, folder / "file.so"))), seed

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = self._library[f"run_{name}"]
        function.restype = ctypes.c_char_p

        def call(*given: Any) -> None:
            kept = [_given(one) for one in given]
            pointers = (ctypes.c_void_p * len(kept))(*(None if one is None else ctypes.addressof(one) for one in kept))
            wrong = function(pointers, self.seed)
            assert wrong is None, f"{name}: {wrong.decode()}"

        return call


def _given(one: Tensor | int | tuple[int, ...] | None) -> Any:
    if isinstance(one, Tensor):
        shape, strides = ((*of, *(0,) * (5 - one.dim())) for of in (one.shape, one.stride()))
        return Host(one.data_ptr(), (ctypes.c_longlong * 12)(one.dim(), one.element_size(), *shape, *strides))
    if isinstance(one, int):
        return ctypes.c_int(one)
    return None if one is None else (ctypes.c_int * len(one))(*one)


def rounded(t: Tensor, p: Problem) -> Tensor:
    """The nearest TF32, ties to even, of a problem that multiplies these; in float64."""
    if p.precision != "tf32":
        return t.double()
    bits = t.contiguous().view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32).double()


def on_host(names: dict[str, Any], folder: Path, seed: int) -> None:
    """Has a file's functions call its fast kernels on CPU tensors."""
    extension = Extension(names["FAST"], folder, seed)
    names.update(build=lambda fast: extension, is_fast=lambda *given: True, check=lambda *given: None)
    names["processors"] = lambda device: 4


@pytest.mark.slow
@pytest.mark.parametrize("number", by_turns(FILES, 6))
def test_all_passes_of_a_file(number: int, tmp_path: Path) -> None:
    """At a size of more tiles than blocks, at one whose rows must be copied, and at one whose rows are cut."""
    p = kernelbench_problem(number)
    text = (MODELS / f"model_{number}.py").read_text(encoding="utf-8")
    names = load(text)
    on_host(names, tmp_path, number)
    model: nn.Module = names["ModelNew"](*signatures.init_arguments(number, p), bias=True)
    (layer,) = model.children()
    longest = re.findall(r"if x\.shape\[-1\] > (\d+):", text)  # rows that are not cut
    wide, odd = {1: (384, 277), 2: (68, 21), 3: (36, 13)}[p.rank]
    for batch, rows, width in ((3, 5, wide), (2, 3, odd), *((2, 3, int(n) + 6) for n in longest)):
        q = p.with_(batch=batch, size=(*(rows,) * (p.rank - 1), width), bias=True)
        x, grad = torch.randn(q.input_shape, requires_grad=True), torch.randn(q.output_shape)
        y = model(x)
        found = (y, *torch.autograd.grad(y, (x, layer.weight), grad))
        operands = [rounded(t.detach(), q) for t in (x, layer.weight, grad)]
        wanted = (
            reference.forward(q, operands[0], operands[1], layer.bias.detach().double()),
            *reference.gradients(q, operands[2], operands[0], operands[1])[:2],
        )
        for a, b, what in zip(found, wanted, ("output", "input", "weight")):
            assert reference.relative_error(a.detach(), b) < 2e-6, (what, width)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer,shape,precision",
    (
        ("8,64,(3,5),padding=(1,0)", "16x8x64x60", "tf32"),
        ("8,64,(3,2),padding=(1,0)", "16x8x64x64", "tf32"),  # results' rows are longer by an odd number: not joined
        ("8,64,(3,3),padding=(1,0)", "16x8x64x64", "bf16"),
        ("8,64,(3,3,5),dilation=(2,1,1)", "4x8x20x24x32", "bf16"),
        ("8,64,(1,5)", "16x8x64x40", "bf16"),  # rings have room for 56 columns, and none for 80
    ),
)
def test_joined_rows_of_other_lengths(layer: str, shape: str, precision: Precision, tmp_path: Path) -> None:
    """By the kernel that was planned for some: much shorter ones, the longest, and ones that are cut."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    p = parse_layer(layer, shape).with_(precision=precision, dtype=dtype)
    (forward,) = passes.kernels(p, H200, forward_only=True)
    assert (forward.choice.family == "joined") == (joined.gap(p) % 2 == 0)
    names = load(source(p, forward_only=True))
    on_host(names, tmp_path, 1)
    model = names["ModelNew"]().to(dtype)
    (own,) = model.children()
    longest = forward.columns or p.size[-1]
    for width in (1, 3, 5, 10, 21, 40, longest - 1, longest, longest + 3):
        q = p.with_(batch=1, size=(*(3,) * (p.rank - 2), 40, width))
        x = torch.randn(q.input_shape, dtype=dtype)
        wanted = reference.forward(q, rounded(x, q), rounded(own.weight.detach(), q), own.bias.detach().double())
        error = reference.relative_error(model(x).detach(), wanted)
        assert error < (2e-6 if precision == "tf32" else 4e-3), width
