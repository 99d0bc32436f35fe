"""Specialised sources: the same machine code, one kernel's text, nothing of the branches and names it does not need."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from conftest import by_turns
from upconv.bench import suites
from upconv.cuda import families, gpu
from upconv.cuda.compile import jit
from upconv.cuda.direct import direct, direct_grad, staged
from upconv.cuda.gemm import gather, joined
from upconv.cuda.wgrad import wgrad
from upconv.export.specialise import WIDTH, Specialised, specialise
from upconv.problem import Problem

needs_nvrtc = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))
CASES = {case.name: case.problem for case in suites.SUITES["cuda"]}


def kb(name: str, pass_: str = "fwd", **changes: object) -> Problem:
    p = CASES[name].with_(pass_=pass_, precision="ieee" if CASES[name].rank == 3 else "tf32")
    return p.with_(**changes)  # type: ignore[arg-type]


# Of every family and kernel file: a resident and a streamed gather, strides, IEEE, 16 bits, channels-last, weights by
# loads of several taps, both grad-weights, the direct kernels, staged gradients whose lanes are columns or channels.
SAMPLE: dict[str, tuple[Problem, object]] = {
    "gather": (kb("kb57"), gather),
    "gather strided": (kb("kb79"), gather),
    "gather grad-input": (kb("kb71", "grad-input"), gather),
    "gather ieee": (kb("kb73"), gather),
    "gather phases": (CASES["dcganO"].with_(precision="tf32"), gather),
    "gather phases channels_last bf16": (
        CASES["fsrcnn"].with_(dtype=torch.bfloat16, precision="bf16", layout="channels_last"), gather
    ),
    "gather channels_last bf16": (
        CASES["kb65"].with_(dtype=torch.bfloat16, precision="bf16", layout="channels_last"), gather
    ),
    "gather of 16 taps": (Problem.make(2, 64, 48, (16, 32), 4, 1, 1, precision="tf32"), gather),
    "gather of 16 taps grad-input bf16": (
        Problem.make(
            2, 64, 48, (16, 32), 4, 2, 1, bias=False, pass_="grad-input", dtype=torch.bfloat16, precision="bf16"
        ),
        gather,
    ),
    "joined": (kb("kb69"), joined),
    "joined bf16": (CASES["kb61"].with_(dtype=torch.bfloat16, precision="bf16"), joined),
    "wgrad wgmma": (kb("kb57", "grad-weight"), wgrad),
    "wgrad channels_last": (kb("kb69", "grad-weight", layout="channels_last"), wgrad),
    "wgrad mma": (kb("kb75", "grad-weight"), wgrad),
    "direct": (kb("kb72"), direct),
    "direct halves": (CASES["fsrcnn"].with_(dtype=torch.float16, precision="fp16"), direct),
    "direct walk": (CASES["depthw"].with_(precision="tf32"), direct),
    "direct any": (Problem.make(1, 2, 2, (4, 4), 65, 1, 32, dtype=torch.float64), direct),
    "direct grad-input": (kb("kb72", "grad-input"), direct_grad),
    "staged grad-input": (kb("kb72", "grad-input"), staged),
    "staged grad-weight": (CASES["depthw"].with_(pass_="grad-weight", precision="tf32"), staged),
    "staged grad-input channels_last bf16": (
        CASES["depthw"].with_(pass_="grad-input", dtype=torch.bfloat16, precision="bf16", layout="channels_last"),
        staged,
    ),
    "staged grad-weight channels_last bf16": (
        CASES["depthw"].with_(pass_="grad-weight", dtype=torch.bfloat16, precision="bf16", layout="channels_last"),
        staged,
    ),
    "staged image": (CASES["fsrcnn"].with_(pass_="grad-input", precision="tf32"), staged),
    "staged image halves": (
        CASES["fsrcnn"].with_(pass_="grad-weight", dtype=torch.float16, precision="fp16"), staged
    ),
}  # fmt: skip


def unit(name: str) -> tuple[str, tuple[str, ...]]:
    p, family = SAMPLE[name]
    choice = family.choose(p, gpu.H200)  # type: ignore[attr-defined]
    assert not isinstance(choice, str), choice
    found = choice.sources()[0]
    return found.source, found.entries


class Sample(NamedTuple):
    source: str
    entries: tuple[str, ...]
    made: Specialised


@pytest.fixture(scope="module", params=SAMPLE)
def sample(request: pytest.FixtureRequest) -> Sample:
    """One of `SAMPLE`, specialised once: its tests follow each other."""
    source, entries = unit(request.param)
    return Sample(source, entries, specialise(source, "one", entries))


def whole(made: Specialised) -> str:
    return "".join(f"#include <{name}>\n" for name in made.includes) + made.text


def code(text: str) -> str:
    """Without comments and strings."""
    return re.sub(r'//[^\n]*|"(?:\\.|[^"\\])*"', "", text)


def plain(name: str) -> str:
    """An entry's name without namespace and parameters: ``_ZN3one4packEPKf`` is ``pack``."""
    return re.sub(r"^_ZN3one(\d+)(\w+)$", lambda found: found[2][: int(found[1])], name)


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """The instructions of each entry, from the ELF file's sections."""
    (table,), (count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    found = {}
    for header in headers:
        at = headers[names][4] + header[0]
        name = cubin[at : cubin.index(b"\0", at)].decode()
        if name.startswith(".text."):
            found[plain(name.removeprefix(".text."))] = cubin[header[4] : header[4] + header[5]]
    return found


def body(ptx: str, entry: str) -> list[str]:
    """An entry's instructions, names of memory and of other functions made alike."""
    at = re.search(rf"\.entry (?:\w*\d)?{entry}(?:E\w*)?\(", ptx)
    assert at is not None
    text = ptx[at.end() : ptx.index("\n}\n", at.end())]
    text = re.sub(r"[_$%\w]*(?:_ZN?\w+|_param_\d+)[\w$]*|\b(?:TAP|ENTRY|SUB|U_W|ROW|RESIDUE)\w*", "name", text)
    text = re.sub(r"\$L__BB\d+", "$L", text)
    return [line.strip() for line in text.splitlines() if not re.match(r"\s*(//|\.loc|\.file|$)", line)]


@needs_nvrtc
def test_the_machine_code_stays_what_it_was(sample: Sample) -> None:
    source, entries, made = sample
    old, new = jit.cubin(source, "90a"), jit.cubin(whole(made), "90a")
    before, after = jit.inspect(old), {plain(entry): facts for entry, facts in jit.inspect(new).items()}
    assert set(after) == set(entries)
    texts = machine_code(old), machine_code(new)
    for entry in entries:
        assert after[entry] == before[entry], entry
        mine, other = texts[1][entry], texts[0][entry]
        assert len(mine) == len(other), entry
        # Constant arrays that nothing reads are gone, so that others have moved: a byte of each address of theirs.
        # (Kernels of several M-group variants may read them in wider loads then: kb75, kb81, unet4, 128 bytes shorter.)
        assert sum(a != b for a, b in zip(mine, other)) <= 16, entry


@needs_nvrtc
@pytest.mark.parametrize("name", ["gather grad-input", "wgrad mma", "direct walk", "staged grad-weight"])
def test_the_ptx_stays_what_it_was(name: str) -> None:
    source, entries = unit(name)
    made = whole(specialise(source, "one", entries))
    before, after = jit.ptx(source, "90a"), jit.ptx(made, "90a")
    for entry in entries:
        mine, other = body(after, entry), body(before, entry)
        opcodes = [[line.split()[0] for line in lines if line and line[0] != "."] for lines in (mine, other)]
        assert opcodes[0] == opcodes[1], entry


def test_no_branch_and_nothing_unused_is_left(sample: Sample) -> None:
    made = sample.made
    assert made.text.startswith("namespace one {\n") and made.text.count("}  // namespace one") == 1
    text = code(made.text)
    assert not re.findall(r"^[ \t]*#[ \t]*(?!define|undef|pragma unroll)\w+", text, re.MULTILINE)
    assert 'extern "C"' not in made.text and "__CUDA_ARCH__" not in text
    assert set(re.findall(r"#define (\w+)", text)) == set(re.findall(r"#undef (\w+)", text))
    words = re.findall(r"\w+", re.sub(r"#undef \w+", "", text))
    kinds = r"constexpr \w+|struct(?: alignas\(.*?\))?|#define|__constant__ const \w+"
    declared = re.findall(rf"^(?:{kinds}) (\w+)", text, re.MULTILINE)
    declared += re.findall(r"^(?:template <[^>]*>\n?\s*)?__device__ [\w &*]*?(\w+)\(", text, re.MULTILINE)
    assert len(declared) > 10
    for found in declared:
        assert words.count(found) > 1, f"{found} is declared and not used"
    for macro in ("CHANNELS_LAST", "PRECISION", "WGMMA", "SHARED_BYTES_PLANNED", "DTYPE", "QUADS"):
        assert macro not in words, macro


def test_a_specialised_source_is_its_own_specialisation(sample: Sample) -> None:
    assert specialise(whole(sample.made), "one", sample.entries) == sample.made


def test_the_text_is_tidy(sample: Sample) -> None:
    text = sample.made.text
    assert "\n\n\n" not in text and not re.search(r"[ \t]\n", text) and "\n\n}" not in text and "{\n\n  " not in text
    assert not re.search(r"NVRTC|\.py\b|NOTES|planner", text)
    long = [line for line in text.splitlines() if len(line) > WIDTH + 12 and '"' not in line]
    assert not long, long
    assert text.count("{") == text.count("}")


def test_only_the_entries_that_are_asked_for_are_left() -> None:
    source, _ = unit("gather")
    made = specialise(source, "one", ("pack",))
    assert "wgmma" not in made.text and "gather(" not in code(made.text)
    assert "void __launch_bounds__(PACK_THREADS) pack(" in made.text
    assert len(made.text.splitlines()) < 165


@needs_nvrtc
def test_units_share_a_file() -> None:
    units = [unit(name) for name in ("gather grad-input", "wgrad mma", "direct walk")]
    made = [specialise(source, f"part{i}", entries) for i, (source, entries) in enumerate(units)]
    text = "".join(f"#include <{name}>\n" for name in dict.fromkeys(n for m in made for n in m.includes))
    found = jit.inspect(jit.cubin(text + "\n".join(m.text for m in made), "90a"))
    assert len(found) == 6 and sum("part1" in name for name in found) == 2


# --- the language ----------------------------------------------------------------------------------------------------

KERNEL = 'extern "C" __global__ void run(int* x) {{\n{body}}}\n'


def lines(source: str, entries: tuple[str, ...] = ("run",)) -> list[str]:
    text = specialise(source, "one", entries).text.strip()
    return text.removeprefix("namespace one {\n\n").removesuffix("}  // namespace one").rstrip().splitlines()


def test_constants_keep_their_comments_and_dead_branches_go_with_theirs() -> None:
    source = (
        "#define WIDE 1\n#define STEP 4  // columns\n#define SPAN (STEP * 2)\n#define UNUSED 3\n#define NAME float\n"
        + KERNEL.format(
            body="#if WIDE\n  // the wide way\n  x[0] = SPAN;\n#else\n  // the narrow way\n  x[0] = 0;\n#endif\n"
            "  NAME y = x[1];\n  x[1] = (int)y;\n"
        )
    )
    assert lines(source) == [
        "constexpr int STEP = 4;  // columns",
        "constexpr int SPAN = STEP * 2;",
        "__global__ void run(int* x) {",
        "  // the wide way",
        "  x[0] = SPAN;",
        "  float y = x[1];",
        "  x[1] = (int)y;",
        "}",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  if (A == 1) x[0] = 1;\n  else x[0] = 2;\n", ["  x[0] = 1;"]),
        (
            "  if (A == 2) {\n    x[0] = 1;\n  } else {\n    x[0] = 2;\n    x[1] = 3;\n  }\n",
            ["  x[0] = 2;", "  x[1] = 3;"],
        ),
        ("  // gone with its statement\n  if (!A) x[0] = 1;\n  x[1] = 2;\n", ["  x[1] = 2;"]),
        ("  if (x[0] && A) x[1] = 2;\n", ["  if (x[0]) x[1] = 2;"]),
        ("  if (A || x[0] > 2) x[1] = 2;\n", ["  x[1] = 2;"]),
        ("  if (x[0] || !A) x[1] = 2;\n", ["  if (x[0]) x[1] = 2;"]),
        ("  x[0] = A ? x[1] : x[2];\n", ["  x[0] = x[1];"]),
        ("  x[0] = 3 * (A > 1 ? x[1] : x[2] + 1);\n", ["  x[0] = 3 * (x[2] + 1);"]),
        ("  x[0] = x[1] + (A ? 0 : x[2]);\n", ["  x[0] = x[1];"]),
        ("  x[0] = x[1] ? A ? 1 : 2 : 3;\n", ["  x[0] = x[1] ? 1 : 3;"]),
        ("  if (A) return;\n  x[0] = 1;\n", ["  return;"]),
        ("  for (int i = A; i < 1; i++) x[i] = 0;\n  x[0] = 1;\n", ["  x[0] = 1;"]),
        ("  if (A) {\n    int y = 1;\n    x[0] = y;\n  }\n  int y = 2;\n  x[1] = y;\n",
         ["  {", "    int y = 1;", "    x[0] = y;", "  }", "  int y = 2;", "  x[1] = y;"]),
        ("  int y = A ? 1 : x[0], z = 2;\n  x[0] = z;\n", ["  int z = 2;", "  x[0] = z;"]),
        ("  if (x[0] < A) x[0] = 1;\n  else if (A) x[0] = 2;\n  else x[0] = 3;\n",
         ["  if (x[0] < A) x[0] = 1;", "  else x[0] = 2;"]),
        (
            "  for (int i = 0; i < 4; i++)\n    if (!A) x[i] = 0;\n  x[0] = A;\n",
            ["  for (int i = 0; i < 4; i++)", "    {}", "  x[0] = A;"],
        ),
    ],
)  # fmt: skip
def test_known_conditions_are_decided(before: str, after: list[str]) -> None:
    found = [
        line for line in lines("#define A 1\n" + KERNEL.format(body=before)) if not line.startswith("constexpr int A")
    ]
    assert found == ["__global__ void run(int* x) {", *after, "}"]


def test_loops_keep_their_unrolling_when_a_block_loses_its_braces() -> None:
    body_ = (
        "  for (int n = 0; n < 2; n++) {\n    if constexpr (A == 1) {\n#pragma unroll\n"
        "      for (int i = 0; i < 4; i++) {\n        x[i] = n;\n      }\n    } else {\n      x[n] = 0;\n    }\n  }\n"
    )
    assert lines("#define A 1\n" + KERNEL.format(body=body_)) == [
        "__global__ void run(int* x) {",
        "  for (int n = 0; n < 2; n++) {",
        "#pragma unroll",
        "    for (int i = 0; i < 4; i++) {",
        "      x[i] = n;",
        "    }",
        "  }",
        "}",
    ]


def test_macros_of_constants_become_constants() -> None:
    source = (
        "#define CHANNELS 6\nconstexpr int VEC = 16 / (int)sizeof(float);\n"
        "#define PADDED ((CHANNELS + VEC - 1) / VEC)\n" + KERNEL.format(body="  x[0] = PADDED;\n")
    )
    assert lines(source)[:3] == [
        "constexpr int CHANNELS = 6;",
        "constexpr int VEC = 4;",
        "constexpr int PADDED = (CHANNELS + VEC - 1) / VEC;",
    ]


def test_long_lines_break_behind_heads_and_parameters_are_filled() -> None:
    name, sum_ = "a" * 30, " + ".join(["x[123456789]"] * 6)
    source = (
        'extern "C" __global__ void\nrun('
        + ", ".join(f"int {name}{i}" for i in range(4))
        + f",\n    int* x) {{\n  if ({name}0 < {name}1) x[0] = {sum_};\n}}\n"
    )
    assert lines(source) == [
        "__global__ void",
        f"run(int {name}0, int {name}1, int {name}2,",
        f"    int {name}3, int* x) {{",
        f"  if ({name}0 < {name}1)",
        f"    x[0] = {sum_};",
        "}",
    ]


def test_the_head_of_a_file_comes_first_unless_it_speaks_of_others() -> None:
    rest = "\n#define A 1\n\n// the rest\n\n" + KERNEL.format(body="  x[0] = A;\n")
    text = lines("#define B 1\n// what it does\n" + rest.replace("= A", "= A + B"))
    assert text[:3] == ["// what it does", "", "constexpr int B = 1;"] and "// the rest" in text
    assert "// see planner.py" not in lines("#define B 1\n// see planner.py\n" + rest.replace("= A", "= A + B"))


def test_what_is_not_known_stays() -> None:
    body_ = "  int n = x[0];\n  if (n > 1) x[1] = n ? n : -n;\n  x[2] = (n && x[1]) || x[3];\n"
    assert "\n".join(lines(KERNEL.format(body=body_))[1:-1]) + "\n" == body_


def test_a_name_that_a_template_has_too_is_no_constant() -> None:
    source = (
        "constexpr int N = 1;\ntemplate <int N> __device__ int f() {\n  return N == 1 ? 2 : 3;\n}\n"
        + KERNEL.format(body="  x[N] = f<2>();\n")
    )
    assert "  return N == 1 ? 2 : 3;" in lines(source)


@pytest.mark.parametrize(
    "second",
    [
        "const int M = n, N = M;",
        "constexpr int M = sizeof(V), N = 4 * M;",
        "unsigned int N = n;",
        "long long *p = 0, N = n;",
        "V N = n;",
        "for (int i = 0, N = n; i < N; i++)",
        "auto f = [&](V N) { return N == 8 ? 1 : 2; };",
    ],
)
def test_a_name_with_another_declaration_elsewhere_is_no_constant(second: str) -> None:
    source = (
        "template <class V> __device__ int f(V n) {\n  constexpr int N = 8;\n  return n % N;\n}\n"
        f"template <class V> __device__ int g(V n) {{\n  {second}\n  return N == 8 ? 2 : 3;\n}}\n"
        + KERNEL.format(body="  x[0] = f(x[1]) + g(x[2]);\n")
    )
    assert "  return N == 8 ? 2 : 3;" in lines(source)


def test_a_constant_that_products_and_arguments_name_stays_one() -> None:
    source = "constexpr int N = 8, M = 2;\n" + KERNEL.format(
        body="  int n = x[N * M], m = min(n, N), k = n * N;\n  return x[0] = N == 8 && M == 2 ? m : k;\n"
    )
    assert "  return x[0] = m;" in lines(source)


def test_functions_and_macros_that_nothing_reaches_go() -> None:
    source = (
        "#define TWICE(v) ((v) * 2)\n#define THRICE(v) ((v) * 3)\n\n"
        "// used\n__device__ int used(int v) { return TWICE(v); }\n"
        "// only by what is unused\n__device__ int far(int v) { return THRICE(v); }\n"
        "template <int N>\nstruct alignas(N * 4) Lost { int v[N]; };\nstruct alignas(8) Kept { int v; };\n"
        "__device__ int unused(int v) { return far(v); }\n\n// a heading\n\nstruct Gone { int v; };\n\n// another\n\n"
        + KERNEL.format(body="  Kept k = {used(x[1])};\n  x[0] = k.v;\n")
    )
    text = "\n".join(lines(source))
    assert "TWICE" in text and "// used" in text and "#undef TWICE" in text
    assert not re.search(r"THRICE|far|unused|Gone|Lost|heading", text) and "// another" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((KERNEL.format(body=""), "a b", ("run",)), "namespace must be an identifier"),
        ((KERNEL.format(body=""), "one", ("walk",)), "it has no 'walk'"),
        (("#if UNDEFINED\n#else\n#error \"no\"\n#endif\n", "one", ()), "stops with #error"),
        (("#if f(1)\n#endif\n", "one", ()), "does not decide #if"),
        (("#define A 1\n#undef A\n#define A 2\n", "one", ()), "defines A twice"),
        (("void f() {\n", "one", ()), "close its brackets"),
        (("}\n", "one", ()), "too many"),
    ],
)  # fmt: skip
def test_bad_sources_are_named(arguments: tuple[str, str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        specialise(*arguments)


def test_the_architecture_decides_as_it_would_for_the_compiler() -> None:
    source = KERNEL.format(
        body="#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900\n  x[0] = 9;\n#else\n  x[0] = 8;\n#endif\n"
    )
    assert "  x[0] = 9;" in specialise(source, "one", ("run",)).text
    assert "  x[0] = 8;" in specialise(source, "one", ("run",), "86").text
    with pytest.raises(ValueError, match="arch must begin"):
        specialise(source, "one", ("run",), "sm_90")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("name", ["wgrad wgmma", "direct walk"])
def test_nvcc_compiles_it_without_a_word(name: str, tmp_path: Path) -> None:
    source, entries = unit(name)
    path = tmp_path / "unit.cu"
    path.write_text(whole(specialise(source, "one", entries)))
    done = subprocess.run(
        ["nvcc", "-arch=sm_90a", "-cubin", "-o", str(tmp_path / "unit.cubin"), str(path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr


@pytest.mark.parametrize("case", by_turns(suites.SUITES["kernelbench"], 2), ids=lambda case: case.name)
def test_the_planner_s_kernels_of_kernelbench_are_specialised(case: suites.Case) -> None:
    passes = ("fwd", "grad-input", "grad-weight")
    p = kb(case.name, passes[int(case.name[2:]) % 3])
    found = [c for c in families.choose(p, gpu.H200).values() if not isinstance(c, str)]
    for one in min(found, key=lambda c: c.seconds).sources():
        made = specialise(one.source, "one", one.entries)  # type: ignore[attr-defined]
        assert len(made.text.splitlines()) < 0.75 * len(one.source.splitlines())
        assert "#if" not in made.text
