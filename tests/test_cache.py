"""The kernels on disk: whole or not there, trusted or refused, raced and killed; and the command that shows them."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
import warnings
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import BARE, needs_nvrtc
from measured import command
from situations.processes import in_threads
from upconv import env
from upconv.cuda.compile import cache, jit, nvrtc

SOURCE = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 2; }\n'
NAME = f"sm_80-{'0123456789abcdef' * 4}.cubin"


@pytest.fixture(autouse=True)
def folder(cold: Path) -> Path:
    """The cache's directory, which does not exist yet."""
    return cold


def compile_again(source: str = SOURCE, arch: str = "80") -> bytes:
    """As another process would."""
    jit._cubins.clear()
    return jit.cubin(source, arch, "f.cu")


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cubin"))


# --- entries ---------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(data=st.data())
def test_any_damage_to_an_entry_is_noticed(folder: Path, data: st.DataObject) -> None:
    path = cache.write(NAME, bytes(range(256)))
    assert path is not None
    whole = path.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "drop", "add"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    bad = {
        "flip": whole[:at] + bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))]) + whole[at + 1 :],
        "cut": whole[:at],
        "drop": whole[at + 1 :],
        "add": whole[:at] + data.draw(st.binary(min_size=1, max_size=64)) + whole[at:],
    }[kind]
    path.write_bytes(bad)
    assert cache.read(NAME) is None and not path.exists()


# --- the limit -------------------------------------------------------------------------------------------------------


def name_of(n: int) -> str:
    return f"sm_80-{n:064x}.cubin"


def used(folder: Path, n: int, days_ago: float) -> None:
    """Says when an entry was used last."""
    at = time.time() - 86400 * days_ago
    os.utime(folder / name_of(n), (at, at))


def kept(folder: Path) -> set[int]:
    return {int(path.stem.removeprefix("sm_80-"), 16) for path in entries(folder)}


def test_what_was_used_longest_ago_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read is a use. What another process writes or locks stays, and other files; what a dead one left goes."""
    for n in range(7):
        cache.write(name_of(n), bytes(4064))
        used(folder, n, 10 - n)
    others = [folder / ".1.tmp", folder / f".{NAME}.lock", folder / "notes.txt"]
    for path in (*others, folder / ".old.tmp"):
        path.write_bytes(bytes(4 * 4096))
    os.utime(folder / ".old.tmp", (0, 0))
    assert cache.read(name_of(0)) is not None
    monkeypatch.setenv("UPCONV_CACHE_BYTES", str(7 * 4096 + 2048))
    monkeypatch.setattr(cache, "_writes", count())
    cache.write(name_of(7), bytes(4064))
    assert kept(folder) == {0, 2, 3, 4, 5, 6, 7}
    assert all(path.exists() for path in others) and not (folder / ".old.tmp").exists()
    monkeypatch.setenv("UPCONV_CACHE_BYTES", "1")
    monkeypatch.setattr(cache, "_writes", count())
    cache.write(name_of(9), bytes(4064))
    assert kept(folder) == {9}, "what was just written stays, whatever the limit"


@pytest.mark.parametrize("value", ["2GiB", "0", "-1", "1e9", "1.5", "\u0662"])
def test_a_limit_that_is_no_number_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("UPCONV_CACHE_BYTES", value)
    message = f"UPCONV_CACHE_BYTES must be a number of bytes, at least 1; got {value!r}"
    for call in (partial(cache.read, NAME), partial(cache.write, NAME, b"")):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert not folder.exists() and cache.contents().problem == message


WRITERS = """
from itertools import count
children = []
for who in range(4):
    child = os.fork()
    if not child:
        for n in range(60):
            cache._writes = count()
            name = f"sm_80-{n % 20 + 1000 * (n % 3 and who):064x}.cubin"
            cache.write(name, bytes(4064))
            cache.read(name)
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


def test_processes_that_write_and_make_room_do_not_harm_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPCONV_CACHE_BYTES", str(12 * 4096))
    done = python(WRITERS)
    assert done.stderr == "" and list(folder.glob(".*.tmp")) == []
    assert entries(folder) and all(cache.read(path.name) is not None for path in entries(folder))
    assert len(entries(folder)) <= 12 + 4


@needs_nvrtc
def test_cubins_in_memory_have_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads compile although it is always reached."""
    monkeypatch.setattr(jit, "_MOST_CUBINS", 1)
    sources = [f"{SOURCE}// {n}\n" for n in range(3)]
    wanted = [jit.cubin(text, "80") for text in sources]

    def work() -> list[bool]:
        return [jit.cubin(text, "80") == code for _ in range(5) for text, code in zip(sources, wanted)]

    assert in_threads([work] * 4) == [[True] * 15] * 4 and len(jit._cubins) == 1


# --- processes -------------------------------------------------------------------------------------------------------


def python(code: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    head = f"{BARE}from upconv.cuda.compile import cache, jit\nimport os, sys\nSOURCE = {SOURCE!r}\n"
    done = subprocess.run([sys.executable, "-c", head + code, *arguments], capture_output=True, text=True, timeout=120)
    if check:
        assert done.returncode == 0, done.stderr
    return done


KILLED = """
import signal
os.replace = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
jit.cubin(SOURCE, "80")
"""


@needs_nvrtc
def test_a_process_killed_in_the_middle_leaves_nothing_that_counts(folder: Path, compilations: list[str]) -> None:
    assert python(KILLED, check=False).returncode == -signal.SIGKILL
    assert len(list(folder.glob(".*.tmp"))) == 1 and entries(folder) == []
    compile_again()
    assert len(compilations) == len(entries(folder)) == 1


# --- directories -----------------------------------------------------------------------------------------------------


def test_where_the_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.directory() == tmp_path / "cache"
    monkeypatch.delenv("UPCONV_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.directory() == tmp_path / "xdg" / "upconv"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored: XDG Base Directory Specification
    assert cache.directory() == tmp_path / "home" / ".cache" / "upconv"
    monkeypatch.setenv("UPCONV_CACHE", "off")
    assert cache.directory() is None
    assert not (tmp_path / "home").exists()


@needs_nvrtc
@pytest.mark.parametrize("value", ["cache", "./cache", "~/cache"])
def test_a_relative_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """It would be another one in each working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UPCONV_CACHE_DIR", value)
    message = f"UPCONV_CACHE_DIR must be an absolute path; got {value!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        jit.cubin(SOURCE, "80")
    assert list(tmp_path.iterdir()) == []
    assert shown(command("cache")[1])["in use"] == f"no: {message}"
    found = env.report()
    assert found["system"]["kernels"] == message
    monkeypatch.setenv("UPCONV_CACHE", "off")
    assert cache.directory() is None


@needs_nvrtc
def test_a_new_directory_is_the_users_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = folder / "a" / "b"
    monkeypatch.setenv("UPCONV_CACHE_DIR", str(nested))
    before = os.umask(0)
    try:
        jit.cubin(SOURCE, "80")
    finally:
        os.umask(before)
    assert stat.S_IMODE(nested.stat().st_mode) == 0o700 and len(entries(nested)) == 1


def _planted(folder: Path, patch: pytest.MonkeyPatch, mode: int) -> None:
    """Another user's kernel is in a directory that others may write to."""
    folder.mkdir()
    name = f"sm_80-{nvrtc.key(SOURCE, '80')}.cubin"
    (folder / name).write_bytes(cache._sealed(name, b"planted"))
    folder.chmod(mode)


def _of_another(folder: Path, patch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    owner = folder.stat().st_uid
    patch.setattr(os, "geteuid", lambda: owner + 1)


def _below_a_file(folder: Path, patch: pytest.MonkeyPatch) -> None:
    folder.write_text("")
    patch.setenv("UPCONV_CACHE_DIR", str(folder / "below"))


def _full(folder: Path, patch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(cache.os, "replace", full)


REFUSED: dict[str, tuple[Any, str]] = {
    **{
        f"mode {mode:o}": (partial(_planted, mode=mode), rf"others may write to it \(mode {mode:04o}\)")
        for mode in (0o770, 0o707, 0o777, 0o1777)
    },
    "of another user": (_of_another, r"it belongs to user \d+, not to user \d+"),
    "a file": (lambda folder, patch: folder.write_text(""), "it is not a directory"),
    "below a file": (_below_a_file, "Not a directory|File exists"),
    "full": (_full, "No space left on device"),
}


@needs_nvrtc
@pytest.mark.parametrize("case", REFUSED)
def test_a_directory_that_is_no_good_costs_a_warning(
    case: str, folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, and kernels are in memory alone. Nothing is written or left there, and nothing of it is read."""
    prepare, reason = REFUSED[case]
    prepare(folder, monkeypatch)
    before = sorted(folder.iterdir()) if folder.is_dir() else []
    with pytest.warns() as caught:
        code = jit.cubin(SOURCE, "80")
        jit.cubin(SOURCE, "86")
        assert jit.cubin(SOURCE, "80") is code
        assert compile_again() == code
        with pytest.raises(nvrtc.CompileError, match="source: not kept"):
            jit.cubin("wrong", "80")
    assert len(compilations) == 4
    assert [w.category for w in caught] == [RuntimeWarning]
    message = str(caught[0].message)
    assert str(folder) in message and re.search(reason, message), message
    assert (sorted(folder.iterdir()) if folder.is_dir() else []) == before


@needs_nvrtc
@pytest.mark.parametrize("value", ["off", "OFF", "0"])
def test_switched_off_it_is_silent_and_writes_nothing(
    value: str, folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPCONV_CACHE", value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jit.cubin(SOURCE, "80")
        jit.cubin(SOURCE, "80")
        compile_again()
    assert len(compilations) == 2 and not folder.exists()


# --- the command -----------------------------------------------------------------------------------------------------


def shown(text: str) -> dict[str, str]:
    return {line[:28].strip(): line[28:].strip() for line in text.splitlines()}


def fill(folder: Path) -> None:
    for n, arch in enumerate(("80", "120", "90a", "90a")):
        cache.write(f"sm_{arch}-{n:064x}.cubin", bytes(1000))


def test_cache_clear_removes_what_is_ours_and_nothing_else(folder: Path) -> None:
    assert command("cache", "clear") == (0, f"{folder} does not exist\n")
    fill(folder)
    (folder / ".abc.tmp").write_bytes(b"left behind")
    cache.write(f"{'0' * 64}.so", b"a library")
    others = {"notes.txt", "model.cubin", ".hidden"}
    for name in others:
        (folder / name).write_text("of the user")
    code, out = command("cache", "clear", input="n\n")
    assert code == 1 and "Remove 4 compiled kernels" in out and len(entries(folder)) == 5
    code, out = command("cache", "clear", "--yes")
    assert (code, out) == (0, f"removed 6 files from {folder}\n")
    assert {p.name for p in folder.iterdir()} == others
    fill(folder)
    assert command("cache", "clear", input="y\n")[0] == 0 and len(entries(folder)) == 1
