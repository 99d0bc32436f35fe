// Packing weights into the order in which a kernel reads them, and bringing them to shared memory.
#include "number.cuh"

constexpr int PACK_THREADS = 256;

// A weight as precision P multiplies it, in the low bits.
// [16 bits] Weights may be float32, rounded on their way.
template <int P>
__device__ __forceinline__ u32 operand(u16 v) { return v; }
template <int P>
__device__ __forceinline__ u32 operand(float v) {
  if constexpr (P < FP16) return to_tf32(v);
  else return NumberOf<P>::bits(v);
}

// 16 bytes of neighbouring operands.
__device__ __forceinline__ void write_operands(char* to, const u32 (&v)[4]) { *(uint4*)to = make_uint4(v[0], v[1], v[2], v[3]); }
__device__ __forceinline__ void write_operands(char* to, const u32 (&v)[8]) {
  *(uint4*)to = make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
}

// An element of a weight (first, second, kernel), by its indices and its tap, which counts through all axes; or none, a zero.
// [IEEE] `low`: what TF32 leaves of it.
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
      if constexpr (K::C::precision == IEEE)
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

// The same of float32 weights of a 16-bit kernel, and of a bias, if there is one, as autocast leaves them.
template <class K>
__global__ void __launch_bounds__(PACK_THREADS)
pack_float(const float* __restrict__ weight, char* __restrict__ packed, int tap_step,
           const float* __restrict__ bias, typename K::Number::Type* __restrict__ packed_bias) {
  if (bias && blockIdx.x == 0)
    for (int i = threadIdx.x; i < K::C::cout; i += PACK_THREADS) packed_bias[i] = K::Number::bits(bias[i]);
  K::pack_weights(weight, packed, tap_step);
}

// One thread: packed weights to shared memory, whose barrier expects their bytes, in pieces that a copy may have.
__device__ __forceinline__ void copy_packed(u32 to, const char* packed, int bytes, u32 barrier) {
  constexpr int PIECE = 16384;
#pragma unroll 1
  for (int at = 0; at < bytes; at += PIECE)
    copy_bulk(to + at, packed + at, bytes - at < PIECE ? bytes - at : PIECE, barrier);
}
