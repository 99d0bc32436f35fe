"""Gradients of strided layers as layers without a stride: the kernels around them, the choice, numbers on a GPU."""

from __future__ import annotations

import math
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import upconv
from conftest import HOST, Stubs, host_program, instance_header, needs_gxx, replayed, seeds
from upconv import cpu, planner, reference
from upconv.cuda import families
from upconv.cuda.compile import jit
from upconv.cuda.gemm import gather
from upconv.cuda.gpu import A100, H200, Gpu, gpu
from upconv.cuda.rearrange import unshuffle
from upconv.cuda.wgrad import wgrad
from upconv.problem import Layout, Precision, Problem, output_length

needs_nvrtc = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))

FSRCNN = Problem.make(16, 56, 1, (128, 128), 9, 3, 4, 2, bias=False)
DTYPES = {"tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"tf32": 1e-3, "bf16": 4e-3, "fp16": 6e-4}
LAYOUTS: tuple[Layout, ...] = ("nchw", "channels_last")


def as_(p: Problem, precision: Precision, pass_: Any, layout: Layout = "nchw") -> Problem:
    return p.with_(dtype=DTYPES[precision], precision=precision, pass_=pass_, layout=layout, bias=False)


def draw(r: random.Random, layout: Layout, least: int = 1) -> Problem:
    """Strides of up to 4, kernels shorter and longer than them, any padding and output padding."""
    while True:
        rank = r.choice((2, 2, 3) if layout == "channels_last" else (1, 2, 2, 3))
        axes = []
        for _ in range(rank):
            stride, kernel = r.choice((1, 2, 2, 3, 4)), r.randint(1, 9 if rank < 3 else 4)
            size, output_padding = r.randint(1, 9 if rank == 3 else 20), r.randrange(stride)
            free = output_length(size, kernel, stride, 0, output_padding, 1)
            axes.append((size, kernel, stride, r.randint(0, min(6, (free - 1) // 2)), output_padding))
        size, kernel, stride, padding, output_padding = zip(*axes)
        most = 64 // math.prod(stride)
        if math.prod(stride) == 1 or most < 1:
            continue
        channels = r.randint(least, 40), r.randint(1, min(5, most))
        return Problem.make(
            r.randint(1, 3), *channels, size, kernel, stride, padding, output_padding, bias=False, layout=layout
        )


def in_layout(t: Tensor, layout: Layout) -> Tensor:
    return t.contiguous(memory_format=cpu.memory_format(layout, t.dim() - 2))


def forced(p: Problem, device: Gpu) -> unshuffle.Choice:
    """The gradients without the stride, whatever they cost."""
    q = unshuffle.unstrided(p)
    inner = gather.choose(q, device) if p.pass_ == "grad-input" else wgrad.choose(q, device)
    assert not isinstance(inner, str), inner
    return unshuffle.Choice(inner, p, 0.0)


# --- the arithmetic, by the kernels on the host ----------------------------------------------------------------------


class OnHost:
    """A layer's kernels around the inner layer's, compiled for the host."""

    def __init__(self, p: Problem, folder: Path) -> None:
        text = instance_header("unshuffle.cu", unshuffle.constants(p), "Unshuffle")
        (folder / "kernel.h").write_text(text)
        self.program = host_program(HOST / "unshuffle.cpp", folder)

    def __call__(self, name: str, count: int, *more: int, given: tuple[Tensor, ...]) -> Tensor:
        """So many elements from a kernel, of tensors as they lie in memory."""
        data = b"".join(bytes(t.untyped_storage()) for t in given)
        arguments = [name, str(count), *map(str, more)]
        done = subprocess.run([str(self.program), *arguments], input=data, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32)


@needs_gxx
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", seeds(5, 10))
def test_gradients_without_the_stride_are_the_strided_layers(seed: int, layout: Layout, tmp_path: Path) -> None:
    r = random.Random(f"{seed} {layout}")
    p = draw(r, layout).with_(pass_="grad-input")
    q = unshuffle.unstrided(p)
    assert q.stride == (1,) * p.rank and q.size == p.size
    kernels = OnHost(p, tmp_path)
    x, g, w = (torch.randn(s) for s in (p.input_shape, p.output_shape, p.weight_shape))
    w = in_layout(w, r.choice(LAYOUTS)) if p.rank > 1 else w
    full = (1,) * (3 - p.rank)
    strides = torch.empty(q.output_shape).contiguous(memory_format=cpu.memory_format(layout, p.rank)).stride()
    sizes = (*full, *p.out_size, *full, *q.out_size)
    of_weight = (*w.stride()[:2], *(0,) * (3 - p.rank), *w.stride()[2:])
    counts = math.prod(q.output_shape), math.prod(q.weight_shape)
    g = in_layout(g, layout)
    alone = kernels("unshuffle", counts[0], *sizes, given=(g,))
    both = kernels("both", sum(counts), w.numel(), counts[1], *of_weight, *sizes, given=(w, g))
    assert torch.equal(both[counts[1] :], alone)
    grad, weight = alone.as_strided(q.output_shape, strides), both[: counts[1]].view(q.weight_shape)
    inner_input, inner_weight, _ = reference.gradients(q, grad, x, weight)
    truth_input, truth_weight, _ = reference.gradients(p, g, x, w)
    assert reference.relative_error(inner_input, truth_input) < 1e-12
    inner_weight = inner_weight.float().contiguous()
    folded = kernels("fold", w.numel(), *of_weight, given=(inner_weight,)).as_strided(p.weight_shape, w.stride())
    assert reference.relative_error(folded, truth_weight) < 1e-6


def test_the_layer_without_a_stride_has_no_more_pixels_than_needed() -> None:
    q = unshuffle.unstrided(as_(FSRCNN, "tf32", "grad-input"))
    assert (q.out_channels, q.kernel, q.padding, q.out_size) == (9, (3, 3), (0, 0), (130, 130))
    q = unshuffle.unstrided(as_(FSRCNN, "bf16", "grad-input", "channels_last"))
    assert (q.out_channels, q.layout) == (16, "channels_last")
    dcgan = as_(Problem.make(8, 64, 3, (32, 32), 4, 2, 1), "tf32", "grad-weight", "channels_last")
    assert unshuffle.unstrided(dcgan).out_size == (33, 33)
    cropped = as_(Problem.make(8, 64, 3, (32, 32), 8, 2, 5), "tf32", "grad-weight")
    assert unshuffle.unstrided(cropped).padding == (2, 2) and unshuffle.unstrided(cropped).out_size == (31, 31)


@needs_nvrtc
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_kernels_compile_without_spills(precision: Precision) -> None:
    r = random.Random(precision)
    for p in (FSRCNN, draw(r, "nchw"), draw(r, "channels_last")):
        code = unshuffle.unit(as_(p, precision, "grad-input", p.layout))
        needs = jit.inspect(jit.cubin(code.source, "90a", code.label))
        assert set(needs) == set(code.entries)
        assert all(registers <= 64 and not local for registers, local, _ in needs.values())


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("pass_", ["grad-input", "grad-weight"])
def test_fsrcnns_gradients_are_computed_without_the_stride(pass_: Any, precision: Precision, layout: Layout) -> None:
    p = as_(FSRCNN, precision, pass_, layout)
    selected = planner.select(p, planner.Device("cuda", gpu=H200))
    choice = selected.choice
    assert selected.name == "unshuffle" and isinstance(choice, unshuffle.Choice)
    assert isinstance(choice.inner, gather.Choice if pass_ == "grad-input" else wgrad.Choice)
    assert "3x3 taps of" in selected.candidates[0].reason and "wgmma" in selected.candidates[0].reason
    others = families.choose(p, H200)
    assert choice.seconds < min(c.seconds for n, c in others.items() if not isinstance(c, str) and n != "unshuffle")
    sources = {u.source for u in choice.sources()}
    assert unshuffle.unit(p).source in sources and choice.inner.sources()[0].source in sources


def test_what_keeps_its_stride_says_why() -> None:
    p = as_(FSRCNN, "bf16", "grad-input")

    slow = families.choose(p, H200)["staged"]

    def why(p: Problem, device: Any = H200, otherwise: Any = slow, general: bool = False) -> str:
        found = unshuffle.choose(p, device, otherwise, general)
        assert isinstance(found, str), found
        return found

    assert "packed weights" in why(p.with_(pass_="fwd"))
    assert "compute capability 9.0" in why(p, A100)
    assert "TF32 and 16 bits" in why(p.with_(dtype=torch.float32, precision="ieee"))
    assert "no stride" in why(p.with_(stride=(1, 1), output_padding=(0, 0)))
    assert "without groups" in why(as_(Problem.make(2, 4, 4, (9, 9), 4, 2, groups=2), "bf16", "grad-input"))
    assert "without groups" in why(as_(Problem.make(2, 4, 4, (9, 9), 4, 2, dilation=2), "bf16", "grad-input"))
    many = as_(Problem.make(2, 4, 17, (9, 9), 4, 2), "bf16", "grad-input")
    on_tensor_cores = families.choose(many, H200)["gather"]
    assert "17 channels in 4 phases are more than 64" in why(many, otherwise=on_tensor_cores)
    assert "no kernel for the layer as it is" in why(p, otherwise=None)
    few = Problem.make(4, 64, 1, (128, 128), 9, (1, 2), 4)
    assert "8 channels with zeros" in why(as_(few, "bf16", "grad-input", "channels_last"))
    whole = as_(
        Problem.make(31, 128, 1, (601, 1801), 8, 8), "bf16", "grad-input"
    )  # 64 short of 2^31, and 8,192 weights
    q = unshuffle.unstrided(whole)
    assert math.prod(q.output_shape) < 2**31 <= math.prod(q.output_shape) + math.prod(q.weight_shape)
    assert "2^31" in why(whole) and unshuffle.refusal(whole.with_(batch=30), H200) is None
    assert "size of the input" in why(p, general=True)
    small = as_(Problem.make(2, 8, 1, (8, 8), 4, 2), "bf16", "grad-input")
    assert "its bytes alone" in why(small, otherwise=families.choose(small, H200)["gather"])
    dcgan = as_(Problem.make(128, 64, 3, (32, 32), 4, 2, 1), "tf32", "grad-weight")
    wgrad: Any = families.choose(dcgan, H200)["wgrad"]
    assert "too little faster" in why(dcgan, otherwise=replace(wgrad, seconds=3.5e-5))


def test_kernels_too_large_for_tensor_cores_lose_their_stride() -> None:
    """However many phases there are: FCN-32s' last layer, whose gradient takes CUDA cores 16 ms."""
    p = as_(Problem.make(4, 21, 21, (16, 16), 64, 32, 16), "bf16", "grad-input")
    choice = planner.select(p, planner.Device("cuda", gpu=H200)).choice
    assert isinstance(choice, unshuffle.Choice) and choice.inner.problem.kernel == (2, 2)
    assert choice.inner.problem.out_channels == 21 * 32 * 32
    forward = planner.select(p.with_(pass_="fwd"), planner.Device("cuda", gpu=H200))
    assert forward.name == "gather" and forward.choice is not None and forward.choice.seconds < 2e-4


@pytest.mark.parametrize("pass_", ["grad-input", "grad-weight"])
def test_batches_stay_what_they_are_without_their_stride(pass_: str) -> None:
    """The kernels around go by the inner problem's sizes, so that it is none other of the same bytes (`batches`)."""
    for layer in (
        Problem.make(64, 384, 3, (28, 28), 8, 8),  # its images would lie one below the other,
        Problem.make(64, 768, 3, (14, 14), 16, 16),
        Problem.make(256, 768, 4, (4, 4), 3, 2, 1),  # or side by side
    ):
        p = as_(layer, "bf16", pass_, "channels_last")
        q = unshuffle.unstrided(p)
        choice = families.choose(p, H200)["unshuffle"]
        if isinstance(choice, str):
            inner = gather.choose(q, H200) if pass_ == "grad-input" else wgrad.choose(q, H200)
            assert not isinstance(inner, str)
            choice = unshuffle.Choice(inner, p, 0.0)
        assert isinstance(choice, unshuffle.Choice)
        assert choice.inner.problem == q and not q.batch_as_width and q.batch == p.batch


def test_sources_hold_every_kernel_that_runs() -> None:
    """Expanded weights of one tap lie as boxes of weights want them, others are packed."""
    one = as_(Problem.make(32, 64, 4, (128, 128), 2, 2), "bf16", "grad-input", "channels_last")
    for p, boxed in ((one, True), (as_(FSRCNN, "bf16", "grad-input", "channels_last"), False)):
        choice = forced(p, H200)
        inner = choice.inner.sources()
        assert isinstance(choice.inner, gather.Choice) and choice.inner.boxable and len(inner) == 2
        sources = [u.source for u in choice.sources()]
        assert inner[0].source in sources and (inner[1].source in sources) == boxed


# --- launches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pass_", ["grad-input", "grad-weight"])
def test_kernels_are_loaded_ahead_and_launched_in_order(
    pass_: Any, layout: Layout, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded at a call; the inner kernel may begin beside its packing, and beside nothing else.

    Without memory PyTorch's error rises: no other kernel's results come in their place.
    """
    p = as_(FSRCNN, "bf16", pass_, layout)
    choice = forced(p, H200)
    prepared = choice.prepare(0)
    q = unshuffle.unstrided(p)
    prepared.load()
    stubs.loaded.clear()
    x, g, w = (
        in_layout(torch.empty(s, dtype=p.dtype), layout) for s in (p.input_shape, p.output_shape, p.weight_shape)
    )
    blocks = -(-math.prod(q.output_shape) // 256)
    for dtype, suffix in ((torch.bfloat16, ""), (torch.float32, "_float")):
        stubs.launched.clear()
        weight = w.to(dtype)
        if p.pass_ == "grad-input":
            assert prepared.pack(weight) is weight
            prepared.run(g, weight, None, x, fresh=True)
            more = -(-math.prod(q.weight_shape) // 256)
            assert stubs.launched[0] == (f"unshuffle_and_expand{suffix}", blocks + more, False)
            assert stubs.names()[1:] == [f"pack{suffix}", "gather"] and stubs.launched[-1][2]
        else:
            prepared.run(x, g, weight, lasting=True)
            inner = stubs.launched[1][0]
            assert isinstance(choice.inner, wgrad.Choice)
            assert inner.startswith("wgrad") and inner.endswith(" together") == choice.inner.together
            assert stubs.launched[0] == ("unshuffle", blocks, False)
            assert stubs.launched[-1] == (f"fold{suffix}", -(-w.numel() // 256), False)
    assert not stubs.loaded

    def short(self: Any, *_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.Tensor, "new_empty_strided", short)
    stubs.launched.clear()
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        prepared.run(g, w, None, x) if p.pass_ == "grad-input" else prepared.run(x, g, w)
    assert not stubs.launched and not stubs.loaded
    stated = (math.prod(q.output_shape) + math.prod(q.weight_shape)) * p.dtype.itemsize
    assert choice.temporary_bytes == stated and f"{stated / 1e6:.3g} MB of temporaries" in choice.summary


# --- on a GPU --------------------------------------------------------------------------------------------------------


def poison() -> None:
    """Fills what the allocator hands out next, small blocks and large ones, with NaN."""
    torch.cuda.empty_cache()
    held = [torch.full((2**17,), math.nan, device="cuda") for _ in range(64)]
    held += [torch.full((2**26,), math.nan, device="cuda")]
    del held


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("seed", range(5))
def test_random_gradients_without_the_stride(seed: int, precision: Precision, layout: Layout) -> None:
    """Into results of both memory formats, amid NaNs, from weights of both and in float32."""
    if gpu(0).capability[0] != 9:
        pytest.skip("for compute capability 9.0")
    r = random.Random(f"{seed} {precision} {layout}")
    layer = draw(r, layout, 4)
    p = as_(layer, precision, "grad-input", layout)
    x, g, w = (torch.randn(s).to(p.dtype) for s in (p.input_shape, p.output_shape, p.weight_shape))
    truth_input, truth_weight, _ = reference.gradients(p, g, x, w)
    on_x, on_g = (in_layout(t.cuda(), layout) for t in (x, g))
    prepared = forced(p, gpu(0)).prepare(0)
    results = []
    for of_weight in dict.fromkeys(("nchw", layout) if p.rank > 1 else ("nchw",)):
        for weight in (w, w.float()) if p.dtype.itemsize == 2 else (w,):
            out = torch.full_like(on_x, math.nan)
            poison()
            prepared.run(on_g, prepared.pack(in_layout(weight.cuda(), of_weight)), None, out)
            assert reference.relative_error(out.cpu(), truth_input) < BOUNDS[precision], p
            results.append(out)
    assert all(torch.equal(results[0], other) for other in results)
    by_weight = forced(p.with_(pass_="grad-weight"), gpu(0)).prepare(0)
    for of_weight in dict.fromkeys(("nchw", layout) if p.rank > 1 else ("nchw",)):
        for dtype in dict.fromkeys((p.dtype, torch.float32)):
            out = in_layout(torch.full(p.weight_shape, math.nan, device="cuda", dtype=dtype), of_weight)
            poison()
            by_weight.run(on_x, on_g, out)
            assert reference.relative_error(out.cpu(), truth_weight) < BOUNDS[precision], p
            again = torch.full_like(out, math.nan)
            by_weight.run(on_x, on_g, again)
            assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["tf32", "bf16", "autocast"])
def test_a_layers_training_step_goes_without_the_stride(kind: str, layout: Layout, monkeypatch: Any) -> None:
    """Through autograd, twice with the same bits, in a CUDA graph; without memory PyTorch's error rises."""
    if gpu(0).capability[0] != 9:
        pytest.skip("for compute capability 9.0")
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32")
    precision: Precision = "tf32" if kind == "tf32" else "bf16"
    p = as_(FSRCNN, precision, "fwd", layout)
    module = upconv.ConvTranspose2d(56, 1, 9, 3, 4, 2, bias=False, device="cuda")
    x, g = (in_layout(torch.randn(s, device="cuda"), layout) for s in (p.input_shape, p.output_shape))
    if kind == "bf16":
        module, x = module.bfloat16(), x.bfloat16()
    g = g.to(p.dtype)
    x.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=kind == "autocast"):
            out = module(x)
        return torch.autograd.grad(out, (x, module.weight), g)

    poison()
    first = step()
    plan = planner.plan(p, planner.cuda_device(0))
    assert plan.grad_input.name == plan.grad_weight.name == "unshuffle"
    operands = (t.detach().to(p.dtype).cpu() for t in (g, x, module.weight))
    truths = reference.gradients(p, *operands)
    for found, truth, t in zip(first, truths, (x, module.weight)):
        assert found.dtype is t.dtype and reference.relative_error(found.cpu(), truth) < BOUNDS[precision]
    assert all(torch.equal(a, b) for a, b in zip(first, step()))
    assert all(torch.equal(a, b) for a, b in zip(first, replayed(step)))

    def short(self: Any, *_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.Tensor, "new_empty_strided", short)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        step()
