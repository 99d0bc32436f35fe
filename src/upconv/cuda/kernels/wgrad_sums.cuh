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
static constexpr int MANY = 16, LANES = 8;              // so many records are divided by lanes of a warp

// Of a block's [ci][quad] those that are added and stored together, of all taps; and where its sums are in shared memory.
struct Share {
  int first, quads;
  u32 at;                                  // of the rows from that of the first quad on
  int tap_pitch;
  __device__ __forceinline__ int row() const { return first / QUADS; }
  __device__ __forceinline__ u32 place(int tap, int ci, int co) const { return at + (tap * tap_pitch + (ci - row()) * S::SUMS_PITCH + co) * 4; }
  // Rows of ci that it has of quad `q` of a row.
  __device__ __forceinline__ int begin(int q) const { return (first + QUADS - 1 - q) / QUADS; }
  __device__ __forceinline__ int end(int q) const { return (first + quads + QUADS - 1 - q) / QUADS; }
};

// The share of one of `count` blocks; `shared`: where a record fits, in the place that it would have there.
static __device__ __forceinline__ Share share_of(int rank, int count, u32 shared) {
  const int most = (C::block_ci * QUADS + count - 1) / count, first = rank * most, left = C::block_ci * QUADS - first;
  return {first, left < most ? left : most, shared + first / QUADS * (S::SUMS_PITCH * 4), S::SUMS_OF_TAP};
}

// A share's sums of `count` records, S::TILES apart.
static __device__ __forceinline__ void add(const char* records, int count, const Share& share, int thread) {
  if (count < MANY) add_by<1>(records, count, share, thread);
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

__device__ __forceinline__ void store(const Work& work, const Share& share, int thread) const {
  if (stride_co == 1) store_quads(work, share, thread);
  else store_taps(work, share, thread);
}

// Where the weight has a block's tap, and its channels `ci` and `co`; negative: nowhere.
__device__ __forceinline__ long long place_of(const Work& work, int tap, int ci, int co) const {
  int kd = work.tap_d + tap / (C::taps_h * C::taps_w), kh = work.tap_h + tap / C::taps_w % C::taps_h, kw = work.tap_w + tap % C::taps_w;
  ci += work.ci, co += work.co;
  bool exists = ci < C::cin && co < C::cout && kd < C::kernel_d && kh < C::kernel_h && kw < C::kernel_w;
  return exists ? (work.group * C::cin + ci) * stride_ci + co * stride_co + ((kd * C::kernel_h + kh) * C::kernel_w + kw) * stride_tap : -1;
}

// V neighbours in memory, which begin at V elements.
template <int V>
__device__ __forceinline__ void store_some(long long to, const float* v) const {
  if constexpr (S::NARROW) {
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
__device__ __forceinline__ void store_quads(const Work& work, const Share& share, int thread) const {
  constexpr int WIDTH = C::cout % 4 == 0 ? 4 : 1, ITEMS = S::SET_TAPS * QUADS, EACH = ITEMS < THREADS ? ITEMS : THREADS, AT_ONCE = THREADS / EACH;
  if (thread >= AT_ONCE * EACH) return;
#pragma unroll 1
  for (int i = thread % EACH; i < ITEMS; i += EACH) {
    const int quad = i % QUADS, co = quad * 4, tap = i / QUADS, first = share.begin(quad), end = last_row(work, share.end(quad));
    const long long to = place_of(work, tap, first, co);
    if (to < 0) continue;
#pragma unroll 4
    for (int row = first + thread / EACH; row < end; row += AT_ONCE) {
      float v[4];
      load_quad(v, share.place(tap, row, co));
#pragma unroll
      for (int e = 0; e < 4; e += WIDTH)
        if (WIDTH == 4 || work.co + co + e < C::cout) store_some<WIDTH>(to + (row - first) * stride_ci + e, v + e);
    }
  }
}

static __device__ __forceinline__ void load_quad(float (&v)[4], u32 from) {
  u32 words[4];
  load_shared_128(words, from);
#pragma unroll
  for (int e = 0; e < 4; e++) v[e] = __uint_as_float(words[e]);
}

// Taps are innermost. Those of a row of the kernel, or of several whole ones, lie side by side in contiguous weights.
static constexpr int NEAR = C::taps_w == C::kernel_w ? C::taps_h * C::taps_w : C::taps_w;
static constexpr int OF_KERNEL = C::taps_w == C::kernel_w ? C::kernel_h * C::kernel_w : C::kernel_w;
static constexpr int NEAR_TAPS = NEAR % 4 == 0 && OF_KERNEL % 4 == 0 ? 4 : NEAR % 2 == 0 && OF_KERNEL % 2 == 0 ? 2 : 1;

__device__ __forceinline__ void store_taps(const Work& work, const Share& share, int thread) const {
  constexpr int RUNS = S::SET_TAPS / NEAR_TAPS, ITEMS = RUNS * C::block_co;
  constexpr int EACH = ITEMS < THREADS ? ITEMS : THREADS, AT_ONCE = THREADS / EACH;
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
      for (int e = 0; e < NEAR_TAPS; e++) v[e] = load_shared_f32(share.place(tap + e, row, co));
      store_some<NEAR_TAPS>(to + (row - first) * stride_ci, v);
    }
  }
}
};

// The second step. Blocks of a tile, as many as it has shares, are neighbours.
constexpr int WGRAD_ADDERS = 256;

template <class C>
__global__ void __launch_bounds__(WGRAD_ADDERS)
reduce(const char* __restrict__ records, char* __restrict__ out, int count, long long stride_ci, long long stride_co, long long stride_tap, long long wide) {
  extern __shared__ __align__(16) unsigned char memory[];
  using S = WgradShape<C>;
  using Sums = WgradSums<S, WGRAD_ADDERS>;
  const Sums sums = {out, stride_ci, stride_co, stride_tap, wide};
  const int shares = (int)gridDim.x / S::TILES, tile = blockIdx.x / shares;
  typename Sums::Share share = Sums::share_of(blockIdx.x % shares, shares, 0);
  share.at = shared_address(memory);
  share.tap_pitch = ((share.quads + Sums::QUADS - 1) / Sums::QUADS + 1) * S::SUMS_PITCH + 8;
  typename S::Work work;
  S::take_work(work, tile);
  Sums::add(records + (long long)tile * S::SUMS_BYTES, count, share, threadIdx.x);
  __syncthreads();
  sums.store(work, share, threadIdx.x);
}
