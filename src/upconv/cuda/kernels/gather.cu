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
// Constants come as macros (cuda/gather.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#include "shuffle.cuh"
#define A_SHARED 0
#include "wgmma.cuh"

#define WORDS 4                         // 32-bit words of a 16-byte unit
#define VEC (16 / ELEMENT)              // elements of a 16-byte unit
#define ROW_BYTES (CK * ELEMENT)        // a pixel's row in a tile: 32, 64 or 128
#define UNITS_PER_ROW (ROW_BYTES / 16)
#define K_STEPS (ROW_BYTES / 32)        // a matrix instruction takes 32 bytes of K
#define SEGMENTS (TILE_N * ROWS_D * ROWS_H)
// Columns of a segment with one residue modulo IN_STEP_W make a plane of PLANE neighbours; there are PLANES residues that some tap
// reads. A segment has its planes one behind the other. STRIDED_BOX: a plane is a box, of all segments of a band of rows.
#define PITCH (STRIDED_BOX ? PLANE : PLANES * PLANE)  // pixel rows from a segment to the next
#define PLANE_PITCH (STRIDED_BOX ? (SEGMENTS * PLANE + 7) / 8 * 8 : PLANE)  // the swizzle's pattern begins every 8 rows
#define PIXELS (STRIDED_BOX ? PLANES * PLANE_PITCH : SEGMENTS * PITCH)
#define COLUMN(within) ((within) % PLANE * IN_STEP_W + (PLANES == IN_STEP_W ? (within) / PLANE : RESIDUE[(within) / PLANE]))
#define PART_BYTES ((PIXELS * ROW_BYTES + 1023) / 1024 * 1024)
#define STAGE_BYTES (PARTS * PART_BYTES)
// 16-byte units of a segment: boxes of BOX_UNITS begin COLUMN_PAD columns early, at whole units; threads take the units that hold
// the row, whatever its alignment.
#define STAGING_UNITS ((COLUMNS + (SLOTS_BY_BOX && !CLASSED ? COLUMN_PAD + VEC - 1 : 2 * VEC - 2)) / VEC)
#define ROW_UNITS (SLOTS_BY_BOX ? BOX_UNITS : STAGING_UNITS)
#if WHOLE  // of small images all pixels are copied, without a halo: a slot is [box][image][channel][pixel]
#define CHANNEL_BYTES (BOX_PIXELS * ELEMENT)
#define SLOT_BOXES (IMAGE_D * IMAGE_H * IMAGE_W / BOX_PIXELS)
#else
// A slot is [box][image][channel][row][column]. There are several boxes where rows are longer than one; or, CLASSED, where rows do
// not all begin at the same place of a 16-byte unit: then rows and channels of one class, which do, are a tensor and a box.
#define CLASS_ROWS (CLASSED ? (ROWS_H + ROW_CLASSES - 1) / ROW_CLASSES : ROWS_H)
#define CHANNEL_BYTES (ROWS_D * CLASS_ROWS * ROW_UNITS * 16)
#define SLOT_BOXES (CLASSED ? ROW_CLASSES * CHANNEL_CLASSES : (STAGING_UNITS + ROW_UNITS - 1) / ROW_UNITS)
#endif
#define COPIED_BYTES (TILE_N * (CLASSED ? CK / CHANNEL_CLASSES : CK) * CHANNEL_BYTES)  // of a box
#define SLOT_BOX_BYTES ((COPIED_BYTES + 127) / 128 * 128)
#define SLOT_BYTES (SLOT_BOXES * SLOT_BOX_BYTES)
#define FRAGMENT (64 * 32)              // bytes: 64 rows of 32 bytes of K
#define CHUNKS ((CIN_G + CK - 1) / CK)
#define CONSUMERS 2
#define CONSUMER_THREADS (CONSUMERS * 128)
#if WGMMA  // two warpgroups of 56 registers produce, so that the consumers have 200: six warps turn pixels, one loads them,
           // one loads the weights
#define PRODUCER_THREADS 192
#define LOADER_WARP 6
#define WEIGHTS_WARP 7
#define FIRST_CONSUMER 2
#else      // no warpgroup can give its registers away
#define PRODUCER_THREADS 128
#define FIRST_CONSUMER 1
#endif
#define PRODUCER_WARPS (PRODUCER_THREADS / 32)
// How pixels come. BOX: the tensor copy engine brings a chunk with one instruction, zeros beyond the borders included; it wants
// row pitches of whole 16 bytes. Else threads copy. (Bulk copies of single rows are no way: 69 clocks each, 3.4 ms on kb57.)
#define BOX (WGMMA && TENSOR_MAP)
#define SLOTS_BY_BOX (BOX && !CHANNELS_LAST)
// The box is the tile: nothing to turn, and float32 is rounded to TF32, to nearest even, on its way (NOTES: 6 to 16% on seven
// channels-last layers); IEEE needs both parts.
#define DIRECT_BOX (BOX && CHANNELS_LAST && PRECISION != 1)
#define THREADS (FIRST_CONSUMER * 128 + CONSUMER_THREADS)
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
__constant__ const int ROW_D[] = OFFSETS_D;            // input offset of a tile's rows
__constant__ const int ROW_H[] = OFFSETS_H;
__constant__ const int RESIDUE[] = RESIDUES;           // of a tile's columns, counted from the first, by plane
#if PLANE_BARRIERS > 1 && !(DIRECT_BOX && STRIDED_BOX && STRAIGHT && PLANE_BARRIERS == PLANES)
#error "planes have barriers of their own where boxes bring them and a chunk is one stretch"
#endif
#if STRIDED_BOX
__constant__ const int PLANE_D[] = PLANES_D;           // a plane's first row
__constant__ const int PLANE_H[] = PLANES_H;
#endif

#if PRECISION == 0 || PRECISION == 1                   // tf32, ieee
#define STORE_BITS(v) __float_as_uint(v)
#elif PRECISION == 2
#define STORE_BITS(v) half_bits(v)
#define PACK_PAIR "cvt.rn.f16x2.f32 %0, %1, %2;\n"
#else
#define STORE_BITS(v) bfloat_bits(v)
#define PACK_PAIR "cvt.rn.bf16x2.f32 %0, %1, %2;\n"
#endif

#if ELEMENT == 2
__device__ __forceinline__ u32 pack_pair(float2 v) {   // the first of the two in the low half
  u32 r;
  asm(PACK_PAIR : "=r"(r) : "f"(v.y), "f"(v.x));
  return r;
}
#endif

struct Sizes {                                         // one layout for the packed argument block
  int batch, in_d, in_h, in_w, out_d, out_h, out_w;
  int tiles_d, tiles_h, tiles_w;                       // tiles of q per axis
  int tiles;                                           // all of them, times M_GROUPS
};

struct alignas(64) TensorMap { u64 opaque[16]; };        // a CUtensorMap; <cuda.h> does not compile under NVRTC
#define MAPS (CLASSED ? ROW_CLASSES * CHANNEL_CLASSES : 1)
struct TensorMaps { TensorMap of[MAPS + WEIGHTS_BOX]; };   // the last: the weights'

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
  t.n = q / s.tiles_d * TILE_N;
  return t;
}

__device__ __forceinline__ int entries_of(int variant) { return ENTRY[variant * (MB + 1) + MB] - ENTRY[variant * (MB + 1)]; }
__device__ __forceinline__ int chunks_of(int variant) { return entries_of(variant) ? CHUNKS : 0; }  // 0: only the bias

// Byte of the 16-byte unit `unit` of pixel row `p` in a tile.
__device__ __forceinline__ u32 unit_at(int p, int unit) {
  int swizzle = ROW_BYTES == 32 ? (p >> 2) & 1 : ROW_BYTES == 64 ? (p >> 1) & 3 : p & 7;
  return p * ROW_BYTES + ((unit ^ swizzle) << 4);
}

#include "gather_pack.cuh"        // the kernel that puts weights in the order of fragments

// A place in a ring of `count` stages, and the parity of its phase.
struct Cursor {
  u32 stage, parity;
  __device__ __forceinline__ void next(u32 count) {
    if (++stage == count) {
      stage = 0;
      parity ^= 1;
    }
  }
};

#include "gather_produce.cuh"     // producers and the loader: pixels to shared memory
#include "gather_weights.cuh"     // weights from memory to a consumer's registers
#include "gather_multiply.cuh"    // a chunk's matrix instructions
#include "gather_epilogue.cuh"    // sums to memory

__device__ __forceinline__ void consume(const char* packed, const ELEMENT_TYPE* bias, char* y, const Sizes& s, u32 tiles, u32 full, u32 empty, Fragments& weights, u32 buffers, int wg, int thread) {
  int warp = thread >> 5, lane = thread & 31;
  int first_subtile = SPLIT == 0 ? wg * NB : 0, offset = fragment_part(wg, thread);
  u32 buffer = buffers + (wg * 4 + warp) * BUFFER_BYTES;
  Cursor cursor = {0, 0};
  weights.cursor = {0, 0};
  weights.ring += offset;
  weights.first = true;
  int turn = 0;
  if (SPLIT == 2 && wg == 1) named_arrive(2, CONSUMER_THREADS);  // the first turn is warpgroup 0's
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x, turn++) {
    Tile t = tile_at(index, s);
    int chunks = chunks_of(t.variant);
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
          asm volatile("" : "+f"(acc[b][nb][i]));       // here, not behind a fence of wgmma: ptxas would serialise all (C7519)
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
#define BUFFERS_AT (SLOTS_AT + (CHANNELS_LAST ? 0 : STAGES_S * SLOT_BYTES))
#define BARRIERS_AT (BUFFERS_AT + CONSUMERS * 4 * BUFFER_BYTES)
#define PIXEL_BARRIERS (STAGES_P * PLANE_BARRIERS)
#define SLOT_BARRIERS (BOX ? (CHANNELS_LAST ? STAGES_P : STAGES_S) : 0)
#define SEGMENTS_AT (BARRIERS_AT + 16 * (PIXEL_BARRIERS + STAGES_W + SLOT_BARRIERS))
#define SHARED_BYTES (SEGMENTS_AT + SEGMENTS * 4)
#if WHOLE && !SLOTS_BY_BOX
#error "whole images come by boxes"
#endif
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gather(const char* __restrict__ x, const char* __restrict__ packed, const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y,
       int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tile_count
#if BOX
       , const __grid_constant__ TensorMaps maps
#endif
) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tile_count};
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
#if HAS_ASYNC_PROXY
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
  }
  for (int i = threadIdx.x; i < SEGMENTS; i += THREADS)
    segments[i] = (i / (ROWS_H * ROWS_D)) << 24 | (ROW_D[i / ROWS_H % ROWS_D] & 0xfff) << 12 | (ROW_H[i % ROWS_H] & 0xfff);
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role < FIRST_CONSUMER) {
#if WGMMA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(PRODUCER_REGISTERS));
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
#if WGMMA
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
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(CONSUMER_REGISTERS));
#endif
    Fragments weights;
    weights.ring = base + RING_AT;
    weights.full = full_w;
    weights.empty = empty_w;
    consume(packed, bias, y, s, base + TILES_AT, full, empty, weights, base + BUFFERS_AT, role - FIRST_CONSUMER, thread);
  }
}
