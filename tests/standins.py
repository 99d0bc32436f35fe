"""Stand-ins for kernels: they compute each pass by the float64 reference and keep a log.

Behind them are the real planner, engine and autograd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import _forget_plans
from upconv import convolutions, cpu, modules, planner, reference
from upconv.cuda import bias, engine, families, family, gpu
from upconv.cuda import weights as packed
from upconv.cuda.cost import Cost
from upconv.cuda.launches import Given, Launch, Unit
from upconv.planner import Device
from upconv.problem import Problem

H200 = Device("cuda", gpu=gpu.H200)

Log = list[tuple[str, str]]


@dataclass(frozen=True)
class StandIn(family.Choice):
    """A choice that computes its pass by the reference; the log holds ``(what, pass)``."""

    problem: Problem
    log: Log = field(compare=False)
    family: str = "stand-in"
    seconds: float = 1e-3
    summary: str = "one tile"
    bound: str = "nothing"
    cost: Cost = field(default_factory=Cost)
    failure: Exception | None = None
    """What its kernel raises."""
    packing: str | None = None
    """What its packed weights depend on; by default on the choice."""
    fresh: list[bool] = field(default_factory=list, compare=False)
    """Of each run, whether its kernel may overlap with what packs its weight."""
    lasting: list[bool] = field(default_factory=list, compare=False)
    """Of each run, whether it may allocate what outlives the call."""

    def sources(self) -> tuple[Unit, ...]:
        return (Unit(f"{self.problem.pass_} {self.problem.kernel}", f"// {self.problem}", ()),)

    def launches(self, given: Given) -> tuple[Launch, ...]:
        return ()

    def prepare(self, device: int) -> Any:
        self.log.append(("prepare", self.problem.pass_))
        return Weight(self) if self.problem.pass_ == "grad-weight" else Data(self)

    def check(self, *tensors: Tensor) -> None:
        """What kernels rely on."""
        layout = cpu.memory_format(self.problem.layout, self.problem.rank)
        assert all(t.is_contiguous(memory_format=layout) and t.dtype is self.problem.dtype for t in tensors)
        assert not any(t.is_neg() for t in tensors), "a kernel knows nothing of PyTorch's negative bit"


class Loaded:
    """What the engine asks of every prepared choice."""

    casts = biased = False
    loaded = True

    def load(self) -> None:
        """There is nothing to load."""


class Data(Loaded):
    """``fwd`` and ``grad-input``."""

    def __init__(self, choice: StandIn) -> None:
        self.choice = choice
        self.packing = choice if choice.packing is None else choice.packing

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        p = self.choice.problem
        self.choice.log.append(("pack", p.pass_))
        assert weight.dtype is p.dtype or (self.casts and weight.dtype is torch.float32)
        assert bias is None or weight.dtype is bias.dtype is torch.float32
        parts = [t.detach().to(p.dtype).flatten() for t in (weight, bias) if t is not None]
        return torch.cat(parts)

    def packed(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What `pack` makes of a weight, or made of it before."""
        assert not weight.is_neg()
        if weight.dim() == 1:
            return weight
        single = bias is not None and bias.dtype is not self.choice.problem.dtype
        return self.pack(weight, bias if single else None)

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, fresh: bool = False, lasting: bool = False
    ) -> None:
        p, packed = self.choice.problem, self.packed(weight, bias)
        self.choice.log.append(("run", p.pass_))
        self.choice.fresh.append(fresh)
        self.choice.lasting.append(lasting)
        if self.choice.failure is not None:
            raise self.choice.failure
        self.choice.check(x, out)
        assert bias is None or (bias.is_contiguous() and not bias.is_neg())
        count, packed = math.prod(p.weight_shape), packed.flatten()
        if bias is not None and bias.dtype is not p.dtype:  # it went with the weights
            bias = packed[count:]
            assert len(bias) == p.out_channels
        packed = packed[:count].view(p.weight_shape)
        if p.pass_ == "fwd":
            out.copy_(reference.forward(p, x, packed, bias))
        else:
            assert bias is None
            out.copy_(reference.gradients(p, x, torch.zeros(p.input_shape), packed)[0])


class Weight(Loaded):
    """``grad-weight``."""

    def __init__(self, choice: StandIn) -> None:
        self.choice = choice

    def run(self, x: Tensor, grad: Tensor, out: Tensor, lasting: bool = False) -> None:
        p = self.choice.problem
        self.choice.log.append(("run", p.pass_))
        self.choice.check(x, grad)
        assert out.dtype is p.dtype or (self.casts and out.dtype is torch.float32)
        out.copy_(reference.gradients(p, grad, x, torch.zeros(p.weight_shape))[1])


@dataclass
class Kernels:
    """The log of all stand-ins, the passes that were planned, those that have none (with the reason why), and the GPU.

    ``waits``: for which streams' packings others waited.
    """

    log: Log = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    stream: int = 0
    capturing: bool = False
    waits: list[int] = field(default_factory=list)

    def ran(self) -> list[str]:
        """The passes that ran since the last question, the forwards first."""
        found = sorted(pass_ for what, pass_ in self.log if what == "run")
        self.log.clear()
        return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Every call on CPU tensors is planned as for a GPU whose kernels are the stand-ins."""
    found = Kernels()

    def choose(p: Problem, g: gpu.Gpu, general: bool = False) -> dict[str, Any]:
        found.planned.append(p.pass_)
        return {"stand-in": found.lacking.get(p.pass_) or StandIn(p, found.log)}

    plans: dict[Problem, planner.Plan] = {}
    _forget_plans()
    monkeypatch.setattr(families, "choose", choose)
    monkeypatch.setattr(engine, "_current_device", lambda: -1)
    monkeypatch.setattr(engine, "_capturing", lambda: found.capturing)
    monkeypatch.setattr(packed, "current_stream", lambda index: found.stream)
    monkeypatch.setattr(bias, "serves", lambda p: False)  # however large: it would be launched
    monkeypatch.setattr(packed, "_record", lambda index: found.stream)
    monkeypatch.setattr(packed, "_wait", lambda event, tensor, index: found.waits.append(event))
    monkeypatch.setattr(planner, "plan", lambda p, d: plans.setdefault(p, planner._plan_cuda(p, H200)))
    yield found
    monkeypatch.undo()
    _forget_plans()
    packed.frozen.clear()


# --- plain convolutions -----------------------------------------------------------------------------------------------


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every convolution is ours that has kernels, however small."""
    convolutions.forget()
    monkeypatch.setattr(convolutions, "LEAST", 0.0)
    modules._left.clear()
    monkeypatch.setattr(convolutions, "faster", lambda plan, pass_, *_: plan.selection(pass_).choice is not None)
    yield
    monkeypatch.undo()
    convolutions.forget()
    modules._left.clear()


@pytest.fixture
def stand_ins(kernels: Kernels, everything: None, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The same of tensors on the CPU, by the stand-ins; float64 is as good as any dtype to them."""
    monkeypatch.setattr(convolutions, "_on_gpu", lambda t: True)
    monkeypatch.setattr(planner, "cuda_device", lambda index: H200)

    def choose(p: Problem, device: Device, training: bool = False) -> Any:
        return convolutions.Convolution(planner.plan(p, device))

    monkeypatch.setattr(convolutions, "choose", choose)
    return kernels
