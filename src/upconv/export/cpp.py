"""An exported file's host code in C++: it checks, encodes tensor maps and launches; sizes are Python's."""

from __future__ import annotations

import math
from textwrap import dedent, indent

import torch

from upconv.cuda.axes import source_shape
from upconv.cuda.direct import direct, staged
from upconv.cuda.gemm import gather, joined
from upconv.cuda.gemm.tiling import CLAIMS_BYTES, Tiling
from upconv.cuda.packs import PACK_THREADS
from upconv.cuda.wgrad import wgrad
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.export.variants import Variant

PROTOTYPES = {
    "pack": "void pack_{name}(const at::Tensor& weight, const at::Tensor& packed)",
    "run": (
        "void run_{name}(const at::Tensor& {source}, const at::Tensor& packed, const std::optional<at::Tensor>& bias,\n"
        "{pad}const at::Tensor& out, int64_t blocks, const std::array<int64_t, {count}>& sizes)"
    ),
    "sum": (
        "void run_{name}(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& partial,\n"
        "{pad}const at::Tensor& out, int64_t blocks, const std::array<int64_t, {count}>& sizes)"
    ),
}

LAUNCH = dedent(
    """\
    // --- launches ----------------------------------------------------------------------------------------------------

    // A value as a kernel's parameter: pointers from void*, integers in range, tensor maps bit by bit.
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

    // A map over a dense tensor of dimensions `dims`, innermost first, and the box that one copy brings: `box` elements
    // traversed by `steps` along each. `channels_second`: the map has the fourth dimension second, and so has the box.
    CUtensorMap tensor_map(const at::Tensor& t, CUtensorMapDataType type, const std::array<int64_t, 5>& dims,
                           const std::array<cuuint32_t, 5>& box, const std::array<cuuint32_t, 5>& steps,
                           CUtensorMapSwizzle swizzle, bool channels_second = false) {
      const c10::cuda::CUDAGuard guard(t.device());
      C10_CUDA_CHECK(cudaSetDevice(t.get_device()));  // gives a thread that has called nothing yet its context
      std::array<cuuint64_t, 5> counts;
      std::array<cuuint64_t, 4> pitches;  // bytes from an element to the next along all dimensions but the innermost
      cuuint64_t pitch = t.element_size();
      for (int i = 0; i < 5; i++) {
        counts[i] = dims[i];
        pitch *= dims[i];
        if (i < 4) pitches[i] = pitch;
      }
      if (channels_second) {
        std::rotate(counts.begin() + 1, counts.begin() + 3, counts.begin() + 4);
        std::rotate(pitches.begin(), pitches.begin() + 2, pitches.begin() + 3);
      }
      CUtensorMap map;
      const CUresult result = encode_tiled()(
          &map, type, 5, t.data_ptr(), counts.data(), pitches.data(), box.data(), steps.data(),
          CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
      TORCH_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with error ", static_cast<int>(result));
      return map;
    }
    """
)

COUNTERS = dedent(
    """\
    // The current stream of a tensor's device; none while a graph is captured on it.
    std::optional<int64_t> stream_of(const at::Tensor& t) {
      const c10::cuda::CUDAGuard guard(t.device());
      const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(t.get_device());
      cudaStreamCaptureStatus status;
      C10_CUDA_CHECK(cudaStreamIsCapturing(stream.stream(), &status));
      if (status != cudaStreamCaptureStatusNone) return std::nullopt;
      return reinterpret_cast<intptr_t>(stream.stream());
    }

    // Words of device memory for blocks that claim tiles: zeros, which kernels leave zeros. Each stream has its own,
    // since kernels of two may run at once; a captured launch has none, since its graph's replays may, and its tiles
    // are dealt out evenly.
    void* counters(const at::Tensor& on) {
      const std::optional<int64_t> stream = stream_of(on);
      if (!stream) return nullptr;
      static std::mutex mutex;
      static auto& of_streams =  // not destroyed at exit, when the driver may be gone
          *new std::map<std::pair<int, int64_t>, at::Tensor>();
      const std::pair<int, int64_t> key(on.get_device(), *stream);
      {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto found = of_streams.find(key);
        if (found != of_streams.end()) return found->second.data_ptr();
      }
      const at::Tensor zeros = at::zeros({@WORDS@}, on.options().dtype(at::kInt));  // may call Python: not locked
      const std::lock_guard<std::mutex> lock(mutex);
      return of_streams.emplace(key, zeros).first->second.data_ptr();
    }
    """
)


def includes() -> str:
    """The headers of the host code."""
    standard = ("algorithm", "array", "cstring", "map", "mutex", "optional", "tuple", "type_traits", "utility")
    lines = [f"#include <{name}>" for name in standard]
    lines += [
        "#include <c10/cuda/CUDAException.h>",
        "#include <c10/cuda/CUDAGuard.h>",
        "#include <c10/cuda/CUDAStream.h>",
    ]
    return "\n".join(lines)


def helpers(found: tuple[Variant, ...]) -> str:
    """What the launch functions share."""
    maps, words = any(_maps(v) for v in found), max(_claims(v) for v in found)
    parts = [LAUNCH, *([TENSOR_MAP] if maps else []), *([COUNTERS.replace("@WORDS@", str(words))] if words else [])]
    return _unnamed("\n".join(parts))


def _unnamed(text: str) -> str:
    return "namespace {\n\n" + text + "\n}  // namespace\n"


def _claims(v: Variant) -> int:
    """Words of zeros by which a kernel's blocks claim tiles; 0 where tiles are dealt out."""
    c = v.choice
    return c.tiling.m_groups + 1 if isinstance(c, gather.Choice) and c.claimed else 0


def _maps(v: Variant) -> int:
    """Tensor maps of a kernel."""
    if isinstance(v.choice, joined.Choice):
        return 1
    if isinstance(v.choice, gather.Choice):
        return int(v.choice.tiling.tensor_map)
    if isinstance(v.choice, wgrad.Choice) and isinstance(v.choice.tiling, WarpgroupTiling):
        return 1 + v.choice.tiling.box_g
    return 0


def prototypes(v: Variant) -> tuple[str, ...]:
    """The declarations of a variant's C++ functions."""
    found = []
    if v.pack is not None:
        found.append(PROTOTYPES["pack"].format(name=v.name))
    source = "grad" if v.pass_ == "grad-input" else "x"
    text = PROTOTYPES["sum" if v.pass_ == "grad-weight" else "run"]
    found.append(text.format(name=v.name, source=source, pad=" " * (10 + len(v.name)), count=_sizes(v)))
    return tuple(found)


def functions(found: tuple[Variant, ...]) -> tuple[str, ...]:
    """The names of the C++ functions that Python calls."""
    names: list[str] = []
    for v in found:
        names += [f"pack_{v.name}"] * (v.pack is not None) + [f"run_{v.name}"]
    return tuple(names)


def _sizes(v: Variant) -> int:
    return {
        "Gather": 11, "Joined": 6, "Direct": 8, "Plain": 40, "DirectWalk": 8, "GradWeight": 12, "DirectGradInput": 8,
        "StagedGradInput": 10, "StagedGradWeight": 11,
    }[v.kind]  # fmt: skip


def definitions(v: Variant) -> str:
    """A variant's C++ functions."""
    *pack, run = prototypes(v)
    bodies = [f"{pack[0]} {{\n{indent(_pack(v), '  ')}}}\n"] if pack else []
    body = {"grad-weight": _run_grad_weight}.get(v.pass_, _run)(v)
    return "\n".join([*bodies, f"{run} {{\n{indent(body, '  ')}}}\n"])


def _pack(v: Variant) -> str:
    c = v.choice
    assert v.pack is not None
    kernel = v.kernel(v.pack)
    lines = ["const auto pointers = std::make_tuple(weight.data_ptr(), packed.data_ptr());\n"]
    if isinstance(c, (gather.Choice, joined.Choice)):  # of contiguous weights, whose taps are one element apart
        tile = c.tiling if isinstance(c, gather.Choice) else c.tile
        block, blocks = (PACK_THREADS, 0), str(tile.pack_blocks)
        lines.append(_launch(kernel, block, "weight", blocks, "pointers", "std::make_tuple(1)"))
        return "".join(lines)
    blocks, rest = "(packed.numel() + 255) / 256", "std::make_tuple(packed.numel())"
    if isinstance(c, direct.Choice):
        full = (*c.problem.weight_shape[:2], *_full(c.problem.kernel))
        strides = ", ".join(str(math.prod(full[i + 1 :])) for i in range(5))
        lines.append(f"const std::array<int64_t, 6> strides_and_count = {{{strides}, packed.numel()}};\n")
        blocks, rest = f"std::min<int64_t>({blocks}, 65536)", "strides_and_count"
    lines.append(_launch(kernel, (256, 0), "weight", blocks, "pointers", rest))
    return "".join(lines)


def _run(v: Variant) -> str:
    c, source = v.choice, "grad" if v.pass_ == "grad-input" else "x"
    pointers = [f"{source}.data_ptr()", "packed.data_ptr()", "address(bias)", "out.data_ptr()"]
    if v.kind in ("DirectGradInput", "StagedGradInput") or (v.kind == "Plain" and v.pass_ != "fwd"):
        pointers.remove("address(bias)")
    if v.kind == "Joined":
        del pointers[0]  # which the map has
    lines, last = [], []
    if isinstance(c, joined.Choice):
        lines.append(_joined_map(c.tile, source))
    elif isinstance(c, gather.Choice) and c.tiling.tensor_map:
        lines.append(_gather_map(c.tiling, source))
    if lines:
        last.append("std::make_tuple(map)")
    if _claims(v):
        pointers.append(f"counters({source})")
    lines.append(f"const auto pointers = std::make_tuple({', '.join(pointers)});\n")
    sizes = "std::make_tuple(sizes)" if v.kind == "Plain" else "sizes"  # one struct
    lines.append(_launch(v.kernel(v.entry), _block(v), source, "blocks", "pointers", sizes, *last))
    return "".join(lines)


def _run_grad_weight(v: Variant) -> str:
    c = v.choice
    first = "x.data_ptr(), grad.data_ptr(), partial.data_ptr()"
    lines, last = [], []
    if isinstance(c, wgrad.Choice) and isinstance(c.tiling, WarpgroupTiling):
        t = c.tiling
        first = "grad.data_ptr(), partial.data_ptr()"
        lines.append(_wgrad_map(t, "x", False))
        if t.box_g:
            lines.append(_wgrad_map(t, "grad", True))
            lines.append("const std::array<CUtensorMap, 2> maps = {map_x, map_grad};\n")
        else:
            lines.append("const std::array<CUtensorMap, 1> maps = {map_x};\n")
        last.append("std::make_tuple(maps)")
    lines.append(f"const auto pointers = std::make_tuple({first});\n")
    lines.append(_launch(v.kernel(v.entry), _block(v), "x", "blocks", "pointers", "sizes", *last))
    blocks = "(out.numel() + 255) / 256"
    if isinstance(c, wgrad.Choice):
        blocks = str(wgrad.reduce_blocks(c.tiling))
    lines.append("// Adds the slices of sums, always in the same order; out may have any dense memory format.\n")
    lines.append("const auto sums = std::make_tuple(partial.data_ptr(), out.data_ptr(), partial.size(0));\n")
    lines.append("const auto strides = std::make_tuple(out.stride(0), out.stride(1), out.stride(-1));\n")
    lines.append(_launch(v.kernel(v.entries[-1]), (256, 0), "x", blocks, "sums", "strides"))
    return "".join(lines)


def _launch(kernel: str, block: tuple[int, int], on: str, blocks: str, *arguments: str) -> str:
    return f"launch<{kernel}, {block[0]}, {block[1]}>({', '.join((on, blocks, *arguments))});\n"


def _block(v: Variant) -> tuple[int, int]:
    """(threads, bytes of dynamic shared memory) of a block."""
    c = v.choice
    if isinstance(c, gather.Choice):
        return (512 if c.tiling.wgmma else 384), c.tiling.shared_bytes + (CLAIMS_BYTES if c.claimed else 0)
    if isinstance(c, joined.Choice):
        return joined.Choice.threads, c.tile.shared_bytes
    if isinstance(c, wgrad.Choice):
        return c.tiling.threads, c.tiling.shared_bytes
    if isinstance(c, staged.Choice):
        return c.tile.threads, c.tile.shared_bytes
    return (c.threads, c.shared_bytes) if isinstance(c, direct.Choice) else (256, 0)


def _gather_map(t: Tiling, source: str) -> str:
    p = t.problem
    kind = {
        torch.float32: "TFLOAT32" if t.channels_last and p.precision == "tf32" else "FLOAT32",
        torch.bfloat16: "BFLOAT16",
        torch.float16: "FLOAT16",
    }[p.dtype]
    swizzle = f"SWIZZLE_{t.row_bytes}B" if t.channels_last else "SWIZZLE_NONE"
    # sizes: batch, depth, height and width of the source, ...
    return _map("map", source, kind, source_shape(p)[1], ("sizes[3]", "sizes[2]", "sizes[1]"), t.channels_last,
                t.box, t.box_steps, swizzle)  # fmt: skip


_KINDS = {torch.float32: "TFLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}  # rounded on their way


def _joined_map(t: joined.Tile, source: str) -> str:
    depth = f"{source}.size(2)" if t.problem.rank == 3 else "1"
    size = f"{source}.size(-1)", f"{source}.size(-2)", depth
    swizzle = "SWIZZLE_NONE" if t.element == 4 else "SWIZZLE_128B"
    return _map("map", source, _KINDS[t.problem.dtype], t.channels[0], size, False, t.box, (1,) * 5, swizzle,
                t.element == 2, f"{source}.size(0)")  # fmt: skip


def _wgrad_map(t: WarpgroupTiling, name: str, g: bool) -> str:
    p = t.problem
    kind = _KINDS[p.dtype]
    span = t.g_width * t.element if g else t.segment
    plain = not t.channels_last if g else t.turned
    # sizes: batch, depth, height and width of the input, of the output, ...
    size = ("sizes[6]", "sizes[5]", "sizes[4]") if g else ("sizes[3]", "sizes[2]", "sizes[1]")
    return _map(f"map_{name}", name, kind, p.out_channels if g else p.in_channels, size, t.channels_last,
                t.g_box if g else t.box, t.g_box_steps if g else (1,) * 5,
                "SWIZZLE_NONE" if plain else f"SWIZZLE_{span}B", not t.channels_last)  # fmt: skip


def _map(
    name: str,
    tensor: str,
    kind: str,
    channels: int,
    size: tuple[str, str, str],
    last: bool,
    box: tuple[int, ...],
    steps: tuple[int, ...],
    swizzle: str,
    channels_second: bool = False,
    batch: str = "sizes[0]",
) -> str:
    w, h, d = size
    dims = (str(channels), w, h, d, batch) if last else (w, h, d, str(channels), batch)
    lists = [", ".join(map(str, values)) for values in (dims, box, steps)]
    last_argument = ", true" if channels_second else ""
    return (
        f"const CUtensorMap {name} = tensor_map({tensor}, CU_TENSOR_MAP_DATA_TYPE_{kind}, {{{lists[0]}}},\n"
        f"{' ' * (len(name) + 32)}{{{lists[1]}}}, {{{lists[2]}}}, CU_TENSOR_MAP_{swizzle}{last_argument});\n"
    )


def _full(values: tuple[int, ...], fill: int = 1) -> tuple[int, int, int]:
    d, h, w = (fill,) * (3 - len(values)) + values
    return d, h, w
