// Sweep: a transposed convolution without strides on tensor cores, for few output channels. Pixels are the rows of a matrix
// instruction (M), output channels its columns (N): a layer of 24 channels multiplies 24 columns, where `gather`, whose rows are
// output channels, would fill 64 rows with neighbouring slices and multiply their taps' union, of which half is useful.
//
// A block walks along D, slice by slice of the input. A slice is multiplied once with the taps of all SLOTS kernel slices side by
// side: columns are [slot][output channel], and slot j has the sums of the output slice j behind the first that this input slice
// reaches. Behind a slice the first slot's sums are complete; they are stored, and the others move up by one. So every product is
// useful but at the ends of a walk. SLOTS 1: no walk; a tile's pixels are the slices of all taps, as in `gather`.
//
// TURNS: consumers multiply in turn, so that one stores while the other multiplies; a slice's chunks all stay until both have.
//
// M-rows are neighbouring pixel rows of the tile, its halo's columns among them, whose sums nobody stores: so rows of any width fill
// the instructions. Consumers halve them: NB x 64 each.
//
// Roles, chunks and how pixels come are `gather`'s (gather_tile.cuh, gather_produce.cuh): NCHW's by way of slots and a pass that turns
// them, channels-last ones by a box that is the tile. Their results leave as they lie in registers, since a pixel's channels are
// neighbours there. Weights are B, by descriptor: for a chunk and
// a tap (of H and W) COLUMNS rows of CK channels, swizzled as pixels are; a ring's stage has W_STAGE steps of K, whole taps.
//
// Constants come as macros (cuda/pixels/sweep.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#define A_SHARED 1
#include "wgmma.cuh"
#include "gather_tile.cuh"

#define RELEASES CONSUMERS                // consumers that read a stage
#define STEP_BYTES (COLUMNS_OF_B * 32)    // of weights, of a step of K
#define TAP_BYTES (STEP_BYTES * K_STEPS)
#define CHUNK_STEPS (TAP_ENTRIES * K_STEPS)
#define SLOT_SUMS (SLOT_COLUMNS / 2)      // a thread's of an M-row pair
#define POSITIONS (NB * 64)               // M-rows of a consumer

struct Tile {
  int group;                                           // 0
  int n, d, h, w;                                      // d: the input's slice, or (SLOTS 1) the output's
  int step;                                            // of the walk
};

// Slices of a walk, and the output's of a segment.
__device__ __forceinline__ int segment_of(const Sizes& s) { return (s.out_d + s.tiles_d - 1) / s.tiles_d; }
__device__ __forceinline__ int steps_of(const Sizes& s) { return segment_of(s) + SLOTS - 1; }

__device__ __forceinline__ Tile tile_at(int index, const Sizes& s) {
  Tile t;
  int steps = steps_of(s), q = index / steps;
  t.group = 0;
  t.step = index - q * steps;
  t.w = q % s.tiles_w * TILE_W;  q /= s.tiles_w;
  t.h = q % s.tiles_h * TILE_H;  q /= s.tiles_h;
  t.d = q % s.tiles_d * segment_of(s) + t.step - (SLOTS - 1) - FIRST_SLOT;
  t.n = q / s.tiles_d;
  return t;
}
// Of slices that the input has not nothing is loaded.
__device__ __forceinline__ int chunks_of(const Tile& t, const Sizes& s) { return SLOTS == 1 || (u32)t.d < (u32)s.in_d ? CHUNKS : 0; }
#define CHUNKS_OF(tile, s) chunks_of(tile, s)
// The slices of a block's walks: the first, and from one to the next.
#define FIRST_TILE(s) blockIdx.x * steps_of(s)
#define NEXT_TILE(index, s) index = next_slice(index, s)
__device__ __forceinline__ int next_slice(int index, const Sizes& s) {
  int steps = steps_of(s);
  return (index + 1) % steps ? index + 1 : index + 1 + (gridDim.x - 1) * steps;
}

#include "gather_produce.cuh"
#include "columns.cuh"
#if CHANNELS_LAST
#define STORE_COLUMNS SLOT_COLUMNS
#include "pixel_stores.cuh"
#endif

// =====================================================================================================================
// Weights
// =====================================================================================================================

#define PACK_UNITS (CHUNKS * TAP_ENTRIES * COLUMNS_OF_B * UNITS_PER_ROW)
__constant__ const short TAP_INDEX[] = TAP_INDICES;    // of a slice's taps, in their order in a chunk

// [chunk][tap][slot, output channel][channel of the chunk], zeros where there is none of either; a thread writes 16 bytes. The weight is
// (CIN, COUT, kernel), for GRAD_INPUT (COUT, CIN, kernel): contiguous, or channels-last, whose taps are `tap_step` elements apart.
template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  let_dependent_begin();                                // `sweep`
  int i = blockIdx.x * PACK_THREADS + threadIdx.x;
  if (i >= PACK_UNITS) return;
  int unit = i % UNITS_PER_ROW, column = i / UNITS_PER_ROW % COLUMNS_OF_B, rest = i / (UNITS_PER_ROW * COLUMNS_OF_B);
  int entry = rest % TAP_ENTRIES, first = rest / TAP_ENTRIES * CK + unit * VEC;
  int slot = column / SLOT_COLUMNS, cout = column % SLOT_COLUMNS;
  int tap = (GRAD_INPUT ? SLOTS - 1 - slot : slot) * TAPS + TAP_INDEX[entry];
  constexpr int KERNEL = SLOTS * TAPS, INNER = GRAD_INPUT ? CIN : COUT;  // of the weight's second dimension
  u32 v[VEC];
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    int cin = first + e, outer = GRAD_INPUT ? cout : cin, inner = GRAD_INPUT ? cin : cout;
    int at = outer * (INNER * KERNEL) + (tap_step == 1 ? inner * KERNEL + tap : tap * tap_step + inner);
    v[e] = cin < CIN && cout < COUT ? operand(weight[at]) : 0;
  }
  write_operands(packed + (long long)rest * TAP_BYTES + unit_at(column, unit), v);
}

#include "columns_pack.cuh"

// One thread: streams every slice's weights through the ring, chunk by chunk; RESIDENT: loads them once.
__device__ __forceinline__ void stream_weights(const char* packed, const Sizes& s, u32 ring, u32 full, u32 empty) {
  wait_for_results();                                   // of `pack`
  Cursor cursor = {0, 1};
#pragma unroll 1
  for (int index = FIRST_TILE(s); index < s.tiles; NEXT_TILE(index, s)) {
    int chunks = RESIDENT ? CHUNKS : chunks_of(tile_at(index, s), s);
    const char* from = packed;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++)
#pragma unroll 1
      for (int left = CHUNK_STEPS; left > 0; left -= W_STAGE, cursor.next(STAGES_W)) {
        u32 bytes = (left < W_STAGE ? left : W_STAGE) * STEP_BYTES, barrier = full + cursor.stage * 8;
        if (!RESIDENT) barrier_wait(empty + cursor.stage * 8, cursor.parity);
        expect_bytes(barrier, bytes);
        copy_bulk(ring + cursor.stage * (W_STAGE * STEP_BYTES), from, bytes, barrier);
        from += bytes;
      }
    if (RESIDENT) return;
  }
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

// Both operands' rows lie in groups of 8, one behind the other.
#define DESCRIPTOR(start) (((u64)(8 * ROW_BYTES >> 4) << 32 | (u64)(ROW_BYTES == 32 ? 3 : ROW_BYTES == 64 ? 2 : 1) << 62) | (start))

struct Reader {                                        // of the weights' ring
  u32 ring, full, empty;
  Cursor cursor;                                       // the stage to be waited for next
  u32 held;                                            // the barrier of the stage that instructions still read; 0: none
  u32 behind;                                          // of the pixels' chunk likewise
};

// What no matrix instruction reads any more, by its barrier; 0: nothing.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
  if (lane == 0 && barrier) barrier_arrive(barrier);
}

__device__ __forceinline__ constexpr int row_at(int i) {
  constexpr int row[] = TAP_ROWS;
  return row[i];
}

// acc += pixels x weights of a chunk; `start`: of the consumer's pixels, as descriptors have it. Instructions are queued up to two stages
// of the ring ahead; what the stage before the last read is given back.
__device__ __forceinline__ void multiply_chunk(float (&acc)[NB][SLOTS * SLOT_SUMS], u32 start, Reader& weights, int lane) {
  u32 at = 0, barrier = 0;
#pragma unroll
  for (int i = 0; i < CHUNK_STEPS; i++) {
    const int k = i % K_STEPS * 2;
    if (i % W_STAGE == 0) {
      barrier_wait(weights.full + weights.cursor.stage * 8, RESIDENT ? 0 : weights.cursor.parity);
      at = uniform((weights.ring + weights.cursor.stage * (W_STAGE * STEP_BYTES)) >> 4 | 1u << 16);
      barrier = RESIDENT ? 0 : weights.empty + weights.cursor.stage * 8;
      weights.cursor.next(STAGES_W);
      wgmma_fence();
    }
#pragma unroll
    for (int nb = 0; nb < NB; nb++)
      multiply(acc[nb], DESCRIPTOR(start + (row_at(i / K_STEPS) + nb * 64) * (ROW_BYTES / 16) + k), DESCRIPTOR(at + i % W_STAGE / K_STEPS * (TAP_BYTES / 16) + k));
    if ((i + 1) % W_STAGE == 0 || i + 1 == CHUNK_STEPS) {
      wgmma_commit();
      wgmma_wait<1>();
      __syncwarp();
      give_back(weights.held, lane);
      if (i < W_STAGE) give_back(weights.behind, lane);
      weights.held = barrier;
    }
  }
}

#if CHANNELS_LAST
// The sums of the first slot: an output slice's, of the consumer's positions.
__device__ __forceinline__ void store_slice(float (&acc)[NB][SLOTS * SLOT_SUMS], const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, const Sizes& s, const Tile& t, int od, u32, int wg, int thread) {
  int lane = thread & 31;
  float b[SLOT_SUMS / 2];                               // not what sums begin with: ptxas would serialise some kernels (C7515)
#pragma unroll
  for (int i = 0; i < SLOT_SUMS / 2; i++) {
    int channel = i / 2 * 8 + (lane & 3) * 2 + i % 2;
    b[i] = bias && channel < COUT ? VALUE(bias[channel]) : 0.f;
  }
  y += (((long long)t.n * s.out_d + od) * s.out_h + t.h) * s.out_w * (COUT * ELEMENT) + (long long)t.w * (COUT * ELEMENT);
#pragma unroll
  for (int nb = 0; nb < NB; nb++) {
    float sums[SLOT_SUMS];
#pragma unroll
    for (int i = 0; i < SLOT_SUMS; i++) sums[i] = acc[nb][i] + b[i / 4 * 2 + i % 2];
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
      int position = wg * POSITIONS + nb * 64 + (thread >> 5) * 16 + (lane >> 2) + eight * 8, row = position / PITCH, w = position - row * PITCH;
      bool there = row < TILE_H && t.h + row < s.out_h && w < TILE_W && t.w + w < s.out_w;
      char* pixel = y + ((long long)row * s.out_w + w) * (COUT * ELEMENT);
#pragma unroll
      for (int i = 0; i < UNITS; i++) store_unit(sums, i, eight, pixel, COUT, there, lane);
    }
  }
}
#define BUFFER_BYTES 0
#else
// A consumer's buffer: 8 output channels of its positions by rows of the image, each in units of 16 bytes as they lie in memory, so
// that a lane stores 16 bytes wherever rows begin. Channels are so far apart that lanes that write meet different banks.
#define LINE_UNITS ((TILE_W + 2 * VEC - 2) / VEC)       // of a row
#define LINES ((POSITIONS + PITCH - 2) / PITCH + 1)     // rows that a consumer's positions are in
#define CHANNEL_PITCH ((LINES * LINE_UNITS + 3) / 4 * 64 + 16)
#define BUFFER_BYTES (8 * CHANNEL_PITCH)

// The sums of the first slot: an output slice's, of the consumer's positions.
__device__ __forceinline__ void store_slice(float (&acc)[NB][SLOTS * SLOT_SUMS], const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, const Sizes& s, const Tile& t, int od, u32 buffer, int wg, int thread) {
  int first = wg * POSITIONS, top = first / PITCH;
  long long plane = (long long)s.out_d * s.out_h * s.out_w * ELEMENT;
  int columns = s.out_w - t.w < TILE_W ? s.out_w - t.w : TILE_W, rows = s.out_h - t.h < TILE_H ? s.out_h - t.h : TILE_H;
  y += t.n * (COUT * plane) + (((long long)od * s.out_h + t.h) * s.out_w + t.w) * ELEMENT;
  u32 begin = (u32)(u64)y / ELEMENT, apart = (u32)plane / ELEMENT;  // elements, of which only the place in a unit counts
#pragma unroll
  for (int j = 0; j < SLOT_COLUMNS / 8; j++) {
    OPAQUE(thread);                                     // what follows from it is found here, not kept (spills)
    int lane = thread & 31, channel = (lane & 3) * 2;
    named_sync(2 + wg, 128);                            // everyone has read what was there before
    u32 column = buffer + channel * CHANNEL_PITCH;
    float b[2];
#pragma unroll
    for (int c = 0; c < 2; c++) b[c] = bias && (COUT % 8 == 0 || 8 * j + channel + c < COUT) ? VALUE(bias[8 * j + channel + c]) : 0.f;
#pragma unroll
    for (int nb = 0; nb < NB; nb++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int position = first + nb * 64 + (thread >> 5) * 16 + (lane >> 2) + h * 8, row = position / PITCH, w = position - row * PITCH;
        u32 place = column + (row - top) * (LINE_UNITS * 16) + w * ELEMENT;
        u32 phase = begin + row * s.out_w + (8 * j + channel) * apart;  // where the row begins
#pragma unroll
        for (int c = 0; c < 2; c++) {
          u32 to = place + c * CHANNEL_PITCH + ((phase + c * apart) % VEC) * ELEMENT;
          float v = acc[nb][4 * j + 2 * h + c] + b[c];
#if ELEMENT == 4
          if (w < TILE_W) store_shared_f32(to, v);
#else
          if (w < TILE_W) store_shared_u16(to, STORE_BITS(v));
#endif
        }
      }
    named_sync(2 + wg, 128);
#pragma unroll 2  // more of them spill
    for (int i = 0; i < (8 * LINES * LINE_UNITS + 127) / 128; i++) {
      int index = thread + i * 128, unit = index % LINE_UNITS, line = index / LINE_UNITS, c = line % 8, row = top + line / 8;
      char* to = y + (8 * j + c) * plane + (long long)row * s.out_w * ELEMENT;
      int at = unit * VEC - (int)((u32)(u64)to / ELEMENT % VEC);  // of the unit's first element in the row
      int low = first - row * PITCH, high = low + POSITIONS;      // what of the row the consumer has
      low = low > 0 ? low : 0, high = high < columns ? high : columns;
      bool live = index < 8 * LINES * LINE_UNITS && row < rows && (COUT % 8 == 0 || 8 * j + c < COUT);
      bool whole = live && at >= low && at + VEC <= high;
      u32 v[4];
      load_shared_128(v, buffer + (live ? c * CHANNEL_PITCH + (line / 8 * LINE_UNITS + unit) * 16 : 0));
      to += at * ELEMENT;
      store_global_128_if(to, v, whole);
      if (live && !whole && at + VEC > low && at < high) {
#pragma unroll
        for (int e = 0; e < VEC; e++) {
          bool ok = at + e >= low && at + e < high;
          if (ELEMENT == 4) store_global_if(to + e * 4, v[e * ELEMENT / 4], ok);
          else store_global_16_if(to + e * 2, v[e * ELEMENT / 4] >> e % 2 * 16, ok);
        }
      }
    }
  }
}
#endif

__device__ __forceinline__ void consume(const ELEMENT_TYPE* bias, char* y, const Sizes& s, u32 tiles, u32 full, u32 empty, Reader& weights, u32 buffer, int wg, int thread) {
  int lane = thread & 31;
  Cursor cursor = {0, 0};
  if (TURNS && wg == 1) named_arrive(4, CONSUMER_THREADS);  // the first turn is warpgroup 0's
  float acc[NB][SLOTS * SLOT_SUMS];
#pragma unroll 1
  for (int index = FIRST_TILE(s); index < s.tiles; NEXT_TILE(index, s)) {
    Tile t = tile_at(index, s);
    int chunks = chunks_of(t, s), od = t.d + FIRST_SLOT;
#pragma unroll
    for (int nb = 0; nb < NB; nb++)
#pragma unroll
      for (int i = 0; i < SLOTS * SLOT_SUMS; i++) {
        const bool carried = i < (SLOTS - 1) * SLOT_SUMS;
        acc[nb][i] = carried && t.step > 0 ? acc[nb][carried ? i + SLOT_SUMS : i] : 0.f;
        opaque(acc[nb][i]);
      }
    weights.held = weights.behind = 0;
    if (TURNS) named_sync(4 + wg, CONSUMER_THREADS);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++, cursor.next(STAGES_P)) {
      barrier_wait(full + cursor.stage * 8, cursor.parity);
      multiply_chunk(acc, uniform((tiles + cursor.stage * STAGE_BYTES + wg * (POSITIONS * ROW_BYTES)) >> 4 | 1u << 16), weights, lane);
      weights.behind = empty + cursor.stage * 8;
    }
    wgmma_wait<0>();
    if (TURNS) named_arrive(4 + (wg ^ 1), CONSUMER_THREADS);
    __syncwarp();
    give_back(weights.held, lane);
    give_back(weights.behind, lane);
    if (t.step >= SLOTS - 1 && od < s.out_d) store_slice(acc, bias, y, s, t, od, buffer, wg, thread);
  }
}

// =====================================================================================================================

#define TILES_AT 0
#define RING_AT (TILES_AT + STAGES_P * STAGE_BYTES)
#define SLOTS_AT (RING_AT + STAGES_W * W_STAGE * STEP_BYTES)
#define SLOT_STAGES (CHANNELS_LAST ? 0 : STAGES_S)
#define BUFFERS_AT (SLOTS_AT + SLOT_STAGES * SLOT_BYTES)
#define BARRIERS_AT (BUFFERS_AT + CONSUMERS * BUFFER_BYTES)
#define SHARED_BYTES (BARRIERS_AT + 16 * (STAGES_P + STAGES_W + SLOT_STAGES))
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif
#if !BOX || PARTS != 1 || STRIDED_BOX || W_STAGE % K_STEPS
#error "boxes bring pixels, in one part, channels-last ones one for a chunk, and a stage of the ring has whole taps"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sweep(const char* __restrict__ x, const char* __restrict__ packed, const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y,
      int batch, int in_d, int in_h, int in_w, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tile_count,
      const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {batch, in_d, in_h, in_w, out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tile_count};
  u32 base = shared_address(memory);
  u32 full = base + BARRIERS_AT, empty = full + 8 * STAGES_P, full_w = empty + 8 * STAGES_P, empty_w = full_w + 8 * STAGES_W;
  const Barriers barriers = {full, empty, empty_w + 8 * STAGES_W, empty_w + 8 * (STAGES_W + SLOT_STAGES)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES_P; i++) {
      barrier_init(full + 8 * i, DIRECT_BOX ? 1 : PRODUCER_WARPS);
      barrier_init(empty + 8 * i, RELEASES * 4);
    }
    for (int i = 0; i < STAGES_W; i++) {
      barrier_init(full_w + 8 * i, 1);
      barrier_init(empty_w + 8 * i, RELEASES * 4);
    }
    for (int i = 0; i < SLOT_STAGES; i++) {
      barrier_init(barriers.landed + 8 * i, 1);
      barrier_init(barriers.left + 8 * i, PRODUCER_WARPS);
    }
    barriers_begun();
  }
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role < FIRST_CONSUMER) {
    fewer_registers<PRODUCER_REGISTERS>();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
#if CHANNELS_LAST
    if (warp == LOADER_WARP && (thread & 31) == 0) load_boxes(maps, s, base + TILES_AT, STAGE_BYTES, full, empty);
#else
    if (warp < PRODUCER_WARPS) produce(x, s, nullptr, base + TILES_AT, base + SLOTS_AT, barriers, threadIdx.x);
    else if (warp == LOADER_WARP && (thread & 31) == 0) load_boxes(maps, s, base + SLOTS_AT, SLOT_BYTES, barriers.landed, barriers.left);
#endif
    else if (warp == WEIGHTS_WARP && (thread & 31) == 0) stream_weights(packed, s, base + RING_AT, full_w, empty_w);
  } else {
    wait_for_results();                                 // of `pack`: the bias; nor is stored where `pack` may still read
    more_registers<CONSUMER_REGISTERS>();
    Reader weights = {base + RING_AT, full_w, empty_w, {0, 0}, 0, 0};
    consume(bias, y, s, base + TILES_AT, full, empty, weights, base + BUFFERS_AT + (role - FIRST_CONSUMER) * BUFFER_BYTES, role - FIRST_CONSUMER, thread);
  }
}
