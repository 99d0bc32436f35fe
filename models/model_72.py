"""KernelBench level 1, problem 72: a transposed convolution with CUDA kernels of its own, in one file.

Layer: ConvTranspose3d(32, 32, kernel_size=(3, 5, 7), stride=(2, 2, 2), padding=(1, 2, 3), output_padding=(1, 1, 1),
groups=4).

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
- Tensors are copied to the contiguous memory format where needed; so are those whose rows are no multiple of 4
  columns. Results are contiguous.
- Results are bit-equal from run to run. Under torch.autocast they have the weights' dtype.

Kernels, which serve every batch and spatial size, as planned for inputs of 8 x 32 x 12 x 24 x 48 on an NVIDIA H200:
- forward: wgmma ieee, tile 1x1x2x64 (NxDxHxW of q) x 128 rows, chunk of 8 channels, pixels halved, weights ring of
  7 x 6 fragments, 222 KB shared.
- gradient for the input: tiles of 8x16 cells in 33 KB, lanes are columns, a thread takes 4 rows x 8 channels.
- gradient for the weight: mma.sync ieee, 16x8 channels x 1x2x7 taps a block, chunks of 2x1x8x16 (NxDxHxW of q), K
  in 88 slices, 128 KB shared.

A block of the forward:
  input -> 2 slots -> turned by 6 warps -> ring of 2 tiles (1 x 2 x 64 pixels, halo, 8 channels) --+
  weights -> packed -> ring of 7 x 6 fragments ----------------------------------------------------+-> result
  Roles: six warps that turn, a thread that loads pixels, one that loads weights, two warpgroups that multiply.

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

WEIGHT = (32, 8, 3, 5, 7)
LAYER = Arguments(stride=(2, 2, 2), padding=(1, 2, 3), output_padding=(1, 1, 1), dilation=(1, 1, 1), groups=4)
DTYPE, FORMAT, RANK = torch.float32, torch.contiguous_format, 3
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

// Dependent launches (sm_90): a kernel launched so begins when all blocks of the one before let it; else these do nothing.
__device__ __forceinline__ void let_dependent_begin() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
// And waits for what that one wrote.
__device__ __forceinline__ void wait_for_results() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// --- mbarriers: `count` arrivals (and the announced bytes) complete a phase; waits name the phase by its parity -------

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(count));
}
// What was initialised is seen by copies and, in a cluster, by other blocks.
__device__ __forceinline__ void barriers_begun() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}
// One thread arrives, and the phase waits for so many bytes of copies too.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_done(barrier, parity)) {}
}

// --- copies into shared memory ----------------------------------------------------------------------------------------

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {  // the rest of the 16 becomes zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory"); }

// --- bulk copies (sm_90): one thread starts them; those to shared memory count at a barrier, those from it in groups ---

struct alignas(64) TensorMap { u64 opaque[16]; };  // a CUtensorMap; <cuda.h> does not compile under NVRTC

// Whole 16 bytes.
__device__ __forceinline__ void copy_bulk(u32 to, const char* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// A box of a tensor, whose first element has these coordinates, innermost first; zeros where the tensor has none.
__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, int a, int b, int c, int d, int e, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];\n"
      ::"r"(to), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(barrier) : "memory");
}
// What the thread stored in shared memory, or anywhere, is seen by wgmma and bulk copies behind it.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// --- loads and stores -------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_shared_u32(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_shared_u16(u32 a) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ void load_shared_128(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void load_shared_64(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];\n" : "=r"(v[0]), "=r"(v[1]) : "r"(a) : "memory");
}
__device__ __forceinline__ void store_shared_u32(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(a), "r"(v) : "memory"); }
__device__ __forceinline__ void store_shared_128(u32 a, u32 v0, u32 v1, u32 v2, u32 v3) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"r"(a), "r"(v0), "r"(v1), "r"(v2), "r"(v3) : "memory");
}
__device__ __forceinline__ void store_shared_f32x2(u32 a, float v, float w) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};\n" ::"r"(a), "f"(v), "f"(w) : "memory");
}

// Stores under a predicate, never a branch: ptxas makes hundreds of branches of an epilogue.
__device__ __forceinline__ void store_global_if(void* to, u32 v, bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.global.u32 [%0], %1;\n}\n" ::"l"(to), "r"(v), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_64_if(void* to, const u32 (&v)[4], bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n @p st.global.v2.u32 [%0], {%1,%2};\n}\n" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_128_if(void* to, const u32 (&v)[4], bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p st.global.v4.u32 [%0], {%1,%2,%3,%4};\n}\n" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"((u32)ok) : "memory");
}
__device__ __forceinline__ void store_global_16_if(void* to, u32 v, bool ok) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.global.u16 [%0], %1;\n}\n" ::"l"(to), "h"((u16)v), "r"((u32)ok) : "memory");
}

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
// A warpgroup's registers for each thread (sm_90a): some are given back, or more taken.
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS)); }
template <int REGISTERS>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS)); }

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

// --- matrix instructions ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory"); }

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

// --- wgmma: one warpgroup, D[64 x N] += A[64 x K] B[K x N] of 32 bytes of K, N = 8 to 256 ---------------------------------

// `WgmmaOf<N>::multiply<P, A_TURNED, B_TURNED, ADDS>(d, a, b)`: B is in shared memory, by its descriptor; A in registers, or in shared
// memory too, by its descriptor. Fragments (g = lane / 4, t = lane % 4): D[4j + 2h + c] is row 16 warp + g + 8h, column 8j + 2t + c.
// Without ADDS D is A B.
template <int N> struct WgmmaOf;

#define WGMMA_TEXT(n, types, sums, a, b, rest) "wgmma.mma_async.sync.aligned.m64n" n types " {" sums "}, " a ", " b ", " rest ";\n"
#define WGMMA_FRAGMENTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// A width: the numbers of its sums in PTX, those of the operands behind them, and the sums.
#define WGMMA_WIDTH(n, sums, x0, x1, x2, x3, x4, x5, x6, ...) \
  template <> struct WgmmaOf<n> { \
    template <int P, bool A_TURNED, bool B_TURNED, bool ADDS, int COUNT> \
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], const u32 (&a)[4], u64 b) { \
      asm volatile(WGMMA_TEXT(#n, "k8.f32.tf32.tf32", sums, "{" x0 "," x1 "," x2 "," x3 "}", x4, x5 ", 1, 1") : __VA_ARGS__ : WGMMA_FRAGMENTS, "l"(b), "n"(ADDS)); \
    } \
    template <int P, bool A_TURNED, bool B_TURNED, bool ADDS, int COUNT> \
    static __device__ __forceinline__ void multiply(float (&d)[COUNT], u64 a, u64 b) { \
      asm volatile(WGMMA_TEXT(#n, "k8.f32.tf32.tf32", sums, x0, x1, x2 ", 1, 1") : __VA_ARGS__ : "l"(a), "l"(b), "n"(ADDS)); \
    } \
  };
#define FOUR_SUMS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_FROM(i) FOUR_SUMS(i), FOUR_SUMS(i + 4), FOUR_SUMS(i + 8), FOUR_SUMS(i + 12)
#define NUMBERS_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NUMBERS_1 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
WGMMA_WIDTH(64, NUMBERS_0 "," NUMBERS_1, "%32", "%33", "%34", "%35", "%36", "%37", "%38", SUMS_FROM(0), SUMS_FROM(16))

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
static constexpr int KERNEL_H = C::kernel_h, KERNEL_W = C::kernel_w, TAPS = C::kernel_d * C::kernel_h * C::kernel_w;
static constexpr int THREADS = C::threads, WARPS = C::threads / 32, VECTOR = C::vector;
static constexpr int CHUNK = C::chunk;
static constexpr int CHANNEL_BLOCKS = (C::to_g + C::channels - 1) / C::channels;  // there of a group

static __device__ constexpr int shift_of(int k, int stride, int dilation, int padding) {
  return k * dilation - padding;
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
  int depth = d * C::stride_d + kd - C::padding_d;
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
static constexpr int PASSES_H = (C::span_h + IN_ROWS - 1) / IN_ROWS, PASSES_C = (C::chunk + 1 - 1);
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
#pragma unroll
  for (int k = 0; k < C::vector; k++) to[column_at(k)] = element(unit, k);
}

// What a tile's cells meet of the source at `depth`, of its channels from `channel` on, of which there are `left`, to shared memory; zeros
// beyond the borders. Units are whole where the source lies and its rows end at their multiples; else elements are loaded.
static __device__ __forceinline__ void stage(Acc* tile, const T* source, const Tile& t, int depth, int channel, int left, bool whole, const Sizes& s) {
  const int h = t.h * C::in_h + C::min_h, w = t.w * C::in_w + C::min_w - C::first_w;
  const i64 slice = (i64)s.from_h * s.from_w, pixels = s.from_d * slice, line = (i64)s.from_w;
  const T* from = source + (((i64)t.n * FROM + channel) * pixels + depth * slice);
  const int thread = thread_index(), line_of = thread / ROW_UNITS;
  const int first = line_of % IN_ROWS, plane = line_of / IN_ROWS;  // of a thread
  if (plane >= 1) return;  // the others have nothing to do
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
        for (int i = 0; i < PASSES_H; i += PASSES_H, row += PASSES_H * IN_ROWS, to += PASSES_H * IN_ROWS * ROW_PITCH, place += PASSES_H * IN_ROWS * line) {
          Loaded unit[BATCH_C][PASSES_H];   // all loads come first: a block waits for memory once in a batch
          const T* of_plane = place;
#pragma unroll
          for (int j = 0; j < BATCH_C; j++, of_plane += pixels) {
            const T* of_row = of_plane;
#pragma unroll
            for (int b = 0; b < PASSES_H; b++, of_row += IN_ROWS * line) {
              opaque(of_row);
              unit[j][b] = {};
              const bool exists = in_row.in && (c + j < left) && (u32)(row + b * IN_ROWS) < (u32)s.from_h;
              if (exists) unit[j][b] = *(const Loaded*)of_row;
            }
          }
          loads_ahead();
#pragma unroll
          for (int j = 0; j < BATCH_C; j++)
#pragma unroll
            for (int b = 0; b < PASSES_H; b++) {
              if (row + b * IN_ROWS >= h + C::span_h) continue;
              if (c + j >= C::chunk) continue;
              store_unit(to + j * CHANNEL_WORDS + b * IN_ROWS * ROW_PITCH, unit[j][b], at);
            }
        }
      }
    } else {
#pragma unroll 1
      for (int c = plane; c < C::chunk; c += 1)
#pragma unroll 1
        for (int row = first; row < C::span_h; row += IN_ROWS)
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
  item.group = 0;
  item.channel = 0;
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
    const i64 in = item.group * C::to_g + to;
    const i64 row = in * C::from_g + source;
    v[b] = 0;
    if (i < C::chunk * TAP_WORDS && exists) v[b] = weight[(row * C::kernel_d + kd) * (C::kernel_h * C::kernel_w) + tap];
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
    const Acc* column = tile + own.at + column_at(Base::column_of_tap(kw));
#pragma unroll C::unroll_h
    for (int kh = 0; kh < C::kernel_h; kh++) {
      Acc w[WEIGHTS];
      read_weights(w, weights + tap_at(kh, kw), own.mine);
#pragma unroll
      for (int r = 0; r < C::rows; r++) {
        const Acc v = column[(r * C::in_h + Base::row_of_tap(kh)) * ROW_PITCH];
#pragma unroll
        for (int c = 0; c < C::channels; c++) sum[r][0][0][c] = multiply_add(v, w[c], sum[r][0][0][c]);
      }
    }
  }
}

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
      const int row = (t.h + own.ty + r) + y;
#pragma unroll
      for (int k = 0; k < C::channels; k++) {
        const int column = (t.w + own.tx), ahead = k;  // channels
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
  for (int slice = 0; slice < C::kernel_d; slice++) {
    const int from = slice / C::kernel_d * C::chunk, kd = slice % C::kernel_d, depth = Base::depth_of(item.tile.d, kd, s);
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

// A ring of stages in shared memory, which some threads (or copy engines) fill and consumers empty.

template <int STAGES>
struct CursorOf {                                       // a place in the ring, and the parity of its phase
  u32 stage, parity;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int STAGES, int STAGE_BYTES>
struct RingOf {
  using Cursor = CursorOf<STAGES>;
  static constexpr int BYTES = STAGES * STAGE_BYTES, BARRIER_BYTES = STAGES * 16;
  u32 stages, full_at, empty_at;                        // its stages, and a barrier of each for who fills it, and for who has read it

  static __device__ __forceinline__ RingOf at(u32 stages, u32 barriers) { return {stages, barriers, barriers + 8 * STAGES}; }

  // One thread; of so many arrivals each.
  __device__ __forceinline__ void init(int full, int empty) const {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full_at + 8 * i, full);
      barrier_init(empty_at + 8 * i, empty);
    }
  }
  __device__ __forceinline__ u32 stage(const Cursor& c) const { return stages + c.stage * STAGE_BYTES; }
  __device__ __forceinline__ u32 full(const Cursor& c) const { return full_at + c.stage * 8; }
  __device__ __forceinline__ u32 empty(const Cursor& c) const { return empty_at + c.stage * 8; }
  __device__ __forceinline__ void wait_full(const Cursor& c) const { barrier_wait(full(c), c.parity); }
  __device__ __forceinline__ void wait_empty(const Cursor& c) const { barrier_wait(empty(c), c.parity); }
};

// What no matrix instruction of the warp reads any more, by its barrier; 0: nothing. All its lanes have come there.
__device__ __forceinline__ void leave(u32 barrier, int lane) {
  if (lane == 0 && barrier) barrier_arrive(barrier);
}
// The same of lanes that may be apart.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
  __syncwarp();
  leave(barrier, lane);
}

// A block: one thread makes its barriers by `init`; of its warpgroups the first produce, and leave registers to the others, which consume;
// of each thread so many. `consume` is told which of the consumers, and of its threads, it is. It may read what `pack` wrote, and store
// where `pack` may have read.
template <int PRODUCERS, int CONSUMERS, int PRODUCER_REGISTERS, int CONSUMER_REGISTERS, class Init, class Produce, class Consume>
__device__ __forceinline__ void run_block(const Init& init, const Produce& produce, const Consume& consume) {
  if (threadIdx.x == 0) {
    init();
    barriers_begun();
  }
  __syncthreads();
  int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (PRODUCERS == 1 ? warpgroup == 0 : warpgroup < PRODUCERS) {  // (a test for 0 takes an instruction less)
    if constexpr (PRODUCER_REGISTERS > 0) fewer_registers<PRODUCER_REGISTERS>();
    produce();
  } else {
    wait_for_results();
    if constexpr (PRODUCER_REGISTERS > 0) more_registers<CONSUMER_REGISTERS>();
    consume(warpgroup - PRODUCERS, thread);
  }
}

// The order of a block's tiles. It says which is the first, and which follows one; the loader's also when it is done. A kernel K has an `Order` for
// warps, one for a thread alone (`AloneOrder`), and one for its loader (`LoaderOrder`).

// Tiles that blocks claim as they come to them: one thread of a block, which loads its pixels, asks a counter for the next, and tells
// the others through a ring in shared memory. Dealt out evenly, the last blocks are late by 2 to 11% of the time where memory bounds:
// multiprocessors differ in their share of its bandwidth. What a tile's results are does not depend on who computes them.
constexpr int CLAIMS = 16;                       // places of the ring

__device__ __forceinline__ void claims_init(u32 ring) {
  for (int i = 0; i < CLAIMS; i++) barrier_init(ring + 8 * i, 1);
}

// The thread that claims. STEP: a block's tiles are this far apart, where it keeps what belongs to their remainder; else 1.
//
// `counters`: zeros in device memory, which the last block leaves: how many tiles are claimed (STEP such), and how many blocks
// are done. Null: tiles are dealt out evenly.
template <class Sizes, int STEP>
struct Claiming {
  u32 ring;
  u32* counters;
  int upcoming;                         // asked for a tile ahead, so that nobody waits for memory
  CursorOf<CLAIMS> cursor;
  __device__ __forceinline__ explicit Claiming(const Sizes& s) : ring(s.claims), counters(s.counters), cursor({0, 0}) { ask(blockIdx.x); }
  __device__ __forceinline__ void ask(int index) {
    const int own = STEP == 1 ? 0 : blockIdx.x % STEP;
    upcoming = index + gridDim.x;
    if (counters) upcoming = gridDim.x + atomicAdd(counters + own, 1u) * STEP + own;
  }
  __device__ __forceinline__ int first(const Sizes&) const { return blockIdx.x; }
  // Nobody says that a place is free again: who loads is ahead of those who read by no more tiles than stages, of pixels and of slots,
  // and one more have chunks of, but for two that consumers who take turns have in hand, and the next. These must be CLAIMS at most.
  __device__ __forceinline__ int next(int, const Sizes&) {
    const int index = upcoming;
    ask(index);
    store_shared_u32(ring + 8 * CLAIMS + 4 * cursor.stage, index);
    barrier_arrive(ring + 8 * cursor.stage);
    cursor.next();
    return index;
  }
  __device__ __forceinline__ void end() {
    if (!counters || atomicAdd(counters + STEP, 1u) != gridDim.x - 1) return;
    for (int i = 0; i <= STEP; i++) counters[i] = 0;
  }
};

// Others: warps, or (ALONE) single threads.
template <class Sizes, bool ALONE>
struct Told {
  u32 ring;
  CursorOf<CLAIMS> cursor;
  __device__ __forceinline__ explicit Told(const Sizes& s) : ring(s.claims), cursor({0, 0}) {}
  __device__ __forceinline__ int first(const Sizes&) const { return blockIdx.x; }
  __device__ __forceinline__ int next(int, const Sizes&) {
    barrier_wait(ring + 8 * cursor.stage, cursor.parity);
    const int index = load_shared_u32(ring + 8 * CLAIMS + 4 * cursor.stage);
    cursor.next();
    return ALONE ? index : __shfl_sync(0xffffffffu, index, 0);  // so that ptxas knows that warps do not part over it
  }
};

// Tables of a kernel's constants: arrays of its struct, which device code does not index itself at run time. A kernel may have one as a
// variable template in constant memory, `template <class C> __constant__ const auto ROWS = table_of<int>(C::rows);`, or look it up as below.
template <class T, int N>
struct Table {
  T at[N];
  __device__ constexpr const T& operator[](int i) const { return at[i]; }
};

template <class T, int N>
__device__ constexpr Table<T, N> table_of(const int (&of)[N]) {
  Table<T, N> found = {};
  for (int i = 0; i < N; i++) found.at[i] = of[i];
  return found;
}


// Tensor maps of the input.
template <class C, int = C::fetch> constexpr int MAPS_OF = 1;

template <class C_>
struct PixelTile {
using C = C_;
using Number = NumberOf<C::precision>;

// --- pixels -----------------------------------------------------------------------------------------------------------

static constexpr int VEC = 16 / 4;                // elements of a 16-byte unit
static constexpr int ROW_BYTES = C::ck * 4;       // a pixel's row in a tile: 32, 64 or 128
static constexpr int UNITS_PER_ROW = ROW_BYTES / 16;
static constexpr int K_STEPS = ROW_BYTES / 32;          // a matrix instruction takes 32 bytes of K
static constexpr int CHUNKS = (C::cin_g + C::ck - 1) / C::ck;
static constexpr int SEGMENTS = C::rows_d * C::rows_h;
// Columns of a segment with one residue modulo the input's step along W make a plane of C::plane neighbours; there are C::planes residues that
// some tap reads. A segment has its planes one behind the other.
static constexpr int PITCH = C::plane;  // pixel rows from a segment to the next
static constexpr int PIXELS = SEGMENTS * PITCH;
static constexpr int PART_BYTES = (PIXELS * ROW_BYTES + 1023) / 1024 * 1024;
static constexpr int STAGE_BYTES = 2 * PART_BYTES;

static __device__ __forceinline__ int column_of(int within) {
  return within % C::plane + within / C::plane;
}

// Byte of the 16-byte unit `unit` of pixel row `p` in a tile.
static __device__ __forceinline__ u32 unit_at(int p, int unit) {
  int swizzle = (p >> 2) & 1;
  return p * ROW_BYTES + ((unit ^ swizzle) << 4);
}

// --- roles ------------------------------------------------------------------------------------------------------------

static constexpr int CONSUMERS = 2;
static constexpr int CONSUMER_THREADS = CONSUMERS * 128;
static constexpr int PRODUCER_WARPS = 192 / 32;
static constexpr int LOADER_WARP = 6, WEIGHTS_WARP = 7;
static constexpr int THREADS = 2 * 128 + CONSUMER_THREADS;

// --- what kernels are told --------------------------------------------------------------------------------------------

struct Sizes {
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;                       // tiles of q per axis
  int tiles;                                           // all of them, times M-groups
  u32* counters;
  u32 claims;                                          // of blocks that claim tiles: where shared memory has their ring
};

template <int MORE>                                     // behind the input's
struct TensorMapsAnd { TensorMap of[MAPS_OF<C> + MORE]; };

// --- where a tile's chunk lies in the input ---------------------------------------------------------------------------

struct Source {
  int n, d, h, w;                                      // of the halo's corner, before the rows' offsets
  int channel, left;                                   // first channel, channels left in the group
};

template <class Tile>
static __device__ __forceinline__ Source source_of(const Tile& t, int chunk) {
  return {t.n, t.d, t.h, t.w + C::first_w, t.group * C::cin_g + chunk * C::ck, C::cin_g - chunk * C::ck};
}

};

// Four float32 values of a unit, rounded to TF32.
// What that leaves of them, rounded too, goes to the tile's second part.
template <class C>
__device__ __forceinline__ void store_parts(u32 to, const u32 (&v)[4]) {
  using T = PixelTile<C>;
  u32 hi[4];
#pragma unroll
  for (int e = 0; e < 4; e++) hi[e] = to_tf32(__uint_as_float(v[e]));
  store_shared_128(to, hi[0], hi[1], hi[2], hi[3]);
  u32 low[4];
#pragma unroll
  for (int e = 0; e < 4; e++) low[e] = low_part(__uint_as_float(v[e]), hi[e]);
  store_shared_128(to + T::PART_BYTES, low[0], low[1], low[2], low[3]);
}

// A walk over the chunks of a block's tiles.

// A walk over (tile, chunk) in the order in which consumers take them.
template <class K, class Order = typename K::Order>
struct Walk {
  using Sizes = typename K::Sizes;
  Order order;
  int index, chunk;
  typename K::Tile tile;

  __device__ __forceinline__ explicit Walk(const Sizes& s) : order(s) {}
  __device__ __forceinline__ void begin(const Sizes& s) {
    index = order.first(s);
    chunk = 0;
    settle(s);
  }
  __device__ __forceinline__ bool live(const Sizes& s) const { return index < s.tiles; }
  __device__ __forceinline__ void settle(const Sizes& s) {  // past tiles without chunks
    while (index < s.tiles) {
      tile = K::tile_at(index, s);
      if (chunk < K::end_chunk(tile, s)) return;
      index = order.next(index, s);
      chunk = 0;
    }
  }
  __device__ __forceinline__ void next(const Sizes& s) {
    if (++chunk >= K::CHUNKS) settle(s);
  }
};

// What `gather`'s blocks compute: tiles of positions q times M-groups, and the taps of each.

template <class C> __constant__ const auto TAP_ROW = table_of<int>(C::tap_rows);  // [variant, block, tap]: the tap's shift in pixel rows
template <class C> __constant__ const auto ENTRY = table_of<int>(C::entries);     // [variant][mb + 1]: where a block's taps begin

// The orders of a block's roles.
template <class C, class Sizes, bool CLAIMED = C::claimed>
struct Orders;
template <class C, class Sizes>
struct Orders<C, Sizes, true> {
  using Order = Told<Sizes, false>;
  using AloneOrder = Told<Sizes, true>;
  using LoaderOrder = Claiming<Sizes, C::resident ? C::m_groups : 1>;  // resident weights are of one M-group
};

template <class C_>
struct GatherWork : PixelTile<C_>, Orders<C_, typename PixelTile<C_>::Sizes> {
using C = C_;
using T = PixelTile<C>;
using Sizes = typename T::Sizes;

static constexpr int MB = C::mb;                        // blocks of 64 rows of an M-group
static constexpr int SUBTILES = C::tile_h;  // of 64 pixels
static constexpr int NB = SUBTILES / 2;  // a consumer's
static constexpr int WGS_M = 1;
static constexpr int FRAGMENT = 64 * 32;                // bytes: 64 rows of 32 bytes of K
static constexpr int ENTRIES = C::entries[(C::mb + 1) - 1];  // of all variants
static constexpr int LONGEST_STRETCH = C::taps_unrolled * 2;

struct Tile {
  int group, cout_block, variant;                      // M-group
  int n, d, h, w;                                      // first q
};

static __device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  Tile t;
  int m = index % C::m_groups, q = index / C::m_groups;
  // Variants differ in taps; rotated, so that a block, whose tiles lie gridDim.x apart, meets all of them.
  t.variant = 0;
  t.cout_block = 0;
  t.group = m;
  t.w = q % s.tiles_w * C::tile_w;  q /= s.tiles_w;
  t.h = q % s.tiles_h * C::tile_h;  q /= s.tiles_h;
  t.d = q % s.tiles_d;
  t.n = q / s.tiles_d;
  return t;
}

static __device__ __forceinline__ typename T::Source source_of(const Tile& t, int chunk) {
  typename T::Source at = T::source_of(t, chunk);
  return at;
}

static __device__ __forceinline__ int first_entry(int variant, int block = 0) { return ENTRY<C>[variant * (C::mb + 1) + block]; }
static __device__ __forceinline__ int end_entry(int variant, int block = C::mb - 1) { return ENTRY<C>[variant * (C::mb + 1) + block + 1]; }
static __device__ __forceinline__ int entries_of(int variant) { return end_entry(variant) - first_entry(variant); }
static __device__ __forceinline__ int stretches_of(int variant) { return entries_of(variant) / C::taps_unrolled; }  // of a chunk
static __device__ __forceinline__ int chunks_of(int variant) { return entries_of(variant) ? T::CHUNKS : 0; }  // 0: only the bias

static __device__ __forceinline__ int end_chunk(int variant) {
  return chunks_of(variant);
}
static __device__ __forceinline__ int end_chunk(const Tile& t, const Sizes&) { return end_chunk(t.variant); }
};

// Packing weights into the order in which a kernel reads them, and bringing them to shared memory.

constexpr int PACK_THREADS = 256;

// A weight as precision P multiplies it, in the low bits.
template <int P>
__device__ __forceinline__ u32 operand(u16 v) { return v; }
template <int P>
__device__ __forceinline__ u32 operand(float v) {
  return to_tf32(v);
}

// 16 bytes of neighbouring operands.
__device__ __forceinline__ void write_operands(char* to, const u32 (&v)[4]) { *(uint4*)to = make_uint4(v[0], v[1], v[2], v[3]); }
__device__ __forceinline__ void write_operands(char* to, const u32 (&v)[8]) {
  *(uint4*)to = make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
}

// An element of a weight (first, second, kernel), by its indices and its tap, which counts through all axes; or none, a zero.
// `low`: what TF32 leaves of it.
struct WeightAt { bool there; int first, second, tap; bool low = false; };

// Writes a unit of a kernel's packed weights. (Not a generic lambda, for which some compilers want an annotation that others refuse.)
template <class K, class Weight>
struct UnitWriter {
  const Weight* weight;
  char* packed;
  int tap_step;

  template <class At>
  __device__ __forceinline__ void operator()(long long place, const At& at) const {
    u32 v[K::VEC];
#pragma unroll
    for (int e = 0; e < K::VEC; e++) {
      const WeightAt w = at(e);
      int of = tap_step == 1 ? w.second * K::TAPS_IN_ALL + w.tap : w.tap * tap_step + w.second;
      if (!w.there) {
        v[e] = 0;
        continue;
      }
      const Weight value = weight[(long long)w.first * (K::SECOND * K::TAPS_IN_ALL) + of];
      v[e] = operand<K::C::precision>(value);
      if (w.low) v[e] = low_part(value, v[e]);
    }
    write_operands(packed + place, v);
  }
};

// What a kernel K inherits whose packed weights are units of 16 bytes, each a thread's. It has PACK_UNITS of them, the weight's SECOND
// dimension, its TAPS_IN_ALL, and `pack_unit(i, write)`, which calls `write(place, at)` with unit i's byte and its elements' `WeightAt`s.
// The weight is contiguous, or has taps `tap_step` elements apart.
template <class K>
struct PacksUnits {
  template <class Weight>
  static __device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
    let_dependent_begin();                              // the kernel
    int i = blockIdx.x * PACK_THREADS + threadIdx.x;
    if (i < K::PACK_UNITS) K::pack_unit(i, UnitWriter<K, Weight>{weight, packed, tap_step});
  }
};

// The entries that pack weights for a kernel K: it has `pack_weights`, its Number, and C, its constants.
template <class K>
__global__ void __launch_bounds__(PACK_THREADS)
pack(const typename K::Number::Type* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  K::pack_weights(weight, packed, tap_step);
}

// Weights, from memory to a consumer's registers: fragments in the order in which they are used.

// Packed weights of a tile's chunk.
template <class C>
__device__ __forceinline__ const char* fragments_of(const char* packed, const typename GatherWork<C>::Tile& t, int chunk) {
  using G = GatherWork<C>;
  long long before = ((long long)(t.group + t.cout_block) + chunk) * G::ENTRIES + G::first_entry(t.variant);
  return packed + before * (2 * G::FRAGMENT);
}

// --- the ring's stages, by the way that weights come ------------------------------------------------------------------

template <class C>
struct WeightsOf {
using G = GatherWork<C>;
using Memory = const char*;
using Source = const char*;

static __device__ __forceinline__ Source source_of(const char* packed, const typename G::Tile& t, int chunk) { return fragments_of<C>(packed, t, chunk); }
static __device__ __forceinline__ void bring(u32 to, Source& from, u32 bytes, u32 barrier) {
  expect_bytes(barrier, bytes);
  copy_bulk(to, from, bytes, barrier);
  from += bytes;
}
static __device__ __forceinline__ u32 part_of(int wg, int thread) { return thread * 16; }
static __device__ __forceinline__ void load(u32 (&a)[4], u32 at, int i) { load_shared_128(a, at + i * G::FRAGMENT); }
};

// --- one thread fills the ring ----------------------------------------------------------------------------------------

template <class C>
using WeightRing = RingOf<C::stages_w, C::w_stage * GatherWork<C>::WGS_M * GatherWork<C>::FRAGMENT>;

// A stage of the ring holds C::w_stage fragments of a stretch, its last one what is left, so that the code knows where stages begin.
// Every tile's weights stream through.
template <class C>
__device__ __forceinline__ void stream_weights(const typename WeightsOf<C>::Memory& memory, const typename GatherWork<C>::Sizes& s, const WeightRing<C>& ring) {
  using G = GatherWork<C>;
  using W = WeightsOf<C>;
  wait_for_results();                                   // of `pack`
  typename G::AloneOrder order(s);
  typename WeightRing<C>::Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = order.first(s); index < s.tiles; index = order.next(index, s)) {
    const typename G::Tile t = G::tile_at(index, s);
#pragma unroll 1
    for (int chunk = 0; chunk < G::end_chunk(t.variant); chunk++) {
      typename W::Source from = W::source_of(memory, t, chunk);
#pragma unroll 1
      for (int i = G::stretches_of(t.variant); i > 0; i--) {
#pragma unroll 1
        for (int left = 12; left > 0; left -= C::w_stage, cursor.next()) {
          u32 bytes = (left < C::w_stage ? left : C::w_stage) * G::FRAGMENT;
          ring.wait_empty(cursor);
          W::bring(ring.stage(cursor), from, bytes, ring.full(cursor));
        }
      }
    }
  }
}

// --- the consumers' side ----------------------------------------------------------------------------------------------

template <class C>
struct Fragments {                             // from the ring
using G = GatherWork<C>;
using W = WeightsOf<C>;
WeightRing<C> ring;
u32 part;                                               // this thread's of a stage
CursorOf<C::stages_w> cursor;                           // the stage to be waited for next
u32 at;                                                 // its part of the stage in hand
u32 done;                                               // the barrier that says that this is free
bool later = false, all = false;

__device__ __forceinline__ Fragments(const WeightRing<C>& ring, int wg, int thread) : ring(ring), part(W::part_of(wg, thread)), cursor({0, 0}) {}
__device__ __forceinline__ void begin() { cursor = {0, 0}, all = later, later = true; }  // a tile, whose stages stay
// A stage is waited for with its first fragment.
__device__ __forceinline__ void load(u32 (&a)[4], int i) {
  if (i % C::w_stage == 0) {
    ring.wait_full(cursor);
    at = ring.stage(cursor) + part, done = ring.empty(cursor);
    cursor.next();
  }
  W::load(a, at, i % C::w_stage);
}
};

// Packing: weight (CIN, COUT_G, taps), of a gradient for the input (COUT, CIN_G, taps), to fragments
// [group][cout block][chunk][entry of all variants][k step][part][wgs][warp][lane]: 16 bytes a lane.

// [entry][subs]: the kernel's tap, -1 for none. A warp's lanes read it at different places, which constant memory serves in turn.
template <class C> __device__ const auto PACKED_TAP = table_of<short>(C::tap_indices);

template <class C_>
struct GatherPack : PacksUnits<GatherPack<C_>> {
using C = C_;
using G = GatherWork<C>;
using Number = typename G::Number;
static constexpr int VEC = G::VEC, K = 32 / 4;  // channels of a unit, and of a step
static constexpr int SECOND = C::cout_g;
static constexpr int TAPS_IN_ALL = C::taps;
static constexpr int PACK_UNITS = C::m_groups * G::ENTRIES * 2 * 128;

// Neighbouring threads read neighbouring weights: taps, or (channels-last) channels.
template <class Write>
static __device__ __forceinline__ void pack_unit(int i, const Write& write) {
  int rest = i;
  const auto next = [&rest](int count) {
    const int found = rest % count;
    rest /= count;
    return found;
  };
  int entry = write.tap_step == 1 ? next(G::ENTRIES) : 0;
  const int first = next(8), second = next(4), g = first, q = second;
  if (write.tap_step != 1) entry = next(G::ENTRIES);
  const int part = next(2), k_step = next(G::K_STEPS), warp = next(4), wg = next(1), chunk = next(G::CHUNKS), block = rest;
  const int cout = wg * C::rows_per_sub + warp * 16 % C::rows_per_sub + g, cin = chunk * C::ck + k_step * K + q;
  const int group = block, tap = PACKED_TAP<C>[entry * C::subs + warp * 16 / C::rows_per_sub];
  const long long fragment = (((((long long)block + chunk) * G::ENTRIES + entry) + k_step) * 2 + part) + wg;
  write(((fragment * 4 + warp) * 32 + g * 4 + q) * 16, [=](int e) -> WeightAt {
    const int word = e, m = cout + word % 2 * 8, k = cin + word / 2 * VEC;
    WeightAt found = {tap >= 0 && k < C::cin_g && m < C::cout_g, 0, 0, tap, part == 1};
    found.first = group * C::cin_g + k;
    found.second = m;
    return found;
  });
}
};


struct Corner { int at[5]; };                           // of a box in a tensor, innermost first
struct SlotPlace { u32 from; bool exists; };            // of a pixel in a slot, in bytes; the upper 8 bits are its row's phase, see below

// What ways have in common. A slot has BOXES boxes (what threads copy is one): `corner` says where the tensor `map` has box r. `place` says where
// the first channel of a pixel is in the slot, by the segment (of an image) and the column that have it.
template <class C>
struct SlotOf {
static constexpr int BOXES = C::slot_boxes, COPIED_BYTES = C::slot_copied;
static constexpr int BOX_BYTES = (C::slot_copied + 127) / 128 * 128, BYTES = BOX_BYTES;
static constexpr int OTHERS = (C::ck - 1) * C::rows_d * C::rows_h;  // rows of an image's other channels
static __device__ __forceinline__ constexpr int map(int) { return 0; }
static __device__ __forceinline__ constexpr int channel_at(int c) { return c * C::slot_channel; }
static __device__ __forceinline__ int channels_ahead(int first, int c) { return first + c; }
};

// [box][image][channel][row][column]: boxes of C::slot_units begin C::column_pad columns early, at whole units. There are several where rows are
// longer than one.
template <class C>
struct Slot : SlotOf<C> {
using T = PixelTile<C>;
using Of = SlotOf<C>;
static constexpr int BOX_COLUMNS = C::slot_units * T::VEC;

static __device__ __forceinline__ Corner corner(const typename T::Source& at, const typename T::Sizes&, int r) {
  return {at.w - C::column_pad + r * BOX_COLUMNS, at.h + C::first_h, at.d, at.channel, at.n};
}
static __device__ __forceinline__ SlotPlace place(const char*, const typename T::Sizes&, const typename T::Source&, int segment, int image, int column, u32) {
  int at_column = column + C::column_pad;
  // a column that only fills a plane up
  u32 from = (segment + image * Of::OTHERS) * C::slot_units * 16 + at_column * 4;
  return {from, false};
}
};

// The tensor copy engine brings pixels: NCHW to slots, else to tiles.

template <class C, bool CHANNELS_LAST = C::channels_last> struct BoxesOf : Slot<C> {};

// The loader, one thread: ahead of everyone by as many stages of the ring, slots (NCHW) or tiles, as are free.
template <class K, class Maps, class Ring>
__device__ __forceinline__ void load_boxes(const Maps& maps, const typename K::Sizes& s, const Ring& ring) {
  using C = typename K::C;
  using Boxes = BoxesOf<C>;
  Walk<K, typename K::LoaderOrder> walk(s);
  typename Ring::Cursor cursor = {0, 1};                // all are free at first
#pragma unroll 1
  for (walk.begin(s); walk.live(s); walk.next(s), cursor.next()) {
    const auto at = K::source_of(walk.tile, walk.chunk);
    ring.wait_empty(cursor);
    expect_bytes(ring.full(cursor), Boxes::COPIED_BYTES);
    const Corner corner = Boxes::corner(at, s, 0);
    const int (&c)[5] = corner.at;
    load_box(ring.stage(cursor), maps.of[0], c[0], c[1], c[2], c[3], c[4], ring.full(cursor));
  }
  walk.order.end();
}

// NCHW: from memory to staging slots where threads copy, and from slots to a tile: pixels' channels become rows, rounded to TF32.

// A thread's pixels of a tile: where they lie in a slot and whether they are in the image. Found once a tile, not a chunk.
template <class C>
struct OwnPixels {
using T = PixelTile<C>;
static constexpr int COUNT = (T::PIXELS + 192 - 1) / 192;

u32 from[COUNT], ok;                                    // of the places in a slot the low 24 bits; above: the phase
u32 plane;                                              // channel c of a row begins at (phase + c * plane) % VEC of a unit

// The pixel row of pixel i: rows in their order, or, where the columns of neighbouring rows lie a multiple of four
// apart, so that lanes would meet few banks, columns in theirs.
static __device__ __forceinline__ int pixel_row(int i) {
  // Neighbouring lanes take neighbouring images, whose rows meet all banks of a tile, and every second place, which meet all of a slot.
  return i;
}

__device__ __forceinline__ void locate(const char* x, const typename T::Sizes& s, const typename T::Source& at, int thread) {
  plane = 0;
  ok = 0;
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    int p = pixel_row(thread + k * 192), segment = p / T::PITCH, within = p % T::PITCH;
    int column = T::column_of(within), image = segment / (C::rows_d * C::rows_h);
    if (thread + k * 192 >= T::PIXELS) break;
    const SlotPlace place = Slot<C>::place(x, s, at, segment, image, column, plane);
    from[k] = place.from;
    ok |= (u32)place.exists << k;
  }
}

// A slot's pixels to a tile's rows of C::ck channels, rounded: a lane takes a pixel, so that loads and stores meet all
// banks. ALIGNED: every channel of a row has the same misalignment.
template <bool ALIGNED>
__device__ __forceinline__ void turn(int w, int chunk, u32 slot, u32 tile, int thread) const {
  const u32 exist = 4294967295;
  const int channel = chunk * C::ck;
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    int p = pixel_row(thread + k * 192);
    if (T::PIXELS % 192 && thread + k * 192 >= T::PIXELS) break;
    u32 phase = from[k] >> 24, first = slot + (from[k] & 0xffffff) + (ALIGNED ? phase * 4 : 0);
#pragma unroll 2  // more of them spill
    for (int unit = 0; unit < T::UNITS_PER_ROW; unit++) {
      u32 v[T::VEC];
#pragma unroll
      for (int e = 0; e < T::VEC; e++) {
        int c = unit * T::VEC + e;
        bool have = exist >> k & 1;
        u32 a = first + Slot<C>::channel_at(c);
        if (!ALIGNED) a += ((phase + Slot<C>::channels_ahead(channel, c) * plane) & (T::VEC - 1)) * 4;
        v[e] = have ? load_shared_u32(a) : 0;
      }
      store_parts<C>(tile + T::unit_at(p, unit), v);
    }
  }
}
};

// Producers: from slots, or from memory, to the tiles that consumers read. One way for each layout, whether they or the copy engine bring
// pixels.

// The tile is written: make it visible to the matrix units and say so, once a warp.
__device__ __forceinline__ void hand_over(u32 full, int lane) {
  fence_async_shared();
  __syncwarp();
  if (lane == 0) barrier_arrive(full);
}

// NCHW: slots are turned. Boxes fill them; or threads, with a chunk ahead of the one that they turn.
template <class K, class Tiles, class Slots>
__device__ __forceinline__ void turn_slots(const char* __restrict__ x, const typename K::Sizes& s, const Tiles& tiles, const Slots& slots, int thread) {
  using C = typename K::C;
  int lane = thread & 31;
  OwnPixels<C> own;
  Walk<K> now(s), ahead(s);
  typename Tiles::Cursor tile = {0, 1};
  typename Slots::Cursor slot = {0, 0};
  own.locate(x, s, typename K::Source(), thread);
#pragma unroll 1
  for (now.begin(s); now.live(s); now.next(s), tile.next(), slot.next()) {
    slots.wait_full(slot);
    tiles.wait_empty(tile);
    own.template turn<true>(now.tile.w, now.chunk, slots.stage(slot), tiles.stage(tile), thread);
    hand_over(tiles.full(tile), lane);
    leave(slots.empty(slot), lane);
  }
}

// A consumer's pixels: columns of N, and the matrix instructions that multiply fragments by them.

template <class C>
struct Columns {
using G = GatherWork<C>;
static constexpr int NB = G::NB;

struct Place { int n, d, h, w; };                       // of a subtile in a tile, in q

static __device__ __forceinline__ constexpr Place place_of(int subtile) {
  constexpr int H = C::tile_h;
  return {subtile / H, 0,
          subtile % H, 0};
}
static __device__ __forceinline__ constexpr int pixel_row_of(int subtile) {  // its first pixel's row in the tile, for a tap of shift 0
  Place p = place_of(subtile);
  return ((p.n * C::rows_d + p.d) * C::rows_h + p.h) * G::PITCH + p.w;
}
static constexpr int SUBTILES_AT_ONCE = 1;  // that a matrix instruction takes; groups of columns lie evenly over both

static __device__ __forceinline__ int rows_to(int nb, int first) {
  return pixel_row_of(nb) - pixel_row_of(0);
}

// Where they lie in a tile. `start`: of the consumer's first subtile the lower half of its descriptor, the same in all threads.
// `start`: the tile's address.
u32 start;
int first;                                              // its first subtile

__device__ __forceinline__ Columns(u32 tile, int first) : first(first) {
  // By a shuffle, so that ptxas counts in uniform registers.
  start = __shfl_sync(0xffffffffu, (tile + pixel_row_of(first) * G::ROW_BYTES) >> 4 | 1u << 16, 0);
}

// acc[64 x 64 NB] += fragment x pixels; `shift` is the tap's, in pixel rows, `part` the pixels' part. FRESH: = instead of +=.
template <bool FRESH>
__device__ __forceinline__ void multiply(float (&acc)[NB][32], const u32 (&a)[4], int shift, int k_step, int part, int lane) const {
  multiply_by_descriptor<!FRESH>(acc, a, shift, k_step, part);
}

template <bool ADDS>
__device__ __forceinline__ void multiply_by_descriptor(float (&acc)[NB][32], const u32 (&a)[4], int shift, int k_step, int part) const {
  const u64 upper = ((u64)(8 * G::ROW_BYTES >> 4) << 32) | ((u64)(3) << 62);
  u64 b = upper | (start + shift * (G::ROW_BYTES / 16) + (rows_to(0, first) * G::ROW_BYTES + k_step * 32 + part * G::PART_BYTES) / 16);
  using Sums = float[SUBTILES_AT_ONCE * 32];
  WgmmaOf<SUBTILES_AT_ONCE * 64>::template multiply<C::precision, false, false, ADDS>((Sums&)acc[0], a, b);
}

};

// A chunk's matrix instructions: what all ways to go through its steps share.

template <class C>
struct StepOf {
using G = GatherWork<C>;
using Weights = Fragments<C>;
using Pixels = Columns<C>;
using Sums = float[G::NB][32];

};

// More steps: a loop of rounds of C::taps_unrolled taps of a block, which take less time to compile than straight code.

// The products of IEEE's parts. Tensor cores truncate as they add, by an error in proportion to the sum: so all corrections of a
// round, which are smaller by 2^-11, come before the first product of high parts. Low parts of weights take C::fragment_sets sets
// of registers in turn, high ones keep theirs to the end.
template <class C>
struct ChunkOf : StepOf<C> {
using G = GatherWork<C>;
using S = StepOf<C>;
using Weights = typename S::Weights;
using Pixels = typename S::Pixels;
using Sums = float[G::MB][G::NB][32];
static constexpr int STEPS = G::LONGEST_STRETCH / 2;              // of two fragments

// The error also grows with the length of a sum. So sums are kept short, and added with rounding.
static __device__ __forceinline__ void promote(typename S::Sums& acc, typename S::Sums& sum) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
      sum[0][i] += acc[0][i];
                  // wgmma begins a round's sums anew
    }
}

static __device__ __forceinline__ void multiply_round(typename S::Sums& acc, Weights& weights, const Pixels& pixels, int entry, int lane) {
  u32 high[STEPS][4], low[C::fragment_sets][4];
  const int* taps = TAP_ROW<C>.at + __shfl_sync(0xffffffffu, entry, 0);
  weights.load(high[0], 0);
  weights.load(low[0], 1);
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    int shift = taps[i], k_step = 0;
    u32 done = 0;
    wgmma_fence();
    if (i == 0) pixels.template multiply<true>(acc, high[0], shift, k_step, 1, lane);
    else pixels.template multiply<false>(acc, high[i], shift, k_step, 1, lane);
    pixels.template multiply<false>(acc, low[i % C::fragment_sets], shift, k_step, 0, lane);
    wgmma_commit();
    done = weights.done;
    if (i + 1 < STEPS) {
      weights.load(high[i + 1], 2 * i + 2);
      weights.load(low[(i + 1) % C::fragment_sets], 2 * i + 3);
    }
    if (i + 1 < STEPS) wgmma_wait<1>();
    if ((i + 1 == STEPS || (2 * i + 2) % C::w_stage == 0)) give_back(done, lane);
  }
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < STEPS; i++) pixels.template multiply<false>(acc, high[i], taps[i], 0, 0, lane);
  wgmma_commit();
  wgmma_wait<0>();
}

static __device__ __forceinline__ void multiply(int variant, Sums& acc, Sums& sum, Weights& weights, const Pixels& pixels, int lane) {
#pragma unroll
  for (int b = 0; b < C::mb; b++) {
    int end = G::end_entry(variant, b);
#pragma unroll 1
    for (int entry = G::first_entry(variant, b); entry < end; entry += C::taps_unrolled) {
      multiply_round(acc[b], weights, pixels, entry, lane);
      promote(acc[b], sum[b]);
    }
  }
}
};

// Sums to memory: what all ways to store share.

// A warp holds 16 rows of M. They pass through a shared buffer, so that memory is written in whole lines: NCHW 8 rows of a run of
// RUN x C::w_subs consecutive outputs, through a buffer of the warp.
template <class C>
struct Runs : Columns<C> {
using G = GatherWork<C>;
using P = Columns<C>;
using Number = typename G::Number;
static constexpr int RUN = C::run_groups * 8;
static constexpr int SUBTILES = C::run_groups / 8;  // neighbours along W that a run crosses
static constexpr int COUNT = G::NB;          // sets of subtiles that runs cross

// Group k of run i of subtiles first_of(r) ...: which subtile, and which of its groups of 8 columns.
static __device__ __forceinline__ constexpr int first_of(int r) { return r; }  // subtile of a run's first group
static __device__ __forceinline__ constexpr int nb_of(int r, int, int k) { return first_of(r) + k / 8; }
static __device__ __forceinline__ constexpr int j_of(int, int i, int k) { return k % 8; }

// The block of a W sub-position, -1: it has no taps. Up to 16 are one number, of four bits each: a table's entries are constants only
// after unrolling, and until then the compiler keeps all sums in memory.
static __device__ __forceinline__ constexpr u64 packed_blocks() {
  u64 packed = 0;
  for (int u = 0; u < C::w_subs; u++) packed |= (u64)(C::blocks_of_w[u] + 1) << 4 * u;
  return packed;
}
static __device__ __forceinline__ constexpr int block_of_w(int u) {
  constexpr u64 packed = packed_blocks();
  return (int)(packed >> 4 * u & 15) - 1;
}
// Of W sub-position u the sum `e` of a subtile; where there are no taps, `without`.
static __device__ __forceinline__ float sum_of(const float (&acc)[C::mb][G::NB][32], int u, int nb, int e, float without) {
  return block_of_w(u) < 0 ? without : acc[block_of_w(u) < 0 ? 0 : block_of_w(u)][nb][e];
}
};

// A warp's 16 rows of M are output channels of one (d, h) sub-position (C::rows_per_sub is 64, 32 or 16).
struct Slab {
  int cout, couts;                                      // first channel in the group, and how many of the 16 exist
  int od, oh;                                           // offsets of the sub-position
};

template <class C> __constant__ const auto SUB_D = table_of<short>(C::subs_d);  // [variant][subs]: output offset of an M-row's sub-position
template <class C> __constant__ const auto SUB_H = table_of<short>(C::subs_h);
template <class C> __constant__ const auto U_W = table_of<short>(C::subs_w);    // [variant]: first W sub-position

template <class C>
__device__ __forceinline__ Slab slab_of(const typename GatherWork<C>::Tile& t, int cout_block, int warp) {
  Slab slab;
  int sub = warp * 16 / C::rows_per_sub;
  slab.cout = cout_block * C::rows_per_sub + warp * 16 % C::rows_per_sub;
  slab.couts = C::cout_g - slab.cout < 16 ? C::cout_g - slab.cout : 16;
  slab.od = SUB_D<C>[t.variant * C::subs + sub];
  slab.oh = SUB_H<C>[t.variant * C::subs + sub];
  return slab;
}

// The biases of a thread's rows g and g + 8 of a slab, or zeros; `first` is the slab's first channel.
template <class C>
__device__ __forceinline__ void load_bias(float (&b)[2], const typename GatherWork<C>::Number::Type* bias, const Slab& slab, int first, int g) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    b[h] = 0.f;
    if (bias && g + 8 * h < slab.couts) b[h] = GatherWork<C>::Number::value(bias[first + g + 8 * h]);
  }
}

// A thread's biases, on all of its sums.
template <class C>
__device__ __forceinline__ void add_bias(float (&acc)[C::mb][GatherWork<C>::NB][32], const float (&b)[2]) {
#pragma unroll
  for (int m = 0; m < C::mb; m++)
#pragma unroll
      for (int e = 0; e < 32; e++) acc[m][0][e] += b[e >> 1 & 1];
}

// Stores NCHW rows, by runs of eight channels.

// Bytes of a row of a warp's buffer; the rest beyond whole 128 bytes lets rows meet different banks, and a row begin up to 31 bytes late.
template <class C>
constexpr int RUN_PITCH = (C::run_groups * 8 * C::w_subs * 4 + 127) / 128 * 128 + 32;

template <int UNIT>
__device__ __forceinline__ void copy_unit(char* to, u32 from, bool ok) {
  u32 v[4];
  if constexpr (UNIT == 16) load_shared_128(v, from);
  else if constexpr (UNIT == 8) load_shared_64(v, from);
  else v[0] = UNIT == 4 ? load_shared_u32(from) : load_shared_u16(from);
  if constexpr (UNIT == 16) store_global_128_if(to, v, ok);
  else if constexpr (UNIT == 8) store_global_64_if(to, v, ok);
  else if constexpr (UNIT == 4) store_global_if(to, v[0], ok);
  else store_global_16_if(to, v[0], ok);
}

// How eight rows of OUTPUTS leave a warp's buffer. `to` is the first row's first output, rows lie `plane` bytes apart; `rows` of them exist.
template <class C>
struct RowStores {
using T = PixelTile<C>;
static constexpr int OUTPUTS = C::run_groups * 8 * C::w_subs;  // of a row of a run
static constexpr int PITCH = RUN_PITCH<C>;

// In units: an instruction stores 32 of them, of several rows if they are short; `end` bytes of each.
template <int UNIT>
static __device__ __forceinline__ void store_units(char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  constexpr int PER_ROW = OUTPUTS * 4 / UNIT;
#pragma unroll
  for (int i = 0; i < (8 * PER_ROW + 31) / 32; i++) {
    int index = lane + 32 * i, first = 32 * i / PER_ROW, more = index / PER_ROW - first;  // rows: the first lane's, and how many on
    // Compared, not divided, where rows are long.
    if (PER_ROW >= 32) more = 32 * i % PER_ROW + 31 >= PER_ROW && index >= (first + 1) * PER_ROW;
    int r = first + more, at = (index - r * PER_ROW) * UNIT;
    char* row = to + first * plane + (PER_ROW >= 32 ? more ? plane : 0 : more * plane);
    bool in = PER_ROW % 4 == 0 || r < 8;
    copy_unit<UNIT>(row + at, in ? buffer + r * PITCH + at : buffer, in && at < end && (r < rows));
  }
}

};

template <class C>
struct Epilogue : Runs<C> {
using G = GatherWork<C>;
using R = Runs<C>;
using Number = typename G::Number;
using Result = char*;
using Rows = RowStores<C>;
static constexpr int BUFFER_BYTES = 8 * Rows::PITCH;

// One thread's 2 w_subs neighbouring outputs to the buffer.
template <int UNIT>
static __device__ __forceinline__ void put(float (&v)[2 * C::w_subs], u32 at) {
#pragma unroll
  for (int i = 0; i < 2 * C::w_subs; i += 2) {
    u32 to = at + i * 4;
    store_shared_f32x2(to, v[i], v[i + 1]);
  }
}

// Rows h * 8 ... of run i of subtiles first_of(r) ...: a thread's outputs of its row to the buffer.
template <int UNIT>
static __device__ __forceinline__ void put_rows(float (&acc)[C::mb][G::NB][32], float bias, int r, int i, int h, u32 row, int lane) {
  int q = lane & 3;
#pragma unroll
  for (int k = 0; k < C::run_groups; k++) {
    const int nb = R::nb_of(r, i, k), j = R::j_of(r, i, k);
    float v[2 * C::w_subs];
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
      for (int u = 0; u < C::w_subs; u++) v[c * C::w_subs + u] = R::sum_of(acc, u, nb, 4 * j + 2 * h + c, bias);
    put<UNIT>(v, row + (k * 8 + 2 * q) * C::w_subs * 4);
  }
}

// Eight rows (output channels) of a run by way of the buffer to memory: `end` bytes of each.
template <int UNIT>
static __device__ __forceinline__ void pass_rows(float (&acc)[C::mb][G::NB][32], float bias, int r, int i, int h, u32 row, char* to, long long plane, int rows, int end, u32 buffer, int lane) {
  put_rows<UNIT>(acc, bias, r, i, h, row, lane);
  __syncwarp();
  Rows::template store_units<UNIT>(to, plane, rows, end, buffer, lane);
}

// Unrolled, since registers have no run-time index. Stores once in a loop, with only the reading of registers in
// branches, take longer and compile no faster.
static __device__ __forceinline__ void store(float (&acc)[C::mb][G::NB][32], const typename Number::Type* __restrict__ bias, char* __restrict__ y, const typename G::Sizes& s, const typename G::Tile& t, int cout_block, int first_subtile, u32 buffer, int warp, int lane) {
  OPAQUE(lane);                                         // what follows from it is found here, not kept from tile to tile (spills)
  int g = lane >> 2;
  Slab slab = slab_of<C>(t, cout_block, warp);
  if (slab.couts <= 0) return;
  int channel = t.group * C::cout_g + slab.cout;
  float b[2];
  load_bias<C>(b, bias, slab, channel, g);
  if (bias) add_bias<C>(acc, b);
  long long plane = (long long)s.out_d * s.out_h * s.out_w * 4;
#pragma unroll
  for (int r = 0; r < R::COUNT; r++) {
    typename R::Place place = R::place_of(first_subtile + R::first_of(r));
    int n = t.n + place.n, od = C::out_step_d * (t.d + place.d) + slab.od;
    bool image = n < s.batch && od < s.out_d;
#pragma unroll
    for (int i = 0; i < 1; i++) {
      int oh = C::out_step_h * (t.h + place.h) + slab.oh;
      int ow = C::out_step_w * (t.w + place.w + (i * R::RUN)) + U_W<C>[t.variant], left = s.out_w - ow;
      if (!image || oh >= s.out_h || left <= 0) continue;
      char* to = y + (((long long)n * C::cout + channel) * s.out_d + od) * s.out_h * s.out_w * 4 + ((long long)oh * s.out_w + ow) * 4;
      int end = (left < Rows::OUTPUTS ? left : Rows::OUTPUTS) * 4;
      u32 misaligned = (u32)(u64)to | (u32)plane | end;  // multiples of what all rows begin and end at
#pragma unroll
      for (int h = 0; h < 2; h++) {
        char* first = to + h * 8 * plane;
        int rows = C::cout_g % 16 && slab.couts < 8 * h + 8 ? slab.couts - 8 * h : 8;
        u32 row = buffer + g * Rows::PITCH;
        {
          if (misaligned & (C::store_unit - 1)) {
            pass_rows<4>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
          } else {
            pass_rows<16>(acc, b[h], r, i, h, row, first, plane, rows, end, buffer, lane);
          }
        }
        __syncwarp();
      }
    }
  }
}

};

// Gather-GEMM on tensor cores: out[o = OUT_STEP q + u] = sum over taps of W(u, tap) x in[i = IN_STEP q + offset(u, tap)],
// for every axis; u < OUT_STEP are the sub-positions of q (the phases of a stride, or rows unrolled to fill a tile).
// The gradient for the input is the same with exchanged steps: `in` is the output's gradient, `cin` its channels, `out` the input's.
//
// Work of a block (persistent, `for tile`): tile_n x tile_d x tile_h x tile_w positions q times one M-group. An M-group is
// mb blocks of 64 rows (for WGS_M = 2: a pair of them); a row is one output channel at one (d, h) sub-position, a block one
// W sub-position. K is input channels x taps, in chunks of ck channels.
//
// Roles:
//   producers  load the input tile with its halo once per chunk. NCHW: copies into a staging slot (bytes in flight:
//              stages_s - 1 slots), then a pass of shared memory -> registers -> shared memory that turns pixels to rows of ck
//              channels and rounds to TF32.
//   consumers  multiply: weights are A, from registers, packed in fragment order (one 16-byte load per thread and step);
//              pixels are B, rows of ck channels in shared memory, swizzled. A tap is a shift of B's start by whole rows:
//              the swizzle is a function of address bits, so any shift is right (measured: 32, 64 and 128 bytes).
//   one thread streams the weights' fragments through a ring.
//
// Constants are Gather's C; sizes of the input are arguments.

template <class C_>
struct Gather {
using C = C_;
using G = GatherWork<C>;
using Sizes = typename G::Sizes;
using Type = typename G::Number::Type;
using Chunk = ChunkOf<C>;
using Store = Epilogue<C>;
using Result = typename Store::Result;
static constexpr bool DRAINED = false;

// --- shared memory ----------------------------------------------------------------------------------------------------

// Boxes of NCHW are no tiles yet.
// Nor are others, which lie where the tile will.
static constexpr int SLOTS = C::stages_s;
using Pixels = RingOf<C::stages_p, G::STAGE_BYTES>;
using Slots = RingOf<SLOTS, C::channels_last ? 0 : BoxesOf<C>::BYTES>;
using Ring = WeightRing<C>;
static constexpr int RING_AT = Pixels::BYTES;
static constexpr int SLOTS_AT = RING_AT + Ring::BYTES;
static constexpr int SLOTS_END = SLOTS_AT + Slots::BYTES;
static constexpr int BARRIERS_AT = SLOTS_END + G::CONSUMERS * 4 * Store::BUFFER_BYTES;
static constexpr int CLAIMS_AT = BARRIERS_AT + Pixels::BARRIER_BYTES + Ring::BARRIER_BYTES + Slots::BARRIER_BYTES;

struct Memory {
  Pixels pixels;
  Ring weights;
  Slots slots;
  u32 buffers;
};
static __device__ __forceinline__ Memory memory_at(u32 a) {
  const u32 of_pixels = a + BARRIERS_AT, of_weights = of_pixels + Pixels::BARRIER_BYTES;
  return {Pixels::at(a, of_pixels), Ring::at(a + RING_AT, of_weights), Slots::at(a + SLOTS_AT, of_weights + Ring::BARRIER_BYTES), a + SLOTS_END};
}

// --- consumers --------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ void consume(const char* packed, const Type* bias, Result y, const Sizes& s, const Memory& memory, int wg, int thread) {
  // By a shuffle ptxas knows that branches over a warp's number do not part it.
  int warp = __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31;
  int first_subtile = wg;
  u32 buffer = memory.buffers + (wg * 4 + warp) * Store::BUFFER_BYTES;
  typename Pixels::Cursor cursor = {0, 0};
  Fragments<C> weights(memory.weights, wg, thread);
  int turn = 0;
  typename G::Order order(s);
  // the first turn is warpgroup 0's
        // asks for the next tile ahead of the stores, which hide the wait
  int following = 0;
#pragma unroll 1
  for (int index = order.first(s); index < s.tiles; index = following, turn++) {
    const typename G::Tile t = G::tile_at(index, s);
    int chunks = G::end_chunk(t.variant);
    float acc[C::mb][G::NB][32], sum[C::mb][G::NB][32];  // `sum`: IEEE's, which leave the tensor cores
#pragma unroll
    for (int b = 0; b < C::mb; b++)
#pragma unroll
        for (int i = 0; i < 32; i++) {
          acc[b][0][i] = 0.f;
          opaque(acc[b][0][i]);
          sum[b][0][i] = 0.f;
        }
    ;
    int variant = __shfl_sync(0xffffffffu, t.variant, 0);  // so that ptxas knows that warps do not part over it
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++, cursor.next()) {
      Columns<C> pixels(memory.pixels.stage(cursor), first_subtile);
      memory.pixels.wait_full(cursor);
      Chunk::multiply(variant, acc, sum, weights, pixels, lane);
      give_back(memory.pixels.empty(cursor), lane);
    }
    following = order.next(index, s);
    auto& sums = sum;
    Store::store(sums, bias, y, s, t, t.cout_block, first_subtile, buffer, warp, lane);
  }
}

// --- a block ----------------------------------------------------------------------------------------------------------

// What a kernel is given beside the sizes.
struct Given {
  const char* x;
  const char* packed;
  const Type* bias;
  char* y;
};
// The last is of a result or of weights.
using TensorMaps = typename G::template TensorMapsAnd<DRAINED || C::boxed>;

// All warps but the consumers'.
template <class Maps>
static __device__ __forceinline__ void bring(const Given& given, const Maps& maps, const Sizes& s, const Memory& memory) {
  int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  bool alone = (threadIdx.x & 31) == 0;
  if (warp < G::PRODUCER_WARPS) {
    turn_slots<G>(given.x, s, memory.pixels, memory.slots, threadIdx.x);
  } else if (warp == G::LOADER_WARP && alone) {
    load_boxes<G>(maps, s, memory.slots);
  } else if (warp == G::WEIGHTS_WARP && alone) {
    stream_weights<C>(given.packed, s, memory.weights);
  }
}

template <class Maps>
static __device__ __forceinline__ void run(const Given& given, const Maps& maps, Sizes s, u32 base) {
  const Memory memory = memory_at(base);
  s.claims = base + CLAIMS_AT;
  run_block<2, G::CONSUMERS, C::producer_registers, C::consumer_registers>(
      [&] {
        memory.pixels.init(G::PRODUCER_WARPS, 2 * 4);
        memory.weights.init(1, 2 * 4);
        memory.slots.init(1, G::PRODUCER_WARPS);
        claims_init(s.claims);
      },
      [&] { bring(given, maps, s, memory); },
      [&](int wg, int thread) {
        consume(given.packed, given.bias, given.y, s, memory, wg, thread);
      });
}
};

// --- the kernel, whose parameters depend on its constants -------------------------------------------------------------

// `counters`, of blocks that claim tiles: as many as M-groups that stay with a block, and one; or null.
template <class C>
__global__ void __launch_bounds__(PixelTile<C>::THREADS, 1)
gather(const char* __restrict__ x, const char* __restrict__ packed, const typename PixelTile<C>::Number::Type* __restrict__ bias, char* __restrict__ y, u32* counters,
       int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tiles,
       const __grid_constant__ typename Gather<C>::TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Gather<C>::run({x, packed, bias, y}, maps, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles, counters}, shared_address(memory));
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
static constexpr int TAPS = C::kernel_d * C::kernel_h * C::kernel_w;
static constexpr int SET_TAPS = C::taps_h * C::taps_w;
static constexpr int SETS = C::sets_d * C::sets_h;
static constexpr int CIN = C::groups * C::cin;
static constexpr int COUT = C::groups * C::cout;

static constexpr int TILES = SETS * C::groups;

// A block's sums, [tap][ci][co], with pitches by which a warp's fragments meet all banks of shared memory: neighbours along co lie in a
// row, and ci of neighbouring lanes 2 rows apart, 8 banks. Taps lie 8 banks apart.
static constexpr int SUMS_PITCH = C::block_co + 4;
static constexpr int SUMS_OF_TAP = C::block_ci * SUMS_PITCH + 8;
static constexpr int SUMS_BYTES = SET_TAPS * SUMS_OF_TAP * 4;
static __device__ __forceinline__ int sum_at(int tap, int ci, int co) { return (tap * SUMS_OF_TAP + ci * SUMS_PITCH + co) * 4; }

static constexpr int Q_ROWS = C::tile_n * C::tile_h;
static constexpr int CLASS_ROWS = (C::g_rows_h + C::row_classes - 1);
static constexpr int G_ROWS = C::tile_n * CLASS_ROWS;
static constexpr int G_BYTES = G_ROWS * C::block_co * C::g_pitch * 4;

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
  c.n = i / s.tiles_d * C::tile_n;
  return c;
}

// Where g's tile of a chunk begins.
static __device__ __forceinline__ Chunk in_g(const Chunk& c, const Work& work) {
  return {c.n, c.d * C::step_d + work.tap_d - C::padding_d, c.h * C::step_h + work.tap_h - C::padding_h,
          c.w * C::step_w + work.tap_w - C::padding_w};
}

// Of a block; the split that it takes. Blocks of the same pixels are neighbours, for L2's sake.
static __device__ __forceinline__ int take_work(Work& work, int index) {
  int set = index % SETS;  index /= SETS;
  work.co = 0;  work.ci = 0;  work.group = index % C::groups;
  work.tap_w = 0;
  work.tap_h = set % C::sets_h * C::taps_h;
  work.tap_d = set / C::sets_h;
  return index / C::groups;
}

// (n, d, h) of row `r` of positions, or of g's tile in its tensor.
struct Rows { int n, d, h; };
static __device__ __forceinline__ Rows q_row(int r) { return {r / C::tile_h, 0, r % C::tile_h}; }
static __device__ __forceinline__ Rows g_row(int r) { return {r / C::g_rows_h, 0, r % C::g_rows_h}; }
};

// --- copies by threads -----------------------------------------------------------------------------------------------

struct WgradMemory { int batch, d, h, w; };             // a tensor

// g's tile of a WgradShape S, as threads copy it.
template <class S>
struct WgradG {
  using C = typename S::C;
  static constexpr int ROWS = S::G_ROWS, ROWS_H = C::g_rows_h, BLOCK = C::block_co, CHANNELS = S::COUT, OF_GROUP = C::cout;
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
        int h = at.h + rh;
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
static constexpr int M_FRAGMENTS = C::warp_m / 16;
static constexpr int N_FRAGMENTS = C::warp_n / 8;
static constexpr int X_BYTES = S::Q_ROWS * C::block_ci * C::x_pitch * 4;
static constexpr int STAGE_BYTES = X_BYTES + S::G_BYTES;

static constexpr int W_STRIPS = C::tile_w / 8;          // a strip is 8 columns of a row
static constexpr int STRIPS = S::Q_ROWS * W_STRIPS;

using Sums = float[S::SET_TAPS][M_FRAGMENTS][N_FRAGMENTS][4];

struct X {                                              // as threads copy it
  static constexpr int ROWS = S::Q_ROWS, ROWS_H = C::tile_h, BLOCK = C::block_ci, CHANNELS = S::CIN, OF_GROUP = C::cin;
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
  const int row = (q.n + q.d * C::q_rows_d + td) * C::g_rows_h + q.h * C::q_rows_h + th;
  const int d = q.d * C::step_d + td, h = q.h * C::step_h + th;
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
  for (int step = of.k; step < STRIPS; step += WARPS) {
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
  char* record = records + ((long long)(blockIdx.x / S::TILES * WARPS + of.k) * S::TILES + blockIdx.x % S::TILES) * S::SUMS_BYTES;
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
  Lane of = {lane, lane >> 2, lane & 3, warp / WARPS * C::warp_m, 0, warp % WARPS, 0, 0};
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
  for (int i = warp; i < splits && index < S::TILES * SUMS; i += 8) sum += records[(long long)i * (S::TILES * SUMS) + index];
  parts[warp][lane] = sum;
  __syncthreads();
  typename S::Work work;
  S::take_work(work, index / SUMS);
  const int tap = index % SUMS / S::SUMS_OF_TAP, ci = index % SUMS % S::SUMS_OF_TAP / S::SUMS_PITCH, co = index % SUMS % S::SUMS_OF_TAP % S::SUMS_PITCH;
  const int kd = work.tap_d + tap / (C::taps_h * C::taps_w), kh = work.tap_h + tap / C::taps_w % C::taps_h, kw = work.tap_w + tap % C::taps_w;
  const bool has = index < S::TILES * SUMS && ci < C::block_ci && work.ci + ci < C::cin && co < C::block_co && work.co + co < C::cout;
  if (warp > 0 || !has || kd >= C::kernel_d || kh >= C::kernel_h || kw >= C::kernel_w) return;
  for (int i = 1; i < 8; i++) sum += parts[i][lane];
  const long long row = (work.group * C::cin + work.ci + ci) * C::cout + work.co + co;
  weight[row * S::TAPS + (kd * C::kernel_h + kh) * C::kernel_w + kw] = S::Number::bits(sum);
}

// --- constants: forward ----------------------------------------------------------------------------------------------

struct Forward {
  static constexpr int cin_g = 8, first_w = -1, plane = 67, precision = 1, cin = 32, ck = 8, tile_n = 1, tile_h = 2;
  static constexpr int tile_w = 64, rows_d = 2, rows_h = 4, planes = 1, stages_p = 2, stages_s = 2, fetch = 1;
  static constexpr int slot_boxes = 1, slot_channel = 2304, slot_copied = 18432, slot_units = 18, first_h = -1;
  static constexpr int column_pad = 3, cout_g = 8, mb = 2, subs = 4, rows_per_sub = 16, m_groups = 4, w_stage = 6;
  static constexpr int out_step_d = 2, out_step_h = 2, out_step_w = 2, cout = 32, taps = 105, w_subs = 2;
  static constexpr int blocks_of_w[2] = {0, 1}, subs_d[4] = {0, 0, 1, 1}, subs_h[4] = {0, 1, 0, 1}, subs_w[1] = {0};
  static constexpr int stages_w = 7, taps_unrolled = 6, fragment_sets = 3, entries[3] = {0, 18, 42};
  static constexpr int tap_rows[42] = {0, 1, 2, 67, 68, 69, 134, 135, 136, 268, 269, 270, 335, 336, 337, 402, 403, 404, 0, 1, 2, 3, 67, 68, 69, 70, 134, 135, 136, 137, 268, 269, 270, 271, 335, 336, 337, 338, 402, 403, 404, 405};
  static constexpr int tap_indices[168] = {68, -1, 103, -1, 66, -1, 101, -1, 64, -1, 99, -1, 54, 61, 89, 96, 52, 59, 87, 94, 50, 57, 85, 92, 40, 47, 75, 82, 38, 45, 73, 80, 36, 43, 71, 78, -1, -1, 33, -1, -1, -1, 31, -1, -1, -1, 29, -1, -1, -1, 19, 26, -1, -1, 17, 24, -1, -1, 15, 22, -1, -1, 5, 12, -1, -1, 3, 10, -1, -1, 1, 8, 69, -1, 104, -1, 67, -1, 102, -1, 65, -1, 100, -1, 63, -1, 98, -1, 55, 62, 90, 97, 53, 60, 88, 95, 51, 58, 86, 93, 49, 56, 84, 91, 41, 48, 76, 83, 39, 46, 74, 81, 37, 44, 72, 79, 35, 42, 70, 77, -1, -1, 34, -1, -1, -1, 32, -1, -1, -1, 30, -1, -1, -1, 28, -1, -1, -1, 20, 27, -1, -1, 18, 25, -1, -1, 16, 23, -1, -1, 14, 21, -1, -1, 6, 13, -1, -1, 4, 11, -1, -1, 2, 9, -1, -1, 0, 7};
  static constexpr int run_groups = 8, store_unit = 16, producer_registers = 72, consumer_registers = 184;
  static constexpr bool channels_last = false, resident = false, boxed = false, claimed = true;
};

// --- constants: gradient for the input -------------------------------------------------------------------------------

struct GradInput {
  static constexpr int kernel_d = 3, kernel_h = 5, kernel_w = 7, stride_d = 2, stride_h = 2, stride_w = 2;
  static constexpr int dilation_h = 1, dilation_w = 1, padding_d = 1, padding_h = 2, padding_w = 3, precision = 1;
  static constexpr int lanes = 1, groups = 4, from_g = 8, to_g = 8, tile_h = 8, tile_w = 16, rows = 4, channels = 8;
  static constexpr int chunk = 8, in_h = 2, in_w = 2, out_h = 1, out_w = 1, min_h = -2, min_w = -3, span_h = 19;
  static constexpr int span_w = 40, first_w = 1, plane_pitch = 21, vector = 4, batch = 20, threads = 32, min_blocks = 4;
  static constexpr int unroll_h = 5, unroll_w = 1;
  static constexpr bool channels_last = false, lanes_are_channels = false;
};

// --- constants: gradient for the weight ------------------------------------------------------------------------------

struct GradWeight {
  static constexpr int precision = 1, groups = 4, cin = 8, cout = 8, block_ci = 16, block_co = 8, g_columns = 37;
  static constexpr int g_units = 10, g_pitch = 44, tile_n = 2, kernel_d = 3, step_d = 2, padding_d = 1, sets_d = 3;
  static constexpr int kernel_h = 5, step_h = 2, dilation_h = 1, padding_h = 2, taps_h = 2, sets_h = 3, tile_h = 8;
  static constexpr int kernel_w = 7, step_w = 2, dilation_w = 1, padding_w = 3, taps_w = 7, tile_w = 16, q_rows_d = 2;
  static constexpr int g_rows_h = 16, q_rows_h = 2, apart_h = 1, warp_m = 16, warp_n = 8, x_units = 5, x_pitch = 20;
  static constexpr int row_classes = 1;
  static constexpr bool channels_last = false;
};

// Copies rows of so many columns to longer ones of so many 16-byte units, padded with zeros. A thread stores a unit.
__global__ void pad_rows(const u32* __restrict__ from, uint4* __restrict__ to, u32 columns, u32 units, u32 total) {
  const u32 i = blockIdx.x * 256 + threadIdx.x, row = i / units, column = i % units * 4;
  if (i >= total) return;
  union { u32 values[4]; uint4 all; } unit = {};
  for (u32 k = 0; k < 4; k++) if (column + k < columns) unit.values[k] = from[(u64)row * columns + column + k];
  to[i] = unit.all;
}

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

template <typename... Given>
kernels::TensorMap tensor_map(const at::Tensor& t, Given... given) {
  Counts counts = {1, 1, 1, static_cast<cuuint64_t>(t.size(1)), static_cast<cuuint64_t>(t.size(0))};
  for (int i = 0; i < t.dim() - 2; i++) counts[i] = t.size(t.dim() - 1 - i);
  CUresult result;
  const auto map = tensor_map(t.data_ptr(), counts, t.stride(t.dim() - 2), t.element_size(), given..., result);
  TORCH_CHECK(result == CUDA_SUCCESS, "the driver must be 12.0 or newer; for a tensor map it said ", int(result));
  return map;
}

}  // namespace

void forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& out,
             int blocks, const std::array<int, 11>& sizes) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor packed = at::empty({688128}, x.options().dtype(at::kByte));
  std::optional<at::Tensor> zeros;  // counters of tiles that blocks claim; few are dealt out
  if (sizes[10] >= 18 * blocks) zeros = at::zeros({20}, x.options().dtype(at::kByte));
  kernels::pack<kernels::GatherPack<kernels::Forward>><<<168, 256, 0, stream>>>(of(weight), of(packed), 1);
  kernels::gather<kernels::Forward><<<blocks, 512, shared(kernels::gather<kernels::Forward>, 227696), stream>>>(
      of(x), of(packed), of(bias), of(out), of(zeros), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
      sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], sizes[10],
      {tensor_map(x, false, false, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, std::array<cuuint32_t, 5>{72, 4, 2, 8, 1},
                  std::array<cuuint32_t, 5>{1, 1, 1, 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE)});
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void grad_input(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& out,
                int blocks, const std::array<int, 10>& sizes) {
  const c10::cuda::CUDAGuard guard(grad.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  kernels::direct<kernels::GradInput><<<blocks, 32, 34496, stream>>>(of(grad), of(weight), nullptr, of(out),
      sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9]);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void grad_weight(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& out,
                 int blocks, int slices, const std::array<int, 12>& sizes) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor sums = at::empty({int64_t(slices) * 403200}, x.options().dtype(at::kByte));
  kernels::wgrad<kernels::GradWeight><<<blocks, 256, shared(kernels::wgrad<kernels::GradWeight>, 131072), stream>>>(
      of(x), of(grad), of(sums), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7],
      sizes[8], sizes[9], sizes[10], sizes[11]);
  kernels::add_records<kernels::GradWeight><<<3150, 256, 0, stream>>>(of(sums), of(out), slices);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void pad_rows(const at::Tensor& from, const at::Tensor& to) {
  const c10::cuda::CUDAGuard guard(from.device());
  const unsigned columns = from.size(-1), units = to.stride(-2) / 4, total = from.numel() / columns * units;
  kernels::pad_rows<<<(total + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      of(from), of(to), columns, units, total);
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
    """(blocks, sizes): persistent blocks, which take tile after tile of 1x1x2x64 positions (NxDxHxW)."""
    tiles_d = ceil(result[0], 2)
    tiles_h = ceil(result[1], 4)
    tiles_w = ceil(result[2], 128)
    tiles = batch * tiles_d * tiles_h * tiles_w * 4
    return min(tiles, processors), (batch, *source, *result, tiles_d, tiles_h, tiles_w, tiles)


def grad_input_launch(batch, source, result, processors):
    """(blocks, sizes): a block takes a tile, and what it needs of the source."""
    rows = ceil(result[1], 8)
    columns = ceil(result[2], 16)
    return batch * result[0] * rows * columns * 4, (batch, *source, *result, rows, columns, int(source[2] % 4 == 0))


def grad_weight_launch(batch, source, result, processors):
    """(blocks, slices of sums, sizes): 3 waves of blocks share the chunks of 2x1x8x16 pixels.
    Few chunks have fewer shares: the sums of 2 are added in a chunk's time."""
    tiles_d = source[0]
    tiles_h = ceil(source[1], 8)
    tiles_w = ceil(source[2], 16)
    chunks = ceil(batch, 2) * tiles_d * tiles_h * tiles_w
    each = max(ceil(chunks, max(1, processors * 3 // 36)), math.isqrt(chunks // 2))
    shares = ceil(chunks, each)
    return shares * 36, shares * 8, (batch, *source, *result, tiles_d, tiles_h, tiles_w, chunks, each)


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


def dense(t: Tensor, multiple: int = 1) -> Tensor:
    """The tensor in the fast kernels' memory format, beginning at 16 bytes; or dense but for its rows, which begin a
    multiple of columns apart: at 16 bytes too, as the tensor copy engine wants them."""
    whole = t.is_contiguous()
    if multiple == 1 or (whole and t.shape[-1] == t.stride(-2) and t.shape[-1] % multiple == 0):
        t = t.contiguous(memory_format=FORMAT)
        return t.clone() if t.data_ptr() % 16 else t
    wider = ceil(t.shape[-1], multiple) * multiple
    if whole and 0 < t.numel() < 2**31 and not recorded():
        out = t.new_empty((*t.shape[:-1], wider))[..., : t.shape[-1]]
        build(True).pad_rows(t.resolve_neg(), out)  # is faster than PyTorch's copy, and unknown to autograd
        return out
    for row in (t.stride(-2), wider):
        strides = tuple(math.prod((*t.shape[1:-1], row)[i:]) for i in range(t.dim()))
        if t.stride() == strides and row >= t.shape[-1] and row % multiple == 0 and t.data_ptr() % 16 == 0:
            return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, given: Arguments, fast: bool) -> Tensor:
    """(batch, channels, *size) -> (batch, other channels, *output_size). Weights are packed at each call."""
    x, weight = x.resolve_neg(), weight.resolve_neg().contiguous()
    bias = None if bias is None else bias.resolve_neg().contiguous()
    shape = (x.shape[0], weight.shape[1] * given.groups, *output_size(x.shape[2:], weight.shape[2:], given))
    out = x.new_empty(shape)
    if out.numel() == 0:
        return out
    if fast:
        x = dense(x, 4)
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
        shapes = "(batch, channels, depth, height, width), batched or not"
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
    """KernelBench level 1, problem 72: ModelNew(32, 32, (3, 5, 7), (2, 2, 2), (1, 2, 3), (1, 1, 1), 4)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: tuple, stride: tuple = (1, 1, 1),
        padding: tuple = (0, 0, 0), output_padding: tuple = (0, 0, 0), groups: int = 1, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv_transpose3d = Layer(
            in_channels, out_channels, kernel_size=kernel_size, stride=stride, padding=padding,
            output_padding=output_padding, groups=groups, bias=bias,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, channels, depth, height, width) or the same without batch, any sizes -> likewise."""
        single = x.dim() == RANK + 1
        x = x.unsqueeze(0) if single else x
        layer = self.conv_transpose3d
        weight, bias = layer.weight, layer.bias
        if torch.is_autocast_enabled():
            x = x.to(weight.dtype)
        check(x, weight, layer.given)
        fast = is_fast(x, weight.shape, layer.given)
        run = ConvTranspose.apply if recorded() else ConvTranspose.forward
        out = run(x, weight, None, bias, (x.shape[2:], weight.shape, layer.given, fast))
        return out.squeeze(0) if single else out
