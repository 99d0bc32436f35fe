"""Whether a change leaves kernels as they were: machine code of this checkout's choices against another commit's.

    python benchmarks/codes.py HEAD~1                        every layer of the suites, all passes: minutes
    python benchmarks/codes.py v1 --cases kb57,unet4 --precisions bf16 --layouts channels_last --passes fwd
    python benchmarks/codes.py HEAD --arch 80                for GPUs before Hopper; no GPU is needed

What a problem's fastest choice compiles is compared, instructions and constants, whatever its text says. Each line that
differs says whether the choice is another one or its code. Exit code: 0 all is the same, 1 something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from layers import add_arguments, problems

import upconv
from upconv.cuda import families
from upconv.cuda.gpu import A100, H200
from upconv.problem import Pass, Problem

ROOT = Path(__file__).resolve().parents[1]
PASSES: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight")
_SECTIONS = (".text.", ".nv.constant")

Codes = dict[str, list[str]]
"""By problem the choice's summary and, for each of its kernels and tables, name and digest."""


def sections(cubin: bytes) -> dict[str, str]:
    """Digests of an ELF file's sections of instructions and constants, by name. Errors: ValueError for another file."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"a cubin is a 64-bit little-endian ELF file, got one that begins with {cubin[:6]!r}")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    at_names = headers[names][4]
    found = {}
    for name_at, _, _, _, offset, length in headers:
        begin = at_names + name_at
        name = cubin[begin : cubin.index(b"\0", begin)].decode()
        if name.startswith(_SECTIONS):
            found[name] = hashlib.sha256(cubin[offset : offset + length]).hexdigest()[:16]
    return found


def _compiler() -> Any:
    """The package's module that compiles, where its commit has it."""
    place = "upconv.cuda.compile" if find_spec("upconv.cuda.compile") else "upconv.cuda"
    return import_module(f"{place}.jit")


def codes(layers: Iterable[tuple[str, Problem]], arch: str) -> Codes:
    """Those of the package that is imported."""
    gpu, jit = {"90a": H200, "80": A100}[arch], _compiler()
    found: Codes = {}
    for case, p in layers:
        fitting = [c for c in families.choose(p, gpu).values() if not isinstance(c, str)]
        choice = min(fitting, key=lambda c: c.seconds)
        code = [
            f"{i}{name} {digest}"
            for i, unit in enumerate(choice.sources())
            for name, digest in sorted(sections(jit.cubin(unit.source, gpu.arch, unit.label)).items())
        ]
        found[f"{case} {p.precision} {p.layout} {p.pass_}"] = [f"{choice.family} {choice.summary}", *code]
    return found


def differences(old: Codes, new: Codes) -> list[str]:
    """A line for each problem that is not the same in both."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key not in old or key not in new:
            lines.append(f"{key}: only {'now' if key in new else 'before'}")
        elif old[key][0] != new[key][0]:
            lines.append(f"{key}: another choice, {old[key][0]} -> {new[key][0]}")
        elif old[key] != new[key]:
            names = sorted({entry.split()[0] for entry in set(old[key]) ^ set(new[key])})
            lines.append(f"{key}: other code, {', '.join(names)}")
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    parser.add_argument("commit", nargs="?", help="what this checkout is compared with")
    add_arguments(parser, PASSES)
    parser.add_argument("--arch", choices=("90a", "80"), default="90a")
    parser.add_argument("--list", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.list:
        root = Path(os.environ["PYTHONPATH"]).resolve()
        if root not in Path(upconv.__file__).resolve().parents:
            raise RuntimeError(f"the package must be {root}'s, got {upconv.__file__}")
        found = codes(problems(given.cases, given.precisions, given.layouts, given.passes), given.arch)
        given.list.write_text(json.dumps(found))
        return 0
    if not given.commit:
        parser.error("COMMIT must be named, got none")
    own = [argument for argument in arguments if argument != given.commit]
    with tempfile.TemporaryDirectory() as name:
        folder, running = Path(name), []
        archive = ["git", "-C", str(ROOT), "archive", given.commit, "src"]
        packed = subprocess.run(archive, capture_output=True)
        if packed.returncode:
            said = packed.stderr.decode().strip()
            parser.error(f"COMMIT must be one of this repository's, got {given.commit!r}: {said}")
        (folder / "old").mkdir()
        subprocess.run(["tar", "-x", "-C", str(folder / "old")], input=packed.stdout, check=True)
        for which, root in (("old", folder / "old"), ("new", ROOT)):
            environment = {**os.environ, "PYTHONPATH": str(root / "src"), "UPCONV_CACHE_DIR": str(folder / "cache")}
            command = [sys.executable, __file__, *own, "--list", str(folder / which) + ".json"]
            running.append(subprocess.Popen(command, env=environment))
        ended = [process.wait() for process in running]
        if any(ended):
            print("a checkout's kernels were not all compiled", file=sys.stderr)
            return 1
        old, new = (json.loads((folder / f"{which}.json").read_text()) for which in ("old", "new"))
    lines = differences(old, new)
    print("\n".join([*lines, f"{len(lines)} of {len(old.keys() | new.keys())} differ"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
