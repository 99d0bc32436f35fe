// Grad-weight by wgmma (sm_90a): dW[ci, co, tap] = sum over images and positions q of x[ci, q] * g[co, q * STEP + tap * DIL - PAD].
//
// The GEMM of wgrad.cu with the operands the other way round. M = 64 rows, an output channel at a tap each (SUBS taps of
// 64 / SUBS channels), N = BLOCK_CI input channels, K = pixels. INTERLEAVED: these taps are neighbours along W, and their rows
// neighbours in M, so that lanes read neighbouring columns of few channels, which meet more banks than columns STEP_W apart of many.
//   A, from registers: g's tile with its halo, read from shared memory at any column, so that a tap is an address. A_SHARED (16-bit
//      rows of 64 channels): by descriptor, at any pixel.
//   B, from shared memory by descriptor: x's tile as the tensor copy engine leaves it. NCHW: rows of a channel's pixels (K-major),
//      rounded to TF32 on the way; CHANNELS_LAST of 16 bits: rows of a pixel's channels (MN-major). TF32 has no MN-major form, so
//      that CHANNELS_LAST float32 is turned by the copying warpgroup (TURN_X).
// g comes by boxes too (BOX_G): by one where its rows lie evenly (G_ONE_BOX; CHANNELS_LAST for each G_WIDTH channels and plane), by
// one for each row, NCHW by one for each class of rows that begin off 16 bytes (CLASSED), or by threads where these are too many.
// Roles: one warpgroup copies, WGS warpgroups multiply: WGS_M of them divide the output channels of a block, the others its taps,
// UNITS x SUBS fragments of A at a time: UNITS neighbours for each of SUBS bands of rows. A unit is a tap; or, STACKED, a column of
// taps: the rows of x that a row of g meets by them follow each other in shared memory, and so are columns of one instruction. Then
// a fragment is read once, not once a tap: reads of A take as long as a multiplication by 64 channels.
// STACKED chunks are of rows of g, STEP_H at a time, and it is x's tile that has a halo, so that an instruction always takes all
// of its rows: ptxas waits for each one where some that share sums differ in shape (C7511). Rows beyond the image are zeros.
//
// K is split over ranges of chunks; each split writes partial sums, `reduce` adds them in the order of their index. Where splits are
// few, their blocks are a CLUSTER, which adds the sums through its shared memory in the same order, and writes the weight itself.
// Where more are, but all blocks run at once (a cooperative launch), those of a tile wait for each other and do it TOGETHER, through
// global memory. A split that is the only one (ALONE) writes the weight from its own shared memory. Two splits may exchange sums while
// they multiply (HANDOVER); these have chunks in another order than two steps have, and other roundings.
#define COPIERS 128
#define CI_INNERMOST 1
#define STACK (STACKED ? (TAPS_H + STEP_H - 1) / STEP_H : 1)  // rows of x that may meet a row of g
#define X_ROWS_H (TILE_H + STACK - 1)
#include "wgrad.cuh"
#define A_TURNED 1                         // A_SHARED: rows of channels
#define B_TURNED CHANNELS_LAST             // x's pixels are rows of channels
#include "wgmma.cuh"

#define ROWS_PER_SUB (64 / SUBS)
#if INTERLEAVED
#define NEXT_ROWS (8 / SUBS)               // channels from row g of a warp's sixteen to row g + 8
#define NEXT_UNIT SUBS                     // units from one of a lane's to the next
#else
#define NEXT_ROWS 8
#define NEXT_UNIT 1
#endif
#define WGS_T (WGS / WGS_M)                // warpgroups that divide the taps
#define THREADS ((1 + WGS) * 128)
#define CI_TILES ((CIN_G + BLOCK_CI - 1) / BLOCK_CI)
#define CO_TILES ((COUT_G + BLOCK_CO - 1) / BLOCK_CO)
#define TURN_X (CHANNELS_LAST && ELEMENT == 4)
#define K_MAJOR (!CHANNELS_LAST || TURN_X)
#define N_WIDTH (STACKED && !K_MAJOR && BLOCK_CI > 64 ? 64 : BLOCK_CI)  // of one matrix instruction; STACKED: for each row of x
#define NB (BLOCK_CI / N_WIDTH)
#define OF_UNIT (STACKED ? TAPS_H : 1)     // taps of a unit
#define UNITS (ENTRIES / OF_UNIT)
#define SET_UNITS (SET_TAPS / OF_UNIT)

#include "wgrad_tiles.cuh"      // a chunk in shared memory

#define CLASSES (ROW_CLASSES * CHANNEL_CLASSES)

struct TensorMaps {
  TensorMap x;
#if BOX_G
  TensorMap g[CLASSES];
#endif
};

struct Work {                              // of a block
  int group, ci, co;                       // first channels within the group
  int tap_d, tap_h, tap_w;                 // first tap of the set
};

#include "wgrad_copies.cuh"     // who brings it
#include "wgrad_multiply.cuh"   // fragments and matrix instructions
#if ADDS_UP
#include "wgrad_sums.cuh"       // how the sums leave, where blocks add up
#define SUMS_GO_TO const Gradient& out
#else
#define SUMS_GO_TO float* __restrict__ partial
#endif

__device__ __forceinline__ void consume(SUMS_GO_TO, const Sizes& s, const Work& work, const char* g, u32 full, u32 empty, const unsigned char* memory, int split, int wg, int thread) {
#if INTERLEAVED
  int warp = thread >> 5, lane = thread & 31, row = (lane >> 2) / SUBS, q = lane & 3;
  int wg_m = wg % WGS_M, first_unit = wg / WGS_M * (SUBS * UNITS) + (lane >> 2) % SUBS;
  int channel = wg_m * ROWS_PER_SUB + warp * (16 / SUBS);                                      // of the block's BLOCK_CO
#else
#if STACKED && !CHANNELS_LAST
  // By a shuffle ptxas knows that a warp's lanes have the same. Most of these tiles gain by it; other tiles lose.
  int warp = __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31, row = lane >> 2, q = lane & 3;
#else
  int warp = thread >> 5, lane = thread & 31, row = lane >> 2, q = lane & 3;
#endif
  int wg_m = wg % WGS_M, first_unit = (wg / WGS_M * SUBS + warp * 16 / ROWS_PER_SUB) * UNITS;
  int channel = wg_m * ROWS_PER_SUB + warp * 16 % ROWS_PER_SUB;                                // of the block's BLOCK_CO
#endif
  Taps taps;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    int unit = first_unit + u * NEXT_UNIT;
    if (unit >= SET_UNITS) unit = SET_UNITS - 1;                                               // its sums are not stored
    int td = unit / (SET_UNITS / TAPS_D), th = STACKED ? 0 : unit / TAPS_W % TAPS_H, tw = unit % TAPS_W;
    int shift = (DENSE_D ? td * (DIL_D / APART_D) : td) * CLASS_ROWS + (DENSE_H ? th * (DIL_H / APART_H) : th);
#if GAPLESS
    taps.at[u] = unit * (PLANE_BYTES / G_PIXEL_BYTES);
#elif PARTED
    taps.at[u] = shift * G_LINE + tw % G_PLANES * (PLANE_BYTES / G_PIXEL_BYTES) + tw / G_PLANES * PLANE_TAPS;
#elif CHANNELS_LAST
    taps.at[u] = shift * G_LINE + tw * DIL_W;
#else
    taps.at[u] = shift * (G_CHANNELS * G_PITCH) + tw * DIL_W;
#endif
    taps.line[u] = ((u32)(td * DIL_D) * s.out_h + th * DIL_H) * s.out_w;
  }
#if TURN_X
  const int lane_first = STRIP_PIXEL(q) * G_STEP_W * (G_WIDTH * 4) + (channel + row) / G_WIDTH * G_SLAB_BYTES + (channel + row) % G_WIDTH * 4;
#elif A_SHARED
  const int lane_first = wg_m * G_SLAB_BYTES;  // the warpgroup's 64 channels
#elif CHANNELS_LAST
  int c8 = channel + (lane >> 3 & 1) * 8;  // a lane's 8 channels
#if BOX_G
  const int lane_first = (lane & 7) * G_STEP_W * (G_WIDTH * 2) + c8 / G_WIDTH * G_SLAB_BYTES + c8 % G_WIDTH * 2;
#else
  const int lane_first = (lane & 7) * STEP_W * (G_PITCH * 2) + c8 * 2;
#endif
#else
  const int of_channels = (channel + row) / G_CHANNELS;  // the lane's class
  const int lane_first = of_channels * (CLASS_BYTES / ELEMENT * ROW_CLASSES) + (channel + row) % G_CHANNELS * G_PITCH + (ELEMENT == 4 ? q : 2 * q) * STEP_W;
#endif
  float acc[UNITS][NB][OF_UNIT * (N_WIDTH / 2)] = {};
  int begin = split * s.per_split, end = begin + s.per_split < s.chunks ? begin + s.per_split : s.chunks;
  u32 stage = 0, parity = 0;
  // A warpgroup whose taps are all beyond the kernel leaves the tensor cores to the others.
  const int units_before = wg / WGS_M * (SUBS * UNITS);
  const bool idle = units_before >= SET_UNITS || (SET_UNITS == TAPS_W && work.tap_w + units_before >= KERNEL_W);
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    int lane_at = lane_first;
    Phases phases = {};
#if !CHANNELS_LAST
    // Rows 8 channels apart have the same alignment, so that a lane has one for each row of a tile.
    Chunk c = chunk_at(i, s);
    int d = c.d * STEP_D + work.tap_d * DIL_D - PAD_D, h = c.h * STEP_H + work.tap_h * DIL_H - PAD_H, w = c.w * STEP_W + work.tap_w * DIL_W - PAD_W;
#if ALIGNED_G
    lane_at += w & (G_BEGIN - 1);
#elif CLASSED
#pragma unroll
    for (int j = 0; j < ROW_CLASSES; j++) phases.of[j] = class_of(h + j, work.group * COUT_G + work.co + of_channels, w, s).phase;
#else
    phases.of[0] = (u32)((u64)g / ELEMENT) + (((u32)c.n * COUT + work.group * COUT_G + work.co + row) * s.out_d + d) * s.out_h * s.out_w + (u32)h * s.out_w + w;
#endif
#endif
    const unsigned char* tile = memory + stage * STAGE_BYTES;
    u32 x_tile = shared_address(tile);
    barrier_wait(full + stage * 8, parity);
#if A_SHARED
    wgmma_fence();
#endif
#if STACKED
#pragma unroll 1
    for (int first = idle ? ROW_STEPS : 0; first < ROW_STEPS; first += STRETCH) {
      multiply_rows(acc, tile + X_TILE_BYTES, taps, s, phases, lane_at + first * (32 / ELEMENT * G_STEP_W) * G_PIXEL_BYTES, x_tile + x_at(first));
    }
#else
#pragma unroll 1
    for (int run = idle ? STEPS / STRETCH : 0; run < STEPS / STRETCH; run++) {
      u32 a[SETS_OF_FRAGMENTS][4];
#if SHARED_WORDS
      Words words;
#endif
      // A run is some whole rows of q or a part of one, so that runs differ by an offset.
      const int first = run * (STRETCH / ENTRIES);
      const Half from = step_of(first).half[0];
      const unsigned char* g_tile = tile + X_TILE_BYTES + from.row * G_ROW_BYTES;
      Phases run_phases = phases;
#if !CHANNELS_LAST && !ALIGNED_G && !CLASSED
      run_phases.of[0] += ((u32)(from.memory.n * COUT) * s.out_d + from.memory.d) * s.out_h * s.out_w + (u32)from.memory.h * s.out_w;
#endif
      int lane_from = lane_at + from.column * G_PIXEL_BYTES;
      u32 x_from = x_tile + x_at(first);
#pragma unroll
      for (int step = 0; step < STRETCH; step++) {
        const int e = step % ENTRIES, k = step / ENTRIES;
#if SHARED_WORDS
        if (e % W_RUN == 0) load_words(words, g_tile, taps, s, run_phases, e, step_of(k), lane_from);
        shift_words(a[step % SETS_OF_FRAGMENTS], words, e % W_RUN);
#else
        load_fragment(a[step % SETS_OF_FRAGMENTS], g_tile, taps, s, run_phases, e, step_of(k), lane_from);
#endif
        if (!A_SHARED) wgmma_fence();
        multiply(acc[e], 0, 1, a[step % SETS_OF_FRAGMENTS], x_from + x_at(k));
        if (A_SHARED) continue;
        wgmma_commit();
        if (step + 1 == STRETCH) wgmma_wait<0>();
        else wgmma_wait<SETS_OF_FRAGMENTS - 1>();
      }
    }
#endif
#if A_SHARED
    // The chunk before is done with. That is late: instructions wait for room in the tensor cores' queue, so that most of this chunk's
    // are behind them, too. With 2 stages that is far too late. A stage given back behind a chunk's first instruction, or its third,
    // is slower with more stages: the queue runs empty.
    wgmma_commit();
    wgmma_wait<1>();
    if (i > begin && lane == 0) barrier_arrive(empty + (stage ? stage - 1 : STAGES - 1) * 8);
#else
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage * 8);
#endif
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
#if A_SHARED
  wgmma_wait<0>();
#endif
#if ADDS_UP
  named_sync<2, WGS * 128>();              // nobody reads a stage any more
#if BY_ROWS
  if (has_rows(out)) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      if (first_unit + u >= SET_UNITS) continue;
      put_rows(out, work, acc[u][0], shared_address(memory) + (wg * UNITS + u) * (BLOCK_CI * ROW_PITCH), first_unit + u, channel - warp * 16, wg, thread);
    }
    return;
  }
#endif
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    int unit = first_unit + u * NEXT_UNIT;
    if (unit >= SET_UNITS) continue;
#pragma unroll
    for (int i = 0; i < OF_UNIT; i++) {
      // A unit is a tap, or (STACKED) a column of TAPS_H of them.
      int tap = STACKED ? (unit / TAPS_W * TAPS_H + i) * TAPS_W + unit % TAPS_W : unit;
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int j = 0; j < N_WIDTH / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int m = channel + row + NEXT_ROWS * h;
#if !CHANNELS_LAST
            m = m % G_CHANNELS * CHANNEL_CLASSES + m / G_CHANNELS;
#endif
            u32 at = shared_address(memory) + SUM_AT(tap, nb * N_WIDTH + j * 8 + 2 * q, m);
            const float* sums = &acc[u][nb][STACK_PLACE(i) * (N_WIDTH / 2) + 4 * j + 2 * h];
            store_shared_f32(at, sums[0]);
            store_shared_f32(at + SUMS_PITCH * 4, sums[1]);
          }
    }
  }
#else
  long long slice = (long long)split * (TAPS * COUT * (long long)CIN_G);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    int unit = first_unit + u * NEXT_UNIT;
    int kd = work.tap_d + unit / (SET_UNITS / TAPS_D), kw = work.tap_w + unit % TAPS_W;
    if (unit >= SET_UNITS || kd >= KERNEL_D || kw >= KERNEL_W) continue;
#pragma unroll
    for (int i = 0; i < OF_UNIT; i++) {
      int th = STACKED ? i : unit / TAPS_W % TAPS_H, kh = work.tap_h + th;
      if (kh >= KERNEL_H) continue;
      float* to = partial + slice + ((long long)((kd * KERNEL_H + kh) * KERNEL_W + kw) * COUT + work.group * COUT_G) * CIN_G;
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int j = 0; j < N_WIDTH / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int m = channel + row + NEXT_ROWS * h, ci = work.ci + nb * N_WIDTH + j * 8 + 2 * q;
#if CHANNELS_LAST
            int co = work.co + m;
#else
            int co = work.co + m % G_CHANNELS * CHANNEL_CLASSES + m / G_CHANNELS;
#endif
            if (co >= COUT_G) continue;
            float* at = to + (long long)co * CIN_G + ci;
            const float* sums = &acc[u][nb][STACK_PLACE(i) * (N_WIDTH / 2) + 4 * j + 2 * h];
            if (CIN_G % 2 == 0) {
              if (ci < CIN_G) *(float2*)at = make_float2(sums[0], sums[1]);
            } else {
              if (ci < CIN_G) at[0] = sums[0];
              if (ci + 1 < CIN_G) at[1] = sums[1];
            }
          }
    }
  }
#endif
}

#if HANDOVER
#include "wgrad_handover.cuh"
#endif

#if GAPLESS
#define BOX_OF_CHUNK int box_n, int box_d, int box_h, int box_w,
#else
#define BOX_OF_CHUNK
#endif
// partial: [SPLITS][TAPS][COUT][CIN_G] float32; where blocks add up, `out` is the weight's gradient.
#if TOGETHER  // partial: SUMS_BYTES for each block, or (HANDOVER) 4 HANDED_WORDS
extern "C" __global__ void __launch_bounds__(THREADS, 1)
wgrad(const char* __restrict__ g, char* __restrict__ out, char* partial, u32* counters, int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w,
      int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split, BOX_OF_CHUNK
      long long stride_ci, long long stride_co, long long stride_tap, int wide,
      const __grid_constant__ TensorMaps maps) {
#elif ADDS_UP
extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER)
#endif
__launch_bounds__(THREADS, 1)
wgrad(const char* __restrict__ g, char* __restrict__ out,
#if HANDOVER
      char* partial,                       // 4 HANDED_WORDS bytes for each block
#endif
      int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w,
      int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split, BOX_OF_CHUNK
      long long stride_ci, long long stride_co, long long stride_tap, int wide,
      const __grid_constant__ TensorMaps maps) {
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
wgrad(const char* __restrict__ g, float* __restrict__ partial, int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w,
      int tiles_d, int tiles_h, int tiles_w, int chunks, int per_split, BOX_OF_CHUNK const __grid_constant__ TensorMaps maps) {
#endif
  extern __shared__ __align__(1024) unsigned char memory[];
#if GAPLESS
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split, box_n, box_d, box_h, box_w};
#else
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, chunks, per_split};
#endif
  int index = blockIdx.x;
#if CLUSTER > 1
  const int split = index % CLUSTER;  index /= CLUSTER;  // so that a cluster's blocks are neighbours
#endif
  Work work;                               // blocks of the same pixels are neighbours, for L2's sake
  int set = index % SETS;  index /= SETS;
#if HANDOVER
  tile_of(index % (CI_TILES * CO_TILES), work.ci, work.co);
  work.ci *= BLOCK_CI, work.co *= BLOCK_CO, index /= CI_TILES * CO_TILES;
#elif CLUSTER > 1 && CI_TILES % 2 == 0     // two clusters have the same pixels of g, for L2
  work.ci = index % 2;  index /= 2;
  work.co = index % CO_TILES * BLOCK_CO;  index /= CO_TILES;
  work.ci = (work.ci + index % (CI_TILES / 2) * 2) * BLOCK_CI;  index /= CI_TILES / 2;
#else
  work.co = index % CO_TILES * BLOCK_CO;  index /= CO_TILES;
  work.ci = index % CI_TILES * BLOCK_CI;  index /= CI_TILES;
#endif
  work.group = index % GROUPS;
#if CLUSTER == 1
  const int split = index / GROUPS;
#endif
  work.tap_w = set % SETS_W * TAPS_W;
  work.tap_h = set / SETS_W % SETS_H * TAPS_H;
  work.tap_d = set / (SETS_W * SETS_H) * TAPS_D;
  u32 base = shared_address(memory), full = base + BARRIERS_AT, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, TURN_X ? COPIERS + 1 : BOX_G ? 1 : 2 * COPIERS + 1);
      barrier_init(empty + 8 * i, WGS * 4);
    }
    barrier_init(base + BARRIERS_AT + 16 * STAGES, HANDOVER ? WGS * 4 : 1);
    barriers_begun();
  }
#if GAPLESS
  clear_tails(base, s, threadIdx.x);
#endif
  __syncthreads();
#if HANDOVER && CLUSTER > 1
  cluster_arrive();                        // who hands sums over waits for the other block's
#endif
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role == 0) {
    fewer_registers<PRODUCER_REGISTERS>();
#if TURN_X
    const u32 raw = base + RAW_AT, raw_full = base + BARRIERS_AT + 16 * STAGES;
    if (thread == 0 && split * per_split < chunks) load_raw(&maps.x, s, chunk_at(split * per_split, s), work, raw, raw_full);
#elif HANDOVER
    if (thread == 0) produce_halves(maps, s, work, split, base, full, empty);
#if CLUSTER > 1
    __syncwarp();
    cluster_wait();
#endif
    return;
#elif BOX_G
    if (thread) return;                    // the others have nothing to do
#endif
    int begin = split * per_split, end = begin + per_split < chunks ? begin + per_split : chunks;
    u32 stage = 0, parity = 1;
#pragma unroll 1
    for (int i = begin; i < end; i++) {
      Chunk c = chunk_at(i, s);
      unsigned char* tile = memory + stage * STAGE_BYTES;
      u32 barrier = full + stage * 8;
      barrier_wait(empty + stage * 8, parity);
#if TURN_X
      if (thread == 0) load_boxes(&maps.x, maps.g, s, c, work, shared_address(tile), barrier);
      barrier_wait(raw_full, (i - begin) & 1);
      turn(raw, shared_address(tile), thread);
      barrier_arrive(barrier);
      named_sync<1, COPIERS>();            // all have read
      if (thread == 0 && i + 1 < end) load_raw(&maps.x, s, chunk_at(i + 1, s), work, raw, raw_full);
#elif BOX_G
      load_boxes(&maps.x, maps.g, s, c, work, shared_address(tile), barrier);
#else
      if (thread == 0) load_boxes(&maps.x, nullptr, s, c, work, shared_address(tile), barrier);
      constexpr int extent = CHANNELS_LAST ? G_COLUMNS : G_EXTENT;
      int d = c.d * STEP_D + work.tap_d * DIL_D - PAD_D, h = c.h * STEP_H + work.tap_h * DIL_H - PAD_H, w = c.w * STEP_W + work.tap_w * DIL_W - PAD_W;
      int channel = work.group * COUT_G + work.co;
      copy_tile<G_ROWS, BLOCK_CO, extent, G_PITCH, COUT, COUT_G, false>(
          g, s.batch, s.out_d, s.out_h, s.out_w, c.n, d, h, w, channel, COUT_G - work.co, tile + X_TILE_BYTES, thread);
#if !CHANNELS_LAST
      if (has_borders(w, G_COLUMNS, s.out_w)) {
        copy_commit();
        copy_wait<0>();
        named_sync<1, COPIERS>();          // all have landed
        clear_borders<G_ROWS, BLOCK_CO, G_UNITS, G_PITCH, COUT, false>(g, s.out_d, s.out_h, s.out_w, c.n, d, h, w, channel, tile + X_TILE_BYTES, thread);
      }
#endif
      arrive_when_copied(barrier);
      barrier_arrive(barrier);             // what it stored itself
#endif
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
  } else {
    more_registers<CONSUMER_REGISTERS>();
#if HANDOVER
    const Gradient gradient = {out, stride_ci, stride_co, stride_tap, wide};
#if TOGETHER
    constexpr int TILES = SETS * CO_TILES * CI_TILES * GROUPS;
    const int other = split ? blockIdx.x - TILES : blockIdx.x + TILES;
    u32* const met_by = counters + 2 * (split ? other : (int)blockIdx.x);
#else
    const int other = blockIdx.x ^ 1;
    u32* const met_by = nullptr;
#endif
    consume_halves(gradient, work, (float4*)partial, met_by, s, full, empty, base + BARRIERS_AT + 16 * STAGES, memory, split, other, role - 1, thread);
#elif ADDS_UP
    const Gradient gradient = {out, stride_ci, stride_co, stride_tap, wide};
    consume(gradient, s, work, g, full, empty, memory, split, role - 1, thread);
#if BY_ROWS
    if (has_rows(gradient)) return;        // they have left
#endif
#if TOGETHER
    constexpr int TILES = SETS * CO_TILES * CI_TILES * GROUPS;
    const int block = block_index();       // read again, not kept over the loop, where it spills
    const int tile = block % TILES, rank = block / TILES;
    const Peers peers = {partial + (long long)tile * SUMS_BYTES, (long long)TILES * SUMS_BYTES, (int)gridDim.x / TILES};
    publish(partial + (long long)block * SUMS_BYTES, base, counters + 2 * tile, peers, threadIdx.x - 128);
#else
    const int rank = split;
    const Peers peers;
#endif
    add_up(gradient, work, peers, base, rank, threadIdx.x - 128);
#else
    consume(partial, s, work, g, full, empty, memory, split, role - 1, thread);
#endif
  }
}
