// The gradient for the weight on CUDA cores: depthwise layers, few channels and float64.
//
//   dW[ci, co, tap] = sum over n and i of x[n, ci, i] * g[n, co, i * stride + tap * dilation - padding]
//
// Blocks take ranges of tiles (direct_tile.cuh), each for a channel of g and some of x. The warps of a block divide the taps (TAP_GROUPS) and
// a tile's positions (POSITION_GROUPS). They write partial sums; `direct_reduce` adds them in the order of their index, so that every run
// gives the same bits. Positions of a tile beyond the image are zeros of x that meet g where it is: an infinity there makes NaN of that
// tap's sum.
#include "direct_tile.cuh"

template <class C_>
struct DirectWeight : DirectTile<C_> {
using C = C_;
using Base = DirectTile<C>;
using typename Base::Scalar; using typename Base::T; using typename Base::Acc; using typename Base::Sizes; using typename Base::Tile;
using typename Base::Own;
using Base::BY_CHANNELS; using Base::TO; using Base::LANES; using Base::CHANNELS; using Base::ROWS; using Base::TILE_H; using Base::TILE_W;
using Base::KERNEL_H; using Base::KERNEL_W; using Base::TAPS; using Base::THREADS; using Base::WARPS; using Base::CHANNEL_BLOCKS;
using Base::ROW_PITCH;
static constexpr int KH_TILE = C::kh_tile, KW_TILE = C::kw_tile;
static constexpr int TAP_GROUPS_W = (KERNEL_W + KW_TILE - 1) / KW_TILE;
static constexpr int TAP_GROUPS = (KERNEL_H + KH_TILE - 1) / KH_TILE * TAP_GROUPS_W;
static constexpr int POSITION_GROUPS = WARPS / TAP_GROUPS;
static constexpr int SUMS = KH_TILE * KW_TILE * CHANNELS;
static constexpr int X_TILE = TILE_H * TILE_W;
static constexpr int STRIPS = X_TILE / ROWS / (BY_CHANNELS ? 1 : 32);  // a warp takes a column of `rows` positions, or 32 of them
static constexpr int X_CHANNELS = BY_CHANNELS ? LANES : CHANNELS;
static constexpr int X_BATCH = (X_CHANNELS * X_TILE + THREADS - 1) / THREADS;  // elements of a thread

// What a block sums: for a channel of g and channels of x a range of tiles at a tap along D.
struct Item {
  int group, channel, left, from, kd, range;  // channel: the first of x's, of which there are `left`; from: g's
};

static __device__ __forceinline__ Item item_of(u32 index) {
  Item item;
  const int block = index % CHANNEL_BLOCKS;  index /= CHANNEL_BLOCKS;
  item.group = BY_CHANNELS ? 0 : index % C::groups;
  if constexpr (!BY_CHANNELS) index /= C::groups;
  item.channel = item.group * C::to_g + block * X_CHANNELS;
  item.left = (BY_CHANNELS ? TO : C::to_g) - block * X_CHANNELS;
  item.from = index % C::from_g;  index /= C::from_g;
  item.kd = index % C::kernel_d;
  item.range = index / C::kernel_d;
  return item;
}

// x's tile, zeros beyond its borders: channels of a position (lanes_are_channels), or positions of a channel. Loaded ahead of g's
// tile and stored behind it, so that a block waits for both at once.
static __device__ __forceinline__ void load_input(T (&v)[X_BATCH], const T* x, const Tile& t, const Item& item, const Sizes& s) {
  const i64 pixels = (i64)s.d * s.h * s.w;
  const int thread = Base::thread_index();
#pragma unroll
  for (int b = 0; b < X_BATCH; b++) {
    const int i = thread + b * THREADS;
    const int c = C::channels_last ? i % X_CHANNELS : i / X_TILE, q = C::channels_last ? i / X_CHANNELS : i % X_TILE;
    const int h = t.h + q / TILE_W, w = t.w + q % TILE_W;
    const i64 at = ((i64)t.d * s.h + h) * s.w + w;
    v[b] = 0;
    if (i < X_CHANNELS * X_TILE && h < s.h && w < s.w && c < item.left)
      v[b] = x[C::channels_last ? (t.n * pixels + at) * TO + item.channel + c : ((i64)t.n * TO + item.channel + c) * pixels + at];
  }
}

static __device__ __forceinline__ void store_input(Acc* to, const T (&v)[X_BATCH]) {
  const int thread = Base::thread_index();
#pragma unroll
  for (int b = 0; b < X_BATCH; b++) {
    const int i = thread + b * THREADS;
    if (i >= X_CHANNELS * X_TILE) break;
    to[C::channels_last && !BY_CHANNELS ? i % X_CHANNELS * X_TILE + i / X_CHANNELS : i] = Scalar::value(v[b]);
  }
}

using Sums = Acc[KW_TILE][KH_TILE][CHANNELS];

// A tile's products of one thread. `column`: the warp's taps, in words.
static __device__ __forceinline__ void multiply(Sums& sum, const Acc* tile, const Acc* x_tile, const int (&column)[KW_TILE], int position_group, int lane) {
#pragma unroll 1
  for (int strip = position_group; strip < STRIPS; strip += POSITION_GROUPS) {
    const Own own = Base::own_of(BY_CHANNELS ? strip : strip * 32 + lane, lane);
    Acc v[ROWS][CHANNELS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < CHANNELS; c++) {
        const int q = (own.ty + r) * TILE_W + own.tx;
        v[r][c] = x_tile[BY_CHANNELS ? q * LANES + own.mine : c * X_TILE + q];
      }
#pragma unroll
    for (int j = 0; j < KW_TILE; j++)
#pragma unroll
      for (int kh = 0; kh < KH_TILE; kh++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const Acc met = tile[own.at + column[j] + (r * C::in_h + kh * C::dilation_h) * ROW_PITCH];
#pragma unroll
          for (int c = 0; c < CHANNELS; c++) sum[j][kh][c] = multiply_add(v[r][c], met, sum[j][kh][c]);
        }
  }
}

// A block's sums in a fixed order: of a warp's lanes (where they are columns), then of the warps of a group of taps.
static __device__ __forceinline__ void add(Acc* __restrict__ partial, Acc* sums, const Sums& sum, const Item& item, int warp, int lane) {
#pragma unroll
  for (int j = 0; j < KW_TILE; j++)
#pragma unroll
    for (int kh = 0; kh < KH_TILE; kh++)
#pragma unroll
      for (int c = 0; c < CHANNELS; c++) {
        Acc v = sum[j][kh][c];
        if constexpr (!BY_CHANNELS) {
#pragma unroll
          for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
        }
        if (lane < LANES) sums[(warp * SUMS + (j * KH_TILE + kh) * CHANNELS + c) * LANES + lane] = v;
      }
  __syncthreads();
  for (int i = threadIdx.x; i < TAP_GROUPS * SUMS * LANES; i += THREADS) {
    const int which = i / LANES % SUMS, of = i / LANES / SUMS, c = BY_CHANNELS ? i % LANES : which % CHANNELS;
    const int kh = of / TAP_GROUPS_W * KH_TILE + which / CHANNELS % KH_TILE, kw = of % TAP_GROUPS_W * KW_TILE + which / CHANNELS / KH_TILE;
    if (kh >= KERNEL_H || kw >= KERNEL_W || c >= item.left) continue;
    Acc total = 0;
    for (int k = 0; k < POSITION_GROUPS; k++) total += sums[k * TAP_GROUPS * SUMS * LANES + i];
    const i64 row = (i64)(item.range * TO + item.channel + c) * C::from_g + item.from;
    partial[row * TAPS + (item.kd * KERNEL_H + kh) * KERNEL_W + kw] = total;
  }
}

// partial: [ranges][TO][from_g][TAPS] accumulators.
static __device__ __forceinline__ void run(unsigned char* memory, const T* __restrict__ x, const T* __restrict__ g, Acc* __restrict__ partial, const Sizes& s, bool whole_units, int tiles_of_range) {
  Acc *tile = (Acc*)memory, *x_tile = tile + Base::TILE_WORDS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Item item = item_of(blockIdx.x);
  const int tap_group = warp % TAP_GROUPS, position_group = warp / TAP_GROUPS;
  const int first_kh = tap_group / TAP_GROUPS_W * KH_TILE, first_kw = tap_group % TAP_GROUPS_W * KW_TILE;
  int column[KW_TILE];
#pragma unroll
  for (int j = 0; j < KW_TILE; j++) {
    const int kw = first_kw + j < KERNEL_W ? first_kw + j : KERNEL_W - 1;  // sums of taps beyond are not stored
    column[j] = first_kh * C::dilation_h * ROW_PITCH + Base::column_at(Base::column_of_tap(kw));
  }
  const int total = s.batch * s.d * s.tiles_h * s.tiles_w, begin = item.range * tiles_of_range;
  const int end = begin + min(tiles_of_range, total - begin);
  Sums sum = {};
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    const Tile t = Base::tile_of(i, s);
    const int depth = Base::depth_of(t.d, item.kd, s);
    if (depth < 0) continue;
    T values[X_BATCH];
    load_input(values, x, t, item, s);
    __syncthreads();                       // the tile before has been read
    const int channel = item.group * C::from_g + (BY_CHANNELS ? item.channel : item.from);
    Base::stage(tile, g, t, depth, channel, BY_CHANNELS ? item.left : 1, whole_units, s);
    store_input(x_tile, values);
    __syncthreads();
    if (position_group < POSITION_GROUPS) multiply(sum, tile, x_tile, column, position_group, lane);
  }
  __syncthreads();
  add(partial, tile, sum, item, warp, lane);  // [WARPS][SUMS][LANES]
}

static __device__ __forceinline__ void reduce(const Acc* __restrict__ partial, T* __restrict__ out, int ranges, i64 stride_to, i64 stride_from, i64 stride_tap) {
  const i64 total = (i64)TO * C::from_g * TAPS;
  const i64 e = (i64)blockIdx.x * 256 + threadIdx.x;
  if (e >= total) return;
  Acc sum = 0;
#pragma unroll 8
  for (int i = 0; i < ranges; i++) sum += partial[i * total + e];
  const i64 tap = e % TAPS, from = e / TAPS % C::from_g, to = e / ((i64)TAPS * C::from_g);
  out[to * stride_to + from * stride_from + tap * stride_tap] = Scalar::stored(sum);
}
};

template <class C>
__global__ void __launch_bounds__(C::threads, C::min_blocks)
direct_weight(const typename DirectWeight<C>::T* __restrict__ x, const typename DirectWeight<C>::T* __restrict__ g, typename DirectWeight<C>::Acc* __restrict__ partial,
              int batch, int from_d, int from_h, int from_w, int d, int h, int w, int tiles_h, int tiles_w, int whole_units, int tiles_of_range) {
  extern __shared__ __align__(1024) unsigned char memory[];
  DirectWeight<C>::run(memory, x, g, partial, {batch, from_d, from_h, from_w, d, h, w, tiles_h, tiles_w}, whole_units, tiles_of_range);
}

template <class C>
__global__ void __launch_bounds__(256)
direct_reduce(const typename DirectWeight<C>::Acc* __restrict__ partial, typename DirectWeight<C>::T* __restrict__ out, int ranges, i64 stride_to, i64 stride_from, i64 stride_tap) {
  DirectWeight<C>::reduce(partial, out, ranges, stride_to, stride_from, stride_tap);
}
