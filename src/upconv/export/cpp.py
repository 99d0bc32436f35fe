"""An exported file's host code in C++: for each pass a function that launches its kernels, printed from their records.

What depends on the size of a call is Python's: the blocks and the sizes that kernels are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from textwrap import dedent
from typing import Literal

import torch

from upconv.cuda.compile import boxes
from upconv.cuda.compile.boxes import Tensor5
from upconv.cuda.gemm import gather
from upconv.cuda.launches import THREADS, Given, Int, Launch, Long, Map, Pointer, Scratch, Zeros
from upconv.cuda.wgrad import wgrad
from upconv.export import passes
from upconv.export.passes import Kernel
from upconv.problem import triple

LAUNCH = dedent(
    """\
    // Memory, as whatever pointer a kernel takes.
    struct Memory {
      void* at;
      template <typename T>
      operator T*() const { return static_cast<T*>(at); }
    };
    @OF@

    // Lets a kernel have so many bytes of shared memory, more than the 48 KB of the default.
    template <typename... Parameters>
    int shared(void (*kernel)(Parameters...), int bytes) {
      @SET@;
      return bytes;
    }
    """
)
_OF = dedent(
    """\
    Memory of(const at::Tensor& t) { return {t.data_ptr()}; }
    Memory of(const std::optional<at::Tensor>& t) { return {t ? t->data_ptr() : nullptr}; }"""
)
_SET = "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)"

DEFAULT_SHARED = 48 << 10
_ADDED = 32 * 4  # bytes of sums that a block adds

TENSOR_MAP = dedent(
    """\
    // --- tensor maps: what the tensor copy engine must know of a tensor ----------------------------------------------

    // Columns, rows, slices, channels and images of a tensor.
    using Counts = std::array<cuuint64_t, 5>;

    // A map over a tensor, dense but for rows that begin `row` columns apart, and the box that a copy brings: `box`
    // elements traversed by `steps` along each axis, innermost first; zeros where the tensor has none. `second`: both
    // have the channels behind the columns. The driver's function is found at run time: nothing links libcuda.
    kernels::TensorMap tensor_map(void* memory, Counts counts, int64_t row, int element, bool channels_last,
                                  bool second, CUtensorMapDataType type, const std::array<cuuint32_t, 5>& box,
                                  const std::array<cuuint32_t, 5>& steps, CUtensorMapSwizzle swizzle,
                                  CUresult& result) {
      void* encode = nullptr;
      cudaDriverEntryPointQueryResult status;
      int device;  // gives a thread that has called nothing yet its context; cudaFree would end a graph's capture
      if (cudaGetDevice(&device) == cudaSuccess) cudaSetDevice(device);
    #if CUDART_VERSION >= 12050
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &status);
    #else
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &status);
    #endif
      if (channels_last) std::rotate(counts.begin(), counts.begin() + 3, counts.begin() + 4);
      std::array<cuuint64_t, 4> pitches;  // bytes from an element to the next along all axes but the innermost
      cuuint64_t pitch = element;
      for (int i = 0; i < 4; i++) pitches[i] = pitch *= i == 0 && !channels_last ? row : counts[i];
      if (second) {
        std::rotate(counts.begin() + 1, counts.begin() + 3, counts.begin() + 4);
        std::rotate(pitches.begin(), pitches.begin() + 2, pitches.begin() + 3);
      }
      kernels::TensorMap map = {};
      result = CUDA_ERROR_NOT_SUPPORTED;
      if (encode != nullptr)
        result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
            reinterpret_cast<CUtensorMap*>(&map), type, 5, memory, counts.data(), pitches.data(), box.data(),
            steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
      return map;
    }
    """
)
_OF_TENSOR = dedent(
    """\

    template <typename... Given>
    kernels::TensorMap tensor_map(const at::Tensor& t, Given... given) {
      Counts counts = {1, 1, 1, static_cast<cuuint64_t>(t.size(1)), static_cast<cuuint64_t>(t.size(0))};
      for (int i = 0; i < t.dim() - 2; i++) counts[i] = t.size(t.dim() - 1 - i);
      CUresult result;
      const auto map = tensor_map(t.data_ptr(), counts, t.stride(t.dim() - 2), t.element_size(), given..., result);
      TORCH_CHECK(result == CUDA_SUCCESS, "the driver must be 12.0 or newer; for a tensor map it said ", int(result));
      return map;
    }
    """
)

COPY_KERNEL = """\
// Copies rows of so many columns to longer ones of so many 16-byte units, padded with zeros. A thread stores a unit.
__global__ void pad_rows(const @BITS@* __restrict__ from, uint4* __restrict__ to, u32 columns, u32 units, u32 total) {
  const u32 i = blockIdx.x * 256 + threadIdx.x, row = i / units, column = i % units * @EACH@;
  if (i >= total) return;
  union { @BITS@ values[@EACH@]; uint4 all; } unit = {};
  for (u32 k = 0; k < @EACH@; k++) if (column + k < columns) unit.values[k] = from[(u64)row * columns + column + k];
  to[i] = unit.all;
}
"""
"""A file has it since PyTorch's copy of such rows is slower (docs/experiments.md)."""
_COPY = """\
void pad_rows(const at::Tensor& from, const at::Tensor& to) {
  const c10::cuda::CUDAGuard guard(from.device());
  const unsigned columns = from.size(-1), units = to.stride(-2) / @EACH@, total = from.numel() / columns * units;
  kernels::pad_rows<<<(total + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      of(from), of(to), columns, units, total);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
"""

INCLUDES = """\
#include <algorithm>
#include <array>
#include <optional>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
"""


def helpers(found: Sequence[Kernel]) -> str:
    """What the fast kernels' launches share."""
    text = LAUNCH.replace("@OF@", _OF).replace("@SET@", f"C10_CUDA_CHECK({_SET})")
    return f"namespace {{\n\n{text}{_maps(found, TENSOR_MAP + _OF_TENSOR)}\n}}  // namespace\n"


def c_helpers(found: Sequence[Kernel]) -> str:
    """The same without PyTorch."""
    text = LAUNCH.replace("@OF@", "Memory of(const void* p) { return {const_cast<void*>(p)}; }").replace("@SET@", _SET)
    return f"namespace {{\n\n{text}{_maps(found, TENSOR_MAP)}\n}}  // namespace\n"


def copies(found: Sequence[Kernel]) -> tuple[str, str]:
    """The kernel that copies rows to where they begin at 16 bytes, and its launch; empty where no kernel needs such."""
    each = max(n for k in found for n in k.multiples) if found else 1
    if each == 1:
        return "", ""
    bits = {4: "u32", 2: "u16"}[16 // each]
    kernel, launch = (text.replace("@BITS@", bits).replace("@EACH@", str(each)) for text in (COPY_KERNEL, _COPY))
    return kernel, launch


def _maps(found: Sequence[Kernel], text: str) -> str:
    every = (one for k in found for launch in launches(k) for one in launch.arguments)
    return f"\n{text}" if any(isinstance(one, Map) for one in every) else ""


def launches(k: Kernel) -> tuple[Launch, ...]:
    """The records of a pass: what packs the weights, if anything does, then what computes, and what adds sums."""
    c = k.choice
    if isinstance(c, wgrad.Choice):
        t, slices = c.tiling, c.splits * c.tiling.k_slices
        records = t.tiles * t.sums_bytes
        added = Pointer(Scratch("sums", slices * records)), Pointer("result"), Int(slices)
        adds = Launch(k.unit, passes.ADDS, -(-records // _ADDED), THREADS, 0, added)
        return c._two_steps(k.unit, Given("contiguous"))[0], adds
    bias: Literal["given", "none"] = "given" if k.pass_ == "fwd" else "none"
    if not k.packed_words:
        return c.launches(Given("contiguous" if k.pass_ == "grad-weight" else "in place", bias=bias))
    given = Given("packed", bias=bias, lasting=True)
    packs = c.pack(Given("contiguous"))
    assert packs is not None
    return (packs, *c.launches(given))


def main_launch(k: Kernel) -> Launch:
    """The record of what computes, which alone depends on the size of a call."""
    return launches(k)[1 if k.packed_words else 0]


def zeros(launch: Launch) -> int:
    """Words of zeros by which blocks claim tiles; 0 where tiles are dealt out."""
    operands = (one.operand for one in launch.arguments if isinstance(one, Pointer))
    return sum(one.words for one in operands if isinstance(one, Zeros))


def sizes(launch: Launch) -> tuple[int, ...]:
    """The integers that a kernel is given."""
    return tuple(one.value for one in launch.arguments if isinstance(one, Int | Long))


def prototype(k: Kernel) -> str:
    """The declaration of a pass."""
    array = f"const std::array<int, {len(sizes(main_launch(k)))}>& sizes"
    if k.pass_ == "grad-weight":
        tensors = (
            "const at::Tensor& x",
            "const at::Tensor& grad",
            "const at::Tensor& out",
        )
        counts = "int blocks, int slices"
    else:
        bias = ("const std::optional<at::Tensor>& bias",) if k.pass_ == "fwd" else ()
        tensors = (f"const at::Tensor& {_source(k)}", "const at::Tensor& weight", *bias, "const at::Tensor& out")
        counts = "int blocks"
    begin = f"void {k.name}("
    return f"{begin}{', '.join(tensors)},\n{' ' * len(begin)}{counts}, {array})"


def definition(k: Kernel) -> str:
    """The function of a pass."""
    source = _source(k)
    lines = [f"const c10::cuda::CUDAGuard guard({source}.device());"]
    lines.append("const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();")
    for name, size in memory(k).items():
        options = f"{source}.options().dtype(at::kByte)"
        if name == "zeros":
            many = f"sizes[{len(sizes(main_launch(k))) - 1}] >= {gather.CLAIMED_TILES} * blocks"
            lines.append("std::optional<at::Tensor> zeros;  // counters of tiles that blocks claim; few are dealt out")
            lines.append(f"if ({many}) zeros = at::zeros({{{size}}}, {options});")
        else:
            lines.append(f"const at::Tensor {name} = at::empty({{{size}}}, {options});")
    lines += [*calls(k, lambda one: _map(k, one)), "C10_CUDA_KERNEL_LAUNCH_CHECK();"]
    return prototype(k) + " {\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


def memory(k: Kernel) -> dict[str, str]:
    """Bytes of the memory that a pass' kernels share, by name; expressions of ``slices``."""
    found = {"packed": str(k.choice.packed_bytes(Given()))} if k.packed_words else {}
    main, *adding = launches(k)[1 if k.packed_words else 0 :]
    for last in adding:
        (operand,) = (one.operand for one in last.arguments if isinstance(one, Pointer) and one.operand != "result")
        assert isinstance(operand, Scratch)
        found["sums"] = f"int64_t(slices) * {operand.bytes // sizes(last)[0]}"
    return found | ({"zeros": str(4 * words)} if (words := zeros(main)) else {})


def calls(k: Kernel, tensor_map: Callable[[Map], str]) -> Iterator[str]:
    """The launches of a pass, of ``blocks`` and ``sizes``."""
    entries, records = iter(k.entries), list(launches(k))
    if k.packed_words:
        packs = records.pop(0)
        yield _launch(next(entries), packs, str(packs.grid), _fixed(k, packs))
    main, *adding = records
    yield _launch(next(entries), main, "blocks", _varying(k, main, tensor_map))
    for last in adding:
        slices = ["slices" if isinstance(one, Int) else text for one, text in zip(last.arguments, _fixed(k, last))]
        yield _launch(next(entries), last, str(last.grid), slices)


def _launch(entry: str, launch: Launch, blocks: str, arguments: Iterable[str]) -> str:
    shared = str(launch.shared_bytes)
    if launch.shared_bytes > DEFAULT_SHARED:
        shared = f"shared({entry}, {shared})"
    text = f"{entry}<<<{blocks}, {launch.threads}, {shared}, stream>>>("
    line = text
    for argument in arguments:
        more = "" if line is text else ", "
        if len(line) + len(more) + len(argument.partition("\n")[0]) > 112:
            text, more, line = text + more.rstrip() + "\n      ", "", "      "
        text += more + argument
        line = (line + more + argument).rpartition("\n")[2]
    return f"{text});"


def _source(k: Kernel) -> str:
    return "grad" if k.pass_ == "grad-input" else "x"


def _varying(k: Kernel, launch: Launch, tensor_map: Callable[[Map], str]) -> Iterator[str]:
    """The arguments of what computes: its sizes come as an array, its tensor maps as one struct."""
    number = count(0)
    maps = [tensor_map(one) for one in launch.arguments if isinstance(one, Map)]
    for one in launch.arguments:
        if isinstance(one, Pointer):
            yield _pointer(k, one)
        elif isinstance(one, Int | Long):
            yield f"sizes[{next(number)}]"
    if maps:
        yield "{" + ",\n       ".join(maps) + "}"


def _fixed(k: Kernel, launch: Launch) -> Iterator[str]:
    """The arguments of another kernel, as its record has them."""
    for one in launch.arguments:
        yield _pointer(k, one) if isinstance(one, Pointer) else str(one.value)  # type: ignore[attr-defined]


def _pointer(k: Kernel, one: Pointer) -> str:
    name = pointer(k, one)
    return f"of({name})" if name else "nullptr"


def pointer(k: Kernel, one: Pointer) -> str | None:
    """The name of an argument's memory; None for none."""
    if isinstance(one.operand, Zeros):
        return "zeros"
    if isinstance(one.operand, Scratch):
        return "sums"
    names = {"source": _source(k), "input": "x", "gradient": "grad", "result": "out", "": None}
    return names.get(one.operand, one.operand)


def _map(k: Kernel, one: Map) -> str:
    return f"tensor_map({mapped(k, one)}, {described(k, one)})"


def mapped(k: Kernel, one: Map) -> str:
    """The tensor of a map."""
    return "grad" if one.operand == "gradient" or k.pass_ == "grad-input" else "x"


def described(k: Kernel, one: Map) -> str:
    """What a map is, but for its tensor."""
    p = k.choice.problem
    shape = p.output_shape if mapped(k, one) == "grad" else p.input_shape
    last = p.layout == "channels_last"
    second = not last and (k.pass_ == "grad-weight" or (k.columns > 0 and p.dtype.itemsize == 2))
    whole = dense(shape, p.dtype.itemsize, last, second)
    assert _meant(one.tensor) == _meant(whole), "the file's maps are of whole tensors"
    kind = {torch.float32: "TFLOAT32" if one.rounded else "FLOAT32", torch.bfloat16: "BFLOAT16"}.get(p.dtype, "FLOAT16")
    box, steps = (f"std::array<cuuint32_t, 5>{{{', '.join(map(str, n))}}}" for n in (_box(k, one), one.steps))
    margin = "\n" + " " * 18
    return (
        f"{str(last).lower()}, {str(second).lower()}, CU_TENSOR_MAP_DATA_TYPE_{kind},"
        f"{margin if k.columns else ' '}{box},{margin}{steps}, CU_TENSOR_MAP_SWIZZLE_"
        f"{f'{one.span}B' if one.span else 'NONE'}"
    )


def _box(k: Kernel, one: Map) -> tuple[object, ...]:
    """A map's box; joined rows are as many and as long as the last sizes say."""
    if k.columns == 0:
        return one.box
    last = len(sizes(main_launch(k))) - 1
    rows, columns = f"cuuint32_t(sizes[{last - 1}])", f"cuuint32_t(sizes[{last}])"
    w, h, d, c, n = one.box
    return (w, h, rows, c, n) if one.span else (columns, rows, d, c, n)


def _meant(t: Tensor5) -> tuple[object, ...]:
    """A map's tensor without strides of dimensions of one element, which mean nothing."""
    return t.begin, t.dims, [step for step, n in zip(t.strides, t.dims[1:]) if n > 1]


def dense(shape: Sequence[int], element: int, last: bool, second: bool) -> Tensor5:
    """A whole tensor as ``tensor_map`` of the file has it."""
    batch, channels, *size = shape
    if last:
        return boxes.channels_last(batch, channels, size, element)
    d, h, w = triple(size)
    found = boxes.dense((w, h, d, channels, batch), element)
    return found.channels_second() if second else found
