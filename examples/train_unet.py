"""Trains a U-Net to find coins in a photograph that is too noisy and too unevenly lit for a threshold.

    python examples/train_unet.py                        # about a minute on two cores
    python examples/train_unet.py --device cuda --amp --width 64 --steps 2000
    python examples/train_unet.py --compare              # the same training once more with PyTorch's layers
    python examples/train_unet.py --quick                # a few seconds: everything works, little is learnt

The network is a small one after Ronneberger, Fischer and Brox (U-Net: Convolutional Networks for Biomedical Image
Segmentation, MICCAI 2015), which goes back up by 2x2 transposed convolutions. The photograph is scikit-image's of
coins (in its wheel, nothing is downloaded); where the coins are, its watershed says on the clean photograph. The
network sees patches of the upper three quarters, mirrored, turned, shaded and with noise; it is judged on the lowest
quarter, shaded and noisy too, beside Otsu's threshold.

The model is plain torch.nn; `upconv.accelerate(network, convolutions=True)` accelerates its convolutions in place,
transposed and plain (of which small calls stay PyTorch's), and nothing else changes. The loss curve and the
segmentation go to ``out/``; the time of a step is printed with and without upconv.

Needs ``pip install 'upconv[examples]'``.
"""

from __future__ import annotations

import copy
import os
import time
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed

import numpy as np
import torch
import torch.nn.functional as F
import typer
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from skimage import data, filters, segmentation
from torch import Tensor, nn

import upconv

PATCH = 64
RATE = 2e-3
LEVELS = 3
NOISE = 0.15
"""Standard deviation of the noise; black to white is 1."""
SHADE = 0.6
"""By how much the light may fall across a patch."""

console = Console()


class Device(str, Enum):
    """Where to compute."""

    cpu = "cpu"
    cuda = "cuda"


# --- the photograph --------------------------------------------------------------------------------------------------


def photograph() -> tuple[Tensor, Tensor]:
    """The coins in 0..1 and where they are (1) and are not (0), ``(height, width)`` each.

    The truth is the watershed of the edges from what is surely background and surely coin, as scikit-image's own
    example has it.
    """
    pixels = data.coins()
    markers = np.zeros_like(pixels, dtype=np.int32)
    markers[pixels < 30] = 1
    markers[pixels > 150] = 2
    coins = segmentation.watershed(filters.sobel(pixels), markers) == 2
    return torch.from_numpy(pixels).float() / 255, torch.from_numpy(coins).float()


def spoil(images: Tensor) -> Tensor:
    """Images ``(N, 1, height, width)`` in uneven light and with noise."""
    count, _, height, width = images.shape
    slope = (torch.rand(count, 1, 1, 2) - 0.5) * 2 * SHADE
    light = slope[..., :1] * torch.linspace(-0.5, 0.5, height)[:, None] + slope[..., 1:] * torch.linspace(
        -0.5, 0.5, width
    )
    return images + light[:, None].view(count, 1, height, width) + NOISE * torch.randn(images.shape)


def draw_batch(photo: Tensor, coins: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Spoilt patches and their truths, ``(count, 1, 64, 64)`` each, turned and mirrored at random."""
    pairs = []
    for _ in range(count):
        row, column = (int(torch.randint(size - PATCH + 1, ())) for size in photo.shape)
        pair = torch.stack((photo, coins))[:, row : row + PATCH, column : column + PATCH]
        pair = torch.rot90(pair, int(torch.randint(4, ())), (1, 2))
        pairs.append(pair.flip(2) if torch.rand(()) < 0.5 else pair)
    both = torch.stack(pairs)
    return spoil(both[:, :1]), both[:, 1:]


# --- the network -----------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """``(N, 1, H, W)`` images to ``(N, 1, H, W)``: above 0 it takes the pixel for a coin's; H and W multiples of 8.

    Args:
        width: channels at full size; they double at each of the three levels down.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width << level for level in range(LEVELS + 1)]
        self.down = nn.ModuleList(_pair(a, b) for a, b in zip([1, *sizes], sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in reversed(sizes[:-1]))
        self.join = nn.ModuleList(_pair(2 * c, c) for c in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for up, join, skipped in zip(self.up, self.join, kept[-2::-1]):
            x = join(torch.cat((skipped, up(x)), 1))
        found: Tensor = self.head(x)
        return found


def _pair(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True),
        nn.Conv2d(c_out, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True),
    )  # fmt: skip


def learn(network: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, truth: Tensor, amp: bool) -> Tensor:
    """One training step on ``(N, 1, H, W)``; the loss before it."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
        found = network(images)
    loss = F.binary_cross_entropy_with_logits(found.float(), truth)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(
    width: int, photo: Tensor, coins: Tensor, steps: int, batch: int, seed: int, device: str, amp: bool, ours: bool
) -> tuple[UNet, list[float]]:
    """Trains from a seed, which also decides the patches; the network and the loss of each step."""
    torch.manual_seed(seed)
    network = UNet(width).to(device)
    if ours:
        upconv.accelerate(network, convolutions=True)
    optimizer = torch.optim.Adam(network.parameters(), RATE)
    losses = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training, upconv" if ours else "training, torch", total=steps, state="")
        for step in range(steps):
            images, truth = (t.to(device) for t in draw_batch(photo, coins, batch))
            losses.append(learn(network, optimizer, images, truth, amp))
            if step % 10 == 9 or step == steps - 1:  # a GPU is waited for only now and then
                progress.update(task, completed=step + 1, state=f"loss {losses[-1].item():.3f}")
    return network, [loss.item() for loss in losses]


# --- what comes of it ------------------------------------------------------------------------------------------------


def overlap(found: Tensor, truth: Tensor) -> float:
    """Intersection over union of two sets of pixels; 1 is the same set."""
    a, b = found > 0.5, truth > 0.5
    return float((a & b).sum() / (a | b).sum().clamp(min=1))


def time_steps(network: UNet, images: Tensor, truth: Tensor, amp: bool, rounds: int) -> dict[str, float]:
    """Milliseconds of a step with upconv's layers and with torch.nn's: medians, in turn, the first two left out."""
    swapped = upconv.accelerate(copy.deepcopy(network), convolutions=True)
    twins = {"torch": upconv.restore(copy.deepcopy(network)), "upconv": swapped}
    optimizers = {name: torch.optim.Adam(twin.parameters(), 0.0) for name, twin in twins.items()}
    times: dict[str, list[float]] = {name: [] for name in twins}
    for _ in range(rounds + 2):
        for name, twin in twins.items():
            _wait(images.device)
            start = time.perf_counter()
            learn(twin.train(), optimizers[name], images, truth, amp)
            _wait(images.device)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: median(series[2:]) for name, series in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def draw(path: Path, curves: dict[str, list[float]], panels: dict[str, Any]) -> None:
    """The loss curves above titled images ``(height, width)``; the file appears complete or not at all."""
    figure = plt.figure(figsize=(13, 7.5), layout="constrained")
    titles = list(panels)
    rows: Any = [["curve", "curve"], titles[:2], titles[2:]]
    axes = figure.subplot_mosaic(rows, height_ratios=(1.4, 1, 1))
    for name, losses in curves.items():
        axes["curve"].plot(losses, "-" if name == "upconv" else ":", linewidth=1, label=name)
    axes["curve"].set(xlabel="step", ylabel="loss", yscale="log")
    axes["curve"].legend()
    for title, image in panels.items():
        axes[title].imshow(image, cmap="gray")
        axes[title].set_title(title)
        axes[title].set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(partial, format="png", dpi=110)
        os.replace(partial, path)
    finally:
        plt.close(figure)
        partial.unlink(missing_ok=True)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 300,
    batch: Annotated[int, typer.Option(min=1, help="Patches of a step.")] = 8,
    width: Annotated[int, typer.Option(min=2, help="Channels at full size; they double at each level.")] = 12,
    quick: Annotated[bool, typer.Option("--quick", help="40 small steps: a few seconds.")] = False,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.cpu,
    amp: Annotated[bool, typer.Option("--amp", help="bfloat16 by torch.autocast.")] = False,
    accelerate: Annotated[bool, typer.Option(help="Train with upconv's layers.")] = True,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train also with the other layers, for the curves.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights, the patches and the noise.")] = 0,
    out: Annotated[Path, typer.Option(file_okay=False, writable=True, help="Folder for the picture.")] = Path("out"),
) -> None:
    """Trains a U-Net on scikit-image's coins and times its training step with upconv's layers and torch.nn's."""
    if device is Device.cuda and not torch.cuda.is_available():
        reason = "'cuda' needs a GPU, and torch.cuda.is_available() says that there is none."
        raise typer.BadParameter(reason, param_hint="'--device'")
    if quick:
        steps, batch, width = min(steps, 40), min(batch, 4), min(width, 8)
    photo, coins = photograph()
    border = photo.shape[0] * 3 // 4
    seen = (photo[:border], coins[:border])
    where = device.value
    network, losses = train(width, *seen, steps, batch, seed, where, amp, accelerate)
    curves = {"upconv" if accelerate else "torch": losses}
    if compare:
        _, other = train(width, *seen, steps, batch, seed, where, amp, not accelerate)
        curves["torch" if accelerate else "upconv"] = other

    torch.manual_seed(seed)
    images, truth = (t.to(where) for t in draw_batch(*seen, batch))
    times = time_steps(network, images, truth, amp, 5 if quick else 30)
    height, breadth = (size // (1 << LEVELS) * (1 << LEVELS) for size in photo[border:].shape)
    unseen, wanted = (t[border : border + height, :breadth] for t in (photo, coins))
    spoilt = spoil(unseen[None, None])
    network.eval()
    with torch.inference_mode():
        found = {
            name: swap(network)(spoilt.to(where)).sigmoid()[0, 0].cpu()
            for name, swap in (("torch", upconv.restore), ("upconv", upconv.accelerate))
        }
    threshold = (spoilt[0, 0] > filters.threshold_otsu(spoilt[0, 0].numpy())).float()
    score = {name: overlap(image, wanted) for name, image in {**found, "otsu": threshold}.items()}

    title = f"{steps} steps of {batch} patches{' under bfloat16 autocast' if amp else ''} on {where}"
    table = Table(title=title)
    for heading in ("", "overlap with the coins", "training step (ms)"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("Otsu's threshold", f"{score['otsu']:.3f}", "")
    for name in ("torch", "upconv"):
        table.add_row(f"U-Net, {name}", f"{score[name]:.3f}", f"{times[name]:.2f}")
    table.add_row("torch / upconv", "", f"{times['torch'] / times['upconv']:.2f}x", style="bold")
    console.print(table)
    largest = (found["torch"] - found["upconv"]).abs().max().item()
    console.print(f"largest difference of a pixel between the two: {largest:.1e} (1 is a coin)", highlight=False)

    path = out / "train_unet.png"
    panels = {
        "unseen, in uneven light and with noise": spoilt[0, 0],
        "coins": wanted,
        f"U-Net, overlap {score['upconv']:.3f}": found["upconv"],
        f"Otsu's threshold, overlap {score['otsu']:.3f}": threshold,
    }
    draw(path, curves, panels)
    console.print(f"picture: {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
