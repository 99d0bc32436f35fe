"""Problem + Device -> Plan. The choice is by rule, never by timing, and every candidate not chosen has its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from upconv import cpu
from upconv.problem import Pass, Problem


@dataclass(frozen=True)
class Device:
    """What the planner may know of a device."""

    kind: str
    """``cpu`` or ``cuda``."""
    threads: int = 1
    """Threads that PyTorch's operations on a CPU use."""
    onednn: bool = True
    """Whether PyTorch uses oneDNN (``torch.backends.mkldnn.enabled``)."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a pass, and why it was or was not chosen, in a sentence."""

    name: str
    chosen: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """How each pass of a `Problem` is computed on a device: the names of `upconv.cpu`'s plans."""

    problem: Problem
    device: Device
    forward: str
    grad_input: str
    grad_weight: str
    candidates: tuple[Candidate, ...]
    """The candidates for the problem's own pass (for a step: the forward's), the chosen one first."""

    @property
    def delegates(self) -> bool:
        """Whether every pass is PyTorch's own operator."""
        return self.forward == self.grad_input == self.grad_weight == "native"

    def engine(self, pass_: Pass) -> str:
        """Whose kernel computes a pass: ``torch`` where it is PyTorch's own operator, else ``cpu:<plan>``."""
        names = {"fwd": self.forward, "grad-input": self.grad_input, "grad-weight": self.grad_weight}
        used = names.values() if pass_ == "step" else (names[pass_],)
        ours = [name for name in used if name != "native"]
        return "torch" if not ours else f"{self.device.kind}:{'+'.join(dict.fromkeys(ours))}"


def device_of(device: torch.device) -> Device:
    """The planner's view of a torch device."""
    return cpu_device() if device.type == "cpu" else Device(device.type)


def cpu_device() -> Device:
    """The CPU as PyTorch is set to use it now."""
    return _cpu_device(torch.get_num_threads(), torch._C._get_mkldnn_enabled())


@lru_cache(maxsize=64)
def _cpu_device(threads: int, onednn: bool) -> Device:
    return Device("cpu", threads, onednn)


@lru_cache(maxsize=4096)
def plan(p: Problem, device: Device) -> Plan:
    """The plan for all passes of ``p``; its candidates explain ``p.pass_``."""
    forward = "flip" if math.prod(p.stride) == 1 else "phases"
    if cpu.refusal(p, forward) or device.kind != "cpu":
        forward = "native"
    return Plan(p, device, forward, "native", "native", (Candidate(forward, True, "draft"),))
