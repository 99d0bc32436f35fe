"""Profilers, counters and modes that watch calls, and settings of the whole process."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from situations import BF16, Lab, error, seen, situation, step


@situation("pytorch/pytorch#119806", "FlopCounterMode counts a training step, by module", ours=False)
def flops(lab: Lab) -> Any:
    model, x, found = lab.model(), lab.x(), []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            model(x.requires_grad_()).square().mean().backward()
        found += [x.grad, *(p.grad for p in model.parameters())]
        counts = counter.get_flop_counts()
        found.append({k: {str(op): n for op, n in v.items()} for k, v in counts.items()})
    return found


@situation("Lightning-AI/pytorch-lightning#19950", "The profiler runs around training steps, with shapes and stacks")
def profiled(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (lab.device == "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=kinds, record_shapes=True, profile_memory=True, with_stack=True) as found:
            out = [step(model, x) for _ in range(3)]
    return out, len(found.key_averages()) > 0, step(model, x)


class Listing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += "detach" not in str(func)
        return func(*args, **(kwargs or {}))


class Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in getattr(func, "__name__", ""):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@situation(
    "https://docs.pytorch.org/docs/stable/generated/torch.empty.html", "The default dtype is another than the model's"
)
def default_dtype(lab: Lab) -> Any:
    model, x, before = lab.model(), lab.x(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        fresh = lab.one()
        return step(model, x), seen(model, x), step(fresh, x.double()), error(lambda: seen(fresh, x))
    finally:
        torch.set_default_dtype(before)


@situation("huggingface/accelerate#1826", "A context makes meta the default device while a real model runs")
def default_device(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    with torch.device("meta"):
        found = [step(model, x), seen(model, x), seen(model, x)]
        built = Lab(lab.way, "meta").one()
    return found, built.weight.device.type, seen(model, x)


@situation("pytorch/pytorch#83909", "Warnings are errors, from building a model to training it", tolerance=BF16)
def no_warnings(lab: Lab) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, x = lab.model(), lab.x()
        found = [step(model, x), seen(model, x)]
        model.to(memory_format=torch.channels_last)
        with torch.autocast(lab.device, torch.bfloat16):
            found.append(step(model, x))
        return found, step(model, x.to(memory_format=torch.channels_last))
