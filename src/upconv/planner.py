"""Problem + Device -> Plan. The choice is by rule, never by timing, and every candidate not chosen has its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from upconv import cpu
from upconv.cuda import families
from upconv.cuda.families import weighed
from upconv.cuda.gpu import Gpu
from upconv.problem import Pass, Problem

if TYPE_CHECKING:
    from upconv.cuda import engine


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
    choice: families.Choice | None
    """The family's configuration; None for ``native``."""
    candidates: tuple[Candidate, ...]
    """The chosen one first."""


@dataclass(frozen=True)
class Plan:
    """How each pass of a `Problem` is computed on a device.

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
    choice: families.Choice | None = None
    """On a GPU the configuration of the kernel that computes the forward."""

    @cached_property
    def runners(self) -> dict[int, engine.Runner]:
        """The forward's kernels as loaded on each CUDA device, by its index; filled by `upconv.cuda.engine`."""
        return {}

    @cached_property
    def gradient_runners(self) -> dict[int, engine.Gradients]:
        """As `runners`, for the gradients."""
        return {}

    @cached_property
    def replays(self) -> dict[Any, Any]:
        """What `upconv.replays` knows of its calls."""
        return {}

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

    def choices(self, pass_: Pass) -> dict[Pass, families.Choice]:
        """The kernels of a pass on a GPU; a step's are those of its three passes."""
        found = {name: self.selection(name).choice for name in _parts(pass_)}
        return {name: choice for name, choice in found.items() if choice is not None}

    @property
    def seconds(self) -> float | None:
        """What the cost model expects of the forward's kernel; None where there is no model."""
        return None if self.choice is None else self.choice.seconds

    @property
    def delegates(self) -> bool:
        """Whether every pass is PyTorch's own operator."""
        return self.forward == "native" == self.backward

    def engine(self, pass_: Pass) -> str:
        """Whose kernel computes a pass: ``torch`` where it is PyTorch's own operator, else ``cpu:phases`` or the like.

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
    from upconv.cuda import gpu, jit

    if not torch.cuda.is_available():
        return Device("cuda", unavailable="PyTorch finds no CUDA device")
    if getattr(torch.version, "hip", None) is not None:
        return Device("cuda", unavailable="upconv's kernels are CUDA, and this PyTorch is built for ROCm")
    return Device("cuda", gpu=gpu.gpu(index), unavailable=jit.unavailable())


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
    forward, why = _choose_forward(p, device)
    backward, why_backward = _choose_backward(p, device)
    if p.pass_ in ("fwd", "step"):
        chosen = Candidate(forward, True, why)
        others = [Candidate(name, False, _why_not(p, name, why)) for name in cpu.FORWARD_PLANS if name != forward]
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


def select(p: Problem, device: Device, general: bool = False) -> Selection:
    """The family whose cost model expects the least time; PyTorch's operator only where no kernel of ours fits.

    ``general``: among kernels that serve every size of the input.
    """
    found: dict[str, families.Choice | str] = {}
    reason = _no_kernels(p, device)
    if reason is None and device.gpu is not None:
        found = families.choose(p, device.gpu, general)
        reason = "none of upconv's kernels fits"
    fitting = {name: choice for name, choice in found.items() if not isinstance(choice, str)}
    best = min(fitting, key=lambda name: weighed(fitting[name]), default=None)
    others = [
        Candidate(name, False, answer if isinstance(answer, str) else _slower(answer, fitting[str(best)]))
        for name, answer in found.items()
        if name != best
    ]
    if best is None:
        return Selection("native", None, (Candidate("native", True, str(reason)), *others))
    others.append(Candidate("native", False, "PyTorch's operator serves only what no kernel of ours fits"))
    return Selection(best, fitting[best], (Candidate(best, True, _modelled(fitting[best])), *others))


_UNPLANNED = "where the forward is PyTorch's own operator its gradients are too"


def _modelled(choice: families.Choice) -> str:
    return f"{1e3 * choice.seconds:.3g} ms by the model, bound by {choice.bound}: {choice.summary}"


def _slower(choice: families.Choice, best: families.Choice) -> str:
    """Why a choice is not the best one, in a sentence."""
    if choice.seconds >= best.seconds:
        return f"slower: {_modelled(choice)}"
    own, other = (f"{1e3 * weighed(one):.3g}" for one in (choice, best))
    return f"slower, as models hope more or less: {own} ms where {best.family} counts {other}; {_modelled(choice)}"


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


# --- the CPU rule ----------------------------------------------------------------------------------------------------
#
# What PyTorch's operator costs on a CPU follows from what oneDNN builds for it (ONEDNN_VERBOSE shows it; times on two
# cores of a Zen 5, docs/measured.md has the list):
# - a kernel of its own ("brg_deconv") for layers without dilation whose output is a whole number of strides, and for
#   channels_last layers of stride 1. Nothing here beats it but for few output channels.
# - anything else from another primitive ("conv:any"), after which a scalar loop adds the bias: 7.5 ns per output
#   element in bfloat16, 0.4 to 4 in float32, often several times the convolution itself.
# - grouped or dilated layers with a stride by im2col.

_WEIGHTS_PER_OUTPUT = 1 / 4  # above this, packing the weights costs more than the bias loop saves (0.5x to 0.9x seen)
_FEW_CHANNELS = 4  # output channels per group up to which PyTorch's kernels, padded to 16, lose to shuffle
_FEW_RESULTS = 64  # output channels of shuffle's correlation up to which it beats one correlation per phase
_SMALL = 10_000_000  # multiplications per thread below which a call is bound by its overhead, not by the kernel
# Elements below which the plans' own overhead (flip 40 us a call, shuffle 120, phases 280) eats what they gain.
_SMALL_OUTPUT = 1 << 16
# Bytes from which glibc maps a temporary anew at every call (a 2x2 stride-2 layer: 34 -> 17 ms without one).
_BIG_OUTPUT = 32 << 20
_BIG_WORK = 512  # multiplications per output element above which that no longer matters
_TAPS_PER_PHASE = 4  # from which one correlation per phase beats im2col without counting the bias
_MANY_PHASES = 16  # from which a depthwise layer reads its input too often phase by phase
_BLOWUP = 2.0  # multiplications of shuffle over the useful ones that its single pass still pays for


def scalar_bias(p: Problem) -> bool:
    """Whether PyTorch's operator would add the bias in oneDNN's scalar loop."""
    return p.bias and p.dtype is not torch.float64 and not cpu.own_kernel(p)


def _mapped_anew(p: Problem) -> bool:
    """Whether a temporary of the output's size would be mapped anew at every call."""
    return math.prod(p.output_shape) * p.dtype.itemsize >= _BIG_OUTPUT


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dilated(p: Problem) -> bool:
    """Dilated along a dimension that has a stride, where PyTorch's operator falls back to im2col."""
    return any(d > 1 and s > 1 for d, s in zip(p.dilation, p.stride))


def _correlations(p: Problem) -> int:
    return sum(1 for phase in p.phases if phase.tap_count and phase.output_count)


def _choose_forward(p: Problem, device: Device) -> tuple[str, str]:
    """The forward's plan and the reason for it."""
    plan, reason = _fastest_forward(p, device)
    if plan == "native" and cpu.unwritten(p):
        return "wide", "PyTorch's bfloat16 operator would return memory that nothing wrote; in float32 it does not"
    return plan, reason


def _fastest_forward(p: Problem, device: Device) -> tuple[str, str]:
    """The same where PyTorch's own operator is right."""
    if p.batch == 0 or min(p.size) == 0:
        return "native", "the input is empty"
    if any(d * (k - 1) >= s * n for d, k, s, n in zip(p.dilation, p.kernel, p.stride, p.size)):
        # Every output then sees the border, and oneDNN's forward kernels refuse a padding as wide as the input.
        return _relieved(p, device, "the kernel reaches across the whole input")
    if cpu.untrusted(p):
        return "native", "oneDNN's half-precision forward kernels are not to be trusted on images this narrow"
    if p.dtype is torch.float64:
        return _choose_float64(p)
    if p.dtype not in device.onednn:
        return (
            "native",
            f"PyTorch runs no oneDNN convolution in {_name(p.dtype)} here, and the other plans rest on them",
        )
    if math.prod(p.weight_shape) > _WEIGHTS_PER_OUTPUT * math.prod(p.output_shape):
        return _relieved(p, device, "the weights are large beside the output, so packing them costs more than it gains")
    if math.prod(p.output_shape) < _SMALL_OUTPUT:
        return _relieved(p, device, "the output is small, so the call is bound by its overhead")
    if all(s == 1 for s in p.stride):
        return _choose_unstrided(p, device)
    return _choose_depthwise(p, device) if p.depthwise else _choose_strided(p, device)


def _relieved(p: Problem, device: Device, reason: str) -> tuple[str, str]:
    """PyTorch's operator, relieved of a slow bias where that costs no accuracy."""
    if scalar_bias(p) and p.dtype in device.onednn and cpu.refusal(p, "unbiased") is None:
        return "unbiased", f"{reason}; oneDNN would add the bias in a scalar loop"
    return "native", reason


def _choose_float64(p: Problem) -> tuple[str, str]:
    if p.groups > 1 and _dilated(p):
        return "phases", "dilated with a stride: PyTorch's operator multiplies for every tap at every output"
    if p.depthwise and math.prod(p.stride) >= _MANY_PHASES and cpu.shuffle_blowup(p) <= _BLOWUP:
        return "shuffle", "depthwise with many phases: one correlation instead of a scatter per tap"
    return "native", "float64 has no oneDNN kernel, and im2col of a forward convolution is no faster"


def _choose_unstrided(p: Problem, device: Device) -> tuple[str, str]:
    slow_bias = scalar_bias(p)
    if p.layout == "channels_last" and not (p.depthwise or p.groups >= 8):
        return "native", "oneDNN has a kernel of its own for channels_last at stride 1"
    if p.groups > 1:
        even = p.out_channels == p.in_channels and ((slow_bias and p.dtype in cpu.HALF) or p.layout == "channels_last")
        if p.depthwise or p.out_channels > p.in_channels or even:
            return "flip", "oneDNN's forward kernel for groups is faster than its transposed one"
        return _relieved(p, device, "im2col of the input would be larger than of the output")
    blocked = p.in_channels % 16 == 0 == p.out_channels % 16
    if slow_bias and p.dtype is torch.float32 and blocked and not _mapped_anew(p):
        # As fast as flip (1.2 to 1.3 times native both), without packing the weights.
        return _relieved(p, device, "oneDNN's kernel runs on full blocks of 16 channels")
    if slow_bias:
        return "flip", "the bias is fused into the forward convolution, where oneDNN would add it in a scalar loop"
    if max(p.in_channels, p.out_channels) < 16 or (p.rank == 1 and p.in_channels < 16):
        return "flip", "fewer than 16 channels fit oneDNN's forward kernel better than its transposed one"
    return "native", "oneDNN's transposed kernel is as fast as its forward one here"


def _choose_depthwise(p: Problem, device: Device) -> tuple[str, str]:
    nchw, dilated = p.layout == "nchw", _dilated(p)
    dense = p.taps >= _TAPS_PER_PHASE * _correlations(p)
    if p.dtype in cpu.HALF:
        chunk = cpu.wide_channels(p)
        if nchw and not dilated and p.rank < 3 and chunk < p.batch * p.in_channels and chunk % 16 == 0:
            return "wide", "oneDNN's depthwise kernel is far faster in float32, and chunks of it stay in cache"
        if nchw and not dilated and math.prod(p.stride) >= _MANY_PHASES and cpu.shuffle_blowup(p) <= _BLOWUP:
            return "shuffle", "depthwise with many phases: one correlation reads the input once"
        if scalar_bias(p) or not nchw or not dilated or dense:
            return "phases", "oneDNN's depthwise forward kernel is far faster than its transposed one"
    elif dilated and (dense or not nchw):
        return "phases", "dilated with a stride: PyTorch's operator falls back to im2col"
    return _relieved(p, device, "oneDNN's transposed depthwise kernel is fast")


def _choose_strided(p: Problem, device: Device) -> tuple[str, str]:
    half, nchw, slow_bias = p.dtype in cpu.HALF, p.layout == "nchw", scalar_bias(p)
    channels = p.out_channels // p.groups
    urgent = half and slow_bias  # the scalar loop in half precision costs more than anything else could
    work = p.macs / device.threads
    # A narrow 1-D input is reordered at several times the cost of the convolution.
    fits = cpu.shuffle_blowup(p) <= _BLOWUP and not (p.rank == 1 and p.in_channels < 16)
    if _dilated(p):
        few = _correlations(p)
        worth = urgent or (work >= _SMALL / 2 and (p.groups == 1 or not nchw or p.out_channels >= p.in_channels))
        if worth and (urgent or p.taps >= _TAPS_PER_PHASE * few or (p.groups > 1 and not nchw)):
            return "phases", "dilated with a stride: PyTorch's operator falls back to im2col"
        return _relieved(p, device, f"{p.taps} taps in {few} correlations are too few to beat im2col")
    if p.groups == 1 and channels <= _FEW_CHANNELS and fits and (urgent or work >= _SMALL):
        return "shuffle", f"few output channels ({channels}) would be padded to 16 for every phase"
    if urgent:
        if fits and ((p.groups > 1 and p.rank == 3) or channels * math.prod(p.stride) <= _FEW_RESULTS):
            return "shuffle", "the bias is fused into one correlation, where oneDNN would add it in a scalar loop"
        return "phases", "the bias is fused into the correlations, where oneDNN would add it in a scalar loop"
    big = _mapped_anew(p) and p.macs <= _BIG_WORK * math.prod(p.output_shape)
    if nchw and not half and not slow_bias and big and _correlations(p) == len(p.phases):
        return "phases", "no temporary of the output's size, which from 32 MiB on is mapped anew at every call"
    return _relieved(p, device, "oneDNN's own transposed kernel is the fastest for this shape")


def _choose_backward(p: Problem, device: Device) -> tuple[str, str]:
    """How the gradients are taken together."""
    if p.dtype in device.onednn and cpu.untrusted_gradients(p):
        return "wide", "oneDNN's gradients may be wrong on images so narrow or so padded; float64 goes without oneDNN"
    if not p.bias:
        return "native", "PyTorch's operator computes both gradients with forward-shaped kernels"
    if p.dtype not in device.onednn:
        return "native", f"PyTorch runs no oneDNN convolution in {_name(p.dtype)} here"
    return "split", "the bias' gradient is summed apart: within oneDNN's primitive it costs up to 4 times both others"


def _why_not(p: Problem, name: str, why: str) -> str:
    """Why a candidate was not chosen when the chosen one was, for the reason ``why``."""
    refused = cpu.refusal(p, name)
    if refused:
        return refused
    if name == "native":
        if scalar_bias(p):
            return "oneDNN would add the bias in a scalar loop after the convolution"
        return f"slower: {why}"
    if name == "unbiased":
        if not scalar_bias(p):
            return "oneDNN's kernel for this shape adds the bias itself"
        return f"a second pass over the output, and slower: {why}"
    if name == "wide":
        return f"chunks of float32 pay in NCHW, without dilation, by 16 channels; {why}"
    if name == "shuffle":
        return f"its common window takes {cpu.shuffle_blowup(p):.2g} times the useful multiplications; {why}"
    if name == "phases":
        return f"{_correlations(p)} correlations, each reading the input anew; {why}"
    return f"no gain: {why}"
