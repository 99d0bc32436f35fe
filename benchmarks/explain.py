"""Writes into docs/explain.md what `upconv explain` says of two of KernelBench's layers on an H200.

    python benchmarks/explain.py          rewrites docs/explain.md between its markers
    python benchmarks/explain.py --check  exit code 1 when the planner says something else by now

A section between ``<!-- explain-kb57 -->`` and ``<!-- /explain-kb57 -->`` belongs to this program. No GPU is needed:
plans are made by the cost models, for TF32 and NCHW, and the roof is the data sheet's
(`upconv.explain.estimated_ceilings`).
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from upconv import planner
from upconv.bench import files
from upconv.bench.suites import SUITES
from upconv.cuda.gpu import H200
from upconv.explain import Explanation, estimated_ceilings
from upconv.problem import Problem

PAGE = Path(__file__).resolve().parent.parent / "docs" / "explain.md"
CASES = ("kb57", "kb81")
WIDTH = 110


def command(p: Problem) -> str:
    """The command that prints the same."""
    layer = [str(p.in_channels), str(p.out_channels), _pair(p.kernel)]
    named = {"stride": p.stride, "padding": p.padding, "output_padding": p.output_padding, "dilation": p.dilation}
    plain = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
    layer += [f"{name}={_pair(value)}" for name, value in named.items() if any(v != plain[name] for v in value)]
    layer += [f"groups={p.groups}"] * (p.groups > 1) + ["bias=False"] * (not p.bias)
    shape = "x".join(map(str, p.input_shape))
    return f'upconv explain "{",".join(layer)}" --input {shape} --gpu H200 --precision {p.precision}'


def _pair(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"({','.join(map(str, values))})"


def explained(p: Problem) -> str:
    """A layer's command and explanation as a block of text."""
    plan = planner.plan(p, planner.Device("cuda", gpu=H200))
    text = io.StringIO()
    Console(file=text, width=WIDTH, highlight=False, color_system=None).print(
        Explanation(p, plan, estimated_ceilings(H200))
    )
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return "\n".join(["```text", f"$ {command(p)}", *lines, "```"])


def sections() -> Iterator[tuple[str, str]]:
    """Every section's name and content."""
    problems = {case.name: case.problem.with_(precision="tf32") for case in SUITES["kernelbench"]}
    for name in CASES:
        yield f"explain-{name}", explained(problems[name])


def rewritten(text: str) -> str:
    """The page with every section made anew. Errors: ValueError for a section whose markers the page lacks."""
    for name, content in sections():
        section = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        text, found = section.subn(lambda match, content=content: f"{match[1]}{content}{match[2]}", text)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"docs/explain.md must have the markers of {name} once; it has them {found} times")
    return text


def main() -> int:
    was = PAGE.read_text(encoding="utf-8")
    new = rewritten(was)
    if "--check" in sys.argv[1:]:
        if new != was:
            print("docs/explain.md differs from what the planner says; run: python benchmarks/explain.py")
        return int(new != was)
    files.publish(PAGE, lambda path: path.write_text(new, encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
