"""A layer's fast kernels without PyTorch: a ``.cu``, a C header, and a table of launches in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from upconv.cuda.gpu import Gpu
from upconv.cuda.launches import Int, Long, Map, Pointer, Scratch
from upconv.export import cpp, device, passes, sizes
from upconv.export.passes import Kernel
from upconv.problem import Problem

_TENSORS = {"fwd": ("x", "weight", "bias"), "grad-input": ("grad", "weight"), "grad-weight": ("x", "grad")}
_UNIT = 256  # bytes at a multiple of which parts of the workspace begin
_HEADER = """\
/* {layer}: CUDA kernels for sm_{arch} ({dtype}, {precision}).
 *
 * `size`: the {rank} spatial sizes of the input, any; the output has {cout} channels, and along each axis its size is
 * (n - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1. Tensors are on the current device,
 * {layout}, and begin at 16 bytes{rows}. `workspace`: device memory, as many bytes as the
 * function of that name says. Calls only queue work on the stream. Errors: cudaErrorInvalidValue for what the kernels
 * do not serve, else CUDA's own. Compile {name}.cu for the GPU that it is written for:
 *
 *   nvcc -std=c++17 -O3 -gencode=arch=compute_{arch},code=sm_{arch} -c {name}.cu
 */
#ifndef {guard}
#define {guard}

#include <cuda_runtime.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {{
#endif

{functions}
#ifdef __cplusplus
}}
#endif
#endif
"""
_SOURCE = """\
#include "{name}.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cuda.h>
{includes}
{device}
namespace {{

using std::max, std::min;

[[maybe_unused]] int ceil(int a, int b) {{ return (a + b - 1) / b; }}
[[maybe_unused]] int isqrt(int n) {{ return static_cast<int>(std::sqrt(double(n))); }}
[[maybe_unused]] int rounded(int a, int b) {{ return static_cast<int>(std::nearbyint(double(a) / b)); }}

[[maybe_unused]] int segments(int walks, int slices, int slots, int processors) {{  // cut so, walks are over soonest
  int best = 1, least = INT_MAX;
  for (int parts = 1; parts <= min(slices, 256); parts++) {{
    const int steps = ceil(walks * parts, processors) * (ceil(slices, parts) + slots - 1);
    if (steps < least) best = parts, least = steps;
  }}
  return best;
}}

[[maybe_unused]] int64_t whole(int64_t bytes) {{ return (bytes + {unit} - 1) / {unit} * {unit}; }}

bool misaligned(const void* p) {{ return p == nullptr || reinterpret_cast<uintptr_t>(p) % 16 != 0; }}

int processors_of_device() {{
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}}

// Depth, height and width of the input and of the output.
struct Sides {{
  int in[3] = {{1, 1, 1}}, out[3];
  explicit Sides(const int* size) {{
    const int kernel[] = {kernel}, stride[] = {stride}, padding[] = {padding};
    const int more[] = {more}, dilation[] = {dilation};
    for (int i = 0; i < 3; i++) {{
      if (i >= {lack}) in[i] = size[i - {lack}];
      out[i] = (in[i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + more[i] + 1;
    }}
  }}
  bool served(int batch) const {{
    int64_t positions = {strides};
    for (int i = 0; i < 3; i++) positions *= in[i] > 0 && out[i] > 0 ? in[i] : 0;
    return batch > 0 && positions > 0 && batch < (1 << 30) && positions < (1 << 30);
  }}
}};

}}  // namespace
{helpers}
{functions}"""


def files(p: Problem, gpu: Gpu, name: str, forward_only: bool = False) -> dict[str, str]:
    """The texts of ``name.cu``, ``name.h`` and ``name.json``. A pass that plain kernels serve alone is not there.

    Errors: ValueError for a name that is no identifier, or where no pass has a fast kernel.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(f"the file's name must be an identifier of C; got {name!r}")
    found = passes.kernels(p, gpu, forward_only, alone=True)
    if not found:
        raise ValueError("the layer must have fast kernels to be exported as C, and has none")
    return {
        ".cu": _source(p, gpu, name, found),
        ".h": _header(p, gpu, name, found),
        ".json": json.dumps(table(p, gpu, name, found), indent=1) + "\n",
    }


def _header(p: Problem, gpu: Gpu, name: str, found: tuple[Kernel, ...]) -> str:
    columns, results = max(n for k in found for n in k.multiples), max(k.result_multiple for k in found)
    return _HEADER.format(
        layer=str(p).split(" on ")[0], arch=gpu.arch, dtype=str(p.dtype).removeprefix("torch."), precision=p.precision,
        cout=p.out_channels, rank=p.rank, layout="contiguous" if p.layout == "nchw" else "channels_last", name=name,
        rows=(f"; rows have a multiple of {columns} columns" if columns > 1 else "")
             + (f", of results of {results}" if results > 1 else ""), guard=f"{name.upper()}_H",
        functions="".join(f"size_t {name}_{k.name}_workspace(int batch, const int* size);\n{_prototype(name, k)};\n\n"
                          for k in found),
    )  # fmt: skip


def _prototype(name: str, k: Kernel) -> str:
    tensors = ", ".join(f"const void* {one}" for one in _TENSORS[k.pass_])
    begin = f"cudaError_t {name}_{k.name}("
    more = "void* out, void* workspace, int batch, const int* size, cudaStream_t stream"
    return f"{begin}{tensors},\n{' ' * len(begin)}{more})"


def _source(p: Problem, gpu: Gpu, name: str, found: tuple[Kernel, ...]) -> str:
    templates = device.templates(found, gpu)
    lack, values = 3 - p.rank, {"kernel": p.kernel, "stride": p.stride, "padding": p.padding, "dilation": p.dilation}
    axes = {
        one: "{" + ", ".join(map(str, (0 if one in ("padding", "more") else 1,) * lack + of)) + "}"
        for one, of in {**values, "more": p.output_padding}.items()
    }
    return _SOURCE.format(
        name=name, unit=_UNIT, lack=lack, strides=" * ".join(map(str, p.stride)), **axes,
        includes="".join(f"#include <{one}>\n" for one in device.includes(found)),
        device=device.spaced(templates, *(device.constants(k, found, templates) for k in found)),
        helpers=cpp.c_helpers(found),
        functions="\n".join(_functions(name, k, gpu) for k in found),
    )  # fmt: skip


def _functions(name: str, k: Kernel, gpu: Gpu) -> str:
    """A pass and the function that says what memory it wants."""
    sides = ("out", "in") if k.pass_ == "grad-input" else ("in", "out")
    begin = ["const Sides sides(size);", "const int processors = processors_of_device();"]
    begin += sizes.c(k, gpu)
    checks = ["!sides.served(batch)", *(f"misaligned({one})" for one in _TENSORS[k.pass_] if one != "bias")]
    checks += [f"{row} % {n}" for row, n in zip(("source_w", "result_w"), k.multiples) if n > 1]
    checks += [f"result_w % {k.result_multiple}"] * (
        k.result_multiple > 1 and f"result_w % {k.result_multiple}" not in checks
    )
    parts = cpp.memory(k)
    total = " + ".join(f"whole({size})" for size in parts.values()) or "0"
    parameters = "int batch, const int* size" if "slices" in total else "int, const int*"
    counts = [one for one in begin if not one.startswith(("const int blocks", "const int sizes"))]
    wanted = [*(counts if "slices" in total else ()), f"return {total};"]
    body = [*begin, f"if ({' || '.join(checks)}) return cudaErrorInvalidValue;", *_memory(parts), *_launches(k)]
    text = (
        f"size_t {name}_{k.name}_workspace({parameters}) {{\n{_indented(wanted)}}}\n\n"
        f"{_prototype(name, k)} {{\n{_indented(body)}}}\n"
    )
    for of, side in zip(("source", "result"), sides):
        for i, axis in enumerate("dhw"):
            text = text.replace(f"{of}_{axis}", f"sides.{side}[{i}]")
    return text


def _memory(parts: dict[str, str]) -> Iterator[str]:
    """The workspace's."""
    at = "static_cast<char*>(workspace)"
    for part, size in parts.items():
        yield f"char* const {part} = {at};"
        at = f"{part} + whole({size})"
    if "zeros" in parts:
        yield f"cudaMemsetAsync(zeros, 0, {parts['zeros']}, stream);"


def _launches(k: Kernel) -> Iterator[str]:
    maps = [one for one in cpp.main_launch(k).arguments if isinstance(one, Map)]
    for i, one in enumerate(maps):
        yield from _map(k, i, one)
    names = iter(range(len(maps)))
    yield from cpp.calls(k, lambda _: f"map_{next(names)}")
    yield "return cudaGetLastError();"


def _indented(lines: list[str]) -> str:
    return "".join(f"  {line}\n" for line in lines)


def _map(k: Kernel, number: int, one: Map) -> Iterator[str]:
    tensor = cpp.mapped(k, one)
    p, side = k.choice.problem, "out" if tensor == "grad" else "in"
    channels = p.out_channels if tensor == "grad" else p.in_channels
    if number == 0:
        yield "CUresult result;"
    counts = ", ".join(f"cuuint64_t({n})" for n in (*(f"sides.{side}[{i}]" for i in (2, 1, 0)), channels, "batch"))
    yield (
        f"const kernels::TensorMap map_{number} = tensor_map(const_cast<void*>({tensor}), {{{counts}}},\n"
        f"      sides.{side}[2], {p.dtype.itemsize}, {cpp.described(k, one)}, result);"
    )
    yield "if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;"


def table(p: Problem, gpu: Gpu, name: str, found: tuple[Kernel, ...]) -> dict[str, Any]:
    """The launches as data, for runtimes that launch kernels themselves: sizes are expressions (`sizes`)."""
    return {
        "layer": p.layer, "arch": f"sm_{gpu.arch}", "dtype": str(p.dtype).removeprefix("torch."),
        "precision": p.precision, "layout": p.layout,
        "functions": [
            {
                "name": f"{name}_{k.name}", "pass": k.pass_, "tensors": [*_TENSORS[k.pass_], "out"],
                "source": "output" if k.pass_ == "grad-input" else "input",
                "sizes": sizes.of(k, gpu).counts,
                "workspace": {part: size.replace("int64_t(slices)", "slices") for part, size in cpp.memory(k).items()},
                "launches": list(_records(k, gpu)),
            }
            for k in found
        ],
    }  # fmt: skip


def _records(k: Kernel, gpu: Gpu) -> Iterator[dict[str, Any]]:
    main = cpp.main_launch(k)
    for entry, launch in zip(k.entries, cpp.launches(k)):
        numbers = iter(sizes.of(k, gpu).numbers)
        adds = launch is not main and any(
            isinstance(getattr(one, "operand", None), Scratch) for one in launch.arguments
        )
        arguments: list[Any] = []
        for one in launch.arguments:
            if isinstance(one, Map):
                arguments.append(
                    {"tensor_map": cpp.mapped(k, one), "box": one.box, "steps": one.steps, "swizzle": one.span}
                )
            elif isinstance(one, Pointer):
                arguments.append({"pointer": cpp.pointer(k, one)})
            elif isinstance(one, Int | Long):
                arguments.append(
                    next(numbers) if launch == main else "slices" if adds and isinstance(one, Int) else one.value
                )
        yield {
            "kernel": entry, "grid": "blocks" if launch == main else launch.grid, "threads": launch.threads,
            "shared_bytes": launch.shared_bytes, "arguments": arguments,
        }  # fmt: skip
