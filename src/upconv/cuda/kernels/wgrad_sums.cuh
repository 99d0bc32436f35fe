// How sums become the weight's gradient. A block leaves those of its tile and its split of K as a record, [tap][ci][co] (WgradShape), at
// [split][tile]. Records of a tile are added and stored by shares, quads of four output channels of an input channel at all taps: by
// blocks of a second launch, `reduce`; or by those that left the records, where all of these run at once. The order of a sum follows
// from the number of splits alone.
#include "wgrad.cuh"

// The weight's gradient, stored by so many threads.
template <class S, int THREADS>
struct WgradSums {
using C = typename S::C;
using Number = typename S::Number;
using Bits = typename S::Bits;
using Work = typename S::Work;
char* out;
long long stride_ci, stride_co, stride_tap;
long long wide;                            // whether it is float32, whatever the operands are

static constexpr int QUADS = C::block_co / 4;           // of a row of the block's [ci][co]
static constexpr int BATCH = 8;                         // records whose loads are on their way at a time
static constexpr int LANES = 8, FEW = 128;              // that divide the records of a sum, where sums of so many shares are so few

// Of a block's [ci][quad] those that are added and stored together, of all taps; and where its rows' sums are in shared memory, as in a
// record of so many rows.
struct Share {
  int first, quads;
  u32 at;
  int tap_pitch;
  __device__ __forceinline__ u32 place(int tap, int ci, int co) const { return at + (tap * tap_pitch + (ci - first / QUADS) * S::SUMS_PITCH + co) * 4; }
  // Rows of ci that it has of quad `q` of a row.
  __device__ __forceinline__ int begin(int q) const { return (first + QUADS - 1 - q) / QUADS; }
  __device__ __forceinline__ int end(int q) const { return (first + quads + QUADS - 1 - q) / QUADS; }
};

// The share of one of `count` blocks. Of a single one it is a record.
static __device__ __forceinline__ Share share_of(int rank, int count, u32 at) {
  const int every = C::block_ci * QUADS, most = (every + count - 1) / count, first = rank * most;
  const int quads = every - first < most ? every - first : most, rows = (first + quads - 1) / QUADS - first / QUADS + 1;
  return {first, quads, at, rows * S::SUMS_PITCH + 8};
}

// A share's sums of `count` records, S::TILES apart.
static __device__ __forceinline__ void add(const char* records, int count, const Share& share, int thread) {
  if (S::SET_TAPS * ((C::block_ci * QUADS + count - 1) / count) > FEW) add_by<1>(records, count, share, thread);
  else add_by<LANES>(records, count, share, thread);
}

template <int PARTS>
static __device__ __forceinline__ void add_by(const char* records, int count, const Share& share, int thread) {
#pragma unroll 1
  for (int i = thread; i < S::SET_TAPS * share.quads * PARTS; i += THREADS) {
    const int part = i % PARTS, quad = share.first + i / PARTS % share.quads, tap = i / (PARTS * share.quads);
    const int ci = quad / QUADS, co = quad % QUADS * 4;
    const char* from = records + S::sum_at(tap, ci, co);
    float sum[4] = {};
#pragma unroll 1
    for (int split = part; split < count; split += PARTS * BATCH) {
      float4 v[BATCH] = {};
#pragma unroll
      for (int k = 0; k < BATCH; k++)
        if (split + k * PARTS < count) v[k] = __ldcg((const float4*)(from + (split + k * PARTS) * ((long long)S::TILES * S::SUMS_BYTES)));
#pragma unroll
      for (int k = 0; k < BATCH; k++) sum[0] += v[k].x, sum[1] += v[k].y, sum[2] += v[k].z, sum[3] += v[k].w;
    }
#pragma unroll
    for (int lanes = PARTS / 2; lanes; lanes /= 2)
#pragma unroll
      for (int e = 0; e < 4; e++) sum[e] += __shfl_xor_sync(((1u << PARTS) - 1) << (threadIdx.x & 32 - PARTS), sum[e], lanes);
    if (part == 0) store_shared_f32x4(share.place(tap, ci, co), sum[0], sum[1], sum[2], sum[3]);
  }
}

// Taps or output channels are innermost in the weight: of taps those of a row of the kernel, or of several whole ones.
__device__ __forceinline__ void store(const Work& work, const Share& share, int thread) const {
  constexpr bool ROWS = C::taps_w == C::kernel_w;
  constexpr int NEAR = ROWS ? C::taps_h * C::taps_w : C::taps_w, OF_KERNEL = ROWS ? C::kernel_h * C::kernel_w : C::kernel_w;
  if (stride_co == 1) store_runs<false, C::cout % 4 ? 1 : 4>(work, share, thread);
  else store_runs<true, NEAR % 4 == 0 && OF_KERNEL % 4 == 0 ? 4 : NEAR % 2 == 0 && OF_KERNEL % 2 == 0 ? 2 : 1>(work, share, thread);
}

// By runs of V neighbours, which begin at V elements. A thread keeps its taps and output channels, so that a row of ci is an addition
// away: a place computed for each takes three times as long.
template <bool TAPS, int V>
__device__ __forceinline__ void store_runs(const Work& work, const Share& share, int thread) const {
  constexpr int OF_TAPS = S::SET_TAPS / (TAPS ? V : 1), OF_CO = C::block_co / (TAPS ? 1 : V), ITEMS = OF_TAPS * OF_CO;
  constexpr int EACH = ITEMS < THREADS ? ITEMS : THREADS, AT_ONCE = THREADS / EACH;
  if (thread >= AT_ONCE * EACH) return;
#pragma unroll 1
  for (int i = thread % EACH; i < ITEMS; i += EACH) {
    const int tap = TAPS ? i % OF_TAPS * V : i / OF_CO, co = TAPS ? i / OF_TAPS : i % OF_CO * V;
    const int first = share.begin(co / 4), exist = C::cin - work.ci, end = share.end(co / 4) < exist ? share.end(co / 4) : exist;
    const long long to = place_of(work, tap, first, co);
    if (to < 0) continue;
#pragma unroll 4
    for (int row = first + thread / EACH; row < end; row += AT_ONCE) {
      u32 v[4];
      if constexpr (!TAPS && V == 4) load_shared_128(v, share.place(tap, row, co));
      else
#pragma unroll
        for (int e = 0; e < V; e++) v[e] = load_shared_u32(share.place(tap + (TAPS ? e : 0), row, co + (TAPS ? 0 : e)));
      store_run<V>(to + (row - first) * stride_ci, v);
    }
  }
}

// Where the weight has a block's tap, and its channels `ci` and `co`; negative: nowhere.
__device__ __forceinline__ long long place_of(const Work& work, int tap, int ci, int co) const {
  int kd = work.tap_d + tap / (C::taps_h * C::taps_w), kh = work.tap_h + tap / C::taps_w % C::taps_h, kw = work.tap_w + tap % C::taps_w;
  ci += work.ci, co += work.co;
  bool exists = ci < C::cin && co < C::cout && kd < C::kernel_d && kh < C::kernel_h && kw < C::kernel_w;
  return exists ? (work.group * C::cin + ci) * stride_ci + co * stride_co + ((kd * C::kernel_h + kh) * C::kernel_w + kw) * stride_tap : -1;
}

template <class E, int V>
struct alignas(V * sizeof(E)) Run { E of[V]; };

template <int V>
__device__ __forceinline__ void store_run(long long to, const u32 (&v)[4]) const {
  Run<Bits, V> narrow;
  Run<u32, V> single;
#pragma unroll
  for (int e = 0; e < V; e++) narrow.of[e] = (Bits)Number::bits(__uint_as_float(v[e])), single.of[e] = v[e];
  if (S::NARROW && !wide) *(Run<Bits, V>*)((Bits*)out + to) = narrow;
  else *(Run<u32, V>*)((u32*)out + to) = single;
}
};

// The second step. Blocks of a tile, as many as it has shares, are neighbours.
constexpr int WGRAD_ADDERS = 256;

template <class C>
__global__ void __launch_bounds__(WGRAD_ADDERS, 1)
reduce(const char* __restrict__ records, char* __restrict__ out, int count, long long stride_ci, long long stride_co, long long stride_tap, long long wide) {
  extern __shared__ __align__(16) unsigned char memory[];
  using S = WgradShape<C>;
  using Sums = WgradSums<S, WGRAD_ADDERS>;
  const Sums sums = {out, stride_ci, stride_co, stride_tap, wide};
  const int shares = (int)gridDim.x / S::TILES, tile = blockIdx.x / shares;
  const typename Sums::Share share = Sums::share_of(blockIdx.x % shares, shares, shared_address(memory));
  typename S::Work work;
  S::take_work(work, tile);
  Sums::add(records + (long long)tile * S::SUMS_BYTES, count, share, threadIdx.x);
  __syncthreads();
  sums.store(work, share, threadIdx.x);
}
