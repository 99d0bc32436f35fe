// Phases: the forward of layers with strides and few channels, NCHW, on tensor cores, for weights that stay in shared memory. Places q of
// the input are rows of M (64 x MB neighbours), output channels of a row's phases columns of N: a layer of 32 output channels multiplies
// 32 columns for each phase, where `gather`, whose rows of M are channels, fills 64 with several phases and multiplies all their taps.
//
// A pair is a phase of D and one of H; its sums have all phases of W, so that a thread has neighbouring outputs. A phase's taps read the
// input at q and a few offsets. So a row of the source is loaded once for each of its offsets along W (shifts), as fragments of A from
// where the tensor copy engine left it, and multiplied for every pair that reads it. Columns of a shift are those of the phases of W that
// have a tap there. Phases lie in such an order that these come first (cuda/pixels/phases.py): sums of a narrower instruction are then the first
// of a wider one's. In any other order ptxas waits for each TF32 instruction (C7511).
//
// Consumers take neighbouring tiles, each from a ring of its own, and never wait for each other. So both write their parts of a sector at
// about the same time. It is faster than an offset between them, or turns (docs/experiments.md).
//
// Constants come as macros (cuda/pixels/phases.py computes them and explains each); sizes of the input are arguments.
#include "ptx.cuh"
#define A_SHARED 0
#include "wgmma.cuh"

#include "numbers.cuh"

#define VEC (16 / ELEMENT)
#define K_STEPS (CK * ELEMENT / 32)                     // a matrix instruction takes 32 bytes of K
#define CHUNKS ((CIN + CK - 1) / CK)
#define PITCH_BYTES (PITCH * ELEMENT)                   // from a channel to the next
#define ROW_BYTES (CK * PITCH_BYTES)                    // of a row of the source
#define STAGE_BYTES (ROWS_D * ROWS_H * ROW_BYTES)       // rows are whole 128 bytes, where boxes begin
#define PAIR_COLUMNS (STEP_W * CO_COLUMNS)              // of a pair's sums
#define STEP_BYTES (USERS * SHIFT_COLUMNS * 32)         // of weights, of a step of K
#define WEIGHT_BYTES (CHUNKS * K_STEPS * STEP_BYTES)
#define THREADS (128 + CONSUMERS * 128)

#include "columns.cuh"
#include "ring.cuh"
#include "tiles.cuh"

#define TABLE(name, values)                                         \
  __device__ __forceinline__ constexpr int name(int i) {            \
    constexpr int of[] = values;                                    \
    return of[i];                                                   \
  }
TABLE(source_row, SOURCE_ROWS_AT)                       // a row of the source, from a tile's first
TABLE(first_user, FIRST_USERS)                          // of a source row; one more at the end
TABLE(pair_of, USER_PAIRS)                              // a user: a pair that reads a source row
TABLE(shift_at, SHIFTS_AT)                              // a shift's first column, from a tile's first
TABLE(shift_width, SHIFT_WIDTHS)                        // columns that it has a tap for
TABLE(width_before, SHIFT_BEFORE)                       // and those of the shifts before
TABLE(phase_d, PAIR_PHASES_D)
TABLE(phase_h, PAIR_PHASES_H)
TABLE(place_of, PLACES_OF_PHASES)                       // a phase of W's, in the order of columns

// =====================================================================================================================
// Weights
// =====================================================================================================================

__constant__ const short USER_TAP[] = USER_TAPS;        // of a user: its tap of D and H
__constant__ const short COLUMN_TAP[] = COLUMN_TAPS;    // of a shift and a phase: tap of W, or -1

// The channel of a step at place `k` of K. Float32: a lane (t = lane % 4) has the places t and t + 4, channels 2t and 2t + 1, so that
// those of four lanes are in other banks.
__device__ __forceinline__ constexpr int channel_at(int k) { return ELEMENT == 2 ? k : k % 4 * 2 + k / 4; }

// [step of K][user][shift][phase of W, output channel][32 bytes of channels, swizzled], zeros where there is none of either; a thread
// writes 16 bytes. The weight is (CIN, COUT, kernel): contiguous, or channels-last, whose taps are `tap_step` elements apart.
template <class Weight>
__device__ __forceinline__ void pack_weights(const Weight* __restrict__ weight, char* __restrict__ packed, int tap_step) {
  let_dependent_begin();                                // `phases`
  int i = blockIdx.x * PACK_THREADS + threadIdx.x;
  if (i >= WEIGHT_BYTES / 16) return;
  int unit = i % 2, column = i / 2 % SHIFT_COLUMNS, user = i / (2 * SHIFT_COLUMNS) % USERS, step = i / (2 * SHIFT_COLUMNS * USERS);
  int cout = column % CO_COLUMNS, of_w = COLUMN_TAP[column / CO_COLUMNS], tap = USER_TAP[user] * KERNEL_W + of_w;
  constexpr int KERNEL = KERNEL_D * KERNEL_H * KERNEL_W;
  u32 v[VEC];
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    int cin = step * (32 / ELEMENT) + channel_at(unit * VEC + e);
    int at = cin * (COUT * KERNEL) + (tap_step == 1 ? cout * KERNEL + tap : tap * tap_step + cout);
    v[e] = cin < CIN && cout < COUT && of_w >= 0 ? operand(weight[at]) : 0;
  }
  write_operands(packed + (long long)(i - unit) * 16 + ((unit ^ (column >> 2 & 1)) << 4), v);
}

#include "columns_pack.cuh"

// =====================================================================================================================
// Producers: a thread for each consumer, one for the weights
// =====================================================================================================================

#define FIRST_TILE(consumer) (blockIdx.x * CONSUMERS + (consumer))
#define TILES_ON (gridDim.x * CONSUMERS)

__device__ __forceinline__ void produce(const TensorMap& map, const Sizes& s, u32 ring, u32 full, u32 empty, int consumer) {
  Cursor cursor = {0, 1};                               // all are free at first
#pragma unroll 1
  for (int index = FIRST_TILE(consumer); index < s.tiles; index += TILES_ON) {
    Tile t = tile_at(index, s);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, cursor.next()) {
      u32 to = ring + cursor.stage * STAGE_BYTES, barrier = full + cursor.stage * 8;
      barrier_wait(empty + cursor.stage * 8, cursor.parity);
      expect_bytes(barrier, ROWS_D * ROWS_H * ROW_BYTES);
#pragma unroll 1
      for (int row = 0; row < ROWS_D * ROWS_H; row++)
        load_box(to + row * ROW_BYTES, map, t.w + FIRST_W, t.h + FIRST_H + row % ROWS_H, t.d + FIRST_D + row / ROWS_H, chunk * CK, t.n, barrier);
    }
  }
}

// =====================================================================================================================
// Consumers
// =====================================================================================================================

// Rows of 32 bytes, swizzled; groups of 8 lie one behind the other.
#define DESCRIPTOR(start) ((u64)(256 >> 4) << 32 | (u64)3 << 62 | (u64)1 << 16 | (start))

__device__ __forceinline__ void multiply(float (&d)[PAIR_COLUMNS / 2], int width, const u32 (&a)[4], u64 b) {
  if (width == WIDTH_0) MULTIPLY_0(d, a, b, "1");
#if WIDTHS > 1
  if (width == WIDTH_1) MULTIPLY_1(d, a, b, "1");
#endif
#if WIDTHS > 2
  if (width == WIDTH_2) MULTIPLY_2(d, a, b, "1");
#endif
#if WIDTHS > 3
  if (width == WIDTH_3) MULTIPLY_3(d, a, b, "1");
#endif
}

// A source row's fragments of a step, for each shift: lanes' q g and g + 8, of channels `channel_at`.
__device__ __forceinline__ void load_fragments(u32 (&a)[SHIFTS][MB][4], const u32 (&own)[MB], u32 row) {
#pragma unroll
  for (int shift = 0; shift < SHIFTS; shift++)
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int columns = shift_at(shift) + i % 2 * 8, half = i / 2;
        u32 at = own[m] + row + columns * ELEMENT;
#if ELEMENT == 4
        a[shift][m][i] = load_shared_u32(at + half * PITCH_BYTES);
#else
        a[shift][m][i] = load_shared_u16(at + half * 8 * PITCH_BYTES) | load_shared_u16(at + (half * 8 + 1) * PITCH_BYTES) << 16;
#endif
      }
#pragma unroll
  for (int i = 0; i < SHIFTS * MB * 4; i++) opaque(a[i / (MB * 4)][i / 4 % MB][i % 4]);
}

// acc += a source row x the weights of all pairs that read it; `weights`: of the step, as descriptors have it.
__device__ __forceinline__ void multiply_row(float (&acc)[PAIRS][MB][PAIR_COLUMNS / 2], const u32 (&a)[SHIFTS][MB][4], int row, u32 weights) {
  wgmma_fence();
#pragma unroll
  for (int shift = 0; shift < SHIFTS; shift++)
#pragma unroll
    for (int user = 0; user < USERS; user++)            // (bounds that depend on an outer loop's constant are not unrolled)
#pragma unroll
      for (int m = 0; m < MB; m++)
        if (user >= first_user(row) && user < first_user(row + 1))
          multiply(acc[pair_of(user)][m], shift_width(shift), a[shift][m], DESCRIPTOR(weights + (user * SHIFT_COLUMNS + width_before(shift)) * 2));
  wgmma_commit();
}

// A consumer's buffer: PASS output channels of its tile's rows, each in units of 16 bytes as they lie in memory, so that neighbouring lanes
// store neighbours, and parts of units at a row's ends alone. Channels lie 4 words beyond a multiple of 16 apart, for their lanes' banks.
// Rows of odd lengths begin anywhere in a sector of memory, and a store that covers sectors in part is slow. Units of 16 bytes are faster in
// most layers than 4 bytes a lane from a sector's begin on (docs/experiments.md).
#define RUNS (TILE_D * TILE_H)                          // rows of q of a tile
#define RUN (TILE_W * STEP_W)                           // outputs of one along W
#define UNITS (RUN / VEC)                               // whole ones that it may have
#define LINE_WORDS ((UNITS + !ALIGNED) * 4)             // of a row; ALIGNED: all rows begin at 16 bytes
#define CHANNEL_BYTES (((RUNS * LINE_WORDS + 11) / 16 * 16 + 4) * 4)
#define BUFFER_BYTES (PASS * CHANNEL_BYTES)
#define OF_WARP (PASS / 4)                              // channels that a warp stores
#define ROUNDS ((OF_WARP * UNITS + 31) / 32)

__device__ __forceinline__ void store(const float (&acc)[PAIRS][MB][PAIR_COLUMNS / 2], const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, const Sizes& s, const Tile& t, u32 buffer, int wg, int warp, int lane) {
  u32 plane = (u32)s.out_d * s.out_h * s.out_w;         // elements of a channel
  int channel = (lane & 3) * 2, columns = s.out_w - t.w * STEP_W;
  columns = columns < RUN ? columns : RUN;              // of a row, that exist
  y += (long long)t.n * COUT * plane * ELEMENT;
#pragma unroll
  for (int pair = 0; pair < PAIRS; pair++) {
    int first_d = t.d * STEP_D + phase_d(pair), first_h = t.h * STEP_H + phase_h(pair);
    char* begin = y + (long long)(((u32)first_d * s.out_h + first_h) * s.out_w + t.w * STEP_W) * ELEMENT;
#pragma unroll
    for (int first = 0; first < CO_COLUMNS; first += PASS) {
      OPAQUE_2(plane, channel);                         // what follows from them is found here, not kept (spills)
      named_sync(1 + wg, 128);                          // everyone has read what was there before
#pragma unroll
      for (int j = first / 8; j < CO_COLUMNS / 8; j++) {
        if (j >= (first + PASS) / 8) continue;
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const int of = 8 * j + c;                     // the channel, but for the lane's share
          float b = bias && (COUT % 8 == 0 || of + channel < COUT) ? VALUE(bias[of + channel]) : 0.f;
          u32 own = buffer + (of - first + channel) * CHANNEL_BYTES + (lane >> 2) * (STEP_W * ELEMENT);
          u32 phase = (u32)(u64)begin / ELEMENT + (of + channel) * plane;
#pragma unroll
          for (int m = 0; m < MB; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
              int position = m * 64 + warp * 16 + h * 8, run = position / TILE_W;
              u32 to = own + run * (LINE_WORDS * 4) + position % TILE_W * (STEP_W * ELEMENT);
              if (!ALIGNED) to += (phase + (u32)(run / TILE_H * STEP_D * s.out_h + run % TILE_H * STEP_H) * s.out_w) % VEC * ELEMENT;
              float v[STEP_W];
#pragma unroll
              for (int u = 0; u < STEP_W; u++) v[u] = acc[pair][m][place_of(u) * (CO_COLUMNS / 2) + 4 * j + 2 * h + c] + b;
#pragma unroll
              for (int u = 0; u < STEP_W; u++) {
#if ELEMENT == 4
                if (STEP_W % 2 || !ALIGNED) store_shared_f32(to + u * 4, v[u]);
                else if (u % 2) store_shared_f32x2(to + u * 4 - 4, v[u - 1], v[u]);
#else
                if (STEP_W % 2 || !ALIGNED) store_shared_u16(to + u * 2, STORE_BITS(v[u]));
                else if (u % 2) store_shared_u32(to + u * 2 - 2, STORE_BITS(v[u - 1]) | STORE_BITS(v[u]) << 16);
#endif
              }
            }
        }
      }
      named_sync(1 + wg, 128);
#pragma unroll 1
      for (int run = 0; run < RUNS; run++) {
        bool row = first_d + run / TILE_H * STEP_D < s.out_d && first_h + run % TILE_H * STEP_H < s.out_h;
        u32 of_run = buffer + run * (LINE_WORDS * 4);
        char* to_run = begin + (long long)((u32)(run / TILE_H * STEP_D * s.out_h + run % TILE_H * STEP_H) * s.out_w) * ELEMENT;
        u32 v[ROUNDS][4];                               // all on their way before the first is stored
        char* to[ROUNDS];
        bool whole[ROUNDS];
#pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
          int index = lane + k * 32, c = warp * OF_WARP + (OF_WARP * UNITS % 32 == 0 || index < OF_WARP * UNITS ? index / UNITS : 0), unit = index % UNITS;
          to[k] = to_run + (long long)((first + c) * (u64)plane) * ELEMENT;
          int phase = ALIGNED ? 0 : (u32)(u64)to[k] / ELEMENT % VEC;
          unit += phase > 0;                            // the one before is whole in no row
          int at = unit * VEC - phase;                  // of the unit's first element in the row
          load_shared_128(v[k], of_run + c * CHANNEL_BYTES + unit * 16);
          to[k] += at * ELEMENT;
          whole[k] = row && at + VEC <= columns && (COUT % 8 == 0 || first + c < COUT) && (OF_WARP * UNITS % 32 == 0 || index < OF_WARP * UNITS);
        }
#pragma unroll
        for (int k = 0; k < ROUNDS; k++) store_global_128_if(to[k], v[k], whole[k]);
#if !ALIGNED
        // A lane for each end of a channel's row.
        int c = warp * OF_WARP + lane / 2 % OF_WARP;
        char* line = to_run + (long long)((first + c) * (u64)plane) * ELEMENT;
        int phase = (u32)(u64)line / ELEMENT % VEC, unit = lane % 2 ? (columns + phase) / VEC : 0, at = unit * VEC - phase;
        // One unit alone may be both ends.
        bool part = row && lane < 2 * OF_WARP && (COUT % 8 == 0 || first + c < COUT) && (lane % 2 ? unit > 0 : phase > 0 || columns < VEC);
        load_shared_128(v[0], of_run + c * CHANNEL_BYTES + unit * 16);
#pragma unroll
        for (int e = 0; e < VEC; e++) {
          bool ok = part && at + e >= 0 && at + e < columns;
          if (ELEMENT == 4) store_global_if(line + (at + e) * 4, v[0][e * ELEMENT / 4], ok);
          else store_global_16_if(line + (at + e) * 2, v[0][e * ELEMENT / 4] >> e % 2 * 16, ok);
        }
#endif
      }
    }
  }
}

__device__ __forceinline__ void consume(const ELEMENT_TYPE* bias, char* y, const Sizes& s, u32 weights, u32 ring, u32 full, u32 empty, u32 buffer, int wg, int thread) {
  int lane = thread & 31;
  constexpr int GROUPS = K_STEPS * SOURCE_ROWS;         // of instructions, of a chunk
  Cursor cursor = {0, 0};
  float acc[PAIRS][MB][PAIR_COLUMNS / 2];
  u32 own[MB];                                          // where a stage has the lane's first channel and q
#pragma unroll
  for (int m = 0; m < MB; m++) {
    int position = m * 64 + (thread >> 5) * 16, run = position / TILE_W;
    own[m] = ring + (run / TILE_H * ROWS_H + run % TILE_H) * ROW_BYTES + (lane & 3) * 2 * PITCH_BYTES + (position % TILE_W + (lane >> 2)) * ELEMENT;
  }
#pragma unroll 1
  for (int index = FIRST_TILE(wg); index < s.tiles; index += TILES_ON) {
#pragma unroll
    for (int i = 0; i < PAIRS * MB * (PAIR_COLUMNS / 2); i++) {
      float& sum = acc[i / (MB * (PAIR_COLUMNS / 2))][i / (PAIR_COLUMNS / 2) % MB][i % (PAIR_COLUMNS / 2)];
      sum = 0.f;
      opaque(sum);
    }
    u32 at = weights >> 4;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++, cursor.next()) {
      u32 stage = cursor.stage * STAGE_BYTES;
      u32 a[2][SHIFTS][MB][4];
      barrier_wait(full + cursor.stage * 8, cursor.parity);
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        const int step = group / SOURCE_ROWS, row = group % SOURCE_ROWS;
        if (group == 0 && GROUPS % 2) wgmma_wait<0>();  // its registers are read by the last group's instructions
        else wgmma_wait<1>();
        load_fragments(a[group % 2], own, stage + source_row(row) * ROW_BYTES + step * (32 / ELEMENT) * PITCH_BYTES);
        multiply_row(acc, a[group % 2], row, uniform(at + step * (STEP_BYTES / 16)));
        // Behind the instructions that take what was loaded. The arrival does not wait for loads, and these are late where stores fill the
        // path to memory. Ahead of the instructions it gave wrong outputs on long rows (docs/experiments.md).
        if (group == GROUPS - 1) give_back(empty + cursor.stage * 8, lane);
      }
      at += K_STEPS * (STEP_BYTES / 16);
    }
    wgmma_wait<0>();
    store(acc, bias, y, s, tile_at(index, s), buffer, wg, thread >> 5, lane);
  }
}

// =====================================================================================================================

#define RINGS_AT ((WEIGHT_BYTES + 127) / 128 * 128)
#define BUFFERS_AT (RINGS_AT + CONSUMERS * STAGES * STAGE_BYTES)
#define BARRIERS_AT (BUFFERS_AT + CONSUMERS * BUFFER_BYTES)
#define SHARED_BYTES (BARRIERS_AT + 16 * CONSUMERS * STAGES + 8)
#if SHARED_BYTES_PLANNED != SHARED_BYTES
#error "the planner's shared memory is not the kernel's"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
phases(const char* __restrict__ packed, const ELEMENT_TYPE* __restrict__ bias, char* __restrict__ y, int out_d, int out_h, int out_w, int tiles_d, int tiles_h, int tiles_w, int tiles,
       const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Sizes s = {out_d, out_h, out_w, tiles_d, tiles_h, tiles_w, tiles};
  u32 base = shared_address(memory), full = base + BARRIERS_AT, empty = full + 8 * CONSUMERS * STAGES, landed = empty + 8 * CONSUMERS * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < CONSUMERS * STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4);
    }
    barrier_init(landed, 1);
    barriers_begun();
  }
  __syncthreads();
  int role = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (role == 0) {
    fewer_registers<PRODUCER_REGISTERS>();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (threadIdx.x & 31) return;
    if (warp < CONSUMERS) {
      produce(map, s, base + RINGS_AT + warp * (STAGES * STAGE_BYTES), full + warp * (8 * STAGES), empty + warp * (8 * STAGES), warp);
    } else if (warp == 3) {
      wait_for_results();                               // of `pack`
      expect_bytes(landed, WEIGHT_BYTES);
      copy_packed(base, packed, WEIGHT_BYTES, landed);
    }
  } else {
    int wg = role - 1;
    wait_for_results();                                 // of `pack`: the bias; nor is stored where `pack` may still read
    more_registers<CONSUMER_REGISTERS>();
    barrier_wait(landed, 0);
    consume(bias, y, s, base, base + RINGS_AT + wg * (STAGES * STAGE_BYTES), full + wg * (8 * STAGES), empty + wg * (8 * STAGES), base + BUFFERS_AT + wg * BUFFER_BYTES, wg, thread);
  }
}
