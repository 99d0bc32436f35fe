"""Situations from public reports in which a layer that takes the place of PyTorch's could break.

Each is a function that runs the same code with PyTorch's layers and with ours. It takes a `Lab`, which builds the
layers, and returns everything that must agree: tensors, error texts, counts, in any nesting of lists and dicts.

    @situation("pytorch/pytorch#102212", "load_state_dict(assign=True) replaces the parameters")
    def assigned(lab: Lab) -> Any:
        ...
        return seen(model, x)
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import upconv
from conftest import forced_plans

KINDS = ("weights", "modules", "transforms", "tracing", "processes", "shapes", "observers")
"""One module of this package each."""
WAYS = ("layers", "accelerated")
"""How ours come into a model: built as upconv's classes, or by `upconv.accelerate`."""


class Unavailable(Exception):
    """What a situation needs is not on this machine; the text says what."""


@dataclass
class Lab:
    """Builds the layers of one run: ``way`` is "stock" or one of `WAYS`."""

    way: str
    device: str

    def home(self, name: str) -> Any:
        """The class of a layer: PyTorch's, or ours if layers are built as ours and there is one."""
        return getattr(upconv, name, getattr(nn, name)) if self.way == "layers" else getattr(nn, name)

    def layer(self, *args: Any, rank: int = 2, **kwargs: Any) -> Any:
        """A transposed convolution; `done` makes it ours where it is to be accelerated."""
        return self.home(f"ConvTranspose{rank}d")(*args, **{"device": self.device, **kwargs})

    def done(self, model: Any) -> Any:
        """The model, accelerated if that is the way."""
        return upconv.accelerate(model, convolutions=True) if self.way == "accelerated" else model

    def one(self, **kwargs: Any) -> Any:
        """A single layer that most situations use."""
        return self.done(self.layer(16, 16, 4, 2, 1, **kwargs))

    def model(self) -> Any:
        """A decoder of two layers."""
        return self.done(
            nn.Sequential(self.layer(16, 16, 4, 2, 1), nn.ReLU(), self.layer(16, 8, 3, 2, 1, output_padding=1))
        )

    def x(self, *shape: int, **kwargs: Any) -> Tensor:
        """A random input, by default one for `one` and `model`."""
        return torch.randn(shape or (2, 16, 7, 6), device=self.device, **kwargs)


@dataclass(frozen=True)
class Situation:
    """One of the table: ``text`` says what happens, ``source`` where it was reported."""

    run: Callable[[Lab], Any]
    text: str
    source: str
    kind: str
    devices: tuple[str, ...]
    ours: bool
    """Whether an engine of ours computes some call; else PyTorch must see them all."""
    tolerance: float
    """Of float32 tensors, relative in norm: more where autocast computed them in 16 bits."""

    @property
    def name(self) -> str:
        return self.run.__name__


TABLE: list[Situation] = []


def situation(
    source: str, text: str, *, devices: tuple[str, ...] = ("cpu", "cuda"), ours: bool = True, tolerance: float = 1e-4
) -> Callable[[Callable[[Lab], Any]], Callable[[Lab], Any]]:
    """Puts a function into the table; ``source`` is ``owner/repository#number`` or an address."""

    def add(run: Callable[[Lab], Any]) -> Callable[[Lab], Any]:
        TABLE.append(Situation(run, text, source, run.__module__.rpartition(".")[2], devices, ours, tolerance))
        return run

    return add


def every() -> list[Situation]:
    """The whole table, kind by kind."""
    for kind in KINDS:
        import_module(f"situations.{kind}")
    return sorted(TABLE, key=lambda s: KINDS.index(s.kind))


# --- what situations are made of -------------------------------------------------------------------------------------


def seen(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What a validation sees of the model now."""
    with torch.no_grad():
        out: Tensor = model(*args, **kwargs).clone()
    return out


def step(model: Any, x: Tensor, parameters: Any = None) -> list[Tensor]:
    """The output and the gradients for the input and for the parameters that require one."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = model(x)
    wanted = [x, *(p for p in (model.parameters() if parameters is None else parameters) if p.requires_grad)]
    return [out.detach(), *torch.autograd.grad(out.float().square().mean(), wanted)]


def error(call: Callable[[], object]) -> Any:
    """What the call returns, or the type and text of what it raises."""
    try:
        return call()
    except Exception as found:  # which one it is, is what situations compare
        return type(found).__name__, re.sub(r"0x[0-9a-f]+", "0x", str(found))


# --- runs ------------------------------------------------------------------------------------------------------------

BF16 = 5e-2
"""The tolerance of a situation with autocast in bfloat16."""
TOLERANCE = {torch.bfloat16: BF16, torch.float16: 6e-3, torch.float64: 1e-10, torch.complex128: 1e-10}
"""Relative in norm, by dtype; float32's is the situation's."""


def differences(ours: Any, theirs: Any, single: float, where: str = "") -> list[str]:
    """In what the results differ, a line each."""
    if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        return _of_tensors(ours, theirs, single, where)
    if type(ours) is not type(theirs):
        return [f"{where}: {str(ours)[:300]} instead of {str(theirs)[:300]}"]
    if isinstance(theirs, Mapping):
        if list(ours) != list(theirs):
            return [f"{where}: keys {list(ours)} instead of {list(theirs)}"]
        return [line for key in theirs for line in differences(ours[key], theirs[key], single, f"{where}[{key!r}]")]
    if isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{where}: {str(ours)[:300]} instead of {str(theirs)[:300]}"]
        return [
            line for i, (a, b) in enumerate(zip(ours, theirs)) for line in differences(a, b, single, f"{where}[{i}]")
        ]
    return [] if ours == theirs else [f"{where}: {str(ours)[:300]} instead of {str(theirs)[:300]}"]


def _of_tensors(ours: Tensor, theirs: Tensor, single: float, where: str) -> list[str]:
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
        if getattr(ours, name) != getattr(theirs, name):
            return [f"{where}: {name} {getattr(ours, name)} instead of {getattr(theirs, name)}"]
    strided = ours.layout is torch.strided  # a stride of a dimension of size 1 leads nowhere
    if strided and any(a != b for n, a, b in zip(ours.shape, ours.stride(), theirs.stride()) if n > 1):
        return [f"{where}: strides {ours.stride()} instead of {theirs.stride()}"]
    if ours.device.type == "meta" or not ours.numel():
        return []
    wide = torch.complex128 if ours.is_complex() else torch.float64
    a, b = (t.detach().to_dense().to(wide) for t in (ours, theirs))
    if not torch.equal(a.isfinite(), b.isfinite()):
        return [f"{where}: other elements are finite"]
    a, b = (t.where(t.isfinite(), torch.zeros_like(t)) for t in (a, b))
    off = ((a - b).norm() / b.norm().clamp_min(1e-30)).item()
    return [] if off <= TOLERANCE.get(ours.dtype, single) else [f"{where}: relative error {off:.2g}"]


@dataclass
class Verdict:
    """In what ours differs from PyTorch, by the way that it came into the model."""

    lines: list[str] = field(default_factory=list)
    reached: bool = False
    """Whether an engine of ours computed something; on a GPU nobody looks."""

    def __str__(self) -> str:
        return "; ".join(self.lines) or "same"


def judge(s: Situation, device: str, every: bool = True) -> Verdict:
    """Runs a situation with PyTorch's layers and in every way with ours.

    On a CPU the engine that is planned for such small layers is PyTorch's operator, so each way runs with our engine
    forced on all calls that it can serve too; without ``every`` only so.
    """
    theirs = run(s, "stock", device)
    if isinstance(theirs, BaseException):
        raise theirs  # the situation itself is broken
    verdict = Verdict()
    for way in WAYS:
        for forced in (False, True) if device == "cpu" and every else (device == "cpu",):
            with forced_plans("any", "split") if forced else nullcontext([]) as found:  # type: ignore[attr-defined]
                ours = run(s, way, device)
            verdict.reached |= bool(found)
            label = f"{way}, forced" if forced else way
            if isinstance(ours, BaseException):
                verdict.lines.append(f"{label}: raised {type(ours).__name__}: {str(ours)[:300]}")
            else:
                verdict.lines += [f"{label}{line}" for line in differences(ours, theirs, s.tolerance)]
    return verdict


def run(s: Situation, way: str, device: str) -> Any:
    """What a situation returns, or raises, with the layers of a `Lab`'s way."""
    torch.manual_seed(0)
    if device == "cuda":  # each time, since torch.export sets some of PyTorch's flags for TF32 and wants them alike
        torch.backends.cudnn.allow_tf32 = False
    if "torch._dynamo" in sys.modules:  # importing it takes longer than most situations
        torch._dynamo.reset()
    try:
        return s.run(Lab(way, device))
    except Unavailable:
        raise
    except Exception as found:
        return found
