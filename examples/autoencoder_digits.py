"""Trains a convolutional autoencoder on scikit-learn's handwritten digits, with upconv's layers in its decoder.

    python examples/autoencoder_digits.py             # well under a minute on two cores
    python examples/autoencoder_digits.py --quick     # a few seconds: everything works, the network has hardly learnt

The encoder squeezes 8x8 pixels into 16 numbers; the decoder is two `upconv.ConvTranspose2d`, which take the place of
torch.nn's with no other change. It is judged on digits that it has not seen, against the best linear method with as
many numbers, a principal component analysis. Then a twin with torch.nn's layers loads the same state_dict and must give
the same result, and a training step of each is timed: layers as small as these leave nothing to gain, and should cost
nothing either. The picture goes to ``out/``.

Needs ``pip install 'upconv[examples]'``.
"""

from __future__ import annotations

import math
import os
import time
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
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import upconv

BATCH = 128
RATE = 3e-3

console = Console()


class Autoencoder(nn.Module):
    """Images to ``latent`` numbers and back.

    Shape: ``(N, 1, 8, 8)`` in and out.

    Args:
        latent: how many numbers stand for an image.
        layer: the class of the decoder's transposed convolutions, upconv's or torch.nn's.
    """

    def __init__(self, latent: int, layer: type[nn.ConvTranspose2d] = upconv.ConvTranspose2d) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.GELU(),  # 8x8 to 4x4
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GELU(),  # to 2x2
            nn.Flatten(), nn.Linear(64 * 2 * 2, latent),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(latent, 64 * 2 * 2), nn.GELU(), nn.Unflatten(1, (64, 2, 2)),
            layer(64, 32, 4, stride=2, padding=1), nn.GELU(),  # 2x2 to 4x4
            layer(32, 1, 4, stride=2, padding=1),  # to 8x8
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.decoder(self.encoder(images))
        return found


def step(network: Autoencoder, optimizer: torch.optim.Optimizer, images: Tensor) -> float:
    """One training step on ``(N, 1, 8, 8)``; returns the mean squared error before it."""
    loss = F.mse_loss(network(images), images)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(network: Autoencoder, images: Tensor, epochs: int) -> None:
    """Trains in place on ``(N, 1, 8, 8)``, with Adam and a learning rate that falls along a cosine."""
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=epochs, state="")
        for epoch in range(epochs):
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 + math.cos(math.pi * epoch / epochs)) / 2
            shuffled = images[torch.randperm(len(images))]
            parts = shuffled.chunk(math.ceil(len(images) / BATCH))
            losses = [step(network, optimizer, part) for part in parts]
            progress.update(task, advance=1, state=f"epoch {epoch + 1}  loss {sum(losses) / len(losses):.5f}")


def time_steps(networks: dict[str, Autoencoder], images: Tensor, rounds: int) -> dict[str, float]:
    """Milliseconds of a training step on ``images`` for each network: medians, interleaved, the first round left out.

    The learning rate is 0, so that the networks stay as they are.
    """
    optimizers = {name: torch.optim.Adam(network.parameters(), lr=0.0) for name, network in networks.items()}
    times: dict[str, list[float]] = {name: [] for name in networks}
    for _ in range(rounds + 1):
        for name, network in networks.items():
            start = time.perf_counter()
            step(network, optimizers[name], images)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: median(series[1:]) for name, series in times.items()}


def draw(path: Path, rows: dict[str, Tensor]) -> None:
    """A titled row of digits for each entry, ``(N, 1, 8, 8)``; the file appears complete or not at all."""
    count = len(next(iter(rows.values())))
    figure, axes = plt.subplots(len(rows), 1, figsize=(0.9 * count, 1.25 * len(rows)), layout="constrained")
    for axis, (title, images) in zip(axes, rows.items()):
        padded = F.pad(images[:, 0], (0, 1), value=1.0)  # a white line between neighbours
        axis.imshow(torch.cat(list(padded), dim=1)[:, :-1], cmap="gray", vmin=0, vmax=1)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(partial, format="png", dpi=110)
        os.replace(partial, path)
    finally:
        plt.close(figure)
        partial.unlink(missing_ok=True)


def main(
    latent: Annotated[int, typer.Option(min=1, max=64, help="Numbers that stand for an image.")] = 16,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training digits.")] = 150,
    quick: Annotated[bool, typer.Option("--quick", help="10 epochs: a few seconds.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the split, the initial weights and the order.")] = 0,
    out: Annotated[Path, typer.Option(file_okay=False, writable=True, help="Folder for the picture.")] = Path("out"),
) -> None:
    """Trains an autoencoder on handwritten digits and times its training step with upconv's layers and torch.nn's."""
    torch.manual_seed(seed)
    digits = torch.from_numpy(load_digits().images).float()[:, None] / 16  # (1797, 1, 8, 8), 17 levels of grey
    seen, unseen = (digits[indices] for indices in train_test_split(range(len(digits)), random_state=seed))

    network = Autoencoder(latent)
    train(network, seen, 10 if quick else epochs)
    twin = Autoencoder(latent, nn.ConvTranspose2d)
    twin.load_state_dict(network.state_dict())

    networks = {"upconv": network, "torch": twin}
    with torch.inference_mode():
        rebuilt = {name: each(unseen) for name, each in networks.items()}
    pca = PCA(latent, random_state=seed).fit(seen.flatten(1))
    linear = torch.from_numpy(pca.inverse_transform(pca.transform(unseen.flatten(1)))).view_as(unseen).float()
    error = {name: F.mse_loss(images, unseen).item() for name, images in {**rebuilt, "pca": linear}.items()}
    times = time_steps(networks, seen[:BATCH], 10 if quick else 50)

    table = Table(title=f"{len(unseen)} unseen digits from {latent} numbers each")
    for heading in ("", "mean squared error", f"training step of {BATCH} (ms)"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("principal components", f"{error['pca']:.5f}", "")
    table.add_row("autoencoder, torch", f"{error['torch']:.5f}", f"{times['torch']:.2f}")
    table.add_row("autoencoder, upconv", f"{error['upconv']:.5f}", f"{times['upconv']:.2f}")
    table.add_row("torch / upconv", "", f"{times['torch'] / times['upconv']:.2f}x", style="bold")
    console.print(table)
    largest = (rebuilt["upconv"] - rebuilt["torch"]).abs().max().item()
    console.print(f"largest difference of a pixel between the two: {largest:.1e} (1 is white)", highlight=False)

    path = out / "autoencoder_digits.png"
    rows = {
        "unseen digits": unseen[:12],
        f"autoencoder, {latent} numbers, mean squared error {error['upconv']:.5f}": rebuilt["upconv"][:12],
        f"principal components, {latent} numbers, mean squared error {error['pca']:.5f}": linear[:12],
    }
    draw(path, rows)
    console.print(f"picture: {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
