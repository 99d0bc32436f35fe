"""Writes into docs/explain.md what `upconv explain` says of two of KernelBench's layers on an H200.

    python benchmarks/explain.py          rewrites docs/explain.md between its markers
    python benchmarks/explain.py --check  exit code 1 when the planner says something else by now

A section of the page, ``<!-- explain-kb57 -->`` to ``<!-- /explain-kb57 -->``, begins with the command that it shows.
No GPU is needed: plans are made by the cost models, and the roof is the data sheet's.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from typer.testing import CliRunner

from upconv.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "explain.md"
WIDTH = 110
_SECTION = re.compile(r"(<!-- (explain-\w+) -->\n```text\n\$ upconv ([^\n]*)\n).*?(\n```\n<!-- /\2 -->)", re.DOTALL)


def explained(command: str) -> str:
    """What a command prints in a terminal of `WIDTH` columns."""
    settings = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TERM": "xterm"}
    done = CliRunner(env=settings).invoke(app, shlex.split(command))
    if done.exit_code:
        raise ValueError(f"upconv {command} must succeed; it says {done.output!r}")
    return "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", done.stdout).splitlines())


def rewritten(text: str) -> str:
    """The page with every section made anew."""
    return _SECTION.sub(lambda match: match[1] + explained(match[3]) + match[4], text)


def main() -> int:
    was = PAGE.read_text(encoding="utf-8")
    new = rewritten(was)
    if "--check" in sys.argv[1:]:
        if new != was:
            print("docs/explain.md differs from what the planner says; run: python benchmarks/explain.py")
        return int(new != was)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
