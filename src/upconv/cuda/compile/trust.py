"""Who may put another file in the place of one that this process loads as code."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def insecure(path: Path) -> str | None:
    """Who else may replace what an absolute path leads to, in a sentence that names the place; None for nobody.

    Every directory and symbolic link on the way must be the user's or the superuser's, and no directory may be written
    to by others, but for sticky ones, whose entries only their owners replace. Errors: OSError.
    """
    if not hasattr(os, "geteuid"):
        return None
    ways, seen = [path], set()
    while ways:
        way = ways.pop()
        for place in (*reversed(way.parents), way):
            if place in seen:
                continue
            seen.add(place)
            found = place.lstat()
            if found.st_uid not in (0, os.geteuid()):
                return f"{place}, on the way to {path}, belongs to user {found.st_uid}"
            if stat.S_ISLNK(found.st_mode):
                ways.append(place.parent / os.readlink(place))
            elif _others_write(found):
                return f"others may write to {place} (mode {stat.S_IMODE(found.st_mode):04o}), on the way to {path}"
    return None


def _others_write(found: os.stat_result) -> bool:
    """Whether others may replace a directory's entries."""
    if found.st_mode & stat.S_ISVTX:
        return False
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _own_group(found.st_gid)


def _own_group(number: int) -> bool:
    """Whether a group is the user's alone, as many systems give each user one."""
    try:
        import grp
        import pwd

        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except (ImportError, KeyError):
        return False
    return number == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
