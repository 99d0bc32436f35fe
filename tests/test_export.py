"""Exported files: their text, constructors, weights, launches and errors; on a GPU what they compute."""

from __future__ import annotations

import ctypes
import json
import math
import random
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from typer.testing import CliRunner

import upconv
from conftest import by_turns, compiled_for_host, needs_nvrtc
from upconv import reference
from upconv.bench.suites import SUITES, parse_layer
from upconv.bench.timing import precision_flags
from upconv.cli import app
from upconv.cuda.direct import costs, direct
from upconv.cuda.gemm import gather
from upconv.cuda.gpu import A100, H200, RTX4090, Gpu
from upconv.cuda.launches import Map
from upconv.cuda.wgrad import wgrad
from upconv.cuda.wgrad.wgrad_costs import Model
from upconv.export import (
    c,
    cpp,
    gpu_of,
    kernelbench,
    kernelbench_problem,
    passes,
    plain,
    problem_of,
    program,
    signatures,
    sizes,
    source,
    template,
)
from upconv.export.check import load
from upconv.export.passes import Kernel
from upconv.planner import Device, plan
from upconv.problem import Precision, Problem

CALL = """
extern "C" __attribute__((visibility("default")))
const char* run_{0}(int grid, int threads, int shared, const char* arguments, int together, int seed) {{
  return machine::launch([] {{ machine::call({1}); }}, grid, threads, shared, arguments, together, seed);
}}
"""
MODELS = Path(__file__).parent.parent / "models"
NUMBERS = signatures.KERNELBENCH
# Layers whose passes are served by every kernel family and by both of a family's alignments.
LAYERS = {
    "strided": ("64,64,4,2,1", "4x64x32x32", "tf32"),
    "odd": ("24,40,(3,5),stride=(2,3),padding=(1,2),output_padding=1", "2x24x21x33", "tf32"),
    "depthwise": ("64,64,4,2,1,groups=64", "4x64x33x40", "tf32"),
    "few": ("16,3,(4,4),stride=2,padding=1", "4x16x64x64", "ieee"),
    "1-D": ("32,64,5,dilation=3", "8x32x4096", "tf32"),
    "3-D": ("32,32,(3,5,7),stride=2,padding=(1,2,3),output_padding=1,groups=4", "2x32x6x12x24", "ieee"),
    "walk": ("256,256,3,1,1,groups=256", "32x256x64x64", "tf32"),
    "image": ("56,1,9,stride=3,padding=4,output_padding=2", "2x56x32x32", "tf32"),
    "phases": ("64,3,(4,5),2,(1,2),output_padding=(0,1)", "16x64x30x40", "tf32"),
    "joined": ("40,64,(3,5),padding=(1,0)", "16x40x64x60", "tf32"),
    "joined odd": ("40,64,(3,4),padding=(1,0)", "16x40x64x60", "tf32"),
    "joined 3-D": ("16,64,(3,3,5),dilation=(2,1,1)", "4x16x20x24x32", "tf32"),
    "sweep": ("32,16,(3,5,7)", "4x32x16x32x64", "tf32"),
    "rows": ("32,32,3,2,1", "2x32x16x32x64", "tf32"),
    "far": ("2,2,(2,60),stride=1,dilation=(1,50),groups=2", "1x2x20x20", "ieee"),
}


def layer(name: str, **changes: Any) -> Problem:
    text, shape, precision = LAYERS[name]
    return parse_layer(text, shape).with_(**{"precision": precision, **changes})


@cache
def exported(number: int) -> str:
    """What the export has written, and writes still as the first test says: some 4 s for each process and file."""
    return (MODELS / f"model_{number}.py").read_text(encoding="utf-8")


@cache
def names(number: int) -> dict[str, Any]:
    return load(exported(number))


# --- text ------------------------------------------------------------------------------------------------------------


def test_the_suite_and_the_constructors_name_the_same_problems() -> None:
    assert list(NUMBERS) == [int(case.name[2:]) for case in SUITES["kernelbench"]]
    assert {f.name for f in MODELS.glob("*.py")} == {f"model_{n}.py" for n in NUMBERS}


@needs_nvrtc
@pytest.mark.parametrize("number", by_turns(NUMBERS, 5))  # 15 s each
def test_models_are_what_the_export_writes(number: int) -> None:
    if exported(number) != kernelbench(number):  # without a diff, which would take pytest a minute
        pytest.fail(f"models/model_{number}.py is stale: python -m upconv.export models")


# --- constructors and weights ----------------------------------------------------------------------------------------


def test_arguments_that_pytorch_refuses_are_refused() -> None:
    model: Any = names(57)["ModelNew"]
    for arguments, words in (
        ((64, 65, 3, 1, 0, 0, 2), "multiple of groups"), ((64, 64, 3, 0), "positive"), ((64, 64, 3, 1, -1), "negative"),
        ((64, 64, 3, 2, 0, 2), "output_padding must be smaller"), ((64, 64, (3, 3, 3)), "integers or 2 of them"),
        ((64, 64, 3, (2, 2, 2)), "integers or 2 of them"), ((64, 64, (3,)), "integers or 2 of them"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            model(*arguments)


def test_arguments_that_pytorch_takes_are_taken(faked: Callable[[Problem], dict[str, Any]]) -> None:
    """One number in brackets is for all axes; device and dtype are those of torch.nn."""
    model = faked(parse_layer("4,6,3", "2x4x5x6"))["ModelNew"]
    for arguments in (
        {"stride": (2,), "padding": [1], "output_padding": (1,), "dilation": (2,)},
        {"kernel_size": [2, 3], "stride": torch.Size((2, 1)), "padding_mode": "zeros", "dtype": torch.float64},
        {"bias": False, "device": "cpu", "groups": 2},
    ):
        arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **arguments}
        torch.manual_seed(5)
        ours = model(**arguments)
        torch.manual_seed(5)
        theirs = nn.ConvTranspose2d(**arguments)
        ours.conv_transpose2d.load_state_dict(theirs.state_dict())
        x = torch.randn(2, 4, 5, 6, dtype=theirs.weight.dtype)
        torch.testing.assert_close(ours(x), theirs(x))


def test_inputs_are_checked_in_a_sentence() -> None:
    model = names(57)["ModelNew"](64, 64, 3)
    cases = {
        (8, 64): "(batch, channels, height, width), batched or not; got shape (8, 64)",
        (1, 32, 8, 8): "64 channels; got shape (1, 32, 8, 8)",
        (1, 64, 0, 8): "leave an output; got shape (1, 64, 0, 8)",
        (1, 64, 8, 8): "one CUDA device; got cpu and cpu",
        (64, 8, 8): "one CUDA device",
    }
    for shape, words in cases.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            model(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"got torch.float16 and torch.float32"):
        model(torch.zeros(1, 64, 8, 8, dtype=torch.float16))


def test_what_is_missing_to_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    build = load(exported(72))["build"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    needed = (
        (torch.version, "cuda", None, "13.0", "PyTorch with CUDA"),
        (cpp_extension, "CUDA_HOME", None, "/nowhere", "nvcc"),
        (cpp_extension, "is_ninja_available", lambda: False, lambda: True, "ninja"),
    )
    for owner, name, lacking, *_ in needed:
        monkeypatch.setattr(owner, name, lacking)
    for owner, name, _, there, words in needed:
        with pytest.raises(RuntimeError, match=words):
            build(True)
        monkeypatch.setattr(owner, name, there)
    with pytest.raises(RuntimeError, match=r"C\+\+ compiler"):
        build(True)
    given: dict[str, Any] = {}
    monkeypatch.setenv("CXX", f"{sys.executable} -O2")  # as `ccache g++`, which PyTorch takes too
    monkeypatch.setattr(cpp_extension, "load_inline", lambda **arguments: given.update(arguments) or given)
    assert build(True) is given and build(True) is given
    assert "-gencode=arch=compute_90a,code=sm_90a" in given["extra_cuda_cflags"]
    assert build(False)["extra_cuda_cflags"] == ["-O3"]  # for whatever GPU there is


def test_flags_that_ask_for_ieee_are_not_answered_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(exported(57))
    module["processors"] = lambda device: 132
    x, shape, given = torch.zeros(1, 64, 8, 8), module["WEIGHT"], module["LAYER"]
    for flags, fast in (("tf32", True), ("ieee", False)):
        with precision_flags(flags):
            assert module["is_fast"](x, shape, given) is fast
    assert not module["is_fast"](x.double(), shape, given)
    assert not module["is_fast"](x, (64, 32, 3, 3), given)
    assert not module["is_fast"](x, shape, given._replace(stride=(1, 2)))
    assert not module["is_fast"](torch.empty(1, 64, 2**15, 2**15, device="meta"), shape, given)
    assert not module["is_fast"](torch.empty(2**30, 64, 1, 1, device="meta"), shape, given)
    module["processors"] = lambda device: 0  # of another device
    assert not module["is_fast"](x, shape, given)
    assert "rounds_to_tf32" not in names(72)  # IEEE kernels are right under every flag


# --- launches: the file's arithmetic against the library's -----------------------------------------------------------


def other_sizes(p: Problem, count: int) -> list[Problem]:
    chance = random.Random(str(p))
    found = [p]
    while len(found) < count:
        size = tuple(max(1, chance.choice((1, 2, n, n + 1, n - 1, 2 * n, 3 * n + 1))) for n in p.size)
        try:
            found.append(p.with_(batch=chance.choice((1, 2, 5, p.batch)), size=size))
        except ValueError:  # no output
            continue
    return found


def of_sizes() -> dict[str, Any]:
    """What a file's expressions of sizes may call."""
    found: dict[str, Any] = {"ceil": lambda a, b: -(-a // b), "rounded": lambda a, b: round(a / b), "math": math}
    found["isqrt"] = math.isqrt
    exec(template.SEGMENTS, found)
    return found


def check_launches(found: Iterable[Kernel], p: Problem, gpu: Gpu, count: int = 25) -> None:
    """Compares what a file computes for its launches with the library's records, at several sizes."""
    for k in found:
        names = of_sizes()
        exec(sizes.python([k], gpu), names)
        for q in other_sizes(p, count):
            inner, outer = ((1,) * (3 - q.rank) + size for size in (q.size, q.out_size))
            axes = (outer, inner) if k.pass_ == "grad-input" else (inner, outer)
            blocks, *slices, integers = names[f"{k.name}_launch"](q.batch, *axes, gpu.multiprocessors)
            other = resized(k, q, slices[0] if slices else 0, gpu)
            record = cpp.main_launch(other)
            assert (blocks, tuple(integers)) == (record.grid, cpp.sizes(record)), (str(q), k.name)
            if slices:
                assert q != p or is_as_planned(other.choice, k.choice, gpu), (str(q), k.name)
                assert slices[0] == cpp.sizes(cpp.launches(replace(other, alone=True))[-1])[0]


def is_as_planned(found: passes.Choice, planned: passes.Choice, gpu: Gpu) -> bool:
    """Whether a file has the plan's splits, or fewer that take less time by the model: a plan compares whole waves."""
    if not isinstance(found, wgrad.Choice) or not isinstance(planned, wgrad.Choice):
        return type(found) is type(planned)
    seconds = [Model(c.problem, gpu, general=True).cost(c.tiling, c.splits).seconds for c in (found, planned)]
    return found.splits == planned.splits or (found.splits < planned.splits and seconds[0] < seconds[1])


def resized(k: Kernel, q: Problem, slices: int, gpu: Gpu) -> Kernel:
    """A kernel for another size, whose sums are of so many slices, if of any."""
    choice: Any = replace(k.choice, problem=q.with_(pass_=k.pass_, bias=k.choice.problem.bias))
    if slices and isinstance(choice, wgrad.Choice):
        choice = replace(choice, splits=slices // choice.tiling.k_slices)
    elif slices and isinstance(choice, direct.Choice):
        choice = replace(choice, ranges=costs.cost(choice.problem, choice.tile, gpu)[1])
    return replace(k, choice=choice)


@pytest.mark.parametrize("number", NUMBERS)
def test_launches_of_models_are_the_librarys(number: int) -> None:
    p = kernelbench_problem(number)
    check_launches(passes.kernels(p, H200), p, H200, 8)


def test_files_together_use_every_family() -> None:
    kinds = {passes._kind(k.choice) for name in LAYERS for k in passes.kernels(layer(name), H200)}
    assert kinds == {"gather", "joined", "sweep", "phases", "direct", "wgrad"}


def test_a_channels_last_file_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "fast", lambda *given: "")  # whose text does not matter here
    text = source(layer("strided", layout="channels_last"), "90a")
    assert "FORMAT, RANK = " in text and "torch.channels_last" in text


ON_CORES = {
    f"{name} {layout} {precision}": layer(name, layout=layout, dtype=dtype, precision=precision)
    for name in ("depthwise", "image")
    for layout in ("nchw", "channels_last")
    for dtype, precision in (
        (torch.float32, "ieee"), (torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float64, "fp64")
    )
}  # fmt: skip


@pytest.mark.parametrize("name", ON_CORES)
@pytest.mark.parametrize("gpu", (H200, A100, RTX4090), ids=lambda gpu: gpu.arch)
def test_kernels_on_cuda_cores_are_launched_as_the_librarys(name: str, gpu: Gpu) -> None:
    """All passes, whichever family the planner prefers."""
    p = ON_CORES[name]
    for pass_ in passes.NAMES:
        choice = direct.choose(p.with_(pass_=pass_, bias=False), gpu)
        assert not isinstance(choice, str), choice
        check_launches([Kernel(pass_, choice)], p, gpu)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", ("tf32", "bf16", "channels_last tf32", "channels_last bf16"))
def test_launches_and_tensor_maps_are_the_librarys(name: str, kind: str) -> None:
    p = layer(name)
    dtype = torch.float32 if "tf32" in kind else torch.bfloat16
    precision = "bf16" if dtype is torch.bfloat16 else p.precision
    if p.rank == 1 and "last" in kind:
        pytest.skip("1-D layers have one layout")
    p = p.with_(dtype=dtype, precision=precision, layout="channels_last" if "last" in kind else "nchw")
    found = passes.kernels(p, H200)
    check_launches(found, p, H200, 8)
    for k in found:
        text = cpp.definition(k)  # it asserts that maps are of whole tensors, which the file's C++ has from the tensor
        launch = cpp.main_launch(k)
        numbers = cpp.sizes(launch)
        for i, number in enumerate(numbers):
            text = text.replace(f"cuuint32_t(sizes[{i}])", str(number))
        maps = [one for one in launch.arguments if isinstance(one, Map)]
        assert text.count("tensor_map(") == len(maps)
        for one in maps:
            box, steps = (", ".join(map(str, values)) for values in (one.box, one.steps))
            assert f"5>{{{box}}}" in text and f"5>{{{steps}}}" in text


@pytest.mark.parametrize(
    "text,shape",
    (
        ("128,64,4,padding=2,dilation=2", "1x128x4096"),
        ("64,64,(3,5),padding=(1,2)", "1x64x20x64"),
        ("64,64,(3,1,5),padding=(1,0,2)", "3x64x16x1x64"),
    ),
)
def test_maps_of_one_image_or_row_are_of_whole_tensors(text: str, shape: str) -> None:
    """Of a dimension of one element the library's stride is another, and means nothing."""
    p = parse_layer(text, shape).with_(precision="tf32")
    found = [cpp.definition(k) for k in passes.kernels(p, H200)]
    assert "tensor_map(" in found[2]


# --- autograd, with PyTorch's operators in the kernels' place --------------------------------------------------------


SMALL = parse_layer("4,6,3", "2x4x5x6").with_(dtype=torch.float64, precision="fp64")


class FakeExtension:
    """Computes a file's passes by the reference, unknown to autograd, and notes what they read."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.read: list[tuple[str, tuple[Tensor, ...]]] = []

    def noted(self, name: str, x: Tensor, *read: Tensor) -> Problem:
        """The problem of an input's size."""
        assert not any(t.is_neg() for t in read), "kernels read memory as it is"
        self.read.append((name, read))
        return self.p.with_(batch=len(x), size=tuple(x.shape[2:]))

    @torch.no_grad()
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *_: Any) -> None:
        """Results may be in the first columns of wider memory."""
        found = reference.forward(self.noted("forward", x, x, weight), x, weight, bias)
        out[..., : found.shape[-1]] = found

    @torch.no_grad()
    def grad_input(self, grad: Tensor, weight: Tensor, out: Tensor, *_: Any) -> None:
        out.copy_(reference.gradients(self.noted("grad_input", out, grad, weight), grad, out, weight)[0])

    @torch.no_grad()
    def grad_weight(self, x: Tensor, grad: Tensor, out: Tensor, *_: Any) -> None:
        out.copy_(reference.gradients(self.noted("grad_weight", x, x, grad), grad, x, out)[1])

    @torch.no_grad()
    def pad_rows(self, t: Tensor, out: Tensor) -> None:
        assert t.is_contiguous() and t.numel() and not t.is_neg(), "the kernel reads memory as it is"
        out.copy_(t)


@cache
def plain_kernels() -> Any:
    """The plain kernels compiled for the host, a thread a fiber."""
    names = {f"plain_{name}_{kind}": f"plain_{name}<{kind}>" for name in passes.NAMES.values() for kind in KINDS}
    head = "#include <cstdint>\nnamespace at { template <class T> using opmath_type = T; }\n"
    source = head + plain.kernels(passes.NAMES) + "}\n" + "".join(CALL.format(*one) for one in names.items())
    with tempfile.TemporaryDirectory() as folder:
        main = Path(folder) / "plain.cpp"
        main.write_text(source)
        return ctypes.CDLL(str(compiled_for_host(main, Path(folder) / "plain.so")))


KINDS = {"float": torch.float32, "double": torch.float64}


class PlainExtension:
    """The plain kernels, on CPU tensors."""

    @staticmethod
    def run(name: str, blocks: int, tensors: Sequence[Tensor | None], layer: Sequence[int]) -> None:
        assert all(t is None or (t.is_contiguous() and not t.is_neg()) for t in tensors), "memory is read as it is"
        kind = {dtype: kind for kind, dtype in KINDS.items()}[tensors[0].dtype]  # type: ignore[union-attr]
        function = plain_kernels()[f"run_plain_{name}_{kind}"]
        function.restype = ctypes.c_char_p
        pointers = (0 if t is None else t.data_ptr() for t in tensors)
        assert function(blocks, 256, 0, struct.pack(f"<{len(tensors)}Q22i", *pointers, *layer), 1, 0) is None

    @classmethod
    def forward(cls, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, layer: Sequence[int]) -> None:
        cls.run("forward", -(-out.numel() // 256), (x, weight, bias, out), layer)

    @classmethod
    def grad_input(cls, grad: Tensor, weight: Tensor, out: Tensor, layer: Sequence[int]) -> None:
        cls.run("grad_input", -(-out.numel() // 512), (grad, weight, out), layer)  # a thread has several

    @classmethod
    def grad_weight(cls, x: Tensor, grad: Tensor, out: Tensor, layer: Sequence[int]) -> None:
        cls.run("grad_weight", -(-out.numel() // 2), (x, grad, out), layer)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Problem], dict[str, Any]]:
    """Loads a file whose kernels are PyTorch's, to run on the CPU."""
    monkeypatch.setattr(program, "fast", lambda *given: "")

    def make(p: Problem) -> dict[str, Any]:
        found = load(source(p, "90a"))
        fake = FakeExtension(p)
        found.update(build=lambda fast: fake if fast else PlainExtension, processors=lambda device: 132)
        found.update(check=lambda *given: None, fake=fake)
        return found

    return make


def test_flags_are_asked_again_for_gradients(faked: Callable[[Problem], dict[str, Any]]) -> None:
    """A forward in TF32 has gradients in IEEE float32 where the flags then ask for these, as PyTorch's has."""
    module = faked(parse_layer("4,6,3", "2x4x5x6").with_(dtype=torch.float32, precision="tf32"))
    x, wanted = torch.randn(2, 4, 5, 6, requires_grad=True), []
    for flags in ("tf32", "ieee"):
        with precision_flags("tf32"):
            out = module["ModelNew"]()(x)
        with precision_flags(flags):
            out.sum().backward()
        wanted.append([name for name, _ in module["fake"].read])
        module["fake"].read.clear()
    assert wanted == [["forward", "grad_input", "grad_weight"], ["forward"]]


@pytest.mark.parametrize("text", ("4,6,3,2,1,output_padding=1,groups=2", "3,2,(2,3),bias=False"))
def test_first_and_second_gradients(text: str, faked: Callable[[Problem], dict[str, Any]]) -> None:
    p = parse_layer(text, f"2x{text[0]}x3x4").with_(dtype=torch.float64, precision="fp64")
    model = faked(p)["ModelNew"]().double()
    x = torch.randn(p.input_shape, dtype=torch.float64, requires_grad=True)
    parameters = dict(model.named_parameters())

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(parameters, values)), (x,))

    assert torch.autograd.gradcheck(call, (x, *parameters.values()))
    assert torch.autograd.gradgradcheck(call, (x, *parameters.values()))
    assert torch.equal(model(x[0]), model(x)[0])


def test_gradients_are_recorded_only_where_they_are_differentiated_again(
    faked: Callable[[Problem], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What autograd records costs more time than all that a file's Python does."""
    module = faked(SMALL)
    model, function = module["ModelNew"]().double(), module["ConvTranspose"]
    applied, apply = list[str](), function.apply
    monkeypatch.setattr(function, "apply", lambda *given: applied.append("one") or apply(*given))
    x = torch.randn(SMALL.input_shape, dtype=torch.float64, requires_grad=True)
    for again, count in ((False, 1), (True, 3)):
        applied.clear()
        torch.autograd.grad(model(x).sum(), (x, *model.parameters()), create_graph=again)
        assert len(applied) == count
    with torch.no_grad():
        model(x)
    assert len(applied) == 3


def test_gradients_that_nobody_asked_for_are_not_computed(faked: Callable[[Problem], dict[str, Any]]) -> None:
    module = faked(SMALL)
    model, read = module["ModelNew"]().double(), module["fake"].read
    model(torch.randn(SMALL.input_shape, dtype=torch.float64)).sum().backward()
    model.requires_grad_(False)
    model(torch.randn(SMALL.input_shape, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert [name for name, _ in read] == ["forward", "grad_weight", "forward", "grad_input"]
    assert not model(torch.zeros(SMALL.input_shape, dtype=torch.float64)).requires_grad


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))  # the fast kernels', and the plain ones'
def test_negated_views_are_resolved(dtype: torch.dtype, faked: Callable[[Problem], dict[str, Any]]) -> None:
    """Their memory has the other sign: of inputs, weights and gradients."""
    model = faked(SMALL)["ModelNew"]().to(dtype)
    theirs = nn.ConvTranspose2d(4, 6, 3).to(dtype)
    theirs.load_state_dict(model.conv_transpose2d.state_dict())
    x = torch.randn(SMALL.input_shape, dtype=dtype, requires_grad=True)
    found = []
    for layer_ in (model, theirs):
        names = dict(layer_.named_parameters())

        def negated(t: Tensor) -> Tensor:
            return torch._neg_view(t)

        values = {name: negated(t) for name, t in names.items()}
        y = torch.func.functional_call(layer_, values, (negated(x),))
        assert negated(x).is_neg()
        found.append((y, *torch.autograd.grad(y, (x, *names.values()), negated(torch.ones_like(y)))))
    torch.testing.assert_close(*found)


def test_torch_func_gives_gradients(faked: Callable[[Problem], dict[str, Any]]) -> None:
    model = faked(SMALL)["ModelNew"]().double()
    parameters = dict(model.named_parameters())
    x = torch.randn(SMALL.input_shape, dtype=torch.float64)

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).square().sum()  # type: ignore[no-any-return]

    found = torch.func.grad(loss)(parameters)
    wanted = torch.autograd.grad(loss(parameters), list(parameters.values()))
    torch.testing.assert_close(tuple(found.values()), wanted)


@pytest.mark.parametrize("width", (32, 33))
def test_torch_func_gives_gradients_of_rows_that_are_copied(
    width: int, faked: Callable[[Problem], dict[str, Any]]
) -> None:
    p = parse_layer("64,64,(3,4),stride=(1,2),padding=1", "8x64x64x64").with_(precision="tf32")
    model = faked(p)["ModelNew"]()
    x = torch.randn(2, 64, 12, width, requires_grad=True)
    found = torch.func.grad(lambda t: model(t).square().sum())(x.detach())
    torch.testing.assert_close(found, torch.autograd.grad(model(x).square().sum(), x)[0])


@pytest.mark.parametrize("width", (32, 33))
def test_derivatives_in_forward_mode_are_refused_and_not_lost(
    width: int, faked: Callable[[Problem], dict[str, Any]]
) -> None:
    """Also where gradients are not recorded, of inputs and of gradients."""
    p = parse_layer("64,64,(3,4),stride=(1,2),padding=1", "8x64x64x64").with_(precision="tf32")
    model = faked(p)["ModelNew"]()
    x = torch.randn(2, 64, 12, width, requires_grad=True)
    y = model(x)
    with forward_ad.dual_level():
        with torch.no_grad(), pytest.raises(NotImplementedError, match="jvp"):
            model(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
        with pytest.raises(NotImplementedError, match="jvp"):
            torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


def test_under_autocast_inputs_are_cast_to_the_weights_dtype(faked: Callable[[Problem], dict[str, Any]]) -> None:
    p = parse_layer("4,6,3", "2x4x5x6").with_(dtype=torch.float32, precision="ieee")
    model = faked(p)["ModelNew"]()
    x = torch.randn(p.input_shape).half().requires_grad_()
    wanted = model(x.float())
    torch.set_autocast_enabled("cuda", True)
    try:
        y = model(x)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert torch.equal(y, wanted)
    assert torch.autograd.grad(y.sum(), x)[0].dtype is torch.float16


def test_an_empty_batch_has_an_output_and_gradients(faked: Callable[[Problem], dict[str, Any]]) -> None:
    model = faked(SMALL)["ModelNew"]().double()
    y = model(torch.zeros(0, 4, 5, 6, dtype=torch.float64, requires_grad=True))
    y.sum().backward()
    assert y.shape == (0, 6, 7, 8)
    assert all(float(t.grad.abs().sum()) == 0 for t in model.parameters())


@pytest.mark.parametrize("width", range(29, 37))
def test_rows_of_every_width_are_served(width: int, faked: Callable[[Problem], dict[str, Any]]) -> None:
    """Kernels whose rows begin at 16 bytes are given such; what two kernels read is copied once."""
    p = parse_layer("64,64,(3,4),stride=(1,2),padding=1", "8x64x64x64").with_(precision="tf32")
    found = {k.name: k.multiples for k in passes.kernels(p, H200)}
    assert found == {"forward": (4, 1), "grad_input": (4, 1), "grad_weight": (4, 4)}
    module = faked(p)
    model = module["ModelNew"]()
    x = torch.randn(2, 64, 12, width, requires_grad=True)
    theirs = nn.ConvTranspose2d(64, 64, (3, 4), (1, 2), 1)
    theirs.load_state_dict(model.conv_transpose2d.state_dict())
    y, wanted = model(x), theirs(x)
    grad = torch.randn_like(y)
    for a, b in zip(
        (y, *torch.autograd.grad(y, (x, *model.parameters()), grad)),
        (wanted, *torch.autograd.grad(wanted, (x, *theirs.parameters()), grad)),
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(model(torch._neg_view(-x)), wanted, rtol=1e-4, atol=1e-4)
        assert model(x[:0]).shape == wanted[:0].shape
    read = dict(module["fake"].read[:3])
    assert all(t.stride(-2) % m == 0 for name, of in found.items() for t, m in zip(read[name], of))
    both = [read[name][0].data_ptr() for name in ("forward", "grad_input")]
    assert [t.data_ptr() for t in read["grad_weight"]] == both, "one copy is read by two kernels"


def test_a_dimension_of_one_row_may_have_any_stride(faked: Callable[[Problem], dict[str, Any]]) -> None:
    """PyTorch calls such tensors contiguous, but a tensor map of that stride reads other memory."""
    p = parse_layer("64,64,(3,4),stride=(1,2),padding=1", "8x64x64x64").with_(precision="tf32")
    module = faked(p)
    model = module["ModelNew"]()
    x, grad = (torch.randn(2, 1, 64, width).transpose(1, 2) for width in (32, 64))
    assert x.is_contiguous() and x.stride(-2) == 64 * 32
    with torch.no_grad():
        model(x)
    x.requires_grad_()
    torch.autograd.grad(model(x), (x, *model.parameters()), grad)
    strides = [[t.stride(-2) for t in read if t.dim() == 4 and len(t) == 2] for _, read in module["fake"].read]
    assert strides == [[32], [32], [64], [32, 64]]


@pytest.mark.parametrize(
    "precision,kernel,planned,longest,cut",
    (
        ("tf32", 5, 16, 64, 60), ("tf32", 4, 60, 0, 0), ("tf32", 11, 16, 36, 24), ("tf32", 17, 16, 24, 8),
        ("bf16", 21, 16, 32, 8), ("bf16", 13, 16, 0, 0),
    ),
)  # fmt: skip
def test_rows_longer_than_the_kernels_are_cut(
    precision: Precision, kernel: int, planned: int, longest: int, cut: int, faked: Callable[[Problem], dict[str, Any]]
) -> None:
    """Into parts, also of fewer columns from one to the next than the kernel reaches.

    Where there would be none, and where results' rows are longer by an odd number, the file has a kernel for rows of
    every length, though the planner has one for joined rows. Shorter rows are as long as they are.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    p = parse_layer(f"64,64,(3,{kernel}),padding=(1,0)", f"16x64x64x{planned}").with_(precision=precision, dtype=dtype)
    choice = plan(p, Device("cuda", gpu=H200)).selection("fwd").choice
    assert choice is not None and choice.family == "joined"
    (forward,) = passes.kernels(p, H200, forward_only=True)
    assert (forward.columns, forward.columns and forward.cut) == (longest, cut)
    module, widths = faked(p), list[tuple[int, int]]()
    launch = module["forward_launch"]

    def noted(batch: int, x: Sequence[int], out: Sequence[int], processors: int) -> Any:
        widths.append((x[2], out[2]))
        return launch(batch, x, out, processors)

    module["forward_launch"] = noted
    model = module["ModelNew"]().to(dtype)
    theirs = nn.ConvTranspose2d(64, 64, (3, kernel), padding=(1, 0)).double()
    theirs.load_state_dict(model.conv_transpose2d.state_dict())
    for width in (1, planned, longest + 1, longest + 6, 2 * longest + 3, 3 * longest + 5):
        x = torch.randn(2, 64, 3, width, dtype=dtype)
        with torch.no_grad():
            bound = 1e-4 if precision == "tf32" else 2.0**-8
            torch.testing.assert_close(model(x).double(), theirs(x.double()), rtol=bound, atol=bound)
    if longest:
        assert max(widths)[0] == longest
        assert all(out % 2 == 0 and out - x < kernel + forward.result_multiple for x, out in widths)


OTHERS = {
    1: ("6,4,5,stride=3,padding=1,output_padding=2,dilation=2,groups=2", "3x6x11"),
    2: ("4,6,(2,3),stride=(2,1),dilation=(1,3),bias=False", "2x4x7x5"),
    3: ("3,3,(1,2,3),stride=(1,2,1),padding=(0,1,1),groups=3", "2x3x4x3x5"),
}


@pytest.mark.parametrize("rank", OTHERS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_other_layers_are_served_by_the_plain_kernels(
    rank: int, dtype: torch.dtype, faked: Callable[[Problem], dict[str, Any]]
) -> None:
    """Whatever a file is for; first and second gradients."""
    text, shape = OTHERS[rank]
    p = parse_layer(text, shape)
    bias = p.bias
    module = faked(parse_layer(",".join(["8,4", str((3,) * rank)]), "x".join(["2", "8", *["16"] * rank])))
    arguments = (p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, p.output_padding, p.groups, bias)
    torch.manual_seed(7)
    model = module["ModelNew"](*arguments, p.dilation).to(dtype)
    torch.manual_seed(7)
    theirs = getattr(nn, f"ConvTranspose{rank}d")(*arguments, p.dilation).to(dtype)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), theirs.parameters(), strict=True))
    x = torch.randn(p.input_shape, dtype=dtype, requires_grad=True)
    found, wanted = model(x), theirs(x)
    torch.testing.assert_close(found, wanted)
    for y, layer_ in ((found, model), (wanted, theirs)):
        layer_.grads = torch.autograd.grad(y.square().sum(), (x, *layer_.parameters()), create_graph=True)
        layer_.second = torch.autograd.grad(layer_.grads[0].square().sum() + layer_.grads[1].square().sum(), x)
    torch.testing.assert_close((model.grads, model.second), (theirs.grads, theirs.second), rtol=1e-4, atol=1e-4)


def test_a_changed_weight_is_seen(faked: Callable[[Problem], dict[str, Any]]) -> None:
    """Also by a change which PyTorch does not count."""
    p = parse_layer("4,4,3,groups=4,bias=False", "2x4x5x6").with_(dtype=torch.float64, precision="fp64")
    model = faked(p)["ModelNew"]().double()
    x = torch.randn(p.input_shape, dtype=torch.float64)
    weight = model.conv_transpose2d.weight
    for change in (lambda: weight.data.mul_(2), lambda: weight.detach().numpy().fill(0.5), lambda: None):
        with torch.no_grad():
            torch.testing.assert_close(model(x), reference.forward(p, x, weight))
        change()


# --- the forward alone, and C -----------------------------------------------------------------------------------------


@needs_nvrtc
def test_a_file_of_the_forward_alone(faked: Callable[[Problem], dict[str, Any]]) -> None:
    p = parse_layer("4,4,3,groups=4", "2x4x5x6").with_(precision="tf32")
    text = source(p, "90a", forward_only=True)
    module = load(text)
    module.update(build=lambda fast: FakeExtension(p) if fast else PlainExtension, processors=lambda device: 132)
    module["check"] = lambda *given: None
    model, theirs = module["ModelNew"](), nn.ConvTranspose2d(4, 4, 3, groups=4)
    theirs.load_state_dict(model.conv_transpose2d.state_dict())
    x = torch.randn(p.input_shape)
    torch.testing.assert_close(model(x), theirs(x))
    torch.testing.assert_close(model(x[:, :, :1, :2]), theirs(x[:, :, :1, :2]))
    with pytest.raises(RuntimeError, match="without --forward-only"):
        model(x).sum().backward()
    assert "grad_input" not in text and "grad_weight" not in text
    assert len(text.splitlines()) < 0.8 * len(source(p, "90a").splitlines())


EXAMPLE = Path(__file__).parents[1] / "examples" / "exported.cpp"


@pytest.mark.parametrize("name", LAYERS)
def test_the_table_of_launches_is_the_librarys(name: str) -> None:
    """Its expressions, in words of C++ too, give what the records have; at the layer's own size and at others."""
    p = layer(name)
    found = passes.kernels(p, H200, alone=True)
    table = json.loads(json.dumps(c.table(p, H200, "layer", found)))
    assert [one["pass"] for one in table["functions"]] == [k.pass_ for k in found]
    for k, function in zip(found, table["functions"]):
        for q in other_sizes(p, 5):
            inner, outer = ((1,) * (3 - q.rank) + size for size in (q.size, q.out_size))
            sides = (outer, inner) if function["source"] == "output" else (inner, outer)
            known = of_sizes()
            known |= {
                f"{of}_{axis}": n for of, side in zip(("source", "result"), sides) for axis, n in zip("dhw", side)
            }
            known |= {"batch": q.batch, "processors": H200.multiprocessors}
            for one, text in function["sizes"].items():
                known[one] = eval(text, known)
            main = cpp.main_launch(resized(k, q, known.get("slices", 0), H200))
            (launch,) = (one for one in function["launches"] if one["grid"] == "blocks")
            numbers = tuple(eval(str(one), known) for one in launch["arguments"] if not isinstance(one, dict))
            assert (known["blocks"], numbers) == (main.grid, cpp.sizes(main))
            own = cpp.main_launch(k)
            assert (launch["threads"], launch["shared_bytes"]) == (own.threads, own.shared_bytes)


@needs_nvrtc
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_the_example_compiles_with_the_kernels_in_c(tmp_path: Path) -> None:
    """By the commands that it names itself; where there is a GPU for them, its result is right."""
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 70
    export, compile_ = (line.removeprefix("//   ") for line in text.splitlines() if line.startswith("//   "))
    arguments = [one for one in shlex.split(export)[1:] if one != "layer.cu"] + [str(tmp_path / "layer.cu")]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    assert sorted(one.name for one in tmp_path.iterdir()) == ["layer.cu", "layer.h", "layer.json"]
    shutil.copy(EXAMPLE, tmp_path)
    done = subprocess.run(
        shlex.split(compile_.partition(" && ")[0]), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        ran = subprocess.run([str(tmp_path / "exported")], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


# --- the function and the command ------------------------------------------------------------------------------------


def test_export_writes_a_layer(tmp_path: Path) -> None:
    module = nn.ConvTranspose2d(24, 40, 3, stride=2, padding=1)
    path = tmp_path / "layer.py"
    path.write_text("before")
    upconv.export(module, torch.zeros(2, 24, 20, 20), path, arch="90a")
    found = load(path.read_text(encoding="utf-8"))
    torch.manual_seed(3)
    ours = found["ModelNew"]()
    torch.manual_seed(3)
    theirs = nn.ConvTranspose2d(24, 40, 3, stride=2, padding=1)
    assert torch.equal(ours.conv_transpose2d.weight, theirs.weight)
    assert torch.equal(ours.conv_transpose2d.bias, theirs.bias)
    assert [f.name for f in tmp_path.iterdir()] == ["layer.py"]
    upconv.export(upconv.ConvTranspose2d(24, 40, 3, 2, 1), (2, 24, 20, 20), tmp_path / "again.py", arch="90a")
    assert (tmp_path / "again.py").read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "layer,input,why",
    [
        ("512,256,4,stride=2,padding=1,bias=False", "128x512x8x8", "whole images"),
        ("100,512,4,bias=False", "128x100x1x1", "the batch as pixels"),
    ],
)
def test_kernels_for_one_size_are_not_exported(layer: str, input: str, why: str) -> None:
    """Small images have kernels that serve their size alone; a file serves all."""
    p = parse_layer(layer, input).with_(precision="tf32")
    selected = plan(p, Device("cuda", gpu=H200)).selection("fwd").choice
    assert selected is not None and why in selected.summary
    for k in passes.kernels(p, H200):
        assert not isinstance(k.choice, gather.Choice) or not k.choice.flat
        assert not getattr(k.choice.tiling, "whole", None) if isinstance(k.choice, gather.Choice) else True
        assert not getattr(k.choice.tiling, "lines", False) if isinstance(k.choice, wgrad.Choice) else True


def test_a_pass_that_only_a_kernel_for_one_size_serves_has_the_plain_kernel() -> None:
    p = Problem.make(4, 100, 16, (1, 1), 45, precision="tf32")  # 2,025 taps
    assert "fwd" not in {k.pass_ for k in passes.kernels(p, H200)}
    text = source(p, "90a")
    assert "forward_launch" not in text and "build(False).forward" in text


def test_export_says_what_is_wrong(tmp_path: Path) -> None:
    module, path = nn.ConvTranspose2d(8, 4, 3), tmp_path / "x.py"
    for given, example, error, words in (
        (nn.Sequential(module), None, TypeError, "ConvTranspose1d, ConvTranspose2d or ConvTranspose3d, got Sequential"),
        (module, torch.zeros(1, 4, 9, 9), ValueError, r"8 channels, got shape \(1, 4, 9, 9\)"),
        (module, (8, 9, 9), ValueError, r"4 dimensions .* got shape \(8, 9, 9\)"),
        (module, torch.zeros(1, 8, 9, 9).half(), ValueError, r"dtype torch.float32, got torch.float16"),
    ):
        with pytest.raises(error, match=words):
            upconv.export(given, example, path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"arch must be one of .*; got '70'"):
        upconv.export(module, None, path, arch="70")
    with pytest.raises(OSError):
        upconv.export(module, None, tmp_path / "no" / "x.py", arch="90a")
    with pytest.raises(ValueError, match=r"must be one of 57, .*; got 50"):
        kernelbench(50)
    assert not list(tmp_path.iterdir())


def test_examples_decide_layout_and_size() -> None:
    module = nn.ConvTranspose2d(8, 4, 3)
    assert problem_of(module).size == (256, 256)
    p = problem_of(module, torch.zeros(2, 8, 9, 10).to(memory_format=torch.channels_last))
    assert (p.layout, p.size, p.precision) == ("channels_last", (9, 10), "tf32")
    assert problem_of(nn.ConvTranspose3d(8, 4, 3)).precision == "tf32"
    assert problem_of(module.to(torch.bfloat16)).precision == "bf16"
    assert gpu_of("80") == A100


@needs_nvrtc
def test_the_command_writes_models(tmp_path: Path) -> None:
    out = tmp_path / "model.py"
    run = CliRunner().invoke(app, ["export", "--kernelbench", "72", "--arch", "90a", "-o", str(out)])
    assert run.exit_code == 0, run.output
    assert out.read_text(encoding="utf-8") == exported(72)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --kernelbench or --layer"),
        (["--kernelbench", "57", "--layer", "8,4,(3,3)"], "either --kernelbench or --layer"),
        (["--kernelbench", "58", "--input", "8x8x8x8"], "3 sizes behind 32 channels"),
        (["--kernelbench", "57", "--dtype", "float16"], "go with --layer"),
        (["--layer", "8,4,3"], "without --input"),
        (["--layer", "8,4,(3,3)", "--dtype", "int8"], "'int8' is not one of 'float32'"),
        (["--layer", "8,4,(3,3)", "--precision", "bf16"], "--precision must be one of ieee, tf32"),
        (["--layer", "8,4,(3,3)", "--arch", "1"], "arch must be one of"),
        (["--layer", "8,4,(3,3)", "--c"], "--output must end in .cu"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], words: str, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["export", *arguments, "-o", str(tmp_path / "x.py")])
    assert run.exit_code == 2 and words in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check on")
def test_checking_needs_a_gpu(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["export", "--kernelbench", "72", "--check", "-o", str(tmp_path / "x.py")])
    assert run.exit_code == 2 and "--check must have a CUDA device" in run.stderr


# --- on a GPU --------------------------------------------------------------------------------------------------------

gpu_only = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# name: layer, input, dtype. Few, since each takes nvcc a minute.
ON_GPU: dict[str, tuple[str, str, torch.dtype]] = {
    "tensor cores": ("64,64,(3,5),stride=(2,1),padding=1", "2x64x20x64", torch.float32),
    "phases": ("64,3,4,2,1", "8x64x32x32", torch.float32),
    "grouped": ("32,64,(3,5),stride=(2,3),padding=(1,2),dilation=(2,1),groups=4", "2x32x16x64", torch.float32),
    "exact": ("6,5,3,2,1,output_padding=1", "2x6x7x9", torch.float64),
    "3-D": ("16,24,(3,3,2),stride=(1,2,2)", "2x16x5x8x12", torch.float32),
    "claimed": ("16,64,(3,5)", "8x16x256x256", torch.float32),
    "joined": ("40,64,(3,5),padding=(1,0)", "16x40x64x60", torch.float32),
    "joined halves": ("16,64,(3,3,5),dilation=(2,1,1)", "4x16x20x24x32", torch.bfloat16),
    "halves": ("64,48,4,2,1", "2x64x16x32", torch.bfloat16),
    "depthwise": ("64,64,4,2,1,groups=64", "4x64x33x40", torch.float32),
    "image": ("56,1,9,stride=3,padding=4,output_padding=2", "2x56x32x32", torch.bfloat16),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Loads a file of ``ON_GPU``; all of them are compiled in parallel first."""
    folder = tmp_path_factory.mktemp("exported")
    modules: dict[str, dict[str, Any]] = {}
    running = []
    for name, (text, shape, dtype) in ON_GPU.items():
        p = parse_layer(text, shape)
        precision = {torch.float64: "fp64", torch.bfloat16: "bf16"}.get(dtype, "tf32" if p.rank < 3 else "ieee")
        p = p.with_(dtype=dtype, precision=precision)
        path = folder / f"{len(running)}.py"
        path.write_text(source(p), encoding="utf-8")
        code = f"names = {{}}; exec(open({str(path)!r}).read(), names); names['build'](True)"
        running.append((name, path, subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)))
    for name, path, process in running:
        _, errors = process.communicate(timeout=550)
        assert process.returncode == 0, f"{name}: {errors.decode()[-3000:]}"
        modules[name] = load(path.read_text(encoding="utf-8"))
    return modules.__getitem__


def _stepped(p: Problem, model: nn.Module, size: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """A random input, its output, and the largest error of that and of the gradients, relative to float64's."""
    x = torch.randn(*size, device="cuda", dtype=dtype, requires_grad=True)
    y = model(x)
    grad = torch.randn_like(y)
    found = (y, *torch.autograd.grad(y, (x, *model.parameters()), grad))
    (layer_,) = model.children()
    q, weight, bias = p.with_(batch=len(x), size=tuple(x.shape[2:])), layer_.weight, layer_.bias
    truth = reference.forward(q, x, weight, bias), *reference.gradients(q, grad, x, weight)  # type: ignore[arg-type]
    assert [t.shape for t in found] == [t.shape for t in truth]
    return x.detach(), y.detach(), max(map(reference.relative_error, found, truth))


BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-13, torch.bfloat16: 6e-3}


class TestOnGpu:
    pytestmark = gpu_only

    @pytest.fixture(autouse=True)
    def _default_flags(self) -> Iterator[None]:
        with precision_flags("tf32"):
            yield

    @pytest.mark.parametrize("name", ON_GPU)
    def test_outputs_and_gradients(self, name: str, built: Callable[[str], dict[str, Any]]) -> None:
        text, shape, dtype = ON_GPU[name]
        p = parse_layer(text, shape)
        model = built(name)["ModelNew"](bias=True).to("cuda", dtype)
        bound = 5e-6 if p.rank == 3 and dtype is torch.float32 else BOUNDS[dtype]
        shapes = [(p.batch, p.size), (1, p.size), (3, tuple(n + 1 for n in p.size)), (1, (1,) * p.rank)]
        shapes += [(2, (*p.size[:-1], p.size[-1] + k)) for k in (2, 3, 4)]
        for batch, size in shapes:
            if size == (1,) * p.rank and p.kernel[-1] <= 2 * p.padding[-1]:  # which leaves no output
                continue
            x, y, error = _stepped(p, model, (batch, p.in_channels, *size), dtype)
            assert error < bound, (name, batch, size)
            with torch.no_grad():
                assert torch.equal(model(x), y) and torch.equal(model(x), y)
            assert torch.equal(model(x[0]), model(x[:1])[0])
            away = torch.empty(x.numel() + 1, device="cuda", dtype=dtype)[1:].view_as(x).copy_(x)
            assert torch.equal(model(away), y)

    @pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16, torch.float64))
    def test_other_layers(self, dtype: torch.dtype, built: Callable[[str], dict[str, Any]]) -> None:
        """By the plain kernels, which are in every file."""
        bounds = {torch.float32: 1e-6, torch.float64: 1e-13, torch.float16: 1e-3, torch.bfloat16: 6e-3}
        for rank, name in ((2, "tensor cores"), (3, "3-D")):
            p = parse_layer(*OTHERS[rank])
            arguments = (p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, p.output_padding, p.groups, True)
            model = built(name)["ModelNew"](*arguments, p.dilation).to("cuda", dtype)
            x, y, error = _stepped(p, model, p.input_shape, dtype)
            assert error < bounds[dtype]
            with torch.no_grad():
                assert torch.equal(model(x), y)

    def test_float32_as_ieee(self, built: Callable[[str], dict[str, Any]]) -> None:
        p = parse_layer(*ON_GPU["tensor cores"][:2])
        model = built("tensor cores")["ModelNew"](bias=True).cuda()
        with precision_flags("ieee"):
            assert _stepped(p, model, p.input_shape, torch.float32)[2] < 2e-6

    def test_changed_weights_are_packed_again(self, built: Callable[[str], dict[str, Any]]) -> None:
        model = built("tensor cores")["ModelNew"](bias=False).cuda()
        x = torch.randn(2, 64, 20, 64, device="cuda")
        with torch.no_grad():
            before = model(x)
            next(model.parameters()).data.mul_(2)  # PyTorch does not count this change
            assert torch.allclose(model(x), 2 * before, rtol=1e-5, atol=1e-6)
            model.load_state_dict({k: v / 2 for k, v in model.state_dict().items()})
            assert torch.equal(model(x), before)

    def test_second_gradients(self, built: Callable[[str], dict[str, Any]]) -> None:
        model = built("exact")["ModelNew"]().to("cuda", torch.float64)
        x = torch.randn(1, 6, 3, 4, device="cuda", dtype=torch.float64, requires_grad=True)
        parameters = dict(model.named_parameters())

        def call(x: Tensor, *values: Tensor) -> Tensor:
            return torch.func.functional_call(model, dict(zip(parameters, values)), (x,))  # type: ignore[no-any-return]

        assert torch.autograd.gradgradcheck(call, (x, *parameters.values()))

    @pytest.mark.parametrize("name", ("tensor cores", "claimed"))
    def test_graphs_and_streams(self, name: str, built: Callable[[str], dict[str, Any]]) -> None:
        model = built(name)["ModelNew"]().cuda()
        x = torch.randn([int(n) for n in ON_GPU[name][1].split("x")], device="cuda")
        with torch.no_grad():
            wanted = model(x)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            found = []  # all are kept, so that none lies where another's right results were
            for _ in range(3):  # both streams' at once
                found.append(model(x))
                with torch.cuda.stream(stream):
                    found.append(model(x))
            torch.cuda.current_stream().wait_stream(stream)
            assert all(torch.equal(y, wanted) for y in found)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = model(x)
            x.mul_(2)
            graph.replay()
            assert torch.allclose(captured, model(x))

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    def test_the_tensors_device_is_used(self, built: Callable[[str], dict[str, Any]]) -> None:
        model = built("tensor cores")["ModelNew"]()
        x = torch.randn(2, 64, 20, 64)
        first, second = (model.to(f"cuda:{i}")(x.to(f"cuda:{i}")) for i in (0, 1))
        assert second.device.index == 1 and torch.equal(first.cpu(), second.cpu())
        with pytest.raises(ValueError, match="one CUDA device; got cuda:0 and cuda:1"):
            model(x.to("cuda:0"))

    def test_weights_elsewhere_are_refused(self, built: Callable[[str], dict[str, Any]]) -> None:
        with pytest.raises(ValueError, match="one CUDA device; got cuda:0 and cpu"):
            built("tensor cores")["ModelNew"]()(torch.zeros(2, 64, 20, 64, device="cuda"))
