"""Kernels compiled as on a machine that has never compiled them, for measurements of that."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from upconv.cuda.compile import jit, nvrtc

NO_CACHE = "--no-cache"


@contextmanager
def no_caches() -> Iterator[None]:
    """An empty cache of kernels, in a folder that goes with it, and none of NVRTC's own.

    CUDA 13's answers code that was compiled before, in this process or another, within 0.05 s. Neither another text nor
    ``CUDA_CACHE_DISABLE`` helps; an option does (docs/experiments.md), which older versions do not know.
    """
    before = {name: os.environ.pop(name, None) for name in ("UPCONV_CACHE_DIR", "UPCONV_CACHE")}
    flags: tuple[str, ...] = nvrtc.FLAGS
    with tempfile.TemporaryDirectory(prefix="upconv-cold-") as folder:
        os.environ["UPCONV_CACHE_DIR"] = folder
        if nvrtc.unavailable() is None:
            with_flags((*flags, NO_CACHE))
            try:
                jit.built("", "80")
            except nvrtc.CompileError:
                with_flags(flags)
        try:
            yield
        finally:
            with_flags(flags)
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def with_flags(flags: tuple[str, ...]) -> None:
    """Has NVRTC compile by these, which are part of a kernel's key."""
    nvrtc.FLAGS = flags
