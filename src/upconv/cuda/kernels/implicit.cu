// Implicit GEMM: forward and gradient for the input of channels-last layers on tensor cores, one tap at a time. Pixels are the rows of a
// matrix instruction (M), channels of the result its columns (N); K is taps x channels of the source, CK channels of a tap at a time.
// A stage of the ring has, for such a step, the pixels that the tap reads for a tile, by a box of the tensor copy engine, and its
// weights, by another; both are swizzled, float32 is rounded to TF32 on its way, and both operands are read by descriptors.
//
// A forward's results are of PHASES: a tile has neighbouring ones of a phase, its steps are of the phase's taps alone, and what it stores
// is OUT_STEP apart. Tiles of the same pixels follow each other, a phase each, for L2's sake, and a block has another phase each time; or,
// where tiles are few, those of most taps come first.
//
// Taps share nothing, so that a tile is a box of any shape: its pixels follow each other in shared memory, whatever rows they lie in, and
// images of 14 x 14 fill it, where tiles of whole rows leave a quarter empty. (`gather`, whose taps are shifts of one
// tile, reads a pixel once for several taps; where the kernel is the stride there is nothing to share.) A launch tells the box. Rows of a tile
// that its box leaves out are whatever shared memory had: a row of M is a pixel of the result alone, and these are not stored.
//
// Consumers halve a tile's pixels (HALVES), or take whole tiles in turn, so that one stores while another multiplies. Where tiles are
// few, CLUSTER blocks have one together, each a share of its steps, and add up their sums in shared memory, in the order of their rank.
//
// Weights are packed, channels of the source side by side. As channels-last weights lie they serve too: a gradient's are those rows, and
// a forward's of 16 bits have channels of the result side by side (B_TURNED), which tensor cores read as well, 64 of them a box.
//
// Constants come as macros (cuda/pixels/implicit.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#define A_SHARED 1
#include "wgmma.cuh"

#define VEC (16 / ELEMENT)
#define ROW_BYTES (CK * ELEMENT)                        // a pixel's row in a stage, a column's of the weights: 32, 64 or 128
#define K_STEPS (ROW_BYTES / 32)                        // a matrix instruction takes 32 bytes of K
#define CHUNKS ((CIN + CK - 1) / CK)
#define COLUMN_BLOCKS ((COUT + COLUMNS - 1) / COLUMNS)
#define ROWS (64 * MB * (HALVES ? CONSUMERS : 1))       // pixels of a tile, at most
#define PIXEL_BYTES (ROWS * ROW_BYTES)
#define STAGE_BYTES (PIXEL_BYTES + (COLUMNS * ROW_BYTES + 1023) / 1024 * 1024)
#define SUMS_OF_M (COLUMNS / 2)                         // a thread's of 64 pixels
#define THREADS (128 + CONSUMERS * 128)
#define LAG (STAGES > 3)                                // stages that instructions still read while the next one's are queued

#define STORE_COLUMNS COLUMNS
#include "pixel_stores.cuh"
#include "columns.cuh"
#include "ring.cuh"

__constant__ const int TAP_D[] = TAPS_D;                // the pixel that a tap reads, from a result's times STEP
__constant__ const int TAP_H[] = TAPS_H;
__constant__ const int TAP_W[] = TAPS_W;
#if PHASES > 1
__constant__ const int TAP_OF[] = TAPS_OF;              // of the kernel; those of a phase follow each other
__constant__ const int PHASE_TAP[] = PHASES_TAP;        // a phase's first, and behind the last phase's
__constant__ const int PHASE_D[] = PHASES_D;            // a phase's first result
__constant__ const int PHASE_H[] = PHASES_H;
__constant__ const int PHASE_W[] = PHASES_W;
#endif

struct TensorMaps { TensorMap source, weights; };

struct Sizes {
  int out_n, out_d, out_h, out_w;                       // of the result
  int box_n, box_d, box_h, box_w;                       // of a tile: ROWS pixels at most
  int tiles_d, tiles_h, tiles_w, tiles;                 // along these axes, of a phase; all, with phases and blocks of columns
  int abreast, turn;                                    // tiles of a phase before those of the next; tiles of which the first phase is another
};

struct Tile { int n, d, h, w, column, phase; };         // first pixel (of the phase's) and column

__device__ __forceinline__ Tile tile_at(int q, const Sizes& s) {
  Tile t;
  t.column = q % COLUMN_BLOCKS * COLUMNS;  q /= COLUMN_BLOCKS;  // blocks of the same pixels are neighbours, for L2's sake
  t.phase = 0;
#if PHASES > 1
  int first = q / (PHASES * s.abreast) * s.abreast, rest = q - first * PHASES;
  int width = min(s.abreast, s.tiles / (COLUMN_BLOCKS * PHASES) - first);  // the last ones are fewer
  t.phase = (rest / width + first / s.turn) % PHASES;
  q = first + rest % width;
#endif
  t.w = q % s.tiles_w * s.box_w;  q /= s.tiles_w;
  t.h = q % s.tiles_h * s.box_h;  q /= s.tiles_h;
  t.d = q % s.tiles_d * s.box_d;
  t.n = q / s.tiles_d * s.box_n;
  return t;
}

// The tiles of a block: the first, and from one to the next.
#if CLUSTER > 1
#define RANK ((int)(blockIdx.x % CLUSTER))
#define FIRST_TILE (int)(blockIdx.x / CLUSTER)
#define NEXT_TILE (1 << 30)                             // one is all
#else
#define FIRST_TILE (int)blockIdx.x
#define NEXT_TILE (int)gridDim.x
#define RANK 0
#endif

// The steps of a tile that are the block's own, a tap's chunk each; they count from the first tap of all.
struct Steps { int first, end; };

__device__ __forceinline__ Steps steps_of(const Tile& t) {
#if PHASES > 1
  const int begin = PHASE_TAP[t.phase] * CHUNKS, count = PHASE_TAP[t.phase + 1] * CHUNKS - begin;
#else
  const int begin = 0, count = TAPS * CHUNKS;
#endif
  Steps own = {begin + RANK * count / CLUSTER, begin + (RANK + 1) * count / CLUSTER};
  return own;
}

// =====================================================================================================================
// Weights that do not lie as boxes want them: to [channel of the result][tap][channel of the source], channels-last.
// =====================================================================================================================

// The weight is contiguous, or channels-last, whose taps are `tap_step` elements apart.
#if FORWARD
// (CIN, COUT, kernel): a row for each channel of the source, and packed a column. Blocks turn a square of it in shared memory.
#define ROW (COUT * TAPS)
#define SQUARE 64
#define SQUARES ((ROW + SQUARE - 1) / SQUARE)           // of a row

template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  __shared__ u32 square[SQUARE][SQUARE + 1];
  let_dependent_begin();
  const int column = blockIdx.x % SQUARES * SQUARE, channel = blockIdx.x / SQUARES * SQUARE;
  // A thread's loads are all under way at once: a branch around each would keep them apart. What is not there is loaded from elsewhere.
  constexpr int ROWS_AT_ONCE = PACK_THREADS / SQUARE, LOADS = SQUARE / ROWS_AT_ONCE;
  const int within = threadIdx.x % SQUARE, row = threadIdx.x / SQUARE;
  const int from = min(column + within, ROW - 1);
  Weight v[LOADS];
#pragma unroll
  for (int j = 0; j < LOADS; j++) v[j] = weight[(long long)min(channel + row + j * ROWS_AT_ONCE, CIN - 1) * ROW + from];
#pragma unroll
  for (int j = 0; j < LOADS; j++) square[within][row + j * ROWS_AT_ONCE] = operand(v[j]);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < SQUARE * SQUARE / VEC / PACK_THREADS; j++) {
    int i = j * PACK_THREADS + threadIdx.x, at = column + i / (SQUARE / VEC), first = i % (SQUARE / VEC) * VEC;
    if (at >= ROW || channel + first >= CIN) continue;
    u32 v[VEC];
#pragma unroll
    for (int e = 0; e < VEC; e++) v[e] = square[at - column][first + e];
    const long long row = tap_step == 1 ? at : at % COUT * TAPS + at / COUT;
    write_operands(packed + (row * CIN + channel + first) * ELEMENT, v);
  }
}
#else
// (COUT, CIN, kernel): packed, a channel's taps and its channels of the source change places, PACK_CHANNELS of them by a block.
#define PARTS ((CIN + PACK_CHANNELS - 1) / PACK_CHANNELS)
#define PART (PACK_CHANNELS * TAPS)

template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  __shared__ u32 turned[TAPS][PACK_CHANNELS + 1];
  let_dependent_begin();
  const int first = blockIdx.x % PARTS * PACK_CHANNELS;
  const long long row = (long long)(blockIdx.x / PARTS) * (CIN * TAPS);
  if (tap_step == 1) {                                  // loads as above
    constexpr int LOADS = (PART + PACK_THREADS - 1) / PACK_THREADS;
    const int count = min(PACK_CHANNELS, CIN - first) * TAPS;
    Weight v[LOADS];
#pragma unroll
    for (int j = 0; j < LOADS; j++) v[j] = weight[row + first * TAPS + min(j * PACK_THREADS + (int)threadIdx.x, count - 1)];
#pragma unroll
    for (int j = 0; j < LOADS; j++) {
      int i = j * PACK_THREADS + threadIdx.x;
      if (i < count) turned[i % TAPS][i / TAPS] = operand(v[j]);
    }
    __syncthreads();
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < PART / VEC; i += PACK_THREADS) {
    int tap = i / (PACK_CHANNELS / VEC), unit = i % (PACK_CHANNELS / VEC) * VEC;
    if (first + unit >= CIN) continue;
    u32 v[VEC];
#pragma unroll
    for (int e = 0; e < VEC; e++) v[e] = tap_step == 1 ? turned[tap][unit + e] : operand(weight[row + tap * tap_step + first + unit + e]);
    write_operands(packed + (row + tap * CIN + first + unit) * ELEMENT, v);
  }
}
#endif

#include "columns_pack.cuh"

// =====================================================================================================================
// Producer: one thread
// =====================================================================================================================

__device__ __forceinline__ void produce(const TensorMaps& maps, const Sizes& s, u32 ring, u32 full, u32 empty) {
  Cursor cursor = {0, 1};                               // all are free at first
  const u32 bytes = (s.box_n * s.box_d * s.box_h * s.box_w + COLUMNS) * ROW_BYTES;
  wait_for_results();                                   // of `pack`
#pragma unroll 1
  for (int index = FIRST_TILE; index < s.tiles; index += NEXT_TILE) {
    const Tile t = tile_at(index, s);
    const Steps own = steps_of(t);
#pragma unroll 1
    for (int step = own.first; step < own.end; step++, cursor.next()) {
      const int tap = step / CHUNKS, channel = step % CHUNKS * CK;
      u32 barrier = full + cursor.stage * 8, to = ring + cursor.stage * STAGE_BYTES;
      barrier_wait(empty + cursor.stage * 8, cursor.parity);
      expect_bytes(barrier, bytes);
      load_box(to, maps.source, channel, t.w * STEP_W + TAP_W[tap], t.h * STEP_H + TAP_H[tap], t.d * STEP_D + TAP_D[tap], t.n, barrier);
#if PHASES > 1
      const int kernel_tap = TAP_OF[tap];
#else
      const int kernel_tap = tap;
#endif
#if B_TURNED
#pragma unroll
      for (int i = 0; i < COLUMNS / 64; i++)
        load_box(to + PIXEL_BYTES + i * (CK * 128), maps.weights, t.column + 64 * i, kernel_tap, channel, 0, 0, barrier);
#else
      load_box(to + PIXEL_BYTES, maps.weights, channel, kernel_tap, t.column, 0, 0, barrier);
#endif
    }
  }
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

// Rows of ROW_BYTES, swizzled, one behind the other.
__device__ __forceinline__ u64 descriptor(u32 start) {
  constexpr u32 SWIZZLE = ROW_BYTES == 32 ? 3u : ROW_BYTES == 64 ? 2u : 1u;
  return (u64)((8 * ROW_BYTES) >> 4 | SWIZZLE << 30) << 32 | (start | 1u << 16);
}

#if B_TURNED
// Rows of 64 channels of the result, swizzled; those of the next 64 are CK rows away.
#define B_STEP (16 * 128 / 16)                          // from a matrix instruction's rows to the next one's, in units
__device__ __forceinline__ u64 descriptor_of_weights(u32 start) {
  return (u64)((8 * 128) >> 4 | 1u << 30) << 32 | (start | (u32)(CK * 128 >> 4) << 16);
}
#else
#define B_STEP 2
#define descriptor_of_weights descriptor
#endif

// acc += a stage's pixels x its weights, both as descriptors have them.
__device__ __forceinline__ void multiply_stage(float (&acc)[MB][SUMS_OF_M], u32 pixels, u32 weights) {
  u32 a = uniform(pixels & 0x3fff), b = uniform(weights & 0x3fff);  // of a cluster's blocks addresses have more bits
#pragma unroll
  for (int k = 0; k < K_STEPS; k++)
#pragma unroll
    for (int m = 0; m < MB; m++) multiply(acc[m], descriptor(a + m * (64 * ROW_BYTES / 16) + k * 2), descriptor_of_weights(b + k * B_STEP));
}

// Where row `row` of a tile is in the result, or nowhere.
__device__ __forceinline__ char* place_of(char* y, const Sizes& s, const Tile& t, int row, bool& there) {
  int w = row % s.box_w, rest = row / s.box_w, h = rest % s.box_h;
  rest /= s.box_h;
  int d = rest % s.box_d, n = rest / s.box_d;
  there = n < s.box_n;
  n += t.n, d += t.d, h += t.h, w += t.w;
#if PHASES > 1
  d = d * OUT_STEP_D + PHASE_D[t.phase], h = h * OUT_STEP_H + PHASE_H[t.phase], w = w * OUT_STEP_W + PHASE_W[t.phase];
#endif
  there = there && n < s.out_n && d < s.out_d && h < s.out_h && w < s.out_w;
  return y + ((((long long)n * s.out_d + d) * s.out_h + h) * s.out_w + w) * (COUT * ELEMENT) + t.column * ELEMENT;
}

#if CLUSTER > 1
#define QUADS (MB * COLUMNS / 8)                        // of four sums, a thread's
#define SUM_AT(i, thread) (((i) * (CONSUMERS * 128) + (thread)) * 16)

// Sums to shared memory, where all blocks of the cluster find them.
__device__ __forceinline__ void publish(const float (&acc)[MB][SUMS_OF_M], u32 memory, int thread) {
  named_sync<4, CONSUMERS * 128>();                     // nobody reads a stage any more
#pragma unroll
  for (int i = 0; i < QUADS; i++) {
    const float* v = &acc[i / (COLUMNS / 8)][i % (COLUMNS / 8) * 4];
    store_shared_f32x4(memory + SUM_AT(i, thread), v[0], v[1], v[2], v[3]);
  }
  cluster_sync();
}

// Four sums of all blocks, in the order of their rank.
__device__ __forceinline__ void add_up(float (&acc)[MB][SUMS_OF_M], u32 memory, int i, int thread) {
  float v[CLUSTER][4];
#pragma unroll
  for (int rank = 0; rank < CLUSTER; rank++) load_cluster_128(v[rank], memory + SUM_AT(i, thread), rank);
#pragma unroll
  for (int e = 0; e < 4; e++) {
    float sum = v[0][e];
#pragma unroll
    for (int rank = 1; rank < CLUSTER; rank++) sum += v[rank][e];
    acc[i / (COLUMNS / 8)][i % (COLUMNS / 8) * 4 + e] = sum;
  }
}
#endif

// `first`: of the tile's rows, the consumer's.
__device__ __forceinline__ void store(float (&acc)[MB][SUMS_OF_M], char* __restrict__ y, const Sizes& s, const Tile& t, int first, u32 memory, int thread) {
  const int lane = thread & 31, left = COUT - t.column;
#if CLUSTER > 1
  publish(acc, memory, first / (64 * MB) * 128 + thread);
#endif
#pragma unroll
  for (int m = 0; m < MB; m++) {
    const int row = first + m * 64 + (thread >> 5) * 16 + (lane >> 2);
    bool there[2];
    char* pixel[2];
#pragma unroll
    for (int eight = 0; eight < 2; eight++) pixel[eight] = place_of(y, s, t, row + eight * 8, there[eight]);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
#if CLUSTER > 1
      if ((m * UNITS + i) % CLUSTER != RANK) continue;
#pragma unroll
      for (int j = 0; j < UNIT / 8; j++) add_up(acc, memory, (m * UNITS + i) * (UNIT / 8) + j, first / (64 * MB) * 128 + thread);
#endif
#pragma unroll
      for (int eight = 0; eight < 2; eight++) store_unit(acc[m], i, eight, pixel[eight], left, there[eight], lane);
    }
  }
#if CLUSTER > 1
  cluster_sync();                                       // none reads this block's any more
#endif
}

// Sums begin with the bias (of a cluster the first block's); `first`: the thread's first column.
__device__ __forceinline__ void begin_sums(float (&acc)[MB][SUMS_OF_M], const ELEMENT_TYPE* __restrict__ bias, int first) {
#pragma unroll
  for (int i = 0; i < SUMS_OF_M; i++) {
    int column = first + i / 4 * 8 + i % 2;
    float b = i % 4 < 2 && bias && column < COUT ? VALUE(bias[column]) : 0.f;
#pragma unroll
    for (int m = 0; m < MB; m++) {
      acc[m][i] = i % 4 < 2 ? b : acc[m][i - 2];        // pixels g and g + 8 of a column
      opaque(acc[m][i]);
    }
  }
}

__device__ __forceinline__ void consume(char* y, const ELEMENT_TYPE* bias, const Sizes& s, u32 ring, u32 full, u32 empty, int wg, int thread) {
  int lane = thread & 31, turn = 0;
  Cursor cursor = {0, 0};
  const int first = HALVES ? wg * (64 * MB) : 0;
  if (!HALVES && wg == CONSUMERS - 1) named_arrive(1, 256);  // the first turn is consumer 0's
  float acc[MB][SUMS_OF_M];
#pragma unroll 1
  for (int index = FIRST_TILE; index < s.tiles; index += NEXT_TILE) {
    bool mine = HALVES || turn == wg;
    turn = turn + 1 == CONSUMERS ? 0 : turn + 1;
    const Tile t = tile_at(index, s);
    const Steps own = steps_of(t);
    if (!mine) {
      cursor.move(own.end - own.first);
      continue;
    }
    begin_sums(acc, CLUSTER == 1 || RANK == 0 ? bias : nullptr, t.column + lane % 4 * 2);
    if (!HALVES) named_sync(1 + wg, 256);
    u32 behind = 0;                                     // the stage that instructions under way read
#pragma unroll 1
    for (int step = own.first; step < own.end; step++, cursor.next()) {
      barrier_wait(full + cursor.stage * 8, cursor.parity);
      wgmma_fence();
      u32 stage = (ring + cursor.stage * STAGE_BYTES) >> 4;
      multiply_stage(acc, stage + first * (ROW_BYTES / 16), stage + PIXEL_BYTES / 16);
      wgmma_commit();
      wgmma_wait<LAG>();
      if (LAG) give_back(behind, lane);
      behind = empty + cursor.stage * 8;
      if (!LAG) give_back(behind, lane);
    }
    if (!HALVES) named_arrive(1 + (wg + 1 == CONSUMERS ? 0 : wg + 1), 256);
    wgmma_wait<0>();
    if (LAG) give_back(behind, lane);
    store(acc, y, s, tile_at(index, s), first, ring, thread);
  }
}

// =====================================================================================================================

#define BARRIERS_AT (STAGES * STAGE_BYTES)
#define SHARED_BYTES (BARRIERS_AT + 16 * STAGES)
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif
#if CLUSTER > 1 && (!HALVES || CONSUMERS * 128 * MB * SUMS_OF_M * 4 > BARRIERS_AT)
#error "a block's sums have no room where its stages were"
#endif

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER)
#endif
__launch_bounds__(THREADS, 1)
implicit(char* __restrict__ y, const ELEMENT_TYPE* __restrict__ bias, int out_n, int out_d, int out_h, int out_w, int box_n, int box_d, int box_h, int box_w,
         int tiles_d, int tiles_h, int tiles_w, int tiles, int abreast, int turn, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {out_n, out_d, out_h, out_w, box_n, box_d, box_h, box_w, tiles_d, tiles_h, tiles_w, tiles, abreast, turn};
  u32 ring = shared_address(memory), full = ring + BARRIERS_AT, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, HALVES ? 4 * CONSUMERS : 4);
    }
    barriers_begun();
  }
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (role == 0) {
    fewer_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(maps, s, ring, full, empty);
  } else {
    more_registers<CONSUMER_REGISTERS>();
    wait_for_results();                                 // of `pack`: nothing is stored where it may still read
    consume(y, bias, s, ring, full, empty, role - 1, threadIdx.x & 127);
  }
}
