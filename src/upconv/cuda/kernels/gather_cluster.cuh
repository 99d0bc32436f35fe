#if CLUSTER > 1
// --- sums of a cluster ------------------------------------------------------------------------------------------------
// Its blocks have multiplied a share of the chunks each. What a block does not store of its sums it leaves in its shared memory, where
// the pixels and weights were; what it stores it adds up from all, its own first, the others by their rank: always in one order, so
// results are equal to the bit.
#define SUMS_BYTES (MB * NB * 8 * CONSUMER_THREADS * 16)
#if PROMOTE
#define ALL_SUMS sum
#else
#define ALL_SUMS acc
#endif

// Where a thread leaves the four sums j of a block and subtile, from its first on.
__device__ __forceinline__ constexpr u32 sums_at(int block, int nb, int j) { return ((block * NB + nb) * 8 + j) * (CONSUMER_THREADS * 16); }

__device__ __forceinline__ void add_up(float (&acc)[MB][NB][32], u32 sums, int wg, int thread) {
  constexpr int BATCH = CLUSTER == 2 ? 8 : CLUSTER <= 4 ? 2 : 1;  // groups of 8 columns whose loads are on their way at a time
  sums += (wg * 128 + thread) * 16;
  named_sync<11, CONSUMER_THREADS>();                   // neither consumer multiplies any more: all that was loaded was used
#pragma unroll
  for (int r = 0; r < NB / RUN_SUBTILES; r++)
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i++)
      if (OTHERS(r, i))
#pragma unroll
        for (int b = 0; b < MB; b++)
#pragma unroll
          for (int k = 0; k < RUN_GROUPS; k++) {
            const int nb = RUN_NB(r, i, k), j = RUN_J(r, i, k);
            float* v = acc[b][nb] + 4 * j;
            store_shared_f32x4(sums + sums_at(b, nb, j), v[0], v[1], v[2], v[3]);
          }
  cluster_sync();                                       // all have left theirs
#pragma unroll
  for (int r = 0; r < NB / RUN_SUBTILES; r++)
#pragma unroll
    for (int i = 0; i < RUNS_OF_SUBTILE; i++)
      if (!OTHERS(r, i))
#pragma unroll
        for (int b = 0; b < MB; b++)
#pragma unroll
          for (int first = 0; first < RUN_GROUPS; first += BATCH) {
            float more[CLUSTER - 1][BATCH][4];
#pragma unroll
            for (int other = 0; other < CLUSTER - 1; other++)
#pragma unroll
              for (int k = first; k < first + BATCH && k < RUN_GROUPS; k++)
                load_cluster_128(more[other][k - first], sums + sums_at(b, RUN_NB(r, i, k), RUN_J(r, i, k)), other + (other >= RANK));
#pragma unroll
            for (int other = 0; other < CLUSTER - 1; other++)
#pragma unroll
              for (int k = first; k < first + BATCH && k < RUN_GROUPS; k++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[b][RUN_NB(r, i, k)][4 * RUN_J(r, i, k) + e] += more[other][k - first][e];
          }
  cluster_sync();                                       // none reads another's any more
}
#endif
