"""Times two checkouts of this project against each other, in one process on one GPU, row by row in turn.

    python benchmarks/checkouts.py OLD --plan rows.json         lists the rows that the two plan differently; no GPU
    python benchmarks/checkouts.py OLD --plan rows.json --codes     and those whose machine code differs
    python benchmarks/checkouts.py OLD --rows rows.json --json benchmarks/results/checkouts/h200.json
    python benchmarks/checkouts.py OLD --cases pix2pix,unet --passes fwd       some layers of suite "cuda" or "field"

OLD is a folder that has ``src/upconv``; the other side is the checkout that this program is of. Each package is copied
under a name of its own, so that both can be imported. Every call gets a weight that neither side has seen: what one of
them would keep between calls helps neither. A row that both plan alike has the same kernels, and counts as 1.0 without
a timing; ``--sample N`` times so many of them all the same. With ``--codes`` they are alike if their instructions and
constants are too, whatever the sources say.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
from h200 import SWEEPS

from upconv import env
from upconv.bench.report import geometric_mean, save
from upconv.bench.timing import clock, operands, precision_flags
from upconv.modules import TRANSPOSED
from upconv.problem import PASSES, Pass, Problem

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, SECONDS = 40, 0.25
"""Of a row: so many calls of each side at most, within about so much time."""


_STOCK: dict[Any, Any] = {base: base.forward for base in TRANSPOSED}
"""The forwards of torch.nn's classes. No side has replaced them yet."""


def _restore(forwards: dict[Any, Any]) -> None:
    for base, forward in forwards.items():
        base.forward = forward


@dataclass(frozen=True)
class Row:
    """A layer's pass in one of the reports; the suite ``field`` stands beside them under the name of each."""

    report: str
    case: str
    problem: Problem

    @property
    def name(self) -> str:
        return f"{self.report} {self.case} {self.problem.pass_}"


def sections(cubin: bytes) -> list[str]:
    """Names and digests of a cubin's sections of instructions and constants. Errors: ValueError for another file."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"a cubin is a 64-bit little-endian ELF file, got one that begins with {cubin[:6]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    found = []
    for name_at, _, _, _, offset, length in headers:
        begin = headers[names][4] + name_at
        name = cubin[begin : cubin.index(b"\0", begin)].decode()
        if name.startswith((".text.", ".nv.constant")):
            found.append(f"{name} {hashlib.sha256(cubin[offset : offset + length]).hexdigest()[:16]}")
    return sorted(found)


class Checkout:
    """A package of ``upconv`` under another name."""

    def __init__(self, folder: Path, name: str, place: Path) -> None:
        self.name = name
        target = place / name
        shutil.copytree(folder / "src" / "upconv", target, ignore=shutil.ignore_patterns("__pycache__"))
        for path in target.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            path.write_text(re.sub(r"\bupconv\b", name, text), encoding="utf-8")

    def __call__(self, module: str) -> Any:
        return importlib.import_module(f"{self.name}.{module}")

    def problem(self, p: Problem) -> Any:
        """The same problem as this package's own value."""
        return self("problem").Problem(**{field.name: getattr(p, field.name) for field in fields(p)})

    def plan(self, p: Problem) -> Any:
        planner = self("planner")
        device = planner.device_of(torch.device("cuda", 0)) if torch.cuda.is_available() else None
        return planner.plan(self.problem(p), device or planner.Device("cuda", gpu=self("cuda.gpu").H200))

    def chosen(self, p: Problem) -> list[Any]:
        """The choices of a row's passes; None where PyTorch's operator computes it."""
        plan = self.plan(p)
        passes: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight") if p.pass_ == "step" else (p.pass_,)
        return [plan.selection(pass_).choice for pass_ in passes]

    def describe(self, p: Problem) -> list[str]:
        """What computes a row, in a line a pass."""
        lines = ["PyTorch" if c is None else f"{c.family}: {c.summary}" for c in self.chosen(p)]
        return [re.sub(r", [\d.]+ \w+ of temporaries", "", line) for line in lines]  # which not every commit tells

    def compile(self, p: Problem) -> list[str]:
        """Brings the row's kernels into the cache; names and digests of their machine code."""
        try:
            jit = self("cuda.compile.jit")
        except ImportError:  # an older one
            jit = self("cuda.jit")
        found = []
        for choice in self.chosen(p):
            if choice is not None:
                for unit in (*choice.sources(), *getattr(choice, "packing_sources", ())):
                    found += sections(jit.cubin(unit.source, self("cuda.gpu").H200.arch, unit.label))
        return found

    def work(self, p: Problem, given: Any) -> Any:
        """The row's pass as a user calls it, with a weight of its own."""
        timing = self("bench.timing")
        own = timing.Operands(*given)._replace(weight=given.weight.clone())
        _restore(_STOCK)  # a package leaves forwards alone that are not torch.nn's, such as the other side's
        run = timing.work("ours", self.problem(p), own)
        forwards = {base: base.forward for base in _STOCK}

        def work() -> Any:
            _restore(forwards)
            return run()

        return work


def rows(reports: list[str], cases: list[str], passes: list[Pass]) -> Iterator[Row]:
    """The rows of the reports, and those of suite ``field`` in the same ways; only these cases, if there are some."""
    for name in reports:
        sweep = SWEEPS[name]
        sides = {name: sweep}
        if sweep.suites == ("cuda",):
            sides[f"field-{name}"] = sweep._replace(suites=("field",))
        for report, each in sides.items():
            for job in each.jobs():
                if job.case in (cases or [job.case]) and job.problem.pass_ in passes:
                    yield Row(report, job.case, job.problem)


def measure(p: Problem, old: Checkout, new: Checkout) -> dict[str, float]:
    """Median seconds of each side, and how far apart the results are, by the norm."""
    device = torch.device("cuda", 0)
    take, sides = clock(device), {"old": old, "new": new}
    with precision_flags(p.precision):
        given = operands(p, device, 0)
        first = {name: [t.double() for t in side.work(p, given)()] for name, side in sides.items()}
        apart = float(torch.stack([(a - b).norm() / a.norm() for a, b in zip(first["old"], first["new"])]).max())
        del first
        for side in sides.values():
            side.work(p, given)()
        taken: dict[str, list[float]] = {name: [] for name in sides}
        begin = time.perf_counter()
        for turn in range(ROUNDS):
            for name in list(sides)[:: -1 if turn % 2 else 1]:
                run = sides[name].work(p, given)
                taken[name].append(take(run))
            if turn >= 7 and time.perf_counter() - begin > SECONDS:
                break
    return {name: median(values[1:]) for name, values in taken.items()} | {"apart": apart}


def find(wanted: list[Row], old: Checkout, new: Checkout, sample: int, codes: bool) -> list[dict[str, Any]]:
    """All rows with both sides' plans; ``time`` says which are to be timed. ``codes``: see this program's head."""
    found = []
    for row in wanted:
        before, after = old.describe(row.problem), new.describe(row.problem)
        found.append({"row": row.name, "old": before, "new": after, "time": before != after})
        if len(found) % 200 == 0:
            print(f"{len(found)} of {len(wanted)} planned", flush=True)
    alike = [(row, one) for row, one in zip(wanted, found) if not one["time"]]
    if codes:
        code = compile_all([row for row, _ in alike], (old, new))
        for row, one in alike:
            differ = set(code[old.name, row.name]) ^ set(code[new.name, row.name])
            if differ:
                one |= {"time": True, "code": sorted({line.split()[0] for line in differ})}
        alike = [(row, one) for row, one in alike if not one["time"]]
    for _, one in random.Random(0).sample(alike, min(sample, len(alike))):
        one["time"] = True
    return found


def compile_all(todo: list[Row], sides: tuple[Checkout, Checkout]) -> dict[tuple[str, str], list[str]]:
    """What `Checkout.compile` finds, by side and row, many at once; a failure is left to the row that needs it."""

    def one(what: tuple[Checkout, Row]) -> list[str]:
        side, row = what
        try:
            return side.compile(row.problem)
        except RuntimeError as error:
            print(f"{row.name}: {error}", flush=True)
            return [f"failed {side.name}"]

    every = [(side, row) for row in todo for side in sides]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {(side.name, row.name): code for (side, row), code in zip(every, pool.map(one, every))}


def tell(found: list[dict[str, Any]]) -> None:
    """Prints each report's geometric mean of old over new, and the rows that lost most."""
    by_report: dict[str, list[float]] = {"all": []}
    for one in found:
        if "ratio" in one or not one["time"]:
            for name in ("all", one["row"].split()[0]):
                by_report.setdefault(name, []).append(one.get("ratio", 1.0))
    for name, ratios in sorted(by_report.items()):
        print(f"{name:16} {len(ratios):4} rows  {geometric_mean(ratios):.3f}")
    for one in sorted((one for one in found if one.get("ratio", 1.0) < 0.87), key=lambda one: float(one["ratio"])):
        print(f"{one['ratio']:.2f}  {one['row']}: {one['old']} -> {one['new']}")


def time_all(
    found: list[dict[str, Any]], by_name: dict[str, Row], old: Checkout, new: Checkout, path: Path | None, end: float
) -> bool:
    """Times the rows that are to be, until ``end``, and keeps them; whether all were right."""
    todo, right = [one for one in found if one["time"] and one["row"] in by_name], True
    compile_all([by_name[one["row"]] for one in todo], (old, new))
    head = {"device": torch.cuda.get_device_name(), "versions": env.versions(), "commit": env.commit()}
    for one in todo:
        if time.monotonic() > end:
            break
        try:
            times = measure(by_name[one["row"]].problem, old, new)
        except Exception as error:
            one["failure"], right = f"{type(error).__name__}: {error}".splitlines()[0], False
            print(f"{one['row']}: {one['failure']}", flush=True)
            continue
        one |= {"old_ms": 1e3 * times["old"], "new_ms": 1e3 * times["new"], "apart": times["apart"]}
        one["ratio"] = times["old"] / times["new"]
        right &= times["apart"] < 1e-2
        print(f"{one['ratio']:.3f} {one['row']} ({1e3 * times['new']:.3f} ms, {times['apart']:.1e})", flush=True)
        if path:
            save({**head, "rows": found}, path)
    return right


def main() -> int:
    """Exit code 1 if a row failed or the sides' results differ by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("--plan", type=Path, help="only plan, and write the rows here")
    parser.add_argument("--rows", type=Path, help="what --plan wrote")
    parser.add_argument("--json", type=Path, help="where to write the report")
    for name, default in (("reports", [*SWEEPS]), ("cases", []), ("passes", [*PASSES])):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=default)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--codes", action="store_true", help="of rows planned alike, compare the machine code too")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many")
    given = parser.parse_args()
    end, wanted = time.monotonic() + given.seconds, list(rows(given.reports, given.cases, given.passes))
    with tempfile.TemporaryDirectory() as place:
        sys.path.insert(0, place)
        old, new = Checkout(given.old, "upconv_old", Path(place)), Checkout(ROOT, "upconv_new", Path(place))
        for side in (old, new):
            side("cuda.families"), side("bench.timing")
        found = json.loads(given.rows.read_text()) if given.rows else find(wanted, old, new, given.sample, given.codes)
        if given.plan:
            save(found, given.plan)
            print(f"{sum(one['time'] for one in found)} of {len(found)} rows are to be timed")
            return 0
        right = time_all(found, {row.name: row for row in wanted}, old, new, given.json, end)
        tell(found)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
