// Strides: the forward of a 1-D transposed convolution whose kernel is TAPS strides long, NCHW, on tensor cores. An output o = q STEP_W + u
// - padding sums taps a STEP_W + u of the input at q - a. So it is a product of matrices, places q x (channels x TAPS) by (channels x TAPS) x
// (output channels x phases u), whose rows go to neighbouring outputs.
//
// Places are M: fragments of A that lanes read from a channel's row as the copy engine left it, a tap one element further ahead, so that
// nothing turns pixels in shared memory, which bounds `gather` for many channels. Columns (output channel, phase) are N, weights are B,
// by descriptor.
//
// A block has two units of MB x 64 places, one for each consumer, times COLUMNS columns at a time; a unit has as many places of each of
// IMAGES images. One thread brings pixels, another weights, each by a ring of its own. Two neighbouring columns of a thread's sums are
// phases side by side, so that it stores them together.
//
// Constants come as macros (cuda/strides.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#define A_SHARED 0
#if PRECISION == 0
#define TAIL ", 1, 1"
#define STORE_BITS(v) __float_as_uint(v)
#define VALUE(v) (v)
#else
#define TAIL ", 1, 1, 0"
#define STORE_BITS(v) (PRECISION == 2 ? half_bits(v) : bfloat_bits(v))
#define VALUE(v) (PRECISION == 2 ? half_value(v) : bfloat_value(v))
#endif
#include "wgmma.cuh"

#define VEC (16 / ELEMENT)
#include "columns.cuh"
#include "ring.cuh"

__device__ __forceinline__ void multiply(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n" M_COLUMNS TYPES " {" M_REGISTERS "}, " M_A_AND_B ", 1" TAIL ";\n" : M_SUMS : OPERANDS(a, b));
}

#define CONSUMERS 2
#define UNIT (MB * 64)                                  // places of a consumer
#define CK (128 / ELEMENT)                              // channels of a chunk: a column's row has 128 bytes
#define CHUNKS ((CIN + CK - 1) / CK)
#define K_STEPS 4                                       // of a chunk: a matrix instruction takes 32 bytes of K
#define PITCH_BYTES (PITCH * ELEMENT)                   // from a channel to the next
#define IMAGE_BYTES (CK * PITCH_BYTES)
#define UNIT_BYTES (IMAGES * IMAGE_BYTES)               // a box
#define PIXEL_BYTES (CONSUMERS * UNIT_BYTES)            // of a stage
#define WIDTH (UNIT / IMAGES)                           // places of one of a unit's images
#define WEIGHT_BYTES (COLUMNS * 128)                    // of a stage: a chunk's of one tap
#define KERNEL (TAPS * STEP_W)
#define ALL_COLUMNS (COUT * STEP_W)
#define BLOCKS_N ((ALL_COLUMNS + COLUMNS - 1) / COLUMNS)
#define THREADS (128 + CONSUMERS * 128)

#define CHANNEL_OF(column) ((column) / STEP_W)
#include "places.cuh"

struct Sizes {
  int batch, out_w, places;                             // of an image
  int units, tiles;                                     // units of IMAGES images; all pairs of units, times BLOCKS_N
};

struct Unit { int n, p; };                              // first image, first place of each

// Of a place's number in its unit: which image, and which place of it. (The compiler does not know that threads are fewer than WIDTH.)
__device__ __forceinline__ int image_of(int position) { return IMAGES == 1 ? 0 : position / WIDTH; }
__device__ __forceinline__ int within(int position) { return IMAGES == 1 ? position : position % WIDTH; }

// Neighbouring blocks have the same places.
__device__ __forceinline__ int block_of(int tile) { return tile % BLOCKS_N; }
__device__ __forceinline__ Unit unit_of(int tile, int consumer, const Sizes& s) {
  int unit = tile / BLOCKS_N * CONSUMERS + consumer;
  return {unit / s.units * IMAGES, unit % s.units * WIDTH};  // the last tile's second one may be of no image
}

// =====================================================================================================================
// Weights
// =====================================================================================================================

#define PACK_UNITS (BLOCKS_N * CHUNKS * TAPS * COLUMNS * 8)

// [block][chunk][tap][column][128 bytes of channels, swizzled], zeros where there is none of either; a thread writes 16 bytes. The weight is
// (CIN, COUT, kernel), contiguous, since 1-D tensors have no channels-last.
template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int) {
  let_dependent_begin();                                // `strides`
  int i = blockIdx.x * PACK_THREADS + threadIdx.x;
  if (i >= PACK_UNITS) return;
  int unit = i % 8, column = i / 8 % COLUMNS, rest = i / (8 * COLUMNS), chunk = rest / TAPS % CHUNKS;
  int of = rest / (TAPS * CHUNKS) * COLUMNS + column, k = rest % TAPS * STEP_W + of % STEP_W;
  u32 v[VEC];
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    int cin = chunk * CK + channel_at(unit * VEC + e);
    v[e] = cin < CIN && of < ALL_COLUMNS ? operand(weight[(cin * COUT + CHANNEL_OF(of)) * KERNEL + k]) : 0;
  }
  write_operands(packed + (long long)(i - unit) * 16 + ((unit ^ (column & 7)) << 4), v);
}

#include "columns_pack.cuh"

// =====================================================================================================================
// Producers: a thread for pixels, one for weights
// =====================================================================================================================

typedef CursorOf<STAGES_W> WeightCursor;

__device__ __forceinline__ void bring_pixels(const TensorMap& map, const Sizes& s, u32 ring, u32 full, u32 empty) {
  Cursor cursor = {0, 1};                               // all are free at first
#pragma unroll 1
  for (int tile = blockIdx.x; tile < s.tiles; tile += gridDim.x) {
    const Unit units[CONSUMERS] = {unit_of(tile, 0, s), unit_of(tile, 1, s)};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, cursor.next()) {
      u32 to = ring + cursor.stage * PIXEL_BYTES, barrier = full + cursor.stage * 8;
      barrier_wait(empty + cursor.stage * 8, cursor.parity);
      expect_bytes(barrier, PIXEL_BYTES);
#pragma unroll
      for (int i = 0; i < CONSUMERS; i++) load_box(to + i * UNIT_BYTES, map, units[i].p + FIRST, chunk * CK, units[i].n, 0, 0, barrier);
    }
  }
}

__device__ __forceinline__ void bring_weights(const char* __restrict__ packed, const Sizes& s, u32 ring, u32 full, u32 empty) {
  WeightCursor cursor = {0, 1};
  wait_for_results();                                   // of `pack`
#pragma unroll 1
  for (int tile = blockIdx.x; tile < s.tiles; tile += gridDim.x) {
    const char* from = packed + (long long)block_of(tile) * (CHUNKS * TAPS) * WEIGHT_BYTES;
#pragma unroll 1
    for (int i = 0; i < CHUNKS * TAPS; i++, cursor.next(), from += WEIGHT_BYTES) {
      u32 barrier = full + cursor.stage * 8;
      barrier_wait(empty + cursor.stage * 8, cursor.parity);
      expect_bytes(barrier, WEIGHT_BYTES);
      copy_bulk(ring + cursor.stage * WEIGHT_BYTES, from, WEIGHT_BYTES, barrier);
    }
  }
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

// Where a stage has the lane's first pixel, of the first tap, and first channel, 2t.
__device__ __forceinline__ u32 own_place(int wg, int thread) {
  int position = (thread >> 5) * 16, pixel = within(position) + (thread >> 2) % 8, t = thread & 3;
  return wg * UNIT_BYTES + image_of(position) * IMAGE_BYTES + 2 * t * PITCH_BYTES + (pixel + FIRST_TAP) * ELEMENT;
}

// Fragments of steps `first` and `first` + 1: pixels g and g + 8 of a row, of channels 2t and 2t + 1 of eight, from such a place.
__device__ __forceinline__ void load_fragments(u32 (&a)[HALF][MB][4], u32 from, int first) {
#pragma unroll
  for (int step = 0; step < HALF; step++)
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 at = from + m * 64 / WIDTH * IMAGE_BYTES + (m * 64 % WIDTH + i % 2 * 8) * ELEMENT;
#if ELEMENT == 4
        a[step][m][i] = load_shared_u32(at + ((first + step) * 8 + i / 2) * PITCH_BYTES);
#else
        at += ((first + step) * 16 + i / 2 * 8) * PITCH_BYTES;
        a[step][m][i] = load_shared_u16(at) | load_shared_u16(at + PITCH_BYTES) << 16;
#endif
      }
}

// A thread's sums: of columns 8j + 2t and the next, places g and g + 8 of MB x 64.
__device__ __forceinline__ void store(const float (&acc)[MB][COLUMNS / 2], char* __restrict__ y, const Sizes& s, int tile, int wg, int thread) {
  int lane = thread & 31, out_w = s.out_w;
  Unit unit = unit_of(tile, wg, s);
  y += (long long)unit.n * COUT * out_w * ELEMENT;
  int at[MB][2];                                        // of the first phase's output in a channel; `out_w`: there is no such place
#pragma unroll
  for (int m = 0; m < MB; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int position = m * 64 + (thread >> 5) * 16, p = unit.p + within(position) + (lane >> 2) + h * 8;
      at[m][h] = p < s.places && unit.n + image_of(position) < s.batch ? p * STEP_W - LEAD : out_w;
    }
  int first = block_of(tile) * COLUMNS + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    asm volatile("" : "+r"(first), "+r"(out_w));        // what follows from them is found here, not kept (spills)
    int of = first + 8 * j, u = of % STEP_W, cout = of / STEP_W;
    bool column = ALL_COLUMNS % COLUMNS == 0 || of < ALL_COLUMNS;
    char* channel = y + ((long long)cout * out_w + u) * ELEMENT;
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        u32 v[4];
#pragma unroll
        for (int c = 0; c < 2; c++) v[c] = STORE_BITS(acc[m][4 * j + 2 * h + c]);
        char* place = channel + ((long long)image_of(m * 64 + (thread >> 5) * 16) * COUT * out_w + at[m][h]) * ELEMENT;
        bool ok = (u32)(at[m][h] + u) < (u32)out_w && column;
        if (ELEMENT == 4) store_global_64_if(place, v, ok);
        else store_global_if(place, v[0] | v[1] << 16, ok);
      }
  }
}

__device__ __forceinline__ void consume(const ELEMENT_TYPE* bias, char* y, const Sizes& s, u32 ring, u32 full, u32 empty, u32 ring_w, u32 full_w, u32 empty_w, int wg, int thread) {
  int lane = thread & 31;
  Cursor cursor = {0, 0};
  WeightCursor cursor_w = {0, 0};
  float acc[MB][COLUMNS / 2];
  u32 own = own_place(wg, thread);
#pragma unroll 1
  for (int tile = blockIdx.x; tile < s.tiles; tile += gridDim.x) {
    begin_sums(acc, bias, block_of(tile) * COLUMNS + lane % 4 * 2);
    u32 behind = 0, behind_w = 0;                       // the stages that instructions under way read
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, cursor.next()) {
      u32 stage = ring + cursor.stage * PIXEL_BYTES;
      barrier_wait(full + cursor.stage * 8, cursor.parity);
#pragma unroll
      for (int tap = 0; tap < TAPS; tap++, cursor_w.next()) {
        u32 weights = uniform(ring_w + cursor_w.stage * WEIGHT_BYTES);
        barrier_wait(full_w + cursor_w.stage * 8, cursor_w.parity);
        u32 a[HALF][MB][4], b[HALF][MB][4];
        load_fragments(a, stage + own - tap * ELEMENT, 0);
        multiply_half(acc, a, weights, 0);
        wgmma_wait<1>();
        give_back(behind_w, lane);
        if (tap == 0) give_back(behind, lane);
        load_fragments(b, stage + own - tap * ELEMENT, HALF);
        multiply_half(acc, b, weights, HALF);
        wgmma_wait<1>();
        behind_w = empty_w + cursor_w.stage * 8;
      }
      behind = empty + cursor.stage * 8;
    }
    wgmma_wait<0>();
    give_back(behind_w, lane);
    give_back(behind, lane);
    store(acc, y, s, tile, wg, thread);
  }
}

// =====================================================================================================================

#define PIXELS_AT (STAGES_W * WEIGHT_BYTES)              // whole 1,024 bytes
#define BARRIERS_AT (PIXELS_AT + STAGES * PIXEL_BYTES)
#define SHARED_BYTES (BARRIERS_AT + 16 * (STAGES + STAGES_W))
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
strides(const char* __restrict__ packed, const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, int batch, int out_w, int places, int units, int tiles,
         const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, out_w, places, units, tiles};
  u32 ring_w = shared_address(memory), ring = ring_w + PIXELS_AT, full = ring_w + BARRIERS_AT, empty = full + 8 * STAGES;
  u32 full_w = empty + 8 * STAGES, empty_w = full_w + 8 * STAGES_W;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, CONSUMERS * 4);
    }
    for (int i = 0; i < STAGES_W; i++) {
      barrier_init(full_w + 8 * i, 1);
      barrier_init(empty_w + 8 * i, CONSUMERS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(40));
    if (threadIdx.x == 0) bring_pixels(map, s, ring, full, empty);
    if (threadIdx.x == 32) bring_weights(packed, s, ring_w, full_w, empty_w);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(232));
    wait_for_results();                                 // of `pack`: the bias; nor is stored where it may still read
    consume(bias, y, s, ring, full, empty, ring_w, full_w, empty_w, role - 1, threadIdx.x & 127);
  }
}
