"""Runs the situations of tests/situations, keeps their verdicts, and writes docs/situations.md from them.

    python benchmarks/situations.py                   runs all on this machine's GPU, or else on its CPU
    python benchmarks/situations.py --device cpu NAME runs one, and keeps nothing
    python benchmarks/situations.py --resume          runs those that the report has no verdict of
    python benchmarks/situations.py --table           writes docs/situations.md from the reports
    python benchmarks/situations.py --check           exit code 1 when that page is not what the reports say

A run prints a line for each situation and writes benchmarks/results/situations/cpu.json or cuda.json (or ``--json``),
anew after each: device, versions, commit and a verdict by name. A verdict is ``same``, what differs, or
why it was not run. On a GPU most layers are compiled first, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

import situations  # noqa: E402
from situations import Situation, Unavailable, judge  # noqa: E402
from upconv import env  # noqa: E402
from upconv.bench.report import save  # noqa: E402

PAGE = ROOT / "docs" / "situations.md"
RESULTS = ROOT / "benchmarks" / "results" / "situations"
HEAD = """\
# Situations

Each row is a situation from a public report in which a layer that replaces PyTorch's could break. A test runs the same
code with PyTorch's layers and with ours, and compares values, strides and error texts. Ours are built directly and by
`upconv.accelerate`. On a CPU each is run once more with our engine forced on every call that it can serve.

`same` says that nothing differs. A source such as `pytorch/pytorch#102212` is an issue on GitHub. The code of a row is
the function of that name in [tests/situations](../tests/situations). `python benchmarks/situations.py` runs them all
and `python benchmarks/situations.py --table` writes this page from the runs' reports.
"""


def report_path(device: str) -> Path:
    """Where the verdicts of a device are kept."""
    return RESULTS / f"{device}.json"


def run(
    device: str, wanted: list[Situation], verdicts: dict[str, str], keep: Callable[[dict[str, str]], object]
) -> None:
    """Adds verdicts by name, each printed and handed to ``keep`` as soon as it is found."""
    torch.set_num_threads(1)
    for s in wanted:
        began = time.perf_counter()
        if device not in s.devices:
            verdicts[s.name] = "not on this device"
            continue
        try:
            verdicts[s.name] = str(judge(s, device))
        except Unavailable as missing:
            verdicts[s.name] = f"not run: needs {missing}"
        print(f"{s.name:34s} {time.perf_counter() - began:5.1f} s  {verdicts[s.name]}", flush=True)
        keep(verdicts)


def page() -> str:
    """The text of docs/situations.md."""
    reports = {d: json.loads(p.read_text()) for d in ("cpu", "cuda") if (p := report_path(d)).exists()}
    lines = [HEAD]
    for device, name in (("cpu", "CPU"), ("cuda", "GPU")):
        if device in reports:
            r = reports[device]
            lines.append(f"{name}: {r['device']}, PyTorch {r['torch']}, commit {r['commit']}.\n")
        else:
            lines.append(f"{name}: not run yet.\n")
    lines += ["| situation | name | source | kind | CPU | GPU |", "| --- | --- | --- | --- | --- | --- |"]
    for s in situations.every():
        found = [reports[d]["verdicts"].get(s.name, "not run") if d in reports else "not run" for d in ("cpu", "cuda")]
        cells = [s.text, f"`{s.name}`", source_cell(s), s.kind, *(v.replace("|", "/") for v in found)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def source_cell(s: Situation) -> str:
    """A source as the table has it: an issue's name, or a link to a page."""
    if "#" in s.source:
        return s.source
    return f"[{s.source.removesuffix('.html').rpartition('/')[2]}]({s.source})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--resume", action="store_true", help="leave out what the report has")
    parser.add_argument("--table", action="store_true", help="write docs/situations.md")
    parser.add_argument("--check", action="store_true", help="say whether docs/situations.md is current")
    asked = parser.parse_args()
    if asked.check:
        return int(PAGE.read_text(encoding="utf-8") != page())
    if asked.table:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    warnings.simplefilter("ignore")
    path = asked.json or (None if asked.names else report_path(asked.device))

    def keep(verdicts: dict[str, str]) -> None:
        if path:
            name = torch.cuda.get_device_name() if asked.device == "cuda" else f"{platform.machine()}, 1 thread"
            head = {"device": name, "torch": torch.__version__, "commit": (env.commit() or "")[:7]}
            save({**head, "verdicts": verdicts}, path)

    verdicts = json.loads(path.read_text())["verdicts"] if asked.resume and path and path.exists() else {}
    wanted = [s for s in situations.every() if (not asked.names or s.name in asked.names) and s.name not in verdicts]
    run(asked.device, wanted, verdicts, keep)
    keep(verdicts)
    bad = [v for v in verdicts.values() if v != "same" and not v.startswith("not ")]
    print(f"{len(verdicts)} situations, {len(bad)} differ")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
