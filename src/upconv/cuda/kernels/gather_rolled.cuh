// More steps: a loop of rounds of C::taps_unrolled taps, which take less time to compile than straight code. In a round all sets of fragments
// come round: so ptxas can see that a set is free again, and the tensor cores do not drain between rounds. Rounds are alike but for where their
// pixels begin. That, and a round's first fragment, are asked for in the round before: tables of taps read in each would be slower.
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
static __device__ __forceinline__ void multiply_one(Sums& acc, typename S::Sets& a, Weights& weights, const Pixels& pixels, int left, u32 behind, int lane) {
  constexpr int shift = C::round_shifts[STEP / G::STEPS_PER_TAP];
  S::step(acc[0], a, weights, pixels, shift, STEP, G::LONGEST_STRETCH, lane, left);
  if (BY_PLANES && STEP == 0 && behind) S::give_back(behind, lane);
}
template <int... STEPS>
static __device__ __forceinline__ void multiply_round(Sequence<STEPS...>, Sums& acc, typename S::Sets& a, Weights& weights, const Pixels& pixels, int left, u32 behind, int lane) {
  (multiply_one<STEPS>(acc, a, weights, pixels, left, behind, lane), ...);
}

static __device__ __forceinline__ void multiply(int variant, Sums& acc, Sums&, Weights& weights, const Pixels& pixels, int lane) {
  u32 a[C::fragment_sets][4];
  u32 full = pixels.full, empty = pixels.empty, behind = 0;  // `behind`: the plane that the last step may still read
  int entry = G::first_entry(variant), left = G::entries_of(variant) / C::taps_unrolled, begin = TAP_ROW<C>[entry];
  weights.load(a[0], 0);
#pragma unroll 1
  while (left > 0) {
    Pixels shifted = pixels;
    shifted.start = __shfl_sync(0xffffffffu, pixels.start + begin * (G::ROW_BYTES / 16), 0);
    entry += C::taps_unrolled;
    if (--left) begin = TAP_ROW<C>[entry];
    if constexpr (BY_PLANES) barrier_wait(full, pixels.parity);
    multiply_round(typename Counting<G::LONGEST_STRETCH>::type(), acc, a, weights, shifted, left, behind, lane);
    behind = empty, full += 8, empty += 8;              // the last plane is the chunk's to give back
  }
  wgmma_wait<0>();
}
};
