"""Trains the examples' DCGAN and U-Net with upconv's layers and with PyTorch's, and says how their losses agree.

    python benchmarks/curves.py                 trains on a GPU, writes benchmarks/results/h200-curves.json
    python benchmarks/curves.py --device cpu --steps 20 --small --out curves.json

Seventeen trainings of each model, 300 steps in float32 under PyTorch's default flags: with upconv and with PyTorch from
seeds 0 to 7, and with PyTorch from seed 0 once more. A seed decides the weights, the batches and the noise, so that of
equal seeds only roundings differ. These grow as a training goes on, and a GAN's fast: PyTorch's second run from seed 0
shows what its own kernels, some of which add in any order, leave of a seed. So what can be asked of equal seeds is that
upconv and PyTorch lie no further apart than two trainings by PyTorch from different seeds do; and of more than one
seed, since that differs from seed to seed and from pair to pair. Losses are compared by their means over windows of 20
steps. upconv's are `upconv.accelerate(network, convolutions=True)`, as the examples have them.

Training needs ``pip install 'upconv[examples]'``; both models are trained at the same time, in a process each.
`make readme` writes the figures into docs/benchmarks.md and draws the picture.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import combinations
from pathlib import Path
from statistics import fmean as mean
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from upconv.bench import report
from upconv.bench.tables import conditions
from upconv.cli.arguments import module_of

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "benchmarks" / "results" / "h200-curves.json"
STEPS = 300
WINDOW = 20
"""Steps of a window, whose mean losses are compared."""
SEEDS = 8
AGAIN = "torch, seed 0 again"
RUNS = {f"{side}, seed {seed}": (side == "upconv", seed) for seed in range(SEEDS) for side in ("upconv", "torch")}
RUNS[AGAIN] = (False, 0)
"""(upconv's layers, seed) of each training."""
COLORS = {"torch": "tab:orange", "upconv": "tab:green"}
LINES: dict[str, dict[str, Any]] = {
    AGAIN: {"color": "tab:blue", "linewidth": 1.5},
    "torch, seed 0": {"color": "black", "linewidth": 2.5},
    "upconv, seed 0": {"color": "tab:green", "linewidth": 1.5, "linestyle": (0, (3, 1.5))},
}
"""From the lowest to the topmost: where two agree, both are seen."""
MODELS = {"dcgan": ("DCGAN", ("generator", "discriminator")), "unet": ("U-Net", ("loss",))}
"""Title and losses of each example."""
SIZES = {"dcgan": (64, 64), "unet": (32, 16)}
"""Width and batch: channels enough for tensor cores."""
SMALL = {"dcgan": (8, 8), "unet": (4, 2)}


Model = dict[str, Any]
"""A model's trainings: ``width``, ``batch``, ``losses`` by run, by the loss's name and by step, and ``seconds`` by run.
The first run compiles upconv's kernels, the second finds cuDNN's."""
Curves = dict[str, Any]
"""All trainings, as JSON holds them."""


# --- training --------------------------------------------------------------------------------------------------------


def example(name: str) -> ModuleType:
    """An example as a module; its progress bars stay silent."""
    module = module_of(str(ROOT / "examples" / f"{name}.py"))
    module.console = Console(quiet=True)  # type: ignore[attr-defined]
    return module


def trained(name: str, width: int, batch: int, steps: int, device: str) -> Model:
    """All of `RUNS` of one model."""
    program = example(f"train_{name}")
    names = MODELS[name][1]
    made: Model = {"width": width, "batch": batch, "losses": {}, "seconds": {}}
    if name == "dcgan":
        given: tuple[Any, ...] = (program.faces(),)
    else:
        photo, coins = program.photograph()
        border = photo.shape[0] * 3 // 4
        given = (photo[:border], coins[:border])
    for run, (ours, seed) in RUNS.items():
        begin = time.monotonic()
        _, history = program.train(width, *given, steps, batch, seed, device, False, ours)
        made["seconds"][run] = round(time.monotonic() - begin, 2)
        columns = zip(*history) if len(names) > 1 else (history,)
        made["losses"][run] = {loss: [float(f"{v:.7g}") for v in column] for loss, column in zip(names, columns)}
    return made


def measure(device: str, steps: int, sizes: dict[str, tuple[int, int]]) -> Curves:
    """Trains every model; the losses of all runs."""
    context, threads = multiprocessing.get_context("spawn"), max(1, torch.get_num_threads() // len(MODELS))
    with ProcessPoolExecutor(len(MODELS), context, torch.set_num_threads, (threads,)) as pool:
        jobs = {pool.submit(trained, name, *sizes[name], steps, device): name for name in MODELS}
        models = {}
        for job in as_completed(jobs):
            models[jobs[job]] = job.result()
            times = ", ".join(f"{run} {seconds:.1f} s" for run, seconds in job.result()["seconds"].items())
            print(f"{MODELS[jobs[job]][0]}: {times}", flush=True)
    ordered = {name: models[name] for name in MODELS}
    return report.gather([], torch.device(device), kind="curves", steps=steps, models=ordered)


def save(found: Curves, path: Path) -> None:
    """Writes the report as JSON, a training a line."""
    text = json.dumps(found, allow_nan=False)
    for run in RUNS:
        text = text.replace(f'"{run}": {{', f'\n"{run}": {{')
    path.write_text(text + "\n", encoding="utf-8")


# --- how they agree --------------------------------------------------------------------------------------------------


def windows(losses: Sequence[float]) -> list[float]:
    """Mean losses of windows; a last one of fewer steps counts with those it has."""
    return [mean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """How far two runs' windows are apart, in the mean."""
    return mean(abs(v - w) for v, w in zip(windows(a), windows(b), strict=True))


def distances(runs: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    """Of upconv and PyTorch with the same seed, for all seeds; and of PyTorch with two seeds, for all pairs."""
    ours, theirs = ([runs[f"{side}, seed {seed}"] for seed in range(SEEDS)] for side in ("upconv", "torch"))
    return [distance(a, b) for a, b in zip(ours, theirs)], [distance(a, b) for a, b in combinations(theirs, 2)]


def agree(runs: dict[str, list[float]]) -> bool:
    """Whether upconv and PyTorch with one seed are no further apart than PyTorch with two, in the mean and at most."""
    engines, seeds = distances(runs)
    return mean(engines) <= mean(seeds) and max(engines) <= max(seeds)


def stated(found: Curves) -> str:
    """A table of the distances, and the picture."""
    heads = [
        "loss", "first, PyTorch and upconv", "last 20, PyTorch", "upconv and PyTorch, same seed",
        "PyTorch twice, same seed", "PyTorch, two seeds", "within",
    ]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 2) + " --- |"]
    for name, (title, losses) in MODELS.items():
        for loss in losses:
            runs = {run: series[loss] for run, series in found["models"][name]["losses"].items()}
            ours, theirs = runs["upconv, seed 0"], runs["torch, seed 0"]
            engines, seeds = distances(runs)
            cells = [
                f"{title}'s {loss}" if len(losses) > 1 else title, f"{theirs[0]:.6f}, {ours[0]:.6f}",
                f"{windows(theirs)[-1]:.4f}", _summed(engines), f"{distance(runs[AGAIN], theirs):.2g}", _summed(seeds),
                "yes" if agree(runs) else "no",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    sizes = ". ".join(
        f"{MODELS[name][0]} has width {model['width']} and batches of {model['batch']}"
        for name, model in found["models"].items()
    )
    text = (
        f"A distance is that of losses averaged over windows of {WINDOW} steps. Each number is the mean over the "
        f"{-(-found['steps'] // WINDOW)} windows of {found['steps']} steps and over {SEEDS} seeds, or all their pairs. "
        "The least and the largest are in brackets. *Within* compares upconv and PyTorch of the same seed with PyTorch "
        "of two seeds. It says yes where neither the mean nor the largest distance is greater. First and last losses "
        f"are those of seed 0. {sizes}. All in float32 by PyTorch's default flags, with plain convolutions by upconv."
    )
    picture = "![Losses of 300 training steps, upconv and PyTorch](training-curves.png)"
    return "\n".join([picture, "", *lines, "", f"{text} {conditions(found)}."])


def _summed(distances: Sequence[float]) -> str:
    return f"{mean(distances):.2g} ({min(distances):.2g} to {max(distances):.2g})"


def _smooth(losses: Sequence[float]) -> list[float]:
    """Of each step the mean of the window around it."""
    half = WINDOW // 2
    return [mean(losses[max(0, i - half) : i + half]) for i in range(len(losses))]


def draw(found: Curves, path: Path) -> None:
    """A panel for each loss: where all seeds lie as an area, runs of seed 0 on top, by the mean of 20 steps."""
    from matplotlib.figure import Figure

    panels = [(name, loss) for name, (_, losses) in MODELS.items() for loss in losses]
    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    for axis, (name, loss) in zip(figure.subplots(1, len(panels)), panels):
        title, losses = MODELS[name]
        runs = {run: _smooth(series[loss]) for run, series in found["models"][name]["losses"].items()}
        for side, color in COLORS.items():
            seeds = list(zip(*(runs[f"{side}, seed {i}"] for i in range(SEEDS))))
            low, high = [min(step) for step in seeds], [max(step) for step in seeds]
            label = f"{side.replace('torch', 'PyTorch')}, {SEEDS} seeds"
            axis.fill_between(range(len(low)), low, high, color=color, alpha=0.25, linewidth=0, label=label)
        for run, style in LINES.items():
            axis.plot(runs[run], label=run.replace("torch", "PyTorch"), **style)
        axis.set(title=f"{title}: {loss}" if len(losses) > 1 else title, xlabel="step", ylabel="loss")
        axis.legend(fontsize=8)
    figure.supxlabel(f"{found['device'].get('name')}, {found['when'][:10]}", x=1, ha="right", fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to train")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training")
    parser.add_argument("--small", action="store_true", help="narrow models and small batches, for a CPU")
    parser.add_argument("--out", type=Path, default=REPORT, help="the report that is written")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    found = measure(options.device, options.steps, SMALL if options.small else SIZES)
    save(found, options.out)
    print(stated(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
