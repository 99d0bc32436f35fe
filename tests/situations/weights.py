"""Weights that change, or whose tensors are exchanged, between calls."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing._internal.two_tensor import TwoTensor

from situations import Lab, error, seen, situation, step


def _changed(model: nn.Module) -> dict[str, Tensor]:
    return {name: value * 0.5 + 0.1 for name, value in model.state_dict().items()}


@situation("pytorch/pytorch#102212", "`load_state_dict(assign=True)` puts other tensors in the parameters' place")
def assigned(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    before = [seen(model, x), seen(model, x)]
    model.load_state_dict(_changed(model), assign=True)
    return before, seen(model, x), step(model, x)


@situation("pytorch/pytorch#188346", "`load_state_dict(assign=True)` unties a weight that two layers share")
def assigned_tied(lab: Lab) -> Any:
    model = nn.Sequential(lab.layer(16, 16, 3, padding=1), lab.layer(16, 16, 3, padding=1))
    model[1].weight = model[0].weight
    model, x = lab.done(model), lab.x()
    tied = step(model, x)
    model.load_state_dict(model.state_dict(), assign=True)
    with torch.no_grad():
        model[0].weight.mul_(2)
    return tied, len(list(model.parameters())), seen(model, x), step(model, x)


@situation("mosaicml/llm-foundry#916", "A model is built on the meta device and gets its weights by assignment")
def built_on_meta(lab: Lab) -> Any:
    state = Lab("stock", lab.device).model().state_dict()
    model = Lab(lab.way, "meta").model()
    empty = seen(model, torch.empty(2, 16, 7, 6, device="meta"))
    model.load_state_dict(state, assign=True)
    return empty, step(model, lab.x())


@contextmanager
def _swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@situation("pytorch/pytorch#127313", "`.double()` swaps the tensors of parameters that were used and differentiated")
def swapped_on_conversion(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    first = step(model, x), seen(model, x), seen(model, x)
    with _swapping():
        model.double()
    return first, step(model, x.double()), seen(model.float(), x)


@situation("pytorch/pytorch#126814", "`.double()` swaps parameters between a forward and its backward")
def swapped_before_backward(lab: Lab) -> Any:
    layer, x = lab.one(), lab.x()
    out = layer(x)
    with _swapping():
        said = error(layer.double)
    return said if isinstance(said, tuple) else "no error", out.detach()


@situation(
    "pytorch/pytorch#187008", "The weight is a tensor subclass that wraps others, as quantised weights are", ours=False
)
def wrapped_weight(lab: Lab) -> Any:
    layer, x = lab.one(), lab.x()
    first = seen(layer, x)
    w = layer.weight.detach()
    layer.weight = nn.Parameter(TwoTensor(w.clone(), w.clone()), requires_grad=False)
    out = seen(layer, x)
    return first, type(out).__name__, out.a, out.b  # type: ignore[attr-defined]


@situation("pytorch/pytorch#37322", "A pruned layer computes its weight from a mask; copies of it are made")
def pruned(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.ln_structured(model[2], "weight", 0.5, n=2, dim=1)
    with torch.no_grad():
        first = model(x)
    said = error(lambda: seen(copy.deepcopy(model), x))
    found = [first, said, *step(model, x), *step(model, x)]
    prune.remove(model[0], "weight")
    prune.remove(model[2], "weight")
    return found, seen(model, x), list(model.state_dict())


@situation("huggingface/diffusers#1658", "A training step follows a validation in inference mode")
def inference_then_training(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    with torch.inference_mode():
        first = model(x)
    found = [step(model, x), step(model, x)]
    with torch.inference_mode():
        last = model(x)
    return first.clone(), first.is_inference(), found, last.clone()


@situation("facebookresearch/dinov2#472", "Weights made in inference mode are trained")
def inference_weights(lab: Lab) -> Any:
    with torch.inference_mode():
        layer = lab.one()
    x = lab.x().requires_grad_()
    return error(lambda: layer(x).sum().backward()), seen(layer, x.detach())


@situation("pytorch/pytorch#76501", "Parameters become plain views of one flat parameter, as in FSDP")
def flat_views(lab: Lab) -> Any:
    layer, x = lab.one(), lab.x()
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in layer.parameters()]))
    shapes = {name: p.shape for name, p in layer.named_parameters()}
    found = [seen(layer, x)]
    for name in shapes:
        delattr(layer, name)
    for _ in range(3):
        start = 0
        for name, shape in shapes.items():
            setattr(layer, name, flat[start : start + shape.numel()].view(shape))
            start += shape.numel()
        found += step(layer, x, [flat])
        with torch.no_grad():
            flat.mul_(0.8)
    return found


@situation("VainF/Torch-Pruning#99", "Pruning cuts channels off: weight, bias and channel counts change after calls")
def channels_cut(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    found = [*step(model, x), seen(model, x)]
    keep = torch.tensor([0, 3, 5, 8, 12], device=lab.device)
    first, last = model[0], model[2]
    first.weight = nn.Parameter(first.weight.data[:, keep])
    first.bias = nn.Parameter(first.bias.data[keep])
    first.out_channels = last.in_channels = len(keep)
    last.weight = nn.Parameter(last.weight.data[keep])
    return found, repr(model), step(model, x), seen(model, x)


@situation("vladmandic/sdnext#1431", "A used model changes its dtype to and fro; a bias is left behind")
def other_dtypes(lab: Lab) -> Any:
    model, x, found = lab.model(), lab.x(), []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.bfloat16):
        model.to(dtype)
        found += [seen(model, x.to(dtype)), *step(model, x.to(dtype))]
    model[0].bias.data = model[0].bias.data.half()
    return found, error(lambda: seen(model, x.bfloat16()))


@situation("huggingface/accelerate#1315", "A model moves to the CPU, changes there, and moves back", devices=("cuda",))
def moved_to_and_fro(lab: Lab) -> Any:
    model, x, found = lab.model(), lab.x(), []
    for factor in (0.5, 2.0, 0.5):
        found += [seen(model, x), seen(model, x)]
        model.cpu()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor)
        found.append(seen(model, x.cpu()).to(lab.device))
        model.to(lab.device)
    return found, step(model, x)


@situation(
    "pytorch/pytorch#181723",
    "`make_graphed_callables` captures forward and backward; training goes on",
    devices=("cuda",),
)
def graphed_training(lab: Lab) -> Any:
    model, x, found = lab.model(), lab.x(), []
    gc.collect()  # graphs of an earlier run may be garbage, which must not be destroyed while another is captured
    graphed = torch.cuda.make_graphed_callables(model, (lab.x(requires_grad=True),))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(3):
        optimiser.zero_grad(set_to_none=False)
        out = graphed(x.clone().requires_grad_())
        out.square().mean().backward()
        optimiser.step()
        found += [out.detach().clone(), seen(model, x)]
    return found
