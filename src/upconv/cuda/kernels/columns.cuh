// What kernels share whose columns of N are output channels (sweep, subpixel, pairs, implicit, phases), or whose rows of M are (joined):
// sums, and the operands that descriptors are of.
#include "packing.cuh"
#include "wgmma.cuh"
#include "ring.cuh"

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
