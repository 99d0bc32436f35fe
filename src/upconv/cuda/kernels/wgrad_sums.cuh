// How sums leave a block of wgrad_wgmma.cu: as a slice for `reduce`; or blocks that have all splits of a tile between them write the
// weight's gradient from their sums in shared memory, as a cluster, together through global memory, or alone, or (T::BY_ROWS) from
// registers. Sums of splits are added in the order of `reduce`, to the same bits.
#include "wgrad_multiply.cuh"

// A slice of partial sums, [split][taps][COUT][cin].
template <class T>
struct WgradSlice {
using C = typename T::C;
using M = WgradMultiply<T>;
float* __restrict__ partial;

static __device__ __forceinline__ void put_pair(float* at, int ci, const float* sums) {
  if constexpr (C::cin % 2 == 0) {
    if (ci < C::cin) *(float2*)at = make_float2(sums[0], sums[1]);
  } else {
    if (ci < C::cin) at[0] = sums[0];
    if (ci + 1 < C::cin) at[1] = sums[1];
  }
}

__device__ __forceinline__ void put(const typename M::Sums& acc, const WgradBlock<T>& block, const typename M::F::Lane& of, int, int) const {
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
            put_pair(to + (long long)co * C::cin + ci, ci, &acc[u][nb][M::place_of(i) * (T::N_WIDTH / 2) + 4 * j + 2 * h]);
          }
    }
  }
}
};

// =====================================================================================================================
// The gradient for the weight, of float32 (`wide`) or the operands' type
// =====================================================================================================================

template <class T>
struct WgradGradient {
using C = typename T::C;
using Number = typename T::Number;
using Bits = typename T::Bits;
using Work = typename T::Work;
char* at;
long long stride_ci, stride_co, stride_tap;
int wide;

// V neighbours in memory, which begin at V elements.
template <int V>
__device__ __forceinline__ void store_some(long long to, const float (&v)[V]) const {
  if constexpr (T::NARROW) {
    if (!wide) {
      u32 words[(V + 1) / 2];
#pragma unroll
      for (int i = 0; i < V; i++) {
        u32 one = Number::bits(v[i]);
        words[i / 2] = i % 2 ? words[i / 2] | one << 16 : one;
      }
      Bits* narrow = (Bits*)at + to;
      if constexpr (V == 4) *(uint2*)narrow = make_uint2(words[0], words[1]);
      else if constexpr (V == 2) *(u32*)narrow = words[0];
      else *narrow = (Bits)words[0];
      return;
    }
  }
  float* single = (float*)at + to;
  if constexpr (V == 4) *(float4*)single = make_float4(v[0], v[1], v[2], v[3]);
  else if constexpr (V == 2) *(float2*)single = make_float2(v[0], v[1]);
  else *single = v[0];
}

// Where the weight has the block's tap, and its channels `ci` and `co`; negative: nowhere.
__device__ __forceinline__ long long place_of(const Work& work, int tap, int ci, int co) const {
  int kd = work.tap_d + tap / (C::taps_h * C::taps_w), kh = work.tap_h + tap / C::taps_w % C::taps_h, kw = work.tap_w + tap % C::taps_w;
  ci += work.ci, co += work.co;
  bool exists = ci < C::cin && co < C::cout && kd < C::kernel_d && kh < C::kernel_h && kw < C::kernel_w;
  return exists ? (work.group * C::cin + ci) * stride_ci + co * stride_co + ((kd * C::kernel_h + kh) * C::kernel_w + kw) * stride_tap : -1;
}

// A quad of output channels from `co` on, `apart` from one to the next, of which the last may not be.
__device__ __forceinline__ void store_each(const Work& work, const float (&sum)[4], long long to, int co, long long apart) const {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float one[1] = {sum[e]};
    if (work.co + co + e < C::cout) store_some(to + e * apart, one);
  }
}

// A quad's sum to the weight, where that has output channels innermost (`by_co`); else to shared memory.
__device__ __forceinline__ void put_quad(const Work& work, const float (&sum)[4], long long to, u32 shared, int co, bool by_co) const {
  if (by_co && C::cout % 4 == 0) store_some(to, sum);
  else if (by_co) store_each(work, sum, to, co, 1);
  else store_shared_128(shared, __float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3]));
}

// Neighbouring taps of a row of the kernel, or of several whole ones, which lie side by side in contiguous weights.
static constexpr int NEAR = C::taps_w == C::kernel_w ? C::taps_h * C::taps_w : C::taps_w;
static constexpr int OF_KERNEL = C::taps_w == C::kernel_w ? C::kernel_h * C::kernel_w : C::kernel_w;
static constexpr int NEAR_TAPS = NEAR % 4 == 0 && OF_KERNEL % 4 == 0 ? 4 : NEAR % 2 == 0 && OF_KERNEL % 2 == 0 ? 2 : 1;
static constexpr int RUNS_OF_TAPS = T::SET_TAPS / NEAR_TAPS;

__device__ __forceinline__ void put_taps(u32 sums, long long to, int tap, int ci, int co) const {
  float v[NEAR_TAPS];
#pragma unroll
  for (int e = 0; e < NEAR_TAPS; e++) v[e] = load_shared_f32(sums + T::sum_at(tap + e, ci, co));
  store_some(to, v);
}

// --- from registers ---

static constexpr int ROW_PITCH = 64 * T::ELEMENT + 16;  // bytes of 64 output channels, so that eight rows meet all banks
static constexpr int ROWS_BYTES = C::block_ci * ROW_PITCH;

// Whether the weight has output channels innermost, which begin at 16 bytes.
__device__ __forceinline__ bool has_rows() const {
  const bool by_16 = ((u32)(u64)at & 15) == 0 && ((u32)(stride_ci | stride_tap) & 7) == 0 && C::cout % 8 == 0;
  return by_16 && !wide && stride_co == 1;
}

// A warpgroup's unit to a weight that has output channels innermost, by rows of 64 of them, 16 bytes a thread.
__device__ __forceinline__ void put_rows(const Work& work, const float (&sums)[T::N_WIDTH / 2], u32 rows, int tap, int co, int wg, int thread) const {
  const int warp = thread >> 5, lane = thread & 31;
  const u32 to = rows + ((lane >> 4) * 8 + (lane & 7)) * ROW_PITCH + warp * 32 + (lane >> 3 & 1) * 16;
#pragma unroll
  for (int j = 0; j < T::N_WIDTH / 8; j += 2) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float a = sums[4 * j + 2 * i], b = sums[4 * j + 2 * i + 1];
      words[i] = Number::bits(a) | Number::bits(b) << 16;
    }
    store_matrices_turned(to + j * 8 * ROW_PITCH, words);
  }
  named_sync(3 + wg, 128);
  const int unit = thread % 8;
  const long long first = place_of(work, tap, 0, co + unit * 8);
  if (first < 0) return;
#pragma unroll 8
  for (int row = thread / 8; row < C::block_ci; row += 16) {
    u32 v[4];
    load_shared_128(v, rows + row * ROW_PITCH + unit * 16);
    if (work.ci + row < C::cin) *(uint4*)(at + (first + row * stride_ci) * T::ELEMENT) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// --- from a warpgroup's registers, to the weight (`has_rows`) or to the block's sums in shared memory ---

using M = WgradMultiply<T>;
using Lane = typename M::F::Lane;

__device__ __forceinline__ void put_rows_of(const typename M::Sums& acc, const Work& work, u32 memory, const Lane& of, int wg, int thread) const {
#pragma unroll
  for (int u = 0; u < T::UNITS; u++) {
    if (of.first_unit + u >= T::SET_UNITS) continue;
    put_rows(work, acc[u][0], memory + (wg * T::UNITS + u) * ROWS_BYTES, of.first_unit + u, of.channel - of.warp * 16, wg, thread);
  }
}

static __device__ __forceinline__ void put_shared(const typename M::Sums& acc, const unsigned char* memory, const Lane& of) {
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
            u32 at = shared_address(memory) + T::sum_at(tap, nb * T::N_WIDTH + j * 8 + 2 * of.q, m);
            const float* sums = &acc[u][nb][M::place_of(i) * (T::N_WIDTH / 2) + 4 * j + 2 * h];
            store_shared_f32(at, sums[0]);
            store_shared_f32(at + T::SUMS_PITCH * 4, sums[1]);
          }
    }
  }
}
};

// =====================================================================================================================
// Ways of the blocks that have a tile's splits between them. `load`: four of a split's sums.
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
struct WgradTogether {
using C = typename T::C;
static constexpr int BATCH = 8;            // splits whose loads are on their way at a time
static constexpr int PARTS = C::reduce_rows == 1 ? WGRAD_RUNS : 1;  // ranges of splits that are sums of their own, as the warps of `reduce` have them
const char* sums;                          // of the first of them; each has SUMS_BYTES, `apart` bytes from one to the next
long long apart;
int count;

// A batch's split may be none of the range's.
static __device__ __forceinline__ bool exists(int split, int end) { return split < end; }
__device__ __forceinline__ void load(float (&v)[4], u32, int at, int split) const {
  float4 found = __ldcg((const float4*)(sums + split * apart + at));
  v[0] = found.x, v[1] = found.y, v[2] = found.z, v[3] = found.w;
}

// A block's sums from shared memory to its place in global memory; then it waits for its peers'.
__device__ __forceinline__ void publish(char* own, u32 shared, u32* counters, int thread) const {
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
};

template <class T>
struct WgradCluster {
static constexpr int BATCH = T::C::cluster, PARTS = 1, count = T::C::cluster;
static __device__ __forceinline__ bool exists(int, int) { return true; }
__device__ __forceinline__ void load(float (&v)[4], u32 sums, int at, int split) const { load_cluster_128(v, sums + at, split); }
static __device__ __forceinline__ void meet() { cluster_sync(); }
static __device__ __forceinline__ void part() { cluster_sync(); }  // none reads another's any more; and this block's are complete
};

template <class T>
struct WgradAlone {
static constexpr int BATCH = 1, PARTS = 1, count = 1;
static __device__ __forceinline__ bool exists(int, int) { return true; }
__device__ __forceinline__ void load(float (&v)[4], u32 sums, int at, int) const {
  u32 words[4];
  load_shared_128(words, sums + at);
#pragma unroll
  for (int e = 0; e < 4; e++) v[e] = __uint_as_float(words[e]);
}
static __device__ __forceinline__ void meet() { named_sync<2, T::CONSUMERS>(); }
static __device__ __forceinline__ void part() {}
};

template <class T>
using WgradPeers = WgradEither<T::C::together, WgradTogether<T>, WgradEither<T::C::alone, WgradAlone<T>, WgradCluster<T>>>;

// =====================================================================================================================
// Adding
// =====================================================================================================================

template <class T>
struct WgradAdding {
using C = typename T::C;
using Peers = WgradPeers<T>;
using Gradient = WgradGradient<T>;
using Work = typename T::Work;
static constexpr int QUADS = C::block_co / 4;

// The sum of all splits' quad `at`, in the order of `reduce`; LANES of a warp have a part each, of which lane 0 then has the sum.
template <int LANES>
static __device__ __forceinline__ void add_splits(float (&sum)[4], const Peers& peers, u32 sums, int at, int lane) {
  const int run = (peers.count + Peers::PARTS - 1) / Peers::PARTS;
#pragma unroll 1
  for (int part = lane; part < Peers::PARTS; part += LANES) {
    const int begin = part * run, end = begin + run < peers.count ? begin + run : peers.count;
    float own[4] = {};
    for (int split = begin; split < end; split += Peers::BATCH) {
      float v[Peers::BATCH][4] = {};
#pragma unroll
      for (int k = 0; k < Peers::BATCH; k++)
        if (Peers::exists(split + k, end)) peers.load(v[k], sums, at, split + k);
#pragma unroll
      for (int k = 0; k < Peers::BATCH; k++)
#pragma unroll
        for (int e = 0; e < 4; e++) own[e] += v[k][e];
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

// --- together: a block's share is some quads of all taps, so that with many splits all blocks add ---

template <int LANES>
static __device__ __forceinline__ void add_quads(const Gradient& out, const Work& work, const Peers& peers, u32 sums, int first, int quads, bool by_co, int thread) {
#pragma unroll 1
  for (int i = thread; i < T::SET_TAPS * quads * LANES; i += T::CONSUMERS) {
    const int lane = i % LANES, quad = first + i / LANES % quads, tap = i / (LANES * quads), ci = quad / QUADS, co = quad % QUADS * 4;
    float sum[4] = {};
    add_splits<LANES>(sum, peers, sums, T::sum_at(tap, ci, co), lane);
    const long long to = out.place_of(work, tap, ci, co);
    if (lane == 0 && to >= 0) out.put_quad(work, sum, to, sums + T::sum_at(tap, ci, co), co, by_co);
  }
}

static __device__ __forceinline__ void add_share_of_quads(const Gradient& out, const Work& work, const Peers& peers, u32 sums, int rank, int thread) {
  const int share = (C::block_ci * QUADS + peers.count - 1) / peers.count, first = rank * share, left = C::block_ci * QUADS - first, quads = left < share ? left : share;
  const bool by_co = out.stride_co == 1;   // what memory has innermost; else taps
  // Lanes that divide a quad's parts where quads are few; else each thread adds them all.
  if (Peers::PARTS > 1 && T::SET_TAPS * share <= T::CONSUMERS / 2) add_quads<Peers::PARTS>(out, work, peers, sums, first, quads, by_co, thread);
  else add_quads<1>(out, work, peers, sums, first, quads, by_co, thread);
  if (by_co) return;
  named_sync<2, T::CONSUMERS>();
#pragma unroll 4
  for (int i = thread; i < Gradient::RUNS_OF_TAPS * quads * 4; i += T::CONSUMERS) {
    const int tap = i % Gradient::RUNS_OF_TAPS * Gradient::NEAR_TAPS, of_quads = i / Gradient::RUNS_OF_TAPS, quad = first + of_quads / 4;
    const int ci = quad / QUADS, co = quad % QUADS * 4 + of_quads % 4;
    const long long to = out.place_of(work, tap, ci, co);
    if (to >= 0) out.put_taps(sums, to, tap, ci, co);
  }
}

// --- a cluster, or a block alone: some rows of ci. A thread keeps its taps and output channels, so that a row is an addition away: a
// place computed for each quad takes three times as long ---

static __device__ __forceinline__ void add_share_of_rows(const Gradient& out, const Work& work, const Peers& peers, u32 sums, int rank, int thread) {
  constexpr int SHARE = (C::block_ci + Peers::count - 1) / Peers::count;
  const int first = rank * SHARE, left = (C::cin - work.ci < C::block_ci ? C::cin - work.ci : C::block_ci) - first, rows = left < SHARE ? left : SHARE;
  const bool by_co = out.stride_co == 1;   // what memory has innermost; else taps
  Peers::meet();                           // all have stored theirs
  constexpr int ITEMS = T::SET_TAPS * QUADS, EACH = ITEMS < T::CONSUMERS ? ITEMS : T::CONSUMERS, AT_ONCE = T::CONSUMERS / EACH;
  if (thread < AT_ONCE * EACH && (Peers::count > 1 || by_co)) {
#pragma unroll 1
    for (int i = thread % EACH; i < ITEMS; i += EACH) {
      const int co = i % QUADS * 4, tap = i / QUADS;
      const long long to = out.place_of(work, tap, first, co);
      if (to < 0) continue;
#pragma unroll 4
      for (int row = thread / EACH; row < rows; row += AT_ONCE) {
        float sum[4] = {};
        add_splits<1>(sum, peers, sums, T::sum_at(tap, first + row, co), 0);
        out.put_quad(work, sum, to + row * out.stride_ci, sums + T::sum_at(tap, first + row, co), co, by_co);
      }
    }
  }
  Peers::part();
  if (!by_co) put_share_of_taps(out, work, sums, first, rows, thread);
}

static __device__ __forceinline__ void put_share_of_taps(const Gradient& out, const Work& work, u32 sums, int first, int rows, int thread) {
  constexpr int ITEMS = Gradient::RUNS_OF_TAPS * C::block_co, EACH = ITEMS < T::CONSUMERS ? ITEMS : T::CONSUMERS, AT_ONCE = T::CONSUMERS / EACH;
  if (thread >= AT_ONCE * EACH) return;
#pragma unroll 1
  for (int i = thread % EACH; i < ITEMS; i += EACH) {
    const int tap = i % Gradient::RUNS_OF_TAPS * Gradient::NEAR_TAPS, co = i / Gradient::RUNS_OF_TAPS;
    const long long to = out.place_of(work, tap, first, co);
    if (to < 0) continue;
#pragma unroll 4
    for (int row = thread / EACH; row < rows; row += AT_ONCE) out.put_taps(sums, to + row * out.stride_ci, tap, first + row, co);
  }
}
};
