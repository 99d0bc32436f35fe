// Few steps: all blocks of a chunk are one stretch, without a loop.
#include "gather_multiply.cuh"

template <class C> __constant__ const auto STRETCH_OF = table_of<int>(C::stretches_of);   // [variant]: which of those that serve several
template <class C> __constant__ const auto VARIANT_ROW = table_of<int>(C::variant_rows);  // [variant]: shift of its taps against the first of these

template <class C>
struct ChunkOf<C, STRAIGHT, 1> : StepOf<C> {
using G = GatherWork<C>;
using S = StepOf<C>;
using Weights = typename S::Weights;
using Pixels = typename S::Pixels;
using Sums = float[G::MB][G::NB][32];
static constexpr int STRIDE = G::MB + 1;                // of a variant's entries

static __device__ __forceinline__ constexpr int steps_of(int variant) {
  return (C::entries[variant * STRIDE + G::MB] - C::entries[variant * STRIDE]) * G::STEPS_PER_TAP;
}
static __device__ __forceinline__ constexpr int block_of(int variant, int entry) {
  int b = 0;
  while (entry >= C::entries[variant * STRIDE + b + 1]) b++;
  return b;
}

template <int VARIANT, int STEP>
static __device__ __forceinline__ void multiply_one(Sums& acc, typename S::Sets& a, Weights& weights, const Pixels& pixels, int lane) {
  constexpr int first = C::entries[VARIANT * STRIDE], entry = first + STEP / G::STEPS_PER_TAP, block = block_of(VARIANT, entry), row = C::tap_rows[entry];
  S::step(acc[block], a, weights, pixels, row, STEP, steps_of(VARIANT), lane);
}

// Not by recursion, each level of which the compiler works through with all that are in it. The machine code is the same.
template <int VARIANT, int... STEPS>
static __device__ __forceinline__ void multiply_from(Sequence<STEPS...>, Sums& acc, typename S::Sets& a, Weights& weights, const Pixels& pixels, int lane) {
  (multiply_one<VARIANT, STEPS>(acc, a, weights, pixels, lane), ...);
}

// Variants share a stretch where their taps lie alike, as the phases of a kernel do whose sizes are multiples of its strides. Less
// is then compiled, and fetched.
template <int STRETCH>
static __device__ __forceinline__ void multiply_stretch(int variant, Sums& acc, Weights& weights, const Pixels& pixels, int lane) {
  constexpr int first = C::first_of_stretches[STRETCH];  // variant
  int stretch = variant;
  if constexpr (C::stretches < C::variants) stretch = STRETCH_OF<C>[variant];
  if (C::stretches == 1 || stretch == STRETCH) {
    u32 a[C::fragment_sets][4];
    const typename Counting<steps_of(first)>::type steps;
    weights.load(a[0], 0);
    if constexpr (C::stretches < C::variants) multiply_from<first>(steps, acc, a, weights, pixels.shifted(VARIANT_ROW<C>[variant]), lane);
    else multiply_from<first>(steps, acc, a, weights, pixels, lane);
  } else if constexpr (STRETCH + 1 < C::stretches) {
    multiply_stretch<STRETCH + 1>(variant, acc, weights, pixels, lane);
  }
}

static __device__ __forceinline__ void multiply(int variant, Sums& acc, Sums&, Weights& weights, const Pixels& pixels, int lane) {
  multiply_stretch<0>(variant, acc, weights, pixels, lane);
}
};
