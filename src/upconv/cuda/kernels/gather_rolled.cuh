// More steps: a loop of rounds of C::taps_unrolled taps of a block, which take less time to compile than straight code.
#include "gather_multiply.cuh"

// C::queued: in a round all sets of fragments come round, so ptxas can see that a set is free again, and the tensor cores do not drain between
// rounds. Such rounds are alike but for where their pixels begin. That, and a round's first fragment, are asked for in the round before. Other
// rounds drain, and read tables of taps, which is slower.
template <class C>
struct ChunkOf<C, ROLLED, 1> : StepOf<C> {
using G = GatherWork<C>;
using S = StepOf<C>;
using Weights = typename S::Weights;
using Pixels = typename S::Pixels;
using Sums = float[G::MB][G::NB][32];

// `begin`: of C::queued rounds the shift of the first tap, else its entry.
static __device__ __forceinline__ int begin_of(int entry) { return C::queued ? TAP_ROW<C>[entry] : entry; }
template <int TAP>
static __device__ __forceinline__ int shift_of(int begin) {
  if constexpr (C::queued) {
    constexpr int SHIFT = C::round_shifts[TAP];         // nvcc has no array of constants in device code
    return begin + SHIFT;
  } else {
    return TAP_ROW<C>[begin + TAP];
  }
}

template <int STEP>
static __device__ __forceinline__ void multiply_one(typename S::Sums& acc, typename S::Sets& a, Weights& weights, const Pixels& pixels, int begin, int left, int lane) {
  S::step(acc, a, weights, pixels, shift_of<STEP / G::STEPS_PER_TAP>(begin), STEP, G::LONGEST_STRETCH, lane, left);
}
template <int... STEPS>
static __device__ __forceinline__ void multiply_round(Sequence<STEPS...>, typename S::Sums& acc, typename S::Sets& a, Weights& weights, const Pixels& pixels, int begin, int left, int lane) {
  (multiply_one<STEPS>(acc, a, weights, pixels, begin, left, lane), ...);
}

static __device__ __forceinline__ void multiply(int variant, Sums& acc, Sums&, Weights& weights, const Pixels& pixels, int lane) {
#pragma unroll
  for (int b = 0; b < G::MB; b++) {
    u32 a[C::fragment_sets][4];
    int entry = G::first_entry(variant, b), left = (G::end_entry(variant, b) - entry) / C::taps_unrolled;
    if (G::MB > 1 && left == 0) continue;
    int next = begin_of(entry);
    if constexpr (C::wgmma) weights.load(a[0], 0);
#pragma unroll 1
    while (left > 0) {
      int begin = __shfl_sync(0xffffffffu, next, 0);
      entry += C::taps_unrolled;
      if (--left) next = begin_of(entry);
      multiply_round(typename Counting<G::LONGEST_STRETCH>::type(), acc[b], a, weights, pixels, begin, left, lane);
    }
    if constexpr (C::wgmma) wgmma_wait<0>();
  }
}
};

// The products of IEEE's parts. Tensor cores truncate as they add, by an error in proportion to the sum: so all corrections of a
// round, which are smaller by 2^-11, come before the first product of high parts. Low parts of weights take C::fragment_sets sets
// of registers in turn, high ones keep theirs to the end.
template <class C>
struct ChunkOf<C, ROLLED, 2> : StepOf<C> {
using G = GatherWork<C>;
using S = StepOf<C>;
using Weights = typename S::Weights;
using Pixels = typename S::Pixels;
using Sums = float[G::MB][G::NB][32];
static constexpr int STEPS = G::LONGEST_STRETCH / 2;              // of two fragments
static_assert(!C::wgmma || C::w_stage % 2 == 0, "a stage has both parts of a step's weights");

// The error also grows with the length of a sum. So sums are kept short, and added with rounding.
static __device__ __forceinline__ void promote(typename S::Sums& acc, typename S::Sums& sum) {
#pragma unroll
  for (int nb = 0; nb < G::NB; nb++)
#pragma unroll
    for (int i = 0; i < 32; i++) {
      sum[nb][i] += acc[nb][i];
      if (!C::wgmma) acc[nb][i] = 0.f;                  // wgmma begins a round's sums anew
    }
}

static __device__ __forceinline__ void multiply_round(typename S::Sums& acc, Weights& weights, const Pixels& pixels, int entry, int lane) {
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
      done = weights.done;
    }
    if (i + 1 < STEPS) {
      weights.load(high[i + 1], 2 * i + 2);
      weights.load(low[(i + 1) % C::fragment_sets], 2 * i + 3);
    }
    if constexpr (C::wgmma) {
      if (i + 1 < STEPS) wgmma_wait<1>();
      if (!C::resident && (i + 1 == STEPS || (2 * i + 2) % C::w_stage == 0)) give_back(done, lane);
    }
  }
  if constexpr (C::wgmma) wgmma_fence();
#pragma unroll
  for (int i = 0; i < STEPS; i++) pixels.template multiply<false>(acc, high[i], taps[i / G::K_STEPS], i % G::K_STEPS, 0, lane);
  if constexpr (C::wgmma) {
    wgmma_commit();
    wgmma_wait<0>();
  }
}

static __device__ __forceinline__ void multiply(int variant, Sums& acc, Sums& sum, Weights& weights, const Pixels& pixels, int lane) {
#pragma unroll
  for (int b = 0; b < G::MB; b++) {
    int end = G::end_entry(variant, b);
#pragma unroll 1
    for (int entry = G::first_entry(variant, b); entry < end; entry += C::taps_unrolled) {
      multiply_round(acc[b], weights, pixels, entry, lane);
      promote(acc[b], sum[b]);
    }
  }
}
};
