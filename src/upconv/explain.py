"""What upconv does with a layer, in a few lines: sizes, phases and taps, the roof, the plan and why no other."""

from __future__ import annotations

import math
import string

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from upconv.bench.report import si
from upconv.bench.roofline import Ceilings
from upconv.bench.run import plan_text
from upconv.cuda import gpu as gpus
from upconv.cuda.gpu import Gpu
from upconv.planner import Plan
from upconv.problem import Precision, Problem

LETTERS = string.ascii_lowercase + string.ascii_uppercase
"""A letter for each phase that has taps; phases beyond them are drawn as ``*``."""
MOST_LETTERS = 16
"""Phases with the same number of taps that are listed by their letters; of more, the first ones."""
MOST_TAPS = 24
"""Taps drawn along a dimension; a longer kernel repeats its pattern anyway."""
_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


def phase_letters(p: Problem) -> dict[tuple[int, ...], str]:
    """For each tap (a kernel index per dimension) the letter of its phase."""
    letters = {}
    for i, phase in enumerate(p.phases):
        for tap in phase.taps:
            letters[tap] = LETTERS[i] if i < len(LETTERS) else "*"
    return letters


def kernel_drawing(p: Problem) -> list[str]:
    """The kernel as lines of phase letters, rows by columns; the planes of a 3-D kernel side by side."""
    letters = phase_letters(p)
    shown = [range(min(k, MOST_TAPS)) for k in p.kernel]
    rows: list[list[str]] = [[] for _ in (shown[-2] if p.rank > 1 else range(1))]
    for plane in shown[0] if p.rank == 3 else range(1):
        for y, row in enumerate(rows):
            head = {1: (), 2: (y,), 3: (plane, y)}[p.rank]
            taps = [(*head, x) for x in shown[-1]]
            line = " ".join(letters[tap] for tap in taps)
            row.append(line + (" …" if p.kernel[-1] > MOST_TAPS else ""))
    lines = ["   ".join(row) for row in rows]
    if any(k > MOST_TAPS for k in p.kernel[:-1]):
        lines.append("…")
    return lines


def _coloured(line: str) -> Text:
    text = Text(line)
    for i, letter in enumerate(line):
        if letter in LETTERS:
            text.stylize(_STYLES[LETTERS.index(letter) % len(_STYLES)], i, i + 1)
    return text


def phase_lines(p: Problem) -> list[str]:
    """A line for the phases of each tap count: their letters and their share of the outputs together."""
    total = math.prod(p.out_size)
    used = p.phases
    lines = []
    for count in sorted({phase.tap_count for phase in used}, reverse=True):
        alike = [i for i, phase in enumerate(used) if phase.tap_count == count]
        letters = " ".join(LETTERS[i] for i in alike[:MOST_LETTERS] if i < len(LETTERS))
        more = f" … ({len(alike)} phases)" if len(alike) > MOST_LETTERS else ""
        share = sum(used[i].output_count for i in alike) / total
        lines.append(f"{letters}{more}: {_taps(count)}{' each' if len(alike) > 1 else ''}, {share:.0%} of the outputs")
    empty = p.tapless_phases
    if empty:
        share = 1 - sum(phase.output_count for phase in used) / total
        have = "phase has" if empty == 1 else "phases have"
        lines.append(f"{empty} {have} no tap: {share:.0%} of the outputs are just the bias")
    return lines


def _taps(count: int) -> str:
    return f"{count} tap" + ("s" if count != 1 else "")


def _roof(p: Problem, ceilings: Ceilings) -> str:
    rate, copy = ceilings["matmul_flops_per_s"][p.precision], ceilings["copy_bytes_per_s"]
    arithmetic, memory = p.flops / rate, p.bytes / copy
    bound = "arithmetic" if arithmetic >= memory else "memory"
    return (
        f"{1e3 * p.roof_seconds(rate, copy):.3g} ms, bound by {bound}: {1e3 * arithmetic:.3g} ms of FLOPs at "
        f"{si(rate, 'FLOP/s')}, {1e3 * memory:.3g} ms of bytes at {si(copy, 'B/s')}"
    )


def _expectations(p: Problem, plan: Plan, ceilings: Ceilings) -> list[str]:
    """What the cost model expects of each part of the pass beside its roof."""
    name = plan.device.gpu.name if plan.device.gpu else plan.device.kind
    lines = []
    for pass_, choice in plan.choices(p.pass_).items():
        part = p.with_(pass_=pass_)
        roof = part.roof_seconds(ceilings["matmul_flops_per_s"][p.precision], ceilings["copy_bytes_per_s"])
        lines.append(
            f"{'forward' if pass_ == 'fwd' else pass_} {1e3 * choice.seconds:.3g} ms on {name}, bound by "
            f"{choice.bound}: {roof / choice.seconds:.0%} of its roof, by estimate"
        )
    return lines


def _candidates(plan: Plan) -> Table:
    """Every candidate with its reason, the chosen ones marked."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for candidate in plan.candidates:
        mark, style = ("✓", "bold green") if candidate.chosen else ("·", "dim")
        grid.add_row(Text(f"{mark} {candidate.name}", style=style), candidate.reason)
    return grid


class Explanation:
    """The explanation of one problem, for a rich console."""

    def __init__(self, p: Problem, plan: Plan, ceilings: Ceilings) -> None:
        self.problem, self.plan, self.ceilings = p, plan, ceilings

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        p = self.problem
        precision = str(p.dtype).removeprefix("torch.") + (" as TF32" if p.precision == "tf32" else "")
        yield Text(f"{str(p).rsplit(' ', 3)[0]} · {precision} · {p.layout} · {p.pass_}", style="bold")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()

        def add(name: str, *lines: str | Text | Table) -> None:
            for i, line in enumerate(lines):
                grid.add_row("" if i else name, line)

        add("output", " x ".join(map(str, p.output_shape)))
        add("kernel", *map(_coloured, kernel_drawing(p)))
        count = math.prod(p.stride)
        taps = f"{count} phase{'s' if count != 1 else ''}, {_taps(p.taps)}"
        add("phases", f"{taps}: outputs of a phase share its taps", *phase_lines(p))
        per_byte = f"{p.flops / p.bytes:.3g} FLOP per byte" if p.bytes else "no bytes"
        add("work", f"{si(p.flops, 'FLOP')} useful, {si(p.bytes, 'B')} compulsory ({per_byte})")
        add("roof", _roof(p, self.ceilings))
        expected = _expectations(p, self.plan, self.ceilings)
        if expected:
            add("model", *expected)
        add("plan", f"{plan_text(self.plan, p.pass_)}, engine {self.plan.engine(p.pass_)}", _candidates(self.plan))
        yield grid


GPUS: dict[str, Gpu] = {name: value for name, value in vars(gpus).items() if isinstance(value, Gpu)}
"""The GPUs that plans can be made for without having one, by the names that ``--gpu`` takes."""

# Dense FLOP per clock and multiprocessor: on CUDA cores in float32 and float64, on tensor cores in TF32, half precision
# (float32 sums) and float64 (0: CUDA cores). Source: NVIDIA's architecture whitepapers, peak rates over SMs x clock.
_FLOPS_PER_CLOCK: dict[tuple[int, int], tuple[int, int, int, int, int]] = {
    (8, 0): (128, 64, 1024, 2048, 128),
    (8, 6): (256, 4, 256, 512, 0),
    (8, 9): (256, 4, 256, 512, 0),
    (9, 0): (256, 128, 2048, 4096, 256),
    (10, 0): (256, 128, 4096, 8192, 256),
    (10, 3): (256, 4, 4096, 8192, 0),
    (12, 0): (256, 4, 256, 512, 0),
    (12, 1): (256, 4, 256, 512, 0),
}


def known_gpu(name: str) -> Gpu:
    """A GPU by its name, in any case. Errors: ValueError, one sentence, for names that are not known."""
    for known, found in GPUS.items():
        if known.lower() == name.lower():
            return found
    raise ValueError(f"--gpu must be one of {', '.join(sorted(GPUS))}; got {name!r}")


def estimated_ceilings(gpu: Gpu) -> Ceilings:
    """A roofline's ceilings by the data sheet: no matrix product reaches these rates (an H200's TF32 does 86 %)."""
    fp32, fp64, tf32, half, fp64_tensor = _FLOPS_PER_CLOCK[gpu.capability]
    per_clock: dict[Precision, int] = {
        "ieee": fp32, "tf32": tf32, "bf16": half, "fp16": half, "fp64": max(fp64, fp64_tensor)
    }  # fmt: skip
    rates = {precision: rate * gpu.multiprocessors * gpu.clock for precision, rate in per_clock.items()}
    return Ceilings(copy_bytes_per_s=gpu.bandwidth, matmul_flops_per_s=rates)


def parse_ceilings(text: str, p: Problem) -> Ceilings:
    """``37e9,190e9``: bytes per second of a copy and FLOP/s of a matrix product.

    Raises:
        ValueError: any other text, in one sentence.
    """
    try:
        copy, rate = map(float, text.split(","))
    except ValueError:
        copy = rate = 0.0
    if not (0 < copy < math.inf and 0 < rate < math.inf):
        raise ValueError(f"--ceilings must be bytes/s and FLOP/s joined by a comma, like 37e9,190e9; got {text!r}")
    return Ceilings(copy_bytes_per_s=copy, matmul_flops_per_s={p.precision: rate})
