"""What upconv does with a layer, in a few lines: sizes, phases and taps, the roof, the plan and why no other."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from upconv.bench.roofline import Ceilings
from upconv.bench.run import plan_text
from upconv.bench.tables import si
from upconv.compiler import rule
from upconv.cuda.family import call_seconds
from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Given
from upconv.model_layers import Call
from upconv.planner import Plan
from upconv.problem import Pass, Precision, Problem, dtype_name

LETTERS = string.ascii_lowercase + string.ascii_uppercase
"""A letter for each phase that has taps; phases beyond them are drawn as ``*``."""
MOST_LETTERS = 16
"""Phases with the same number of taps that are listed by their letters; of more, the first ones."""
MOST_TAPS = 24
"""Taps drawn along a dimension; a longer kernel repeats its pattern anyway."""


def kernel_drawing(p: Problem) -> list[str]:
    """The kernel as lines of phase letters, rows by columns; the planes of a 3-D kernel side by side."""
    letters = {tap: (*LETTERS, "*")[min(i, len(LETTERS))] for i, phase in enumerate(p.phases) for tap in phase.taps}
    planes, rows, columns = (range(min(k, MOST_TAPS)) for k in (1, 1, *p.kernel)[-3:])
    more = " …" if p.kernel[-1] > MOST_TAPS else ""

    def row(plane: int, y: int) -> str:
        return " ".join(letters[(plane, y, x)[-p.rank :]] for x in columns) + more

    lines = ["   ".join(row(plane, y) for plane in planes) for y in rows]
    return lines + ["…"] * any(k > MOST_TAPS for k in p.kernel[:-1])


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


def _roof_line(p: Problem, ceilings: Ceilings) -> str:
    rate, copy = ceilings["matmul_flops_per_s"][p.precision], ceilings["copy_bytes_per_s"]
    arithmetic, memory = p.flops / rate, p.bytes / copy
    bound = "arithmetic" if arithmetic >= memory else "memory"
    return (
        f"{1e3 * _roof(p, ceilings):.3g} ms, bound by {bound}: {1e3 * arithmetic:.3g} ms of FLOPs at "
        f"{si(rate, 'FLOP/s')}, {1e3 * memory:.3g} ms of bytes at {si(copy, 'B/s')}"
    )


def _roof(p: Problem, ceilings: Ceilings) -> float:
    return p.roof_seconds(ceilings["matmul_flops_per_s"][p.precision], ceilings["copy_bytes_per_s"])


def _named(pass_: Pass) -> str:
    return "forward" if pass_ == "fwd" else pass_


def _expectations(p: Problem, plan: Plan, ceilings: Ceilings) -> list[str]:
    """What the cost model expects of each part of the pass beside its roof."""
    name = plan.device.gpu.name if plan.device.gpu else plan.device.kind
    return [
        f"{_named(pass_)} {1e3 * choice.seconds:.3g} ms on {name}, bound by {choice.bound}: "
        f"{_roof(p.with_(pass_=pass_), ceilings) / choice.seconds:.0%} of its roof, by estimate"
        for pass_, choice in plan.choices(p.pass_).items()
    ]


def launch_lines(p: Problem, plan: Plan) -> list[str]:
    """A line for each kernel that a call with a contiguous weight launches, in their order."""
    lines = []
    for pass_, choice in plan.choices(p.pass_).items():
        given = Given("in place" if choice.reads == "contiguous" else "contiguous")
        for one in choice.launches(given):
            shared = f", {one.shared_bytes / 1024:.0f} KB of shared memory" if one.shared_bytes else ""
            lines.append(f"{_named(pass_)} {one.entry}: {one.grid} blocks of {one.threads} threads{shared}")
    return lines


def precision_text(p: Problem) -> str:
    """A problem's dtype, and TF32 where float32 is multiplied so."""
    return dtype_name(p.dtype) + (" as TF32" if p.precision == "tf32" else "")


def explanation(p: Problem, plan: Plan, ceilings: Ceilings) -> Group:
    """The explanation of one problem, for a rich console."""
    count = math.prod(p.stride)
    phases = f"{count} phase{'s' if count != 1 else ''}, {_taps(p.taps)}: outputs of a phase share its taps"
    per_byte = f"{p.flops / p.bytes:.3g} FLOP per byte" if p.bytes else "no bytes"
    candidates = Table.grid(padding=(0, 2))
    for candidate in plan.candidates:
        mark, style = ("✓", "bold green") if candidate.chosen else ("·", "dim")
        candidates.add_row(Text(f"{mark} {candidate.name}", style=style, no_wrap=True), candidate.reason)
    lines: dict[str, Sequence[str | Table]] = {
        "output": [" x ".join(map(str, p.output_shape))],
        "kernel": kernel_drawing(p),
        "phases": [phases, *phase_lines(p)],
        "work": [f"{si(p.flops, 'FLOP')} useful, {si(p.bytes, 'B')} compulsory ({per_byte})"],
        "roof": [_roof_line(p, ceilings)],
        "model": _expectations(p, plan, ceilings),
        "launch": launch_lines(p, plan),
    }
    if plan.device.gpu is not None and p.pass_ in ("fwd", "step"):
        lines["compile"] = [rule.sentence(p, plan.device, training=p.pass_ == "step")]
    lines["plan"] = [f"{plan_text(plan, p.pass_)}, engine {plan.engine(p.pass_)}", candidates]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    for name, every in lines.items():
        for i, line in enumerate(every):
            grid.add_row("" if i else name, line)
    title = f"{str(p).rsplit(' ', 3)[0]} · {precision_text(p)} · {p.layout} · {p.pass_}"
    return Group(Text(title, style="bold"), grid, Text(verdict(p, plan, ceilings)))


# --- in a sentence ---------------------------------------------------------------------------------------------------

_PASSES: dict[Pass, str] = {
    "fwd": "the forward pass",
    "grad-input": "the gradient for the input",
    "grad-weight": "the gradient for the weight",
    "step": "the forward pass and its gradients",
}


def estimate(p: Problem, plan: Plan, ceilings: Ceilings) -> tuple[float, float] | None:
    """Seconds that calls of a pass are expected to take, at least its roof's, and its roof's; None without a model."""
    choices = plan.choices(p.pass_)
    if len(choices) < (3 if p.pass_ == "step" else 1):
        return None
    roof = sum(_roof(p.with_(pass_=pass_), ceilings) for pass_ in choices)
    return max(roof, sum(map(call_seconds, choices.values()))), roof


def verdict(p: Problem, plan: Plan, ceilings: Ceilings) -> str:
    """Whose kernel computes a pass, in what time by estimate, and at what share of its roof; in a sentence."""
    what, engine, gpu = _PASSES[p.pass_], plan.engine(p.pass_), plan.device.gpu
    if engine == "torch":
        return f"PyTorch's own operator computes {what}: {plan.candidates[0].reason}."
    if gpu is None and p.pass_ == "step" and plan.forward == "native":
        return f"PyTorch's own operator computes the forward pass, and upconv's plan {engine} its gradients."
    names = engine.partition(":")[2].split("+")
    who = f"kernel{'s' if len(names) > 1 else ''} {', '.join(names)}" if gpu else f"plan {engine}"
    found = estimate(p, plan, ceilings)
    if found is None or gpu is None:
        roof = 1e3 * _roof(p, ceilings)
        return f"upconv's {who} computes {what}; its roof is {roof:.3g} ms, and nothing estimates its time here."
    verb = "compute" if len(names) > 1 else "computes"
    article = "an" if gpu.name[:1] in "AEFHILMNORSX" else "a"
    packing = any(choice.packing_seconds for choice in plan.choices(p.pass_).values())
    taken = f"{1e3 * found[0]:.3g} ms{', packing included,' if packing else ''}"
    return (
        f"upconv's {who} {verb} {what} in about {taken} on {article} {gpu.name}, {found[1] / found[0]:.0%} of the roof."
    )


# --- a model ---------------------------------------------------------------------------------------------------------


def model_explanation(title: str, lines: Sequence[tuple[Call, Plan]], ceilings: Ceilings) -> Group:
    """A line for each transposed convolution of a model, and a sentence for all, for a rich console."""
    shown: list[RenderableType] = [Text(title, style="bold")]
    if not lines:
        nothing = "No call of a transposed convolution module was seen on this input; calls of functions are not seen."
        return Group(*shown, Text(nothing))
    grid = Table(header_style="bold", pad_edge=False, box=None)
    grid.add_column("module", no_wrap=True)
    grid.add_column("layer and input", style="dim")
    for head in ("calls", "ms", "of roof"):
        grid.add_column(head, justify="right", no_wrap=True)
    grid.add_column("computed by", no_wrap=True)
    ours, seconds, roof = 0, 0.0, 0.0
    for call, plan in lines:
        p, engine = call.problem, plan.engine(call.problem.pass_)
        layer = p.layer + (" channels_last" if p.layout == "channels_last" else "")
        found, numbers = estimate(p, plan, ceilings), ("", "")
        if found is not None:
            numbers = f"{1e3 * found[0]:.3g}", f"{found[1] / found[0]:.0%}"
            seconds, roof = seconds + call.times * found[0], roof + call.times * found[1]
        ours += engine != "torch"
        grid.add_row(call.name, layer, str(call.times), *numbers, "PyTorch" if engine == "torch" else engine)
    rest = "" if ours == len(lines) else ", and PyTorch's own operator the rest"
    taken = "nothing estimates their time here"
    if seconds:
        taken = f"upconv's take about {1e3 * seconds:.3g} ms together, {roof / seconds:.0%} of their roof"
    return Group(*shown, grid, Text(f"upconv computes {ours} of {len(lines)} transposed convolutions{rest}; {taken}."))


# Dense FLOP per clock and multiprocessor: on CUDA cores in float32 and float64, on tensor cores in TF32, half precision
# (float32 sums) and float64 (0: CUDA cores). Source: NVIDIA's architecture whitepapers, peak rates over SMs x clock.
_FLOPS_PER_CLOCK: dict[tuple[int, int], tuple[int, int, int, int, int]] = {
    (8, 0): (128, 64, 1024, 2048, 128),
    (8, 6): (256, 4, 256, 512, 0),
    (8, 7): (256, 4, 1024, 2048, 0),
    (8, 9): (256, 4, 256, 512, 0),
    (9, 0): (256, 128, 2048, 4096, 256),
    (10, 0): (256, 128, 4096, 8192, 256),
    (10, 3): (256, 4, 4096, 8192, 0),
    (12, 0): (256, 4, 256, 512, 0),
    (12, 1): (256, 4, 256, 512, 0),
}
_HALVED = ((8, 6), (8, 9))
"""Of these chips GeForce cards have half the tensor rate of professional ones, which the table gives."""


def estimated_ceilings(gpu: Gpu) -> Ceilings:
    """A roofline's ceilings by the data sheet: no matrix product reaches these rates (an H200's TF32 does 86 %)."""
    fp32, fp64, tf32, half, fp64_tensor = _FLOPS_PER_CLOCK[gpu.capability]
    if gpu.capability in _HALVED and "GeForce" not in gpu.name:
        tf32, half = 2 * tf32, 2 * half
    per_clock: dict[Precision, int] = {
        "ieee": fp32, "tf32": tf32, "bf16": half, "fp16": half, "fp64": max(fp64, fp64_tensor)
    }  # fmt: skip
    rates = {precision: rate * gpu.multiprocessors * gpu.clock for precision, rate in per_clock.items()}
    return Ceilings(copy_bytes_per_s=gpu.bandwidth, matmul_flops_per_s=rates)
