"""The files of models/ at other sizes than they were planned for, and with other arguments.

    python benchmarks/exported_sizes.py sizes --json sizes.json   checked against PyTorch, timed beside the library
    python benchmarks/exported_sizes.py layers --count 200        random layers against float64

Exit code 1 for a wrong result.

A file's kernels were chosen for its example; the library plans each size anew. Both run under the flags of the file's
precision. Other arguments and dtypes are computed by the plain kernels of a file, which `layers` compares: output,
gradients, and the state_dict in both directions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
from hypothesis import Phase, given, seed, settings  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import upconv  # noqa: E402
from strategies import gradient_problems  # noqa: E402
from upconv import reference  # noqa: E402
from upconv.bench import exported, report, timing  # noqa: E402
from upconv.bench.suites import SUITES  # noqa: E402
from upconv.cpu import memory_format  # noqa: E402
from upconv.export import kernelbench_problem, signatures  # noqa: E402
from upconv.export.check import GRADIENTS, load  # noqa: E402
from upconv.problem import Problem  # noqa: E402

MODELS = ROOT / "models"
CASES = [case.name for case in SUITES["kernelbench"]]
REPEATS = timing.Repeats(0.15, 7, 40)
LAYERS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float64: 1e-12}
FILES = {1: 79, 2: 57, 3: 58}
"""By rank the file whose plain kernels compute random layers."""


def others(p: Problem) -> dict[str, Problem]:
    """The problem at batches and spatial sizes that a file was not planned for, by what they are."""
    return {
        "half the batch": p.with_(batch=max(1, p.batch // 2)),
        "half of each axis": p.with_(size=tuple(max(1, n // 2) for n in p.size)),
        "three quarters of each axis, odd": p.with_(size=tuple(3 * n // 4 | 1 for n in p.size)),
        "one image, a quarter of each axis": p.with_(batch=1, size=tuple(max(1, n // 4) for n in p.size)),
    }


def model(case: str) -> tuple[Problem, nn.Module]:
    """A file's problem and its ``ModelNew`` as KernelBench constructs it, on the current device."""
    number = int(case.removeprefix("kb"))
    p = kernelbench_problem(number)
    names = load((MODELS / f"model_{number}.py").read_text(encoding="utf-8"))
    made: nn.Module = names["ModelNew"](*signatures.init_arguments(number, p))
    return p, made.to("cuda", p.dtype)


def original(p: Problem, dtype: torch.dtype) -> Any:
    """PyTorch's layer, on the current default device."""
    return LAYERS[p.rank](
        p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, p.output_padding, p.groups, p.bias, p.dilation,
        dtype=dtype,
    )  # fmt: skip


def step(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients for the input and all parameters."""
    y = layer(x)
    return (y, *torch.autograd.grad(y, (x, *layer.parameters()), grad))


@torch.no_grad()
def forward(layer: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """A layer's output without gradients."""
    result: Tensor = layer(x)
    return result


RUNS: dict[str, Callable[[nn.Module, Tensor, Tensor], object]] = {"forward": forward, "step": step}


def warm(case: str) -> None:
    """Compiles the library's kernels of all sizes into its cache."""
    p = kernelbench_problem(int(case.removeprefix("kb")))
    layer = upconv.accelerate(original(p, p.dtype).cuda())
    with timing.precision_flags(p.precision):
        for q in others(p).values():
            upconv.warmup(layer, q.input_shape, training=True)


def rows(case: str) -> Iterator[report.Row]:
    """A row for each size and each of `RUNS`; ``failure`` says what differs from PyTorch."""
    p, file = model(case)
    theirs = original(p, p.dtype).cuda()
    theirs.load_state_dict(next(file.children()).state_dict())
    library = upconv.accelerate(deepcopy(theirs))
    for size, q in others(p).items():
        x = torch.randn(q.input_shape, device="cuda", dtype=q.dtype, requires_grad=True)
        grad = torch.randn(q.output_shape, device="cuda", dtype=q.dtype)
        with timing.precision_flags(p.precision):
            pairs = zip(step(file, x, grad), step(theirs, x, grad), strict=True)
            errors = [reference.relative_error(a, b) for a, b in pairs]
            for name, run in RUNS.items():
                row: report.Row = {"case": case, "layer": q.layer, "size": size, "input": q.input_shape, "run": name}
                row |= {"errors": errors, "failure": None, "ours_ms": None}
                if not max(errors) <= GRADIENTS[p.precision]:
                    yield row | {"failure": f"differs from PyTorch's by {max(errors):.1e}"}
                    continue
                runs = {side: [partial(run, layer, x, grad)] for side, layer in (("ours", file), ("library", library))}
                yield row | timing.entries(timing.interleave(runs, timing.clock(x.device), REPEATS))
        del x, grad


def sizes(path: Path, wanted: list[str]) -> int:
    """Writes the report and prints its rows."""

    def told() -> Iterator[report.Row]:
        for case in wanted:
            for row in rows(case):
                print(
                    f"{case} {row['run']:8s} {row['input']!s:28s}"
                    f" {row.get('library_ratio') or row['failure']} {max(row['errors']):.1e}",
                    flush=True,
                )
                yield row
            torch.cuda.empty_cache()

    exported.build(exported.files(MODELS, wanted), print)
    with ProcessPoolExecutor(15, get_context("spawn")) as pool:
        list(pool.map(warm, wanted))
    found = report.gather(told(), torch.device("cuda"), "exported-sizes")
    report.save(found, path)
    return bool(report.wrong(found["rows"]))


def differs(names: dict[str, Any], p: Problem) -> str | None:
    """How a file's plain kernels differ from PyTorch in float64 on a random layer, in words."""
    truth, file = original(p, torch.float64), names["ModelNew"](1, 1, 1)
    attribute = signatures.layer(p).attribute
    arguments = (p.in_channels, p.out_channels, p.kernel, p.stride, p.padding, p.output_padding, p.groups, p.bias)
    setattr(file, attribute, names["Layer"](*arguments, p.dilation))
    layer = getattr(file, attribute)
    layer.load_state_dict(truth.state_dict())
    file = file.to("cuda", p.dtype)
    truth.load_state_dict(layer.state_dict())  # as rounded to the layer's dtype
    x = torch.randn(p.input_shape, dtype=p.dtype)
    x = x.contiguous(memory_format=memory_format(p.layout, p.rank))
    grad = torch.randn(p.output_shape, dtype=p.dtype)
    found = step(file, x.cuda().requires_grad_(), grad.cuda())
    wanted = step(truth, x.double().requires_grad_(), grad.double())
    for name, a, b in zip(("output", "gradient for the input", "for the weight", "for the bias"), found, wanted):
        error = float((a.cpu().double() - b).norm() / b.norm().clamp_min(1e-30))
        if a.shape != b.shape or a.dtype != p.dtype or not error <= BOUNDS[p.dtype]:
            return f"{name} {tuple(a.shape)} {a.dtype}, error {error:.1e}: {p}"
    return None


def layers(count: int) -> int:
    """Random layers by the plain kernels of three files."""
    files = {rank: load((MODELS / f"model_{number}.py").read_text(encoding="utf-8")) for rank, number in FILES.items()}
    with ThreadPoolExecutor() as pool:  # the compilers are processes of their own
        list(pool.map(lambda names: names["build"](False), files.values()))
    wrong, drawn = list[str](), 0

    @seed(0)
    @settings(max_examples=count, deadline=None, database=None, phases=(Phase.generate,))
    @given(gradient_problems())
    def draw(p: Problem) -> None:
        nonlocal drawn
        drawn += 1
        with timing.precision_flags("ieee"):
            if (reason := differs(files[p.rank], p)) is not None:
                wrong.append(reason)
                print(reason, flush=True)

    draw()
    print(f"{drawn} random layers, {len(wrong)} wrong")
    return bool(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sizes", "layers"))
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/exported/h200-sizes.json")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--cases", default=",".join(CASES))
    given_ = parser.parse_args()
    return layers(given_.count) if given_.what == "layers" else sizes(given_.json, given_.cases.split(","))


if __name__ == "__main__":
    sys.exit(main())
