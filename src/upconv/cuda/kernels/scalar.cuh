// How the kernels for CUDA cores store and sum numbers, by their precision P (number.cuh): `ScalarOf<P>`.
#include "number.cuh"

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
    static __device__ __forceinline__ float value(u16 v) { return NumberOf<P>::value(v); }
    static __device__ __forceinline__ u16 stored(float v) { return NumberOf<P>::bits(v); }
};
template <class V>
struct Unchanged : ScalarTypes<V, V> {
    static __device__ __forceinline__ V value(V v) { return v; }
    static __device__ __forceinline__ V stored(V v) { return v; }
};
template <> struct ScalarOf<IEEE> : Unchanged<float> {};
template <> struct ScalarOf<FP64> : Unchanged<double> {};

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

__device__ constexpr int floor_mod(int a, int b) { return (a % b + b) % b; }
