"""The models whose training steps and inference the bench times, and what a step of each is.

A DCGAN, a U-Net, a variational autoencoder's decoder and HiFi-GAN's generator: published models in which transposed
convolutions are a larger and a smaller share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _act(*layers: nn.Module) -> list[nn.Module]:
    return [*layers, nn.ReLU(inplace=True)]


class Generator(nn.Sequential):
    """DCGAN's: ``(N, latent, 1, 1)`` to images of ``3 x 64 x 64`` (Radford, Metz, Chintala, 2016)."""

    def __init__(self, width: int = 64, latent: int = 100) -> None:
        layers, channels = _up(latent, 8 * width, 1, 0), 8 * width
        for _ in range(3):
            layers += _up(channels, channels // 2, 2, 1)
            channels //= 2
        super().__init__(*layers, nn.ConvTranspose2d(channels, 3, 4, 2, 1, bias=False), nn.Tanh())
        self.latent = latent


def _up(c_in: int, c_out: int, stride: int, padding: int) -> list[nn.Module]:
    return _act(nn.ConvTranspose2d(c_in, c_out, 4, stride, padding, bias=False), nn.BatchNorm2d(c_out))


class Discriminator(nn.Sequential):
    """DCGAN's: images of ``3 x 64 x 64`` to ``(N, 1, 1, 1)``."""

    def __init__(self, width: int = 64) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for factor in (1, 2, 4):
            c = factor * width
            layers += [nn.Conv2d(c, 2 * c, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * c), nn.LeakyReLU(0.2)]
        super().__init__(*layers, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False))


class UNet(nn.Module):
    """``(N, 3, H, W)`` to ``(N, classes, H, W)`` with 2x2 transposed convolutions (Ronneberger et al., 2015)."""

    def __init__(self, width: int = 64, classes: int = 21, levels: int = 4) -> None:
        super().__init__()
        sizes = [width << i for i in range(levels + 1)]
        self.down = nn.ModuleList(self._pair(a, b) for a, b in zip([3, *sizes], sizes))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in reversed(sizes[:-1]))
        self.join = nn.ModuleList(self._pair(2 * c, c) for c in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _pair(a: int, b: int) -> nn.Sequential:
        def conv(c: int) -> list[nn.Module]:
            return _act(nn.Conv2d(c, b, 3, padding=1, bias=False), nn.BatchNorm2d(b))

        return nn.Sequential(*conv(a), *conv(b))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for up, block, skip in zip(self.rise, self.join, kept[-2::-1]):
            x = block(torch.cat((skip, up(x)), 1))
        found: Tensor = self.head(x)
        return found


class Decoder(nn.Sequential):
    """A VAE's decoder: ``(N, 4, H, W)`` to ``(N, 3, 8 H, 8 W)``, doubled three times by 3x3 transposed convolutions."""

    def __init__(self, width: int = 256) -> None:
        layers: list[nn.Module] = [nn.Conv2d(4, width, 3, padding=1)]
        for a, b in ((width, width), (width, width // 2), (width // 2, width // 4)):
            layers += [nn.GroupNorm(8, a), nn.SiLU(), nn.ConvTranspose2d(a, b, 3, 2, 1, 1)]
        super().__init__(*layers, nn.SiLU(), nn.Conv2d(width // 4, 3, 3, padding=1))


class Upsampler(nn.Module):
    """HiFi-GAN's generator V1 with one residual block a stage: ``(N, 80, T)`` to ``(N, 1, 256 T)`` (Kong, 2020)."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, width, 7, padding=3)
        stages = ((16, 8), (16, 8), (4, 2), (4, 2))
        sizes = [width >> i for i in range(5)]
        self.rise = nn.ModuleList(
            nn.ConvTranspose1d(a, b, k, s, (k - s) // 2) for a, b, (k, s) in zip(sizes, sizes[1:], stages)
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Conv1d(c, c, 3, padding=d, dilation=d) for d in (1, 3, 5)) for c in sizes[1:]
        )
        self.last = nn.Conv1d(sizes[-1], 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, block in zip(self.rise, self.blocks):
            x = up(F.leaky_relu(x, 0.1))
            for conv in block:  # type: ignore[attr-defined]
                x = x + conv(F.leaky_relu(x, 0.1))
        return torch.tanh(self.last(F.leaky_relu(x)))


# --- steps -----------------------------------------------------------------------------------------------------------

Losses = Callable[[Sequence[nn.Module], Sequence[Tensor]], Sequence[tuple[Callable[[], Tensor], int]]]


@dataclass(frozen=True)
class Case:
    """A model's training step.

    ``losses`` names the losses of a step in turn, each as a function and the network whose optimizer it moves.
    """

    name: str
    make: Callable[[], list[nn.Module]]
    """The networks; inference is the first one's."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the random tensors that a step is given; inference takes the first one."""
    losses: Losses
    classes: int = 0
    """Of the pixels' labels, which are the last tensor, of a step that has labels."""
    images: bool = True
    """Whether its tensors are images, which channels_last is for."""

    def draw(self, device: torch.device) -> list[Tensor]:
        """What a step is given."""
        found = [torch.randn(shape, device=device) for shape in self.shapes]
        if self.classes:
            batch, _, *size = self.shapes[0]
            found.append(torch.randint(self.classes, (batch, *size), device=device))
        return found


def _gan(networks: Sequence[nn.Module], given: Sequence[Tensor]) -> Sequence[tuple[Callable[[], Tensor], int]]:
    generator, judge = networks
    noise, real = given

    def judged(images: Tensor, truth: float) -> Tensor:
        found = judge(images).float().flatten()
        return F.binary_cross_entropy_with_logits(found, torch.full_like(found, truth))

    return [
        (lambda: judged(real, 1.0) + judged(generator(noise).detach(), 0.0), 1),
        (lambda: judged(generator(noise), 1.0), 0),
    ]


def _single(loss: Callable[[Tensor, Tensor], Tensor]) -> Losses:
    return lambda networks, given: [(lambda: loss(networks[0](given[0]).float(), given[1]), 0)]


def cases(scale: int = 1) -> list[Case]:
    """The suite; ``scale`` divides widths and sizes, for a test that has no time."""
    batch, images = max(2, 16 // scale), max(2, 128 // scale)
    side, width, low = 256 // scale, max(8, 64 // scale), 64 // scale
    gan, latents = ((images, 100, 1, 1), (images, 3, 64, 64)), (batch, 4, low // 2, low // 2)
    return [
        Case("dcgan", lambda: [Generator(width), Discriminator(width)], gan, _gan),
        Case("unet", lambda: [UNet(width)], ((batch, 3, side, side),), _single(F.cross_entropy), classes=21),
        Case("vae", lambda: [Decoder(4 * width)], (latents, (batch, 3, 4 * low, 4 * low)), _single(F.mse_loss)),
        Case(
            "hifigan",
            lambda: [Upsampler(8 * width)],
            ((batch, 80, 32), (batch, 1, 8192)),
            _single(F.l1_loss),
            images=False,
        ),
    ]
