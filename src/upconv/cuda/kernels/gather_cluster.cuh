// Sums of a cluster: its blocks have multiplied a share of the chunks each. What a block does not store of its sums it leaves in its shared memory, where
// the pixels and weights were; what it stores it adds up from all, its own first, the others by their rank: always in one order, so
// results are equal to the bit.
#include "gather_epilogue.cuh"

template <class C>
struct ClusterSums : Runs<C> {
using G = GatherWork<C>;
using R = Runs<C>;
using Sums = float[G::MB][G::NB][32];
static constexpr int BYTES = G::MB * G::NB * 8 * G::CONSUMER_THREADS * 16;
static constexpr int OTHERS = G::SHARES - 1;
static constexpr int BATCH = G::SHARES == 2 ? 8 : G::SHARES <= 4 ? 2 : 1;  // groups of 8 columns whose loads are on their way at a time

// Where a thread leaves the four sums j of a block and subtile, from its first on.
static __device__ __forceinline__ constexpr u32 sums_at(int block, int nb, int j) { return ((block * G::NB + nb) * 8 + j) * (G::CONSUMER_THREADS * 16); }

// A block's sums of groups `first` ... of a run, BATCH of them.
static __device__ __forceinline__ void add_others(Sums& acc, u32 sums, int r, int i, int b, int first) {
  float more[OTHERS][BATCH][4];
#pragma unroll
  for (int other = 0; other < OTHERS; other++)
#pragma unroll
    for (int k = first; k < first + BATCH && k < R::GROUPS; k++)
      load_cluster_128(more[other][k - first], sums + sums_at(b, R::nb_of(r, i, k), R::j_of(r, i, k)), other + (other >= G::rank()));
#pragma unroll
  for (int other = 0; other < OTHERS; other++)
#pragma unroll
    for (int k = first; k < first + BATCH && k < R::GROUPS; k++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[b][R::nb_of(r, i, k)][4 * R::j_of(r, i, k) + e] += more[other][k - first][e];
}

static __device__ __forceinline__ void add_up(Sums& acc, u32 sums, int wg, int thread) {
  sums += (wg * 128 + thread) * 16;
  named_sync<11, G::CONSUMER_THREADS>();                // neither consumer multiplies any more: all that was loaded was used
#pragma unroll
  for (int r = 0; r < R::COUNT; r++)
#pragma unroll
    for (int i = 0; i < R::OF_SUBTILE; i++)
      if (R::others(r, i))
#pragma unroll
        for (int b = 0; b < G::MB; b++)
#pragma unroll
          for (int k = 0; k < R::GROUPS; k++) {
            const int nb = R::nb_of(r, i, k), j = R::j_of(r, i, k);
            float* v = acc[b][nb] + 4 * j;
            store_shared_f32x4(sums + sums_at(b, nb, j), v[0], v[1], v[2], v[3]);
          }
  cluster_sync();                                       // all have left theirs
#pragma unroll
  for (int r = 0; r < R::COUNT; r++)
#pragma unroll
    for (int i = 0; i < R::OF_SUBTILE; i++)
      if (!R::others(r, i))
#pragma unroll
        for (int b = 0; b < G::MB; b++)
#pragma unroll
          for (int first = 0; first < R::GROUPS; first += BATCH) add_others(acc, sums, r, i, b, first);
  cluster_sync();                                       // none reads another's any more
}
};
