"""KernelBench level 1, problem 75: a transposed convolution with CUDA kernels of its own, in one file.

Layer: ConvTranspose2d(32, 64, kernel_size=(3, 5), stride=(2, 3), padding=(1, 2), output_padding=(0, 0),
dilation=(2, 1), groups=4).

ModelNew has the constructor, the parameters (equal under a seed) and the state_dict of the original, and computes
forward, first and second gradients with the kernels below. They are chosen for inputs of 16 x 32 x 128 x 256 on an
NVIDIA H200 and serve every batch and spatial size.

Constraints:
- The fast kernels serve this layer with torch.float32 on CUDA devices of sm_90a. Plain kernels serve other
  arguments and dtypes, and other devices from sm_70 on.
- nvcc, a C++ compiler and ninja are needed at the first call, which takes a minute.
- Values: float32, multiplied as such or, on tensor cores, as two TF32 parts in three products, which keeps
  float32's accuracy; PyTorch's kernel for these groups is IEEE float32 whatever its TF32 flag says, so these are.
- For the fast kernels tensors are copied to the contiguous memory format where needed; results are contiguous.
- Rows that are no multiple of 4 columns are copied, with zeros behind them.
- Results are bit-equal from run to run. Under torch.autocast inputs are cast to the weights' dtype, which results
  have, too.

Kernels:
- forward: 4x256 cells x 8 channels, 256 threads x 8x2x12 outputs, 1 stages of 8 channels, 4224 blocks.
- gradient for the input: tiles of 32x32 positions in 27 KB, lanes are columns, a thread takes 4 rows x 8 input
  channels.
- gradient for the weight: mma.sync ieee, 16x16 channels x 1x3x5 taps a block, chunks of 1x1x8x32 (NxDxHxW of q), K
  in 132 slices, 171 KB shared.

Measured by `upconv bench --suite kernelbench --as-exported --device cuda`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
import shutil
from typing import NamedTuple

import torch
from torch import Tensor, nn
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

struct Element {  // image (of a weight: input channel), channel, and place
  int64_t n;
  int c, at[3];
};

__device__ int64_t volume(const int (&size)[3]) { return int64_t(size[0]) * size[1] * size[2]; }

__device__ Element element(int64_t index, int channels, const int (&size)[3]) {
  Element e;
  for (int axis = 2; axis >= 0; axis--, index /= size[axis + 1]) e.at[axis] = index % size[axis];
  e.c = index % channels, e.n = index / channels;
  return e;
}

__device__ int64_t offset(const Element& e, int channels, const int (&size)[3]) {
  return (((e.n * channels + e.c) * size[0] + e.at[0]) * size[1] + e.at[1]) * size[2] + e.at[2];
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
  const int channels = l.groups * l.cout;
  for (int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x; index < l.batch * channels * volume(l.out);
       index += int64_t(gridDim.x) * THREADS) {
    const Element e = element(index, channels, l.out);
    SumOf<T> sum = bias ? SumOf<T>(bias[e.c]) : SumOf<T>(0);
    for (int64_t tap = 0; tap < volume(l.kernel); tap++) {
      Element at = {e.n}, weight = element(tap, 1, l.kernel);
      if (!input_at(l, e.at, weight.at, at.at)) continue;
      weight.c = e.c % l.cout;
      for (int c = 0; c < l.cin; c++) {
        weight.n = at.c = e.c / l.cout * l.cin + c;
        sum += SumOf<T>(x[offset(at, l.groups * l.cin, l.in)]) * SumOf<T>(w[offset(weight, l.cout, l.kernel)]);
      }
    }
    y[index] = T(sum);
  }
}

// A thread computes an input's gradient.
template <typename T>
__global__ void plain_grad_input(const T* dy, const T* w, T* dx, Layer l) {
  const int channels = l.groups * l.cin;
  for (int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x; index < l.batch * channels * volume(l.in);
       index += int64_t(gridDim.x) * THREADS) {
    const Element e = element(index, channels, l.in);
    SumOf<T> sum = 0;
    for (int64_t tap = 0; tap < volume(l.kernel); tap++) {
      Element at = {e.n}, weight = element(tap, 1, l.kernel);
      if (!output_at(l, e.at, weight.at, at.at)) continue;
      weight.n = e.c;
      for (weight.c = 0; weight.c < l.cout; weight.c++) {
        at.c = e.c / l.cin * l.cout + weight.c;
        sum += SumOf<T>(dy[offset(at, l.groups * l.cout, l.out)]) * SumOf<T>(w[offset(weight, l.cout, l.kernel)]);
      }
    }
    dx[index] = T(sum);
  }
}

// A block computes a weight's gradient: its threads divide the pixels and add their sums in pairs.
template <typename T>
__global__ void plain_grad_weight(const T* x, const T* dy, T* dw, Layer l) {
  __shared__ SumOf<T> sums[THREADS];
  const int64_t weights = int64_t(l.groups) * l.cin * l.cout * volume(l.kernel), pixels = l.batch * volume(l.in);
  for (int64_t index = blockIdx.x; index < weights; index += gridDim.x) {
    const Element weight = element(index, l.cout, l.kernel);
    SumOf<T> sum = 0;
    for (int64_t pixel = threadIdx.x; pixel < pixels; pixel += THREADS) {
      Element from = element(pixel, 1, l.in), to = from;
      if (!output_at(l, from.at, weight.at, to.at)) continue;
      from.c = weight.n, to.c = weight.n / l.cin * l.cout + weight.c;
      sum += SumOf<T>(x[offset(from, l.groups * l.cin, l.in)]) * SumOf<T>(dy[offset(to, l.groups * l.cout, l.out)]);
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

__device__ __forceinline__ void copy_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }
// BYTES, 4 or 8; of `bytes` 0 zeros.
template <int BYTES>
__device__ __forceinline__ void copy_word(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes));
}

// --- the compiler and registers ---------------------------------------------------------------------------------------

// Integers. Macros, since by references the compiler keeps variables in another order.
#define OPAQUE(a) asm volatile("" : "+r"(a))

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
struct NumberOf {                                       // float16 and bfloat16
  using Type = u16;
  using Bits = u16;                                     // as an integer
  static constexpr int SIZE = 2;
};
struct Float32 {
  using Type = float;
  using Bits = u32;
  static constexpr int SIZE = 4;
  static __device__ __forceinline__ u32 bits(float v) { return __float_as_uint(v); }
};
template <> struct NumberOf<TF32> : Float32 {};
template <> struct NumberOf<IEEE> : Float32 {};

// How the kernels for CUDA cores store and sum numbers, by their precision P (number.cuh): `ScalarOf<P>`.

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
struct ScalarOf : ScalarTypes<u16, float> {  // float16 and bfloat16
};
template <class V>
struct Unchanged : ScalarTypes<V, V> {
    static __device__ __forceinline__ V value(V v) { return v; }
    static __device__ __forceinline__ V stored(V v) { return v; }
};
template <> struct ScalarOf<IEEE> : Unchanged<float> {};
template <> struct ScalarOf<FP64> : Unchanged<double> {};

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

__device__ constexpr int floor_mod(int a, int b) { return (a % b + b) % b; }

// What a block of direct.cu copies to shared memory for a stage: the input tile with its halo (zeros outside), and the weights.

// K: Direct<C>.
template <class K>
struct DirectCopies {
using C = typename K::C;
using Scalar = typename K::Scalar;
using T = typename K::T;
using Acc = typename K::Acc;

static constexpr bool LAST = C::channels_last;
static constexpr int THREADS = C::threads, CHANNELS = K::CHANNELS;
static constexpr int IN_ROWS = C::block_h + C::span_h;  // input rows of a tile
static constexpr int IN_COLS = K::BLOCK_W + C::span_w;
static constexpr int ROW_PITCH = C::row_pitch;
static constexpr int PLANE = K::PLANE;

// A stage's input: where it starts in memory, what of it exists.
struct Source {
    const T* base;  // channel 0 of the stage, depth, row 0, column 0
    i64 channel_step;
    int present, row, col, h, w;
};

static __device__ __forceinline__ int column_word(int c) { return c / C::cells * K::PITCH + c % C::cells; }

static __device__ __forceinline__ void put(Acc* to, const T* from, bool inside) {
    copy_word<sizeof(T)>(shared_address(to), from, inside ? (int)sizeof(T) : 0);
}

// The same in NCHW: whole warps of columns row by row, the columns that are left, often a halo of two, over all rows at once.
static __device__ __forceinline__ void copy_rows(Acc* tile, const Source& s, const T* x) {
    constexpr int REST = IN_COLS % 32 <= 20 ? IN_COLS % 32 : 0, BODY = IN_COLS - REST;
    const int lane = threadIdx.x % 32;
    #pragma unroll 2
    for (int at = threadIdx.x / 32; at < CHANNELS * IN_ROWS; at += THREADS / 32) {
        const int channel = at / IN_ROWS, r = at % IN_ROWS;
        const int ih = s.row + r;
        const bool row_inside = (u32)ih < (u32)s.h && channel < s.present;
        const T* from = row_inside ? s.base + channel * s.channel_step + (i64)ih * s.w : x;
        Acc* to = tile + channel * PLANE + r * ROW_PITCH;
#pragma unroll
        for (int c = lane; c < BODY; c += 32) {
            const bool inside = row_inside && (u32)(s.col + c) < (u32)s.w;
            put(to + column_word(c), inside ? from + s.col + c : x, inside);
        }
    }
    #pragma unroll 2
    for (int at = threadIdx.x; at < CHANNELS * IN_ROWS * REST; at += THREADS) {
        const int c = BODY + at % REST, line = at / REST;
        const int channel = line / IN_ROWS, r = line % IN_ROWS;
        const int ih = s.row + r, iw = s.col + c;
        const bool inside = (u32)ih < (u32)s.h && (u32)iw < (u32)s.w && channel < s.present;
        const T* from = inside ? s.base + channel * s.channel_step + (i64)ih * s.w + iw : x;
        put(tile + channel * PLANE + r * ROW_PITCH + column_word(c), from, inside);
    }
}

// `x`: an address that may be read.
static __device__ __forceinline__ void copy(Acc* tile, const Source& s, const T* x) {
    copy_rows(tile, s, x);
}
};

// How a block of direct.cu stores its sums: through shared memory, so that stores cover whole lines; directly where a thread's sums are
// one vector.

// K: Direct<C>.
template <class K>
struct DirectStores {
using C = typename K::C;
using Scalar = typename K::Scalar;
using T = typename K::T;
using Acc = typename K::Acc;
using Pack = typename Scalar::Pack;
using Sums = typename K::Sums;
using Place = typename K::Place;
using Thread = typename K::Thread;
using Sizes = typename K::Sizes;

static constexpr int VEC = Scalar::VEC, CO = K::CO, CO_GROUP = C::cout_g, RUN = K::RUN, PART = C::part;
static constexpr int RUN_PITCH = C::run_pitch;

// A warp stores `count` neighbouring outputs, WIDE at a time, from runs in shared memory.
template <int WIDE>
static __device__ __forceinline__ void store_segment(T* to, const Acc* from, int count, int lane) {
    struct alignas(WIDE * sizeof(T)) Line {
        T v[WIDE];
    } line;
#pragma unroll 4
    for (int v = lane * WIDE; v < count; v += 32 * WIDE) {
        const Acc* at = from + v / RUN * RUN_PITCH + v % RUN;
        if constexpr (WIDE == VEC) {
            const Pack pack = *reinterpret_cast<const Pack*>(at);
#pragma unroll
            for (int m = 0; m < WIDE; ++m) line.v[m] = Scalar::stored(pack.v[m]);
        } else {
#pragma unroll
            for (int m = 0; m < WIDE; ++m) line.v[m] = Scalar::stored(at[m]);
        }
        *reinterpret_cast<Line*>(to + v) = line;
    }
}

// Each warp turns its threads' sums of PART channels into rows: 32 runs in, segments of LANES runs out. `row_at`: where the thread's row
// begins in the output, or -1 where it has none.
static __device__ __forceinline__ void store_turned(const Acc (&sum)[CO][RUN], T* out, Acc* shared, i64 row_at, int ow, i64 channel_step, int couts, int ow_size) {
    constexpr int LANES = C::block_x < 32 ? C::block_x : 32;
    constexpr int SEGMENT = LANES * RUN;
    constexpr int WIDE = RUN % 4 == 0 && VEC == 4 ? 4 : RUN % 2 == 0 ? 2 : 1;
    const int lane = threadIdx.x % 32;
    Acc* mine = shared + threadIdx.x / 32 * (32 * RUN_PITCH * PART);
    const unsigned long long start_of_out = (unsigned long long)out / sizeof(T);
    const int wide = (ow_size % WIDE == 0 && start_of_out % WIDE == 0) ? WIDE
                     : (RUN % 2 == 0 && ow_size % 2 == 0 && start_of_out % 2 == 0) ? 2 : 1;
#pragma unroll
    for (int part = 0; part < CO; part += PART) {
        __syncwarp();
#pragma unroll
        for (int c = 0; c < PART; ++c) {
            Acc* to = mine + (c * 32 + lane) * RUN_PITCH;
            #pragma unroll
            for (int v = 0; v < RUN; v += VEC) {
                Pack pack;
#pragma unroll
                for (int m = 0; m < VEC; ++m) pack.v[m] = sum[part + c][v + m];
                *reinterpret_cast<Pack*>(to + v) = pack;
            }
        }
        __syncwarp();
        const int present = couts - part < PART ? couts - part : PART;
#pragma unroll 1
        for (int segment = 0; segment < 32 / LANES; ++segment) {
            const i64 start = __shfl_sync(0xffffffffu, row_at, segment * LANES);
            const int ow0 = __shfl_sync(0xffffffffu, ow, segment * LANES);
            if (start < 0) continue;
            T* to = out + start + part * channel_step + ow0;
            const Acc* from = mine + segment * LANES * RUN_PITCH;
            const int count = ow_size - ow0 < SEGMENT ? ow_size - ow0 : SEGMENT;
#pragma unroll 1
            for (int c = 0; c < present; ++c, to += channel_step, from += 32 * RUN_PITCH) {
                if (WIDE > 1 && wide == WIDE) store_segment<WIDE>(to, from, count, lane);
                else if (WIDE > 2 && wide == 2) store_segment<2>(to, from, count, lane);
                else store_segment<1>(to, from, count, lane);
            }
        }
    }
}

// NCHW.
static __device__ __forceinline__ void store_rows(const Sums (&sum)[C::phases_h], T* out, Acc* shared, const Place& p, const Thread& own, bool stores, const Sizes& s) {
    const int g = p.group + own.slot, oh = (p.cell_h + own.jh) * C::stride_h + own.th, ow = (p.cell_w + own.tx * C::cells) * C::stride_w;
    const int couts = CO_GROUP - p.cout_block * CO < CO ? CO_GROUP - p.cout_block * CO : CO;
    const i64 plane = (i64)s.oh * s.ow, channel_step = s.od * plane;
    const i64 first_at = ((p.image * (C::groups * CO_GROUP) + (i64)g * CO_GROUP + p.cout_block * CO) * s.od + p.od) * plane + (i64)oh * s.ow;
#pragma unroll
    for (int t = 0; t < C::phases_h; ++t) {
        const bool row_stores = stores && oh + t < s.oh;
        const i64 row_at = row_stores ? first_at + (i64)t * s.ow : -1;
        store_turned(sum[t], out, shared, row_at, ow, channel_step, couts, s.ow);
    }
}
};

// Weights as the forwards on CUDA cores read them: packed in the accumulator's type.

// Of a weight (input channels, output channels of a group, depth, height, width), in elements.
struct WeightStrides { i64 in, out, d, h, w; };

// One thread per packed element: `K::packed_weight(src, at, strides)` is the one at `at`.
template <class K>
__global__ void direct_pack(const typename K::T* __restrict__ src, typename K::Acc* __restrict__ dst, i64 s0, i64 s1, i64 s2, i64 s3,
                            i64 s4, i64 total) {
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x)
        dst[at] = K::packed_weight(src, at, {s0, s1, s2, s3, s4});
}

// Rows of [kw][co] per (group, block of co_tile output channels, kd, ci, kh), padded to 16 bytes.
template <class C>
struct WeightRows {
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;

static constexpr int CO = C::co_tile;
static constexpr int COUT_BLOCKS = (C::cout_g + CO - 1) / CO;
static constexpr int WORDS = (C::kernel_w * CO + Scalar::VEC - 1) / Scalar::VEC * Scalar::VEC;  // of the weights of one (kd, ci, kh)

static __device__ __forceinline__ Acc packed_weight(const T* src, i64 at, const WeightStrides& s) {
    i64 rest = at / WORDS;
    const int in_row = (int)(at - rest * WORDS);
    const int kw = in_row / CO, co_in = in_row % CO;
    const int kh = (int)(rest % C::kernel_h);
    rest /= C::kernel_h;
    const int ci = (int)(rest % C::cin_g);
    rest /= C::cin_g;
    const int kd = (int)(rest % C::kernel_d);
    rest /= C::kernel_d;
    const int co = (int)(rest % COUT_BLOCKS) * CO + co_in;
    const i64 group = rest / COUT_BLOCKS;
    if (kw >= C::kernel_w || co >= C::cout_g) return 0;
    return Scalar::value(src[(group * C::cin_g + ci) * s.in + co * s.out + kd * s.d + kh * s.h + kw * s.w]);
}
};

// Transposed convolution on CUDA cores, for few channels per group and for float64, where bytes or FMAs are the limit.
//
// Layout. Input (BATCH, GROUPS * CI, D, H, W) and output (BATCH, GROUPS * CO_GROUP, OD, OH, OW), both dense, NCHW or
// channels_last (LAST). Ranks below 3 have sizes of 1 in front. Weights are packed by `direct_pack` into rows of
// [kw][co] per (group, block of CO output channels, kd, ci, kh), in the accumulator's type, padded to 16 bytes.
//
// Cells. Outputs j * S ... j * S + S - 1 of a dimension are cell j. Output t of cell j and tap k meet where
// (t + P - k * DIL) is a multiple of S, at input i = j + (t + P - k * DIL) / S. So the outputs of a cell hold all phases,
// start at a multiple of S whatever the padding, and along W all of them belong to one thread.
//
// Steps. A block makes BLOCK_H x BLOCK_W cells of one output depth, for SLOTS groups and CO channels of each. A thread
// has CELLS neighbouring cells along W and of these either one output row (PHASES_H 1, one phase along H) or all SH
// (PHASES_H SH: each input row is then read once for all phases, and every tap is unrolled). For every depth tap of
// the block's phase and every chunk of CHUNK input channels: the block copies the input tile with its halo (zeros
// outside) and the chunk's weights to shared memory, while the threads walk channels and taps of the stage before.
// A row in shared memory has one word between runs of CELLS, and rows are padded so that the threads of a warp, over all
// its rows, have one odd stride: reads are free of bank conflicts.
// The sums leave through shared memory, so that stores cover whole lines; directly when a thread's are one vector.
//
// Constraints: the tile and the unrolled taps must fit (the planner checks).

template <class C_>
struct Direct {
using C = C_;
using Weights = WeightRows<C>;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;
using Pack = typename Scalar::Pack;

static constexpr int VEC = Scalar::VEC, THREADS = C::threads, GROUPS = C::groups, CI = C::cin_g, CO_GROUP = C::cout_g;
static constexpr int CO = C::co_tile, CELLS = C::cells, SLOTS = C::slots, CHUNK = C::chunk;
static constexpr int KD = C::kernel_d, KH = C::kernel_h, KW = C::kernel_w, SD = C::stride_d, SH = C::stride_h, SW = C::stride_w;
static constexpr int PD = C::padding_d, PH = C::padding_h, PW = C::padding_w, DD = C::dilation_d, DH = C::dilation_h, DW = C::dilation_w;
static constexpr int COUT_BLOCKS = Weights::COUT_BLOCKS, WEIGHT_ROW = Weights::WORDS;
static constexpr int PHASES_H = C::phases_h;
static constexpr bool ALL_H = PHASES_H > 1;
static constexpr int ROWS = C::block_h * SH / PHASES_H;  // rows of threads
static constexpr int UNITS = ROWS * C::block_x;          // threads that compute, per slot
static constexpr int BLOCK_W = C::block_x * CELLS;       // cells
static constexpr int RUN = CELLS * SW;                   // neighbouring outputs of a thread
static constexpr int PITCH = CELLS | 1;                  // words from one thread's cells to the next one's
static constexpr int ROW_PITCH = C::row_pitch;
static constexpr int PLANE = ((C::block_h + C::span_h) * ROW_PITCH) | 1;  // odd: channels_last writes neighbouring channels at once
static constexpr int CHANNELS = SLOTS * CHUNK;                            // planes of a stage
static constexpr int CHUNKS = (CI + CHUNK - 1) / CHUNK;
static constexpr int WEIGHT_CHANNEL = KH * WEIGHT_ROW;
static constexpr int WEIGHT_WORDS = CHANNELS * WEIGHT_CHANNEL;  // per stage; a multiple of VEC
static constexpr int STAGE_WORDS = (WEIGHT_WORDS + CHANNELS * PLANE + VEC - 1) / VEC * VEC;
static constexpr int GROUP_BLOCKS = (GROUPS + SLOTS - 1) / SLOTS;

struct Sizes { int d, h, w, od, oh, ow, tiles_h, tiles_w; };

// What a block computes: a depth of an image, the first of its groups and cells, and a block of channels.
struct Place {
    i64 image;
    int od, group, cout_block, cell_h, cell_w;
};

// What a thread of it computes: its cells along W, and its row of cells and phase along H. Rows go phase by phase, so that the threads
// of a warp share their taps.
struct Thread { int slot, unit, tx, th, jh; };

using Sums = Acc[CO][RUN];
using Copies = DirectCopies<Direct>;
using Stores = DirectStores<Direct>;

static __device__ __forceinline__ Place place_of(u32 at, const Sizes& s) {
    Place p;
    p.cell_w = at % s.tiles_w * BLOCK_W;
    at /= s.tiles_w;
    p.cell_h = at % s.tiles_h * C::block_h;
    at /= s.tiles_h;
    p.cout_block = at % COUT_BLOCKS;
    at /= COUT_BLOCKS;
    p.group = at % GROUP_BLOCKS * SLOTS;
    at /= GROUP_BLOCKS;
    p.od = at % s.od;
    p.image = at / s.od;
    return p;
}

static __device__ __forceinline__ Thread thread_of(int tid) {
    Thread own;
    own.slot = tid / UNITS;
    own.unit = tid % UNITS;
    own.tx = own.unit % C::block_x;
    const int row = own.unit / C::block_x;
    own.th = ALL_H ? 0 : row / C::block_h;
    own.jh = ALL_H ? row : row % C::block_h;
    return own;
}

// A depth tap of the block's phase whose input plane exists, and a chunk of input channels.
struct Stage {
    int kd, chunk, depth;
    __device__ __forceinline__ void advance(int od, int d) {
        if (++chunk < CHUNKS) return;
        chunk = 0;
        for (++kd; kd < KD; ++kd) {
            const int reach = od + PD - kd * DD;
            if (reach < 0 || reach % SD) continue;
            depth = reach / SD;
            if (depth < d) return;
        }
    }
    __device__ __forceinline__ int channels() const { return CI - chunk * CHUNK < CHUNK ? CI - chunk * CHUNK : CHUNK; }
};

static __device__ __forceinline__ void copy_weights(Acc* to, const Acc* weight, const Place& p, const Stage& stage) {
    const int first = stage.chunk * CHUNK, channels = stage.channels();
#pragma unroll 1
    for (int s = 0; s < SLOTS; ++s) {
        const int g = p.group + s < GROUPS ? p.group + s : GROUPS - 1;
        const Acc* from = weight + (((i64)(g * COUT_BLOCKS + p.cout_block) * KD + stage.kd) * CI + first) * WEIGHT_CHANNEL;
        Acc* rows = to + s * CHUNK * WEIGHT_CHANNEL;
        for (int v = threadIdx.x * VEC; v < channels * WEIGHT_CHANNEL; v += THREADS * VEC) copy16(shared_address(rows + v), from + v);
    }
}

static __device__ __forceinline__ typename Copies::Source source_of(const T* x, const Place& p, const Stage& stage, const Sizes& s) {
    const i64 plane = (i64)s.h * s.w;
    const int first = stage.chunk * CHUNK;
    typename Copies::Source from;
    from.channel_step = s.d * plane;
    from.base = C::channels_last ? x + (p.image * s.d + stage.depth) * plane * (GROUPS * CI) + p.group * CI + first
                                 : x + (p.image * (GROUPS * CI) + (i64)p.group * CI + first) * from.channel_step + stage.depth * plane;
    from.present = SLOTS > 1 ? (GROUPS - p.group) * CI : stage.channels();
    from.row = p.cell_h + C::min_h;
    from.col = p.cell_w + C::min_w;
    from.h = s.h;
    from.w = s.w;
    return from;
}

// All products of one input row and the taps of one row of a channel, both in shared memory.
static __device__ __forceinline__ void multiply(Sums& to, const Acc* line, const Acc* weights) {
    Acc window[CELLS + C::span_w];
#pragma unroll
    for (int c = 0; c < CELLS + C::span_w; ++c) window[c] = line[c / CELLS * PITCH + c % CELLS];
    const Pack* packs = reinterpret_cast<const Pack*>(weights);
    Pack pack;
#pragma unroll
    for (int k = 0; k < KW; ++k) {
        const int t = floor_mod(k * DW - PW, SW);
        const int shift = (t + PW - k * DW - C::min_w * SW) / SW;
#pragma unroll
        for (int c = 0; c < CO; ++c) {
            const int word = k * CO + c;
            if (word % VEC == 0) pack = packs[word / VEC];
#pragma unroll
            for (int m = 0; m < CELLS; ++m)
                to[c][m * SW + t] = multiply_add(pack.v[word % VEC], window[m + shift], to[c][m * SW + t]);
        }
    }
}

// The first tap along H of a thread's phase; KH where it has none.
static __device__ __forceinline__ int first_tap(int th) {
    int first = KH;
#pragma unroll 1
    for (int k = 0; !ALL_H && k < KH && k < C::step_kh; ++k)
        if ((th + PH + KH * DH * SH - k * DH) % SH == 0) first = k;
    return first;
}

// A stage's products.
static __device__ __forceinline__ void multiply_stage(Sums (&sum)[PHASES_H], const Acc* stage, const Thread& own, int channels, int first_kh) {
    const Acc* weights = stage + own.slot * CHUNK * WEIGHT_CHANNEL;
    const Acc* tile = stage + WEIGHT_WORDS + own.slot * CHUNK * PLANE + own.tx * PITCH;
    const int first_row = own.jh + (own.th + PH - first_kh * DH - C::min_h * SH) / SH;  // exact where the phase has taps
#pragma unroll 1
    for (int ci = 0; ci < channels; ++ci) {
        // input row by input row, each for the taps of all phases that meet it
#pragma unroll
            for (int r = 0; r <= C::span_h; ++r)
#pragma unroll
                for (int kh = 0; kh < KH; ++kh) {
                    const int t = floor_mod(kh * DH - PH, SH);
                    if ((t + PH - kh * DH - C::min_h * SH) / SH == r)
                        multiply(sum[t], tile + ci * PLANE + (own.jh + r) * ROW_PITCH, weights + (ci * KH + kh) * WEIGHT_ROW);
                }
    }
}

static __device__ __forceinline__ void add_bias(Sums (&sum)[PHASES_H], const T* bias, int g, int cout_block, bool stores) {
#pragma unroll
    for (int c = 0; c < CO; ++c) {
        const int co = cout_block * CO + c;
        const Acc b = stores && co < CO_GROUP ? Scalar::value(bias[g * CO_GROUP + co]) : Acc(0);
#pragma unroll
        for (int t = 0; t < PHASES_H; ++t)
#pragma unroll
            for (int v = 0; v < RUN; ++v) sum[t][c][v] += b;
    }
}

static __device__ __forceinline__ void run(const T* __restrict__ x, const Acc* __restrict__ weight, const T* __restrict__ bias,
                                           T* __restrict__ out, const Sizes& s, Acc* shared) {
    const Place p = place_of(blockIdx.x, s);
    const int tid = threadIdx.x;
    const Thread own = thread_of(tid);
    const bool computes = tid < SLOTS * UNITS;
    const int first_kh = first_tap(own.th);

    Sums sum[PHASES_H];
#pragma unroll
    for (int t = 0; t < PHASES_H; ++t)
#pragma unroll
        for (int c = 0; c < CO; ++c)
#pragma unroll
            for (int v = 0; v < RUN; ++v) sum[t][c][v] = 0;

    Stage stage = {-1, CHUNKS - 1, 0};
    const auto begin = [&](Acc* to) {
        copy_weights(to, weight, p, stage);
        Copies::copy(to + WEIGHT_WORDS, source_of(x, p, stage, s), x);
    };
    stage.advance(p.od, s.d);
    if (stage.kd < KD) {
        begin(shared);
        copy_wait_all();
    }
    __syncthreads();
#pragma unroll 1
    for (int buffer = 0; stage.kd < KD; buffer ^= 1) {
        const int channels = stage.channels();
        Acc* next = shared + (buffer ^ 1) * STAGE_WORDS;
        stage.advance(p.od, s.d);
        if (C::stages > 1 && stage.kd < KD) begin(next);
        if (computes) multiply_stage(sum, shared + buffer * STAGE_WORDS, own, channels, first_kh);
        if (C::stages > 1 && stage.kd < KD) copy_wait_all();
        __syncthreads();
    }

    const int g = p.group + own.slot;
    const bool stores = tid < SLOTS * UNITS && g < GROUPS;
    if (bias) add_bias(sum, bias, g, p.cout_block, stores);
    if constexpr (C::channels_last) {} else {
        Stores::store_rows(sum, out, shared, p, own, stores, s);
    }
}
};

template <class C>
__global__ void __launch_bounds__(C::threads, C::min_blocks)
    direct(const typename Direct<C>::T* __restrict__ x, const typename Direct<C>::Acc* __restrict__ weight,
           const typename Direct<C>::T* __restrict__ bias, typename Direct<C>::T* __restrict__ out, int d, int h, int w, int od_size,
           int oh_size, int ow_size, int tiles_h, int tiles_w) {
    extern __shared__ __align__(16) unsigned char memory[];
    auto* shared = reinterpret_cast<typename Direct<C>::Acc*>(memory);
    Direct<C>::run(x, weight, bias, out, {d, h, w, od_size, oh_size, ow_size, tiles_h, tiles_w}, shared);
}

// Gradients on CUDA cores from tiles in shared memory: depthwise layers, small groups and few channels.
//
//   grad_input   gi[n, ci, q] = sum over co of the group and taps of g[n, co, q * stride + tap * dilation - padding] * w[ci, co, tap]
//   grad_weight  dW[ci, co, tap] = sum over n and q of x[n, ci, q] * g[n, co, q * stride + tap * dilation - padding]
//
// A block brings what tile_h x tile_w positions q need of one slice of g (an image's, at a depth) into shared memory, in whole
// units and once; taps read it there. A thread takes `rows` positions, one below the other.
//   Lanes are columns: those of g lie in stride_w planes of equal residue, so that lanes read neighbours at any stride.
//   lanes_are_channels (depthwise, channels_last): a pixel's channels are neighbours as they are in memory.
// grad_weight's warps divide a tile's taps (TAP_GROUPS) and its positions (POSITION_GROUPS). Its blocks take a range of tiles
// each and write partial sums; `reduce` adds them in the order of their index, so that every run gives the same bits. Positions of
// a tile beyond the image are zeros of x that meet g where it is: an infinity there makes NaN of that tap's sum.

template <bool IN_WORDS, class T> struct StagedWord { using Type = T; };
template <class T> struct StagedWord<true, T> { using Type = u32; };

template <class C_>
struct Staged {
using C = C_;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;
using Pack = typename Scalar::Pack;
static constexpr int VEC = Scalar::VEC;
static constexpr int ELEMENT = sizeof(T);
static constexpr bool BY_CHANNELS = C::lanes_are_channels;

static constexpr int CIN_G = C::cin_g, COUT_G = C::cout_g, CIN = C::groups * CIN_G, COUT = C::groups * COUT_G;
static constexpr int CHANNELS = C::channels, CI_TILE = C::ci_tile, ROWS = C::rows;
static constexpr int TILE_H = C::tile_h, TILE_W = C::tile_w, SPAN_H = C::span_h, SPAN_W = C::span_w, SHIFT = C::shift;
static constexpr int KERNEL_H = C::kernel_h, KERNEL_W = C::kernel_w, TAPS = C::kernel_d * KERNEL_H * KERNEL_W;
static constexpr int STRIDE_H = C::stride_h, STRIDE_W = C::stride_w;
static constexpr int THREADS = C::threads, WARPS = THREADS / 32, VECTOR = C::vector, BATCH = C::batch;
static constexpr int G_COLUMN = C::channels_last ? COUT : 1;  // elements from one column of g to the next
static constexpr int CHANNEL_BLOCKS = BY_CHANNELS ? (CIN + CHANNELS - 1) / CHANNELS : (CIN_G + CI_TILE - 1) / CI_TILE;  // there of a group

// Words of shared memory from row to row of g's tile, and where a column of it lies.
static constexpr int ROW_PITCH = BY_CHANNELS ? SPAN_W * CHANNELS : STRIDE_W * C::plane_pitch;
static constexpr int G_WORDS = (SPAN_H * ROW_PITCH + 3) / 4 * 4;
static __device__ __forceinline__ constexpr int column_at(int c) {
  return BY_CHANNELS ? c * CHANNELS : c % STRIDE_W * C::plane_pitch + c / STRIDE_W;
}

struct Sizes {
  int batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_h, tiles_w;
};

struct Tile { int n, d, h, w; };           // first position

static __device__ __forceinline__ Tile tile_of(u32 index, const Sizes& s) {
  Tile t;
  t.w = index % s.tiles_w * TILE_W;  index /= s.tiles_w;
  t.h = index % s.tiles_h * TILE_H;  index /= s.tiles_h;
  t.d = index % s.in_d;
  t.n = index / s.in_d;
  return t;
}

// The thread's index, anew: else every place of a batch, the same for all tiles, would be kept in registers between them.
static __device__ __forceinline__ int thread_index() {
  int index = threadIdx.x;
  OPAQUE(index);
  return index;
}

// Elements that are stored together.
template <int WIDTH>
struct alignas(WIDTH * sizeof(T)) Unit { T v[WIDTH]; };

// Elements that are loaded together, in words where there are some.
static constexpr bool IN_WORDS = ELEMENT == 2 && VECTOR > 1;
struct alignas(VECTOR * ELEMENT) Loaded { typename StagedWord<IN_WORDS, T>::Type v[IN_WORDS ? VECTOR / 2 : VECTOR]; };
static __device__ __forceinline__ Acc element(const Loaded& unit, int k) {
  return Scalar::value(unit.v[k]);
}

// Units of a row of g's tile: of columns, of all channels of columns (ALL_CHANNELS), or of a block's channels of columns. As many
// rows as they fit into the threads are loaded at a time; a thread has the same columns of all.
static constexpr int ROW_UNITS = (BY_CHANNELS ? SPAN_W * CHANNELS : SPAN_W) / VECTOR;
static constexpr int ROUNDS_W = (ROW_UNITS + THREADS - 1) / THREADS;
static constexpr int ROWS_AT_ONCE = ROW_UNITS < THREADS ? THREADS / ROW_UNITS : 1;
static constexpr int PASSES_H = (SPAN_H + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;

// Where an element of a row is in one of g's rows, and whether g has it; `left`: channels from the tile's first on.
struct Place { i64 offset; bool in; };
static __device__ __forceinline__ Place place_in_row(int at, int w, int left, i64 line, const Sizes& s) {
  return {(i64)(w + at) * G_COLUMN, (u32)(w + at) < (u32)s.out_w};
}

// A unit's elements to shared memory, from that of element `at` of a row on.
static __device__ __forceinline__ void store_unit(Acc* to, const Loaded& unit, int at) {
  constexpr bool EVEN = STRIDE_W % VECTOR == 0 || VECTOR % STRIDE_W == 0;
#pragma unroll
  for (int k = 0; k < VECTOR; k++) to[BY_CHANNELS ? k : EVEN ? column_at(k) : column_at(at + k) - column_at(at)] = element(unit, k);
}

// What the taps of slice `kd` meet of g's channels from `channel` on to shared memory, zeros beyond the borders; false where the
// whole slice lies beyond them. Units are whole where g lies and its rows end at their multiples; else elements are loaded.
static __device__ __forceinline__ bool stage_gradient(Acc* tile, const T* g, const Tile& t, int kd, int channel, bool whole, const Sizes& s) {
  const int d = t.d * C::stride_d + kd * C::dilation_d - C::padding_d, h = t.h * STRIDE_H - C::padding_h, w = t.w * STRIDE_W - C::padding_w - SHIFT, left = COUT - channel;
  if ((u32)d >= (u32)s.out_d) return false;
  const i64 pixels = (i64)s.out_d * s.out_h * s.out_w, slice = (i64)d * s.out_h * s.out_w, line = (i64)s.out_w * G_COLUMN;
  const T* from = g + (C::channels_last ? (t.n * pixels + slice) * COUT + channel : ((i64)t.n * COUT + channel) * pixels + slice);
  const int thread = thread_index(), first = ROW_UNITS < THREADS ? thread / ROW_UNITS : 0;
  if (ROW_UNITS < THREADS && first >= ROWS_AT_ONCE) return true;  // the others have nothing to do
#pragma unroll 1
  for (int round = 0; round < ROUNDS_W; round++) {
    const int at = (ROW_UNITS < THREADS ? thread % ROW_UNITS : thread + round * THREADS) * VECTOR;  // element of a row
    if (ROW_UNITS > THREADS && at >= ROW_UNITS * VECTOR) break;
    if (VECTOR == 1 || whole) {
      const Place in_row = place_in_row(at, w, left, line, s);
      Acc* to = tile + first * ROW_PITCH + (BY_CHANNELS ? at : column_at(at));
      int row = h + first;
#pragma unroll 1
      for (int i = 0; i < PASSES_H; i += BATCH, row += BATCH * ROWS_AT_ONCE, to += BATCH * ROWS_AT_ONCE * ROW_PITCH) {
        const T* place = from + row * line + in_row.offset;
        Loaded unit[BATCH];                // all loads come first: a block waits for memory once in BATCH
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          unit[b] = {};
          if (in_row.in && (u32)(row + b * ROWS_AT_ONCE) < (u32)s.out_h) unit[b] = *(const Loaded*)(place + b * ROWS_AT_ONCE * line);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          if ((SPAN_H % ROWS_AT_ONCE || PASSES_H % BATCH) && row + b * ROWS_AT_ONCE >= h + SPAN_H) break;
          store_unit(to + b * ROWS_AT_ONCE * ROW_PITCH, unit[b], at);
        }
      }
    } else {
#pragma unroll 1
      for (int row = first; row < SPAN_H; row += ROWS_AT_ONCE)
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
          const int column = w + (BY_CHANNELS ? (at + k) / CHANNELS : at + k), ch = BY_CHANNELS ? (at + k) % CHANNELS : 0;
          const bool in = (u32)(h + row) < (u32)s.out_h && (u32)column < (u32)s.out_w && ch < left;
          tile[row * ROW_PITCH + (BY_CHANNELS ? at + k : column_at(at + k))] = in ? Scalar::value(from[(h + row) * line + (i64)column * G_COLUMN + ch]) : 0;
        }
    }
  }
  return true;
}

// =====================================================================================================================
// The gradient for the input
// =====================================================================================================================

// A tap's weights, for the lanes' channels or a thread's; those of one channel lie by columns of taps, so that four are one load.
static constexpr bool ONE_CHANNEL = !BY_CHANNELS && CI_TILE == 1;
static constexpr int WEIGHTS = BY_CHANNELS ? CHANNELS : ONE_CHANNEL ? 1 : (CI_TILE + VEC - 1) / VEC * VEC;
static __device__ __forceinline__ constexpr int tap_at(int kh, int kw) {
  return ONE_CHANNEL ? kw * ((KERNEL_H + VEC - 1) / VEC * VEC) + kh : (kw * KERNEL_H + kh) * WEIGHTS;
}
static constexpr int TAP_WORDS = KERNEL_H * KERNEL_W * WEIGHTS;
static constexpr int TAP_BATCH = (TAP_WORDS + THREADS - 1) / THREADS;

// What a block computes: channels (lanes_are_channels: from `ci` on; else of `group`) of a tile.
struct Item {
  Tile tile;
  int group, ci;
};

static __device__ __forceinline__ Item item_of(u32 index, const Sizes& s) {
  Item item;
  const int block = index % CHANNEL_BLOCKS;  index /= CHANNEL_BLOCKS;
  // A channel's tiles are neighbours: what their halos share comes from L2.
  item.ci = block * CI_TILE;
  const u32 tiles = s.tiles_w * s.tiles_h * s.in_d;
  item.group = index / tiles % C::groups;
  item.tile = tile_of(index % tiles, s);
  item.tile.n = index / tiles / C::groups;
  return item;
}

// A slice's weights.
static __device__ __forceinline__ void load_weights(T (&v)[TAP_BATCH], const T* weight, const Item& item, int co, int kd) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < TAP_BATCH; b++) {
    int i = thread + b * THREADS, c = i % WEIGHTS, tap = kd * (KERNEL_H * KERNEL_W) + i / WEIGHTS;
    bool in = BY_CHANNELS ? item.ci + c < CIN : c < CI_TILE && item.ci + c < CIN_G;
    const i64 row = BY_CHANNELS ? (i64)(item.ci + c) : (i64)(item.group * CIN_G + item.ci + c) * COUT_G + co;
    const T* from = weight + row * TAPS + tap;
    v[b] = 0;
    if (i < TAP_WORDS && in) v[b] = *from;
  }
}

static __device__ __forceinline__ void store_weights(Acc* weights, const T (&v)[TAP_BATCH]) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < TAP_BATCH; b++) {
    int i = thread + b * THREADS, tap = i / WEIGHTS;
    if (i < TAP_WORDS) weights[tap_at(tap / KERNEL_W, tap % KERNEL_W) + i % WEIGHTS] = Scalar::value(v[b]);
  }
}

// What a thread takes: `rows` positions from (ty, tx) on, and where their first word of g's tile lies.
struct Own { int tx, ty, at, mine; };      // mine: its channel, of those of a block
static __device__ __forceinline__ Own own_of(int place, int lane) {
  const int tx = place % TILE_W, ty = place / TILE_W * ROWS, mine = CHANNELS < 32 && lane >= CHANNELS ? CHANNELS - 1 : lane;
  return {tx, ty, ty * STRIDE_H * ROW_PITCH + (BY_CHANNELS ? tx * STRIDE_W * CHANNELS + mine : tx), mine};
}

// A tap's weights of a thread.
static __device__ __forceinline__ void read_weights(Acc (&w)[C::weights_read], const Acc* from, int mine) {
  #pragma unroll
  for (int i = 0; i < C::weights_read; i += VEC) {
    Pack pack = *(const Pack*)(from + i);
#pragma unroll
    for (int k = 0; k < VEC; k++) w[i + k] = pack.v[k];
  }
}

// A position's sums; `q`: the position in its image.
static __device__ __forceinline__ void store_sums(T* gi, const Acc (&acc)[CI_TILE], const Item& item, i64 q, int lane, bool whole_stores, const Sizes& s) {
  const i64 pixels = (i64)s.in_d * s.in_h * s.in_w;
  const int n = item.tile.n;
  #pragma unroll
    for (int i = 0; i < CI_TILE; i++)
      if (CIN_G % CI_TILE == 0 || item.ci + i < CIN_G) gi[((i64)n * CIN + item.group * CIN_G + item.ci + i) * pixels + q] = Scalar::stored(acc[i]);
}

static __device__ __forceinline__ void grad_input(unsigned char* memory, const T* __restrict__ g, const T* __restrict__ weight, T* __restrict__ gi, const Sizes& s, int whole_units) {
  Acc *tile = (Acc*)memory, *weights = tile + G_WORDS;
  const int lane = threadIdx.x & 31;
  const Own own = own_of(BY_CHANNELS ? threadIdx.x / 32 : threadIdx.x, lane);
  const Item item = item_of(blockIdx.x, s);
  Acc acc[ROWS][CI_TILE] = {};
#pragma unroll 1
  for (int slice = 0; slice < COUT_G * C::kernel_d; slice++) {
    const int co = slice / C::kernel_d, kd = slice % C::kernel_d;
    T taps[TAP_BATCH];
    load_weights(taps, weight, item, co, kd);
    if (slice) __syncthreads();            // the slice before has been read
    if (!stage_gradient(tile, g, item.tile, kd, BY_CHANNELS ? item.ci : item.group * COUT_G + co, whole_units, s)) continue;
    store_weights(weights, taps);
    __syncthreads();
#pragma unroll C::unroll_w
    for (int kw = 0; kw < KERNEL_W; kw++) {
      const Acc* column = tile + own.at + column_at(SHIFT + kw * C::dilation_w);
#pragma unroll C::unroll_h
      for (int kh = 0; kh < KERNEL_H; kh++) {
        Acc w[C::weights_read];
        read_weights(w, weights + tap_at(kh, kw), own.mine);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          Acc v = column[(r * STRIDE_H + kh * C::dilation_h) * ROW_PITCH];
#pragma unroll
          for (int i = 0; i < CI_TILE; i++) acc[r][i] = multiply_add(v, w[i], acc[r][i]);
        }
      }
    }
  }
  const Tile& t = item.tile;
  if (t.w + own.tx >= s.in_w || (BY_CHANNELS && (lane >= CHANNELS || item.ci + lane >= CIN))) return;
  const bool whole_stores = C::channels_last && !BY_CHANNELS && (i64)gi % (C::stored * ELEMENT) == 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (t.h + own.ty + r >= s.in_h) break;
    store_sums(gi, acc[r], item, ((i64)t.d * s.in_h + t.h + own.ty + r) * s.in_w + t.w + own.tx, lane, whole_stores, s);
  }
}

// =====================================================================================================================
// The gradient for the weight
// =====================================================================================================================

static constexpr int LANES = BY_CHANNELS ? CHANNELS : 1;  // sums of a warp are those of so many channels
static constexpr int X_TILE = TILE_H * TILE_W;
static constexpr int STRIPS = X_TILE / ROWS / (BY_CHANNELS ? 1 : 32);  // a warp takes a column of `rows` positions, or 32 of them
};

template <class C>
__global__ void __launch_bounds__(Staged<C>::THREADS, C::min_blocks)
grad_input(const typename Staged<C>::T* __restrict__ g, const typename Staged<C>::T* __restrict__ weight, typename Staged<C>::T* __restrict__ gi, int batch, int in_d, int in_h, int in_w,
           int out_d, int out_h, int out_w, int tiles_h, int tiles_w, int whole_units) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Staged<C>::grad_input(memory, g, weight, gi, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_h, tiles_w}, whole_units);
}

// What both grad-weight kernels share: the geometry of g's tile, copies by threads, and the second step.
//
// Rows of x and g in a chunk follow from tile, taps, step (the stride) and dilation; the sets of taps differ only in where their
// chunks begin.

// C: the constants of a tiling (cuda/wgrad/wgrad_tiling.py), and which of wgrad_wgmma.cu's ways it takes. Channels are a group's.
template <class C_>
struct WgradShape {
using C = C_;
using Number = NumberOf<C::precision>;
using Bits = typename Number::Bits;

static constexpr int ELEMENT = Number::SIZE;
static constexpr bool NARROW = ELEMENT == 2;            // of 16 bits
static constexpr int VEC = 16 / ELEMENT;                // elements of a 16-byte unit
static constexpr int TAPS = C::kernel_d * C::kernel_h * C::kernel_w;
static constexpr int SET_TAPS = C::taps_d * C::taps_h * C::taps_w;
static constexpr int SETS = C::sets_d * C::sets_h * C::sets_w;
static constexpr int CIN = C::groups * C::cin;
static constexpr int COUT = C::groups * C::cout;
static constexpr int CI_TILES = (C::cin + C::block_ci - 1) / C::block_ci;
static constexpr int CO_TILES = (C::cout + C::block_co - 1) / C::block_co;

static constexpr int X_ROWS_H = C::tile_h + C::stack - 1;  // of x's tile in a slice; `stack` of them may meet a row of g
static constexpr int X_ROWS = C::tile_n * C::tile_d * X_ROWS_H;
static constexpr int CLASS_ROWS = (C::g_rows_h + C::row_classes - 1) / C::row_classes;
static constexpr int G_ROWS = C::tile_n * C::g_rows_d * (C::row_classes * CLASS_ROWS);
static constexpr int G_BYTES = G_ROWS * (C::channels_last ? C::g_columns : C::block_co) * C::g_pitch * ELEMENT;

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
  c.w = i % s.tiles_w * (C::gapless ? s.in_w : C::tile_w);  i /= s.tiles_w;
  c.h = i % s.tiles_h * (C::gapless ? s.in_h : C::tile_h);  i /= s.tiles_h;
  c.d = i % s.tiles_d * (C::gapless ? s.in_d : C::tile_d);
  c.n = i / s.tiles_d * (C::gapless ? s.batch : C::tile_n);
  return c;
}

// Where g's tile of a chunk begins.
static __device__ __forceinline__ Chunk in_g(const Chunk& c, const Work& work) {
  return {c.n, c.d * C::step_d + work.tap_d * C::dilation_d - C::padding_d, c.h * C::step_h + work.tap_h * C::dilation_h - C::padding_h,
          c.w * C::step_w + work.tap_w * C::dilation_w - C::padding_w};
}

// Of a block; the split that it takes. Blocks of the same pixels are neighbours, for L2's sake.
static __device__ __forceinline__ int take_work(Work& work, int index) {
  int set = index % SETS;  index /= SETS;
  work.co = index % CO_TILES * C::block_co;  index /= CO_TILES;
  work.ci = index % CI_TILES * C::block_ci;  index /= CI_TILES;
  work.group = index % C::groups;
  work.tap_w = set % C::sets_w * C::taps_w;
  work.tap_h = set / C::sets_w % C::sets_h * C::taps_h;
  work.tap_d = set / (C::sets_w * C::sets_h) * C::taps_d;
  return index / C::groups;
}

// (n, d, h) of row `r` of a tile, in its tensor.
struct Rows { int n, d, h; };
static __device__ __forceinline__ Rows x_row(int r) { return {r / (C::tile_d * X_ROWS_H), r / X_ROWS_H % C::tile_d, r % X_ROWS_H}; }
static __device__ __forceinline__ int g_row_h(int h) { return C::dense_h ? h * C::apart_h : h / C::taps_h * C::step_h + h % C::taps_h * C::dilation_h; }
static __device__ __forceinline__ Rows g_row(int r) {
  int h = r % C::g_rows_h, d = r / C::g_rows_h % C::g_rows_d;
  return {r / (C::g_rows_h * C::g_rows_d), C::dense_d ? d * C::apart_d : d / C::taps_d * C::step_d + d % C::taps_d * C::dilation_d, g_row_h(h)};
}
};

// =====================================================================================================================
// Copies by threads
// =====================================================================================================================

struct WgradMemory { int batch, d, h, w; };             // a tensor

// g's tile of a WgradShape S, as threads copy it.
template <class S>
struct WgradG {
  using C = typename S::C;
  static constexpr int ROWS = S::G_ROWS, ROWS_H = C::g_rows_h, BLOCK = C::block_co, CHANNELS = S::COUT, OF_GROUP = C::cout;
  static constexpr int COLUMNS = C::g_columns, UNITS = C::g_units, PITCH = C::g_pitch;
  static __device__ __forceinline__ typename S::Rows row(int r) { return S::g_row(r); }
  static __device__ __forceinline__ int row_h(int h) { return S::g_row_h(h); }
};

// The tile of an operand by so many threads. `at`: where it begins in the tensor; `channel`, of which `left` are the group's.
template <class S, class Operand, int COPIERS>
struct WgradCopies {
using Bits = typename S::Bits;
using Rows = typename S::Rows;
using Place = typename S::Chunk;
static constexpr int ELEMENT = S::ELEMENT, VEC = S::VEC, BLOCK = Operand::BLOCK, PITCH = Operand::PITCH, CHANNELS = Operand::CHANNELS;

static __device__ __forceinline__ void copy(const char* __restrict__ tensor, const WgradMemory& memory, const Place& at, int channel, int left, unsigned char* to, int thread) {
  copy_rows(tensor, memory, at, channel, left, to, thread);
}

// NCHW: [row][channel][column]. Units that hold a border are copied whole; `clear_borders` clears what lies beyond it when they have
// landed. Copies in parts of 4 bytes, by some of a warp's threads each time, take nearly three times as long.
// A thread keeps its channel and place in the row for all rows of the tile: an index for each unit makes address arithmetic the bound.
static __device__ __forceinline__ void copy_rows(const char* __restrict__ tensor, const WgradMemory& memory, const Place& at, int channel, int left, unsigned char* to, int thread) {
  u32 to_address = shared_address(to);
  constexpr int UNITS = Operand::UNITS, ROWS_H = Operand::ROWS_H;
  long long plane = (long long)memory.d * memory.h * memory.w;
#pragma unroll 1
  for (int i = thread; i < BLOCK * UNITS; i += COPIERS) {
    int unit = i % UNITS, c = i / UNITS;
    u32 offset = (c * PITCH + unit * VEC) * ELEMENT;
#pragma unroll 1
    for (int r = 0; r < Operand::ROWS / ROWS_H; r++) {
      Rows of = Operand::row(r * ROWS_H);
      int n = at.n + of.n, d = at.d + of.d;
      bool slice = n < memory.batch && (u32)d < (u32)memory.d && c < left;
      const char* base = tensor + (((long long)n * CHANNELS + channel + c) * plane + (long long)d * memory.h * memory.w + at.w) * ELEMENT;
#pragma unroll 2
      for (int rh = 0; rh < ROWS_H; rh++, offset += BLOCK * PITCH * ELEMENT) {
        int h = at.h + Operand::row_h(rh);
        const char* from = base + (long long)h * (memory.w * ELEMENT);
        int misaligned = (int)((u64)from & 15), first = at.w + (unit * 16 - misaligned) / ELEMENT;  // column of the first element
        from += unit * 16 - misaligned;
        bool in = slice && (u32)h < (u32)memory.h && first + VEC > 0 && first < memory.w;
        copy16(to_address + offset, in ? from : tensor, in ? 16 : 0);
      }
    }
  }
}

// NCHW: whether rows of the tile reach beyond the image.
static __device__ __forceinline__ bool has_borders(const WgradMemory& memory, const Place& at) {
  return at.w < 0 || at.w + Operand::COLUMNS > memory.w;
}

// Clears elements before column 0 and from column `memory.w` on, in the units that hold such a border.
static __device__ __forceinline__ void clear_borders(const char* tensor, const WgradMemory& memory, const Place& at, int channel, unsigned char* to, int thread) {
  u32 plane = (u32)memory.d * memory.h * memory.w;
#pragma unroll 1
  for (int i = thread; i < Operand::ROWS * BLOCK; i += COPIERS) {
    int c = i % BLOCK, row = i / BLOCK;
    Rows of = Operand::row(row);
    u32 first = (u32)((u64)tensor / ELEMENT) + ((u32)(at.n + of.n) * CHANNELS + channel + c) * plane + ((u32)(at.d + of.d) * memory.h + at.h + of.h) * memory.w + at.w;
    int zero = (int)(first & (VEC - 1)) - at.w, end = zero + memory.w;  // elements of column 0 and of the one behind the last
    Bits* line = (Bits*)(to + (row * BLOCK + c) * PITCH * ELEMENT);
    if (zero > 0 && zero < Operand::UNITS * VEC)
      for (int e = zero & ~(VEC - 1); e < zero; e++) line[e] = 0;
    if (end > 0 && end < Operand::UNITS * VEC)
      for (int e = end; e & (VEC - 1); e++) line[e] = 0;
  }
}
};

// =====================================================================================================================
// Slices of partial sums, [slice][tap][COUT][cin]
// =====================================================================================================================

// The second step: slices are added in the order of their index. A block takes 32 input channels of some rows of a slice. Of large
// weights these are 64 rows (reduce_rows), turned through shared memory, so that slices are read and the weight is written in whole
// sectors; of small ones it is one row, and the block's warps divide the slices, since more rows leave blocks idle.
constexpr int WGRAD_RUNS = 8;              // warps of a block

template <class C>
struct WgradReduce {
using S = WgradShape<C>;
using Bits = typename S::Bits;
static constexpr int RUNS = WGRAD_RUNS, ROWS = S::COUT * S::TAPS;
static constexpr int OF_BLOCK = C::reduce_rows, ROWS_EACH = OF_BLOCK < RUNS ? 1 : OF_BLOCK / RUNS;
static constexpr int AT_ONCE = OF_BLOCK == 1 ? 8 : 2;   // slices

struct Weight {
  char* at;
  long long ci, co, tap;                   // strides
  long long wide;                          // whether it is float32, whatever the operands are

  __device__ __forceinline__ void store(long long to, float v) const {
    if (S::NARROW && !wide) ((Bits*)at)[to] = (Bits)S::Number::bits(v);
    else ((float*)at)[to] = v;
  }
};

struct Row {
  long long from, to;                      // first element in a slice, and in the weight
};

// Rows are counted as the weight has them.
static __device__ __forceinline__ Row row_at(int row, const Weight& weight) {
  int group = row / (C::cout * S::TAPS), j = row % (C::cout * S::TAPS);
  bool taps_inside = weight.tap <= weight.co;
  int co = taps_inside ? j / S::TAPS : j % C::cout, tap = taps_inside ? j % S::TAPS : j / C::cout;
  return {((long long)tap * S::COUT + group * C::cout + co) * C::cin, group * C::cin * weight.ci + co * weight.co + tap * weight.tap};
}

static __device__ __forceinline__ void add(const float* __restrict__ partial, int slices, const Weight& weight) {
  __shared__ float sums[OF_BLOCK < RUNS ? RUNS : OF_BLOCK][33];
  const long long total = (long long)S::TAPS * S::COUT * C::cin;
  constexpr int COLUMNS_OF_BLOCKS = (C::cin + 31) / 32;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int c = blockIdx.x % COLUMNS_OF_BLOCKS * 32 + lane, first = blockIdx.x / COLUMNS_OF_BLOCKS * OF_BLOCK;
  int share = OF_BLOCK == 1 ? (slices + RUNS - 1) / RUNS : slices, begin = OF_BLOCK == 1 ? warp * share : 0, end = begin + share < slices ? begin + share : slices;
  long long from[ROWS_EACH];
  float sum[ROWS_EACH];
#pragma unroll
  for (int k = 0; k < ROWS_EACH; k++) {
    int row = OF_BLOCK == 1 ? first : first + warp + k * RUNS;
    from[k] = row < ROWS && c < C::cin ? row_at(row, weight).from + c : -1;
    sum[k] = 0.f;
  }
#pragma unroll AT_ONCE
  for (int i = begin; i < end; i++)
#pragma unroll
    for (int k = 0; k < ROWS_EACH; k++)
      if (from[k] >= 0) sum[k] += partial[i * total + from[k]];
#pragma unroll
  for (int k = 0; k < ROWS_EACH; k++) sums[warp + k * RUNS][lane] = sum[k];
  __syncthreads();
  if (OF_BLOCK == 1) {
    if (warp) return;
#pragma unroll
    for (int run = 1; run < RUNS; run++) sum[0] += sums[run][lane];
    sums[0][lane] = sum[0];
    __syncwarp();
  }
  c -= lane;
#pragma unroll 1
  for (int i = threadIdx.x; i < OF_BLOCK * 32; i += 32 * RUNS) {  // neighbouring threads write neighbours
    int row = weight.ci == 1 ? i / 32 : i % OF_BLOCK, column = weight.ci == 1 ? i % 32 : i / OF_BLOCK;
    if (first + row < ROWS && c + column < C::cin) weight.store(row_at(first + row, weight).to + (c + column) * weight.ci, sums[row][column]);
  }
}
};

template <class C>
__global__ void __launch_bounds__(32 * WGRAD_RUNS)
reduce(const float* __restrict__ partial, char* __restrict__ out, int slices, long long stride_ci, long long stride_co, long long stride_tap, long long wide) {
  WgradReduce<C>::add(partial, slices, {out, stride_ci, stride_co, stride_tap, wide});
}

// Matrix instructions, by a kernel's precision P (number.cuh). PTX is here and in ptx.cuh, and nowhere else.

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
// K is split over ranges of chunks and WARPS_K warps; each writes its own partial sums, `reduce` adds them in the order of
// their index: the same bits in every run, without atomics.

template <class C_>
struct WgradSync {
using C = C_;
using S = WgradShape<C>;
using Number = typename S::Number;
using Sizes = typename S::Sizes;
using Chunk = typename S::Chunk;
using Work = typename S::Work;
using Rows = typename S::Rows;

static constexpr int ELEMENT = S::ELEMENT, VEC = S::VEC;
static constexpr bool NARROW = S::NARROW, LAST = C::channels_last;
static constexpr int WARPS = 8, THREADS = WARPS * 32;
static constexpr int WARPS_M = C::block_ci / C::warp_m;
static constexpr int WARPS_N = C::block_co / C::warp_n;
static constexpr int WARPS_K = WARPS / (WARPS_M * WARPS_N);
static constexpr int M_FRAGMENTS = C::warp_m / 16;
static constexpr int N_FRAGMENTS = C::warp_n / 8;
static constexpr int X_BYTES = S::X_ROWS * (LAST ? C::tile_w : C::block_ci) * C::x_pitch * ELEMENT;
static constexpr int STAGE_BYTES = X_BYTES + S::G_BYTES;

static constexpr int W_STRIPS = C::tile_w / 8;          // a strip is 8 columns of a row
static constexpr int STRIPS = S::X_ROWS * W_STRIPS;
static constexpr int STEPS = NARROW ? STRIPS / 2 : STRIPS;  // a matrix instruction takes one strip of float32, two of 16-bit types
static constexpr bool PROMOTES = C::precision == IEEE;  // sums leave the tensor cores, which truncate them, after every chunk
static constexpr int PARTS = PROMOTES ? 2 : 1;

using Sums = float[S::SET_TAPS][M_FRAGMENTS][N_FRAGMENTS][4];

struct X {                                              // as threads copy it
  static constexpr int ROWS = S::X_ROWS, ROWS_H = S::X_ROWS_H, BLOCK = C::block_ci, CHANNELS = S::CIN, OF_GROUP = C::cin;
  static constexpr int COLUMNS = C::tile_w, UNITS = C::x_units, PITCH = C::x_pitch;
  static __device__ __forceinline__ Rows row(int r) { return S::x_row(r); }
  static __device__ __forceinline__ int row_h(int h) { return h; }
};
using CopiesX = WgradCopies<S, X, THREADS>;
using CopiesG = WgradCopies<S, WgradG<S>, THREADS>;

static __device__ __forceinline__ WgradMemory x_memory(const Sizes& s) { return {s.batch, s.in_d, s.in_h, s.in_w}; }
static __device__ __forceinline__ WgradMemory g_memory(const Sizes& s) { return {s.batch, s.out_d, s.out_h, s.out_w}; }

static __device__ __forceinline__ void copy_chunk(const char* __restrict__ x, const char* __restrict__ g, const Sizes& s, const Chunk& c, const Work& work, unsigned char* stage, int thread) {
  CopiesX::copy(x, x_memory(s), c, work.group * C::cin + work.ci, C::cin - work.ci, stage, thread);
  CopiesG::copy(g, g_memory(s), S::in_g(c, work), work.group * C::cout + work.co, C::cout - work.co, stage + X_BYTES, thread);
}

// =====================================================================================================================
// Multiplications
// =====================================================================================================================

struct Lane {                              // of a warp
  int lane, g, q;                          // row of a fragment, place in it
  int m, n, k;                             // the warp's first channels of the block, its part of K
  u32 x_phase, g_phase;                    // NCHW: elements by which row g of a chunk's tiles is misaligned, before a row's own share
};

struct Half {                              // of a step's K
  int x_at;                                // where it lies in x's tile
  int row_n, row_d, row_h, column;         // and in g's, before the tap's share
};

static __device__ __forceinline__ Half half_of(int step, int k, const Sizes& s, u32 x_phase) {
  int strip = NARROW ? 2 * step + k : step, row = strip / W_STRIPS;
  Rows at = S::x_row(row);
  Half half;
  half.row_n = at.n * C::g_rows_d;
  half.row_d = at.d * C::q_rows_d;
  half.row_h = at.h * C::q_rows_h;
  half.column = strip % W_STRIPS * 8 + (NARROW ? 0 : 4 * k);
  int phase = C::aligned_x ? 0 : (x_phase + ((u32)(at.n * S::CIN) * s.in_d + at.d) * s.in_h * s.in_w + at.h * s.in_w) & (VEC - 1);
  half.x_at = row * C::block_ci * C::x_pitch + half.column + phase;
  return half;
}

// Where a half begins in g's tile for a row of taps.
static __device__ __forceinline__ int g_at(const Half& half, int td, int th, const Sizes& s, u32 g_phase) {
  int d = half.row_d + td * C::tap_rows_d, h = half.row_h + th * C::tap_rows_h;
  int row = (half.row_n + d) * C::g_rows_h + h;
  int image = half.row_n / C::g_rows_d;
  int at_d = C::dense_d ? d * C::apart_d : half.row_d / C::taps_d * C::step_d + td * C::dilation_d;
  int at_h = C::dense_h ? h * C::apart_h : half.row_h / C::taps_h * C::step_h + th * C::dilation_h;
  int phase = (g_phase + ((u32)(image * S::COUT) * s.out_d + at_d) * s.out_h * s.out_w + (u32)at_h * s.out_w) & (VEC - 1);
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
static __device__ __forceinline__ void set_parts(u32 (&parts)[PARTS][REGISTERS], int r, u32 v) {
  parts[0][r] = to_tf32_quick(__uint_as_float(v));
  parts[1][r] = low_part(__uint_as_float(v), parts[0][r]);
}

static __device__ __forceinline__ void load_x(u32 (&a)[M_FRAGMENTS][PARTS][4], const unsigned char* stage, const Half (&half)[2], const Lane& of) {
  const u32* xs = (const u32*)stage;
#pragma unroll
  for (int i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
    for (int r = 0; r < 4; r++) {
      int m = of.m + i * 16 + (r & 1) * 8 + of.g, k = r >> 1;
      u32 v;
      v = element_pair(xs, half[k].x_at + m * C::x_pitch + (NARROW ? 2 * of.q : of.q), 1);
      set_parts(a[i], r, v);
    }
}

static __device__ __forceinline__ void load_g(u32 (&b)[N_FRAGMENTS][PARTS][2], const unsigned char* stage, const int (&base)[2], int tw, const Lane& of) {
  const u32* gs = (const u32*)(stage + X_BYTES);
#pragma unroll
  for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int n = of.n + j * 8 + of.g;
      u32 v;
      v = element_pair(gs, base[k] + n * C::g_pitch + (NARROW ? 2 * of.q : of.q) * C::step_w + tw * C::dilation_w, C::step_w);
      set_parts(b[j], k, v);
    }
}

static __device__ __forceinline__ void multiply(float (&acc)[M_FRAGMENTS][N_FRAGMENTS][4], const u32 (&a)[M_FRAGMENTS][PARTS][4], const u32 (&b)[N_FRAGMENTS][PARTS][2]) {
#pragma unroll
  for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; i++) {
      // the small products first
        mma_of<C::precision>(acc[i][j], a[i][1], b[j][0][0], b[j][0][1]);
        mma_of<C::precision>(acc[i][j], a[i][0], b[j][1][0], b[j][1][1]);
      mma_of<C::precision>(acc[i][j], a[i][0], b[j][0][0], b[j][0][1]);
    }
}

// One chunk of a stage: all its steps that are this warp's.
static __device__ __forceinline__ void multiply_chunk(Sums& acc, const unsigned char* stage, const Sizes& s, const Lane& of) {
#pragma unroll 1
  for (int step = of.k; step < STEPS; step += WARPS_K) {
    const Half half[2] = {half_of(step, 0, s, of.x_phase), half_of(step, 1, s, of.x_phase)};
    u32 a[M_FRAGMENTS][PARTS][4];
    load_x(a, stage, half, of);
#pragma unroll
    for (int td = 0; td < C::taps_d; td++)
#pragma unroll
      for (int th = 0; th < C::taps_h; th++) {
        const int base[2] = {g_at(half[0], td, th, s, of.g_phase), g_at(half[1], td, th, s, of.g_phase)};
#pragma unroll
        for (int tw = 0; tw < C::taps_w; tw++) {
          u32 b[N_FRAGMENTS][PARTS][2];
          load_g(b, stage, base, tw, of);
          multiply(acc[(td * C::taps_h + th) * C::taps_w + tw], a, b);
        }
      }
  }
}

// =====================================================================================================================
// A block
// =====================================================================================================================

// NCHW: what lies beyond the borders of a chunk's tiles, and how its rows are misaligned.
static __device__ __forceinline__ void begin_rows(Lane& of, const char* x, const char* g, const Sizes& s, const Chunk& c, const Work& work, unsigned char* stage, int thread) {
  const Chunk at = S::in_g(c, work);
  int first_x = work.group * C::cin + work.ci, first_g = work.group * C::cout + work.co;
  bool borders_x = CopiesX::has_borders(x_memory(s), c), borders_g = CopiesG::has_borders(g_memory(s), at);
  if (borders_x) CopiesX::clear_borders(x, x_memory(s), c, first_x, stage, thread);
  if (borders_g) CopiesG::clear_borders(g, g_memory(s), at, first_g, stage + X_BYTES, thread);
  if (borders_x || borders_g) __syncthreads();
  // Rows 8 channels apart have the same alignment, so that a lane has one for each row of a tile.
  int channel_x = first_x + of.g, channel_g = first_g + of.g;
  of.x_phase = (u32)((u64)x / ELEMENT) + (((u32)c.n * S::CIN + channel_x) * s.in_d + c.d) * s.in_h * s.in_w + (u32)c.h * s.in_w + c.w;
  of.g_phase = (u32)((u64)g / ELEMENT) + (((u32)c.n * S::COUT + channel_g) * s.out_d + at.d) * s.out_h * s.out_w + (u32)at.h * s.out_w + at.w;
}

static __device__ __forceinline__ void store(const Sums& sums, float* __restrict__ partial, const Work& work, int split, const Lane& of) {
  long long slice = ((long long)split * WARPS_K + of.k) * (S::TAPS * S::COUT * (long long)C::cin);
#pragma unroll
  for (int tap = 0; tap < S::SET_TAPS; tap++) {
    int kd = work.tap_d + tap / (C::taps_h * C::taps_w), kh = work.tap_h + tap / C::taps_w % C::taps_h, kw = work.tap_w + tap % C::taps_w;
    if (kd >= C::kernel_d || kh >= C::kernel_h || kw >= C::kernel_w) continue;
    float* to = partial + slice + ((long long)((kd * C::kernel_h + kh) * C::kernel_w + kw) * S::COUT + work.group * C::cout) * C::cin;
#pragma unroll
    for (int i = 0; i < M_FRAGMENTS; i++)
#pragma unroll
      for (int j = 0; j < N_FRAGMENTS; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int m = work.ci + of.m + i * 16 + of.g + e / 2 * 8, n = work.co + of.n + j * 8 + 2 * of.q + e % 2;
          if (m < C::cin && n < C::cout) to[(long long)n * C::cin + m] = sums[tap][i][j][e];
        }
  }
}

static __device__ __forceinline__ void run(const char* __restrict__ x, const char* __restrict__ g, float* __restrict__ partial, const Sizes& s, unsigned char* memory) {
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
  store(sum, partial, work, split, of);
}
};

// partial: [splits * WARPS_K][TAPS][COUT][cin] float32.
template <class C>
__global__ void __launch_bounds__(WgradSync<C>::THREADS, 1)
wgrad(const char* __restrict__ x, const char* __restrict__ g, float* __restrict__ partial, int batch, int in_d, int in_h, int in_w,
      int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split) {
  extern __shared__ __align__(1024) unsigned char memory[];
  WgradSync<C>::run(x, g, partial, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split}, memory);
}

// =====================================================================================================================
// Forward: 4x256 cells x 8 channels, 256 threads x 8x2x12 outputs, 1 stages of 8 channels, 4224 blocks.
// =====================================================================================================================

struct Forward {
  static constexpr int precision = 1, groups = 4, cin_g = 8, cout_g = 16, kernel_d = 1, kernel_h = 3, kernel_w = 5;
  static constexpr int stride_d = 1, stride_h = 2, stride_w = 3, dilation_d = 1, dilation_h = 2, dilation_w = 1;
  static constexpr int padding_d = 0, padding_h = 1, padding_w = 2, min_h = -1, span_h = 2, min_w = 0, span_w = 1;
  static constexpr int co_tile = 8, threads = 256, cells = 4, block_x = 64, block_h = 4, slots = 1, chunk = 8;
  static constexpr int phases_h = 2, stages = 1, step_kh = 1, row_pitch = 325, run_pitch = 12, part = 4, min_blocks = 1;
  static constexpr bool channels_last = false;
};

// =====================================================================================================================
// Gradient for the input: tiles of 32x32 positions in 27 KB, lanes are columns, a thread takes 4 rows x 8 input
// channels.
// =====================================================================================================================

struct GradInput {
  static constexpr int kernel_d = 1, kernel_h = 3, kernel_w = 5, stride_d = 1, stride_h = 2, stride_w = 3;
  static constexpr int dilation_d = 1, dilation_h = 2, dilation_w = 1, padding_d = 0, padding_h = 1, padding_w = 2;
  static constexpr int precision = 1, channels = 1, groups = 4, cin_g = 8, cout_g = 16, tile_h = 32, tile_w = 32;
  static constexpr int rows = 4, ci_tile = 8, span_h = 67, span_w = 98, shift = 0, plane_pitch = 34, vector = 2;
  static constexpr int batch = 14, threads = 256, min_blocks = 2, weights_read = 8, stored = 4, unroll_h = 3;
  static constexpr int unroll_w = 1;
  static constexpr bool channels_last = false, lanes_are_channels = false;
};

// =====================================================================================================================
// Gradient for the weight: mma.sync ieee, 16x16 channels x 1x3x5 taps a block, chunks of 1x1x8x32 (NxDxHxW of q), K in
// 132 slices, 171 KB shared.
// =====================================================================================================================

struct GradWeight {
  static constexpr int precision = 1, groups = 4, cin = 8, cout = 16, block_ci = 16, block_co = 16, g_columns = 98;
  static constexpr int g_units = 26, g_pitch = 108, reduce_rows = 1, tile_n = 1, kernel_d = 1, step_d = 1;
  static constexpr int dilation_d = 1, padding_d = 0, taps_d = 1, sets_d = 1, tile_d = 1, kernel_h = 3, step_h = 2;
  static constexpr int dilation_h = 2, padding_h = 1, taps_h = 3, sets_h = 1, tile_h = 8, kernel_w = 5, step_w = 3;
  static constexpr int dilation_w = 1, padding_w = 2, taps_w = 5, sets_w = 1, tile_w = 32, apart_d = 1, g_rows_d = 1;
  static constexpr int q_rows_d = 1, tap_rows_d = 1, apart_h = 2, g_rows_h = 10, q_rows_h = 1, tap_rows_h = 1;
  static constexpr int warp_m = 16, warp_n = 8, x_units = 8, x_pitch = 36, stack = 1, row_classes = 1;
  static constexpr bool channels_last = false, dense_d = true, dense_h = true, aligned_x = true, gapless = false;
};

}  // namespace kernels

namespace {

// A tensor's memory, as whatever pointer a kernel takes.
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
             int blocks, const std::array<int, 8>& sizes) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor packed = at::empty({30720}, weight.options().dtype(at::kByte));
  kernels::direct_pack<kernels::WeightRows<kernels::Forward>><<<30, 256, 0, stream>>>(of(weight), of(packed), 240,
      15, 0, 5, 1, 7680);
  kernels::direct<kernels::Forward><<<blocks, 256, shared(kernels::direct<kernels::Forward>, 66272), stream>>>(
      of(x), of(packed), of(bias), of(out), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
      sizes[7]);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void grad_input(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& out,
                int blocks, const std::array<int, 10>& sizes) {
  const c10::cuda::CUDAGuard guard(grad.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  kernels::grad_input<kernels::GradInput><<<blocks, 256, 27824, stream>>>(of(grad), of(weight), of(out), sizes[0],
      sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9]);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void grad_weight(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& out,
                 int blocks, int slices, const std::array<int, 12>& sizes) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor sums = at::empty({int64_t(slices) * 30720}, x.options().dtype(at::kByte));
  kernels::wgrad<kernels::GradWeight><<<blocks, 256, shared(kernels::wgrad<kernels::GradWeight>, 175104), stream>>>(
      of(x), of(grad), of(sums), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7],
      sizes[8], sizes[9], sizes[10], sizes[11]);
  kernels::reduce<kernels::GradWeight><<<960, 256, 0, stream>>>(of(sums), of(out), slices, 240, 15, 1, 1);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
"""

HEADERS = ("#include <array>\n", "#include <optional>\n")  # of the functions that Python calls


@functools.cache
def build(fast: bool = True):
    """Compiles the fast or the plain kernels and loads them; PyTorch keeps what is compiled in its extensions' folder.

    The first call of ModelNew does it by itself; it takes a minute or two. Plain ones are for the GPU that there is.

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
        cpp_sources="".join((*HEADERS, *(f"void {name}({of});\n" for name, of in functions))),
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
    """(blocks, sizes): a block takes cells, the results between two strides, of one row of depth."""
    rows, columns = ceil(result[1], 8), ceil(result[2], 768)  # of blocks
    return batch * result[0] * rows * columns * 8, (*source, *result, rows, columns)


def grad_input_launch(batch, source, result, processors):
    """(blocks, sizes): a block takes a tile, and what it needs of the output's gradient."""
    rows, columns = ceil(result[1], 32), ceil(result[2], 32)  # of blocks
    blocks = batch * result[0] * rows * columns * 4
    return blocks, (batch, *result, *source, rows, columns, int(source[2] % 2 == 0))


def grad_weight_launch(batch, source, result, processors):
    """(blocks, slices of sums, sizes): blocks share the chunks of 1x1x8x32 pixels, their sums are added after.

    The chunks are cut into as many shares as make 1 wave of blocks, and no more than 96 MB of sums are made.
    """
    counts = [ceil(n, tile) for n, tile in zip((batch, source[0], source[1], source[2]), (1, 1, 8, 32))]
    chunks = math.prod(counts)
    each = ceil(chunks, max(1, min(chunks, 819, processors // 4)))  # of a share
    shares = ceil(chunks, each)
    return shares * 4, shares * 4, (batch, *source, *result, *counts[1:], chunks, each)


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
    fitting = tuple(shape) == WEIGHT and given == LAYER and x.dtype == DTYPE
    positions = math.prod(x.shape[2:]) * math.prod(LAYER.stride)  # of an image, at most, which kernels count in 32 bits
    return fitting and max(x.shape[0], positions) < 2**30 and processors(x.get_device()) > 0


def dense(t: Tensor, multiple: int = 1) -> Tensor:
    """The tensor in the fast kernels' memory format, beginning at 16 bytes; with zeros at the end of each row, so that
    its columns are a multiple, where rows must begin at 16 bytes, too: they add nothing to any sum."""
    more = -t.shape[-1] % multiple
    if more:
        wide = t.new_zeros((*t.shape[:-1], t.shape[-1] + more))
        wide[..., : t.shape[-1]] = t
        return wide
    t = t.contiguous(memory_format=FORMAT)
    return t.clone() if t.data_ptr() % 16 else t


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, given: Arguments) -> Tensor:
    """(batch, channels, *size) -> (batch, other channels, *output_size). Weights are packed at each call."""
    x, weight = x.resolve_neg(), weight.resolve_neg().contiguous()
    bias = None if bias is None else bias.resolve_neg().contiguous()
    shape = (x.shape[0], weight.shape[1] * given.groups, *output_size(x.shape[2:], weight.shape[2:], given))
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=FORMAT)
    if out.numel() == 0:
        return out
    if is_fast(x, weight.shape, given):
        x = dense(x)
        launch = forward_launch(x.shape[0], full(x), full(out), processors(x.get_device()))
        build(True).forward(x, weight, bias, out, *launch)
        return out
    x, result = x.contiguous(), out.contiguous()
    build(False).forward(x, weight, bias, result, plain_layer(x, weight, result, given))
    return out.copy_(result)


def grad_input(grad: Tensor, weight: Tensor, size, given: Arguments) -> Tensor:
    """(batch, other channels, *output_size) -> (batch, channels, *size)."""
    grad, weight = grad.resolve_neg(), weight.resolve_neg().contiguous()
    shape = (grad.shape[0], weight.shape[0], *size)
    out = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=FORMAT)
    if out.numel() == 0:
        return out
    if is_fast(grad, weight.shape, given):
        grad = dense(grad)
        launch = grad_input_launch(grad.shape[0], full(grad), full(out), processors(grad.get_device()))
        build(True).grad_input(grad, weight, out, *launch)
        return out
    grad, result = grad.contiguous(), out.contiguous()
    build(False).grad_input(grad, weight, result, plain_layer(result, weight, grad, given))
    return out.copy_(result)


def grad_weight(x: Tensor, grad: Tensor, shape, given: Arguments) -> Tensor:
    """Inputs and gradients of the outputs -> (channels, other channels // groups, *kernel), which is the shape."""
    x, grad = x.resolve_neg(), grad.resolve_neg()
    out = torch.zeros(shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    if is_fast(x, shape, given):
        x, grad = dense(x, 4), dense(grad)
        launch = grad_weight_launch(x.shape[0], full(x), full(grad), processors(x.get_device()))
        build(True).grad_weight(x, grad, out, *launch)
        return out
    x, grad = x.contiguous(), grad.contiguous()
    build(False).grad_weight(x, grad, out, plain_layer(x, out, grad, given))
    return out


class ConvTranspose(torch.autograd.Function):
    """Of an input x, a weight w and an output y two give the third, linearly in both: so do the derivatives."""

    @staticmethod
    def forward(x, w, y, bias, size, shape, given):
        if y is None:
            return forward(x, w, bias, given)
        return grad_input(y, w, size, given) if x is None else grad_weight(x, y, shape, given)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, y, _, *ctx.rest = inputs
        ctx.save_for_backward(x, w, y)

    @staticmethod
    def backward(ctx, grad):
        x, w, y = (grad if t is None else t for t in ctx.saved_tensors)
        by_x, by_w, by_y, by_bias, *_ = ctx.needs_input_grad
        return (
            ConvTranspose.apply(None, w, y, None, *ctx.rest) if by_x else None,
            ConvTranspose.apply(x, None, y, None, *ctx.rest) if by_w else None,
            ConvTranspose.apply(x, w, None, None, *ctx.rest) if by_y else None,
            grad.sum((0, *range(2, grad.dim()))) if by_bias else None,
            *(None,) * 3,
        )


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
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple,
        stride: tuple = (1, 1),
        padding: tuple = (0, 0),
        dilation: tuple = (1, 1),
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose2d = Layer(
            in_channels,
            out_channels,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, channels, height, width) or the same without batch, any sizes -> likewise."""
        single = x.dim() == RANK + 1
        if single:
            x = x.unsqueeze(0)
        layer = self.conv_transpose2d
        weight, bias = layer.weight, layer.bias
        if torch.is_autocast_enabled():
            x = x.to(weight.dtype)
        check(x, weight, layer.given)
        out = ConvTranspose.apply(x, weight, None, bias, x.shape[2:], weight.shape, layer.given)
        return out.squeeze(0) if single else out
