"""Trains the examples' DCGAN and U-Net with upconv's layers and with PyTorch's, and says how their losses agree.

    python benchmarks/curves.py                 trains on a GPU, writes benchmarks/results/h200-curves.json
    python benchmarks/curves.py --draw          draws docs/training-curves.png from it and prints the figures
    python benchmarks/curves.py --device cpu --steps 20 --small --out curves.json

Six trainings of each model, 300 steps in float32 under PyTorch's default flags: with upconv from seed 0, with PyTorch
from seed 0, the same once more, and with PyTorch from seeds 1 to 3. A seed decides the weights, the batches and the
noise, so that of equal seeds only roundings differ. These grow as a training goes on, and a GAN's fast: what can be
asked of equal seeds is to lie no further apart than PyTorch's of seeds 0 and 1 do; how far apart any two seeds are is
stated beside. Losses are compared by their means over windows of 20 steps. PyTorch's second run from seed 0 shows what
its own kernels, some of which add in any order, leave of a seed.

Training needs ``pip install 'upconv[examples]'``; both models are trained at the same time, in a process each.
`make readme` writes the figures into docs/benchmarks.md and draws the picture.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "benchmarks" / "results" / "h200-curves.json"
PICTURE = ROOT / "docs" / "training-curves.png"
SCHEMA = 1
STEPS = 300
WINDOW = 20
"""Steps of a window, whose mean losses are compared."""
RUNS = {
    "upconv": (True, 0), "torch": (False, 0), "torch again": (False, 0), "torch, seed 1": (False, 1),
    "torch, seed 2": (False, 2), "torch, seed 3": (False, 3),
}  # fmt: skip
"""(upconv's layers, seed) of each training."""
LEAST_RUNS = 4
"""Of a report: one from before the last two seeds has no more."""
LINES: dict[str, dict[str, Any]] = {
    "torch, seed 3": {"color": "wheat", "linewidth": 1.5},
    "torch, seed 2": {"color": "sandybrown", "linewidth": 1.5},
    "torch, seed 1": {"color": "tab:orange", "linewidth": 1.5},
    "torch again": {"color": "tab:blue", "linewidth": 1.5},
    "torch": {"color": "black", "linewidth": 2.5},
    "upconv": {"color": "tab:green", "linewidth": 1.5, "linestyle": (0, (3, 1.5))},
}
"""From the lowest to the topmost: where two agree, both are seen."""
MODELS = {"dcgan": ("DCGAN", ("generator", "discriminator")), "unet": ("U-Net", ("loss",))}
"""Title and losses of each example."""
SIZES = {"dcgan": (64, 64), "unet": (32, 16)}
"""Width and batch: channels enough for tensor cores."""
SMALL = {"dcgan": (8, 8), "unet": (4, 2)}


class Model(TypedDict):
    """A model's trainings."""

    width: int
    batch: int
    losses: dict[str, dict[str, list[float]]]
    """By run and by the loss's name, one for each step."""
    seconds: dict[str, float]
    """Of each run; the first compiles upconv's kernels, the second finds cuDNN's."""


class Curves(TypedDict):
    """All trainings, as JSON holds them."""

    schema: int
    when: str
    commit: str | None
    device: dict[str, Any]
    versions: dict[str, Any]
    steps: int
    models: dict[str, Model]


# --- training --------------------------------------------------------------------------------------------------------


def example(name: str) -> ModuleType:
    """An example as a module; its progress bars stay silent."""
    from rich.console import Console

    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and enums look their module up
    spec.loader.exec_module(module)
    module.console = Console(quiet=True)  # type: ignore[attr-defined]
    return module


def trained(name: str, width: int, batch: int, steps: int, device: str) -> Model:
    """All of `RUNS` of one model."""
    program = example(f"train_{name}")
    names = MODELS[name][1]
    made = Model(width=width, batch=batch, losses={}, seconds={})
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
    import torch

    from upconv import env

    context, threads = multiprocessing.get_context("spawn"), max(1, torch.get_num_threads() // len(MODELS))
    with ProcessPoolExecutor(len(MODELS), context, torch.set_num_threads, (threads,)) as pool:
        jobs = {pool.submit(trained, name, *sizes[name], steps, device): name for name in MODELS}
        models = {}
        for job in as_completed(jobs):
            models[jobs[job]] = job.result()
            times = ", ".join(f"{run} {seconds:.1f} s" for run, seconds in job.result()["seconds"].items())
            print(f"{MODELS[jobs[job]][0]}: {times}", flush=True)
    return Curves(
        schema=SCHEMA,
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=env.commit(),
        device=env.device(torch.device(device)),
        versions=env.versions(),
        steps=steps,
        models={name: models[name] for name in MODELS},
    )


# --- files -----------------------------------------------------------------------------------------------------------


def save(found: Curves, path: Path) -> None:
    """Writes the report as JSON, a training a line, in one step."""
    from upconv.bench import report

    text = json.dumps(found, allow_nan=False)
    for run in RUNS:
        text = text.replace(f'"{run}": {{', f'\n"{run}": {{')
    report.publish(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def load(path: Path) -> Curves:
    """Reads a report. Errors: ValueError where it is none of this schema, or lacks a run."""
    found: Curves = json.loads(path.read_text(encoding="utf-8"))
    if found.get("schema") != SCHEMA or "models" not in found:
        raise ValueError(f"{path} must hold training curves of schema {SCHEMA}, got {found.get('schema')!r}")
    for name, model in found["models"].items():
        runs = list(model["losses"])
        if runs != list(RUNS)[: max(len(runs), LEAST_RUNS)]:
            raise ValueError(f"{path} must have the runs {', '.join(RUNS)} of {name}, got {', '.join(model['losses'])}")
    return found


# --- how they agree --------------------------------------------------------------------------------------------------


def windows(losses: Sequence[float]) -> list[float]:
    """Mean losses of windows; a last one of fewer steps counts with those it has."""
    parts = [losses[i : i + WINDOW] for i in range(0, len(losses), WINDOW)]
    return [sum(part) / len(part) for part in parts]


def distance(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """How far two runs' windows lie apart: their differences' mean and largest."""
    apart = [abs(v - w) for v, w in zip(windows(a), windows(b), strict=True)]
    return sum(apart) / len(apart), max(apart)


def spread(model: Model, loss: str) -> list[float]:
    """Mean distances of two trainings by PyTorch from different seeds, of all such pairs, the least first."""
    runs = {run: losses[loss] for run, losses in model["losses"].items() if not RUNS[run][0]}
    pairs = [(a, b) for a, b in combinations(runs, 2) if RUNS[a][1] != RUNS[b][1]]
    return sorted(distance(runs[a], runs[b])[0] for a, b in pairs)


def agree(model: Model, loss: str) -> bool:
    """Whether upconv's run is, in the mean, no further from PyTorch's of its seed than PyTorch's of another seed."""
    runs = {run: losses[loss] for run, losses in model["losses"].items()}
    return distance(runs["upconv"], runs["torch"])[0] <= distance(runs["torch, seed 1"], runs["torch"])[0]


def stated(found: Curves) -> str:
    """A table of the distances from PyTorch's run of seed 0, and the picture."""
    heads = [
        "loss",
        "first, both",
        "last 20, PyTorch",
        "upconv, same seed",
        "PyTorch again",
        "PyTorch, seed 1",
        "PyTorch, any two seeds",
        "within",
    ]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---", *("---:" for _ in heads[1:-1]), "---"]) + " |"]
    for name, (title, losses) in MODELS.items():
        model = found["models"][name]
        for loss in losses:
            runs = {run: series[loss] for run, series in model["losses"].items()}
            first = f"{runs['torch'][0]:.6f}, {runs['upconv'][0]:.6f}"
            cells = [f"{title}'s {loss}" if len(losses) > 1 else title, first, f"{windows(runs['torch'])[-1]:.4f}"]
            others = ("upconv", "torch again", "torch, seed 1")
            cells += ["{:.2g}, {:.2g}".format(*distance(runs[run], runs["torch"])) for run in others]
            between = spread(model, loss)
            cells.append(f"{between[0]:.2g} to {between[-1]:.2g}")
            lines.append("| " + " | ".join([*cells, "yes" if agree(model, loss) else "no"]) + " |")
    sizes = "; ".join(
        f"{MODELS[name][0]} of width {model['width']}, batches of {model['batch']}"
        for name, model in found["models"].items()
    )
    text = (
        f"Distances from PyTorch's run of seed 0, of losses averaged over windows of {WINDOW} steps: mean and largest "
        f"over the {-(-found['steps'] // WINDOW)} windows of {found['steps']} steps; of two trainings by PyTorch from "
        "different seeds the means, from the pair that is least apart to the most. *Within*: in the mean, upconv is no "
        "further from PyTorch of the same seed than PyTorch of seed 1 is. "
        f"{sizes}; float32, PyTorch's default flags."
    )
    device, versions = found["device"], found["versions"]
    parts = [str(device.get("name")), f"upconv {versions.get('upconv')}", f"PyTorch {versions.get('torch')}"]
    if device.get("type") == "cuda":
        parts.append(f"cuDNN {versions.get('cudnn')}")
    closing = " · ".join([*parts, found["when"][:10]]) + "."
    picture = "![Losses of 300 training steps, upconv and PyTorch](training-curves.png)"
    return "\n".join([picture, "", *lines, "", f"{text} {closing}"])


def draw(found: Curves, path: Path) -> None:
    """A panel for each loss: every step faintly, the mean of the 20 around it on top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from upconv.bench import report

    panels = [(name, loss) for name, (_, losses) in MODELS.items() for loss in losses]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.2), layout="constrained", squeeze=False)
    for axis, (name, loss) in zip(axes[0], panels):
        title, losses = MODELS[name]
        for run, style in LINES.items():
            if run not in found["models"][name]["losses"]:
                continue
            raw, half = found["models"][name]["losses"][run][loss], WINDOW // 2
            near = [raw[max(0, i - half) : i + half] for i in range(len(raw))]
            axis.plot(raw, color=style["color"], linewidth=0.5, alpha=0.18)
            smooth = [sum(part) / len(part) for part in near]
            axis.plot(smooth, label=run.replace("torch", "PyTorch"), **style)
        axis.set(title=f"{title}: {loss}" if len(losses) > 1 else title, xlabel="step", ylabel="loss")
        axis.legend(fontsize=8)
    figure.supxlabel(f"{found['device'].get('name')}, {found['when'][:10]}", x=1, ha="right", fontsize=7)
    report.publish(path, lambda temporary: figure.savefig(temporary, dpi=110))
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to train")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training")
    parser.add_argument("--small", action="store_true", help="narrow models and small batches, for a CPU")
    parser.add_argument("--out", type=Path, default=REPORT, help="the report that is written, or with --draw read")
    parser.add_argument("--draw", action="store_true", help="only draw, from a report that is there")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="the picture that --draw draws")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if not options.draw:
        save(measure(options.device, options.steps, SMALL if options.small else SIZES), options.out)
        print(stated(load(options.out)))
        return 0
    found = load(options.out)
    draw(found, options.picture)
    print(stated(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
