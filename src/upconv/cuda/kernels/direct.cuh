// What the kernels for CUDA cores share: storage type T and accumulator Acc. DTYPE: 0 float32, 1 bfloat16, 2 float16, 3 float64.
#pragma once
#include "ptx.cuh"

#if DTYPE == 0
typedef float T;
typedef float Acc;
#elif DTYPE == 1 || DTYPE == 2
typedef u16 T;
typedef float Acc;
#else
typedef double T;
typedef double Acc;
#endif

typedef long long i64;

__device__ __forceinline__ Acc load_value(T v) {
#if DTYPE == 1
    return bfloat_value(v);
#elif DTYPE == 2
    return half_value(v);
#else
    return v;
#endif
}

__device__ __forceinline__ T store_value(Acc v) {
#if DTYPE == 1
    return bfloat_bits(v);
#elif DTYPE == 2
    return half_bits(v);
#else
    return v;
#endif
}

__device__ __forceinline__ Acc multiply_add(Acc a, Acc b, Acc c) {
#if DTYPE == 3
    return fma(a, b, c);
#else
    return fmaf(a, b, c);
#endif
}

constexpr int VEC = 16 / (int)sizeof(Acc);  // accumulators in 16 bytes
struct alignas(16) Pack {
    Acc v[VEC];
};

__device__ constexpr int floor_mod(int a, int b) { return (a % b + b) % b; }
