"""What ``upconv export`` does with its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

from upconv.bench import suites
from upconv.cuda.gpu import Gpu
from upconv.export import _SIZES, c, default_precision, gpu_of, kernelbench_problem, publish, signatures
from upconv.export.check import Comparison, compare
from upconv.export.program import program
from upconv.problem import PRECISIONS, Precision, Problem


@dataclass(frozen=True)
class Made:
    """An exported file, not written yet."""

    problem: Problem
    signature: signatures.Signature
    arguments: tuple[Any, ...]
    """What ``ModelNew`` is constructed with."""
    gpu: Gpu
    forward_only: bool = False
    c: bool = False
    """Whether it is a ``.cu``, with a header and a table of launches beside it."""
    flags: Precision | None = None
    """The precision that PyTorch's flags allow where it is checked; None for the file's."""

    @property
    def summary(self) -> str:
        p = self.problem
        what = "kernels" if self.c else "ModelNew"
        return f"{what} for {str(p).rsplit(' ', 2)[0]} ({p.precision}, {p.layout}), sm_{self.gpu.arch}"

    @cached_property
    def text(self) -> str:
        return program(self.problem, self.signature, self.gpu, self.forward_only)

    def write(self, path: Path) -> None:
        """Errors: ValueError where C cannot have the file's name, or the layer has no kernels for it."""
        if not self.c:
            publish(path, self.text)
            return
        for suffix, text in c.files(self.problem, self.gpu, path.stem, self.forward_only).items():
            publish(path.with_suffix(suffix), text)

    def check(self) -> Checked:
        """Compiles the file and compares it with PyTorch. Errors: RuntimeError where it cannot be compiled."""
        device, attribute = torch.device("cuda", 0), self.signature.attribute
        found = compare(self.text, self.problem, attribute, self.arguments, device, not self.forward_only, self.flags)
        return Checked(found, torch.cuda.get_device_name(0))


@dataclass(frozen=True)
class Checked:
    """A comparison in words."""

    found: Comparison
    gpu: str

    @property
    def text(self) -> str:
        f = self.found
        if f.failure is not None:
            return f.failure
        lines = [f"outputs are right: they differ from PyTorch's by {f.used:.3g} times KernelBench's tolerance"]
        if f.gradients:
            of_input, of_weight = f.gradients
            lines.append(
                f"gradients are right: {of_input:.1e} (input) and {of_weight:.1e} (weight) from PyTorch's by norm"
            )
        ms = {side: 1e3 * median(seconds) for side, seconds in f.taken.items()}
        return "\n".join([
            *lines,
            f"forward {ms['ours']:.3f} ms, PyTorch {ms['torch']:.3f} ms ({ms['tuned']:.3f} with cudnn.benchmark), the "
            f"library {ms['library']:.3f} ms: {ms['torch'] / ms['ours']:.2f} times PyTorch's speed on {self.gpu}",
        ])  # fmt: skip


def need_gpu() -> None:
    """Raises ValueError where there is no GPU to check on."""
    if not torch.cuda.is_available():
        raise ValueError("--check must have a CUDA device to run on, and PyTorch finds none")


def make(
    number: int | None,
    layer: str | None,
    input: str | None,
    dtype: str,
    precision: str | None,
    arch: str | None,
    forward_only: bool = False,
    c: bool = False,
) -> Made:
    """The file that the command's arguments describe. Errors: ValueError, in one sentence."""
    if (number is None) == (layer is None):
        raise ValueError("either --kernelbench or --layer must be given, and not both")
    gpu = gpu_of(arch)
    if number is not None:
        if dtype != "float32" or precision is not None:
            raise ValueError(
                "--dtype and --precision go with --layer; KernelBench's problems are PyTorch's default float32"
            )
        p = kernelbench_problem(number)
        if input is not None:
            shape = suites.parse_input(input)
            if len(shape) != p.rank + 2 or shape[1] != p.in_channels:
                raise ValueError(f"--input must have {p.rank} sizes behind {p.in_channels} channels; got {input!r}")
            p = p.with_(batch=shape[0], size=shape[2:])
        signature, arguments = signatures.kernelbench(number, p), signatures.init_arguments(number, p)
    else:
        assert layer is not None
        p = _layer(layer, input, dtype, precision)
        signature, arguments = signatures.layer(p), ()
    flags = None if number is None else default_precision(p.dtype)
    return Made(p, signature, arguments, gpu, forward_only, c, flags)


def _layer(layer: str, input: str | None, dtype: str, precision: str | None) -> Problem:
    dtypes = {str(d).removeprefix("torch."): d for d in PRECISIONS}
    if dtype not in dtypes:
        raise ValueError(f"--dtype must be one of {', '.join(dtypes)}; got {dtype!r}")
    p = suites.parse_layer(layer, input or _some_input(layer))
    kinds: dict[str, Precision] = {kind: kind for kind in PRECISIONS[dtypes[dtype]]}
    if precision is not None and precision not in kinds:
        raise ValueError(f"--precision must be one of {', '.join(kinds)} for {dtype}; got {precision!r}")
    chosen = kinds[precision] if precision else default_precision(dtypes[dtype])
    return p.with_(dtype=dtypes[dtype], precision=chosen)


def _some_input(layer: str) -> str:
    """An input for a layer that was given none; some argument must tell the rank."""
    lengths = {len(values) for values in _tuples(layer) if len(values) > 1}
    first = re.match(r"\s*(?:in_channels\s*=\s*)?(\d+)", layer)
    if len(lengths) != 1 or not lengths <= set(_SIZES) or first is None:
        raise ValueError(
            "without --input the layer's kernel_size must have a value for each spatial dimension, like "
            f'"64,64,(3,3)"; got {layer!r}'
        )
    return "x".join(map(str, (8, int(first[1]), *_SIZES[lengths.pop()])))


def _tuples(layer: str) -> list[Sequence[str]]:
    return [[v for v in text.split(",") if v.strip()] for text in re.findall(r"[(\[]([^()\[\]]*)[)\]]", layer)]
