// Gather-GEMM on tensor cores: out[o = OUT_STEP q + u] = sum over taps of W(u, tap) x in[i = IN_STEP q + offset(u, tap)],
// for every axis; u < OUT_STEP are the sub-positions of q (the phases of a stride, or rows unrolled to fill a tile).
// The gradient for the input is the same with exchanged steps: `in` is the output's gradient, CIN its channels, `out` the input's.
//
// Work of a block (persistent, `for tile`): TILE_N x TILE_D x TILE_H x TILE_W positions q times one M-group. An M-group is
// MB blocks of 64 rows (for WGS_M = 2: a pair of them); a row is one output channel at one (d, h) sub-position, a block one
// W sub-position. K is input channels x taps, in chunks of CK channels.
//
// Roles:
//   producers  loads the input tile with its halo once per chunk. NCHW: 16-byte copies into a staging slot (bytes in flight:
//              STAGES_S - 1 slots), then a pass of shared memory -> registers -> shared memory that turns pixels to rows of CK
//              channels and rounds to TF32. Channels-last: copies straight to those rows.
//   consumers  multiply: weights are A, from registers, packed in fragment order (one 16-byte load per thread and step);
//              pixels are B, rows of CK channels in shared memory, swizzled. A tap is a shift of B's start by whole rows:
//              the swizzle is a function of address bits, so any shift is right (measured: 32, 64 and 128 bytes).
//   one thread streams the weights' fragments through a ring (or loads all of them once: RESIDENT).
// SPLIT 0: both consumers share an M-group and halve the pixels. 1: they share the pixels. 2: ping-pong, whole tiles in turn,
// so that one stores while the other multiplies.
//
// Constants come as macros (cuda/gemm/gather.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#include "shuffle.cuh"
#define A_SHARED 0
#include "wgmma.cuh"

#define FRAGMENT (64 * 32)              // bytes: 64 rows of 32 bytes of K
#define SUBTILES (TILE_N * TILE_D * (TILE_H / SUB_H) * (TILE_W / SUB_W))
#define NB (SPLIT == 0 ? SUBTILES / 2 : SUBTILES)
#define WGS_M (SPLIT == 1 ? 2 : 1)
#define RELEASES (SPLIT == 2 ? 1 : 2)   // consumers that read a stage
#define W_SUBTILES (TILE_W / SUB_W)
#define H_SUBTILES (TILE_H / SUB_H)

__constant__ const int TAP_ROW[] = TAP_ROWS;           // [variant, block, tap]: the tap's shift in pixel rows
__constant__ const int ENTRY[] = ENTRIES;              // [variant][MB + 1]: where a block's taps begin
#if STRETCHES < VARIANTS
__constant__ const int STRETCH_OF[] = STRETCHES_OF;    // [variant]: which of those that serve several
__constant__ const int VARIANT_ROW[] = VARIANT_ROWS;   // [variant]: shift of its taps against the first of these
#endif
__constant__ const short SUB_D[] = SUBS_D;             // [variant][SUBS]: output offset of an M-row's sub-position
__constant__ const short SUB_HH[] = SUBS_H;
__constant__ const short U_W[] = SUBS_W;               // [variant]: first W sub-position
#if BARE
__constant__ const short BARE_OF[] = BARES;            // [variant]: where its sub-positions without taps begin
__constant__ const short BARE_D[] = BARES_D;           // their offsets, of rows the first
__constant__ const short BARE_H[] = BARES_H;
__constant__ const short BARE_W[] = BARES_W;           // -1: all along W
__constant__ const short BARE_ROW[] = BARES_ROWS;      // rows along H, neighbours; 0: all
#endif
#include "gather_tile.cuh"        // a chunk's pixels, roles, arguments
#if CLAIMED
#define CLAIM_STEP (RESIDENT ? M_GROUPS : 1)  // a block's weights are of one M-group
#include "claims.cuh"
#endif

#if PLANE_BARRIERS > 1 && !(DIRECT_BOX && STRIDED_BOX && (STRAIGHT || ROLLED) && PLANE_BARRIERS == PLANES)
#error "planes have barriers of their own where boxes bring them and a chunk is one stretch"
#endif

#if !BOX && (CHANNELS_LAST ? STAGES_P : STAGES_S) < 2
#error "threads that copy pixels have a stage ahead of the one that is read"
#endif

struct Tile {
  int group, cout_block, variant;                      // M-group
  int n, d, h, w;                                      // first q
};

__device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  Tile t;
  int m = index % M_GROUPS, q = index / M_GROUPS;
  // Variants differ in taps; rotated, so that a block, whose tiles lie gridDim.x apart, meets all of them.
  if (!RESIDENT && VARIANTS > 1) m = (m + q) % M_GROUPS;
  t.variant = m % VARIANTS;
  t.cout_block = m / VARIANTS % COUT_BLOCKS;
  t.group = m / (VARIANTS * COUT_BLOCKS);
  t.w = q % s.tiles_w * TILE_W;  q /= s.tiles_w;
  t.h = q % s.tiles_h * TILE_H;  q /= s.tiles_h;
  t.d = q % s.tiles_d * TILE_D;
#if BESIDE
  t.n = q / s.tiles_d * BESIDE;
#else
  t.n = q / s.tiles_d * TILE_N;
#endif
  return t;
}

__device__ __forceinline__ int entries_of(int variant) { return ENTRY[variant * (MB + 1) + MB] - ENTRY[variant * (MB + 1)]; }
__device__ __forceinline__ int chunks_of(int variant) { return entries_of(variant) ? CHUNKS : 0; }  // 0: only the bias
#define CHUNKS_OF(tile, s) chunks_of((tile).variant)
// The tiles of a block: the first, and from one to the next. (No functions of the tile and the sizes: with these ptxas orders the
// roles' instructions in another way.)
#if CLUSTER > 1
// Where tiles are few, CLUSTER blocks have one together, each a share of its chunks, and add up their sums in shared memory. They are
// neighbours, and have no other tile.
#define RANK ((int)(blockIdx.x % CLUSTER))
#define FIRST_TILE(s) blockIdx.x / CLUSTER
#define NEXT_TILE(index, s) index = s.tiles
#define FIRST_CHUNK (RANK * CHUNKS / CLUSTER)
#define END_CHUNK ((RANK + 1) * CHUNKS / CLUSTER)
#elif CLAIMED
#define FIRST_TILE(s) blockIdx.x
#define NEXT_TILE(index, s) index = claims.next()
#else
#define FIRST_TILE(s) blockIdx.x
#define NEXT_TILE(index, s) index += gridDim.x
#endif

#include "gather_pack.cuh"        // the kernel that puts weights in the order of fragments
#include "gather_produce.cuh"     // producers and the loader: pixels to shared memory
#include "gather_weights.cuh"     // weights from memory to a consumer's registers
#include "gather_multiply.cuh"    // a chunk's matrix instructions
#include "gather_epilogue.cuh"    // sums to memory
#include "gather_cluster.cuh"     // sums of several blocks

#if DRAINED
#define RESULT const TensorMap&
#else
#define RESULT char*
#endif
__device__ __forceinline__ void consume(const char* packed, const ELEMENT_TYPE* bias, RESULT y, const Sizes& s, u32 tiles, u32 full, u32 empty, Fragments& weights, u32 buffers, int wg, int thread) {
  // By a shuffle ptxas knows that branches over a warp's number do not part it; but beside BARE's stores that makes some
  // kernels slower.
#if BARE && (ELEMENT == 2 || CHANNELS_LAST)
  int warp = thread >> 5, lane = thread & 31;
#else
  int warp = __shfl_sync(0xffffffffu, thread >> 5, 0), lane = thread & 31;
#endif
  int first_subtile = SPLIT == 0 ? wg * NB : 0, offset = fragment_part(wg, thread);
  u32 buffer = buffers + (wg * 4 + warp) * BUFFER_BYTES;
  Cursor cursor = {0, 0};
  weights.cursor = {0, 0};
  weights.ring += offset;
  weights.first = true;
  int turn = 0;
#if CLAIMED
  ClaimsOf<false> claims(s.claims);
#endif
  if (SPLIT == 2 && wg == 1) named_arrive(2, CONSUMER_THREADS);  // the first turn is warpgroup 0's
#if CLAIMED && SPLIT != 2
  int following;
#pragma unroll 1
  for (int index = FIRST_TILE(s); index < s.tiles; index = following, turn++) {
#else
#pragma unroll 1
  for (int index = FIRST_TILE(s); index < s.tiles; NEXT_TILE(index, s), turn++) {
#endif
    Tile t = tile_at(index, s);
#if CLUSTER > 1
    int chunks = END_CHUNK - FIRST_CHUNK;
#else
    int chunks = chunks_of(t.variant);
#endif
    if (SPLIT == 2 && (turn & 1) != wg) {
      for (int i = 0; i < chunks; i++) cursor.next(STAGES_P);
      if (!RESIDENT) weights.skip(t.variant);
      continue;
    }
    float acc[MB][NB][32];
#if PROMOTE
    float sum[MB][NB][32];
#endif
#pragma unroll
    for (int b = 0; b < MB; b++)
#pragma unroll
      for (int nb = 0; nb < NB; nb++)
#pragma unroll
        for (int i = 0; i < 32; i++) {
          acc[b][nb][i] = 0.f;
          opaque(acc[b][nb][i]);
#if PROMOTE
          sum[b][nb][i] = 0.f;
#endif
        }
    if (SPLIT == 2) named_sync(2 + wg, CONSUMER_THREADS);
    weights.begin(packed, t, offset);
    int variant = __shfl_sync(0xffffffffu, t.variant, 0);  // so that ptxas knows that warps do not part over it
    u32 behind = 0;                                      // CONTINUED: the chunk that the last step may still read
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++, cursor.next(STAGES_P)) {
      Columns pixels = pixels_of(tiles + cursor.stage * STAGE_BYTES, first_subtile);
#if PLANE_BARRIERS > 1
      pixels.full = full + cursor.stage * (PLANE_BARRIERS * 8), pixels.empty = empty + cursor.stage * (PLANE_BARRIERS * 8), pixels.parity = cursor.parity;
      u32 last = pixels.empty + (PLANE_BARRIERS - 1) * 8;
#else
      u32 last = empty + cursor.stage * 8;
      barrier_wait(full + cursor.stage * 8, cursor.parity);
#endif
      weights.begin_chunk(chunk);
      multiply_chunk<0>(variant, acc, SUM_ARGUMENT weights, pixels, behind, lane);
      if (CONTINUED) behind = last;
      else give_back(last, lane);
    }
    weights.end();
    if (SPLIT == 2) named_arrive(2 + (wg ^ 1), CONSUMER_THREADS);
#if CONTINUED
    wgmma_wait<0>();
    give_back(behind, lane);
#endif
#if CLAIMED && SPLIT != 2
    following = claims.next();                           // ahead of the stores, which hide the wait
#endif
#if CLUSTER > 1
    add_up(ALL_SUMS, tiles, wg, thread);
#endif
#if PROMOTE
    epilogue(sum, bias, y, s, t, t.cout_block, first_subtile, buffer, warp, lane);
#else
    epilogue(acc, bias, y, s, t, t.cout_block * WGS_M + (SPLIT == 1 ? wg : 0), first_subtile, buffer, warp, lane);
#endif
  }
}

// =====================================================================================================================

#define TILES_AT 0
#define RING_AT (TILES_AT + STAGES_P * STAGE_BYTES)
#define SLOTS_AT (RING_AT + RING_FRAGMENTS * WGS_M * FRAGMENT)
#if DRAINED                            // where boxes' swizzle begins
#define BUFFERS_AT ((SLOTS_AT + STAGES_S * SLOT_BYTES + 1023) / 1024 * 1024)
#else
#define BUFFERS_AT (SLOTS_AT + (CHANNELS_LAST ? 0 : STAGES_S * SLOT_BYTES))
#endif
#define BARRIERS_AT (BUFFERS_AT + CONSUMERS * 4 * BUFFER_BYTES)
#define PIXEL_BARRIERS (STAGES_P * PLANE_BARRIERS)
#define SLOT_BARRIERS (BOX ? (CHANNELS_LAST ? STAGES_P : STAGES_S) : 0)
#if CLAIMED
#define CLAIMS_AT (BARRIERS_AT + 16 * (PIXEL_BARRIERS + STAGES_W + SLOT_BARRIERS))
#define SEGMENTS_AT (CLAIMS_AT + CLAIMS_BYTES)
#else
#define SEGMENTS_AT (BARRIERS_AT + 16 * (PIXEL_BARRIERS + STAGES_W + SLOT_BARRIERS))
#endif
#define SHARED_BYTES (SEGMENTS_AT + SEGMENTS * 4)
#if WHOLE && !SLOTS_BY_BOX
#error "whole images come by boxes"
#endif
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

#if CLUSTER > 1 && SUMS_BYTES > BUFFERS_AT
#error "a block's sums have no room where pixels and weights were"
#endif
#if CLAIMED && (!BOX || PACKS || CLUSTER > 1)
#error "tiles are claimed by the thread that loads boxes"
#endif
#if CLAIMED && (STAGES_P + STAGES_S + CHUNKS - 1) / CHUNKS + 3 > CLAIMS
#error "the thread that claims runs around the ring"
#endif
#if CLUSTER > 1 && (RESIDENT || SPLIT == 2 || BARE || SHUFFLED || DRAINED || PACKS)
#error "blocks of a cluster have a tile each, and a ring of weights"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER)
#endif
gather(const char* __restrict__ x, const char* __restrict__ packed, const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y,
#if PACKS  // weights as they are, zeros, elements between taps, whether they are float32: `packed` is written first
       const void* weight, u32* counters, int tap_step, int single,
#elif CLAIMED
       u32* counters,                  // as many as M-groups that stay with a block, and one; or null (claims.cuh)
#endif
       int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tile_count
#if BOX
       , const __grid_constant__ TensorMaps maps
#endif
) {
  extern __shared__ __align__(1024) unsigned char memory[];
#if CLAIMED
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tile_count, shared_address(memory) + CLAIMS_AT, counters};
#else
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tile_count};
#endif
  u32 base = shared_address(memory);
  u32 full = base + BARRIERS_AT, empty = full + 8 * PIXEL_BARRIERS, full_w = empty + 8 * PIXEL_BARRIERS, empty_w = full_w + 8 * STAGES_W;
  const Barriers barriers = {full, empty, empty_w + 8 * STAGES_W, empty_w + 8 * (STAGES_W + SLOT_BARRIERS)};
  int* segments = (int*)(memory + SEGMENTS_AT);
  if (threadIdx.x == 0) {
    for (int i = 0; i < PIXEL_BARRIERS; i++) {
      barrier_init(full + 8 * i, DIRECT_BOX ? 1 : PRODUCER_WARPS);
      barrier_init(empty + 8 * i, RELEASES * 4);
    }
    for (int i = 0; i < STAGES_W; i++) {
      barrier_init(full_w + 8 * i, 1);
      barrier_init(empty_w + 8 * i, RELEASES * 4);
    }
    for (int i = 0; i < SLOT_BARRIERS; i++) {
      barrier_init(barriers.landed + 8 * i, 1);
      barrier_init(barriers.left + 8 * i, PRODUCER_WARPS);
    }
#if CLAIMED
    claims_init(s.claims);
#endif
    barriers_begun();
  }
  for (int i = threadIdx.x; i < SEGMENTS; i += THREADS)
    segments[i] = (i / (ROWS_H * ROWS_D)) << 24 | (ROW_D[i / ROWS_H % ROWS_D] & 0xfff) << 12 | (ROW_H[i % ROWS_H] & 0xfff);
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role < FIRST_CONSUMER) {
#if WGMMA
    fewer_registers<PRODUCER_REGISTERS>();
#endif
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (warp < PRODUCER_WARPS) {
      if (!DIRECT_BOX) produce(x, s, segments, base + TILES_AT, base + SLOTS_AT, barriers, threadIdx.x);
    }
#if BOX
    else if (warp == LOADER_WARP && (thread & 31) == 0) {
#if CHANNELS_LAST
      load_boxes(maps, s, base + TILES_AT, STAGE_BYTES, DIRECT_BOX ? full : barriers.landed, empty);
#else
      load_boxes(maps, s, base + SLOTS_AT, SLOT_BYTES, barriers.landed, barriers.left);
#endif
    }
#endif
#if PACKS
    if (warp == WEIGHTS_WARP) named_sync<10, CONSUMER_THREADS + 32>();
    if (warp == WEIGHTS_WARP && (thread & 31) == 0) {
      wait_for_weights(counters);
      stream_weights(packed, s, base + RING_AT, full_w, empty_w);
    }
#elif WGMMA
    else if (warp == WEIGHTS_WARP && (thread & 31) == 0) {
#if WEIGHTS_BOX
      stream_weights(maps.of[MAPS], s, base + RING_AT, full_w, empty_w);
#else
      stream_weights(packed, s, base + RING_AT, full_w, empty_w);
#endif
    }
#endif
  } else {
    wait_for_results();                                 // of `pack`: the bias; nor is stored where `pack` may still read
#if WGMMA
    more_registers<CONSUMER_REGISTERS>();
#endif
#if PACKS
    pack_weights(weight, (u32*)packed, tap_step, single, counters, memory + RING_AT, threadIdx.x - FIRST_CONSUMER * 128);
    if (blockIdx.x >= s.tiles) return;                  // a block that packs alone
#endif
    Fragments weights;
    weights.ring = base + RING_AT;
    weights.full = full_w;
    weights.empty = empty_w;
#if DRAINED
    consume(packed, bias, maps.of[MAPS], s, base + TILES_AT, full, empty, weights, base + BUFFERS_AT, role - FIRST_CONSUMER, thread);
    if ((thread & 31) == 0) bulk_wait();
#else
    consume(packed, bias, y, s, base + TILES_AT, full, empty, weights, base + BUFFERS_AT, role - FIRST_CONSUMER, thread);
#endif
  }
}
