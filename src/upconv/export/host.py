"""The host code of an exported file: for each kernel its launch in C++, and in Python the sizes that it is given.

C++ only checks, encodes tensor maps and launches; all arithmetic on sizes is Python's, so that it can be read and
tested without a GPU. A kernel's *variant* is one choice of a kernel family in a namespace of its own. Families whose
source depends on how rows are aligned have two: one for the example's alignment and one for any. Ahead of these stands,
where it is the faster one, a kernel for rows about as long as the example's, which are joined.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from textwrap import dedent, indent

import torch

from upconv.cuda.axes import source_shape
from upconv.cuda.compile import jit
from upconv.cuda.direct import direct, direct_grad, staged
from upconv.cuda.direct.cells import axes
from upconv.cuda.direct.walks import Walk
from upconv.cuda.gemm import gather, joined
from upconv.cuda.gemm.tiling import CLAIMS_BYTES, Tiling
from upconv.cuda.gpu import Gpu
from upconv.cuda.packs import PACK_THREADS
from upconv.cuda.wgrad import wgrad, wgrad_costs
from upconv.cuda.wgrad.wgrad_warpgroups import WarpgroupTiling
from upconv.planner import Device, select
from upconv.problem import Pass, Problem

Choice = gather.Choice | joined.Choice | direct.Choice | direct_grad.Choice | wgrad.Choice | staged.Choice

# Of the time of the kernel for every size, by their models, from which on joined rows are worth a kernel more. As the
# models have it, not `family.weighed`: the gather-GEMM's estimate is right for such layers.
_JOINED = 0.95

PASSES: tuple[Pass, ...] = ("fwd", "grad-input", "grad-weight")
NAMES: dict[Pass, str] = {"fwd": "forward", "grad-input": "grad_input", "grad-weight": "grad_weight"}


@dataclass(frozen=True)
class Variant:
    """One kernel family's choice for a pass, with the name of its namespace."""

    name: str
    pass_: Pass
    choice: Choice
    unit: int = 1
    """Columns of the source (for the weight's gradient: of the input) must be a multiple of it."""
    unit_out: int = 1
    """As ``unit``, of the output; of the weight's gradient alone."""
    pack: str | None = None
    """Entry that packs the weights; None where the kernel reads them as they are."""
    entry: str = ""
    """Entry that computes."""
    entries: tuple[str, ...] = field(default=())
    resident: int = 1
    """Blocks that a multiprocessor holds (of staged kernels alone)."""

    @property
    def config(self) -> str:
        """The struct of the kernels' constants."""
        return self.name.title().replace("_", "")

    @property
    def source(self) -> str:
        """Of its kernels; the weights of an exported file are packed."""
        return self.choice.sources()[0].source

    def kernel(self, entry: str) -> str:
        """An entry in C++."""
        names = {one.partition("<")[0]: one for one in jit.entries_of(self.source)}
        return re.sub(r"(\w+)([<>])", r"kernels::\1\2", re.sub(rf"\b{jit.CONFIG}\b", self.config, names[entry]))

    @property
    def kind(self) -> str:
        """The class of the exported file that computes the launch."""
        c = self.choice
        if isinstance(c, gather.Choice):
            return "Gather"
        if isinstance(c, joined.Choice):
            return "Joined"
        if isinstance(c, wgrad.Choice):
            return "GradWeight"
        if isinstance(c, direct_grad.Choice):
            return "DirectGradInput"
        if isinstance(c, staged.Choice):
            return "StagedGradInput" if self.pass_ == "grad-input" else "StagedGradWeight"
        return "DirectAny" if c.tile is None else "DirectWalk" if isinstance(c.tile, Walk) else "Direct"


def variants(p: Problem, gpu: Gpu) -> tuple[Variant, ...]:
    """The kernels that serve a layer at every size, for each pass the one for ``p``'s own first.

    Raises:
        ValueError: no kernel serves a pass.
    """
    found = []
    for pass_ in PASSES:
        choice = _choice(p, pass_, gpu)
        name = NAMES[pass_]
        rows = _joined(p, pass_, gpu)
        if rows is not None and rows.seconds < _JOINED * choice.seconds:
            found.append(_variant(f"{name}_joined", pass_, rows, 16 // rows.tile.element, 1, gpu))
        unit, unit_out = _units(choice)
        found.append(_variant(name, pass_, choice, unit, unit_out, gpu))
        general = _general(p, pass_, unit, unit_out)
        if general is not None:
            found.append(_variant(f"{name}_unaligned", pass_, _choice(general, pass_, gpu), 1, 1, gpu))
    return tuple(found)


def _choice(p: Problem, pass_: Pass, gpu: Gpu) -> Choice:
    wanted = p.with_(pass_="fwd") if pass_ == "fwd" else p.with_(pass_=pass_, bias=False)
    selection = select(wanted, Device("cuda", gpu=gpu), general=True)
    choice = selection.choice
    if not isinstance(choice, (gather.Choice, direct.Choice, direct_grad.Choice, wgrad.Choice, staged.Choice)):
        reason = "; ".join(c.reason for c in selection.candidates)
        raise ValueError(f"the layer must have kernels to be exported, and for {pass_} there is none: {reason}")
    return choice


def _joined(p: Problem, pass_: Pass, gpu: Gpu) -> joined.Choice | None:
    """A pass by joined rows, which serve some lengths of rows; None where these cannot be."""
    if pass_ == "grad-weight" or p.rank == 1:
        return None
    q = p.with_(pass_=pass_, bias=p.bias and pass_ == "fwd")
    choice = joined.choose(q, gpu)
    return None if isinstance(choice, str) else choice


def _units(choice: Choice) -> tuple[int, int]:
    """Multiples of which the columns (of the source or input, of the output) must be for a choice's kernel."""
    if isinstance(choice, gather.Choice):
        t = choice.tiling
        return (t.vec if t.tensor_map and not t.channels_last else 1), 1
    if isinstance(choice, wgrad.Choice):
        w = choice.tiling
        if w.channels_last:
            return 1, 1
        by_boxes = isinstance(w, WarpgroupTiling) and w.box_g
        return (w.vec if w.aligned else 1), (w.vec if by_boxes else 1)
    return 1, 1


def _general(p: Problem, pass_: Pass, unit: int, unit_out: int) -> Problem | None:
    """The layer at a size that a kernel for these multiples does not serve; None where it serves all sizes."""
    for more in range(1, 65):
        q = p.with_(size=(*p.size[:-1], p.size[-1] + more))
        width = source_shape(q.with_(pass_=pass_))[-1] if pass_ != "grad-weight" else q.size[-1]
        # A kernel for the input's rows at any alignment serves the output's too, but not the other way round.
        if width % unit or (unit == 1 and q.out_size[-1] % unit_out):
            return q
    return None


def _variant(name: str, pass_: Pass, choice: Choice, unit: int, unit_out: int, gpu: Gpu) -> Variant:
    source = choice.sources()[0]  # weights of a file are packed
    entries = tuple(source.entries)
    if isinstance(choice, (gather.Choice, joined.Choice, direct.Choice)):
        return Variant(name, pass_, choice, unit, unit_out, entries[0], entries[1], entries)
    resident = staged.resident(choice.tile, gpu) if isinstance(choice, staged.Choice) else 1
    return Variant(name, pass_, choice, unit, unit_out, None, entries[0], entries, resident)


# --- C++ -------------------------------------------------------------------------------------------------------------

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
        static_assert(sizeof(To) == sizeof(From), "a tensor map has 128 bytes");
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
        "Gather": 11, "Joined": 6, "Direct": 8, "DirectAny": 7, "DirectWalk": 8, "GradWeight": 12, "DirectGradInput": 8,
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
    if v.kind in ("DirectGradInput", "StagedGradInput"):
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
    lines.append(_launch(v.kernel(v.entry), _block(v), source, "blocks", "pointers", "sizes", *last))
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


# --- Python ----------------------------------------------------------------------------------------------------------

CLASSES = {
    "Gather": dedent(
        '''\
        class Gather(NamedTuple):
            """Forward or gradient for the input on tensor cores: persistent blocks that take tile after tile."""

            name: str
            unit: int  # the source's columns must be a multiple of it, so that rows begin at 16 bytes
            tile: tuple[int, int, int, int]  # positions of a tile: images, depth, height, width
            steps: tuple[int, int, int]  # results of a position along depth, height, width
            leads: tuple[int, int, int]  # of the first position, those ahead of the image
            m_groups: int  # sets of output channels and phases, each a tile of its own
            resident: bool  # a block keeps the weights of one set, so that all sets have as many blocks
            words: int  # of the packed weights
            packed: torch.dtype

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                axes = zip(result, self.leads, self.steps, self.tile[1:])
                counts = [ceil(size + lead, step * tile) for size, lead, step, tile in axes]
                tiles = ceil(batch, self.tile[0]) * math.prod(counts) * self.m_groups
                blocks = min(tiles, processors)
                if self.resident:
                    blocks = max(1, blocks // self.m_groups) * self.m_groups
                return blocks, (batch, *source, *result, *counts, tiles)
        '''
    ),
    "Joined": dedent(
        '''\
        class Joined(NamedTuple):
            """Forward or gradient for the input on tensor cores where rows are joined to one: tiles are neighbouring
            results of whatever rows of a slice."""

            name: str
            unit: int  # the source's columns must be a multiple of it, so that rows begin at 16 bytes
            columns: tuple[int, int]  # and as many as the first, at most the second
            places: int  # results of a tile
            blocks: int  # of output channels, each a tile of its own
            words: int  # of the packed weights
            packed: torch.dtype

            def fits(self, source, result):
                """Whether it serves the sizes: a slice's results are pairs, a channel's counted in 32 bits."""
                least, most = self.columns
                pairs = result[1] * result[2] % 2 == 0
                return least <= source[2] <= most and pairs and math.prod(result) < 2**31 - 4096

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                plane = result[1] * result[2]
                places = ceil(plane, self.places)
                tiles = batch * result[0] * places * self.blocks
                return min(tiles, processors), (source[0], result[0], result[2], plane, places, tiles)
        '''
    ),
    "Direct": dedent(
        '''\
        class Direct(NamedTuple):
            """Forward on CUDA cores: a block takes cells, the results between two strides, of one row of depth."""

            name: str
            unit: int
            cells: tuple[int, int]  # of a block along height, width
            stride: tuple[int, int]  # results of a cell along height, width
            channel_blocks: int  # blocks that the output channels of a cell take
            words: int  # of the packed weights
            packed: torch.dtype

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                rows, columns = (ceil(ceil(n, s), c) for n, s, c in zip(result[1:], self.stride, self.cells))
                return batch * result[0] * self.channel_blocks * rows * columns, (*source, *result, rows, columns)
        '''
    ),
    "DirectAny": dedent(
        '''\
        class DirectAny(NamedTuple):
            """Forward on CUDA cores, a thread for each result."""

            name: str
            unit: int
            channels: int  # of the result
            words: int  # of the packed weights
            packed: torch.dtype

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                total = batch * self.channels * math.prod(result)
                return min(ceil(total, 256), 2**20), (*source, *result, total)
        '''
    ),
    "DirectWalk": dedent(
        '''\
        class DirectWalk(NamedTuple):
            """Depthwise forward on CUDA cores: a thread walks down cells, the results between two strides."""

            name: str
            unit: int
            cells: int  # of a thread along width
            strip: int  # and along height
            stride: tuple[int, int]  # results of a cell along height, width
            channels: int
            whole: bool  # a block's threads are of one channel
            words: int  # of the packed weights
            packed: torch.dtype

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                runs = ceil(ceil(result[2], self.stride[1]), self.cells)
                strips = ceil(ceil(result[1], self.stride[0]), self.strip)
                of_channel = ceil(runs * strips, 128) * 128 if self.whole else runs * strips
                threads = batch * self.channels * of_channel
                return ceil(threads, 128), (*source[1:], *result[1:], runs, strips, self.strip, threads)
        '''
    ),
    "DirectGradInput": dedent(
        '''\
        class DirectGradInput(NamedTuple):
            """Gradient for the input on CUDA cores: a thread takes some input channels of a pixel."""

            name: str
            unit: int
            channel_blocks: int  # threads for the channels of a pixel

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                threads = batch * math.prod(result) * self.channel_blocks
                return ceil(threads, 256), (batch, *result, *source, threads)
        '''
    ),
    "GradWeight": dedent(
        '''\
        class GradWeight(NamedTuple):
            """Gradient for the weight on tensor cores: blocks share the pixels; their sums are added after."""

            name: str
            unit: int  # the input's columns must be a multiple of it, so that rows begin at 16 bytes
            unit_out: int  # and the output's
            tile: tuple[int, int, int, int]  # pixels of a chunk: images, depth, height, width
            halo: int  # rows that chunks reach beyond the input
            blocks: int  # for the channels and taps of the weight, with every share of the pixels
            slices: int  # of sums that a block writes
            chunk_seconds: float  # by the planner's model
            block_seconds: float  # beside its chunks

            def launch(self, batch, size, out_size, processors):
                """(blocks, slices of sums, the kernel's sizes); the sizes are (depth, height, width)."""
                depth, height, width = size
                counts = [ceil(n, t) for n, t in zip((batch, depth, height + self.halo, width), self.tile)]
                chunks = math.prod(counts)
                pixels = batch * (IN_CHANNELS * math.prod(size) + OUT_CHANNELS * math.prod(out_size))
                shares = self.shares(chunks, pixels * DTYPE.itemsize / BANDWIDTH, processors)
                sizes = (batch, *size, *out_size, *counts[1:], chunks, ceil(chunks, shares))
                return self.blocks * shares, self.slices * shares, sizes

            def shares(self, chunks, memory, processors):
                """How many shares the pixels are cut in: the model weighs waves of blocks against sums to add."""
                slice_bytes = 4 * WEIGHTS * self.slices
                most = max(1, min(chunks, SUM_BYTES // slice_bytes))
                best = None
                for n in sorted({min(most, max(1, processors * k // self.blocks)) for k in (1, 2, 3, 4)} | {1}):
                    each = ceil(chunks, n)
                    n = ceil(chunks, each)  # without shares that were empty
                    work = ceil(self.blocks * n, processors) * (each * self.chunk_seconds + self.block_seconds)
                    seconds = max(work, memory) + 0.12 * min(work, memory) + n * slice_bytes / BANDWIDTH
                    if best is None or seconds < best[0]:
                        best = seconds, n
                return best[1]
        '''
    ),
    "StagedGradInput": dedent(
        '''\
        class StagedGradInput(NamedTuple):
            """Gradient for the input on CUDA cores: a block takes a tile and what it needs of the output's gradient."""

            name: str
            unit: int
            tile: tuple[int, int]  # positions of a tile: height, width
            whole: int  # output rows of a multiple of so many columns are read in whole units; 0: none are
            channel_blocks: int  # blocks for the channels of a tile

            def launch(self, batch, source, result, processors):
                """(blocks, the kernel's sizes); source and result are (depth, height, width)."""
                counts = [ceil(n, t) for n, t in zip(result[1:], self.tile)]
                blocks = batch * result[0] * math.prod(counts) * self.channel_blocks
                whole = int(self.whole > 0 and source[2] % self.whole == 0)
                return blocks, (batch, *result, *source, *counts, whole)
        '''
    ),
    "StagedGradWeight": dedent(
        '''\
        class StagedGradWeight(NamedTuple):
            """Gradient for the weight on CUDA cores: blocks share the tiles; their sums are added after."""

            name: str
            unit: int
            unit_out: int
            tile: tuple[int, int]  # positions of a tile: height, width
            whole: int  # output rows of a multiple of so many columns are read in whole units; 0: none are
            blocks: int  # for the channels and taps of the weight, with every share of the tiles
            most: int  # shares, for the sake of the memory that their sums take
            resident: int  # blocks that a processor holds

            def launch(self, batch, size, out_size, processors):
                """(blocks, slices of sums, the kernel's sizes); the sizes are (depth, height, width)."""
                counts = [ceil(n, t) for n, t in zip(size[1:], self.tile)]
                tiles = batch * size[0] * math.prod(counts)
                shares = round(2 * processors * self.resident / self.blocks)  # which fill the processors about twice
                shares = max(1, min(tiles, self.most, shares))
                shares = ceil(tiles, ceil(tiles, shares))  # without shares that were empty
                whole = int(self.whole > 0 and out_size[2] % self.whole == 0)
                return self.blocks * shares, shares, (batch, *size, *out_size, *counts, whole, ceil(tiles, shares))
        '''
    ),
}


def packed_words(v: Variant) -> int:
    """Elements of a kernel's packed weights."""
    c = v.choice
    if isinstance(c, gather.Choice):
        return c.tiling.packed_words
    if isinstance(c, joined.Choice):
        return c.tile.packed_words
    if isinstance(c, direct.Choice):
        return c.packed_words
    return 0


def record(v: Variant) -> str:
    """A variant as a call of its class in the exported file."""
    c = v.choice
    given: dict[str, object] = {"name": v.name, "unit": v.unit}
    if isinstance(c, gather.Choice):
        t = c.tiling
        strides, leads = ((1, 1, 1), (0, 0, 0)) if t.shuffle is None else (t.shuffle.strides, t.shuffle.leads)
        steps = tuple(n * s for n, s in zip(t.out_steps, strides))
        given |= {"tile": t.tile, "steps": steps, "leads": leads, "m_groups": t.m_groups, "resident": t.resident}
    elif isinstance(c, joined.Choice):
        given |= {"columns": c.tile.source_columns, "places": c.tile.places, "blocks": c.tile.blocks}
    elif isinstance(c, wgrad.Choice):
        w = c.tiling
        seconds = wgrad_costs.chunk_clocks(w)[0] / c.gpu.clock
        given |= {"unit_out": v.unit_out, "tile": w.tile, "halo": w.halo, "blocks": w.tiles, "slices": w.k_slices}
        # Python 3.12 adds floats otherwise than 3.11, in the last digits; a file is to be the same by both.
        given |= {"chunk_seconds": float(f"{seconds:.9g}")}
        given |= {"block_seconds": float(f"{wgrad_costs.block_seconds(c.gpu):.9g}")}
    elif isinstance(c, direct_grad.Choice):
        given |= {"channel_blocks": c.channel_blocks}
    elif isinstance(c, staged.Choice):
        s = c.tile
        if v.pass_ == "grad-input":
            given |= {"tile": (s.h, s.w), "whole": _whole(c), "channel_blocks": s.channel_blocks}
        else:
            given |= {"unit_out": v.unit_out, "tile": (s.h, s.w), "whole": _whole(c)}
            given |= {"blocks": staged._weight_blocks(c.problem, s), "most": staged._most_ranges(c.problem, s)}
            given |= {"resident": v.resident}
    elif c.tile is None:
        given |= {"channels": c.problem.out_channels}
    else:
        p, (_, h, w_axis) = c.problem, axes(c.problem)
        stride = (h.stride, w_axis.stride)
        if isinstance(c.tile, Walk):
            given |= {"cells": c.tile.cells, "strip": c.tile.strip}
            given |= {"stride": stride, "channels": p.groups, "whole": p.layout != "channels_last"}
        else:
            cells = (c.tile.block_h, c.tile.cells * c.tile.block_x)
            blocks = -(-p.groups // c.tile.slots) * -(-p.out_channels // p.groups // c.tile.co)
            given |= {"cells": cells, "stride": stride, "channel_blocks": blocks}
    if v.pack is not None:
        dtype = "torch.int32" if v.kind in ("Gather", "Joined") else "torch.float32"
        if c.problem.dtype is torch.float64:
            dtype = "torch.float64"
        given |= {"words": packed_words(v), "packed": _Literal(dtype)}
    lines = "".join(f"    {key}={_literal(value)},\n" for key, value in given.items())
    return f"{v.kind}(\n{lines})"


def _whole(c: staged.Choice) -> int:
    """Of which the columns of output rows must be a multiple to be read in whole units; 0 where they never are.

    The file's tensors begin at 16 bytes, so that nothing else decides it.
    """
    p, tile = c.problem, c.tile
    if tile.vector == 1:
        return 0
    if not tile.lanes_are_channels:
        return tile.vector
    return tile.vector // math.gcd(tile.vector, p.groups)


class _Literal(str):
    """Source as it is."""


def _literal(value: object) -> str:
    return value if isinstance(value, _Literal) else repr(value).replace("'", '"')
