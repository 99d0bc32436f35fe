"""Whole models with transposed convolutions, a training step or inference: ours against PyTorch, eager and compiled.

A step is what a training loop repeats: forward, loss, backward and Adam. Inference is one forward without gradients.
Every side has its own copy of the same model, with the same weights and inputs; ours is `upconv.accelerate`'s, of
transposed convolutions alone and of plain ones too. On a GPU each eager side is timed with ``cudnn.benchmark`` on and
off (the models have plain convolutions) and its better time counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

import upconv
from upconv.bench import report, timing
from upconv.bench.models import Case
from upconv.bench.report import Report, Row
from upconv.bench.timing import Repeats
from upconv.cpu import memory_format
from upconv.problem import Layout
from upconv.replay import native, replays

Side = Literal["ours", "convolutions", "torch", "compile", "compile_ours"]
Mode = Literal["step", "fwd"]
MODES: tuple[Mode, ...] = ("step", "fwd")
EAGER: tuple[Side, ...] = ("ours", "convolutions", "torch")
COMPILED: tuple[Side, ...] = ("compile", "compile_ours")
REPEATS = Repeats(8.0, 10, 200)
"""Medians of steps that a host bounds differ by 5 % where they are of 60 (DCGAN in float32: 0.97 and 1.05)."""
RATE = 1e-4
WITHIN = 0.02
"""First losses of two sides may differ by this share: bfloat16's roundings leave 1e-3."""
WITHIN_GRADIENT = 0.1
"""So may the norms of their gradients: a last layer three times too large moves a loss by 4 % and these by 160 %."""
WITHIN_OUTPUT = 0.05
"""So may an inference's output in norm: bfloat16 rounds each layer's results by up to 4e-3."""


@dataclass(frozen=True)
class Run:
    """One row: a model in a precision, a layout and a mode (``step``, or ``fwd`` for inference)."""

    case: Case
    autocast: bool
    layout: Layout = "nchw"
    mode: Mode = "step"

    @property
    def name(self) -> str:
        """The row's name, like ``unet bf16 channels_last inference``."""
        layout = ["channels_last"] if self.layout == "channels_last" else []
        mode = ["inference"] if self.mode == "fwd" else []
        return " ".join([self.case.name, "bf16" if self.autocast else "fp32", *layout, *mode])


def runs(
    todo: Sequence[Case],
    *,
    autocast: Sequence[bool] = (False, True),
    layouts: Sequence[Layout] = ("nchw",),
    modes: Sequence[Mode] = ("step",),
) -> list[Run]:
    """Every combination that exists, model by model; a model of sequences has no channels_last."""
    every = product(todo, modes, layouts, autocast)
    return [
        Run(case, cast, layout, mode) for case, mode, layout, cast in every if case.images or layout != "channels_last"
    ]


class Trainer:
    """A model's networks and optimizers on a device, as one side runs them."""

    def __init__(self, run: Run, side: Side, device: torch.device) -> None:
        torch.manual_seed(0)
        networks = [network.to(device).train(run.mode == "step") for network in run.case.make()]
        torch.manual_seed(1)
        self.given = run.case.draw(device)
        if run.layout == "channels_last":
            order = memory_format("channels_last", 2)
            networks = [network.to(memory_format=order) for network in networks]  # type: ignore[call-overload]
            self.given = [t.contiguous(memory_format=order) if t.dim() == 4 else t for t in self.given]
        if side not in ("torch", "compile"):
            networks = [upconv.accelerate(network, convolutions=side == "convolutions") for network in networks]
        self.run, self.device, self.networks = run, device, networks
        called: list[Any] = [torch.compile(network) for network in networks] if side in COMPILED else networks
        self.first: nn.Module = called[0]
        self.parts = []
        if run.mode == "step":
            optimizers = [torch.optim.Adam(network.parameters(), RATE) for network in networks]
            self.parts = [(loss, optimizers[i]) for loss, i in run.case.losses(called, self.given)]

    def __call__(self) -> list[Tensor]:
        """One step or inference; the losses before it, or the output."""
        if self.run.mode == "fwd":
            with torch.no_grad(), self._casting():
                return [self.first(self.given[0])]
        found = []
        for loss, optimizer in self.parts:
            with self._casting():
                value = loss()
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            optimizer.step()
            found.append(value.detach())
        return found

    def _casting(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.run.autocast else nullcontext()

    def norms(self) -> list[float]:
        """The norm of each optimizer's gradients, as the last step left them."""
        every = ([p for group in optimizer.param_groups for p in group["params"]] for _, optimizer in self.parts)
        return [torch.nn.utils.get_total_norm([p.grad for p in each if p.grad is not None]).item() for each in every]


def measure(
    device: torch.device,
    todo: Sequence[Run],
    tell: Callable[..., object],
    repeats: Repeats = REPEATS,
    *,
    compiled: bool = True,
) -> Report:
    """The report of these rows: times of every side, and peak memory.

    Args:
        device: where.
        todo: the rows.
        tell: hears of each row and side as it begins.
        repeats: how often.
        compiled: also time ``torch.compile``'s of PyTorch's model and of ours; where it fails, the row says why.
    """
    if device.type == "cuda":
        native.wait()  # a training run has it from its first half a minute on
    asked = (*EAGER, *(COMPILED if compiled else ()))

    def rows() -> Iterator[Row]:
        for done, run in enumerate(todo):
            yield row(run, device, repeats, asked, partial(tell, done=done, total=len(todo)))

    return report.gather(rows(), device, "training")


def row(
    run: Run,
    device: torch.device,
    repeats: Repeats,
    asked: Sequence[Side],
    tell: Callable[..., object],
    ready: Callable[[], object] = lambda: None,
) -> Row:
    """A row as `measure` has it, of these sides, PyTorch's eager one among them.

    ``ready`` is called ahead of the times, when nothing is left to compile.
    """
    found: Row = {"case": run.name, "pass": run.mode, "layout": run.layout, "failure": None, "ratio": None}
    torch.compiler.reset()  # Dynamo compiles a model's code for few copies of it, and runs the rest uncompiled
    trainers: dict[Side, Trainer] = {}
    first: dict[Side, list[Found]] = {}
    for side in asked:
        tell(f"{run.name} {side}")
        try:
            trainer = Trainer(run, side, device)
            first[side] = _first(trainer)
            found[f"{side}_peak_bytes"] = _peak(trainer, device)
            trainers[side] = trainer
        except Exception as error:  # a compiler that is not there, say, does not cost the other sides
            said = f"{timing.NAMES[side]}: {type(error).__name__}: {error}".splitlines()[0]
            if side not in COMPILED:
                return found | {"failure": said}
            found[f"{side}_failure"] = said
    for side in trainers:
        wrong = _wrong(first[side], first["torch"])
        if wrong is not None:
            return found | {"failure": f"wrong: {wrong}" + (f" ({timing.NAMES[side]})" if side in COMPILED else "")}
    tell(f"{run.name} times")
    ready()
    if "compile" in trainers and "compile_ours" in asked and "compile_ours" not in trainers:
        found["failure"] = found.pop("compile_ours_failure")  # what PyTorch compiles, it must compile with upconv
    eager, graphs = ({str(s): [t] for s, t in trainers.items() if (s in COMPILED) is held} for held in (False, True))
    # A step that waits for its host does so when it trains.
    taken = dict(timing.compare(eager, device, repeats, tuple(eager), wait=False))
    if graphs:
        # What the host runs between two compiled steps changes their times: they are compared with each other alone.
        # A compiled graph's guards hold cudnn.benchmark: it keeps to the flag that it was compiled under.
        taken |= timing.compare(graphs, device, repeats, (), wait=False)
    return found | timing.entries(taken)


Found = tuple[str, float, list[Tensor]]
"""What a side's first step or inference found: its name, how far sides may be apart, and values."""


def _first(trainer: Trainer) -> list[Found]:
    found = trainer()
    if trainer.run.mode == "fwd":
        return [("the outputs", WITHIN_OUTPUT, [found[0].float()])]
    norms = [torch.tensor(norm) for norm in trainer.norms()]
    return [("the first losses", WITHIN, found), ("the first gradients' norms", WITHIN_GRADIENT, norms)]


def _wrong(ours: list[Found], theirs: list[Found]) -> str | None:
    """What differs by too much from PyTorch's, in words; None for nothing."""
    for (what, limit, mine), (_, _, others) in zip(ours, theirs):
        every = [(a - b).norm() / b.norm().clamp(min=1e-9) for a, b in zip(mine, others)]
        apart = torch.stack(every).max().item()  # not Python's maximum, which loses a NaN
        if not apart <= limit:
            return f"{what} differ by {apart:.1e}"
    return None


def _peak(trainer: Trainer, device: torch.device) -> int | None:
    """Bytes that a step asks the allocator for at its peak, beside what it holds between steps; None on a CPU.

    The median of three, behind those in which calls are recorded. Not the allocator's blocks: these are longer than
    what is asked for, by their past up to 2 MB of 340. Models that ask for the same bytes may have blocks of different
    lengths.
    """
    if device.type != "cuda":
        return None
    for _ in range(replays.CALLS + 1):
        trainer()
    found = []
    for _ in range(3):
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = _requested(device, "current")
        trainer()
        torch.cuda.synchronize(device)
        found.append(_requested(device, "peak") - before)
    return int(median(found))


def _requested(device: torch.device, when: Literal["current", "peak"]) -> int:
    stats = torch.cuda.memory_stats(device)
    return int(stats[f"requested_bytes.all.{when}"])
