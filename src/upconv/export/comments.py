"""Of the comments of kernel files the sentences that are true of an exported one."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

WIDTH = 120
"""Columns of the file."""
_TAGGED = re.compile(r"^([ \t]*)// \[([\w .]+)\] (.*\n(?:\1// (?! *\[|  )\S.*\n)*)", re.MULTILINE)
"""A comment for kernels with a flag, up to the next such comment or item of a list; `[library]` is for nobody's."""
_BLOCK = re.compile(r"(?:^[ \t]*//(?! ?-|//)[^\n]*\n)+", re.MULTILINE)
_BEHIND = re.compile(r"[ \t]*//(?! ?-)[^\n]*$", re.MULTILINE)
_NAMED = re.compile(r"`([A-Za-z_]\w*)(?:::(\w+))?[^`]*`|(\w+\.(?:cuh?|py)\b)")
"""A name in code, with its member's, or a file."""
_SEE = re.compile(r",? (?:see [\w/]+\.(?:cuh?|py)|\([\w/]+\.(?:cuh?|py)\))(?=[.;,:]|$)", re.MULTILINE)


def fitting(text: str, flags: Mapping[str, bool]) -> str:
    """The text without comments for kernels with other flags, and sentences about other files or names that its code
    does not have."""
    text = _TAGGED.sub(lambda one: f"{one[1]}// {one[3]}" if flags.get(one[2]) else "", text)
    text = re.sub(r"^//\n(?!//)", "", text, flags=re.MULTILINE)
    names = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"//.*", "", text)))
    text = _SEE.sub("", text)
    text = _BLOCK.sub(lambda block: _fitting_block(block[0], names), text)
    lines = []
    for line in text.split("\n"):
        if (found := _BEHIND.search(line)) and line[: found.start()].strip() and _foreign(found[0], names):
            line = line[: found.start()]
        lines.append(line)
    return "\n".join(lines)


def _fitting_block(block: str, names: set[str]) -> str:
    lines = block.splitlines()
    indent = lines[0][: lines[0].index("//")]
    bodies = [line.strip()[2:] for line in lines]
    if not _foreign(block, names) or any(not re.match(r" \S", body) for body in bodies):  # lists stay
        return block
    sentences = re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(body.strip() for body in bodies))
    kept = " ".join(one for one in sentences if not _foreign(one, names))
    wrapped = textwrap.wrap(kept, WIDTH - len(indent) - 3, break_on_hyphens=False)
    return "".join(f"{indent}// {line}\n" for line in wrapped)


def _foreign(comment: str, names: set[str]) -> bool:
    every = (one for found in _NAMED.findall(comment) for one in found if one)
    return any("." in one or one not in names for one in every)
