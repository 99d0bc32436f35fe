"""Which calls of a compiled graph are ours.

A compiler fuses what stands around a convolution and chooses layouts, so that PyTorch's operator costs less than it
does alone. On a GPU a call is ours where our estimates of its passes are below what is expected of PyTorch's operator
in the layout that the graph will have. The host spends less on a replayed call than on PyTorch's operator. Without
the C++ module that replays (`upconv.replay.native`) it spends more, which the rule leaves out. On a CPU a call is ours
where it is ours outside of a graph.

The rule is by the layer, never by timing. It is asked when a graph is traced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from upconv import convolutions, planner
from upconv.cuda.family import call_seconds
from upconv.planner import Plan
from upconv.problem import Pass, Problem

SLOWER_LAST = 1.35
"""How much longer cuDNN's kernels take in channels_last than `upconv.convolutions.expected` says. That is a bound for
plain convolutions; for transposed ones profiles of compiled models show 1.36 to 1.6 times as much."""


@dataclass(frozen=True)
class Verdict:
    """Whether a compiled graph's call is ours, and why, in a sentence."""

    ours: bool
    reason: str


def verdict(plan: Plan, training: bool) -> Verdict:
    """The rule for a call that has a plan.

    Args:
        plan: of the call as it is traced.
        training: whether its gradients are recorded.
    """
    p, gpu = plan.problem, plan.device.gpu
    if plan.device.kind != "cuda":
        if plan.forward != "native" or (training and plan.backward == "wide"):
            return Verdict(True, "its plan is upconv's outside of a graph too")
        return Verdict(False, "PyTorch's operator is the faster one, or the only one")
    if plan.choice is None or gpu is None:
        return Verdict(False, plan.candidates[0].reason)
    if p.groups > 1 or p.dtype is torch.float64 or p.precision == "ieee" or gpu.capability != (9, 0):
        return Verdict(True, "nothing is known of PyTorch's operator that would speak for it")
    where = ""
    if _turned(p, training):
        where = " in channels_last, to which Inductor turns it,"
        plan = planner.plan(p.with_(layout="channels_last"), plan.device)
    passes: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight") if training else ("fwd",)
    ours = theirs = 0.0
    for pass_ in passes:
        choice = plan.selection(pass_).choice
        expected = convolutions.expected(plan.problem, pass_, gpu)
        expected *= SLOWER_LAST if plan.problem.layout == "channels_last" else 1.0
        theirs += expected
        ours += expected if choice is None else call_seconds(choice)
    what = "its passes are" if training else "it is"
    estimates = f"{what} estimated{where} at {1e3 * ours:.3g} ms"
    return Verdict(ours < theirs, f"{estimates}, PyTorch's operator at {1e3 * theirs:.3g} ms")


def sentence(p: Problem, device: planner.Device, training: bool = False) -> str:
    """What `upconv explain` says of a layer in a compiled graph.

    print(rule.sentence(problem, planner.device_of(torch.device("cuda"))))
    """
    found = verdict(planner.plan(p.with_(pass_="fwd"), device), training)
    return f"Under torch.compile it is {'upconv' if found.ours else 'PyTorch'}'s: {found.reason}."


def _turned(p: Problem, training: bool) -> bool:
    """Whether Inductor will turn a contiguous layer to channels_last, as it does images in graphs for inference."""
    return p.layout == "nchw" and p.rank == 2 and not training
