"""Trains a DCGAN on real faces: a generator of transposed convolutions against a discriminator.

    python examples/train_dcgan.py                        # about a minute on two cores
    python examples/train_dcgan.py --device cuda --amp --width 128 --steps 3000
    python examples/train_dcgan.py --compare              # the same training once more with PyTorch's layers
    python examples/train_dcgan.py --quick                # a few seconds: everything works, nothing like a face yet

The networks are those of Radford, Metz and Chintala (Unsupervised Representation Learning with Deep Convolutional
Generative Adversarial Networks, ICLR 2016) for images of 32x32. They learn from the 100 faces that scikit-image carries
in its wheel (a part of Labeled Faces in the Wild, nothing is downloaded), mirrored, shifted and brightened at random.

The models are plain torch.nn; `upconv.accelerate(network, convolutions=True)` accelerates the convolutions of both in
place, transposed and plain ones, and nothing else changes. The curves of both losses and samples go to ``out/``; the
time of a step is printed with and without upconv.

Needs ``pip install 'upconv[examples]'``.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Annotated

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed

import torch
import torch.nn.functional as F
import typer
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from skimage import data
from torch import Tensor, nn

import upconv

SIDE = 32
LATENT = 64
RATE = 1e-3
SAMPLES = 64

console = Console()


class Device(str, Enum):
    """Where to compute."""

    cpu = "cpu"
    cuda = "cuda"


# --- faces -----------------------------------------------------------------------------------------------------------


def faces() -> Tensor:
    """scikit-image's 100 faces, ``(100, 1, 36, 36)`` in -1..1: a little larger than needed, to be shifted."""
    found = torch.from_numpy(data.lfw_subset()[:100]).float()[:, None]
    found = F.interpolate(found, size=(SIDE + 4, SIDE + 4), mode="bicubic", antialias=True)
    return (found * 2 - 1).clamp(-1, 1)


def draw_batch(images: Tensor, count: int) -> Tensor:
    """``(count, 1, 32, 32)`` random faces, each mirrored or not, shifted by up to 4 pixels and brightened a little."""
    chosen = images[torch.randint(len(images), (count,))]
    rows, columns = (torch.randint(5, (count, 1)) + torch.arange(SIDE) for _ in range(2))
    columns = torch.where(torch.rand(count, 1) < 0.5, columns, columns.flip(1))
    index = torch.arange(count)[:, None, None]
    cut = chosen[index, 0, rows[:, :, None], columns[:, None, :]][:, None]
    return (cut + 0.1 * torch.randn(count, 1, 1, 1)).clamp(-1, 1)


# --- the networks ----------------------------------------------------------------------------------------------------


def generator(width: int) -> nn.Sequential:
    """``(N, 64, 1, 1)`` random numbers to ``(N, 1, 32, 32)`` images."""
    return _initialised(
        nn.ConvTranspose2d(LATENT, 4 * width, 4, bias=False), nn.BatchNorm2d(4 * width), nn.ReLU(),  # 4x4
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),  # 8x8
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),  # 16x16
        nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh(),  # 32x32
    )  # fmt: skip


def discriminator(width: int) -> nn.Sequential:
    """``(N, 1, 32, 32)`` images to ``(N, 1, 1, 1)``: above 0 it takes the image for a real one."""
    return _initialised(
        nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(4 * width), nn.LeakyReLU(0.2),
        nn.Conv2d(4 * width, 1, 4),
    )  # fmt: skip


def _initialised(*layers: nn.Module) -> nn.Sequential:
    """As the paper has it: weights from N(0, 0.02), those of the norms around 1."""
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(layer.weight, 0.0, 0.02)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.02)
    return nn.Sequential(*layers)


class Gan:
    """Both networks with their optimizers.

    Args:
        makes: the generator.
        judges: the discriminator.
        amp: bfloat16 where autocast says so.
        rate: Adam's learning rate.
    """

    def __init__(self, makes: nn.Module, judges: nn.Module, amp: bool, rate: float = RATE) -> None:
        self.makes, self.judges, self.amp = makes, judges, amp
        self.optimizers = [torch.optim.Adam(net.parameters(), rate, betas=(0.5, 0.999)) for net in (makes, judges)]

    def step(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """One step of each network on ``(N, 1, 32, 32)`` and ``(N, 64, 1, 1)``; both losses before it."""
        with torch.autocast(real.device.type, torch.bfloat16, enabled=self.amp):
            made = self.makes(noise)
            judged = torch.cat([self.judges(images).flatten() for images in (real, made.detach())]).float()
        # 0.9: a discriminator that is never quite sure leaves the generator something to learn from.
        truth = torch.cat([torch.full((len(real),), 0.9), torch.zeros(len(real))]).to(real.device)
        loss_judge = self._learn(1, F.binary_cross_entropy_with_logits(judged, truth))
        with torch.autocast(real.device.type, torch.bfloat16, enabled=self.amp):
            fooled = self.judges(made).flatten().float()
        loss_made = self._learn(0, F.softplus(-fooled).mean())
        return loss_made, loss_judge

    def _learn(self, which: int, loss: Tensor) -> Tensor:
        for optimizer in self.optimizers:  # the generator's gradient also passes through the discriminator
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizers[which].step()
        return loss.detach()


def with_upconv(network: nn.Module) -> nn.Module:
    """The network with upconv's layers in place of torch.nn's, transposed and plain ones."""
    return upconv.accelerate(network, convolutions=True)


def train(width: int, images: Tensor, steps: int, batch: int, seed: int, device: str, amp: bool, ours: bool) -> tuple[
    Gan, list[tuple[float, float]]
]:  # fmt: skip
    """Trains from a seed, which also decides the faces and the noise; the networks and both losses of each step."""
    torch.manual_seed(seed)
    gan = Gan(generator(width).to(device), discriminator(width).to(device), amp)
    if ours:
        with_upconv(gan.makes)
        with_upconv(gan.judges)
    history = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training, upconv" if ours else "training, torch", total=steps, state="")
        for step in range(steps):
            real, noise = draw_batch(images, batch).to(device), torch.randn(batch, LATENT, 1, 1).to(device)
            history.append(gan.step(real, noise))
            if step % 10 == 9 or step == steps - 1:  # a GPU is waited for only now and then
                state = "generator {:.2f}  discriminator {:.2f}".format(*(loss.item() for loss in history[-1]))
                progress.update(task, completed=step + 1, state=state)
    return gan, [(made.item(), judged.item()) for made, judged in history]


# --- what comes of it ------------------------------------------------------------------------------------------------


def time_steps(gan: Gan, real: Tensor, noise: Tensor, rounds: int) -> dict[str, float]:
    """Milliseconds of a step with upconv's layers and with torch.nn's: medians, in turn, the first two left out."""
    runs: dict[str, Callable[[], object]] = {}
    for name, swap in (("torch", upconv.restore), ("upconv", with_upconv)):
        twin = Gan(swap(copy.deepcopy(gan.makes)), swap(copy.deepcopy(gan.judges)), gan.amp, rate=0.0)
        runs[name] = lambda twin=twin: twin.step(real, noise)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 2):
        for name, run in runs.items():
            _wait(real.device)
            start = time.perf_counter()
            run()
            _wait(real.device)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: median(series[2:]) for name, series in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def draw(path: Path, curves: dict[str, list[tuple[float, float]]], made: Tensor, real: Tensor) -> None:
    """Loss curves beside generated and real faces, ``(64, 1, 32, 32)`` each; the file appears whole or not at all."""
    figure, (left, *sheets) = plt.subplots(1, 3, figsize=(16, 5), layout="constrained", width_ratios=(1.3, 1, 1))
    for name, history in curves.items():
        style = "-" if name == "upconv" else ":"
        for i, (who, colour) in enumerate((("generator", "tab:blue"), ("discriminator", "tab:orange"))):
            left.plot([both[i] for both in history], style, color=colour, linewidth=1, label=f"{who}, {name}")
    left.set_xlabel("step")
    left.set_ylabel("loss")
    left.legend()
    for sheet, images, title in zip(sheets, (made, real), ("generated", "real, as the discriminator sees them")):
        grid = images.float().view(8, 8, SIDE, SIDE).transpose(1, 2).reshape(8 * SIDE, 8 * SIDE)
        sheet.imshow(grid, cmap="gray", vmin=-1, vmax=1)
        sheet.set_title(title)
        sheet.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(partial, format="png", dpi=110)
        os.replace(partial, path)
    finally:
        plt.close(figure)
        partial.unlink(missing_ok=True)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 500,
    batch: Annotated[int, typer.Option(min=2, help="Faces of a step.")] = 32,
    width: Annotated[int, typer.Option(min=4, help="Channels of the widest images; the narrowest have 4 times.")] = 24,
    quick: Annotated[bool, typer.Option("--quick", help="30 small steps: a few seconds.")] = False,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.cpu,
    amp: Annotated[bool, typer.Option("--amp", help="bfloat16 by torch.autocast.")] = False,
    accelerate: Annotated[bool, typer.Option(help="Train with upconv's layers.")] = True,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train also with the other layers, for the curves.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights, the faces and the noise.")] = 0,
    out: Annotated[Path, typer.Option(file_okay=False, writable=True, help="Folder for the picture.")] = Path("out"),
) -> None:
    """Trains a DCGAN on scikit-image's faces and times its training step with upconv's layers and torch.nn's."""
    if device is Device.cuda and not torch.cuda.is_available():
        reason = "'cuda' needs a GPU, and torch.cuda.is_available() says that there is none."
        raise typer.BadParameter(reason, param_hint="'--device'")
    if quick:
        steps, batch, width = min(steps, 30), min(batch, 16), min(width, 16)
    images, where = faces(), device.value
    gan, history = train(width, images, steps, batch, seed, where, amp, accelerate)
    curves = {"upconv" if accelerate else "torch": history}
    if compare:
        _, other = train(width, images, steps, batch, seed, where, amp, not accelerate)
        curves["torch" if accelerate else "upconv"] = other

    torch.manual_seed(seed)
    real, noise = draw_batch(images, SAMPLES).to(where), torch.randn(SAMPLES, LATENT, 1, 1).to(where)
    times = time_steps(gan, real[:batch], noise[:batch], 5 if quick else 30)
    made = gan.makes.eval()
    with torch.inference_mode():
        samples = {name: swap(made)(noise) for name, swap in (("torch", upconv.restore), ("upconv", with_upconv))}

    table = Table(title=f"{steps} steps of {batch} faces{' under bfloat16 autocast' if amp else ''} on {where}")
    for heading in ("", "training step (ms)", "generator's loss", "discriminator's loss"):
        table.add_column(heading, justify="left" if not heading else "right")
    last = max(1, steps // 10)
    for name in ("torch", "upconv"):
        ends = [f"{sum(both[i] for both in curves[name][-last:]) / last:.3f}" for i in (0, 1)] if name in curves else []
        table.add_row(f"DCGAN, {name}", f"{times[name]:.2f}", *ends)
    table.add_row("torch / upconv", f"{times['torch'] / times['upconv']:.2f}x", style="bold")
    console.print(table)
    largest = (samples["torch"] - samples["upconv"]).abs().max().item()
    console.print(
        f"largest difference of a pixel between the two: {largest:.1e} (2 is black to white)", highlight=False
    )
    path = out / "train_dcgan.png"
    draw(path, curves, samples["upconv"].cpu(), real.cpu())
    console.print(f"picture: {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
