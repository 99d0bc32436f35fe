"""Every kernel that the planner chooses for the suites, compiled for six GPUs: no spills, and tensor cores are used.

Of each layer of the ``cuda`` suite the forward's and both gradients' kernels in all precisions and layouts: those that
a training step takes, those that pack weights themselves, and those in reserve for where memory is short.
That is 5,500 sources of about a second each: with UPCONV_TEST_EVERY=1 and ``pytest -n 16`` all of them, else a dozen.
Of what the planner does not choose random choices of each family are compiled, and extreme layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice, product
from typing import Any, NamedTuple

import pytest
import torch

import ptxas
from conftest import EVERY, by_turns, needs_nvrtc
from drawn import DTYPES, FAMILIES, GPUS, PASSES, choices
from upconv import planner
from upconv.bench.suites import SUITES, Case
from upconv.cuda import bias
from upconv.cuda.compile import jit
from upconv.cuda.direct import plain
from upconv.cuda.gpu import A100, H200, Gpu
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.problem import LAYOUTS, Layout, Pass, Precision, Problem

Kind = tuple[Precision, Layout, Pass]

OTHERS = {
    *("pack", "pack_float", "reduce", "direct_reduce"),
    *("to_channels_last", "to_contiguous", "widen"),
    *("unshuffle", "unshuffle_float", "fold", "fold_float"),
}
"""Entries that pack, copy or add up; all others multiply."""
OPERANDS = {"tf32": "tf32", "ieee": "tf32", "bf16": "bf16", "fp16": "f16"}
"""What matrix instructions call a precision's operands; IEEE's are sums of several TF32 ones."""
MATRIX = re.compile(r"(?<![.\w])(wgmma\.mma_async|mma\.sync)\.[.\w]*\.f32\.(\w+)\.\2\b")

ALLOWED: dict[tuple[str, str, str, str, int], int] = {
    # Threads turn pixels to rows of channels: beside 3 or 4 accumulators, or 6 pixels each.
    ("gather", "90a", "fwd", "nchw", 16): 32,  # fsrcnn; kb75 8
    ("gather", "90a", "grad-input", "nchw", 16): 96,  # kb70; kb61 72, fsrcnn 24, dcganO 8
    ("gather", "90a", "grad-input", "nchw", 32): 8,  # kb75 in TF32
    # By mma.sync; why is not known.
    ("gather", "100a", "fwd", "nchw", 32): 16,  # kb69 and kb79 in IEEE; kb64, kb74 8
    ("gather", "100a", "grad-input", "nchw", 32): 16,  # kb79 in IEEE; kb69 8
    ("gather", "120", "grad-input", "nchw", 32): 8,  # hifigan in IEEE
    # Why is not known.
    ("direct", "80", "grad-weight", "nchw", 32): 16,  # fsrcnn
    ("direct", "86", "grad-weight", "nchw", 32): 16,
    ("direct", "80", "grad-weight", "channels_last", 16): 48,  # fsrcnn
    ("direct", "86", "grad-weight", "channels_last", 16): 48,
    ("direct", "80", "grad-weight", "channels_last", 64): 384,  # kb68
    ("direct", "100a", "grad-weight", "channels_last", 64): 40,  # kb75
}
"""Bytes of local memory of a thread at most, by family, architecture, pass, layout and bits, with NVRTC 13.0 or later.

For the entries that multiply; what is not here, packs, copies or adds up has none.
"""


class Kernel(NamedTuple):
    """A source that a pass of a layer wants."""

    unit: Any
    choice: Any
    """The family's that multiplies: for rearranged tensors the inner one."""


class Compiled(NamedTuple):
    """What a compiled source is asked for."""

    needs: dict[str, tuple[int, int, int]]
    matrix: dict[str, set[tuple[str, str]]]
    """By entry: matrix instructions and their operands' type."""
    serialised: str | None


def kinds(case: Case) -> list[Kind]:
    """In what a layer is computed: precisions, layouts and passes."""
    return [*product(DTYPES, LAYOUTS if case.problem.rank > 1 else LAYOUTS[:1], PASSES)]


def sample() -> list[tuple[Case, Gpu, list[Kind]]]:
    """Every layer on each GPU in all kinds, or one in 17 of them in a kind, by turns that meet all GPUs and kinds."""
    every = product(SUITES["cuda"], GPUS)
    if EVERY:
        return [(case, gpu, kinds(case)) for case, gpu in every]
    some = by_turns(every, 17, 11)
    return [(case, gpu, [kinds(case)[17 * i % len(kinds(case))]]) for i, (case, gpu) in enumerate(some)]


def planned(case: Case, gpu: Gpu, kind: Kind) -> Any:
    """What the planner chooses for a pass on a GPU."""
    precision, layout, pass_ = kind
    p = case.problem.with_(dtype=DTYPES[precision], precision=precision, layout=layout)
    choice = planner.plan(p, planner.Device("cuda", gpu=gpu)).selection(pass_).choice
    assert choice is not None, f"no kernel of ours computes {kind}"
    return choice


def kernels(choice: Any) -> Iterator[Kernel]:
    """What a choice may launch."""
    for unit in choice.sources():
        yield Kernel(unit, getattr(choice, "inner", choice))


@cache
def compiled(source: str, arch: str) -> Compiled:
    """Kept, since layers, precisions and passes share sources; without machine code and PTX, which are megabytes."""
    (code, text, log), needs = ptxas.report(source, arch)
    bodies = re.split(r"\.entry\s+(\w+)", text)[1:]
    found = dict(zip(bodies[::2], bodies[1::2]))
    matrix = {name: set(MATRIX.findall(found[symbol])) for name, symbol in jit.kernels_of(code).items()}
    serialised = next((line.strip() for line in log.splitlines() if "instructions are serialized" in line), None)
    return Compiled(needs, matrix, serialised)


def instruction(choice: Any) -> str | None:
    """By what a choice multiplies; None for CUDA cores."""
    if choice.family == "direct":
        return None
    by_warps = choice.family == "wgrad" and not isinstance(choice.tiling, WarpgroupTiling)
    by_warps |= choice.family == "gather" and not choice.tiling.wgmma
    return "mma.sync" if by_warps else "wgmma.mma_async"


def most_local(choice: Any, gpu: Gpu) -> int:
    """Of `ALLOWED`, for a choice's kernel itself."""
    p = choice.problem
    own = (choice.family, gpu.arch, p.pass_, p.layout, 8 * p.dtype.itemsize)
    return ALLOWED.get(own, 0)


def complaints(kernel: Kernel, gpu: Gpu) -> Iterator[str]:
    """What is wrong with a compiled source, in sentences."""
    unit, choice = kernel
    found = compiled(unit.source, gpu.arch)
    if not set(unit.entries) <= set(found.needs) == set(found.matrix):
        yield f"has the entries {sorted(found.needs)}, wanted are {sorted(unit.entries)}"
        return
    if found.serialised is not None:
        yield f"waits for each wgmma: {found.serialised}"
    # Beside a unit's entries are those that only autocast takes; and other passes' that nothing launches.
    for entry in sorted(e for e in found.needs if e in unit.entries or e.endswith("_float")):
        registers, local, _ = found.needs[entry]
        own = entry not in OTHERS
        most = most_local(choice, gpu) if own else 0
        if local > most:
            yield f"{entry} has {local} bytes of local memory, and {most} are known of"
        if not 0 < registers <= 255:
            yield f"{entry} has {registers} registers"
        by = instruction(choice) if own else None
        wanted = set() if by is None else {(by, OPERANDS[choice.problem.precision])}
        if found.matrix[entry] != wanted:
            yield f"{entry} multiplies by {found.matrix[entry] or 'no'} matrix instructions, not by {wanted or 'none'}"


def multiplying(kernel: Kernel) -> set[str]:
    return set(kernel.unit.entries) - OTHERS


def assert_compiles(choice: Any, gpu: Gpu) -> None:
    every = list(kernels(choice))
    wrong = [f"{each.unit.label} for sm_{gpu.arch}: {what}" for each in every for what in complaints(each, gpu)]
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    assert any(multiplying(each) for each in every), f"no kernel was looked at: {choice}"


# --- what the planner chooses ----------------------------------------------------------------------------------------


def test_the_sample_has_every_gpu_and_kind() -> None:
    cases = sample()
    assert {gpu for _, gpu, _ in cases} == set(GPUS)
    for values, every in zip(zip(*(kind for *_, of in cases for kind in of)), (DTYPES, LAYOUTS, PASSES)):
        assert set(values) == set(every)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "gpu", "of"), [pytest.param(*each, id=f"{each[0].name}-sm_{each[1].arch}") for each in sample()]
)
def test_chosen_kernels_compile_without_spills_and_multiply_by_tensor_cores(
    case: Case, gpu: Gpu, of: list[Kind]
) -> None:
    for kind in of:
        assert_compiles(planned(case, gpu, kind), gpu)


# --- and what it does not --------------------------------------------------------------------------------------------

OLDER = ("gather", "wgrad by mma.sync", "direct", "direct gradients", "plain")
"""Families of other GPUs than Hopper's."""
DRAWN = [(family, H200) for family in FAMILIES] + [(family, A100) for family in OLDER]


@cache
def drawn(family: str, gpu: Gpu) -> list[Any]:
    """The first random choices, and of more those whose entries none before has."""
    found, seen = [], set[str]()
    for i, (choice, _) in enumerate(islice(choices(family, gpu), 40)):
        entries = {entry for each in kernels(choice) for entry in multiplying(each)}
        if i < (20 if EVERY else 2) or entries - seen:
            found.append(choice)
            seen |= entries
    return found


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(("family", "gpu"), DRAWN, ids=lambda of: of if isinstance(of, str) else f"sm_{of.arch}")
def test_random_choices_compile(family: str, gpu: Gpu) -> None:
    for choice in drawn(family, gpu):
        assert_compiles(choice, gpu)


EXTREMES = {
    "thousands of taps": Problem.make(2, 64, 64, (4, 4), 64, 32, precision="bf16", dtype=torch.bfloat16),
    "tens of thousands of phases": Problem.make(2, 64, 64, (4, 4), 64, 128, precision="bf16", dtype=torch.bfloat16),
    "phases without taps": Problem.make(2, 64, 64, (8, 8), 45, 90, precision="bf16", dtype=torch.bfloat16),
    "depthwise, a wide kernel": Problem.make(1, 4, 4, (8, 8), (128, 128), (16, 64), (56, 32), groups=4),
    "depthwise, a row of 4096 taps": Problem.make(1, 4, 4, (8, 8), (3, 4096), (1, 4096), (1, 0), groups=4),
    "depthwise, one dimension": Problem.make(1, 4, 4, (8,), 16384, 16384, groups=4),
    "no tile": Problem.make(1, 2, 2, (3, 4), 3, 1, 0, 0, 500),
    "no tile, float64": Problem.make(1, 1, 1, (4, 4), (2, 3000), 2, dtype=torch.float64),
}


@needs_nvrtc
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_layers_compile(name: str) -> None:
    """Their tables fit in constant memory, their taps in shared memory; or a plain kernel serves them."""
    choice = planner.select(EXTREMES[name], planner.Device("cuda", gpu=H200)).choice
    assert choice is not None
    assert isinstance(choice, plain.Choice) or not name.startswith("no tile"), choice.summary
    for unit in choice.sources():
        jit.cubin(unit.source, H200.arch, unit.label)


def test_every_file_is_looked_at() -> None:
    """Of the planner's sample or the random choices; those of the bias are compiled below."""
    found = [planned(case, gpu, kind) for case, gpu, of in sample() for kind in of]
    found += [choice for family, gpu in DRAWN for choice in drawn(family, gpu)]
    texts = {each.unit.source for choice in found for each in kernels(choice)}
    names = {name for text in texts for name in re.findall(r'^#line 1 "(\w+\.cu)"', text, re.MULTILINE)}
    code = "".join(path.read_text() for path in jit.KERNELS.parent.rglob("*.py"))
    assert names | {"bias.cu"} >= {path.name for path in jit.KERNELS.glob("*.cu") if f'"{path.name}"' in code}


@needs_nvrtc
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_sums_for_the_bias_compile_without_spills(gpu: Gpu) -> None:
    for precision, layout in product(("ieee", "bf16", "fp16", "fp64"), LAYOUTS):
        p = Problem.make(1, 1, 8, (8, 8), 1, dtype=DTYPES[precision], precision=precision, layout=layout)
        needs = ptxas.needs(bias.Choice(p, gpu).sources()[0].source, gpu.arch)
        assert needs and all(local == 0 for _, local, _ in needs.values())
