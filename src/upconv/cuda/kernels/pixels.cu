// Pixels: the gradient for the input of channels-last layers on tensor cores, for weights that stay in shared memory. Pixels are the
// rows of a matrix instruction (M), channels of the result its columns (N): a layer of 32 input channels multiplies 32 columns, where
// `gather`, whose rows are channels, leaves half of 64 rows empty, and its weights, so laid out, leave pixels half of the room.
//
// A tap of the kernel reads every STEP-th pixel of the source (the output's gradient). Taps whose offsets are equal modulo STEP, along
// each axis, read the same ones, shifted: a plane. One box of the tensor copy engine brings a chunk of a plane's channels for a tile,
// swizzled and (float32) rounded to TF32 on its way; that is a stage of the ring. Both operands are read by descriptors, a tap being
// a shift of the first by whole pixel rows. A plane's chunks come one behind the other, and so a pixel's bytes (NOTES: by chunks first,
// unet4 took 407 us instead of 397, kb81 88.6 instead of 86.8, in TF32, whose pixels are two chunks).
//
// Consumers take whole tiles in turn, so that one stores while another multiplies, and the ring runs on from tile to tile. One begins
// to wait for its stages when the one before has all of its own: a barrier's parity tells one phase from the next, not from the one
// behind that.
//
// Constants come as macros (cuda/pixels.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#define A_SHARED 1
#include "wgmma.cuh"

#define VEC (16 / ELEMENT)
#define ROW_BYTES (CK * ELEMENT)                        // a pixel's row in a plane, a column's in the weights: 32, 64 or 128
#define UNITS_PER_ROW (ROW_BYTES / 16)
#define K_STEPS (ROW_BYTES / 32)                        // a matrix instruction takes 32 bytes of K
#define CHUNKS ((CIN + CK - 1) / CK)
#define TAP_BYTES (COLUMNS * ROW_BYTES)            // of weights, of a chunk and a tap
#define WEIGHT_BYTES (CHUNKS * TAPS * TAP_BYTES)
#define SUMS_OF_M (COLUMNS / 2)                    // a thread's of 64 pixels
#define SUB_H (64 / SUB_W)                              // a subtile, the 64 rows of an instruction: 1 x 64 pixels or 8 x 8
#define SUBS_H (TILE_H / SUB_H)
#define SUBS_W (TILE_W / SUB_W)
#define MB (TILE_D * SUBS_H * SUBS_W)                   // of a tile
#define THREADS (128 + CONSUMERS * 128)
// Stages that instructions still read while the next one's are queued. Of few stages none: it would have one box on its way, not two.
#define LAG (STAGES > 3)

#define STORE_COLUMNS COLUMNS
#include "pixel_stores.cuh"
#include "columns.cuh"
#include "ring.cuh"

__constant__ const int PLANE_D[] = PLANES_D;            // a plane's first pixel, from a tile's first times STEP
__constant__ const int PLANE_H[] = PLANES_H;
__constant__ const int PLANE_W[] = PLANES_W;
__constant__ const int PLANE_MAP[] = PLANES_MAP;        // its box
__constant__ const int PLANE_BYTES[] = PLANES_BYTES;
__constant__ const int PLANE_ROWS[] = PLANES_ROWS;      // of H, in a slice
__constant__ const int PLANE_PITCH[] = PLANES_PITCH;    // pixels of a row
__constant__ const int PLANE_FIRST[] = PLANES_FIRST;    // entry of taps; one more at the end
__constant__ const int TAP_ROW[] = TAP_ROWS;            // an entry's first pixel row in its plane
__constant__ const short TAP_INDEX[] = TAP_INDICES;     // its place in the kernel

#include "tiles.cuh"

struct TensorMaps { TensorMap of[MAPS + WEIGHTS_BOX]; };  // the last: the weights'

// =====================================================================================================================
// Weights
// =====================================================================================================================

// [chunk][tap in the planes' order][channel of the result][channels of the chunk, swizzled], zeros where there is none of either; a thread
// writes 16 bytes. The weight is (COUT, CIN, kernel): contiguous, or channels-last, whose taps are `tap_step` elements apart.
template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  let_dependent_begin();                                // `pixels`
  int i = blockIdx.x * PACK_THREADS + threadIdx.x;
  if (i >= WEIGHT_BYTES / 16) return;
  int unit = i % UNITS_PER_ROW, column = i / UNITS_PER_ROW % COLUMNS, rest = i / (UNITS_PER_ROW * COLUMNS);
  int tap = TAP_INDEX[rest % TAPS], first = rest / TAPS * CK + unit * VEC;
  u32 v[VEC];
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    int cin = first + e;
    int at = column * (CIN * TAPS) + (tap_step == 1 ? cin * TAPS + tap : tap * tap_step + cin);
    v[e] = cin < CIN && column < COUT ? operand(weight[at]) : 0;
  }
  int swizzle = ROW_BYTES == 32 ? column >> 2 & 1 : ROW_BYTES == 64 ? column >> 1 & 3 : column & 7;
  write_operands(packed + (long long)(i - unit) * 16 + ((unit ^ swizzle) << 4), v);
}

#include "columns_pack.cuh"

// One thread. WEIGHTS_BOX: `packed` is not read, a box brings a tap's weights as they lie in channels-last.
__device__ __forceinline__ void load_weights(const TensorMaps& maps, const char* packed, u32 to, u32 barrier) {
  wait_for_results();                                   // of `pack`
  expect_bytes(barrier, WEIGHT_BYTES);
#if WEIGHTS_BOX
#pragma unroll 1
  for (int i = 0; i < CHUNKS * TAPS; i++)
    load_box(to + i * TAP_BYTES, maps.of[MAPS], i / TAPS * CK, TAP_INDEX[i % TAPS], 0, 0, 0, barrier);
#else
  copy_packed(to, packed, WEIGHT_BYTES, barrier);
#endif
}

// =====================================================================================================================
// Producer: one thread
// =====================================================================================================================

__device__ __forceinline__ void produce(const TensorMaps& maps, const Sizes& s, u32 ring, u32 full, u32 empty) {
  Cursor cursor = {0, 1};                               // all are free at first
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    Tile t = tile_at(index, s);
#pragma unroll 1
    for (int plane = 0; plane < PLANES; plane++)
#pragma unroll 1
      for (int chunk = 0; chunk < CHUNKS; chunk++, cursor.next()) {
        u32 barrier = full + cursor.stage * 8;
        barrier_wait(empty + cursor.stage * 8, cursor.parity);
        expect_bytes(barrier, PLANE_BYTES[plane]);
        load_box(ring + cursor.stage * STAGE_BYTES, maps.of[PLANE_MAP[plane]], chunk * CK, t.w * STEP_W + PLANE_W[plane],
                 t.h * STEP_H + PLANE_H[plane], t.d * STEP_D + PLANE_D[plane], t.n, barrier);
      }
  }
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

// Rows of ROW_BYTES, swizzled, in groups of 8 that are `apart` bytes from each other.
__device__ __forceinline__ u64 descriptor(u32 start, u32 apart) {
  constexpr u32 SWIZZLE = ROW_BYTES == 32 ? 3u : ROW_BYTES == 64 ? 2u : 1u;
  return (u64)(apart >> 4 | SWIZZLE << 30) << 32 | (start | 1u << 16);
}

// acc += a plane's chunk x the weights of its taps; `start` and `weights` as descriptors have them.
__device__ __forceinline__ void multiply_plane(float (&acc)[MB][SUMS_OF_M], u32 start, u32 weights, int plane) {
  int rows = PLANE_ROWS[plane], pitch = PLANE_PITCH[plane];
#pragma unroll 1
  for (int entry = PLANE_FIRST[plane]; entry < PLANE_FIRST[plane + 1]; entry++) {
    u32 a = uniform(start + TAP_ROW[entry] * (ROW_BYTES / 16)), b = uniform(weights + entry * (TAP_BYTES / 16));
#pragma unroll
    for (int k = 0; k < K_STEPS; k++)
#pragma unroll
      for (int m = 0; m < MB; m++) {
        const int d = m / (SUBS_H * SUBS_W), h = m / SUBS_W % SUBS_H * SUB_H, w = m % SUBS_W * SUB_W;
        u32 from = a + ((d * rows + h) * pitch + w) * (ROW_BYTES / 16) + k * 2;
        multiply(acc[m], descriptor(from, (SUB_W == 8 ? pitch : 8) * ROW_BYTES), descriptor(b + k * 2, 8 * ROW_BYTES));
      }
  }
}

__device__ __forceinline__ void store(const float (&acc)[MB][SUMS_OF_M], char* __restrict__ y, const Sizes& s, const Tile& t, int thread) {
  int lane = thread & 31;
#pragma unroll
  for (int m = 0; m < MB; m++)
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
      const int sub_d = m / (SUBS_H * SUBS_W), sub_h = m / SUBS_W % SUBS_H * SUB_H, sub_w = m % SUBS_W * SUB_W;
      int row = (thread >> 5) * 16 + (lane >> 2) + eight * 8;
      int d = t.d + sub_d, h = t.h + sub_h + row / SUB_W, w = t.w + sub_w + row % SUB_W;
      bool there = d < s.out_d && h < s.out_h && w < s.out_w;
      char* pixel = y + ((((long long)t.n * s.out_d + d) * s.out_h + h) * s.out_w + w) * (COUT * ELEMENT);
#pragma unroll
      for (int i = 0; i < UNITS; i++) store_unit(acc[m], i, eight, pixel, COUT, there, lane);
    }
}

__device__ __forceinline__ void consume(char* y, const Sizes& s, u32 ring, u32 full, u32 empty, u32 weights, int wg, int thread) {
  int lane = thread & 31, turn = 0;
  Cursor cursor = {0, 0};
  if (wg == CONSUMERS - 1) named_arrive(1, 256);        // the first turn is consumer 0's
  float acc[MB][SUMS_OF_M];
#pragma unroll 1
  for (int index = blockIdx.x; index < s.tiles; index += gridDim.x) {
    bool mine = turn == wg;
    turn = turn + 1 == CONSUMERS ? 0 : turn + 1;
    if (!mine) {
      cursor.move(CHUNKS * PLANES);
      continue;
    }
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int i = 0; i < SUMS_OF_M; i++) {
        acc[m][i] = 0.f;
        asm volatile("" : "+f"(acc[m][i]));             // here, not behind a fence of wgmma: ptxas would serialise all (C7519)
      }
    named_sync(1 + wg, 256);
    u32 behind = 0;                                     // the stage that instructions under way read
#pragma unroll 1
    for (int plane = 0; plane < PLANES; plane++)
#pragma unroll 1
      for (int chunk = 0; chunk < CHUNKS; chunk++, cursor.next()) {
        barrier_wait(full + cursor.stage * 8, cursor.parity);
        wgmma_fence();
        multiply_plane(acc, (ring + cursor.stage * STAGE_BYTES) >> 4, (weights >> 4) + chunk * (TAPS * TAP_BYTES / 16), plane);
        wgmma_commit();
        wgmma_wait<LAG>();
        if (LAG) give_back(behind, lane);
        behind = empty + cursor.stage * 8;
        if (!LAG) give_back(behind, lane);
      }
    named_arrive(1 + (wg + 1 == CONSUMERS ? 0 : wg + 1), 256);
    wgmma_wait<0>();
    if (LAG) give_back(behind, lane);
    store(acc, y, s, tile_at(index, s), thread);
  }
}

// =====================================================================================================================

#define WEIGHTS_AT (STAGES * STAGE_BYTES)
#define BARRIERS_AT (WEIGHTS_AT + WEIGHT_BYTES)
#define SHARED_BYTES (BARRIERS_AT + 16 * STAGES + 8)
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pixels(const char* __restrict__ packed, char* __restrict__ y,
       int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tiles, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles};
  u32 ring = shared_address(memory), full = ring + BARRIERS_AT, empty = full + 8 * STAGES, loaded = empty + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4);
    }
    barrier_init(loaded, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x == 0) produce(maps, s, ring, full, empty);
    else if (threadIdx.x == 32) load_weights(maps, packed, ring + WEIGHTS_AT, loaded);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(CONSUMER_REGISTERS));
    wait_for_results();                                 // of `pack`: nothing is stored where it may still read
    barrier_wait(loaded, 0);
    consume(y, s, ring, full, empty, ring + WEIGHTS_AT, role - 1, threadIdx.x & 127);
  }
}
