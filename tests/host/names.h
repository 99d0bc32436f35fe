// CUDA's names that the kernels' headers mention and a program has no use for: none of them is called. Those of PTX are in declared.h,
// which the tests make of ptx.cuh and wgmma.cuh.
#pragma once
#ifndef __host__
#define __host__
#endif
#ifndef __constant__
#define __constant__
#endif
#ifndef __global__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#endif
#ifndef OPAQUE
#define OPAQUE(v)
#endif
#ifndef HAS_BLOCKS  // a program's own
struct Dim { u32 x; };
static Dim blockIdx, gridDim;
#endif
#ifndef HAS_THREADS
static struct { u32 x; } threadIdx;
#endif
unsigned __float_as_uint(float v);
float __uint_as_float(unsigned u);
void __syncthreads();
void __syncwarp();
void __threadfence();
unsigned __ballot_sync(unsigned, bool vote);
int __ffs(unsigned v);
u32 atomicAdd(u32* at, u32 by);
template <class V> V __shfl_sync(unsigned, V v, int lane);
template <class V> V __shfl_xor_sync(unsigned, V v, int mask);
template <class V> V __ldg(const V* from);
struct TensorMap;
template <int N> struct WgmmaOf;
template <int P> void mma_of(float* d, const u32 (&a)[4], u32 b0, u32 b1);
#include "declared.h"
