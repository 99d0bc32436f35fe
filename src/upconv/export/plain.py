"""An exported file's plain kernels: right for every layer and dtype, fast for none. A reader starts there."""

from __future__ import annotations

from upconv.problem import Pass

_HEAD = """\
#include <array>
#include <optional>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

"""
_KERNELS = """\
namespace {

// Along each axis output p, tap k and input i meet where p + padding = i * stride + k * dilation. The kernels compute
//
//   y[n, o, p]  = bias[o] + sum over c, k of x[n, c, i] * w[c, o, k]
//   dx[n, c, i] =           sum over o, k of dy[n, o, p] * w[c, o, k]
//   dw[c, o, k] =           sum over n, i of x[n, c, i] * dy[n, o, p]
//
// where c and o are channels of one group. Tensors are contiguous; sums have an order that is always the same.

constexpr int THREADS = 256;

struct Layer {
  int batch, groups, cin, cout;  // channels of a group
  int in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];  // along depth, height and width
};

template <typename T>
using SumOf = at::opmath_type<T>;  // float of 16 bits

__device__ int64_t volume(const int (&size)[3]) { return int64_t(size[0]) * size[1] * size[2]; }

// The plane (image and channel) that an element is in, and its place there; and back.
__device__ int64_t plane_of(int64_t index, const int (&size)[3], int (&at)[3]) {
  for (int axis = 2; axis >= 0; axis--, index /= size[axis + 1]) at[axis] = index % size[axis];
  return index;
}
__device__ int64_t index_of(int64_t plane, const int (&size)[3], const int (&at)[3]) {
  return ((plane * size[0] + at[0]) * size[1] + at[1]) * size[2] + at[2];
}

// The input that an output meets at a tap, if there is one, and the other way round.
__device__ bool input_at(const Layer& l, const int (&p)[3], const int (&k)[3], int (&i)[3]) {
  bool meets = true;
  for (int axis = 0; axis < 3; axis++) {
    const int reach = p[axis] + l.padding[axis] - k[axis] * l.dilation[axis];
    i[axis] = reach / l.stride[axis];
    meets = meets && reach >= 0 && reach % l.stride[axis] == 0 && i[axis] < l.in[axis];
  }
  return meets;
}
__device__ bool output_at(const Layer& l, const int (&i)[3], const int (&k)[3], int (&p)[3]) {
  bool meets = true;
  for (int axis = 0; axis < 3; axis++) {
    p[axis] = i[axis] * l.stride[axis] + k[axis] * l.dilation[axis] - l.padding[axis];
    meets = meets && p[axis] >= 0 && p[axis] < l.out[axis];
  }
  return meets;
}
"""
_PASSES: dict[Pass, str] = {
    "fwd": """\
// A thread computes an output.
template <typename T>
__global__ void plain_forward(const T* x, const T* w, const T* bias, T* y, Layer l) {
  const int64_t planes = int64_t(l.batch) * l.groups * l.cout, taps = volume(l.kernel);
  for (int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x; index < planes * volume(l.out);
       index += int64_t(gridDim.x) * THREADS) {
    int p[3], k[3], i[3];
    const int64_t plane = plane_of(index, l.out, p), group = plane / l.cout, o = plane % l.cout;  // of all images
    SumOf<T> sum = bias ? SumOf<T>(bias[plane % (l.groups * l.cout)]) : SumOf<T>(0);
    for (int64_t tap = 0; tap < taps; tap++) {
      plane_of(tap, l.kernel, k);
      if (!input_at(l, p, k, i)) continue;
      for (int64_t c = 0; c < l.cin; c++) {
        const T weight = w[((group % l.groups * l.cin + c) * l.cout + o) * taps + tap];
        sum += SumOf<T>(x[index_of(group * l.cin + c, l.in, i)]) * SumOf<T>(weight);
      }
    }
    y[index] = T(sum);
  }
}
""",
    "grad-input": """\
// A thread computes an input's gradient.
template <typename T>
__global__ void plain_grad_input(const T* dy, const T* w, T* dx, Layer l) {
  const int64_t planes = int64_t(l.batch) * l.groups * l.cin, taps = volume(l.kernel);
  for (int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x; index < planes * volume(l.in);
       index += int64_t(gridDim.x) * THREADS) {
    int p[3], k[3], i[3];
    const int64_t plane = plane_of(index, l.in, i), c = plane % (l.groups * l.cin);
    SumOf<T> sum = 0;
    for (int64_t tap = 0; tap < taps; tap++) {
      plane_of(tap, l.kernel, k);
      if (!output_at(l, i, k, p)) continue;
      for (int64_t o = 0; o < l.cout; o++) {
        const T grad = dy[index_of(plane / l.cin * l.cout + o, l.out, p)];
        sum += SumOf<T>(grad) * SumOf<T>(w[(c * l.cout + o) * taps + tap]);
      }
    }
    dx[index] = T(sum);
  }
}
""",
    "grad-weight": """\
// A block computes a weight's gradient: its threads divide the pixels and add their sums in pairs.
template <typename T>
__global__ void plain_grad_weight(const T* x, const T* dy, T* dw, Layer l) {
  __shared__ SumOf<T> sums[THREADS];
  const int64_t channels = int64_t(l.groups) * l.cin, pixels = l.batch * volume(l.in);
  for (int64_t index = blockIdx.x; index < channels * l.cout * volume(l.kernel); index += gridDim.x) {
    int p[3], k[3], i[3];
    const int64_t plane = plane_of(index, l.kernel, k), c = plane / l.cout, o = plane % l.cout;
    SumOf<T> sum = 0;
    for (int64_t pixel = threadIdx.x; pixel < pixels; pixel += THREADS) {
      const int64_t n = plane_of(pixel, l.in, i);
      if (!output_at(l, i, k, p)) continue;
      const T grad = dy[index_of((n * l.groups + c / l.cin) * l.cout + o, l.out, p)];
      sum += SumOf<T>(x[index_of(n * channels + c, l.in, i)]) * SumOf<T>(grad);
    }
    sums[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) dw[index] = T(sums[0]);
    __syncthreads();
  }
}
""",
}
_LAUNCH = """\
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const at::Tensor& out, int each, const Arguments&... arguments) {
  const c10::cuda::CUDAGuard guard(out.device());
  const int64_t blocks = std::min<int64_t>((out.numel() + each - 1) / each, 1 << 20);  // further results come in turn
  kernel<<<blocks, THREADS, 0, c10::cuda::getCurrentCUDAStream()>>>(static_cast<Parameters>(arguments)...);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
"""
_CALLS: dict[Pass, tuple[str, str, str]] = {
    "fwd": (
        "const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,\n"
        "             const at::Tensor& out",
        "THREADS",
        "x.data_ptr(), weight.data_ptr(), bias ? bias->data_ptr() : nullptr, out.data_ptr()",
    ),
    "grad-input": (
        "const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& out",
        "THREADS",
        "grad.data_ptr(), weight.data_ptr(), out.data_ptr()",
    ),
    "grad-weight": (
        "const at::Tensor& x, const at::Tensor& grad, const at::Tensor& out",
        "1",
        "x.data_ptr(), grad.data_ptr(), out.data_ptr()",
    ),
}
_CALL = """\
void {name}({tensors}, const std::array<int, 22>& layer) {{
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "{name}", [&] {{
    launch(plain_{name}<scalar_t>, out, {each}, {pointers}, reinterpret_cast<const Layer&>(layer));
  }});
}}
"""


def kernels(passes: dict[Pass, str]) -> str:
    """The kernels of passes; of each the name."""
    return "\n".join((_KERNELS, *(_PASSES[one] for one in passes)))


def text(passes: dict[Pass, str]) -> str:
    """The kernels of passes and the functions that launch them; of each the name."""
    calls = []
    for one, name in passes.items():
        tensors, each, pointers = _CALLS[one]
        calls.append(_CALL.format(name=name, tensors=tensors, each=each, pointers=pointers))
    return "\n".join((_HEAD + kernels(passes), _LAUNCH, *calls))
