"""The device code of exported files: what it compiles to is what the library's kernels do, and nothing is unused."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

import ptxas
from conftest import EVERY, needs_nvrtc
from upconv.bench.suites import parse_layer
from upconv.cuda.compile import jit, nvrtc
from upconv.cuda.gpu import H200

pytest.importorskip("tree_sitter")
from test_export import layer
from upconv.export import device, fold, passes, syntax
from upconv.export.passes import Kernel

HALF: dict[str, Any] = {"dtype": torch.bfloat16, "precision": "bf16", "layout": "channels_last"}
LAYERS = {name: layer(name) for name in ("strided", "3-D", "depthwise", "few", "walk")} | {
    "grouped": parse_layer("32,64,(3,5),(2,3),(1,2),dilation=(2,1),groups=4", "4x32x64x64").with_(precision="tf32"),
    "image": layer("image", **HALF),
    "bf16": parse_layer("64,48,4,2,1", "8x64x32x32").with_(**HALF),
}
"""Layers whose passes are served by every family and by both of a family's alignments."""
SAMPLED = tuple(name for name in LAYERS if EVERY or name not in ("few", "walk", "grouped"))
"""Those whose kernels together have every file, entry and flag."""


@cache
def templates_of(found: tuple[Kernel, ...]) -> str:
    """Kept, since it takes seconds."""
    return device.templates(found, H200)


def text_of(found: tuple[Kernel, ...]) -> str:
    """All device code of a file, with its includes."""
    includes = "".join(f"#include <{name}>\n" for name in device.includes(found))
    templates = templates_of(found)
    return includes + device.spaced(templates, *(device.constants(k, found, templates) for k in found))


@pytest.fixture(scope="module", params=SAMPLED)
def found(request: pytest.FixtureRequest) -> tuple[Kernel, ...]:
    return passes.kernels(LAYERS[request.param], H200)


@needs_nvrtc
def test_kernels_compile_to_what_the_librarys_do(found: tuple[Kernel, ...]) -> None:
    """Registers, but for some of integers, and local memory of each; all kernels of the file in one program."""
    wanted = [entry for k in found for entry in k.entries]
    text = f"// entries: {'; '.join(wanted)}\n{text_of(found)}"
    needs = sorted(each[:2] for each in ptxas.needs(text, "90a").values())
    alone = []
    for k in found:
        of_source = ptxas.needs(k.unit.source, "90a")
        mine = {entry.partition("<")[0] for entry in k.compiled}
        alone += [of_source[entry][:2] for entry in k.unit.entries if entry in mine]
    assert len(needs) == len(alone)
    for (registers, local), (others, other_local) in zip(needs, sorted(alone)):  # integers are folded ahead of ptxas
        assert local == other_local and registers <= 1.15 * others + 4, (needs, sorted(alone))


@needs_nvrtc
def test_everything_that_is_defined_is_used(found: tuple[Kernel, ...]) -> None:
    templates = templates_of(found)
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
        for name in jit.files_of(k.unit.source):
            device._add(name, files)
    return list(files)


SAMPLE = """\
// Of all.
typedef int i;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define NEW 1
#else
#define NEW 0
#endif

// One.
__device__ __forceinline__ i one(i n) { return n * clock(); }

// Nothing is left of this.
__device__ __forceinline__ i never(i n) { return n; }

// Two.
__device__ __forceinline__ i two(i n) {
  static_assert(NEW, "a new one");
  return one(n);
}
#define THREE(x) \\
  two(x)
__device__ __forceinline__ constexpr i four() { return 4; }
template <class C> struct Five {
using K = C;
static constexpr i LEFT = 1, RIGHT = four();
static __device__ __forceinline__ void put_once(i* x) { *x = clock(); }
static __device__ __forceinline__ void put(i* x, bool given) {
  if constexpr (C::a == 1) {
    i n = 5;
    *x = one(n);
  } else if constexpr (C::a == 2) *x = THREE(6);
  else *x = clock();
  if (C::a == 1 && given) *x = 7;
#pragma unroll
  for (int o = 0; o < C::a; o++) put_once(x + o);
  if (given) x[1] = RIGHT;
}
};
template <class C>
__global__ void __launch_bounds__(Five<C>::LEFT) six(i* x, bool given) { Five<C>::put(x, given); }
"""


@needs_nvrtc
@pytest.mark.parametrize(
    ("values", "there", "gone"),
    [
        (
            (1,),
            ("  i n = 5;\n  *x = one(n);\n  if (given) *x = 7;", "Of all.", "  put_once(x);"),
            r"two|THREE|if constexpr|else|for \(|never",
        ),
        ((2,), ("  *x = THREE(6);\n", "#define THREE(x)", "return one(n)"), r"n = 5|x = clock\(\);\n  if|else|x = 7"),
        ((3,), ("  *x = clock();\n",), r"\bone\(|two|THREE|if constexpr"),
        ((1, 3), ("if constexpr (C::a == 1) {\n    i n = 5;", "else *x = clock();", "o < C::a"), r"THREE|two\("),
        ((2, 3), ("  if constexpr (C::a == 2) *x = THREE(6);\n  else *x = clock();",), r"n = 5"),
    ],
)
def test_what_no_kernel_needs_goes(values: tuple[int, ...], there: tuple[str, ...], gone: str) -> None:
    structs = "".join(f"struct C{v} {{ static constexpr int a = {v}; }};\n" for v in values)
    entries = [f"six<C{v}>" for v in values]

    def instructions(text: str) -> Counter[str]:
        return device._instructions(nvrtc.build(f"{structs}\n{text}", "90a", "sample", entries, ptx=True).ptx)

    prepared = device._conditions(SAMPLE, 90)
    _, found = fold.folded([("", []), (prepared, [{"a": v} for v in values])], {"six"})
    assert all(one in found for one in there) and not re.search(gone, found), found
    assert "static_assert" not in found and "#if" not in found and "// Nothing is left of this." not in found
    assert instructions(found) == instructions(SAMPLE)


@needs_nvrtc
@pytest.mark.parametrize("last", (syntax.EVERYTHING, syntax.NO_VALUES))
def test_less_is_folded_where_text_does_not_compile(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, where it never does. ``last``: of the levels whose text is broken."""
    found = passes.kernels(LAYERS["few"], H200, forward_only=True)
    whole, levels_seen = fold.folded, list[int]()

    def folded(parts: Any, wanted: set[str], levels: list[int]) -> list[str]:
        levels_seen.append(max(levels))
        return [f"{one}{'broken' * (max(levels) <= last)}\n" for one in whole(parts, wanted, levels)]

    monkeypatch.setattr(fold, "folded", folded)
    text = "\n".join(device._folded(found, H200.arch))
    assert "broken" not in text and levels_seen == list(range(min(last + 1, syntax.NO_VALUES) + 1))
    assert all(device._compiled(k, text, H200.arch) for k in found)
    assert ("#if" in text) == (last == syntax.NO_VALUES)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("C::b ? C::n + 1 : v", "C::n + 1"),  # sizes keep their names
        ("C::one * v + C::zero", "v"),
        ("(v + C::zero) / C::one", "v"),
        ("C::b && v > 2", "v > 2"),
        ("v > 2 || C::n == 4", "true"),
        ("v % C::one", "0"),
        ("-7 / C::n + v", "-7 / C::n + v"),
        ("C::many[C::one] == 5 ? v : 0", "v"),
        ("C::differs == 1 ? v : 0", "C::differs == 1 ? v : 0"),
    ],
)
def test_expressions_are_folded(text: str, wanted: str) -> None:
    structs = [{"b": 1, "n": 4, "one": 1, "zero": 0, "many": [3, 5], "differs": d} for d in (1, 2)]
    source = f"template <class C>\n__global__ void f(int* x, int v) {{ *x = {text}; }}\n"
    _, found = fold.folded([("", []), (source, structs)], {"f"})
    assert found == source.replace(text, wanted)


def test_specialisations_that_no_struct_takes_go() -> None:
    source = """\
enum Way { FAR, NEAR };

template <class C, int = C::way>
struct Of;
template <class C>
struct Of<C, FAR> {
static __device__ int get() { return C::n; }
};
template <class C>
struct Of<C, NEAR> {
static __device__ int get() { return clock(); }
};
template <class C>
__global__ void f(int* x) { *x = Of<C>::get() + clock64(); }
"""
    for way, other in (("C::n", "clock()"), ("clock()", "C::n")):
        _, found = fold.folded([("", []), (source, [{"way": int(way == "clock()"), "n": 7}])], {"f"})
        assert other not in found and "enum" not in found and "Of<C, " not in found, found
    _, both = fold.folded([("", []), (source, [{"way": 0, "n": 7}, {"way": 1, "n": 7}])], {"f"})
    assert both == source


def test_the_sample_has_every_kind_of_kernel() -> None:
    kinds: dict[str, set[Any]] = {}
    for name, p in LAYERS.items():
        found = kinds[name] = set[Any]()
        for k in passes.kernels(p, H200):
            found |= {*k.unit.entries, *jit.files_of(k.unit.source)}
            found |= {(k.unit.entries, flag, value) for kind, flag, value in device._members(k) if kind == "bool"}
    sampled = set().union(*(kinds[name] for name in SAMPLED))
    assert sampled >= set().union(*kinds.values()) and sampled >= {"gather", "wgrad_wgmma", "direct", "direct_reduce"}


@needs_nvrtc
def test_comments_are_on_kernels_of_the_files_own_flags() -> None:
    """And those for the library alone are in no file; a flag's comment loses its mark."""
    found = passes.kernels(LAYERS["strided"], H200)
    text = templates_of(found)
    flags = {name: value == "true" for k in found for kind, name, value in device._members(k) if kind == "bool"}
    assert not re.search(r"// \[[\w. ]+\] ", text)
    source = "".join(path.read_text() for path in sorted(jit.KERNELS.glob("*.cu*")))
    marked = re.findall(r"// \[([\w. ]+)\] (.{20})", source)
    assert {"library", "channels_last", "16 bits"} <= {name for name, _ in marked}
    assert all(words not in text for name, words in marked if name == "library" or flags.get(name) is False)
