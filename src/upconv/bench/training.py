"""Whole training steps of models with transposed convolutions: ours against PyTorch, eager and compiled.

A step is what a training loop repeats: forward, loss, backward and Adam. Every side has its own copy of the same model,
with the same weights and inputs; ours is `upconv.accelerate`'s, of transposed convolutions alone and of plain ones too.
On a GPU each side is timed with ``cudnn.benchmark`` on and off (the models have plain convolutions) and its better time
counts.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import upconv
from upconv import replays
from upconv.bench import latency, timing
from upconv.bench.latency import Latency, Value
from upconv.bench.timing import Repeats
from upconv.cuda import native, provisional

Side = Literal["ours", "convolutions", "torch", "compile"]
OURS: tuple[Side, ...] = ("ours", "convolutions")
REPEATS = Repeats(8.0, 10, 200)
"""Medians of steps that a host bounds differ by 5 % where they are of 60 (DCGAN in float32: 0.97 and 1.05)."""
RATE = 1e-4
WITHIN = 0.02
"""First losses of two sides may differ by this share: bfloat16's roundings leave 1e-3."""
WITHIN_GRADIENT = 0.1
"""So may the norms of their gradients: a last layer three times too large moves a loss by 4 % and these by 160 %."""


# --- models ----------------------------------------------------------------------------------------------------------


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
    draw: Callable[[torch.device], list[Tensor]]
    losses: Losses


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

    def noise(*shape: int) -> Callable[[torch.device], Tensor]:
        return lambda device: torch.randn(shape, device=device)

    def both(*makers: Callable[[torch.device], Tensor]) -> Callable[[torch.device], list[Tensor]]:
        return lambda device: [make(device) for make in makers]

    side, width = 256 // scale, max(8, 64 // scale)
    low = 64 // scale
    return [
        Case(
            "dcgan",
            lambda: [Generator(width), Discriminator(width)],
            both(noise(images, 100, 1, 1), noise(images, 3, 64, 64)),
            _gan,
        ),
        Case(
            "unet",
            lambda: [UNet(width)],
            both(noise(batch, 3, side, side), lambda device: torch.randint(21, (batch, side, side), device=device)),
            _single(F.cross_entropy),
        ),
        Case(
            "vae",
            lambda: [Decoder(4 * width)],
            both(noise(batch, 4, low // 2, low // 2), noise(batch, 3, 4 * low, 4 * low)),
            _single(F.mse_loss),
        ),
        Case(
            "hifigan",
            lambda: [Upsampler(8 * width)],
            both(noise(batch, 80, 32), noise(batch, 1, 8192)),
            _single(F.l1_loss),
        ),
    ]


class Trainer:
    """A case's networks and optimizers on a device, as one side trains them."""

    def __init__(self, case: Case, side: Side, device: torch.device, autocast: bool) -> None:
        torch.manual_seed(0)
        networks = [network.to(device).train() for network in case.make()]
        torch.manual_seed(1)
        self.given = case.draw(device)
        if side in OURS:
            networks = [upconv.accelerate(network, convolutions=side == "convolutions") for network in networks]
        optimizers = [torch.optim.Adam(network.parameters(), RATE) for network in networks]
        called: list[Any] = [torch.compile(network) for network in networks] if side == "compile" else networks
        self.device, self.autocast = device, autocast
        self.parts = [(loss, optimizers[i]) for loss, i in case.losses(called, self.given)]

    def __call__(self) -> list[Tensor]:
        """One step; the losses before it."""
        found = []
        for loss, optimizer in self.parts:
            context: AbstractContextManager[object] = nullcontext()
            if self.autocast:
                context = torch.autocast(self.device.type, dtype=torch.bfloat16)
            with context:
                value = loss()
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            optimizer.step()
            found.append(value.detach())
        return found

    def norms(self) -> list[float]:
        """The norm of each optimizer's gradients, as the last step left them."""
        every = ([p for group in optimizer.param_groups for p in group["params"]] for _, optimizer in self.parts)
        return [torch.nn.utils.get_total_norm([p.grad for p in each if p.grad is not None]).item() for each in every]


def measure(
    device: torch.device,
    todo: Sequence[Case] | None = None,
    repeats: Repeats = REPEATS,
    *,
    compiled: bool = True,
    progress: Callable[[str], object] = lambda case: None,
) -> Latency:
    """Median milliseconds of a step of every case and side, in float32 and under bfloat16 autocast, and peak memory.

    Args:
        device: where.
        todo: the cases; None for all.
        repeats: how often.
        compiled: also time ``torch.compile``'s step of PyTorch's model; where it fails, its time is missing.
        progress: hears of each case and side as it begins.
    """
    every = cases() if todo is None else todo
    if device.type == "cuda":
        native.wait()  # a training run has it from its first half a minute on
    rows = [_row(case, device, repeats, autocast, compiled, progress) for case in every for autocast in (False, True)]
    return latency._report("training", device, "whole training steps", rows)


def _row(
    case: Case,
    device: torch.device,
    repeats: Repeats,
    autocast: bool,
    compiled: bool,
    progress: Callable[[str], object],
) -> dict[str, Value]:
    name = f"{case.name} {'bf16' if autocast else 'fp32'}"
    row: dict[str, Value] = dict.fromkeys(latency.TRAINING_KEYS)
    row.update(case=name, failure=None, rounds=0)
    sides: list[Side] = [*OURS, "torch", *(["compile"] if compiled else [])]  # type: ignore[list-item]
    trainers: dict[str, Trainer] = {}
    first: dict[str, tuple[list[float], list[float]]] = {}
    for side in sides:
        progress(f"{name} {side}")
        try:
            trainer = Trainer(case, side, device, autocast)
            first[side] = [value.item() for value in trainer()], trainer.norms()
            trainers[side] = trainer
            row[f"{side}_peak_bytes"] = _peak(trainer, device)
        except Exception as error:  # a compiler that is not there, say, does not cost the other sides
            if side != "compile":
                row["failure"] = f"{side}: {type(error).__name__}: {error}".splitlines()[0]
                return row
    limits = {"losses": WITHIN, "gradients' norms": WITHIN_GRADIENT}
    for side in OURS:
        for (what, limit), ours, theirs in zip(limits.items(), first[side], first["torch"]):
            apart = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(ours, theirs))
            if not apart <= limit:
                row["failure"] = f"wrong: the first {what} differ by {apart:.1e}"
                return row
    progress(f"{name} times")
    medians, row["rounds"] = _times(trainers, device, repeats)
    for name, seconds in medians.items():
        row[f"{name}_ms"] = 1e3 * seconds
    row["ratio"] = medians["torch"] / medians["ours"]
    row["convolutions_ratio"] = medians["torch"] / medians["convolutions"]
    return row


def _times(trainers: dict[str, Trainer], device: torch.device, repeats: Repeats) -> tuple[dict[str, float], int]:
    take = timing.clock(device, wait=False)  # a step that waits for its host does so when it trains
    if device.type != "cuda":
        taken = timing.interleave({side: [trainer] for side, trainer in trainers.items()}, take, repeats)
        return {side: median(values) for side, values in taken.items()}, len(taken["ours"])
    under = timing.cudnn_clocks(take)
    # A compiled graph's guards hold the flag and its thread's state: it keeps to the one that it was compiled under.
    names = {f"{side} {flag}": side for side in trainers for flag in ("off", "on") if (side, flag) != ("compile", "on")}
    clocks = {name: under[name.split()[1]] for name in names}
    was = torch.backends.cudnn.benchmark
    try:
        for name, side in names.items():  # cuDNN's plans are found in the first step of each
            clocks[name](trainers[side])
        taken = timing.interleave({name: [trainers[side]] for name, side in names.items()}, clocks, repeats)
    finally:
        torch.backends.cudnn.benchmark = was
    best = dict.fromkeys(trainers, math.inf)
    for name, values in taken.items():
        best[names[name]] = min(best[names[name]], median(values))
    return best, len(taken["ours off"])


def _peak(trainer: Trainer, device: torch.device) -> int | None:
    """Bytes that a step asks the allocator for at its peak, beside what it holds between steps; None on a CPU.

    The median of three, behind those in which calls are recorded. Not the allocator's blocks: these are longer than
    what is asked for, by their past up to 2 MB of 340. (NOTES: in float32 DCGAN, U-Net and the VAE decoder ask for as
    much as PyTorch's to the byte, where either side's blocks were longer in some runs.)
    """
    if device.type != "cuda":
        return None
    for _ in range(replays.CALLS + 1):
        provisional.settle()
        trainer()
    found = []
    for _ in range(3):
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = _requested(device, "current")
        trainer()
        torch.cuda.synchronize(device)
        found.append(_requested(device, "peak") - before)
    return int(median(found))


def _requested(device: torch.device, when: Literal["current", "peak"]) -> int:
    stats = torch.cuda.memory_stats(device)
    return int(stats[f"requested_bytes.all.{when}"])
