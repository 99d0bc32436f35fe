"""Who may put another library in the place of one that a process loads."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from upconv.cuda.compile import cache, trust
from upconv.replay import native

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes and owners are POSIX's")


@pytest.fixture
def below(cold: Path) -> Path:
    """The cache's directory, some below one whose mode a test sets."""
    folder = cold / "a" / "b" / "cache"
    folder.mkdir(parents=True, mode=0o700)
    for each in (cold, cold / "a", cold / "a" / "b"):
        each.chmod(0o755)
    return folder


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o722])
@pytest.mark.parametrize("up", [0, 1, 2])
def test_a_directory_that_others_may_write_to_is_named(below: Path, up: int, mode: int) -> None:
    place = below.parents[up]
    place.chmod(mode)
    assert trust.insecure(below) == f"others may write to {place} (mode {mode:04o}), on the way to {below}"
    place.chmod(mode | stat.S_ISVTX)  # as /tmp: others make entries there, and replace none
    assert trust.insecure(below) is None


def test_a_group_of_others_is_others(below: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where it is the user's alone, which new directories of many systems let write."""
    import grp
    import pwd

    below.parent.chmod(0o775)
    user = SimpleNamespace(pw_name="ada", pw_gid=os.stat(below).st_gid)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: user)
    for name, members, own in (("ada", [], True), ("ada", ["ada"], True), ("ada", ["eve"], False), ("all", [], False)):
        monkeypatch.setattr(grp, "getgrgid", lambda number, n=name, m=members: SimpleNamespace(gr_name=n, gr_mem=m))
        assert (trust.insecure(below) is None) == own, (name, members)
    monkeypatch.setattr(grp, "getgrgid", lambda number: {}[number])
    assert "others may write" in str(trust.insecure(below)), "a group that nobody knows"


def test_a_place_of_another_user_is_named(below: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, real = os.geteuid(), Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = list(real(path))
        found[stat.ST_UID] = 4711 if path == below.parents[1] else owner
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert trust.insecure(below) == f"{below.parents[1]}, on the way to {below}, belongs to user 4711"


@pytest.mark.parametrize("relative", [False, True])
def test_links_are_followed_step_by_step(below: Path, cold: Path, relative: bool) -> None:
    """Of a link to a link the place between counts too."""
    between, first = cold / "between", cold / "first"
    between.mkdir()
    second = between / "second"
    second.symlink_to(Path("..") / "a" / "b" if relative else below.parent)
    first.symlink_to(Path("between") / "second" if relative else second)
    way = first / "cache"
    assert way.stat() == below.stat() and trust.insecure(way) is None
    between.chmod(0o777)
    assert trust.insecure(way) == (f"others may write to {between} (mode 0777), on the way to {way}")
    between.chmod(0o755)
    (cold / "a").chmod(0o777)
    assert f"{cold / 'a'} (mode 0777)" in str(trust.insecure(way)).replace("between/../", "")


def test_nothing_is_loaded_from_below_a_directory_of_all(
    below: Path, no_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a library that lies there nor one that is compiled; kernels are kept, which run on the GPU alone."""
    monkeypatch.setenv("UPCONV_CACHE_DIR", str(below))
    monkeypatch.delenv("UPCONV_NATIVE", raising=False)
    assert cache.write(native._name(), b"planted") is not None
    assert native.off() is None
    below.parents[1].chmod(0o777)
    reason = f"others may write to {below.parents[1]} (mode 0777), on the way to {below}"
    loaded: list[Path] = []
    monkeypatch.setattr(native, "_load", loaded.append)
    monkeypatch.setattr(native, "_compiled", lambda: loaded.append(below) or b"")
    assert native.off() == native.state() == reason
    assert native.wait(60) is None and native.state() == reason and not loaded
    kernel = cache.write(f"sm_80-{'0' * 64}.cubin", b"code")
    assert kernel is not None and kernel.exists()


def test_a_temporary_folder_that_others_may_replace_is_no_place_either(
    cold: Path, below: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a library is loaded from, that the cache's directory cannot have or must not execute."""
    spool = cold / "spool"
    spool.mkdir()
    spool.chmod(0o777)
    monkeypatch.setattr(native.tempfile, "tempdir", str(spool))
    monkeypatch.setattr(native, "_compiled", lambda: b"")
    monkeypatch.setattr(cache, "write", lambda name, data: None)
    monkeypatch.setattr(native, "_load", lambda path: "loaded")
    with pytest.raises(RuntimeError, match=f"others may write to {spool}"):
        native.found()
    spool.chmod(0o1777)
    assert native.found() == "loaded"
