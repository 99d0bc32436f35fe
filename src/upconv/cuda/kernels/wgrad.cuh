// What both grad-weight kernels share: the geometry of g's tile, copies by threads, and the second step.
//
// Rows of x and g in a chunk follow from TILE_*, TAPS_*, STEP_* (stride) and DIL_* (dilation); the sets of taps differ only in where
// their chunks begin.
#include "ptx.cuh"
#include "numbers.cuh"

#define VEC (16 / ELEMENT)                 // elements of a 16-byte unit
#define TAPS (KERNEL_D * KERNEL_H * KERNEL_W)
#define SET_TAPS (TAPS_D * TAPS_H * TAPS_W)
#define SETS (SETS_D * SETS_H * SETS_W)
#define CIN (GROUPS * CIN_G)
#define COUT (GROUPS * COUT_G)

// Rows of g's tile: every APART-th row between the first and the last (dense), the greatest common divisor of stride and dilation
// apart; or TAPS rows for each q when that is fewer.
#define SPAN(tile, step, taps, dil) (((tile) - 1) * (step) + ((taps) - 1) * (dil) + 1)
#define SPAN_D SPAN(TILE_D, STEP_D / APART_D, TAPS_D, DIL_D / APART_D)
#define SPAN_H SPAN(TILE_H, STEP_H / APART_H, TAPS_H, DIL_H / APART_H)
#define DENSE_D (SPAN_D <= TILE_D * TAPS_D)
#define DENSE_H (STACKED || SPAN_H <= TILE_H * TAPS_H)
#if GAPLESS                                // each tap has pixels of its own, one row of them
#define G_ROWS_D 1
#define G_ROWS_H 1
#else
#define G_ROWS_D (DENSE_D ? SPAN_D : TILE_D * TAPS_D)
#define G_ROWS_H (STACKED ? TILE_H * STEP_H : DENSE_H ? SPAN_H : TILE_H * TAPS_H)
#endif
#define G_COLUMNS SPAN(TILE_W, STEP_W, TAPS_W, DIL_W)
#define X_ROWS (TILE_N * TILE_D * X_ROWS_H)
#define CLASS_ROWS ((G_ROWS_H + ROW_CLASSES - 1) / ROW_CLASSES)
#define G_ROWS (TILE_N * G_ROWS_D * (ROW_CLASSES * CLASS_ROWS))
#define ODD(n) ((n) | 1)
#define G_EXTENT ((G_COLUMNS + VEC - 1 + VEC - 1) / VEC)  // units of a row (NCHW)
#if CHANNELS_LAST
// A pitch of 8 words modulo 32 (float32), or of an odd number of units (for ldmatrix).
#define X_PITCH (ELEMENT == 4 ? (BLOCK_CI + 23) / 32 * 32 + 8 : BLOCK_CI + 8)
#if BOX_G
#define G_PITCH BLOCK_CO
#else
#define G_PITCH (ELEMENT == 4 ? (BLOCK_CO + 23) / 32 * 32 + 8 : BLOCK_CO + 8)
#endif
#define X_BYTES (X_ROWS * TILE_W * X_PITCH * ELEMENT)
#if BOX_G
#define G_BYTES (G_BOXES * G_SLAB_BYTES)
#else
#define G_BYTES (G_ROWS * G_COLUMNS * G_PITCH * ELEMENT)
#endif
#else
#define X_UNITS ((TILE_W + (ALIGNED_X ? 0 : VEC - 1) + VEC - 1) / VEC)
#define G_UNITS G_EXTENT
#define X_PITCH (ODD(X_UNITS) * VEC)
#if INTERLEAVED
#define G_PITCH (G_ROW_UNITS * VEC)        // wgrad_boxes.py looks for one with which lanes meet other banks
#else
#define G_PITCH (ODD(G_UNITS) * VEC)
#endif
#define X_BYTES (X_ROWS * BLOCK_CI * X_PITCH * ELEMENT)
#define G_BYTES (G_ROWS * BLOCK_CO * G_PITCH * ELEMENT)
#endif
struct Sizes {
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;           // chunks per axis
  int chunks, per_split;                   // all of them; of one split
#if GAPLESS
  int box_n, box_d, box_h, box_w;          // of a chunk: TILE_W pixels at most
#endif
};

struct Chunk { int n, d, h, w; };          // first q

__device__ __forceinline__ Chunk chunk_at(int i, const Sizes& s) {
  Chunk c;
#if GAPLESS
  c.w = i % s.tiles_w * s.box_w;  i /= s.tiles_w;
  c.h = i % s.tiles_h * s.box_h;  i /= s.tiles_h;
  c.d = i % s.tiles_d * s.box_d;
  c.n = i / s.tiles_d * s.box_n;
#else
  c.w = i % s.tiles_w * TILE_W;  i /= s.tiles_w;
  c.h = i % s.tiles_h * TILE_H;  i /= s.tiles_h;
  c.d = i % s.tiles_d * TILE_D;
  c.n = i / s.tiles_d * TILE_N;
#endif
  return c;
}

// One operand's tile: where it lies in its tensor. (n, d, h) of row `r` of the tile by its kind.
struct Rows { int n, d, h; };
__device__ __forceinline__ Rows x_row(int r) { return {r / (TILE_D * X_ROWS_H), r / X_ROWS_H % TILE_D, r % X_ROWS_H}; }
__device__ __forceinline__ Rows g_row(int r) {
  int h = r % G_ROWS_H, d = r / G_ROWS_H % G_ROWS_D;
  return {r / (G_ROWS_H * G_ROWS_D), DENSE_D ? d * APART_D : d / TAPS_D * STEP_D + d % TAPS_D * DIL_D,
          DENSE_H ? h * APART_H : h / TAPS_H * STEP_H + h % TAPS_H * DIL_H};
}

// =====================================================================================================================
// Copies
// =====================================================================================================================

typedef ELEMENT_BITS bits;

#if CHANNELS_LAST
// A unit that begins at any element: channels_last pixels of an odd number of channels.
__device__ __forceinline__ void copy_elements(unsigned char* to, const char* from, int count) {
#pragma unroll 1
  for (int e = 0; e < VEC; e++) ((bits*)to)[e] = e < count ? ((const bits*)from)[e] : (bits)0;
}
#endif

template <int ROWS, int BLOCK, int COLUMNS_OR_UNITS, int PITCH, int CHANNELS, int CHANNELS_G, bool IS_X>
__device__ __forceinline__ void copy_tile(const char* __restrict__ tensor, int batch, int depth, int height, int width, int n0, int d0, int h0, int w0, int channel, int left, unsigned char* to, int thread) {
  u32 to_address = shared_address(to);
#if CHANNELS_LAST
  constexpr int COLUMNS = COLUMNS_OR_UNITS, UNITS = BLOCK / VEC;
  constexpr bool WHOLE = CHANNELS % VEC == 0 && CHANNELS_G % VEC == 0;
#pragma unroll 4
  for (int i = thread; i < ROWS * COLUMNS * UNITS; i += COPIERS) {
    int unit = i % UNITS, column = i / UNITS % COLUMNS, row = i / (UNITS * COLUMNS);
    Rows at = IS_X ? x_row(row) : g_row(row);
    int n = n0 + at.n, d = d0 + at.d, h = h0 + at.h, w = w0 + column;
    bool in = n < batch && (u32)d < (u32)depth && (u32)h < (u32)height && (u32)w < (u32)width;
    int offset = ((row * COLUMNS + column) * PITCH + unit * VEC) * ELEMENT, have = in ? left - unit * VEC : 0;
    const char* from = tensor + ((((long long)n * depth + d) * height + h) * width + w) * (CHANNELS * ELEMENT) + (channel + unit * VEC) * ELEMENT;
    if (WHOLE || have <= 0) copy16(to_address + offset, have > 0 ? from : tensor, have > 0 ? 16 : 0);
    else copy_elements(to + offset, from, have);
  }
#else
  // Units that hold a border are copied whole; `clear_borders` clears what lies beyond it when they have landed. Copies in
  // parts of 4 bytes, by some of a warp's threads each time, take nearly three times as long.
  // A thread keeps its channel and place in the row for all rows of the tile: an index for each unit makes address arithmetic the bound.
  constexpr int UNITS = COLUMNS_OR_UNITS, ROWS_D = IS_X ? TILE_D : G_ROWS_D, ROWS_H = IS_X ? X_ROWS_H : G_ROWS_H;
  long long plane = (long long)depth * height * width;
#pragma unroll 1
  for (int i = thread; i < BLOCK * UNITS; i += COPIERS) {
    int unit = i % UNITS, c = i / UNITS;
    u32 offset = (c * PITCH + unit * VEC) * ELEMENT;
#pragma unroll 1
    for (int r = 0; r < ROWS / ROWS_H; r++) {
      Rows at = IS_X ? x_row(r * ROWS_H) : g_row(r * ROWS_H);
      int n = n0 + at.n, d = d0 + at.d;
      bool slice = n < batch && (u32)d < (u32)depth && c < left;
      const char* base = tensor + (((long long)n * CHANNELS + channel + c) * plane + (long long)d * height * width + w0) * ELEMENT;
#pragma unroll 2
      for (int rh = 0; rh < ROWS_H; rh++, offset += BLOCK * PITCH * ELEMENT) {
        int h = h0 + (IS_X ? rh : DENSE_H ? rh * APART_H : rh / TAPS_H * STEP_H + rh % TAPS_H * DIL_H);
        const char* from = base + (long long)h * (width * ELEMENT);
        int misaligned = (int)((u64)from & 15), first = w0 + (unit * 16 - misaligned) / ELEMENT;  // column of the first element
        from += unit * 16 - misaligned;
        bool in = slice && (u32)h < (u32)height && first + VEC > 0 && first < width;
        copy16(to_address + offset, in ? from : tensor, in ? 16 : 0);
      }
    }
  }
#endif
}

#if !CHANNELS_LAST
__device__ __forceinline__ bool has_borders(int w0, int columns, int width) { return w0 < 0 || w0 + columns > width; }

// Clears elements before column 0 and from column `width` on, in the units that hold such a border.
template <int ROWS, int BLOCK, int UNITS, int PITCH, int CHANNELS, bool IS_X>
__device__ __forceinline__ void clear_borders(const char* tensor, int depth, int height, int width, int n0, int d0, int h0, int w0, int channel, unsigned char* to, int thread) {
  u32 plane = (u32)depth * height * width;
#pragma unroll 1
  for (int i = thread; i < ROWS * BLOCK; i += COPIERS) {
    int c = i % BLOCK, row = i / BLOCK;
    Rows at = IS_X ? x_row(row) : g_row(row);
    u32 first = (u32)((u64)tensor / ELEMENT) + ((u32)(n0 + at.n) * CHANNELS + channel + c) * plane + ((u32)(d0 + at.d) * height + h0 + at.h) * width + w0;
    int zero = (int)(first & (VEC - 1)) - w0, end = zero + width;  // elements of column 0 and of the one behind the last
    bits* line = (bits*)(to + (row * BLOCK + c) * PITCH * ELEMENT);
    if (zero > 0 && zero < UNITS * VEC)
      for (int e = zero & ~(VEC - 1); e < zero; e++) line[e] = 0;
    if (end > 0 && end < UNITS * VEC)
      for (int e = end; e & (VEC - 1); e++) line[e] = 0;
  }
}
#endif

// =====================================================================================================================
// The second step: slices are added in the order of their index. A block takes 32 of the innermost channels of some rows of a
// slice. Of large weights these are 64 rows (REDUCE_ROWS), turned through shared memory, so that slices are read and the weight is written in
// whole sectors; of small ones it is one row, and the block's warps divide
// the slices, since more rows leave blocks idle.
// =====================================================================================================================

#define RUNS 8                             // warps of a block

#if CI_INNERMOST                           // slices: [tap][COUT][CIN_G], else [tap][CIN][COUT_G]
#define INNERMOST CIN_G
#define SLICE_ROWS (COUT * TAPS)
#else
#define INNERMOST COUT_G
#define SLICE_ROWS (CIN * TAPS)
#endif

struct SliceRow {
  long long from, to;                      // first element in a slice, and in the weight
};

// Rows are counted as the weight has them.
__device__ __forceinline__ SliceRow slice_row(int row, long long stride_ci, long long stride_co, long long stride_tap) {
#if CI_INNERMOST
  int group = row / (COUT_G * TAPS), j = row % (COUT_G * TAPS);
  bool taps_inside = stride_tap <= stride_co;
  int co = taps_inside ? j / TAPS : j % COUT_G, tap = taps_inside ? j % TAPS : j / COUT_G;
  return {((long long)tap * COUT + group * COUT_G + co) * CIN_G, group * CIN_G * stride_ci + co * stride_co + tap * stride_tap};
#else
  int ci = row / TAPS, tap = row % TAPS;
  return {((long long)tap * CIN + ci) * COUT_G, ci * stride_ci + tap * stride_tap};
#endif
}

#if ELEMENT == 2                           // for a float32 weight under autocast sums stay what they are
__device__ __forceinline__ void store_sum(bits* to, float v) { *to = (bits)STORE_BITS(v); }
__device__ __forceinline__ void store_sum(float* to, float v) { *to = v; }

template <class Out>
__device__ __forceinline__ void reduce_as(const float* __restrict__ partial, Out* __restrict__ out, int slices, long long stride_ci, long long stride_co, long long stride_tap) {
#else
extern "C" __global__ void __launch_bounds__(32 * RUNS)
reduce(const float* __restrict__ partial, bits* __restrict__ out, int slices, long long stride_ci, long long stride_co, long long stride_tap) {
#endif
  __shared__ float sums[REDUCE_ROWS < RUNS ? RUNS : REDUCE_ROWS][33];
  const long long total = (long long)TAPS * CIN * COUT_G;
  constexpr int COLUMNS_OF_BLOCKS = (INNERMOST + 31) / 32, ROWS_EACH = REDUCE_ROWS < RUNS ? 1 : REDUCE_ROWS / RUNS;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int c = blockIdx.x % COLUMNS_OF_BLOCKS * 32 + lane, first = blockIdx.x / COLUMNS_OF_BLOCKS * REDUCE_ROWS;
  int share = REDUCE_ROWS == 1 ? (slices + RUNS - 1) / RUNS : slices, begin = REDUCE_ROWS == 1 ? warp * share : 0, end = begin + share < slices ? begin + share : slices;
  long long from[ROWS_EACH];
  float sum[ROWS_EACH];
#pragma unroll
  for (int k = 0; k < ROWS_EACH; k++) {
    int row = REDUCE_ROWS == 1 ? first : first + warp + k * RUNS;
    from[k] = row < SLICE_ROWS && c < INNERMOST ? slice_row(row, stride_ci, stride_co, stride_tap).from + c : -1;
    sum[k] = 0.f;
  }
#pragma unroll REDUCE_ROWS == 1 ? 8 : 2
  for (int i = begin; i < end; i++)
#pragma unroll
    for (int k = 0; k < ROWS_EACH; k++)
      if (from[k] >= 0) sum[k] += partial[i * total + from[k]];
#pragma unroll
  for (int k = 0; k < ROWS_EACH; k++) sums[warp + k * RUNS][lane] = sum[k];
  __syncthreads();
  if (REDUCE_ROWS == 1) {
    if (warp) return;
#pragma unroll
    for (int run = 1; run < RUNS; run++) sum[0] += sums[run][lane];
    sums[0][lane] = sum[0];
    __syncwarp();
  }
  long long stride_c = CI_INNERMOST ? stride_ci : stride_co;
  c -= lane;
#pragma unroll 1
  for (int i = threadIdx.x; i < REDUCE_ROWS * 32; i += 32 * RUNS) {  // neighbouring threads write neighbours
    int row = stride_c == 1 ? i / 32 : i % REDUCE_ROWS, column = stride_c == 1 ? i % 32 : i / REDUCE_ROWS;
    if (first + row >= SLICE_ROWS || c + column >= INNERMOST) continue;
    long long to = slice_row(first + row, stride_ci, stride_co, stride_tap).to + (c + column) * stride_c;
#if ELEMENT == 2
    store_sum(out + to, sums[row][column]);
#else
    out[to] = __float_as_uint(sums[row][column]);
#endif
  }
}

#if ELEMENT == 2
extern "C" __global__ void __launch_bounds__(32 * RUNS)
reduce(const float* __restrict__ partial, bits* __restrict__ out, int slices, long long stride_ci, long long stride_co, long long stride_tap) {
  reduce_as(partial, out, slices, stride_ci, stride_co, stride_tap);
}
extern "C" __global__ void __launch_bounds__(32 * RUNS)
reduce_float(const float* __restrict__ partial, float* __restrict__ out, int slices, long long stride_ci, long long stride_co, long long stride_tap) {
  reduce_as(partial, out, slices, stride_ci, stride_co, stride_tap);
}
#endif
