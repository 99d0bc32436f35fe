"""Modules: norms by hooks and parametrisations, replicas, subclasses, hooks, wrappers."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from situations import Lab, Unavailable, error, seen, situation, step


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _weight_norm(layer: nn.Module) -> nn.Module:
    with _quiet():
        return torch.nn.utils.weight_norm(layer)


@situation("descriptinc/descript-audio-codec#81", "weight_norm is removed and put back on a layer that was called")
def weight_norm_removed(lab: Lab) -> Any:
    layer, x = lab.done(_weight_norm(lab.layer(16, 8, 16, 8, 4, rank=1))), lab.x(2, 16, 20)
    found = [*step(layer, x)]
    torch.nn.utils.remove_weight_norm(layer)
    found += [seen(layer, x), *step(layer, x)]
    layer = _weight_norm(layer)
    with torch.no_grad():
        layer.weight_g.mul_(2)
    return found, seen(layer, x), seen(copy.deepcopy(layer), x)


@situation(
    "vllm-project/vllm-omni#6927", "Weight norm is folded once at loading, under a cached parametrisation before"
)
def weight_norm_folded(lab: Lab) -> Any:
    model = nn.Sequential(
        parametrizations.weight_norm(lab.layer(16, 8, 16, 8, 4, rank=1)),
        nn.LeakyReLU(0.1),
        parametrizations.weight_norm(lab.layer(8, 4, 4, 2, 1, rank=1)),
    )
    model, x = lab.done(model), lab.x(2, 16, 20)
    with parametrize.cached():
        found = [seen(model, x), seen(model, x)]
    for child in (model[0], model[2]):
        parametrize.remove_parametrizations(child, "weight", leave_parametrized=True)
        child.weight.requires_grad_(False)
    return found, seen(model, x), step(model, x)


@situation("pytorch/pytorch#66363", "A layer under the new spectral_norm is called twice before a backward")
def spectral_norm_twice(lab: Lab) -> Any:
    layer, x = lab.done(parametrizations.spectral_norm(lab.layer(16, 16, 3, padding=1))), lab.x()
    return error(lambda: step(lambda t: layer(layer(t)), x, list(layer.parameters()))), seen(layer.eval(), x)


@situation(
    "pytorch/pytorch#47163", "DistributedDataParallel compares the strides of gradients of a 1x1 kernel with its own"
)
def ddp_strides(lab: Lab) -> Any:
    model = nn.Sequential(lab.layer(16, 16, 1), nn.ReLU(), lab.layer(16, 8, 4, 2, 1))
    model = lab.done(model).to(memory_format=torch.channels_last)
    return _distributed(lab, model, lab.x().to(memory_format=torch.channels_last))


@cache
def _group(backend: str) -> Any:
    """A group of this process alone, which stays until the process ends.

    PyTorch can wait for ever where a DistributedDataParallel is the last to hold a Gloo group: the group's destructor
    joins a thread that wants Python's lock.
    """
    if not dist.is_available():
        raise Unavailable("torch.distributed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = Path(tempfile.mkdtemp()) / "store"
    if not dist.is_initialized():
        dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    return dist.new_group([0], backend=backend)


def _distributed(lab: Lab, model: nn.Module, x: Tensor) -> Any:
    """Steps of a model in a group of one process, and the warnings that they give."""
    group = _group("nccl" if lab.device == "cuda" else "gloo")
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    optimiser, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(2):
            optimiser.zero_grad(set_to_none=False)
            wrapped(x).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimiser.step()
            found.append(seen(wrapped.eval(), x))
            wrapped.train()
    return found, sorted(str(w.message).split("\n")[0] for w in given)


@situation(
    "huggingface/accelerate#768", "A hook replaces `forward` on the instance and brings weights for each call only"
)
def offloaded(lab: Lab) -> Any:
    layer, x, found = lab.one(), lab.x(), []
    kept = {name: p.detach().clone() for name, p in layer.named_parameters()}
    old = layer.forward

    def put(values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            layer._parameters[name] = nn.Parameter(value, requires_grad=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        put({name: value.clone() for name, value in kept.items()})
        out = old(*args, **kwargs)
        put({name: value.to("meta") for name, value in kept.items()})
        return out

    layer.forward = forward
    for factor in (1.0, 0.5, 2.0):
        kept = {name: value * factor for name, value in kept.items()}
        found += [seen(layer, x), step(layer, x)]
    return found


@situation("pytorch/pytorch#61519", "An in-place activation follows a layer with a full backward hook")
def backward_hook(lab: Lab) -> Any:
    model, x, given = lab.model(), lab.x(), []
    model[1] = nn.ReLU(inplace=True)
    plain = step(model, x)
    handle = model[0].register_full_backward_hook(lambda m, gi, go: given.append((type(m).__name__, gi, go)))
    said = error(lambda: step(model, x))
    model[1] = nn.ReLU()
    hooked = step(model, x)
    handle.remove()
    return plain, said, hooked, given


@situation("meta-pytorch/captum#837", "Hooks change a layer's input, output and gradient")
def changing_hooks(lab: Lab) -> Any:
    layer, x = lab.one(), lab.x()
    layer.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    layer.register_forward_hook(lambda m, args, kwargs, out: out + 1, with_kwargs=True)
    layer.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 3,))
    layer.register_full_backward_hook(lambda m, gi, go: (gi[0] * 5,))
    return step(layer, x), seen(layer, x, output_size=(15, 13)), error(lambda: layer(x, output_size=(40, 40)))
