// More steps: a loop of rounds, in each of which all sets of fragments come round: so ptxas can see that a set is free again, and the tensor
// cores do not drain between them. Rounds are alike but for where their pixels begin. What a round begins with, its pixels' place
// and its first fragment, is asked for in the one before: tables of taps read in each
// would be slower. Shorter stretches stay straight, which is the fastest.
#include "gather_multiply.cuh"

template <class C>
struct ChunkOf<C, ROLLED, 1> : StepOf<C> {
using G = GatherWork<C>;
using S = StepOf<C>;
using Weights = typename S::Weights;
using Pixels = typename S::Pixels;
using Sums = float[G::MB][G::NB][32];
static constexpr bool BY_PLANES = C::plane_barriers > 1;  // a round is a plane

template <int STEP>
static __device__ __forceinline__ void multiply_one(typename S::Sums& acc, typename S::Sets& a, Weights& weights, const Pixels& pixels, int left, u32& behind, int lane) {
  constexpr int shift = C::round_shifts[STEP / G::STEPS_PER_TAP];
  S::step(acc, a, weights, pixels, shift, STEP, G::LONGEST_STRETCH, lane, left);
  if (BY_PLANES && STEP == 0 && behind) {
    S::give_back(behind, lane);
    behind = 0;
  }
}
template <int... STEPS>
static __device__ __forceinline__ void multiply_round(Sequence<STEPS...>, typename S::Sums& acc, typename S::Sets& a, Weights& weights, const Pixels& pixels, int left, u32& behind, int lane) {
  (multiply_one<STEPS>(acc, a, weights, pixels, left, behind, lane), ...);
}

static __device__ __forceinline__ void multiply(int variant, Sums& acc, Sums&, Weights& weights, const Pixels& pixels, int lane) {
  u32 a[C::fragment_sets][4];
  u32 behind = 0;                                       // the plane that the last step may still read
  int left = G::entries_of(variant) / C::taps_unrolled;
  u32 full = pixels.full, empty = pixels.empty;
  weights.load(a[0], 0);
#pragma unroll
  for (int b = 0; b < G::MB; b++) {
    int entry = G::first_entry(variant, b), last = G::end_entry(variant, b);
    int begin = TAP_ROW<C>[entry];
#pragma unroll 1
    while (entry < last) {
      Pixels shifted = pixels;
      shifted.start = __shfl_sync(0xffffffffu, pixels.start + begin * (G::ROW_BYTES / 16), 0);
      entry += C::taps_unrolled;
      if (entry < last) begin = TAP_ROW<C>[entry];
      if constexpr (BY_PLANES) {
        barrier_wait(full, pixels.parity);
        full += 8;
      }
      multiply_round(typename Counting<G::LONGEST_STRETCH>::type(), acc[b], a, weights, shifted, --left, behind, lane);
      if constexpr (BY_PLANES) {
        behind = left ? empty : 0;                      // the last plane is the chunk's to give back
        empty += 8;
      }
    }
  }
  wgmma_wait<0>();
}
};
