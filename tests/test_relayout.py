"""Gradients on copies in channels_last: the copying kernels on the host and on a GPU, the choice, short memory."""

from __future__ import annotations

import math
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import upconv
from conftest import HOST, Stubs, diagonal, host_program, instance_header, needs_gxx, replayed
from upconv import cpu, planner, reference
from upconv.cuda import families
from upconv.cuda.compile import jit
from upconv.cuda.gpu import A100, H200, Gpu, gpu
from upconv.cuda.launches import Given, Map, Pointer, Scratch
from upconv.cuda.pixels import implicit
from upconv.cuda.rearrange import around, relayout
from upconv.cuda.wgrad import wgrad
from upconv.problem import Layout, Precision, Problem

needs_nvrtc = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))

KB73 = Problem.make(4, 32, 32, (32, 64, 128), 3, 2, 1)
WIDER = Problem.make(4, 64, 64, (32, 64, 128), 3, 2, 1)
DCGAN = Problem.make(128, 512, 256, (4, 4), 4, 2, 1)
DTYPES = {"tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"tf32": 1e-3, "bf16": 4e-3, "fp16": 6e-4}


def as_(p: Problem, precision: Precision, pass_: Any) -> Problem:
    return p.with_(dtype=DTYPES[precision], precision=precision, pass_=pass_, bias=False)


def forced(p: Problem, device: Gpu) -> relayout.Choice:
    """The gradient on copies, whatever it costs."""
    inner = around.choose(relayout._wider(p.lifted).with_(layout="channels_last"), device, others=True)
    assert not isinstance(inner, str), inner
    return relayout.Choice(inner, p, 0.0)


# --- the copying kernels ---------------------------------------------------------------------------------------------


def program(element: int, tile: tuple[int, int], folder: Path, image: int = 0) -> Path:
    constants = {"element": element, "tile_c": tile[0], "tile_p": tile[1], "image": image}
    (folder / "kernel.h").write_text(instance_header("relayout.cu", constants, "Relayout"))
    return host_program(HOST / "relayout.cpp", folder)


@needs_gxx
@pytest.mark.parametrize(
    ("tile", "dtype"),
    diagonal([(8, 256), (16, 256), (64, 64), (32, 128)], [torch.bfloat16, torch.float32]),
    ids=str,
)
def test_copies_on_the_host_are_right_and_write_nothing_else(
    tile: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Rows that begin anywhere, one pixel to several tiles, channels beyond a tile and short of one.

    Nor is a page read behind a tensor that ends with one.
    """
    r = random.Random(f"{tile} {dtype}")
    kernel = program(dtype.itemsize, tile, tmp_path)
    each = 16 // dtype.itemsize
    for pixels in (1, 2, tile[1] - 1, tile[1], tile[1] + 1, 2 * tile[1] + r.randrange(1, 64)):
        batch, channels, offset = r.randint(1, 3), each * r.randint(1, 2 * tile[0] // each), r.randrange(each)
        for some in (channels, channels - r.randrange(1, each)):  # the last 16 bytes of a pixel filled, or not
            blocks = batch * -(-some // tile[0]) * -(-pixels // tile[1])
            check_copies(kernel, torch.randn(batch, some, pixels).to(dtype), blocks, pixels, (offset, -1))


@needs_gxx
@pytest.mark.parametrize(("image", "precision"), diagonal([2, 6, 16, 48, 64], ["bf16", "tf32"]))
def test_copies_of_several_images_by_a_block(image: int, precision: Precision, tmp_path: Path) -> None:
    """Images that end within a block's tile or with it, the last tile short of some, channels as above."""
    dtype = DTYPES[precision]
    r = random.Random(f"{image} {dtype}")
    each = 16 // dtype.itemsize
    channels, pixels, found = relayout.tile(DCGAN.with_(dtype=dtype, precision=precision), 64, (image, 1))
    assert found == image
    kernel = program(dtype.itemsize, (channels, pixels), tmp_path, image)
    for batch in (1, 2, 3, pixels // image, pixels // image + 1, 2 * pixels // image + r.randrange(1, 9)):
        for less in (0, r.randrange(1, each)):
            x = torch.randn(batch, each * r.randint(1, 2 * channels // each) - less, image).to(dtype)
            blocks = -(-x.shape[1] // channels) * -(-batch * image // pixels)
            check_copies(kernel, x, blocks, batch * image, (2 * r.randrange(each // 2), -1))


def check_copies(kernel: Path, x: torch.Tensor, blocks: int, pixels: int, offsets: tuple[int, ...]) -> None:
    """Of images of channels of pixels, to channels_last and back; ``offsets``: where the contiguous one begins.

    Of channels that are no whole 16 bytes, to channels_last and from it into wider pixels.
    """
    each = 16 // x.dtype.itemsize
    narrow, channels = x.transpose(1, 2).contiguous(), x.shape[1]
    last = torch.nn.functional.pad(narrow, (0, -channels % each))
    width, every = last.shape[2], x.shape[0] * x.shape[2]
    cases = [(0, x, last, blocks, pixels)]
    if width == channels:
        cases.append((1, last, x, blocks, pixels))
    else:
        cases.append((2, narrow, last, -(-every * width // each // relayout.THREADS), every))
    for mode, source, expected, grid, count in cases:
        for at in offsets:
            data = source.flatten().view(torch.uint8).numpy().tobytes()
            arguments = [str(v) for v in (mode, grid, channels, count, at, width)]
            done = subprocess.run([str(kernel), *arguments], input=data, capture_output=True)
            assert done.returncode == 0, done.stderr.decode()
            found = torch.frombuffer(bytearray(done.stdout), dtype=x.dtype).view(expected.shape)
            assert torch.equal(found, expected), (x.shape, at, mode)


def test_a_block_has_no_more_channels_and_pixels_than_needed() -> None:
    p = as_(DCGAN, "bf16", "grad-weight")
    assert relayout.tile(p, 256, (10, 8)) == (64, 128, 0) and relayout.tile(p, 256, (1, 1)) == (64, 64, 0)
    assert relayout.tile(p, 8, (100, 100)) == (8, 2048, 0) and relayout.tile(p, 8, (3, 3)) == (8, 256, 0)
    assert relayout.tile(p, 256, (8, 8)) == (64, 64, 64) and relayout.tile(p, 8, (2, 3)) == (8, 256, 6)
    assert relayout.tile(as_(KB73, "tf32", "grad-input"), 24, (63, 127, 255)) == (32, 128, 0)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["90a", "80"])
def test_copying_kernels_compile_without_spills(arch: str) -> None:
    for precision in ("bf16", "tf32"):
        for channels, size in ((8, (999, 999)), (16, (40, 40)), (32, (64, 64)), (64, (99, 99)), (512, (4, 4))):
            p = as_(DCGAN, precision, "grad-input")
            code = relayout.unit(p, *relayout.tile(p, channels, size))
            needs = jit.inspect(jit.cubin(code.source, arch, code.label))
            assert set(needs) == set(code.entries)
            assert all(registers <= 64 and not local for registers, local, _ in needs.values())


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_wide_strides_and_short_rows_are_computed_on_copies(precision: Precision) -> None:
    for p, family in (
        (as_(WIDER, precision, "grad-input"), implicit.Choice),
        (as_(DCGAN, precision, "grad-weight"), wgrad.Choice),
    ):
        found = families.choose(p, H200)
        choice = found["relayout"]
        assert isinstance(choice, relayout.Choice) and isinstance(choice.inner, family)
        assert choice.inner.problem.layout == "channels_last"
        others = {name: c.seconds for name, c in found.items() if name != "relayout" and not isinstance(c, str)}
        assert choice.seconds < min(others.values())
        selected = planner.select(p, planner.Device("cuda", gpu=H200))
        assert selected.name == "relayout" and selected.choice == choice
        assert "copies in channels_last" in selected.candidates[0].reason


def test_what_is_not_computed_on_copies_says_why() -> None:
    kb73 = as_(KB73, "bf16", "grad-input")
    otherwise: Any = families.choose(kb73, H200)["gather"]

    def why(p: Problem, device: Any = H200, general: bool = False) -> str:
        found = relayout.choose(p, device, otherwise, general)
        assert isinstance(found, str), found
        return found

    assert "packed weights" in why(kb73.with_(pass_="fwd"))
    assert "memory format" in why(kb73.with_(layout="channels_last"))
    assert "memory format" in why(kb73.with_(layout="channels_last", pass_="grad-weight"))
    assert "memory format" in why(kb73.with_(layout="channels_last", out_channels=20))
    huge = Problem.make(2**14, 32, 20, (512, 512), 3, 2, 1, layout="channels_last")
    assert "wider pixels" in why(as_(huge, "bf16", "grad-weight"))
    assert "4096 taps" in why(as_(Problem.make(4, 21, 21, (16, 16), 64, 32), "bf16", "grad-weight"))
    assert "compute capability 9.0" in why(kb73, A100)
    assert "TF32 and 16 bits" in why(kb73.with_(dtype=torch.float32, precision="ieee"))
    assert "32 and 20 channels are no multiples of the 8" in why(
        as_(Problem.make(4, 32, 20, (32, 64, 128), 3, 2, 1), "bf16", "grad-input")
    )
    grouped = Problem.make(4, 32, 32, (32, 64, 128), 3, 2, 1, groups=2)
    assert "for the weight" in why(as_(grouped, "tf32", "grad-weight"))
    assert "copies alone" in why(as_(Problem.make(96, 64, 128, (128, 256), (3, 5)), "bf16", "grad-input"))
    assert "size of the input" in why(kb73, general=True)
    assert "no kernel without copies" in str(relayout.choose(kb73, H200, None))
    assert "do not overlap" in why(as_(Problem.make(16, 1024, 512, (32, 32), 2, 2), "bf16", "grad-input"))
    even = as_(Problem.make(16, 512, 256, (32, 32), 4, 2, 1), "bf16", "grad-input")
    otherwise = families.choose(even, H200)["gather"]
    assert "too little faster" in why(even)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_rows_that_begin_anywhere_are_copied_in_one_dimension_too(precision: Precision) -> None:
    """EnCodec's: 150 samples are no whole 16 bytes. As images of one row; weights of one dimension are no others."""
    p = as_(Problem.make(16, 512, 256, (150,), 16, 8, 4), precision, "grad-weight")
    choice = planner.select(p, planner.Device("cuda", gpu=H200)).choice
    assert isinstance(choice, relayout.Choice)
    q = choice.inner.problem
    assert (q.size, q.kernel, q.stride, q.padding, q.layout) == ((1, 150), (1, 16), (1, 8), (0, 4), "channels_last")
    assert q.macs == p.macs and q.out_size == (1, *p.out_size) and q.lifted is q


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_channels_off_16_bytes_are_copied_into_wider_pixels(layout: Layout, precision: Precision) -> None:
    """For the weight alone: Keypoint R-CNN's 17 in either memory format, FlowNet's 770 in channels_last."""
    for p, channels in (
        (Problem.make(100, 512, 17, (14, 14), 4, 2, 1, layout=layout), (512, 24 if precision == "bf16" else 20)),
        (Problem.make(8, 770, 128, (24, 32), 4, 2, 1, layout=layout), (776 if precision == "bf16" else 772, 128)),
    ):
        if p.in_channels == 770 and layout == "nchw":
            continue  # whose rows boxes bring
        choice = planner.select(as_(p, precision, "grad-weight"), planner.Device("cuda", gpu=H200)).choice
        assert isinstance(choice, relayout.Choice)
        q = choice.inner.problem
        assert (q.in_channels, q.out_channels) == channels and q.layout == "channels_last"
        assert "channels as" in choice.summary
        other = planner.select(as_(p, precision, "grad-input"), planner.Device("cuda", gpu=H200)).choice
        assert not isinstance(other, relayout.Choice)


def test_sources_are_the_copies_and_the_channels_last_kernels() -> None:
    """Tiles of both tensors, and for weights of one tap, which boxes may take as they lie, both forms of the kernel."""
    wide = as_(Problem.make(4, 24, 64, (32, 64, 128), 3, 2, 1), "bf16", "grad-input")
    one = as_(Problem.make(4, 64, 64, (64, 64), 1, 2), "bf16", "grad-input")
    for p, tiles, of_inner in (
        (as_(KB73, "bf16", "grad-input"), [(32, 512, 0)], 1),
        (as_(DCGAN, "bf16", "grad-weight"), [(64, 64, 16), (64, 64, 64)], None),
        (wide, [(32, 512, 0), (64, 256, 0)], 1),
        (one, [(64, 256, 0)], 2),
    ):
        choice = forced(p, H200)
        inner = choice.inner.sources()
        units = choice.sources()
        copying = [relayout.unit(p, *tile) for tile in tiles]
        assert [u.source for u in units[: len(tiles)]] == [u.source for u in copying]
        assert [u.source for u in units[len(tiles) :]] == [u.source for u in inner[:of_inner]]


# --- launches --------------------------------------------------------------------------------------------------------


def test_wider_pixels_are_computed_by_the_chosen_kernel(stubs: Stubs) -> None:
    """Its blocks add up together where the planner counts on that, and nothing is loaded at a call."""
    p = as_(Problem.make(100, 512, 17, (14, 14), 4, 2, 1, layout="channels_last"), "bf16", "grad-weight")
    choice = planner.select(p, planner.Device("cuda", gpu=H200)).choice
    assert isinstance(choice, relayout.Choice) and isinstance(choice.inner, wgrad.Choice) and choice.inner.together
    prepared = choice.prepare(0)
    prepared.load()
    stubs.loaded.clear()
    x, g, w = (torch.empty(s, dtype=p.dtype) for s in (p.input_shape, p.output_shape, p.weight_shape))
    prepared.run(x, g, w, True)
    assert stubs.names() == ["widen", "wgrad_whole together"] and not stubs.loaded


@pytest.mark.parametrize("p", [as_(KB73, "bf16", "grad-input"), as_(DCGAN, "bf16", "grad-weight")], ids=str)
def test_copies_are_launched_around_the_inner_kernel(p: Problem, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded at a call; the inner kernel may begin beside its packing, and beside nothing else.

    Without memory PyTorch's error rises: no other kernel's results come in their place.
    """
    choice = forced(p, H200)
    prepared = choice.prepare(0)
    prepared.load()
    stubs.loaded.clear()
    x, g, w = (torch.empty(s, dtype=p.dtype) for s in (p.input_shape, p.output_shape, p.weight_shape))

    def run() -> None:
        stubs.launched.clear()
        if p.pass_ == "grad-input":
            prepared.run(g, prepared.pack(w), None, x, fresh=True)
        else:
            prepared.run(x, g, w)

    run()
    blocks = [
        (1 if image else p.batch)
        * -(-channels // of_channels)
        * -(-math.prod(size) * (p.batch if image else 1) // pixels)
        for channels, size in ((p.in_channels, p.size), (p.out_channels, p.out_size))
        for of_channels, pixels, image in [relayout.tile(p, channels, size)]
    ]
    if p.pass_ == "grad-input":
        assert stubs.names() == ["to_channels_last", "pack", "gather", "to_contiguous"]
        assert [stubs.launched[i][1] for i in (0, -1)] == blocks[::-1] and stubs.launched[2][2]
    else:
        assert stubs.names()[:2] == ["to_channels_last"] * 2 and stubs.names()[2].startswith("wgrad")
        assert [grid for _, grid, _ in stubs.launched[:2]] == blocks
    assert not stubs.loaded

    def short(self: Any, *_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for copies")

    monkeypatch.setattr(torch.Tensor, "new_empty_strided", short)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for copies"):
        run()
    assert not stubs.launched and not stubs.loaded


@pytest.mark.parametrize("p", [
    as_(KB73, "bf16", "grad-input"), as_(DCGAN, "bf16", "grad-weight"),
    as_(Problem.make(100, 512, 17, (14, 14), 4, 2, 1, layout="channels_last"), "bf16", "grad-weight"),
], ids=str)  # fmt: skip
def test_the_memory_for_copies_is_stated(p: Problem) -> None:
    """As many bytes as its launches have for them, and in the summary."""
    choice = forced(p, H200)
    arguments = [a for launch in choice.launches(Given("contiguous")) for a in launch.arguments]
    scratch = {a.operand for a in arguments if isinstance(a, Pointer | Map) and isinstance(a.operand, Scratch)}
    copies = sum(one.bytes for one in scratch if one.name.endswith("channels_last"))
    assert choice.temporary_bytes == copies > 0
    assert f"{copies / 1e6:.3g} MB of temporaries" in choice.summary


# --- on a GPU --------------------------------------------------------------------------------------------------------

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def draw(r: random.Random, precision: Precision, pass_: str) -> Problem:
    each = 16 // DTYPES[precision].itemsize
    rank = r.choice((1, 2, 2, 3))
    size = tuple(r.choice((1, 2, 3, 5, 8, 9, 17, 7 if rank == 3 else 33)) for _ in range(rank))
    kernel = tuple(r.randint(1, 4) for _ in range(rank))
    stride = tuple(r.choice((1, 2, 2, 3)) for _ in range(rank))
    groups = r.choice((1, 1, 2)) if pass_ == "grad-input" else 1
    channels = [each * groups * r.randint(1, 80 // each) for _ in range(2)]
    layout: Layout = "nchw"
    if pass_ == "grad-weight" and r.random() < 0.6:  # of some the last 16 bytes of a pixel are not filled
        channels = [n - r.choice((0, r.randrange(each))) for n in channels]
        if rank > 1 and any(n % each for n in channels):
            layout = r.choice(("nchw", "channels_last"))
    batch = r.choice((1, 2, 3, 4, 5, 11))
    return as_(Problem.make(batch, *channels, size, kernel, stride, 0, 0, 1, groups, layout=layout), precision, pass_)


def placed(t: torch.Tensor, offset: int, layout: Layout = "nchw") -> torch.Tensor:
    """The tensor on the GPU, amid NaNs, some elements off 16 bytes."""
    memory = torch.full((t.numel() + 64,), math.nan, device="cuda", dtype=t.dtype)
    strides = cpu.dense_strides(tuple(t.shape), cpu.memory_format(layout, t.dim() - 2))
    return memory[16 + offset : 16 + offset + t.numel()].as_strided(t.shape, strides).copy_(t)


@pytest.mark.parametrize("pass_", ["grad-input", "grad-weight"])
@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("seed", range(6))
class TestOnGpu:
    pytestmark = on_gpu

    def test_random_gradients_with_copies(
        self, seed: int, precision: Precision, pass_: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        r = random.Random(f"{seed} {precision} {pass_}")
        if gpu(0).capability[0] != 9:
            pytest.skip("copies are for compute capability 9.0")
        p = draw(r, precision, pass_)
        x, g, w = (torch.randn(s).to(p.dtype) for s in (p.input_shape, p.output_shape, p.weight_shape))
        truths = reference.gradients(p, g, x, w)
        truth = truths[0] if pass_ == "grad-input" else truths[1]
        prepared = forced(p, gpu(0)).prepare(0)
        on_x, on_g = (placed(t, r.randrange(8), p.layout) for t in (x, g))
        on_w = placed(w, r.randrange(8))

        real = torch.Tensor.new_empty_strided

        def allocate(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
            found = real(self, *given, **named)
            return found.fill_(-1 if found.dtype is torch.int32 else math.nan)  # words of which each is NaN

        monkeypatch.setattr(torch.Tensor, "new_empty_strided", allocate)
        results = []
        weights = (on_w, on_w.float()) if p.dtype.itemsize == 2 else (on_w,)
        for weight in weights:
            if p.pass_ == "grad-input":
                out = placed(torch.full(p.input_shape, math.nan, dtype=p.dtype), r.randrange(8))
                if weight.dtype is p.dtype or prepared.casts:
                    prepared.run(on_g, prepared.pack(weight), None, out)
            else:
                out = torch.full(p.weight_shape, math.nan, device="cuda", dtype=weight.dtype)
                prepared.run(on_x, on_g, out)
            assert reference.relative_error(out.cpu(), truth) < BOUNDS[precision], (p, weight.dtype)
            results.append(out)
        if p.pass_ == "grad-input" and len(results) == 2:
            assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_layers_training_step_takes_copies_and_is_right(autocast: bool) -> None:
    """Through autograd, twice with the same bits, under autocast with float32 weights, and in a CUDA graph."""
    if gpu(0).capability[0] != 9:
        pytest.skip("copies are for compute capability 9.0")
    layer = upconv.ConvTranspose2d(512, 256, 4, 2, 1, bias=False, device="cuda")
    x = torch.randn(128, 512, 4, 4, device="cuda")
    if not autocast:
        layer, x = layer.bfloat16(), x.bfloat16()
    x.requires_grad_()
    g = torch.randn(128, 256, 8, 8, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            out = layer(x)
        return torch.autograd.grad(out, (x, layer.weight), g)

    first, second = step(), step()
    device = planner.cuda_device(0)
    plan = planner.plan(Problem.make(128, 512, 256, (4, 4), 4, 2, 1, dtype=torch.bfloat16, bias=False), device)
    assert plan.grad_weight.name == "relayout"
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    p = plan.problem
    truths = reference.gradients(p, g.cpu(), x.detach().bfloat16().cpu(), layer.weight.detach().bfloat16().cpu())
    for found, truth, t in zip(first, truths, (x, layer.weight)):
        assert found.dtype is t.dtype and reference.relative_error(found.cpu(), truth) < BOUNDS["bf16"]
    assert all(torch.equal(a, b) for a, b in zip(first, replayed(step)))


def test_the_reference_is_what_the_cpu_computes() -> None:
    """The truth of the tests above, once beside PyTorch's operator."""
    p = as_(Problem.make(2, 8, 16, (5, 7), (3, 4), 2, 1), "tf32", "grad-input")
    x, g, w = (torch.randn(s) for s in (p.input_shape, p.output_shape, p.weight_shape))
    theirs = cpu.gradients(p, "native", g, x, w, (True, True, False))
    for ours, other in zip(reference.gradients(p, g, x, w), theirs):
        if other is not None:
            assert reference.relative_error(other, ours) < 1e-5
