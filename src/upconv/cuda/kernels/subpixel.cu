// Subpixel: a transposed convolution whose kernel is its stride, forward, NCHW, on tensor cores. Every output has one tap, so that it is
// a product of matrices, pixels x channels by channels x (taps x output channels), whose rows go to neighbouring outputs. No pixel
// has a halo: an image's pixels are one row each channel, whatever its width.
//
// Pixels are M, columns (kernel row, output channel, tap of W) N. So float32 pixels are fragments of A that lanes read from a
// channel's row as it lies, and nothing turns pixels in shared memory, which bounds `gather` for many channels; of 16 bits A is a
// descriptor, since those may lie along M. Weights are B, by descriptor, through the same ring.
//
// A block has PIXELS pixels of an image times COLUMNS columns at a time; its consumers halve the pixels. One thread brings both
// operands. Two neighbouring columns of a thread's sums are taps of W side by side, so that it stores them together.
//
// Constants come as macros (cuda/pixels/subpixel.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#define A_SHARED (ELEMENT == 2)
#define A_TURNED 1                                      // pixels lie along M
#include "wgmma.cuh"

#include "numbers.cuh"

#define VEC (16 / ELEMENT)
#include "columns.cuh"
#include "ring.cuh"

#define CONSUMERS 2
#define PIXELS (CONSUMERS * MB * 64)
#define CK (128 / ELEMENT)                              // channels of a chunk: a column's row has 128 bytes
#define ROW_PIXELS (128 / ELEMENT)                      // pixels of a row in shared memory, of one channel
#define CHUNKS ((CIN + CK - 1) / CK)
#define K_STEPS 4                                       // of a chunk: a matrix instruction takes 32 bytes of K
#define BOX_BYTES (CK * 128)                            // of ROW_PIXELS pixels
#define BOXES (PIXELS / ROW_PIXELS)
#define WEIGHT_BYTES (COLUMNS * 128)
#define STAGE_BYTES (BOXES * BOX_BYTES + WEIGHT_BYTES)
#define ALL_COLUMNS (COUT * KERNEL_D * KERNEL_H * KERNEL_W)
#define BLOCKS_N ((ALL_COLUMNS + COLUMNS - 1) / COLUMNS)
#define THREADS (128 + CONSUMERS * 128)

#define CHANNEL_OF(column) ((column) / KERNEL_W % COUT)
#include "places.cuh"

struct Sizes {
  int batch, in_h, in_w, pixels;                        // of an image
  int tiles_p, tiles;                                   // tiles of an image's pixels; all, times BLOCKS_N
};

struct Tile { int n, p, block; };                       // image, first pixel, block of columns

// Neighbouring blocks have the same pixels.
__device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  int block = index % BLOCKS_N, q = index / BLOCKS_N;
  return {q / s.tiles_p, q % s.tiles_p * PIXELS, block};
}

// =====================================================================================================================
// Weights
// =====================================================================================================================

#define PACK_UNITS (BLOCKS_N * CHUNKS * COLUMNS * 8)

// [block][chunk][column][128 bytes of channels, swizzled], zeros where there is none of either; a thread writes 16 bytes. The weight is
// (CIN, COUT, kernel): contiguous, or channels-last, whose taps are `tap_step` elements apart.
template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  let_dependent_begin();                                // `subpixel`
  int i = blockIdx.x * PACK_THREADS + threadIdx.x;
  if (i >= PACK_UNITS) return;
  int unit = i % 8, column = i / 8 % COLUMNS, rest = i / (8 * COLUMNS), chunk = rest % CHUNKS;
  int of = rest / CHUNKS * COLUMNS + column;
  int kw = of % KERNEL_W, cout = of / KERNEL_W % COUT, tap = of / (KERNEL_W * COUT) * KERNEL_W + kw;
  constexpr int KERNEL = KERNEL_D * KERNEL_H * KERNEL_W;
  u32 v[VEC];
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    int cin = chunk * CK + channel_at(unit * VEC + e);
    int at = cin * (COUT * KERNEL) + (tap_step == 1 ? cout * KERNEL + tap : tap * tap_step + cout);
    v[e] = cin < CIN && of < ALL_COLUMNS ? operand(weight[at]) : 0;
  }
  write_operands(packed + (long long)(i - unit) * 16 + ((unit ^ (column & 7)) << 4), v);
}

#include "columns_pack.cuh"

// =====================================================================================================================
// Producer: one thread
// =====================================================================================================================

__device__ __forceinline__ void produce(const TensorMap& map, const char* __restrict__ packed, const Sizes& s, u32 ring, u32 full, u32 empty) {
  Cursor cursor = {0, 1};                               // all are free at first
  bool packing = true;
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    Tile t = tile_at(index, s);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, cursor.next()) {
      u32 to = ring + cursor.stage * STAGE_BYTES, barrier = full + cursor.stage * 8;
      barrier_wait(empty + cursor.stage * 8, cursor.parity);
      expect_bytes(barrier, STAGE_BYTES);
#pragma unroll
      for (int b = 0; b < BOXES; b++)
        load_box(to + b * BOX_BYTES, map, t.p + b * ROW_PIXELS, chunk * CK, t.n, 0, 0, barrier);
      if (packing) wait_for_results();                  // of `pack`
      packing = false;
      const char* from = packed + ((long long)t.block * CHUNKS + chunk) * WEIGHT_BYTES;
      copy_bulk(to + BOXES * BOX_BYTES, from, WEIGHT_BYTES, barrier);
    }
  }
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

#if ELEMENT == 4
// Fragments of steps `first` and `first` + 1: lanes' pixels g and g + 8 of a row, of two channels.
__device__ __forceinline__ void load_fragments(u32 (&a)[HALF][MB][4], u32 from, int first, int t) {
#pragma unroll
  for (int step = 0; step < HALF; step++)
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        // Eight pixels are two units of 16 bytes; channel c = 8 (first + step) + 2t + i / 2 has them swapped by c % 8.
        const int c = 8 * (first + step) + i / 2;
        u32 at = from + m * (64 / ROW_PIXELS * BOX_BYTES) + c * 128;
        a[step][m][i] = load_shared_u32(at ^ ((i / 2) << 4) ^ ((i % 2) << 5));
      }
}

#endif

// A thread's sums: of columns 8j + 2t and the next, pixels g and g + 8 of MB x 64. PAIRS: pixels 2i and 2i + 1 are in one row and have
// two taps of W each; lanes of neighbouring g exchange, so that an even one stores 8 bytes from g on, an odd one from g + 7.
template <bool PAIRS>
__device__ __forceinline__ void store(const float (&acc)[MB][COLUMNS / 2], char* __restrict__ y, const Sizes& s, const Tile& t, int wg, int thread) {
  int lane = thread & 31, odd = lane >> 2 & 1, out_w = s.in_w * KERNEL_W, out_h = s.in_h * KERNEL_H;
  int plane = s.pixels * (KERNEL_D * KERNEL_H * KERNEL_W);
  y += (long long)t.n * COUT * plane * ELEMENT;
  constexpr int STORES = PAIRS ? 1 : 2;
  int at[MB][STORES];                                   // of the first tap's output in a channel; -1: there is no such pixel
#pragma unroll
  for (int m = 0; m < MB; m++)
#pragma unroll
    for (int h = 0; h < STORES; h++) {
      int p = t.p + (wg * MB + m) * 64 + (thread >> 5) * 16 + (lane >> 2) + (PAIRS ? odd * 7 : h * 8);
      int w = p % s.in_w, q = p / s.in_w, row = q % s.in_h, d = q / s.in_h;
      at[m][h] = p < s.pixels ? (d * KERNEL_D * out_h + row * KERNEL_H) * out_w + w * KERNEL_W : -1;
    }
  int first = t.block * COLUMNS + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    OPAQUE_4(first, plane, out_w, out_h);               // what follows from them is found here, not kept (spills)
    int of = first + 8 * j, kw = of % KERNEL_W, cout = of / KERNEL_W % COUT, tap = of / (KERNEL_W * COUT);
    bool column = ALL_COLUMNS % COLUMNS == 0 || of < ALL_COLUMNS;
    char* channel = y + ((long long)cout * plane + (tap / KERNEL_H * out_h + tap % KERNEL_H) * out_w + kw) * ELEMENT;
#pragma unroll
    for (int m = 0; m < MB; m++) {
      u32 v[2][4];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < 2; c++) v[h][c] = STORE_BITS(acc[m][4 * j + 2 * h + c]);
#if ELEMENT == 2
#pragma unroll
      for (int h = 0; h < 2; h++) v[h][0] |= v[h][1] << 16;
      if (PAIRS) {
        u32 other = __shfl_xor_sync(0xffffffffu, odd ? v[0][0] : v[1][0], 4);
        v[0][1] = odd ? v[1][0] : other;
        v[0][0] = odd ? other : v[0][0];
      }
#endif
#pragma unroll
      for (int h = 0; h < STORES; h++) {
        char* place = channel + (long long)at[m][h] * ELEMENT;
        bool ok = at[m][h] >= 0 && column;
        if (ELEMENT == 4 || PAIRS) store_global_64_if(place, v[h], ok);
        else store_global_if(place, v[h][0], ok);
      }
    }
  }
}

__device__ __forceinline__ void consume(const ELEMENT_TYPE* bias, char* y, const Sizes& s, u32 ring, u32 full, u32 empty, int wg, int thread) {
  int lane = thread & 31;
  Cursor cursor = {0, 0};
  float acc[MB][COLUMNS / 2];
#if ELEMENT == 4
  // The lane's first pixel within boxes of 32: of warps 0 and 1 the consumer's first, of 2 and 3 the second; its units are
  // swapped by its first channel, 2t, and those of other steps by the same.
  int t = lane & 3, g = lane >> 2, pixel = (thread >> 5) * 16 + g;
  u32 own = wg * (MB * (64 / ROW_PIXELS) * BOX_BYTES) + pixel / 32 * BOX_BYTES + 2 * t * 128 + ((pixel % 32 * 4) ^ (2 * t << 4));
#else
  u32 own = wg * (MB * BOX_BYTES);
#endif
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    begin_sums(acc, bias, tile_at(index, s).block * COLUMNS + lane % 4 * 2);
    u32 behind = 0;                                     // the stage that instructions under way read
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, cursor.next()) {
      u32 stage = ring + cursor.stage * STAGE_BYTES, weights = uniform(stage + BOXES * BOX_BYTES);
      barrier_wait(full + cursor.stage * 8, cursor.parity);
#if ELEMENT == 4
      u32 a[HALF][MB][4], b[HALF][MB][4];
      load_fragments(a, stage + own, 0, t);
      multiply_half(acc, a, weights, 0);
      wgmma_wait<1>();
      give_back(behind, lane);
      load_fragments(b, stage + own, HALF, t);
      multiply_half(acc, b, weights, HALF);
      wgmma_wait<1>();
#else
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < K_STEPS; step++)
#pragma unroll
        for (int m = 0; m < MB; m++) {
          u32 pixels = uniform(stage + own) + m * BOX_BYTES + step * 2048;
          const u32 a[4] = {(pixels >> 4) | 1u << 16, (u32)(UPPER >> 32)};
          multiply(acc[m], a, UPPER | (u64)((weights >> 4 | 1u << 16) + step * 2));
        }
      wgmma_commit();
      wgmma_wait<1>();
      give_back(behind, lane);
#endif
      behind = empty + cursor.stage * 8;
    }
    wgmma_wait<0>();
    give_back(behind, lane);
#if KERNEL_W == 2 && ELEMENT == 2  // float32 loses by it (docs/experiments.md)
    if (s.in_w % 2 == 0) store<true>(acc, y, s, tile_at(index, s), wg, thread);
    else
#endif
      store<false>(acc, y, s, tile_at(index, s), wg, thread);
  }
}

// =====================================================================================================================

#define BARRIERS_AT (STAGES * STAGE_BYTES)
#define SHARED_BYTES (BARRIERS_AT + 16 * STAGES)
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
subpixel(const char* __restrict__ packed, const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, int batch, int in_h, int in_w, int pixels, int tiles_p, int tiles,
         const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, in_h, in_w, pixels, tiles_p, tiles};
  u32 ring = shared_address(memory), full = ring + BARRIERS_AT, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, CONSUMERS * 4);
    }
    barriers_begun();
  }
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (role == 0) {
    fewer_registers<40>();
    if (threadIdx.x == 0) produce(map, packed, s, ring, full, empty);
  } else {
    more_registers<232>();
    wait_for_results();                                 // of `pack`: the bias; nor is stored where it may still read
    consume(bias, y, s, ring, full, empty, role - 1, threadIdx.x & 127);
  }
}
