"""The contract of all kernel families: what one answers a problem with (`upconv.cuda.family`)."""

from __future__ import annotations

import pickle
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from itertools import product
from typing import Any

import pytest

from conftest import EVERY, assert_sentence
from drawn import DTYPES, GPUS, LAYOUTS, PASSES, Layers
from upconv import planner
from upconv.bench.suites import SUITES
from upconv.cuda import families, family
from upconv.cuda.compile import jit
from upconv.cuda.cost import Work, cost
from upconv.cuda.direct import direct, plain
from upconv.cuda.gemm import joined
from upconv.cuda.gemm.shuffle import countable, shuffled
from upconv.cuda.gpu import H200, Gpu
from upconv.cuda.launches import Given
from upconv.export import source
from upconv.problem import Pass, Precision, Problem

EVERY_LAYER = Layers(
    PASSES, tuple(DTYPES), inputs=(1, 3, 4, 8, 32, 64), outputs=(1, 2, 5, 8, 64), groups=(1, 1, 2, 3, 8),
    heights=(1, 7, 16, 40), widths=(1, 8, 13, 32, 100), dilations=(1, 1, 2),
)  # fmt: skip


def problems(seed: int, count: int) -> list[tuple[Problem, Gpu]]:
    """Random layers, and layers of the suites."""
    rng = random.Random(f"families {seed}")
    found = [EVERY_LAYER.draw(rng) for _ in range(count)]
    for case in rng.sample([case for name in ("cuda", "field") for case in SUITES[name]], count):
        p, precision = case.problem, rng.choice(list(DTYPES))
        layout = rng.choice(LAYOUTS) if p.rank > 1 else "nchw"
        found.append(p.with_(dtype=DTYPES[precision], precision=precision, layout=layout, pass_=rng.choice(PASSES)))
    return [(p.with_(bias=False) if p.pass_ != "fwd" else p, rng.choice((H200, *GPUS))) for p in found]


def forget() -> None:
    """Empties what families remember of problems."""
    for name, module in list(sys.modules.items()):
        if name.startswith("upconv.cuda."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and not isinstance(value, type) and "compile" not in name:
                    value.cache_clear()


def chosen(p: Problem, gpu: Gpu, general: bool = False) -> Iterator[tuple[str, Any]]:
    for name, answer in families.choose(p, gpu, general).items():
        if not isinstance(answer, str):
            yield name, answer


@pytest.mark.parametrize("seed", range(20 if EVERY else 4))
def test_answers(seed: int) -> None:
    for p, gpu in problems(seed, 10):
        answers = families.choose(p, gpu)
        assert set(answers) == set(families.WEIGHT_FAMILIES if p.pass_ == "grad-weight" else families.FAMILIES)
        for name, answer in answers.items():
            if isinstance(answer, str):
                assert_sentence(answer)
            else:
                check_choice(name, answer, p, gpu)
        forget()
        assert families.choose(p, gpu) == answers, f"another answer the second time: {p} on {gpu.name}"
        best = family.best_of(answers)
        assert best is not None, f"no kernel: {p} on {gpu.name}"
        assert all(
            family.call_seconds(best) <= family.call_seconds(one)
            for one in answers.values()
            if not isinstance(one, str)
        )


def check_choice(name: str, choice: Any, p: Problem, gpu: Gpu) -> None:
    q = choice.problem
    assert choice.family == name
    assert (q.pass_, q.precision, q.dtype, q.macs) == (p.pass_, p.precision, p.dtype, p.macs)
    assert 0 < choice.seconds < 100 and 0 <= choice.packing_seconds < 1
    traffic = (p.bytes if p.pass_ == "fwd" else 0) / gpu.bandwidth
    assert choice.seconds >= 0.5 * traffic, "faster than memory"
    given = Given(
        "contiguous" if p.layout == "nchw" else "in place" if choice.reads == "channels_last" else "channels_last"
    )
    packs = [launch.entry for launch in choice.launches(given) if launch.entry.startswith("pack")]
    assert (choice.packing_seconds > 0) == bool(packs), "an estimate has what packing the layer's weights takes"
    for text in (choice.summary, choice.bound):
        assert text and "\n" not in text and not text.endswith(".")
    again = pickle.loads(pickle.dumps(choice))
    assert again == choice and hash(again) == hash(choice)
    with pytest.raises(FrozenInstanceError):
        choice.problem = p
    for unit in choice.sources():
        named = {entry.partition("<")[0] for entry in jit.entries_of(unit.source)}
        assert unit.entries and set(unit.entries) <= named, unit.label
        assert "\n" not in unit.label


def test_when_a_launch_begins_is_of_its_term() -> None:
    """Which a cluster's blocks do not share, as they share the rest."""
    work = Work(instructions=1000, columns=64000, waves=3, moved=1e6)
    begins, later = cost(work, H200), cost(replace(work, start=0.001 * H200.clock), H200)
    assert [later.launch - begins.launch, later.seconds - begins.seconds] == pytest.approx([0.001] * 2)


@pytest.mark.parametrize("seed", range(10 if EVERY else 3))
def test_general_choices_serve_every_size(seed: int) -> None:
    """Exported files have one source, which differs by how blocks come by tiles alone."""

    def texts(choice: Any) -> list[str]:
        return [re.sub(r"(claimed|shared_bytes) = \w+;", "", unit.source) for unit in choice.sources()]

    found = set()
    for p, gpu in problems(seed, 8):
        larger = p.with_(batch=p.batch + 3, size=tuple(2 * n + 1 for n in p.size))
        for name, choice in chosen(p, gpu, general=True):
            other = replace(choice, problem=larger)
            assert texts(other) == texts(choice), (name, p)
            found.add(name)
    assert found >= {"gather", "direct", "wgrad"}


LAYER = Problem.make(4, 32, 32, (16, 16), 4, 2, 1, precision="tf32")


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("change", [{"batch": 0}, {"size": (0, 16)}], ids=str)
def test_empty_inputs_are_pytorchs(change: dict[str, Any], pass_: Pass) -> None:
    plan = planner.plan(replace(LAYER, pass_=pass_, **change), planner.Device("cuda", gpu=H200))
    assert plan.delegates and plan.candidates[0].reason == "the input is empty"


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("channels", [1, 16])
def test_axes_beyond_32_bits_are_for_kernels_that_count_in_64(pass_: Pass, channels: int) -> None:
    longest = 2**31 - 2**20
    p = Problem.make(1, channels, channels, (longest,), 3, 1, 1, dtype=DTYPES["bf16"], precision="bf16", pass_=pass_)
    assert any(chosen(p, H200))
    found = families.choose(p.with_(size=(longest + 1,)), H200)
    reason = f"the kernel counts along an axis in 32 bits, which {longest + 1} elements are too many for"
    assert isinstance(found.pop("direct"), plain.Choice)
    assert found and set(found.values()) == {reason}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name.split()[-1])
def test_every_pass_of_every_layer_has_a_kernel(gpu: Gpu) -> None:
    """In a precision and layout by turns."""
    cases = [case for name in ("founding", "kernelbench", "models") for case in SUITES[name]]
    kinds = list(product(DTYPES, LAYOUTS))
    for i, case in enumerate(cases if EVERY else cases[GPUS.index(gpu) :: len(GPUS)]):
        precision, layout = kinds[i % len(kinds)]
        layout = layout if case.problem.rank > 1 else "nchw"
        p = case.problem.with_(dtype=DTYPES[precision], precision=precision, layout=layout)
        plan = planner.plan(p, planner.Device("cuda", gpu=gpu))
        assert plan.forward in families.FAMILIES and not plan.delegates, p
        assert p.roof_seconds(2e15, 4.8e12) < plan.choice.seconds < 1.0  # beyond any GPU's rates
        assert plan.grad_input.choice is not None and plan.grad_weight.choice is not None, p
        for candidate in plan.candidates:
            assert_sentence(candidate.reason)


LAST_BF16: dict[str, Any] = {"layout": "channels_last", "dtype": DTYPES["bf16"], "precision": "bf16"}


@pytest.mark.parametrize(
    "p",
    [Problem.make(2, 64, 64, (8, 8), 64, 32, groups=64), Problem.make(2, 8, 8, (8, 8), 33, 16, dtype=DTYPES["fp64"])],
    ids=str,
)
def test_a_weights_gradient_that_no_tile_fits_has_the_plain_kernel(p: Problem) -> None:
    found = planner.plan(p, planner.Device("cuda", gpu=H200))
    assert "native" not in (found.forward, found.grad_input.name) and isinstance(found.grad_weight.choice, plain.Choice)
    assert "direct_weight<" not in source(p)


@pytest.mark.parametrize(("size", "stride"), [((6, 6, 1), (5, 3, 1)), ((6, 1, 3), (1, 1, 3)), ((2, 4, 2), (1, 2, 1))])
def test_fewer_positions_than_lanes_have_a_tile(size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    p = Problem.make(4, 12, 84, size, (3, 4, 5), stride, (0, 1, 1), groups=4, pass_="grad-weight")
    assert all(not isinstance(direct.choose(p, gpu), str) for gpu in GPUS)


def test_phases_are_rows_where_32_bits_count_them() -> None:
    """A channels-last row of 2^31 elements and a weight of as many are left to the strided layer's tilings."""
    row = Problem.make(1, 56, 2, (1, 2**29), (1, 9), (1, 3), (0, 4), **LAST_BF16)
    weight = Problem.make(1, 2**20, 1, (8, 8), 64, 8, dtype=DTYPES["bf16"])
    for p, smaller in ((row, row.with_(size=(1, 2**20))), (weight, weight.with_(in_channels=2**10))):
        assert shuffled(p) and not countable(p) and countable(smaller)


@pytest.mark.parametrize(
    "kernel,padding,dilation", [(3, 0, 1), ((1, 1, 3), 0, (1, 1, 2)), ((3, 5, 2), (0, 3, 0), (1, 2, 1))]
)
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_joined_rows_have_room_for_every_width(precision: Precision, kernel: Any, padding: Any, dilation: Any) -> None:
    """Of the tile's own, and in float32 for all shorter ones. The worst of these, where a tile begins in a row's last
    place, random layers seldom have."""
    given: dict[str, Any] = {"padding": padding, "dilation": dilation}
    p = Problem.make(2, 32, 64, (4, 14, 64), kernel, **given, dtype=DTYPES[precision], precision=precision)
    vec = 16 // p.dtype.itemsize
    for most in range(vec, 257, 5 * vec):
        for t in joined.candidates(p.with_(size=(4, 14, most)), H200):
            assert t.serves_width(most)
            for width in range(vec, 257, vec):
                one = p.with_(size=(4, 14, width))
                if not t.serves_width(width):
                    assert width > most or precision == "bf16"
                    continue
                pitch, (*_, rows, columns) = one.out_size[-1], t.sizes(one, H200)
                reach = t.places + t.halo(pitch)
                assert reach <= t.c.span and rows * columns * 32 <= t.c.slot_bytes and rows <= 256
                assert (pitch - 1 + reach - 1) // pitch < rows and width <= columns
