"""KernelBench level 1, problem 75: a transposed convolution with CUDA kernels of its own, in one file.

Layer: ConvTranspose2d(32, 64, kernel_size=(3, 5), stride=(2, 3), padding=(1, 2), dilation=(2, 1), groups=4).

Along each axis output p, tap k and input i meet where p + padding = i * stride + k * dilation. For channels c and o of
one group

  y[n, o, p] = bias[o] + sum over c, k of x[n, c, i] * w[c, o, k]

ModelNew has the constructor, the parameters (equal under a seed) and the state_dict of the original, and computes
forward, first and second gradients.

Constraints:
- The fast kernels serve this layer with torch.float32 on CUDA devices of sm_90a. Plain kernels, which are slow,
  serve other arguments and dtypes, and other devices from sm_70 on. A reader begins with these.
- nvcc, a C++ compiler and ninja are needed at the first call, which takes a minute.
- Values: float32, multiplied as such or, on tensor cores, as two TF32 parts in three products, which keeps
  float32's accuracy; PyTorch's kernel for these groups is IEEE float32 whatever its TF32 flag says, so these are.
- Tensors are copied to the contiguous memory format where needed. Results are contiguous.
- Results are bit-equal from run to run. Under torch.autocast they have the weights' dtype.

Kernels, which serve every batch and spatial size, as planned for inputs of 16 x 32 x 128 x 256 on an NVIDIA H200:
- forward: tiles of 4x128 cells in 26 KB, lanes are columns, a thread takes 2 rows x 4 channels.
- gradient for the input: tiles of 32x32 cells in 108 KB, lanes are columns, a thread takes 8 rows x 8 channels.
- gradient for the weight: mma.sync ieee, 16x16 channels x 1x3x5 taps a block, chunks of 1x1x8x32 (NxDxHxW of q), K
  in 132 slices, 171 KB shared.

A block of the forward:
  input -> tile of cells in shared memory -> registers --+
  weights -> shared memory -> registers -----------------+-> result
  Roles: all threads alike.

Its times are in docs/founding-models.md of upconv, measured by `upconv bench --suite kernelbench --as-exported`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import os
import re
import shutil
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import cpp_extension


class Arguments(NamedTuple):
    """Of a transposed convolution, beside its channels and its kernel."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


# --- the layer that the fast kernels are for; the plain ones serve every other ----------------------------------------

WEIGHT = (32, 16, 3, 5)
LAYER = Arguments(stride=(2, 3), padding=(1, 2), output_padding=(0, 0), dilation=(2, 1), groups=4)
DTYPE, FORMAT, RANK = torch.float32, torch.contiguous_format, 2
CAPABILITY = (9, 0)  # of the GPUs that they are compiled for: sm_90a

# --- CUDA C++: plain kernels, which state what is computed ------------------------------------------------------------

PLAIN = r"""
#include <array>
#include <optional>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

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

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const at::Tensor& out, int each, const Arguments&... arguments) {
  const c10::cuda::CUDAGuard guard(out.device());
  const int64_t blocks = std::min<int64_t>((out.numel() + each - 1) / each, 1 << 20);  // further results come in turn
  kernel<<<blocks, THREADS, 0, c10::cuda::getCurrentCUDAStream()>>>(static_cast<Parameters>(arguments)...);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
             const at::Tensor& out, const std::array<int, 22>& layer) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "forward", [&] {
    launch(plain_forward<scalar_t>, out, THREADS, x.data_ptr(), weight.data_ptr(), bias ? bias->data_ptr() : nullptr, out.data_ptr(), reinterpret_cast<const Layer&>(layer));
  });
}

void grad_input(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& out, const std::array<int, 22>& layer) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "grad_input", [&] {
    launch(plain_grad_input<scalar_t>, out, THREADS, grad.data_ptr(), weight.data_ptr(), out.data_ptr(), reinterpret_cast<const Layer&>(layer));
  });
}

void grad_weight(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& out, const std::array<int, 22>& layer) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "grad_weight", [&] {
    launch(plain_grad_weight<scalar_t>, out, 1, x.data_ptr(), grad.data_ptr(), out.data_ptr(), reinterpret_cast<const Layer&>(layer));
  });
}
"""

# --- CUDA C++: fast kernels -------------------------------------------------------------------------------------------

FAST = r"""
#include <algorithm>
#include <array>
#include <optional>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace kernels {

// PTX in small wrappers, so that a kernel body reads as an algorithm. It includes no headers.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// --- copies into shared memory ----------------------------------------------------------------------------------------

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {  // the rest of the 16 becomes zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory"); }

// --- the compiler and registers ---------------------------------------------------------------------------------------

// The compiler knows no more of a value than its type: what follows from it is computed behind this, and sums are set ahead of a
// fence of wgmma, not behind it, where ptxas would wait for every instruction (C7519).
__device__ __forceinline__ void opaque(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void opaque(u32& v) { asm volatile("" : "+r"(v)); }
// An address in global memory, which stays in registers: else the compiler makes it anew from a kernel's arguments at every use.
template <class T> __device__ __forceinline__ void opaque(T*& v) {
  asm volatile("" : "+l"(v));
  __builtin_assume(__isGlobal(v));
}
// Integers. Macros, since by references the compiler keeps variables in another order.
#define OPAQUE(a) asm volatile("" : "+r"(a))
// Loads ahead of it are under way before what follows. Else ptxas may put each of many loads ahead of its own use, and all wait.
__device__ __forceinline__ void loads_ahead() { __syncwarp(__activemask()); }

// --- numbers ----------------------------------------------------------------------------------------------------------

// Nearest TF32, ties to even, as cuDNN rounds: with it results agree with cuDNN to 3e-6, with rna to 5e-5.
__device__ __forceinline__ u32 to_tf32(float v) {
  u32 r;
  asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
}
// By one instruction before sm_90, where nearest-even takes six: ties away from zero.
__device__ __forceinline__ u32 to_tf32_quick(float v) {
  return to_tf32(v);
}
// What TF32 leaves of a float, in TF32 itself; nothing of infinities and NaNs, whose difference to themselves is a NaN.
__device__ __forceinline__ u32 low_part(float v, u32 high) {
  return (high & 0x7f800000u) == 0x7f800000u ? 0u : to_tf32(v - __uint_as_float(high));
}

// How a kernel's numbers are multiplied and stored, by its precision: their type, and of float32 results what is stored.

enum Precision { TF32, IEEE, FP16, BF16, FP64 };

template <int P>
struct NumberOf;
struct Float32 {
  using Type = float;
  using Bits = u32;
  static __device__ __forceinline__ u32 bits(float v) { return __float_as_uint(v); }
  static __device__ __forceinline__ float value(float v) { return v; }
};
template <> struct NumberOf<IEEE> : Float32 {};

// How the kernels for CUDA cores store and sum numbers, by their precision P: `ScalarOf<P>`.

typedef long long i64;

template <class T_, class Acc_>
struct ScalarTypes {
    using T = T_;      // of tensors
    using Acc = Acc_;  // of sums
    static constexpr int VEC = 16 / (int)sizeof(Acc);  // accumulators in 16 bytes
    struct alignas(16) Pack {
        Acc v[VEC];
    };
};

template <int P>
struct ScalarOf;
template <class V>
struct Unchanged : ScalarTypes<V, V> {
    static __device__ __forceinline__ V value(V v) { return v; }
    static __device__ __forceinline__ V stored(V v) { return v; }
};
template <> struct ScalarOf<IEEE> : Unchanged<float> {};

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

__device__ constexpr int floor_mod(int a, int b) { return (a % b + b) % b; }

// What the kernels of direct.cu and direct_weight.cu share: cells, and a tile of one tensor in shared memory.
//
// Along an axis the staged tensor (source) and the other one meet where, for cell j, phase t and tap k,
//   forward     output j * stride + t = input (j + shift) * stride + k * dilation - padding
//   gradients   input j = the one whose tap k meets the output's gradient at j * stride + shift, shift = k * dilation - padding
// So a cell is `out` results and cells are `in` sources apart: (stride, 1) of the forward, (1, stride) of the gradients.
//
// A block brings what tile_h x tile_w cells need of a slice of the source (`chunk` channels of an image, at a depth) into shared memory, in
// whole units and once; taps read it there. A thread takes `rows` cells, one below the other.
//   Lanes are columns: those of the source lie in `in_w` planes of equal residue, so that lanes read neighbours at any stride.
//   lanes_are_channels (depthwise, channels_last): a pixel's channels are neighbours as they are in memory.

template <bool IN_WORDS, class T> struct LoadedWord { using Type = T; };
template <class T> struct LoadedWord<true, T> { using Type = u32; };

template <class C_>
struct DirectTile {
using C = C_;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;
using Pack = typename Scalar::Pack;
static constexpr int VEC = Scalar::VEC;
static constexpr int ELEMENT = sizeof(T);
static constexpr bool BY_CHANNELS = C::lanes_are_channels;

static constexpr int FROM = C::groups * C::from_g, TO = C::groups * C::to_g;  // channels of the source and of the other tensor
static constexpr int LANES = C::lanes, CHANNELS = C::channels, ROWS = C::rows;  // channels of a block's lanes, and of a thread
static constexpr int KERNEL_H = C::kernel_h, KERNEL_W = C::kernel_w, TAPS = C::kernel_h * C::kernel_w;
static constexpr int THREADS = C::threads, WARPS = C::threads / 32, VECTOR = C::vector;
static constexpr int CHUNK = C::chunk;
static constexpr int CHANNEL_BLOCKS = (C::to_g + C::channels - 1) / C::channels;  // there of a group

// The phase of tap `k`, and its source from a cell's first one on.
static __device__ constexpr int phase_of(int k, int stride, int dilation, int padding) {
  return C::forward ? floor_mod(k * dilation - padding, stride) : 0;
}
static __device__ constexpr int shift_of(int k, int stride, int dilation, int padding) {
  return C::forward ? (phase_of(k, stride, dilation, padding) + padding - k * dilation) / stride : k * dilation - padding;
}
static __device__ constexpr int column_of_tap(int k) { return C::first_w + shift_of(k, C::stride_w, C::dilation_w, C::padding_w) - C::min_w; }
static __device__ constexpr int row_of_tap(int k) { return shift_of(k, C::stride_h, C::dilation_h, C::padding_h) - C::min_h; }

// Words of shared memory from row to row of the tile, from channel to channel of a chunk and of all, and where a column of a row lies.
static constexpr int ROW_PITCH = C::in_w * C::plane_pitch;
static constexpr int CHANNEL_WORDS = C::span_h * ROW_PITCH, TILE_WORDS = (C::chunk * CHANNEL_WORDS + 3) / 4 * 4;
static __device__ __forceinline__ constexpr int column_at(int c) {
  return c % C::in_w * C::plane_pitch + c / C::in_w;
}

// Of the source, and of the other tensor, whose cells are divided into tiles.
struct Sizes {
  int batch, from_d, from_h, from_w, d, h, w, tiles_h, tiles_w;
};

struct Tile { int n, d, h, w; };           // first cell

static __device__ __forceinline__ Tile tile_of(u32 index, const Sizes& s) {
  Tile t;
  t.w = index % s.tiles_w * C::tile_w;  index /= s.tiles_w;
  t.h = index % s.tiles_h * C::tile_h;  index /= s.tiles_h;
  t.d = index % s.d;
  t.n = index / s.d;
  return t;
}

// The slice of the source that a tile and a tap along D meet; -1 for none.
static __device__ __forceinline__ int depth_of(int d, int kd, const Sizes& s) {
  int depth = C::forward ? d - kd : d + kd;
  return (u32)depth < (u32)s.from_d ? depth : -1;
}

// The thread's index, anew: else every place of a batch, the same for all tiles, would be kept in registers between them.
static __device__ __forceinline__ int thread_index() {
  int index = threadIdx.x;
  OPAQUE(index);
  return index;
}

// What a thread takes: `rows` cells from (ty, tx) on, and where their first word of the tile lies.
struct Own { int tx, ty, at, mine; };      // mine: its channel, of those of a block
static __device__ __forceinline__ Own own_of(int place, int lane) {
  const int tx = place % C::tile_w, ty = place / C::tile_w * C::rows, mine = lane >= LANES ? LANES - 1 : lane;
  return {tx, ty, ty * C::in_h * ROW_PITCH + tx, mine};
}

// Elements that are loaded together, in words where there are some.
static constexpr bool IN_WORDS = ELEMENT == 2;
struct alignas(C::vector * ELEMENT) Loaded { typename LoadedWord<IN_WORDS, T>::Type v[IN_WORDS ? C::vector / 2 : C::vector]; };
static __device__ __forceinline__ Acc element(const Loaded& unit, int k) {
  if constexpr (!IN_WORDS) {
    return Scalar::value(unit.v[k]);
  } else {
    u32 word = unit.v[k / 2];
    return Scalar::value((T)(k % 2 ? word >> 16 : word & 0xffffu));
  }
}

// Units of a row of the tile: of columns, of all channels of columns (ALL_CHANNELS), or of a block's or a chunk's channels of columns. As many
// rows as they fit into the threads are loaded at a time, and of several channels in NCHW; a thread has the same columns of all.
static constexpr int ROW_UNITS = C::span_w / C::vector, PLANES = C::chunk;
static constexpr int ROUNDS_W = (ROW_UNITS + C::threads - 1) / C::threads, IN_ROWS = C::threads / ROW_UNITS;
static constexpr int ROWS_AT_ONCE = IN_ROWS < C::span_h ? IN_ROWS : C::span_h, IN_PLANES = IN_ROWS / ROWS_AT_ONCE;
static constexpr int PASSES_H = (C::span_h + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, PASSES_C = (C::chunk + IN_PLANES - 1);
static constexpr int BATCH_H = PASSES_H, BATCH_C = C::batch / PASSES_H;

// Where a row's element `at` is in the tile, and in one of the source's rows, and whether that has it; `left`: channels from the tile's
// first on.
struct Place { int to; i64 offset; bool in; };
static __device__ __forceinline__ Place place_in_row(int at, int w, int left, i64 line, const Sizes& s) {
  {
    return {column_at(at), w + at, (u32)(w + at) < (u32)s.from_w};
  }
}

// A unit's elements to shared memory, from that of element `at` of a row on.
static __device__ __forceinline__ void store_unit(Acc* to, const Loaded& unit, int at) {
  constexpr bool EVEN = C::vector % C::in_w == 0;
#pragma unroll
  for (int k = 0; k < C::vector; k++) to[EVEN ? column_at(k) : column_at(at + k) - column_at(at)] = element(unit, k);
}

// What a tile's cells meet of the source at `depth`, of its channels from `channel` on, of which there are `left`, to shared memory; zeros
// beyond the borders. Units are whole where the source lies and its rows end at their multiples; else elements are loaded.
static __device__ __forceinline__ void stage(Acc* tile, const T* source, const Tile& t, int depth, int channel, int left, bool whole, const Sizes& s) {
  const int h = t.h * C::in_h + C::min_h, w = t.w * C::in_w + C::min_w - C::first_w;
  const i64 slice = (i64)s.from_h * s.from_w, pixels = s.from_d * slice, line = (i64)s.from_w;
  const T* from = source + (((i64)t.n * FROM + channel) * pixels + depth * slice);
  const int thread = thread_index(), line_of = thread / ROW_UNITS;
  const int first = line_of % ROWS_AT_ONCE, plane = line_of / ROWS_AT_ONCE;  // of a thread
  if (plane >= IN_PLANES) return;  // the others have nothing to do
#pragma unroll 1
  for (int round = 0; round < ROUNDS_W; round++) {
    const int at = (thread % ROW_UNITS) * C::vector;  // element of a row
    if (whole) {
      const Place in_row = place_in_row(at, w, left, line, s);
#pragma unroll 1
      for (int c = plane; c < C::chunk; c += BATCH_C) {
        const T* place = from + c * pixels + (h + first) * line + in_row.offset;
        Acc* to = tile + c * CHANNEL_WORDS + first * ROW_PITCH + in_row.to;
        int row = h + first;
#pragma unroll 1
        for (int i = 0; i < PASSES_H; i += PASSES_H, row += PASSES_H * ROWS_AT_ONCE, to += PASSES_H * ROWS_AT_ONCE * ROW_PITCH, place += PASSES_H * ROWS_AT_ONCE * line) {
          Loaded unit[BATCH_C][PASSES_H];   // all loads come first: a block waits for memory once in a batch
          const T* of_plane = place;
#pragma unroll
          for (int j = 0; j < BATCH_C; j++, of_plane += pixels) {
            const T* of_row = of_plane;
#pragma unroll
            for (int b = 0; b < PASSES_H; b++, of_row += ROWS_AT_ONCE * line) {
              opaque(of_row);
              unit[j][b] = {};
              const bool exists = in_row.in && (c + j < left) && (u32)(row + b * ROWS_AT_ONCE) < (u32)s.from_h;
              if (exists) unit[j][b] = *(const Loaded*)of_row;
            }
          }
          loads_ahead();
#pragma unroll
          for (int j = 0; j < BATCH_C; j++)
#pragma unroll
            for (int b = 0; b < PASSES_H; b++) {
              if ((C::span_h % ROWS_AT_ONCE) && row + b * ROWS_AT_ONCE >= h + C::span_h) continue;
              if (c + j >= C::chunk) continue;
              store_unit(to + j * CHANNEL_WORDS + b * ROWS_AT_ONCE * ROW_PITCH, unit[j][b], at);
            }
        }
      }
    } else {
#pragma unroll 1
      for (int c = plane; c < C::chunk; c += IN_PLANES)
#pragma unroll 1
        for (int row = first; row < C::span_h; row += ROWS_AT_ONCE)
#pragma unroll
          for (int k = 0; k < C::vector; k++) {
            const Place place = place_in_row(at + k, w, left, line, s);
            const bool exists = place.in && (c < left) && (u32)(h + row) < (u32)s.from_h;
            tile[c * CHANNEL_WORDS + row * ROW_PITCH + place.to] = exists ? Scalar::value(from[c * pixels + (h + row) * line + place.offset]) : 0;
          }
    }
  }
}
};

// The forward and the gradient for the input on CUDA cores: depthwise layers, few channels and float64.
//
//   forward  out[n, co, o] = bias[co] + sum over ci of the group and taps of in[n, ci, i] * w[ci, co, tap],  o = i * stride + tap * dilation - padding
//   dX       gi[n, ci, i]  =            sum over co of the group and taps of g[n, co, o] * w[ci, co, tap]
//
// A block computes some channels of a tile of cells, a thread those of `rows` cells. For each chunk of the source's channels and
// tap along D the tile and the slice's weights come to shared memory. A cell of the forward has outputs of all phases, so every tap is
// unrolled.
//
// Stores. A lane's neighbouring results are a run. Where a run is one vector a lane stores it. Else runs go through shared memory,
// so that lanes store neighbours; stored as they are, or exchanged by pairs of lanes, they take more than twice as long.

template <class C_>
struct Direct : DirectTile<C_> {
using C = C_;
using Base = DirectTile<C>;
using typename Base::Scalar; using typename Base::T; using typename Base::Acc; using typename Base::Pack;
using typename Base::Sizes; using typename Base::Tile; using typename Base::Own;
using Base::VEC; using Base::ELEMENT; using Base::BY_CHANNELS; using Base::TO; using Base::LANES; using Base::CHANNELS; using Base::ROWS; using Base::CHUNK;
using Base::KERNEL_H; using Base::KERNEL_W; using Base::THREADS; using Base::CHANNEL_BLOCKS;
using Base::ROW_PITCH; using Base::column_at; using Base::thread_index;
static constexpr int CIN_G = C::forward ? C::from_g : C::to_g, COUT_G = C::forward ? C::to_g : C::from_g;
static constexpr int CELL_H = C::out_h, CELL_W = C::out_w;  // results of a cell

static constexpr int WEIGHTS = (C::channels + VEC - 1) / VEC * VEC;
static __device__ __forceinline__ constexpr int tap_at(int kh, int kw) {
  return (kw * C::kernel_h + kh) * WEIGHTS;
}
static constexpr int SLICE_WORDS = C::kernel_h * C::kernel_w * WEIGHTS;  // of a channel of the source
static constexpr int TAP_WORDS = C::kernel_h * C::kernel_w * WEIGHTS;               // without gaps
static constexpr int TAP_BATCH = (C::chunk * TAP_WORDS + C::threads - 1) / C::threads;

// What a block computes: channels (lanes_are_channels: from `channel` on; else of `group`) of a tile.
struct Item {
  Tile tile;
  int group, channel;
};

static __device__ __forceinline__ Item item_of(u32 index, const Sizes& s) {
  Item item;
  const int block = index % CHANNEL_BLOCKS;  index /= CHANNEL_BLOCKS;
  item.group = 0;
  item.channel = block * C::channels;
  {
    // A channel's tiles are neighbours: what their halos share comes from L2.
    const u32 tiles = s.tiles_w * s.tiles_h * s.d;
    item.group = index / tiles % C::groups;
    item.tile = Base::tile_of(index % tiles, s);
    item.tile.n = index / tiles / C::groups;
  }
  return item;
}

// A slice's weights, of the source's channels from `from` on.
static __device__ __forceinline__ void load_weights(T (&v)[TAP_BATCH], const T* weight, const Item& item, int from, int kd) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < TAP_BATCH; b++) {
    const int i = thread + b * C::threads, source = from + i / TAP_WORDS, tap = i % TAP_WORDS / WEIGHTS;
    const int own = i % WEIGHTS, to = item.channel + own;
    const bool exists = source < C::from_g && (own < C::channels && to < C::to_g);
    const i64 in = item.group * CIN_G + (C::forward ? source : to);
    const i64 row = in * COUT_G + (C::forward ? to : source);
    v[b] = 0;
    if (i < C::chunk * TAP_WORDS && exists) v[b] = weight[(row + kd) * (C::kernel_h * C::kernel_w) + tap];
  }
}

static __device__ __forceinline__ void store_weights(Acc* weights, const T (&v)[TAP_BATCH]) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < TAP_BATCH; b++) {
    const int i = thread + b * C::threads, tap = i % TAP_WORDS / WEIGHTS;
    if (i < C::chunk * TAP_WORDS) weights[i / TAP_WORDS * SLICE_WORDS + tap_at(tap / C::kernel_w, tap % C::kernel_w) + i % WEIGHTS] = Scalar::value(v[b]);
  }
}

// A tap's weights of a thread.
static __device__ __forceinline__ void read_weights(Acc (&w)[WEIGHTS], const Acc* from, int mine) {
  if constexpr (WEIGHTS == 1) {
    w[0] = from[0];
  } else {
#pragma unroll
    for (int i = 0; i < WEIGHTS; i += VEC) {
      const Pack pack = *(const Pack*)(from + i);
#pragma unroll
      for (int k = 0; k < VEC; k++) w[i + k] = pack.v[k];
    }
  }
}

using Sums = Acc[ROWS][CELL_H][CELL_W][CHANNELS];

// A slice's products: a column of taps after the other, whose rows of the tile stay in registers where they are unrolled.
static __device__ __forceinline__ void multiply(Sums& sum, const Acc* tile, const Acc* weights, const Own& own) {
#pragma unroll C::unroll_w
  for (int kw = 0; kw < C::kernel_w; kw++) {
    const int u = Base::phase_of(kw, C::stride_w, C::dilation_w, C::padding_w);
    const Acc* column = tile + own.at + column_at(Base::column_of_tap(kw));
#pragma unroll C::unroll_h
    for (int kh = 0; kh < C::kernel_h; kh++) {
      const int t = Base::phase_of(kh, C::stride_h, C::dilation_h, C::padding_h);
      Acc w[WEIGHTS];
      read_weights(w, weights + tap_at(kh, kw), own.mine);
#pragma unroll
      for (int r = 0; r < C::rows; r++) {
        const Acc v = column[(r * C::in_h + Base::row_of_tap(kh)) * ROW_PITCH];
#pragma unroll
        for (int c = 0; c < C::channels; c++) sum[r][t][u][c] = multiply_add(v, w[c], sum[r][t][u][c]);
      }
    }
  }
}

static constexpr int RUNS = C::out_w * C::channels / C::out_w;    // of a row of a cell
static constexpr int POWER = C::out_w & -C::out_w, OF_16 = 16 / ELEMENT;
static constexpr int WIDE = POWER < OF_16 ? POWER : OF_16, LINES = C::out_w / WIDE;
struct alignas(WIDE * sizeof(T)) Line { T v[WIDE]; };

// Where line `at` of a warp's is in its buffer: eight lanes that write meet eight different places of 128 bytes.
static __device__ __forceinline__ int swizzled(int at) { return LINES % 2 ? at : at ^ (at >> 3 & (LINES - 1 & 7)); }

// A warp's runs, UNIT (WIDE or 1) elements a lane and store: element e of a lane's goes to `place` + e, if that is before `left`.
template <int UNIT>
static __device__ __forceinline__ void store_turned(T* out, const Line* buffer, i64 place, int left, int lane) {
  constexpr int UNITS = C::out_w / UNIT;        // of a lane
#pragma unroll
  for (int k = 0; k < UNITS; k++) {
    const int at = k * 32 + lane, element = at % UNITS * UNIT;
    const i64 of = __shfl_sync(0xffffffffu, place, at / UNITS);
    const int room = __shfl_sync(0xffffffffu, left, at / UNITS);
    const Line& line = buffer[swizzled(at / UNITS * LINES + element / WIDE)];
    if (element >= room) continue;
    if (UNIT == WIDE) *(Line*)(out + of + element) = line;
    else out[of + element] = line.v[element % WIDE];
  }
}

// A lane's run to `place`, of which the result has `left` elements. `whole`: runs begin at multiples of a line.
static __device__ __forceinline__ void store_run(T* out, const Line (&line)[LINES], i64 place, int left, bool whole, Line* buffer, int lane) {
  if constexpr (LINES == 1) {
    if (whole && left >= C::out_w) *(Line*)(out + place) = line[0];
    if (whole && left >= C::out_w) return;
#pragma unroll
    for (int e = 0; e < C::out_w; e++)
      if (e < left) out[place + e] = line[0].v[e];
  } else {
    __syncwarp();
#pragma unroll
    for (int k = 0; k < LINES; k++) buffer[swizzled(lane * LINES + k)] = line[k];
    __syncwarp();
    if (whole) store_turned<WIDE>(out, buffer, place, left, lane);
    else store_turned<1>(out, buffer, place, left, lane);
  }
}

static __device__ __forceinline__ void store(T* out, const Sums& sum, const T* bias, const Item& item, const Own& own, Line* buffer, int lane, const Sizes& s) {
  const Tile& t = item.tile;
  const bool whole = (unsigned long long)out % sizeof(Line) == 0 && (s.w) % WIDE == 0;
  const int first = item.group * C::to_g + item.channel;  // channel
  const int channels = C::to_g - item.channel;
  const i64 plane = (i64)s.h * s.w, channel_step = s.d * plane;
  T* to = out + (((i64)t.n * TO + first) * channel_step + t.d * plane);
  opaque(to);
  Acc start[C::channels];
#pragma unroll
  for (int c = 0; c < C::channels; c++) start[c] = bias && c < channels ? Scalar::value(bias[first + c]) : Acc(0);
#pragma unroll
  for (int r = 0; r < C::rows; r++)
#pragma unroll
    for (int y = 0; y < C::out_h; y++) {
      const int row = (t.h + own.ty + r) * C::out_h + y;
#pragma unroll
      for (int k = 0; k < RUNS; k++) {
        const int column = (t.w + own.tx) * C::out_w, ahead = k;  // channels
        Line line[LINES];
#pragma unroll
        for (int e = 0; e < C::out_w; e++) {
          const int c = k, x = e;
          line[e / WIDE].v[e % WIDE] = Scalar::stored(sum[r][y][x][c] + start[c]);
        }
        const int exists = s.w - column;
        const int left = row < s.h && column < s.w && ahead < channels ? exists : 0;
        store_run(to, line, ((i64)row * s.w + column) + ahead * channel_step, left, whole, buffer, lane);
      }
    }
}

static __device__ __forceinline__ void run(unsigned char* memory, const T* __restrict__ source, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ out, const Sizes& s, bool whole_units) {
  Acc *tile = (Acc*)memory, *weights = tile + Base::TILE_WORDS;
  const int lane = threadIdx.x & 31;
  const Own own = Base::own_of(threadIdx.x, lane);
  const Item item = item_of(blockIdx.x, s);
  Sums sum = {};
#pragma unroll 1
  for (int slice = 0; slice < (C::from_g + C::chunk - 1) / C::chunk; slice++) {
    const int from = slice * C::chunk, kd = 0, depth = Base::depth_of(item.tile.d, kd, s);
    if (depth < 0) continue;
    const int channel = item.group * C::from_g + from, left = C::from_g - from;
    T taps[TAP_BATCH];
    load_weights(taps, weight, item, from, kd);
    __syncthreads();                       // the slice before has been read
    Base::stage(tile, source, item.tile, depth, channel, left, whole_units, s);
    store_weights(weights, taps);
    __syncthreads();
#pragma unroll 1
    for (int c = 0; c < C::chunk && c < left; c++) multiply(sum, tile + c * Base::CHANNEL_WORDS, weights + c * SLICE_WORDS, own);
  }
  if (LINES > 1) __syncthreads();          // the last slice has been read
  store(out, sum, bias, item, own, (Line*)memory + threadIdx.x / 32 * (32 * LINES), lane, s);
}
};

template <class C>
__global__ void __launch_bounds__(C::threads, C::min_blocks)
direct(const typename Direct<C>::T* __restrict__ source, const typename Direct<C>::T* __restrict__ weight, const typename Direct<C>::T* __restrict__ bias,
       typename Direct<C>::T* __restrict__ out, int batch, int from_d, int from_h, int from_w, int d, int h, int w, int tiles_h, int tiles_w, int whole_units) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Direct<C>::run(memory, source, weight, bias, out, {batch, from_d, from_h, from_w, d, h, w, tiles_h, tiles_w}, whole_units);
}

// What both grad-weight kernels share: the geometry of g's tile, a block's record of sums, and copies by threads.
//
// Rows of x and g in a chunk follow from tile, taps, step (the stride) and dilation; the sets of taps differ only in where their
// chunks begin.

// Channels are a group's.
template <class C_>
struct WgradShape {
using C = C_;
using Number = NumberOf<C::precision>;
using Bits = typename Number::Bits;

static constexpr int ELEMENT = 4;
static constexpr int VEC = 16 / 4;                // elements of a 16-byte unit
static constexpr int TAPS = C::kernel_h * C::kernel_w;
static constexpr int SET_TAPS = C::taps_h * C::taps_w;
static constexpr int CIN = C::groups * C::cin;
static constexpr int COUT = C::groups * C::cout;

// A block's sums, [tap][ci][co], with pitches by which a warp's fragments meet all banks of shared memory: neighbours along co lie in a
// row, and ci of neighbouring lanes 2 rows apart, 8 banks. Taps lie 8 banks apart.
static constexpr int SUMS_PITCH = C::block_co + 4;
static constexpr int SUMS_OF_TAP = C::block_ci * SUMS_PITCH + 8;
static constexpr int SUMS_BYTES = SET_TAPS * SUMS_OF_TAP * 4;
static __device__ __forceinline__ int sum_at(int tap, int ci, int co) { return (tap * SUMS_OF_TAP + ci * SUMS_PITCH + co) * 4; }

static constexpr int CLASS_ROWS = (C::g_rows_h + C::row_classes - 1);
static constexpr int G_BYTES = CLASS_ROWS * C::block_co * C::g_pitch * 4;

struct Sizes {
  int batch, in_d, in_h, in_w;             // gapless: of a chunk, which has tile_w pixels at most
  int out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;           // chunks per axis
  int chunks, per_split;                   // all of them; of one split
};

struct Chunk { int n, d, h, w; };          // its first place

struct Work {                              // of a block
  int group, ci, co;                       // first channels within the group
  int tap_d, tap_h, tap_w;                 // first tap of the set
};

static __device__ __forceinline__ Chunk chunk_at(int i, const Sizes& s) {
  Chunk c;
  c.w = i % s.tiles_w * C::tile_w;  i /= s.tiles_w;
  c.h = i % s.tiles_h * C::tile_h;  i /= s.tiles_h;
  c.d = i % s.tiles_d;
  c.n = i / s.tiles_d;
  return c;
}

// Where g's tile of a chunk begins.
static __device__ __forceinline__ Chunk in_g(const Chunk& c, const Work& work) {
  return {c.n, c.d + work.tap_d, c.h * C::step_h + work.tap_h * C::dilation_h - C::padding_h,
          c.w * C::step_w + work.tap_w - C::padding_w};
}

// Of a block; the split that it takes. Blocks of the same pixels are neighbours, for L2's sake.
static __device__ __forceinline__ int take_work(Work& work, int index) {
  work.co = 0;  work.ci = 0;  work.group = index % C::groups;
  work.tap_w = 0;
  work.tap_h = 0;
  work.tap_d = 0;
  return index / C::groups;
}

// (n, d, h) of row `r` of positions, or of g's tile in its tensor.
struct Rows { int n, d, h; };
static __device__ __forceinline__ Rows q_row(int r) { return {r / C::tile_h, 0, r % C::tile_h}; }
static __device__ __forceinline__ Rows g_row(int r) { return {r / C::g_rows_h, 0, r % C::g_rows_h * C::apart_h}; }
};

// --- copies by threads -----------------------------------------------------------------------------------------------

struct WgradMemory { int batch, d, h, w; };             // a tensor

// g's tile of a WgradShape S, as threads copy it.
template <class S>
struct WgradG {
  using C = typename S::C;
  static constexpr int ROWS = S::CLASS_ROWS, ROWS_H = C::g_rows_h, BLOCK = C::block_co, CHANNELS = S::COUT, OF_GROUP = C::cout;
  static constexpr int COLUMNS = C::g_columns, UNITS = C::g_units, PITCH = C::g_pitch, APART_H = C::apart_h;
  static __device__ __forceinline__ typename S::Rows row(int r) { return S::g_row(r); }
};

// The tile of an operand by so many threads. `at`: where it begins in the tensor; `channel`, of which `left` are the group's.
template <class S, class Operand, int COPIERS>
struct WgradCopies {
using Bits = typename S::Bits;
using Rows = typename S::Rows;
using Place = typename S::Chunk;
static constexpr int ELEMENT = 4, VEC = S::VEC, BLOCK = Operand::BLOCK, PITCH = Operand::PITCH, CHANNELS = Operand::CHANNELS;

// NCHW: [row][channel][column]. A unit that holds the left border is copied whole; `clear_left` clears what lies before it when it has
// landed. Copies in parts of 4 bytes, by some of a warp's threads each time, take nearly three times as long.
// A thread keeps its channel and place in the row for all rows of the tile: an index for each unit makes address arithmetic the bound.
static __device__ __forceinline__ void copy_rows(const char* __restrict__ tensor, const WgradMemory& memory, const Place& at, int channel, int left, unsigned char* to, int thread) {
  u32 to_address = shared_address(to);
  constexpr int UNITS = Operand::UNITS, ROWS_H = Operand::ROWS_H;
  long long plane = (long long)memory.d * memory.h * memory.w;
#pragma unroll 1
  for (int i = thread; i < BLOCK * UNITS; i += COPIERS) {
    int unit = i % UNITS, c = i / UNITS;
    u32 offset = (c * PITCH + unit * VEC) * 4;
#pragma unroll 1
    for (int r = 0; r < Operand::ROWS / ROWS_H; r++) {
      Rows of = Operand::row(r * ROWS_H);
      int n = at.n + of.n, d = at.d + of.d;
      bool slice = n < memory.batch && (u32)d < (u32)memory.d && c < left;
      const char* base = tensor + (((long long)n * CHANNELS + channel + c) * plane + (long long)d * memory.h * memory.w + at.w) * 4;
#pragma unroll 2
      for (int rh = 0; rh < ROWS_H; rh++, offset += BLOCK * PITCH * 4) {
        int h = at.h + rh * Operand::APART_H;
        const char* from = base + (long long)h * memory.w * 4;
        int misaligned = (int)((u64)from & 15), first = at.w + (unit * 16 - misaligned) / 4;  // column of the first element
        from += unit * 16 - misaligned;
        bool in = slice && (u32)h < (u32)memory.h && first + VEC > 0 && first < memory.w;
        const int have = memory.w - first < VEC ? memory.w - first : VEC;
        copy16(to_address + offset, in ? from : tensor, in ? have * 4 : 0);
      }
    }
  }
}

// NCHW, of rows that begin before column 0: clears the elements before it in the unit that holds it.
static __device__ __forceinline__ void clear_left(const char* tensor, const WgradMemory& memory, const Place& at, int channel, unsigned char* to, int thread) {
  u32 plane = (u32)memory.d * memory.h * memory.w;
#pragma unroll 1
  for (int i = thread; i < Operand::ROWS * BLOCK; i += COPIERS) {
    int c = i % BLOCK, row = i / BLOCK;
    Rows of = Operand::row(row);
    u32 first = (u32)((u64)tensor / 4) + ((u32)(at.n + of.n) * CHANNELS + channel + c) * plane + ((u32)(at.d + of.d) * memory.h + at.h + of.h) * memory.w + at.w;
    const int zero = (int)(first & (VEC - 1)) - at.w;  // the element of column 0
    Bits* line = (Bits*)(to + (row * BLOCK + c) * PITCH * 4);
    if (zero < Operand::UNITS * VEC)
      for (int e = zero & ~(VEC - 1); e < zero; e++) line[e] = 0;
  }
}
};

// Matrix instructions, by a kernel's precision P.

// --- mma.sync: one warp, D[16 x 8] += A[16 x K] B[K x 8] of 32 bytes of K -------------------------------------------------

#define MMA_OF(shape, types) \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." types ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// Lane (g, t): D[2h + c] is row g + 8h, column 2t + c.
template <int P>
__device__ __forceinline__ void mma_of(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  MMA_OF("m16n8k8", "tf32.tf32");
}

// Grad-weight on tensor cores: dW[ci, co, tap] = sum over images and positions q of x[ci, q] * g[co, q * step + tap * dilation - padding].
//
// A GEMM whose K is the pixels: M = block_ci input channels, N = block_co output channels, one accumulator for each tap of a set
// (taps_d x taps_h x taps_w neighbouring taps). A block takes a tile of channels, a set of taps and a range of pixel tiles
// (tile_n x tile_d x tile_h x tile_w positions q, a "chunk"): x's tile and g's with the halo of the set are copied to shared
// memory once and serve all taps of the set. mma.sync takes both operands from registers, so that a tap may begin at any
// column: fragments of x are read once a step and meet those of every tap.
//
// Shared memory: NCHW [row][channel][column], channels_last [row][column][channel]; pitches keep the eight rows of a fragment in
// different banks. Copies of 16 bytes (cp.async), two stages. NCHW rows of any alignment: the 16-byte units of memory that
// hold them are copied, and a row then begins (address % 16) bytes into its place.
//
// K is split over ranges of chunks and WARPS_K warps; each leaves a record of its sums, which `reduce` adds.

template <class C_>
struct WgradSync {
using C = C_;
using S = WgradShape<C>;
using Number = typename S::Number;
using Sizes = typename S::Sizes;
using Chunk = typename S::Chunk;
using Work = typename S::Work;
using Rows = typename S::Rows;

static constexpr int ELEMENT = 4, VEC = S::VEC;
static constexpr int WARPS = 8, THREADS = WARPS * 32;
static constexpr int WARPS_N = C::block_co / C::warp_n;
static constexpr int WARPS_K = WARPS / WARPS_N;
static constexpr int M_FRAGMENTS = C::warp_m / 16;
static constexpr int N_FRAGMENTS = C::warp_n / 8;
static constexpr int X_BYTES = C::tile_h * C::block_ci * C::x_pitch * 4;
static constexpr int STAGE_BYTES = X_BYTES + S::G_BYTES;

static constexpr int W_STRIPS = C::tile_w / 8;          // a strip is 8 columns of a row
static constexpr int STRIPS = C::tile_h * W_STRIPS;

using Sums = float[S::SET_TAPS][M_FRAGMENTS][N_FRAGMENTS][4];

struct X {                                              // as threads copy it
  static constexpr int ROWS = C::tile_h, ROWS_H = C::tile_h, BLOCK = C::block_ci, CHANNELS = S::CIN, OF_GROUP = C::cin;
  static constexpr int COLUMNS = C::tile_w, UNITS = C::x_units, PITCH = C::x_pitch, APART_H = 1;
  static __device__ __forceinline__ Rows row(int r) { return S::q_row(r); }
};
using CopiesX = WgradCopies<S, X, THREADS>;
using CopiesG = WgradCopies<S, WgradG<S>, THREADS>;

static __device__ __forceinline__ WgradMemory x_memory(const Sizes& s) { return {s.batch, s.in_d, s.in_h, s.in_w}; }
static __device__ __forceinline__ WgradMemory g_memory(const Sizes& s) { return {s.batch, s.out_d, s.out_h, s.out_w}; }

static __device__ __forceinline__ void copy_chunk(const char* __restrict__ x, const char* __restrict__ g, const Sizes& s, const Chunk& c, const Work& work, unsigned char* stage, int thread) {
  const Chunk at = S::in_g(c, work);
  const int x_channel = work.group * C::cin + work.ci, g_channel = work.group * C::cout + work.co;
  CopiesX::copy_rows(x, x_memory(s), c, x_channel, C::cin - work.ci, stage, thread);
  CopiesG::copy_rows(g, g_memory(s), at, g_channel, C::cout - work.co, stage + X_BYTES, thread);
}

// --- multiplications -------------------------------------------------------------------------------------------------

struct Lane {                              // of a warp
  int lane, g, q;                          // row of a fragment, place in it
  int m, n, k;                             // the warp's first channels of the block, its part of K
  u32 x_phase, g_phase;                    // NCHW: elements by which row g of a chunk's tiles is misaligned, before a row's own share
};

struct Half {                              // of a step's K
  Rows q;
  int column, x_at;                        // of q; where it lies in x's tile
};

static __device__ __forceinline__ Half half_of(int step, int k, const Sizes& s, u32 x_phase) {
  const int strip = step, row = strip / W_STRIPS, column = strip % W_STRIPS * 8 + (4 * k);
  const Rows q = S::q_row(row);
  const int phase = (x_phase + ((u32)(q.n * S::CIN) * s.in_d + q.d) * s.in_h * s.in_w + q.h * s.in_w) & (VEC - 1);
  return {q, column, row * C::block_ci * C::x_pitch + column + phase};
}

// Where a half begins in g's tile for a row of taps.
static __device__ __forceinline__ int g_at(const Half& half, int td, int th, const Sizes& s, u32 g_phase) {
  const Rows& q = half.q;
  const int row = (q.n + q.d + td) * C::g_rows_h + q.h + th;
  const int d = q.d + td, h = q.h * C::step_h + th * C::dilation_h;
  const int phase = (g_phase + ((u32)(q.n * S::COUT) * s.out_d + d) * s.out_h * s.out_w + (u32)h * s.out_w) & (VEC - 1);
  return row * C::block_co * C::g_pitch + half.column * C::step_w + phase;
}

// NCHW: element e; of 16 bits elements e and e + step, as the two halves of a word.
static __device__ __forceinline__ u32 element_pair(const u32* words, int e, int step) {
  return words[e];
  int f = e + step;
  u32 selector = (e & 1 ? 0x32u : 0x10u) | (f & 1 ? 0x7600u : 0x5400u);
  return __byte_perm(words[e >> 1], words[f >> 1], selector);
}

// A register of a fragment in its parts: of IEEE float32 what TF32 has, and what it leaves.
template <int REGISTERS>
static __device__ __forceinline__ void set_parts(u32 (&parts)[2][REGISTERS], int r, u32 v) {
  parts[0][r] = to_tf32_quick(__uint_as_float(v));
  parts[1][r] = low_part(__uint_as_float(v), parts[0][r]);
}

static __device__ __forceinline__ void load_x(u32 (&a)[M_FRAGMENTS][2][4], const unsigned char* stage, const Half (&half)[2], const Lane& of) {
  const u32* xs = (const u32*)stage;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      int m = of.m + (r & 1) * 8 + of.g, k = r >> 1;
      u32 v;
      v = element_pair(xs, half[k].x_at + m * C::x_pitch + (of.q), 1);
      set_parts(a[0], r, v);
    }
}

static __device__ __forceinline__ void load_g(u32 (&b)[N_FRAGMENTS][2][2], const unsigned char* stage, const int (&base)[2], int tw, const Lane& of) {
  const u32* gs = (const u32*)(stage + X_BYTES);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int n = of.n + of.g;
      u32 v;
      v = element_pair(gs, base[k] + n * C::g_pitch + (of.q) * C::step_w + tw, C::step_w);
      set_parts(b[0], k, v);
    }
}

static __device__ __forceinline__ void multiply(float (&acc)[M_FRAGMENTS][N_FRAGMENTS][4], const u32 (&a)[M_FRAGMENTS][2][4], const u32 (&b)[N_FRAGMENTS][2][2]) {
  {
      // the small products first
        mma_of<C::precision>(acc[0][0], a[0][1], b[0][0][0], b[0][0][1]);
        mma_of<C::precision>(acc[0][0], a[0][0], b[0][1][0], b[0][1][1]);
      mma_of<C::precision>(acc[0][0], a[0][0], b[0][0][0], b[0][0][1]);
    }
}

// One chunk of a stage: all its steps that are this warp's.
static __device__ __forceinline__ void multiply_chunk(Sums& acc, const unsigned char* stage, const Sizes& s, const Lane& of) {
#pragma unroll 1
  for (int step = of.k; step < STRIPS; step += WARPS_K) {
    const Half half[2] = {half_of(step, 0, s, of.x_phase), half_of(step, 1, s, of.x_phase)};
    u32 a[M_FRAGMENTS][2][4];
    load_x(a, stage, half, of);
#pragma unroll
      for (int th = 0; th < C::taps_h; th++) {
        const int base[2] = {g_at(half[0], 0, th, s, of.g_phase), g_at(half[1], 0, th, s, of.g_phase)};
#pragma unroll
        for (int tw = 0; tw < C::taps_w; tw++) {
          u32 b[N_FRAGMENTS][2][2];
          load_g(b, stage, base, tw, of);
          multiply(acc[th * C::taps_w + tw], a, b);
        }
      }
  }
}

// --- a block ---------------------------------------------------------------------------------------------------------

// NCHW: what lies before the border of a chunk's tile of g, and how rows of both tiles are misaligned.
static __device__ __forceinline__ void begin_rows(Lane& of, const char* x, const char* g, const Sizes& s, const Chunk& c, const Work& work, unsigned char* stage, int thread) {
  const Chunk at = S::in_g(c, work);
  const int first_x = work.group * C::cin + work.ci, first_g = work.group * C::cout + work.co;
  if (at.w < 0) {
    CopiesG::clear_left(g, g_memory(s), at, first_g, stage + X_BYTES, thread);
    __syncthreads();
  }
  // Rows 8 channels apart have the same alignment, so that a lane has one for each row of a tile.
  int channel_x = first_x + of.g, channel_g = first_g + of.g;
  of.x_phase = (u32)((u64)x / 4) + (((u32)c.n * S::CIN + channel_x) * s.in_d + c.d) * s.in_h * s.in_w + (u32)c.h * s.in_w + c.w;
  of.g_phase = (u32)((u64)g / 4) + (((u32)c.n * S::COUT + channel_g) * s.out_d + at.d) * s.out_h * s.out_w + (u32)at.h * s.out_w + at.w;
}

// The warp's part of its record: each part of K has one.
static __device__ __forceinline__ void store(const Sums& sums, char* records, const Lane& of) {
  char* record = records + ((long long)(blockIdx.x / C::groups * WARPS_K + of.k) * C::groups + blockIdx.x % C::groups) * S::SUMS_BYTES;
#pragma unroll
  for (int tap = 0; tap < S::SET_TAPS; tap++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float* pair = &sums[tap][0][0][2 * h];
          *(float2*)(record + S::sum_at(tap, of.m + of.g + 8 * h, of.n + 2 * of.q)) = make_float2(pair[0], pair[1]);
        }
}

static __device__ __forceinline__ void run(const char* __restrict__ x, const char* __restrict__ g, char* __restrict__ records, const Sizes& s, unsigned char* memory) {
  Work work;
  int split = S::take_work(work, blockIdx.x);
  int thread = threadIdx.x, warp = __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31;
  Lane of = {lane, lane >> 2, lane & 3, warp / (WARPS_K * WARPS_N) * C::warp_m, warp / WARPS_K % WARPS_N * C::warp_n, warp % WARPS_K, 0, 0};
  int begin = split * s.per_split, end = begin + s.per_split < s.chunks ? begin + s.per_split : s.chunks;

  Sums acc = {}, sum = {};
  if (begin < end) copy_chunk(x, g, s, S::chunk_at(begin, s), work, memory, thread);
  copy_commit();
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    unsigned char* stage = memory + ((i - begin) & 1) * STAGE_BYTES;
    if (i + 1 < end) copy_chunk(x, g, s, S::chunk_at(i + 1, s), work, memory + ((i + 1 - begin) & 1) * STAGE_BYTES, thread);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    begin_rows(of, x, g, s, S::chunk_at(i, s), work, stage, thread);
    multiply_chunk(acc, stage, s, of);
#pragma unroll
    for (int e = 0; e < (int)(sizeof(Sums) / 4); e++) {
      (&sum[0][0][0][0])[e] += (&acc[0][0][0][0])[e];
      (&acc[0][0][0][0])[e] = 0.f;
    }
    __syncthreads();
  }
  store(sum, records, of);
}
};

template <class C>
__global__ void __launch_bounds__(WgradSync<C>::THREADS, 1)
wgrad(const char* __restrict__ x, const char* __restrict__ g, char* __restrict__ records, int batch, int in_d, int in_h, int in_w,
      int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split) {
  extern __shared__ __align__(1024) unsigned char memory[];
  WgradSync<C>::run(x, g, records, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split}, memory);
}

// Adds records of sums, [split][tile][tap][ci][co] (WgradShape). A lane has a sum, a warp of eight every eighth split.
template <class C>
__global__ void __launch_bounds__(256)
add_records(const float* __restrict__ records, typename WgradShape<C>::Bits* __restrict__ weight, int splits) {
  using S = WgradShape<C>;
  constexpr int SUMS = S::SUMS_BYTES / 4;
  __shared__ float parts[8][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = blockIdx.x * 32 + lane;
  float sum = 0;
#pragma unroll 4
  for (int i = warp; i < splits && index < C::groups * SUMS; i += 8) sum += records[(long long)i * (C::groups * SUMS) + index];
  parts[warp][lane] = sum;
  __syncthreads();
  typename S::Work work;
  S::take_work(work, index / SUMS);
  const int tap = index % SUMS / S::SUMS_OF_TAP, ci = index % SUMS % S::SUMS_OF_TAP / S::SUMS_PITCH, co = index % SUMS % S::SUMS_OF_TAP % S::SUMS_PITCH;
  const int kd = work.tap_d + tap / (C::taps_h * C::taps_w), kh = work.tap_h + tap / C::taps_w % C::taps_h, kw = work.tap_w + tap % C::taps_w;
  const bool has = index < C::groups * SUMS && ci < C::block_ci && work.ci + ci < C::cin && co < C::block_co && work.co + co < C::cout;
  if (warp > 0 || !has || kd >= C::kernel_d || kh >= C::kernel_h || kw >= C::kernel_w) return;
  for (int i = 1; i < 8; i++) sum += parts[i][lane];
  const long long row = (work.group * C::cin + work.ci + ci) * C::cout + work.co + co;
  weight[row * S::TAPS + (kd * C::kernel_h + kh) * C::kernel_w + kw] = S::Number::bits(sum);
}

// --- constants: forward ----------------------------------------------------------------------------------------------

struct Forward {
  static constexpr int kernel_d = 1, kernel_h = 3, kernel_w = 5, stride_h = 2, stride_w = 3, dilation_h = 2;
  static constexpr int dilation_w = 1, padding_h = 1, padding_w = 2, precision = 1, lanes = 1, groups = 4, from_g = 8;
  static constexpr int to_g = 16, tile_h = 4, tile_w = 128, rows = 2, channels = 4, chunk = 8, in_h = 1, in_w = 1;
  static constexpr int out_h = 2, out_w = 3, min_h = -1, min_w = 0, span_h = 6, span_w = 132, first_w = 0;
  static constexpr int plane_pitch = 132, vector = 4, batch = 5, threads = 256, min_blocks = 2, unroll_h = 3;
  static constexpr int unroll_w = 5;
  static constexpr bool forward = true, lanes_are_channels = false;
};

// --- constants: gradient for the input -------------------------------------------------------------------------------

struct GradInput : Forward {
  static constexpr int from_g = 16, to_g = 8, tile_h = 32, tile_w = 32, rows = 8, channels = 8, chunk = 4, in_h = 2;
  static constexpr int in_w = 3, out_h = 1, out_w = 1, min_w = -2, span_h = 67, span_w = 100, first_w = 2;
  static constexpr int plane_pitch = 34, batch = 20, threads = 128, unroll_w = 1;
  static constexpr bool forward = false;
};

// --- constants: gradient for the weight ------------------------------------------------------------------------------

struct GradWeight {
  static constexpr int precision = 1, groups = 4, cin = 8, cout = 16, block_ci = 16, block_co = 16, g_columns = 98;
  static constexpr int g_units = 26, g_pitch = 108, kernel_d = 1, kernel_h = 3, step_h = 2, dilation_h = 2;
  static constexpr int padding_h = 1, taps_h = 3, tile_h = 8, kernel_w = 5, step_w = 3, dilation_w = 1, padding_w = 2;
  static constexpr int taps_w = 5, tile_w = 32, g_rows_h = 10, apart_h = 2, warp_m = 16, warp_n = 8, x_units = 9;
  static constexpr int x_pitch = 36, row_classes = 1;
};

}  // namespace kernels

namespace {

// Memory, as whatever pointer a kernel takes.
struct Memory {
  void* at;
  template <typename T>
  operator T*() const { return static_cast<T*>(at); }
};
Memory of(const at::Tensor& t) { return {t.data_ptr()}; }
Memory of(const std::optional<at::Tensor>& t) { return {t ? t->data_ptr() : nullptr}; }

// Lets a kernel have so many bytes of shared memory, more than the 48 KB of the default.
template <typename... Parameters>
int shared(void (*kernel)(Parameters...), int bytes) {
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return bytes;
}

}  // namespace

void forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& out,
             int blocks, const std::array<int, 10>& sizes) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  kernels::direct<kernels::Forward><<<blocks, 256, 27264, stream>>>(of(x), of(weight), of(bias), of(out), sizes[0],
      sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9]);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void grad_input(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& out,
                int blocks, const std::array<int, 10>& sizes) {
  const c10::cuda::CUDAGuard guard(grad.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  kernels::direct<kernels::GradInput><<<blocks, 128, shared(kernels::direct<kernels::GradInput>, 111264), stream>>>(
      of(grad), of(weight), nullptr, of(out), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
      sizes[6], sizes[7], sizes[8], sizes[9]);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void grad_weight(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& out,
                 int blocks, int slices, const std::array<int, 12>& sizes) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor sums = at::empty({int64_t(slices) * 78720}, x.options().dtype(at::kByte));
  kernels::wgrad<kernels::GradWeight><<<blocks, 256, shared(kernels::wgrad<kernels::GradWeight>, 175104), stream>>>(
      of(x), of(grad), of(sums), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7],
      sizes[8], sizes[9], sizes[10], sizes[11]);
  kernels::add_records<kernels::GradWeight><<<615, 256, 0, stream>>>(of(sums), of(out), slices);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
"""


@functools.cache
def build(fast: bool = True):
    """Compiles the fast or the plain kernels and loads them; PyTorch keeps what is compiled in its extensions' folder.

    The first call of ModelNew does it by itself; it takes a minute. Plain ones are for the GPU that there is.

    Raises:
        RuntimeError: one sentence on what is missing, or the compiler's messages.
    """
    compiler = os.environ.get("CXX", "c++").partition(" ")[0]  # options may follow the name
    for missing, what in (
        (torch.version.cuda is None, "need a PyTorch with CUDA, and this one is built without"),
        (cpp_extension.CUDA_HOME is None, "are compiled by nvcc: install the CUDA toolkit or set CUDA_HOME"),
        (not cpp_extension.is_ninja_available(), "are compiled by ninja, which is missing: pip install ninja"),
        (shutil.which(compiler) is None, "are compiled by a C++ compiler, and there is none: set CXX"),
    ):
        if missing:
            raise RuntimeError(f"ModelNew's kernels {what}")
    code = FAST if fast else PLAIN
    functions = re.findall(r"^void (\w+)\((const at::Tensor& [^)]*)\)", code, re.MULTILINE)
    digest = hashlib.sha256(code.encode()).hexdigest()
    return cpp_extension.load_inline(
        name=f"conv_transpose_{digest[:16]}",
        cpp_sources=["#include <array>\n#include <optional>", *(f"void {name}({of});" for name, of in functions)],
        cuda_sources=code,
        functions=[name for name, _ in functions],
        extra_cuda_cflags=["-O3", *(["-gencode=arch=compute_90a,code=sm_90a"] if fast else [])],
    )


# --- how much each kernel is launched with ---------------------------------------------------------------------------
# source and result are (depth, height, width) of what is read and written; of the weight's gradient of input and output


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def output_size(size, kernel, given: Arguments):
    """Of every spatial dimension."""
    axes = zip(size, kernel, *given[:4])
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, more, d in axes)


def full(t: Tensor):
    """(depth, height, width); dimensions that the layer lacks have size 1."""
    return (1,) * (3 - RANK) + tuple(t.shape[2:])


def forward_launch(batch, source, result, processors):
    """(blocks, sizes): a block takes a tile, and what it needs of the source."""
    rows = ceil(result[1], 8)
    columns = ceil(result[2], 384)
    return batch * result[0] * rows * columns * 16, (batch, *source, *result, rows, columns, int(source[2] % 4 == 0))


def grad_input_launch(batch, source, result, processors):
    """(blocks, sizes): a block takes a tile, and what it needs of the source."""
    rows = ceil(result[1], 32)
    columns = ceil(result[2], 32)
    return batch * result[0] * rows * columns * 4, (batch, *source, *result, rows, columns, int(source[2] % 4 == 0))


def grad_weight_launch(batch, source, result, processors):
    """(blocks, slices of sums, sizes): 1 wave of blocks share the chunks of 1x1x8x32 pixels.
    Few chunks have fewer shares: the sums of 21 are added in a chunk's time."""
    tiles_d = source[0]
    tiles_h = ceil(source[1], 8)
    tiles_w = ceil(source[2], 32)
    chunks = batch * tiles_d * tiles_h * tiles_w
    each = max(ceil(chunks, max(1, processors // 4)), math.isqrt(chunks // 21))
    shares = ceil(chunks, each)
    return shares * 4, shares * 4, (batch, *source, *result, tiles_d, tiles_h, tiles_w, chunks, each)


@functools.cache
def processors(device: int) -> int:
    """Multiprocessors of a CUDA device that runs the fast kernels; 0 of another."""
    properties = torch.cuda.get_device_properties(device)
    have = properties.major, properties.minor
    return properties.multi_processor_count if have == CAPABILITY else 0


def plain_layer(x: Tensor, weight: Tensor, y: Tensor, given: Arguments):
    """The numbers of the plain kernels' Layer; dimensions that the layer lacks have size 1."""
    axes = (x.shape[2:], y.shape[2:], weight.shape[2:], given.stride, given.padding, given.dilation)
    numbers = [n for values, none in zip(axes, (1, 1, 1, 1, 0, 1)) for n in (*(none,) * (3 - RANK), *values)]
    return [x.shape[0], given.groups, weight.shape[0] // given.groups, weight.shape[1], *numbers]


# --- the three passes on tensors -------------------------------------------------------------------------------------


def is_fast(x: Tensor, shape, given: Arguments) -> bool:
    """Whether the fast kernels serve a layer with weights of this shape."""
    fitting = shape == WEIGHT and given == LAYER and x.dtype == DTYPE
    positions = math.prod(x.shape[2:]) * math.prod(LAYER.stride)  # of an image, at most, which kernels count in 32 bits
    return fitting and max(x.shape[0], positions) < 2**30 and processors(x.get_device()) > 0


def recorded() -> bool:
    """Whether autograd looks at calls, for gradients or for derivatives in forward mode."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def dense(t: Tensor) -> Tensor:
    """The tensor in the fast kernels' memory format, beginning at 16 bytes."""
    t = t.contiguous(memory_format=FORMAT)
    return t.clone() if t.data_ptr() % 16 else t


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, given: Arguments, fast: bool) -> Tensor:
    """(batch, channels, *size) -> (batch, other channels, *output_size). Weights are packed at each call."""
    x, weight = x.resolve_neg(), weight.resolve_neg().contiguous()
    bias = None if bias is None else bias.resolve_neg().contiguous()
    shape = (x.shape[0], weight.shape[1] * given.groups, *output_size(x.shape[2:], weight.shape[2:], given))
    out = x.new_empty(shape)
    if out.numel() == 0:
        return out
    if fast:
        x = dense(x)
        launch = forward_launch(x.shape[0], full(x), full(out), processors(x.get_device()))
        build(True).forward(x, weight, bias, out, *launch)
        return out
    x, result = x.contiguous(), out.contiguous()
    build(False).forward(x, weight, bias, result, plain_layer(x, weight, result, given))
    return out.copy_(result)


def grad_input(grad: Tensor, weight: Tensor, size, given: Arguments, fast: bool) -> Tensor:
    """(batch, other channels, *output_size) -> (batch, channels, *size)."""
    grad, weight = grad.resolve_neg(), weight.resolve_neg().contiguous()
    shape = (grad.shape[0], weight.shape[0], *size)
    out = grad.new_empty(shape)
    if out.numel() == 0:
        return out
    if fast:
        launch = grad_input_launch(grad.shape[0], full(grad), full(out), processors(grad.get_device()))
        build(True).grad_input(dense(grad), weight, out, *launch)
        return out
    grad, result = grad.contiguous(), out.contiguous()
    build(False).grad_input(grad, weight, result, plain_layer(result, weight, grad, given))
    return out.copy_(result)


def grad_weight(x: Tensor, grad: Tensor, shape, given: Arguments, fast: bool) -> Tensor:
    """Inputs and gradients of the outputs -> (channels, other channels // groups, *kernel), which is the shape."""
    x, grad = x.resolve_neg(), grad.resolve_neg()
    if x.numel() == 0:
        return x.new_zeros(shape)
    out = x.new_empty(shape)
    if fast:
        launch = grad_weight_launch(x.shape[0], full(x), full(grad), processors(x.get_device()))
        build(True).grad_weight(dense(x), dense(grad), out, *launch)
        return out
    x, grad = x.contiguous(), grad.contiguous()
    build(False).grad_weight(x, grad, out, plain_layer(x, out, grad, given))
    return out


class ConvTranspose(torch.autograd.Function):
    """Of an input x, a weight w and an output y two give the third, linearly in both: so do the derivatives."""

    @staticmethod
    def forward(x, w, y, bias, layer):
        size, shape, given, fast = layer
        if y is None:
            return forward(x, w, bias, given, fast)
        return grad_input(y, w, size, given, fast) if x is None else grad_weight(x, y, shape, given, fast)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, y, _, ctx.layer = inputs
        ctx.save_for_backward(x, w, y)

    @staticmethod
    def backward(ctx, grad):
        *layer, fast = ctx.layer
        x, w, y = (grad if t is None else t for t in ctx.saved_tensors)
        run = ConvTranspose.apply if recorded() else ConvTranspose.forward  # the second costs less
        by_x, by_w, by_y, by_bias, _ = ctx.needs_input_grad
        return (
            run(None, w, y, None, (*layer, fast)) if by_x else None,
            run(x, None, y, None, (*layer, fast)) if by_w else None,
            run(x, w, None, None, (*layer, fast)) if by_y else None,
            grad.sum((0, *range(2, grad.dim()))) if by_bias else None,
            None,
        )


ConvTranspose.forward.__signature__ = inspect.signature(ConvTranspose.forward)  # which each apply would compute anew

# --- the module ------------------------------------------------------------------------------------------------------


def check(x: Tensor, weight: Tensor, given: Arguments) -> None:
    """Raises ValueError, in a sentence, for an input that no kernel can take."""
    if x.dim() != RANK + 2:
        shapes = "(batch, channels, height, width), batched or not"
        raise ValueError(f"ModelNew takes inputs {shapes}; got shape {tuple(x.shape)}")
    if x.shape[1] != weight.shape[0]:
        raise ValueError(f"ModelNew takes inputs of {weight.shape[0]} channels; got shape {tuple(x.shape)}")
    if min(x.shape[2:]) < 1 or min(output_size(x.shape[2:], weight.shape[2:], given)) < 1:
        raise ValueError(f"ModelNew takes inputs that leave an output; got shape {tuple(x.shape)}")
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise ValueError(f"ModelNew takes inputs of its weights' floating dtype; got {x.dtype} and {weight.dtype}")
    if not x.is_cuda or x.device != weight.device:
        raise ValueError(f"ModelNew takes inputs and weights on one CUDA device; got {x.device} and {weight.device}")


class Layer(nn.Module):
    """The parameters of the original's layer, drawn as PyTorch draws them; the arguments are torch.nn's.

    Raises:
        ValueError: for arguments that PyTorch refuses, too.
    """

    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, output_padding=0, groups=1, bias=True,
        dilation=1, padding_mode="zeros", device=None, dtype=None,
    ) -> None:  # fmt: skip
        super().__init__()
        values = (kernel_size, stride, padding, output_padding, dilation)
        kernel, *sizes = (tuple(v) if hasattr(v, "__iter__") else (v,) * RANK for v in values)
        sizes = [v * RANK if len(v) == 1 else v for v in sizes]
        if any(len(v) != RANK for v in (kernel, *sizes)):
            raise ValueError(f"sizes must be integers or {RANK} of them; got {values}")
        self.given = Arguments(*sizes, groups)
        stride, padding, output_padding, dilation, _ = self.given
        if padding_mode != "zeros":
            raise ValueError(f"padding_mode must be zeros; got {padding_mode!r}")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(f"channels must be a multiple of groups; got {in_channels}, {out_channels} and {groups}")
        if min(*kernel, *stride, *dilation, 1) < 1 or min(*padding, *output_padding, 0) < 0:
            raise ValueError(f"sizes must be positive and paddings not negative; got {kernel} and {self.given}")
        if any(more >= max(s, d) for more, s, d in zip(output_padding, stride, dilation)):
            raise ValueError(f"output_padding must be smaller than stride or dilation; got {output_padding}")
        made = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels // groups, *kernel, **made))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels, **made)) if bias else None)
        if bias:
            bound = 1 / math.sqrt(self.weight[0].numel())
            nn.init.uniform_(self.bias, -bound, bound)


class ModelNew(nn.Module):
    """KernelBench level 1, problem 75: ModelNew(32, 64, (3, 5), (2, 3), (1, 2), (2, 1), 4)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: tuple, stride: tuple = (1, 1), padding: tuple = (0, 0),
        dilation: tuple = (1, 1), groups: int = 1, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv_transpose2d = Layer(
            in_channels, out_channels, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation,
            groups=groups, bias=bias,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, channels, height, width) or the same without batch, any sizes -> likewise."""
        single = x.dim() == RANK + 1
        x = x.unsqueeze(0) if single else x
        layer = self.conv_transpose2d
        weight, bias = layer.weight, layer.bias
        if torch.is_autocast_enabled():
            x = x.to(weight.dtype)
        check(x, weight, layer.given)
        fast = is_fast(x, weight.shape, layer.given)
        run = ConvTranspose.apply if recorded() else ConvTranspose.forward
        out = run(x, weight, None, bias, (x.shape[2:], weight.shape, layer.given, fast))
        return out.squeeze(0) if single else out
