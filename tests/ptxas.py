"""What kernels need, as the assembler reports it."""

from __future__ import annotations

import re
from typing import NamedTuple

from upconv.cuda.compile import jit, nvrtc

Needs = dict[str, tuple[int, int, int]]
"""By the kernels' names: registers, bytes of local memory (arrays indexed at run time, and spills), bytes of
static shared memory."""


class Report(NamedTuple):
    """A compilation."""

    built: nvrtc.Built
    needs: Needs


def report(text: str, arch: str) -> Report:
    """Compiles a text for ``sm_<arch>``."""
    built = nvrtc.build(text, arch, "kernel", jit.entries_of(text), flags=("--ptxas-options=-v",))
    names = {symbol: name for name, symbol in jit.kernels_of(built.code).items()}
    found = {}
    for part in built.log.split("Compiling entry function")[1:]:
        symbol = re.search(r"'(\w+)'", part)
        registers, local = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes stack frame", part)
        shared = re.search(r"(\d+) bytes smem", part)
        assert symbol and registers and local, part
        found[names[symbol[1]]] = int(registers[1]), int(local[1]), int(shared[1]) if shared else 0
    return Report(built, found)


def needs(text: str, arch: str) -> Needs:
    """What a text's kernels need."""
    return report(text, arch).needs
