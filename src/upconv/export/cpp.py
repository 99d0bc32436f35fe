"""An exported file's host code in C++: for each pass a function that launches its kernels, printed from their records.

What depends on the size of a call is Python's: the blocks and the sizes that kernels are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import dedent
from typing import Literal

import torch

from upconv.cuda.compile import boxes
from upconv.cuda.compile.boxes import Tensor5
from upconv.cuda.direct import plain
from upconv.cuda.launches import Given, Int, Launch, Long, Map, Pointer, Scratch, Zeros
from upconv.cuda.wgrad import wgrad
from upconv.export.passes import Kernel

LAUNCH = dedent(
    """\
    // --- launches ----------------------------------------------------------------------------------------------------

    // A value as a kernel's parameter: pointers from void*, integers in range, tensor maps and structs bit by bit.
    template <typename To, typename From>
    To parameter(const From& value) {
      if constexpr (std::is_class_v<To>) {
        static_assert(sizeof(To) == sizeof(From), "a struct is copied bit by bit");
        To to;
        std::memcpy(&to, &value, sizeof(To));
        return to;
      } else if constexpr (std::is_integral_v<To>) {
        const To found = static_cast<To>(value);
        TORCH_CHECK(found == value, "the tensor is too large: a size or the number of its tiles is ", value);
        return found;
      } else {
        return static_cast<To>(value);
      }
    }

    template <typename... Parameters, typename Values, size_t... I>
    void start(void (*kernel)(Parameters...), const cudaLaunchConfig_t& config, const Values& values,
               std::index_sequence<I...>) {
      C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, parameter<Parameters>(std::get<I>(values))...));
    }

    // Launches a kernel on the tensor's device and that device's current stream. The kernel's arguments come as tuples
    // and arrays, which are joined.
    template <auto Kernel, int Threads, int SharedBytes, typename... Arguments>
    void launch(const at::Tensor& on, int64_t blocks, const Arguments&... arguments) {
      TORCH_CHECK(0 < blocks && blocks < (int64_t(1) << 31), "the tensor is too large: it makes ", blocks, " blocks");
      const c10::cuda::CUDAGuard guard(on.device());
      if constexpr (SharedBytes > 48 * 1024) {  // more than the default wants to be asked for, once per device
        static std::array<std::once_flag, 64> asked;
        std::call_once(asked.at(on.get_device()), [] {
          C10_CUDA_CHECK(cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SharedBytes));
        });
      }
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(static_cast<unsigned>(blocks));
      config.blockDim = dim3(Threads);
      config.dynamicSmemBytes = SharedBytes;
      config.stream = c10::cuda::getCurrentCUDAStream(on.get_device()).stream();
      const auto values = std::tuple_cat(arguments...);
      start(Kernel, config, values, std::make_index_sequence<std::tuple_size_v<decltype(values)>>());
    }

    void* address(const std::optional<at::Tensor>& t) { return t ? t->data_ptr() : nullptr; }
    """
)

TENSOR_MAP = dedent(
    """\
    // --- tensor maps: what the tensor copy engine must know of a tensor ----------------------------------------------

    // The driver's function, found at run time so that nothing links libcuda.
    decltype(&cuTensorMapEncodeTiled) encode_tiled() {
      static const auto found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult status;
    #if CUDART_VERSION >= 12050
        C10_CUDA_CHECK(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status));
    #else
        C10_CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &status));
    #endif
        TORCH_CHECK(function != nullptr, "the CUDA driver must be 12.0 or newer: it has no tensor maps");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
      }();
      return found;
    }

    // A map over a dense tensor, and the box that one copy brings: `box` elements traversed by `steps` along each axis,
    // innermost first. `second`: the map has the channels behind the columns, and so has the box.
    CUtensorMap tensor_map(const at::Tensor& t, bool channels_last, bool second, CUtensorMapDataType type,
                           const std::array<cuuint32_t, 5>& box, const std::array<cuuint32_t, 5>& steps,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
      const c10::cuda::CUDAGuard guard(t.device());
      C10_CUDA_CHECK(cudaSetDevice(t.get_device()));  // gives a thread that has called nothing yet its context
      std::array<cuuint64_t, 5> counts;   // columns, rows, slices, channels, images; in channels_last channels first
      std::array<cuuint64_t, 4> pitches;  // bytes from an element to the next along all axes but the innermost
      for (int i = 0; i < 3; i++) counts[i + channels_last] = i < t.dim() - 2 ? t.size(t.dim() - 1 - i) : 1;
      counts[channels_last ? 0 : 3] = t.size(1), counts[4] = t.size(0);
      cuuint64_t pitch = t.element_size();
      for (int i = 0; i < 4; i++) pitches[i] = pitch *= counts[i];
      if (second) {
        std::rotate(counts.begin() + 1, counts.begin() + 3, counts.begin() + 4);
        std::rotate(pitches.begin(), pitches.begin() + 2, pitches.begin() + 3);
      }
      CUtensorMap map;
      const CUresult result =
          encode_tiled()(&map, type, 5, t.data_ptr(), counts.data(), pitches.data(), box.data(), steps.data(),
                         CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
      TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with error ", static_cast<int>(result));
      return map;
    }
    """
)


_PLAIN_LAYER = "const std::array<int64_t, 40>& layer"
_PLAIN = {
    "forward": (
        f"void forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,\n"
        f"             const at::Tensor& y, {_PLAIN_LAYER})"
    ),
    "grad_input": (
        f"void grad_input(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& out,\n"
        f"                {_PLAIN_LAYER})"
    ),
    "grad_weight": (
        f"void grad_weight(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& out,\n"
        f"                 {_PLAIN_LAYER})"
    ),
}
PLAIN_DECLARATIONS = "".join(f"{text};\n" for text in _PLAIN.values()).rstrip()
PLAIN = dedent(
    """\
    namespace {

    template <class F>
    void by_dtype(const at::Tensor& t, const F& run) {
      switch (t.scalar_type()) {
        case at::kFloat: return run(kernels::PlainOf<kernels::IEEE>());
        case at::kHalf: return run(kernels::PlainOf<kernels::FP16>());
        case at::kBFloat16: return run(kernels::PlainOf<kernels::BF16>());
        case at::kDouble: return run(kernels::PlainOf<kernels::FP64>());
        default: TORCH_CHECK(false, "tensors must be floating; got ", t.scalar_type());
      }
    }

    // Blocks for so many results, which take further ones in turn.
    int64_t blocks(int64_t results) { return std::min<int64_t>(results, 1 << 20); }

    }  // namespace

    @forward@ {
      by_dtype(x, [&](auto of) {
        launch<kernels::plain_forward<decltype(of)>, 256, 0>(x, blocks((y.numel() + 255) / 256),
            std::make_tuple(x.data_ptr(), weight.data_ptr(), address(bias), y.data_ptr(), layer));
      });
    }

    @grad_input@ {
      by_dtype(grad, [&](auto of) {
        launch<kernels::plain_grad_input<decltype(of)>, 256, 0>(grad, blocks((out.numel() + 255) / 256),
            std::make_tuple(grad.data_ptr(), weight.data_ptr(), out.data_ptr(), layer));
      });
    }

    @grad_weight@ {
      by_dtype(x, [&](auto of) {
        launch<kernels::plain_grad_weight<decltype(of)>, 256, 0>(x, blocks(out.numel()),
            std::make_tuple(x.data_ptr(), grad.data_ptr(), out.data_ptr(), layer));
      });
    }
    """
)
for _name, _text in _PLAIN.items():
    PLAIN = PLAIN.replace(f"@{_name}@", _text)


def includes() -> str:
    """The headers of the host code."""
    standard = ("algorithm", "array", "cstring", "mutex", "optional", "tuple", "type_traits", "utility")
    lines = [f"#include <{name}>" for name in standard]
    lines += [
        "#include <c10/cuda/CUDAException.h>",
        "#include <c10/cuda/CUDAGuard.h>",
        "#include <c10/cuda/CUDAStream.h>",
    ]
    return "\n".join(lines)


def host() -> str:
    """What all launches share."""
    return f"namespace {{\n\n{LAUNCH}\n}}  // namespace\n"


def helpers(found: Sequence[Kernel]) -> str:
    """What the fast kernels' launches share."""
    every = (one for k in found for launch in launches(k) for one in launch.arguments)
    return f"namespace {{\n\n{TENSOR_MAP}\n}}  // namespace\n" if any(isinstance(one, Map) for one in every) else ""


def launches(k: Kernel) -> tuple[Launch, ...]:
    """The records of a pass: what packs the weights, if anything does, then what computes, and what adds sums."""
    c = k.choice
    if isinstance(c, wgrad.Choice):
        return c._two_steps(k.unit, Given("contiguous"))
    bias: Literal["given", "none"] = "given" if k.pass_ == "fwd" else "none"
    if not k.packed_words:
        return c.launches(Given("contiguous" if k.pass_ == "grad-weight" else "in place", bias=bias))
    given = Given("packed", bias=bias, lasting=True)
    packing = c.pack(Given("contiguous"))
    assert packing is not None
    return (packing, *c.launches(given))


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
    array = f"const std::array<int64_t, {len(sizes(main_launch(k)))}>& sizes"
    if k.pass_ == "grad-weight":
        tensors = ("const at::Tensor& x", "const at::Tensor& grad", "const at::Tensor& out")
        counts = "int64_t blocks, int64_t slices"
    else:
        bias = ("const std::optional<at::Tensor>& bias",) if k.pass_ == "fwd" else ()
        tensors = (f"const at::Tensor& {_source(k)}", "const at::Tensor& weight", *bias, "const at::Tensor& out")
        counts = "int64_t blocks"
    begin = f"void {k.name}("
    return f"{begin}{', '.join(tensors)},\n{' ' * len(begin)}{counts}, {array})"


def definition(k: Kernel) -> str:
    """The function of a pass."""
    lines, source, entries, records = [], _source(k), iter(k.entries), list(launches(k))
    if k.packed_words:
        packing = records.pop(0)
        lines.append(f"const at::Tensor packed = {_bytes('weight', str(k.choice.packed_bytes(Given())))};")
        lines.append(_launch(next(entries), packing, "weight", str(packing.grid), [_tuple(_fixed(k, packing))]))
    main, *adding = records
    for last in adding:
        (operand,) = (one.operand for one in last.arguments if isinstance(one, Pointer) and one.operand != "result")
        assert isinstance(operand, Scratch)
        lines.append(f"const at::Tensor sums = {_bytes(source, f'slices * {operand.bytes // sizes(last)[0]}')};")
    if words := zeros(main):
        lines.append(f"const at::Tensor zeros = at::zeros({{{words}}}, {source}.options().dtype(at::kInt));")
    lines.append(_launch(next(entries), main, source, "blocks", _varying(k, main)))
    for last in adding:
        slices = ["slices" if isinstance(one, Int) else text for one, text in zip(last.arguments, _fixed(k, last))]
        lines.append(_launch(next(entries), last, source, str(last.grid), [_tuple(slices)]))
    return prototype(k) + " {\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


def _launch(entry: str, launch: Launch, on: str, blocks: str, arguments: list[str]) -> str:
    text = f"launch<{entry}, {launch.threads}, {launch.shared_bytes}>({on}, {blocks}"
    for argument in arguments:
        text += f",\n      {argument}" if len(text.rpartition("\n")[2]) + len(argument) > 112 else f", {argument}"
    return f"{text});"


def _tuple(values: Iterable[str]) -> str:
    return f"std::make_tuple({', '.join(values)})"


def _source(k: Kernel) -> str:
    return "grad" if k.pass_ == "grad-input" else "x"


def _bytes(like: str, count: str) -> str:
    return f"at::empty({{{count}}}, {like}.options().dtype(at::kByte))"


def _varying(k: Kernel, launch: Launch) -> list[str]:
    """The arguments of what computes: pointers, the array of sizes, and tensor maps."""
    pointers = [_pointer(k, one) for one in launch.arguments if isinstance(one, Pointer)]
    maps = [_map(k, one) for one in launch.arguments if isinstance(one, Map)]
    array = f"std::array<CUtensorMap, {len(maps)}>{{\n      " + ",\n      ".join(maps) + "}"
    numbers = _tuple(["sizes"]) if isinstance(k.choice, plain.Choice) else "sizes"  # as one struct
    return [_tuple(pointers), numbers, *([_tuple([array])] if maps else [])]


def _fixed(k: Kernel, launch: Launch) -> Iterator[str]:
    """The arguments of another kernel, as its record has them."""
    for one in launch.arguments:
        yield _pointer(k, one) if isinstance(one, Pointer) else str(one.value)  # type: ignore[attr-defined]


def _pointer(k: Kernel, one: Pointer) -> str:
    if isinstance(one.operand, Zeros):
        return "zeros.data_ptr()"
    if isinstance(one.operand, Scratch):
        return "sums.data_ptr()"
    if one.operand in ("", "bias"):
        return "address(bias)" if one.operand else "nullptr"
    names = {"source": _source(k), "input": "x", "gradient": "grad", "result": "out"}
    return f"{names.get(one.operand, one.operand)}.data_ptr()"


def _map(k: Kernel, one: Map) -> str:
    p = k.choice.problem
    of_output = one.operand == "gradient" or k.pass_ == "grad-input"
    shape = p.output_shape if of_output else p.input_shape
    last, second = p.layout == "channels_last", k.pass_ == "grad-weight" and p.layout != "channels_last"
    whole = dense(shape, p.dtype.itemsize, last, second)
    assert _meant(one.tensor) == _meant(whole), "the file's maps are of whole tensors"
    kind = {torch.float32: "TFLOAT32" if one.rounded else "FLOAT32", torch.bfloat16: "BFLOAT16"}.get(p.dtype, "FLOAT16")
    box, steps = (", ".join(map(str, values)) for values in (one.box, one.steps))
    return (
        f"tensor_map({'grad' if of_output else 'x'}, {str(last).lower()}, {str(second).lower()}, "
        f"CU_TENSOR_MAP_DATA_TYPE_{kind}, {{{box}}}, {{{steps}}},\n                 "
        f"CU_TENSOR_MAP_SWIZZLE_{f'{one.span}B' if one.span else 'NONE'}, "
        f"CU_TENSOR_MAP_L2_PROMOTION_L2_{one.promotion}B)"
    )


def _meant(t: Tensor5) -> tuple[object, ...]:
    """A map's tensor without strides of dimensions of one element, which mean nothing."""
    return t.begin, t.dims, [step for step, n in zip(t.strides, t.dims[1:]) if n > 1]


def dense(shape: Sequence[int], element: int, last: bool, second: bool) -> Tensor5:
    """A whole tensor as ``tensor_map`` of the file has it."""
    batch, channels, *size = shape
    if last:
        return boxes.channels_last(batch, channels, size, element)
    d, h, w = (1,) * (3 - len(size)) + tuple(size)
    found = boxes.dense((w, h, d, channels, batch), element)
    return found.channels_second() if second else found
