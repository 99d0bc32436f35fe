// Gradients on CUDA cores from tiles in shared memory: depthwise layers, small groups and few channels.
//
//   grad_input   gi[n, ci, q] = sum over co of the group and taps of g[n, co, q * stride + tap * dilation - padding] * w[ci, co, tap]
//   grad_weight  dW[ci, co, tap] = sum over n and q of x[n, ci, q] * g[n, co, q * stride + tap * dilation - padding]
//
// A block brings what tile_h x tile_w positions q need of one slice of g (an image's, at a depth) into shared memory, in whole
// units and once; taps read it there. A thread takes `rows` positions, one below the other.
//   Lanes are columns: those of g lie in stride_w planes of equal residue, so that lanes read neighbours at any stride.
//   lanes_are_channels (depthwise, channels_last): a pixel's channels are neighbours as they are in memory.
// grad_weight's warps divide a tile's taps (TAP_GROUPS) and its positions (POSITION_GROUPS). Its blocks take a range of tiles
// each and write partial sums; `reduce` adds them in the order of their index, so that every run gives the same bits. Positions of
// a tile beyond the image are zeros of x that meet g where it is: an infinity there makes NaN of that tap's sum.
#include "scalar.cuh"

template <bool IN_WORDS, class T> struct StagedWord { using Type = T; };
template <class T> struct StagedWord<true, T> { using Type = u32; };

template <class C_>
struct Staged {
using C = C_;
using Scalar = ScalarOf<C::precision>;
using T = typename Scalar::T;
using Acc = typename Scalar::Acc;
using Pack = typename Scalar::Pack;
static constexpr int VEC = Scalar::VEC;
static constexpr int ELEMENT = sizeof(T);
static constexpr bool BY_CHANNELS = C::lanes_are_channels;

static constexpr int CIN_G = C::cin_g, COUT_G = C::cout_g, CIN = C::groups * CIN_G, COUT = C::groups * COUT_G;
static constexpr int CHANNELS = C::channels, CI_TILE = C::ci_tile, ROWS = C::rows;
static constexpr int TILE_H = C::tile_h, TILE_W = C::tile_w, SPAN_H = C::span_h, SPAN_W = C::span_w, SHIFT = C::shift;
static constexpr int KERNEL_H = C::kernel_h, KERNEL_W = C::kernel_w, TAPS = C::kernel_d * KERNEL_H * KERNEL_W;
static constexpr int STRIDE_H = C::stride_h, STRIDE_W = C::stride_w;
static constexpr int THREADS = C::threads, WARPS = THREADS / 32, VECTOR = C::vector, BATCH = C::batch;
static constexpr int G_COLUMN = C::channels_last ? COUT : 1;  // elements from one column of g to the next
static constexpr int CHANNEL_BLOCKS = BY_CHANNELS ? (CIN + CHANNELS - 1) / CHANNELS : (CIN_G + CI_TILE - 1) / CI_TILE;  // there of a group
static constexpr bool ALL_CHANNELS = BY_CHANNELS && CHANNELS == COUT;

// Words of shared memory from row to row of g's tile, and where a column of it lies.
static constexpr int ROW_PITCH = BY_CHANNELS ? SPAN_W * CHANNELS : STRIDE_W * C::plane_pitch;
static constexpr int G_WORDS = (SPAN_H * ROW_PITCH + 3) / 4 * 4;
static __device__ __forceinline__ constexpr int column_at(int c) {
  return BY_CHANNELS ? c * CHANNELS : c % STRIDE_W * C::plane_pitch + c / STRIDE_W;
}

struct Sizes {
  int batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_h, tiles_w;
};

struct Tile { int n, d, h, w; };           // first position

static __device__ __forceinline__ Tile tile_of(u32 index, const Sizes& s) {
  Tile t;
  t.w = index % s.tiles_w * TILE_W;  index /= s.tiles_w;
  t.h = index % s.tiles_h * TILE_H;  index /= s.tiles_h;
  t.d = index % s.in_d;
  t.n = index / s.in_d;
  return t;
}

// The thread's index, anew: else every place of a batch, the same for all tiles, would be kept in registers between them.
static __device__ __forceinline__ int thread_index() {
  int index = threadIdx.x;
  OPAQUE(index);
  return index;
}

// Elements that are stored together.
template <int WIDTH>
struct alignas(WIDTH * sizeof(T)) Unit { T v[WIDTH]; };

// Elements that are loaded together, in words where there are some.
static constexpr bool IN_WORDS = ELEMENT == 2 && VECTOR > 1;
struct alignas(VECTOR * ELEMENT) Loaded { typename StagedWord<IN_WORDS, T>::Type v[IN_WORDS ? VECTOR / 2 : VECTOR]; };
static __device__ __forceinline__ Acc element(const Loaded& unit, int k) {
  if constexpr (!IN_WORDS) {
    return Scalar::value(unit.v[k]);
  } else {
    u32 word = unit.v[k / 2];
    if constexpr (C::precision == BF16) return __uint_as_float(k % 2 ? word & 0xffff0000u : word << 16);
    else return Scalar::value((T)(k % 2 ? word >> 16 : word & 0xffffu));
  }
}

// Units of a row of g's tile: of columns, of all channels of columns (ALL_CHANNELS), or of a block's channels of columns. As many
// rows as they fit into the threads are loaded at a time; a thread has the same columns of all.
static constexpr int ROW_UNITS = (BY_CHANNELS ? SPAN_W * CHANNELS : SPAN_W) / VECTOR;
static constexpr int ROUNDS_W = (ROW_UNITS + THREADS - 1) / THREADS;
static constexpr int ROWS_AT_ONCE = ROW_UNITS < THREADS ? THREADS / ROW_UNITS : 1;
static constexpr int PASSES_H = (SPAN_H + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;

// Where an element of a row is in one of g's rows, and whether g has it; `left`: channels from the tile's first on.
struct Place { i64 offset; bool in; };
static __device__ __forceinline__ Place place_in_row(int at, int w, int left, i64 line, const Sizes& s) {
  if constexpr (ALL_CHANNELS) {
    const i64 offset = (i64)w * COUT + at;
    return {offset, offset >= 0 && offset < line};
  } else if constexpr (BY_CHANNELS) {
    const int column = w + at / CHANNELS;
    return {(i64)column * COUT + at % CHANNELS, (u32)column < (u32)s.out_w && at % CHANNELS < left};
  } else {
    return {(i64)(w + at) * G_COLUMN, (u32)(w + at) < (u32)s.out_w};
  }
}

// A unit's elements to shared memory, from that of element `at` of a row on.
static __device__ __forceinline__ void store_unit(Acc* to, const Loaded& unit, int at) {
  if constexpr (BY_CHANNELS && VECTOR % VEC == 0) {
#pragma unroll
    for (int k = 0; k < VECTOR; k += VEC) {
      Pack pack;
#pragma unroll
      for (int j = 0; j < VEC; j++) pack.v[j] = element(unit, k + j);
      *(Pack*)(to + k) = pack;
    }
  } else {
    constexpr bool EVEN = STRIDE_W % VECTOR == 0 || VECTOR % STRIDE_W == 0;
#pragma unroll
    for (int k = 0; k < VECTOR; k++) to[BY_CHANNELS ? k : EVEN ? column_at(k) : column_at(at + k) - column_at(at)] = element(unit, k);
  }
}

// What the taps of slice `kd` meet of g's channels from `channel` on to shared memory, zeros beyond the borders; false where the
// whole slice lies beyond them. Units are whole where g lies and its rows end at their multiples; else elements are loaded.
static __device__ __forceinline__ bool stage_gradient(Acc* tile, const T* g, const Tile& t, int kd, int channel, bool whole, const Sizes& s) {
  const int d = t.d * C::stride_d + kd * C::dilation_d - C::padding_d, h = t.h * STRIDE_H - C::padding_h, w = t.w * STRIDE_W - C::padding_w - SHIFT, left = COUT - channel;
  if ((u32)d >= (u32)s.out_d) return false;
  const i64 pixels = (i64)s.out_d * s.out_h * s.out_w, slice = (i64)d * s.out_h * s.out_w, line = (i64)s.out_w * G_COLUMN;
  const T* from = g + (C::channels_last ? (t.n * pixels + slice) * COUT + channel : ((i64)t.n * COUT + channel) * pixels + slice);
  const int thread = thread_index(), first = ROW_UNITS < THREADS ? thread / ROW_UNITS : 0;
  if (ROW_UNITS < THREADS && first >= ROWS_AT_ONCE) return true;  // the others have nothing to do
#pragma unroll 1
  for (int round = 0; round < ROUNDS_W; round++) {
    const int at = (ROW_UNITS < THREADS ? thread % ROW_UNITS : thread + round * THREADS) * VECTOR;  // element of a row
    if (ROW_UNITS > THREADS && at >= ROW_UNITS * VECTOR) break;
    if (VECTOR == 1 || whole) {
      const Place in_row = place_in_row(at, w, left, line, s);
      Acc* to = tile + first * ROW_PITCH + (BY_CHANNELS ? at : column_at(at));
      int row = h + first;
#pragma unroll 1
      for (int i = 0; i < PASSES_H; i += BATCH, row += BATCH * ROWS_AT_ONCE, to += BATCH * ROWS_AT_ONCE * ROW_PITCH) {
        const T* place = from + row * line + in_row.offset;
        Loaded unit[BATCH];                // all loads come first: a block waits for memory once in BATCH
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          unit[b] = {};
          if (in_row.in && (u32)(row + b * ROWS_AT_ONCE) < (u32)s.out_h) unit[b] = *(const Loaded*)(place + b * ROWS_AT_ONCE * line);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          if ((SPAN_H % ROWS_AT_ONCE || PASSES_H % BATCH) && row + b * ROWS_AT_ONCE >= h + SPAN_H) break;
          store_unit(to + b * ROWS_AT_ONCE * ROW_PITCH, unit[b], at);
        }
      }
    } else {
#pragma unroll 1
      for (int row = first; row < SPAN_H; row += ROWS_AT_ONCE)
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
          const int column = w + (BY_CHANNELS ? (at + k) / CHANNELS : at + k), ch = BY_CHANNELS ? (at + k) % CHANNELS : 0;
          const bool in = (u32)(h + row) < (u32)s.out_h && (u32)column < (u32)s.out_w && ch < left;
          tile[row * ROW_PITCH + (BY_CHANNELS ? at + k : column_at(at + k))] = in ? Scalar::value(from[(h + row) * line + (i64)column * G_COLUMN + ch]) : 0;
        }
    }
  }
  return true;
}

// =====================================================================================================================
// The gradient for the input
// =====================================================================================================================

// A tap's weights, for the lanes' channels or a thread's; those of one channel lie by columns of taps, so that four are one load.
static constexpr bool ONE_CHANNEL = !BY_CHANNELS && CI_TILE == 1;
static constexpr int WEIGHTS = BY_CHANNELS ? CHANNELS : ONE_CHANNEL ? 1 : (CI_TILE + VEC - 1) / VEC * VEC;
static __device__ __forceinline__ constexpr int tap_at(int kh, int kw) {
  return ONE_CHANNEL ? kw * ((KERNEL_H + VEC - 1) / VEC * VEC) + kh : (kw * KERNEL_H + kh) * WEIGHTS;
}
static constexpr int TAP_WORDS = KERNEL_H * KERNEL_W * WEIGHTS;
static constexpr int TAP_BATCH = (TAP_WORDS + THREADS - 1) / THREADS;

// What a block computes: channels (lanes_are_channels: from `ci` on; else of `group`) of a tile.
struct Item {
  Tile tile;
  int group, ci;
};

static __device__ __forceinline__ Item item_of(u32 index, const Sizes& s) {
  Item item;
  const int block = index % CHANNEL_BLOCKS;  index /= CHANNEL_BLOCKS;
  if constexpr (BY_CHANNELS) {
    item.group = 0;
    item.ci = block * CHANNELS;
    item.tile = tile_of(index, s);
  } else if constexpr (C::channels_last) {
    // A pixel's channels are neighbours: groups that share its sectors find them in L2.
    item.ci = block * CI_TILE;
    item.group = index % C::groups;
    item.tile = tile_of(index / C::groups, s);
  } else {
    // A channel's tiles are neighbours: what their halos share comes from L2.
    item.ci = block * CI_TILE;
    const u32 tiles = s.tiles_w * s.tiles_h * s.in_d;
    item.group = index / tiles % C::groups;
    item.tile = tile_of(index % tiles, s);
    item.tile.n = index / tiles / C::groups;
  }
  return item;
}

// A slice's weights.
static __device__ __forceinline__ void load_weights(T (&v)[TAP_BATCH], const T* weight, const Item& item, int co, int kd) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < TAP_BATCH; b++) {
    int i = thread + b * THREADS, c = i % WEIGHTS, tap = kd * (KERNEL_H * KERNEL_W) + i / WEIGHTS;
    bool in = BY_CHANNELS ? item.ci + c < CIN : c < CI_TILE && item.ci + c < CIN_G;
    const i64 row = BY_CHANNELS ? (i64)(item.ci + c) : (i64)(item.group * CIN_G + item.ci + c) * COUT_G + co;
    const T* from = weight + row * TAPS + tap;
    v[b] = 0;
    if (i < TAP_WORDS && in) v[b] = *from;
  }
}

static __device__ __forceinline__ void store_weights(Acc* weights, const T (&v)[TAP_BATCH]) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < TAP_BATCH; b++) {
    int i = thread + b * THREADS, tap = i / WEIGHTS;
    if (i < TAP_WORDS) weights[tap_at(tap / KERNEL_W, tap % KERNEL_W) + i % WEIGHTS] = Scalar::value(v[b]);
  }
}

// What a thread takes: `rows` positions from (ty, tx) on, and where their first word of g's tile lies.
struct Own { int tx, ty, at, mine; };      // mine: its channel, of those of a block
static __device__ __forceinline__ Own own_of(int place, int lane) {
  const int tx = place % TILE_W, ty = place / TILE_W * ROWS, mine = CHANNELS < 32 && lane >= CHANNELS ? CHANNELS - 1 : lane;
  return {tx, ty, ty * STRIDE_H * ROW_PITCH + (BY_CHANNELS ? tx * STRIDE_W * CHANNELS + mine : tx), mine};
}

// A tap's weights of a thread.
static __device__ __forceinline__ void read_weights(Acc (&w)[C::weights_read], const Acc* from, int mine) {
  if constexpr (BY_CHANNELS || ONE_CHANNEL) {
    w[0] = from[BY_CHANNELS ? mine : 0];
  } else {
#pragma unroll
    for (int i = 0; i < C::weights_read; i += VEC) {
      Pack pack = *(const Pack*)(from + i);
#pragma unroll
      for (int k = 0; k < VEC; k++) w[i + k] = pack.v[k];
    }
  }
}

// A position's sums; `q`: the position in its image.
static __device__ __forceinline__ void store_sums(T* gi, const Acc (&acc)[CI_TILE], const Item& item, i64 q, int lane, bool whole_stores, const Sizes& s) {
  const i64 pixels = (i64)s.in_d * s.in_h * s.in_w;
  const int n = item.tile.n;
  if constexpr (BY_CHANNELS) {
    gi[(n * pixels + q) * CIN + item.ci + lane] = Scalar::stored(acc[0]);
  } else if constexpr (C::channels_last) {
    T* pixel = gi + (n * pixels + q) * CIN + item.group * CIN_G + item.ci;
#pragma unroll
    for (int i = 0; i < CI_TILE; i += C::stored) {
      if (CIN_G % CI_TILE && item.ci + i >= CIN_G) break;
      Unit<C::stored> unit;
#pragma unroll
      for (int k = 0; k < C::stored; k++) unit.v[k] = Scalar::stored(acc[i + k]);
      if (C::stored == 1 || whole_stores) {
        *(Unit<C::stored>*)(pixel + i) = unit;
      } else {
#pragma unroll
        for (int k = 0; k < C::stored; k++) pixel[i + k] = unit.v[k];
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < CI_TILE; i++)
      if (CIN_G % CI_TILE == 0 || item.ci + i < CIN_G) gi[((i64)n * CIN + item.group * CIN_G + item.ci + i) * pixels + q] = Scalar::stored(acc[i]);
  }
}

static __device__ __forceinline__ void grad_input(unsigned char* memory, const T* __restrict__ g, const T* __restrict__ weight, T* __restrict__ gi, const Sizes& s, int whole_units) {
  Acc *tile = (Acc*)memory, *weights = tile + G_WORDS;
  const int lane = threadIdx.x & 31;
  const Own own = own_of(BY_CHANNELS ? threadIdx.x / 32 : threadIdx.x, lane);
  const Item item = item_of(blockIdx.x, s);
  Acc acc[ROWS][CI_TILE] = {};
#pragma unroll 1
  for (int slice = 0; slice < COUT_G * C::kernel_d; slice++) {
    const int co = slice / C::kernel_d, kd = slice % C::kernel_d;
    T taps[TAP_BATCH];
    load_weights(taps, weight, item, co, kd);
    if (slice) __syncthreads();            // the slice before has been read
    if (!stage_gradient(tile, g, item.tile, kd, BY_CHANNELS ? item.ci : item.group * COUT_G + co, whole_units, s)) continue;
    store_weights(weights, taps);
    __syncthreads();
#pragma unroll C::unroll_w
    for (int kw = 0; kw < KERNEL_W; kw++) {
      const Acc* column = tile + own.at + column_at(SHIFT + kw * C::dilation_w);
#pragma unroll C::unroll_h
      for (int kh = 0; kh < KERNEL_H; kh++) {
        Acc w[C::weights_read];
        read_weights(w, weights + tap_at(kh, kw), own.mine);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          Acc v = column[(r * STRIDE_H + kh * C::dilation_h) * ROW_PITCH];
#pragma unroll
          for (int i = 0; i < CI_TILE; i++) acc[r][i] = multiply_add(v, w[i], acc[r][i]);
        }
      }
    }
  }
  const Tile& t = item.tile;
  if (t.w + own.tx >= s.in_w || (BY_CHANNELS && (lane >= CHANNELS || item.ci + lane >= CIN))) return;
  const bool whole_stores = C::channels_last && !BY_CHANNELS && (i64)gi % (C::stored * ELEMENT) == 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (t.h + own.ty + r >= s.in_h) break;
    store_sums(gi, acc[r], item, ((i64)t.d * s.in_h + t.h + own.ty + r) * s.in_w + t.w + own.tx, lane, whole_stores, s);
  }
}

// =====================================================================================================================
// The gradient for the weight
// =====================================================================================================================

static constexpr int KH_TILE = C::kh_tile, KW_TILE = C::kw_tile;
static constexpr int TAP_GROUPS_W = (KERNEL_W + KW_TILE - 1) / KW_TILE;
static constexpr int TAP_GROUPS = (KERNEL_H + KH_TILE - 1) / KH_TILE * TAP_GROUPS_W;
static constexpr int POSITION_GROUPS = WARPS / TAP_GROUPS;
static constexpr int LANES = BY_CHANNELS ? CHANNELS : 1;  // sums of a warp are those of so many channels
static constexpr int SUMS = KH_TILE * KW_TILE * CI_TILE;
static constexpr int X_TILE = TILE_H * TILE_W;
static constexpr int STRIPS = X_TILE / ROWS / (BY_CHANNELS ? 1 : 32);  // a warp takes a column of `rows` positions, or 32 of them
static constexpr int X_CHANNELS = BY_CHANNELS ? CHANNELS : CI_TILE;
static constexpr int X_BATCH = (X_CHANNELS * X_TILE + THREADS - 1) / THREADS;  // elements of a thread

// x's tile, zeros beyond its borders: channels of a position (lanes_are_channels), or positions of a channel. Loaded ahead of g's
// tile and stored behind it, so that a block waits for both at once.
static __device__ __forceinline__ void load_input(T (&v)[X_BATCH], const T* x, const Tile& t, int first, int left, const Sizes& s) {
  const i64 pixels = (i64)s.in_d * s.in_h * s.in_w;
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < X_BATCH; b++) {
    int i = thread + b * THREADS;
    int c = C::channels_last ? i % X_CHANNELS : i / X_TILE, q = C::channels_last ? i / X_CHANNELS : i % X_TILE;
    int h = t.h + q / TILE_W, w = t.w + q % TILE_W;
    i64 at = ((i64)t.d * s.in_h + h) * s.in_w + w;
    v[b] = 0;
    if (i < X_CHANNELS * X_TILE && h < s.in_h && w < s.in_w && c < left)
      v[b] = x[C::channels_last ? (t.n * pixels + at) * CIN + first + c : ((i64)t.n * CIN + first + c) * pixels + at];
  }
}

static __device__ __forceinline__ void store_input(Acc* to, const T (&v)[X_BATCH]) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < X_BATCH; b++) {
    int i = thread + b * THREADS;
    if (i >= X_CHANNELS * X_TILE) break;
    to[C::channels_last && !BY_CHANNELS ? i % X_CHANNELS * X_TILE + i / X_CHANNELS : i] = Scalar::value(v[b]);
  }
}

// partial: [splits][CIN][COUT_G][TAPS] accumulators.
static __device__ __forceinline__ void grad_weight(unsigned char* memory, const T* __restrict__ x, const T* __restrict__ g, Acc* __restrict__ partial, const Sizes& s, int whole_units, int per_split) {
  Acc *tile = (Acc*)memory, *x_tile = tile + G_WORDS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u32 index = blockIdx.x;
  const int block = index % CHANNEL_BLOCKS;  index /= CHANNEL_BLOCKS;
  const int group = BY_CHANNELS ? 0 : index % C::groups;
  if constexpr (!BY_CHANNELS) index /= C::groups;
  const int channel = group * CIN_G + block * X_CHANNELS, left = (BY_CHANNELS ? CIN : CIN_G) - block * X_CHANNELS;
  const int co = index % COUT_G;  index /= COUT_G;
  const int kd = index % C::kernel_d, split = index / C::kernel_d;
  const int first_co = BY_CHANNELS ? channel : group * COUT_G + co;
  const int tap_group = warp % TAP_GROUPS, position_group = warp / TAP_GROUPS;
  const int first_kh = tap_group / TAP_GROUPS_W * KH_TILE, first_kw = tap_group % TAP_GROUPS_W * KW_TILE;
  int column[KW_TILE];                     // of the warp's taps, in words
#pragma unroll
  for (int j = 0; j < KW_TILE; j++) {
    int kw = first_kw + j < KERNEL_W ? first_kw + j : KERNEL_W - 1;  // sums of taps beyond are not stored
    column[j] = first_kh * C::dilation_h * ROW_PITCH + column_at(SHIFT + kw * C::dilation_w);
  }
  const int total = s.batch * s.in_d * s.tiles_h * s.tiles_w;
  const int begin = split * per_split, end = begin + per_split < total ? begin + per_split : total;
  Acc acc[KW_TILE][KH_TILE][CI_TILE] = {};
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    Tile t = tile_of(i, s);
    T values[X_BATCH];
    load_input(values, x, t, channel, left, s);
    __syncthreads();                       // the tile before has been read
    if (!stage_gradient(tile, g, t, kd, first_co, whole_units, s)) continue;
    store_input(x_tile, values);
    __syncthreads();
    if (position_group >= POSITION_GROUPS) continue;
#pragma unroll 1
    for (int strip = position_group; strip < STRIPS; strip += POSITION_GROUPS) {
      const Own own = own_of(BY_CHANNELS ? strip : strip * 32 + lane, lane);
      Acc v[ROWS][CI_TILE];
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < CI_TILE; c++) {
          int q = (own.ty + r) * TILE_W + own.tx;
          v[r][c] = x_tile[BY_CHANNELS ? q * CHANNELS + own.mine : c * X_TILE + q];
        }
#pragma unroll
      for (int j = 0; j < KW_TILE; j++)
#pragma unroll
        for (int kh = 0; kh < KH_TILE; kh++)
#pragma unroll
          for (int r = 0; r < ROWS; r++) {
            Acc met = tile[own.at + column[j] + (r * STRIDE_H + kh * C::dilation_h) * ROW_PITCH];
#pragma unroll
            for (int c = 0; c < CI_TILE; c++) acc[j][kh][c] = multiply_add(v[r][c], met, acc[j][kh][c]);
          }
    }
  }
  // Sums in a fixed order: of a warp's lanes (where they are columns), then of the warps of a group of taps.
  __syncthreads();
  Acc* sums = tile;                        // [WARPS][SUMS][LANES]
#pragma unroll
  for (int j = 0; j < KW_TILE; j++)
#pragma unroll
    for (int kh = 0; kh < KH_TILE; kh++)
#pragma unroll
      for (int c = 0; c < CI_TILE; c++) {
        Acc v = acc[j][kh][c];
        if constexpr (!BY_CHANNELS) {
#pragma unroll
          for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
        }
        if (lane < LANES) sums[(warp * SUMS + (j * KH_TILE + kh) * CI_TILE + c) * LANES + lane] = v;
      }
  __syncthreads();
  for (int i = threadIdx.x; i < TAP_GROUPS * SUMS * LANES; i += THREADS) {
    int which = i / LANES % SUMS, of = i / LANES / SUMS, ch = BY_CHANNELS ? i % LANES : which % CI_TILE;
    int kh = of / TAP_GROUPS_W * KH_TILE + which / CI_TILE % KH_TILE, kw = of % TAP_GROUPS_W * KW_TILE + which / CI_TILE / KH_TILE;
    if (kh >= KERNEL_H || kw >= KERNEL_W || ch >= left) continue;
    Acc sum = 0;
    for (int k = 0; k < POSITION_GROUPS; k++) sum += sums[(k * TAP_GROUPS * SUMS * LANES) + i];
    partial[((i64)(split * CIN + channel + ch) * COUT_G + co) * TAPS + (kd * KERNEL_H + kh) * KERNEL_W + kw] = sum;
  }
}

static __device__ __forceinline__ void reduce(const Acc* __restrict__ partial, T* __restrict__ out, int splits, i64 stride_ci, i64 stride_co, i64 stride_tap) {
  const i64 total = (i64)CIN * COUT_G * TAPS;
  i64 e = (i64)blockIdx.x * 256 + threadIdx.x;
  if (e >= total) return;
  Acc sum = 0;
#pragma unroll 8
  for (int i = 0; i < splits; i++) sum += partial[i * total + e];
  i64 tap = e % TAPS, co = e / TAPS % COUT_G, ci = e / ((i64)TAPS * COUT_G);
  out[ci * stride_ci + co * stride_co + tap * stride_tap] = Scalar::stored(sum);
}
};

template <class C>
__global__ void __launch_bounds__(Staged<C>::THREADS, C::min_blocks)
grad_input(const typename Staged<C>::T* __restrict__ g, const typename Staged<C>::T* __restrict__ weight, typename Staged<C>::T* __restrict__ gi, int batch, int in_d, int in_h, int in_w,
           int out_d, int out_h, int out_w, int tiles_h, int tiles_w, int whole_units) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Staged<C>::grad_input(memory, g, weight, gi, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_h, tiles_w}, whole_units);
}

template <class C>
__global__ void __launch_bounds__(Staged<C>::THREADS, C::min_blocks)
grad_weight(const typename Staged<C>::T* __restrict__ x, const typename Staged<C>::T* __restrict__ g, typename Staged<C>::Acc* __restrict__ partial, int batch, int in_d, int in_h, int in_w,
            int out_d, int out_h, int out_w, int tiles_h, int tiles_w, int whole_units, int per_split) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Staged<C>::grad_weight(memory, x, g, partial, {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_h, tiles_w}, whole_units, per_split);
}

template <class K>
__global__ void __launch_bounds__(256)
reduce_staged(const typename K::Acc* __restrict__ partial, typename K::T* __restrict__ out, int splits, i64 stride_ci, i64 stride_co, i64 stride_tap) {
  K::reduce(partial, out, splits, stride_ci, stride_co, stride_tap);
}
