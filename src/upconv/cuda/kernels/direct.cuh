// What the kernels for CUDA cores share: storage type T and accumulator Acc. DTYPE: 0 float32, 1 bfloat16, 2 float16, 3 float64.
#pragma once

#if DTYPE == 0
typedef float T;
typedef float Acc;
#elif DTYPE == 1 || DTYPE == 2
typedef unsigned short T;
typedef float Acc;
#else
typedef double T;
typedef double Acc;
#endif

typedef long long i64;
typedef unsigned int u32;

__device__ __forceinline__ Acc load_value(T v) {
#if DTYPE == 1
    return __uint_as_float((u32)v << 16);
#elif DTYPE == 2
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
#else
    return v;
#endif
}

__device__ __forceinline__ T store_value(Acc v) {
#if DTYPE == 1
    T r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
#elif DTYPE == 2
    T r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
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
