"""The device code of exported files: what it compiles to is what the library's kernels do, and nothing is unused."""

from __future__ import annotations

import re

import pytest
import torch

import ptxas
from upconv.bench.suites import parse_layer
from upconv.cuda.compile import jit, nvrtc
from upconv.cuda.gpu import H200
from upconv.export import device, passes
from upconv.export.passes import Kernel

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))

# Layers whose passes are served by every family and by both of a family's alignments.
LAYERS = {
    "strided": parse_layer("64,64,4,2,1", "4x64x32x32").with_(precision="tf32"),
    "grouped": parse_layer("32,64,(3,5),(2,3),(1,2),dilation=(2,1),groups=4", "4x32x64x64").with_(precision="tf32"),
    "3-D": parse_layer("32,32,(3,5,7),2,(1,2,3),output_padding=1,groups=4", "2x32x6x12x24").with_(precision="ieee"),
    "depthwise": parse_layer("64,64,4,2,1,groups=64", "4x64x33x40").with_(precision="tf32"),
    "few": parse_layer("16,3,(4,4),stride=2,padding=1", "4x16x64x64").with_(precision="ieee"),
    "walk": parse_layer("256,256,3,1,1,groups=256", "32x256x64x64").with_(precision="tf32"),
    "image": parse_layer("56,1,9,stride=3,padding=4,output_padding=2", "2x56x32x32").with_(
        dtype=torch.bfloat16, precision="bf16", layout="channels_last"
    ),
    "bf16": parse_layer("64,48,4,2,1", "8x64x32x32").with_(
        dtype=torch.bfloat16, precision="bf16", layout="channels_last"
    ),
}


def text_of(found: tuple[Kernel, ...]) -> str:
    """All device code of a file, with its includes."""
    includes = "".join(f"#include <{name}>\n" for name in device.includes(found))
    templates = device.templates(found, H200)
    return includes + device.spaced(templates, *(device.constants(k, templates) for k in found))


@pytest.fixture(scope="module", params=LAYERS)
def found(request: pytest.FixtureRequest) -> tuple[Kernel, ...]:
    return passes.kernels(LAYERS[request.param], H200)


@needs_nvrtc
def test_kernels_compile_to_what_the_librarys_do(found: tuple[Kernel, ...]) -> None:
    """Registers and local memory of each; all kernels of the file in one program."""
    wanted = [entry for k in found for entry in k.entries]
    text = f"// entries: {'; '.join(wanted)}\n{text_of(found)}"
    needs = sorted(each[:2] for each in ptxas.needs(text, "90a").values())
    alone = []
    for k in found:
        of_source = ptxas.needs(k.unit.source, "90a")
        alone += [of_source[entry][:2] for entry in k.unit.entries]
    assert needs == sorted(alone)


@needs_nvrtc
def test_everything_that_is_defined_is_used(found: tuple[Kernel, ...]) -> None:
    templates = device.templates(found, H200)
    text = re.sub(r'//[^\n]*|"(?:\\.|[^"\\])*"', "", templates)
    words = re.findall(r"\w+", text)
    defined = re.findall(r"^(?:template <[^>]*>\n?\s*)?(?:static )?__device__ [\w &*:<>]*?(\w+)\(", text, re.MULTILINE)
    assert len(defined) > 5
    for name in defined:
        assert words.count(name) > 1, f"{name} is defined and not used"
    assert not re.search(r'extern "C"|^#(?!pragma|define)', text, re.MULTILINE)
    whole = sum(len((jit.KERNELS / name).read_text().splitlines()) for name in used_files(found))
    assert len(templates.splitlines()) < 0.75 * whole


def used_files(found: tuple[Kernel, ...]) -> list[str]:
    files: dict[str, str] = {}
    for k in found:
        device._add(jit.parts_of(k.unit.source)[1], files)
    return list(files)


def test_layers_here_take_every_kind_of_kernel() -> None:
    kinds = {k.unit.entries[-1] for p in LAYERS.values() for k in passes.kernels(p, H200)}
    assert kinds >= {"gather", "reduce", "direct", "direct_reduce"}
