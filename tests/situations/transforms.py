"""Function transforms, derivatives of all kinds, checkpoints, and what autograd saves."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.utils.checkpoint import checkpoint

from situations import BF16, Lab, error, situation, step


def _values(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Second derivatives without their strides, which are what PyTorch happens to compute them from."""
    return [t.contiguous() for t in tensors]


@situation(
    "pytorch/pytorch#109025", "An ensemble's weights are stacked, its base model is on the meta device", ours=False
)
def ensemble(lab: Lab) -> Any:
    models, x = [lab.model() for _ in range(3)], lab.x()
    parameters, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def call(p: Any, b: Any, x: Tensor) -> Any:
        return functional_call(base, (p, b), (x,))

    out = torch.func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
    grads = torch.autograd.grad(out.square().mean(), list(parameters.values()))
    return out.detach(), grads


@situation("pytorch/pytorch#53407", "First and second derivatives, batched too, of an empty batch", ours=False)
def empty_derivatives(lab: Lab) -> Any:
    layer, x = lab.one(), lab.x(0, 16, 4, 4).requires_grad_()
    first = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()], create_graph=True)
    second = error(lambda: torch.autograd.grad(sum(g.square().sum() for g in first), x, allow_unused=True))
    out = layer(x)
    batched = error(
        lambda: torch.autograd.grad(out, x, torch.ones(2, *out.shape, device=lab.device), is_grads_batched=True)
    )
    return [g.detach() for g in first], second, batched


@situation("pytorch/pytorch#4500", "Second derivatives arrive as expanded and transposed tensors")
def odd_second_gradients(lab: Lab) -> Any:
    layer, x = lab.done(lab.layer(4, 3, 3, 2, 1, dilation=2)).double(), lab.x(2, 4, 4, 3, dtype=torch.float64)
    x = x.transpose(2, 3).requires_grad_()
    out = layer(x)
    g = torch.ones(1, device=lab.device, dtype=torch.float64, requires_grad=True)
    first = torch.autograd.grad(out, [x, *layer.parameters()], g.expand(out.shape), create_graph=True)
    arriving = [
        torch.randn_like(f.mT.contiguous()).mT if f.dim() > 1 else torch.ones_like(f[:1]).expand(3) for f in first
    ]
    second = torch.autograd.grad(first, [x, layer.weight, g], arriving)
    return [f.detach() for f in first], _values(second)


@situation("pytorch/pytorch#62654", "A checkpoint by hooks recomputes a model, under autocast too", tolerance=BF16)
def checkpointed(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()

    def run(x: Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False)

    found = step(run, x, model.parameters())
    with torch.autocast(lab.device, torch.bfloat16):
        return found, step(run, x, model.parameters())


@situation("pytorch/pytorch#69508", "A reentrant checkpoint runs the model again inside the backward")
def checkpointed_reentrantly(lab: Lab) -> Any:
    model, x = lab.model(), lab.x().requires_grad_()
    out = checkpoint(model, x, use_reentrant=True)
    out.square().mean().backward()
    return out.detach(), x.grad, [p.grad for p in model.parameters()]


@situation("pytorch/pytorch#61928", "`save_on_cpu` and hooks that round keep what the backward needs elsewhere")
def saved_elsewhere(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    with torch.autograd.graph.save_on_cpu(pin_memory=False):
        found = step(model, x)

    def pack(t: Tensor) -> Any:
        return t.dtype, t.to(torch.bfloat16)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[1].to(kept[0])):
        return found, step(model, x)


_GRAPH = "https://docs.pytorch.org/docs/stable/_modules/torch/autograd/graph.html"


@situation(_GRAPH, "The weight changes in place between forward and backward: an error, or allowed by a context")
def changed_before_backward(lab: Lab) -> Any:
    layer, x = lab.one(), lab.x().requires_grad_()

    def run() -> Any:
        out = layer(x)
        with torch.no_grad():
            layer.weight.mul_(0.5)
        return torch.autograd.grad(out.square().mean(), [x, layer.weight, layer.bias])

    said = error(run)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        return said, run()


@situation(_GRAPH, "A graph is used twice, with hooks on several gradients at once")
def used_twice(lab: Lab) -> Any:
    model, x, given = lab.model(), lab.x().requires_grad_(), []
    tensors = [x, *model.parameters()]
    torch.autograd.graph.register_multi_grad_hook(tensors, lambda grads: given.append([g.clone() for g in grads]))
    out = model(x)
    for _ in range(2):
        out.square().mean().backward(retain_graph=True)
    out.sum().backward()
    return given, [t.grad for t in tensors], error(lambda: out.sum().backward())


@situation("pytorch/pytorch#54987", "Complex layers on conjugated inputs, weights and gradients", ours=False)
def conjugated(lab: Lab) -> Any:
    layer, x = lab.one(dtype=torch.complex64), lab.x(dtype=torch.complex64).conj()
    layer.weight = nn.Parameter(layer.weight.detach().conj())
    x = x.detach().requires_grad_()
    out = layer(x)
    return out.detach(), torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out).mul(1j).conj())
