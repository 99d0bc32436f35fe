// Pairs: the gradient for the input of a transposed convolution with strides along W, NCHW, on tensor cores. An element q of it sums g at
// q STEP_W + k - PAD_W for all k, channels and rows of the kernel: a product of matrices, places q x (channels x taps) by (channels x taps)
// x input channels.
//
// Places are M: fragments of A that lanes read from a channel's row as the copy engine left it. Where strides, padding and kernels are even,
// two taps of K that lie side by side are a lane's pair of K: in float32 the places t and t + 4 of a step, in 16 bits a register. Nothing
// turns g in shared memory, whose traffic is what bounds `gather` here. Columns (input channels) are N, weights are B, by descriptor.
//
// A row of the gradient is cut into groups of GROUP places; a block takes GROUPS of them, of whichever rows and images, times COLUMNS
// columns at a time, and its consumers halve them. The lanes of one warp bring a box each, and the first the weights.
//
// Constants come as macros (cuda/pixels/pairs.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#define A_SHARED 0
#include "wgmma.cuh"

#include "numbers.cuh"

#define VEC (16 / ELEMENT)
#include "columns.cuh"
#include "ring.cuh"

#define CONSUMERS 2
#define PLACES (CONSUMERS * MB * 64)
#define GROUPS (PLACES / GROUP)
#define K_STEPS 4                                       // of a row of weights: a matrix instruction takes 32 bytes of K
#define CHUNKS ((COUT + CHANNELS - 1) / CHANNELS)       // of CHANNELS of g, whose taps along W are ROWS_B rows of weights
#define ROWS_B (CHANNELS * KERNEL_W * ELEMENT / 128)
#define TAPS (KERNEL_D * KERNEL_H)                      // stages of a chunk, which have a row of g each
#define STAGES_K (CHUNKS * TAPS)                        // of a tile
#define BOX_BYTES (CHANNELS * PITCH * ELEMENT)
#define BOX_PLACE ((BOX_BYTES + 127) / 128 * 128)       // where boxes may begin
#define PIXEL_BYTES (GROUPS * BOX_PLACE)                // of a stage
#define WEIGHT_BYTES (ROWS_B * COLUMNS * 128)           // of a stage
#define STAGE_BYTES ((PIXEL_BYTES + 1023) / 1024 * 1024 + WEIGHT_BYTES)
#define WEIGHTS_AT (STAGE_BYTES - WEIGHT_BYTES)
#define BLOCKS_N ((CIN + COLUMNS - 1) / COLUMNS)
#define THREADS (128 + CONSUMERS * 128)
#define ALL_COLUMNS CIN
#define CHANNEL_OF(column) (column)
#include "places.cuh"

// A step of K has SLOTS slots of SLOT taps: of SLOTS_LANE neighbouring ones along W, times channels. Further steps have further taps, then
// further channels.
#define SLOTS (32 / ELEMENT / SLOT)
#define CHANNELS_STEP (SLOTS / SLOTS_LANE)
#define STEPS_W (KERNEL_W / SLOT / SLOTS_LANE)
__device__ __forceinline__ constexpr int channel_of(int step, int slot) { return step / STEPS_W * CHANNELS_STEP + slot / SLOTS_LANE; }
__device__ __forceinline__ constexpr int tap_of(int step, int slot) { return SLOT * (step % STEPS_W * SLOTS_LANE + slot % SLOTS_LANE); }
// And where a box has it, of its first place, in elements.
__device__ __forceinline__ constexpr int slot_at(int step, int slot) { return channel_of(step, slot) * PITCH + tap_of(step, slot) + LEAD; }

struct Sizes {
  int batch, in_d, in_h, in_w;                          // of the gradient
  int groups_w, groups, tiles;                          // of a row; all; all tiles
};

struct Group { int n, d, h, w; };                       // its first place

__device__ __forceinline__ Group group_at(int index, const Sizes& s) {
  int row = index / s.groups_w, q = row / s.in_h;
  return {q / s.in_d, q % s.in_d, row % s.in_h, index % s.groups_w * GROUP};
}

// Neighbouring blocks have the same places.
__device__ __forceinline__ int block_of(int tile) { return tile % BLOCKS_N; }
__device__ __forceinline__ int first_group(int tile) { return tile / BLOCKS_N * GROUPS; }

// =====================================================================================================================
// Weights
// =====================================================================================================================

#define PACK_UNITS (BLOCKS_N * STAGES_K * ROWS_B * COLUMNS * 8)

// [block][chunk][row of the kernel][row of weights][column][128 bytes of K, swizzled], zeros where there is no such channel; a thread writes
// 16 bytes. The weight is (CIN, COUT, kernel): contiguous, or channels-last, whose taps are `tap_step` elements apart.
template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  let_dependent_begin();                                // `pairs`
  int i = blockIdx.x * PACK_THREADS + threadIdx.x;
  if (i >= PACK_UNITS) return;
  int unit = i % 8, column = i / 8 % COLUMNS, rest = i / (8 * COLUMNS), row = rest % ROWS_B, tap = rest / ROWS_B % TAPS;
  int chunk = rest / (ROWS_B * TAPS) % CHUNKS, cin = rest / (ROWS_B * STAGES_K) * COLUMNS + column;
  constexpr int KERNEL = TAPS * KERNEL_W, OF_STEP = 32 / ELEMENT;
  u32 v[VEC];
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    int k = unit * VEC + e, step = row * K_STEPS + k / OF_STEP, place = k % OF_STEP;
    int slot = SLOT == 1 ? place : ELEMENT == 4 ? place % 4 : place / 2, second = SLOT == 1 ? 0 : ELEMENT == 4 ? place / 4 : place % 2;
    int cout = chunk * CHANNELS + channel_of(step, slot), kw = tap_of(step, slot) + second;
    int at = tap_step == 1 ? (cin * COUT + cout) * KERNEL + tap * KERNEL_W + kw : cin * (COUT * KERNEL) + (tap * KERNEL_W + kw) * tap_step + cout;
    v[e] = cin < CIN && cout < COUT ? operand(weight[at]) : 0;
  }
  write_operands(packed + (long long)(i - unit) * 16 + ((unit ^ (column & 7)) << 4), v);
}

#include "columns_pack.cuh"

// =====================================================================================================================
// Producer: a warp
// =====================================================================================================================

__device__ __forceinline__ void produce(const TensorMap& map, const char* __restrict__ packed, const Sizes& s, u32 ring, u32 full, u32 empty, int lane) {
  Cursor cursor = {0, 1};                               // all are free at first
  bool packing = true;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < s.tiles; tile += gridDim.x) {
    Group group = group_at(first_group(tile) + lane, s);  // the last tile's may be of no image, whose boxes are zeros
    int w = group.w * STEP_W + FIRST, h = group.h * STEP_H - PAD_H, d = group.d * STEP_D - PAD_D;
#if LINE                                                // 1-D: the map has a channel's row as lines, of which a box has some
    h = w / LINE - (w % LINE < 0);
    w = 0;
#endif
    const char* from = packed + (long long)block_of(tile) * STAGES_K * WEIGHT_BYTES;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll 1
      for (int tap = 0; tap < TAPS; tap++, cursor.next(), from += WEIGHT_BYTES) {
        u32 to = ring + cursor.stage * STAGE_BYTES, barrier = full + cursor.stage * 8;
        barrier_wait(empty + cursor.stage * 8, cursor.parity);
        if (lane == 0) expect_bytes(barrier, GROUPS * BOX_BYTES + WEIGHT_BYTES);
        __syncwarp();
        if (lane < GROUPS)
          load_box(to + lane * BOX_PLACE, map, w, h + tap % KERNEL_H * DILATION_H, d + tap / KERNEL_H * DILATION_D, chunk * CHANNELS, group.n, barrier);
        if (lane == 0) {
          if (packing) wait_for_results();              // of `pack`
          packing = false;
          copy_bulk(to + WEIGHTS_AT, from, WEIGHT_BYTES, barrier);
        }
      }
  }
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

// Where a stage has the lane's first slot, of its first place.
__device__ __forceinline__ u32 own_slot(int wg, int thread) {
  int position = wg * (MB * 64) + (thread >> 5) * 16, slot = (thread & 3) * (ELEMENT == 2 && SLOT == 1 ? 2 : 1);
  return position / GROUP * BOX_PLACE + ((position % GROUP + (thread >> 2) % 8) * STEP_W + slot_at(0, slot)) * ELEMENT;
}

// Fragments of steps `first` and `first` + 1, from such a place: of places g and g + 8.
__device__ __forceinline__ void load_fragments(u32 (&a)[HALF][MB][4], u32 from, int first) {
#pragma unroll
  for (int step = 0; step < HALF; step++)
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 at = from + m * (64 / GROUP) * BOX_PLACE + (slot_at(first + step, 0) - slot_at(0, 0)) * ELEMENT;
        at += i * (GROUP == 8 ? BOX_PLACE : 8 * STEP_W * ELEMENT);
#if ELEMENT == 4 && SLOT == 2
        u32 pair[4];
        load_shared_64(pair, at);
        a[step][m][i] = pair[0];
        a[step][m][2 + i] = pair[1];
#else
#pragma unroll
        for (int k = 0; k < 2; k++, at += (slot_at(0, SLOTS / 2) - slot_at(0, 0)) * ELEMENT) {
#if ELEMENT == 4 || TOGETHER
          a[step][m][2 * k + i] = load_shared_u32(at);
#else
          a[step][m][2 * k + i] = load_shared_u16(at) | load_shared_u16(at + (SLOT == 2 ? 1 : PITCH) * ELEMENT) << 16;
#endif
        }
#endif
      }
}

// A thread's sums: of columns 8j + 2t and the next, places g and g + 8 of MB x 64. PAIRED: rows have pairs of places. Then lanes of
// neighbouring g exchange, so that an even one has g and g + 1, an odd one g + 7 and g + 8, and a warp stores 16 places of a column at once.
template <bool PAIRED>
__device__ __forceinline__ void store(const float (&acc)[MB][COLUMNS / 2], char* __restrict__ y, const Sizes& s, int tile, int wg, int thread) {
  constexpr int STORES = PAIRED ? 1 : 2;
  int lane = thread & 31, odd = PAIRED ? lane >> 2 & 1 : 0, plane = s.in_d * s.in_h * s.in_w;
  long long at[MB][STORES];                             // of the place in an image's first channel; -1: there is no such place
#pragma unroll
  for (int m = 0; m < MB; m++)
#pragma unroll
    for (int h = 0; h < STORES; h++) {
      int position = (wg * MB + m) * 64 + (thread >> 5) * 16 + (h + odd) * 8, index = first_group(tile) + position / GROUP;
      Group group = group_at(index, s);
      int w = group.w + position % GROUP + (lane >> 2) - odd;
      long long row = (long long)group.n * CIN * plane + (group.d * s.in_h + group.h) * s.in_w;
      at[m][h] = index < s.groups && w < s.in_w ? row + w : -1;
    }
  int first = block_of(tile) * COLUMNS + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    OPAQUE_2(first, plane);                             // what follows from them is found here, not kept (spills)
    int of = first + 8 * j;
    char* channel = y + (long long)of * plane * ELEMENT;
#pragma unroll
    for (int m = 0; m < MB; m++) {
      u32 v[2][2];                                      // of a place, of a column
#pragma unroll
      for (int i = 0; i < 4; i++) v[i / 2][i % 2] = STORE_BITS(acc[m][4 * j + i]);
      if (PAIRED) {
#if ELEMENT == 2
#pragma unroll
        for (int h = 0; h < 2; h++) v[h][0] |= v[h][1] << 16;
#endif
#pragma unroll
        for (int c = 0; c < ELEMENT / 2; c++) {         // in 16 bits both columns together
          u32 other = __shfl_xor_sync(0xffffffffu, odd ? v[0][c] : v[1][c], 4);
          v[0][c] = odd ? other : v[0][c];
          v[1][c] = odd ? v[1][c] : other;
        }
      }
#pragma unroll
      for (int c = 0; c < 2; c++) {
        bool column = CIN % COLUMNS == 0 || of + c < CIN;
#pragma unroll
        for (int h = 0; h < STORES; h++) {
          char* place = channel + ((long long)c * plane + at[m][h]) * ELEMENT;
          bool ok = at[m][h] >= 0 && column;
          if (PAIRED && ELEMENT == 4) {
            const u32 both[4] = {v[0][c], v[1][c]};
            store_global_64_if(place, both, ok);
          } else if (PAIRED) {
            store_global_if(place, c ? v[0][0] >> 16 | (v[1][0] & 0xffff0000u) : (v[0][0] & 0xffffu) | v[1][0] << 16, ok);
          } else if (ELEMENT == 4) {
            store_global_if(place, v[h][c], ok);
          } else {
            store_global_16_if(place, v[h][c], ok);
          }
        }
      }
    }
  }
}

__device__ __forceinline__ void consume(char* y, const Sizes& s, u32 ring, u32 full, u32 empty, int wg, int thread) {
  int lane = thread & 31;
  Cursor cursor = {0, 0};
  float acc[MB][COLUMNS / 2];
  u32 own = own_slot(wg, thread);
#pragma unroll 1
  for (int tile = blockIdx.x; tile < s.tiles; tile += gridDim.x) {
    begin_sums(acc, nullptr, 0);
    u32 behind = 0;                                     // the stage that instructions under way read
#pragma unroll 1
    for (int i = 0; i < STAGES_K; i++, cursor.next()) {
      u32 stage = ring + cursor.stage * STAGE_BYTES, weights = uniform(stage + WEIGHTS_AT);
      barrier_wait(full + cursor.stage * 8, cursor.parity);
#pragma unroll
      for (int row = 0; row < ROWS_B; row++) {
        u32 a[HALF][MB][4], b[HALF][MB][4];
        load_fragments(a, stage + own, row * K_STEPS);
        multiply_half(acc, a, weights + row * (COLUMNS * 128), 0);
        wgmma_wait<1>();
        if (row == 0) give_back(behind, lane);
        load_fragments(b, stage + own, row * K_STEPS + HALF);
        multiply_half(acc, b, weights + row * (COLUMNS * 128), HALF);
        wgmma_wait<1>();
      }
      behind = empty + cursor.stage * 8;
    }
    wgmma_wait<0>();
    give_back(behind, lane);
    if (s.in_w % 2 == 0) store<true>(acc, y, s, tile, wg, thread);
    else store<false>(acc, y, s, tile, wg, thread);
  }
}

// =====================================================================================================================

#define BARRIERS_AT (STAGES * STAGE_BYTES)
#define SHARED_BYTES (BARRIERS_AT + 16 * STAGES)
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pairs(const char* __restrict__ packed, const ELEMENT_TYPE* __restrict__, char* __restrict__ y, int batch, int in_d, int in_h, int in_w, int groups_w, int groups,
      int tiles, const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, in_d, in_h, in_w, groups_w, groups, tiles};
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
    if (threadIdx.x < 32) produce(map, packed, s, ring, full, empty, threadIdx.x);
  } else {
    more_registers<232>();
    wait_for_results();                                 // of `pack`: nor is stored where it may still read
    consume(y, s, ring, full, empty, role - 1, threadIdx.x & 127);
  }
}
