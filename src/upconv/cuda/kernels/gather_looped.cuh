// Many steps: a loop over stretches of some taps of a block.
#include "gather_multiply.cuh"

// C::taps_unrolled taps from `entry` on, in one product each; `StretchOf<C, 2>` has IEEE's three.
template <class C, int PARTS>
struct StretchOf : StepOf<C> {
using G = GatherWork<C>;
using S = StepOf<C>;
static __device__ __forceinline__ void multiply(typename S::Sums& acc, typename S::Sums&, typename S::Weights& weights, const typename S::Pixels& pixels, int entry, int lane) {
  u32 a[C::fragment_sets][4];
  if constexpr (C::wgmma) weights.load(a[0], 0);
  const int* taps = TAP_ROW<C>.at + __shfl_sync(0xffffffffu, entry, 0);
#pragma unroll
  for (int i = 0; i < G::LONGEST_STRETCH; i++) S::step(acc, a, weights, pixels, taps[i / G::STEPS_PER_TAP], i, G::LONGEST_STRETCH, lane);
  weights.end_stretch(G::LONGEST_STRETCH);
}
};

// The products of IEEE's parts. Tensor cores truncate as they add, by an error in proportion to the sum: so all corrections of a
// stretch, which are smaller by 2^-11, come before the first product of high parts. Low parts of weights take C::fragment_sets sets
// of registers in turn, high ones keep theirs to the end.
template <class C>
struct StretchOf<C, 2> : StepOf<C> {
using G = GatherWork<C>;
using S = StepOf<C>;
static constexpr int STEPS = C::taps_unrolled * G::K_STEPS;  // of two fragments

// The error also grows with the length of a sum. So sums are kept short, and added with rounding.
static __device__ __forceinline__ void promote(typename S::Sums& acc, typename S::Sums& sum) {
#pragma unroll
  for (int nb = 0; nb < G::NB; nb++)
#pragma unroll
    for (int i = 0; i < 32; i++) {
      sum[nb][i] += acc[nb][i];
      if (!C::wgmma) acc[nb][i] = 0.f;                  // wgmma begins a stretch's sums anew
    }
}

static __device__ __forceinline__ void multiply(typename S::Sums& acc, typename S::Sums& sum, typename S::Weights& weights, const typename S::Pixels& pixels, int entry, int lane) {
  u32 high[STEPS][4], low[C::fragment_sets][4];
  const int* taps = TAP_ROW<C>.at + __shfl_sync(0xffffffffu, entry, 0);
  weights.load(high[0], 0);
  weights.load(low[0], 1);
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    int shift = taps[i / G::K_STEPS], k_step = i % G::K_STEPS;
    u32 done = 0;
    if constexpr (C::wgmma) wgmma_fence();
    if (i == 0) pixels.template multiply<true>(acc, high[0], shift, k_step, 1, lane);
    else pixels.template multiply<false>(acc, high[i], shift, k_step, 1, lane);
    pixels.template multiply<false>(acc, low[i % C::fragment_sets], shift, k_step, 0, lane);
    if constexpr (C::wgmma) {
      wgmma_commit();
      done = weights.in_hand();
    }
    if (i + 1 < STEPS) {
      weights.load(high[i + 1], 2 * i + 2);
      weights.load(low[(i + 1) % C::fragment_sets], 2 * i + 3);
    }
    if constexpr (C::wgmma) {
      if (i + 1 < STEPS) wgmma_wait<1>();
      if (!C::resident && (i + 1 == STEPS || (2 * i + 2) % C::w_stage == 0)) S::give_back(done, lane);
    }
  }
  if constexpr (C::wgmma) wgmma_fence();
#pragma unroll
  for (int i = 0; i < STEPS; i++) pixels.template multiply<false>(acc, high[i], taps[i / G::K_STEPS], i % G::K_STEPS, 0, lane);
  if constexpr (C::wgmma) {
    wgmma_commit();
    wgmma_wait<0>();
  }
  weights.end_stretch(2 * STEPS);
  promote(acc, sum);
}
};

template <class C, int PARTS>
struct ChunkOf<C, LOOPED, PARTS> : StepOf<C> {
using G = GatherWork<C>;
using S = StepOf<C>;
using Sums = float[G::MB][G::NB][32];
static_assert(PARTS == 1 || !C::wgmma || C::resident || C::w_stage % 2 == 0, "a stage has both parts of a step's weights");

static __device__ __forceinline__ void multiply(int variant, Sums& acc, Sums& sum, typename S::Weights& weights, const typename S::Pixels& pixels, int lane) {
#pragma unroll
  for (int b = 0; b < G::MB; b++) {
    int e = G::first_entry(variant, b), last = G::end_entry(variant, b);
#pragma unroll 1
    for (; e + C::taps_unrolled <= last; e += C::taps_unrolled) StretchOf<C, PARTS>::multiply(acc[b], sum[b], weights, pixels, e, lane);
  }
}
};
