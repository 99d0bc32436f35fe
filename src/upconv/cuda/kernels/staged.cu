// Gradients on CUDA cores from tiles in shared memory: depthwise layers, small groups and few channels.
//
//   grad_input   gi[n, ci, q] = sum over co of the group and taps of g[n, co, q * STEP + tap * DIL - PAD] * w[ci, co, tap]
//   grad_weight  dW[ci, co, tap] = sum over n and q of x[n, ci, q] * g[n, co, q * STEP + tap * DIL - PAD]
//
// A block brings what TILE_H x TILE_W positions q need of one slice of g (an image's, at a depth) into shared memory, in whole
// units and once; taps read it there. A thread takes ROWS positions, one below the other.
//   Lanes are columns: those of g lie in STEP_W planes of equal residue, so that lanes read neighbours at any stride.
//   LANES_ARE_CHANNELS (depthwise, CHANNELS_LAST): a pixel's channels are neighbours as they are in memory.
// grad_weight's warps divide a tile's taps (TAP_GROUPS) and its positions (POSITION_GROUPS). Its blocks take a range of tiles
// each and write partial sums; `reduce` adds them in the order of their index, so that every run gives the same bits. Positions of
// a tile beyond the image are zeros of x that meet g where it is: an infinity there makes NaN of that tap's sum.
#include "direct.cuh"

#define TAPS (KERNEL_D * KERNEL_H * KERNEL_W)
#define CIN (GROUPS * CIN_G)
#define COUT (GROUPS * COUT_G)
#define G_COLUMN (CHANNELS_LAST ? COUT : 1)  // elements from one column of g to the next

// Words of shared memory from row to row of g's tile, and where a column of it lies.
#if LANES_ARE_CHANNELS
#define ROW_PITCH (SPAN_W * CHANNELS)
#define COLUMN_AT(c) ((c) * CHANNELS)
#define CHANNEL_BLOCKS ((CIN + CHANNELS - 1) / CHANNELS)
#define ALL_CHANNELS (CHANNELS == COUT)
#else
#define ROW_PITCH (STEP_W * PLANE_PITCH)
#define COLUMN_AT(c) ((c) % STEP_W * PLANE_PITCH + (c) / STEP_W)
#define CHANNEL_BLOCKS ((CIN_G + CI_TILE - 1) / CI_TILE)  // of a group
#endif
#define G_WORDS ((SPAN_H * ROW_PITCH + 3) / 4 * 4)
#define WARPS (THREADS / 32)

struct Sizes {
  int batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_h, tiles_w;
};

struct Tile { int n, d, h, w; };           // first position

__device__ __forceinline__ Tile tile_of(u32 index, const Sizes& s) {
  Tile t;
  t.w = index % s.tiles_w * TILE_W;  index /= s.tiles_w;
  t.h = index % s.tiles_h * TILE_H;  index /= s.tiles_h;
  t.d = index % s.in_d;
  t.n = index / s.in_d;
  return t;
}

// The thread's index, anew: else every place of a batch, the same for all tiles, would be kept in registers between them.
__device__ __forceinline__ int thread_index() {
  int index = threadIdx.x;
  OPAQUE(index);
  return index;
}

// Elements that are stored together.
template <int WIDTH>
struct alignas(WIDTH * sizeof(T)) Unit { T v[WIDTH]; };

// Elements that are loaded together, in words where there are some.
#if VECTOR * ELEMENT >= 4 && ELEMENT == 2
struct alignas(VECTOR * ELEMENT) Loaded { u32 word[VECTOR / 2]; };
__device__ __forceinline__ Acc element(const Loaded& unit, int k) {
  u32 word = unit.word[k / 2];
#if DTYPE == 1
  return __uint_as_float(k % 2 ? word & 0xffff0000u : word << 16);
#else
  return load_value((T)(k % 2 ? word >> 16 : word & 0xffffu));
#endif
}
#else
struct alignas(VECTOR * ELEMENT) Loaded { T v[VECTOR]; };
__device__ __forceinline__ Acc element(const Loaded& unit, int k) { return load_value(unit.v[k]); }
#endif

// Units of a row of g's tile: of columns, of all channels of columns (ALL_CHANNELS), or of a block's channels of columns. As many
// rows as they fit into the threads are loaded at a time; a thread has the same columns of all.
#if LANES_ARE_CHANNELS
#define ROW_UNITS (SPAN_W * CHANNELS / VECTOR)
#else
#define ROW_UNITS (SPAN_W / VECTOR)
#endif
#define PASSES_W ((ROW_UNITS + THREADS - 1) / THREADS)
#define ROWS_AT_ONCE (ROW_UNITS < THREADS ? THREADS / ROW_UNITS : 1)
#define PASSES_H ((SPAN_H + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE)

// What the taps of slice `kd` meet of g's channels from `channel` on to shared memory, zeros beyond the borders; false where the
// whole slice lies beyond them. Units are whole where g lies and its rows end at their multiples; else elements are loaded.
__device__ __forceinline__ bool stage_gradient(Acc* tile, const T* g, const Tile& t, int kd, int channel, bool whole, const Sizes& s) {
  const int d = t.d * STEP_D + kd * DIL_D - PAD_D, h = t.h * STEP_H - PAD_H, w = t.w * STEP_W - PAD_W - SHIFT, left = COUT - channel;
  if ((u32)d >= (u32)s.out_d) return false;
  const i64 pixels = (i64)s.out_d * s.out_h * s.out_w, slice = (i64)d * s.out_h * s.out_w, line = (i64)s.out_w * G_COLUMN;
  const T* from = g + (CHANNELS_LAST ? (t.n * pixels + slice) * COUT + channel : ((i64)t.n * COUT + channel) * pixels + slice);
  const int thread = thread_index(), first = ROW_UNITS < THREADS ? thread / ROW_UNITS : 0;
  if (ROW_UNITS < THREADS && first >= ROWS_AT_ONCE) return true;  // the others have nothing to do
#pragma unroll 1
  for (int pass = 0; pass < PASSES_W; pass++) {
    const int at = (ROW_UNITS < THREADS ? thread % ROW_UNITS : thread + pass * THREADS) * VECTOR;  // element of a row
    if (ROW_UNITS > THREADS && at >= ROW_UNITS * VECTOR) break;
    if (VECTOR == 1 || whole) {
#if ALL_CHANNELS
      const i64 offset = (i64)w * COUT + at;
      const bool in = offset >= 0 && offset < line;
#elif LANES_ARE_CHANNELS
      const int column = w + at / CHANNELS;
      const i64 offset = (i64)column * COUT + at % CHANNELS;
      const bool in = (u32)column < (u32)s.out_w && at % CHANNELS < left;
#else
      const i64 offset = (i64)(w + at) * G_COLUMN;
      const bool in = (u32)(w + at) < (u32)s.out_w;
#endif
      Acc* to = tile + first * ROW_PITCH + (LANES_ARE_CHANNELS ? at : COLUMN_AT(at));
      int row = h + first;
#pragma unroll 1
      for (int i = 0; i < PASSES_H; i += BATCH, row += BATCH * ROWS_AT_ONCE, to += BATCH * ROWS_AT_ONCE * ROW_PITCH) {
        const T* place = from + row * line + offset;
        Loaded unit[BATCH];                // all loads come first: a block waits for memory once in BATCH
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          unit[b] = {};
          if (in && (u32)(row + b * ROWS_AT_ONCE) < (u32)s.out_h) unit[b] = *(const Loaded*)(place + b * ROWS_AT_ONCE * line);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          if ((SPAN_H % ROWS_AT_ONCE || PASSES_H % BATCH) && row + b * ROWS_AT_ONCE >= h + SPAN_H) break;
#if LANES_ARE_CHANNELS
          if constexpr (VECTOR % VEC == 0) {
#pragma unroll
            for (int k = 0; k < VECTOR; k += VEC) {
              Pack pack;
#pragma unroll
              for (int j = 0; j < VEC; j++) pack.v[j] = element(unit[b], k + j);
              *(Pack*)(to + b * ROWS_AT_ONCE * ROW_PITCH + k) = pack;
            }
          } else {
#pragma unroll
            for (int k = 0; k < VECTOR; k++) to[b * ROWS_AT_ONCE * ROW_PITCH + k] = element(unit[b], k);
          }
#elif STEP_W % VECTOR == 0 || VECTOR % STEP_W == 0
#pragma unroll
          for (int k = 0; k < VECTOR; k++) to[b * ROWS_AT_ONCE * ROW_PITCH + COLUMN_AT(k)] = element(unit[b], k);
#else
#pragma unroll
          for (int k = 0; k < VECTOR; k++) to[b * ROWS_AT_ONCE * ROW_PITCH + COLUMN_AT(at + k) - COLUMN_AT(at)] = element(unit[b], k);
#endif
        }
      }
    } else {
#pragma unroll 1
      for (int row = first; row < SPAN_H; row += ROWS_AT_ONCE)
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
#if LANES_ARE_CHANNELS
          const int column = w + (at + k) / CHANNELS, ch = (at + k) % CHANNELS;
#else
          const int column = w + at + k, ch = 0;
#endif
          const bool in = (u32)(h + row) < (u32)s.out_h && (u32)column < (u32)s.out_w && ch < left;
          tile[row * ROW_PITCH + (LANES_ARE_CHANNELS ? at + k : COLUMN_AT(at + k))] = in ? load_value(from[(h + row) * line + (i64)column * G_COLUMN + ch]) : 0;
        }
    }
  }
  return true;
}

#if !GRAD_WEIGHT
// =====================================================================================================================
// The gradient for the input
// =====================================================================================================================

// A tap's weights, for the lanes' channels or a thread's; those of one channel lie by columns of taps, so that four are one load.
#if LANES_ARE_CHANNELS
#define WEIGHTS CHANNELS
#define TAP_AT(kh, kw) (((kw) * KERNEL_H + (kh)) * WEIGHTS)
#elif CI_TILE == 1
#define WEIGHTS 1
#define TAP_AT(kh, kw) ((kw) * ((KERNEL_H + VEC - 1) / VEC * VEC) + (kh))
#else
#define WEIGHTS ((CI_TILE + VEC - 1) / VEC * VEC)
#define TAP_AT(kh, kw) (((kw) * KERNEL_H + (kh)) * WEIGHTS)
#endif

#define TAP_WORDS (KERNEL_H * KERNEL_W * WEIGHTS)
#define TAP_BATCH ((TAP_WORDS + THREADS - 1) / THREADS)

// What a block computes: channels (LANES_ARE_CHANNELS: from `ci` on; else of `group`) of a tile.
struct Item {
  Tile tile;
  int group, ci;
};

__device__ __forceinline__ Item item_of(u32 index, const Sizes& s) {
  Item item;
  const int block = index % CHANNEL_BLOCKS;  index /= CHANNEL_BLOCKS;
#if LANES_ARE_CHANNELS
  item.group = 0;
  item.ci = block * CHANNELS;
  item.tile = tile_of(index, s);
#else
  item.ci = block * CI_TILE;
#if CHANNELS_LAST
  // A pixel's channels are neighbours: groups that share its sectors find them in L2.
  item.group = index % GROUPS;
  item.tile = tile_of(index / GROUPS, s);
#else
  // A channel's tiles are neighbours: what their halos share comes from L2.
  const u32 tiles = s.tiles_w * s.tiles_h * s.in_d;
  item.group = index / tiles % GROUPS;
  item.tile = tile_of(index % tiles, s);
  item.tile.n = index / tiles / GROUPS;
#endif
#endif
  return item;
}

// A slice's weights.
__device__ __forceinline__ void load_weights(T (&v)[TAP_BATCH], const T* weight, const Item& item, int co, int kd) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < TAP_BATCH; b++) {
    int i = thread + b * THREADS, c = i % WEIGHTS, tap = kd * (KERNEL_H * KERNEL_W) + i / WEIGHTS;
#if LANES_ARE_CHANNELS
    bool in = item.ci + c < CIN;
    const T* from = weight + (i64)(item.ci + c) * TAPS + tap;
#else
    bool in = c < CI_TILE && item.ci + c < CIN_G;
    const T* from = weight + ((i64)(item.group * CIN_G + item.ci + c) * COUT_G + co) * TAPS + tap;
#endif
    v[b] = 0;
    if (i < TAP_WORDS && in) v[b] = *from;
  }
}

__device__ __forceinline__ void store_weights(Acc* weights, const T (&v)[TAP_BATCH]) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < TAP_BATCH; b++) {
    int i = thread + b * THREADS, tap = i / WEIGHTS;
    if (i < TAP_WORDS) weights[TAP_AT(tap / KERNEL_W, tap % KERNEL_W) + i % WEIGHTS] = load_value(v[b]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
grad_input(const T* __restrict__ g, const T* __restrict__ weight, T* __restrict__ gi, int batch, int in_d, int in_h, int in_w,
           int out_d, int out_h, int out_w, int tiles_h, int tiles_w, int whole_units) {
  extern __shared__ __align__(16) unsigned char memory[];
  Acc *tile = (Acc*)memory, *weights = tile + G_WORDS;
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_h, tiles_w};
#if KW_PARTS > 1
  // Threads of a part take a few columns of the taps for all positions; the parts' sums are added in the end.
  const int part = threadIdx.x / (THREADS / KW_PARTS), worker = threadIdx.x % (THREADS / KW_PARTS);
#else
  const int part = 0, worker = threadIdx.x;
#endif
#if LANES_ARE_CHANNELS
  const int lane = worker & 31, place = worker / 32;
  const int tx = place % TILE_W, ty = place / TILE_W * ROWS, mine = CHANNELS < 32 && lane >= CHANNELS ? CHANNELS - 1 : lane;
  const int at = ty * STEP_H * ROW_PITCH + tx * STEP_W * CHANNELS + mine;
#else
  const int tx = worker % TILE_W, ty = worker / TILE_W * ROWS;
  const int at = ty * STEP_H * ROW_PITCH + tx;
#endif
  const Item item = item_of(blockIdx.x, s);
  Acc acc[ROWS][CI_TILE] = {};
#pragma unroll 1
  for (int slice = 0; slice < COUT_G * KERNEL_D; slice++) {
    const int co = slice / KERNEL_D, kd = slice % KERNEL_D;
    T taps[TAP_BATCH];
    load_weights(taps, weight, item, co, kd);
    if (slice) __syncthreads();            // the slice before has been read
    if (!stage_gradient(tile, g, item.tile, kd, LANES_ARE_CHANNELS ? item.ci : item.group * COUT_G + co, whole_units, s)) continue;
    store_weights(weights, taps);
    __syncthreads();
#pragma unroll UNROLL_W
    for (int j = 0; j < KW_TILE; j++) {
      const int kw = KW_PARTS > 1 ? part * KW_TILE + j : j;
      if (KERNEL_W % KW_TILE && kw >= KERNEL_W) break;
      const Acc* column = tile + at + COLUMN_AT(SHIFT + kw * DIL_W);
#pragma unroll UNROLL_H
      for (int kh = 0; kh < KERNEL_H; kh++) {
        Acc w[WEIGHTS_READ];
        const Acc* from = weights + TAP_AT(kh, kw);
#if LANES_ARE_CHANNELS
        w[0] = from[mine];
#elif CI_TILE == 1
        w[0] = from[0];
#else
#pragma unroll
        for (int i = 0; i < WEIGHTS_READ; i += VEC) {
          Pack pack = *(const Pack*)(from + i);
#pragma unroll
          for (int k = 0; k < VEC; k++) w[i + k] = pack.v[k];
        }
#endif
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          Acc v = column[(r * STEP_H + kh * DIL_H) * ROW_PITCH];
#pragma unroll
          for (int i = 0; i < CI_TILE; i++) acc[r][i] = multiply_add(v, w[i], acc[r][i]);
        }
      }
    }
  }
#if KW_PARTS > 1
  __syncthreads();                         // the last slice has been read
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int i = 0; i < CI_TILE; i++)
      if (part) tile[((part - 1) * (ROWS * CI_TILE) + r * CI_TILE + i) * (THREADS / KW_PARTS) + worker] = acc[r][i];
  __syncthreads();
  if (part) return;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int i = 0; i < CI_TILE; i++)
#pragma unroll
      for (int p = 0; p < KW_PARTS - 1; p++) acc[r][i] += tile[(p * (ROWS * CI_TILE) + r * CI_TILE + i) * (THREADS / KW_PARTS) + worker];
#endif
  const Tile& t = item.tile;
  const i64 pixels = (i64)s.in_d * s.in_h * s.in_w;
#if LANES_ARE_CHANNELS
  if (t.w + tx >= s.in_w || lane >= CHANNELS || item.ci + lane >= CIN) return;
#else
  if (t.w + tx >= s.in_w) return;
#endif
#if CHANNELS_LAST && !LANES_ARE_CHANNELS
  const bool whole_stores = (i64)gi % (STORED * ELEMENT) == 0;
#endif
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (t.h + ty + r >= s.in_h) break;
    i64 q = ((i64)t.d * s.in_h + t.h + ty + r) * s.in_w + t.w + tx;
#if LANES_ARE_CHANNELS
    gi[(t.n * pixels + q) * CIN + item.ci + lane] = store_value(acc[r][0]);
#elif CHANNELS_LAST
    T* pixel = gi + (t.n * pixels + q) * CIN + item.group * CIN_G + item.ci;
#pragma unroll
    for (int i = 0; i < CI_TILE; i += STORED) {
      if (CIN_G % CI_TILE && item.ci + i >= CIN_G) break;
      Unit<STORED> unit;
#pragma unroll
      for (int k = 0; k < STORED; k++) unit.v[k] = store_value(acc[r][i + k]);
      if (STORED == 1 || whole_stores) {
        *(Unit<STORED>*)(pixel + i) = unit;
      } else {
#pragma unroll
        for (int k = 0; k < STORED; k++) pixel[i + k] = unit.v[k];
      }
    }
#else
#pragma unroll
    for (int i = 0; i < CI_TILE; i++)
      if (CIN_G % CI_TILE == 0 || item.ci + i < CIN_G) gi[((i64)t.n * CIN + item.group * CIN_G + item.ci + i) * pixels + q] = store_value(acc[r][i]);
#endif
  }
}

#else
// =====================================================================================================================
// The gradient for the weight
// =====================================================================================================================

#define TAP_GROUPS_W ((KERNEL_W + KW_TILE - 1) / KW_TILE)
#define TAP_GROUPS ((KERNEL_H + KH_TILE - 1) / KH_TILE * TAP_GROUPS_W)
#define POSITION_GROUPS (WARPS / TAP_GROUPS)
#define LANES (LANES_ARE_CHANNELS ? CHANNELS : 1)  // sums of a warp are those of so many channels
#define SUMS (KH_TILE * KW_TILE * CI_TILE)
#define X_TILE (TILE_H * TILE_W)
#if LANES_ARE_CHANNELS
#define STRIPS (X_TILE / ROWS)             // a warp takes a column of ROWS positions
#else
#define STRIPS (X_TILE / ROWS / 32)        // or 32 of them
#endif

#define X_CHANNELS (LANES_ARE_CHANNELS ? CHANNELS : CI_TILE)
#define X_BATCH ((X_CHANNELS * X_TILE + THREADS - 1) / THREADS)  // elements of a thread

// x's tile, zeros beyond its borders: channels of a position (LANES_ARE_CHANNELS), or positions of a channel. Loaded ahead of g's
// tile and stored behind it, so that a block waits for both at once.
__device__ __forceinline__ void load_input(T (&v)[X_BATCH], const T* x, const Tile& t, int first, int left, const Sizes& s) {
  const i64 pixels = (i64)s.in_d * s.in_h * s.in_w;
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < X_BATCH; b++) {
    int i = thread + b * THREADS;
#if CHANNELS_LAST
    int c = i % X_CHANNELS, q = i / X_CHANNELS;
#else
    int c = i / X_TILE, q = i % X_TILE;
#endif
    int h = t.h + q / TILE_W, w = t.w + q % TILE_W;
    i64 at = ((i64)t.d * s.in_h + h) * s.in_w + w;
    v[b] = 0;
    if (i < X_CHANNELS * X_TILE && h < s.in_h && w < s.in_w && c < left)
      v[b] = x[CHANNELS_LAST ? (t.n * pixels + at) * CIN + first + c : ((i64)t.n * CIN + first + c) * pixels + at];
  }
}

__device__ __forceinline__ void store_input(Acc* to, const T (&v)[X_BATCH]) {
  const int thread = thread_index();
#pragma unroll
  for (int b = 0; b < X_BATCH; b++) {
    int i = thread + b * THREADS;
    if (i >= X_CHANNELS * X_TILE) break;
#if CHANNELS_LAST && !LANES_ARE_CHANNELS
    to[i % X_CHANNELS * X_TILE + i / X_CHANNELS] = load_value(v[b]);
#else
    to[i] = load_value(v[b]);
#endif
  }
}

// partial: [splits][CIN][COUT_G][TAPS] accumulators.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
grad_weight(const T* __restrict__ x, const T* __restrict__ g, Acc* __restrict__ partial, int batch, int in_d, int in_h, int in_w,
            int out_d, int out_h, int out_w, int tiles_h, int tiles_w, int whole_units, int per_split) {
  extern __shared__ __align__(16) unsigned char memory[];
  Acc *tile = (Acc*)memory, *x_tile = tile + G_WORDS;
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_h, tiles_w};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u32 index = blockIdx.x;
  const int block = index % CHANNEL_BLOCKS;  index /= CHANNEL_BLOCKS;
#if LANES_ARE_CHANNELS
  const int mine = CHANNELS < 32 && lane >= CHANNELS ? CHANNELS - 1 : lane;
  const int channel = block * CHANNELS, first_co = channel, left = CIN - channel;
#else
  const int group = index % GROUPS;  index /= GROUPS;
  const int channel = group * CIN_G + block * CI_TILE, left = CIN_G - block * CI_TILE;
#endif
  const int co = index % COUT_G;  index /= COUT_G;
  const int kd = index % KERNEL_D, split = index / KERNEL_D;
#if !LANES_ARE_CHANNELS
  const int first_co = group * COUT_G + co;
#endif
  const int tap_group = warp % TAP_GROUPS, position_group = warp / TAP_GROUPS;
  const int first_kh = tap_group / TAP_GROUPS_W * KH_TILE, first_kw = tap_group % TAP_GROUPS_W * KW_TILE;
  int column[KW_TILE];                     // of the warp's taps, in words
#pragma unroll
  for (int j = 0; j < KW_TILE; j++) {
    int kw = first_kw + j < KERNEL_W ? first_kw + j : KERNEL_W - 1;  // sums of taps beyond are not stored
    column[j] = first_kh * DIL_H * ROW_PITCH + COLUMN_AT(SHIFT + kw * DIL_W);
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
#if LANES_ARE_CHANNELS
      const int tx = strip % TILE_W, ty = strip / TILE_W * ROWS;
      const int at = ty * STEP_H * ROW_PITCH + tx * STEP_W * CHANNELS + mine;
#else
      const int tx = (strip * 32 + lane) % TILE_W, ty = (strip * 32 + lane) / TILE_W * ROWS;
      const int at = ty * STEP_H * ROW_PITCH + tx;
#endif
      Acc v[ROWS][CI_TILE];
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < CI_TILE; c++) {
          int q = (ty + r) * TILE_W + tx;
#if LANES_ARE_CHANNELS
          v[r][c] = x_tile[q * CHANNELS + mine];
#else
          v[r][c] = x_tile[c * X_TILE + q];
#endif
        }
#pragma unroll
      for (int j = 0; j < KW_TILE; j++)
#pragma unroll
        for (int kh = 0; kh < KH_TILE; kh++)
#pragma unroll
          for (int r = 0; r < ROWS; r++) {
            Acc met = tile[at + column[j] + (r * STEP_H + kh * DIL_H) * ROW_PITCH];
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
#if !LANES_ARE_CHANNELS
#pragma unroll
        for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
#endif
        if (lane < LANES) sums[(warp * SUMS + (j * KH_TILE + kh) * CI_TILE + c) * LANES + lane] = v;
      }
  __syncthreads();
  for (int i = threadIdx.x; i < TAP_GROUPS * SUMS * LANES; i += THREADS) {
    int which = i / LANES % SUMS, of = i / LANES / SUMS, ch = LANES_ARE_CHANNELS ? i % LANES : which % CI_TILE;
    int kh = of / TAP_GROUPS_W * KH_TILE + which / CI_TILE % KH_TILE, kw = of % TAP_GROUPS_W * KW_TILE + which / CI_TILE / KH_TILE;
    if (kh >= KERNEL_H || kw >= KERNEL_W || ch >= left) continue;
    Acc sum = 0;
    for (int k = 0; k < POSITION_GROUPS; k++) sum += sums[(k * TAP_GROUPS * SUMS * LANES) + i];
    partial[((i64)(split * CIN + channel + ch) * COUT_G + co) * TAPS + (kd * KERNEL_H + kh) * KERNEL_W + kw] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(256)
reduce(const Acc* __restrict__ partial, T* __restrict__ out, int splits, i64 stride_ci, i64 stride_co, i64 stride_tap) {
  const i64 total = (i64)CIN * COUT_G * TAPS;
  i64 e = (i64)blockIdx.x * 256 + threadIdx.x;
  if (e >= total) return;
  Acc sum = 0;
#pragma unroll 8
  for (int i = 0; i < splits; i++) sum += partial[i * total + e];
  i64 tap = e % TAPS, co = e / TAPS % COUT_G, ci = e / ((i64)TAPS * COUT_G);
  out[ci * stride_ci + co * stride_co + tap * stride_tap] = store_value(sum);
}
#endif
