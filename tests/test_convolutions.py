"""Plain convolutions by the kernels of transposed ones: which calls are ours, and what they and their gradients are.

Without a GPU the kernels are `standins`.
"""

from __future__ import annotations

import copy
import subprocess
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import upconv
from conftest import HOPPER
from situations import differences, error
from standins import H200, Data, Kernels, StandIn, Weight
from strategies import changed_settings, excess
from upconv import convolutions, modules, planner
from upconv.cuda import bias, engine, families, gpu
from upconv.cuda.compile import jit
from upconv.planner import Device
from upconv.problem import Problem
from upconv.replay import calls, native

LAYERS: Any = (None, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MASKS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
PASSES = {"for_output": "grad-input", "for_input": "fwd", "for_weight": "grad-weight"}
"""The transposed convolution's pass that a convolution's pass is."""
LACKING = pytest.mark.parametrize("lacking", ("", *PASSES))


def layer(rank: int, *args: Any, dtype: torch.dtype = torch.float64, **kwargs: Any) -> tuple[Any, Any]:
    """(ours, torch.nn's) with the same parameters."""
    theirs = LAYERS[rank](*args, dtype=dtype, **kwargs)
    ours = upconv.accelerate(copy.deepcopy(theirs), convolutions=True)
    assert type(ours) is LAYERS[rank] and modules.is_ours(ours)
    return ours, theirs


def image(rank: int = 2) -> Tensor:
    """The same at each call."""
    size = (8, 8) if rank == 2 else (9, 6, 5)[:rank]
    return torch.randn(2, 4, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def step(module: Any, x: Tensor, mask: tuple[int, ...] = (1, 1, 1), grad: Tensor | None = None) -> list[Tensor | None]:
    """The output and the gradients for input, weight and bias of those that ``mask`` lets require one.

    ``grad``: the output's gradient; by default from -1 to 1.
    """
    x = x.detach().clone().requires_grad_(bool(mask[0]))
    for parameter, needed in zip((module.weight, module.bias), mask[1:]):
        if parameter is not None:
            parameter.requires_grad_(bool(needed)).grad = None
    out = module(x)
    if out.requires_grad:
        if grad is None:
            grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out)
        out.backward(grad)
    return [out.detach(), x.grad, module.weight.grad, None if module.bias is None else module.bias.grad]


def assert_same_step(ours: Any, theirs: Any, x: Tensor, mask: tuple[int, ...] = (1, 1, 1)) -> None:
    assert not differences(step(ours, x, mask), step(theirs, x, mask), 1e-10)


# --- which calls are ours --------------------------------------------------------------------------------------------


def problem_of(
    x: tuple[int, ...], channels: int, kernel: int, stride: int = 1, padding: int = 1, precision: Any = "bf16",
    layout: Any = "nchw",
) -> Problem:  # fmt: skip
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    rank = len(x) - 2
    each = [(value,) * rank for value in (stride, padding, 1)]
    weight = channels, x[1], *(kernel,) * rank
    p = convolutions.transposed(x, weight, *each, dtype, None if precision == "fp64" else precision, layout)
    assert p is not None
    return p


def chosen(*case: Any, device: Device = H200, training: bool = False, **others: Any) -> Any:
    p = problem_of(*case, **others)
    if convolutions.small(torch.Size(p.output_shape), torch.Size(p.weight_shape), p.stride):
        return None
    return convolutions.choose(p, device, training)


@pytest.mark.parametrize("shape", [(1, 2, 4, 8), (1, 2, 8, 4), (0, 2, 8, 8), (1, 2, 0, 8)])
def test_a_convolution_without_an_output_has_no_transposed_one(shape: tuple[int, ...]) -> None:
    """PyTorch computes the empty ones, and refuses an image that is smaller than the kernel."""
    assert convolutions.transposed(shape, (3, 2, 5, 5), (1, 1), (0, 0), (1, 1), torch.float32, "tf32") is None


SINGLE, LAST = {"precision": "tf32"}, {"layout": "channels_last"}
BOTH = {"for_output", "for_input"}
LARGE = (16, 64, 256, 256), 64, 3


@pytest.mark.parametrize(
    ("case", "others", "ours", "theirs"),
    [
        # large layers
        (LARGE, {}, BOTH, ()), (LARGE, SINGLE, BOTH, ()), (LARGE, LAST, BOTH, ()), (LARGE, SINGLE | LAST, BOTH, ()),
        (((2, 32, 128, 128, 128), 32, 3), SINGLE | LAST, BOTH, ()), (((16, 128, 2048), 128, 3), {}, BOTH, ()),
        (((16, 3, 256, 256), 64, 3), {}, ("for_output",), ()),  # whose channels PyTorch pads
        (((2, 4, 8, 8), 4, 3), {}, (), PASSES),  # not worth a kernel's compilation
        # pointwise, small, and what was not measured
        (((16, 256, 64, 64), 256, 1, 1, 0), {}, (), PASSES),
        (((256, 256, 8, 8), 512, 4, 2), SINGLE, ("for_input",), ("for_output", "for_weight")),
        (((2, 320, 8, 8, 8), 320, 3), {}, (), PASSES), (LARGE, {"precision": "ieee"}, (), PASSES),
        (LARGE, {"precision": "fp64"}, (), PASSES),
        (LARGE, {"device": Device("cuda", gpu=gpu.A100)}, (), PASSES),
        (LARGE, {"device": Device("cuda", unavailable="no driver")}, (), PASSES),
        # Passes are chosen one by one: cuDNN's gradient for many channels' weights on small images is the faster one,
        # and in channels_last and TF32 it is the slower one there alone.
        (((16, 256, 64, 64), 256, 3), LAST, (), ("for_output", "for_weight")),
        (((16, 1024, 16, 16), 1024, 3), {}, BOTH, ("for_weight",)),
        (((2, 256, 16, 16, 16), 256, 3), {}, BOTH, ("for_weight",)),
        (((16, 256, 64, 64), 256, 3), SINGLE | LAST, ("for_weight",), BOTH),
        # Both take nearly as long, in a step that waits for its host; nothing but that takes them in.
        (((64, 256, 16, 16), 256, 3), LAST | {"training": True}, BOTH, ()),
        (((64, 256, 16, 16), 256, 3), LAST, (), ("for_output",)),
        (((128, 256, 8, 8), 512, 4, 2), {"training": True}, BOTH, ()),
        (((128, 256, 8, 8), 512, 4, 2), {}, (), ("for_output",)),
        # short enough for another bound, more weights than cuDNN copies well, a gradient that PyTorch is faster at
        (((32, 64, 16, 16), 64, 3), {"training": True}, ("for_output",), ()),
        (((8, 512, 8, 8), 1024, 4, 2), SINGLE | {"training": True}, ("for_input",), ()),
        (((32, 64, 4, 4), 128, 4, 2), {"training": True}, (), ("for_weight",)),
        # one pixel
        (((4096, 512, 7, 7), 2048, 7, 1, 0), {}, (), ("for_weight",)),
        (((4096, 512, 7, 7), 4096, 7, 1, 0), LAST, (), PASSES),
    ],
)  # fmt: skip
def test_the_rule(case: Any, others: dict[str, Any], ours: Any, theirs: Any) -> None:
    found = chosen(*case, **others)
    assert all(getattr(found, name) for name in ours)
    assert not any(getattr(found, name, False) for name in theirs)
    if others.get("training") and ours == BOTH:
        assert not found.inference.for_output and found.inference.inference is found.inference


def test_the_rule_asks_for_no_compiler(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether calls can be replayed changes which kernel computes none, and no compiler is run within a call."""
    monkeypatch.setattr(convolutions, "_on_gpu", lambda t: True)
    monkeypatch.setattr(planner, "cuda_device", lambda index: H200)
    monkeypatch.setattr(calls, "float32_precision", lambda: "tf32")

    def choose(p: Problem, g: gpu.Gpu, general: bool = False) -> dict[str, Any]:
        """As fast as PyTorch's, which is enough in training alone."""
        return {"stand-in": StandIn(p, kernels.log, seconds=convolutions.expected(p, p.pass_, g))}

    monkeypatch.setattr(families, "choose", choose)
    monkeypatch.setattr(native, "module", lambda: None)
    monkeypatch.setattr(subprocess, "run", lambda *command, **_: pytest.fail("a compiler runs"))
    taken: list[list[str]] = []
    for compiler in (None, "/usr/bin/c++"):
        convolutions.forget()
        modules._left.clear()
        monkeypatch.setattr(native, "compiler", lambda compiler=compiler: compiler)
        ours = upconv.accelerate(nn.Conv2d(64, 128, 4, 2, 1, bias=False), convolutions=True)
        for training in (True, False):
            kernels.log.clear()
            with torch.set_grad_enabled(training):
                assert ours(torch.randn(32, 64, 32, 32, requires_grad=training)).shape == (32, 128, 16, 16)
            taken.append(kernels.ran())
    convolutions.forget()
    assert taken == [["grad-input"], []] * 2


# --- calls that PyTorch must see -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transforms_graphs_and_invalid_calls_are_pytorchs(stand_ins: Kernels) -> None:
    """Also of a layer whose calls were recognised before."""
    x = image()
    nested = torch.nested.nested_tensor([torch.randn(4, n, 8, dtype=torch.float64) for n in (5, 6)])

    def run(module: Any) -> Any:
        found = []
        for _ in range(2):
            found += [
                torch.func.vmap(module)(x[None])[0].detach(),
                torch.func.grad(lambda t: module(t).sum())(x),
                torch.compile(module, backend="eager", fullgraph=True)(x).detach(),
                torch.fx.symbolic_trace(module)(x).detach(),
                *(error(partial(module, given_)) for given_ in (x[:, :3], None, nested)),
            ]
            stand_ins.ran() if found[7:] else None
        return found

    ours, theirs = layer(2, 4, 6, 3)
    found = run(ours)
    assert stand_ins.ran() == [] and not differences(found, run(theirs), 1e-10)
    for _ in range(3):
        ours(x)
    assert not differences(run(ours), found, 1e-10)


@pytest.mark.parametrize("padding", (1, "same"))
def test_tracers_see_pytorchs_operator(stand_ins: Kernels, padding: Any) -> None:
    """Also of a layer that was called before, or pads by a word."""
    ours, _ = layer(2, 4, 6, 3, padding=padding)
    x = image()
    wanted = ours(x)
    modules._left[id(ours)] = torch.Size((1, 1, 1, 1)), ours.kernel_size, None
    torch.testing.assert_close(torch.fx.symbolic_trace(ours)(x), wanted)
    traced = make_fx(ours, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    torch.testing.assert_close(traced(x), wanted)


@settings(max_examples=80)
@given(stride=st.sampled_from((1, 2)), changed=changed_settings(2))
@example(stride=2, changed={"padding": "same"})
@example(stride=1, changed={"stride": (True, True)})
@example(stride=1, changed={"padding": "same", "dilation": [2, 1]})
@example(stride=1, changed={"groups": True})
def test_settings_changed_later_are_pytorchs(stand_ins: Kernels, stride: int, changed: dict[str, Any]) -> None:
    """The same result, or the same error to the letter, also of a layer whose calls were recognised before."""
    x, said = image(), []
    for one in layer(2, 4, 4, 3, stride, padding=1):
        for _ in range(3):
            one(x)
        vars(one).update(changed)
        said.append(error(lambda one=one: one(x).detach()))
    assert not differences(*said, 1e-10)


def test_a_layer_with_other_settings_is_judged_anew(stand_ins: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be another module's, in the memory of one that is gone."""
    monkeypatch.setattr(modules, "small", lambda shape, weight_shape, stride: weight_shape[0] > 8)
    one, _ = layer(2, 4, 8, 3, padding=1, padding_mode="circular", bias=False)
    weight, wider = one.weight, nn.Parameter(torch.randn(16, 4, 3, 3, dtype=torch.float64))
    for changed, ours in (({}, []), ({"padding_mode": "zeros"}, ["grad-input"])):
        vars(one).update(changed)
        one(image())
        assert stand_ins.ran() == ours
    for one.weight, ours in ((wider, []), (weight, ["grad-input"])):
        one(image())
        assert stand_ins.ran() == ours


@pytest.mark.parametrize("ours_by", ("kernels", "size", "rule"))
def test_a_computed_weight_is_computed_once(stand_ins: Kernels, ours_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spectral norm takes a step of its power iteration whenever it is."""
    if ours_by == "size":
        monkeypatch.setattr(modules, "small", lambda *shapes: True)
    if ours_by == "rule":
        monkeypatch.setattr(convolutions, "choose", lambda *_: None)
    ours, theirs = (parametrizations.spectral_norm(module) for module in layer(2, 4, 6, 3))
    theirs.load_state_dict(ours.state_dict())
    for _ in range(3):
        torch.testing.assert_close(ours(image()), theirs(image()))
        assert (stand_ins.ran() == ["grad-input"]) == (ours_by == "kernels")
    assert not differences(dict(ours.state_dict()), dict(theirs.state_dict()), 1e-10)


def test_who_replaces_what_a_layer_calls_sees_it(stand_ins: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.nn.functional.conv2d``, or ``_conv_forward`` on the class or the instance."""
    ours, theirs = layer(2, 4, 6, 3)
    x = image()
    for owner, name in ((F, "conv2d"), (nn.Conv2d, "_conv_forward"), (ours, "_conv_forward")):
        for _ in range(2):
            torch.testing.assert_close(ours(x), theirs(x))
        assert stand_ins.ran() == ["grad-input"] * 2
        seen: list[Any] = []
        old = getattr(owner, name)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *args, old=old, seen=seen, **kw: seen.append(args) or old(*args, **kw))
            torch.testing.assert_close(ours(x), ours(x))
        assert len(seen) == 2 and stand_ins.ran() == []


# --- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rank", (1, 2, 3))
def test_steps_are_pytorchs(stand_ins: Kernels, rank: int, mask: tuple[int, ...]) -> None:
    ours, theirs = layer(rank, 4, 6, 3, 2, 1, 1 if rank == 3 else 2)
    for _ in range(4):  # the second remembers the call, the third recognises it
        assert_same_step(ours, theirs, image(rank), mask)
        assert stand_ins.ran() == [*(["fwd"] if mask[0] else []), "grad-input", *(["grad-weight"] if mask[1] else [])]
        for module in (ours, theirs):  # weights may change by what no version counts
            module.weight.data.mul_(1.25)
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                torch.testing.assert_close(ours(image(rank)), theirs(image(rank)))
            assert stand_ins.ran() == ["grad-input"]


@pytest.mark.parametrize("lacking", PASSES)
def test_a_pass_that_is_not_ours_is_pytorchs(stand_ins: Kernels, lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions.Convolution, lacking, False)
    ours, theirs = layer(2, 4, 6, 3, 2, 1)
    x = image()
    for _ in range(3):
        assert_same_step(ours, theirs, x)
        assert stand_ins.ran() == [name for name in ("fwd", "grad-input", "grad-weight") if name != PASSES[lacking]]
    ours.weight.requires_grad_(False)  # then nothing is ours but the gradient for the input
    torch.testing.assert_close(ours(x.requires_grad_()), theirs(x))
    assert stand_ins.ran() == ([] if lacking == "for_output" else ["grad-input"])
    ours.weight.requires_grad_(True)
    for name in ("for_output", "for_weight"):
        monkeypatch.setattr(convolutions.Convolution, name, False)
    convolutions.forget()
    assert type(ours(x).grad_fn).__name__ == "ConvolutionBackward0", "for the gradient for the input alone"
    with torch.no_grad():
        assert convolutions.convolution(2, x, ours.weight, None, (1, 1), (0, 0), (1, 1)) is None


@pytest.mark.parametrize("biased", (False, True))
def test_a_bias_is_the_kernels_where_it_takes_one(
    stand_ins: Kernels, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, right = [], Data.run

    def run(self: Data, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *how: bool) -> None:
        given.append((self.choice.problem.pass_, bias is not None))
        right(self, x, weight, None, out, *how)
        if bias is not None:
            out += bias.view(-1, 1, 1)

    monkeypatch.setattr(Data, "biased", biased, raising=False)
    monkeypatch.setattr(Data, "run", run)
    ours, theirs = layer(2, 4, 6, 3)
    assert_same_step(ours, theirs, image())
    with torch.no_grad():
        torch.testing.assert_close(ours(image()), theirs(image()))
    assert given == [("grad-input", biased), ("fwd", False), ("grad-input", biased)]


@LACKING
@pytest.mark.parametrize("casts", (False, True))
@pytest.mark.parametrize("own", (torch.float32, torch.float16))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast(
    stand_ins: Kernels, dtype: torch.dtype, own: torch.dtype, casts: bool, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers in float32, whose weights kernels round, and of such that are in 16 bits already."""
    for stand_in in (Data, Weight):
        monkeypatch.setattr(stand_in, "casts", casts)
    if lacking:
        monkeypatch.setattr(convolutions.Convolution, lacking, False)
    ours, theirs = layer(2, 4, 6, 3, dtype=own)
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    for _ in range(3):
        found = []
        for module in (ours, theirs):
            module.zero_grad()
            with torch.autocast("cpu", dtype):
                out = module(x)
            assert out.dtype is dtype
            out.float().square().sum().backward()
            found.append([out.detach().float(), *(p.grad.float() for p in module.parameters())])
            assert all(p.grad.dtype is own for p in module.parameters())
        torch.testing.assert_close(*found, rtol=3e-2, atol=3e-1)
        torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-2, atol=2e-2)
    assert set(stand_ins.ran()) == {pass_ for name, pass_ in PASSES.items() if name != lacking}


def test_derivatives_of_every_order(stand_ins: Kernels) -> None:
    ours, _ = layer(2, 2, 3, 3, 2, 1)
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    given_ = x, ours.weight, ours.bias

    def call(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return convolutions.convolution(2, x, w, b, (2, 2), (1, 1), (1, 1))

    assert gradcheck(call, given_, check_batched_grad=True) and gradgradcheck(call, given_, check_batched_grad=True)
    assert set(stand_ins.ran()) == {"fwd", "grad-input", "grad-weight"}


def test_only_what_is_asked_for_is_computed(stand_ins: Kernels) -> None:
    """And a counter of operations that is there in the backward alone sees PyTorch's operator."""
    x, found, counts = image().requires_grad_(), [], []
    for module in layer(2, 4, 6, 3):
        out = module(x)
        stand_ins.ran()
        found += torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
        counts.append(stand_ins.ran())
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert stand_ins.ran() == [] and counter.get_total_flops() > 0
        counts.append([counter.get_total_flops()])
    torch.testing.assert_close(*found)
    assert counts[0] == ["fwd"] and counts[1] == counts[3]


@LACKING
@pytest.mark.parametrize("training", (False, True))
def test_kernels_are_warmed_up(
    stand_ins: Kernels, training: bool, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that calls will take, and no others; that of the bias is of the convolution's own output."""
    compiled: list[str] = []
    sums: list[tuple[int, ...]] = []
    monkeypatch.setattr(jit, "cubin", lambda source, arch, label: compiled.append(label))
    monkeypatch.setattr(bias, "serves", lambda p: sums.append(p.output_shape))
    passes = {"grad-input"} | ({"fwd", "grad-weight"} if training else set())
    if lacking:
        monkeypatch.setattr(convolutions.Convolution, lacking, False)
        passes -= {PASSES[lacking]}
    ours, theirs = layer(2, 4, 6, 3)
    x = image()
    upconv.warmup(ours, x, training=training)
    assert {label.split()[0] for label in compiled} == passes
    prepared = [pass_ for what, pass_ in stand_ins.log if what == "prepare"]
    assert set(prepared) == passes and sums == ([(2, 6, 6, 6)] if training else [])
    compiled.clear()
    assert_same_step(ours, theirs, x) if training else torch.testing.assert_close(ours(x), theirs(x))
    assert not compiled and [pass_ for what, pass_ in stand_ins.log if what == "prepare"] == prepared
    assert sums == ([(2, 6, 6, 6)] if training else [])
    sums.clear()
    stand_ins.log.clear()
    ours = parametrizations.weight_norm(layer(2, 4, 6, 5, bias=False)[0])  # without gradients it is computed so too
    upconv.warmup(ours, x, training=training)
    assert {pass_ for what, pass_ in stand_ins.log if what == "prepare"} == passes and not sums


# --- on a GPU --------------------------------------------------------------------------------------------------------

GPU_LAYERS = {
    "k3": ((2, 24, 37, 45), 40, 3, 1, 1, 1), "k3 s2": ((2, 32, 40, 48), 64, 3, 2, 1, 1),
    "k4 s2": ((3, 16, 32, 32), 32, 4, 2, 1, 1), "few": ((2, 3, 64, 64), 64, 7, 2, 3, 1),
    "one out": ((2, 64, 33, 66), 1, 3, 1, 1, 1), "dilated": ((1, 48, 32, 40), 48, 3, 1, 2, 2),
    "k5 s3": ((2, 17, 31, 29), 19, 5, 3, 0, 1), "1-D": ((4, 64, 500), 96, 5, 1, 2, 1),
    "1-D s2": ((4, 64, 512), 64, 4, 2, 1, 1),
    "3-D": ((1, 32, 12, 16, 20), 32, 3, 1, 1, 1), "3-D s2": ((1, 16, 12, 16, 20), 32, 3, 2, 1, 1),
    "large": ((4, 64, 128, 128), 64, 3, 1, 1, 1),
}  # fmt: skip


def hopper(test: Any) -> Any:
    """Plain convolutions are ours on sm_90 alone."""
    for mark in HOPPER:
        test = mark(test)
    return pytest.mark.usefixtures("tf32")(test)


@hopper
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("last", (False, True), ids=("nchw", "channels_last"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", GPU_LAYERS)
def test_layers_on_a_gpu(
    name: str, dtype: torch.dtype, last: bool, bias: bool, everything: None, monkeypatch: Any
) -> None:
    shape, *args = GPU_LAYERS[name]
    channels, kernel, stride, padding, dilation = args
    rank = len(shape) - 2
    if last and (rank == 1 or channels == 1):
        pytest.skip("channels_last has 2 or 3 dimensions, and is PyTorch's for one output channel")
    order: Any = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)[(rank - 1) * last]
    ours, theirs = layer(rank, shape[1], channels, kernel, stride, padding, dilation, bias=bias, dtype=dtype)
    ours, truth = ours.cuda().to(memory_format=order), copy.deepcopy(theirs).double()
    x = torch.randn(shape).to(dtype).contiguous(memory_format=order)
    monkeypatch.setattr(modules, "_watched", lambda *_: False)  # else who replaces this sees the call
    monkeypatch.setattr(ours, "_conv_forward", lambda *args: pytest.fail("the call is ours"))
    found = step(ours, x.cuda())
    assert found[0] is not None
    grad = torch.linspace(-1, 1, found[0].numel(), dtype=torch.float64).view(found[0].shape).to(dtype)
    exact = step(truth, x.double(), grad=grad.double())
    with torch.no_grad():
        for parameter in truth.parameters():
            parameter.abs_()
    bound = step(truth, x.double().abs(), grad=grad.double().abs())
    pixels = found[0].numel() // channels
    lengths = (shape[1] * kernel**rank, channels * kernel**rank, pixels, pixels)
    for i, (a, b, magnitude, length) in enumerate(zip(found, exact, bound, lengths)):
        assert (a is None) == (b is None)
        if a is not None and b is not None and magnitude is not None:
            assert excess(a.cpu(), b, magnitude, 2 * length, 1, tf32=dtype is torch.float32 and i < 3) <= 1
            assert i == 3 or a.is_contiguous(memory_format=order)
    again = step(ours, x.cuda())
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, again))  # type: ignore[arg-type]


@hopper
@pytest.mark.parametrize("last", (False, True), ids=("nchw", "channels_last"))
@pytest.mark.parametrize("amp", (False, True))
def test_a_model_on_a_gpu(amp: bool, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers large enough to be ours by the rule, forward and backward, as PyTorch's."""
    theirs = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)).cuda()
    ours = upconv.accelerate(copy.deepcopy(theirs), convolutions=True)
    ran: list[str] = []
    right = engine.convolution
    monkeypatch.setattr(engine, "convolution", lambda *args: ran.append(str(args[0])) or right(*args))
    order = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(16, 3, 256, 256, device="cuda").contiguous(memory_format=order)
    results = []
    for model in (ours.to(memory_format=order), theirs.to(memory_format=order)):
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            out = model(x)
        assert out.is_contiguous(memory_format=order)
        out.float().square().mean().backward()
        results.append([out.detach().float(), *(p.grad for p in model.parameters())])
    assert len(ran) == 2 or (last and len(ran) == 1), "of 3 channels in channels_last it may be PyTorch's"
    for a, b in zip(*results):
        assert ((a - b).norm() / b.norm()).item() < (1e-2 if amp else 1e-3)
