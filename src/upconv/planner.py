"""Problem + Device -> Plan. The choice is by rule, never by timing, and every candidate not chosen has its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from upconv import cpu
from upconv.cpu import rule
from upconv.cuda import families, gpu
from upconv.cuda.family import Choice, best_of, call_seconds
from upconv.cuda.gpu import Gpu
from upconv.problem import Pass, Problem


@dataclass(frozen=True)
class Device:
    """What the planner may know of a device."""

    kind: str
    """``cpu``, ``cuda`` or another of torch's device types."""
    threads: int = 1
    """Threads that PyTorch's operations on a CPU use."""
    onednn: frozenset[torch.dtype] = frozenset()
    """The dtypes for which PyTorch uses oneDNN's convolutions; empty when it is switched off or not built in."""
    gpu: Gpu | None = None
    """The GPU behind a ``cuda`` device."""
    unavailable: str | None = None
    """Why upconv's CUDA kernels cannot be used here, in a sentence; None where they can."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a pass, and why it was or was not chosen, in a sentence."""

    name: str
    chosen: bool
    reason: str


@dataclass(frozen=True)
class Selection:
    """How one pass is computed on a GPU."""

    name: str
    """A kernel family, or ``native``."""
    choice: Choice | None
    """The family's configuration; None for ``native``."""
    candidates: tuple[Candidate, ...]
    """The chosen one first."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How each pass of a `Problem` is computed on a device; equal to itself alone.

    The names are those of `upconv.cpu`'s plans, on a GPU those of the kernel families (`upconv.cuda.families.FAMILIES`;
    for the weight's gradient its `WEIGHT_FAMILIES`), and ``native`` for PyTorch's own operator.
    """

    problem: Problem
    device: Device
    forward: str
    backward: str
    """How the gradients are taken together: a plan of `upconv.cpu`, or `FAMILIES`: by kernels, see `selection`."""
    candidates: tuple[Candidate, ...]
    """The candidates for the problem's own pass (for a step: the forward's), the chosen one first."""
    choice: Choice | None = None
    """On a GPU the configuration of the kernel that computes the forward."""

    @cached_property
    def grad_input(self) -> Selection:
        """How the gradient for the input is computed on a GPU; found when it is first asked for."""
        return self._gradient("grad-input")

    @cached_property
    def grad_weight(self) -> Selection:
        """How the gradient for the weight is computed on a GPU; found when it is first asked for."""
        return self._gradient("grad-weight")

    def _gradient(self, pass_: Pass) -> Selection:
        if self.backward != FAMILIES:
            reason = _no_kernels(self.problem, self.device) or _UNPLANNED
            return Selection("native", None, (Candidate("native", True, reason),))
        return select(self.problem.with_(pass_=pass_, bias=False), self.device)

    def selection(self, pass_: Pass) -> Selection:
        """How ``fwd``, ``grad-input`` or ``grad-weight`` is computed on a GPU."""
        if pass_ == "grad-input":
            return self.grad_input
        if pass_ == "grad-weight":
            return self.grad_weight
        return Selection(self.forward, self.choice, self.candidates)

    def choices(self, pass_: Pass) -> dict[Pass, Choice]:
        """The kernels of a pass on a GPU; a step's are those of its three passes."""
        found = {name: self.selection(name).choice for name in _parts(pass_)}
        return {name: choice for name, choice in found.items() if choice is not None}

    @property
    def delegates(self) -> bool:
        """Whether every pass is PyTorch's own operator."""
        return self.forward == "native" == self.backward

    def engine(self, pass_: Pass) -> str:
        """Whose kernel computes a pass: ``torch`` where it is PyTorch's own operator, else ``cpu:flip`` or the like.

        On a CPU a gradient alone is PyTorch's own. A step is ours if any of its passes is.
        """
        if self.backward == FAMILIES:
            used = [self.selection(name).name for name in _parts(pass_)]
        else:
            used = {"fwd": [self.forward], "step": [self.forward, self.backward]}.get(pass_, [])
        ours = dict.fromkeys(name for name in used if name != "native")
        return f"{self.device.kind}:{'+'.join(ours)}" if ours else "torch"


def _parts(pass_: Pass) -> tuple[Pass, ...]:
    return ("fwd", "grad-input", "grad-weight") if pass_ == "step" else (pass_,)


def device_of(device: torch.device) -> Device:
    """The planner's view of a torch device; a ``cuda`` one without an index is the current one."""
    if device.type == "cpu":
        return cpu_device()
    if device.type != "cuda":
        return Device(device.type)
    if str(device) == "cuda" and torch.cuda.is_available():
        return cuda_device(torch.cuda.current_device())
    return cuda_device(device.index or 0)


@lru_cache(maxsize=64)
def cuda_device(index: int) -> Device:
    """A CUDA device as the planner sees it, with the reason why upconv's kernels cannot run on it if they cannot."""
    from upconv.cuda.compile import nvrtc

    if not torch.cuda.is_available():
        return Device("cuda", unavailable="PyTorch finds no CUDA device")
    if getattr(torch.version, "hip", None) is not None:
        return Device("cuda", unavailable="upconv's kernels are CUDA, and this PyTorch is built for ROCm")
    return Device("cuda", gpu=gpu.gpu(index), unavailable=nvrtc.unavailable())


def cpu_device() -> Device:
    """The CPU as PyTorch is set to use it now."""
    return _cpu_device(torch.get_num_threads(), torch._C._get_mkldnn_enabled())


@lru_cache(maxsize=64)
def _cpu_device(threads: int, enabled: bool) -> Device:
    dtypes = set()
    if enabled and torch.backends.mkldnn.is_available():
        dtypes.add(torch.float32)
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            dtypes.add(torch.bfloat16)
        if torch.ops.mkldnn._is_mkldnn_fp16_supported():
            dtypes.add(torch.float16)
    return Device("cpu", threads, frozenset(dtypes))


@lru_cache(maxsize=4096)
def plan(p: Problem, device: Device) -> Plan:
    """The plan for all passes of ``p``; its candidates explain ``p.pass_``."""
    if device.kind == "cuda":
        return _plan_cuda(p, device)
    if device.kind != "cpu":
        reason = f"upconv has no engine for {device.kind} devices"
        return Plan(p, device, "native", "native", (Candidate("native", True, reason),))
    forward, why = rule.choose_forward(p, device.onednn, device.threads)
    backward, why_backward = rule.choose_backward(p, device.onednn)
    if p.pass_ in ("fwd", "step"):
        chosen = Candidate(forward, True, why)
        others = [Candidate(name, False, rule.why_not(p, name, why)) for name in cpu.FORWARD_PLANS if name != forward]
    elif p.pass_ == "grad-input" or p.pass_ == "grad-weight":
        chosen, others = Candidate("native", True, "PyTorch's operator is oneDNN's forward-shaped kernel already"), []
    if p.pass_ == "step":
        others.append(Candidate(f"backward {backward}", True, why_backward))
    return Plan(p, device, forward, backward, (chosen, *others))


# --- CUDA ------------------------------------------------------------------------------------------------------------

LEAST_CAPABILITY = (8, 0)  # the tensor-core kernels need mma.sync in TF32 and bfloat16 and cp.async


FAMILIES = "families"
"""A CUDA plan's `Plan.backward`: each gradient by the family whose cost model expects the least time."""


def _plan_cuda(p: Problem, device: Device) -> Plan:
    """Every pass by the cheapest family; the gradients' are looked for when somebody asks."""
    forward = select(p.with_(pass_="fwd"), device)
    backward = "native" if forward.choice is None else FAMILIES
    found = Plan(p, device, forward.name, backward, forward.candidates, forward.choice)
    if p.pass_ == "fwd":
        return found
    if p.pass_ != "step":
        return replace(found, candidates=found.selection(p.pass_).candidates)
    gradients = [
        Candidate(f"{name} {c.name}", c.chosen, c.reason)
        for name in _parts("step")[1:]
        for c in found.selection(name).candidates
    ]
    return replace(found, candidates=(*forward.candidates, *gradients))


def select(p: Problem, device: Device) -> Selection:
    """The family whose cost model expects the least time; PyTorch's operator only where no kernel of ours fits."""
    found: dict[str, Choice | str] = {}
    reason = _no_kernels(p, device)
    if reason is None and device.gpu is not None:
        found = families.choose(p, device.gpu)
        reason = "none of upconv's kernels fits"
    best = best_of(found)
    if best is None:
        refused = (Candidate(name, False, str(answer)) for name, answer in found.items())
        return Selection("native", None, (Candidate("native", True, str(reason)), *refused))
    others = [
        Candidate(name, False, answer if isinstance(answer, str) else _slower(answer, best))
        for name, answer in found.items()
        if answer is not best
    ]
    others.append(Candidate("native", False, "PyTorch's operator serves only what no kernel of ours fits"))
    name = next(name for name, answer in found.items() if answer is best)
    return Selection(name, best, (Candidate(name, True, _modelled(best)), *others))


_UNPLANNED = "where the forward is PyTorch's own operator its gradients are too"


def _modelled(choice: Choice) -> str:
    terms = f" ({choice.cost.text})" if choice.cost.text else ""
    return f"{1e3 * choice.seconds:.3g} ms by the model, bound by {choice.bound}{terms}: {choice.summary}"


def _slower(choice: Choice, best: Choice) -> str:
    """Why a choice is not the best one, in a sentence."""
    if choice.seconds >= best.seconds:
        return f"slower: {_modelled(choice)}"
    own, other = (f"{1e3 * call_seconds(one):.3g}" for one in (choice, best))
    return f"slower with its packing: {own} ms, and {other} ms by {best.family}; {_modelled(choice)}"


def _no_kernels(p: Problem, device: Device) -> str | None:
    """Why no kernel of ours can be considered, in a sentence; None where one can."""
    if device.unavailable is not None:
        return device.unavailable
    if device.gpu is None:
        return "nothing is known of this GPU"
    if device.gpu.capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (device.gpu.capability, LEAST_CAPABILITY))
        return f"upconv's kernels need compute capability {need}, and {device.gpu.name} has {have}"
    if p.batch == 0 or min(p.size) == 0:
        return "the input is empty"
    return None
