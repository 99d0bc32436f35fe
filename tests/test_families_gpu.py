"""All families on a GPU: the property test of test_emulated.py, and what an emulator cannot show."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

import upconv
from conftest import EVERY, HOPPER, replayed
from drawn import DTYPES, FAMILIES, LAYOUTS, MOST_MACS, SCALAR, choices
from results import Place, assert_computes, laid_out
from test_families import problems
from upconv import planner, reference
from upconv.bench.timing import precision_flags
from upconv.cpu import memory_format
from upconv.cuda import bias, families
from upconv.cuda.axes import result_shape, source_shape
from upconv.cuda.compile.launch import Launcher
from upconv.cuda.cost import Cost
from upconv.cuda.gemm import gather, gather_search
from upconv.cuda.gpu import gpu
from upconv.cuda.prepared import PreparedBias
from upconv.cuda.rearrange import rearranged, unshuffle
from upconv.cuda.wgrad import wgrad
from upconv.problem import Layout, Pass, Precision, Problem

pytestmark = HOPPER

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_layers_by_random_tiles(family: str, part: int) -> None:
    count = 200 if EVERY else 24
    for seed, (choice, p) in islice(enumerate(islice(choices(family, gpu(0), larger=3), count)), part, None, PARTS):
        assert_computes(choice, None, seed, p=p)


@pytest.mark.parametrize("seed", range(100, 200 if EVERY else 116))
def test_every_familys_own_choice(seed: int) -> None:
    for p, _ in problems(seed, 1):
        p = p.with_(batch=max(1, min(p.batch, int(MOST_MACS * p.batch / p.macs))))
        for name, choice in families.choose(p, gpu(0)).items():
            if not isinstance(choice, str):
                assert choice.family == name
                assert_computes(choice, None, seed, p=p)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", SCALAR)
def test_gradients_for_the_bias(precision: Precision, layout: Layout) -> None:
    """Sums that are no integers; twice the same bits, by one launch and by two."""
    for i, size in enumerate(((64, 67), (5, 131), (130, 140), (4, 1000))):
        p = Problem.make(7, 1, 24, size, 1, dtype=DTYPES[precision], precision=precision, layout=layout)
        grad = laid_out(torch.randn(p.output_shape).to(p.dtype), p)
        sums, given = PreparedBias(bias.Choice(p, gpu(0)), 0), Place().given(grad, i)
        exact, most = grad.double().sum((0, 2, 3)), grad.double().abs().sum((0, 2, 3))
        for dtype in dict.fromkeys((p.dtype, torch.float32 if p.dtype.itemsize == 2 else p.dtype)):
            every = [torch.empty(p.out_channels, dtype=dtype, device="cuda") for _ in range(4)]
            for out, lasting in zip(every, (False, True, True, False)):
                sums.run(given, out, lasting)
            every = [out.cpu() for out in every]
            assert all(torch.equal(every[0], other) for other in every)
            rounding = torch.finfo(dtype).eps
            assert ((every[0].double() - exact).abs() <= rounding * exact.abs() + 2e-6 * most).all()


# --- calls at once, and captured ones --------------------------------------------------------------------------------


def last(p: Problem) -> Problem:
    return p.with_(layout="channels_last", dtype=torch.bfloat16, precision="bf16")


AT_ONCE: dict[str, tuple[Callable[[], Any], Callable[[Any], bool]]] = {
    "tiles claimed": (
        lambda: gather.choose(Problem.make(16, 32, 64, (256, 320), 3, 1, 1, precision="tf32"), gpu(0)),
        lambda choice: choice.claimed,
    ),
    "blocks that add up": (
        lambda: wgrad.choose(last(Problem.make(16, 256, 128, (16, 16), 4, 2, 1, pass_="grad-weight")), gpu(0)),
        lambda choice: choice.ending == "together",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", AT_ONCE)
def test_calls_on_streams_at_once(what: str) -> None:
    """Each stream has counters of its own, which are left zero; the bits are those of a call that leaves nothing."""
    choose, has_mode = AT_ONCE[what]
    choice = choose()
    p, prepared = choice.problem, choice.prepare(0)
    assert has_mode(choice), "the mode is another layer's by now"
    of_weight = p.pass_ == "grad-weight"

    def operands() -> tuple[Tensor, Tensor]:
        shapes = (p.input_shape, p.output_shape) if of_weight else (source_shape(p), p.weight_shape)
        return tuple(laid_out(torch.randn(shape).to(p.dtype), p).cuda() for shape in shapes)  # type: ignore[return-value]

    def call(given: tuple[Tensor, Tensor], lasting: bool) -> Tensor:
        shape = p.weight_shape if of_weight else result_shape(p)
        out = laid_out(torch.full(shape, math.nan, dtype=p.dtype), p).cuda()
        if of_weight:
            prepared.run(*given, out, lasting)
        else:
            prepared.run(given[0], prepared.pack(given[1]), None, out, lasting=lasting)
        return out

    every, streams = [operands() for _ in range(4)], [torch.cuda.Stream() for _ in range(4)]
    expected = [call(given, False) for given in every]
    torch.cuda.synchronize()
    for _ in range(5):
        found = []
        for stream, given in zip(streams, every):
            with torch.cuda.stream(stream):
                found.append(call(given, True))
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))


STEPS: dict[str, tuple[Problem, set[str]]] = {
    "packed by the kernel": (Problem.make(9, 64, 48, (40, 36), 5, 2, 2), {"pack"}),
    "added up at once": (
        Problem.make(16, 256, 128, (16, 16), 4, 2, 1, dtype=torch.bfloat16, precision="bf16"),
        {"wgrad_whole"},
    ),
    "by copies": (
        Problem.make(128, 512, 256, (4, 4), 4, 2, 1, dtype=torch.bfloat16, precision="bf16"), {"to_channels_last"},
    ),
    "without the stride": (Problem.make(64, 56, 1, (128, 128), 9, 3, 4, 2), {"unshuffle", "fold"}),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_and_its_capture(name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits twice and in a graph, where other kernels may run; close to float64's."""
    p, entries = STEPS[name]
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32")  # type: ignore[attr-defined]
    module = upconv.ConvTranspose2d(
        p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, p.output_padding, bias=False, device="cuda"
    ).to(p.dtype)
    order = memory_format(layout, 2)
    x = torch.randn(p.input_shape, device="cuda", dtype=p.dtype).contiguous(memory_format=order).requires_grad_()
    g = torch.randn(p.output_shape, device="cuda", dtype=p.dtype).contiguous(memory_format=order)
    names: set[str] = set()
    launch = Launcher.__call__

    def noted(self: Launcher, *arguments: Any, **named: Any) -> None:
        names.add(self.kernel.name)
        launch(self, *arguments, **named)

    monkeypatch.setattr(Launcher, "__call__", noted)

    def step() -> tuple[Tensor, ...]:
        out = module(x)
        return (out.detach(), *torch.autograd.grad(out, (x, module.weight), g))

    with upconv.strict(True):
        first = step()
        assert all(map(torch.equal, first, step()))
        assert all(map(torch.equal, first, replayed(step)))
    assert layout == "channels_last" or entries & names
    source, weight = x.detach(), module.weight.detach()
    truth = reference.forward(p, source, weight, None), *reference.gradients(p, g, source, weight)
    for found, exact in zip(first, truth):
        assert reference.relative_error(found, exact) < (1e-3 if p.dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("pass_", ["grad-input", "grad-weight"])
def test_without_memory_pytorchs_error_rises(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other kernel's results, which would round otherwise, come in the place of those on rearranged tensors."""
    p = Problem.make(4, 56, 1, (64, 64), 9, 3, 4, 2, precision="tf32", pass_=pass_)
    inner = rearranged.choose(unshuffle.rearranged(p), gpu(0))
    assert not isinstance(inner, str)
    choice = rearranged.Choice("unshuffle", inner, p, Cost(1e-5))

    def short(self: Any, *_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.Tensor, "new_empty_strided", short)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        assert_computes(choice, None, 0)


# --- sums that round -------------------------------------------------------------------------------------------------

# Of 32 (a tap's) to 864 products, which PyTorch adds on CUDA cores: the shortest have its least errors.
SHORT_SUMS = {
    "3-D s2": Problem.make(2, 32, 32, (8, 16, 64), 3, 2, 1),
    "3-D s2 g4": Problem.make(2, 32, 32, (6, 12, 48), (3, 5, 7), 2, (1, 2, 3), 1, 1, 4),
    "3-D k2 s2": Problem.make(2, 64, 32, (8, 32, 64), 2, 2),
    "2-D k3": Problem.make(2, 32, 64, (64, 64), 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHORT_SUMS)
def test_ieee_errors_are_at_most_twice_pytorchs(name: str, layout: Layout) -> None:
    """By sums of every length between additions in float32, by wgmma and by mma.sync."""
    p = SHORT_SUMS[name].with_(precision="ieee", layout=layout)
    x, w = (torch.randn(shape, device="cuda") for shape in (p.input_shape, p.weight_shape))
    x = laid_out(x, p)
    truth = reference.forward(p, x, w, None)
    convolution: Any = getattr(torch.nn.functional, f"conv_transpose{p.rank}d")
    with precision_flags("ieee"):
        theirs = convolution(x, w, None, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    least = reference.relative_error(theirs, truth)
    every = [*gather_search.candidates(p, gpu(0)), *gather_search.candidates(p, gpu(0), wgmma=False)]
    kinds = {(t.wgmma, t.taps_unrolled * t.k_steps): t for t in every}
    assert len(kinds) > 1
    for tiling in kinds.values():
        prepared = gather.Choice(tiling, p, gpu(0)).prepare(0)
        out = laid_out(torch.full(truth.shape, math.nan), p).cuda()
        prepared.run(x, prepared.pack(w), None, out)
        assert reference.relative_error(out, truth) <= 2 * least, tiling


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pass_", ["fwd", "grad-input", "grad-weight"])
@pytest.mark.parametrize(("channels", "groups"), [(8, 1), (4, 4)])
def test_batches_beyond_65535(channels: int, groups: int, pass_: Pass, layout: Layout) -> None:
    """No dimension of a grid but the first may follow the batch."""
    p = Problem.make(
        70_001, channels, channels, (2, 4), 2, 2, groups=groups, dtype=torch.bfloat16, precision="bf16",
        layout=layout, pass_=pass_,
    )  # fmt: skip
    found = [choice for choice in families.choose(p, gpu(0)).values() if not isinstance(choice, str)]
    assert found and planner.select(p, planner.cuda_device(0)).choice in found
    for choice in found:
        assert_computes(choice, None, 0, p=p)
