// How sums leave a block of wgrad_wgmma.cu: as a slice for `reduce`; or the blocks that have all splits of a tile between them write the
// weight's gradient from their shared memory. These run at once, and add their sums through global memory in the order of `reduce`, to
// the same bits. A block that has the only split (alone) has nothing to add.
#include "wgrad_multiply.cuh"

// A slice of partial sums, [split][taps][COUT][cin].
template <class T>
struct WgradSlice {
using C = typename T::C;
using M = WgradMultiply<T>;
float* __restrict__ partial;

__device__ __forceinline__ void put(const typename M::Sums& acc, const WgradBlock<T>& block, const typename M::F::Lane& of, int) const {
  const typename T::Work& work = block.work;
  long long slice = (long long)block.split * (T::TAPS * T::COUT * (long long)C::cin);
#pragma unroll
  for (int u = 0; u < T::UNITS; u++) {
    int unit = of.first_unit + u * T::NEXT_UNIT;
    int kd = work.tap_d + unit / (T::SET_UNITS / C::taps_d), kw = work.tap_w + unit % C::taps_w;
    if (unit >= T::SET_UNITS || kd >= C::kernel_d || kw >= C::kernel_w) continue;
#pragma unroll
    for (int i = 0; i < T::OF_UNIT; i++) {
      int th = C::stacked ? i : unit / C::taps_w % C::taps_h, kh = work.tap_h + th;
      if (kh >= C::kernel_h) continue;
      float* to = partial + slice + ((long long)((kd * C::kernel_h + kh) * C::kernel_w + kw) * T::COUT + work.group * C::cout) * C::cin;
#pragma unroll
      for (int nb = 0; nb < T::NB; nb++)
#pragma unroll
        for (int j = 0; j < T::N_WIDTH / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int co = work.co + T::channel_of(of.channel + of.row + T::NEXT_ROWS * h), ci = work.ci + nb * T::N_WIDTH + j * 8 + 2 * of.q;
            if (co >= C::cout) continue;
            wgrad_put_pair<C::cin>(to + (long long)co * C::cin + ci, ci, &acc[u][nb][M::place_of(i) * (T::N_WIDTH / 2) + 4 * j + 2 * h]);
          }
    }
  }
}
};

// =====================================================================================================================
// The weight's gradient
// =====================================================================================================================

// Counters of blocks that run at once: what they have written when they meet is seen by all of them behind it. One thread of each block:
// its sums are there to be read; those of all `count` are. `counters` [arrived, left] are zeros, which the last to leave leaves.
__device__ __forceinline__ void wgrad_arrive(u32* counters) {
  __threadfence();
  atomicAdd(counters, 1);
}
__device__ __forceinline__ void wgrad_wait(u32* counters, u32 count) {
  while (load_acquire(counters) < count) {}
  if (atomicAdd(counters + 1, 1) == count - 1) counters[0] = counters[1] = 0;
}

template <class T>
struct WgradWhole {
using C = typename T::C;
using Number = typename T::Number;
using Bits = typename T::Bits;
using Work = typename T::Work;
using M = WgradMultiply<T>;
using Lane = typename M::F::Lane;
char* out;
long long stride_ci, stride_co, stride_tap;
long long wide;                            // whether it is float32, whatever the operands are
char* partial;                             // SUMS_BYTES of each block, [split][tile]
u32* counters;                             // two of each tile

static constexpr int TILES = T::SETS * T::CO_TILES * T::CI_TILES * C::groups;
static constexpr int QUADS = C::block_co / 4;           // output channels are taken four at a time
static constexpr int BATCH = 8;                         // splits whose loads are on their way at a time
static constexpr int PARTS = C::reduce_rows == 1 ? WGRAD_RUNS : 1;  // ranges of splits that are sums of their own, as the warps of `reduce` have them

// Of a block's [ci][quad] those that it adds and stores, of all taps.
struct Share {
  int first, quads;
  __device__ __forceinline__ int ci(int i) const { return (first + i) / QUADS; }
  __device__ __forceinline__ int co(int i) const { return (first + i) % QUADS * 4; }
  // Rows of ci that it has of quad `q` of a row.
  __device__ __forceinline__ int begin(int q) const { return (first + QUADS - 1 - q) / QUADS; }
  __device__ __forceinline__ int end(int q) const { return (first + quads + QUADS - 1 - q) / QUADS; }
};

__device__ __forceinline__ void put(const typename M::Sums& acc, const WgradBlock<T>& block, const Lane& of, int thread) const {
  named_sync<2, T::CONSUMERS>();           // nobody reads a stage any more
  put_shared(acc, block.base, of);
  Share share = {0, C::block_ci * QUADS};
  if constexpr (!C::alone) {
    const int index = block_index();       // read again, not kept over the loop, where it spills
    const int tile = index % TILES, rank = index / TILES, count = (int)gridDim.x / TILES;
    publish(partial + (long long)index * T::SUMS_BYTES, block.base, counters + 2 * tile, count, thread);
    const int most = (share.quads + count - 1) / count, left = share.quads - rank * most;
    share = {rank * most, left < most ? left : most};
    const char* sums = partial + (long long)tile * T::SUMS_BYTES;
    // Lanes that divide a quad's parts where quads are few; else each thread adds them all.
    if (PARTS > 1 && T::SET_TAPS * most <= T::CONSUMERS / 2) add<PARTS>(sums, count, block.base, share, thread);
    else add<1>(sums, count, block.base, share, thread);
  }
  named_sync<2, T::CONSUMERS>();
  if (stride_co == 1) store_quads(block.work, block.base, share, thread);
  else store_taps(block.work, block.base, share, thread);
}

static __device__ __forceinline__ void put_shared(const typename M::Sums& acc, u32 memory, const Lane& of) {
#pragma unroll
  for (int u = 0; u < T::UNITS; u++) {
    int unit = of.first_unit + u * T::NEXT_UNIT;
    if (unit >= T::SET_UNITS) continue;
#pragma unroll
    for (int i = 0; i < T::OF_UNIT; i++) {
      // A unit is a tap, or (stacked) a column of taps_h of them.
      int tap = C::stacked ? (unit / C::taps_w * C::taps_h + i) * C::taps_w + unit % C::taps_w : unit;
#pragma unroll
      for (int nb = 0; nb < T::NB; nb++)
#pragma unroll
        for (int j = 0; j < T::N_WIDTH / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int m = T::channel_of(of.channel + of.row + T::NEXT_ROWS * h);
            u32 to = memory + T::sum_at(tap, nb * T::N_WIDTH + j * 8 + 2 * of.q, m);
            const float* sums = &acc[u][nb][M::place_of(i) * (T::N_WIDTH / 2) + 4 * j + 2 * h];
            store_shared_f32(to, sums[0]);
            store_shared_f32(to + T::SUMS_PITCH * 4, sums[1]);
          }
    }
  }
}

// --- sums of the other splits ---

// A block's sums from shared memory to its place in global memory; then it waits for its peers'.
static __device__ __forceinline__ void publish(char* own, u32 shared, u32* counters, int count, int thread) {
  fence_async_shared();
  named_sync<2, T::CONSUMERS>();           // all have stored theirs
  if (thread == 0) {
    store_bulk<T::SUMS_BYTES>(own, shared);
    bulk_commit();
    bulk_wait();
    fence_async();
    wgrad_arrive(counters);
    wgrad_wait(counters, count);
  }
  named_sync<2, T::CONSUMERS>();
}

// The sums of a share's quads, where the block's own were.
template <int LANES>
static __device__ __forceinline__ void add(const char* sums, int count, u32 shared, const Share& share, int thread) {
#pragma unroll 1
  for (int i = thread; i < T::SET_TAPS * share.quads * LANES; i += T::CONSUMERS) {
    const int lane = i % LANES, quad = i / LANES % share.quads, tap = i / (LANES * share.quads);
    const int at = T::sum_at(tap, share.ci(quad), share.co(quad));
    float sum[4] = {};
    add_splits<LANES>(sum, sums + at, count, lane);
    if (lane == 0) store_shared_f32x4(shared + at, sum[0], sum[1], sum[2], sum[3]);
  }
}

// The sum of all splits' quad, in the order of `reduce`; LANES of a warp have a part each, of which lane 0 then has the sum.
template <int LANES>
static __device__ __forceinline__ void add_splits(float (&sum)[4], const char* from, int count, int lane) {
  const int run = (count + PARTS - 1) / PARTS;
#pragma unroll 1
  for (int part = lane; part < PARTS; part += LANES) {
    const int begin = part * run, end = begin + run < count ? begin + run : count;
    float own[4] = {};
    for (int split = begin; split < end; split += BATCH) {
      float4 v[BATCH] = {};
#pragma unroll
      for (int k = 0; k < BATCH; k++)
        if (split + k < end) v[k] = __ldcg((const float4*)(from + (split + k) * ((long long)TILES * T::SUMS_BYTES)));
#pragma unroll
      for (int k = 0; k < BATCH; k++) own[0] += v[k].x, own[1] += v[k].y, own[2] += v[k].z, own[3] += v[k].w;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] = part ? sum[e] + own[e] : own[e];
  }
  if constexpr (LANES > 1) {
    const u32 lanes = 0xffu << (threadIdx.x & 24);  // a quad's eight
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float part = sum[e];
      sum[e] = __shfl_sync(lanes, part, 0, LANES);
#pragma unroll
      for (int other = 1; other < LANES; other++) sum[e] += __shfl_sync(lanes, part, other, LANES);
    }
  }
}

// --- to the weight's gradient ---

// Where it has the block's tap, and its channels `ci` and `co`; negative: nowhere.
__device__ __forceinline__ long long place_of(const Work& work, int tap, int ci, int co) const {
  int kd = work.tap_d + tap / (C::taps_h * C::taps_w), kh = work.tap_h + tap / C::taps_w % C::taps_h, kw = work.tap_w + tap % C::taps_w;
  ci += work.ci, co += work.co;
  bool exists = ci < C::cin && co < C::cout && kd < C::kernel_d && kh < C::kernel_h && kw < C::kernel_w;
  return exists ? (work.group * C::cin + ci) * stride_ci + co * stride_co + ((kd * C::kernel_h + kh) * C::kernel_w + kw) * stride_tap : -1;
}

// V neighbours in memory, which begin at V elements.
template <int V>
__device__ __forceinline__ void store_some(long long to, const float* v) const {
  if constexpr (T::NARROW) {
    if (!wide) {
      Bits* narrow = (Bits*)out + to;
      if constexpr (V == 4) *(uint2*)narrow = make_uint2(Number::pair(v[0], v[1]), Number::pair(v[2], v[3]));
      else if constexpr (V == 2) *(u32*)narrow = Number::pair(v[0], v[1]);
      else *narrow = (Bits)Number::bits(v[0]);
      return;
    }
  }
  float* single = (float*)out + to;
  if constexpr (V == 4) *(float4*)single = make_float4(v[0], v[1], v[2], v[3]);
  else if constexpr (V == 2) *(float2*)single = make_float2(v[0], v[1]);
  else *single = v[0];
}

// A thread keeps its taps and output channels, so that a row is an addition away: a place computed for each takes three times as long.

// Of rows of ci up to `end` those that exist.
static __device__ __forceinline__ int last_row(const Work& work, int end) { return end < C::cin - work.ci ? end : C::cin - work.ci; }

// Output channels are innermost.
__device__ __forceinline__ void store_quads(const Work& work, u32 sums, const Share& share, int thread) const {
  constexpr int ITEMS = T::SET_TAPS * QUADS, EACH = ITEMS < T::CONSUMERS ? ITEMS : T::CONSUMERS, AT_ONCE = T::CONSUMERS / EACH;
  if (thread >= AT_ONCE * EACH) return;
#pragma unroll 1
  for (int i = thread % EACH; i < ITEMS; i += EACH) {
    const int quad = i % QUADS, co = quad * 4, tap = i / QUADS, first = share.begin(quad), end = last_row(work, share.end(quad));
    const long long to = place_of(work, tap, first, co);
    if (to < 0) continue;
#pragma unroll 4
    for (int row = first + thread / EACH; row < end; row += AT_ONCE) {
      float v[4];
      load_quad(v, sums + T::sum_at(tap, row, co));
      store_quad(work, to + (row - first) * stride_ci, co, v);
    }
  }
}

static __device__ __forceinline__ void load_quad(float (&v)[4], u32 from) {
  u32 words[4];
  load_shared_128(words, from);
#pragma unroll
  for (int e = 0; e < 4; e++) v[e] = __uint_as_float(words[e]);
}

__device__ __forceinline__ void store_quad(const Work& work, long long to, int co, const float (&v)[4]) const {
  if constexpr (C::cout % 4 == 0) {
    store_some<4>(to, v);
  } else {
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (work.co + co + e < C::cout) store_some<1>(to + e, v + e);
  }
}

// Taps are innermost. Those of a row of the kernel, or of several whole ones, lie side by side in contiguous weights.
static constexpr int NEAR = C::taps_w == C::kernel_w ? C::taps_h * C::taps_w : C::taps_w;
static constexpr int OF_KERNEL = C::taps_w == C::kernel_w ? C::kernel_h * C::kernel_w : C::kernel_w;
static constexpr int NEAR_TAPS = NEAR % 4 == 0 && OF_KERNEL % 4 == 0 ? 4 : NEAR % 2 == 0 && OF_KERNEL % 2 == 0 ? 2 : 1;

__device__ __forceinline__ void store_taps(const Work& work, u32 sums, const Share& share, int thread) const {
  constexpr int RUNS = T::SET_TAPS / NEAR_TAPS, ITEMS = RUNS * C::block_co;
  constexpr int EACH = ITEMS < T::CONSUMERS ? ITEMS : T::CONSUMERS, AT_ONCE = T::CONSUMERS / EACH;
  if (thread >= AT_ONCE * EACH) return;
#pragma unroll 1
  for (int i = thread % EACH; i < ITEMS; i += EACH) {
    const int tap = i % RUNS * NEAR_TAPS, co = i / RUNS, first = share.begin(co / 4), end = last_row(work, share.end(co / 4));
    const long long to = place_of(work, tap, first, co);
    if (to < 0) continue;
#pragma unroll 4
    for (int row = first + thread / EACH; row < end; row += AT_ONCE) {
      float v[NEAR_TAPS];
#pragma unroll
      for (int e = 0; e < NEAR_TAPS; e++) v[e] = load_shared_f32(sums + T::sum_at(tap + e, row, co));
      store_some<NEAR_TAPS>(to + (row - first) * stride_ci, v);
    }
  }
}
};
