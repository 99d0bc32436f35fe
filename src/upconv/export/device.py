"""The device code of an exported file: each kernel's templates once, and a struct of constants for every launch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from upconv.cuda.compile import jit
from upconv.export.host import Variant

_ANGLED = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>.*\n?", re.MULTILINE)


def includes(found: Sequence[Variant]) -> tuple[str, ...]:
    """System headers that the kernels need, without the angle brackets."""
    return tuple(dict.fromkeys(name for v in found for name in _ANGLED.findall(v.source)))


def templates(found: Sequence[Variant]) -> str:
    """The kernels' files behind what they include, each once, in a namespace."""
    seen: set[str] = set()
    files = [jit.with_includes(jit.parts_of(v.source)[1], seen) for v in found]
    text = "\n".join(file.strip() + "\n" for file in files if file)
    return f"namespace kernels {{\n\n{_ANGLED.sub('', text)}\n}}  // namespace kernels\n"


def constants(v: Variant) -> str:
    """The struct of constants by which a variant's kernels are instantiated."""
    return re.sub(rf"\b{jit.CONFIG}\b", v.config, jit.parts_of(v.source)[0])
