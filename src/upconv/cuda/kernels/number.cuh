// How a kernel's numbers are multiplied and stored, by its precision: their type, and of float32 results what is stored.
#include "ptx.cuh"

enum Precision { TF32, IEEE, FP16, BF16, FP64 };

template <int P>
struct NumberOf {                                       // float16 and bfloat16
  using Type = u16;
  using Bits = u16;                                     // as an integer
  static constexpr int SIZE = 2;
  static __device__ __forceinline__ u32 bits(float v) { return P == FP16 ? half_bits(v) : bfloat_bits(v); }
  static __device__ __forceinline__ float value(u32 v) { return P == FP16 ? half_value(v) : bfloat_value(v); }
  static __device__ __forceinline__ u32 pair(float low, float high) { return P == FP16 ? half_pair(low, high) : bfloat_pair(low, high); }
};
struct Float32 {
  using Type = float;
  using Bits = u32;
  static constexpr int SIZE = 4;
  static __device__ __forceinline__ u32 bits(float v) { return __float_as_uint(v); }
  static __device__ __forceinline__ float value(float v) { return v; }
};
template <> struct NumberOf<TF32> : Float32 {};
template <> struct NumberOf<IEEE> : Float32 {};

