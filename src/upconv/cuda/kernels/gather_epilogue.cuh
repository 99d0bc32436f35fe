// Sums to memory: what all ways to store share.
// [library] The ways are gather_store_rows.cuh, gather_store_pixels.cuh, gather_store_phases.cuh and gather_store_boxes.cuh;
// gather_fill.cuh stores outputs without taps.
#include "gather_columns.cuh"

// `Epilogue<C>::store` stores a consumer's sums of a tile, by way of BUFFER_BYTES of shared memory for each warp. Results are a `Result`: a pointer or
// a tensor map.
template <class C, int = C::store>
struct Epilogue;

// A warp holds 16 rows of M. They pass through a shared buffer, so that memory is written in whole lines: NCHW 8 rows of a run of
// RUN x C::w_subs consecutive outputs, through a buffer of the warp.
// [channels_last] ROUND pixels of C::rows_per_sub channels, through a buffer of all warps that hold these.
template <class C>
struct Runs : Columns<C> {
using G = GatherWork<C>;
using P = Columns<C>;
using Number = typename G::Number;
static constexpr bool TALL = C::sub_h == 8;             // subtiles are 8 x 8
static constexpr int GROUPS = C::run_groups;
static constexpr int RUN = GROUPS * 8;
static constexpr int SUBTILES = TALL ? GROUPS : GROUPS / 8;  // neighbours along W that a run crosses
static constexpr int OF_SUBTILE = TALL ? 8 : 1;  // runs of a subtile
static constexpr int COUNT = G::NB / SUBTILES;          // sets of subtiles that runs cross
static constexpr int ROUND = 64 / RUN * RUN;            // channels-last: pixels that pass through at once, in whole runs: of one row or, TALL, of several

// Group k of run i of subtiles first_of(r) ...: which subtile, and which of its groups of 8 columns.
static __device__ __forceinline__ constexpr int first_of(int r) { return r * SUBTILES; }  // subtile of a run's first group
static __device__ __forceinline__ constexpr int nb_of(int r, int, int k) { return TALL ? first_of(r) + k : first_of(r) + k / 8; }
static __device__ __forceinline__ constexpr int j_of(int, int i, int k) { return TALL ? i : k % 8; }

// Whether another block of a cluster stores run i of these subtiles: of rounds (NCHW: runs) each has its turn.
static __device__ __forceinline__ bool others(int r, int i) {
  if constexpr (G::SHARES > 1) return (r * OF_SUBTILE + i) / (C::channels_last ? ROUND / RUN : 1) % G::SHARES != G::rank();
  else return false;
}

// The block of a W sub-position, -1: it has no taps. Up to 16 are one number, of four bits each: a table's entries are constants only
// after unrolling, and until then the compiler keeps all sums in memory.
static __device__ __forceinline__ constexpr u64 packed_blocks() {
  u64 packed = 0;
  for (int u = 0; u < C::w_subs; u++) packed |= (u64)(C::blocks_of_w[u] + 1) << 4 * u;
  return packed;
}
static_assert(G::MB < 15, "four bits name a block");
static __device__ __forceinline__ constexpr int block_of_w(int u) {
  if constexpr (C::w_subs <= 16) {
    constexpr u64 packed = packed_blocks();
    return (int)(packed >> 4 * u & 15) - 1;
  } else {
    constexpr auto blocks = table_of<signed char>(C::blocks_of_w);
    return blocks[u];
  }
}
// Of W sub-position u the sum `e` of a subtile; where there are no taps, `without`.
static __device__ __forceinline__ float sum_of(const float (&acc)[G::MB][G::NB][32], int u, int nb, int e, float without) {
  if constexpr (C::w_subs == 1 && C::blocks_of_w[0] == 0) return acc[0][nb][e];
  else return block_of_w(u) < 0 ? without : acc[block_of_w(u) < 0 ? 0 : block_of_w(u)][nb][e];
}
};

// A warp's 16 rows of M are output channels of one (d, h) sub-position (C::rows_per_sub is 64, 32 or 16).
struct Slab {
  int cout, couts;                                      // first channel in the group, and how many of the 16 exist
  int od, oh;                                           // offsets of the sub-position
};

template <class C> __constant__ const auto SUB_D = table_of<short>(C::subs_d);  // [variant][subs]: output offset of an M-row's sub-position
template <class C> __constant__ const auto SUB_H = table_of<short>(C::subs_h);
template <class C> __constant__ const auto U_W = table_of<short>(C::subs_w);    // [variant]: first W sub-position

template <class C>
__device__ __forceinline__ Slab slab_of(const typename GatherWork<C>::Tile& t, int cout_block, int warp) {
  Slab slab;
  int sub = warp * 16 / C::rows_per_sub;
  slab.cout = cout_block * C::rows_per_sub + warp * 16 % C::rows_per_sub;
  slab.couts = C::cout_g - slab.cout < 16 ? C::cout_g - slab.cout : 16;
  slab.od = SUB_D<C>[t.variant * C::subs + sub];
  slab.oh = SUB_H<C>[t.variant * C::subs + sub];
  return slab;
}

// The biases of a thread's rows g and g + 8 of a slab, or zeros; `first` is the slab's first channel.
template <class C>
__device__ __forceinline__ void load_bias(float (&b)[2], const typename GatherWork<C>::Number::Type* bias, const Slab& slab, int first, int g) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    b[h] = 0.f;
    if (bias && g + 8 * h < slab.couts) b[h] = GatherWork<C>::Number::value(bias[first + g + 8 * h]);
  }
}

// Channels-last: warps that hold the channels of a sub-position share a buffer. With a buffer for each a store has
// 32 bytes of a pixel in half precision, and lanes meet the same banks.
template <class C>
struct Team {
using T = PixelTile<C>;
static constexpr int WARPS = C::rows_per_sub / 16;
static constexpr int PIXEL_UNITS = C::rows_per_sub * T::ELEMENT / 16;  // of a pixel in the buffer
static constexpr int PIXELS_AT_ONCE = WARPS * 32 / PIXEL_UNITS;  // that a team stores: 32 bytes a thread of its 16 rows

// A thread's unit of 16 bytes of a pixel, as much of it as there are channels.
static __device__ __forceinline__ void store_unit(char* to, const u32 (&v)[4], int couts, bool ok) {
  if constexpr (C::aligned_cout) {
    store_global_128_if(to, v, ok);
  } else {
#pragma unroll
    for (int e = 0; e < T::VEC; e++) {
      if constexpr (T::ELEMENT == 4) store_global_if(to + e * 4, v[e], ok && e < couts);
      else store_global_16_if(to + e * 2, v[e / 2] >> e % 2 * 16, ok && e < couts);
    }
  }
}
};

// A thread's biases, on all of its sums.
template <class C>
__device__ __forceinline__ void add_bias(float (&acc)[GatherWork<C>::MB][GatherWork<C>::NB][32], const float (&b)[2]) {
#pragma unroll
  for (int m = 0; m < GatherWork<C>::MB; m++)
#pragma unroll
    for (int nb = 0; nb < GatherWork<C>::NB; nb++)
#pragma unroll
      for (int e = 0; e < 32; e++) acc[m][nb][e] += b[e >> 1 & 1];
}
