"""Random layers on odd inputs: sizes of 0 and 1, views, mixed dtypes, arguments that do not fit together."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from situations import Lab, error, seen, step

MODES = ("zeros",) * 18 + ("circular", "bogus")
DTYPES = (torch.float32,) * 5 + (torch.float64, torch.bfloat16, torch.int64, torch.complex64)


def draw(seed: int, lab: Lab, plain: bool = False) -> Any:
    """What a random layer says to a random input: values, gradients, error texts, all from one seed.

    ``plain``: a convolution that is not transposed.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rank = rng.randint(1, 3)
    arguments, named = _arguments(rng, rank)
    dtype = rng.choice(DTYPES)
    made = partial(lab.home(f"Conv{rank}d"), device=lab.device) if plain else partial(lab.layer, rank=rank)
    if plain:
        del named["output_padding"]
        named |= rng.choice(({}, {}, {"padding": "same", "stride": 1}))
    layer = error(lambda: lab.done(made(*arguments, **named)))
    if isinstance(layer, tuple):
        return layer
    kept = dtype if dtype.is_floating_point or dtype.is_complex else torch.float32
    layer = layer.to(kept)
    layer.weight = nn.Parameter(_view(rng, layer.weight.detach()))
    x = _input(rng, rank, layer, dtype)
    size = {"output_size": _output_size(rng, rank)} if not plain and rng.random() < 0.15 else {}

    found = [error(lambda: seen(layer, x, **size)), error(lambda: seen(layer, x))]
    if x.is_floating_point() or x.is_complex():
        found.append(error(lambda: _step(layer, x)))
    return found


def _arguments(rng: random.Random, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def value(low: int, high: int) -> Any:
        if rng.random() < 0.5:
            return rng.randint(low, high)
        length = rank if rng.random() < 0.97 else rng.randint(0, rank + 1)
        return tuple(rng.randint(low, high) if rng.random() < 0.98 else rng.randint(-1, 0) for _ in range(length))

    groups = rng.choice((1, 1, 1, 2, 4, 3))
    inside, out = (groups * rng.randint(1, 4) if rng.random() < 0.95 else 5 for _ in range(2))
    kwargs = {
        "stride": value(1, 4), "padding": value(0, 2) if rng.random() < 0.9 else value(3, 6),
        "output_padding": value(0, 1) if rng.random() < 0.5 else value(0, 3) if rng.random() < 0.3 else 0,
        "dilation": value(1, 3), "groups": groups, "bias": rng.random() < 0.6,
        "padding_mode": rng.choice(MODES),
    }  # fmt: skip
    return (inside, out, value(1, 4)), kwargs


def _input(rng: random.Random, rank: int, layer: Any, dtype: torch.dtype) -> Tensor:
    channels = layer.in_channels if rng.random() < 0.95 else layer.in_channels + 1
    shape = [rng.choice((1, 2, 3)), channels, *(rng.choice((1, 1, 2, 3, 5)) for _ in range(rank))]
    if rng.random() < 0.1:
        shape[rng.randrange(len(shape))] = 0
    if rng.random() < 0.15:
        shape = shape[1:]
    if rng.random() < 0.03:
        shape = [1, *shape]
    device = layer.weight.device
    other = torch.float64 if rng.random() < 0.05 else dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-3, 4, shape, dtype=dtype, device=device)
    return _view(rng, torch.randn(shape, dtype=other, device=device))


def _view(rng: random.Random, t: Tensor) -> Tensor:
    """The same values in another memory layout."""
    kind = rng.randrange(7)
    if kind == 0 and t.dim() in (4, 5):
        return t.to(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)
    if kind == 1:  # each second element of a larger tensor
        wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype, device=t.device)
        wide[..., ::2] = t
        return wide[..., ::2]
    if kind == 2:  # permuted
        order = list(range(t.dim()))
        rng.shuffle(order)
        back = [order.index(d) for d in range(t.dim())]
        return t.permute(order).contiguous().permute(back)
    if kind == 3:  # an odd address
        whole = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
        whole[1:] = t.flatten()
        return whole[1:].view(t.shape)
    if kind == 4 and t.numel():  # one number everywhere
        return t.flatten()[0].expand(t.shape)
    return t


def _output_size(rng: random.Random, rank: int) -> tuple[int, ...]:
    return tuple(rng.randint(1, 14) for _ in range(rng.choice((rank, rank, rank, rank + 1, rank + 2, 1))))


def _step(layer: Any, x: Tensor) -> Any:
    if x.is_complex():
        x = x.detach().requires_grad_()
        out = layer(x)
        return [out.detach(), *torch.autograd.grad(out.abs().square().sum(), [x, *layer.parameters()])]
    return step(layer, x)
