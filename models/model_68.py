"""KernelBench level 1, problem 68: a transposed convolution with CUDA kernels of its own, in one file.

Layer: ConvTranspose3d(32, 64, kernel_size=(3, 5, 5)).

Along each axis output p, tap k and input i meet where p + padding = i * stride + k * dilation. For channels c and o of
one group

  y[n, o, p] = bias[o] + sum over c, k of x[n, c, i] * w[c, o, k]

ModelNew has the constructor, the parameters (equal under a seed) and the state_dict of the original, and computes
forward, first and second gradients.

Constraints:
- The fast kernels serve this layer with torch.float32 on CUDA devices of sm_90a. Plain kernels, which are slow,
  serve other arguments and dtypes, and other devices from sm_70 on. A reader begins with these.
- nvcc, a C++ compiler and ninja are needed at the first call, which takes a minute.
- Values: float32, rounded to TF32 (nearest even) for tensor cores, as PyTorch's defaults have it; where its flags
  ask for IEEE float32, the plain kernels compute.
- Tensors are copied to the contiguous memory format where needed; so are those whose rows are no multiple of 4
  columns. Rows of more than 64 columns are cut for the forward. Results are contiguous.
- Results are bit-equal from run to run. Under torch.autocast they have the weights' dtype.

Kernels, which serve every batch and spatial size, as planned for inputs of 16 x 32 x 64 x 64 x 64 on an NVIDIA
H200:
- forward: rows joined to one: wgmma tf32, tile of 232 places x 64 channels, 4 stages of 512 places x 8 channels, 4
  of 576 pixels, 5 of 5 taps, 220 KB shared.
- gradient for the input: pixels as rows, sweep: wgmma tf32, tile 13x16 (HxW), walks of 32 slices, 96 columns, chunk
  of 8 channels, weights in a ring of 4 x 12 steps, 219 KB shared.
- gradient for the weight: wgmma of up to 5 rows tf32, 32x64 channels x 3x5x1 taps a block, chunks of 1x4x2x16
  (NxDxHxW of q), K in 79 slices, 216 KB shared.

A block of the forward:
  input -> 4 slots of rows -> joined by 2 warps -> ring of 4 stages of places --+
  weights -> packed -> ring of 5 stages ----------------------------------------+-> result
  Roles: a thread that loads rows, one that loads weights, two warps that join, two warpgroups that multiply.

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

WEIGHT = (32, 64, 3, 5, 5)
LAYER = Arguments(stride=(1, 1, 1), padding=(0, 0, 0), output_padding=(0, 0, 0), dilation=(1, 1, 1), groups=1)
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
template <int ID, int THREADS_OF>
__device__ __forceinline__ void named_sync() { asm volatile("bar.sync %0, %1;\n" ::"n"(ID), "n"(THREADS_OF) : "memory"); }
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

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
template <int BYTES>
__device__ __forceinline__ void store_bulk(void* to, u32 from) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Until all groups have left shared memory, or are in global memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }
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
__device__ __forceinline__ u32 load_shared_u32_if(u32 a, bool ok) {  // else 0
  u32 v = 0;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p ld.shared.u32 %0, [%1];\n}\n" : "+r"(v) : "r"(a), "r"((u32)ok) : "memory");
  return v;
}
__device__ __forceinline__ void load_shared_128(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(a) : "memory");
}
__device__ __forceinline__ void store_shared_128(u32 a, u32 v0, u32 v1, u32 v2, u32 v3) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"r"(a), "r"(v0), "r"(v1), "r"(v2), "r"(v3) : "memory");
}
__device__ __forceinline__ void store_shared_f32(u32 a, float v) {
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(a), "f"(v) : "memory");
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
// A float's bits, unseen by the compiler, which else keeps sums as integers through loops and copies them at each end (C7514).
__device__ __forceinline__ u32 bits_of(float v) {
  u32 r;
  asm("mov.b32 %0, %1;\n" : "=r"(r) : "f"(v));
  return r;
}
// `blockIdx.x`, read again rather than kept.
__device__ __forceinline__ int block_index() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(block));
  return block;
}
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
template <> struct NumberOf<TF32> : Float32 {};

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

// Matrix instructions, by a kernel's precision P.

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
#define NUMBERS_2 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NUMBERS_3 "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NUMBERS_4 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NUMBERS_5 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NUMBERS_6 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
WGMMA_WIDTH(96, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2, "%48", "%49", "%50", "%51", "%52", "%53", "%54", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32))
WGMMA_WIDTH(160, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4, "%80", "%81", "%82", "%83", "%84", "%85", "%86", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64))
WGMMA_WIDTH(232, NUMBERS_0 "," NUMBERS_1 "," NUMBERS_2 "," NUMBERS_3 "," NUMBERS_4 "," NUMBERS_5 "," NUMBERS_6 "," "%112,%113,%114,%115", "%116", "%117", "%118", "%119", "%120", "%121", "%122", SUMS_FROM(0), SUMS_FROM(16), SUMS_FROM(32), SUMS_FROM(48), SUMS_FROM(64), SUMS_FROM(80), SUMS_FROM(96), FOUR_SUMS(112))

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
  __device__ __forceinline__ void move(u32 by) {
    u32 at = stage + by;
    stage = at % STAGES;
    parity ^= at / STAGES & 1;
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

// What kernels share whose columns of N are output channels (sweep, subpixel, pairs, implicit, phases), or whose rows of M are (joined):
// sums, and the operands that descriptors are of.

// Of a descriptor what rows are: of so many bytes, swizzled, groups of 8 one behind the other.
template <int BYTES>
constexpr u64 ROWS_OF = (u64)(8 * BYTES >> 4) << 32 | (u64)(BYTES == 32 ? 3 : BYTES == 64 ? 2 : 1) << 62;

__device__ __forceinline__ u32 uniform(u32 v) { return __shfl_sync(0xffffffffu, v, 0); }  // so that ptxas counts in uniform registers

// Sums of a tile, ahead of a fence of wgmma (see `opaque`).
template <int N>
__device__ __forceinline__ void zero(float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    sums[i] = 0.f;
    opaque(sums[i]);
  }
}
template <class Sums, int N>
__device__ __forceinline__ void zero(Sums (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) zero(sums[i]);
}

// Joined: a transposed convolution without strides, NCHW, on tensor cores, whose rows are joined to one: the forward.
// Without padding along W a row of the result is longer than one of the source by as much as the kernel reaches; with as
// many zeros behind each of the source's rows, place f of a slice's results, counted through its rows, has its taps of a
// slice of the kernel at
//
//     f - kh (dilation_h pitch) - kw dilation_w,       pitch: results of a row
//
// of the source's places. So a tile is `places` neighbouring places of whatever rows, of which none is wasted at an
// image's right border, and a channel's results of a tile are neighbours in memory, stored 16 bytes a lane. (`gather`
// has rectangles as tiles: it computes columns beyond the image, and its rows end in the middle of memory's sectors.)
//
// Channels of the result are M, places N: one matrix instruction has all of a consumer's, B is `span` rows of 32 bytes of
// channels, and a tap is another first row. Weights are A, by descriptor, through a ring of `taps_of_stage` taps a stage.
//
// A stage of pixels is a chunk of channels of one slice of the kernel. The copy engine brings the rows of the source
// that a tile and its halo touch to a slot (what lies beyond the source is zeros), and two warps pass them on as
// rows of channels. (One instruction of 256 columns wants 154 registers as the kernel is compiled: 384 threads, two
// warps of which turn, not 512 and six.)
//
// Consumers take whole tiles in turn, so that one stores while another multiplies, and the rings run on from tile to
// tile. One begins to wait for its stages when the other has all of its own: a barrier's parity tells a phase from the
// next, not from the one behind that.
//
// Constants are Joined's C (cuda/gemm/joined.py computes them and explains each); sizes of the input are arguments.

template <class C_>
struct Joined : PacksUnits<Joined<C_>> {
using C = C_;
using Number = NumberOf<C::precision>;
using Type = typename Number::Type;

static constexpr int VEC = 16 / 4;
static constexpr int PLACES = C::places;
static constexpr int CK = 32 / 4;                 // channels of a chunk: a matrix instruction takes 32 bytes of K
static constexpr int CHUNKS = (C::cin + CK - 1) / CK;
static constexpr int ROWS_M = 64;
static constexpr int TAPS = C::kernel_h * C::kernel_w;  // of a slice
static constexpr int STAGES_OF_SLICE = (TAPS + C::taps_of_stage - 1) / C::taps_of_stage;
static constexpr int TAP_BYTES = ROWS_M * 32;
static constexpr int STAGE_BYTES = C::span * 32;
static constexpr int WEIGHT_BYTES = C::taps_of_stage * TAP_BYTES;
static constexpr int OUT_SPAN = 512;                    // bytes of a channel that are stored at a time
static constexpr int OUT_PLACES = OUT_SPAN / 4;
static constexpr int OUT_PITCH = OUT_SPAN + 32;  // so that channels meet different banks, and begin as late as in memory
static constexpr int OUT_BYTES = 8 * OUT_PITCH;         // of a warp: eight channels

static constexpr int CONSUMERS = 2, TURNERS = 2;
static constexpr int THREADS = 128 + CONSUMERS * 128;
static constexpr int LANES = 32;    // of those that turn a stage

using Stages = RingOf<C::stages, STAGE_BYTES>;
using Slots = RingOf<C::slots, C::slot_bytes>;          // [channel][row][column]; of 16 bits boxes of 64 columns as Turn16 has them
using Weights = RingOf<C::weight_stages, WEIGHT_BYTES>;
static constexpr int WEIGHTS_AT = Slots::BYTES;         // whole 256 bytes, of 16 bits 1,024
static constexpr int STAGES_AT = WEIGHTS_AT + Weights::BYTES;  // whole 256
static constexpr int BUFFERS_AT = STAGES_AT + Stages::BYTES;
static constexpr int BARRIERS_AT = BUFFERS_AT + CONSUMERS * 4 * OUT_BYTES;
static constexpr int TURNS_AT = BARRIERS_AT + Stages::BARRIER_BYTES + Slots::BARRIER_BYTES + Weights::BARRIER_BYTES;
static constexpr int TRASH_AT = TURNS_AT + 8 * CONSUMERS;

struct Memory {                                         // of a block; the rings' barriers are one behind the other
  Stages stages;
  Slots slots;
  Weights weights;
  u32 buffers, turns, trash;
};
static __device__ __forceinline__ Memory memory_at(u32 a) {
  u32 full = a + BARRIERS_AT, landed = full + Stages::BARRIER_BYTES, full_w = landed + Slots::BARRIER_BYTES;
  return {Stages::at(a + STAGES_AT, full), Slots::at(a, landed), Weights::at(a + WEIGHTS_AT, full_w), a + BUFFERS_AT, a + TURNS_AT, a + TRASH_AT};
}

struct Sizes {
  int in_d, out_d, pitch, plane;                        // pitch, plane: places of a row and of a slice of the result
  int tiles_f, tiles;                                   // of a slice's places; all, times BLOCKS_M
  int rows, columns;                                    // of a slot
};

struct Tile { int n, d, block, f; };                    // image, slice, block of channels, first place

// Neighbouring blocks have the same places.
static __device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  int q = index, slice = q / s.tiles_f;
  return {slice / s.out_d, slice % s.out_d, 0, q % s.tiles_f * C::places};
}
static __device__ __forceinline__ int halo(const Sizes& s) { return (C::kernel_h - 1) * s.pitch + (C::kernel_w - 1); }

// The kernel's slices that meet the source's; of others nothing is loaded or multiplied.
struct Slices { int first, count; };
static __device__ __forceinline__ Slices slices_of(const Tile& t, const Sizes& s) {
  int d = t.d, first = d < s.in_d ? 0 : (d - s.in_d) + 1, last = d;
  if (last > C::kernel_d - 1) last = C::kernel_d - 1;
  return {first, last < first ? 0 : last - first + 1};
}

// Where a tile's slots begin in the source, and how many of a slot's places lie ahead of the tile's first with its
// halo. Rows ahead of the first are -1 and so on.
struct Corner { int row, ahead; };
static __device__ __forceinline__ Corner corner_of(const Tile& t, const Sizes& s) {
  int f = t.f - halo(s), row = f >= 0 ? f / s.pitch : -((s.pitch - 1 - f) / s.pitch);
  return {row, f - row * s.pitch};
}
static __device__ __forceinline__ int rows_of(int ahead, int span, const Sizes& s) { return (ahead + span - 1) / s.pitch + 1; }

// --- weights ---------------------------------------------------------------------------------------------------------

static constexpr int PACK_UNITS = CHUNKS * C::kernel_d * TAPS * ROWS_M * 2;
static constexpr int SECOND = C::cout, TAPS_IN_ALL = C::kernel_d * TAPS;

static __device__ __forceinline__ u32 unit_at(int row, int unit) { return row * 32 + ((unit ^ (row >> 2 & 1)) << 4); }  // swizzled

// [block][chunk][slice][tap][channel of the result][32 bytes of channels, swizzled], zeros where there is none of
// either. The weight is (C::cin, C::cout, kernel).
template <class Write>
static __device__ __forceinline__ void pack_unit(int i, const Write& write) {
  int unit = i % 2, row = i / 2 % ROWS_M, rest = i / (2 * ROWS_M), tap = rest % TAPS_IN_ALL, chunk = rest / TAPS_IN_ALL % CHUNKS;
  int cout = rest / (TAPS_IN_ALL * CHUNKS) * ROWS_M + row;
  write((long long)rest * TAP_BYTES + unit_at(row, unit), [=](int e) -> WeightAt {
    int cin = chunk * CK + unit * VEC + e;
    return {cin < C::cin && cout < C::cout, cin, cout, tap};
  });
}

// --- producers: a thread for weights, one for pixels, warps that turn these ------------------------------------------

static __device__ __forceinline__ void bring_weights(const char* __restrict__ packed, const Sizes& s, const Weights& ring) {
  typename Weights::Cursor cursor = {0, 1};             // all are free at first
  wait_for_results();                                   // of `pack`
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    const Slices slices = slices_of(t, s);
    const char* from = packed + ((long long)t.block * (CHUNKS * C::kernel_d) + slices.first) * (TAPS * TAP_BYTES);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, from += (C::kernel_d - slices.count) * (TAPS * TAP_BYTES))
#pragma unroll 1
      for (int slice = 0; slice < slices.count; slice++)
#pragma unroll 1
        for (int tap = 0; tap < TAPS; tap += C::taps_of_stage, cursor.next()) {
          u32 barrier = ring.full(cursor), bytes = C::taps_of_stage * TAP_BYTES;
          ring.wait_empty(cursor);
          expect_bytes(barrier, bytes);
          copy_bulk(ring.stage(cursor), from, bytes, barrier);
          from += bytes;
        }
  }
}

// A thread of its own: a copy takes longer where the thread also starts those of weights, or turns pixels
// (docs/experiments.md).
static __device__ __forceinline__ void bring_pixels(const TensorMap& map, const Sizes& s, const Slots& slots) {
  typename Slots::Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    const Slices slices = slices_of(t, s);
    const Corner corner = corner_of(t, s);
    int first = t.d - slices.first;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll 1
      for (int d = first; d > first - slices.count; d -= C::dilation_d, cursor.next()) {
        u32 to = slots.stage(cursor), barrier = slots.full(cursor);
        slots.wait_empty(cursor);
        expect_bytes(barrier, s.rows * s.columns * 32);
        int c = chunk * CK;
        load_box(to, map, 0, corner.row, d, c, t.n, barrier);
      }
  }
}

// What a slot has, from its place `ahead` on, as rows of CK channels: `locate` is for a tile, `turn` for each of its stages. Loads of
// several places come before their stores, so that a thread waits for memory once, not once a place (docs/experiments.md).

// Places behind rows, which no slot has.
struct Gaps {
  int behind, count, at, column, more, columns;         // of a row, of a stage; a lane's first, and its way to the next
  __device__ __forceinline__ void locate(const Sizes& s, int ahead, int span, int lane) {
    behind = s.pitch - s.columns, count = rows_of(ahead, span, s) * behind;
    if (behind == 0) return;
    column = lane % behind, at = lane / behind * s.pitch + s.columns + column - ahead;
    columns = LANES % behind, more = LANES / behind * s.pitch + columns;
  }
  __device__ __forceinline__ void clear(const Sizes& s, int span, u32 stage, int lane) const {
#pragma unroll 1
    for (int i = lane, p = at, w = column; i < count; i += LANES) {
      if ((u32)p < (u32)span) {
        store_shared_128(stage + p * 32, 0, 0, 0, 0);
        store_shared_128(stage + p * 32 + 16, 0, 0, 0, 0);
      }
      p += more, w += columns;
      if (w >= behind) w -= behind, p += s.columns;
    }
  }
};

// Float32. A lane a pixel of a channel, so that loads are constants apart, and loads and stores meet all banks; `to`: where a stage has its
// place, ~0: nowhere. Lanes behind the last pixel load what is none: of the last slot's last channel, weights. The engine has rounded to TF32.
struct Turn32 {
  static constexpr int OWN_PIXELS = (C::span + LANES - 1) / LANES, AT_ONCE = 3;
  int first;                                            // pixel: of the first place, or the next behind it
  u32 to[OWN_PIXELS];
  __device__ __forceinline__ void locate(const Sizes& s, int ahead, int span, int lane) {
    first = ahead < s.columns ? ahead : s.columns;
#pragma unroll
    for (int k = 0; k < OWN_PIXELS; k++) {
      int i = first + lane + k * LANES, row = i / s.columns, p = i + row * (s.pitch - s.columns) - ahead;
      to[k] = p < span ? unit_at(p, 0) : ~0u;
    }
  }
  __device__ __forceinline__ void turn(const Sizes& s, int, int, u32 slot, u32 stage, u32, int lane) const {
    u32 from[8];
#pragma unroll
    for (int c = 0; c < 8; c++) {
      from[c] = slot + (c * s.rows * s.columns + first + lane) * 4;
      opaque(from[c]);
    }
#pragma unroll
    for (int k = 0; k < OWN_PIXELS; k += AT_ONCE) {
      if (to[k] == ~0u) break;
      u32 v[AT_ONCE][8];
#pragma unroll
      for (int i = 0; i < AT_ONCE && k + i < OWN_PIXELS; i++)
#pragma unroll
        for (int c = 0; c < 8; c++) v[i][c] = load_shared_u32(from[c] + (k + i) * (LANES * 4));
#pragma unroll
      for (int i = 0; i < AT_ONCE && k + i < OWN_PIXELS; i++) {
        if (to[k + i] == ~0u) break;
        store_shared_128(stage + to[k + i], v[i][0], v[i][1], v[i][2], v[i][3]);
        store_shared_128(stage + to[k + i] ^ 16, v[i][4], v[i][5], v[i][6], v[i][7]);
      }
    }
  }
};

template <class Turn>
static __device__ __forceinline__ void turn_pixels(const Sizes& s, const Memory& memory, int thread) {
  typename Slots::Cursor slot = {0, 0};
  typename Stages::Cursor stage = {0, 1};
  int turn_of = 0, warp = thread >> 5, lane = thread % LANES, span = C::places + halo(s);
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    const Tile t = tile_at(index, s);
    int ahead = corner_of(t, s).ahead;
    Turn own;
    Gaps gaps;
    own.locate(s, ahead, span, lane);
    gaps.locate(s, ahead, span, lane);
#pragma unroll 1
    for (int i = CHUNKS * slices_of(t, s).count; i > 0; i--, slot.next(), stage.next()) {
      bool others = turn_of != warp;
      turn_of = (turn_of + 1) % TURNERS;
      if (others) continue;
      memory.slots.wait_full(slot);
      memory.stages.wait_empty(stage);
      own.turn(s, ahead, span, memory.slots.stage(slot), memory.stages.stage(stage), memory.trash, lane);
      gaps.clear(s, span, memory.stages.stage(stage), lane);
      fence_async_shared();
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(memory.stages.full(stage));
      if (thread % 32 == 0) barrier_arrive(memory.slots.empty(slot));
    }
  }
}

// --- consumers -------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ u32 lower(u32 address) { return address >> 4 | 1u << 16; }

// A thread's sums: of channels g and g + 8 of its warp's 16, places 8j + 2t and the next. The buffer has a channel's as
// many bytes late as they begin in 16 of memory, so that lanes store whole 16, an instruction a channel's; up to three
// words at either end follow. The copy engine would be slower: it takes a copy for each channel (docs/experiments.md).
static __device__ __forceinline__ void store(
    const float (&acc)[C::places / 2], const Type* __restrict__ bias, char* __restrict__ y, const Sizes& s, const Tile& t, u32 buffer, int warp, int lane) {
  int g = lane >> 2, q = lane & 3, block = t.block * ROWS_M + warp * 16;
  int left = (s.plane - t.f < C::places ? s.plane - t.f : C::places) * 4;
  long long plane = (long long)s.out_d * s.plane * 4;  // of a channel
  y += ((long long)t.n * C::cout + block) * plane + ((long long)t.d * s.plane + t.f) * 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int channel = block + 8 * h + g;
    float b = bias && channel < C::cout ? Number::value(bias[channel]) : 0.f;
    char* to = y + 8 * h * plane;
    u32 late = (u32)(u64)(to + g * plane) & 15, from = buffer + g * OUT_PITCH;
#pragma unroll
    for (int first = 0; first < C::places; first += OUT_PLACES, to += OUT_SPAN) {
      const int most = (C::places - first < OUT_PLACES ? C::places - first : OUT_PLACES) * 4;
      int bytes = left - first * 4 < most ? left - first * 4 : most;
#pragma unroll
      for (int j = 0; j < OUT_PLACES / 8; j++) {
        if (first + 8 * j >= C::places) break;
        u32 at = from + late + (8 * j + 2 * q) * 4;
        const int i = 4 * (j + first / 8) + 2 * h;
        float v = acc[i] + b, w = acc[i + 1] + b;
        store_shared_f32x2(at, v, w);
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 8; r++) {
        char* line = to + r * plane;
        u32 begins = (u32)(u64)line & 15, at = ((begins + 15) & 16) + lane * 16, v[4];
        bool ok = (int)at + 16 <= (int)begins + bytes && block + 8 * h + r < C::cout;
        load_shared_128(v, buffer + r * OUT_PITCH + (ok ? at : 0));
        store_global_128_if(line - begins + at, v, ok);
      }
      int end = (int)late + bytes, a = (late + 15) & 16, z = end & ~15, head = late + q * 4, tail = z + q * 4;
      char* line = to + g * plane - late;
      bool heads = channel < C::cout && head < a && head < end, tails = channel < C::cout && tail >= a && tail < end;
      store_global_if(line + head, load_shared_u32_if(from + head, heads), heads);
      store_global_if(line + tail, load_shared_u32_if(from + tail, tails), tails);
      __syncwarp();
    }
  }
}

// Adds what `COUNT` taps of a stage give, from one on, as far as there are such.
template <int COUNT>
static __device__ __forceinline__ void multiply_taps(float (&acc)[C::places / 2], u32 of_taps, u32 pixels, int first, int shift_h) {
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    const int tap = first + k;
    u64 a = ROWS_OF<32> | (u64)(of_taps + k * (TAP_BYTES / 16));
    u64 b = ROWS_OF<32> | (u64)(pixels - tap / C::kernel_w * shift_h - tap % C::kernel_w * 2);
    if (tap < TAPS) WgmmaOf<PLACES>::template multiply<C::precision, false, false, true>(acc, a, b);
  }
}

static __device__ __forceinline__ void consume(const Type* bias, char* y, const Sizes& s, const Memory& memory, int own, int thread) {
  int lane = thread & 31, warp = thread >> 5;
  typename Stages::Cursor stage = {0, 0};
  typename Weights::Cursor weights = {0, 0};
  u32 parity = 0, buffer = memory.buffers + (own * 4 + warp) * OUT_BYTES;
  int shift_h = s.pitch * 2, begin = halo(s) * 2;  // in 16 bytes
  if (own == 1 && lane == 0) barrier_arrive(memory.turns);  // the first turn is the other's
#pragma unroll 1
  for (int index = blockIdx.x, of = 0; index < s.tiles; index += gridDim.x, of ^= 1) {
    const Tile t = tile_at(index, s);
    int count = CHUNKS * slices_of(t, s).count;
    if (of != own) {
      stage.move(count);
      weights.move(count * STAGES_OF_SLICE);
      continue;
    }
    float acc[C::places / 2];
    zero(acc);
    barrier_wait(memory.turns + own * 8, parity);
    parity ^= 1;
    u32 behind = 0, behind_w = 0;                       // the stages that instructions under way read
#pragma unroll 1
    for (int i = 0; i < count; i++, stage.next()) {
      u32 pixels = uniform(lower(memory.stages.stage(stage)) + begin);
      memory.stages.wait_full(stage);
#pragma unroll
      for (int part = 0; part < STAGES_OF_SLICE; part++, weights.next()) {
        u32 of_taps = uniform(lower(memory.weights.stage(weights)));
        memory.weights.wait_full(weights);
        wgmma_fence();
        multiply_taps<C::taps_of_stage>(acc, of_taps, pixels, part * C::taps_of_stage, shift_h);
        wgmma_commit();
        wgmma_wait<1>();
        give_back(behind_w, lane);
        if (part == 0) give_back(behind, lane);
        behind_w = memory.weights.empty(weights);
      }
      behind = memory.stages.empty(stage);
    }
    __syncwarp();                                       // of a tile without stages lanes have only waited for its turn
    if (lane == 0) barrier_arrive(memory.turns + (own ^ 1) * 8);
    wgmma_wait<0>();
    give_back(behind_w, lane);
    give_back(behind, lane);
    store(acc, bias, y, s, t, buffer, warp, lane);
  }
}

static __device__ __forceinline__ void run(const char* packed, const Type* bias, char* y, const Sizes& s, const TensorMap& map, u32 address) {
  const Memory memory = memory_at(address);
  run_block<1, CONSUMERS, 96, 200>(
      [&] {
        memory.stages.init(C::warps_of_stage, 4);
        memory.slots.init(1, C::warps_of_stage);
        memory.weights.init(1, 4);
        for (int i = 0; i < CONSUMERS; i++) barrier_init(memory.turns + 8 * i, 4);
      },
      [&] {
        constexpr int TURNER_THREADS = TURNERS * 32;
        if (threadIdx.x < TURNER_THREADS) turn_pixels<Turn32>(s, memory, threadIdx.x);
        if (threadIdx.x == TURNER_THREADS) bring_pixels(map, s, memory.slots);
        if (threadIdx.x == TURNER_THREADS + 32) bring_weights(packed, s, memory.weights);
      },
      [&](int consumer, int thread) { consume(bias, y, s, memory, consumer, thread); });
}
};

template <class C>
__global__ void __launch_bounds__(Joined<C>::THREADS, 1)
joined(const char* __restrict__ packed, const typename Joined<C>::Type* __restrict__ bias, char* __restrict__ y, int in_d, int out_d, int pitch,
       int plane, int tiles_f, int tiles, int rows, int columns, const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Joined<C>::run(packed, bias, y, {in_d, out_d, pitch, plane, tiles_f, tiles, rows, columns}, map, shared_address(memory));
}

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

// An array's element: of an index that the compiler knows once loops are unrolled.
template <const auto& VALUES>
__device__ __forceinline__ constexpr int value_at(int i) {
  constexpr auto found = table_of<int>(VALUES);
  return found[i];
}

// The same of any index, from constant memory.
template <const auto& VALUES>
__device__ __forceinline__ int constant_at(int i) {
  static __constant__ const auto found = table_of<int>(VALUES);
  return found[i];
}


// Tensor maps of the input.
template <class C, int = C::fetch> constexpr int MAPS_OF = 1;

template <class C_>
struct PixelTile {
using C = C_;
using Number = NumberOf<C::precision>;

// --- pixels -----------------------------------------------------------------------------------------------------------

static constexpr int ELEMENT = 4;
static constexpr int VEC = 16 / 4;                // elements of a 16-byte unit
static constexpr int ROW_BYTES = C::ck * 4;       // a pixel's row in a tile: 32, 64 or 128
static constexpr int UNITS_PER_ROW = ROW_BYTES / 16;
static constexpr int K_STEPS = ROW_BYTES / 32;          // a matrix instruction takes 32 bytes of K
static constexpr int CHUNKS = (C::cin_g + C::ck - 1) / C::ck;
// Columns of a segment with one residue modulo the input's step along W make a plane of C::plane neighbours; there are C::planes residues that
// some tap reads. A segment has its planes one behind the other.
static constexpr int PITCH = C::plane;  // pixel rows from a segment to the next
static constexpr int PIXELS = C::rows_h * PITCH;
static constexpr int PART_BYTES = (PIXELS * ROW_BYTES + 1023) / 1024 * 1024;
static constexpr int STAGE_BYTES = PART_BYTES;

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
  return {t.n, t.d, t.h, t.w, t.group * C::cin_g + chunk * C::ck, C::cin_g - chunk * C::ck};
}

};

// Four float32 values of a unit, rounded to TF32.
template <class C>
__device__ __forceinline__ void store_parts(u32 to, const u32 (&v)[4]) {
  u32 hi[4];
#pragma unroll
  for (int e = 0; e < 4; e++) hi[e] = to_tf32(__uint_as_float(v[e]));
  store_shared_128(to, hi[0], hi[1], hi[2], hi[3]);
}


struct Corner { int at[5]; };                           // of a box in a tensor, innermost first
struct SlotPlace { u32 from; bool exists; };            // of a pixel in a slot, in bytes; the upper 8 bits are its row's phase, see below

// What ways have in common. A slot has BOXES boxes (what threads copy is one): `corner` says where the tensor `map` has box r. `place` says where
// the first channel of a pixel is in the slot, by the segment (of an image) and the column that have it.
template <class C>
struct SlotOf {
static constexpr int BOXES = C::slot_boxes, COPIED_BYTES = C::slot_copied;
static constexpr int BOX_BYTES = (C::slot_copied + 127) / 128 * 128, BYTES = BOX_BYTES;
static constexpr int OTHERS = (C::ck - 1) * C::rows_h;  // rows of an image's other channels
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
  return {at.w + r * BOX_COLUMNS, at.h, at.d, at.channel, at.n};
}
static __device__ __forceinline__ SlotPlace place(const char*, const typename T::Sizes&, const typename T::Source&, int segment, int image, int column, u32) {
  int at_column = column;
  // a column that only fills a plane up
  u32 from = (segment + image * Of::OTHERS) * C::slot_units * 16 + at_column * 4;
  return {from, false};
}
};

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
    int column = T::column_of(within), image = segment / C::rows_h;
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


// Of precision P and COUT channels; a block has COLUMNS. WIDE: lanes store 16 bytes of float32 each.
template <int P, int COUT, int COLUMNS, bool WIDE>
struct PixelStores {
  using Number = NumberOf<P>;
  // Columns that are stored together, each by a lane of four; of 16 lanes exchange some before.
  static constexpr int UNIT = WIDE ? 16 : 8;
  static constexpr int UNITS = COLUMNS / UNIT;

  // Columns from UNIT * i on of a row's sums, of which `left` exist: a thread's are columns 8j + 2t and the next, of pixels g and g + 8
  // (`eight`) of the warp's 16. More sums may follow those of the columns.
  template <int SUMS>
  static __device__ __forceinline__ void store(const float (&sums)[SUMS], int i, int eight, char* pixel, int left, bool there, int lane) {
    if constexpr (UNIT == 16) store_16(sums, i, eight, pixel, left, there, lane);
    else store_8(sums, i, eight, pixel, left, there, lane);
  }

private:
  static __device__ __forceinline__ bool is_there(int column, int left, bool there) { return there && (COUT % COLUMNS == 0 || column < left); }
  static __device__ __forceinline__ u32 from_neighbour(u32 v) { return __shfl_xor_sync(0xffffffffu, v, 1); }

  // Lanes exchange with a neighbour, so that an even one stores four of columns 16i and on, an odd one of 16i + 8 and on.
  template <int SUMS>
  static __device__ __forceinline__ void store_16(const float (&sums)[SUMS], int i, int eight, char* pixel, int left, bool there, int lane) {
    const int odd = lane & 1, column = 16 * i + (lane & 2) * 2 + odd * 8;
    const bool one = is_there(column, left, there);
    const float *low_sums = sums + 8 * i + 2 * eight, *high_sums = low_sums + 4;
    u32 v[4];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      u32 low = bits_of(low_sums[k]), high = bits_of(high_sums[k]);
      u32 other = from_neighbour(odd ? low : high);
      v[k] = odd ? other : low, v[2 + k] = odd ? high : other;
    }
    store_global_128_if(pixel + column * 4, v, one);
  }

  template <int SUMS>
  static __device__ __forceinline__ void store_8(const float (&sums)[SUMS], int i, int eight, char* pixel, int left, bool there, int lane) {
    const int column = 8 * i + (lane & 3) * 2;
    const float* own = sums + 4 * i + 2 * eight;
    char* to = pixel + column * 4;
    const bool one = is_there(column, left, there), two = there && column + 1 < left;
    const u32 v[4] = {bits_of(own[0]), bits_of(own[1])};
    if constexpr (COUT % 2 == 0) {
      store_global_64_if(to, v, one);
    } else {
      store_global_if(to, v[0], one);
      store_global_if(to + 4, v[1], two);
    }
  }
};

// What modes of `pixels` share: a block's roles, its loops over tiles and over stages of a ring, and fragments of A from shared memory.
//
// A mode M is a template over its constants C. It has
//   Sums               a consumer's thread's; Sizes, whose last is `tiles`; Maps, of the copy engine
//   PRODUCERS, RINGS   of a block: its warpgroups, and rings, of which each consumer may have its own
//   FILLERS, READERS   of a stage: arrivals when it is full, and consumers that read it
//   first_tile, next_tile  of a block
//   Loader             begin(tile): a tile's steps; load(step, stage, barrier): what a stage gets, whose bytes count at a barrier
//   Consumer           steps(tile); begin(sums, tile); at(stage): where it is, ahead of the wait; multiply(sums, at, held); store(sums, tile)
// If instructions still read a stage behind `multiply` (M::HOLDS), the next one gives it back, by its barrier `held`.
// Where consumers take whole tiles in turn (M::TURNS) `takes` says whose turn it is.

struct Steps { int first, end; };                       // of a tile, a stage each

// What a launch gives.
template <class M>
struct Work {
  const char* packed;
  const typename M::Type* bias;
  char* y;
  const typename M::Sizes& sizes;
  const typename M::Maps& maps;
  u32 memory;
};

template <class M>
__device__ __forceinline__ void produce(const Work<M>& work, typename M::Loader loader, int consumer = 0) {
  const typename M::Ring ring = M::ring_of(work.memory, consumer);
  typename M::Ring::Cursor cursor = {0, 1};             // all are free at first
#pragma unroll 1
  for (int tile = M::first_tile(consumer, work.sizes); tile < work.sizes.tiles; tile = M::next_tile(tile, work.sizes)) {
    const Steps steps = loader.begin(tile);
#pragma unroll 1
    for (int step = steps.first; step < steps.end; step++, cursor.next()) {
      ring.wait_empty(cursor);
      loader.load(step, ring.stage(cursor), ring.full(cursor));
    }
  }
}

template <class M>
__device__ __forceinline__ void consume(const Work<M>& work, const typename M::Ring& ring, int wg, int thread) {
  typename M::Ring::Cursor cursor = {0, 0};
  typename M::Consumer consumer(work, wg, thread);
  typename M::Sums sums;
#pragma unroll 1
  for (int tile = M::first_tile(wg, work.sizes); tile < work.sizes.tiles; tile = M::next_tile(tile, work.sizes)) {
    const Steps steps = consumer.steps(tile);
    consumer.begin(sums, tile);
    u32 held = 0;                                       // the stage that instructions under way read
#pragma unroll 1
    for (int step = steps.first; step < steps.end; step++, cursor.next()) {
      const auto at = consumer.at(ring.stage(cursor));
      ring.wait_full(cursor);
      consumer.multiply(sums, at, held);
      held = ring.empty(cursor);
    }
    wgmma_wait<0>();
    give_back(held, thread & 31);
    consumer.store(sums, tile);
  }
}

template <class M>
__device__ __forceinline__ void run(const Work<M>& work) {
  const typename M::Ring ring = M::ring_of(work.memory, 0);
  run_block<2, M::CONSUMERS, M::C::producer_registers, M::C::consumer_registers>(
      [&] {
        M::ring_of(work.memory, 0).init(M::PRODUCER_WARPS, 4 * M::CONSUMERS);
        M::init(work.memory);
      },
      [&] { M::produce(work); },
      [&](int wg, int thread) { consume<M>(work, ring, wg, thread); });
}

// --- fragments of A from shared memory; rows of weights have 128 bytes of K ------------------------------------------

// The channel of a chunk at place `k`. Of float32 a lane (t = lane % 4) has the places t and t + 4 of a step: channels 2t and 2t + 1, so
// that those of four lanes are in other banks: rows are swizzled by the channel, or lie an odd number of 16 bytes apart.
template <int P>
__device__ __forceinline__ constexpr int channel_at(int k) { return k / 8 * 8 + k % 4 * 2 + k / 4 % 2; }

// Sweep: a 3-D transposed convolution without strides, of few output channels. Positions are rows of M, output channels are columns:
//
//   out[first + slot][position][channel] += sum over k of in[d][position + tap][k] weight[slot][tap][k][channel]
//
// A block goes along D, slice by slice of the input. A slice is multiplied once, with the taps of all `slots` kernel slices side by side: slot j
// has the sums of the output slice j behind the first that this input slice reaches. Then the first slot's sums are complete. They are stored, and
// the others move up by one. So every product is useful but at the ends of such a walk.
//
// M-rows are neighbouring pixel rows of the tile, its halo's columns among them, whose sums nobody stores. Consumers halve them: `nb` x 64 each.
//
// Chunks, and how pixels come, are `gather`'s (gather_tile.cuh, gather_produce.cuh): in NCHW by way of slots and a pass that turns them, in
// channels-last by a box that is the tile. Weights are B, by descriptor: for a chunk and a tap (of H and W) `b_columns` rows of a chunk's channels,
// swizzled as pixels are. A stage of their ring has `w_stage` steps of K, whole taps.

template <class K>
struct InOrder {
  using Sizes = typename K::Sizes;
  __device__ __forceinline__ explicit InOrder(const Sizes&) {}
  __device__ __forceinline__ int first(const Sizes& s) const { return K::first_tile(0, s); }
  __device__ __forceinline__ int next(int tile, const Sizes& s) const { return K::next_tile(tile, s); }
  __device__ __forceinline__ void end() {}
};

template <class C_>
struct Sweep : PixelTile<C_>, PacksUnits<Sweep<C_>> {
using C = C_;
using T = PixelTile<C>;
using Number = NumberOf<C::precision>;
using Type = typename Number::Type;
using Sizes = typename T::Sizes;
using Maps = typename T::template TensorMapsAnd<0>;

static constexpr int ELEMENT = 4, VEC = T::VEC, ROW_BYTES = T::ROW_BYTES, K_STEPS = T::K_STEPS, PITCH = T::PITCH, CHUNKS = T::CHUNKS;
static constexpr int CONSUMERS = T::CONSUMERS, PRODUCER_WARPS = T::PRODUCER_WARPS;
static constexpr int NB = C::nb;
static constexpr int STEP_BYTES = C::b_columns * 32;    // of weights, of a step of K
static constexpr int SLOT_SUMS = C::slot_columns / 2;   // a thread's of an M-row pair
using Sums = float[NB][C::slots * SLOT_SUMS];
static constexpr int POSITIONS = C::nb * 64;               // M-rows of a consumer

using Ring = RingOf<C::stages_p, T::STAGE_BYTES>;        // of pixels
using Weights = RingOf<C::stages_w, C::w_stage * STEP_BYTES>;
using Slots = RingOf<C::channels_last ? 0 : C::stages_s, BoxesOf<C>::BYTES>;
static constexpr int WEIGHTS_AT = Ring::BYTES;
static constexpr int SLOTS_AT = WEIGHTS_AT + Weights::BYTES;
static constexpr int BARRIERS_AT = SLOTS_AT + Slots::BYTES;

static constexpr int PRODUCERS = 2, FILLERS = PRODUCER_WARPS, RINGS = 1, READERS = CONSUMERS;
static __device__ __forceinline__ Ring ring_of(u32 memory, int) { return Ring::at(memory, memory + BARRIERS_AT); }
static __device__ __forceinline__ Weights weights_of(u32 memory) { return Weights::at(memory + WEIGHTS_AT, memory + BARRIERS_AT + Ring::BARRIER_BYTES); }
static __device__ __forceinline__ Slots slots_of(u32 memory) {
  return Slots::at(memory + SLOTS_AT, memory + BARRIERS_AT + Ring::BARRIER_BYTES + Weights::BARRIER_BYTES);
}
static __device__ __forceinline__ void init(u32 memory) {
  weights_of(memory).init(1, CONSUMERS * 4);
  slots_of(memory).init(1, PRODUCER_WARPS);
}

struct Tile {
  int group;                                           // 0
  int n, d, h, w;                                      // d: the input's slice
  int step;                                            // of the walk
};

// Slices of a walk, and the output's of a segment.
static __device__ __forceinline__ int segment_of(const Sizes& s) { return (s.out_d + s.tiles_d - 1) / s.tiles_d; }
static __device__ __forceinline__ int steps_of(const Sizes& s) { return segment_of(s) + C::slots - 1; }

// A block's walks, slice by slice.
static __device__ __forceinline__ int first_tile(int, const Sizes& s) { return blockIdx.x * steps_of(s); }
static __device__ __forceinline__ int next_tile(int index, const Sizes& s) {
  int steps = steps_of(s);
  return (index + 1) % steps ? index + 1 : index + 1 + (gridDim.x - 1) * steps;
}

static __device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  Tile t;
  int steps = steps_of(s), q = index / steps;
  t.group = 0;
  t.step = index - q * steps;
  t.w = q % s.tiles_w * C::tile_w;  q /= s.tiles_w;
  t.h = q % s.tiles_h * C::tile_h;  q /= s.tiles_h;
  t.d = q % s.tiles_d * segment_of(s) + t.step - (C::slots - 1) - C::first_slot;
  t.n = q / s.tiles_d;
  return t;
}

// Who brings pixels goes by these. Of slices that the input has not nothing is loaded.
using Order = InOrder<Sweep>;
using LoaderOrder = Order;
static __device__ __forceinline__ int end_chunk(const Tile& t, const Sizes& s) { return (u32)t.d < (u32)s.in_d ? CHUNKS : 0; }

// --- weights ---------------------------------------------------------------------------------------------------------

static constexpr int PACK_UNITS = CHUNKS * C::tap_entries * C::b_columns * T::UNITS_PER_ROW;
static constexpr int SECOND = C::cin, TAPS_IN_ALL = C::slots * C::taps;

// [chunk][tap][slot, output channel][channel of the chunk], zeros where there is none of either. The weight is (C::cin, C::cout, kernel), for a
// gradient for the input (C::cout, C::cin, kernel).
template <class Write>
static __device__ __forceinline__ void pack_unit(int i, const Write& write) {
  int unit = i % T::UNITS_PER_ROW, column = i / T::UNITS_PER_ROW % C::b_columns, rest = i / (T::UNITS_PER_ROW * C::b_columns);
  int entry = rest % C::tap_entries, first = rest / C::tap_entries * C::ck + unit * VEC;
  int slot = column / C::slot_columns, cout = column % C::slot_columns;
  int tap = (C::slots - 1 - slot) * C::taps + constant_at<C::tap_indices>(entry);
  write((long long)rest * STEP_BYTES + T::unit_at(column, unit), [=](int e) -> WeightAt {
    int cin = first + e;
    return {cin < C::cin && cout < C::cout, cout, cin, tap};
  });
}

// One thread: every slice's weights go through the ring, chunk by chunk.
static __device__ __forceinline__ void stream_weights(const char* packed, const Sizes& s, const Weights& ring) {
  wait_for_results();                                   // of `pack`
  typename Weights::Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = first_tile(0, s); index < s.tiles; index = next_tile(index, s)) {
    int chunks = end_chunk(tile_at(index, s), s);
    const char* from = packed;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++)
#pragma unroll 1
      for (int left = C::tap_entries; left > 0; left -= C::w_stage, cursor.next()) {
        u32 bytes = (left < C::w_stage ? left : C::w_stage) * STEP_BYTES, barrier = ring.full(cursor);
        ring.wait_empty(cursor);
        expect_bytes(barrier, bytes);
        copy_bulk(ring.stage(cursor), from, bytes, barrier);
        from += bytes;
      }
  }
}

// --- consumers -------------------------------------------------------------------------------------------------------

struct Consumer {
  const Work<Sweep>& work;
  int wg, thread;
  Weights ring;                                         // of weights
  typename Weights::Cursor cursor;                      // the stage to be waited for next
  u32 read;                                             // the barrier of the stage that instructions still read; 0: none
  Tile t;

  __device__ __forceinline__ Consumer(const Work<Sweep>& work, int wg, int thread)
      : work(work), wg(wg), thread(thread), ring(weights_of(work.memory)), cursor({0, 0}) {}

  __device__ __forceinline__ Steps steps(int index) {
    t = tile_at(index, work.sizes);
    return {0, end_chunk(t, work.sizes)};
  }

  // A walk's first sums are zeros; then each slot has those of the next one.
  __device__ __forceinline__ void begin(Sums& acc, int) {
    constexpr int CARRIED = (C::slots - 1) * SLOT_SUMS;
#pragma unroll
    for (int nb = 0; nb < C::nb; nb++)
#pragma unroll
      for (int i = 0; i < CARRIED + SLOT_SUMS; i++) {
        acc[nb][i] = i < CARRIED && t.step > 0 ? acc[nb][i < CARRIED ? i + SLOT_SUMS : i] : 0.f;
        opaque(acc[nb][i]);
      }
    read = 0;
  }

  // Where the consumer's pixels are, as descriptors have it.
  __device__ __forceinline__ u32 at(u32 stage) const { return uniform((stage + wg * (POSITIONS * ROW_BYTES)) >> 4 | 1u << 16); }

  // acc += pixels x weights of a chunk. Instructions are queued up to two stages of the weights' ring ahead; what the stage before the last
  // read is given back, and with the first the pixels' chunk before.
  __device__ __forceinline__ void multiply(Sums& acc, u32 pixels, u32 held) {
    const int lane = thread & 31;
    u32 weights = 0, barrier = 0;
#pragma unroll
    for (int i = 0; i < C::tap_entries; i++) {
      if (i % C::w_stage == 0) {
        ring.wait_full(cursor);
        weights = uniform(ring.stage(cursor) >> 4 | 1u << 16);
        barrier = ring.empty(cursor);
        cursor.next();
        wgmma_fence();
      }
#pragma unroll
      for (int nb = 0; nb < C::nb; nb++) {
        u64 a = ROWS_OF<ROW_BYTES> | (pixels + (value_at<C::tap_rows>(i) + nb * 64) * (ROW_BYTES / 16));
        u64 b = ROWS_OF<ROW_BYTES> | (weights + i % C::w_stage * (STEP_BYTES / 16));
        WgmmaOf<C::b_columns>::template multiply<C::precision, false, false, true>(acc[nb], a, b);
      }
      if ((i + 1) % C::w_stage == 0 || i + 1 == C::tap_entries) {
        wgmma_commit();
        wgmma_wait<1>();
        give_back(read, lane);
        if (i < C::w_stage) leave(held, lane);
        read = barrier;
      }
    }
  }

  __device__ __forceinline__ void store(const Sums& acc, int) const {
    give_back(read, thread & 31);
    const int od = t.d + C::first_slot;
    if (t.step < C::slots - 1 || od >= work.sizes.out_d) return;
    store_rows(acc, od);
  }

  // Where a thread's sum of M-rows 64 `nb` and behind is in the tile; `eight`: the one eight rows further.
  __device__ __forceinline__ int position(int nb, int eight, int thread) const {
    return wg * POSITIONS + nb * 64 + (thread >> 5) * 16 + (thread >> 2) % 8 + eight * 8;
  }

  __device__ __forceinline__ float bias_of(int channel) const {
    return work.bias ? Number::value(work.bias[channel]) : 0.f;
  }

  // Channels-last: the sums of the first slot, those of output slice `od`.
  __device__ __forceinline__ void store_pixels(const Sums& acc, int od) const {
    using Stores = PixelStores<C::precision, C::cout, C::slot_columns, C::wide_stores>;
    constexpr int PIXEL = C::cout * 4;
    const Sizes& s = work.sizes;
    float b[SLOT_SUMS / 2];                             // not what sums begin with: ptxas would serialise some kernels (C7515)
#pragma unroll
    for (int i = 0; i < SLOT_SUMS / 2; i++) b[i] = bias_of(i / 2 * 8 + (thread & 3) * 2 + i % 2);
    char* const y = work.y + (((long long)t.n * s.out_d + od) * s.out_h + t.h) * s.out_w * PIXEL + (long long)t.w * PIXEL;
#pragma unroll
    for (int nb = 0; nb < C::nb; nb++) {
      float sums[SLOT_SUMS];
#pragma unroll
      for (int i = 0; i < SLOT_SUMS; i++) sums[i] = acc[nb][i] + b[i / 4 * 2 + i % 2];
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        int at = position(nb, eight, thread), row = at / PITCH, w = at - row * PITCH;
        bool there = row < C::tile_h && t.h + row < s.out_h && w < C::tile_w && t.w + w < s.out_w;
        char* pixel = y + ((long long)row * s.out_w + w) * PIXEL;
#pragma unroll
        for (int i = 0; i < Stores::UNITS; i++) Stores::store(sums, i, eight, pixel, C::cout, there, thread & 31);
      }
    }
  }

  // NCHW: a thread has two of each eight channels of a position, and eight lanes neighbouring positions, in float32 a sector's. One loop for
  // both layouts, with sums that all have their bias first, takes up to 15 % longer.
  __device__ __forceinline__ void store_rows(const Sums& acc, int od) const {
    const Sizes& s = work.sizes;
    const int channel = (thread & 3) * 2;
    const long long plane = (long long)s.out_d * s.out_h * s.out_w * 4;
    float b[SLOT_SUMS / 2];
#pragma unroll
    for (int i = 0; i < SLOT_SUMS / 2; i++) b[i] = bias_of(i / 2 * 8 + channel + i % 2);
    char* const y = work.y + ((long long)t.n * C::cout + channel) * plane + (((long long)od * s.out_h + t.h) * s.out_w + t.w) * 4;
#pragma unroll
    for (int nb = 0; nb < C::nb; nb++)
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        int at = position(nb, eight, thread), row = at / PITCH, w = at - row * PITCH;
        bool there = row < C::tile_h && t.h + row < s.out_h && w < C::tile_w && t.w + w < s.out_w;
        char* to = y + ((long long)row * s.out_w + w) * 4;
#pragma unroll
        for (int i = 0; i < SLOT_SUMS / 2; i++) {
          const int of = i / 2 * 8 + i % 2;
          const u32 v = Number::bits(acc[nb][i / 2 * 4 + eight * 2 + i % 2] + b[i]);
          const bool ok = there;
          store_global_if(to + of * plane, v, ok);
        }
      }
  }
};

static __device__ __forceinline__ void produce(const Work<Sweep>& work) {
  const int warp = uniform(threadIdx.x >> 5);
  const Sizes& s = work.sizes;
  const Ring pixels = ring_of(work.memory, 0);
  const Slots slots = slots_of(work.memory);
  if (warp < PRODUCER_WARPS) {
    turn_slots<Sweep>(nullptr, s, pixels, slots, threadIdx.x);
  } else if (warp == T::LOADER_WARP && (threadIdx.x & 31) == 0) {
    load_boxes<Sweep>(work.maps, s, slots);
  } else if (warp == T::WEIGHTS_WARP && (threadIdx.x & 31) == 0) {
    stream_weights(work.packed, s, weights_of(work.memory));
  }
}
};

template <class M>
__global__ void __launch_bounds__(M::THREADS, 1)
sweep(const char* __restrict__ packed, const typename M::Type* __restrict__ bias, char* __restrict__ y, int batch, int in_d, int in_h, int in_w,
      int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tiles, const __grid_constant__ typename M::Maps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const typename M::Sizes sizes = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles};
  run<M>({packed, bias, y, sizes, maps, shared_address(memory)});
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

static constexpr int VEC = 16 / 4;                // elements of a 16-byte unit
static constexpr int TAPS = C::kernel_d * C::kernel_h * C::kernel_w;
static constexpr int SET_TAPS = C::taps_d * C::taps_h;

// A block's sums, [tap][ci][co], with pitches by which a warp's fragments meet all banks of shared memory: neighbours along co lie in a
// row, and ci of neighbouring lanes 2 rows apart, 8 banks. Taps lie 8 banks apart.
static constexpr int SUMS_PITCH = C::block_co + 4;
static constexpr int SUMS_OF_TAP = C::block_ci * SUMS_PITCH + 8;
static constexpr int SUMS_BYTES = SET_TAPS * SUMS_OF_TAP * 4;
static __device__ __forceinline__ int sum_at(int tap, int ci, int co) { return (tap * SUMS_OF_TAP + ci * SUMS_PITCH + co) * 4; }

static constexpr int Q_ROWS = C::tile_d * C::tile_h;
static constexpr int CLASS_ROWS = (C::g_rows_h + C::row_classes - 1);
static constexpr int G_ROWS = C::g_rows_d * CLASS_ROWS;
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
  c.d = i % s.tiles_d * C::tile_d;
  c.n = i / s.tiles_d;
  return c;
}

// Where g's tile of a chunk begins.
static __device__ __forceinline__ Chunk in_g(const Chunk& c, const Work& work) {
  return {c.n, c.d + work.tap_d, c.h + work.tap_h,
          c.w + work.tap_w};
}

// Of a block; the split that it takes. Blocks of the same pixels are neighbours, for L2's sake.
static __device__ __forceinline__ int take_work(Work& work, int index) {
  int set = index % C::sets_w;  index /= C::sets_w;
  work.co = 0;  work.ci = 0;  work.group = 0;
  work.tap_w = set % C::sets_w;
  work.tap_h = 0;
  work.tap_d = set / C::sets_w * C::taps_d;
  return index;
}

// (n, d, h) of row `r` of positions, or of g's tile in its tensor.
struct Rows { int n, d, h; };
static __device__ __forceinline__ Rows q_row(int r) { return {r / (C::tile_d * C::tile_h), r / C::tile_h % C::tile_d, r % C::tile_h}; }
};


// C: the constants of a tiling.
template <class C_>
struct WgradTile : WgradShape<C_> {
using C = C_;
using S = WgradShape<C>;

// --- rows of M, a unit's taps ------------------------------------------------------------------------------------------

static constexpr int COPIERS = 128;
static constexpr int CONSUMERS = C::warpgroups * 128;
static constexpr int THREADS = COPIERS + CONSUMERS;
static constexpr int OF_UNIT = C::taps_h;          // taps of a unit
static constexpr int SET_UNITS = S::SET_TAPS / C::taps_h;

// --- x -----------------------------------------------------------------------------------------------------------------

static constexpr int PIXELS = S::Q_ROWS / C::tile_h * (C::tile_h + C::stack - 1) * C::tile_w;  // `stack` rows may meet a row of g
static constexpr int BOX_BYTES = PIXELS * C::block_ci * 4;
static constexpr int X_ROW_BYTES = C::block_ci * C::segment;  // from one row of the tile to the next
static constexpr int N_WIDTH = C::block_ci;  // of one matrix instruction; stacked: for each row of x
static constexpr int NB = 1;

// --- g -----------------------------------------------------------------------------------------------------------------

static constexpr int G_ROW_BYTES = C::block_co * C::g_pitch * 4;  // of a box
static constexpr int G_BYTES = S::G_BYTES;

// --- stages and sums ---------------------------------------------------------------------------------------------------

static constexpr int STAGE_BYTES = (BOX_BYTES + G_BYTES + 1023) / 1024 * 1024;
static constexpr int RAW_AT = C::stages * STAGE_BYTES;               // x's pixels before they are turned

// The output channel of a block's row of M: classes follow each other.
static __device__ __forceinline__ int channel_of(int m) { return m % C::block_co + m / C::block_co; }

// Of a row along H and a channel: the place of their class in the list of maps, and the elements by which the class's rows begin early.
struct Class { int index, lead; };
static __device__ __forceinline__ Class class_of(int row, int channel, const typename S::Sizes& s) {
  const u32 begins = (u32)0 * s.out_d * s.out_h * s.out_w + (u32)0 * s.out_w;
  return {0, (int)(begins & (S::VEC - 1))};
}

// --- steps of K --------------------------------------------------------------------------------------------------------

// A matrix instruction takes 32 bytes of K, a strip of 8 columns. Steps are unrolled in parts, which differ by an offset: some whole rows
// of positions or a part of one; stacked some columns of all rows.
static constexpr int OF_ROW = C::tile_w * 4 / 32;
static constexpr int PARTS = S::Q_ROWS * C::tile_w * 4 / 32 / C::unrolled;

// Where 32 bytes of pixels lie in x's tile. Bits of the number choose rows, segments and what lies in them: sums are of numbers as of places.
static __device__ __forceinline__ u32 x_pixels_at(int i) {
  const int line = i / (C::line_bytes / 32), within = i % (C::line_bytes / 32) * 32;
  return within / C::segment * BOX_BYTES + line * X_ROW_BYTES + within % C::segment;
}
// Where step `k_step` begins there. Between slices are rows of a halo.
static __device__ __forceinline__ u32 x_at(int k_step) {
  return x_pixels_at(k_step + k_step / (C::tile_h * OF_ROW) * ((C::stack - 1) * OF_ROW));
}

struct TensorMaps { TensorMap of[1 + C::row_classes]; };   // of x, and of g
};


// A block's share of the work, and where its ring is.
template <class T>
struct WgradBlock {
  using Ring = RingOf<T::C::stages, T::STAGE_BYTES>;
  const typename T::TensorMaps& maps;
  const char* g;
  typename T::Sizes s;
  typename T::Work work;
  int begin, end;                          // its chunks
  unsigned char* memory;
  Ring ring;
  u32 raw_full;                            // a barrier: of x's pixels before they are turned
};

template <class T>
struct WgradProducer {
using C = typename T::C;
using Chunk = typename T::Chunk;
using Block = WgradBlock<T>;

// --- boxes ---

static __device__ __forceinline__ void load_x(const Block& block, const Chunk& c, u32 to, u32 barrier) {
  const int channel = block.work.group * C::cin + block.work.ci;
  {
    int w = (c.w);
    load_box(to, block.maps.of[0], w, channel, c.h - C::stack + 1, c.d, c.n, barrier);
  }
}

// g's tile, which begins `at`. Gapless: a chunk may be a box of any shape, of which a launch tells, and each tap of the set then has g's
// pixels for it: a strip is the next 8 of them in whatever rows they lie, so that images of 4 x 4 fill K (rows of 8 leave half of it empty).
static __device__ __forceinline__ void load_g(const Block& block, const Chunk& at, u32 to, u32 barrier) {
  const TensorMap* maps = block.maps.of + 1;
  const int channel = block.work.group * C::cout + block.work.co;
  {
    const int row = at.h, of = channel;  // of the class in this chunk
    const typename T::Class c = T::class_of(row, of, block.s);
    const int first = at.w + c.lead;
    load_box(to, maps[c.index], first - (first & (T::VEC - 1)), of, row, at.d, at.n, barrier);
  }
}

// --- all threads ---

static __device__ __forceinline__ void run(const Block& block, int thread) {
  if (thread > 0) return;
  CursorOf<C::stages> cursor = {0, 1};     // all are free at first
#pragma unroll 1
  for (int i = block.begin; i < block.end; i++, cursor.next()) {
    const Chunk c = T::chunk_at(i, block.s), at = T::in_g(c, block.work);
    const u32 tile = block.ring.stage(cursor), full = block.ring.full(cursor);
    block.ring.wait_empty(cursor);
    if (thread == 0) {
      expect_bytes(full, T::BOX_BYTES + T::G_BYTES);
      load_x(block, c, tile, full);
      load_g(block, at, tile + T::BOX_BYTES, full);
    }
    ;
  }
}
};


template <class T>
struct WgradMultiply {
using C = typename T::C;
using Sizes = typename T::Sizes;
using Rows = typename T::Rows;
using UnitSums = float[T::NB][T::OF_UNIT * (T::N_WIDTH / 2)];
using Sums = UnitSums[C::units];

// --- what a thread has of M, and of g's tile -------------------------------------------------------------------------

// A lane's rows of a warp's sixteen are `row` and T::NEXT_ROWS on; its warp's begin at a channel of the block's and a unit.
struct Lane { int lane, row, q, first_unit, channel; };

static __device__ __forceinline__ Lane lane_of(int wg, int thread) {
  int warp = thread >> 5, lane = thread & 31, row = lane >> 2;
  const int wg_units = wg;
  // By a shuffle ptxas knows that a warp's lanes have the same. Most of these tiles gain by it; other tiles lose.
  warp = __shfl_sync(0xffffffffu, warp, 0);
  return {lane, row, lane & 3, wg_units + warp * 16 / 64, warp * 16 % 64};
}

// A lane's taps, the same for all chunks.
struct Taps {
  int at[C::units];                        // of g's tile: elements (NCHW) or pixels (channels_last) by which the unit is shifted
  u32 line[C::units];                      // NCHW: rows of memory from a chunk's first row to the unit's, as elements modulo 2^32
};

static __device__ __forceinline__ void set_tap(Taps& taps, int u, int unit, const Sizes& s) {
  if (unit >= T::SET_UNITS) unit = T::SET_UNITS - 1;    // its sums are not stored
  int td = unit;
  int shift = td * T::CLASS_ROWS;
  taps.at[u] = shift * (C::block_co * C::g_pitch);
  taps.line[u] = ((u32)(td) * s.out_h) * s.out_w;
}

// Where a lane begins, of channels_last in bytes, of NCHW in elements.
static __device__ __forceinline__ int lane_first(const Lane& of) {
  {
    const int channel = of.channel + of.row, of_channels = channel / C::block_co;  // the lane's class
    return of_channels * (T::G_BYTES / 4) + channel % C::block_co * C::g_pitch + (of.q);
  }
}

// g's tile of a chunk, as a lane sees it from `lane_at` on.
struct Tile {
  const unsigned char* at;
  const Taps& taps;
  const Sizes& s;
  u32 phases[C::row_classes];              // NCHW: elements by which rows of a class begin off 16 bytes; copied by threads the first row
  int lane_at;
};

// --- steps of K; constants after unrolling ---------------------------------------------------------------------------

// A half: where it lies in g's tile before the tap's share, and (NCHW) in memory.
struct Half {
  int row, column;
  Rows memory;
};
struct Step {
  Half half[2];
  u32 x;                                   // where it begins in x's tile
};

// Step `k_step` of a chunk's positions, a strip of 8.
// All rows of a column follow each other: by the rows of g with this remainder by step_h.
static __device__ __forceinline__ Step step_of(int k_step, int remainder = 0) {
  k_step = k_step % T::Q_ROWS * T::OF_ROW + k_step / T::Q_ROWS;
  Step step;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int strip = k_step;
    const Rows q = T::q_row(strip / (C::tile_w / 8));
    const int h = q.h + remainder;
    step.half[k].row = (q.n * C::g_rows_d + q.d) * T::CLASS_ROWS + h;
    step.half[k].column = (strip % (C::tile_w / 8) * 8 + (4 * k));
    step.half[k].memory = {q.n, q.d, q.h + remainder};
  }
  step.x = T::x_at(k_step);
  return step;
}

// --- the fragment of unit `u` at a step ------------------------------------------------------------------------------

// Rows g and g + 8 of the warp's sixteen; of the two halves of K, pixels q and q + 4 of a strip (TF32), or 2q and 2q + 1 of two strips.

// NCHW: elements of channels' rows, which begin anywhere. What is known only at run time of where a half begins:
static __device__ __forceinline__ int begin_of(const Tile& g, int u, const Half& half) {
  const int at = g.lane_at + g.taps.at[u];
  return at + g.phases[0];
}
// And constants that are even, so that the addresses are a register and an immediate; of rows g and g + 8.
static __device__ __forceinline__ int constant_of(const Half& half, int h) {
  return half.row * (C::block_co * C::g_pitch) + half.column + h * 8 * C::g_pitch;
}

static __device__ __forceinline__ void load_elements(u32 (&a)[4], const Tile& g, int u, const Step& step) {
  const u32* words = (const u32*)g.at;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int at = begin_of(g, u, step.half[k]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int constant = constant_of(step.half[k], h);
      u32 v = words[at + constant];
      a[2 * k + h] = v;  // boxes are rounded on their way
    }
  }
}

struct RunWords {
  u32 word[2][2][1];  // of a step's two strips, of rows g and g + 8
  bool odd[2];                             // whether the run begins in the middle of the first
};

// Of units one after the other.
static __device__ __forceinline__ void load(u32 (&a)[4], RunWords& run, const Tile& g, int u, const Step& step) {
  {
    load_elements(a, g, u, step);
  }
}

// --- multiplications -------------------------------------------------------------------------------------------------

static __device__ __forceinline__ int stack_of(int r) { return C::taps_h + (r < 0); }
static __device__ __forceinline__ int stack_begin(int r) { return r * C::taps_h + (r < 0 ? r : 0); }
// Where a unit's tap has its sums.
static __device__ __forceinline__ int place_of(int tap) {
  return stack_begin(0) + stack_of(0) - 1 - tap;
}

// A fragment by ROWS rows of x, whose first begins at `x`: their sums follow each other from `first` rows on.
template <int ROWS>
static __device__ __forceinline__ void multiply_by(UnitSums& acc, int first, const u32 (&a)[4], u32 x) {
  // From 8 channels or pixels to the next 8; MN-major also from the channels of a swizzled line to the next: of the next box, or, stacked,
  // of the next row of x.
  const u64 strides = ((u64)(8 * C::segment >> 4) << 32) | ((u64)((8 * C::segment) >> 4) << 16);
  const u64 upper = strides | ((u64)(2) << 62);
  using Wgmma = WgmmaOf<ROWS * T::N_WIDTH>;
  u64 b = upper | ((x & 0x3ffff) >> 4);
  float (&d)[ROWS * (C::block_ci / 2)] = *(float (*)[ROWS * (C::block_ci / 2)])&acc[0][first * (C::block_ci / 2)];
  Wgmma::template multiply<C::precision, false, C::channels_last, true>(d, a, b);
}

// By the rows of x that a row of g with remainder `r` meets, of `x` and those behind it.
static __device__ __forceinline__ void multiply(UnitSums& acc, int r, const u32 (&a)[4], u32 x) {
  if (stack_of(r) == C::stack) multiply_by<C::stack>(acc, stack_begin(r), a, x);
}

// The unrolled steps of a part of a chunk.
static __device__ __forceinline__ void multiply_part(Sums& acc, int part, const unsigned char* tile, Tile g) {
  u32 a[3][4];                  // of the instructions in flight
  RunWords run;
  const Step from = step_of(part * C::unrolled);
  g.at = tile + T::BOX_BYTES + from.half[0].row * T::G_ROW_BYTES;
  g.lane_at += from.half[0].column;
  const u32 x = shared_address(tile) + from.x;
#pragma unroll
  for (int k = 0; k < C::unrolled; k++)
    {
        const Step step = step_of(k, 0);
        u32 (&fragment)[4] = a[k % 3];
        load(fragment, run, g, 0, step);
        wgmma_fence();
        multiply(acc[0], 0, fragment, x + step.x);
        wgmma_commit(), wgmma_wait<3 - 1>();  // a fragment's registers are free again
      }
  wgmma_wait<0>();
}

// A warpgroup's part of the block's record, in shared memory.
static __device__ __forceinline__ void store_sums(const Sums& acc, u32 memory, const Lane& of) {
#pragma unroll
  for (int u = 0; u < C::units; u++) {
    int unit = of.first_unit + u;
    if (unit >= T::SET_UNITS) continue;
#pragma unroll
    for (int i = 0; i < C::taps_h; i++) {
      // A unit is a tap, or (stacked) a column of taps_h of them.
      int tap = (unit * C::taps_h + i);
#pragma unroll
        for (int j = 0; j < C::block_ci / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int m = T::channel_of(of.channel + of.row + 8 * h);
            u32 to = memory + T::sum_at(tap, j * 8 + 2 * of.q, m);
            const float* sums = &acc[u][0][place_of(i) * (C::block_ci / 2) + 4 * j + 2 * h];
            store_shared_f32(to, sums[0]);
            store_shared_f32(to + T::SUMS_PITCH * 4, sums[1]);
          }
    }
  }
}
};

// Grad-weight by wgmma (sm_90a): dW[ci, co, tap] = sum over images and positions q of x[ci, q] * g[co, q * step + tap * dilation - padding].
//
// The GEMM of `wgrad` with the operands the other way round. M = 64 rows, an output channel at a tap each (subs taps of
// 64 / subs channels), N = block_ci input channels, K = pixels.
//   A, from registers: g's tile with its halo, read from shared memory at any column, so that a tap is an address.
//   B, from shared memory by descriptor: x's tile as the tensor copy engine leaves it. NCHW: rows of a channel's pixels (K-major),
//      rounded to TF32 on the way.
// Roles: one warpgroup copies, the others multiply: split_m of them divide the output channels of a block, the others its taps,
// UNITS x subs fragments of A at a time: UNITS neighbours for each of subs bands of rows. A unit is a tap.
// Or a column of taps: the rows of x that a row of g meets by them follow each other in shared memory, and so are columns of
// one instruction. Then a fragment is read once, not once a tap: reads of A take as long as a multiplication by 64 channels. Chunks are
// of rows of g, step_h at a time, and it is x's tile that has a halo, so that an instruction always takes all of its rows: ptxas waits
// for each one where some that share sums differ in shape (C7511). Rows beyond the image are zeros.
// g comes by boxes too, where its rows lie evenly: channels_last by one for each C::g_width channels and plane; NCHW by one, or
// by one for each class of rows that begin off 16 bytes (classed), or by threads where these are too many.
//
// K is split over ranges of chunks; a block leaves a record of its sums, and what follows adds the records.

// What becomes of a block's sums, of which each warpgroup has put its own into shared memory. As a record to global memory.
// WAITS: until it is there.
template <class T, bool WAITS = false>
struct WgradRecord {
char* records;

__device__ __forceinline__ void put(const WgradBlock<T>& block, int thread) const {
  fence_async_shared();
  named_sync<2, T::CONSUMERS>();           // all have stored theirs
  if (thread == 0) {
    store_bulk<T::SUMS_BYTES>(records + (long long)block_index() * T::SUMS_BYTES, block.ring.stages);  // the index is read again: kept, it spills
    bulk_commit();
    if constexpr (WAITS) bulk_wait();
    else bulk_wait_read();                 // the launch's end waits
  }
}
};

template <class C>
struct WgradWgmma {
using T = WgradTile<C>;
using Block = WgradBlock<T>;
using Ring = typename Block::Ring;
using M = WgradMultiply<T>;

// A chunk's tile of g, for a lane. NCHW: its rows, 8 channels apart, begin alike.
static __device__ __forceinline__ typename M::Tile tile_of(const Block& block, int i, const typename M::Lane& of, const typename M::Taps& taps, int lane_first) {
  typename M::Tile g = {nullptr, taps, block.s, {}, lane_first};
  const typename T::Sizes& s = block.s;
  const typename T::Chunk c = T::in_g(T::chunk_at(i, s), block.work);
  const int channel = block.work.group * C::cout + block.work.co;
  g.phases[0] = (c.w + T::class_of(c.h, channel + (of.channel + of.row) / C::block_co, s).lead) & (T::VEC - 1);
  return g;
}

// A split's sums; what becomes of them is `end`'s to say.
template <class E>
static __device__ __forceinline__ void consume(const E& end, const Block& block, int wg, int thread) {
  const typename M::Lane of = M::lane_of(wg, thread);
  typename M::Sums acc = {};               // ahead of what addresses need: behind it ptxas is given two sets of zeros
  typename M::Taps taps;
  M::set_tap(taps, 0, of.first_unit, block.s);
  const int lane_first = M::lane_first(of);
  typename Ring::Cursor cursor = {0, 0};
  // A warpgroup whose taps are all beyond the kernel leaves the tensor cores to the others.
  const int units_before = wg;
  const bool idle = units_before >= T::SET_UNITS;
#pragma unroll 1
  for (int i = block.begin; i < block.end; i++, cursor.next()) {
    const typename M::Tile g = tile_of(block, i, of, taps, lane_first);
    const unsigned char* stage = block.memory + cursor.stage * T::STAGE_BYTES;
    block.ring.wait_full(cursor);
#pragma unroll 1
    for (int part = idle ? T::PARTS : 0; part < T::PARTS; part++) M::multiply_part(acc, part, stage, g);
    give_back(block.ring.empty(cursor), of.lane);
  }
  named_sync<2, T::CONSUMERS>();           // nobody reads a stage any more
  M::store_sums(acc, block.ring.stages, of);
  end.put(block, wg * 128 + thread);
}

template <class E>
static __device__ __forceinline__ void run(const char* g, const E& end, const typename T::Sizes& s, const typename T::TensorMaps& maps, unsigned char* memory) {
  const u32 base = shared_address(memory), barriers = base + T::RAW_AT;
  Block block = {maps, g, s, {}, 0, 0, memory, Ring::at(base, barriers), barriers + Ring::BARRIER_BYTES};
  block.begin = T::take_work(block.work, blockIdx.x) * s.per_split;
  block.end = block.begin + s.per_split < s.chunks ? block.begin + s.per_split : s.chunks;
  const auto init = [&] {
    block.ring.init(1, C::warpgroups * 4);
    barrier_init(block.raw_full, 1);
  };
  const auto produce = [&] { WgradProducer<T>::run(block, threadIdx.x & 127); };  // whose loops then have a known length
  const auto consumer = [&](int wg, int thread) { consume(end, block, wg, thread); };
  run_block<1, C::warpgroups, C::producer_registers, C::consumer_registers>(init, produce, consumer);
}
};

template <class C>
__global__ void __launch_bounds__(WgradTile<C>::THREADS, 1)
wgrad_wgmma(const char* __restrict__ g, char* __restrict__ records, int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w,
      int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split, const __grid_constant__ typename WgradTile<C>::TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using K = WgradWgmma<C>;
  K::run(g, WgradRecord<WgradTile<C>>{records}, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split}, maps, memory);
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
  for (int i = warp; i < splits && index < C::sets_w * SUMS; i += 8) sum += records[(long long)i * (C::sets_w * SUMS) + index];
  parts[warp][lane] = sum;
  __syncthreads();
  typename S::Work work;
  S::take_work(work, index / SUMS);
  const int tap = index % SUMS / S::SUMS_OF_TAP, ci = index % SUMS % S::SUMS_OF_TAP / S::SUMS_PITCH, co = index % SUMS % S::SUMS_OF_TAP % S::SUMS_PITCH;
  const int kd = work.tap_d + tap / C::taps_h, kh = work.tap_h + tap % C::taps_h, kw = work.tap_w;
  const bool has = index < C::sets_w * SUMS && ci < C::block_ci && work.ci + ci < C::cin && co < C::block_co && work.co + co < C::cout;
  if (warp > 0 || !has || kd >= C::kernel_d || kh >= C::kernel_h || kw >= C::kernel_w) return;
  for (int i = 1; i < 8; i++) sum += parts[i][lane];
  const long long row = (work.group * C::cin + work.ci + ci) * C::cout + work.co + co;
  weight[row * S::TAPS + (kd * C::kernel_h + kh) * C::kernel_w + kw] = S::Number::bits(sum);
}

// --- constants: forward ----------------------------------------------------------------------------------------------

struct Forward {
  static constexpr int precision = 0, cin = 32, cout = 64, producer_registers = 40, consumer_registers = 232;
  static constexpr int places = 232, kernel_d = 3, kernel_h = 5, kernel_w = 5, dilation_d = 1, slots = 4;
  static constexpr int weight_stages = 5, warps_of_stage = 1, taps = 25, taps_of_stage = 5, span = 512;
  static constexpr int slot_bytes = 18432, stages = 4;
};

// --- constants: gradient for the input -------------------------------------------------------------------------------

struct GradInput {
  static constexpr int cin_g = 64, plane = 20, precision = 0, cin = 64, ck = 8, tile_d = 1, tile_h = 13, tile_w = 16;
  static constexpr int rows_h = 17, planes = 1, stages_p = 3, stages_s = 4, fetch = 1, slot_boxes = 1;
  static constexpr int slot_channel = 1360, slot_copied = 10880, slot_units = 5, column_pad = 0, cout = 32;
  static constexpr int producer_registers = 48, consumer_registers = 208, nb = 2, taps = 25, slots = 3;
  static constexpr int slot_columns = 32, b_columns = 96, first_slot = -2, tap_entries = 25;
  static constexpr int tap_rows[25] = {0, 1, 2, 3, 4, 20, 21, 22, 23, 24, 40, 41, 42, 43, 44, 60, 61, 62, 63, 64, 80, 81, 82, 83, 84};
  static constexpr int tap_indices[25] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24};
  static constexpr int stages = 3, stages_w = 4, w_stage = 12;
  static constexpr bool channels_last = false, wide_stores = false;
};

// --- constants: gradient for the weight ------------------------------------------------------------------------------

struct GradWeight {
  static constexpr int precision = 0, cin = 32, cout = 64, block_ci = 32, block_co = 64, g_pitch = 20, kernel_d = 3;
  static constexpr int dilation_d = 1, taps_d = 3, tile_d = 4, kernel_h = 5, taps_h = 5, tile_h = 2, kernel_w = 5;
  static constexpr int sets_w = 5, tile_w = 16, g_rows_d = 6, g_rows_h = 2, warpgroups = 3, units = 1, stages = 2;
  static constexpr int unrolled = 16, stack = 5, row_classes = 1, line_bytes = 64, segment = 64, g_width = 32;
  static constexpr int producer_registers = 56, consumer_registers = 152;
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
             int blocks, const std::array<int, 8>& sizes) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor packed = at::empty({614400}, x.options().dtype(at::kByte));
  kernels::pack<kernels::Joined<kernels::Forward>><<<150, 256, 0, stream>>>(of(weight), of(packed), 1);
  kernels::joined<kernels::Forward><<<blocks, 384, shared(kernels::joined<kernels::Forward>, 225520), stream>>>(
      of(packed), of(bias), of(out), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
      sizes[7], {tensor_map(x, false, false, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
                  std::array<cuuint32_t, 5>{cuuint32_t(sizes[7]), cuuint32_t(sizes[6]), 1, 8, 1},
                  std::array<cuuint32_t, 5>{1, 1, 1, 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE)});
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void grad_input(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& out,
                int blocks, const std::array<int, 11>& sizes) {
  const c10::cuda::CUDAGuard guard(grad.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor packed = at::empty({614400}, grad.options().dtype(at::kByte));
  kernels::pack<kernels::Sweep<kernels::GradInput>><<<150, 256, 0, stream>>>(of(weight), of(packed), 1);
  kernels::sweep<kernels::Sweep<kernels::GradInput>><<<blocks, 512, shared(kernels::sweep<kernels::Sweep<kernels::GradInput>>, 224944), stream>>>(
      of(packed), nullptr, of(out), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
      sizes[7], sizes[8], sizes[9], sizes[10],
      {tensor_map(grad, false, false, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, std::array<cuuint32_t, 5>{20, 17, 1, 8, 1},
                  std::array<cuuint32_t, 5>{1, 1, 1, 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE)});
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void grad_weight(const at::Tensor& x, const at::Tensor& grad, const at::Tensor& out,
                 int blocks, int slices, const std::array<int, 12>& sizes) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor sums = at::empty({int64_t(slices) * 655200}, x.options().dtype(at::kByte));
  kernels::wgrad_wgmma<kernels::GradWeight><<<blocks, 512, shared(kernels::wgrad_wgmma<kernels::GradWeight>, 221232), stream>>>(
      of(grad), of(sums), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7],
      sizes[8], sizes[9], sizes[10], sizes[11],
      {tensor_map(x, false, true, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, std::array<cuuint32_t, 5>{16, 32, 6, 4, 1},
                  std::array<cuuint32_t, 5>{1, 1, 1, 1, 1}, CU_TENSOR_MAP_SWIZZLE_64B),
       tensor_map(grad, false, true, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, std::array<cuuint32_t, 5>{20, 64, 2, 6, 1},
                  std::array<cuuint32_t, 5>{1, 1, 1, 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE)});
  kernels::add_records<kernels::GradWeight><<<5119, 256, 0, stream>>>(of(sums), of(out), slices);
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


def segments(walks: int, slices: int, slots: int, processors: int) -> int:
    """Into how many parts blocks cut a walk along the depth, so that all are over soonest; each has slots - 1 more."""

    def steps(parts: int) -> int:
        return ceil(walks * parts, processors) * (ceil(slices, parts) + slots - 1)

    return min(range(1, min(slices, 256) + 1), key=steps)


def output_size(size, kernel, given: Arguments):
    """Of every spatial dimension."""
    axes = zip(size, kernel, *given[:4])
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, more, d in axes)


def full(t: Tensor):
    """(depth, height, width); dimensions that the layer lacks have size 1."""
    return (1,) * (3 - RANK) + tuple(t.shape[2:])


def forward_launch(batch, source, result, processors):
    """(blocks, sizes): persistent blocks, which take tile after tile of 232 neighbouring places of a slice."""
    plane = result[1] * result[2]
    tiles_of_slice = ceil(plane, 232)
    tiles = batch * result[0] * tiles_of_slice
    rows = 6 + 234 // result[2]
    columns = ceil(source[2], 4) * 4
    return min(tiles, processors), (source[0], result[0], result[2], plane, tiles_of_slice, tiles, rows, columns)


def grad_input_launch(batch, source, result, processors):
    """(blocks, sizes): persistent blocks, which take tiles of 13 x 16 positions slice by slice along the depth."""
    rows = ceil(result[1], 13)
    columns = ceil(result[2], 16)
    parts = segments(batch * rows * columns, result[0], 3, processors)
    walks = batch * parts * rows * columns
    return min(walks, processors), (batch, *source, *result, parts, rows, columns, walks * (ceil(result[0], parts) + 2))


def grad_weight_launch(batch, source, result, processors):
    """(blocks, slices of sums, sizes): 3 waves of blocks share the chunks of 1x4x2x16 pixels.
    Few chunks have fewer shares: the sums of 4 are added in a chunk's time."""
    tiles_d = ceil(source[0], 4)
    tiles_h = ceil(source[1] + 4, 2)
    tiles_w = ceil(source[2], 16)
    chunks = batch * tiles_d * tiles_h * tiles_w
    each = max(ceil(chunks, max(1, processors * 3 // 5)), math.isqrt(chunks // 4))
    shares = ceil(chunks, each)
    return shares * 5, shares, (batch, *source, *result, tiles_d, tiles_h, tiles_w, chunks, each)


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


def rounds_to_tf32() -> bool:
    """Whether PyTorch's flags have float32 rounded to TF32, as it is by default."""
    cudnn = torch.backends.cudnn
    precision = cudnn.conv.fp32_precision if hasattr(cudnn, "conv") else "tf32" if cudnn.allow_tf32 else "ieee"
    return precision == "tf32" and cudnn.enabled


def is_fast(x: Tensor, shape, given: Arguments) -> bool:
    """Whether the fast kernels serve a layer with weights of this shape."""
    fitting = shape == WEIGHT and given == LAYER and x.dtype == DTYPE and rounds_to_tf32()
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


def wide(t: Tensor, multiple: int, behind: int = 0) -> Tensor:
    """A tensor, or memory like it whose columns but so many are a multiple: kernels store whole units of a row."""
    more = (behind - t.shape[-1]) % multiple
    return t.new_empty((*t.shape[:-1], t.shape[-1] + more)) if more else t


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
        if x.shape[-1] > 64:  # rows are cut into parts, which overlap by as much as the kernel reaches
            reach = out.shape[-1] - x.shape[-1]
            for begin in range(0, x.shape[-1] - 4, 60):
                first = reach if begin else 0  # a later part's results before it lack columns of the part before
                part = forward(x[..., begin : begin + 64], weight, bias, given, fast)[..., first:]
                out[..., begin + first :][..., : part.shape[-1]] = part
            return out
        result = wide(out, 4, 4)
        launch = forward_launch(x.shape[0], full(x), full(result), processors(x.get_device()))
        build(True).forward(x, weight, bias, result, *launch)
        return out if result is out else out.copy_(result[..., : out.shape[-1]])
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
        build(True).grad_input(dense(grad, 4), weight, out, *launch)
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
        build(True).grad_weight(dense(x, 4), dense(grad, 4), out, *launch)
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
        fast = fast and rounds_to_tf32()  # PyTorch's own gradients ask the flags again
        if fast and grad.shape[-1] % 4:
            grad = dense(grad, 4)  # once for both gradients
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
    """KernelBench level 1, problem 68: ModelNew(32, 64, (3, 5, 5))."""

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
        if fast and x.shape[-1] % 4:
            x = dense(x, 4)  # once for the forward and a gradient
        run = ConvTranspose.apply if recorded() else ConvTranspose.forward
        out = run(x, weight, None, bias, (x.shape[2:], weight.shape, layer.given, fast))
        return out.squeeze(0) if single else out
