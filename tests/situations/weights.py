"""Weights that change, or whose tensors are exchanged, between calls."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.testing._internal.two_tensor import TwoTensor

from situations import BF16, Lab, error, seen, situation, step


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


@situation("pytorch/pytorch#105963", "A state_dict on the meta device is assigned, and the real one loaded back")
def assigned_meta_state(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    state = copy.deepcopy(model.state_dict())
    first = seen(model, x)
    model.load_state_dict({name: value.to("meta") for name, value in state.items()}, assign=True)
    mixed = error(lambda: seen(model, x))
    model.load_state_dict(state, assign=True)
    return first, mixed if isinstance(mixed, tuple) else "no error", seen(model, x)


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


@situation("huggingface/diffusers#5003", "LoRA deltas are added to `weight.data` and taken off again, three in turn")
def lora_fused(lab: Lab) -> Any:
    layer, x, found = lab.one(), lab.x(), []
    for _ in range(3):
        delta = torch.randn(16, 3, device=lab.device) @ torch.randn(3, 16 * 16, device=lab.device)
        delta = delta.view_as(layer.weight)
        found.append(seen(layer, x))
        layer.weight.data += delta
        found.append(seen(layer, x))
        layer.weight.data -= delta
        found.append(seen(layer, x))
    return found


@situation("open-mmlab/mmengine#266", "An average is exchanged with the weights through the state_dict's tensors")
def averages_exchanged(lab: Lab) -> Any:
    model, x, found = lab.model(), lab.x(), []
    average = {name: torch.randn_like(value) * 0.1 for name, value in model.state_dict().items()}
    for _ in range(4):
        found.append(seen(model, x))
        for name, value in model.state_dict().items():
            kept = value.clone()
            value.copy_(average[name])
            average[name].copy_(kept)
    return found


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


@situation("qubvel-org/segmentation_models.pytorch#51", "Layers are frozen, thawed and frozen again during training")
def frozen_and_thawed(lab: Lab) -> Any:
    model, x, found = lab.model(), lab.x(), []
    for first, second in ((False, True), (True, False), (True, True), (False, False), (True, True)):
        model[0].requires_grad_(first)
        model[2].requires_grad_(second)
        out = model(x)
        found.append([out.requires_grad, *step(model, x)])
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


@situation(
    "google-ai-edge/litert-torch#1061", "Layers are made and dropped in turn: new weights at the address of old ones"
)
def one_address(lab: Lab) -> Any:
    x, found = lab.x(), []
    for _ in range(6):
        layer = lab.one(bias=False)
        found += [seen(layer, x), seen(layer, x), *step(layer, x)]
        layer.weight = nn.Parameter(torch.randn(16, 16, 4, 4, device=lab.device))
        found.append(seen(layer, x))
        del layer
    return found


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
    "vllm-project/vllm-ascend#7473", "Weights are copied over the old ones of a captured CUDA graph", devices=("cuda",)
)
def captured_inference(lab: Lab) -> Any:
    model, x, found = lab.model().requires_grad_(False), lab.x(), []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x)
    for _ in range(3):
        for p in model.parameters():
            p.data.copy_(torch.randn_like(p) * 0.1)
        graph.replay()
        found += [out.clone(), seen(model, x)]
    return found


@situation(
    "pytorch/pytorch#181723",
    "`make_graphed_callables` captures forward and backward; training goes on",
    devices=("cuda",),
)
def graphed_training(lab: Lab) -> Any:
    model, x, found = lab.model(), lab.x(), []
    graphed = torch.cuda.make_graphed_callables(model, (lab.x(requires_grad=True),))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(3):
        optimiser.zero_grad(set_to_none=False)
        out = graphed(x.clone().requires_grad_())
        out.square().mean().backward()
        optimiser.step()
        found += [out.detach().clone(), seen(model, x)]
    return found


@situation(
    "pytorch/pytorch#119873",
    "A loss scaler skips a step whose float16 gradients overflow",
    devices=("cuda",),
    tolerance=BF16,
)
def scaled_training(lab: Lab) -> Any:
    model, x, found = lab.model(), lab.x(), []
    optimiser, scaler = torch.optim.SGD(model.parameters(), lr=0.2), torch.amp.GradScaler(lab.device, 2.0**36)
    for _ in range(6):
        optimiser.zero_grad()
        with torch.autocast(lab.device, torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        found += [seen(model, x), scaler.get_scale() < 2.0**36]
    return found
