// A chunk's matrix instructions: what all ways to go through its steps share.
// [library] The ways are gather_straight.cuh and gather_rolled.cuh.
#include "gather_columns.cuh"
#include "gather_weights.cuh"

// 0 to N - 1.
template <int...>
struct Sequence {};
template <int N, int... BEHIND>
struct Counting : Counting<N - 1, N - 1, BEHIND...> {};
template <int... ALL>
struct Counting<0, ALL...> { typedef Sequence<ALL...> type; };

// `ChunkOf<C>::multiply` adds a chunk to the sums: products to `acc`; those that leave the tensor cores before they are long, to `sum`.
template <class C, int = C::steps, int PARTS = PixelTile<C>::PARTS>
struct ChunkOf;

template <class C>
struct StepOf {
using G = GatherWork<C>;
using Weights = Fragments<C>;
using Pixels = Columns<C>;
using Sums = float[G::NB][32];
using Sets = u32[C::fragment_sets][4];

// Step i of a stretch of `steps`. Fragments take C::fragment_sets sets of registers in turn: one is multiplied by, the one before may
// still be, the next one is loaded. At the end of a stretch the pipeline drains, since in a loop ptxas cannot see that a set is
// free again and serialises every wgmma, C7513.
// [queued] Where all sets come round it can; `left` rounds of the chunk follow.
static __device__ __forceinline__ void step(Sums& acc, Sets& a, Weights& weights, const Pixels& pixels, int shift, int i, int steps, int lane, int left = 0) {
  if constexpr (C::wgmma) {
    wgmma_fence();
    pixels.template multiply<false>(acc, a[i % C::fragment_sets], shift, i % G::K_STEPS, 0, lane);
    wgmma_commit();
    u32 done = weights.done;
    if (i + 1 < steps) {
      weights.load(a[(i + 1) % C::fragment_sets], i + 1);
      wgmma_wait<1>();
    } else if (C::steps == ROLLED) {
      if (!C::queued) wgmma_wait<0>();
      if (left) weights.load(a[0], 0);
      if (C::queued) wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    if (!C::resident && (i + 1 == steps || (i + 1) % C::w_stage == 0)) give_back(done, lane);
  } else {
    weights.load(a[i % C::fragment_sets], i);
    pixels.template multiply<false>(acc, a[i % C::fragment_sets], shift, i % G::K_STEPS, 0, lane);
  }
}
};
